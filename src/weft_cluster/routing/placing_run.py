"""All that ``weft place`` decides: from a workload and machines to a placement with its bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.base.errors import InputError, unknown_name
from weft.workloads.requests import Workload
from weft_cluster.placing.demand import Demand
from weft_cluster.placing.judging import OTHER_SEEDS, OnTimeJudge
from weft_cluster.placing.machines import Machines
from weft_cluster.placing.needs import demands_of
from weft_cluster.placing.placement import Objective, Placement
from weft_cluster.placing.problem import PlacingProblem
from weft_cluster.placing.refusals import check_each_fits
from weft_cluster.placing.search import BoundedFilling, search
from weft_cluster.placing.summary import make_placement
from weft_cluster.routing.attaining import place_to_attain

OBJECTIVES: dict[str, str] = {
    "machines": "the fewest machines that carry all rates and keep the target",
    "cost": "the cheapest machines that do, by the prices of their kinds",
    "load": "the largest multiple of all rates that the machines carry",
    "attainment": "the most requests on time behind a router, on all machines",
}
"""Objectives of a placement."""
TARGET = 0.99
"""Default share of requests that must be on time."""


def place(
    workload: Workload | Sequence[Demand],
    machines: Machines,
    *,
    objective: Objective = "machines",
    target: float | None = TARGET,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda stage: None,
) -> Placement:
    """Place models on machines, and bound what any placement could do.

    target: required share of requests on time, as simulated; None: nothing is simulated.
    """
    if objective not in OBJECTIVES:
        raise InputError(unknown_name("objective", objective, OBJECTIVES))
    if target is not None and not 0 < target < 1:
        raise InputError(f"target = {target:g} must lie between 0 and 1, as 0.99")
    if target is None and objective == "attainment":
        raise InputError(
            "objective = attainment counts what a simulation finds on time: it needs a target, and no --fluid"
        )
    on_progress("pricing")
    demands = demands_of(workload, machines) if isinstance(workload, Workload) else workload
    problem = PlacingProblem.of(machines, demands)
    check_each_fits(problem)
    on_progress("placing")
    if objective == "attainment":
        return place_to_attain(problem, seed=seed)
    result = search(problem, objective, target, seed)
    judge = None if target is None else OnTimeJudge(seed + OTHER_SEEDS)
    on_progress("judging")
    return make_placement(
        result.filling,
        objective,
        value=result.value,
        bound=result.value if result.bound is None else result.bound.value,
        bound_by="load" if result.bound is None else result.bound.by,
        judge=judge,
        notes=_notes(result, target),
    )


def _notes(result: BoundedFilling, target: float | None) -> list[str]:
    """Notes for the reader, besides the numbers."""
    used, notes = int(result.filling.used.sum()), []
    if target is not None and 0 < result.carried < used:
        notes.append(
            f"{result.carried} machines carry the load; {used} are to keep {100 * target:.4g} % of the requests on time"
        )
    return notes
