"""Phases 2 and 4: biases up, widths down, then another type, until nothing gains (Algorithm 2 of the chapter).

As printed, a change of type that is feasible but gains nothing is accepted, so that I2 and E2 can follow each other
for ever. Here a change counts only if the objective is smaller once bias and width have been tuned again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, get_args

from weft_tune.judge import HighestScore, Judge, MostGainPerLoss, Point
from weft_tune.result import Step
from weft_tune.search_space import (
    Move,
    TuningSetting,
    bias_moves,
    narrowing_moves,
    shift_biases,
    type_moves,
    width_moves,
)

BiasRule = Literal["chapter", "keep", "repair"]
"""How step (a) raises biases, which makes ranges smaller. The chapter raises them until none can be raised, and so
spends on ranges what widths could use. ``keep`` takes no step that lowers the score. ``repair`` does the same and adds
steps that the chapter does not have: a width that fails is tried with other biases, and bits move between groups."""
BIAS_RULES: tuple[BiasRule, ...] = get_args(BiasRule)

MOST_EXCHANGES = 100
"""Limit of the exchanges tried in one round; the largest gains come first."""


def fine(judge: Judge, point: Point, bias: BiasRule) -> Point:
    """Tune a feasible point until no single step improves it."""
    point = _narrow(judge, raise_biases(judge, point, bias))
    while better := _improve(judge, point, bias):
        point = better
    return point


def raise_biases(judge: Judge, point: Point, rule: BiasRule) -> Point:
    """Step (a): the most accurate raise, again and again, above the threshold, or with no loss of score at all."""
    while True:
        floor = judge.threshold if rule == "chapter" else max(judge.threshold, point.score)
        best = judge.pick(bias_moves(judge.space, point.setting, 1), HighestScore(floor), "bias", point.score)
        if best is None:
            return point
        point = best
        judge.keep(point, "bias")


def _improve(judge: Judge, point: Point, bias: BiasRule) -> Point | None:
    """A point with a smaller objective, tuned again; None where no step leads to one."""
    if bias != "repair":
        return _change_types(judge, point, bias)
    better = repair(judge, point) or _change_types(judge, point, bias) or exchange(judge, point)
    return better and _narrow(judge, raise_biases(judge, better, bias))


def _narrow(judge: Judge, point: Point) -> Point:
    """Take one bit away where it gains most for what it costs, as long as any such step passes."""
    while True:
        moves = [
            move
            for move in width_moves(judge.space, point.setting, narrower=True)
            if judge.point(move.setting).objective <= point.objective
        ]
        rule = MostGainPerLoss(judge.threshold, point.objective, point.score)
        best = judge.pick(moves, rule, "width", point.score)
        if best is None:
            return point
        point = best
        judge.keep(point, "width")


def _change_types(judge: Judge, point: Point, bias: BiasRule) -> Point | None:
    """Take the first change of type, in the order of their ratios, that makes the objective smaller in the end."""
    moves = type_moves(judge.space, point.setting)
    rule = MostGainPerLoss(judge.threshold, point.objective, point.score)
    for changed in judge.accepted(moves, rule, "type"):
        mark = len(judge.path)
        judge.keep(changed, "type")
        tuned = _narrow(judge, raise_biases(judge, changed, bias))
        if tuned.objective < point.objective:
            return tuned
        del judge.path[mark:]  # the way did not lead to a gain
    return None


def exchange(judge: Judge, point: Point) -> Point | None:
    """Move bits between groups: the exchange that gains most among those that pass."""
    gains = [
        (point.objective - judge.point(setting).objective, setting) for setting in _exchanges(judge, point.setting)
    ]
    gaining = [(gain, setting) for gain, setting in gains if gain > 0]
    for _, setting in sorted(gaining, key=lambda pair: -pair[0])[:MOST_EXCHANGES]:
        if passing := judge.feasible(setting, "width"):
            judge.keep(passing, "width")
            return passing
    return None


def _exchanges(judge: Judge, setting: TuningSetting) -> Iterator[TuningSetting]:
    """One or two bits more in a group, fewer in another one, there with the same bias or one more."""
    space = judge.space
    for once in width_moves(space, setting, narrower=False):
        twice = (move for move in width_moves(space, once.setting, narrower=False) if move.name == once.name)
        for wider in (once, *twice):
            for group, move in narrowing_moves(space, wider.setting):
                if setting.types[group] == wider.setting.types[group]:
                    yield move.setting
                    yield shift_biases(space, move.setting, group, 1)


def repair(judge: Judge, point: Point) -> Point | None:
    """Take the narrower format that gains most among those that pass after their own biases have been moved."""
    moves = narrowing_moves(judge.space, point.setting)
    gains = [(point.objective - judge.point(move.setting).objective, group, move) for group, move in moves]
    # phase 4 scores all samples: there only direct neighbours are tried
    passing = _try_neighbours if judge.phase == 4 else climb
    for gain, group, move in sorted(gains, key=lambda entry: -entry[0]):
        if gain <= 0:
            break
        if passed := passing(judge, move.setting, group):
            judge.keep(passed, "width")
            return passed
    return None


def climb(
    judge: Judge, setting: TuningSetting, group: int | None = None, steps: tuple[Step, Step] = ("width", "bias")
) -> Point | None:
    """Move biases, of a group or all, as long as the score rises, until it passes; None if that is not enough.

    steps: the names under which the setting itself and its neighbours are scored.
    """
    best = judge.scored(setting, steps[0])
    while best and best.score < judge.threshold:
        rule = HighestScore(math.nextafter(best.score, math.inf))
        best = judge.pick(_neighbours(judge, best.setting, group), rule, steps[1], best.score)
    return best


def _try_neighbours(judge: Judge, setting: TuningSetting, group: int) -> Point | None:
    """The setting, or the first one with another bias in the group, that passes."""
    settings = (setting, *(move.setting for move in _neighbours(judge, setting, group)))
    return next((passed for option in settings if (passed := judge.feasible(option, "width"))), None)


def _neighbours(judge: Judge, setting: TuningSetting, group: int | None) -> list[Move]:
    return bias_moves(judge.space, setting, 1, group) + bias_moves(judge.space, setting, -1, group)
