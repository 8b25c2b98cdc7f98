"""The engine's record of a request (a ticket), the batch it runs in, and the feed that brings and answers requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from weft.engine.engine import Completion
from weft.engine.policies.base import NO_DEADLINE


class Terms(NamedTuple):
    """Deadline, batching and priority of one stream; times in ticks."""

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
    """The count of requests that wait in a queue, and its limit."""

    places: int = NO_DEADLINE
    waiting: int = 0

    @property
    def full(self) -> bool:
        return self.waiting >= self.places


@dataclass(eq=False, slots=True)
class Ticket:
    """One request, from its admission to its answer; times in ticks."""

    stream: int
    arrival: int
    due: int
    priority: int = 1
    strict: bool = False
    """Refused if it cannot be on time, dropped when it can no longer be."""
    gone: bool = False
    """It was answered, refused, dropped or given up by its client."""
    leaves: int = 0
    """Layers after which it leaves, where a simulation knows that beforehand; 0: after the last."""
    sure: Mapping[int, float] | None = None
    """Layers of each exit -> confidence of its answer there, where a simulation knows that beforehand."""
    line: WaitingLine | None = None
    """The limited queue of its sender, where that has one besides the server's."""
    more: int = 0
    """Ticks until it could begin even on an idle device, because its model has to be loaded onto the device again."""
    guessed: bool = False
    """Its duration is only a guess, because its model was never measured, so it is not refused for that."""
    wanted: float | None = None
    """The confidence that an early answer must have, where the request states it."""
    threshold: float = 0.0
    """The confidence that an early answer must have; set when its batch begins."""


def due(ticket: Ticket) -> int:
    """Return a request's deadline, the sort key of queues."""
    return ticket.due


@dataclass(eq=False, slots=True)
class Batch:
    """Requests that run together, from their first layer to their last."""

    program: int
    query: int
    members: list[Ticket]
    late: bool = False
    deadline: int = 0
    """The earliest deadline of its members that can still be on time, or of all where late ones are not set apart."""
    layer: int = 0
    """Layers issued so far."""
    last_issued: int = -1
    running: bool = False
    ended: bool = False
    """It has left the queue: served, failed, given up or merged."""
    work: object = None
    """The executor's own record of the batch, such as its tensors."""
    home: int | None = None
    """The lane whose memory holds its activations, where lanes have memory of their own; it stays there."""

    @property
    def forsaken(self) -> bool:
        """Whether all of its requests are gone."""
        return self.members[0].gone and all(ticket.gone for ticket in self.members)


class ArrivalSource(Protocol):
    """Requests whose times are known beforehand: those of simulated clients."""

    def take(self, now: int) -> Iterable[Ticket]:
        """Return the requests that have arrived by *now*, in order of arrival within a stream."""
        ...

    def next_arrival(self) -> int:
        """Return when the next request comes, as far as that is known, else NO_DEADLINE."""
        ...

    def exhausted(self) -> bool:
        """Return whether no more requests will come."""
        ...


class Feed(Protocol):
    """Where answers go, and where requests come from that are not put into the queues as they come."""

    @property
    def arrivals(self) -> ArrivalSource | None:
        """The timetable of simulated requests; None for a server, whose requests are admitted as they come."""
        ...

    def served(self, batch: Batch, completion: Completion) -> None:
        """Answer the requests of a batch whose last layer was computed."""
        ...

    def leave(self, batch: Batch, completion: Completion) -> list[Ticket]:
        """Answer the requests that leave at the exit a batch has reached, and return those that stay, in order."""
        ...

    def merged(self, batch: Batch, other: Batch) -> None:
        """Append the members of another batch at the same layer to those of a batch."""
        ...

    def dropped(self, ticket: Ticket, now: int) -> None:
        """Answer a strict request that can no longer be on time, or whose deadline has passed."""
        ...

    def refused(self, ticket: Ticket, now: int) -> None:
        """Answer a request that was not admitted."""
        ...

    def failed(self, batch: Batch, error: Exception) -> None:
        """Answer the requests of a batch of which a layer could not be computed."""
        ...

    def ended(self, batch: Batch) -> None:
        """Release a batch that ended without being served, or that joined another; the last call for it."""
        ...
