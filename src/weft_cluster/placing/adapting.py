"""All that ``weft place --from`` decides: a placement adapted to what changed, and what that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.base.errors import InputError, PlacingError, unknown_name
from weft.workloads.requests import Workload
from weft_cluster.placing.bound import placing_bound
from weft_cluster.placing.change import PlacementChange, difference
from weft_cluster.placing.demand import Demand
from weft_cluster.placing.filling import Filling
from weft_cluster.placing.judging import OTHER_SEEDS, OnTimeJudge
from weft_cluster.placing.machines import Machines
from weft_cluster.placing.needs import demands_of
from weft_cluster.placing.placement import Placement
from weft_cluster.placing.problem import PlacingProblem
from weft_cluster.placing.refusals import check_each_fits
from weft_cluster.placing.settling import HYSTERESIS, adapted
from weft_cluster.placing.summary import make_placement


@dataclass(frozen=True, slots=True, eq=False)
class Adapted:
    """The new placement, and how to get there."""

    placement: Placement
    change: PlacementChange


def adapt(
    before: Placement,
    workload: Workload | Sequence[Demand],
    machines: Machines,
    *,
    lost: Sequence[str] = (),
    hysteresis: float = HYSTERESIS,
    judged: bool = True,
    seed: int = 0,
) -> Adapted:
    """Adapt a placement to a workload and machines that may have changed, with few loads.

    lost: machines of the file that are gone; hysteresis: how far below its cap a machine ends up that has to change.
    judged: simulate which requests are on time afterwards.
    """
    if not 0 <= hysteresis < 1:
        raise InputError(f"hysteresis = {hysteresis:g} must be at least 0 and below 1, as 0.1")
    demands = demands_of(workload, machines) if isinstance(workload, Workload) else workload
    problem = PlacingProblem.of(machines, demands)
    check_each_fits(problem)
    problem = _without(problem, lost)
    filling = adapted(problem, before, hysteresis)
    bound = placing_bound(problem, before.objective)
    judge = OnTimeJudge(seed + OTHER_SEEDS) if judged or before.objective == "attainment" else None
    value = _value(filling, before, judge)
    after = make_placement(
        filling,
        before.objective,
        value=value,
        bound=value if bound is None else bound.value,
        bound_by="load" if bound is None else bound.by,
        judge=judge,
    )
    return Adapted(after, difference(before, after, problem))


def _without(problem: PlacingProblem, lost: Sequence[str]) -> PlacingProblem:
    """The problem without machines that are gone."""
    names = [machine.name for machine in problem.machines]
    for name in lost:
        if name not in names:
            raise PlacingError(unknown_name("machine", name, names))
    left = [number for number, name in enumerate(names) if name not in lost]
    if not left:
        raise PlacingError("no machine is left; name fewer of them as lost")
    return problem.section(left, range(len(problem.demands)))


def _value(filling: Filling, before: Placement, judge: OnTimeJudge | None) -> float:
    """The value of the placement's objective under the new problem."""
    problem, used = filling.problem, np.flatnonzero(filling.used).tolist()
    if before.objective == "machines":
        return float(len(used))
    if before.objective == "cost":
        return sum(problem.kinds[problem.machines[machine].kind].price for machine in used)
    rates = np.array([demand.rate for demand in problem.demands])
    served = float(filling.served() @ rates / rates.sum())
    if before.objective == "attainment" and judge is not None:
        return float(served * judge.attainment(filling, used))
    busiest = float((filling.loads.max(axis=1) / problem.cap[problem.kind_of]).max())
    return 1 / busiest if served > 1 - 1e-6 else 0.0
