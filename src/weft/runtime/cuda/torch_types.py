"""Types of numbers as torch has them and as ONNX numbers them, and memory of numpy as torch's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from onnx import TensorProto

TYPES: Mapping[int, Any] = {
    TensorProto.FLOAT: torch.float32, TensorProto.FLOAT16: torch.float16, TensorProto.DOUBLE: torch.float64,
    TensorProto.INT64: torch.int64, TensorProto.INT32: torch.int32, TensorProto.INT16: torch.int16,
    TensorProto.INT8: torch.int8, TensorProto.UINT8: torch.uint8, TensorProto.BOOL: torch.bool,
    TensorProto.UINT16: torch.uint16, TensorProto.UINT32: torch.uint32, TensorProto.UINT64: torch.uint64,
    TensorProto.BFLOAT16: torch.bfloat16,
}  # fmt: skip
NUMBERED = {kind: int(number) for number, kind in TYPES.items()}


def as_torch(tensor: Any) -> Any:
    """An array of numpy over the same memory; a tensor of torch's own as it is."""
    if not isinstance(tensor, np.ndarray):
        return tensor
    if tensor.dtype.name == "bfloat16":  # numpy has it from another package, which torch does not know
        return torch.from_numpy(tensor.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(tensor)
