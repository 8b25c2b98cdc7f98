"""Samples that leave a model early: how sure an answer is, and what of a batch is kept or joined at a cut.

Between segments a batch is a dict of live values, each with a row per sample; the few that have none (sizes that an
exporter computed once, constants) are listed in ``rowless``. Nothing here runs a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from weft.runtime.metadata import EXITS_KEY
from weft.runtime.tensors import Array

Kind = Literal["logits", "probabilities"]
KINDS: tuple[Kind, ...] = ("logits", "probabilities")
METADATA_KEY = EXITS_KEY

Values = dict[str, Any]


class ExitSpec(BaseModel):
    """A place where samples may leave; the last exit of a model is its end."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    output: str
    segment: int
    """The segment that ends with it."""


class Counted(BaseModel):
    """A tensor that only tells how many samples there are: ``first`` for one, ``step`` more for every further one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: str
    shape: tuple[int, ...]
    first: tuple[int, ...]
    step: tuple[int, ...]

    def at(self, rows: int) -> Array:
        """Its value for so many samples."""
        flat = [first + (rows - 1) * step for first, step in zip(self.first, self.step, strict=True)]
        return np.array(flat, self.dtype).reshape(self.shape)


Rowless = Mapping[str, Counted | None]
"""Live values without a row per sample; None for those that are the same for every batch."""


def confidence(values: Array, kind: Kind) -> npt.NDArray[np.float32]:
    """How sure each row of *values*, samples by classes, is of its largest class.

    That is its probability; NaN where it has none, and NaN is above no threshold.
    """
    scores: Any = np.asarray(values, np.float64 if values.dtype == np.float64 else np.float32)
    top = scores.max(axis=1, keepdims=True)
    if kind == "probabilities":
        return np.asarray(top[:, 0], np.float32)
    with np.errstate(invalid="ignore"):  # infinite scores have no softmax
        return np.asarray(1 / np.exp(scores - top).sum(axis=1), np.float32)


def keep(values: Values, rows: Sequence[int] | npt.NDArray[np.intp], rowless: Rowless) -> Values:
    """The values of a batch of which only some rows go on, in the order of *rows*."""
    picked = np.asarray(rows, np.intp)
    return {
        name: each[picked] if name not in rowless else _resized(each, rowless[name], len(picked))
        for name, each in values.items()
    }


def join(batches: Sequence[Values], rowless: Rowless) -> Values:
    """The values of several batches at the same cut as one batch, the rows of the first before those of the next."""
    if len(batches) == 1:
        return batches[0]
    joined = {name: np.concatenate([each[name] for each in batches]) for name in batches[0] if name not in rowless}
    rows = len(next(iter(joined.values()), ()))
    return joined | {name: _resized(each, rowless[name], rows) for name, each in batches[0].items() if name in rowless}


def _resized(value: Any, counted: Counted | None, rows: int) -> Any:
    return value if counted is None else counted.at(rows)
