"""Which weights two model files have in common, tensor by tensor: a quick look, not what stitching finds out."""

from __future__ import annotations

import hashlib
from pathlib import Path

import onnx
from onnx import TensorProto

from weft.base.errors import ModelError

LEAST_BYTES = 1024
"""Smaller tensors, such as shapes and scales, are equal by chance."""


def weight_digests(path: str | Path) -> dict[str, int]:
    """Digest of every weight tensor of a file -> its bytes."""
    try:
        graph = onnx.load_model(str(path)).graph
    except Exception as error:  # protobuf and the file system each raise their own kinds
        raise ModelError(f"{path}: cannot be read as an ONNX model; export or download it again") from error
    found: dict[str, int] = {}
    for tensor in graph.initializer:
        data = _data(tensor)
        if len(data) >= LEAST_BYTES:
            key = hashlib.sha256(f"{tensor.data_type}:{list(tensor.dims)}:".encode() + data).hexdigest()
            found[key] = len(data)
    return found


def shared_share(one: dict[str, int], other: dict[str, int]) -> float:
    """Bytes that two files have in common over those of the smaller one."""
    smaller = min(sum(one.values()), sum(other.values()))
    return sum(one[key] for key in one.keys() & other.keys()) / smaller if smaller else 0.0


def _data(tensor: TensorProto) -> bytes:
    return tensor.raw_data or onnx.numpy_helper.to_array(tensor).tobytes()
