"""ONNX Runtime on the CPU as a backend: a lane is a thread, and what lives between segments are numpy arrays."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from weft.runtime.backend import LoadedModel, LoadOptions, Progress
from weft.runtime.onnxruntime_cpu.lane import CpuLane
from weft.runtime.onnxruntime_cpu.preparing import prepare


class CpuBackend:
    """Runs models in ONNX Runtime on the cores of this machine."""

    name, platform = "onnxruntime", "onnxruntime_onnx"
    inline = True
    memory_bytes: int | None = None

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.now = clock

    def open(
        self, path: Path, options: LoadOptions, cache: Path | None = None, say: Progress | None = None
    ) -> LoadedModel:
        return prepare(path, options, cache, say)

    def lane(self, index: int, *, pin: bool = False) -> CpuLane:
        cores = sorted(os.sched_getaffinity(0)) if pin and hasattr(os, "sched_getaffinity") else []
        return CpuLane(index, self.now, cores[index % len(cores)] if cores else None)

    def close(self) -> None:
        """Its threads and sessions are those of its lanes and models."""
