"""Simulated clients, open and closed loop, that feed ``Requests`` and record every answer."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from warnings import warn

from weft.engine.engine import Completion
from weft.engine.policies.base import NO_DEADLINE
from weft.engine.tickets import Batch, Terms, Ticket, WaitingLine

# Values of ``Ending.end`` for requests without an answer; below 0, so that no time can equal them.
DROPPED, REFUSED = -1, -2

Confidences = Mapping[int, float]
"""Number of layers before an exit -> the confidence of a request's answer at that exit."""


class Ending(NamedTuple):
    """The end of one request: answered, dropped or refused."""

    stream: int
    arrival: int
    end: int
    """The tick at which its last layer was computed; ``DROPPED`` or ``REFUSED`` if it has no answer."""
    layers: int = 0
    """Layers after which it left; 0 for a request without early exits."""


class Arrivals:
    """The feed of a simulation: requests of open streams at given times, of closed streams after each answer.

    All sequences have one entry per stream.
    times: the ascending arrival ticks; empty for a closed stream, whose clients first send at tick 0.
    end: closed streams send nothing from this tick on.
    strict: whether deadlines are strict (``Ticket.strict``).
    leaves: for each request, the number of layers after which it leaves; None for a stream without exits.
    confidences: for each request, its confidences, if a threshold decides at which exit it leaves; None otherwise.
    lines: the limit of the stream's own queue; None: only the limit of all queues together.
    sure: *confidences* under its name before 0.3.
    """

    def __init__(
        self,
        terms: Sequence[Terms],
        times: Sequence[Iterator[int]],
        *,
        end: int,
        strict: bool = False,
        leaves: Sequence[Iterator[int] | None] | None = None,
        confidences: Sequence[Iterator[Confidences] | None] | None = None,
        lines: Sequence[WaitingLine | None] | None = None,
        sure: Sequence[Iterator[Confidences] | None] | None = None,
    ) -> None:
        if sure is not None:
            warn("Arrivals(sure=) is confidences= now; the old name ends with 0.4", DeprecationWarning, stacklevel=2)
            confidences = sure
        self._terms, self._times, self._end, self._strict = terms, times, end, strict
        self._leaves = leaves or [None] * len(terms)
        self._confidences = confidences or [None] * len(terms)
        self._lines = lines or [None] * len(terms)
        self._next = [next(source, NO_DEADLINE) for source in times]
        self._returning = [[0] * term.clients for term in terms]
        """Per stream, a heap of the ticks at which clients send again; not in order, since refused clients pause."""
        self._soonest = self._next_tick()
        self.answers: list[Ending] = []
        """The end of each request, in the order of the ends."""
        self._batches: list[tuple[int, int]] = []
        """The stream and the arrival of the first member of each batch that was served."""

    @property
    def arrivals(self) -> Arrivals:
        return self

    def take(self, now: int) -> Iterator[Ticket]:
        """Yield the requests that arrived by *now*; of a stream, requests at given times before those of clients."""
        if self._soonest > now:
            return
        for stream, returning in enumerate(self._returning):
            while self._next[stream] <= now:
                arrival = self._next[stream]
                self._next[stream] = next(self._times[stream], NO_DEADLINE)
                yield self._ticket(stream, arrival)
            while returning and returning[0] <= now:
                arrival = heapq.heappop(returning)
                if arrival < self._end:
                    yield self._ticket(stream, arrival)
        self._soonest = self._next_tick()

    def next_arrival(self) -> int:
        return self._soonest

    def _next_tick(self) -> int:
        """Return the tick of the next request; NO_DEADLINE if none is known."""
        return min([*self._next, *[returning[0] for returning in self._returning if returning]], default=NO_DEADLINE)

    def exhausted(self) -> bool:
        return self._soonest == NO_DEADLINE

    def served(self, batch: Batch, completion: Completion) -> None:
        """Record the answers of a batch whose last layer was computed."""
        end = completion.times.compute_end
        self._batches.append((batch.members[0].stream, batch.members[0].arrival))
        for ticket in batch.members:
            if not ticket.gone:
                self._answer(ticket, end, end)

    def leave(self, batch: Batch, completion: Completion) -> list[Ticket]:
        """Record the answers of the requests that leave at an exit; return the others."""
        end = completion.times.compute_end
        unanswered = [ticket for ticket in batch.members if not ticket.gone]
        staying = [ticket for ticket in unanswered if not self._leaves_at(ticket, batch.layer)]
        if not staying:
            self._batches.append((batch.members[0].stream, batch.members[0].arrival))
        for ticket in unanswered:
            if ticket not in staying:
                ticket.leaves = batch.layer
                self._answer(ticket, end, end)
        return staying

    def merged(self, batch: Batch, other: Batch) -> None:
        """Do nothing: a simulated batch has no data besides its members."""

    def dropped(self, ticket: Ticket, now: int) -> None:
        self._answer(ticket, DROPPED, now)

    def refused(self, ticket: Ticket, now: int) -> None:
        """Record the refusal. A closed client sends again only after the deadline; otherwise it would retry at once."""
        self._answer(ticket, REFUSED, max(now, ticket.due))

    def failed(self, batch: Batch, error: Exception) -> None:
        raise AssertionError("simulated layers do not fail") from error

    def ended(self, batch: Batch) -> None:
        """Do nothing: a simulated batch holds nothing to release."""

    def batches(self, warm: int) -> list[int]:
        """Return the number of served batches of each stream whose first request arrived at tick *warm* or later."""
        counted = Counter(stream for stream, arrival in self._batches if arrival >= warm)
        return [counted[stream] for stream in range(len(self._terms))]

    def _ticket(self, stream: int, arrival: int) -> Ticket:
        """Return a request that arrived at a tick, with what is known of its exit and its stream's own limited queue.

        ``leaves`` is 0 without exits: it leaves after the last layer. Confidences, if any, decide instead of it.
        """
        term, leaves, confidences = self._terms[stream], self._leaves[stream], self._confidences[stream]
        ticket = Ticket(stream, arrival, arrival + term.deadline, term.priority, self._strict)
        ticket.leaves = 0 if leaves is None else next(leaves)
        ticket.confidences = None if confidences is None else next(confidences)
        ticket.line = self._lines[stream]
        return ticket

    def _leaves_at(self, ticket: Ticket, layer: int) -> bool:
        """Return whether a request leaves at the exit after *layer* layers."""
        if ticket.confidences is None:
            return ticket.leaves <= layer
        return ticket.confidences[layer] >= ticket.threshold

    def _answer(self, ticket: Ticket, end: int, now: int) -> None:
        """Record the end of a request, and schedule the next request of its client if the stream is closed.

        now: the tick from which the client's think time counts.
        """
        self.answers.append(Ending(ticket.stream, ticket.arrival, end, ticket.leaves if end >= 0 else 0))
        if self._terms[ticket.stream].think >= 0:
            return_tick = now + self._terms[ticket.stream].think
            heapq.heappush(self._returning[ticket.stream], return_tick)
            self._soonest = min(self._soonest, return_tick)
