"""The place of one version of a model in the library, whether it is loaded or not."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from weft.base.errors import ModelError
from weft.runtime.backend import LoadedModel
from weft.serving.config import ModelConfig
from weft.serving.exit_rules import leaving_at
from weft.serving.repository import MODEL_FILE, ModelEntry
from weft.serving.statistics import Statistics
from weft.serving.streams import ServedModel

State = Literal["unloaded", "loading", "ready", "failed"]

UNLOADED_KEYS = {"slo_ms", "timeout_ms", "priority", "preload", "tasks"}
"""Settings of a model that are looked at with every request: it need not be loaded again where they change."""


class Origin(NamedTuple):
    """What a model was loaded from; another one means that it would be another model."""

    files: tuple[tuple[str, int, int, int], ...]
    """Name, time, size and number of every file."""
    settings: dict[str, Any]


def origin_of(entry: ModelEntry) -> Origin:
    """What a model would be loaded from now."""
    return Origin(_files(entry.path), entry.config.model_dump(exclude=UNLOADED_KEYS))


def _files(path: Path) -> tuple[tuple[str, int, int, int], ...]:
    """All that lies in the folder of a model that has one; of others what has its name."""
    folder = path.parent
    each = folder.rglob("*") if path.name == MODEL_FILE else {path, *folder.glob(f"{path.stem}*.data")}
    try:
        found = [(str(file.relative_to(folder)), file.stat()) for file in each if file.is_file()]
    except OSError:  # it is being changed right now
        return ()
    return tuple(sorted((name, seen.st_mtime_ns, seen.st_size, seen.st_ino) for name, seen in found))


@dataclass(eq=False)
class ModelSlot:
    """One version of a model, loaded or not."""

    entry: ModelEntry
    state: State = "unloaded"
    message: str = ""
    served: ServedModel | None = None
    loading: asyncio.Task[None] | None = None
    waiters: int = 0
    """Requests that wait for it to be loaded."""
    used_ns: int = 0
    shut: bool = False
    """Somebody unloaded it, so that requests do not bring it back."""
    gone: bool = False
    """Its file was removed."""
    statistics: Statistics = field(default_factory=Statistics)
    """What is counted of it, over all times it was loaded."""
    size_bytes: int = 0
    """What it held when it was last loaded."""
    failed_on: tuple[int, int] | None = None
    """Time and size of the file that could not be loaded."""
    origin: Origin | None = None
    """What its files and its settings were when it was last loaded."""

    @property
    def config(self) -> ModelConfig:
        return self.entry.config

    def take(self, body: ServedModel, now_ns: int) -> None:
        """Serve requests with what was loaded, unless it was unloaded meanwhile; ModelError if it is not in there."""
        if self.shut:
            self.state = "unloaded"
            return
        served = self._of(body)
        served.statistics = self.statistics
        self.served, self.state, self.message = served, "ready", _said(body.loaded, self.entry)
        self.used_ns, self.failed_on = now_ns, None
        self.size_bytes = body.residency.memory_bytes + body.residency.moving_bytes

    def _of(self, body: ServedModel) -> ServedModel:
        """The model of this name that has the body."""
        tasks = body.loaded.tasks
        if not tasks and not self.entry.body:
            return body
        for task in tasks.specs if tasks and self.entry.body else ():
            if task.name == self.entry.name:
                return body.for_task(task, queue_size=self.config.queue_size, leaving=leaving_at(task, self.config))
        raise ModelError(f"{self.entry.path.name} holds other models now; ask for the index, and load those")

    def fail(self, message: str) -> None:
        """It cannot be loaded, as long as its file stays as it is."""
        self.message, self.failed_on = message, signature(self.entry.path)
        self.state = "ready" if self.served else "failed"

    @property
    def outage(self) -> str:
        """Why a model that is loaded takes no requests for a while; nothing where it does."""
        breaker = self.served.loaded.breaker if self.served else None
        return breaker.why if breaker else ""

    def guess_bytes(self) -> int:
        """What its body will need: what it held last time, or the size of its files."""
        return self.size_bytes or file_bytes(self.entry.path)


def file_bytes(path: Path) -> int:
    """The size of a model's files; 0 where they cannot be looked at."""
    try:
        return sum(file.stat().st_size for file in {path, *path.parent.glob(f"{path.stem}*.data")})
    except OSError:
        return 0


def signature(path: Path) -> tuple[int, int] | None:
    """What changes when a file does."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _said(loaded: LoadedModel, entry: ModelEntry) -> str:
    family = [f"one of {len(loaded.tasks.specs)} with the body {entry.body}"] if loaded.tasks else []
    return "; ".join([*family, *loaded.remarks])
