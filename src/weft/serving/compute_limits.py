"""Timeouts of computation: requests beyond ``max_compute_s``, and lanes whose segment overruns its expected time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from weft.base.errors import Expired, RequestError
from weft.engine.policies.base import NO_DEADLINE
from weft.engine.requests import Requests
from weft.runtime.lanes import Lane, LaneExecutor, LaneTask
from weft.serving.streams import ServedModel
from weft.serving.tickets import BatchWork, ClientTicket


class ComputeLimits:
    """Checks running segments when the first of them may have exceeded its limit; one timer serves all of them.

    withdraw: answers a request with an error. freed: called after a lane that overran was replaced by a new one.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        lanes: LaneExecutor,
        source: Requests,
        withdraw: Callable[[ClientTicket, RequestError], None],
        freed: Callable[[], None],
    ) -> None:
        self._loop, self._lanes, self._source = loop, lanes, source
        self._withdraw, self._freed = withdraw, freed
        self._timer: asyncio.TimerHandle | None = None
        self._next_look = NO_DEADLINE

    def started(self, work: BatchWork) -> None:
        """Set the timer for a segment of a batch that was given to a lane."""
        left = work.compute_left_ns()
        if self._lanes.ahead:  # there a segment may be stopped that no request needs any more
            left = min(left, work.model.max_compute_ns)
        if (at := self._lanes.now() + left) < self._next_look:
            self._look_at(at)

    def replace_overrun(self) -> None:
        """Replace a lane that overran if requests wait and no lane is free; otherwise check again when one may have."""
        lanes = self._lanes
        if lanes.ahead or lanes.takes_more or not self._source.queues.stands:
            return
        overrun_at = lanes.replace_overrun()
        if lanes.takes_more:
            self._freed()
        elif overrun_at < self._next_look:
            self._look_at(overrun_at)

    def _look_at(self, at: int) -> None:
        """Set the timer. It is not cancelled when its segment ends, as most do: the next check finds nothing then."""
        if self._timer:
            self._timer.cancel()
        self._timer, self._next_look = None, at
        if at < NO_DEADLINE:
            delay_s = max(0, at - self._lanes.now()) / 1e9
            self._timer = self._loop.call_later(delay_s, self._look)

    def _look(self) -> None:
        """Answer requests that exceeded ``max_compute_s``, and stop batches that no request waits for any more."""
        now, limit = self._lanes.now(), NO_DEADLINE
        for lane in self._lanes.lanes:
            for task in lane.tasks:
                limit = min(limit, self._look_into(lane, task, now))
        self._look_at(limit)
        self.replace_overrun()

    def _look_into(self, lane: Lane, task: LaneTask, now: int) -> int:
        """Check one segment on a lane; returns when to check it again, NO_DEADLINE where that is not needed.

        A segment that its batch has already gone on from is stopped if it exceeds the limit and no batch needs it.
        """
        (stream, query), began = task.batch, now if task.began is None else task.began
        batch = self._source.queues[stream].by_query.get(query)
        work, limit = batch.work if batch else None, NO_DEADLINE
        if isinstance(work, BatchWork):
            while began + work.compute_left_ns() <= now:
                oldest = max(work.waiting(), key=lambda ticket: ticket.compute_ns)
                self._withdraw(oldest, _too_long(oldest.model))
            limit = began + work.compute_left_ns()
        if task.reported and (batch is None or batch.forsaken):
            assert isinstance(task.work, BatchWork)
            limit = began + task.work.model.max_compute_ns
            if limit <= now:
                self._lanes.halt(lane, task)
        return limit if limit > now else NO_DEADLINE


def _too_long(model: ServedModel) -> Expired:
    limit_s = model.body.max_compute_ns / 1e9
    return Expired(f"{model.name}: it was computed for more than {limit_s:g} s (max_compute_s)", reason="too_long")
