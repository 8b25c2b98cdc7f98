"""The speed of simulating requests: layer decisions per second of the compiled loop, against the plain engine.

Two streams on one core: on an NPU, and on a host with two lanes, there in requests per second. Variants take turns and
the fastest of the repeats counts. Memory is the peak of the process after a run of one and of ten times the length.
Writes benchmarks/results/online_speed.json.

    make bench
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import time
from pathlib import Path

import numba
import numpy as np

import weft
from weft.devices import Host, HostModel
from weft.engine.policies import POLICIES
from weft.simulation.requests import ONLINE, Case, prepare, simulate_requests
from weft.simulation.requests.compiled import compile_loop
from weft.workloads.requests import Workload, parse_workload

RESULTS = Path(__file__).parent / "results"
TARGET_PER_S, TARGET_RATIO, TARGET_ON_HOST = 3e6, 50, 20
HOST_POLICIES = ("fifo", "edf", "punctual", "priority")


def workload(duration_s: float) -> Workload:
    """Camera frames and sentences, near what the device sustains."""
    streams = [{"model": "resnet50", "deadline_ms": 15.0}, {"model": "bert-base", "deadline_ms": 130.0}]
    raw = {"stream": streams, "total_rate": 9000.0, "ratio": [2, 1], "duration_s": duration_s, "warmup_s": 0.1}
    return parse_workload(raw, "benchmark")


def host_case(requests: int) -> Case:
    """Two models on two lanes that slow each other down, near what they sustain."""
    spread = tuple((1.0 + 0.01 * (run % 7), 1.0 - 0.01 * (run % 5)) for run in range(50))
    models = {
        "camera": HostModel(
            segments=("a", "b"), max_batch=4, times_s={1: (2e-3, 3e-3), 4: (6e-3, 9e-3)}, spread=spread,
            overhead_s=(1e-4, 2e-4), loses={"speech": 0.2},
        ),
        "speech": HostModel(
            segments=("a", "b"), max_batch=2, times_s={1: (4e-3, 3e-3), 2: (7e-3, 5e-3)}, spread=spread,
            loses={"camera": 0.1},
        ),
    }  # fmt: skip
    host = Host(cores=2, lanes=2, hand_over_s=(1e-4, 5e-5), models=models)
    streams = [
        {"model": "camera", "rate": 100.0, "deadline_ms": 40.0, "priority": 3},
        {"model": "speech", "rate": 80.0, "deadline_ms": 60.0},
    ]
    return prepare(parse_workload({"stream": streams, "duration_s": requests / 180, "warmup_s": 0.1}, "host"), host)


def requests_per_s(case: Case, policy: str, *, compiled: bool) -> float:
    began = time.perf_counter()
    run = simulate_requests(case, policy, late="drop", compiled=compiled)
    return sum(stream.arrived for stream in run.report.streams) / (time.perf_counter() - began)


def measure_on_host(policy: str, repeats: int) -> dict[str, object]:
    long, short = host_case(100_000), host_case(2_000)
    fast = slow = 0.0
    for _ in range(repeats):
        fast = max(fast, requests_per_s(long, policy, compiled=True))
        slow = max(slow, requests_per_s(short, policy, compiled=False))
    return {"policy": policy, "compiled_per_s": fast, "plain_per_s": slow, "ratio": fast / slow}


def decisions_per_s(case, policy: str, *, compiled: bool) -> float:
    began = time.perf_counter()
    run = simulate_requests(case, policy, compiled=compiled)
    return run.report.decisions / (time.perf_counter() - began)


def measure(policy: str, repeats: int) -> dict[str, object]:
    long, short = prepare(workload(10.0)), prepare(workload(0.2))
    decisions_per_s(short, policy, compiled=True)  # compile
    fast = slow = 0.0
    for _ in range(repeats):
        fast = max(fast, decisions_per_s(long, policy, compiled=True))
        slow = max(slow, decisions_per_s(short, policy, compiled=False))
    return {"policy": policy, "compiled_per_s": fast, "plain_per_s": slow, "ratio": fast / slow}


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    rows = [measure(name, repeats) for name, kind in POLICIES.items() if kind in ONLINE]
    print(f"{'policy':>14} {'compiled M/s':>13} {'plain M/s':>10} {'ratio':>7}")
    for row in rows:
        fast, slow = row["compiled_per_s"] / 1e6, row["plain_per_s"] / 1e6
        print(f"{row['policy']:>14} {fast:13.2f} {slow:10.4f} {row['ratio']:7.0f}")
    slowest, least = min(row["compiled_per_s"] for row in rows), min(row["ratio"] for row in rows)
    verdict = "met" if slowest >= TARGET_PER_S else "MISSED"
    print(f"slowest {slowest / 1e6:.2f} M/s, target {TARGET_PER_S / 1e6:g}: {verdict}")
    print(f"least ratio {least:.0f}, target {TARGET_RATIO}: {'met' if least >= TARGET_RATIO else 'MISSED'}")
    compile_loop()
    on_host = [measure_on_host(name, repeats) for name in HOST_POLICIES]
    for row in on_host:
        print(f"{row['policy']:>14} on a host: {row['compiled_per_s']:.0f} requests/s, {row['ratio']:.0f} times plain")
    least = min(row["ratio"] for row in on_host)
    print(f"least on a host {least:.0f}, target {TARGET_ON_HOST}: {'met' if least >= TARGET_ON_HOST else 'MISSED'}")
    memory = []
    for duration_s in (10.0, 100.0):
        run = simulate_requests(prepare(workload(duration_s)), "weft+")
        memory.append((sum(stream.arrived for stream in run.report.streams), peak_mib()))
    print("memory: " + ", ".join(f"{requests} requests, peak {mib:.0f} MiB" for requests, mib in memory))
    machine = {
        "machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version(),
        "numba": numba.__version__, "numpy": np.__version__, "weft": weft.__version__, "repeats": repeats,
        "statistic": "fastest of the repeats, variants interleaved, one process",
    }  # fmt: skip
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({"machine": machine, "rows": rows, "on_host": on_host, "requests_and_peak_mib": memory}, indent=1)
    (RESULTS / "online_speed.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
