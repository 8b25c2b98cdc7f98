"""Where models run, worked out from the settings of the server and of its models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from weft.base.errors import ModelError
from weft.devices.host import example_devices
from weft.runtime.backend import Backend
from weft.runtime.backends import make_backend
from weft.runtime.breaker import BreakerLimits
from weft.runtime.device_kinds import on_device
from weft.runtime.engines import ONNXRUNTIME, Engine
from weft.runtime.isolated.limits import WorkerLimits
from weft.runtime.metadata import kind_without_cpu
from weft.serving.config import ModelConfig, ServerConfig, WorkerSettings
from weft.serving.repository import ModelEntry

THREADS, PROCESS = "threads", "process"


def group_of(entry: ModelEntry, default: str, backend: Backend) -> str | None:
    """Return the name of the worker group that runs a model; None if it runs in threads of the server.

    default: the server's setting, for models without one. ModelError if the backend has no workers.
    """
    if backend.device is not None:
        return backend.device
    isolation = entry.config.isolation or default
    if isolation == THREADS:
        return None
    if not backend.isolates:
        raise ModelError(
            f'isolation = "{isolation}" cannot be had with this backend on this system; set isolation = "{THREADS}"'
        )
    return f"model:{entry.body or entry.name}" if isolation == PROCESS else isolation


def grain_s_of(config: ModelConfig, backend: Backend) -> float:
    """Return the target duration of a segment: the model's setting, or the default of the device."""
    default_s = backend.grain_s
    return config.grain_ms / 1e3 if default_s is None or "grain_ms" in config.model_fields_set else default_s


def precision_of(config: ModelConfig, default: str, backend: Backend) -> str:
    """Return the precision of a model, by default *default*; ModelError if it needs a device: only devices convert."""
    precision = config.precision or default
    if precision != "fp32" and backend.device is None:
        raise ModelError(f'precision = "{precision}" needs a device; serve with --device, or leave it out')
    return precision


def engine_of(config: ModelConfig, backend: Backend) -> Engine:
    """Return the engine of a model, by default the backend's; ModelError if it needs a device and there is none."""
    engine = config.engine or backend.default_engine
    if engine != ONNXRUNTIME and backend.device is None:
        raise ModelError(f'engine = "{engine}" needs a device; serve with --device, or leave it out')
    return engine


def check_device(path: Path, backend: Backend) -> None:
    """Refuse a model file without a device if its kind does not run on the cores; ModelError names a device."""
    kind = kind_without_cpu(path) if backend.device is None else None
    if kind is not None:
        devices = kind.details["devices"]
        raise ModelError(
            f"{path.suffix} files, of the kind {kind.name}, run on {' or '.join(devices)} only: serve with --device "
            f"{example_devices(devices)}, or export the model as ONNX"
        )


def backend_of(config: ServerConfig) -> Backend:
    """Open the backend of a server; InputError if this machine does not have it."""
    limits, execution = limits_of(config.workers), config.execution
    if execution.device is not None:  # its worker has all models, wherever in the repository they are
        limits = replace(limits, folders=_folders(config.loading.models), gates=execution.gates)
        return on_device(execution.device, limits, execution.device_memory_bytes)
    return make_backend(execution.backend, limits)


def _folders(models: Iterable[str]) -> tuple[str, ...]:
    """Return the folders among the sources of models, as given and with links resolved."""
    folders = [path for path in map(Path, models) if path.is_dir()]
    return tuple(sorted({str(path) for folder in folders for path in (folder.absolute(), folder.resolve())}))


def limits_of(workers: WorkerSettings) -> WorkerLimits:
    """Return the limits of the server's worker processes."""
    return WorkerLimits(
        memory_bytes=workers.worker_memory_bytes,
        kill_s=workers.worker_kill_s,
        spare=workers.worker_spare,
        breaker=BreakerLimits(workers.worker_deaths, workers.worker_deaths_s),
    )
