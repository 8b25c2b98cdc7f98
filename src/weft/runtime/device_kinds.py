"""Kinds of devices: what the names that ``--device`` takes mean, as weft and other tools register them.

The part of a name before its colon is the kind, an entry of the section ``devices`` in a ``tool.toml``, whose target is
called without arguments and gives a ``DeviceKind``. That the name of a device can be one is seen from the entry alone
(``weft.devices.host.is_device``); its kind is imported when the device is asked for.
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

log = logging.getLogger("weft.device")


class DeviceKind(Protocol):
    """A kind of device of this machine; cheap to import and to make, and nothing is touched before ``open``."""

    @property
    def ahead(self) -> int:
        """How many steps a lane takes besides the one that it runs (``DeviceLane.ahead``)."""
        ...

    @property
    def shares(self) -> bool:
        """Whether models can share a device, so that what they are like on parts of it is measured for plans."""
        ...

    @property
    def engine(self) -> EngineKind | None:
        """What weft's worker processes need for it; None where its backend has no such workers."""
        ...

    def check(self, name: str) -> str | None:
        """``InputError`` that says what a device lacks here, and how to get it; else what is worth a line, or None."""
        ...

    def called(self, name: str) -> str:
        """What a device is, as a plan notes it and compares it later: its model and versions; empty: it is not here."""
        ...

    def open(self, names: Sequence[str], limits: WorkerLimits, memory_bytes: int | None) -> Backend:
        """The backend of one device, or of several that have every model, with a lane for each.

        limits: for worker processes, where it has some. memory_bytes: what models may hold of each device's memory
        together, as ``device_memory_bytes`` says. Each name was checked.
        """
        ...


def device_kind(name: str) -> DeviceKind:
    """The kind of a device's name; InputError where none is registered, or it cannot be imported."""
    entry = find("devices", name.partition(":")[0], "kind of device")
    make = entry.load()
    try:
        kind: DeviceKind = make()
    except Exception as error:
        if entry.tool.own:
            raise
        raise InputError(f"tool {entry.tool.name!r}: its device {name} cannot be used: {error}") from error
    return kind


def device_called(name: str) -> str:
    """What a device is on this machine; empty where it, or its kind, is not here."""
    return device_kind(name).called(name) if device_entry(name) else ""


def on_device(device: str, limits: WorkerLimits, memory_bytes: int | None = None) -> Backend:
    """The backend of a device, or of several with commas between them; InputError that says what is missing here."""
    names = device.split(",")
    if len({name.partition(":")[0] for name in names}) > 1:
        raise InputError(f"device = {device}: models run on devices of one kind; name one of them")
    kind = device_kind(names[0])
    for name in dict.fromkeys(names):
        if remark := kind.check(name):
            log.warning("%s", remark)
    return kind.open(names, limits, memory_bytes)
