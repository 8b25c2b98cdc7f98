"""The share of requests that a machine of a filling answers on time, by weft's own simulator on sampled arrivals.

``demand.Pieces`` says how a machine and a request are simulated. ``improve`` searches better placements by small
changes that this simulation judges: move a model, swap two, or share one between machines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

import numpy as np

from weft.devices import Npu, load_npu
from weft.engine.policies import Setting, make_request_policy
from weft.engine.policies.base import UNBOUNDED_ROUNDS
from weft.engine.tickets import Terms
from weft.kernels import request_state as k
from weft.simulation.requests import Case, compiled
from weft.workloads.requests import Stream, Workload
from weft_cluster.placing.demand import CLOCK, LONGEST_S, Demand, buffer_of, pieces_of
from weft_cluster.placing.filling import Filling
from weft_cluster.placing.machines import MOST_MACHINES, MachineKind
from weft_cluster.placing.problem import ROUNDING, Floats

POLICY, LATE = "weft+", "weave"
"""The scheduling policy of the simulated machines, and its treatment of late requests."""
REQUESTS = 2000
"""Requests per simulated machine: more cost time in proportion, fewer cannot tell 99 % on time from 98.5 %."""
OTHER_SEEDS = 1000
"""Offset of the seeds that a finished placement is judged with, so that no decision was made by their arrivals."""


@cache
def _device() -> Npu:
    """A device, which a simulated case requires; none of its properties is used."""
    return load_npu("tpuv3-like")


class RequestCount(NamedTuple):
    """Requests of a model on a machine, and how many were late."""

    arrived: int
    late: int

    @property
    def on_time(self) -> float:
        """The share that was not late."""
        return 1.0 - self.late / self.arrived if self.arrived else 1.0


class OnTimeJudge:
    """Simulates the machines of one problem, and remembers the results by machine, models and shares."""

    def __init__(self, seed: int = 0, requests: int = REQUESTS) -> None:
        self._seed, self._requests = seed, requests
        self._results: dict[tuple[int, frozenset[tuple[int, float]]], dict[int, RequestCount]] = {}

    def machine(self, filling: Filling, machine: int) -> Mapping[int, RequestCount]:
        """Simulate one machine: number of a model -> its requests and how many were late; empty if idle."""
        if not filling.shares[machine]:
            return {}
        problem, kind = filling.problem, filling.problem.machines[machine].kind
        key = machine, frozenset(filling.shares[machine].items())
        if key not in self._results:
            shares = {problem.demands[model]: share for model, share in filling.shares[machine].items()}
            seed = self._seed * MOST_MACHINES + machine  # machines do not see the same arrivals
            case = machine_case(kind, problem.kinds[kind], shares, self._requests, seed)
            tally = compiled.serve(case, make_request_policy(POLICY, case.setting), LATE, seed=None, record=False)
            counts = [RequestCount(int(row[k.ARRIVED]), int(row[k.VIOLATED])) for row in tally.counts]
            self._results[key] = dict(zip(filling.shares[machine], counts, strict=True))
        return self._results[key]

    def attainment(self, filling: Filling, machines: Iterable[int]) -> float:
        """Share of the requests to these machines that are on time; requests without a machine do not count."""
        rates = on_time = 0.0
        for machine in machines:
            for model, count in self.machine(filling, machine).items():
                rate = filling.shares[machine][model] * filling.problem.demands[model].rate
                rates += rate
                on_time += rate * count.on_time
        return on_time / rates if rates else 1.0

    def share_on_time(self, filling: Filling) -> float:
        """Share of all requests that are on time; requests without a machine count as late."""
        rates = np.array([demand.rate for demand in filling.problem.demands])
        served = min(1.0, float(filling.served() @ rates / rates.sum()))
        return served * self.attainment(filling, np.flatnonzero(filling.used).tolist())


def machine_case(
    kind: str, hardware: MachineKind, shares: Mapping[Demand, float], requests: int = REQUESTS, seed: int = 0
) -> Case:
    """The simulation of one machine of *kind* with shares of models.

    requests: number to simulate; they arrive within LONGEST_S at most.
    """
    pieces = [pieces_of(demand.needs[kind], hardware.overlap) for demand in shares]
    programs = tuple(model_pieces.program(demand.model) for model_pieces, demand in zip(pieces, shares, strict=True))
    dues = [
        model_pieces.due(demand.deadline_s - demand.needs[kind].alone_s)
        for model_pieces, demand in zip(pieces, shares, strict=True)
    ]
    streams = tuple(
        Stream(
            model=demand.model,
            arrival="poisson" if demand.cv == 1 else "gamma",
            cv=demand.cv,
            rate=share * demand.rate,
            deadline_ms=due * CLOCK.tick_s * 1e3,
            max_batch=1,
        )
        for (demand, share), due in zip(shares.items(), dues, strict=True)
    )
    duration = min(requests / sum(share * demand.rate for demand, share in shares.items()), LONGEST_S)
    setting = Setting(programs, buffer_of(programs), UNBOUNDED_ROUNDS)
    workload = Workload(stream=streams, duration_s=duration, warmup_s=duration / 20, seed=seed)
    terms = tuple(
        Terms(programs=number, deadline=due, max_batch=1, timeout=0, priority=1) for number, due in enumerate(dues)
    )
    alone_s = tuple(demand.needs[kind].alone_s for demand in shares)
    return Case(workload, _device(), CLOCK, setting, at_exits=setting, terms=terms, alone_s=alone_s)


GOALS = 4
"""Number of the least loaded machines that are tried for a model."""
GAIN = 1e-4
"""Smallest rise of the share on time for which a change is kept."""


class ShareMove(NamedTuple):
    """A share of a model's requests moves from machine *origin* to *goal*."""

    model: int
    share: float
    origin: int
    goal: int


def improve(filling: Filling, judge: OnTimeJudge, target: float, trials: int) -> None:
    """Change the filling so that machines with too few requests on time are relieved, the worst first.

    target: required share of requests on time. trials: most changes to simulate. Stops if no change helps.
    """
    rates = {machine: judge.attainment(filling, [machine]) for machine in np.flatnonzero(filling.used).tolist()}
    stuck: set[int] = set()
    while trials > 0:
        below = [machine for machine, rate in rates.items() if rate < target and machine not in stuck]
        if not below:
            return
        worst = min(below, key=lambda machine: rates[machine])
        touched, spent = _relieve(filling, judge, worst, trials)
        trials -= max(1, spent)
        rates |= {machine: judge.attainment(filling, [machine]) for machine in touched}
        if not touched:
            stuck.add(worst)


def _relieve(filling: Filling, judge: OnTimeJudge, machine: int, trials: int) -> tuple[set[int], int]:
    """Make the first change that helps a machine, and simulate at most *trials* changes.

    Returns the machines that it touches (empty if none helped) and the number of changes that were simulated.
    """
    spent = 0
    for change in _candidate_changes(filling, machine):
        if spent >= trials:
            break
        spent += 1
        touched = {machine, *(transfer.goal for transfer in change), *(transfer.origin for transfer in change)}
        before = judge.attainment(filling, touched)
        apply_moves(filling, change)
        if judge.attainment(filling, touched) >= before + GAIN:
            return touched, spent
        apply_moves(filling, reverse_moves(change))
    return set(), spent


def _candidate_changes(filling: Filling, machine: int) -> Iterator[tuple[ShareMove, ...]]:
    """Yield changes that could relieve a machine: a model moved whole, swapped for a lighter one, or moved by half.

    Models with the largest loads come first.
    """
    loads = filling.loads.max(axis=1)
    for model in sorted(filling.shares[machine], key=lambda model: -_load(filling, machine, model)):
        if filling.problem.demands[model].machine is not None:
            continue
        share, rooms = filling.shares[machine][model], _rooms_elsewhere(filling, model, machine)
        goals = np.flatnonzero(rooms > ROUNDING)
        for goal in goals[np.argsort(loads[goals], kind="stable")][:GOALS].tolist():
            if rooms[goal] >= share - ROUNDING:
                yield (ShareMove(model, share, machine, goal),)
            elif swap := _find_swap(filling, model, machine, goal):
                yield swap
            if rooms[goal] >= share / 2:
                yield (ShareMove(model, share / 2, machine, goal),)


def _rooms_elsewhere(filling: Filling, model: int, machine: int) -> Floats:
    """Return the room on each machine for a model of *machine*; 0 where two of its replicas would meet; (machines)."""
    rooms = filling.room(model)
    rooms[machine] = 0.0
    if filling.problem.demands[model].replicas > 1:
        rooms[filling.machines_with(model)] = 0.0
        if filling.problem.demands[model].apart == "zone":
            rooms[filling.problem.zone_of != filling.problem.zone_of[machine]] = 0.0
    return rooms


def _load(filling: Filling, machine: int, model: int) -> float:
    """The larger of the two loads that a model causes on a machine."""
    loads = filling.problem.model_loads[filling.problem.kind_of[machine], :, model]
    return float(loads.max() * filling.shares[machine][model])


def _find_swap(filling: Filling, model: int, machine: int, goal: int) -> tuple[ShareMove, ...]:
    """The exchange of *model* with the heaviest lighter model on machine *goal* that fits; empty if there is none."""
    share = filling.shares[machine][model]
    if model in filling.shares[goal]:
        return ()
    lighter = [other for other in filling.shares[goal] if _load(filling, goal, other) < _load(filling, machine, model)]
    for other in sorted(lighter, key=lambda other: -_load(filling, goal, other)):
        demand = filling.problem.demands[other]
        if demand.machine is not None or demand.replicas > 1 or other in filling.shares[machine]:
            continue
        back = ShareMove(other, filling.shares[goal][other], goal, machine)
        forth = ShareMove(model, share, machine, goal)
        if _is_possible(filling, forth, back):
            return forth, back
    return ()


def _is_possible(filling: Filling, forth: ShareMove, back: ShareMove) -> bool:
    """Whether two models of different machines can change places by these moves; the filling stays as it is."""
    filling.remove(forth.origin, forth.model)
    filling.remove(back.origin, back.model)
    fits = filling.room(forth.model)[forth.goal] >= forth.share - ROUNDING
    if fits:
        filling.add(forth.goal, forth.model, forth.share)
        fits = filling.room(back.model)[back.goal] >= back.share - ROUNDING
        filling.remove(forth.goal, forth.model)
    filling.add(forth.origin, forth.model, forth.share)
    filling.add(back.origin, back.model, back.share)
    return bool(fits)


def apply_moves(filling: Filling, change: tuple[ShareMove, ...]) -> None:
    """Make the moves of a change, in order."""
    for model, share, origin, goal in change:
        before = filling.remove(origin, model)
        if before - share > ROUNDING:
            filling.add(origin, model, before - share)
        filling.add(goal, model, share)


def reverse_moves(change: tuple[ShareMove, ...]) -> tuple[ShareMove, ...]:
    """The change that undoes another."""
    return tuple(ShareMove(model, share, goal, origin) for model, share, origin, goal in reversed(change))
