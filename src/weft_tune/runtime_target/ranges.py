"""How large the tensors of a model get on samples: what the steps of 8-bit integers are made from.

Two ranges of each: all that was seen, and a narrower one that clips the largest values where the smaller steps are
worth it, in the mean of the squares.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.base.errors import TuneError
from weft.runtime.tensors import Array
from weft_tune.quantised.feeding import batches
from weft_tune.quantised.opened import Opened
from weft_tune.quantised.stages import run_on, session_for

STEPS = 255
KEPT = 1024
"""Values of a tensor, at most, that are kept from a batch to see what clipping does."""
PARTS = tuple(number / 20 for number in range(20, 1, -1))
"""Of the whole range, that are tried as a narrower one."""


class TensorRange(NamedTuple):
    """The smallest and the largest value of a tensor, and the part of them that loses least in 8 bits."""

    low: float
    high: float
    part: float = 1.0

    def bounds(self, clipped: bool) -> tuple[float, float]:
        """Zero lies always between them, since it must be met exactly."""
        part = self.part if clipped else 1.0
        return min(part * self.low, 0.0), max(part * self.high, 0.0)


def see_ranges(
    opened: Opened, names: Collection[str], inputs: Mapping[str, Array], batch: int
) -> dict[str, TensorRange]:
    """The ranges of the tensors called *names*, on samples; *opened* has the prepared graph."""
    made = [name for name in names if name not in inputs]
    session = session_for(opened, made)
    seen = {name: _Seen() for name in names}
    for given in batches(inputs, batch, opened.fixed_batch):
        seen_now = run_on(opened, session, made, given) if made else []
        tensors = dict(zip(made, seen_now, strict=True)) | given
        for name, each in seen.items():
            each.add(tensors[name])
    for name, each in seen.items():
        if not (math.isfinite(each.low) and math.isfinite(each.high)):
            raise TuneError(f"{opened.path}: tensor {name!r} holds NaN or infinity; take the samples out that do it")
    return {name: TensorRange(each.low, each.high, each.best_part()) for name, each in seen.items()}


class _Seen:
    """What was seen of one tensor."""

    def __init__(self) -> None:
        self.low = self.high = 0.0
        self._values: list[npt.NDArray[np.float32]] = []

    def add(self, values: Array) -> None:
        """One more batch, whose values are kept at equal distances."""
        self.low = min(self.low, float(values.min(initial=0.0)))
        self.high = max(self.high, float(values.max(initial=0.0)))
        self._values.append(values.reshape(-1)[:: max(1, values.size // KEPT)].astype(np.float32))

    def best_part(self) -> float:
        values = np.concatenate(self._values)
        return min(PARTS, key=lambda part: lost(values, part * self.low, part * self.high))


def lost(values: npt.NDArray[np.float32], low: float, high: float) -> float:
    """The mean square of what is lost in 8 bits between *low* and *high*."""
    scale = (high - low) / STEPS
    if scale <= 0:
        return 0.0
    zero = round(-low / scale)
    held = (np.clip(np.rint(values / scale) + zero, 0, STEPS) - zero) * scale
    return float(np.square(held - values).mean())
