"""A gate over gRPC: a call becomes a request over HTTP (``transcoded``).

So there is one way through a gate and one kind of connection behind it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Protocol
from urllib.parse import quote

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # or its core writes lines of its own beside our errors

import grpc
import orjson

from weft.base.errors import RequestError
from weft.http.limits import UNCOUNTED_BYTES, ByteBudget
from weft.http.messages import HttpExchange, HttpResponse, Passage, RequestTarget, parse_target
from weft.serving import grpc_messages, grpc_wire, proto
from weft.serving.endpoints import RPCS, Endpoint
from weft.serving.grpc_calls import listen, refuse, serialized
from weft.serving.grpc_health import NOT_SERVING, SERVING, HealthCheckResponse
from weft.serving.grpc_health import SERVICE as HEALTH_SERVICE
from weft.serving.grpc_messages import InferMessage
from weft.serving.json_helpers import JsonHelpers
from weft.serving.openapi import HEALTH
from weft_cluster.gates.transcoded import InferBody, as_body, as_message, body_of_data

CALLS = (
    "ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics",
    "RepositoryIndex",
)  # fmt: skip
"""gRPC calls other than inference that a gate answers itself."""
STREAM_AHEAD = 16
"""Requests of one stream that are under way at a time."""
_CODES = {
    400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
    413: "RESOURCE_EXHAUSTED", 429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED",
}  # fmt: skip
"""HTTP status of a server -> status code of gRPC."""
_HEAD_BYTES = "inference-header-content-length"


class HttpWay(Protocol):
    """How a gate takes requests over HTTP."""

    budget: ByteBudget

    def judge(self, method: str, target: RequestTarget, headers: dict[str, str]) -> HttpResponse | Passage: ...

    def handle(self, exchange: HttpExchange) -> None: ...


class _NoSuccess(RequestError):
    """A server's answer that is no success."""

    def __init__(self, code: str, words: str) -> None:
        super().__init__(words)
        self.code = code


class GateGrpc:
    """The calls of ``GRPCInferenceService`` that a gate can answer, and gRPC's own health service."""

    def __init__(self, way: HttpWay, most_bytes: int) -> None:
        self._way, self._max_bytes = way, most_bytes
        self._helpers = JsonHelpers()
        """Processes that read large typed contents, which take long."""
        options = [
            ("grpc.max_receive_message_length", min(most_bytes, 2**31 - 1)),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
        ]
        self._server = grpc.aio.server(options=options)
        handlers = {name: self._unary(RPCS[name]) for name in CALLS}
        handlers["ModelInfer"] = grpc.unary_unary_rpc_method_handler(self._infer, None, serialized)
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._stream, None, serialized)
        health = {"Check": grpc.unary_unary_rpc_method_handler(self._check, None, serialized)}
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(proto.SERVICE, handlers),
                grpc.method_handlers_generic_handler(HEALTH_SERVICE, health),
            )
        )

    async def start(self, host: str, port: int, credentials: Any = None) -> int:
        """Listen; returns the port. RuntimeError where that cannot be."""
        return await listen(self._server, host, port, credentials)

    async def stop(self, grace_s: float) -> None:
        """Accept no new calls, and wait for running ones."""
        await self._server.stop(grace_s)
        await asyncio.to_thread(self._helpers.close)

    # Calls

    def _unary(self, endpoint: Endpoint) -> Any:
        """Answer a call by the HTTP endpoint of the same name."""
        assert endpoint.rpc
        method, write = endpoint.rpc.method, endpoint.rpc.write

        async def answered(data: bytes, context: Any) -> Any:
            try:
                message = grpc_messages.parse_small(proto.METHODS[method][0], data)
                path = endpoint.path.format(model=quote(getattr(message, "name", ""), safe=""))
                answer = await self._asked("GET", path, _headers(context), b"")
                if endpoint.schema == HEALTH:
                    ok = answer.status == 200
                    return grpc_wire.filled(f"{method}Response", {"live": ok, "ready": ok})
                return grpc_wire.filled(f"{method}Response", write(orjson.loads(_succeeded(answer))))
            except RequestError as error:
                refuse(context, error)
            return b""

        return grpc.unary_unary_rpc_method_handler(answered, None, serialized)

    async def _check(self, _: bytes, context: Any) -> Any:
        ready = (await self._asked("GET", "/v2/health/ready", {}, b"")).status == 200
        return HealthCheckResponse(status=SERVING if ready else NOT_SERVING)

    async def _infer(self, data: bytes, context: Any) -> Any:
        try:
            message = grpc_messages.read_infer(data, self._max_bytes)
            return await self._computed(message, _headers(context), context.time_remaining())
        except RequestError as error:
            refuse(context, error)
        return b""

    async def _body(self, message: InferMessage, timeout_us: int | None) -> InferBody:
        """A request as the body of one over HTTP; typed contents of more than some MB are read by another process."""
        if message.head is not None:
            return as_body(message.head, message.raws, timeout_us)
        return await self._helpers.call(body_of_data, message.data, timeout_us)

    async def _computed(self, message: InferMessage, headers: dict[str, str], left_s: float | None) -> Any:
        body = await self._body(message, None if left_s is None else max(1, round(left_s * 1e6)))
        sent = headers | {_HEAD_BYTES: str(body.head_bytes), "content-type": "application/octet-stream"}
        version = f"/versions/{quote(message.model_version, safe='')}" if message.model_version else ""
        path = f"/v2/models/{quote(message.model_name, safe='')}{version}/infer"
        answer = await self._asked("POST", path, sent, body.data)
        data = _succeeded(answer)
        length = next((value for name, value in answer.headers if name.lower() == _HEAD_BYTES), None)
        return as_message(data, None if length is None else int(length))

    async def _stream(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        """Answers in the order of the requests; an error is an answer too, and the stream goes on."""
        headers, begun = _headers(context), asyncio.Queue[asyncio.Task[Any] | None](STREAM_AHEAD)

        async def read() -> None:
            async for data in messages:
                await begun.put(asyncio.create_task(self._answered(data, headers)))
            await begun.put(None)

        reader = asyncio.create_task(read())
        try:
            while (task := await begun.get()) is not None:
                yield await task
        finally:
            reader.cancel()
            while not begun.empty():
                if (left := begun.get_nowait()) is not None:
                    left.cancel()

    async def _answered(self, data: bytes, headers: dict[str, str]) -> Any:
        reply, identity = proto.CLASSES["ModelStreamInferResponse"], dict[str, str]()
        try:
            message = grpc_messages.read_infer(data, self._max_bytes)
            identity = {"id": message.id, "model_name": message.model_name, "model_version": message.model_version}
            answer = reply(infer_response=await self._computed(message, headers, None))
        except RequestError as error:
            answer = reply(error_message=str(error), infer_response=identity)
        answer.infer_response.parameters["triton_final_response"].bool_param = True
        return answer

    # The way through the gate

    async def _asked(self, method: str, path: str, headers: dict[str, str], body: bytes) -> HttpResponse:
        """What the gate answers to a request; a call that is cancelled is withdrawn."""
        target = parse_target(path.encode())
        assert target is not None  # names are quoted
        passage = self._way.judge(method, target, headers)
        if isinstance(passage, HttpResponse):
            return passage
        answer: asyncio.Future[HttpResponse] = asyncio.get_running_loop().create_future()
        exchange = HttpExchange(partial(_answered_with, answer), method, target, headers, body, "")
        exchange.passage = passage
        held = len(body) if len(body) > UNCOUNTED_BYTES else 0
        try:
            self._way.budget.take(held)
            try:
                self._way.handle(exchange)
                return await answer
            finally:
                self._way.budget.give(held)
        finally:
            if left := exchange.end():  # the call was cancelled
                left()
            passage.end()


def _answered_with(answer: asyncio.Future[HttpResponse], exchange: HttpExchange, response: HttpResponse) -> None:
    exchange.end()
    if not answer.done():
        answer.set_result(response)


def _succeeded(answer: HttpResponse) -> bytes:
    """The body of an answer; ``_NoSuccess`` where it tells of an error."""
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
