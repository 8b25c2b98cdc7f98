"""What a worker process runs models with: an engine, and the files and programs that the engine needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from weft.runtime.backend import DeviceLane, LoadedModel, LoadOptions
from weft.runtime.client_memory import Borrowed, LendingTerms
from weft.runtime.tensors import Array


class EngineLane(DeviceLane, Protocol):
    """A lane inside a worker."""

    def stop(self, step: int) -> None:
        """Stop the step of this number, counted from 1, if it is the last step and can be stopped."""
        ...

    def gate(self, slot: int) -> None:
        """Use a slot of the stop table for the next step, whose model has gates; 0: the step is never stopped."""
        ...

    def move(self, leaving: Sequence[Any], coming: Any) -> None:
        """Evict the models *leaving* from the device's memory and bring back *coming*, before the next step."""
        ...

    def register_buffer(self, memory: Any) -> None:
        """Register a buffer, an array of bytes, to which the server writes inputs: a GPU pins it."""
        ...

    def unregister_buffer(self, memory: Any) -> None:
        """Unregister a buffer; no step reads it any more."""
        ...


class WorkerEngine(Protocol):
    """Opens models and lanes inside a worker."""

    here: bool
    """Whether a step is computed on the thread that starts it."""
    kept_bytes: int
    """Buffers for tensors larger than this are freed after the step that they were created for."""

    def use_stops(self, stops: Array) -> None:
        """Use this stop table, which the server writes to, for the gates of all models; called before the first."""
        ...

    def open(self, path: Path, options: LoadOptions, cache: Path | None, *, learn: bool) -> LoadedModel:
        """Open a model, from the folder *cache* if that has it; ``NotLearned`` if it does not and *learn* is False."""
        ...

    def lane(self, index: int) -> EngineLane: ...

    def borrow(self, terms: LendingTerms, file: int | None) -> Borrowed:
        """Map a region of a client's memory, from *file* if it has one; BadRequest where that is not possible."""
        ...

    def rest(self, wait_for_step: Callable[[float], bool]) -> None:
        """Free idle memory until a step comes, or there is nothing to free.

        wait_for_step: waits up to the given number of seconds for a step, and returns whether one has come.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Memory in use and time computed, by the names of metrics."""
        ...


class DeviceFiles(NamedTuple):
    """Files and folders that the confinement of a worker leaves open for its device."""

    read: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    """Files that the worker may also write to, such as the device itself."""


class EngineKind(Protocol):
    """What worker processes of a kind of device need; *name*: the device, such as ``cuda:0``."""

    gates: bool
    """Whether models may have gates, so that workers get a stop table."""
    variables: tuple[str, ...]
    """Environment variables of the server that workers get in addition to those that all workers have."""

    def make(self, name: str) -> WorkerEngine:
        """Create the engine, in a worker; ``InputError`` if something that it needs is missing."""
        ...

    def warm_up(self, name: str) -> None:
        """Import the engine's packages, without using a device: a process that has used it cannot be forked."""
        ...

    def files(self, name: str) -> DeviceFiles:
        """What workers may read and write for the device."""
        ...

    def programs(self, name: str) -> tuple[str, ...]:
        """What workers may execute."""
        ...
