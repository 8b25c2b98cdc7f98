"""Gates inside CUDA graphs: whether answers stay the same, and what gates cost on a GPU.

Needs one NVIDIA GPU with torch and cuda-bindings. Every item runs in a process of its own, so that a fault of the
device ends no other; what an item has measured when its time is over is kept, and it tells where it was:

    PYTHONPATH=src python benchmarks/gpu_gates.py [--only PART-OF-A-NAME ...] [--json FILE] [--limit-s 60]

Items: `NETWORK`: a network in captured segments with gates, on the whole GPU and on a part of it, against its plain
graphs: milliseconds, microseconds of the host for a launch, the time from a store into the stop table to the end of the
launch; and whether results are the same bits: of the segments one after another several times (`repeats`), with gates,
and after random stops. `process`: the time where another process stores. `model`: programs of torch as a worker serves
them, with batches that are stopped and queued at random. `shares`: the same on parts of the GPU. `worker`: the same in
a real worker process, and the latency of an urgent model beside one that always has batches.
"""

from __future__ import annotations

import argparse
import faulthandler
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
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

NETWORKS = ("resnet50-b32", "resnet50-b1", "encoder-b16", "bertlarge-b1")
ITEMS = (*NETWORKS, "process", "model", "shares", "worker")
GRAIN_S = 0.00025
RUNS, TRIES, REPEATS = 25, 5, 8
BEGAN_S = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[""])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit-s", type=float, default=60.0)
    parser.add_argument("--item")
    parser.add_argument("--file", type=int)
    given = parser.parse_args()
    if given.item:
        faulthandler.dump_traceback_later(given.limit_s - 5, exit=True)
        measure(given.item, given.file)
        os._exit(0)  # threads of the lanes may still run
    results: dict[str, Any] = {}
    for item in (item for item in ITEMS if any(part in item for part in given.only)):
        began_s = time.perf_counter()
        results[item] = in_process(item, given.limit_s)
        results[item]["took_s"] = round(time.perf_counter() - began_s, 1)
        print(item, json.dumps(results[item]), flush=True)
        if given.json:
            given.json.write_text(json.dumps(results, indent=1))


def say(text: str) -> None:
    """Tell how far an item has come."""
    print(f"# {time.perf_counter() - BEGAN_S:.1f} s: {text}", flush=True)


def in_process(item: str, limit_s: float) -> dict[str, Any]:
    """Measure an item in a new process, which shows a fault of the device as an error."""
    from weft.runtime.isolated.stop_table import StopTable

    table = StopTable()
    command = [sys.executable, __file__, "--item", item, "--file", str(table.file), "--limit-s", str(limit_s)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, pass_fds=[table.file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        timer = threading.Timer(limit_s, process.kill)
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
        result["process"] = f"ended with {process.returncode}; it may take {limit_s:g} s: {text}"
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
        else:
            print(line, end="", flush=True)
    return stores, results


def measure(item: str, file: int | None) -> None:
    result: dict[str, Any] = {}
    try:
        if item == "process":
            measure_process(file or 0, result)
        elif item in ("model", "shares"):
            measure_model(result, shares=item == "shares")
        elif item == "worker":
            measure_worker(result)
        else:
            measure_network(item, result)
    except Exception:
        result["error"] = traceback.format_exc()[-3000:]
    print("RESULT " + json.dumps(result), flush=True)


def attempt(result: dict[str, Any], name: str, run: Callable[[dict[str, Any]], None]) -> None:
    """Run one part of an item; its error becomes a part of the result."""
    part: dict[str, Any] = {}
    result[name] = part
    try:
        run(part)
    except Exception:
        part["error"] = traceback.format_exc()[-2500:]
    say(f"{name}: {json.dumps(part)[:600]}")
    print("RESULT " + json.dumps(result), flush=True)


def spread(numbers: Sequence[float]) -> dict[str, float]:
    if not numbers:
        return {"count": 0}
    ordered = sorted(numbers)
    at = lambda share: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)  # noqa: E731
    return {"count": len(ordered), "p10": at(0.1), "p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "most": at(1.0)}


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
        self.module = module  # kept: the captured graphs read its weights
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
        self.gated = device.gated(self.memory, self.segments)
        self.generation = 0
        self.y = self.values[-1]

    def results(self, run: Callable[[int], None]) -> list[list[Any]]:
        """For every input, the results of *run* (called with its number), which was repeated."""
        found = []
        for feed in range(len(self.inputs)):
            found.append([])
            for _ in range(REPEATS):
                self.y.zero_()
                run(feed)
                self.device.finish()
                found[-1].append(self.y.clone())
        return found

    def run_alone(self, feed: int) -> None:
        """The captured segments one after another."""
        self.x.copy_(self.inputs[feed])
        self.run_segments()

    def run_gated(self, feed: int) -> None:
        computed = self.launch(feed=feed)
        self.device.finish()
        assert computed() == self.count

    def _capture(self, group: Sequence[Any]) -> None:
        def run() -> None:
            y = self.values[-1]
            for layer in group:
                y = layer(y)
            self.made = y

        self.segments.append(self.device.capture(run))
        self.values.append(self.made)

    @property
    def count(self) -> int:
        return len(self.segments)

    def launch(self, slot: int = 0, first: int = 0, end: int | None = None, feed: int | None = None) -> Any:
        from weft.runtime.cuda.gates import SegmentSpan

        copies = [] if feed is None else [(self.x, self.inputs[feed])]
        return self.memory.launch(
            self.gated, SegmentSpan(first, self.count if end is None else end, slot, self.generation), copies
        )

    def run_segments(self) -> None:
        for segment in self.segments:
            segment()


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


def measure_network(name: str, result: dict[str, Any]) -> None:
    import torch

    gpu, table = gated_gpu()
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
    attempt(result, "part", on(1, GRAIN_S))
    attempt(result, "whole, every layer", on(0, 1e-9))
    if result["whole"].get("repeats", 1) > 1:
        torch.backends.cudnn.deterministic = True
        torch.use_deterministic_algorithms(True, warn_only=True)
        attempt(result, "whole, repeatable operators", on(0, GRAIN_S))


def gated_gpu(file: int | None = None) -> tuple[Any, Any]:
    """The GPU with a stop table, of this process unless its file is given."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    from weft.runtime.cuda.gpu import Gpu
    from weft.runtime.isolated.stop_table import StopTable, map_stops

    gpu, table = Gpu(0), StopTable() if file is None else None
    gpu.use_stops(map_stops(os.dup(table.file if table else file or 0)))
    return gpu, table


def measure_here(network: Network, table: Any, found: dict[str, Any]) -> None:
    """Measure a network on the calling thread's lane."""
    device, count = network.device, network.count
    found["segments"] = count
    found |= compare_results(network, table)
    ms = lambda run: round(mean_s(device, run) * 1e3, 4)  # noqa: E731
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

        def note_end() -> None:
            network.generation += computed() >= 0

        return note_end

    # The first of a row of launches notices the stop; the others that its end is not known: all compute nothing.
    found["nothing_ms"] = ms(nothing)
    found["host_us"] = {
        "gated": host_us(device, network.launch),
        "gated with an input": host_us(device, lambda: network.launch(feed=1)),
        "plain graph": host_us(device, network.whole),
        "all segments": host_us(device, network.run_segments),
    }
    found["leave_us"], found["left_at"] = leave_times(network, table, random.Random(0), found["gated_ms"])


def compare_results(network: Network, table: Any) -> dict[str, Any]:
    """Whether results repeat without gates, and with gates and stops are among those without; and by how much not."""
    import torch

    rng, known = random.Random(0), network.results(network.run_alone)
    scale = max(float(result.abs().max()) for results in known for result in results)

    def is_known(feed: int, result: Any) -> bool:
        return any(torch.equal(result, other) for other in known[feed])

    def farthest(feed: int, result: Any) -> float:
        return min(float((result.float() - other.float()).abs().max()) for other in known[feed]) / scale

    gated = network.results(network.run_gated)
    stopped = [after_stops(network, table, rng) for _ in range(60)]
    behind = [found for _ in range(10) if (found := refused_behind(network, table)) is not None]
    sets = {"gated": [(feed, y) for feed, ys in enumerate(gated) for y in ys], "stopped": stopped, "behind": behind}
    return {
        "finite": all(bool(torch.isfinite(result).all()) for results in known for result in results),
        "repeats": max(distinct(results) for results in known),  # 1: always the same bits
        "repeats_by_segment": [repeats_of(network, index) for index in range(network.count)],
        "gated_repeats": max(distinct(results) for results in gated),
        "unknown": {name: f"{sum(not is_known(*each) for each in ys)} of {len(ys)}" for name, ys in sets.items()},
        "farthest": {name: max((farthest(*each) for each in ys), default=0.0) for name, ys in sets.items()},
    }


def distinct(results: Sequence[Any]) -> int:
    return len({result.cpu().numpy().tobytes() for result in results})


def repeats_of(network: Network, index: int) -> int:
    """How many different results a segment gives for one input."""
    network.run_alone(0)
    results = []
    for _ in range(REPEATS):
        network.segments[index]()
        network.device.finish()
        results.append(network.values[index + 1].clone())
    return distinct(results)


def after_stops(network: Network, table: Any, rng: random.Random) -> tuple[int, Any]:
    """The number of an input, and the result of a batch that is stopped at random and continued."""
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
        network.generation += done < network.count - first
        first += done
        table.release(slot)
    network.device.finish()
    return feed, network.y.clone()


def refused_behind(network: Network, table: Any) -> tuple[int, Any] | None:
    """The result of a batch that left, and behind which another was queued that must be refused; None if none left."""
    slot = table.take()
    first = network.launch(slot, feed=0)
    second = network.launch(feed=1)
    table.stop(slot)
    network.device.finish()
    done, behind = first(), second()
    table.release(slot)
    if done == network.count:
        return None
    network.generation += 1
    assert behind == -1, f"{done} were computed, and {behind} of the next batch"
    rest = network.launch(0, done, feed=None if done else 0)
    network.device.finish()
    assert rest() == network.count - done
    return 0, network.y.clone()


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
            network.generation += 1
            left_at[done] += 1
            late_us.append(took_us)
    return spread(late_us), left_at


# Another process


def measure_process(file: int, result: dict[str, Any]) -> None:
    """Launch, ask the other process to stop, and tell when the launch had ended."""
    gpu, _ = gated_gpu(file)
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
            network.generation += done < network.count
            ends.append((ended, done, network.count))
    result["ends_ns"] = ends


# Models as weft serves them


class Program(NamedTuple):
    """A program of torch: an encoder of so many layers of this width, for rows of so many tokens."""

    name: str
    layers: int
    wide: int
    tokens: int
    max_batch: int

    def save(self, folder: Path) -> Path:
        import torch
        from gpu_pairs import encoder
        from torch.export import Dim

        path, shape = folder / f"{self.name}.pt2", (self.tokens, self.wide)
        torch.manual_seed(0)
        module = encoder(self.layers, self.wide, self.wide // 64).eval().requires_grad_(False)
        rows = Dim("rows", max=self.max_batch)
        torch.export.save(torch.export.export(module, (torch.zeros(2, *shape),), dynamic_shapes=({0: rows},)), path)
        return path

    def options(self, **changes: Any) -> Any:
        from weft.runtime.backend import LoadOptions

        sizes = {"max_batch": self.max_batch, "grain_s": GRAIN_S / 2, "precision": "fp16", "independent_rows": True}
        return LoadOptions(**sizes, **changes)

    def draw(self, rng: random.Random, rows: int | None = None) -> Any:
        import numpy as np

        shape = (rows or rng.randint(1, self.max_batch), self.tokens, self.wide)
        return np.random.default_rng(rng.randrange(1 << 30)).standard_normal(shape).astype(np.float32)


HEAVY, URGENT = Program("heavy", 12, 512, 197, 32), Program("urgent", 6, 512, 32, 2)
SMALL = Program("small", 2, 64, 16, 4)  # for a twin


class Batch:
    """A batch on its way through a model."""

    def __init__(self, model: Any, x: Any) -> None:
        from weft.runtime.backend import BatchPart

        self.model, self.at, self.busy, self.wanted = model, 0, False, list[Any]()
        self.feed = self.parts = [BatchPart({model.inputs[0].name: x})]
        self.rows, self.output = len(x), model.outputs[0].name

    def restart(self) -> None:
        self.at, self.parts, self.busy = 0, self.feed, False

    def step(self) -> Any:
        from weft.runtime.backend import Step

        self.busy = True
        return Step(self.at, self.parts, self.rows, len(self.model.segments) - self.at)

    def take(self, outputs: Sequence[Any], computed: int | None) -> Any:
        """Take the end of its step; returns the answer if it was the last."""
        from weft.runtime.backend import BatchPart

        self.busy = False
        if computed is None:
            return outputs[0].answers[self.output].copy()
        self.at += computed
        self.parts = [BatchPart(outputs[0].values)] if computed else self.parts
        return None


class Counts:
    """What became of batches that were stopped at random."""

    def __init__(self) -> None:
        self.batches = self.launches = self.early = self.nothing = self.unknown = 0
        self.farthest = 0.0

    def check(self, batch: Batch, answer: Any) -> None:
        import numpy as np

        self.batches += 1
        self.unknown += not any(np.array_equal(answer, wanted) for wanted in batch.wanted)
        differences = [float(np.abs(answer - wanted).max()) for wanted in batch.wanted]
        self.farthest = max(self.farthest, min(differences) / float(np.abs(batch.wanted[0]).max()))


def stop_at_random(
    batches: Sequence[Batch], start: Callable[[Batch], Any], stop: Callable[[Any], None], wait: Callable[[Any], Any]
) -> dict[str, Any]:
    """Run batches two at a time, of which some are stopped, until all have ended; answers are those without stops.

    start: begins the rest of a batch. stop: stops what *start* returned. wait: returns its outputs, and how many
    segments were computed.
    """
    counts, rng, host_us = Counts(), random.Random(0), []
    for batch in batches:
        for _ in range(3):
            batch.restart()
            batch.wanted.append(batch.take(*wait(start(batch))))
    say("answers without stops are known")
    repeatable = all((first == other).all() for first, *others in (b.wanted for b in batches) for other in others)
    end_s = time.perf_counter() + 12.0
    for turn in range(40):
        waiting, flights = list(batches), []
        for batch in batches:
            batch.restart()
        while waiting or flights:
            ready = [batch for batch in waiting if not batch.busy]
            if ready and len(flights) < 2:
                began_s = time.perf_counter()
                batch = rng.choice(ready)
                flights.append((batch, start(batch)))
                host_us.append((time.perf_counter() - began_s) * 1e6)
                counts.launches += 1
                if turn and rng.random() < 0.5:
                    due_s = time.perf_counter() + rng.random() * 0.002
                    while time.perf_counter() < due_s:
                        pass
                    stop(rng.choice(flights)[1])
                continue
            batch, started = flights.pop(0)
            outputs, computed = wait(started)
            counts.early += computed is not None
            counts.nothing += computed == 0
            if (answer := batch.take(outputs, computed)) is not None:
                counts.check(batch, answer)
                waiting.remove(batch)
        if time.perf_counter() > end_s:
            break
    return {"repeatable": bool(repeatable), **vars(counts), "host_us": spread(host_us)}


def measure_model(result: dict[str, Any], *, shares: bool) -> None:
    """Models in this process, on the lane of the whole GPU or those of two parts."""
    from weft.runtime.cuda.preparing import prepare_on

    gpu, table = gated_gpu()
    with tempfile.TemporaryDirectory() as folder:
        models = []
        for program in (HEAVY, URGENT):
            path = program.save(Path(folder))
            say(f"{program.name} is exported")
            models.append((program, prepare_on(gpu, path, program.options(shares=shares))))
            _, model = models[-1]
            times_ms = {rows: round(sum(times) * 1e3, 3) for rows, times in model.timing.times_s.items()}
            about = {"gated": model.timing.gated, "segments": len(model.segments), "remarks": model.remarks}
            result[program.name] = {**about, "times_ms": dict(sorted(times_ms.items())[:: max(1, len(times_ms) - 1)])}
            say(f"{program.name} is open: {result[program.name]}")
    rng = random.Random(0)
    batches = [Batch(model, program.draw(rng)) for program, model in models for _ in range(6)]

    def start(batch: Batch) -> Any:
        slot = table.take()
        return batch.model.launch(batch.step(), slot), slot

    def wait(started: Any) -> Any:
        launched, slot = started
        end = launched.wait()
        table.release(slot)
        return end

    def on(lane: int, found: dict[str, Any]) -> None:
        with gpu.lane_context(lane):
            found |= stop_at_random(batches, start, lambda started: table.stop(started[1]), wait)

    for lane in [0, *(gpu.cuts.lane_of(part) for part in (1, 2) if shares)]:
        attempt(result, f"lane {lane}", partial(on, lane))


# Models in a worker process


class Started:
    """A step in a worker, and its end when it has come."""

    def __init__(self, batch: Batch, lane: Any, ends: SimpleQueue[Started] | None = None) -> None:
        """ends: where it is put when it has ended."""
        self.batch, self._ended, self._ends = batch, threading.Event(), ends
        self._is_stopped = False
        self.run = batch.model.start(batch.step(), lane, self._take)

    def stop(self) -> None:
        self._is_stopped = True
        self.run.stop()

    def _take(self, end: Any) -> None:
        self.end, self.ended_s = end, time.perf_counter()
        self._ended.set()
        if self._ends is not None:
            self._ends.put(self)

    def wait(self) -> Any:
        if not self._ended.wait(20.0):
            raise TimeoutError("a step does not end")
        if self.end.error is None:
            return self.end.outputs, self.end.computed
        if not self._is_stopped or "InterruptedError" not in str(self.end.error):
            raise self.end.error
        return (), 0  # as in the engine: a step without gates that was stopped before it began computes nothing


def measure_worker(result: dict[str, Any]) -> None:
    """Two models in a real worker process."""
    from weft.runtime.isolated.device import DeviceBackend
    from weft.runtime.isolated.limits import WorkerLimits
    from weft.serving.server import SWITCH_S

    sys.setswitchinterval(SWITCH_S)  # as in a server, or whoever waits for Python's lock waits for 5 ms
    device = os.environ.get("WEFT_GATES_DEVICE", "cuda:0")
    programs = (HEAVY, URGENT) if device == "cuda:0" else (SMALL, SMALL._replace(name="urgent"))
    backend = DeviceBackend(device, WorkerLimits(kill_s=20.0, gates=True), None)
    try:
        with tempfile.TemporaryDirectory() as folder:
            models = []
            for program in programs:
                path = program.save(Path(folder))
                say(f"{program.name} is exported")
                models.append(backend.open(path, program.options(), Path(folder) / "cache"))
                about = {"gated": models[-1].timing.gated, "segments": len(models[-1].segments)}
                result[program.name] = {**about, "remarks": models[-1].remarks}
                say(f"{program.name} is open: {result[program.name]}")
            lane, rng = backend.lane(0), random.Random(0)
            batches = [
                Batch(model, program.draw(rng))
                for program, model in zip(programs, models, strict=True)
                for _ in range(6)
            ]
            begin = partial(Started, lane=lane)
            attempt(
                result,
                "stopped at random",
                lambda found: found.update(
                    stop_at_random(batches, begin, lambda started: started.stop(), lambda started: started.wait())
                ),
            )
            heavy = Batch(models[0], programs[0].draw(rng, programs[0].max_batch))
            urgent = Batch(models[1], programs[1].draw(rng, 1))
            attempt(result, "latency", partial(measure_urgent, heavy, urgent, lane))
            result["deaths"] = backend.counts().deaths
    finally:
        backend.close()


def measure_urgent(heavy: Batch, urgent: Batch, lane: Any, found: dict[str, Any]) -> None:
    """Latencies of an urgent model: alone, beside one that always has batches, and where these are stopped for it."""
    for name, beside, other, stops in (
        ("heavy alone", heavy, None, False),
        ("alone", None, urgent, False),
        ("waits", heavy, urgent, False),
        ("stops", heavy, urgent, True),
    ):
        latencies, heavy_ends, leave_us, busy_s = loop(beside, other, lane, stops=stops)
        per_s, busy_pct = len(heavy_ends) / WINDOW_S, round(busy_s / WINDOW_S * 100, 1)
        found[name] = {
            "us": spread(latencies),
            "heavy_per_s": per_s,
            "leave_us": spread(leave_us),
            "busy_pct": busy_pct,
        }


WINDOW_S, EVERY_S, LEAST_TIMES = 4.0, 0.008, 8
"""Length of a measurement, and between requests to the urgent model: at least this, and this many of its times."""


def loop(
    heavy: Batch | None, urgent: Batch | None, lane: Any, *, stops: bool
) -> tuple[list[float], list[float], list[float], float]:
    """Start batches of *heavy* without end, and *urgent* at random times, for ``WINDOW_S``.

    Returns latencies of *urgent* in us, when batches of *heavy* ended, us from stops to the ends of these steps, and
    the seconds in which the device computed: the rest is the way of tensors to the worker and back.
    """
    rng, ends = random.Random(0), SimpleQueue[Started]()
    latencies, heavy_ends, leave_us = list[float](), list[float](), list[float]()
    under_way: dict[str, Started | None] = {"heavy": None, "urgent": None}
    stopped_s = arrived_s = busy_s = 0.0
    end_s = time.perf_counter() + WINDOW_S
    every_s = max(EVERY_S, LEAST_TIMES * sum(urgent.model.timing.times_at(urgent.rows)) if urgent else 0.0)
    due_s = time.perf_counter() + rng.expovariate(1 / every_s)
    while (now_s := time.perf_counter()) < end_s or any(under_way.values()):
        running = under_way["heavy"]
        if now_s >= end_s:
            due_s = float("inf")
        if urgent is not None and not under_way["urgent"] and not arrived_s and now_s >= due_s:
            arrived_s = due_s
            if stops and running is not None:
                running.stop()
                stopped_s = time.perf_counter()
            urgent.restart()
            under_way["urgent"] = Started(urgent, lane, ends)
        if heavy is not None and running is None and under_way["urgent"] is None and now_s < end_s:
            if heavy.at == len(heavy.model.segments) or not stops:
                heavy.restart()
            under_way["heavy"] = Started(heavy, lane, ends)
        awaited_s = float("inf") if under_way["urgent"] else due_s  # polling would keep Python's lock from the readers
        try:
            ended = ends.get(timeout=max(0.0, min(awaited_s, now_s + 0.1) - time.perf_counter()))
        except Empty:
            continue
        outputs, computed = ended.wait()
        busy_s += (ended.end.ended - ended.end.began) / 1e9
        done = ended.batch.take(outputs, computed) is not None
        if ended.batch is urgent:
            under_way["urgent"] = None
            if done:
                latencies.append((ended.ended_s - arrived_s) * 1e6)
                arrived_s, due_s = 0.0, due_s + rng.expovariate(1 / every_s)
            else:
                under_way["urgent"] = Started(urgent, lane, ends)
            continue
        under_way["heavy"] = None
        if done:
            heavy_ends.append(ended.ended_s)
            ended.batch.at = len(ended.batch.model.segments)
        elif stopped_s:
            leave_us.append((ended.ended_s - stopped_s) * 1e6)
        stopped_s = 0.0
    return latencies, heavy_ends, leave_us, busy_s


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
