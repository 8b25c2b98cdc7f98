"""Eviction: which models of a worker are in the device's memory. Least recently used models make room for others.

Memory that a model always holds is counted as well. A model with steps or values under way is not evicted; while
another model waits for its room, it starts no new batches. Steps on different lanes do not start in the order in which
they were sent: a model that is evicted by a step of one lane returns by another lane only when that step has ended.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from weft.base.errors import Failed, WorkerDied

AGAIN_S = 0.005
"""Seconds until a step is retried if no model can be evicted: about one short segment."""
CLAIM_S = 0.1
"""Seconds after which the claim of a model that waits for room expires, in case its request was cancelled."""


class _Model(NamedTuple):
    moving_bytes: int  # freed when the model is evicted
    staying_bytes: int  # always held


class Residency:
    """Tracks which models of one worker, by number, are in the device's memory; called on any thread."""

    def __init__(self, most_bytes: int) -> None:
        """most_bytes: memory that all models together may hold."""
        # The lock guards all fields. It is reentrant: the garbage collector may free values, and so call ``end``, while
        # the same thread holds it.
        self._most_bytes, self._lock = most_bytes, threading.RLock()
        self._models: dict[int, _Model] = {}
        self.movable: set[int] = set()
        """Models that can be evicted; all others are always in memory."""
        self._resident: OrderedDict[int, None] = OrderedDict()  # models in memory, the least recently used first
        self._unconfirmed: set[int] = set()
        """Models whose return failed or was not confirmed; their next step brings them back again."""
        self._evicting_lane: dict[int, int] = {}  # model that is being evicted -> the lane of the step that evicts it
        self._under_way: Counter[int] = Counter()
        """Model -> number of its steps that were sent, and of kept values of its batches."""
        self._claim, self._claimed_until_s = 0, 0.0  # the model that waits for room, and when its claim expires
        self.returns = 0
        """How often a model was brought back, for the metrics."""

    def add(self, number: int, moving_bytes: int, staying_bytes: int) -> None:
        """Add a model that was just opened; if it can be evicted, its worker evicted it already.

        moving_bytes: what an eviction frees; 0: it is never evicted. staying_bytes: what it always holds.
        """
        with self._lock:
            self._models[number] = _Model(moving_bytes, staying_bytes)
            if moving_bytes:
                self.movable.add(number)

    def remove(self, number: int) -> None:
        """Remove a model that was closed."""
        with self._lock:
            self._models.pop(number, None)
            self.movable.discard(number)
            self._under_way.pop(number, None)
            self._resident.pop(number, None)
            self._unconfirmed.discard(number)

    def is_there(self, number: int) -> bool:
        """Whether a model is in the device's memory."""
        return number not in self.movable or number in self._resident

    def begin(self, number: int) -> None:
        """Count a step that was sent, or kept values of a batch: until ``end``, the model cannot be evicted."""
        if number in self.movable:
            with self._lock:
                self._under_way[number] += 1

    def end(self, number: int) -> None:
        """Undo one ``begin``."""
        if number in self.movable:
            with self._lock:
                self._under_way[number] -= 1

    def make_room_for(self, number: int, *, begins: bool = True, lane: int = 0) -> list[int] | None:
        """Choose the models to evict before a step of model *number* on *lane*, and record that the model returns.

        Returns None if the model is in memory. begins: the step is the first of its batch. Raises ``WorkerDied`` with
        the delay of a retry if the other models are in use, ``Failed`` if the model can never fit.
        """
        if number not in self.movable:
            return None
        with self._lock:
            if self.is_there(number):
                return self._mark_used(number, begins)
            if self._evicting_lane.get(number, lane) != lane:
                raise WorkerDied("it is just leaving the device's memory", again_s=AGAIN_S)
            moving_bytes = self._models[number].moving_bytes
            room_bytes = self._most_bytes - sum(model.staying_bytes for model in self._models.values())
            if moving_bytes > room_bytes:
                raise Failed(
                    f"it needs {moving_bytes >> 20} MiB of the device's memory, and {max(0, room_bytes) >> 20} are "
                    "left beside what models always hold; raise device_memory_bytes, or serve fewer models"
                )
            resident_bytes = sum(self._models[other].moving_bytes for other in self._resident)
            evicted = self._choose_evicted(number, resident_bytes + moving_bytes - room_bytes)
            for other in evicted:
                del self._resident[other]
                self._unconfirmed.discard(other)
            self._evicting_lane |= dict.fromkeys(evicted, lane)
            self._resident[number] = None
            self.returns += 1
            return evicted

    def _mark_used(self, number: int, begins: bool) -> list[int] | None:
        """Mark a model that is in memory as the most recently used; returns and raises as ``make_room_for``."""
        if number not in self._resident:
            return None
        if begins and self._claim != number and time.monotonic() < self._claimed_until_s:
            raise WorkerDied("it gives way to a model that waits for the device's memory", again_s=AGAIN_S)
        self._resident.move_to_end(number)
        return [] if number in self._unconfirmed else None  # []: bring it back again, and evict nothing

    def _choose_evicted(self, number: int, lacking_bytes: int) -> list[int]:
        """Choose least recently used models to evict for model *number*, so that *lacking_bytes* are freed.

        If all others are being computed, the first model that lacks room claims it: other models start no new steps
        until it has run, or the claim expires. Raises ``WorkerDied`` with the time of a retry.
        """
        evicted: list[int] = []
        for other in self._resident:
            if lacking_bytes <= 0:
                break
            if not self._under_way[other]:
                evicted.append(other)
                lacking_bytes -= self._models[other].moving_bytes
        now_s, has_claim = time.monotonic(), self._claim == number
        if lacking_bytes > 0:
            if has_claim or now_s >= self._claimed_until_s:
                self._claim, self._claimed_until_s = number, now_s + CLAIM_S
            raise WorkerDied("the device's memory is full of models that are being computed", again_s=AGAIN_S)
        if has_claim:
            self._claimed_until_s = 0.0
        return evicted

    def _forget_lanes(self, evicted: Sequence[int]) -> None:
        """Record that the step that evicted these models has ended: they may return on any lane."""
        for other in evicted:
            self._evicting_lane.pop(other, None)

    def unsent(self, number: int, evicted: list[int]) -> None:
        """Undo ``make_room_for`` for a step that could not be sent."""
        with self._lock:
            self._forget_lanes(evicted)
            if number not in self._unconfirmed:  # such a model was counted as in memory before
                self._resident.pop(number, None)
            for other in reversed(evicted):  # to the front again, the least recently used first
                if other in self._models:
                    self._resident[other] = None
                    self._resident.move_to_end(other, last=False)

    def confirm(self, number: int, evicted: Sequence[int] = ()) -> None:
        """Record that a step was computed that brought model *number* back and evicted the others."""
        with self._lock:
            self._forget_lanes(evicted)
            self._unconfirmed.discard(number)

    def failed(self, number: int, evicted: Sequence[int] = ()) -> None:
        """Record that the step failed that should have brought model *number* back and evicted the others.

        The model still counts as in memory, and its next step brings it back again, which does no harm if it is there.
        """
        with self._lock:
            self._forget_lanes(evicted)
            if number in self._resident:
                self._unconfirmed.add(number)
