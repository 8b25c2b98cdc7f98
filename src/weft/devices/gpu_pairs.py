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
"""How long segments of a model on the simulated GPU take, about, as they are cut by default on a real one."""
ROUNDS = 60
"""Most rounds of the fit; it converges in about 20, and each costs a prediction of all pairs per constant."""
ENOUGH = 1e-7
"""Least gain of a round, in squared logarithms, for another one."""
H200 = Path(__file__).parent / "data" / "h200.json"
STREAMS = ("streams", "a high", "b high")
"""Ways to run a pair on the whole GPU; others are two sides of a cut."""
_FITTED = tuple(Contention.model_fields)


class AloneModel(BaseModel, extra="forbid", frozen=True):
    """A model alone."""

    ms: Amount
    kernels: Annotated[int, Field(ge=1)]
    gb: Amount
    """Gigabytes that it reads and writes."""
    speeds: dict[int, Annotated[float, Field(gt=0, le=4)]]
    estimated: tuple[int, ...] = ()
    """The shares of which the speed was not measured."""


class MeasuredPair(BaseModel, extra="forbid", frozen=True):
    """Two models that both had endless work."""

    models: tuple[str, str]
    how: str
    """On ``streams``, with one of them on a stream of high priority, or on the sides of a cut, as ``84+48``."""
    speeds: tuple[float, float]
    """Their rates over their rates alone on the whole GPU."""


class GpuPairs(BaseModel, extra="forbid", frozen=True):
    """All that was measured. The field names are the keys of the file."""

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
        """The likeness of a model, from what was measured of it alone."""
        alone = self.models[model]
        memory = min(1.0, alone.gb / (alone.ms / 1e3) / self.gb_per_s)
        return GpuLikeness(speeds=alone.speeds, kernel_us=alone.ms * 1e3 / alone.kernels, memory=memory)

    def cut(self, contention: Contention) -> GpuCuts:
        """How the GPU can be shared, by a model of contention."""
        return GpuCuts(sms=self.sms, cuts=self.cuts, contention=contention)

    def predicted(self, pair: MeasuredPair, contention: Contention) -> list[float]:
        """The speeds of a pair by the model."""
        shares = self.cut(contention).shares([self.like(model) for model in pair.models])
        return shares.speeds((0, 1), _lanes(pair.how, shares))

    def device(self) -> Host:
        """The GPU with these models, in segments of about equal length, to simulate requests on."""
        models = {}
        for name, alone in self.models.items():
            count = max(1, round(alone.ms / SEGMENT_MS))
            times, segments = (alone.ms / 1e3 / count,) * count, tuple(f"part {at}" for at in range(count))
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
    """A pair, and the speeds that a model predicts which was not fitted to it."""

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
    """Read measurements from a file; those of the H200 where none is named."""
    try:
        return GpuPairs.model_validate(read_json(path, DeviceError))
    except ValidationError as error:
        raise DeviceError(f"{path}: {first_problem(error, GpuPairs, AloneModel, MeasuredPair)}") from error


def fitted(measured: GpuPairs, pairs: Sequence[MeasuredPair] | None = None) -> Contention:
    """The constants with the least squared error of the logarithms of all speeds, by Levenberg and Marquardt's method.

    Logarithms, so that half as fast and twice as fast are errors of the same size.
    """
    known = measured.pairs if pairs is None else pairs
    now, damping = np.array([getattr(Contention(), name) for name in _FITTED]), 1e-2
    off = _residuals(measured, known, now)
    for _ in range(ROUNDS):
        steps = np.eye(len(now)) * 1e-5
        slopes = np.array([(_residuals(measured, known, now + step) - off) / 1e-5 for step in steps]).T
        push = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(now)), -slopes.T @ off)
        there = np.maximum(0.0, now + push)
        off_there = _residuals(measured, known, there)
        gained = (off**2).sum() - (off_there**2).sum()
        if gained <= 0:  # the step went too far: damp it, towards the gradient
            damping *= 4
            continue
        now, off, damping = there, off_there, damping / 3
        if gained < ENOUGH:
            break
    return _constants(now)


def left_out(measured: GpuPairs) -> list[PairError]:
    """Every pair, predicted with constants fitted without all pairs of the same two models (cross-validation)."""
    errors = []
    for models in dict.fromkeys(pair.models for pair in measured.pairs):
        others = fitted(measured, [pair for pair in measured.pairs if pair.models != models])
        held_out = [pair for pair in measured.pairs if pair.models == models]
        errors += [PairError(pair, tuple(measured.predicted(pair, others))) for pair in held_out]
    return errors


def _constants(values: Floats) -> Contention:
    return Contention(**{name: round(float(value), 4) for name, value in zip(_FITTED, values, strict=True)})


def _residuals(measured: GpuPairs, pairs: Sequence[MeasuredPair], values: Floats) -> Floats:
    """Logarithms of predicted speeds over measured ones; rounding of constants comes after the fit."""
    constants = Contention(**dict(zip(_FITTED, map(float, values), strict=True)))
    predicted = [speed for pair in pairs for speed in measured.predicted(pair, constants)]
    speeds = [speed for pair in pairs for speed in pair.speeds]
    residuals: Floats = np.log(np.maximum(1e-3, np.array(predicted))) - np.log(np.array(speeds))
    return residuals


def _lanes(how: str, shares: Shares) -> tuple[int, int]:
    """The lanes that a pair was on."""
    first, second = shares.whole[:2]
    if how in STREAMS:
        return {"streams": (first, second), "a high": (shares.high, second), "b high": (first, shares.high)}[how]
    one, two = (int(sms) for sms in how.split("+"))
    for sides in shares.cuts:
        for a, b in (sides, sides[::-1]):
            if (shares.lanes[a].sms, shares.lanes[b].sms) == (one, two):
                return a, b
    raise DeviceError(f"how = {how!r} is neither {', '.join(STREAMS)} nor one of the cuts")
