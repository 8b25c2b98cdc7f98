"""What the nodes of an optimised graph cost and make: a few runs under ONNX Runtime's own profiler."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto

from weft.runtime.cutting import Tensor
from weft.runtime.sessions import open_session
from weft.runtime.tensors import Array

_BUDGET_S, _FEWEST, _MOST = 2.0, 3, 12
"""Of the profiled runs."""
_STRING_BYTES = 32
"""Taken for a string, the object included."""


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """One figure for each node, one entry for each tensor made."""

    times_s: tuple[float, ...]
    """The fastest of the runs, in the order of the nodes."""
    tensors: Mapping[str, Tensor]
    """Only those that numpy can hold."""


def profile(model: ModelProto, folder: Path, threads: int, feed: Mapping[str, Array]) -> NodeProfile:
    """Run *model*, whose large weights lie in *folder*, on *feed*."""
    named = ModelProto()
    named.CopyFrom(model)
    for position, node in enumerate(named.graph.node):
        node.name = f"n{position}"
    path = folder / "profiled.onnx"
    onnx.save(named, path)
    session = open_session(path, threads, optimise=False, profile=folder / "trace")
    began_s, runs = perf_counter(), 0
    while runs < _FEWEST or (runs < _MOST and perf_counter() - began_s < _BUDGET_S):
        session.run(None, dict(feed))
        runs += 1
    trace = Path(session.end_profiling())
    events = json.loads(trace.read_text(encoding="utf-8"))
    trace.unlink()
    path.unlink()
    return _read(named, events)


def _read(model: ModelProto, events: list[dict[str, Any]]) -> NodeProfile:
    times_us: dict[str, float] = {}
    made: dict[str, list[dict[str, list[int]]]] = {}
    for event in events:
        name, _, what = event.get("name", "").partition("_")
        if event.get("cat") == "Node" and what == "kernel_time":
            times_us[name] = min(event["dur"], times_us.get(name, math.inf))
            made[name] = event["args"].get("output_type_shape", [])
    tensors: dict[str, Tensor] = {}
    for node in model.graph.node:
        names, found = list(filter(None, node.output)), made.get(node.name, [])
        if len(names) == len(found):  # what is not a tensor is left out, and then nothing tells which is which
            tensors |= {name: each for name, entry in zip(names, found, strict=True) if (each := _tensor(entry))}
    return NodeProfile(tuple(times_us.get(node.name, 0.0) / 1e6 for node in model.graph.node), tensors)


def _tensor(entry: Mapping[str, list[int]]) -> Tensor | None:
    """An entry of the trace, such as ``{"float": [1, 64]}``; None for types that numpy does not have."""
    ((kind, shape),) = entry.items()
    if kind not in _ITEM_BYTES:
        return None
    return Tensor(TensorProto.DataType.Value(kind.upper()), math.prod(shape) * _ITEM_BYTES[kind])


_ITEM_BYTES = {
    "string": _STRING_BYTES,
    "float": 4,
    **{
        kind: np.dtype(kind).itemsize
        for kind in [
            "bool",
            "int8",
            "int16",
            "int32",
            "int64",
            "uint8",
            "uint16",
            "uint32",
            "uint64",
            "float16",
            "double",
        ]
    },
}
"""Type as the trace names it -> bytes of an element."""
