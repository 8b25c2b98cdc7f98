"""Generated traffic of many models, with skewed popularity, bursts, and rates that follow a daily wave.

Popularity follows Zipf's law, the gaps between requests for a model a Gamma distribution with a given coefficient of
variation, and all rates together a wave over the day and surges. Gaps are drawn in *even time*, in which all rates are
constant, and then mapped to the day: an hour with twice the rates has twice the even time.

``fit`` fits the parameters to a recorded trace. Zipf's exponent is the likeliest for the callers' numbers of requests;
the wave is the daily sine with the least squares distance from the flow of all requests; the coefficient of variation
is that of the median caller, in even time. If only counts are known, it follows from their variance: over long windows
that is the mean times the square of the coefficient, as for every renewal process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import hypot, tau
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from weft.base import tomlfile
from weft.base.errors import WorkloadError
from weft.base.jsonfile import first_problem
from weft_cluster.routing.traces import CallerTrace, CountedTrace, TimedTrace, grouped

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BLOCK = 1 << 20
"""Requests drawn at a time, about: 16 MiB of times and model numbers. Other sizes give other requests."""
KNOTS = 256
"""Instants of a block between which rates are taken as constant; times of day are interpolated between them."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]

DAY_S = 86400.0
"""Length of a wave."""
WAVE_WINDOWS = 96
"""Windows (of 15 minutes) that a day is cut into to fit its wave."""
DEEPEST_WAVE = 0.99
"""Largest wave: at 1 rates would reach 0, and times of day could not be computed from even time."""
STEEPEST = 20.0
"""Largest exponent of Zipf's law that is tried; there the second model is requested a million times less often."""
FEWEST_GAPS = 20
"""Fewest gaps, or requests in a window, for estimating a caller's coefficient of variation."""
MOST_GENERATED = 4_000_000
"""Requests up to which traffic is generated to be compared with the trace; more would take long."""


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
    """Time of the first peak, from the start on."""
    day_s: Positive = 86400.0
    surge: tuple[Surge, ...] = ()

    def passed(self, times_s: Floats) -> Floats:
        """Convert instants of the day, in seconds, to even time, in which all rates are constant."""
        passed = self._integrate_wave(times_s)
        for surge in self.surge:
            begin, end = surge.start_s, surge.start_s + surge.length_s
            within = self._integrate_wave(np.clip(times_s, begin, end)) - self._integrate_wave(np.array([begin]))
            passed = passed + (surge.factor - 1) * within
        return passed

    def _integrate_wave(self, times_s: Floats) -> Floats:
        """Return the even time at instants of the day, surges left out: the integral of the wave."""
        turn = tau / self.day_s
        risen = np.sin(turn * (times_s - self.peak_s)) + np.sin(turn * self.peak_s)
        return np.asarray(times_s + self.wave / turn * risen)

    def instants(self, passed: Floats, begin: float, end: float, duration_s: float) -> Floats:
        """Convert even times, all between *begin* and *end*, to instants of the day, by interpolation."""
        if not self.wave and not self.surge:
            return passed
        first, last = self._instant(begin, duration_s), self._instant(end, duration_s)
        edges = [edge for surge in self.surge for edge in (surge.start_s, surge.start_s + surge.length_s)]
        knots = np.unique([*np.linspace(first, last, KNOTS), *(edge for edge in edges if first < edge < last)])
        return np.asarray(np.interp(passed, self.passed(knots), knots))

    def _instant(self, passed: float, duration_s: float) -> float:
        """Return the instant of the day at the even time *passed*, by bisection."""
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
        """Yield blocks of all requests until *duration_s*."""
        return generated(self.rates, np.full(self.models, self.cv), self, duration_s, seed)


def generated(rates: Floats, cv: Floats, day: Day, duration_s: float, seed: int) -> Iterator[RequestBlock]:
    """Blocks of all requests until *duration_s* for models with these rates and coefficients of variation.

    Gaps are drawn in even time, in which rates are constant, and then laid out over the day.
    """
    rng, shape = np.random.default_rng(seed), cv**-2.0  # shape and scale of each model's Gamma distribution
    scale = 1 / (rates * shape)
    # A run begins at a random point of a gap, and more likely of a long one: Gamma weighted by length has shape + 1.
    upcoming = rng.gamma(shape + 1, 1.0) * scale * rng.random(len(rates))  # the next arrival of each model
    even_duration = float(day.passed(np.array([duration_s]))[0])
    block_count = max(1, round(even_duration * float(rates.sum()) / BLOCK))
    for block in range(block_count):
        begin, end = even_duration * block / block_count, even_duration * (block + 1) / block_count
        passed, model = _draw_arrivals(rng, upcoming, scale, shape, end)
        times = day.instants(passed, begin, end, duration_s)
        order = np.argsort(times, kind="stable")
        yield RequestBlock(times[order], model[order])


def _draw_arrivals(
    rng: np.random.Generator, upcoming: Floats, scale: Floats, shape: Floats, end: float
) -> tuple[Floats, Ints]:
    """Return the even times and models of all arrivals before *end*, not sorted.

    By model: *upcoming*, its next arrival, which is moved to the first one from *end* on in place; *scale*, *shape* of
    its gaps.
    """
    times: list[Floats] = []
    models: list[Ints] = []
    active = np.flatnonzero(upcoming < end)
    while len(active):
        # As many gaps as a model needs with high probability, for all models at once; models that need more stay
        # active.
        expected = (end - upcoming[active]) / (scale[active] * shape[active])
        count = (expected + 2 * np.sqrt(expected / shape[active]) + 4).astype(np.int64)
        # From here on, arrays over all gaps, model after model; *last*: index of each model's last gap.
        model, last = np.repeat(active, count), np.cumsum(count) - 1
        gap_sums = np.cumsum(rng.gamma(shape[model]) * scale[model])
        before = np.concatenate([[0.0], gap_sums[last[:-1]]])  # the sum of all gaps of earlier models
        arrivals = gap_sums + np.repeat(upcoming[active] - before, count)
        inside = np.add.reduceat(arrivals < end, last - count + 1)
        kept = np.minimum(inside, count - 1)  # if all are before the end, the last one becomes the next arrival
        is_kept = np.arange(len(model)) - np.repeat(last - count + 1, count) < np.repeat(kept, count)
        times += [upcoming[active], arrivals[is_kept]]
        models += [active, model[is_kept]]
        upcoming[active] = arrivals[last - count + 1 + kept]
        active = active[upcoming[active] < end]
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


class FitFigure(NamedTuple):
    """A figure of the trace, and the same figure of the fitted traffic."""

    what: str
    """Name of the figure."""
    trace: float
    traffic: float


@dataclass(frozen=True, slots=True)
class TrafficFit:
    """The fitted traffic, and its similarity to the trace."""

    traffic: Traffic
    likeness: tuple[FitFigure, ...]
    unknown: tuple[str, ...]
    """Parameters that the trace does not determine, with the values assumed."""


def fit(trace: CallerTrace, seed: int = 0) -> TrafficFit:
    """Fit the parameters of traffic to *trace*; *seed*: of the traffic that is generated to compare the two."""
    requests = trace.requests()
    requests = np.sort(requests[requests > 0])[::-1]
    if not len(requests) or requests.sum() < 2 or trace.span_s <= 0:
        raise WorkloadError(f"{trace}: too few requests to fit anything to")
    unknown = []
    wave, peak_s = _fit_wave(trace)
    if trace.span_s < DAY_S:
        unknown.append(f"the wave of a day: the trace is {trace.span_s / 3600:.2g} h long; taken to be flat")
    if len(requests) == 1:
        unknown.append("who is asked for how often: the trace has one caller; zipf = 0")
    wave_only = Traffic(rate=1.0, models=len(requests), zipf=_fit_zipf(requests), wave=wave, peak_s=peak_s)
    rate = float(requests.sum()) / float(wave_only.passed(np.array([trace.span_s]))[0])
    cv = _fit_variation(trace, wave_only)
    if cv is None:
        unknown.append(f"how gaps vary: no caller has {FEWEST_GAPS} requests and more; cv = 1")
    traffic = wave_only.model_copy(update={"rate": rate, "cv": 1.0 if cv is None else cv})
    return TrafficFit(traffic, tuple(_similarity(trace, requests, traffic, seed)), tuple(unknown))


def _fit_zipf(requests: Ints) -> float:
    """Return the maximum-likelihood exponent of Zipf's law for numbers of requests in descending order.

    There the expected logarithm of the rank equals the observed one. The expected one falls with the exponent, so
    bisection finds it.
    """
    ranks = np.log(np.arange(1, len(requests) + 1, dtype=np.float64))
    mean = float((requests * ranks).sum() / requests.sum())

    def expected(exponent: float) -> float:
        weights = np.exp(-exponent * ranks)
        return float((weights * ranks).sum() / weights.sum())

    low, high = 0.0, STEEPEST
    if expected(low) <= mean:
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle) > mean else (low, middle)
    return round(high, 6)


def _fit_wave(trace: CallerTrace) -> tuple[float, float]:
    """Return height and peak time (s) of the sine nearest to the flow by least squares; (0, 0) for less than a day."""
    if trace.span_s < DAY_S:
        return 0.0, 0.0
    window_s = DAY_S / WAVE_WINDOWS
    flow = trace.flow(window_s).astype(np.float64)
    angle = tau * (np.arange(len(flow)) + 0.5) * window_s / DAY_S
    mean, cosine, sine = np.linalg.lstsq(
        np.column_stack([np.ones_like(angle), np.cos(angle), np.sin(angle)]), flow, rcond=None
    )[0]
    height = min(DEEPEST_WAVE, hypot(cosine, sine) / mean)
    return round(float(height), 6), round(float(np.arctan2(sine, cosine) % tau) / tau * DAY_S, 3)


def _fit_variation(trace: CallerTrace, wave: Traffic) -> float | None:
    """Median over the callers of the coefficient of variation of their gaps; None if no caller has enough.

    wave: the fitted wave, which defines even time.
    """
    variations = (
        _variations_of_gaps(trace, wave) if isinstance(trace, TimedTrace) else _variations_of_counts(trace, wave)
    )
    return round(float(np.clip(np.median(variations), 1e-3, 100)), 6) if variations else None


def _variations_of_gaps(trace: TimedTrace, wave: Traffic) -> list[float]:
    """The coefficient of variation of the gaps, in even time, of each caller that has FEWEST_GAPS."""
    passed = wave.passed(trace.times_s)
    order = np.argsort(trace.caller, kind="stable")
    variations = []
    for arrivals in np.split(passed[order], np.cumsum(trace.requests())[:-1]):
        gaps = np.diff(arrivals)
        if len(gaps) >= FEWEST_GAPS and gaps.mean() > 0:
            variations.append(float(gaps.std() / gaps.mean()))
    return variations


def _variations_of_counts(trace: CountedTrace, wave: Traffic) -> list[float]:
    """Return the coefficient of variation of each caller's gaps, from the variance of counts in windows.

    Windows are long enough for FEWEST_GAPS requests; callers with fewer than FEWEST_GAPS windows are left out.
    """
    edges = wave.passed(np.arange(trace.counts.shape[1] + 1) * trace.window_s)
    even_lengths = np.diff(edges) / trace.window_s
    variations = []
    for counts in trace.counts[trace.counts.sum(axis=1) >= FEWEST_GAPS**2]:
        size = max(1, int(np.ceil(FEWEST_GAPS / counts.mean())))
        if len(counts) // size < FEWEST_GAPS:
            continue
        group_counts = grouped(counts, size)
        # Counts at a constant rate in even time: windows have different lengths there.
        expected = _group_sums(even_lengths, size) * group_counts.sum() / _group_sums(even_lengths, size).sum()
        variations.append(float(np.sqrt(np.mean((group_counts - expected) ** 2 / expected))))
    return variations


def _group_sums(values: Floats, size: int) -> Floats:
    """Sums of groups of *size* neighbours; an incomplete group at the end is left out."""
    used_length = len(values) // size * size
    return np.asarray(values[:used_length].reshape(-1, size).sum(axis=1))


def _similarity(trace: CallerTrace, requests: Ints, traffic: Traffic, seed: int) -> list[FitFigure]:
    """Shares of the top callers and peaks of the flow, of the trace and of generated traffic."""
    rates, shares = traffic.rates, []
    for part in (0.01, 0.1):
        top = max(1, round(part * len(requests)))
        if len(requests) * part >= 1:
            of_trace = float(requests[:top].sum() / requests.sum())
            shares.append(
                FitFigure(f"share of the top {part:.0%} of callers", of_trace, float(rates[:top].sum() / traffic.rate))
            )
    if requests.sum() > MOST_GENERATED:
        return shares
    blocks = list(traffic.requests(trace.span_s, seed))
    generated = TimedTrace(
        tuple(map(str, range(traffic.models))),
        np.concatenate([block.times_s for block in blocks]),
        np.concatenate([block.model for block in blocks]),
        trace.span_s,
    )
    shortest_window = trace.window_s if isinstance(trace, CountedTrace) else 0.0
    flows = [
        (window, trace.flow(window), generated.flow(window))
        for window in (1.0, 60.0, 3600.0)
        if window >= shortest_window
    ]
    return shares + [
        FitFigure(
            f"busiest {window:g} s over the mean",
            float(recorded.max() / recorded.mean()),
            float(synthetic.max() / synthetic.mean()),
        )
        for window, recorded, synthetic in flows
        if len(recorded) >= 2 and recorded.sum() and synthetic.sum()
    ]
