"""A stitched graph for so many rows of each task.

A stitched file reads from its inputs how many rows each task has, and cuts and joins tensors by that. On a device this
would be worked out on the host, copied, and cross every cut. In a round all tasks have as many rows, and how many is
known: ``RoundGraphs`` works out what follows from the rows alone and writes it down. The graphs for different numbers
of rows have the same nodes, so that they can be cut at the same places.

ONNX Runtime puts tensors of different sizes together by tables that it copies from the host every time, which cannot
be captured; here they are filled up with zeros and added.
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
"""Smaller weights stay in the graph."""
_PAD_SINCE = 11
"""The version of ONNX's operators since which Pad takes its numbers as a tensor."""

RunGraph = Callable[[OnnxModel, int], Sequence[Array]]
"""Runs a graph, some of whose inputs are the model's, on made-up samples: so many of each task."""


class RoundGraphs:
    """The graphs of one stitched model."""

    def __init__(self, model: OnnxModel, run: RunGraph) -> None:
        self._model, self._run = model, run
        self._known = _following(model)
        """What follows from the rows alone and is needed with what does not."""
        self._values: dict[int, Sequence[Array]] = {}
        self._uneven: dict[str, list[list[int]]] = {}
        """Tensors that are put together of different sizes -> how each of those is filled up."""

    def at(self, rows: int) -> OnnxModel:
        """The graph for so many rows of each task."""
        found = copied(self._model)
        graph, names = found.graph, {name: f"{name}@{rows}" for name in self._known}
        rename_inputs(graph.node, names)
        values = zip(names.values(), self._valued(rows), strict=True)
        graph.initializer.extend(to_tensor(np.asarray(value), name) for name, value in values)
        prune(graph)
        self._fill_up(graph)
        return found

    def _valued(self, rows: int) -> Sequence[Array]:
        if rows not in self._values:
            self._values[rows] = self._run(_giving(self._model, self._known), rows) if self._known else ()
        return self._values[rows]

    def even(self, tensors: Mapping[str, SeenTensor]) -> dict[str, SeenTensor]:
        """Fill up what is put together of different sizes from now on; returns the tensors that this makes.

        tensors: those of a run with one row of each task.
        """
        made: dict[str, SeenTensor] = {}
        for node in self.at(1).graph.node if opsets(self._model).get("", 0) >= _PAD_SINCE else ():
            if node.op_type == "Concat" and (pads := _pads(node, tensors)):
                self._uneven[node.output[0]] = pads
                made |= dict.fromkeys(_filled(node), tensors[node.output[0]])
        return made

    def _fill_up(self, graph: OnnxGraph) -> None:
        nodes = list[OnnxNode]()
        for node in graph.node:
            if (pads := self._uneven.get(node.output[0])) is None:
                nodes.append(node)
                continue
            filled = _filled(node)
            for source, name, ends in zip(node.input, filled, pads, strict=True):
                graph.initializer.append(to_tensor(np.array(ends, np.int64), f"{name}.pads"))
                nodes.append(make_node("Pad", [source, f"{name}.pads"], [name], name))
            nodes.append(make_node("Sum", filled, node.output, node.name))
        fill(graph.node, nodes)


def weights_outside(model: OnnxModel, folder: Path) -> None:
    """Move weights to the file in *folder* that has the large ones already: graphs for many rows have them once."""
    with open(folder / WEIGHTS, "ab") as file:
        for each in model.graph.initializer:
            if len(each.raw_data) >= OUTSIDE_FROM_BYTES:
                file.write(move_outside(each, WEIGHTS, file.tell()))


def _following(model: OnnxModel) -> list[str]:
    """What does not depend on the values of the inputs, and is taken by nodes whose results do."""
    graph, facts = model.graph, inputs_of(model.graph)
    Follower(model.functions).through(graph.node, facts)
    steady = {name for node in graph.node for name in node.output if name and not facts[name].valued}
    computing = [node for node in graph.node if not steady.issuperset(filter(None, node.output))]
    return list(dict.fromkeys(name for node in computing for name in node.input if name in steady))


def _giving(model: OnnxModel, names: Sequence[str]) -> OnnxModel:
    """A model that gives only these tensors, of the inputs that it takes for them."""
    found = copied(model)
    graph = found.graph
    fill(graph.output, [declared(name) for name in names])
    prune(graph)
    replace_nodes(graph, graph.node)
    read = {name for node in graph.node for name in node.input}
    fill(graph.input, [each for each in graph.input if each.name in read])
    return found


def _filled(node: OnnxNode) -> list[str]:
    """What the inputs of a node are called once they are filled up."""
    return [f"{node.output[0]}@{place}" for place in range(len(node.input))]


def _pads(node: OnnxNode, tensors: Mapping[str, SeenTensor]) -> list[list[int]] | None:
    """By how much the inputs of a Concat are filled up before and behind; None if they may stay as they are.

    Rows are put together as they are: there are as many of each task.
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
    found = []
    for place in range(len(sizes)):
        ends = [0] * (2 * rank)
        ends[axis], ends[rank + axis] = sum(sizes[:place]), sum(sizes[place + 1 :])
        found.append(ends)
    return found
