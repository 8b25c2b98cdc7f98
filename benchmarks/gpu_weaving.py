"""What sharing a GPU by deadlines comes to beside the rules that others have, on the simulated H200.

    python benchmarks/gpu_weaving.py [--only PART-OF-A-NAME] [--seconds 0.5] [--results FILE]

Every row is kept in the results as soon as it is there, and not run again when this is started once more. Rows:
`model` how far the model of pairs is from those it was not fitted to; `saturated/A+B` models that have endless work:
the speed of each over that alone, and their sum; `urgent/U beside H/LOAD` requests of an urgent model at random times,
due in twice what it takes alone, beside one that never stops: its p50 and p99 in times of its own length, and the speed
of the other; `measured/U beside H` the same as it was measured on an H200, and simulated; `deadlines/LOAD` five models,
due in 2, 5 and 10 times what they take, at a load of what one at a time can do: missed deadlines, over all and of the
worst model, the mean of some seeds. Orion's and REEF's rules know one urgent model, so they are not asked about
others. `fifo`, `edf`, `punctual` and `priority` compute one at a time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from weft.devices import Host, load_device
from weft.devices.gpu_pairs import left_out, read_pairs
from weft.policies import Option
from weft.reports.requests import RequestReport
from weft.simulation.requests import prepare, simulate_requests
from weft.workloads.requests import Workload

RESULTS = Path(__file__).parent / "results" / "gpu_weaving.json"
TOGETHER = (
    ("resnet50-b32", "llm1b-b1"), ("encoder-b16", "llm7b-b1"), ("encoder-b64", "llm7b-b1"),
    ("bertbase-b32", "llm1b-b8"), ("resnet50-b32", "bertlarge-b1"), ("resnet50-b32", "resnet50-b1"),
    ("resnet50-b8", "bertlarge-b1"), ("resnet50-b1", "bertlarge-b1"), ("mobilenet-b1", "resnet50-b1"),
    ("encoder-b16", "resnet50-b32"), ("resnet50-b32", "mobilenet-b32"), ("llm1b-b1", "llm1b-b8"),
    ("resnet50-b32", "llm1b-b1", "bertlarge-b1"), ("encoder-b16", "llm7b-b1", "resnet50-b1"),
    ("resnet50-b1", "bertlarge-b1", "mobilenet-b1"), ("resnet50-b32", "encoder-b16", "llm1b-b1"),
)  # fmt: skip
SPLITS = {f"split {cut}{' swapped' * swap}": {"cut": cut, "swap": swap} for cut in (0, 1) for swap in (False, True)}
SATURATED: Mapping[str, dict[str, Option]] = {"streams": {}, **SPLITS, "slices": {}, "abreast": {}}
ORIONS = {f"orion {budget} us": {"budget_us": budget} for budget in (100, 400, 1600)}
URGENT: Mapping[str, dict[str, Option]] = {
    "priority": {}, "priority-streams": {}, "split 0 swapped": SPLITS["split 0 swapped"], **ORIONS, "reef": {},
    "abreast": {},
}  # fmt: skip
BESIDE = (("bertlarge-b1", "encoder-b16"), ("llm1b-b1", "resnet50-b32"), ("resnet50-b1", "encoder-b64"))
FIVE = {"resnet50-b8": 5, "bertlarge-b1": 2, "llm1b-b1": 5, "resnet50-b1": 2, "encoder-b16": 10}
"""Model -> when its requests are due, in times of what they take alone."""
ONE_FOR_ALL: Mapping[str, dict[str, Option]] = {
    "fifo": {}, "edf": {}, "punctual": {}, "streams": {}, "slices": {}, "abreast": {},
}  # fmt: skip
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
SEEDS = (1, 2, 3)
WARM_S = 0.1


def h200() -> Host:
    found = load_device("h200")
    assert isinstance(found, Host)
    return found


def run(
    streams: list[dict[str, Any]],
    rule: str,
    options: dict[str, Option],
    seconds: float,
    seed: int = 1,
    late: str = "weave",
) -> RequestReport:
    raw = {"duration_s": seconds + WARM_S, "warmup_s": WARM_S, "stream": [{"max_batch": 1, **each} for each in streams]}
    case = prepare(Workload.model_validate(raw), h200())
    return simulate_requests(case, rule.split()[0], late=late, options=options, seed=seed).report


def endless(model: str) -> dict[str, Any]:
    return {"model": model, "arrival": "closed", "clients": 2, "deadline_ms": 1e5}


def at_random(model: str, load: float, times: float, priority: int = 1) -> dict[str, Any]:
    alone_s = h200().models[model].total_s(1)
    return {"model": model, "rate": load / alone_s, "deadline_ms": times * alone_s * 1e3, "priority": priority}


def rates(report: RequestReport, seconds: float) -> list[float]:
    alone_s = [h200().models[each.model].total_s(1) for each in report.streams]
    return [round(each.completed * one / seconds, 3) for each, one in zip(report.streams, alone_s, strict=True)]


def saturated(models: tuple[str, ...], seconds: float) -> dict[str, Any]:
    found = {}
    for rule, options in SATURATED.items():
        speeds = rates(run([endless(each) for each in models], rule, options, seconds), seconds)
        found[rule] = {
            "sum": round(sum(speeds), 3),
            "least of fair": round(min(speeds) * len(speeds), 3),
            "each": speeds,
        }
    return found


def urgent(model: str, beside: str, load: float, seconds: float) -> dict[str, Any]:
    alone_s, found = h200().models[model].total_s(1), {}
    asked = at_random(model, load, 2, priority=9)
    for rule, options in {"alone": {}, **URGENT}.items():
        streams = [asked] if rule == "alone" else [asked, endless(beside)]
        report = run(streams, "fifo" if rule == "alone" else rule, options, seconds)
        first = report.streams[0]
        found[rule] = {"p50": round(first.p50_s / alone_s, 2), "p99": round(first.p99_s / alone_s, 2)}
        if rule != "alone":
            found[rule]["beside"] = rates(report, seconds)[1]
    return found


def beside_measured(model: str, other: str, seconds: float) -> dict[str, Any]:
    """What was measured, and the same simulated; due in 1.5 lengths, so that the other is paused."""
    alone_s, found = h200().models[model].total_s(1), {}
    for how, measured in MEASURED[model, other].items():
        asked = at_random(model, alone_s / APART_S, 1.5, priority=9)
        report = run([asked, endless(other)], RULES[how], {}, seconds)
        first = report.streams[0]
        simulated = [first.p50_s / alone_s, first.p99_s / alone_s, rates(report, seconds)[1]]
        found[how] = {"measured": measured, "simulated": [round(each, 2) for each in simulated]}
    return found


def deadlines(load: float, seconds: float) -> dict[str, Any]:
    """With late requests as the rule has them, or after all others, whichever is better for it."""
    streams = [at_random(model, load / len(FIVE), times) for model, times in FIVE.items()]

    def missed(rule: str, options: dict[str, Option], late: str) -> dict[str, float]:
        reports = [run(streams, rule, options, seconds, seed, late) for seed in SEEDS]
        worst = mean(each.worst_violation_rate for each in reports)
        return {"missed": round(mean(each.violation_rate for each in reports), 4), "worst": round(worst, 4)}

    def best(rule: str, options: dict[str, Option]) -> dict[str, float]:
        rules = ("weave",) if rule == "abreast" else ("weave", "demote")
        return min((missed(rule, options, late) for late in rules), key=lambda found: found["missed"])

    return {rule: best(rule, options) for rule, options in ONE_FOR_ALL.items()}


def model_error() -> dict[str, Any]:
    errors = left_out(read_pairs())
    each = {f"{'+'.join(one.pair.models)} on {one.pair.how}": round(one.error, 3) for one in errors}
    return {"mean": round(mean(one.error for one in errors), 4), "each": each}


def rows(seconds: float) -> dict[str, Callable[[], dict[str, Any]]]:
    found: dict[str, Callable[[], dict[str, Any]]] = {"model": model_error}
    found |= {f"saturated/{'+'.join(each)}": partial(saturated, each, seconds) for each in TOGETHER}
    for load in (0.1, 0.2, 0.4):
        found |= {f"urgent/{u} beside {h}/{load:g}": partial(urgent, u, h, load, 2 * seconds) for u, h in BESIDE}
    found |= {f"measured/{u} beside {h}": partial(beside_measured, u, h, 4 * seconds) for u, h in MEASURED}
    return found | {f"deadlines/{load:g}": partial(deadlines, load, seconds) for load in (0.5, 0.65, 0.8, 0.95)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    done = json.loads(asked.results.read_text("utf-8")) if asked.results.is_file() else {}
    for name, make in rows(asked.seconds).items():
        if name not in done and asked.only in name:
            done[name] = make()
            asked.results.write_text(json.dumps(done, indent=1) + "\n", "utf-8")
            print(name, json.dumps(done[name]), flush=True)


if __name__ == "__main__":
    main()
