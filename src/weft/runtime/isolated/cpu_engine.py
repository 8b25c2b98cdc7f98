"""ONNX Runtime on the CPU, in a worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from weft.base.errors import BadRequest
from weft.runtime.backend import LoadedModel, LoadOptions
from weft.runtime.client_memory import Borrowed, LendingTerms
from weft.runtime.isolated.engine import DeviceFiles, WorkerEngine
from weft.runtime.isolated.packets import KEPT_BYTES
from weft.runtime.onnxruntime_cpu.allowance import Allowance
from weft.runtime.onnxruntime_cpu.lane import IDLE_S, CpuLane, ScratchMemory
from weft.runtime.onnxruntime_cpu.preparing import prepare
from weft.runtime.tensors import Array


class CpuEngineLane(CpuLane):
    """A lane whose steps are computed on the thread that reads them."""

    def move(self, leaving: Sequence[Any], coming: Any) -> None:
        """Do nothing: models on the cores stay in memory."""

    def gate(self, slot: int) -> None:
        """Do nothing: models on the cores have no gates."""

    def register_buffer(self, memory: Any) -> None:
        """Do nothing: the cores read any memory."""

    def unregister_buffer(self, memory: Any) -> None:
        """Do nothing: nothing was registered."""


class CpuEngine:
    """Runs models on the cores."""

    here = True
    kept_bytes = KEPT_BYTES

    def __init__(self) -> None:
        self._scratch = ScratchMemory(time.monotonic_ns)

    def open(self, path: Path, options: LoadOptions, cache: Path | None, *, learn: bool) -> LoadedModel:
        allowance = Allowance(options.learn_s)
        if not learn:
            allowance.stop()  # a model that needs trial runs then raises ``NotLearned``
        return prepare(path, options, cache, learn=learn, allowance=allowance)

    def use_stops(self, stops: Array) -> None:
        """Do nothing: steps on the cores are stopped between two nodes."""

    def lane(self, index: int) -> CpuEngineLane:
        return CpuEngineLane(index, time.monotonic_ns, scratch=self._scratch)

    def borrow(self, terms: LendingTerms, file: int | None) -> Borrowed:
        raise BadRequest("models on the CPU get their tensors from the server")

    def rest(self, wait_for_step: Callable[[float], bool]) -> None:
        """Free scratch memory that has not been needed for a while; return when a step comes, or little is left."""
        scratch = self._scratch
        if not scratch.is_large:
            return
        if scratch.is_due(idle=False):
            scratch.shrink()
        while scratch.is_large and not wait_for_step(IDLE_S):
            if scratch.is_due(idle=True):
                scratch.shrink()

    def metrics(self) -> dict[str, float]:
        return {}


class CpuEngineKind:
    """The cores, for which workers need no files, programs or variables."""

    gates = False
    variables: tuple[str, ...] = ()

    def make(self, name: str) -> WorkerEngine:
        return CpuEngine()

    def warm_up(self, name: str) -> None:
        """Do nothing: ONNX Runtime was imported with this module."""

    def files(self, name: str) -> DeviceFiles:
        return DeviceFiles()

    def programs(self, name: str) -> tuple[str, ...]:
        return ()
