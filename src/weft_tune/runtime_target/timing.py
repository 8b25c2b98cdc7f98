"""Which of several variants of a model is faster: they take turns, so that what disturbs the machine disturbs all.

The clock is the processor time of the thread that computes: what a run takes where nobody else is at work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TURN_S = 0.01
"""What a turn of one variant takes at least; short models run often in it."""
TURNS, LAST_TURNS = 11, 31
"""Of every variant: while variants are chosen, and when the last word is said."""
LEAST_GAIN = 0.02
"""A variant that is faster by less is not called faster."""
WON = 0.75
"""The part of the turns that the faster one must have won."""


@dataclass(frozen=True, slots=True)
class Turns:
    """How long one run took, turn by turn."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def faster_than(self, other: Turns) -> bool:
        """Whether these runs were faster than those of *other*, which took turns with them, and not by chance."""
        won = sum(mine < theirs for mine, theirs in zip(self.seconds, other.seconds, strict=True))
        enough = self.median_s * (1 + LEAST_GAIN) <= other.median_s
        return enough and won >= WON * len(self.seconds)


def in_turns(
    runs: Sequence[Callable[[], object]], turns: int = TURNS, clock: Callable[[], float] = time.thread_time
) -> tuple[Turns, ...]:
    """Measure *runs* in turns; every other round goes backwards, so that nobody always follows the same one."""
    counts = [_runs_in_a_turn(run, clock) for run in runs]
    seconds: list[list[float]] = [[] for _ in runs]
    for turn in range(turns):
        order = range(len(runs)) if turn % 2 == 0 else range(len(runs) - 1, -1, -1)
        for each in order:
            seconds[each].append(_seconds(runs[each], counts[each], clock))
    return tuple(Turns(tuple(each)) for each in seconds)


def _runs_in_a_turn(run: Callable[[], object], clock: Callable[[], float]) -> int:
    """After a run to warm up; as many as fill a turn."""
    run()
    once_s = min(_seconds(run, 1, clock) for _ in range(3))
    return max(1, round(TURN_S / max(once_s, 1e-9)))


def _seconds(run: Callable[[], object], count: int, clock: Callable[[], float]) -> float:
    """Of one run, the mean over *count*."""
    began_s = clock()
    for _ in range(count):
        run()
    return (clock() - began_s) / count
