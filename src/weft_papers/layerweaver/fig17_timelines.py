"""Fig. 17 and 18: part of a schedule, one model at a time, under AI-MT, and woven."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from weft.devices.costs.program import Clock
from weft.reports.exhibits import Axis, Boxes, Drawable, Panel, ReferenceLine, Shade, Swatches
from weft.reports.pictures import GROUND
from weft.reports.trace import Floats, Trace
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Row
from weft_papers.layerweaver.lab import Models, Options, Scene, aimt_options, demand, joined_names, simulate_models

CNN, OTHER = "#0072b2", "#e69f00"
STEPS = 400
"""The number of starts tried for a window, evenly spread over a run."""


class Strip(NamedTuple):
    """A schedule in a picture: its label, its trace, and the window that is shown."""

    label: str
    trace: Trace
    start_s: float
    end_s: float

    @property
    def busy(self) -> tuple[float, float]:
        """Shares of the window in which the PE array and the DRAM channel work."""
        spans = ((self.trace.compute_start_s, self.trace.compute_end_s), _fetching(self.trace))
        array, channel = (_busy_until(resource, np.array([self.start_s, self.end_s])) for resource in spans)
        length = self.end_s - self.start_s
        return float(array[1] - array[0]) / length, float(channel[1] - channel[0]) / length


def _fetching(trace: Trace) -> tuple[Floats, Floats]:
    """Begin and end in seconds of each layer's weight transfer.

    A slot of the channel may begin with a wait for buffer space; the transfer is the last part of the slot.
    """
    per_byte = 1 / float(trace.settings["bandwidth_bytes_per_s"])
    return np.maximum(trace.fetch_start_s, trace.fetch_end_s - trace.weight_bytes * per_byte), trace.fetch_end_s


def _busy_until(spans: tuple[Floats, Floats], at_s: Floats) -> Floats:
    """Seconds of work that are done by each of the times *at_s*.

    spans: begins and ends of the intervals of work, in order and without overlap. Done work grows linearly within an
    interval and is constant between two, so it is interpolated between their ends.
    """
    start, end = spans
    done = np.concatenate([[0.0], np.cumsum(end - start)])
    times = np.stack([start, end], axis=1).ravel()
    levels = np.stack([done[:-1], done[1:]], axis=1).ravel()
    worked: Floats = np.interp(at_s, times, levels)
    return worked


def idlest(trace: Trace, length_s: float, settle_s: float) -> tuple[float, float]:
    """Begin and end of the window of *length_s* in which the PE array works least.

    settle_s: seconds at the begin and the end of the run that are left out.
    """
    last_start = trace.makespan_s - length_s - settle_s
    starts = np.linspace(settle_s, max(settle_s, last_start), STEPS)
    spans = trace.compute_start_s, trace.compute_end_s
    busy = _busy_until(spans, starts + length_s) - _busy_until(spans, starts)
    start_s = float(starts[int(np.argmin(busy))])
    return start_s, start_s + length_s


def figure_17(out: Path, scene: Scene, queries: int) -> Exhibit:
    """Draw Fig. 17: MobileNetV2 and BERT-base, each alone, and woven."""
    # Two queries of BERT-base and a little more, after the first two, in which the pipeline fills.
    window_s = 2.2 * _alone_s(scene, "BB")
    begin_s = 2 * _alone_s(scene, "BB")
    strips = []
    for models, policy, label in (
        (("MN",), "fifo", "MN alone"),
        (("BB",), "fifo", "BB alone"),
        (("MN", "BB"), "layerweaver", "MN + BB woven"),
    ):
        rounds = 24 if len(models) == 1 else queries
        trace = simulate_models(scene, models, policy, rounds).trace
        strips.append(Strip(label, trace, begin_s, begin_s + window_s))
    title = f"Fig. 17: MN and BB on {scene}, alone and woven by layerweaver"
    picture = _draw(out, "fig17-timeline", title, [strips], ["BB"])
    rows = [
        Row(
            "Fig. 17", f"PE busy in the window, {strip.label}", None, 100 * strip.busy[0], "%",
            f"DRAM {100 * strip.busy[1]:.1f} %; drawn, not printed (the caption says multi-batch, the text does not; "
            "we show the batch of the scenario on this NPU)",
        )
        for strip in strips
    ]  # fmt: skip
    return Exhibit(tuple(rows), pictures=(picture,))


def figure_18(out: Path, scene: Scene, queries: int) -> Exhibit:
    """Draw Fig. 18: AI-MT and Layerweaver, each in the window where its PE array idles most."""
    columns, rows = [], []
    for letter, pair in (("a", ("MN", "XL")), ("b", ("RN", "BL"))):
        # Three queries of the short model, or three tenths of a query of the long one.
        window_s = 3 * max(_alone_s(scene, pair[0]), 0.1 * _alone_s(scene, pair[1]))
        strips = [
            _idlest_strip(scene, pair, "aimt", queries, window_s, aimt_options(scene), "aimt, swept"),
            _idlest_strip(scene, pair, "aimt", queries, window_s, (), "aimt, defaults"),
            _idlest_strip(scene, pair, "layerweaver", queries, window_s, (), "layerweaver"),
        ]
        columns.append(strips)
        rows += [
            Row(
                f"Fig. 18{letter}",
                f"PE busy in the idlest {1e3 * window_s:.2f} ms of {joined_names(pair)}, {strip.label}", None,
                100 * strip.busy[0], "%",
                f"DRAM {100 * strip.busy[1]:.1f} %; drawn, not printed; each schedule at its own worst stretch, so "
                "that the window favours neither",
            )
            for strip in strips
        ]  # fmt: skip
    title = f"Fig. 18: where each schedule's PE array idles most, {scene}"
    picture = _draw(out, "fig18-timeline", title, columns, ["XL", "BL"])
    return Exhibit(tuple(rows), pictures=(picture,))


def _idlest_strip(
    scene: Scene, pair: Models, policy: str, queries: int, length_s: float, options: Options, label: str
) -> Strip:
    """Run a pair under a policy and show the window in which the PE array idles most."""
    trace = simulate_models(scene, pair, policy, queries, options).trace
    return Strip(label, trace, *idlest(trace, length_s, 2 * _alone_s(scene, pair[1])))


def _alone_s(scene: Scene, model: str) -> float:
    """Seconds that a query of a model takes alone."""
    return demand(scene, model).alone * Clock.of(scene.npu).tick_s


def _draw(out: Path, name: str, title: str, columns: list[list[Strip]], others: list[str]) -> Figure:
    """Draw the strips below each other, one column per pair; *others*: the memory-intensive models shown."""
    two_pairs = len(columns) > 1
    legend = {
        "compute-intensive model (MN, RN)" if two_pairs else "MN": CNN,
        f"memory-intensive model ({', '.join(others)})" if two_pairs else others[0]: OTHER,
        "idle": GROUND,
    }
    panels = [_strip_panel(strip, legend) for strips in zip(*columns, strict=True) for strip in strips]
    size = (13, 1.55 * len(columns[0]) + 1.2)
    return pictures.picture(out, name, title, panels, size=size, columns=len(columns))


def _strip_panel(strip: Strip, legend: dict[str, str]) -> Panel:
    """A panel with two rows of boxes, PE array below and DRAM channel above, and the busy share of each."""
    trace = strip.trace
    colours = np.array(
        [OTHER if model in ("bert-base", "bert-large", "xlnet-large") else CNN for model in trace.streams]
    )
    marks: list[Drawable] = [Swatches(legend)]
    for bottom, (start, end), busy in (
        (1.1, _fetching(trace), strip.busy[1]),
        (0.0, (trace.compute_start_s, trace.compute_end_s), strip.busy[0]),
    ):
        left, right = np.maximum(start, strip.start_s), np.minimum(end, strip.end_s)
        visible = np.flatnonzero(right > left)
        begins, lengths = 1e3 * (left[visible] - strip.start_s), 1e3 * (right[visible] - left[visible])
        bottoms, heights = np.full(len(visible), bottom), np.full(len(visible), 0.9)
        marks += [
            Shade(bottom, bottom + 0.9, GROUND, alpha=1),
            Boxes(begins, bottoms, lengths, heights, colours[trace.stream[visible]].tolist()),
            ReferenceLine(bottom + 0.45, f"{100 * busy:.0f} %", width=0),
        ]
    heading = f"{strip.label} ({' + '.join(trace.streams)}), from {1e3 * strip.start_s:.2f} ms of the run"
    x = Axis(label="time in the window (ms)", low=0, high=1e3 * (strip.end_s - strip.start_s))
    y = Axis(ticks=(0.45, 1.55), names=("PE", "DRAM"), low=-0.05, high=2.05)
    return Panel(marks, heading, x, y, grid="")
