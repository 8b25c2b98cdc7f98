"""``Summary``: the sizes and times of a stitched graph, and of other ways to run the models.

Nothing is run here: seconds are predicted for a described machine; callers that measure add theirs (``Summary.timed``).
A *way* is one way to run the models: one after another, stitched, or stitched in a single form. A *space* is a set of
channels that layers pass on in one order (``family``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from weft_stitch.cost import LayerCounts, Modelled, count, encode, kernels_of, stored_bytes
from weft_stitch.family import ChannelSpace, Family, FamilyLayer, Sharing, Wiring, role, wire
from weft_stitch.graph import Graph
from weft_stitch.graph_steps import plain_graph
from weft_stitch.layouts import kernel, pieces
from weft_stitch.net import Array
from weft_stitch.planning.planner import Plan
from weft_stitch.planning.segments import segments

SEQUENTIAL = "sequential"
"""The models one after another, each with its normalisations folded."""
STITCHED = "stitched"
"""The result of the stitching."""
SLABBED = "sequential in slabs"
"""The models one after another, with the plan's layers in slabs: this shows what slabs alone gain."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run all models once, with its sizes and times."""

    name: str
    macs: int
    weight_bytes: int
    table_bytes: int
    """Biases, scales and shifts, masks, indices."""
    activation_bytes: int
    """Peak bytes of live tensors."""
    launches: int
    predicted_s: float
    measured_s: float | None = None
    slabs: bool = False
    """Whether some convolutions are in slabs."""

    @property
    def total_bytes(self) -> int:
        """Weights, tables and activations."""
        return self.weight_bytes + self.table_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer that takes a form, together with the layers after it up to the next such layer."""

    name: str
    form: str
    slabs: bool
    shared_inputs: tuple[int, int]
    """Number of input channels that all models share, and of the widest model."""
    shared_outputs: tuple[int, int]
    """The same for output channels."""
    macs: int
    weight_bytes: int
    separate_weight_bytes: int
    launches: int
    predicted_s: float
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Form -> seconds that the planner found, for each form that can compute the layer."""


@dataclass(frozen=True, slots=True)
class SpaceRow:
    """The channels of one space, each counted once per model that has it."""

    name: str
    inner: bool
    """Whether no input or output of the models carries the space."""
    widths: tuple[int, ...]
    by_all: int
    by_some: int
    own: int


@dataclass(frozen=True, slots=True)
class Kernels:
    """Counts of the numbers in the kernels of all models."""

    separate: int
    """Numbers when each model stores its own."""
    by_all: int
    """Different numbers that all models share."""
    by_some: int
    """Different numbers that several, not all, models share."""
    own: int
    """Different numbers of one model."""

    @property
    def unique(self) -> int:
        return self.by_all + self.by_some + self.own


@dataclass(frozen=True, slots=True, repr=False)
class Summary:
    """The sizes and times of one stitched graph. The field names are the keys of the report."""

    models: tuple[str, ...]
    batches: tuple[int, ...]
    dynamic: bool
    form: str
    """The form of all layers, or ``mixed``."""
    ways: tuple[Way, ...]
    """First the models one after another, then the stitched graph, then the ways it was compared with."""
    impossible: Mapping[str, str]
    """Form -> why it cannot compute some layer."""
    kernels: Kernels
    layers: tuple[LayerRow, ...]
    spaces: tuple[SpaceRow, ...]

    def __repr__(self) -> str:
        return f"Summary({len(self.models)} models, form {self.form}, {len(self.ways)} ways, {len(self.layers)} layers)"

    @property
    def sequential(self) -> Way:
        return self.ways[0]

    @property
    def stitched(self) -> Way:
        return self.ways[1]

    def timed(self, seconds: Mapping[str, float]) -> Summary:
        """The summary with measured *seconds* of ways, by their names."""
        ways = tuple(replace(way, measured_s=seconds.get(way.name, way.measured_s)) for way in self.ways)
        return replace(self, ways=ways)


def graph_way(name: str, graph: Graph, cost: Modelled) -> Way:
    """The sizes and predicted time of *graph*, whose rows must be known."""
    counts, seconds = count(graph, stored=stored_bytes(graph)), sum(cost.by_layer(graph).values())
    return Way(
        name, counts.macs, counts.weight_bytes, counts.table_bytes, counts.activation_bytes, counts.launches, seconds
    )


def sum_ways(name: str, ways: Sequence[Way]) -> Way:
    """The way that runs *ways* one after another; their activations are not alive at the same time."""
    times = [way.measured_s for way in ways if way.measured_s is not None]
    return Way(
        name,
        macs=sum(way.macs for way in ways),
        weight_bytes=sum(way.weight_bytes for way in ways),
        table_bytes=sum(way.table_bytes for way in ways),
        activation_bytes=max(way.activation_bytes for way in ways),
        launches=sum(way.launches for way in ways),
        predicted_s=sum(way.predicted_s for way in ways),
        measured_s=sum(times) if len(times) == len(ways) else None,
    )


def layer_rows(
    family: Family, sharing: Sharing, graph: Graph, forms: Mapping[str, str], plan: Plan | None, cost: Modelled
) -> tuple[LayerRow, ...]:
    """A row for every layer that takes a form, in order; the rows of *graph*, the stitched one, must be known."""
    wiring, counts, times = wire(family), count(graph, stored=stored_bytes(graph)).layers, cost.by_layer(graph)
    seconds_by_form = {choice.layer: choice.seconds for choice in plan.table} if plan else {}
    slabs = plan.slabs if plan else frozenset()
    rows = []
    for segment in segments(family):
        if segment.formed is None:
            continue
        names = [layer.name for layer in segment.layers]
        total = _total(counts.get(name, LayerCounts()) for name in names)
        rows.append(
            LayerRow(
                name=segment.name,
                form=forms[segment.formed.name],
                slabs=segment.name in slabs,
                shared_inputs=_shared_width(segment.formed.inputs[0], wiring, sharing),
                shared_outputs=_shared_width(segment.formed.output, wiring, sharing),
                macs=total.macs,
                weight_bytes=total.weight_bytes,
                separate_weight_bytes=sum(_kernel_bytes(segment.formed, task) for task in range(family.tasks)),
                launches=total.launches,
                predicted_s=sum(times.get(name, 0.0) for name in names),
                seconds=seconds_by_form.get(segment.name, {}),
            )
        )
    return tuple(rows)


def _kernel_bytes(layer: FamilyLayer, task: int) -> int:
    """Bytes of the kernel of one task's own file, as codes if it is tuned."""
    codes = encode(kernel(layer, task)) if layer.ops[task].tuned else None
    return kernel(layer, task).nbytes if codes is None else codes.nbytes


def _total(counts: Iterable[LayerCounts]) -> LayerCounts:
    rows = [(layer.macs, layer.weight_bytes, layer.launches) for layer in counts]
    return LayerCounts(*map(sum, zip(*rows, strict=True)))


def _shared_width(value: str, wiring: Wiring, sharing: Sharing) -> tuple[int, int]:
    """Number of channels of *value* that all models share, and of the widest model."""
    spaces = [sharing[space] for space in wiring.carries[value]]
    return sum(space.shared_width for space in spaces), sum(max(space.widths) for space in spaces)


def space_rows(family: Family, sharing: Sharing) -> tuple[SpaceRow, ...]:
    """A row for every space."""
    carries = wire(family).carries
    port_spaces = {space for value in (*family.inputs, *family.outputs) for space in carries[value]}
    return tuple(_space_row(name, name not in port_spaces, space) for name, space in sharing.spaces.items())


def _space_row(name: str, inner: bool, space: ChannelSpace) -> SpaceRow:
    """The row of one space; channels count once for every model that has them."""
    tasks = len(space.widths)
    by_all = tasks * space.shared_width if tasks > 1 else 0
    by_some = sum(len(block.tasks) * block.width for block in space.blocks if 1 < len(block.tasks) < tasks)
    return SpaceRow(name, inner, space.widths, by_all, by_some, sum(space.widths) - by_all - by_some)


def count_kernels(family: Family, sharing: Sharing) -> Kernels:
    """Count the numbers in kernels, by how many models have each of them."""
    wiring = wire(family)
    shared_counts = [0, 0, 0]  # by ``_share_index``
    separate_count = 0
    separate_arrays: list[_OwnedArray] = []
    for layer in family.layers:
        if layer.op.kind != "conv" or role(layer) == "separate":
            continue
        separate_count += sum(kernel(layer, task).size for task in range(family.tasks))
        layer_pieces = pieces(layer, wiring, sharing)
        for tasks, size in _merge_equal([_OwnedArray(piece.tasks, piece.array) for piece in layer_pieces]):
            shared_counts[_share_index(len(tasks), family.tasks)] += size
    for task in range(family.tasks):
        separate_arrays += (_OwnedArray(frozenset({task}), array) for array in _kernels_alone(family, task))
    for tasks, size in _merge_equal(separate_arrays):
        separate_count += len(tasks) * size
        shared_counts[_share_index(len(tasks), family.tasks)] += size
    return Kernels(separate_count, *shared_counts)


class _OwnedArray(NamedTuple):
    """An array of weights, and the models that have it."""

    tasks: frozenset[int]
    array: Array


def _merge_equal(owned: Sequence[_OwnedArray]) -> Iterable[tuple[frozenset[int], int]]:
    """Join equal arrays, whether or not their channels are shared; yield the models that have each, and its size."""
    by_content: dict[object, _OwnedArray] = {}
    for entry in owned:
        key = (entry.array.shape, blake2b(np.ascontiguousarray(entry.array).tobytes()).digest())
        known = by_content.get(key, entry)
        by_content[key] = _OwnedArray(known.tasks | entry.tasks, entry.array)
    return ((entry.tasks, entry.array.size) for entry in by_content.values())


def _kernels_alone(family: Family, task: int) -> list[Array]:
    """Kernels of the operations that *task* runs alone, islands included."""
    ops = [layer.ops[task] for layer in family.layers if role(layer) == "separate"]
    ops += family.tails[task] if family.tails else ()
    weights = [op.weight for op in ops if op.weight is not None]
    islands = [op.name for op in ops if op.kind == "island"]
    graph = plain_graph(family.nets[task]) if islands else None
    return weights + [array for name in islands if graph for array in kernels_of(graph, name)]


def _share_index(tasks: int, of: int) -> int:
    """The index into the counts of weights by sharing, for *tasks* out of *of* models: 0 for all, 1 several, 2 one."""
    return 2 if tasks == 1 else int(tasks < of)


def form_name(forms: Mapping[str, str]) -> str:
    """The form of all layers, or ``mixed`` if they have different ones."""
    names: Sequence[str] = sorted(set(forms.values()))
    return names[0] if len(names) == 1 else "mixed"
