"""The backends there are, by name; one that is not part of weft is found by its entry point."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from weft.base.errors import InputError, unknown_name
from weft.runtime.backend import Backend
from weft.runtime.isolated.limits import WorkerLimits
from weft.runtime.twins import is_twin

log = logging.getLogger("weft.device")

ENTRY_POINTS = "weft.backends"
"""The group in which other packages name theirs: something that is called without arguments and gives a ``Backend``."""


def _onnxruntime() -> Backend:
    from weft.runtime.onnxruntime_cpu.backend import CpuBackend

    return CpuBackend()


DEFAULT = "onnxruntime"
BACKENDS: dict[str, Callable[[], Backend]] = {DEFAULT: _onnxruntime}


def make_backend(name: str = DEFAULT) -> Backend:
    """The backend of this name; InputError where there is none, or where it cannot be had."""
    if name in BACKENDS:
        return BACKENDS[name]()
    others = {each.name: each for each in entry_points(group=ENTRY_POINTS)}
    if name not in others:
        raise InputError(unknown_name("backend", name, [*BACKENDS, *others]))
    return _loaded(others[name])


def isolating(backend: Backend, limits: WorkerLimits) -> Backend:
    """A backend that can also run models in worker processes, where there is such a one."""
    if sys.platform != "linux":
        return backend
    from weft.runtime.isolated.backend import IsolatingBackend
    from weft.runtime.onnxruntime_cpu.backend import CpuBackend

    return IsolatingBackend(backend, limits) if isinstance(backend, CpuBackend) else backend


def on_device(device: str, limits: WorkerLimits, memory_bytes: int | None = None) -> Backend:
    """A GPU, or several with commas between them, in worker processes; InputError that says what is missing here."""
    if sys.platform != "linux":
        raise InputError(f"{device}: devices are worked by processes that Linux alone has; leave out device")
    from weft.runtime.cuda.requirements import check
    from weft.runtime.isolated.device import DeviceBackend
    from weft.runtime.isolated.devices import SeveralDevices

    names = device.split(",")
    for name in dict.fromkeys(names):
        if not is_twin(name) and (remark := check(name)):
            log.warning("%s", remark)
    if len(names) == 1:
        return DeviceBackend(device, limits, memory_bytes)
    return SeveralDevices(names, limits, memory_bytes)


def _loaded(entry: EntryPoint) -> Backend:
    try:
        made: Backend = entry.load()()
    except ImportError as error:
        raise InputError(f"backend {entry.name!r} cannot be loaded: {error}; install what it needs") from error
    return made
