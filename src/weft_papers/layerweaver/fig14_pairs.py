"""Fig. 14 to 16: throughput, utilisation and slowdown of sixteen pairs of models on two NPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.reports.exhibits import INK, Axis, Bars, Curve, HeatMap, Panel, ReferenceLine, Strokes
from weft.simulation.report import Report
from weft_papers import pictures
from weft_papers.base import Exhibit, Paper, Row, Table, beside
from weft_papers.layerweaver.lab import (
    PAIRS,
    Models,
    Options,
    Scene,
    aimt_options,
    bound,
    demand,
    geomean,
    joined_names,
    mean,
    report_of_run,
    sweep_thresholds,
)

PLAIN = ("fifo", "round-robin")
"""Policies that the slower plain engine runs, so with fewer rounds; longer runs hardly change their throughput."""
SHOWN = ("fifo", "round-robin", "aimt", "layerweaver", "weft")


@dataclass(frozen=True)
class PairPanel:
    """The runs behind panel (a) or (b) of Fig. 14 to 16: its scene, and the report of every policy on every pair."""

    letter: str
    scene: Scene
    pairs: tuple[Models, ...]
    thresholds: Options
    reports: dict[str, tuple[Report, ...]]

    def stps(self, policy: str) -> list[float]:
        return [report.stp for report in self.reports[policy]]

    @property
    def names(self) -> list[str]:
        return [joined_names(pair) for pair in self.pairs]


def panel(letter: str, scene: Scene, queries: int, pairs: tuple[Models, ...] = PAIRS) -> PairPanel:
    """Run every policy on every pair; AI-MT with the thresholds that suit all pairs best."""
    thresholds = aimt_options(scene, pairs)
    reports = {
        policy: tuple(
            report_of_run(
                scene,
                pair,
                policy,
                max(8, queries // 3) if policy in PLAIN else queries,
                thresholds if policy == "aimt" else (),
            )
            for pair in pairs
        )
        for policy in SHOWN
    }
    return PairPanel(letter, scene, pairs, thresholds, reports)


def figure_14(paper: Paper, out: Path, panels: tuple[PairPanel, ...]) -> Exhibit:
    """Draw Fig. 14: system throughput (STP) of two models together, where one model at a time has 1."""
    shown = []
    for pair_panel in panels:
        series = {policy: [*pair_panel.stps(policy), geomean(pair_panel.stps(policy))] for policy in SHOWN}
        bars = Bars([*pair_panel.names, "geomean"], series, pictures.POLICIES)
        bounds = [bound(pair_panel.scene, pair) for pair in pair_panel.pairs]
        printed = [
            ReferenceLine(paper[f"{key}_{pair_panel.letter}"].value, _label(paper, pair_panel, key, name))
            for key, name in (("stp_mean", "mean"), ("stp_max", "best pair"))
        ]
        y = Axis(label="system throughput (STP)", low=0.8, high=max(2.0, *bounds) + 0.05)
        # a stroke as wide as its group of bars; [:-1]: the geomean has no bound
        strokes = Strokes(bars.places()[:-1], bounds, width=0.88, label="bound")
        shown.append(Panel([bars, strokes, *printed], f"({pair_panel.letter}) {pair_panel.scene}", y=y))
    title = "Fig. 14: system throughput of two models together (one at a time: 1.00)"
    picture = pictures.picture(out, "fig14-throughput", title, shown, size=(13, 3.4 * len(panels) + 0.9))
    rows = tuple(row for pair_panel in panels for row in _throughput_rows(paper, pair_panel))
    return Exhibit(rows, tuple(_throughput_table(pair_panel) for pair_panel in panels), (picture,))


def _label(paper: Paper, pair_panel: PairPanel, key: str, name: str) -> str:
    return f"paper's\n{name} {paper[f'{key}_{pair_panel.letter}'].value:.3f}"


def _throughput_rows(paper: Paper, pair_panel: PairPanel) -> list[Row]:
    """Rows of a panel of Fig. 14 that the paper has numbers or claims for."""
    figure, woven, letter = f"Fig. 14{pair_panel.letter}", pair_panel.stps("layerweaver"), pair_panel.letter
    mean_, best = paper[f"stp_mean_{letter}"].value, paper[f"stp_max_{letter}"].value
    lead = 100 * (geomean(woven) / geomean(pair_panel.stps("aimt")) - 1)
    top = pair_panel.names[int(np.argmax(woven))]
    inputs = (
        "sequence length, NCF's tables and the array's mapping are not printed; the sensitivity figures show how far "
        "each moves it"
    )
    weak = f"{mean_ / (1 + paper[f'over_aimt_{letter}'].value / 100):.3f}"
    aimt_why = (
        f"our AI-MT is stronger, not our Layerweaver weaker: the paper's has {weak}, the dashed line of the sweep "
        "picture (at 16 tokens a compute threshold of 2 to 5 % of the buffer); the paper prints neither grid nor "
        "choice, and drawing lots where ours takes the longest-waiting layer changes it by less than 1 %"
    )
    behind = [
        name
        for name, ours, theirs in zip(pair_panel.names, woven, pair_panel.stps("aimt"), strict=True)
        if ours <= theirs
    ]
    return [
        Row(figure, "STP of layerweaver, geomean", mean_, geomean(woven), "x", beside(geomean(woven), mean_, inputs)),
        Row(
            figure, f"STP of layerweaver, best pair (ours: {top})", best, max(woven), "x",
            beside(max(woven), best, "the best pair is the one whose two models are most one-sided, so the NCF and "
                   "MobileNet assumptions weigh most here; the paper does not name its pair in the text"),
        ),
        Row(figure, "layerweaver over aimt, geomean", paper[f"over_aimt_{letter}"].value, lead, "%", aimt_why),
        Row(
            figure, "pairs where layerweaver beats aimt", len(pair_panel.pairs),
            len(pair_panel.pairs) - len(behind), "pairs",
            'the text says "consistently outperforms AI-MT across all workloads"; with its thresholds tuned AI-MT is '
            f"ahead on {', '.join(behind) or 'none'}",
        ),
        Row(
            figure, "STP of fifo, geomean", 1.0, geomean(pair_panel.stps("fifo")), "x",
            "one model at a time is 1 by the definition of STP; ours is above by the one switch of models per run, "
            "where the second model's weights arrive under the first one's compute",
        ),
        *_unprinted_rows(figure, pair_panel),
    ]  # fmt: skip


def _unprinted_rows(figure: str, pair_panel: PairPanel) -> list[Row]:
    """Rows of a panel of Fig. 14 without a published number: other policies, and fractions of the bound."""
    fractions = {
        policy: [report.fraction_of_bound for report in pair_panel.reports[policy]]
        for policy in ("layerweaver", "aimt", "weft")
    }
    alternating = geomean(pair_panel.stps("round-robin"))
    return [
        Row(
            figure, "STP of aimt, geomean", None, geomean(pair_panel.stps("aimt")), "x",
            f"swept: {', '.join(f'{key} {value}' for key, value in pair_panel.thresholds)}",
        ),
        Row(
            figure, "STP of round-robin, geomean", None, alternating, "x",
            "not in the paper, whose baselines never let two models overlap: whole queries in turn with eager prefetch",
        ),
        Row(
            figure, "STP of weft, geomean", None, geomean(pair_panel.stps("weft")), "x",
            "not in the paper: our policy, which prices idle time and looks ahead",
        ),
        *(
            Row(
                figure, f"fraction of the bound, {policy}, {statistic}", None, value, "",
                "not in the paper: the two-resource bound no schedule can beat",
            )
            for policy, values in fractions.items()
            for statistic, value in (("geomean", geomean(values)), ("worst pair", min(values)))
        ),
    ]  # fmt: skip


def _throughput_table(pair_panel: PairPanel) -> Table:
    """Table of a panel of Fig. 14: STP of every policy, the bound, and fractions of the bound, by pair."""
    body = [
        (
            joined_names(pair),
            *(f"{pair_panel.reports[policy][index].stp:.3f}" for policy in SHOWN),
            f"{bound(pair_panel.scene, pair):.3f}",
            f"{pair_panel.reports['layerweaver'][index].fraction_of_bound:.3f}",
            f"{pair_panel.reports['weft'][index].fraction_of_bound:.3f}",
            "not printed",
        )
        for index, pair in enumerate(pair_panel.pairs)
    ]
    return Table(
        f"Fig. 14{pair_panel.letter}: STP on {pair_panel.scene}",
        ("pair", *SHOWN, "bound", "layerweaver/bound", "weft/bound", "paper"),
        tuple(body),
    )


def sweep_picture(paper: Paper, out: Path, panels: tuple[PairPanel, ...]) -> Exhibit:
    """Draw AI-MT's throughput over both thresholds, with the tuned point and the level of the paper's AI-MT."""
    shown = []
    for pair_panel in panels:
        sweep = sweep_thresholds(pair_panel.scene, pair_panel.pairs)
        compute = sorted({point.compute_threshold for point in sweep.points})
        memory = sorted({point.memory_threshold for point in sweep.points}, reverse=True)
        # rows of the picture: memory thresholds, descending; columns: compute thresholds, ascending
        stps = np.array([point.stp for point in sweep.points]).reshape(len(compute), len(memory)).T[::-1]
        # the paper prints Layerweaver's throughput, and by how many percent it exceeds AI-MT's
        printed = paper[f"stp_mean_{pair_panel.letter}"].value / (
            1 + paper[f"over_aimt_{pair_panel.letter}"].value / 100
        )
        best = compute.index(sweep.best.compute_threshold), memory.index(sweep.best.memory_threshold)
        heat = HeatMap(
            stps, meaning="STP, geomean of the pairs", level=printed, level_text=f"paper's AI-MT {printed:.3f}"
        )
        x, y = (
            Axis(label=f"{kind} threshold (share of the buffer)", names=[f"{value:g}" for value in values], slant=slant)
            for kind, values, slant in (("compute", compute, 60), ("memory", memory, 0))
        )
        star = Curve([best[0]], [best[1]], None, "#d55e00", "*", "", size=15)
        heading = f"({pair_panel.letter}) {pair_panel.scene}; best {sweep.best.stp:.3f}"
        shown.append(Panel([heat, star], heading, x, y, grid=""))
    title = "AI-MT's thresholds: one run per pair and point; the star is what every comparison uses"
    picture = pictures.picture(out, "fig14-aimt-sweep", title, shown, size=(11, 4.6), columns=len(panels))
    return Exhibit(pictures=(picture,))


def figure_15(paper: Paper, out: Path, panels: tuple[PairPanel, ...]) -> Exhibit:
    """Draw Fig. 15: share of active cycles of PE array and DRAM channel, woven and one model at a time."""
    shown = []
    for pair_panel in panels:
        reports = pair_panel.reports["layerweaver"]
        active = {
            "layerweaver, PE": [100 * report.pe_utilisation for report in reports],
            "layerweaver, DRAM": [100 * report.dram_utilisation for report in reports],
        }
        series = {name: [*values, mean(values)] for name, values in active.items()}
        bars = Bars([*pair_panel.names, "mean"], series, dict(zip(series, (pictures.PE, pictures.DRAM), strict=True)))
        alone_marks = [
            Curve(bars.places(name), [*percents, mean(percents)], "one model at a time", INK, "D", "", hollow=True)
            for resource, name in enumerate(series)
            for percents in (_percents_in_turns(pair_panel, resource),)
        ]
        printed = [
            ReferenceLine(value, f"paper's\n{key.upper()} {value:.1f} %", colour, lift=lift)
            for lift, key, colour in ((5, "pe", pictures.PE), (0, "dram", "#a06c00"))
            for value in (paper[f"{key}_{pair_panel.letter}"].value,)
        ]
        y = Axis(label="active cycles (%)", low=0, high=106)
        shown.append(Panel([bars, *alone_marks, *printed], f"({pair_panel.letter}) {pair_panel.scene}", y=y))
    title = "Fig. 15: active cycles of PE array and DRAM channel"
    picture = pictures.picture(out, "fig15-utilisation", title, shown, size=(13, 3.3 * len(panels) + 0.9))
    rows = tuple(row for pair_panel in panels for row in _utilisation_rows(paper, pair_panel))
    return Exhibit(rows, tuple(_utilisation_table(pair_panel) for pair_panel in panels), (picture,))


def _percents_in_turns(pair_panel: PairPanel, resource: int) -> list[float]:
    """Percent of active cycles of each pair if its models take turns, each for half of the time.

    resource: 0 is the PE array, 1 the DRAM channel.
    """
    percents = []
    for pair in pair_panel.pairs:
        demands = [demand(pair_panel.scene, model) for model in pair]
        percents.append(100 * mean((query.compute, query.memory)[resource] / query.alone for query in demands))
    return percents


def _utilisation_rows(paper: Paper, pair_panel: PairPanel) -> list[Row]:
    """Rows of a panel of Fig. 15: mean utilisation of both resources, and its gain over one model at a time."""
    rows = []
    reports = pair_panel.reports["layerweaver"]
    ours = {
        "pe": 100 * mean(report.pe_utilisation for report in reports),
        "dram": 100 * mean(report.dram_utilisation for report in reports),
    }
    whys = {
        "pe": "both keep the array busy nearly always; what is missing is start-up and layers that come too late",
        "dram": "our array packs grouped and first convolutions well, so few layers compute for longer than the "
        "buffer takes to fill; MAESTRO's mapping makes them long, and with it our DRAM share falls too (cost models)",
    }
    for resource, (key, value) in enumerate(ours.items()):
        printed, gain = paper[f"{key}_{pair_panel.letter}"].value, paper[f"{key}_gain_{pair_panel.letter}"].value
        alone = mean(_percents_in_turns(pair_panel, resource))
        rows += [
            Row(
                f"Fig. 15{pair_panel.letter}", f"{key.upper()} utilisation of layerweaver, mean", printed, value, "%",
                beside(value, printed, whys[key]),
            ),
            Row(
                f"Fig. 15{pair_panel.letter}", f"{key.upper()} utilisation over one model at a time", gain,
                value - alone, "points",
                f"read as percentage points: {printed - gain:.1f} % for the paper's baseline, {alone:.1f} % for ours "
                f"with half of the time for each model{_swap_remark(paper, pair_panel.letter)}",
            ),
        ]  # fmt: skip
    return rows


def _swap_remark(paper: Paper, letter: str) -> str:
    """Remark that the two printed gains look exchanged, or an empty text.

    Subtracting the printed DRAM gain must leave at least 50 %: a memory-bound model that runs half of the time keeps
    the channel busy for that half.
    """
    pe, dram = paper[f"pe_{letter}"].value, paper[f"dram_{letter}"].value
    pe_gain, dram_gain = paper[f"pe_gain_{letter}"].value, paper[f"dram_gain_{letter}"].value
    if dram - dram_gain >= 50:
        return ""
    return (
        f"; a baseline DRAM share of {dram - dram_gain:.1f} % is below the 50 % that a memory-bound model gives in "
        f"half of the time: the two printed gains look exchanged, which makes the baseline {pe - dram_gain:.1f} % PE "
        f"and {dram - pe_gain:.1f} % DRAM"
    )


def _utilisation_table(pair_panel: PairPanel) -> Table:
    """Table of a panel of Fig. 15: active cycles alone and under three policies, by pair."""
    body = []
    for index, (name, pe, dram) in enumerate(
        zip(pair_panel.names, _percents_in_turns(pair_panel, 0), _percents_in_turns(pair_panel, 1), strict=True)
    ):
        cells = [f"{pe:.1f}", f"{dram:.1f}"]
        for policy in ("aimt", "layerweaver", "weft"):
            report = pair_panel.reports[policy][index]
            cells += [f"{100 * report.pe_utilisation:.1f}", f"{100 * report.dram_utilisation:.1f}"]
        body.append((name, *cells, "not printed"))
    header = ["pair"]
    for run in ("alone", "aimt", "layerweaver", "weft"):
        header += [f"{run} PE %", f"{run} DRAM %"]
    return Table(f"Fig. 15{pair_panel.letter}: active cycles on {pair_panel.scene}", (*header, "paper"), tuple(body))


def figure_16(paper: Paper, out: Path, panels: tuple[PairPanel, ...]) -> Exhibit:
    """Draw Fig. 16: mean slowdown (bars) and slowdown of the slowest query (strokes) over running alone."""
    policies = ("aimt", "layerweaver", "weft")
    shown = []
    for pair_panel in panels:
        slowdowns = {policy: [_slowdown(report) for report in pair_panel.reports[policy]] for policy in policies}
        antts = {policy: [antt for antt, _ in values] for policy, values in slowdowns.items()}
        series = {policy: [*values, mean(values)] for policy, values in antts.items()}
        bars = Bars([*pair_panel.names, "mean"], series, pictures.POLICIES)
        worst = [
            Strokes(
                bars.places(policy)[:-1], [slowest for _, slowest in values], bars.width, f"slowest query, {policy}",
                pictures.POLICIES[policy],
            )
            for policy, values in slowdowns.items()
        ]  # fmt: skip
        printed = [
            ReferenceLine(value, f"paper's\n{policy} {value:.2f}", colour, lift=lift)
            for key, policy, colour, lift in (
                ("antt", "layerweaver", pictures.PE, -5),
                ("antt_aimt", "aimt", "#a06c00", 5),
            )
            for value in (paper[f"{key}_{pair_panel.letter}"].value,)
        ]
        y = Axis(label="slowdown over running alone", low=0.9)
        shown.append(Panel([bars, *worst, *printed], f"({pair_panel.letter}) {pair_panel.scene}", y=y))
    title = "Fig. 16: normalised turnaround time, mean of both models (ANTT) and slowest query"
    picture = pictures.picture(out, "fig16-slowdown", title, shown, size=(13, 3.3 * len(panels) + 0.9))
    rows = tuple(row for pair_panel in panels for row in _slowdown_rows(paper, pair_panel))
    return Exhibit(rows, tuple(_slowdown_table(pair_panel) for pair_panel in panels), (picture,))


def _slowdown(report: Report) -> tuple[float, float]:
    """The ANTT and the slowest query's slowdown of a report; NaN if a stream completed no query."""
    nan = float("nan")
    return (
        nan if report.antt is None else report.antt,
        nan if report.max_slowdown is None else report.max_slowdown,
    )


def _slowdown_rows(paper: Paper, pair_panel: PairPanel) -> list[Row]:
    """Rows of a panel of Fig. 16: mean ANTT and geometric mean of the slowest queries, of two policies."""
    rows = []
    whys = {
        "antt": "a latency is completion to completion in a saturated stream, so ANTT follows from the mix of queries "
        "a policy chooses; the paper's mix is not printed",
        "worst": "ours is the longest gap between two completions, start-up included, and an NCF query is so short "
        "that one run of convolutions doubles it; the paper does not define its measure",
    }
    for key, policy in (("", "layerweaver"), ("_aimt", "aimt")):
        served = [report for report in pair_panel.reports[policy] if report.antt is not None]
        starved = len(pair_panel.reports[policy]) - len(served)
        note = f"; {starved} pairs with a starved stream left out" if starved else ""
        if not served:
            continue
        for measure, value in (
            ("antt", mean(_slowdown(report)[0] for report in served)),
            ("worst", geomean(_slowdown(report)[1] for report in served)),
        ):
            theirs = paper[f"{measure}{key}_{pair_panel.letter}"].value
            tuned = " (our AI-MT is tuned to a higher throughput, so its queries wait less)" if policy == "aimt" else ""
            quantity = {"antt": f"ANTT of {policy}, mean", "worst": f"slowest query of {policy}, geomean"}[measure]
            if measure == "worst":
                note += _without_ncf(pair_panel, policy)
            why = beside(value, theirs, whys[measure] + tuned + note)
            rows.append(Row(f"Fig. 16{pair_panel.letter}", quantity, theirs, value, "x", why))
    return rows


def _without_ncf(pair_panel: PairPanel, policy: str) -> str:
    """Text with the slowdown of the slowest queries over the pairs without NCF; empty if there are no such pairs."""
    slowdowns = [
        report.max_slowdown
        for pair, report in zip(pair_panel.pairs, pair_panel.reports[policy], strict=True)
        if "NCF" not in pair and report.max_slowdown is not None
    ]
    return f"; {geomean(slowdowns):.2f} without the NCF pairs" if slowdowns else ""


def _slowdown_table(pair_panel: PairPanel) -> Table:
    """Table of a panel of Fig. 16: ANTT and slowest query under three policies, by pair."""
    policies = ("aimt", "layerweaver", "weft")
    body = []
    for index, name in enumerate(pair_panel.names):
        cells = [f"{value:.2f}" for policy in policies for value in _slowdown(pair_panel.reports[policy][index])]
        body.append((name, *cells, "not printed"))
    header = [text for policy in policies for text in (f"{policy} ANTT", f"{policy} slowest")]
    return Table(f"Fig. 16{pair_panel.letter}: slowdown on {pair_panel.scene}", ("pair", *header, "paper"), tuple(body))
