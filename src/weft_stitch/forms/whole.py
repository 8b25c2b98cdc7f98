"""The forms that compute a layer of all tasks in one way: ``mts``, ``grouped``, ``separate`` and ``fused``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np

from weft_stitch.family import FamilyLayer
from weft_stitch.forms.base import (
    Form,
    Lowered,
    apply_table,
    batched_product,
    conv,
    covers_picture,
    kernel_origin,
    leading_affine,
    scale_outputs,
)
from weft_stitch.forms.room import PlacedValue, Room
from weft_stitch.forms.split import Split
from weft_stitch.layouts import (
    APART,
    COMPACT,
    FUSED,
    STACKED,
    STITCHED,
    Affine,
    Channels,
    Layout,
    all_agree,
    kernel,
    merge_values,
)
from weft_stitch.net import Array, Op
from weft_stitch.packing import LARGEST, Activation, align_up, pack


class Mts(Form):
    """One convolution from all blocks to all blocks, with zeros where no task has the pair (the paper's form).

    Its matrix has the shared U first, X_t beside U, Y_t below it, and Z_t on the diagonal. Its weights take (stitched
    inputs) x (stitched outputs) x taps, zero blocks included. A row's columns of other tasks' blocks contain garbage,
    which is set to zero by selection before any operation mixes channels.
    """

    name = "mts"

    def lower(self, room: Room, layer: FamilyLayer, chain: Sequence[FamilyLayer]) -> Lowered:
        """Write one convolution over all blocks; scales and shifts that tasks do not agree on follow as tables."""
        inputs, outputs = room.channels(layer.inputs[0]), room.channels(layer.output)
        affine, consumed = leading_affine(room, layer, chain)
        source = room.get(layer.inputs[0], STITCHED, clean=not layer.op.depthwise)  # only dense layers mix columns
        fold = all_agree(outputs, affine.scales)  # whether scales are multiplied into the weights
        weight = _stitched_matrix(layer, inputs, outputs, affine if fold else Affine.identity(outputs.widths))
        shift_in_bias = fold and all_agree(outputs, affine.shifts)
        groups = weight.shape[0] if layer.op.depthwise else 1
        bias = merge_values(outputs, affine.shifts) if shift_in_bias else None
        origin = kernel_origin(room, layer, outputs.parts, inputs.parts, folded=affine.layers if fold else 0)
        tensor = conv(room, layer, source.tensors[0], weight, bias, groups, origin)
        if not fold:
            tensor = apply_table(room, tensor, "Mul", outputs.table(STITCHED, affine.scales, 1.0))
        if not shift_in_bias:
            tensor = apply_table(room, tensor, "Add", outputs.table(STITCHED, affine.shifts))
        zeros_stay = layer.op.depthwise and source.clean and (bias is None or not bias.any())
        return Lowered(PlacedValue(STITCHED, (tensor,), clean=zeros_stay), consumed)


def _stitched_matrix(layer: FamilyLayer, inputs: Channels, outputs: Channels, affine: Affine) -> Array:
    """The matrix from every block to every block, zero where no task has the pair."""
    kernels = [scale_outputs(kernel(layer, task), affine.scales[task]) for task in range(outputs.tasks)]
    if layer.op.depthwise:
        return merge_values(outputs, kernels)
    matrix = np.zeros((outputs.width(STITCHED), inputs.width(STITCHED), *layer.op.window.kernel), kernels[0].dtype)
    for task in reversed(range(outputs.tasks)):
        target = np.ix_(outputs.columns(STITCHED, task), inputs.columns(STITCHED, task))
        matrix[target] = kernels[task][np.ix_(outputs.order(task), inputs.order(task))]
    return matrix


class Grouped:
    """One grouped convolution with a group per task, as in NetFuse; it needs equal batches."""

    name = "grouped"

    def refusal(self, room: Room, layer: FamilyLayer) -> str:
        if room.rows.dynamic:
            return "its rows are only known at run time"
        return "" if room.rows.equal else f"the batches {list(room.rows.batches)} are not equal"

    def lower(self, room: Room, layer: FamilyLayer, chain: Sequence[FamilyLayer]) -> Lowered:
        """Write one grouped convolution, or a batched product if the window covers the whole picture."""
        inputs, outputs = room.channels(layer.inputs[0]), room.channels(layer.output)
        affine, consumed = leading_affine(room, layer, chain)
        weight = _padded_matrices(layer, inputs, outputs, affine)
        bias = outputs.table(COMPACT, affine.shifts)
        if covers_picture(room, layer):
            source = room.tensor(layer.inputs[0], COMPACT)
            return Lowered(PlacedValue(COMPACT, (batched_product(room, layer, source, weight, bias),)), consumed)
        tensor = room.tensor(layer.inputs[0], STACKED)
        groups = outputs.tasks * (weight.shape[1] if layer.op.depthwise else 1)
        flat = weight.reshape(-1, *weight.shape[2:])
        return Lowered(PlacedValue(STACKED, (conv(room, layer, tensor, flat, bias.ravel(), groups),)), consumed)


def _padded_matrices(layer: FamilyLayer, inputs: Channels, outputs: Channels, affine: Affine) -> Array:
    """The tasks' matrices [tasks, widest output, widest input, height, width], with zeros where a task is narrower."""
    depthwise = layer.op.depthwise
    shape = (outputs.tasks, outputs.width(COMPACT), 1 if depthwise else inputs.width(COMPACT))
    weight = np.zeros((*shape, *layer.op.window.kernel), kernel(layer, 0).dtype)
    for task in range(outputs.tasks):
        own_kernel, order = scale_outputs(kernel(layer, task), affine.scales[task]), outputs.order(task)
        columns = outputs.columns(COMPACT, task)
        if depthwise:
            weight[task, columns] = own_kernel[order]
        else:
            weight[task][np.ix_(columns, inputs.columns(COMPACT, task))] = own_kernel[np.ix_(order, inputs.order(task))]
    return weight


class Separate(Form):
    """One convolution per task, as in the separate models."""

    name = "separate"

    def lower(self, room: Room, layer: FamilyLayer, chain: Sequence[FamilyLayer]) -> Lowered:
        """Write a convolution for each task."""
        inputs, outputs = room.channels(layer.inputs[0]), room.channels(layer.output)
        affine, consumed = leading_affine(room, layer, chain)
        tensors = []
        for task, tensor in enumerate(room.get(layer.inputs[0], APART).tensors):
            order = outputs.order(task)
            weight = scale_outputs(kernel(layer, task), affine.scales[task])
            weight = weight[order] if layer.op.depthwise else weight[np.ix_(order, inputs.order(task))]
            groups = len(order) if layer.op.depthwise else 1
            origin = kernel_origin(
                room, layer, outputs.parts_of(task), inputs.parts_of(task), task=task, folded=affine.layers
            )
            tensors.append(conv(room, layer, tensor, weight, affine.shifts[task][order], groups, origin))
        return Lowered(PlacedValue(APART, tuple(tensors)), consumed)


WIDEST = 31
"""Widest kernel, in taps: the Triton kernel has one bit of a 32-bit integer for each."""


class Fused:
    """One step for a layer of all tasks, each row with its own weights; CUDA runs it as one kernel.

    It multiplies nothing by zero and stores every weight once. The following scales and shifts per task and channel, a
    residual addition and an activation are fused into it. ``packing`` lays out its weights, ``running.module`` runs it.
    A depthwise layer, which would gain nothing, and one whose output carries several spaces are lowered as ``split``.
    """

    name = "fused"

    def refusal(self, room: Room, layer: FamilyLayer) -> str:
        """Why the kernel cannot compute *layer*; empty if it can."""
        if room.rows.dynamic:
            return "its rows are only known at run time"
        if max(layer.op.window.kernel) > WIDEST:
            return f"its kernel is wider than {WIDEST}"
        numbers = _stored_numbers(room, layer)
        return "" if numbers < LARGEST else f"its {numbers} weights are more than the {LARGEST} it can count"

    def lower(self, room: Room, layer: FamilyLayer, chain: Sequence[FamilyLayer]) -> Lowered:
        """Write one ``FusedConv`` with the affines, the residual and the activation that follow in *chain*."""
        inputs, outputs = room.channels(layer.inputs[0]), room.channels(layer.output)
        if layer.op.depthwise or len(outputs.spaces) > 1:  # see ``Fused``
            return Split().lower(room, layer, chain)
        input_layout, output_layout = fused_layout(room, inputs), fused_layout(room, outputs)
        kernels = [kernel(layer, task) for task in range(outputs.tasks)]
        spaces = (inputs.spaces, outputs.spaces[0])
        packed = pack(kernels, *spaces, layer.op.window, align=output_layout.align, input_align=input_layout.align)
        affine, consumed = leading_affine(room, layer, chain)
        tensors = [
            room.tensor(layer.inputs[0], input_layout),
            room.builder.constant(packed.weights, "weight", weight=True),
            room.builder.constant(packed.spread(affine.scales), "scale"),
            room.builder.constant(packed.spread(affine.shifts), "shift"),
        ]
        if other := _residual(layer, chain[consumed:], room):
            tensors.append(room.tensor(other, output_layout))
            consumed += 1
        activation = _activation(chain[consumed].op) if consumed < len(chain) else Activation("")
        consumed += activation is not None and activation.function != ""  # one more layer if there is an activation
        size = room.family.values[layer.output][0]
        picture = (size.height, size.width)
        tensor = room.builder.add(
            "FusedConv",
            *tensors,
            shape=(room.rows.total, packed.outputs, *picture),
            packed=replace(packed, weights=np.zeros(0, packed.weights.dtype)),  # the weights are in a constant already
            rows=room.rows.batches,
            activation=activation or Activation(""),
            macs=sum(array.size * rows for array, rows in zip(kernels, room.rows.batches, strict=True)) * prod(picture),
        )
        return Lowered(PlacedValue(output_layout, (tensor,)), consumed)


def _stored_numbers(room: Room, layer: FamilyLayer) -> int:
    """Upper bound on the count of numbers that ``pack`` stores."""
    outputs, inputs = room.channels(layer.output), room.channels(layer.inputs[0])
    pairs = ((out, inp) for out in outputs.parts for inp in inputs.parts if out.tasks & inp.tasks)
    return sum(align_up(out.width, room.align) * inp.width for out, inp in pairs) * prod(layer.op.window.kernel)


def fused_layout(room: Room, channels: Channels) -> Layout:
    """The layout of *channels* for the form ``fused``; few channels, as those of a picture, get a smaller alignment."""
    next_power_of_two = 1 << (max(channels.widths) - 1).bit_length()
    return Layout(FUSED, min(room.align, next_power_of_two))


def _residual(layer: FamilyLayer, chain: Sequence[FamilyLayer], room: Room) -> str:
    """The other operand if *chain* begins with an addition of two values of one size; else empty."""
    if not chain or chain[0].op.kind != "add" or len(chain[0].inputs) != 2:
        return ""
    values = room.family.values
    others = [value for value in chain[0].inputs if value in values and room.has(value)]
    same_size = [value for value in others if values[value] == values[chain[0].output]]
    return same_size[0] if len(same_size) == 1 else ""


def _activation(op: Op) -> Activation | None:
    """The kernel's activation for *op*, with ONNX's default parameters; None if the kernel cannot compute it."""
    if op.kind != "unary":
        return None
    if op.function == "HardSigmoid":
        return Activation(op.function, op.settings.get("alpha", 0.2), op.settings.get("beta", 0.5))
    if op.function == "Clip":
        return Activation(op.function, op.settings.get("min", -np.inf), op.settings.get("max", np.inf))
    if op.function == "LeakyRelu":
        return Activation(op.function, op.settings.get("alpha", 0.01))
    return Activation(op.function) if op.function in ("Relu", "Sigmoid", "HardSwish", "Silu") else None
