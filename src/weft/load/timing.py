"""An event loop whose timers are exact to microseconds.

The loop's usual way of waiting on Linux counts whole milliseconds and rounds up, so that a request
would leave half a millisecond late on average.
"""

from __future__ import annotations

import asyncio
import select
import selectors
import sys

if sys.platform == "linux":
    _HIGHEST_DESCRIPTOR = 1023
    """The highest that select() takes."""

    class PreciseSelector(selectors.EpollSelector):
        """Waits for epoll's own descriptor with select(), which counts microseconds, and asks epoll then."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is not None and timeout > 0 and self.fileno() <= _HIGHEST_DESCRIPTOR:
                if not select.select([self.fileno()], (), (), timeout)[0]:
                    return []
                timeout = 0
            return super().select(timeout)

    def precise_loop() -> asyncio.AbstractEventLoop:
        """A new loop; whoever makes it closes it."""
        return asyncio.SelectorEventLoop(PreciseSelector())

else:

    def precise_loop() -> asyncio.AbstractEventLoop:
        """A new loop; the usual one, which is exact enough here."""
        return asyncio.new_event_loop()
