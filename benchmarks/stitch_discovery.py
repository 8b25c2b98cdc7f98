"""The cost of finding the weights that many large encoders share: CPU time relative to reading their files, and memory.

For each method of fine-tuning, the models are written to a folder, read and compared in a process of its own, and
removed. The files of the default 32 models, 110 million weights each, take 14 GB.

    python benchmarks/stitch_discovery.py --folder FOLDER
    python benchmarks/stitch_discovery.py --folder FOLDER --only spread     # adds to the recorded results
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import machine

from weft.base.jsonfile import write_json
from weft_stitch.bodies.body_stitching import stitch_body
from weft_stitch.making.encoders import ENCODERS, EncoderRecipe

RESULTS = Path(__file__).parent / "results" / "stitch_discovery.json"
TUNED: dict[str, tuple[dict[str, Any], float]] = {
    "rank 16, merged": ({"rank": 16}, 1e-6),
    "last fifth of the layers": ({"frozen": 0.8}, 0.0),
    "a fifth of the layers, spread": ({"full": 0.2}, 0.0),
}
"""How models were made, and what of a weight may be lost."""


def measured(architecture: str, tasks: int, folder: Path, only: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    base = None
    for name, (tuned, tolerance) in ((name, how) for name, how in TUNED.items() if only in name):
        files = list(EncoderRecipe(architecture, tasks, **tuned).save(folder / "tuned"))
        if tolerance:
            (base,) = EncoderRecipe(architecture, 1).save(folder / "base")
        given = [str(tolerance), str(base) if tolerance else "", *map(str, files)]
        run = subprocess.run([sys.executable, __file__, "--found", *given], stdout=subprocess.PIPE, check=True)
        results[name] = json.loads(run.stdout)
        shutil.rmtree(folder / "tuned")
        print(name, results[name], flush=True)
    return results


def discovered(tolerance: float, base: str, files: list[str]) -> dict[str, float]:
    """What the whole of it took, up to the graph of the body; nothing is compared with the models, or written."""
    began, wall = time.process_time(), time.perf_counter()
    for file in files:
        with open(file, "rb", buffering=0) as opened:
            while opened.read(1 << 24):
                pass
    read, began = time.process_time() - began, time.process_time()
    made = stitch_body(files, tolerance=tolerance, base=base or None, check=False, measure=False)
    return {
        "reading_cpu_s": read,
        "whole_cpu_s": time.process_time() - began,
        "wall_s": time.perf_counter() - wall,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "models_gb": made.apart_bytes / 1e9,
        "body_gb": made.weight_bytes / 1e9,
        "weights": made.weight_bytes / made.apart_bytes,
    }


def main() -> None:
    if sys.argv[1:2] == ["--found"]:
        tolerance, base, *files = sys.argv[2:]
        print(json.dumps(discovered(float(tolerance), base, files)))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architecture", choices=list(ENCODERS), default="base-encoder")
    parser.add_argument("--tasks", type=int, default=32)
    parser.add_argument("--folder", type=Path, required=True, help="where the files are written")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--only", default="", help="a part of the names of those ways of tuning that are measured")
    arguments = parser.parse_args()
    before = json.loads(arguments.output.read_text())["tuned"] if arguments.only and arguments.output.exists() else {}
    result = before | measured(arguments.architecture, arguments.tasks, arguments.folder, arguments.only)
    settings = {"architecture": arguments.architecture, "tasks": arguments.tasks}
    write_json(arguments.output, {"machine": machine("onnxruntime"), "settings": settings, "tuned": result})


if __name__ == "__main__":
    main()
