"""The protocol of forms, ``Form``, and the steps that several forms use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from weft_stitch.family import FamilyLayer
from weft_stitch.forms.room import PlacedValue, Room, reshape
from weft_stitch.graph import KernelOrigin
from weft_stitch.graph_steps import convolve, scales
from weft_stitch.layouts import Affine, BlockPart, Channels, kernel
from weft_stitch.net import Array


class Lowered(NamedTuple):
    """The result of lowering a layer in a form."""

    placed: PlacedValue
    """The output of the layer, or of the last following layer that was fused into it."""
    used: int = 0
    """The number of following layers that were fused into it."""


class Form(Protocol):
    """A way to compute a convolution, dense or depthwise, of all tasks."""

    @property
    def name(self) -> str: ...

    def refusal(self, room: Room, layer: FamilyLayer) -> str:
        """Why it cannot do *layer*; empty if it can."""
        return ""

    def lower(self, room: Room, layer: FamilyLayer, chain: Sequence[FamilyLayer]) -> Lowered:
        """Add the steps of *layer*; *chain* (affine, unary, add) follows it, and nothing else reads between.

        The other operands of an add in the chain are in the room already.
        """
        ...


def leading_affine(room: Room, layer: FamilyLayer, chain: Sequence[FamilyLayer]) -> tuple[Affine, int]:
    """Join the affines that follow *layer*; return their product and count. Tuned weights are never scaled."""
    widths = room.channels(layer.output).widths
    affine, used = Affine.identity(widths), 0
    while used < len(chain) and chain[used].op.kind == "affine" and not _leaves_format(layer, chain[used]):
        affine = affine.then(Affine.from_layer(chain[used], widths))
        used += 1
    return affine, used


def _leaves_format(layer: FamilyLayer, affine: FamilyLayer) -> bool:
    """Whether folding *affine* would move tuned weights out of their number format."""
    return any(op.tuned for op in layer.ops) and any(map(scales, affine.ops))


def conv(
    room: Room,
    layer: FamilyLayer,
    tensor: str,
    weight: Array,
    bias: Array | None,
    groups: int = 1,
    origin: KernelOrigin | None = None,
) -> str:
    """A convolution with the window of *layer*; a bias of zeros is left out."""
    dtype = kernel(layer, 0).dtype
    shift = None if bias is None or not bias.any() else bias.astype(dtype)
    return convolve(
        room.builder, tensor, weight.astype(dtype), shift, window=layer.op.window, groups=groups, origin=origin
    )


def origin(
    room: Room,
    layer: FamilyLayer,
    outs: Sequence[BlockPart],
    ins: Sequence[BlockPart],
    *,
    task: int | None = None,
    folded: int = 0,
) -> KernelOrigin:
    """Record the origin of the kernels from some input parts of *layer* to some output parts."""
    rows = _numbers(room.channels(layer.output), outs)
    columns = () if layer.op.depthwise else _numbers(room.channels(layer.inputs[0]), ins)
    return KernelOrigin(layer.op, outs=rows, ins=columns, task=task, folded=folded)


def _numbers(channels: Channels, parts: Sequence[BlockPart]) -> tuple[int, ...]:
    places = {part: number for number, part in enumerate(channels.parts)}
    return tuple(places[part] for part in parts)


def covers(room: Room, layer: FamilyLayer) -> bool:
    """Whether the window of a dense layer sees the whole picture at once: a product of matrices."""
    window, size = layer.op.window, room.family.values[layer.inputs[0]][0]
    return layer.op.groups == 1 and window.kernel == (size.height, size.width) and not any(window.pads)


def batched_product(room: Room, layer: FamilyLayer, tensor: str, weight: Array, bias: Array) -> str:
    """The rows of each task times its own matrix; *weight* [tasks, out, in, height, width], *bias* [tasks, out]."""
    builder, tasks = room.builder, len(weight)
    rows, channels, height, width = builder.shape(tensor)
    outs, depth = weight.shape[1], channels * height * width
    flat = reshape(builder, tensor, (tasks, rows // tasks, depth))
    matrix = weight.reshape(tasks, outs, depth).transpose(0, 2, 1).astype(kernel(layer, 0).dtype)
    shape = (tasks, rows // tasks, outs)
    product = builder.add("MatMul", flat, builder.constant(matrix, "weight", weight=True), shape=shape)
    if bias.any():
        term = builder.constant(bias[:, None].astype(matrix.dtype), "bias", weight=True)
        product = builder.add("Add", product, term, shape=shape)
    return reshape(builder, product, (rows, outs, 1, 1))


def scaled(weight: Array, scale: Array) -> Array:
    """*weight* with its output channels scaled."""
    return weight if (scale == 1).all() else weight * scale[:, None, None, None]


def by_table(room: Room, tensor: str, operator: str, table: Array, tasks: Sequence[int] | None = None) -> str:
    """Mul or Add of a table [tasks, columns], each row with its task's."""
    neutral = 1.0 if operator == "Mul" else 0.0
    if (table == neutral).all():
        return tensor
    rows = room.rows.table(table.astype(np.float32), tasks)
    return room.builder.add(operator, tensor, rows, shape=room.builder.shape(tensor))
