"""The engine among real clients: requests become tickets, tickets batches, batches segments on lanes.

Everything here happens on the event loop's thread, so nothing is locked; only lanes are threads. The loop
takes a step of the engine whenever a request came or a segment ended. The engine, the source of work and
the policies are those of the simulator (``engine``, ``policies``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from threading import get_ident

from weft.base.errors import (
    Cancelled,
    Expired,
    Failed,
    InputError,
    Overloaded,
    RequestError,
    first_line,
)
from weft.devices.costs.program import Program
from weft.devices.decoupled import LayerTimes
from weft.engine.engine import Completion
from weft.engine.for_requests import request_engine
from weft.engine.policies import Candidate, Option, Setting, make_request_policy, policy_called
from weft.engine.policies.base import NO_BUFFER, NO_DEADLINE, UNBOUNDED_ROUNDS
from weft.engine.tickets import Batch, Ticket
from weft.runtime.backend import Backend
from weft.runtime.lanes import Lane, LaneExecutor, LaneTask
from weft.runtime.tensors import Array
from weft.serving.leaving import EXIT
from weft.serving.recorder import LaneSpan, Recorder
from weft.serving.refusals import refused
from weft.serving.second_tries import SecondTries, said
from weft.serving.sharing import RanOn, SeenBeside, sharing_for
from weft.serving.streams import Remaining, ServedModel, ServedStream, ServedStreams
from weft.serving.tickets import BatchWork, ClientTicket, MixedWork, Reply

log = logging.getLogger("weft.engine")

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
        self.sharing = sharing_for(policy, backend.device)
        shares = self.sharing.shares if self.sharing else None
        setting = Setting(programs, NO_BUFFER, UNBOUNDED_ROUNDS, lanes=lanes, shares=shares)
        make_request_policy(policy, setting, options)  # before there are lanes that would have to end
        count = len(shares.lanes) if shares else lanes
        self.lanes = LaneExecutor(backend, count, self._work_of, self._wake, pin=pin, shares=shares is not None)
        self.lanes.watch = self._let_go if self.lanes.ahead else self._observed
        self._setting = replace(setting, ahead=self.lanes.ahead, apart=self.lanes.apart)
        self.policy = make_request_policy(policy, self._setting, options)
        self._chosen = policy, options, late
        self._engine, self._source = request_engine(
            self.policy, self, self.lanes, Remaining(programs), late=late, places=most_waiting
        )
        self.streams = ServedStreams(self._source, programs, self.sharing)
        self._tickets: set[ClientTicket] = set()
        self.second_tries = SecondTries(lambda: self.lanes.now())
        self.recorder = Recorder(self.lane_name)
        self._last_batch: dict[int, Batch] = {}
        self._last_end: dict[int, int] = {}
        self._hand_overs = [0, 0]
        self._pumping = False
        self._stepping = False
        self._outbox: list[tuple[ClientTicket, Reply, dict[str, Array] | RequestError]] = []
        self._batch_timer: asyncio.TimerHandle | None = None
        self._limit_timer: asyncio.TimerHandle | None = None
        self._limit_at = NO_DEADLINE
        """When the first of what runs may have run for too long."""
        self.emptied: Callable[[ServedModel], None] | None = None
        """Told when nobody needs a body any more."""

    @property
    def waiting(self) -> int:
        """Requests that no lane has begun."""
        return self._source.queues.line.waiting

    @property
    def pending(self) -> int:
        """Requests that are not answered; answers that go out in the next turn are still due."""
        return len(self._tickets) + len(self._outbox)

    def ahead(self) -> int:
        """Ticks until a lane is free for another request that is on time."""
        return self._source.admission.free_in(NO_DEADLINE, self.lanes.now())

    def follow(self, policy: str, options: Mapping[str, Option] | None, late: str, lanes: int) -> None:
        """Go on under another policy and rule for late requests, and on other lanes, with all that waits and runs."""
        if policy_called(policy).traits.shares != (self.sharing is not None):
            raise InputError(f"policy = {policy}: whether models share a GPU is settled at the start; restart for it")
        shares = self.sharing.shares if self.sharing else None
        setting = replace(self._setting, lanes=lanes, shares=shares)
        self.policy = make_request_policy(policy, setting, options)
        self._setting, self._chosen = setting, (policy, options, late)
        self.lanes.resize(len(shares.lanes) if shares else lanes)
        self._engine.follow(self.policy)
        self._source.follow(self.policy, late)
        self._pump_soon()

    def installed(self, body: ServedModel) -> None:
        """Requests for a body may come; with the first one it may be known how the device can be cut."""
        if self.sharing and self.sharing.recut(body.loaded.cuts):
            self.follow(*self._chosen, self._setting.lanes)

    def lane_name(self, lane: int) -> str:
        """A lane by its number, and by its share where lanes are shares of a device."""
        return f"lane {lane}" if self.sharing is None else f"lane {lane}: {self.sharing.name(lane)} SMs"

    # Requests in

    def submit(self, ticket: ClientTicket) -> None:
        """Take a request, or raise why not; its ``reply`` is called once, on this thread."""
        now, model = self.lanes.now(), ticket.model
        breaker = model.loaded.breaker
        self.second_tries.admit(ticket)
        if breaker:
            breaker.check()
        stream = self.streams.of(model, ticket.inputs)
        self._account()
        ticket.enter(stream, now)
        ticket.more = round(model.loaded.away_s * 1e9)
        refusal = self._source.admit(ticket, now)
        if refusal:
            if refusal.reason == "unmeetable":
                self.streams.doubt(stream)
            raise refused(model, refusal, self._source.queues.line)
        if breaker:
            breaker.enter()
        model.body.leases += 1
        self._tickets.add(ticket)

    def _account(self) -> None:
        """See what has ended, so that nobody is refused for work that is done; answers go out in the next turn."""
        self._pump_soon()
        self._stepping = True
        try:
            self._engine.account()
        except Exception as error:
            raise self._stumble(error) from error
        finally:
            self._stepping = False

    def withdraw(self, ticket: ClientTicket, error: RequestError | None = None) -> None:
        """Its client went away, or nobody can answer it."""
        if ticket.gone:
            return
        batch = self._source.queues.withdraw(ticket)
        self._settle(ticket, error or Cancelled("the client went away"))
        if batch and batch.running and batch.forsaken:
            self.lanes.stop(ticket.stream, batch.query)
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
        self._replace_overrun()

    def _stumble(self, error: Exception) -> Failed:
        """Nobody shall wait for an engine that cannot go on."""
        log.exception("the engine stopped")
        failed = Failed(f"the scheduler failed: {type(error).__name__}: {first_line(error)}")
        self.give_up(failed)
        return failed

    def _step(self) -> bool:
        """A step of the engine; what it answers goes out once the lane has something to do."""
        self._stepping = True
        try:
            return self._engine.step()
        finally:
            self._stepping = False
            self._post()

    def _post(self) -> None:
        """Send off the answers that wait."""
        waiting, self._outbox = self._outbox, []
        for ticket, reply, outcome in waiting:
            self._answer(ticket, reply, outcome)

    def give_up(self, error: RequestError) -> None:
        """Answer everybody who waits with an error, and stop what is computed for them."""
        for ticket in list(self._tickets):
            self.withdraw(ticket, error)

    def _watch_batches(self) -> None:
        """Come back when the next batch has waited long enough, or the next strict request is due."""
        if self._batch_timer:
            self._batch_timer.cancel()
            self._batch_timer = None
        event = self._source.next_event()
        if event < NO_DEADLINE:
            delay_s = max(0, event - self.lanes.now()) / 1e9
            self._batch_timer = self._loop.call_later(delay_s, self._pump)

    # How long requests may be computed

    def _replace_overrun(self) -> None:
        """Where something waits and no lane is free, see whether one takes too long to be waited for, now or later."""
        if self.lanes.ahead or self.lanes.takes_more or not self._source.queues.stands:
            return
        overrun_at = self.lanes.replace_overrun()
        if self.lanes.takes_more:
            self._pump_soon()
        elif overrun_at < self._limit_at:
            self._watch_limit(overrun_at)

    def _watch_limit(self, at: int) -> None:
        """Look at what runs at this time, and not before; also where that ends meanwhile, which most segments do."""
        if self._limit_timer:
            self._limit_timer.cancel()
        self._limit_timer, self._limit_at = None, at
        if at < NO_DEADLINE:
            delay_s = max(0, at - self.lanes.now()) / 1e9
            self._limit_timer = self._loop.call_later(delay_s, self._end_endless)

    def _end_endless(self) -> None:
        """Answer who was computed for too long, and stop what nobody waits for then; strict ones have deadlines."""
        now, limit = self.lanes.now(), NO_DEADLINE
        for lane in self.lanes.lanes:
            for task in lane.tasks:
                limit = min(limit, self._end_if_endless(lane, task, now))
        self._watch_limit(limit)
        self._replace_overrun()

    def _end_if_endless(self, lane: Lane, task: LaneTask, now: int) -> int:
        """The same for what a lane was given; returns when to look again. What the source knows to have ended is
        stopped when it has run for that long and nobody goes on from it."""
        (stream, query), began = task.batch, now if task.began is None else task.began
        batch = self._source.queues[stream].by_query.get(query)
        work, limit = batch.work if batch else None, NO_DEADLINE
        if isinstance(work, BatchWork):
            while began + work.left_ns() <= now:
                oldest = max(work.waiting(), key=lambda ticket: ticket.compute_ns)
                self.withdraw(oldest, _too_long(oldest.model))
            limit = began + work.left_ns()
        if task.told and (batch is None or batch.forsaken):
            limit = began + _body(task).max_compute_ns
            if limit <= now:
                self.lanes.halt(lane, task)
        return limit if limit > now else NO_DEADLINE

    # The feed of ``Requests``

    def take(self, now: int) -> Iterable[Ticket]:
        """Requests of clients are put into the queues as they come."""
        return ()

    def next_arrival(self) -> int:
        return NO_DEADLINE

    def exhausted(self) -> bool:
        return False

    def served(self, batch: Batch, completion: Completion) -> None:
        work, stream = batch.work, self.streams[completion.candidate.stream]
        assert isinstance(work, BatchWork)
        stream.measured = True
        if work.model.leaving:
            self._depart(work)
        else:
            for ticket, outputs in _results(work):
                ticket.compute_ns += work.compute_ns
                if isinstance(outputs, dict) and ticket.model.leaving:
                    ticket.model.statistics.exits.update(outputs[EXIT].tolist())
                self._settle(ticket, outputs)
        self._executed(stream, work)

    def leave(self, batch: Batch, completion: Completion) -> list[Ticket]:
        work, stream = batch.work, self.streams[completion.candidate.stream]
        assert isinstance(work, BatchWork)
        self._depart(work)
        if not work.tickets:
            self._executed(stream, work)
        return list(work.tickets)

    def _depart(self, work: BatchWork) -> None:
        """Answer those who leave at the exit that a batch has come to."""
        leaving = work.model.leaving
        assert leaving is not None
        moved = False
        for ticket, outputs in work.departing():
            ticket.compute_ns += work.compute_ns
            for number in outputs[EXIT].tolist():
                ticket.model.statistics.exits[number] += 1
                moved |= leaving.shares.left(number - 1)
            self._settle(ticket, outputs)
        if moved:
            self.streams.expect_leaving(work.model)

    def merged(self, batch: Batch, other: Batch) -> None:
        kept, joining = batch.work, other.work
        assert isinstance(kept, BatchWork) and isinstance(joining, BatchWork)
        kept.join(joining)
        for model in joining.shares():
            model.statistics.merges += 1
        self._executed(self.streams[batch.members[0].stream], joining)

    def _executed(self, stream: ServedStream, work: BatchWork) -> None:
        stream.seen += 1
        for model, rows in work.began.items():
            model.statistics.executed(rows, work.compute_ns)

    def dropped(self, ticket: Ticket, now: int) -> None:
        assert isinstance(ticket, ClientTicket)
        if now >= ticket.due:
            self._settle(ticket, Expired(f"{ticket.model.name}: its deadline passed before it was done"))
            return
        if not ticket.began:
            self.streams.doubt(self.streams[ticket.stream])
        self._settle(ticket, Expired(f"{ticket.model.name}: its deadline cannot be met any more"))

    def refused(self, ticket: Ticket, now: int) -> None:
        assert isinstance(ticket, ClientTicket)
        self._settle(ticket, Overloaded(f"{ticket.model.name}: its queue is full; send it again later"))

    def failed(self, batch: Batch, error: Exception) -> None:
        """Tell whoever sent it, or try it again: alone, for in a batch it may have been any of them."""
        alone, now = len(batch.members) == 1, self.lanes.now()
        for ticket in batch.members:
            assert isinstance(ticket, ClientTicket)
            slack = ticket.due - now - self._source.queues.whole(ticket.stream) if ticket.strict else NO_DEADLINE
            verdict = self.second_tries.verdict(ticket, error, alone=alone, slack_ns=slack)
            if isinstance(verdict, RequestError):
                self._settle(ticket, verdict)
            elif verdict:
                self._loop.call_later(verdict, self._try_again, ticket)
            else:
                self._try_again(ticket)

    def _try_again(self, ticket: ClientTicket) -> None:
        """Let a request wait for its turn once more, from its inputs on, in a batch of its own."""
        if ticket.gone:
            return
        ticket.stream, ticket.began = self.streams.of(ticket.model, ticket.inputs, alone=True).index, 0
        ticket.compute_ns, ticket.progress = 0, None
        self._source.put(ticket)
        self._pump_soon()

    def ended(self, batch: Batch) -> None:
        if isinstance(batch.work, BatchWork):
            batch.work.drop()
            self._release(batch.work.model)

    def _release(self, body: ServedModel) -> None:
        body.leases -= 1
        if not body.leases and self.emptied:
            self.emptied(body)

    def _settle(self, ticket: ClientTicket, outcome: dict[str, Array] | RequestError) -> None:
        """Answer a request, once; whoever hands the answer to the client counts it (``ClientTicket.settle``)."""
        if ticket.reply is _nobody:
            return
        reply, ticket.reply = ticket.reply, _nobody
        ticket.gone = True
        self._tickets.discard(ticket)
        if self._stepping:
            self._outbox.append((ticket, reply, outcome))
        else:
            self._answer(ticket, reply, outcome)

    def _answer(self, ticket: ClientTicket, reply: Reply, outcome: dict[str, Array] | RequestError) -> None:
        try:
            reply(ticket, outcome)
        except Exception:  # the answer could not be given; the others' shall be
            log.exception("%s: an answer could not be given", ticket.model.name)
        ticket.inputs = {}  # its deadline may be watched for longer than anybody needs them
        self._release(ticket.model.body)

    # Batches on lanes

    def _work_of(self, candidate: Candidate) -> BatchWork:
        batch = self._source.queues.batch_of(candidate)
        assert batch is not None
        if not isinstance(batch.work, BatchWork):
            batch.work = self._begin(candidate, batch)
        if self.lanes.runs_here(candidate, batch.work):  # answers shall not wait for it
            self._post()
        elif (limit := self.lanes.now() + self._left_ns(batch.work)) < self._limit_at:
            self._watch_limit(limit)
        if self.lanes.ahead:
            self._hold(candidate)
        return batch.work

    def _left_ns(self, work: BatchWork) -> int:
        """When to look at what is computed; where it may be stopped although nobody waits for it any more, too."""
        left = work.left_ns()
        return min(left, work.model.max_compute_ns) if self.lanes.ahead else left

    def _hold(self, candidate: Candidate) -> None:
        """Keep the stream and the body of a segment until it has ended; its batch may be given up before."""
        stream = self.streams[candidate.stream]
        stream.on_lanes += 1
        stream.model.leases += 1

    def _let_go(self, lane: int, completion: Completion) -> None:
        """A segment ended that was held."""
        stream = self.streams[completion.candidate.stream]
        try:
            self._observed(lane, completion)
        finally:
            stream.on_lanes -= 1
            self._release(stream.model)

    def _begin(self, candidate: Candidate, batch: Batch) -> BatchWork:
        tickets = [ticket for ticket in batch.members if isinstance(ticket, ClientTicket)]
        now = self.lanes.now()
        stream = self.streams[candidate.stream]
        for ticket in tickets:
            ticket.began, ticket.batch_size = now, len(tickets)
        stream.model.leases += 1
        return (MixedWork if tickets[0].model.task else BatchWork)(stream.model, tickets)

    def exit_threshold(self, model: ServedModel) -> float:
        """How sure an early answer of a model must be now, where a request does not say."""
        assert model.leaving is not None
        if not model.leases:
            model.leaving.steered.relax(self.lanes.now())
        return model.leaving.threshold

    def _observed(self, lane: int, completion: Completion) -> None:
        """A segment ended: count it, show it, and learn how long it takes."""
        candidate, times, work = completion.candidate, completion.times, completion.work
        stream, batch = self.streams[candidate.stream], self._source.queues.batch_of(candidate)
        took = times.compute_end - times.compute_start
        assert isinstance(work, BatchWork)
        self._note_hand_over(lane, batch, times)
        self._note_preemption(lane, batch)
        work.compute_ns += took
        self.recorder.add(
            LaneSpan(
                lane,
                stream.model.name,
                f"{candidate.layer + 1}/{len(self.streams.programs[candidate.program])}",
                times.compute_start,
                times.compute_end,
                candidate.compute,
                candidate.size * stream.rows,
                candidate.query,
                "aborted" if completion.aborted else "failed" if completion.error else "done",
                any([ticket.traced for ticket in work.tickets]),
            )
        )
        shares = work.shares()
        for model in shares:
            model.statistics.aborts += completion.aborted
        if not completion.aborted and not completion.error:
            between = (
                round(self.hand_over_s * 1e9) if self.policy.traits.refills else 0
            )  # what small batches cost beside
            seen = self._seen_beside(lane, completion, stream)
            expected = round(candidate.compute / seen.speed) if seen else candidate.compute
            error = abs(took + between - expected) if stream.measured else 0
            computed = max(1, candidate.size * stream.rows)
            for model, rows in shares.items():  # others may have joined it while it was computed
                model.statistics.computed(computed, min(rows, computed), took, error)
                if self.sharing:
                    part_ns = took * min(rows, computed) // computed
                    model.statistics.shares.total_ns[self.sharing.name(lane)] += part_ns
            if seen is None or seen.alone:
                self.streams.learn(stream, candidate, took, between)
            elif not stream.measured:
                self.streams.learn(stream, candidate, round(took * seen.speed))

    def _seen_beside(self, lane: int, completion: Completion, stream: ServedStream) -> SeenBeside | None:
        """What ran beside a segment, where lanes are shares of a device."""
        if self.sharing is None:
            return None
        candidate, times, now = completion.candidate, completion.times, self.lanes.now()
        heads = [(each.index, each.task) for each in self.lanes.lanes]
        running = [
            RanOn(index, task.candidate.program, task.began, now)
            for index, task in heads
            if task and task.began is not None
        ]
        ran = RanOn(lane, candidate.program, times.compute_start, times.compute_end)
        return self.sharing.observe(ran, candidate.compute if stream.measured else None, running)

    @property
    def hand_over_s(self) -> float:
        """Mean time from the end of a segment to the start of the next of the same batch on the same lane."""
        count, total = self._hand_overs
        return total / count / 1e9 if count else 0.0

    def _note_hand_over(self, lane: int, batch: Batch | None, times: LayerTimes) -> None:
        if batch and self._last_batch.get(lane) is batch:
            self._hand_overs[0] += 1
            self._hand_overs[1] += times.compute_start - self._last_end[lane]
        self._last_end[lane] = times.compute_end

    def _note_preemption(self, lane: int, batch: Batch | None) -> None:
        """Whether this lane left another batch half-way for this one."""
        if batch is None:
            return
        before, self._last_batch[lane] = self._last_batch.get(lane), batch
        if before is None or before is batch or (before.running and not self._waits_on(lane, before)):
            return
        if self.policy.traits.refills and before.members[0].stream == batch.members[0].stream:
            return  # it waits for others to catch up with it
        if before in self._source.queues[before.members[0].stream].batches and isinstance(before.work, BatchWork):
            for model in before.work.shares():
                model.statistics.preemptions += 1

    def _waits_on(self, lane: int, batch: Batch) -> bool:
        """Whether a batch goes on on a lane, behind what that computes."""
        return self.lanes.holds(lane, (batch.members[0].stream, batch.query))

    def forget(self, body: ServedModel) -> None:
        """A body nobody needs leaves."""
        self.streams.forget(body)

    def close(self, patience_s: float | None = None) -> None:
        """End the lanes; what they run is finished first, if that does not take longer than so."""
        if not self.lanes.close(patience_s):
            log.warning("a segment could not be stopped: it is in the middle of a single operator")


def _body(task: LaneTask) -> ServedModel:
    assert isinstance(task.work, BatchWork)
    return task.work.model


def _too_long(model: ServedModel) -> Expired:
    limit_s = model.body.max_compute_ns / 1e9
    return Expired(f"{model.name}: it was computed for more than {limit_s:g} s (max_compute_s)", reason="too_long")


def _results(work: BatchWork) -> list[tuple[ClientTicket, dict[str, Array] | RequestError]]:
    """Every ticket with its outputs; where those of a batch do not fit its requests, these alone hear of it."""
    try:
        return list(work.results())
    except Exception as error:
        log.exception("%s: the outputs of a batch do not fit its requests", work.model.name)
        return [(ticket, said(ticket.model.name, error)) for ticket in work.tickets]


def _nobody(ticket: ClientTicket, outcome: object) -> None:
    """Stands where a reply was once it has been given."""
