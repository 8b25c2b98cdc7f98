"""This machine and these versions, as a plan notes them and ``weft plan --check`` compares them."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from weft.devices.host import usable_cores
from weft.planning.plan import PlanMachine
from weft.version import __version__


def this_machine() -> PlanMachine:
    """The whole of this machine."""
    return PlanMachine(cores=usable_cores(), memory_bytes=memory_here(), processor=processor_here())


def these_versions() -> dict[str, str]:
    """What computes and decides, by name."""
    return {"weft": __version__, "python": platform.python_version(), "onnxruntime": _installed("onnxruntime")}


def made_here() -> str:
    """A sentence on where and when a plan was made."""
    versions = ", ".join(f"{name} {number}" for name, number in these_versions().items())
    now = datetime.now(UTC).isoformat(timespec="minutes")
    return f"{processor_here()}, {usable_cores()} cores; {versions}; {now}"


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


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
