"""How long requests may be computed (``max_compute_s``), and lanes whose segment takes far longer than expected."""

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
    """Looks at what runs when the first of it may have run for too long.

    withdraw: answers a request with an error. freed: called when a lane was opened in place of one that overran.
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
        """A segment of a batch is given to a lane."""
        left = work.left_ns()
        if self._lanes.ahead:  # what nobody waits for may be stopped there as well
            left = min(left, work.model.max_compute_ns)
        if (at := self._lanes.now() + left) < self._next_look:
            self._look_at(at)

    def replace_overrun(self) -> None:
        """Where something waits and no lane is free, see whether one takes too long to be waited for, now or later."""
        lanes = self._lanes
        if lanes.ahead or lanes.takes_more or not self._source.queues.stands:
            return
        overrun_at = lanes.replace_overrun()
        if lanes.takes_more:
            self._freed()
        elif overrun_at < self._next_look:
            self._look_at(overrun_at)

    def _look_at(self, at: int) -> None:
        """Look at what runs at this time, and not before; also where that ends meanwhile, which most segments do."""
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
            while began + work.left_ns() <= now:
                oldest = max(work.waiting(), key=lambda ticket: ticket.compute_ns)
                self._withdraw(oldest, _too_long(oldest.model))
            limit = began + work.left_ns()
        if task.reported and (batch is None or batch.forsaken):
            assert isinstance(task.work, BatchWork)
            limit = began + task.work.model.max_compute_ns
            if limit <= now:
                self._lanes.halt(lane, task)
        return limit if limit > now else NO_DEADLINE


def _too_long(model: ServedModel) -> Expired:
    limit_s = model.body.max_compute_ns / 1e9
    return Expired(f"{model.name}: it was computed for more than {limit_s:g} s (max_compute_s)", reason="too_long")
