"""The engine among real clients: requests become tickets, tickets batches, batches segments on lanes.

Everything here happens on the event loop's thread, so nothing is locked; only lanes are threads. The ``Dispatcher`` is
the pump: it takes a step of the engine whenever a request came, a segment ended or a time is up. What answers requests
is ``client_feed``, what watches segments ``segment_observer``, what ends those that take too long ``compute_limits``.
The engine, the source of work and the policies are those of the simulator (``engine``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from threading import get_ident

from weft.base.errors import Cancelled, Expired, Failed, InputError, Overloaded, RequestError, first_line
from weft.devices.costs.program import Program
from weft.engine.admission import Refusal
from weft.engine.engine import Completion
from weft.engine.for_requests import request_engine
from weft.engine.policies import Candidate, Option, Setting, make_request_policy, policy_called
from weft.engine.policies.base import NO_BUFFER, NO_DEADLINE, UNBOUNDED_ROUNDS
from weft.engine.tickets import Batch, WaitingLine
from weft.runtime.backend import Backend
from weft.runtime.lanes import LaneExecutor
from weft.serving.client_feed import ClientFeed
from weft.serving.compute_limits import ComputeLimits
from weft.serving.gpu_sharing import sharing_for
from weft.serving.recorder import Recorder
from weft.serving.segment_observer import SegmentObserver
from weft.serving.streams import ServedModel, ServedStreams
from weft.serving.tickets import BatchWork, ClientTicket, MixedWork

log = logging.getLogger("weft.engine")

QUEUE_FULL = "exceeds its maximum queue size"
TURN_NS = 2_000_000
"""How long the engine holds the event loop at a time, about."""


class Dispatcher:
    """Takes requests, has them computed as a policy decides, and answers them."""

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
        self._loop, self._thread = loop, get_ident()
        programs: list[Program] = []
        remaining: list[tuple[int, ...]] = []
        self.sharing = sharing_for(policy, backend.device)
        shares = self.sharing.shares if self.sharing else None
        setting = Setting(programs, NO_BUFFER, UNBOUNDED_ROUNDS, lanes=lanes, shares=shares)
        make_request_policy(policy, setting, options)  # before there are lanes that would have to end
        count = len(shares.lanes) if shares else lanes
        self.lanes = LaneExecutor(backend, count, self._work_of, self._wake, pin=pin, shares=shares is not None)
        self._setting = replace(setting, ahead=self.lanes.ahead, apart=self.lanes.apart)
        self.policy = make_request_policy(policy, self._setting, options)
        self._chosen = policy, options, late
        self.feed = ClientFeed(self.lanes.now, self._retry)
        self._engine, self._source = request_engine(
            self.policy, self.feed, self.lanes, remaining, late=late, places=most_waiting
        )
        self.streams = self.feed.streams = ServedStreams(self._source, programs, remaining, self.sharing)
        self.recorder = Recorder(self.lane_name)
        self.observer = SegmentObserver(self.policy, self.lanes, self.streams, self.recorder, self.sharing)
        self.lanes.watch = self._let_go if self.lanes.ahead else self.observer.ended
        self._limits = ComputeLimits(loop, self.lanes, self._source, self.withdraw, self._pump_soon)
        self._pumping = False
        self._batch_timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Requests that no lane has begun."""
        return self._source.queues.line.waiting

    @property
    def pending(self) -> int:
        """Requests that are not answered; answers that go out in the next turn are still due."""
        return len(self.feed.unanswered) + len(self.feed.outbox)

    def ahead(self) -> int:
        """Ticks until a lane is free for another request that is on time."""
        return self._source.admission.free_in(NO_DEADLINE, self.lanes.now())

    def lane_name(self, lane: int) -> str:
        """A lane by its number, and by its share where lanes are shares of a device."""
        return f"lane {lane}" if self.sharing is None else f"lane {lane}: {self.sharing.name(lane)} SMs"

    def exit_threshold(self, model: ServedModel) -> float:
        """How sure an early answer of a model must be now, where a request does not say."""
        assert model.leaving is not None
        if not model.leases:
            model.leaving.steered.relax(self.lanes.now())
        return model.leaving.threshold

    # What it works with

    def follow(self, policy: str, options: Mapping[str, Option] | None, late: str, lanes: int) -> None:
        """Go on under another policy and rule for late requests, and on other lanes, with all that waits and runs."""
        if policy_called(policy).traits.shares != (self.sharing is not None):
            raise InputError(f"policy = {policy}: whether models share a GPU is settled at the start; restart for it")
        shares = self.sharing.shares if self.sharing else None
        setting = replace(self._setting, lanes=lanes, shares=shares)
        self.policy = self.observer.policy = make_request_policy(policy, setting, options)
        self._setting, self._chosen = setting, (policy, options, late)
        self.lanes.resize(len(shares.lanes) if shares else lanes)
        self._engine.follow(self.policy)
        self._source.follow(self.policy, late)
        self._pump_soon()

    def installed(self, body: ServedModel) -> None:
        """Requests for a body may come; with the first one it may be known how the device can be cut."""
        shares = body.loaded.shares
        if self.sharing and shares and self.sharing.recut(shares.cuts):
            self.follow(*self._chosen, self._setting.lanes)

    def forget(self, body: ServedModel) -> None:
        """A body nobody needs leaves."""
        self.streams.forget(body)

    def close(self, patience_s: float | None = None) -> None:
        """End the lanes; what they run is finished first, if that does not take longer than so."""
        if not self.lanes.close(patience_s):
            log.warning("a segment could not be stopped: it is in the middle of a single operator")

    # Requests in

    def submit(self, ticket: ClientTicket) -> None:
        """Take a request, or raise why not; its ``reply`` is called once, on this thread."""
        now, model = self.lanes.now(), ticket.model
        breaker, second_tries = model.loaded.breaker, self.feed.second_tries
        if second_tries.quarantined:
            second_tries.admit(ticket)
        if breaker:
            breaker.check()
        stream = self.streams.of(model, ticket.inputs)
        self._pump_soon()
        deadlines = self._source.deadlines
        if self.lanes.ended or (deadlines.heap and deadlines.any_passed(now)):
            self._account()
        ticket.enter(stream, now)
        ticket.more = round(model.residency.away_s * 1e9)
        refusal = self._source.admit(ticket, now)
        if refusal:
            if refusal.reason == "unmeetable":
                self.streams.doubt(stream)
            raise refused(model, refusal, self._source.queues.line)
        if breaker:
            breaker.enter()
        self.feed.admitted(ticket)

    def _account(self) -> None:
        """See what has ended, so that nobody is refused for work that is done; answers go out in the next turn."""
        self.feed.stepping = True
        try:
            self._engine.account()
        except Exception as error:
            raise self._stumble(error) from error
        finally:
            self.feed.stepping = False

    def withdraw(self, ticket: ClientTicket, error: RequestError | None = None) -> None:
        """Its client went away, or nobody can answer it."""
        if ticket.gone:
            return
        batch = self._source.queues.withdraw(ticket)
        self.feed.settle(ticket, error or Cancelled("the client went away"))
        if batch and batch.running and batch.forsaken:
            self.lanes.stop(ticket.stream, batch.query)
        self._pump_soon()

    def give_up(self, error: RequestError) -> None:
        """Answer everybody who waits with an error, and stop what is computed for them."""
        for ticket in list(self.feed.unanswered):
            self.withdraw(ticket, error)

    def _retry(self, ticket: ClientTicket, delay_s: float) -> None:
        """Let a request wait for its turn once more, from its inputs on, in a batch of its own.

        That is safe: its batch has ended without an answer, and inference changes nothing.
        """
        if delay_s:
            self._loop.call_later(delay_s, self._retry, ticket, 0.0)
        elif not ticket.gone:
            ticket.stream, ticket.began = self.streams.of(ticket.model, ticket.inputs, alone=True).index, 0
            ticket.compute_ns, ticket.progress = 0, None
            self._source.put(ticket)
            self._pump_soon()

    # The loop's turns

    def _wake(self) -> None:
        """Called where a lane's step ended."""
        if get_ident() == self._thread:
            self._pump_soon()
        else:
            self._loop.call_soon_threadsafe(self._pump)

    def _pump_soon(self) -> None:
        """Look for work at the end of this turn, so that requests which come together are batched together."""
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        until = self.lanes.now() + TURN_NS
        try:
            while self._step():
                if self.lanes.now() > until:  # many short segments ran right here; others want the loop, too
                    self._pump_soon()
                    break
        except Exception as error:  # a policy's fault
            self._stumble(error)
        self._watch_batches()
        if self.lanes.under_way:
            self._limits.replace_overrun()

    def _step(self) -> bool:
        """A step of the engine; what it answers goes out once the lane has something to do."""
        feed = self.feed
        feed.stepping = True
        try:
            return self._engine.step()
        finally:
            feed.stepping = False
            if feed.outbox:
                feed.post()

    def _stumble(self, error: Exception) -> Failed:
        """Nobody shall wait for an engine that cannot go on."""
        log.exception("the engine stopped")
        failed = Failed(f"the scheduler failed: {type(error).__name__}: {first_line(error)}")
        self.give_up(failed)
        return failed

    def _watch_batches(self) -> None:
        """Come back when the next batch has waited long enough, or the next strict request is due."""
        if self._batch_timer:
            self._batch_timer.cancel()
            self._batch_timer = None
        event = self._source.next_event()
        if event < NO_DEADLINE:
            delay_s = max(0, event - self.lanes.now()) / 1e9
            self._batch_timer = self._loop.call_later(delay_s, self._pump)

    # Batches on lanes

    def _work_of(self, candidate: Candidate, batch: object) -> tuple[BatchWork, bool]:
        """What a lane computes for a segment that goes, and whether it is computed on this thread."""
        assert isinstance(batch, Batch)
        work = batch.work
        if not isinstance(work, BatchWork):
            work = batch.work = self._begin(candidate, batch)
        here = self.lanes.runs_here(candidate, work)
        if not here:
            self._limits.started(work)
        elif self.feed.outbox:  # answers shall not wait for it
            self.feed.post()
        if self.lanes.ahead:  # kept until the segment has ended; its batch may be given up before
            work.stream.on_lanes += 1
            work.model.leases += 1
        return work, here

    def _begin(self, candidate: Candidate, batch: Batch) -> BatchWork:
        tickets = [ticket for ticket in batch.members if isinstance(ticket, ClientTicket)]
        now = self.lanes.now()
        for ticket in tickets:
            ticket.began, ticket.batch_size = now, len(tickets)
        stream = self.streams[candidate.stream]
        stream.model.leases += 1
        return (MixedWork if tickets[0].model.task else BatchWork)(stream, batch, tickets)

    def _let_go(self, lane: int, completion: Completion) -> None:
        """A segment ended whose stream and body were kept for it."""
        assert isinstance(completion.work, BatchWork)
        stream = completion.work.stream
        try:
            self.observer.ended(lane, completion)
        finally:
            stream.on_lanes -= 1
            self.feed.release(stream.model)


def refused(model: ServedModel, refusal: Refusal, everybody: WaitingLine) -> RequestError:
    """What a client is told whose request ``engine.admission`` refuses; *everybody*: the line of all requests.

    Other reasons are told where they arise: memory and loading in ``library``, a server that stops in ``inference``, a
    deadline that passed in ``client_feed``. ``metrics`` lists the names of all of them (``DROPS``, ``REFUSALS``).
    """
    match refusal.reason:
        case "all_full":
            return Overloaded(f"{everybody.waiting} requests are waiting, which is the limit; send it again later")
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
