"""What a device can do, as models need it: memory, streams, events and graphs behind one small class.

Everything that a thread starts goes into the order of computing of its lane (``on``); copies of inputs and of answers
go beside it. A ``Mark`` says when what was started before it has ended. Lanes may be parts of the device, which are
numbered from 1; 0 is the whole. The twin, on the CPU with numpy arrays, does everything at once, so that the same
models run where there is no GPU.
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
"""What ONNX Runtime calls the memory of the host."""
REPEATS = 5
"""How often a segment is timed."""


class Mark(Protocol):
    """A point in the order of what was started."""

    def wait(self) -> None:
        """Return when everything before it has ended; Python's lock is not held meanwhile."""
        ...


ALIGNED_BYTES = 256
"""Tensors in one memory begin at multiples of this."""
LEFT = 0xFF
"""What the twin's memory is full of that has left."""


class BorrowedTensor(NamedTuple):
    """A tensor in a region of a client's, which may take it away at any time."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    source: Tensor
    """Its bytes, as the device copies them; nobody else looks at them."""
    array: Callable[[], Array]
    """Makes a copy of it."""


def as_array(tensor: Array | BorrowedTensor) -> Array:
    """A tensor in memory of our own."""
    return tensor.array() if isinstance(tensor, BorrowedTensor) else tensor


class BorrowedFile:
    """A region that is a file, read by calls: whoever cuts it off is told so."""

    def __init__(self, terms: LendingTerms, file: int) -> None:
        self._file, self._start, self.byte_size = file, terms.start, terms.byte_size

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        return self.read(offset, shape, dtype)

    def read(self, offset: int, shape: tuple[int, ...], dtype: Any) -> Array:
        """A copy of a tensor that lies there."""
        array: Array = np.empty(shape, dtype)
        if not read_fully(self._file, array.reshape(-1).view(np.uint8).data, self._start + offset):
            raise BadRequest("the region was cut off since it was registered; make it larger again")
        return array

    def write(self, data: bytes, offset: int) -> None:
        raise BadRequest("regions of the system are written by the server")

    def close(self) -> None:
        os.close(self._file)


class Movable(Protocol):
    """Memory of a device at addresses that stay, while what lies there can leave for the host and come back."""

    byte_size: int

    def tensor(self, offset: int, shape: Sequence[int], element_type: int) -> Tensor:
        """A tensor that lies there; *element_type* as ONNX numbers them."""
        ...

    def leave(self) -> None:
        """Give the memory back, which nothing uses; what shall come back is on the host then."""
        ...

    def come_back(self) -> None:
        """Have the memory again, and what was kept of it, before all that is started later."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


def places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where tensors of so many bytes lie behind one another, and where they end."""
    found, at = [], 0
    for size in sizes:
        found.append(at)
        at += -(-size // ALIGNED_BYTES) * ALIGNED_BYTES
    return found, at


class Device(Protocol):
    """A device, or its twin."""

    name: str
    kind: str
    """As ONNX Runtime names where memory lies."""
    index: int
    building: threading.RLock
    """Held while sessions run one by one: while graphs are captured, and by steps that cannot be."""

    @property
    def cuts(self) -> GpuCuts:
        """How it can be shared; it is cut when this is first asked for."""
        ...

    @property
    def uncut(self) -> str:
        """Why it has no parts; empty where it has."""
        ...

    @property
    def part(self) -> int:
        """The part that the calling thread's lane is."""
        ...

    def own(self, part: int = 0) -> Device:
        """It for one model, whose graphs are replayed beside others': sessions and scratch memory are the model's own.

        part: what is captured with it stays on that part.
        """
        ...

    def providers(self, *, channels_last: bool) -> list[Any]:
        """What sessions are opened with; their runs are in the order in which they are started."""
        ...

    def movable(self, byte_size: int, *, kept: bool) -> Movable:
        """New memory whose contents can leave; *kept*: they come back as they were."""
        ...

    def fill(self, target: Tensor, array: Array) -> None:
        """Copy an array to a tensor."""
        ...

    def shared(self, tensor: Tensor) -> Any:
        """The tensor as a value that sessions take and do not own."""
        ...

    def address(self, tensor: Tensor) -> int:
        """Where it lies."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy between tensors of one shape, in the order of computing."""
        ...

    def clone(self, tensor: Tensor) -> Tensor:
        """A copy, in the order of computing."""
        ...

    def taken(self, sources: Sequence[tuple[Tensor, Sequence[int] | None, int]]) -> Tensor:
        """A new tensor of some rows of others: of each the rows that are named, or else so many from the first."""
        ...

    def copy_in(self, arrays: Sequence[Array | BorrowedTensor]) -> Tensor:
        """A new tensor of arrays, row behind row; the copy goes beside what is computed, and what follows waits."""
        ...

    def borrow(self, terms: LendingTerms, file: int | None) -> Borrowed:
        """A region of a client's, whose tensors ``copy_in`` takes from where they lie; the file is the device's."""
        ...

    def copy_out(self, tensor: Tensor) -> Array:
        """An array that holds a tensor as it is now, once a later ``mark`` of answers is reached."""
        ...

    def mark(self, *, answers: bool = False) -> Mark:
        """A point behind all that was started to compute, or behind all answers that were copied, too."""
        ...

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """What does the same again, as fast as can be; raises where that cannot be had."""
        ...

    def kernels(self, captured: Callable[[], None]) -> int:
        """How many kernels something has that was captured, at least 1."""
        ...

    def plainly(self, run: Callable[[], None]) -> None:
        """Run sessions in the order of computing."""
        ...

    def on(self, lane: int = 0) -> AbstractContextManager[Any]:
        """Work with the device on this thread, in the order of a lane."""
        ...

    def finish(self) -> None:
        """Wait for all that was started."""
        ...

    def timed(self, run: Callable[[], None]) -> float:
        """Seconds that the device takes for it."""
        ...

    def took(self, memory: Array) -> None:
        """Inputs will lie there."""
        ...

    def dropped(self, memory: Array) -> None:
        """They will not any more."""
        ...

    def memory(self) -> tuple[int, int]:
        """Bytes that are free, and all there are."""
        ...

    def bandwidth(self) -> float:
        """Bytes per second that its memory moves when it copies."""
        ...


def lacks_memory(error: Exception) -> bool:
    """Whether an error of torch or of ONNX Runtime says that the device's memory is used up."""
    return any(words in str(error) for words in ("out of memory", "Failed to allocate memory"))


class AlreadyReached:
    """A mark of something that has ended."""

    def wait(self) -> None:
        """Nothing is under way."""


class HostMovable:
    """The twin of memory that can leave: whoever looks at it meanwhile sees that it has left."""

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
        """It goes with who has it."""


TWIN_CUTS = GpuCuts(sms=8, cuts=((5, 3), (4, 4)))
"""How the twin can be cut; its parts are lanes like others, and what is captured for them is counted."""


class HostDevice:
    """The twin: the cores of this machine, where everything has ended when it was started."""

    name, kind, index = "cpu", HOST_KIND, 0

    def __init__(self, cuts: GpuCuts = TWIN_CUTS, uncut: str = "") -> None:
        """uncut: why it has no parts."""
        self.building, self.cuts, self.uncut = threading.RLock(), cuts, uncut
        self._here = threading.local()

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
        picked = [each[:count] if rows is None else each[np.asarray(rows, np.intp)] for each, rows, count in sources]
        return np.concatenate(picked)

    def copy_in(self, arrays: Sequence[Array | BorrowedTensor]) -> Tensor:
        found = [as_array(each) for each in arrays]
        return np.concatenate(found) if len(found) > 1 else found[0].copy()

    def borrow(self, terms: LendingTerms, file: int | None) -> Borrowed:
        if file is None:
            raise BadRequest("CUDA shared memory needs a GPU, and this is its twin on the CPU")
        return BorrowedFile(terms, file)

    def copy_out(self, tensor: Tensor) -> Array:
        found: Array = tensor.copy()
        return found

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
        before, self._here.part = self.part, self.cuts.part_of(lane) if self.cuts.cuts else 0
        try:
            yield
        finally:
            self._here.part = before

    def finish(self) -> None:
        """Nothing is under way."""

    def timed(self, run: Callable[[], None]) -> float:
        times_s = []
        for _ in range(REPEATS):
            began_s = perf_counter()
            run()
            times_s.append(perf_counter() - began_s)
        return median(times_s)

    def took(self, memory: Array) -> None:
        """Any memory will do."""

    def dropped(self, memory: Array) -> None:
        """Nothing was done to it."""

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
"""Types of numbers that a device computes with -> bytes of one."""
