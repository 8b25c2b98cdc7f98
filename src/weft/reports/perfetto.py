"""A trace as Chrome trace events, for https://ui.perfetto.dev and chrome://tracing.

Process "NPU" has one thread per resource and a counter for the weight buffer; process "queries" has one
track per stream. Times are rounded to whole nanoseconds, the finest a viewer keeps, so that spans which
touch in the trace still touch (and never overlap) on the screen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from itertools import chain
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

from weft.errors import InputError
from weft.trace import Floats, Ints, Trace

NPU, QUERIES = 1, 2
"""Process ids; the viewers show processes in this order."""
DRAM_CHANNEL, PE_ARRAY = 1, 2
"""Thread ids within the NPU."""

Event = dict[str, Any]


def write_perfetto(trace: Trace, path: Path | str) -> None:
    """Write *trace* as one JSON object; the same trace gives the same bytes."""
    settings = json.dumps(json_ready(trace.settings), sort_keys=True)
    events = chain(_names(), _resource_events(trace), _query_events(trace), _buffer_events(trace))
    try:
        with Path(path).open("w", encoding="utf-8") as file:
            file.write(f'{{"displayTimeUnit": "ns",\n"otherData": {settings},\n"traceEvents": [\n')
            for index, event in enumerate(events):
                file.write((",\n" if index else "") + json.dumps(event))
            file.write("\n]}\n")
    except OSError as problem:
        raise InputError(f"{path}: cannot write: {problem}") from problem


def nanoseconds(seconds: Floats) -> Ints:
    return np.rint(seconds * 1e9).astype(np.int64)


def buffer_occupancy(trace: Trace) -> tuple[Ints, Ints]:
    """Steps of the weight buffer: times in ns, and the bytes held from each on until the next.

    A layer that ends just as another is fetched frees its bytes first, so an instant shows its net.
    """
    times_ns = np.concatenate([nanoseconds(trace.fetch_start_s), nanoseconds(trace.compute_end_s)])
    changes = np.concatenate([trace.weight_bytes, -trace.weight_bytes])
    order = np.argsort(times_ns, kind="stable")
    instants, first = np.unique(times_ns[order], return_index=True)
    held = np.cumsum(changes[order])[np.append(first[1:], len(order)) - 1] if len(order) else changes
    changed = np.diff(held, prepend=0) != 0
    return instants[changed], held[changed]


def json_ready(value: Any) -> Any:
    """*value* with what JSON cannot say (paths, NaN, infinities, sets of any kind) turned into text."""
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    return str(value)


def _names() -> Iterator[Event]:
    for order, (pid, name) in enumerate(((NPU, "NPU"), (QUERIES, "queries"))):
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": order}}
    for tid, name in ((DRAM_CHANNEL, "DRAM channel"), (PE_ARRAY, "PE array")):
        yield {"ph": "M", "pid": NPU, "tid": tid, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": NPU, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _resource_events(trace: Trace) -> Iterator[Event]:
    fetches = zip(*_interval(trace.fetch_start_s, trace.fetch_end_s), strict=True)
    computes = zip(*_interval(trace.compute_start_s, trace.compute_end_s), strict=True)
    for span, fetch, compute in zip(trace.spans, fetches, computes, strict=True):
        about = {"model": span.model, "query": span.query, "layer": span.layer, "bytes": span.weight_bytes}
        event = {"ph": "X", "pid": NPU, "name": f"{span.model}/{span.layer}", "args": about}
        if span.fetch_end_s > span.fetch_start_s:
            yield {**event, "tid": DRAM_CHANNEL, "cat": "fetch", "ts": fetch[0], "dur": fetch[1]}
        yield {**event, "tid": PE_ARRAY, "cat": "compute", "ts": compute[0], "dur": compute[1]}


def _interval(start_s: Floats, end_s: Floats) -> tuple[list[float], list[float]]:
    """Starts and durations in microseconds, both whole nanoseconds."""
    start_ns, end_ns = nanoseconds(start_s), nanoseconds(end_s)
    return (start_ns / 1000).tolist(), ((end_ns - start_ns) / 1000).tolist()


def _query_events(trace: Trace) -> Iterator[Event]:
    """Each query from its first fetch to its last compute.

    Queries of a stream overlap (the next is fetched while the last is computed), so these are
    asynchronous events. Viewers gather those by name into tracks: the stream is the name, the query the id.
    """
    extents: dict[tuple[int, int], tuple[float, float]] = {}
    for span in trace.spans:
        key = span.stream, span.query
        first_s, last_s = extents.get(key, (span.fetch_start_s, span.compute_end_s))
        extents[key] = min(first_s, span.fetch_start_s), max(last_s, span.compute_end_s)
    for number, ((stream, query), (first_s, last_s)) in enumerate(sorted(extents.items()), start=1):
        model = trace.streams[stream]
        event = {"pid": QUERIES, "tid": 0, "cat": "query", "id": number, "name": f"stream {stream}: {model}"}
        about = {"model": model, "query": query}
        yield {"ph": "b", **event, "ts": round(first_s * 1e9) / 1000, "args": about}
        yield {"ph": "e", **event, "ts": round(last_s * 1e9) / 1000}


def _buffer_events(trace: Trace) -> Iterator[Event]:
    times_ns, held = buffer_occupancy(trace)
    event = {"ph": "C", "pid": NPU, "name": "weight buffer (MB)"}
    for time_us, megabytes in zip((times_ns / 1000).tolist(), (held / 1e6).tolist(), strict=True):
        yield {**event, "ts": time_us, "args": {"value": megabytes}}
