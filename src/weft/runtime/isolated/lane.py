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
from weft.runtime.isolated.packets import Garbled, Line, TensorLayout
from weft.runtime.onnxruntime_cpu.lane import CpuLane, ScratchMemory


class SocketReader:
    """Calls back when a report can be read from a line, on the event loop of the thread that opened the lanes.

    So a report wakes only the thread that waits for it. If no loop runs, a new thread runs one.
    """

    def __init__(self) -> None:
        self._loop_thread: threading.Thread | None = None
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = asyncio.new_event_loop()
            self._loop_thread = threading.Thread(target=self._loop.run_forever, name="socket reader", daemon=True)
            self._loop_thread.start()

    def add(self, line: Line, read_report: Callable[[], bool]) -> None:
        """Call *read_report* whenever *line* is readable, until it returns False. May be called on any thread."""

        def on_readable() -> None:
            if not read_report():
                self._loop.remove_reader(line.file)

        self._loop.call_soon_threadsafe(self._loop.add_reader, line.file, on_readable)

    def remove(self, line: Line) -> None:
        """Stop watching a line, and close it. May be called on any thread."""
        try:
            self._loop.call_soon_threadsafe(self._stop_watching, line)
        except RuntimeError:  # the loop has ended
            line.close()

    def _stop_watching(self, line: Line) -> None:
        if line.file >= 0:
            self._loop.remove_reader(line.file)
            line.close()

    def close(self) -> None:
        """Stop and join the thread, if one was started."""
        if self._loop_thread:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop_thread.join()
            self._loop.close()
            self._loop_thread = None


TEXT_WEIGHT = 64
"""Decoding a byte of text takes about this many times as long as copying a byte of numbers (for ``StepReport``)."""


class StepReport(NamedTuple):
    """A lane's report of a step that has ended. It comes from a worker that may be compromised: check every field."""

    number: int
    began: int  # when the step began, in ns of a monotonic clock, as ``ended``
    ended: int
    outputs: Any
    """For each part of the batch: the number of the values that the worker keeps, the descriptions of answers, and what
    was written into clients' regions (``describe_written``)."""
    problem: Any  # the error as ``encode_error`` returns it, or None
    computed: Any  # how many segments were computed, if a gate ended the step; else None
    source: Any
    """The bytes of the tensors; valid until the next step, or the next report if they came in the packet."""
    weight: int
    """Estimated cost of reading the report, in bytes of numbers; 0 if its tensors came in the packet."""

    def lasting(self) -> StepReport:
        """The same report, with tensors in memory that the next report does not overwrite."""
        return self if self.weight else self._replace(source=bytes(self.source))


class LaneLine:
    """The server's end of the connection to a worker's lane.

    Large tensors travel in shared memory, in *slots* buffers per direction: one for each step that may be under way,
    used in turn.
    """

    def __init__(
        self, line: Line, socket_reader: SocketReader, slots: int = 1, kept_bytes: int = packets.KEPT_BYTES
    ) -> None:
        """slots: buffers per direction. kept_bytes: larger buffers are freed after use."""
        self.line, self.socket_reader = line, socket_reader
        self.reading = threading.Lock()
        """Held while reports are read, so that they are handled in order. Readers are the socket reader, the thread
        that waits for the end of a step, and the one that handles the worker's death."""
        self.handed_over: set[int] = set()
        """Numbers of steps whose reports are being read on another thread; later reports wait behind them."""
        self._slots, self._kept_bytes, self._sent = slots, kept_bytes, 0  # sent: the number of steps
        self._outward: dict[int, packets.TensorMemory] = {}
        """Slot -> memory for the tensors of steps; ``_inward``: slot + 1 -> for those of reports."""
        self._inward: dict[int, packets.TensorMemory] = {}

    def send(self, head: list[Any], layout: TensorLayout, lent: Sequence[int] = ()) -> None:
        """Send a step: *head*, completed by slot and number of files to a ``StepMessage``, and its tensors.

        Large tensors go into shared memory; its file, if new, is sent before the files *lent* of clients' regions.
        """
        slot = self._sent % self._slots
        self._sent += 1
        if layout.size <= packets.INLINE_BYTES:
            head += (slot, len(lent))
            self.line.send(head, layout.padded_pieces(), lent, wait=False)
            return
        files: list[int] = []
        memory = self._outward.get(slot)
        if memory is None or memory.size < layout.size:
            memory, file = packets.create_memory(layout.size, self._kept_bytes)
            self._outward[slot] = memory
            files.append(file)
        try:
            memory.write(layout.pieces)
            self.line.send([*head, slot, len(files) + len(lent)], files=[*files, *lent], wait=False)
        except BaseException:
            if files:  # the other side did not get the new memory
                del self._outward[slot]
            raise
        finally:
            packets.close_all(files)
            if memory.size > self._kept_bytes:
                self._outward.pop(slot, None)

    def receive_report(self) -> StepReport:
        """The next report, without waiting: BlockingIOError if there is none, EOFError if the worker is gone."""
        head, tensors, files = self.line.receive(wait=False)
        try:
            # place: 0 if the tensors are in the packet, else in the shared memory of slot place - 1.
            kind, number, began, ended, outputs, place, problem, computed = head
            if kind == "over" and not (place or files):
                return StepReport(number, began, ended, outputs, problem, computed, source=tensors, weight=0)
            if kind != "over" or len(files) > 1 or place not in range(1, self._slots + 1):
                raise Garbled(f"{kind!r} with {len(files)} files is no message of a lane")
            source, weight = self._reply_memory(place, files), _decoding_cost(outputs)
            return StepReport(number, began, ended, outputs, problem, computed, source, weight)
        finally:
            if files:
                packets.close_all(files)  # the files that no report took over

    def _reply_memory(self, place: int, files: list[int]) -> Any:
        """The shared memory of slot *place* - 1; its file came with the report if the memory is new."""
        if files:
            self._inward[place] = packets.map_memory(files.pop())
        memory = self._inward.get(place)
        if memory is None:
            raise Garbled("no memory was sent")
        if memory.size > self._kept_bytes:  # the worker frees its end after the report, too
            del self._inward[place]
        return memory.bytes


def _decoding_cost(outputs: Any) -> int:
    """The cost of reading the tensors of a report, in bytes of numbers; *outputs*: as in ``StepReport``."""
    tensors = [tensor for _, answers, _ in outputs for tensor in answers]
    return int(sum(size * (TEXT_WEIGHT if kind == "BYTES" else 1) for _, kind, _, _, size in tensors))


AHEAD_KEPT_BYTES = 256 << 20
"""Bytes of shared memory that a lane of a device keeps: mapping and registering it with the driver is slow."""


class RunElsewhere(Protocol):
    """A step of this lane that runs in a worker."""

    def await_end(self, patience_s: float | None) -> bool:
        """Wait up to *patience_s* seconds for the end of the step; False after a timeout."""
        ...

    def give_way(self) -> None:
        """Lower the priority of the step's thread."""
        ...


class IsolatingLane(CpuLane):
    """A lane of the server that also stands for the lane of the same number in every worker."""

    def __init__(
        self,
        index: int,
        now: Callable[[], int],
        socket_reader: SocketReader,
        core: int | None = None,
        scratch: ScratchMemory | None = None,
        ahead: int = 0,
    ) -> None:
        """now: the clock in ns. socket_reader: reads the workers' reports. core: its threads are pinned to it, if any.

        ahead: how many steps its workers accept while they run one.
        """
        super().__init__(index, now, core, scratch)
        self.index, self.socket_reader, self.core = index, socket_reader, core
        self.ahead, self.apart = ahead, ahead > 0  # only devices, which have memory of their own, queue steps
        self.kept_bytes = AHEAD_KEPT_BYTES if ahead else packets.KEPT_BYTES
        self.run: RunElsewhere | None = None
        """The last step that was sent to a worker."""
        self.carried: set[int] = set()
        """Numbers of steps whose tensors are being copied on another thread; later steps wait behind them."""

    def give_way(self) -> None:
        super().give_way()
        if self.run:
            self.run.give_way()

    def close(self, patience_s: float | None = None) -> bool:
        end_s = None if patience_s is None else time.monotonic() + patience_s
        ended = self.run is None or self.run.await_end(patience_s)
        return super().close(None if end_s is None else max(0.0, end_s - time.monotonic())) and ended
