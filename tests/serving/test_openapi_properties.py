"""Requests made from the OpenAPI document, right ones and spoilt ones, sent to a real server over a socket.

Whatever is sent, the answer has a status that the document lists, an error says why as JSON, a success looks as
described, nothing is the server's fault, and afterwards the server still serves.
"""

from __future__ import annotations

import http.client
import json
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote_to_bytes

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from onnx import TensorProto, helper

from tests.conformance.schema import resolve
from tests.serving.live import PATIENCE_S, Live, mlp, running, save
from weft.runtime.tensors import DATATYPES
from weft.serving.endpoints import ENDPOINTS
from weft.serving.openapi import HEADER_LENGTH, TRANSPORT

Content = tuple[tuple[tuple[str, str], ...], bytes]
"""Headers and a body."""
DEFLATED = (("Content-Encoding", "deflate"),)
OPERATIONS = [(endpoint.path, method.lower()) for endpoint in ENDPOINTS for method in endpoint.methods]
KINDS = {
    "text": (TensorProto.STRING, "BYTES"),
    "half": (TensorProto.FLOAT16, "FP16"),
    "wide": (TensorProto.DOUBLE, "FP64"),
    "flag": (TensorProto.BOOL, "BOOL"),
    "byte": (TensorProto.UINT8, "UINT8"),
    "long": (TensorProto.INT64, "INT64"),
}
MODELS = {"net": {"x": ("FP32", (-1, 64))}, "mix": {name: (kind, (-1,)) for name, (_, kind) in KINDS.items()}}


def mix(path: Path) -> Path:
    """A model that gives back what it takes, of many types."""
    nodes = [helper.make_node("Identity", [name], [f"{name}_out"]) for name in KINDS]
    inputs = [helper.make_tensor_value_info(name, kind, ["n"]) for name, (kind, _) in KINDS.items()]
    outputs = [helper.make_tensor_value_info(f"{name}_out", kind, ["n"]) for name, (kind, _) in KINDS.items()]
    return save(helper.make_graph(nodes, "mix", inputs, outputs), path)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("models")
    models = mlp(folder / "net.onnx"), mix(folder / "mix.onnx"), mlp(folder / "spare.onnx", hidden=16)
    with running(*models, grpc_port=None, max_body_bytes=1 << 20) as server:
        yield server


class Document(dict[str, Any]):
    """The server's OpenAPI document; short where a failing test names it."""

    def __repr__(self) -> str:
        return "document"


@pytest.fixture(scope="module")
def document(live: Live) -> Document:
    return Document(json.loads(send(live, Request("GET", "/openapi.json")).body))


# Sending


class Request(NamedTuple):
    """A request as it goes over the wire."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


class Answer(NamedTuple):
    status: int
    media: str
    headers: dict[str, str]
    body: bytes


def send(live: Live, request: Request) -> Answer:
    lines = [f"{request.method} {request.target} HTTP/1.1", "Host: localhost", f"Content-Length: {len(request.body)}"]
    lines += [f"{name}: {value}" for name, value in request.headers]
    head = "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape")
    with socket.create_connection(("127.0.0.1", live.server.http_port or 0), timeout=PATIENCE_S) as connection:
        connection.sendall(head + request.body)
        answer = http.client.HTTPResponse(connection, method=request.method)
        try:
            answer.begin()
            headers = {key.lower(): value for key, value in answer.getheaders()}
            body = answer.read()
            if headers.get("content-encoding") == "gzip":
                body = zlib.decompress(body, 31)
            return Answer(answer.status, headers.get("content-type", "").partition(";")[0], headers, body)
        finally:
            answer.close()


# What the document promises


def template(document: Document, target: str) -> str | None:
    """The described path that a target means."""
    path = unquote_to_bytes(target.partition("?")[0]).decode("utf-8", "replace")
    parts = path.strip("/").split("/")
    for found in sorted(document["paths"], key=lambda path: path.count("{")):
        words = found.strip("/").split("/")
        if len(words) == len(parts) and all(
            bool(part) or word == "{version}" if word.startswith("{") else word == part
            for word, part in zip(words, parts, strict=True)
        ):
            return str(found)
    return None


def judge(document: Document, request: Request, answer: Answer) -> None:
    """An answer is one of those that the document promises."""
    assert answer.status != 500, answer.body
    found = template(document, request.target)
    operation = document["paths"][found].get(request.method.lower()) if found else None
    if answer.status == 404 and request.target.partition("?")[0].endswith("/"):
        operation = None  # it is another path than without
    if operation is None:
        assert answer.status in TRANSPORT | {404, 405}, answer
    else:
        assert str(answer.status) in operation["responses"], answer
    if request.method == "HEAD":
        assert answer.body == b""
    elif answer.status >= 400:
        judge_error(document, operation, answer)
    elif answer.media == "application/json" and operation:
        content = operation["responses"]["200"].get("content")
        if content:
            schema = {"components": document["components"], **content[answer.media]["schema"]}
            Draft202012Validator(schema).validate(json.loads(answer.body))
        else:
            assert answer.body == b""


def judge_error(document: Document, operation: dict[str, Any] | None, answer: Answer) -> None:
    response = resolve(document, operation["responses"][str(answer.status)]) if operation else {"content": {}}
    if not answer.body:
        assert "content" not in response, answer  # a probe says no
        return
    assert answer.media == "application/json"
    error = json.loads(answer.body)
    assert list(error) == ["error"] and isinstance(error["error"], str) and error["error"]
    assert "\n" not in error["error"]
    if answer.status == 503:
        assert int(answer.headers["retry-after"]) >= 1


def alive(live: Live) -> None:
    """It lives, takes requests, has forgotten none, and computes."""
    assert send(live, Request("GET", "/v2/health/live")).status == 200
    assert send(live, Request("GET", "/v2/health/ready")).status == 200
    assert send(live, Request("POST", "/v2/repository/models/net/load")).status == 200
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 64], "data": [0.5] * 64}
    body = json.dumps({"inputs": [tensor]}).encode()
    assert send(live, Request("POST", "/v2/models/net/infer", (), body)).status == 200
    assert live.server.service.dispatcher.pending == 0


# Making requests

ANY_TEXT = st.text(max_size=12) | st.sampled_from(
    ["net", "", "\0", "%", "\ud800", "é", "\U0001d518", "../..", "a" * 300]
)
ODD: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([None, True, False, -1, 0, 1.5, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 1e308, 5e-324]),
    st.sampled_from([float("nan"), float("inf"), [], {}, [[]], [[[1], [2, 3]]], {"": {}}, "FP32", "BF16", "INT64"]),
    ANY_TEXT,
    st.integers(),
    st.lists(st.integers() | st.floats() | st.none(), max_size=3),
)
ELEMENT = st.booleans().flatmap(lambda whole: st.integers(-(2**70), 2**70) if whole else ODD)
JSON = st.recursive(
    ODD, lambda more: st.lists(more, max_size=3) | st.dictionaries(ANY_TEXT, more, max_size=3), max_leaves=8
)
RAW = st.sampled_from(
    [b"", b"{", b"[" * 5000, b"nul", b"\xff\xfe", b'{"inputs": [}', b'"\\ud800"', b"{}{}"]
) | st.binary(max_size=40)
LENGTHS = st.sampled_from(["0", "1", "17", "-1", "+1", "1e3", "1_0", "\u0663", "\xb2", "9" * 30, "", "0x10", "1, 1"])
HEADERS = st.lists(
    st.sampled_from(
        [
            ("Content-Encoding", "gzip"),
            ("Content-Encoding", "br"),
            ("Content-Encoding", "Identity"),
            ("Content-Type", "text/plain; charset=utf-9"),
            ("Content-Type", "application/octet-stream"),
            ("Accept", "image/png"),
            ("Accept-Encoding", "gzip, deflate, br, *;q=0"),
            ("Authorization", "Bearer nobody"),
            ("Authorization", "Basic \x80\xff"),
            ("X-Api-Key", "é"),
            ("Expect", "100-continue"),
            ("Expect", "the spanish inquisition"),
            ("Upgrade", "websocket"),
            ("Connection", "close"),
            ("Connection", "upgrade"),
            ("Transfer-Encoding", "chunked"),
            ("Content-Length", "7"),
            (HEADER_LENGTH, "17"),
            ("traceparent", "00-zz-1"),
            ("X-Long", "a" * 20_000),
            ("Bad Name", "1"),
            ("", "none"),
        ]
    ),
    max_size=2,
).map(tuple)


def from_schema(document: Document, schema: Any) -> st.SearchStrategy[Any]:
    """Values that a schema of the document allows."""
    schema = resolve(document, schema)
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kinds = schema.get("type", "object")
    made = [_of_kind(document, kind, schema) for kind in ([kinds] if isinstance(kinds, str) else kinds)]
    return st.one_of(made)


def _of_kind(document: Document, kind: str, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    match kind:
        case "string":
            return st.text(min_size=schema.get("minLength", 0), max_size=min(20, schema.get("maxLength", 20)))
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "integer":
            return st.integers(schema.get("minimum"), schema.get("maximum"))
        case "number":
            low = schema.get("exclusiveMinimum", schema.get("minimum"))
            high = schema.get("maximum")
            floats = st.floats(
                low, high, exclude_min="exclusiveMinimum" in schema, allow_nan=False, allow_infinity=False
            )
            return floats | st.integers(None if low is None else int(low) + 1, None if high is None else int(high))
        case "array":
            return st.lists(from_schema(document, schema["items"]) if "items" in schema else JSON, max_size=3)
    known = {key: from_schema(document, value) for key, value in schema.get("properties", {}).items()}
    always = {key: made for key, made in known.items() if key in schema.get("required", ())}
    rest = {key: made for key, made in known.items() if key not in always}
    objects = st.fixed_dictionaries(always, optional=rest)
    extra = schema.get("additionalProperties")
    if not isinstance(extra, dict):
        return objects
    others = st.dictionaries(
        st.text(max_size=8).filter(lambda key: key not in known), from_schema(document, extra), max_size=1
    )
    return st.builds(lambda one, two: {**two, **one}, objects, others)


ELEMENTS: dict[str, st.SearchStrategy[Any]] = {
    "BYTES": st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    "BOOL": st.booleans(),
    "UINT8": st.integers(0, 255),
    "INT64": st.integers(-(2**63), 2**63 - 1),
    "FP16": st.floats(width=16, allow_nan=False, allow_infinity=False),
    "FP32": st.floats(width=32, allow_nan=False, allow_infinity=False),
    "FP64": st.floats(allow_nan=False, allow_infinity=False),
}


def fitting(document: Document, model: str) -> st.SearchStrategy[dict[str, Any]]:
    """Requests that the model can compute; their parameters are any that the document allows."""
    parameters = from_schema(document, {"$ref": "#/components/schemas/InferParameters"})
    extras = st.fixed_dictionaries({}, optional={"parameters": parameters, "id": st.text(max_size=20)})

    @st.composite
    def made(draw: st.DrawFn) -> dict[str, Any]:
        rows = draw(st.integers(0, 3) | st.just(2))
        inputs = []
        for name, (datatype, shape) in MODELS[model].items():
            filled = [rows if size < 0 else size for size in shape]
            count = rows * (shape[1] if len(shape) > 1 else 1)
            values = draw(st.lists(ELEMENTS[datatype], min_size=3, max_size=3))
            data = [values[at % 3] for at in range(count)]
            inputs.append({"name": name, "datatype": datatype, "shape": filled, "data": data})
        return {"inputs": draw(st.permutations(inputs)), **draw(extras)}

    return made()


def framed(message: dict[str, Any]) -> Content:
    """The header and the body of a request whose tensors follow its JSON part, except for strings."""
    inputs, tail = [], b""
    for each in message["inputs"]:
        if each["datatype"] != "BYTES":
            part = np.array(each["data"], DATATYPES[each["datatype"]]).tobytes()
            each = {key: value for key, value in each.items() if key != "data"}
            each["parameters"] = {"binary_data_size": len(part)}
            tail += part
        inputs.append(each)
    head = json.dumps(message | {"inputs": inputs}).encode()
    return ((HEADER_LENGTH, str(len(head))),), head + tail


@st.composite
def spoilt(draw: st.DrawFn, value: Any) -> Any:
    """A value with something in it replaced, left out, doubled or added."""
    if isinstance(value, dict) and value and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(value)))
        match draw(st.integers(0, 4)):
            case 0:
                return {each: kept for each, kept in value.items() if each != key}
            case 1:
                return value | {draw(ANY_TEXT): draw(ODD)}
        return value | {key: draw(spoilt(value[key]))}
    if isinstance(value, list) and value and draw(st.integers(0, 5)):
        at = draw(st.integers(0, min(len(value), 8) - 1))
        match draw(st.integers(0, 4)):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return [*value, value[at]]
        return [*value[:at], draw(spoilt(value[at])), *value[at + 1 :]]
    return draw(ODD)


@st.composite
def odd_targets(draw: st.DrawFn, path: str, model: str) -> str:
    """A path with something odd in it, or behind it."""
    word = st.just("1") | ANY_TEXT.map(lambda text: quote(text.encode("utf-8", "surrogatepass"), safe=""))
    filled = path.replace("{version}", draw(word)).replace("{model}", draw(st.just(model) | word))
    filled = filled.replace("{region}", draw(word)) if "{region}" in filled else filled
    return filled + draw(
        st.sampled_from(["", "/", "//", "/infer", "/ready", "/versions/1", "/versions", "/%2e%2e", "/%00", "/%zz"])
        | st.sampled_from(["?", "?since=-1", "?since=1e400", "?since=%ff", "?since=nan&since=1", "?a=b&a", "/é", "#x"])
    )


def messages(document: Document, path: str, model: str) -> st.SearchStrategy[Any]:
    """JSON bodies that the document allows; for a path that has none, any."""
    operation = document["paths"][path].get("post", {})
    if "requestBody" not in operation:
        return JSON
    allowed = from_schema(document, operation["requestBody"]["content"]["application/json"]["schema"])
    return allowed | fitting(document, model) if path.endswith("infer") else allowed


def plain(message: Any) -> Content:
    return (), json.dumps(message).encode()


def odd_contents(document: Document, path: str, model: str) -> st.SearchStrategy[Content]:
    """Bodies that are broken in one of several ways, and the headers that go with them."""
    right = messages(document, path, model)
    ways: list[st.SearchStrategy[Content]] = [
        st.builds(lambda headers, message: (headers, plain(message)[1]), HEADERS, right),
        right.flatmap(spoilt).map(plain),
        RAW.map(lambda raw: ((), raw)),
        right.map(plain).flatmap(lambda content: cut(zlib.compress(content[1]))).map(lambda raw: (DEFLATED, raw)),
    ]
    return st.one_of(ways)


def nearly_right(document: Document, model: str) -> dict[str, st.SearchStrategy[Content]]:
    """Requests that would fit, were it not for a parameter, an element, a length or a byte."""
    fits = fitting(document, model)
    known = st.sampled_from(sorted(document["components"]["schemas"]["InferParameters"]["properties"]))
    return {
        "parameter": st.builds(lambda message, key, odd: plain(message | {"parameters": {key: odd}}), fits, known, ODD),
        "element": st.builds(with_element, fits, st.sampled_from([*MODELS[model]]), ELEMENT).map(plain),
        "length": st.builds(lambda message, length: (((HEADER_LENGTH, length),), framed(message)[1]), fits, LENGTHS),
        "byte": fits.map(framed).flatmap(lambda content: st.tuples(st.just(content[0]), cut(content[1]))),
    }


def with_element(message: dict[str, Any], name: str, element: Any) -> dict[str, Any]:
    """A request of which one input begins with this element."""
    inputs = [
        each | {"data": [element, *each["data"][1:]]} if each["name"] == name else each for each in message["inputs"]
    ]
    return message | {"inputs": inputs}


def cut(body: bytes) -> st.SearchStrategy[bytes]:
    """Bytes that end too early or too late, or of which one is another; or as they were."""
    return st.integers(0, len(body)).flatmap(
        lambda at: st.sampled_from([body, body[:at], body[:at] + b"\xff" + body[at + 1 :], body + b"\0"])
    )


def requests(document: Document, path: str, method: str) -> st.SearchStrategy[Request]:
    """Any request for an operation: as the document asks for it, with one part of it odd, or with all."""
    model = {"index": "net", "load": "spare", "unload": "spare"}.get(path.rpartition("/")[2], "mix")
    verb, odd_verb = (
        st.just(method.upper()),
        st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE"]),
    )
    target, odd_target = st.just(path.format(model=model, version="1", region="frames")), odd_targets(path, model)
    content = messages(document, path, model).map(plain) if method == "post" else st.just(((), b""))
    odd_content = odd_contents(document, path, model)
    parts = [(verb, target, content), (odd_verb, target, content), (verb, odd_target, content)]
    parts += [(verb, target, odd_content)] * 2 + [(odd_verb, odd_target, odd_content)]
    choice = st.one_of([st.builds(lambda verb, where, what: Request(verb, where, *what), *each) for each in parts])

    @st.composite
    def made(draw: st.DrawFn) -> Request:  # hypothesis would write out all of the choice
        return draw(choice)

    return made()


# The properties


TRIALS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
GIVEN_BACK = ("text", "flag", "byte", "long")
"""Inputs of ``mix`` that JSON carries there and back unchanged."""


@pytest.mark.parametrize(("path", "method"), OPERATIONS, ids=lambda each: each)
def test_whatever_is_sent_gets_an_answer_that_is_described(
    live: Live, document: Document, path: str, method: str
) -> None:
    @settings(TRIALS, max_examples=25 if path.endswith("infer") else 4 if method == "head" else 8)
    @given(requests(document, path, method))
    def trial(request: Request) -> None:
        judge(document, request, send(live, request))

    trial()
    alive(live)


@pytest.mark.parametrize("model", MODELS)
def test_requests_that_fit_are_computed(live: Live, document: Document, model: str) -> None:
    @settings(TRIALS, max_examples=20)
    @given(fitting(document, model), st.booleans())
    def trial(message: dict[str, Any], binary: bool) -> None:
        headers, body = framed(message) if binary else ((), json.dumps(message).encode())
        answer = send(live, Request("POST", f"/v2/models/{model}/infer", headers, body))
        strict = message.get("parameters", {}).get("timeout")
        assert answer.status == 200 or (strict and answer.status == 504), answer
        if answer.status == 200 and answer.media == "application/json":
            result = json.loads(answer.body)
            assert result.get("id", "") == message.get("id", "")
            given = {each["name"]: each["data"] for each in message["inputs"]}
            taken = {each["name"].removesuffix("_out"): each["data"] for each in result["outputs"]}
            assert all(taken[name] == given[name] for name in GIVEN_BACK if name in given)

    trial()
    alive(live)


@pytest.mark.parametrize("odd", ["parameter", "element", "length", "byte"])
def test_requests_that_nearly_fit_are_computed_or_refused(live: Live, document: Document, odd: str) -> None:
    @settings(TRIALS, max_examples=30)
    @given(nearly_right(document, "mix")[odd])
    def trial(content: Content) -> None:
        request = Request("POST", "/v2/models/mix/infer", *content)
        answer = send(live, request)
        assert answer.status in (200, 400, 504), answer
        judge(document, request, answer)

    trial()
    alive(live)


@pytest.mark.parametrize(
    ("path", "method"), [each for each in OPERATIONS if "{version}" in each[0]], ids=lambda each: each
)
def test_a_version_without_a_number_gets_an_answer_that_is_described(
    live: Live, document: Document, path: str, method: str
) -> None:
    request = Request(method.upper(), path.format(model="mix", version=""))
    judge(document, request, send(live, request))
