"""Generated traffic of many models: some are requested far more often than others, in clusters, and days have waves.

Popularity follows Zipf's law, the gaps between requests for a model a Gamma distribution with a given coefficient of
variation, and all rates together a wave over the day and surges. Time runs faster where rates are higher: gaps are
drawn in a time in which all rates stay the same, and then laid out over the day.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import tau
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from weft.base import tomlfile
from weft.base.errors import WorkloadError
from weft.base.jsonfile import first_problem

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BLOCK = 1 << 20
"""Requests drawn at a time, about: 16 MiB of times and model numbers. Other sizes give other requests."""
KNOTS = 256
"""Instants of a block between which rates are taken as constant; times of day are interpolated between them."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Surge(BaseModel):
    """A time in which all rates are higher, or lower."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    start_s: NotNegative
    length_s: Positive
    factor: Positive


class RequestBlock(NamedTuple):
    """A block of requests in order."""

    times_s: Floats
    model: Ints


class Day(BaseModel):
    """How all rates rise and fall together over a day."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    wave: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """How far rates rise above their mean at the peak of a day, and fall below it half a day later."""
    peak_s: NotNegative = 0.0
    """When the peak comes, from the start on."""
    day_s: Positive = 86400.0
    surge: tuple[Surge, ...] = ()

    def passed(self, times_s: Floats) -> Floats:
        """Even time, in which all rates are constant, at instants of the day."""
        passed = self._waved(times_s)
        for surge in self.surge:
            begin, end = surge.start_s, surge.start_s + surge.length_s
            within = self._waved(np.clip(times_s, begin, end)) - self._waved(np.array([begin]))
            passed = passed + (surge.factor - 1) * within
        return passed

    def _waved(self, times_s: Floats) -> Floats:
        turn = tau / self.day_s
        risen = np.sin(turn * (times_s - self.peak_s)) + np.sin(turn * self.peak_s)
        return np.asarray(times_s + self.wave / turn * risen)

    def instants(self, passed: Floats, begin: float, end: float, duration_s: float) -> Floats:
        """Instants of the day for even times between *begin* and *end*."""
        if not self.wave and not self.surge:
            return passed
        first, last = self._instant(begin, duration_s), self._instant(end, duration_s)
        edges = [edge for surge in self.surge for edge in (surge.start_s, surge.start_s + surge.length_s)]
        knots = np.unique([*np.linspace(first, last, KNOTS), *(edge for edge in edges if first < edge < last)])
        return np.asarray(np.interp(passed, self.passed(knots), knots))

    def _instant(self, passed: float, duration_s: float) -> float:
        """The instant at which *passed* of even time has passed, by bisection."""
        low, high = 0.0, duration_s
        for _ in range(60):  # halves the span to below the resolution of a float
            middle = (low + high) / 2
            low, high = (middle, high) if self.passed(np.array([middle]))[0] < passed else (low, middle)
        return high


class Traffic(Day):
    """Requests for many models. The field names are the keys of the file (docs/formats.md)."""

    rate: Positive
    """Requests per second of all models together, on average over the day."""
    models: Annotated[int, Field(ge=1, le=10**7)]
    zipf: NotNegative = 1.0
    """The n-th most popular model is requested n to the power of this less often than the first; 0: all alike."""
    cv: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Coefficient of variation of the gaps between requests for a model; 1: they come independently of each other."""

    @property
    def rates(self) -> Floats:
        """Requests per second of each model, the most popular first."""
        weights = np.arange(1, self.models + 1, dtype=np.float64) ** -self.zipf
        return np.asarray(self.rate * weights / weights.sum())

    def requests(self, duration_s: float, seed: int = 0) -> Iterator[RequestBlock]:
        """Blocks of all requests until *duration_s*."""
        return generated(self.rates, np.full(self.models, self.cv), self, duration_s, seed)


def generated(rates: Floats, cv: Floats, day: Day, duration_s: float, seed: int) -> Iterator[RequestBlock]:
    """Blocks of all requests until *duration_s* for models with these rates and coefficients of variation.

    Gaps are drawn in even time, in which rates are constant, and then laid out over the day.
    """
    rng, shape = np.random.default_rng(seed), cv**-2.0
    scale = 1 / (rates * shape)
    # A run begins within a gap, and more likely within a long one: its length is drawn weighted by length.
    upcoming = rng.gamma(shape + 1, 1.0) * scale * rng.random(len(rates))
    whole = float(day.passed(np.array([duration_s]))[0])
    blocks = max(1, round(whole * float(rates.sum()) / BLOCK))
    for block in range(blocks):
        begin, end = whole * block / blocks, whole * (block + 1) / blocks
        passed, model = _draw_arrivals(rng, upcoming, scale, shape, end)
        times = day.instants(passed, begin, end, duration_s)
        order = np.argsort(times, kind="stable")
        yield RequestBlock(times[order], model[order])


def _draw_arrivals(
    rng: np.random.Generator, upcoming: Floats, scale: Floats, shape: Floats, end: float
) -> tuple[Floats, Ints]:
    """All arrivals before *end*, model by model; *upcoming*, the next one of each model, is moved past it in place."""
    times: list[Floats] = []
    models: list[Ints] = []
    going = np.flatnonzero(upcoming < end)
    while len(going):
        # As many gaps as a model needs with high probability, for all models at once; those that need more go on.
        expected = (end - upcoming[going]) / (scale[going] * shape[going])
        count = (expected + 2 * np.sqrt(expected / shape[going]) + 4).astype(np.int64)
        model, last = np.repeat(going, count), np.cumsum(count) - 1
        steps = np.cumsum(rng.gamma(shape[model]) * scale[model])
        base = np.concatenate([[0.0], steps[last[:-1]]])
        follow = steps + np.repeat(upcoming[going] - base, count)
        inside = np.add.reduceat(follow < end, last - count + 1)
        kept = np.minimum(inside, count - 1)  # where all are inside, the last is the one to go on from
        taken = np.arange(len(model)) - np.repeat(last - count + 1, count) < np.repeat(kept, count)
        times += [upcoming[going], follow[taken]]
        models += [going, model[taken]]
        upcoming[going] = follow[last - count + 1 + kept]
        going = going[upcoming[going] < end]
    if not times:
        return np.empty(0), np.empty(0, np.int64)
    return np.concatenate(times), np.concatenate(models)


def read_traffic(path: str | Path) -> Traffic:
    """Read the traffic that a TOML file describes; every value is checked."""
    raw = tomlfile.read_toml(path, WorkloadError, "traffic")
    try:
        return Traffic.model_validate(raw)
    except ValidationError as error:
        raise WorkloadError(f"{path}: {first_problem(error, Traffic, Surge)}") from error


def as_toml(traffic: Traffic) -> str:
    """A TOML file that ``read_traffic`` reads as *traffic*."""
    return tomlfile.as_toml(traffic.model_dump())
