"""Predicted time of a graph on a described machine: ``Machine`` with presets, ``Modelled`` as a ``GraphCost``.

A product of matrices is cut into tiles that the machine's units work on, a wave of tiles at a time; a convolution is a
product of its kernels with the unfolded picture, for each picture and group by itself or for all pictures at once. All
else moves bytes. Every step that is no view is launched once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import NamedTuple, Protocol

from weft.base.errors import StitchError, unknown_name
from weft_stitch.counts import ITEM_BYTES, PRODUCTS, VIEWS, depth
from weft_stitch.graph import DYNAMIC, Graph, GraphStep

Shape = tuple[int, ...]


class GraphCost(Protocol):
    """The cost of graphs: predicted for a described machine, or timed on this one."""

    def seconds(self, graphs: Sequence[Graph]) -> list[float]:
        """Seconds of one run of each of *graphs*, comparable with each other."""
        ...


@dataclass(frozen=True, slots=True)
class Machine:
    """A described machine."""

    name: str
    launch_s: float
    """Launch overhead of one step."""
    units: int
    """Tiles worked on at once."""
    unit_macs_per_s: float
    """Multiplications and additions, of one unit."""
    tile: tuple[int, int, int]
    """Output channels, positions and depth of a tile: sizes are rounded up to these."""
    bytes_per_s: float
    unfold_s: float = 0.0
    """Seconds to copy one pixel for one tap of a kernel, where pictures are unfolded (im2col)."""
    strided_unfold_s: float = 0.0
    """The same with a stride along the width, where the columns read are not neighbours."""
    joins_rows: bool = True
    """Whether the pictures of a batch share tiles."""


CPU = Machine("cpu", 5e-6, 1, 18e9, (4, 16, 1), 25e9, 0.64e-9, 1.15e-9, joins_rows=False)
"""One core of a Neoverse-N1 under onnxruntime 1.31, whose convolutions unfold each picture by itself."""
H200 = Machine("h200", 5e-6, 132, 0.9e12, (64, 64, 32), 4e12)
"""Kernels of cuDNN in one CUDA graph, TF32."""
MACHINES: Mapping[str, Machine] = MappingProxyType({preset.name: preset for preset in (CPU, H200)})


def machine(name: str) -> Machine:
    """A preset by its name."""
    if name not in MACHINES:
        raise StitchError(unknown_name("machine", name, MACHINES))
    return MACHINES[name]


@dataclass(frozen=True, slots=True)
class Modelled:
    """The cost of graphs on a described machine."""

    machine: Machine = CPU
    rows: int = 1
    """The size assumed for a dimension that is known only at run time."""

    def seconds(self, graphs: Sequence[Graph]) -> list[float]:
        return [sum(self.by_layer(graph).values()) for graph in graphs]

    def by_layer(self, graph: Graph) -> dict[str, float]:
        """Seconds by the name of the source layer ('' is what belongs to none)."""
        seconds: dict[str, float] = {}
        for step in graph.steps:
            seconds[step.layer] = seconds.get(step.layer, 0.0) + self.step(step, graph)
        return seconds

    def step(self, step: GraphStep, graph: Graph) -> float:
        """Seconds of one step of *graph*."""
        if step.op in VIEWS:
            return 0.0
        moved_s = self._bytes(step, graph) / self.machine.bytes_per_s
        if step.op == "Conv":
            shapes = (self._shape(graph, name) for name in (*step.inputs[:2], step.outputs[0]))
            return self.machine.launch_s + self._product(_Product.of_conv(step, *shapes), moved_s)
        if step.op in PRODUCTS:
            return self.machine.launch_s + self._product(self._of_matrices(step, graph), moved_s)
        return self.machine.launch_s + moved_s

    def _product(self, work: _Product, moved_s: float) -> float:
        machine = self.machine
        pictures, positions = (
            (1, work.pictures * work.positions) if machine.joins_rows else (work.pictures, work.positions)
        )
        high, wide, deep = machine.tile
        # a single output channel is a product of a vector, which nothing rounds up
        tall = 1 if work.outs == 1 else -(-work.outs // high) * high
        tiles = pictures * work.groups * -(-work.outs // high) * -(-positions // wide)
        macs = tall * wide * -(-work.depth // deep) * deep / max(1, -(-work.outs // high))
        waves = -(-tiles // machine.units)
        unfolded = work.pictures * work.groups * work.depth * work.positions if work.unfolds else 0
        each_s = machine.strided_unfold_s if work.strided else machine.unfold_s
        return max(waves * macs / machine.unit_macs_per_s + unfolded * each_s, moved_s)

    def _of_matrices(self, step: GraphStep, graph: Graph) -> _Product:
        output = self._shape(graph, step.outputs[0]) or (1,)
        positions = prod(output[2:]) if step.op == "FusedConv" else prod(output[:-1])
        outs = output[1] if step.op == "FusedConv" else output[-1]
        if "macs" in step.attributes:
            pictures = output[0]
            return _Product(outs, int(step.attributes["macs"]) // max(1, prod(output)), positions, pictures)
        return _Product(outs, depth(self._shape(graph, step.inputs[0]), step), positions)

    def _bytes(self, step: GraphStep, graph: Graph) -> int:
        names = [name for name in (*step.inputs, *step.outputs) if name]
        return ITEM_BYTES * sum(prod(self._shape(graph, name)) for name in names)

    def _shape(self, graph: Graph, name: str) -> tuple[int, ...]:
        shape = graph.constants[name].shape if name in graph.constants else graph.shapes[name]
        return tuple(self.rows if size == DYNAMIC else size for size in shape)


class _Product(NamedTuple):
    """A product of matrices [outs, depth] x [depth, positions], for each picture and group."""

    outs: int
    depth: int
    positions: int
    pictures: int = 1
    groups: int = 1
    unfolds: bool = False
    strided: bool = False

    @staticmethod
    def of_conv(step: GraphStep, source: Shape, weight: Shape, output: Shape) -> _Product:
        """A convolution over any number of dimensions; a shape that an island does not know counts as ones."""
        pictures, outs = (source or (1,))[0], (weight or (1,))[0]
        groups = int(step.attributes.get("group", 1))
        strides = tuple(step.attributes.get("strides", ())) or (1,)
        unfolds = any(size != 1 for size in (*weight[2:], *strides))
        return _Product(
            outs // groups, prod(weight[1:]), prod(output[2:]), pictures, groups, unfolds, strided=strides[-1] > 1
        )
