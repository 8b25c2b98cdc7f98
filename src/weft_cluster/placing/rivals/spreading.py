"""What rivals share: where a replica may go, as few machines as suffice, and shares that crowd no machine.

All of them keep to memory, deadlines and rules as we do (``Filling.could_join``); they differ in what they believe
about time, and in where they put things.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil

import numpy as np

from weft_cluster.placing.checking import broken_limits
from weft_cluster.placing.filling import Filling
from weft_cluster.placing.problem import Bools, Floats, PlacingProblem

Rival = Callable[[PlacingProblem], Filling]
"""Who places models."""

LEAST_SHARE = 1e-4
"""Of a model, on each machine that has it."""
ALL_SERVED = 1 - 1e-6
CROWDING = ((0.5, 1.0), (0.25, 2.0), (0.15, 4.0), (0.1, 8.0), (np.inf, 1000.0))
"""How much worse a machine gets by being busier: pieces of its cap, and what each weighs; above the cap, most."""


def serial_loads(problem: PlacingProblem) -> Floats:
    """(kind, model): the share of a machine's time that a model takes if nothing overlaps."""
    return problem.compute + problem.memory + problem.other


def new_homes(filling: Filling, model: int) -> Bools:
    """(machine): whether one more replica of a model may go there."""
    problem, there = filling.problem, filling.where(model)
    found = filling.could_join(model)
    found[there] = False
    if problem.demands[model].apart == "zone" and len(there) < problem.demands[model].replicas:
        found &= ~np.isin(problem.zone_of, problem.zone_of[there])
    return found


def free_to_go(problem: PlacingProblem) -> Bools:
    """(model): whether it may go to as many machines as any; those that may not are placed first."""
    places = problem.allowed.sum(axis=0)
    return np.asarray(places >= places.max(initial=0), np.bool_)


def parts(problem: PlacingProblem, loads: Floats) -> Iterator[tuple[int, float]]:
    """Models in equal shares that a machine can take, the largest first; *loads*: (kind, model)."""
    smallest, free = (loads / problem.cap[:, None]).max(axis=0), free_to_go(problem)
    counts = [max(demand.replicas, ceil(size)) for demand, size in zip(problem.demands, smallest, strict=True)]
    for model in sorted(range(len(counts)), key=lambda model: (free[model], -smallest[model] / counts[model])):
        yield from [(model, 1 / counts[model])] * counts[model]


def serves_all(filling: Filling) -> bool:
    """Whether every request goes somewhere, and all limits are kept."""
    return bool(filling.served().min(initial=1.0) >= ALL_SERVED) and not any(broken_limits(filling))


def on_fewest(method: Rival) -> Rival:
    """A method that uses all machines it is given, given as few as it needs to serve everything."""

    def fewest(problem: PlacingProblem) -> Filling:
        low, high = 1, len(problem.machines)
        best = method(problem)
        while low < high:
            middle = (low + high) // 2
            found = method(problem.section(range(middle), range(len(problem.demands))))
            if serves_all(found):
                best, high = found, middle
            else:
                low = middle + 1
        return Filling(problem, best.shares + [{} for _ in problem.machines[len(best.shares) :]])

    return fewest


def levelled(filling: Filling) -> Filling:
    """The same models on the same machines, in shares at which the machines are least crowded (a linear programme)."""
    from ortools.linear_solver import pywraplp

    problem, solver = filling.problem, pywraplp.Solver.CreateSolver("GLOP")
    infinity = solver.infinity()
    placed = [(machine, model) for machine, models in enumerate(filling.shares) for model in models]
    share = {(machine, model): solver.NumVar(LEAST_SHARE, 1, "") for machine, model in placed}
    for model in sorted({model for _, model in placed}):
        solver.Add(sum(share[machine, model] for machine in filling.where(model)) == 1)
    crowding = []
    for machine in np.flatnonzero(filling.used).tolist():
        kind = problem.kind_of[machine]
        pieces = [solver.NumVar(0, min(width * problem.cap[kind], infinity), "") for width, _ in CROWDING]
        crowding += [weight * piece for piece, (_, weight) in zip(pieces, CROWDING, strict=True)]
        for row in problem.rows[kind]:
            solver.Add(sum(row[model] * share[machine, model] for model in filling.shares[machine]) <= sum(pieces))
    solver.Minimize(sum(crowding))
    solver.Solve()
    found = Filling(problem)
    for machine, model in placed:
        found.add(machine, model, share[machine, model].solution_value())
    return found
