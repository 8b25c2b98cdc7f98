"""Weights in a number format, stored in few bits and turned back into float32 by the graph itself.

Three ways, each exact: an ONNX type with a scale; codes without gaps, which standard operators take apart and look up
in a table (onnxruntime does it once, when a session is made); float16 or float32 values that are already rounded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, numpy_helper

from weft_tune.export.emitter import Emitter
from weft_tune.export.types import Typed, typed
from weft_tune.numbers.arrays import code_table, encode, rounded
from weft_tune.numbers.configuration import AnyFormat
from weft_tune.numbers.packing import pack
from weft_tune.numbers.plain import float32_range

Floats = npt.NDArray[np.float32]

CODES_TOGETHER = 8
"""So many codes of n bits are n bytes."""


def plain(emitter: Emitter, values: Floats, form: AnyFormat, hint: str) -> str:
    """Weights rounded and stored as float32."""
    return emitter.stored(numpy_helper.from_array(rounded(values, form), ""), hint)


def dequantised(emitter: Emitter, values: Floats, form: AnyFormat, hint: str) -> str:
    """Weights as integers with DequantizeLinear; for formats that are a type of integers."""
    found = typed(form)
    assert found is not None and found.integer
    name = _stored(emitter, values, form, found, hint)
    return emitter.node("DequantizeLinear", [name, emitter.number(found.scale), emitter.zero(found.element)], hint)


def packed(emitter: Emitter, values: Floats, form: AnyFormat, hint: str) -> str:
    """Codes of exactly the format's bits up to 8; then int16 or float16, if one holds the values, or float32."""
    if form.bits < 8:
        return _looked_up(emitter, encode(values, form), form, hint)
    if form.bits == 8:
        codes = emitter.stored(numpy_helper.from_array(encode(values, form), ""), hint)
        return _table(emitter, emitter.node("Cast", [codes], hint, to=TensorProto.INT32), form, hint)
    found = typed(form)
    if found:
        wide = emitter.node("Cast", [_stored(emitter, values, form, found, hint)], hint, to=TensorProto.FLOAT)
        return emitter.node("Mul", [wide, emitter.number(found.scale)], hint)
    return _halved(emitter, rounded(values, form), hint)


def _halved(emitter: Emitter, held: Floats, hint: str) -> str:
    """Weights as float16 if that holds the values, which are rounded already."""
    with np.errstate(over="ignore"):
        half = held.astype(np.float16)
    if not np.array_equal(half.astype(np.float32), held):
        return emitter.stored(numpy_helper.from_array(held, ""), hint)
    return emitter.node("Cast", [emitter.stored(numpy_helper.from_array(half, ""), hint)], hint, to=TensorProto.FLOAT)


def _stored(emitter: Emitter, values: Floats, form: AnyFormat, found: Typed, hint: str) -> str:
    tensor = onnx.TensorProto(data_type=found.element, dims=values.shape)
    tensor.raw_data = _raw(rounded(values, form), found)
    return emitter.stored(tensor, hint)


def _raw(held: Floats, found: Typed) -> bytes:
    """The bytes of values that are multiples of the scale: two to a byte for 4 bits, the first one low."""
    whole = (held / np.float32(found.scale)).astype(np.int32)
    if found.bits == 16:
        return whole.astype("<u2").tobytes()
    low = (whole & (1 << found.bits) - 1).astype(np.uint8)
    return pack(low, 4).tobytes() if found.bits == 4 else low.tobytes()


def _looked_up(emitter: Emitter, codes: npt.NDArray[np.unsignedinteger], form: AnyFormat, hint: str) -> str:
    """Eight codes fill n bytes, and each lies in two neighbours of them; a division and a remainder cut it out."""
    bits, count = form.bits, codes.size
    groups = -(-count // CODES_TOGETHER)
    stream = np.zeros(groups * bits, np.uint8)
    data = pack(codes, bits)
    stream[: data.size] = data
    stored = emitter.stored(numpy_helper.from_array(stream.reshape(groups, bits), ""), hint)

    def do(op: str, *inputs: str, **attributes: Any) -> str:
        return emitter.node(op, inputs, hint, **attributes)

    def whole(value: npt.ArrayLike, kind: npt.DTypeLike = np.int32) -> str:
        return emitter.constant(value, kind)

    begins = bits * np.arange(CODES_TOGETHER)
    octets = do("Cast", stored, to=TensorProto.INT32)
    low = do("Gather", octets, whole(begins // 8), axis=1)
    high = do("Gather", octets, whole(np.minimum(begins // 8 + 1, bits - 1)), axis=1)
    pairs = do("Add", low, do("Mul", high, whole(256)))
    cut = do("Mod", do("Div", pairs, whole(2 ** (begins % 8))), whole(1 << bits))
    flat = do("Reshape", _table(emitter, cut, form, hint), whole([-1], np.int64))
    return do("Reshape", do("Slice", flat, whole([0]), whole([count])), whole(list(codes.shape), np.int64))


def _table(emitter: Emitter, codes: str, form: AnyFormat, hint: str) -> str:
    table = np.clip(code_table(form), *float32_range(form))
    return emitter.node("Gather", [emitter.constant(table, np.float32), codes], hint)
