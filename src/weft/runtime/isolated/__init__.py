"""Models in worker processes: whatever a model does to its process, the server and other models go on.

``backend`` is what the server sees, ``group`` a worker with its spare and the models they have, ``process`` the
server's side of one worker. ``worker`` is the process itself, forked from the ``template`` that ``spawning`` keeps, and
``confinement`` what it gives up before it opens a model. What they say to each other is in ``packets`` and
``model_description``; large tensors lie in ``memory`` that both see. ``lane`` has the server's end of a lane's line.
``engine`` is what a worker runs models with, and ``engines`` finds it by the name of a device.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.runtime.backend import Backend
    from weft.runtime.isolated.limits import WorkerLimits


def open_cpu(limits: WorkerLimits) -> Backend:
    """The backend ``onnxruntime`` as the server has it: with worker processes, where the system is Linux.

    Both are imported here: ONNX Runtime takes long to import, and workers need what only Linux has.
    """
    from weft.runtime.onnxruntime_cpu.backend import CpuBackend

    if sys.platform != "linux":
        return CpuBackend()
    from weft.runtime.isolated.backend import IsolatingBackend

    return IsolatingBackend(CpuBackend(), limits)
