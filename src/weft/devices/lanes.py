"""Lanes: which parts of a device run at the same time, and how they slow each other down.

An NPU that fetches and computes in parallel has two lanes, its channel and its array, neither of which slows the
other; a tiled NPU has one. The lanes of a host are threads that share caches, memory and cores: how much speed a lane
loses while another runs is measured, model by model (``weft.devices.host``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LEAST_SPEED = 0.05
"""The least speed of a lane, however many others run: the sum of fitted losses must not stop a lane."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """The lanes of a device and how they slow each other down.

    The kind of work is the number of its model. Speed 1 is that of a lane while all others are idle.
    """

    names: tuple[str, ...]
    cores: int = 0
    """Number of lanes that run at full speed at the same time; 0: all of them."""
    losses: tuple[tuple[float, ...], ...] = ()
    """``losses[own kind][other kind]``: share of its speed that a lane loses to one other lane; empty: no losses."""

    def __len__(self) -> int:
        return len(self.names)

    def speeds(self, kinds: Sequence[int], lanes: Sequence[int] = ()) -> list[float]:
        """The speed of each running lane; *kinds*: the work on each. *lanes* is ignored: all lanes are equal."""
        share = self.share(len(kinds))
        if not self.losses or len(kinds) == 1:
            return [share] * len(kinds)
        speeds = []
        for kind in kinds:
            lost = 0.0
            # The compiled loop adds in this order; ``sum`` rounds differently since Python 3.12.
            for other_kind in kinds:
                lost += self.losses[kind][other_kind]
            lost -= self.losses[kind][kind]  # the loop also counted the lane's own work
            speeds.append(share * max(LEAST_SPEED, 1.0 - lost))
        return speeds

    def share(self, running: int) -> float:
        """The share of full speed that each of *running* lanes gets from the cores."""
        return min(1.0, self.cores / running) if self.cores and running else 1.0
