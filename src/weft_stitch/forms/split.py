"""The form ``split``: what tasks share is computed for all their rows at once, the rest task by task.

Output channels of one set of tasks form a class. Its inputs fall into cells by the tasks that have both: for a class of
all tasks, the shared inputs (U, every row) and each task's own (Y_t, that task's rows); for a task's own class, all its
inputs (X_t and Z_t). Nothing is multiplied by zero and no weight is stored twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

from weft_stitch.family import FamilyLayer
from weft_stitch.forms.base import (
    Form,
    Lowered,
    batched_product,
    by_table,
    conv,
    covers,
    leading_affine,
    origin,
    scaled,
)
from weft_stitch.forms.room import PlacedValue, Room, reshape, select, side_by_side, spread
from weft_stitch.layouts import APART, COMPACT, STITCHED, Affine, BlockPart, all_agree, kernel, tasks_agree
from weft_stitch.net import Array

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
        cell_inputs: dict[Tasks, list[BlockPart]] = {}
        for part in self.inputs.parts:
            if both := part.tasks & tasks:
                cell_inputs.setdefault(both, []).append(part)
        return {both: Cell(both, outs, tuple(ins)) for both, ins in cell_inputs.items()}

    def agree(self, values: tuple[Array, ...], parts: Iterable[BlockPart], tasks: Tasks) -> bool:
        return all(tasks_agree(values, part, tasks) for part in parts)

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
        return self.room.rows.split(self._group_tasks(cells, shift=shift))

    def stack_own(self, cells: Mapping[int, Cell], *, shift: bool) -> str:
        """What ``write_own`` writes, as one tensor of all these tasks' rows, filled up to the widest."""
        if self._alike(cells):
            return self._group_tasks(cells, shift=shift)
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

    def _group_tasks(self, cells: Mapping[int, Cell], *, shift: bool) -> str:
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


Classes = Mapping[Tasks, tuple[BlockPart, ...]]


class Split(Form):
    """The shared part on the rows of all tasks at once, the own parts grouped."""

    name = "split"

    def lower(self, room: Room, layer: FamilyLayer, chain: Sequence[FamilyLayer]) -> Lowered:
        affine, used = leading_affine(room, layer, chain)
        bench = CellWriter(room, layer, affine)
        classes: dict[Tasks, tuple[BlockPart, ...]] = {}
        for part in bench.outputs.parts:
            classes[part.tasks] = (*classes.get(part.tasks, ()), part)
        placed = _compact(bench, classes) if _by_strips(bench, classes) else _apart(bench, classes)
        return Lowered(placed, used)


def _by_strips(bench: CellWriter, classes: Classes) -> bool:
    """Whether the rows of all tasks look alike: shared columns, then own ones."""
    own = [tasks for tasks in classes if _is_own(bench, tasks)]
    shared = set(classes) - set(own)
    return len(bench.outputs.spaces) == 1 and shared <= {bench.all} and len(own) in (0, len(bench.all))


def _is_own(bench: CellWriter, tasks: Tasks) -> bool:
    return len(tasks) == 1 and tasks != bench.all


def _compact(bench: CellWriter, classes: Classes) -> PlacedValue:
    tensors = [_shared_rows(bench, bench.all, classes[bench.all])] if bench.all in classes else []
    if own := _own(bench, classes):
        tensors.append(bench.stack_own(own, shift=True))
    return PlacedValue(COMPACT, (side_by_side(bench.room.builder, tensors),))


def _apart(bench: CellWriter, classes: Classes) -> PlacedValue:
    """Each task's columns put together by themselves: sets of tasks cross, or a task has no channels of its own."""
    room = bench.room
    pieces: dict[int, list[str]] = {task: [] for task in bench.all}
    order: dict[int, list[BlockPart]] = {task: [] for task in bench.all}
    for tasks, outs in classes.items():
        if not _is_own(bench, tasks):
            for task, tensor in zip(
                sorted(tasks), room.rows.split(_shared_rows(bench, tasks, outs), tasks), strict=True
            ):
                pieces[task].append(tensor)
                order[task] += outs
    own = _own(bench, classes)
    for task, tensor in zip(sorted(own), bench.write_own(own, shift=True), strict=True) if own else ():
        pieces[task].append(tensor)
        order[task] += own[task].outs
    tensors = []
    for task in sorted(bench.all):
        places = np.argsort(members(order[task], task))
        wanted = places[bench.outputs.order(task)]
        tensors.append(select(room.builder, side_by_side(room.builder, pieces[task]), wanted))
    return PlacedValue(APART, tuple(tensors))


def _own(bench: CellWriter, classes: Classes) -> dict[int, Cell]:
    return {min(tasks): bench.cells(tasks, outs)[tasks] for tasks, outs in classes.items() if _is_own(bench, tasks)}


def _shared_rows(bench: CellWriter, tasks: Tasks, outs: tuple[BlockPart, ...]) -> str:
    """The rows of *tasks* at the channels they share."""
    cells = bench.cells(tasks, outs)
    common = cells.pop(tasks, None)
    own = {min(sharers): cell for sharers, cell in cells.items() if len(sharers) == 1}
    complete = len(own) == len(cells) in (0, len(tasks))
    early = common is not None and bench.agree(bench.affine.shifts, outs, tasks)
    late = not early and len(own) == len(tasks)
    terms = [] if common is None else [bench.write(common, shift=early)]
    if own and complete:
        terms.append(bench.stack_own(own, shift=late))
    elif cells:
        terms = [_by_task(bench, tasks, terms, cells, shift=late)]
    tensor = reduce(lambda a, b: bench.room.builder.add("Add", a, b, shape=bench.room.builder.shape(a)), terms)
    if early or late:
        return tensor
    return bench.by_table(tensor, "Add", bench.affine.shifts, Cell(tasks, outs, ()))


def _by_task(bench: CellWriter, tasks: Tasks, terms: list[str], cells: Mapping[Tasks, Cell], *, shift: bool) -> str:
    """The sum of what all of *tasks* get and of what some of them do."""
    rows, add = bench.room.rows, bench.room.builder.add
    sums: dict[int, str] = {}
    written = [(tasks, term) for term in terms]
    written += [(sharers, bench.write(cell, shift=shift and len(sharers) == 1)) for sharers, cell in cells.items()]
    for sharers, tensor in written:
        for task, mine in zip(sorted(sharers), rows.split(tensor, sharers), strict=True):
            known = sums.get(task)
            sums[task] = mine if known is None else add("Add", known, mine, shape=bench.room.builder.shape(mine))
    return rows.join([sums[task] for task in sorted(tasks)])


class Half(Form):
    """Shared inputs to all outputs at once, own inputs grouped."""

    name = "half"

    def lower(self, room: Room, layer: FamilyLayer, chain: Sequence[FamilyLayer]) -> Lowered:
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
        return Lowered(PlacedValue(COMPACT, (tensor,), clean=whole), used)


def _everywhere(bench: CellWriter, common: tuple[BlockPart, ...]) -> str:
    """The shared inputs' share of all outputs, each row's own columns taken out."""
    outputs, layer, scales = bench.outputs, bench.layer, bench.affine.scales
    fold = all_agree(outputs, scales)
    weight = np.zeros(
        (outputs.width(STITCHED), sum(part.width for part in common), *layer.op.window.kernel), kernel(layer, 0).dtype
    )
    for task in bench.all:
        mine = scaled(kernel(layer, task), scales[task]) if fold else kernel(layer, task)
        weight[outputs.columns(STITCHED, task)] = mine[np.ix_(outputs.order(task), members(common, task))]
    source = bench.room.part(bench.value, bench.all, common)
    held = origin(bench.room, layer, outputs.parts, common, folded=bench.affine.layers if fold else 0)
    whole = conv(bench.room, layer, source, weight, None, origin=held)
    taken = bench.room.moved(outputs, PlacedValue(STITCHED, (whole,), clean=False), COMPACT)
    assert taken is not None
    if fold:
        return taken.tensors[0]
    return by_table(bench.room, taken.tensors[0], "Mul", outputs.table(COMPACT, scales, 1.0))
