"""Files of tensors as adapters come in: ``read_safetensors``.

Eight bytes say how long a header is; the header, in JSON, says of each tensor its type, its shape and where its bytes
are among those that follow.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from weft.base.errors import InputError
from weft_stitch.net import Array

_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_MOST_HEADER = 1 << 27
"""Bytes; more than any header has."""


def read_safetensors(path: Path) -> dict[str, Array]:
    """All tensors of a file, in float32."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(_MOST_HEADER, len(data) - 8):
        raise InputError(f"{path}: is no safetensors file, or not whole; download or save it again")
    try:
        header = json.loads(data[8 : 8 + length])
        told = {name: each for name, each in header.items() if name != "__metadata__"}
        return {name: _tensor(name, each, memoryview(data)[8 + length :]) for name, each in told.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InputError(f"{path}: is a damaged safetensors file: {error}; download or save it again") from error


def _tensor(name: str, told: dict[str, Any], data: memoryview) -> Array:
    kind, shape, (start, end) = told["dtype"], tuple(told["shape"]), told["data_offsets"]
    if kind not in _TYPES:
        raise ValueError(f"{name} is of type {kind}, not one of {', '.join(_TYPES)}")
    stored = np.dtype(_TYPES[kind])
    if min(shape, default=0) < 0 or not 0 <= start <= end <= len(data) or end - start != prod(shape) * stored.itemsize:
        raise ValueError(f"the bytes of {name} are not those of its shape, {shape}")
    found = np.frombuffer(data[start:end], stored).reshape(shape)
    if kind == "BF16":  # the upper half of a float32
        return (found.astype(np.uint32) << 16).view(np.float32)
    return found.astype(np.float32)
