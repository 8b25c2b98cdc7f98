"""The last ten minutes of a server, for the dashboard: rates, percentiles and missed deadlines.

A sample is computed from the counters of ``Statistics``, which requests update anyway, and from the answers since the
previous sample. The event loop computes it, so it takes no longer than a short segment. Samples are stored in
ring buffers: one for all models together, and one for each of the models that served last, at most ``MOST_MODELS``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.serving.statistics import Statistics

STEP_S = 2.0
"""Interval between two samples."""
KEPT_SAMPLES = 300
"""Samples that are kept: the last ten minutes."""
MOST_MODELS = 64
"""Models with a history of their own; beyond, the one that was idle longest is evicted. Bounds memory and the page."""
MOST_ANSWERS = 512
"""Answers per model from which a sample's percentiles are computed, the latest ones: bounds the time on the loop."""
FIGURES = ("rate", "p50_ms", "p99_ms", "missed", "failed")
"""The figures of a sample: results per second, latencies, share of missed deadlines, failed requests per second."""

Floats = npt.NDArray[np.float32]
ModelKey = tuple[str, str]
"""Name and version."""


class RequestCounts(NamedTuple):
    """Counters of one model since it was first loaded."""

    served: int
    failed: int
    met: int
    missed: int

    @classmethod
    def of(cls, statistics: Statistics) -> RequestCounts:
        return cls(statistics.success, statistics.failures.total(), statistics.met, statistics.missed)

    def since(self, before: RequestCounts) -> RequestCounts:
        """Return the difference from earlier counters."""
        served, failed, met, missed = before
        return RequestCounts(self.served - served, self.failed - failed, self.met - met, self.missed - missed)

    def plus(self, other: RequestCounts) -> RequestCounts:
        """Return the sum of the counters of two models."""
        served, failed, met, missed = other
        return RequestCounts(self.served + served, self.failed + failed, self.met + met, self.missed + missed)


NOTHING = RequestCounts(0, 0, 0, 0)
IDLE = 0.0, math.nan, math.nan, math.nan, 0.0
"""The figures of a model without requests."""


def _empty_ring() -> Floats:
    """Return a ring buffer of samples: a row per sample, a column per figure, NaN where there is no sample."""
    return np.full((KEPT_SAMPLES, len(FIGURES)), np.nan, np.float32)


@dataclass(eq=False)
class ModelRing:
    """The samples of one model; NaN for times at which the model had no ring."""

    values: Floats = field(default_factory=_empty_ring)
    served_at: int = 0
    """Number of the last sample in which the model answered or refused a request."""


class History:
    """Samples of the last ten minutes."""

    def __init__(self, now_ns: int) -> None:
        """now_ns: start of the first sample's interval, on the clock of all later calls."""
        self._taken = 0
        """Number of samples so far; the next one overwrites the row with this number modulo ``KEPT_SAMPLES``."""
        self._last_ns = now_ns
        self._times_s = np.zeros(KEPT_SAMPLES)
        self._totals = _empty_ring()
        self._rings: dict[ModelKey, ModelRing] = {}
        self._previous: dict[ModelKey, tuple[Statistics, RequestCounts]] = {}
        """The counters at the previous sample."""

    def sample(self, now_ns: int, counters: Mapping[ModelKey, Statistics]) -> None:
        """Add a sample of what changed since the previous one; *counters*: of all models."""
        seconds = max(1e-3, (now_ns - self._last_ns) / 1e9)
        row, changes = self._taken % KEPT_SAMPLES, self._changes(counters)
        self._rings = {key: ring for key, ring in self._rings.items() if key in counters}
        for ring in self._rings.values():
            ring.values[row] = IDLE
        for statistics in counters.values():
            statistics.shares.sample(now_ns)
        total = NOTHING
        latencies_ns: list[int] = []
        for key, change in changes.items():
            model_latencies_ns = _latencies_ns(counters[key], self._last_ns)
            total = total.plus(change)
            latencies_ns += model_latencies_ns
            model_ring = self._ring(key)
            if model_ring:
                model_ring.values[row] = _figures(change, model_latencies_ns, seconds)
                model_ring.served_at = self._taken
        self._totals[row] = _figures(total, latencies_ns, seconds)
        self._times_s[row] = now_ns / 1e9
        self._taken, self._last_ns = self._taken + 1, now_ns

    def samples_since(self, since_s: float) -> dict[str, Any]:
        """Return the samples later than *since_s*, oldest first; unknown figures are NaN, null in JSON.

        *since_s*: seconds on the clock of ``sample``, as in the ``times_s`` of an earlier answer.
        """
        first = max(0, self._taken - KEPT_SAMPLES)
        rows = [
            row
            for row in (number % KEPT_SAMPLES for number in range(first, self._taken))
            if self._times_s[row] > since_s
        ]
        return {
            "step_s": STEP_S,
            "kept_s": STEP_S * KEPT_SAMPLES,
            "times_s": self._times_s[rows].tolist(),
            "totals": _columns(self._totals[rows]),
            "models": [
                {"name": name, "version": version, **_columns(ring.values[rows])}
                for (name, version), ring in self._rings.items()
            ],
        }

    def _changes(self, counters: Mapping[ModelKey, Statistics]) -> dict[ModelKey, RequestCounts]:
        """Return the changes of counters since the previous sample, for the models whose counters have changed."""
        previous = self._previous
        self._previous = {key: (statistics, RequestCounts.of(statistics)) for key, statistics in counters.items()}
        changes = {}
        for key, (statistics, counts) in self._previous.items():
            previous_statistics, previous_counts = previous.get(key, (statistics, NOTHING))
            if previous_statistics is not statistics:  # another model of this name was loaded since
                previous_counts = NOTHING
            if counts != previous_counts:
                changes[key] = counts.since(previous_counts)
        return changes

    def _ring(self, key: ModelKey) -> ModelRing | None:
        """Return the ring of an active model, evicting the ring idle longest; None if all rings are in use."""
        if key not in self._rings and len(self._rings) >= MOST_MODELS:
            idle_longest = min(self._rings, key=lambda other: self._rings[other].served_at)
            if self._rings[idle_longest].served_at == self._taken:
                return None
            del self._rings[idle_longest]
        return self._rings.setdefault(key, ModelRing())


def _latencies_ns(statistics: Statistics, since_ns: int) -> list[int]:
    """Return the latencies of the answers after *since_ns*, at most the latest ``MOST_ANSWERS``."""
    latencies: list[int] = []
    for end_ns, latency_ns, _ in reversed(statistics.recent):
        if end_ns <= since_ns or len(latencies) == MOST_ANSWERS:
            break
        if latency_ns >= 0:
            latencies.append(latency_ns)
    return latencies


def _figures(change: RequestCounts, latencies_ns: list[int], seconds: float) -> tuple[float, ...]:
    """Compute ``FIGURES`` from the changes of counters in *seconds* and from latencies, which are sorted in place."""
    latencies_ns.sort()
    with_deadline = change.met + change.missed
    return (
        change.served / seconds,
        _percentile_ms(latencies_ns, 50),
        _percentile_ms(latencies_ns, 99),
        change.missed / with_deadline if with_deadline else math.nan,
        change.failed / seconds,
    )


def _percentile_ms(ordered_ns: list[int], percent: int) -> float:
    """Return a percentile (nearest rank) of sorted latencies; NaN if there are none."""
    if not ordered_ns:
        return math.nan
    return ordered_ns[-(-len(ordered_ns) * percent // 100) - 1] / 1e6  # two minus signs: rounds the rank up


def _columns(values: Floats) -> dict[str, list[float]]:
    """Return rows of a ring (samples, figures) as one list per figure."""
    return dict(zip(FIGURES, values.T.astype(np.float64).round(4).tolist(), strict=True))
