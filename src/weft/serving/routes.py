"""The protocol's paths over HTTP: which request goes to which call of the service, and how its answer looks."""

from __future__ import annotations

import asyncio
import logging
import math
import zlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any
from urllib.parse import parse_qs

import orjson

from weft.errors import BadRequest, NotFound, Overloaded, RequestError, TooLarge, Unauthorised
from weft.serving import dashboard, metrics, openapi, state
from weft.serving.http_messages import HttpExchange, HttpResponse, error_response
from weft.serving.service import Service, internal
from weft.serving.wire import InferResponse, ModelSpec, decode, encode

log = logging.getLogger("weft.http")

OPEN = frozenset({"v2/health/live", "v2/health/ready", ""})
"""Paths that need no key: probes and the dashboard's frame, which asks for the key itself."""

Answer = Callable[[HttpExchange, list[str]], "HttpResponse | Awaitable[HttpResponse]"]


class Routes:
    """Answers exchanges from a service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._most_bytes = service.config.max_body_bytes
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, exchange: HttpExchange) -> None:
        """Answer a request, now or later; whatever goes wrong has a status and a sentence."""
        try:
            parts = exchange.path.strip("/").split("/")
            self._check_key(exchange, "/".join(parts))
            _check_origin(exchange)
            if parts[0] == "v2" and parts[-1] == "infer" and len(parts) in (4, 6) and parts[1] == "models":
                self._infer(exchange, parts)
                return
            answer = self._answer(exchange, parts)
            if isinstance(answer, HttpResponse):
                exchange.respond(answer)
            else:
                self._soon(exchange, self._later(exchange, answer))
        except RequestError as error:
            exchange.respond(refusal(error))

    def _soon(self, exchange: HttpExchange, work: Coroutine[Any, Any, None]) -> None:
        """Go on in a task; whatever goes wrong there is answered, too."""

        async def guarded() -> None:
            try:
                await work
            except RequestError as error:
                exchange.respond(refusal(error))
            except Exception as error:
                log.exception("%s %s", exchange.method, exchange.path)
                exchange.respond(refusal(internal(error)))

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _later(self, exchange: HttpExchange, answer: Awaitable[HttpResponse]) -> None:
        exchange.respond(await answer)

    def _check_key(self, exchange: HttpExchange, path: str) -> None:
        if path not in OPEN:
            self._service.check_key(exchange.headers)

    # Inference

    def _infer(self, exchange: HttpExchange, parts: list[str]) -> None:
        _only(exchange, "POST")
        encoding = exchange.headers.get("content-encoding", "identity").lower()
        if encoding == "identity":
            self._begin(exchange, parts, exchange.body)
        elif encoding in ("gzip", "deflate"):
            self._soon(exchange, self._unpack(exchange, parts, encoding))
        else:
            raise BadRequest(f"content encoding {encoding[:40]!r} is not known; use gzip, deflate or none")

    async def _unpack(self, exchange: HttpExchange, parts: list[str], encoding: str) -> None:
        """Unpack a compressed body in a thread beside the loop, because a small one may hold much."""
        body = await asyncio.to_thread(unpacked, exchange.body, encoding, self._most_bytes)
        if exchange.open:
            self._begin(exchange, parts, body)

    def _begin(self, exchange: HttpExchange, parts: list[str], body: bytes) -> None:
        version, length = _version(parts), _header_length(exchange)

        def read(model: ModelSpec) -> Any:
            return decode(body, length, model)

        def done(outcome: InferResponse | RequestError) -> None:
            exchange.respond(refusal(outcome) if isinstance(outcome, RequestError) else _encoded(outcome))

        call = self._service.infer(parts[2], version, read, done, lambda: _peeked(body, length))
        if exchange.open:
            exchange.gone = call.cancel

    # All else

    def _answer(self, exchange: HttpExchange, parts: list[str]) -> HttpResponse | Awaitable[HttpResponse]:
        match parts:
            case ["v2"]:
                return _get(exchange, self._service.metadata)
            case ["v2", "health", "live"]:
                _only(exchange, "GET", "HEAD")
                return _whether("live", True)
            case ["v2", "health", "ready"]:
                _only(exchange, "GET", "HEAD")
                return self._readiness(exchange)
            case ["v2", "models", "stats"]:
                return _get(exchange, self._service.statistics)
            case ["v2", "models", name, *rest] if name:
                return self._model(exchange, name, rest)
            case ["v2", "repository", *rest]:
                return self._repository(exchange, rest)
            case ["v2", "systemsharedmemory" | "cudasharedmemory" | "trace" | "logging", *_]:
                return error_response(501, f"{parts[1]} is not supported")
            case _:
                return self._own(exchange, parts)

    def _readiness(self, exchange: HttpExchange) -> HttpResponse:
        """A probe needs no key, but what is said about models is for those who have it."""
        why = self._service.why_not_ready(in_full=self._service.has_key(exchange.headers))
        return _whether("ready", False, reason=why) if why else _whether("ready", True)

    def _model(self, exchange: HttpExchange, name: str, rest: list[str]) -> HttpResponse | Awaitable[HttpResponse]:
        version = ""
        if rest[:1] == ["versions"] and len(rest) > 1 and rest[1]:
            version, rest = rest[1], rest[2:]
        match rest:
            case []:
                _only(exchange, "GET")
                return _json(self._service.model_metadata(name, version))
            case ["ready"]:
                _only(exchange, "GET", "HEAD")
                return _whether("ready", self._service.model_ready(name, version), name=name)
            case ["config"]:
                _only(exchange, "GET")
                return _json(self._service.model_config(name, version))
            case ["stats"]:
                return _get(exchange, lambda: self._service.statistics(name, version))
            case ["trace", *_]:
                return error_response(501, "trace is not supported")
        raise NotFound(f"no such path: {exchange.path[:200]!r}")

    def _repository(self, exchange: HttpExchange, rest: list[str]) -> HttpResponse | Awaitable[HttpResponse]:
        match rest:
            case ["index"]:
                _only(exchange, "POST")
                return _json(self._service.index(bool(_object(exchange.body).get("ready", False))))
            case ["models", name, "load"]:
                _only(exchange, "POST")
                if _object(exchange.body).get("parameters"):
                    raise BadRequest("load takes no parameters here: models come from the repository as they are")
                return _empty(self._service.load(name))
            case ["models", name, "unload"]:
                _only(exchange, "POST")
                _object(exchange.body)
                return _empty(self._service.unload(name))
        raise NotFound(f"no such path: {exchange.path[:200]!r}")

    def _own(self, exchange: HttpExchange, parts: list[str]) -> HttpResponse:
        match parts:
            case [""]:
                _only(exchange, "GET", "HEAD")
                return HttpResponse(200, dashboard.page(), "text/html; charset=utf-8", _PAGE_HEADERS)
            case ["metrics"]:
                _only(exchange, "GET", "HEAD")
                return HttpResponse(200, metrics.text(self._service).encode(), metrics.CONTENT_TYPE)
            case ["openapi.json"]:
                return _get(exchange, lambda: openapi.document(self._service))
            case ["weft", "state"]:
                return _get(exchange, lambda: state.state(self._service))
            case ["weft", "timeline"]:
                return _get(exchange, lambda: state.timeline(self._service, _number(exchange.target.query, "since")))
            case ["weft", "profile"]:
                return _get(exchange, lambda: state.profile(self._service))
            case ["weft", "trace"]:
                _only(exchange, "GET")
                body = orjson.dumps(self._service.dispatcher.recorder.as_perfetto())
                name = ("Content-Disposition", 'attachment; filename="weft-trace.json"')
                return HttpResponse(200, body, headers=(name,))
        raise NotFound(f"no such path: {exchange.path[:200]!r}")


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


def unpacked(body: bytes, encoding: str, most_bytes: int) -> bytes:
    """A compressed body, as long as it stays within the limit."""
    machine = zlib.decompressobj(31 if encoding == "gzip" else 15)
    try:
        plain = machine.decompress(body, most_bytes + 1)
    except zlib.error as error:
        raise BadRequest(f"the body is not {encoding}: {error}") from error
    if len(plain) > most_bytes:
        raise TooLarge(f"the unpacked body exceeds the limit of {most_bytes} bytes")
    if not machine.eof:
        raise BadRequest(f"the {encoding} body ends too early")
    return plain


def _encoded(result: InferResponse) -> HttpResponse:
    try:
        return _computed(result)
    except RequestError as error:
        return refusal(error)
    except Exception as error:
        log.exception("%s: its result could not be written", result.model.name)
        return refusal(internal(error))


def _computed(result: InferResponse) -> HttpResponse:
    parts, header = encode(result)
    if header is None:
        return HttpResponse(200, parts)
    length = ("Inference-Header-Content-Length", str(header))
    return HttpResponse(200, parts, "application/octet-stream", (length,))


def _header_length(exchange: HttpExchange) -> int | None:
    text = exchange.headers.get("inference-header-content-length")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise BadRequest(f"Inference-Header-Content-Length = {text[:40]!r} must be a whole number from 0")
    return int(text)


def _version(parts: list[str]) -> str:
    if len(parts) == 4:
        return ""
    if parts[3] != "versions" or not parts[4]:
        raise NotFound(f"no such path: {'/'.join(parts)[:200]!r}")
    return parts[4]


class _WrongVerb(RequestError):
    status, code, reason = 405, "UNIMPLEMENTED", "bad_request"

    def __init__(self, message: str, allowed: tuple[str, ...]) -> None:
        super().__init__(message)
        self.allowed = allowed


def _only(exchange: HttpExchange, *methods: str) -> None:
    if exchange.method not in methods:
        said = f"{exchange.path[:200]!r} takes {' or '.join(methods)}, not {exchange.method[:20]}"
        raise _WrongVerb(said, methods)


def _get(exchange: HttpExchange, answer: Callable[[], Any]) -> HttpResponse:
    _only(exchange, "GET", "HEAD")
    return HttpResponse(200, orjson.dumps(answer()))


def _whether(what: str, well: bool, **more: str) -> HttpResponse:
    """A health check's answer: the status says it, and some clients read the body."""
    return HttpResponse(200 if well else 503, orjson.dumps({**more, what: well}))


async def _json(answer: Awaitable[Any]) -> HttpResponse:
    return HttpResponse(200, orjson.dumps(await answer))


async def _empty(answer: Awaitable[None]) -> HttpResponse:
    await answer
    return HttpResponse(200)


def _object(body: bytes) -> dict[str, Any]:
    """An optional JSON object."""
    if not body:
        return {}
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the request is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadRequest("the request must be a JSON object")
    return found


def _check_origin(exchange: HttpExchange) -> None:
    """A page of somebody else's, open in a browser on this machine, shall not load, unload or compute here."""
    origin = exchange.headers.get("origin")
    if origin and exchange.method == "POST" and origin.partition("://")[2] != exchange.headers.get("host"):
        raise BadRequest(f"requests from pages of {origin[:100]!r} are not taken")


def _peeked(body: bytes, header_length: int | None) -> dict[str, Any]:
    """The parameters of a request as they stand there, or none if it cannot be read."""
    try:
        found = orjson.loads(memoryview(body)[:header_length])
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
