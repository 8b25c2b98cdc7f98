"""Bits moved from one group to another: a little wider where it costs little, so that what costs much gets narrower.

This is not in the chapter, whose steps only go down. Where layers differ in size, the last bit of a small one may be
what a large one needs.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft_tune.judge import Judge, Point
from weft_tune.moves import narrower_in_any_type, one_bit_more, shifted
from weft_tune.search_space import TuningSetting

MOST_TRIED = 100
"""Most exchanges tried in one round; the largest gains come first."""


def exchanged(judge: Judge, point: Point) -> Point | None:
    """The exchange that gains most among those that pass."""
    gains = [
        (point.objective - judge.point(setting).objective, setting) for setting in _exchanges(judge, point.setting)
    ]
    gaining = [each for each in gains if each[0] > 0]
    for _, setting in sorted(gaining, key=lambda each: -each[0])[:MOST_TRIED]:
        if found := judge.feasible(setting, "width"):
            judge.keep(found, "width")
            return found
    return None


def _exchanges(judge: Judge, setting: TuningSetting) -> Iterator[TuningSetting]:
    """One or two bits more somewhere, fewer elsewhere, there with the same bias or one more."""
    space = judge.space
    for once in one_bit_more(space, setting):
        for wider in (once, *(twice for twice in one_bit_more(space, once.setting) if twice.name == once.name)):
            for group, move in narrower_in_any_type(space, wider.setting):
                if setting.types[group] == wider.setting.types[group]:
                    yield move.setting
                    yield shifted(space, move.setting, group, 1)
