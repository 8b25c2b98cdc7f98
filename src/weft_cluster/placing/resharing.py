"""Divide models anew between machines: a linear programme over their machines and a few candidate machines.

Packing places models one after another, and may end with a share that fits nowhere although there is room: array time
on one machine, channel time on another. Here all shares change at once, so that both resources fill up.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from weft_cluster.placing.filling import Filling, Piece
from weft_cluster.placing.problem import ROUNDING, Bools, Floats, PlacingProblem

CANDIDATES = 4
"""Number of further machines that each model may go to in the programme."""
NEW_MACHINE_PENALTY = 1e-3
"""Penalty for a model's whole share on a machine that does not have it yet, in machines."""
LEAST_SHARE = 1e-7
"""Smaller shares are rounding."""
SMALL_SHARE = 0.01
"""Smaller shares are moved to other machines of the model if these have room."""
ROUNDS = 4
"""Most times that models are divided anew, each time with other candidate machines."""
PROGRESS = 0.05
"""Least part by which the unserved rest must shrink for another round."""
LEAST_REPLICA_SHARE = 0.2
"""Smallest share of one replica of several, as a part of an equal share."""
LEAST_OF_A_MODEL = 1e-4
"""Smallest share of a model on each machine that has it."""
ALL_SERVED = 1 - 1e-6
"""Share of a model's requests from which it counts as served: the linear programme's tolerance below 1."""
CROWDING = ((0.5, 1.0), (0.25, 2.0), (0.15, 4.0), (0.1, 8.0), (np.inf, 1000.0))
"""Piecewise linear penalty for a machine's load: (width as a part of its cap, weight); above the cap it is largest."""


def reshare(filling: Filling) -> tuple[Filling, list[Piece]]:
    """Divide models anew between the open machines, to serve as much as possible.

    Returns the filling and the pieces that are still unserved.
    """
    unserved = _unserved_pieces(filling)
    for _ in range(ROUNDS):
        programme = _SharesProgramme(filling)
        programme.serve_once()
        if not programme.solved():
            break
        filling = programme.filling(times=1.0)
        previous, unserved = unserved, _unserved_pieces(filling)
        if not unserved or _total_share(unserved) > (1 - PROGRESS) * _total_share(previous):
            break
    return _drop_small_shares(filling), unserved


def reshare_for_load(filling: Filling) -> tuple[float, Filling]:
    """Divide models anew to carry the largest multiple of all rates; return that multiple and the filling."""
    best = 0.0
    for _ in range(ROUNDS):
        programme = _SharesProgramme(filling)
        multiple = programme.serve_many_times()
        if not programme.solved() or (reached := float(multiple.solution_value())) <= (1 + PROGRESS / 10) * best:
            break
        best, filling = reached, programme.filling(reached)
    return best, filling


def _total_share(pieces: list[Piece]) -> float:
    return sum(piece.share for piece in pieces)


def _drop_small_shares(filling: Filling) -> Filling:
    """Move small shares to other machines of the model that have room; the filling is changed and returned."""
    small = [
        (machine, model)
        for machine, models in enumerate(filling.shares)
        for model, share in models.items()
        if share < SMALL_SHARE and filling.problem.demands[model].replicas == 1
    ]
    for machine, model in small:
        share = filling.remove(machine, model)
        rooms = filling.room(model)
        others = [other for other in filling.machines_with(model) if rooms[other] >= share]
        filling.add(others[0] if others else machine, model, share)
    return filling


def _unserved_pieces(filling: Filling) -> list[Piece]:
    """The shares of models that have no machine."""
    rests = 1.0 - filling.served()
    return [Piece(model, float(rests[model])) for model in np.flatnonzero(rests > LEAST_SHARE).tolist()]


class _SharesProgramme:
    """The linear programme: the share of each model on each machine that has it or might get it."""

    def __init__(self, filling: Filling) -> None:
        from ortools.linear_solver import pywraplp

        self._solver = solver = pywraplp.Solver.CreateSolver("GLOP")
        self._filling, problem = filling, filling.problem
        self._goal = solver.Objective()
        caps = problem.cap[problem.kind_of].tolist()
        # By machine: the constraints on its two loads.
        self._limits = [[solver.Constraint(-solver.infinity(), cap) for _ in range(2)] for cap in caps]
        # By model: the constraint on the sum of its shares.
        self._served_sums = [solver.Constraint(0.0, 0.0) for _ in problem.demands]
        self._shares: dict[tuple[int, int], Any] = {}
        for machine, models in enumerate(filling.shares):
            for model, share in models.items():
                replicas = problem.demands[model].replicas
                least = LEAST_REPLICA_SHARE / replicas if replicas > 1 else 0.0
                missing = filling.replicas(model) < replicas  # existing replicas do not get the share of missing ones
                self._add(machine, model, min(least, share), share if missing else solver.infinity())
        for machine, model in _candidates(filling):
            self._goal.SetCoefficient(self._add(machine, model, 0.0, solver.infinity()), NEW_MACHINE_PENALTY)

    def _add(self, machine: int, model: int, low: float, high: float) -> Any:
        """Add the variable of a model's share on a machine, within *low* and *high*."""
        problem = self._filling.problem
        self._shares[machine, model] = share = self._solver.NumVar(low, high, "")
        self._served_sums[model].SetCoefficient(share, 1.0)
        for loads, limit in zip(problem.model_loads[problem.kind_of[machine]], self._limits[machine], strict=True):
            limit.SetCoefficient(share, float(loads[model]))
        return share

    def serve_once(self) -> None:
        """Set the objective: serve every model once, with as small an unserved rest as possible."""
        self._goal.SetMinimization()
        sizes = self._filling.problem.model_loads.max(axis=(0, 1))
        for served_sum, size in zip(self._served_sums, sizes.tolist(), strict=True):
            rest = self._solver.NumVar(0.0, 1.0, "")
            served_sum.SetBounds(1.0, 1.0)
            served_sum.SetCoefficient(rest, 1.0)
            self._goal.SetCoefficient(rest, size + 10 * NEW_MACHINE_PENALTY)  # worse than any new machine

    def serve_many_times(self) -> Any:
        """Set the objective: the largest common multiple of all models' rates; return its variable."""
        self._goal.Clear()
        self._goal.SetMaximization()
        multiple = self._solver.NumVar(0.0, self._solver.infinity(), "")
        self._goal.SetCoefficient(multiple, 1.0)
        for served_sum in self._served_sums:
            served_sum.SetCoefficient(multiple, -1.0)
        return multiple

    def solved(self) -> bool:
        """Solve the programme; return whether there is an optimal solution."""
        return bool(self._solver.Solve() == self._solver.OPTIMAL)

    def filling(self, times: float) -> Filling:
        """Return the solution's shares, divided by *times*."""
        filling = Filling(self._filling.problem)
        filling.open[:] = self._filling.open
        for (machine, model), variable in self._shares.items():
            if (share := float(variable.solution_value()) / times) > LEAST_SHARE:
                filling.add(machine, model, share)
        served = filling.served()
        for model in np.flatnonzero((served < 1) & (served > 1 - len(filling.shares) * LEAST_SHARE)).tolist():
            largest_machine = max(filling.machines_with(model), key=lambda machine: filling.shares[machine][model])
            filling.add(largest_machine, model, float(1 - served[model]))  # shares below LEAST_SHARE were dropped above
        return filling


def _candidates(filling: Filling) -> list[tuple[int, int]]:
    """Pairs (machine, model) in which a model that uses one resource could join models that use the other."""
    problem, trial = filling.problem, Filling(filling.problem, filling.shares)
    trial.open[:] = filling.open
    caps = problem.cap[problem.kind_of]
    lean = (filling.loads[:, 0] - filling.loads[:, 1]) / caps  # above 0: the machine rather computes
    free = 1 - filling.loads.max(axis=1) / caps
    candidates, leans = [], _leans(problem)
    for model in np.argsort(-np.abs(leans).mean(axis=0), kind="stable").tolist():
        if problem.demands[model].replicas > 1 or problem.demands[model].machine is not None:
            continue
        joins = trial.could_join(model)
        joins[trial.machines_with(model)] = False
        score = np.where(joins, free - lean * leans[problem.kind_of, model], -np.inf)
        for machine in np.argsort(-score, kind="stable")[:CANDIDATES].tolist():
            if joins[machine]:
                trial.add(machine, model, 0.0)
                candidates.append((machine, model))
                free[machine] -= ROUNDING  # breaks ties, so that not all models choose the same machine
    return candidates


def _leans(problem: PlacingProblem) -> Floats:
    """Return for each model how much more it computes (up to 1) or uses the channel (down to -1); (kinds, models)."""
    total = problem.model_loads.sum(axis=1)
    leans: Floats = (problem.model_loads[:, 0] - problem.model_loads[:, 1]) / np.where(total > 0, total, 1.0)
    return leans


def new_homes(filling: Filling, model: int) -> Bools:
    """Return whether one more replica of a model may go to each machine; (machines)."""
    problem, homes = filling.problem, filling.machines_with(model)
    allowed = filling.could_join(model)
    allowed[homes] = False
    if problem.demands[model].apart == "zone" and len(homes) < problem.demands[model].replicas:
        allowed &= ~np.isin(problem.zone_of, problem.zone_of[homes])
    return allowed


def levelled(filling: Filling) -> Filling:
    """Divide every model between the machines that have it so that the machines are least crowded.

    A linear programme with the penalty CROWDING; all requests are served, even above the caps.
    """
    from ortools.linear_solver import pywraplp

    problem, solver = filling.problem, pywraplp.Solver.CreateSolver("GLOP")
    infinity = solver.infinity()
    placed = [(machine, model) for machine, models in enumerate(filling.shares) for model in models]
    shares = {(machine, model): solver.NumVar(LEAST_OF_A_MODEL, 1, "") for machine, model in placed}
    for model in sorted({model for _, model in placed}):
        solver.Add(sum(shares[machine, model] for machine in filling.machines_with(model)) == 1)
    crowding = []
    for machine in np.flatnonzero(filling.used).tolist():
        kind = problem.kind_of[machine]
        # The load is at most the sum of these parts; the solver fills the parts of low weight first.
        load_parts = [solver.NumVar(0, min(width * problem.cap[kind], infinity), "") for width, _ in CROWDING]
        crowding += [weight * load_part for load_part, (_, weight) in zip(load_parts, CROWDING, strict=True)]
        for loads in problem.model_loads[kind]:  # each of the two loads
            solver.Add(
                sum(loads[model] * shares[machine, model] for model in filling.shares[machine]) <= sum(load_parts)
            )
    solver.Minimize(sum(crowding))
    solver.Solve()
    result = Filling(problem)
    for machine, model in placed:
        result.add(machine, model, shares[machine, model].solution_value())
    return result
