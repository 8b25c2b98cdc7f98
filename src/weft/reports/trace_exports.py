"""Traces as files for viewers: a self-contained HTML page, and Chrome trace events for Perfetto.

The page is ``timeline.html`` beside this module; ``trace.js`` and ``timeline.js`` draw the data made here: columns of
whole nanoseconds, each value the difference to the previous value, and tables for all text.

Trace events are for https://ui.perfetto.dev and chrome://tracing. Process "NPU" has one thread per resource and a
counter for the weight buffer, sampled where its curve bends or jumps; process "queries" has one track per stream.

Times are whole nanoseconds, the finest that viewers keep, so that spans which touch in the trace still touch (and never
overlap) on the screen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from weft.base.files import replacing
from weft.reports.page import PALETTE, json_ready, write_page
from weft.reports.trace import Floats, Ints, Occupancy, Trace, nanoseconds, occupancy
from weft.reports.words import layer_meaning

NPU, QUERIES = 1, 2
"""Process ids; viewers show processes in this order."""
DRAM_CHANNEL, PE_ARRAY = 1, 2
"""Thread ids within the NPU."""

Event = dict[str, Any]


# The page


def write_html(trace: Trace, path: Path | str, *, report: Mapping[str, Any] | None = None) -> None:
    """Write a page for *trace*; the numbers of *report* become cards and a table of streams above the timeline."""
    write_page(path, "timeline.html", trace_data(trace, report))


def model_colours(trace: Trace) -> dict[str, str]:
    """Return model -> colour, in the order of the streams; from the ninth model on colours repeat."""
    models = dict.fromkeys(trace.streams)
    return {model: PALETTE[index % len(PALETTE)] for index, model in enumerate(models)}


def trace_data(trace: Trace, report: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the data of a trace and its report, as ``timeline.js`` reads them."""
    colours = model_colours(trace)
    model_index = {model: index for index, model in enumerate(colours)}
    buffer = occupancy(trace)
    return {
        "models": list(colours),
        "streams": [model_index[model] for model in trace.streams],
        "settings": json_ready(trace.settings),
        "report": None if report is None else json_ready(report),
        **_spans(trace),
        "buffer": _curve(buffer),
        "stalls": _stalls(buffer),
    }


def _curve(buffer: Occupancy) -> dict[str, list[int]]:
    """Return the curve of the weight buffer: bytes that arrived since the previous instant, and bytes freed at it."""
    before, after = (np.rint(level).astype(np.int64) for level in (buffer.before, buffer.after))
    times = np.diff(nanoseconds(buffer.time_s), prepend=0)
    return _lists(time=times, rise=before - np.append(0, after)[:-1], fall=before - after)


def _stalls(buffer: Occupancy) -> dict[str, list[int]]:
    """Return the stalls of fetches; ``span`` is a row of the columns of spans."""
    start_ns, end_ns = nanoseconds(buffer.stalls.start_s), nanoseconds(buffer.stalls.end_s)
    return _lists(span=buffer.stalls.span, start=np.diff(start_ns, prepend=0), length=end_ns - start_ns)


def _spans(trace: Trace) -> dict[str, Any]:
    """Return the spans as columns; ``kind`` is an index into ``kinds``: pairs of layer (index) and weight bytes."""
    names = {name: index for index, name in enumerate(dict.fromkeys(chain(*trace.layers)))}
    layer = np.zeros_like(trace.layer)
    for stream, table in enumerate(trace.layers):
        rows = trace.stream == stream
        layer[rows] = np.array([names[name] for name in table], dtype=np.int64)[trace.layer[rows]]
    # few different pairs repeat in every query: their index keeps the page small
    pairs = np.stack([layer, trace.weight_bytes], axis=1)
    kinds, kind = np.unique(pairs, axis=0, return_inverse=True)
    start_ns, fetched_ns = nanoseconds(trace.fetch_start_s), nanoseconds(trace.fetch_end_s)
    begun_ns, end_ns = nanoseconds(trace.compute_start_s), nanoseconds(trace.compute_end_s)
    columns = _lists(
        stream=trace.stream,
        query=trace.query,
        kind=kind.reshape(-1),
        start=np.diff(start_ns, prepend=0),
        fetch=fetched_ns - start_ns,
        wait=begun_ns - fetched_ns,
        compute=end_ns - begun_ns,
    )
    return {"layers": list(names), **_meanings(list(names)), "kinds": kinds.tolist(), "columns": columns}


def _meanings(layers: Sequence[str]) -> dict[str, Any]:
    """Return the meanings of layer names: ``meaning`` of a layer is an index into ``meanings``, or -1 if unknown."""
    meanings = [layer_meaning(name) for name in layers]
    indices = {meaning: index for index, meaning in enumerate(dict.fromkeys(filter(None, meanings)))}
    return {"meanings": list(indices), "meaning": [indices.get(meaning, -1) for meaning in meanings]}


def _lists(**columns: Ints) -> dict[str, list[int]]:
    return {name: column.tolist() for name, column in columns.items()}


# Trace events


def write_perfetto(trace: Trace, path: Path | str) -> None:
    """Write *trace* as one JSON object of trace events; the same trace gives the same bytes."""
    buffer = occupancy(trace)
    names = chain(
        process_events(NPU, "NPU", {DRAM_CHANNEL: "DRAM channel", PE_ARRAY: "PE array"}),
        process_events(QUERIES, "queries", {}),
    )
    events = chain(names, _resource_events(trace, buffer), _query_events(trace), _buffer_events(buffer))
    write_events(path, trace.settings, events)


def write_events(path: Path | str, about: Mapping[str, Any], events: Iterable[Event]) -> None:
    """Write trace events as a file for Perfetto; *about*: settings that the viewer lists."""
    settings = json.dumps({str(key): _plain(value) for key, value in about.items()}, sort_keys=True)
    with replacing(path) as draft, draft.open("w", encoding="utf-8") as file:
        file.write(f'{{"displayTimeUnit": "ns",\n"otherData": {settings},\n"traceEvents": [\n')
        for index, event in enumerate(events):
            file.write((",\n" if index else "") + json.dumps(event))
        file.write("\n]}\n")


def _plain(value: Any) -> Any:
    """Return text and numbers unchanged, other values as JSON text, since viewers cannot show nested settings."""
    if isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return json.dumps(value, default=str)


def process_events(pid: int, name: str, threads: Mapping[int, str]) -> Iterator[Event]:
    """Yield the metadata events of a process: the names and the order in which viewers show it and its threads."""
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid - 1}}
    for tid, thread in threads.items():
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": thread}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _resource_events(trace: Trace, buffer: Occupancy) -> Iterator[Event]:
    """Yield the fetches on the channel and the computes on the array."""
    fetches = zip(*_starts_and_durations(trace.fetch_start_s, trace.fetch_end_s), strict=True)
    computes = zip(*_starts_and_durations(trace.compute_start_s, trace.compute_end_s), strict=True)
    stalled_us = (nanoseconds(buffer.stalls.per_span_s(len(trace))) / 1000).tolist()
    for span, (fetch_start_us, fetch_us), (compute_start_us, compute_us), stalled in zip(
        trace.spans, fetches, computes, stalled_us, strict=True
    ):
        details = {"model": span.model, "query": span.query, "layer": span.layer, "bytes": span.weight_bytes}
        event = {"ph": "X", "pid": NPU, "name": f"{span.model}/{span.layer}", "args": details}
        if span.fetch_end_s > span.fetch_start_s:
            with_stall = {"args": {**details, "stalled_us": stalled}} if stalled else {}
            yield {**event, **with_stall, "tid": DRAM_CHANNEL, "cat": "fetch", "ts": fetch_start_us, "dur": fetch_us}
        yield {**event, "tid": PE_ARRAY, "cat": "compute", "ts": compute_start_us, "dur": compute_us}


def _starts_and_durations(start_s: Floats, end_s: Floats) -> tuple[list[float], list[float]]:
    """Return starts and durations in microseconds, both whole nanoseconds."""
    start_ns, end_ns = nanoseconds(start_s), nanoseconds(end_s)
    return (start_ns / 1000).tolist(), ((end_ns - start_ns) / 1000).tolist()


def _query_events(trace: Trace) -> Iterator[Event]:
    """Yield each query from its first fetch to its last compute.

    Queries of a stream overlap (the next is fetched while the last is computed), so these are asynchronous events.
    Viewers group those by name into tracks: the stream is the name, the query the id.
    """
    extents: dict[tuple[int, int], tuple[float, float]] = {}
    for span in trace.spans:
        key = span.stream, span.query
        first_s, last_s = extents.get(key, (span.fetch_start_s, span.compute_end_s))
        extents[key] = min(first_s, span.fetch_start_s), max(last_s, span.compute_end_s)
    for number, ((stream, query), (first_s, last_s)) in enumerate(sorted(extents.items()), start=1):
        model = trace.streams[stream]
        event = {"pid": QUERIES, "tid": 0, "cat": "query", "id": number, "name": f"stream {stream}: {model}"}
        details = {"model": model, "query": query}
        yield {"ph": "b", **event, "ts": round(first_s * 1e9) / 1000, "args": details}
        yield {"ph": "e", **event, "ts": round(last_s * 1e9) / 1000}


def _buffer_events(buffer: Occupancy) -> Iterator[Event]:
    """Yield the level of the weight buffer; at a jump two samples with the same time, so that both levels show."""
    event = {"ph": "C", "pid": NPU, "name": "weight buffer (MB)"}
    times_us = (nanoseconds(buffer.time_s) / 1000).tolist()
    before, after = (_megabytes(level) for level in (buffer.before, buffer.after))
    for time_us, *levels in zip(times_us, before, after, strict=True):
        for megabytes in dict.fromkeys(levels):
            yield {**event, "ts": time_us, "args": {"value": megabytes}}


def _megabytes(level: Floats) -> list[float]:
    """Return levels in megabytes, rounded to whole bytes."""
    megabytes: list[float] = ((np.rint(level) + 0.0) / 1e6).tolist()  # adding 0.0 turns -0.0 into 0.0
    return megabytes
