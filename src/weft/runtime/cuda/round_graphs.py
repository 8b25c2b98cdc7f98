"""A stitched graph with a fixed number of rows for each task.

A stitched file reads from its inputs how many rows each task has, and cuts and joins tensors by that. On a device this
would be computed on the host, copied, and cross every cut. In a round all tasks have the same known number of rows:
``RoundGraphs`` computes what follows from the rows alone and stores it in the graph. The graphs for different numbers
of rows have the same nodes, so that they can be cut at the same places.

ONNX Runtime joins tensors of different sizes by tables that it copies from the host every time, which cannot be
captured; here they are padded with zeros and added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from weft.models.onnx_graph import (
    Attributes,
    OnnxGraph,
    OnnxModel,
    OnnxNode,
    copied,
    declared,
    fill,
    make_node,
    move_outside,
    opsets,
    prune,
    rename_inputs,
    replace_nodes,
    to_tensor,
)
from weft.runtime.cutting import SeenTensor
from weft.runtime.onnxruntime_cpu.sessions import WEIGHTS
from weft.runtime.tensors import Array
from weft.runtime.values import Follower, inputs_of

OUTSIDE_FROM_BYTES = 1024
"""Weights of fewer bytes stay in the graph."""
_PAD_SINCE = 11
"""The opset from which Pad takes its sizes as a tensor."""

RunGraph = Callable[[OnnxModel, int], Sequence[Array]]
"""Runs a graph, some of whose inputs are the model's, on random samples; the number is that of each task."""


class RoundGraphs:
    """The graphs of one stitched model."""

    def __init__(self, model: OnnxModel, run: RunGraph) -> None:
        self._model, self._run = model, run
        self._known = _following(model)
        """Tensors that follow from the rows alone and are read together with others."""
        self._values: dict[int, Sequence[Array]] = {}
        self._uneven: dict[str, list[list[int]]] = {}
        """Concat outputs with inputs of different sizes -> the padding of each input."""

    def at(self, rows: int) -> OnnxModel:
        """The graph for *rows* rows of each task."""
        model = copied(self._model)
        graph, names = model.graph, {name: f"{name}@{rows}" for name in self._known}
        rename_inputs(graph.node, names)
        values = zip(names.values(), self._constant_values(rows), strict=True)
        graph.initializer.extend(to_tensor(np.asarray(value), name) for name, value in values)
        prune(graph)
        self._fill_up(graph)
        return model

    def _constant_values(self, rows: int) -> Sequence[Array]:
        if rows not in self._values:
            self._values[rows] = self._run(_giving(self._model, self._known), rows) if self._known else ()
        return self._values[rows]

    def even(self, tensors: Mapping[str, SeenTensor]) -> dict[str, SeenTensor]:
        """Pad the inputs of uneven Concats from now on; returns the padded tensors.

        tensors: those of a run with one row of each task.
        """
        filled: dict[str, SeenTensor] = {}
        for node in self.at(1).graph.node if opsets(self._model).get("", 0) >= _PAD_SINCE else ():
            if node.op_type == "Concat" and (pads := _pads(node, tensors)):
                self._uneven[node.output[0]] = pads
                filled |= dict.fromkeys(_padded_names(node), tensors[node.output[0]])
        return filled

    def _fill_up(self, graph: OnnxGraph) -> None:
        nodes = list[OnnxNode]()
        for node in graph.node:
            if (pads := self._uneven.get(node.output[0])) is None:
                nodes.append(node)
                continue
            filled = _padded_names(node)
            for source, name, ends in zip(node.input, filled, pads, strict=True):
                graph.initializer.append(to_tensor(np.array(ends, np.int64), f"{name}.pads"))
                nodes.append(make_node("Pad", [source, f"{name}.pads"], [name], name))
            nodes.append(make_node("Sum", filled, node.output, node.name))
        fill(graph.node, nodes)


def weights_outside(model: OnnxModel, folder: Path) -> None:
    """Move weights to the file in *folder* that holds the large ones, so that graphs for several sizes share them."""
    with open(folder / WEIGHTS, "ab") as file:
        for weight in model.graph.initializer:
            if len(weight.raw_data) >= OUTSIDE_FROM_BYTES:
                file.write(move_outside(weight, WEIGHTS, file.tell()))


def _following(model: OnnxModel) -> list[str]:
    """Tensors that do not depend on the values of inputs and are read by nodes whose results do."""
    graph, facts = model.graph, inputs_of(model.graph)
    Follower(model.functions).through(graph.node, facts)
    steady = {name for node in graph.node for name in node.output if name and not facts[name].valued}
    computing = [node for node in graph.node if not steady.issuperset(filter(None, node.output))]
    return list(dict.fromkeys(name for node in computing for name in node.input if name in steady))


def _giving(model: OnnxModel, names: Sequence[str]) -> OnnxModel:
    """The part of a model that computes only these tensors, with only the inputs that they need."""
    part = copied(model)
    graph = part.graph
    fill(graph.output, [declared(name) for name in names])
    prune(graph)
    replace_nodes(graph, graph.node)
    read = {name for node in graph.node for name in node.input}
    fill(graph.input, [value for value in graph.input if value.name in read])
    return part


def _padded_names(node: OnnxNode) -> list[str]:
    """Names of the padded inputs of a node."""
    return [f"{node.output[0]}@{place}" for place in range(len(node.input))]


def _pads(node: OnnxNode, tensors: Mapping[str, SeenTensor]) -> list[list[int]] | None:
    """Padding of the inputs of a Concat, before and behind; None if it can stay.

    A Concat of rows stays: all tasks have the same number.
    """
    shapes = [tensors[name].shape for name in node.input if name in tensors]
    axis = Attributes(node).integer("axis", 0)
    if len(shapes) < len(node.input) or not shapes[0]:
        return None
    rank = len(shapes[0])
    axis %= rank
    sizes = [shape[axis] for shape in shapes]
    if axis == 0 or len(set(sizes)) == 1:
        return None
    pads = []
    for place in range(len(sizes)):
        ends = [0] * (2 * rank)
        ends[axis], ends[rank + axis] = sum(sizes[:place]), sum(sizes[place + 1 :])
        pads.append(ends)
    return pads
