"""Batch formation: when waiting requests become a batch, which of them, and the layers that the policy is offered.

A batch is ready when it is full, its first request has waited long enough, or it would otherwise be late. A policy that
refills is offered beginnings (batches that could begin) of every size at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import chain, islice

from weft.engine.policies.base import NO_DEADLINE, Candidate, LateWork, Policy, Refill, Running, ShareUse
from weft.engine.queues import Queues, StreamQueue
from weft.engine.tickets import Batch, Ticket

Abortable = Callable[[], tuple[Running, ...]]
"""Returns the running layers of an executor if one of them could be stopped, else nothing."""

Rooms = Callable[[], Collection[int]]
"""Returns the numbers of the lanes that take one more layer, where lanes have memory of their own."""

BATCHES = 4
"""Batches of one stream that may be in flight, if lanes and policy need no more: on an NPU one of them is on time, the
others are late."""
LATE_BATCHES = 64
"""The same where late batches run last: late batches wait long, and must not take the places of batches that can still
be on time."""

BATCHES_BEHIND = 4
"""Batches of waiting requests that ``ShareUse.behind`` takes into account: later ones hardly ever bind, and every batch
costs time at every decision."""


def most_batches(late: LateWork) -> int:
    """Return how many batches of a stream may be in flight if lanes and policy need no more."""
    return LATE_BATCHES if late is LateWork.LAST else BATCHES


class Batcher:
    """Offers the next layer of every batch in flight, and the first layer of every batch that could begin."""

    def __init__(
        self, policy: Policy, queues: Queues, remaining: Sequence[Sequence[int]], abortable: Abortable, rooms: Rooms
    ) -> None:
        """remaining: estimated ticks from each layer of each program to the end of that program.

        abortable, rooms: methods of the executor, as ``Abortable`` and ``Rooms`` describe.
        """
        self._setting, self._queues, self._remaining = policy.setting, queues, remaining
        self._abortable, self._rooms = abortable, rooms
        self._refills, self._waits, self._shares = policy.traits.refills, policy.waits, policy.setting.shares

    def ready_at(self, queue: StreamQueue) -> int:
        """Return the tick at which the waiting requests become a batch although they do not fill one.

        Then the wait of a request is over, or the request due first would be late. 0: at once.
        """
        waiting, terms = queue.waiting, queue.terms
        if self._refills:
            return 0
        if self._waits is not None:
            return min(ticket.arrival + (ticket.due - ticket.arrival) * self._waits // 100 for ticket in waiting)
        if not terms.timeout:
            return 0
        rest = self._remaining[terms.programs][0]
        return min(min(ticket.arrival for ticket in waiting) + terms.timeout, waiting[0].due - rest)

    def heads(self, queue: StreamQueue, now: int) -> list[Candidate]:
        """Return the candidates of a stream: the next layers of its batches in flight, and a batch that could begin.

        Batches of late waiting requests are not among them (``late_heads``).
        """
        if self._refills:
            return self._refilling_heads(queue)
        batches = queue.batches if queue.by_query else []
        startable = self._startable(batches) if batches else []
        heads = [self.head(queue, batch, now=now) for batch in startable]
        waiting, max_batch = len(queue.waiting), queue.terms.max_batch
        ready = waiting > 0 and (waiting >= max_batch or now >= self.ready_at(queue))
        if ready and (
            not batches or (len(batches) < queue.places and self._may_begin(queue, self._batches_to_offer(batches)))
        ):
            members = list(islice(queue.waiting, max_batch))
            batch = _form_batch(queue, members)
            heads.append(self.head(queue, batch, now=now, own_waiting=len(members)))
        return heads

    def _latest_end(self, queue: StreamQueue, batch: Batch, own_waiting: int, now: int) -> int:
        """Return the latest end of a batch with which the requests behind it in its stream can be on time.

        Requests that cannot be on time anyway do not count. NO_DEADLINE if no request waits behind the batch.
        own_waiting: as for ``head``.
        """
        latest, need, max_batch = NO_DEADLINE, 0, queue.terms.max_batch
        if len(queue.waiting) <= own_waiting:
            return latest
        batch_ticks = self._queues.whole(queue.stream, min(max_batch, len(queue.waiting) - own_waiting))
        batch_end = now + self._queues.rest(batch) + batch_ticks
        for ticket in islice(queue.waiting, own_waiting, own_waiting + BATCHES_BEHIND * max_batch, max_batch):
            if batch_end + need <= ticket.due:
                need += batch_ticks
                latest = min(latest, ticket.due - need)
        return latest

    def _startable(self, batches: list[Batch]) -> list[Batch]:
        """Return the batches whose next layer a lane could take: not running, and the home lane, if any, has room."""
        paused = [batch for batch in batches if not batch.running]
        if all([batch.home is None for batch in paused]):
            return paused
        rooms = self._rooms()  # once for all batches: dozens of them may be late
        return [batch for batch in paused if batch.home is None or batch.home in rooms]

    def _may_begin(self, queue: StreamQueue, batches: list[Batch]) -> bool:
        """Return whether another batch may begin: fewer than one on time per lane, or it is due before all these.

        batches: the batches in flight that still need a lane.
        """
        on_time = [batch for batch in batches if not batch.late]
        return len(on_time) < self._setting.lanes or queue.waiting[0].due < min(
            min(t.due for t in batch.members) for batch in on_time
        )

    def _batches_to_offer(self, batches: list[Batch]) -> list[Batch]:
        """Return the batches that still need a lane, or may need a lane again because their last layer can be stopped.

        Where lanes take layers ahead, a batch whose last layer is on a lane needs no other: the next batch may begin
        behind that layer.
        """
        programs = self._setting.programs
        if not self._setting.ahead or all(batch.layer < len(programs[batch.program].names) for batch in batches):
            return batches
        stoppable = {(layer.candidate.program, layer.candidate.query) for layer in self._abortable() if layer.stoppable}
        return [
            batch
            for batch in batches
            if batch.layer < len(programs[batch.program].names) or (batch.program, batch.query) in stoppable
        ]

    def late_heads(self, queue: StreamQueue) -> list[Candidate]:
        """Return the batch of late requests that could begin as a list of one candidate; empty if there is none."""
        if not queue.late or len(queue.by_query) == queue.places:
            return []
        members = list(islice(queue.late, queue.terms.max_batch))
        return [self.head(queue, _form_batch(queue, members, late=True))]

    def _refilling_heads(self, queue: StreamQueue) -> list[Candidate]:
        """Return the batches that a lane could take, and beginnings of every size that could be merged with them all.

        Beginnings take requests that can still be on time first, then late ones.
        """
        batches, max_batch = queue.batches, queue.terms.max_batch
        in_flight = sum([len(batch.members) for batch in self._batches_to_offer(batches)])
        paused = self._startable(batches)
        room = min(
            max_batch - sum([len(batch.members) for batch in paused]), max_batch * self._setting.lanes - in_flight
        )
        newcomers = list(islice(chain(queue.waiting, queue.late), max(0, room)))
        waiting = len(queue.waiting) + len(queue.late)
        heads = [
            self.head(queue, batch, Refill(tuple([ticket.due for ticket in batch.members]), waiting))
            for batch in paused
        ]
        return heads + self._beginnings(queue, newcomers, waiting) if newcomers else heads

    def _beginnings(self, queue: StreamQueue, newcomers: list[Ticket], waiting: int) -> list[Candidate]:
        """Return a candidate for the first request, one for the first two, and so on, up to all of *newcomers*.

        waiting: the number of waiting requests of the stream, these included.
        """
        dues = tuple([ticket.due for ticket in newcomers])
        deadline = dues[0] if queue.waiting else NO_DEADLINE  # otherwise all of them are late
        beginnings: list[Candidate] = []
        arrival, priority = NO_DEADLINE, 0
        for size, ticket in enumerate(newcomers, start=1):
            arrival, priority = min(arrival, ticket.arrival), max(priority, ticket.priority)
            number = queue.terms.programs + size - 1
            refill = Refill(dues[:size], waiting - size)
            # by position, as ``Candidate`` explains
            beginning = Candidate.of_batch(
                self._setting.programs[number], self._remaining[number], number, queue.stream, queue.queries, arrival,
                deadline, priority, size, refill=refill,
            )  # fmt: skip
            beginnings.append(beginning)
        return beginnings

    def lone_candidate(self, ticket: Ticket) -> Candidate:
        """Return the first layer of a batch of this request alone, for comparisons; the batch is not begun."""
        queue = self._queues[ticket.stream]
        return self.head(queue, _form_batch(queue, [ticket]))

    def head(
        self,
        queue: StreamQueue,
        batch: Batch,
        refill: Refill | None = None,
        now: int | None = None,
        own_waiting: int = 0,
    ) -> Candidate:
        """Return the next layer of a batch as a candidate.

        refill: the facet for policies that refill. now: the tick; None: the candidate is compared but not started, so
        that requests behind it do not matter. own_waiting: how many of its members are still among the stream's waiting
        requests, because the batch has not begun.
        """
        members, number = batch.members, batch.program
        arrival, priority = members[0].arrival, members[0].priority
        if len(members) > 1:
            arrival = min([ticket.arrival for ticket in members])
            priority = max([ticket.priority for ticket in members])
        share = None
        if self._shares:
            behind = NO_DEADLINE if now is None else self._latest_end(queue, batch, own_waiting, now)
            share = ShareUse(queue.recent_share, behind)
        # by position, as ``Candidate`` explains
        return Candidate.of_batch(
            self._setting.programs[number], self._remaining[number], number, queue.stream, batch.query, arrival,
            batch.deadline, priority, len(members), batch.layer, batch.last_issued, queue.served, batch.home, refill,
            share,
        )  # fmt: skip

    def begin(self, candidate: Candidate) -> Batch:
        """Begin the batch that a candidate stands for: move its requests from the queue into a batch in flight."""
        queue = self._queues[candidate.stream]
        late = candidate.deadline == NO_DEADLINE
        members = [
            (queue.late if late or not queue.waiting else queue.waiting).popleft() for _ in range(candidate.size)
        ]
        for ticket in members:
            self._queues.count(ticket, -1)
        batch = _form_batch(queue, members, late)
        queue.begin(batch)
        return batch


def _form_batch(queue: StreamQueue, members: list[Ticket], late: bool = False) -> Batch:
    """Return a batch that could begin.

    members: in order of deadlines, requests that can be on time before late ones. late: whether all are late.
    """
    program = queue.terms.programs + len(members) - 1
    return Batch(program, queue.queries, members, late, NO_DEADLINE if late else members[0].due)
