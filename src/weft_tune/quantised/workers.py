"""Several processes that run batches side by side; each has its own share of every chunk and its own cache.

Batch n always goes to the same process, which finds there what it kept of it. A process that dies takes nothing with
it but the score that was being computed: the next one starts all of them anew.
"""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from weft.base.errors import EvaluationError, TuneError, reason_of
from weft.runtime.tensors import Array
from weft_tune.quantised.plan import RoundingPlan
from weft_tune.quantised.runner import LayerFormats, SampleOrder
from weft_tune.quantised.worker import (
    Add,
    Drop,
    Job,
    Open,
    WorkerJob,
    WorkerReply,
    send,
)

_TAIL = 4000
"""Characters of what a process said before it died."""


class _Worker:
    """One process and its pipes."""

    def __init__(self, log: Path) -> None:
        self._log = log
        start = "from weft_tune.quantised.worker import main; main()"
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", start],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=os.environ | single,
            )  # fmt: skip

    def send(self, job: Job) -> None:
        try:
            send(cast(BinaryIO, self.process.stdin), job)
        except BrokenPipeError:
            raise self._death() from None

    def receive(self) -> WorkerReply:
        try:
            return cast(WorkerReply, pickle.load(cast(BinaryIO, self.process.stdout)))
        except (EOFError, pickle.UnpicklingError):
            raise self._death() from None

    def _death(self) -> EvaluationError:
        code = self.process.wait()
        said = self._log.read_text(errors="replace").strip()
        how, why = f"with code {code}", said.rpartition("\n")[2]
        if code < 0:
            how, why = f"by signal {-code}", "if memory ran out, use fewer workers or a smaller cache"
        return EvaluationError(f"a worker process was ended {how}; {why[:200]}".rstrip("; "), said[-_TAIL:])

    def end(self) -> None:
        self.process.kill()
        with suppress(BrokenPipeError):  # a job that it did not read any more
            self.process.communicate()


@contextmanager
def _room() -> Iterator[None]:
    """Starting processes and writing their files takes memory and disk, of which there may be too little."""
    try:
        yield
    except OSError as error:
        raise TuneError(
            f"cannot start worker processes: {reason_of(error)}; "
            "set TMPDIR to a folder with more room, or use one worker"
        ) from error


class Workers:
    """Runs a plan in *count* processes, which start with the first job."""

    def __init__(self, plan: RoundingPlan, cache_bytes: int, count: int) -> None:
        self._plan, self._cache_bytes, self._count = plan, cache_bytes, count
        self._samples: dict[str, SampleOrder] = {}
        self._workers: list[_Worker] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._files: dict[int, tuple[Array, Path]] = {}
        self._numbers = itertools.count()

    @property
    def process_ids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def add(self, name: str, samples: SampleOrder) -> None:
        self._samples[name] = samples
        if self._workers:
            with _room():
                self._tell(Add(name, self._stored(samples.inputs), samples.order))

    def drop(self, name: str) -> None:
        del self._samples[name]
        if self._workers:
            self._tell(Drop(name))
            self._remove_files()

    def run(self, name: str, formats: Mapping[str, LayerFormats], numbers: Sequence[int]) -> list[Array]:
        """The output for each batch, in the order of *numbers*."""
        if not self._workers:
            with _room():
                self._start()
        shares = [tuple(n for n in numbers if n % self._count == at) for at in range(self._count)]
        answers = self._ask([WorkerJob(name, formats, share) for share in shares])
        found = {
            n: o
            for share, answer in zip(shares, answers, strict=True)
            for n, o in zip(share, answer.outputs, strict=True)
        }
        return [found[number] for number in numbers]

    def close(self) -> None:
        """End the processes and remove their files."""
        self._stop()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="weft-tune-")
        try:
            for at in range(self._count):
                self._workers.append(_Worker(Path(self._folder.name) / f"worker{at}.log"))
            weights = self._stored(self._plan.weights)
            self._tell(Open(self._plan.with_weights({}), weights, self._cache_bytes // self._count))
            for name, samples in self._samples.items():
                self._tell(Add(name, self._stored(samples.inputs), samples.order))
        except BaseException:
            self._stop()
            raise

    def _stored(self, arrays: Mapping[str, Array]) -> dict[str, Path]:
        """Files that all processes map, so that an array is in memory once."""
        assert self._folder is not None
        for array in arrays.values():
            if id(array) not in self._files:
                path = Path(self._folder.name) / f"array{next(self._numbers)}.npy"
                np.save(path, array, allow_pickle=False)
                self._files[id(array)] = array, path
        return {name: self._files[id(array)][1] for name, array in arrays.items()}

    def _remove_files(self) -> None:
        """Those of arrays that nobody uses any more."""
        used = {id(array) for samples in self._samples.values() for array in samples.inputs.values()}
        used |= {id(array) for array in self._plan.weights.values()}
        for key in self._files.keys() - used:
            with suppress(PermissionError):  # still mapped, where that holds a file; it goes with the folder
                self._files.pop(key)[1].unlink()

    def _tell(self, job: Job) -> None:
        self._ask([job] * self._count)

    def _ask(self, jobs: Sequence[Job]) -> list[WorkerReply]:
        """One job for each process. Whatever goes wrong or interrupts leaves answers behind, so all are ended then."""
        try:
            for worker, job in zip(self._workers, jobs, strict=True):
                worker.send(job)
            answers = [worker.receive() for worker in self._workers]
        except BaseException:
            self._stop()
            raise
        for answer in answers:
            if answer.failure:
                raise EvaluationError(answer.failure, answer.trace)
        return answers

    def _stop(self) -> None:
        """There is nothing that they would have to save."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.end()
        self._files.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
