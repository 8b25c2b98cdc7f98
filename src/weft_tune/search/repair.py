"""A second chance for widths: a step down that fails as it is may pass once its biases fit the coarser steps.

This is not in the chapter, where biases have been raised before, for the old width. Fewer values need a smaller
range: it pays to clip the largest ones. In the first pass the biases of the narrower objects climb as long as the score
rises; in the second, where a score costs more and little is left to find, one of them is moved by one.
"""

from __future__ import annotations

import math

from weft_tune.judge import Judge, Point
from weft_tune.moves import Move, biases_lowered, biases_raised, narrower_in_any_type
from weft_tune.ranking import HighestScore
from weft_tune.search_space import TuningSetting


def repaired(judge: Judge, point: Point) -> Point | None:
    """The narrower format that gains most among those that pass after their own biases have been moved."""
    moves = narrower_in_any_type(judge.space, point.setting)
    gains = [(point.objective - judge.point(move.setting).objective, group, move) for group, move in moves]
    passing = _beside if judge.phase == 4 else _climbed
    for gain, group, move in sorted(gains, key=lambda each: -each[0]):
        if gain <= 0:
            break
        if found := passing(judge, move.setting, group):
            judge.keep(found, "width")
            return found
    return None


def _climbed(judge: Judge, setting: TuningSetting, group: int) -> Point | None:
    seen = judge.scored(setting, "width")
    while seen and seen.score < judge.threshold:
        rule = HighestScore(math.nextafter(seen.score, math.inf))
        seen = judge.pick(_around(judge, seen.setting, group), rule, "bias", seen.score)
    return seen


def _beside(judge: Judge, setting: TuningSetting, group: int) -> Point | None:
    settings = (setting, *(move.setting for move in _around(judge, setting, group)))
    return next((found for each in settings if (found := judge.feasible(each, "width"))), None)


def _around(judge: Judge, setting: TuningSetting, group: int) -> list[Move]:
    return biases_raised(judge.space, setting, group) + biases_lowered(judge.space, setting, group)
