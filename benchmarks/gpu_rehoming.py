"""Can a graph that was captured on the whole GPU be moved to a partition, without capturing or opening it again?

Kernels of a captured graph name the context that they run in. In a copy of the graph that is replaced by the context of
a partition (``runtime.cuda.partitions``). If the copy is as fast as a graph captured on the partition itself, a session
needs no twin per share. Needs one NVIDIA GPU, torch and cuda-bindings; prints its results within seconds:

    PYTHONPATH=src python benchmarks/gpu_rehoming.py
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from cuda.bindings import driver

from weft.runtime.cuda.partitions import LOW, cut

RUNS = 200


def checked(answer: tuple[Any, ...]) -> Any:
    result, *found = answer
    if int(result):
        raise RuntimeError(result.name)
    return found[0] if len(found) == 1 else found


def captured(stream: Any, model: Callable[[Any], Any], given: Any) -> Any:
    with torch.inference_mode(), torch.cuda.stream(stream):
        for _ in range(3):
            model(given)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graph.capture_begin(capture_error_mode="relaxed")
        try:
            graph.made = model(given)
        finally:
            graph.capture_end()
        graph.instantiate()
    return graph


def timed(run: Callable[[], None], stream: Any) -> float:
    """Milliseconds of one run; by the host's clock, for torch's events cannot be recorded on streams of parts."""
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        began_s = time.perf_counter()
        for _ in range(RUNS):
            run()
        stream.synchronize()
    return (time.perf_counter() - began_s) * 1e3 / RUNS


def moved(graph: int, context: Any) -> tuple[Any, Counter[str]]:
    """A copy of a graph whose kernels run in another context, and what became of its nodes."""
    copy = checked(driver.cuGraphClone(driver.CUgraph(graph)))
    count = checked(driver.cuGraphGetNodes(copy, 0))[1]
    nodes, _ = checked(driver.cuGraphGetNodes(copy, count))
    seen: Counter[str] = Counter()
    for node in nodes[:count]:
        kind = checked(driver.cuGraphNodeGetType(node))
        if kind != driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            seen[kind.name] += 1
            continue
        told = checked(driver.cuGraphKernelNodeGetParams(node))
        seen["kernel named by library" if told.kern is not None and int(told.kern) else "kernel named by function"] += 1
        told.ctx = context
        try:
            checked(driver.cuGraphKernelNodeSetParams(node, told))
            seen["moved"] += 1
        except RuntimeError as error:
            seen[f"not moved: {error}"] += 1
    return checked(driver.cuGraphInstantiate(copy, 0)), seen


def main() -> None:
    torch.zeros(1, device="cuda")
    small, large = cut(0, 48)
    whole = torch.cuda.Stream()
    weights = [torch.randn(4096, 4096, device="cuda", dtype=torch.float16) / 64 for _ in range(6)]

    def model(given: Any) -> Any:
        for weight in weights:
            given = torch.relu(given @ weight)
        return given

    given = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    graph = captured(whole, model, given)
    print(f"captured and run on the whole GPU: {timed(graph.replay, whole):.3f} ms")
    for part in (small, large):
        stream = torch.cuda.ExternalStream(part.streams[LOW])
        own = captured(stream, model, given)
        print(f"captured and run on {part.sms}: {timed(own.replay, stream):.3f} ms")
        print(f"captured on the whole, replayed on the stream of {part.sms}: {timed(graph.replay, stream):.3f} ms")
        runnable, seen = moved(graph.raw_cuda_graph(), checked(driver.cuCtxFromGreenCtx(part.context)))
        print("nodes:", dict(seen))
        handle = driver.CUstream(part.streams[LOW])
        again = timed(
            lambda runnable=runnable, handle=handle: checked((*driver.cuGraphLaunch(runnable, handle), None)), stream
        )
        same = torch.equal(own.made, graph.made)
        print(f"captured on the whole, moved to {part.sms}: {again:.3f} ms; results equal: {same}", flush=True)


if __name__ == "__main__":
    main()
