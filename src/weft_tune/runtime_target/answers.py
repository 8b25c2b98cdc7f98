"""What a model, or one that was made of it, says to samples, run as anybody would run it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from weft.runtime.onnxruntime_cpu.sessions import open_model
from weft.runtime.tensors import Array
from weft_tune.quantised.feeding import batches, count_rows
from weft_tune.quantised.opened import Opened
from weft_tune.quantised.stages import run_on


def answers(opened: Opened, file: Path, inputs: Mapping[str, Array]) -> Array:
    """The scored output for each sample, one after another; *file*: *opened*'s own, or one with the same outputs."""
    session, fixed = open_model(file, 1), opened.fixed_batch
    made = [run_on(opened, session, [opened.output], given)[0] for given in batches(inputs, fixed or 1, fixed)]
    return np.asarray(np.concatenate(made)[: count_rows(inputs)])
