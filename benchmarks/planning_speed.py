"""The duration of ``weft plan``: with nothing cached, so that it measures the machine, and with everything cached.

The command is run as a user runs it, from its start to the written folder. The run with nothing cached is the baseline
of the runs after it. A last run, in this process, counts the simulations and times one of them.

    python benchmarks/planning_speed.py [--mixes "two small models"] [--repeats 3] [--save]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from machine import machine
from verdicts import Verdict, show_table, show_verdicts

from weft.base.jsonfile import write_json
from weft.cli.common import parse_stream
from weft.planning import trials
from weft.planning.planning_run import make_plan
from weft.workloads.requests import parse_workload

START = "from weft.cli.main import main; main()"
MIXES: dict[str, tuple[str, ...]] = {
    "two small models": ("pp-ocr-cls:rate=40,deadline=40", "magika:rate=30,deadline=60"),
    "five models": (
        "pp-ocr-cls:rate=15,deadline=80",
        "magika:rate=15,deadline=100",
        "silero-vad:rate=30,deadline=60",
        "mtcnn-onet:rate=15,deadline=80",
        "light-shufflenet:rate=5,deadline=150",
    ),
}
"""Name -> streams, as ``weft plan`` takes them."""
TARGETS = {"two small models": (60.0, 10.0), "five models": (300.0, None)}
"""Name -> seconds that planning may take, with nothing cached and with everything measured."""
HOW = ("nothing cached", "everything measured")
RESULTS = Path(__file__).parent / "results" / "planning_speed.json"


def planned_s(streams: tuple[str, ...], base: Path) -> float:
    """The seconds that the command takes."""
    options = [part for stream in streams for part in ("-s", stream)]
    with tempfile.TemporaryDirectory(dir=base) as folder:
        began_s = time.perf_counter()
        command = [sys.executable, "-c", START, "plan", *options, "-o", f"{folder}/plan", "--cache", f"{base}/cache"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"weft plan {' '.join(options)}: {done.stderr or done.stdout}")
        return time.perf_counter() - began_s


def simulations(streams: tuple[str, ...], cache: Path) -> dict[str, float]:
    """How many runs a plan takes, of how many layers, and the seconds that they take in this process."""
    runs: list[tuple[int, float]] = []
    simulate = trials.simulate_requests

    def counted(*given: Any, **how: Any) -> Any:
        began_s = time.perf_counter()
        run = simulate(*given, **how)
        runs.append((run.report.decisions, time.perf_counter() - began_s))
        return run

    workload = parse_workload({"stream": [parse_stream(text) for text in streams]}, "benchmark")
    with patch.object(trials, "simulate_requests", counted):
        make_plan(workload, cache=cache)
    layers, seconds = sum(layers for layers, _ in runs), sum(took_s for _, took_s in runs)
    return {"runs": len(runs), "layers": layers, "simulating_s": seconds, "layer_us": 1e6 * seconds / layers}


def mix_planned(name: str, repeats: int) -> dict[str, Any]:
    """A mix, planned with nothing cached and then again and again."""
    streams = MIXES[name]
    with tempfile.TemporaryDirectory() as base:
        first_s = planned_s(streams, Path(base))
        cached_s = [planned_s(streams, Path(base)) for _ in range(repeats)]
        result = simulations(streams, Path(base) / "cache")
    usual_s = statistics.median(cached_s)
    return {
        "mix": name,
        "first_s": first_s,
        "cached_s": cached_s,
        "usual_s": usual_s,
        "ratio": first_s / usual_s,
    } | result


def verdicts(rows: list[dict[str, Any]]) -> list[Verdict]:
    """The claims, and whether they hold."""
    results = []
    for row in rows:
        for what, took_s, target_s in zip(HOW, (row["first_s"], row["usual_s"]), TARGETS[row["mix"]], strict=True):
            if target_s is not None:
                promise = f"{row['mix']}: under {target_s:g} s with {what}"
                results.append(Verdict(promise, took_s < target_s, f"{took_s:.1f} s"))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixes", default=";".join(MIXES), help="names, with ; between them")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/planning_speed.json")
    arguments = parser.parse_args()
    environment = machine("onnxruntime")
    rows = [mix_planned(name, arguments.repeats) for name in arguments.mixes.split(";")]
    show(rows)
    found = verdicts(rows)
    show_verdicts(found)
    if arguments.save:
        claims = {result.promise: result.kept for result in found}
        write_json(RESULTS, {"machine": environment, "repeats": arguments.repeats, "rows": rows, "verdicts": claims})


def show(rows: list[dict[str, Any]]) -> None:
    columns = ("mix", "nothing cached, s", "cached, s", "times", "simulations", "layers", "simulating, s", "us a layer")
    table = [
        (
            row["mix"],
            f"{row['first_s']:.1f}",
            f"{row['usual_s']:.1f}",
            f"{row['ratio']:.1f}",
            f"{row['runs']:.0f}",
            f"{row['layers']:.0f}",
            f"{row['simulating_s']:.1f}",
            f"{row['layer_us']:.0f}",
        )
        for row in rows
    ]
    show_table("how long planning takes", columns, table)


if __name__ == "__main__":
    main()
