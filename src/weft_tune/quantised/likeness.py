"""How much outputs are like those of the model before it was changed: scores for samples that have no labels.

They say nothing of how right either model is. The labels are the outputs of the first one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from weft.base.errors import TuneError
from weft.base.shapes import written
from weft.runtime.tensors import Array
from weft_tune.quantised.metrics import Doubles, Function, Metric


def agreement(outputs: Array, first: Array) -> Doubles:
    """The part of a sample's answers that are the same; an answer is where the largest value of the last axis is."""
    if outputs.ndim < 2 or outputs.shape[-1] < 2:
        raise TuneError(
            f"metric = agreement: the output has the shape {written(outputs.shape)}, and no last axis of classes; "
            "metric = closeness compares numbers"
        )
    same: npt.NDArray[Any] = outputs.argmax(axis=-1) == first.argmax(axis=-1)
    spoilt = np.isnan(outputs).reshape(len(outputs), -1).any(axis=1)
    return np.where(spoilt, 0.0, same.reshape(len(outputs), -1).mean(axis=1))


def closeness(outputs: Array, first: Array) -> Doubles:
    """1 less the distance from the first outputs, in parts of their length; 0 where it is longer than they are."""
    rows = len(outputs)
    was = np.asarray(first, np.float64).reshape(rows, -1)
    away = np.linalg.norm(np.asarray(outputs, np.float64).reshape(rows, -1) - was, axis=1)
    length = np.linalg.norm(was, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        part = np.where(away == 0, 0.0, away / length)
    return np.asarray(np.clip(1 - np.nan_to_num(part, nan=1.0), 0.0, 1.0), np.float64)


LIKENESS: dict[str, Function] = {"agreement": agreement, "closeness": closeness}
"""The names a user may write."""


def likeness(name: str) -> Metric:
    """The measure of that name."""
    return Metric(name, function=LIKENESS[name])
