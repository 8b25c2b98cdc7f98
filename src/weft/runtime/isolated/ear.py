"""Who hears what workers say of their steps: the event loop that opened the lanes.

So the end of a step wakes the thread that has been waiting for it, and no other. Where no loop runs, one of its own
does, on a thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from weft.runtime.isolated.packets import Line


class Ear:
    """Calls back, on one thread, when something can be read from a line."""

    def __init__(self) -> None:
        self._own: threading.Thread | None = None
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = asyncio.new_event_loop()
            self._own = threading.Thread(target=self._loop.run_forever, name="ear", daemon=True)
            self._own.start()

    def listen(self, line: Line, hear: Callable[[], bool]) -> None:
        """Have *hear* called whenever something was said, until it returns False; from any thread."""

        def heard() -> None:
            if not hear():
                self._loop.remove_reader(line.file)

        self._loop.call_soon_threadsafe(self._loop.add_reader, line.file, heard)

    def part(self, line: Line) -> None:
        """Listen no more, and close it; from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._end, line)
        except RuntimeError:  # the loop has ended
            line.close()

    def _end(self, line: Line) -> None:
        if line.file >= 0:
            self._loop.remove_reader(line.file)
            line.close()

    def close(self) -> None:
        """End the thread, if there is one, and close what it was to close."""
        if self._own:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._own.join()
            self._loop.close()
            self._own = None
