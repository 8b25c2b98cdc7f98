"""On what a benchmark ran: the machine and the versions that its numbers belong to."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

from weft.base.version import __version__


def machine(*packages: str) -> dict[str, object]:
    """Processor, cores and versions, of weft and of *packages*."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "weft": __version__,  # of the checkout; what was installed may be older
        **{name: version(name) for name in ("numpy", *packages)},
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name")]
    return f"{platform.machine()} {names[0] if names else platform.processor()}".strip()
