"""Helper process of the server that reads and writes large JSON (``json_helpers``)."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from weft.base.child_processes import answer_calls
from weft.runtime.tensors import Array
from weft.serving import wire
from weft.serving.wire import InferRequest, InferResponse, ModelSpec

NICENESS = 10
"""Niceness of the process: the lanes get the processor first."""


class Strings(NamedTuple):
    """A tensor of strings in its binary form for transport: unpickling strings one by one is slow."""

    data: bytes
    shape: tuple[int, ...]


def packed(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arrays for transport between processes: tensors of strings to ``Strings``."""
    return {
        name: Strings(wire.to_binary(array), array.shape) if array.dtype.kind in "OUS" else array
        for name, array in arrays.items()
    }


def unpacked(arrays: dict[str, Any]) -> dict[str, Array]:
    """Convert arrays back after transport."""
    return {
        name: wire.from_strings(value.data, value.shape) if isinstance(value, Strings) else value
        for name, value in arrays.items()
    }


def decode(body: memoryview, header_length: int | None, model: ModelSpec) -> InferRequest:
    """Decode a request of HTTP (``wire.decode``)."""
    return _prepare_for_transport(wire.decode(memoryview(body), header_length, model))


def encode(response: InferResponse) -> tuple[list[pickle.PickleBuffer], int | None]:
    """Encode an answer for HTTP (``wire.encode``)."""
    parts, length = wire.encode(_unpack_response(response))
    return list(map(pickle.PickleBuffer, parts)), length


def decode_message(message: memoryview, model: ModelSpec) -> InferRequest:
    """Parse and decode a request of gRPC (``grpc_wire.decode_infer``)."""
    from weft.serving import grpc_messages, grpc_wire  # here, because protobuf is needed for gRPC only

    head, raws = grpc_messages.parse_infer(bytes(message))
    return _prepare_for_transport(grpc_wire.decode_infer(head, model, raws))


def encode_message(response: InferResponse) -> pickle.PickleBuffer:
    """Encode and serialize an answer for gRPC (``grpc_wire.encode_infer``)."""
    from weft.serving import grpc_wire

    return pickle.PickleBuffer(grpc_wire.encode_infer(_unpack_response(response)).SerializeToString())


def _prepare_for_transport(request: InferRequest) -> InferRequest:
    """Convert the inputs of a request for transport to the server."""
    return replace(request, inputs=packed(request.inputs))


def _unpack_response(response: InferResponse) -> InferResponse:
    """Convert the outputs of a response back after transport."""
    return replace(response, outputs=unpacked(dict(response.outputs)))


def _lower_priority() -> None:
    """Lower the priority of this process for processor and memory, and ignore signals, which are for the server."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    with suppress(OSError, AttributeError):
        os.nice(NICENESS)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # the first process to be killed if memory runs out


def main() -> None:
    """Answer the server's calls of functions until it closes the pipe."""
    _lower_priority()
    answer_calls()
