"""The OpenAPI document against the specification, the routes and a real server's answers."""

from __future__ import annotations

import http.client
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from tests.conformance.schema import resolve
from tests.serving.live import PATIENCE_S, Live, mlp, running
from weft.serving import proto
from weft.serving.endpoints import ENDPOINTS, RPCS, find

KEY = "k3y"
METHODS = ("get", "head", "post", "put", "delete", "patch", "options")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with running(mlp(tmp_path_factory.mktemp("models") / "net.onnx"), grpc_port=None) as server:
        yield server


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with running(mlp(tmp_path_factory.mktemp("models") / "net.onnx"), grpc_port=None, api_key=KEY) as server:
        yield server


Answer = tuple[int, dict[str, str], bytes]


def ask(live: Live, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
    connection = http.client.HTTPConnection(live.address, timeout=PATIENCE_S)
    try:
        connection.request(method.upper(), path, body, headers)
        answer = connection.getresponse()
        return answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def document(live: Live, **headers: str) -> dict[str, Any]:
    status, _, body = ask(live, "GET", "/openapi.json", **headers)
    assert status == 200
    found = json.loads(body)
    assert isinstance(found, dict)
    return found


def operations(found: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in found["paths"].items():
        for method in METHODS:
            if method in item:
                yield path, method, item[method]


def filled(path: str) -> str:
    return path.replace("{model}", "net").replace("{version}", "1").replace("{region}", "frames")


def request_for(path: str) -> bytes:
    """A body the server takes."""
    if not path.endswith("infer"):
        return b""
    row = {"name": "x", "datatype": "FP32", "shape": [1, 64], "data": [0.5] * 64}
    return json.dumps({"id": "one", "inputs": [row], "parameters": {"priority": 1, "weft_slo_ms": 500.5}}).encode()


def closed(node: Any) -> Any:
    """A schema in which objects have no properties but those that are named."""
    if isinstance(node, list):
        return [closed(each) for each in node]
    if not isinstance(node, dict):
        return node
    found = {key: closed(value) for key, value in node.items()}
    if node.get("type") == "object" and "properties" in node and "additionalProperties" not in node:
        found["additionalProperties"] = False
    return found


def check(found: dict[str, Any], schema: Any, value: Any) -> None:
    """A value has exactly the shape that the document promises."""
    whole = {"components": closed(found["components"]), **closed(schema)}
    Draft202012Validator(whole).validate(value)


def test_the_document_is_valid_openapi(locked: Live) -> None:
    OpenAPIV31SpecValidator(document(locked, authorization=f"Bearer {KEY}")).validate()


def test_every_schema_is_a_valid_schema(live: Live) -> None:
    for schema in document(live)["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_every_component_is_used_but_the_405_that_no_operation_can_give(live: Live) -> None:
    found = document(live)
    used = set(re.findall(r'"\$ref": "#/components/(\w+/\w+)"', json.dumps(found)))
    defined = {f"{kind}/{name}" for kind, each in found["components"].items() for name in each}
    assert defined - used == {"responses/401", "responses/405", "responses/429"}  # this server has no key


def test_the_table_gives_the_paths_of_the_document_and_the_calls_of_grpc(live: Live) -> None:
    assert list(document(live)["paths"]) == [endpoint.path for endpoint in ENDPOINTS]
    assert {*RPCS, "ModelStreamInfer"} == {*proto.METHODS}
    for endpoint in ENDPOINTS:
        assert find(filled(endpoint.path)).endpoint is endpoint


def test_described_operations_answer_as_described(live: Live) -> None:
    found = document(live)
    for path, method, operation in operations(found):
        if path.endswith("unload") or "{region}" in path:
            continue
        status, headers, body = ask(live, method, filled(path), request_for(path))
        responses = operation["responses"]
        assert status == (200 if "200" in responses else 501), (path, body)
        response = resolve(found, responses[str(status)])
        if "content" not in response:
            assert body == b"", path
            continue
        media = headers["content-type"].partition(";")[0]
        assert media in response["content"]
        if media == "application/json":
            check(found, response["content"][media]["schema"], json.loads(body))


def test_methods_that_are_not_described_are_refused(live: Live) -> None:
    found = document(live)
    for path, item in found["paths"].items():
        if "200" not in item.get("get", item.get("post"))["responses"]:
            continue  # not supported, whatever the method
        for method in sorted(set(METHODS) - item.keys()):
            status, _, body = ask(live, method, filled(path))
            assert status == 405, (method, path)
            if method != "head":
                check(found, found["components"]["schemas"]["Error"], json.loads(body))


def test_only_described_paths_exist(live: Live) -> None:
    for path in document(live)["paths"]:
        status, _, body = ask(live, "GET", f"{filled(path).rstrip('/')}/more")
        assert status == 404, (path, body)


def test_a_path_without_the_name_of_its_model_leads_nowhere(live: Live) -> None:
    for path in ("/v2/models//ready", "/v2/repository/models//load", "/v2/repository/models//unload"):
        assert ask(live, "POST" if "repository" in path else "GET", path, b"")[0] == 404, path


def test_unload_and_load_answer_as_described(live: Live) -> None:
    assert ask(live, "POST", "/v2/repository/models/net/unload", b"{}")[0] == 200
    assert ask(live, "GET", "/v2/models/net/ready")[::2] == (503, b'{"name":"net","ready":false}')
    assert ask(live, "GET", "/v2/models/net")[0] == 404
    assert ask(live, "POST", "/v2/repository/models/net/load")[0] == 200
    assert ask(live, "GET", "/v2/models/net/ready")[0] == 200


@pytest.mark.parametrize(
    ("path", "method", "body", "status"),
    [
        ("/v2/models/net/infer", "POST", b"{}", 400),
        ("/v2/models/none/infer", "POST", b"{}", 404),
        ("/v2/models/net/versions/7", "GET", b"", 404),
        ("/v2/repository/models/none/load", "POST", b"", 404),
        ("/v2/repository/models/none/unload", "POST", b"[]", 400),
        ("/v2/repository/index", "POST", b"[]", 400),
        ("/weft/timeline?since=soon", "GET", b"", 400),
        ("/v2/logging", "POST", b'{"log_file": "elsewhere"}', 501),
        ("/v2/logging", "POST", b'{"log_info": 1}', 400),
        ("/v2/trace/setting", "POST", b'{"trace_rate": "0"}', 400),
        ("/v2/models/none/trace/setting", "GET", b"", 404),
        ("/v2/repository/models/net/load", "POST", b'{"parameters": {"config": "{"}}', 400),
        ("/v2/systemsharedmemory/region/frames/status", "GET", b"", 404),
        ("/v2/systemsharedmemory/region/frames/register", "POST", b"{}", 400),
        ("/v2/cudasharedmemory/region/frames/status", "GET", b"", 404),
        ("/v2/cudasharedmemory/region/frames/register", "POST", b"{}", 400),
    ],
)
def test_refusals_answer_as_described(live: Live, path: str, method: str, body: bytes, status: int) -> None:
    found = document(live)
    given, _, answer = ask(live, method, path, body)
    assert given == status
    plain = re.sub(r"/models/(net|none)", "/models/{model}", path.partition("?")[0])
    plain = re.sub(r"/versions/\d+", "/versions/{version}", plain)
    plain = plain.replace("/region/frames/", "/region/{region}/")
    response = resolve(found, found["paths"][plain][method.lower()]["responses"][str(status)])
    check(found, response["content"]["application/json"]["schema"], json.loads(answer))


@pytest.mark.parametrize(
    ("parameter", "good", "bad"),
    [
        ("timeout", [0, 600_000_000, 2**62, 2**64 - 1], [-1, 2**64, 1.5, "1", True]),
        ("priority", [0, 1, 9, 2**62, 2**64 - 1], [-1, 2**64, 0.5, True]),
        ("weft_slo_ms", [0.1, 1000, 1e9], [0, -1, 1e10, "1", True]),
        ("weft_best_effort", [True, False], [0, "true"]),
        ("binary_data_output", [False], [0, "yes"]),
        ("anything", ["at", "all", 1.5, False], [None, [], {}]),
    ],
)
def test_the_document_and_the_server_agree_on_parameters(
    live: Live, parameter: str, good: list[Any], bad: list[Any]
) -> None:
    found = document(live)
    schema = found["components"]["schemas"]["InferParameters"]
    checker = Draft202012Validator({"components": found["components"], **schema})
    for value, expected in [(each, True) for each in good] + [(each, False) for each in bad]:
        request = json.loads(request_for("infer"))
        request["parameters"] = {parameter: value}
        status, _, body = ask(live, "POST", "/v2/models/net/infer", json.dumps(request).encode())
        assert (status == 200) is checker.is_valid(request["parameters"]) is expected, (value, body)


def test_binary_answers_carry_the_described_header(live: Live) -> None:
    request = json.loads(request_for("infer"))
    request["parameters"] = {"binary_data_output": True}
    operation = document(live)["paths"]["/v2/models/{model}/infer"]["post"]
    status, headers, body = ask(live, "POST", "/v2/models/net/infer", json.dumps(request).encode())
    assert status == 200
    assert headers["content-type"] in operation["responses"]["200"]["content"]
    (name,) = operation["responses"]["200"]["headers"]
    assert len(body) == int(headers[name.lower()]) + 4 * 10


def test_a_key_is_described_and_asked_for_where_described(locked: Live) -> None:
    found = document(locked, authorization=f"Bearer {KEY}")
    assert document(locked, **{"X-Api-Key": KEY}) == found
    assert found["security"] == [{"bearer": []}, {"header": []}]
    for path, method, operation in operations(found):
        status, headers, body = ask(locked, method, filled(path), request_for(path))
        if operation.get("security") == []:
            assert status == 200 and "401" not in operation["responses"], path
            continue
        assert status == 401, path
        response = resolve(found, operation["responses"]["401"])
        assert {name.lower() for name in response["headers"]} <= headers.keys()
        if method != "head":
            check(found, response["content"]["application/json"]["schema"], json.loads(body))


def test_without_a_key_none_is_described(live: Live) -> None:
    found = document(live)
    assert "security" not in found and "securitySchemes" not in found["components"]
    assert not [path for path, _, operation in operations(found) if "401" in operation["responses"]]


def test_model_names_are_shown_as_examples(live: Live) -> None:
    assert document(live)["components"]["parameters"]["model"]["schema"]["examples"] == ["net"]


def test_operations_have_ids_of_their_own(live: Live) -> None:
    ids = [operation["operationId"] for _, _, operation in operations(document(live))]
    assert len(ids) == len(set(ids))


def test_a_full_memory_says_when_to_come_back(tmp_path: Path) -> None:
    net = mlp(tmp_path / "net.onnx")
    with running(net, grpc_port=None, memory_budget_bytes=1) as live:
        found = document(live)
        status, headers, body = ask(live, "POST", "/v2/models/net/infer", request_for("infer"))
        assert status == 503
        response = resolve(found, found["paths"]["/v2/models/{model}/infer"]["post"]["responses"]["503"])
        assert {name.lower() for name in response["headers"]} <= headers.keys()
        check(found, response["content"]["application/json"]["schema"], json.loads(body))


@pytest.mark.skipif(sys.platform != "linux", reason="no shared memory is offered elsewhere")
def test_regions_of_shared_memory_answer_as_described(live: Live) -> None:
    found, paths = document(live), "/v2/systemsharedmemory/region/{region}/"
    made = Path("/dev/shm") / f"weft-test-{os.getpid()}-described"
    made.write_bytes(bytes(64))
    try:
        body = json.dumps({"key": f"/{made.name}", "byte_size": 64}).encode()
        for what, method, content in (("register", "POST", body), ("status", "GET", b""), ("unregister", "POST", b"")):
            described = found["paths"][paths + what][method.lower()]["responses"]["200"]
            status, _, answer = ask(live, method, filled(paths + what), content)
            assert status == 200, answer
            if "content" in described:
                check(found, described["content"]["application/json"]["schema"], json.loads(answer))
            else:
                assert answer == b""
    finally:
        made.unlink()
