"""AI-MT (ISCA'20) at layer granularity, as Layerweaver describes and tunes it.

Two thresholds decide. If little of the buffer is free, the layer with the shortest compute goes next; if little ready
compute is left (work whose weights are on chip), the layer that adds most to it; otherwise the memory-bound layer that
waited longest. (The paper chooses randomly there; the longest wait makes runs repeatable.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weft.engine.policies.base import Candidate, OptionRange, Policy, Start, View
from weft.kernels import rules

OF_BUFFER = OptionRange(0, 10, "times the weight buffer")


@dataclass(frozen=True)
class AiMt(Policy):
    """Chooses by two thresholds, shares of the weight buffer; ``weft compare --sweep`` finds the best pair."""

    ranges: ClassVar = {"compute_threshold": OF_BUFFER, "memory_threshold": OF_BUFFER}

    compute_threshold: float = 0.2
    """Below this share of the time that filling the buffer takes, ready compute is rebuilt."""
    memory_threshold: float = 0.1
    """If a smaller share of the buffer than this is free, the layer with the shortest compute frees space."""

    @property
    def thresholds(self) -> tuple[int, int]:
        """The thresholds for compute and for memory, in ticks."""
        buffer = self.setting.buffer
        return round(self.compute_threshold * buffer), round(self.memory_threshold * buffer)

    def decide(self, view: View) -> Start:
        """Choose by the free part of the buffer and the decoupling distance (``rules.aimt_key``)."""
        free, distance = view.device.free(self.setting.buffer), view.device.distance

        def key(c: Candidate) -> tuple[tuple[int, int], int]:
            return rules.aimt_key(c.fetch, c.compute, c.last_issued, free, distance, *self.thresholds), c.stream

        return Start(min(view.candidates, key=key))
