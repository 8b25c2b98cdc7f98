"""The engine with real clients: requests become tickets, tickets batches, batches segments on lanes.

Everything here runs on the event loop's thread, so there are no locks; only lanes are threads. The ``Dispatcher`` takes
a step of the engine whenever a request arrives, a segment ends or a timer fires. ``client_feed`` answers requests,
``segment_observer`` learns from segments, ``ComputeLimits`` enforces the timeouts of computation: requests beyond
``max_compute_s``, and lanes whose segment overruns its expected time. Lanes of a GPU run ahead: they get further
segments before the running one has ended. The engine, the source of work (the queues) and the policies are those of the
simulator (``engine``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from threading import get_ident

from weft.base.errors import Cancelled, Expired, Failed, InputError, Overloaded, RequestError, first_line
from weft.devices.costs.program import Program
from weft.engine.admission import Refusal
from weft.engine.engine import Completion
from weft.engine.for_requests import request_engine
from weft.engine.policies import Candidate, Option, Setting, make_request_policy, policy_called
from weft.engine.policies.base import NO_BUFFER, NO_DEADLINE, UNBOUNDED_ROUNDS
from weft.engine.requests import Requests
from weft.engine.tickets import Batch, WaitingLine
from weft.runtime.backend import Backend
from weft.runtime.lanes import Lane, LaneExecutor, LaneTask
from weft.serving.client_feed import ClientFeed
from weft.serving.gpu_sharing import sharing_for
from weft.serving.segment_observer import Recorder, SegmentObserver
from weft.serving.streams import ServedModel, ServedStreams
from weft.serving.tickets import BatchWork, ClientTicket, MixedWork

log = logging.getLogger("weft.engine")

QUEUE_FULL = "exceeds its maximum queue size"
"""Part of an error message, by which ``planning`` recognizes this error."""
TURN_NS = 2_000_000
"""How long a turn of the engine may hold the event loop; longer would delay the network, shorter costs throughput."""


class Dispatcher:
    """Admits requests, runs them on lanes as the policy decides, and answers them."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        policy: str,
        options: Mapping[str, Option] | None = None,
        *,
        backend: Backend,
        late: str = "weave",
        lanes: int = 1,
        pin: bool = False,
        most_waiting: int = 4096,
    ) -> None:
        """Start the lanes on *backend*; InputError for an unknown policy or option.

        late: the rule for soft requests that are late (``weave``, ``keep`` or ``demote``). pin: keep every lane on a
        core of its own. most_waiting: limit on the requests that wait, over all models.
        """
        self._loop, self._thread = loop, get_ident()
        programs: list[Program] = []
        remaining: list[tuple[int, ...]] = []
        self.sharing = sharing_for(policy, backend.device)
        shares = self.sharing.shares if self.sharing else None
        setting = Setting(programs, NO_BUFFER, UNBOUNDED_ROUNDS, lanes=lanes, shares=shares)
        make_request_policy(policy, setting, options)  # checks the options before lanes are started
        count = len(shares.lanes) if shares else lanes
        self.lanes = LaneExecutor(backend, count, self._work_of, self._wake, pin=pin, shares=shares is not None)
        # what policies must know of the lanes, once these exist
        self._setting = replace(setting, ahead=self.lanes.ahead, apart=self.lanes.apart)
        self.policy = make_request_policy(policy, self._setting, options)
        self._policy_choice = policy, options, late  # to make the policy again when the lanes change
        self.feed = ClientFeed(self.lanes.now, self._retry)
        self._engine, self._source = request_engine(
            self.policy, self.feed, self.lanes, remaining, late=late, places=most_waiting
        )
        self.streams = self.feed.streams = ServedStreams(self._source, programs, remaining, self.sharing)
        self.recorder = Recorder(self.lane_name)
        self.observer = SegmentObserver(self.policy, self.lanes, self.streams, self.recorder, self.sharing)
        # called for every segment that has ended
        self.lanes.watch = self._release_segment if self.lanes.ahead else self.observer.ended
        self._limits = ComputeLimits(loop, self.lanes, self._source, self.withdraw, self._pump_soon)
        self._pumping = False
        self._batch_timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Requests that no lane has begun."""
        return self._source.queues.line.waiting

    @property
    def pending(self) -> int:
        """Requests that are not answered, including those whose answers are sent in the next turn."""
        return len(self.feed.unanswered) + len(self.feed.outbox)

    def wait_ns(self) -> int:
        """Return the expected time until a lane is free for a new request that is on time."""
        return self._source.admission.free_in(NO_DEADLINE, self.lanes.now())

    def lane_name(self, lane: int) -> str:
        """Return the name of a lane for display: its number, and its share if lanes are shares of a device."""
        return f"lane {lane}" if self.sharing is None else f"lane {lane}: {self.sharing.name(lane)} SMs"

    def exit_threshold(self, model: ServedModel) -> float:
        """Return the current threshold for early exits of a model, for requests that state none."""
        assert model.exit_rules is not None
        if not model.leases:  # without requests nothing else raises a threshold that was lowered under load
            model.exit_rules.steered.relax(self.lanes.now())
        return model.exit_rules.threshold

    # Policies, lanes and models

    def follow(self, policy: str, options: Mapping[str, Option] | None, late: str, lanes: int) -> None:
        """Change policy, rule for late requests and number of lanes, keeping all waiting and running requests."""
        if policy_called(policy).traits.shares != (self.sharing is not None):
            raise InputError(f"policy = {policy}: whether models share a GPU is settled at the start; restart for it")
        shares = self.sharing.shares if self.sharing else None
        setting = replace(self._setting, lanes=lanes, shares=shares)
        self.policy = self.observer.policy = make_request_policy(policy, setting, options)
        self._setting, self._policy_choice = setting, (policy, options, late)
        self.lanes.resize(len(shares.lanes) if shares else lanes)
        self._engine.follow(self.policy)
        self._source.follow(self.policy, late)
        self._pump_soon()

    def prepare_for(self, body: ServedModel) -> None:
        """Prepare for requests for a newly loaded body: change the lanes if they are shares of a GPU.

        The first body on a GPU reports how the GPU can be divided; then policy and lanes are made again, one per share.
        """
        shares = body.loaded.shares
        if self.sharing and shares and self.sharing.recut(shares.cuts):
            self.follow(*self._policy_choice, self._setting.lanes)

    def forget(self, body: ServedModel) -> None:
        """Close the streams of a body that no request or batch needs any more."""
        self.streams.forget(body)

    def close(self, patience_s: float | None = None) -> None:
        """End the lanes, after their running segments or *patience_s*, whichever is first."""
        if not self.lanes.close(patience_s):
            log.warning("a segment could not be stopped: it is in the middle of a single operator")

    # Requests in

    def submit(self, ticket: ClientTicket) -> None:
        """Admit a request or raise a RequestError; if admitted, ``ticket.reply`` is called once, on this thread."""
        now, model = self.lanes.now(), ticket.model
        breaker, retries = model.loaded.breaker, self.feed.retries
        if retries.quarantined:
            retries.check_quarantine(ticket)
        if breaker:
            breaker.check()
        stream = self.streams.stream_for(model, ticket.inputs)
        self._pump_soon()
        deadlines = self._source.deadlines
        # segments that have ended, and requests whose deadline has passed, must not count as work ahead of this one
        if self.lanes.ended or (deadlines.heap and deadlines.any_passed(now)):
            self._account()
        ticket.enter(stream, now)
        ticket.load_ticks = round(model.residency.away_s * 1e9)  # to bring the model back to its device
        refusal = self._source.admit(ticket, now)
        if refusal:
            if refusal.reason == "unmeetable":
                self.streams.relax_estimates(stream)
            raise refusal_error(model, refusal, self._source.queues.line)
        if breaker:
            breaker.enter()
        self.feed.admitted(ticket)

    def _account(self) -> None:
        """Let the engine process ended segments, so that admission does not count finished work.

        Answers that become ready are sent in the next turn.
        """
        self.feed.stepping = True
        try:
            self._engine.account()
        except Exception as error:
            raise self._fail_all(error) from error
        finally:
            self.feed.stepping = False

    def withdraw(self, ticket: ClientTicket, error: RequestError | None = None) -> None:
        """Drop a request: its client disconnected, or *error* says why it cannot be answered."""
        if ticket.gone:
            return
        batch = self._source.queues.withdraw(ticket)
        self.feed.settle(ticket, error or Cancelled("the client went away"))
        if batch and batch.running and batch.all_gone:
            self.lanes.stop(ticket.stream, batch.query)
        self._pump_soon()

    def give_up(self, error: RequestError) -> None:
        """Answer all pending requests with an error, and stop their segments."""
        for ticket in list(self.feed.unanswered):
            self.withdraw(ticket, error)

    def _retry(self, ticket: ClientTicket, delay_s: float) -> None:
        """Retry a request from its inputs on, in a batch of its own.

        Safe, because its batch ended without an answer and inference has no side effects.
        """
        if delay_s:
            self._loop.call_later(delay_s, self._retry, ticket, 0.0)
        elif not ticket.gone:
            ticket.stream, ticket.began = self.streams.stream_for(ticket.model, ticket.inputs, alone=True).index, 0
            ticket.compute_ns, ticket.progress = 0, None
            self._source.put(ticket)
            self._pump_soon()

    # Turns of the event loop

    def _wake(self) -> None:
        """Schedule a turn after a segment ended; called on the lane's thread or on this one."""
        if get_ident() == self._thread:
            self._pump_soon()
        else:
            self._loop.call_soon_threadsafe(self._pump)

    def _pump_soon(self) -> None:
        """Run the engine at the end of this turn of the loop, so that requests of one turn are batched together."""
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Run the engine until it has nothing to start, or for TURN_NS; then set the timers."""
        self._pumping = False
        end = self.lanes.now() + TURN_NS
        try:
            while self._step():
                if self.lanes.now() > end:  # many short segments ran on this thread; let the loop serve the network
                    self._pump_soon()
                    break
        except Exception as error:  # a policy's fault
            self._fail_all(error)
        self._set_batch_timer()
        if self.lanes.under_way:
            self._limits.replace_overrun()

    def _step(self) -> bool:
        """Take a step of the engine, and send the answers after it: the lane has new work by then.

        Returns whether another step may start more work at once.
        """
        feed = self.feed
        feed.stepping = True
        try:
            return self._engine.step()
        finally:
            feed.stepping = False
            if feed.outbox:
                feed.post()

    def _fail_all(self, error: Exception) -> Failed:
        """Answer all requests with an error after the engine or the policy raised."""
        log.exception("the engine stopped")
        failed = Failed(f"the scheduler failed: {type(error).__name__}: {first_line(error)}")
        self.give_up(failed)
        return failed

    def _set_batch_timer(self) -> None:
        """Set the timer for the next batch timeout or the next strict deadline."""
        if self._batch_timer:
            self._batch_timer.cancel()
            self._batch_timer = None
        event = self._engine.next_event()
        if event < NO_DEADLINE:
            delay_s = max(0, event - self.lanes.now()) / 1e9
            self._batch_timer = self._loop.call_later(delay_s, self._pump)

    # Batches on lanes

    def _work_of(self, candidate: Candidate, batch: object) -> tuple[BatchWork, bool]:
        """Return the work of the batch whose next segment starts, and whether the segment runs on this thread (inline).

        The executor of the lanes calls this for every segment.
        """
        assert isinstance(batch, Batch)
        work = batch.work
        if not isinstance(work, BatchWork):
            work = batch.work = self._begin_batch(candidate, batch)
        inline = self.lanes.runs_here(candidate, work)
        if not inline:
            self._limits.started(work)
        elif self.feed.outbox:  # an inline segment would delay the answers
            self.feed.post()
        if self.lanes.ahead:  # keep stream and body until the segment has ended, which may be after its batch has
            work.stream.segments_on_lanes += 1
            work.model.leases += 1
        return work, inline

    def _begin_batch(self, candidate: Candidate, batch: Batch) -> BatchWork:
        """Create the work of a batch whose first segment starts, and take a lease on its body."""
        tickets = [ticket for ticket in batch.members if isinstance(ticket, ClientTicket)]
        now = self.lanes.now()
        for ticket in tickets:
            ticket.began, ticket.batch_size = now, len(tickets)
        stream = self.streams[candidate.stream]
        stream.model.leases += 1
        return (MixedWork if tickets[0].model.task else BatchWork)(stream, batch, tickets)

    def _release_segment(self, lane: int, completion: Completion) -> None:
        """Release the stream and the body that were kept for a segment on a lane that runs ahead."""
        assert isinstance(completion.work, BatchWork)
        stream = completion.work.stream
        try:
            self.observer.ended(lane, completion)
        finally:
            stream.segments_on_lanes -= 1
            self.feed.release(stream.model)


def refusal_error(model: ServedModel, refusal: Refusal, all_requests: WaitingLine) -> RequestError:
    """Convert a refusal of admission control to the client's error; *all_requests*: the queue over all models.

    Requests are refused for other reasons in ``library`` (memory, loading), ``inference`` (shutdown) and
    ``client_feed`` (a passed deadline). ``metrics`` lists the names of all reasons (``DROPS``, ``REFUSALS``).
    """
    match refusal.reason:
        case "all_full":
            return Overloaded(f"{all_requests.waiting} requests are waiting, which is the limit; send it again later")
        case "line_full":
            return Overloaded(
                f"{model.name}: {QUEUE_FULL} of {model.line.places}; send it again later",
                retry_after_s=refusal.ahead / 1e9,
            )
        case "unmeetable":
            return Expired(
                f"{model.name}: its deadline cannot be met: {refusal.ahead / 1e6:.1f} ms of work stand before it, "
                f"and it takes {refusal.own / 1e6:.1f} ms",
                reason="unmeetable",
            )


class ComputeLimits:
    """Enforces limits on the time of running segments; one timer, for the limit that ends first, serves all of them."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        lanes: LaneExecutor,
        source: Requests,
        withdraw: Callable[[ClientTicket, RequestError], None],
        on_lane_freed: Callable[[], None],
    ) -> None:
        """source: the queues. withdraw: answers a request with an error.

        on_lane_freed: called after a lane whose segment took much longer than expected was replaced by a new lane.
        """
        self._loop, self._lanes, self._source = loop, lanes, source
        self._withdraw, self._on_lane_freed = withdraw, on_lane_freed
        self._timer: asyncio.TimerHandle | None = None
        self._next_check = NO_DEADLINE

    def started(self, work: BatchWork) -> None:
        """Set the timer for a segment of a batch that was given to a lane."""
        left_ns = work.compute_left_ns()
        if self._lanes.ahead:  # a segment on such a lane may run on after its requests have ended; check that one, too
            left_ns = min(left_ns, work.model.max_compute_ns)
        if (limit_at := self._lanes.now() + left_ns) < self._next_check:
            self._set_timer(limit_at)

    def replace_overrun(self) -> None:
        """If requests wait and no lane is free, replace lanes whose segment takes much longer than expected.

        If no lane is free afterwards, check again when the next segment will have overrun. GPU lanes are not replaced.
        """
        lanes = self._lanes
        if lanes.ahead or lanes.takes_more or not self._source.queues.lane_awaited:
            return
        overrun_at = lanes.replace_overrun()
        if lanes.takes_more:
            self._on_lane_freed()
        elif overrun_at < self._next_check:
            self._set_timer(overrun_at)

    def _set_timer(self, check_at: int) -> None:
        """Set the timer for the next check to *check_at*, or remove it (NO_DEADLINE).

        The timer is not cancelled when its segment ends in time, as most segments do: the check then finds nothing.
        """
        if self._timer:
            self._timer.cancel()
        self._timer, self._next_check = None, check_at
        if check_at < NO_DEADLINE:
            delay_s = max(0, check_at - self._lanes.now()) / 1e9
            self._timer = self._loop.call_later(delay_s, self._check_segments)

    def _check_segments(self) -> None:
        """Check all running segments: answer requests beyond ``max_compute_s``, stop segments that are not needed."""
        now, limit_at = self._lanes.now(), NO_DEADLINE
        for lane in self._lanes.lanes:
            for task in lane.tasks:
                limit_at = min(limit_at, self._check_segment(lane, task, now))
        self._set_timer(limit_at)
        self.replace_overrun()

    def _check_segment(self, lane: Lane, task: LaneTask, now: int) -> int:
        """Check one segment on a lane; return when to check it again, NO_DEADLINE if that is not needed.

        Requests beyond their limit get an error. A segment whose end was reported to the engine already is stopped if
        it exceeds the limit and no request of its batch needs it.
        """
        stream, query = task.batch  # query: number of the batch within its stream
        began = now if task.began is None else task.began  # None: the lane, which runs ahead, has not begun it
        batch = self._source.queues[stream].by_query.get(query)
        work, limit_at = batch.work if batch else None, NO_DEADLINE
        if isinstance(work, BatchWork):
            while began + work.compute_left_ns() <= now:
                longest = max(work.soft_tickets(), key=lambda ticket: ticket.compute_ns)
                self._withdraw(longest, _too_long_error(longest.model))
            limit_at = began + work.compute_left_ns()
        if task.reported and (batch is None or batch.all_gone):
            assert isinstance(task.work, BatchWork)
            limit_at = began + task.work.model.max_compute_ns
            if limit_at <= now:
                self._lanes.halt(lane, task)
        return limit_at if limit_at > now else NO_DEADLINE


def _too_long_error(model: ServedModel) -> Expired:
    """Return the error for a request that was computed for longer than ``max_compute_s``."""
    limit_s = model.body.max_compute_ns / 1e9
    return Expired(f"{model.name}: it was computed for more than {limit_s:g} s (max_compute_s)", reason="too_long")
