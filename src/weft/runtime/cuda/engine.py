"""The engine of a worker process for a GPU: the device, its models and its lane."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from weft.base.errors import ModelError
from weft.devices.host import GpuCuts
from weft.runtime.backend import LoadedModel, LoadOptions
from weft.runtime.client_memory import Borrowed, LendingTerms
from weft.runtime.cuda.cpu_twins import TORCH_TWIN, UNCUT_TWIN, is_twin
from weft.runtime.cuda.device import Device, HostDevice, lacks_memory
from weft.runtime.cuda.lane import CudaLane
from weft.runtime.cuda.model import DeviceModel
from weft.runtime.cuda.preparing import prepare_on
from weft.runtime.tensors import Array

log = logging.getLogger("weft.device")

KEPT_BYTES = 256 << 20
"""Bytes of shared memory that a lane keeps; registering it with the driver is slow."""
LOST = 70
"""Exit code of a worker whose device does not answer any more."""


def device_named(name: str) -> Device:
    """Open the device of a name such as ``cuda:0``, or a twin on the CPU."""
    if name == UNCUT_TWIN:
        old = "this is a twin of a device with an old driver"
        return HostDevice(GpuCuts(sms=8), old, gateless=old)
    if is_twin(name):
        return HostDevice(runs_sessions=name != TORCH_TWIN)
    from weft.runtime.cuda.gpu import Gpu

    return Gpu(int(name.partition(":")[2]))


class CudaEngine:
    """Runs models on one GPU."""

    here = False  # steps are queued on the device, not computed on the calling thread
    kept_bytes = KEPT_BYTES

    def __init__(self, name: str) -> None:
        self.name = name
        self._device: Device | None = None
        self._lanes: list[CudaLane] = []
        self._stops: Array | None = None
        self._shares = False  # whether lanes are shares of the device: a model was opened with that option

    @property
    def device(self) -> Device:
        """The device; it is initialised by the first access."""
        if self._device is None:
            try:
                self._device = device_named(self.name)
                if self._stops is not None:
                    self._device.use_stops(self._stops)
            except RuntimeError as error:
                raise ModelError(f"{self.name} cannot be used: {str(error).splitlines()[0]}") from error
        return self._device

    def use_stops(self, stops: Array) -> None:
        self._stops = stops

    def open(self, path: Path, options: LoadOptions, cache: Path | None, *, learn: bool) -> LoadedModel:
        """Open a model on the device, and evict it if the options allow that; ``ModelError`` if memory is lacking.

        learn: False: ``NotLearned`` if the model would have to be measured.
        """
        self._shares |= options.shares
        try:
            model = prepare_on(self.device, path, options, cache, learn=learn)
            if options.rests and isinstance(model, DeviceModel):
                model.evict_and_time()
            return model
        except Exception as error:  # torch and ONNX Runtime raise kinds of their own
            if not lacks_memory(error):
                raise
            free, total = self.device.memory()
            raise ModelError(
                f"{path}: needs more memory than {self.name} has, of whose {total >> 20} MiB {free >> 20} are free; "
                "lower max_batch, or serve fewer models"
            ) from error

    def lane(self, index: int) -> CudaLane:
        share = index if self._shares else 0
        lane = CudaLane(index, self.device, time.monotonic_ns, self._end_lost, share=share)
        self._lanes.append(lane)
        return lane

    def borrow(self, terms: LendingTerms, file: int | None) -> Borrowed:
        return self.device.borrow(terms, file)

    def rest(self, wait_for_step: Callable[[float], bool]) -> None:
        """Do nothing: no memory is freed between steps."""

    def metrics(self) -> dict[str, float]:
        free, total = self.device.memory()
        return {"memory_bytes": total - free, "busy_s": sum(lane.busy_ns for lane in self._lanes) / 1e9}

    def _end_lost(self, error: Exception) -> None:
        """End this process because its device is lost; the server starts another worker."""
        sys.stderr.write(f"weft: {self.name} was lost: {str(error).splitlines()[0]}\n")
        sys.stderr.flush()
        os._exit(LOST)
