"""The form ``split``: shared output channels are computed for all rows of the sharing tasks at once, others by task.

Output channels of one set of tasks form a class. It has a cell of weights for each set of tasks that have both the
outputs and some inputs. With the paper's letters (see ``whole.Mts``): a class of all tasks has a cell for the shared
inputs (U, for every row), and one for each task's own inputs (Y_t, for that task's rows); a task's own class has one
cell for all its inputs (X_t and Z_t). Nothing is multiplied by zero and no weight is stored twice.
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
    apply_table,
    batched_product,
    conv,
    covers_picture,
    kernel_origin,
    leading_affine,
    scale_outputs,
)
from weft_stitch.forms.room import PlacedValue, Room, reshape, select, side_by_side, spread
from weft_stitch.layouts import APART, COMPACT, STITCHED, Affine, BlockPart, all_agree, kernel, tasks_agree
from weft_stitch.net import Array

Tasks = frozenset[int]
"""A set of tasks."""


class Cell(NamedTuple):
    """The weights of a layer from some input parts to some output parts, for the rows of the tasks that share them."""

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
        self.all_tasks = frozenset(range(self.outputs.tasks))

    def cells(self, tasks: Tasks, outs: tuple[BlockPart, ...]) -> dict[Tasks, Cell]:
        """The cells of the output parts *outs*, which *tasks* share: those of *tasks* that share the inputs -> cell."""
        if self.layer.op.depthwise:  # an output reads one input channel only, which exactly the same tasks share
            return {tasks: Cell(tasks, outs, tuple(part for part in self.inputs.parts if part.tasks == tasks))}
        cell_inputs: dict[Tasks, list[BlockPart]] = {}
        for part in self.inputs.parts:
            if sharers := part.tasks & tasks:
                cell_inputs.setdefault(sharers, []).append(part)
        return {sharers: Cell(sharers, outs, tuple(ins)) for sharers, ins in cell_inputs.items()}

    def values_agree(self, values: tuple[Array, ...], parts: Iterable[BlockPart], tasks: Tasks) -> bool:
        """Whether *tasks* have the same *values* for all channels of *parts*."""
        return all(tasks_agree(values, part, tasks) for part in parts)

    def write(self, cell: Cell, *, shift: bool) -> str:
        """Write the convolution of one cell with its scale, and its shift if *shift*; return the tensor."""
        first = min(cell.tasks)
        fold = self.values_agree(self.affine.scales, cell.outs, cell.tasks)  # whether scales go into the weight
        weight = self._weight(cell, first, fold=fold)
        bias = self._cell_values(self.affine.shifts, cell, first) if shift else None
        groups = cell.width if self.layer.op.depthwise else 1
        source = self.room.part(self.value, cell.tasks, cell.ins)
        origin = kernel_origin(
            self.room, self.layer, cell.outs, cell.ins, task=first, folded=self.affine.layers if fold else 0
        )
        tensor = conv(self.room, self.layer, source, weight, bias if fold else None, groups, origin)
        if fold:
            return tensor
        tensor = self.apply_table(tensor, "Mul", self.affine.scales, cell)
        return self.apply_table(tensor, "Add", self.affine.shifts, cell) if shift else tensor

    def apply_table(self, tensor: str, operator: str, values: tuple[Array, ...], cell: Cell) -> str:
        """Multiply by or add the *values* of each row's task, for the outputs of *cell*."""
        tasks = sorted(cell.tasks)
        table = np.stack([self._cell_values(values, cell, task) for task in tasks])
        return apply_table(self.room, tensor, operator, table, tasks)

    def write_own(self, cells: Mapping[int, Cell], *, shift: bool) -> list[str]:
        """Write a cell for each of several tasks: as one grouped convolution if they match, else one by one.

        Return a tensor per task, in order.
        """
        if not self._match_for_grouping(cells):
            return [self.write(cells[task], shift=shift) for task in sorted(cells)]
        return self.room.rows.split(self._group_tasks(cells, shift=shift))

    def stack_own(self, cells: Mapping[int, Cell], *, shift: bool) -> str:
        """Like ``write_own``, but return one tensor of all rows, padded with channels of zeros to the widest cell."""
        if self._match_for_grouping(cells):
            return self._group_tasks(cells, shift=shift)
        width = max(cell.width for cell in cells.values())
        tensors = [
            spread(self.room.builder, self.write(cells[task], shift=shift), np.arange(cells[task].width), width)
            for task in sorted(cells)
        ]
        return self.room.rows.join(tensors)

    def _match_for_grouping(self, cells: Mapping[int, Cell]) -> bool:
        """Whether one grouped convolution can compute the cells.

        Every task must have one row, and its cell must have the same width and the same input columns.
        """
        rows = self.room.rows
        if not (rows.equal and rows.batches[0] == 1 and len(cells) == rows.tasks > 1):
            return False
        shapes = {(cell.width, self.inputs.columns(COMPACT, task, cell.ins).tobytes()) for task, cell in cells.items()}
        return len(shapes) == 1

    def _group_tasks(self, cells: Mapping[int, Cell], *, shift: bool) -> str:
        """Write the cells as one convolution with a group per task.

        As every task has one row, its rows become groups by a mere view.
        """
        room, tasks = self.room, sorted(cells)
        columns = self.inputs.columns(COMPACT, 0, cells[0].ins)  # the same in all tasks (``_match_for_grouping``)
        source = room.select(room.get(self.value, COMPACT).tensors[0], columns)
        weight = np.stack([self._weight(cells[task], task, fold=True) for task in tasks])
        bias = np.stack([self._cell_values(self.affine.shifts, cells[task], task) for task in tasks])
        if not shift:
            bias = np.zeros_like(bias)
        if covers_picture(room, self.layer):
            return batched_product(room, self.layer, source, weight, bias)
        rows, width, *picture = room.builder.shape(source)
        flat = reshape(room.builder, source, (1, rows * width, *picture))
        groups = rows * (cells[0].width if self.layer.op.depthwise else 1)
        tensor = conv(room, self.layer, flat, weight.reshape(-1, *weight.shape[2:]), bias.ravel(), groups)
        return reshape(room.builder, tensor, (rows, cells[0].width, *room.builder.shape(tensor)[2:]))

    def _weight(self, cell: Cell, task: int, *, fold: bool) -> Array:
        """The kernel of *cell*, as *task* has it; scaled if *fold*."""
        outs, ins = members(cell.outs, task), members(cell.ins, task)
        task_kernel = kernel(self.layer, task)
        weight = task_kernel[outs] if self.layer.op.depthwise else task_kernel[np.ix_(outs, ins)]
        return scale_outputs(weight, self._cell_values(self.affine.scales, cell, task)) if fold else weight

    def _cell_values(self, values: tuple[Array, ...], cell: Cell, task: int) -> Array:
        """The *values* of *task* for the outputs of *cell*."""
        return values[task][members(cell.outs, task)]


def members(parts: Iterable[BlockPart], task: int) -> Array:
    """The channels of *parts* in the task's own model."""
    return np.concatenate([part.members[task] for part in parts])


Classes = Mapping[Tasks, tuple[BlockPart, ...]]
"""Set of tasks -> the output parts that exactly these tasks share."""


class Split(Form):
    """Compute what tasks share for all their rows at once, and the rest task by task or grouped."""

    name = "split"

    def lower(self, room: Room, layer: FamilyLayer, chain: Sequence[FamilyLayer]) -> Lowered:
        """Write a cell for each set of tasks, and put their outputs together."""
        affine, consumed = leading_affine(room, layer, chain)
        writer = CellWriter(room, layer, affine)
        classes: dict[Tasks, tuple[BlockPart, ...]] = {}
        for part in writer.outputs.parts:
            classes[part.tasks] = (*classes.get(part.tasks, ()), part)
        placed = _write_compact(writer, classes) if _has_one_shape(writer, classes) else _write_apart(writer, classes)
        return Lowered(placed, consumed)


def _has_one_shape(writer: CellWriter, classes: Classes) -> bool:
    """Whether all tasks' rows have the same shape: the channels that all tasks share, then each task's own.

    Not so if some but not all tasks share channels, or only some have own ones.
    """
    own = [tasks for tasks in classes if _is_own(writer, tasks)]
    shared = set(classes) - set(own)
    return len(writer.outputs.spaces) == 1 and shared <= {writer.all_tasks} and len(own) in (0, len(writer.all_tasks))


def _is_own(writer: CellWriter, tasks: Tasks) -> bool:
    """Whether *tasks* is a single task, of several that the family has."""
    return len(tasks) == 1 and tasks != writer.all_tasks


def _write_compact(writer: CellWriter, classes: Classes) -> PlacedValue:
    """Write the layer in the layout compact: shared columns, then own ones."""
    tensors = [_shared_rows(writer, writer.all_tasks, classes[writer.all_tasks])] if writer.all_tasks in classes else []
    if own := _own_cells(writer, classes):
        tensors.append(writer.stack_own(own, shift=True))
    return PlacedValue(COMPACT, (side_by_side(writer.room.builder, tensors),))


def _write_apart(writer: CellWriter, classes: Classes) -> PlacedValue:
    """Write the layer task by task: sets of tasks overlap, or some task has no channels of its own."""
    room = writer.room
    pieces: dict[int, list[str]] = {task: [] for task in writer.all_tasks}
    parts: dict[int, list[BlockPart]] = {task: [] for task in writer.all_tasks}  # those in *pieces*, in order
    for tasks, outs in classes.items():
        if not _is_own(writer, tasks):
            tensors_of_tasks = room.rows.split(_shared_rows(writer, tasks, outs), tasks)
            for task, tensor in zip(sorted(tasks), tensors_of_tasks, strict=True):
                pieces[task].append(tensor)
                parts[task] += outs
    own = _own_cells(writer, classes)
    for task, tensor in zip(sorted(own), writer.write_own(own, shift=True), strict=True) if own else ():
        pieces[task].append(tensor)
        parts[task] += own[task].outs
    tensors = []
    for task in sorted(writer.all_tasks):
        column_of = np.argsort(members(parts[task], task))  # channel of the model -> its column in the joined pieces
        columns = column_of[writer.outputs.order(task)]
        tensors.append(select(room.builder, side_by_side(room.builder, pieces[task]), columns))
    return PlacedValue(APART, tuple(tensors))


def _own_cells(writer: CellWriter, classes: Classes) -> dict[int, Cell]:
    """Task -> the cell of its own outputs."""
    return {min(tasks): writer.cells(tasks, outs)[tasks] for tasks, outs in classes.items() if _is_own(writer, tasks)}


def _shared_rows(writer: CellWriter, tasks: Tasks, outs: tuple[BlockPart, ...]) -> str:
    """Write the channels *outs* that *tasks* share, for the rows of these tasks.

    The shift is added once: with the common inputs if it is the same for all tasks, with the own inputs if every task
    has some, or by a table at the end.
    """
    cells = writer.cells(tasks, outs)
    common = cells.pop(tasks, None)
    own = {min(sharers): cell for sharers, cell in cells.items() if len(sharers) == 1}
    # either every task has own inputs or none has, and no inputs are shared by some of several tasks only
    complete = len(own) == len(cells) in (0, len(tasks))
    shift_in_common = common is not None and writer.values_agree(writer.affine.shifts, outs, tasks)
    shift_in_own = not shift_in_common and len(own) == len(tasks)
    terms = [] if common is None else [writer.write(common, shift=shift_in_common)]
    if own and complete:
        terms.append(writer.stack_own(own, shift=shift_in_own))
    elif cells:
        terms = [_add_by_task(writer, tasks, terms, cells, shift=shift_in_own)]
    tensor = reduce(lambda a, b: writer.room.builder.add("Add", a, b, shape=writer.room.builder.shape(a)), terms)
    if shift_in_common or shift_in_own:
        return tensor
    return writer.apply_table(tensor, "Add", writer.affine.shifts, Cell(tasks, outs, ()))


def _add_by_task(
    writer: CellWriter, tasks: Tasks, terms: list[str], cells: Mapping[Tasks, Cell], *, shift: bool
) -> str:
    """Add up, task by task, *terms* for all of *tasks* and the *cells* of some of them; return the joined rows."""
    rows, add = writer.room.rows, writer.room.builder.add
    sums: dict[int, str] = {}
    written = [(tasks, term) for term in terms]
    written += [(sharers, writer.write(cell, shift=shift and len(sharers) == 1)) for sharers, cell in cells.items()]
    for sharers, tensor in written:
        for task, term in zip(sorted(sharers), rows.split(tensor, sharers), strict=True):
            partial_sum = sums.get(task)
            shape = writer.room.builder.shape(term)
            sums[task] = term if partial_sum is None else add("Add", partial_sum, term, shape=shape)
    return rows.join([sums[task] for task in sorted(tasks)])


class Half(Form):
    """Add two convolutions: of the shared inputs, to the outputs of all tasks, and of own inputs, grouped by task."""

    name = "half"

    def lower(self, room: Room, layer: FamilyLayer, chain: Sequence[FamilyLayer]) -> Lowered:
        """Write both convolutions and their sum; fall back to ``Split`` where that is impossible."""
        affine, consumed = leading_affine(room, layer, chain)
        writer = CellWriter(room, layer, affine)
        parts = writer.inputs.parts
        common = tuple(part for part in parts if part.tasks == writer.all_tasks)
        own = {
            task: tuple(part for part in parts if task in part.tasks and part not in common)
            for task in writer.all_tasks
        }
        # the sum needs shared inputs, and own ones of every task
        if layer.op.depthwise or not common or not all(own.values()) or len(writer.outputs.spaces) > 1:
            return Split().lower(room, layer, chain)
        from_shared = _from_shared_inputs(writer, common)
        outs = {task: tuple(part for part in writer.outputs.parts if task in part.tasks) for task in writer.all_tasks}
        cells = {task: Cell(frozenset({task}), outs[task], own[task]) for task in writer.all_tasks}
        from_own = writer.stack_own(cells, shift=True)
        tensor = room.builder.add("Add", from_shared, from_own, shape=room.builder.shape(from_shared))
        all_columns_owned = bool(writer.outputs.owned(COMPACT).all())
        return Lowered(PlacedValue(COMPACT, (tensor,), clean=all_columns_owned), consumed)


def _from_shared_inputs(writer: CellWriter, common: tuple[BlockPart, ...]) -> str:
    """Write the products of the shared inputs, *common*, for all outputs; keep each row's columns of its own task."""
    outputs, layer, scales = writer.outputs, writer.layer, writer.affine.scales
    fold = all_agree(outputs, scales)
    weight = np.zeros(
        (outputs.width(STITCHED), sum(part.width for part in common), *layer.op.window.kernel), kernel(layer, 0).dtype
    )
    for task in writer.all_tasks:
        own_kernel = scale_outputs(kernel(layer, task), scales[task]) if fold else kernel(layer, task)
        weight[outputs.columns(STITCHED, task)] = own_kernel[np.ix_(outputs.order(task), members(common, task))]
    source = writer.room.part(writer.value, writer.all_tasks, common)
    origin = kernel_origin(writer.room, layer, outputs.parts, common, folded=writer.affine.layers if fold else 0)
    stitched = conv(writer.room, layer, source, weight, None, origin=origin)
    compacted = writer.room.convert_directly(outputs, PlacedValue(STITCHED, (stitched,), clean=False), COMPACT)
    assert compacted is not None
    if fold:
        return compacted.tensors[0]
    return apply_table(writer.room, compacted.tensors[0], "Mul", outputs.table(COMPACT, scales, 1.0))
