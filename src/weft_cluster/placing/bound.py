"""A bound on the value of every placement, by a linear programme over groups of machines that are alike.

The relaxation: models may be divided at will, and parts of machines opened where all machines are alike. Kept are the
two loads and the memory of each group, and that a model needs as many copies as its load fills machines, each with all
weights on a machine of its own. A kind that cannot meet a model's deadline alone is excluded; waiting for other models
on the same machine is ignored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft_cluster.placing.machines import MachineKind
from weft_cluster.placing.placement import Objective
from weft_cluster.placing.problem import PlacingProblem

ALMOST = 1e-6
"""Tolerance of the linear programme's solutions."""
ALMOST_FULL = 0.9
"""If loads and memory use less than this share of the opened machines, the need for separate copies is the limit."""
MIB = 2**20  # bytes are counted in MiB in the programme, so that its coefficients are of similar size


@dataclass(frozen=True, slots=True, eq=False)
class PlacingBound:
    """A bound on the objective's value, and the resource that limits it."""

    value: float
    by: str
    """load, memory or copies."""
    groups: tuple[AlikeMachines, ...]
    opened: tuple[float, ...]
    """Number of machines that the programme opens, by group."""
    shares: tuple[dict[int, float], ...]
    """By group: number of a model -> share of its requests that go there."""


def placing_bound(problem: PlacingProblem, objective: Objective, stretch: float = 1.0) -> PlacingBound | None:
    """Compute the bound for an objective by the linear programme; None if not all demands can be served.

    stretch: factor on all loads.
    """
    programme = _Programme(problem, objective, stretch)
    if not programme.solved():
        return None
    value = programme.value
    if objective == "machines":
        value = float(math.ceil(value - ALMOST))
    return PlacingBound(value, programme.tightest(), programme.groups, programme.opened, programme.shares)


class _Programme:
    """The linear programme.

    stretch: factor on all loads. Variables per group of machines: x, the share of a model; y, the number of its copies;
    n, the number of opened machines.
    """

    def __init__(self, problem: PlacingProblem, objective: Objective, stretch: float) -> None:
        from ortools.linear_solver import pywraplp  # costs a twentieth of a second

        self.groups = alike_machines(problem)
        integral = objective in ("machines", "cost") and len(self.groups) > 1
        self._solver = pywraplp.Solver.CreateSolver("SCIP" if integral else "GLOP")  # GLOP: linear only
        self._problem, self._objective, self._stretch = problem, objective, stretch
        goal = self._solver.Objective()
        goal.SetOptimizationDirection(objective in ("load", "attainment"))
        all_open = objective in ("load", "attainment")
        variable = self._solver.IntVar if integral else self._solver.NumVar
        self._n = [variable(len(group) if all_open else 0, len(group), "") for group in self.groups]
        self._x: list[dict[int, Any]] = [{} for _ in self.groups]
        if not all_open:
            for group, n in zip(self.groups, self._n, strict=True):
                goal.SetCoefficient(n, group.hardware.price if objective == "cost" else 1.0)
        self._add_models([self._add_group(place) for place in range(len(self.groups))])

    def _add_limit(self, room: float, group: int) -> Any:
        """Add a constraint in which every opened machine of a group contributes *room*."""
        row = self._solver.Constraint(-self._solver.infinity(), 0)
        row.SetCoefficient(self._n[group], -room)
        return row

    def _cap(self, group: AlikeMachines) -> float:
        """Load up to which a machine is filled; for attainment all of its time counts."""
        return 1.0 if self._objective == "attainment" else group.hardware.busy_cap

    def _add_group(self, place: int) -> list[Any]:
        """Add the limits of a group that models share: its two loads and its memory."""
        group = self.groups[place]
        sizes = (self._cap(group), self._cap(group), group.hardware.memory_bytes / MIB)
        return [self._add_limit(size, place) for size in sizes]

    def _add_models(self, limits: list[list[Any]]) -> None:
        """Require that every model is served: fully, partly (attainment), or a multiple of its rate (load).

        limits: by group, the constraints on its two loads and on its memory.
        """
        problem, solver, goal = self._problem, self._solver, self._solver.Objective()
        total_rate = sum(demand.rate for demand in problem.demands)
        times = solver.NumVar(0, solver.infinity(), "")  # objective load: the multiple of all rates
        least_served = {"load": 0.0, "attainment": 0.0}.get(self._objective, 1.0)
        if self._objective == "load":
            goal.SetCoefficient(times, 1.0)
        for model, demand in enumerate(problem.demands):
            shares = solver.Constraint(least_served, 0.0 if self._objective == "load" else 1.0)
            if self._objective == "load":
                shares.SetCoefficient(times, -1.0)
            copy_count = solver.Constraint(
                0.0 if self._objective == "attainment" else demand.replicas, solver.infinity()
            )
            for place, group in enumerate(self.groups):
                if problem.allowed[group.members[0], model]:
                    x = self._x[place][model] = self._add_share(model, place, limits[place], copy_count)
                    shares.SetCoefficient(x, 1.0)
                    if self._objective == "attainment":
                        goal.SetCoefficient(x, demand.rate / total_rate)

    def _add_share(self, model: int, place: int, limits: list[Any], copy_count: Any) -> Any:
        """Add the variables of a model in a group, with as many copies as its load fills machines; return the share.

        limits: the constraints on the group's two loads and on its memory. copy_count: that on the model's copies.
        """
        problem, solver, group = self._problem, self._solver, self.groups[place]
        loads = problem.model_loads[group.kind, :, model] * self._stretch
        x, y = solver.NumVar(0, solver.infinity(), ""), solver.NumVar(0, len(group), "")
        costs = (float(loads[0]), float(loads[1]), float(problem.bytes[group.kind, model] / MIB))
        for limit, variable, cost in zip(limits, (x, x, y), costs, strict=True):
            limit.SetCoefficient(variable, cost)
        copy_count.SetCoefficient(y, 1.0)
        machines_filled = float(loads.max() / self._cap(group))
        # y >= machines_filled x; and y >= x, except where x is a multiple of the rate and may exceed one copy.
        enough_copies = solver.Constraint(0, solver.infinity())
        enough_copies.SetCoefficient(y, 1.0)
        enough_copies.SetCoefficient(x, -machines_filled if self._objective == "load" else -max(1.0, machines_filled))
        if machines_filled > 1 or problem.demands[model].replicas > 1:
            # Copies of such a model are on different machines.
            self._add_limit(1.0, place).SetCoefficient(y, 1.0)
        return x

    def solved(self) -> bool:
        """Solve the programme; return whether there is an optimal solution, which the properties then describe."""
        return bool(self._solver.Solve() == self._solver.OPTIMAL)

    @property
    def value(self) -> float:
        return float(self._solver.Objective().Value())

    @property
    def shares(self) -> tuple[dict[int, float], ...]:
        return tuple(
            {model: value for model, x in variables.items() if (value := float(x.solution_value())) > ALMOST}
            for variables in self._x
        )

    @property
    def opened(self) -> tuple[float, ...]:
        return tuple(float(n.solution_value()) for n in self._n)

    def tightest(self) -> str:
        """Return the resource of the opened machines with the least left; "copies" if loads and memory have room."""
        used, available = {"load": 0.0, "memory": 0.0}, {"load": 0.0, "memory": 0.0}
        for place, group in enumerate(self.groups):
            kind, n, shares = group.kind, self.opened[place], self.shares[place]
            loads = [share * self._problem.model_loads[kind, :, model] for model, share in shares.items()]
            used["load"] += float(np.sum(loads, axis=0).max()) if loads else 0.0
            used["memory"] += sum(share * float(self._problem.bytes[kind, model]) for model, share in shares.items())
            available["load"] += n * self._cap(group)
            available["memory"] += n * group.hardware.memory_bytes
        full = {key: used[key] / available[key] if available[key] else 0.0 for key in used}
        tightest = max(full, key=lambda key: full[key])
        return tightest if full[tightest] > ALMOST_FULL else "copies"


@dataclass(frozen=True, slots=True, eq=False)
class AlikeMachines:
    """A group of machines that are the same to every model: of one kind and zone, none of them pinned."""

    kind: int
    """The number of their kind."""
    hardware: MachineKind
    """Their kind."""
    members: tuple[int, ...]
    """Their numbers, in order."""

    def __len__(self) -> int:
        return len(self.members)


def alike_machines(problem: PlacingProblem) -> tuple[AlikeMachines, ...]:
    """Group the machines by kind and zone; a machine that a model is pinned to is a group of its own."""
    pinned = {demand.machine for demand in problem.demands}
    members_by_group: dict[tuple[str, str, str], list[int]] = {}
    for number, machine in enumerate(problem.machines):
        pinned_name = machine.name if machine.name in pinned else ""
        members_by_group.setdefault((machine.kind, machine.zone, pinned_name), []).append(number)
    names = list(problem.kinds)
    return tuple(
        AlikeMachines(names.index(kind), problem.kinds[kind], tuple(members))
        for (kind, _, _), members in members_by_group.items()
    )
