"""The busiest second of a simulated run, lane by lane, which the page of a plan draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.simulation.requests import Case, RequestRun

WINDOW_S = 1.0
"""Length of the window, so short that segments of a few milliseconds can be seen across a page."""
MOST_SPANS = 4000
"""Largest number of spans in the window, as more cannot be distinguished on a page; more shorten the window."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BusySpan:
    """A segment on a lane; times in seconds from the beginning of the window."""

    lane: int
    model: int
    """Index into ``BusyStretch.models``."""
    segment: int
    rows: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class RequestMark:
    """A request that arrived in the window, and whether it was late."""

    model: int
    """Index into ``BusyStretch.models``."""
    arrival_s: float
    """Seconds from the beginning of the window."""
    late: bool


@dataclass(frozen=True, slots=True)
class BusyStretch:
    """The spans and requests in the window of a run with the most computation."""

    begins_s: float
    """Seconds after the start of the run."""
    length_s: float
    lanes: int
    models: tuple[str, ...]
    segments: tuple[tuple[str, ...], ...]
    """Names of each model's segments."""
    spans: tuple[BusySpan, ...]
    requests: tuple[RequestMark, ...]


def busiest(case: Case, run: RequestRun, lanes: int) -> BusyStretch:
    """Return the window of a run in which the lanes computed most.

    Columns of ``run.tally.issues``: 0 stream, 2 segment, 3 program, 6 start and 7 end in ticks.
    """
    issues = run.tally.issues[np.argsort(run.tally.issues[:, 6], kind="stable")]
    starts_s, ends_s = _seconds(issues[:, 6], run), _seconds(issues[:, 7], run)
    begins_s = _busiest_start(starts_s, ends_s)
    inside = np.flatnonzero((ends_s > begins_s) & (starts_s < begins_s + WINDOW_S))[:MOST_SPANS]
    length_s = WINDOW_S if len(inside) < MOST_SPANS else float(starts_s[inside[-1]]) - begins_s
    names = tuple(dict.fromkeys(stream.served_name for stream in case.workload.stream))
    model_of = [names.index(stream.served_name) for stream in case.workload.stream]
    lane_of = _assign_lanes(starts_s, ends_s, lanes)
    spans = tuple(
        BusySpan(
            lane_of[row],
            model_of[issues[row, 0]],
            int(issues[row, 2]),
            # the programs of a model are in the order of their batch sizes, from 1 on
            int(issues[row, 3]) - case.terms[issues[row, 0]].programs + 1,
            max(0.0, float(starts_s[row]) - begins_s),
            min(length_s, float(ends_s[row]) - begins_s),
        )
        for row in inside.tolist()
    )
    # the first program of each model, which is that of batch 1
    programs = [case.terms[model_of.index(model)].programs for model in range(len(names))]
    segments = tuple(case.setting.programs[program].names for program in programs)
    marks = _marks(case, run, model_of, begins_s, length_s)
    return BusyStretch(begins_s, length_s, lanes, names, segments, spans, marks)


def _seconds(ticks: Ints, run: RequestRun) -> Floats:
    return np.asarray(ticks * run.tick_s, np.float64)


def _busiest_start(starts_s: Floats, ends_s: Floats) -> float:
    """Return the start of the window with the most computation, to a tenth of the window."""
    last_s = float(ends_s.max(initial=0.0))
    edges = np.arange(0.0, max(WINDOW_S, last_s) + WINDOW_S, WINDOW_S / 10)
    busy_s = np.histogram(starts_s, edges, weights=ends_s - starts_s)[0]  # per tenth of a window, by the starts
    window_sums_s = np.convolve(busy_s, np.ones(10), "valid")
    return float(edges[int(window_sums_s.argmax())]) if len(window_sums_s) else 0.0


def _assign_lanes(starts_s: Floats, ends_s: Floats, lanes: int) -> list[int]:
    """Assign each segment to the first free lane, as the executor does."""
    free_s = [0.0] * lanes
    assigned = []
    for start_s, end_s in zip(starts_s.tolist(), ends_s.tolist(), strict=True):
        # 1e-12: a segment that starts when another ends may be rounded to start before
        lane = min(range(lanes), key=lambda lane: (free_s[lane] > start_s + 1e-12, lane))
        free_s[lane] = max(free_s[lane], end_s)
        assigned.append(lane)
    return assigned


def _marks(
    case: Case, run: RequestRun, model_of: Sequence[int], begins_s: float, length_s: float
) -> tuple[RequestMark, ...]:
    """Return the requests that arrived in the window; *model_of*: stream -> index of its model."""
    marks = []
    for stream, arrival, end, *_ in run.tally.answers:  # times in ticks
        arrival_s = arrival * run.tick_s - begins_s
        if 0 <= arrival_s < length_s:
            late = end < 0 or end - arrival > case.terms[stream].deadline  # a dropped request has a negative end
            marks.append(RequestMark(model_of[stream], arrival_s, late))
    return tuple(marks[:MOST_SPANS])
