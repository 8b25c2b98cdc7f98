"""A worker, its spare, and the models they both have.

The spare is a second process with the same models open, from the cache of the first. When the worker dies the spare
takes its place at once, and another spare is started in the background. A group that has neither for a moment raises
``WorkerDied``, and the caller retries the step. Folders are granted to a process when it starts, so a model in another
folder needs another process.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from weft.base.errors import Failed, ModelError, NotLearned, WorkerDied, WorkerStarting
from weft.runtime.backend import LoadOptions
from weft.runtime.device_kinds import engine_kind
from weft.runtime.external import external_files
from weft.runtime.isolated.confinement import Confinement
from weft.runtime.isolated.limits import WorkerCounts, WorkerLimits
from weft.runtime.isolated.model_description import ModelDescription
from weft.runtime.isolated.process import WorkerModel, WorkerProcess, WorkerRun
from weft.runtime.isolated.spawning import Template
from weft.runtime.own_folder import make_folder, remove

log = logging.getLogger("weft.workers")

STARTING_S = 0.05
"""Seconds until a step is retried if no worker is there yet."""

MOST_FAILURES = 5
"""Failed starts in a row after which requests are refused (503) instead of waiting for a worker."""

LONGEST_PAUSE_S = 5.0
"""Longest pause in seconds between failed starts; the pause doubles up to it, so that a broken start costs little."""

MOST_REOPENINGS = 2
"""New workers in a row that may die of a model, or fail to open it, before the next worker starts without the model."""

RETIRING_S = 10.0
"""Grace period in seconds for the running steps of a worker that was replaced; longer steps are retried in the new one.
"""

GRACE_S = 300.0
"""Grace period in seconds after ``learn_s`` before the learning process is killed; a running operator cannot be
interrupted."""


class GroupResources(NamedTuple):
    """What all workers of a backend share: its clock and its thread pools."""

    now: Callable[[], int]  # in nanoseconds
    spawner: Executor  # its one thread starts processes and threads, which inherit its priority
    template: Template
    carrier: Executor  # copies large tensors
    watch: Callable[[WorkerRun], None]  # starts the grace period of a step that was asked to stop


class ModelFile(NamedTuple):
    """A model file and its options, to open the same model in another process."""

    number: int  # the model's, unique in the backend
    path: Path
    options: LoadOptions
    learn: bool
    signature: tuple[tuple[str, int, int, int], ...]
    """State of its files (``signature``); a model whose files have changed is not opened again."""

    def changed(self) -> bool:
        """Whether the model's files have changed since they were opened, or cannot be read."""
        try:
            return signature(self.path) != self.signature
        except (OSError, ModelError):
            return True


@dataclass(eq=False)
class KeptModel:
    """A model that a group has open, in one process or several."""

    file: ModelFile
    description: ModelDescription
    prepared_rows: set[int]  # batch sizes that were prepared
    lost: str = ""  # why it can no longer be opened; empty if it can
    failures: int = 0  # new workers in a row in which it could not be opened


class WorkerGroup:
    """The worker and the spare of one group of models: starts, replaces and closes them."""

    def __init__(
        self,
        name: str,
        limits: WorkerLimits,
        resources: GroupResources,
        cache: Path | None,
        cache_name: str | None = None,
    ) -> None:
        """cache: a folder; None: nothing is cached. cache_name: the name of the group's part of it; None: *name*."""
        self.name, self.limits, self._resources = name, limits, resources
        self.now = resources.now
        self.counts = WorkerCounts(0, 0)
        self.worker: WorkerProcess | None = None
        self.spare: WorkerProcess | None = None
        self.lost = ""
        """Why the last ``MOST_FAILURES`` workers could not be started; empty otherwise."""
        self._kept: dict[int, KeptModel] = {}
        # Guards worker, spare, counts, _kept, _building and _keeper; held only for assignments, never during a call.
        self._lock = threading.Lock()
        self._preparing = threading.RLock()
        """Held while models are opened, which takes long: one at a time, so that worker and spare have the same."""
        self._keeper: threading.Thread | None = None
        self._closed = threading.Event()
        self._building: set[WorkerProcess] = set()
        """Processes that are neither worker nor spare: being started, learning, or retiring."""
        self.folder, self._temporary = own_folder(cache_name or name, cache)
        self._scratch = _scratch_in(self.folder)
        self._shared_folders = _shared_in(cache, limits.shared_cache)

    # Models

    def open(self, file: ModelFile) -> KeptModel:
        """Open a model in the worker; the spare opens it afterwards. Raises ``ModelError`` if that fails.

        A model that is not in the cache yet, cut and measured, is first learned in a separate process, so that no
        request waits for it or suffers from a crash. This also happens with ``file.learn`` false when the worker
        raises ``NotLearned``.
        """
        if not file.learn:
            with suppress(NotLearned):
                return self._open_in_worker(file)
        self._learn(file._replace(learn=True))
        try:
            return self._open_in_worker(file._replace(learn=False))
        except NotLearned:  # the cache is not writable: learn in the worker itself
            return self._open_in_worker(file._replace(learn=True))

    def _open_in_worker(self, file: ModelFile) -> KeptModel:
        """Open a model in the worker.

        Raises ``NotLearned`` if the worker would have to measure the model and ``file.learn`` is false, ``ModelError``
        if the worker dies.
        """
        with self._preparing:
            self.lost = ""
            try:
                worker, description = self._open_with_retry(file)
            except WorkerDied as error:
                raise ModelError(f"{file.path}: cannot be opened: {error}") from error
            kept = KeptModel(file, description, prepared_rows=set())
            with self._lock:
                self._kept[file.number] = kept
                worker.opened.add(file.number)
        self._start_keeper()
        return kept

    def _open_with_retry(self, file: ModelFile) -> tuple[WorkerProcess, ModelDescription]:
        """Open a model in a worker, with one retry if the worker dies, as it may have died for another reason."""
        worker = self._worker_with_access(file.path)
        try:
            return worker, self._call_open(worker, file)
        except WorkerDied as error:
            if self._closed.is_set():
                raise
            log.warning("a worker of %s died while it opened a model, which is tried once more: %s", self.name, error)
        worker = self._worker_with_access(file.path)
        return worker, self._call_open(worker, file)

    def prepare(self, kept: KeptModel, rows: int) -> None:
        """Prepare for batches of *rows* rows in all processes that have the model."""
        kept.prepared_rows.add(rows)
        for process in self._processes():
            if kept.file.number in process.opened:
                try:
                    process.call("prepare", kept.file.number, rows)
                except WorkerDied as error:  # the worker that takes its place prepares the same batch sizes
                    log.debug("batches of %d rows went with their worker: %s", rows, error)

    def forget(self, number: int) -> None:
        """Close a model in all processes of the group."""
        with self._lock:
            self._kept.pop(number, None)
            holders = [process for process in (*self._processes(), *self._building) if number in process.opened]
            for process in holders:
                process.opened.discard(number)
        for process in holders:
            self._close_in(process, number)

    def _close_in(self, process: WorkerProcess, number: int) -> None:
        """Close a model in one process."""
        try:
            process.call("close", number)
        except (WorkerDied, RuntimeError) as error:
            log.debug("model %d of %s went with its worker: %s", number, self.name, error)
        process.residency.remove(number)

    @property
    def has_worker(self) -> bool:
        """Whether the group has a living worker."""
        worker = self.worker
        return worker is not None and worker.alive

    def worker_for(self, number: int) -> WorkerProcess:
        """The worker that has a model.

        Raises ``WorkerDied`` with the delay of a retry, ``WorkerStarting`` if several starts have failed (the client
        gets 503 with ``Retry-After``), or ``Failed`` if the model cannot be opened again.
        """
        worker, kept = self.worker, self._kept.get(number)
        if worker is not None and number in worker.opened:
            return worker
        if kept is None or kept.lost:
            raise Failed(kept.lost if kept else "the model is closed")
        if self.lost:
            raise WorkerStarting(self.lost, LONGEST_PAUSE_S)
        self._start_keeper()
        raise WorkerDied("its worker is being started", again_s=STARTING_S)

    # Processes

    def _processes(self) -> list[WorkerProcess]:
        """The worker and the spare, as far as they live."""
        return [process for process in (self.worker, self.spare) if process is not None and process.alive]

    def _worker_with_access(self, path: Path) -> WorkerProcess:
        """The worker, if it may read a model's folder; else a new worker with all models, which takes its place."""
        worker = self.worker
        if worker is not None and worker.alive and _may_read(_folders(path), worker.readable):
            return worker
        replacement = self._start_process([path])
        with self._lock:
            usable = replacement.alive and not self._closed.is_set()
            replaced = [process for process in (self.worker, self.spare) if usable and process is not None]
            if usable:
                self.worker, self.spare = replacement, None
                self._building.discard(replacement)
                self._building.update(replaced)
        if not usable:
            self._abandon(replacement)
            raise replacement.death_error()
        for process in replaced:
            self._retire(process)
        return replacement

    def _retire(self, process: WorkerProcess) -> None:
        """Close a process, on a new thread, when its steps have ended, at the latest after ``RETIRING_S``."""

        def drain() -> None:
            process.await_idle(RETIRING_S)
            self._abandon(process)

        try:
            thread = threading.Thread(target=drain, name=f"end of worker {process.pid}", daemon=True)
            self._resources.spawner.submit(thread.start).result()
        except RuntimeError:  # there are too many threads, or the server ends
            self._abandon(process)

    def _learn(self, file: ModelFile) -> None:
        """Cut, measure and cache a model in a process of its own, with the calling thread's priority."""
        try:
            process = self._new_process([file.path])
            try:
                _lower_priority(process)
                with _kill_after(process, file.options.learn_s):
                    self._call_open(process, file)
            finally:
                self._abandon(process)
        except WorkerDied as error:
            raise ModelError(f"{file.path}: cannot be cut and measured: {error}") from error

    def _start_process(self, extra_files: Iterable[Path] = ()) -> WorkerProcess:
        """Start a process with all models open, which may also read the folders of *extra_files*.

        The process stays in ``_building`` until the caller makes it the worker or the spare.
        """
        process = self._new_process([*extra_files, *(kept.file.path for kept in self._models())])
        try:
            self._open_missing_models(process)
        except BaseException:
            self._abandon(process)
            raise
        return process

    def _new_process(self, files: Iterable[Path]) -> WorkerProcess:
        """Start a process, without models, that may read the folders of *files*; waits until it is ready."""
        if self._closed.is_set():
            raise WorkerDied("the server ends")
        process = self._spawn_process(files)
        with self._lock:
            self._building.add(process)
            closed = self._closed.is_set()
        try:
            if closed:
                raise WorkerDied("the server ends")
            process.await_ready()
        except BaseException:
            self._abandon(process)
            raise
        return process

    def _abandon(self, process: WorkerProcess) -> None:
        """Close a process that is neither worker nor spare."""
        process.close()
        with self._lock:
            self._building.discard(process)

    def _spawn_process(self, files: Iterable[Path]) -> WorkerProcess:
        """Start a process that is confined to the folders of *files*, of the group and of its engine."""
        folders = frozenset((*self.limits.folders, *self._shared_folders)).union(*map(_folders, files))
        resources = self._resources
        engine, limits = resources.template.engine, self.limits
        kind = engine_kind(engine)
        device_files = kind.files(engine)
        confinement = Confinement(
            os.getpid(),
            limits.memory_bytes,
            limits.open_files,
            readable=(*sorted(folders), *device_files.read),
            writable=(str(self.folder), str(self._scratch)),
            device=device_files.written,
            programs=kind.programs(engine),
        )
        return WorkerProcess(
            self.name,
            confinement,
            str(self._scratch),
            limits.device_memory_bytes,
            now=resources.now,
            spawner=resources.spawner,
            fork=resources.template.fork,
            carrier=resources.carrier,
            watch=resources.watch,
            died=self._handle_death,
            gates=kind.gates and limits.gates,
        )

    def _models(self) -> list[KeptModel]:
        with self._lock:
            return list(self._kept.values())

    def _open_missing_models(self, process: WorkerProcess) -> None:
        """Open the models that a process lacks; a model is given up if ``MOST_REOPENINGS`` processes failed with it."""
        is_worker = process is self.worker
        for kept in self._models():
            if kept.file.number in process.opened or kept.lost:
                continue
            try:
                self._reopen(process, kept)
            except ModelError as error:
                kept.lost = f"it could not be opened again: {error}; load it again"
            except WorkerDied as error:
                if not is_worker and not self._closed.is_set():  # nothing else ran in it that may be the cause
                    self._count_failure(kept, error)
                raise
            except Exception as error:
                self._count_failure(kept, error)
                if not kept.lost:
                    raise

    def _count_failure(self, kept: KeptModel, error: Exception) -> None:
        """Count a process that could not open a model, or died of it; after ``MOST_REOPENINGS`` the model is lost."""
        kept.failures += 1
        if kept.failures >= MOST_REOPENINGS:
            kept.lost = f"it could not be opened again: {error}; load it again"
            log.warning("%s: %s", kept.file.path, kept.lost)

    def _reopen(self, process: WorkerProcess, kept: KeptModel) -> None:
        """Open a model in a new process exactly as it was opened before, or mark it as lost if that is not possible.

        A model that was not learned before must not come from the cache now: it would have other segments.
        """
        number, description = kept.file.number, kept.description
        if kept.file.changed():
            kept.lost = "its files have changed since it was loaded, and its worker died; load it again"
            return
        reopened = self._call_open(process, kept.file, cached=description.timing.learned)
        if reopened.segments != description.segments or reopened.outputs != description.outputs:
            kept.lost = "it has other segments or outputs since its worker was started again; load it again"
        for rows in sorted(kept.prepared_rows) if not kept.lost else ():
            process.call("prepare", number, rows)
        kept.failures = 0
        with self._lock:
            is_still_open = number in self._kept and not kept.lost
            if is_still_open:
                process.opened.add(number)
        if not is_still_open:
            self._close_in(process, number)

    def _call_open(self, process: WorkerProcess, file: ModelFile, *, cached: bool = True) -> ModelDescription:
        """Open a model in a process, with the group's cache if *cached*; raises what the process raises."""
        options = dataclasses.asdict(dataclasses.replace(file.options, isolation=None))
        cache = str(self.folder) if cached else ""
        text = process.call("open", file.number, str(file.path), options, cache, file.learn)
        try:
            description = ModelDescription.model_validate_json(text)
            if description.timing.gated and process.stops is None:
                process.kill("it claims gates that it cannot have")
                raise ModelError(f"{file.path}: its worker claims gates that it cannot have")
            process.residency.add(file.number, description.residency.moving_bytes, description.residency.memory_bytes)
            return description
        except ValidationError as error:
            process.kill("it sent an impossible description of a model")
            raise ModelError(f"{file.path}: its worker sent an impossible description of it") from error

    # Deaths

    def _handle_death(self, process: WorkerProcess, models: set[WorkerModel]) -> None:
        """Let the spare take over from a dead worker, and count the death for these models' circuit breakers.

        Called on the thread that reads the process's packets.
        """
        with self._lock:
            self.counts = self.counts._replace(deaths=self.counts.deaths + 1)
            if process is self.worker:
                self.worker, self.spare = self.spare, None
            elif process is self.spare:
                self.spare = None
        for model in models:
            if model.breaker:
                model.breaker.died()
        log.warning("worker %d of %s died: %s", process.pid, self.name, process.death)
        self._start_keeper()

    def _start_keeper(self) -> None:
        """Start the thread that restores worker and spare (the keeper), unless it runs already."""
        with self._lock:
            if self._keeper is None and not self._closed.is_set():
                keeper = threading.Thread(target=self._restore, name=f"keeper of {self.name}", daemon=True)
                try:
                    self._resources.spawner.submit(keeper.start).result()  # a thread inherits its starter's priority
                except RuntimeError as error:  # there are too many threads; the next step tries again
                    log.warning("the workers of %s cannot be restored now: %s", self.name, error)
                    return
                self._keeper = keeper

    def _restore(self) -> None:
        """Start or complete worker and spare until both have all models; runs on the keeper's thread."""
        failures = 0
        while not self._closed.is_set():
            try:
                with self._preparing:
                    if not self._restore_one_process():
                        return
                failures = 0
            except Exception as error:  # retry with a pause: the next process may start
                failures += 1
                log.warning("a worker of %s could not be made ready: %s", self.name, error)
                if failures >= MOST_FAILURES:
                    self._refuse_requests(error)
                self._closed.wait(min(LONGEST_PAUSE_S, 0.1 * 2 ** min(failures, 10)))

    def _restore_one_process(self) -> bool:
        """Start or complete one process; returns False if nothing is missing, and then the thread ends."""
        with self._lock:
            worker, spare = self.worker, self.spare
            wanted_models = {number for number, kept in self._kept.items() if not kept.lost}
            processes = [process for process in (worker, spare) if process is not None]
            incomplete = [process for process in processes if wanted_models - process.opened]
            complete = worker is not None and (spare is not None or not self.limits.spare)
            if not self._kept or self._closed.is_set() or (complete and not incomplete):
                self._keeper = None
                return False
        if incomplete:
            self._complete_or_replace(incomplete[0])
        else:
            self._place_process(self._start_process())
        return True

    def _complete_or_replace(self, process: WorkerProcess) -> None:
        """Open the models that a process lacks; but close a spare that may not read their folders, to replace it."""
        folders = frozenset[str]().union(*(_folders(kept.file.path) for kept in self._models()))
        if _may_read(folders, process.readable) or process is self.worker:
            self._open_missing_models(process)
            return
        with self._lock:
            self.spare = None
        process.close()

    def _place_process(self, process: WorkerProcess) -> None:
        """Make a new process the worker, or else the spare; close it if both exist or it has died."""
        with self._lock:
            self._building.discard(process)
            self.lost = ""
            if self.counts.deaths:
                self.counts = self.counts._replace(restarts=self.counts.restarts + 1)
            unusable = self._closed.is_set() or not process.alive
            if unusable or (self.worker is not None and self.spare is not None):
                unwanted: WorkerProcess | None = process
            elif self.worker is None:
                self.worker, unwanted = process, None
            else:
                self.spare, unwanted = process, None
        if unwanted is not None:
            unwanted.close()

    def _refuse_requests(self, error: Exception) -> None:
        """Refuse requests from now on, if there is no worker: it may be long until one starts."""
        with self._lock:
            if self.worker is None:
                self.lost = f"its worker cannot be started again: {error}; that is tried every {LONGEST_PAUSE_S:g} s"

    def close(self) -> None:
        """Close all processes and remove their temporary files."""
        self._closed.set()
        with self._lock:
            processes = [*self._building, *(process for process in (self.worker, self.spare) if process is not None)]
            self.worker, self.spare, keeper = None, None, self._keeper
        for process in processes:
            process.close()
        if keeper is not None and keeper is not threading.current_thread():
            keeper.join()
        for folder in (self._scratch, *([self.folder] if self._temporary else [])):
            remove(folder)


def signature(path: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Name, inode, size and modification time of each of a model's files, to notice changes."""
    states = []
    for file in (path, *external_files(path)):
        state = file.stat()
        states.append((file.name, state.st_ino, state.st_size, state.st_mtime_ns))
    return tuple(states)


def _folders(path: Path) -> frozenset[str]:
    """The folder of a model's files, and if the model is a link, the folder of its target."""
    return frozenset(str(file.parent) for file in (path.absolute(), path.resolve()))


def _may_read(folders: Iterable[str], readable: frozenset[str]) -> bool:
    """Whether a process with the *readable* folders may read all *folders*: each, or a parent of it, is granted."""
    return all(any(str(parent) in readable for parent in (Path(folder), *Path(folder).parents)) for folder in folders)


def own_folder(name: str, cache: Path | None) -> tuple[Path, bool]:
    """A folder for the group *name* that no other group writes to, in *cache* if possible; and if it is temporary."""
    if cache is not None:
        folder = cache.absolute() / f"worker-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return folder, False
        except OSError as error:
            log.warning("models of %s are not cached: %s", name, error)
    return make_folder(), True


def _shared_in(cache: Path | None, name: str | None) -> tuple[str, ...]:
    """The folder *name* of the cache, which workers may only read; created, as it must exist before they start.

    Returns one path, or none without a name or a writable cache.
    """
    if cache is None or name is None:
        return ()
    folder = cache.absolute() / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        log.warning("%s cannot be made: %s", folder, error)
        return ()
    return (str(folder),)


def _scratch_in(folder: Path) -> Path:
    """Create a temporary folder for workers: in their cache *folder*, or elsewhere if that is not writable."""
    try:
        return make_folder(".building-", folder)
    except OSError as error:
        log.warning("nothing more is cached in %s: %s", folder, error)
        return make_folder()


def _lower_priority(process: WorkerProcess) -> None:
    """Give a process the priority of this thread; it still has one thread, from which later threads inherit."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0))


@contextmanager
def _kill_after(process: WorkerProcess, limit_s: float | None) -> Iterator[None]:
    """While the block runs, kill the process ``GRACE_S`` after *limit_s*; None: never."""
    if limit_s is None:
        yield
        return
    timer = threading.Timer(limit_s + GRACE_S, process.kill, [f"it took {GRACE_S:g} s more than it may"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
