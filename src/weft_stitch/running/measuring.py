"""How long a way of running many models takes and how much memory it needs: ``prepare``, ``times_ms``, ``error``.

Memory is what torch's allocator has handed out: the weights and tables that stay, and the most that running adds to
them (activations, workspaces) once cuDNN has chosen its algorithms, whose trials are not counted. Branches that run at
the same time count together. Without CUDA a way is called as it is, and memory is not known.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from weft_stitch.graph import Graph
from weft_stitch.running.fused import FusedConv
from weft_stitch.running.kernel_shapes import tune
from weft_stitch.running.module import StitchedModule
from weft_stitch.running.operators import Tensor, torch
from weft_stitch.running.ways import Forked, Outputs, Place, RivalWay

WARM_UPS = 3
ROUNDS, REPLAYS, FEWEST, ROUND_S = 3, 50, 10, 1.0
"""A round is *REPLAYS* calls, or as many as go into *ROUND_S*, but *FEWEST*."""


class Built(NamedTuple):
    """Modules on the device, and what they keep there."""

    modules: tuple[StitchedModule, ...]
    resident_bytes: int | None


class TimedWay(NamedTuple):
    """A way ready to be timed."""

    replay: Callable[[], object]
    outputs: Outputs
    """Overwritten by every replay of a CUDA graph."""
    added_bytes: int | None
    """The most that running takes on top of what stays."""
    pool_bytes: int | None
    """What the CUDA graph keeps reserved for that, in the allocator's large pages."""
    workspace_bytes: int | None
    """The part of *added_bytes* that is cuBLAS's."""


@contextmanager
def precision(tf32: bool, *, search: bool = True) -> Iterator[None]:
    """Let float32 products be rounded to TF32, everywhere or nowhere; *search* lets cuDNN try its algorithms."""
    conv, product = torch.backends.cudnn, torch.backends.cuda.matmul
    before = conv.allow_tf32, product.allow_tf32, conv.benchmark
    conv.allow_tf32, product.allow_tf32, conv.benchmark = tf32, tf32, search
    try:
        yield
    finally:
        conv.allow_tf32, product.allow_tf32, conv.benchmark = before


def build(graphs: Sequence[Graph], inputs: Sequence[Sequence[Tensor]], place: Place) -> Built:
    """Modules of *graphs*, each run once with its inputs; fused layers are tuned on CUDA."""
    settle()
    before = _allocated()
    modules = tuple(_tuned(graph, given, place) for graph, given in zip(graphs, inputs, strict=True))
    with torch.no_grad():
        for module, given in zip(modules, inputs, strict=True):
            module(*given)
    settle()
    after = _allocated()
    return Built(modules, None if after is None or before is None else after - before)


def _tuned(graph: Graph, inputs: Sequence[Tensor], place: Place) -> StitchedModule:
    """A fresh module with the shapes that tuning found: what tuning left behind goes with the old one."""
    module = place.module(graph)
    layers = fused_layers(module)
    if not layers or not inputs[0].is_cuda:
        return module
    tune(module, *inputs)
    fresh = place.module(graph)
    for old, new in zip(layers, fused_layers(fresh), strict=True):
        new.shape = old.shape
    return fresh


def fused_layers(module: StitchedModule) -> list[FusedConv]:
    return [each for each in module.modules() if isinstance(each, FusedConv)]


def prepare(way: RivalWay) -> TimedWay:
    """Warm *way* up, capture it if it is one to be captured, and note what memory that takes."""
    if not way.inputs[0].is_cuda:
        return TimedWay(way.run, way.run(), None, None, None)
    _warm_up(way)
    settle()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    replay, outputs = _captured(way) if way.captured else (way.run, way.run())
    torch.cuda.synchronize()
    added = torch.cuda.max_memory_allocated() - before
    if isinstance(way.call, Forked):
        added = way.call.branch_bytes
    pool = torch.cuda.memory_reserved() - reserved if way.captured else None
    held = torch.cuda.memory_allocated()
    settle()
    return TimedWay(replay, outputs, added, pool, held - torch.cuda.memory_allocated())


def _warm_up(way: RivalWay) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            way.run()
    torch.cuda.current_stream().wait_stream(side)


def _captured(way: RivalWay) -> tuple[Callable[[], object], Outputs]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = way.run()
    graph.replay()
    return graph.replay, outputs


def settle() -> None:
    """Wait for the device and give back all that is not in use, cuBLAS's workspaces too: the next will be its own.

    A workspace taken during a capture is the graph's; one taken before it would be reused under the graph's feet.
    """
    if not torch.cuda.is_available():
        return
    torch.cuda.synchronize()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def _allocated() -> int | None:
    return int(torch.cuda.memory_allocated()) if torch.cuda.is_available() else None


def times_ms(runs: Mapping[str, TimedWay], *, rounds: int = ROUNDS, replays: int = REPLAYS) -> dict[str, float]:
    """The median over *rounds* of each run's mean; the runs take turns."""
    with torch.no_grad():
        numbers = {name: _replays(run, replays) for name, run in runs.items()}
        found: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                found[name].append(_mean_ms(run, numbers[name]))
    return {name: median(each) for name, each in found.items()}


def _replays(run: TimedWay, most: int) -> int:
    once_ms = _mean_ms(run, 1)
    return max(min(most, FEWEST), min(most, round(1e3 * ROUND_S / max(once_ms, 1e-3))))


def _mean_ms(run: TimedWay, count: int) -> float:
    if not run.outputs[0].is_cuda:
        began_s = perf_counter()
        for _ in range(count):
            run.replay()
        return (perf_counter() - began_s) / count * 1e3
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


def error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference of any task's outputs, over the largest of what they should be."""
    pairs = [(got.float().cpu(), want.float().cpu()) for got, want in zip(found, wanted, strict=True)]
    return max(_largest(got - want) / _largest(want) for got, want in pairs)


def _largest(tensor: Tensor) -> float:
    """What is not a number is larger than any."""
    return float(tensor.abs().nan_to_num(nan=float("inf")).max())


def reference(graph: Graph, given: Tensor, device: Any) -> Tensor:
    """What a model alone answers in float32, without TF32."""
    with precision(tf32=False, search=False), torch.no_grad():
        return StitchedModule(graph, device=device)(given.to(device))[0].cpu()
