"""How much faster and smaller fine-tuned encoders are as one body on a CPU, in ONNX Runtime.

One request of each model, all of one length. The baseline are the models one after another, each in a session of its
own. Beside it, in the same rounds: the body, and as many rows through a single one of the models, which is the least
that any body could take.

    python benchmarks/stitch_encoders.py
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine

from weft.jsonfile import write_json
from weft.stitching.bodies.whole_run import stitch_body
from weft.stitching.making.encoders import ENCODERS, EncoderRecipe
from weft.stitching.onnx_writer import to_onnx
from weft.stitching.running.racing import least_seconds, opened

RESULTS = Path(__file__).parent / "results" / "stitch_encoders.json"
TUNED: dict[str, tuple[dict[str, Any], float]] = {
    "own heads": ({}, 0.0),
    "last third own": ({"frozen": 2 / 3}, 0.0),
    "rank 16, exact": ({"rank": 16}, 0.0),
    "rank 16, low-rank parts": ({"rank": 16}, 1e-6),
}
"""How models were made, and what of a weight may be lost."""


def measured(architecture: str, tasks: int, threads: int, lengths: list[int], rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (tuned, tolerance) in TUNED.items():
        with tempfile.TemporaryDirectory() as folder:
            files = list(EncoderRecipe(architecture, tasks, **tuned).save(Path(folder)))
            (base,) = EncoderRecipe(architecture, 1).save(Path(folder) / "base")
            made = stitch_body(files, tolerance=tolerance, base=base if tolerance else None, measure=False)
            alone = [opened(file, threads, file.name, optimise=True) for file in files]
            whole = opened(to_onnx(made.graph).SerializeToString(), threads, "body", optimise=True)
            assert made.difference is not None
            found[name] = {
                "weights": made.weight_bytes / made.apart_bytes,
                "largest_difference": made.difference.relative,
                "ms": {str(each): _times(alone, whole, made.names, each, threads, rounds) for each in lengths},
            }
        for length, times in found[name]["ms"].items():
            gain = times["one after another"] / times["body"]
            said = ", ".join(f"{way} {each:.1f} ms" for way, each in times.items())
            print(f"{name}, {length} tokens: {said}; {gain:.2f} times; weights {found[name]['weights']:.3f}")
    return found


def _times(alone: Any, whole: Any, names: Any, length: int, threads: int, rounds: int) -> dict[str, float]:
    ids = np.random.default_rng(0).integers(0, 1000, (len(names), length))
    shown = np.ones_like(ids)
    feeds = [{"input_ids": ids[at : at + 1], "attention_mask": shown[:1]} for at in range(len(names))]
    joined = {f"{name}.{port}": each for name, feed in zip(names, feeds, strict=True) for port, each in feed.items()}
    contenders = {
        "one after another": [lambda at=at: alone[at].run(None, feeds[at]) for at in range(len(names))],
        "body": [lambda: whole.run(None, joined)],
        "rows of one model": [lambda: alone[0].run(None, {"input_ids": ids, "attention_mask": shown})],
    }
    seconds = least_seconds(contenders, threads=threads, rounds=rounds)
    return {name: 1e3 * each for name, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architecture", choices=list(ENCODERS), default="encoder")
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    found = measured(given.architecture, given.tasks, given.threads, [16, 64], given.rounds)
    settings = {name: getattr(given, name) for name in ("architecture", "tasks", "threads", "rounds")}
    write_json(given.output, {"machine": machine(), "settings": settings, "tuned": found})


if __name__ == "__main__":
    main()
