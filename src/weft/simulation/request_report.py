"""The report of a run of requests: violations, percentiles, throughput and goodput.

Latencies are counted in bins of 0.2 %, so that a report takes the same memory for a thousand requests
as for a billion; violations are counted exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.kernels import request_state as k
from weft.reports.pictures import Shown
from weft.reports.tables import largest_of

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

PERCENTILES = (50.0, 90.0, 99.0, 99.9)
"""Percentiles of latency in reports."""


@dataclass(frozen=True, slots=True)
class RequestStream:
    """One stream's requests, warm-up left out. Times in seconds."""

    model: str
    deadline_s: float
    offered_per_s: float
    arrived: int
    completed: int
    dropped: int
    """Number of accepted requests that were given up because they were late."""
    refused: int
    """Number of requests that were not accepted."""
    violated: int
    """Number of requests that were late, dropped or refused."""
    violation_rate: float
    mean_batch: float
    deepest_queue: int
    mean_latency_s: float | None
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None
    p999_s: float | None
    max_latency_s: float | None
    cdf_s: tuple[float, ...]
    """Latency that 1 %, 2 %, ... 100 % of the completed requests do not exceed; empty if none completed."""
    p99_max_of: int | None = None
    """The number of completed requests if they are fewer than 100, so that p99 is their largest latency; else None."""

    def __repr__(self) -> str:
        return f"RequestStream({self.model}: {self.arrived} arrived, {self.violation_rate:.2%} late)"


@dataclass(frozen=True, slots=True)
class RequestReport(Shown):
    """A run of requests. The field names are the keys of the JSON (docs/formats.md)."""

    device: str
    policy: str
    late: str
    stp: float
    """Summed standalone times of the completed requests, per unit of time."""
    goodput_stp: float
    """The same of the requests completed in time."""
    offered_stp: float
    """The same of the requests that arrived."""
    violation_rate: float
    worst_violation_rate: float
    """The largest violation rate of a stream."""
    pe_utilisation: float
    dram_utilisation: float
    makespan_s: float
    decisions: int
    streams: tuple[RequestStream, ...]
    load: float | None = None
    """Share of the lanes' time in which they compute; None on devices other than hosts."""

    @property
    def worst_missed(self) -> float:
        """The largest share of deadlines that a stream misses; 1 if a stream sent no request to judge by."""
        return self.worst_violation_rate if all(stream.arrived for stream in self.streams) else 1.0

    def __repr__(self) -> str:
        return f"RequestReport({self.policy} on {self.device}: STP {self.stp:.3f}, {self.violation_rate:.2%} late)"

    def as_dict(self) -> dict[str, Any]:
        """Return the report as it is written to JSON, without the figures that the device does not have."""
        left_out = {"load"} if self.load is None else {"pe_utilisation", "dram_utilisation"}
        figures = {key: value for key, value in asdict(self).items() if key not in left_out}
        return {"format": 1, **figures, "streams": [asdict(stream) for stream in self.streams]}


@cache
def bin_edges() -> Ints:
    """Return the smallest latency of every bin of ``request_state.bin_of``, in ticks."""
    index = np.arange(k.BINS, dtype=np.int64)
    shift = np.maximum((index >> k.MANTISSA_BITS) - 1, 0)  # inverse of ``bin_of``; edges beyond 62 bits are not reached
    edges: Ints = (index - (shift << k.MANTISSA_BITS)) << np.minimum(shift, 52)
    return edges


def percentiles(histogram: Ints, percents: Sequence[float], largest: int) -> list[int]:
    """Return the latencies in ticks that *percents* percent of the requests do not exceed: the upper edges of bins.

    histogram: requests by bin of ``bin_of``. largest: the largest latency, which caps the result.
    """
    used_bins = np.flatnonzero(histogram)
    cumulative = np.cumsum(histogram[used_bins])
    places = np.searchsorted(cumulative, np.ceil(cumulative[-1] * np.asarray(percents) / 100))
    latencies: list[int] = np.minimum(bin_edges()[used_bins[places] + 1], largest).tolist()
    return latencies


def cdf(histogram: Ints, tick_s: float) -> tuple[Floats, Floats]:
    """Return latencies in seconds, ascending, and the share of requests that do not exceed each of them."""
    used_bins = np.flatnonzero(histogram)
    shares: Floats = np.cumsum(histogram[used_bins]) / max(1, int(histogram.sum()))
    return (bin_edges()[used_bins + 1] * tick_s).astype(np.float64), shares


def stream_report(
    model: str, counts: Sequence[int], histogram: Ints, *, deadline_s: float, tick_s: float, span_s: float
) -> RequestStream:
    """Compute the report of a stream from its counters (``request_state.ARRIVED`` to ``QUERIES``) and latencies.

    histogram: requests by bin of ``bin_of``. tick_s: seconds of a tick. span_s: the seconds in which its requests
    arrived.
    """
    arrived, completed, violated = counts[k.ARRIVED], counts[k.COMPLETED], counts[k.VIOLATED]
    ticks = percentiles(histogram, (*PERCENTILES, *range(1, 101)), counts[k.LATENCY_MAX]) if completed else []
    latencies_s = [latency * tick_s for latency in ticks]
    tail: Sequence[float | None] = latencies_s[: len(PERCENTILES)] or [None] * len(PERCENTILES)
    p50_s, p90_s, p99_s, p999_s = tail
    return RequestStream(
        model=model,
        deadline_s=deadline_s,
        offered_per_s=arrived / span_s,
        arrived=arrived,
        completed=completed,
        dropped=counts[k.DROPPED],
        refused=counts[k.REFUSED],
        violated=violated,
        violation_rate=violated / arrived if arrived else 0.0,
        mean_batch=completed / counts[k.BATCHES] if counts[k.BATCHES] else 0.0,
        deepest_queue=counts[k.DEEPEST],
        mean_latency_s=counts[k.LATENCY_SUM] * tick_s / completed if completed else None,
        p50_s=p50_s,
        p90_s=p90_s,
        p99_s=p99_s,
        p999_s=p999_s,
        max_latency_s=counts[k.LATENCY_MAX] * tick_s if completed else None,
        cdf_s=tuple(latencies_s[len(PERCENTILES) :]),
        p99_max_of=largest_of(completed),
    )
