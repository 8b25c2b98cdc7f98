"""Table I, the search that finds its designs, the look-up tables of section III-A, and the baselines' hardware."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np

from weft.devices import Board, TiledNpu, load_platform
from weft.devices.costs.explore import Exploration
from weft.devices.costs.tiled import layer_times_s, lookup_table
from weft.reports.exhibits import Axis, Curve, Panel
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Paper, Row, Table, beside
from weft_papers.fluid_batching.lab import (
    EXITS,
    MAX_BATCH,
    SEARCHES,
    SPOTS,
    Spot,
    network,
    npu,
    printed_npu,
    search_design,
    tile,
)

FIGURE = "Table I"
MISPRINTED = Spot("inception-v3", "zcu104")
"""The row of Table I with a misprinted design: that design does not use the resources printed in the row."""
PRINTED = "zcu104-inception-v3-printed"
"""The device preset with that design as printed."""
USED = ("fluid", "R", "FC", "serial")
"""The kinds of hardware that the schedulers run on: keys of SEARCHES."""
WIDEST_TREE = 24
"""The widest MAC tree that is drawn."""


class BoardShares(NamedTuple):
    """Percent of a board's DSPs and BRAM bits that a design takes."""

    dsps: float
    bram: float


class Searched(NamedTuple):
    """The result of a design search, and its duration."""

    exploration: Exploration
    seconds: float


def shares(device: TiledNpu, board: Board) -> BoardShares:
    return BoardShares(100 * device.dsps / board.dsps, 100 * device.bram_bits / board.bram_bits)


def table_1(paper: Paper, out: Path, spots: Sequence[Spot] = SPOTS) -> Exhibit:
    """Reproduce Table I: the designs, their shares of the boards, and what the design search finds."""
    searches = {spot: _time_search(spot) for spot in spots}
    rows = [row for spot in spots for row in (*_share_rows(paper, spot), *_search_rows(paper, spot, searches[spot]))]
    rows += [_storage_row(paper, spot) for spot in spots]
    rows.append(_batch_16(paper))
    return Exhibit(tuple(rows), (_designs(searches), _baselines(spots)), (_picture(out, searches),))


def _time_search(spot: Spot) -> Searched:
    started = perf_counter()
    exploration = search_design.__wrapped__(spot, "fluid")  # past the cache, so that the search itself is timed
    return Searched(exploration, perf_counter() - started)


def _share_rows(paper: Paper, spot: Spot) -> list[Row]:
    """Rows with the percentage of the board's DSPs and BRAM that the design takes."""
    device, board = printed_npu(spot), load_platform(spot.board)
    rows = []
    for resource, ours in zip(("dsps", "bram"), shares(device, board), strict=True):
        printed = paper[f"{resource}_{spot.key}"].value
        of = f"{board.dsps} DSPs" if resource == "dsps" else f"{board.bram_bits / 2**20:g} Mb of double-buffered tiles"
        why = f"{abs(ours - printed):.3f} points apart: {tile(device)} of {of}"
        if spot == MISPRINTED:
            misprint = shares(printed_npu(spot, PRINTED), board)[("dsps", "bram").index(resource)]
            why += f"; the design printed in this row, {tile(printed_npu(spot, PRINTED))}, would take {misprint:.2f} %"
        rows.append(Row(FIGURE, f"{resource.upper().replace('DSPS', 'DSPs')} of {spot.name}", printed, ours, "%", why))
    return rows


def _search_rows(paper: Paper, spot: Spot, search: Searched) -> list[Row]:
    """Rows with the tile sizes that the search finds, and its duration."""
    best = search.exploration.device()
    remark = f"found at {best.bandwidth_gb_s:g} GB/s among {len(search.exploration)} designs"
    if spot == MISPRINTED:
        remark += f"; ResNet-50's design is printed, but {best.t_p} x {best.t_c} is what takes the printed DSPs"
    elif (best.t_p, best.t_c) != (printed_npu(spot).t_p, printed_npu(spot).t_c):
        remark += f"; the printed design scores {100 * _score(search.exploration, printed_npu(spot)):.2f} % of it"
    rows = [
        Row(FIGURE, f"{name} that the search finds for {spot.name}", paper[f"{key}_{spot.key}"].value, ours, "", remark)
        for name, key, ours in (("T_P", "tree", best.t_p), ("T_C", "pes", best.t_c))
    ]
    rows.append(
        Row(FIGURE, f"time of the search for {spot.name}", None, search.seconds, " s", "in this run; not printed")
    )
    return rows


def _score(exploration: Exploration, device: TiledNpu) -> float:
    """The score of *device* in the search over that of the best design."""
    index = np.flatnonzero((exploration.tile.t_p == device.t_p) & (exploration.tile.t_c == device.t_c))[0]
    return float(exploration.scores[index] / exploration.scores[exploration.best])


def _storage_row(paper: Paper, spot: Spot) -> Row:
    """Row with the registers that the scheduler's look-up table takes, in percent of the board's."""
    board, printed = load_platform(spot.board), paper[f"registers_{spot.key}"].value
    table = lookup_table(network(spot.model, EXITS), printed_npu(spot), MAX_BATCH)
    registers = board.registers or 1
    per_layer = table.max_batch * table.bits_per_entry
    layers = printed / 100 * registers / per_layer  # the number of layers that the printed share has room for
    why = (
        f"{len(table.layers)} products with the heads, x {table.max_batch} batch sizes x {table.bits_per_entry} bits = "
        f"{table.storage_bits} of {registers} registers; the printed share is that of {layers:.0f} layers: "
        "the paper's heads have more than one each"
    )
    ours = 100 * table.storage_bits / registers
    return Row("section IV", f"registers of the look-up table, {spot.name}", printed, ours, "%", why)


def _batch_16(paper: Paper) -> Row:
    """Row with the time of a forward pass of 16 samples of ResNet-50 on ZCU104."""
    spot = Spot("resnet50", "zcu104")
    ours = 1e3 * sum(layer_times_s(network(spot.model), printed_npu(spot), 16))
    why = beside(ours, paper["batch16"].value, "a whole pass of 16; nothing was fitted to this number")
    return Row("section IV", f"a batch of 16, {spot.name}", paper["batch16"].value, ours, " ms", why)


def _designs(searches: dict[Spot, Searched]) -> Table:
    """Table of the printed designs beside the ones that the search finds."""
    body = []
    for spot, (exploration, _) in searches.items():
        device, best = printed_npu(spot), exploration.device()
        board_shares = shares(device, load_platform(spot.board))
        times_ms = (1e3 * sum(layer_times_s(network(spot.model, EXITS), device, batch)) for batch in (1, MAX_BATCH))
        body.append(
            (
                spot.name, tile(device), f"{board_shares.dsps:.2f}", f"{board_shares.bram:.2f}", tile(best),
                f"{100 * _score(exploration, device):.2f}", *(f"{time_ms:.1f}" for time_ms in times_ms),
            )
        )  # fmt: skip
    header = ("network, board", "design", "DSPs %", "BRAM %", "found", "score of best %", "batch 1 ms", "batch 8 ms")
    return Table(f"{FIGURE}: the designs, what the search finds, and a whole pass", header, tuple(body))


def _baselines(spots: Sequence[Spot]) -> Table:
    """Table of the hardware that each scheduler runs on."""
    body = []
    for spot in spots:
        for hardware in USED:
            search = SEARCHES[hardware]
            device = npu(spot, hardware)
            times_ms = (1e3 * sum(layer_times_s(network(spot.model, EXITS), device, batch)) for batch in (1, MAX_BATCH))
            sizes = f"batch {search.only}" if search.only else f"batches 1 to {MAX_BATCH}"
            body.append((spot.name, hardware, sizes, tile(device), *(f"{time_ms:.1f}" for time_ms in times_ms)))
    header = ("network, board", "batching", "searched for", "design", "batch 1 ms", "batch 8 ms")
    return Table(
        "Hardware of the schedulers: fluid is Table I's, the others each of a search of their own", header, tuple(body)
    )


def _picture(out: Path, searches: dict[Spot, Searched]) -> Figure:
    """Draw the best score for each width of a MAC tree, with the found and the printed design marked."""
    trees, panels = np.arange(1, WIDEST_TREE + 1), []
    for spot, (exploration, _) in searches.items():
        # Scores are sums over the batch sizes 1 to MAX_BATCH.
        best = [exploration.scores[exploration.tile.t_p == tree].max() / MAX_BATCH for tree in trees]
        marks = [Curve(trees, best, "best T_C for each T_P", pictures.MODELS[0], "o", size=3.5)]
        for name, device, mark, size, colour in (
            ("found", exploration.device(), "*", 14, pictures.MODELS[1]),
            ("Table I", printed_npu(spot, PRINTED if spot == MISPRINTED else None), "D", 5, pictures.MODELS[2]),
        ):
            score = _score(exploration, device) * exploration.scores[exploration.best] / MAX_BATCH
            marks.append(Curve([device.t_p], [score], name, colour, mark, "", size=size, order=4))
        heading = f"{spot.name}, {exploration.template.bandwidth_gb_s:g} GB/s: found {tile(exploration.device())}"
        y = Axis(label="GOP/s, mean of batches 1 to 8", low=0, high=1.12 * max(best))
        panels.append(Panel(marks, heading, Axis(label="T_P, width of a MAC tree"), y))
    title = f"{FIGURE}: what the search for a design sees"
    return pictures.picture(out, "table1-search", title, panels, size=(11, 6.2), columns=2)
