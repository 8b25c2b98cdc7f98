"""Cuts a family where forms may change, into segments (``FormSegment``) that the planner costs one by one (``Cutter``).

A segment is a layer that takes a form and the layers after it up to the next such layer (normalisations, activations,
pools, sums), which work in the layout that the form leaves. ``Cutter.piece`` lowers one segment with its inputs in
chosen layouts; ``Cutter.conversion`` is the graph that converts a value from one layout to another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft_stitch.family import Family, FamilyLayer, Sharing, wire
from weft_stitch.forms import FORMS
from weft_stitch.forms.room import PlacedValue, Room
from weft_stitch.forms.whole import fused_layout
from weft_stitch.graph import DYNAMIC, Builder, Graph
from weft_stitch.layouts import APART, COMPACT, STACKED, STITCHED, Layout, tidy
from weft_stitch.lowering import formed_layers, lower_layers

READS = {"mts": STITCHED, "grouped": STACKED, "split": COMPACT, "half": COMPACT, "separate": APART}
"""Form -> the layout in which it reads its input without conversion; that of ``fused`` depends on the value."""
_NO_SEGMENT = -1
"""Stands for the segment of a value that is an input of the models. It must be below all segments' numbers."""


@dataclass(frozen=True, eq=False)
class FormSegment:
    """Layers that take one form together."""

    layers: tuple[FamilyLayer, ...]
    formed: FamilyLayer | None
    """The layer with weights; None for a segment of layers that depend on no convolution."""
    inputs: tuple[str, ...]
    """Values that the segment reads from outside."""
    outputs: tuple[str, ...]
    """Values that are read outside the segment."""

    @property
    def name(self) -> str:
        return self.layers[0].name


class SegmentForm(NamedTuple):
    """The graph of one segment in one form."""

    graph: Graph
    reads: Mapping[str, Layout]
    """Input value -> its layout."""
    writes: Mapping[str, Layout]
    """Output value -> its layout."""


def segments(family: Family) -> tuple[FormSegment, ...]:
    """Group the layers of *family* into segments.

    A layer that takes no form belongs to the segment of its latest input. Layers that depend on no convolution are
    together in one segment.
    """
    formed_names = {layer.name for layer in formed_layers(family)}
    groups: list[list[FamilyLayer]] = []
    segment_of = {value: _NO_SEGMENT for value in family.inputs}
    unformed: int | None = None  # the segment of the layers that depend on no convolution, once there is one
    for layer in family.layers:
        number = max(segment_of[value] for value in layer.inputs)
        if layer.name in formed_names or (number == _NO_SEGMENT and unformed is None):
            groups.append([])
            number = len(groups) - 1
            if layer.name not in formed_names:
                unformed = number
        elif number == _NO_SEGMENT and unformed is not None:
            number = unformed
        groups[number].append(layer)
        segment_of[layer.output] = number
    return tuple(_segment(family, group, formed_names) for group in groups)


def _segment(family: Family, group: Sequence[FamilyLayer], formed_names: Iterable[str]) -> FormSegment:
    """The segment of the layers *group*, with its inputs and outputs."""
    written = {layer.output for layer in group}
    own_layers = {id(layer) for layer in group}
    inputs = dict.fromkeys(value for layer in group for value in layer.inputs if value not in written)
    read_elsewhere = {value for layer in family.layers if id(layer) not in own_layers for value in layer.inputs}
    read_elsewhere |= {*family.outputs, *(value for bridge in family.bridges for value in bridge.values())}
    outputs = tuple(layer.output for layer in group if layer.output in read_elsewhere)
    formed = group[0] if group[0].name in formed_names else None
    return FormSegment(tuple(group), formed, tuple(inputs), outputs)


class Cutter:
    """Makes graphs of single segments and of layout conversions, so that they can be costed one by one."""

    def __init__(
        self, family: Family, sharing: Sharing, batches: Sequence[int], *, dynamic: bool = False, align: int = 1
    ) -> None:
        self._family, self._sharing, self._batches = family, tidy(sharing), tuple(batches)
        self._wiring, self._align = wire(family), align
        # forms are checked with the rows of the final graph, though segments are costed with known numbers of rows
        self._refusal_batches = (DYNAMIC,) * family.tasks if dynamic else self._batches

    def refusal(self, layer: FamilyLayer, form: str) -> str:
        """Why *form* cannot compute *layer*; empty if it can."""
        room = Room(Builder(""), self._family, self._wiring, self._sharing, self._refusal_batches, self._align)
        return FORMS[form].refusal(room, layer)

    def piece(self, segment: FormSegment, form: str) -> SegmentForm:
        """The graph of *segment* in *form*, each input in the layout that suits it best."""
        reads = {value: self._preferred_layout(segment, form, value) for value in segment.inputs}
        lowered = self._lower(segment, form, reads)
        # inputs of later layers, such as a residual, are best read in the layout that the form leaves
        later_inputs = set(segment.inputs) - set(segment.layers[0].inputs)
        output_layout = next(iter(lowered.writes.values()), None)
        if output_layout is not None and any(reads[value] != output_layout for value in later_inputs):
            lowered = self._lower(segment, form, reads | dict.fromkeys(later_inputs, output_layout))
        return lowered

    def _preferred_layout(self, segment: FormSegment, form: str, value: str) -> Layout:
        """The layout in which *segment* reads *value* if it takes *form*."""
        if segment.formed is None:
            return APART
        if form == "fused":
            room = self._room(Builder(""), self._family)
            return COMPACT if segment.formed.op.depthwise else fused_layout(room, room.channels(value))
        return READS[form]

    def conversion(self, value: str, source: Layout, target: Layout) -> Graph:
        """The graph that converts *value* from one layout to another."""
        builder = Builder(f"{value}: {source.name} to {target.name}")
        room = self._room(builder, self._family)
        self._add_input(room, value, source)
        self._add_output(room, value, target)
        return builder.finish()

    def _lower(self, segment: FormSegment, form: str, reads: Mapping[str, Layout]) -> SegmentForm:
        """The graph of *segment* in *form*, with its inputs in the layouts *reads*."""
        builder = Builder(f"{segment.name} in {form}")
        family = self._family
        outputs = dict.fromkeys(segment.outputs, ())  # they are no ports of the models
        segment_family = Family(family.nets, segment.layers, family.values, segment.inputs, outputs)
        room = self._room(builder, segment_family)
        for value in segment.inputs:
            self._add_input(room, value, reads[value])
        lower_layers(room, form)
        writes = {value: room.layout(value) for value in segment.outputs}
        for value, layout in writes.items():
            self._add_output(room, value, layout)
        return SegmentForm(builder.finish(), reads, writes)

    def _room(self, builder: Builder, family: Family) -> Room:
        return Room(builder, family, self._wiring, self._sharing, self._batches, self._align)

    def _add_input(self, room: Room, value: str, layout: Layout) -> None:
        """Add *value* as an input of the graph, in *layout*."""
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

    def _add_output(self, room: Room, value: str, layout: Layout) -> None:
        """Make *value*, in *layout*, an output of the graph."""
        for number, tensor in enumerate(room.get(value, layout).tensors):
            room.builder.output(tensor, f"{value}.{layout.name}.{number}")
