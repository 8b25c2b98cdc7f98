"""Kinds of devices: what the names that ``--device`` takes mean, as weft and other tools register them.

The part of a name before its colon is the kind, an entry of the section ``devices`` in a ``tool.toml``, whose target is
called without arguments and returns a ``DeviceKind``. Whether the name of a device can be one is seen from the entry
alone (``weft.devices.host.is_device``); its kind is imported when the device is asked for. ``engine_kind`` finds the
engine that worker processes of a device run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from weft.base.errors import InputError
from weft.base.registry import find
from weft.devices.host import device_entry
from weft.runtime.backend import Backend
from weft.runtime.isolated.engine import EngineKind
from weft.runtime.isolated.limits import WorkerLimits
from weft.runtime.metadata import CPU

log = logging.getLogger("weft.device")


class DeviceKind(Protocol):
    """A kind of device of this machine; cheap to import and to construct, and no device is touched before ``open``."""

    @property
    def ahead(self) -> int:
        """How many steps a lane queues besides the one that it runs (``DeviceLane.ahead``)."""
        ...

    @property
    def shares(self) -> bool:
        """Whether models can share a device, so that plans measure their run times on parts of the device."""
        ...

    @property
    def engine(self) -> EngineKind | None:
        """The engine that weft's worker processes run for this kind; None where its backend has no such workers."""
        ...

    def check(self, name: str) -> str | None:
        """Return a warning to log, or None; ``InputError``, with the way out, if the device is not usable here."""
        ...

    def called(self, name: str) -> str:
        """What it is called: hardware model and software versions, which a plan compares; empty: no such device."""
        ...

    def open(self, names: Sequence[str], limits: WorkerLimits, memory_bytes: int | None) -> Backend:
        """The backend of one device, or of several devices that each hold every model, with one lane per device.

        limits: for worker processes, if the backend has any. memory_bytes: device memory that all models together may
        hold, per device (the setting ``device_memory_bytes``). All *names* have passed ``check``.
        """
        ...


def device_kind(name: str) -> DeviceKind:
    """The kind of the device *name*, such as ``cuda:0``; InputError where none is registered or its import fails."""
    entry = find("devices", name.partition(":")[0], "kind of device")
    make = entry.load()
    try:
        kind: DeviceKind = make()
    except Exception as error:
        if entry.tool.own:  # a bug of ours: keep its traceback
            raise
        raise InputError(f"tool {entry.tool.name!r}: its device {name} cannot be used: {error}") from error
    return kind


def device_called(name: str) -> str:
    """Hardware model and software versions of a device; empty where the device, or its kind, is not on this machine."""
    return device_kind(name).called(name) if device_entry(name) else ""


def on_device(device: str, limits: WorkerLimits, memory_bytes: int | None = None) -> Backend:
    """The backend of a device, or of several with commas between them; InputError where a device is not usable here.

    limits, memory_bytes: as for ``DeviceKind.open``.
    """
    names = device.split(",")
    if len({name.partition(":")[0] for name in names}) > 1:
        raise InputError(f"device = {device}: models run on devices of one kind; name one of them")
    kind = device_kind(names[0])
    for name in dict.fromkeys(names):  # a device may be named twice, and is checked once
        if remark := kind.check(name):
            log.warning("%s", remark)
    return kind.open(names, limits, memory_bytes)


def engine_kind(name: str) -> EngineKind:
    """The engine for worker processes, by ``cpu`` or the name of a device; InputError where the kind has no workers."""
    if name == CPU:
        # Imported here: it imports ONNX Runtime, which a server of another device need not have.
        from weft.runtime.isolated.cpu_engine import CpuEngineKind

        return CpuEngineKind()
    kind = device_kind(name).engine
    if kind is None:
        raise InputError(f"{name} has no worker processes of weft")
    return kind
