"""Scratch memory: ONNX Runtime keeps what its largest run took, until it has not been needed for a while.

Nobody tells how large the arena is, so the memory of the process is looked at after runs that took long enough to use
much of it: what it has grown by since the arena was last shrunk is taken for scratch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from weft.runtime.onnxruntime_cpu.sessions import shrink_arena

KEPT_BYTES = 128 << 20
"""Less than this is worth keeping."""
LONG_NS = 5_000_000
"""Runs shorter than this are not looked at."""
IDLE_S = 1.0
"""A lane without work waits so long before it shrinks the arena."""
_BUSY_NS = 10_000_000_000
"""Beside steady work the arena is shrunk when it has not grown for so long."""
_PATIENCE = 64
"""The longest wait between two times, in multiples: work that needs it all again and again shall keep it."""


def resident_bytes() -> int:
    """Physical memory of this process; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


class Scratch:
    """What the arena of this process holds beyond what was there when it was last shrunk; shared by all lanes."""

    def __init__(self, now: Callable[[], int], resident: Callable[[], int] = resident_bytes) -> None:
        self._now, self._resident = now, resident
        self._low = resident()
        self._high = self._low
        self._grew, self._shrunk, self._wait = now(), now(), 1

    @property
    def bytes(self) -> int:
        """How much it holds, as far as can be told."""
        return max(0, self._high - self._low)

    @property
    def is_large(self) -> bool:
        """Whether it is worth giving back."""
        return self._high - self._low >= KEPT_BYTES

    def ran(self, took_ns: int) -> None:
        """A run has ended."""
        if took_ns >= LONG_NS:
            found = self._resident()
            if found > self._high:
                self._high, self._grew = found, self._now()
            self._low = min(self._low, found)

    def is_due(self, *, idle: bool) -> bool:
        """Whether to shrink the arena now; *idle*: nobody waits for the lane that asks."""
        if not self.is_large:
            return False
        rest = self._now() - max(self._grew, self._shrunk)
        return rest >= self._wait * (IDLE_S * 1e9 if idle else _BUSY_NS)

    def shrink(self) -> None:
        """Give back what no run uses now; what was wanted again soon after the last time is kept for longer."""
        shrink_arena()
        again = self._grew > self._shrunk and self._grew - self._shrunk < 2 * self._wait * _BUSY_NS
        self._wait = min(_PATIENCE, 2 * self._wait) if again else 1
        self._low = self._high = self._resident()
        self._grew = self._shrunk = self._now()
