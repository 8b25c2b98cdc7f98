"""Where an optimised graph is cut into segments, and the models of those segments.

A cut is a position in the order of the nodes: cut 3 lies before node 3. Nothing here runs a model; what its nodes
take and make comes from ``profiling``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, ValueInfoProto, helper

from weft.base.errors import ModelError
from weft.runtime.values import unsteady

BANDWIDTH_BYTES_PER_S = 5e9
"""The speed at which a tensor that crosses a cut is taken to be written and read once more."""
CUT_COST_S = 15e-6
"""What one more call of ONNX Runtime costs."""
WORTH_CUTTING = 1.6
"""A model shorter than this many grains stays whole."""
DEVICE_GRAIN_S = 0.00025
"""How long a segment on a GPU should be, where nobody says."""
GRAINS_AT_MOST = 4
"""A segment on a GPU takes at most a grain alone, and so many at the largest batch."""
_GROWTH = 1.1
"""By how much the grain grows while there are too many pieces."""


class SeenTensor(NamedTuple):
    """A tensor inside a graph, as it came up in a run."""

    element_type: int
    """Its type, as ONNX numbers them."""
    size_bytes: int
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelPiece:
    """What lies between two cuts, as a model of its own."""

    name: str
    model: ModelProto
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    steady: bool
    """Whether what it costs follows from the shapes of the model's inputs."""


def whole_because(graph: GraphProto) -> str | None:
    """Why a graph cannot be cut anywhere, or None."""
    kinds = (AttributeProto.GRAPH, AttributeProto.GRAPHS)
    for node in graph.node:
        if any(attribute.type in kinds for attribute in node.attribute):
            return f"has control flow ({node.op_type})"
    if graph.sparse_initializer:
        return "has sparse weights"
    return "has a single node" if len(graph.node) < 2 else None


def prune(graph: GraphProto) -> None:
    """Take out the nodes that no output of the graph needs; a segment of such nodes would make nothing."""
    needed = {each.name for each in graph.output}
    kept = list[NodeProto]()
    for node in reversed(graph.node):
        if not needed.isdisjoint(node.output):
            kept.append(node)
            needed.update(node.input)
    del graph.node[:]
    graph.node.extend(reversed(kept))


def arrange(graph: GraphProto, exits: Sequence[str]) -> tuple[int, ...]:
    """Put the nodes that an exit needs before those that only later ones need; returns the cuts at the exits.

    *exits* are outputs of the graph, the end last; nodes that none of them needs are taken out, and so are all other
    outputs. The nodes of a stretch between two exits keep their order.
    """
    needed = [_ancestors(graph, name) for name in exits]
    _check_order(exits, needed)
    order: dict[int, None] = {}
    ends = []
    for each in needed:
        order |= dict.fromkeys(sorted(each))
        ends.append(len(order))
    nodes = [graph.node[position] for position in order]
    outputs = [next(each for each in graph.output if each.name == name) for name in exits]
    del graph.node[:], graph.output[:]
    graph.node.extend(nodes)
    graph.output.extend(outputs)
    return tuple(ends[:-1])


def _ancestors(graph: GraphProto, output: str) -> set[int]:
    """Positions of the nodes that an output needs."""
    needed, found = {output}, set[int]()
    for position in range(len(graph.node) - 1, -1, -1):
        node = graph.node[position]
        if not needed.isdisjoint(filter(None, node.output)):
            found.add(position)
            needed.update(node.input)
    return found


def _check_order(exits: Sequence[str], needed: Sequence[set[int]]) -> None:
    """Refuse exits out of order: the deeper one has more in common with the others, or else needs more nodes."""
    if not needed[0]:
        raise ModelError(f"exit {exits[0]!r} is known before anything is computed; name exits shallow to deep")
    depths = [(_shared(each, needed), len(each)) for each in needed]
    for at, (before, after) in enumerate(pairwise(exits)):
        if needed[at + 1] <= needed[at]:
            raise ModelError(f"exit {after!r} is known as soon as exit {before!r} is; name exits shallow to deep")
        if depths[at] > depths[at + 1]:
            raise ModelError(f"exit {before!r} is deeper than {after!r}, which follows it; name exits shallow to deep")


def _shared(one: set[int], all_of_them: Sequence[set[int]]) -> int:
    """Nodes that others need, too."""
    return len(one & set[int]().union(*(other for other in all_of_them if other is not one)))


def crossing_bytes(graph: GraphProto, tensors: Mapping[str, SeenTensor]) -> list[int | None]:
    """For each cut, the two ends included, the bytes that cross it; None where a tensor of unknown type does.

    Inputs of the graph cross for nothing, and so do its outputs once no node needs them: they are in memory anyway.
    """
    last = _last_uses(graph)
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
    """Whether a model is long enough to be cut."""
    return total_s >= WORTH_CUTTING * grain_s


def device_length_s(alone_s: float, batched_s: float) -> float:
    """What is compared with the grain on a GPU, of something that takes so long alone and at the largest batch."""
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
    """Shortest path over the allowed cuts; the window of those in reach keeps its cheapest in front."""
    at_s = [0.0, *accumulate(times_s)]
    reach_s = grain_s * (1 + 1e-9)  # sums of times round
    cost = {0: 0.0}
    before: dict[int, int] = {}
    window = deque([0])
    for cut in range(1, len(at_s)):
        size = crossing[cut]
        if size is None:
            continue
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


def split(model: ModelProto, cuts: Sequence[int], types: Mapping[str, int]) -> list[ModelPiece]:
    """One model for each stretch of nodes between *cuts*; *types* are the element types of what crosses them."""
    graph = model.graph
    last = _last_uses(graph)
    wanted = {each.name for each in graph.output}
    doubts = unsteady(model)
    pieces = []
    for start, end in pairwise((0, *cuts, len(graph.node))):
        nodes = graph.node[start:end]
        made = [name for node in nodes for name in node.output if name]
        outputs = [name for name in made if last.get(name, -1) >= end or name in wanted]
        if end == len(graph.node):
            outputs += _constant_outputs(graph)
        pieces.append(_piece(model, nodes, outputs, types, steady=not any(doubts[start:end])))
    return pieces


def _piece(
    model: ModelProto, nodes: Sequence[NodeProto], outputs: list[str], types: Mapping[str, int], *, steady: bool
) -> ModelPiece:
    graph = model.graph
    declared = {each.name: each for each in (*graph.input, *graph.output)}
    made = {name for node in nodes for name in node.output}
    needed = dict.fromkeys(name for node in nodes for name in node.input if name and name not in made)
    weights = [each for each in graph.initializer if each.name in needed or each.name in outputs]
    constant = {each.name for each in weights}
    inputs = [name for name in needed if name not in constant]
    name = nodes[0].name if len(nodes) == 1 else f"{nodes[0].name}..{nodes[-1].name}"
    body = helper.make_graph(
        nodes, name, [_value(each, declared, types) for each in inputs],
        [_value(each, declared, types) for each in outputs], weights,
    )  # fmt: skip
    part = helper.make_model(body, opset_imports=model.opset_import, functions=model.functions)
    part.ir_version = model.ir_version
    return ModelPiece(name, part, tuple(inputs), tuple(outputs), steady)


def _value(name: str, declared: Mapping[str, ValueInfoProto], types: Mapping[str, int]) -> ValueInfoProto:
    """How a value is declared; without a shape where the graph states none, for it depends on the batch."""
    return declared[name] if name in declared else helper.make_tensor_value_info(name, types[name], None)


def scratch_bytes(graph: GraphProto, tensors: Mapping[str, SeenTensor]) -> int:
    """What the tensors made inside a graph take when most of them are in memory at once."""
    last = _last_uses(graph)
    change = [0] * (len(graph.node) + 1)
    for position, node in enumerate(graph.node):
        for name in node.output:
            size_bytes = tensors[name].size_bytes if name in tensors else 0
            change[position] += size_bytes
            change[last.get(name, position) + 1] -= size_bytes
    return max(accumulate(change))


def weight_bytes(graph: GraphProto) -> int:
    """How much the initialisers hold, wherever they lie, those in the bodies of control flow included."""
    own: int = sum(
        math.prod(each.dims) * helper.tensor_dtype_to_np_dtype(each.data_type).itemsize for each in graph.initializer
    )
    constants = [a.t for node in graph.node if node.op_type == "Constant" for a in node.attribute if a.HasField("t")]
    bodies = [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    return own + sum(int(each.ByteSize()) for each in constants) + sum(weight_bytes(body) for body in bodies)


def _constant_outputs(graph: GraphProto) -> list[str]:
    """Outputs that optimising turned into weights."""
    weights = {each.name for each in graph.initializer}
    return [each.name for each in graph.output if each.name in weights]


def _last_uses(graph: GraphProto) -> dict[str, int]:
    """Tensor -> the last node that takes it."""
    return {name: position for position, node in enumerate(graph.node) for name in node.input}
