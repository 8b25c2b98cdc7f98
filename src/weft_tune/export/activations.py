"""Activations in a number format, by operators that every ONNX runtime has.

``quantised`` goes through an ONNX type and back where the format has one. ``simulated`` computes what
``weft_tune.numbers.arrays.rounded`` does with plain arithmetic, for every format and bit for bit, but for the sign of
zeros and what becomes of infinities. The power of two below a value a is found without looking at its bits: c - (c - a)
with c = (2^23 + 1) a has one significant bit (Veltkamp's splitting), so it is that power or the next one. Adding and
taking away 2^(23-n_f) times the power leaves n_f bits of fraction, rounded to even.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from weft.base.errors import TuneError
from weft_tune.export.emitter import Emitter
from weft_tune.export.types import Typed, typed
from weft_tune.numbers.configuration import AnyFormat
from weft_tune.numbers.format import FLOAT16, FLOAT32, Format
from weft_tune.numbers.plain import float32_range
from weft_tune.numbers.spelling import spell
from weft_tune.numbers.twos_complement import TwosComplement

_AT_LEAST_8_BITS: dict[int, int] = {TensorProto.INT4: TensorProto.INT8, TensorProto.UINT4: TensorProto.UINT8}


def quantised(emitter: Emitter, source: str, form: AnyFormat) -> str:
    """*source* in the format: as an ONNX type where it is one and rounds as that does, otherwise simulated."""
    if form == FLOAT16:
        return _through_float16(emitter, source)
    found = pair_type(form)
    return _typed_pair(emitter, source, form, found) if found else simulated(emitter, source, form)


def pair_type(form: AnyFormat) -> Typed | None:
    """The ONNX type that inputs are quantised to, if there is one that rounds as the format does.

    Integers have at least 8 bits, since no kernel computes in fewer.
    """
    found = None if isinstance(form, TwosComplement) else typed(form)
    wider = found and _AT_LEAST_8_BITS.get(found.element)
    return found._replace(element=wider, bits=8, opset=13) if found and wider else found


def _typed_pair(emitter: Emitter, source: str, form: AnyFormat, found: Typed) -> str:
    """Nodes to an ONNX type and back: QuantizeLinear and DequantizeLinear, or for floats Cast."""
    if not found.integer:
        scaled = emitter.node("Mul", [source, emitter.number(1 / found.scale)], source)
        small = emitter.node("Cast", [scaled], source, to=found.element, saturate=1)
        back = emitter.node("Cast", [small], source, to=TensorProto.FLOAT)
        return emitter.node("Mul", [back, emitter.number(found.scale)], source)
    scale, zero = emitter.number(found.scale), emitter.zero(found.element)
    codes = emitter.node("QuantizeLinear", [_bounded(emitter, source, form), scale, zero], source)
    return emitter.node("DequantizeLinear", [codes, scale, zero], source)


def simulated(emitter: Emitter, source: str, form: AnyFormat) -> str:
    """Nodes that round by arithmetic alone."""
    if form == FLOAT32:
        return source
    if isinstance(form, Format) and form.kind == "BIN":
        below = emitter.node("Less", [source, emitter.number(0)], source)
        return emitter.node("Where", [below, *(emitter.number(end) for end in float32_range(form))], source)
    held = _clipped(emitter, source, form)
    narrow = _stays_in_float32(form)
    sums = _Arithmetic(emitter, source, np.float32 if narrow else np.float64)
    if not narrow:
        held = emitter.node("Cast", [held], source, to=TensorProto.DOUBLE)
    if isinstance(form, TwosComplement):
        result = _half_away(sums, held, form)
    else:
        result = _in_steps(sums, held, form) if form.kind == "FIXED" else _in_binades(sums, held, form)
    return result if narrow else emitter.node("Cast", [result], source, to=TensorProto.FLOAT)


@dataclass(frozen=True, slots=True)
class _Arithmetic:
    """Operators on one floating-point type."""

    emitter: Emitter
    hint: str
    kind: npt.DTypeLike

    @property
    def fraction_bits(self) -> int:
        return int(np.finfo(np.dtype(self.kind)).nmant)

    def __call__(self, op: str, *operands: str | float) -> str:
        names = (each if isinstance(each, str) else self.emitter.constant(each, self.kind) for each in operands)
        return self.emitter.node(op, names, self.hint)


def _in_steps(do: _Arithmetic, held: str, form: Format) -> str:
    return do("Mul", do("Round", do("Mul", held, 1 / form.step)), form.step)


def _half_away(do: _Arithmetic, held: str, form: TwosComplement) -> str:
    places = do("Abs", do("Mul", held, 1 / form.step))
    below = do("Floor", places)
    half = do("GreaterOrEqual", do("Sub", places, below), 0.5)
    away = do("Where", half, do("Add", below, 1.0), below)
    return _signed(do, held, do("Mul", away, form.step))


def _in_binades(do: _Arithmetic, held: str, form: Format) -> str:
    size = do("Abs", held)
    least = 2.0 ** (1 - form.bias)
    power = do("Max", _power_below(do, size), least)
    magic = do("Mul", power, 2.0 ** (do.fraction_bits - form.fraction_bits))
    result = do("Sub", do("Add", size, magic), magic)
    if form.fraction_bits == 0:
        result = _even_codes(do, size, power, result, form)
    return _signed(do, held, result)


def _power_below(do: _Arithmetic, size: str) -> str:
    """The largest power of two that is not above; zero for zero."""
    large = do("Mul", size, 2.0**do.fraction_bits + 1)
    near = do("Sub", large, do("Sub", large, size))
    return do("Where", do("Greater", near, size), do("Mul", near, 0.5), near)


def _even_codes(do: _Arithmetic, size: str, power: str, result: str, form: Format) -> str:
    """Half way between two powers the sum above goes up; here down, where the code below is even.

    A root of 2^e squares to 2^e again only if e is even; that of 2 does not, in either precision.
    """
    root = do("Sqrt", power)
    even = do("Equal", do("Mul", root, root), power)
    stays = even if form.bias % 2 == 0 else do("Not", even)
    tie = do("Equal", size, do("Mul", power, 1.5))
    return do("Where", do("And", tie, stays), power, result)


def _signed(do: _Arithmetic, held: str, size: str) -> str:
    return do("Where", do("Less", held, 0.0), do("Neg", size), size)


def _through_float16(emitter: Emitter, source: str) -> str:
    half = emitter.node("Cast", [_clipped(emitter, source, FLOAT16)], source, to=TensorProto.FLOAT16)
    return emitter.node("Cast", [half], source, to=TensorProto.FLOAT)


def _clipped(emitter: Emitter, source: str, form: AnyFormat) -> str:
    lowest, highest = float32_range(form)
    return emitter.node("Clip", [source, emitter.number(lowest), emitter.number(highest)], source)


def _bounded(emitter: Emitter, source: str, form: AnyFormat) -> str:
    """Clipped, but not by Clip.

    Where QuantizeLinear follows a product or its Clip, onnxruntime's optimiser makes integers of float32 weights and
    biases too, which nobody asked for and which costs accuracy.
    """
    lowest, highest = float32_range(form)
    raised = emitter.node("Max", [source, emitter.number(lowest)], source)
    return emitter.node("Min", [raised, emitter.number(highest)], source)


def _stays_in_float32(form: AnyFormat) -> bool:
    """Whether no step of the arithmetic leaves float32; otherwise it is done in doubles."""
    if not 2.0**-900 <= form.step <= max(form.largest, -form.lowest) <= 2.0**900:
        raise TuneError(f"{spell(form)} reaches too far to be simulated; choose a bias nearer to the values")
    if isinstance(form, TwosComplement) or form.kind == "FIXED":
        return 2.0**-100 <= form.step <= 2.0**100
    return form.fraction_bits <= 22 and form.largest <= 2.0**100 and form.bias <= 100
