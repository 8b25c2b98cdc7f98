"""What the weight buffer holds at each moment of a trace, and when the memory channel stood still for it.

A trace says when each fetch began and ended. In between, bytes arrive at the channel's bandwidth while the
buffer has space; when it is full the fetch stalls until a compute ends and frees the weights of its layer.
That rule (``devices.decoupled``) is followed again here, so the curve is exact. Where the settings of a
trace do not name the bandwidth and the buffer, or a fetch took longer for some other reason, its bytes
arrive evenly from its start to its end.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from weft.reports.trace import Floats, Ints, Trace

SLACK_S = 5e-10
"""Shorter stalls are not told from rounding; no export shows less than a nanosecond."""


class Intervals(NamedTuple):
    """Stretches of time, each part of a span."""

    span: Ints
    """Index of the span in its trace."""
    start_s: Floats
    end_s: Floats

    def per_span_s(self, spans: int) -> Floats:
        """The time of each of a trace's spans together."""
        return np.bincount(self.span, self.end_s - self.start_s, spans).astype(np.float64)


class Occupancy(NamedTuple):
    """The buffer as a curve of straight pieces, and the channel's time in two kinds."""

    time_s: Floats
    """Where the curve bends or jumps, each instant once."""
    before: Floats
    """Bytes held as the instant is reached."""
    after: Floats
    """Bytes held from the instant on: less where computes ended."""
    transfers: Intervals
    """When bytes moved, by span and time."""
    stalls: Intervals
    """When a fetch waited for space, in the order of time."""


def occupancy(trace: Trace) -> Occupancy:
    """Follow the bytes of *trace* into the buffer and out of it."""
    bandwidth = _positive(trace, "bandwidth_bytes_per_s")
    capacity = _positive(trace, "weight_buffer_bytes")
    none = Intervals(np.empty(0, np.int64), np.empty(0), np.empty(0))
    stalls = _stalls(trace, bandwidth, capacity) if bandwidth and capacity else none
    transfers = _transfers(trace, stalls)
    return Occupancy(*_curve(trace, transfers), transfers, stalls)


def nanoseconds(seconds: Floats) -> Ints:
    """Whole nanoseconds, the unit of the exports: what touches in the trace still touches there."""
    return np.rint(seconds * 1e9).astype(np.int64)


def _positive(trace: Trace, setting: str) -> float:
    """A size or rate of the settings; 0 where there is none to use."""
    value = trace.settings.get(setting)
    return max(0.0, float(value)) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0


def _stalls(trace: Trace, bandwidth: float, capacity: float) -> Intervals:
    order = np.argsort(trace.fetch_start_s, kind="stable")
    asked = np.cumsum(trace.weight_bytes[order])  # bytes up to and with each fetch
    waited_s = trace.fetch_end_s - trace.fetch_start_s - trace.weight_bytes / bandwidth
    late = np.flatnonzero(waited_s[order] > SLACK_S)
    spans = order[late]
    last, size = asked[late], trace.weight_bytes[spans]
    freeing = np.flatnonzero(trace.weight_bytes)
    freeing = freeing[np.argsort(trace.compute_end_s[freeing], kind="stable")]
    free_s: list[float] = trace.compute_end_s[freeing].tolist()
    room: list[float] = (capacity + np.cumsum(np.append(0, trace.weight_bytes[freeing]))).tolist()
    found: list[tuple[int, float, float]] = []
    fetches = zip(
        spans.tolist(),
        trace.fetch_start_s[spans].tolist(),
        trace.fetch_end_s[spans].tolist(),
        (last - size).tolist(),
        last.tolist(),
        strict=True,
    )
    for span, start_s, end_s, first, final in fetches:
        waits, reached_s = _waits(start_s, first, final, free_s, room, bandwidth)
        if abs(reached_s - end_s) <= 2 * SLACK_S:
            found.extend((span, *wait) for wait in waits)
    return Intervals(
        np.array([span for span, _, _ in found], np.int64),
        np.array([from_s for _, from_s, _ in found], np.float64),
        np.array([to_s for _, _, to_s in found], np.float64),
    )


def _waits(
    time_s: float, have: float, final: float, free_s: list[float], room: list[float], bandwidth: float
) -> tuple[list[tuple[float, float]], float]:
    """When a fetch begun at *time_s* waits for space, and when it ends.

    Bytes are counted from the start of the trace: the fetch brings their number from *have* to *final*, and
    ``room[k]`` may have arrived once the computes that end at ``free_s[:k]`` have.
    """
    waits: list[tuple[float, float]] = []
    for k in range(bisect_right(free_s, time_s), len(room)):
        reach = max(have, min(room[k], final))
        time_s += (reach - have) / bandwidth
        have = reach
        if have == final:
            return waits, time_s
        if k < len(free_s) and free_s[k] > time_s:
            if free_s[k] - time_s > SLACK_S:
                waits.append((time_s, free_s[k]))
            time_s = free_s[k]
    return waits, math.inf  # nothing more is freed: this trace follows another rule


def _transfers(trace: Trace, stalls: Intervals) -> Intervals:
    """The fetches without their stalls."""
    every = np.arange(len(trace))
    span = np.concatenate([every, stalls.span])
    start_s = np.concatenate([trace.fetch_start_s, stalls.end_s])
    end_s = np.concatenate([trace.fetch_end_s, stalls.start_s])
    # Within a span the n-th start belongs to the n-th end.
    by_start, by_end = np.lexsort((start_s, span)), np.lexsort((end_s, span))
    span, start_s, end_s = span[by_start], start_s[by_start], end_s[by_end]
    moving = end_s > start_s
    return Intervals(span[moving], start_s[moving], end_s[moving])


def _curve(trace: Trace, transfers: Intervals) -> tuple[Floats, Floats, Floats]:
    """Instants, and the bytes held before and after each.

    The sum of one ramp per transfer, less the bytes freed; the level at each instant follows from the one
    before it, which keeps rounding far below a byte.
    """
    moved_s = transfers.per_span_s(len(trace))
    rate = trace.weight_bytes[transfers.span] / moved_s[transfers.span]
    at_once = np.flatnonzero((moved_s == 0) & (trace.weight_bytes > 0))
    parts = (
        (transfers.start_s, rate, np.zeros_like(rate)),
        (transfers.end_s, -rate, np.zeros_like(rate)),
        (trace.fetch_end_s[at_once], np.zeros(len(at_once)), trace.weight_bytes[at_once]),
        (trace.compute_end_s, np.zeros(len(trace)), -trace.weight_bytes),
    )
    times_s, turns, jumps = (np.concatenate(column) for column in zip(*parts, strict=True))
    time_s, where = np.unique(times_s, return_inverse=True)
    turn, jump = np.bincount(where, turns, len(time_s)), np.bincount(where, jumps, len(time_s))
    slope = np.cumsum(turn)
    change = slope[:-1] * np.diff(time_s) + jump[:-1]
    before = np.cumsum(np.concatenate([[0.0], change]))[: len(time_s)]
    # Fetches that follow each other make one straight line; their seams are no bends of the curve.
    bends = np.abs(turn) > 1e-6 * np.maximum(np.abs(slope), np.abs(slope - turn))
    kept = bends | (jump != 0)
    return time_s[kept], before[kept], (before + jump)[kept]
