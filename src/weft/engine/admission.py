"""Whether a request is taken: there must be a place for it, and its strict deadline must be possible to meet."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from weft.policies.base import NO_DEADLINE, Candidate, Policy

if TYPE_CHECKING:
    from weft.engine.requests import Requests, Ticket

Rests = Callable[[], Sequence[tuple[Candidate, int]]]
"""What runs on a device, and how many ticks each is expected to run on."""


@dataclass(eq=False, slots=True)
class WaitingLine:
    """Requests that wait for their turn, and how many may."""

    places: int = NO_DEADLINE
    waiting: int = 0

    @property
    def full(self) -> bool:
        return self.waiting >= self.places


class Refusal(NamedTuple):
    """Why a request is not taken."""

    reason: Literal["all_full", "line_full", "unmeetable"]
    ahead: int = 0
    """Ticks of work that stand before it."""
    own: int = 0
    """Ticks it takes itself."""


class Admission:
    """Refuses at once what would be refused later."""

    def __init__(self, source: Requests, policy: Policy, rests: Rests) -> None:
        self._source, self._policy, self._rests = source, policy, rests

    def refusal(self, ticket: Ticket, now: int) -> Refusal | None:
        """Why a request is not taken; None if it is."""
        if self._source.line.full:
            return Refusal("all_full")
        if ticket.line and ticket.line.full:
            return Refusal("line_full", self.free_in(NO_DEADLINE, now))
        if not ticket.strict:
            return None
        own = 0 if ticket.guessed else self._source.whole(ticket.stream)
        ahead = self.free_in(ticket.due, now)
        return Refusal("unmeetable", ahead, own) if now + ahead + own > ticket.due else None

    def free_in(self, due: int, now: int) -> int:
        """When a lane would be free for a request with this deadline, by what the policy puts before it."""
        source = self._source
        latest = due if self._policy.traits.for_deadlines else NO_DEADLINE
        earliest = now if self._policy.traits.defers_late or source.late_gives_way else 0
        waiting = 0
        begun = {(candidate.stream, candidate.query): rest for candidate, rest in self._rests()}
        for index in source.busy():
            queue = source.waiting(index)
            if queue:
                count = bisect_right(queue, latest, key=_due) - bisect_left(queue, earliest, key=_due)
                waiting += source.whole(index, max(0, count))
            for job in source.jobs(index):
                dues = [ticket.due for ticket in job.members]
                if min(dues) <= latest and max(dues) >= earliest:
                    begun[index, job.query] = begun.get((index, job.query), 0) + source.rest(job)
        return _poured(waiting, begun.values(), self._policy.setting.lanes)


def _due(ticket: Ticket) -> int:
    return ticket.due


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
