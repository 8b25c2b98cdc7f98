"""Timing of alternatives in turns, so that other load of the machine disturbs all of them alike.

``measure_in_turns`` is the loop. ``least_seconds`` and ``time_in_turns`` time callables with it: by their least time,
which disturbances change least, or by ``Turns``, which tell whether a difference could be chance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from statistics import median
from typing import TypeVar

Run = Callable[[], object]
Clock = Callable[[], float]
"""Returns seconds since some moment; of wall time, or of processor time."""
Measured = TypeVar("Measured")

WARM_UPS = 2
"""Rounds before the first round that counts: the first fills caches, the second sees them filled."""
TURN_S = 0.01
"""Least duration of a turn of ``time_in_turns``; short runs are repeated to fill it."""
TURNS = 11
"""Turns of each alternative: odd, so that the median is one of them, and enough for ``WON`` to exclude chance."""
LEAST_GAIN = 0.02
"""A variant that is faster by less than this part is not called faster."""
WON = 0.75
"""The part of the rounds that the faster variant must have won."""
CLOCK_STEP_S = 1e-9
"""Assumed length of a run during which the clock stood still, so that times can be divided by."""


@dataclass(frozen=True, slots=True)
class Turns:
    """Seconds of one variant's runs, by round; comparable with variants that were timed in turns with it."""

    seconds: tuple[float, ...]
    busy: tuple[float, ...] = ()
    """Processor seconds of all threads together, if they were measured, too."""

    @property
    def median_s(self) -> float:
        return median(self.seconds)

    @property
    def least_s(self) -> float:
        return min(self.seconds)

    def faster_than(self, other: Turns) -> bool:
        """Whether the runs were faster than those of *other*, by enough and in enough rounds to exclude chance."""
        won_rounds = sum(own_s < other_s for own_s, other_s in zip(self.seconds, other.seconds, strict=True))
        gains_enough = self.median_s * (1 + LEAST_GAIN) <= other.median_s
        return gains_enough and won_rounds >= WON * len(self.seconds)


def measure_in_turns(
    measures: Sequence[Callable[[], Measured]],
    rounds: int,
    *,
    warm_ups: int = 0,
    fewest: int = 1,
    longest_s: float = inf,
    both_ways: bool = False,
) -> list[list[Measured]]:
    """Call each of *measures* once per round; return one list of results per measure, without the warm-up rounds.

    warm_ups, rounds: rounds whose results are dropped, and rounds that count. longest_s: time, warm-ups included, after
    which no further round begins; but at least *fewest* rounds are made. both_ways: every other round goes backwards,
    so that no measure always follows the same other one.
    """
    results: list[list[Measured]] = [[] for _ in measures]
    pairs = list(zip(measures, results, strict=True))
    began_s = time.perf_counter()
    for number in range(-warm_ups, rounds):
        if number >= fewest and time.perf_counter() - began_s > longest_s:
            break
        for measure, measured in reversed(pairs) if both_ways and number % 2 else pairs:
            result = measure()
            if number >= 0:
                measured.append(result)
    return results


def mean_seconds(run: Run, clock: Clock, count: int = 1) -> float:
    """Seconds of one run, the mean over *count* runs."""
    began_s = clock()
    for _ in range(count):
        run()
    return (clock() - began_s) / count


def least_seconds(
    variants: Mapping[str, Sequence[Run]],
    *,
    clock: Clock,
    rounds: int = 10,
    warm_ups: int = WARM_UPS,
    longest_s: float = inf,
) -> dict[str, float]:
    """Name of each variant -> the least seconds of a round, which calls all runs of the variant in order."""
    measures = [partial(mean_seconds, partial(run_all, runs), clock) for runs in variants.values()]
    seconds = measure_in_turns(measures, rounds, warm_ups=warm_ups, longest_s=longest_s)
    return {name: max(min(times), CLOCK_STEP_S) for name, times in zip(variants, seconds, strict=True)}


def run_all(runs: Sequence[Run]) -> None:
    """Call *runs* in order; results are dropped at once, as the outputs of many rounds could fill the memory."""
    for run in runs:
        run()


def time_in_turns(runs: Sequence[Run], turns: int = TURNS, clock: Clock = time.thread_time) -> tuple[Turns, ...]:
    """Time *runs* in turns of at least ``TURN_S``; by default in processor time of the calling thread."""
    measures = [partial(mean_seconds, run, clock, _runs_in_a_turn(run, clock)) for run in runs]
    return tuple(Turns(tuple(times)) for times in measure_in_turns(measures, turns, both_ways=True))


def _runs_in_a_turn(run: Run, clock: Clock) -> int:
    """Number of runs that fill a turn of ``TURN_S``; makes a few runs to estimate it."""
    run()
    once_s = min(mean_seconds(run, clock) for _ in range(3))
    return max(1, round(TURN_S / max(once_s, CLOCK_STEP_S)))


def clock_for(threads: int) -> Clock:
    """The clock for runs on this number of threads.

    For one thread its processor time, which other load does not disturb, if that clock is fine enough; else wall time.
    """
    is_fine = time.get_clock_info("thread_time").resolution <= 1e-6
    return time.thread_time if threads == 1 and is_fine else time.perf_counter
