"""Times of requests with nothing else running, by the exits at which they leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.devices import Host

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, eq=False)
class TimesAlone:
    """Seconds from a request to its answer, for each measured run and each exit at which requests leave."""

    times_s: Floats
    shares: Floats
    """The share of the requests with each of these times; the sum is 1."""

    @property
    def least_s(self) -> float:
        return float(self.times_s.min())

    @property
    def middle_s(self) -> float:
        """The time that half of the requests do not exceed."""
        return self.quantile_s(0.5)

    def quantile_s(self, share: float) -> float:
        """The time that this share of the requests does not exceed."""
        order = np.argsort(self.times_s)
        cumulated = np.cumsum(self.shares[order])
        index = int(np.searchsorted(cumulated, share - 1e-9))  # the sum of shares is exact only up to rounding
        return float(self.times_s[order][min(index, len(order) - 1)])

    def later_than(self, deadline_s: float) -> float:
        """The share of the requests that takes longer than *deadline_s*."""
        return float(self.shares[self.times_s > deadline_s].sum())


def times_alone(host: Host, name: str, rates: Sequence[float] = ()) -> TimesAlone:
    """The times of a model's requests; *rates*: the share that leaves at each exit, empty if all run to the end."""
    model = host.model(name)
    ends = [*model.exits, len(model.segments)] if rates else [len(model.segments)]
    means_s = np.array(model.times_at(1))
    # per run and segment, the measured time over its mean
    factors = np.array(model.spread) if model.spread else np.ones((1, len(means_s)))
    # the least gap between segments, and the least time besides segments, that were measured
    hand_over_s, overhead_s = min(host.hand_over_s, default=0.0), min(model.overhead_s, default=0.0)
    used_ends = [(end, share) for end, share in zip(ends, rates or (1.0,), strict=True) if share > 0]
    times_s = [factors[:, :end] @ means_s[:end] + end * hand_over_s + overhead_s for end, _ in used_ends]
    shares = [np.full(len(factors), share / len(factors)) for _, share in used_ends]
    return TimesAlone(np.concatenate(times_s), np.concatenate(shares))
