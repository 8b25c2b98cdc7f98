"""Small problems exactly: a mixed integer programme over which models are on which of the opened machines."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np

from weft_cluster.placing.filling import Filling
from weft_cluster.placing.problem import Bools, PlacingProblem

MOST_PLACES = 120
"""Machines times models up to which it is tried..."""
MOST_MS = 2000
"""... and for how long."""
OF_A_REPLICA = 0.2
"""The least that a replica gets, as a part of an equal share."""
# Shares below this are the solver's rounding, not a copy of the model; its tolerance is of the same size.
LEAST_SHARE = 1e-7


def is_small(problem: PlacingProblem, opened: Bools) -> bool:
    """Whether a problem is solved here: few places, and no replicas in zones of their own."""
    zones = any(demand.apart == "zone" and demand.replicas > 1 for demand in problem.demands)
    return int(opened.sum()) * len(problem.demands) <= MOST_PLACES and not zones


def pack_exactly(problem: PlacingProblem, opened: Bools) -> Filling | None:
    """All models on the opened machines; None where there is no way, or none was found in time."""
    from ortools.linear_solver import pywraplp

    solver = pywraplp.Solver.CreateSolver("SCIP")
    solver.SetTimeLimit(MOST_MS)
    shares: dict[tuple[int, int], Any] = {}
    present: dict[tuple[int, int], Any] = {}
    for machine in np.flatnonzero(opened).tolist():
        _add_machine(solver, problem, machine, shares, present)
    for model, demand in enumerate(problem.demands):
        places = [key for key in shares if key[1] == model]
        if len(places) < demand.replicas:
            return None
        solver.Add(sum(shares[key] for key in places) == 1)
        if demand.replicas > 1:
            solver.Add(sum(present[key] for key in places) >= demand.replicas)
            for key in places:
                solver.Add(shares[key] >= OF_A_REPLICA / demand.replicas * present[key])
    solver.Minimize(sum(present.values()))
    if solver.Solve() not in (solver.OPTIMAL, solver.FEASIBLE):
        return None
    filling = Filling(problem)
    filling.open[:] = opened
    for (machine, model), share in shares.items():
        if (value := float(share.solution_value())) > LEAST_SHARE:
            filling.add(machine, model, value)
    return filling


def _add_machine(
    solver: Any,
    problem: PlacingProblem,
    machine: int,
    shares: dict[tuple[int, int], Any],
    present: dict[tuple[int, int], Any],
) -> None:
    """Add the constraints of a machine: its two loads, its memory, and models that may not share it."""
    kind = int(problem.kind_of[machine])
    models = np.flatnonzero(problem.allowed[machine]).tolist()
    for model in models:
        shares[machine, model] = solver.NumVar(0, 1, "")
        present[machine, model] = solver.BoolVar("")
        solver.Add(shares[machine, model] <= present[machine, model])
    if not models:
        return
    for row in range(2):
        loads = [float(problem.rows[kind, row, model]) * shares[machine, model] for model in models]
        solver.Add(sum(loads) <= float(problem.cap[kind]))
    parts = problem.bytes[kind] / problem.room_bytes[kind]
    solver.Add(sum(float(parts[model]) * present[machine, model] for model in models) <= 1)
    for one, other in combinations(models, 2):
        if (
            problem.segment_s[kind, one] > problem.slack_s[kind, other]
            or problem.segment_s[kind, other] > problem.slack_s[kind, one]
        ):
            solver.Add(present[machine, one] + present[machine, other] <= 1)
