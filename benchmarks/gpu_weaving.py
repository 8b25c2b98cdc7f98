"""Sharing a GPU by deadlines compared with the rules of other systems, on the simulated H200.

    python benchmarks/gpu_weaving.py [--only PART-OF-A-NAME] [--seconds 0.15] [--results FILE]

Each row is written to the results as soon as it is known, and is not simulated again by a later run. Rows: `model`: the
error of the contention model on pairs that it was not fitted to; `saturated/A+B`: models with endless work: the speed
of each relative to it alone, and their sum; `urgent/U beside H/LOAD`: requests of an urgent model at random times, due
in twice its stand-alone time, beside a model that never stops: p50 and p99 in stand-alone times, and the other model's
speed; `measured/U beside H`: the same as measured on an H200 without weft, and simulated; `deadlines/LOAD`: five
models, due in 2, 5 and 10 times their stand-alone time, at a load relative to one model at a time: missed deadlines,
over all and of the worst model, mean over seeds; `orion/U beside B`: Orion's pairs at its load fractions. The rules of
Orion and REEF know one urgent model, so they are left out elsewhere. `fifo`, `edf`, `punctual` and `priority` compute
one model at a time. `weft reproduce gpu` runs the same for a shorter time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from weft.devices.gpu_pairs import left_out, read_pairs
from weft_papers.gpu.lab import (
    BESIDE,
    BESIDE_OF_ORION,
    FIRST_OF_ORION,
    FIVE,
    LOADS,
    ONE_FOR_ALL,
    SATURATED,
    TOGETHER,
    URGENT,
    URGENT_LOADS,
    alone_s,
    at_random,
    deadlines,
    endless,
    orion_pair,
    rates,
    run,
    saturated,
    urgent,
)

__all__ = ["BESIDE", "FIVE", "ONE_FOR_ALL", "SATURATED", "TOGETHER", "URGENT"]

RESULTS = Path(__file__).parent / "results" / "gpu_weaving.json"
MEASURED = {
    ("llm1b-b1", "resnet50-b32"): {"streams": (2.2, 4.4, 0.86), "high": (1.9, 3.7, 0.85), "paused": (1.15, 2.2, 0.72)},
    ("bertlarge-b1", "resnet50-b32"): {
        "streams": (2.4, 4.8, 0.95),
        "high": (2.1, 4.0, 0.94),
        "paused": (1.2, 2.3, 0.83),
    },
    ("bertlarge-b1", "encoder-b16"): {
        "streams": (4.4, 8.1, 0.92),
        "high": (3.7, 7.1, 0.92),
        "paused": (1.25, 2.35, 0.83),
    },
    ("resnet50-b1", "encoder-b64"): {"streams": (18, 24, 0.94), "high": (7.7, 12, 0.95), "paused": (2.2, 4.0, 0.88)},
}
"""Urgent model and one that never stops -> p50 and p99 in the urgent one's lengths and the other's speed, measured on
an H200 without weft: requests every 6 ms on average, two segments of the other queued at most; paused: the other rests
between segments while an urgent one is there. The segments of the last row were .73 ms long, not .25."""
APART_S = 6e-3
RULES = {"streams": "streams", "high": "priority-streams", "paused": "abreast"}


def beside_measured(model: str, other: str, seconds: float) -> dict[str, Any]:
    """What was measured, and the same simulated; due in 1.5 lengths, so that the other is paused."""
    took_s, results = alone_s(model), {}
    for how, measured in MEASURED[model, other].items():
        asked = at_random(model, took_s / APART_S, 1.5, priority=9)
        report = run([asked, endless(other)], RULES[how], {}, seconds)
        first = report.streams[0]
        simulated = [first.p50_s / took_s, first.p99_s / took_s, rates(report, seconds)[1]]
        results[how] = {"measured": measured, "simulated": [round(value, 2) for value in simulated]}
    return results


def model_error() -> dict[str, Any]:
    errors = left_out(read_pairs())
    each = {f"{'+'.join(one.pair.models)} on {one.pair.how}": round(one.error, 3) for one in errors}
    return {"mean": round(mean(one.error for one in errors), 4), "each": each}


def rows(seconds: float) -> dict[str, Callable[[], dict[str, Any]]]:
    results: dict[str, Callable[[], dict[str, Any]]] = {"model": model_error}
    results |= {f"saturated/{'+'.join(group)}": partial(saturated, group, seconds) for group in TOGETHER}
    for load in URGENT_LOADS:
        results |= {f"urgent/{u} beside {h}/{load:g}": partial(urgent, u, h, load, 3 * seconds) for u, h in BESIDE}
    results |= {f"measured/{u} beside {h}": partial(beside_measured, u, h, 4 * seconds) for u, h in MEASURED}
    results |= {f"deadlines/{load:g}": partial(deadlines, load, 2 * seconds) for load in LOADS}
    pairs = [(u, b) for u in FIRST_OF_ORION for b in BESIDE_OF_ORION]
    return results | {f"orion/{u} beside {b}": partial(orion_pair, u, b, 3 * seconds) for u, b in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=0.15)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    done = json.loads(arguments.results.read_text("utf-8")) if arguments.results.is_file() else {}
    for name, make in rows(arguments.seconds).items():
        if name not in done and arguments.only in name:
            done[name] = make()
            arguments.results.write_text(json.dumps(done, indent=1) + "\n", "utf-8")
            print(name, json.dumps(done[name]), flush=True)


if __name__ == "__main__":
    main()
