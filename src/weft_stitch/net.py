"""A network with its weights, as the stitcher sees it: ``Net``, a list of ``Op`` over named values.

Every value is [rows, channels, height, width]: a fully connected layer is a convolution over one position, a flatten
before it makes its kernel as large as the picture, and flattening itself is no operation. A batch normalisation and a
bias are an ``affine``. Nine kinds of operations remain besides islands; all of them but ``conv`` keep channels apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.base.errors import ModelError

Array = NDArray[Any]

KINDS = ("conv", "affine", "unary", "add", "mul", "concat", "max_pool", "avg_pool", "global_pool", "island")
"""``conv`` with groups equal to its channels is depthwise; ``island`` is an operator only its source can run."""
ROUNDING = "Rounding"
"""The function of a unary that rounds to a number format, by the steps in its payload."""


@dataclass(frozen=True, slots=True)
class Window:
    """How a convolution's or a pool's window moves over its input; pairs are vertical, horizontal."""

    kernel: tuple[int, int] = (1, 1)
    strides: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Top, left, bottom, right."""
    dilations: tuple[int, int] = (1, 1)

    def output(self, height: int, width: int) -> tuple[int, int]:
        """The output's height and width for an input of *height* x *width*, rounded down."""
        top, left, bottom, right = self.pads
        # where the window's first tap lies at its last position, in the padded input at stride 1
        last_row = height + top + bottom - self.dilations[0] * (self.kernel[0] - 1) - 1
        last_column = width + left + right - self.dilations[1] * (self.kernel[1] - 1) - 1
        return last_row // self.strides[0] + 1, last_column // self.strides[1] + 1


@dataclass(frozen=True, slots=True)
class Value:
    """The size of a tensor between operations, without its rows."""

    channels: int
    height: int = 1
    width: int = 1


@dataclass(frozen=True, eq=False)
class Op:
    """One operation: it reads the values *inputs* and writes the value *output*."""

    name: str
    """The node's name in the source, for messages."""
    kind: str
    inputs: tuple[str, ...]
    output: str
    weight: Array | None = None
    """conv: [out, in / groups, kernel height, kernel width]."""
    scale: Array | None = None
    """affine: a factor for each channel, [channels]."""
    shift: Array | None = None
    """affine: a term for each channel, [channels]."""
    window: Window = Window()
    groups: int = 1
    function: str = ""
    """unary: the ONNX operator (Relu, Sigmoid, Tanh, HardSigmoid, HardSwish, LeakyRelu, Elu, Clip, Softplus, Gelu, Exp,
    Neg, Abs, Sqrt) or Silu."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """unary: alpha, beta, min, max, tanh (Gelu's approximation); avg_pool: count_include_pad; 0 or 1 for switches."""
    payload: Any = None
    """An object of the reader that runs the operation, for an island or a unary that rounds (``ROUNDING``).

    Payloads of equal ``signature`` (a str) compute the same.
    """
    tuned: bool = False
    """conv: whether its weights take few distinct values, as after ``weft tune``; such weights are never scaled."""

    @property
    def depthwise(self) -> bool:
        return self.kind == "conv" and self.groups > 1 and self.weight is not None and self.weight.shape[1] == 1


@dataclass(frozen=True, eq=False)
class Port:
    """An input or output of the net as its caller knows it."""

    name: str
    """The caller's name."""
    value: str
    """The net's value behind the port."""
    shape: tuple[int, ...]
    """The shape as the caller sees it, without rows: (channels,), (channels, height, width)."""


@dataclass(frozen=True, eq=False)
class Net:
    """Operations in an order in which they can run."""

    name: str
    inputs: tuple[Port, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Port, ...]
    values: Mapping[str, Value]
    """The size of each value."""
    batch: int = 1
    """Rows per run."""
    stored: str = "float32"
    """The type of most weights in the source file; in memory they are float32."""

    def __post_init__(self) -> None:
        known = {port.value for port in self.inputs}
        for op in self.ops:
            if op.kind not in KINDS:
                raise ModelError(f"{self.name}: {op.name} is of unknown kind {op.kind!r}")
            if missing := [value for value in op.inputs if value not in known]:
                raise ModelError(f"{self.name}: {op.name} reads {missing[0]}, which nothing before it writes")
            known.add(op.output)
        if missing := [port.name for port in self.outputs if port.value not in known]:
            raise ModelError(f"{self.name}: nothing writes its output {missing[0]}")

    @property
    def tuned(self) -> bool:
        """Whether some weights are in a number format that they must keep."""
        return any(op.tuned for op in self.ops)

    def readers(self, value: str) -> Iterator[Op]:
        return (op for op in self.ops if value in op.inputs)

    @property
    def weights(self) -> int:
        """Number of weights, scales and shifts that the net stores."""
        arrays = ((op.weight, op.scale, op.shift) for op in self.ops)
        return sum(array.size for group in arrays for array in group if array is not None)


def infer(op: Op, inputs: tuple[Value, ...]) -> Value:
    """The size of the value that *op* writes when it reads values of the sizes *inputs*."""
    first = inputs[0]
    if op.kind == "conv":
        assert op.weight is not None
        return Value(op.weight.shape[0], *op.window.output(first.height, first.width))
    if op.kind in ("max_pool", "avg_pool"):
        return Value(first.channels, *op.window.output(first.height, first.width))
    if op.kind == "global_pool":
        return Value(first.channels)
    if op.kind == "concat":
        return Value(sum(part.channels for part in inputs), first.height, first.width)
    if op.kind in ("add", "mul"):
        largest = max(inputs, key=lambda operand: operand.height * operand.width)
        return Value(max(operand.channels for operand in inputs), largest.height, largest.width)
    if op.kind == "island":
        size: Value = op.payload.value
        return size
    return first


def assemble(name: str, inputs: tuple[Port, ...], ops: list[Op], outputs: tuple[Port, ...], batch: int = 1) -> Net:
    """Make a net and compute the sizes of its values; an input of shape (channels,) is a picture of one position."""
    values = {port.value: Value(*port.shape) for port in inputs}
    for op in ops:
        values[op.output] = infer(op, tuple(values[name] for name in op.inputs))
        size = values[op.output]
        if min(size.channels, size.height, size.width) < 1:
            raise ModelError(f"{name}: {op.name} would write {size.channels} x {size.height} x {size.width} values")
    return Net(name, inputs, tuple(ops), outputs, values, batch)


def finite(array: Array) -> bool:
    return bool(np.isfinite(array).all())
