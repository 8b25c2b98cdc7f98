"""The decisions of ``weft place``: from a workload and machines to a placement with its bound."""

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
    """Place models on machines, and compute a bound that no placement exceeds.

    target: required share of requests on time, as simulated; None: nothing is simulated. on_progress: called with the
    name of each stage that begins. InputError for an unknown objective or target; PlacingError if a model fits nowhere.
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
    """Notes on a placement: that the *target*, the share of requests on time, takes more machines than the load."""
    used, notes = int(result.filling.used.sum()), []
    if target is not None and 0 < result.carried < used:
        notes.append(
            f"{result.carried} machines carry the load; {used} are to keep {100 * target:.4g} % of the requests on time"
        )
    return notes


LEVELS = (np.inf, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
"""Machine loads up to which requests are accepted; infinite: all requests are accepted."""
COPY_SHARE = 0.001
"""The share of a further copy, which only gives the router a choice."""
WARMUP_S = 1.0
"""Simulated time whose requests do not count: queues are empty at first, so early requests are never late."""
FEW_LATE = 5e-4
"""Share of late requests up to which a model gets no further copy."""
NOISE = 0.001
"""Mean lead in the share on time from which our placement is preferred to the greedy one."""
CONFIRMING = 4
"""Number of other seeds over which that mean is taken; the lead must be above 0 with each of them."""
MOST_RUNS = 80
"""Cap on added copies: each costs one simulation; larger placements may still gain from more."""
REQUESTS = 8000
"""Requests per simulation: of 8,000 a share of 99 % on time is known to about 0.1 points, as large as ``NOISE``."""


def place_to_attain(problem: PlacingProblem, *, seed: int = 0, requests: int = REQUESTS) -> Placement:
    """Place models so that most requests are on time behind a router, on all machines.

    If not all requests can be on time, the linear programme of the bound leaves out the most expensive ones, down to a
    load that is found by trying; the rest is spread evenly. Free memory then gets copies of models, so that the router
    has a choice: first of the models with the most late requests, on the least busy machine, both as simulated.
    AlpaServe's greedy placement is taken unless ours is better in the same simulator.
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
    """(model): share of all its requests that are on time."""
    busy: Floats
    """(machine): share of the time in which it is busy."""
    attainment: float
    """Share of all requests that are on time."""


class Attaining:
    """Searches the placement with the most requests on time, with the arrivals of one seed.

    requests: number of requests per simulation.
    """

    def __init__(self, problem: PlacingProblem, seed: int = 0, requests: int = REQUESTS) -> None:
        self.problem, self._seed, self._requests = problem, seed, requests
        self._rates = np.array([demand.rate for demand in problem.demands])
        self._seconds = WARMUP_S + requests / float(self._rates.sum())

    def best(self) -> Filling:
        """The best placement over all LEVELS, with copies that help; the greedy one unless ours is clearly better."""
        fillings = [filling for level in LEVELS if (filling := self._spread(level)) is not None]
        trials = [(self.run(copied).attainment, copied, plain) for plain in fillings for copied in [with_copies(plain)]]
        # Two candidates from the best trial: copies where memory is free, and only those that the simulation asks for.
        _, copied, plain = max(trials, key=lambda trial: trial[0])
        ours = max((self._add_wanted_copies(plain), copied), key=self.confirmed)
        greedy_filling = greedy(self.problem, lambda filling: self.run(filling).on_time)
        attainments = zip(self._run_other_seeds(ours), self._run_other_seeds(greedy_filling), strict=True)
        leads = [our_share - greedy_share for our_share, greedy_share in attainments]
        return ours if min(leads) > 0 and sum(leads) > NOISE * len(leads) else greedy_filling

    def confirmed(self, filling: Filling) -> float:
        """Mean share on time with CONFIRMING other seeds than the one that the filling was made with."""
        return sum(self._run_other_seeds(filling)) / CONFIRMING

    def _run_other_seeds(self, filling: Filling) -> list[float]:
        """Share on time with each of the CONFIRMING other seeds."""
        seeds = range(self._seed + 1, self._seed + 1 + CONFIRMING)
        return [Attaining(self.problem, seed, self._requests).run(filling).attainment for seed in seeds]

    def run(self, filling: Filling) -> Simulated:
        """Simulate a filling behind the router, with the arrivals of this seed."""
        problem = filling.problem
        if not filling.used.any():
            return Simulated(np.zeros(len(problem.demands)), np.zeros(len(problem.machines)), 0.0)
        placement = make_placement(filling, "attainment", value=0.0, bound=0.0, bound_by="load")
        cluster = placed(placement, problem.kinds, problem.demands)
        cluster_run = simulate_cluster(
            cluster, ClusterSetting(warmup_s=WARMUP_S), duration_s=self._seconds, seed=self._seed
        )
        numbers = {demand.model: number for number, demand in enumerate(problem.demands)}
        names = {machine.name: number for number, machine in enumerate(problem.machines)}
        on_time, busy = np.zeros(len(numbers)), np.zeros(len(names))
        on_time[[numbers[model] for model in cluster_run.models]] = 1 - cluster_run.missed_by_model
        busy[[names[machine] for machine in cluster_run.machines]] = cluster_run.busy
        on_time *= np.minimum(filling.served(), 1.0)
        return Simulated(on_time, busy, float(self._rates @ on_time / self._rates.sum()))

    def _spread(self, level: float) -> Filling | None:
        """Spread the requests that are accepted up to a machine load of *level* over all machines.

        None if the level accepts all requests, so that it is the same as no limit, or nothing can be served.
        """
        problem, accepted = self.problem, np.ones(len(self._rates))  # by model
        if level < np.inf:
            bound = placing_bound(problem, "attainment", stretch=1 / level)
            if bound is None or bound.value > 1 - 1e-6:
                return None
            accepted = np.array(
                [min(1.0, sum(shares.get(m, 0.0) for shares in bound.shares)) for m in range(len(accepted))]
            )
        models = np.flatnonzero(accepted > 0.01)  # numbers of the models; those with hardly any request are left out
        limited = _scale(problem.section(range(len(problem.machines)), models.tolist()), accepted[models])
        bound = placing_bound(limited, "load")
        if bound is None:
            return None
        _, filling = most_load(limited, bound)
        # Back to the numbers and the whole rates of the models of the problem.
        shares = [
            {int(models[m]): share * float(accepted[models[m]]) for m, share in placed_models.items()}
            for placed_models in filling.shares
        ]
        return Filling(problem, shares)

    def _add_wanted_copies(self, filling: Filling) -> Filling:
        """Add copies one after another to the model with the most late requests; return the best filling."""
        best_attainment, best = -1.0, filling
        for _ in range(MOST_RUNS):
            result = self.run(filling)
            if result.attainment > best_attainment:
                best_attainment, best = result.attainment, Filling(filling.problem, filling.shares)
            late = filling.served() - result.on_time
            models = [m for m in np.argsort(-self._rates * late, kind="stable").tolist() if late[m] > FEW_LATE]
            if not any(_add_copy(filling, model, result.busy) for model in models):
                break
        return best


def with_copies(filling: Filling) -> Filling:
    """Fill free memory with copies, first of the models with the most load per copy and byte; returns a new filling."""
    problem, copied = filling.problem, Filling(filling.problem, filling.shares)
    worth = problem.model_loads.max(axis=(0, 1)) / np.maximum(problem.bytes.max(axis=0), 1.0)
    with_room = {model for model in range(len(worth)) if copied.machines_with(model)}
    while with_room:
        model = max(with_room, key=lambda model: (worth[model] / len(copied.machines_with(model)), -model))
        if not _add_copy(copied, model, copied.loads.max(axis=1)):
            with_room.remove(model)
    return copied


def _add_copy(filling: Filling, model: int, busy: Floats) -> bool:
    """Add a copy of a model to the least busy machine that may have it; return whether there was one.

    busy: load by machine.
    """
    homes = filling.machines_with(model)
    free: Bools = filling.could_join(model)
    free[homes] = False
    if not homes or not free.any():
        return False
    largest = max(homes, key=lambda home: filling.shares[home][model])
    share = filling.remove(largest, model)
    filling.add(largest, model, share * (1 - COPY_SHARE))
    filling.add(int(np.argmin(np.where(free, busy, np.inf))), model, share * COPY_SHARE)
    return True


def _scale(problem: PlacingProblem, shares: Floats) -> PlacingProblem:
    """Return the problem with only a share of the requests of each model."""
    names = ("compute", "memory", "other", "model_loads")
    demands = [demand.scaled(float(part)) for demand, part in zip(problem.demands, shares, strict=True)]
    return replace(problem, demands=tuple(demands), **{name: getattr(problem, name) * shares for name in names})


OnTime = Callable[[Filling], Floats]
"""From a filling to the share of each model's requests that are on time; (models)."""


def fluid(filling: Filling) -> Floats:
    """Approximate the share of each model's requests on time, without simulation.

    An overloaded machine serves an equal part of the requests of each of its models, up to its cap.
    """
    problem, served = filling.problem, np.zeros(len(filling.problem.demands))
    caps = problem.cap[problem.kind_of]
    for machine, models in enumerate(filling.shares):
        served_part = min(1.0, caps[machine] / max(filling.loads[machine].max(), 1e-12))
        for model, share in models.items():
            served[model] += served_part * share
    return served


def greedy(problem: PlacingProblem, on_time_of: OnTime = fluid) -> Filling:
    """AlpaServe's fast greedy (Li et al., OSDI 2023): add replicas for the worst served models, while any fits.

    The model with the most late requests goes first, to the machine with the fewest requests. on_time_of: for a
    filling, the share of each model's requests on time; the paper uses a simulator. Requests are divided equally among
    replicas until the end, and then so that machines are least crowded. Models are not cut over several machines.
    """
    filling = Filling(problem)
    rates = np.array([demand.rate for demand in problem.demands])
    while True:
        on_time = on_time_of(filling)
        badly_served = lacking(filling, on_time)
        for model in sorted(badly_served, key=lambda model: -rates[model] * (1 - on_time[model])):
            machines = np.flatnonzero(new_homes(filling, model))
            if len(machines):
                machine_rates = [
                    sum(rates[placed_model] * share for placed_model, share in filling.shares[machine].items())
                    for machine in machines
                ]
                replicate(filling, model, int(machines[int(np.argmin(machine_rates))]))
                break
        else:
            return levelled(filling)


def lacking(filling: Filling, on_time: Floats) -> list[int]:
    """The models with late requests or with fewer replicas than required."""
    demands = enumerate(filling.problem.demands)
    return [m for m, demand in demands if on_time[m] < ALL_SERVED or len(filling.machines_with(m)) < demand.replicas]


def replicate(filling: Filling, model: int, machine: int) -> None:
    """Add a replica of a model on *machine*; all replicas get equal shares of the requests."""
    homes = [*filling.machines_with(model), machine]
    for home in homes[:-1]:
        filling.remove(home, model)
    for home in homes:
        filling.add(home, model, 1 / len(homes))
