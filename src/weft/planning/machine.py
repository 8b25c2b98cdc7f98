"""This machine and these versions, as a plan notes them and ``weft plan --check`` compares them."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

from weft.base.version import __version__, runtime_version
from weft.devices.host import usable_cores
from weft.planning.plan import PlanMachine
from weft.runtime.device_kinds import device_called


def this_machine(device: str | None = None) -> PlanMachine:
    """The whole of this machine, and what that device of it is for which a plan is made."""
    return PlanMachine(
        cores=usable_cores(),
        memory_bytes=memory_here(),
        processor=processor_here(),
        gpu="" if device is None else device_called(device),
    )


def these_versions() -> dict[str, str]:
    """What computes and decides, by name."""
    return {"weft": __version__, "python": platform.python_version(), "onnxruntime": runtime_version()}


def made_here(device: str | None = None) -> str:
    """A sentence on where and when a plan was made."""
    versions = ", ".join(f"{name} {number}" for name, number in these_versions().items())
    now = datetime.now(UTC).isoformat(timespec="minutes")
    where = "" if device is None else f"{device_called(device) or 'a device that is elsewhere'} ({device}), "
    return f"{where}{processor_here()}, {usable_cores()} cores; {versions}; {now}"


def memory_here() -> int:
    """Bytes of main memory; 0 where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # no such function or name on this system
        return 0


def processor_here() -> str:
    """The processor by name, as far as the system tells it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text("utf-8", "replace").splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
