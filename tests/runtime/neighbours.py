"""Whether neighbours in a batch can move a row: samples that are computed together, compared bit by bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tests.runtime.special_models import MOODS, Special
from weft.runtime.backend import BatchPart, Step
from weft.runtime.onnxruntime_cpu.model import CpuModel

CALM = ("plain", "zero", "negative", "tiny")
"""Moods in which a row's own sums do not overflow, so that it gives alone what it gives in a batch."""

Row = Mapping[str, np.ndarray]


def together(model: CpuModel, samples: Sequence[Row]) -> list[dict[str, np.ndarray]]:
    """What requests of one row each get that the backend joins."""
    parts = [BatchPart(dict(each)) for each in samples]
    for segment in range(len(model.segments)):
        (made,) = model.compute(Step(segment, parts, len(samples)))
        parts = [BatchPart(made.values)]
    if len(samples) == 1:
        return [made.answers]
    return [{name: each[row : row + 1] for name, each in made.answers.items()} for row in range(len(samples))]


def same_bits(one: Row, other: Row) -> bool:
    return all(
        each.shape == other[name].shape
        and (np.array_equal(each, other[name]) if each.dtype == object else each.tobytes() == other[name].tobytes())
        for name, each in one.items()
    )


def deviation(alone: Row, got: Row) -> float:
    """The largest difference of floats of 32 bits, as a part of their largest value; infinite where others differ."""
    return max((_deviation(each, got[name]) for name, each in alone.items()), default=0.0)


def _deviation(alone: Any, got: Any) -> float:
    if alone.shape != got.shape:
        return np.inf
    if alone.dtype.kind != "f":
        return 0.0 if np.array_equal(alone, got) else np.inf
    finite = np.isfinite(alone)
    if not np.array_equal(alone[~finite], got[~finite], equal_nan=True) or not np.isfinite(got[finite]).all():
        return np.inf
    if not finite.any() or alone.dtype != np.float32:
        return 0.0
    scale = max(float(np.abs(alone[finite]).max()), float(np.finfo(np.float32).tiny))
    return float(np.abs(alone[finite].astype(np.float64) - got[finite]).max()) / scale


def problems(model: CpuModel, special: Special, size: int, rng: np.random.Generator) -> Iterator[str]:
    """Rows of batches of a size that neighbours moved, or that are not what they are alone."""
    calm = [special.rows(model.inputs, 1, CALM[place % len(CALM)], rng) for place in range(size)]
    before = together(model, calm)
    for place, (row, sample) in enumerate(zip(before, calm, strict=True)):
        (alone,) = together(model, [sample])
        if not deviation(alone, row) <= 1e-5:
            yield f"row {place} is off by {deviation(alone, row):.1e}"
    for number, mood in enumerate(MOODS):
        place = number % size
        crowd = [special.rows(model.inputs, 1, mood, rng) for _ in range(size)]
        crowd[place] = calm[place]
        if not same_bits(before[place], together(model, crowd)[place]):
            yield f"row {place} was moved by neighbours that are {mood}"
