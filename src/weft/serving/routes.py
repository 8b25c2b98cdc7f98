"""The endpoints over HTTP: reads requests, has them answered, and writes the answers.

``gate`` judges a request by its head: host, key, origin, path, method, model and quota. A path is taken as it was sent:
``//``, ``%2f``, dots and a slash at the end lead nowhere, and only names of models and versions may be escaped.
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
from weft.serving.endpoints import OPEN, POST, PROBES, Call, Endpoint, Route, find
from weft.serving.hosts import HostNames, check_origin, names_of
from weft.serving.inference import InferCall, internal
from weft.serving.json_helpers import has_strings
from weft.serving.json_text import check_keys, check_parts, own_keys
from weft.serving.keys import Caller
from weft.serving.openapi import HEALTH
from weft.serving.service import Service
from weft.serving.slots import ModelSlot
from weft.serving.telemetry import PARENT
from weft.serving.wire import LARGE_BYTES, InferResponse, ModelSpec, decode, encode, is_large

log = logging.getLogger("weft.http")

SMALL_BODY_BYTES = 1 << 20
"""The largest body of a request that is not for a model to compute."""


class _Asked:
    """A request that was let in: where it leads, who sent it, and what it holds until it is over."""

    __slots__ = ("_budget", "_counts", "_unpacked_bytes", "body_bytes", "caller", "route")

    def __init__(
        self, route: Route, body_bytes: int, caller: Caller | None, budget: ByteBudget, *, counts: bool
    ) -> None:
        """counts: whether it is one of the caller's requests in flight; OverQuota if that is one too many."""
        self.route, self.body_bytes, self.caller = route, body_bytes, caller
        self._budget, self._unpacked_bytes, self._counts = budget, 0, counts
        if counts and caller is not None:
            caller.begin()

    def hold(self, count: int, packed_bytes: int) -> None:
        """Hold bytes that were unpacked, until it is over, beside the packed ones that are held for it already."""
        self._budget.take(count, packed_bytes + self._unpacked_bytes)
        self._unpacked_bytes += count

    def end(self) -> None:
        if self._unpacked_bytes:
            self._budget.give(self._unpacked_bytes)
        if self._counts and self.caller is not None:
            self.caller.in_flight -= 1


class _AskedInfer(_Asked):
    """A request for a model to compute."""

    __slots__ = ("age", "encoding", "header_length", "rank", "slot")

    slot: ModelSlot
    header_length: int | None
    """Of the JSON part of its body; None where all of it is JSON."""
    encoding: str
    age: int | None
    """How long a gate has had it (``hops``); None where there is none."""
    rank: ClientRank | None
    """What its client's key gives it; None: what its caller has."""


class Routes:
    """Answers exchanges from a service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._most_bytes = service.config.limits.max_body_bytes
        self._most_json_bytes = min(service.config.limits.max_json_bytes, self._most_bytes)
        self._hosts = HostNames(names_of(service.config))
        self._tasks: set[asyncio.Task[None]] = set()

    # By its head

    def gate(self, method: str, target: RequestTarget, headers: dict[str, str]) -> HttpResponse | Passage:
        """Let a request in, or say why not."""
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
                _only(POST, method, path)
                return self._let_infer(route, headers, caller)
            if endpoint.writes:
                service.check_writable()
            if endpoint.handle:  # what is not supported is so whatever the method
                _only(endpoint.methods, method, path)
            return _Asked(route, SMALL_BODY_BYTES, caller, service.budget, counts=method == "POST")
        except RequestError as error:
            if endpoint and endpoint.computes and not isinstance(error, Unauthorised):
                service.trace_refusal(route.name, error, headers.get(PARENT, ""))
            return refusal(error)

    def _let_infer(self, route: Route, headers: dict[str, str], caller: Caller | None) -> _AskedInfer:
        slot = self._service.meant(route.name, route.version)
        length, encoding, most_bytes = header_length(headers), _encoding(headers), self._most_bytes
        if length is not None:
            self._check_json(length)
        elif encoding == "identity":
            most_bytes = self._most_json_bytes
        age = age_of(headers) if AGE in headers else None
        rank = rank_of(headers) if RANK in headers else None
        asked = _AskedInfer(route, most_bytes, caller, self._service.budget, counts=True)
        asked.slot, asked.header_length, asked.encoding = slot, length, encoding
        asked.age, asked.rank = age, rank
        return asked

    def _check_json(self, count: int) -> None:
        if count > self._most_json_bytes:
            limit = self._most_json_bytes
            raise TooLarge(f"{count} bytes of JSON exceed the limit of {limit} bytes; send tensors in binary")

    # Answering

    def handle(self, exchange: HttpExchange) -> None:
        """Answer a request, now or later; whatever goes wrong has a status and a sentence."""
        asked = exchange.passage
        assert isinstance(asked, _Asked)
        try:
            if isinstance(asked, _AskedInfer):
                self._infer(exchange, asked)
                return
            endpoint = asked.route.endpoint
            assert endpoint
            answer = endpoint.handle(self._service, _call(exchange, asked, endpoint)) if endpoint.handle else None
            if isinstance(answer, Awaitable):
                self._soon(exchange, self._later(exchange, endpoint, answer))
            else:
                self._answer(exchange, _response(endpoint, answer))
        except RequestError as error:
            self._refuse(exchange, error)

    def _soon(self, exchange: HttpExchange, work: Coroutine[Any, Any, None], call: InferCall | None = None) -> None:
        """Go on in a task; whatever goes wrong there is answered, too, and is how *call* ends."""

        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                self._refuse(exchange, error, call)

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _later(self, exchange: HttpExchange, endpoint: Endpoint, answer: Awaitable[Any]) -> None:
        self._answer(exchange, _response(endpoint, await answer))

    def _refuse(self, exchange: HttpExchange, error: Exception, call: InferCall | None = None) -> None:
        """Answer with an error, which is how *call* ends; a request for a result has a span also before it has one."""
        if call is not None:
            error = call.fail(error)
        elif not isinstance(error, RequestError):
            log.error("%s %s", exchange.method, exchange.path, exc_info=error)
            error = internal(error)
        asked = exchange.passage
        if call is None and isinstance(asked, _AskedInfer):
            self._service.trace_refusal(asked.route.name, error, exchange.headers.get(PARENT, ""))
        exchange.respond(self._reported(exchange, refusal(error)))

    def _answer(self, exchange: HttpExchange, response: HttpResponse) -> None:
        """Answer what is no inference; of the protocol nothing else is packed, for not all its clients unpack it."""
        if exchange.target.raw_path.startswith("/v2"):
            exchange.respond(response)
        else:
            self._answer_packed(exchange, response)

    def _reported(self, exchange: HttpExchange, response: HttpResponse) -> HttpResponse:
        """An answer that also tells a gate what is expected for the next request."""
        asked = exchange.passage
        if not isinstance(asked, _AskedInfer) or asked.age is None:
            return response
        estimate = self._service.estimate(asked.route.name, asked.route.version)
        return response._replace(headers=(*response.headers, estimate.header())) if estimate else response

    def _answer_packed(self, exchange: HttpExchange, response: HttpResponse, call: InferCall | None = None) -> None:
        """Answer, packed beside the loop where the client takes that and it pays."""
        response = self._reported(exchange, response)
        accepted = exchange.headers.get("accept-encoding")
        wanted = bodies.wanted_encoding(accepted) if accepted else ""
        if not wanted or exchange.method == "HEAD" or bodies.body_bytes(response) < bodies.LEAST_BYTES:
            self._send(exchange, response, call)
        else:
            self._soon(exchange, self._pack(exchange, response, wanted, call), call)

    async def _pack(self, exchange: HttpExchange, response: HttpResponse, wanted: str, call: InferCall | None) -> None:
        self._send(exchange, await asyncio.to_thread(bodies.packed, response, wanted), call)

    def _send(self, exchange: HttpExchange, response: HttpResponse, call: InferCall | None) -> None:
        """Hand an answer to the socket; the deadline of a request for a result is judged right before."""
        if call is not None and (error := call.settle()):
            response = self._reported(exchange, refusal(error))
        exchange.respond(response)

    # Inference

    def _infer(self, exchange: HttpExchange, asked: _AskedInfer) -> None:
        if asked.encoding == "identity":
            self._begin(exchange, asked, exchange.body)
        else:
            self._soon(exchange, self._unpack(exchange, asked))

    async def _unpack(self, exchange: HttpExchange, asked: _AskedInfer) -> None:
        """Unpack a compressed body in a thread beside the loop, and hold no more of it than there is room for."""
        unpacker = Unpacker(exchange.body, asked.encoding, self._most_bytes)
        pieces: list[bytes] = []
        while piece := await asyncio.to_thread(unpacker.step):
            if not exchange.open:
                return
            asked.hold(len(piece), exchange.held_bytes)
            pieces.append(piece)
        body = await asyncio.to_thread(b"".join, pieces)
        if exchange.open:
            self._begin(exchange, asked, body)

    def _begin(self, exchange: HttpExchange, asked: _AskedInfer, body: bytes | memoryview) -> None:
        length, service = asked.header_length, self._service
        json_bytes = len(body) if length is None else length
        large = json_bytes > LARGE_BYTES
        if large:
            self._check_json(json_bytes)
        elif json_bytes > json_text.QUICK_BYTES:
            large = json_text.has_literals(body, length)

        def read(model: ModelSpec) -> Any:
            if large or (len(body) > LARGE_BYTES and has_strings(model)):
                return service.json.decode(body, length, model)
            return decode(body, length, model)

        def done(outcome: InferResponse | RequestError) -> None:
            if isinstance(outcome, RequestError):
                exchange.respond(self._reported(exchange, refusal(outcome)))
            elif is_large(outcome):
                self._soon(exchange, self._write_large(exchange, outcome, call), call)
            else:
                self._write(exchange, outcome, call)

        def peek() -> dict[str, Any]:
            return {} if large else peeked(body, length)

        age, parent = asked.age or 0, exchange.headers.get(PARENT, "")
        call = service.infer(asked.slot, read, done, peek, caller=asked.caller, age=age, parent=parent, rank=asked.rank)
        if exchange.open:
            exchange.gone = call.cancel

    def _write(self, exchange: HttpExchange, result: InferResponse, call: InferCall) -> None:
        try:
            self._answer_packed(exchange, _computed(*encode(result)), call)
        except Exception as error:
            self._refuse(exchange, error, call)

    async def _write_large(self, exchange: HttpExchange, result: InferResponse, call: InferCall) -> None:
        if exchange.open:
            self._answer_packed(exchange, _computed(*await self._service.json.encode(result)), call)


def refusal(error: RequestError) -> HttpResponse:
    """An error as HTTP says it."""
    headers: tuple[tuple[str, str], ...] = ()
    if isinstance(error, Overloaded):
        headers = (("Retry-After", str(max(1, math.ceil(min(error.retry_after_s, 3600))))),)
    if isinstance(error, Unauthorised):
        headers = (("WWW-Authenticate", "Bearer"),)
    if isinstance(error, _WrongVerb):
        headers = (("Allow", ", ".join(error.allowed)),)
    return error_response(error.status, str(error), headers)


def _computed(parts: list[bytes], header_length: int | None) -> HttpResponse:
    if header_length is None:
        return HttpResponse(200, parts)
    length = ("Inference-Header-Content-Length", str(header_length))
    return HttpResponse(200, parts, "application/octet-stream", (length,))


def header_length(headers: dict[str, str]) -> int | None:
    text = headers.get("inference-header-content-length")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise BadRequest(f"Inference-Header-Content-Length = {text[:40]!r} must be a whole number from 0")
    return int(text)


def _encoding(headers: dict[str, str]) -> str:
    encoding = headers.get("content-encoding")
    if encoding is None:
        return "identity"
    encoding = encoding.lower()
    if encoding != "identity" and encoding not in ENCODINGS:
        raise BadRequest(f"content encoding {encoding[:40]!r} is not known; use gzip, deflate or none")
    return encoding


class _WrongVerb(RequestError):
    status, code, reason = 405, "UNIMPLEMENTED", "bad_request"

    def __init__(self, message: str, allowed: tuple[str, ...]) -> None:
        super().__init__(message)
        self.allowed = allowed


def _only(methods: tuple[str, ...], method: str, path: str) -> None:
    if method not in methods:
        raise _WrongVerb(f"{path[:200]!r} takes {' or '.join(methods)}, not {method[:20]}", methods)


def _call(exchange: HttpExchange, asked: _Asked, endpoint: Endpoint) -> Call:
    body = _object(exchange.body) if endpoint.body and exchange.method == "POST" else {}
    return Call(asked.route.name, asked.route.version, body, asked.caller, exchange.target.query)


def _response(endpoint: Endpoint, answer: Any) -> HttpResponse:
    """What a handler returned as an answer; a probe's status says the same as its body, which some clients read."""
    if isinstance(answer, HttpResponse):
        return answer
    if endpoint.handle is None:
        return error_response(501, f"{endpoint.path.rpartition('/')[2]} is not supported")
    healthy = endpoint.schema != HEALTH or answer.get("live") or answer.get("ready")
    return HttpResponse(200 if healthy else 503, b"" if answer is None else orjson.dumps(answer))


def _object(body: bytes | memoryview) -> dict[str, Any]:
    """An optional JSON object."""
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
    """The parameters of a request as they stand there, or none if it cannot be read."""
    try:
        found = json_text.loads(memoryview(body)[:header_length])
    except orjson.JSONDecodeError:
        return {}
    parameters = found.get("parameters") if isinstance(found, dict) else None
    return parameters if isinstance(parameters, dict) else {}
