"""Worker processes that run batches in parallel; each runs its share of every chunk and has its own cache.

Batch n always goes to the same process, whose cache holds its tensors. If a process dies, only the score that was being
computed is lost: the next evaluation starts all processes again.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from weft.base.child_processes import ChildProcess, answer_calls, inherited_environment, result_of
from weft.base.errors import ChildDied, EvaluationError, TuneError, reason_of
from weft.runtime.samples import Ints
from weft.runtime.tensors import Array
from weft_tune.quantised.runner import LayerFormats, PlanRunner, RoundingPlan, SampleOrder

_LOG_CHARACTERS = 4000
"""Characters of a dead worker's log that its error carries, from its end: a screen or two."""

Result = TypeVar("Result")

# the processes share the cores; threads of their libraries would only compete
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")


class _Worker(ChildProcess):
    """A child process, and the log of its standard error."""

    def __init__(self, log: Path) -> None:
        self._log = log
        with log.open("wb") as stderr:
            super().__init__(main, env=inherited_environment() | _ONE_THREAD, stderr=stderr)

    def death(self) -> EvaluationError:
        """The error that explains why the process died, with the end of its log."""
        death = ChildDied(self.wait())
        log = self._log.read_text(errors="replace").strip()
        advice = "if memory ran out, use fewer workers or a smaller cache"
        # a negative code: ended by a signal, as the system does when memory runs out
        why = advice if death.code < 0 else log.rpartition("\n")[2][:200]
        return EvaluationError(f"a worker process was ended {death.how}; {why}".rstrip("; "), log[-_LOG_CHARACTERS:])


@contextmanager
def _explain_errors() -> Iterator[None]:
    """Explain errors of starting processes and writing their files, which need memory and disk space."""
    try:
        yield
    except OSError as error:
        raise TuneError(
            f"cannot start worker processes: {reason_of(error)}; "
            "set TMPDIR to a folder with more room, or use one worker"
        ) from error


class Workers:
    """Runs a plan in *count* processes, which start at the first ``run``; use it from one thread."""

    def __init__(self, plan: RoundingPlan, cache_bytes: int, count: int) -> None:
        self._plan, self._cache_bytes, self._count = plan, cache_bytes, count
        self._samples: dict[str, SampleOrder] = {}
        self._workers: list[_Worker] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._files: dict[int, tuple[Array, Path]] = {}
        """id(array) -> the array and its file, which all processes map."""
        self._file_numbers = itertools.count()

    @property
    def process_ids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def add(self, name: str, samples: SampleOrder) -> None:
        """Register samples under a name for ``run``."""
        self._samples[name] = samples
        if self._workers:
            with _explain_errors():
                self._call_all(BatchWorker.add, name, self._store(samples.inputs), samples.order)

    def drop(self, name: str) -> None:
        del self._samples[name]
        if self._workers:
            self._call_all(BatchWorker.drop, name)
            self._remove_files()

    def run(self, name: str, formats: Mapping[str, LayerFormats], numbers: Sequence[int]) -> list[Array]:
        """Run batches of the samples called *name*; return the outputs in the order of the batch *numbers*."""
        if not self._workers:
            with _explain_errors():
                self._start()
        shares = [tuple(n for n in numbers if n % self._count == worker) for worker in range(self._count)]
        answers = self._call(BatchWorker.run, [(name, formats, share) for share in shares])
        outputs = dict(zip(itertools.chain(*shares), itertools.chain(*answers), strict=True))
        return [outputs[number] for number in numbers]

    def close(self) -> None:
        """End the processes and remove their files."""
        self._stop()

    def _start(self) -> None:
        """Start all processes, and send them the plan and all registered samples."""
        self._folder = tempfile.TemporaryDirectory(prefix="weft-tune-")
        try:
            for number in range(self._count):
                self._workers.append(_Worker(Path(self._folder.name) / f"worker{number}.log"))
            weights = self._store(self._plan.weights)  # in files, so the plan is sent without them
            self._call_all(BatchWorker.open, self._plan.with_weights({}), weights, self._cache_bytes // self._count)
            for name, samples in self._samples.items():
                self._call_all(BatchWorker.add, name, self._store(samples.inputs), samples.order)
        except BaseException:
            self._stop()
            raise

    def _store(self, arrays: Mapping[str, Array]) -> dict[str, Path]:
        """Write arrays to files that all processes map, so that each is in memory once."""
        assert self._folder is not None
        for array in arrays.values():
            if id(array) not in self._files:  # kept together with the array, so that its id is not used again
                path = Path(self._folder.name) / f"array{next(self._file_numbers)}.npy"
                np.save(path, array, allow_pickle=False)
                self._files[id(array)] = array, path
        return {name: self._files[id(array)][1] for name, array in arrays.items()}

    def _remove_files(self) -> None:
        """Remove the files of arrays that are no longer in use."""
        used = {id(array) for samples in self._samples.values() for array in samples.inputs.values()}
        used |= {id(array) for array in self._plan.weights.values()}
        for key in self._files.keys() - used:
            with suppress(PermissionError):  # Windows keeps a file that is still mapped; it goes with the folder
                self._files.pop(key)[1].unlink()

    def _call_all(self, method: Callable[..., None], *arguments: object) -> None:
        self._call(method, [arguments] * self._count)

    def _call(self, method: Callable[..., Result], arguments: Sequence[tuple[object, ...]]) -> list[Result]:
        """Call *method* in every worker, each with its own arguments; return the results in the order of the workers.

        If a worker dies or this call is interrupted, all workers are ended, because replies may be unread.
        """
        try:
            for worker, own_arguments in zip(self._workers, arguments, strict=True):
                worker.send((method, own_arguments))
            replies = [worker.receive() for worker in self._workers]
        except BaseException:
            self._stop()
            raise
        try:
            return [result_of(reply) for reply in replies]
        except EvaluationError:
            raise
        except Exception as error:
            raise EvaluationError(f"{type(error).__name__}: {error}", "\n".join(error.__notes__)) from error

    def _stop(self) -> None:
        """Kill the processes, which have nothing to save."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()
        self._files.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class BatchWorker:
    """The object in the child process whose methods the parent calls: a ``PlanRunner`` whose arrays come in files."""

    def __init__(self) -> None:
        self._runner: PlanRunner | None = None

    @property
    def runner(self) -> PlanRunner:
        assert self._runner is not None, "open is called first"
        return self._runner

    def open(self, plan: RoundingPlan, weights: Mapping[str, Path], cache_bytes: int) -> None:
        """Open the sessions of a plan."""
        self._runner = PlanRunner(plan.with_weights(_map_files(weights)), cache_bytes)

    def add(self, name: str, inputs: Mapping[str, Path], order: Ints) -> None:
        self.runner.add(name, SampleOrder(_map_files(inputs), order))

    def drop(self, name: str) -> None:
        self.runner.drop(name)

    def run(self, name: str, formats: Mapping[str, LayerFormats], numbers: tuple[int, ...]) -> list[Array]:
        """The outputs of batches of samples, under formats."""
        return list(self.runner.run(name, formats, numbers))


def _map_files(files: Mapping[str, Path]) -> dict[str, Any]:
    """Map the array in each file into memory; processes that map the same file share the memory."""
    return {name: np.load(path, mmap_mode="r") for name, path in files.items()}


def main() -> None:
    """Run batches until the parent closes its end."""
    answer_calls(BatchWorker())
