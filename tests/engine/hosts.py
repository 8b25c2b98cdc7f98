"""Hosts for the tests: requests on simulated lanes, and a real dispatcher on a clock that jumps.

``run_load`` serves listed requests on ``SimulatedHost`` and keeps all there is to know of the run. ``Machine``
is the server's dispatcher with its real lanes and threads; only the clock, the event loop and the models are
stand-ins, so that every instant is chosen by the test and nothing depends on how busy the machine is.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from tests.engine.ahead import AheadBackend
from tests.engine.naive import program
from weft.base.errors import RequestError
from weft.devices.costs.program import Program
from weft.devices.host import Gates
from weft.engine import Completion, SimulatedHost, request_engine
from weft.engine.lateness import SOFT
from weft.engine.policies import Candidate, Option, Policy, Setting, Start, make_policy
from weft.engine.policies.base import NO_BUFFER, NO_DEADLINE
from weft.engine.steering import Steered, Steering
from weft.engine.tickets import Batch, Terms, Ticket, WaitingLine
from weft.runtime.backend import Step
from weft.runtime.defaults import ModelDefaults
from weft.runtime.exits import ExitSpec
from weft.runtime.facets import Batching, ModelExits, ModelResidency, SegmentTiming
from weft.runtime.onnxruntime_cpu.backend import CpuBackend
from weft.runtime.onnxruntime_cpu.model import CpuModel
from weft.serving.dispatch import Dispatcher
from weft.serving.exit_rules import ExitRules
from weft.serving.streams import ServedModel
from weft.serving.tickets import BatchWork, ClientTicket

PATIENCE_S = 600
"""After that a test that would hang fails instead; no test is meant to come near it."""


# Requests on simulated lanes


class Order(NamedTuple):
    """One request."""

    stream: int
    arrival: int
    due: int
    priority: int = 1
    strict: bool = False
    leaves: int = 0
    """After how many segments it is done; 0: after all."""
    sure: tuple[float, ...] = ()
    """How sure its answer is at each early exit, where that decides when it leaves."""


@dataclass(frozen=True)
class Kind:
    """One stream: the ticks of its segments at batch 1, 2, ..."""

    batches: tuple[tuple[int, ...], ...]
    timeout: int = 0
    exits: tuple[int, ...] = ()
    steering: Steering | None = None
    """How sure early answers must be."""
    places: int = NO_DEADLINE
    """Requests that may wait."""

    @property
    def programs(self) -> list[Program]:
        found = [
            program(f"b{size}", *[(0, ticks) for ticks in each]) for size, each in enumerate(self.batches, start=1)
        ]
        rates = (1 / (len(self.exits) + 1),) * (len(self.exits) + 1) if self.steering else ()
        return [replace(each, exits=self.exits, exit_rates=rates) for each in found]


def kind(*segments: int, batch: int = 1, timeout: int = 0) -> Kind:
    """A stream whose batches all cost the same."""
    return Kind((segments,) * batch, timeout)


@dataclass(frozen=True)
class Load:
    """All that a run on a host is given but its policy."""

    kinds: tuple[Kind, ...]
    orders: tuple[Order, ...]
    lanes: int = 1
    late: str = "keep"
    abortable: frozenset[int] = frozenset()
    """Streams whose segments may be stopped half-way."""
    abort_ticks: int = 0
    places: int = NO_DEADLINE
    """Requests that may wait in all."""
    ahead: int = 0
    """Segments that a lane takes besides the one that it computes."""
    apart: bool = False
    """Whether its lanes have memory of their own."""
    gated: bool = False
    """Whether the device has gates between segments."""
    launch: int = 0
    leave: int = 0
    """What it takes to start a batch on a device with gates, and to leave at one."""

    @property
    def terms(self) -> list[Terms]:
        first, found = 0, []
        for each in self.kinds:
            found.append(Terms(first, NO_DEADLINE, len(each.batches), each.timeout, 1))
            first += len(each.batches)
        return found

    @property
    def setting(self) -> Setting:
        gates = {"gated": self.gated, "launch": self.launch, "leave": self.leave}
        programs = tuple(replace(one, **gates) for each in self.kinds for one in each.programs)
        return Setting(
            programs,
            NO_BUFFER,
            rounds=1 << 40,
            lanes=self.lanes,
            ahead=self.ahead,
            apart=self.apart,
        )

    @property
    def abortable_programs(self) -> frozenset[int]:
        terms = self.terms
        return frozenset(
            terms[stream].programs + size for stream in self.abortable for size in range(terms[stream].max_batch)
        )


class Fate(NamedTuple):
    """What became of a request."""

    what: str
    when: int
    query: int = -1
    """Which batch of its stream it was in."""


class ListedFeed:
    """Hands out requests at their times and writes down what becomes of each."""

    def __init__(self, orders: Sequence[Order], kinds: Sequence[Kind] = ()) -> None:
        lines = [WaitingLine(each.places) for each in kinds]
        self.tickets = [
            Ticket(
                *order[:5],
                leaves=order.leaves,
                confidences=dict(zip(kinds[order.stream].exits, order.sure, strict=True)) if order.sure else None,
                line=lines[order.stream] if lines else None,
            )
            for order in sorted(orders, key=lambda order: order.arrival)
        ]
        self.fates: dict[Ticket, list[Fate]] = {ticket: [] for ticket in self.tickets}
        self.ended_batches: list[Batch] = []
        self.merges: list[tuple[int, int, int]] = []
        """Sizes of two batches that became one, and the layer at which they stood."""
        self._next = 0

    @property
    def arrivals(self) -> ListedFeed:
        return self

    def take(self, now: int) -> Iterator[Ticket]:
        while self._next < len(self.tickets) and self.tickets[self._next].arrival <= now:
            self._next += 1
            yield self.tickets[self._next - 1]

    def next_arrival(self) -> int:
        return self.tickets[self._next].arrival if self._next < len(self.tickets) else NO_DEADLINE

    def exhausted(self) -> bool:
        return self._next == len(self.tickets)

    def served(self, batch: Batch, completion: Completion) -> None:
        for ticket in batch.members:
            if not ticket.gone:
                self.fates[ticket].append(Fate("served", completion.times.compute_end, batch.query))
        self.ended_batches.append(batch)

    def leave(self, batch: Batch, completion: Completion) -> list[Ticket]:
        here = [ticket for ticket in batch.members if not ticket.gone]
        leaving = [ticket for ticket in here if _leaves(ticket, batch.layer)]
        for ticket in leaving:
            assert ticket.confidences or ticket.leaves == batch.layer, "it went past its exit"
            self.fates[ticket].append(Fate("served", completion.times.compute_end, batch.query))
        return [ticket for ticket in here if ticket not in leaving]

    def merged(self, batch: Batch, other: Batch) -> None:
        assert batch.layer == other.layer and not batch.running and not other.running
        self.merges.append((len(batch.members), len(other.members), batch.layer))

    def dropped(self, ticket: Ticket, now: int) -> None:
        self.fates[ticket].append(Fate("dropped", now))

    def refused(self, ticket: Ticket, now: int) -> None:
        self.fates[ticket].append(Fate("refused", now))

    def failed(self, batch: Batch, error: Exception) -> None:
        raise AssertionError("simulated layers do not fail") from error

    def ended(self, batch: Batch) -> None:
        self.ended_batches.append(batch)


def _leaves(ticket: Ticket, layer: int) -> bool:
    return ticket.confidences[layer] >= ticket.threshold if ticket.confidences else 0 < ticket.leaves <= layer


class Piece(NamedTuple):
    """A segment on a lane, to its end or to where it was stopped."""

    candidate: Candidate
    begin: int
    end: int
    aborted: bool
    layers: int | None = None
    """How many layers were computed where a start covers several."""

    @property
    def batch(self) -> tuple[int, int]:
        return self.candidate.stream, self.candidate.query


class WatchedHost(SimulatedHost):
    """A simulated host that remembers what it was told, and notices when nothing moves any more."""

    def __init__(self, load: Load) -> None:
        super().__init__(load.setting, load.abortable_programs, load.abort_ticks)
        self.pieces: list[Piece] = []
        self.issues: list[Candidate] = []
        self.aborts: list[tuple[int, Candidate]] = []
        layers = sum(max(map(len, load.kinds[order.stream].batches)) for order in load.orders)
        self._most_aborts = (2 + 4 * load.gated) * layers + 10
        self._still = 0

    def completions(self) -> list[Completion]:
        ended = super().completions()
        self.pieces += [
            Piece(c.candidate, c.times.compute_start, c.times.compute_end, c.aborted, c.layers) for c in ended
        ]
        return ended

    def submit(self, start: Start, batch: object = None) -> None:
        self._still = 0
        self.issues.append(start.candidate)
        super().submit(start)

    def stop(self, stream: int, query: int) -> None:
        running = [c.candidate for c in self._running if (c.candidate.stream, c.candidate.query) == (stream, query)]
        self.aborts += [(self.now(), candidate) for candidate in running]
        assert len(self.aborts) <= self._most_aborts, f"segments are stopped again and again: {self.aborts[-3:]}"
        super().stop(stream, query)

    def idle_until(self, tick: int) -> None:
        before = self.now()
        super().idle_until(tick)
        self._still = self._still + 1 if self.now() == before else 0
        assert self._still < 10, f"nothing moves any more at {before}"


@dataclass(frozen=True)
class Ran:
    """A run on a simulated host, looked at from inside."""

    load: Load
    feed: ListedFeed
    host: WatchedHost
    policy: Policy

    @property
    def issues(self) -> list[tuple[int, int, int]]:
        """Stream, query and layer, in the order they were issued."""
        return [(c.stream, c.query, c.layer) for c in self.host.issues]

    @property
    def letters(self) -> str:
        """The order of issues, a letter for each stream, a capital for the first segment of a batch."""
        return "".join("ABCDEF"[c.stream] if c.layer == 0 else "abcdef"[c.stream] for c in self.host.issues)

    @property
    def batches(self) -> dict[tuple[int, int], list[Piece]]:
        """What was computed of every batch, in order of time."""
        found: dict[tuple[int, int], list[Piece]] = {}
        for piece in sorted(self.host.pieces, key=lambda piece: (piece.begin, piece.end)):
            found.setdefault(piece.batch, []).append(piece)
        return found

    @property
    def fates(self) -> list[tuple[str, int]]:
        """What became of each request and when, in order of arrival."""
        return [(fate.what, fate.when) for (fate,) in map(self.feed.fates.__getitem__, self.feed.tickets)]

    @property
    def ends(self) -> list[int]:
        """When each request was served, in order of arrival; -1 for one that was dropped."""
        return [fate.when if fate.what == "served" else -1 for (fate,) in map(self.feed.fates.get, self.feed.tickets)]

    @property
    def on_time(self) -> int:
        """Requests that were served by their deadline."""
        return sum(0 <= end <= ticket.due for end, ticket in zip(self.ends, self.feed.tickets, strict=True))


def run_load(policy: str, load: Load, **options: Option) -> Ran:
    """Serve a load on a simulated host, as the engine does."""
    setting = load.setting
    chooser = make_policy(policy, setting, options)
    feed, host = ListedFeed(load.orders, load.kinds), WatchedHost(load)
    remaining = [each.remaining for each in setting.programs]
    engine, source = request_engine(chooser, feed, host, remaining, late=load.late, places=load.places)
    for term, each in zip(load.terms, load.kinds, strict=True):
        source.open(term, Steered(each.steering) if each.steering else None)
    engine.run()
    return Ran(load, feed, host, chooser)


@st.composite
def loads(
    draw: st.DrawFn,
    *,
    timeouts: Sequence[int] = (0, 0, 0, 5, 30),
    most_lanes: int = 3,
    streams: int = 4,
    orders: int = 24,
    soft: bool = False,
    layers: tuple[int, int] = (0, 12),
) -> Load:
    """A random load; larger batches cost at least as much, and segments may cost nothing.

    soft: no request is strict, and late ones are served like others. layers: least and most ticks of a segment.
    """
    kinds = []
    for _ in range(draw(st.integers(1, streams))):
        ticks = draw(st.lists(st.integers(*layers), min_size=1, max_size=4).filter(any))
        more = draw(st.integers(0, 3))
        sizes = range(draw(st.integers(1, 4)))
        kinds.append(
            Kind(tuple(tuple(t + more * size for t in ticks) for size in sizes), draw(st.sampled_from(timeouts)))
        )
    one = st.builds(
        lambda stream, arrival, given, priority, strict: Order(stream, arrival, arrival + given, priority, strict),
        st.integers(0, len(kinds) - 1),
        st.integers(0, 150),
        st.integers(0, 40) | st.sampled_from([1, 100, 1000]),
        st.sampled_from([1, 3, 9]),
        st.just(False) if soft else st.booleans(),
    )
    return Load(
        tuple(kinds),
        tuple(draw(st.lists(one, max_size=orders))),
        lanes=draw(st.integers(1, most_lanes)),
        late="keep" if soft else draw(st.sampled_from(SOFT)),
        abortable=frozenset(draw(st.sets(st.integers(0, len(kinds) - 1)))),
        abort_ticks=draw(st.sampled_from([0, 0, 1, 3])),
    )


# A real dispatcher on a clock that jumps

MS = 1_000_000
FREE = Gates(gate_us=0, leave_us=0, launch_us=0)
"""Gates that cost nothing."""
"""A millisecond in ticks of the server's clock."""


class JumpingClock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.ticks = 1_000 * MS

    def monotonic_ns(self) -> int:
        return self.ticks


@dataclass(eq=False)
class Timer:
    due: int
    callback: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class JumpingLoop:
    """As much of an event loop as a dispatcher needs; callbacks run when ``turn`` is called."""

    def __init__(self, clock: JumpingClock) -> None:
        self._clock = clock
        self._soon: list[Callable[[], None]] = []
        self._timers: list[Timer] = []
        self.woken: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """What lanes say: callbacks, and of a ``Stage`` what they begin with."""

    def call_soon(self, callback: Callable[..., None], *args: Any) -> None:
        self._soon.append(lambda: callback(*args))

    def call_soon_threadsafe(self, callback: Callable[..., None], *args: Any) -> None:
        self.woken.put(lambda: callback(*args))

    def call_later(self, delay_s: float, callback: Callable[..., None], *args: Any) -> Timer:
        self._timers.append(Timer(self._clock.ticks + round(delay_s * 1e9), lambda: callback(*args)))
        return self._timers[-1]

    def hear(self) -> Any:
        """Wait for what a lane says next: callbacks run in the next turn, anything else is returned."""
        said = self.woken.get(timeout=PATIENCE_S)
        if not callable(said):
            return said
        self._soon.append(said)
        return None

    def next_timer(self) -> int:
        return min((timer.due for timer in self._timers if not timer.cancelled), default=NO_DEADLINE)

    def turn(self) -> None:
        """Run all that is due at this instant."""
        while True:
            due = [timer for timer in self._timers if timer.due <= self._clock.ticks]
            self._timers = [timer for timer in self._timers if timer not in due]
            ready, self._soon = self._soon, []
            if not ready and not due:
                return
            for callback in ready:
                callback()
            for timer in due:
                if not timer.cancelled:
                    timer.callback()


class Stage:
    """Where the segments of scripted models take their time: on a lane until the test lets it go on."""

    def __init__(self, clock: JumpingClock, begun: queue.SimpleQueue[Any]) -> None:
        """*begun*: told of a lane's name and how long it will take what it begins with."""
        self._clock, self.begun = clock, begun
        self._gates: dict[str, queue.SimpleQueue[Exception | None]] = {}

    def gate(self, lane: str) -> queue.SimpleQueue[Exception | None]:
        return self._gates.setdefault(lane, queue.SimpleQueue())

    def perform(self, ticks: int) -> None:
        name = threading.current_thread().name
        if not name.startswith("lane-"):  # on the dispatcher's own thread
            self._clock.ticks += ticks
            return
        gate = self.gate(name)
        self.begun.put((name, ticks))
        verdict = gate.get(timeout=PATIENCE_S)
        if verdict is not None:
            raise verdict


@dataclass(frozen=True)
class Away(ModelResidency):
    """Memory of a device that a model has left, and so many seconds to come back."""

    away_s: float = 0.0


class Scripted(ModelDefaults):
    """Stands for a prepared model: segments take as long as they are said to, and double their input.

    ms: milliseconds of each segment at batch 1, 2, ...; factor: how much longer they really take than was measured;
    poison: rows that hold this value make a segment fail; steady: whether they never take longer than expected;
    exits: after how many segments samples may leave, the columns of the input being how sure they are there;
    away_s: how long it takes to come back to the device's memory.
    """

    def __init__(
        self,
        stage: Stage,
        *ms: Sequence[float],
        factor: float = 1.0,
        poison: float | None = None,
        steady: bool = True,
        exits: tuple[int, ...] = (),
        measured: bool = True,
        batchable: bool = True,
        away_s: float = 0.0,
        gated: bool = False,
    ) -> None:
        self._stage, self._ms, self._factor, self._poison = stage, ms, factor, poison
        # a batch that is larger than the largest one takes as long as that
        times_s = {size: tuple(each / 1e3 for each in ms[min(size, len(ms)) - 1]) for size in range(1, 65)}
        shapes = {"x": (1, max(1, len(exits)))} if measured else None
        self.timing = SegmentTiming((steady,) * len(ms[0]), times_s, shapes, gated=gated, gates=FREE)
        self.batching = Batching(batchable, len(ms), any_shapes=True, mergeable=True)
        specs = [ExitSpec(output=f"y{end}", segment=end - 1) for end in (*exits, len(ms[0]))]
        self.exits = ModelExits(tuple(specs), "probabilities") if exits else None
        self._specs = self.exits.specs if self.exits else ()
        self._exit_at, self.rowless = {each.segment: each.output for each in self._specs}, {}
        self.residency = Away(away_s=away_s)
        self.segments = tuple(f"s{index}" for index in range(len(ms[0])))
        self.ran: Counter[int] = Counter()
        self.closed = False

    def run_segment(self, index: int, values: dict[str, Any], options: Any = None) -> dict[str, Any]:
        assert not self.closed, "a segment of a closed model runs"
        self.ran[index] += 1
        rows = len(values["x"])
        if options is not None:  # else it is one of several, and the step has taken its time
            self._stage.perform(round(self._ms[min(rows, len(self._ms)) - 1][index] * self._factor * MS))
        if self._poison is not None and (values["x"] == self._poison).any():
            raise ValueError(f"{self._poison} is poison")
        if index == len(self.segments) - 1:
            return {self._specs[-1].output if self.exits else "y": values["x"] * 2}
        here = [number for number, each in enumerate(self._specs) if each.segment == index]
        return {"x": values["x"]} | {self._specs[n].output: values["x"][:, n : n + 1] for n in here}

    start, compute, gather, _gather_rows = CpuModel.start, CpuModel.compute, CpuModel.gather, CpuModel._gather_rows

    def segment_ticks(self, step: Step) -> list[int]:
        """What each segment of a step takes."""
        ms = self._ms[min(step.rows, len(self._ms)) - 1][step.segment : step.segment + step.segments]
        return [round(each * self._factor * MS) for each in ms]

    def wait(self, ticks: int) -> None:
        self._stage.perform(ticks)

    def close(self) -> None:
        self.closed = True


@dataclass(eq=False)
class Sent:
    """A request a machine took, and all replies to it."""

    ticket: ClientTicket
    inputs: dict[str, np.ndarray]
    replies: list[tuple[int, Any]] = field(default_factory=list)
    """When, and what."""

    @property
    def outcome(self) -> Any:
        ((_, outcome),) = self.replies
        return outcome

    @property
    def end_ms(self) -> float:
        ((end, _),) = self.replies
        return end / MS

    @property
    def fate(self) -> str:
        return "served" if isinstance(self.outcome, dict) else self.outcome.reason


def count(ticket: ClientTicket, outcome: Any, now: int) -> None:
    """Count the outcome of a request as a face of the server does, which hands it to the client."""
    ticket.settle(now, outcome if isinstance(outcome, RequestError) else None)


class Machine:
    """A dispatcher with real lanes, driven from instant to instant."""

    def __init__(
        self,
        monkeypatch: Any,
        policy: str = "punctual",
        *,
        lanes: int = 1,
        ahead: int = 0,
        apart: bool = False,
        **settings: Any,
    ) -> None:
        self.clock = JumpingClock()
        self.start = self.clock.ticks
        self.loop = JumpingLoop(self.clock)
        self.stage = Stage(self.clock, self.loop.woken)
        now = self.clock.monotonic_ns
        backend = AheadBackend(now, ahead, apart) if ahead else CpuBackend(now)
        self.dispatcher = Dispatcher(self.loop, policy, backend=backend, lanes=lanes, **settings)  # type: ignore[arg-type]
        self.issues: list[tuple[int, int, int]] = []
        """Stream, query and layer, in the order they were issued."""
        self._submit, self.dispatcher.lanes.submit = self.dispatcher.lanes.submit, self._issued  # type: ignore[method-assign]
        self._begun: dict[str, int] = {}
        """Lanes that have begun something that is not known here yet, and how long it takes."""
        self._ends: dict[str, tuple[Any, int]] = {}
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self.sent: list[Sent] = []

    @property
    def now_ms(self) -> float:
        return (self.clock.ticks - self.start) / MS

    def model(self, *ms: Sequence[float], name: str = "", **scripted: Any) -> ServedModel:
        """A scripted model; what is not about its segments goes to the dispatcher."""
        terms = {
            key: scripted.pop(key) for key in ("queue_size", "batch_timeout_ms", "max_compute_s") if key in scripted
        }
        steering = scripted.pop("steering", None)
        prepared: Any = Scripted(self.stage, *ms, **scripted)
        if steering:
            terms["exit_rules"] = ExitRules(prepared.exits, steering)
        return ServedModel(name or f"m{len(self.sent)}", prepared, **terms)

    def send(
        self,
        model: ServedModel,
        due_ms: float = 1000,
        *,
        rows: int = 1,
        value: float = 1.0,
        sure: Sequence[float] | None = None,
        reply: Any = None,
        **ask: Any,
    ) -> Sent:
        """Submit a request that is due so many milliseconds from now; what refuses it passes through."""
        inputs = {"x": np.full((rows, 1), value, np.float32) if sure is None else np.array([sure], np.float32)}
        sent = Sent(None, inputs)  # type: ignore[arg-type]

        def replied(ticket: ClientTicket, outcome: Any) -> None:
            count(ticket, outcome, self.clock.ticks)
            sent.replies.append((self.clock.ticks - self.start, outcome))
            if reply:
                reply(ticket, outcome)

        sent.ticket = ClientTicket(model, inputs, replied, self.clock.ticks + round(due_ms * MS), **ask)
        self.dispatcher.submit(sent.ticket)
        self.sent.append(sent)
        return sent

    def offer(self, model: ServedModel, due_ms: float, **how: Any) -> None:
        """Submit a request; if it is refused, that is its reply."""
        try:
            self.send(model, due_ms, **how)
        except RequestError as error:
            self.sent.append(Sent(None, {}, [(self.clock.ticks - self.start, error)]))  # type: ignore[arg-type]

    def at(self, ms: float, action: Callable[[], Any]) -> None:
        """Do that later, before the dispatcher looks."""
        self._agenda.append((self.start + round(ms * MS), len(self._agenda), action))

    def run(self, until_ms: float | None = None) -> None:
        """Let time pass until then, or until nothing is left to do."""
        until = NO_DEADLINE - 1 if until_ms is None else self.start + round(until_ms * MS)
        while True:
            self.loop.turn()
            self._meet()
            if self._let_go():
                continue
            events = [
                self.loop.next_timer(),
                *map(self._end_of, self._ends),
                *(at for at, _, _ in self._agenda),
            ]
            upcoming = min(events)
            if upcoming > until:
                break
            self.clock.ticks = max(self.clock.ticks, upcoming)
            self._let_go()
            due = [entry for entry in self._agenda if entry[0] <= self.clock.ticks]
            for entry in sorted(due, key=lambda entry: entry[:2]):
                self._agenda.remove(entry)
                entry[2]()
        if until_ms is not None:
            self.clock.ticks = max(self.clock.ticks, until)

    def close(self) -> None:
        for name in self._ends:
            for _ in range(1 + self.dispatcher.lanes.ahead):
                self.stage.gate(name).put(None)
        self.dispatcher.close()

    def _issued(self, start: Start, batch: object = None) -> None:
        candidate = start.candidate
        self.issues.append((candidate.stream, candidate.query, candidate.layer))
        self._submit(start, batch)

    def _meet(self) -> None:
        """Wait until every lane that was given something has begun it, or has failed at once."""
        while waiting := [name for name in self._heads() if name not in self._ends]:
            while waiting[0] not in self._begun and not self._hear():
                pass
            self.loop.turn()
            for name, task in self._heads().items():
                if name in self._begun:
                    self._ends[name] = task, self.clock.ticks + self._begun.pop(name)

    def _heads(self) -> dict[str, Any]:
        """What each lane computes, by its name."""
        lanes = self.dispatcher.lanes.lanes
        return {lane.device.thread.name: lane.task for lane in lanes if lane.task and lane.task.started}

    def _hear(self) -> bool:
        """Wait for what a lane says next: whether something has ended."""
        begun = self.loop.hear()
        if begun:
            self._begun[begun[0]] = begun[1]
        return begun is None

    def _let_go(self) -> int:
        """Let lanes go on whose segment ends now, and wait until they have reported."""
        over = [name for name in self._ends if self._end_of(name) <= self.clock.ticks]
        for name in over:
            task, _ = self._ends.pop(name)
            self.stage.gate(name).put(InterruptedError("stopped") if task.aborted and not task.layers else None)
            ends = 1 + self._revoked_behind(task)
            while ends:
                ends -= self._hear()
        return len(over)

    def _end_of(self, name: str) -> int:
        """When what a lane computes ends: at once if it was stopped, unless it leaves at a gate."""
        task, end = self._ends[name]
        if task.layers:
            return task.run.ends_at
        return self.clock.ticks if task.aborted else end

    def _revoked_behind(self, task: Any) -> int:
        """How many that wait behind a task were revoked, and leave as soon as their lane comes to them."""
        (tasks,) = [lane.tasks for lane in self.dispatcher.lanes.lanes if task in lane.tasks]
        behind = tasks[tasks.index(task) + 1 :]
        return len(list(takewhile(lambda one: one.layers and one.aborted, behind)))


def begun(machine: Machine, tickets: list[ClientTicket], kind: type[BatchWork] = BatchWork) -> BatchWork:
    """A batch of requests that were sent, which no lane knows of."""
    return kind(machine.dispatcher.streams[tickets[0].stream], Batch(0, 0, [*tickets]), tickets)


def compute_here(batch: BatchWork, segment: int) -> None:
    """Run a segment of a batch on this thread."""
    prepared: Any = batch.model.loaded
    batch.take(segment, prepared.compute(batch.step(segment)))


class Staged:
    """A prepared model whose segments compute real tensors and take the time they are told to."""

    def __init__(
        self, machine: Machine, model: Any, ms: float, each_ms: float, rows_of: Callable[[int, dict[str, Any]], int]
    ) -> None:
        self._stage, self._model, self._ms, self._each_ms = machine.stage, model, ms, each_ms
        self._rows_of = rows_of
        times_s = {size: ((ms + each_ms * size) / 1e3,) * len(model.segments) for size in range(1, 65)}
        self.timing = replace(model.timing, times_s=times_s)
        self.ran: list[tuple[int, int]] = []
        """Segment and rows, of those that were not stopped."""
        self.fails: Callable[[int, dict[str, Any]], bool] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    start, compute = CpuModel.start, CpuModel.compute

    def run_segment(self, index: int, values: dict[str, Any], options: Any = None) -> dict[str, Any]:
        made = self._model.run_segment(index, values)  # it is stopped where it takes its time
        rows = self._rows_of(index, values)
        self._stage.perform(round((self._ms + self._each_ms * rows) * MS))
        self.ran.append((index, rows))
        if self.fails and self.fails(index, values):
            raise ValueError("this batch cannot be computed")
        return made


def assert_at_rest(machine: Machine, *models: ServedModel) -> None:
    """Nothing is left over, and everybody was answered once."""
    assert (machine.dispatcher.pending, machine.dispatcher.waiting) == (0, 0)
    assert all(len(sent.replies) == 1 for sent in machine.sent)
    for model in models:
        assert model.leases == 0
        assert model.line.waiting == 0
