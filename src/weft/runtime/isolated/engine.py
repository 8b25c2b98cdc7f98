"""What a worker process runs models with: an engine, and what the process is allowed for its sake."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from weft.runtime.backend import DeviceLane, LoadedModel, LoadOptions
from weft.runtime.lent import Borrowed, LendingTerms


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


class DeviceFiles(NamedTuple):
    """Files and folders that the confinement of a worker leaves open for its device."""

    read: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    """Those that it may also write to, as the device itself."""


class EngineKind(Protocol):
    """What worker processes of a kind of device need; *name* is that of the device."""

    variables: tuple[str, ...]
    """What they have of the server's environment besides what all workers have."""

    def make(self, name: str) -> WorkerEngine:
        """The engine, in a worker; whatever it lacks is an ``InputError``."""
        ...

    def warm_up(self, name: str) -> None:
        """Import what the engine needs, and touch no device: a process that has cannot be forked."""
        ...

    def files(self, name: str) -> DeviceFiles:
        """What they may read and write for the device."""
        ...

    def programs(self, name: str) -> tuple[str, ...]:
        """What they may execute."""
        ...
