"""Cuts of an optimised graph into segments, and the models of those segments.

A cut is a position in the order of the nodes: cut 3 is before node 3. Nothing here runs a model; the times of nodes
and the sizes of tensors come from ``onnxruntime_cpu.profiler``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from weft.base.errors import ModelError
from weft.models.element_types import numpy_dtype
from weft.models.onnx_graph import (
    OnnxGraph,
    OnnxModel,
    OnnxNode,
    OnnxValue,
    bodies,
    constant_tensor,
    declared,
    fill,
    initializers,
    last_uses,
    make_model,
    needed_places,
)
from weft.runtime.values import unsteady

BANDWIDTH_BYTES_PER_S = 5e9
"""Assumed speed of the additional write and read of a tensor that crosses a cut."""
CUT_COST_S = 15e-6
"""Assumed seconds of one more call of ONNX Runtime."""
WORTH_CUTTING = 1.6
"""A model shorter than this many grains stays whole."""
DEVICE_GRAIN_S = 0.00025
"""Default length of a segment on a GPU."""
GRAINS_AT_MOST = 4
"""A segment on a GPU takes at most one grain at batch 1, and at most this many at the largest batch."""
_GROWTH = 1.1
"""Least factor by which the grain grows while there are too many pieces."""


class SeenTensor(NamedTuple):
    """A tensor inside a graph, as observed in a run."""

    element_type: int  # its type, as ONNX numbers them
    size_bytes: int
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelPiece:
    """The nodes between two cuts, as a model of its own."""

    name: str
    model: OnnxModel
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    steady: bool
    """Whether its run time depends only on the shapes of the model's inputs (``weft.runtime.values``)."""


def whole_because(graph: OnnxGraph) -> str | None:
    """The reason why a graph cannot be cut anywhere, as the predicate of a sentence; None if it can be cut."""
    for node in graph.node:
        if bodies(node):
            return f"has control flow ({node.op_type})"
    if graph.sparse_initializer:
        return "has sparse weights"
    return "has a single node" if len(graph.node) < 2 else None


def arrange(graph: OnnxGraph, exits: Sequence[str]) -> tuple[int, ...]:
    """Sort the nodes of *graph* in place by the first exit that needs them; return the cuts at all exits but the last.

    *exits* are outputs of the graph, the end last. Nodes that no exit needs are removed, and so are all other outputs.
    The nodes between two exits keep their order.
    """
    needed = [set(needed_places(graph.node, [name])) for name in exits]
    _check_order(exits, needed)
    order: dict[int, None] = {}  # the new order of the nodes: their old positions, without duplicates
    exit_cuts = []
    for positions in needed:
        order |= dict.fromkeys(sorted(positions))
        exit_cuts.append(len(order))
    fill(graph.node, [graph.node[position] for position in order])
    fill(graph.output, [next(value for value in graph.output if value.name == name) for name in exits])
    return tuple(exit_cuts[:-1])


def _check_order(exits: Sequence[str], needed: Sequence[set[int]]) -> None:
    """Raise ``ModelError`` unless *exits* are named shallow to deep. *needed*: the nodes that each exit needs.

    The deeper of two exits is the one that shares more nodes with other exits; on a tie, the one that needs more nodes.
    """
    if not needed[0]:
        raise ModelError(f"exit {exits[0]!r} is known before anything is computed; name exits shallow to deep")
    depths = [(_count_shared(places, needed), len(places)) for places in needed]
    for index, (before, after) in enumerate(pairwise(exits)):
        if needed[index + 1] <= needed[index]:
            raise ModelError(f"exit {after!r} is known as soon as exit {before!r} is; name exits shallow to deep")
        if depths[index] > depths[index + 1]:
            raise ModelError(f"exit {before!r} is deeper than {after!r}, which follows it; name exits shallow to deep")


def _count_shared(nodes: set[int], needed: Sequence[set[int]]) -> int:
    """The number of *nodes* (one entry of *needed*) that other entries of *needed* contain, too."""
    return len(nodes & set[int]().union(*(others for others in needed if others is not nodes)))


def crossing_bytes(graph: OnnxGraph, tensors: Mapping[str, SeenTensor]) -> list[int | None]:
    """For each cut, from before the first node to after the last, the bytes of tensors that cross it.

    None where a tensor crosses that is not in *tensors*. Inputs of the graph cost nothing, nor do its outputs once no
    node needs them: they are in memory anyway.
    """
    last = last_uses(graph.node)
    # Changes from cut to cut: of the crossing bytes, and of the number of crossing tensors whose size is unknown.
    byte_changes, unknown_changes = [0] * (len(graph.node) + 2), [0] * (len(graph.node) + 2)
    for position, node in enumerate(graph.node):
        for name in filter(None, node.output):
            end = last.get(name, position)
            tensor = tensors.get(name)
            amount, changes = (tensor.size_bytes, byte_changes) if tensor else (1, unknown_changes)
            changes[position + 1] += amount
            changes[end + 1] -= amount
    sums = zip(accumulate(byte_changes), accumulate(unknown_changes), strict=True)
    # Without the last sum, at which the tensors of the last cut are freed.
    return [None if unknown_tensors else crossing for crossing, unknown_tensors in sums][:-1]


def worth_cutting(total_s: float, grain_s: float) -> bool:
    """Whether a model takes long enough to be cut."""
    return total_s >= WORTH_CUTTING * grain_s


def device_length_s(alone_s: float, batched_s: float) -> float:
    """Seconds of a node on a GPU that are compared with the grain.

    *alone_s*: measured at batch 1; *batched_s*: at the largest batch, at which a segment may take several grains.
    """
    return max(alone_s, batched_s / GRAINS_AT_MOST)


def choose_cuts(
    times_s: Sequence[float],
    crossing: Sequence[int | None],
    grain_s: float,
    max_pieces: int,
    forced: Sequence[int] = (),
) -> tuple[int, ...]:
    """The cheapest cuts that leave no segment longer than *grain_s*, except where no cut is allowed.

    A cut costs a fixed time and the transfer of what crosses it. *times_s*: seconds of each node. *crossing*: for each
    cut, the bytes that cross it (``crossing_bytes``); None where no cut is allowed. *forced*: cuts that are made in any
    case. The grain grows until *max_pieces* are enough.
    """
    total_s = sum(times_s)
    cuts = _cut_stretches(times_s, crossing, grain_s, forced)
    while len(cuts) >= max(max_pieces, len(forced) + 1):  # a piece too many; forced cuts stay
        grain_s = max(grain_s * _GROWTH, total_s / max_pieces)
        cuts = _cut_stretches(times_s, crossing, grain_s, forced)
    return cuts


def _cut_stretches(
    times_s: Sequence[float], crossing: Sequence[int | None], grain_s: float, forced: Sequence[int]
) -> tuple[int, ...]:
    """The *forced* cuts, and the cheapest cuts of each stretch between two of them that is worth cutting.

    *times_s*: of each node. *crossing*: for each possible cut, both ends included, the bytes that cross it; None where
    no cut is allowed. *grain_s*: wanted length of a segment.
    """
    cuts = list(forced)
    for start, end in pairwise((0, *forced, len(times_s))):
        stretch_s = times_s[start:end]
        if worth_cutting(sum(stretch_s), grain_s):
            cuts += [start + cut for cut in _cheapest_cuts(stretch_s, crossing[start : end + 1], grain_s)]
    return tuple(sorted(cuts))


def _cheapest_cuts(times_s: Sequence[float], crossing: Sequence[int | None], grain_s: float) -> tuple[int, ...]:
    """The cheapest cuts that leave no segment longer than *grain_s*, where cuts are allowed; see ``_cut_stretches``.

    A shortest path over the allowed cuts, in linear time: a window holds the cuts within a grain, the cheapest first. A
    new cut removes all dearer cuts from the end of the window, since it stays in reach for longer than they do.
    """
    starts_s = [0.0, *accumulate(times_s)]  # cut -> seconds of all nodes before it
    reach_s = grain_s * (1 + 1e-9)  # sums of times round
    cost = {0: 0.0}
    """Cut -> cost in seconds of the cheapest cuts up to it."""
    previous_cut: dict[int, int] = {}
    """Cut -> the cut before it on the cheapest path to it."""
    window = deque([0])
    for cut in range(1, len(starts_s)):
        size_bytes = crossing[cut]
        if size_bytes is None:
            continue
        # The last cut stays even if it is out of reach: where no cut is allowed, a segment is longer than the grain.
        while len(window) > 1 and starts_s[cut] - starts_s[window[0]] > reach_s:
            window.popleft()
        previous_cut[cut] = window[0]
        cost[cut] = cost[window[0]] + size_bytes / BANDWIDTH_BYTES_PER_S + CUT_COST_S
        while window and cost[window[-1]] >= cost[cut]:
            window.pop()
        window.append(cut)
    return tuple(reversed(list(_trace_back(previous_cut, len(times_s)))))


def _trace_back(previous_cut: Mapping[int, int], end: int) -> Iterator[int]:
    """Yield the cuts of the path to *end*, from the last to the first, without the two ends of the graph."""
    cut = end
    while (cut := previous_cut[cut]) > 0:
        yield cut


def split(model: OnnxModel, cuts: Sequence[int], types: Mapping[str, int]) -> list[ModelPiece]:
    """Split a model at *cuts* into one model per segment. *types*: ONNX element types of tensors that cross a cut."""
    graph = model.graph
    last = last_uses(graph.node)
    graph_outputs = {value.name for value in graph.output}
    unsteady_nodes = unsteady(model)
    pieces = []
    for start, end in pairwise((0, *cuts, len(graph.node))):
        nodes = graph.node[start:end]
        produced = [name for node in nodes for name in node.output if name]
        outputs = [name for name in produced if last.get(name, -1) >= end or name in graph_outputs]
        if end == len(graph.node):
            outputs += _constant_outputs(graph)
        pieces.append(_make_piece(model, nodes, outputs, types, steady=not any(unsteady_nodes[start:end])))
    return pieces


def _make_piece(
    model: OnnxModel, nodes: Sequence[OnnxNode], outputs: list[str], types: Mapping[str, int], *, steady: bool
) -> ModelPiece:
    """The model of some consecutive *nodes*, with the weights that they need; *outputs*: tensors that it returns."""
    graph = model.graph
    declared_values = {value.name: value for value in (*graph.input, *graph.output)}
    produced = {name for node in nodes for name in node.output}
    needed = dict.fromkeys(name for node in nodes for name in node.input if name and name not in produced)
    weights = [tensor for tensor in graph.initializer if tensor.name in needed or tensor.name in outputs]
    weight_names = {tensor.name for tensor in weights}
    inputs = [name for name in needed if name not in weight_names]
    name = nodes[0].name if len(nodes) == 1 else f"{nodes[0].name}..{nodes[-1].name}"
    input_values = [_declare_value(name, declared_values, types) for name in inputs]
    output_values = [_declare_value(name, declared_values, types) for name in outputs]
    piece_model = make_model(nodes, name, input_values, output_values, weights, like=model)
    return ModelPiece(name, piece_model, tuple(inputs), tuple(outputs), steady)


def _declare_value(name: str, stated: Mapping[str, OnnxValue], types: Mapping[str, int]) -> OnnxValue:
    """Declaration of a tensor: the graph's own (*stated*), else one without a shape, which depends on the batch."""
    return stated[name] if name in stated else declared(name, types[name])


def scratch_bytes(graph: OnnxGraph, tensors: Mapping[str, SeenTensor]) -> int:
    """Peak memory of the tensors inside a graph, if each is freed after its last use."""
    last = last_uses(graph.node)
    change = [0] * (len(graph.node) + 1)  # of the allocated bytes, from node to node
    for position, node in enumerate(graph.node):
        for name in node.output:
            size_bytes = tensors[name].size_bytes if name in tensors else 0
            change[position] += size_bytes
            change[last.get(name, position) + 1] -= size_bytes
    return max(accumulate(change))


def weight_bytes(graph: OnnxGraph) -> int:
    """Bytes of the initialisers and constants of a graph, including external data and the bodies of control flow."""
    weights: int = sum(math.prod(tensor.dims) * numpy_dtype(tensor.data_type).itemsize for tensor in graph.initializer)
    constants = [tensor for node in graph.node if (tensor := constant_tensor(node)) is not None]
    nested = [body for node in graph.node for body in bodies(node)]
    return weights + sum(int(tensor.ByteSize()) for tensor in constants) + sum(map(weight_bytes, nested))


def _constant_outputs(graph: OnnxGraph) -> list[str]:
    """Names of the outputs that the optimiser turned into weights; no node computes them."""
    weights = initializers(graph)
    return [value.name for value in graph.output if value.name in weights]
