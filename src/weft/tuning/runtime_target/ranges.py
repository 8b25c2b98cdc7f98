"""How large the tensors of a model get on samples: what the steps of 8-bit integers are made from."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from weft.errors import TuneError
from weft.runtime.tensors import Array
from weft.tuning.quantised.feeding import batches
from weft.tuning.quantised.opened import Opened
from weft.tuning.quantised.stages import run_on, session_for


class TensorRange(NamedTuple):
    """The smallest and the largest value of a tensor: over all samples, and in a usual batch of them."""

    low: float
    high: float
    usual_low: float
    usual_high: float

    def bounds(self, usual: bool) -> tuple[float, float]:
        """Zero lies always between them, since it must be met exactly."""
        low, high = (self.usual_low, self.usual_high) if usual else (self.low, self.high)
        return min(low, 0.0), max(high, 0.0)


def see_ranges(
    opened: Opened, names: Collection[str], inputs: Mapping[str, Array], batch: int
) -> dict[str, TensorRange]:
    """The ranges of the tensors called *names*, on samples; *opened* has the prepared graph."""
    made = [name for name in names if name not in inputs]
    session = session_for(opened, made)
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for given in batches(inputs, batch, opened.fixed_batch):
        tensors = dict(zip(made, run_on(opened, session, made, given), strict=True)) | given
        for name, ends in seen.items():
            ends.append(_ends(opened, name, tensors[name]))
    return {name: _range(ends) for name, ends in seen.items()}


def _ends(opened: Opened, name: str, values: Array) -> tuple[float, float]:
    low, high = float(values.min(initial=0.0)), float(values.max(initial=0.0))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise TuneError(f"{opened.path}: tensor {name!r} holds NaN or infinity; take the samples out that do it")
    return low, high


def _range(ends: list[tuple[float, float]]) -> TensorRange:
    lows, highs = zip(*ends, strict=True)
    return TensorRange(min(lows), max(highs), sum(lows) / len(lows), sum(highs) / len(highs))
