"""The form ``split``: what tasks share is computed for all their rows at once, the rest task by task.

Output channels of one set of tasks form a class. Its inputs fall into cells by the tasks that have both: for a class of
all tasks, the shared inputs (U, every row) and each task's own (Y_t, that task's rows); for a task's own class, all its
inputs (X_t and Z_t). Nothing is multiplied by zero and no weight is stored twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import numpy as np

from weft_stitch.family import FamilyLayer
from weft_stitch.forms.base import Done, leading_affine
from weft_stitch.forms.cells import Cell, CellWriter, Tasks, members
from weft_stitch.forms.room import Placed, Room
from weft_stitch.forms.rows import select, side_by_side
from weft_stitch.layouts import APART, COMPACT, BlockPart

Classes = Mapping[Tasks, tuple[BlockPart, ...]]


class Split:
    name = "split"

    def refusal(self, room: Room, layer: FamilyLayer) -> str:
        return ""

    def lower(self, room: Room, layer: FamilyLayer, chain: Sequence[FamilyLayer]) -> Done:
        affine, used = leading_affine(room, layer, chain)
        bench = CellWriter(room, layer, affine)
        classes: dict[Tasks, tuple[BlockPart, ...]] = {}
        for part in bench.outputs.parts:
            classes[part.tasks] = (*classes.get(part.tasks, ()), part)
        placed = _compact(bench, classes) if _by_strips(bench, classes) else _apart(bench, classes)
        return Done(placed, used)


def _by_strips(bench: CellWriter, classes: Classes) -> bool:
    """Whether the rows of all tasks look alike: shared columns, then own ones."""
    own = [tasks for tasks in classes if _is_own(bench, tasks)]
    shared = set(classes) - set(own)
    return len(bench.outputs.spaces) == 1 and shared <= {bench.all} and len(own) in (0, len(bench.all))


def _is_own(bench: CellWriter, tasks: Tasks) -> bool:
    return len(tasks) == 1 and tasks != bench.all


def _compact(bench: CellWriter, classes: Classes) -> Placed:
    tensors = [_shared(bench, bench.all, classes[bench.all])] if bench.all in classes else []
    if own := _own(bench, classes):
        tensors.append(bench.stack_own(own, shift=True))
    return Placed(COMPACT, (side_by_side(bench.room.builder, tensors),))


def _apart(bench: CellWriter, classes: Classes) -> Placed:
    """Each task's columns put together by themselves: sets of tasks cross, or a task has no channels of its own."""
    room = bench.room
    found: dict[int, list[str]] = {task: [] for task in bench.all}
    order: dict[int, list[BlockPart]] = {task: [] for task in bench.all}
    for tasks, outs in classes.items():
        if not _is_own(bench, tasks):
            for task, tensor in zip(sorted(tasks), room.rows.split(_shared(bench, tasks, outs), tasks), strict=True):
                found[task].append(tensor)
                order[task] += outs
    own = _own(bench, classes)
    for task, tensor in zip(sorted(own), bench.write_own(own, shift=True), strict=True) if own else ():
        found[task].append(tensor)
        order[task] += own[task].outs
    tensors = []
    for task in sorted(bench.all):
        places = np.argsort(members(order[task], task))
        wanted = places[bench.outputs.order(task)]
        tensors.append(select(room.builder, side_by_side(room.builder, found[task]), wanted))
    return Placed(APART, tuple(tensors))


def _own(bench: CellWriter, classes: Classes) -> dict[int, Cell]:
    return {min(tasks): bench.cells(tasks, outs)[tasks] for tasks, outs in classes.items() if _is_own(bench, tasks)}


def _shared(bench: CellWriter, tasks: Tasks, outs: tuple[BlockPart, ...]) -> str:
    """The rows of *tasks* at the channels they share."""
    cells = bench.cells(tasks, outs)
    common = cells.pop(tasks, None)
    own = {min(each): cell for each, cell in cells.items() if len(each) == 1}
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
    written += [(each, bench.write(cell, shift=shift and len(each) == 1)) for each, cell in cells.items()]
    for each, tensor in written:
        for task, mine in zip(sorted(each), rows.split(tensor, each), strict=True):
            known = sums.get(task)
            sums[task] = mine if known is None else add("Add", known, mine, shape=bench.room.builder.shape(mine))
    return rows.join([sums[task] for task in sorted(tasks)])
