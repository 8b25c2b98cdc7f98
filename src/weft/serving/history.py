"""The last ten minutes of a server, for whoever opens the dashboard: rates, percentiles and missed deadlines.

A sample is made of what ``Statistics`` counts anyway, so that requests cost nothing more, and of the last answers since
the sample before it: the server's loop makes it, so it takes no longer than a short segment. Samples lie in rings of a
fixed size: one for all models together, and one for each of those that served last, at most ``MOST_MODELS``.
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
"""Between two samples."""
KEPT = 300
"""Samples that are kept."""
MOST_MODELS = 64
"""Models that have a history of their own; the one that was silent the longest makes room for another."""
MOST_ANSWERS = 512
"""Answers of a model that the percentiles of a sample are made of: the last ones, where there were more."""
FIGURES = ("rate", "p50_ms", "p99_ms", "missed", "failed")
"""What a sample has: results per second, latencies, the share of deadlines missed, requests without result a second."""

Floats = npt.NDArray[np.float32]
ModelKey = tuple[str, str]
"""Name and version."""


class RequestCounts(NamedTuple):
    """Of one model, since it was first loaded."""

    served: int
    failed: int
    met: int
    missed: int

    @classmethod
    def of(cls, seen: Statistics) -> RequestCounts:
        return cls(seen.success, seen.failures.total(), seen.met, seen.missed)

    def since(self, before: RequestCounts) -> RequestCounts:
        """What came on top."""
        served, failed, met, missed = before
        return RequestCounts(self.served - served, self.failed - failed, self.met - met, self.missed - missed)

    def and_also(self, other: RequestCounts) -> RequestCounts:
        served, failed, met, missed = other
        return RequestCounts(self.served + served, self.failed + failed, self.met + met, self.missed + missed)


NOTHING = RequestCounts(0, 0, 0, 0)
IDLE = 0.0, math.nan, math.nan, math.nan, 0.0
"""The figures of a model that was asked for nothing."""


def _empty_ring() -> Floats:
    return np.full((KEPT, len(FIGURES)), np.nan, np.float32)


@dataclass(eq=False)
class ModelRing:
    """The samples of one model; those of times it had no ring are not numbers."""

    values: Floats = field(default_factory=_empty_ring)
    served_at: int = 0
    """The number of the last sample in which it served or refused something."""


class History:
    """Samples of the last ten minutes."""

    def __init__(self, now_ns: int) -> None:
        self._taken = 0
        self._last_ns = now_ns
        self._times_s = np.zeros(KEPT)
        self._totals = _empty_ring()
        self._rings: dict[ModelKey, ModelRing] = {}
        self._before: dict[ModelKey, tuple[Statistics, RequestCounts]] = {}

    def sample(self, now_ns: int, seen: Mapping[ModelKey, Statistics]) -> None:
        """Add a sample: what changed since the last one, of every model there is."""
        seconds = max(1e-3, (now_ns - self._last_ns) / 1e9)
        place, changes = self._taken % KEPT, self._changes(seen)
        self._rings = {key: ring for key, ring in self._rings.items() if key in seen}
        for ring in self._rings.values():
            ring.values[place] = IDLE
        for each in seen.values():
            each.shares.look(now_ns)
        total = NOTHING
        latencies_ns: list[int] = []
        for key, change in changes.items():
            own_ns = _latencies_ns(seen[key], self._last_ns)
            total = total.and_also(change)
            latencies_ns += own_ns
            own = self._ring(key)
            if own:
                own.values[place], own.served_at = _figures(change, own_ns, seconds), self._taken
        self._totals[place] = _figures(total, latencies_ns, seconds)
        self._times_s[place] = now_ns / 1e9
        self._taken, self._last_ns = self._taken + 1, now_ns

    def told(self, since_s: float) -> dict[str, Any]:
        """Samples later than *since_s*, oldest first; what is not known is not a number, which JSON tells as null."""
        first = max(0, self._taken - KEPT)
        places = [place for place in (n % KEPT for n in range(first, self._taken)) if self._times_s[place] > since_s]
        return {
            "step_s": STEP_S,
            "kept_s": STEP_S * KEPT,
            "times_s": self._times_s[places].tolist(),
            "totals": _columns(self._totals[places]),
            "models": [
                {"name": name, "version": version, **_columns(ring.values[places])}
                for (name, version), ring in self._rings.items()
            ],
        }

    def _changes(self, seen: Mapping[ModelKey, Statistics]) -> dict[ModelKey, RequestCounts]:
        """What changed since the last sample, of the models of which something did."""
        before, self._before = self._before, {key: (each, RequestCounts.of(each)) for key, each in seen.items()}
        changes = {}
        for key, (each, counts) in self._before.items():
            known, then = before.get(key, (each, NOTHING))
            if known is not each:
                then = NOTHING
            if counts != then:
                changes[key] = counts.since(then)
        return changes

    def _ring(self, key: ModelKey) -> ModelRing | None:
        """The ring of a model that served something; None where all of them are of models that did so just now."""
        if key not in self._rings and len(self._rings) >= MOST_MODELS:
            quietest = min(self._rings, key=lambda other: self._rings[other].served_at)
            if self._rings[quietest].served_at == self._taken:
                return None
            del self._rings[quietest]
        return self._rings.setdefault(key, ModelRing())


def _latencies_ns(seen: Statistics, since_ns: int) -> list[int]:
    """Of the last answers since then."""
    found: list[int] = []
    for end_ns, latency_ns, _ in reversed(seen.recent):
        if end_ns <= since_ns or len(found) == MOST_ANSWERS:
            break
        if latency_ns >= 0:
            found.append(latency_ns)
    return found


def _figures(change: RequestCounts, latencies_ns: list[int], seconds: float) -> tuple[float, ...]:
    latencies_ns.sort()
    due = change.met + change.missed
    return (
        change.served / seconds,
        _percentile_ms(latencies_ns, 50),
        _percentile_ms(latencies_ns, 99),
        change.missed / due if due else math.nan,
        change.failed / seconds,
    )


def _percentile_ms(ordered_ns: list[int], percent: int) -> float:
    """The latency that so many of a hundred answers do not exceed."""
    if not ordered_ns:
        return math.nan
    return ordered_ns[-(-len(ordered_ns) * percent // 100) - 1] / 1e6


def _columns(values: Floats) -> dict[str, list[float]]:
    return dict(zip(FIGURES, values.T.astype(np.float64).round(4).tolist(), strict=True))
