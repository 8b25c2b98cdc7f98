"""The line to a lane of a worker: steps go one way and what became of them the other, with memory for large tensors."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from weft.runtime.isolated import memory, packets
from weft.runtime.isolated.ear import Ear
from weft.runtime.isolated.packets import Garbled, Laid, Line

TEXT_WEIGHT = 64
"""How much longer than others bytes of texts take to be read."""


class StepReport(NamedTuple):
    """What a lane says of a step that has ended; nothing of it is sure."""

    number: int
    began: int
    ended: int
    made: Any
    """The number of what is kept there and the descriptions of tensors, for each part."""
    problem: Any
    source: Any
    """Where the tensors are; it holds until the next step, or the next report if they came in the packet."""
    weight: int
    """How long it takes to read, in bytes that are copied."""

    def lasting(self) -> StepReport:
        """The same, where the next report does not write over it."""
        return self if self.weight else self._replace(source=bytes(self.source))


class LaneLine:
    """One end of it; steps and reports have as many places in memory as steps may be under way, in turn."""

    def __init__(self, line: Line, ear: Ear, places: int = 1, kept_bytes: int = memory.KEPT_BYTES) -> None:
        self.line, self.ear = line, ear
        self.hearing = threading.Lock()
        """Held by whoever hears: the ear, who waits for a step at the end, and who sees the worker to its end."""
        self.beside: set[int] = set()
        """Steps whose reports are being read on another thread; later ones wait behind them."""
        self._places, self._kept_bytes, self._sent = places, kept_bytes, 0
        self._outward: dict[int, memory.TensorMemory] = {}
        self._inward: dict[int, memory.TensorMemory] = {}

    def send(self, head: list[Any], laid: Laid, lent: Sequence[int] = ()) -> None:
        """Send a step; large tensors go into the memory, which is passed on if it is new, before the files *lent*."""
        place = self._sent % self._places
        self._sent += 1
        if laid.size <= packets.INLINE_BYTES:
            head += (place, len(lent))
            self.line.send(head, laid.in_a_row(), lent, wait=False)
            return
        files: list[int] = []
        found = self._outward.get(place)
        if found is None or found.size < laid.size:
            found, file = memory.made(laid.size, self._kept_bytes)
            self._outward[place] = found
            files.append(file)
        try:
            found.write(laid.pieces)
            self.line.send([*head, place, len(files) + len(lent)], files=[*files, *lent], wait=False)
        except BaseException:
            if files:  # the other side does not have it
                del self._outward[place]
            raise
        finally:
            packets.close_all(files)
            if found.size > self._kept_bytes:
                self._outward.pop(place, None)

    def hear(self) -> StepReport:
        """What was said, without waiting for it: BlockingIOError if nothing was, EOFError if nothing ever will be."""
        head, tensors, files = self.line.receive(wait=False)
        try:
            kind, number, began, ended, made, shared, problem = head
            if kind == "over" and not (shared or files):
                return StepReport(number, began, ended, made, problem, tensors, 0)
            if kind != "over" or len(files) > 1 or shared not in range(1, self._places + 1):
                raise Garbled(f"{kind!r} with {len(files)} files is nothing a lane says")
            return StepReport(number, began, ended, made, problem, self._seen(shared, files), _weight(made))
        finally:
            if files:
                packets.close_all(files)  # those that nobody took

    def _seen(self, place: int, files: list[int]) -> Any:
        """What a report has in the memory of a place, which may come with it."""
        if files:
            self._inward[place] = memory.taken(files.pop())
        found = self._inward.get(place)
        if found is None:
            raise Garbled("no memory was sent")
        if found.size > self._kept_bytes:
            del self._inward[place]
        return found.bytes


def _weight(made: Any) -> int:
    sizes = [size * (TEXT_WEIGHT if kind == "BYTES" else 1) for _, answers in made for _, kind, _, _, size in answers]
    return int(sum(sizes))
