"""How long models are compiled: for one row and the largest batch, which a server waits for, then for all batch sizes.

As a server does it: the second stage starts from the packages of the first, and cuts a model that takes longer than its
grain. Several networks are compiled side by side (``--jobs``), with 8 threads each. Needs one NVIDIA GPU, torch, triton
and gcc (docs/gpu.md); torchvision and rapidocr-onnxruntime for their networks.

    python benchmarks/gpu_engine_compiling.py [--only REGEX] [--all REGEX] [--jobs 2] [--results FILE]

Networks that match ``--all`` are compiled for all batch sizes. Each row is written as soon as it is measured.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_engine_nets import NETWORKS
from machine import machine

from weft.models.packaged import PACKAGED
from weft.runtime.cuda.compiling import CompileLimits, compile_model
from weft.runtime.cuda.engine import device_named
from weft.runtime.cuda.model import ladder
from weft.runtime.cuda.packages import CompileJob, find
from weft.runtime.cutting import DEVICE_GRAIN_S

RESULTS = Path(__file__).parent / "results" / "gpu_engine_compiling.json"
LIMITS = CompileLimits(600.0, 64 << 30, 8)
MOST_PIECES = 64


def job_of(name: str, folder: Path, device_name: str) -> CompileJob:
    """The job that a server has for a network: batches of up to its largest size, in pieces if they take long."""
    make, (_, largest) = NETWORKS[name]
    network = make(folder / f"{name}.onnx")
    return CompileJob(
        model=network.path, shapes=network.shapes, rows=tuple(ladder(largest)), batched=True, precision="fp16",
        device="cuda:0", device_name=device_name, grain_s=None if name in PACKAGED else DEVICE_GRAIN_S,
        max_pieces=MOST_PIECES,
    )  # fmt: skip


def timed(job: CompileJob, folder: Path) -> dict[str, Any]:
    """Compile a job; its seconds, batch sizes and pieces."""
    began_s = time.perf_counter()
    manifest = find(compile_model(job, folder, LIMITS))
    assert manifest is not None
    seconds = round(time.perf_counter() - began_s, 1)
    return {"seconds": seconds, "rows": sorted(manifest.packages), "pieces": len(manifest.pieces)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="^(?!tiny)", help="regular expression")
    parser.add_argument("--all", default="^bert-large-128$", help="regular expression")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    device_name = device_named("cuda:0").name
    results = {"rows": {}, "machine": machine("torch", "triton", "onnx") | {"device": device_name}}
    if arguments.results.is_file():
        results["rows"] = json.loads(arguments.results.read_text("utf-8"))["rows"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        wanted = [name for name in NETWORKS if re.search(arguments.only, name) and name not in results["rows"]]
        jobs = {name: job_of(name, folder, device_name) for name in wanted}

        def measure(name: str) -> None:
            row = {"first": timed(jobs[name].first_stage(), folder / "packages")}
            if re.search(arguments.all, name):
                row["all"] = timed(jobs[name], folder / "packages")
            results["rows"][name] = row
            print(name, row, flush=True)
            arguments.results.write_text(json.dumps(results, indent=1) + "\n", "utf-8")

        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(measure, wanted))


if __name__ == "__main__":
    main()
