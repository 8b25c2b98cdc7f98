"""The machine of a plan: its device, and the machine and versions that ``weft plan --check`` compares."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from weft.base.errors import InputError
from weft.base.version import __version__, runtime_version
from weft.devices import HOST, Host, read_host
from weft.devices.host import device_entry, is_device, usable_cores
from weft.planning.plan import PlanMachine
from weft.runtime.device_kinds import device_called, device_kind
from weft.workloads.requests import Workload


def this_machine(device: str | None = None) -> PlanMachine:
    """This machine, with the name of the GPU *device* if a plan is for one."""
    return PlanMachine(
        cores=usable_cores(),
        memory_bytes=memory_here(),
        processor=processor_here(),
        gpu="" if device is None else device_called(device),
    )


def these_versions() -> dict[str, str]:
    """Name -> version of weft, Python and ONNX Runtime."""
    return {"weft": __version__, "python": platform.python_version(), "onnxruntime": runtime_version()}


def made_here(device: str | None = None) -> str:
    """A text with the machine, the versions and the time, for ``Plan.made``."""
    versions = ", ".join(f"{name} {number}" for name, number in these_versions().items())
    now = datetime.now(UTC).isoformat(timespec="minutes")
    where = "" if device is None else f"{device_called(device) or 'a device that is elsewhere'} ({device}), "
    return f"{where}{processor_here()}, {usable_cores()} cores; {versions}; {now}"


def memory_here() -> int:
    """Bytes of main memory; 0 if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # no such function or name on this system
        return 0


def processor_here() -> str:
    """The name of the processor, or its architecture if the system does not report a name."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text("utf-8", "replace").splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


class PlanTarget(NamedTuple):
    """The device for which a plan is made."""

    device: str | None
    """A device of this machine, such as a GPU; None: the cores."""
    measured: tuple[Host, ...]
    """Its measurements; empty: it has to be measured."""


def plan_target(devices: Sequence[str | Host], workload: Workload) -> PlanTarget:
    """Return the target that *devices* name, or else the workload, if its device is one of this machine."""
    requested = list(devices) or ([workload.device] if device_entry(workload.device) else [])
    if not requested or requested == [HOST]:
        return PlanTarget(None, ())
    first = requested[0]
    if len(requested) == 1 and isinstance(first, str) and is_device(first):
        device_kind(first).check(first)  # raises an error if it cannot be used
        return PlanTarget(first, ())
    hosts = tuple(device if isinstance(device, Host) else _read(device) for device in requested)
    device = next((host.name for host in hosts if is_device(host.name)), None)
    if device is not None and len(hosts) > 1:
        raise InputError(f"device = {device}: a plan is for one device, measured once; name that file alone")
    return PlanTarget(device, hosts)


def _read(device: str) -> Host:
    """Read a measured host from a file; raises InputError with advice for any other name of a device."""
    if entry := device_entry(device):
        example = entry.details["example"]
        raise InputError(f"device = {device}: a plan is for one device, by its name; name it alone, as {example}")
    if not device.endswith(".json"):
        raise InputError(
            f"device = {device}: a plan is for a machine that serves; leave it out to measure this one, or name a file "
            f"of weft profile MODELS --device host -o FILE (weft sustain --device {device} tells what an NPU carries)"
        )
    return read_host(device)
