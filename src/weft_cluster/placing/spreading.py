"""Spreading a model over machines: where another replica may go, and shares that crowd no machine."""

from __future__ import annotations

import numpy as np

from weft_cluster.placing.filling import Filling
from weft_cluster.placing.problem import Bools

LEAST_SHARE = 1e-4
"""Of a model, on each machine that has it."""
ALL_SERVED = 1 - 1e-6
CROWDING = ((0.5, 1.0), (0.25, 2.0), (0.15, 4.0), (0.1, 8.0), (np.inf, 1000.0))
"""How much worse a machine gets by being busier: pieces of its cap, and what each weighs; above the cap, most."""


def new_homes(filling: Filling, model: int) -> Bools:
    """(machine): whether one more replica of a model may go there."""
    problem, there = filling.problem, filling.where(model)
    found = filling.could_join(model)
    found[there] = False
    if problem.demands[model].apart == "zone" and len(there) < problem.demands[model].replicas:
        found &= ~np.isin(problem.zone_of, problem.zone_of[there])
    return found


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
