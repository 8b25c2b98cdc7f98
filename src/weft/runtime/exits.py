"""Early exits at run time: the confidence of an answer, and batches that are shrunk and joined at a cut.

Between segments a batch is a dict of live values, each with a row per sample; the few that have none (sizes that an
exporter computed once, constants) are listed in ``rowless``. Nothing here runs a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from weft.runtime.tensors import Array

Kind = Literal["logits", "probabilities"]
KINDS: tuple[Kind, ...] = ("logits", "probabilities")

Values = dict[str, Any]  # live values of a batch, by name


class ExitSpec(BaseModel):
    """An output at which samples may leave; the last exit of a model is its end."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    output: str
    segment: int
    """The segment that ends with it."""


class Counted(BaseModel):
    """A tensor of integers that depends on the number of samples only, and grows linearly with it.

    Its elements are ``first`` for one sample, and ``step`` more for each further sample.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: str
    shape: tuple[int, ...]
    first: tuple[int, ...]
    step: tuple[int, ...]

    def at(self, rows: int) -> Array:
        """The tensor for *rows* samples."""
        numbers = [first + (rows - 1) * step for first, step in zip(self.first, self.step, strict=True)]
        return np.array(numbers, self.dtype).reshape(self.shape)


Rowless = Mapping[str, Counted | None]
"""Live values without a row per sample; None for those that are the same for every batch."""


def confidence(values: Array, kind: Kind) -> npt.NDArray[np.float32]:
    """The probability of the likeliest class for each row of *values*, an array of samples by classes.

    kind: what *values* are. A row with NaN or infinity gives NaN, which is above no threshold: the sample stays.
    """
    scores: Any = np.asarray(values, np.float64 if values.dtype == np.float64 else np.float32)
    top = scores.max(axis=1, keepdims=True)
    if kind == "probabilities":
        return np.asarray(top[:, 0], np.float32)
    with np.errstate(invalid="ignore"):  # infinite scores have no softmax
        return np.asarray(1 / np.exp(scores - top).sum(axis=1), np.float32)


def keep(values: Values, rows: Sequence[int] | npt.NDArray[np.intp], rowless: Rowless) -> Values:
    """The values of a batch from which all rows but *rows* (indices) are removed; *rows* also gives their order."""
    indices = np.asarray(rows, np.intp)
    return {
        name: value[indices] if name not in rowless else _resize(value, rowless[name], len(indices))
        for name, value in values.items()
    }


def join(batches: Sequence[Values], rowless: Rowless) -> Values:
    """The values of several batches at the same cut as one batch, the rows of the first before those of the next."""
    if len(batches) == 1:
        return batches[0]
    names = [name for name in batches[0] if name not in rowless]
    joined = {name: np.concatenate([batch[name] for batch in batches]) for name in names}
    rows = len(next(iter(joined.values()), ()))
    rowless_values = {name: value for name, value in batches[0].items() if name in rowless}
    return joined | {name: _resize(value, rowless[name], rows) for name, value in rowless_values.items()}


def _resize(value: Any, counted: Counted | None, rows: int) -> Any:
    """A rowless value for a batch of *rows* rows; *counted*: how it depends on them, None if it does not."""
    return value if counted is None else counted.at(rows)
