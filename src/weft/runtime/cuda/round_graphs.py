"""A stitched graph with a fixed number of rows for each task.

A stitched file reads from its inputs how many rows each task has, and cuts and joins tensors by these numbers. On a
device the numbers would be computed on the host, copied, and cross every cut. In a round all tasks have the same known
number of rows: ``RoundGraphs`` computes the tensors that depend on the rows alone, and stores them in the graph. The
graphs for different numbers of rows have the same nodes, so that they can be cut at the same places.

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
"""Runs a graph, whose inputs are some of the model's, on random samples, with a number of rows of each task."""


class RoundGraphs:
    """The graphs of one stitched model for fixed numbers of rows; *run* computes their constants on the device."""

    def __init__(self, model: OnnxModel, run: RunGraph) -> None:
        self._model, self._run = model, run
        self._row_constants = _constants_of_rows(model)
        """Tensors that depend on the numbers of rows alone, and are read by nodes that compute with samples."""
        self._values: dict[int, Sequence[Array]] = {}  # rows of each task -> the values of these tensors
        self._concat_pads: dict[str, list[list[int]]] = {}
        """Output of a Concat of different sizes -> the padding of each input, before and behind for each axis."""

    def graph_for(self, rows: int) -> OnnxModel:
        """The graph for *rows* rows of each task."""
        model = copied(self._model)
        # Nodes read constants under new names; the nodes that computed these tensors are then unused, and pruned.
        graph, names = model.graph, {name: f"{name}@{rows}" for name in self._row_constants}
        rename_inputs(graph.node, names)
        values = zip(names.values(), self._constant_values(rows), strict=True)
        graph.initializer.extend(to_tensor(np.asarray(value), name) for name, value in values)
        prune(graph)
        self._pad_concats(graph)
        return model

    def _constant_values(self, rows: int) -> Sequence[Array]:
        """The values, for *rows* rows of each task, of the tensors that depend on the rows alone."""
        if rows not in self._values:
            names = self._row_constants
            self._values[rows] = self._run(_submodel(self._model, names), rows) if names else ()
        return self._values[rows]

    def plan_concat_padding(self, tensors: Mapping[str, SeenTensor]) -> dict[str, SeenTensor]:
        """Find the Concats of different sizes; ``graph_for`` replaces them from now on by sums of padded inputs.

        tensors: by name, as observed in a run of the graph for one row of each task. Returns the padded inputs in the
        same form; each is as large as the result of its Concat.
        """
        padded: dict[str, SeenTensor] = {}
        for node in self.graph_for(1).graph.node if opsets(self._model).get("", 0) >= _PAD_SINCE else ():
            if node.op_type == "Concat" and (pads := _concat_padding(node, tensors)):
                self._concat_pads[node.output[0]] = pads
                padded |= dict.fromkeys(_padded_names(node), tensors[node.output[0]])
        return padded

    def _pad_concats(self, graph: OnnxGraph) -> None:
        """Replace Concats with inputs of different sizes by the sum of the padded inputs."""
        nodes = list[OnnxNode]()
        for node in graph.node:
            if (pads := self._concat_pads.get(node.output[0])) is None:
                nodes.append(node)
                continue
            padded_names = _padded_names(node)
            for source, name, ends in zip(node.input, padded_names, pads, strict=True):
                graph.initializer.append(to_tensor(np.array(ends, np.int64), f"{name}.pads"))
                nodes.append(make_node("Pad", [source, f"{name}.pads"], [name], name))
            nodes.append(make_node("Sum", padded_names, node.output, node.name))
        fill(graph.node, nodes)


def weights_outside(model: OnnxModel, folder: Path) -> None:
    """Move weights to the weights file in *folder*, so that the graphs for several sizes share them."""
    with open(folder / WEIGHTS, "ab") as file:
        for weight in model.graph.initializer:
            if len(weight.raw_data) >= OUTSIDE_FROM_BYTES:
                file.write(move_outside(weight, WEIGHTS, file.tell()))


def _constants_of_rows(model: OnnxModel) -> list[str]:
    """Names of tensors that do not depend on the values of inputs, but are read by nodes whose results do."""
    graph, facts = model.graph, inputs_of(model.graph)
    Follower(model.functions).through(graph.node, facts)
    row_constants = {name for node in graph.node for name in node.output if name and not facts[name].valued}
    computing = [node for node in graph.node if not row_constants.issuperset(filter(None, node.output))]
    return list(dict.fromkeys(name for node in computing for name in node.input if name in row_constants))


def _submodel(model: OnnxModel, names: Sequence[str]) -> OnnxModel:
    """The part of a model that computes the tensors *names*, with only the inputs that these need."""
    part = copied(model)
    graph = part.graph
    fill(graph.output, [declared(name) for name in names])
    prune(graph)
    replace_nodes(graph, graph.node)  # removes weights that are no longer read
    read = {name for node in graph.node for name in node.input}
    fill(graph.input, [value for value in graph.input if value.name in read])
    return part


def _padded_names(node: OnnxNode) -> list[str]:
    """Names of the padded inputs of a node."""
    return [f"{node.output[0]}@{index}" for index in range(len(node.input))]


def _concat_padding(node: OnnxNode, tensors: Mapping[str, SeenTensor]) -> list[list[int]] | None:
    """The padding of each input of a Concat, before and behind for each axis; None if the Concat can stay.

    A Concat of rows stays, as all tasks have the same number of rows, and so does one of equal sizes.
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
    for index in range(len(sizes)):
        padding = [0] * (2 * rank)  # first before all axes, then behind them
        padding[axis], padding[rank + axis] = sum(sizes[:index]), sum(sizes[index + 1 :])
        pads.append(padding)
    return pads
