"""Step (a) of fine-tuning: smaller ranges, that is higher biases, while the score holds.

The chapter raises biases until none can be raised, which spends on ranges what widths could use. ``keep`` takes no
step that lowers the score. ``repair`` does the same and adds steps that the chapter does not have: a width that
fails is tried with other biases (search/repair.py), and bits move from one group to another (search/exchange.py).
"""

from __future__ import annotations

from typing import Literal, get_args

from weft_tune.judge import Judge, Point
from weft_tune.moves import biases_raised
from weft_tune.ranking import HighestScore

BiasRule = Literal["chapter", "keep", "repair"]
BIAS_RULES: tuple[BiasRule, ...] = get_args(BiasRule)


def raised(judge: Judge, point: Point, rule: BiasRule) -> Point:
    """The most accurate raise, again and again, above the threshold, or with no loss of score at all."""
    while True:
        floor = judge.threshold if rule == "chapter" else max(judge.threshold, point.score)
        found = judge.pick(biases_raised(judge.space, point.setting), HighestScore(floor), "bias", point.score)
        if found is None:
            return point
        point = found
        judge.keep(point, "bias")
