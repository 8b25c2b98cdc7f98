"""Traces of a run: when the weights of each layer were fetched, when it was computed, and the weight buffer over time.

A trace is kept as columns, because a run of a second has a hundred thousand spans; ``spans`` turns them into values to
read. ``write_trace`` and ``read_trace`` store it; the format is in docs/formats.md.

``occupancy`` computes the content of the weight buffer. A trace has the begin and end of each fetch. In between, bytes
arrive at the bandwidth of the memory channel while the buffer has space; when the buffer is full, the fetch stalls
until a compute ends and frees the weights of its layer. This rule (``devices.decoupled``) is applied again here, so the
curve is exact. If the settings of a trace do not have the bandwidth and the buffer's size, or a fetch took longer for
another reason, its bytes are assumed to arrive evenly from its start to its end.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.base.errors import InputError
from weft.base.jsonfile import read_json, write_json

FORMAT = 1  # version of the file format; other versions are refused
LAST_S = 1e9
"""Latest time that is accepted in a file; a later time means damage, and its nanoseconds would not fit 63 bits."""
SLACK_S = 5e-10
"""Duration up to which a stall is a rounding error; no export shows less than a nanosecond."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Span(NamedTuple):
    """One layer of one query: when its weights were fetched and when it was computed, in seconds."""

    model: str
    query: int
    """Number of the query in its stream, from 0."""
    layer: str
    fetch_start_s: float
    fetch_end_s: float
    compute_start_s: float
    compute_end_s: float
    stream: int
    """Index of the stream; two streams may run the same model."""
    weight_bytes: int
    """Bytes that arrive in the weight buffer during the fetch and leave it at the end of the compute."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Spans in the order of issue, as columns, and the settings of the run."""

    streams: tuple[str, ...]
    """The model of each stream."""
    layers: tuple[tuple[str, ...], ...]
    """Layer names of each stream, in execution order."""
    stream: Ints
    query: Ints
    layer: Ints
    """Index into the stream's layer names."""
    fetch_start_s: Floats
    fetch_end_s: Floats
    compute_start_s: Floats
    compute_end_s: Floats
    weight_bytes: Ints
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the run: device, policy and its options, models, batch, mix, version."""

    def __repr__(self) -> str:
        return f"Trace({' + '.join(self.streams)}: {len(self)} layers in {self.makespan_s * 1e3:.3f} ms)"

    def __len__(self) -> int:
        return len(self.stream)

    @property
    def makespan_s(self) -> float:
        """End of the last compute."""
        return float(self.compute_end_s.max()) if len(self) else 0.0

    @property
    def spans(self) -> Iterator[Span]:
        """Spans in the order they were issued."""
        times_s = (self.fetch_start_s, self.fetch_end_s, self.compute_start_s, self.compute_end_s)
        columns = (self.stream, self.query, self.layer, *times_s, self.weight_bytes)
        for stream, query, layer, fetch_s, fetched_s, compute_s, computed_s, size in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            names = self.streams[stream], query, self.layers[stream][layer]
            yield Span(*names, fetch_s, fetched_s, compute_s, computed_s, stream, size)

    @classmethod
    def from_spans(
        cls, spans: Iterable[Span], streams: Iterable[str], settings: Mapping[str, Any] | None = None
    ) -> Trace:
        """Make a trace of spans; layers are numbered in order of first appearance in their stream."""
        rows, models = list(spans), tuple(streams)
        names: list[dict[str, int]] = [{} for _ in models]
        for span in rows:
            if not 0 <= span.stream < len(models):
                raise InputError(f"span of {span.model!r} names stream {span.stream}, but there are {len(models)}")
            names[span.stream].setdefault(span.layer, len(names[span.stream]))

        def ints(values: Iterable[int]) -> Ints:
            return np.fromiter(values, dtype=np.int64, count=len(rows))

        def floats(values: Iterable[float]) -> Floats:
            return np.fromiter(values, dtype=np.float64, count=len(rows))

        return cls(
            models,
            tuple(tuple(table) for table in names),
            ints(s.stream for s in rows),
            ints(s.query for s in rows),
            ints(names[s.stream][s.layer] for s in rows),
            floats(s.fetch_start_s for s in rows),
            floats(s.fetch_end_s for s in rows),
            floats(s.compute_start_s for s in rows),
            floats(s.compute_end_s for s in rows),
            ints(s.weight_bytes for s in rows),
            dict(settings or {}),
        )


def _check_span(span: Span) -> Span:
    """Return the span; raises ValueError if its times are not in order."""
    times = (span.fetch_start_s, span.fetch_end_s, span.compute_start_s, span.compute_end_s)
    if not (0 <= times[0] <= times[1] <= times[2] <= times[3] <= LAST_S):
        raise ValueError(f"the times of layer {span.layer!r} of query {span.query} do not follow each other")
    return span


def trace_as_dict(trace: Trace) -> dict[str, Any]:
    """Return a trace as docs/formats.md describes it."""
    return {
        "format": FORMAT,
        "settings": dict(trace.settings),
        "streams": list(trace.streams),
        "spans": [span._asdict() for span in trace.spans],
    }


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write a trace as a JSON file."""
    write_json(path, trace_as_dict(trace))


def read_trace(path: str | Path) -> Trace:
    """Read a trace from a JSON file; InputError if it is none."""
    raw = read_json(path, InputError)
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise InputError(f"{path}: not a weft trace of format {FORMAT}")
    try:
        spans = [_check_span(Span(**entry)) for entry in raw["spans"]]
        return Trace.from_spans(spans, raw["streams"], raw.get("settings"))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{path}: a span does not have the fields of the format: {error}") from error


# The weight buffer


class Intervals(NamedTuple):
    """Intervals of time, each one a part of a span."""

    span: Ints
    """Index of the span in its trace."""
    start_s: Floats
    end_s: Floats

    def per_span_s(self, spans: int) -> Floats:
        """Return the sum of the intervals of each span; *spans*: the number of spans in the trace."""
        return np.bincount(self.span, self.end_s - self.start_s, spans).astype(np.float64)


class Occupancy(NamedTuple):
    """The weight buffer as a piecewise linear curve, and the time of the memory channel as transfers and stalls."""

    time_s: Floats
    """Instants at which the curve bends or jumps."""
    before: Floats
    """Bytes held just before each instant."""
    after: Floats
    """Bytes held just after each instant: fewer where a compute ended."""
    transfers: Intervals
    """Intervals in which bytes arrive, by span and time."""
    stalls: Intervals
    """Intervals in which a fetch waits for space, by time."""


def occupancy(trace: Trace) -> Occupancy:
    """Compute the content of the weight buffer over time."""
    bandwidth = _positive(trace, "bandwidth_bytes_per_s")
    capacity = _positive(trace, "weight_buffer_bytes")
    empty = Intervals(np.empty(0, np.int64), np.empty(0), np.empty(0))
    stalls = _stalls(trace, bandwidth, capacity) if bandwidth and capacity else empty
    transfers = _transfers(trace, stalls)
    return Occupancy(*_curve(trace, transfers), transfers, stalls)


def nanoseconds(seconds: Floats) -> Ints:
    """Round to whole nanoseconds, the unit of the exports: equal times stay equal."""
    return np.rint(seconds * 1e9).astype(np.int64)


def _positive(trace: Trace, setting: str) -> float:
    """Return a size or rate of the trace's settings; 0 if it is absent, negative or not finite."""
    value = trace.settings.get(setting)
    return max(0.0, float(value)) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0


def _stalls(trace: Trace, bandwidth: float, capacity: float) -> Intervals:
    """Return the intervals in which fetches wait for space in a buffer of *capacity* bytes.

    bandwidth: bytes per second of the memory channel.
    """
    # the channel serves fetches in the order of their starts; for equal starts, in the order of issue
    order = np.argsort(trace.fetch_start_s, kind="stable")
    arrived = np.cumsum(trace.weight_bytes[order])  # bytes up to and including each fetch
    waited_s = trace.fetch_end_s - trace.fetch_start_s - trace.weight_bytes / bandwidth
    slow = np.flatnonzero(waited_s[order] > SLACK_S)  # fetches that took longer than their bytes need
    spans, bytes_after = order[slow], arrived[slow]
    # the spans that free bytes, by the end of their computes; and the bytes that may have arrived after each of these
    freeing = np.flatnonzero(trace.weight_bytes)
    freeing = freeing[np.argsort(trace.compute_end_s[freeing], kind="stable")]
    free_s: list[float] = trace.compute_end_s[freeing].tolist()
    room: list[float] = (capacity + np.cumsum(np.append(0, trace.weight_bytes[freeing]))).tolist()
    stalls: list[tuple[int, float, float]] = []
    starts_s, ends_s = trace.fetch_start_s[spans], trace.fetch_end_s[spans]
    columns = (spans, starts_s, ends_s, bytes_after - trace.weight_bytes[spans], bytes_after)
    for span, start_s, end_s, before, after in zip(*(column.tolist() for column in columns), strict=True):
        waits, computed_end_s = _waits(start_s, before, after, free_s, room, bandwidth)
        # a fetch that ends at another time was slow for another reason, and counts as an even transfer without stalls
        if abs(computed_end_s - end_s) <= 2 * SLACK_S:
            stalls.extend((span, *wait) for wait in waits)
    return Intervals(
        np.array([span for span, _, _ in stalls], np.int64),
        np.array([from_s for _, from_s, _ in stalls], np.float64),
        np.array([to_s for _, _, to_s in stalls], np.float64),
    )


def _waits(
    time_s: float, arrived: float, after: float, free_s: list[float], room: list[float], bandwidth: float
) -> tuple[list[tuple[float, float]], float]:
    """Return the intervals in which a fetch that begins at *time_s* waits for space, and its end.

    Bytes are counted from the start of the trace: the fetch raises their number from *arrived* to *after*, and at most
    ``room[k]`` bytes may have arrived once the computes that end at ``free_s[:k]`` have ended.
    """
    waits: list[tuple[float, float]] = []
    for k in range(bisect_right(free_s, time_s), len(room)):
        reachable = max(arrived, min(room[k], after))
        time_s += (reachable - arrived) / bandwidth
        arrived = reachable
        if arrived == after:
            return waits, time_s
        if k < len(free_s) and free_s[k] > time_s:
            if free_s[k] - time_s > SLACK_S:
                waits.append((time_s, free_s[k]))
            time_s = free_s[k]
    return waits, math.inf  # nothing more is freed: this trace follows another rule


def _transfers(trace: Trace, stalls: Intervals) -> Intervals:
    """Return the intervals in which bytes arrive: the fetches without their stalls."""
    span = np.concatenate([np.arange(len(trace)), stalls.span])
    start_s = np.concatenate([trace.fetch_start_s, stalls.end_s])
    end_s = np.concatenate([trace.fetch_end_s, stalls.start_s])
    # within a span the n-th start belongs to the n-th end
    by_start, by_end = np.lexsort((start_s, span)), np.lexsort((end_s, span))
    span, start_s, end_s = span[by_start], start_s[by_start], end_s[by_end]
    moving = end_s > start_s
    return Intervals(span[moving], start_s[moving], end_s[moving])


def _curve(trace: Trace, transfers: Intervals) -> tuple[Floats, Floats, Floats]:
    """Return the instants of the curve, and the bytes held before and after each instant.

    The curve is the sum of a ramp per transfer, minus the freed bytes. Each level is computed from the previous level,
    which keeps rounding errors far below a byte.
    """
    moved_s = transfers.per_span_s(len(trace))
    rate = trace.weight_bytes[transfers.span] / moved_s[transfers.span]
    at_once = np.flatnonzero((moved_s == 0) & (trace.weight_bytes > 0))
    # Summands of the curve: times, changes of its slope there (bytes/s), and jumps (bytes).
    parts = (
        (transfers.start_s, rate, np.zeros_like(rate)),
        (transfers.end_s, -rate, np.zeros_like(rate)),
        (trace.fetch_end_s[at_once], np.zeros(len(at_once)), trace.weight_bytes[at_once]),
        (trace.compute_end_s, np.zeros(len(trace)), -trace.weight_bytes),
    )
    times_s, turns, jumps = (np.concatenate(column) for column in zip(*parts, strict=True))
    time_s, instant = np.unique(times_s, return_inverse=True)
    turn, jump = np.bincount(instant, turns, len(time_s)), np.bincount(instant, jumps, len(time_s))
    slope = np.cumsum(turn)
    change = slope[:-1] * np.diff(time_s) + jump[:-1]
    before = np.cumsum(np.concatenate([[0.0], change]))[: len(time_s)]
    # fetches without a gap between them make one straight line: a tiny change of slope is a rounding error
    bends = np.abs(turn) > 1e-6 * np.maximum(np.abs(slope), np.abs(slope - turn))
    significant = bends | (jump != 0)
    return time_s[significant], before[significant], (before + jump)[significant]
