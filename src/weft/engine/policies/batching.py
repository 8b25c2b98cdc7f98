"""How batches are commonly made: one sample at a time, adaptively with a timeout, or layer by layer.

None of these knows of exits: a batch shrinks where samples leave, and that is all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from weft.base.errors import InputError
from weft.engine.policies.base import Candidate, Traits
from weft.engine.policies.in_order import Fifo
from weft.engine.policies.refilling import Flight, Refilling
from weft.kernels import rules

AS_FIFO = "as fifo: no stream ever waits for a batch"


@dataclass(frozen=True)
class Serial(Fifo):
    """One request at a time, in order of arrival: no batches at all."""

    traits: ClassVar[Traits] = Traits(batches=False, by_layer=False, pointless_saturated=AS_FIFO)


@dataclass(frozen=True)
class Adaptive(Fifo):
    """A batch begins when it is full or its oldest request has waited long enough, and runs to its end.

    What serving systems do; AdaptB in Fluid Batching (section II-A), whose timeouts are 5, 45 and 95.
    """

    traits: ClassVar[Traits] = Traits(by_layer=False, pointless_saturated=AS_FIFO)

    timeout: int = 5
    """Percent of the time a request is allowed that it waits for its batch to be filled."""

    def __post_init__(self) -> None:
        if not 0 <= self.timeout <= 100:
            raise InputError(f"timeout = {self.timeout} must be a percentage from 0 to 100")

    @property
    def waits(self) -> int:
        return self.timeout


@dataclass(frozen=True)
class LazyBatching(Refilling):
    """Stops a batch at any layer for what waits, if all could still be on time computed one by one (HPCA'21).

    A batch of b is taken to last b times as long as one sample, and nobody is expected to leave early.
    """

    traits: ClassVar[Traits] = replace(Refilling.traits, by_layer=True)

    def propose(self, flight: Flight, now: int) -> Candidate:
        if not flight.batches:
            return flight.beginnings[-1]
        for more in reversed(flight.beginnings):
            if self._slack(more, flight.batches, now) >= 0:
                return more
        return flight.batches[0]

    def _slack(self, more: Candidate, batches: tuple[Candidate, ...], now: int) -> int:
        everybody = (more, *batches)
        need = sum([each.size * self.rest(each, each.layer, 1) for each in everybody])
        return rules.slack(min([each.deadline for each in everybody]), now, need, 100)
