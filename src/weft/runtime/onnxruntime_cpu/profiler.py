"""ONNX Runtime's profiler: times of the nodes of a graph, and the types and shapes of their outputs.

A trace names nodes as the file does, but optimisation may add text before or behind a name. So nodes get a name with a
number (``mark``), which ``node_events`` finds in the trace.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft.models.element_types import ElementType
from weft.models.onnx_graph import OnnxModel, copied, declared, save
from weft.runtime.cutting import SeenTensor
from weft.runtime.onnxruntime_cpu.allowance import Allowance
from weft.runtime.onnxruntime_cpu.sessions import open_session
from weft.runtime.rows import Seen
from weft.runtime.tensors import Array
from weft.runtime.timing import measure_in_turns, run_all

_BUDGET_S, _FEWEST_RUNS, _MOST_RUNS = 2.0, 3, 12
"""Time budget of profiled runs, and their least and largest number."""
_STRING_BYTES = 32
"""Assumed size of a string with its object."""
_MARK = re.compile(r"weft@(\d+)@")

OpenProfiled = Callable[[Path, Path], Any]
"""Opens the model in the file of the first path as a session; the second path is the prefix of its trace file."""


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """Times of nodes, and their output tensors."""

    times_s: tuple[float, ...]  # fastest time of each node, in order
    tensors: Mapping[str, SeenTensor]  # output tensors by name; only those of types that numpy has


def mark(number: int) -> str:
    """A node's name, or the beginning of a name, by which ``node_events`` finds the node and its *number*."""
    return f"weft@{number}@"


def node_events(session: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """End the session's profiling; yield the number and the trace event of every run of a marked node, in time order.

    ``dur`` of an event is in microseconds. Nodes inside control flow have no mark. The trace is removed at the end.
    """
    trace = Path(session.end_profiling())
    with open(trace, encoding="utf-8") as lines:
        for line in lines:  # one event per line; parsing a long trace at once would hold the GIL for long
            marked = _MARK.search(line)  # a fast test, as the mark may be outside of the name
            event = json.loads(line.rstrip().rstrip(",")) if marked else {}
            marked = _MARK.search(event.get("name", ""))
            if marked and event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
                yield int(marked[1]), event
    trace.unlink()


def profile(
    model: OnnxModel, folder: Path, threads: int, feed: Mapping[str, Array], allowance: Allowance | None = None
) -> NodeProfile:
    """Run *model*, whose large weights are in *folder*, on *feed*; return the times and output tensors of its nodes."""
    session = _open_marked(model, folder, _opener(threads))
    run = partial((allowance or Allowance()).run, session, None, dict(feed))
    # ``run_all`` drops the outputs; the times are in the trace.
    measure_in_turns([partial(run_all, [run])], _MOST_RUNS, fewest=_FEWEST_RUNS, longest_s=_BUDGET_S)
    trace = _read_trace(model, session)
    times_s = tuple(trace.times_us.get(index, 0.0) / 1e6 for index in range(len(model.graph.node)))
    return NodeProfile(times_s, trace.tensors())


class Tracer:
    """Runs graphs and returns their inner tensors; large weights are in its folder."""

    def __init__(self, folder: Path, threads: int, allowance: Allowance | None = None) -> None:
        self._folder, self._threads, self._allowance = folder, threads, allowance or Allowance()

    def trace(self, model: OnnxModel, feed: Mapping[str, Array], wanted: Collection[str]) -> Seen:
        """Run *model* on *feed*; returns the shapes of all tensors, and the values of those that are *wanted*."""
        with_outputs = copied(model)
        outputs = [output.name for output in model.graph.output]
        with_outputs.graph.output.extend(declared(name) for name in sorted({*wanted} - {*outputs}))
        session = _open_marked(with_outputs, self._folder, _opener(self._threads, thrifty=False))
        values = self._allowance.run(session, None, dict(feed))
        entries = _read_trace(model, session).entries
        shapes = {name: tuple(shape) for name, entry in entries.items() for shape in entry.values()}  # one per entry
        return Seen(shapes, dict(zip([output.name for output in with_outputs.graph.output], values, strict=True)))

    def compute(self, model: OnnxModel, feed: Mapping[str, Array]) -> list[Array]:
        """All outputs of a small *model*."""
        session = open_session(model.SerializeToString(), self._threads, optimise=False)
        return list(self._allowance.run(session, None, dict(feed)))


def seen_tensors(
    model: OnnxModel, folder: Path, feed: Mapping[str, Array], opened: OpenProfiled
) -> dict[str, SeenTensor]:
    """Run *model* on *feed* once; return its tensors by name. *opened* opens the model on the device that runs it."""
    session = _open_marked(model, folder, opened)
    session.run(None, dict(feed))
    return _read_trace(model, session).tensors()


def _opener(threads: int, *, thrifty: bool = True) -> OpenProfiled:
    """Return a function that opens a profiled session on the CPU; *thrifty*: as for ``open_session``."""
    return lambda path, trace: open_session(path, threads, optimise=False, profile=trace, thrifty=thrifty)


def _open_marked(model: OnnxModel, folder: Path, open_profiled: OpenProfiled) -> Any:
    """Open *model* as a profiled session, in which each node is marked with its index; *folder* has its weights."""
    marked = copied(model)
    for position, node in enumerate(marked.graph.node):
        node.name = mark(position)
    path = folder / "profiled.onnx"
    save(marked, path)
    session = open_profiled(path, folder / "trace")
    path.unlink()
    return session


class _Trace(NamedTuple):
    """Content of a trace, by nodes and tensors of the graph."""

    times_us: Mapping[int, float]  # index of a node -> microseconds of its fastest run
    entries: Mapping[str, Mapping[str, list[int]]]
    """Tensor -> its type and shape as the trace has them, such as ``{"float": [1, 64]}``."""

    def tensors(self) -> dict[str, SeenTensor]:
        """The tensors of types that numpy has."""
        tensors = ((name, *next(iter(entry.items()))) for name, entry in self.entries.items())  # name, type, shape
        return {name: _seen_tensor(kind, shape) for name, kind, shape in tensors if kind in _ITEM_BYTES}


def _read_trace(model: OnnxModel, session: Any) -> _Trace:
    """End the profiling of a session over *model*, and read its trace."""
    times_us: dict[int, float] = {}
    entries: dict[str, Mapping[str, list[int]]] = {}
    for index, event in node_events(session):
        times_us[index] = min(event["dur"], times_us.get(index, math.inf))
        names, outputs = [*filter(None, model.graph.node[index].output)], event["args"].get("output_type_shape", [])
        # A trace leaves out outputs that are no tensors; then the others cannot be assigned to names.
        if len(names) == len(outputs):
            entries |= zip(names, outputs, strict=True)
    return _Trace(times_us, entries)


def _seen_tensor(kind: str, shape: list[int]) -> SeenTensor:
    """Describe a tensor; *kind*: its type as the trace names it."""
    size_bytes = math.prod(shape) * _ITEM_BYTES[kind]
    return SeenTensor(int(ElementType[kind.upper()]), size_bytes, tuple(shape))


_NUMBERS = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 double"
_ITEM_BYTES = {"string": _STRING_BYTES, "float": 4} | {kind: np.dtype(kind).itemsize for kind in _NUMBERS.split()}
"""Type as the trace names it -> bytes of an element."""
