"""Whether a request is taken: there must be a place for it, and its strict deadline must be possible to meet.

What stands before a request is what its policy would compute first. Work that yields to it does not count: a layer that
the policy would stop for it, and requests without a strict deadline that would give way, because they take more for
what they are worth. That is looked at only where a request would be refused otherwise.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Literal, NamedTuple

from weft.devices.decoupled import DeviceClocks
from weft.engine.batches import Abortable, Batcher
from weft.engine.policies.base import NO_DEADLINE, Candidate, Policy, Running, View
from weft.engine.queues import Queues, StreamQueue
from weft.engine.tickets import Batch, Ticket, due

Rests = Callable[[], Sequence[tuple[Candidate, int]]]
"""What a device was given, and how many ticks each is expected to take from now on."""


class Refusal(NamedTuple):
    """Why a request is not taken."""

    reason: Literal["all_full", "line_full", "unmeetable"]
    ahead: int = 0
    """Ticks of work that stand before it."""
    own: int = 0
    """Ticks it takes itself."""


class Admission:
    """Refuses a request at its arrival if there is no place for it, or if it would expire before it is computed."""

    def __init__(
        self,
        queues: Queues,
        batcher: Batcher,
        policy: Policy,
        rests: Rests,
        abortable: Abortable,
        *,
        late_gives_way: bool,
    ) -> None:
        """late_gives_way: whether requests that can no longer be on time let the others go first."""
        self._queues, self._batcher, self._policy = queues, batcher, policy
        self._rests, self._abortable, self._lanes = rests, abortable, policy.setting.lanes
        self._by_deadline = policy.traits.for_deadlines
        self._late_gives_way = policy.traits.defers_late or late_gives_way

    def refusal(self, ticket: Ticket, now: int) -> Refusal | None:
        """Why a request is not taken; None if it is."""
        line, own_line = self._queues.line, ticket.line
        if line.waiting >= line.places:
            return Refusal("all_full")
        if own_line and own_line.waiting >= own_line.places:
            return Refusal("line_full", self.free_in(NO_DEADLINE, now))
        if not ticket.strict:
            return None
        own = ticket.more + (0 if ticket.guessed else self._queues.whole(ticket.stream))
        ahead = self.free_in(ticket.due, now)
        if now + ahead + own > ticket.due:
            ahead = self.free_in(ticket.due, now, _Newcomer(self._policy, self._batcher.alone(ticket), now))
        return Refusal("unmeetable", ahead, own) if now + ahead + own > ticket.due else None

    def free_in(self, deadline: int, now: int, newcomer: _Newcomer | None = None) -> int:
        """When a lane would be free for a request with this deadline, by what the policy puts before it.

        newcomer: the request, where what yields to it does not count.
        """
        latest = deadline if self._by_deadline else NO_DEADLINE
        earliest = now if self._late_gives_way else 0
        ahead, begun = 0, _by_batch(self._rests())
        if newcomer and len(begun) >= self._lanes and (victim := self._stopped(newcomer)):
            begun[victim.stream, victim.query] = 0
        for queue in self._queues.busy():
            if queue.waiting:
                first = bisect_left(queue.waiting, earliest, key=due)
                count = bisect_right(queue.waiting, latest, key=due) - first
                count -= self._yielding(queue, first, count, newcomer) if newcomer else 0
                ahead += self._queues.whole(queue.stream, max(0, count))
            for batch in queue.batches:
                dues = [ticket.due for ticket in batch.members]
                if min(dues) <= latest and max(dues) >= earliest and not self._yields(queue, batch, newcomer):
                    key = queue.stream, batch.query
                    begun[key] = begun.get(key, 0) + self._queues.rest(batch)
        return _poured(ahead, begun.values(), self._lanes)

    def _stopped(self, newcomer: _Newcomer) -> Candidate | None:
        """What runs and would be stopped for a request; nothing that others would lose their answers by."""
        victim = newcomer.stops(self._abortable())
        batch = self._queues.batch_of(victim) if victim else None
        return None if batch and any(ticket.strict for ticket in batch.members) else victim

    def _yielding(self, queue: StreamQueue, first: int, count: int, newcomer: _Newcomer) -> int:
        """How many of these requests that wait give way."""
        waiting = islice(queue.waiting, first, first + max(0, count))
        return sum(not ticket.strict and newcomer.outweighs(self._batcher.alone(ticket)) for ticket in waiting)

    def _yields(self, queue: StreamQueue, batch: Batch, newcomer: _Newcomer | None) -> bool:
        """Whether what was not issued of a batch gives way."""
        if newcomer is None or any(ticket.strict for ticket in batch.members) or not self._queues.rest(batch):
            return False
        return newcomer.outweighs(self._batcher.head(queue, batch))


class _Newcomer:
    """A request that would be refused, as its policy sees it beside what is there."""

    def __init__(self, policy: Policy, candidate: Candidate, now: int) -> None:
        self._policy, self._candidate, self._now = policy, candidate, now
        self._burden = policy.burden(candidate, now)

    def stops(self, running: tuple[Running, ...]) -> Candidate | None:
        """What runs and would be stopped for it."""
        if not running:
            return None
        view = View(DeviceClocks.at(self._now), (self._candidate,), (self._candidate,))
        return self._policy.aborts(view, running)

    def outweighs(self, other: Candidate) -> bool:
        """Whether the other gives way where not both can be on time."""
        if self._burden is None:
            return False
        burden = self._policy.burden(other, self._now)
        return burden is not None and burden > self._burden


def _by_batch(rests: Iterable[tuple[Candidate, int]]) -> dict[tuple[int, int], int]:
    """Ticks that lanes still compute for each batch; a lane may hold several segments of one."""
    begun: dict[tuple[int, int], int] = {}
    for candidate, rest in rests:
        key = candidate.stream, candidate.query
        begun[key] = begun.get(key, 0) + rest
    return begun


def _poured(waiting: int, begun: Iterable[int], count: int) -> int:
    """When the first of *count* lanes is free, each batch that has begun on one lane, the rest poured over all."""
    lanes = [0] * count
    for rest in sorted(begun, reverse=True):
        lanes[lanes.index(min(lanes))] += rest
    lanes.sort()
    for filled in range(1, count):
        level = (waiting + sum(lanes[:filled])) // filled
        if level <= lanes[filled]:
            return level
    return (waiting + sum(lanes)) // count
