"""AlpaServe's replication (Li et al., OSDI 2023): a judge names the model that is served worst; it gets a replica.

The published judge is a simulator; any function will do that tells the share of each model's requests that are on
time. Requests spread evenly over replicas meanwhile, and in the end as the machines are least crowded. Models are not
cut over machines here, for anyone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weft_cluster.placing.filling import Filling
from weft_cluster.placing.problem import Floats, PlacingProblem
from weft_cluster.placing.resharing import ALL_SERVED, levelled, new_homes

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
    """The fast greedy: most unserved requests first, on the machine with fewest requests, while any fits or lacks."""
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
