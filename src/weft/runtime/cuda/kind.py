"""GPUs as a kind of device: ``cuda:0`` and so on, each run by a worker process, and their twins on the cores.

This is what ``--device cuda:0`` is registered with. Nothing of torch is imported before a worker needs it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from weft.base.errors import InputError
from weft.base.registry import registered
from weft.engine.lane_queues import DEVICE_AHEAD
from weft.runtime.backend import Backend
from weft.runtime.cuda import requirements
from weft.runtime.cuda.cpu_twins import is_twin
from weft.runtime.cuda.device_files import compilers, device_files
from weft.runtime.isolated.engine import DeviceFiles, WorkerEngine
from weft.runtime.isolated.limits import WorkerLimits


class CudaEngineKind:
    """The engine of GPUs, and the files, programs and variables that its worker processes need."""

    gates = True
    variables: tuple[str, ...] = (
        "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "NVIDIA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG",
    )  # fmt: skip

    def make(self, name: str) -> WorkerEngine:
        from weft.runtime.cuda.engine import CudaEngine

        return CudaEngine(name)

    def warm_up(self, name: str) -> None:
        import weft.runtime.cuda.engine

        registered("model_kinds")  # so the template process reads what tools register, once for all workers
        if not is_twin(name):
            import weft.runtime.cuda.gpu  # noqa: F401

    def files(self, name: str) -> DeviceFiles:
        return device_files()

    def programs(self, name: str) -> tuple[str, ...]:
        """The compilers of kernels, if an installed package needs them."""
        return () if is_twin(name) or find_spec("triton") is None else compilers()


class CudaKind:
    """GPUs of NVIDIA by their numbers."""

    ahead, shares = DEVICE_AHEAD, True
    engine = CudaEngineKind()

    def check(self, name: str) -> str | None:
        if sys.platform != "linux":
            raise InputError(f"{name}: devices are worked by processes that Linux alone has; leave out device")
        return None if is_twin(name) else requirements.check(name)

    def called(self, name: str) -> str:
        """The driver's name of the GPU, as the hardware model; empty if there is no such GPU."""
        return requirements.gpu_called(name)

    def open(self, names: Sequence[str], limits: WorkerLimits, memory_bytes: int | None) -> Backend:
        from weft.runtime.cuda.packager import FOLDER, Packager
        from weft.runtime.isolated.device import DeviceBackend, SeveralDevices

        numbers = [_number(name) for name in names]
        packagers = [Packager(name, "cpu" if is_twin(name) else self.called(name)) for name in names]
        limits = dataclasses.replace(limits, shared_cache=FOLDER)  # workers read the packages that the server compiles
        if len(names) == 1:
            return DeviceBackend(names[0], limits, memory_bytes, number=numbers[0], packager=packagers[0])
        return SeveralDevices(names, limits, memory_bytes, numbers=numbers, packagers=packagers)


def _number(name: str) -> int | None:
    """The number of a GPU, by which clients name its memory; None for a twin, which has no memory of its own."""
    number = name.partition(":")[2]
    return int(number) if number.isdecimal() else None
