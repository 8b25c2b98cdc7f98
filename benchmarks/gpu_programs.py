"""The cost of running a torch program in weft on a GPU, compared with the same module as one CUDA graph of torch.

Needs one NVIDIA GPU, torch and onnxruntime-gpu (docs/gpu.md); `--device cuda:twin` tries the logic on a CPU.

    python benchmarks/gpu_programs.py [--rows 16] [--layers 24] [--seconds 3] [--results FILE]

The module is an encoder of 197 tokens, width 1024, in fp16: bare, as a program in one piece, and cut at 0.25 ms.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import machine
from torch import nn

from weft.base.jsonfile import write_json
from weft.runtime.backend import LoadOptions
from weft.runtime.cuda.engine import device_named
from weft.runtime.cuda.preparing import prepare_on

TOKENS, WIDTH, HEADS = 197, 1024, 16
RESULTS = Path(__file__).parent / "results" / "gpu_programs.json"
REPLAYS = 20


class Layer(nn.Module):
    """Attention, and two products, each with a way around it."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.taken, self.given = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Any) -> Any:
        rows, count, width = x.shape
        heads = self.taken(x).view(rows, count, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        x = self.first(x + self.given(mixed.transpose(1, 2).reshape(rows, count, width)))
        return self.second(x + self.narrow(nn.functional.gelu(self.wide(x))))


def encoder(layers: int, width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(width) for _ in range(layers))).eval()


def replayed_ms(run: Any, finish: Any, seconds: float) -> float:
    """Milliseconds of one of many that are started one behind the other."""
    replays, began_s = 0, time.perf_counter()
    while not replays or time.perf_counter() - began_s < seconds:
        for _ in range(REPLAYS):
            run()
        finish()
        replays += REPLAYS
    return (time.perf_counter() - began_s) / replays * 1e3


def bare_ms(device: Any, net: nn.Module, rows: int, width: int, seconds: float) -> float:
    """The module as one graph."""
    where = "cpu" if device.kind == "cpu" else f"cuda:{device.index}"
    with device.lane_context():
        half = net.half().to(where)
        x = torch.randn(rows, TOKENS, width, device=where, dtype=torch.float16)

        def run() -> None:
            half(x)

        with torch.no_grad():
            return replayed_ms(device.capture(run), device.finish, seconds)


def program(device: Any, path: Path, rows: int, grain_s: float, seconds: float) -> dict[str, Any]:
    """The same as weft runs it."""
    options = LoadOptions(grain_s=grain_s, precision="fp16", max_batch=rows, independent_rows=True)
    began_s = time.perf_counter()
    model: Any = prepare_on(device, path, options)
    prepared_s = time.perf_counter() - began_s
    rung = next(rung for rung in model._rungs if rung.rows >= rows)

    def run() -> None:
        for segment in range(len(model.segments)):
            rung.run(segment)

    with device.lane_context():
        took_ms = replayed_ms(run, device.finish, seconds)
    results = {
        "ms": took_ms,
        "segments": len(model.segments),
        "longest_ms": max(model.timing.times_s[rows]) * 1e3,
        "memory_mib": model.residency.memory_bytes >> 20,
        "weights_mib": model._weights.bytes >> 20,
        "prepared_s": prepared_s,
        "remarks": list(model.remarks),
    }
    model.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    device = device_named(arguments.device)
    with tempfile.TemporaryDirectory() as folder:
        path, net = Path(folder) / "encoder.pt2", encoder(arguments.layers, arguments.width)
        rows = torch.export.Dim("rows")
        example = torch.zeros(2, TOKENS, arguments.width)
        torch.export.save(torch.export.export(net, (example,), dynamic_shapes=({0: rows},)), path)
        results: dict[str, Any] = {"whole": program(device, path, arguments.rows, 1.0, arguments.seconds)}
        results["cut"] = program(device, path, arguments.rows, 0.00025, arguments.seconds)
        results["bare_ms"] = bare_ms(device, net, arguments.rows, arguments.width, arguments.seconds)
    for name in ("whole", "cut"):
        results[name]["over_bare"] = results[name]["ms"] / results["bare_ms"]
        print(
            name, {key: round(value, 3) if isinstance(value, float) else value for key, value in results[name].items()}
        )
    environment = machine("torch", "onnxruntime") | {"device": device.name}
    write_json(
        arguments.results, {"machine": environment, "rows": arguments.rows, "layers": arguments.layers, **results}
    )


if __name__ == "__main__":
    main()
