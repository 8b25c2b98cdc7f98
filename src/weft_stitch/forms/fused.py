"""The form ``fused``: one step for a layer of all tasks, each row with its own weights; CUDA runs it as one kernel.

It has no extra multiplications, stores every weight once, and takes what follows along: scales and shifts per task and
channel, a residual, an activation. ``packing`` lays its weights out, ``running.fused`` runs it. A depthwise layer has
nothing to gain from it and is split, as is one whose output carries several spaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np

from weft_stitch.family import FamilyLayer
from weft_stitch.forms.base import Lowered, leading_affine
from weft_stitch.forms.room import PlacedValue, Room
from weft_stitch.forms.split import Split
from weft_stitch.layouts import FUSED, Channels, Layout, kernel
from weft_stitch.net import Op
from weft_stitch.packing import LARGEST, Activation, aligned, pack

WIDEST = 31
"""Taps along one side: the Triton kernel has a bit of a 32-bit integer for each."""


class Fused:
    """All tasks in one step, each row with its own weights; one kernel on CUDA."""

    name = "fused"

    def refusal(self, room: Room, layer: FamilyLayer) -> str:
        if room.rows.dynamic:
            return "its rows are only known at run time"
        if max(layer.op.window.kernel) > WIDEST:
            return f"its kernel is wider than {WIDEST}"
        numbers = _stored(room, layer)
        return "" if numbers < LARGEST else f"its {numbers} weights are more than the {LARGEST} it can count"

    def lower(self, room: Room, layer: FamilyLayer, chain: Sequence[FamilyLayer]) -> Lowered:
        inputs, outputs = room.channels(layer.inputs[0]), room.channels(layer.output)
        if layer.op.depthwise or len(outputs.spaces) > 1:
            return Split().lower(room, layer, chain)
        before, after = layout(room, inputs), layout(room, outputs)
        kernels = [kernel(layer, task) for task in range(outputs.tasks)]
        spaces = (inputs.spaces, outputs.spaces[0])
        packed = pack(kernels, *spaces, layer.op.window, align=after.align, input_align=before.align)
        affine, used = leading_affine(room, layer, chain)
        tensors = [
            room.tensor(layer.inputs[0], before),
            room.builder.constant(packed.weights, "weight", weight=True),
            room.builder.constant(packed.spread(affine.scales), "scale"),
            room.builder.constant(packed.spread(affine.shifts), "shift"),
        ]
        if other := _residual(layer, chain[used:], room):
            tensors.append(room.tensor(other, after))
            used += 1
        activation = _activation(chain[used].op) if used < len(chain) else Activation("")
        used += activation is not None and activation.function != ""
        size = room.family.values[layer.output][0]
        picture = (size.height, size.width)
        tensor = room.builder.add(
            "FusedConv",
            *tensors,
            shape=(room.rows.total, packed.outputs, *picture),
            packed=replace(packed, weights=np.zeros(0, packed.weights.dtype)),
            rows=room.rows.batches,
            activation=activation or Activation(""),
            macs=sum(array.size * rows for array, rows in zip(kernels, room.rows.batches, strict=True)) * prod(picture),
        )
        return Lowered(PlacedValue(after, (tensor,)), used)


def _stored(room: Room, layer: FamilyLayer) -> int:
    """Upper bound on the numbers that ``pack`` stores."""
    outputs, inputs = room.channels(layer.output), room.channels(layer.inputs[0])
    pairs = ((out, inp) for out in outputs.parts for inp in inputs.parts if out.tasks & inp.tasks)
    return sum(aligned(out.width, room.align) * inp.width for out, inp in pairs) * prod(layer.op.window.kernel)


def layout(room: Room, channels: Channels) -> Layout:
    """Few channels, as of a picture, are not filled up to the full alignment."""
    most = 1 << (max(channels.widths) - 1).bit_length()
    return Layout(FUSED, min(room.align, most))


def _residual(layer: FamilyLayer, chain: Sequence[FamilyLayer], room: Room) -> str:
    """The other operand of an addition of equals that comes next."""
    if not chain or chain[0].op.kind != "add" or len(chain[0].inputs) != 2:
        return ""
    values = room.family.values
    others = [value for value in chain[0].inputs if value in values and room.has(value)]
    same = [value for value in others if values[value] == values[chain[0].output]]
    return same[0] if len(same) == 1 else ""


def _activation(op: Op) -> Activation | None:
    """The kernel's activation for a unary; None where it has none."""
    if op.kind != "unary":
        return None
    if op.function == "HardSigmoid":
        return Activation(op.function, op.settings.get("alpha", 0.2), op.settings.get("beta", 0.5))
    if op.function == "Clip":
        return Activation(op.function, op.settings.get("min", -np.inf), op.settings.get("max", np.inf))
    if op.function == "LeakyRelu":
        return Activation(op.function, op.settings.get("alpha", 0.01))
    return Activation(op.function) if op.function in ("Relu", "Sigmoid", "HardSwish", "Silu") else None
