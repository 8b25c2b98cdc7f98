"""Where a form works: ``Room`` has every value in the layouts it has been needed in, and converts between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weft_stitch.family import Family
from weft_stitch.forms.rows import TaskRows, reshape, select, side_by_side, spread
from weft_stitch.graph import Builder
from weft_stitch.layouts import (
    APART,
    COMPACT,
    FUSED,
    STACKED,
    BlockPart,
    Channels,
    Layout,
)
from weft_stitch.net import Array
from weft_stitch.sharing import Sharing
from weft_stitch.spaces import Wiring


class Placed(NamedTuple):
    """A value in one layout."""

    layout: Layout
    tensors: tuple[str, ...]
    """One, or one for each task when apart."""
    clean: bool = True
    """Columns that are not the row's own hold zeros; if not, anything."""


class Room:
    """The lowering of one family so far."""

    def __init__(
        self,
        builder: Builder,
        family: Family,
        wiring: Wiring,
        sharing: Sharing,
        batches: Sequence[int],
        align: int = 1,
    ) -> None:
        self.align = align
        self.builder, self.family, self.wiring, self.sharing = builder, family, wiring, sharing
        self.rows = TaskRows(builder, batches)
        self._channels: dict[str, Channels] = {}
        self._placed: dict[str, dict[Layout, Placed]] = {}
        self._made: dict[str, int] = {}
        self._selected: dict[tuple[str, bytes], str] = {}

    def channels(self, value: str) -> Channels:
        if value not in self._channels:
            self._channels[value] = Channels(tuple(self.sharing[space] for space in self.wiring.carries[value]))
        return self._channels[value]

    def has(self, value: str) -> bool:
        return value in self._placed

    def put(self, value: str, placed: Placed) -> None:
        """*value* has been computed."""
        self._placed[value] = {placed.layout: placed}
        self._made[value] = len(self._made)

    def enter(self, value: str, tensors: Sequence[str]) -> None:
        """*value* has been computed for each task alone, in the order of its own channels."""
        channels = self.channels(value)
        moved = [select(self.builder, each, channels.order(task)) for task, each in enumerate(tensors)]
        self.put(value, Placed(APART, tuple(moved)))

    def own(self, value: str, task: int) -> str:
        """*value* of one task alone, in the order of its own channels."""
        tensor = self.get(value, APART).tensors[task]
        return select(self.builder, tensor, np.argsort(self.channels(value).order(task)))

    def layout(self, *values: str) -> Layout:
        """A layout in which to work on *values* together: one that all have, or that of the last one made."""
        last = max(values, key=lambda value: self._made[value])
        for layout in self._placed[last]:
            if all(layout in self._placed[value] for value in values):
                return layout
        return next(iter(self._placed[last]))

    def tensor(self, value: str, layout: Layout) -> str:
        """*value* in a layout of one tensor, with zeros where it has no channels."""
        return self.get(value, layout, clean=True).tensors[0]

    def get(self, value: str, layout: Layout, *, clean: bool = False) -> Placed:
        """*value* in *layout*, converted if need be."""
        known = self._placed[value]
        if layout not in known:
            known[layout] = self._convert(self.channels(value), known, layout)
        if clean and not known[layout].clean:
            known[layout] = self._cleaned(self.channels(value), known[layout])
        return known[layout]

    def _cleaned(self, channels: Channels, placed: Placed) -> Placed:
        """Zeros by selection, never by a product: what is not a row's own may be infinite."""
        if placed.layout == APART:
            return placed._replace(clean=True)
        owned: Array = channels.owned(placed.layout)
        if placed.layout == STACKED:
            owned = np.logical_or.reduce(owned, axis=0, keepdims=True)
        if owned.all():
            return placed._replace(clean=True)
        mask = self.rows.table(owned)
        zero = self.builder.constant(np.zeros(1, np.float32), "zero")
        shape = self.builder.shape(placed.tensors[0])
        return Placed(placed.layout, (self.builder.add("Where", mask, placed.tensors[0], zero, shape=shape),))

    def part(self, value: str, tasks: frozenset[int], parts: Sequence[BlockPart]) -> str:
        """Some parts of *value* for the rows of *tasks*, which all have them."""
        channels = self.channels(value)
        columns = [channels.columns(COMPACT, task, parts) for task in sorted(tasks)]
        if len(tasks) > 1 and all(np.array_equal(each, columns[0]) for each in columns):
            return self.select(self.rows.take(self.get(value, COMPACT).tensors[0], tasks), columns[0])
        tensors = self.get(value, APART).tensors
        picked = [self.select(tensors[task], channels.columns(APART, task, parts)) for task in sorted(tasks)]
        return self.rows.join(picked)

    def select(self, tensor: str, columns: Array) -> str:
        """These channels of *tensor*, taken once."""
        key = (tensor, columns.tobytes())
        if key not in self._selected:
            self._selected[key] = select(self.builder, tensor, columns)
        return self._selected[key]

    def _convert(self, channels: Channels, known: dict[Layout, Placed], target: Layout) -> Placed:
        if target == APART:
            return Placed(APART, self._apart(channels, next(iter(known.values()))))
        for placed in known.values():
            if (moved := self.moved(channels, placed, target)) is not None:
                return moved
        if APART in known:
            return Placed(target, (self._joined(channels, known[APART].tensors, target),))
        known[COMPACT] = self._convert(channels, known, COMPACT)
        return self._convert(channels, {COMPACT: known[COMPACT]}, target)

    def moved(self, channels: Channels, placed: Placed, target: Layout) -> Placed | None:
        """A conversion between two layouts of one tensor, if there is a direct one."""
        source = placed.layout
        if {source, target} == {COMPACT, STACKED}:
            return Placed(target, (self._restacked(placed.tensors[0], target),), placed.clean)
        if APART in (source, target) or STACKED in (source, target):
            return None
        if channels.common and channels.width(source) == channels.width(target):
            return placed._replace(layout=target)
        if self.rows.dynamic:
            return Placed(target, (self._joined(channels, self._apart(channels, placed), target),))
        return Placed(target, (self._gathered(channels, placed, target),), clean=False)

    def _gathered(self, channels: Channels, placed: Placed, target: Layout) -> str:
        """Each row's channels moved from their columns in one layout to those in another; the rest is arbitrary."""
        tensor = placed.tensors[0]
        rows, width, *picture = self.builder.shape(tensor)
        index = np.zeros((channels.tasks, channels.width(target)), np.int64)
        for task in range(channels.tasks):
            index[task, channels.columns(target, task)] = channels.columns(placed.layout, task)
        moved = np.repeat(index, self.rows.batches, axis=0) + width * np.arange(rows)[:, None]
        flat = reshape(self.builder, tensor, (rows * width, *picture))
        name = self.builder.constant(moved.ravel(), "index")
        taken = self.builder.add("Gather", flat, name, shape=(moved.size, *picture), axis=0)
        return reshape(self.builder, taken, (rows, moved.shape[1], *picture))

    def _restacked(self, tensor: str, target: Layout) -> str:
        """A tensor [tasks x batch, width] as [batch, tasks x width], or back; a view where the batch is one."""
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

    def _apart(self, channels: Channels, placed: Placed) -> tuple[str, ...]:
        if placed.layout == APART:
            return placed.tensors
        if placed.layout == STACKED:
            return self._unstacked(channels, placed.tensors[0])
        parts = self.rows.split(placed.tensors[0])
        return tuple(
            select(self.builder, part, channels.columns(placed.layout, task)) for task, part in enumerate(parts)
        )

    def _unstacked(self, channels: Channels, tensor: str) -> tuple[str, ...]:
        rows, width, *picture = self.builder.shape(tensor)
        each = width // channels.tasks
        parts = [tensor]
        if channels.tasks > 1:
            sizes = self.builder.constant(np.full(channels.tasks, each, np.int64), "sizes")
            shapes = [(rows, each, *picture)] * channels.tasks
            parts = self.builder.add_many("Split", tensor, sizes, shapes=shapes, axis=1)
        return tuple(select(self.builder, part, channels.columns(COMPACT, task)) for task, part in enumerate(parts))

    def _joined(self, channels: Channels, tensors: Sequence[str], target: Layout) -> str:
        inside = COMPACT if target == STACKED else target
        width = channels.width(inside)
        if channels.common and target.name == FUSED and len(channels.spaces) == 1:
            shape = (self.rows.total, width, *self.builder.shape(tensors[0])[2:])
            return self.builder.add("StackRows", *tensors, shape=shape, columns=width)
        if channels.common and target != STACKED:
            return spread(self.builder, self.rows.join(tensors), channels.columns(inside, 0), width)
        parts = [spread(self.builder, each, channels.columns(inside, task), width) for task, each in enumerate(tensors)]
        return side_by_side(self.builder, parts) if target == STACKED else self.rows.join(parts)
