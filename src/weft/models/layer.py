"""Models as the scheduler sees them: layers in execution order and how much work each one is.

Nothing here reads files (see ``onnx_import``) or knows a device (see ``weft.costs``). Counts are
for one sample; a batch is applied where a profile is made.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import ModelError


@dataclass(frozen=True, slots=True)
class Gemm:
    """A layer's arithmetic as ``groups`` independent products (m x k) @ (k x n)."""

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
        """One input and one output channel per group: nothing to reduce but the kernel window."""
        return self.groups > 1 and self.n == 1 and self.k == self.kernel


@dataclass(frozen=True, slots=True)
class Layer:
    """One schedulable piece of work, for one sample."""

    name: str
    kind: str
    """conv, gemm, matmul (no weights), rnn, embedding, norm, pool, elementwise, movement, control or unknown."""
    op: str
    """The ONNX operator it came from, with fused followers: ``Conv+BatchNormalization+Relu``."""
    gemm: Gemm | None = None
    """None where the work is moving and touching activations, not multiplying matrices."""
    weights: int = 0
    """Values the multiplication reads from memory for each query: no bias, norm or looked-up table."""
    lookups: int = 0
    """Values gathered from tables, per sample."""
    parameters: int = 0
    """All trained values stored for this layer, tables, biases and norms included."""
    input_elements: int = 0
    output_elements: int = 0
    weight_bits: int = 32
    activation_bits: int = 32
    reuses_weights: bool = True
    """Whether a batch shares one reading of the weights; False for products of two activations."""

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


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A network: its layers in execution order."""

    name: str
    layers: tuple[Layer, ...]
    inputs: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Name and shape of every input the counts were made for."""
    unknown_ops: tuple[str, ...] = ()
    """Operators we have no arithmetic for; each costs its activation traffic only."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ModelError(f"{self.name}: the model has no layers")

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
