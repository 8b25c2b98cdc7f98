"""Numbers of a stitched graph: ``Summary``, with every way to run the models side by side.

Nothing is run here: seconds are predicted for a described machine; callers that measure add theirs (``Summary.timed``).
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
"""What was made."""
SLABBED = "sequential in slabs"
"""The models one after another, those convolutions in slabs that are so in the plan: what is due to slabs alone."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run all the models once."""

    name: str
    macs: int
    weight_bytes: int
    table_bytes: int
    """Biases, scales and shifts, masks, indices."""
    activation_bytes: int
    """The most that is alive at a time."""
    launches: int
    predicted_s: float
    measured_s: float | None = None
    slabs: bool = False
    """Whether some convolutions are in slabs."""

    @property
    def total_bytes(self) -> int:
        """All that it needs."""
        return self.weight_bytes + self.table_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer that takes a form, with what follows it up to the next."""

    name: str
    form: str
    slabs: bool
    shared_inputs: tuple[int, int]
    """Channels that all models share, and channels of the widest."""
    shared_outputs: tuple[int, int]
    macs: int
    weight_bytes: int
    separate_weight_bytes: int
    launches: int
    predicted_s: float
    seconds: Mapping[str, float] = field(default_factory=dict)
    """What the planner found for each form that can do it."""


@dataclass(frozen=True, slots=True)
class SpaceRow:
    """The channels of one space, counted once for every model that has them."""

    name: str
    inner: bool
    """Whether it is neither what goes in nor what comes out."""
    widths: tuple[int, ...]
    by_all: int
    by_some: int
    own: int


@dataclass(frozen=True, slots=True)
class Kernels:
    """Numbers in the kernels of all models."""

    separate: int
    """How many there are when each model has its own."""
    by_all: int
    """How many of the different ones all models have."""
    by_some: int
    own: int

    @property
    def unique(self) -> int:
        return self.by_all + self.by_some + self.own


@dataclass(frozen=True, slots=True, repr=False)
class Summary:
    """The numbers of one stitched graph. The field names are the keys of the report."""

    models: tuple[str, ...]
    batches: tuple[int, ...]
    dynamic: bool
    form: str
    """The one used throughout, or ``mixed``."""
    ways: tuple[Way, ...]
    """One after another first, then what was made, then what it was compared with."""
    impossible: Mapping[str, str]
    """Forms that cannot do it, and why."""
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
        """The summary with the measured times of some ways, by their names."""
        ways = tuple(replace(way, measured_s=seconds.get(way.name, way.measured_s)) for way in self.ways)
        return replace(self, ways=ways)


def graph_way(name: str, graph: Graph, cost: Modelled) -> Way:
    """A graph whose rows are known."""
    counts, seconds = count(graph, stored=stored_bytes(graph)), sum(cost.by_layer(graph).values())
    return Way(
        name,
        counts.macs,
        counts.weight_bytes,
        counts.table_bytes,
        counts.activation_bytes,
        counts.launches,
        seconds,
    )


def sum_ways(name: str, ways: Sequence[Way]) -> Way:
    """Several ways one after another; only one has activations at a time."""
    times = [part.measured_s for part in ways if part.measured_s is not None]
    return Way(
        name,
        sum(part.macs for part in ways),
        sum(part.weight_bytes for part in ways),
        sum(part.table_bytes for part in ways),
        max(part.activation_bytes for part in ways),
        sum(part.launches for part in ways),
        sum(part.predicted_s for part in ways),
        sum(times) if len(times) == len(ways) else None,
    )


def layer_rows(
    family: Family,
    sharing: Sharing,
    graph: Graph,
    forms: Mapping[str, str],
    plan: Plan | None,
    cost: Modelled,
) -> tuple[LayerRow, ...]:
    """Every layer with a form, in order; *graph* is the stitched one with known rows."""
    wiring, counts, times = wire(family), count(graph, stored=stored_bytes(graph)).layers, cost.by_layer(graph)
    tried = {choice.layer: choice.seconds for choice in plan.table} if plan else {}
    slabs = plan.slabs if plan else frozenset()
    rows = []
    for segment in segments(family):
        if segment.formed is None:
            continue
        mine = [layer.name for layer in segment.layers]
        whole = _total(counts.get(name, LayerCounts()) for name in mine)
        rows.append(
            LayerRow(
                segment.name,
                forms[segment.formed.name],
                segment.name in slabs,
                _shared_width(segment.formed.inputs[0], wiring, sharing),
                _shared_width(segment.formed.output, wiring, sharing),
                whole.macs,
                whole.weight_bytes,
                sum(_kernel_bytes(segment.formed, task) for task in range(family.tasks)),
                whole.launches,
                sum(times.get(name, 0.0) for name in mine),
                tried.get(segment.name, {}),
            )
        )
    return tuple(rows)


def _kernel_bytes(layer: FamilyLayer, task: int) -> int:
    codes = encode(kernel(layer, task)) if layer.ops[task].tuned else None
    return kernel(layer, task).nbytes if codes is None else codes.nbytes


def _total(counts: Iterable[LayerCounts]) -> LayerCounts:
    rows = [(layer.macs, layer.weight_bytes, layer.launches) for layer in counts]
    return LayerCounts(*map(sum, zip(*rows, strict=True)))


def _shared_width(value: str, wiring: Wiring, sharing: Sharing) -> tuple[int, int]:
    spaces = [sharing[space] for space in wiring.carries[value]]
    return sum(space.shared_width for space in spaces), sum(max(space.widths) for space in spaces)


def space_rows(family: Family, sharing: Sharing) -> tuple[SpaceRow, ...]:
    carries = wire(family).carries
    ends = {space for value in (*family.inputs, *family.outputs) for space in carries[value]}
    return tuple(_space_row(name, name not in ends, space) for name, space in sharing.spaces.items())


def _space_row(name: str, inner: bool, space: ChannelSpace) -> SpaceRow:
    tasks = len(space.widths)
    by_all = tasks * space.shared_width if tasks > 1 else 0
    by_some = sum(len(block.tasks) * block.width for block in space.blocks if 1 < len(block.tasks) < tasks)
    return SpaceRow(name, inner, space.widths, by_all, by_some, sum(space.widths) - by_all - by_some)


def count_kernels(family: Family, sharing: Sharing) -> Kernels:
    """How many numbers there are in kernels, and how many models have each of them."""
    wiring = wire(family)
    shares = [0, 0, 0]
    separate = 0
    alone: list[_Owned] = []
    for layer in family.layers:
        if layer.op.kind != "conv" or role(layer) == "separate":
            continue
        separate += sum(kernel(layer, task).size for task in range(family.tasks))
        layer_pieces = pieces(layer, wiring, sharing)
        for tasks, size in _different([_Owned(piece.tasks, piece.array) for piece in layer_pieces]):
            shares[_degree(len(tasks), family.tasks)] += size
    for task in range(family.tasks):
        alone += (_Owned(frozenset({task}), array) for array in _run_alone(family, task))
    for tasks, size in _different(alone):
        separate += len(tasks) * size
        shares[_degree(len(tasks), family.tasks)] += size
    return Kernels(separate, *shares)


class _Owned(NamedTuple):
    """Numbers, and the models that have them."""

    tasks: frozenset[int]
    array: Array


def _different(owned: Sequence[_Owned]) -> Iterable[tuple[frozenset[int], int]]:
    """Equal arrays are one, which more models have: they are stored once, whether or not their channels are shared."""
    having: dict[object, _Owned] = {}
    for entry in owned:
        key = (entry.array.shape, blake2b(np.ascontiguousarray(entry.array).tobytes()).digest())
        before = having.get(key, entry)
        having[key] = _Owned(before.tasks | entry.tasks, entry.array)
    return ((entry.tasks, entry.array.size) for entry in having.values())


def _run_alone(family: Family, task: int) -> list[Array]:
    """Kernels of what runs model by model, islands included."""
    mine = [layer.ops[task] for layer in family.layers if role(layer) == "separate"]
    mine += family.tails[task] if family.tails else ()
    weights = [op.weight for op in mine if op.weight is not None]
    islands = [op.name for op in mine if op.kind == "island"]
    graph = plain_graph(family.nets[task]) if islands else None
    return weights + [array for name in islands if graph for array in kernels_of(graph, name)]


def _degree(tasks: int, of: int) -> int:
    """All, some or one."""
    return 2 if tasks == 1 else int(tasks < of)


def form_name(forms: Mapping[str, str]) -> str:
    """What to call a choice of forms."""
    names: Sequence[str] = sorted(set(forms.values()))
    return names[0] if len(names) == 1 else "mixed"
