"""The weights of one layer as the one-kernel form reads them: ``pack`` makes a ``PackedLayer``.

A value is stored as rows x height x width x columns; a row has the blocks of its own task and no others (``columns``).
Every pair of an output block and an input block that some task has is one piece of weights, stored once as [input
channel][tap][output channel]. For vector loads, every block must begin at a multiple of *align* columns, and every line
of weights at a multiple of *align* numbers. To keep the padding small, the own output blocks of all tasks lie side by
side in one line, and a task's own block has the same offset in its row as in that line, modulo *align*.

A *tile* is some output positions of one task by some channels of one of its output blocks. It finds its weights through
at most two ranges of input columns (``Tile``), or, where sharing by subsets or a concatenation makes more, through a
table with the place of every column. A *run* is the range of adjacent columns that a block takes in a row
(``BlockColumns``), and a *place* the index of a number in the weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from weft_stitch.family import Block, ChannelSpace
from weft_stitch.net import Array, Window

LARGEST = 2**31
"""Limit on the numbers in one tensor: the kernel addresses them by 32-bit integers."""


def align_up(width: int, align: int) -> int:
    """*width* rounded up to a multiple of *align*."""
    return -(-width // align) * align


class BlockColumns(NamedTuple):
    """The columns of one block in the rows of one task: a run of adjacent columns."""

    space: int
    """Index of the space among those that the value carries."""
    block: Block
    start: int
    """The block's first column."""
    skip: int
    """Number of columns between the last multiple of the alignment and *start*: padding."""

    @property
    def begin(self) -> int:
        """The last multiple of the alignment before the block, or at it."""
        return self.start - self.skip

    @property
    def key(self) -> tuple[int, int]:
        """Identifies the block in all tasks that have it: by space as well, as a value may carry one space twice."""
        return self.space, id(self.block)

    def span(self, align: int) -> int:
        """Number of columns from ``begin`` to the first multiple of *align* behind the block."""
        return align_up(self.skip + self.block.width, align)


def columns(spaces: Sequence[ChannelSpace], task: int, align: int) -> list[BlockColumns]:
    """The columns of the blocks of *task* in a row; a space begins at the same column in all tasks."""
    runs, begin = [], 0
    for number, space in enumerate(spaces):
        runs += _space_columns(number, space, task, align, begin)
        begin += widest([space], align) if number + 1 < len(spaces) else 0  # no space begins behind the last
    return runs


def _space_columns(number: int, space: ChannelSpace, task: int, align: int, begin: int) -> list[BlockColumns]:
    """The columns of the blocks of *task* in one space, which begins at column *begin*."""
    # The own blocks of all tasks lie side by side in one line of weights, the current one from *place* on. A block has
    # the same offset in its row, modulo the alignment, so that loads of weights and of rows are both aligned.
    runs, place = [], 0
    for block in space.blocks:
        is_own = len(block.tasks) == 1
        if task in block.tasks:
            skip = place % align if is_own else 0
            runs.append(BlockColumns(number, block, begin + skip, skip))
            begin += runs[-1].span(align)
        place += block.width if is_own else 0
    return runs


def row_width(spaces: Sequence[ChannelSpace], task: int, align: int) -> int:
    """Number of columns of *task*'s rows, up to its last block."""
    runs = columns(spaces, task, align)
    return runs[-1].begin + runs[-1].span(align) if runs else 0


def widest(spaces: Sequence[ChannelSpace], align: int) -> int:
    """Number of columns of the task with the widest rows."""
    return max(row_width(spaces, task, align) for task in range(len(spaces[0].widths)))


class Activation(NamedTuple):
    """An elementwise function with its parameters; an empty name for none.

    One of Relu, LeakyRelu (alpha), Clip (alpha to beta), Sigmoid, Silu, HardSwish and HardSigmoid (alpha x + beta).
    """

    function: str = ""
    alpha: float = 0.0
    beta: float = 0.0


class Tile(NamedTuple):
    """The work of one program of the kernel: a row of the table that ``PackedLayer.tiles`` returns.

    The kernel reads the fields by their position.
    """

    task: int
    first_position: int
    end_position: int
    """Where the task's positions end; a tile's last positions may lie behind it."""
    first_channel: int
    """First channel of the tile, counted from the column at which the block's span begins."""
    span: int
    """Number of columns to write, a multiple of the alignment; columns outside the block become zero."""
    skip: int
    """Number of columns of the span before the block."""
    width: int
    """Number of channels of the block."""
    column: int
    """The output column at which the span begins."""
    first_place: int
    """Where the weights of the first run of input columns begin; the run begins at column 0."""
    line: int
    """Distance of the weights of one tap from those of the next, in both runs."""
    first_end: int
    """The column behind the first run."""
    second_column: int
    """The first column of the second run; the row's width if there is no second run."""
    jump: int
    """Distance of the second run's weights from the place that they would have right behind the first run's."""
    second_end: int
    """The column behind the second run."""
    depth: int
    """Number of input columns of the task's rows."""
    table: int
    """Where this task and output block begin in the table ``PackedLayer.places``."""


@dataclass(frozen=True, eq=False)
class PackedLayer:
    """The weights of one layer in the order in which the one-kernel form reads them, and its tiles."""

    weights: Array
    """All pieces, one after another."""
    unique: int
    """Count of the numbers in *weights* that are weights; the rest pads lines to the alignment."""
    places: Array
    """[2][task and output block][input column]: where a column's weights begin (-1: none), and how far apart taps are.

    Both are divided by the alignment. Empty if two runs describe all tiles.
    """
    targets: tuple[tuple[Tile, ...], ...]
    """For each task, one tile per output block, which ``tiles`` cuts into many."""
    window: Window
    tasks: int
    inputs: int
    """Number of columns of an input row."""
    outputs: int
    """Number of columns of an output row."""
    output_runs: tuple[tuple[BlockColumns, ...], ...]
    """For each task, the columns of its output blocks."""
    align: int
    """Output blocks begin at multiples of this number of columns."""
    input_align: int
    """Input blocks begin at multiples of this number of columns."""

    @cached_property
    def by_table(self) -> bool:
        """Whether the kernel looks up the place of every input column in *places*."""
        return self.places.size > 0

    @cached_property
    def ragged(self) -> bool:
        """Whether some task's rows are shorter than the widest."""
        row_widths = {runs[-1].begin + runs[-1].span(self.align) if runs else 0 for runs in self.output_runs}
        return row_widths != {self.outputs}

    @cached_property
    def depth(self) -> int:
        """Number of input columns of a task's row, if it is the same for all tasks; else 0."""
        depths = {target.depth for targets in self.targets for target in targets}
        return depths.pop() if len(depths) == 1 else 0

    @cached_property
    def widest_rider(self) -> int:
        """The widest span of an own block that can ride along with a shared block; 0 if no task has both."""
        return max((targets[-1].span for targets in self.targets if len(targets) > 1), default=0)

    def tiles(self, positions: Sequence[int], tile_height: int, tile_width: int, rider_width: int = 0) -> Array:
        """All tiles of *tile_height* positions by *tile_width* channels, with their riders: [tiles, fields of both].

        *positions*: the number of output positions of each task. A *rider* is the task's own block, if it spans at most
        *rider_width* columns: it is computed along with the last tile of a shared block, because both read the same
        input. The other tiles have a rider that spans no columns.
        """
        task_ends, rows = np.cumsum(positions), []
        for task, targets in enumerate(self.targets):
            end = int(task_ends[task])
            for first in range(end - positions[task], end, tile_height):
                block_tiles = [target._replace(first_position=first, end_position=end) for target in targets]
                with_riders = _tiles_with_riders(block_tiles, tile_width, rider_width)
                rows += [[*tile, *rider] for tile, rider in with_riders]
        return np.array(rows, np.int32).reshape(-1, 2 * len(Tile._fields))

    def spread(self, values: Sequence[Array]) -> Array:
        """A table [task, output column] of per-channel *values* in each task's own order; zero in other columns."""
        table = np.zeros((self.tasks, self.outputs), np.float32)
        for task, runs in enumerate(self.output_runs):
            for run in runs:
                table[task, run.start : run.start + run.block.width] = values[task][run.block.members[task]]
        return table


class WeightLine(NamedTuple):
    """Where the weights of a piece begin, and the distance from tap to tap."""

    place: int
    length: int


Key = tuple[int, int]
"""A block in a space: what ``BlockColumns.key`` returns."""
Lines = dict[tuple[int, Key, Key], WeightLine]
"""Task, output block and input block -> the line of their piece."""


class _WeightStore:
    """Lays pieces of weights out one after another.

    A *sheet* is an array [input channel][tap][output channel]. It has a line of output channels for each input channel
    and tap, and holds one piece, or several side by side in its lines.
    """

    def __init__(self, kernels: Sequence[Array], inputs: Sequence[ChannelSpace], align: int) -> None:
        self.kernels, self.align = kernels, align
        self.taps = kernels[0].shape[2] * kernels[0].shape[3]
        widths = ([space.widths[task] for space in inputs] for task in range(len(kernels)))
        self.first_channels = [np.cumsum([0, *task_widths]) for task_widths in widths]
        """For each task, the first input channel of each space."""
        self.sheets: list[Array] = []
        self.length = self.unique = 0  # numbers stored so far, and those of them that are weights

    def add_sheet(self, inputs: int, outputs: int) -> tuple[Array, int]:
        """Add a sheet for this many input and output channels; return it and the place where it begins."""
        array = np.zeros((inputs, self.taps, align_up(outputs, self.align)), self.kernels[0].dtype)
        self.sheets.append(array)
        begin, self.length = self.length, self.length + array.size
        return array, begin

    def write(self, sheet: Array, column: int, task: int, out_block: Block, run: BlockColumns) -> None:
        """Write *task*'s piece from the input block of *run* to *out_block* into *sheet*, at *column* of its lines."""
        # run.space is an index; members count channels from the first of their space
        channels = self.first_channels[task][run.space] + run.block.members[task]
        piece = self.kernels[task][np.ix_(out_block.members[task], channels)]
        piece = piece.reshape(out_block.width, run.block.width, self.taps)  # [output channel, input channel, tap]
        sheet[: run.block.width, :, column : column + out_block.width] = piece.transpose(1, 2, 0)
        self.unique += piece.size


def pack(
    kernels: Sequence[Array],
    inputs: Sequence[ChannelSpace],
    output: ChannelSpace,
    window: Window,
    *,
    align: int = 1,
    input_align: int | None = None,
) -> PackedLayer:
    """Pack the kernels [out, in, height, width] of all tasks; shared pieces are read from the first task that has them.

    *inputs*, *output*: the channel spaces that the layer reads, and the one that it writes. *align* and *input_align*
    (by default the same): output and input blocks begin at multiples of these.
    """
    tasks = range(len(kernels))
    input_align = align if input_align is None else input_align
    runs = [columns(inputs, task, input_align) for task in tasks]  # of input blocks
    outs = [columns([output], task, align) for task in tasks]  # of output blocks
    store = _WeightStore(kernels, inputs, align)
    lines = _store_pieces(store, output, runs, outs)
    width = widest(inputs, input_align)
    by_table = not all(_fits_two_runs(task, runs[task], outs[task], lines) for task in tasks)
    targets: list[tuple[Tile, ...]] = []
    tables: list[Array] = []
    for task in tasks:
        task_tiles = []
        for out in outs[task]:
            task_lines = [lines[task, out.key, run.key] for run in runs[task]]
            depth = row_width(inputs, task, input_align)
            task_tiles.append(
                _whole_tile(task, out, runs[task], task_lines, depth, align, store.taps, len(tables) * width)
            )
            if by_table:
                tables.append(_place_table(runs[task], task_lines, width, store.taps, align))
        targets.append(tuple(task_tiles))
    return PackedLayer(
        weights=np.concatenate([sheet.ravel() for sheet in store.sheets]),
        unique=store.unique,
        places=np.stack(tables, axis=1).astype(np.int32) if tables else np.zeros((2, 0, 0), np.int32),
        targets=tuple(targets),
        window=window,
        tasks=len(kernels),
        inputs=width,
        outputs=widest([output], align),
        output_runs=tuple(map(tuple, outs)),
        align=align,
        input_align=input_align,
    )


def _store_pieces(
    store: _WeightStore, output: ChannelSpace, runs: list[list[BlockColumns]], outs: list[list[BlockColumns]]
) -> Lines:
    """Store every piece of weights once; return where each is.

    *runs*, *outs*: for each task, the columns of its input blocks and of its output blocks.

    The own output blocks of all tasks share a sheet for every input block that all tasks have. They share one more
    sheet for the tasks' own input blocks, if these are equally wide. A task's block begins at its column of the sheet's
    lines.
    """
    lines: Lines = {}
    pieces: dict[tuple[Key, Key], WeightLine] = {}
    sheets: dict[Key | None, tuple[Array, int]] = {}
    own_columns, line_width = _own_block_columns(output)
    own_inputs_fit = _own_inputs_fit_one_sheet(runs)
    for task, task_runs in enumerate(runs):
        for run, out in itertools.product(task_runs, outs[task]):
            key = (out.key, run.key)
            common = len(run.block.tasks) == len(runs)
            if id(out.block) in own_columns and (common or (own_inputs_fit and len(run.block.tasks) == 1)):
                group = run.key if common else None  # None: the sheet of all tasks' own input blocks
                if group not in sheets:
                    sheets[group] = store.add_sheet(run.block.width, line_width)
                sheet, begin = sheets[group]
                column = own_columns[id(out.block)]
                store.write(sheet, column, task, out.block, run)
                # a tile reads from the span's begin, which is *skip* columns before the block
                lines[task, *key] = WeightLine(begin + column - out.skip, sheet.shape[2])
                continue
            if key not in pieces:
                sheet, begin = store.add_sheet(run.block.width, out.skip + out.block.width)
                store.write(sheet, out.skip, task, out.block, run)
                pieces[key] = WeightLine(begin, sheet.shape[2])
            lines[task, *key] = pieces[key]
    return lines


def _fits_two_runs(task: int, runs: list[BlockColumns], outs: list[BlockColumns], lines: Lines) -> bool:
    """Whether the fields of ``Tile`` can describe all input of *task*, so that it needs no table of places.

    That is so for a single run, and for two runs if the first begins at column 0 and both have lines of one length.
    """
    if len(runs) == 1:
        return True
    pairs = ((lines[task, out.key, runs[0].key], lines[task, out.key, runs[1].key]) for out in outs)
    return len(runs) == 2 and runs[0].start == 0 and all(first.length == second.length for first, second in pairs)


def _own_block_columns(output: ChannelSpace) -> tuple[dict[int, int], int]:
    """Own output block (by ``id``) -> its column in the line that all own blocks share, and the length of that line."""
    columns_by_id, column = {}, 0
    for block in output.blocks:
        if len(block.tasks) == 1:
            columns_by_id[id(block)] = column
            column += block.width
    return columns_by_id, column


def _own_inputs_fit_one_sheet(runs: list[list[BlockColumns]]) -> bool:
    """Whether the tasks' own input blocks can share a sheet (``_WeightStore``): one for each task, all equally wide.

    *runs*: for each task, the columns of its input blocks.
    """
    own_widths = [[run.block.width for run in task_runs if len(run.block.tasks) == 1] for task_runs in runs]
    return all(len(widths) == 1 for widths in own_widths) and len({widths[0] for widths in own_widths}) == 1


def _tiles_with_riders(targets: list[Tile], tile_width: int, rider_width: int) -> list[tuple[Tile, Tile]]:
    """The tiles of one task at some positions, each with its rider (see ``PackedLayer.tiles``).

    *targets*: a tile for each output block, which is cut into tiles of *tile_width* channels.
    """
    # The last target of a task is its own block, if it has one.
    has_rider = len(targets) > 1 and targets[-1].span <= rider_width
    tiles = [
        target._replace(first_channel=channel)
        for target in (targets[:-1] if has_rider else targets)
        for channel in range(0, target.span, tile_width)
    ]
    no_rider = tiles[0]._replace(span=0, width=0)
    return [(tile, targets[-1] if has_rider and tile is tiles[-1] else no_rider) for tile in tiles]


def _whole_tile(
    task: int,
    out: BlockColumns,
    runs: list[BlockColumns],
    lines: list[WeightLine],
    depth: int,
    align: int,
    taps: int,
    table: int,
) -> Tile:
    """The tile of a whole output block, to be cut by ``PackedLayer.tiles``.

    *runs*, *lines*: the input blocks and where their weights lie. *table*: see ``Tile``. If the only run does not begin
    at column 0, it is described as the second, and the first has no columns.
    """
    has_first = runs[0].start == 0
    second = runs[-1] if len(runs) > 1 or not has_first else None
    line = lines[0].length
    place = lines[0].place if has_first else 0
    jump = lines[-1].place - place - second.start * taps * line if second else 0
    return Tile(
        task=task,
        first_position=0,
        end_position=0,
        first_channel=0,
        span=out.span(align),
        skip=out.skip,
        width=out.block.width,
        column=out.begin,
        first_place=place,
        line=line,
        first_end=runs[0].block.width if has_first else 0,
        second_column=second.start if second else depth,
        jump=jump,
        second_end=second.start + second.block.width if second else 0,
        depth=depth,
        table=table,
    )


def _place_table(runs: list[BlockColumns], lines: list[WeightLine], width: int, taps: int, align: int) -> Array:
    """For one task and output block, where the weights of each input column begin, and how far apart taps are.

    [2, width], as ``PackedLayer.places`` has them. *runs*, *lines*: the input blocks and where their weights lie.
    """
    table = np.full((2, width), -1, np.int64)
    for run, line in zip(runs, lines, strict=True):
        block_columns = slice(run.start, run.start + run.block.width)
        table[0, block_columns] = (line.place + line.length * taps * np.arange(run.block.width)) // align
        table[1, block_columns] = line.length // align
    return table
