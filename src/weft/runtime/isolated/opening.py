"""ONNX Runtime on the cores as the server has it: with worker processes, where the system can have them."""

from __future__ import annotations

import sys

from weft.runtime.backend import Backend
from weft.runtime.isolated.limits import WorkerLimits
from weft.runtime.onnxruntime_cpu.backend import CpuBackend


def open_cpu(limits: WorkerLimits) -> Backend:
    """The backend ``onnxruntime``; workers need what Linux alone has."""
    if sys.platform != "linux":
        return CpuBackend()
    from weft.runtime.isolated.backend import IsolatingBackend

    return IsolatingBackend(CpuBackend(), limits)
