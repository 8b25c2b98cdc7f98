"""Writing nodes and constants into an ONNX graph: unique names, equal constants once, the types and opsets of formats.

``onnx_type`` says which formats have an ONNX type: exactly the same values, apart from a scale that is a power of two.
Sign and magnitude fit into the next wider integer type: what they would not hold is clipped away before. Small floats
without infinities are ONNX's FNUZ types, which end where ours do; the other float8 types give up their largest value.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from weft.base.errors import TuneError
from weft.models.element_types import ElementType, dtype_bits
from weft.models.onnx_graph import (
    OnnxGraph,
    OnnxModel,
    OnnxNode,
    at_opset,
    make_node,
    metadata,
    opsets,
    set_metadata,
    to_tensor,
)
from weft_tune.numbers.configuration import AnyFormat
from weft_tune.numbers.format import Format, TwosComplement

LEAST_OPSET = 13
"""The first opset that has all operators that are written, 8-bit QuantizeLinear per channel among them."""
_FILE_VERSIONS = {13: 7, 19: 9, 21: 10}
"""Opset -> the version of the file format that was released with it."""
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-100, 2.0**100
"""Scales by which float32 divides without loss: beyond them quotients of usual values leave its range."""
_INTEGERS = ((4, "INT4", 21), (8, "INT8", 13), (16, "INT16", 21))
"""Bits, signed type and first opset with QuantizeLinear for it, narrowest first."""
_FLOATS = {(4, 3): ("FLOAT8E4M3FNUZ", 8), (5, 2): ("FLOAT8E5M2FNUZ", 16)}
"""Exponent and fraction bits -> type and its bias."""


class Emitter:
    """Collects nodes and constants for a graph; ``take`` hands over the nodes written since it was last called."""

    def __init__(self, graph: OnnxGraph) -> None:
        self.constants: list[Any] = []
        self._nodes: list[OnnxNode] = []
        self._names = {name for node in graph.node for name in (node.name, *node.input, *node.output)}
        self._names |= {value.name for value in (*graph.initializer, *graph.input, *graph.output)}
        self._shared: dict[tuple[str, tuple[int, ...], bytes], str] = {}  # type, shape, bytes of a constant -> its name

    def add_node(self, op: str, inputs: Iterable[str], hint: str, *, domain: str = "", **attributes: Any) -> str:
        """Add a node and return the name of its one output."""
        output = self.name(f"{hint}/{op}")
        self._nodes.append(make_node(op, inputs, [output], output, domain=domain or None, **attributes))
        return output

    def constant(self, value: npt.ArrayLike, kind: npt.DTypeLike) -> str:
        """Add a constant, or return the name of an equal one."""
        array = np.asarray(value, kind)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._shared:
            self._shared[key] = self.store(array, "constant")
        return self._shared[key]

    def number(self, value: float) -> str:
        """Add a float32 constant, or return the name of an equal one."""
        return self.constant(value, np.float32)

    def zero(self, element: int) -> str:
        """Add the zero point of an ONNX type, or return the name of an equal one; zero is zero bytes in every type."""
        key = (f"zero {element}", (), b"")
        if key not in self._shared:
            self._shared[key] = self.store_raw(element, (), bytes(max(1, dtype_bits(element) // 8)), "zero")
        return self._shared[key]

    def store(self, values: npt.NDArray[Any], hint: str) -> str:
        """Add an array under a new name, which is returned."""
        self.constants.append(to_tensor(values, self.name(hint)))
        return str(self.constants[-1].name)

    def store_raw(self, element: int, shape: Iterable[int], data: bytes, hint: str) -> str:
        """Add the *data* of a tensor of an ONNX type, which numpy may lack; returns its name."""
        tensor = TensorProto(name=self.name(hint), data_type=element, dims=shape, raw_data=data)
        self.constants.append(tensor)
        return str(tensor.name)

    def name(self, hint: str) -> str:
        """Reserve a name: *hint* itself, or with a number where that is taken."""
        name, number = hint, 2
        while name in self._names:
            name, number = f"{hint}_{number}", number + 1
        self._names.add(name)
        return name

    def take(self) -> list[OnnxNode]:
        """Return the nodes that were added since the last call."""
        nodes, self._nodes = self._nodes, []
        return nodes


def raise_opset(model: OnnxModel, opset: int) -> OnnxModel:
    """Convert *model* to at least *opset* of the standard operators; return *model* itself if it has that already."""
    if opsets(model).get("", 1) < opset:
        model = _convert(model, opset)
    model.ir_version = max(model.ir_version, _FILE_VERSIONS[opset])
    return model


def _convert(model: OnnxModel, opset: int) -> OnnxModel:
    """Convert *model* to *opset*; raises TuneError if ONNX's converter cannot."""
    try:
        converted = at_opset(model, opset)
    except Exception as error:  # the C++ side raises several unrelated kinds
        reason = " ".join(str(error).split())[:120]
        raise TuneError(
            f"the formats need opset {opset} and the model cannot be raised to it ({reason}); "
            f"export it with opset {opset}, or use the style simulated"
        ) from error
    set_metadata(converted, metadata(model))  # which the converter drops
    return converted


class OnnxType(NamedTuple):
    """Values of an ONNX type times *scale*."""

    element: int
    """The type, a number of ``ElementType``."""
    bits: int
    scale: float
    integer: bool
    opset: int
    """The first with QuantizeLinear and DequantizeLinear for the type."""


def onnx_type(form: AnyFormat) -> OnnxType | None:
    """The ONNX type and scale of a format, if there is one."""
    if isinstance(form, TwosComplement):
        match = _integer_type(form.bits, form.step, signed=True)
    elif form.kind == "FIXED":
        match = _integer_type(form.bits, form.step, signed=bool(form.sign_bits))
    else:
        match = _float8_type(form)
    return match if match and SMALLEST_SCALE <= match.scale <= LARGEST_SCALE else None


def _integer_type(bits: int, scale: float, *, signed: bool) -> OnnxType | None:
    """The narrowest ONNX integer type with at least *bits*; None above 16."""
    for width, name, opset in _INTEGERS:
        if bits <= width:
            return OnnxType(ElementType[name if signed else f"U{name}"], width, scale, integer=True, opset=opset)
    return None


def _float8_type(form: Format) -> OnnxType | None:
    """The float8 type with the exponent and fraction bits of *form*, if there is one; the biases differ by a scale."""
    if not form.sign_bits or form.specials or (form.exponent_bits, form.fraction_bits) not in _FLOATS:
        return None
    name, bias = _FLOATS[form.exponent_bits, form.fraction_bits]
    exponent = bias - form.bias
    # checked before the power is taken, which would overflow
    if abs(exponent) > 100:
        return None
    return OnnxType(ElementType[name], bits=8, scale=2.0**exponent, integer=False, opset=19)
