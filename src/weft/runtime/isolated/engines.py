"""The engines of worker processes, by name; they are imported there, and in the template before that.

``cpu`` is ONNX Runtime on the cores. Any other name is that of a device, whose kind has an engine (``device_kinds``).
"""

from __future__ import annotations

from weft.base.errors import InputError
from weft.runtime.device_kinds import device_kind
from weft.runtime.isolated.engine import DeviceFiles, EngineKind, WorkerEngine

CPU = "cpu"


class CpuEngineKind:
    """The cores, for which nothing is needed."""

    variables: tuple[str, ...] = ()

    def make(self, name: str) -> WorkerEngine:
        from weft.runtime.isolated.cpu_engine import CpuEngine

        return CpuEngine()

    def warm_up(self, name: str) -> None:
        import weft.runtime.isolated.cpu_engine  # noqa: F401

    def files(self, name: str) -> DeviceFiles:
        return DeviceFiles()

    def programs(self, name: str) -> tuple[str, ...]:
        return ()


def engine_kind(name: str) -> EngineKind:
    """What workers need for an engine of this name; InputError where there is none."""
    if name == CPU:
        return CpuEngineKind()
    kind = device_kind(name).engine
    if kind is None:
        raise InputError(f"{name} has no worker processes of weft")
    return kind
