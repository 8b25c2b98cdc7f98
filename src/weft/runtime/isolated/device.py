"""GPUs as a backend: one worker process per GPU with all models, and lanes that queue steps.

A GPU has one lane or, if a policy chooses lanes, one for every share; the lanes of shares have one memory.
"""

from __future__ import annotations

import dataclasses
import logging
from base64 import b64encode
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

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
from weft.runtime.engines import COMPILED, ONNXRUNTIME, Engine
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
"""Bytes written to a client's region at a time: bounds the copy that is held for a large answer."""


class CompiledCode(NamedTuple):
    """The compiled code of a model."""

    folder: Path
    complete: bool
    """Whether the model is compiled as far as it can be; False: for some batch sizes only, so far."""


class Packager(Protocol):
    """Compiles models of a device in processes of their own."""

    default: Engine
    """The engine of models whose settings name none."""

    def packages(
        self, path: Path, options: LoadOptions, model: LoadedModel, cache: Path | None, *, compile_now: bool
    ) -> CompiledCode | None:
        """The compiled code of *model*, which is open; compiled first if *compile_now* is true.

        None if there is no compiled code and *compile_now* is false. ``ModelError`` if the model cannot be compiled.
        """
        ...


class GpuLane(IsolatingLane):
    """A lane of a GPU."""

    def __init__(
        self, backend: DeviceBackend, index: int, socket_reader: SocketReader, core: int | None, scratch: ScratchMemory
    ) -> None:
        super().__init__(index, backend.now, socket_reader, core, scratch, ahead=DEVICE_AHEAD)
        self._backend = backend

    @property
    def able(self) -> bool:
        """Whether the GPU's worker is alive, or was not needed yet."""
        group = self._backend.group
        return group is None or group.has_worker


class DeviceBackend(IsolatingBackend):
    """Opens every model in the worker of a device; an error of the device ends the worker, and a new worker starts."""

    grain_s: float | None = DEVICE_GRAIN_S

    def __init__(
        self,
        device: str,
        limits: WorkerLimits,
        memory_bytes: int | None = None,
        *,
        label: str | None = None,
        cache_name: str | None = None,
        number: int | None = None,
        packager: Packager | None = None,
    ) -> None:
        """memory_bytes: how much of the device's memory all models may hold.

        label: the device's name in metrics; not *device* if the settings name the device twice. cache_name: the
        part of the cache that its models use; None: its own. number: the device id in clients' shared-memory requests;
        None: clients cannot share its memory. packager: compiles models; None: the device has no compiled engine.
        """
        # No spare: it would need the memory of the device for the same models.
        device_limits = dataclasses.replace(limits, spare=False, device_memory_bytes=memory_bytes)
        super().__init__(CpuBackend(), device_limits, device)
        self.device, self.label, self.cache_name, self._packager = device, label or device, cache_name, packager
        self.default_engine = packager.default if packager is not None else ONNXRUNTIME
        self._kind = device.partition(":")[0]
        self.labels = (self.label,)
        self.region_devices = frozenset() if number is None else frozenset([number])
        self.inline, self.memory_bytes = False, memory_bytes
        self._updater = ThreadPoolExecutor(1, "asker")  # updates ``_used_bytes``, which must not block the event loop
        self._updating, self._used_bytes = False, 0
        self._warned_uncut = False

    def open(
        self,
        path: Path,
        options: LoadOptions,
        cache: Path | None = None,
        say: Progress | None = None,
        *,
        learn: bool = True,
    ) -> LoadedModel:
        """Open a model in the device's worker, compiled if the options ask for that; see ``Backend.open``."""
        device_options = dataclasses.replace(options, isolation=self.label, rests=self.memory_bytes is not None)
        # A file of a kind with ``takes_over`` may reuse weights that another model has on the device: so the worker
        # tries to open it without learning, and learns it only if that fails.
        learn = learn and not (path.is_file() and kind_of(path, self._kind).details.get("takes_over"))
        model = super().open(path, device_options, cache, say, learn=learn)
        if options.engine != ONNXRUNTIME:
            model = self._with_engine(model, path, device_options, cache, learn=learn)
        if model.shares and not model.shares.cuts.cuts and not self._warned_uncut:
            self._warned_uncut = True
            log.warning("%s cannot be cut: models share it on plain streams; their remarks say why", self.device)
        self._update_used_bytes()
        return model

    def _with_engine(
        self, model: Any, path: Path, options: LoadOptions, cache: Path | None, *, learn: bool
    ) -> LoadedModel:
        """Replace *model*, which runs in ONNX Runtime, by the compiled model; if that fails, return it with a remark.

        Without compiled code: compile it now if *learn* is true, else return *model*, to be learned later.
        """
        try:
            if self._packager is None:
                raise ModelError(f"{self.device} has no compiled engine")
            code = self._packager.packages(path, options, model, cache, compile_now=learn)
        except ModelError as error:
            model.remarks = (*model.remarks, f"not compiled: {error}")
            return cast(LoadedModel, model)
        if code is None:  # the server learns later what is not marked as learned
            model.timing = dataclasses.replace(model.timing, learned=False)
            return cast(LoadedModel, model)
        compiled: Any = super().open(path, dataclasses.replace(options, packages=str(code.folder)), cache, learn=False)
        model.close()
        if not code.complete and compiled.timing.engine == COMPILED:
            compiled.timing = dataclasses.replace(compiled.timing, learned=False)
        return cast(LoadedModel, compiled)

    def lane(self, index: int, *, pin: bool = False) -> GpuLane:
        self._socket_reader = self._socket_reader or SocketReader()
        return GpuLane(self, index, self._socket_reader, own_core(index, pin=pin), self._inner.scratch)

    @property
    def group(self) -> WorkerGroup | None:
        """The group of the device's worker; None before the first model."""
        return self._groups.get(self.label)

    def write_region(self, lender: Lender, offset: int, data: memoryview) -> None:
        """Write through the worker; ``WorkerStarting`` if there is none or it dies: a write is not retried here."""
        group = self.group
        worker = group.worker if group is not None else None
        if worker is None:
            raise WorkerStarting(f"the worker of {self.device} is being started")
        try:
            for start in range(0, len(data), PIECE_BYTES):
                piece = b64encode(data[start : start + PIECE_BYTES]).decode()
                worker.call("write", tuple(lender.terms), offset + start, piece)
        except WorkerDied as error:
            raise WorkerStarting(f"the worker of {self.device} is being started again: {error}") from error
        finally:  # the worker also keeps a region that it could not open, with the reason
            worker.lend([lender])

    @property
    def used_bytes(self) -> dict[str, int]:
        """Device memory in use, as of an earlier update; each call starts a new update, since no caller may wait."""
        if not self._updating:
            self._updating = True
            self._updater.submit(self._update_used_bytes)
        return {self.label: self._used_bytes}

    @property
    def returns(self) -> dict[str, int]:
        """How often an evicted model was brought back to the device's memory since its worker started."""
        group = self.group
        worker = group.worker if group is not None else None
        return {self.label: worker.residency.returns if worker is not None else 0}

    def _update_used_bytes(self) -> None:
        """Ask the worker how much device memory is in use, and wait for its answer."""
        try:
            group = self.group
            if group is not None and group.worker is not None:
                self._used_bytes = int(group.worker.call("metrics")["memory_bytes"])
        except (WorkerDied, RuntimeError) as error:
            log.debug("the memory of %s is not known: %s", self.device, error)
        self._updating = False

    def close(self) -> None:
        super().close()
        self._updater.shutdown()


class SeveralDevices(BackendDefaults):
    """A backend of several devices of one kind, which opens every model on each of them."""

    isolates = True

    def __init__(
        self,
        names: Sequence[str],
        limits: WorkerLimits,
        memory_bytes: int | None = None,
        *,
        numbers: Sequence[int | None] | None = None,
        packagers: Sequence[Packager] | None = None,
    ) -> None:
        """memory_bytes: how much of each device's memory all models may hold; None: no limit.

        numbers: the device ids in clients' shared-memory requests; packagers: one for each device (``DeviceBackend``).
        """
        self.labels, all_names = _labels(names), ",".join(names)
        self._numbers = numbers or [None] * len(names)
        self._backends = [
            DeviceBackend(
                name, limits, memory_bytes, label=label, cache_name=all_names, number=number, packager=packager
            )
            for name, label, number, packager in zip(
                names, self.labels, self._numbers, packagers or repeat(None, len(names)), strict=True
            )
        ]
        self.region_devices = frozenset(number for number in self._numbers if number is not None)
        first = self._backends[0]
        self.name, self.platform, self.now = first.name, first.platform, first.now
        self.device, self.grain_s, self.limits, self.memory_bytes = all_names, first.grain_s, first.limits, memory_bytes
        self.default_engine = first.default_engine
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
        """Open a model on every device, with one engine; if one fails, it is closed on the others.

        See ``Backend.open``.
        """
        shared_cache = cache or self._temporary_cache()
        models = self._open_all(path, options, shared_cache, say, learn=learn)
        if len({model.timing.engine for model in models}) > 1:
            # The engines are about equally fast, as the devices chose differently: take one for all.
            for model in models:
                model.close()
            models = self._open_all(
                path, dataclasses.replace(options, engine=ONNXRUNTIME), shared_cache, say, learn=learn
            )
        return SpreadModel(models, self.labels)

    def _open_all(
        self, path: Path, options: LoadOptions, cache: Path, say: Progress | None, *, learn: bool
    ) -> list[LoadedModel]:
        """Open a model on every device; ``ModelError`` if devices with one engine cut it differently."""
        models: list[LoadedModel] = []
        try:
            for backend in self._backends:
                models.append(backend.open(path, options, cache, say, learn=learn))
                if models[0].timing.engine == models[-1].timing.engine:
                    _check_same_cuts(path, self.labels, models)
        except BaseException:
            for model in models:
                model.close()
            raise
        return models

    def _temporary_cache(self) -> Path:
        """A temporary cache that all devices share."""
        if self._folder is None:
            self._folder = make_folder()
        return self._folder

    def lane(self, index: int, *, pin: bool = False) -> IsolatingLane:
        return self._backends[index].lane(index, pin=pin)

    def write_region(self, lender: Lender, offset: int, data: memoryview) -> None:
        """Write through the worker of the device that has the region; the first device reports unknown ones."""
        number = lender.terms.device
        self._backends[self._numbers.index(number) if number in self._numbers else 0].write_region(lender, offset, data)

    @property
    def scratch_bytes(self) -> int:
        """Bytes that runs have left in ONNX Runtime's arena of this process."""
        return self._backends[0].scratch_bytes

    @property
    def used_bytes(self) -> dict[str, int]:
        """Memory in use on each device, as of the last call."""
        return {label: used for backend in self._backends for label, used in backend.used_bytes.items()}

    @property
    def returns(self) -> dict[str, int]:
        """How often an evicted model was brought back to each device's memory."""
        return {label: count for backend in self._backends for label, count in backend.returns.items()}

    def counts(self) -> WorkerCounts:
        """Deaths and restarts of all workers."""
        return WorkerCounts(*map(sum, zip(*(backend.counts() for backend in self._backends), strict=True)))

    def groups(self) -> dict[str, WorkerGroup]:
        """The worker of each device, by its label."""
        return {name: group for backend in self._backends for name, group in backend.groups().items()}

    def close(self) -> None:
        for backend in self._backends:
            backend.close()
        if self._folder is not None:
            remove(self._folder)


@dataclass(frozen=True)
class SpreadResidency(ModelResidency):
    """Device memory of a model on several devices; the numbers of bytes are the first device's."""

    devices: Sequence[ModelResidency] = ()

    @property
    def away_s(self) -> float:
        """The shortest time to bring the model back on any of the devices."""
        return min(device.away_s for device in self.devices)


class SpreadModel:
    """A model that is open on several devices; a step runs on the device of its lane."""

    def __init__(self, models: Sequence[LoadedModel], labels: Sequence[str]) -> None:
        self._models, first = models, models[0]
        self.remarks = (*first.remarks, f"runs on each of {', '.join(labels)}")
        for model in models[1:]:
            if isinstance(model, IsolatedModel) and isinstance(first, IsolatedModel):
                # One breaker for all devices: inputs that kill one device's worker would kill the next.
                model.breaker = first.breaker
        devices = [model.residency or ModelResidency() for model in models]
        first_residency = devices[0]
        self.residency = SpreadResidency(
            first_residency.memory_bytes, first_residency.moving_bytes, first_residency.return_s, devices
        )

    def __getattr__(self, name: str) -> Any:
        """Everything else is the same on all devices, and read from the first."""
        return getattr(self._models[0], name)

    def prepare(self, rows: int) -> None:
        """Prepare for batches of *rows* rows on all devices."""
        for model in self._models:
            model.prepare(rows)

    def start(self, step: Step, lane: DeviceLane, ended: Ended, *, here: bool = False) -> StartedStep:
        assert isinstance(lane, IsolatingLane)
        return self._models[lane.index].start(step, lane, ended, here=here)

    def close(self) -> None:
        for model in self._models:
            model.close()


def _labels(names: Sequence[str]) -> tuple[str, ...]:
    """Distinct labels for devices: ``cuda:0``, and if that name occurs again ``cuda:0#2``."""
    earlier_counts = [list(names[:index]).count(name) for index, name in enumerate(names)]
    return tuple(f"{name}#{count + 1}" if count else name for name, count in zip(names, earlier_counts, strict=True))


def _check_same_cuts(path: Path, labels: Sequence[str], models: Sequence[LoadedModel]) -> None:
    """Raise ``ModelError`` if the last of *models* is cut unlike the first: a scheduler has one list of segments."""
    first, last = models[0], models[-1]
    if (first.segments, first.batching.max_batch, first.exits) != (last.segments, last.batching.max_batch, last.exits):
        raise ModelError(
            f"{path}: is cut differently on {labels[len(models) - 1]} than on {labels[0]}; name devices of one kind"
        )
