"""Loaded models: loading on demand within a memory budget, eviction of the least recently used, leases, unloading.

A model is never closed while a request needs it: a model that is replaced, unloaded or evicted is closed after its last
request. Stitched models are loaded and evicted together, because they share one body. Models are learned before they
are served, or served whole at first and learned later (``learning``). Every load has a thread of its own; loads wait
for each other only if memory is short. All state belongs to the event loop; only the loading itself runs on threads.
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
from weft.serving.background_tasks import ignore_result, run_in_background
from weft.serving.classification import read_labels
from weft.serving.config import ModelConfig
from weft.serving.dispatch import Dispatcher
from weft.serving.exit_rules import ExitRules, read_exit_record
from weft.serving.isolation import check_device, engine_of, grain_s_of, group_of, precision_of
from weft.serving.learning import Learner, close_unwanted
from weft.serving.repository import ModelEntry, Repository
from weft.serving.slots import ModelSlot, file_bytes, origin_of, signature
from weft.serving.streams import ServedModel

log = logging.getLogger("weft.models")

CLOSING_S = 0.5
"""Timeout for closing models when the server stops; closing beyond it is abandoned."""


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
        compile_s: float = 600.0,
    ) -> None:
        """threads: how many compute a segment. budget_bytes: limit on all loaded models, None: that of the backend.

        cache: folder for cut models. learn_s: time limit for learning a model; 0: no learning. learn_first: learn
        before serving; False: serve whole, learn later. precision, compile_s: as in the settings of the server.
        max_compute_s: how long a request may be computed, unless its model has a limit of its own.
        isolation: where models run that do not set it themselves (``isolation.group_of``).
        """
        self.repository, self.backend = repository, backend
        self._isolation, self._precision, self._compile_s = isolation, precision, compile_s
        self.budget_bytes = backend.memory_bytes if budget_bytes is None else budget_bytes
        self._dispatcher, self._threads, self._cache = dispatcher, threads, cache
        self._slots: dict[tuple[str, str], ModelSlot] = {}  # by name and version
        self._by_request: dict[tuple[str, str], ModelSlot] = {}
        """Cache of ``find``: slots by requested name and version, valid until the next scan of the repository."""
        self._closing: set[asyncio.Future[None]] = set()  # of models that are being closed on threads
        self._retired: set[ServedModel] = set()
        """Bodies that take no more requests and are closed when their last lease is released."""
        self._loads: dict[ModelSlot, int] = {}
        """Running loads in the order of their requests, with the bytes that are reserved for each."""
        self.learn_first, self._learn_s, self._max_compute_s = learn_first, learn_s, max_compute_s
        self.learner = Learner(self._learn, self._has_room, self._install, learn_s=learn_s, gently=threads == 1)
        self.evictions = 0
        self._room_changed = asyncio.Event()
        """Set when memory was freed, or another reason to wait for it has ended."""
        dispatcher.feed.emptied = self._close_if_retired  # the feed counts leases, and knows when the last is released

    @property
    def used_bytes(self) -> int:
        """Bytes that loaded models hold, including closing ones, and the reserve for models that return to a device."""
        residencies = [body.residency for body in [*self._loaded_bodies(), *self._retired]]
        reserve_bytes = max((residency.moving_bytes for residency in residencies), default=0)
        return sum(residency.memory_bytes for residency in residencies) + reserve_bytes

    def _loaded_bodies(self) -> dict[ServedModel, list[ModelSlot]]:
        """Return the bodies that take requests, each with its models."""
        models: dict[ServedModel, list[ModelSlot]] = {}
        for slot in self._slots.values():
            if slot.served:
                models.setdefault(slot.served.body, []).append(slot)
        return models

    def slots(self) -> Iterator[ModelSlot]:
        """Iterate over all versions of all models, by name."""
        for name in self.repository.names():
            for version in self.repository.versions(name):
                yield self.find(name, version)

    def find(self, name: str, version: str = "") -> ModelSlot:
        """Return a model by name and version; NotFound if there is none."""
        slot = self._by_request.get((name, version))
        if slot is None:
            entry = self.repository.entry(name, version)
            slot = self._slots.setdefault((entry.name, entry.version), ModelSlot(entry))
            self._by_request[name, version] = slot
        return slot

    async def ensure_loaded(self, slot: ModelSlot) -> None:
        """Load a model unless it is loaded; NotFound, LoadFailed or Overloaded if that is not possible."""
        if slot.waiters >= slot.config.queue_size:
            raise Overloaded(f"{slot.entry.name}: {slot.waiters} requests wait for it to load; send it again later")
        slot.waiters += 1
        try:
            while slot.served is None:
                if slot.client_unloaded:
                    raise NotFound(f"model {slot.entry.name} was unloaded; load it first")
                if slot.failed_on and slot.failed_on == signature(slot.entry.path):
                    raise LoadFailed(f"{slot.entry.name} cannot be loaded: {slot.message}")
                await asyncio.shield(self._start_loading(slot))
        finally:
            slot.waiters -= 1
            self._room_changed.set()

    async def load(self, name: str, settings: ModelConfig | None = None) -> None:
        """Load a model, or load it again, from what is on disk now.

        settings: override those on disk until the next load; dropped if the model cannot be loaded with them.
        """
        await self.rescan()
        await self.reload(self.find(name), settings)

    async def reload(self, slot: ModelSlot, settings: ModelConfig | None = None) -> None:
        """Load a model again, with file and settings of the last scan; the loaded one serves requests meanwhile.

        settings: as for ``load``. LoadFailed if the model cannot be loaded.
        """
        name = slot.entry.name
        slot.client_unloaded, slot.failed_on = False, None
        self.refresh(slot)
        running = {member.loading for member in self._loaded_together(slot) if member.loading}
        if running:  # began before the scan, so they may load the old files
            await asyncio.wait(running)
        for member in self._loaded_together(slot):
            self.refresh(member)
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
        """Set a model's file and settings, from which it will be loaded next, to those of the last scan."""
        slot.entry = self.repository.entry(slot.entry.name, slot.entry.version)

    def has_changed(self, slot: ModelSlot) -> bool:
        """Tell whether the files or settings of a model, as of the last scan, differ from those it was loaded from."""
        return slot.origin != origin_of(self.repository.entry(slot.entry.name, slot.entry.version))

    def adjust(self, *, threads: int, budget_bytes: int | None, max_compute_s: float | None, isolation: str) -> None:
        """Change the settings for future loads; loaded models keep theirs until they are loaded again."""
        self.budget_bytes = self.backend.memory_bytes if budget_bytes is None else budget_bytes
        self._threads, self._isolation, self._max_compute_s = threads, isolation, max_compute_s
        self.learner.gently = threads == 1
        self._room_changed.set()

    async def rescan(self) -> None:
        """Scan the repository again; models whose files were removed are unloaded."""
        await run_in_background("scan", self.repository.scan, ignore_result)
        present = {(name, version) for name in self.repository.names() for version in self.repository.versions(name)}
        self._by_request.clear()
        for key in self._slots.keys() - present:
            slot = self._slots.pop(key)
            slot.file_removed = True
            self._take_from_service([slot], "its file is gone")

    def fits(self, slot: ModelSlot) -> bool:
        """Estimate whether a model can be loaded without evicting another one."""
        return self._has_room(slot.guess_bytes())

    def _has_room(self, needed_bytes: int) -> bool:
        """Tell whether *needed_bytes* fit into the budget, next to loaded models and running loads."""
        reserved = sum(self._loads.values())
        return self.budget_bytes is None or self.used_bytes + reserved + needed_bytes <= self.budget_bytes

    def why_unusable(self, slot: ModelSlot) -> str:
        """Return why a model cannot be used, now or on demand; empty if it can."""
        if slot.served or slot.state == "loading":
            return ""
        if slot.client_unloaded or slot.state == "failed":
            return slot.message
        if self.budget_bytes is not None and slot.guess_bytes() > self.budget_bytes:
            return f"larger than the memory budget of {self.budget_bytes >> 20} MiB"
        return ""

    def unload(self, name: str) -> None:
        """Take no new requests for any version of a model; its memory is freed after the last one is answered."""
        self.repository.entry(name)
        for version in self.repository.versions(name):
            slot = self.find(name, version)
            slot.client_unloaded = True
            self._take_from_service([slot], "unloaded by request")

    def _loaded_together(self, slot: ModelSlot) -> list[ModelSlot]:
        """Return the models that are loaded together, *slot* first: those of its file that are not unloaded."""
        if not slot.entry.body:
            return [slot]
        same_file = [other for other in self.slots() if other is not slot and other.entry.path == slot.entry.path]
        return [slot, *(other for other in same_file if not other.client_unloaded)]

    def _start_loading(self, slot: ModelSlot) -> asyncio.Task[None]:
        """Start a task that loads a model, and those with the same body; return the running one if there is one."""
        together = self._loaded_together(slot)
        task = next((member.loading for member in together if member.loading), None)
        if task is None:
            self._loads[slot] = slot.guess_bytes()
            task = asyncio.create_task(self._load(together))
            # marks the exception as retrieved, also if no request waits for the task any more
            task.add_done_callback(lambda task: task.exception() if not task.cancelled() else None)
            for member in together:
                member.loading = task
        return task

    async def _load(self, slots: list[ModelSlot]) -> None:
        """Open models that share a body, on a thread of their own, and serve them in place of older copies.

        LoadFailed if that is not possible, Overloaded if there is no room now.
        """
        for slot in slots:
            slot.state = "ready" if slot.served else "loading"
        entry = slots[0].entry
        origins = [origin_of(slot.entry) for slot in slots]
        try:
            file = signature(entry.path)
            await self._make_room(self._loads[slots[0]], slots)
            body = await run_in_background(f"loader of {entry.name}", partial(self._open, entry), close_unwanted)
            self._loads.pop(slots[0])
            self._install(slots, body)
            for slot, origin in zip(slots, origins, strict=True):
                slot.origin = origin
            await self._make_room(needed_bytes=0, loading=slots)  # if the model is larger than estimated
            if self._learn_s and not body.timing.learned and slots[0].served is body:
                self.learner.add(slots[0], body, file)
        except Overloaded as error:  # no room now; there may be later
            for slot in slots:
                slot.message = str(error)
                slot.state = "ready" if slot.served else "unloaded"
            raise
        except Exception as error:  # any fault of a model file makes only this model unusable
            reason = str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"
            reason = reason.replace(str(entry.path), entry.path.name)  # clients must not learn the server's paths
            for slot in slots:
                slot.fail(reason)
            log.warning("%s %s cannot be loaded: %s", entry.body or entry.name, entry.version, reason)
            raise LoadFailed(f"{entry.name} cannot be loaded: {reason}") from error
        finally:
            self._loads.pop(slots[0], None)
            self._room_changed.set()
            for slot in slots:
                slot.loading = None

    def _open(self, entry: ModelEntry) -> ServedModel:
        """Open a model for its first requests, on any thread.

        It is learned at once with ``learn_first``, or if the budget has no room for a whole copy and a learned one.
        """
        cramped = self.budget_bytes is not None and 2 * file_bytes(entry.path) > self.budget_bytes
        learn = self._learn_s > 0 and (self.learn_first or cramped)
        return self._open_body(entry, self._learn_s or None, learn=learn)  # learn_s = 0: not learned, so no limit

    def _learn(self, entry: ModelEntry, learn_s: float, is_first: bool) -> ServedModel:
        """Open and learn a model that is served meanwhile; on any thread, for ``learner``, which gives *is_first*."""
        return self._open_body(entry, learn_s, learn=True, compile_first=is_first)

    def _open_body(
        self, entry: ModelEntry, learn_s: float | None, *, learn: bool, compile_first: bool = False
    ) -> ServedModel:
        """Open a model with its settings; callable on any thread.

        learn_s: time limit for learning; None: no limit. learn: cut and measure the model, or open it whole.
        compile_first: as in ``LoadOptions``.
        """
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
            engine=engine_of(config, self.backend),
            compile_s=self._compile_s,
            compile_first=compile_first,
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
                max_compute_s=self._compute_limit_s(config),
                exit_rules=_make_exit_rules(entry, loaded, steering),
                labels=read_labels(entry.path, config.labels, [spec.name for spec in loaded.outputs]),
            )
        except BaseException:
            loaded.close()
            raise

    def _compute_limit_s(self, config: ModelConfig) -> float | None:
        """Return the limit on the computing time of a request for a model; None: no limit."""
        return self._max_compute_s if config.max_compute_s is None else config.max_compute_s or None

    def _install(self, slots: list[ModelSlot], body: ServedModel) -> None:
        """Direct requests for the models in *slots* to a loaded body; a body left without models is closed when unused.

        Overloaded if all models were unloaded meanwhile.
        """
        previous_bodies, now_ns, entry = self._loaded_bodies(), self.backend.now(), slots[0].entry
        self._dispatcher.prepare_for(body)
        for slot in slots:
            try:
                slot.take(body, now_ns)
            except ModelError as error:
                slot.fail(str(error))
        for unused in {*previous_bodies, body} - self._loaded_bodies().keys():
            self._retire(unused)
        if all(slot.client_unloaded for slot in slots):
            raise Overloaded(f"{entry.name} was unloaded while it was loading", reason="unloaded")
        summary = "; ".join([f"{len(body.loaded.segments)} segments", *body.loaded.remarks])
        log.info("%s %s is loaded: %s", body.name, entry.version, summary)

    async def _make_room(self, needed_bytes: int, loading: list[ModelSlot]) -> None:
        """Evict the least recently used models until *needed_bytes* are free, and wait until they are closed.

        loading: the models that are being loaded. needed_bytes: 0 after they were loaded, to correct a wrong estimate.
        Overloaded if the memory budget is too small.

        Idle models are evicted first; a model in use takes no more requests and is closed after the last one. A model
        that requests are waiting for is not evicted, or two clients could evict each other's models for ever. If an old
        and a new copy of a model do not fit together, the old one is evicted, and its requests wait for the new one.
        Models that are loaded at the same time do not wait for each other, even if they are larger than estimated.
        """
        is_loaded = not needed_bytes  # whether the models in *loading* are served already
        while (
            self.budget_bytes is not None
            and self._bytes_before(loading[0], needed_bytes) + needed_bytes > self.budget_bytes
        ):
            self._room_changed.clear()
            if max(needed_bytes, loading[0].size_bytes) > self.budget_bytes:
                self._take_from_service(loading, "larger than the memory budget")
                raise Overloaded(self._no_room_message(needed_bytes, loading[0]), reason="memory")
            # groups of models that share a body, without the new copies in *loading*
            groups = self._loaded_bodies().values()
            candidates = [group for group in groups if not (is_loaded and loading[0] in group)]
            others_loading = any(slot.loading for group in candidates for slot in group) or bool(self._loads)
            evictable = [
                group for group in candidates if loading[0] in group or not any(slot.waiters for slot in group)
            ]
            if evictable:
                self.evictions += 1
                self._take_from_service(min(evictable, key=lambda group: _eviction_rank(group, loading)), "")
            elif others_loading and is_loaded:
                return
            elif candidates or self._retired or len(self._loads) > 1:
                await self._room_changed.wait()
            else:
                self._take_from_service(loading, "does not fit into the memory budget")
                raise Overloaded(self._no_room_message(needed_bytes, loading[0]), reason="memory")

    def _bytes_before(self, loading: ModelSlot, needed_bytes: int) -> int:
        """Return the bytes of loaded models; unless *needed_bytes* is 0, plus the bytes reserved for earlier loads."""
        earlier = takewhile(lambda slot: slot is not loading, self._loads) if needed_bytes else ()
        return self.used_bytes + sum(self._loads[slot] for slot in earlier)

    def _no_room_message(self, needed_bytes: int, loading: ModelSlot) -> str:
        """Return the message for a model that does not fit into the memory budget."""
        size = f"about {needed_bytes >> 20} MiB" if needed_bytes else "more"
        used, budget = self.used_bytes >> 20, (self.budget_bytes or 0) >> 20
        return f"{loading.entry.name} needs {size}; other models hold {used} MiB of the memory budget of {budget} MiB"

    def _take_from_service(self, slots: list[ModelSlot], message: str) -> None:
        """Take models from service; a body without models is closed when its last lease is released."""
        bodies = {slot.served.body for slot in slots if slot.served}
        for slot in slots:
            slot.served, slot.message = None, message
            if slot.state != "loading":
                slot.state = "unloaded"
        for body in bodies - self._loaded_bodies().keys():
            self._retire(body)

    def _retire(self, body: ServedModel) -> None:
        """Close a body that takes no more requests: now, or when its last lease is released."""
        self._retired.add(body)
        if not body.leases:
            self._close_if_retired(body)

    def _close_if_retired(self, body: ServedModel) -> None:
        """Close a body without leases if it was retired; called when its last lease is released."""
        if body in self._retired:
            self._retired.remove(body)
            self._dispatcher.forget(body)
            closing = run_in_background(f"end of {body.name}", body.loaded.close, ignore_result)
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            self.learner.start_if_possible()
        self._room_changed.set()

    async def close(self, patience_s: float = CLOSING_S) -> None:
        """Cancel loading and learning, and close all models; wait for that at most *patience_s*."""
        self.learner.close()
        for slot in self._slots.values():
            if slot.loading:
                slot.loading.cancel()
            self._take_from_service([slot], "")
        if self._closing:  # the backend is closed after its models
            await asyncio.wait(self._closing, timeout=patience_s)


def _make_exit_rules(entry: ModelEntry, loaded: LoadedModel, steering: Steering) -> ExitRules | None:
    """Return the rules for the exits of a model; None if it has none. ModelError for settings that do not apply."""
    config = entry.config
    if loaded.exits:
        name, count = config.exit_record, len(loaded.exits.specs)
        return ExitRules(loaded.exits, steering, read_exit_record(entry.path, name, count) if name else None)
    # requests for stitched models run to the end, where each row's exit is chosen: only exit_threshold applies
    tasks_have_exits = loaded.tasks is not None and any(task.exits for task in loaded.tasks.specs)
    for key in ("exit_floor", "exit_record") if tasks_have_exits else ("exit_threshold", "exit_floor", "exit_record"):
        if key in config.model_fields_set and tasks_have_exits:
            raise ModelError(f"{key} is set, but all requests of a body go to its end; leave it out")
        if key in config.model_fields_set and len(config.exits) != 1:  # 1: only the end, where the settings do nothing
            raise ModelError(f"{key} is set, but the model has no exits; name its outputs that are, as exits")
    return None


def _eviction_rank(group: list[ModelSlot], loading: list[ModelSlot]) -> tuple[bool, bool, int]:
    """Order of eviction: other models before those being loaded, idle before used, least recently used first."""
    in_use = any(slot.served and slot.served.body.leases for slot in group)
    return loading[0] in group, in_use, max(slot.used_ns for slot in group)
