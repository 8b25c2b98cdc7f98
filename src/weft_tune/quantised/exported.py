"""Whether a file that was written is as good as was promised, in ONNX Runtime as anybody would run it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from weft.runtime.onnxruntime_cpu.sessions import open_session
from weft.runtime.tensors import Array
from weft_tune.quantised.data import LabelledData
from weft_tune.quantised.feeding import batches, count_rows, feed
from weft_tune.quantised.metrics import make_metric
from weft_tune.quantised.opened import Opened
from weft_tune.quantised.stages import choose_batch, run_on

CALIBRATION = 512
"""Samples that int8 gets its ranges from, at most."""


def exported_score(path: Path, opened: Opened, data: LabelledData, metric: str, *, optimise: bool = True) -> float:
    """The score of a written model on samples; *opened* is the model that it was made of."""
    measure = make_metric(metric, gives_probability=opened.gives_probability)
    session = open_session(path, 1, optimise=optimise)
    size = choose_batch(opened, data.inputs)
    total, done = 0.0, 0
    for given in batches(data.inputs, size, opened.fixed_batch):
        labels = data.labels[done : done + size]
        (outputs,) = run_on(opened, session, [opened.output], given)
        total += float(measure.scores(outputs[: len(labels)], labels).sum())
        done += len(labels)
    return total / done


def calibration(data: LabelledData, fixed: int | None) -> dict[str, Array]:
    """Samples to see ranges on, as many as fill whole batches where a model takes *fixed* at a time."""
    rows = np.arange(min(CALIBRATION, count_rows(data.inputs)))
    return feed(data.inputs, rows, fixed and -(-len(rows) // fixed) * fixed)
