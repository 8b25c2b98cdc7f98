"""What the nodes of an optimised graph cost and make: a few runs under ONNX Runtime's own profiler."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto

from weft.runtime.cutting import SeenTensor
from weft.runtime.onnxruntime_cpu.allowance import Allowance
from weft.runtime.onnxruntime_cpu.sessions import open_session
from weft.runtime.rows import Seen
from weft.runtime.tensors import Array

_BUDGET_S, _FEWEST, _MOST = 2.0, 3, 12
"""How long profiled runs may take, and how many there are at least and at most."""
_STRING_BYTES = 32
"""Taken for a string, the object included."""
_NODE = "weft@"
"""Begins the names of nodes in a trace; their places follow. Nodes inside control flow keep names of their own."""


OpenProfiled = Callable[[Path, Path], Any]
"""Opens the model in a file as a session whose trace begins with a path."""


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """One figure for each node, one entry for each tensor made."""

    times_s: tuple[float, ...]
    """The fastest of the runs, in the order of the nodes."""
    tensors: Mapping[str, SeenTensor]
    """The tensors made, by name; only those that numpy can hold."""


def profile(
    model: ModelProto, folder: Path, threads: int, feed: Mapping[str, Array], allowance: Allowance | None = None
) -> NodeProfile:
    """Run *model*, whose large weights lie in *folder*, on *feed*."""
    allowance = allowance or Allowance()
    session = _opened(model, folder, _by_threads(threads))
    began_s, runs = perf_counter(), 0
    while runs < _FEWEST or (runs < _MOST and perf_counter() - began_s < _BUDGET_S):
        allowance.run(session, None, dict(feed))
        runs += 1
    times_us: dict[int, float] = {}
    tensors: dict[str, SeenTensor] = {}
    for place, event in _events(session):
        times_us[place] = min(event["dur"], times_us.get(place, math.inf))
        made = _made(model.graph.node[place], event)
        tensors |= {name: found for name, entry in made.items() if (found := _tensor(entry))}
    return NodeProfile(tuple(times_us.get(place, 0.0) / 1e6 for place in range(len(model.graph.node))), tensors)


class Tracer:
    """Runs graphs to look at them; large weights lie in its folder."""

    def __init__(self, folder: Path, threads: int, allowance: Allowance | None = None) -> None:
        self._folder, self._threads, self._allowance = folder, threads, allowance or Allowance()

    def trace(self, model: ModelProto, feed: Mapping[str, Array], wanted: Collection[str]) -> Seen:
        """The shapes of all tensors that *model* makes of *feed*, and the values of those that are *wanted*."""
        asked = ModelProto()
        asked.CopyFrom(model)
        outputs = [each.name for each in model.graph.output]
        asked.graph.output.extend(ValueInfoProto(name=name) for name in sorted({*wanted} - {*outputs}))
        session = _opened(asked, self._folder, _by_threads(self._threads, thrifty=False))
        values = self._allowance.run(session, None, dict(feed))
        shapes: dict[str, tuple[int, ...]] = {}
        for place, event in _events(session):
            made = _made(model.graph.node[place], event)
            shapes |= {name: tuple(shape) for name, entry in made.items() for shape in entry.values()}
        return Seen(shapes, dict(zip([each.name for each in asked.graph.output], values, strict=True)))

    def compute(self, model: ModelProto, feed: Mapping[str, Array]) -> list[Array]:
        """All outputs of a small *model*."""
        session = open_session(model.SerializeToString(), self._threads, optimise=False)
        return list(self._allowance.run(session, None, dict(feed)))


def seen_tensors(
    model: ModelProto, folder: Path, feed: Mapping[str, Array], opened: OpenProfiled
) -> dict[str, SeenTensor]:
    """The tensors that *model* makes of *feed* in one run, by name; *opened* opens it where it shall run."""
    session = _opened(model, folder, opened)
    session.run(None, dict(feed))
    found: dict[str, SeenTensor] = {}
    for place, event in _events(session):
        made = _made(model.graph.node[place], event)
        found |= {name: each for name, entry in made.items() if (each := _tensor(entry))}
    return found


def _by_threads(threads: int, *, thrifty: bool = True) -> OpenProfiled:
    return lambda path, trace: open_session(path, threads, optimise=False, profile=trace, thrifty=thrifty)


def _opened(model: ModelProto, folder: Path, opened: OpenProfiled) -> Any:
    """A session that keeps a trace, in which nodes go by their places."""
    named = ModelProto()
    named.CopyFrom(model)
    for position, node in enumerate(named.graph.node):
        node.name = f"{_NODE}{position}"
    path = folder / "profiled.onnx"
    onnx.save(named, path)
    session = opened(path, folder / "trace")
    path.unlink()
    return session


def _events(session: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """The runs of nodes in the order of time, each with the place of its node; the trace ends with them."""
    trace = Path(session.end_profiling())
    with open(trace, encoding="utf-8") as lines:
        for line in lines:  # an event each; a long trace read at once would hold up all other threads
            event = json.loads(line.rstrip().rstrip(",")) if _NODE in line else {}
            name, _, what = event.get("name", "").partition("_")
            if event.get("cat") == "Node" and what == "kernel_time" and name.startswith(_NODE):
                yield int(name.removeprefix(_NODE)), event
    trace.unlink()


def _made(node: NodeProto, event: Mapping[str, Any]) -> dict[str, Mapping[str, list[int]]]:
    """Tensor -> its type and shape; what is not a tensor is left out, and then nothing tells which is which."""
    names, found = list(filter(None, node.output)), event["args"].get("output_type_shape", [])
    return dict(zip(names, found, strict=True)) if len(names) == len(found) else {}


def _tensor(entry: Mapping[str, list[int]]) -> SeenTensor | None:
    """An entry of the trace, such as ``{"float": [1, 64]}``; None for types that numpy does not have."""
    ((kind, shape),) = entry.items()
    if kind not in _ITEM_BYTES:
        return None
    size_bytes = math.prod(shape) * _ITEM_BYTES[kind]
    return SeenTensor(TensorProto.DataType.Value(kind.upper()), size_bytes, tuple(shape))


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
