"""The place of one version of a model in the library, whether it is loaded or not."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from weft.base.errors import ModelError
from weft.runtime.backend import LoadedModel
from weft.serving.config import ModelConfig
from weft.serving.exit_rules import make_task_exits
from weft.serving.repository import MODEL_FILE, ModelEntry
from weft.serving.statistics import Statistics
from weft.serving.streams import ServedModel

State = Literal["unloaded", "loading", "ready", "failed"]

NO_RELOAD_KEYS = {"slo_ms", "timeout_ms", "priority", "preload", "tasks"}
"""Settings that are read whenever they are needed: changing them does not require loading the model again."""


class Origin(NamedTuple):
    """The files and settings a model was loaded from; if they differ, the model must be loaded again."""

    files: tuple[tuple[str, int, int, int], ...]
    """Name, modification time, size and inode of every file."""
    settings: dict[str, Any]


def origin_of(entry: ModelEntry) -> Origin:
    """Return the current files and settings of a model."""
    return Origin(_files(entry.path), entry.config.model_dump(exclude=NO_RELOAD_KEYS))


def _files(path: Path) -> tuple[tuple[str, int, int, int], ...]:
    """List the files of a model as in ``Origin.files``: all in its own folder, or those with its name."""
    folder = path.parent
    files = folder.rglob("*") if path.name == MODEL_FILE else {path, *folder.glob(f"{path.stem}*.data")}
    try:
        statuses = [(str(file.relative_to(folder)), file.stat()) for file in files if file.is_file()]
    except OSError:  # it is being changed right now
        return ()
    return tuple(sorted((name, status.st_mtime_ns, status.st_size, status.st_ino) for name, status in statuses))


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
    """When it was last loaded or requested."""
    client_unloaded: bool = False
    """A client unloaded it: requests do not load it again."""
    file_removed: bool = False
    statistics: Statistics = field(default_factory=Statistics)
    """Counters, kept when the model is loaded again."""
    size_bytes: int = 0
    """Bytes that it held when it was last loaded."""
    failed_on: tuple[int, int] | None = None
    """Signature of the file that could not be loaded, so that it is not tried again unchanged."""
    origin: Origin | None = None
    """The files and settings it was last loaded from."""

    @property
    def config(self) -> ModelConfig:
        return self.entry.config

    def take(self, body: ServedModel, now_ns: int) -> None:
        """Serve requests for this model with a loaded body; ModelError if the body does not contain the model.

        No effect if a client has unloaded the model meanwhile.
        """
        if self.client_unloaded:
            self.state = "unloaded"
            return
        served = self._model_of(body)
        served.statistics = self.statistics
        self.served, self.state, self.message = served, "ready", _load_message(body.loaded, self.entry)
        self.used_ns, self.failed_on = now_ns, None
        self.size_bytes = body.residency.memory_bytes + body.residency.moving_bytes

    def _model_of(self, body: ServedModel) -> ServedModel:
        """Return this slot's model of a body: a task if the file is stitched, else the body itself."""
        tasks = body.loaded.tasks
        if not tasks and not self.entry.body:
            return body
        for task in tasks.specs if tasks and self.entry.body else ():
            if task.name == self.entry.name:
                exit_rules = make_task_exits(task, self.config)
                return body.for_task(task, queue_size=self.config.queue_size, exit_rules=exit_rules)
        raise ModelError(f"{self.entry.path.name} holds other models now; ask for the index, and load those")

    def fail(self, message: str) -> None:
        """Record that the model cannot be loaded from its current file; *message*: the reason."""
        self.message, self.failed_on = message, signature(self.entry.path)
        self.state = "ready" if self.served else "failed"

    @property
    def outage(self) -> str:
        """Why the circuit breaker of a loaded model is open; empty if it takes requests."""
        breaker = self.served.loaded.breaker if self.served else None
        return breaker.why if breaker else ""

    def guess_bytes(self) -> int:
        """Estimate the bytes of the loaded body: those of the last time, else the size of its files."""
        return self.size_bytes or file_bytes(self.entry.path)


def file_bytes(path: Path) -> int:
    """Return the size of a model's files; 0 if they cannot be read."""
    try:  # ONNX may keep weights in .data files beside the model
        return sum(file.stat().st_size for file in {path, *path.parent.glob(f"{path.stem}*.data")})
    except OSError:
        return 0


def signature(path: Path) -> tuple[int, int] | None:
    """Return time and size of a file, which change with its content; None if it cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _load_message(loaded: LoadedModel, entry: ModelEntry) -> str:
    """Return what the index says about a loaded model: the body it shares with others, and its remarks."""
    body_note = [f"one of {len(loaded.tasks.specs)} with the body {entry.body}"] if loaded.tasks else []
    return "; ".join([*body_note, *loaded.remarks])
