"""Measurements of models alone and in pairs on a GPU, the constants fitted to them, and that GPU as a device.

The numbers are in ``data/h200.json``, with their source. ``fitted`` finds the constants of ``Contention`` that fit the
pairs best; ``left_out`` computes the error for each pair by constants that were fitted without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, ValidationError

from weft.base.errors import DeviceError
from weft.base.jsonfile import first_problem, read_json
from weft.devices.host import GpuCuts, Host, HostModel
from weft.devices.shares import Contention, GpuLikeness, Shares

Floats = npt.NDArray[np.float64]
Amount = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]

HAND_OVER_S = 1e-4
"""Time until a lane whose queue ran empty begins the next segment: the idle time of the GPU, measured in one process.
"""
SEGMENT_MS = 0.25
"""Approximate length of a model's segments on the simulated GPU, the default on a real GPU."""
ROUNDS = 60
"""Most rounds of the fit; it converges in about 20, and each costs a prediction of all pairs per constant."""
LEAST_REDUCTION = 1e-7
"""Least reduction of the error, in squared logarithms, for another round."""
H200 = Path(__file__).parent / "data" / "h200.json"
STREAMS = ("streams", "a high", "b high")
"""Values of ``MeasuredPair.how`` for a pair on the whole GPU; other values name the two sides of a cut."""
_FITTED = tuple(Contention.model_fields)


class AloneModel(BaseModel, extra="forbid", frozen=True):
    """Measurements of a model alone: time in ms, kernels, memory traffic, and speeds on shares of the GPU."""

    ms: Amount
    kernels: Annotated[int, Field(ge=1)]
    gb: Amount
    """Gigabytes of memory that a run reads and writes."""
    speeds: dict[int, Annotated[float, Field(gt=0, le=4)]]
    """Multiprocessors of a share -> speed there over that on the whole GPU."""
    estimated: tuple[int, ...] = ()
    """The shares of which the speed was not measured."""


class MeasuredPair(BaseModel, extra="forbid", frozen=True):
    """The speeds of two models that ran concurrently without pause."""

    models: tuple[str, str]
    how: str
    """One of ``STREAMS`` (``a high``: the first model has high priority), or the sides of a cut, such as ``84+48``."""
    speeds: tuple[float, float]
    """Their rates over their rates alone on the whole GPU."""


class GpuPairs(BaseModel, extra="forbid", frozen=True):
    """Measurements on one GPU. The field names are the keys of the file."""

    format: Literal[1] = 1
    kind: Literal["gpu-pairs"] = "gpu-pairs"
    name: str
    source: str
    sms: Annotated[int, Field(ge=1)]
    cuts: tuple[tuple[int, int], ...]
    gb_per_s: Amount
    """Bandwidth of a copy."""
    models: dict[str, AloneModel]
    pairs: tuple[MeasuredPair, ...]

    def like(self, model: str) -> GpuLikeness:
        """The likeness of a model, from its measurements alone."""
        alone = self.models[model]
        memory = min(1.0, alone.gb / (alone.ms / 1e3) / self.gb_per_s)
        return GpuLikeness(speeds=alone.speeds, kernel_us=alone.ms * 1e3 / alone.kernels, memory=memory)

    def cut(self, contention: Contention) -> GpuCuts:
        """How the GPU can be shared, with these constants of the contention model."""
        return GpuCuts(sms=self.sms, cuts=self.cuts, contention=contention)

    def predicted(self, pair: MeasuredPair, contention: Contention) -> list[float]:
        """The speeds of both models of a pair that the contention model predicts."""
        shares = self.cut(contention).shares([self.like(model) for model in pair.models])
        return shares.speeds((0, 1), _lanes(pair.how, shares))

    def device(self) -> Host:
        """The GPU with these models as a simulated device; each model is cut into equal segments."""
        models = {}
        for name, alone in self.models.items():
            count = max(1, round(alone.ms / SEGMENT_MS))
            times = (alone.ms / 1e3 / count,) * count
            segments = tuple(f"part {number}" for number in range(count))
            models[name] = HostModel(segments=segments, times_s={1: times}, like={1: self.like(name)})
        gpu = self.cut(Contention())
        return Host(
            name=self.name,
            source=self.source,
            cores=2,
            lanes=1,
            ahead=1,
            hand_over_s=(HAND_OVER_S,),
            gpu=gpu,
            models=models,
        )


class PairError(NamedTuple):
    """A pair, and the speeds predicted by a contention model that was fitted without this pair."""

    pair: MeasuredPair
    speeds: tuple[float, ...]

    @property
    def error(self) -> float:
        """Mean relative error of both speeds."""
        errors = [abs(predicted / speed - 1) for predicted, speed in zip(self.speeds, self.pair.speeds, strict=True)]
        return sum(errors) / len(errors)


def gpus() -> tuple[str, ...]:
    """The names of simulated GPUs."""
    return (H200.stem,)


def read_pairs(path: str | Path = H200) -> GpuPairs:
    """Read measurements from a file, by default those of the H200; raises DeviceError if the file is not valid."""
    try:
        return GpuPairs.model_validate(read_json(path, DeviceError))
    except ValidationError as error:
        raise DeviceError(f"{path}: {first_problem(error, GpuPairs, AloneModel, MeasuredPair)}") from error


def fitted(measured: GpuPairs, pairs: Sequence[MeasuredPair] | None = None) -> Contention:
    """Fit the constants to the logarithms of all speeds by least squares (Levenberg-Marquardt).

    pairs: the pairs to fit to, all by default. Logarithms make half as fast and twice as fast errors of the same size.
    """
    fitted_pairs = measured.pairs if pairs is None else pairs
    values, damping = np.array([getattr(Contention(), name) for name in _FITTED]), 1e-2
    residuals = _residuals(measured, fitted_pairs, values)
    for _ in range(ROUNDS):
        steps = np.eye(len(values)) * 1e-5
        jacobian = np.array(
            [(_residuals(measured, fitted_pairs, values + step) - residuals) / 1e-5 for step in steps]
        ).T
        damped_normal = jacobian.T @ jacobian + damping * np.eye(len(values))
        step = np.linalg.solve(damped_normal, -jacobian.T @ residuals)
        new_values = np.maximum(0.0, values + step)
        new_residuals = _residuals(measured, fitted_pairs, new_values)
        reduction = (residuals**2).sum() - (new_residuals**2).sum()
        if reduction <= 0:  # the step went too far: more damping makes it shorter and closer to the gradient
            damping *= 4
            continue
        values, residuals, damping = new_values, new_residuals, damping / 3
        if reduction < LEAST_REDUCTION:
            break
    return _constants(values)


def left_out(measured: GpuPairs) -> list[PairError]:
    """Cross-validation: predict each pair with constants that were fitted without any pair of the same two models."""
    errors = []
    for models in dict.fromkeys(pair.models for pair in measured.pairs):
        others = fitted(measured, [pair for pair in measured.pairs if pair.models != models])
        held_out = [pair for pair in measured.pairs if pair.models == models]
        errors += [PairError(pair, tuple(measured.predicted(pair, others))) for pair in held_out]
    return errors


def _constants(values: Floats) -> Contention:
    return Contention(**{name: round(float(value), 4) for name, value in zip(_FITTED, values, strict=True)})


def _residuals(measured: GpuPairs, pairs: Sequence[MeasuredPair], values: Floats) -> Floats:
    """Logarithms of predicted over measured speeds, for unrounded constants *values*."""
    constants = Contention(**dict(zip(_FITTED, map(float, values), strict=True)))
    predicted = [speed for pair in pairs for speed in measured.predicted(pair, constants)]
    speeds = [speed for pair in pairs for speed in pair.speeds]
    # At least 1e-3: the fit may try constants for which a speed is almost 0.
    residuals: Floats = np.log(np.maximum(1e-3, np.array(predicted))) - np.log(np.array(speeds))
    return residuals


def _lanes(how: str, shares: Shares) -> tuple[int, int]:
    """The lanes on which the two models of a pair ran, by ``MeasuredPair.how``; raises DeviceError if it is wrong."""
    first, second = shares.whole[:2]
    if how in STREAMS:
        return {"streams": (first, second), "a high": (shares.high, second), "b high": (first, shares.high)}[how]
    first_sms, second_sms = (int(sms) for sms in how.split("+"))
    for sides in shares.cuts:
        for first, second in (sides, sides[::-1]):
            if (shares.lanes[first].sms, shares.lanes[second].sms) == (first_sms, second_sms):
                return first, second
    raise DeviceError(f"how = {how!r} is neither {', '.join(STREAMS)} nor one of the cuts")
