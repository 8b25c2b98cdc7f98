"""A trace as one self-contained page: an interactive timeline that opens from a file, without a network.

The page is ``timeline.html`` beside this module, which holds all markup, style and script. Here its data
is made: columns of whole nanoseconds, each the distance from the one before it, and tables for all text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.resources import files
from itertools import chain
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

from weft.files import write_text
from weft.reports.occupancy import Occupancy, nanoseconds, occupancy
from weft.reports.trace import Ints, Trace

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8f8f8f", "#b8a400")
"""Okabe and Ito's colours, safe for colour-blind readers; black and yellow toned to suit any ground."""

DATA_MARK, STYLE_MARK = "/*weft-data*/", "/*weft-style*/"
"""Stand in the templates where the data and the shared style go."""


def write_html(trace: Trace, path: Path | str, *, report: Mapping[str, Any] | None = None) -> None:
    """Write the page for *trace*; the figures of *report* become cards and a table of streams above it."""
    write_page(path, "timeline.html", _page_data(trace, report))


def write_page(path: Path | str, template: str, data: Mapping[str, Any]) -> None:
    """Write one of our pages with its data and the style all of them share."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    # Inside a script element only "<" and "&" could end or confuse it; non-ASCII is already escaped.
    safe = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    markup, style = (files("weft.reports").joinpath(name).read_text("utf-8") for name in (template, "page.css"))
    head, tail = markup.replace(STYLE_MARK, style).split(DATA_MARK)
    write_text(path, head + safe + tail)


def model_colours(trace: Trace) -> dict[str, str]:
    """A colour for each model, in the order of the streams; from the ninth model on they repeat."""
    models = dict.fromkeys(trace.streams)
    return {model: PALETTE[index % len(PALETTE)] for index, model in enumerate(models)}


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


def _page_data(trace: Trace, report: Mapping[str, Any] | None) -> dict[str, Any]:
    colours = model_colours(trace)
    model_index = {model: index for index, model in enumerate(colours)}
    buffer = occupancy(trace)
    return {
        "models": list(colours),
        "colours": list(colours.values()),
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
    return {
        "layers": list(names),
        "kinds": kinds.tolist(),
        "columns": _lists(columns),
    }


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
