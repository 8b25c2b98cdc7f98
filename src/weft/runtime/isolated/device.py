"""A GPU as a backend: one worker process that has all models, and lanes that take steps ahead.

It has one lane, or, where a policy chooses, one for every share of it; those have the worker's memory in common.
"""

from __future__ import annotations

import dataclasses
import logging
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from weft.base.errors import WorkerDied, WorkerStarting
from weft.engine.lane_queues import DEVICE_AHEAD
from weft.runtime.backend import LoadedModel, LoadOptions, Progress
from weft.runtime.cutting import DEVICE_GRAIN_S
from weft.runtime.isolated.backend import IsolatingBackend
from weft.runtime.isolated.ear import Ear
from weft.runtime.isolated.group import WorkerGroup
from weft.runtime.isolated.lane import IsolatingLane
from weft.runtime.isolated.limits import WorkerLimits
from weft.runtime.lent import Lender
from weft.runtime.model_kinds import kind_of
from weft.runtime.onnxruntime_cpu.backend import CpuBackend
from weft.runtime.onnxruntime_cpu.lane import own_core
from weft.runtime.onnxruntime_cpu.scratch import Scratch

log = logging.getLogger("weft.workers")

PIECE_BYTES = 4 << 20
"""So many bytes are written to a client's region at a time."""


class GpuLane(IsolatingLane):
    """The lane of a device."""

    def __init__(self, backend: DeviceBackend, index: int, ear: Ear, core: int | None, scratch: Scratch) -> None:
        super().__init__(index, backend.now, ear, core, scratch, ahead=DEVICE_AHEAD)
        self._backend = backend

    @property
    def able(self) -> bool:
        """Whether its worker is there, or none was needed yet."""
        group = self._backend.group
        return group is None or group.able


class DeviceBackend(IsolatingBackend):
    """Opens every model in the worker of a device; an error of the device ends that, and another one is started."""

    grain_s: float | None = DEVICE_GRAIN_S

    def __init__(
        self,
        device: str,
        limits: WorkerLimits,
        memory_bytes: int | None = None,
        *,
        label: str | None = None,
        kept_as: str | None = None,
        number: int | None = None,
    ) -> None:
        """memory_bytes: what models may hold of the device's memory together.

        label: by which it is known, where a machine's settings name the device twice. kept_as: its part of the cache.
        number: by which clients name its memory; None: they cannot share it.
        """
        own = dataclasses.replace(limits, spare=False, device_memory_bytes=memory_bytes)
        super().__init__(CpuBackend(), own, device)
        self.device, self.label, self.kept_as = device, label or device, kept_as
        self._kind = device.partition(":")[0]
        self.labels = (self.label,)
        self.region_devices = frozenset() if number is None else frozenset([number])
        self.inline, self.memory_bytes = False, memory_bytes
        self._asker = ThreadPoolExecutor(1, "asker")
        self._asking, self._used_bytes = False, 0
        self._told_uncut = False

    def open(
        self,
        path: Path,
        options: LoadOptions,
        cache: Path | None = None,
        say: Progress | None = None,
        *,
        learn: bool = True,
    ) -> LoadedModel:
        here = dataclasses.replace(options, isolation=self.label, rests=self.memory_bytes is not None)
        learn = learn and not (path.is_file() and kind_of(path, self._kind).about.get("takes_over"))
        # such a file may find on the device what another one has there: the worker is asked before it is learned
        found = super().open(path, here, cache, say, learn=learn)
        if options.shares and not self._told_uncut and found.cuts and not found.cuts.cuts:
            self._told_uncut = True
            log.warning("%s cannot be cut: models share it on plain streams; their remarks say why", self.device)
        self._ask()
        return found

    def lane(self, index: int, *, pin: bool = False) -> GpuLane:
        self._ear = self._ear or Ear()
        return GpuLane(self, index, self._ear, own_core(index, pin=pin), self._inner.scratch)

    @property
    def group(self) -> WorkerGroup | None:
        """Its worker; none before the first model."""
        return self._groups.get(self.label)

    def write_region(self, lender: Lender, offset: int, data: memoryview) -> None:
        """``WorkerStarting`` if there is no worker, or it dies meanwhile: what is written here is not tried again."""
        group = self.group
        worker = group.worker if group is not None else None
        if worker is None:
            raise WorkerStarting(f"the worker of {self.device} is being started")
        try:
            for at in range(0, len(data), PIECE_BYTES):
                piece = b64encode(data[at : at + PIECE_BYTES]).decode()
                worker.call("write", tuple(lender.terms), offset + at, piece)
        except WorkerDied as error:
            raise WorkerStarting(f"the worker of {self.device} is being started again: {error}") from error
        worker.lend([lender])

    @property
    def used_bytes(self) -> dict[str, int]:
        """What of the device's memory is in use, as it was when this was last asked."""
        if not self._asking:
            self._asking = True
            self._asker.submit(self._ask)
        return {self.label: self._used_bytes}

    @property
    def returns(self) -> dict[str, int]:
        """How often a model came back to the device's memory, since its worker was started."""
        group = self.group
        worker = group.worker if group is not None else None
        return {self.label: worker.residency.returns if worker is not None else 0}

    def _ask(self) -> None:
        try:
            group = self.group
            if group is not None and group.worker is not None:
                self._used_bytes = int(group.worker.call("told")["memory_bytes"])
        except (WorkerDied, RuntimeError) as error:
            log.debug("the memory of %s is not known: %s", self.device, error)
        self._asking = False

    def close(self) -> None:
        super().close()
        self._asker.shutdown()
