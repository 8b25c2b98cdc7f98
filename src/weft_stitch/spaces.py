"""Which values carry the same channels: ``wire`` puts the values of a family into spaces.

A convolution makes a fresh space, and what keeps channels apart (affine, unary, pools, a depthwise convolution) keeps
the space of its input. An addition or a product puts its operands into one space, a concatenation's value carries its
operands' spaces after another, and where an operand of several spaces meets one of a single space, that one is cut to
match, so that even a convolution's output may carry several. An input is a space; so is the output of an island and of
a grouped convolution that is not depthwise: those run task by task (role ``separate``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from weft.base.errors import StitchError
from weft_stitch.family import Family, FamilyLayer

Role = Literal["dense", "depthwise", "separate", "channelwise", "join", "concat"]
"""What a layer does to channels: mix, filter one by one, run task by task, map one by one, join operands, line up."""

Widths = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Writer:
    """What determines the channels of a space: a layer of role dense, depthwise or separate, or a model's input."""

    value: str
    position: int
    """Where the space stands among those that the value carries."""
    layer: FamilyLayer | None = None
    """None for an input."""

    @property
    def role(self) -> Role | Literal["input"]:
        return "input" if self.layer is None else role(self.layer)


@dataclass(frozen=True, eq=False)
class Wiring:
    """The spaces of a family, by name: that of the first value (in task 0) that carries it."""

    carries: Mapping[str, tuple[str, ...]]
    """Each value's spaces, in the order of its channels."""
    widths: Mapping[str, Widths]
    """Each space's channels in every task."""
    writers: Mapping[str, tuple[Writer, ...]]

    def slices(self, value: str, task: int) -> Iterator[tuple[str, slice]]:
        """The spaces that *value* carries, each with the channels of *task*'s own value that it is."""
        start = 0
        for space in self.carries[value]:
            width = self.widths[space][task]
            yield space, slice(start, start + width)
            start += width


def role(layer: FamilyLayer) -> Role:
    """How *layer* treats channels; a grouped convolution with several channels in a group is left to run separately."""
    kind = layer.op.kind
    if kind == "conv":
        return _conv_role(layer)
    if kind == "island":
        return "separate"
    if kind in ("add", "mul"):
        return "join"
    return "concat" if kind == "concat" else "channelwise"


def _conv_role(layer: FamilyLayer) -> Role:
    if all(op.groups == 1 for op in layer.ops):
        return "dense"
    shapes = [op.weight.shape for op in layer.ops if op.weight is not None]
    one_each = all(op.groups == shape[0] and shape[1] == 1 for op, shape in zip(layer.ops, shapes, strict=True))
    return "depthwise" if one_each else "separate"


def wire(family: Family) -> Wiring:
    """The spaces of *family*; an addition or product over unequal channels is an error."""
    spaces = _Spaces()
    carried: dict[str, tuple[int, ...]] = {value: (spaces.fresh(_channels(family, value)),) for value in family.inputs}
    for layer in family.layers:
        operands = [carried[each] for each in layer.inputs]
        what = role(layer)
        if what in ("dense", "separate"):
            carried[layer.output] = (spaces.fresh(_channels(family, layer.output)),)
        elif what == "concat":
            carried[layer.output] = tuple(space for each in operands for space in each)
        else:
            for each, name in zip(operands[1:], layer.inputs[1:], strict=True):
                if not spaces.unify(operands[0], each):
                    raise StitchError(_mismatch(family, layer, name))
            carried[layer.output] = operands[0]
    return _named(family, spaces, {value: spaces.resolve(each) for value, each in carried.items()})


def _channels(family: Family, value: str) -> Widths:
    return tuple(size.channels for size in family.values[value])


def _mismatch(family: Family, layer: FamilyLayer, other: str) -> str:
    first = layer.inputs[0]
    for task, (one, two) in enumerate(zip(_channels(family, first), _channels(family, other), strict=True)):
        if one != two:
            return (
                f"{layer.name}: {layer.op.kind} of {one} and {two} channels in {family.nets[task].name}; "
                "a broadcast over channels cannot be stitched, expand it in the model"
            )
    return (
        f"{layer.name}: {layer.op.kind} of {first} and {other}, whose parts before it have widths that cross between "
        "the models; such a concatenation cannot be stitched, end the common part before it"
    )


def _named(family: Family, spaces: _Spaces, carried: Mapping[str, tuple[int, ...]]) -> Wiring:
    names: dict[int, str] = {}
    for value, each in carried.items():
        for position, space in enumerate(each):
            names.setdefault(space, value if len(each) == 1 else f"{value}[{position}]")
    writers: dict[str, list[Writer]] = {name: [] for name in names.values()}
    sources = [(value, None) for value in family.inputs]
    layers = [(layer.output, layer) for layer in family.layers if role(layer) in ("dense", "depthwise", "separate")]
    for value, writer in [*sources, *layers]:
        for position, space in enumerate(carried[value]):
            writers[names[space]].append(Writer(value, position, writer))
    return Wiring(
        {value: tuple(names[space] for space in each) for value, each in carried.items()},
        {name: spaces.widths[space] for space, name in names.items()},
        {name: tuple(each) for name, each in writers.items()},
    )


class _Spaces:
    """Spaces under construction: two become one when they are unified, and a wide one may be cut in two."""

    def __init__(self) -> None:
        self.widths: list[Widths] = []
        self._same: list[int] = []
        self._halves: dict[int, tuple[int, int]] = {}

    def fresh(self, widths: Widths) -> int:
        self.widths.append(widths)
        self._same.append(len(self._same))
        return len(self._same) - 1

    def resolve(self, spaces: tuple[int, ...]) -> tuple[int, ...]:
        """What *spaces* have become."""
        found: list[int] = []
        waiting = deque(spaces)
        while waiting:
            space = waiting.popleft()
            while self._same[space] != space:
                space = self._same[space]
            if space in self._halves:
                waiting.extendleft(reversed(self._halves[space]))
            else:
                found.append(space)
        return tuple(found)

    def unify(self, left: tuple[int, ...], right: tuple[int, ...]) -> bool:
        """Make both the same; False if their widths do not allow it."""
        while left and right:
            left, right = self.resolve(left), self.resolve(right)
            one, two = left[0], right[0]
            if self.widths[one] == self.widths[two]:
                self._same[max(one, two)] = min(one, two)
                left, right = left[1:], right[1:]
            elif not (self._cut(one, self.widths[two]) or self._cut(two, self.widths[one])):
                return False
        return left == right

    def _cut(self, space: int, widths: Widths) -> bool:
        """Cut off the first *widths* channels, if the space is wider in every task."""
        rest = tuple(mine - cut for mine, cut in zip(self.widths[space], widths, strict=True))
        if min(rest) <= 0:
            return False
        self._halves[space] = self.fresh(widths), self.fresh(rest)
        return True
