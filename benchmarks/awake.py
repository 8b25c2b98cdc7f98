"""Keeps the cores of a virtual machine while something is measured.

A core with nothing to do is given to others, and whoever wants it back waits: on a shared machine servers, which wake
up thousands of times a second, lose a tenth to a half of their time that way. One process per core that does nothing,
at a priority below all others (Linux: SCHED_IDLE), keeps them; whoever has something to do runs at once.

It is computing all the same. A machine that lends full speed for a while only, and then takes most of it away, was seen
to do so after half an hour of this: measure for 20 minutes, and let it idle before the next.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

IDLE = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def awake() -> Iterator[None]:
    """Keep all cores of this process in the block, where the system has such priorities."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "SCHED_IDLE") else []
    idlers = [subprocess.Popen([sys.executable, "-c", IDLE, str(core)]) for core in cores]
    try:
        yield
    finally:
        for each in idlers:
            each.kill()
        for each in idlers:
            each.wait()
