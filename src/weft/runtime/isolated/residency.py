"""Which models of a worker are in the device's memory: for one that has left, others leave that were used before them.

What a model always holds there is counted as well. One of which something is under way stays; as long as another one
waits for its room, it begins no more. Steps on different lanes are not started in the order in which they were sent: a
model that leaves with one comes back on another lane when that has ended.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from weft.base.errors import Failed, WorkerDied

AGAIN_S = 0.005
"""When a step is worth another try, if all that is there is being computed."""
CLAIM_S = 0.1
"""How long others begin no more for a model that waits for room, and has not asked again."""


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
        self.movable: set[int] = set()
        """Those that can leave; nothing has to be known of others."""
        self._there: OrderedDict[int, None] = OrderedDict()
        """Those that are there, the one used least recently first."""
        self._unsure: set[int] = set()
        """Those that may not have come back."""
        self._leaving_on: dict[int, int] = {}
        """Those that leave with a step which has not ended, and its lane."""
        self._under_way: Counter[int] = Counter()
        self._claim, self._claimed_until_s = 0, 0.0
        """Which model waits for room."""
        self.returns = 0
        """How often one has come back."""

    def add(self, number: int, moving: int, staying: int) -> None:
        """A model was opened, and has left; one without moving bytes stays for good."""
        with self._lock:
            self._models[number] = _Model(moving, staying)
            if moving:
                self.movable.add(number)

    def remove(self, number: int) -> None:
        """A model was closed."""
        with self._lock:
            self._models.pop(number, None)
            self.movable.discard(number)
            self._under_way.pop(number, None)
            self._there.pop(number, None)
            self._unsure.discard(number)

    def is_there(self, number: int) -> bool:
        return number not in self.movable or number in self._there

    def begin(self, number: int) -> None:
        """A step of a model is under way, or values of one of its batches are kept."""
        if number in self.movable:
            with self._lock:
                self._under_way[number] += 1

    def end(self, number: int) -> None:
        """They are not any more."""
        if number in self.movable:
            with self._lock:
                self._under_way[number] -= 1

    def bring(self, number: int, *, begins: bool = True, lane: int = 0) -> list[int] | None:
        """Those that leave before a model comes back for a step on a lane; None where it is there.

        begins: the step is the first of its batch.
        ``WorkerDied`` says when to ask again, if others are needed, and ``Failed`` that it never fits.
        """
        if number not in self.movable:
            return None
        with self._lock:
            if self.is_there(number):
                return self._used(number, begins)
            if self._leaving_on.get(number, lane) != lane:
                raise WorkerDied("it is just leaving the device's memory", again_s=AGAIN_S)
            moving = self._models[number].moving
            room = self._most - sum(model.staying for model in self._models.values())
            if moving > room:
                raise Failed(
                    f"it needs {moving >> 20} MiB of the device's memory, and {max(0, room) >> 20} are left beside "
                    "what models always hold; raise device_memory_bytes, or serve fewer models"
                )
            lacking = moving - room + sum(self._models[other].moving for other in self._there)
            leaving = self._leaving(number, lacking)
            for other in leaving:
                del self._there[other]
                self._unsure.discard(other)
            self._leaving_on |= dict.fromkeys(leaving, lane)
            self._there[number] = None
            self.returns += 1
            return leaving

    def _used(self, number: int, begins: bool) -> list[int] | None:
        """A model that is there is used."""
        if number not in self._there:
            return None
        if begins and self._claim != number and time.monotonic() < self._claimed_until_s:
            raise WorkerDied("it gives way to a model that waits for the device's memory", again_s=AGAIN_S)
        self._there.move_to_end(number)
        return [] if number in self._unsure else None

    def _leaving(self, number: int, lacking: int) -> list[int]:
        """Who makes room for a model; the first one that finds none waits, and others begin no more until it has."""
        leaving: list[int] = []
        for other in self._there:
            if lacking <= 0:
                break
            if not self._under_way[other]:
                leaving.append(other)
                lacking -= self._models[other].moving
        now_s, waits = time.monotonic(), self._claim == number
        if lacking > 0:
            if waits or now_s >= self._claimed_until_s:
                self._claim, self._claimed_until_s = number, now_s + CLAIM_S
            raise WorkerDied("the device's memory is full of models that are being computed", again_s=AGAIN_S)
        if waits:
            self._claimed_until_s = 0.0
        return leaving

    def _left(self, leaving: Sequence[int]) -> None:
        for other in leaving:
            self._leaving_on.pop(other, None)

    def unsent(self, number: int, leaving: list[int]) -> None:
        """The worker was not told of what should move."""
        with self._lock:
            self._left(leaving)
            if number not in self._unsure:
                self._there.pop(number, None)
            for other in reversed(leaving):
                if other in self._models:
                    self._there[other] = None
                    self._there.move_to_end(other, last=False)

    def came(self, number: int, leaving: Sequence[int] = ()) -> None:
        """A step that had a model come back, and others leave, was computed."""
        with self._lock:
            self._left(leaving)
            self._unsure.discard(number)

    def failed(self, number: int, leaving: Sequence[int] = ()) -> None:
        """It is not known whether a model came back; it counts as there, and the next steps have it come back again."""
        with self._lock:
            self._left(leaving)
            if number in self._there:
                self._unsure.add(number)
