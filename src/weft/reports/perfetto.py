"""A trace as Chrome trace events, for https://ui.perfetto.dev and chrome://tracing.

Process "NPU" has one thread per resource and a counter for the weight buffer, sampled where its curve bends or jumps;
process "queries" has one track per stream. Times are rounded to whole nanoseconds, the finest a viewer keeps, so that
spans which touch in the trace still touch (and never overlap) on the screen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from weft.base.files import replacing
from weft.reports.occupancy import Occupancy, nanoseconds, occupancy
from weft.reports.trace import Floats, Trace

NPU, QUERIES = 1, 2
"""Process ids; the viewers show processes in this order."""
DRAM_CHANNEL, PE_ARRAY = 1, 2
"""Thread ids within the NPU."""

Event = dict[str, Any]


def write_perfetto(trace: Trace, path: Path | str) -> None:
    """Write *trace* as one JSON object; the same trace gives the same bytes."""
    buffer = occupancy(trace)
    events = chain(_names(), _resource_events(trace, buffer), _query_events(trace), _buffer_events(buffer))
    write_events(path, trace.settings, events)


def write_events(path: Path | str, about: Mapping[str, Any], events: Iterable[Event]) -> None:
    settings = json.dumps({str(key): _plain(value) for key, value in about.items()}, sort_keys=True)
    with replacing(path) as beside, beside.open("w", encoding="utf-8") as file:
        file.write(f'{{"displayTimeUnit": "ns",\n"otherData": {settings},\n"traceEvents": [\n')
        for index, event in enumerate(events):
            file.write((",\n" if index else "") + json.dumps(event))
        file.write("\n]}\n")


def _plain(value: Any) -> Any:
    """Text and numbers as they are, all else as its JSON text: a viewer lists settings, it does not open them."""
    if isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return json.dumps(value, default=str)


def _names() -> Iterator[Event]:
    yield from process_events(NPU, "NPU", {DRAM_CHANNEL: "DRAM channel", PE_ARRAY: "PE array"})
    yield from process_events(QUERIES, "queries", {})


def process_events(pid: int, name: str, threads: Mapping[int, str]) -> Iterator[Event]:
    """What the viewers call a process and its threads, and in which order they show them."""
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid - 1}}
    for tid, thread in threads.items():
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": thread}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _resource_events(trace: Trace, buffer: Occupancy) -> Iterator[Event]:
    fetches = zip(*_interval(trace.fetch_start_s, trace.fetch_end_s), strict=True)
    computes = zip(*_interval(trace.compute_start_s, trace.compute_end_s), strict=True)
    stalled_us = (nanoseconds(buffer.stalls.per_span_s(len(trace))) / 1000).tolist()
    for span, fetch, compute, stalled in zip(trace.spans, fetches, computes, stalled_us, strict=True):
        about = {"model": span.model, "query": span.query, "layer": span.layer, "bytes": span.weight_bytes}
        event = {"ph": "X", "pid": NPU, "name": f"{span.model}/{span.layer}", "args": about}
        if span.fetch_end_s > span.fetch_start_s:
            waited = {"args": {**about, "stalled_us": stalled}} if stalled else {}
            yield {**event, **waited, "tid": DRAM_CHANNEL, "cat": "fetch", "ts": fetch[0], "dur": fetch[1]}
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


def _buffer_events(buffer: Occupancy) -> Iterator[Event]:
    """Two samples at an instant where the level jumps, so that what was held until then is seen too."""
    event = {"ph": "C", "pid": NPU, "name": "weight buffer (MB)"}
    times_us = (nanoseconds(buffer.time_s) / 1000).tolist()
    before, after = (_megabytes(level) for level in (buffer.before, buffer.after))
    for time_us, *levels in zip(times_us, before, after, strict=True):
        for megabytes in dict.fromkeys(levels):
            yield {**event, "ts": time_us, "args": {"value": megabytes}}


def _megabytes(level: Floats) -> list[float]:
    whole: list[float] = ((np.rint(level) + 0.0) / 1e6).tolist()  # adding nought makes a negative one positive
    return whole
