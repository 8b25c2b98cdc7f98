"""The environment of a benchmark: machine and versions for its results, and processes that keep its cores awake."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from weft.base.version import __version__

IDLE = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


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


@contextmanager
def awake() -> Iterator[None]:
    """Keep all cores of this process in the block, where the system has such priorities.

    A core with nothing to do is given to others, and gets back late: on a shared machine servers, which wake up
    thousands of times a second, lose a tenth to a half of their time that way. One process per core that does nothing,
    at a priority below all others (Linux: SCHED_IDLE), keeps them; everything that has something to do runs at once.

    It is computing all the same. A machine that lends full speed for a while only, and then takes most of it away, was
    seen to do so after half an hour of this: measure for 20 minutes, and let it idle before the next.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "SCHED_IDLE") else []
    idlers = [subprocess.Popen([sys.executable, "-c", IDLE, str(core)]) for core in cores]
    try:
        yield
    finally:
        for each in idlers:
            each.kill()
        for idler in idlers:
            idler.wait()
