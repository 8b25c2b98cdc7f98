"""Contention between two models on one GPU: alone, on shares of it, on streams, with priority, and beside probes.

Needs one NVIDIA GPU that can be partitioned and torch; no server runs. Each row is written to the results as soon as it
is measured, and is not measured again by a later run:

    PYTHONPATH=src python benchmarks/gpu_pairs.py [--only PART-OF-A-NAME] [--most-s 55] [--results FILE]

Rows: `alone/MODEL`: milliseconds on the whole GPU, relative speed on each share, number of kernels, power draw, and
the speeds of the model and of a probe (a copy of device memory) on the two partitions of 84+48; `pair/A/B` and
`triple/A/B/C`: the speeds of all models, by how they share the GPU. A speed is relative to the model alone on the GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from weft.runtime.cuda.partitions import HIGH, LOW, NoPartitions, cut

RESULTS = Path(__file__).parent / "results" / "gpu_pairs.json"
CUTS = (48, 64)
"""Multiprocessors that are cut off of 132: 84+48 and 68+64."""
WINDOW_S = 0.12
LEAST_RUNS = 12
COPIED = 64 << 20
PAIRS = (
    ("resnet50-b32", "llm1b-b1"), ("encoder-b16", "llm7b-b1"), ("encoder-b64", "llm7b-b1"),
    ("bertbase-b32", "llm1b-b8"),
    ("resnet50-b32", "bertlarge-b1"), ("resnet50-b32", "resnet50-b1"), ("resnet50-b8", "bertlarge-b1"),
    ("resnet50-b1", "bertlarge-b1"), ("mobilenet-b1", "resnet50-b1"), ("encoder-b16", "resnet50-b32"),
    ("resnet50-b32", "mobilenet-b32"), ("llm1b-b1", "llm1b-b1*"), ("encoder-b64", "llm1b-b1"),
    ("encoder-b64", "bertlarge-b1"), ("encoder-b64", "resnet50-b1"), ("encoder-b16", "bertlarge-b1"),
)  # fmt: skip
TRIPLES = (
    ("resnet50-b32", "llm1b-b1", "bertlarge-b1"), ("encoder-b16", "llm7b-b1", "resnet50-b1"),
    ("resnet50-b1", "bertlarge-b1", "mobilenet-b1"), ("resnet50-b32", "encoder-b16", "llm1b-b1"),
)  # fmt: skip


class Convolution(nn.Sequential):
    def __init__(self, i: int, o: int, k: int, s: int = 1, groups: int = 1, act: type[nn.Module] | None = nn.ReLU):
        parts = [nn.Conv2d(i, o, k, s, k // 2, groups=groups, bias=False), nn.BatchNorm2d(o)]
        super().__init__(*parts, *([act(inplace=True)] if act else []))


class Block(nn.Module):
    def __init__(self, i: int, w: int, stride: int) -> None:
        super().__init__()
        o = 4 * w
        self.way = nn.Sequential(Convolution(i, w, 1), Convolution(w, w, 3, stride), Convolution(w, o, 1, act=None))
        self.past = Convolution(i, o, 1, stride, act=None) if i != o or stride > 1 else nn.Identity()

    def forward(self, x: Any) -> Any:
        return F.relu_(self.way(x) + self.past(x))


def resnet50() -> nn.Module:
    layers: list[nn.Module] = [Convolution(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    i = 64
    for w, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for at in range(count):
            layers.append(Block(i, w, stride if at == 0 else 1))
            i = 4 * w
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


class Inverted(nn.Module):
    def __init__(self, i: int, o: int, stride: int, wider: int) -> None:
        super().__init__()
        w = i * wider
        first = [Convolution(i, w, 1, act=nn.ReLU6)] if wider > 1 else []
        rest = [Convolution(w, w, 3, stride, w, nn.ReLU6), Convolution(w, o, 1, act=None)]
        self.way, self.adds = nn.Sequential(*first, *rest), stride == 1 and i == o

    def forward(self, x: Any) -> Any:
        return x + self.way(x) if self.adds else self.way(x)


def mobilenet() -> nn.Module:
    layers: list[nn.Module] = [Convolution(3, 32, 3, 2, act=nn.ReLU6)]
    i = 32
    rows = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for wider, o, count, stride in rows:
        for at in range(count):
            layers.append(Inverted(i, o, stride if at == 0 else 1, wider))
            i = o
    last = [Convolution(i, 1280, 1, act=nn.ReLU6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000)]
    return nn.Sequential(*layers, *last)


class Encoder(nn.Module):
    """One layer of an encoder."""

    def __init__(self, wide: int, heads: int) -> None:
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(wide), nn.LayerNorm(wide)
        self.qkv, self.out = nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)
        self.up, self.down = nn.Linear(wide, 4 * wide), nn.Linear(4 * wide, wide)

    def attend(self, x: Any) -> Any:
        rows, tokens, wide = x.shape
        q, k, v = self.qkv(self.first(x)).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, tokens, wide))

    def feed(self, x: Any) -> Any:
        return x + self.down(F.gelu(self.up(self.second(x))))

    def forward(self, x: Any) -> Any:
        return self.feed(self.attend(x))


def encoder(layers: int, wide: int, heads: int) -> nn.Module:
    return nn.Sequential(*[Encoder(wide, heads) for _ in range(layers)])


class Decoder(nn.Module):
    """One layer of a decoder, one token after 512."""

    def __init__(self, wide: int, inner: int, rows: int, context: int = 512) -> None:
        super().__init__()
        self.heads = wide // 128
        self.first, self.second = nn.RMSNorm(wide), nn.RMSNorm(wide)
        self.qkv, self.out = nn.Linear(wide, 3 * wide, bias=False), nn.Linear(wide, wide, bias=False)
        self.gate, self.up = nn.Linear(wide, inner, bias=False), nn.Linear(wide, inner, bias=False)
        self.down = nn.Linear(inner, wide, bias=False)
        self.register_buffer("keys", torch.randn(rows, self.heads, context, 128))
        self.register_buffer("values", torch.randn(rows, self.heads, context, 128))

    def forward(self, x: Any) -> Any:
        rows = x.shape[0]
        q, k, v = self.qkv(self.first(x)).view(rows, 1, 3, self.heads, 128).permute(2, 0, 3, 1, 4)
        self.keys[:, :, -1:], self.values[:, :, -1:] = k, v
        x = x + self.out(F.scaled_dot_product_attention(q, self.keys, self.values).transpose(1, 2).reshape(rows, 1, -1))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def decoder(layers: int, wide: int, inner: int, rows: int) -> nn.Module:
    head = [nn.RMSNorm(wide), nn.Linear(wide, 32000, bias=False)]
    return nn.Sequential(*[Decoder(wide, inner, rows) for _ in range(layers)], *head)


MODELS: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "resnet50": (lambda _: resnet50(), (3, 224, 224)),
    "mobilenet": (lambda _: mobilenet(), (3, 224, 224)),
    "encoder": (lambda _: encoder(24, 1024, 16), (197, 1024)),
    "bertbase": (lambda _: encoder(12, 768, 12), (128, 768)),
    "bertlarge": (lambda _: encoder(24, 1024, 16), (16, 1024)),
    "llm1b": (lambda rows: decoder(22, 2048, 5632, rows), (1, 2048)),
    "llm7b": (lambda rows: decoder(32, 4096, 11008, rows), (1, 4096)),
}


class Place(NamedTuple):
    """A share of the GPU with a priority."""

    name: str
    stream: Any


class Gpu:
    """The streams of all shares, and what tells of power and clock."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")
        whole = torch.cuda.get_device_properties(0).multi_processor_count
        self.places = {"whole": [torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=0)]}
        self.places["whole"] += [torch.cuda.Stream(priority=0)]
        self.places["high"] = [torch.cuda.Stream(priority=-3)]
        self.cuts: list[tuple[str, str]] = []
        for small in CUTS:
            parts = cut(0, small)
            for part in parts:
                self.places[str(part.sms)] = [torch.cuda.ExternalStream(part.streams[LOW])]
                self.places[f"{part.sms}high"] = [torch.cuda.ExternalStream(part.streams[HIGH])]
            self.cuts.append((str(parts[1].sms), str(parts[0].sms)))
            self.kept = [*getattr(self, "kept", []), *parts]
        print("multiprocessors", whole, "cuts", self.cuts, flush=True)
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._nvml.nvmlInit_v2()
        self._handle = ctypes.c_void_p()
        self._nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._handle))

    def draws(self) -> tuple[float, int]:
        """Watts, and the clock of the multiprocessors in MHz."""
        power, clock = ctypes.c_uint(0), ctypes.c_uint(0)
        self._nvml.nvmlDeviceGetPowerUsage(self._handle, ctypes.byref(power))
        self._nvml.nvmlDeviceGetClockInfo(self._handle, 1, ctypes.byref(clock))
        return power.value / 1e3, clock.value


class Model:
    """A model and its graphs on the shares."""

    def __init__(self, name: str) -> None:
        self.name = name
        kind, rows = name.rstrip("*").split("-b")
        make, shape = MODELS[kind]
        with torch.device("cuda"):
            torch.set_default_dtype(torch.float16)
            self._module = make(int(rows)).eval().requires_grad_(False)
            self._input = torch.randn(int(rows), *shape)
            torch.set_default_dtype(torch.float32)
        if len(shape) == 3:
            self._module = self._module.to(memory_format=torch.channels_last)
            self._input = self._input.contiguous(memory_format=torch.channels_last)
        self.weights = sum(tensor.numel() * tensor.element_size() for tensor in self._module.state_dict().values())
        self._pool, self._graphs = torch.cuda.graph_pool_handle(), {}
        self.kernels, self.alone_s = 0, 0.0

    def on(self, stream: Any) -> Callable[[], None]:
        """What runs it once on a stream."""
        if stream.cuda_stream not in self._graphs:
            with torch.inference_mode(), torch.cuda.stream(stream):
                for _ in range(3):
                    self._module(self._input)
                stream.synchronize()
                graph = torch.cuda.CUDAGraph(keep_graph=True)
                graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
                try:
                    self._out = self._module(self._input)
                finally:
                    graph.capture_end()
                self.kernels = nodes(graph.raw_cuda_graph())
                graph.instantiate()
            self._graphs[stream.cuda_stream] = graph
        return self._graphs[stream.cuda_stream].replay


class Copy:
    """The probe: it copies device memory on the multiprocessors of its share."""

    name, weights, kernels, alone_s = "copy", 0, 1, 0.0

    def __init__(self) -> None:
        self._from, self._to = (torch.zeros(COPIED // 4, device="cuda") for _ in range(2))

    def on(self, stream: Any) -> Callable[[], None]:
        def run() -> None:
            for _ in range(4):
                torch.add(self._from, 1.0, out=self._to)

        return run


def nodes(graph: int) -> int:
    count = ctypes.c_size_t(0)
    ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count))
    return count.value


@cache
def model(name: str) -> Any:
    return Copy() if name == "copy" else Model(name)


@cache
def gpu() -> Gpu:
    return Gpu()


def rates(running: Sequence[tuple[Any, Any]], window_s: float = WINDOW_S) -> list[float]:
    """How often a second each of the models runs on its stream while all of them do."""
    runs = [model.on(stream) for model, stream in running]
    torch.cuda.synchronize()
    longest = max((model.alone_s for model, _ in running), default=0.0)
    until_s = max(window_s, LEAST_RUNS * longest)
    ends: list[list[float]] = [[] for _ in running]
    stop = threading.Event()

    def keep_busy(at: int) -> None:
        """Three runs are under way at any time; their events tell when each has ended."""
        stream, waiting = running[at][1], []
        with torch.inference_mode(), torch.cuda.stream(stream):
            while not stop.is_set():
                runs[at]()
                event = torch.cuda.Event()
                try:
                    event.record(stream)
                except RuntimeError:  # a stream of another context: wait for all that was started
                    stream.synchronize()
                waiting.append(event)
                if len(waiting) > 3:
                    waiting.pop(0).synchronize()
                    ends[at].append(time.perf_counter())
        stream.synchronize()

    threads = [threading.Thread(target=keep_busy, args=(at,)) for at in range(len(running))]
    for each in threads:
        each.start()
    time.sleep(until_s * 1.25)
    rates.draws = gpu().draws()  # type: ignore[attr-defined]
    stop.set()
    for thread in threads:
        thread.join()
    first = max(end[0] for end in ends) + 0.1 * until_s
    last = min(end[-1] for end in ends)
    return [rate(end, first, last) for end in ends]


def rate(ends: Sequence[float], first: float, last: float) -> float:
    """Runs a second between two times: whole runs between the first and the last end within."""
    within = [end for end in ends if first <= end <= last]
    if len(within) < 2:
        within = list(ends)
    return (len(within) - 1) / (within[-1] - within[0]) if len(within) > 1 else 0.0


def alone(name: str, on: str = "whole") -> float:
    """Its rate alone on a share."""
    return rates([(model(name), gpu().places[on][0])])[0]


@cache
def usual(name: str) -> float:
    """Its rate alone on the whole GPU, the better of two."""
    result = max(alone(name) for _ in range(2))
    model(name).alone_s = 1 / result
    return result


@cache
def copies(on: str) -> float:
    """The rate of the probe alone on a share."""
    return alone("copy", on)


def alone_row(name: str) -> dict[str, Any]:
    full = usual(name)
    rates([(model(name), gpu().places["whole"][0])], 0.4)
    watts, clock = rates.draws  # type: ignore[attr-defined]
    large, small = gpu().cuts[0]
    speeds = {on: round(alone(name, on) / full, 4) for pair in gpu().cuts for on in pair}
    results = {"ms": round(1e3 / full, 4), "kernels": model(name).kernels, "weights": model(name).weights}
    results |= {"watts": watts, "mhz": clock, "speeds": speeds}
    for own, other in ((large, small), (small, large)):
        probe = copies(other)
        mine, its = rates([(model(name), gpu().places[own][0]), (model("copy"), gpu().places[other][0])])
        results[f"on {own} beside copy"] = {"speed": round(mine / full, 4), "copy": round(its / probe, 4)}
        results[f"copy gb_s on {other}"] = round(probe * 4 * 2 * COPIED / 1e9, 1)
    return results


def together(names: Sequence[str], places: Sequence[Any]) -> list[float]:
    result = rates([(model(name), place) for name, place in zip(names, places, strict=True)])
    return [round(one / usual(name), 4) for one, name in zip(result, names, strict=True)]


def pair_row(a: str, b: str) -> dict[str, Any]:
    places, found = gpu().places, {}
    first, second, high = places["whole"][0], places["whole"][1], places["high"][0]
    found["streams"] = together((a, b), (first, second))
    found["mhz"] = rates.draws[1]  # type: ignore[attr-defined]
    found["b high"] = together((a, b), (first, high))
    found["a high"] = together((a, b), (high, second))
    for large, small in gpu().cuts:
        found[f"{large}+{small}"] = together((a, b), (places[large][0], places[small][0]))
        found[f"{large}+{small} mhz"] = rates.draws[1]  # type: ignore[attr-defined]
        found[f"{small}+{large}"] = together((a, b), (places[small][0], places[large][0]))
    return found


def triple_row(*names: str) -> dict[str, Any]:
    """All on streams; and one on one side, two on streams of the other."""
    places = gpu().places
    results = {"streams": together(names, places["whole"])}
    for large, small in gpu().cuts:
        for own in names:
            others = [name for name in names if name != own]
            second = places[f"{large}high"][0]
            speeds = together((own, *others), (places[small][0], places[large][0], second))
            results[f"{own} on {small}, others on {large} (last high)"] = speeds
    return results


def rows() -> dict[str, Callable[[], dict[str, Any]]]:
    names = dict.fromkeys(name for pair in PAIRS for name in pair if not name.endswith("*"))
    results: dict[str, Callable[[], dict[str, Any]]] = {f"alone/{name}": partial(alone_row, name) for name in names}
    results |= {f"pair/{a}/{b}": partial(pair_row, a, b) for a, b in PAIRS}
    return results | {f"triple/{'/'.join(names)}": partial(triple_row, *names) for names in TRIPLES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--most-s", type=float, default=1e9)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    began_s = time.monotonic()
    done = json.loads(arguments.results.read_text()) if arguments.results.is_file() else {}
    try:
        gpu()
    except NoPartitions as error:
        sys.exit(f"this GPU cannot be cut: {error}")
    done["machine"] = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "cuda": torch.version.cuda}
    for name, measure in rows().items():
        if name in done or arguments.only not in name:
            continue
        if time.monotonic() - began_s > arguments.most_s:
            print("time is up; start it again for the rest")
            return
        try:
            done[name] = measure()
        except Exception as error:  # one that fails shall not keep the others from being measured
            print(name, "failed:", error, flush=True)
            continue
        print(f"{time.monotonic() - began_s:6.1f} s", name, json.dumps(done[name]), flush=True)
        arguments.results.parent.mkdir(exist_ok=True)
        arguments.results.write_text(json.dumps(done, indent=1) + "\n")


if __name__ == "__main__":
    main()
