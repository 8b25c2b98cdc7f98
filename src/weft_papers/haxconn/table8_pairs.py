"""Table 8 and Fig. 5: all pairs of ten networks on Orin, and two instances of each, with derived profiles.

The faster network of a pair runs as often as its time on the GPU goes into the other's, rounded. Both triangles of
the table are printed: ours below the diagonal, the paper's above.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median

import numpy as np

from weft.reports.exhibits import Axis, Bars, Curve, HeatMap, Panel
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Paper, Row, Table, Tick, printed_data
from weft_papers.haxconn.lab import (
    AS_SHIPPED,
    COLOURS,
    IMPROVED,
    LABELS,
    NETWORKS,
    ORIN,
    OURS,
    THEIRS,
    CaseNetwork,
    Change,
    Laboratory,
    LeastMakespan,
    SocCase,
    total_ms,
)

FIGURE, INSTANCES = "Table 8", "Fig. 5"
SHORT = {"gpu-only": "GPU", "per-unit": "G&D", "herald": "Her.", "h2h": "H2H"}
ALIKE = {"GPU": "gpu-only", "D/G": "per-unit", "G/D": "per-unit", "Her.": "herald", "H2H": "h2h"}
"""The paper's names of the best baseline of a cell, and ours."""
SCENARIO_1 = ("gpu-only", "per-unit", "mensa")
"""The baselines of Fig. 5."""
DARKEST = 1.35
"""Speed-up of the darkest cell of the picture."""


@dataclass(frozen=True)
class Grid:
    """Every cell of the table, under one set of assumptions."""

    networks: Sequence[str]
    change: Change
    cells: Mapping[tuple[str, str], LeastMakespan]
    """The cells of the lower triangle, by row and column."""

    @property
    def pairs(self) -> list[LeastMakespan]:
        """The cells of two different networks."""
        return [one for (row, column), one in self.cells.items() if row != column]

    @property
    def improved(self) -> int:
        return sum(one.gain(THEIRS) >= IMPROVED for one in self.pairs)

    @property
    def middle(self) -> float:
        """The median speed-up of the pairs."""
        return float(median(one.gain(THEIRS) for one in self.pairs))


def pair(first: str, second: str) -> SocCase:
    """Both, the faster one repeated."""
    times = [total_ms(model, ORIN, "gpu") or 0.0 for model in (first, second)]
    repeats = [max(1, round(times[1] / times[0])), max(1, round(times[0] / times[1]))]
    return SocCase(ORIN, (CaseNetwork(first, repeats[0]), CaseNetwork(second, repeats[1])))


def places(networks: Sequence[str], *, diagonal: bool = True) -> list[tuple[str, str]]:
    return [
        (row, column) for place, row in enumerate(networks) for column in networks[: place + 1 if diagonal else place]
    ]


def grid(
    lab: Laboratory,
    change: Change = AS_SHIPPED,
    networks: Sequence[str] = tuple(NETWORKS),
    tick: Tick | None = None,
    *,
    diagonal: bool = True,
) -> Grid:
    wanted = {place: pair(*place).under(change) for place in places(networks, diagonal=diagonal)}
    optima = lab.find(wanted.values(), tick)
    return Grid(networks, change, {place: optima[case] for place, case in wanted.items()})


# Table 8


def table_8(paper: Paper, out: Path, shipped: Grid, scaled: Grid) -> Exhibit:
    rows = [*_count_rows(paper, shipped, scaled), *_worst_rows(shipped, scaled), *_match_rows(paper, shipped, scaled)]
    tables = (_table(paper, shipped, "demands as shipped"), _table(paper, scaled, _scale(scaled)), _detail(shipped))
    return Exhibit(tuple(rows), tables, (_picture(paper, out, (shipped, scaled)),))


def _scale(grid: Grid) -> str:
    return f"demands times {grid.change.demand:g}, fitted to Table 6"


def _printed_value(paper: Paper, row: str, column: str) -> float:
    """1 where the paper keeps the baseline."""
    key = f"t8_{row}+{column}"
    return paper[key].value if key in paper else 1.0


@lru_cache(maxsize=1)
def best_printed() -> dict[str, str]:
    """Cell -> the paper's best baseline."""
    return dict(printed_data("haxconn")["table8_best_baseline"])


def _count_rows(paper: Paper, shipped: Grid, scaled: Grid) -> list[Row]:
    there = [place for place in shipped.cells if place[0] != place[1]]
    by_table = sum(_printed_value(paper, *place) > 1 for place in there)
    why = (
        f"of {len(there)}, derived profiles, by {100 * (IMPROVED - 1):.1f} % and more over GPU, GPU & DLA, Herald and "
        f"H2H; with {_scale(scaled)} {scaled.improved}; the paper's own table has {by_table}"
    )
    rows = [Row(FIGURE, "pairs improved", paper["pairs_improved"].value, shipped.improved, "", why)]
    vgg = [(row, column) for row, column in there if "vgg19" in (row, column)]
    if vgg:
        ours, fitted = (sum(one.cells[place].gain(THEIRS) >= IMPROVED for place in vgg) for one in (shipped, scaled))
        theirs = sum(_printed_value(paper, *place) > 1 for place in vgg)
        why = f"of {len(vgg)}; with {_scale(scaled)} {fitted}; the paper blames contention, our VGG-19 asks for little"
        rows.append(Row(FIGURE, "pairs with VGG-19 improved", theirs, ours, "", why))
    return rows


def _worst_rows(shipped: Grid, scaled: Grid) -> list[Row]:
    least, fitted = (min(one.gain() for one in grid.cells.values()) for grid in (shipped, scaled))
    proved = sum(one.certificate.proved for one in shipped.cells.values())
    total_s = sum(one.certificate.seconds for one in shipped.cells.values())
    slowest = max(one.certificate.seconds for one in shipped.cells.values())
    return [
        Row(
            FIGURE, "least speed-up over the best of all seven baselines", None, least, "x",
            f"never worse, in {len(shipped.cells)} cells; with {_scale(scaled)} {fitted:.4g}",
        ),
        Row(
            FIGURE, "cells proved optimal", None, proved, "",
            f"of {len(shipped.cells)}, in {total_s:.0f} s together, {slowest:.2f} s the slowest",
        ),
    ]  # fmt: skip


def _match_rows(paper: Paper, shipped: Grid, scaled: Grid) -> list[Row]:
    theirs = [_printed_value(paper, *place) for place in shipped.cells]
    ours, fitted = ([one.gain(THEIRS) for one in grid.cells.values()] for grid in (shipped, scaled))
    alike, closer = (_alike(grid) for grid in (shipped, scaled))
    most = max(shipped.cells, key=lambda place: shipped.cells[place].gain(THEIRS))
    return [
        Row(
            FIGURE, "median speed-up of all cells", float(median(theirs)), float(median(ours)), "x",
            f"our baselines H2H and Herald do better in the simulator than theirs on the chip; with {_scale(scaled)} "
            f"{median(fitted):.3g}",
        ),
        Row(
            FIGURE, "largest speed-up", max(theirs), max(ours), "x",
            f"{NETWORKS[most[0]]} with {NETWORKS[most[1]]}; with {_scale(scaled)} {max(fitted):.3g}; the paper's is "
            "Inc-res-v2 with ResNet18",
        ),
        Row(
            FIGURE, "cells with the paper's best baseline", None, alike, "",
            f"of {len(shipped.cells)}; mostly H2H is our best where GPU only is theirs; with {_scale(scaled)} {closer}",
        ),
    ]  # fmt: skip


def _alike(grid: Grid) -> int:
    return sum(
        one.rival(THEIRS) == ALIKE[best_printed()[f"{row}+{column}"]] for (row, column), one in grid.cells.items()
    )


def _table(paper: Paper, grid: Grid, what: str) -> Table:
    body = []
    for row in grid.networks:
        cells = []
        for column in grid.networks:
            if (row, column) in grid.cells:
                cells.append(_cell(grid.cells[row, column]))
            else:
                speed_up = _printed_value(paper, column, row)
                cells.append(f"{best_printed()[f'{column}+{row}']} {f'{speed_up:.2f}' if speed_up > 1 else 'x'}")
        body.append((NETWORKS[row], *cells))
    title = f"{FIGURE}: speed-up over the best baseline; below and on the diagonal ours, above it the paper's; {what}"
    return Table(title, ("", *(NETWORKS[column] for column in grid.networks)), tuple(body))


def _cell(one: LeastMakespan) -> str:
    gain = one.gain(THEIRS)
    return f"{SHORT[one.rival(THEIRS)]} {f'{gain:.2f}' if gain >= IMPROVED else 'x'}"


def _detail(grid: Grid) -> Table:
    body = []
    for (row, column), one in grid.cells.items():
        case = pair(row, column)
        repeats = " : ".join(str(entry.repeats) for entry in case.entries)
        values = [f"{one.ms(name):.3f}" for name in LABELS]
        body.append((NETWORKS[row], NETWORKS[column], repeats, *values, f"{one.best_ms:.3f}", f"{one.gain():.3f}"))
    header = (
        "network",
        "network",
        "runs",
        *(f"{LABELS[name]} ms" for name in LABELS),
        "ours ms",
        "over the best of all",
    )
    return Table(f"{FIGURE}: every cell, demands as shipped", header, tuple(body))


def _picture(paper: Paper, out: Path, grids: Sequence[Grid]) -> Figure:
    title = f"{FIGURE}: speed-up over the best baseline on Orin; below ours, above the diagonal the paper's"
    panels = [_matrix(paper, grid) for grid in grids]
    return pictures.picture(out, "table8-pairs", title, panels, size=(15, 7.4), columns=len(grids))


def _matrix(paper: Paper, grid: Grid) -> Panel:
    size = len(grid.networks)
    values = np.ones((size, size))
    words = [["" for _ in range(size)] for _ in range(size)]
    for i, row in enumerate(grid.networks):
        for j, column in enumerate(grid.networks):
            if (row, column) in grid.cells:
                optimum = grid.cells[row, column]
                values[i, j], best = optimum.gain(THEIRS), SHORT[optimum.rival(THEIRS)]
            else:
                values[i, j], best = _printed_value(paper, column, row), best_printed()[f"{column}+{row}"]
            words[i][j] = f"{best}\n{values[i, j]:.2f}" if values[i, j] >= IMPROVED else f"{best}\n\u00d7"
    steps = np.repeat(np.arange(size + 1), 2) - 0.5
    names = [NETWORKS[name] for name in grid.networks]
    what = "demands as derived" if grid.change == AS_SHIPPED else f"demands times {grid.change.demand:g} (fitted)"
    return Panel(
        [HeatMap(values, words, "Greens", 1, DARKEST, square=True), Curve(steps[1:], steps[:-1], None, "#d55e00")],
        f"{what}: {grid.improved} of {len(grid.pairs)} pairs improved, never worse",
        Axis(names=names, slant=35),
        Axis(names=names),
        grid="",
    )


# Fig. 5


def figure_5(paper: Paper, out: Path, shipped: Grid, scaled: Grid) -> Exhibit:
    """Two instances of one network: images per second over the window of both."""
    rows = []
    for grid, what in ((shipped, "demands as shipped"), (scaled, _scale(scaled))):
        gains = {model: 100 * (grid.cells[model, model].gain(SCENARIO_1) - 1) for model in grid.networks}
        most = max(gains, key=lambda model: gains[model])
        why = (
            f"{NETWORKS[most]}, over the best of GPU only, GPU & DLA and Mensa; {min(gains.values()):.0f} % at least, "
            f"{median(gains.values()):.0f} % in the middle of {len(gains)}; the paper draws five and names GoogLeNet"
        )
        printed = paper["fps_gain"].value
        rows.append(Row(INSTANCES, f"most throughput gained by two instances, {what}", printed, gains[most], "%", why))
    worse, also = (
        sum(_share(grid, model, "per-unit") > _share(grid, model, "gpu-only") for model in grid.networks)
        for grid in (shipped, scaled)
    )
    why = f"of {len(shipped.networks)}; the paper: 'not always' better; with {_scale(scaled)}: {also}"
    rows.append(Row(INSTANCES, "networks where GPU & DLA loses to GPU only", None, worse, "", why))
    same = sum(_share(shipped, model, "mensa") >= _share(shipped, model, "gpu-only") for model in shipped.networks)
    why = f"of {len(shipped.networks)}; the paper: 'limited improvements or no improvement by Mensa'"
    rows.append(Row(INSTANCES, "networks where Mensa gains nothing over GPU only", None, same, "", why))
    return Exhibit(tuple(rows), (_instances(shipped, scaled),), (_instances_picture(out, shipped, scaled),))


def _share(grid: Grid, model: str, name: str) -> float:
    return grid.cells[model, model].baselines[name]


def _fps(one: LeastMakespan, name: str) -> float:
    return 2 / (one.best_s if name == OURS else one.baselines[name])


def _instances(shipped: Grid, scaled: Grid) -> Table:
    body = []
    for model in shipped.networks:
        cells = [
            f"{_fps(grid.cells[model, model], name):.0f}" for grid in (shipped, scaled) for name in (*SCENARIO_1, OURS)
        ]
        body.append((NETWORKS[model], *cells))
    names = [LABELS.get(name, OURS) for name in (*SCENARIO_1, OURS)]
    header = ("network", *names, *(f"{name}, x {scaled.change.demand:g}" for name in names))
    return Table(f"{INSTANCES}: two instances on Orin, images per second", header, tuple(body))


def _instances_picture(out: Path, shipped: Grid, scaled: Grid) -> Figure:
    labels = [NETWORKS[model] for model in shipped.networks]
    names = {LABELS.get(name, f"{OURS}, proved"): name for name in (*SCENARIO_1, OURS)}
    colours, panels = {label: COLOURS[name] for label, name in names.items()}, []
    for grid, what in ((shipped, "demands as derived"), (scaled, _scale(scaled))):
        series = {
            label: [_fps(grid.cells[model, model], name) for model in grid.networks] for label, name in names.items()
        }
        panels.append(Panel([Bars(labels, series, colours)], what, y=Axis(label="images per second")))
    title = f"{INSTANCES}: two instances of one network on Orin"
    return pictures.picture(out, "fig5-instances", title, panels, size=(12, 6), share_x=True)
