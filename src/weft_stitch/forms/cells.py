"""Convolutions between some blocks for the rows of some tasks: ``Cell``, and ``CellWriter`` that writes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from weft_stitch.family import FamilyLayer
from weft_stitch.forms.base import batched_product, by_table, conv, covers, origin, scaled
from weft_stitch.forms.room import Room
from weft_stitch.forms.rows import reshape, spread
from weft_stitch.layouts import COMPACT, BlockPart
from weft_stitch.net import Array
from weft_stitch.weights import Affine, agree, kernel

Tasks = frozenset[int]


class Cell(NamedTuple):
    """What the rows of *tasks* get at the output parts from these input parts, with weights that the tasks share."""

    tasks: Tasks
    outs: tuple[BlockPart, ...]
    ins: tuple[BlockPart, ...]

    @property
    def width(self) -> int:
        return sum(part.width for part in self.outs)


class CellWriter:
    """Writes the cells of one layer."""

    def __init__(self, room: Room, layer: FamilyLayer, affine: Affine) -> None:
        self.room, self.layer, self.affine = room, layer, affine
        self.value = layer.inputs[0]
        self.inputs, self.outputs = room.channels(self.value), room.channels(layer.output)
        self.all = frozenset(range(self.outputs.tasks))

    def cells(self, tasks: Tasks, outs: tuple[BlockPart, ...]) -> dict[Tasks, Cell]:
        """The cells of output parts that *tasks* share, by the tasks that have the inputs too."""
        if self.layer.op.depthwise:
            return {tasks: Cell(tasks, outs, tuple(part for part in self.inputs.parts if part.tasks == tasks))}
        found: dict[Tasks, list[BlockPart]] = {}
        for part in self.inputs.parts:
            if both := part.tasks & tasks:
                found.setdefault(both, []).append(part)
        return {both: Cell(both, outs, tuple(ins)) for both, ins in found.items()}

    def agree(self, values: tuple[Array, ...], parts: Iterable[BlockPart], tasks: Tasks) -> bool:
        return all(agree(values, part, tasks) for part in parts)

    def write(self, cell: Cell, *, shift: bool) -> str:
        """The convolution of one cell with its scale, and with its shift if asked for."""
        first = min(cell.tasks)
        fold = self.agree(self.affine.scales, cell.outs, cell.tasks)
        weight = self._weight(cell, first, fold=fold)
        bias = self._of(self.affine.shifts, cell, first) if shift else None
        groups = cell.width if self.layer.op.depthwise else 1
        source = self.room.part(self.value, cell.tasks, cell.ins)
        held = origin(self.room, self.layer, cell.outs, cell.ins, task=first, folded=self.affine.layers if fold else 0)
        tensor = conv(self.room, self.layer, source, weight, bias if fold else None, groups, held)
        if fold:
            return tensor
        tensor = self.by_table(tensor, "Mul", self.affine.scales, cell)
        return self.by_table(tensor, "Add", self.affine.shifts, cell) if shift else tensor

    def by_table(self, tensor: str, operator: str, values: tuple[Array, ...], cell: Cell) -> str:
        tasks = sorted(cell.tasks)
        table = np.stack([self._of(values, cell, task) for task in tasks])
        return by_table(self.room, tensor, operator, table, tasks)

    def write_own(self, cells: Mapping[int, Cell], *, shift: bool) -> list[str]:
        """A cell of each of some tasks: one grouped convolution if they are alike, else one by one; by task."""
        if not self._alike(cells):
            return [self.write(cells[task], shift=shift) for task in sorted(cells)]
        return self.room.rows.split(self._grouped(cells, shift=shift))

    def stack_own(self, cells: Mapping[int, Cell], *, shift: bool) -> str:
        """What ``write_own`` writes, as one tensor of all these tasks' rows, filled up to the widest."""
        if self._alike(cells):
            return self._grouped(cells, shift=shift)
        width = max(cell.width for cell in cells.values())
        tensors = [
            spread(self.room.builder, self.write(cells[task], shift=shift), np.arange(cells[task].width), width)
            for task in sorted(cells)
        ]
        return self.room.rows.join(tensors)

    def _alike(self, cells: Mapping[int, Cell]) -> bool:
        """Whether all tasks have one picture, and read and write as many channels at the same columns."""
        rows = self.room.rows
        if not (rows.equal and rows.batches[0] == 1 and len(cells) == rows.tasks > 1):
            return False
        shapes = {(cell.width, self.inputs.columns(COMPACT, task, cell.ins).tobytes()) for task, cell in cells.items()}
        return len(shapes) == 1

    def _grouped(self, cells: Mapping[int, Cell], *, shift: bool) -> str:
        """One group for each task; a view, as every task has one row."""
        room, tasks = self.room, sorted(cells)
        columns = self.inputs.columns(COMPACT, 0, cells[0].ins)
        source = room.select(room.get(self.value, COMPACT).tensors[0], columns)
        weight = np.stack([self._weight(cells[task], task, fold=True) for task in tasks])
        bias = np.stack([self._of(self.affine.shifts, cells[task], task) for task in tasks])
        if not shift:
            bias = np.zeros_like(bias)
        if covers(room, self.layer):
            return batched_product(room, self.layer, source, weight, bias)
        rows, width, *picture = room.builder.shape(source)
        flat = reshape(room.builder, source, (1, rows * width, *picture))
        groups = rows * (cells[0].width if self.layer.op.depthwise else 1)
        tensor = conv(room, self.layer, flat, weight.reshape(-1, *weight.shape[2:]), bias.ravel(), groups)
        return reshape(room.builder, tensor, (rows, cells[0].width, *room.builder.shape(tensor)[2:]))

    def _weight(self, cell: Cell, task: int, *, fold: bool) -> Array:
        outs, ins = members(cell.outs, task), members(cell.ins, task)
        whole = kernel(self.layer, task)
        weight = whole[outs] if self.layer.op.depthwise else whole[np.ix_(outs, ins)]
        return scaled(weight, self._of(self.affine.scales, cell, task)) if fold else weight

    def _of(self, values: tuple[Array, ...], cell: Cell, task: int) -> Array:
        return values[task][members(cell.outs, task)]


def members(parts: Iterable[BlockPart], task: int) -> Array:
    """The channels of the task's own model that *parts* are."""
    return np.concatenate([part.members[task] for part in parts])
