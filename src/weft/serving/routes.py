"""The protocol's paths over HTTP: which request goes to which call of the service, and how its answer looks.

``gate`` judges a request by its head: host, key, page, path, verb, model and quota. A path is taken as it was sent:
``//``, ``%2f``, dots and a slash at the end lead nowhere, and only names of models and versions may be escaped.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote

import orjson

from weft.base.errors import BadRequest, NotFound, Overloaded, RequestError, TooLarge, Unauthorised
from weft.http import encoding
from weft.http.budget import ByteBudget
from weft.http.hops import AGE, RANK, ClientRank, age_of, rank_of
from weft.http.messages import HttpExchange, HttpResponse, Passage, RequestTarget, error_response
from weft.http.unpacking import ENCODINGS, Unpacker
from weft.serving import dashboard, docs_page, json_literals, metrics, openapi, state
from weft.serving.hosts import HostNames, check_origin, names_of
from weft.serving.json_helpers import has_strings, is_large
from weft.serving.json_structure import check_keys, check_parts, own_keys
from weft.serving.keys import Caller
from weft.serving.regions import RegionTable
from weft.serving.service import InferCall, Service, internal
from weft.serving.telemetry import PARENT
from weft.serving.wire import LARGE_BYTES, InferResponse, ModelSpec, decode, encode

log = logging.getLogger("weft.http")

PROBES = frozenset({"/v2/health/live", "/v2/health/ready"})
VITAL = PROBES | {"/metrics"}
"""What is answered also when all connections are taken."""
OPEN = PROBES | {"/", "/docs"}
"""Paths that need no key: probes, and the frames of pages for people, which ask for the key themselves."""
SMALL_BODY_BYTES = 1 << 20
"""The largest body of a request that is not for a model to compute."""

Answer = Callable[[HttpExchange], "HttpResponse | Awaitable[HttpResponse]"]

_GET, _READ, _POST = ("GET",), ("GET", "HEAD"), ("POST",)


class _Route(NamedTuple):
    methods: tuple[str, ...]
    """Empty: all get the same answer."""
    answer: Answer


class _Asked:
    """A request that was let in: who answers it, and what it holds until it is over."""

    __slots__ = ("_budget", "_unpacked_bytes", "answer", "body_bytes", "caller")

    def __init__(self, answer: Answer | None, body_bytes: int, caller: Caller | None, budget: ByteBudget) -> None:
        """*caller* is whoever the request counts for, None where it does not count."""
        self.answer, self.body_bytes, self.caller = answer, body_bytes, caller
        self._budget, self._unpacked_bytes = budget, 0
        if caller is not None:
            caller.begin()

    def hold(self, count: int, packed_bytes: int) -> None:
        """Hold bytes that were unpacked, until it is over, beside the packed ones that are held for it already."""
        self._budget.take(count, packed_bytes + self._unpacked_bytes)
        self._unpacked_bytes += count

    def end(self) -> None:
        if self._unpacked_bytes:
            self._budget.give(self._unpacked_bytes)
        if self.caller is not None:
            self.caller.in_flight -= 1


class _AskedInfer(_Asked):
    """A request for a model to compute."""

    __slots__ = ("age", "encoding", "header_length", "name", "rank", "version")

    name: str
    version: str
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
        self._most_bytes = service.config.max_body_bytes
        self._most_json_bytes = min(service.config.max_json_bytes, self._most_bytes)
        self._hosts = HostNames(names_of(service.config))
        self._tasks: set[asyncio.Task[None]] = set()

    # By its head

    def gate(self, method: str, target: RequestTarget, headers: dict[str, str]) -> HttpResponse | Passage:
        """Let a request in, or say why not."""
        try:
            path = target.raw_path
            if path not in PROBES:
                self._hosts.check(headers)
            caller = None if path in OPEN else self._service.check_key(headers)
            if "origin" in headers:
                check_origin(method, headers)
            model = model_to_infer(path)
            if model is not None:
                _only(_POST, method, target)
                return self._let_infer(model, headers, caller)
            route = self._route(path.split("/"), target)
            _only(route.methods, method, target)
            return _Asked(route.answer, SMALL_BODY_BYTES, caller if method == "POST" else None, self._service.budget)
        except RequestError as error:
            if (model := model_to_infer(target.raw_path)) and not isinstance(error, Unauthorised):
                self._service.trace_refusal(model[0], error, headers.get(PARENT, ""))
            return refusal(error)

    def _let_infer(self, model: tuple[str, str], headers: dict[str, str], caller: Caller | None) -> _AskedInfer:
        name, version = model
        self._service.meant(name, version)
        length, encoding, most_bytes = header_length(headers), _encoding(headers), self._most_bytes
        if length is not None:
            self._check_json(length)
        elif encoding == "identity":
            most_bytes = self._most_json_bytes
        age = age_of(headers) if AGE in headers else None
        rank = rank_of(headers) if RANK in headers else None
        asked = _AskedInfer(None, most_bytes, caller, self._service.budget)
        asked.name, asked.version, asked.header_length, asked.encoding = name, version, length, encoding
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
            assert asked.answer is not None
            answer = asked.answer(exchange)
            if isinstance(answer, HttpResponse):
                self._answer(exchange, answer)
            else:
                self._soon(exchange, self._later(exchange, answer))
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

    async def _later(self, exchange: HttpExchange, answer: Awaitable[HttpResponse]) -> None:
        self._answer(exchange, await answer)

    def _refuse(self, exchange: HttpExchange, error: Exception, call: InferCall | None = None) -> None:
        """Answer with an error, which is how *call* ends; a request for a result has a span also before it has one."""
        if call is not None:
            error = call.fail(error)
        elif not isinstance(error, RequestError):
            log.error("%s %s", exchange.method, exchange.path, exc_info=error)
            error = internal(error)
        asked = exchange.passage
        if call is None and isinstance(asked, _AskedInfer):
            self._service.trace_refusal(asked.name, error, exchange.headers.get(PARENT, ""))
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
        told = self._service.estimate(asked.name, asked.version)
        return response._replace(headers=(*response.headers, told.header())) if told else response

    def _answer_packed(self, exchange: HttpExchange, response: HttpResponse, call: InferCall | None = None) -> None:
        """Answer, packed beside the loop where the client takes that and it pays."""
        response = self._reported(exchange, response)
        accepted = exchange.headers.get("accept-encoding")
        wanted = encoding.wanted_encoding(accepted) if accepted else ""
        if not wanted or exchange.method == "HEAD" or encoding.body_bytes(response) < encoding.LEAST_BYTES:
            self._send(exchange, response, call)
        else:
            self._soon(exchange, self._pack(exchange, response, wanted, call), call)

    async def _pack(self, exchange: HttpExchange, response: HttpResponse, wanted: str, call: InferCall | None) -> None:
        self._send(exchange, await asyncio.to_thread(encoding.packed, response, wanted), call)

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
        elif json_bytes > json_literals.QUICK_BYTES:
            large = json_literals.among(body, length)

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
        call = service.infer(
            asked.name, asked.version, read, done, peek, caller=asked.caller, age=age, parent=parent, rank=asked.rank
        )
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

    # All else

    def _route(self, parts: list[str], target: RequestTarget) -> _Route:
        """Where a path leads, which begins with a slash."""
        match parts:
            case ["", "v2"]:
                return _page(self._service.metadata)
            case ["", "v2", "health", "live"]:
                return _Route(_READ, lambda _: _whether("live", True))
            case ["", "v2", "health", "ready"]:
                return _Route(_READ, self._readiness)
            case ["", "v2", "models", "stats"]:
                return _page(self._service.statistics)
            case ["", "v2", "models", name, *rest] if name:
                return self._of_model(_unescaped(name), rest, target)
            case ["", "v2", "repository", *rest]:
                return self._of_repository(rest, target)
            case ["", "v2", "trace", "setting"]:
                return _settings(lambda wanted: self._service.trace_told("", wanted))
            case ["", "v2", "logging"]:
                return _settings(self._service.log_told)
            case ["", "v2", ("systemsharedmemory" | "cudasharedmemory") as what, *rest]:
                return self._of_regions(self._service.regions[what.removesuffix("sharedmemory")], rest, target)
            case ["", *rest]:
                return self._own(rest, target)
        raise NotFound(_no_path(target))

    def _readiness(self, exchange: HttpExchange) -> HttpResponse:
        """A probe needs no key, but what is said about models is for those who have it."""
        why = self._service.why_not_ready(in_full=self._service.has_key(exchange.headers))
        return _whether("ready", False, reason=why) if why else _whether("ready", True)

    def _of_model(self, name: str, rest: list[str], target: RequestTarget) -> _Route:
        service, version = self._service, ""
        if rest[:1] == ["versions"] and len(rest) > 1 and rest[1]:
            version, rest = _unescaped(rest[1]), rest[2:]
        match rest:
            case []:
                return _Route(_GET, lambda _: _json(service.model_metadata(name, version)))
            case ["ready"]:
                return _Route(_READ, lambda _: _whether("ready", service.model_ready(name, version), name=name))
            case ["config"]:
                return _Route(_GET, lambda _: _json(service.model_config(name, version)))
            case ["stats"]:
                return _page(lambda: service.statistics(name, version))
            case ["generate" | "generate_stream" as what]:
                return _unsupported(what)
            case ["trace", "setting"] if not version:
                return _settings(lambda wanted: service.trace_told(name, wanted))
        raise NotFound(_no_path(target))

    def _of_repository(self, rest: list[str], target: RequestTarget) -> _Route:
        match rest:
            case ["index"]:
                return _Route(_POST, self._index)
            case ["models", name, "load"]:
                self._service.check_writable()
                return _Route(_POST, lambda exchange: self._load(exchange, _unescaped(name)))
            case ["models", name, "unload"]:
                self._service.check_writable()
                return _Route(_POST, lambda exchange: self._unload(exchange, _unescaped(name)))
        raise NotFound(_no_path(target))

    def _of_regions(self, regions: RegionTable, rest: list[str], target: RequestTarget) -> _Route:
        """Shared memory of one kind: all regions of who asks, or the one that is named."""
        name, owner = "", self._service.check_key
        if rest[:1] == ["region"] and len(rest) > 1 and rest[1]:
            name, rest = _unescaped(rest[1]), rest[2:]

        def status(exchange: HttpExchange) -> HttpResponse:
            return HttpResponse(200, orjson.dumps(regions.status(owner(exchange.headers), name)))

        def register(exchange: HttpExchange) -> HttpResponse:
            regions.register(owner(exchange.headers), name, _object(exchange.body))
            return HttpResponse(200)

        def unregister(exchange: HttpExchange) -> HttpResponse:
            regions.unregister(owner(exchange.headers), name)
            return HttpResponse(200)

        match rest:
            case ["status"]:
                return _Route(_GET, status)
            case ["register"] if name:
                return _Route(_POST, register)
            case ["unregister"]:
                return _Route(_POST, unregister)
        raise NotFound(_no_path(target))

    def _index(self, exchange: HttpExchange) -> Awaitable[HttpResponse]:
        return _json(self._service.index(bool(_object(exchange.body).get("ready", False))))

    def _load(self, exchange: HttpExchange, name: str) -> Awaitable[HttpResponse]:
        parameters = _object(exchange.body).get("parameters") or {}
        if not isinstance(parameters, dict):
            raise BadRequest("parameters must be a JSON object")
        return _empty(self._service.load(name, parameters))

    def _unload(self, exchange: HttpExchange, name: str) -> Awaitable[HttpResponse]:
        _object(exchange.body)
        return _empty(self._service.unload(name))

    def _renew(self, exchange: HttpExchange) -> Awaitable[HttpResponse]:
        async def renewed() -> dict[str, Any]:
            return (await self._service.renew()).as_dict()

        _object(exchange.body)
        return _json(renewed())

    def _own(self, rest: list[str], target: RequestTarget) -> _Route:
        service = self._service
        match rest:
            case [""]:
                return _Route(_READ, lambda _: HttpResponse(200, dashboard.page(), _HTML, _PAGE_HEADERS))
            case ["docs"]:
                return _Route(_READ, lambda _: HttpResponse(200, docs_page.page(), _HTML, docs_page.headers()))
            case ["metrics"]:
                return _Route(_READ, lambda _: HttpResponse(200, metrics.text(service).encode(), metrics.CONTENT_TYPE))
            case ["openapi.json"]:
                return _page(lambda: openapi.document(service))
            case ["weft", "state"]:
                return _page(lambda: state.state(service))
            case ["weft", "timeline"]:
                return _page(lambda: state.timeline(service, _number(target.query, "since")))
            case ["weft", "history"]:
                return _page(lambda: service.history.told(_number(target.query, "since")))
            case ["weft", "profile"]:
                return _page(lambda: state.profile(service))
            case ["weft", "plan", "reload"]:
                service.check_writable()
                return _Route(_POST, self._renew)
            case ["weft", "trace"]:
                return _Route(_GET, lambda _: self._trace())
        raise NotFound(_no_path(target))

    def _trace(self) -> HttpResponse:
        body = orjson.dumps(self._service.dispatcher.recorder.as_perfetto())
        return HttpResponse(200, body, headers=(("Content-Disposition", 'attachment; filename="weft-trace.json"'),))


_HTML = "text/html; charset=utf-8"
_PAGE_HEADERS = (
    ("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
     "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-cache"),
)  # fmt: skip


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


@lru_cache(maxsize=256)
def model_to_infer(path: str) -> tuple[str, str] | None:
    """The name and the version of the model that a path would have computed; None where it leads elsewhere."""
    match path.split("/"):
        case ["", "v2", "models", name, "infer"] if name:
            return _unescaped(name), ""
        case ["", "v2", "models", name, "versions", version, "infer"] if name and version:
            return _unescaped(name), _unescaped(version)
    return None


def model_of(path: str) -> tuple[str, bool]:
    """The model that a path is about, and whether it would be computed; no name where it is about none."""
    if found := model_to_infer(path):
        return found[0], True
    match path.split("/"):
        case ["", "v2", "models", name, *_] if name and name != "stats":
            return _unescaped(name), False
    return "", False


def _unescaped(name: str) -> str:
    """The name of a model or of a version, which is one segment of a path whatever it holds."""
    return unquote(name) if "%" in name else name


def _no_path(target: RequestTarget) -> str:
    return f"no such path: {target.raw_path[:200]!r}"


class _WrongVerb(RequestError):
    status, code, reason = 405, "UNIMPLEMENTED", "bad_request"

    def __init__(self, message: str, allowed: tuple[str, ...]) -> None:
        super().__init__(message)
        self.allowed = allowed


def _only(methods: tuple[str, ...], method: str, target: RequestTarget) -> None:
    if methods and method not in methods:
        said = f"{target.raw_path[:200]!r} takes {' or '.join(methods)}, not {method[:20]}"
        raise _WrongVerb(said, methods)


def _page(answer: Callable[[], Any]) -> _Route:
    return _Route(_READ, lambda _: HttpResponse(200, orjson.dumps(answer())))


def _unsupported(what: str) -> _Route:
    return _Route((), lambda _: error_response(501, f"{what} is not supported"))


def _whether(what: str, well: bool, **more: str) -> HttpResponse:
    """A health check's answer: the status says it, and some clients read the body."""
    return HttpResponse(200 if well else 503, orjson.dumps({**more, what: well}))


async def _json(answer: Awaitable[Any]) -> HttpResponse:
    return HttpResponse(200, orjson.dumps(await answer))


async def _empty(answer: Awaitable[None]) -> HttpResponse:
    await answer
    return HttpResponse(200)


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


def _settings(told: Callable[[dict[str, Any]], dict[str, Any]]) -> _Route:
    """Shows settings, and changes those that the body of a POST names."""
    return _Route(_GET + _POST, lambda exchange: HttpResponse(200, orjson.dumps(told(_wished(exchange)))))


def _wished(exchange: HttpExchange) -> dict[str, Any]:
    """The settings that a request would change; asking changes none."""
    return _object(exchange.body) if exchange.method == "POST" else {}


def peeked(body: bytes | memoryview, header_length: int | None) -> dict[str, Any]:
    """The parameters of a request as they stand there, or none if it cannot be read."""
    try:
        found = json_literals.loads(memoryview(body)[:header_length])
    except orjson.JSONDecodeError:
        return {}
    parameters = found.get("parameters") if isinstance(found, dict) else None
    return parameters if isinstance(parameters, dict) else {}


def _number(query: str, key: str) -> float:
    text = parse_qs(query).get(key, ["0"])[0]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadRequest(f"{key} = {text[:40]!r} must be a number of seconds")
    return value
