"""The fairness rule: no stream falls further behind the asked-for mix than a stated lag.

The engine applies it before a policy is asked, by leaving streams out of the view, so it holds for
every policy alike. Progress is counted in whole units, ``ROUND`` to a round, so that the plain and
the compiled engine hold back the same streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from weft.devices.costs.program import Program
from weft.kernels import rules

ROUND = 2**32


class Band(NamedTuple):
    """Keep every stream within *max_lag* rounds of the furthest one."""

    mix: tuple[float, ...]
    """Queries of each stream per round."""
    max_lag: float

    @property
    def max_lag_units(self) -> int:
        return round(self.max_lag * ROUND)

    def gains(self, programs: Sequence[Program]) -> tuple[tuple[int, ...], ...]:
        """Progress that each layer of each stream makes."""
        return tuple(_gains(program, part) for program, part in zip(programs, self.mix, strict=True))


def _gains(program: Program, per_round: float) -> tuple[int, ...]:
    """A query advances its stream by ``ROUND / per_round``, a layer by its share of the model's work."""
    query = round(ROUND / per_round)
    reached = [0]
    done = 0
    for work in program.work:
        done += work
        reached.append(query * done // program.total_work)
    return tuple(after - before for before, after in pairwise(reached))


def may_go(progress: Sequence[int], gains: Sequence[int], max_lag_units: int) -> list[bool]:
    """Which streams may issue their next layer without leaving another one further behind than allowed.

    The first of the streams that are furthest behind always may, so there is always one to run; its
    own layer may be longer than the band is wide.
    """
    least = min(progress)
    last_stream = list(progress).index(least)
    return [
        stream == last_stream or rules.within_lag(progress[stream], gains[stream], least, max_lag_units)
        for stream in range(len(progress))
    ]
