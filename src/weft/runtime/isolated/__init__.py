"""Models in worker processes: whatever a model does to its process, the server and other models go on.

``backend`` implements the backend protocol, ``group`` manages a worker with its spare and their models, ``process`` is
the server's side of one worker and ``lane`` that of its lanes. ``worker`` and ``worker_lane`` run in the worker
process, which ``spawning`` forks from a template and ``confinement`` restricts. ``packets`` and ``model_description``
are the protocol between them; large tensors travel in shared memory. ``engine`` declares what a worker runs models
with. ``residency`` decides which models are evicted from a device's memory. ``device`` is the backend of GPUs.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.runtime.backend import Backend
    from weft.runtime.isolated.limits import WorkerLimits


def open_cpu(limits: WorkerLimits) -> Backend:
    """The backend ``onnxruntime`` of a server: on Linux with worker processes, elsewhere without.

    Imports are inside the function: ONNX Runtime takes long to import, and workers need what only Linux has.
    """
    from weft.runtime.onnxruntime_cpu.backend import CpuBackend

    if sys.platform != "linux":
        return CpuBackend()
    from weft.runtime.isolated.backend import IsolatingBackend

    return IsolatingBackend(CpuBackend(), limits)
