"""The cost of a graph: counted, and as time on a described machine.

``count`` gives multiplications, bytes and launches; ``encode`` packs tuned weights. ``Machine`` has presets,
``Modelled`` is a ``GraphCost``: a product of matrices is cut into tiles, and the machine's units compute a wave of them
at a time. A convolution is a product of its kernels with the unfolded picture (im2col), for each picture and group or
for all pictures at once. All other steps move bytes. Every step that is no view is launched once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from weft.base.errors import StitchError, unknown_name
from weft_stitch.graph import DYNAMIC, Graph, GraphStep
from weft_stitch.net import Array
from weft_stitch.slabs import sums_slabs

VIEWS = frozenset(("Reshape", "Flatten", "Identity", "Squeeze", "Unsqueeze", "Shape"))
"""Operators that move no data."""
PRODUCTS = frozenset(("Conv", "Gemm", "MatMul", "FusedConv"))
"""Operators that multiply by a kernel, their second input."""
KERNELS = PRODUCTS | {"ConvTranspose"}
"""Operators whose second input is stored as weights.

ConvTranspose only occurs in islands, whose work is not counted.
"""
ITEM_BYTES = 4
"""Bytes of a number: graphs compute in float32."""
_NOTHING: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class LayerCounts:
    """The cost of one source layer."""

    macs: int = 0
    weight_bytes: int = 0
    launches: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """The cost of a whole graph."""

    macs: int
    weight_bytes: int
    """Kernels, each stored once."""
    table_bytes: int
    """All constants except kernels: biases, scales and shifts, masks and indices."""
    activation_bytes: int
    """Peak bytes of live tensors, inputs and outputs included; views take none."""
    launches: int
    """Number of steps that are not views; a runtime may fuse some of them."""
    layers: Mapping[str, LayerCounts]
    """Source layer -> its cost; '' for steps of no layer."""


def count(graph: Graph, *, rows: int = 1, stored: Mapping[str, int] = _NOTHING) -> Counts:
    """Count multiplications, bytes and launches of *graph*.

    *rows*: used for sizes that are only known at run time. *stored*: kernel -> its bytes in the file, for kernels whose
    file size differs from their array's.
    """
    kernels = kernel_names(graph)
    total = sum(array.nbytes for array in graph.constants.values())
    table_bytes = total - sum(graph.constants[name].nbytes for name in kernels)
    layers = _count_layers(graph, rows, stored)
    return Counts(
        macs=sum(layer.macs for layer in layers.values()),
        weight_bytes=sum(stored.get(name, graph.constants[name].nbytes) for name in kernels),
        table_bytes=table_bytes,
        activation_bytes=_peak_bytes(graph, rows),
        launches=sum(layer.launches for layer in layers.values()),
        layers=layers,
    )


def kernel_names(graph: Graph) -> set[str]:
    """Names of the constants that are kernels."""
    return {step.inputs[1] for step in graph.steps if _has_kernel(graph, step)}


def kernels_of(graph: Graph, layer: str) -> list[Array]:
    """The kernels in the steps of one source layer."""
    return [graph.constants[step.inputs[1]] for step in graph.steps if step.layer == layer and _has_kernel(graph, step)]


def _has_kernel(graph: Graph, step: GraphStep) -> bool:
    """Whether a step multiplies by weights; the convolution that sums slabs has a table of scales instead."""
    return step.op in KERNELS and step.inputs[1] in graph.constants and not sums_slabs(step)


def _count_layers(graph: Graph, rows: int, stored: Mapping[str, int]) -> dict[str, LayerCounts]:
    """The cost of each source layer; a kernel is counted at its first reader."""
    layers: dict[str, LayerCounts] = {}
    counted: set[str] = set()
    for step in graph.steps:
        before = layers.get(step.layer, LayerCounts())
        weight_bytes = 0
        if _has_kernel(graph, step) and step.inputs[1] not in counted:
            counted.add(step.inputs[1])
            weight_bytes = stored.get(step.inputs[1], graph.constants[step.inputs[1]].nbytes)
        layers[step.layer] = LayerCounts(
            before.macs + _macs(graph, step, rows),
            before.weight_bytes + weight_bytes,
            before.launches + (step.op not in VIEWS),
        )
    return layers


def _macs(graph: Graph, step: GraphStep, rows: int) -> int:
    """Multiplications of a step; a fused convolution states them in its attribute ``macs``."""
    if step.op not in PRODUCTS:
        return 0
    if "macs" in step.attributes:
        return int(step.attributes["macs"])
    outputs = prod(_sizes(graph, step.outputs[0], rows))
    if step.op == "Conv":
        return outputs * prod(_shape(graph, step.inputs[1])[1:])
    return outputs * product_depth(_sizes(graph, step.inputs[0], rows), step)


def product_depth(first: tuple[int, ...], step: GraphStep) -> int:
    """The depth of a matrix product whose first operand has shape *first*; 1 if that is unknown, as in islands."""
    return (first or (1,))[0 if step.attributes.get("transA") else -1]


def _shape(graph: Graph, name: str) -> tuple[int, ...]:
    """The shape of a constant or a tensor."""
    return graph.constants[name].shape if name in graph.constants else graph.shapes[name]


def _sizes(graph: Graph, tensor: str, rows: int) -> tuple[int, ...]:
    """The shape of *tensor*, with *rows* for a size only known at run time."""
    return tuple(rows if size == DYNAMIC else size for size in _shape(graph, tensor))


def _peak_bytes(graph: Graph, rows: int) -> int:
    """The peak bytes of live tensors while the steps run in order; a view keeps its source alive."""
    memory = _memory_owners(graph)
    last_use = _last_uses(graph, memory)
    bytes_of = {name: ITEM_BYTES * prod(_sizes(graph, name, rows)) for name in set(memory.values())}
    alive = {memory[tensor.name] for tensor in graph.inputs}
    peak = sum(bytes_of[name] for name in alive)
    for number, step in enumerate(graph.steps):
        alive |= {memory[name] for name in step.outputs}
        peak = max(peak, sum(bytes_of[name] for name in alive))
        alive = {name for name in alive if last_use.get(name, -1) > number}
    return peak


def _memory_owners(graph: Graph) -> dict[str, str]:
    """Tensor -> the tensor whose memory it uses: itself, unless it is a view."""
    owners = {tensor.name: tensor.name for tensor in graph.inputs}
    for step in graph.steps:
        for name in step.outputs:
            # Shape writes a small tensor of its own
            is_view = step.op in VIEWS and step.op != "Shape" and step.inputs[0] in owners
            owners[name] = owners[step.inputs[0]] if is_view else name
    return owners


def _last_uses(graph: Graph, memory: Mapping[str, str]) -> dict[str, int]:
    """Owner of memory (see ``_memory_owners``) -> the number of the last step that reads it."""
    last_use: dict[str, int] = {}
    for number, name in _reads(graph):
        if name in memory:
            last_use[memory[name]] = number
    return last_use


def _reads(graph: Graph) -> Iterator[tuple[int, str]]:
    """Yield every read: the number of the reading step, and the tensor. Outputs are read after the last step."""
    for number, step in enumerate(graph.steps):
        yield from ((number, name) for name in step.inputs)
    yield from ((len(graph.steps), tensor.name) for tensor in graph.outputs)


MOST_BITS = 12
"""Widest code: an array with several 8-bit formats has more than 2^8 distinct values; wider codes save little."""
ROW_CODES = 8
"""Codes per packed row: eight codes of n bits fill exactly n bytes."""
STEPS_BYTES = 1200
"""Approximate bytes of the decoding operators in a file; smaller savings are not worth them."""
_INT32 = 6
"""ONNX's number for the type int32."""


class CodedArray(NamedTuple):
    """An array as a table of its distinct values, and for each number its index in the table, as packed codes."""

    octets: Array
    """The codes, eight of them in a row of *bits* bytes."""
    table: Array
    """The distinct values."""
    shape: tuple[int, ...]
    """The shape of the decoded array."""

    @property
    def bits(self) -> int:
        return int(self.octets.shape[1])

    @property
    def nbytes(self) -> int:
        return int(self.octets.nbytes + self.table.nbytes)


def encode(array: Array) -> CodedArray | None:
    """Encode *array* by its distinct values; None if that saves no bytes."""
    if array.dtype != np.float32 or array.nbytes <= STEPS_BYTES:
        return None
    table, indices = np.unique(array, return_inverse=True)
    bits = max(1, int(len(table) - 1).bit_length())
    if bits > MOST_BITS:
        return None
    codes = CodedArray(pack_codes(indices.reshape(-1), bits), table, array.shape)
    return codes if codes.nbytes + STEPS_BYTES < array.nbytes else None


def pack_codes(codes: Array, bits: int) -> Array:
    """Pack codes without gaps, eight of them in a row of *bits* bytes; the last row is padded with zeros.

    Bit i of code k is bit (k bits + i) mod 8 of byte (k bits + i) // 8, as ``weft tune`` packs them.
    """
    rows = np.zeros((-(-codes.size // ROW_CODES), ROW_CODES), np.uint16)  # wide enough for MOST_BITS
    rows.reshape(-1)[: codes.size] = codes
    unpacked = (rows[:, :, None] >> np.arange(bits, dtype=np.uint16)).astype(np.uint8) & 1
    return np.packbits(unpacked.reshape(len(rows), -1), axis=1, bitorder="little")


def coded_kernels(graph: Graph) -> dict[str, CodedArray]:
    """Encode the kernels of tuned models where that saves bytes; empty for other graphs."""
    if not graph.tuned:
        return {}
    kernels = {name: encode(graph.constants[name]) for name in sorted(kernel_names(graph))}
    return {name: codes for name, codes in kernels.items() if codes is not None}


def stored_bytes(graph: Graph) -> dict[str, int]:
    """Kernel -> its bytes, for kernels that are stored as codes."""
    return {name: codes.nbytes for name, codes in coded_kernels(graph).items()}


def store_codes(graph: Graph, kernels: Mapping[str, CodedArray]) -> Graph:
    """*graph* with *kernels* stored as codes, and the steps that decode them in front of its own."""
    constants = {name: array for name, array in graph.constants.items() if name not in kernels}
    shapes, steps = dict(graph.shapes), list[GraphStep]()
    for name, codes in kernels.items():
        decoding = _Decoding(name, codes)
        constants |= decoding.constants
        steps += decoding.steps
        shapes |= dict.fromkeys((step.outputs[0] for step in decoding.steps), codes.shape)
    weights = graph.weights & constants.keys()
    return replace(graph, constants=constants, weights=weights, steps=(*steps, *graph.steps), shapes=shapes)


def width_metadata(graph: Graph, kernels: Mapping[str, CodedArray]) -> dict[str, str]:
    """Metadata with the bit widths of a tuned graph's kernels, for cost models; empty for other graphs."""
    if not graph.tuned:
        return {}
    from weft.models.onnx_import.widths import Widths, noted

    readers = ((step.outputs[0], step.inputs[1]) for step in graph.steps if len(step.inputs) > 1)
    return noted({node: Widths(kernels[name].bits) for node, name in readers if name in kernels}, graph.rounded)


class _Decoding:
    """The steps and constants that decode the codes of the array *name*.

    A code lies in at most three neighbouring bytes, in two if it has at most 9 bits. These are joined to one integer,
    from which a division and a remainder extract the code.
    """

    def __init__(self, name: str, codes: CodedArray) -> None:
        self.constants: dict[str, Array] = {f"{name}.codes": codes.octets, f"{name}.table": codes.table}
        self.steps: list[GraphStep] = []
        self._name, bits = name, codes.bits
        first_bits = bits * np.arange(ROW_CODES)  # of each code of a row
        octets = self._add("Cast", f"{name}.codes", to=_INT32)
        joined = ""
        for byte_number in range(2 if bits <= 9 else 3):
            # the byte of this number of each code; behind the row's end its last byte, whose bits are not used
            columns = self._integers(np.minimum(first_bits // 8 + byte_number, bits - 1))
            octet = self._add("Gather", octets, columns, axis=1)
            scaled = self._add("Mul", octet, self._integers(256**byte_number)) if byte_number else octet
            joined = self._add("Add", joined, scaled) if joined else scaled
        shifted = self._add("Div", joined, self._integers(2 ** (first_bits % 8)))
        values = self._add("Gather", f"{name}.table", self._add("Mod", shifted, self._integers(1 << bits)), axis=0)
        flat = self._add("Reshape", values, self._integers([-1], np.int64))
        unpadded = self._add("Slice", flat, self._integers([0]), self._integers([prod(codes.shape)]))
        self._add("Reshape", unpadded, self._integers(list(codes.shape), np.int64), output=name)

    def _add(self, op: str, *inputs: str, output: str = "", **attributes: int) -> str:
        """Add a step and return the name of its output."""
        name = output or f"{self._name}.{op.lower()}{len(self.steps)}"
        self.steps.append(GraphStep(op, inputs, (name,), attributes))
        return name

    def _integers(self, values: object, kind: type[np.signedinteger] = np.int32) -> str:
        """Store an integer constant and return its name, which depends on its values only, so that arrays share it."""
        array = np.asarray(values, kind)
        name = f"codes.{array.dtype}.{'x'.join(map(str, array.reshape(-1)))}.{array.ndim}"
        self.constants[name] = array
        return name


Shape = tuple[int, ...]


class GraphCost(Protocol):
    """The cost of graphs: predicted for a described machine, or timed on this one."""

    def seconds(self, graphs: Sequence[Graph]) -> list[float]:
        """Seconds of one run of each of *graphs*, comparable with each other."""
        ...


@dataclass(frozen=True, slots=True)
class Machine:
    """The speed of a machine, as the cost model needs it."""

    name: str
    launch_s: float
    """Overhead of launching one step, in seconds."""
    units: int
    """Number of tiles that are computed at once."""
    unit_macs_per_s: float
    """Multiply-adds per second of one unit."""
    tile: tuple[int, int, int]
    """Output channels, positions and depth of a tile: a product's sizes are rounded up to multiples of these."""
    bytes_per_s: float
    unfold_s: float = 0.0
    """Seconds to copy one pixel for one tap of a kernel where pictures are unfolded (im2col)."""
    strided_unfold_s: float = 0.0
    """The same for a horizontal stride above 1, where the columns read are not neighbours."""
    joins_rows: bool = True
    """Whether the pictures of a batch are computed as one product, and so share tiles."""


CPU = Machine(
    "cpu", launch_s=5e-6, units=1, unit_macs_per_s=18e9, tile=(4, 16, 1), bytes_per_s=25e9,
    unfold_s=0.64e-9, strided_unfold_s=1.15e-9, joins_rows=False,
)  # fmt: skip
"""One core of a Neoverse-N1 under onnxruntime 1.31, whose convolutions unfold each picture by itself."""
H200 = Machine("h200", launch_s=5e-6, units=132, unit_macs_per_s=0.9e12, tile=(64, 64, 32), bytes_per_s=4e12)
"""Kernels of cuDNN in one CUDA graph, TF32."""
MACHINES: Mapping[str, Machine] = MappingProxyType({preset.name: preset for preset in (CPU, H200)})


def machine(name: str) -> Machine:
    """A preset by its name; ``StitchError`` if there is none."""
    if name not in MACHINES:
        raise StitchError(unknown_name("machine", name, MACHINES))
    return MACHINES[name]


@dataclass(frozen=True, slots=True)
class Modelled:
    """Seconds of graphs, predicted for a described machine."""

    machine: Machine = CPU
    rows: int = 1
    """The size assumed for a dimension that is known only at run time."""

    def seconds(self, graphs: Sequence[Graph]) -> list[float]:
        return [sum(self.by_layer(graph).values()) for graph in graphs]

    def by_layer(self, graph: Graph) -> dict[str, float]:
        """Source layer -> its seconds; '' for steps of no layer."""
        seconds: dict[str, float] = {}
        for step in graph.steps:
            seconds[step.layer] = seconds.get(step.layer, 0.0) + self.step(step, graph)
        return seconds

    def step(self, step: GraphStep, graph: Graph) -> float:
        """Seconds of one step: a launch, and the larger of computing and moving its bytes."""
        if step.op in VIEWS:
            return 0.0
        moved_s = self._moved_bytes(step, graph) / self.machine.bytes_per_s
        if step.op == "Conv":
            shapes = (self._shape(graph, name) for name in (*step.inputs[:2], step.outputs[0]))
            return self.machine.launch_s + self._product_seconds(_Product.of_conv(step, *shapes), moved_s)
        if step.op in PRODUCTS:
            return self.machine.launch_s + self._product_seconds(self._matrix_product(step, graph), moved_s)
        return self.machine.launch_s + moved_s

    def _product_seconds(self, product: _Product, moved_s: float) -> float:
        """Seconds of all waves of tiles and of unfolding; at least *moved_s*, the seconds to move the bytes."""
        machine = self.machine
        pictures, positions = (
            (1, product.pictures * product.positions) if machine.joins_rows else (product.pictures, product.positions)
        )
        tile_outs, tile_positions, tile_depth = machine.tile
        # a single output channel is a matrix-vector product, which is not rounded up to whole tiles
        tile_rows = -(-product.outs // tile_outs)
        computed_outs = 1 if product.outs == 1 else tile_rows * tile_outs
        computed_depth = -(-product.depth // tile_depth) * tile_depth
        tiles = pictures * product.groups * tile_rows * -(-positions // tile_positions)
        tile_macs = computed_outs * tile_positions * computed_depth / max(1, tile_rows)
        waves = -(-tiles // machine.units)
        unfolded = product.pictures * product.groups * product.depth * product.positions if product.unfolds else 0
        pixel_s = machine.strided_unfold_s if product.strided else machine.unfold_s
        return max(waves * tile_macs / machine.unit_macs_per_s + unfolded * pixel_s, moved_s)

    def _matrix_product(self, step: GraphStep, graph: Graph) -> _Product:
        """The size of a Gemm, MatMul or FusedConv; a fused convolution's depth follows from its attribute ``macs``."""
        # [rows, outs, height, width] of a FusedConv, else [..., outs]
        output = self._shape(graph, step.outputs[0]) or (1,)
        positions = prod(output[2:]) if step.op == "FusedConv" else prod(output[:-1])
        outs = output[1] if step.op == "FusedConv" else output[-1]
        if "macs" in step.attributes:
            pictures = output[0]
            return _Product(outs, int(step.attributes["macs"]) // max(1, prod(output)), positions, pictures)
        return _Product(outs, product_depth(self._shape(graph, step.inputs[0]), step), positions)

    def _moved_bytes(self, step: GraphStep, graph: Graph) -> int:
        """Bytes of all inputs and outputs of a step."""
        names = [name for name in (*step.inputs, *step.outputs) if name]
        return ITEM_BYTES * sum(prod(self._shape(graph, name)) for name in names)

    def _shape(self, graph: Graph, name: str) -> tuple[int, ...]:
        shape = graph.constants[name].shape if name in graph.constants else graph.shapes[name]
        return tuple(self.rows if size == DYNAMIC else size for size in shape)


class _Product(NamedTuple):
    """The size of a product of matrices [outs, depth] x [depth, positions], once per picture and group."""

    outs: int
    depth: int
    positions: int
    pictures: int = 1
    groups: int = 1
    unfolds: bool = False
    """Whether the picture is unfolded before the product (im2col)."""
    strided: bool = False
    """Whether the horizontal stride is above 1."""

    @staticmethod
    def of_conv(step: GraphStep, source: Shape, weight: Shape, output: Shape) -> _Product:
        """The product by which a convolution of any rank is computed; unknown shapes (of islands) count as ones."""
        pictures, outs = (source or (1,))[0], (weight or (1,))[0]
        groups = int(step.attributes.get("group", 1))
        strides = tuple(step.attributes.get("strides", ())) or (1,)
        unfolds = any(size != 1 for size in (*weight[2:], *strides))
        return _Product(
            outs // groups, prod(weight[1:]), prod(output[2:]), pictures, groups, unfolds, strided=strides[-1] > 1
        )
