"""The counters and records of a run, plain or compiled."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from weft.engine.arrivals import Ending

Ints = npt.NDArray[np.int64]

MOST_RECORDED = 1 << 20
"""Most issues, and most answers, that a recorded run keeps; the run goes on without recording further ones."""


@dataclass(frozen=True, slots=True, eq=False)
class Tally:
    """Counters and latencies of a run and, if it was recorded, every answer and issue.

    The arrays have the columns of ``LoopState`` (``kernels.request_state``).
    """

    clocks: Ints
    counts: Ints
    histogram: Ints
    answers: tuple[Ending, ...]
    """The end of every request; empty if not recorded."""
    issues: Ints
    """Stream, query, layer, program, and start and end of fetch and compute of every issue; empty if not recorded."""

    @property
    def counted(self) -> Tally:
        """The tally without records of answers and issues."""
        return replace(self, answers=(), issues=self.issues[:0])

    @property
    def order(self) -> tuple[tuple[int, int, int], ...]:
        """Stream, query and layer of every issue."""
        return tuple((s, q, layer) for s, q, layer in self.issues[:, :3].tolist())
