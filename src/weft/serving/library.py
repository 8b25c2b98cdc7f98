"""Which models are loaded: loading on demand within a memory budget, leases, and leaving.

A model that a request needs is never closed under it: whoever is replaced, unloaded or evicted leaves when
its last request is answered. Models that were stitched are loaded and evicted together, for they have one body.
A model is served as soon as it can be run, whole, and learned later (``learning``). Every load has a thread of its own,
and none waits for another, unless memory is short. All state is the event loop's; only the loading itself happens on
threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from functools import partial
from itertools import takewhile
from pathlib import Path

from weft.base.errors import LoadFailed, ModelError, NotFound, Overloaded, WeftError
from weft.engine.steering import Steering
from weft.runtime.backend import Backend, LoadedModel, LoadOptions
from weft.serving.background_tasks import errand
from weft.serving.classification import labels_beside
from weft.serving.config import ModelConfig
from weft.serving.dispatch import Dispatcher
from weft.serving.exit_rules import ExitRules, record_beside
from weft.serving.isolation import check_device, grain_s_of, group_of, precision_of
from weft.serving.learning import Learner, close_unwanted
from weft.serving.repository import ModelEntry, Repository
from weft.serving.slots import ModelSlot, file_bytes, origin_of, signature
from weft.serving.streams import ServedModel

log = logging.getLogger("weft.models")

CLOSING_S = 0.5
"""How long models may take to give their memory back when the server stops."""


class Library:
    """The models of a repository, and which of them are in memory."""

    def __init__(
        self,
        repository: Repository,
        dispatcher: Dispatcher,
        backend: Backend,
        *,
        threads: int = 1,
        budget_bytes: int | None = None,
        cache: Path | None = None,
        learn_s: float = 60.0,
        learn_first: bool = True,
        max_compute_s: float | None = None,
        isolation: str = "threads",
        precision: str = "fp32",
    ) -> None:
        """learn_s: how long a model may be tried out; 0: not at all. learn_first: before it is served.

        max_compute_s: how long a request may be computed, where neither it nor its model says otherwise.
        isolation: where models run that do not say so themselves (``isolation.group_of``).
        """
        self.repository, self.backend = repository, backend
        self._isolation, self._precision = isolation, precision
        self.budget_bytes = backend.memory_bytes if budget_bytes is None else budget_bytes
        self._dispatcher, self._threads, self._cache = dispatcher, threads, cache
        self._slots: dict[tuple[str, str], ModelSlot] = {}
        self._by_request: dict[tuple[str, str], ModelSlot] = {}
        """The same by the names and versions that requests ask for, as the last look at the disk found them."""
        self._closing: set[asyncio.Future[None]] = set()
        self._leaving: set[ServedModel] = set()
        self._coming: dict[ModelSlot, int] = {}
        """What is being loaded, in the order in which it was asked for, and the room that is kept for it."""
        self.learn_first, self._learn_s, self._max_compute_s = learn_first, learn_s, max_compute_s
        self.learner = Learner(self._learned, self._has_room, self._install, learn_s=learn_s, gently=threads == 1)
        self.evictions = 0
        self._room_changed = asyncio.Event()
        dispatcher.feed.emptied = self._emptied

    @property
    def used_bytes(self) -> int:
        """What loaded models hold, those that are leaving included, and what is kept for those that come back."""
        held = [body.residency for body in [*self._loaded(), *self._leaving]]
        return sum(each.memory_bytes for each in held) + max((each.moving_bytes for each in held), default=0)

    def _loaded(self) -> dict[ServedModel, list[ModelSlot]]:
        """Every body in memory that takes requests, and its models."""
        found: dict[ServedModel, list[ModelSlot]] = {}
        for slot in self._slots.values():
            if slot.served:
                found.setdefault(slot.served.body, []).append(slot)
        return found

    def slots(self) -> Iterator[ModelSlot]:
        """Every version of every model there is, by name."""
        for name in self.repository.names():
            for version in self.repository.versions(name):
                yield self.find(name, version)

    def find(self, name: str, version: str = "") -> ModelSlot:
        """A model by name; NotFound if there is none."""
        slot = self._by_request.get((name, version))
        if slot is None:
            entry = self.repository.entry(name, version)
            slot = self._slots.setdefault((entry.name, entry.version), ModelSlot(entry))
            self._by_request[name, version] = slot
        return slot

    async def ensure(self, slot: ModelSlot) -> None:
        """Have a model loaded, or raise why it cannot be."""
        if slot.waiters >= slot.config.queue_size:
            raise Overloaded(f"{slot.entry.name}: {slot.waiters} requests wait for it to load; send it again later")
        slot.waiters += 1
        try:
            while slot.served is None:
                if slot.shut:
                    raise NotFound(f"model {slot.entry.name} was unloaded; load it first")
                if slot.failed_on and slot.failed_on == signature(slot.entry.path):
                    raise LoadFailed(f"{slot.entry.name} cannot be loaded: {slot.message}")
                await asyncio.shield(self._start_loading(slot))
        finally:
            slot.waiters -= 1
            self._room_changed.set()

    async def load(self, name: str, settings: ModelConfig | None = None) -> None:
        """Load a model, or load it again: from then on requests meet what is on disk now.

        settings: go before those on disk until it is loaded again; where it cannot be loaded so, they are forgotten.
        """
        await self.rescan()
        await self.reload(self.find(name), settings)

    async def reload(self, slot: ModelSlot, settings: ModelConfig | None = None) -> None:
        """Load a model as the last look at the disk found it, beside what is served of it."""
        name = slot.entry.name
        slot.shut, slot.failed_on = False, None
        self.refresh(slot)
        if running := {each.loading for each in self._together(slot) if each.loading}:  # it began before the scan
            await asyncio.wait(running)
        for each in self._together(slot):
            self.refresh(each)
        if settings is not None:
            slot.entry = slot.entry._replace(config=slot.entry.config.overridden_by(settings))
        try:
            await asyncio.shield(self._start_loading(slot))
        except LoadFailed:
            self.refresh(slot)
            raise
        if slot.served is None and slot.failed_on:
            raise LoadFailed(f"{name} cannot be loaded: {slot.message}")

    def refresh(self, slot: ModelSlot) -> None:
        """Let a model have the file and the settings that the last look at the disk found."""
        slot.entry = self.repository.entry(slot.entry.name, slot.entry.version)

    def changed(self, slot: ModelSlot) -> bool:
        """Whether a model would be another one if it were loaded again, by the last look at the disk."""
        return slot.origin != origin_of(self.repository.entry(slot.entry.name, slot.entry.version))

    def adjust(self, *, threads: int, budget_bytes: int | None, max_compute_s: float | None, isolation: str) -> None:
        """Load models with other settings from now on; those that are loaded keep theirs until they are loaded anew."""
        self.budget_bytes = self.backend.memory_bytes if budget_bytes is None else budget_bytes
        self._threads, self._isolation, self._max_compute_s = threads, isolation, max_compute_s
        self.learner.gently = threads == 1
        self._room_changed.set()

    async def rescan(self) -> None:
        """Look again at the disk; models whose files have gone leave."""
        await errand("scan", self.repository.scan, lambda _: None)
        there = {(name, version) for name in self.repository.names() for version in self.repository.versions(name)}
        self._by_request.clear()
        for key in self._slots.keys() - there:
            slot = self._slots.pop(key)
            slot.gone = True
            self._dismiss([slot], "its file is gone")

    def fits(self, slot: ModelSlot) -> bool:
        """Whether a model can be loaded without sending another one away, as far as can be told."""
        return self._has_room(slot.guess_bytes())

    def _has_room(self, needed: int) -> bool:
        coming = sum(self._coming.values())
        return self.budget_bytes is None or self.used_bytes + coming + needed <= self.budget_bytes

    def why_unusable(self, slot: ModelSlot) -> str:
        """Why a model cannot be used, now or when it is asked for; nothing if it can."""
        if slot.served or slot.state == "loading":
            return ""
        if slot.shut or slot.state == "failed":
            return slot.message
        if self.budget_bytes is not None and slot.guess_bytes() > self.budget_bytes:
            return f"larger than the memory budget of {self.budget_bytes >> 20} MiB"
        return ""

    def unload(self, name: str) -> None:
        """No new requests for any version of a model; its memory returns when the last one is answered."""
        self.repository.entry(name)
        for version in self.repository.versions(name):
            slot = self.find(name, version)
            slot.shut = True
            self._dismiss([slot], "unloaded by request")

    def _together(self, slot: ModelSlot) -> list[ModelSlot]:
        """The models that are loaded with one, itself the first: those of its file that nobody unloaded."""
        if not slot.entry.body:
            return [slot]
        path = slot.entry.path
        return [
            slot,
            *(each for each in self.slots() if each is not slot and each.entry.path == path and not each.shut),
        ]

    def _start_loading(self, slot: ModelSlot) -> asyncio.Task[None]:
        together = self._together(slot)
        task = next((each.loading for each in together if each.loading), None)
        if task is None:
            self._coming[slot] = slot.guess_bytes()
            task = asyncio.create_task(self._load(together))
            task.add_done_callback(lambda task: task.exception() if not task.cancelled() else None)
            for each in together:
                each.loading = task
        return task

    async def _load(self, slots: list[ModelSlot]) -> None:
        """Open models with one body on a thread of their own and put them in the place of what was there."""
        for slot in slots:
            slot.state = "ready" if slot.served else "loading"
        entry = slots[0].entry
        origins = [origin_of(slot.entry) for slot in slots]
        try:
            file = signature(entry.path)
            await self._make_room(self._coming[slots[0]], slots)
            body = await errand(f"loader of {entry.name}", partial(self._opened, entry), close_unwanted)
            self._coming.pop(slots[0])
            self._install(slots, body)
            for slot, origin in zip(slots, origins, strict=True):
                slot.origin = origin
            await self._make_room(0, slots)
            if self._learn_s and not body.timing.learned and slots[0].served is body:
                self.learner.want(slots[0], body, file)
        except Overloaded as error:  # no room now; there may be later
            for slot in slots:
                slot.message = str(error)
                slot.state = "ready" if slot.served else "unloaded"
            raise
        except Exception as error:  # whatever is wrong with a model concerns this model alone
            said = str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"
            said = said.replace(str(entry.path), entry.path.name)  # where it lies is not the clients' business
            for slot in slots:
                slot.fail(said)
            log.warning("%s %s cannot be loaded: %s", entry.body or entry.name, entry.version, said)
            raise LoadFailed(f"{entry.name} cannot be loaded: {said}") from error
        finally:
            self._coming.pop(slots[0], None)
            self._room_changed.set()
            for slot in slots:
                slot.loading = None

    def _opened(self, entry: ModelEntry) -> ServedModel:
        """A model as it is served first: in full at once where it shall be, or where two copies have no room."""
        cramped = self.budget_bytes is not None and 2 * file_bytes(entry.path) > self.budget_bytes
        learn = self._learn_s > 0 and (self.learn_first or cramped)
        return self._body(entry, self._learn_s or None, learn=learn)

    def _learned(self, entry: ModelEntry, learn_s: float) -> ServedModel:
        """A model in full."""
        return self._body(entry, learn_s, learn=True)

    def _body(self, entry: ModelEntry, learn_s: float | None, *, learn: bool) -> ServedModel:
        """Open a model as its settings say; on any thread."""
        config = entry.config
        check_device(entry.path, self.backend)
        steering = Steering(config.exit_threshold, config.exit_floor)
        options = LoadOptions(
            grain_s=grain_s_of(config, self.backend),
            max_pieces=config.max_pieces,
            threads=self._threads,
            max_batch=config.max_batch,
            shapes={name: tuple(shape) for name, shape in config.shapes.items()},
            values=config.values,
            exits=tuple(config.exits),
            confidence=config.exit_confidence,
            independent_rows=config.rows is not None,
            learn_s=learn_s,
            isolation=group_of(entry, self._isolation, self.backend),
            precision=precision_of(config, self._precision, self.backend),
            shares=self._dispatcher.sharing is not None,
        )
        loaded = self.backend.open(entry.path, options, self._cache, learn=learn)
        try:
            loaded.prepare(loaded.batching.max_batch)
            return ServedModel(
                entry.body or entry.name,
                loaded,
                version=entry.version,
                queue_size=config.queue_size,
                batch_timeout_ms=config.batch_timeout_ms,
                max_compute_s=self._limit_s(config),
                leaving=_leaving(entry, loaded, steering),
                labels=labels_beside(entry.path, config.labels, [spec.name for spec in loaded.outputs]),
            )
        except BaseException:
            loaded.close()
            raise

    def _limit_s(self, config: ModelConfig) -> float | None:
        """How long a request for a model may be computed; None: without end."""
        return self._max_compute_s if config.max_compute_s is None else config.max_compute_s or None

    def _install(self, slots: list[ModelSlot], body: ServedModel) -> None:
        """Let requests meet what was loaded, and what was there before leave."""
        before, now_ns, entry = self._loaded(), self.backend.now(), slots[0].entry
        self._dispatcher.installed(body)
        for slot in slots:
            try:
                slot.take(body, now_ns)
            except ModelError as error:
                slot.fail(str(error))
        for each in {*before, body} - self._loaded().keys():
            self._leave(each)
        if all(slot.shut for slot in slots):
            raise Overloaded(f"{entry.name} was unloaded while it was loading", reason="unloaded")
        said = "; ".join([f"{len(body.loaded.segments)} segments", *body.loaded.remarks])
        log.info("%s %s is loaded: %s", body.name, entry.version, said)

    async def _make_room(self, needed: int, wanted: list[ModelSlot]) -> None:
        """Let the models that were used least recently leave, and wait until their memory is free.

        Idle ones leave first; one in use takes no more requests and leaves with its last. One that somebody is
        about to use stays for them, or two clients could evict each other's models for ever. Where an old and a new
        copy of a model do not fit side by side, the old one leaves, too, and its requests wait for the new one. Models
        that were loaded at the same time do not wait for each other, even if they turn out larger than was thought.
        """
        while self.budget_bytes is not None and self._wanted_before(wanted[0], needed) + needed > self.budget_bytes:
            self._room_changed.clear()
            if max(needed, wanted[0].size_bytes) > self.budget_bytes:
                self._dismiss(wanted, "larger than the memory budget")
                raise Overloaded(self._no_room(needed, wanted[0]), reason="memory")
            loaded = [group for group in self._loaded().values() if wanted[0] not in group or needed]
            together = any(slot.loading for group in loaded for slot in group) or bool(self._coming)
            free = [group for group in loaded if wanted[0] in group or not any(slot.waiters for slot in group)]
            if free:
                self.evictions += 1
                self._dismiss(min(free, key=lambda group: _eviction_rank(group, wanted)), "")
            elif together and not needed:
                return
            elif loaded or self._leaving or len(self._coming) > 1:
                await self._room_changed.wait()
            else:
                self._dismiss(wanted, "does not fit into the memory budget")
                raise Overloaded(self._no_room(needed, wanted[0]), reason="memory")

    def _wanted_before(self, wanted: ModelSlot, needed: int) -> int:
        """What is held, and what is kept for loads that were asked for earlier, while there is something to load."""
        earlier = takewhile(lambda each: each is not wanted, self._coming) if needed else ()
        return self.used_bytes + sum(self._coming[each] for each in earlier)

    def _no_room(self, needed: int, wanted: ModelSlot) -> str:
        size = f"about {needed >> 20} MiB" if needed else "more"
        used, budget = self.used_bytes >> 20, (self.budget_bytes or 0) >> 20
        return f"{wanted.entry.name} needs {size}; other models hold {used} MiB of the memory budget of {budget} MiB"

    def _dismiss(self, slots: list[ModelSlot], message: str) -> None:
        """Out of reach for new requests; a body that no model has any more is closed when its last lease ends."""
        bodies = {slot.served.body for slot in slots if slot.served}
        for slot in slots:
            slot.served, slot.message = None, message
            if slot.state != "loading":
                slot.state = "unloaded"
        for body in bodies - self._loaded().keys():
            self._leave(body)

    def _leave(self, body: ServedModel) -> None:
        self._leaving.add(body)
        if not body.leases:
            self._emptied(body)

    def _emptied(self, body: ServedModel) -> None:
        """Nobody needs it for the moment."""
        if body in self._leaving:
            self._leaving.remove(body)
            self._dispatcher.forget(body)
            closing = errand(f"end of {body.name}", body.loaded.close, lambda _: None)
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            self.learner.look()
        self._room_changed.set()

    async def close(self, patience_s: float = CLOSING_S) -> None:
        """Give up what is loading or being learned and close what is loaded."""
        self.learner.close()
        for slot in self._slots.values():
            if slot.loading:
                slot.loading.cancel()
            self._dismiss([slot], "")
        if self._closing:  # the backend goes after its models
            await asyncio.wait(self._closing, timeout=patience_s)


def _leaving(entry: ModelEntry, loaded: LoadedModel, steering: Steering) -> ExitRules | None:
    """How requests leave a model at its exits; None where it has none."""
    config = entry.config
    if loaded.exits:
        name, count = config.exit_record, len(loaded.exits.specs)
        return ExitRules(loaded.exits, steering, record_beside(entry.path, name, count) if name else None)
    chosen = loaded.tasks is not None and any(task.exits for task in loaded.tasks.specs)
    for key in ("exit_floor", "exit_record") if chosen else ("exit_threshold", "exit_floor", "exit_record"):
        if key in config.model_fields_set and chosen:
            raise ModelError(f"{key} is set, but all requests of a body go to its end; leave it out")
        if key in config.model_fields_set and len(config.exits) != 1:
            raise ModelError(f"{key} is set, but the model has no exits; name its outputs that are, as exits")
    return None


def _eviction_rank(group: list[ModelSlot], wanted: list[ModelSlot]) -> tuple[bool, bool, int]:
    in_use = any(slot.served and slot.served.body.leases for slot in group)
    return wanted[0] in group, in_use, max(slot.used_ns for slot in group)
