"""The number of machines that a mix of models needs, and the time to place it: ``weft place``, rivals and the bound.

Mixes are drawn by seed (``placing_mixes``). The result is the fewest machines that carry all rates within every limit
(loads, memory, deadlines); a rival whose placement breaks a limit does not count. Slow rivals run on small mixes only.
Times are CPU times, because the machine is shared. Writes benchmarks/results/placing_machines.json and .png.

    python benchmarks/placing_machines.py
"""

from __future__ import annotations

import argparse
import math
import time
from collections import defaultdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine
from matplotlib.figure import Figure
from placing_mixes import MEMORY_GIB, MIXES, cluster, demands, mixed_problem

from weft.base.jsonfile import write_json
from weft_cluster.placing.bound import placing_bound
from weft_cluster.placing.filling import Filling
from weft_cluster.placing.judging import OnTimeJudge
from weft_cluster.placing.problem import PlacingProblem
from weft_cluster.placing.search import fewest
from weft_cluster.routing.placing_run import place
from weft_papers.placing_rivals import RIVALS, Rival
from weft_papers.placing_rivals.alpaserve import integer_programme
from weft_papers.placing_rivals.spreading import on_fewest, serves_all

RESULTS = Path(__file__).parent / "results"
OVERLAPS = (0.45, 1.0)
SEEDS = {24: (1, 2, 3), 60: (1, 2), 150: (1,), 500: (1,)}
"""Number of models -> which mixes are drawn."""
MOST_MODELS = {"gpulets": 60, "alpaserve-greedy": 24, "alpaserve-ilp": 24, "alpaserve-beam": 0}
"""What is slow is run on so many models at most; the beam on none: ``--beam`` runs it on the smallest."""
CHANGED: dict[str, Rival] = {"alpaserve-ilp": on_fewest(partial(integer_programme, effort_s=0.3))}
SPEEDS = {"500 on 100": (500, 100, 0.6), "5000 on 1000": (5000, 1000, 0.6)}
"""Models, machines, times the usual load."""
JUDGED = 5000
"""Seed of the arrivals by which placements are judged."""
TARGETS = {"one-resource": (0.12, 0.35), "like-with-like": (0.08, 0.25)}
"""By how much fewer ours shall be on the balanced mix, at either overlap."""


def measure(mix: str, models: int, seed: int, overlap: float, beam: bool) -> dict[str, Any]:
    problem = mixed_problem(mix, models, seed, overlap)
    bound = placing_bound(problem, "machines")
    assert bound is not None
    row: dict[str, Any] = {"mix": mix, "models": models, "seed": seed, "overlap": overlap, "bound": bound.value}
    for name, way in ({"weft": _fewest_machines} | RIVALS | CHANGED).items():
        if models <= MOST_MODELS.get(name, models) or (name == "alpaserve-beam" and beam and models == min(SEEDS)):
            began = time.process_time()
            filling = way(problem)
            row[name] = int(filling.used.sum()) if serves_all(filling) else None
            row[f"{name}_s"] = time.process_time() - began
    counts = {name: row[name] for name in ("bound", "weft", *RIVALS) if name in row}
    print(f"{mix} {models} models, seed {seed}, overlap {overlap:g}:", counts, flush=True)
    return row


def _fewest_machines(problem: PlacingProblem) -> Filling:
    result = fewest(problem, "machines")
    assert result is not None
    return result


def on_time(mix: str, models: int, seed: int, overlap: float) -> dict[str, Any]:
    """Machines that also keep 99 % of the requests on time, placed by some arrivals and judged by others."""
    asked, there = demands(mix, models, seed), cluster(models, overlap)
    began = time.process_time()
    placement = place(asked, there, seed=seed)
    spent = time.process_time() - began
    problem = PlacingProblem.of(there, asked)
    carried = _fewest_machines(problem)
    fluid = OnTimeJudge(JUDGED).attainment(carried, np.flatnonzero(carried.used).tolist())
    row = {"mix": mix, "models": models, "seed": seed, "overlap": overlap, "bound": placement.bound}
    row |= {"machines": placement.value, "attainment": placement.attainment, "placing_s": spent}
    row |= {"carrying": int(carried.used.sum()), "carrying_attainment": fluid}
    print("on time:", row, flush=True)
    return row


def speed(name: str) -> dict[str, Any]:
    """How long ``weft place`` takes on a large cluster, with and without its simulations."""
    models, machines, load = SPEEDS[name]
    asked, there = demands("balanced", models, 1, load=load), cluster(machines, OVERLAPS[0])
    row: dict[str, Any] = {"name": name}
    for kind, target in (("fluid", None), ("simulated", 0.99)):
        began, wall = time.process_time(), time.perf_counter()
        placement = place(asked, there, target=target)
        row[kind] = {
            "processor_s": time.process_time() - began,
            "wall_s": time.perf_counter() - wall,
            "machines": placement.value,
            "bound": placement.bound,
            "attainment": placement.attainment,
        }
        print(name, kind, row[kind], flush=True)
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The gap in geomean, what ours saves beside each rival on each mix, and where a rival has fewer."""
    gaps = [row["weft"] / row["bound"] for row in rows]
    results: dict[str, Any] = {
        "cases": len(rows),
        "gap_geomean": math.exp(sum(map(math.log, gaps)) / len(gaps)) - 1,
        "gap_worst": max(gaps) - 1,
    }
    savings: dict[str, dict[str, float]] = defaultdict(dict)
    for name, mix, overlap in product(RIVALS, MIXES, OVERLAPS):
        both = [row for row in rows if (row["mix"], row["overlap"]) == (mix, overlap) and row.get(name)]
        if both:
            fewer = 1 - sum(row["weft"] for row in both) / sum(row[name] for row in both)
            savings[name][f"{mix}, {overlap:g}"] = fewer
    results["fewer_than"] = dict(savings)
    results["behind"] = [
        [row["mix"], row["models"], row["seed"], row["overlap"], name, row["weft"], row[name]]
        for row in rows
        for name in RIVALS
        if row.get(name) and row[name] < row["weft"]
    ]
    return results


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Machines over the bound, mix by mix, geomean over sizes and seeds."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    names = ["weft", *(name for name in RIVALS if any(name in row for row in rows))]
    for axes, overlap in zip(figure.subplots(1, 2, sharey=True), OVERLAPS, strict=True):
        for place_, mix in enumerate(MIXES):
            for bar, name in enumerate(names):
                both = [row for row in rows if (row["mix"], row["overlap"]) == (mix, overlap) and row.get(name)]
                if not both:
                    continue
                ratio = math.exp(sum(math.log(row[name] / row["bound"]) for row in both) / len(both))
                label = name if place_ == 0 else None
                axes.bar(place_ + 0.1 * (bar - len(names) / 2), ratio, 0.09, color=f"C{bar}", label=label)
        axes.axhline(1.0, color="black", lw=1)
        axes.set(xticks=range(len(MIXES)), xticklabels=list(MIXES), title=f"overlap {overlap:g}", ylim=(0, 3.2))
        axes.grid(alpha=0.3, axis="y")
    figure.axes[0].set_ylabel("machines, times the bound")
    figure.axes[1].legend(fontsize=8, ncols=2)
    figure.savefig(path, dpi=130)


def verdicts(found: dict[str, Any]) -> None:
    """The targets beside what was reached."""
    print(f"gap to the bound {found['gap_geomean']:.2%} in geomean, {found['gap_worst']:.2%} at worst; target 7 %")
    for name, targets in TARGETS.items():
        for overlap, target in zip(OVERLAPS, targets, strict=True):
            fewer = found["fewer_than"][name][f"balanced, {overlap:g}"]
            verdict = "met" if fewer >= target else "MISSED"
            print(f"balanced, overlap {overlap:g}: {fewer:.1%} fewer than {name}, target {target:.0%}: {verdict}")
    print("a rival has fewer in", len(found["behind"]), "cases:", found["behind"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beam", action="store_true", help="Also the beam search, on the smallest mixes.")
    parser.add_argument("--most", type=int, default=max(SEEDS), help="Models in the largest mix.")
    parser.add_argument("--speeds", default=",".join(SPEEDS))
    arguments = parser.parse_args()
    before = machine("numba", "ortools")
    cases = [(mix, n, seed, e) for n, seeds in SEEDS.items() for mix, seed, e in product(MIXES, seeds, OVERLAPS)]
    rows = [measure(*case, arguments.beam) for case in cases if case[1] <= arguments.most]
    result = summary(rows)
    verdicts(result)
    kept = [on_time(mix, models, 1, OVERLAPS[0]) for models in (24, 60) for mix in MIXES]
    speeds = [speed(name) for name in arguments.speeds.split(",") if name]
    setting = {"memory_gib": MEMORY_GIB, "seeds": {str(n): seeds for n, seeds in SEEDS.items()}, "judged": JUDGED}
    write_json(
        RESULTS / "placing_machines.json",
        {"format": 1, "machine": before, "setting": setting, "summary": result, "rows": rows, "on_time": kept,
         "speeds": speeds},
    )  # fmt: skip
    draw(rows, RESULTS / "placing_machines.png")


if __name__ == "__main__":
    main()
