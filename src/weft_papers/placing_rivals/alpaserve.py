"""AlpaServe's beam search and its integer programme (Li et al., OSDI 2023), beside the greedy of ``weft place``.

The integer programme for replication, "SR-ILP", asks no judge: it maximises the least, over models, of the rate that
all its replicas could serve, each as if alone, over the rate that is asked, and then a little the sum of these; memory
is the only limit. Here CP-SAT solves it, with constraints for models that may not share a machine; shares are then
those at which the machines are least crowded.
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
"""Integer units per unit of served rate, because CP-SAT takes integers; the sum weighs a ten-thousandth, as
published."""
MOST_TIMES = 20.0
"""Replicas beyond this multiple of a model's rate count no more: the objective would only reward copies that serve
nothing."""
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
    here = [model for model in range(len(sizes)) if (machine, model) in present]
    cp.add(sum(sizes[model] * present[machine, model] for model in here) <= int(problem.room_bytes[kind] // MIB))


def _keep_apart(cp: Any, problem: PlacingProblem, machine: int, present: dict[tuple[int, int], Any]) -> None:
    """Forbid pairs of models where one cannot wait for a segment of the other."""
    kind = int(problem.kind_of[machine])
    segment, slack = problem.segment_s[kind], problem.slack_s[kind]
    here = [model for model in range(len(slack)) if (machine, model) in present]
    for one, other in combinations(here, 2):
        if segment[one] > slack[other] or segment[other] > slack[one]:
            cp.add(present[machine, one] + present[machine, other] <= 1)


def _set_objective(cp: Any, problem: PlacingProblem, present: dict[tuple[int, int], Any]) -> None:
    """Maximise the models' capacities relative to their rates: the smallest first, then a little the sum.

    Also constrains every model to at least as many replicas as it demands.
    """
    loads, capacities = serial_loads(problem), []
    for model, demand in enumerate(problem.demands):
        homes = [machine for machine in range(len(problem.machines)) if (machine, model) in present]
        parts = [int(STEPS * min(MOST_TIMES, 1 / loads[problem.kind_of[home], model])) for home in homes]
        capacities.append(sum(part * present[home, model] for part, home in zip(parts, homes, strict=True)))
        cp.add(sum(present[home, model] for home in homes) >= demand.replicas)
    worst = cp.new_int_var(0, int(STEPS * MOST_TIMES * len(problem.machines)), "")
    for capacity in capacities:
        cp.add(worst <= capacity)
    cp.maximize(10_000 * worst + sum(capacities))


def beam(problem: PlacingProblem, on_time_of: OnTime = fluid, width: int = 3) -> Filling:
    """AlpaServe's beam search: add replicas one by one, and keep the *width* best placements after each step.

    A step adds one replica of a badly served model to one of the machines that differ. on_time_of: for a placement,
    the share of each model's requests that are on time.
    """
    rates = np.array([demand.rate for demand in problem.demands])

    def score(filling: Filling) -> float:
        # The number of replicas only breaks ties.
        return float(rates @ on_time_of(filling) / rates.sum()) + sum(map(len, filling.shares)) / 1e6

    front = [Filling(problem)]
    best = front[0]
    while front:
        # Placements that differ only in the order of the machines count once.
        grown: dict[tuple[frozenset[int], ...], Filling] = {}
        for filling in front:
            for model in lacking(filling, on_time_of(filling)):
                for machine in _distinct(filling, model):
                    candidate = Filling(problem, filling.shares)
                    replicate(candidate, model, machine)
                    grown.setdefault(
                        tuple(sorted((frozenset(shares) for shares in candidate.shares), key=sorted)), candidate
                    )
        front = sorted(grown.values(), key=score, reverse=True)[:width]
        best = max([best, *front], key=score)
    return levelled(best)


def _distinct(filling: Filling, model: int) -> list[int]:
    """Machines that can take one more replica of *model*; of the empty machines of a kind, only the first."""
    homes = np.flatnonzero(new_homes(filling, model)).tolist()
    kinds = filling.problem.kind_of
    seen = {(int(kinds[home]), home if filling.shares[home] else -1): home for home in reversed(homes)}
    return sorted(seen.values())
