"""Nexus (Shen et al., SOSP 2019, algorithm 1): whole machines for busy models, "squishy" packing of what remains.

A model that shares a machine runs one batch per duty cycle: the requests that arrived during the cycle. When two cycles
are merged, the shorter length is kept, so batches shrink, and all batches must fit in the cycle. Time is the only
resource. As for all methods here, a batch takes as long as its requests one after another; a cycle is filled up to the
machine's cap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, floor
from typing import NamedTuple

import numpy as np

from weft_cluster.placing.filling import Filling
from weft_cluster.placing.problem import Floats, PlacingProblem
from weft_cluster.placing.resharing import new_homes
from weft_papers.placing_rivals.spreading import free_to_go, serial_loads


@dataclass(slots=True)
class _Cycle:
    """The duty cycle of a machine: within *duty_s* seconds, every model on it runs one batch."""

    duty_s: float = np.inf
    rates: dict[int, float] = field(default_factory=dict)
    """Model -> its requests per second on this machine."""


def squishy(problem: PlacingProblem) -> Filling:
    """Nexus, algorithm 1: ``ScheduleSaturate``, then ``ScheduleResidue`` by falling occupancy.

    A residue joins the cycle that is fullest with it, else goes to an empty machine; without either it is not placed.
    """
    filling, cycles = Filling(problem), [_Cycle() for _ in problem.machines]
    residues = _saturate(problem, filling, cycles)
    seconds, free = _seconds(problem), free_to_go(problem)
    reference = int(problem.kind_of[0])

    def order(residue: tuple[int, float]) -> tuple[bool, float]:
        # Models with fewer allowed machines first, then by the share of time their own cycle would be busy.
        model, rate = residue
        duty_s = _duty(problem, float(seconds[reference, model]), model, rate)
        # 1e-9: rounding must not add a request to a batch.
        return bool(free[model]), -ceil(rate * duty_s - 1e-9) * float(seconds[reference, model]) / duty_s

    for model, rate in sorted(residues, key=order):
        homes = np.flatnonzero(new_homes(filling, model)).tolist()
        joined = {
            home: _join_cycle(problem, seconds[problem.kind_of[home]], home, cycles[home], model, rate)
            for home in homes
        }
        shared = [machine for machine in homes if cycles[machine].rates and joined[machine].fullness <= 1]
        empty = [machine for machine in homes if not cycles[machine].rates]
        if shared or empty:
            best = max(shared, key=lambda machine: joined[machine].fullness) if shared else empty[0]
            cycles[best].duty_s = joined[best].duty_s
            cycles[best].rates[model] = rate
            filling.add(best, model, rate / problem.demands[model].rate)
    return filling


def _seconds(problem: PlacingProblem) -> Floats:
    """Seconds that a request takes; shape (kinds, models)."""
    rates = np.array([demand.rate for demand in problem.demands])
    return np.asarray(serial_loads(problem) / rates, np.float64)


def _saturate(problem: PlacingProblem, filling: Filling, cycles: list[_Cycle]) -> list[tuple[int, float]]:
    """Give every model the machines that it fills alone, and return the residues: (model, requests per second).

    The rest of a model is divided into one residue for each replica that is still missing. *cycles*: one per machine,
    updated. A model that is tied to a machine (``demand.machine``) is a residue as a whole.
    """
    residues, loads = [], serial_loads(problem)
    for model, demand in enumerate(problem.demands):
        remaining = 1.0  # the share of the model's requests without a machine
        while demand.machine is None:
            homes = np.flatnonzero(new_homes(filling, model) & ~filling.used)
            if not len(homes):
                break
            kind = problem.kind_of[homes[0]]
            full_share = float(problem.cap[kind] / loads[kind, model])
            if floor(remaining / full_share) < 1:
                break
            filling.add(int(homes[0]), model, full_share)
            cycles[homes[0]].rates[model], remaining = full_share * demand.rate, remaining - full_share
            cycles[homes[0]].duty_s = 1 / demand.rate  # full: nothing joins it
        missing = max(1, demand.replicas - len(filling.machines_with(model)))
        if remaining > 1e-9:
            residues += [(model, remaining * demand.rate / missing)] * missing
    return residues


def _duty(problem: PlacingProblem, request_s: float, model: int, rate: float) -> float:
    """The longest duty cycle, in seconds, in which a batch of the requests of one cycle still meets the deadline.

    request_s: seconds that a request takes. rate: requests per second.
    """
    deadline_s = problem.demands[model].deadline_s
    # A batch of n waits up to n / rate for its last request and runs for n * request_s. 1e6: a cap for tiny models.
    batch = max(1, floor(min(deadline_s / (request_s + 1 / rate), 1e6)))
    # A batch raised to 1 may come too late: its cycle is what the deadline leaves beside its run, at least that run.
    return min(batch / rate, max(deadline_s - batch * request_s, request_s))


class _JoinedCycle(NamedTuple):
    """A machine's cycle with one more model."""

    duty_s: float
    fullness: float
    """Busy time over the cycle, as a share of the machine's cap."""


def _join_cycle(
    problem: PlacingProblem, seconds: Floats, machine: int, cycle: _Cycle, model: int, rate: float
) -> _JoinedCycle:
    """Compute the cycle of *machine* if *model* joined it; *seconds*: of a request, by model."""
    duty_s = min(cycle.duty_s, _duty(problem, float(seconds[model]), model, rate))
    rates = cycle.rates | {model: rate}
    busy_s = sum(
        max(1, ceil(member_rate * duty_s - 1e-9)) * float(seconds[member]) for member, member_rate in rates.items()
    )
    return _JoinedCycle(duty_s, busy_s / duty_s / float(problem.cap[problem.kind_of[machine]]))
