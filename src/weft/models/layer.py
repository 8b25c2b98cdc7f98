"""Models as the scheduler sees them: layers in execution order, each with its amount of work.

Nothing here reads files (see ``onnx_import``) or knows a device (see ``weft.devices.costs``). Counts are
for one sample; a batch is applied where a profile is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from weft.base.errors import ModelError


@dataclass(frozen=True, slots=True)
class Gemm:
    """A layer's arithmetic as ``groups`` independent matrix products (m x k) @ (k x n)."""

    m: int
    """Rows: output positions of a convolution, tokens of a transformer."""
    k: int
    """Reduction: input channels per group times kernel positions."""
    n: int
    """Columns: output channels per group."""
    groups: int = 1
    kernel: int = 1
    """Kernel positions (R*S) inside ``k``; 1 for anything that is not a convolution."""

    def __post_init__(self) -> None:
        if min(self.m, self.k, self.n, self.groups, self.kernel) < 1:
            raise ModelError(f"GEMM sizes must be at least 1, got {self}")

    @property
    def macs(self) -> int:
        return self.m * self.k * self.n * self.groups

    @property
    def depthwise(self) -> bool:
        """Whether the convolution is depthwise: one input and one output channel per group."""
        return self.groups > 1 and self.n == 1 and self.k == self.kernel


@dataclass(frozen=True, slots=True)
class Layer:
    """One schedulable piece of a model; all counts are for one sample."""

    name: str
    kind: str
    """conv, gemm, matmul (no weights), rnn, embedding, norm, pool, elementwise, movement, control or unknown."""
    op: str
    """The ONNX operator of the layer, with operators fused to it: ``Conv+BatchNormalization+Relu``."""
    gemm: Gemm | None = None
    """The matrix product; None if the layer only moves or transforms activations."""
    weights: int = 0
    """Values that the product reads from memory for each query, without biases, norms and embedding tables."""
    lookups: int = 0
    """Values gathered from embedding tables, per sample."""
    parameters: int = 0
    """All trained values stored for this layer, including tables, biases and norms."""
    input_elements: int = 0
    output_elements: int = 0
    weight_bits: int = 32
    activation_bits: int = 32
    reuses_weights: bool = True
    """Whether all samples of a batch use the same fetched weights; False for products of two activations."""
    nodes: tuple[str, ...] = field(default=(), compare=False)
    """Names, as TensorRT gives them, of all ONNX nodes in this layer, including fused nodes and reshapes."""

    @property
    def macs(self) -> int:
        return self.gemm.macs if self.gemm else 0

    @property
    def weight_bytes(self) -> int:
        return -(-self.weights * self.weight_bits // 8)

    @property
    def input_bytes(self) -> int:
        return -(-self.input_elements * self.activation_bits // 8)

    @property
    def output_bytes(self) -> int:
        return -(-self.output_elements * self.activation_bits // 8)


@dataclass(frozen=True, slots=True)
class Exit:
    """A place where samples may leave a model with an early answer."""

    name: str
    after: int
    """Number of layers up to the exit's answer, including the layers of its head."""


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A network: its layers in execution order; empty if the network only reshapes its inputs."""

    name: str
    layers: tuple[Layer, ...]
    inputs: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Name and shape of every input; the work of the layers is counted for these shapes."""
    unknown_ops: tuple[str, ...] = ()
    """Operators without a cost rule; their cost is only their activation traffic."""
    guesses: tuple[str, ...] = ()
    """A line for each shape that stayed unknown: the node, what was assumed and why; counts after it may be wrong."""
    exits: tuple[Exit, ...] = ()
    """The early exits from shallow to deep, without the end of the model."""
    block_ends: tuple[int, ...] = ()
    """Ascending layer counts at which a single activation is passed on to the later layers.

    Weights, inputs, values computed from inputs without a matrix product (masks) and finished outputs do not count."""
    block_shapes: tuple[tuple[int, int], ...] = ()
    """Positions and channels of the activation that crosses at each block end; empty where unknown."""

    def __repr__(self) -> str:
        return f"Model({self.name}: {len(self.layers)} layers, {self.macs / 1e9:.3f} GMACs)"

    def __post_init__(self) -> None:
        self._check_exits()
        if self.block_ends and any(
            before >= after for before, after in pairwise((0, *self.block_ends, len(self.layers)))
        ):
            raise ModelError(f"{self.name}: block_ends must ascend within {len(self.layers)} layers")
        if self.block_shapes and len(self.block_shapes) != len(self.block_ends):
            raise ModelError(
                f"{self.name}: {len(self.block_shapes)} block_shapes for {len(self.block_ends)} block_ends"
            )

    def _check_exits(self) -> None:
        """Raise ModelError unless exits have different names and ascend within the layers."""
        names = [early.name for early in self.exits]
        if len(set(names)) < len(names) or not all(names):
            raise ModelError(f"{self.name}: exits need names, each its own; got {', '.join(map(repr, names))}")
        last = len(self.layers) - 1
        for early in self.exits:
            if not 1 <= early.after <= last:
                raise ModelError(
                    f"{self.name}: exit {early.name!r} is after {early.after} layers, must be 1 to {last}; "
                    "the end needs no exit"
                )
        for previous, following in pairwise(self.exits):
            if previous.after >= following.after:
                raise ModelError(
                    f"{self.name}: exit {following.name!r} (after {following.after} layers) must come after "
                    f"{previous.name!r} (after {previous.after}); list exits from shallow to deep"
                )

    @property
    def macs(self) -> int:
        return sum(layer.macs for layer in self.layers)

    @property
    def weights(self) -> int:
        return sum(layer.weights for layer in self.layers)

    @property
    def weight_bytes(self) -> int:
        return sum(layer.weight_bytes for layer in self.layers)

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)
