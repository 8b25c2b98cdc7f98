"""Element types of tensors as ONNX numbers them: ``ElementType``, with their width and their type in numpy."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np


class ElementType(IntEnum):
    """``TensorProto.DataType`` of the ONNX standard; files and protocol buffers hold the plain number."""

    UNDEFINED = 0
    FLOAT = 1
    UINT8 = 2
    INT8 = 3
    UINT16 = 4
    INT16 = 5
    INT32 = 6
    INT64 = 7
    STRING = 8
    BOOL = 9
    FLOAT16 = 10
    DOUBLE = 11
    UINT32 = 12
    UINT64 = 13
    COMPLEX64 = 14
    COMPLEX128 = 15
    BFLOAT16 = 16
    FLOAT8E4M3FN = 17
    FLOAT8E4M3FNUZ = 18
    FLOAT8E5M2 = 19
    FLOAT8E5M2FNUZ = 20
    UINT4 = 21
    INT4 = 22
    FLOAT4E2M1 = 23
    FLOAT8E8M0 = 24
    UINT2 = 25
    INT2 = 26
    FLOAT6E2M3 = 27
    FLOAT6E3M2 = 28


FLOATS = frozenset({ElementType.FLOAT, ElementType.FLOAT16, ElementType.DOUBLE, ElementType.BFLOAT16})
"""Types that weights and activations are computed in."""

_BITS = {
    **dict.fromkeys(("UINT2", "INT2"), 2),
    **dict.fromkeys(("UINT4", "INT4", "FLOAT4E2M1"), 4),
    **dict.fromkeys(("FLOAT6E2M3", "FLOAT6E3M2"), 6),
    **dict.fromkeys(("UINT8", "INT8", "BOOL", "STRING"), 8),
    **dict.fromkeys(("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "FLOAT8E8M0"), 8),
    **dict.fromkeys(("UINT16", "INT16", "FLOAT16", "BFLOAT16"), 16),
    **dict.fromkeys(("UINT64", "INT64", "DOUBLE", "COMPLEX64"), 64),
    "COMPLEX128": 128,
}
_BITS_BY_NUMBER = {int(kind): _BITS.get(kind.name, 32) for kind in ElementType}


def dtype_bits(kind: int) -> int:
    """Bits of a stored value of element type *kind*; a string counts as 8, and an unknown type as 32."""
    return _BITS_BY_NUMBER.get(kind, 32)


def type_name(kind: int) -> str:
    """The name of a type in lower case, or its number if this version of the standard does not know it."""
    try:
        return ElementType(kind).name.lower()
    except ValueError:
        return str(int(kind))


def numpy_dtype(kind: int) -> np.dtype[Any]:
    """The numpy type of element type *kind*, or ml_dtypes' type if numpy has none; ``KeyError`` if it is unknown."""
    from onnx import helper  # imported here because it takes long and few callers need it

    return np.dtype(helper.tensor_dtype_to_np_dtype(int(kind)))


def element_type(dtype: np.dtype[Any]) -> int:
    """ONNX's number for a type of numpy or ml_dtypes; the object type means strings."""
    from onnx import helper

    return int(ElementType.STRING if dtype == np.object_ else helper.np_dtype_to_tensor_dtype(dtype))
