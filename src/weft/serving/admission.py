"""Whether a request is taken: there must be a place for it, and its strict deadline must be possible to meet."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from weft.engine.requests import Requests, Ticket
from weft.errors import Expired, Overloaded
from weft.policies import Policy
from weft.policies.base import NO_DEADLINE
from weft.runtime.lanes import Lanes
from weft.serving.streams import Served, Stream, Streams
from weft.serving.tickets import Ask


class Admission:
    """Refuses at once what would be refused later."""

    def __init__(self, source: Requests, streams: Streams, lanes: Lanes, policy: Policy, most_waiting: int) -> None:
        self._source, self._streams, self._lanes, self._policy = source, streams, lanes, policy
        self._most_waiting = most_waiting

    def check(self, model: Served, stream: Stream, ask: Ask, now: int, waiting: int) -> None:
        """Raise why a request is not taken; *waiting*: requests that no lane has begun."""
        if waiting >= self._most_waiting:
            raise Overloaded(f"{waiting} requests are waiting, which is the limit; send it again later")
        if waiting >= model.queue_size and self.queued(model) >= model.queue_size:
            raise Overloaded(
                f"{model.name}: exceeds its maximum queue size of {model.queue_size}; send it again later",
                retry_after_s=self.free_in(NO_DEADLINE, now) / 1e9,
            )
        if ask.strict:
            self._check_deadline(model, stream, ask, now)

    def queued(self, model: Served) -> int:
        """Requests for a model that no lane has begun."""
        return model.waiting

    def _check_deadline(self, model: Served, stream: Stream, ask: Ask, now: int) -> None:
        own = self._streams.whole_ns(stream) if stream.measured else 0
        ahead = self.free_in(ask.due, now)
        if now + ahead + own > ask.due:
            self._streams.doubt(stream)
            raise Expired(
                f"{model.name}: its deadline cannot be met: {ahead / 1e6:.1f} ms of work stand before it, "
                f"and it takes {own / 1e6:.1f} ms",
                reason="unmeetable",
            )

    def free_in(self, due: int, now: int) -> int:
        """When a lane would be free for a request with this deadline, by what the policy puts before it."""
        latest = due if self._policy.for_deadlines else NO_DEADLINE
        earliest = now if self._policy.defers_late or self._source.late_gives_way else 0
        waiting = 0
        begun = {(candidate.stream, candidate.query): rest for candidate, rest in self._lanes.rests()}
        for index in self._source.busy():
            queue = self._source.waiting(index)
            if queue:
                count = bisect_right(queue, latest, key=_due) - bisect_left(queue, earliest, key=_due)
                waiting += self._streams.whole_ns(self._streams[index], max(0, count))
            for job in self._source.jobs(index):
                program, dues = self._streams.programs[job.program], [ticket.due for ticket in job.members]
                if min(dues) <= latest and max(dues) >= earliest and job.layer < len(program):
                    begun[index, job.query] = begun.get((index, job.query), 0) + program.remaining[job.layer]
        return _poured(waiting, begun.values(), len(self._lanes.lanes))


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
