"""Better placements from small changes, judged by simulation: move a model, swap two, or share one between machines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from weft_cluster.placing.filling import Filling
from weft_cluster.placing.judging import OnTimeJudge
from weft_cluster.placing.problem import ROUNDING, Floats

GOALS = 4
"""How many of the least loaded machines are tried for a model."""
GAIN = 1e-4
"""The least share of requests that a change must save."""


class ShareMove(NamedTuple):
    """Some of a model's requests go to another machine."""

    model: int
    share: float
    origin: int
    goal: int


def improve(filling: Filling, judge: OnTimeJudge, target: float, trials: int) -> None:
    """Relieve the machines that are below the target, worst first, as long as that helps; at most *trials* times."""
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
    """Make the first change that helps a machine; which machines it touches, if any does, and how many were tried."""
    spent = 0
    for change in _changes(filling, machine):
        if spent >= trials:
            break
        spent += 1
        touched = {machine, *(transfer.goal for transfer in change), *(transfer.origin for transfer in change)}
        before = judge.attainment(filling, touched)
        make(filling, change)
        if judge.attainment(filling, touched) >= before + GAIN:
            return touched, spent
        make(filling, undone(change))
    return set(), spent


def _changes(filling: Filling, machine: int) -> Iterator[tuple[ShareMove, ...]]:
    """What could relieve a machine: its models moved whole, swapped for lighter ones, or shared half and half."""
    loads = filling.loads.max(axis=1)
    for model in sorted(filling.shares[machine], key=lambda model: -_load(filling, machine, model)):
        if filling.problem.demands[model].machine is not None:
            continue
        share, rooms = filling.shares[machine][model], _elsewhere(filling, model, machine)
        goals = np.flatnonzero(rooms > ROUNDING)
        for goal in goals[np.argsort(loads[goals], kind="stable")][:GOALS].tolist():
            if rooms[goal] >= share - ROUNDING:
                yield (ShareMove(model, share, machine, goal),)
            elif swap := _swap(filling, model, machine, goal):
                yield swap
            if rooms[goal] >= share / 2:
                yield (ShareMove(model, share / 2, machine, goal),)


def _elsewhere(filling: Filling, model: int, machine: int) -> Floats:
    """(machine): room for a model of another machine; none where its replicas would come together."""
    rooms = filling.room(model)
    rooms[machine] = 0.0
    if filling.problem.demands[model].replicas > 1:
        rooms[filling.where(model)] = 0.0
        if filling.problem.demands[model].apart == "zone":
            rooms[filling.problem.zone_of != filling.problem.zone_of[machine]] = 0.0
    return rooms


def _load(filling: Filling, machine: int, model: int) -> float:
    rows = filling.problem.rows[filling.problem.kind_of[machine], :, model]
    return float(rows.max() * filling.shares[machine][model])


def _swap(filling: Filling, model: int, machine: int, goal: int) -> tuple[ShareMove, ...]:
    """The exchange of a model with the heaviest lighter one on *goal* that fits; empty if there is none."""
    share = filling.shares[machine][model]
    if model in filling.shares[goal]:
        return ()
    lighter = [other for other in filling.shares[goal] if _load(filling, goal, other) < _load(filling, machine, model)]
    for other in sorted(lighter, key=lambda other: -_load(filling, goal, other)):
        demand = filling.problem.demands[other]
        if demand.machine is not None or demand.replicas > 1 or other in filling.shares[machine]:
            continue
        back = ShareMove(other, filling.shares[goal][other], goal, machine)
        there = ShareMove(model, share, machine, goal)
        if _possible(filling, there, back):
            return there, back
    return ()


def _possible(filling: Filling, there: ShareMove, back: ShareMove) -> bool:
    """Whether two models could change places."""
    filling.take(there.origin, there.model)
    filling.take(back.origin, back.model)
    fits = filling.room(there.model)[there.goal] >= there.share - ROUNDING
    if fits:
        filling.add(there.goal, there.model, there.share)
        fits = filling.room(back.model)[back.goal] >= back.share - ROUNDING
        filling.take(there.goal, there.model)
    filling.add(there.origin, there.model, there.share)
    filling.add(back.origin, back.model, back.share)
    return bool(fits)


def make(filling: Filling, change: tuple[ShareMove, ...]) -> None:
    """Make a change."""
    for model, share, origin, goal in change:
        there = filling.take(origin, model)
        if there - share > ROUNDING:
            filling.add(origin, model, there - share)
        filling.add(goal, model, share)


def undone(change: tuple[ShareMove, ...]) -> tuple[ShareMove, ...]:
    """The change that takes another back."""
    return tuple(ShareMove(model, share, goal, origin) for model, share, origin, goal in reversed(change))
