"""What opens models and runs their steps in a worker, by name; it is imported there, and in the template before it.

``cpu`` is ONNX Runtime on the cores, ``cuda:0`` and its like are a GPU. The server itself never imports one of them.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from weft.runtime.backend import DeviceLane, LoadedModel, LoadOptions
from weft.runtime.isolated.confinement import LIBRARIES
from weft.runtime.lent import Borrowed, LendingTerms
from weft.runtime.twins import is_twin

CPU = "cpu"

CUDA_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "NVIDIA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG",
)  # fmt: skip
"""What a worker with a GPU has of the environment besides."""

CUDA_READ = ("/proc", "/sys", "/usr/local/nvidia", "/usr/local/cuda", "/opt/nvidia", "/etc/nvidia", "/usr/share/nvidia")
"""What CUDA's libraries look at."""
CUDA_WRITTEN = ("/dev/nvidia*", "/dev/nvidia-caps/*", "/dev/dri/*", "/dev/dxg", "/dev/null", "/proc/self")
"""The devices themselves, and the names of the process's own threads."""
COMPILERS = ("/usr/bin", "/bin", "/usr/sbin", "/sbin", "/usr/libexec", "/usr/include", *LIBRARIES)
"""Where the C compiler is, and what it needs, with which triton makes kernels; the loader of programs is a library."""


class EngineLane(DeviceLane, Protocol):
    """A lane inside a worker."""

    def stop(self, step: int) -> None:
        """Have the step of this number, counted from 1, end soon, if it is the last one and can be stopped."""
        ...

    def move(self, leaving: Sequence[Any], coming: Any) -> None:
        """Let models leave the device's memory, and have one come back, before the next step."""
        ...

    def took(self, memory: Any) -> None:
        """Inputs will lie in this memory, an array of bytes that the server writes to."""
        ...

    def dropped(self, memory: Any) -> None:
        """They will not any more."""
        ...


class WorkerEngine(Protocol):
    """What a worker runs models with."""

    here: bool
    """Whether a step is computed on the thread that starts it."""
    kept_bytes: int
    """A larger memory for tensors goes with the step it was made for."""

    def open(self, path: Path, options: LoadOptions, cache: Path | None, *, learn: bool) -> LoadedModel:
        """Open a model, from the *cache* if one is named; ``NotLearned`` where it had to be learned and shall not."""
        ...

    def lane(self, index: int) -> EngineLane:
        """Open a lane."""
        ...

    def borrow(self, terms: LendingTerms, file: int | None) -> Borrowed:
        """Get at a region of a client's; BadRequest where that cannot be."""
        ...

    def rest(self, asked: Callable[[float], bool]) -> None:
        """Give back what is not needed, until *asked*, which waits so many seconds, says that a step has come."""
        ...

    def told(self) -> dict[str, float]:
        """What it holds and how long it computed, by the names of metrics."""
        ...


def make_engine(name: str) -> WorkerEngine:
    """The engine of this name; whatever it lacks is an ``InputError``."""
    if name == CPU:
        from weft.runtime.isolated.cpu_engine import CpuEngine

        return CpuEngine()
    from weft.runtime.cuda.engine import CudaEngine

    return CudaEngine(name)


def warm_up(name: str) -> None:
    """Import what an engine needs, and touch no device: a process that has cannot be forked."""
    if name == CPU:
        import weft.runtime.isolated.cpu_engine

        return
    import weft.runtime.cuda.engine

    if not is_twin(name):
        import weft.runtime.cuda.gpu  # noqa: F401


def variables(name: str) -> tuple[str, ...]:
    """What a worker needs of the environment besides what all have."""
    return () if name == CPU else CUDA_VARIABLES


def device_files(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a worker may read, and what it may read and write, for its device."""
    if name == CPU:
        return (), ()
    return CUDA_READ, tuple(sorted(each for pattern in CUDA_WRITTEN for each in glob.glob(pattern)))


def programs(name: str) -> tuple[str, ...]:
    """What a worker may run: with a GPU the compilers of kernels, where there is something that needs them."""
    triton = find_spec("triton") if name != CPU and not is_twin(name) else None
    return (*COMPILERS, *(triton.submodule_search_locations or ())) if triton is not None else ()
