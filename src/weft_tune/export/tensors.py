"""Tensors in a number format, in a graph: weights that are stored so, and activations rounded by nodes.

``quantise`` goes through an ONNX type and back where the format has one. ``simulate`` computes the same as
``weft_tune.numbers.arrays.rounded`` with plain arithmetic, for every format and bit for bit, but for the sign of zeros
and the values of infinities. The power of two below a value a is found without looking at its bits: c - (c - a) with c
= (2^23 + 1) a has one significant bit (Veltkamp's splitting), so it is that power or the next one. Adding and taking
away 2^(23-n_f) times the power leaves n_f bits of fraction, rounded to even.

QONNX is the dialect of ONNX for numbers of any width that FINN, hls4ml and Brevitas read. Its operators are IntQuant,
FloatQuant and BipolarQuant of the domain ``qonnx.custom_op.general``. They take and give float32, with widths and
scales as inputs. A stock onnxruntime does not know them.

Weights are stored in few bits and turned back into float32 by the graph itself, exactly, in one of three ways: an ONNX
type with a scale; codes without gaps, which standard operators take apart and look up in a table (onnxruntime does it
once, when a session is opened); float16 or float32 values that are already rounded.

In all functions, *hint* is what the names of new nodes and tensors begin with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.base.errors import TuneError
from weft.models.element_types import ElementType
from weft_tune.export.emitter import Emitter, OnnxType, onnx_type
from weft_tune.numbers.arrays import LEAST_NORMAL, code_table, encode, pack, rounded
from weft_tune.numbers.configuration import AnyFormat
from weft_tune.numbers.format import FLOAT16, FLOAT32, Format, TwosComplement, spell
from weft_tune.numbers.plain import FLOAT32_MAX, float32_range

# Integer types narrower than any kernel computes in -> the type to use instead.
_AT_LEAST_8_BITS: dict[int, int] = {ElementType.INT4: ElementType.INT8, ElementType.UINT4: ElementType.UINT8}

QONNX_DOMAIN = "qonnx.custom_op.general"
QONNX_VERSION = 1  # of the operators in that domain


def quantise(emitter: Emitter, source: str, form: AnyFormat) -> str:
    """Write nodes that round *source*: as an ONNX type where one rounds as the format does, otherwise simulated."""
    if form == FLOAT16:
        half = emitter.add_node("Cast", [_clip(emitter, source, FLOAT16)], source, to=ElementType.FLOAT16)
        return emitter.add_node("Cast", [half], source, to=ElementType.FLOAT)
    target = activation_type(form)
    return _through_type(emitter, source, form, target) if target else simulate(emitter, source, form)


def activation_type(form: AnyFormat) -> OnnxType | None:
    """The ONNX type that inputs are quantised to, if there is one that rounds as the format does.

    Integers have at least 8 bits, since no kernel computes in fewer.
    """
    target = None if isinstance(form, TwosComplement) else onnx_type(form)  # ONNX rounds ties to even
    byte_type = target and _AT_LEAST_8_BITS.get(target.element)
    return target._replace(element=byte_type, bits=8, opset=13) if target and byte_type else target


def _through_type(emitter: Emitter, source: str, form: AnyFormat, target: OnnxType) -> str:
    """Write nodes to an ONNX type and back: QuantizeLinear and DequantizeLinear, or for floats Cast."""
    if not target.integer:
        scaled = emitter.add_node("Mul", [source, emitter.number(1 / target.scale)], source)
        small = emitter.add_node("Cast", [scaled], source, to=target.element, saturate=1)
        back = emitter.add_node("Cast", [small], source, to=ElementType.FLOAT)
        return emitter.add_node("Mul", [back, emitter.number(target.scale)], source)
    scale, zero = emitter.number(target.scale), emitter.zero(target.element)
    # Clipped, but not by Clip: where QuantizeLinear follows a product or its Clip, onnxruntime's optimiser makes
    # integers of float32 weights and biases too, which costs accuracy.
    lowest, highest = float32_range(form)
    raised = emitter.add_node("Max", [source, emitter.number(lowest)], source)
    bounded = emitter.add_node("Min", [raised, emitter.number(highest)], source)
    codes = emitter.add_node("QuantizeLinear", [bounded, scale, zero], source)
    return emitter.add_node("DequantizeLinear", [codes, scale, zero], source)


def simulate(emitter: Emitter, source: str, form: AnyFormat) -> str:
    """Write nodes that round by arithmetic alone."""
    if form == FLOAT32:
        return source
    if isinstance(form, Format) and form.kind == "BIN":
        below = emitter.add_node("Less", [source, emitter.number(0)], source)
        return emitter.add_node("Where", [below, *(emitter.number(end) for end in float32_range(form))], source)
    clipped = _clip(emitter, source, form)
    in_float32 = _stays_in_float32(form)
    node = _OperatorWriter(emitter, source, np.float32 if in_float32 else np.float64)
    if not in_float32:
        clipped = emitter.add_node("Cast", [clipped], source, to=ElementType.DOUBLE)
    if isinstance(form, TwosComplement):
        result = _round_half_away(node, clipped, form)
    elif form.kind == "FIXED":
        result = node("Mul", node("Round", node("Mul", clipped, 1 / form.step)), form.step)
    else:
        result = _round_in_binades(node, clipped, form)
    return result if in_float32 else emitter.add_node("Cast", [result], source, to=ElementType.FLOAT)


@dataclass(frozen=True, slots=True)
class _OperatorWriter:
    """Writes nodes that compute in one floating-point type; a call adds a node and returns the name of its output.

    Operands are names of tensors, or numbers.
    """

    emitter: Emitter
    hint: str
    kind: npt.DTypeLike

    @property
    def fraction_bits(self) -> int:
        return int(np.finfo(np.dtype(self.kind)).nmant)

    def __call__(self, op: str, *operands: str | float) -> str:
        names = (value if isinstance(value, str) else self.emitter.constant(value, self.kind) for value in operands)
        return self.emitter.add_node(op, names, self.hint)


def _round_half_away(node: _OperatorWriter, value: str, form: TwosComplement) -> str:
    """Write nodes that round *value* to multiples of the step, half away from zero."""
    steps = node("Abs", node("Mul", value, 1 / form.step))
    below = node("Floor", steps)
    half = node("GreaterOrEqual", node("Sub", steps, below), 0.5)
    rounded_steps = node("Where", half, node("Add", below, 1.0), below)
    return _with_sign(node, value, node("Mul", rounded_steps, form.step))


def _round_in_binades(node: _OperatorWriter, value: str, form: Format) -> str:
    """Write nodes that round *value* to n_f fraction bits below the power of two of each value.

    The power is at least that of the format's smallest exponent.
    """
    magnitude = node("Abs", value)
    power = node("Max", _power_below(node, magnitude), 2.0 ** (1 - form.bias))
    magic = node("Mul", power, 2.0 ** (node.fraction_bits - form.fraction_bits))
    result = node("Sub", node("Add", magnitude, magic), magic)
    if form.fraction_bits == 0:
        result = _even_codes(node, magnitude, power, result, form)
    return _with_sign(node, value, result)


def _power_below(node: _OperatorWriter, size: str) -> str:
    """Write nodes for the largest power of two that is not above *size*; zero for zero."""
    scaled = node("Mul", size, 2.0**node.fraction_bits + 1)
    power_or_next = node("Sub", scaled, node("Sub", scaled, size))
    return node("Where", node("Greater", power_or_next, size), node("Mul", power_or_next, 0.5), power_or_next)


def _even_codes(node: _OperatorWriter, size: str, power: str, result: str, form: Format) -> str:
    """Write nodes that correct ties of EXP: down to *power* if its code is even; *result* has rounded all ties up.

    Whether the exponent e of *power* is even is found by the square root: only then its square is exactly 2^e again.
    """
    root = node("Sqrt", power)
    even = node("Equal", node("Mul", root, root), power)
    stays = even if form.bias % 2 == 0 else node("Not", even)
    tie = node("Equal", size, node("Mul", power, 1.5))
    return node("Where", node("And", tie, stays), power, result)


def _with_sign(node: _OperatorWriter, value: str, size: str) -> str:
    """Write nodes that give *size* the sign of *value*."""
    return node("Where", node("Less", value, 0.0), node("Neg", size), size)


def _clip(emitter: Emitter, source: str, form: AnyFormat) -> str:
    lowest, highest = float32_range(form)
    return emitter.add_node("Clip", [source, emitter.number(lowest), emitter.number(highest)], source)


def _stays_in_float32(form: AnyFormat) -> bool:
    """Whether no step of the arithmetic leaves float32; otherwise it is done in doubles."""
    # Margins to the ranges of doubles and of float32, because the arithmetic multiplies by up to 2^53 or 2^24.
    if not 2.0**-900 <= form.step <= max(form.largest, -form.lowest) <= 2.0**900:
        raise TuneError(f"{spell(form)} reaches too far to be simulated; choose a bias nearer to the values")
    if isinstance(form, TwosComplement) or form.kind == "FIXED":
        return 2.0**-100 <= form.step <= 2.0**100
    return form.fraction_bits <= 22 and form.largest <= 2.0**100 and form.bias <= 100


def quantise_qonnx(emitter: Emitter, source: str, form: AnyFormat) -> str:
    """Write a node of QONNX that rounds *source*."""
    if form == FLOAT32:
        return source
    if isinstance(form, TwosComplement):
        return _int_quant(emitter, source, form, signed=1, narrow=0, rounding_mode="HALF_UP")
    if form.kind == "BIN":
        return _qonnx_node(emitter, "BipolarQuant", source, form, form.largest)
    if form.kind == "FIXED":
        signed = form.sign_bits
        return _int_quant(emitter, source, form, signed=signed, narrow=signed, rounding_mode="ROUND")
    return _float_quant(emitter, source, form)


def _int_quant(emitter: Emitter, source: str, form: AnyFormat, **attributes: int | str) -> str:
    """Write IntQuant, whose further inputs are the scale, the zero point and the width."""
    return _qonnx_node(emitter, "IntQuant", source, form, form.step, 0, form.bits, **attributes)


def _float_quant(emitter: Emitter, source: str, form: Format) -> str:
    """Write FloatQuant; EXP is a float without a mantissa.

    Biases are positive in QONNX; the difference of a negative one goes into the scale.
    """
    if not form.sign_bits:
        raise TuneError(f"{spell(form)} has no sign, which QONNX has only for integers; use the style simulated")
    scale = 2.0 ** max(0, 1 - form.bias)
    # Inputs of the node: scale, exponent bits, mantissa bits, bias, largest value before the scale.
    fields = (scale, form.exponent_bits, form.fraction_bits, max(1, form.bias), form.largest / scale)
    specials = int(form.specials)
    return _qonnx_node(
        emitter, "FloatQuant", source, form, *fields,
        has_inf=specials, has_nan=specials, has_subnormal=1, saturation=1, rounding_mode="ROUND",
    )  # fmt: skip


def _qonnx_node(
    emitter: Emitter, op: str, source: str, form: AnyFormat, *values: float, **attributes: int | str
) -> str:
    """Write a node of QONNX whose further inputs are *values*; raises TuneError if float32 does not hold them."""
    if not all(value == 0 or LEAST_NORMAL <= value <= FLOAT32_MAX for value in values):
        raise TuneError(f"{spell(form)} reaches too far for QONNX; choose a bias nearer to the values")
    inputs = [source, *(emitter.number(value) for value in values)]
    return emitter.add_node(op, inputs, source, domain=QONNX_DOMAIN, **attributes)


Floats = npt.NDArray[np.float32]

CODES_TOGETHER = 8
"""Codes that are unpacked as one row: eight codes of n bits are exactly n bytes."""


def store_rounded(emitter: Emitter, values: Floats, form: AnyFormat, hint: str) -> str:
    """Write weights rounded and stored as float32."""
    return emitter.store(rounded(values, form), hint)


def store_integers(emitter: Emitter, values: Floats, form: AnyFormat, hint: str) -> str:
    """Write weights as integers with DequantizeLinear; for formats that are an integer type."""
    target = onnx_type(form)
    assert target is not None and target.integer
    name = _store_typed(emitter, values, form, target, hint)
    return emitter.add_node(
        "DequantizeLinear", [name, emitter.number(target.scale), emitter.zero(target.element)], hint
    )


def store_codes(emitter: Emitter, values: Floats, form: AnyFormat, hint: str) -> str:
    """Write codes of exactly the format's bits up to 8; above, int16 or float16 if one holds the values, or float32."""
    if form.bits < 8:
        return _unpack_and_look_up(emitter, encode(values, form), form, hint)
    if form.bits == 8:
        codes = emitter.store(encode(values, form), hint)
        return _look_up(emitter, emitter.add_node("Cast", [codes], hint, to=ElementType.INT32), form, hint)
    if target := onnx_type(form):
        wide = emitter.add_node("Cast", [_store_typed(emitter, values, form, target, hint)], hint, to=ElementType.FLOAT)
        return emitter.add_node("Mul", [wide, emitter.number(target.scale)], hint)
    return _store_halved(emitter, rounded(values, form), hint)


def _store_halved(emitter: Emitter, values: Floats, hint: str) -> str:
    """Write rounded weights as float16 if that holds the values, else as float32."""
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if not np.array_equal(half.astype(np.float32), values):
        return emitter.store(values, hint)
    return emitter.add_node("Cast", [emitter.store(half, hint)], hint, to=ElementType.FLOAT)


def _store_typed(emitter: Emitter, values: Floats, form: AnyFormat, target: OnnxType, hint: str) -> str:
    """Write rounded weights, which are multiples of the scale, as an ONNX type of integers."""
    integers = (rounded(values, form) / np.float32(target.scale)).astype(np.int32)
    codes = (integers & (1 << target.bits) - 1).astype("<u2" if target.bits == 16 else np.uint8)
    data = pack(codes, 4) if target.bits == 4 else codes  # ONNX, too, has the first of two codes in the low bits
    return emitter.store_raw(target.element, values.shape, data.tobytes(), hint)


def _unpack_and_look_up(emitter: Emitter, codes: npt.NDArray[np.unsignedinteger], form: AnyFormat, hint: str) -> str:
    """Write packed codes and the nodes that unpack them.

    Eight codes fill n bytes, and each lies in two neighbours of them; a division and a remainder cut it out.
    """
    bits, count = form.bits, codes.size
    groups = -(-count // CODES_TOGETHER)
    packed_rows = np.zeros(groups * bits, np.uint8)
    data = pack(codes, bits)
    packed_rows[: data.size] = data
    stored = emitter.store(packed_rows.reshape(groups, bits), hint)

    def node(op: str, *inputs: str, **attributes: Any) -> str:
        return emitter.add_node(op, inputs, hint, **attributes)

    def integers(value: npt.ArrayLike, kind: npt.DTypeLike = np.int32) -> str:
        return emitter.constant(value, kind)

    first_bits = bits * np.arange(CODES_TOGETHER)
    stored_bytes = node("Cast", stored, to=ElementType.INT32)
    low = node("Gather", stored_bytes, integers(first_bits // 8), axis=1)
    # the last code ends in the last byte: its upper neighbour is any byte, as the remainder removes it
    high = node("Gather", stored_bytes, integers(np.minimum(first_bits // 8 + 1, bits - 1)), axis=1)
    pairs = node("Add", low, node("Mul", high, integers(256)))
    unpacked = node("Mod", node("Div", pairs, integers(2 ** (first_bits % 8))), integers(1 << bits))
    flat = node("Reshape", _look_up(emitter, unpacked, form, hint), integers([-1], np.int64))
    return node("Reshape", node("Slice", flat, integers([0]), integers([count])), integers(list(codes.shape), np.int64))


def _look_up(emitter: Emitter, codes: str, form: AnyFormat, hint: str) -> str:
    table = np.clip(code_table(form), *float32_range(form))
    return emitter.add_node("Gather", [emitter.constant(table, np.float32), codes], hint)
