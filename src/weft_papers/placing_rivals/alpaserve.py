"""AlpaServe's beam search and its integer programme (Li et al., OSDI 2023); ``weft place`` has its greedy search.

The integer programme for replication, "SR-ILP", needs no simulation. The capacity of a model is the rate that all its
replicas could serve, each as if alone on its machine, over the requested rate. The programme maximises the smallest
capacity and, with a small weight, the sum of all; memory is the only limit. Here CP-SAT solves it, with further
constraints for models that may not share a machine. Requests are then divided so that the machines are least loaded.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np

from weft_cluster.placing.filling import Filling
from weft_cluster.placing.problem import PlacingProblem
from weft_cluster.placing.resharing import levelled, new_homes
from weft_cluster.routing.placing_run import OnTime, fluid, lacking, replicate
from weft_papers.placing_rivals.spreading import round_robin, serial_loads

STEPS = 1000
"""Integer units per unit of capacity, because CP-SAT takes integers."""
MOST_TIMES = 20.0
"""Cap on the capacity of one replica, in multiples of the model's rate: more would only reward idle replicas."""
MIB = 2**20  # memory is counted in MiB: CP-SAT takes integers, and sums of bytes come near 64 bits


def integer_programme(problem: PlacingProblem, effort_s: float = 30.0) -> Filling:
    """Solve AlpaServe's integer programme within *effort_s* seconds (published: 30) of CP-SAT's deterministic time.

    The filling is empty if no solution is found by then.
    """
    from ortools.sat.python import cp_model

    cp = cp_model.CpModel()
    machines, models = problem.sizes
    places = [
        (machine, model) for machine in range(machines) for model in range(models) if problem.allowed[machine, model]
    ]
    present = {place: cp.new_bool_var("") for place in places}
    for machine in range(machines):
        _limit_memory(cp, problem, machine, present)
        _keep_apart(cp, problem, machine, present)
    _set_objective(cp, problem, present)
    start = round_robin(problem)
    for (machine, model), variable in present.items():
        cp.add_hint(variable, model in start.shares[machine])
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = effort_s
    solver.parameters.num_workers = 1  # several workers would make the result depend on timing
    if solver.solve(cp) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Filling(problem)
    solution = Filling(problem)
    for machine, model in places:
        if solver.value(present[machine, model]):
            solution.add(machine, model, 1.0)
    return levelled(solution)


def _limit_memory(cp: Any, problem: PlacingProblem, machine: int, present: dict[tuple[int, int], Any]) -> None:
    """Constrain the models on a machine to its memory; *present*: (machine, model) -> whether the model is there."""
    kind = int(problem.kind_of[machine])
    sizes = np.ceil(problem.bytes[kind] / MIB).astype(int).tolist()
    allowed = [model for model in range(len(sizes)) if (machine, model) in present]
    cp.add(sum(sizes[model] * present[machine, model] for model in allowed) <= int(problem.room_bytes[kind] // MIB))


def _keep_apart(cp: Any, problem: PlacingProblem, machine: int, present: dict[tuple[int, int], Any]) -> None:
    """Forbid pairs of models on a machine of which one has too little slack for a segment of the other."""
    kind = int(problem.kind_of[machine])
    segment_s, slack_s = problem.segment_s[kind], problem.slack_s[kind]
    allowed = [model for model in range(len(slack_s)) if (machine, model) in present]
    for first, second in combinations(allowed, 2):
        if segment_s[first] > slack_s[second] or segment_s[second] > slack_s[first]:
            cp.add(present[machine, first] + present[machine, second] <= 1)


def _set_objective(cp: Any, problem: PlacingProblem, present: dict[tuple[int, int], Any]) -> None:
    """Maximise the models' capacities relative to their rates: the smallest first, then a little the sum.

    Also constrains every model to at least as many replicas as it demands.
    """
    loads, capacities = serial_loads(problem), []
    for model, demand in enumerate(problem.demands):
        homes = [machine for machine in range(len(problem.machines)) if (machine, model) in present]
        capacity_units = [int(STEPS * min(MOST_TIMES, 1 / loads[problem.kind_of[home], model])) for home in homes]
        capacities.append(sum(units * present[home, model] for units, home in zip(capacity_units, homes, strict=True)))
        cp.add(sum(present[home, model] for home in homes) >= demand.replicas)
    smallest = cp.new_int_var(0, int(STEPS * MOST_TIMES * len(problem.machines)), "")
    for capacity in capacities:
        cp.add(smallest <= capacity)
    cp.maximize(10_000 * smallest + sum(capacities))  # weights as published


def beam(problem: PlacingProblem, on_time_of: OnTime = fluid, width: int = 3) -> Filling:
    """AlpaServe's beam search: add replicas one by one, and keep the *width* best placements after each step.

    A step adds one replica of a badly served model to a machine; of machines that are alike, only one is tried.
    on_time_of: returns the share of each model's requests that a placement serves on time.
    """
    rates = np.array([demand.rate for demand in problem.demands])

    def score(filling: Filling) -> float:
        # The number of replicas only breaks ties.
        return float(rates @ on_time_of(filling) / rates.sum()) + sum(map(len, filling.shares)) / 1e6

    best_fillings = [Filling(problem)]
    best = best_fillings[0]
    while best_fillings:
        # Placements that differ only in the order of the machines count once.
        candidates: dict[tuple[frozenset[int], ...], Filling] = {}
        for filling in best_fillings:
            for model in lacking(filling, on_time_of(filling)):
                for machine in _distinct(filling, model):
                    candidate = Filling(problem, filling.shares)
                    replicate(candidate, model, machine)
                    candidates.setdefault(
                        tuple(sorted((frozenset(shares) for shares in candidate.shares), key=sorted)), candidate
                    )
        best_fillings = sorted(candidates.values(), key=score, reverse=True)[:width]
        best = max([best, *best_fillings], key=score)
    return levelled(best)


def _distinct(filling: Filling, model: int) -> list[int]:
    """Machines that can take one more replica of *model*; of the empty machines of a kind, only the first."""
    homes = np.flatnonzero(new_homes(filling, model)).tolist()
    kinds = filling.problem.kind_of
    # Key: the kind, and the machine if it has models. Reversed, so that the first empty machine of a kind stays.
    representatives = {(int(kinds[home]), home if filling.shares[home] else -1): home for home in reversed(homes)}
    return sorted(representatives.values())
