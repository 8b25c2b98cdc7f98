"""How long a tuned file takes in ONNX Runtime beside the file it was made of: ``run_times``.

Few bits make a small file and not a fast one: formats that the runtime has no kernels for are rounded by operators of
their own. The two run in turns, so that whatever else the machine does meets both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from weft.runtime.onnxruntime_cpu.sessions import open_session
from weft.runtime.tensors import Array
from weft_tune.quantised.data import LabelledData
from weft_tune.quantised.feeding import batches
from weft_tune.quantised.opened import Opened
from weft_tune.quantised.stages import run_on

WARM_UPS, ROUNDS = 2, 25
LONGEST_S = 3.0
"""After so long no further round begins."""


class RunTimes(NamedTuple):
    """Seconds that a run of one sample takes, at least; of all in the batch, where a file takes a fixed number."""

    before: float
    after: float

    @property
    def gain(self) -> float:
        """How many times faster the tuned file is; below 1 it is slower."""
        return self.before / self.after


def run_times(
    tuned: Path, opened: Opened, data: LabelledData, *, clock: Callable[[], float] = time.perf_counter
) -> RunTimes:
    """One thread, on this machine; *opened* is the model that *tuned* was made of."""
    given = next(batches(data.inputs, opened.fixed_batch or 1, opened.fixed_batch))
    runs = [_runner(path, opened, given) for path in (opened.path, tuned)]
    found: list[tuple[float, ...]] = []
    began_s = clock()
    for turn in range(WARM_UPS + ROUNDS):
        times = tuple(_timed(run, clock) for run in runs)
        if turn >= WARM_UPS:
            found.append(times)
        if found and clock() - began_s > LONGEST_S:
            break
    return RunTimes(*map(min, zip(*found, strict=True)))


def _runner(path: Path, opened: Opened, given: Mapping[str, Array]) -> Callable[[], object]:
    session = open_session(path, 1, optimise=True)
    return lambda: run_on(opened, session, [opened.output], given)


def _timed(run: Callable[[], object], clock: Callable[[], float]) -> float:
    began_s = clock()
    run()
    return max(clock() - began_s, 1e-9)
