"""The endpoints of the server: one table from which HTTP routes, the OpenAPI document and gRPC handlers are made.

An entry describes a path (``openapi.Path``), names the equivalent gRPC call (``Rpc``; the messages are in ``proto``),
and has the handler for both. ``routes`` and ``grpc_service`` read requests and write answers. They handle inference
themselves: its entries have no handler here, and the stream of gRPC has no entry.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote

import orjson

from weft.base.errors import BadRequest
from weft.http.messages import HttpResponse
from weft.serving import grpc_wire, metrics, openapi, pages
from weft.serving.access import Caller
from weft.serving.openapi import FRAMING, HEALTH, SINCE, Json, ref
from weft.serving.service import Service

GET, READ, POST = ("GET",), ("GET", "HEAD"), ("POST",)


class Call(NamedTuple):
    """A call of an endpoint, independent of the protocol."""

    name: str = ""
    """Its model or its region."""
    version: str = ""
    body: Mapping[str, Any] = {}
    """Members of the JSON object, or the result of ``Rpc.read`` for a message."""
    caller: Caller | None = None
    """The user of its API key; None for an open endpoint that was called without a key."""
    query: str = ""


Handler = Callable[[Service, Call], Any]
"""Returns a value for JSON, None for an empty answer, a whole ``HttpResponse``, or an awaitable of one of these."""


def members(message: Any) -> dict[str, Any]:
    """Return the fields of a gRPC message by name."""
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


@dataclass(frozen=True, eq=False)
class Rpc:
    """The gRPC call of an endpoint, and how its messages differ from JSON."""

    method: str
    read: Callable[[Any], Mapping[str, Any]] = members
    """Converts the request's message to ``Call.body``."""
    write: Callable[[Any], Mapping[str, Any]] = lambda answer: answer or {}
    """Converts a handler's answer to the fields of the response's message."""

    def call(self, message: Any, caller: Caller | None) -> Call:
        """Convert a message to a call; the protocol has the model's name in *name* or in *model_name*."""
        fields = members(message)
        name = fields.get("model_name") or fields.get("name", "")
        return Call(name, fields.get("version", ""), self.read(message), caller)


@dataclass(frozen=True, eq=False)
class Endpoint(openapi.Path):
    """A path over HTTP, and the equivalent gRPC call."""

    handle: Handler | None = None
    """None: the endpoint is inference, or not supported."""
    rpc: Rpc | None = None
    computes: bool = False
    """Whether the endpoint is inference."""
    writes: bool = False
    """Whether the endpoint is refused, before its body is read, if the repository is read-only."""
    vital: bool = False
    """Whether the endpoint is answered even if all connections are taken."""


# Handlers


def _ready(service: Service, call: Call) -> Json:
    """Answer the readiness probe, which needs no key; without a key the reason does not name models."""
    reason = service.why_not_ready(in_full=call.caller is not None)
    return {"reason": reason, "ready": False} if reason else {"ready": True}


def _load(service: Service, call: Call) -> Awaitable[None]:
    """Load a model with the ``parameters`` of the body; done when the model is loaded."""
    parameters = call.body.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise BadRequest("parameters must be a JSON object")
    return service.load(call.name, parameters)


async def _renew(service: Service, call: Call) -> Json:
    return (await service.renew()).as_dict()


def _trace(service: Service, call: Call) -> HttpResponse:
    body = orjson.dumps(service.dispatcher.recorder.as_perfetto())
    return HttpResponse(200, body, headers=(("Content-Disposition", 'attachment; filename="weft-trace.json"'),))


def _metrics(service: Service, call: Call) -> HttpResponse:
    return HttpResponse(200, metrics.text(service).encode(), metrics.CONTENT_TYPE)


def _document(service: Service, call: Call) -> Json:
    return openapi.document(ENDPOINTS, service.library.repository.names(), locked=service.keys.required)


def _since_s(call: Call) -> float:
    """Parse the query parameter ``since``, in seconds; 0 if it is not given."""
    text = parse_qs(call.query).get("since", ["0"])[0]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadRequest(f"since = {text[:40]!r} must be a number of seconds")
    return value


# Messages that differ from JSON


def _read_load(message: Any) -> Json:
    return {"parameters": grpc_wire.parameters_of(message)}


def _read_trace(message: Any) -> Json:
    """Return the trace settings in a message, each as a list of strings."""
    return {key: list(setting.value) for key, setting in message.settings.items()}


def _write_trace(settings: Json) -> Json:
    """Return the fields of a TraceSettingResponse; every value of a setting is a list there."""
    return {
        "settings": {key: {"value": value if isinstance(value, list) else [value]} for key, value in settings.items()}
    }


def _read_log(message: Any) -> Json:
    """Return the log settings in a message; None for a setting without a value, which is not changed."""
    choices = {key: (setting, setting.WhichOneof("parameter_choice")) for key, setting in message.settings.items()}
    return {key: getattr(setting, field) if field else None for key, (setting, field) in choices.items()}


def _write_log(settings: Json) -> Json:
    """Return the fields of a LogSettingsResponse, where the field of a value depends on its type."""
    fields = {bool: "bool_param", int: "uint32_param", str: "string_param"}
    return {"settings": {key: {fields[type(value)]: value} for key, value in settings.items()}}


def _write_regions(regions: list[Json]) -> Json:
    return {"regions": {region["name"]: region for region in regions}}


# The table


def _model_endpoints(suffix: str, methods: tuple[str, ...], name: str, summary: str, **more: Any) -> list[Endpoint]:
    """Make two endpoints of a model: for its newest version, and for a version in the path.

    suffix: the path after the model or version. name: the OpenAPI operation. more: other fields of ``Endpoint``. The
    gRPC call, which takes the version as a field, belongs to the first endpoint.
    """
    path, more = "/v2/models/{model}", {"statuses": (404,), **more}
    newest = Endpoint(path + suffix, methods, name, f"{summary}, newest version", **more)
    version = f"{path}/versions/{{version}}{suffix}"
    return [newest, replace(newest, path=version, id=f"{name}Version", summary=f"{summary}, one version", rpc=None)]


def _region_endpoints(kind: str, schema: Json, body: Json, *, works: bool) -> list[Endpoint]:
    """Make the endpoints of one kind of shared memory: status, register and unregister.

    Status and unregister are for one region, or for all regions of the caller. schema, body: of the status and of
    register, for OpenAPI. works: whether this server supports the kind.
    """

    def status(service: Service, call: Call) -> list[dict[str, Any]]:
        assert call.caller
        return service.regions[kind].status(call.caller, call.name)

    def register(service: Service, call: Call) -> None:
        assert call.caller
        service.regions[kind].register(call.caller, call.name, call.body)

    def unregister(service: Service, call: Call) -> None:
        assert call.caller
        service.regions[kind].unregister(call.caller, call.name)

    base, memory = f"/v2/{kind}sharedmemory", f"{kind}SharedMemory"
    path, method = f"{base}/region/{{region}}", f"{kind.capitalize()}SharedMemory"
    status_of_all = Endpoint(
        f"{base}/status", GET, f"{memory}Status", f"Regions of {kind} shared memory", schema,
        handle=status, rpc=Rpc(f"{method}Status", write=_write_regions),
    )  # fmt: skip
    unregister_all = Endpoint(
        f"{base}/unregister", POST, f"{memory}Unregister", "Unregister all regions",
        handle=unregister, rpc=Rpc(f"{method}Unregister"),
    )  # fmt: skip
    single: dict[str, Any] = {"statuses": (404,), "rpc": None}  # the gRPC call has one entry: that for all regions
    return [
        status_of_all,
        replace(status_of_all, path=f"{path}/status", id=f"{memory}RegionStatus", summary="One region", **single),
        Endpoint(
            f"{path}/register", POST, f"{memory}Register", "Register a region, which belongs to the API key",
            body=body, statuses=(404,), works=works, handle=register, rpc=Rpc(f"{method}Register"),
        ),
        unregister_all,
        replace(
            unregister_all, path=f"{path}/unregister", id=f"{memory}RegionUnregister",
            summary="Unregister one region", **single,
        ),
    ]  # fmt: skip


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "/", READ, "dashboard", "The dashboard", openapi.TEXT, media="text/html", open=True,
        handle=lambda service, call: pages.dashboard(),
    ),
    Endpoint(
        "/docs", READ, "docs", "This document for people, with forms", openapi.TEXT, media="text/html", open=True,
        handle=lambda service, call: pages.docs(),
    ),
    Endpoint(
        "/metrics", READ, "metrics", "Counters for Prometheus", openapi.TEXT, media="text/plain", vital=True,
        handle=_metrics,
    ),
    Endpoint("/openapi.json", READ, "openapi", "This document", openapi.OBJECT, handle=_document),
    Endpoint(
        "/v2", READ, "server", "The server's name, version and extensions", ref("Server"),
        handle=lambda service, call: service.metadata(), rpc=Rpc("ServerMetadata"),
    ),
    Endpoint(
        "/v2/health/live", READ, "live", "Whether the server runs", HEALTH, open=True, vital=True,
        handle=lambda service, call: {"live": True}, rpc=Rpc("ServerLive"),
    ),
    Endpoint(
        "/v2/health/ready", READ, "ready", "Whether the server takes requests", HEALTH, open=True, vital=True,
        handle=_ready, rpc=Rpc("ServerReady"),
    ),
    Endpoint(
        "/v2/models/stats", READ, "allStatistics", "Counters of the loaded models", ref("Statistics"),
        handle=lambda service, call: service.statistics(),
    ),
    *_model_endpoints(
        "", GET, "model", "Inputs and outputs of a model", schema=ref("Model"),
        handle=lambda service, call: service.model_metadata(call.name, call.version), rpc=Rpc("ModelMetadata"),
    ),
    *_model_endpoints(
        "/ready", READ, "modelReady", "Whether a model takes requests", schema=HEALTH,
        handle=lambda service, call: {"name": call.name, "ready": service.model_ready(call.name, call.version)},
        rpc=Rpc("ModelReady"),
    ),
    *_model_endpoints(
        "/config", GET, "modelConfig", "Settings of a model", schema=ref("ModelConfig"),
        handle=lambda service, call: service.model_config(call.name, call.version),
        rpc=Rpc("ModelConfig", write=lambda config: {"config": config}),
    ),
    *_model_endpoints(
        "/stats", READ, "statistics", "Counters of a model", schema=ref("Statistics"),
        handle=lambda service, call: service.statistics(call.name, call.version), rpc=Rpc("ModelStatistics"),
    ),
    *_model_endpoints(
        "/infer", POST, "infer", "Compute a model", schema=ref("InferResponse"), body=ref("InferRequest"),
        statuses=(404, 504), parameters=FRAMING, computes=True, rpc=Rpc("ModelInfer"),
    ),
    Endpoint(
        "/v2/repository/index", POST, "index", "Models and their states", ref("Index"), ref("IndexRequest"),
        handle=lambda service, call: service.index(bool(call.body.get("ready", False))),
        rpc=Rpc("RepositoryIndex", write=lambda models: {"models": models}),
    ),
    Endpoint(
        "/v2/repository/models/{model}/load", POST, "load", "Load a model, or load it again", None, ref("LoadRequest"),
        (404,), writes=True, handle=_load, rpc=Rpc("RepositoryModelLoad", read=_read_load),
    ),
    Endpoint(
        "/v2/repository/models/{model}/unload", POST, "unload", "Take no more requests for a model", None,
        ref("UnloadRequest"), writes=True, handle=lambda service, call: service.unload(call.name),
        rpc=Rpc("RepositoryModelUnload"),
    ),
    Endpoint(
        "/weft/state", READ, "state", "What the dashboard shows", ref("State"),
        handle=lambda service, call: pages.state(service),
    ),
    Endpoint(
        "/weft/timeline", READ, "timeline", "The lanes' last seconds", ref("Timeline"), parameters=(SINCE,),
        handle=lambda service, call: pages.timeline(service, _since_s(call)),
    ),
    Endpoint(
        "/weft/history", READ, "history", "The last ten minutes", ref("History"), parameters=(SINCE,),
        handle=lambda service, call: service.history.samples_since(_since_s(call)),
    ),
    Endpoint(
        "/weft/profile", READ, "profile", "Measured segments of the models", ref("Profile"),
        handle=lambda service, call: pages.profile(service),
    ),
    Endpoint("/weft/trace", GET, "trace", "The lanes' last seconds for Perfetto", ref("Trace"), handle=_trace),
    Endpoint(
        "/weft/plan/reload", POST, "renew", "Read the plan again and take over what has changed", ref("Renewal"),
        openapi.OBJECT, writes=True, handle=_renew,
    ),
    *_model_endpoints("/generate", POST, "generate", "Not supported", works=False),
    *_model_endpoints("/generate_stream", POST, "generateStream", "Not supported", works=False),
    Endpoint(
        "/v2/trace/setting", GET + POST, "traceSettings", "Which requests are traced", ref("TraceSettings"),
        ref("TraceChanges"), handle=lambda service, call: service.change_trace_settings(call.name, call.body),
        rpc=Rpc("TraceSetting", _read_trace, _write_trace),
    ),
    Endpoint(
        "/v2/models/{model}/trace/setting", GET + POST, "modelTraceSettings", "Which requests for a model are traced",
        ref("TraceSettings"), ref("TraceChanges"), (404,),
        handle=lambda service, call: service.change_trace_settings(call.name, call.body),
    ),
    Endpoint(
        "/v2/logging", GET + POST, "logSettings", "Settings of the log", ref("LogSettings"), ref("LogChanges"),
        handle=lambda service, call: service.change_log_settings(call.body),
        rpc=Rpc("LogSettings", _read_log, _write_log),
    ),
    *_region_endpoints("system", ref("Regions"), ref("RegionRequest"), works=True),
    *_region_endpoints("cuda", ref("CudaRegions"), ref("CudaRegionRequest"), works=False),
)  # fmt: skip

OPEN = frozenset(endpoint.path for endpoint in ENDPOINTS if endpoint.open)
"""Paths that need no key: probes, and HTML pages without data, whose scripts ask the user for the key."""
VITAL = frozenset(endpoint.path for endpoint in ENDPOINTS if endpoint.vital)
PROBES = OPEN & VITAL
RPCS = {endpoint.rpc.method: endpoint for endpoint in ENDPOINTS if endpoint.rpc}
"""gRPC call -> its endpoint."""


# Routing


class Route(NamedTuple):
    """An endpoint, with the names in its path."""

    endpoint: Endpoint | None
    """None: there is no such path."""
    name: str = ""
    """The model or the region in the path."""
    version: str = ""


def _pattern(path: str) -> re.Pattern[str]:
    """Compile a path with ``{model}``, ``{region}`` or ``{version}`` to an expression with these as groups."""
    name, version = "(?P<name>[^/]+)", "(?P<version>[^/]+)"
    return re.compile(path.format(model=name, region=name, version=version))


_EXACT_ROUTES = {endpoint.path: Route(endpoint) for endpoint in ENDPOINTS if "{" not in endpoint.path}
_PATTERN_ROUTES = [(_pattern(endpoint.path), endpoint) for endpoint in ENDPOINTS if "{" in endpoint.path]


@lru_cache(maxsize=256)
def find(path: str) -> Route:
    """Find the endpoint of a path as the client sent it.

    Only the names of models, versions and regions, which are one segment each, may be percent-encoded.
    """
    if route := _EXACT_ROUTES.get(path):
        return route
    for pattern, endpoint in _PATTERN_ROUTES:
        if match := pattern.fullmatch(path):
            return Route(endpoint, **{key: unquote(text) for key, text in match.groupdict().items()})
    return Route(None)


def model_of(path: str) -> tuple[str, bool]:
    """Return the name of the model in a path, empty without one, and whether the path is inference."""
    endpoint, name, _ = find(path)
    if endpoint and endpoint.computes:
        return name, True
    match path.split("/"):
        case ["", "v2", "models", name, *_] if name and name != "stats":  # a path for all models
            return unquote(name), False
    return "", False
