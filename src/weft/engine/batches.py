"""How a batch is formed: when what waits becomes one, of which requests, and what of it is offered to the policy.

A batch is ready when it is full, its first request has waited long enough, or it would otherwise be late. A policy that
refills is offered beginnings of every size at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import chain, islice

from weft.engine.policies.base import NO_DEADLINE, Candidate, LateWork, Policy, Refill, Running, ShareUse
from weft.engine.queues import Queues, StreamQueue
from weft.engine.tickets import Batch, Ticket

Abortable = Callable[[], tuple[Running, ...]]
"""What runs on a device, if one of them could be stopped to make room."""

Rooms = Callable[[], Collection[int]]
"""The lanes that take one more layer, by their numbers, where they have memory of their own."""

BATCHES = 4
"""Batches of one stream in flight at a time, at least; on an NPU one of them on time."""
LATE_BATCHES = 64
"""The same where late ones wait until nothing on time does: they shall not take the places of those that can be."""

LOOKED_AT = 4
"""So many batches of those who wait are looked at that come after one."""


def most_batches(late: LateWork) -> int:
    """Batches of a stream that may be in flight, at least."""
    return LATE_BATCHES if late is LateWork.LAST else BATCHES


class Batcher:
    """Offers the next layer of every batch in flight, and the first layer of every batch that could begin."""

    def __init__(
        self, policy: Policy, queues: Queues, remaining: Sequence[Sequence[int]], abortable: Abortable, rooms: Rooms
    ) -> None:
        """abortable: what runs, and what of it could be stopped."""
        self._setting, self._queues, self._remaining = policy.setting, queues, remaining
        self._abortable, self._rooms = abortable, rooms
        self._refills, self._waits = policy.traits.refills, policy.waits

    def ready_at(self, queue: StreamQueue) -> int:
        """When what waits becomes a batch, full or not: its time is up, or it would be late."""
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
        """What a stream has at this instant, late requests that wait not counted."""
        if self._refills:
            return self._refilling_heads(queue)
        batches = queue.batches if queue.by_query else []
        going_on = self._going_on(batches) if batches else []
        heads = [self.head(queue, batch, behind=self._behind(queue, batch, 0, now)) for batch in going_on]
        waiting, most = len(queue.waiting), queue.terms.max_batch
        ready = waiting > 0 and (waiting >= most or now >= self.ready_at(queue))
        if ready and (not batches or (len(batches) < queue.places and self._may_begin(queue, self._unissued(batches)))):
            members = list(islice(queue.waiting, most))
            batch = _formed(queue, members)
            heads.append(self.head(queue, batch, behind=self._behind(queue, batch, len(members), now)))
        return heads

    def _behind(self, queue: StreamQueue, batch: Batch, own: int, now: int) -> int:
        """When a batch must be done so that the next ones of its stream can be on time, as far as they can.

        own: so many of those who wait are its own.
        """
        latest, need, most = NO_DEADLINE, 0, queue.terms.max_batch
        if not self._setting.shares or len(queue.waiting) <= own:
            return latest
        whole = self._queues.whole(queue.stream, min(most, len(queue.waiting) - own))
        end = now + self._queues.rest(batch) + whole
        for ticket in islice(queue.waiting, own, own + LOOKED_AT * most, most):
            if end + need <= ticket.due:
                need += whole
                latest = min(latest, ticket.due - need)
        return latest

    def _going_on(self, batches: list[Batch]) -> list[Batch]:
        """Those that could be given a lane: one that stays where it began, only while that lane takes more."""
        still = [batch for batch in batches if not batch.running]
        if all([batch.home is None for batch in still]):
            return still
        rooms = self._rooms()  # once for all of them: where late ones gather there are dozens
        return [batch for batch in still if batch.home is None or batch.home in rooms]

    def _may_begin(self, queue: StreamQueue, batches: list[Batch]) -> bool:
        """Whether one more may begin: as many as there are lanes, and one that is due before all of those."""
        on_time = [batch for batch in batches if not batch.late]
        return len(on_time) < self._setting.lanes or queue.waiting[0].due < min(
            min(t.due for t in batch.members) for batch in on_time
        )

    def _unissued(self, batches: list[Batch]) -> list[Batch]:
        """Those that need a lane again, or may: where lanes take layers ahead, the next begins behind a last layer."""
        programs = self._setting.programs
        if not self._setting.ahead or all(batch.layer < len(programs[batch.program].names) for batch in batches):
            return batches
        back = {(each.candidate.program, each.candidate.query) for each in self._abortable() if each.stoppable}
        return [
            batch
            for batch in batches
            if batch.layer < len(programs[batch.program].names) or (batch.program, batch.query) in back
        ]

    def late_heads(self, queue: StreamQueue) -> list[Candidate]:
        """The batch of late requests that could begin, if there is one."""
        if not queue.late or len(queue.by_query) == queue.places:
            return []
        members = list(islice(queue.late, queue.terms.max_batch))
        return [self.head(queue, _formed(queue, members, late=True))]

    def _refilling_heads(self, queue: StreamQueue) -> list[Candidate]:
        """All batches that stand still, and beginnings of every size with which these would fit into one batch.

        Those that can still be on time begin first, then late ones.
        """
        batches, most = queue.batches, queue.terms.max_batch
        begun = sum([len(batch.members) for batch in self._unissued(batches)])
        standing = self._going_on(batches)
        room = min(most - sum([len(batch.members) for batch in standing]), most * self._setting.lanes - begun)
        first = list(islice(chain(queue.waiting, queue.late), max(0, room)))
        waiting = len(queue.waiting) + len(queue.late)
        heads = [
            self.head(queue, batch, Refill(tuple([ticket.due for ticket in batch.members]), waiting))
            for batch in standing
        ]
        return heads + self._beginnings(queue, first, waiting) if first else heads

    def _beginnings(self, queue: StreamQueue, first: list[Ticket], waiting: int) -> list[Candidate]:
        """The first of these tickets, the first two, ... as batches that could begin; *waiting*: how many there are."""
        dues = tuple([ticket.due for ticket in first])
        deadline = dues[0] if queue.waiting else NO_DEADLINE
        arrival, priority, found = NO_DEADLINE, 0, []
        for size, ticket in enumerate(first, start=1):
            arrival, priority = min(arrival, ticket.arrival), max(priority, ticket.priority)
            number = queue.terms.programs + size - 1
            found.append(
                Candidate.of_batch(
                    self._setting.programs[number],
                    self._remaining[number],
                    number,
                    stream=queue.stream,
                    query=queue.queries,
                    arrival=arrival,
                    deadline=deadline,
                    priority=priority,
                    size=size,
                    refill=Refill(dues[:size], waiting - size),
                )
            )
        return found

    def alone(self, ticket: Ticket) -> Candidate:
        """The first layer of a request by itself, whether it waits or has only come."""
        queue = self._queues[ticket.stream]
        return self.head(queue, _formed(queue, [ticket]))

    def head(
        self,
        queue: StreamQueue,
        batch: Batch,
        refill: Refill | None = None,
        behind: int = NO_DEADLINE,
    ) -> Candidate:
        """The next layer of a batch."""
        members, number = batch.members, batch.program
        arrival, priority = members[0].arrival, members[0].priority
        if len(members) > 1:
            arrival = min([ticket.arrival for ticket in members])
            priority = max([ticket.priority for ticket in members])
        share = ShareUse(queue.lately, behind) if self._setting.shares else None
        return Candidate.of_batch(
            self._setting.programs[number], self._remaining[number], number, queue.stream, batch.query, arrival,
            batch.deadline, priority, len(members), batch.layer, batch.last_issued, queue.served, batch.home, refill,
            share,
        )  # fmt: skip

    def begin(self, candidate: Candidate) -> Batch:
        """Turn the waiting requests a candidate stands for into a batch."""
        queue = self._queues[candidate.stream]
        late = candidate.deadline == NO_DEADLINE
        waiting = [
            (queue.late if late or not queue.waiting else queue.waiting).popleft() for _ in range(candidate.size)
        ]
        for ticket in waiting:
            self._queues.count(ticket, -1)
        batch = _formed(queue, waiting, late)
        queue.begin(batch)
        return batch


def _formed(queue: StreamQueue, members: list[Ticket], late: bool = False) -> Batch:
    """A batch that could begin; requests that can be on time stand first in it."""
    program = queue.terms.programs + len(members) - 1
    return Batch(program, queue.queries, members, late, NO_DEADLINE if late else members[0].due)
