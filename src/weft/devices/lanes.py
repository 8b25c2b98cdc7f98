"""Lanes: which parts of a device run at the same time, and how they slow each other down.

An NPU that fetches and computes in parallel has two lanes, its channel and its array, neither of which slows the
other; a tiled NPU has one. The lanes of a host are threads that share caches, memory and cores: how much speed a lane
loses while another runs is measured, model by model (``weft.devices.host``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LEAST_SPEED = 0.05
"""The least speed of a lane, however many others run: lines drawn through measurements must not stop it."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """The lanes of a device. Work is of a kind, which is the number of its model; speed 1 is that of a lane alone."""

    names: tuple[str, ...]
    cores: int = 0
    """Number of lanes that run at full speed at the same time; 0: all of them."""
    losses: tuple[tuple[float, ...], ...] = ()
    """Own kind, other kind -> share of its speed that a lane loses while one other runs; none where nothing is lost."""

    def __len__(self) -> int:
        return len(self.names)

    def speeds(self, kinds: Sequence[int], lanes: Sequence[int] = ()) -> list[float]:
        """The speed of each running lane, by the kinds of work that run; which lanes they are makes no difference."""
        share = self.share(len(kinds))
        if not self.losses or len(kinds) == 1:
            return [share] * len(kinds)
        speeds = []
        for own in kinds:
            lost = 0.0
            for other in kinds:  # one after another, as the compiled loop adds: ``sum`` rounds otherwise since 3.12
                lost += self.losses[own][other]
            lost -= self.losses[own][own]  # it was counted once too often
            speeds.append(share * max(LEAST_SPEED, 1.0 - lost))
        return speeds

    def share(self, running: int) -> float:
        """The part of a core that each of *running* lanes gets."""
        return min(1.0, self.cores / running) if self.cores and running else 1.0
