"""Formats that ONNX has a type for: exactly the same values, apart from a scale that is a power of two.

Sign and magnitude fit into the next wider integer type: what they would not hold is clipped away before. Small floats
without infinities are ONNX's FNUZ types, which end where ours do; the other float8 types give up their largest value.
"""

from __future__ import annotations

from typing import NamedTuple

from onnx import TensorProto

from weft_tune.numbers.configuration import AnyFormat
from weft_tune.numbers.format import Format
from weft_tune.numbers.twos_complement import TwosComplement

SMALLEST_SCALE, LARGEST_SCALE = 2.0**-100, 2.0**100
"""What float32 divides by without losing anything on the way."""


class Typed(NamedTuple):
    """Values of an ONNX type times *scale*."""

    element: int
    """The type, a number of ``TensorProto.DataType``."""
    bits: int
    scale: float
    integer: bool
    opset: int
    """The first with QuantizeLinear and DequantizeLinear for the type."""


_INTEGERS = ((4, "INT4", 21), (8, "INT8", 13), (16, "INT16", 21))


def typed(form: AnyFormat) -> Typed | None:
    """The ONNX type and scale of a format, if there is one."""
    found = _typed(form)
    return found if found and SMALLEST_SCALE <= found.scale <= LARGEST_SCALE else None


def _typed(form: AnyFormat) -> Typed | None:
    if isinstance(form, TwosComplement):
        return _integer(form.bits, form.step, signed=True)
    if form.kind == "FIXED":
        return _integer(form.bits, form.step, signed=bool(form.sign_bits))
    return _float8(form)


def _integer(bits: int, scale: float, *, signed: bool) -> Typed | None:
    for width, name, opset in _INTEGERS:
        if bits <= width:
            return Typed(TensorProto.DataType.Value(name if signed else f"U{name}"), width, scale, True, opset)
    return None


def _float8(form: Format) -> Typed | None:
    names = {(4, 3): ("FLOAT8E4M3FNUZ", 8), (5, 2): ("FLOAT8E5M2FNUZ", 16)}
    if not form.sign_bits or form.specials or (form.exponent_bits, form.fraction_bits) not in names:
        return None
    name, bias = names[form.exponent_bits, form.fraction_bits]
    exponent = bias - form.bias
    return Typed(TensorProto.DataType.Value(name), 8, 2.0**exponent, False, 19) if abs(exponent) <= 100 else None
