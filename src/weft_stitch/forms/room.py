"""The state of a lowering: ``Room`` holds every value in the layouts computed so far, and converts between layouts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from weft_stitch.family import Family, Sharing, Wiring
from weft_stitch.graph import DYNAMIC, Builder
from weft_stitch.layouts import APART, COMPACT, FUSED, STACKED, BlockPart, Channels, Layout
from weft_stitch.net import Array


class TaskRows:
    """The rows of all tasks, one task after another.

    *batches*: the number of rows of each task, or ``DYNAMIC`` if it is known only at run time.
    """

    def __init__(self, builder: Builder, batches: Sequence[int]) -> None:
        self.batches = tuple(batches)
        self._builder = builder
        self._inputs: list[str] = []
        self._split: dict[str, list[str]] = {}
        """Tensor -> its parts by task, once it has been split."""
        self._sizes: dict[tuple[int, ...], str] = {}
        """Tasks -> the tensor [tasks] with their numbers of rows."""
        self._task_of_row = ""
        """The tensor [rows] with the task of each row; empty before its first use."""

    @property
    def tasks(self) -> int:
        return len(self.batches)

    @property
    def dynamic(self) -> bool:
        return DYNAMIC in self.batches

    @property
    def total(self) -> int:
        """Number of all rows, or ``DYNAMIC``."""
        return DYNAMIC if self.dynamic else sum(self.batches)

    @property
    def equal(self) -> bool:
        """Whether all tasks have the same number of rows, known in advance."""
        return not self.dynamic and len(set(self.batches)) == 1

    def start(self, inputs: Sequence[str]) -> None:
        """Set one input tensor per task, whose first size is the task's number of rows if that is dynamic."""
        self._inputs = list(inputs)

    def split(self, tensor: str, tasks: Iterable[int] | None = None) -> list[str]:
        """Cut *tensor*, which has the rows of all tasks or of *tasks* in order, into one tensor per task."""
        row_tasks = range(self.tasks) if tasks is None else sorted(tasks)
        if len(row_tasks) == 1:
            return [tensor]
        if tensor not in self._split:
            other_sizes = self._builder.shape(tensor)[1:]
            shapes = [(self.batches[task], *other_sizes) for task in row_tasks]
            counts = self._row_counts(tuple(row_tasks))
            self._split[tensor] = self._builder.add_many("Split", tensor, counts, shapes=shapes, axis=0)
        return self._split[tensor]

    def take(self, tensor: str, tasks: frozenset[int]) -> str:
        """Select the rows of *tasks* from *tensor*, which has the rows of all tasks."""
        if len(tasks) == self.tasks:
            return tensor
        are_neighbours = max(tasks) - min(tasks) < len(tasks)
        if len(tasks) == 1 or self.dynamic or not are_neighbours:
            parts = self.split(tensor)
            return self.join([parts[task] for task in sorted(tasks)])
        row_bounds = np.cumsum([0, *self.batches])
        return slice_axis(self._builder, tensor, 0, int(row_bounds[min(tasks)]), int(row_bounds[max(tasks) + 1]))

    def join(self, tensors: Sequence[str]) -> str:
        """Stack the tensors of several tasks along the rows."""
        if len(tensors) == 1:
            return tensors[0]
        shapes = [self._builder.shape(tensor) for tensor in tensors]
        rows = DYNAMIC if self.dynamic else sum(shape[0] for shape in shapes)
        return self._builder.add("Concat", *tensors, shape=(rows, *shapes[0][1:]), axis=0)

    def table(self, values: Array, tasks: Sequence[int] | None = None) -> str:
        """A tensor [rows or 1, columns, 1, 1] in which each row has its task's line of *values* [tasks, columns].

        *tasks*: the tasks of these rows and lines, in order; by default all.
        """
        row_tasks = list(range(self.tasks)) if tasks is None else list(tasks)
        by_task = values[..., None, None]  # [tasks, columns, 1, 1]
        if (by_task == by_task[:1]).all():
            return self._builder.constant(by_task[:1], "table")
        if not self.dynamic:
            counts = [self.batches[task] for task in row_tasks]
            return self._builder.constant(np.repeat(by_task, counts, axis=0), "table")
        by_all_tasks = np.zeros((self.tasks, *by_task.shape[1:]), by_task.dtype)
        by_all_tasks[row_tasks] = by_task
        table = self._builder.constant(by_all_tasks, "table")
        looked_up = self._builder.add("Gather", table, self._row_tasks(), shape=(DYNAMIC, *by_task.shape[1:]), axis=0)
        return self.take(looked_up, frozenset(row_tasks))

    def _row_counts(self, tasks: tuple[int, ...]) -> str:
        """The tensor with the number of rows of each of *tasks*."""
        if not self.dynamic:
            return self._builder.constant(np.array([self.batches[task] for task in tasks], np.int64), "rows")
        if tasks not in self._sizes:
            sizes = [self._size(task) for task in tasks]
            self._sizes[tasks] = self._builder.add("Concat", *sizes, shape=(len(tasks),), axis=0)
        return self._sizes[tasks]

    def _size(self, task: int) -> str:
        """The tensor [1] with the dynamic number of rows of *task*."""
        if (task,) not in self._sizes:
            self._sizes[task,] = self._builder.add("Shape", self._inputs[task], shape=(1,), start=0, end=1)
        return self._sizes[task,]

    def _row_tasks(self) -> str:
        """The tensor [rows] with the task of each row."""
        if not self._task_of_row:
            numbers = [self._builder.constant(np.array([task], np.int64), "task") for task in range(self.tasks)]
            columns = [
                self._builder.add("Expand", number, self._size(task), shape=(DYNAMIC,))
                for task, number in enumerate(numbers)
            ]
            self._task_of_row = self._builder.add("Concat", *columns, shape=(DYNAMIC,), axis=0)
        return self._task_of_row


def slice_axis(builder: Builder, tensor: str, axis: int, first: int, end: int) -> str:
    """Slice *tensor* along *axis*, from *first* to *end* (exclusive)."""
    shape = list(builder.shape(tensor))
    if (first, end) == (0, shape[axis]):
        return tensor
    shape[axis] = end - first
    bounds = [builder.constant(np.array([bound], np.int64), "index") for bound in (first, end, axis)]
    return builder.add("Slice", tensor, *bounds, shape=tuple(shape))


def select(builder: Builder, tensor: str, columns: Array) -> str:
    """Select the channels *columns* of *tensor*, in this order."""
    shape = builder.shape(tensor)
    if len(columns) and (np.diff(columns) == 1).all():
        return slice_axis(builder, tensor, 1, int(columns[0]), int(columns[-1]) + 1)
    index = builder.constant(np.asarray(columns, np.int64), "index")
    return builder.add("Gather", tensor, index, shape=(shape[0], len(columns), *shape[2:]), axis=1)


def spread(builder: Builder, tensor: str, columns: Array, width: int) -> str:
    """Place the channels of *tensor* at *columns* of a tensor of *width* channels, with zeros elsewhere."""
    rows, channels, *picture = builder.shape(tensor)
    if channels == width:
        return select(builder, tensor, np.argsort(columns))
    come_first = (columns == np.arange(channels)).all()
    padding = width - channels if come_first else 1  # otherwise one channel of zeros, which all gaps select
    pads = builder.constant(np.array([0, 0, 0, 0, 0, padding, 0, 0], np.int64), "pads")  # behind the channels only
    padded = builder.add("Pad", tensor, pads, shape=(rows, channels + padding, *picture))
    if come_first:
        return padded
    index = np.full(width, channels)
    index[columns] = np.arange(channels)
    return select(builder, padded, index)


def reshape(builder: Builder, tensor: str, shape: tuple[int, ...]) -> str:
    """Reshape *tensor* to *shape*, of which at most the first size is dynamic."""
    if builder.shape(tensor) == shape:
        return tensor
    target = builder.constant(np.array([-1 if size == DYNAMIC else size for size in shape], np.int64), "shape")
    return builder.add("Reshape", tensor, target, shape=shape)


def side_by_side(builder: Builder, tensors: Sequence[str]) -> str:
    """Concatenate *tensors* along the channels."""
    if len(tensors) == 1:
        return tensors[0]
    shapes = [builder.shape(tensor) for tensor in tensors]
    shape = (shapes[0][0], sum(sizes[1] for sizes in shapes), *shapes[0][2:])
    return builder.add("Concat", *tensors, shape=shape, axis=1)


class PlacedValue(NamedTuple):
    """A value in one layout."""

    layout: Layout
    tensors: tuple[str, ...]
    """One tensor, or one per task in the layout ``APART``."""
    clean: bool = True
    """Whether columns that hold no channel of the row's task are zero; if not, they hold anything."""


class Room:
    """The state of the lowering of one family: every value in the layouts computed so far.

    *batches*, *align*: see ``lowering.lower``.
    """

    def __init__(
        self, builder: Builder, family: Family, wiring: Wiring, sharing: Sharing, batches: Sequence[int], align: int = 1
    ) -> None:
        self.align = align
        self.builder, self.family, self.wiring, self.sharing = builder, family, wiring, sharing
        self.rows = TaskRows(builder, batches)
        self._channels: dict[str, Channels] = {}
        self._placed: dict[str, dict[Layout, PlacedValue]] = {}
        """Value -> layout -> the value in that layout."""
        self._order_of: dict[str, int] = {}
        """Value -> when it was computed; later values have higher numbers."""
        self._selected: dict[tuple[str, bytes], str] = {}
        """Tensor and columns -> the tensor of these channels."""

    def channels(self, value: str) -> Channels:
        """The channels of *value* in all tasks."""
        if value not in self._channels:
            self._channels[value] = Channels(tuple(self.sharing[space] for space in self.wiring.carries[value]))
        return self._channels[value]

    def has(self, value: str) -> bool:
        """Whether *value* is computed already."""
        return value in self._placed

    def put(self, value: str, placed: PlacedValue) -> None:
        """Register *value* as computed, in the layout of *placed* and no other."""
        self._placed[value] = {placed.layout: placed}
        self._order_of[value] = len(self._order_of)

    def enter(self, value: str, tensors: Sequence[str]) -> None:
        """Register *value* as computed for each task alone, with channels in the order of the task's own model."""
        channels = self.channels(value)
        ordered = [select(self.builder, tensor, channels.order(task)) for task, tensor in enumerate(tensors)]
        self.put(value, PlacedValue(APART, tuple(ordered)))

    def own(self, value: str, task: int) -> str:
        """The tensor of *value* for one *task*, with channels in the order of the task's own model."""
        tensor = self.get(value, APART).tensors[task]
        return select(self.builder, tensor, np.argsort(self.channels(value).order(task)))

    def layout(self, *values: str) -> Layout:
        """The layout in which to combine *values*: one that all have, else the first one of the value computed last."""
        last = max(values, key=lambda value: self._order_of[value])
        for layout in self._placed[last]:
            if all(layout in self._placed[value] for value in values):
                return layout
        return next(iter(self._placed[last]))

    def tensor(self, value: str, layout: Layout) -> str:
        """The tensor of *value* in *layout* (not ``APART``), with zeros where a row has no channel."""
        return self.get(value, layout, clean=True).tensors[0]

    def get(self, value: str, layout: Layout, *, clean: bool = False) -> PlacedValue:
        """*value* in *layout*, converted if need be; with *clean*, zero where a row has no channel."""
        by_layout = self._placed[value]
        if layout not in by_layout:
            by_layout[layout] = self._convert(self.channels(value), by_layout, layout)
        if clean and not by_layout[layout].clean:
            by_layout[layout] = self._clean(self.channels(value), by_layout[layout])
        return by_layout[layout]

    def _clean(self, channels: Channels, placed: PlacedValue) -> PlacedValue:
        """Set columns without a channel of the row's task to zero.

        Done by ``Where``: the columns may hold infinities, which a product with zero would turn to NaN.
        """
        if placed.layout == APART:
            return placed._replace(clean=True)
        has_channel: Array = channels.owned(placed.layout)
        if placed.layout == STACKED:
            has_channel = np.logical_or.reduce(has_channel, axis=0, keepdims=True)
        if has_channel.all():
            return placed._replace(clean=True)
        mask = self.rows.table(has_channel)
        zero = self.builder.constant(np.zeros(1, np.float32), "zero")
        shape = self.builder.shape(placed.tensors[0])
        return PlacedValue(placed.layout, (self.builder.add("Where", mask, placed.tensors[0], zero, shape=shape),))

    def part(self, value: str, tasks: frozenset[int], parts: Sequence[BlockPart]) -> str:
        """The channels of *parts* of *value*, for the rows of *tasks*, which all have these parts."""
        channels = self.channels(value)
        columns = [channels.columns(COMPACT, task, parts) for task in sorted(tasks)]
        # where the columns are the same for all tasks, one selection suffices
        if len(tasks) > 1 and all(np.array_equal(other, columns[0]) for other in columns):
            return self.select(self.rows.take(self.get(value, COMPACT).tensors[0], tasks), columns[0])
        tensors = self.get(value, APART).tensors
        picked = [self.select(tensors[task], channels.columns(APART, task, parts)) for task in sorted(tasks)]
        return self.rows.join(picked)

    def select(self, tensor: str, columns: Array) -> str:
        """The channels *columns* of *tensor*; equal selections are computed once."""
        key = (tensor, columns.tobytes())
        if key not in self._selected:
            self._selected[key] = select(self.builder, tensor, columns)
        return self._selected[key]

    def _convert(self, channels: Channels, by_layout: dict[Layout, PlacedValue], target: Layout) -> PlacedValue:
        """Convert a value, present in the layouts *by_layout*, to *target*: directly, or by way of ``COMPACT``."""
        if target == APART:
            return PlacedValue(APART, self._apart(channels, next(iter(by_layout.values()))))
        for placed in by_layout.values():
            if (converted := self.convert_directly(channels, placed, target)) is not None:
                return converted
        if APART in by_layout:
            return PlacedValue(target, (self._join_rows(channels, by_layout[APART].tensors, target),))
        by_layout[COMPACT] = self._convert(channels, by_layout, COMPACT)
        return self._convert(channels, {COMPACT: by_layout[COMPACT]}, target)

    def convert_directly(self, channels: Channels, placed: PlacedValue, target: Layout) -> PlacedValue | None:
        """Convert between two layouts of one tensor; None if there is no direct way."""
        source = placed.layout
        if {source, target} == {COMPACT, STACKED}:
            return PlacedValue(target, (self._restack(placed.tensors[0], target),), placed.clean)
        if APART in (source, target) or STACKED in (source, target):
            return None
        if channels.common and channels.width(source) == channels.width(target):
            return placed._replace(layout=target)
        if self.rows.dynamic:  # gathering needs to know which rows are which task's
            return PlacedValue(target, (self._join_rows(channels, self._apart(channels, placed), target),))
        return PlacedValue(target, (self._gather_columns(channels, placed, target),), clean=False)

    def _gather_columns(self, channels: Channels, placed: PlacedValue, target: Layout) -> str:
        """Move each row's channels from their columns to those in the layout *target*; other columns hold anything."""
        tensor = placed.tensors[0]
        rows, width, *picture = self.builder.shape(tensor)
        source_columns = np.zeros((channels.tasks, channels.width(target)), np.int64)
        for task in range(channels.tasks):
            source_columns[task, channels.columns(target, task)] = channels.columns(placed.layout, task)
        # indices along one axis of all rows' columns
        source_indices = np.repeat(source_columns, self.rows.batches, axis=0) + width * np.arange(rows)[:, None]
        flat = reshape(self.builder, tensor, (rows * width, *picture))
        index = self.builder.constant(source_indices.ravel(), "index")
        gathered = self.builder.add("Gather", flat, index, shape=(source_indices.size, *picture), axis=0)
        return reshape(self.builder, gathered, (rows, source_indices.shape[1], *picture))

    def _restack(self, tensor: str, target: Layout) -> str:
        """Convert [tasks x batch, width] (``COMPACT``) to [batch, tasks x width] (``STACKED``), or back.

        Without a transposition, a mere view, if the batch is 1.
        """
        tasks, batch = self.rows.tasks, self.rows.batches[0]
        _, width, *picture = self.builder.shape(tensor)
        stacking = target == STACKED
        width = width if stacking else width // tasks
        outer, inner = (tasks, batch) if stacking else (batch, tasks)
        if outer > 1 and inner > 1:
            tensor = reshape(self.builder, tensor, (outer, inner, width, *picture))
            shape = (inner, outer, width, *picture)
            tensor = self.builder.add("Transpose", tensor, shape=shape, perm=[1, 0, 2, 3, 4])
        flat = (batch, tasks * width) if stacking else (tasks * batch, width)
        return reshape(self.builder, tensor, (*flat, *picture))

    def _apart(self, channels: Channels, placed: PlacedValue) -> tuple[str, ...]:
        """The value as one tensor per task."""
        if placed.layout == APART:
            return placed.tensors
        if placed.layout == STACKED:
            return self._unstack(channels, placed.tensors[0])
        parts = self.rows.split(placed.tensors[0])
        return tuple(
            select(self.builder, part, channels.columns(placed.layout, task)) for task, part in enumerate(parts)
        )

    def _unstack(self, channels: Channels, tensor: str) -> tuple[str, ...]:
        """Cut a tensor [batch, tasks x width] into one tensor per task."""
        rows, width, *picture = self.builder.shape(tensor)
        per_task = width // channels.tasks
        parts = [tensor]
        if channels.tasks > 1:
            sizes = self.builder.constant(np.full(channels.tasks, per_task, np.int64), "sizes")
            shapes = [(rows, per_task, *picture)] * channels.tasks
            parts = self.builder.add_many("Split", tensor, sizes, shapes=shapes, axis=1)
        return tuple(select(self.builder, part, channels.columns(COMPACT, task)) for task, part in enumerate(parts))

    def _join_rows(self, channels: Channels, tensors: Sequence[str], target: Layout) -> str:
        """Join one tensor per task to a tensor in the layout *target*."""
        row_layout = COMPACT if target == STACKED else target
        width = channels.width(row_layout)
        # where all tasks share all channels, they are in the same columns
        if channels.common and target.name == FUSED and len(channels.spaces) == 1:
            shape = (self.rows.total, width, *self.builder.shape(tensors[0])[2:])
            return self.builder.add("StackRows", *tensors, shape=shape, columns=width)
        if channels.common and target != STACKED:
            return spread(self.builder, self.rows.join(tensors), channels.columns(row_layout, 0), width)
        parts = [
            spread(self.builder, tensor, channels.columns(row_layout, task), width)
            for task, tensor in enumerate(tensors)
        ]
        return side_by_side(self.builder, parts) if target == STACKED else self.rows.join(parts)
