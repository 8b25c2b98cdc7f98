"""Weights in a number format, stored in few bits and turned back into float32 by the graph itself.

Three ways, each exact: an ONNX type with a scale; codes without gaps, which standard operators take apart and look up
in a table (onnxruntime does it once, when a session is opened); float16 or float32 values that are already rounded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from weft.models.element_types import ElementType
from weft_tune.export.emitter import Emitter, OnnxType, onnx_type
from weft_tune.numbers.arrays import code_table, encode, pack, rounded
from weft_tune.numbers.configuration import AnyFormat
from weft_tune.numbers.plain import float32_range

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
    whole = (rounded(values, form) / np.float32(target.scale)).astype(np.int32)
    low = (whole & (1 << target.bits) - 1).astype("<u2" if target.bits == 16 else np.uint8)
    data = pack(low, 4) if target.bits == 4 else low  # ONNX, too, has the first of two codes in the low bits
    return emitter.store_raw(target.element, values.shape, data.tobytes(), hint)


def _unpack_and_look_up(emitter: Emitter, codes: npt.NDArray[np.unsignedinteger], form: AnyFormat, hint: str) -> str:
    """Write packed codes and the nodes that unpack them.

    Eight codes fill n bytes, and each lies in two neighbours of them; a division and a remainder cut it out.
    """
    bits, count = form.bits, codes.size
    groups = -(-count // CODES_TOGETHER)
    stream = np.zeros(groups * bits, np.uint8)
    data = pack(codes, bits)
    stream[: data.size] = data
    stored = emitter.store(stream.reshape(groups, bits), hint)

    def do(op: str, *inputs: str, **attributes: Any) -> str:
        return emitter.add_node(op, inputs, hint, **attributes)

    def whole(value: npt.ArrayLike, kind: npt.DTypeLike = np.int32) -> str:
        return emitter.constant(value, kind)

    begins = bits * np.arange(CODES_TOGETHER)
    octets = do("Cast", stored, to=ElementType.INT32)
    low = do("Gather", octets, whole(begins // 8), axis=1)
    # the last code ends in the last byte: its upper neighbour is any byte, as the remainder removes it
    high = do("Gather", octets, whole(np.minimum(begins // 8 + 1, bits - 1)), axis=1)
    pairs = do("Add", low, do("Mul", high, whole(256)))
    cut = do("Mod", do("Div", pairs, whole(2 ** (begins % 8))), whole(1 << bits))
    flat = do("Reshape", _look_up(emitter, cut, form, hint), whole([-1], np.int64))
    return do("Reshape", do("Slice", flat, whole([0]), whole([count])), whole(list(codes.shape), np.int64))


def _look_up(emitter: Emitter, codes: str, form: AnyFormat, hint: str) -> str:
    table = np.clip(code_table(form), *float32_range(form))
    return emitter.add_node("Gather", [emitter.constant(table, np.float32), codes], hint)
