"""The queues of waiting requests and running batches of every stream, and the deadlines of strict requests."""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import log

from weft.engine.policies.base import NO_DEADLINE, Candidate, Event, EventKind
from weft.engine.steering import Steered
from weft.engine.tickets import Batch, Terms, Ticket, WaitingLine, due

SHARE_HALF_LIFE = 50_000_000
"""Half-life of work in a stream's ``recent_share`` of the device: 50 ms at one tick per nanosecond."""

_LN_2 = log(2)
"""Turns the half-life into a decay rate: work at full speed converges to a share of 1."""

LEAST_SWEPT = 1024
"""Heap size from which on deadlines of answered requests are removed; below it a sweep costs more than it frees."""


@dataclass(eq=False)
class StreamQueue:
    """The waiting requests of one stream, and its batches in flight."""

    stream: int
    terms: Terms
    places: int
    """Batches that may be in flight."""
    steered: Steered | None = None
    """The exit threshold of its model; None without early exits."""
    waiting: deque[Ticket] = field(default_factory=deque)
    """Requests that no batch has taken, in order of deadlines."""
    late: deque[Ticket] = field(default_factory=deque)
    """Waiting requests that can no longer be on time, and give way to the others."""
    in_flight: list[Batch | None] = field(init=False)
    """The batches in flight by place; None: a free place. A batch keeps its place from beginning to end."""
    by_query: dict[int, Batch] = field(default_factory=dict)
    """The same batches by query number."""
    queries: int = 0
    """Batches that have begun."""
    deepest: int = 0
    """The largest number of requests that waited at the same time."""
    served: int = 0
    """Ticks of work issued. When the stream becomes busy, raised to the least of the other busy streams, so that an
    idle stream cannot save up service."""
    recent_share: float = 0.0
    """The stream's recent share of the device's time, while it had work; capped at the fair share when another stream
    becomes busy."""
    share_updated: int = 0
    """Tick at which ``recent_share`` was last updated."""
    arrival_event: Event = field(init=False)
    """The event of an arrival; one object for all arrivals, since it names only the stream."""

    def __post_init__(self) -> None:
        self.in_flight = [None] * self.places
        self.arrival_event = Event(EventKind.ARRIVAL, self.stream)

    @property
    def idle(self) -> bool:
        """Whether it has neither waiting requests nor batches in flight."""
        return not (self.waiting or self.late or self.by_query)

    @property
    def batches(self) -> list[Batch]:
        """Its batches in flight."""
        return [batch for batch in self.in_flight if batch]

    def rearrange(self, terms: Terms, places: int) -> None:
        """Switch to other terms and another number of places for batches.

        Late requests and batches count as on time until the source sorts them out again.
        """
        batches, late, self.terms = self.batches, list(self.late), terms
        self.places = max(places, len(batches))
        self.in_flight = [*batches, *[None] * (self.places - len(batches))]
        self.late.clear()
        for ticket in late:
            self.put(ticket)
        for batch in batches:
            if batch.late:
                batch.late, batch.deadline = False, min(ticket.due for ticket in batch.members)

    def join(self, others: Sequence[StreamQueue], now: int) -> None:
        """Start this stream, which becomes busy, at the fair share, and cap the other busy streams at the fair share.

        So a stream that had the device to itself is not held back for that later.
        """
        fair_share = 1 / (len(others) + 1)
        self.recent_share, self.share_updated = fair_share, max(self.share_updated, now)
        for other in others:
            other.recent_share = min(other.recent_share, fair_share)

    def update_share(self, now: int, ticks: int = 0) -> None:
        """Update ``recent_share``: let it decay until *now*, and add *ticks* of work that the stream was given."""
        decay = 0.5 ** ((now - self.share_updated) / SHARE_HALF_LIFE)
        self.recent_share, self.share_updated = self.recent_share * decay + ticks * _LN_2 / SHARE_HALF_LIFE, now

    def put(self, ticket: Ticket) -> None:
        """Add a waiting request in order of deadlines; among equal ones, the one that came first stays in front."""
        if not self.waiting or self.waiting[-1].due <= ticket.due:
            self.waiting.append(ticket)
        else:
            insort(self.waiting, ticket, key=due)

    def begin(self, batch: Batch) -> None:
        """Put a batch into a free place."""
        self.in_flight[self.in_flight.index(None)] = batch
        self.by_query[batch.query] = batch
        self.queries += 1

    def end(self, batch: Batch) -> None:
        """Free the place of a batch."""
        self.in_flight[self.in_flight.index(batch)] = None
        del self.by_query[batch.query]
        batch.ended = True


class Queues:
    """The queues of all streams.

    remaining: estimated ticks from each layer of each program to the end of that program.
    places: how many requests may wait in all queues together.
    """

    def __init__(self, remaining: Sequence[Sequence[int]], places: int) -> None:
        self._remaining = remaining
        self.line = WaitingLine(places)
        """The count and the limit of waiting requests of all streams."""
        self._streams: list[StreamQueue] = []
        self._busy: list[StreamQueue] = []
        """Streams with requests, by number; idle ones are removed when ``busy`` is next called."""

    def __getitem__(self, stream: int) -> StreamQueue:
        return self._streams[stream]

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def deepest(self) -> list[int]:
        """For each stream, the largest number of requests that waited at the same time."""
        return [queue.deepest for queue in self._streams]

    def add(self, queue: StreamQueue) -> None:
        """Add the queue of a new stream, or replace that of an idle stream with the same number."""
        if queue.stream == len(self._streams):
            self._streams.append(queue)
        else:
            assert self._streams[queue.stream].idle
            self._streams[queue.stream] = queue

    def busy(self) -> list[StreamQueue]:
        """Return the queues that have waiting requests or batches in flight, by stream number."""
        busy = [queue for queue in self._busy if queue.waiting or queue.by_query or queue.late]
        if len(busy) < len(self._busy):
            self._busy = busy
        return busy

    @property
    def lane_awaited(self) -> bool:
        """Whether a request or a batch waits for a lane."""
        if self.line.waiting:
            return True
        for queue in self._busy:
            for batch in queue.by_query.values():
                if not batch.running:
                    return True
        return False

    def waiting(self) -> Iterator[StreamQueue]:
        """Iterate over the queues that have waiting requests."""
        return (queue for queue in self._busy if queue.waiting)

    def batch_of(self, candidate: Candidate) -> Batch | None:
        """Return the batch in flight that a candidate belongs to; None if the batch has not begun."""
        return self._streams[candidate.stream].by_query.get(candidate.query)

    def whole(self, stream: int, requests: int = 1) -> int:
        """Return the expected ticks of a number of requests of a stream; two or more count as parts of full batches."""
        terms = self._streams[stream].terms
        if requests <= 1:
            return requests * self._remaining[terms.programs][0]
        return requests * self._remaining[terms.programs + terms.max_batch - 1][0] // terms.max_batch

    def rest(self, batch: Batch) -> int:
        """Return the expected ticks of the layers of a batch that were not issued."""
        rests = self._remaining[batch.program]
        return rests[batch.layer] if batch.layer < len(rests) else 0

    def put(self, ticket: Ticket) -> StreamQueue:
        """Put a request into the queue of its stream, and return that queue."""
        queue = self._streams[ticket.stream]
        if queue.idle:
            others = self.busy()
            queue.served = max(queue.served, min([other.served for other in others], default=0))
            queue.join(others, ticket.arrival)
            self._busy = sorted([*others, queue], key=lambda queue: queue.stream)
        queue.put(ticket)
        self.count(ticket, 1)
        return queue

    def count(self, ticket: Ticket, change: int) -> None:
        """Add *change*, 1 or -1, to the counts of waiting requests: of all streams, and of the request's own line."""
        self.line.waiting += change
        if ticket.line:
            ticket.line.waiting += change

    def withdraw(self, ticket: Ticket) -> Batch | None:
        """Mark a request as gone and take it out of its queue.

        A request in a batch stays a member; its batch is returned, and goes on for the other members. Otherwise None.
        """
        ticket.gone = True
        queue = self._streams[ticket.stream]
        for waiting in (queue.waiting, queue.late):
            if ticket in waiting:
                waiting.remove(ticket)
                self.count(ticket, -1)
                return None
        return next((batch for batch in queue.by_query.values() if ticket in batch.members), None)


class StrictDeadlines:
    """A heap of the deadlines of strict requests; entries of answered requests are removed lazily."""

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, Ticket]] = []
        """Deadline, sequence number (among equal deadlines, the request admitted first) and request."""
        self._sweep_above = LEAST_SWEPT
        """Heap size above which the entries of answered requests are removed."""
        self._watched = 0
        """Number of requests added so far: the last sequence number."""

    def watch(self, ticket: Ticket) -> None:
        """Add a strict request."""
        self._watched += 1
        heapq.heappush(self.heap, (ticket.due, self._watched, ticket))
        if len(self.heap) > self._sweep_above:
            self.heap = [entry for entry in self.heap if not entry[-1].gone]  # the request comes last
            heapq.heapify(self.heap)
            self._sweep_above = max(LEAST_SWEPT, 2 * len(self.heap))

    def next(self) -> int:
        """Return the earliest deadline, or NO_DEADLINE."""
        return self.heap[0][0] if self.heap else NO_DEADLINE

    def any_passed(self, now: int) -> bool:
        """Return whether the first entry can be removed: its deadline has passed, or its request was answered."""
        if not self.heap:
            return False
        deadline, _, ticket = self.heap[0]
        return deadline <= now or ticket.gone

    def passed(self, now: int) -> Iterator[Ticket]:
        """Remove the entries whose deadlines have passed, and yield their requests if they were not answered."""
        while self.any_passed(now):
            _, _, ticket = heapq.heappop(self.heap)
            if not ticket.gone:
                yield ticket
