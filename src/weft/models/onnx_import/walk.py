"""The walk from a graph to its layers in execution order, through the bodies of If, Loop and Scan.

If the condition of an If follows from shapes, its branch is taken; otherwise the costlier branch is assumed. A loop
runs the number of times (*trips*) that is known before it starts, and once if this number depends on data.
"""

from __future__ import annotations

import heapq
import math
from collections import ChainMap, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from weft.base.errors import ModelError
from weft.models.element_types import ElementType, dtype_bits
from weft.models.onnx_graph import Attributes, OnnxGraph, OnnxNode, body, names_read, node_name, producers, qualified
from weft.models.onnx_import.drafts import ImportedNode, LayerDraft, repeated
from weft.models.onnx_import.infer import Inference
from weft.models.onnx_import.tensors import INTEGERS, Tensor, from_proto
from weft.models.operators import find

Scope = ChainMap[str, Tensor]

_MOST_TRIPS = 2**31
"""Exporters write "until the condition fails" as a trip count near the largest integer; larger counts are unknown."""


class Walked(NamedTuple):
    """The layers of a graph, its outputs, and a line for each shape that stayed unknown."""

    drafts: list[LayerDraft]
    outputs: list[Tensor]
    guesses: list[str]


def walk(graph: OnnxGraph, scope: Scope, inference: Inference, segments: Mapping[int, int] | None = None) -> Walked:
    """Return the layers of *graph* in execution order.

    scope: name -> tensor of the graph's inputs and of the outer values that it may read; values of the graph are added.
    segments: index of a node -> its subnet, if exits cut the graph; subnets follow one another.
    """
    segments = segments or {}
    for proto in graph.initializer:
        scope[proto.name] = from_proto(proto, inference.folder)
    for sparse in graph.sparse_initializer:
        dense = from_proto(sparse.values, inference.folder)
        scope[sparse.values.name] = replace(dense, shape=tuple(sparse.dims), value=None)
    declared = {value.name: value.type for value in (*graph.value_info, *graph.output)}
    drafts: list[LayerDraft] = []
    unassigned: list[str] = []  # nodes without a layer, before the first layer that uses them
    guesses: list[str] = []
    for index, proto_node in execution_order(graph, scope, segments):
        name, op = proto_node.name or f"{proto_node.op_type}_{index}", qualified(proto_node)
        try:
            step = _NodeStep(proto_node, name, scope, inference, declared, guesses)
            node_drafts = CONTROL.get(op, _walk_operator)(step)
        except ModelError as error:
            raise ModelError(f"{name} ({op}): {error}") from error
        except (ValueError, TypeError, IndexError, KeyError, OverflowError, ZeroDivisionError) as error:
            raise ModelError(f"{name} ({op}) is malformed: {error}") from error
        if op in CONTROL:
            node_drafts = _add_node_inputs(node_drafts, proto_node, scope)
        node_drafts = [replace(layer_draft, step=index, segment=segments.get(index, 0)) for layer_draft in node_drafts]
        if node_drafts:
            drafts += [_add_names(layer_draft, *unassigned, node_name(proto_node)) for layer_draft in node_drafts]
            unassigned.clear()
        elif not _assign_to_layer(drafts, proto_node, scope):
            unassigned.append(node_name(proto_node))
    outputs = [_lookup(scope, output.name, "the graph output") for output in graph.output]
    return Walked(fuse(drafts, outputs), outputs, guesses)


def _add_names(draft: LayerDraft, *names: str) -> LayerDraft:
    """The layer with these ONNX nodes added to its ``nodes``."""
    return replace(draft, layer=replace(draft.layer, nodes=(*draft.layer.nodes, *names)))


def _assign_to_layer(drafts: list[LayerDraft], node: OnnxNode, scope: Scope) -> bool:
    """Add the name of a node without a layer to the last layer in *drafts* whose result the node passes on.

    Returns False if no layer so far writes the node's sources; True for a node of constants, which needs no layer.
    """
    results = [scope[name] for name in node.output if name and not scope[name].constant]
    sources = {id(origin) for tensor in results for origin in tensor.origins}
    for index in reversed(range(len(drafts) if sources else 0)):
        if not sources.isdisjoint(map(id, drafts[index].writes)):
            drafts[index] = _add_names(drafts[index], node_name(node))
            return True
    return not sources


def execution_order(
    graph: OnnxGraph, given: Mapping[str, object], segments: Mapping[int, int]
) -> list[tuple[int, OnnxNode]]:
    """Indices and nodes in execution order: producers first; of ready nodes by subnet, then by order in the file.

    given: names of inputs, constants and outer values. segments: node index -> subnet (default: 0). Raises ModelError
    for a cycle or an unknown name.
    """
    makers = producers(graph.node)
    waiting: list[set[int]] = []  # per node, its producers that are not in *order* yet
    followers: dict[int, list[int]] = {}
    for index, node in enumerate(graph.node):
        needs = set()
        for name in names_read(node):
            if name in makers:
                needs.add(makers[name])
            elif name not in given:
                raise ModelError(f"{node.name or node.op_type} reads {name!r}, which nothing produces")
        waiting.append(needs)
        for producer in needs:
            followers.setdefault(producer, []).append(index)
    ready = sorted((segments.get(index, 0), index) for index, needs in enumerate(waiting) if not needs)
    order: list[tuple[int, OnnxNode]] = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append((index, graph.node[index]))
        for follower in followers.get(index, ()):
            waiting[follower].discard(index)
            if not waiting[follower]:
                heapq.heappush(ready, (segments.get(follower, 0), follower))
    if len(order) < len(graph.node):
        stuck = next(index for index, needs in enumerate(waiting) if needs)
        node = graph.node[stuck]
        raise ModelError(f"the graph has a cycle through {node.name or node.op_type}")
    return order


@dataclass(frozen=True, slots=True)
class _NodeStep:
    """One node during the walk, with the tensors that it can read."""

    proto: OnnxNode
    name: str
    scope: Scope
    inference: Inference
    declared: Mapping[str, Any]
    """Name of a value -> its type, where the file declares it."""
    guesses: list[str]
    """The list of the walk, to which a line is added for each shape that this node leaves unknown."""

    def inputs(self) -> tuple[Tensor | None, ...]:
        return tuple(_lookup(self.scope, name, self.name) if name else None for name in self.proto.input)

    def body(self, attribute: str, inputs: Iterable[tuple[str, Tensor]]) -> Walked:
        """Walk the nested graph in *attribute* with named inputs; its layers are sealed and named after the node."""
        walked = walk(body(self.proto, attribute), self.scope.new_child(dict(inputs)), self.inference)
        path = f"{self.name}/{attribute.removesuffix('_branch')}"
        guesses = [f"{path}/{guess}" for guess in walked.guesses]
        return Walked([layer_draft.within(path) for layer_draft in walked.drafts], walked.outputs, guesses)

    def body_inputs(self) -> list[str]:
        return [value.name for value in body(self.proto, "body").input]

    def set_outputs(self, tensors: Sequence[Tensor]) -> None:
        """Add the node's outputs to the scope."""
        names = self.proto.output
        if len(names) > len(tensors):
            raise ModelError(f"its body does not produce {names[len(tensors)]!r}")
        self.scope.update((name, tensor) for name, tensor in zip(names, tensors, strict=False) if name)

    def outputs(self) -> dict[str, Tensor]:
        return {name: self.scope[name] for name in self.proto.output if name}

    def note_guesses(self, inputs: Iterable[Tensor | None], results: Mapping[str, Tensor], reason: str) -> None:
        """Note the outputs whose shape is a guess, unless the shape of an input already was a guess."""
        if all(source is None or source.exact for source in inputs):
            for name, tensor in results.items():
                if not tensor.exact:
                    shape = "x".join(map(str, tensor.shape)) or "a scalar"
                    node = f"{self.name} ({qualified(self.proto)})"
                    self.guesses.append(f"{node}: the shape of {name!r} is not known, taken as {shape}: {reason}")


def _walk_operator(step: _NodeStep) -> list[LayerDraft]:
    """The layers of a node without nested graphs; its outputs are added to the scope."""
    inputs = step.inputs()
    results, reason = step.inference.outputs(step.proto, inputs, step.declared)
    outputs = {name: tensor for name, tensor in zip(step.proto.output, results, strict=True) if name}
    step.note_guesses(inputs, outputs, reason)
    drafts = _layer_drafts(step, inputs, tuple(outputs.values()))
    if not drafts:
        outputs = {name: _gather_origins(tensor, inputs) for name, tensor in outputs.items()}
    step.scope.update(outputs)
    return drafts


def _layer_drafts(step: _NodeStep, inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor, ...]) -> list[LayerDraft]:
    """The layers of an operator by its cost rule; none if its outputs are constants or control the host."""
    if all(tensor.constant for tensor in outputs) or _is_control(inputs, outputs):
        return []
    op = qualified(step.proto)
    return find(op).cost(ImportedNode(step.name, op, inputs, outputs, Attributes(step.proto)))


def _gather_origins(tensor: Tensor, inputs: Iterable[Tensor | None]) -> Tensor:
    """The output of an operator without a layer, with the origins of all its inputs, which stay in memory."""
    if tensor.constant or tensor.view_of is not None:
        return tensor
    sources = (origin for source in inputs if source is not None and not source.constant for origin in source.origins)
    return replace(tensor, made_of=tuple(dict.fromkeys(sources)))


def _is_control(inputs: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> bool:
    """Whether a node computes a single index or flag from single indices or flags, which is the host's work."""
    tensors = [tensor for tensor in (*inputs, *outputs) if tensor is not None]
    return all(tensor.elements == 1 and tensor.dtype in INTEGERS for tensor in tensors)


def _add_node_inputs(drafts: list[LayerDraft], node: OnnxNode, scope: Scope) -> list[LayerDraft]:
    """The layers of a nested graph; the first layer also reads the inputs of its If, Loop or Scan node."""
    inputs = [scope[name].root for name in node.input if name and not scope[name].constant]
    return [
        replace(layer_draft, reads=tuple(dict.fromkeys([*layer_draft.reads, *inputs]))) for layer_draft in drafts[:1]
    ] + drafts[1:]


def _walk_if(step: _NodeStep) -> list[LayerDraft]:
    """The layers of the branch that is taken, or of the costlier branch if the condition is unknown."""
    (condition,) = step.inputs()
    branches = ["then_branch", "else_branch"]
    if condition is not None and condition.value is not None and condition.value.size == 1:
        branches = branches[:1] if condition.value.item() else branches[1:]
    possible: list[Walked] = []
    refused: list[ModelError] = []
    for branch in branches:
        try:
            possible.append(step.body(branch, ()))
        except ModelError as error:
            # A branch that is not valid at these shapes is not taken, such as the branch of another sampling rate.
            refused.append(error)
    if not possible:
        raise refused[0]
    taken = max(possible, key=_cost)
    step.guesses.extend(taken.guesses)
    step.set_outputs(taken.outputs)
    return taken.drafts


def _walk_loop(step: _NodeStep) -> list[LayerDraft]:
    """The layers of a Loop's body, repeated; its outputs are final states, then values stacked over the iterations."""
    limit, condition, *carried = step.inputs()
    names = step.body_inputs()
    start = [_at_runtime(tensor) for tensor in (limit, condition)]
    state = [_at_runtime(tensor) for tensor in carried]
    walked = step.body("body", zip(names, [*start, *state], strict=False))
    trips = _count_trips(limit, condition, walked.outputs[0])
    next_state = walked.outputs[1 : 1 + len(carried)]
    final = [_final_state(trips, before, after) for before, after in zip(state, next_state, strict=True)]
    stacked = [_insert_axis(output, 0, trips) for output in walked.outputs[1 + len(carried) :]]
    step.set_outputs([*final, *stacked])
    if not walked.guesses:
        reason = "how often the loop runs is not known before a query" if trips is None else "it changes every turn"
        step.note_guesses((limit, condition, *carried), step.outputs(), reason)
    return _repeat_body(step, walked, trips)


def _walk_scan(step: _NodeStep) -> list[LayerDraft]:
    """The layers of a Scan's body, repeated for each slice of the sequences."""
    attributes, inputs = Attributes(step.proto), [_at_runtime(tensor) for tensor in step.inputs()]
    # Before opset 9, the first input is the lengths of the sequences, and tensors outside the body have a batch axis:
    # *lead* is the number of inputs and of axes to skip.
    lead = 1 if step.inference.opsets.get("", 9) < 9 else 0
    scanned = attributes.integer("num_scan_inputs", 0)
    states, sequences = inputs[lead : len(inputs) - scanned], inputs[len(inputs) - scanned :]
    axes = [lead + axis for axis in attributes.integers("scan_input_axes", (0,) * len(sequences))]
    slices = [_remove_axis(sequence, axis) for sequence, axis in zip(sequences, axes, strict=True)]
    body_inputs = [replace(tensor, shape=tensor.shape[lead:]) for tensor in (*states, *slices)]
    walked = step.body("body", zip(step.body_inputs(), body_inputs, strict=False))
    trips = sequences[0].shape[axes[0]] if sequences else 1
    samples = sequences[0].shape[:lead] if sequences else ()
    results = walked.outputs[len(states) :]
    out_axes = attributes.integers("scan_output_axes", (0,) * len(results))
    stacked = [_insert_axis(result, axis, trips) for result, axis in zip(results, out_axes, strict=True)]
    outputs = [*(walked.outputs[: len(states)] if trips else states), *stacked]
    step.set_outputs([replace(output, shape=(*samples, *output.shape)) for output in outputs])
    return _repeat_body(step, walked, trips * math.prod(samples))


def _repeat_body(step: _NodeStep, walked: Walked, trips: int | None) -> list[LayerDraft]:
    """The layers of a loop body that runs *trips* times (None: unknown, taken as once); none for 0."""
    if trips == 0:
        return []
    step.guesses.extend(walked.guesses)
    return [repeated(layer_draft, 1 if trips is None else trips) for layer_draft in walked.drafts]


CONTROL: dict[str, Callable[[_NodeStep], list[LayerDraft]]] = {"If": _walk_if, "Loop": _walk_loop, "Scan": _walk_scan}


def _cost(walked: Walked) -> tuple[int, int]:
    """MACs of a nested graph, then, for ties, its traffic in elements."""
    layers = [layer_draft.layer for layer_draft in walked.drafts]
    traffic = sum(layer.input_elements + layer.output_elements for layer in layers)
    return sum(layer.macs for layer in layers), traffic


def _count_trips(limit: Tensor | None, condition: Tensor | None, next_condition: Tensor) -> int | None:
    """The number of iterations of a Loop; None if it depends on data.

    limit, condition: the inputs of the node. next_condition: the condition that its body returns.
    """
    starts = condition is None or (condition.value is not None and bool(condition.value.all()))
    # A body that returns its condition unchanged returns a view of the input.
    unchanged = condition is not None and next_condition.root is condition.root
    always = next_condition.value is not None and bool(next_condition.value.all())
    continues = condition is None or unchanged or always
    if limit is None or limit.value is None or limit.value.size != 1 or not (starts and continues):
        return None
    trips = int(limit.value.item())
    return max(0, trips) if trips < _MOST_TRIPS else None


def _final_state(trips: int | None, before: Tensor, after: Tensor) -> Tensor:
    """A state after a loop; *before*, *after*: the state before and after the first iteration.

    Its shape is a guess if an iteration changes the shape, unless there is only one.
    """
    if trips == 0:
        return before
    known = before.shape == after.shape or trips == 1
    return after if known else replace(after, exact=False)


def _at_runtime(tensor: Tensor | None) -> Tensor:
    """A tensor as an input of a loop body: with its shape in the first iteration, but not a constant."""
    if tensor is None:
        return Tensor((), ElementType.INT64, dtype_bits(ElementType.INT64))
    return replace(tensor, constant=False, value=None, stored=(), view_of=tensor.root)


def _remove_axis(tensor: Tensor, axis: int) -> Tensor:
    """One slice of a sequence along *axis*, as the input of a Scan's body."""
    sizes = list(tensor.shape)
    del sizes[axis]
    return replace(tensor, shape=tuple(sizes))


def _insert_axis(tensor: Tensor, axis: int, trips: int | None) -> Tensor:
    """An output of a loop body, stacked over *trips* iterations (None: unknown) along *axis*."""
    sizes = list(tensor.shape)
    sizes.insert(axis if axis >= 0 else len(sizes) + 1 + axis, 1 if trips is None else trips)
    exact = tensor.exact and trips is not None
    return Tensor(tuple(sizes), tensor.dtype, tensor.bits, exact=exact, made_of=tensor.origins)


def _lookup(scope: Mapping[str, Tensor], name: str, reader: str) -> Tensor:
    """The tensor *name*; ModelError if no node produces it. *reader*: what reads it, for the message."""
    if name not in scope:
        raise ModelError(f"{reader} reads {name!r}, which nothing produces")
    return scope[name]


_MOST_FUSED = 16
"""Limit of nodes that are fused into one layer, to bound the search; the longest activation out of single operators
has about ten."""


def fuse(drafts: Sequence[LayerDraft], outputs: Collection[Tensor]) -> list[LayerDraft]:
    """Fuse biases, activations and norms into the products before them; *outputs*: the graph's outputs."""
    readers: dict[int, list[int]] = defaultdict(list)
    for index, layer_draft in enumerate(drafts):
        for tensor in layer_draft.reads:
            readers[id(tensor)].append(index)
    exposed = {id(tensor.root) for tensor in outputs}  # the caller may read them, so fusion must keep them
    absorbed: set[int] = set()
    fused: dict[int, LayerDraft] = {}
    for index, layer_draft in enumerate(drafts):
        if index in absorbed or not _can_start_group(layer_draft):
            continue
        group = _find_group(drafts, index, readers, exposed)
        absorbed.update(group)
        # At the position of the last member, before which all tensors that members read are computed.
        fused[group[-1]] = _merge_group([drafts[member] for member in group])
    return [fused.get(index, draft) for index, draft in enumerate(drafts) if index not in absorbed or index in fused]


def _can_start_group(draft: LayerDraft) -> bool:
    """Whether other layers can be fused into this layer: a convolution or product with weights and one output."""
    return draft.layer.kind in ("conv", "gemm") and len(draft.writes) == 1 and not draft.sealed


def _find_group(
    drafts: Sequence[LayerDraft], anchor: int, readers: dict[int, list[int]], exposed: set[int]
) -> list[int]:
    """Indices of the largest group of layers that can be fused into *anchor*, the anchor first.

    No layer outside the group may read a tensor that it writes, except the output of its last layer. readers: id of a
    tensor -> indices of the layers that read it. exposed: ids of the tensors that the graph returns.
    """
    members, best_length = [anchor], 1
    inside = {id(drafts[anchor].writes[0])}
    elements = drafts[anchor].layer.output_elements
    while len(members) < _MOST_FUSED:
        if exposed & inside:
            break
        candidates = sorted({index for tensor in inside for index in readers[tensor]} - set(members))
        follower = next((index for index in candidates if _can_join_group(drafts[index], inside, elements)), None)
        if follower is None:
            break
        members.append(follower)
        inside.add(id(drafts[follower].writes[0]))
        intermediate = inside - {id(drafts[follower].writes[0])}
        if all(set(readers[tensor]) <= set(members) for tensor in intermediate):
            best_length = len(members)
    return members[:best_length]


def _can_join_group(draft: LayerDraft, inside: Collection[int], elements: int) -> bool:
    """Whether a layer fuses, has *elements* outputs, and reads only tensors of the group and single values (scales).

    inside: ids of the tensors that the group writes.
    """
    return (
        find(draft.layer.op).fuses
        and not draft.sealed
        and len(draft.writes) == 1
        and draft.layer.output_elements == elements
        and all(id(tensor) in inside or tensor.elements == 1 for tensor in draft.reads)
    )


def _merge_group(group: Sequence[LayerDraft]) -> LayerDraft:
    """One layer for a group: the work of the first layer, with the output of the last."""
    first, last = group[0], group[-1]
    inside = {id(member.writes[0]) for member in group}
    outside = {id(tensor): tensor for member in group for tensor in member.reads if id(tensor) not in inside}
    return replace(
        first,
        layer=replace(
            first.layer,
            op="+".join(member.layer.op for member in group),
            output_elements=last.layer.output_elements,
            nodes=tuple(node for member in group for node in member.layer.nodes),
        ),
        reads=tuple(outside.values()),
        writes=last.writes,
        stored=tuple(dict.fromkeys(s for member in group for s in member.stored)),
    )
