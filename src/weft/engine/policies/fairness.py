"""The fairness rule: no stream falls further behind the mix than a given lag.

The engine applies it before it asks a policy, by leaving streams out of the candidates, so it holds for every policy.
Progress is an integer, ``ROUND`` units to a round, so that the plain and the compiled engine hold back the same
streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from weft.devices.costs.program import Program
from weft.kernels import rules

ROUND = 2**32
"""Units of progress per round: fine enough for every layer to count, and 2**31 rounds still fit into 64 bits."""


class Band(NamedTuple):
    """The fairness rule of a run: a mix, and how far a stream may be ahead of the stream that is furthest behind."""

    mix: tuple[float, ...]
    """Queries of each stream per round."""
    max_lag: float
    """In rounds."""

    @property
    def max_lag_units(self) -> int:
        """The largest lag in units of progress."""
        return round(self.max_lag * ROUND)

    def gains(self, programs: Sequence[Program]) -> tuple[tuple[int, ...], ...]:
        """Return, for each stream, the units of progress that each of its layers adds."""
        return tuple(_gains(program, part) for program, part in zip(programs, self.mix, strict=True))


def _gains(program: Program, per_round: float) -> tuple[int, ...]:
    """Return the units of progress that each layer adds. per_round: queries of the stream per round.

    A query adds ``ROUND / per_round``, and a layer adds its share of the query's work.
    """
    query = round(ROUND / per_round)
    progress = [query * done // program.total_work for done in accumulate(program.work, initial=0)]
    return tuple(after - before for before, after in pairwise(progress))


def may_go(progress: Sequence[int], gains: Sequence[int], max_lag_units: int) -> list[bool]:
    """Return, for each stream, whether its next layer may be issued without leaving another stream too far behind.

    gains: the progress that each stream's next layer adds. The stream that is furthest behind (the first of equals)
    always may, even if its layer exceeds the band, so that there is always a layer to run.
    """
    least = min(progress)
    last_stream = list(progress).index(least)
    return [
        stream == last_stream or rules.within_lag(progress[stream], gains[stream], least, max_lag_units)
        for stream in range(len(progress))
    ]
