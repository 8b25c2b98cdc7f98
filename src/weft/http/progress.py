"""Whether a transfer moves on: it may take as long as it likes, if enough of it passes in every window of time."""

from __future__ import annotations

import struct
from typing import Any


class Progress:
    """One transfer under watch, from the first look at it."""

    __slots__ = ("_least", "_since_s", "_start", "_window_s")

    def __init__(self, window_s: float, bytes_per_s: float, now_s: float, start: int) -> None:
        """*start*: how many bytes have passed by now."""
        self._window_s, self._least = window_s, window_s * bytes_per_s
        self._since_s, self._start = now_s, start

    def stalled(self, now_s: float, passed: int) -> bool:
        """Whether a whole window has gone by in which too little passed; *passed* bytes have, in all."""
        if now_s - self._since_s <= self._window_s:
            return False
        if passed - self._start < self._least:
            return True
        self._since_s, self._start = now_s, passed
        return False


def kernel_unsent_bytes(endpoint: Any) -> int:
    """What the system holds of a socket that its peer has not taken; 0 where it does not tell."""
    try:
        import fcntl
        import termios

        told = fcntl.ioctl(endpoint.fileno(), termios.TIOCOUTQ, struct.pack("i", 0))
    except (ImportError, AttributeError, OSError, ValueError):
        return 0
    return max(0, int(struct.unpack("i", told)[0]))
