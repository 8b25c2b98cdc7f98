"""How well the simulator predicts the server: two real models on one lane at 60 % load.

The load generator writes what it sent and the segments that the server measured; ``weft.simulation.prediction`` runs
the same arrivals, policy and segments in simulated time. Printed are means and 99th percentiles, measured and
predicted, and their relative errors; medians over seeds, policies in turns.
Run: python benchmarks/prediction_error.py [--seconds 60] [--seeds 3].
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from machine import awake, machine
from rich.console import Console
from rich.table import Table

from weft.base.jsonfile import write_json
from weft.load import LoadResult, run_load
from weft.serving.process import ServerProcess
from weft.simulation.prediction import Prediction, predict
from weft.workloads.requests import parse_workload

SHAPES = {"pp-ocr-cls": {"x": (1, 3, 48, 192)}, "pp-ocr-rec": {"x": (1, 3, 48, 320)}}
LOAD = {"pp-ocr-cls": 0.2, "pp-ocr-rec": 0.4}
"""Model -> share of the lane's time."""
DEADLINES_MS = {"pp-ocr-cls": 50.0, "pp-ocr-rec": 500.0}
POLICIES = ("punctual", "fifo")
TARGET = 0.15
RESULTS = Path(__file__).parent / "results" / "prediction_error.json"


def measure(policy: str, seconds: float, seed: int, cache: str) -> list[dict[str, Any]]:
    """One run under one policy, and what the simulator makes of it; a row per stream."""
    with ServerProcess(*LOAD, "--policy", policy, "--lanes", "1", "--cache", cache) as server:
        alone = {model: _alone(server.url, model) for model in LOAD}
        streams = [
            {
                "model": model,
                "rate": share / _compute_s(alone[model]),
                "deadline_ms": DEADLINES_MS[model],
                "shapes": SHAPES[model],
            }
            for model, share in LOAD.items()
        ]
        raw = {"duration_s": seconds, "warmup_s": min(2.0, seconds / 5), "seed": seed, "stream": streams}
        result = run_load(parse_workload(raw, "benchmark"), server.url, deadlines="soft", alone=5)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        write_json(path, result.as_dict())
        prediction = predict(path)
    return _rows(policy, seed, result, prediction)


def _alone(url: str, model: str) -> LoadResult:
    """One request at a time, for a moment."""
    stream = {"model": model, "arrival": "closed", "deadline_ms": DEADLINES_MS[model], "shapes": SHAPES[model]}
    workload = {"duration_s": 3.0, "warmup_s": 0.5, "stream": [stream]}
    return run_load(parse_workload(workload, "benchmark"), url, deadlines="none")


def _compute_s(result: LoadResult) -> float:
    """What the server expects its segments to take now."""
    model = result.profile["models"][result.streams[0].stream.model]
    return float(sum(model["seen_s"].get("1") or model["times_s"]["1"]))


def _rows(policy: str, seed: int, result: LoadResult, prediction: Prediction) -> list[dict[str, Any]]:
    rows = []
    for load, found in zip(result.streams, prediction.streams, strict=True):
        measured, predicted = found.measured, found.predicted
        assert measured.mean_s and measured.p99_s and predicted.mean_s and predicted.p99_s
        rows.append(
            {
                "policy": policy,
                "seed": seed,
                "model": found.model,
                "requests": found.requests,
                "mean_ms": measured.mean_s * 1e3,
                "predicted_mean_ms": predicted.mean_s * 1e3,
                "mean_error": predicted.mean_s / measured.mean_s - 1,
                "p99_ms": measured.p99_s * 1e3,
                "predicted_p99_ms": predicted.p99_s * 1e3,
                "p99_error": predicted.p99_s / measured.p99_s - 1,
                "overhead_ms": found.overhead_s * 1e3,
                "hand_over_ms": prediction.hand_over_s * 1e3,
                "lag_p99_ms": (load.figures.lag_p99_s or 0.0) * 1e3,
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over the seeds, of every policy and model."""
    keys = ("mean_ms", "predicted_mean_ms", "mean_error", "p99_ms", "predicted_p99_ms", "p99_error")
    load = f"{sum(LOAD.values()):.0%} load on one lane, medians over seeds"
    table = Table(title=load, title_justify="left", box=None, pad_edge=False)
    for column in ("policy", "model", "mean ms", "predicted", "error", "p99 ms", "predicted", "error"):
        table.add_column(column, justify="left" if column in ("policy", "model") else "right")
    medians = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        for model in LOAD:
            mine = [row for row in rows if (row["policy"], row["model"]) == (policy, model)]
            m = {key: statistics.median(row[key] for row in mine) for key in keys}
            medians.append({"policy": policy, "model": model, **m})
            table.add_row(
                policy, model, f"{m['mean_ms']:.2f}", f"{m['predicted_mean_ms']:.2f}", f"{m['mean_error']:+.1%}",
                f"{m['p99_ms']:.2f}", f"{m['predicted_p99_ms']:.2f}", f"{m['p99_error']:+.1%}",
            )  # fmt: skip
    console = Console(width=110)
    console.print(table)
    worst = max(max(abs(m["mean_error"]), abs(m["p99_error"])) for m in medians)
    verdict = "yes" if worst <= TARGET else "NO "
    console.print(f"{verdict}  every median error is within {TARGET:.0%}: the largest is {worst:.1%}", highlight=False)
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--save", action="store_true", help=f"write benchmarks/results/{RESULTS.name}")
    arguments = parser.parse_args()
    environment = machine("onnxruntime")
    with tempfile.TemporaryDirectory() as cache:
        rows = [
            row
            for seed in range(arguments.seeds)
            for policy in arguments.policies.split(",")
            for row in measure(policy, arguments.seconds, seed, cache)
        ]
    medians = show(rows)
    if arguments.save:
        write_json(RESULTS, {"machine": environment, "seconds": arguments.seconds, "medians": medians, "runs": rows})


if __name__ == "__main__":
    with awake():
        main()
