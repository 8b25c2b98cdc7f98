"""The fairness rule: no stream falls further behind the mix than a given lag.

The engine applies it before it asks a policy, by leaving streams out of the candidates, so it holds for every policy.
Progress is an integer, ``ROUND`` units to a round, so that the plain and the compiled engine hold back the same
streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from weft.devices.costs.program import Program
from weft.kernels import rules

ROUND = 2**32
"""Units of progress per round: fine enough for every layer to count, and 2**31 rounds still fit into 64 bits."""


class Band(NamedTuple):
    """A mix, and how many rounds a stream may be ahead of the one that is furthest behind."""

    mix: tuple[float, ...]
    """Queries of each stream per round."""
    max_lag: float

    @property
    def max_lag_units(self) -> int:
        return round(self.max_lag * ROUND)

    def gains(self, programs: Sequence[Program]) -> tuple[tuple[int, ...], ...]:
        """Return the progress of each layer of each stream."""
        return tuple(_gains(program, part) for program, part in zip(programs, self.mix, strict=True))


def _gains(program: Program, per_round: float) -> tuple[int, ...]:
    """Return the progress of each layer: a query is ``ROUND / per_round``, a layer its share of the model's work."""
    query = round(ROUND / per_round)
    reached = [0]
    done = 0
    for work in program.work:
        done += work
        reached.append(query * done // program.total_work)
    return tuple(after - before for before, after in pairwise(reached))


def may_go(progress: Sequence[int], gains: Sequence[int], max_lag_units: int) -> list[bool]:
    """Return which streams may issue their next layer without leaving another one too far behind.

    The first of the streams that are furthest behind always may, even if its layer exceeds the band, so that there is
    always one to run.
    """
    least = min(progress)
    last_stream = list(progress).index(least)
    return [
        stream == last_stream or rules.within_lag(progress[stream], gains[stream], least, max_lag_units)
        for stream in range(len(progress))
    ]
