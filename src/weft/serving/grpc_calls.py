"""Handlers of single gRPC calls, refusals without exceptions, and listening."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from weft.base.errors import RequestError

NOT_RECEIVED = "NOT_RECEIVED"
"""In place of a status code: gRPC ended the call before its message had arrived, because it was larger than
``max_body_bytes``, the client cancelled it, or there were too many calls. gRPC's Python server does not say which."""

Answer = Callable[[bytes, Any], Awaitable[Any]]


async def listen(server: Any, host: str, port: int, credentials: Any = None) -> int:
    """Start a gRPC server at an address and return its port; RuntimeError if that is not possible."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    bound_port = (
        server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
    )
    await server.start()
    return int(bound_port)


def serialized(message: Any) -> bytes:
    """Serialize a message, unless it is bytes already."""
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())


def refuse(context: Any, error: RequestError) -> None:
    """Set the status of a call to an error; what its handler returns afterwards is not sent.

    The error loses its traceback: frames in it refer to the future that holds the error, and to the request.
    """
    context.set_code(grpc.StatusCode[error.code])
    context.set_details(str(error))
    error.__traceback__ = None


class UnaryCall(grpc.RpcMethodHandler):  # type: ignore[misc]
    """The handler of one call with one message.

    answer: computes the answer to the message. ended: called when the last byte of the answer was sent, or the call was
    cancelled, with whether a message had arrived.

    gRPC holds the handler until that moment, so its finalizer, which reference counting runs at once, calls *ended*.
    ``context.add_done_callback`` would do the same, but keeps the call in a reference cycle.
    """

    __slots__ = ("_answer", "_ended", "_received")

    request_streaming = response_streaming = False
    request_deserializer = None
    response_serializer = staticmethod(serialized)

    def __init__(self, answer: Answer, ended: Callable[[bool], None]) -> None:
        self._answer, self._ended, self._received = answer, ended, False

    async def unary_unary(self, data: bytes, context: Any) -> Any:
        """Answer the message."""
        self._received = True
        return await self._answer(data, context)

    def __del__(self) -> None:
        self._ended(self._received)


class RefusedCall(grpc.RpcMethodHandler):  # type: ignore[misc]
    """Refuses a call, whether it streams or not, without reading its messages; *refused* is called with its context."""

    request_streaming = response_streaming = True
    request_deserializer = response_serializer = None

    def __init__(self, error: RequestError, refused: Callable[[Any], None]) -> None:
        self._error, self._refused = error, refused

    async def stream_stream(self, messages: Any, context: Any) -> None:
        """Set the status; no message is written."""
        refuse(context, self._error)
        self._refused(context)


class LostAnswers(logging.Filter):
    """Keeps gRPC's traceback out of the log where an answer could not be written because its call had ended.

    The client disconnected or its deadline passed while the answer was sent: nothing failed here, and the answer is
    counted already.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop records of the exception that gRPC raises when it cannot send."""
        exception_class = record.exc_info[0] if record.exc_info else None
        return exception_class is None or exception_class.__name__ != "ExecuteBatchError"
