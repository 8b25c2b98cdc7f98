"""Nexus (Shen et al., SOSP 2019, algorithm 1): whole machines for busy models, "squishy" packing of what remains.

A model that shares a machine runs once per duty cycle, with the requests that came meanwhile as its batch. Cycles that
join take the shorter of their lengths, batches shrink with it, and all of them must fit in the cycle. Time is the only
resource. A batch takes what its requests take one after another, as for all methods here; a cycle is filled up to the
machine's cap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, floor

import numpy as np

from weft_cluster.placing.filling import Filling
from weft_cluster.placing.problem import Floats, PlacingProblem
from weft_cluster.placing.resharing import new_homes
from weft_papers.placing_rivals.spreading import free_to_go, serial_loads


@dataclass(slots=True)
class _Cycle:
    """The duty cycle of a machine."""

    duty_s: float = np.inf
    rates: dict[int, float] = field(default_factory=dict)
    """Model -> requests per second here."""


def squishy(problem: PlacingProblem) -> Filling:
    """Algorithm 1: ``ScheduleSaturate``, then ``ScheduleResidue`` by falling occupancy."""
    filling, cycles = Filling(problem), [_Cycle() for _ in problem.machines]
    residues = _saturate(problem, filling, cycles)
    seconds, free = _seconds(problem), free_to_go(problem)
    reference = int(problem.kind_of[0])

    def order(residue: tuple[int, float]) -> tuple[bool, float]:
        model, rate = residue
        duty_s = _duty(problem, float(seconds[reference, model]), model, rate)
        return bool(free[model]), -ceil(rate * duty_s - 1e-9) * float(seconds[reference, model]) / duty_s

    for model, rate in sorted(residues, key=order):
        homes = np.flatnonzero(new_homes(filling, model)).tolist()
        fits = {
            home: _join_cycle(problem, seconds[problem.kind_of[home]], home, cycles[home], model, rate)
            for home in homes
        }
        shared = [machine for machine in homes if cycles[machine].rates and fits[machine][1] <= 1]
        fresh = [machine for machine in homes if not cycles[machine].rates]
        if shared or fresh:
            best = max(shared, key=lambda machine: fits[machine][1]) if shared else fresh[0]
            cycles[best].duty_s = fits[best][0]
            cycles[best].rates[model] = rate
            filling.add(best, model, rate / problem.demands[model].rate)
    return filling


def _seconds(problem: PlacingProblem) -> Floats:
    """(kind, model): seconds of a request."""
    rates = np.array([demand.rate for demand in problem.demands])
    return np.asarray(serial_loads(problem) / rates, np.float64)


def _saturate(problem: PlacingProblem, filling: Filling, cycles: list[_Cycle]) -> list[tuple[int, float]]:
    """Machines that one model fills; the rates that remain, in as many parts as the model wants replicas."""
    residues, loads = [], serial_loads(problem)
    for model, demand in enumerate(problem.demands):
        rest = 1.0
        while demand.machine is None:
            homes = np.flatnonzero(new_homes(filling, model) & ~filling.used)
            if not len(homes):
                break
            kind = problem.kind_of[homes[0]]
            whole = float(problem.cap[kind] / loads[kind, model])
            if floor(rest / whole) < 1:
                break
            filling.add(int(homes[0]), model, whole)
            cycles[homes[0]].rates[model], rest = whole * demand.rate, rest - whole
            cycles[homes[0]].duty_s = 1 / demand.rate  # full: nothing joins it
        missing = max(1, demand.replicas - len(filling.where(model)))
        if rest > 1e-9:
            residues += [(model, rest * demand.rate / missing)] * missing
    return residues


def _duty(problem: PlacingProblem, second: float, model: int, rate: float) -> float:
    """The longest cycle in which the last request of the largest batch that still does is on time."""
    deadline_s = problem.demands[model].deadline_s
    batch = max(1, floor(min(deadline_s / (second + 1 / rate), 1e6)))
    return min(batch / rate, max(deadline_s - batch * second, second))


def _join_cycle(
    problem: PlacingProblem, seconds: Floats, machine: int, cycle: _Cycle, model: int, rate: float
) -> tuple[float, float]:
    """The cycle if a model joined it, and how full it would be, as a share of the cap; *seconds*: (model)."""
    duty_s = min(cycle.duty_s, _duty(problem, float(seconds[model]), model, rate))
    rates = cycle.rates | {model: rate}
    busy_s = sum(max(1, ceil(model_rate * duty_s - 1e-9)) * float(seconds[one]) for one, model_rate in rates.items())
    return duty_s, busy_s / duty_s / float(problem.cap[problem.kind_of[machine]])
