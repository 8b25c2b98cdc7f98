"""The report of a trace: throughput, slowdown, utilisation, and how close the throughput is to the bound.

System throughput (STP) counts a query as its standalone time. An unfinished query counts in part, by the dual prices of
the bound's linear programme (``engine.policies.bound``), so that no trace exceeds its bound. A query of a saturated
stream is dispatched when its predecessor completes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from weft.devices.costs.program import Clock, Program
from weft.engine.policies.base import Setting
from weft.engine.policies.bound import Prices, QueryDemand, demand_of, mix_prices, prices
from weft.engine.policies.fairness import ROUND, Band
from weft.reports.pictures import Shown
from weft.reports.trace import Trace


@dataclass(frozen=True, slots=True)
class StreamReport:
    """One stream's queries."""

    model: str
    queries: int
    """The number of completed queries."""
    progress: float
    """Completed queries, plus the finished share of the query in flight."""
    standalone_s: float
    """Time per query when the model has the device to itself, back to back."""
    mean_latency_s: float | None
    """None if no query completed."""
    max_latency_s: float | None
    slowdown: float | None
    """Mean latency over standalone time."""

    def __repr__(self) -> str:
        return f"StreamReport({self.model}: {self.queries} queries)"


@dataclass(frozen=True, slots=True)
class Report(Shown):
    """The result of a run of saturated streams. The field names are the keys of the JSON (docs/formats.md)."""

    device: str
    policy: str
    stp: float
    """System throughput: the summed standalone times of the queries, per unit of time."""
    bound_stp: float
    fraction_of_bound: float
    antt: float | None
    """Average normalised turnaround time: the mean of the streams' slowdowns; None if a stream completed no query."""
    max_slowdown: float | None
    pe_utilisation: float
    dram_utilisation: float
    makespan_s: float
    max_lag: float | None
    """The largest distance between two streams relative to the mix, in rounds; None without a mix to keep."""
    pieces: int
    """Layers were cut so that none took more than 1 / pieces of the weight buffer; 1: whole layers."""
    remark: str
    streams: tuple[StreamReport, ...]

    def __repr__(self) -> str:
        return f"Report({self.policy} on {self.device}: STP {self.stp:.3f}, {self.fraction_of_bound:.1%} of the bound)"

    def as_dict(self) -> dict[str, Any]:
        return {"format": 1, **asdict(self), "streams": [asdict(stream) for stream in self.streams]}


def report(
    trace: Trace,
    setting: Setting,
    clock: Clock,
    *,
    fixed_mix: Sequence[float] | None = None,
    band: Band | None = None,
    remark: str = "",
) -> Report:
    """Compute the report of a run of *setting*.

    fixed_mix: queries of each stream, if the user asked for a mix. band: the fairness rule of the run, for ``max_lag``.
    remark: a sentence for the user.
    """
    demands = [demand_of(program, setting.buffer) for program in setting.uncut]
    bound_prices = mix_prices(demands, fixed_mix) if fixed_mix else prices(demands)
    streams = tuple(
        _stream(trace, index, demand, bound_prices, clock, setting.programs[index])
        for index, demand in enumerate(demands)
    )
    makespan = trace.makespan_s
    stp = sum(stream.progress * stream.standalone_s for stream in streams) / makespan
    slowdowns = [stream.slowdown for stream in streams if stream.slowdown is not None]
    worst = [s.max_latency_s / s.standalone_s for s in streams if s.max_latency_s is not None]
    starved = len(slowdowns) < len(streams)
    return Report(
        device=str(trace.settings.get("device", "")),
        policy=str(trace.settings.get("policy", "")),
        stp=stp,
        bound_stp=bound_prices.bound,
        fraction_of_bound=stp / bound_prices.bound,
        antt=None if starved else sum(slowdowns) / len(slowdowns),
        max_slowdown=None if starved else max(worst),
        pe_utilisation=float((trace.compute_end_s - trace.compute_start_s).sum()) / makespan,
        dram_utilisation=float(trace.weight_bytes.sum()) / clock.bytes_per_s / makespan,
        makespan_s=makespan,
        max_lag=_max_lag(trace, setting, band, all_done=fixed_mix is not None) if band else None,
        pieces=setting.pieces or 1,
        remark=remark,
        streams=streams,
    )


def _stream(
    trace: Trace, index: int, demand: QueryDemand, bound_prices: Prices, clock: Clock, program: Program
) -> StreamReport:
    """Compute the report of the stream with number *index*; *bound_prices*: prices that value an unfinished query."""
    issues = trace.stream == index
    issued = int(issues.sum())
    completed = issued // len(program)
    ends = trace.compute_end_s[issues & (trace.layer == len(program) - 1)]
    latencies = np.diff(ends, prepend=0.0)
    alone_s = demand.alone * clock.tick_s
    mean = float(latencies.mean()) if completed else None
    return StreamReport(
        model=trace.streams[index],
        queries=completed,
        progress=bound_prices.queries(program, issued),
        standalone_s=alone_s,
        mean_latency_s=mean,
        max_latency_s=float(latencies.max()) if completed else None,
        slowdown=mean / alone_s if mean is not None else None,
    )


def _max_lag(trace: Trace, setting: Setting, band: Band, *, all_done: bool) -> float:
    """Return the largest gap between the most and the least advanced stream at any issue, in rounds.

    band: the mix that the streams were kept at. all_done: whether every stream issued all its queries; a stream that
    has issued its last layer is then not behind.
    """
    gains = band.gains(setting.programs)
    # For each stream, its progress after every issue of the run. ``minimum`` keeps the index in range at issues of
    # other streams, whose values ``where`` discards.
    progress_by_stream = [
        np.where(trace.stream == index, np.array(gain, np.int64)[np.minimum(trace.layer, len(gain) - 1)], 0).cumsum()
        for index, gain in enumerate(gains)
    ]
    furthest = np.max(progress_by_stream, axis=0)
    for index, progress in enumerate(progress_by_stream if all_done else ()):
        progress[int(np.flatnonzero(trace.stream == index)[-1]) :] = furthest[-1]  # a stream that is done is not behind
    return float((furthest - np.min(progress_by_stream, axis=0)).max()) / ROUND
