"""The request a stream sends: what the model's metadata asks for, filled with seeded values, as bytes.

Tensors travel in binary where the server announces that it takes them so, as JSON otherwise.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

import numpy as np

from weft.errors import InputError, WorkloadError, unknown_name
from weft.load.client import Target, request_bytes
from weft.runtime.tensors import DATATYPES, Array, TensorSpec
from weft.workloads.online import Stream

DEADLINES = ("strict", "soft", "none")
"""strict: the server may give up at the deadline; soft: it knows it; none: it is not told."""

BINARY = "binary_tensor_data"
"""The name under which servers announce the extension."""

TRITON_PRIORITY = {9: 1, 3: 2, 1: 3}
WORD = b"weft"
MAX_TENSOR_BYTES = 1 << 30


def served_name(stream: Stream) -> str:
    """The name to ask a server for: a model file is known by its name without folder and ending."""
    return PurePath(stream.model).stem if stream.model.endswith(".onnx") else stream.model


def model_path(stream: Stream) -> str:
    return f"v2/models/{quote(served_name(stream), safe='')}"


def read_inputs(model: str, metadata: Any) -> tuple[TensorSpec, ...]:
    """The inputs that a model's metadata lists."""
    try:
        inputs = tuple(
            TensorSpec(each["name"], each["datatype"], tuple(int(size) for size in each["shape"]))
            for each in metadata["inputs"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{model}: its metadata does not say what its inputs are ({error!r})") from None
    for spec in inputs:
        if spec.datatype not in DATATYPES:
            raise InputError(
                f"{model}: its input {spec.name!r} has the data type {spec.datatype!r}, which is not known"
            )
    return inputs


def input_shape(stream: Stream, spec: TensorSpec) -> tuple[int, ...]:
    """The shape to send: free dimensions from the stream's shapes; a first one is the batch, 1."""
    given = stream.shapes.get(spec.name)
    if given is None:
        shape = tuple(1 if size < 0 and place == 0 else size for place, size in enumerate(spec.shape))
        if any(size < 0 for size in shape):
            raise WorkloadError(
                f"{stream.model}: its input {spec.name!r} has the free shape {_written(spec.shape)}; "
                f"say which to send, as --shape {stream.model}:{spec.name}=1x128 or in the stream's shapes"
            )
        return shape
    if len(given) != len(spec.shape) or any(
        want not in (-1, have) for have, want in zip(given, spec.shape, strict=True)
    ):
        raise WorkloadError(
            f"{stream.model}: shape {_written(given)} does not fit its input {spec.name!r}, {_written(spec.shape)}"
        )
    return given


def build_request(
    stream: Stream,
    inputs: Sequence[TensorSpec],
    target: Target,
    *,
    deadlines: str = "strict",
    binary: bool = True,
    key: str | None = None,
    seed: Sequence[int] = (0,),
) -> bytes:
    """The whole HTTP request of a stream, the same for the same seed."""
    for name in stream.shapes:
        if name not in (known := [spec.name for spec in inputs]):
            raise WorkloadError(f"{stream.model}: " + unknown_name("input", name, known))
    rng = np.random.default_rng(seed)
    tensors = [_values(stream, spec, input_shape(stream, spec), rng) for spec in inputs]
    parameters = _parameters(stream, deadlines)
    entries: list[dict[str, object]] = []
    raw = b""
    for spec, tensor in zip(inputs, tensors, strict=True):
        entry: dict[str, object] = {"name": spec.name, "shape": list(tensor.shape), "datatype": spec.datatype}
        if binary:
            data = _raw(tensor)
            raw += data
            entry["parameters"] = {"binary_data_size": len(data)}
        else:
            entry["data"] = _listed(tensor)
        entries.append(entry)
    if binary:
        parameters["binary_data_output"] = True
    text = json.dumps({"parameters": parameters, "inputs": entries}).encode()
    head = f"Inference-Header-Content-Length: {len(text)}\r\nContent-Type: application/octet-stream\r\n"
    return request_bytes(
        target,
        "POST",
        f"{model_path(stream)}/infer",
        key=key,
        head=head if binary else "Content-Type: application/json\r\n",
        body=text + raw,
    )


def _parameters(stream: Stream, deadlines: str) -> dict[str, object]:
    parameters: dict[str, object] = {"priority": TRITON_PRIORITY[stream.priority]}
    if deadlines == "strict":
        parameters["timeout"] = max(1, round(stream.deadline_ms * 1e3))
    elif deadlines == "soft":
        parameters["weft_slo_ms"] = stream.deadline_ms
    return parameters


def _values(stream: Stream, spec: TensorSpec, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Random values that any model takes: whole numbers are 0 or 1, because they may be looked up in a table."""
    kind = DATATYPES[spec.datatype]
    if float(np.prod(shape, dtype=float)) * max(kind.itemsize, 8) > MAX_TENSOR_BYTES:
        raise WorkloadError(f"{stream.model}: its input {spec.name!r} of shape {_written(shape)} is too large to send")
    if kind == np.object_:
        return np.full(shape, WORD, np.object_)
    if kind.kind == "f":
        return rng.standard_normal(shape, np.float32).astype(kind)
    return rng.integers(0, 2, shape).astype(kind)


def _raw(tensor: Array) -> bytes:
    if tensor.dtype == np.object_:
        return (struct.pack("<I", len(WORD)) + WORD) * tensor.size
    return tensor.astype(tensor.dtype.newbyteorder("<"), copy=False).tobytes()


def _listed(tensor: Array) -> list[Any]:
    if tensor.dtype == np.object_:
        return [WORD.decode()] * tensor.size
    values: list[Any] = tensor.ravel().tolist()
    return values


def _written(shape: Sequence[int]) -> str:
    return "x".join("?" if size < 0 else str(size) for size in shape) or "()"


def announced(server: Mapping[str, Any], extension: str) -> bool:
    """Whether a server's metadata lists an extension."""
    extensions = server.get("extensions")
    return isinstance(extensions, list) and extension in extensions
