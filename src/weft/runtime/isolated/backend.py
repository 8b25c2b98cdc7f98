"""ONNX Runtime on the CPU, in threads of the server or in worker processes as each model's options say; or a device.

A device has one worker process with all models, so that a fault there ends only that process.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

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

EXPECTED_TIMES = 4
"""Grace period of a step, in expected times of its longest segment, if that is more than ``kill_s``: a device ends a
step between two segments only, and other lanes of the device slow it down."""
LONGEST_GRACE_S = 60.0
"""Most that the expected time of a segment counts for: a worker reports it, and may forge it."""


class WatchedRun(Protocol):
    """A step that was told to stop."""

    over: bool

    @property
    def waits(self) -> bool:
        """Whether it cannot end yet, so that its grace period has not begun."""
        ...

    @property
    def uninterrupted_s(self) -> float:
        """Expected seconds of the longest part in which it cannot be stopped; 0 if it can be stopped soon."""
        ...

    def request_stop(self) -> None:
        """Ask the step to stop, once more."""
        ...

    def kill(self, why: str) -> None:
        """Kill the process that computes the step."""
        ...


class KillTimer:
    """Kills steps that do not stop in time; has one thread, which starts with the first such step.

    The grace period of a step is *kill_s* seconds, or longer where one of its segments takes long. It begins when the
    step does not wait for others any more.
    """

    def __init__(self, kill_s: float) -> None:
        self._kill_s = kill_s
        self._due: list[tuple[float, int, WatchedRun, float]] = []
        """A heap of (time of the next check, number for ties, step, seconds of its grace period that are left then)."""
        self._numbers = itertools.count()
        self._changed = threading.Condition()  # guards _due, _closed and _thread; notified when one of them changes
        self._closed = False
        self._thread: threading.Thread | None = None

    def watch(self, run: WatchedRun) -> None:
        """Start the grace period of a step that was asked to stop."""
        with self._changed:
            if self._closed:
                return
            self._schedule_check(run, self._grace_s(run))
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="kill timer", daemon=True)
                self._thread.start()
            if len(self._due) == 1:  # else an earlier check is due first
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread:
            self._thread.join()

    def _grace_s(self, run: WatchedRun) -> float:
        return max(self._kill_s, min(EXPECTED_TIMES * run.uninterrupted_s, LONGEST_GRACE_S))

    def _schedule_check(self, run: WatchedRun, left_s: float) -> None:
        """Schedule the next check of a run of whose grace period *left_s* seconds are left."""
        pause_s = min(self._kill_s / 2, left_s)
        left_then_s = left_s if run.waits else left_s - pause_s
        heapq.heappush(self._due, (time.monotonic() + pause_s, next(self._numbers), run, left_then_s))

    def _serve(self) -> None:
        """Check runs when they are due, until ``close``; runs on the timer's thread.

        Every check asks the run again, in case the request arrived before its step; the last one kills.
        """
        while (due := self._next()) is not None:
            run, left_s = due
            if run.over:
                continue
            if left_s <= 0:
                run.kill(f"a step was told to stop and had not {self._grace_s(run):g} s later")
                continue
            run.request_stop()
            with self._changed:
                self._schedule_check(run, left_s)

    def _next(self) -> tuple[WatchedRun, float] | None:
        """Wait for the next run to check, and what is left of its grace period; None after ``close``."""
        with self._changed:
            while not self._closed:
                wait_s = self._due[0][0] - time.monotonic() if self._due else None
                if wait_s is not None and wait_s <= 0:
                    _, _, run, left_s = heapq.heappop(self._due)
                    return run, left_s
                self._changed.wait(wait_s)
            return None


class IsolatingBackend(BackendDefaults):
    """Opens models in this process, or where their options name a group, in the workers of that group."""

    isolates = True
    cache_name: str | None = None
    """The name of the part of the cache that its groups share; None: every group has a part of its own."""

    def __init__(self, inner: CpuBackend, limits: WorkerLimits | None = None, engine: str = CPU) -> None:
        """inner: the backend that runs models in this process. engine: what the workers run models with."""
        self._inner, self.limits, self.engine = inner, limits or WorkerLimits(), engine
        self.name, self.platform, self.inline = inner.name, inner.platform, inner.inline
        self.memory_bytes = inner.memory_bytes
        self.now = inner.now
        self._kill_timer = KillTimer(self.limits.kill_s)
        self._spawner = ThreadPoolExecutor(1, "spawner")
        # This thread pool starts its thread now: workers inherit the priority of the thread that creates the backend.
        self._spawner.submit(int)
        self._template = Template(engine)
        self._carrier = ThreadPoolExecutor(1, "carrier")  # a thread pool that copies large tensors of steps and reports
        self._socket_reader: SocketReader | None = None
        self._numbers = itertools.count(1)
        # Guards _groups, _model_counts and _past_counts: models are opened and closed on several threads.
        self._lock = threading.Lock()
        self._groups: dict[str, WorkerGroup] = {}
        self._model_counts: dict[WorkerGroup, int] = {}  # group -> number of models that it has or is about to have
        self._past_counts = WorkerCounts(0, 0)  # deaths and restarts in groups that were closed

    def open(
        self,
        path: Path,
        options: LoadOptions,
        cache: Path | None = None,
        say: Progress | None = None,
        *,
        learn: bool = True,
    ) -> LoadedModel:
        """Open a model in this process, or in a worker of the group ``options.isolation``; see ``Backend.open``."""
        if options.isolation is None or not path.is_file():
            return self._inner.open(path, options, cache, say, learn=learn)
        group = self._join_group(options.isolation, cache)
        try:
            file = ModelFile(next(self._numbers), path, options, learn, signature(path))
            model = group.open(file)
        except OSError as error:
            self._leave_group(group)
            raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
        except BaseException:
            self._leave_group(group)
            raise
        breaker = Breaker(self.limits.breaker, self.now)
        return IsolatedModel(group, model, breaker, self._close_model)

    def lane(self, index: int, *, pin: bool = False) -> IsolatingLane:
        self._socket_reader = self._socket_reader or SocketReader()
        return IsolatingLane(index, self.now, self._socket_reader, own_core(index, pin=pin), self._inner.scratch)

    @property
    def scratch_bytes(self) -> int:
        """Bytes that runs have left in ONNX Runtime's arena of this process."""
        return self._inner.scratch_bytes

    def counts(self) -> WorkerCounts:
        """Deaths and restarts of workers, including those of groups that have ended."""
        with self._lock:
            counts = [self._past_counts, *(group.counts for group in self._model_counts)]
        return WorkerCounts(*map(sum, zip(*counts, strict=True)))

    def groups(self) -> dict[str, WorkerGroup]:
        """The present groups, by name."""
        with self._lock:
            return dict(self._groups)

    def close(self) -> None:
        """End all workers, and stop the opening of models in this process."""
        self._inner.close()
        with self._lock:
            groups = list(self._model_counts)
        for group in groups:
            group.close()
        self._kill_timer.close()
        self._spawner.shutdown()
        self._template.close()
        self._carrier.shutdown()
        if self._socket_reader:
            self._socket_reader.close()

    def _join_group(self, name: str, cache: Path | None) -> WorkerGroup:
        """Count one more model of a group, which is created for its first model."""
        with self._lock:
            group = self._groups.get(name)
            if group is None:
                resources = GroupResources(
                    self.now, self._spawner, self._template, self._carrier, self._kill_timer.watch
                )
                group = self._groups[name] = WorkerGroup(name, self.limits, resources, cache, self.cache_name)
            self._model_counts[group] = self._model_counts.get(group, 0) + 1
            return group

    def _leave_group(self, group: WorkerGroup) -> bool:
        """Count one model of a group less; after the last, close the group and return True."""
        with self._lock:
            self._model_counts[group] -= 1
            if self._model_counts[group]:
                return False
            del self._model_counts[group]
            if self._groups.get(group.name) is group:
                del self._groups[group.name]
            past, counts = self._past_counts, group.counts
            self._past_counts = WorkerCounts(past.deaths + counts.deaths, past.restarts + counts.restarts)
        group.close()
        return True

    def _close_model(self, model: IsolatedModel) -> None:
        if not self._leave_group(model.group):
            model.group.forget(model.number)
