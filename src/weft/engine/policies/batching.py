"""Common batching policies: one request at a time, adaptive with a timeout, and layer by layer.

None of them plans for early exits: a batch only shrinks where samples leave.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from weft.engine.policies.base import Candidate, OptionRange, Traits
from weft.engine.policies.in_order import Fifo
from weft.engine.policies.refilling import Flight, Refilling
from weft.kernels import rules

AS_FIFO = "as fifo: no stream ever waits for a batch"
"""Why a comparison with saturated streams leaves these policies out (``Traits.pointless_saturated``)."""


@dataclass(frozen=True)
class Serial(Fifo):
    """One request at a time, in order of arrival: no batches at all."""

    traits: ClassVar[Traits] = Traits(batches=False, by_layer=False, pointless_saturated=AS_FIFO)


@dataclass(frozen=True)
class Adaptive(Fifo):
    """A batch begins when it is full or its oldest request has waited long enough, and runs to its end.

    The usual rule of serving systems; AdaptB in Fluid Batching (section II-A), with timeouts 5, 45 and 95.
    """

    traits: ClassVar[Traits] = Traits(by_layer=False, pointless_saturated=AS_FIFO)
    ranges: ClassVar = {"timeout": OptionRange(0, 100, "percent")}

    timeout: int = 5
    """Percent of a request's allowed time that it waits for its batch to be filled."""

    @property
    def waits(self) -> int:
        return self.timeout


@dataclass(frozen=True)
class LazyBatching(Refilling):
    """Lazy Batching (HPCA'21): pauses a batch at any layer to let waiting requests catch up and join it.

    Only if no request would be late when all run one by one: a batch of b is assumed to take b times as long as one
    sample, without early exits.
    """

    traits: ClassVar[Traits] = replace(Refilling.traits, by_layer=True)

    def propose(self, flight: Flight, now: int) -> Candidate:
        """Begin as many waiting requests as leave no request late; if none can, go on with a batch in flight.

        That is the batch at the earliest layer. Without a batch in flight, begin as many requests as possible.
        """
        if not flight.batches:
            return flight.beginnings[-1]
        for newcomers in reversed(flight.beginnings):
            if self._slack(newcomers, flight.batches, now) >= 0:
                return newcomers
        return flight.batches[0]

    def _slack(self, newcomers: Candidate, batches: tuple[Candidate, ...], now: int) -> int:
        """Return the ticks to spare until the first deadline if *newcomers* begins and all requests run one by one."""
        batches = (newcomers, *batches)
        need = sum([batch.size * self.rest(batch, batch.layer, 1) for batch in batches])
        return rules.slack(min([batch.deadline for batch in batches]), now, need, percent=100)
