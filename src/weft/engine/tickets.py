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
    """Index of its program at batch 1 in ``Setting.programs``; the program at batch b is b - 1 places further."""
    deadline: int
    """From arrival to deadline."""
    max_batch: int
    timeout: int
    """The longest wait for a batch to be filled; 0: batches do not wait."""
    priority: int
    """How much each request counts: 9, 3 or 1."""
    think: int = -1
    """Closed streams: ticks from an answer to the client's next request; -1 for open streams."""
    clients: int = 0
    """Closed streams: clients that each have one request at a time."""


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
    """Whether the deadline is strict: the request is refused if it cannot be met, and dropped once it no longer can."""
    gone: bool = False
    """Whether the request was answered, refused, dropped or given up by its client."""
    leaves: int = 0
    """Number of layers after which it leaves at an exit; 0: after the last layer, or not known beforehand."""
    confidences: Mapping[int, float] | None = None
    """Number of layers before an exit -> confidence of its answer there; None where that is not known beforehand."""
    line: WaitingLine | None = None
    """The limited queue of its sender, if the sender has one besides the server's."""
    load_ticks: int = 0
    """Ticks until it could begin even on an idle device, because its model has to be loaded onto the device again."""
    guessed: bool = False
    """Whether its duration is only a guess, because its model was never measured; admission then takes it as 0."""
    wanted: float | None = None
    """The confidence that the request demands of an early answer; None: the threshold under the present load."""
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
    """The earliest deadline of its members that can still be on time, or of all where late ones are served alike."""
    layer: int = 0
    """Layers issued so far."""
    last_issued: int = -1
    running: bool = False
    ended: bool = False
    """Whether it was served, failed, given up or merged into another batch."""
    work: object = None
    """The executor's own record of the batch, such as its tensors."""
    home: int | None = None
    """The lane whose memory holds its activations, where lanes have memory of their own; it stays there."""

    @property
    def all_gone(self) -> bool:
        """Whether none of its requests needs its result any more: they were dropped, withdrawn or answered."""
        return self.members[0].gone and all(ticket.gone for ticket in self.members)


class ArrivalSource(Protocol):
    """Requests whose times are known beforehand: those of simulated clients."""

    def take(self, now: int) -> Iterable[Ticket]:
        """Return the requests that have arrived by *now*, in order of arrival within a stream."""
        ...

    def next_arrival(self) -> int:
        """Return the tick of the next request; NO_DEADLINE if none is known."""
        ...

    def exhausted(self) -> bool:
        """Return whether no request will come any more."""
        ...


class Feed(Protocol):
    """The clients of the engine: they get the answers; simulated clients also bring the requests."""

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
        """Append the data of batch *other* to that of *batch*, which waits at the same layer."""
        ...

    def dropped(self, ticket: Ticket, now: int) -> None:
        """Answer a strict request that can no longer be on time, or whose deadline has passed."""
        ...

    def refused(self, ticket: Ticket, now: int) -> None:
        """Answer a request that was not admitted."""
        ...

    def failed(self, batch: Batch, error: Exception) -> None:
        """Answer the requests of a batch with *error*, because a layer of the batch could not be computed."""
        ...

    def ended(self, batch: Batch) -> None:
        """Release the data of a batch that ended without being served, or that was merged into another batch.

        No other call for this batch follows.
        """
        ...
