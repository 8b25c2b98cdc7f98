"""Fig. 1b and 10: throughput of the NPU under each way of batching, for full batches without arrivals and exits.

Section IV says that Fluid Batching comes near the peak for B > 3. At the bandwidth that is calibrated to Table II, it
does not, because it is memory-bound. So Fig. 10 is drawn twice, with the calibrated and with a higher bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from weft.devices import TiledNpu, load_platform
from weft.devices.costs.tiled import layer_times_s
from weft.devices.tiled import Batching
from weft.models.exits import subnets
from weft.reports.exhibits import Axis, Bars, Curve, Panel, ReferenceLine
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Row, Table
from weft_papers.fluid_batching.lab import EXITS, MAX_BATCH, SPOTS, Spot, network, printed_npu, search_design, tile

BATCHES = tuple(range(1, MAX_BATCH + 1))
UNSTACKED: dict[str, Batching] = {"SERIAL": "none", "FC": "fc", "R": "r", "P": "p", "fluid": "fluid"}
"""Name of a way of batching, on PEs of fixed size -> its value in the device description."""
STACKED = "fluid, stackable PEs"
COLOURS = {
    "SERIAL": "#1f2933", "FC": "#a9b1ba", "R": "#56b4e9", "P": "#e69f00", "fluid": "#cc79a7", STACKED: "#d55e00",
}  # fmt: skip
ABLATION = {"FC": "FC", "R": "R", "P": "P", "fluid": "fluid, fixed PEs", STACKED: "fluid"}
"""Line of Fig. 10 -> its hardware: a key of SEARCHES."""


class StrategyPanel(NamedTuple):
    """A panel of Fig. 10: a network on a board at one memory bandwidth."""

    spot: Spot
    bandwidth_gb_s: float
    why: str
    """Why this bandwidth."""


def scenes() -> tuple[StrategyPanel, ...]:
    """The panels of Fig. 10: two boards, each at the bandwidth of Table II and at the one that gives Fig. 10.

    The bandwidth of Fig. 10 is calibrated on ZC706; ZCU104 gets the same share of its board's peak.
    """
    small, large = SPOTS[0], SPOTS[3]
    zc706, zcu104 = load_platform(small.board), load_platform(large.board)
    fast = zc706.calibrated_gb_s("figure-10")
    same_share = fast / zc706.calibrated_gb_s("board") * zcu104.calibrated_gb_s("board")
    return (
        StrategyPanel(small, zc706.bandwidth_gb_s, "calibrated to Table II"),
        StrategyPanel(large, zcu104.bandwidth_gb_s, "calibrated to Table II"),
        StrategyPanel(
            small,
            fast,
            f"Fig. 10 as described; {100 * fast / zc706.calibrated_gb_s('board'):.0f} % of the board's peak",
        ),
        StrategyPanel(large, round(same_share, 1), "the same share of the board's peak"),
    )


# Fig. 1b


class Quarters(NamedTuple):
    """GOP/s in each quarter of a network (the parts between exits) under every way of batching."""

    spot: Spot
    gops: dict[str, tuple[float, ...]]
    """Way of batching -> GOP/s of the quarters, first to last."""
    peak: float
    """GOP/s of the board."""


def quarters(spot: Spot) -> Quarters:
    """GOP/s on the NPU of Table I under every way of batching; only the last one has stackable PEs."""
    device = printed_npu(spot)
    devices = {
        name: device.model_copy(update={"batching": batching, "stackable": False})
        for name, batching in UNSTACKED.items()
    }
    devices[STACKED] = device
    gops = {name: _quarter_gops(spot, device) for name, device in devices.items()}
    return Quarters(spot, gops, peak_gops(spot))


def peak_gops(spot: Spot) -> float:
    """GOP/s of all DSPs of the board; a MAC counts as two operations."""
    board = load_platform(spot.board)
    return 2 * board.dsps * board.clock_mhz / 1e3


def _quarter_gops(spot: Spot, device: TiledNpu) -> tuple[float, ...]:
    """GOP/s of a batch of MAX_BATCH in each part of the network between two exits, without the exits' heads."""
    model = network(spot.model, EXITS)
    times_s = layer_times_s(model, device, MAX_BATCH)
    heads = tuple(f"{leave.name}/" for leave in model.exits)
    gops = []
    for subnet in subnets(model):
        layers = [index for index in subnet if not model.layers[index].name.startswith(heads)]
        macs = MAX_BATCH * sum(model.layers[index].macs for index in layers)
        gops.append(2e-9 * macs / sum(times_s[index] for index in layers))
    return tuple(gops)


def figure_1b(out: Path) -> Exhibit:
    """Draw Fig. 1b: GOP/s of every way of batching in each quarter of two networks."""
    spots = [quarters(spot) for spot in (SPOTS[0], SPOTS[3])]
    labels, y = [f"subnet {number}" for number in range(1, EXITS + 2)], Axis(label=f"GOP/s at B = {MAX_BATCH}")
    panels = [
        Panel(
            [Bars(labels, result.gops, COLOURS), ReferenceLine(result.peak, "peak")],
            f"{result.spot.name}, {tile(printed_npu(result.spot))}",
            y=y,
        )
        for result in spots
    ]
    title = "Fig. 1b: each way of batching in each quarter of the network"
    picture = pictures.picture(out, "fig1b-strategies", title, panels, size=(11, 3.9), columns=2)
    body = tuple(
        (result.spot.name, name, *(f"{value:.1f}" for value in values), f"{result.peak:.0f}")
        for result in spots
        for name, values in result.gops.items()
    )
    header = ("network, board", "batching", *(f"{label} GOP/s" for label in labels), "peak")
    return Exhibit(tuple(_quarter_row(result) for result in spots), (Table("Fig. 1b", header, body),), (picture,))


def _quarter_row(result: Quarters) -> Row:
    """Row on the text's claim that the best way of batching differs between the parts of a network."""
    uniform = ("SERIAL", "FC", "R", "P")  # the same in every layer
    best = [max(uniform, key=lambda name: result.gops[name][quarter]) for quarter in range(EXITS + 1)]
    gains = [result.gops["fluid"][quarter] / result.gops[name][quarter] for quarter, name in enumerate(best)]
    why = (
        f"drawn, not printed; best uniform way from the first to the last quarter: {', '.join(best)}; fluid with fixed "
        f"PEs over it: {', '.join(f'{gain:.2f}' for gain in gains)}; one NPU for all, at "
        f"{printed_npu(result.spot).bandwidth_gb_s:g} GB/s"
    )
    quantity = f"ways of batching that are best in some quarter, {result.spot.name}"
    return Row("Fig. 1b", quantity, None, len(set(best)), "", why)


# Fig. 10


@lru_cache(maxsize=256)
def throughput_gops(spot: Spot, line: str, bandwidth_gb_s: float, batch: int) -> float:
    """GOP/s of forward passes of *batch* samples on the hardware searched for *line*, a key of ABLATION."""
    device = search_design(spot, ABLATION[line], bandwidth_gb_s).device()
    model = network(spot.model)
    return 2e-9 * batch * model.macs / sum(layer_times_s(model, device, batch))


def figure_10(out: Path, shown: Sequence[StrategyPanel], batches: Sequence[int] = BATCHES) -> Exhibit:
    """Draw Fig. 10: throughput over the batch size, each way of batching on its own hardware."""
    picture = _picture(out, shown, batches)
    rows = [row for scene in shown for row in _ablation_rows(scene, batches)]
    body = [
        (
            scene.spot.name, f"{scene.bandwidth_gb_s:g}", line,
            tile(search_design(scene.spot, hardware, scene.bandwidth_gb_s).device()),
            *(f"{throughput_gops(scene.spot, line, scene.bandwidth_gb_s, batch):.1f}" for batch in batches),
        )
        for scene in shown
        for line, hardware in ABLATION.items()
    ]  # fmt: skip
    header = ("network, board", "GB/s", "batching", "design", *(f"B = {batch}" for batch in batches))
    table = Table(
        "Fig. 10: GOP/s over the batch size, each way of batching on hardware of its own search", header, tuple(body)
    )
    return Exhibit(tuple(rows), (table,), (picture,))


def _picture(out: Path, shown: Sequence[StrategyPanel], batches: Sequence[int]) -> Figure:
    title = "Fig. 10: throughput over the batch size, no exits, no arrivals"
    panels = [_panel(scene, batches) for scene in shown]
    return pictures.picture(out, "fig10-ablation", title, panels, size=(11, 7.2), columns=2, share_y="col")


def _panel(scene: StrategyPanel, batches: Sequence[int]) -> Panel:
    """A panel of throughput over the batch size: a curve per way of batching, and the peak."""
    curves = [
        Curve(
            batches, [throughput_gops(scene.spot, line, scene.bandwidth_gb_s, batch) for batch in batches], line,
            COLOURS[line], mark, size=5,
        )
        for mark, line in zip("v^s.o", ABLATION, strict=True)
    ]  # fmt: skip
    heading = f"{scene.spot.name}, {scene.bandwidth_gb_s:g} GB/s ({scene.why})"
    peak = ReferenceLine(peak_gops(scene.spot), "peak")
    return Panel([*curves, peak], heading, Axis(label="batch size"), Axis(label="GOP/s", low=0))


def _ablation_rows(scene: StrategyPanel, batches: Sequence[int]) -> list[Row]:
    """Rows of a panel of Fig. 10: fluid batching against the peak, the best other way, and fixed PEs."""
    spot, bandwidth_gb_s = scene.spot, scene.bandwidth_gb_s
    peak, setup = peak_gops(spot), f"{spot.name} at {bandwidth_gb_s:g} GB/s"

    def gops(line: str, batch: int) -> float:
        return throughput_gops(spot, line, bandwidth_gb_s, batch)

    others = {batch: max(gops(line, batch) for line in ("FC", "R", "P")) for batch in batches}
    over = [gops(STACKED, batch) / others[batch] for batch in batches]
    gains = [100 * (gops(STACKED, batch) / gops("fluid", batch) - 1) for batch in batches]
    claim = "the text says it approaches the peak for B > 3" if spot.model == "resnet50" else "drawn, not printed"
    return [
        Row(
            "Fig. 10", f"fluid, stackable PEs, B = 4, of the peak, {setup}", None, 100 * gops(STACKED, 4) / peak, "%",
            f"{claim}; {scene.why}; {100 * gops(STACKED, batches[-1]) / peak:.1f} % at B = {batches[-1]}",
        ),
        Row(
            "Fig. 10", f"fluid, stackable PEs, over the best of FC, R, P, B = {batches[-1]}, {setup}", None, over[-1],
            "x", f"drawn, not printed; from {min(over):.2f} to {max(over):.2f} over the batch sizes",
        ),
        Row(
            "Fig. 10", f"gain by stackable PEs, B = 1, {setup}", None, gains[0], "%",
            f"the text says more prominent for small batches; {gains[-1]:.1f} % at B = {batches[-1]}, most "
            f"{max(gains):.1f} % at B = {batches[gains.index(max(gains))]}",
        ),
    ]  # fmt: skip
