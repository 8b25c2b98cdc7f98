"""Gates inside CUDA graphs: whether answers stay the same, and what gates cost on a GPU.

Needs one NVIDIA GPU with torch and cuda-bindings; no server runs. Every item runs in a process of its own, so that a
fault of the device ends no other:

    PYTHONPATH=src python benchmarks/gpu_gates.py [--only PART-OF-A-NAME] [--json FILE]

Items: `memory`: whether the GPU reads a stop table that is mapped for reading only. `NETWORK/FORM`: a network in
captured segments with gates, whole GPU and a part of it, against its plain graphs: milliseconds, microseconds of the
host for a launch, the time from a store into the stop table to the end of the launch, and answers after random stops.
`process/FORM`: the same time where another process stores. `model/NETWORK/FORM`: a program of torch as weft serves it,
with batches that are stopped and queued at random, on the whole GPU and with shares.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

NETWORKS = ("resnet50-b32", "resnet50-b1", "encoder-b16", "bertlarge-b1")
FORMS = ("line", "loop")
ITEMS = (
    "memory",
    *(f"{network}/{form}" for form in FORMS for network in NETWORKS),
    *(f"process/{form}" for form in FORMS),
    *(f"model/{network}/{form}" for form in FORMS for network in ("resnet50", "bertbase")),
)
ITEM_S = 100.0
GRAIN_S = 0.00025
RUNS, TRIES = 25, 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--item")
    parser.add_argument("--file", type=int)
    given = parser.parse_args()
    if given.item:
        print("RESULT " + json.dumps(measure(given.item, given.file)), flush=True)
        return
    results: dict[str, Any] = {}
    for item in (item for item in ITEMS if given.only in item):
        began_s = time.perf_counter()
        results[item] = in_process(item)
        results[item]["took_s"] = round(time.perf_counter() - began_s, 1)
        print(item, json.dumps(results[item]), flush=True)
        if given.json:
            given.json.write_text(json.dumps(results, indent=1))


def in_process(item: str) -> dict[str, Any]:
    """Measure an item in a new process, which shows a fault of the device as an error."""
    from weft.runtime.isolated.stop_table import StopTable

    table = StopTable()
    command = [sys.executable, __file__, "--item", item, "--file", str(table.file)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, pass_fds=[table.file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        timer = threading.Timer(ITEM_S, process.kill)
        timer.start()
        try:
            stores, lines = serve(process, table)
        finally:
            process.wait()
            timer.cancel()
        errors.seek(0)
        text = errors.read()[-3000:]
    result: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if not lines or process.returncode:
        result["process"] = f"ended with {process.returncode}; killed if it took more than {ITEM_S:g} s: {text}"
    if stores:
        ends = result.pop("ends_ns", [])
        pairs = zip(ends, stores, strict=False)
        result["leave_us"] = spread([(end - store) / 1e3 for (end, done, count), store in pairs if done < count])
    return result


def serve(process: Any, table: Any) -> tuple[list[int], list[str]]:
    """Store into the table when the process asks for it, until it ends.

    Returns the times of the stores, in ns of the machine's clock, and the results that it printed.
    """
    stores: list[int] = []
    results: list[str] = []
    rng = random.Random(1)
    for line in process.stdout:
        kind, _, rest = line.partition(" ")
        if kind == "LAUNCHED":
            slot, most_ns = map(int, rest.split())
            due = time.monotonic_ns() + rng.randrange(most_ns)
            while time.monotonic_ns() < due:
                pass
            stores.append(time.monotonic_ns())
            table._stops[slot] = 1
        elif kind == "CLEAR":
            table._stops[int(rest)] = 0
            process.stdin.write("\n")
            process.stdin.flush()
        elif kind == "RESULT":
            results.append(rest)
    return stores, results


def measure(item: str, file: int | None) -> dict[str, Any]:
    result: dict[str, Any] = {}
    try:
        kind, _, form = item.rpartition("/")
        if item == "memory":
            measure_memory(result)
        elif kind == "process":
            measure_process(form, file or 0, result)
        elif kind.startswith("model/"):
            measure_model(kind.partition("/")[2], form, result)
        else:
            measure_network(kind, form, result)
    except Exception:
        result["error"] = traceback.format_exc()[-3000:]
    return result


def attempt(result: dict[str, Any], name: str, run: Callable[[dict[str, Any]], None]) -> None:
    """Run one part of an item; its error becomes a part of the result."""
    part: dict[str, Any] = {}
    try:
        run(part)
    except Exception:
        part["error"] = traceback.format_exc()[-2500:]
    result[name] = part


def spread(numbers: Sequence[float]) -> dict[str, float]:
    if not numbers:
        return {"count": 0}
    ordered = sorted(numbers)
    at = lambda share: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)  # noqa: E731
    return {"count": len(ordered), "p10": at(0.1), "p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "most": at(1.0)}


# The stop table


def measure_memory(result: dict[str, Any]) -> None:
    """Which registrations of the stop table the driver takes, and whether stores of the server are seen."""
    import numpy as np
    import torch

    from weft.runtime.cuda.gpu_gates import GateKernels, checked
    from weft.runtime.cuda.partitions import bindings
    from weft.runtime.isolated.stop_table import StopTable, map_stops

    torch.zeros(1, device="cuda")
    driver = bindings()
    result["gpu"], result["torch"] = torch.cuda.get_device_name(0), torch.__version__
    result["driver"] = checked(driver.cuDriverGetVersion())[0]
    import cuda.bindings

    result["bindings"] = cuda.bindings.__version__
    for name in ("READ_ONLY_HOST_REGISTER_SUPPORTED", "PAGEABLE_MEMORY_ACCESS", "HOST_REGISTER_SUPPORTED"):
        attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        result[name.lower()] = checked(driver.cuDeviceGetAttribute(attribute, 0))[0]

    def compile_kernels(part: dict[str, Any]) -> None:
        began_s = time.perf_counter()
        GateKernels(0)
        part["ms"] = round((time.perf_counter() - began_s) * 1e3, 1)

    attempt(result, "compile", compile_kernels)

    def register(writable: bool, flags: int) -> Callable[[dict[str, Any]], None]:
        def run(part: dict[str, Any]) -> None:
            table = StopTable()
            stops = table._stops if writable else map_stops(os.dup(table.file))
            checked(driver.cuMemHostRegister(stops.ctypes.data, stops.nbytes, flags))
            (address,) = checked(driver.cuMemHostGetDevicePointer(stops.ctypes.data, 0))
            part["same_address"] = int(address) == stops.ctypes.data
            slot = table.take()
            copied = np.empty(stops.size, np.uint32)
            for value in (0, 1):
                table._stops[slot] = value
                checked(driver.cuMemcpyDtoH(copied.ctypes.data, int(address), copied.nbytes))
                part[f"reads_{value}"] = int(copied[slot])

        return run

    for name, writable, flags in (
        ("read_only", False, 2 | 8), ("read_only_portable", False, 1 | 2 | 8), ("read_only_unsaid", False, 2),
        ("writable", True, 2), ("writable_read_only", True, 2 | 8),
    ):  # fmt: skip
        attempt(result, name, register(writable, flags))


# Networks in captured segments


class Network:
    """A network in segments that are captured on one part of the GPU, and as a whole."""

    def __init__(self, device: Any, name: str, grain_s: float) -> None:
        import torch
        from gpu_pairs import MODELS

        kind, rows = name.split("-b")
        make, shape = MODELS[kind]
        torch.manual_seed(0)
        with torch.device("cuda"):
            torch.set_default_dtype(torch.float16)
            module = make(int(rows)).eval().requires_grad_(False)
            torch.set_default_dtype(torch.float32)
        self.inputs = [torch.randn(int(rows), *shape, device="cuda").half() for _ in range(3)]
        if len(shape) == 3:
            module = module.to(memory_format=torch.channels_last)
        self.x = torch.empty_like(self.inputs[0])
        self.device, layers = device, list(module)
        self.x.copy_(self.inputs[0])

        def run() -> None:
            y = self.x
            for layer in layers:
                y = layer(y)
            self.whole_y = y

        self.whole = device.capture(run)
        self.whole_s = mean_s(device, self.whole)
        count = max(2, min(len(layers), round(self.whole_s / grain_s)))
        groups = [layers[len(layers) * i // count : len(layers) * (i + 1) // count] for i in range(count)]
        self.values, self.segments = [self.x], []
        for group in groups:
            self._capture(group)
        self.memory = device.gate_memory(4)
        self.note = ""
        try:
            self.gated = device.gated(self.memory, self.segments)
        except RuntimeError as error:
            self.note = f"{error}; {contexts(device, self.segments[0])}"
            self.gated = self._gated_without_context()
        self.early = 0
        self.y = self.values[-1]
        self.wanted = []
        for x in self.inputs:
            self.x.copy_(x)
            device.finish()
            for segment in self.segments:
                segment()
            device.finish()
            self.wanted.append(self.y.clone())
            device.finish()

    def _capture(self, group: Sequence[Any]) -> None:
        def run() -> None:
            y = self.values[-1]
            for layer in group:
                y = layer(y)
            self.made = y

        self.segments.append(self.device.capture(run))
        self.values.append(self.made)

    def _gated_without_context(self) -> Callable[[], None]:
        """The gates in the primary context, and the segments as they were captured on a part."""
        import torch

        from weft.runtime.cuda import gpu
        from weft.runtime.cuda.gpu_gates import GatedGraph

        kernels, _ = self.device._prepare_gates()
        handles = [segment.graph.raw_cuda_graph() for segment in self.segments]
        graph = GatedGraph(kernels, self.memory, handles, None, gpu.FORM)
        on_part = gpu._on_part(self.device._session_part, self.device._device)

        def launch() -> None:
            with on_part():
                graph.launch(torch.cuda.current_stream().cuda_stream)

        return launch

    @property
    def count(self) -> int:
        return len(self.segments)

    def launch(self, slot: int = 0, first: int = 0, end: int | None = None, feed: int | None = None) -> Any:
        from weft.runtime.cuda.gates import Span

        copies = [] if feed is None else [(self.x, self.inputs[feed])]
        return self.memory.launch(self.gated, Span(first, self.count if end is None else end, slot, self.early), copies)

    def run_segments(self) -> None:
        for segment in self.segments:
            segment()


def contexts(device: Any, segment: Any) -> str:
    """The contexts of the kernels of a captured segment, of this thread and of the part, to understand a refusal."""
    from weft.runtime.cuda.captured import _nodes
    from weft.runtime.cuda.gpu_gates import checked
    from weft.runtime.cuda.partitions import bindings

    driver = bindings()
    try:
        found = set()
        for node in _nodes(segment.graph.raw_cuda_graph()):
            handle = driver.CUgraphNode(node.value)
            (kind,) = checked(driver.cuGraphNodeGetType(handle))
            if kind == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
                (parameters,) = checked(driver.cuGraphKernelNodeGetParams(handle))
                found.add(f"{kind.name} {int(parameters.ctx):x}")
            else:
                found.add(kind.name)
        part = device._session_part
        green = int(checked(driver.cuCtxFromGreenCtx(part.context))[0]) if part else 0
        return f"nodes {sorted(found)}, this thread {int(checked(driver.cuCtxGetCurrent())[0]):x}, part {green:x}"
    except Exception as error:
        return f"contexts are not known: {error}"


def mean_s(device: Any, run: Callable[[], Any], runs: int = RUNS) -> float:
    """Seconds of one run among several that are queued; the least of some tries."""
    results = []
    for _ in range(TRIES):
        device.finish()
        began_s = time.perf_counter()
        ended = [run() for _ in range(runs)]
        device.finish()
        results.append((time.perf_counter() - began_s) / runs)
        for computed in ended:
            if computed is not None:
                computed()
    return min(results)


def host_us(device: Any, run: Callable[[], Any]) -> float:
    """Microseconds of the host for one call, the median, with the device idle."""
    results = []
    for _ in range(100):
        device.finish()
        began_s = time.perf_counter()
        computed = run()
        results.append((time.perf_counter() - began_s) * 1e6)
        device.finish()
        if computed is not None:
            computed()
    return round(statistics.median(results), 1)


def measure_network(name: str, form: str, result: dict[str, Any]) -> None:
    gpu, table = gated_gpu(form)
    result["ungated"] = gpu.ungated

    def on(part: int, grain_s: float) -> Callable[[dict[str, Any]], None]:
        def run(found: dict[str, Any]) -> None:
            with gpu.lane_context():
                view = gpu.model_view()
                view = view.model_view(part) if part else view
            with gpu.lane_context(gpu.cuts.lane_of(part) if part else 0):
                measure_here(Network(view, name, grain_s), table, found)

        return run

    attempt(result, "whole", on(0, GRAIN_S))
    attempt(result, "whole, every layer", on(0, 1e-9))
    result["parts"] = gpu.cuts.parts
    attempt(result, "part", on(1, GRAIN_S))
    attempt(result, "smaller part", on(2, GRAIN_S))


def gated_gpu(form: str, file: int | None = None) -> tuple[Any, Any]:
    """The GPU with a stop table, of this process unless its file is given."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    from weft.runtime.cuda import gpu as gpus
    from weft.runtime.isolated.stop_table import StopTable, map_stops

    gpus.FORM = form  # type: ignore[assignment]
    gpu, table = gpus.Gpu(0), StopTable() if file is None else None
    gpu.use_stops(map_stops(os.dup(table.file) if table else file or 0))
    return gpu, table


def measure_here(network: Network, table: Any, found: dict[str, Any]) -> None:
    """Measure a network on the calling thread's lane."""
    device, count = network.device, network.count
    ms = lambda run: round(mean_s(device, run) * 1e3, 4)  # noqa: E731
    found["segments"], found["note"] = count, network.note
    found["plain_ms"], found["segments_ms"] = ms(network.whole), ms(network.run_segments)
    found["gated_ms"] = ms(network.launch)
    found["gated_with_input_ms"] = ms(lambda: network.launch(feed=0))
    found["gate_us"] = round((found["gated_ms"] - found["plain_ms"]) * 1e3 / count, 2)
    found["cost_pct"] = round((found["gated_ms"] / found["plain_ms"] - 1) * 100, 2)
    found["last_segment_ms"] = ms(network.segments[-1])
    found["skipping_to_last_ms"] = ms(lambda: network.launch(first=count - 1))
    slot = table.take()
    table.stop(slot)

    def nothing() -> Any:
        computed = network.launch(slot)

        def note_end() -> int:
            network.early += 1
            return int(computed())

        return note_end

    # The first of a row of launches notices the stop; the others that its end is not known: both compute nothing.
    found["nothing_ms"] = ms(nothing)
    found["host_us"] = {
        "gated": host_us(device, network.launch),
        "gated with an input": host_us(device, lambda: network.launch(feed=1)),
        "plain graph": host_us(device, network.whole),
        "all segments": host_us(device, network.run_segments),
    }
    rng = random.Random(0)
    found["same"] = all(same_after_stops(network, table, rng) for _ in range(60))
    found["queued_refused"] = sum(refused_behind(network, table) for _ in range(10))
    found["leave_us"], found["left_at"] = leave_times(network, table, rng, found["gated_ms"])
    found["segment_ms"] = [round(mean_s(device, segment) * 1e3, 4) for segment in network.segments]


def same_after_stops(network: Network, table: Any, rng: random.Random) -> bool:
    """Whether a batch that is stopped at random and continued gives the bits of one that is not."""
    import torch

    feed, first = rng.randrange(len(network.inputs)), 0
    network.y.zero_()
    while first < network.count:
        slot = table.take()
        mark_s = time.perf_counter() + rng.random() * network.whole_s
        computed = network.launch(slot, first, feed=None if first else feed)
        mark = network.device.mark()
        if rng.random() < 0.8:
            while time.perf_counter() < mark_s:
                pass
            table.stop(slot)
        mark.wait()
        done = computed()
        assert 0 <= done <= network.count - first
        network.early += done < network.count - first
        first += done
        table.release(slot)
    network.device.finish()
    return bool(torch.equal(network.y, network.wanted[feed]))


def refused_behind(network: Network, table: Any) -> bool:
    """Whether a batch that is queued behind one which leaves computes nothing, and the first one continues."""
    import torch

    slot = table.take()
    first = network.launch(slot, feed=0)
    second = network.launch(feed=1)
    table.stop(slot)
    network.device.finish()
    done, behind = first(), second()
    network.early += (done < network.count) + (behind < network.count)
    table.release(slot)
    if done == network.count:
        return False
    assert behind == 0, f"{done} were computed, and {behind} of the next batch"
    rest = network.launch(0, done, feed=None if done else 0)
    network.device.finish()
    assert rest() == network.count - done
    assert torch.equal(network.y, network.wanted[0])
    return True


def leave_times(network: Network, table: Any, rng: random.Random, gated_ms: float) -> tuple[Any, list[int]]:
    """Microseconds from a store to the end of a launch, and at which segments launches left."""
    late_us, left_at = [], [0] * network.count
    for _ in range(150):
        slot = table.take()
        network.device.finish()
        computed = network.launch(slot)
        mark = network.device.mark()
        due_s = time.perf_counter() + rng.random() * gated_ms / 1e3
        while time.perf_counter() < due_s:
            pass
        began_s = time.perf_counter()
        table.stop(slot)
        mark.wait()
        took_us = (time.perf_counter() - began_s) * 1e6
        done = computed()
        table.release(slot)
        if done < network.count:
            network.early += 1
            left_at[done] += 1
            late_us.append(took_us)
    return spread(late_us), left_at


# Another process


def measure_process(form: str, file: int, result: dict[str, Any]) -> None:
    """Launch, ask the other process to stop, and tell when the launch had ended."""
    gpu, _ = gated_gpu(form, file)
    ends = []
    with gpu.lane_context():
        network = Network(gpu.model_view(), "resnet50-b32", GRAIN_S)
        gated_ns = int(mean_s(network.device, network.launch) * 1e9)
        for slot in range(1, 200):
            print(f"CLEAR {slot}", flush=True)
            sys.stdin.readline()
            computed = network.launch(slot)
            mark = gpu.mark()
            print(f"LAUNCHED {slot} {gated_ns}", flush=True)
            mark.wait()
            ended = time.monotonic_ns()
            done = computed()
            network.early += done < network.count
            ends.append((ended, done, network.count))
    result["ends_ns"] = ends


# Models as weft serves them


def measure_model(name: str, form: str, result: dict[str, Any]) -> None:
    import torch
    from gpu_pairs import MODELS
    from torch.export import Dim

    from weft.runtime.backend import LoadOptions
    from weft.runtime.cuda.preparing import prepare_on

    gpu, table = gated_gpu(form)
    make, shape = MODELS[name]
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.pt2"
        module = make(1).eval().requires_grad_(False)
        rows = Dim("rows", max=8)
        torch.export.save(torch.export.export(module, (torch.zeros(2, *shape),), dynamic_shapes=({0: rows},)), path)

        def opened(shares: bool) -> Callable[[dict[str, Any]], None]:
            def run(found: dict[str, Any]) -> None:
                options = LoadOptions(
                    grain_s=GRAIN_S, max_batch=8, precision="fp16", shares=shares, independent_rows=True
                )
                began_s = time.perf_counter()
                models = [prepare_on(gpu, path, options) for _ in range(2)]
                found["open_s"] = round(time.perf_counter() - began_s, 1)
                found["gated"] = [model.timing.gated for model in models]
                found["remarks"] = models[0].remarks
                found["segments"] = len(models[0].segments)
                found["times_ms"] = {n: round(sum(t) * 1e3, 3) for n, t in models[0].timing.times_s.items()}
                lanes = [0, *(gpu.cuts.lane_of(part) for part in (1, 2) if shares)]
                for lane in lanes:
                    attempt(found, f"lane {lane}", partial(schedule, gpu, table, models, shape, lane))

            return run

        attempt(result, "alone", opened(False))
        attempt(result, "shares", opened(True))


def schedule(
    gpu: Any, table: Any, models: Sequence[Any], shape: Sequence[int], lane: int, found: dict[str, Any]
) -> None:
    """Batches of two models that are queued, stopped and continued at random, on one lane; counts wrong answers."""
    import numpy as np

    from weft.runtime.backend import BatchPart, Step

    rng, draw = random.Random(lane), np.random.default_rng(lane)
    output = models[0].outputs[0].name
    input_name = models[0].inputs[0].name
    with gpu.lane_context(lane):
        batches = []
        for model in models:
            for _ in range(12):
                feed = {input_name: draw.standard_normal((rng.randint(1, 8), *shape)).astype(np.float32)}
                expected = model.run(feed)[output].copy()
                batches.append({"model": model, "feed": feed, "wanted": expected, "at": 0, "parts": [BatchPart(feed)]})
        wrong = ended = early = launches = nothing = 0
        host = []
        for turn in range(6):
            waiting, flights = list(batches), []
            for batch in batches:
                batch["at"], batch["parts"], batch["busy"] = 0, [BatchPart(batch["feed"])], False
            while waiting or flights:
                ready = [batch for batch in waiting if not batch["busy"]]
                if ready and len(flights) < 3:
                    batch = rng.choice(ready)
                    model, rows = batch["model"], len(batch["feed"][input_name])
                    rest, slot = len(model.segments) - batch["at"], table.take()
                    began_s = time.perf_counter()
                    launched = model.launch(Step(batch["at"], batch["parts"], rows, rest), slot)
                    host.append((time.perf_counter() - began_s) * 1e6)
                    launches += 1
                    batch["busy"] = True
                    flights.append((batch, rest, launched, slot))
                    if turn and rng.random() < 0.6:
                        due_s = time.perf_counter() + rng.random() * 0.002
                        while time.perf_counter() < due_s:
                            pass
                        table.stop(rng.choice(flights)[3])
                    continue
                batch, rest, launched, slot = flights.pop(0)
                outputs, computed = launched.wait()
                table.release(slot)
                batch["busy"], done = False, rest if computed is None else computed
                batch["at"] += done
                early += done < rest
                nothing += not done
                if batch["at"] == len(batch["model"].segments):
                    ended += 1
                    wrong += not np.array_equal(outputs[0].answers[output], batch["wanted"])
                    waiting = [other for other in waiting if other is not batch]
                elif done:
                    batch["parts"] = [BatchPart(outputs[0].values)]
    found |= {"batches": ended, "launches": launches, "early": early, "nothing": nothing, "wrong": wrong}
    found["host_us"] = spread(host)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
