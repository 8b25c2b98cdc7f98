"""The cost of running a model in segments: CPU time of all segments relative to plain ONNX Runtime.

One thread, batch 1, the default grain. Variants are interleaved and the fastest repeat counts; time is the CPU time of
the thread, so that other processes matter little. Writes benchmarks/results/cutting_cost.json.

    python benchmarks/cutting_cost.py
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort

import weft
from weft.models import zoo
from weft.models.packaged import PACKAGED, packaged_models
from weft.runtime.onnxruntime_cpu.preparing import LoadOptions, prepare
from weft.runtime.samples import sample

RESULTS = Path(__file__).parent / "results"
TARGET = 0.10
ZOO = {"resnet50": {}, "mobilenet-v2": {}, "bert-base": {"seq_len": 64}}
PACKAGED_NAMES = ("pp-ocr-det", "pp-ocr-rec")


def models(folder: Path) -> dict[str, tuple[Path, dict[str, tuple[int, ...]]]]:
    """Name -> file and shapes."""
    for name, parameters in ZOO.items():
        zoo.export(name, folder / f"{name}.onnx", **parameters)
    results = {name: (folder / f"{name}.onnx", {}) for name in ZOO}
    here = packaged_models()
    return results | {name: (here[name], dict(PACKAGED[name].shapes)) for name in PACKAGED_NAMES if name in here}


def plain(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def thread_s(run, feed) -> float:
    began = time.thread_time()
    run(feed)
    return time.thread_time() - began


def measure(name: str, path: Path, shapes, grain_s: float, repeats: int) -> dict[str, object]:
    began = time.perf_counter()
    model = prepare(path, LoadOptions(grain_s=grain_s, max_batch=1, shapes=shapes))
    prepared_s = time.perf_counter() - began
    session = plain(path)
    feed = sample(model.inputs, model.blueprint.warm_shapes, 0)
    variants = {"cut": model.run, "whole": lambda values: session.run(None, values)}
    same = all(
        got.tobytes() == wanted.tobytes()
        for got, wanted in zip(model.run(feed).values(), session.run(None, feed), strict=True)
    )
    fastest = {key: min(thread_s(run, feed) for _ in range(2)) for key, run in variants.items()}
    for _ in range(repeats):
        for key, run in variants.items():
            fastest[key] = min(fastest[key], thread_s(run, feed))
    times_ms = [time_s * 1e3 for time_s in model.timing.times_s[1]]
    model.close()
    return {
        "model": name, "segments": len(times_ms), "whole_ms": fastest["whole"] * 1e3, "cut_ms": fastest["cut"] * 1e3,
        "cost": fastest["cut"] / fastest["whole"] - 1, "longest_ms": max(times_ms), "same_bits": same,
        "prepared_s": prepared_s,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--grain-ms", type=float, default=LoadOptions().grain_s * 1e3)
    chosen = parser.parse_args()
    rows = []
    print(
        f"{'model':>14} {'segments':>8} {'whole ms':>9} {'cut ms':>9} {'cost':>7} {'longest ms':>10} {'same bits':>9}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, (path, shapes) in models(Path(folder)).items():
            row = measure(name, path, shapes, chosen.grain_ms / 1e3, chosen.repeats)
            rows.append(row)
            print(
                f"{name:>14} {row['segments']:8} {row['whole_ms']:9.1f} {row['cut_ms']:9.1f} {row['cost']:+7.1%}"
                f" {row['longest_ms']:10.1f} {row['same_bits']!s:>9}"
            )
    most = max(row["cost"] for row in rows)
    print(f"highest cost {most:+.1%}, target {TARGET:.0%}: {'met' if most <= TARGET else 'MISSED'}")
    machine = {
        "machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version(),
        "onnxruntime": ort.__version__, "numpy": np.__version__, "weft": weft.__version__,
        "grain_ms": chosen.grain_ms, "repeats": chosen.repeats,
        "statistic": "fastest of the repeats, thread time, variants interleaved; longest segment: median thread time",
    }  # fmt: skip
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "cutting_cost.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
