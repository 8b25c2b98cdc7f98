"""Files of the system that confined processes need for a GPU: to run models there, and to compile kernels."""

from __future__ import annotations

import glob
from importlib.util import find_spec

from weft.runtime.isolated.confinement import LIBRARIES
from weft.runtime.isolated.engine import DeviceFiles

READ = ("/proc", "/sys", "/usr/local/nvidia", "/usr/local/cuda", "/opt/nvidia", "/etc/nvidia", "/usr/share/nvidia")
"""Files that CUDA's libraries read."""
WRITTEN = ("/dev/nvidia*", "/dev/nvidia-caps/*", "/dev/dri/*", "/dev/dxg", "/dev/null", "/proc/self")
"""Files of the GPUs, and files by which the process names its threads."""
COMPILERS = ("/usr/bin", "/bin", "/usr/sbin", "/sbin", "/usr/libexec", "/usr/include", *LIBRARIES)
"""Folders of the C compiler and its files, which triton uses to build kernels, and of libraries: programs are loaded by
one of them."""


def device_files() -> DeviceFiles:
    """What a process may read and write to use a GPU."""
    return DeviceFiles(READ, tuple(sorted(path for pattern in WRITTEN for path in glob.glob(pattern))))


def compilers() -> tuple[str, ...]:
    """What a process may run to compile kernels: the system's compilers, and triton's if it is installed."""
    triton = find_spec("triton")
    return (*COMPILERS, *((triton.submodule_search_locations if triton is not None else None) or ()))
