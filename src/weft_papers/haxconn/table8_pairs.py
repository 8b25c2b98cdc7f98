"""Table 8 and Fig. 5: all pairs of ten networks on Orin, and two instances of each, with derived profiles.

The faster network of a pair runs several times: the ratio of the two times on the GPU, rounded. Our table has our
results below the diagonal and the paper's above it.
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
"""Our name of a baseline -> its name in the cells of our table."""
OUR_NAMES = {"GPU": "gpu-only", "D/G": "per-unit", "G/D": "per-unit", "Her.": "herald", "H2H": "h2h"}
"""The paper's name of the best baseline of a cell -> ours."""
SCENARIO_1 = ("gpu-only", "per-unit", "mensa")
"""The baselines of Fig. 5 (scenario 1: instances of one network)."""
DARKEST = 1.35
"""Speed-up of the darkest cell of the picture."""


@dataclass(frozen=True)
class Grid:
    """Our results for the cells of Table 8, under one set of assumptions."""

    networks: Sequence[str]
    change: Change
    cells: Mapping[tuple[str, str], LeastMakespan]
    """The cells of the lower triangle, by row and column."""

    @property
    def pairs(self) -> list[LeastMakespan]:
        """The cells of two different networks."""
        return [optimum for (row, column), optimum in self.cells.items() if row != column]

    @property
    def improved(self) -> int:
        """The number of pairs that are faster than under the best of the paper's baselines."""
        return sum(optimum.gain(THEIRS) >= IMPROVED for optimum in self.pairs)

    @property
    def median_gain(self) -> float:
        """The median speed-up of the pairs over the best of the paper's baselines."""
        return float(median(optimum.gain(THEIRS) for optimum in self.pairs))


def pair(first: str, second: str) -> SocCase:
    """Two networks on Orin; the faster one runs several times: the ratio of their times on the GPU, rounded."""
    times = [total_ms(model, ORIN, "gpu") or 0.0 for model in (first, second)]
    repeats = [max(1, round(times[1] / times[0])), max(1, round(times[0] / times[1]))]
    return SocCase(ORIN, (CaseNetwork(first, repeats[0]), CaseNetwork(second, repeats[1])))


def places(networks: Sequence[str], *, diagonal: bool = True) -> list[tuple[str, str]]:
    """The cells below the diagonal as (row, column), with the diagonal unless *diagonal* is false."""
    return [
        (row, column) for index, row in enumerate(networks) for column in networks[: index + 1 if diagonal else index]
    ]


def grid(
    lab: Laboratory,
    change: Change = AS_SHIPPED,
    networks: Sequence[str] = tuple(NETWORKS),
    tick: Tick | None = None,
    *,
    diagonal: bool = True,
) -> Grid:
    """Search all cells of the table under the assumptions *change*."""
    cases = {cell: pair(*cell).under(change) for cell in places(networks, diagonal=diagonal)}
    optima = lab.find(cases.values(), tick)
    return Grid(networks, change, {cell: optima[case] for cell, case in cases.items()})


# Table 8


def table_8(paper: Paper, out: Path, shipped: Grid, scaled: Grid) -> Exhibit:
    """Reproduce Table 8, with the memory demands as shipped and as scaled to fit Table 6."""
    rows = [*_count_rows(paper, shipped, scaled), *_worst_rows(shipped, scaled), *_match_rows(paper, shipped, scaled)]
    tables = (
        _table(paper, shipped, "demands as shipped"),
        _table(paper, scaled, _scale_text(scaled)),
        _detail(shipped),
    )
    return Exhibit(tuple(rows), tables, (_picture(paper, out, (shipped, scaled)),))


def _scale_text(grid: Grid) -> str:
    """The factor on the demands of a grid, in words."""
    return f"demands times {grid.change.demand:g}, fitted to Table 6"


def _printed_value(paper: Paper, row: str, column: str) -> float:
    """The printed speed-up of a cell; 1 if the paper finds nothing better than the baseline."""
    key = f"t8_{row}+{column}"
    return paper[key].value if key in paper else 1.0


@lru_cache(maxsize=1)
def best_printed() -> dict[str, str]:
    """Cell ("row+column") -> the paper's best baseline, by the paper's name."""
    return dict(printed_data("haxconn")["table8_best_baseline"])


def _count_rows(paper: Paper, shipped: Grid, scaled: Grid) -> list[Row]:
    """Rows with the number of improved pairs, among all and among those with VGG-19."""
    cells = [(row, column) for row, column in shipped.cells if row != column]
    by_table = sum(_printed_value(paper, *cell) > 1 for cell in cells)
    why = (
        f"of {len(cells)}, derived profiles, by {100 * (IMPROVED - 1):.1f} % and more over GPU, GPU & DLA, Herald and "
        f"H2H; with {_scale_text(scaled)} {scaled.improved}; the paper's own table has {by_table}"
    )
    rows = [Row(FIGURE, "pairs improved", paper["pairs_improved"].value, shipped.improved, "", why)]
    vgg = [(row, column) for row, column in cells if "vgg19" in (row, column)]
    if vgg:
        ours, fitted = (sum(grid.cells[cell].gain(THEIRS) >= IMPROVED for cell in vgg) for grid in (shipped, scaled))
        printed = sum(_printed_value(paper, *cell) > 1 for cell in vgg)
        scale = _scale_text(scaled)
        why = f"of {len(vgg)}; with {scale} {fitted}; the paper blames contention, our VGG-19 demands little bandwidth"
        rows.append(Row(FIGURE, "pairs with VGG-19 improved", printed, ours, "", why))
    return rows


def _worst_rows(shipped: Grid, scaled: Grid) -> list[Row]:
    """Rows with the smallest speed-up over all seven baselines, and the number of proved cells."""
    least, least_scaled = (min(optimum.gain() for optimum in grid.cells.values()) for grid in (shipped, scaled))
    proved = sum(optimum.certificate.proved for optimum in shipped.cells.values())
    total_s = sum(optimum.certificate.seconds for optimum in shipped.cells.values())
    slowest = max(optimum.certificate.seconds for optimum in shipped.cells.values())
    return [
        Row(
            FIGURE, "least speed-up over the best of all seven baselines", None, least, "x",
            f"never worse, in {len(shipped.cells)} cells; with {_scale_text(scaled)} {least_scaled:.4g}",
        ),
        Row(
            FIGURE, "cells proved optimal", None, proved, "",
            f"of {len(shipped.cells)}, in {total_s:.0f} s together, {slowest:.2f} s the slowest",
        ),
    ]  # fmt: skip


def _match_rows(paper: Paper, shipped: Grid, scaled: Grid) -> list[Row]:
    """Rows that compare our cells with the printed ones: median and largest speed-up, and the best baseline."""
    printed = [_printed_value(paper, *cell) for cell in shipped.cells]
    ours, ours_scaled = ([optimum.gain(THEIRS) for optimum in grid.cells.values()] for grid in (shipped, scaled))
    same_shipped, same_scaled = (_count_same_rivals(grid) for grid in (shipped, scaled))
    largest = max(shipped.cells, key=lambda cell: shipped.cells[cell].gain(THEIRS))
    return [
        Row(
            FIGURE, "median speed-up of all cells", float(median(printed)), float(median(ours)), "x",
            f"our baselines H2H and Herald do better in the simulator than theirs on the chip; with "
            f"{_scale_text(scaled)} {median(ours_scaled):.3g}",
        ),
        Row(
            FIGURE, "largest speed-up", max(printed), max(ours), "x",
            f"{NETWORKS[largest[0]]} with {NETWORKS[largest[1]]}; with {_scale_text(scaled)} {max(ours_scaled):.3g}; "
            "the paper's is Inc-res-v2 with ResNet18",
        ),
        Row(
            FIGURE, "cells with the paper's best baseline", None, same_shipped, "",
            f"of {len(shipped.cells)}; mostly H2H is our best where GPU only is theirs; with {_scale_text(scaled)} "
            f"{same_scaled}",
        ),
    ]  # fmt: skip


def _count_same_rivals(grid: Grid) -> int:
    """The number of cells whose best baseline is the one that the paper prints."""
    return sum(
        optimum.rival(THEIRS) == OUR_NAMES[best_printed()[f"{row}+{column}"]]
        for (row, column), optimum in grid.cells.items()
    )


def _table(paper: Paper, grid: Grid, case: str) -> Table:
    """Table of best baselines and speed-ups, ours and the paper's; *case*: the assumptions of ours, in words."""
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
    title = f"{FIGURE}: speed-up over the best baseline; below and on the diagonal ours, above it the paper's; {case}"
    return Table(title, ("", *(NETWORKS[column] for column in grid.networks)), tuple(body))


def _cell(optimum: LeastMakespan) -> str:
    """The text of a cell as in the paper: the best baseline and our speed-up over it, "x" for no speed-up."""
    gain = optimum.gain(THEIRS)
    return f"{SHORT[optimum.rival(THEIRS)]} {f'{gain:.2f}' if gain >= IMPROVED else 'x'}"


def _detail(grid: Grid) -> Table:
    """Table with a line per cell: repeats, makespans of all baselines and ours."""
    body = []
    for (row, column), best in grid.cells.items():
        case = pair(row, column)
        repeats = " : ".join(str(entry.repeats) for entry in case.entries)
        times_ms = [f"{best.ms(name):.3f}" for name in LABELS]
        body.append((NETWORKS[row], NETWORKS[column], repeats, *times_ms, f"{best.best_ms:.3f}", f"{best.gain():.3f}"))
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
    """The heat map of speed-ups: ours below and on the diagonal, the paper's above it."""
    size = len(grid.networks)
    values = np.ones((size, size))
    labels = [["" for _ in range(size)] for _ in range(size)]
    for i, row in enumerate(grid.networks):
        for j, column in enumerate(grid.networks):
            if (row, column) in grid.cells:
                optimum = grid.cells[row, column]
                values[i, j], best = optimum.gain(THEIRS), SHORT[optimum.rival(THEIRS)]
            else:
                values[i, j], best = _printed_value(paper, column, row), best_printed()[f"{column}+{row}"]
            labels[i][j] = f"{best}\n{values[i, j]:.2f}" if values[i, j] >= IMPROVED else f"{best}\n\u00d7"
    # The corners of the line between the triangles, in cell coordinates: cells are centred on whole numbers.
    edge = np.repeat(np.arange(size + 1), 2) - 0.5
    names = [NETWORKS[name] for name in grid.networks]
    demands = "demands as derived" if grid.change == AS_SHIPPED else f"demands times {grid.change.demand:g} (fitted)"
    return Panel(
        [HeatMap(values, labels, "Greens", 1, DARKEST, square=True), Curve(edge[1:], edge[:-1], None, "#d55e00")],
        f"{demands}: {grid.improved} of {len(grid.pairs)} pairs improved, never worse",
        Axis(names=names, slant=35),
        Axis(names=names),
        grid="",
    )


# Fig. 5


def figure_5(paper: Paper, out: Path, shipped: Grid, scaled: Grid) -> Exhibit:
    """Reproduce Fig. 5: two instances of one network, in images per second until both have ended."""
    rows = []
    for grid, assumptions in ((shipped, "demands as shipped"), (scaled, _scale_text(scaled))):
        gains = {model: 100 * (grid.cells[model, model].gain(SCENARIO_1) - 1) for model in grid.networks}
        largest = max(gains, key=lambda model: gains[model])
        why = (
            f"{NETWORKS[largest]}, over the best of GPU only, GPU & DLA and Mensa; {min(gains.values()):.0f} % at "
            f"least, {median(gains.values()):.0f} % in the middle of {len(gains)}; the paper draws five and names "
            "GoogLeNet"
        )
        printed = paper["fps_gain"].value
        quantity = f"most throughput gained by two instances, {assumptions}"
        rows.append(Row(INSTANCES, quantity, printed, gains[largest], "%", why))
    worse, worse_scaled = (
        sum(_baseline_s(grid, model, "per-unit") > _baseline_s(grid, model, "gpu-only") for model in grid.networks)
        for grid in (shipped, scaled)
    )
    why = f"of {len(shipped.networks)}; the paper: 'not always' better; with {_scale_text(scaled)}: {worse_scaled}"
    rows.append(Row(INSTANCES, "networks where GPU & DLA loses to GPU only", None, worse, "", why))
    mensa_useless = sum(
        _baseline_s(shipped, model, "mensa") >= _baseline_s(shipped, model, "gpu-only") for model in shipped.networks
    )
    why = f"of {len(shipped.networks)}; the paper: 'limited improvements or no improvement by Mensa'"
    rows.append(Row(INSTANCES, "networks where Mensa gains nothing over GPU only", None, mensa_useless, "", why))
    return Exhibit(tuple(rows), (_instances(shipped, scaled),), (_instances_picture(out, shipped, scaled),))


def _baseline_s(grid: Grid, model: str, name: str) -> float:
    """Makespan in seconds of two instances of a network under baseline *name*."""
    return grid.cells[model, model].baselines[name]


def _fps(optimum: LeastMakespan, name: str) -> float:
    """Images per second of two instances under baseline *name*, or under our schedule if that is OURS."""
    return 2 / (optimum.best_s if name == OURS else optimum.baselines[name])


def _instances(shipped: Grid, scaled: Grid) -> Table:
    """Table of images per second of two instances of every network, under the baselines and our schedule."""
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
    """Draw images per second of two instances of every network."""
    labels = [NETWORKS[model] for model in shipped.networks]
    names = {LABELS.get(name, f"{OURS}, proved"): name for name in (*SCENARIO_1, OURS)}
    colours, panels = {label: COLOURS[name] for label, name in names.items()}, []
    for grid, what in ((shipped, "demands as derived"), (scaled, _scale_text(scaled))):
        series = {
            label: [_fps(grid.cells[model, model], name) for model in grid.networks] for label, name in names.items()
        }
        panels.append(Panel([Bars(labels, series, colours)], what, y=Axis(label="images per second")))
    title = f"{INSTANCES}: two instances of one network on Orin"
    return pictures.picture(out, "fig5-instances", title, panels, size=(12, 6), share_x=True)
