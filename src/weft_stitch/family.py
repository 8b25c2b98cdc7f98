"""T models side by side (``Family``), and which of their channels are the same (``Sharing``, ``wire``).

A *space* is a set of channels that one or more values carry in the same order. A convolution begins a space; layers
that keep channels apart (affine, unary, pools, a depthwise convolution) keep the space of their input. An addition or a
product puts its operands into one space; a concatenation's value carries its operands' spaces one after another. Where
an operand of several spaces meets one of a single space, that one is cut to match, so that even a convolution's output
may carry several. Inputs, islands and grouped convolutions that are not depthwise begin a space too; the last two run
task by task (role ``separate``).

Across models the channels of a space fall into *blocks*: a block of several tasks is computed by the same weights in
all of them, a block of one task is its own. ``part`` selects some models, ``model_kinds`` finds interchangeable ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from weft.base.errors import ModelError, StitchError
from weft_stitch.net import Array, Net, Op, Port, Value

Role = Literal["dense", "depthwise", "separate", "channelwise", "join", "concat"]
"""What a layer does to channels, in this order: mixes them, filters each by itself, is run task by task, maps each by
itself, combines the operands' channels pairwise, concatenates them."""

ChannelCounts = tuple[int, ...]
"""Number of channels for each task."""


# --- what is shared ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Block:
    """Channels that the tasks of *members* share, or that one task has for itself."""

    members: Mapping[int, Array]
    """Task -> indices of the block's channels in that task's own model, in the block's order."""

    @cached_property
    def tasks(self) -> frozenset[int]:
        return frozenset(self.members)

    @cached_property
    def width(self) -> int:
        return len(next(iter(self.members.values())))


@dataclass(frozen=True, eq=False)
class ChannelSpace:
    """The channels of one space over all tasks; blocks of many tasks come first."""

    widths: ChannelCounts
    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        for task, width in enumerate(self.widths):
            listed = self.order(task)
            if len(listed) != width or len(np.unique(listed)) != width:
                raise ModelError(f"task {task}: its {width} channels are not each in one block ({len(listed)} are)")

    def blocks_of(self, task: int) -> Iterator[Block]:
        """The blocks of *task*, in the order in which its channels are laid out."""
        return (block for block in self.blocks if task in block.tasks)

    def order(self, task: int) -> Array:
        """The channels of the task's own model, in the order in which layouts store them."""
        return np.concatenate([np.asarray(block.members[task]) for block in self.blocks_of(task)] or [np.zeros(0, int)])

    @property
    def stitched_width(self) -> int:
        """Number of channels when every block is laid out once (the paper's form)."""
        return sum(block.width for block in self.blocks)

    @property
    def shared_width(self) -> int:
        """Number of channels that all tasks share."""
        return sum(block.width for block in self.blocks if len(block.tasks) == len(self.widths))

    @staticmethod
    def completed(widths: ChannelCounts, blocks: Sequence[Block] = ()) -> ChannelSpace:
        """A space of *blocks*, to which each task's remaining channels are added as a block of its own."""
        unlisted = [np.ones(width, bool) for width in widths]
        for block in blocks:
            for task, channels in block.members.items():
                unlisted[task][channels] = False
        own = [
            Block({task: np.flatnonzero(is_unlisted)}) for task, is_unlisted in enumerate(unlisted) if is_unlisted.any()
        ]
        return ChannelSpace(widths, (*blocks, *own))

    @staticmethod
    def common(width: int, tasks: int) -> ChannelSpace:
        """A space of *width* channels that all *tasks* share, in the same order."""
        return ChannelSpace((width,) * tasks, (Block({task: np.arange(width) for task in range(tasks)}),))


@dataclass(frozen=True, eq=False)
class Sharing:
    """The spaces of stitched models by name; the name is that of the first value (in task 0) that carries it."""

    spaces: Mapping[str, ChannelSpace]

    def __getitem__(self, space: str) -> ChannelSpace:
        return self.spaces[space]


# --- models side by side ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FamilyLayer:
    """One operation that every model has.

    *ops* has each task's own; *inputs* and *output* are task 0's names of values.
    """

    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    output: str

    @property
    def op(self) -> Op:
        return self.ops[0]

    @property
    def name(self) -> str:
        return self.op.name


@dataclass(frozen=True, eq=False)
class Family:
    """The operations that all models have, in order, and those that each model runs alone afterwards."""

    nets: tuple[Net, ...]
    layers: tuple[FamilyLayer, ...]
    values: Mapping[str, tuple[Value, ...]]
    """Value (by task 0's name) -> its size in every task; heights and widths agree, channels may differ."""
    inputs: tuple[str, ...]
    """The values of the nets' input ports, in the order of the ports."""
    outputs: Mapping[str, tuple[Port, ...]]
    """Values that are an output of every net -> each net's port."""
    tails: tuple[tuple[Op, ...], ...] = ()
    """For each task, the operations without counterpart in the others; they read values by the task's own names."""
    bridges: tuple[Mapping[str, str], ...] = ()
    """For each task, the family's values that its tail reads: the task's own name -> the family's name."""

    @property
    def tasks(self) -> int:
        return len(self.nets)

    @cached_property
    def batches(self) -> tuple[int, ...]:
        return tuple(net.batch for net in self.nets)


def part(family: Family, sharing: Sharing, tasks: Sequence[int]) -> tuple[Family, Sharing]:
    """The family of *tasks* alone; values and spaces keep their names."""
    layers = tuple(
        FamilyLayer(tuple(layer.ops[task] for task in tasks), layer.inputs, layer.output) for layer in family.layers
    )
    selected = replace(
        family,
        nets=tuple(family.nets[task] for task in tasks),
        layers=layers,
        values={name: tuple(sizes[task] for task in tasks) for name, sizes in family.values.items()},
        outputs={name: tuple(ports[task] for task in tasks) for name, ports in family.outputs.items()},
        tails=tuple(family.tails[task] for task in tasks) if family.tails else (),
        bridges=tuple(family.bridges[task] for task in tasks) if family.bridges else (),
    )
    return selected, Sharing({name: _select_tasks(space, tasks) for name, space in sharing.spaces.items()})


def _select_tasks(space: ChannelSpace, tasks: Sequence[int]) -> ChannelSpace:
    """*space* with only *tasks*, which are numbered anew in that order."""
    blocks = [
        Block({new: block.members[old] for new, old in enumerate(tasks) if old in block.members})
        for block in space.blocks
        if not block.tasks.isdisjoint(tasks)
    ]
    # removing tasks may break the order of blocks by number of tasks, which layouts rely on
    blocks.sort(key=lambda block: -len(block.tasks))
    return ChannelSpace(tuple(space.widths[task] for task in tasks), tuple(blocks))


def model_kinds(family: Family, sharing: Sharing) -> list[Hashable]:
    """A key for each model. Keys are equal for models of equal sizes that share channels with the same other models."""
    groups: set[frozenset[int]] = set()  # of models that share channels; sharing by all distinguishes none
    for space in sharing.spaces.values():
        groups |= {block.tasks for block in space.blocks if 1 < len(block.tasks) < family.tasks}
    keys: list[Hashable] = []
    for task, net in enumerate(family.nets):
        sizes = tuple(value[task] for value in family.values.values())
        tail = tuple(op.weight.shape for op in family.tails[task] if op.weight is not None) if family.tails else ()
        keys.append((net.batch, sizes, tail, frozenset(group for group in groups if task in group)))
    return keys


# --- spaces -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Writer:
    """What computes the channels of a space: a layer of role dense, depthwise or separate, or a model's input."""

    value: str
    position: int
    """Index of the space among those that the value carries."""
    layer: FamilyLayer | None = None
    """None for an input."""

    @property
    def role(self) -> Role | Literal["input"]:
        return "input" if self.layer is None else role(self.layer)


@dataclass(frozen=True, eq=False)
class Wiring:
    """Which channel spaces the values of a family carry.

    A space is a set of channels that values have in the same order; a value *carries* one space, or several one after
    another. A space has the name of the first value (in task 0) that carries it.
    """

    carries: Mapping[str, tuple[str, ...]]
    """Value -> its spaces, in the order of its channels."""
    widths: Mapping[str, ChannelCounts]
    """Space -> its number of channels in each task."""
    writers: Mapping[str, tuple[Writer, ...]]
    """Space -> the layers and inputs that compute its channels."""

    def slices(self, value: str, task: int) -> Iterator[tuple[str, slice]]:
        """Yield each space that *value* carries, with the range of its channels in *task*'s own value."""
        start = 0
        for space in self.carries[value]:
            width = self.widths[space][task]
            yield space, slice(start, start + width)
            start += width


def role(layer: FamilyLayer) -> Role:
    """How *layer* treats channels; a grouped convolution with several channels per group runs task by task."""
    kind = layer.op.kind
    if kind == "conv":
        return _convolution_role(layer)
    if kind == "island":
        return "separate"
    if kind in ("add", "mul"):
        return "join"
    return "concat" if kind == "concat" else "channelwise"


def _convolution_role(layer: FamilyLayer) -> Role:
    """The role of a convolution, by its groups."""
    if all(op.groups == 1 for op in layer.ops):
        return "dense"
    shapes = [op.weight.shape for op in layer.ops if op.weight is not None]
    single = all(op.groups == shape[0] and shape[1] == 1 for op, shape in zip(layer.ops, shapes, strict=True))
    return "depthwise" if single else "separate"


def wire(family: Family) -> Wiring:
    """Assign the values of *family* to spaces; ``StitchError`` for an addition or product over unequal channels."""
    spaces = _SpaceNumbers()
    carried: dict[str, tuple[int, ...]] = {value: (spaces.add(_channels(family, value)),) for value in family.inputs}
    for layer in family.layers:
        operands = [carried[value] for value in layer.inputs]
        layer_role = role(layer)
        if layer_role in ("dense", "separate"):
            carried[layer.output] = (spaces.add(_channels(family, layer.output)),)
        elif layer_role == "concat":
            carried[layer.output] = tuple(space for operand in operands for space in operand)
        else:
            for operand, name in zip(operands[1:], layer.inputs[1:], strict=True):
                if not spaces.unify(operands[0], operand):
                    raise StitchError(_mismatch_message(family, layer, name))
            carried[layer.output] = operands[0]
    return _name_spaces(family, spaces, {value: spaces.resolve(numbers) for value, numbers in carried.items()})


def _channels(family: Family, value: str) -> ChannelCounts:
    """The number of channels of *value* in every task."""
    return tuple(size.channels for size in family.values[value])


def _mismatch_message(family: Family, layer: FamilyLayer, other: str) -> str:
    """Say why the channels of a layer's first operand and of *other* cannot be paired."""
    first = layer.inputs[0]
    widths = zip(_channels(family, first), _channels(family, other), strict=True)
    for task, (first_width, other_width) in enumerate(widths):
        if first_width != other_width:
            model = family.nets[task].name
            return (
                f"{layer.name}: {layer.op.kind} of {first_width} and {other_width} channels in {model}; "
                "a broadcast over channels cannot be stitched, expand it in the model"
            )
    return (
        f"{layer.name}: {layer.op.kind} of {first} and {other}: one of them is a concatenation whose part widths are "
        "larger in some models and smaller in others than the other operand's, so that channels cannot be paired; "
        f"end the common part before {layer.name}"
    )


def _name_spaces(family: Family, spaces: _SpaceNumbers, carried: Mapping[str, tuple[int, ...]]) -> Wiring:
    """Name the numbered *spaces* and list their writers. *carried*: value -> numbers of the spaces that it carries."""
    names: dict[int, str] = {}  # of the first value that carries it, with the position if the value carries several
    for value, numbers in carried.items():
        for position, space in enumerate(numbers):
            names.setdefault(space, value if len(numbers) == 1 else f"{value}[{position}]")
    writers: dict[str, list[Writer]] = {name: [] for name in names.values()}
    sources = [(value, None) for value in family.inputs]
    layers = [(layer.output, layer) for layer in family.layers if role(layer) in ("dense", "depthwise", "separate")]
    for value, layer in [*sources, *layers]:
        for position, space in enumerate(carried[value]):
            writers[names[space]].append(Writer(value, position, layer))
    return Wiring(
        carries={value: tuple(names[space] for space in numbers) for value, numbers in carried.items()},
        widths={name: spaces.widths[space] for space, name in names.items()},
        writers={name: tuple(members) for name, members in writers.items()},
    )


class _SpaceNumbers:
    """Spaces under construction: two become one when they are unified, and a wide one may be cut in two."""

    def __init__(self) -> None:
        self.widths: list[ChannelCounts] = []
        self._parent: list[int] = []
        """Union-find forest: each space's parent; a root is its own parent."""
        self._halves: dict[int, tuple[int, int]] = {}
        """A space that was cut -> the two spaces that replace it."""

    def add(self, widths: ChannelCounts) -> int:
        """Add a space with *widths* channels in each task; return its number."""
        self.widths.append(widths)
        self._parent.append(len(self._parent))
        return len(self._parent) - 1

    def resolve(self, spaces: tuple[int, ...]) -> tuple[int, ...]:
        """Replace unified spaces by their representative, and cut spaces by their halves."""
        resolved: list[int] = []
        queue = deque(spaces)
        while queue:
            space = queue.popleft()
            while self._parent[space] != space:
                space = self._parent[space]
            if space in self._halves:
                queue.extendleft(reversed(self._halves[space]))  # extendleft reverses its argument
            else:
                resolved.append(space)
        return tuple(resolved)

    def unify(self, left: tuple[int, ...], right: tuple[int, ...]) -> bool:
        """Make two sequences of spaces the same, cutting wide ones; False if their widths do not allow it."""
        while left and right:
            left, right = self.resolve(left), self.resolve(right)
            first, second = left[0], right[0]
            if self.widths[first] == self.widths[second]:
                # the older number stays, so that a space is named after the first value that carries it
                self._parent[max(first, second)] = min(first, second)
                left, right = left[1:], right[1:]
            elif not (self._cut(first, self.widths[second]) or self._cut(second, self.widths[first])):
                return False
        return left == right

    def _cut(self, space: int, widths: ChannelCounts) -> bool:
        """Cut the first *widths* channels off *space*; False, and nothing is done, unless it is wider in every task."""
        rest = tuple(width - cut for width, cut in zip(self.widths[space], widths, strict=True))
        if min(rest) <= 0:
            return False
        self._halves[space] = self.add(widths), self.add(rest)
        return True
