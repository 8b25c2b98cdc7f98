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
"""Cost of one more call of ONNX Runtime."""
WORTH_CUTTING = 1.6
"""A model shorter than this many grains stays whole."""
DEVICE_GRAIN_S = 0.00025
"""Default length of a segment on a GPU."""
GRAINS_AT_MOST = 4
"""A segment on a GPU takes at most one grain at batch 1, and at most this many at the largest batch."""
_GROWTH = 1.1
"""Factor by which the grain grows while there are too many pieces."""


class SeenTensor(NamedTuple):
    """A tensor inside a graph, as observed in a run."""

    element_type: int
    """Its type, as ONNX numbers them."""
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
    """Whether its time follows from the shapes of the model's inputs (``weft.runtime.values``)."""


def whole_because(graph: OnnxGraph) -> str | None:
    """Why a graph cannot be cut anywhere, or None."""
    for node in graph.node:
        if bodies(node):
            return f"has control flow ({node.op_type})"
    if graph.sparse_initializer:
        return "has sparse weights"
    return "has a single node" if len(graph.node) < 2 else None


def arrange(graph: OnnxGraph, exits: Sequence[str]) -> tuple[int, ...]:
    """Put the nodes that an exit needs before those that only later ones need; returns the cuts at the exits.

    *exits* are outputs of the graph, the end last; nodes that none of them needs are taken out, and so are all other
    outputs. The nodes of a stretch between two exits keep their order.
    """
    needed = [set(needed_places(graph.node, [name])) for name in exits]
    _check_order(exits, needed)
    order: dict[int, None] = {}
    ends = []
    for places in needed:
        order |= dict.fromkeys(sorted(places))
        ends.append(len(order))
    fill(graph.node, [graph.node[position] for position in order])
    fill(graph.output, [next(value for value in graph.output if value.name == name) for name in exits])
    return tuple(ends[:-1])


def _check_order(exits: Sequence[str], needed: Sequence[set[int]]) -> None:
    """Refuse exits out of order: the deeper one shares more nodes with the others, or else needs more nodes."""
    if not needed[0]:
        raise ModelError(f"exit {exits[0]!r} is known before anything is computed; name exits shallow to deep")
    depths = [(_count_shared(places, needed), len(places)) for places in needed]
    for at, (before, after) in enumerate(pairwise(exits)):
        if needed[at + 1] <= needed[at]:
            raise ModelError(f"exit {after!r} is known as soon as exit {before!r} is; name exits shallow to deep")
        if depths[at] > depths[at + 1]:
            raise ModelError(f"exit {before!r} is deeper than {after!r}, which follows it; name exits shallow to deep")


def _count_shared(nodes: set[int], needed: Sequence[set[int]]) -> int:
    """How many of an exit's nodes other exits need, too."""
    return len(nodes & set[int]().union(*(others for others in needed if others is not nodes)))


def crossing_bytes(graph: OnnxGraph, tensors: Mapping[str, SeenTensor]) -> list[int | None]:
    """For each cut, the two ends included, the bytes that cross it; None where a tensor of unknown type does.

    Inputs of the graph cost nothing, nor do its outputs once no node needs them: they are in memory anyway.
    """
    last = last_uses(graph.node)
    size, unknown = [0] * (len(graph.node) + 2), [0] * (len(graph.node) + 2)
    for position, node in enumerate(graph.node):
        for name in filter(None, node.output):
            end = last.get(name, position)
            tensor = tensors.get(name)
            change, column = (tensor.size_bytes, size) if tensor else (1, unknown)
            column[position + 1] += change
            column[end + 1] -= change
    sums = zip(accumulate(size), accumulate(unknown), strict=True)
    return [None if strange else crossing for crossing, strange in sums][:-1]


def worth_cutting(total_s: float, grain_s: float) -> bool:
    """Whether a model takes long enough to be cut."""
    return total_s >= WORTH_CUTTING * grain_s


def device_length_s(alone_s: float, batched_s: float) -> float:
    """The length of nodes on a GPU, as compared with the grain: of times at batch 1 and at the largest batch."""
    return max(alone_s, batched_s / GRAINS_AT_MOST)


def choose_cuts(
    times_s: Sequence[float],
    crossing: Sequence[int | None],
    grain_s: float,
    max_pieces: int,
    forced: Sequence[int] = (),
) -> tuple[int, ...]:
    """The cheapest cuts that leave no segment longer than *grain_s*, except what cannot be cut.

    The grain grows where that takes more than *max_pieces*. *forced* are cuts that are made in any case.
    """
    total_s = sum(times_s)
    cuts = _between(times_s, crossing, grain_s, forced)
    while len(cuts) >= max(max_pieces, len(forced) + 1):
        grain_s = max(grain_s * _GROWTH, total_s / max_pieces)
        cuts = _between(times_s, crossing, grain_s, forced)
    return cuts


def _between(
    times_s: Sequence[float], crossing: Sequence[int | None], grain_s: float, forced: Sequence[int]
) -> tuple[int, ...]:
    """The forced cuts, and the cheapest ones in each stretch between them that is long enough."""
    cuts = list(forced)
    for start, end in pairwise((0, *forced, len(times_s))):
        stretch_s = times_s[start:end]
        if worth_cutting(sum(stretch_s), grain_s):
            cuts += [start + cut for cut in _cheapest(stretch_s, crossing[start : end + 1], grain_s)]
    return tuple(sorted(cuts))


def _cheapest(times_s: Sequence[float], crossing: Sequence[int | None], grain_s: float) -> tuple[int, ...]:
    """Shortest path over the allowed cuts, in linear time: a window holds the cuts within a grain, the cheapest first.

    It is monotonic: a new cut removes all dearer ones from the end, since it stays in reach for longer than they do.
    """
    at_s = [0.0, *accumulate(times_s)]
    reach_s = grain_s * (1 + 1e-9)  # sums of times round
    cost = {0: 0.0}
    before: dict[int, int] = {}
    window = deque([0])
    for cut in range(1, len(at_s)):
        size = crossing[cut]
        if size is None:
            continue
        # The last one stays even if it is out of reach: nodes between cuts that are not allowed make a longer segment.
        while len(window) > 1 and at_s[cut] - at_s[window[0]] > reach_s:
            window.popleft()
        before[cut] = window[0]
        cost[cut] = cost[window[0]] + size / BANDWIDTH_BYTES_PER_S + CUT_COST_S
        while window and cost[window[-1]] >= cost[cut]:
            window.pop()
        window.append(cut)
    return tuple(reversed(list(_path(before, len(times_s)))))


def _path(before: Mapping[int, int], end: int) -> Iterator[int]:
    while (end := before[end]) > 0:
        yield end


def split(model: OnnxModel, cuts: Sequence[int], types: Mapping[str, int]) -> list[ModelPiece]:
    """One model for the nodes between each two *cuts*; *types* are the element types of the tensors that cross them."""
    graph = model.graph
    last = last_uses(graph.node)
    wanted = {value.name for value in graph.output}
    doubts = unsteady(model)
    pieces = []
    for start, end in pairwise((0, *cuts, len(graph.node))):
        nodes = graph.node[start:end]
        produced = [name for node in nodes for name in node.output if name]
        outputs = [name for name in produced if last.get(name, -1) >= end or name in wanted]
        if end == len(graph.node):
            outputs += _constant_outputs(graph)
        pieces.append(_piece(model, nodes, outputs, types, steady=not any(doubts[start:end])))
    return pieces


def _piece(
    model: OnnxModel, nodes: Sequence[OnnxNode], outputs: list[str], types: Mapping[str, int], *, steady: bool
) -> ModelPiece:
    graph = model.graph
    stated = {value.name: value for value in (*graph.input, *graph.output)}
    produced = {name for node in nodes for name in node.output}
    needed = dict.fromkeys(name for node in nodes for name in node.input if name and name not in produced)
    weights = [tensor for tensor in graph.initializer if tensor.name in needed or tensor.name in outputs]
    constant = {tensor.name for tensor in weights}
    inputs = [name for name in needed if name not in constant]
    name = nodes[0].name if len(nodes) == 1 else f"{nodes[0].name}..{nodes[-1].name}"
    taken, given = ([_value(name, stated, types) for name in names] for names in (inputs, outputs))
    part = make_model(nodes, name, taken, given, weights, like=model)
    return ModelPiece(name, part, tuple(inputs), tuple(outputs), steady)


def _value(name: str, stated: Mapping[str, OnnxValue], types: Mapping[str, int]) -> OnnxValue:
    """Declaration of a value; without a shape where the graph states none, as it depends on the batch."""
    return stated[name] if name in stated else declared(name, types[name])


def scratch_bytes(graph: OnnxGraph, tensors: Mapping[str, SeenTensor]) -> int:
    """Peak memory of the tensors inside a graph, if each is freed after its last use."""
    last = last_uses(graph.node)
    change = [0] * (len(graph.node) + 1)
    for position, node in enumerate(graph.node):
        for name in node.output:
            size_bytes = tensors[name].size_bytes if name in tensors else 0
            change[position] += size_bytes
            change[last.get(name, position) + 1] -= size_bytes
    return max(accumulate(change))


def weight_bytes(graph: OnnxGraph) -> int:
    """Bytes of the initialisers and constants, those in files beside it and in bodies of control flow included."""
    weights: int = sum(math.prod(tensor.dims) * numpy_dtype(tensor.data_type).itemsize for tensor in graph.initializer)
    constants = [tensor for node in graph.node if (tensor := constant_tensor(node)) is not None]
    nested = [body for node in graph.node for body in bodies(node)]
    return weights + sum(int(tensor.ByteSize()) for tensor in constants) + sum(map(weight_bytes, nested))


def _constant_outputs(graph: OnnxGraph) -> list[str]:
    """Outputs that the optimiser turned into weights."""
    weights = initializers(graph)
    return [value.name for value in graph.output if value.name in weights]
