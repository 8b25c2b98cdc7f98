"""Time and memory of the ways to run many models in torch: ``prepare``, ``times_ms``.

``GraphClock``, a ``GraphCost``, times graphs at a ``Place``; ``plan_for`` chooses forms for that place by these times.

Memory is what torch's allocator has handed out: the weights and tables that stay, and the peak that a run adds to them
(activations, workspaces) once cuDNN has chosen its algorithms, whose trials are not counted. Branches that run at the
same time count together. Without CUDA a way is not captured, and its memory is not known.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from weft.runtime.timing import Run, mean_seconds, measure_in_turns
from weft_stitch.cost import H200, Modelled
from weft_stitch.family import Family, Sharing
from weft_stitch.forms import FORMS
from weft_stitch.graph import Graph
from weft_stitch.planning.planner import Plan, plan
from weft_stitch.running.kernel_shapes import tune
from weft_stitch.running.module import WARM_UPS, StitchedModule, warm_up
from weft_stitch.running.operators import Tensor, torch

UNCAPTURED = ("eager", "grouped-eager")
"""Ways that launch every operation anew; all others are replayed as one CUDA graph."""
LOAD_BYTES = 16
"""Bytes of one vector load of the fused kernel."""

Outputs = tuple[Tensor, ...]
Call = Callable[..., Outputs]


class Place(NamedTuple):
    """Where modules run: device, number type, and memory order of pictures."""

    device: str
    dtype: Any
    channels_last: bool = False

    @property
    def align(self) -> int:
        """Numbers per vector load, as ``lower`` needs it for the form ``fused``."""
        return LOAD_BYTES // int(self.dtype.itemsize)

    def module(self, graph: Graph) -> StitchedModule:
        """*graph* as a module at this place."""
        return StitchedModule(graph, device=self.device, dtype=self.dtype, channels_last=self.channels_last)

    def tensor(self, tensor: Tensor) -> Tensor:
        """*tensor* as an input of modules at this place."""
        spatial = self.channels_last and tensor.dim() == 4  # only pictures have a memory order
        moved = tensor.to(device=self.device, dtype=self.dtype)
        return moved.contiguous(memory_format=torch.channels_last) if spatial else moved


@dataclass(frozen=True, eq=False)
class RivalWay:
    """A way to run all tasks: ``call`` with ``inputs``; a CUDA graph reads them at these addresses."""

    name: str
    call: Call
    inputs: tuple[Tensor, ...]
    weight_bytes: int
    """Bytes of the weights on the device."""
    launches: int | None
    """Number of steps that are not views; None if a compiler decides."""

    @property
    def captured(self) -> bool:
        """Whether the way is replayed as a CUDA graph."""
        return self.name not in UNCAPTURED

    def run(self) -> Outputs:
        """Call it once."""
        with torch.no_grad():
            return self.call(*self.inputs)


ROUNDS, REPLAYS, FEWEST, ROUND_S = 3, 50, 10, 1.0
"""Rounds, and calls per round: *REPLAYS*, or as many as take *ROUND_S* seconds, but at least *FEWEST*."""


class BuiltModules(NamedTuple):
    """Modules on the device, and the memory that they keep there."""

    modules: tuple[StitchedModule, ...]
    resident_bytes: int | None
    """Bytes of weights and tables; None without CUDA."""


class TimedWay(NamedTuple):
    """A way that is warmed up and ready to be timed; byte counts are None without CUDA."""

    replay: Run
    outputs: Outputs
    """Overwritten by every replay of a CUDA graph."""
    added_bytes: int | None
    """Peak bytes that a run needs in addition to what stays on the device."""
    pool_bytes: int | None
    """Bytes that the CUDA graph reserves for a run, in the allocator's large pages."""
    workspace_bytes: int | None
    """The part of *added_bytes* that is cuBLAS's workspace."""


@contextmanager
def precision(tf32: bool, *, search: bool = True) -> Iterator[None]:
    """A context in which float32 products and convolutions may use TF32, or not.

    *search*: let cuDNN try its algorithms and choose the fastest.
    """
    cudnn, cublas = torch.backends.cudnn, torch.backends.cuda.matmul
    saved = cudnn.allow_tf32, cublas.allow_tf32, cudnn.benchmark
    cudnn.allow_tf32, cublas.allow_tf32, cudnn.benchmark = tf32, tf32, search
    try:
        yield
    finally:
        cudnn.allow_tf32, cublas.allow_tf32, cudnn.benchmark = saved


def build(graphs: Sequence[Graph], inputs: Sequence[Sequence[Tensor]], place: Place) -> BuiltModules:
    """Modules of *graphs* at *place*, each run once with its *inputs*; fused layers are tuned on CUDA."""
    settle()
    bytes_before = _allocated_bytes()
    modules = tuple(_tune_module(graph, example, place) for graph, example in zip(graphs, inputs, strict=True))
    with torch.no_grad():
        for module, example in zip(modules, inputs, strict=True):
            module(*example)
    settle()
    bytes_after = _allocated_bytes()
    return BuiltModules(modules, None if bytes_after is None or bytes_before is None else bytes_after - bytes_before)


def _tune_module(graph: Graph, inputs: Sequence[Tensor], place: Place) -> StitchedModule:
    """A new module with tuned tiles. A second one is tuned and then dropped, to free the memory that tuning needs."""
    module = place.module(graph)
    if not module.fused_layers or not inputs[0].is_cuda:
        return module
    tune(module, *inputs)
    fresh = place.module(graph)
    for tuned_layer, layer in zip(module.fused_layers, fresh.fused_layers, strict=True):
        layer.shape = tuned_layer.shape
    return fresh


def prepare(way: RivalWay) -> TimedWay:
    """Warm *way* up, capture it if ``way.captured``, and record the memory that it needs."""
    if not way.inputs[0].is_cuda:
        return TimedWay(way.run, way.run(), None, None, None)
    warm_up(way.run)
    settle()
    allocated_before, reserved_before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    replay, outputs = _capture(way) if way.captured else (way.run, way.run())
    torch.cuda.synchronize()
    added_bytes = torch.cuda.max_memory_allocated() - allocated_before
    added_bytes = getattr(way.call, "branch_bytes", added_bytes)  # of branches at the same time: those of all together
    pool_bytes = torch.cuda.memory_reserved() - reserved_before if way.captured else None
    with_workspace = torch.cuda.memory_allocated()
    settle()  # frees the workspace
    return TimedWay(replay, outputs, added_bytes, pool_bytes, with_workspace - torch.cuda.memory_allocated())


def _capture(way: RivalWay) -> tuple[Run, Outputs]:
    """Capture a run as a CUDA graph; return its replay and its outputs."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = way.run()
    graph.replay()  # a capture does not compute: the outputs have no values before
    return graph.replay, outputs


def settle() -> None:
    """Wait for the device, and free unused memory and cuBLAS's workspaces, so that the next way gets its own.

    A workspace that is taken during a capture belongs to the graph. A workspace taken before would be shared, and
    overwritten between replays.
    """
    if not torch.cuda.is_available():
        return
    torch.cuda.synchronize()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def _allocated_bytes() -> int | None:
    """Bytes that torch's allocator has handed out; None without CUDA."""
    return int(torch.cuda.memory_allocated()) if torch.cuda.is_available() else None


def times_ms(runs: Mapping[str, TimedWay], *, rounds: int = ROUNDS, replays: int = REPLAYS) -> dict[str, float]:
    """The median over *rounds* of each run's mean milliseconds; the runs take turns. *replays*: the most of a round."""
    with torch.no_grad():
        measures = [partial(_mean_ms, run, _replays(run, replays)) for run in runs.values()]
        times = measure_in_turns(measures, rounds)
    return {name: median(run_ms) for name, run_ms in zip(runs, times, strict=True)}


def _replays(run: TimedWay, most: int) -> int:
    """The calls per round: *most*, or as many as take ``ROUND_S`` seconds, but at least ``FEWEST``."""
    once_ms = _mean_ms(run, 1)
    return max(min(most, FEWEST), min(most, round(1e3 * ROUND_S / max(once_ms, 1e-3))))


def _mean_ms(run: TimedWay, count: int) -> float:
    """Mean milliseconds of *count* calls; by CUDA events on a GPU."""
    if not run.outputs[0].is_cuda:
        return 1e3 * mean_seconds(run.replay, perf_counter, count)
    for _ in range(WARM_UPS):
        run.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        run.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / count


@dataclass(frozen=True)
class GraphClock:
    """The cost of graphs by timing them as modules at *place*, in turns; on CUDA as CUDA graphs with tuned kernels."""

    place: Place
    rounds: int = ROUNDS
    replays: int = REPLAYS

    def seconds(self, graphs: Sequence[Graph]) -> list[float]:
        """The seconds of a run of each graph."""
        runs = {str(number): self._run(graph) for number, graph in enumerate(graphs)}
        times = times_ms(runs, rounds=self.rounds, replays=self.replays)
        return [times[name] / 1e3 for name in runs]

    def _run(self, graph: Graph) -> TimedWay:
        """A run of *graph* with random inputs, ready to be timed."""
        inputs = tuple(self.place.tensor(torch.randn(tensor.shape)) for tensor in graph.inputs)
        (module,) = build([graph], [inputs], self.place).modules
        return prepare(RivalWay(graph.name, module, inputs, graph.weight_bytes, None))


def plan_for(
    place: Place, family: Family, sharing: Sharing, *, clock: GraphClock | None = None,
    weight_cap_bytes: int | None = None,
) -> Plan:  # fmt: skip
    """The fastest plan for *family* at *place*: segments by estimates for a described GPU, whole graphs by *clock*."""
    return plan(
        family, sharing, Modelled(H200), forms=tuple(FORMS), align=place.align, weight_cap_bytes=weight_cap_bytes,
        whole=clock or GraphClock(place),
    )  # fmt: skip
