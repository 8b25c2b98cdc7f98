"""Phase 3: what passed on the few samples may fail on all of them; add bits and lower biases until it passes."""

from __future__ import annotations

import math

from weft_tune.judge import Judge, Point
from weft_tune.moves import biases_lowered, biases_raised, one_bit_more
from weft_tune.ranking import HighestScore
from weft_tune.search.coarse import rungs
from weft_tune.search_space import TuningSetting

MOST_STEPS = 64
"""Most steps of a recovery. After that the uniform settings of phase 1 are tried, the narrowest first."""


def recovered(judge: Judge, setting: TuningSetting) -> Point | None:
    """The setting if it passes, else the first that does on the way up; None if nothing does."""
    found = judge.feasible(setting, "recovery")
    for _ in range(MOST_STEPS):
        if found:
            break
        moves = one_bit_more(judge.space, setting) + biases_lowered(judge.space, setting)
        best = judge.pick(moves, HighestScore(-math.inf), "recovery")
        if best is None:
            break
        setting = best.setting
        found = best if best.score >= judge.threshold else None
    found = found or _fallen_back(judge)
    if found:
        judge.keep(found, "recovery")
    return found


def climbed(judge: Judge, setting: TuningSetting) -> Point | None:
    """A setting that cannot be wider, its biases moved as long as the score rises; None if that is not enough."""
    best = judge.scored(setting, "recovery")
    while best and best.score < judge.threshold:
        moves = biases_raised(judge.space, best.setting) + biases_lowered(judge.space, best.setting)
        best = judge.pick(moves, HighestScore(math.nextafter(best.score, math.inf)), "recovery", best.score)
    if best:
        judge.keep(best, "recovery")
    return best


def _fallen_back(judge: Judge) -> Point | None:
    for setting in rungs(judge):
        if found := judge.feasible(setting, "recovery"):
            return found
    return None
