"""Which models of a worker are in the device's memory: for one that has left, others leave that were used before them.

What a model always holds there is counted as well. One of which something is under way stays.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from typing import NamedTuple

from weft.errors import Failed, WorkerDied

AGAIN_S = 0.005
"""When a step is worth another try, if all that is there is being computed."""


class _Model(NamedTuple):
    moving: int
    """Bytes that leave with it."""
    staying: int
    """Bytes that it always holds."""


class Residency:
    """The models of one worker, by number; called on any thread."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self._lock = most_bytes, threading.RLock()  # values may be freed on any thread, at any time
        self._models: dict[int, _Model] = {}
        self._there: OrderedDict[int, None] = OrderedDict()
        """Those that are there, the one used least recently first."""
        self._under_way: Counter[int] = Counter()
        self.returns = 0
        """How often one has come back."""

    def add(self, number: int, moving: int, staying: int) -> None:
        """A model was opened, and has left; one without moving bytes stays for good."""
        with self._lock:
            self._models[number] = _Model(moving, staying)

    def remove(self, number: int) -> None:
        """A model was closed."""
        with self._lock:
            self._models.pop(number, None)
            self._there.pop(number, None)

    def is_there(self, number: int) -> bool:
        model = self._models.get(number)
        return model is None or not model.moving or number in self._there

    def begin(self, number: int) -> None:
        """A step of a model is under way, or values of one of its batches are kept."""
        with self._lock:
            self._under_way[number] += 1

    def end(self, number: int) -> None:
        """They are not any more."""
        with self._lock:
            self._under_way[number] -= 1

    def bring(self, number: int) -> list[int] | None:
        """Those that leave before a model comes back for a step; None where it is there.

        ``WorkerDied`` says when to ask again, if all others are needed, and ``Failed`` that it never fits.
        """
        with self._lock:
            if self.is_there(number):
                if number in self._there:
                    self._there.move_to_end(number)
                return None
            moving = self._models[number].moving
            room = self._most - sum(each.staying for each in self._models.values())
            if moving > room:
                raise Failed(
                    f"it needs {moving >> 20} MiB of the device's memory, and {max(0, room) >> 20} are left beside "
                    "what models always hold; raise device_memory_bytes, or serve fewer models"
                )
            leaving = self._leaving(moving - room + sum(self._models[each].moving for each in self._there))
            for each in leaving:
                del self._there[each]
            self._there[number] = None
            self.returns += 1
            return leaving

    def _leaving(self, lacking: int) -> list[int]:
        found: list[int] = []
        for each in self._there:
            if lacking <= 0:
                break
            if not self._under_way[each]:
                found.append(each)
                lacking -= self._models[each].moving
        if lacking > 0:
            raise WorkerDied("the device's memory is full of models that are being computed", again_s=AGAIN_S)
        return found

    def lost(self, number: int) -> None:
        """A model did not come back."""
        with self._lock:
            self._there.pop(number, None)
