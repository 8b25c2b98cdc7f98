"""ONNX Runtime on the CPU, in threads of the server or in worker processes, as each model is to have it; or a device.

A device is worked by a process of its own that has all models: a fault there is the end of that process alone.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from weft.base.errors import ModelError
from weft.runtime.backend import LoadedModel, LoadOptions, Progress
from weft.runtime.breaker import Breaker
from weft.runtime.defaults import BackendDefaults
from weft.runtime.isolated.group import GroupResources, ModelFile, WorkerGroup, signature
from weft.runtime.isolated.lane import IsolatingLane, SocketReader
from weft.runtime.isolated.limits import WorkerCounts, WorkerLimits
from weft.runtime.isolated.model import IsolatedModel
from weft.runtime.isolated.spawning import Template
from weft.runtime.metadata import CPU
from weft.runtime.onnxruntime_cpu.backend import CpuBackend
from weft.runtime.onnxruntime_cpu.lane import own_core


class WatchedRun(Protocol):
    """A step that was told to stop."""

    over: bool

    def urge(self) -> None:
        """Tell it to stop, once more."""
        ...

    def kill(self, why: str) -> None:
        """End whatever computes it."""
        ...


class KillTimer:
    """One thread, started with the first step that it is to watch."""

    def __init__(self, kill_s: float) -> None:
        self._kill_s = kill_s
        self._due: list[tuple[float, int, WatchedRun, bool]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def watch(self, run: WatchedRun) -> None:
        """Have a step killed that has not ended in time."""
        with self._changed:
            if self._closed:
                return
            self._put(run, last=False)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="watchman", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread:
            self._thread.join()

    def _put(self, run: WatchedRun, *, last: bool) -> None:
        """Look at it half-way, for the word may have come a moment too early, and at the end."""
        heapq.heappush(self._due, (time.monotonic() + self._kill_s / 2, next(self._numbers), run, last))

    def _serve(self) -> None:
        while (due := self._next()) is not None:
            run, last = due
            if run.over:
                continue
            if last:
                run.kill(f"a step was told to stop and had not {self._kill_s:g} s later")
            else:
                run.urge()
                with self._changed:
                    self._put(run, last=True)

    def _next(self) -> tuple[WatchedRun, bool] | None:
        """Wait for the next one to look at; None at the end."""
        with self._changed:
            while not self._closed:
                rest_s = self._due[0][0] - time.monotonic() if self._due else None
                if rest_s is not None and rest_s <= 0:
                    _, _, run, last = heapq.heappop(self._due)
                    return run, last
                self._changed.wait(rest_s)
            return None


class IsolatingBackend(BackendDefaults):
    """Opens models in this process, or where their options name a group, in the workers of that group."""

    isolates = True
    kept_as: str | None = None
    """The name of the part of the cache that its groups share; each has its own where there is none."""

    def __init__(self, inner: CpuBackend, limits: WorkerLimits | None = None, engine: str = CPU) -> None:
        """engine: what the workers run models with (``engines``)."""
        self._inner, self.limits, self.engine = inner, limits or WorkerLimits(), engine
        self.name, self.platform, self.inline = inner.name, inner.platform, inner.inline
        self.memory_bytes = inner.memory_bytes
        self.now = inner.now
        self._watchman = KillTimer(self.limits.kill_s)
        self._spawner = ThreadPoolExecutor(1, "spawner")
        self._spawner.submit(int)  # its thread, and so all workers, are as urgent as whoever makes this
        self._template = Template(engine)
        self._carrier = ThreadPoolExecutor(1, "carrier")
        self._ear: SocketReader | None = None
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._groups: dict[str, WorkerGroup] = {}
        self._users: dict[WorkerGroup, int] = {}
        """Models that a group has or is about to have."""
        self._past = WorkerCounts(0, 0)
        """Of groups that are gone."""

    def open(
        self,
        path: Path,
        options: LoadOptions,
        cache: Path | None = None,
        say: Progress | None = None,
        *,
        learn: bool = True,
    ) -> LoadedModel:
        more: dict[str, Any] = {} if learn else {"learn": False}
        if options.isolation is None or not path.is_file():
            return self._inner.open(path, options, cache, say, **more)
        group = self._joined(options.isolation, cache)
        try:
            file = ModelFile(next(self._numbers), path, options, learn, signature(path))
            kept = group.open(file)
        except OSError as error:
            self._leave(group)
            raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
        except BaseException:
            self._leave(group)
            raise
        breaker = Breaker(self.limits.endurance, self.now)
        return IsolatedModel(group, kept, breaker, self._closed)

    def lane(self, index: int, *, pin: bool = False) -> IsolatingLane:
        self._ear = self._ear or SocketReader()
        return IsolatingLane(index, self.now, self._ear, own_core(index, pin=pin), self._inner.scratch)

    @property
    def scratch_bytes(self) -> int:
        """What runs have left in the arena of this process."""
        return self._inner.scratch_bytes

    def counts(self) -> WorkerCounts:
        """How often workers died, and were started again."""
        with self._lock:
            all_of_them = [self._past, *(group.counts for group in self._users)]
        return WorkerCounts(*map(sum, zip(*all_of_them, strict=True)))

    def groups(self) -> dict[str, WorkerGroup]:
        """The groups there are, by name."""
        with self._lock:
            return dict(self._groups)

    def close(self) -> None:
        """End all workers, and what is still being opened here."""
        self._inner.close()
        with self._lock:
            groups = list(self._users)
        for group in groups:
            group.close()
        self._watchman.close()
        self._spawner.shutdown()
        self._template.close()
        self._carrier.shutdown()
        if self._ear:
            self._ear.close()

    def _joined(self, name: str, cache: Path | None) -> WorkerGroup:
        with self._lock:
            group = self._groups.get(name)
            if group is None:
                hands = GroupResources(self.now, self._spawner, self._template, self._carrier, self._watchman.watch)
                group = self._groups[name] = WorkerGroup(name, self.limits, hands, cache, self.kept_as)
            self._users[group] = self._users.get(group, 0) + 1
            return group

    def _leave(self, group: WorkerGroup) -> bool:
        """A model of a group is gone, and the group with its last one: True."""
        with self._lock:
            self._users[group] -= 1
            if self._users[group]:
                return False
            del self._users[group]
            if self._groups.get(group.name) is group:
                del self._groups[group.name]
            past, ended = self._past, group.counts
            self._past = WorkerCounts(past.deaths + ended.deaths, past.restarts + ended.restarts)
        group.close()
        return True

    def _closed(self, model: IsolatedModel) -> None:
        if not self._leave(model.group):
            model.group.forget(model.number)
