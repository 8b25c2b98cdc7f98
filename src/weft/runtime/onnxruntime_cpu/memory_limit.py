"""How much memory this process may have: the machine's, or less where the process is limited."""

from __future__ import annotations

import os
import sys
from pathlib import Path

UNKNOWN = 1 << 62
"""Where the system does not tell."""


CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where a container's limit stands, in version 2 and 1 of Linux control groups."""


def memory_limit_bytes() -> int:
    """The memory of the machine or the container, or a limit of this process (``RLIMIT_DATA``, ``RLIMIT_AS``)."""
    return min(machine_memory_bytes(), *_process_limits())


def machine_memory_bytes() -> int:
    """The memory of the machine with its swap space, or what its container may have."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return UNKNOWN
    return min(physical + _swap_bytes(), *map(_limit_in, CONTAINER_LIMITS))


def _limit_in(file: Path) -> int:
    """The number in a file of a control group; unknown where there is none, or it is ``max``."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return UNKNOWN


def _swap_bytes() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next((int(line.split()[1]) << 10 for line in lines if line.startswith("SwapTotal:")), 0)
    except (OSError, ValueError):
        return 0


def _process_limits() -> list[int]:
    if sys.platform == "win32":
        return [UNKNOWN]
    import resource

    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS))
    return [UNKNOWN if limit == resource.RLIM_INFINITY else limit for limit in limits]
