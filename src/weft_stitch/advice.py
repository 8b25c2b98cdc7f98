"""``advise`` recommends to serve a stitched file or its separate models, after timing both as a server runs them.

A server runs the requests that have arrived: a single one, or requests for all models in one batch. A stitched file
that is faster for a row of every model may be slower for one row of one model, because the whole graph runs. Both
cases are timed in ONNX Runtime, in turns, with one thread each, like a lane of the server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft.base.errors import StitchError
from weft.runtime.stitched import TaskSpec, tasks_in
from weft.runtime.tensors import Array
from weft.runtime.timing import Clock, Run, least_seconds

ALONE, TOGETHER = "alone", "together"
"""How requests arrive: one request of one model at a time, or one batch with requests of all models."""
BATCHES = (1, 4)
"""Rows of each model in a batch of requests for all models."""
ROUNDS = 20
"""Timed rounds of a case, of which the least time counts: with fewer, more noise of other processes remains."""
LONGEST_S = 2.0
"""Time limit of a case in seconds: no round begins after it."""
NOTICED = 0.03
"""Relative differences of time up to this are noise."""

_TYPES = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}
"""Type of an input, as ONNX Runtime names it -> numpy's."""

OnCase = Callable[[int, int], None]
"""Progress callback: the number of finished cases, and of all cases."""


_ADVICE = {
    "stitched": "serve it",
    "apart": "serve the models apart instead",
    "either": "serve it where requests mostly come as in the faster ones, else the models apart",
}
"""``Advice.serve`` -> the recommendation in words."""


class ServedTimes(NamedTuple):
    """Seconds for the same requests with the stitched file, and with the separate models."""

    arrival: str
    """How requests arrive: ``alone`` (one request of one model, averaged over models) or ``together`` (of all)."""
    rows: int
    """Rows per model that has requests."""
    separate_s: float
    stitched_s: float

    @property
    def gain(self) -> float:
        """How many times faster the stitched file is; below 1 if it is slower."""
        return self.separate_s / self.stitched_s

    def describe(self) -> str:
        """Return how requests arrive, and the gain, as text."""
        requests = self.arrival if self.rows == 1 else f"{self.arrival} with {self.rows} rows each"
        return f"{requests} {self.gain:.2f}"

    def as_dict(self) -> dict[str, Any]:
        """The case under the keys of the report."""
        times = {"apart_s": self.separate_s, "stitched_s": self.stitched_s}
        return {"come": self.arrival, "rows": self.rows, **times, "gain": self.gain}


@dataclass(frozen=True, slots=True)
class Advice:
    """Times and sizes of a stitched file and of its separate models, as they would be served."""

    cases: tuple[ServedTimes, ...]
    stitched_bytes: int
    separate_bytes: int
    """Total size of the separate models' files."""

    @property
    def serve(self) -> str:
        """The recommendation: ``stitched``, ``apart`` (the separate models) or ``either``.

        ``stitched`` if the stitched file is slower in no case, and faster in one or smaller. ``apart`` if it is faster
        in no case, and slower in one. Else ``either``: it depends on how requests come, or makes no difference. Times
        within ``NOTICED`` of each other count as equal.
        """
        gains = [case.gain for case in self.cases]
        if min(gains) >= 1 - NOTICED:
            return "stitched" if max(gains) > 1 + NOTICED or self.stitched_bytes < self.separate_bytes else "either"
        return "apart" if max(gains) <= 1 + NOTICED else "either"

    @property
    def line(self) -> str:
        """The recommendation with its reason, for the terminal."""
        measured = ", ".join(case.describe() for case in self.cases)
        return f"times the speed of the models apart, as requests come: {measured}; {_ADVICE[self.serve]}"

    def as_dict(self) -> dict[str, Any]:
        """The times and the recommendation, ready for JSON."""
        return {
            "serve": self.serve,
            "stitched_bytes": self.stitched_bytes,
            "apart_bytes": self.separate_bytes,
            "cases": [case.as_dict() for case in self.cases],
        }


def advise(
    stitched: Path,
    sources: Mapping[str, Path],
    *,
    batches: Sequence[int] = BATCHES,
    threads: int = 1,
    on_case: OnCase = lambda done, of: None,
    clock: Clock = time.process_time,
) -> Advice:
    """Time *stitched* and the separate files of its models as a server would run them, and recommend one.

    *sources*: model -> its own file. *batches*: rows per model when requests of all models come together.
    *on_case*: called before every case. Raises ``StitchError`` if *stitched* is not a stitched file or a source is
    missing.
    """
    tasks = tasks_in(stitched)
    if missing := [task.name for task in tasks if task.name not in sources]:
        raise StitchError(f"{stitched} holds {missing[0]}, whose own file is not known; name it")
    if not tasks:
        raise StitchError(f"{stitched} is not stitched; give what weft stitch --dynamic wrote")
    bench = _Bench(stitched, [sources[task.name] for task in tasks], tasks, threads)
    requests = [(ALONE, 1), *((TOGETHER, rows) for rows in batches)]
    cases: list[ServedTimes] = []
    for arrival, rows in requests:
        on_case(len(cases), len(requests))
        runs = dict(zip(("separate", "stitched"), bench.runs(arrival, rows), strict=True))
        seconds = least_seconds(runs, clock=clock, rounds=ROUNDS, longest_s=LONGEST_S)
        count = len(tasks) if arrival == ALONE else 1  # alone, each model has had one request
        cases.append(ServedTimes(arrival, rows, seconds["separate"] / count, seconds["stitched"] / count))
    return Advice(tuple(cases), _size(stitched), sum(map(_size, {sources[task.name] for task in tasks})))


class _Bench:
    """Sessions of the stitched file and of the separate models, with random inputs."""

    def __init__(self, stitched: Path, files: Sequence[Path], tasks: Sequence[TaskSpec], threads: int) -> None:
        from weft_stitch.running.sessions import load_session

        self._tasks = tasks
        self._stitched = load_session(stitched, threads, stitched.name, optimise=True)
        self._separate = [load_session(file, threads, file.name, optimise=True) for file in files]
        self._shapes = {port.name: tuple(port.shape[1:]) for port in self._stitched.get_inputs()}
        """Input of the stitched file -> its shape without rows."""
        self._rng = np.random.default_rng(0)

    def runs(self, arrival: str, rows: int) -> tuple[list[Run], list[Run]]:
        """The runs of the separate models and of the stitched file for requests that come ``ALONE`` or ``TOGETHER``."""
        tasks = range(len(self._tasks))
        separate = [run for task in tasks for run in self._runs_alone(task, rows)]
        groups = [[task] for task in tasks] if arrival == ALONE else [list(tasks)]
        return separate, [self._run_stitched(group, rows) for group in groups]

    def _runs_alone(self, task: int, rows: int) -> list[Run]:
        """The runs of one model's own file for *rows* rows; several if the file is fixed to fewer rows."""
        session, spec = self._separate[task], self._tasks[task]
        fixed = [port.shape[0] for port in session.get_inputs() if isinstance(port.shape[0], int)]
        rows_per_run = min([rows, *fixed])
        given_rows = max([rows_per_run, *fixed])  # a file that is fixed to more rows needs all of them
        feed = {port.name: self._draw_input(spec.inputs[port.name], given_rows).astype(_TYPES[port.type])
                for port in session.get_inputs()}  # fmt: skip
        return [lambda: session.run(None, feed)] * -(-rows // rows_per_run)

    def _run_stitched(self, tasks: Sequence[int], rows: int) -> Run:
        """A run of the stitched file with *rows* rows of each of *tasks*, and none of the other models."""
        present = {name for task in tasks for name in self._tasks[task].inputs.values()}
        outputs = [name for task in tasks for name in self._tasks[task].outputs.values()]
        feed = {name: self._draw_input(name, rows if name in present else 0) for name in self._shapes}
        return lambda: self._stitched.run(outputs, feed)

    def _draw_input(self, name: str, rows: int) -> Array:
        shape = (rows, *self._shapes[name])
        numbers: Array = self._rng.standard_normal(shape, np.float32)
        return numbers


def _size(path: Path) -> int:
    """Bytes of the file and of its external data."""
    external = path.with_name(f"{path.name}.data")
    return path.stat().st_size + (external.stat().st_size if external.exists() else 0)
