"""Whether a request is taken: there must be a place for it, and its strict deadline must be possible to meet."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from weft.engine.queues import Queues
from weft.engine.tickets import Ticket, due
from weft.policies.base import NO_DEADLINE, Candidate, Policy

Rests = Callable[[], Sequence[tuple[Candidate, int]]]
"""What runs on a device, and how many ticks each is expected to run on."""


class Refusal(NamedTuple):
    """Why a request is not taken."""

    reason: Literal["all_full", "line_full", "unmeetable"]
    ahead: int = 0
    """Ticks of work that stand before it."""
    own: int = 0
    """Ticks it takes itself."""


class Admission:
    """Refuses a request at its arrival if there is no place for it, or if it would expire before it is computed."""

    def __init__(self, queues: Queues, policy: Policy, rests: Rests, *, late_gives_way: bool) -> None:
        """late_gives_way: whether requests that can no longer be on time let the others go first."""
        self._queues, self._rests, self._lanes = queues, rests, policy.setting.lanes
        self._by_deadline = policy.traits.for_deadlines
        self._late_gives_way = policy.traits.defers_late or late_gives_way

    def refusal(self, ticket: Ticket, now: int) -> Refusal | None:
        """Why a request is not taken; None if it is."""
        if self._queues.line.full:
            return Refusal("all_full")
        if ticket.line and ticket.line.full:
            return Refusal("line_full", self.free_in(NO_DEADLINE, now))
        if not ticket.strict:
            return None
        own = 0 if ticket.guessed else self._queues.whole(ticket.stream)
        ahead = self.free_in(ticket.due, now)
        return Refusal("unmeetable", ahead, own) if now + ahead + own > ticket.due else None

    def free_in(self, deadline: int, now: int) -> int:
        """When a lane would be free for a request with this deadline, by what the policy puts before it."""
        latest = deadline if self._by_deadline else NO_DEADLINE
        earliest = now if self._late_gives_way else 0
        ahead = 0
        begun = {(candidate.stream, candidate.query): rest for candidate, rest in self._rests()}
        for queue in self._queues.busy():
            stream, waiting = queue.stream, queue.waiting
            if waiting:
                count = bisect_right(waiting, latest, key=due) - bisect_left(waiting, earliest, key=due)
                ahead += self._queues.whole(stream, max(0, count))
            for batch in queue.batches:
                dues = [ticket.due for ticket in batch.members]
                if min(dues) <= latest and max(dues) >= earliest:
                    begun[stream, batch.query] = begun.get((stream, batch.query), 0) + self._queues.rest(batch)
        return _poured(ahead, begun.values(), self._lanes)


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
