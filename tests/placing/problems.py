"""Small placing problems, and the best that can be found for them by trying everything."""

from __future__ import annotations

from itertools import combinations, combinations_with_replacement
from typing import Any

import numpy as np
from ortools.linear_solver import pywraplp

from weft_cluster.placing.demand import Demand, Need
from weft_cluster.placing.machines import Machines, parse_machines
from weft_cluster.placing.problem import PlacingProblem

GIB = 2**30


def machines(count: int = 4, models: dict[str, Any] | None = None, **kind: Any) -> Machines:
    """Machines of one kind, "gpu"."""
    what = {"memory_gib": 10, "overlap": 0.5, "busy_cap": 0.8, **kind}
    return parse_machines(
        {"kinds": {"gpu": what}, "machine": [{"kind": "gpu", "count": count}], "models": models or {}}
    )


def demand(
    name: str,
    compute: float = 0.1,
    memory: float = 0.1,
    *,
    other: float = 0.0,
    gib: float = 1.0,
    rate: float = 10.0,
    alone_s: float = 0.01,
    segment_s: float = 0.001,
    deadline_s: float = 0.1,
    **more: Any,
) -> Demand:
    """A model that takes these shares of a machine's time at its whole rate."""
    need = Need(compute / rate, memory / rate, other / rate, int(gib * GIB), 0, segment_s, alone_s)
    return Demand(name, rate, deadline_s, {"gpu": need}, **more)


def random_problem(seed: int, models: int = 5, count: int = 4) -> PlacingProblem:
    """Models of all sorts on few machines: memory, loads and deadlines all matter somewhere."""
    rng = np.random.default_rng(seed)
    demands = [
        demand(
            f"m{number}",
            *rng.uniform(0.02, 0.6, 2),
            other=rng.uniform(0, 0.1),
            gib=rng.uniform(0.5, 6),
            segment_s=rng.choice([0.001, 0.02]),
            deadline_s=rng.choice([0.02, 0.2]),
        )
        for number in range(models)
    ]
    return PlacingProblem.of(machines(count, overlap=float(rng.choice([0.0, 0.45, 1.0]))), demands)


def fewest_by_enumeration(problem: PlacingProblem) -> int | None:
    """The fewest machines of a problem with one kind, by trying every set of models on every machine."""
    together = [each for each in _subsets(len(problem.demands)) if _compatible(problem, each)]
    largest = [each for each in together if not any(set(each) < set(other) for other in together)]
    for count in range(1, len(problem.machines) + 1):
        if any(_carried(problem, sets) for sets in combinations_with_replacement(largest, count)):
            return count
    return None


def _subsets(count: int) -> list[tuple[int, ...]]:
    return [each for size in range(1, count + 1) for each in combinations(range(count), size)]


def _compatible(problem: PlacingProblem, models: tuple[int, ...]) -> bool:
    """Whether these models may be on one machine, whatever their load."""
    if problem.bytes[0, list(models)].sum() > problem.room_bytes[0]:
        return False
    return all(problem.segment_s[0, b] <= problem.slack_s[0, a] for a in models for b in models if a != b)


def _carried(problem: PlacingProblem, sets: tuple[tuple[int, ...], ...]) -> bool:
    """Whether machines with these models can share all load between them."""
    if len({model for each in sets for model in each}) < len(problem.demands):
        return False
    solver = pywraplp.Solver.CreateSolver("GLOP")
    wholes = [solver.Constraint(1.0, 1.0) for _ in problem.demands]
    for models in sets:
        limits = [solver.Constraint(-solver.infinity(), float(problem.cap[0])) for _ in range(2)]
        for model in models:
            share = solver.NumVar(0.0, 1.0, "")
            wholes[model].SetCoefficient(share, 1.0)
            for row, limit in enumerate(limits):
                limit.SetCoefficient(share, float(problem.model_loads[0, row, model]))
    return bool(solver.Solve() == solver.OPTIMAL)
