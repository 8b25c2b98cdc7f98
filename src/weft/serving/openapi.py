"""The OpenAPI 3.1 document of the paths in ``endpoints``.

``SCHEMAS`` has the shapes of requests and answers, ``STATUSES`` what the statuses mean. Statuses that the HTTP server
itself may give to any request are added to every path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.base.version import __version__
from weft.runtime.tensors import DATATYPES
from weft.serving.client_settings import FORMATS as LOG_FORMATS
from weft.serving.client_settings import MOST_VERBOSE
from weft.serving.request_parameters import MOST_WHOLE
from weft.serving.wire import MAX_ID_CHARS

Json = dict[str, Any]

ABOUT = (
    "Open Inference Protocol v2 with binary tensors, and what weft shows of itself. Elements that are not finite are "
    "read and written as the literals NaN, Infinity and -Infinity, which JSON has not. A method that a path does "
    "not list is answered with 405. Every error is an object with one key, `error`; a probe that says no says so."
)
HEADER_LENGTH = "Inference-Header-Content-Length"
LARGEST = 2**62 - 1
"""The largest whole number that a request's parameter may be."""

STATUSES = {
    400: "The request cannot be understood, or does not fit the model.",
    401: "The request carries no API key, or a wrong one.",
    403: "Nobody may ask for that here: another host's name, a repository or settings that are read-only, or shared "
    "memory where it is off.",
    404: "There is no such model, version or region.",
    405: "The path does not take this method.",
    408: "The request did not end in time.",
    413: "The body exceeds the server's limit.",
    417: "An expectation that cannot be met.",
    429: "The API key has asked for as much as it may. Send it again later.",
    431: "The headers exceed the server's limit.",
    500: "A fault of the server.",
    501: "Not supported.",
    503: "A queue, the memory, the bytes in flight or the connections are at their limit, or the server is going down. "
    "Send it again later.",
    504: "The deadline passed, or cannot be met any more.",
    505: "The HTTP version is not served.",
}
TRANSPORT = frozenset({400, 403, 408, 413, 417, 431, 500, 501, 503, 505})
"""Statuses that any request may get, whatever its path."""


# Shapes


def ref(name: str, kind: str = "schemas") -> Json:
    """Return a reference to a component of the document; *kind*: schemas, responses or parameters."""
    return {"$ref": f"#/components/{kind}/{name}"}


def _list(items: Json) -> Json:
    """Return the schema of a list."""
    return {"type": "array", "items": items}


def _map(values: Json, **known: Json) -> Json:
    """Return the schema of an object with any keys; *known*: the schemas of keys with a meaning."""
    return {"type": "object", "additionalProperties": values} | ({"properties": known} if known else {})


def _object(about: str = "", optional: Mapping[str, Json] | None = None, /, **required: Json) -> Json:
    """Return the schema of an object; *about*: its description. optional, required: the schemas of its members."""
    schema: Json = {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}
    return {"description": about, **schema} if about else schema


def _same(names: str, shape: Json) -> dict[str, Json]:
    """Return members with the same schema; *names*: separated by blanks."""
    return {name: shape for name in names.split()}


def _is(kind: str | list[str], about: str = "", **limits: Any) -> Json:
    """Return the schema of a value of a JSON type, or of one of several; *limits*: such as minimum and maximum."""
    return {"type": kind, **limits} | ({"description": about} if about else {})


HEALTH = ref("Health")
TEXT, OBJECT, _NUMBER, _BOOL = _is("string"), _is("object"), _is("number"), _is("boolean")
_COUNT = _is("integer", minimum=0)
_PARAMETER = _is(["string", "number", "boolean"])
_DATATYPE = _is("string", enum=list(DATATYPES))
_DURATION = ref("Duration")
_FREE_SHAPE = _list(_is("integer", "-1 is a free dimension.", minimum=-1))
_TENSOR = {"name": TEXT, "datatype": _DATATYPE, "shape": _list(_COUNT)}
_PLACE = {
    "shared_memory_region": _is("string", "The region of shared memory that this tensor lies in.", minLength=1),
    "shared_memory_offset": _is("integer", "The byte of the region at which it begins.", minimum=0, maximum=LARGEST),
    "shared_memory_byte_size": _is("integer", "Bytes that it has there, or may have.", minimum=0, maximum=LARGEST),
}
_CARRIAGE = _map(
    _PARAMETER, binary_data_size=_is("integer", "Bytes of this tensor after the JSON part.", minimum=0), **_PLACE
)
_DATA = _is(
    ["array", "string", "number", "boolean"],
    "Row-major, flat or nested as the shape says, a bare value where there are no dimensions; "
    "left out where the tensor is binary, or lies in shared memory.",
)
_SPEC = _object(name=TEXT, datatype=_DATATYPE, shape=_FREE_SHAPE)
_CONFIGURED = _object(
    "",
    {"label_filename": _is("string", "Of outputs whose classes have labels.")},
    name=TEXT,
    data_type=_is("string", pattern="^TYPE_"),
    dims=_FREE_SHAPE,
)
_WINDOW = {"rate": _NUMBER, **_same("window_met window_missed", _COUNT)}

_SAMPLES = _same("rate p50_ms p99_ms missed failed", _list(_is(["number", "null"])))
"""Results and requests without one per second, latencies, the share of deadlines missed; null where there is none."""

_LOG = {
    "log_file": _is("string", "Empty: the log goes where the server's errors go."),
    **_same("log_info log_warning log_error", _BOOL),
    "log_verbose_level": _is("integer", "Above 0 all is written.", minimum=0, maximum=MOST_VERBOSE),
    "log_format": _is("string", enum=list(LOG_FORMATS)),
}
_LOG_CHANGES = {
    "log_file": _is("null", "Clients cannot set it."),
    **_same("log_info log_warning log_error", _is(["boolean", "null"])),
    "log_verbose_level": _is(["integer", "null"], minimum=0, maximum=MOST_VERBOSE),
    "log_format": _is(["string", "null"], enum=[*LOG_FORMATS, None]),
}
_TRACE = {
    "trace_level": _list(_is("string", enum=["OFF", "TIMESTAMPS"])),
    "trace_rate": _is("string", "One of so many requests is traced."),
    "trace_count": _is("string", "So many are still to be traced; -1 is without end."),
    "log_frequency": _is("string", "Always 0: the trace is in no file."),
    "trace_file": _is("string", "Always empty."),
    "trace_mode": TEXT,
}
_TRACE_CHANGES = {
    "trace_level": _is(["array", "string", "null"], items=TEXT),
    **_same("trace_rate trace_count log_frequency", _is(["string", "integer", "null"])),
    "trace_mode": _is(["string", "null"], enum=["triton", None]),
}

SCHEMAS: dict[str, Json] = {
    "Error": _object(error=TEXT),
    "Health": _object(
        "What a probe says; its status says the same.",
        {
            **_same("live ready", _BOOL),
            "name": TEXT,
            "reason": _is("string", "Of a server that is not ready: what is missing and why."),
        },
    ),
    "InferRequest": _object(
        "",
        {
            "id": _is("string", "Echoed.", maxLength=MAX_ID_CHARS),
            "parameters": ref("InferParameters"),
            "outputs": _list(ref("WantedOutput")),
        },
        inputs=_list(ref("InferInput")),
    ),
    "InferParameters": _map(
        _PARAMETER,
        timeout=_is(
            "integer",
            "Microseconds; without a result by then the answer is 504. 0 is none.",
            minimum=0,
            maximum=MOST_WHOLE,
        ),
        priority=_is("integer", "1 is the highest; 0 is the model's own.", minimum=0, maximum=MOST_WHOLE),
        weft_slo_ms=_is(
            "number", "Milliseconds; a later result is late, but still given.", exclusiveMinimum=0, maximum=1e9
        ),
        weft_exit_threshold=_is(
            "number",
            "How sure an early answer must be, for models with exits; above 1 nobody leaves early.",
            exclusiveMinimum=0,
            maximum=1e9,
        ),
        weft_best_effort=_is("boolean", "Without a deadline that counts: computed when nothing else is urgent."),
        binary_data_output=_is("boolean", "All outputs in binary."),
    ),
    "InferInput": _object("", {"parameters": _CARRIAGE, "data": _DATA}, **_TENSOR),
    "WantedOutput": _object(
        "",
        {
            "parameters": _map(
                _PARAMETER,
                binary_data=_is("boolean", "This output in binary."),
                classification=_is(
                    "integer",
                    "So many of its largest elements, as the strings `value:index` or `value:index:label`.",
                    minimum=0,
                ),
                **_PLACE,
            )
        },
        name=TEXT,
    ),
    "InferResponse": _object(
        "",
        {"id": TEXT},
        model_name=TEXT,
        model_version=TEXT,
        parameters=ref("Served"),
        outputs=_list(ref("InferOutput")),
    ),
    "Served": _object(
        "How the request was served.",
        {"weft_exit_threshold": _is("number", "How sure an early answer had to be; of models with exits.")},
        weft_queue_us=_is("integer", "Microseconds from its arrival to its first segment.", minimum=0),
        weft_compute_us=_is("integer", "Microseconds that its segments ran.", minimum=0),
        weft_batch=_is("integer", "Requests computed together.", minimum=1),
    ),
    "InferOutput": _object("", {"parameters": _CARRIAGE, "data": _list({})}, **_TENSOR),
    "Server": _object(name=TEXT, version=TEXT, extensions=_list(TEXT)),
    "Model": _object(name=TEXT, versions=_list(TEXT), platform=TEXT, inputs=_list(_SPEC), outputs=_list(_SPEC)),
    "ModelConfig": _object(
        "Triton's ModelConfig, with weft's settings as parameters.",
        **_same("name platform backend", TEXT),
        max_batch_size=_COUNT,
        input=_list(_CONFIGURED),
        output=_list(_CONFIGURED),
        parameters=_map(_object(string_value=TEXT)),
    ),
    "Statistics": _object(model_stats=_list(ref("ModelStatistics"))),
    "ModelStatistics": _object(
        **_same("name version", TEXT),
        **_same("last_inference inference_count execution_count", _COUNT),
        inference_stats=_object(
            **_same("success fail queue compute_input compute_infer compute_output cache_hit cache_miss", _DURATION)
        ),
        batch_stats=_list(_object(batch_size=_COUNT, **_same("compute_input compute_infer compute_output", _DURATION))),
    ),
    "Duration": _object("Nanoseconds, summed over so many.", count=_COUNT, ns=_COUNT),
    "IndexRequest": _object("", {"ready": _is("boolean", "Only models that are loaded.")}),
    "Index": _list(
        _object(**_same("name version reason", TEXT), state=_is("string", enum=["READY", "LOADING", "UNAVAILABLE"]))
    ),
    "LoadRequest": _object(
        "",
        {
            "parameters": {
                **_object("", {"config": _is("string", "Settings for this load: the JSON of a ModelConfig.")}),
                "additionalProperties": False,
            }
        },
    ),
    "LogSettings": _object("What of the log is written, and how.", **_LOG),
    "TraceSettings": _object("Which requests are traced.", **_TRACE),
    "LogChanges": _object("What is left out, or null, stays.", _LOG_CHANGES),
    "TraceChanges": _object("What is left out stays; null is the server's, or the default.", _TRACE_CHANGES),
    "UnloadRequest": _object("", {"parameters": _is("object", "Taken, and mean nothing.")}),
    "RegionRequest": _object(
        "",
        {"offset": _is("integer", "The byte of the object at which the region begins.", minimum=0, maximum=LARGEST)},
        key=_is("string", "The name of the shared memory object, as `/camera`."),
        byte_size=_is("integer", minimum=1, maximum=LARGEST),
    ),
    "CudaRegionRequest": _object(
        "Memory of the GPU that models run on; refused where they run on processors.",
        {"device_id": _is("integer", "The GPU by its number.", minimum=0, maximum=LARGEST)},
        raw_handle=_object("", b64=_is("string", "The handle of CUDA, 64 bytes, in Base64.")),
        byte_size=_is("integer", minimum=1, maximum=LARGEST),
    ),
    "CudaRegions": _list(_object(name=TEXT, **_same("device_id byte_size", _COUNT))),
    "Regions": _list(_object(**_same("name key", TEXT), **_same("offset byte_size", _COUNT))),
    "State": _object(
        "What the dashboard shows; rates and percentiles are those of the last `window_s`.",
        **_same("server version policy", TEXT),
        reason=_is("string", "Why it is not ready; empty where it is."),
        **_same("ready draining", _BOOL),
        **_same("uptime_s now_s window_s", _NUMBER),
        in_flight=_COUNT,
        lanes=_list(
            _object(
                busy=_BOOL,
                utilisation=_is("number", minimum=0, maximum=1),
                share=_is(["string", "null"], "The multiprocessors that it is, where lanes are shares of a GPU."),
            )
        ),
        totals=_object(
            **_WINDOW,
            **_same("requests success deadline_met deadline_missed preemptions aborts", _COUNT),
            failures=_map(_COUNT),
        ),
        memory=_object(
            held_bytes=_is(["integer", "null"], "Of the server and its workers; null where the system does not tell."),
            used_bytes=_COUNT,
            budget_bytes=_is(["integer", "null"], "null is no limit."),
        ),
        models=_list(ref("ModelState")),
    ),
    "ModelState": _object(
        **_same("name version message", TEXT),
        state=_is("string", enum=["unloaded", "loading", "ready", "failed"]),
        **_WINDOW,
        **_same("p50_ms p90_ms p99_ms", _is(["number", "null"])),
        **_same("requests queued queue_size segments memory_bytes", _COUNT),
        mean_batch=_NUMBER,
        failures=_map(_COUNT),
        exits={"oneOf": [ref("ModelExits"), _is("null", "It has none.")]},
        shares=_map(_is("number", "The part of the last minutes that it ran on this share of a GPU.")),
    ),
    "ModelExits": _object(
        "Where rows leave a model, the end last.",
        names=_list(TEXT),
        taken=_list(_is("integer", "Rows that left there.", minimum=0)),
        threshold=_is("number", "How sure an early answer must be now, where a request does not say."),
        accuracy=_is(["number", "null"], "Share of right answers at that threshold; null where no record tells."),
        merges=_is("integer", "Batches that joined another one half-way.", minimum=0),
    ),
    "Timeline": _object(now_s=_NUMBER, models=_list(TEXT), spans=_list(ref("Span"))),
    "Span": _object(
        "A segment on a lane; its times are on the clock of `now_s`.",
        **_same("model segment", TEXT),
        **_same("start_s end_s predicted_s", _NUMBER),
        **_same("lane batch id", _COUNT),
        outcome=_is("string", enum=["done", "aborted", "failed"]),
    ),
    "History": _object(
        "Samples of the last `kept_s`, oldest first, on the clock of `now_s`.",
        **_same("step_s kept_s", _NUMBER),
        times_s=_list(_NUMBER),
        totals=_object("Of all models.", **_SAMPLES),
        models=_list(_object("Of those that served last.", **_same("name version", TEXT), **_SAMPLES)),
    ),
    "Profile": _object(
        "What a simulation of this server needs.",
        **_same("policy late", TEXT),
        device=_is(["string", "null"], "The GPUs that run the models; null: the cores."),
        policy_options=_map(_is(["boolean", "number"])),
        **_same("format lanes threads total_queue", _COUNT),
        **_same("default_slo_ms hand_over_s", _NUMBER),
        gpu=_is(["object", "null"], "How models share a GPU; null where they do not."),
        models=_map(ref("ModelProfile")),
    ),
    "ModelProfile": _object(
        "Seconds of each segment by batch size: measured when it was loaded, and seen since.",
        segments=_list(TEXT),
        **_same("times_s seen_s", _map(_list(_NUMBER))),
        **_same("max_batch queue_size", _COUNT),
        batch_timeout_ms=_NUMBER,
        like=_map(_is("object", "By batch size, what it is like on shares of a GPU, where it was measured there.")),
        body=_is("string", "What models that were stitched have in common; empty for others."),
        exits=_list(_is("integer", "After how many segments samples may leave, the end not among them.", minimum=1)),
        exit_rates=_list(_is("number", "Share of the samples that leave there, the end last.")),
    ),
    "Renewal": _object(
        "What a server took over.",
        loaded=_list(_is("string", "A model that was loaded, new or in the place of its older version.")),
        left=_list(_is("string", "A model that is not there any more.")),
        failed=_map(_is("string", "Why a model could not be loaded; its older version is served on.")),
        settings=_list(_is("string", "A setting that was taken over.")),
        restart=_list(_is("string", "A setting that only a restart takes over.")),
    ),
    "Trace": _object("Chrome's trace event format.", displayTimeUnit=TEXT, traceEvents=_list(_is("object"))),
}


# Paths


@dataclass(frozen=True, eq=False)
class Path:
    """Description of one path; names in braces are its parameters."""

    path: str
    methods: tuple[str, ...]
    """In upper case, as HTTP has them."""
    id: str
    """Name of its first operation."""
    summary: str
    schema: Json | None = None
    """Shape of the answer; None: the answer has no body."""
    body: Json | None = None
    """Shape of a request's body; None: a body is not read."""
    statuses: tuple[int, ...] = ()
    """Statuses besides 200 and those of every path."""
    parameters: tuple[Json, ...] = ()
    media: str = "application/json"
    works: bool = True
    """False: no success is promised."""
    open: bool = False
    """Answered without an API key."""


SINCE = {
    "name": "since",
    "in": "query",
    "description": "Only what ended later, on the clock of `now_s`.",
    "schema": _is("number", default=0),
}
FRAMING = (
    {
        "name": HEADER_LENGTH,
        "in": "header",
        "description": "Bytes of the JSON part where binary tensors follow it; 0 where all of it is the one input.",
        "schema": _COUNT,
    },
    {"name": "Content-Encoding", "in": "header", "schema": _is("string", enum=["identity", "gzip", "deflate"])},
)
"""Headers of requests and answers that carry binary tensors."""


def document(paths: Iterable[Path], models: list[str], *, locked: bool) -> Json:
    """Return the OpenAPI document of a server; *models*: as examples. locked: whether requests need an API key."""
    whole: Json = {
        "openapi": "3.1.0",
        "info": {"title": "weft", "version": __version__, "description": ABOUT},
        "servers": [{"url": "/"}],
        "paths": {path.path: _path(path, locked) for path in paths},
        "components": {
            "schemas": SCHEMAS,
            "responses": {**{str(status): _error(status) for status in STATUSES}, "Probe503": _PROBE_503},
            "parameters": {
                "model": _segment("model", models),
                "version": _segment("version", ["1"]),
                "region": _segment("region", ["frames"]),
            },
        },
    }
    if locked:
        whole["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
        }
        whole["security"] = [{"bearer": []}, {"header": []}]
    return whole


def _path(path: Path, locked: bool) -> Json:
    """Return the entry of a path: an operation per method, and the parameters in the path."""
    names = [ref(name, "parameters") for name in ("model", "version", "region") if f"{{{name}}}" in path.path]
    operations: Json = {method.lower(): _operation(path, method, locked) for method in path.methods}
    return {**operations, "parameters": names} if names else operations


def _operation(path: Path, method: str, locked: bool) -> Json:
    """Return the entry of one method of a path."""
    statuses = TRANSPORT | set(path.statuses)
    if locked and not path.open:
        statuses |= {401, 429} if method == "POST" else {401}
    responses = {"200": _success(path, method)} if path.works else {}
    responses |= {str(status): ref(str(status), "responses") for status in sorted(statuses)}
    if path.schema == HEALTH:
        responses["503"] = ref("Probe503", "responses")
    # operation ids must be unique in a document; the first method of a path has no suffix
    suffix = "" if method == path.methods[0] else {"HEAD": "Head", "POST": "Change"}[method]
    operation: Json = {"operationId": path.id + suffix, "summary": path.summary, "responses": responses}
    if path.parameters:
        operation["parameters"] = list(path.parameters)
    if path.body and method == "POST":
        operation["requestBody"] = _body(path)
    if path.open:
        operation["security"] = []
    return operation


def _body(path: Path) -> Json:
    """Return the description of a request's body; for inference it may be binary, and is required."""
    content: Json = {"application/json": {"schema": path.body}}
    if path.parameters == FRAMING:
        content["application/octet-stream"] = {}
    return {"required": path.parameters == FRAMING, "content": content}


def _success(path: Path, method: str) -> Json:
    """Return the description of the response with status 200."""
    success: Json = {"description": "Done."}
    if path.schema is None or method == "HEAD":
        return success
    success["content"] = {path.media: {"schema": path.schema}}
    if path.parameters == FRAMING:
        success["content"]["application/octet-stream"] = {}
        success["headers"] = {
            HEADER_LENGTH: {"description": "Bytes of the JSON part; binary outputs follow it.", "schema": _COUNT}
        }
    return success


def _error(status: int) -> Json:
    """Return the description of the response with an error status."""
    response: Json = {"description": STATUSES[status], "content": {"application/json": {"schema": ref("Error")}}}
    if status in _ERROR_HEADERS:
        name, about = _ERROR_HEADERS[status]
        response["headers"] = {name: {"description": about, "schema": TEXT}}
    return response


_ERROR_HEADERS = {
    401: ("WWW-Authenticate", "Bearer."),
    429: ("Retry-After", "Seconds to wait before it is sent again."),
    503: ("Retry-After", "Seconds to wait before it is sent again."),
}
_PROBE_503 = {
    "description": "No; or the connection itself was refused.",
    "content": {"application/json": {"schema": {"anyOf": [ref("Health"), ref("Error")]}}},
}


def _segment(name: str, examples: list[str]) -> Json:
    """Return the description of a parameter that is one segment of a path."""
    return {"name": name, "in": "path", "required": True, "schema": _is("string", minLength=1, examples=examples)}
