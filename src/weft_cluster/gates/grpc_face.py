"""gRPC at a gate: every call is converted to a request over HTTP.

So a gate has one path for requests and one kind of connection to servers. The head of a message becomes JSON, tensors
stay as bytes, and checks are left to the server.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import numpy as np
import orjson

from weft.base.errors import BadRequest, Failed
from weft.serving import grpc_messages, grpc_wire, proto

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before the import, or gRPC's core writes its own log lines

import grpc

from weft.base.errors import RequestError
from weft.http.limits import UNCOUNTED_BYTES, ByteBudget
from weft.http.messages import HttpExchange, HttpResponse, Passage, RequestTarget, parse_target
from weft.serving.endpoints import RPCS, Endpoint
from weft.serving.grpc_calls import listen, refuse, serialized
from weft.serving.grpc_health import NOT_SERVING, SERVING, HealthCheckResponse
from weft.serving.grpc_health import SERVICE as HEALTH_SERVICE
from weft.serving.grpc_messages import InferMessage
from weft.serving.json_helpers import JsonHelpers
from weft.serving.openapi import HEALTH

CALLS = (
    "ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics",
    "RepositoryIndex",
)  # fmt: skip
"""gRPC calls other than inference that a gate answers itself."""
STREAM_AHEAD = 16
"""Most requests of one gRPC stream that are forwarded at a time."""
_CODES = {
    400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
    413: "RESOURCE_EXHAUSTED", 429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED",
}  # fmt: skip
"""HTTP status of a server -> status code of gRPC."""
_HEAD_BYTES = "inference-header-content-length"


class HttpGate(Protocol):
    """The part of a gate that takes requests over HTTP."""

    budget: ByteBudget
    """Limit on the bytes of all bodies that are held at a time."""

    def judge(self, method: str, target: RequestTarget, headers: dict[str, str]) -> HttpResponse | Passage:
        """Admit a request, or return the response that refuses it."""

    def handle(self, exchange: HttpExchange) -> None:
        """Answer an admitted request, now or later."""


class _NoSuccess(RequestError):
    """Raised for a server's answer that is an error; *code*: the status code of gRPC."""

    def __init__(self, code: str, words: str) -> None:
        super().__init__(words)
        self.code = code


class GateGrpc:
    """The calls of ``GRPCInferenceService`` that a gate can answer, and gRPC's own health service."""

    def __init__(self, gate: HttpGate, max_bytes: int) -> None:
        """max_bytes: largest body of a request."""
        self._gate, self._max_bytes = gate, max_bytes
        self._helpers = JsonHelpers()
        """Processes that parse large typed contents."""
        options = [
            ("grpc.max_receive_message_length", min(max_bytes, 2**31 - 1)),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
        ]
        self._server = grpc.aio.server(options=options)
        handlers = {name: self._unary(RPCS[name]) for name in CALLS}
        handlers["ModelInfer"] = grpc.unary_unary_rpc_method_handler(self._infer, response_serializer=serialized)
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._stream, response_serializer=serialized
        )
        health = {"Check": grpc.unary_unary_rpc_method_handler(self._check, response_serializer=serialized)}
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(proto.SERVICE, handlers),
                grpc.method_handlers_generic_handler(HEALTH_SERVICE, health),
            )
        )

    async def start(self, host: str, port: int, credentials: Any = None) -> int:
        """Listen for calls; return the port. RuntimeError if the port cannot be bound."""
        return await listen(self._server, host, port, credentials)

    async def stop(self, grace_s: float) -> None:
        """Accept no new calls, and wait for running ones."""
        await self._server.stop(grace_s)
        await asyncio.to_thread(self._helpers.close)

    # Calls

    def _unary(self, endpoint: Endpoint) -> Any:
        """Return a gRPC handler that answers a call by sending it to the HTTP endpoint of the same name."""
        assert endpoint.rpc
        method, write = endpoint.rpc.method, endpoint.rpc.write
        request_class, _, _ = proto.METHODS[method]

        async def answer_call(data: bytes, context: Any) -> Any:
            try:
                message = grpc_messages.parse_small(request_class, data)
                path = endpoint.path.format(model=quote(getattr(message, "name", ""), safe=""))
                answer = await self._send_to_gate("GET", path, _headers(context), b"")
                if endpoint.schema == HEALTH:
                    ok = answer.status == 200
                    return grpc_wire.filled(f"{method}Response", {"live": ok, "ready": ok})
                return grpc_wire.filled(f"{method}Response", write(orjson.loads(_success_body(answer))))
            except RequestError as error:
                refuse(context, error)
            return b""

        return grpc.unary_unary_rpc_method_handler(answer_call, response_serializer=serialized)

    async def _check(self, _: bytes, context: Any) -> Any:
        """Answer gRPC's own health check by the gate's readiness."""
        ready = (await self._send_to_gate("GET", "/v2/health/ready", {}, b"")).status == 200
        return HealthCheckResponse(status=SERVING if ready else NOT_SERVING)

    async def _infer(self, data: bytes, context: Any) -> Any:
        """Answer a ``ModelInfer`` call; an error ends the call with its status code."""
        try:
            message = grpc_messages.read_infer(data, self._max_bytes)
            return await self._forward_infer(message, _headers(context), context.time_remaining())
        except RequestError as error:
            refuse(context, error)
        return b""

    async def _make_body(self, message: InferMessage, timeout_us: int | None) -> InferBody:
        """Convert a request to the body of one over HTTP; another process converts large typed contents."""
        if message.head is not None:
            return as_body(message.head, message.raws, timeout_us)
        return await self._helpers.call(body_of_data, message.data, timeout_us)

    async def _forward_infer(self, message: InferMessage, headers: dict[str, str], left_s: float | None) -> Any:
        """Send an inference through the gate; *left_s*: seconds until the call's deadline, None without one."""
        body = await self._make_body(message, None if left_s is None else max(1, round(left_s * 1e6)))
        http_headers = headers | {_HEAD_BYTES: str(body.head_bytes), "content-type": "application/octet-stream"}
        version = f"/versions/{quote(message.model_version, safe='')}" if message.model_version else ""
        path = f"/v2/models/{quote(message.model_name, safe='')}{version}/infer"
        answer = await self._send_to_gate("POST", path, http_headers, body.data)
        data = _success_body(answer)
        length = next((value for name, value in answer.headers if name.lower() == _HEAD_BYTES), None)
        return as_message(data, None if length is None else int(length))

    async def _stream(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        """Answer the requests of a stream in their order, up to ``STREAM_AHEAD`` at a time.

        An error is an answer, too, and does not end the stream.
        """
        headers, tasks = _headers(context), asyncio.Queue[asyncio.Task[Any] | None](STREAM_AHEAD)

        async def read() -> None:
            async for data in messages:
                await tasks.put(asyncio.create_task(self._answer_in_stream(data, headers)))
            await tasks.put(None)

        reader = asyncio.create_task(read())
        try:
            while (task := await tasks.get()) is not None:
                yield await task
        finally:
            reader.cancel()
            while not tasks.empty():
                if (unanswered := tasks.get_nowait()) is not None:
                    unanswered.cancel()

    async def _answer_in_stream(self, data: bytes, headers: dict[str, str]) -> Any:
        """The stream message that answers one request, with its result or its error."""
        reply, identity = proto.CLASSES["ModelStreamInferResponse"], dict[str, str]()
        try:
            message = grpc_messages.read_infer(data, self._max_bytes)
            identity = {"id": message.id, "model_name": message.model_name, "model_version": message.model_version}
            answer = reply(infer_response=await self._forward_infer(message, headers, left_s=None))
        except RequestError as error:
            answer = reply(error_message=str(error), infer_response=identity)
        answer.infer_response.parameters["triton_final_response"].bool_param = True
        return answer

    async def _send_to_gate(self, method: str, path: str, headers: dict[str, str], body: bytes) -> HttpResponse:
        """Pass a request to the gate as if it came over HTTP, and wait for the response.

        If the call is cancelled, the request is abandoned.
        """
        target = parse_target(path.encode())
        assert target is not None  # names are quoted
        passage = self._gate.judge(method, target, headers)
        if isinstance(passage, HttpResponse):
            return passage
        answer: asyncio.Future[HttpResponse] = asyncio.get_running_loop().create_future()
        exchange = HttpExchange(partial(_end_with, answer), method, target, headers, body, "")
        exchange.passage = passage
        held_bytes = len(body) if len(body) > UNCOUNTED_BYTES else 0
        try:
            self._gate.budget.take(held_bytes)
            try:
                self._gate.handle(exchange)
                return await answer
            finally:
                self._gate.budget.release(held_bytes)
        finally:
            if on_client_left := exchange.end():  # the call was cancelled
                on_client_left()
            passage.end()


def _end_with(answer: asyncio.Future[HttpResponse], exchange: HttpExchange, response: HttpResponse) -> None:
    """Give a response to the gRPC call that waits for *answer*."""
    exchange.end()
    if not answer.done():
        answer.set_result(response)


def _success_body(answer: HttpResponse) -> bytes:
    """The body of a response with status 200. Raises ``_NoSuccess`` for any other."""
    body = answer.body if isinstance(answer.body, bytes) else b"".join(answer.body)
    if answer.status == 200:
        return body
    try:
        words = str(orjson.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        words = f"a server answered {answer.status}"
    raise _NoSuccess(_CODES.get(answer.status, "INTERNAL"), words)


def _headers(context: Any) -> dict[str, str]:
    return {key: str(value) for key, value in context.invocation_metadata() or () if isinstance(value, str)}


_LENGTH = struct.Struct("<I")  # each element of BYTES is preceded by its length
_AS_BYTES: Mapping[tuple[str, str], Callable[[Any], bytes]] = {
    ("bytes_contents", "BYTES"): lambda texts: b"".join(_LENGTH.pack(len(element)) + element for element in texts),
    ("fp32_contents", "FP32"): lambda values: np.fromiter(values, np.float32).tobytes(),
    ("fp64_contents", "FP64"): lambda values: np.fromiter(values, np.float64).tobytes(),
}
"""Field and datatype of typed contents that JSON cannot hold, as bytes may be no text and floats NaN -> conversion."""
_Response = proto.CLASSES["ModelInferResponse"]


class InferBody(NamedTuple):
    """The body of an inference request over HTTP: JSON, then the bytes of the tensors."""

    data: bytes
    head_bytes: int
    """Length of the JSON at its begin."""


def body_of_data(data: bytes, timeout_us: int | None) -> InferBody:
    """Convert a serialized ``ModelInferRequest`` to the body of an HTTP request; runs in a helper process."""
    return as_body(*grpc_messages.parse_infer(bytes(data)), timeout_us)


def as_body(message: Any, raw_contents: Sequence[bytes | memoryview], timeout_us: int | None) -> InferBody:
    """Convert a ``ModelInferRequest`` to the body of an HTTP request.

    raw_contents: bytes of the inputs, if they are not in the message. timeout_us: time that the call allows; None: no
    limit. The shorter of it and the request's own timeout is sent.
    """
    parameters: dict[str, Any] = grpc_wire.parameters_of(message)
    if timeout_us is not None:
        request_us = parameters.get("timeout")
        is_shorter = isinstance(request_us, int) and 0 < request_us < timeout_us
        parameters["timeout"] = request_us if is_shorter else timeout_us
    raws = iter(raw_contents)
    pieces: list[bytes | memoryview] = []
    head: dict[str, Any] = {
        "inputs": [_input_json(tensor, raws, pieces, raw=bool(raw_contents)) for tensor in message.inputs]
    }
    if message.outputs:
        head["outputs"] = [_output_json(element) for element in message.outputs]
    else:
        parameters["binary_data_output"] = True
    if message.id:
        head["id"] = message.id
    if parameters:
        head["parameters"] = parameters
    text = orjson.dumps(head)
    return InferBody(b"".join([text, *pieces, *raws]), len(text))


def as_message(body: bytes, head_bytes: int | None) -> Any:
    """Convert a server's answer to a ``ModelInferResponse``. Raises Failed if it cannot be read.

    head_bytes: length of the JSON at its begin; None: all of it.
    """
    try:
        return _parse_answer(body, head_bytes)
    except (ValueError, KeyError, TypeError) as error:
        raise Failed(f"a server's answer cannot be read: {type(error).__name__}: {error}") from error


def _parse_answer(body: bytes, head_bytes: int | None) -> Any:
    """Parse JSON and binary outputs to a ``ModelInferResponse``; parameters as of ``as_message``.

    ValueError, KeyError or TypeError for an invalid body, Failed for an output as JSON.
    """
    length = len(body) if head_bytes is None else head_bytes
    head, offset = orjson.loads(body[:length]), length
    message = _Response(
        model_name=head.get("model_name", ""), model_version=head.get("model_version", ""), id=head.get("id", "")
    )
    grpc_wire.fill_parameters(message.parameters, head.get("parameters", {}))
    for output in head["outputs"]:
        tensor = message.outputs.add(name=output["name"], datatype=output["datatype"], shape=output["shape"])
        parameters: dict[str, Any] = dict(output.get("parameters", {}))
        size = parameters.pop("binary_data_size", None)
        if size is None and "data" in output:
            raise Failed(f"output {output['name']!r} came as JSON, though its bytes were asked for")
        message.raw_output_contents.append(body[offset : offset + (size or 0)])  # empty for an output in shared memory
        offset += size or 0
        grpc_wire.fill_parameters(tensor.parameters, parameters)
    return message


def _input_json(tensor: Any, raws: Any, pieces: list[bytes | memoryview], *, raw: bool) -> dict[str, Any]:
    """Return the JSON of an input; its bytes, if it has any, are appended to *pieces*.

    raws: iterator over the request's raw contents. raw: whether the request has such contents.
    """
    head: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
    parameters = grpc_wire.parameters_of(tensor)
    fields = tensor.contents.ListFields()  # (descriptor, values) of each field of typed contents; at most one is set
    field, values = (fields[0][0].name, fields[0][1]) if fields else ("", ())
    if raw and "shared_memory_region" not in parameters:
        piece = next(raws, b"")
        parameters["binary_data_size"] = len(piece)
        pieces.append(piece)
    elif (field, tensor.datatype) in _AS_BYTES:
        piece = _AS_BYTES[field, tensor.datatype](values)
        parameters["binary_data_size"] = len(piece)
        pieces.append(piece)
    elif field == "bytes_contents":
        raise BadRequest(f"input {tensor.name[:128]!r}: {tensor.datatype[:32]} does not go into bytes_contents")
    elif "shared_memory_region" not in parameters:
        head["data"] = list(values)
    return head | ({"parameters": parameters} if parameters else {})


def _output_json(tensor: Any) -> dict[str, Any]:
    """Return the JSON of a requested output: as bytes, unless it goes to shared memory."""
    parameters = grpc_wire.parameters_of(tensor)
    if "shared_memory_region" not in parameters:
        parameters["binary_data"] = True
    return {"name": tensor.name, "parameters": parameters}
