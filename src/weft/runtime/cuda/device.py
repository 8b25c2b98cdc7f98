"""The interface of a device: memory, streams, events and graphs behind one small class.

Work that a thread starts runs in the order of its lane (``on``); copies of inputs and of answers run beside it. A
``Mark`` is reached when the work that was started before it has ended. Lanes may be parts of the device, numbered from
1; 0 is the whole. The twin, on the CPU with numpy arrays, does everything at once, so that the same models run without
a GPU.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import prod
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np
import onnxruntime as ort

from weft.base.errors import BadRequest
from weft.devices.host import GpuCuts
from weft.models.element_types import ElementType, numpy_dtype
from weft.runtime.client_memory import Borrowed, LendingTerms, read_fully
from weft.runtime.tensors import Array

Tensor = Any
"""Memory of a device: a tensor of torch, or an array of numpy."""

HOST_KIND = "cpu"
"""ONNX Runtime's name for the memory of the host."""
REPEATS = 5
"""Times that a segment is run when it is timed; the median counts."""


class Mark(Protocol):
    """A point in the queue of a device's work, like an event of CUDA."""

    def wait(self) -> None:
        """Wait until all work before the mark has ended, without holding Python's lock."""
        ...


ALIGNED_BYTES = 256
"""Offset alignment of tensors in one memory, in bytes; CUDA allocates with the same alignment."""
LEFT = 0xFF
"""Byte that overwrites evicted memory of the twin, so that a model that still reads it gives wrong answers."""


class BorrowedTensor(NamedTuple):
    """A tensor in a region of a client's memory; the client may take it away at any time."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    source: Tensor
    """The tensor's bytes, from which only the device copies."""
    array: Callable[[], Array]
    """Returns a copy of the tensor."""


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

    def leave(self) -> None:
        """Copy contents that must come back to the host, then free the memory; no work may be using it."""
        ...

    def come_back(self) -> None:
        """Allocate the memory again and restore kept contents, before any work that starts later."""
        ...

    def close(self) -> None:
        """Free the memory and kept contents, on the device and on the host."""
        ...


def places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Lay out tensors of these sizes (bytes) in one memory: their aligned offsets, and the total size."""
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
    building: threading.RLock
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
        """The part of the calling thread's lane."""
        ...

    def own(self, part: int = 0) -> Device:
        """A view of the device for one model whose graphs run beside others', with scratch memory of its own.

        part: graphs that are captured with the view run on that part; 0: the whole device.
        """
        ...

    def providers(self, *, channels_last: bool) -> list[Any]:
        """ONNX Runtime's execution providers for sessions on the device; runs of sessions are executed in order."""
        ...

    def movable(self, byte_size: int, *, kept: bool) -> Movable:
        """Allocate memory whose contents can be evicted; *kept*: the contents come back as they were."""
        ...

    def fill(self, target: Tensor, array: Array) -> None:
        """Copy an array to a tensor."""
        ...

    def shared(self, tensor: Tensor) -> Any:
        """The tensor as a value of ONNX Runtime, which sessions read and do not own."""
        ...

    def address(self, tensor: Tensor) -> int:
        """The tensor's address on the device."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy between tensors of one shape, in the order of the lane's work."""
        ...

    def clone(self, tensor: Tensor) -> Tensor:
        """A copy, made in the order of the lane's work."""
        ...

    def taken(self, sources: Sequence[tuple[Tensor, Sequence[int] | None, int]]) -> Tensor:
        """Concatenate rows of several tensors to a new tensor.

        Each source is a tensor, the indices of the rows to take, and if these are None the number of leading rows.
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

    def mark(self, *, answers: bool = False) -> Mark:
        """A mark after all work that was started; with *answers*, also after all copies of answers."""
        ...

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture the work of *run* as a graph; returns a function that replays it. Raises if that is impossible."""
        ...

    def kernels(self, captured: Callable[[], None]) -> int:
        """Number of kernels in a captured graph, at least 1."""
        ...

    def plainly(self, run: Callable[[], None]) -> None:
        """Run sessions without a graph, in the order of the lane."""
        ...

    def on(self, lane: int = 0) -> AbstractContextManager[Any]:
        """Make the calling thread work for a lane, as a context."""
        ...

    def finish(self) -> None:
        """Wait for all work that was started."""
        ...

    def timed(self, run: Callable[[], None]) -> float:
        """Seconds that the device takes for *run*."""
        ...

    def took(self, memory: Array) -> None:
        """Register a buffer of the host from which inputs are copied, so that copies run beside computation."""
        ...

    def dropped(self, memory: Array) -> None:
        """Unregister a buffer that was registered with ``took``, if any."""
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
        self._bytes, self._copy = np.zeros(byte_size, np.uint8), b""

    def tensor(self, offset: int, shape: Sequence[int], element_type: int) -> Tensor:
        kind = numpy_dtype(element_type)
        part = self._bytes[offset : offset + prod(shape) * kind.itemsize]
        return part.view(kind).reshape(tuple(shape))

    def leave(self) -> None:
        if self._kept and not self._copy:
            self._copy = self._bytes.tobytes()
        self._bytes[:] = LEFT

    def come_back(self) -> None:
        if self._copy:
            self._bytes[:] = np.frombuffer(self._copy, np.uint8)

    def close(self) -> None:
        """Do nothing: the memory is freed with the object."""


TWIN_CUTS = GpuCuts(sms=8, cuts=((5, 3), (4, 4)))
"""How the twin can be partitioned; its parts are ordinary lanes, and captures for them are counted."""


class HostDevice:
    """The twin of a GPU on the CPU: each operation has ended when its call returns."""

    name, kind, index = "cpu", HOST_KIND, 0

    def __init__(self, cuts: GpuCuts = TWIN_CUTS, uncut: str = "") -> None:
        """cuts: how the twin can be partitioned. uncut: why it has no parts."""
        self.building, self.cuts, self.uncut = threading.RLock(), cuts, uncut
        self._here = threading.local()  # the part that a thread works for

    @property
    def part(self) -> int:
        return getattr(self._here, "part", 0)

    def own(self, part: int = 0) -> Device:
        return self

    def providers(self, *, channels_last: bool) -> list[Any]:
        return ["CPUExecutionProvider"]

    def movable(self, byte_size: int, *, kept: bool) -> Movable:
        return HostMovable(byte_size, kept=kept)

    def fill(self, target: Tensor, array: Array) -> None:
        target[...] = array

    def shared(self, tensor: Tensor) -> Any:
        return ort.OrtValue.ortvalue_from_numpy(tensor)

    def address(self, tensor: Tensor) -> int:
        return int(tensor.ctypes.data)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target[...] = source

    def clone(self, tensor: Tensor) -> Tensor:
        return tensor.copy()

    def taken(self, sources: Sequence[tuple[Tensor, Sequence[int] | None, int]]) -> Tensor:
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

    def mark(self, *, answers: bool = False) -> Mark:
        return AlreadyReached()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        return run

    def kernels(self, captured: Callable[[], None]) -> int:
        return 1

    def plainly(self, run: Callable[[], None]) -> None:
        with self.building:
            run()

    @contextmanager
    def on(self, lane: int = 0) -> Iterator[None]:
        previous_part, self._here.part = self.part, self.cuts.part_of(lane) if self.cuts.cuts else 0
        try:
            yield
        finally:
            self._here.part = previous_part

    def finish(self) -> None:
        """Do nothing: all work has ended."""

    def timed(self, run: Callable[[], None]) -> float:
        times_s = []
        for _ in range(REPEATS):
            began_s = perf_counter()
            run()
            times_s.append(perf_counter() - began_s)
        return median(times_s)

    def took(self, memory: Array) -> None:
        """Do nothing: the cores read any memory."""

    def dropped(self, memory: Array) -> None:
        """Do nothing: nothing was registered."""

    def memory(self) -> tuple[int, int]:
        return 1 << 40, 1 << 40

    def bandwidth(self) -> float:
        source = np.ones(1 << 22, np.uint8)
        return 2 * source.nbytes / self.timed(lambda: self.copy(np.empty_like(source), source))


FLOATS: Mapping[int, int] = {
    ElementType.FLOAT: 4,
    ElementType.FLOAT16: 2,
    ElementType.BFLOAT16: 2,
    ElementType.DOUBLE: 8,
}
"""Types of numbers that a device computes with -> bytes of one number."""
