"""The protocol over gRPC before a gate: calls become what HTTP asks for and go the same way.

So keys, deadlines, second tries and books are those of ``gate``. Tensors stay the bytes they are; a gRPC deadline
becomes the parameter ``timeout``. Streams and whatever steers a server are not passed on.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol
from urllib.parse import quote

import grpc
import numpy as np
import orjson

from weft.errors import BadRequest, RequestError
from weft.runtime.tensors import DATATYPES, TensorSpec
from weft.serving import grpc_wire, proto, wire
from weft.serving.http_messages import HttpExchange, HttpResponse, Passage, RequestTarget, parse_target
from weft.serving.routes import refusal
from weft.serving.service import internal

CODES = {
    400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 405: "UNIMPLEMENTED",
    413: "RESOURCE_EXHAUSTED", 429: "RESOURCE_EXHAUSTED", 501: "UNIMPLEMENTED", 503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}  # fmt: skip
"""What HTTP says -> what gRPC says; all else is INTERNAL."""
_LENGTH = "inference-header-content-length"


class HttpWay(Protocol):
    """How a gate takes requests over HTTP."""

    def judge(self, method: str, target: RequestTarget, headers: dict[str, str]) -> HttpResponse | Passage: ...

    def handle(self, exchange: HttpExchange) -> None: ...


class GateGrpc:
    """A gRPC server before a gate, on the running event loop."""

    def __init__(self, way: HttpWay, most_bytes: int) -> None:
        self._way = way
        options = [
            ("grpc.max_receive_message_length", min(most_bytes, 2**31 - 1)),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
        ]
        self._server = grpc.aio.server(options=options)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(proto.SERVICE, self._handlers()),))

    async def start(self, host: str, port: int, credentials: Any = None) -> int:
        """Listen; returns the port. RuntimeError where that cannot be."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if credentials is None:
            bound = self._server.add_insecure_port(address)
        else:
            bound = self._server.add_secure_port(address, credentials)
        await self._server.start()
        return int(bound)

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, and let those that run end."""
        await self._server.stop(grace_s)

    def _handlers(self) -> dict[str, Any]:
        calls: dict[str, Callable[[Any, Any], Awaitable[Any]]] = {
            "ServerLive": self._told(lambda _: "/v2/health/live"),
            "ServerReady": self._told(lambda _: "/v2/health/ready", unready=True),
            "ServerMetadata": self._told(lambda _: "/v2"),
            "ModelReady": self._told(lambda asked: f"{_path(asked.name, asked.version)}/ready", unready=True),
            "ModelMetadata": self._told(lambda asked: _path(asked.name, asked.version)),
            "ModelConfig": self._told(lambda asked: f"{_path(asked.name, asked.version)}/config", within="config"),
            "ModelInfer": self._infer,
        }
        return {
            name: grpc.unary_unary_rpc_method_handler(
                self._guarded(name, call), proto.METHODS[name][0].FromString, lambda made: made.SerializeToString()
            )
            for name, call in calls.items()
        }

    def _guarded(self, name: str, call: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        """Has what was answered become the message of a call, or its error."""

        async def guarded(message: Any, context: Any) -> Any:
            try:
                found = await call(message, context)
            except RequestError as error:
                found = refusal(error)
            except Exception as error:
                found = refusal(internal(error))
            if isinstance(found, HttpResponse):
                said = orjson.loads(found.body if isinstance(found.body, bytes) else b"".join(found.body))
                code = CODES.get(found.status, "INTERNAL")
                await context.abort(grpc.StatusCode[code], str(said.get("error", said)))
            return found if not isinstance(found, dict) else grpc_wire.filled(f"{name}Response", found)

        return guarded

    def _told(
        self, path: Callable[[Any], str], *, unready: bool = False, within: str = ""
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        """Asks for JSON under a path; *unready*: a 503 is an answer, too."""

        async def told(message: Any, context: Any) -> Any:
            response = await self._asked("GET", path(message), _headers(context))
            if response.status != 200 and not (unready and response.status == 503 and b'"ready"' in _body(response)):
                return response
            found = orjson.loads(_body(response))
            return {within: found} if within else found

        return told

    async def _infer(self, message: Any, context: Any) -> Any:
        head, pieces = _request(message, context.time_remaining())
        text = orjson.dumps(head)
        headers = _headers(context) | {_LENGTH: str(len(text)), "content-type": "application/octet-stream"}
        path = f"{_path(message.model_name, message.model_version)}/infer"
        response = await self._asked("POST", path, headers, b"".join([text, *pieces]))
        return response if response.status != 200 else _answer(response)

    async def _asked(self, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> HttpResponse:
        """What the gate answers over HTTP."""
        target = parse_target(path.encode())
        if target is None:
            raise BadRequest(f"no such model: {path[:200]!r}")
        passage = self._way.judge(method, target, headers)
        if isinstance(passage, HttpResponse):
            return passage
        answer: asyncio.Future[HttpResponse] = asyncio.get_running_loop().create_future()

        def respond(exchange: HttpExchange, response: HttpResponse) -> None:
            exchange.end()
            if not answer.done():
                answer.set_result(response)

        exchange = HttpExchange(respond, method, target, headers, body, "")
        exchange.passage = passage
        try:
            self._way.handle(exchange)
            return await answer
        finally:
            gone = exchange.end()
            if gone is not None:  # the call was cancelled
                gone()
            passage.end()


def _path(model: str, version: str) -> str:
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def _headers(context: Any) -> dict[str, str]:
    """A call's metadata as headers, as far as it is text."""
    found = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    found.pop("host", None)
    return found


def _request(message: Any, remaining_s: float | None) -> tuple[dict[str, Any], list[bytes]]:
    """The JSON part of a request, and the binary parts behind it."""
    parameters: dict[str, Any] = grpc_wire.parameters_of(message)
    if remaining_s is not None and math.isfinite(remaining_s):
        left_us = max(1, round(remaining_s * 1e6))
        given = parameters.get("timeout")
        parameters["timeout"] = min(left_us, given) if isinstance(given, int) and given > 0 else left_us
    raws, pieces, inputs = iter(message.raw_input_contents), list[bytes](), []
    for tensor in message.inputs:
        raw = next(raws, None) if message.raw_input_contents else _typed(tensor)
        if raw is None:
            raise BadRequest(f"input {tensor.name!r} has no contents")
        pieces.append(raw)
        sizes = {"binary_data_size": len(raw), **grpc_wire.parameters_of(tensor)}
        inputs.append(
            {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape), "parameters": sizes}
        )
    outputs = [
        {"name": each.name, "parameters": {"binary_data": True, **grpc_wire.parameters_of(each)}}
        for each in message.outputs
    ]
    parameters["binary_data_output"] = True
    return {"id": message.id, "inputs": inputs, "outputs": outputs, "parameters": parameters}, pieces


def _typed(tensor: Any) -> bytes | None:
    """Typed contents as the bytes they stand for."""
    field = grpc_wire.CONTENTS.get(tensor.datatype)
    if field is None:
        return None
    values = getattr(tensor.contents, field)
    if tensor.datatype == "BYTES":
        return wire.to_binary(wire.objects(list(values)))
    wire.check_range(values, TensorSpec(tensor.name, tensor.datatype, tuple(tensor.shape)))
    return np.fromiter(values, DATATYPES[tensor.datatype], len(values)).tobytes()


def _answer(response: HttpResponse) -> Any:
    """The message that a result over HTTP comes to."""
    body, length = _body(response), {key.lower(): value for key, value in response.headers}.get(_LENGTH)
    at = len(body) if length is None else int(length)
    told: Mapping[str, Any] = orjson.loads(body[:at])
    message = proto.CLASSES["ModelInferResponse"](
        model_name=told["model_name"], model_version=told.get("model_version", ""), id=told.get("id", "")
    )
    grpc_wire.fill_parameters(message.parameters, told.get("parameters", {}))
    for output in told["outputs"]:
        size = output["parameters"]["binary_data_size"]
        message.outputs.add(name=output["name"], datatype=output["datatype"], shape=output["shape"])
        message.raw_output_contents.append(body[at : at + size])
        at += size
    return message


def _body(response: HttpResponse) -> bytes:
    return response.body if isinstance(response.body, bytes) else b"".join(response.body)
