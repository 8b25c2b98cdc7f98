"""Who is where: every server and gate says so each second, and gates ask."""

from __future__ import annotations

import time
from collections.abc import Callable

GATES = ""
"""What gates are listed under; servers are under the name of their machine."""
SAID_EVERY_S = 1.0
FORGOTTEN_S = 5.0
"""Who has said nothing for so long is not listed."""


class Directory:
    """Addresses by machine. It holds nothing that is not said again: one that is started anew knows all in a second."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._said: dict[tuple[str, str], float] = {}

    def say(self, machine: str, url: str) -> None:
        """Somebody is there."""
        self._said[machine, url] = self._now()

    def leave(self, machine: str, url: str) -> None:
        """Somebody is about to end."""
        self._said.pop((machine, url), None)

    def known(self) -> dict[str, list[str]]:
        """Machine -> the URLs of its servers."""
        oldest, found = self._now() - FORGOTTEN_S, dict[str, list[str]]()
        for (machine, url), said in sorted(self._said.items()):
            if said >= oldest:
                found.setdefault(machine, []).append(url)
        return found
