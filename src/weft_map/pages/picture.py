"""Pictures of schedules on a SoC, for print: outcomes above each other on one time axis, and models that come and go.

In the picture of an outcome each bar is a piece of a step. Its hue is the task, its height the speed; it is darker the
more the step is slowed down, and the height lost to contention is hatched. Arrows and thick lines are moves between
units, dotted lines are waits for a unit. The memory demand is below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import StrMethodFormatter

from weft.base.errors import InputError
from weft.reports.page import PALETTE
from weft.reports.pictures import GROUND, INK, LIMIT, MUTED, RULE, picture_path, save
from weft.reports.timeline import UNITS
from weft_map.dynamic import DynamicLog, Frame, PhaseLog
from weft_map.pages.numbers import CONTENDED, RanStep, demand_of, lane_name, lanes_of, report_of, steps_of
from weft_map.schedule import Outcome, RunInterval, Transfer

WIDE_INCHES, LANE_INCHES, DEMAND_INCHES, HEAD_INCHES, FOOT_INCHES = 12.0, 0.62, 0.62, 0.75, 0.6
LEFT, RIGHT = 0.085, 0.925
"""Edges of the axes, as shares of the figure's width."""
LEGEND_INCHES, LEGEND_COLUMNS, LONGEST_NAME = 0.2, 7, 24
"""Height of a row of the legend, its columns, and the longest name in characters."""
PITCH, TALL = 1.0, 0.7
"""Distance from one lane to the next, and height of a bar at full speed; waits and moves are drawn in the gap above."""
PALEST = 0.62
"""Share of white in the bar of a step that nothing slows down."""
LOST_HATCH, TASK_HATCHES = "/////", ("", "\\\\\\", "...", "|||", "---", "xxx")
"""Hatch of the height lost to contention, and one per task, so that a print without colours can be read."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """The scales that all schedules of a picture share."""

    end: float
    """End of the time axis, in its unit."""
    unit: str
    per_second: float
    """Units of the time axis per second."""
    slowest: float
    """The largest slow-down, which has the darkest colour."""
    most_gb_s: float
    """The top of the axis of memory demand, without margin."""

    def tone(self, task: int, slow_down: float) -> str:
        """The colour (hex) of a task at *slow_down*: its hue, paler the less it is slowed down."""
        white_share = PALEST * (1 - min(1.0, (slow_down - 1) / (self.slowest - 1)))
        red, green, blue = ((1 - white_share) * channel + white_share for channel in to_rgb(_hue(task)))
        return to_hex((red, green, blue))


def draw_mapping(outcomes: Sequence[Outcome], path: Path | str, *, title: str | None = None) -> Figure:
    """Draw *outcomes*, the first on top, as a PNG or SVG file, by the suffix of *path*."""
    picture_path(path)
    if not outcomes:
        raise InputError("there is no outcome to draw; give at least one")
    with matplotlib.rc_context(
        {"svg.hashsalt": "weft", "font.size": 9, "axes.edgecolor": RULE, "hatch.linewidth": 0.5}
    ):
        figure = _make_figure(outcomes, title)
        save(figure, path, dpi=160)
    return figure


def _make_figure(outcomes: Sequence[Outcome], title: str | None) -> Figure:
    """Draw the outcomes as blocks, each lanes above memory demand, below a title and a legend."""
    scale, problem = _scale(outcomes), outcomes[0].problem
    lanes_inches = LANE_INCHES * len(lanes_of(problem))
    block_inches = HEAD_INCHES + lanes_inches + DEMAND_INCHES
    handles = _legend_entries(outcomes[0], scale)
    head_inches = HEAD_INCHES + LEGEND_INCHES * ((len(handles) - 1) // LEGEND_COLUMNS)
    tall_inches = head_inches + block_inches * len(outcomes) + FOOT_INCHES
    figure = Figure(figsize=(WIDE_INCHES, tall_inches), facecolor="white")
    FigureCanvasAgg(figure)  # draws without a display
    top = tall_inches - head_inches

    def axes(below: float, tall: float) -> Axes:
        """Add axes of height *tall*, *below* the title and the legend; both in inches."""
        return figure.add_axes((LEFT, (top - below - tall) / tall_inches, RIGHT - LEFT, tall / tall_inches))

    for number, outcome in enumerate(outcomes):
        above = number * block_inches + HEAD_INCHES * 0.8
        lanes, demand = axes(above, lanes_inches), axes(above + lanes_inches + 0.06, DEMAND_INCHES)
        _draw_lanes(lanes, outcome, scale)
        _draw_demand(demand, outcome, scale)
        _draw_ends((lanes, demand), outcome, scale)
        demand.tick_params(labelbottom=number == len(outcomes) - 1)
    demand.set_xlabel(f"time ({scale.unit})", color=INK)
    names = " + ".join(task.name for task in problem.tasks)
    figure.text(
        LEFT, 1 - 0.24 / tall_inches, title or f"{names} on {problem.soc.name}", size=12, weight="bold", color=INK
    )
    figure.legend(
        handles=handles, ncols=LEGEND_COLUMNS, loc="upper left", frameon=False, fontsize=8, columnspacing=1.4,
        bbox_to_anchor=(LEFT - 0.007, 1 - 0.32 / tall_inches),
    )  # fmt: skip
    return figure


def _scale(outcomes: Sequence[Outcome]) -> _Scale:
    """The scales for all *outcomes*; time is in the first of ``UNITS`` in which the longest makespan is at least 2."""
    end_s = max(outcome.makespan_s for outcome in outcomes)
    fitting = ((unit, per_second) for unit, per_second in UNITS if end_s * per_second >= 2)
    unit, per_second = next(fitting, UNITS[-1])
    # at least 1.02, so that a hardly contended run is drawn pale
    slowest = max([1.02, *(piece.slow_down for outcome in outcomes for piece in outcome.pieces)])
    peaks_gb_s = [outcome.problem.soc.bandwidth_gb_s for outcome in outcomes]
    demands_gb_s = [float(demand_of(outcome).gb_s.sum(axis=1).max(initial=0.0)) for outcome in outcomes]
    return _Scale((end_s or 1.0) * per_second, unit, per_second, slowest, max(*peaks_gb_s, *demands_gb_s))


def _draw_lanes(axes: Axes, outcome: Outcome, scale: _Scale) -> None:
    """Draw the steps and moves of *outcome* in a lane per instance of a unit, with its busy share on the right."""
    lanes, report = lanes_of(outcome.problem), report_of(outcome)
    bottom_of_lane = {lane: -PITCH * (index + 1) for index, lane in enumerate(lanes)}
    for lane, bottom in bottom_of_lane.items():
        axes.axhspan(bottom, bottom + TALL, facecolor=GROUND, zorder=0)
        busy = f"{100 * report.units[lanes.index(lane)].busy_share:.1f} %\nbusy"
        right_of = axes.get_yaxis_transform()
        axes.text(1.01, bottom + TALL / 2, busy, transform=right_of, va="center", color=INK, size=8)
    for piece in outcome.pieces:
        _draw_piece(axes, piece, bottom_of_lane[piece.unit, piece.instance], scale)
    steps = {(step.task, step.step): step for step in steps_of(outcome)}
    for step in steps.values():
        _draw_step(axes, outcome, step, bottom_of_lane[step.unit, step.instance], scale)
    for move in outcome.moves:
        _draw_move(axes, move, steps, bottom_of_lane, scale)
    axes.set(xlim=(0, scale.end * 1.005), ylim=(-PITCH * len(lanes) - 0.03, 0))
    axes.set_yticks(
        [bottom + TALL / 2 for bottom in bottom_of_lane.values()], [lane_name(outcome.problem, *lane) for lane in lanes]
    )
    axes.tick_params(axis="both", length=0, labelbottom=False, labelcolor=INK)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)


def _hue(task: int) -> str:
    return PALETTE[task % len(PALETTE)]


def _hatch(task: int) -> str:
    return TASK_HATCHES[task % len(TASK_HATCHES)]


def _dark(task: int) -> str:
    return _darker(_hue(task), 0.75)


def _darker(colour: str, share: float) -> str:
    red, green, blue = (share * channel for channel in to_rgb(colour))
    return to_hex((red, green, blue))


def _draw_piece(axes: Axes, piece: RunInterval, bottom: float, scale: _Scale) -> None:
    """Draw a bar whose height is the speed, and hatch the height lost to contention."""
    start, width = piece.start_s * scale.per_second, (piece.end_s - piece.start_s) * scale.per_second
    height, tone = TALL / piece.slow_down, scale.tone(piece.task, piece.slow_down)
    shade, hatch = _darker(tone, 0.82), _hatch(piece.task)
    axes.add_patch(Rectangle((start, bottom), width, height, facecolor=tone, edgecolor=shade, hatch=hatch, linewidth=0))
    if piece.slow_down > CONTENDED:
        lost = Rectangle((start, bottom + height), width, TALL - height, facecolor="none", edgecolor=LIMIT, linewidth=0)
        lost.set_hatch(LOST_HATCH)
        axes.add_patch(lost)


def _draw_step(axes: Axes, outcome: Outcome, step: RanStep, bottom: float, scale: _Scale) -> None:
    """Draw a frame around a step with its name, and a dotted line while it waits for its unit."""
    start, end = step.start_s * scale.per_second, step.end_s * scale.per_second
    frame = Rectangle((start, bottom), end - start, TALL, facecolor="none", edgecolor=_dark(step.task), linewidth=0.8)
    axes.add_patch(frame)
    if step.start_s > step.ready_s:
        waits = [step.ready_s * scale.per_second, start]
        axes.plot(waits, [bottom + TALL + 0.1] * 2, linestyle=":", color=_dark(step.task), linewidth=1.4)
        axes.plot(start, bottom + TALL + 0.1, marker="|", color=_dark(step.task), markersize=5)
    _name_step(axes, outcome.problem.step(step.task, step.step).name, step, bottom, scale)


def _name_step(axes: Axes, name: str, step: RanStep, bottom: float, scale: _Scale) -> None:
    """Write the name of a step into its widest piece, with the slow-down, if they fit."""
    widest = max(step.pieces, key=lambda piece: piece.end_s - piece.start_s)
    start, end = widest.start_s * scale.per_second, widest.end_s * scale.per_second
    room_chars = (end - start) / scale.end * WIDE_INCHES * (RIGHT - LEFT) * 72 / 4.2  # a character: 4.2 points
    if len(name) >= room_chars:
        return
    slow_down_text = f"\n\u00d7{widest.slow_down:.2f}" if widest.slow_down > 1.005 and room_chars > 6 else ""
    tone = to_rgb(scale.tone(step.task, widest.slow_down))
    luminance = float(np.dot((0.299, 0.587, 0.114), tone))
    ink = INK if luminance > 0.45 else "white"
    middle = bottom + TALL / widest.slow_down / 2
    text = name + slow_down_text
    axes.text((start + end) / 2, middle, text, ha="center", va="center", size=6.5, color=ink, linespacing=1.05)


def _draw_move(
    axes: Axes,
    move: Transfer,
    steps: dict[tuple[int, int], RanStep],
    bottom_of_lane: dict[tuple[int, int], float],
    scale: _Scale,
) -> None:
    """Draw a move: a bar while the task moves to its next unit, and an arrow from the unit that it left."""
    before, after = steps.get((move.task, move.step - 1)), steps.get((move.task, move.step))
    start, end = move.start_s * scale.per_second, move.end_s * scale.per_second
    step_beside = after or before
    assert step_beside is not None
    height = bottom_of_lane[step_beside.unit, step_beside.instance] + TALL + 0.1
    axes.plot([start, end], [height, height], color=_dark(move.task), linewidth=4, solid_capstyle="butt")
    if before and after and before.unit != after.unit:
        source = bottom_of_lane[before.unit, before.instance]
        goes_down = source > bottom_of_lane[after.unit, after.instance]
        arrow_tail = (start, source if goes_down else source + TALL)
        arrow = {"arrowstyle": "-|>", "color": _dark(move.task), "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (start, height), arrow_tail, arrowprops=arrow)


def _draw_demand(axes: Axes, outcome: Outcome, scale: _Scale) -> None:
    """Draw the memory demand of the tasks, stacked, and the memory's bandwidth."""
    demand, peak = demand_of(outcome), outcome.problem.soc.bandwidth_gb_s
    times, stack_bottom = demand.times_s * scale.per_second, np.zeros(len(demand.times_s))
    for task in range(demand.gb_s.shape[1]):
        stack_top = stack_bottom + np.append(demand.gb_s[:, task], 0.0)
        colour = scale.tone(task, 1 + 0.35 * (scale.slowest - 1))
        axes.fill_between(times, stack_bottom, stack_top, step="post", facecolor=colour, linewidth=0)
        stack_bottom = stack_top
    axes.axhline(peak, color=LIMIT, linewidth=1, linestyle=(0, (4, 2)))
    axes.text(1.01, peak, f"{peak:g} peak", transform=axes.get_yaxis_transform(), va="center", color=LIMIT, size=8)
    axes.set(xlim=(0, scale.end * 1.005), ylim=(0, 1.12 * scale.most_gb_s))
    axes.set_ylabel("GB/s", color=INK)
    axes.tick_params(colors=MUTED, length=3)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_ends(axes_pair: tuple[Axes, Axes], outcome: Outcome, scale: _Scale) -> None:
    """Draw a line at the end of each task, and its name above, in rows so that names do not overlap."""
    lanes, row_ends = axes_pair[0], [0.0] * len(outcome.finish_s)
    for rank, task in enumerate(sorted(range(len(row_ends)), key=lambda task: outcome.finish_s[task])):
        end, last = outcome.finish_s[task] * scale.per_second, rank == len(row_ends) - 1
        for axes in axes_pair:
            axes.axvline(end, color=_dark(task), linewidth=1.8 if last else 1.0, linestyle="-" if last else "--")
        label = f"{_short(outcome.problem.tasks[task].name)} {end:.4g} {scale.unit}"
        label_width = 5.0 * len(label) / 72 / WIDE_INCHES / (RIGHT - LEFT) * scale.end  # a character: 5 points
        left = max(0.0, end - label_width)  # edge of the label, which ends at the line if there is room
        row = next(row for row, row_end in enumerate(row_ends) if row_end <= left or row == len(row_ends) - 1)
        row_ends[row] = left + label_width
        lanes.annotate(
            label, (left, 0) if left == 0 else (end, 0), (2 if left == 0 else -2, 3 + 9.5 * min(row, 2)), size=8,
            ha="left" if left == 0 else "right", textcoords="offset points", weight="bold" if last else "normal",
            color=_dark(task), annotation_clip=False,
        )  # fmt: skip
    name = outcome.schedule.made_by or "schedule"
    lanes.annotate(
        name, (0, 0), (0, 33), size=10, weight="bold", color=INK, textcoords="offset points", annotation_clip=False
    )


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def _legend_entries(outcome: Outcome, scale: _Scale) -> list[Patch | Line2D]:
    """The entries of the legend: the tasks, then what colours and lines mean."""
    tasks = [
        Patch(facecolor=_hue(n), hatch=_hatch(n), edgecolor=_dark(n), linewidth=0, label=_short(task.name))
        for n, task in enumerate(outcome.problem.tasks)
    ]
    return [
        *tasks,
        Patch(facecolor=scale.tone(0, 1.0), edgecolor=_dark(0), label="slow-down 1.0"),
        Patch(facecolor=scale.tone(0, scale.slowest), edgecolor=_dark(0), label=f"slow-down {scale.slowest:.2f}"),
        Patch(facecolor="none", edgecolor=LIMIT, hatch=LOST_HATCH, linewidth=0, label="lost to contention"),
        Line2D([], [], color=_dark(0), linewidth=4, label="moves to a unit"),
        Line2D([], [], color=_dark(0), linestyle=":", linewidth=1.4, label="waits for a unit"),
    ]


OURS, ORACLE, STAR = PALETTE[0], "#c98200", PALETTE[5]
MOST_PANELS = 4
"""The first phases, up to this many, get a panel of their own with a logarithmic time axis."""
FIRST_MS = 1.0
"""Start of a panel's logarithmic time axis; earlier events are drawn there."""


def draw_dynamic(log: DynamicLog, path: Path | str) -> Figure:
    """Draw the latency per frame of *log* as PNG or SVG: over the whole run, and one panel per phase."""
    picture_path(path)
    with matplotlib.rc_context({"svg.hashsalt": "weft", "font.size": 9, "axes.edgecolor": RULE, "text.color": INK}):
        figure = _dynamic_figure(log)
        save(figure, path)
    return figure


def _dynamic_figure(log: DynamicLog) -> Figure:
    """Draw the whole run above one panel per phase."""
    figure = Figure(figsize=(12.0, 6.2), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)  # draws without a display
    panels = min(len(log.phases), MOST_PANELS)
    grid = figure.add_gridspec(2, panels, height_ratios=(1, 1.15))
    run_axes = figure.add_subplot(grid[0, :])
    _draw_run(run_axes, log)
    for number in range(panels):
        axes = figure.add_subplot(grid[1, number])
        _draw_phase_panel(axes, log, number)
        if number == 0:
            axes.set_ylabel("latency per frame (ms)")
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=MUTED, labelcolor=INK)
    figure.suptitle(f"models that come and go on {log.soc}", x=0.01, ha="left", weight="bold", size=12)
    handles, labels = run_axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right", ncols=len(labels), frameon=False)
    return figure


def _draw_run(axes: Axes, log: DynamicLog) -> None:
    """Draw latency per frame over the whole run."""
    frames = [[frame for frame in log.frames if frame.phase == number] for number in range(len(log.phases))]
    for number, (phase, phase_frames) in enumerate(zip(log.phases, frames, strict=True)):
        _draw_steps(axes, phase, phase_frames, labelled=number == 0)
        axes.text(
            (phase.start_s + phase.end_s) / 2, 1.01, _phase_names(phase), ha="center", va="bottom", size=8, color=MUTED,
            transform=axes.get_xaxis_transform(),
        )  # fmt: skip
        if number:
            axes.axvline(phase.start_s, color=RULE, linewidth=1)
    used = [update for update in log.updates if update.used_s is not None]
    axes.scatter(
        [update.used_s or 0.0 for update in used], [1e3 * update.latency_s for update in used], marker="*", s=60,
        color=STAR, zorder=3, label="a better schedule",
    )  # fmt: skip
    for event in log.events:
        axes.axvline(event.at_s, color=LIMIT, linewidth=1, linestyle=":")
    highest_ms = max((1e3 * frame.latency_s for frame in log.frames), default=1.0)
    axes.set(xlim=(0, log.phases[-1].end_s), ylim=(0, 1.05 * highest_ms))
    axes.set(xlabel="time (s)", ylabel="latency per frame (ms)")


def _draw_steps(axes: Axes, phase: PhaseLog, frames: list[Frame], *, labelled: bool) -> None:
    """Draw the latencies of one phase's frames and its oracle; *labelled*: with entries in the legend."""
    times = [frame.start_s for frame in frames] + [phase.end_s]
    latencies = [1e3 * frame.latency_s for frame in frames]
    if latencies:
        label = "in use" if labelled else None
        axes.step(times, [*latencies, latencies[-1]], where="post", color=OURS, linewidth=1.6, label=label)
    if phase.oracle_latency_s is not None:
        label = "oracle" if labelled else None
        ends = [phase.start_s, phase.end_s]
        axes.plot(ends, [1e3 * phase.oracle_latency_s] * 2, color=ORACLE, linestyle="--", linewidth=1.2, label=label)


def _draw_phase_panel(axes: Axes, log: DynamicLog, number: int) -> None:
    """Draw one phase on a logarithmic time axis from its beginning: arrivals of schedules, and latencies of frames."""
    phase = log.phases[number]
    last_ms = max(2 * FIRST_MS, 1e3 * (phase.end_s - phase.start_s))
    frames = [frame for frame in log.frames if frame.phase == number]
    starts = [max(FIRST_MS, 1e3 * (frame.start_s - phase.start_s)) for frame in frames]
    latencies = [1e3 * frame.latency_s for frame in frames]
    if frames:
        axes.step([*starts, last_ms], [*latencies, latencies[-1]], where="post", color=OURS, linewidth=1.6)
    phase_updates = [update for update in log.updates if update.phase == number]
    arrivals = [max(FIRST_MS, 1e3 * update.found_s) for update in phase_updates]
    axes.scatter(arrivals, [1e3 * update.latency_s for update in phase_updates], marker="*", s=60, color=STAR, zorder=3)
    if phase.oracle_latency_s is not None:
        axes.axhline(1e3 * phase.oracle_latency_s, color=ORACLE, linestyle="--", linewidth=1.2)
    if phase.proved_s:
        axes.axvline(max(FIRST_MS, 1e3 * phase.proved_s), color=MUTED, linewidth=1, linestyle=":")
        axes.text(1e3 * phase.proved_s, 0.98, " proved", transform=axes.get_xaxis_transform(), va="top", color=MUTED)
    axes.set(xscale="log", xlim=(FIRST_MS, last_ms), xlabel="after the change (ms)")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.margins(y=0.08)
    axes.set_title(_phase_names(phase), loc="left", size=9)


def _phase_names(phase: PhaseLog) -> str:
    text = " + ".join(phase.tasks)
    return text if len(text) <= 44 else text[:43] + "…"
