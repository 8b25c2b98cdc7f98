"""The engine among real clients: requests become tickets, tickets batches, batches segments on lanes.

Everything here happens on the event loop's thread, so nothing is locked; only lanes are threads. The loop
takes a step of the engine whenever a request came or a segment ended. The engine, the source of work and
the policies are those of the simulator (``engine``, ``policies``).
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weft.engine.engine import Completion, Engine
from weft.engine.requests import Job, Requests, Terms, Ticket
from weft.errors import BadRequest, Cancelled, Expired, Failed, Overloaded, RequestError
from weft.policies import Candidate, Option, Setting, make_policy
from weft.policies.base import NO_DEADLINE
from weft.program import Program
from weft.runtime.lanes import Lanes
from weft.runtime.prepared import Prepared
from weft.runtime.sessions import first_line
from weft.runtime.tensors import Array
from weft.serving.recorder import Recorder, Span
from weft.serving.statistics import Statistics

log = logging.getLogger("weft.engine")

STREAMS = 1024
"""Shapes of requests that are told apart at a time."""
UNKNOWN_NS = 1_000_000
"""What a segment nobody measured is taken to last until it was seen."""
UNNOTICED_NS = 20_000
"""Differences between expected and real segment times below this, or below a twentieth, teach nothing."""
LEARNING = 0.15
"""Weight of the last observation in a segment's expected time."""
NO_BUFFER = 1 << 52
TURN_NS = 2_000_000
"""How long the engine holds the event loop at a time, about."""

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
ALONE: Shapes = (("", ()),)
"""Ends the shapes of requests that shall not share a batch."""


class Served:
    """A loaded model in the dispatcher's hands."""

    def __init__(self, name: str, prepared: Prepared, *, queue_size: int = 256, batch_timeout_ms: float = 0.0) -> None:
        self.name, self.prepared = name, prepared
        self.queue_size, self.batch_timeout_ns = queue_size, round(batch_timeout_ms * 1e6)
        self.statistics = Statistics()
        self.leases = 0
        """Requests and batches that need it; it is not closed before they have ended."""
        self.streams: dict[Shapes, _Stream] = {}
        warm = prepared.blueprint.warm_shapes
        self.warm_elements = sum(int(np.prod(shape)) for shape in warm.values()) if warm else 0


@dataclass(eq=False)
class _Stream:
    """Requests for one model that have the same shapes, and so can share a batch and cost the same."""

    index: int
    model: Served
    shapes: Shapes
    rows: int
    first_program: int
    batches: int
    """Most requests in a batch."""
    places: int
    """Programs that are its own, at least as many."""
    measured: bool
    """Whether its times were ever seen."""
    seen: int = 0
    """Batches computed."""


class LiveTicket(Ticket):
    """A request of a real client."""

    __slots__ = ("batch", "began", "best_effort", "compute_ns", "inputs", "model", "reply", "rows", "timer")

    def __init__(self, stream: _Stream, inputs: dict[str, Array], now: int, terms: Ask, reply: Reply) -> None:
        super().__init__(stream.index, now, terms.due, terms.priority, terms.strict)
        self.model, self.rows = stream.model, stream.rows
        self.inputs, self.reply = inputs, reply
        self.best_effort = terms.best_effort
        self.began = 0
        self.batch = 0
        self.compute_ns = 0
        self.timer: asyncio.TimerHandle | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client wants besides its result."""

    due: int
    """On the monotonic clock, in nanoseconds."""
    priority: int = 1
    strict: bool = False
    """Without a result after its deadline."""
    best_effort: bool = False
    """Its deadline only orders it; nobody counts it."""


Reply = Callable[[LiveTicket, "dict[str, Array] | RequestError"], None]


class _Batch:
    """The work of one job, on whatever lane runs it."""

    __slots__ = ("compute_ns", "model", "tickets", "values")

    def __init__(self, model: Served, tickets: list[LiveTicket]) -> None:
        self.model, self.tickets = model, tickets
        self.values: dict[str, Any] | None = None
        self.compute_ns = 0

    def compute(self, segment: int, options: Any) -> None:
        if self.values is None:
            self.values = self._gathered()
        self.values = self.model.prepared.run_segment(segment, self.values, options)

    def _gathered(self) -> dict[str, Any]:
        if len(self.tickets) == 1:
            return self.tickets[0].inputs
        names = self.tickets[0].inputs
        return {name: np.concatenate([ticket.inputs[name] for ticket in self.tickets]) for name in names}

    def results(self) -> Iterator[tuple[LiveTicket, dict[str, Array]]]:
        """Every ticket with its rows of the outputs."""
        assert self.values is not None
        if len(self.tickets) == 1:
            yield self.tickets[0], self.values
            return
        row = 0
        for ticket in self.tickets:
            yield ticket, {name: each[row : row + ticket.rows] for name, each in self.values.items()}
            row += ticket.rows


class _Remaining(Sequence[Sequence[int]]):
    """The remaining times of programs that come, go and change."""

    def __init__(self, programs: list[Program]) -> None:
        self._programs = programs

    def __len__(self) -> int:
        return len(self._programs)

    def __getitem__(self, index: Any) -> Any:
        return self._programs[index].remaining


class Dispatcher:
    """Takes requests, has them computed as a policy decides, and answers them."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        policy: str,
        options: Mapping[str, Option] | None = None,
        *,
        lanes: int = 1,
        pin: bool = False,
        most_waiting: int = 4096,
    ) -> None:
        self._loop = loop
        self._programs: list[Program] = []
        setting = Setting(self._programs, NO_BUFFER, rounds=1 << 40, lanes=lanes)
        self.policy = make_policy(policy, setting, options)
        self._source = Requests(setting, self, _Remaining(self._programs), foresight=self.policy.foresight)
        self.lanes = Lanes(lanes, self._work_of, self._wake, pin=pin)
        self.lanes.watch = self._observed
        self._engine = Engine(self._source, self.policy, self.lanes)
        self._streams: OrderedDict[tuple[int, Shapes], _Stream] = OrderedDict()
        self._numbered: dict[int, _Stream] = {}
        self._spare: list[_Stream] = []
        self._inbox: list[LiveTicket] = []
        self._most_waiting = most_waiting
        self.waiting = 0
        """Requests that no lane has begun."""
        self._tickets: set[LiveTicket] = set()
        self.recorder = Recorder()
        self._last_job: dict[int, Job] = {}
        self._pumping = False
        self._batch_timer: asyncio.TimerHandle | None = None
        self.emptied: Callable[[Served], None] | None = None
        """Told when nobody needs a model any more."""

    @property
    def pending(self) -> int:
        """Requests that are not answered."""
        return len(self._tickets)

    # Requests in

    def submit(self, model: Served, inputs: dict[str, Array], ask: Ask, reply: Reply) -> LiveTicket:
        """Take a request, or raise why not; ``reply`` is called once, on this thread."""
        now = self.lanes.now()
        stream = self._stream(model, inputs)
        self._admit(stream, ask, now)
        ticket = LiveTicket(stream, inputs, now, ask, reply)
        model.leases += 1
        self._tickets.add(ticket)
        self.waiting += 1
        self._inbox.append(ticket)
        if ask.strict:
            ticket.timer = self._loop.call_later(max(0, ask.due - now) / 1e9, self._expire, ticket)
        self._pump_soon()
        return ticket

    def withdraw(self, ticket: LiveTicket, error: RequestError | None = None) -> None:
        """Its client went away, or its time is up."""
        if ticket.gone:
            return
        if ticket in self._inbox:
            self._inbox.remove(ticket)
        self._source.withdraw(ticket)
        self._settle(ticket, error or Cancelled("the client went away"))
        self._pump_soon()

    def _admit(self, stream: _Stream, ask: Ask, now: int) -> None:
        """Refuse what there is no place for, and what cannot be on time."""
        model = stream.model
        if self.waiting >= self._most_waiting:
            raise Overloaded(f"{self.waiting} requests are waiting, which is the limit; send it again later")
        if self.waiting >= model.queue_size and self.queued(model) >= model.queue_size:
            raise Overloaded(
                f"{model.name}: exceeds its maximum queue size of {model.queue_size}; send it again later",
                retry_after_s=self._backlog_ns(NO_DEADLINE) / 1e9,
            )
        if not ask.strict:
            return
        own = self._programs[stream.first_program].remaining[0] if stream.measured else 0
        ahead = self._backlog_ns(ask.due) if self.pending else 0
        if now + ahead + own > ask.due:
            self._doubt(stream)
            raise Expired(
                f"{model.name}: its deadline cannot be met: {(ahead + own) / 1e6:.1f} ms of work stand before its end",
                reason="unmeetable",
            )

    def queued(self, model: Served) -> int:
        """Requests for a model that no lane has begun."""
        inbox = sum(1 for ticket in self._inbox if ticket.model is model)
        return inbox + sum(len(self._source.waiting(stream.index)) for stream in model.streams.values())

    def _backlog_ns(self, due: int) -> int:
        """When a lane would be free for a request with this deadline: what stands before it, spread over the lanes."""
        before = due if self.policy.for_deadlines else NO_DEADLINE
        waiting = sum(self._alone(self._numbered[ticket.stream]) for ticket in self._inbox if ticket.due <= before)
        begun = {(candidate.stream, candidate.query): rest for candidate, rest in self.lanes.rests()}
        for stream in self._streams.values():
            queue = self._source.waiting(stream.index)
            if queue:
                count = bisect_right(queue, before, key=lambda ticket: ticket.due)
                largest = self._programs[stream.first_program + stream.batches - 1].remaining[0]
                waiting += count * largest // stream.batches if count > 1 else count * self._alone(stream)
            for job in self._source.jobs(stream.index):
                if job.members[0].due <= before and job.layer < len(self._programs[job.program]):
                    key = stream.index, job.query
                    begun[key] = begun.get(key, 0) + self._programs[job.program].remaining[job.layer]
        return _poured(waiting, begun.values(), len(self.lanes.lanes))

    def _alone(self, stream: _Stream) -> int:
        return self._programs[stream.first_program].remaining[0]

    # The loop's turns

    def _wake(self) -> None:
        """Called on a lane's thread."""
        self._loop.call_soon_threadsafe(self._pump)

    def _pump_soon(self) -> None:
        """After whatever else arrives in this turn, so that requests which come together are batched together."""
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        until = self.lanes.now() + TURN_NS
        try:
            while self._engine.step():
                if self.lanes.now() > until:  # many short segments ran right here; others want the loop, too
                    self._pump_soon()
                    break
        except Exception as error:  # a policy's fault; nobody shall wait for an engine that cannot go on
            log.exception("the engine stopped")
            self._give_up(Failed(f"the scheduler failed: {type(error).__name__}: {first_line(error)}"))
        self._watch_batches()

    def _give_up(self, error: RequestError) -> None:
        for ticket in list(self._tickets):
            self.withdraw(ticket, error)

    def _watch_batches(self) -> None:
        """Come back when the next batch has waited long enough."""
        if self._batch_timer:
            self._batch_timer.cancel()
            self._batch_timer = None
        if self.waiting and any(stream.model.batch_timeout_ns for stream in self._streams.values()):
            delay = (self._source.next_event() - self.lanes.now()) / 1e9
            if delay > 0 or self.lanes.ready():
                self._batch_timer = self._loop.call_later(max(0.0, delay), self._pump)

    def _expire(self, ticket: LiveTicket) -> None:
        ticket.timer = None
        self.withdraw(ticket, Expired(f"{ticket.model.name}: its deadline passed before it was done"))

    # The feed of ``Requests``

    def take(self, now: int) -> Iterable[Ticket]:
        taken, self._inbox = self._inbox, []
        return taken

    def next_arrival(self) -> int:
        return NO_DEADLINE

    def exhausted(self) -> bool:
        return False

    def served(self, job: Job, completion: Completion) -> None:
        work = job.work
        assert isinstance(work, _Batch)
        stream = self._numbered[completion.candidate.stream]
        stream.measured = True
        stream.seen += 1
        stream.model.statistics.executed(stream.rows * len(job.members), work.compute_ns)
        for ticket, outputs in work.results():
            ticket.compute_ns = work.compute_ns
            self._settle(ticket, outputs)

    def dropped(self, ticket: Ticket, now: int) -> None:
        assert isinstance(ticket, LiveTicket)
        if not ticket.began:
            self._doubt(self._numbered[ticket.stream])
        self._settle(ticket, Expired(f"{ticket.model.name}: its deadline cannot be met any more", reason="expired"))

    def refused(self, ticket: Ticket, now: int) -> None:
        assert isinstance(ticket, LiveTicket)
        self._settle(ticket, Overloaded(f"{ticket.model.name}: its queue is full; send it again later"))

    def failed(self, job: Job, error: Exception) -> None:
        """Tell whoever sent it; in a batch that may have been any of them, so each is tried alone."""
        for ticket in job.members:
            assert isinstance(ticket, LiveTicket)
            if len(job.members) == 1:
                self._settle(ticket, _said(ticket.model.name, error))
            elif not ticket.gone:
                ticket.stream, ticket.began = self._stream(ticket.model, ticket.inputs, alone=True).index, 0
                self.waiting += 1
                self._inbox.append(ticket)

    def ended(self, job: Job) -> None:
        if isinstance(job.work, _Batch):
            self._release(job.work.model)

    def _release(self, model: Served) -> None:
        model.leases -= 1
        if not model.leases and self.emptied:
            self.emptied(model)

    def _settle(self, ticket: LiveTicket, outcome: dict[str, Array] | RequestError) -> None:
        """Answer a request, once."""
        if ticket.timer:
            ticket.timer.cancel()
            ticket.timer = None
        if ticket.reply is _nobody:
            return
        reply, ticket.reply = ticket.reply, _nobody
        ticket.gone = True
        model = ticket.model
        self._tickets.discard(ticket)
        if not ticket.began:
            self.waiting -= 1
        self._count(ticket, outcome)
        try:
            reply(ticket, outcome)
        except Exception:  # the answer could not be given; the others' shall be
            log.exception("%s: an answer could not be given", model.name)
        self._release(model)

    def _count(self, ticket: LiveTicket, outcome: dict[str, Array] | RequestError) -> None:
        now = self.lanes.now()
        statistics, latency = ticket.model.statistics, now - ticket.arrival
        if isinstance(outcome, RequestError):
            statistics.failed(now, latency, outcome.reason, not ticket.best_effort)
        else:
            statistics.queue_ns += ticket.began - ticket.arrival
            statistics.infer_ns += ticket.compute_ns
            statistics.answered(now, latency, None if ticket.best_effort else now <= ticket.due)

    # Batches on lanes

    def _work_of(self, candidate: Candidate) -> _Batch:
        job = self._source.job_of(candidate)
        assert job is not None
        if not isinstance(job.work, _Batch):
            job.work = self._begin(candidate, job)
        return job.work

    def _begin(self, candidate: Candidate, job: Job) -> _Batch:
        tickets = [ticket for ticket in job.members if isinstance(ticket, LiveTicket)]
        now = self.lanes.now()
        for ticket in tickets:
            ticket.began, ticket.batch = now, len(tickets)
            if not ticket.gone:
                self.waiting -= 1
        model = self._numbered[candidate.stream].model
        model.leases += 1
        return _Batch(model, tickets)

    def _observed(self, lane: int, completion: Completion) -> None:
        """A segment ended: count it, show it, and learn how long it takes."""
        candidate, times = completion.candidate, completion.times
        stream, job = self._numbered[candidate.stream], self._source.job_of(candidate)
        took, statistics = times.compute_end - times.compute_start, stream.model.statistics
        assert job is not None and isinstance(job.work, _Batch)
        self._note_preemption(lane, job)
        job.work.compute_ns += took
        self.recorder.add(
            Span(
                lane,
                stream.model.name,
                f"{candidate.layer + 1}/{len(self._programs[candidate.program])}",
                times.compute_start,
                times.compute_end,
                candidate.compute,
                candidate.size * stream.rows,
                candidate.query,
                "aborted" if completion.aborted else "failed" if completion.error else "done",
            )
        )
        statistics.aborts += completion.aborted
        if not completion.aborted and not completion.error:
            statistics.segments += 1
            statistics.segment_ns += took
            statistics.segment_error_ns += abs(took - candidate.compute) if stream.measured else 0
            self._learn(stream, candidate, took)

    def _note_preemption(self, lane: int, job: Job) -> None:
        """Whether this lane left another batch half-way for this one."""
        before, self._last_job[lane] = self._last_job.get(lane), job
        if before is None or before is job or before.running:
            return
        owner = self._numbered.get(before.members[0].stream)
        if owner and before in self._source.jobs(owner.index):
            owner.model.statistics.preemptions += 1

    def _learn(self, stream: _Stream, candidate: Candidate, took: int) -> None:
        if not stream.measured:
            for size in range(1, stream.batches + 1):
                self._expect(stream.first_program + size - 1, candidate.layer, took * size // candidate.size)
        elif abs(took - candidate.compute) > max(candidate.compute // 20, UNNOTICED_NS):
            seen = min(took, 3 * candidate.compute)
            expected = round(candidate.compute + LEARNING * (seen - candidate.compute))
            self._expect(candidate.program, candidate.layer, expected)

    def _doubt(self, stream: _Stream) -> None:
        """A request was turned away on the word of our estimates, so nothing is learned from it: what was learned in
        a busy moment is forgotten bit by bit, or it would keep requests out for good."""
        for size in range(1, stream.batches + 1):
            index = stream.first_program + size - 1
            now, loaded = self._programs[index], self._estimated(stream.model, stream.shapes, stream.rows, size)
            if stream.measured and now.total_compute > loaded.total_compute:
                compute = tuple((3 * a + min(a, b)) // 4 for a, b in zip(now.compute, loaded.compute, strict=True))
                self._programs[index] = replace(now, compute=compute)

    def _expect(self, index: int, layer: int, ticks: int) -> None:
        program = self._programs[index]
        compute = (*program.compute[:layer], max(1, ticks), *program.compute[layer + 1 :])
        self._programs[index] = replace(program, compute=compute)

    # Streams: requests of the same model and shapes

    def _stream(self, model: Served, inputs: dict[str, Array], *, alone: bool = False) -> _Stream:
        shapes = tuple([(name, each.shape) for name, each in inputs.items()]) + ALONE * alone
        stream = model.streams.get(shapes)
        if stream is None:
            stream = model.streams[shapes] = self._open(model, shapes, alone)
            self._streams[id(model), shapes] = stream
            self._forget_old()
        elif len(self._streams) > STREAMS // 2:
            self._streams.move_to_end((id(model), shapes))
        return stream

    def _open(self, model: Served, shapes: Shapes, alone: bool) -> _Stream:
        prepared = model.prepared
        rows, batches = 1, 1
        if prepared.batchable:
            rows = _rows(model.name, shapes)
            batches = 1 if alone else max(1, prepared.max_batch // max(1, rows))
        programs = [self._estimated(model, shapes, rows, size) for size in range(1, batches + 1)]
        fitting = [old for old in self._spare if old.places >= batches]
        if fitting:
            spare = min(fitting, key=lambda old: old.places)
            self._spare.remove(spare)
            first = spare.first_program
            self._programs[first : first + batches] = programs
            stream = _Stream(spare.index, model, shapes, rows, first, batches, spare.places, prepared.warm)
            self._source.reopen(stream.index, self._terms(stream))
        else:
            stream = _Stream(-1, model, shapes, rows, len(self._programs), batches, batches, prepared.warm)
            self._programs += programs
            stream.index = self._source.open(self._terms(stream))
        self._numbered[stream.index] = stream
        return stream

    def _terms(self, stream: _Stream) -> Terms:
        return Terms(stream.first_program, NO_DEADLINE, stream.batches, stream.model.batch_timeout_ns, 1)

    def _estimated(self, model: Served, shapes: Shapes, rows: int, size: int) -> Program:
        """The segments at a batch size, from what was measured when the model was loaded."""
        times = model.prepared.times_at(max(1, rows * size))
        if model.warm_elements and model.prepared.warm:
            elements = sum(int(np.prod(shape)) for name, shape in shapes if name) / max(1, rows)
            ticks = [max(1, round(time * 1e9 * elements / model.warm_elements)) for time in times]
        else:
            ticks = [UNKNOWN_NS] * len(times)
        nothing = (0,) * len(ticks)
        return Program(model.name, model.prepared.segments, nothing, tuple(ticks), nothing)

    def _forget_old(self) -> None:
        """Keep the number of shapes that are told apart bounded."""
        if len(self._streams) <= STREAMS:
            return
        for key, stream in list(self._streams.items())[: STREAMS // 4]:
            if self._source.idle(stream.index) and not any(t.stream == stream.index for t in self._inbox):
                self._close(key)

    def forget(self, model: Served) -> None:
        """A model nobody needs leaves."""
        for shapes in list(model.streams):
            self._close((id(model), shapes))

    def _close(self, key: tuple[int, Shapes]) -> None:
        stream = self._streams.pop(key)
        del stream.model.streams[key[1]]
        del self._numbered[stream.index]
        self._spare.append(stream)

    def expected_s(self, model: Served) -> dict[str, list[float]]:
        """What segments of its most common shapes are expected to take now, by batch size."""
        stream = max(model.streams.values(), key=lambda each: each.seen, default=None)
        if stream is None:
            return {}
        programs = self._programs[stream.first_program : stream.first_program + stream.batches]
        return {str(size * stream.rows): [t / 1e9 for t in p.compute] for size, p in enumerate(programs, 1)}

    def close(self) -> None:
        """End the lanes; what they run is finished first."""
        self.lanes.close()


def _nobody(ticket: LiveTicket, outcome: object) -> None:
    """Stands where a reply was once it has been given."""


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


def _rows(model: str, shapes: Shapes) -> int:
    rows = {shape[0] for _, shape in shapes if shape}
    if len(rows) != 1:
        raise BadRequest(f"{model}: its inputs must have the same first dimension, not {sorted(rows)}")
    return int(rows.pop())


def _said(model: str, error: Exception) -> RequestError:
    """What a client is told when its inputs could not be computed: mostly a free dimension the model cannot take."""
    if isinstance(error, RequestError):
        return error
    if type(error).__module__.startswith("onnxruntime"):
        return BadRequest(f"{model} cannot compute these inputs: {first_line(error)}")
    return Failed(f"{model}: {type(error).__name__}: {first_line(error)}")
