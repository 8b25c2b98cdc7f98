"""The speed-up of ``weft tune --target onnxruntime``: the shipped classifiers, and text recognition of an OCR package.

Each model is tuned at a margin of 1 % on one half of its samples; the score is measured on the other half, which the
tuning did not use. Then the original and the written file are opened afresh and take turns in the same run: CPU time of
one thread, and wall time. A result that is slower than the original would be a failure.

    python benchmarks/runtime_target.py [NAME ...]
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from machine import machine
from text_lines import draw_lines

import weft
from weft.base.jsonfile import write_json
from weft.models import classifiers
from weft.models.packaged import packaged_models
from weft.runtime.onnxruntime_cpu.sessions import open_session
from weft.runtime.timing import time_in_turns
from weft_tune.runtime_target.fastest import describe_processor

RESULTS = Path(__file__).parent / "results" / "runtime_target.json"
OCR = "pp-ocr-rec"
MARGIN, TURNS, LINES = 0.01, 101, 64
LEAST_SPEEDUP, NOT_SLOWER = 1.2, 0.98


def saved_samples(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The model's file, and what to tune and to test it with."""
    if name == OCR:
        path = packaged_models()[name]
        halves = [draw_lines(path, LINES, seed) for seed in (0, 1)]
        metric = f"{Path(__file__).parent / 'text_lines.py'}:characters"
        entry = "x"
    else:
        path, metric, entry = classifiers.model_path(name), "top1", "image"
        held = classifiers.validation(name)
        images, labels = held.inputs(), held.label.astype(np.int64)
        halves = [(images[start::2], labels[start::2]) for start in (0, 1)]
    for part, (inputs, labels) in zip(("data", "test"), halves, strict=True):
        np.savez(folder / f"{part}.npz", **{entry: inputs, "label": labels})
    return path, {"data": folder / "data.npz", "test": folder / "test.npz", "metric": metric}


def measured(name: str, turns: int) -> dict[str, Any]:
    """One row: what was chosen, what it scores, and what it takes beside the model as it was."""
    with TemporaryDirectory() as spare:
        folder = Path(spare)
        path, options = saved_samples(name, folder)
        result = weft.tune(path, target="onnxruntime", margin=MARGIN, output=folder / "tuned", **options)
        sample = {key: value[:1] for key, value in np.load(options["data"]).items() if key != "label"}
        sessions = [open_session(each, 1, optimise=True) for each in (path, result.files["model"])]
        runs = [partial(session.run, None, sample) for session in sessions]
        own = [turn.median_s for turn in time_in_turns(runs, turns)]
        wall = [turn.median_s for turn in time_in_turns(runs, turns, time.perf_counter)]
    return {
        "model": name,
        "kind": result.kind,
        "way": result.way,
        "layers": len(result.layers),
        "layers_changed": sum(layer.format == result.kind for layer in result.layers) if result.changed else 0,
        "before_ms": own[0] * 1e3,
        "after_ms": own[1] * 1e3,
        "speedup": own[0] / own[1],
        "wall_before_ms": wall[0] * 1e3,
        "wall_after_ms": wall[1] * 1e3,
        "wall_speedup": wall[0] / wall[1],
        "score": {"base": result.base, "least": result.threshold, "tuned": result.score},
        "test": {"base": result.test_base, "tuned": result.test_score},
        "bytes": {"before": result.bytes_before, "after": result.bytes_after},
        "search_s": result.seconds,
        "by_layer": [layer._asdict() for layer in result.layers],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[*classifiers.NAMES, OCR], help="models; all, if left out")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    environment = machine("onnxruntime", "onnx") | {
        "explained": describe_processor(),
        "margin": MARGIN,
        "turns": arguments.turns,
    }
    rows = []
    for name in arguments.names:
        rows.append(row := measured(name, arguments.turns))
        print(
            f"{name:14} {row['kind']:8} {row['before_ms']:9.3f} ms -> {row['after_ms']:9.3f} ms  "
            f"{row['speedup']:.2f} times (wall {row['wall_speedup']:.2f}); score {row['score']['base']:.4f} -> "
            f"{row['score']['tuned']:.4f}, test {row['test']['base']:.4f} -> {row['test']['tuned']:.4f}, "
            f"{row['layers_changed']} of {row['layers']} layers, {row['search_s']:.0f} s",
            flush=True,
        )
    write_json(arguments.output, {"format": 1, "machine": environment, "rows": rows})
    fast = [row["model"] for row in rows if row["speedup"] >= LEAST_SPEEDUP]
    slow = [row["model"] for row in rows if row["speedup"] < NOT_SLOWER]
    print(f"at least {LEAST_SPEEDUP} times as fast: {', '.join(fast) or 'none'}; slower: {', '.join(slow) or 'none'}")


if __name__ == "__main__":
    main()
