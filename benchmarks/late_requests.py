"""The rule ``weave`` for late requests compared with ``keep`` and ``demote``: their answers, and the cost for others.

Layerweaver+'s nine pairs around the largest load that each policy sustains, and mixes of four streams below, at and
above full load. Schedules are simulated, so any machine will do.

    python benchmarks/late_requests.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from machine import machine

from weft.base.jsonfile import write_json
from weft.simulation.request_report import RequestReport
from weft.simulation.requests import Case, prepare, simulate_requests
from weft.simulation.sustain import sustain
from weft.workloads.requests import parse_workload
from weft_papers.layerweaver_plus import lab

RESULTS = Path(__file__).parent / "results" / "late_requests.json"
RULES = ("weave", "keep", "demote")
WEAVERS = ("layerweaver+", "weft+")
POLICIES = (*WEAVERS, "layerweaver", "edf", "prema", "fifo")
LOADS = (0.9, 1.0, 1.1)
TOLERANCE = 0.0005
"""Shares of late requests that differ by less are the same: a few requests of a run."""

STREAMS = {
    "resnet50": {"deadline_ms": 15.0, "max_batch": 16, "batch_timeout_ms": 2.0},
    "mobilenet-v2": {"deadline_ms": 5.0, "max_batch": 8, "batch_timeout_ms": 0.5},
    "bert-base": {"deadline_ms": 60.0, "max_batch": 16, "batch_timeout_ms": 2.0},
    "bert-large": {"deadline_ms": 130.0, "max_batch": 16, "batch_timeout_ms": 2.0},
}
MIXES: dict[str, tuple[tuple[float, ...], tuple[str, ...]]] = {
    "one in bursts": ((1500, 3000, 700, 200), ("resnet50",)),
    "all in bursts": ((1200, 3000, 600, 200), tuple(STREAMS)),
    "none in bursts": ((1000, 4500, 500, 280), ()),
}
"""Requests per second of each model, and whose come in bursts."""


class Row(NamedTuple):
    """One load under one policy: by rule, the share of requests that were late and seconds of lateness per request."""

    scene: str
    load: float
    policy: str
    late: dict[str, float]
    tardiness_ms: dict[str, float]

    @property
    def worse(self) -> bool:
        return self.late["weave"] > min(self.late.values()) + TOLERANCE


def measured(case: Case, scene: str, load: float, policy: str, seeds: int) -> Row:
    late, tardiness = {}, {}
    for rule in RULES:
        reports = [simulate_requests(case, policy, late=rule, seed=seed).report for seed in range(seeds)]
        arrived = sum(stream.arrived for report in reports for stream in report.streams)
        late[rule] = sum(stream.violated for report in reports for stream in report.streams) / arrived
        tardiness[rule] = sum(map(_tardiness_s, reports)) / arrived * 1e3
    return Row(scene, load, policy, late, tardiness)


def _tardiness_s(report: RequestReport) -> float:
    """By how much requests were late, in all, from the hundredths of the distribution of latencies."""
    return sum(
        stream.completed / 100 * max(0.0, latency_s - stream.deadline_s)
        for stream in report.streams
        for latency_s in stream.cdf_s
    )


def pairs(seeds: int, seconds: float) -> Iterator[Row]:
    """Around the largest load that the policy sustains."""
    for pair, policy in product(lab.PAIRS, WEAVERS):
        scene = lab.StreamPair(pair, duration_s=seconds)
        question = replace(lab.question(scene, lab.OURS), policy=policy, late="weave")
        rate = sustain(question, lab.device(lab.DEVICE)).rate
        for load in LOADS:
            yield measured(lab.case(scene, rate * load), " + ".join(pair), load, policy, seeds)


def mixes(seeds: int, seconds: float) -> Iterator[Row]:
    for (name, (rates, bursty)), load in product(MIXES.items(), LOADS):
        streams = [
            {"model": model, "rate": rate * load, "arrival": "bursty" if model in bursty else "poisson", **terms}
            for (model, terms), rate in zip(STREAMS.items(), rates, strict=True)
        ]
        raw = {"device": lab.DEVICE, "duration_s": seconds, "stream": streams}
        case = prepare(parse_workload(raw, "benchmark"))
        for policy in POLICIES:
            yield measured(case, f"four, {name}", load, policy, seeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="simulated, of each run")
    arguments = parser.parse_args()
    rows: list[Row] = []
    print(f"{'scene':>22} {'load':>5} {'policy':>13} " + " ".join(f"{rule:>8}" for rule in RULES) + "   % late; ms")
    for row in (*pairs(arguments.seeds, arguments.seconds), *mixes(arguments.seeds, arguments.seconds)):
        rows.append(row)
        shares = " ".join(f"{row.late[rule] * 100:8.2f}" for rule in RULES)
        means = " ".join(f"{row.tardiness_ms[rule]:8.2f}" for rule in RULES)
        print(f"{row.scene:>22} {row.load:5} {row.policy:>13} {shares}   {means}{'  WORSE' * row.worse}", flush=True)
    worse = sum(row.worse for row in rows)
    print(f"weave has more late requests than another rule in {worse} of {len(rows)}")
    how: dict[str, Any] = {"seeds": arguments.seeds, "seconds": arguments.seconds}
    RESULTS.parent.mkdir(exist_ok=True)
    write_json(RESULTS, {"format": 1, "machine": {**machine("numba"), **how}, "rows": [row._asdict() for row in rows]})


if __name__ == "__main__":
    main()
