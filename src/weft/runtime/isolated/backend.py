"""ONNX Runtime on the CPU, in threads of the server or in worker processes, as each model is to have it; or a device.

A device is worked by a process of its own that has all models: a fault there is the end of that process alone.
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from weft.base.errors import ModelError
from weft.runtime.backend import LoadedModel, LoadOptions, Progress
from weft.runtime.breaker import Breaker
from weft.runtime.defaults import BackendDefaults
from weft.runtime.isolated.ear import Ear
from weft.runtime.isolated.engines import CPU
from weft.runtime.isolated.group import Hands, ModelFile, WorkerGroup, signature
from weft.runtime.isolated.lane import IsolatingLane
from weft.runtime.isolated.limits import WorkerCounts, WorkerLimits
from weft.runtime.isolated.model import IsolatedModel
from weft.runtime.isolated.spawning import Template
from weft.runtime.isolated.watchman import Watchman
from weft.runtime.onnxruntime_cpu.backend import CpuBackend
from weft.runtime.onnxruntime_cpu.lane import own_core


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
        self._watchman = Watchman(self.limits.kill_s)
        self._spawner = ThreadPoolExecutor(1, "spawner")
        self._spawner.submit(int)  # its thread, and so all workers, are as urgent as whoever makes this
        self._template = Template(engine)
        self._carrier = ThreadPoolExecutor(1, "carrier")
        self._ear: Ear | None = None
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
        self._ear = self._ear or Ear()
        return IsolatingLane(index, self.now, self._ear, own_core(index, pin=pin), self._inner.scratch)

    @property
    def scratch_bytes(self) -> int:
        """What runs have left in the arena of this process."""
        return self._inner.scratch_bytes

    def counts(self) -> WorkerCounts:
        """How often workers died, and were started again."""
        with self._lock:
            all_of_them = [self._past, *(each.counts for each in self._users)]
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
                hands = Hands(self.now, self._spawner, self._template, self._carrier, self._watchman.watch)
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
