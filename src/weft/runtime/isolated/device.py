"""A GPU as a backend: one worker process that has all models, and lanes that take steps ahead.

It has one lane, or, where a policy chooses, one for every share of it; those have the worker's memory in common.
"""

from __future__ import annotations

import dataclasses
import logging
from base64 import b64encode
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.base.errors import ModelError, WorkerDied, WorkerStarting
from weft.engine.lane_queues import DEVICE_AHEAD
from weft.runtime.backend import (
    DeviceLane,
    Ended,
    LoadedModel,
    LoadOptions,
    Progress,
    StartedStep,
    Step,
)
from weft.runtime.client_memory import Lender
from weft.runtime.cutting import DEVICE_GRAIN_S
from weft.runtime.defaults import BackendDefaults
from weft.runtime.facets import ModelResidency
from weft.runtime.isolated.backend import IsolatingBackend
from weft.runtime.isolated.group import WorkerGroup
from weft.runtime.isolated.lane import IsolatingLane, SocketReader
from weft.runtime.isolated.limits import WorkerCounts, WorkerLimits
from weft.runtime.isolated.model import IsolatedModel
from weft.runtime.metadata import kind_of
from weft.runtime.onnxruntime_cpu.backend import CpuBackend
from weft.runtime.onnxruntime_cpu.lane import ScratchMemory, own_core
from weft.runtime.own_folder import make_folder, remove

log = logging.getLogger("weft.workers")

PIECE_BYTES = 4 << 20
"""So many bytes are written to a client's region at a time."""


class GpuLane(IsolatingLane):
    """The lane of a device."""

    def __init__(
        self, backend: DeviceBackend, index: int, ear: SocketReader, core: int | None, scratch: ScratchMemory
    ) -> None:
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
        model = super().open(path, here, cache, say, learn=learn)
        if model.shares and not model.shares.cuts.cuts and not self._told_uncut:
            self._told_uncut = True
            log.warning("%s cannot be cut: models share it on plain streams; their remarks say why", self.device)
        self._ask()
        return model

    def lane(self, index: int, *, pin: bool = False) -> GpuLane:
        self._ear = self._ear or SocketReader()
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
                self._used_bytes = int(group.worker.call("metrics")["memory_bytes"])
        except (WorkerDied, RuntimeError) as error:
            log.debug("the memory of %s is not known: %s", self.device, error)
        self._asking = False

    def close(self) -> None:
        super().close()
        self._asker.shutdown()


class SeveralDevices(BackendDefaults):
    """Opens every model on each of its devices."""

    isolates = True

    def __init__(
        self,
        names: Sequence[str],
        limits: WorkerLimits,
        memory_bytes: int | None = None,
        *,
        numbers: Sequence[int | None] | None = None,
    ) -> None:
        """memory_bytes: what models may hold of each device's memory together.

        numbers: by which clients name the memory of each (``DeviceBackend``).
        """
        self.labels, together = _labels(names), ",".join(names)
        self._numbers = numbers or [None] * len(names)
        self._each = [
            DeviceBackend(name, limits, memory_bytes, label=label, kept_as=together, number=number)
            for name, label, number in zip(names, self.labels, self._numbers, strict=True)
        ]
        self.region_devices = frozenset(number for number in self._numbers if number is not None)
        first = self._each[0]
        self.name, self.platform, self.now = first.name, first.platform, first.now
        self.device, self.grain_s, self.limits, self.memory_bytes = together, first.grain_s, first.limits, memory_bytes
        self._folder: Path | None = None

    def open(
        self,
        path: Path,
        options: LoadOptions,
        cache: Path | None = None,
        say: Progress | None = None,
        *,
        learn: bool = True,
    ) -> LoadedModel:
        kept = cache or self._temporary()
        models: list[LoadedModel] = []
        try:
            for backend in self._each:
                models.append(backend.open(path, options, kept, say, learn=learn))
                _check_alike(path, self.labels, models)
        except BaseException:
            for model in models:
                model.close()
            raise
        return SpreadModel(models, self.labels)

    def _temporary(self) -> Path:
        """Where models are kept for this time only, for all devices."""
        if self._folder is None:
            self._folder = make_folder()
        return self._folder

    def lane(self, index: int, *, pin: bool = False) -> IsolatingLane:
        return self._each[index].lane(index, pin=pin)

    def write_region(self, lender: Lender, offset: int, data: memoryview) -> None:
        """Have it written by the device that has the region, or else by the first."""
        number = lender.terms.device
        self._each[self._numbers.index(number) if number in self._numbers else 0].write_region(lender, offset, data)

    @property
    def scratch_bytes(self) -> int:
        """What runs have left in the arena of this process."""
        return self._each[0].scratch_bytes

    @property
    def used_bytes(self) -> dict[str, int]:
        """What of each device's memory is in use, as it was when this was last asked."""
        return {label: used for backend in self._each for label, used in backend.used_bytes.items()}

    @property
    def returns(self) -> dict[str, int]:
        """How often a model came back to each device's memory."""
        return {label: count for backend in self._each for label, count in backend.returns.items()}

    def counts(self) -> WorkerCounts:
        """How often workers died, and were started again."""
        return WorkerCounts(*map(sum, zip(*(backend.counts() for backend in self._each), strict=True)))

    def groups(self) -> dict[str, WorkerGroup]:
        """The worker of each device, by its label."""
        return {name: group for backend in self._each for name, group in backend.groups().items()}

    def close(self) -> None:
        for backend in self._each:
            backend.close()
        if self._folder is not None:
            remove(self._folder)


@dataclass(frozen=True)
class SpreadResidency(ModelResidency):
    """What a model holds of each of several devices' memory: as much as of the first."""

    devices: Sequence[ModelResidency] = ()

    @property
    def away_s(self) -> float:
        """How long it takes to be there, on the device that has it soonest."""
        return min(device.away_s for device in self.devices)


class SpreadModel:
    """A model on several devices; a step runs on that of its lane."""

    def __init__(self, models: Sequence[LoadedModel], labels: Sequence[str]) -> None:
        self._models, first = models, models[0]
        self.remarks = (*first.remarks, f"runs on each of {', '.join(labels)}")
        for model in models[1:]:
            if isinstance(model, IsolatedModel) and isinstance(first, IsolatedModel):
                model.breaker = first.breaker  # what kills one device's worker would kill the next
        devices = [model.residency or ModelResidency() for model in models]
        held = devices[0]
        self.residency = SpreadResidency(held.memory_bytes, held.moving_bytes, held.return_s, devices)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._models[0], name)

    def prepare(self, rows: int) -> None:
        """Have what batches of so many rows need on all devices."""
        for model in self._models:
            model.prepare(rows)

    def start(self, step: Step, lane: DeviceLane, ended: Ended, *, here: bool = False) -> StartedStep:
        assert isinstance(lane, IsolatingLane)
        return self._models[lane.index].start(step, lane, ended, here=here)

    def close(self) -> None:
        for model in self._models:
            model.close()


def _labels(names: Sequence[str]) -> tuple[str, ...]:
    """The devices by names that differ: one that is named again is told apart."""
    before = [list(names[:at]).count(name) for at, name in enumerate(names)]
    return tuple(f"{name}#{count + 1}" if count else name for name, count in zip(names, before, strict=True))


def _check_alike(path: Path, labels: Sequence[str], models: Sequence[LoadedModel]) -> None:
    """Refuse a model that the last device cuts otherwise than the first: there is one plan of its segments."""
    first, last = models[0], models[-1]
    if (first.segments, first.batching.max_batch, first.exits) != (last.segments, last.batching.max_batch, last.exits):
        raise ModelError(
            f"{path}: comes out otherwise on {labels[len(models) - 1]} than on {labels[0]}; name devices of one kind"
        )
