"""Which models are loaded: loading on demand within a memory budget, leases, and leaving.

A model that a request needs is never closed under it: whoever is replaced, unloaded or evicted leaves when
its last request is answered. All state is the event loop's; only the loading itself happens on a thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from weft.errors import ModelError, NotFound, Overloaded, WeftError
from weft.runtime.prepared import Prepared
from weft.runtime.preparing import Recipe, prepare
from weft.serving.config import ModelConfig
from weft.serving.dispatch import Dispatcher
from weft.serving.leaving import Leaving, outputs_of, record_beside
from weft.serving.repository import Entry, Repository
from weft.serving.statistics import Statistics
from weft.serving.steering import Steering
from weft.serving.streams import Served
from weft.serving.wire import ModelSpec

log = logging.getLogger("weft.models")

State = Literal["unloaded", "loading", "ready", "failed"]


@dataclass(eq=False)
class Slot:
    """One version of a model, loaded or not."""

    entry: Entry
    state: State = "unloaded"
    message: str = ""
    served: Served | None = None
    spec: ModelSpec | None = None
    loading: asyncio.Task[None] | None = None
    waiters: int = 0
    """Requests that wait for it to be loaded."""
    used_ns: int = 0
    shut: bool = False
    """Somebody unloaded it, so that requests do not bring it back."""
    statistics: Statistics = field(default_factory=Statistics)
    """Of all times it was loaded."""
    size_bytes: int = 0
    """What it held when it was last loaded."""
    failed_on: tuple[int, int] | None = None
    """Time and size of the file that could not be loaded."""

    @property
    def config(self) -> ModelConfig:
        return self.entry.config


class Library:
    """The models of a repository, and which of them are in memory."""

    def __init__(
        self,
        repository: Repository,
        dispatcher: Dispatcher,
        *,
        threads: int = 1,
        budget_bytes: int | None = None,
        cache: Path | None = None,
    ) -> None:
        self.repository, self.budget_bytes = repository, budget_bytes
        self._dispatcher, self._threads, self._cache = dispatcher, threads, cache
        self._slots: dict[tuple[str, str], Slot] = {}
        self._leaving: set[Served] = set()
        self._loader = ThreadPoolExecutor(1, "loader")
        self._one_at_a_time = asyncio.Lock()
        self.evictions = 0
        self._room_changed = asyncio.Event()
        dispatcher.emptied = self._emptied

    @property
    def used_bytes(self) -> int:
        """What loaded models hold, those that are leaving included."""
        loaded = [slot.served for slot in self._slots.values() if slot.served]
        return sum(served.prepared.memory_bytes for served in [*loaded, *self._leaving])

    def slots(self) -> Iterator[Slot]:
        """Every version of every model there is, by name."""
        for name in self.repository.names():
            for version in self.repository.versions(name):
                yield self.find(name, version)

    def find(self, name: str, version: str = "") -> Slot:
        """A model by name; NotFound if there is none."""
        entry = self.repository.entry(name, version)
        key = entry.name, entry.version
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = Slot(entry)
        return slot

    async def ensure(self, slot: Slot) -> None:
        """Have a model loaded, or raise why it cannot be."""
        if slot.waiters >= slot.config.queue_size:
            raise Overloaded(f"{slot.entry.name}: {slot.waiters} requests wait for it to load; send it again later")
        slot.waiters += 1
        try:
            while slot.served is None:
                if slot.shut:
                    raise NotFound(f"model {slot.entry.name} was unloaded; load it first")
                if slot.failed_on and slot.failed_on == _signature(slot.entry.path):
                    raise Overloaded(f"{slot.entry.name} cannot be loaded: {slot.message}", reason="load_failed")
                await asyncio.shield(self._start_loading(slot))
        finally:
            slot.waiters -= 1
            self._room_changed.set()

    async def load(self, name: str) -> None:
        """Load a model, or load it again: from then on requests meet what is on disk now."""
        await self.rescan()
        slot = self.find(name)
        slot.shut, slot.failed_on = False, None
        if slot.loading:  # it began before the scan
            await asyncio.wait([slot.loading])
        slot.entry = self.repository.entry(name)
        await asyncio.shield(self._start_loading(slot))

    async def rescan(self) -> None:
        """Look again at the disk; models whose files have gone leave."""
        await asyncio.to_thread(self.repository.scan)
        there = {(name, version) for name in self.repository.names() for version in self.repository.versions(name)}
        for key in self._slots.keys() - there:
            self._dismiss(self._slots.pop(key), "its file is gone")

    def fits(self, slot: Slot) -> bool:
        """Whether a model can be loaded without sending another one away, as far as can be told."""
        return self.budget_bytes is None or self.used_bytes + _guess_bytes(slot) <= self.budget_bytes

    def unload(self, name: str) -> None:
        """No new requests for any version of a model; its memory returns when the last one is answered."""
        self.repository.entry(name)
        for version in self.repository.versions(name):
            slot = self.find(name, version)
            slot.shut = True
            self._dismiss(slot, "unloaded by request")

    def _start_loading(self, slot: Slot) -> asyncio.Task[None]:
        if slot.loading is None:
            slot.loading = asyncio.create_task(self._load(slot))
            slot.loading.add_done_callback(lambda task: task.exception() if not task.cancelled() else None)
        return slot.loading

    async def _load(self, slot: Slot) -> None:
        """Prepare a model on the loader's thread and put it in the place of what was there."""
        if slot.served is None:
            slot.state = "loading"
        entry = slot.entry
        try:
            async with self._one_at_a_time:
                await self._make_room(_guess_bytes(slot), slot)
                loop = asyncio.get_running_loop()
                served = await loop.run_in_executor(self._loader, self._prepared, entry)
                self._install(slot, served)
                await self._make_room(0, slot)
        except Overloaded as error:  # no room now; there may be later
            slot.message = str(error)
            slot.state = "ready" if slot.served else "unloaded"
            raise
        except Exception as error:  # whatever is wrong with a model concerns this model alone
            said = str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"
            slot.message = said.replace(str(entry.path), entry.path.name)  # where it lies is not the clients' business
            slot.failed_on = _signature(entry.path)
            slot.state = "ready" if slot.served else "failed"
            log.warning("%s %s cannot be loaded: %s", entry.name, entry.version, slot.message)
            raise Overloaded(f"{entry.name} cannot be loaded: {slot.message}", reason="load_failed") from error
        finally:
            slot.loading = None

    def _prepared(self, entry: Entry) -> Served:
        config = entry.config
        steering = Steering(config.exit_threshold, config.exit_floor)
        recipe = Recipe(
            grain_s=config.grain_ms / 1e3,
            max_pieces=config.max_pieces,
            threads=self._threads,
            max_batch=config.max_batch,
            shapes={name: tuple(shape) for name, shape in config.shapes.items()},
            values=config.values,
            exits=tuple(config.exits),
            confidence=config.exit_confidence,
        )
        prepared = prepare(entry.path, recipe, self._cache)
        return Served(
            entry.name,
            prepared,
            queue_size=config.queue_size,
            batch_timeout_ms=config.batch_timeout_ms,
            leaving=_leaving(entry, prepared, steering),
        )

    def _install(self, slot: Slot, served: Served) -> None:
        entry, prepared, old = slot.entry, served.prepared, slot.served
        if slot.shut:  # unloaded while it was loading
            self._leave(served)
            raise Overloaded(f"{entry.name} was unloaded while it was loading", reason="unloaded")
        served.statistics = slot.statistics
        slot.served, slot.state, slot.message = served, "ready", "; ".join(prepared.remarks)
        early = tuple(each.output for each in prepared.exits[:-1])
        slot.spec = ModelSpec(entry.name, entry.version, prepared.inputs, outputs_of(prepared), early)
        slot.used_ns, slot.size_bytes, slot.failed_on = time.monotonic_ns(), prepared.memory_bytes, None
        if old:
            self._leave(old)
        log.info("%s %s is loaded: %d segments", entry.name, entry.version, len(prepared.segments))

    async def _make_room(self, needed: int, wanted: Slot) -> None:
        """Let the models that were used least recently leave, and wait until their memory is free.

        Idle ones leave first; one in use takes no more requests and leaves with its last. One that somebody is
        about to use stays for them, or two clients could evict each other's models for ever. Where an old and a new
        copy of a model do not fit side by side, the old one leaves, too, and its requests wait for the new one.
        """
        while self.budget_bytes is not None and self.used_bytes + needed > self.budget_bytes:
            self._room_changed.clear()
            if max(needed, wanted.size_bytes) > self.budget_bytes:
                self._dismiss(wanted, "larger than the memory budget")
                raise Overloaded(self._no_room(needed, wanted), reason="memory")
            loaded = [slot for slot in self._slots.values() if slot.served and (slot is not wanted or needed)]
            free = [slot for slot in loaded if not slot.waiters or slot is wanted]
            if free:
                self.evictions += 1
                self._dismiss(min(free, key=lambda slot: _eviction_rank(slot, wanted)), "")
            elif loaded or self._leaving:
                await self._room_changed.wait()
            else:
                self._dismiss(wanted, "does not fit into the memory budget")
                raise Overloaded(self._no_room(needed, wanted), reason="memory")

    def _no_room(self, needed: int, wanted: Slot) -> str:
        size = f"about {needed >> 20} MiB" if needed else "more"
        used, budget = self.used_bytes >> 20, (self.budget_bytes or 0) >> 20
        return f"{wanted.entry.name} needs {size}; other models hold {used} MiB of the memory budget of {budget} MiB"

    def _dismiss(self, slot: Slot, message: str) -> None:
        """Out of reach for new requests; closed when the last lease ends."""
        served, slot.served, slot.spec = slot.served, None, None
        slot.message = message
        if slot.state != "loading":
            slot.state = "unloaded"
        if served:
            self._leave(served)

    def _leave(self, served: Served) -> None:
        self._leaving.add(served)
        if not served.leases:
            self._emptied(served)

    def _emptied(self, served: Served) -> None:
        """Nobody needs it for the moment."""
        if served in self._leaving:
            self._leaving.remove(served)
            self._dispatcher.forget(served)
            asyncio.get_running_loop().run_in_executor(None, served.prepared.close)
        self._room_changed.set()

    async def close(self) -> None:
        """Give up what is loading and close what is loaded."""
        self._loader.shutdown(wait=False, cancel_futures=True)
        for slot in self._slots.values():
            if slot.loading:
                slot.loading.cancel()
            self._dismiss(slot, "")


def _leaving(entry: Entry, prepared: Prepared, steering: Steering) -> Leaving | None:
    """How requests leave a model at its exits; None where it has none."""
    config = entry.config
    if prepared.exits:
        name, count = config.exit_record, len(prepared.exits)
        return Leaving(prepared, steering, record_beside(entry.path, name, count) if name else None)
    for key in ("exit_threshold", "exit_floor", "exit_record"):
        if key in config.model_fields_set and len(config.exits) != 1:
            raise ModelError(f"{key} is set, but the model has no exits; name its outputs that are, as exits")
    return None


def _eviction_rank(slot: Slot, wanted: Slot) -> tuple[bool, bool, int]:
    return slot is wanted, bool(slot.served and slot.served.leases), slot.used_ns


def _guess_bytes(slot: Slot) -> int:
    """What a model will need: what it held last time, or the size of its files."""
    path = slot.entry.path
    try:
        files = {path, *path.parent.glob(f"{path.stem}*.data")}
        return slot.size_bytes or sum(file.stat().st_size for file in files)
    except OSError:
        return 0


def _signature(path: Path) -> tuple[int, int] | None:
    """What changes when a file does."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
