"""What the spans on a server's lanes say: how long segments take, what passes between them, what lanes cost each other.

A segment that runs from a to b does as much work as it takes alone. While others run it loses a share of its speed to
each, so its work is the sum, over the stretches of time in which the same others run, of speed times length. That is
linear in the shares. A span that took long for another reason has met the others for long, too, so least squares would
blame them for it; the shares asked for leave nothing unexplained on average, whoever ran beside (``_shares``).
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
    """A segment on a lane. Times in seconds on the machine's monotonic clock."""

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
    """Segments that were computed since then, by their start (``GET /weft/trace``)."""
    found = []
    for event in trace["traceEvents"]:
        if event["ph"] != "X" or event["cat"] != "done":
            continue
        said, start_s = event["args"], event["ts"] / 1e6
        number = int(said["segment"].partition("/")[0]) - 1
        found.append(
            SeenSpan(
                event["tid"], event["name"], number, start_s, start_s + event["dur"] / 1e6, said["rows"], said["query"]
            )
        )
    return sorted((each for each in found if each.start_s >= since_s), key=_start)


def _start(span: SeenSpan) -> float:
    return span.start_s


def runs(spans: Iterable[SeenSpan], model: str, segments: int) -> list[list[SeenSpan]]:
    """The spans of each batch of a model that ran from its first segment to its last, in order."""
    found: dict[tuple[int, int], list[SeenSpan]] = defaultdict(list)
    for span in spans:
        if span.model == model:
            found[span.query, span.rows].append(span)
    return [each for each in found.values() if [span.segment for span in each] == list(range(segments))]


def mean_times(found: Sequence[Sequence[SeenSpan]]) -> tuple[float, ...]:
    """The mean time of each segment over all runs."""
    return tuple(float(np.mean([span.took_s for span in column])) for column in zip(*found, strict=True))


def hand_overs(spans: Sequence[SeenSpan], within: bool = False) -> list[float]:
    """What passed between two segments on a lane, in order of time; *within*: of one batch, so work was waiting."""
    lanes: dict[int, list[SeenSpan]] = defaultdict(list)
    for span in spans:
        lanes[span.lane].append(span)
    gaps = [
        (b.start_s, max(0.0, b.start_s - a.end_s))
        for lane in lanes.values()
        for a, b in pairwise(lane)
        if not within or (a.model, a.query, a.rows) == (b.model, b.query, b.rows)
    ]
    return [gap for _, gap in sorted(gaps)]


def losses(
    spans: Sequence[SeenSpan], alone: Mapping[str, HostModel], cores: int, most: float = 1 - LEAST_SPEED
) -> dict[str, dict[str, float]]:
    """Model -> other model -> share of its speed that a lane loses while one other lane runs that.

    alone: what the segments take by themselves.
    """
    found = {}
    models = list(alone)
    beside = beside_each(spans, models, cores)
    for model, measured in alone.items():
        mine = [place for place, span in enumerate(spans) if span.model == model]
        works_s = [measured.times_at(spans[place].rows)[spans[place].segment] for place in mine]
        core_s = np.array([beside[place][0] for place in mine])
        others_s = np.array([beside[place][1] for place in mine]).reshape(-1, len(models))
        found[model] = dict(zip(models, _shares(others_s, core_s, core_s - np.array(works_s), most), strict=True))
    return found


def beside_each(spans: Sequence[SeenSpan], models: Sequence[str], cores: int) -> list[tuple[float, list[float]]]:
    """For each span, the seconds it had a core, and for how many of these each model ran on another lane, summed up."""
    lanes = Lanes(tuple(f"{lane}" for lane in range(1 + max((span.lane for span in spans), default=0))), cores)
    number = {model: place for place, model in enumerate(models)}
    found: list[tuple[float, list[float]]] = []
    for span, others in zip(spans, _met(spans), strict=True):
        edges = sorted({span.start_s, span.end_s, *_within(others, span)})
        core_s, ran_s = 0.0, [0.0] * len(models)
        for a, b in pairwise(edges):
            running = [each.model for each in others if each.start_s <= a and each.end_s >= b]
            length = (b - a) * lanes.share(1 + len(running))
            core_s += length
            for model in running:
                ran_s[number[model]] += length
        found.append((core_s, ran_s))
    return found


def _met(spans: Sequence[SeenSpan]) -> list[list[SeenSpan]]:
    """For each span, those that ran at the same time; spans are in order of their start."""
    found: list[list[SeenSpan]] = [[] for _ in spans]
    running: list[int] = []
    for place, span in enumerate(spans):
        running = [each for each in running if spans[each].end_s > span.start_s]
        for each in running if span.end_s > span.start_s else ():
            found[place].append(spans[each])
            found[each].append(span)
        running.append(place)
    return found


def _within(others: Iterable[SeenSpan], span: SeenSpan) -> list[float]:
    return [time for each in others for time in (each.start_s, each.end_s) if span.start_s < time < span.end_s]


def _shares(others_s: Floats, core_s: Floats, lost_s: Floats, most: float) -> list[float]:
    """Shares from 0 on that explain what was lost; who was never met costs what the others do on average.

    What is left is orthogonal to the part of their time in which spans met each other model.
    """
    found = np.zeros(others_s.shape[1])
    met = others_s.any(axis=0)
    kept = np.flatnonzero(met)
    parts = others_s / np.maximum(core_s, 1e-9)[:, None]
    while len(kept):
        shares = np.linalg.lstsq(parts[:, kept].T @ others_s[:, kept], parts[:, kept].T @ lost_s, rcond=None)[0]
        if (shares >= 0).all():
            found[kept] = np.minimum(shares, most)
            break
        kept = kept[shares > 0]
    if met.any():
        found[~met] = found[met].mean()
    return [float(share) for share in found]
