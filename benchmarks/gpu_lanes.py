"""Torch models in segments on shares of a GPU, as an executor for weft's engine: no server, no other process.

The engine runs on one thread, which starts captured segments on the streams of lanes and polls for their ends. A
segment is captured once for the whole GPU, once with high priority and once for each partition. Its outputs are in
memory that all captures share, so that a model can continue on another lane. With gates, all segments of a capture are
one graph besides, which leaves at a gate when the engine stops it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from gpu_pairs import MODELS, Encoder, nodes

from weft.devices import Host, HostModel
from weft.devices.decoupled import DeviceClocks, LayerTimes
from weft.devices.gpu_pairs import HAND_OVER_S, read_pairs
from weft.devices.host import GpuCuts
from weft.devices.shares import GpuLikeness
from weft.engine.engine import Completion
from weft.engine.lane_queues import DEVICE_AHEAD
from weft.engine.policies import Setting
from weft.engine.policies.base import Candidate, LaneState, Running, Start
from weft.runtime.backend import Ended, Step, StepEnd, StepOutput
from weft.runtime.cuda.gates import REFUSED, Computed, SegmentSpan
from weft.runtime.cuda.gpu import _new_stream
from weft.runtime.cuda.gpu_gates import GatedGraph, GateKernels, GpuGateMemory, RegisteredStops
from weft.runtime.cuda.partitions import LOW, Part, another_stream, bindings, cut
from weft.runtime.isolated.stop_table import StopTable, map_stops
from weft.runtime.lanes import Lane, LaneExecutor
from weft.serving.gpu_sharing import GpuSharing, LaneRun

CUT_OFF = (48, 64)
REPEATS = 7
STREAMS = 4
HIGH = -1
"""The variant of a segment for the stream of high priority; others are numbers of parts, 0 the whole."""


class Ends:
    """Events that mark the ends of segments on a stream; they are of its own context, and used again."""

    def __init__(self, stream: Any, part: Part | None) -> None:
        self._driver = bindings()
        self.stream, self._part = self._driver.CUstream(stream.cuda_stream), part
        self._free: list[Any] = []
        self._not_yet = self._driver.CUresult.CUDA_ERROR_NOT_READY

    def mark(self) -> Any:
        """The end of all that was started."""
        event = self._free.pop() if self._free else self._create_event()
        checked(self._driver.cuEventRecord(event, self.stream))
        return event

    def passed(self, event: Any) -> bool:
        """Whether that was reached; the event is not asked again then."""
        answer = self._driver.cuEventQuery(event)
        if answer[0] == self._not_yet:
            return False
        checked(answer)
        self._free.append(event)
        return True

    def _create_event(self) -> Any:
        driver = self._driver
        if self._part:
            (own,) = checked(driver.cuCtxFromGreenCtx(self._part.context))
            checked(driver.cuCtxPushCurrent(own))
        (event,) = checked(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        if self._part:
            checked(driver.cuCtxPopCurrent())
        return event


def checked(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the driver says besides that all went well."""
    result, *found = answer
    if int(result):
        raise RuntimeError(f"the driver says {result.name}")
    return tuple(found)


class TorchGpu:
    """The GPU, cut, with a stream for every lane."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        both = [cut(0, length) for length in CUT_OFF]
        self.parts = [part for small, large in both for part in (large, small)]
        self.cuts = GpuCuts(sms=sms, cuts=tuple((large.sms, small.sms) for small, large in both), streams=STREAMS)
        low = [torch.cuda.Stream(priority=0) for _ in range(STREAMS)]
        parts = [torch.cuda.ExternalStream(part.streams[LOW]) for part in self.parts]
        self._streams = [*low, torch.cuda.Stream(priority=-3), *parts]

    @cached_property
    def gates(self) -> tuple[GateKernels, RegisteredStops, StopTable]:
        """What gates need; ``NoGates`` if the GPU cannot have them."""
        table = StopTable()
        return GateKernels(0), RegisteredStops(map_stops(os.dup(table.file)), 0), table

    def variant(self, lane: int) -> int:
        """Which captures a lane replays."""
        return HIGH if lane == STREAMS else self.cuts.part_of(lane)

    def stream(self, lane: int) -> Any:
        return self._streams[lane]

    def ends(self, lane: int) -> Ends:
        part = self.cuts.part_of(lane)
        return Ends(self._streams[lane], self.parts[part - 1] if part else None)

    def capturing(self, variant: int) -> Any:
        """A stream to capture on that nobody else has."""
        if variant == HIGH:
            return torch.cuda.Stream(priority=-3)
        return torch.cuda.ExternalStream(another_stream(self.parts[variant - 1]) if variant else _new_stream())


class Segments:
    """A model in segments, captured on all shares; *gates*: whether they are joined to graphs with gates, too."""

    def __init__(self, gpu: TorchGpu, name: str, segment_ms: float, *, gates: bool = False) -> None:
        self.name = name
        kind, rows = name.rstrip("*").split("-b")
        make, shape = MODELS[kind]
        with torch.device("cuda"):
            torch.set_default_dtype(torch.float16)
            module = make(int(rows)).eval().requires_grad_(False)
            given = torch.randn(int(rows), *shape)
            torch.set_default_dtype(torch.float32)
        if len(shape) == 3:
            module = module.to(memory_format=torch.channels_last)
            given = given.contiguous(memory_format=torch.channels_last)
        self._pool, self.kernels = torch.cuda.graph_pool_handle(), 0
        self._parts = self._divided([half for segment in module for half in halves(segment)], given, segment_ms)
        self._memory = self._laid_out(given)
        self._graphs = {index: self._captured(gpu.capturing(index)) for index in range(HIGH, len(gpu.parts) + 1)}
        self._launch = bindings().cuGraphLaunch
        self._runnable = {variant: [runnable(graph) for graph in graphs] for variant, graphs in self._graphs.items()}
        self.times_s, self.speeds = self._measured(gpu)
        self._generation = 0  # launches that gates have ended
        if gates:
            kernels, stops, _ = gpu.gates
            self._gate_memory = GpuGateMemory(stops, torch.device("cuda"), 0)
            self._gated = {
                variant: GatedGraph(
                    kernels,
                    self._gate_memory,
                    [graph.raw_cuda_graph() for graph in graphs],
                    gpu.parts[variant - 1] if variant > 0 else None,
                )
                for variant, graphs in self._graphs.items()
            }

    @property
    def count(self) -> int:
        return len(self._parts)

    def replay(self, variant: int, segment: int, stream: Any) -> None:
        """Start a segment; torch's own call wants the stream to be the current one, which takes longer."""
        checked(self._launch(self._runnable[variant][segment], stream))

    def launch(self, variant: int, first: int, segments: int, slot: int, stream: Any) -> Computed:
        """Start several segments, which leave at a gate when *slot* of the stop table is stopped."""
        graph, span = self._gated[variant], SegmentSpan(first, first + segments, slot, self._generation)
        ended = self._gate_memory.launch(lambda: graph.launch(int(stream)), span, [])

        def computed() -> int:
            count = ended()
            self._generation += 0 <= count < segments
            return 0 if count == REFUSED else count

        return computed

    def _divided(self, layers: Sequence[Any], given: Any, segment_ms: float) -> list[Any]:
        """Layers in groups that take about as long, by what each of them takes in a graph."""
        times, x = [], given
        with torch.inference_mode():
            for layer in layers:
                graph, stream = torch.cuda.CUDAGraph(), torch.cuda.ExternalStream(_new_stream())
                with torch.cuda.stream(stream):
                    for _ in range(3):
                        layer(x)
                    stream.synchronize()
                    graph.capture_begin(capture_error_mode="relaxed")
                    y = layer(x)
                    graph.capture_end()
                    times.append(timed(graph.replay, stream, 0.002))
                x = y.clone()
        count = max(1, round(sum(times) * 1e3 / segment_ms))
        groups, done, each = [[] for _ in range(count)], 0.0, sum(times) / count
        for layer, took in zip(layers, times, strict=True):
            groups[min(count - 1, int((done + took / 2) / each))].append(layer)
            done += took
        return [group for group in groups if group]

    def _laid_out(self, given: Any) -> list[Any]:
        """What every segment begins with."""
        results = [given]
        with torch.inference_mode():
            for part in self._parts[:-1]:
                results.append(torch.empty_like(through(part, results[-1])))
        return results

    def _captured(self, stream: Any) -> list[Any]:
        results = []
        with torch.inference_mode(), torch.cuda.stream(stream):
            for at, part in enumerate(self._parts):

                def run(at: int = at, part: Any = part) -> Any:
                    made = through(part, self._memory[at])
                    return made if at == len(self._parts) - 1 else self._memory[at + 1].copy_(made)

                for _ in range(3):
                    run()
                stream.synchronize()
                graph = torch.cuda.CUDAGraph(keep_graph=True)
                graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
                try:
                    self._out = run()
                finally:
                    graph.capture_end()
                self.kernels += nodes(graph.raw_cuda_graph())
                graph.instantiate()
                results.append(graph)
        return results

    def _measured(self, gpu: TorchGpu) -> tuple[tuple[float, ...], dict[int, float]]:
        """Seconds of every segment alone on the whole GPU, and the speed of all of them on each part."""
        self.kernels //= len(self._graphs)
        whole = [timed(graph.replay, gpu.stream(0)) for graph in self._graphs[0]]
        all_s = self._through(0, gpu.stream(0))
        speeds = {gpu.cuts.sms: 1.0}
        for part, sms in enumerate(gpu.cuts.parts, 1):
            speeds[sms] = min(1.5, all_s / self._through(part, gpu.stream(gpu.cuts.lane_of(part))))
        return tuple(time_s * all_s / sum(whole) for time_s in whole), speeds

    def _through(self, variant: int, stream: Any) -> float:
        def run() -> None:
            for graph in self._graphs[variant]:
                graph.replay()

        return timed(run, stream)


def runnable(graph: Any) -> Any:
    """A captured graph as the driver starts it."""
    driver = bindings()
    return checked(driver.cuGraphInstantiate(driver.CUgraph(graph.raw_cuda_graph()), 0))[0]


def halves(layer: Any) -> list[Callable[[Any], Any]]:
    """The parts of a layer that can be segments of their own."""
    return [layer.attend, layer.feed] if isinstance(layer, Encoder) else [layer]


def through(parts: Sequence[Callable[[Any], Any]], x: Any) -> Any:
    for part in parts:
        x = part(x)
    return x


def timed(run: Callable[[], None], stream: Any, least_s: float = 0.01) -> float:
    """Seconds of one run among many, one after another; the least of some tries."""
    results = []
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        began_s = time.perf_counter()
        run()
        stream.synchronize()
        count = max(2, int(least_s / max(1e-6, time.perf_counter() - began_s)))
        for _ in range(REPEATS):
            began_s = time.perf_counter()
            for _ in range(count):
                run()
            stream.synchronize()
            results.append((time.perf_counter() - began_s) / count)
    return min(results)


def measured_host(gpu: TorchGpu, models: Sequence[Segments]) -> Host:
    """The GPU with these models as a device, to simulate as well."""
    known, found = read_pairs(), {}
    for model in models:
        total_s = sum(model.times_s)
        memory = min(1.0, known.models[model.name.rstrip("*")].gb / total_s / known.gb_per_s)
        like = GpuLikeness(speeds=model.speeds, kernel_us=total_s * 1e6 / max(1, model.kernels), memory=memory)
        names = tuple(f"part {at}" for at in range(model.count))
        found[model.name] = HostModel(segments=names, times_s={1: model.times_s}, like={1: like})
    source = f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}"
    lanes: dict[str, Any] = {"lanes": 1, "ahead": DEVICE_AHEAD, "hand_over_s": (HAND_OVER_S,)}
    return Host(name="cuda:0", source=source, cores=2, gpu=gpu.cuts, models=found, **lanes)


class _Flight(NamedTuple):
    began: int
    mark: Any
    ended: Ended
    started: _Started


class _Started:
    """Segments that were started."""

    error = None

    def __init__(self, onward: Sequence[StepOutput] | None = None) -> None:
        self.onward = onward

    def stop(self) -> None:
        """Do nothing: one segment runs to its end."""

    def computed(self) -> int | None:
        """How many segments were computed, once they have ended; None: all."""
        return None


class _Gated(_Started):
    """Segments that leave at a gate when they are stopped."""

    def __init__(self, table: StopTable, model: Any, variant: int, step: Step, stream: Any) -> None:
        super().__init__()
        self._table, self._slot, self._segments = table, table.take(), step.segments
        self._count = model.launch(variant, step.segment, step.segments, self._slot, stream)

    def stop(self) -> None:
        self._table.stop(self._slot)

    def computed(self) -> int | None:
        self._table.release(self._slot)
        count = self._count()
        return None if count == self._segments else count


class PolledLane:
    """Starts segments on a stream, and tells of their ends when it is asked to look."""

    ahead, apart, able = DEVICE_AHEAD, False, True

    def __init__(self, index: int, gpu: Any, now: Callable[[], int], *, gated: bool = False) -> None:
        self._now, self._variant, self._ends = now, gpu.variant(index), gpu.ends(index)
        self._table = gpu.gates[-1] if gated else None
        self._flights: deque[_Flight] = deque()

    def start(self, model: Any, step: Step, ended: Ended) -> _Started:
        began, stream = self._now(), self._ends.stream
        if self._table:
            started: _Started = _Gated(self._table, model, self._variant, step, stream)
        else:
            model.replay(self._variant, step.segment, stream)
            started = _Started(() if step.segment + 1 < model.count else None)
        self._flights.append(_Flight(began, self._ends.mark(), ended, started))
        return started

    @property
    def busy(self) -> bool:
        return bool(self._flights)

    def look(self) -> bool:
        """Tell of what has ended."""
        found = False
        while self._flights and self._ends.passed(self._flights[0].mark):
            flight, found = self._flights.popleft(), True
            flight.ended(StepEnd(flight.began, self._now(), computed=flight.started.computed()))
        return found

    def close(self, patience_s: float | None = None) -> bool:
        return True


class _Work(NamedTuple):
    """Batches of a model; what they hold lies where the model's segments look for it."""

    model: Any
    body: int
    timing: Any

    @property
    def loaded(self) -> _Work:
        return self

    def step(self, segment: int) -> Step:
        return Step(segment, (), rows=1)

    def start(self, step: Step, lane: Any, ended: Ended, *, here: bool) -> _Started:
        return lane.start(self.model, step, ended)

    def take(self, segment: int, outputs: Sequence[StepOutput]) -> None:
        """Nothing is handed on but by memory."""


class GpuLanes:
    """The executor: weft's own lanes over streams of a GPU that are looked at."""

    inline = False

    def __init__(self, gpu: Any, models: Sequence[Any], setting: Setting, sharing: GpuSharing | None) -> None:
        """models: of each stream. sharing: what learns of pairs."""
        self._gpu, self._sharing, self._began = gpu, sharing, time.perf_counter_ns()
        self._gated = any(program.gated for program in setting.programs)
        self._works = [
            _Work(model, at, SimpleNamespace(steady=all_known, foreseen=all_known))
            for at, model in enumerate(models)
            for all_known in [(True,) * model.count]
        ]
        self.log: list[tuple[Candidate, LayerTimes]] = []
        self.spans: list[tuple[int, int, int, int]] = []
        """Stream, lane, and when it ran."""
        self.waited_ns = 0
        """How long there was nothing to do but wait."""
        self._unlearned: deque[tuple[LaneRun, int, list[LaneRun]]] = deque()
        self._polled: list[PolledLane] = []
        count = len(setting.shares.lanes) if setting.shares else 1
        self.lanes = LaneExecutor(
            self,
            count,
            lambda candidate, _: (self._works[candidate.stream], False),
            lambda: None,
            shares=setting.shares is not None,
        )
        self.lanes.watch = self._watch

    def now(self) -> int:
        return time.perf_counter_ns() - self._began

    def lane(self, index: int, *, pin: bool = False) -> PolledLane:
        self._polled.append(PolledLane(index, self._gpu, self.now, gated=self._gated))
        return self._polled[-1]

    def _watch(self, lane: int, completion: Completion) -> None:
        candidate, times = completion.candidate, completion.times
        self.log.append((candidate, times))
        self.spans.append((candidate.stream, lane, times.compute_start, times.compute_end))
        if self._sharing:
            now = self.now()
            running = [
                LaneRun(lane.index, lane.task.candidate.program, lane.task.began, now)
                for lane in self.lanes.lanes
                if lane.task and lane.task.began is not None
            ]
            ran = LaneRun(lane, candidate.program, times.compute_start, times.compute_end)
            self._unlearned.append((ran, candidate.compute, running))

    def _learn(self) -> None:
        """What has ended is learned of when lanes have something to do again."""
        while self._unlearned and self._sharing:
            self._sharing.observe(*self._unlearned.popleft())

    def completions(self) -> list[Completion]:
        for run in self._polled:
            run.look()
        return self.lanes.completions()

    def idle_until(self, tick: int) -> None:
        """Until then or the next end; not at all where something has come meanwhile."""
        self._learn()
        began = self.now()
        while self.now() < tick and not any([run.look() for run in self._polled]):
            pass
        self.waited_ns += self.now() - began

    def drain(self) -> None:
        """Wait for what is still under way."""
        while any(run.busy for run in self._polled):
            self.completions()

    def ready(self) -> DeviceClocks | None:
        return self.lanes.ready()

    def held(self) -> tuple[LaneState, ...]:
        return self.lanes.held()

    @property
    def queues(self) -> Sequence[Lane]:
        return self.lanes.queues

    def submit(self, start: Start, batch: object = None) -> None:
        self.lanes.submit(start, batch)

    def abortable(self) -> tuple[Running, ...]:
        return self.lanes.abortable()

    def stop(self, stream: int, query: int) -> None:
        self.lanes.stop(stream, query)

    def rests(self) -> Sequence[tuple[Candidate, int]]:
        return self.lanes.rests()

    def joined(self, stream: int, query: int, other: int) -> None:
        self.lanes.joined(stream, query, other)

    def rooms(self) -> list[int]:
        return self.lanes.rooms()
