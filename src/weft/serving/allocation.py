"""What becomes of memory that a server has freed: that of ordinary requests is kept for the next ones.

The C library gives larger pieces back to the system, which clears every page of them when they are wanted again: a
request of 600 KB then costs twice as much. And it keeps what a thread has freed for that thread alone.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Numbers of the GNU C library's ``mallopt``."""

KEPT_BYTES = 64 << 20
"""So much that is free at the end of the heap stays there."""
LARGE_BYTES = 32 << 20
"""Pieces from this size on come from the system and go back there; it is what the library comes to by itself, later."""
HEAPS = 4
"""Threads share so many."""


def keep_freed_memory() -> None:
    """Have this process keep what ordinary requests free, where the C library can be told to."""
    if sys.platform != "linux" or not hasattr(library := ctypes.CDLL(None), "mallopt"):
        return
    for what, value in ((_TRIM_THRESHOLD, KEPT_BYTES), (_MMAP_THRESHOLD, LARGE_BYTES), (_ARENA_MAX, HEAPS)):
        library.mallopt(what, value)
