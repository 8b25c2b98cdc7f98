"""All that ``weft place`` decides: from a workload and machines to a placement with its bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from weft.base.errors import InputError, unknown_name
from weft.workloads.requests import Workload
from weft_cluster.placing.bound import placing_bound
from weft_cluster.placing.demand import Demand, demands_of
from weft_cluster.placing.filling import Filling
from weft_cluster.placing.judging import OTHER_SEEDS, OnTimeJudge
from weft_cluster.placing.machines import Machines
from weft_cluster.placing.placement import Objective, Placement
from weft_cluster.placing.problem import Bools, Floats, PlacingProblem, check_each_fits
from weft_cluster.placing.resharing import ALL_SERVED, levelled, new_homes
from weft_cluster.placing.search import BoundedFilling, most_load, search
from weft_cluster.placing.summary import make_placement
from weft_cluster.routing.cluster import ClusterSetting, placed
from weft_cluster.routing.simulate import simulate_cluster

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


LEVELS = (np.inf, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
"""Loads of machines up to which requests are accepted; infinite: all are."""
COPY_SHARE = 0.001
"""The share of a copy that is only there for the router to choose."""
WARMUP_S = 1.0
"""Simulated time whose requests do not count: queues are empty at first, so early requests are never late."""
FEW = 5e-4
"""Late requests that are not worth a copy, as a share."""
NOISE = 0.001
"""By how much ours must be better on average than replicas by greed for it to be no accident..."""
CONFIRMING = 4
"""... with the arrivals of this many other seeds, and better with each of them."""
MOST_RUNS = 80
"""Cap on added copies: each costs one simulation; larger placements may still gain from more."""
REQUESTS = 8000
"""Requests per simulation: of 8,000 a share of 99 % on time is known to about 0.1 points, as large as ``NOISE``."""


def place_to_attain(problem: PlacingProblem, *, seed: int = 0, requests: int = REQUESTS) -> Placement:
    """Place models so that most requests are on time behind a router, on all machines.

    Where not everything can be on time, the dearest requests are left out first, as the bound's linear programme does,
    down to a load that is found by trying. The rest is spread evenly. Memory that is still free then gets copies of
    models, so that the router can send a request wherever it is answered soonest: of those first whose requests are
    late most often, on the least busy machine, both as the cluster's own simulator sees it. AlpaServe's greedy, by the
    same simulator, is taken where that is not better.
    """
    search = Attaining(problem, seed, requests)
    filling = search.best()
    reached, bound = search.confirmed(filling), placing_bound(problem, "attainment")
    placement = make_placement(
        filling,
        "attainment",
        value=reached,
        bound=max(reached, bound.value) if bound else reached,
        bound_by=bound.by if bound else "load",
        notes=["On time as simulated behind a router that sends requests wherever they are answered first."],
    )
    return placement.model_copy(update={"attainment": reached})


class Simulated(NamedTuple):
    """Result of a simulated run of the cluster."""

    on_time: Floats
    """(model): the share of all its requests."""
    busy: Floats
    """(machine)."""
    attainment: float


class Attaining:
    """Looks for the placement with most requests on time, with the arrivals of one seed."""

    def __init__(self, problem: PlacingProblem, seed: int = 0, requests: int = REQUESTS) -> None:
        self.problem, self._seed, self._requests = problem, seed, requests
        self._rates = np.array([demand.rate for demand in problem.demands])
        self._seconds = WARMUP_S + requests / float(self._rates.sum())

    def best(self) -> Filling:
        """The best of all levels, with copies as they help, unless replicas by greed alone are about as good."""
        fillings = [filling for level in LEVELS if (filling := self._spread(level)) is not None]
        tried = [(self.run(copied).attainment, copied, plain) for plain in fillings for copied in [with_copies(plain)]]
        _, copied, plain = max(tried, key=lambda trial: trial[0])
        ours = max((self._with_wanted_copies(plain), copied), key=self.confirmed)
        plainest = greedy(self.problem, lambda filling: self.run(filling).on_time)
        leads = [one - other for one, other in zip(self._again(ours), self._again(plainest), strict=True)]
        return ours if min(leads) > 0 and sum(leads) > NOISE * len(leads) else plainest

    def confirmed(self, filling: Filling) -> float:
        """Share on time with arrivals of other seeds than those that the filling was made with."""
        return sum(self._again(filling)) / CONFIRMING

    def _again(self, filling: Filling) -> list[float]:
        """The same, seed by seed."""
        seeds = range(self._seed + 1, self._seed + 1 + CONFIRMING)
        return [Attaining(self.problem, seed, self._requests).run(filling).attainment for seed in seeds]

    def run(self, filling: Filling) -> Simulated:
        """Simulate a filling behind the router."""
        problem = filling.problem
        if not filling.used.any():
            return Simulated(np.zeros(len(problem.demands)), np.zeros(len(problem.machines)), 0.0)
        placement = make_placement(filling, "attainment", value=0.0, bound=0.0, bound_by="load")
        cluster = placed(placement, problem.kinds, problem.demands)
        ran = simulate_cluster(cluster, ClusterSetting(warmup_s=WARMUP_S), duration_s=self._seconds, seed=self._seed)
        numbers = {demand.model: number for number, demand in enumerate(problem.demands)}
        names = {machine.name: number for number, machine in enumerate(problem.machines)}
        on_time, busy = np.zeros(len(numbers)), np.zeros(len(names))
        on_time[[numbers[model] for model in ran.models]] = 1 - ran.missed_by_model
        busy[[names[machine] for machine in ran.machines]] = ran.busy
        on_time *= np.minimum(filling.served(), 1.0)
        return Simulated(on_time, busy, float(self._rates @ on_time / self._rates.sum()))

    def _spread(self, level: float) -> Filling | None:
        """Spread the requests that are accepted at a level over all machines; None if a higher one accepts no more."""
        problem, kept = self.problem, np.ones(len(self._rates))
        if level < np.inf:
            bound = placing_bound(problem, "attainment", 1 / level)
            if bound is None or bound.value > 1 - 1e-6:
                return None
            kept = np.array([min(1.0, sum(its.get(m, 0.0) for its in bound.shares)) for m in range(len(kept))])
        live = np.flatnonzero(kept > 0.01)
        taken = _scale(problem.section(range(len(problem.machines)), live.tolist()), kept[live])
        bound = placing_bound(taken, "load")
        if bound is None:
            return None
        _, filling = most_load(taken, bound)
        parts = [{int(live[m]): part * float(kept[live[m]]) for m, part in models.items()} for models in filling.shares]
        return Filling(problem, parts)

    def _with_wanted_copies(self, filling: Filling) -> Filling:
        """Add copies one after another to the model with the most late requests; return the best filling."""
        best = (-1.0, filling)
        for _ in range(MOST_RUNS):
            ran = self.run(filling)
            if ran.attainment > best[0]:
                best = ran.attainment, Filling(filling.problem, filling.shares)
            late = filling.served() - ran.on_time
            wanting = [m for m in np.argsort(-self._rates * late, kind="stable").tolist() if late[m] > FEW]
            if not any(_copy(filling, model, ran.busy) for model in wanting):
                break
        return best[1]


def with_copies(filling: Filling) -> Filling:
    """Fill free memory with copies, first of models with the most load per copy and byte."""
    problem, copied = filling.problem, Filling(filling.problem, filling.shares)
    worth = problem.rows.max(axis=(0, 1)) / np.maximum(problem.bytes.max(axis=0), 1.0)
    open_to = {model for model in range(len(worth)) if copied.where(model)}
    while open_to:
        model = max(open_to, key=lambda model: (worth[model] / len(copied.where(model)), -model))
        if not _copy(copied, model, copied.loads.max(axis=1)):
            open_to.remove(model)
    return copied


def _copy(filling: Filling, model: int, busy: Floats) -> bool:
    """One more copy of a model on the least busy machine that may have it; whether there is one."""
    homes = filling.where(model)
    free: Bools = filling.could_join(model)
    free[homes] = False
    if not homes or not free.any():
        return False
    most = max(homes, key=lambda home: filling.shares[home][model])
    share = filling.take(most, model)
    filling.add(most, model, share * (1 - COPY_SHARE))
    filling.add(int(np.argmin(np.where(free, busy, np.inf))), model, share * COPY_SHARE)
    return True


def _scale(problem: PlacingProblem, kept: Floats) -> PlacingProblem:
    """The problem with only a share of each model's requests."""
    names = ("compute", "memory", "other", "rows")
    demands = [demand.scaled(float(part)) for demand, part in zip(problem.demands, kept, strict=True)]
    return replace(problem, demands=tuple(demands), **{name: getattr(problem, name) * kept for name in names})


OnTime = Callable[[Filling], Floats]
"""(model): the share of its requests that are on time."""


def fluid(filling: Filling) -> Floats:
    """Fluid approximation: an overloaded machine serves an equal part of the requests of each of its models."""
    problem, served = filling.problem, np.zeros(len(filling.problem.demands))
    caps = problem.cap[problem.kind_of]
    for machine, models in enumerate(filling.shares):
        kept = min(1.0, caps[machine] / max(filling.loads[machine].max(), 1e-12))
        for model, share in models.items():
            served[model] += kept * share
    return served


def greedy(problem: PlacingProblem, on_time_of: OnTime = fluid) -> Filling:
    """AlpaServe's fast greedy (Li et al., OSDI 2023): replicas for the models that are served worst, while any fits.

    Most unserved requests come first, on the machine with fewest requests. The published judge is a simulator; any
    function will do that tells the share of each model's requests that are on time. Requests spread evenly over
    replicas meanwhile, and in the end as the machines are least crowded. Models are not cut over machines here, for
    anyone.
    """
    filling = Filling(problem)
    rates = np.array([demand.rate for demand in problem.demands])
    while True:
        on_time = on_time_of(filling)
        badly_served = lacking(filling, on_time)
        for model in sorted(badly_served, key=lambda model: -rates[model] * (1 - on_time[model])):
            homes = np.flatnonzero(new_homes(filling, model))
            if len(homes):
                asked = [sum(rates[one] * share for one, share in filling.shares[home].items()) for home in homes]
                replicate(filling, model, int(homes[int(np.argmin(asked))]))
                break
        else:
            return levelled(filling)


def lacking(filling: Filling, on_time: Floats) -> list[int]:
    """Models with late requests that another replica might help, or with fewer replicas than required."""
    demands = enumerate(filling.problem.demands)
    return [m for m, demand in demands if on_time[m] < ALL_SERVED or len(filling.where(m)) < demand.replicas]


def replicate(filling: Filling, model: int, machine: int) -> None:
    """One more replica, with an equal share of the requests."""
    homes = [*filling.where(model), machine]
    for home in homes[:-1]:
        filling.take(home, model)
    for home in homes:
        filling.add(home, model, 1 / len(homes))
