"""``lower`` turns a family and its sharing into one graph for all models, with a form for each layer.

A family is models side by side: *layers* that all have, and *tails*, the operations of one model alone. A *form* is a
way to compute a layer for all tasks, a *layout* the arrangement of their channels in one tensor. ``Room`` holds the
values that are computed so far, in each of their layouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from weft.base.errors import StitchError, unknown_name
from weft.models.operators import OPERATORS
from weft_stitch.family import Family, FamilyLayer, Sharing, role, wire
from weft_stitch.forms import FORMS, Form
from weft_stitch.forms.base import apply_table
from weft_stitch.forms.room import PlacedValue, Room
from weft_stitch.graph import DYNAMIC, Builder, Graph
from weft_stitch.graph_steps import emit, read_port, scale_and_shift, write_port
from weft_stitch.layouts import APART, COMPACT, STACKED, Affine, Channels, Layout, tidy
from weft_stitch.net import Op, Port

Forms = Mapping[str, str] | str
"""A form for each layer that has weights, or one for all."""

_CHAINED = ("affine", "unary", "add")
"""Kinds of layers that a form may fuse into the convolution before them."""


def lower(
    family: Family,
    sharing: Sharing,
    forms: Forms,
    *,
    batches: Sequence[int] | None = None,
    dynamic: bool = False,
    align: int = 1,
) -> Graph:
    """Lower a family to one graph for all tasks.

    *forms* names a form for each layer that has weights, or one for all. A task's inputs and outputs are called
    ``<net>.<port>`` and keep the caller's shapes and order. *batches*: the rows of each task, by default the nets'
    own. *dynamic*: the rows of each task are only known at run time, and may be zero. *align*: for the form
    ``fused``, the numbers of one vector load (8 in half precision, 4 in single), at the price of a little padding.
    Raises ``StitchError`` if a form cannot compute its layer.
    """
    counts = [DYNAMIC] * family.tasks if dynamic else list(family.batches if batches is None else batches)
    if len(counts) != family.tasks:
        raise StitchError(f"{len(counts)} batches for {family.tasks} models; give one for each")
    builder = Builder("+".join(net.name for net in family.nets))
    builder.reserve(_port_names(family))
    builder.tuned = any(net.tuned for net in family.nets)
    room = Room(builder, family, wire(family), tidy(sharing), counts, align)
    _read_inputs(room)
    lower_layers(room, forms)
    builder.layer = ""
    _write_outputs(room)
    return _prune(builder.finish())


def port_name(family: Family, task: int, port: Port) -> str:
    """The graph's name of a port of one of its models."""
    return f"{family.nets[task].name}.{port.name}"


def formed_layers(family: Family) -> list[FamilyLayer]:
    """The layers that take a form: dense and depthwise convolutions."""
    return [layer for layer in family.layers if role(layer) in ("dense", "depthwise")]


def _port_names(family: Family) -> list[str]:
    """The graph's names of all ports; ``StitchError`` if two are equal."""
    ports = [(task, port) for task, net in enumerate(family.nets) for port in (*net.inputs, *net.outputs)]
    names = [port_name(family, task, port) for task, port in ports]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise StitchError(f"two ports are called {twice[0]}; give the models different names")
    return names


def _read_inputs(room: Room) -> None:
    """Add the inputs of all tasks to the graph."""
    family = room.family
    for number, value in enumerate(family.inputs):
        tensors = []
        for task, net in enumerate(family.nets):
            port = net.inputs[number]
            name = port_name(family, task, port)
            tensors.append(read_port(room.builder, port, net.values[port.value], name, room.rows.batches[task]))
        if number == 0:  # by its first input, a task's dynamic number of rows is known
            room.rows.start(tensors)
        room.enter(value, tensors)


def lower_layers(room: Room, forms: Forms) -> None:
    """Write the layers of the room's family; the room must have the values of its inputs."""
    readers = _readers(room.family)
    written: set[str] = set()
    for layer in room.family.layers:
        if layer.output in written:
            continue
        room.builder.layer = layer.name
        layer_role = role(layer)
        if layer_role in ("dense", "depthwise"):
            written.update(_write_formed(room, layer, _form(forms, layer), _followers(room, layer, readers)))
        elif layer_role == "separate":
            _write_alone(room, layer)
        else:
            room.put(layer.output, _write_channelwise(room, layer))


def _write_formed(room: Room, layer: FamilyLayer, form: Form, chain: list[FamilyLayer]) -> list[str]:
    """Write a layer in *form*; return the values computed: its output, and those of the layers fused into it.

    *chain*: the layers after it that may be fused into it.
    """
    if reason := form.refusal(room, layer):
        raise StitchError(
            f"{layer.name}: the form {form.name!r} cannot do it, {reason}; choose another, like 'separate'"
        )
    lowered = form.lower(room, layer, chain)
    outputs = [layer.output, *(follower.output for follower in chain[: lowered.consumed])]
    room.put(outputs[-1], lowered.placed)
    return outputs


def _write_alone(room: Room, layer: FamilyLayer) -> None:
    """Write *layer* task by task."""
    tensors = [
        emit(room.builder, op, [room.own(value, task) for value in layer.inputs]) for task, op in enumerate(layer.ops)
    ]
    room.enter(layer.output, tensors)


def _form(forms: Forms, layer: FamilyLayer) -> Form:
    """The form that *forms* names for *layer*."""
    name = forms if isinstance(forms, str) else forms.get(layer.name)
    if name is None:
        raise StitchError(f"{layer.name}: no form is named for it")
    if name not in FORMS:
        raise StitchError(f"{layer.name}: {unknown_name('form', name, FORMS)}")
    return FORMS[name]


def _readers(family: Family) -> dict[str, list[FamilyLayer | None]]:
    """Value -> the layers that read it; None stands for an output or a tail."""
    readers: dict[str, list[FamilyLayer | None]] = {value: [] for value in family.values}
    for layer in family.layers:
        for value in layer.inputs:
            readers[value].append(layer)
    for value in (*family.outputs, *(value for bridge in family.bridges for value in bridge.values())):
        readers[value].append(None)
    return readers


def _followers(room: Room, layer: FamilyLayer, readers: Mapping[str, list[FamilyLayer | None]]) -> list[FamilyLayer]:
    """The chain of layers after *layer* that a form may fuse into it.

    Each is the only reader of the one before. The chain ends at a layer that needs another value not computed yet.
    """
    chain: list[FamilyLayer] = []
    value = layer.output
    while len(readers[value]) == 1 and (reader := readers[value][0]) is not None and reader.op.kind in _CHAINED:
        if not all(room.has(other) for other in reader.inputs if other != value):
            break
        chain.append(reader)
        value = reader.output
    return chain


def _write_outputs(room: Room) -> None:
    """Write the tails and the outputs of all tasks."""
    family = room.family
    common = {(task, port.name): value for value, ports in family.outputs.items() for task, port in enumerate(ports)}
    for task, net in enumerate(family.nets):
        tensors = _run_tail(room, task)
        for port in net.outputs:
            value = common.get((task, port.name))
            tensor = tensors[port.value] if value is None else room.own(value, task)
            write_port(room.builder, port, tensor, port_name(family, task, port))


def _run_tail(room: Room, task: int) -> dict[str, str]:
    """Write the operations that only *task* has; return the task's own value -> tensor."""
    if not room.family.tails:
        return {}
    tensors = {own_name: room.own(value, task) for own_name, value in room.family.bridges[task].items()}
    for op in room.family.tails[task]:
        room.builder.layer = op.name
        tensors[op.output] = emit(room.builder, op, [tensors[value] for value in op.inputs])
    room.builder.layer = ""
    return tensors


def _prune(graph: Graph) -> Graph:
    """*graph* without steps and constants that no output needs."""
    needed = {tensor.name for tensor in graph.outputs}
    steps = []
    for step in reversed(graph.steps):
        if needed.intersection(step.outputs):
            needed.update(step.inputs)
            steps.append(step)
    constants = {name: array for name, array in graph.constants.items() if name in needed}
    return replace(graph, steps=tuple(reversed(steps)), constants=constants, weights=graph.weights & constants.keys())


_ZERO_AT_ZERO = frozenset(
    operator.stitching.function
    for operator in OPERATORS.values()
    if operator.stitching is not None and operator.stitching.keeps_zero
)
"""Unary functions f with f(0) = 0."""


def _write_channelwise(room: Room, layer: FamilyLayer) -> PlacedValue:
    """Write a layer that keeps channels apart; return its output."""
    if layer.op.kind == "affine":
        return _write_affine(room, layer)
    layout = _layout(room, layer)
    sources = [room.get(value, layout) for value in layer.inputs]
    tensor_count = room.rows.tasks if layout == APART else 1
    tensors = [
        emit(room.builder, layer.ops[number], [source.tensors[number] for source in sources])
        for number in range(tensor_count)
    ]
    clean = all(source.clean for source in sources) and keeps_zero(layer.op)
    return PlacedValue(layout, tuple(tensors), clean or layout == APART)  # apart, there are no other tasks' columns


def _layout(room: Room, layer: FamilyLayer) -> Layout:
    """The layout in which *layer* is computed."""
    layout = room.layout(*layer.inputs)
    if len({op.payload.signature for op in layer.ops if op.payload is not None}) > 1:
        return APART  # each model rounds to a format of its own
    # stacked, the tasks' channels lie side by side, so that operands cannot be concatenated
    return COMPACT if layer.op.kind == "concat" and layout == STACKED else layout


def _write_affine(room: Room, layer: FamilyLayer) -> PlacedValue:
    """Write an affine in the layout of its input; return its output."""
    channels = room.channels(layer.output)
    affine = Affine.from_layer(layer, channels.widths)
    layout = room.layout(layer.inputs[0])
    source = room.get(layer.inputs[0], layout)
    if layout == APART:
        tensors = [_write_affine_alone(room, channels, affine, *pair) for pair in enumerate(source.tensors)]
        return PlacedValue(APART, tuple(tensors))
    scale, shift = channels.table(layout, affine.scales, 1.0), channels.table(layout, affine.shifts)
    if layout == STACKED:  # each column belongs to one task; the lines of the others have the neutral 1 and 0 there
        scale, shift = scale.prod(axis=0, keepdims=True), shift.sum(axis=0, keepdims=True)
    tensor = apply_table(room, source.tensors[0], "Mul", scale)
    return PlacedValue(layout, (apply_table(room, tensor, "Add", shift),), source.clean)


def _write_affine_alone(room: Room, channels: Channels, affine: Affine, task: int, tensor: str) -> str:
    """Write the affine of one task, whose channels are laid out in the order ``Channels.order``."""
    order = channels.order(task)
    scale, shift = (values[task][order].astype(np.float32) for values in (affine.scales, affine.shifts))
    return scale_and_shift(room.builder, tensor, scale, shift)


def keeps_zero(op: Op) -> bool:
    """Whether *op* maps zeros to zeros, so that empty columns stay zero."""
    if op.kind != "unary":
        return True
    if op.function == "Clip":
        return op.settings.get("min", 0.0) <= 0.0 <= op.settings.get("max", 0.0)
    if op.function == "HardSigmoid":
        return op.settings.get("beta", 0.5) <= 0.0
    return op.function in _ZERO_AT_ZERO
