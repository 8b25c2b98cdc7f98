"""The interface of a device: memory, streams, events and graphs behind one small class.

A thread starts work for one lane at a time (``lane_context``), which runs it in order; copies of inputs and of answers
run beside it. A ``Mark`` is reached when the work that was started before it has ended. Lanes may run on parts of the
device (disjoint sets of its multiprocessors), numbered from 1; 0 is the whole. Models are captured once as graphs and
replayed. The twin, on the CPU with numpy arrays, does everything at once, so that the same models run without a GPU.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import prod
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np
import onnxruntime as ort

from weft.base.errors import BadRequest
from weft.devices.host import GpuCuts
from weft.models.element_types import ElementType, numpy_dtype
from weft.runtime.client_memory import LENT_FROM_BYTES, Borrowed, LendingTerms, read_fully
from weft.runtime.cuda.gates import GateMemory, HostGateMemory
from weft.runtime.tensors import Array

Tensor = Any
"""Memory of a device: a tensor of torch, or an array of numpy."""

HOST_KIND = "cpu"
"""ONNX Runtime's name for the memory of the host."""
NO_STOPS = "no server stops its steps"
"""Why a device without a stop table has no gates."""
REPEATS = 5
"""Times that a segment is run when it is timed; the median counts."""


class Mark(Protocol):
    """A point in the queue of a device's work, like an event of CUDA."""

    def wait(self) -> None:
        """Wait until all work before the mark has ended, without holding Python's lock."""
        ...


ALIGNED_BYTES = 256
"""Offset alignment of tensors in one memory, in bytes; CUDA allocates with the same alignment."""
EVICTED_BYTE = 0xFF
"""Byte that overwrites evicted memory of the twin, so that a model that still reads it gives wrong answers."""


class BorrowedTensor(NamedTuple):
    """A tensor in a region of a client's memory; the client may take it away at any time."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    source: Tensor  # the tensor's bytes, from which only the device copies
    array: Callable[[], Array]  # returns a copy of the tensor


class BorrowedPart(NamedTuple):
    """A part of a client's region, to which only the device copies an output."""

    byte_size: int
    target: Any  # what ``Device.write_out`` copies to
    least_bytes: int = 0
    """Shorter outputs are not copied there."""

    def accepts(self, byte_count: int) -> bool:
        """Whether the device may copy an output of *byte_count* bytes there."""
        return self.least_bytes <= byte_count <= self.byte_size


def as_array(tensor: Array | BorrowedTensor) -> Array:
    """The tensor in this process's own memory; a borrowed tensor is copied."""
    return tensor.array() if isinstance(tensor, BorrowedTensor) else tensor


class BorrowedFile:
    """A client's region in a file, read by system calls, so that a truncated file is an error and not a crash."""

    def __init__(self, terms: LendingTerms, file: int) -> None:
        self._file, self._start, self.byte_size = file, terms.start, terms.byte_size

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        return self.read(offset, shape, dtype)

    def read(self, offset: int, shape: tuple[int, ...], dtype: Any) -> Array:
        """Copy a tensor out of the file."""
        array: Array = np.empty(shape, dtype)
        if not read_fully(self._file, array.reshape(-1).view(np.uint8).data, self._start + offset):
            raise BadRequest("the region was cut off since it was registered; make it larger again")
        return array

    def target(self, offset: int, byte_size: int) -> BorrowedPart:
        return BorrowedPart(byte_size, partial(self._write_part, offset), LENT_FROM_BYTES)

    def _write_part(self, offset: int, data: memoryview) -> None:
        """Write an output at *offset*, unless the file was cut off, which the server reports to the client."""
        start = self._start + offset
        if os.fstat(self._file).st_size >= start + len(data):  # else it would grow
            os.pwrite(self._file, data, start)

    def write(self, data: bytes, offset: int) -> None:
        raise BadRequest("regions of the system are written by the server")

    def close(self) -> None:
        os.close(self._file)


class Movable(Protocol):
    """Memory of a device at constant addresses whose contents can be evicted to the host and brought back."""

    byte_size: int

    def tensor(self, offset: int, shape: Sequence[int], element_type: int) -> Tensor:
        """A tensor at an offset of this memory; *element_type* as ONNX numbers them."""
        ...

    def evict(self) -> None:
        """Copy contents that must come back to the host, then free the memory; no work may be using it."""
        ...

    def restore(self) -> None:
        """Allocate the memory again and restore kept contents, before any work that starts later."""
        ...

    def close(self) -> None:
        """Free the memory and kept contents, on the device and on the host."""
        ...


def aligned_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Lay out tensors of these *sizes* in one memory: their aligned offsets, and the total size; all in bytes."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNED_BYTES) * ALIGNED_BYTES  # rounded up
    return offsets, end


class Device(Protocol):
    """The operations of a GPU, and of its twin on the CPU."""

    name: str
    kind: str
    """ONNX Runtime's name for the device's memory."""
    index: int
    """The device's number, such as 0 of ``cuda:0``."""
    runs_sessions: bool
    """Whether ONNX Runtime runs on it; without, torch runs ONNX files (``torch_eager``)."""
    session_lock: threading.RLock
    """Held while sessions run, one at a time: while graphs are captured, and by steps that cannot be captured."""

    @property
    def cuts(self) -> GpuCuts:
        """How the device can be partitioned; the first access partitions it."""
        ...

    @property
    def uncut(self) -> str:
        """Why the device has no parts; empty if it has parts."""
        ...

    @property
    def part(self) -> int:
        """The number of the part that the calling thread's lane runs on; 0: the whole device."""
        ...

    def model_view(self, part: int = 0) -> Device:
        """This device with separate scratch memory, for one model whose graphs may run at the same time as others'.

        part: number of the part on which graphs run that are captured with the view; 0: the whole device.
        """
        ...

    def providers(self, *, channels_last: bool) -> list[Any]:
        """ONNX Runtime's execution providers for sessions on the device; runs of sessions are executed in order."""
        ...

    def movable(self, byte_size: int, *, kept: bool) -> Movable:
        """Allocate memory whose contents can be evicted; *kept*: ``restore`` brings the contents back."""
        ...

    def fill(self, target: Tensor, array: Array) -> None:
        """Copy an array to a tensor."""
        ...

    def as_ort_value(self, tensor: Tensor) -> Any:
        """The tensor as a value of ONNX Runtime, which sessions read and do not own."""
        ...

    def address(self, tensor: Tensor) -> int:
        """The tensor's address in the device's memory."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy between tensors of one shape, in the order of the lane's work."""
        ...

    def clone(self, tensor: Tensor) -> Tensor:
        """A copy, made in the order of the lane's work."""
        ...

    def concatenate_rows(self, sources: Sequence[tuple[Tensor, Sequence[int] | None, int]]) -> Tensor:
        """Concatenate rows of several tensors to a new tensor.

        Each source: a tensor, the indices of its rows to take or None, and if None the number of leading rows to take.
        """
        ...

    def copy_in(self, arrays: Sequence[Array | BorrowedTensor]) -> Tensor:
        """A new tensor of concatenated arrays. The copy runs beside computation; later work of the lane waits."""
        ...

    def borrow(self, terms: LendingTerms, file: int | None) -> Borrowed:
        """Open a client's region, from which ``copy_in`` reads tensors; takes over *file*."""
        ...

    def copy_out(self, tensor: Tensor) -> Array:
        """An array that holds the present values of a tensor, once a later ``mark`` of answers is reached."""
        ...

    def write_out(self, pieces: Sequence[tuple[BorrowedPart, Tensor]], *, ended: bool = False) -> Mark:
        """Start to copy tensors, which nothing overwrites, into clients' regions; returns the mark of the copies' end.

        ended: whether the work that computes the tensors has ended: then any thread may call this, and the copies wait
        for nothing. Otherwise they are copies of answers of the calling thread's lane.
        """
        ...

    def mark(self, *, answers: bool = False) -> Mark:
        """A mark after all work of the lane that was started; with *answers*, also after its copies of answers."""
        ...

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture the work of *run* as a graph; returns a function that replays it. Raises if that is impossible."""
        ...

    def kernels(self, captured: Callable[[], None]) -> int:
        """Number of kernels in a captured graph, at least 1."""
        ...

    @property
    def ungated(self) -> str:
        """Why launches on the device cannot have gates (``gates``); empty if they can."""
        ...

    def use_stops(self, stops: Array) -> None:
        """Use this stop table for the gates of all models that are opened from now on."""
        ...

    def stopped(self, slot: int) -> bool:
        """Whether the server has stopped the step with this slot of the stop table; False without a table."""
        ...

    def gate_memory(self, copies: int) -> GateMemory:
        """Memory for the gates of one rung; *copies*: the most tensors that a launch copies."""
        ...

    def gated(self, memory: GateMemory, segments: Sequence[Callable[[], None]]) -> Any:
        """Join captured segments to one graph with a gate before each, on the part of this view.

        Raises if that is impossible; ``GateMemory.launch`` launches the graph.
        """
        ...

    def run_uncaptured(self, run: Callable[[], None]) -> None:
        """Call *run*, which runs sessions, without a graph, in the order of the lane."""
        ...

    def lane_context(self, lane: int = 0) -> AbstractContextManager[Any]:
        """A context in which work of the calling thread belongs to lane number *lane*."""
        ...

    def finish(self) -> None:
        """Wait for all work that was started."""
        ...

    def timed(self, run: Callable[[], None]) -> float:
        """Seconds that the device takes for *run*, the median of several runs."""
        ...

    def register_buffer(self, memory: Array) -> None:
        """Register (pin) a buffer of the host from which inputs are copied, so that copies run beside computation."""
        ...

    def unregister_buffer(self, memory: Array) -> None:
        """Undo ``register_buffer``; no effect on a buffer that is not registered."""
        ...

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the device's memory."""
        ...

    def bandwidth(self) -> float:
        """Bytes per second that a copy within the device's memory reads and writes."""
        ...


def lacks_memory(error: Exception) -> bool:
    """Whether an error of torch or of ONNX Runtime says that the device is out of memory."""
    return any(words in str(error) for words in ("out of memory", "Failed to allocate memory"))


class AlreadyReached:
    """A mark of work that has ended."""

    def wait(self) -> None:
        """Do nothing: all work has ended."""


class HostMovable:
    """The twin of ``Movable`` memory: reads of evicted memory see a filling value, not the data."""

    def __init__(self, byte_size: int, *, kept: bool) -> None:
        self.byte_size, self._kept = byte_size, kept
        self._bytes, self._copy = np.zeros(byte_size, np.uint8), b""  # the copy: of evicted contents, if they are kept

    def tensor(self, offset: int, shape: Sequence[int], element_type: int) -> Tensor:
        kind = numpy_dtype(element_type)
        part = self._bytes[offset : offset + prod(shape) * kind.itemsize]
        return part.view(kind).reshape(tuple(shape))

    def evict(self) -> None:
        if self._kept and not self._copy:
            self._copy = self._bytes.tobytes()
        self._bytes[:] = EVICTED_BYTE

    def restore(self) -> None:
        if self._copy:
            self._bytes[:] = np.frombuffer(self._copy, np.uint8)

    def close(self) -> None:
        """Do nothing: the memory is freed with the object."""


TWIN_CUTS = GpuCuts(sms=8, cuts=((5, 3), (4, 4)))
"""How the twin can be partitioned; its parts are ordinary lanes, and captures for them are counted."""


class HostDevice:
    """The twin of a GPU on the CPU: each operation has ended when its call returns."""

    name, kind, index = "cpu", HOST_KIND, 0

    def __init__(
        self, cuts: GpuCuts = TWIN_CUTS, uncut: str = "", *, gateless: str = "", runs_sessions: bool = True
    ) -> None:
        """cuts: how the twin can be partitioned. uncut: why it has no parts. gateless: why it can have no gates."""
        self.session_lock, self.cuts, self.uncut, self.runs_sessions = threading.RLock(), cuts, uncut, runs_sessions
        self._gateless = gateless
        self._thread_lane = threading.local()  # the part that a thread works for
        self._stops: Array | None = None

    @property
    def part(self) -> int:
        return getattr(self._thread_lane, "part", 0)

    def model_view(self, part: int = 0) -> Device:
        return self

    def providers(self, *, channels_last: bool) -> list[Any]:
        return ["CPUExecutionProvider"]

    def movable(self, byte_size: int, *, kept: bool) -> Movable:
        return HostMovable(byte_size, kept=kept)

    def fill(self, target: Tensor, array: Array) -> None:
        target[...] = array

    def as_ort_value(self, tensor: Tensor) -> Any:
        return ort.OrtValue.ortvalue_from_numpy(tensor)

    def address(self, tensor: Tensor) -> int:
        return int(tensor.ctypes.data)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target[...] = source

    def clone(self, tensor: Tensor) -> Tensor:
        return tensor.copy()

    def concatenate_rows(self, sources: Sequence[tuple[Tensor, Sequence[int] | None, int]]) -> Tensor:
        picked = [
            source[:count] if rows is None else source[np.asarray(rows, np.intp)] for source, rows, count in sources
        ]
        return np.concatenate(picked)

    def copy_in(self, arrays: Sequence[Array | BorrowedTensor]) -> Tensor:
        copies = [as_array(array) for array in arrays]
        return np.concatenate(copies) if len(copies) > 1 else copies[0].copy()

    def borrow(self, terms: LendingTerms, file: int | None) -> Borrowed:
        if file is None:
            raise BadRequest("CUDA shared memory needs a GPU, and this is its twin on the CPU")
        return BorrowedFile(terms, file)

    def copy_out(self, tensor: Tensor) -> Array:
        host_copy: Array = tensor.copy()
        return host_copy

    def write_out(self, pieces: Sequence[tuple[BorrowedPart, Tensor]], *, ended: bool = False) -> Mark:
        for part, tensor in pieces:
            part.target(tensor.reshape(-1).view(np.uint8).data)
        return AlreadyReached()

    def mark(self, *, answers: bool = False) -> Mark:
        return AlreadyReached()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        return run

    def kernels(self, captured: Callable[[], None]) -> int:
        return 1

    @property
    def ungated(self) -> str:
        return NO_STOPS if self._stops is None else self._gateless

    def use_stops(self, stops: Array) -> None:
        self._stops = stops

    def stopped(self, slot: int) -> bool:
        return self._stops is not None and bool(self._stops[slot])

    def gate_memory(self, copies: int) -> GateMemory:
        assert self._stops is not None
        return HostGateMemory(self._stops)

    def gated(self, memory: GateMemory, segments: Sequence[Callable[[], None]]) -> Any:
        return segments

    def run_uncaptured(self, run: Callable[[], None]) -> None:
        with self.session_lock:
            run()

    @contextmanager
    def lane_context(self, lane: int = 0) -> Iterator[None]:
        previous_part = self.part
        self._thread_lane.part = self.cuts.part_of(lane) if self.cuts.cuts else 0
        try:
            yield
        finally:
            self._thread_lane.part = previous_part

    def finish(self) -> None:
        """Do nothing: all work has ended."""

    def timed(self, run: Callable[[], None]) -> float:
        times_s = []
        for _ in range(REPEATS):
            began_s = perf_counter()
            run()
            times_s.append(perf_counter() - began_s)
        return median(times_s)

    def register_buffer(self, memory: Array) -> None:
        """Do nothing: the cores read any memory."""

    def unregister_buffer(self, memory: Array) -> None:
        """Do nothing: nothing was registered."""

    def memory(self) -> tuple[int, int]:
        return 1 << 40, 1 << 40  # more than any test needs

    def bandwidth(self) -> float:
        source = np.ones(1 << 22, np.uint8)
        # A copy reads and writes each byte.
        return 2 * source.nbytes / self.timed(lambda: self.copy(np.empty_like(source), source))


FLOATS: Mapping[int, int] = {
    ElementType.FLOAT: 4,
    ElementType.FLOAT16: 2,
    ElementType.BFLOAT16: 2,
    ElementType.DOUBLE: 8,
}
"""Types of numbers that a device computes with -> bytes of one number."""
