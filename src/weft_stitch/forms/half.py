"""The form ``half``: shared inputs meet all outputs in one convolution, own inputs their task's in a second.

conv(P, [U X_1 ... X_T]) for every row, of which a row keeps its own task's columns, plus a grouped (or per-task)
convolution of Q_t with [Y_t Z_t]. It stores what ``split`` does, but copies weights from blocks of some tasks only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft_stitch.family import FamilyLayer
from weft_stitch.forms.base import Done, by_table, conv, leading_affine, origin, scaled
from weft_stitch.forms.cells import Cell, CellWriter, members
from weft_stitch.forms.room import Placed, Room
from weft_stitch.forms.split import Split
from weft_stitch.layouts import COMPACT, STITCHED, BlockPart
from weft_stitch.weights import agreed, kernel


class Half:
    name = "half"

    def refusal(self, room: Room, layer: FamilyLayer) -> str:
        return ""

    def lower(self, room: Room, layer: FamilyLayer, chain: Sequence[FamilyLayer]) -> Done:
        affine, used = leading_affine(room, layer, chain)
        bench = CellWriter(room, layer, affine)
        parts = bench.inputs.parts
        common = tuple(part for part in parts if part.tasks == bench.all)
        own = {task: tuple(part for part in parts if task in part.tasks and part not in common) for task in bench.all}
        if layer.op.depthwise or not common or not all(own.values()) or len(bench.outputs.spaces) > 1:
            return Split().lower(room, layer, chain)
        first = _everywhere(bench, common)
        outs = {task: tuple(part for part in bench.outputs.parts if task in part.tasks) for task in bench.all}
        cells = {task: Cell(frozenset({task}), outs[task], own[task]) for task in bench.all}
        second = bench.stack_own(cells, shift=True)
        tensor = room.builder.add("Add", first, second, shape=room.builder.shape(first))
        whole = bool(bench.outputs.owned(COMPACT).all())
        return Done(Placed(COMPACT, (tensor,), clean=whole), used)


def _everywhere(bench: CellWriter, common: tuple[BlockPart, ...]) -> str:
    """The shared inputs' share of all outputs, each row's own columns taken out."""
    outputs, layer, scales = bench.outputs, bench.layer, bench.affine.scales
    fold = agreed(outputs, scales)
    weight = np.zeros(
        (outputs.width(STITCHED), sum(part.width for part in common), *layer.op.window.kernel), kernel(layer, 0).dtype
    )
    for task in bench.all:
        mine = scaled(kernel(layer, task), scales[task]) if fold else kernel(layer, task)
        weight[outputs.columns(STITCHED, task)] = mine[np.ix_(outputs.order(task), members(common, task))]
    source = bench.room.part(bench.value, bench.all, common)
    held = origin(bench.room, layer, outputs.parts, common, folded=bench.affine.layers if fold else 0)
    whole = conv(bench.room, layer, source, weight, None, origin=held)
    taken = bench.room.moved(outputs, Placed(STITCHED, (whole,), clean=False), COMPACT)
    assert taken is not None
    if fold:
        return taken.tensors[0]
    return by_table(bench.room, taken.tensors[0], "Mul", outputs.table(COMPACT, scales, 1.0))
