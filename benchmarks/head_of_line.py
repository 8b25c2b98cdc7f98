"""Head-of-line blocking on a real server: an urgent small model beside a heavy one that keeps its lane mostly busy.

Models from published packages, a server in its own process, an open-loop load generator, the same arrivals under every
policy. `fifo` computes whole requests in order of arrival, as common servers do. Ratios are of medians over repeats;
variants are interleaved.
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
from weft.load import StreamLoad, run_load
from weft.serving.process import ServerProcess
from weft.workloads.requests import parse_workload

URGENT, HEAVY = "pp-ocr-cls", "light-resnet50"
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {URGENT: {"x": (1, 3, 48, 192)}, HEAVY: {}}
URGENT_PER_S, URGENT_MS, HEAVY_LOAD = 10.0, 25.0, 0.7
PATIENCE_S = 600.0
"""How long an answer may take before the run gives it up; without a load only a hang reaches it."""
RESULTS = Path(__file__).parent / "results" / "head_of_line.json"


def serving(policy: str, cache: str) -> ServerProcess:
    return ServerProcess(URGENT, HEAVY, "--policy", policy, "--lanes", "1", "--cache", cache)


def measure(policy: str, seconds: float, seed: int, heavy_s: float, cache: str) -> dict[str, Any]:
    """One run under one policy."""
    print(f"{policy}: {seconds:g} s of requests (seed {seed})", flush=True)
    with serving(policy, cache) as server:
        workload = parse_workload(
            {
                "duration_s": seconds,
                "warmup_s": min(2.0, seconds / 5),
                "seed": seed,
                "stream": [
                    {"model": URGENT, "rate": URGENT_PER_S, "deadline_ms": URGENT_MS, "shapes": SHAPES[URGENT]},
                    {
                        "model": HEAVY,
                        "rate": HEAVY_LOAD / heavy_s,
                        "deadline_ms": 60_000.0,
                        "shapes": SHAPES[HEAVY],
                    },
                ],
            },
            "benchmark",
        )
        result = run_load(workload, server.url, deadlines="soft")
    urgent, heavy = (stream.figures for stream in result.streams)
    return {
        "policy": policy,
        "seed": seed,
        "urgent_p50_ms": _ms(urgent.p50_s),
        "urgent_p99_ms": _ms(urgent.p99_s),
        "urgent_met": urgent.met_share,
        "heavy_per_s": heavy.answered_per_s,
        "heavy_mean_ms": _ms(heavy.mean_s),
        "remarks": list(result.remarks),
    }


def alone_s(cache: str, seconds: float) -> float:
    """One heavy request at a time, for a moment: what it takes alone on this machine today."""
    print("loading the models, and timing the heavy one alone", flush=True)
    alone = parse_workload(
        {
            "duration_s": seconds,
            "warmup_s": seconds / 6,
            "stream": [
                {"model": HEAVY, "arrival": "closed", "clients": 1, "deadline_ms": 60_000.0, "shapes": SHAPES[HEAVY]}
            ],
        },
        "benchmark",
    )
    with serving("fifo", cache) as server:
        return typical_s(run_load(alone, server.url, deadlines="none", grace_s=PATIENCE_S).streams[0])


def typical_s(stream: StreamLoad) -> float:
    """The median; on so busy a machine that the first request outlasted the run, what that one took."""
    return float(stream.latency_s[0]) if stream.figures.p50_s is None else stream.figures.p50_s


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _median(values: list[float | None]) -> float | None:
    """None where nothing was answered: a busy machine, and too few --seconds."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def show(rows: list[dict[str, Any]], policies: list[str]) -> dict[str, Any]:
    """Medians over the repeats, beside the first policy's."""
    keys = ("urgent_p50_ms", "urgent_p99_ms", "urgent_met", "heavy_per_s", "heavy_mean_ms")
    medians = {
        policy: {key: _median([row[key] for row in rows if row["policy"] == policy]) for key in keys}
        for policy in policies
    }
    table = Table(
        title=f"{URGENT}: {URGENT_PER_S:g}/s, due in {URGENT_MS:g} ms; {HEAVY}: {HEAVY_LOAD:.0%} of one lane",
        title_justify="left", box=None, pad_edge=False,
    )  # fmt: skip
    for column in ("policy", "urgent p50 ms", "urgent p99 ms", "on time", "heavy/s", "heavy mean ms"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for policy, m in medians.items():
        table.add_row(
            policy, _text(m["urgent_p50_ms"], ".1f"), _text(m["urgent_p99_ms"], ".1f"), _text(m["urgent_met"], ".1%"),
            _text(m["heavy_per_s"], ".2f"), _text(m["heavy_mean_ms"], ".0f"),
        )  # fmt: skip
    console = Console(width=110)
    console.print(table)
    first = medians[policies[0]]
    ratios = {
        policy: {
            "p99_times_lower": _ratio(first["urgent_p99_ms"], m["urgent_p99_ms"]),
            "heavy_throughput": _ratio(m["heavy_per_s"], first["heavy_per_s"]),
        }
        for policy, m in medians.items()
    }
    for policy in policies[1:]:
        lower, kept = _text(ratios[policy]["p99_times_lower"], ".1f"), _text(ratios[policy]["heavy_throughput"], ".1%")
        console.print(
            f"{policy}: p99 of the urgent model {lower} times lower than under {policies[0]}, "
            f"throughput of the heavy one {kept} of it",
            highlight=False,
        )
    return {"medians": medians, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--policies", default="fifo,edf,layerweaver+,punctual")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/head_of_line.json")
    arguments = parser.parse_args()
    policies = arguments.policies.split(",")
    with tempfile.TemporaryDirectory() as cache:
        heavy_s = alone_s(cache, min(3.0, arguments.seconds))
        rows = [
            measure(policy, arguments.seconds, seed, heavy_s, cache)
            for seed in range(arguments.repeats)
            for policy in policies
        ]
    summary = show(rows, policies)
    if arguments.save:
        write_json(
            RESULTS,
            {
                "machine": machine(),
                "seconds": arguments.seconds,
                "heavy_alone_ms": heavy_s * 1e3,
                **summary,
                "runs": rows,
            },
        )


if __name__ == "__main__":
    with awake():
        main()
