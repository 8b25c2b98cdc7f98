"""A request in the engine's hands, the batch it runs in, and the feed that brings the one and answers the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from weft.engine.engine import Completion
from weft.engine.policies.base import NO_DEADLINE


class Terms(NamedTuple):
    """What was agreed for one stream, in ticks."""

    programs: int
    """Index of its program at batch 1 in the setting; batch b is b - 1 further."""
    deadline: int
    max_batch: int
    timeout: int
    priority: int
    think: int = -1
    """Closed streams: ticks from an answer to the client's next request; -1 for open streams."""
    clients: int = 0


@dataclass(eq=False, slots=True)
class WaitingLine:
    """Requests that wait for their turn, and how many may."""

    places: int = NO_DEADLINE
    waiting: int = 0

    @property
    def full(self) -> bool:
        return self.waiting >= self.places


@dataclass(eq=False, slots=True)
class Ticket:
    """One request, from when it is taken until it is answered."""

    stream: int
    arrival: int
    due: int
    priority: int = 1
    strict: bool = False
    """Not taken when it cannot be on time, dropped when it can no longer be."""
    gone: bool = False
    """Nobody waits for it any more."""
    leaves: int = 0
    """After how many layers it is done, where that is known beforehand; 0: after all."""
    sure: Mapping[int, float] | None = None
    """How sure its answer is after so many layers, where that is known beforehand and decides when it leaves."""
    line: WaitingLine | None = None
    """The line of its sender, where that has one."""
    more: int = 0
    """Ticks that pass before it can be computed, whatever runs: its model has to come back to the device."""
    guessed: bool = False
    """Nobody ever measured what it takes, so it is not refused for that."""
    wanted: float | None = None
    """How sure an early answer must be, where it says so."""
    threshold: float = 0.0
    """How sure it must be, once it has begun."""


def due(ticket: Ticket) -> int:
    """The key by which requests wait."""
    return ticket.due


@dataclass(eq=False, slots=True)
class Batch:
    """Requests that run together, from their first layer to their last."""

    program: int
    query: int
    members: list[Ticket]
    late: bool = False
    deadline: int = 0
    """When the first of its members that can still be on time is due; of any, where late ones are not told apart."""
    layer: int = 0
    last_issued: int = -1
    running: bool = False
    ended: bool = False
    """It has left its place in the queue, whatever became of it."""
    work: object = None
    """What an executor keeps for it."""
    home: int | None = None
    """The lane that it stays on, where lanes have memory of their own and it has left something there."""

    @property
    def forsaken(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.members[0].gone and all(ticket.gone for ticket in self.members)


class ArrivalSource(Protocol):
    """Requests whose times are known beforehand: those of simulated clients."""

    def take(self, now: int) -> Iterable[Ticket]:
        """Requests that have arrived, in order of arrival within a stream."""
        ...

    def next_arrival(self) -> int:
        """When the next request comes, as far as that is known."""
        ...

    def exhausted(self) -> bool:
        """Whether no request will come any more."""
        ...


class Feed(Protocol):
    """Where answers go, and where requests come from that are not put into the queues as they come."""

    @property
    def arrivals(self) -> ArrivalSource | None:
        """The timetable of simulated requests; None for a server, whose requests are admitted as they come."""
        ...

    def served(self, batch: Batch, completion: Completion) -> None:
        """The last layer of a batch was computed, and nothing of it runs any more."""
        ...

    def leave(self, batch: Batch, completion: Completion) -> list[Ticket]:
        """A layer that ends at an exit was computed: answer the members who leave, and say who stays, in order."""
        ...

    def merged(self, batch: Batch, other: Batch) -> None:
        """Another batch joins one at the same layer; its members follow the ones already there."""
        ...

    def dropped(self, ticket: Ticket, now: int) -> None:
        """A request can no longer be on time, or it was due by now."""
        ...

    def refused(self, ticket: Ticket, now: int) -> None:
        """A request is not taken."""
        ...

    def failed(self, batch: Batch, error: Exception) -> None:
        """A layer of a batch could not be computed."""
        ...

    def ended(self, batch: Batch) -> None:
        """Release a batch that ended without being served, or that joined another; the last call for it."""
        ...
