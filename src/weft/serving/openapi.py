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
    "not list is answered with 405. Every error is an object with one key, `error`; a failing health probe has "
    "status 503 and the reason."
)
HEADER_LENGTH = "Inference-Header-Content-Length"
LARGEST = 2**62 - 1
"""The largest whole number that a request's parameter may be."""

STATUSES = {
    400: "The request cannot be understood, or does not fit the model.",
    401: "The request carries no API key, or a wrong one.",
    403: "Refused for every client: another host's name, a repository or settings that are read-only, or shared "
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


def _members(names: str, shape: Json) -> dict[str, Json]:
    """Return members with the same schema; *names*: separated by blanks."""
    return {name: shape for name in names.split()}


def _type(kind: str | list[str], about: str = "", **limits: Any) -> Json:
    """Return the schema of a value of a JSON type, or of one of several; *limits*: such as minimum and maximum."""
    return {"type": kind, **limits} | ({"description": about} if about else {})


HEALTH = ref("Health")
TEXT, OBJECT, _NUMBER, _BOOL = _type("string"), _type("object"), _type("number"), _type("boolean")
_COUNT = _type("integer", minimum=0)
_PARAMETER = _type(["string", "number", "boolean"])
_DATATYPE = _type("string", enum=list(DATATYPES))
_DURATION = ref("Duration")
_FREE_SHAPE = _list(_type("integer", "-1 is a free dimension.", minimum=-1))
_TENSOR = {"name": TEXT, "datatype": _DATATYPE, "shape": _list(_COUNT)}
_REGION_PARAMETERS = {
    "shared_memory_region": _type("string", "The region of shared memory that this tensor lies in.", minLength=1),
    "shared_memory_offset": _type("integer", "The byte of the region at which it begins.", minimum=0, maximum=LARGEST),
    "shared_memory_byte_size": _type(
        "integer", "Its length there in bytes; of an output: at most.", minimum=0, maximum=LARGEST
    ),
}
_TENSOR_PARAMETERS = _map(
    _PARAMETER,
    binary_data_size=_type("integer", "Bytes of this tensor after the JSON part.", minimum=0),
    **_REGION_PARAMETERS,
)
_DATA = _type(
    ["array", "string", "number", "boolean"],
    "Row-major, flat or nested as the shape says, a bare value where there are no dimensions; "
    "left out where the tensor is binary, or lies in shared memory.",
)
_TENSOR_SPEC = _object(name=TEXT, datatype=_DATATYPE, shape=_FREE_SHAPE)
_TENSOR_CONFIG = _object(
    "",
    {"label_filename": _type("string", "Of outputs whose classes have labels.")},
    name=TEXT,
    data_type=_type("string", pattern="^TYPE_"),
    dims=_FREE_SHAPE,
)
_WINDOW_MEMBERS = {"rate": _NUMBER, **_members("window_met window_missed", _COUNT)}

_HISTORY_MEMBERS = _members("rate p50_ms p99_ms missed failed", _list(_type(["number", "null"])))
"""Samples: results and failures per second, latencies, the share of deadlines missed; null where there is none."""

_LOG_MEMBERS = {
    "log_file": _type("string", "Empty: the log goes where the server's errors go."),
    **_members("log_info log_warning log_error", _BOOL),
    "log_verbose_level": _type("integer", "Above 0 all is written.", minimum=0, maximum=MOST_VERBOSE),
    "log_format": _type("string", enum=list(LOG_FORMATS)),
}
_LOG_CHANGES = {
    "log_file": _type("null", "Clients cannot set it."),
    **_members("log_info log_warning log_error", _type(["boolean", "null"])),
    "log_verbose_level": _type(["integer", "null"], minimum=0, maximum=MOST_VERBOSE),
    "log_format": _type(["string", "null"], enum=[*LOG_FORMATS, None]),
}
_TRACE_MEMBERS = {
    "trace_level": _list(_type("string", enum=["OFF", "TIMESTAMPS"])),
    "trace_rate": _type("string", "N: one of every N requests is traced."),
    "trace_count": _type("string", "Number of requests that are still to be traced; -1: no limit."),
    "log_frequency": _type("string", "Always 0: the trace is in no file."),
    "trace_file": _type("string", "Always empty."),
    "trace_mode": TEXT,
}
_TRACE_CHANGES = {
    "trace_level": _type(["array", "string", "null"], items=TEXT),
    **_members("trace_rate trace_count log_frequency", _type(["string", "integer", "null"])),
    "trace_mode": _type(["string", "null"], enum=["triton", None]),
}

SCHEMAS: dict[str, Json] = {
    "Error": _object(error=TEXT),
    "Health": _object(
        "The result of a health probe; the status of the answer has the same meaning.",
        {
            **_members("live ready", _BOOL),
            "name": TEXT,
            "reason": _type("string", "Of a server that is not ready: what is missing and why."),
        },
    ),
    "InferRequest": _object(
        "",
        {
            "id": _type("string", "Echoed.", maxLength=MAX_ID_CHARS),
            "parameters": ref("InferParameters"),
            "outputs": _list(ref("WantedOutput")),
        },
        inputs=_list(ref("InferInput")),
    ),
    "InferParameters": _map(
        _PARAMETER,
        timeout=_type(
            "integer",
            "Microseconds; without a result by then the answer is 504. 0 is none.",
            minimum=0,
            maximum=MOST_WHOLE,
        ),
        priority=_type("integer", "1 is the highest; 0 is the model's own.", minimum=0, maximum=MOST_WHOLE),
        weft_slo_ms=_type(
            "number", "Milliseconds; a later result is late, but still given.", exclusiveMinimum=0, maximum=1e9
        ),
        weft_exit_threshold=_type(
            "number",
            "Confidence at which a row leaves early, for models with exits; above 1 no row does.",
            exclusiveMinimum=0,
            maximum=1e9,
        ),
        weft_best_effort=_type(
            "boolean", "Best effort: computed when nothing else is urgent; its deadline is not counted."
        ),
        binary_data_output=_type("boolean", "All outputs in binary."),
    ),
    "InferInput": _object("", {"parameters": _TENSOR_PARAMETERS, "data": _DATA}, **_TENSOR),
    "WantedOutput": _object(
        "",
        {
            "parameters": _map(
                _PARAMETER,
                binary_data=_type("boolean", "This output in binary."),
                classification=_type(
                    "integer",
                    "Number of its largest elements to return, as the strings `value:index` or `value:index:label`.",
                    minimum=0,
                ),
                **_REGION_PARAMETERS,
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
        {"weft_exit_threshold": _type("number", "Confidence threshold that was used; only of models with exits.")},
        weft_queue_us=_type("integer", "Microseconds from its arrival to its first segment.", minimum=0),
        weft_compute_us=_type("integer", "Microseconds that its segments ran.", minimum=0),
        weft_batch=_type("integer", "Requests computed together.", minimum=1),
    ),
    "InferOutput": _object("", {"parameters": _TENSOR_PARAMETERS, "data": _list({})}, **_TENSOR),
    "Server": _object(name=TEXT, version=TEXT, extensions=_list(TEXT)),
    "Model": _object(
        name=TEXT, versions=_list(TEXT), platform=TEXT, inputs=_list(_TENSOR_SPEC), outputs=_list(_TENSOR_SPEC)
    ),
    "ModelConfig": _object(
        "Triton's ModelConfig, with weft's settings as parameters.",
        **_members("name platform backend", TEXT),
        max_batch_size=_COUNT,
        input=_list(_TENSOR_CONFIG),
        output=_list(_TENSOR_CONFIG),
        parameters=_map(_object(string_value=TEXT)),
    ),
    "Statistics": _object(model_stats=_list(ref("ModelStatistics"))),
    "ModelStatistics": _object(
        **_members("name version", TEXT),
        **_members("last_inference inference_count execution_count", _COUNT),
        inference_stats=_object(
            **_members("success fail queue compute_input compute_infer compute_output cache_hit cache_miss", _DURATION)
        ),
        batch_stats=_list(
            _object(batch_size=_COUNT, **_members("compute_input compute_infer compute_output", _DURATION))
        ),
    ),
    "Duration": _object("Nanoseconds (`ns`), summed over `count` events.", count=_COUNT, ns=_COUNT),
    "IndexRequest": _object("", {"ready": _type("boolean", "Only models that are loaded.")}),
    "Index": _list(
        _object(
            **_members("name version reason", TEXT), state=_type("string", enum=["READY", "LOADING", "UNAVAILABLE"])
        )
    ),
    "LoadRequest": _object(
        "",
        {
            "parameters": {
                **_object("", {"config": _type("string", "Settings for this load: the JSON of a ModelConfig.")}),
                "additionalProperties": False,
            }
        },
    ),
    "LogSettings": _object("Which messages the log has, and its format.", **_LOG_MEMBERS),
    "TraceSettings": _object("Which requests are traced.", **_TRACE_MEMBERS),
    "LogChanges": _object("A setting that is left out, or null, is not changed.", _LOG_CHANGES),
    "TraceChanges": _object(
        "A setting that is left out is not changed; null restores the server's setting, or the default.", _TRACE_CHANGES
    ),
    "UnloadRequest": _object("", {"parameters": _type("object", "Accepted and ignored.")}),
    "RegionRequest": _object(
        "",
        {"offset": _type("integer", "The byte of the object at which the region begins.", minimum=0, maximum=LARGEST)},
        key=_type("string", "The name of the shared memory object, as `/camera`."),
        byte_size=_type("integer", minimum=1, maximum=LARGEST),
    ),
    "CudaRegionRequest": _object(
        "Memory of the GPU that models run on; refused where they run on processors.",
        {"device_id": _type("integer", "The GPU by its number.", minimum=0, maximum=LARGEST)},
        raw_handle=_object("", b64=_type("string", "The handle of CUDA, 64 bytes, in Base64.")),
        byte_size=_type("integer", minimum=1, maximum=LARGEST),
    ),
    "CudaRegions": _list(_object(name=TEXT, **_members("device_id byte_size", _COUNT))),
    "Regions": _list(_object(**_members("name key", TEXT), **_members("offset byte_size", _COUNT))),
    "State": _object(
        "What the dashboard shows; rates and percentiles are those of the last `window_s`.",
        **_members("server version policy", TEXT),
        reason=_type("string", "Why it is not ready; empty where it is."),
        **_members("ready draining", _BOOL),
        **_members("uptime_s now_s window_s", _NUMBER),
        in_flight=_COUNT,
        lanes=_list(
            _object(
                busy=_BOOL,
                utilisation=_type("number", minimum=0, maximum=1),
                share=_type(["string", "null"], "Its multiprocessors, if lanes are shares of a GPU."),
            )
        ),
        totals=_object(
            **_WINDOW_MEMBERS,
            **_members("requests success deadline_met deadline_missed preemptions aborts", _COUNT),
            failures=_map(_COUNT),
        ),
        memory=_object(
            held_bytes=_type(
                ["integer", "null"], "Of the server and its workers; null where the system does not tell."
            ),
            used_bytes=_COUNT,
            budget_bytes=_type(["integer", "null"], "null is no limit."),
        ),
        models=_list(ref("ModelState")),
    ),
    "ModelState": _object(
        **_members("name version message", TEXT),
        state=_type("string", enum=["unloaded", "loading", "ready", "failed"]),
        **_WINDOW_MEMBERS,
        **_members("p50_ms p90_ms p99_ms", _type(["number", "null"])),
        **_members("requests queued queue_size segments memory_bytes", _COUNT),
        mean_batch=_NUMBER,
        failures=_map(_COUNT),
        exits={"oneOf": [ref("ModelExits"), _type("null", "It has none.")]},
        shares=_map(_type("number", "Share of its recent running time that was on this share of a GPU.")),
    ),
    "ModelExits": _object(
        "Where rows leave a model, the end last.",
        names=_list(TEXT),
        taken=_list(_type("integer", "Rows that left there.", minimum=0)),
        threshold=_type("number", "Current confidence threshold for requests that do not set one."),
        accuracy=_type(["number", "null"], "Share of right answers at that threshold; null without a record."),
        merges=_type("integer", "Batches that joined another one half-way.", minimum=0),
    ),
    "Timeline": _object(now_s=_NUMBER, models=_list(TEXT), spans=_list(ref("Span"))),
    "Span": _object(
        "A segment on a lane; its times are on the clock of `now_s`.",
        **_members("model segment", TEXT),
        **_members("start_s end_s predicted_s", _NUMBER),
        **_members("lane batch id", _COUNT),
        outcome=_type("string", enum=["done", "aborted", "failed"]),
    ),
    "History": _object(
        "Samples of the last `kept_s`, oldest first, on the clock of `now_s`.",
        **_members("step_s kept_s", _NUMBER),
        times_s=_list(_NUMBER),
        totals=_object("Of all models.", **_HISTORY_MEMBERS),
        models=_list(
            _object(
                "Of the models that served requests most recently.",
                **_members("name version", TEXT),
                **_HISTORY_MEMBERS,
            )
        ),
    ),
    "Profile": _object(
        "What a simulation of this server needs.",
        **_members("policy late", TEXT),
        device=_type(["string", "null"], "The GPUs that run the models; null: the cores."),
        policy_options=_map(_type(["boolean", "number"])),
        **_members("format lanes threads total_queue", _COUNT),
        **_members("default_slo_ms hand_over_s", _NUMBER),
        gpu=_type(["object", "null"], "How models share a GPU; null if they do not."),
        models=_map(ref("ModelProfile")),
    ),
    "ModelProfile": _object(
        "Seconds of each segment by batch size: measured when it was loaded, and seen since.",
        segments=_list(TEXT),
        **_members("times_s seen_s", _map(_list(_NUMBER))),
        **_members("max_batch queue_size", _COUNT),
        batch_timeout_ms=_NUMBER,
        like=_map(
            _type("object", "By batch size, the measured sensitivity to shares of a GPU; only where it was measured.")
        ),
        body=_type("string", "The file whose weights stitched models share; empty for other models."),
        exits=_list(_type("integer", "After how many segments samples may leave, the end not among them.", minimum=1)),
        exit_rates=_list(_type("number", "Share of the samples that leave there, the end last.")),
        gated=_type("boolean", "Whether the device can end a batch between two segments."),
        gates=_type(["object", "null"], "What its gates cost, as measured when it was loaded."),
    ),
    "Renewal": _object(
        "The changes that a server took over.",
        loaded=_list(_type("string", "A model that was loaded, new or in the place of its older version.")),
        left=_list(_type("string", "A model that was removed.")),
        failed=_map(_type("string", "Why a model could not be loaded; its older version remains in service.")),
        settings=_list(_type("string", "A setting that was taken over.")),
        restart=_list(_type("string", "A changed setting that needs a restart.")),
    ),
    "Trace": _object("Chrome's trace event format.", displayTimeUnit=TEXT, traceEvents=_list(_type("object"))),
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
    """Statuses besides 200 and those in ``TRANSPORT``."""
    parameters: tuple[Json, ...] = ()
    media: str = "application/json"
    works: bool = True
    """False: the document lists no status 200."""
    open: bool = False
    """Answered without an API key."""


SINCE = {
    "name": "since",
    "in": "query",
    "description": "Only what ended later, on the clock of `now_s`.",
    "schema": _type("number", default=0),
}
FRAMING = (
    {
        "name": HEADER_LENGTH,
        "in": "header",
        "description": "Bytes of the JSON part where binary tensors follow it; 0 where all of it is the one input.",
        "schema": _COUNT,
    },
    {"name": "Content-Encoding", "in": "header", "schema": _type("string", enum=["identity", "gzip", "deflate"])},
)
"""Headers of requests and answers that carry binary tensors."""


def document(paths: Iterable[Path], models: list[str], *, locked: bool) -> Json:
    """Return the OpenAPI document of a server. models: example names; locked: whether requests need an API key."""
    openapi: Json = {
        "openapi": "3.1.0",
        "info": {"title": "weft", "version": __version__, "description": ABOUT},
        "servers": [{"url": "/"}],
        "paths": {path.path: _path_item(path, locked) for path in paths},
        "components": {
            "schemas": SCHEMAS,
            "responses": {**{str(status): _error_response(status) for status in STATUSES}, "Probe503": _PROBE_503},
            "parameters": {
                "model": _path_parameter("model", models),
                "version": _path_parameter("version", ["1"]),
                "region": _path_parameter("region", ["frames"]),
            },
        },
    }
    if locked:
        openapi["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
        }
        openapi["security"] = [{"bearer": []}, {"header": []}]
    return openapi


def _path_item(path: Path, locked: bool) -> Json:
    """Return a path's entry: an operation per method, and the parameters in the path; *locked*: see ``document``."""
    names = [ref(name, "parameters") for name in ("model", "version", "region") if f"{{{name}}}" in path.path]
    operations: Json = {method.lower(): _operation(path, method, locked) for method in path.methods}
    return {**operations, "parameters": names} if names else operations


def _operation(path: Path, method: str, locked: bool) -> Json:
    """Return the entry of one method of a path; *locked*: whether requests need an API key."""
    statuses = TRANSPORT | set(path.statuses)
    if locked and not path.open:
        statuses |= {401, 429} if method == "POST" else {401}
    responses = {"200": _success_response(path, method)} if path.works else {}
    responses |= {str(status): ref(str(status), "responses") for status in sorted(statuses)}
    if path.schema == HEALTH:
        responses["503"] = ref("Probe503", "responses")
    # operation ids must be unique in a document; the first method of a path has no suffix
    suffix = "" if method == path.methods[0] else {"HEAD": "Head", "POST": "Change"}[method]
    operation: Json = {"operationId": path.id + suffix, "summary": path.summary, "responses": responses}
    if path.parameters:
        operation["parameters"] = list(path.parameters)
    if path.body and method == "POST":
        operation["requestBody"] = _request_body(path)
    if path.open:
        operation["security"] = []
    return operation


def _request_body(path: Path) -> Json:
    """Return the description of a request's body; for inference it may be binary, and is required."""
    content: Json = {"application/json": {"schema": path.body}}
    if path.parameters == FRAMING:
        content["application/octet-stream"] = {}
    return {"required": path.parameters == FRAMING, "content": content}


def _success_response(path: Path, method: str) -> Json:
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


def _error_response(status: int) -> Json:
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
    "description": "Not ready or not live; or the connection itself was refused.",
    "content": {"application/json": {"schema": {"anyOf": [ref("Health"), ref("Error")]}}},
}


def _path_parameter(name: str, examples: list[str]) -> Json:
    """Return the description of a parameter that is one segment of a path."""
    return {"name": name, "in": "path", "required": True, "schema": _type("string", minLength=1, examples=examples)}
