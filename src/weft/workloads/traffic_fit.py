"""Generated traffic fitted to a recorded trace (``fit``), and how similar the two are.

Zipf's exponent is the likeliest for the callers' numbers of requests; the wave is the sine of a day that comes nearest
to the flow of all requests; the coefficient of variation is that of the median caller, in a time in which the wave is
even. Where only counts are known, it comes from their variance: over long windows that is the mean times the square of
the coefficient, as for every renewal process.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot, tau
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.base.errors import WorkloadError
from weft.workloads.traces import CallerTrace, CountedTrace, TimedTrace, grouped
from weft.workloads.traffic import Traffic

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

DAY_S = 86400.0
"""Length of a wave."""
WAVE_WINDOWS = 96
"""Windows (of 15 minutes) that a day is cut into to fit its wave."""
DEEPEST_WAVE = 0.99
"""Largest wave: at 1 rates would reach 0, and times of day could not be computed from even time."""
STEEPEST = 20.0
"""Largest exponent of Zipf's law that is tried; there the second model is requested a million times less often."""
ENOUGH = 20
"""Fewest gaps, or requests in a window, from which a caller's coefficient of variation is estimated."""
MOST_GENERATED = 4_000_000
"""Requests up to which traffic is generated to be compared with the trace; more would take long."""


class FitFigure(NamedTuple):
    """A figure of the trace, and the same figure of the fitted traffic."""

    what: str
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
    wave, peak_s = _wave(trace)
    if trace.span_s < DAY_S:
        unknown.append(f"the wave of a day: the trace is {trace.span_s / 3600:.2g} h long; taken to be flat")
    if len(requests) == 1:
        unknown.append("who is asked for how often: the trace has one caller; zipf = 0")
    even = Traffic(rate=1.0, models=len(requests), zipf=_zipf(requests), wave=wave, peak_s=peak_s)
    rate = float(requests.sum()) / float(even.passed(np.array([trace.span_s]))[0])
    cv = _variation(trace, even)
    if cv is None:
        unknown.append(f"how gaps vary: no caller has {ENOUGH} requests and more; cv = 1")
    traffic = even.model_copy(update={"rate": rate, "cv": 1.0 if cv is None else cv})
    return TrafficFit(traffic, tuple(_similarity(trace, requests, traffic, seed)), tuple(unknown))


def _zipf(requests: Ints) -> float:
    """The maximum-likelihood exponent for numbers of requests in descending order.

    There the expected logarithm of the rank equals the observed one; it falls with the exponent, so bisection finds it.
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


def _wave(trace: CallerTrace) -> tuple[float, float]:
    """Height and peak of the sine with the least squared distance from the flow; (0, 0) for less than a day."""
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


def _variation(trace: CallerTrace, even: Traffic) -> float | None:
    """The coefficient of variation of the median caller's gaps; None where no caller has enough of them."""
    variations = _of_gaps(trace, even) if isinstance(trace, TimedTrace) else _of_counts(trace, even)
    return round(float(np.clip(np.median(variations), 1e-3, 100)), 6) if variations else None


def _of_gaps(trace: TimedTrace, even: Traffic) -> list[float]:
    """The coefficient of variation of each caller with ENOUGH gaps, in even time."""
    passed = even.passed(trace.times_s)
    order = np.argsort(trace.caller, kind="stable")
    variations = []
    for arrivals in np.split(passed[order], np.cumsum(trace.requests())[:-1]):
        gaps = np.diff(arrivals)
        if len(gaps) >= ENOUGH and gaps.mean() > 0:
            variations.append(float(gaps.std() / gaps.mean()))
    return variations


def _of_counts(trace: CountedTrace, even: Traffic) -> list[float]:
    """The same from counts in windows long enough for ENOUGH requests, of callers that fill ENOUGH windows."""
    edges = even.passed(np.arange(trace.counts.shape[1] + 1) * trace.window_s)
    lengths = np.diff(edges) / trace.window_s
    variations = []
    for counts in trace.counts[trace.counts.sum(axis=1) >= ENOUGH**2]:
        size = max(1, int(np.ceil(ENOUGH / counts.mean())))
        if len(counts) // size < ENOUGH:
            continue
        sums = grouped(counts, size)
        expected = _sums(lengths, size) * sums.sum() / _sums(lengths, size).sum()
        variations.append(float(np.sqrt(np.mean((sums - expected) ** 2 / expected))))
    return variations


def _sums(lengths: Floats, size: int) -> Floats:
    whole = len(lengths) // size * size
    return np.asarray(lengths[:whole].reshape(-1, size).sum(axis=1))


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
    least = trace.window_s if isinstance(trace, CountedTrace) else 0.0
    flows = [(window, trace.flow(window), generated.flow(window)) for window in (1.0, 60.0, 3600.0) if window >= least]
    return shares + [
        FitFigure(
            f"busiest {window:g} s over the mean", float(real.max() / real.mean()), float(ours.max() / ours.mean())
        )
        for window, real, ours in flows
        if len(real) >= 2 and real.sum() and ours.sum()
    ]
