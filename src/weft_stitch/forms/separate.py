"""The form ``separate``: each task by itself with all of its weights, shared ones copied. It can do every layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft_stitch.family import FamilyLayer
from weft_stitch.forms.base import Done, conv, leading_affine, origin, scaled
from weft_stitch.forms.room import Placed, Room
from weft_stitch.layouts import APART
from weft_stitch.weights import kernel


class Separate:
    name = "separate"

    def refusal(self, room: Room, layer: FamilyLayer) -> str:
        return ""

    def lower(self, room: Room, layer: FamilyLayer, chain: Sequence[FamilyLayer]) -> Done:
        inputs, outputs = room.channels(layer.inputs[0]), room.channels(layer.output)
        affine, used = leading_affine(room, layer, chain)
        tensors = []
        for task, tensor in enumerate(room.get(layer.inputs[0], APART).tensors):
            order = outputs.order(task)
            weight = scaled(kernel(layer, task), affine.scales[task])
            weight = weight[order] if layer.op.depthwise else weight[np.ix_(order, inputs.order(task))]
            groups = len(order) if layer.op.depthwise else 1
            held = origin(room, layer, outputs.of(task), inputs.of(task), task=task, folded=affine.layers)
            tensors.append(conv(room, layer, tensor, weight, affine.shifts[task][order], groups, held))
        return Done(Placed(APART, tuple(tensors)), used)
