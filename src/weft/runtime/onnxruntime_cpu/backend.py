"""ONNX Runtime on the CPU as a backend: lanes are threads, and values between segments are numpy arrays."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import onnxruntime as ort

from weft.base.errors import ModelError
from weft.runtime.backend import LoadedModel, LoadOptions, Progress
from weft.runtime.defaults import BackendDefaults
from weft.runtime.onnxruntime_cpu.allowance import Allowance
from weft.runtime.onnxruntime_cpu.lane import CpuLane, ScratchMemory, own_core
from weft.runtime.onnxruntime_cpu.preparing import prepare

log = logging.getLogger("weft.models")

OPENS_WITHOUT_GIL = (1, 31)
"""From this version on ONNX Runtime opens files without Python's global lock."""


class CpuBackend(BackendDefaults):
    """Runs models in ONNX Runtime on the cores of this machine."""

    name, platform = "onnxruntime", "onnxruntime_onnx"
    inline = True

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.now = clock
        self.scratch = ScratchMemory(clock)
        # Protects the fields below: models are opened on several threads while the backend may be closed.
        self._lock = threading.Lock()
        self._learning: set[Allowance] = set()  # time limits of the models that are being opened
        self._closed = self._warned = False

    @property
    def scratch_bytes(self) -> int:
        """Estimate of the memory that runs left allocated in the arena that all models share."""
        return self.scratch.bytes

    def open(
        self,
        path: Path,
        options: LoadOptions,
        cache: Path | None = None,
        say: Progress | None = None,
        *,
        learn: bool = True,
    ) -> LoadedModel:
        """Open a model in this process; see ``Backend.open``."""
        self._warn_of_old_version()
        with self._open_allowance(path, options) as allowance:
            return prepare(path, options, cache, say, learn=learn, allowance=allowance)

    def _warn_of_old_version(self) -> None:
        """Log once if opening a model blocks all other threads with this version of ONNX Runtime."""
        if not self._warned and tuple(map(int, ort.__version__.split(".")[:2])) < OPENS_WITHOUT_GIL:
            self._warned = True
            log.warning(
                "onnxruntime %s answers no request while it opens a model; install %d.%d or later, or run models in "
                "worker processes (isolation)",
                *(ort.__version__, *OPENS_WITHOUT_GIL),
            )

    @contextmanager
    def _open_allowance(self, path: Path, options: LoadOptions) -> Iterator[Allowance]:
        """The time limit for the trial runs of one model; closing the backend ends it."""
        allowance = Allowance(options.learn_s)
        with self._lock:
            if self._closed:
                raise ModelError(f"{path}: is not opened any more")
            self._learning.add(allowance)
        try:
            yield allowance
        finally:
            with self._lock:
                self._learning.discard(allowance)

    def lane(self, index: int, *, pin: bool = False) -> CpuLane:
        return CpuLane(index, self.now, own_core(index, pin=pin), self.scratch)

    def close(self) -> None:
        """Stop the trial runs of models that are being opened; lanes and models are closed by their owners."""
        with self._lock:
            self._closed = True
            learning = list(self._learning)
        for allowance in learning:
            allowance.stop()
