"""The endpoints over HTTP: parses requests, calls handlers, and writes the answers.

``gate`` checks the head of a request: host, key, origin, path, method, model and quota. Paths are not normalized:
``//``, ``%2f``, dots and a slash at the end match no endpoint, and only names of models and versions may be escaped.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Coroutine
from typing import Any

import orjson

from weft.base.errors import BadRequest, NotFound, Overloaded, RequestError, TooLarge, Unauthorised
from weft.http import bodies
from weft.http.bodies import ENCODINGS, Unpacker
from weft.http.limits import ByteBudget
from weft.http.messages import (
    AGE,
    RANK,
    ClientRank,
    HttpExchange,
    HttpResponse,
    Passage,
    RequestTarget,
    age_of,
    error_response,
    rank_of,
)
from weft.serving import json_text
from weft.serving.access import Caller, HostNames, check_origin, names_of
from weft.serving.endpoints import OPEN, POST, PROBES, Call, Endpoint, Route, find
from weft.serving.inference import InferCall, internal_error
from weft.serving.json_helpers import has_strings
from weft.serving.json_text import check_keys, check_parts, own_keys
from weft.serving.openapi import HEALTH
from weft.serving.service import Service
from weft.serving.slots import ModelSlot
from weft.serving.telemetry import PARENT
from weft.serving.wire import LARGE_BYTES, InferResponse, ModelSpec, decode, encode, is_large

log = logging.getLogger("weft.http")

SMALL_BODY_BYTES = 1 << 20
"""Limit on the body of a request that is not inference; such bodies are small JSON objects."""


class _Admitted:
    """A request that passed the gate: its route, its caller, and the bytes it holds until it is answered."""

    __slots__ = ("_budget", "_in_quota", "_unpacked_bytes", "body_bytes", "caller", "route")

    def __init__(
        self, route: Route, body_bytes: int, caller: Caller | None, budget: ByteBudget, *, counts: bool
    ) -> None:
        """body_bytes: limit on the body. caller: the user of its key, None without a key. budget: of held bytes.

        counts: whether it counts as one of the caller's requests in flight; OverQuota beyond the limit.
        """
        self.route, self.body_bytes, self.caller = route, body_bytes, caller
        self._budget, self._unpacked_bytes, self._in_quota = budget, 0, counts
        if counts and caller is not None:
            caller.begin()

    def hold(self, count: int, packed_bytes: int) -> None:
        """Reserve *count* unpacked bytes until the answer; the *packed_bytes* of the body are reserved already."""
        self._budget.take(count, packed_bytes + self._unpacked_bytes)
        self._unpacked_bytes += count

    def end(self) -> None:
        """Release what the request holds, after its answer."""
        if self._unpacked_bytes:
            self._budget.release(self._unpacked_bytes)
        if self._in_quota and self.caller is not None:
            self.caller.in_flight -= 1


class _AdmittedInfer(_Admitted):
    """An inference request that passed the gate."""

    __slots__ = ("age", "encoding", "header_length", "rank", "slot")

    slot: ModelSlot
    header_length: int | None
    """Of the JSON part of its body; None where all of it is JSON."""
    encoding: str
    age: int | None
    """Nanoseconds that a gate held the request; None without a gate."""
    rank: ClientRank | None
    """The priorities of its client's key, as a gate reports them; None: those of its caller."""


class Routes:
    """Handles HTTP exchanges: calls the service and writes its answers."""

    def __init__(self, service: Service) -> None:
        """Take the limits and the host names from the settings of the service."""
        self._service = service
        self._most_bytes = service.config.limits.max_body_bytes
        self._most_json_bytes = min(service.config.limits.max_json_bytes, self._most_bytes)
        self._hosts = HostNames(names_of(service.config))
        self._tasks: set[asyncio.Task[None]] = set()

    # Checks of the head

    def gate(self, method: str, target: RequestTarget, headers: dict[str, str]) -> HttpResponse | Passage:
        """Check the head of a request, before its body is read; return its admission, or a response that refuses it."""
        path, service = target.raw_path, self._service
        route = find(path)
        endpoint = route.endpoint
        try:
            if path not in PROBES:
                self._hosts.check(headers)
            caller = service.keys.caller(headers) if path in OPEN else service.check_key(headers)
            if "origin" in headers:
                check_origin(method, headers)
            if endpoint is None:
                raise NotFound(f"no such path: {path[:200]!r}")
            if endpoint.computes:
                _check_method(POST, method, path)
                return self._admit_inference(route, headers, caller)
            if endpoint.writes:
                service.check_writable()
            if endpoint.handle:  # an unsupported endpoint is refused with 501 for every method
                _check_method(endpoint.methods, method, path)
            return _Admitted(route, SMALL_BODY_BYTES, caller, service.budget, counts=method == "POST")
        except RequestError as error:
            if endpoint and endpoint.computes and not isinstance(error, Unauthorised):
                service.trace_refusal(route.name, error, headers.get(PARENT, ""))
            return refusal(error)

    def _admit_inference(self, route: Route, headers: dict[str, str], caller: Caller | None) -> _AdmittedInfer:
        """Check the model, the lengths and the quota of an inference request; RequestError if one forbids it."""
        slot = self._service.slot_for(route.name, route.version)
        length, encoding, most_bytes = header_length(headers), _encoding(headers), self._most_bytes
        if length is not None:
            self._check_json(length)
        elif encoding == "identity":  # all of it is JSON; a compressed body is checked when it is unpacked
            most_bytes = self._most_json_bytes
        age = age_of(headers) if AGE in headers else None
        rank = rank_of(headers) if RANK in headers else None
        admitted = _AdmittedInfer(route, most_bytes, caller, self._service.budget, counts=True)
        admitted.slot, admitted.header_length, admitted.encoding = slot, length, encoding
        admitted.age, admitted.rank = age, rank
        return admitted

    def _check_json(self, json_bytes: int) -> None:
        """Raise TooLarge if a request has too many bytes of JSON."""
        if json_bytes > self._most_json_bytes:
            limit = self._most_json_bytes
            raise TooLarge(f"{json_bytes} bytes of JSON exceed the limit of {limit} bytes; send tensors in binary")

    # Answering

    def handle(self, exchange: HttpExchange) -> None:
        """Answer a request, now or later; errors are answers with a status and a message."""
        admitted = exchange.passage
        assert isinstance(admitted, _Admitted)
        try:
            if isinstance(admitted, _AdmittedInfer):
                self._infer(exchange, admitted)
                return
            endpoint = admitted.route.endpoint
            assert endpoint
            answer = None
            if endpoint.handle:
                answer = endpoint.handle(self._service, _make_call(exchange, admitted, endpoint))
            if isinstance(answer, Awaitable):
                self._run_in_task(exchange, self._answer_when_done(exchange, endpoint, answer))
            else:
                self._answer_other(exchange, _make_response(endpoint, answer))
        except RequestError as error:
            self._refuse(exchange, error)

    def _run_in_task(
        self, exchange: HttpExchange, work: Coroutine[Any, Any, None], call: InferCall | None = None
    ) -> None:
        """Run *work* in a task; if it raises, the error is the answer and ends *call*."""

        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                self._refuse(exchange, error, call)

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer_when_done(self, exchange: HttpExchange, endpoint: Endpoint, answer: Awaitable[Any]) -> None:
        """Answer with the result of a handler that is a coroutine."""
        self._answer_other(exchange, _make_response(endpoint, await answer))

    def _refuse(self, exchange: HttpExchange, error: Exception, call: InferCall | None = None) -> None:
        """Answer with an error, which ends *call*; inference that fails before it became a call is traced here."""
        if call is not None:
            error = call.fail(error)
        elif not isinstance(error, RequestError):
            log.error("%s %s", exchange.method, exchange.path, exc_info=error)
            error = internal_error(error)
        admitted = exchange.passage
        if call is None and isinstance(admitted, _AdmittedInfer):
            self._service.trace_refusal(admitted.route.name, error, exchange.headers.get(PARENT, ""))
        exchange.respond(self._add_estimate(exchange, refusal(error)))

    def _answer_other(self, exchange: HttpExchange, response: HttpResponse) -> None:
        """Answer a request other than inference; below /v2 without compression, which not all clients support."""
        if exchange.target.raw_path.startswith("/v2"):
            exchange.respond(response)
        else:
            self._answer_packed(exchange, response)

    def _add_estimate(self, exchange: HttpExchange, response: HttpResponse) -> HttpResponse:
        """Add the estimate for the next request to an answer, if it goes to a gate."""
        admitted = exchange.passage
        if not isinstance(admitted, _AdmittedInfer) or admitted.age is None:
            return response
        estimate = self._service.estimate(admitted.route.name, admitted.route.version)
        return response._replace(headers=(*response.headers, estimate.header())) if estimate else response

    def _answer_packed(self, exchange: HttpExchange, response: HttpResponse, call: InferCall | None = None) -> None:
        """Answer, compressed on a thread if the client accepts that and the body is long; *call*: see ``_send``."""
        response = self._add_estimate(exchange, response)
        accepted = exchange.headers.get("accept-encoding")
        encoding = bodies.wanted_encoding(accepted) if accepted else ""
        if not encoding or exchange.method == "HEAD" or bodies.body_bytes(response) < bodies.LEAST_BYTES:
            self._send(exchange, response, call)
        else:
            self._run_in_task(exchange, self._send_packed(exchange, response, encoding, call), call)

    async def _send_packed(
        self, exchange: HttpExchange, response: HttpResponse, encoding: str, call: InferCall | None
    ) -> None:
        """Compress a response on a thread, then send it."""
        self._send(exchange, await asyncio.to_thread(bodies.packed, response, encoding), call)

    def _send(self, exchange: HttpExchange, response: HttpResponse, call: InferCall | None) -> None:
        """Send an answer; *call*: the inference request, whose deadline is checked right before; None for others."""
        if call is not None and (error := call.settle()):
            response = self._add_estimate(exchange, refusal(error))
        exchange.respond(response)

    # Inference

    def _infer(self, exchange: HttpExchange, admitted: _AdmittedInfer) -> None:
        """Start an inference request, after decompressing its body if necessary."""
        if admitted.encoding == "identity":
            self._begin_inference(exchange, admitted, exchange.body)
        else:
            self._run_in_task(exchange, self._unpack(exchange, admitted))

    async def _unpack(self, exchange: HttpExchange, admitted: _AdmittedInfer) -> None:
        """Decompress a body on a thread, within the budget of held bytes."""
        unpacker = Unpacker(exchange.body, admitted.encoding, self._most_bytes)
        pieces: list[bytes] = []
        while piece := await asyncio.to_thread(unpacker.step):
            if not exchange.open:
                return
            admitted.hold(len(piece), exchange.held_bytes)
            pieces.append(piece)
        body = await asyncio.to_thread(b"".join, pieces)
        if exchange.open:
            self._begin_inference(exchange, admitted, body)

    def _begin_inference(self, exchange: HttpExchange, admitted: _AdmittedInfer, body: bytes | memoryview) -> None:
        """Pass an inference request to the service; large requests and answers are converted by helper processes."""
        length, service = admitted.header_length, self._service
        json_bytes = len(body) if length is None else length
        large = json_bytes > LARGE_BYTES
        if large:
            self._check_json(json_bytes)
        elif json_bytes > json_text.QUICK_BYTES:  # NaN and Infinity need a slower parser
            large = json_text.has_literals(body, length)

        def read(model: ModelSpec) -> Any:
            if large or (len(body) > LARGE_BYTES and has_strings(model)):  # each string becomes an object
                return service.json.decode(body, length, model)
            return decode(body, length, model)

        def done(outcome: InferResponse | RequestError) -> None:
            if isinstance(outcome, RequestError):
                exchange.respond(self._add_estimate(exchange, refusal(outcome)))
            elif is_large(outcome):
                self._run_in_task(exchange, self._encode_in_helper(exchange, outcome, call), call)
            else:
                self._encode_here(exchange, outcome, call)

        def peek() -> dict[str, Any]:
            return {} if large else peeked(body, length)

        age, parent = admitted.age or 0, exchange.headers.get(PARENT, "")
        call = service.infer(
            admitted.slot, read, done, peek, caller=admitted.caller, age=age, parent=parent, rank=admitted.rank
        )
        if exchange.open:
            exchange.gone = call.cancel

    def _encode_here(self, exchange: HttpExchange, result: InferResponse, call: InferCall) -> None:
        """Encode a result here, and send it."""
        try:
            self._answer_packed(exchange, _infer_response(*encode(result)), call)
        except Exception as error:
            self._refuse(exchange, error, call)

    async def _encode_in_helper(self, exchange: HttpExchange, result: InferResponse, call: InferCall) -> None:
        """Encode a result in a helper process, and send it."""
        if exchange.open:
            self._answer_packed(exchange, _infer_response(*await self._service.json.encode(result)), call)


def refusal(error: RequestError) -> HttpResponse:
    """Convert an error to its HTTP response."""
    headers: tuple[tuple[str, str], ...] = ()
    if isinstance(error, Overloaded):
        headers = (("Retry-After", str(max(1, math.ceil(min(error.retry_after_s, 3600))))),)
    if isinstance(error, Unauthorised):
        headers = (("WWW-Authenticate", "Bearer"),)
    if isinstance(error, _MethodNotAllowed):
        headers = (("Allow", ", ".join(error.allowed)),)
    return error_response(error.status, str(error), headers)


def _infer_response(parts: list[bytes], header_length: int | None) -> HttpResponse:
    """Make the response from the parts of an encoded result; *header_length*: of its JSON, None if it is all JSON."""
    if header_length is None:
        return HttpResponse(200, parts)
    length = ("Inference-Header-Content-Length", str(header_length))
    return HttpResponse(200, parts, "application/octet-stream", (length,))


def header_length(headers: dict[str, str]) -> int | None:
    """Return the length of the JSON part of a request's body, from its header; None without the header."""
    text = headers.get("inference-header-content-length")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise BadRequest(f"Inference-Header-Content-Length = {text[:40]!r} must be a whole number from 0")
    return int(text)


def _encoding(headers: dict[str, str]) -> str:
    """Return the content encoding of a request; BadRequest if it is not supported."""
    encoding = headers.get("content-encoding")
    if encoding is None:
        return "identity"
    encoding = encoding.lower()
    if encoding != "identity" and encoding not in ENCODINGS:
        raise BadRequest(f"content encoding {encoding[:40]!r} is not known; use gzip, deflate or none")
    return encoding


class _MethodNotAllowed(RequestError):
    """The path does not support the method; *allowed*: the methods that it supports."""

    status, code, reason = 405, "UNIMPLEMENTED", "bad_request"

    def __init__(self, message: str, allowed: tuple[str, ...]) -> None:
        super().__init__(message)
        self.allowed = allowed


def _check_method(methods: tuple[str, ...], method: str, path: str) -> None:
    """Raise _MethodNotAllowed unless *method* is one of the *methods* of a path."""
    if method not in methods:
        raise _MethodNotAllowed(f"{path[:200]!r} takes {' or '.join(methods)}, not {method[:20]}", methods)


def _make_call(exchange: HttpExchange, admitted: _Admitted, endpoint: Endpoint) -> Call:
    """Convert an exchange to the call of its endpoint's handler."""
    body = _parse_object(exchange.body) if endpoint.body and exchange.method == "POST" else {}
    return Call(admitted.route.name, admitted.route.version, body, admitted.caller, exchange.target.query)


def _make_response(endpoint: Endpoint, answer: Any) -> HttpResponse:
    """Convert the result of a handler; a failing probe has status 503 in addition to its body."""
    if isinstance(answer, HttpResponse):
        return answer
    if endpoint.handle is None:
        return error_response(501, f"{endpoint.path.rpartition('/')[2]} is not supported")
    healthy = endpoint.schema != HEALTH or answer.get("live") or answer.get("ready")
    return HttpResponse(200 if healthy else 503, b"" if answer is None else orjson.dumps(answer))


def _parse_object(body: bytes | memoryview) -> dict[str, Any]:
    """Parse a body that is a JSON object; an empty body is an empty object."""
    if not body:
        return {}
    text = bytes(body)
    check_parts(text)
    try:
        members = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the request is not valid JSON: {error}") from error
    if not isinstance(members, dict):
        raise BadRequest("the request must be a JSON object")
    check_keys(text, own_keys(members))
    return members


def peeked(body: bytes | memoryview, header_length: int | None) -> dict[str, Any]:
    """Return the unchecked parameters of an inference request; empty if it cannot be parsed."""
    try:
        message = json_text.loads(memoryview(body)[:header_length])
    except orjson.JSONDecodeError:
        return {}
    parameters = message.get("parameters") if isinstance(message, dict) else None
    return parameters if isinstance(parameters, dict) else {}
