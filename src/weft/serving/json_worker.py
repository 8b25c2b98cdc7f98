"""What a process beside the server does: read and write large JSON, which holds Python's lock in whatever thread.

It takes jobs from its standard input and ends with it. A message is a pickle whose arrays follow it as they are.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from weft.base.errors import RequestError
from weft.runtime.tensors import Array
from weft.serving import wire
from weft.serving.wire import InferRequest, InferResponse, ModelSpec

NICENESS = 10
"""The processor goes to the lanes first."""

_COUNT = struct.Struct("<Q")


class Strings(NamedTuple):
    """A tensor of strings on its way: pickled one by one they would take long to unpack."""

    data: bytes
    shape: tuple[int, ...]


class DecodeJob(NamedTuple):
    """Read a request that came over HTTP."""

    body: pickle.PickleBuffer | memoryview
    header_length: int | None
    model: ModelSpec


class EncodeJob(NamedTuple):
    """Write an answer for HTTP."""

    response: InferResponse


class DecodeMessageJob(NamedTuple):
    """Read a request that came over gRPC."""

    message: pickle.PickleBuffer | memoryview
    model: ModelSpec


class EncodeMessageJob(NamedTuple):
    """Write an answer for gRPC."""

    response: InferResponse


class CallJob(NamedTuple):
    """Call a function of a module with a message for gRPC and other arguments, of which only it knows."""

    function: Callable[..., object]
    message: Any
    arguments: tuple[object, ...]


# Messages


def send(stream: BinaryIO, value: object) -> None:
    """Write a message."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    stream.write(b"".join(map(_COUNT.pack, [len(parts), *(part.nbytes for part in parts)])))
    for part in parts:
        stream.write(part)
    stream.flush()


def receive(stream: BinaryIO) -> Any:
    """Read a message; EOFError when there is none."""
    (count,) = _COUNT.unpack(_exactly(stream, _COUNT.size))
    sizes = [_COUNT.unpack(_exactly(stream, _COUNT.size))[0] for _ in range(count)]
    head, *buffers = [_exactly(stream, size) for size in sizes]
    return pickle.loads(head, buffers=buffers)


def _exactly(stream: BinaryIO, size: int) -> memoryview:
    view, at = np.empty(size, np.uint8).data, 0  # a bytearray would be cleared first, under Python's lock
    while at < size:
        read = stream.readinto(view[at:])  # type: ignore[attr-defined]
        if not read:
            raise EOFError("the other side is gone")
        at += read
    return view


def packed(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays as they travel."""
    return {
        name: Strings(wire.to_binary(array), array.shape) if array.dtype.kind in "OUS" else array
        for name, array in arrays.items()
    }


def unpacked(arrays: dict[str, Any]) -> dict[str, Array]:
    """Arrays that have travelled."""
    return {
        name: wire.from_strings(each.data, each.shape) if isinstance(each, Strings) else each
        for name, each in arrays.items()
    }


# Work


def done(job: object) -> Any:
    """What comes of a job."""
    match job:
        case DecodeJob(body, header_length, model):
            return _travelling(wire.decode(memoryview(body), header_length, model))
        case EncodeJob(response):
            parts, length = wire.encode(_arrived(response))
            return list(map(pickle.PickleBuffer, parts)), length
        case DecodeMessageJob(message, model):
            from weft.serving import grpc_messages, grpc_wire

            head, raws = grpc_messages.parse_infer(bytes(message))
            return _travelling(grpc_wire.decode_infer(head, model, raws))
        case EncodeMessageJob(response):
            from weft.serving import grpc_wire

            return pickle.PickleBuffer(grpc_wire.encode_infer(_arrived(response)).SerializeToString())
        case CallJob(function, message, arguments):
            return function(message, *arguments)
    raise TypeError(f"no such job: {type(job).__name__}")


def _travelling(request: InferRequest) -> InferRequest:
    return replace(request, inputs=packed(request.inputs))


def _arrived(response: InferResponse) -> InferResponse:
    return replace(response, outputs=unpacked(dict(response.outputs)))


def work(jobs: BinaryIO, answers: BinaryIO) -> None:
    """Do jobs until there are no more; an answer is what came of it, or the error."""
    while True:
        try:
            job = receive(jobs)
        except EOFError:
            return
        try:
            answer = done(job)
        except RequestError as error:
            answer = error
        except Exception as error:
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        del job
        send(answers, answer)
        del answer


def _settle() -> None:
    """Let others go first, in time and when memory is short; end with the server, not with a signal meant for it."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    with suppress(OSError, AttributeError):
        os.nice(NICENESS)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def main() -> None:
    """Work for the process that started this one."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever is printed goes elsewhere
    _settle()
    with suppress(BrokenPipeError):
        work(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
