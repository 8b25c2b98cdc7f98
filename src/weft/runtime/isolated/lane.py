"""A lane for models in threads and models in workers: a thread for the one kind, and what runs there of the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from weft.runtime.isolated import memory
from weft.runtime.isolated.ear import Ear
from weft.runtime.onnxruntime_cpu.lane import CpuLane
from weft.runtime.onnxruntime_cpu.scratch import Scratch

AHEAD_KEPT_BYTES = 256 << 20
"""How much memory for tensors is kept on a lane of a device, which is registered with its driver."""


class RunElsewhere(Protocol):
    """A step of this lane that a worker computes."""

    def await_end(self, patience_s: float | None) -> bool:
        """Return when it has ended, or after so long: False."""
        ...

    def give_way(self) -> None:
        """Let others go first."""
        ...


class IsolatingLane(CpuLane):
    """A lane by its number, which every worker has, too."""

    def __init__(
        self,
        index: int,
        now: Callable[[], int],
        ear: Ear,
        core: int | None = None,
        scratch: Scratch | None = None,
        ahead: int = 0,
    ) -> None:
        """ahead: how many steps its workers take besides the one that they run."""
        super().__init__(index, now, core, scratch)
        self.index, self.ear, self.core, self.ahead, self.apart = index, ear, core, ahead, ahead > 0
        self.kept_bytes = AHEAD_KEPT_BYTES if ahead else memory.KEPT_BYTES
        self.run: RunElsewhere | None = None
        """The last one."""
        self.carried: set[int] = set()
        """Steps whose tensors are being copied on another thread; later ones wait behind them."""

    def give_way(self) -> None:
        super().give_way()
        if self.run:
            self.run.give_way()

    def close(self, patience_s: float | None = None) -> bool:
        end_s = None if patience_s is None else time.monotonic() + patience_s
        ended = self.run is None or self.run.await_end(patience_s)
        return super().close(None if end_s is None else max(0.0, end_s - time.monotonic())) and ended
