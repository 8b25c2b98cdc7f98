"""The form ``grouped`` (NetFuse): one convolution with a group for each task, every task padded to the widest.

Its weights take tasks x (widest input) x (widest output) x taps: shared ones are copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft_stitch.family import FamilyLayer
from weft_stitch.forms.base import Done, batched_product, conv, covers, leading_affine, scaled
from weft_stitch.forms.room import Placed, Room
from weft_stitch.layouts import COMPACT, STACKED, Channels
from weft_stitch.net import Array
from weft_stitch.weights import Affine, kernel


class Grouped:
    name = "grouped"

    def refusal(self, room: Room, layer: FamilyLayer) -> str:
        if room.rows.dynamic:
            return "its rows are only known at run time"
        return "" if room.rows.equal else f"the batches {list(room.rows.batches)} are not equal"

    def lower(self, room: Room, layer: FamilyLayer, chain: Sequence[FamilyLayer]) -> Done:
        inputs, outputs = room.channels(layer.inputs[0]), room.channels(layer.output)
        affine, used = leading_affine(room, layer, chain)
        weight = _matrices(layer, inputs, outputs, affine)
        bias = outputs.table(COMPACT, affine.shifts)
        if covers(room, layer):
            source = room.tensor(layer.inputs[0], COMPACT)
            return Done(Placed(COMPACT, (batched_product(room, layer, source, weight, bias),)), used)
        tensor = room.tensor(layer.inputs[0], STACKED)
        groups = outputs.tasks * (weight.shape[1] if layer.op.depthwise else 1)
        flat = weight.reshape(-1, *weight.shape[2:])
        return Done(Placed(STACKED, (conv(room, layer, tensor, flat, bias.ravel(), groups),)), used)


def _matrices(layer: FamilyLayer, inputs: Channels, outputs: Channels, affine: Affine) -> Array:
    """[tasks, widest output, widest input, height, width], zeros where a task is narrower."""
    depthwise = layer.op.depthwise
    shape = (outputs.tasks, outputs.width(COMPACT), 1 if depthwise else inputs.width(COMPACT))
    weight = np.zeros((*shape, *layer.op.window.kernel), kernel(layer, 0).dtype)
    for task in range(outputs.tasks):
        mine, order = scaled(kernel(layer, task), affine.scales[task]), outputs.order(task)
        columns = outputs.columns(COMPACT, task)
        if depthwise:
            weight[task, columns] = mine[order]
        else:
            weight[task][np.ix_(columns, inputs.columns(COMPACT, task))] = mine[np.ix_(order, inputs.order(task))]
    return weight
