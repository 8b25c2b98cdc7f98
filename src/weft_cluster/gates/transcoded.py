"""Messages of gRPC as requests over HTTP, and the answers back: the head becomes JSON, tensors stay the bytes they are.

Nothing is checked that the server will check anyway.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from weft.base.errors import BadRequest, Failed
from weft.serving import grpc_messages, grpc_wire, proto

_LENGTH = struct.Struct("<I")
_AS_BYTES: Mapping[tuple[str, str], Callable[[Any], bytes]] = {
    ("bytes_contents", "BYTES"): lambda texts: b"".join(_LENGTH.pack(len(element)) + element for element in texts),
    ("fp32_contents", "FP32"): lambda values: np.fromiter(values, np.float32).tobytes(),
    ("fp64_contents", "FP64"): lambda values: np.fromiter(values, np.float64).tobytes(),
}
"""Typed contents that JSON cannot hold: bytes that are no text, and numbers that are none."""
_Response = proto.CLASSES["ModelInferResponse"]


class InferBody(NamedTuple):
    """The body of a request for a result."""

    data: bytes
    head_bytes: int
    """How many of them are JSON."""


def body_of_data(data: bytes, timeout_us: int | None) -> InferBody:
    """A ``ModelInferRequest`` that is not parsed as the body of a request."""
    return as_body(*grpc_messages.parse_infer(bytes(data)), timeout_us)


def as_body(message: Any, raw_contents: Sequence[bytes | memoryview], timeout_us: int | None) -> InferBody:
    """A ``ModelInferRequest`` as the body of a request; *timeout_us*: what its caller allows, if anything."""
    parameters: dict[str, Any] = grpc_wire.parameters_of(message)
    if timeout_us is not None:
        asked = parameters.get("timeout")
        shorter = isinstance(asked, int) and 0 < asked < timeout_us
        parameters["timeout"] = asked if shorter else timeout_us
    raws = iter(raw_contents)
    pieces: list[bytes | memoryview] = []
    head: dict[str, Any] = {"inputs": [_input(tensor, raws, pieces, bool(raw_contents)) for tensor in message.inputs]}
    if message.outputs:
        head["outputs"] = [_output(element) for element in message.outputs]
    else:
        parameters["binary_data_output"] = True
    if message.id:
        head["id"] = message.id
    if parameters:
        head["parameters"] = parameters
    text = orjson.dumps(head)
    return InferBody(b"".join([text, *pieces, *raws]), len(text))


def as_message(body: bytes, head_bytes: int | None) -> Any:
    """The answer of a server as a ``ModelInferResponse``; Failed where it is none."""
    try:
        return _read(body, head_bytes)
    except (ValueError, KeyError, TypeError) as error:
        raise Failed(f"a server's answer cannot be read: {type(error).__name__}: {error}") from error


def _read(body: bytes, head_bytes: int | None) -> Any:
    length = len(body) if head_bytes is None else head_bytes
    head, at = orjson.loads(body[:length]), length
    message = _Response(
        model_name=head.get("model_name", ""), model_version=head.get("model_version", ""), id=head.get("id", "")
    )
    grpc_wire.fill_parameters(message.parameters, head.get("parameters", {}))
    for output in head["outputs"]:
        tensor = message.outputs.add(name=output["name"], datatype=output["datatype"], shape=output["shape"])
        about: dict[str, Any] = dict(output.get("parameters", {}))
        size = about.pop("binary_data_size", None)
        if size is None and "data" in output:
            raise Failed(f"output {output['name']!r} came as JSON, though its bytes were asked for")
        message.raw_output_contents.append(body[at : at + (size or 0)])  # one that lies in a region has none here
        at += size or 0
        grpc_wire.fill_parameters(tensor.parameters, about)
    return message


def _input(tensor: Any, raws: Any, pieces: list[bytes | memoryview], raw: bool) -> dict[str, Any]:
    about: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
    parameters = grpc_wire.parameters_of(tensor)
    fields = tensor.contents.ListFields()
    if raw and "shared_memory_region" not in parameters:
        piece = next(raws, b"")
        parameters["binary_data_size"] = len(piece)
        pieces.append(piece)
    elif fields and (fields[0][0].name, tensor.datatype) in _AS_BYTES:
        piece = _AS_BYTES[fields[0][0].name, tensor.datatype](fields[0][1])
        parameters["binary_data_size"] = len(piece)
        pieces.append(piece)
    elif fields and fields[0][0].name == "bytes_contents":
        raise BadRequest(f"input {tensor.name[:128]!r}: {tensor.datatype[:32]} does not go into bytes_contents")
    elif "shared_memory_region" not in parameters:
        about["data"] = list(fields[0][1]) if fields else []
    return about | ({"parameters": parameters} if parameters else {})


def _output(tensor: Any) -> dict[str, Any]:
    parameters = grpc_wire.parameters_of(tensor)
    if "shared_memory_region" not in parameters:
        parameters["binary_data"] = True
    return {"name": tensor.name, "parameters": parameters}
