"""The speed of simulating batches that shrink and are refilled: samples per minute of the compiled loop on one core.

ResNet-50 with three exits on the ZC706 design, at the load of Fluid Batching's Table II; the plain engine in the same
run is the baseline. Variants are interleaved and the fastest of the repeats counts.

    make bench
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from machine import machine

from weft.base.jsonfile import write_json
from weft.engine.policies import POLICIES
from weft.simulation.requests import Case, prepare, simulate_requests
from weft.simulation.requests.compiled import REFILLS
from weft.workloads.requests import parse_workload

RESULTS = Path(__file__).parent / "results" / "refill_speed.json"
TARGET_PER_MINUTE = 1e6
RATE, EXIT_RATES = 15.0, (0.051, 0.169, 0.09, 0.69)


def case(samples: int) -> Case:
    stream = {
        "model": "resnet50", "rate": RATE, "deadline_ms": 200.0, "max_batch": 8, "exits": 3, "exit_rates": EXIT_RATES,
    }  # fmt: skip
    raw = {"device": "zc706-resnet50", "duration_s": samples / RATE, "warmup_s": 1.0, "stream": [stream]}
    return prepare(parse_workload(raw, "benchmark"))


def samples_per_minute(work: Case, policy: str, *, compiled: bool) -> float:
    began_s = time.process_time()
    run = simulate_requests(work, policy, late="keep", compiled=compiled)
    return run.report.streams[0].arrived / (time.process_time() - began_s) * 60


def measure(policy: str, repeats: int) -> dict[str, Any]:
    long, short = case(200_000), case(1_000)
    samples_per_minute(short, policy, compiled=True)  # compile
    fast = slow = 0.0
    for _ in range(repeats):
        fast = max(fast, samples_per_minute(long, policy, compiled=True))
        slow = max(slow, samples_per_minute(short, policy, compiled=False))
    return {"policy": policy, "compiled_per_minute": fast, "plain_per_minute": slow, "ratio": fast / slow}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    before = machine("numba")
    rows = [measure(name, repeats) for name, kind in POLICIES.items() if kind in REFILLS]
    print(f"{'policy':>14} {'compiled M/min':>15} {'plain M/min':>12} {'ratio':>7}")
    for row in rows:
        fast, slow = row["compiled_per_minute"] / 1e6, row["plain_per_minute"] / 1e6
        print(f"{row['policy']:>14} {fast:15.1f} {slow:12.3f} {row['ratio']:7.0f}")
    fluid = next(row["compiled_per_minute"] for row in rows if row["policy"] == "fluid")
    verdict = "met" if fluid >= TARGET_PER_MINUTE else "MISSED"
    print(f"fluid: {fluid / 1e6:.1f} million samples per minute, target {TARGET_PER_MINUTE / 1e6:g}: {verdict}")
    how = {"repeats": repeats, "statistic": "fastest of the repeats, variants interleaved, processor time of one core"}
    RESULTS.parent.mkdir(exist_ok=True)
    write_json(RESULTS, {"format": 1, "machine": {**before, **how}, "rows": rows})


if __name__ == "__main__":
    main()
