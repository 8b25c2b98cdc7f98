"""What was measured of models alone and in pairs on a GPU, the constants fitted to it, and that GPU as a device.

The numbers lie in ``data/h200.json``, with where they come from. ``fitted`` finds the constants of ``Contention`` that
meet the pairs best; ``left_out`` tells how far off each pair is if it is not among those they are fitted to.
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
"""What passes until a lane that had nothing left begins the next segment: measured in one process, by how long the GPU
was idle."""
SEGMENT_MS = 0.25
"""How long segments of a model on the simulated GPU take, about, as they are cut by default on a real one."""
ROUNDS = 60
ENOUGH = 1e-7
"""What a round must gain, in squared logarithms, for another one."""
H200 = Path(__file__).parent / "data" / "h200.json"
STREAMS = ("streams", "a high", "b high")
"""Ways to run a pair on the whole GPU; others are two sides of a cut."""
_FITTED = tuple(Contention.model_fields)


class AloneModel(BaseModel, extra="forbid", frozen=True):
    """A model alone."""

    ms: Amount
    kernels: Annotated[int, Field(ge=1)]
    gb: Amount
    """What it reads and writes."""
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
    """What a copy reaches."""
    models: dict[str, AloneModel]
    pairs: tuple[MeasuredPair, ...]

    def like(self, model: str) -> GpuLikeness:
        """What a model is like."""
        found = self.models[model]
        memory = min(1.0, found.gb / (found.ms / 1e3) / self.gb_per_s)
        return GpuLikeness(speeds=found.speeds, kernel_us=found.ms * 1e3 / found.kernels, memory=memory)

    def cut(self, contention: Contention) -> GpuCuts:
        return GpuCuts(sms=self.sms, cuts=self.cuts, contention=contention)

    def predicted(self, pair: MeasuredPair, contention: Contention) -> list[float]:
        """The speeds of a pair by the model."""
        shares = self.cut(contention).shares([self.like(each) for each in pair.models])
        return shares.speeds((0, 1), _lanes(pair.how, shares))

    def device(self) -> Host:
        """The GPU with these models, in segments of about equal length, to simulate requests on."""
        models = {}
        for name, each in self.models.items():
            count = max(1, round(each.ms / SEGMENT_MS))
            times, segments = (each.ms / 1e3 / count,) * count, tuple(f"part {at}" for at in range(count))
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
    """A pair, and what a model says of it that it was not fitted to."""

    pair: MeasuredPair
    speeds: tuple[float, ...]

    @property
    def error(self) -> float:
        """How far off both speeds are, on average, as a part of the measured ones."""
        off = [abs(said / was - 1) for said, was in zip(self.speeds, self.pair.speeds, strict=True)]
        return sum(off) / len(off)


def gpus() -> tuple[str, ...]:
    """The names of simulated GPUs."""
    return (H200.stem,)


def read_pairs(path: str | Path = H200) -> GpuPairs:
    """What was measured, from a file; of the H200 where none is named."""
    try:
        return GpuPairs.model_validate(read_json(path, DeviceError))
    except ValidationError as error:
        raise DeviceError(f"{path}: {first_problem(error, GpuPairs, AloneModel, MeasuredPair)}") from error


def fitted(measured: GpuPairs, pairs: Sequence[MeasuredPair] | None = None) -> Contention:
    """The constants with which the logarithms of all speeds are met best (Levenberg and Marquardt's way)."""
    known = measured.pairs if pairs is None else pairs
    now, damping = np.array([getattr(Contention(), name) for name in _FITTED]), 1e-2
    off = _off(measured, known, now)
    for _ in range(ROUNDS):
        steps = np.eye(len(now)) * 1e-5
        slopes = np.array([(_off(measured, known, now + step) - off) / 1e-5 for step in steps]).T
        push = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(now)), -slopes.T @ off)
        there = np.maximum(0.0, now + push)
        off_there = _off(measured, known, there)
        gained = (off**2).sum() - (off_there**2).sum()
        if gained <= 0:
            damping *= 4
            continue
        now, off, damping = there, off_there, damping / 3
        if gained < ENOUGH:
            break
    return _constants(now)


def left_out(measured: GpuPairs) -> list[PairError]:
    """Every pair, by constants fitted to those without its two models together, however they shared."""
    found = []
    for models in dict.fromkeys(pair.models for pair in measured.pairs):
        others = fitted(measured, [pair for pair in measured.pairs if pair.models != models])
        own = [pair for pair in measured.pairs if pair.models == models]
        found += [PairError(pair, tuple(measured.predicted(pair, others))) for pair in own]
    return found


def _constants(values: Floats) -> Contention:
    return Contention(**{name: round(float(value), 4) for name, value in zip(_FITTED, values, strict=True)})


def _off(measured: GpuPairs, pairs: Sequence[MeasuredPair], values: Floats) -> Floats:
    constants = Contention(**dict(zip(_FITTED, map(float, values), strict=True)))
    said = [speed for pair in pairs for speed in measured.predicted(pair, constants)]
    was = [speed for pair in pairs for speed in pair.speeds]
    found: Floats = np.log(np.maximum(1e-3, np.array(said))) - np.log(np.array(was))
    return found


def _lanes(how: str, shares: Shares) -> tuple[int, int]:
    """The lanes that a pair was on."""
    first, second = shares.whole[:2]
    if how in STREAMS:
        return {"streams": (first, second), "a high": (shares.high, second), "b high": (first, shares.high)}[how]
    one, two = (int(each) for each in how.split("+"))
    for sides in shares.cuts:
        for a, b in (sides, sides[::-1]):
            if (shares.lanes[a].sms, shares.lanes[b].sms) == (one, two):
                return a, b
    raise DeviceError(f"how = {how!r} is neither {', '.join(STREAMS)} nor one of the cuts")
