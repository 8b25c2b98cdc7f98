"""A window of a trace as a picture: both resources as lanes, and the weight buffer under them.

It uses matplotlib's Figure object directly, so drawing leaves no global state and needs no display.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from weft.base.errors import InputError
from weft.reports.pictures import GROUND, INK, LIMIT, MUTED, RULE, picture_path, save
from weft.reports.trace import Floats, Intervals, Ints, Occupancy, Trace, occupancy
from weft.reports.trace_exports import model_colours

READABLE_SPANS = 450
"""Approximate limit of layers in a default window, so that single layers remain visible (4 pixels each)."""

MOST_BARS = 3000
"""With more bars in a lane, bars would be narrower than a pixel, and shares of time are drawn instead."""
COLUMNS = 700
"""Columns of shares of time in a lane; each is about 2 pixels wide."""

HELD, HELD_LINE = "#9aa5b1", "#52606d"
"""Colours of the weight buffer's curve: area and line."""
STALL, STALL_LINE = "#ffffff", "#7b8794"
"""Colours of stalls: area and hatching."""
SIZE_INCHES, LEFT, LEGEND_COLUMNS = (12.0, 4.6), 0.095, 6
UPPER, LOWER, TALL = 1.12, 0.0, 0.88
"""Bottoms of the two lanes, and their height, in data units of the lanes' axes."""
HATCH = 6 * "/"
UNITS = (("s", 1.0), ("ms", 1e3), ("µs", 1e6), ("ns", 1e9))
"""Units of time, and the number of each in a second."""


class DrawnLane(NamedTuple):
    """Intervals within the window: the index of each interval's span, starts and durations in axis units."""

    spans: Ints
    start: Floats
    duration: Floats


class DrawnLanes(NamedTuple):
    """The two resources as drawn."""

    channel: DrawnLane
    """Transfers: whole fetches, and the parts of stalled fetches."""
    array: DrawnLane
    stalls: DrawnLane

    @property
    def dense(self) -> bool:
        """Whether there are too many bars to draw each of them."""
        return max(len(self.channel.spans), len(self.array.spans)) > MOST_BARS


class Scale(NamedTuple):
    """The window, and the unit of its axis: a second is *per_second* units."""

    start_s: float
    end_s: float
    unit: str
    per_second: float


def draw_timeline(
    trace: Trace,
    path: Path | str,
    *,
    start_s: float = 0.0,
    end_s: float | None = None,
    title: str | None = None,
) -> Figure:
    """Draw ``timeline_figure`` into a PNG or SVG file, by the suffix of *path*."""
    picture_path(path)  # refuses a wrong suffix before anything is drawn
    with _picture_settings():
        figure = timeline_figure(trace, start_s=start_s, end_s=end_s, title=title)
        save(figure, path, dpi=160)
    return figure


def timeline_figure(
    trace: Trace, *, start_s: float = 0.0, end_s: float | None = None, title: str | None = None
) -> Figure:
    """Draw *trace* between *start_s* and *end_s*.

    Without *end_s*, the window ends when the slowest stream has completed three queries that began in it, or earlier if
    these would be too many layers to read. Busy shares are those of the window.
    """
    scale = _scale(trace, start_s, readable_end_s(trace, start_s) if end_s is None else end_s)
    with _picture_settings():
        return _make_figure(trace, scale, title)


def _picture_settings() -> AbstractContextManager[None]:
    """Return the settings of matplotlib while a picture is made; the salt makes ids in an SVG reproducible."""
    return matplotlib.rc_context(
        {"svg.hashsalt": "weft", "font.size": 9, "axes.edgecolor": RULE, "hatch.linewidth": 0.6}
    )


def readable_end_s(trace: Trace, start_s: float = 0.0) -> float:
    """Return the default end of a window that begins at *start_s*; see ``timeline_figure``."""
    # the ends of the queries of the stream whose first query ends last
    slowest = max(_completions_s(trace, start_s), key=lambda ends_s: ends_s[0], default=[trace.makespan_s])
    starts_s = np.sort(trace.fetch_start_s[trace.fetch_start_s >= start_s])
    if len(starts_s) <= READABLE_SPANS:
        return slowest[-1]
    readable_s = float(starts_s[READABLE_SPANS])
    return max((end_s for end_s in slowest if end_s <= readable_s), default=readable_s)


def _completions_s(trace: Trace, start_s: float) -> list[list[float]]:
    """Return for each stream the ends in seconds of the first three queries that begin at or after *start_s*."""
    extents: dict[tuple[int, int], tuple[float, float]] = {}
    columns = (
        trace.stream.tolist(),
        trace.query.tolist(),
        trace.fetch_start_s.tolist(),
        trace.compute_end_s.tolist(),
    )
    for stream, query, begin_s, end_s in zip(*columns, strict=True):
        first_s, last_s = extents.get((stream, query), (begin_s, end_s))
        extents[stream, query] = min(first_s, begin_s), max(last_s, end_s)
    ends: dict[int, list[float]] = defaultdict(list)
    for (stream, _), (begin_s, end_s) in extents.items():
        if begin_s >= start_s:
            ends[stream].append(end_s)
    return [sorted(times_s)[:3] for times_s in ends.values()]


def _scale(trace: Trace, start_s: float, end_s: float) -> Scale:
    """Return the window with the largest unit of which it is at least two; InputError for an empty window."""
    if not end_s > start_s or start_s >= trace.makespan_s:
        raise InputError(f"nothing to draw from {start_s:g} s to {end_s:g} s; the trace ends at {trace.makespan_s:g} s")
    usable = ((unit, per_second) for unit, per_second in UNITS if (end_s - start_s) * per_second >= 2)
    unit, per_second = next(usable, UNITS[-1])
    return Scale(start_s, end_s, unit, per_second)


def _make_figure(trace: Trace, scale: Scale, title: str | None) -> Figure:
    """Draw a heading, a legend, the lanes, and the weight buffer below them; *title* replaces the models' names."""
    figure = Figure(figsize=SIZE_INCHES, facecolor="white")
    FigureCanvasAgg(figure)
    colours = model_colours(trace)
    buffer = occupancy(trace)
    lanes = _lanes(trace, buffer, scale)
    handles = [Patch(facecolor=colour, label=model) for model, colour in colours.items()]
    if len(lanes.stalls.spans):
        handles.append(Patch(facecolor=STALL, edgecolor=STALL_LINE, hatch=HATCH, lw=0.6, label="stalled: buffer full"))
    top = 0.845 - 0.052 * -(-len(handles) // LEGEND_COLUMNS)
    grid = figure.add_gridspec(2, 1, height_ratios=(2.6, 1), left=LEFT, right=0.915, top=top, bottom=0.12)
    lanes_axes = figure.add_subplot(grid[0])
    buffer_axes = figure.add_subplot(grid[1], sharex=lanes_axes)
    buffer_axes.set_xlim(scale.start_s * scale.per_second, scale.end_s * scale.per_second)
    _draw_lanes(lanes_axes, trace, scale, lanes, colours)
    _draw_buffer(buffer_axes, trace, buffer, scale)
    _draw_heading(figure, trace, scale, title, dense=lanes.dense)
    _draw_legend(figure, handles)
    return figure


def _lanes(trace: Trace, buffer: Occupancy, scale: Scale) -> DrawnLanes:
    computes = Intervals(np.arange(len(trace)), trace.compute_start_s, trace.compute_end_s)
    return DrawnLanes(_lane(buffer.transfers, scale), _lane(computes, scale), _lane(buffer.stalls, scale))


def _draw_lanes(axes: Axes, trace: Trace, scale: Scale, lanes: DrawnLanes, colours: dict[str, str]) -> None:
    """Draw both lanes: bars or, if there are too many, shares of time; and their busy shares in the right margin."""
    for bottom, lane, stalls in ((UPPER, lanes.channel, lanes.stalls), (LOWER, lanes.array, None)):
        axes.axhspan(bottom, bottom + TALL, facecolor=GROUND, zorder=0)
        if lanes.dense:
            _draw_shares(axes, trace, lane, stalls, bottom, colours)
        else:
            _draw_bars(axes, trace, lane, bottom, colours)
            if stalls:
                _draw_stalls(axes, trace, stalls, bottom, colours)
        busy = f"{100 * _busy_share(lane, scale):.1f} %\nbusy"
        middle = bottom + TALL / 2
        axes.text(1.012, middle, busy, transform=axes.get_yaxis_transform(), va="center", color=INK)
    axes.set_ylim(LOWER - 0.04, UPPER + TALL + 0.04)
    axes.set_yticks([UPPER + TALL / 2, LOWER + TALL / 2], ["DRAM channel", "PE array"], color=INK)
    axes.tick_params(axis="both", length=0, labelbottom=False)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)


def _draw_bars(axes: Axes, trace: Trace, lane: DrawnLane, bottom: float, colours: dict[str, str]) -> None:
    """Draw a bar for each interval of a lane, with layer names where they fit; *bottom*: of the lane, in data units."""
    fills = _fills(trace, lane, colours)
    # a darker seam separates bars while there are few; a light one would look like idle time
    few = len(np.unique(lane.spans)) <= READABLE_SPANS
    seams = [_mix_colour(fill, 0.0, 0.3) for fill in fills] if few else "none"
    bars = list(zip(lane.start.tolist(), lane.duration.tolist(), strict=True))
    axes.broken_barh(bars, (bottom, TALL), facecolors=fills, edgecolors=seams, linewidths=0.3)
    _name_layers(axes, trace, lane, fills, bottom + TALL / 2)


def _draw_stalls(axes: Axes, trace: Trace, stalls: DrawnLane, bottom: float, colours: dict[str, str]) -> None:
    """Draw the time a fetch waits for space in its model's colour, pale and hatched, as no byte is moved."""
    models = np.array(trace.streams, dtype=object)[trace.stream[stalls.spans]]
    for model, colour in colours.items():
        rows = np.flatnonzero(models == model)  # a collection has one hatch, hence one collection for each model
        bars = list(zip(stalls.start[rows].tolist(), stalls.duration[rows].tolist(), strict=True))
        hatch, pale = _mix_colour(colour, 1.0, 0.35), _mix_colour(colour, 1.0, 0.85)
        axes.broken_barh(bars, (bottom, TALL), facecolors=pale, edgecolors=hatch, hatch=HATCH, linewidths=0)


def _draw_shares(
    axes: Axes, trace: Trace, lane: DrawnLane, stalls: DrawnLane | None, bottom: float, colours: dict[str, str]
) -> None:
    """Draw each model's share of the time per column, stacked, for bars that would be narrower than a pixel."""
    edges = np.linspace(*axes.get_xlim(), COLUMNS + 1)
    models = np.array(trace.streams, dtype=object)[trace.stream[lane.spans]]
    base = np.full(COLUMNS + 1, bottom)
    for model, colour in colours.items():
        rows = models == model
        top = base + TALL * _share(edges, lane.start[rows], lane.duration[rows])
        axes.fill_between(edges, base, top, step="post", facecolor=colour, linewidth=0)
        base = top
    if stalls and len(stalls.spans):
        top = base + TALL * _share(edges, stalls.start, stalls.duration)
        axes.fill_between(edges, base, top, step="post", facecolor=STALL, edgecolor=STALL_LINE, hatch=HATCH, lw=0)


def _share(edges: Floats, start: Floats, duration: Floats) -> Floats:
    """Return the share of each column between *edges* that these intervals take; the last share is repeated once."""
    if not len(start):
        return np.zeros(len(edges))
    order = np.argsort(start, kind="stable")
    start, duration = start[order], duration[order]
    # The busy time before t is linear between the ends of intervals; its difference over a column is the share.
    total = np.cumsum(duration)
    times = np.stack([start, start + duration], axis=1).ravel()
    busy_before = np.stack([total - duration, total], axis=1).ravel()
    share = np.diff(np.interp(edges, times, busy_before)) / np.diff(edges)
    return np.append(share, share[-1])


def _lane(intervals: Intervals, scale: Scale) -> DrawnLane:
    """Return the intervals clipped to the window."""
    start_s, end_s = np.maximum(intervals.start_s, scale.start_s), np.minimum(intervals.end_s, scale.end_s)
    inside = np.flatnonzero(end_s > start_s)
    start, end = start_s[inside] * scale.per_second, end_s[inside] * scale.per_second
    return DrawnLane(intervals.span[inside], start, end - start)


def _fills(trace: Trace, lane: DrawnLane, colours: dict[str, str]) -> list[str]:
    """Return the colour of each bar; odd queries are lighter, which shows where a query ends and the next begins."""
    shades = [(colours[model], _mix_colour(colours[model], 1.0, 0.38)) for model in trace.streams]
    streams, odd = trace.stream[lane.spans].tolist(), (trace.query[lane.spans] % 2).tolist()
    return [shades[stream][shade] for stream, shade in zip(streams, odd, strict=True)]


def _mix_colour(colour: str, towards: float, share: float) -> str:
    """Mix *colour* with black (*towards* 0) or white (1)."""
    red, green, blue = ((1 - share) * part + share * towards for part in to_rgb(colour))
    return to_hex((red, green, blue))


def _name_layers(axes: Axes, trace: Trace, lane: DrawnLane, fills: list[str], middle: float) -> None:
    """Write each layer's name, or its last part, into its bar if the text fits; *middle*: height of the texts."""
    left, right = axes.get_xlim()
    # Characters that fit into each bar: the axes take 0.82 of the width of the figure, a character 4.8 points of 1/72".
    characters = lane.duration / (right - left) * SIZE_INCHES[0] * 0.82 * 72 / 4.8
    for bar in np.flatnonzero(characters > 4).tolist():
        span = lane.spans[bar]
        name = trace.layers[trace.stream[span]][trace.layer[span]]
        shown = next((text for text in (name, "…" + name.split(".")[-1]) if len(text) < characters[bar]), None)
        if shown:
            red, green, blue = to_rgb(fills[bar])
            ink = INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "white"  # luma of ITU-R BT.601
            centre = lane.start[bar] + lane.duration[bar] / 2
            axes.text(centre, middle, shown, ha="center", va="center", fontsize=7, color=ink)


def _busy_share(lane: DrawnLane, scale: Scale) -> float:
    """Return the share of the window's time in which the lane is busy."""
    return float(lane.duration.sum()) / ((scale.end_s - scale.start_s) * scale.per_second)


def _draw_buffer(axes: Axes, trace: Trace, buffer: Occupancy, scale: Scale) -> None:
    """Draw the bytes in the weight buffer over the window, with its capacity."""
    times, held = _window_curve(buffer, scale)
    if len(times) <= 4 * MOST_BARS:
        axes.fill_between(times, held, color=HELD, alpha=0.55, linewidth=0)
        axes.plot(times, held, color=HELD_LINE, linewidth=0.8)
    else:
        _draw_envelope(axes, times, held)
    top = max(float(held.max()), _draw_capacity(axes, trace))
    axes.set_ylim(0, top * 1.12 or 1.0)
    axes.set_ylabel("buffer (MB)", color=INK)
    axes.set_xlabel(f"time ({scale.unit})", color=INK)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.tick_params(colors=MUTED, length=3)
    axes.grid(axis="x", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_capacity(axes: Axes, trace: Trace) -> float:
    """Draw a line at the capacity of the buffer, if the settings have it; returns its height in MB, else 0."""
    capacity = trace.settings.get("weight_buffer_bytes")
    if not isinstance(capacity, (int, float)) or capacity <= 0:
        return 0.0
    height, label = capacity / 1e6, f"{capacity / 1e6:.3g} MB\ncapacity"
    axes.axhline(height, color=LIMIT, linewidth=1, linestyle=(0, (4, 2)))
    right_of = axes.get_yaxis_transform()
    axes.text(1.012, height, label, transform=right_of, va="center", color=LIMIT, fontsize=8)
    return height


def _draw_envelope(axes: Axes, times: Floats, held: Floats) -> None:
    """Draw a curve with many bends per pixel: its minimum in a dark tone, its maximum in a lighter tone."""
    first = np.linspace(0, len(times) - 1, COLUMNS, endpoint=False, dtype=np.int64)
    edges, border = np.append(times[first], times[-1]), held[np.append(first[1:], len(held) - 1)]
    for extreme, alpha in ((np.maximum, 0.45), (np.minimum, 0.6)):
        level = extreme(extreme.reduceat(held, first), border)  # the last line of a column ends in the next column
        axes.fill_between(edges, np.append(level, level[-1]), step="post", color=HELD, alpha=alpha, lw=0)


def _window_curve(buffer: Occupancy, scale: Scale) -> tuple[Floats, Floats]:
    """Return the buffer's curve within the window, in axis units and MB, with its level at both borders."""
    first = int(np.searchsorted(buffer.time_s, scale.start_s, side="right"))
    last = int(np.searchsorted(buffer.time_s, scale.end_s, side="left"))
    times_s = np.repeat(buffer.time_s[first:last], 2)
    levels = np.stack([buffer.before[first:last], buffer.after[first:last]], axis=1).ravel()
    times_s = np.concatenate([[scale.start_s], times_s, [scale.end_s]])
    levels = np.concatenate([[_level(buffer, first, scale.start_s)], levels, [_level(buffer, last, scale.end_s)]])
    return times_s * scale.per_second, levels / 1e6


def _level(buffer: Occupancy, upcoming: int, time_s: float) -> float:
    """Return the bytes in the buffer at *time_s*, between the instants *upcoming* - 1 and *upcoming* of its curve."""
    if upcoming == 0:
        return 0.0
    if upcoming == len(buffer.time_s):
        return float(buffer.after[-1])
    ends_s, levels = buffer.time_s[upcoming - 1 : upcoming + 1], (buffer.after[upcoming - 1], buffer.before[upcoming])
    return float(np.interp(time_s, ends_s, levels))


def _draw_heading(figure: Figure, trace: Trace, scale: Scale, title: str | None, *, dense: bool) -> None:
    """Write the title, and below it the window and how to read the lanes; *dense*: as in ``DrawnLanes``."""
    figure.text(LEFT, 0.955, title or _title(trace), fontsize=13, fontweight="bold", color=INK, va="center")
    window = f"{_time_text(scale.start_s)} to {_time_text(scale.end_s)} of {_time_text(trace.makespan_s)}"
    reading = "height is each model's share of the time" if dense else "every other query of a model is lighter"
    figure.text(LEFT, 0.895, f"{window}; {reading}", color=MUTED, va="center")


def _draw_legend(figure: Figure, handles: list[Patch]) -> None:
    """Draw the legend below the heading, aligned with it at the left."""
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(LEFT - 0.0085, 0.885),
        ncols=LEGEND_COLUMNS,
        frameon=False,
        handlelength=1,
        handleheight=1,
        labelcolor=INK,
    )


def _title(trace: Trace) -> str:
    models = " + ".join(trace.streams)
    return models if len(models) <= 90 else f"{len(trace.streams)} streams"


def _time_text(seconds: float) -> str:
    """Return a time in the largest unit of which it is at least one."""
    if seconds == 0:
        return "0"
    usable = ((unit, per_second) for unit, per_second in UNITS if seconds * per_second >= 1)
    unit, per_second = next(usable, UNITS[0])
    return f"{seconds * per_second:.4g} {unit}"
