"""A trace as one self-contained page: an interactive timeline that opens from a file, without a network.

The page is ``timeline.html`` beside this module; ``trace.js`` and ``timeline.js`` read and draw what is made here:
columns of whole nanoseconds, each the distance from the one before it, and tables for all text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from weft.reports.occupancy import Occupancy, nanoseconds, occupancy
from weft.reports.page import PALETTE, json_ready, write_page
from weft.reports.trace import Ints, Trace
from weft.reports.words import layer_meaning


def write_html(trace: Trace, path: Path | str, *, report: Mapping[str, Any] | None = None) -> None:
    """Write the page for *trace*; the figures of *report* become cards and a table of streams above it."""
    write_page(path, "timeline.html", trace_data(trace, report))


def model_colours(trace: Trace) -> dict[str, str]:
    """A colour for each model, in the order of the streams; from the ninth model on they repeat."""
    models = dict.fromkeys(trace.streams)
    return {model: PALETTE[index % len(PALETTE)] for index, model in enumerate(models)}


def trace_data(trace: Trace, report: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """All that ``timeline.js`` draws of a trace, and its report beside it."""
    colours = model_colours(trace)
    model_index = {model: index for index, model in enumerate(colours)}
    buffer = occupancy(trace)
    return {
        "models": list(colours),
        "streams": [model_index[model] for model in trace.streams],
        "settings": json_ready(trace.settings),
        "report": None if report is None else json_ready(report),
        **_spans(trace),
        "buffer": _buffer(buffer),
        "stalls": _stalls(buffer),
    }


def _spans(trace: Trace) -> dict[str, Any]:
    """The spans by column; ``kind`` points into ``kinds``: pairs of layer (in ``layers``) and bytes."""
    names = {name: index for index, name in enumerate(dict.fromkeys(chain(*trace.layers)))}
    layer = np.zeros_like(trace.layer)
    for stream, table in enumerate(trace.layers):
        mine = trace.stream == stream
        layer[mine] = np.array([names[name] for name in table], dtype=np.int64)[trace.layer[mine]]
    pairs = np.stack([layer, trace.weight_bytes], axis=1)
    kinds, kind = np.unique(pairs, axis=0, return_inverse=True)
    start_ns, fetched_ns = nanoseconds(trace.fetch_start_s), nanoseconds(trace.fetch_end_s)
    begun_ns, end_ns = nanoseconds(trace.compute_start_s), nanoseconds(trace.compute_end_s)
    columns = {
        "stream": trace.stream,
        "query": trace.query,
        "kind": kind.reshape(-1),
        "start": np.diff(start_ns, prepend=0),
        "fetch": fetched_ns - start_ns,
        "wait": begun_ns - fetched_ns,
        "compute": end_ns - begun_ns,
    }
    return {"layers": list(names), **_meanings(list(names)), "kinds": kinds.tolist(), "columns": _lists(columns)}


def _meanings(layers: Sequence[str]) -> dict[str, Any]:
    """What the names of layers mean: ``meaning`` of each points into ``meanings``, or is -1 where nobody knows."""
    told = [layer_meaning(name) for name in layers]
    places = {meaning: index for index, meaning in enumerate(dict.fromkeys(filter(None, told)))}
    return {"meanings": list(places), "meaning": [places.get(meaning, -1) for meaning in told]}


def _buffer(buffer: Occupancy) -> dict[str, list[int]]:
    """The curve of the weight buffer: what came since the instant before, and what was freed at this one."""
    before, after = (np.rint(level).astype(np.int64) for level in (buffer.before, buffer.after))
    return _lists(
        {
            "time": np.diff(nanoseconds(buffer.time_s), prepend=0),
            "rise": before - np.append(0, after)[:-1],
            "fall": before - after,
        }
    )


def _stalls(buffer: Occupancy) -> dict[str, list[int]]:
    """When a fetch waited for space; ``span`` points into the columns."""
    start_ns, end_ns = nanoseconds(buffer.stalls.start_s), nanoseconds(buffer.stalls.end_s)
    return _lists({"span": buffer.stalls.span, "start": np.diff(start_ns, prepend=0), "length": end_ns - start_ns})


def _lists(columns: Mapping[str, Ints]) -> dict[str, list[int]]:
    return {name: column.tolist() for name, column in columns.items()}
