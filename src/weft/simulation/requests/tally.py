"""What a run counted, plain or compiled."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from weft.engine.arrivals import Ending

Ints = npt.NDArray[np.int64]

MOST_RECORDED = 1 << 20
"""Issues and answers kept where a run is recorded; it goes on uncounted beyond."""


@dataclass(frozen=True, slots=True, eq=False)
class Tally:
    """Counts, latencies and, where asked for, every answer and issue."""

    clocks: Ints
    counts: Ints
    histogram: Ints
    answers: tuple[Ending, ...]
    """Every request's fate, where asked for."""
    issues: Ints
    """Stream, query, layer, program and four times of every issue, where asked for."""

    @property
    def counted(self) -> Tally:
        """The counts alone, as of a run that is not recorded."""
        return replace(self, answers=(), issues=self.issues[:0])

    @property
    def order(self) -> tuple[tuple[int, int, int], ...]:
        """Stream, query and layer of every issue."""
        return tuple((s, q, layer) for s, q, layer in self.issues[:, :3].tolist())
