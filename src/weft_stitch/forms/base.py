"""The protocol of forms, ``Form``, and the steps that several forms use.

``Room`` is the state of a lowering: its graph builder, and the values computed so far. ``Channels`` has a value's
channels in all tasks; a *part* of them is a block that the same tasks share.
"""

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
    """A layer's output in a form, and what was fused into it."""

    placed: PlacedValue
    """The output of the layer, or of the last layer fused into it."""
    consumed: int = 0
    """Number of following layers that were fused into it."""


class Form(Protocol):
    """A way to compute a convolution, dense or depthwise, for all tasks."""

    @property
    def name(self) -> str: ...

    def refusal(self, room: Room, layer: FamilyLayer) -> str:
        """Why the form cannot compute *layer*; empty if it can."""
        return ""

    def lower(self, room: Room, layer: FamilyLayer, chain: Sequence[FamilyLayer]) -> Lowered:
        """Add the steps of *layer*, and of as many layers of *chain* as the form can fuse into it.

        *chain*: the layers that follow (affine, unary, add), each the only reader of the one before. The other operands
        of an addition in the chain are in the room already.
        """
        ...


def leading_affine(room: Room, layer: FamilyLayer, chain: Sequence[FamilyLayer]) -> tuple[Affine, int]:
    """Combine the affines that follow *layer* to one; return it, and how many were combined.

    Weights that were tuned to a number format must keep it, so an affine that would scale them is not combined, nor is
    any after it.
    """
    widths = room.channels(layer.output).widths
    affine, consumed = Affine.identity(widths), 0
    while consumed < len(chain) and chain[consumed].op.kind == "affine" and not _leaves_format(layer, chain[consumed]):
        affine = affine.then(Affine.from_layer(chain[consumed], widths))
        consumed += 1
    return affine, consumed


def _leaves_format(layer: FamilyLayer, affine: FamilyLayer) -> bool:
    """Whether folding *affine* into *layer* would move tuned weights out of their number format."""
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
    """Add a convolution of *tensor* with the window of *layer*; a bias of zeros is omitted.

    *weight*: [out, in / groups, height, width]. *origin*: see ``graph_steps.convolve``.
    """
    dtype = kernel(layer, 0).dtype
    shift = None if bias is None or not bias.any() else bias.astype(dtype)
    return convolve(
        room.builder, tensor, weight.astype(dtype), shift, window=layer.op.window, groups=groups, origin=origin
    )


def kernel_origin(
    room: Room,
    layer: FamilyLayer,
    outs: Sequence[BlockPart],
    ins: Sequence[BlockPart],
    *,
    task: int | None = None,
    folded: int = 0,
) -> KernelOrigin:
    """The origin of the kernels from the input parts *ins* of *layer* to its output parts *outs*.

    *task*, *folded*: see ``KernelOrigin``.
    """
    rows = _part_numbers(room.channels(layer.output), outs)
    columns = () if layer.op.depthwise else _part_numbers(room.channels(layer.inputs[0]), ins)
    return KernelOrigin(layer.op, outs=rows, ins=columns, task=task, folded=folded)


def _part_numbers(channels: Channels, parts: Sequence[BlockPart]) -> tuple[int, ...]:
    """The indices of *parts* in ``Channels.parts``."""
    index_of = {part: index for index, part in enumerate(channels.parts)}
    return tuple(index_of[part] for part in parts)


def covers_picture(room: Room, layer: FamilyLayer) -> bool:
    """Whether a convolution without groups is a product of matrices, because its window covers the whole picture.

    *room*: the state of the lowering, which knows the sizes of values. Their heights and widths agree in all tasks.
    """
    window, size = layer.op.window, room.family.values[layer.inputs[0]][0]  # the size in task 0, as in every task
    return layer.op.groups == 1 and window.kernel == (size.height, size.width) and not any(window.pads)


def batched_product(room: Room, layer: FamilyLayer, tensor: str, weight: Array, bias: Array) -> str:
    """Multiply the rows of each task by its own matrix, and add its bias.

    *weight*: [tasks, out, in, height, width]. *bias*: [tasks, out]. All tasks have equally many rows.
    """
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


def scale_outputs(weight: Array, scale: Array) -> Array:
    """*weight* with each output channel multiplied by its *scale*."""
    return weight if (scale == 1).all() else weight * scale[:, None, None, None]


def apply_table(room: Room, tensor: str, operator: str, table: Array, tasks: Sequence[int] | None = None) -> str:
    """Multiply ("Mul") or add ("Add") to each row its task's line of *table* [tasks, columns].

    *tasks*: those whose rows *tensor* has, by default all.
    """
    neutral = 1.0 if operator == "Mul" else 0.0
    if (table == neutral).all():
        return tensor
    rows = room.rows.table(table.astype(np.float32), tasks)
    return room.builder.add(operator, tensor, rows, shape=room.builder.shape(tensor))
