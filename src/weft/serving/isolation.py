"""Where models run: what the settings of the server and of its models come to."""

from __future__ import annotations

from weft.errors import ModelError
from weft.runtime.backend import Backend
from weft.runtime.breaker import Endurance
from weft.runtime.isolated.limits import WorkerLimits
from weft.serving.config import ServerConfig
from weft.serving.repository import ModelEntry

THREADS, PROCESS = "threads", "process"


def group_of(entry: ModelEntry, default: str, backend: Backend) -> str | None:
    """The group of workers that a model runs in; None where it runs in the server."""
    wanted = entry.config.isolation or default
    if wanted == THREADS:
        return None
    if not getattr(backend, "isolates", False):
        raise ModelError(
            f'isolation = "{wanted}" cannot be had with this backend on this system; set isolation = "{THREADS}"'
        )
    return f"model:{entry.body or entry.name}" if wanted == PROCESS else wanted


def limits_of(config: ServerConfig) -> WorkerLimits:
    """What the server's workers may have."""
    return WorkerLimits(
        memory_bytes=config.worker_memory_bytes,
        kill_s=config.worker_kill_s,
        spare=config.worker_spare,
        endurance=Endurance(config.worker_deaths, config.worker_deaths_s),
    )
