"""A GPU through torch: three streams, events, graphs, and memory that is copied while something is computed.

Sessions of ONNX Runtime are bound to a stream of their own, on which they are warmed up and captured; what was captured
is replayed on the stream of computing, so a model can be opened while others run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from statistics import median
from typing import Any

import numpy as np
import onnxruntime as ort
import torch

from weft.runtime.cuda.borrowed import IpcMemory, RegisteredFile
from weft.runtime.cuda.captured import check_replayable
from weft.runtime.cuda.device import REPEATS, BorrowedTensor, Mark, Movable, Tensor
from weft.runtime.cuda.movable import GpuMovable
from weft.runtime.cuda.torch_types import TYPES, as_torch
from weft.runtime.lent import Borrowed, LendingTerms
from weft.runtime.tensors import Array

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:2")  # 8 MiB for each session, not 64, and no slower
ort.set_default_logger_severity(4)  # what goes wrong is raised; the log would say it twice

_WARM_RUNS = 3
"""How often something is run before it is captured: the first runs choose algorithms and lay out memory."""


@cache
def _type_of(dtype: np.dtype[Any]) -> Any:
    """A type of numpy's as torch has it."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


class _Event:
    """A mark on a stream."""

    def __init__(self, stream: Any) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()


class Gpu:
    """One GPU of this machine."""

    kind = "cuda"

    def __init__(self, index: int) -> None:
        torch.cuda.set_device(index)
        self.index, self.name = index, torch.cuda.get_device_name(index)
        self.building = threading.RLock()
        self._device = torch.device("cuda", index)
        self._compute, self._sessions = torch.cuda.Stream(), torch.cuda.Stream()
        self._inward, self._outward = torch.cuda.Stream(), torch.cuda.Stream()
        self._pinned: set[int] = set()
        self._pool = torch.cuda.graph_pool_handle()
        """Scratch memory of all graphs: one is replayed at a time, and leaves nothing there that is needed."""
        self._first = torch.cuda.CUDAGraph()  # the memory is there as long as a graph is that uses it
        with torch.cuda.graph(self._first, pool=self._pool, stream=self._sessions):
            torch.zeros(1, device=self._device)

    def providers(self, *, channels_last: bool) -> list[Any]:
        options = {
            "device_id": self.index,
            "user_compute_stream": str(self._sessions.cuda_stream),
            "use_tf32": 0,
            "prefer_nhwc": int(channels_last),
            "arena_extend_strategy": "kSameAsRequested",
            "cudnn_conv_algo_search": "HEURISTIC",
        }
        return [("CUDAExecutionProvider", options), "CPUExecutionProvider"]

    def movable(self, byte_size: int, *, kept: bool) -> Movable:
        return GpuMovable(self._device, byte_size, (self._inward, self._compute), TYPES, kept=kept)

    def fill(self, target: Tensor, array: Array) -> None:
        target.copy_(as_torch(np.array(array, order="C")))

    def shared(self, tensor: Tensor) -> Any:
        return ort.OrtValue.from_dlpack(tensor)

    def address(self, tensor: Tensor) -> int:
        return int(tensor.data_ptr() or tensor.untyped_storage().data_ptr())  # an empty one is nowhere, says torch

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def clone(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def taken(self, sources: Sequence[tuple[Tensor, Sequence[int] | None, int]]) -> Tensor:
        picked = [each[:count] if rows is None else each[list(rows)] for each, rows, count in sources]
        return torch.cat(picked)

    def copy_in(self, arrays: Sequence[Array | BorrowedTensor]) -> Tensor:
        first, several = arrays[0], len(arrays) > 1
        shape = (sum(each.shape[0] for each in arrays), *first.shape[1:]) if several else first.shape
        with torch.cuda.stream(self._inward):
            target = torch.empty(shape, dtype=_type_of(first.dtype), device=self._device)
            at = 0
            for each in arrays:
                part = target[at : at + each.shape[0]] if several else target
                if isinstance(each, BorrowedTensor):
                    part.reshape(-1).view(torch.uint8).copy_(each.source, non_blocking=True)
                else:
                    part.copy_(torch.from_numpy(each), non_blocking=True)
                at += each.shape[0] if several else 0
        self._compute.wait_stream(self._inward)
        target.record_stream(self._compute)
        return target

    def borrow(self, terms: LendingTerms, file: int | None) -> Borrowed:
        with torch.cuda.device(self.index):
            if file is None:
                return IpcMemory(terms, self._device, self._inward)
            return RegisteredFile(terms, file, self._inward)

    def copy_out(self, tensor: Tensor) -> Array:
        still = tensor.clone()  # the next batch may write over it before it has been copied
        still.record_stream(self._outward)
        self._outward.wait_stream(self._compute)
        with torch.cuda.stream(self._outward):
            answer = torch.empty(still.shape, dtype=still.dtype, pin_memory=True)
            answer.copy_(still, non_blocking=True)
        found: Array = answer.numpy()
        return found

    def mark(self, *, answers: bool = False) -> Mark:
        return _Event(self._outward if answers else self._compute)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        with self.building, torch.cuda.stream(self._sessions):
            for _ in range(_WARM_RUNS):
                run()
            self._sessions.synchronize()
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                run()
            finally:
                graph.capture_end()
            check_replayable(graph.raw_cuda_graph())
            graph.instantiate()
            self._sessions.synchronize()
        replay: Callable[[], None] = graph.replay
        return replay

    def plainly(self, run: Callable[[], None]) -> None:
        with self.building:
            self._sessions.wait_stream(self._compute)
            with torch.cuda.stream(self._sessions):
                run()
            self._compute.wait_stream(self._sessions)

    @contextmanager
    def on(self) -> Iterator[None]:
        with torch.cuda.device(self.index), torch.cuda.stream(self._compute), torch.inference_mode():
            yield

    def finish(self) -> None:
        torch.cuda.synchronize(self.index)

    def timed(self, run: Callable[[], None]) -> float:
        times_ms = []
        for _ in range(REPEATS):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record(self._compute)
            run()
            ended.record(self._compute)
            ended.synchronize()
            times_ms.append(began.elapsed_time(ended))
        return float(median(times_ms)) / 1e3

    def took(self, memory: Array) -> None:
        """Register it, so that copies from there go beside what is computed; without that they only take longer."""
        at = int(memory.ctypes.data)
        if int(torch.cuda.cudart().cudaHostRegister(at, memory.nbytes, 0)) == 0:
            self._pinned.add(at)

    def dropped(self, memory: Array) -> None:
        at = int(memory.ctypes.data)
        if at in self._pinned:
            self._inward.synchronize()
            torch.cuda.cudart().cudaHostUnregister(at)
            self._pinned.discard(at)

    def memory(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self.index)
        return int(free), int(total)
