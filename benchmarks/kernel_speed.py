"""Are the compiled loops as fast as those of other checkouts? Decisions, requests, refilled batches.

One process per checkout, all on the same core. They take turns at every measurement, so that all see the same machine,
whose speed may double within a second. ``fastest`` compares the fastest turns; ``ratio``, the median over pairs of
turns, is the result: above 1 this checkout is slower. Writes benchmarks/results/kernel_speed.json.

    git worktree add --detach ../before main
    python benchmarks/kernel_speed.py --before ../before
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

from machine import machine

HERE = Path(__file__).resolve()
RESULTS = HERE.parent / "results" / "kernel_speed.json"
ALLOWED = 1.10

MODELS = {
    2: ("resnet50", "bert-base"),
    4: ("mobilenet-v2", "bert-large", "resnext50-32x4d", "ncf"),
    8: (
        "resnet50", "bert-base", "inception-v3", "xlnet-large", "mobilenet-v2", "bert-large", "resnext50-32x4d", "ncf",
    ),
}  # fmt: skip
ONLINE = ("fifo", "edf", "prema", "layerweaver", "layerweaver+", "weft+")
LATE = ("keep", "demote")
"""Rules for late requests that mean the same in every version."""
REFILL = ("serial", "adaptive", "lazy-batching", "fluid", "top-up")
MEASURES = (
    *(f"decision/{name}/{k}" for name, k in product(("layerweaver", "aimt", "weft"), MODELS)),
    *(f"online/{name}/{late}" for name, late in product(ONLINE, LATE)),
    *(f"refill/{name}" for name in REFILL),
)


# What one process measures


def saturated(name: str, k: int) -> Callable[[], int]:
    """Rounds of *k* models on tpuv3-like; returns how many layers were issued."""
    import weft
    from weft.engine.compiled import compiled_order
    from weft.engine.policies import make_policy
    from weft.simulation.saturated import make_setting

    npu = weft.load_npu("tpuv3-like").model_copy(update={"activation_buffer_mib": 1000.0})
    profiles = [weft.estimate(weft.load_model(model), npu) for model in MODELS[k]]
    options = {"failsafe": False} if name == "layerweaver" else {}
    policy = make_policy(name, make_setting(profiles, npu, weft.Saturated(4 if name == "weft" else 100)), options)
    return lambda: len(compiled_order(policy, policy.setting.work, None))


def requests(name: str, late: str) -> Callable[[], int]:
    """Camera frames and sentences, near what the device sustains; returns how many decisions were made."""
    from online_speed import workload

    from weft.simulation.requests import prepare, simulate_requests

    case = prepare(workload(0.5))
    return lambda: simulate_requests(case, name, late=late).report.decisions


def refilled(name: str) -> Callable[[], int]:
    """ResNet-50 with three exits at the load of Fluid Batching's Table II; returns how many samples came."""
    from refill_speed import case

    from weft.simulation.requests import simulate_requests

    work = case(10_000)
    return lambda: simulate_requests(work, name, late="keep").report.streams[0].arrived


def work_of(measure: str) -> Callable[[], int]:
    kind, name, *rest = measure.split("/")
    if kind == "decision":
        return saturated(name, int(rest[0]))
    return requests(name, rest[0]) if kind == "online" else refilled(name)


def work_off() -> None:
    """Measure what is asked for, line by line: seconds per decision or sample."""
    known: dict[str, Callable[[], int]] = {}
    for line in sys.stdin:
        measure = line.strip()
        if measure not in known:
            known[measure] = work_of(measure)
            known[measure]()  # compile
        began_s = time.process_time()
        count = known[measure]()
        print((time.process_time() - began_s) / count, flush=True)


# What compares two of them


class Worker:
    """A process that measures one checkout."""

    def __init__(self, checkout: Path, cache: Path) -> None:
        environment = os.environ | {"PYTHONPATH": f"{checkout / 'src'}:{HERE.parent}", "NUMBA_CACHE_DIR": str(cache)}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE), "--work"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self, measure: str) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(measure, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def compare(workers: dict[str, Worker], measure: str, repeats: int) -> dict[str, Any]:
    """Of each checkout nanoseconds, and how many times as long as those the last one, this checkout, takes."""
    spent: dict[str, list[float]] = {name: [] for name in workers}
    for turn in range(repeats):
        for name in list(workers) if turn % 2 else reversed(workers):
            spent[name].append(workers[name].seconds(measure))
    *others, own = spent
    return {
        "measure": measure,
        "fastest_ns": {name: min(times_s) * 1e9 for name, times_s in spent.items()},
        "ratio": {name: median(map(truediv, spent[own], spent[name])) for name in others},
    }


def commit_of(checkout: Path) -> str:
    done = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, nargs="+", default=[], help="the other checkouts")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--only", default="", help="measures that begin so")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work_off()
        return
    if not arguments.before:
        parser.error("--before: which checkouts to compare with")
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    checkouts = {commit_of(path): path.resolve() for path in (*arguments.before, HERE.parent.parent)}
    *others, own = checkouts
    print(f"{'':28} {'fastest, ns':>32} {'ratio to ' + ', '.join(name[:7] for name in others):>32}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        workers = {name: Worker(path, Path(folder) / name) for name, path in checkouts.items()}
        for measure in (name for name in MEASURES if name.startswith(arguments.only)):
            row = compare(workers, measure, arguments.repeats)
            rows.append(row)
            fastest = " ".join(f"{time_ns:9.1f}" for time_ns in row["fastest_ns"].values())
            print(
                f"{measure:28} {fastest:>32} {'  '.join(f'{each:.2f}' for each in row['ratio'].values()):>32}",
                flush=True,
            )
        for worker in workers.values():
            worker.close()
    for name in others:
        worst = max(rows, key=lambda row: row["ratio"][name])
        verdict = "met" if worst["ratio"][name] <= ALLOWED else "MISSED"
        print(
            f"slowest against {name[:7]}: {worst['measure']}, {worst['ratio'][name]:.2f}, target {ALLOWED:g}: {verdict}"
        )
    how = {"repeats": arguments.repeats, "statistic": "ratio: median over turns; processor time of one core"}
    record = {"format": 1, "machine": {**machine("numba"), **how}, "before": others, "now": own, "rows": rows}
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
