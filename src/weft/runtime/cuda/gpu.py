"""A GPU through torch: streams, events, graphs, and copies that run beside computation.

Every lane has a stream, which is torch's current one on the lane's thread. Answers leave on another stream of the lane,
to the host or into clients' regions; inputs arrive on one that all lanes share. Sessions of ONNX Runtime are bound to a
stream of their own, on which they are warmed up and captured; graphs are replayed on the streams of lanes, so that a
model can be opened while others run. Models that run side by side each have such a stream, and scratch memory, of their
own (``model_view``). What was captured on a part of the GPU is replayed on the one stream of that part, in the order of
the lane; nothing else runs there, because torch's events cannot be recorded on streams of parts.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import copy
from functools import cache
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
import torch

from weft.devices.host import GpuCuts
from weft.runtime.client_memory import Borrowed, LendingTerms
from weft.runtime.cuda.borrowed import IpcMemory, RegisteredFile
from weft.runtime.cuda.captured import check_replayable, driver, kernels_in
from weft.runtime.cuda.device import NO_STOPS, REPEATS, BorrowedPart, BorrowedTensor, Mark, Movable, Tensor
from weft.runtime.cuda.gates import GateMemory
from weft.runtime.cuda.gpu_gates import GatedGraph, GateKernels, GpuGateMemory, NoGates, RegisteredStops
from weft.runtime.cuda.movable import GpuMovable
from weft.runtime.cuda.partitions import (
    LOW,
    NoPartitions,
    Part,
    another_stream,
    bindings,
    cut,
    follow,
)
from weft.runtime.cuda.torch_types import TYPES, as_torch
from weft.runtime.tensors import Array

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:2")  # 8 MiB for each session, not 64, and no slower
# torch 2.11 looks up the user's name when it reads a program, which a confined process may not do.
os.environ.setdefault("LOGNAME", str(os.getuid()))
ort.set_default_logger_severity(4)  # errors are raised; the log would repeat them

with suppress(NoPartitions):
    bindings()  # imported before the process is confined

_WARM_RUNS = 3
"""Runs before a capture: the first runs choose algorithms and allocate memory."""
CUT_AT = (0.36, 0.48)
"""Approximate shares of the multiprocessors that a partition cuts off; on an H200 84 + 48 and 68 + 64."""
_NON_BLOCKING = 1
"""The driver's flag of a stream that does not wait for the default stream."""
_COPIED_BYTES = 128 << 20
"""Bytes that are copied to measure the bandwidth."""


@cache
def _type_of(dtype: np.dtype[Any]) -> Any:
    """Torch's type for a numpy type."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


class _Event:
    """A mark on a stream."""

    def __init__(self, stream: Any) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()


class _LaneStreams(NamedTuple):
    """The streams of one lane: *compute* for segments, *outward* for copies of answers to the host."""

    compute: Any
    outward: Any


class _Partition(NamedTuple):
    """How a GPU is partitioned: by several cuts, each into two parts that run segments at the same time."""

    cuts: GpuCuts
    """The sizes of the parts."""
    parts: list[Part]
    """The parts of all cuts, in the order of ``cuts.parts``; empty if the GPU cannot be partitioned."""
    reason: str
    """Why it cannot; empty if it can."""


class _Replay:
    """A captured graph, of the whole GPU or of a part; calling it replays it, after earlier work of the lane."""

    def __init__(self, graph: Any, part: Part | None, device: Any) -> None:
        """part: where it was captured; None: on the whole GPU. device: torch's."""
        self.graph, self.kernels = graph, max(1, kernels_in(graph.raw_cuda_graph()))
        self._on_part = _on_part(part, device)

    def __call__(self) -> None:
        with self._on_part():
            self.graph.replay()


def _on_part(part: Part | None, device: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Make contexts in which graphs are launched on a part, in the order of the calling thread's lane; device: torch's.

    part: None: on the lane's own stream.
    """
    if part is None:
        return nullcontext
    stream = torch.cuda.ExternalStream(part.streams[LOW], device=device)

    @contextmanager
    def on_part() -> Iterator[None]:
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        follow(part, current.cuda_stream)

    return on_part


class Gpu:
    """One GPU of this machine."""

    kind = "cuda"
    runs_sessions = "CUDAExecutionProvider" in ort.get_available_providers()

    def __init__(self, index: int) -> None:
        torch.cuda.set_device(index)
        self.index, self.name = index, torch.cuda.get_device_name(index)
        # Sessions share a stream and its scratch memory, so they run one by one: in captures and in uncaptured steps.
        self.session_lock = threading.RLock()
        self._device = torch.device("cuda", index)
        self._inward = torch.cuda.Stream()  # the stream for copies of inputs, of all lanes
        self._ended_outward = torch.cuda.Stream()  # for outputs of work that has ended: it never waits for a lane
        self._pinned = set[int]()  # addresses of registered host buffers
        self._thread_lane = threading.local()  # the streams and the part of the lane that a thread works for
        self._lanes: dict[int, _LaneStreams] = {}
        self._partitions: list[_Partition] = []
        """Empty until the GPU is partitioned; then one entry.

        A list, so that all copies of this object (``model_view``) share the entry.
        """
        self._stops: list[Array] = []  # empty, or the stop table; a list for the same reason
        self._gates: list[tuple[GateKernels, RegisteredStops] | str] = []
        """Empty until the first model is opened; then what gates need, or why there are none."""
        self._use_session_stream(torch.cuda.Stream())

    def _use_session_stream(self, stream: Any, part: Part | None = None) -> None:
        """Run sessions on *stream* from now on, and create scratch memory for it.

        part: the part that the stream belongs to; None: the whole GPU.
        """
        self._sessions, self._session_part = stream, part
        self._part_views: dict[int, Gpu] = {}  # part -> the view of the GPU for the same model on that part
        self._pool = torch.cuda.graph_pool_handle()
        """Scratch memory of graphs that are replayed one at a time, so that all of them can use the same memory."""
        self._pool_user = torch.cuda.CUDAGraph()  # torch keeps the pool as long as a graph uses it
        with self.session_lock, torch.cuda.stream(stream):
            self._pool_user.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            torch.zeros(1, device=self._device)  # a graph must have content
            self._pool_user.capture_end()

    # Shares

    @property
    def cuts(self) -> GpuCuts:
        return self._partition_once().cuts

    @property
    def uncut(self) -> str:
        return self._partition_once().reason

    @property
    def part(self) -> int:
        return getattr(self._thread_lane, "part", 0)

    def _partition_once(self) -> _Partition:
        """How the GPU is partitioned; the first call partitions it."""
        with self.session_lock:
            if not self._partitions:
                self._partitions.append(self._partition())
            return self._partitions[0]

    def _partition(self) -> _Partition:
        """Partition the GPU."""
        sms = int(torch.cuda.get_device_properties(self.index).multi_processor_count)
        try:
            with torch.cuda.device(self.index):
                self.memory()  # any call gives this thread a context, which the driver needs
                partitions = [cut(self.index, round(sms * share)) for share in CUT_AT]
            cuts = GpuCuts(sms=sms, cuts=tuple((large.sms, small.sms) for small, large in partitions))
        except (NoPartitions, ValueError) as error:
            return _Partition(GpuCuts(sms=sms), [], str(error).splitlines()[0])
        # In the order of ``cuts.parts``: the larger side of each cut first.
        return _Partition(cuts, [part for small, large in partitions for part in (large, small)], "")

    def model_view(self, part: int = 0) -> Gpu:
        """A copy of this object with a session stream and scratch memory of its own; one copy for each part."""
        if part in self._part_views:
            return self._part_views[part]
        self.memory()  # any call gives this thread a context, which the driver needs
        session_part = None
        if part:
            session_part = self._partition_once().parts[part - 1]
        handle = another_stream(session_part) if session_part else _new_stream()
        view = copy(self)  # shares the lanes, the partition and the registered buffers
        view._use_session_stream(torch.cuda.ExternalStream(handle, device=self._device), session_part)
        if part:
            self._part_views[part] = view
        return view

    def _streams(self, lane: int) -> _LaneStreams:
        """The streams of a lane, created when they are first used."""
        with self.session_lock:
            if lane not in self._lanes:
                self._lanes[lane] = _LaneStreams(self._new_compute_stream(lane), torch.cuda.Stream())
            return self._lanes[lane]

    def _new_compute_stream(self, lane: int) -> Any:
        """Create the compute stream of a lane; of the lanes that share the whole GPU, the last has high priority."""
        # torch's numbers: -1 is high priority, 0 low.
        return torch.cuda.Stream(priority=-1 if lane and lane == self.cuts.streams else 0)

    # Sessions and memory

    def providers(self, *, channels_last: bool) -> list[Any]:
        options = {
            "device_id": self.index,
            "user_compute_stream": str(self._sessions.cuda_stream),
            "use_tf32": 0,  # TF32 rounds factors to 10 bits
            "prefer_nhwc": int(channels_last),
            "arena_extend_strategy": "kSameAsRequested",  # by no more than is needed
            "cudnn_conv_algo_search": "HEURISTIC",  # trials would take time and memory at every opening
        }
        return [("CUDAExecutionProvider", options), "CPUExecutionProvider"]

    def movable(self, byte_size: int, *, kept: bool) -> Movable:
        return GpuMovable(self._device, byte_size, self._inward, TYPES, kept=kept)

    def fill(self, target: Tensor, array: Array) -> None:
        target.copy_(as_torch(np.array(array, order="C")))  # a copy, as torch refuses arrays that are read-only

    def as_ort_value(self, tensor: Tensor) -> Any:
        return ort.OrtValue.from_dlpack(tensor)

    def address(self, tensor: Tensor) -> int:
        return int(tensor.data_ptr() or tensor.untyped_storage().data_ptr())  # torch gives 0 for an empty tensor

    def copy(self, target: Tensor, source: Tensor) -> None:
        source.record_stream(torch.cuda.current_stream())  # it may have been made on another lane
        target.copy_(source, non_blocking=True)

    def clone(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def concatenate_rows(self, sources: Sequence[tuple[Tensor, Sequence[int] | None, int]]) -> Tensor:
        for tensor, _, _ in sources:  # they may have been made on another lane
            tensor.record_stream(torch.cuda.current_stream())
        picked = [source[:count] if rows is None else source[list(rows)] for source, rows, count in sources]
        return torch.cat(picked)

    def copy_in(self, arrays: Sequence[Array | BorrowedTensor]) -> Tensor:
        """Concatenate arrays to a new tensor, on the stream for inputs; the lane's stream waits for it."""
        first, several = arrays[0], len(arrays) > 1
        shape = (sum(array.shape[0] for array in arrays), *first.shape[1:]) if several else first.shape
        with torch.cuda.stream(self._inward):
            target = torch.empty(shape, dtype=_type_of(first.dtype), device=self._device)
            first_row = 0
            for array in arrays:  # a single array may have no axis of rows
                part = target[first_row : first_row + array.shape[0]] if several else target
                if isinstance(array, BorrowedTensor):
                    part.reshape(-1).view(torch.uint8).copy_(array.source, non_blocking=True)
                else:
                    part.copy_(torch.from_numpy(array), non_blocking=True)
                first_row += array.shape[0] if several else 0
        compute = torch.cuda.current_stream()
        compute.wait_stream(self._inward)
        target.record_stream(compute)  # torch keeps the memory until this stream has used it
        return target

    def borrow(self, terms: LendingTerms, file: int | None) -> Borrowed:
        with torch.cuda.device(self.index):
            if file is None:
                return IpcMemory(terms, self._device, self._inward)
            return RegisteredFile(terms, file, self._inward)

    def copy_out(self, tensor: Tensor) -> Array:
        """Start a copy to pinned host memory, on the lane's stream for answers."""
        snapshot = tensor.clone()  # the next batch may overwrite the tensor before it has been copied
        outward = self._thread_lane.streams.outward
        snapshot.record_stream(outward)
        outward.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(outward):
            answer = torch.empty(snapshot.shape, dtype=snapshot.dtype, pin_memory=True)
            answer.copy_(snapshot, non_blocking=True)
        array: Array = answer.numpy()
        return array

    def write_out(self, pieces: Sequence[tuple[BorrowedPart, Tensor]], *, ended: bool = False) -> Mark:
        stream = self._ended_outward if ended else self._thread_lane.streams.outward
        if not ended:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.inference_mode():
            for part, tensor in pieces:
                tensor.record_stream(stream)
                source = tensor.reshape(-1).view(torch.uint8)
                part.target[: source.shape[0]].copy_(source, non_blocking=True)
        return _Event(stream)

    def mark(self, *, answers: bool = False) -> Mark:
        return _Event(self._thread_lane.streams.outward if answers else torch.cuda.current_stream())

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Warm up and capture the work of *run* on the session stream; raises if it cannot be replayed."""
        with self.session_lock, torch.cuda.stream(self._sessions):
            for _ in range(_WARM_RUNS):
                run()
            self._sessions.synchronize()
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            # Relaxed: other threads may allocate memory during the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                run()
            finally:
                graph.capture_end()
            check_replayable(graph.raw_cuda_graph())
            graph.instantiate()
            self._sessions.synchronize()
        return _Replay(graph, self._session_part, self._device)

    def kernels(self, captured: Callable[[], None]) -> int:
        return captured.kernels if isinstance(captured, _Replay) else 1

    # Gates

    @property
    def ungated(self) -> str:
        reason = self._prepare_gates()
        return reason if isinstance(reason, str) else ""

    def use_stops(self, stops: Array) -> None:
        self._stops[:] = [stops]

    def stopped(self, slot: int) -> bool:
        return bool(self._stops and self._stops[0][slot])

    def _prepare_gates(self) -> tuple[GateKernels, RegisteredStops] | str:
        """The compiled gates and the stop table, or why there are none; made by the first call with a table."""
        if not self._stops:
            return NO_STOPS
        with self.session_lock, torch.cuda.device(self.index):
            if not self._gates:
                self.memory()  # any call gives this thread a context, which the driver needs
                try:
                    self._gates.append((GateKernels(self.index), RegisteredStops(self._stops[0], self.index)))
                except NoGates as error:
                    self._gates.append(str(error))
            return self._gates[0]

    def gate_memory(self, copies: int) -> GateMemory:
        prepared = self._prepare_gates()
        assert not isinstance(prepared, str)
        return GpuGateMemory(prepared[1], self._device, copies)

    def gated(self, memory: GateMemory, segments: Sequence[Callable[[], None]]) -> Any:
        prepared = self._prepare_gates()
        assert not isinstance(prepared, str) and isinstance(memory, GpuGateMemory)
        graphs = []
        for segment in segments:
            assert isinstance(segment, _Replay)
            graphs.append(segment.graph.raw_cuda_graph())
        self.memory()  # any call gives this thread a context, which the driver needs
        graph = GatedGraph(prepared[0], memory, graphs, self._session_part)
        on_part = _on_part(self._session_part, self._device)

        def launch() -> None:
            with on_part():
                graph.launch(torch.cuda.current_stream().cuda_stream)

        return launch

    def run_uncaptured(self, run: Callable[[], None]) -> None:
        """Run *run* on the session stream, after earlier work of the lane and before later work."""
        with self.session_lock:
            compute = torch.cuda.current_stream()
            self._sessions.wait_stream(compute)
            with torch.cuda.stream(self._sessions):
                run()
            compute.wait_stream(self._sessions)

    @contextmanager
    def lane_context(self, lane: int = 0) -> Iterator[None]:
        """Make the streams of a lane the calling thread's, as a context."""
        previous = getattr(self._thread_lane, "streams", None), self.part
        with torch.cuda.device(self.index):
            streams = self._streams(lane)
            self._thread_lane.streams, self._thread_lane.part = streams, self._part_of(lane)
            try:
                with torch.cuda.stream(streams.compute), torch.inference_mode():
                    yield
            finally:
                self._thread_lane.streams, self._thread_lane.part = previous

    def _part_of(self, lane: int) -> int:
        """The part of a lane; the first lane is the whole GPU and needs no partition."""
        return self.cuts.part_of(lane) if lane and self.cuts.cuts else 0

    def finish(self) -> None:
        torch.cuda.synchronize(self.index)

    def timed(self, run: Callable[[], None]) -> float:
        """Median seconds of *run* on the calling thread's stream, by events of the GPU."""
        times_ms = []
        for _ in range(REPEATS):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            run()
            ended.record()
            ended.synchronize()
            times_ms.append(began.elapsed_time(ended))
        return float(median(times_ms)) / 1e3

    def register_buffer(self, memory: Array) -> None:
        """Register a buffer so that copies from it run beside computation; if that fails, copies only take longer."""
        address = int(memory.ctypes.data)
        if int(torch.cuda.cudart().cudaHostRegister(address, memory.nbytes, 0)) == 0:
            self._pinned.add(address)

    def unregister_buffer(self, memory: Array) -> None:
        address = int(memory.ctypes.data)
        if address in self._pinned:
            self._inward.synchronize()
            torch.cuda.cudart().cudaHostUnregister(address)
            self._pinned.discard(address)

    def memory(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self.index)
        return int(free), int(total)

    def bandwidth(self) -> float:
        source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        self.timed(lambda: target.copy_(source))  # a warm-up
        return 2 * _COPIED_BYTES / self.timed(lambda: target.copy_(source))


def _new_stream() -> int:
    """Create a stream outside of torch's pool: torch reuses 32 streams, and others must not use a stream in capture."""
    stream = ctypes.c_void_p()
    if failed := driver().cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING):
        raise RuntimeError(f"the driver gives no further stream (error {failed})")
    return int(stream.value or 0)
