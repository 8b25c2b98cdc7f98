"""Operations that keep channels apart, in whatever layout their input has: affine, unary, pools, add, mul, concat."""

from __future__ import annotations

import numpy as np

from weft_stitch.emit import emit, scale_and_shift
from weft_stitch.family import FamilyLayer
from weft_stitch.forms.base import by_table
from weft_stitch.forms.room import Placed, Room
from weft_stitch.layouts import APART, COMPACT, STACKED, Channels, Layout
from weft_stitch.net import Op
from weft_stitch.weights import Affine

_ZERO_AT_ZERO = frozenset(
    ("Relu", "Tanh", "HardSwish", "LeakyRelu", "Elu", "Gelu", "Silu", "Neg", "Abs", "Sqrt", "Identity")
)


def channelwise(room: Room, layer: FamilyLayer) -> Placed:
    """Write *layer* and say where its output lies."""
    if layer.op.kind == "affine":
        return _affine(room, layer)
    layout = _layout(room, layer)
    sources = [room.get(value, layout) for value in layer.inputs]
    count = room.rows.tasks if layout == APART else 1
    tensors = [
        emit(room.builder, layer.ops[task], [source.tensors[task] for source in sources]) for task in range(count)
    ]
    clean = all(source.clean for source in sources) and keeps_zero(layer.op)
    return Placed(layout, tuple(tensors), clean or layout == APART)


def _layout(room: Room, layer: FamilyLayer) -> Layout:
    layout = room.layout(*layer.inputs)
    if len({op.payload.signature for op in layer.ops if op.payload is not None}) > 1:
        return APART  # each model rounds to a format of its own
    return COMPACT if layer.op.kind == "concat" and layout == STACKED else layout


def _affine(room: Room, layer: FamilyLayer) -> Placed:
    channels = room.channels(layer.output)
    affine = Affine.of(layer, channels.widths)
    layout = room.layout(layer.inputs[0])
    source = room.get(layer.inputs[0], layout)
    if layout == APART:
        alone = [_affine_alone(room, channels, affine, task, each) for task, each in enumerate(source.tensors)]
        return Placed(APART, tuple(alone))
    scale, shift = channels.table(layout, affine.scales, 1.0), channels.table(layout, affine.shifts)
    if layout == STACKED:
        scale, shift = scale.prod(axis=0, keepdims=True), shift.sum(axis=0, keepdims=True)
    tensor = by_table(room, source.tensors[0], "Mul", scale)
    return Placed(layout, (by_table(room, tensor, "Add", shift),), source.clean)


def _affine_alone(room: Room, channels: Channels, affine: Affine, task: int, tensor: str) -> str:
    order = channels.order(task)
    scale, shift = (each[task][order].astype(np.float32) for each in (affine.scales, affine.shifts))
    return scale_and_shift(room.builder, tensor, scale, shift)


def keeps_zero(op: Op) -> bool:
    """Whether zeros stay zeros."""
    if op.kind != "unary":
        return True
    if op.function == "Clip":
        return op.settings.get("min", 0.0) <= 0.0 <= op.settings.get("max", 0.0)
    if op.function == "HardSigmoid":
        return op.settings.get("beta", 0.5) <= 0.0
    return op.function in _ZERO_AT_ZERO
