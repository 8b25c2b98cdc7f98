"""Arrivals that somebody recorded of many callers: single times, or how many came in each minute.

A caller is whatever a file tells apart, such as a function or a service. ``azure`` reads public files of either kind,
``traffic_fit`` finds a generator that makes traffic like theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Rng = np.random.Generator


class CallerTrace(Protocol):
    """What is known of either kind."""

    @property
    def callers(self) -> tuple[str, ...]:
        """Their names."""
        ...

    @property
    def span_s(self) -> float:
        """How long was recorded."""
        ...

    def requests(self) -> Ints:
        """How many each caller sent."""
        ...

    def flow(self, window_s: float) -> Ints:
        """How many came from all callers in each window from the start on; a last one that is cut short is left out."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class TimedTrace:
    """When each request came, and from whom."""

    callers: tuple[str, ...]
    times_s: Floats
    """Ascending, from 0 on."""
    caller: Ints
    """Who sent each, by number."""
    span_s: float

    def __repr__(self) -> str:
        return f"TimedTrace({len(self.times_s)} requests of {len(self.callers)} callers in {self.span_s:g} s)"

    def requests(self) -> Ints:
        return np.bincount(self.caller, minlength=len(self.callers)).astype(np.int64)

    def flow(self, window_s: float) -> Ints:
        windows = whole_windows(self.span_s, window_s)
        return np.bincount((self.times_s / window_s).astype(np.int64), minlength=windows)[:windows].astype(np.int64)

    def dealt(self, models: int) -> TimedTrace:
        """The same requests for *models* models, to whom callers are dealt in turn, the most frequent first.

        AlpaServe (section 6.2) deals the functions of a trace to its models in the same way.
        """
        order = np.argsort(-self.requests(), kind="stable")
        model = np.empty(len(self.callers), np.int64)
        model[order] = np.arange(len(self.callers)) % models
        return TimedTrace(tuple(map(str, range(models))), self.times_s, model[self.caller], self.span_s)


@dataclass(frozen=True, slots=True, eq=False)
class CountedTrace:
    """How many requests each caller sent in each window."""

    callers: tuple[str, ...]
    counts: Ints
    """(callers, windows)."""
    window_s: float

    def __repr__(self) -> str:
        windows = f"{self.counts.shape[1]} windows of {self.window_s:g} s"
        return f"CountedTrace({self.counts.sum()} requests of {len(self.callers)} callers in {windows})"

    @property
    def span_s(self) -> float:
        return float(self.counts.shape[1] * self.window_s)

    def requests(self) -> Ints:
        return np.asarray(self.counts.sum(axis=1))

    def flow(self, window_s: float) -> Ints:
        """Of windows that are no shorter than those that were counted, and a whole number of them."""
        return grouped(self.counts.sum(axis=0), max(1, round(window_s / self.window_s)))

    def timed(self, rng: Rng) -> TimedTrace:
        """A time for each request, anywhere in the window that it was counted in."""
        caller, window = np.nonzero(self.counts)
        many = self.counts[caller, window]
        times = (np.repeat(window, many) + rng.random(int(many.sum()))) * self.window_s
        order = np.argsort(times, kind="stable")
        return TimedTrace(self.callers, times[order], np.repeat(caller, many)[order].astype(np.int64), self.span_s)


def whole_windows(span_s: float, window_s: float) -> int:
    """How many windows lie wholly within a span."""
    return int(span_s / window_s + 1e-9)


def grouped(counts: Ints, size: int) -> Ints:
    """Sums of every *size* neighbours along the last axis; what is left over at the end is not counted."""
    groups = counts.shape[-1] // size
    sums: Ints = counts[..., : groups * size].reshape(*counts.shape[:-1], groups, size).sum(axis=-1)
    return sums
