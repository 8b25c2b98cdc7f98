"""Workloads: streams of requests for models, with their rates or proportions.

``Saturated`` is the workload of streams whose next query always waits. Modules: ``requests.py``, workload files;
``arrivals.py``, arrival processes; ``exits.py``, the exits at which samples leave.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.base.errors import WorkloadError

__all__ = ["Saturated"]

DEFAULT_MAX_LAG = 0.25
"""A quarter of a round: a smaller lag would fix the order of queries, a larger one lets proportions drift in short
runs."""
MOST_LAG = 1e6
"""Largest lag, and largest ratio of two parts of a mix: beyond it, counts of rounds lose precision as floats."""


@dataclass(frozen=True, slots=True)
class Saturated:
    """Saturated streams, whose next query always waits: the length of the run, and the proportion of the streams.

    The next query of a model waits as soon as the previous one is issued. This is Layerweaver's setting (section IV-B):
    a query counts as dispatched when its predecessor completes, but its weights, which do not depend on its input, may
    be fetched before that.
    """

    rounds: int
    """The run ends when this number of rounds of work is issued; a round is one query of every stream, or the mix."""
    mix: tuple[float, ...] | None = None
    """Queries of each stream per round; None leaves the proportion to the policy."""
    max_lag: float = DEFAULT_MAX_LAG
    """The rounds of a mix that a stream may be behind the most advanced stream."""

    def __post_init__(self) -> None:
        if not 1 <= self.rounds <= 10**9:
            raise WorkloadError(f"queries = {self.rounds} must be from 1 to 10^9")
        if self.mix is not None and not all(0 < part < math.inf for part in self.mix):
            raise WorkloadError(f"mix = {':'.join(map(str, self.mix))} must be positive numbers, one per model")
        if self.mix is not None and max(self.mix) > MOST_LAG * min(self.mix):
            raise WorkloadError(f"mix = {':'.join(map(str, self.mix))}: no part may be over {MOST_LAG:g} times another")
        if not 0 < self.max_lag <= MOST_LAG:
            raise WorkloadError(f"max lag = {self.max_lag} must be a number of rounds above 0, at most {MOST_LAG:g}")

    def rounds_of_mix(self, streams: int) -> tuple[float, ...]:
        """Return the mix, scaled so that its rarest stream has one query per round; WorkloadError if there is none."""
        if self.mix is None:
            raise WorkloadError("no mix was asked for")
        if len(self.mix) != streams:
            raise WorkloadError(f"mix has {len(self.mix)} parts for {streams} models")
        rarest = min(self.mix)
        return tuple(part / rarest for part in self.mix)
