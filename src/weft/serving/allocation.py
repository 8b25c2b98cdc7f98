"""Memory that a server has freed: kept for the next ones after ordinary requests, given back after large ones.

The C library gives larger pieces back to the system, which clears every page of them when they are wanted again: a
request of 600 KB then costs twice as much. And it keeps what a thread has freed for that thread alone: messages of up
to 64 MB over gRPC, whose threads are its own, left 200 MB behind in four heaps, and 5 MB in one that is trimmed.
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
HEAPS = 1
"""Heaps that all threads share. Their lock costs nothing that was seen: 229 us of processor time per small request at 8
connections with one heap or four (Neoverse-N1)."""
IDLE_BYTES = 16 << 20
"""What stays at the end of the heap of a server that is idle."""


def keep_freed_memory() -> None:
    """Have this process keep what ordinary requests free, where the C library can be told to."""
    if sys.platform != "linux" or not hasattr(library := ctypes.CDLL(None), "mallopt"):
        return
    for what, value in ((_TRIM_THRESHOLD, KEPT_BYTES), (_MMAP_THRESHOLD, LARGE_BYTES), (_ARENA_MAX, HEAPS)):
        library.mallopt(what, value)


def give_freed_memory_back() -> None:
    """Give the system what is free in this process but for ``IDLE_BYTES``, where the C library can."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(IDLE_BYTES)
