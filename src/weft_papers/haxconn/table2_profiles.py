"""Tables 2 and 5: single networks as published, as shipped with weft, and as estimated by weft."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from weft.reports.exhibits import DASHED, MUTED, Axis, Bars, Curve, Drawable, Panel, Texts
from weft_map.profiles import ProfileGroup, SocProfile
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Paper, Row, Table, beside
from weft_papers.haxconn.lab import CHIPS, NETWORKS, ORIN, XAVIER, chip, profile, total_ms
from weft_papers.layerweaver.lab import mean

GROUPS = ("0-9", "10-24", "25-38", "39-53", "52-66", "67-80", "81-94", "95-109", "110-123", "124-140")
"""The numbers of GoogLeNet's layers in each group of Table 2."""
MODULES = ("", "inception3a", "inception3b", "pool3", "inception4b", "inception4c", "inception4d", "inception4e",
           "inception5a", "inception5b")  # fmt: skip
"""For each group of Table 2, the prefix of its first layer's name in the zoo's GoogLeNet."""
UNITS = ("gpu", "dla")
COLOURS = {"gpu": "#0072b2", "dla": "#d55e00"}


# Table 2


class TableGroup(NamedTuple):
    """A group of Table 2: its time and memory demand, by unit."""

    time_ms: dict[str, float]
    demand_gb_s: dict[str, float]


def estimated_groups() -> list[TableGroup]:
    """Estimate GoogLeNet on Xavier from the network and the chip's description, merged into the groups of Table 2."""
    members: list[list[ProfileGroup]] = []
    for group in profile("googlenet", XAVIER, "estimated").groups:
        if not members or (len(members) < len(MODULES) and group.name.startswith(MODULES[len(members)])):
            members.append([])
        members[-1].append(group)
    return [_merge_groups(groups) for groups in members]


def _merge_groups(groups: Sequence[ProfileGroup]) -> TableGroup:
    """Sum the times of consecutive groups; the demand is their mean, weighted by time."""
    time_s = {unit: sum(group.costs[unit].time_s for group in groups) for unit in UNITS}
    moved_gb = {
        unit: sum(group.costs[unit].time_s * group.costs[unit].demand_gb_s for group in groups) for unit in UNITS
    }
    return TableGroup(
        {unit: 1e3 * time_s[unit] for unit in UNITS}, {unit: moved_gb[unit] / time_s[unit] for unit in UNITS}
    )


def table_2(paper: Paper, out: Path) -> Exhibit:
    """Reproduce Table 2: GoogLeNet's groups on Xavier, as shipped with weft and as estimated, beside the printed."""
    shipped, estimates = profile("googlenet", XAVIER, "measured"), estimated_groups()
    peak_gb_s, body, differences = chip(XAVIER).bandwidth_gb_s, [], []
    for index, (group, estimate) in enumerate(zip(shipped.groups, estimates, strict=True)):
        printed = {key: paper[f"t2_{index}_{key}"].value for key in ("gpu", "dla", "ratio", "move", "memory")}
        ours = _as_printed(group, peak_gb_s)
        differences += [abs(ours[key] / printed[key] - 1) for key in ours if key != "ratio"]
        estimated_ms = [
            estimate.time_ms["gpu"],
            estimate.time_ms["dla"],
            estimate.time_ms["dla"] / estimate.time_ms["gpu"],
        ]
        body.append(
            (
                group.name, *(f"{ours[key]:.3g} ({printed[key]:g})" for key in printed),
                *(f"{value:.3f}" for value in estimated_ms), f"{100 * estimate.demand_gb_s['gpu'] / peak_gb_s:.1f}",
            )
        )  # fmt: skip
    header = (
        "layers", "GPU ms", "DLA ms", "ratio", "move to DLA ms", "memory %", "estimated GPU ms", "estimated DLA ms",
        "estimated ratio", "estimated memory %",
    )  # fmt: skip
    table = Table("Table 2: GoogLeNet on Xavier: shipped, in brackets as printed, and estimated", header, tuple(body))
    rows = [
        _equal_row(differences),
        *_sum_rows(paper, shipped),
        *_estimate_rows(paper, estimates, peak_gb_s),
        *_ratio_rows(paper),
    ]
    return Exhibit(tuple(rows), (table,), (_groups_picture(paper, out, estimates),))


def _as_printed(group: ProfileGroup, peak_gb_s: float) -> dict[str, float]:
    """The numbers of a group in the columns and units of Table 2; memory in percent of *peak_gb_s*."""
    gpu, dla = (group.costs[unit] for unit in UNITS)
    return {
        "gpu": 1e3 * gpu.time_s,
        "dla": 1e3 * dla.time_s,
        "ratio": dla.time_s / gpu.time_s,
        "move": 1e3 * gpu.out_s,
        "memory": 100 * gpu.demand_gb_s / peak_gb_s,
    }


def _equal_row(differences: Sequence[float]) -> Row:
    """Row with the largest of the relative *differences* between the shipped profile and Table 2."""
    count, largest = len(differences), 100 * max(differences)
    why = f"the table is the profile that ships: {count} numbers; the printed ratios are of times before rounding"
    return Row("Table 2", "largest difference of the measured profile from the table", None, largest, "%", why)


def _sum_rows(paper: Paper, shipped: SocProfile) -> list[Row]:
    """Rows with the sum of Table 2's groups on each unit, beside GoogLeNet's total in Table 5."""
    rows = []
    for unit in UNITS:
        total_s = shipped.total_s(unit)
        assert total_s is not None
        printed, ours = paper[f"t5_googlenet_{XAVIER}_{unit}"].value, 1e3 * total_s
        why = beside(ours, printed, "the paper's Table 2 adds up to more than its Table 5 says of the same network")
        rows.append(
            Row("Table 2", f"sum of the groups on the {unit.upper()}; printed: Table 5", printed, ours, " ms", why)
        )
    return rows


def _estimate_rows(paper: Paper, estimates: Sequence[TableGroup], peak_gb_s: float) -> list[Row]:
    """Rows with the errors of weft's estimated times and demands against Table 2; *peak_gb_s*: of the memory."""
    rows = []
    for unit in UNITS:
        ratios = [
            estimate.time_ms[unit] / paper[f"t2_{index}_{unit}"].value for index, estimate in enumerate(estimates)
        ]
        error = 100 * mean(abs(ratio - 1) for ratio in ratios)
        why = (
            f"from the network and the chip's description alone: {min(ratios):.2f} to {max(ratios):.2f} of the printed"
        )
        rows.append(
            Row("Table 2", f"estimated times of the groups on the {unit.upper()}, mean error", None, error, "%", why)
        )
    shares = [
        estimate.demand_gb_s["gpu"] / (peak_gb_s * paper[f"t2_{index}_memory"].value / 100)
        for index, estimate in enumerate(estimates)
    ]
    why = (
        f"from {min(shares):.2f} to {max(shares):.2f}; the profiler's percentage is a maximum over the levels of "
        "memory, an estimate counts each tensor once"
    )
    return [*rows, Row("Table 2", "estimated demand on the GPU over the printed, mean", None, mean(shares), "x", why)]


def _ratio_rows(paper: Paper) -> list[Row]:
    """Rows with the smallest and largest DLA time over GPU time among the groups of three networks."""
    rows = []
    for model, origin in (("googlenet", "measured"), ("vgg19", "derived"), ("resnet152", "derived")):
        # The conditional gives the string its type, Origin.
        shipped = profile(model, XAVIER, "measured" if origin == "measured" else "derived")
        ratios = [group.costs["dla"].time_s / group.costs["gpu"].time_s for group in shipped.groups]
        for end, ours in (("low", min(ratios)), ("high", max(ratios))):
            printed = paper[f"ratio_{end}_{model}"].value
            reason = "the table itself, rounded" if origin == "measured" else "derived: only the totals are published"
            quantity = f"{'smallest' if end == 'low' else 'largest'} DLA over GPU time of a group of {NETWORKS[model]}"
            rows.append(Row("3.2", quantity, printed, ours, "x", beside(ours, printed, reason)))
    return rows


def _groups_picture(paper: Paper, out: Path, estimates: Sequence[TableGroup]) -> Figure:
    """Draw printed and estimated times and demands of GoogLeNet's groups."""
    colours = {
        "GPU, Table 2": "#0072b2",
        "GPU, estimated": "#9ecae1",
        "DLA, Table 2": "#d55e00",
        "DLA, estimated": "#f5b48a",
    }
    times_ms = {}
    for unit in UNITS:
        times_ms[f"{unit.upper()}, Table 2"] = [paper[f"t2_{index}_{unit}"].value for index in range(10)]
        times_ms[f"{unit.upper()}, estimated"] = [group.time_ms[unit] for group in estimates]
    peak_gb_s = chip(XAVIER).bandwidth_gb_s
    demand_gb_s = {
        "GPU, Table 2": [peak_gb_s * paper[f"t2_{index}_memory"].value / 100 for index in range(10)],
        "GPU, estimated": [group.demand_gb_s["gpu"] for group in estimates],
    }
    x = Axis(label="layers of GoogLeNet")
    panels = [
        Panel([Bars([*GROUPS], {name: times_ms[name] for name in colours}, colours)], x=x, y=Axis(label="time (ms)")),
        Panel([Bars([*GROUPS], demand_gb_s, colours)], x=x, y=Axis(label="demand (GB/s)")),
    ]
    title = "Table 2: GoogLeNet's groups on Xavier"
    return pictures.picture(out, "table2-googlenet", title, panels, size=(11, 5.6), share_x=True)


# Table 5


class Total(NamedTuple):
    """The time in milliseconds of a network alone on one unit: as printed, as derived and as estimated."""

    model: str
    soc: str
    unit: str
    printed: float
    derived: float
    estimated: float

    @property
    def ratio(self) -> float:
        return self.estimated / self.printed


def totals(paper: Paper) -> list[Total]:
    """All totals that Table 5 prints and both kinds of profile have."""
    complete = []
    for soc in (ORIN, XAVIER):
        for model in NETWORKS:
            for unit in UNITS:
                key = f"t5_{model}_{soc}_{unit}"
                derived, estimated = (total_ms(model, soc, unit, origin) for origin in ("derived", "estimated"))
                if key in paper and derived is not None and estimated is not None:
                    complete.append(Total(model, soc, unit, paper[key].value, derived, estimated))
    return complete


def table_5(paper: Paper, out: Path) -> Exhibit:
    """Reproduce Table 5: networks alone on each unit, by derived and by estimated profiles."""
    all_totals = totals(paper)
    body = tuple(
        (
            NETWORKS[total.model], CHIPS[total.soc], total.unit.upper(), f"{total.printed:g}", f"{total.derived:.4g}",
            f"{total.estimated:.3f}", f"{total.ratio:.2f}",
        )
        for total in all_totals
    )  # fmt: skip
    header = ("network", "SoC", "unit", "printed ms", "derived ms", "estimated ms", "estimated / printed")
    table = Table("Table 5: networks alone", header, body)
    largest = 100 * max(abs(total.derived / total.printed - 1) for total in all_totals)
    why = f"the derived profiles of {len(all_totals)} totals are scaled to them, so this is by construction"
    rows = [Row("Table 5", "largest difference of a derived profile's total", None, largest, "%", why)]
    rows += [_fit_row(all_totals, soc, unit) for soc in (ORIN, XAVIER) for unit in UNITS]
    return Exhibit(tuple(rows), (table,), (_totals_picture(out, all_totals),))


def _fit_row(all_totals: Sequence[Total], soc: str, unit: str) -> Row:
    """Row with the mean error of the estimated totals on one unit of one SoC, VGG-19 left out."""
    selected = [total for total in all_totals if (total.soc, total.unit) == (soc, unit)]
    others = [total for total in selected if total.model != "vgg19"]
    vgg = next(total for total in selected if total.model == "vgg19")
    worst = max(others, key=lambda total: abs(total.ratio - 1))
    why = (
        f"constants of the chip fitted to this table; {NETWORKS[worst.model]} is {worst.ratio:.2f} of the printed; "
        f"VGG-19 ({vgg.ratio:.2f}) is left out: the artifact's has no large fully connected layers, ours has"
    )
    error = 100 * mean(abs(total.ratio - 1) for total in others)
    return Row("Table 5", f"estimated totals, {unit.upper()} of {CHIPS[soc]}, mean error", None, error, "%", why)


def _totals_picture(out: Path, all_totals: Sequence[Total]) -> Figure:
    """Draw estimated over printed totals, a panel per SoC; networks off by more than 20 % are named."""
    x, y = Axis(label="Table 5 (ms)", scale="log"), Axis(label="estimated from ONNX (ms)", scale="log")
    panels = []
    for soc in (ORIN, XAVIER):
        soc_totals = [total for total in all_totals if total.soc == soc]
        ends = [0.8 * min(total.printed for total in soc_totals), 1.6 * max(total.estimated for total in soc_totals)]
        marks: list[Drawable] = [Curve(ends, ends, None, MUTED, dash=DASHED, width=1)]
        for unit in UNITS:
            shown = [total for total in soc_totals if total.unit == unit]
            printed, estimated = [total.printed for total in shown], [total.estimated for total in shown]
            marks.append(Curve(printed, estimated, unit.upper(), COLOURS[unit], "o", "", size=6))
        marks += [_name_text(total) for total in soc_totals if abs(total.ratio - 1) > 0.2]
        panels.append(Panel(marks, CHIPS[soc], x, y, grid="both"))
    title = "Table 5: networks alone, printed and estimated (chips fitted)"
    return pictures.picture(out, "table5-totals", title, panels, size=(11, 5.2), columns=2)


def _name_text(total: Total) -> Texts:
    """The network's name beside its dot, on the side away from the diagonal."""
    x, y, words = [total.printed], [total.estimated], [NETWORKS[total.model]]
    if total.ratio > 1:
        return Texts(x, y, words, align="right", offset=(-6, 3))
    return Texts(x, y, words, align="left", offset=(6, -8))
