"""The share of requests on time: ``weft place`` compared with AlpaServe's greedy and integer programme.

Machines, rate, burstiness and deadlines vary one at a time, as in AlpaServe's figures. Every method places models with
the arrivals of some seeds and is scored on those of others, in the same simulated cluster with the same router; the
bound is drawn as well. The greedy asks that simulator after every replica, as published. Writes
benchmarks/results/placing_attainment.json and .png.

    python benchmarks/placing_attainment.py
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from machine import machine
from matplotlib.figure import Figure
from placing_mixes import cluster, demands

from weft.base.jsonfile import write_json
from weft_cluster.placing.bound import placing_bound
from weft_cluster.placing.filling import Filling
from weft_cluster.placing.problem import Floats, PlacingProblem
from weft_cluster.routing.placing_run import Attaining, greedy
from weft_papers.placing_rivals.alpaserve import integer_programme
from weft_papers.placing_rivals.spreading import round_robin

RESULTS = Path(__file__).parent / "results"
MODELS, OVERLAP, MEMORY_GIB = 24, 0.45, 16.0
PLACED, JUDGED = (1,), (201, 202, 203)
"""Seeds of arrivals: to place by, and to be judged by."""
REQUESTS = 4_000
"""In each simulated run."""


class Point(NamedTuple):
    """What is asked for."""

    machines: int = 6
    rate: float = 1.0
    cv: float = 1.0
    deadlines: float = 6.0
    """Times what a request takes alone."""


AXES: dict[str, tuple[Point, ...]] = {
    "machines": tuple(Point(machines=count) for count in (4, 5, 6, 8)),
    "rate": tuple(Point(rate=rate) for rate in (0.7, 1.0, 1.3, 1.6)),
    "cv": tuple(Point(cv=cv) for cv in (1.0, 2.0, 4.0, 6.0)),
    "deadlines": tuple(Point(deadlines=deadlines) for deadlines in (2.0, 3.0, 6.0, 12.0)),
}
LABELS = {
    "machines": "machines",
    "rate": "rate, times the usual",
    "cv": "burstiness (cv of the gaps)",
    "deadlines": "deadline, times the time alone",
}
COLOURS = {"weft": "#0072b2", "alpaserve-greedy": "#d55e00", "alpaserve-ilp": "#009e73", "round-robin": "#999999"}


def problem_of(point: Point) -> PlacingProblem:
    asked = demands("balanced", MODELS, 1, deadlines=point.deadlines, load=point.rate, cv=point.cv)
    return PlacingProblem.of(cluster(point.machines, OVERLAP, memory_gib=MEMORY_GIB), asked)


def on_time(filling: Filling, seeds: tuple[int, ...]) -> Floats:
    """(model): the share of its requests that are on time; none of those of a model that is nowhere."""
    problem = filling.problem
    result: Floats = sum(Attaining(problem, seed, REQUESTS).run(filling).on_time for seed in seeds) / len(seeds)
    return result


def attained(filling: Filling, seeds: tuple[int, ...]) -> float:
    rates = np.array([demand.rate for demand in filling.problem.demands])
    return float(rates @ on_time(filling, seeds) / rates.sum())


WAYS: dict[str, Callable[[PlacingProblem], Filling]] = {
    "weft": lambda problem: Attaining(problem, PLACED[0], REQUESTS).best(),
    "alpaserve-greedy": partial(greedy, on_time_of=partial(on_time, seeds=PLACED)),
    "alpaserve-ilp": partial(integer_programme, effort_s=0.5),
    "round-robin": round_robin,
}


@cache
def measure(point: Point) -> dict[str, Any]:
    problem = problem_of(point)
    bound = placing_bound(problem, "attainment")
    assert bound is not None
    row: dict[str, Any] = {**point._asdict(), "bound": bound.value}
    for name, way in WAYS.items():
        began = time.perf_counter()
        filling = way(problem)
        spent = time.perf_counter() - began
        copies = sum(map(len, filling.shares))
        row[name] = {"attainment": attained(filling, JUDGED), "placing_s": spent, "copies": copies}
    told = [
        f"{name} {row[name]['attainment']:.4f} ({row[name]['copies']}, {row[name]['placing_s']:.1f} s)" for name in WAYS
    ]
    print(*point, f"bound {bound.value:.4f}", *told, flush=True)
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How often ours is behind a rival, by how much, and how much of what a rival misses it saves."""
    results: dict[str, Any] = {"points": len(rows)}
    for name in list(WAYS)[1:]:
        leads = [row["weft"]["attainment"] - row[name]["attainment"] for row in rows]
        missed = sum(1 - row[name]["attainment"] for row in rows)
        results[name] = {
            "behind": sum(lead < 0 for lead in leads),
            "behind_by_more_than_0.002": sum(lead < -0.002 for lead in leads),
            "worst_lead": min(leads),
            "mean_lead": sum(leads) / len(leads),
            "misses_saved": 1 - sum(1 - row["weft"]["attainment"] for row in rows) / missed if missed else 0.0,
        }
    return results


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    for axes, axis in zip(figure.subplots(2, 2).flat, AXES, strict=True):
        of_axis = [row for row in rows if row["axis"] == axis]
        where = [row[axis] for row in of_axis]
        axes.plot(where, [row["bound"] for row in of_axis], "--", color="black", lw=1, label="bound")
        for name, colour in reversed(COLOURS.items()):
            axes.plot(where, [row[name]["attainment"] for row in of_axis], "o-", color=colour, ms=4, label=name)
        axes.set(xlabel=LABELS[axis], ylabel="requests on time", ylim=(None, 1.01))
        axes.grid(alpha=0.3)
        if axis == "machines":
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.legend(fontsize=8)
    base = Point()
    figure.suptitle(
        f"{MODELS} models of the balanced mix; where nothing else is said {base.machines} machines of "
        f"{MEMORY_GIB:g} GiB, cv {base.cv:g}, deadlines {base.deadlines:g} times the time alone",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--axes", default=",".join(AXES), help="Those to run; the others stay as recorded.")
    arguments = parser.parse_args().axes.split(",")
    before, path = machine("numba", "ortools"), RESULTS / "placing_attainment.json"
    recorded = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [row for row in recorded if row["axis"] in AXES and row["axis"] not in arguments]
    rows += [{"axis": axis} | measure(point) for axis in arguments for point in AXES[axis]]
    result = summary(rows)
    for name, value in result.items():
        print(name, value)
    setting = {"models": MODELS, "overlap": OVERLAP, "memory_gib": MEMORY_GIB, "requests": REQUESTS}
    seeds = {"placed": PLACED, "judged": JUDGED}
    write_json(
        path, {"format": 1, "machine": before, "setting": setting, "seeds": seeds, "summary": result, "rows": rows}
    )
    draw(rows, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
