"""What cannot be placed, and what would be needed, in one line each."""

from __future__ import annotations

import numpy as np

from weft.base.errors import PlacingError
from weft_cluster.placing.demand import Demand
from weft_cluster.placing.machines import GIB
from weft_cluster.placing.problem import PlacingProblem


def check_each_fits(problem: PlacingProblem) -> None:
    """Refuse a model that no machine may have, or too few for its replicas."""
    choices = problem.allowed.sum(axis=0)
    for number, demand in enumerate(problem.demands):
        if choices[number] == 0:
            raise PlacingError(_why_nowhere(problem, number))
        zones = np.unique(problem.zone_of[problem.allowed[:, number]])
        places = len(zones) if demand.apart == "zone" else int(choices[number])
        if places < demand.replicas:
            raise PlacingError(
                f"{demand.model}: {demand.replicas} replicas need as many {demand.apart}s that can run it, there are "
                f"{places}; add some or ask for fewer replicas"
            )


def _why_nowhere(problem: PlacingProblem, number: int) -> str:
    demand = problem.demands[number]
    there = [
        machine
        for machine in problem.machines
        if demand.machine in (None, machine.name) and demand.zone in (None, machine.zone)
    ]
    kinds = [kind for kind in dict.fromkeys(machine.kind for machine in there) if kind in demand.needs]
    where = f"machine {demand.machine}" if demand.machine else f"zone {demand.zone}" if demand.zone else "any machine"
    if not there:
        return f"{demand.model} is pinned to zone {demand.zone}, and there is no such machine; change one of the two"
    if not kinds:
        profiled = ", ".join(demand.needs)
        return f"{demand.model} may go to {where}, but only {profiled} is known to run it; add a profile for its kind"
    largest = max(kinds, key=lambda kind: problem.kinds[kind].memory_bytes)
    if all(demand.needs[kind].resident_bytes > problem.kinds[kind].memory_bytes for kind in kinds):
        needed, room = demand.needs[largest].resident_bytes / GIB, problem.kinds[largest].memory_gib
        return f"{demand.model} needs {needed:.2f} GiB, and {where} has {room:.2f} at most ({largest}); a larger kind"
    return _too_slow(demand, kinds, where)


def _too_slow(demand: Demand, kinds: list[str], where: str) -> str:
    fastest = min(kinds, key=lambda kind: demand.needs[kind].alone_s)
    alone, due = demand.needs[fastest].alone_s * 1e3, demand.deadline_s * 1e3
    return (
        f"{demand.model} is due in {due:.4g} ms, and takes {alone:.4g} ms alone on {where} ({fastest}); "
        f"allow more than {alone:.4g} ms or add a kind that is {alone / due:.2f} times as fast"
    )


def what_would_serve(problem: PlacingProblem, model: int, share: float) -> str:
    """What would be needed for the part of a model that found no place."""
    demand = problem.demands[model]
    where = f" on {demand.machine}" if demand.machine else f" in zone {demand.zone}" if demand.zone else ""
    loads = problem.rows[:, :, model].max(axis=1) / problem.cap * share
    kinds = [number for number, kind in enumerate(problem.kinds) if kind in demand.needs]
    kind = min(kinds, key=lambda number: loads[number])
    room = problem.bytes[kind, model] / GIB
    return f"{loads[kind]:.2f} more {list(problem.kinds)[kind]} with {room:.2f} GiB free{where}"
