"""Admission: a request is accepted if its queue has a place and its strict deadline can be met.

Work counts as ahead of a request if the policy would compute it first. Work that yields does not count: a layer that
the policy would stop for the request, and requests without a strict deadline that would give way because they cost more
for their worth. Work is checked for yielding only where the request would be refused otherwise.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Literal, NamedTuple

from weft.devices.decoupled import DeviceClocks
from weft.engine.batches import Abortable, Batcher
from weft.engine.lane_plan import next_gate
from weft.engine.policies.base import NO_DEADLINE, Candidate, Policy, Running, View
from weft.engine.queues import Queues, StreamQueue
from weft.engine.tickets import Batch, Ticket, due

Rests = Callable[[], Sequence[tuple[Candidate, int]]]
"""Returns the layers that an executor has started and not ended, each with its expected ticks from now on."""


class Refusal(NamedTuple):
    """Why a request is refused."""

    reason: Literal["all_full", "line_full", "unmeetable"]
    ahead: int = 0
    """Ticks until a lane would be free for the request."""
    own: int = 0
    """Expected ticks of the request itself."""


class Admission:
    """Refuses a request at its arrival if its queue is full, or if it would expire before it is computed."""

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
        """batcher: makes candidates of requests.

        rests: returns the layers that the executor has started, with their expected ticks. abortable: returns the
        running layers if one of them could be stopped, else nothing. late_gives_way: whether requests that can no
        longer be on time run after all others.
        """
        self._queues, self._batcher, self._policy = queues, batcher, policy
        self._rests, self._abortable, self._lanes = rests, abortable, policy.setting.lanes
        self._by_deadline = policy.traits.for_deadlines
        self._late_gives_way = policy.traits.defers_late or late_gives_way

    def refusal(self, ticket: Ticket, now: int) -> Refusal | None:
        """Return why a request is refused; None if it is accepted."""
        line, own_line = self._queues.line, ticket.line
        if line.full:
            return Refusal("all_full")
        if own_line and own_line.full:
            return Refusal("line_full", self.free_in(NO_DEADLINE, now))
        if not ticket.strict:
            return None
        own_ticks = ticket.load_ticks + (0 if ticket.guessed else self._queues.whole(ticket.stream))
        ahead = self.free_in(ticket.due, now)
        if now + ahead + own_ticks > ticket.due:
            ahead = self.free_in(ticket.due, now, _Newcomer(self._policy, self._batcher.lone_candidate(ticket), now))
        return Refusal("unmeetable", ahead, own_ticks) if now + ahead + own_ticks > ticket.due else None

    def free_in(self, deadline: int, now: int, newcomer: _Newcomer | None = None) -> int:
        """Return the ticks until a lane would be free for a request with this deadline, after all work ahead of it.

        newcomer: the request, if work that yields to it must not count; None: all work counts.
        """
        latest = deadline if self._by_deadline else NO_DEADLINE
        earliest = now if self._late_gives_way else 0
        ahead = 0
        # The ticks that lanes still compute for each batch; a lane may hold several segments of a batch.
        begun: defaultdict[tuple[int, int], int] = defaultdict(int)
        revocable: dict[tuple[int, int], int] = {}
        for candidate, rest in self._rests():
            begun[candidate.stream, candidate.query] += rest
            program = self._policy.setting.programs[candidate.program]
            if program.gated and rest and self._policy.traits.by_events:
                # What can be revoked is ahead of the request only if the policy would compute it first.
                done = candidate.compute - rest
                gate = next_gate(program, candidate.layer, program.span(candidate.layer), done or None)
                revocable[candidate.stream, candidate.query] = min(rest, gate.after)
                begun[candidate.stream, candidate.query] -= revocable[candidate.stream, candidate.query]
        if newcomer and len(begun) >= self._lanes and (victim := self._find_victim(newcomer)):
            begun[victim.stream, victim.query] = 0
        for queue in self._queues.busy():
            if queue.waiting:
                first = bisect_left(queue.waiting, earliest, key=due)
                count = bisect_right(queue.waiting, latest, key=due) - first
                count -= self._count_yielding(queue, first, count, newcomer) if newcomer else 0
                ahead += self._queues.whole(queue.stream, max(0, count))
            for batch in queue.batches:
                dues = [ticket.due for ticket in batch.members]
                if min(dues) <= latest and max(dues) >= earliest and not self._yields(queue, batch, newcomer):
                    key = queue.stream, batch.query
                    begun[key] += self._queues.rest(batch) + revocable.get(key, 0)
        return _free_time(ahead, begun.values(), self._lanes)

    def _find_victim(self, newcomer: _Newcomer) -> Candidate | None:
        """Return the running layer that would be stopped for a request; None if its batch has strict requests."""
        victim = newcomer.stops(self._abortable())
        batch = self._queues.batch_of(victim) if victim else None
        return None if batch and any(ticket.strict for ticket in batch.members) else victim

    def _count_yielding(self, queue: StreamQueue, first: int, count: int, newcomer: _Newcomer) -> int:
        """Return how many of the *count* waiting requests from place *first* on give way to the newcomer."""
        waiting = islice(queue.waiting, first, first + max(0, count))
        return sum(not ticket.strict and newcomer.outweighs(self._batcher.lone_candidate(ticket)) for ticket in waiting)

    def _yields(self, queue: StreamQueue, batch: Batch, newcomer: _Newcomer | None) -> bool:
        """Return whether the layers of a batch that were not issued give way to the newcomer."""
        if newcomer is None or any(ticket.strict for ticket in batch.members) or not self._queues.rest(batch):
            return False
        return newcomer.outweighs(self._batcher.head(queue, batch))


class _Newcomer:
    """A request that would be refused, compared by the policy with running and waiting work."""

    def __init__(self, policy: Policy, candidate: Candidate, now: int) -> None:
        self._policy, self._candidate, self._now = policy, candidate, now
        self._burden = policy.burden(candidate, now)

    def stops(self, running: tuple[Running, ...]) -> Candidate | None:
        """Return the running layer that the policy would stop for this request, or None."""
        if not running:
            return None
        # The policy sees this request as the only waiting work, and as work that may be issued.
        view = View(device=DeviceClocks.at(self._now), heads=(self._candidate,), candidates=(self._candidate,))
        return self._policy.aborts(view, running)

    def outweighs(self, other: Candidate) -> bool:
        """Return whether *other* gives way to this request if not both can be on time."""
        if self._burden is None:
            return False
        burden = self._policy.burden(other, self._now)
        return burden is not None and burden > self._burden


def _free_time(waiting: int, begun: Iterable[int], count: int) -> int:
    """Return the ticks until the first of *count* lanes is free.

    begun: the ticks of each batch that has begun; a batch keeps one lane, and the longest batch is placed first.
    waiting: the ticks of all waiting work, which is divided freely so that the least loaded lanes fill up evenly.
    """
    lanes = [0] * count
    for rest in sorted(begun, reverse=True):
        lanes[lanes.index(min(lanes))] += rest
    lanes.sort()
    for filled in range(1, count):
        level = (waiting + sum(lanes[:filled])) // filled
        if level <= lanes[filled]:
            return level
    return (waiting + sum(lanes)) // count
