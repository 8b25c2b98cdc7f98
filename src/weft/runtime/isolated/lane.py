"""Lanes of a server whose models run in threads or in worker processes (``IsolatingLane``).

``LaneLine`` is the connection to a lane of a worker: steps go one way and reports of them the other, with memory for
large tensors. ``SocketReader`` calls back when a report can be read.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from weft.runtime.isolated import packets
from weft.runtime.isolated.packets import Garbled, Laid, Line
from weft.runtime.onnxruntime_cpu.lane import CpuLane, ScratchMemory


class SocketReader:
    """Calls back, on one thread, when something can be read from a line: on the event loop that opened the lanes.

    So the end of a step wakes the thread that has been waiting for it, and no other. Where no loop runs, a thread of
    its own runs one.
    """

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


TEXT_WEIGHT = 64
"""How much longer than others bytes of texts take to be read."""


class StepReport(NamedTuple):
    """What a lane says of a step that has ended; nothing of it is sure."""

    number: int
    began: int
    ended: int
    outputs: Any
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

    def __init__(self, line: Line, ear: SocketReader, places: int = 1, kept_bytes: int = packets.KEPT_BYTES) -> None:
        self.line, self.ear = line, ear
        self.hearing = threading.Lock()
        """Held by whoever hears: the ear, who waits for a step at the end, and who sees the worker to its end."""
        self.beside: set[int] = set()
        """Steps whose reports are being read on another thread; later ones wait behind them."""
        self._places, self._kept_bytes, self._sent = places, kept_bytes, 0
        self._outward: dict[int, packets.TensorMemory] = {}
        self._inward: dict[int, packets.TensorMemory] = {}

    def send(self, head: list[Any], laid: Laid, lent: Sequence[int] = ()) -> None:
        """Send a step; large tensors go into the memory, which is passed on if it is new, before the files *lent*."""
        place = self._sent % self._places
        self._sent += 1
        if laid.size <= packets.INLINE_BYTES:
            head += (place, len(lent))
            self.line.send(head, laid.in_a_row(), lent, wait=False)
            return
        files: list[int] = []
        memory = self._outward.get(place)
        if memory is None or memory.size < laid.size:
            memory, file = packets.create_memory(laid.size, self._kept_bytes)
            self._outward[place] = memory
            files.append(file)
        try:
            memory.write(laid.pieces)
            self.line.send([*head, place, len(files) + len(lent)], files=[*files, *lent], wait=False)
        except BaseException:
            if files:  # the other side does not have it
                del self._outward[place]
            raise
        finally:
            packets.close_all(files)
            if memory.size > self._kept_bytes:
                self._outward.pop(place, None)

    def hear(self) -> StepReport:
        """What was said, without waiting for it: BlockingIOError if nothing was, EOFError if nothing ever will be."""
        head, tensors, files = self.line.receive(wait=False)
        try:
            kind, number, began, ended, outputs, shared, problem = head
            if kind == "over" and not (shared or files):
                return StepReport(number, began, ended, outputs, problem, tensors, 0)
            if kind != "over" or len(files) > 1 or shared not in range(1, self._places + 1):
                raise Garbled(f"{kind!r} with {len(files)} files is nothing a lane says")
            return StepReport(number, began, ended, outputs, problem, self._seen(shared, files), _weight(outputs))
        finally:
            if files:
                packets.close_all(files)  # those that nobody took

    def _seen(self, place: int, files: list[int]) -> Any:
        """What a report has in the memory of a place, which may come with it."""
        if files:
            self._inward[place] = packets.map_memory(files.pop())
        memory = self._inward.get(place)
        if memory is None:
            raise Garbled("no memory was sent")
        if memory.size > self._kept_bytes:
            del self._inward[place]
        return memory.bytes


def _weight(outputs: Any) -> int:
    tensors = [tensor for _, answers in outputs for tensor in answers]
    return int(sum(size * (TEXT_WEIGHT if kind == "BYTES" else 1) for _, kind, _, _, size in tensors))


AHEAD_KEPT_BYTES = 256 << 20
"""How much memory for tensors is kept on a lane of a device, which is registered with its driver."""


class RunElsewhere(Protocol):
    """A step of this lane that a worker computes."""

    def await_end(self, patience_s: float | None) -> bool:
        """Return when it has ended, or after so long: False."""
        ...

    def give_way(self) -> None:
        """Let others go first."""
        ...


class IsolatingLane(CpuLane):
    """A lane by its number, which every worker has, too."""

    def __init__(
        self,
        index: int,
        now: Callable[[], int],
        ear: SocketReader,
        core: int | None = None,
        scratch: ScratchMemory | None = None,
        ahead: int = 0,
    ) -> None:
        """ahead: how many steps its workers take besides the one that they run."""
        super().__init__(index, now, core, scratch)
        self.index, self.ear, self.core, self.ahead, self.apart = index, ear, core, ahead, ahead > 0
        self.kept_bytes = AHEAD_KEPT_BYTES if ahead else packets.KEPT_BYTES
        self.run: RunElsewhere | None = None
        """The last one."""
        self.carried: set[int] = set()
        """Steps whose tensors are being copied on another thread; later ones wait behind them."""

    def give_way(self) -> None:
        super().give_way()
        if self.run:
            self.run.give_way()

    def close(self, patience_s: float | None = None) -> bool:
        end_s = None if patience_s is None else time.monotonic() + patience_s
        ended = self.run is None or self.run.await_end(patience_s)
        return super().close(None if end_s is None else max(0.0, end_s - time.monotonic())) and ended
