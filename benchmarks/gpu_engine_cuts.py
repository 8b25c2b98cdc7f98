"""What cutting a compiled model costs on one GPU: one graph for the whole model, and one for each piece.

A model is cut so that no piece takes longer than `--grain-ms` at one row and four times that at the largest batch.
`whole_ms` and `chain_ms` are the median times of the whole graph and of all pieces started one behind the other, in
turns; `longest_ms` is the longest piece; `differs` is the largest difference of the outputs, relative to the largest
output. Needs one NVIDIA GPU, torch, triton and gcc.

    PYTHONPATH=src python benchmarks/gpu_engine_cuts.py [--only REGEX] [--grain-ms 0.25] [--jobs 4] [--results FILE]
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from gpu_engine_nets import NETWORKS, Network
from machine import machine

from weft.models.onnx_graph import load
from weft.runtime.cuda.compiling import CompileLimits, compile_model
from weft.runtime.cuda.engine import device_named
from weft.runtime.cuda.packages import CompileJob, find
from weft.runtime.cuda.precision import difference
from weft.runtime.cuda.rung import Rung
from weft.runtime.cuda.torch_files import torch_device_name
from weft.runtime.cuda.torch_packages import open_packages

RESULTS = Path(__file__).parent / "results" / "gpu_engine_cuts.json"
LIMITS = CompileLimits(seconds=600.0, memory_bytes=64 << 30, threads=4)
"""Of the compiler of one model."""
TURNS = 7


def compiled(network: Network, sizes: tuple[int, ...], device: Any, grain_s: float | None, folder: Path) -> Path:
    """The folder of a network's packages; *grain_s*: None for one piece."""
    job = CompileJob(
        model=network.path, shapes=network.shapes, rows=sizes, batched=True, precision="fp16",
        device=torch_device_name(device), device_name=device.name, grain_s=grain_s, max_pieces=64,
    )  # fmt: skip
    return compile_model(job, folder, LIMITS)


def feed_of(network: Network, rows: int) -> dict[str, Any]:
    rng, feed = np.random.default_rng(0), {}
    kinds = {value.name: value.type.tensor_type.elem_type for value in load(network.path).graph.input}
    for name, (_, *sizes) in network.shapes.items():
        floats = kinds[name] == 1
        drawn = rng.standard_normal((rows, *sizes)) if floats else rng.integers(0, 2, (rows, *sizes))
        feed[name] = drawn.astype(np.float32 if floats else np.int64)
    return feed


def measured(device: Any, network: Network, rows: int, folders: list[Path]) -> dict[str, Any]:
    """A row of the results; *folders*: of the whole model and of its pieces."""
    rungs, outputs = [], []
    for folder in folders:
        manifest = find(folder)
        assert manifest is not None
        segments = open_packages(device, folder, manifest)
        rung = Rung(device, rows, segments, feed_of(network, rows), batched=True)
        run_all(rung)
        outputs.append({name: device.copy_out(rung.tensors[name]) for name in segments[-1].spec.outputs})
        device.finish()
        rungs.append((rung, segments))
    times_s: list[list[float]] = [[], []]
    for _ in range(TURNS):
        for taken, (rung, _) in zip(times_s, rungs, strict=True):
            taken.append(device.timed(lambda rung=rung: run_all(rung)))
    pieces, _ = rungs[1]
    whole_ms, chain_ms = (round(1e3 * median(taken), 4) for taken in times_s)
    return {
        "whole_ms": whole_ms,
        "pieces": pieces.segments,
        "chain_ms": chain_ms,
        "longest_ms": round(1e3 * max(map(pieces.timed, range(pieces.segments))), 4),
        "costs": round(chain_ms / whole_ms - 1, 3),
        "differs": float(f"{difference(*outputs):.1e}"),
    }


def run_all(rung: Rung) -> None:
    for segment in range(rung.segments):
        rung.run(segment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="^(resnet50|bert-large-128|vit-b16|speech|u-net)$")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--grain-ms", type=float, default=0.25)
    parser.add_argument("--jobs", type=int, default=4, help="models that are compiled at a time")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    device, rows_of = device_named(arguments.device), {}
    names = [name for name in NETWORKS if re.search(arguments.only, name)]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(arguments.jobs) as pool:
        networks = {name: NETWORKS[name][0](Path(scratch) / f"{name}.onnx") for name in names}

        def both(name: str) -> tuple[list[Path], float]:
            began_s, sizes = time.perf_counter(), NETWORKS[name][1]
            folders = [
                compiled(networks[name], sizes, device, grain_s, Path(scratch) / "packages")
                for grain_s in (arguments.grain_ms / 1e3, None)
            ]
            return folders[::-1], time.perf_counter() - began_s

        ready = dict(zip(names, pool.map(both, names), strict=True))
        with device.lane_context():
            for name, (folders, took_s) in ready.items():
                print(f"{name}: compiled twice in {took_s:.0f} s", flush=True)
                for rows in NETWORKS[name][1]:
                    row = rows_of[f"{name} b{rows}"] = measured(device, networks[name], rows, folders)
                    print(f"  b{rows}: {row}", flush=True)
    made_on = machine("torch", "onnx") | {"device": device.name}
    content = {"rows": rows_of, "grain_ms": arguments.grain_ms, "machine": made_on}
    arguments.results.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
