"""Routers of a simulated cluster: missed deadlines, and the cost of slow machines, stale reports, failures and bursts.

It also measures how fast a cluster of 1000 machines is simulated. Models are drawn as in a balanced mix: compute and
memory shares of Orion's profiles on a V100 (EuroSys '24) and of memory-bound models, times lognormal around 12 ms,
popularity by Zipf's law. ``weft place`` assigns them to machines, at least two replicas each, with seed 0; arrivals are
drawn with other seeds.

    python benchmarks/cluster_routing.py [--only routers,age,failures,bursts,speed] [--requests 100000]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine
from matplotlib.figure import Figure

from weft_cluster.placing.demand import Demand, Need
from weft_cluster.placing.machines import MachineGroup, MachineKind, Machines
from weft_cluster.routing.cluster import Cluster, ClusterSetting, failures, placed, slowed
from weft_cluster.routing.placing_run import place
from weft_cluster.routing.simulate import simulate_cluster
from weft_cluster.routing.traffic import Day, Surge, Traffic

RESULTS = Path(__file__).parent / "results"
SHARES = ((0.76, 0.20), (0.46, 0.41), (0.84, 0.12), (0.68, 0.18), (0.10, 0.90), (0.05, 0.95))
"""Compute and memory of ResNet50, MobileNet, BERT, Transformer, and of two models bound by memory."""
LOADS = (0.5, 0.6, 0.7, 0.8)
"""How busy machines are on average, by the two loads of a placement, if all had full speed."""
SEEDS = (1, 2, 3)
COLOURS = {
    "slack": "#0072b2", "slack, speeds unknown": "#56b4e9", "two-aged": "#009e73", "two-in-flight": "#e69f00",
    "two-choices": "#d55e00", "round-robin": "#cc79a7", "random": "#999999",
}  # fmt: skip
LEAST = 1e-4
"""What is drawn where nothing was missed."""
MOST_SECONDS = 3600
REQUESTS_OF_ISSUE = 10**8


def demands(models: int, load: float, machines: int, *, replicas: int = 2, seed: int = 0) -> list[Demand]:
    """Models that keep so many machines so busy."""
    rng, kind = np.random.default_rng(seed), MachineKind(memory_gib=141.0)
    needs = []
    for _ in range(models):
        compute, memory = SHARES[rng.integers(len(SHARES))]
        alone_s = float(np.exp(rng.normal(np.log(0.012), 0.6)))
        needs.append(
            Need(
                alone_s * compute,
                alone_s * memory,
                alone_s * max(0.0, 1 - compute - memory),
                weight_bytes=int(rng.uniform(0.2e9, 2e9)),
                segment_s=alone_s / int(rng.integers(3, 9)),
                alone_s=alone_s,
            )
        )
    apart = 1 - kind.overlap
    both = np.array(
        [(n.compute_s + apart * n.memory_s + n.other_s, n.memory_s + apart * n.compute_s + n.other_s) for n in needs]
    )
    rates = Traffic(rate=1.0, models=models, zipf=0.7).rates
    rates = rates * load * machines / (rates @ both).max()
    return [
        Demand(f"model{i}", float(rates[i]), 3 * need.alone_s + 0.01, {"h200": need}, replicas=replicas)
        for i, need in enumerate(needs)
    ]


def balanced_cluster(models: int, machines: int, load: float, replicas: int = 2) -> Cluster:
    """Models placed on all machines, evenly."""
    there = Machines(
        kinds={"h200": MachineKind(memory_gib=141.0)}, machine=(MachineGroup(kind="h200", count=machines),)
    )
    asked = demands(models, load, machines, replicas=replicas)
    return placed(place(asked, there, objective="load", target=None), there.kinds, asked)


def missed(cluster: Cluster, setting: ClusterSetting, requests: int, **how: Any) -> dict[str, float]:
    """Shares of all requests that were late, refused or lost; the mean of the seeds, and their largest and least."""
    results = []
    for seed in SEEDS:
        duration_s = requests / float(cluster.rates.sum())
        made = how | {"setting": setting}
        if share := made.pop("fail", 0.0):
            down = failures(cluster, share, 5.0, duration_s, seed, from_s=setting.warmup_s)
            made["setting"] = replace(setting, failures=down)
        results.append(simulate_cluster(cluster, made.pop("setting"), duration_s=duration_s, seed=seed, **made))
    shares = [run.missed for run in results]
    return {
        "missed": float(np.mean(shares)),
        "least": min(shares),
        "most": max(shares),
        "lost": float(np.mean([run.lost.sum() / run.arrived.sum() for run in results])),
        "mean_ms": float(np.mean([run.mean_latency_s for run in results])) * 1e3,
    }


def variants(**how: Any) -> Iterator[tuple[str, ClusterSetting]]:
    for name in COLOURS:
        router, _, unknown = name.partition(", ")
        yield name, ClusterSetting(router=router, knows_speeds=not unknown, **how)


def by_load(bases: dict[int, Cluster], requests: int) -> list[dict[str, Any]]:
    """One machine in ten at half speed, reports 200 ms old."""
    rows = []
    for replicas, load in product(bases, LOADS):
        cluster = slowed(bases[replicas].scaled(load), 0.1, 0.5, seed=9)
        for name, setting in variants(age_s=0.2):
            row = {"replicas": replicas, "load": load, "router": name, **missed(cluster, setting, requests)}
            rows.append(row)
            print(f"{replicas} at {load:.2f}  {name:22} {row['missed']:9.4%}  {row['mean_ms']:8.1f} ms", flush=True)
    return rows


def by_age(bases: dict[int, Cluster], requests: int) -> list[dict[str, Any]]:
    """The same at one load, for reports of different ages, and for several gates."""
    cluster = slowed(bases[2].scaled(0.7), 0.1, 0.5, seed=9)
    rows = []
    for age_s in (0.0, 0.05, 0.2, 0.5, 1.0, 2.0):
        for gates, router in ((1, "slack"), (8, "slack"), (1, "two-aged"), (1, "two-choices")):
            setting = ClusterSetting(router=router, age_s=age_s, gates=gates)
            rows.append({"age_s": age_s, "gates": gates, "router": router, **missed(cluster, setting, requests)})
            print(f"age {age_s:.2f} s  {gates} x {router:12} {rows[-1]['missed']:9.4%}", flush=True)
    return rows


def by_failures(bases: dict[int, Cluster], requests: int) -> list[dict[str, Any]]:
    """Machines that are down for 5 s at any time, all of full speed."""
    rows = []
    for share in (0.0, 0.05, 0.1, 0.2):
        for age_s, router in ((0.02, "slack"), (0.2, "slack"), (0.2, "two-choices")):
            setting = ClusterSetting(router=router, age_s=age_s)
            rows.append(
                {"failing": share, "age_s": age_s, "router": router}
                | missed(bases[2].scaled(0.7), setting, requests, fail=share)
            )
            row = rows[-1]
            print(
                f"failing {share:.0%}  {age_s} s {router:12} {row['missed']:9.4%}, lost {row['lost']:9.4%}", flush=True
            )
    return rows


def by_bursts(bases: dict[int, Cluster], requests: int) -> list[dict[str, Any]]:
    """Gaps of different variation, and a surge of all rates for two seconds."""
    rows = []
    cases: list[tuple[str, float, float, Day]] = [("cv", cv, cv, Day()) for cv in (1.0, 2.0, 4.0, 8.0)]
    for factor in (1.0, 1.25, 1.5, 2.0):
        surge = () if factor == 1 else (Surge(start_s=5.0, length_s=2.0, factor=factor),)
        cases.append(("surge", factor, 1.0, Day(surge=surge)))
    for kind, value, cv, day in cases:
        for router in ("slack", "two-aged", "two-choices"):
            setting = ClusterSetting(router=router, age_s=0.2)
            result = missed(bases[2].scaled(0.7, cv), setting, requests, day=day)
            rows.append({kind: value, "router": router, **result})
            print(f"{kind} {value:g}  {router:12} {result['missed']:9.4%}", flush=True)
    return rows


def speed(models: int, machines: int, counts: tuple[int, ...]) -> dict[str, Any]:
    """Requests simulated per second of this machine, one core."""
    began = time.perf_counter()
    cluster = slowed(balanced_cluster(models, machines, 0.7), 0.1, 0.5, seed=9)
    placed_s = time.perf_counter() - began
    setting, rows = ClusterSetting(age_s=0.2), []
    simulate_cluster(cluster, setting, duration_s=1.5)  # compiles
    for count in counts:
        began, cpu = time.perf_counter(), time.process_time()
        run = simulate_cluster(cluster, setting, duration_s=count / float(cluster.rates.sum()), seed=1)
        took, used = time.perf_counter() - began, time.process_time() - cpu
        requests = int(run.arrived.sum())
        rows.append(
            {
                "requests": count,
                "seconds": took,
                "cpu_seconds": used,
                "per_s": count / took,
                "per_cpu_s": count / used,
                "missed": run.missed,
                "simulated_s": run.duration_s,
            }
        )
        print(f"{count:.0e} requests ({requests} counted): {took:.1f} s, {count / took:,.0f} per s", flush=True)
    needed = REQUESTS_OF_ISSUE / rows[-1]["per_s"]
    print(f"1e8 at that rate: {needed / 60:.0f} min, target 60: {'met' if needed <= MOST_SECONDS else 'MISSED'}")
    return {
        "models": models,
        "machines": machines,
        "replicas": len(cluster.placed),
        "placed_s": placed_s,
        "runs": rows,
        "seconds_for_1e8": needed,
    }


def verdicts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """slack beside other routers at every load."""
    results = []
    for replicas, load in dict.fromkeys((row["replicas"], row["load"]) for row in rows):
        here = {row["router"]: row["missed"] for row in rows if (row["replicas"], row["load"]) == (replicas, load)}
        for rival in ("two-choices", "two-in-flight", "two-aged"):
            ratio = here["slack"] / here[rival] if here[rival] else float(here["slack"] > 0)
            met = here["slack"] <= 0.5 * here[rival]
            results.append({"replicas": replicas, "load": load, "rival": rival, "ratio": ratio, "at_most_half": met})
            told = "met" if met else "MISSED"
            print(f"{replicas} replicas, load {load:.2f}: slack misses {ratio:.3f} of {rival}, target 0.5: {told}")
    return results


def draw(result: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(17, 7.6), layout="constrained")
    panels = figure.subplots(2, 4).flatten()
    for panel, replicas in zip(panels, (2, 4), strict=False):
        own = [row for row in result["routers"]["rows"] if row["replicas"] == replicas]
        _lines(panel, own, "load", lambda row: row["router"], "mean load at full speed")
        panel.set_title(f"1 in 10 at half speed, 200 ms, {replicas}+ replicas", fontsize=11)
    _lines(
        panels[2],
        result["age"]["rows"],
        "age_s",
        lambda row: f"{row['gates']} x {row['router']}",
        "age of reports, s",
    )
    panels[2].set_title("staleness (load .7, 1 in 10 at half speed)")
    _lines(
        panels[3],
        result["failures"]["rows"],
        "failing",
        lambda row: f"{row['router']}, {row['age_s']} s",
        "machines failing",
    )
    panels[3].set_title("failures: 5 s down each (load .7)")
    cvs, surges = ([row for row in result["bursts"]["rows"] if key in row] for key in ("cv", "surge"))
    _lines(panels[4], cvs, "cv", lambda row: row["router"], "coefficient of variation of gaps")
    panels[4].set_title("bursts of single models (load .7, 200 ms)")
    _lines(panels[5], surges, "surge", lambda row: row["router"], "all rates times, for 2 s")
    panels[5].set_title("surges of all models (load .7, 200 ms)")
    runs = result["speed"]["runs"]
    for key, label in (("per_s", "per second"), ("per_cpu_s", "per second of processor time")):
        panels[6].plot([row["requests"] for row in runs], [row[key] for row in runs], "o-", label=label)
    panels[6].axhline(REQUESTS_OF_ISSUE / MOST_SECONDS, color="#d55e00", ls="--", label="10^8 in an hour")
    panels[6].set(xscale="log", ylim=0, xlabel="requests", ylabel="simulated requests per s")
    panels[6].set_title(f"{result['speed']['machines']} machines, {result['speed']['models']} models, one core")
    panels[6].legend(fontsize=8)
    panels[7].axis("off")
    figure.savefig(path, dpi=130)


def _lines(
    axes: Any, rows: list[dict[str, Any]], key: str, label: Callable[[dict[str, Any]], str], xlabel: str
) -> None:
    for name in dict.fromkeys(map(label, rows)):
        own = [row for row in rows if label(row) == name]
        values = [max(LEAST, row["missed"]) for row in own]
        axes.plot([row[key] for row in own], values, "o-", ms=4, label=name, color=COLOURS.get(name))
    axes.set(yscale="log", xlabel=xlabel, ylabel="deadlines missed", ylim=(LEAST / 2, 1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="routers,age,failures,bursts,speed")
    parser.add_argument("--requests", type=int, default=100_000, help="of each run but those of speed")
    parser.add_argument("--machines", type=int, default=100)
    parser.add_argument("--models", type=int, default=500)
    arguments = parser.parse_args()
    parts: dict[str, Callable[[dict[int, Cluster], int], Any]] = {
        "routers": by_load, "age": by_age, "failures": by_failures, "bursts": by_bursts,
    }  # fmt: skip
    only = arguments.only.split(",")
    if set(only) & set(parts):
        bases = {replicas: balanced_cluster(arguments.models, arguments.machines, 1.0, replicas) for replicas in (2, 4)}
        print(*bases.values(), sep="\n")
        setting = {
            "machines": arguments.machines,
            "models": arguments.models,
            "requests": arguments.requests,
            "seeds": SEEDS,
        }
        for name in (name for name in only if name in parts):
            keep(name, setting | {"rows": parts[name](bases, arguments.requests)})
    if "speed" in only:
        keep("speed", speed(5000, 1000, (10**5, 10**6, 10**7)))
    result = earlier_results()
    if "routers" in result:
        keep("verdicts", verdicts(result["routers"]["rows"]))
    if all(name in result for name in (*parts, "speed")):
        draw(result, RESULTS / "cluster_routing.png")


def earlier_results() -> dict[str, Any]:
    """What earlier runs found."""
    file = RESULTS / "cluster_routing.json"
    result: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return result


def keep(name: str, found: Any) -> None:
    """Write a part down beside the others."""
    result = earlier_results() | {name: found, "machine": machine("numba")}
    (RESULTS / "cluster_routing.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
