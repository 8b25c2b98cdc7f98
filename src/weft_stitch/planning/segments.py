"""A family cut where forms may change: ``FormSegment``, and the graph of one alone, for the planner to cost.

A segment is a layer that takes a form and what follows it up to the next (normalisations, activations, pools, sums),
which works in the layout that the form leaves. ``piece`` lowers one with its inputs given in chosen layouts, and
``conversion`` is the graph that takes a value from one layout to another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft_stitch.family import Family, FamilyLayer, Sharing, wire
from weft_stitch.forms import FORMS
from weft_stitch.forms.room import PlacedValue, Room
from weft_stitch.forms.whole import layout as fused_layout
from weft_stitch.graph import DYNAMIC, Builder, Graph
from weft_stitch.layouts import APART, COMPACT, STACKED, STITCHED, Layout, tidy
from weft_stitch.lowering import formed_layers, lower_layers

READS = {"mts": STITCHED, "grouped": STACKED, "split": COMPACT, "half": COMPACT, "separate": APART}
"""The layout in which a form finds its input at once; that of ``fused`` depends on the value."""


@dataclass(frozen=True, eq=False)
class FormSegment:
    """Layers that take one form together."""

    layers: tuple[FamilyLayer, ...]
    formed: FamilyLayer | None
    """The layer with weights; None for a segment before the first one."""
    inputs: tuple[str, ...]
    """Values that it reads from outside."""
    outputs: tuple[str, ...]
    """Values that others read."""

    @property
    def name(self) -> str:
        return self.layers[0].name


class SegmentForm(NamedTuple):
    """A segment alone in one form."""

    graph: Graph
    reads: Mapping[str, Layout]
    """The layout of each input."""
    writes: Mapping[str, Layout]


def segments(family: Family) -> tuple[FormSegment, ...]:
    """All layers of *family*, in their order; a layer without a form goes with the last of its inputs to be made."""
    forming = {layer.name for layer in formed_layers(family)}
    groups: list[list[FamilyLayer]] = []
    home = {value: -1 for value in family.inputs}
    free: dict[int, int] = {}
    for layer in family.layers:
        last = max(home[value] for value in layer.inputs)
        if layer.name in forming or (last < 0 and last not in free):
            groups.append([])
            last = len(groups) - 1
            if layer.name not in forming:
                free[-1] = last
        elif last < 0:
            last = free[last]
        groups[last].append(layer)
        home[layer.output] = last
    return tuple(_segment(family, group, forming) for group in groups)


def _segment(family: Family, group: Sequence[FamilyLayer], forming: Iterable[str]) -> FormSegment:
    written = {layer.output for layer in group}
    inside = {id(layer) for layer in group}
    inputs = dict.fromkeys(value for layer in group for value in layer.inputs if value not in written)
    outside = {value for layer in family.layers if id(layer) not in inside for value in layer.inputs}
    outside |= {*family.outputs, *(value for bridge in family.bridges for value in bridge.values())}
    outputs = tuple(value for value in made_in_order(group) if value in outside)
    first = group[0] if group[0].name in forming else None
    return FormSegment(tuple(group), first, tuple(inputs), outputs)


def made_in_order(group: Iterable[FamilyLayer]) -> list[str]:
    return [layer.output for layer in group]


class Cutter:
    """Makes the pieces of one family."""

    def __init__(
        self, family: Family, sharing: Sharing, batches: Sequence[int], *, dynamic: bool = False, align: int = 1
    ) -> None:
        self._family, self._sharing, self._batches = family, tidy(sharing), tuple(batches)
        self._wiring, self._align = wire(family), align
        self._asked = (DYNAMIC,) * family.tasks if dynamic else self._batches

    def refusal(self, layer: FamilyLayer, form: str) -> str:
        """Why *form* cannot do *layer*; empty if it can."""
        room = Room(Builder(""), self._family, self._wiring, self._sharing, self._asked, self._align)
        return FORMS[form].refusal(room, layer)

    def piece(self, segment: FormSegment, form: str) -> SegmentForm:
        """*segment* in *form*, its inputs in the layouts that suit it best."""
        reads = {value: self._home(segment, form, value) for value in segment.inputs}
        lowered = self._lower(segment, form, reads)
        others = set(segment.inputs) - set(segment.layers[0].inputs)
        left = next(iter(lowered.writes.values()), None)
        if left is not None and any(reads[value] != left for value in others):
            lowered = self._lower(segment, form, reads | dict.fromkeys(others, left))
        return lowered

    def _home(self, segment: FormSegment, form: str, value: str) -> Layout:
        if segment.formed is None:
            return APART
        if form == "fused":
            room = self._room(Builder(""), self._family)
            return COMPACT if segment.formed.op.depthwise else fused_layout(room, room.channels(value))
        return READS[form]

    def conversion(self, value: str, source: Layout, target: Layout) -> Graph:
        """*value* from one layout into another."""
        builder = Builder(f"{value}: {source.name} to {target.name}")
        room = self._room(builder, self._family)
        self._enter(room, value, source)
        self._leave(room, value, target)
        return builder.finish()

    def _lower(self, segment: FormSegment, form: str, reads: Mapping[str, Layout]) -> SegmentForm:
        builder = Builder(f"{segment.name} in {form}")
        family = self._family
        alone = Family(family.nets, segment.layers, family.values, segment.inputs, dict.fromkeys(segment.outputs, ()))
        room = self._room(builder, alone)
        for value in segment.inputs:
            self._enter(room, value, reads[value])
        lower_layers(room, form)
        writes = {value: room.layout(value) for value in segment.outputs}
        for value, layout in writes.items():
            self._leave(room, value, layout)
        return SegmentForm(builder.finish(), reads, writes)

    def _room(self, builder: Builder, family: Family) -> Room:
        return Room(builder, family, self._wiring, self._sharing, self._batches, self._align)

    def _enter(self, room: Room, value: str, layout: Layout) -> None:
        """An input of the graph for *value*, as it would lie if it had been computed."""
        channels, size = room.channels(value), self._family.values[value][0]
        picture = (size.height, size.width)
        if layout == APART:
            shapes = [(rows, width, *picture) for rows, width in zip(self._batches, channels.widths, strict=True)]
        elif layout == STACKED:
            shapes = [(self._batches[0], channels.width(layout), *picture)]
        else:
            shapes = [(sum(self._batches), channels.width(layout), *picture)]
        tensors = tuple(room.builder.input(f"{value}.{number}", shape) for number, shape in enumerate(shapes))
        room.put(value, PlacedValue(layout, tensors))

    def _leave(self, room: Room, value: str, layout: Layout) -> None:
        for number, tensor in enumerate(room.get(value, layout).tensors):
            room.builder.output(tensor, f"{value}.{layout.name}.{number}")
