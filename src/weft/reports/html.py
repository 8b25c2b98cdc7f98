"""A trace as one self-contained page: an interactive timeline that opens from a file, without a network.

The page is ``timeline.html`` beside this module, which holds all markup, style and script. Here its data
is made: columns of whole nanoseconds, each the distance from the one before it, and tables for all text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from weft.errors import InputError
from weft.reports.perfetto import json_ready, nanoseconds
from weft.trace import Trace

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8f8f8f", "#b8a400")
"""Okabe and Ito's colours, safe for colour-blind readers; black and yellow toned to suit any ground."""

DATA_MARK = "/*weft-data*/"
"""Stands in the template where the data goes."""


def write_html(trace: Trace, path: Path | str, *, report: Mapping[str, Any] | None = None) -> None:
    """Write the page for *trace*; the figures of *report* become cards and a table of streams above it."""
    data = json.dumps(_page_data(trace, report), separators=(",", ":"), allow_nan=False)
    # Inside a script element only "<" and "&" could end or confuse it; non-ASCII is already escaped.
    safe = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    template = files("weft.reports").joinpath("timeline.html").read_text(encoding="utf-8")
    head, tail = template.split(DATA_MARK)
    try:
        Path(path).write_text(head + safe + tail, encoding="utf-8")
    except OSError as problem:
        raise InputError(f"{path}: cannot write: {problem}") from problem


def model_colours(trace: Trace) -> dict[str, str]:
    """A colour for each model, in the order of the streams; from the ninth model on they repeat."""
    models = dict.fromkeys(trace.streams)
    return {model: PALETTE[index % len(PALETTE)] for index, model in enumerate(models)}


def _page_data(trace: Trace, report: Mapping[str, Any] | None) -> dict[str, Any]:
    colours = model_colours(trace)
    model_index = {model: index for index, model in enumerate(colours)}
    return {
        "models": list(colours),
        "colours": list(colours.values()),
        "streams": [model_index[model] for model in trace.streams],
        "settings": json_ready(trace.settings),
        "report": None if report is None else json_ready(report),
        **_columns(trace),
    }


def _columns(trace: Trace) -> dict[str, Any]:
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
        "columns": {name: column.tolist() for name, column in columns.items()},
    }
