"""The backend for ``test_backend_contract``: all models in one worker, measured by the clock that a test says."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.runtime import clocks
from weft.runtime.backend import LoadedModel, LoadOptions
from weft.runtime.isolated.backend import IsolatingBackend
from weft.runtime.isolated.group import own_folder
from weft.runtime.isolated.limits import WorkerLimits
from weft.runtime.onnxruntime_cpu.backend import CpuBackend

GROUP = "contract"


class ContractBackend(IsolatingBackend):
    """Isolates everything; what a test says of times goes into the cache before the worker looks there."""

    def __init__(self) -> None:
        super().__init__(CpuBackend(), WorkerLimits(spare=False, kill_s=600.0))
        self.inline = False
        self._own = Path(tempfile.mkdtemp())

    def open(self, path: Path, options: LoadOptions, cache: Path | None = None, *more: Any, **how: Any) -> LoadedModel:
        folder, _ = own_folder(GROUP, self._own)
        if clocks.said() is not None:
            CpuBackend().open(path, options, folder).close()
        return super().open(path, replace(options, isolation=GROUP), self._own, *more, **how)

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._own)
