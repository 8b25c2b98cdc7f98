"""The cost of evicting models from a GPU's memory and loading them again: one of 100 MB, and 40 in the memory of 10.

Needs one NVIDIA GPU, torch and onnxruntime-gpu (docs/gpu.md). Rows are written as soon as they are measured:

    python benchmarks/gpu_swapping.py [--seconds 20] [--results FILE]

`return/resnet50`: a float32 ResNet50 is evicted and loaded again, compared with the time of its bytes over the bus in
the same run. `turns/40 in 10`: a server over 40 copies of a BERT of four layers (float16, 100 MB, 128 tokens, one row,
one segment) whose device memory holds 10 of them. Eight clients send requests without pause to models drawn by Zipf's
law, every second request with a strict deadline of 100 ms. Answers are compared with those of an idle server.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import threading
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gpu_asking import FOLDER, Rows, Served, connected, exchanged, exported, tensor_in

RESULTS = Path(__file__).parent / "results" / "gpu_swapping.json"
REPEATS = 30
MODELS, ROOM, CLIENTS = 40, 10, 8
TOKENS, DEADLINE_MS = 128, 100
MOVED_BYTES = 256 << 20


def returned() -> dict[str, Any]:
    """How long a model takes to come back, and its bytes over the bus."""
    import torch

    from weft.runtime.backend import LoadOptions
    from weft.runtime.cuda.engine import CudaEngine

    engine = CudaEngine("cuda:0")
    options = LoadOptions(grain_s=0.00025, max_batch=1, rests=True)
    engine.open(exported("resnet50"), options, FOLDER / "bare", learn=True).close()
    model: Any = engine.open(exported("resnet50"), options, FOLDER / "bare", learn=False)
    device: Any = engine.device
    host = torch.empty(MOVED_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(MOVED_BYTES, dtype=torch.uint8, device="cuda")
    back, away, bus = [], [], []
    with device.lane_context():
        for _ in range(REPEATS):
            for times, what in (
                (back, model.restore),
                (away, model.evict),
                (bus, lambda: there.copy_(host, non_blocking=True)),
            ):
                began_s = time.perf_counter()
                what()
                device.finish()
                times.append(time.perf_counter() - began_s)
    speed = MOVED_BYTES / statistics.median(bus)
    back_s = statistics.median(back)
    return {
        "moving_mb": model.residency.moving_bytes / 1e6,
        "staying_mb": model.residency.memory_bytes / 1e6,
        "back_ms": back_s * 1e3,
        "away_ms": statistics.median(away) * 1e3,
        "bus_gb_per_s": speed / 1e9,
        "times_the_bus": back_s * speed / model.residency.moving_bytes,
    }


def network() -> Path:
    """A BERT of four layers, as a file."""
    path = FOLDER / "models" / "bert-of-four-layers.onnx"
    if not path.exists():
        from weft.models import zoo

        path.parent.mkdir(parents=True, exist_ok=True)
        zoo.export("bert-base", path, seq_len=TOKENS, layers=4)
    return path


class Asking:
    """A client that asks for models by Zipf's law, and what it was told."""

    def __init__(self, port: int, seed: int, expected: bytes | None) -> None:
        self._port, self._rng, self._expected = port, np.random.default_rng(seed), expected
        self.answers: Counter[str] = Counter()
        self.latencies_s: list[float] = []
        self.said: Counter[str] = Counter()

    def run(self, until_s: float) -> None:
        connection = connected(self._port)
        shares = 1 / np.arange(1, MODELS + 1)
        while time.perf_counter() < until_s:
            number = int(self._rng.choice(MODELS, p=shares / shares.sum()))
            strict = bool(self._rng.integers(2))
            began_s = time.perf_counter()
            status, body = exchanged(connection, request(f"m{number:02}", strict=strict))
            self.latencies_s.append(time.perf_counter() - began_s)
            self.answers[self._judged(status, body)] += 1

    def _judged(self, status: int, body: bytes) -> str:
        if status == 200:
            return "right" if tensor_in(body) == self._expected else "wrong"
        self.said[re.sub(r"[0-9.]+", "N", body.decode())[:120]] += 1
        return "refused" if status in (429, 503, 504) else "lost"


@cache
def request(name: str, *, strict: bool) -> bytes:
    """One row for a model; *strict*: with a deadline."""
    rng = np.random.default_rng(0)
    names = ("input_ids", "token_type_ids", "attention_mask")
    tensors = {name: rng.integers(0, 2, (1, TOKENS)) for name in names}
    parameters: dict[str, Any] = {"binary_data_output": True}
    if strict:
        parameters["timeout"] = DEADLINE_MS * 1000
    inputs = [
        {"name": name, "shape": array.shape, "datatype": "INT64", "parameters": {"binary_data_size": array.nbytes}}
        for name, array in tensors.items()
    ]
    text = json.dumps({"inputs": inputs, "parameters": parameters}).encode()
    body = text + b"".join(array.tobytes() for array in tensors.values())
    head = (
        f"POST /v2/models/{name}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        f"Inference-Header-Content-Length: {len(text)}\r\n\r\n"
    )
    return head.encode() + body


def turns(seconds: float) -> dict[str, Any]:
    """More models than fit, asked for by several clients."""
    settings = {"max_batch": 1, "slo_ms": 1000.0, "grain_ms": 5.0}
    alone = Served({"m00": settings}, 64 << 30, network())
    try:
        expected = tensor_in(exchanged(connected(alone.port), request("m00", strict=False))[1])
        held = metric(alone, "weft_memory_used_bytes")
    finally:
        alone.close()
    began_s = time.perf_counter()
    server = Served({f"m{number:02}": settings for number in range(MODELS)}, round(ROOM * held), network())
    try:
        loaded_s = time.perf_counter() - began_s
        clients = [Asking(server.port, seed, expected) for seed in range(CLIENTS)]
        until_s = time.perf_counter() + seconds
        threads = [threading.Thread(target=client.run, args=(until_s,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        returns = metric(server, "weft_device_returns_total")
        evictions = metric(server, "weft_evictions_total")
        used = metric(server, "weft_device_memory_bytes")
    finally:
        server.close()
    answers: Counter[str] = sum((client.answers for client in clients), Counter())
    latencies = [latency_s for client in clients for latency_s in client.latencies_s]
    said: Counter[str] = sum((client.said for client in clients), Counter())
    return {
        "held_mb": held / 1e6,
        "budget_mb": ROOM * held / 1e6,
        "device_mb": used / 1e6,
        "loaded_s": loaded_s,
        "requests": sum(answers.values()),
        "per_s": sum(answers.values()) / seconds,
        **{kind: answers[kind] for kind in ("right", "wrong", "refused", "lost")},
        "returns": returns,
        "evictions": evictions,
        "p50_ms": float(np.percentile(latencies, 50)) * 1e3,
        "p99_ms": float(np.percentile(latencies, 99)) * 1e3,
        "said": dict(said.most_common(5)),
    }


def metric(server: Served, name: str) -> float:
    """The sum of a metric over its labels."""
    lines = (line for line in server.metrics().splitlines() if re.match(rf"{name}[ {{]", line))
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=20.0)
    options.add_argument("--results", type=Path, default=RESULTS)
    arguments = options.parse_args()
    FOLDER.mkdir(exist_ok=True)
    rows = Rows(arguments.results, "", "cuda:0")
    rows.measure("return/resnet50", returned)
    rows.measure(f"turns/{MODELS} in {ROOM}", lambda: turns(arguments.seconds))


if __name__ == "__main__":
    main()
