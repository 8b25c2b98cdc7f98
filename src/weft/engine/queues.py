"""What waits and what runs of every stream, and when strict requests are due."""

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

LATELY_TICKS = 50_000_000
"""What a stream was given counts half after so many ticks: 50 ms of a machine's clock."""

_LN_2 = log(2)

LEAST_SWEPT = 1024
"""Watched deadlines from which on those of answered requests are swept out."""


@dataclass(eq=False)
class StreamQueue:
    """One stream's requests: those that wait, and those in batches."""

    stream: int
    terms: Terms
    places: int
    """Batches that may be in flight."""
    steered: Steered | None = None
    """How sure early answers of its model must be, where it has any."""
    waiting: deque[Ticket] = field(default_factory=deque)
    """Requests that no batch has taken, in order of deadlines."""
    late: deque[Ticket] = field(default_factory=deque)
    """Those that can no longer be on time, and give way to the others."""
    in_flight: list[Batch | None] = field(init=False)
    """A batch keeps its place from beginning to end."""
    by_query: dict[int, Batch] = field(default_factory=dict)
    """The same batches by their numbers."""
    queries: int = 0
    """Batches that have begun."""
    deepest: int = 0
    """Most requests that waited at a time."""
    served: int = 0
    """Ticks of work issued; at least as many as whoever had least had when it last became busy."""
    lately: float = 0.0
    """The part of the device's time that it was given lately, while it had work; when another comes, no more than what
    is fair from then on."""
    looked_at: int = 0
    came: Event = field(init=False)
    """That a request of it came; one event stands for all, since it says no more than that."""

    def __post_init__(self) -> None:
        self.in_flight = [None] * self.places
        self.came = Event(EventKind.ARRIVAL, self.stream)

    @property
    def idle(self) -> bool:
        """Whether nothing of it waits or runs."""
        return not (self.waiting or self.late or self.by_query)

    @property
    def batches(self) -> list[Batch]:
        """Its batches in flight."""
        return [batch for batch in self.in_flight if batch]

    def rearrange(self, terms: Terms, places: int) -> None:
        """Go by other terms from now on; whoever counted as late does not until they are judged again."""
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
        """It has work again: nobody is owed for the time before, and nobody owes more."""
        fair = 1 / (len(others) + 1)
        self.lately, self.looked_at = fair, max(self.looked_at, now)
        for each in others:
            each.lately = min(each.lately, fair)

    def remember(self, now: int, ticks: int = 0) -> None:
        """Time has passed, and it was given so many ticks of work."""
        kept = 0.5 ** ((now - self.looked_at) / LATELY_TICKS)
        self.lately, self.looked_at = self.lately * kept + ticks * _LN_2 / LATELY_TICKS, now

    def put(self, ticket: Ticket) -> None:
        if not self.waiting or self.waiting[-1].due <= ticket.due:
            self.waiting.append(ticket)
        else:
            insort(self.waiting, ticket, key=due)

    def begin(self, batch: Batch) -> None:
        """Give a batch a place."""
        self.in_flight[self.in_flight.index(None)] = batch
        self.by_query[batch.query] = batch
        self.queries += 1

    def end(self, batch: Batch) -> None:
        """Let a batch leave its place."""
        self.in_flight[self.in_flight.index(batch)] = None
        del self.by_query[batch.query]
        batch.ended = True


def _number(queue: StreamQueue) -> int:
    return queue.stream


class Queues:
    """The queues of all streams.

    remaining: estimated ticks from each layer of each program to its end. places: how many requests may wait in all.
    """

    def __init__(self, remaining: Sequence[Sequence[int]], places: int) -> None:
        self._remaining = remaining
        self.line = WaitingLine(places)
        """All requests that no lane has begun."""
        self._streams: list[StreamQueue] = []
        self._busy: list[StreamQueue] = []
        """Streams that have something, by number; who has nothing any more is taken out when next looked at."""

    def __getitem__(self, stream: int) -> StreamQueue:
        return self._streams[stream]

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def deepest(self) -> list[int]:
        """Most requests that waited in each queue."""
        return [queue.deepest for queue in self._streams]

    def add(self, queue: StreamQueue) -> None:
        """Open another stream, or give the number of one that has nothing left to it."""
        if queue.stream == len(self._streams):
            self._streams.append(queue)
        else:
            assert self._streams[queue.stream].idle
            self._streams[queue.stream] = queue

    def busy(self) -> list[StreamQueue]:
        """Streams of which something waits or runs."""
        found = [queue for queue in self._busy if queue.waiting or queue.by_query or queue.late]
        if len(found) < len(self._busy):
            self._busy = found
        return found

    @property
    def stands(self) -> bool:
        """Whether there is a request that no lane computes."""
        if self.line.waiting:
            return True
        for queue in self._busy:
            for batch in queue.by_query.values():
                if not batch.running:
                    return True
        return False

    def waiting(self) -> Iterator[StreamQueue]:
        """Streams of which something waits."""
        return (queue for queue in self._busy if queue.waiting)

    def batch_of(self, candidate: Candidate) -> Batch | None:
        """The batch in flight that a candidate belongs to."""
        return self._streams[candidate.stream].by_query.get(candidate.query)

    def whole(self, stream: int, requests: int = 1) -> int:
        """Ticks that so many requests of a stream are expected to take, in batches as large as they come."""
        terms = self._streams[stream].terms
        if requests <= 1:
            return requests * self._remaining[terms.programs][0]
        return requests * self._remaining[terms.programs + terms.max_batch - 1][0] // terms.max_batch

    def rest(self, batch: Batch) -> int:
        """Ticks that the layers of a batch are expected to take that were not issued."""
        rests = self._remaining[batch.program]
        return rests[batch.layer] if batch.layer < len(rests) else 0

    def put(self, ticket: Ticket) -> StreamQueue:
        """Let a request wait for its turn, in the queue that is returned."""
        queue = self._streams[ticket.stream]
        if queue.idle:
            others = self.busy()
            queue.served = max(queue.served, min([each.served for each in others], default=0))
            queue.join(others, ticket.arrival)
            self._busy = sorted([*others, queue], key=_number)
        queue.put(ticket)
        self.count(ticket, 1)
        return queue

    def count(self, ticket: Ticket, more: int) -> None:
        """Note that a request waits, or waits no longer."""
        self.line.waiting += more
        if ticket.line:
            ticket.line.waiting += more

    def withdraw(self, ticket: Ticket) -> Batch | None:
        """Nobody waits for it any more: it leaves the queue; if it is in a batch, that is returned and goes on for
        the others, if there are any."""
        ticket.gone = True
        queue = self._streams[ticket.stream]
        for waiting in (queue.waiting, queue.late):
            if ticket in waiting:
                waiting.remove(ticket)
                self.count(ticket, -1)
                return None
        return next((batch for batch in queue.by_query.values() if ticket in batch.members), None)


class StrictDeadlines:
    """Strict requests by their deadlines; those that were answered are swept out now and then."""

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, Ticket]] = []
        """Deadlines with their requests, the first one first; empty where no request is strict."""
        self._most = LEAST_SWEPT
        self._taken = 0

    def watch(self, ticket: Ticket) -> None:
        """Remember when a request is due."""
        self._taken += 1
        heapq.heappush(self.heap, (ticket.due, self._taken, ticket))
        if len(self.heap) > self._most:
            self.heap = [entry for entry in self.heap if not entry[2].gone]
            heapq.heapify(self.heap)
            self._most = max(LEAST_SWEPT, 2 * len(self.heap))

    def next(self) -> int:
        """When the next of them is due."""
        return self.heap[0][0] if self.heap else NO_DEADLINE

    def any_passed(self, now: int) -> bool:
        """Whether there is something to forget: the first of them is due, or was answered."""
        return bool(self.heap) and (self.heap[0][0] <= now or self.heap[0][2].gone)

    def passed(self, now: int) -> Iterator[Ticket]:
        """Those that are due and were not answered; they are forgotten."""
        while self.any_passed(now):
            ticket = heapq.heappop(self.heap)[2]
            if not ticket.gone:
                yield ticket
