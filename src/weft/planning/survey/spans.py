"""Analysis of the spans on a server's lanes: times of segments, gaps between them, and contention between lanes.

The work of a segment is its time alone. While other lanes run, a segment loses a share of its speed to each of them, so
its work is the sum of speed times length over intervals with the same other segments. The sum is linear in the shares.
A span that took long for another reason also overlaps other segments for long, so least squares would attribute its
delay to these. The shares are fitted so that the mean error is zero for each overlapping model (``_shares``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.devices import HostModel, Lanes
from weft.devices.lanes import LEAST_SPEED

Floats = npt.NDArray[np.float64]


class SeenSpan(NamedTuple):
    """A run of a segment on a lane, from a server's trace; times in seconds on the machine's monotonic clock."""

    lane: int
    model: str
    segment: int
    start_s: float
    end_s: float
    rows: int
    query: int

    @property
    def took_s(self) -> float:
        return self.end_s - self.start_s


def read_spans(trace: Mapping[str, Any], since_s: float) -> list[SeenSpan]:
    """Return the completed segments of a trace (``GET /weft/trace``) from *since_s* on, in order of their start."""
    spans = []
    for event in trace["traceEvents"]:
        if event["ph"] != "X" or event["cat"] != "done":
            continue
        details, start_s = event["args"], event["ts"] / 1e6
        segment, end_s = int(details["segment"].partition("/")[0]) - 1, start_s + event["dur"] / 1e6
        if start_s >= since_s:
            rows, query = details["rows"], details["query"]
            spans.append(SeenSpan(event["tid"], event["name"], segment, start_s, end_s, rows, query))
    return sorted(spans, key=lambda span: span.start_s)


def runs(spans: Iterable[SeenSpan], model: str, segments: int) -> list[list[SeenSpan]]:
    """Return the spans of each batch of a model that ran from its first segment to its last, in order."""
    batches: dict[tuple[int, int], list[SeenSpan]] = defaultdict(list)
    for span in spans:
        if span.model == model:
            batches[span.query, span.rows].append(span)
    return [batch for batch in batches.values() if [span.segment for span in batch] == list(range(segments))]


def mean_times(batches: Sequence[Sequence[SeenSpan]]) -> tuple[float, ...]:
    """Return the mean time of each segment over all runs."""
    return tuple(float(np.mean([span.took_s for span in column])) for column in zip(*batches, strict=True))


def hand_overs(spans: Sequence[SeenSpan], within: bool = False) -> list[float]:
    """Return the seconds between segments on a lane, in order of time; *within*: only between segments of a batch."""
    lanes: dict[int, list[SeenSpan]] = defaultdict(list)
    for span in spans:
        lanes[span.lane].append(span)
    gaps = [
        (after.start_s, max(0.0, after.start_s - before.end_s))
        for lane in lanes.values()
        for before, after in pairwise(lane)
        if not within or (before.model, before.query, before.rows) == (after.model, after.query, after.rows)
    ]
    return [gap for _, gap in sorted(gaps)]


def losses(
    spans: Sequence[SeenSpan], alone: Mapping[str, HostModel], cores: int, most: float = 1 - LEAST_SPEED
) -> dict[str, dict[str, float]]:
    """Return model -> other model -> share of its speed that a lane loses while one other lane runs the other model.

    alone: the times of the segments with nothing else running. cores: number of lanes at full speed. most: limit of
    each share.
    """
    shares = {}
    models = list(alone)
    overlaps = overlaps_of(spans, models, cores)  # per span, (seconds on a core, seconds beside each model)
    for model, measured in alone.items():
        indices = [index for index, span in enumerate(spans) if span.model == model]
        work_s = [measured.times_at(spans[index].rows)[spans[index].segment] for index in indices]
        core_s = np.array([overlaps[index][0] for index in indices])
        others_s = np.array([overlaps[index][1] for index in indices]).reshape(-1, len(models))
        shares[model] = dict(zip(models, _shares(others_s, core_s, core_s - np.array(work_s), most), strict=True))
    return shares


def overlaps_of(spans: Sequence[SeenSpan], models: Sequence[str], cores: int) -> list[tuple[float, list[float]]]:
    """Return, per span, its seconds on a core, and for each of *models* the part in which it ran on other lanes.

    A model that runs on two other lanes counts twice.
    """
    lanes = Lanes(tuple(f"{lane}" for lane in range(1 + max((span.lane for span in spans), default=0))), cores)
    column = {model: index for index, model in enumerate(models)}
    overlaps: list[tuple[float, list[float]]] = []
    for span, others in zip(spans, _overlapping(spans), strict=True):
        edges = sorted({span.start_s, span.end_s, *_times_within(others, span)})
        core_s, others_s = 0.0, [0.0] * len(models)
        for begin_s, end_s in pairwise(edges):
            running = [other.model for other in others if other.start_s <= begin_s and other.end_s >= end_s]
            on_core_s = (end_s - begin_s) * lanes.share(1 + len(running))
            core_s += on_core_s
            for model in running:
                others_s[column[model]] += on_core_s
        overlaps.append((core_s, others_s))
    return overlaps


def _overlapping(spans: Sequence[SeenSpan]) -> list[list[SeenSpan]]:
    """Return, per span, the spans that ran at the same time; *spans* are in order of their start."""
    overlapping: list[list[SeenSpan]] = [[] for _ in spans]
    running: list[int] = []
    for index, span in enumerate(spans):
        running = [other for other in running if spans[other].end_s > span.start_s]
        for other in running if span.end_s > span.start_s else ():
            overlapping[index].append(spans[other])
            overlapping[other].append(span)
        running.append(index)
    return overlapping


def _times_within(others: Iterable[SeenSpan], span: SeenSpan) -> list[float]:
    """Return the starts and ends of other spans that lie within *span*."""
    return [time for other in others for time in (other.start_s, other.end_s) if span.start_s < time < span.end_s]


def _shares(others_s: Floats, core_s: Floats, lost_s: Floats, most: float) -> list[float]:
    """Fit nonnegative shares of at most *most* with *lost_s* = *others_s* @ shares.

    others_s: (spans, other models), as in ``overlaps_of``. core_s, lost_s: per span, seconds on a core and lost.

    The residual is orthogonal to the relative overlap (*others_s* / *core_s*) with each other model. A model without
    overlaps gets the mean share of the others.
    """
    fitted = np.zeros(others_s.shape[1])
    overlaps = others_s.any(axis=0)
    columns = np.flatnonzero(overlaps)
    relative = others_s / np.maximum(core_s, 1e-9)[:, None]
    # Solve the normal equations; while a share is negative, fix the shares that are not positive at 0 and solve again.
    while len(columns):
        weights = relative[:, columns].T
        shares = np.linalg.lstsq(weights @ others_s[:, columns], weights @ lost_s, rcond=None)[0]
        if (shares >= 0).all():
            fitted[columns] = np.minimum(shares, most)
            break
        columns = columns[shares > 0]
    if overlaps.any():
        fitted[~overlaps] = fitted[overlaps].mean()
    return [float(share) for share in fitted]
