"""Phases 2 and 4: biases up, widths down, then another type, until nothing gains (Algorithm 2 of the chapter).

As printed, a change of type that is feasible but gains nothing is accepted, so that I2 and E2 can follow each other
for ever. Here a change counts only if the objective is smaller once bias and width have been tuned again.
"""

from __future__ import annotations

from weft_tune.judge import Judge, Point
from weft_tune.moves import one_bit_fewer, types_changed
from weft_tune.ranking import MostGainPerLoss
from weft_tune.search.bias import BiasRule, raised
from weft_tune.search.exchange import exchanged
from weft_tune.search.repair import repaired


def fine(judge: Judge, point: Point, bias: BiasRule) -> Point:
    """A feasible point that no single step improves."""
    point = _narrowed(judge, raised(judge, point, bias))
    while better := _improved(judge, point, bias):
        point = better
    return point


def _improved(judge: Judge, point: Point, bias: BiasRule) -> Point | None:
    """A point with a smaller objective, tuned again; None where no step leads to one."""
    if bias != "repair":
        return _retyped(judge, point, bias)
    found = repaired(judge, point) or _retyped(judge, point, bias) or exchanged(judge, point)
    return found and _narrowed(judge, raised(judge, found, bias))


def _narrowed(judge: Judge, point: Point) -> Point:
    """One bit fewer where it gains most for what it costs, as long as any passes."""
    while True:
        moves = [
            move
            for move in one_bit_fewer(judge.space, point.setting)
            if judge.point(move.setting).objective <= point.objective
        ]
        rule = MostGainPerLoss(judge.threshold, point.objective, point.score)
        found = judge.pick(moves, rule, "width", point.score)
        if found is None:
            return point
        point = found
        judge.keep(point, "width")


def _retyped(judge: Judge, point: Point, bias: BiasRule) -> Point | None:
    """The first change of type, in the order of their ratios, that makes the objective smaller in the end."""
    moves = types_changed(judge.space, point.setting)
    rule = MostGainPerLoss(judge.threshold, point.objective, point.score)
    for changed in judge.accepted(moves, rule, "type"):
        mark = len(judge.path)
        judge.keep(changed, "type")
        tuned = _narrowed(judge, raised(judge, changed, bias))
        if tuned.objective < point.objective:
            return tuned
        del judge.path[mark:]
    return None
