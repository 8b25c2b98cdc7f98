"""The walk from a graph to its layers in execution order, through the bodies of If, Loop and Scan.

A branch is taken where its condition follows from shapes; otherwise the costlier one is assumed. A
loop runs as often as is known before it starts, and once where that depends on data.
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
"""Exporters write "until the condition fails" as a trip count near the largest integer."""


class Walked(NamedTuple):
    """The layers of a graph, its outputs, and a line for each shape that stayed unknown."""

    drafts: list[LayerDraft]
    outputs: list[Tensor]
    guesses: list[str]


def walk(graph: OnnxGraph, scope: Scope, inference: Inference, segments: Mapping[int, int] | None = None) -> Walked:
    """Count the layers of *graph*; *scope* holds its inputs and the values that it may capture.

    segments: index of a node in the file -> its subnet; subnets follow one another.
    """
    segments = segments or {}
    for proto in graph.initializer:
        scope[proto.name] = from_proto(proto, inference.folder)
    for sparse in graph.sparse_initializer:
        dense = from_proto(sparse.values, inference.folder)
        scope[sparse.values.name] = replace(dense, shape=tuple(sparse.dims), value=None)
    declared = {value.name: value.type for value in (*graph.value_info, *graph.output)}
    drafts: list[LayerDraft] = []
    early: list[str] = []
    guesses: list[str] = []
    for index, proto_node in execution_order(graph, scope, segments):
        name, op = proto_node.name or f"{proto_node.op_type}_{index}", qualified(proto_node)
        try:
            node_drafts = CONTROL.get(op, _plain)(_NodeStep(proto_node, name, scope, inference, declared, guesses))
        except ModelError as error:
            raise ModelError(f"{name} ({op}): {error}") from error
        except (ValueError, TypeError, IndexError, KeyError, OverflowError, ZeroDivisionError) as error:
            raise ModelError(f"{name} ({op}) is malformed: {error}") from error
        if op in CONTROL:
            node_drafts = _awaiting(node_drafts, proto_node, scope)
        node_drafts = [replace(layer_draft, step=index, segment=segments.get(index, 0)) for layer_draft in node_drafts]
        if node_drafts:
            drafts += [_add_names(layer_draft, *early, node_name(proto_node)) for layer_draft in node_drafts]
            early.clear()
        elif not _assign_to_layer(drafts, proto_node, scope):
            early.append(node_name(proto_node))
    outputs = [_lookup(scope, output.name, "the graph output") for output in graph.output]
    return Walked(fuse(drafts, outputs), outputs, guesses)


def _add_names(draft: LayerDraft, *names: str) -> LayerDraft:
    return replace(draft, layer=replace(draft.layer, nodes=(*draft.layer.nodes, *names)))


def _assign_to_layer(drafts: list[LayerDraft], node: OnnxNode, scope: Scope) -> bool:
    """Add a node without a layer of its own to the layer whose result it passes on.

    Returns False if no layer so far produces its sources; a node that has no sources needs no layer.
    """
    results = [scope[name] for name in node.output if name and not scope[name].constant]
    sources = {id(origin) for tensor in results for origin in tensor.origins}
    for place in reversed(range(len(drafts) if sources else 0)):
        if not sources.isdisjoint(map(id, drafts[place].writes)):
            drafts[place] = _add_names(drafts[place], node_name(node))
            return True
    return not sources


def execution_order(
    graph: OnnxGraph, given: Mapping[str, object], segments: Mapping[int, int]
) -> list[tuple[int, OnnxNode]]:
    """Indices and nodes in execution order: producers first, then by subnet, then as in the file."""
    makers = producers(graph.node)
    waiting: list[set[int]] = []
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
    guesses: list[str]
    """Grows by a line for each shape that this node leaves unknown."""

    def inputs(self) -> tuple[Tensor | None, ...]:
        return tuple(_lookup(self.scope, name, self.name) if name else None for name in self.proto.input)

    def body(self, attribute: str, inputs: Iterable[tuple[str, Tensor]]) -> Walked:
        """The layers of a nested graph, named after this node and sealed against fusion from outside."""
        walked = walk(body(self.proto, attribute), self.scope.new_child(dict(inputs)), self.inference)
        path = f"{self.name}/{attribute.removesuffix('_branch')}"
        inside = [f"{path}/{guess}" for guess in walked.guesses]
        return Walked([layer_draft.within(path) for layer_draft in walked.drafts], walked.outputs, inside)

    def body_inputs(self) -> list[str]:
        return [value.name for value in body(self.proto, "body").input]

    def hand_out(self, tensors: Sequence[Tensor]) -> None:
        names = self.proto.output
        if len(names) > len(tensors):
            raise ModelError(f"its body does not produce {names[len(tensors)]!r}")
        self.scope.update((name, tensor) for name, tensor in zip(names, tensors, strict=False) if name)

    def handed_out(self) -> dict[str, Tensor]:
        return {name: self.scope[name] for name in self.proto.output if name}

    def tell_guesses(self, inputs: Iterable[Tensor | None], results: Mapping[str, Tensor], reason: str) -> None:
        """Note the outputs whose shape is a guess, unless an input's was one already."""
        if all(source is None or source.exact for source in inputs):
            for name, tensor in results.items():
                if not tensor.exact:
                    taken = "x".join(map(str, tensor.shape)) or "a scalar"
                    who = f"{self.name} ({qualified(self.proto)})"
                    self.guesses.append(f"{who}: the shape of {name!r} is not known, taken as {taken}: {reason}")


def _plain(step: _NodeStep) -> list[LayerDraft]:
    inputs = step.inputs()
    results, reason = step.inference.outputs(step.proto, inputs, step.declared)
    produced = {name: tensor for name, tensor in zip(step.proto.output, results, strict=True) if name}
    step.tell_guesses(inputs, produced, reason)
    drafts = _layer_drafts(step, inputs, tuple(produced.values()))
    if not drafts:
        produced = {name: _gather_origins(tensor, inputs) for name, tensor in produced.items()}
    step.scope.update(produced)
    return drafts


def _layer_drafts(step: _NodeStep, inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor, ...]) -> list[LayerDraft]:
    if all(tensor.constant for tensor in outputs) or _is_control(inputs, outputs):
        return []
    op = qualified(step.proto)
    return find(op).cost(ImportedNode(step.name, op, inputs, outputs, Attributes(step.proto)))


def _gather_origins(tensor: Tensor, inputs: Iterable[Tensor | None]) -> Tensor:
    """A tensor that an operator without a layer passes on: it keeps its inputs in memory."""
    if tensor.constant or tensor.view_of is not None:
        return tensor
    sources = (origin for source in inputs if source is not None and not source.constant for origin in source.origins)
    return replace(tensor, made_of=tuple(dict.fromkeys(sources)))


def _is_control(inputs: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> bool:
    """Whether a node computes a lone index or flag from others: the host's work, not the accelerator's."""
    tensors = [tensor for tensor in (*inputs, *outputs) if tensor is not None]
    return all(tensor.elements == 1 and tensor.dtype in INTEGERS for tensor in tensors)


def _awaiting(drafts: list[LayerDraft], node: OnnxNode, scope: Scope) -> list[LayerDraft]:
    """The layers of a nested graph; the first one waits for the condition and for captured values."""
    given = [scope[name].root for name in node.input if name and not scope[name].constant]
    return [
        replace(layer_draft, reads=tuple(dict.fromkeys([*layer_draft.reads, *given]))) for layer_draft in drafts[:1]
    ] + drafts[1:]


def _branch(step: _NodeStep) -> list[LayerDraft]:
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
            # One branch per sampling rate, say: the one that cannot work at these sizes is not taken.
            refused.append(error)
    if not possible:
        raise refused[0]
    taken = max(possible, key=_cost)
    step.guesses.extend(taken.guesses)
    step.hand_out(taken.outputs)
    return taken.drafts


def _loop(step: _NodeStep) -> list[LayerDraft]:
    limit, condition, *carried = step.inputs()
    names = step.body_inputs()
    start = [_at_runtime(tensor) for tensor in (limit, condition)]
    state = [_at_runtime(tensor) for tensor in carried]
    inner = step.body("body", zip(names, [*start, *state], strict=False))
    trips = _trips(limit, condition, inner.outputs[0])
    settled = [_after(trips, *pair) for pair in zip(state, inner.outputs[1 : 1 + len(carried)], strict=True)]
    stacked = [_insert_axis(output, 0, trips) for output in inner.outputs[1 + len(carried) :]]
    step.hand_out([*settled, *stacked])
    if not inner.guesses:
        reason = "how often the loop runs is not known before a query" if trips is None else "it changes every turn"
        step.tell_guesses((limit, condition, *carried), step.handed_out(), reason)
    return _turns(step, inner, trips)


def _scan(step: _NodeStep) -> list[LayerDraft]:
    attributes, inputs = Attributes(step.proto), [_at_runtime(tensor) for tensor in step.inputs()]
    # Before opset 9 the lengths of the sequences come first, and an axis of samples before the axes that a body sees.
    lead = 1 if step.inference.opsets.get("", 9) < 9 else 0
    scanned = attributes.integer("num_scan_inputs", 0)
    states, sequences = inputs[lead : len(inputs) - scanned], inputs[len(inputs) - scanned :]
    axes = [lead + axis for axis in attributes.integers("scan_input_axes", (0,) * len(sequences))]
    slices = [_remove_axis(sequence, axis) for sequence, axis in zip(sequences, axes, strict=True)]
    seen = [replace(tensor, shape=tensor.shape[lead:]) for tensor in (*states, *slices)]
    inner = step.body("body", zip(step.body_inputs(), seen, strict=False))
    trips = sequences[0].shape[axes[0]] if sequences else 1
    samples = sequences[0].shape[:lead] if sequences else ()
    results = inner.outputs[len(states) :]
    out_axes = attributes.integers("scan_output_axes", (0,) * len(results))
    stacked = [_insert_axis(result, axis, trips) for result, axis in zip(results, out_axes, strict=True)]
    handed = [*(inner.outputs[: len(states)] if trips else states), *stacked]
    step.hand_out([replace(output, shape=(*samples, *output.shape)) for output in handed])
    return _turns(step, inner, trips * math.prod(samples))


def _turns(step: _NodeStep, body: Walked, trips: int | None) -> list[LayerDraft]:
    """The layers of a body that runs *trips* times, once where that is not known."""
    step.guesses.extend(body.guesses if trips != 0 else ())
    return [repeated(layer_draft, 1 if trips is None else trips) for layer_draft in body.drafts] if trips != 0 else []


CONTROL: dict[str, Callable[[_NodeStep], list[LayerDraft]]] = {"If": _branch, "Loop": _loop, "Scan": _scan}


def _cost(walked: Walked) -> tuple[int, int]:
    layers = [layer_draft.layer for layer_draft in walked.drafts]
    traffic = sum(layer.input_elements + layer.output_elements for layer in layers)
    return sum(layer.macs for layer in layers), traffic


def _trips(limit: Tensor | None, condition: Tensor | None, goes_on: Tensor) -> int | None:
    """How often a loop runs, where that is settled before it starts."""
    starts = condition is None or (condition.value is not None and bool(condition.value.all()))
    # Handing the condition through unchanged shows as a view of the tensor that came in.
    unchanged = condition is not None and goes_on.root is condition.root
    lasts = condition is None or unchanged or (goes_on.value is not None and bool(goes_on.value.all()))
    if limit is None or limit.value is None or limit.value.size != 1 or not (starts and lasts):
        return None
    trips = int(limit.value.item())
    return max(0, trips) if trips < _MOST_TRIPS else None


def _after(trips: int | None, before: Tensor, turned: Tensor) -> Tensor:
    """A state after a loop: its size is known if one turn does not change it, or after at most one turn."""
    if trips == 0:
        return before
    same = before.shape == turned.shape or trips == 1
    return turned if same else replace(turned, exact=False)


def _at_runtime(tensor: Tensor | None) -> Tensor:
    """A tensor as a loop body sees it: the first turn's shape, but no fixed value."""
    if tensor is None:
        return Tensor((), ElementType.INT64, dtype_bits(ElementType.INT64))
    return replace(tensor, constant=False, value=None, stored=(), view_of=tensor.root)


def _remove_axis(tensor: Tensor, axis: int) -> Tensor:
    sizes = list(tensor.shape)
    del sizes[axis]
    return replace(tensor, shape=tuple(sizes))


def _insert_axis(tensor: Tensor, axis: int, trips: int | None) -> Tensor:
    sizes = list(tensor.shape)
    sizes.insert(axis if axis >= 0 else len(sizes) + 1 + axis, 1 if trips is None else trips)
    exact = tensor.exact and trips is not None
    return Tensor(tuple(sizes), tensor.dtype, tensor.bits, exact=exact, made_of=tensor.origins)


def _lookup(scope: Mapping[str, Tensor], name: str, reader: str) -> Tensor:
    if name not in scope:
        raise ModelError(f"{reader} reads {name!r}, which nothing produces")
    return scope[name]


_LONGEST = 16
"""Most nodes that are folded into one layer; the longest spelled-out activation has about ten. Bounds the search."""


def fuse(drafts: Sequence[LayerDraft], outputs: Collection[Tensor]) -> list[LayerDraft]:
    """Fuse followers into *drafts*; *outputs* are the tensors that the graph returns."""
    readers: dict[int, list[int]] = defaultdict(list)
    for place, layer_draft in enumerate(drafts):
        for tensor in layer_draft.reads:
            readers[id(tensor)].append(place)
    exposed = {id(tensor.root) for tensor in outputs}
    absorbed: set[int] = set()
    fused: dict[int, LayerDraft] = {}
    for place, layer_draft in enumerate(drafts):
        if place in absorbed or not _anchors(layer_draft):
            continue
        group = _group(drafts, place, readers, exposed)
        absorbed.update(group)
        # The last member's place: by then everything that any member reads has been computed.
        fused[group[-1]] = _merge_group([drafts[member] for member in group])
    return [fused.get(place, alone) for place, alone in enumerate(drafts) if place not in absorbed or place in fused]


def _anchors(draft: LayerDraft) -> bool:
    return draft.layer.kind in ("conv", "gemm") and len(draft.writes) == 1 and not draft.sealed


def _group(drafts: Sequence[LayerDraft], anchor: int, readers: dict[int, list[int]], exposed: set[int]) -> list[int]:
    """Indices of the longest closed run of followers, the anchor first."""
    members, best = [anchor], 1
    inside = {id(drafts[anchor].writes[0])}
    elements = drafts[anchor].layer.output_elements
    while len(members) < _LONGEST:
        if exposed & inside:
            break
        nexts = sorted({place for tensor in inside for place in readers[tensor]} - set(members))
        follower = next((place for place in nexts if _follows(drafts[place], inside, elements)), None)
        if follower is None:
            break
        members.append(follower)
        inside.add(id(drafts[follower].writes[0]))
        hidden = inside - {id(drafts[follower].writes[0])}
        if all(set(readers[tensor]) <= set(members) for tensor in hidden):
            best = len(members)
    return members[:best]


def _follows(draft: LayerDraft, inside: Collection[int], elements: int) -> bool:
    """Whether a layer reads only the group; a single value, such as a scale, does not count."""
    return (
        find(draft.layer.op).fuses
        and not draft.sealed
        and len(draft.writes) == 1
        and draft.layer.output_elements == elements
        and all(id(tensor) in inside or tensor.elements == 1 for tensor in draft.reads)
    )


def _merge_group(group: Sequence[LayerDraft]) -> LayerDraft:
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
