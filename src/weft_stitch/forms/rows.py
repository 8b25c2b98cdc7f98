"""The rows of all tasks stacked on the batch dimension: ``TaskRows`` cuts, joins and looks up tables by row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from weft_stitch.graph import DYNAMIC, Builder
from weft_stitch.net import Array


class TaskRows:
    """Task after task; *batches* has the rows of each, ``DYNAMIC`` if only the inputs at run time tell."""

    def __init__(self, builder: Builder, batches: Sequence[int]) -> None:
        self.batches = tuple(batches)
        self._builder = builder
        self._inputs: list[str] = []
        self._split: dict[str, list[str]] = {}
        self._sizes: dict[tuple[int, ...], str] = {}
        self._task_of_row = ""

    @property
    def tasks(self) -> int:
        return len(self.batches)

    @property
    def dynamic(self) -> bool:
        return DYNAMIC in self.batches

    @property
    def total(self) -> int:
        return DYNAMIC if self.dynamic else sum(self.batches)

    @property
    def equal(self) -> bool:
        """Every task has as many rows, and they are known."""
        return not self.dynamic and len(set(self.batches)) == 1

    def start(self, inputs: Sequence[str]) -> None:
        """An input of each task; where rows are dynamic, their counts are read from these."""
        self._inputs = list(inputs)

    def of(self, tasks: Iterable[int]) -> int:
        return DYNAMIC if self.dynamic else sum(self.batches[task] for task in tasks)

    def split(self, tensor: str, tasks: Iterable[int] | None = None) -> list[str]:
        """*tensor*, which has the rows of all tasks or of these, cut into a tensor for each."""
        mine = range(self.tasks) if tasks is None else sorted(tasks)
        if len(mine) == 1:
            return [tensor]
        if tensor not in self._split:
            rest = self._builder.shape(tensor)[1:]
            shapes = [(self.batches[task], *rest) for task in mine]
            counts = self._counts(tuple(mine))
            self._split[tensor] = self._builder.add_many("Split", tensor, counts, shapes=shapes, axis=0)
        return self._split[tensor]

    def take(self, tensor: str, tasks: frozenset[int]) -> str:
        """The rows of *tasks*."""
        if len(tasks) == self.tasks:
            return tensor
        if len(tasks) == 1 or self.dynamic or max(tasks) - min(tasks) >= len(tasks):
            parts = self.split(tensor)
            return self.join([parts[task] for task in sorted(tasks)])
        ends = np.cumsum([0, *self.batches])
        return slice_axis(self._builder, tensor, 0, int(ends[min(tasks)]), int(ends[max(tasks) + 1]))

    def join(self, tensors: Sequence[str]) -> str:
        """The tensors of some tasks stacked."""
        if len(tensors) == 1:
            return tensors[0]
        shapes = [self._builder.shape(each) for each in tensors]
        rows = DYNAMIC if self.dynamic else sum(shape[0] for shape in shapes)
        return self._builder.add("Concat", *tensors, shape=(rows, *shapes[0][1:]), axis=0)

    def table(self, values: Array, tasks: Sequence[int] | None = None) -> str:
        """[rows or 1, columns, 1, 1] of *values* [tasks, columns]: each row has those of its task."""
        mine = list(range(self.tasks)) if tasks is None else list(tasks)
        shaped = values[..., None, None]
        if (shaped == shaped[:1]).all():
            return self._builder.constant(shaped[:1], "table")
        if not self.dynamic:
            return self._builder.constant(np.repeat(shaped, [self.batches[task] for task in mine], axis=0), "table")
        whole = np.zeros((self.tasks, *shaped.shape[1:]), shaped.dtype)
        whole[mine] = shaped
        table = self._builder.constant(whole, "table")
        looked_up = self._builder.add("Gather", table, self._row_tasks(), shape=(DYNAMIC, *shaped.shape[1:]), axis=0)
        return self.take(looked_up, frozenset(mine))

    def _counts(self, tasks: tuple[int, ...]) -> str:
        """The name of the rows of each of *tasks*."""
        if not self.dynamic:
            return self._builder.constant(np.array([self.batches[task] for task in tasks], np.int64), "rows")
        if tasks not in self._sizes:
            sizes = [self._size(task) for task in tasks]
            self._sizes[tasks] = self._builder.add("Concat", *sizes, shape=(len(tasks),), axis=0)
        return self._sizes[tasks]

    def _size(self, task: int) -> str:
        if (task,) not in self._sizes:
            self._sizes[task,] = self._builder.add("Shape", self._inputs[task], shape=(1,), start=0, end=1)
        return self._sizes[task,]

    def _row_tasks(self) -> str:
        """The name of the task of each row, [rows]."""
        if not self._task_of_row:
            numbers = [self._builder.constant(np.array([task], np.int64), "task") for task in range(self.tasks)]
            columns = [
                self._builder.add("Expand", number, self._size(task), shape=(DYNAMIC,))
                for task, number in enumerate(numbers)
            ]
            self._task_of_row = self._builder.add("Concat", *columns, shape=(DYNAMIC,), axis=0)
        return self._task_of_row


def slice_axis(builder: Builder, tensor: str, axis: int, first: int, end: int) -> str:
    """The entries *first* to *end* of an axis."""
    shape = list(builder.shape(tensor))
    if (first, end) == (0, shape[axis]):
        return tensor
    shape[axis] = end - first
    bounds = [builder.constant(np.array([each], np.int64), "index") for each in (first, end, axis)]
    return builder.add("Slice", tensor, *bounds, shape=tuple(shape))


def select(builder: Builder, tensor: str, columns: Array) -> str:
    """These channels of *tensor*, in this order."""
    shape = builder.shape(tensor)
    if len(columns) and (np.diff(columns) == 1).all():
        return slice_axis(builder, tensor, 1, int(columns[0]), int(columns[-1]) + 1)
    index = builder.constant(np.asarray(columns, np.int64), "index")
    return builder.add("Gather", tensor, index, shape=(shape[0], len(columns), *shape[2:]), axis=1)


def spread(builder: Builder, tensor: str, columns: Array, width: int) -> str:
    """A tensor of *width* channels that has those of *tensor* at *columns* and zeros elsewhere."""
    rows, channels, *picture = builder.shape(tensor)
    if channels == width:
        return select(builder, tensor, np.argsort(columns))
    prefix = (columns == np.arange(channels)).all()
    more = width - channels if prefix else 1
    ends = builder.constant(np.array([0, 0, 0, 0, 0, more, 0, 0], np.int64), "pads")
    padded = builder.add("Pad", tensor, ends, shape=(rows, channels + more, *picture))
    if prefix:
        return padded
    index = np.full(width, channels)
    index[columns] = np.arange(channels)
    return select(builder, padded, index)


def reshape(builder: Builder, tensor: str, shape: tuple[int, ...]) -> str:
    """*tensor* in another shape (all known, or the first dynamic)."""
    if builder.shape(tensor) == shape:
        return tensor
    target = builder.constant(np.array([-1 if size == DYNAMIC else size for size in shape], np.int64), "shape")
    return builder.add("Reshape", tensor, target, shape=shape)


def side_by_side(builder: Builder, tensors: Sequence[str]) -> str:
    """The channels of all *tensors*, one after another."""
    if len(tensors) == 1:
        return tensors[0]
    shapes = [builder.shape(each) for each in tensors]
    shape = (shapes[0][0], sum(each[1] for each in shapes), *shapes[0][2:])
    return builder.add("Concat", *tensors, shape=shape, axis=1)
