"""Simulated clients: arrival processes and closed loops that feed ``Requests``, and a record of every answer."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from weft.engine.engine import Completion
from weft.engine.policies.base import NO_DEADLINE
from weft.engine.tickets import Batch, Terms, Ticket, WaitingLine

DROPPED, REFUSED = -1, -2

Sure = Mapping[int, float]
"""After how many layers an exit comes, and how sure a request's answer is there."""


class Ending(NamedTuple):
    """What became of one request."""

    stream: int
    arrival: int
    end: int
    """When its last layer was computed; -1 if it was dropped, -2 if it was refused."""
    layers: int = 0
    """After how many layers it left; 0 where it was not meant to leave before the end."""


class Arrivals:
    """Tickets at given times, open and closed.

    times: per open stream, ascending ticks. end: closed streams send nothing from then on.
    strict: whether late requests are dropped.
    leaves: per stream, after how many layers each of its requests is done; none where it has no exits.
    sure: per stream, how sure each of its requests' answers are, where a threshold decides when it leaves.
    lines: per stream, how many of its requests may wait.
    """

    def __init__(
        self,
        terms: Sequence[Terms],
        times: Sequence[Iterator[int]],
        *,
        end: int,
        strict: bool = False,
        leaves: Sequence[Iterator[int] | None] | None = None,
        sure: Sequence[Iterator[Sure] | None] | None = None,
        lines: Sequence[WaitingLine | None] | None = None,
    ) -> None:
        self._terms, self._times, self._end, self._strict = terms, times, end, strict
        self._leaves = leaves or [None] * len(terms)
        self._sure = sure or [None] * len(terms)
        self._lines = lines or [None] * len(terms)
        self._next = [next(source, NO_DEADLINE) for source in times]
        self._returning = [[0] * term.clients for term in terms]
        """When clients will be back, as heaps: who was refused comes later than who was served after him."""
        self._soonest = self._first()
        self.answers: list[Ending] = []
        """What became of each request, in order."""
        self._batches: list[tuple[int, int]] = []  # stream and oldest arrival of each batch that was served

    @property
    def arrivals(self) -> Arrivals:
        return self

    def take(self, now: int) -> Iterable[Ticket]:
        """Open arrivals first, then returning clients."""
        return self._taken(now) if self._soonest <= now else ()

    def _taken(self, now: int) -> Iterator[Ticket]:
        for stream, returning in enumerate(self._returning):
            while self._next[stream] <= now:
                arrival = self._next[stream]
                self._next[stream] = next(self._times[stream], NO_DEADLINE)
                yield self._ticket(stream, arrival)
            while returning and returning[0] <= now:
                arrival = heapq.heappop(returning)
                if arrival < self._end:
                    yield self._ticket(stream, arrival)
        self._soonest = self._first()

    def next_arrival(self) -> int:
        return self._soonest

    def _first(self) -> int:
        """When the next request comes, of all that are known."""
        return min([*self._next, *[returning[0] for returning in self._returning if returning]], default=NO_DEADLINE)

    def exhausted(self) -> bool:
        return self._soonest == NO_DEADLINE

    def served(self, batch: Batch, completion: Completion) -> None:
        end = completion.times.compute_end
        self._batches.append((batch.members[0].stream, batch.members[0].arrival))
        for ticket in batch.members:
            if not ticket.gone:
                self._answer(ticket, end, end)

    def leave(self, batch: Batch, completion: Completion) -> list[Ticket]:
        end = completion.times.compute_end
        here = [ticket for ticket in batch.members if not ticket.gone]
        staying = [ticket for ticket in here if not self._leaves_at(ticket, batch.layer)]
        for ticket in here:
            if ticket not in staying:
                ticket.leaves = batch.layer
                self._answer(ticket, end, end)
        if not staying:
            self._batches.append((batch.members[0].stream, batch.members[0].arrival))
        return staying

    def merged(self, batch: Batch, other: Batch) -> None:
        """A simulated batch is its members."""

    def dropped(self, ticket: Ticket, now: int) -> None:
        self._answer(ticket, DROPPED, now)

    def refused(self, ticket: Ticket, now: int) -> None:
        """Its client comes again once it would have been due: who is refused at once would else never rest."""
        self._answer(ticket, REFUSED, max(now, ticket.due))

    def failed(self, batch: Batch, error: Exception) -> None:
        raise AssertionError("simulated layers do not fail") from error

    def ended(self, batch: Batch) -> None:
        """Nobody waits for a simulated batch but its requests."""

    def batches(self, warm: int) -> list[int]:
        """Batches served of each stream whose first request arrived at *warm* or later."""
        return [
            sum(1 for owner, arrival in self._batches if owner == stream and arrival >= warm)
            for stream in range(len(self._terms))
        ]

    def _ticket(self, stream: int, arrival: int) -> Ticket:
        term, leaves, sure = self._terms[stream], self._leaves[stream], self._sure[stream]
        ticket = Ticket(stream, arrival, arrival + term.deadline, term.priority, self._strict)
        ticket.leaves = 0 if leaves is None else next(leaves)
        ticket.sure = None if sure is None else next(sure)
        ticket.line = self._lines[stream]
        return ticket

    def _leaves_at(self, ticket: Ticket, layer: int) -> bool:
        if ticket.sure is None:
            return ticket.leaves <= layer
        return ticket.sure[layer] >= ticket.threshold

    def _answer(self, ticket: Ticket, end: int, now: int) -> None:
        """Record what became of a request; the client of a closed stream will be back."""
        self.answers.append(Ending(ticket.stream, ticket.arrival, end, ticket.leaves if end >= 0 else 0))
        if self._terms[ticket.stream].think >= 0:
            back = now + self._terms[ticket.stream].think
            heapq.heappush(self._returning[ticket.stream], back)
            self._soonest = min(self._soonest, back)
