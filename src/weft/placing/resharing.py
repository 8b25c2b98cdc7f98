"""Divide models anew between machines: a linear programme over where they are, and where they might also go.

Packing decides who is on which machine, one after another, and ends with a rest that fits nowhere although room is left:
on one machine computing, on another the memory channel. Here all shares are moved at once, so that both fill up.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from weft.placing.balancing import Piece
from weft.placing.filling import Filling
from weft.placing.problem import ROUNDING, Floats

CANDIDATES = 4
"""How many more machines a model might go to."""
ELSEWHERE = 1e-3
"""What it costs to send requests to a machine that did not have the model, in machines."""
LEAST_SHARE = 1e-5


def reshare(filling: Filling, left: list[Piece]) -> tuple[Filling, list[Piece]]:
    """A filling with the same machines open that leaves less; and what it leaves."""
    from ortools.linear_solver import pywraplp

    missing = np.zeros(len(filling.problem.demands))
    for piece in left:
        missing[piece.model] += piece.share
    solver = pywraplp.Solver.CreateSolver("GLOP")
    shares, rests = _programme(solver, filling, _candidates(filling))
    if solver.Solve() != solver.OPTIMAL:
        return filling, left
    found = Filling(filling.problem)
    found.open[:] = filling.open
    for (machine, model), share in shares.items():
        if share.solution_value() > LEAST_SHARE:
            found.add(machine, model, float(share.solution_value()))
    served = found.served()
    for model in np.flatnonzero((served < 1) & (missing < LEAST_SHARE) & (served > 1 - 1e-3)).tolist():
        most = max(found.where(model), key=lambda machine: found.shares[machine][model])
        found.add(most, model, 1 - served[model])  # what was rounded away
    return found, [Piece(model, rest) for model, each in rests.items() if (rest := each.solution_value()) > LEAST_SHARE]


def _programme(
    solver: Any, filling: Filling, candidates: list[tuple[int, int]]
) -> tuple[dict[tuple[int, int], Any], dict[int, Any]]:
    """Variables for the share of each model on each machine, and for what is left of it."""
    problem, goal = filling.problem, solver.Objective()
    goal.SetMinimization()
    limits = [
        [solver.Constraint(-solver.infinity(), float(problem.cap[kind])) for _ in range(2)] for kind in problem.kind_of
    ]
    wholes = [solver.Constraint(1.0, 1.0) for _ in problem.demands]
    homes = [(machine, model) for machine, models in enumerate(filling.shares) for model in models]
    shares: dict[tuple[int, int], Any] = {}
    for new, places in ((False, homes), (True, candidates)):
        for machine, model in places:
            demand = problem.demands[model]
            least = 0.2 / demand.replicas if demand.replicas > 1 and not new else 0.0
            shares[machine, model] = share = solver.NumVar(least, 1.0, "")
            wholes[model].SetCoefficient(share, 1.0)
            for row, limit in enumerate(limits[machine]):
                limit.SetCoefficient(share, float(problem.rows[problem.kind_of[machine], row, model]))
            if new:
                goal.SetCoefficient(share, ELSEWHERE)
    rests = {}
    for model, whole in enumerate(wholes):
        rests[model] = solver.NumVar(0.0, 1.0, "")
        whole.SetCoefficient(rests[model], 1.0)
        goal.SetCoefficient(rests[model], float(problem.rows[:, :, model].max()) + 10 * ELSEWHERE)
    return shares, rests


def _candidates(filling: Filling) -> list[tuple[int, int]]:
    """Machines where models that use one resource could join others that use the other, as far as memory goes."""
    problem = filling.problem
    trial = Filling(problem, filling.shares)
    trial.open[:] = filling.open
    caps = problem.cap[problem.kind_of]
    lean = (filling.loads[:, 0] - filling.loads[:, 1]) / caps
    free = 1 - filling.loads.max(axis=1) / caps
    found = []
    for model in np.argsort(-np.abs(_leans(problem.rows)), kind="stable").tolist():
        if problem.demands[model].replicas > 1 or problem.demands[model].machine is not None:
            continue
        rows = problem.rows[problem.kind_of, :, model]
        with np.errstate(divide="ignore", invalid="ignore"):
            leans = np.nan_to_num((rows[:, 0] - rows[:, 1]) / rows.sum(axis=1))
        joins = trial.could_join(model)
        joins[trial.where(model)] = False
        score = np.where(joins, free - lean * leans, -np.inf)
        for machine in np.argsort(-score, kind="stable")[:CANDIDATES].tolist():
            if joins[machine]:
                trial.add(machine, model, 0.0)
                found.append((machine, model))
                free[machine] -= ROUNDING
    return found


def _leans(rows: Floats) -> Floats:
    """(model): how much more it computes than it moves, from 1 to -1, on average over kinds."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num((rows[:, 0] - rows[:, 1]) / rows.sum(axis=1)).mean(axis=0)
