"""ONNX Runtime on the CPU, in a worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from weft.base.errors import BadRequest
from weft.runtime.backend import LoadedModel, LoadOptions
from weft.runtime.isolated import memory
from weft.runtime.lent import Borrowed, LendingTerms
from weft.runtime.onnxruntime_cpu.allowance import Allowance
from weft.runtime.onnxruntime_cpu.lane import CpuLane
from weft.runtime.onnxruntime_cpu.preparing import prepare
from weft.runtime.onnxruntime_cpu.scratch import IDLE_S, Scratch


class CpuEngineLane(CpuLane):
    """A lane whose steps are computed on the thread that reads them."""

    def move(self, leaving: Sequence[Any], coming: Any) -> None:
        """Models stay where they are."""

    def took(self, memory: Any) -> None:
        """Any memory will do."""

    def dropped(self, memory: Any) -> None:
        """Nothing was done to it."""


class CpuEngine:
    """Runs models on the cores."""

    here = True
    kept_bytes = memory.KEPT_BYTES

    def __init__(self) -> None:
        self._scratch = Scratch(time.monotonic_ns)

    def open(self, path: Path, options: LoadOptions, cache: Path | None, *, learn: bool) -> LoadedModel:
        allowance = Allowance(options.learn_s)
        if not learn:
            allowance.stop()
        return prepare(path, options, cache, learn=learn, allowance=allowance)

    def lane(self, index: int) -> CpuEngineLane:
        return CpuEngineLane(index, time.monotonic_ns, scratch=self._scratch)

    def borrow(self, terms: LendingTerms, file: int | None) -> Borrowed:
        raise BadRequest("models on the CPU get their tensors from the server")

    def rest(self, asked: Callable[[float], bool]) -> None:
        """Give back scratch memory that has not been needed for a while; return when a step comes, or nothing is."""
        scratch = self._scratch
        if not scratch.is_large:
            return
        if scratch.is_due(idle=False):
            scratch.shrink()
        while scratch.is_large and not asked(IDLE_S):
            if scratch.is_due(idle=True):
                scratch.shrink()

    def told(self) -> dict[str, float]:
        return {}
