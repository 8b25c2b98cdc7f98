"""The search for a placement: packing all demands, finding the fewest machines, and the search for each objective.

``pack`` places all demands on given machines, small problems exactly by a mixed integer programme; ``fewest`` opens
machines from the bound upwards until a packing fits; ``search`` adds the objectives, and moves models until a
simulation is on time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from weft_cluster.placing.bound import ALMOST, PlacingBound, placing_bound
from weft_cluster.placing.filling import Filling, Piece, balance, divide, pieces
from weft_cluster.placing.judging import OnTimeJudge, improve
from weft_cluster.placing.placement import Objective
from weft_cluster.placing.problem import Bools, PlacingProblem
from weft_cluster.placing.resharing import reshare, reshare_for_load

MOST_RESHARED = 0.1
"""Largest unplaced part of the load with which models are divided anew between machines (``reshare``)."""
SCALES = (1.0, 0.97, 0.93, 0.85, 0.7)
"""Parts of the bound for which models are packed before they are divided anew: a high one leaves no room to move
models, a low one leaves machines unbalanced."""
PRECISION = 0.01
"""Relative precision of the fewest machines; the search is exact below a hundred."""
Refine = Callable[[Filling], Filling | None]
"""Improves a filling until it is good enough; None if that is not possible."""
TRIALS = 1
"""Changes that are simulated for each machine."""
HOPELESS = 1.25
"""Multiple of the late requests that the target allows, from which on moving models cannot help."""
SAMPLE = 50
"""Machines that are simulated first; if their late requests are far above the target, the others are not simulated."""


@dataclass(frozen=True, slots=True, eq=False)
class BoundedFilling:
    """A filling, its value, and a bound that no filling exceeds."""

    filling: Filling
    value: float
    bound: PlacingBound | None
    carried: int
    """Fewest machines found that carry the load, without regard to deadlines; 0 for other objectives."""


def search(problem: PlacingProblem, objective: Objective, target: float | None, seed: int = 0) -> BoundedFilling:
    """Search the best filling for an objective.

    target: required share of requests on time for the objectives machines and cost; None: not simulated.
    """
    if objective in ("machines", "cost"):
        return _minimise_machines(problem, objective, target, seed)
    bound = placing_bound(problem, "load")
    assert bound is not None  # a multiple of 0 can always be served
    scale, filling = most_load(problem, bound)
    return BoundedFilling(filling, scale, bound, carried=0)


def _minimise_machines(
    problem: PlacingProblem, objective: Objective, target: float | None, seed: int
) -> BoundedFilling:
    """Search the filling with the fewest or cheapest machines; on all machines if the demands need more."""
    bound = placing_bound(problem, objective)
    carrying = fewest(problem, objective)
    filling = carrying if target is None or carrying is None else fewest(problem, objective, _OnTime(target, seed))
    if filling is None:  # all machines are needed, and are not enough
        filling, _ = pack(problem, np.ones(len(problem.machines), np.bool_))
        if target is not None:
            improve(filling, OnTimeJudge(seed), target, TRIALS * len(problem.machines))
    prices = [problem.kinds[machine.kind].price for machine in problem.machines]
    value = float(filling.used.sum() if objective == "machines" else np.array(prices) @ filling.used)
    return BoundedFilling(filling, value, bound, 0 if carrying is None else int(carrying.used.sum()))


class _OnTime:
    """Refines a filling until enough requests are on time: evens out the loads, then moves models.

    The result is judged with other arrivals than those by which the moves were chosen. Returns None if too many
    requests would be late.
    """

    def __init__(self, target: float, seed: int) -> None:
        self._target, self._move_judge, self._judge = target, OnTimeJudge(seed), OnTimeJudge(seed + 1)

    def __call__(self, filling: Filling) -> Filling | None:
        _, even = reshare_for_load(filling)
        used = np.flatnonzero(even.used).tolist()
        # A sample is less exact than all machines, hence twice the limit.
        if self._lateness(even, used[:: max(1, len(used) // SAMPLE)]) > 2 * HOPELESS:
            return None
        if 1 < self._lateness(even, used) < HOPELESS:
            improve(even, self._move_judge, self._target, TRIALS * len(used))
        return even if self._lateness(even, used) <= 1 else None

    def _lateness(self, filling: Filling, machines: list[int]) -> float:
        """Return the share of late requests on *machines*, over the share that the target allows."""
        return (1 - self._judge.attainment(filling, machines)) / (1 - self._target)


# The fewest machines


def fewest(problem: PlacingProblem, objective: Objective, refine: Refine = lambda filling: filling) -> Filling | None:
    """Search the fewest machines on which all models fit and the filling can be refined.

    Returns the refined filling; None if all machines are not enough. Doubles the step upwards, then bisects.
    """
    levels = _Levels(problem, objective)
    fillings: dict[int, Filling | None] = {}

    def good(level: int) -> bool:
        if level not in fillings:
            filling, unplaced = pack(problem, *levels[level])
            fillings[level] = None if unplaced else refine(filling)
        return fillings[level] is not None

    low, high = -1, 0
    opened_by_bound, _ = levels[0]
    precision = max(1, int(PRECISION * opened_by_bound.sum()))
    step = precision
    while not good(high):
        opened, _ = levels[high]
        if opened.all():
            return None
        low, high, step = high, high + step, 2 * step
    while high - low > precision:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle, high)
    return fillings[high]


class _Levels:
    """Increasing sets of machines to open: level 0 opens as many as the bound, each further level about one more."""

    def __init__(self, problem: PlacingProblem, objective: Objective) -> None:
        self._problem, self._objective = problem, objective
        self._bound = placing_bound(problem, objective)
        self._known: dict[int, tuple[Bools, PlacingBound | None]] = {}

    def __getitem__(self, level: int) -> tuple[Bools, PlacingBound | None]:
        """Return whether each machine is open at a level, and the bound that opens them; None if all are alike."""
        if level not in self._known:
            self._known[level] = self._open(level)
        return self._known[level]

    def _open(self, level: int) -> tuple[Bools, PlacingBound | None]:
        """Compute the machines that are open at a level, and the bound for their groups."""
        bound = self._bound
        if bound is not None and len(bound.groups) == 1:
            return _open_by_bound(self._problem, bound, level), None
        if bound is not None and level:
            bound = placing_bound(self._problem, self._objective, stretch=1 + level / max(1.0, sum(bound.opened)))
        if bound is None:
            return np.ones(len(self._problem.machines), np.bool_), None
        return _open_by_bound(self._problem, bound), bound


def _open_by_bound(problem: PlacingProblem, bound: PlacingBound, extra: int = 0) -> Bools:
    """Open as many machines of each group as a bound does, and *extra*; returns whether each machine is open."""
    opened = np.zeros(len(problem.machines), np.bool_)
    for group, count in zip(bound.groups, bound.opened, strict=True):
        opened[list(group.members[: math.ceil(count - ALMOST) + extra])] = True
    return opened


# Packing on given machines


def pack(problem: PlacingProblem, opened: Bools, bound: PlacingBound | None = None) -> tuple[Filling, list[Piece]]:
    """Place all models on the opened machines, divided if they do not fit whole.

    Returns the filling and the pieces without a place. bound: the bound by whose division among groups of machines
    models are divided.
    """
    filling, unplaced = pack_evenly(problem, opened, bound)
    sizes = problem.model_loads.max(axis=(0, 1))
    missing = sum(piece.share * sizes[piece.model] for piece in unplaced)
    if unplaced and missing <= MOST_RESHARED * np.sum(sizes):
        filling, unplaced = reshare(filling)
    if unplaced and is_small(problem, opened) and (exact := pack_exactly(problem, opened)):
        return exact, []
    return filling, unplaced


def pack_evenly(
    problem: PlacingProblem, opened: Bools, bound: PlacingBound | None = None
) -> tuple[Filling, list[Piece]]:
    """Place models one after another, each where it adds least; return the filling and the pieces without a place."""
    filling = Filling(problem)
    filling.open[:] = opened
    unplaced = balance(filling, pieces(problem, bound))
    return filling, divide(filling, balance(filling, unplaced) if bound else unplaced)


def most_load(problem: PlacingProblem, bound: PlacingBound) -> tuple[float, Filling]:
    """Search the largest multiple of the rates that fits; return it with its filling, 0 if not all models fit."""
    best, largest = 0.0, Filling(problem)
    opened = np.ones(len(problem.machines), np.bool_)
    for scale in SCALES:
        packed, unplaced = pack_evenly(replace(problem, cap=problem.cap / (scale * bound.value)), opened, bound)
        multiple, filling = reshare_for_load(Filling(problem, packed.shares))
        if not unplaced:
            multiple = max(multiple, scale * bound.value)
        if multiple > best or not largest.used.any():
            best, largest = multiple, filling
    return best, largest


MOST_PLACES = 120
"""Largest number of machines times models with which the exact packing is tried."""
MOST_MS = 2000
"""Time limit of the exact packing."""
LEAST_REPLICA_SHARE = 0.2
"""Smallest share of one replica of several, as a part of an equal share."""
# Shares below this are the solver's rounding, not a copy of the model; its tolerance is of the same size.
LEAST_SHARE = 1e-7


def is_small(problem: PlacingProblem, opened: Bools) -> bool:
    """Whether a problem may be packed exactly: few pairs of machine and model, and no replicas in different zones."""
    zones = any(demand.apart == "zone" and demand.replicas > 1 for demand in problem.demands)
    return int(opened.sum()) * len(problem.demands) <= MOST_PLACES and not zones


def pack_exactly(problem: PlacingProblem, opened: Bools) -> Filling | None:
    """Place all models on the opened machines by a mixed integer programme.

    None if there is no solution, or none was found within MOST_MS.
    """
    from ortools.linear_solver import pywraplp

    solver = pywraplp.Solver.CreateSolver("SCIP")
    solver.SetTimeLimit(MOST_MS)
    shares: dict[tuple[int, int], Any] = {}
    present: dict[tuple[int, int], Any] = {}
    for machine in np.flatnonzero(opened).tolist():
        _add_machine(solver, problem, machine, shares, present)
    for model, demand in enumerate(problem.demands):
        places = [(machine, placed) for machine, placed in shares if placed == model]
        if len(places) < demand.replicas:
            return None
        solver.Add(sum(shares[key] for key in places) == 1)
        if demand.replicas > 1:
            solver.Add(sum(present[key] for key in places) >= demand.replicas)
            for key in places:
                solver.Add(shares[key] >= LEAST_REPLICA_SHARE / demand.replicas * present[key])
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
    """Add the constraints of a machine: its two loads, its memory, and models that may not share it.

    shares, present: the variables by (machine, model), to which those of the machine are added.
    """
    kind = int(problem.kind_of[machine])
    models = np.flatnonzero(problem.allowed[machine]).tolist()
    for model in models:
        shares[machine, model] = solver.NumVar(0, 1, "")
        present[machine, model] = solver.BoolVar("")
        solver.Add(shares[machine, model] <= present[machine, model])
    if not models:
        return
    for model_loads in problem.model_loads[kind]:  # each of the two loads
        loads = [float(model_loads[model]) * shares[machine, model] for model in models]
        solver.Add(sum(loads) <= float(problem.cap[kind]))
    memory_parts = problem.bytes[kind] / problem.room_bytes[kind]
    solver.Add(sum(float(memory_parts[model]) * present[machine, model] for model in models) <= 1)
    for first, second in combinations(models, 2):  # a request must not wait longer than its slack for a segment
        if (
            problem.segment_s[kind, first] > problem.slack_s[kind, second]
            or problem.segment_s[kind, second] > problem.slack_s[kind, first]
        ):
            solver.Add(present[machine, first] + present[machine, second] <= 1)
