"""How an answer is compared with what is expected: what counts as a difference, and how a row is read and judged."""

from __future__ import annotations

import gzip
import json
import math
import os
from typing import Any

import pytest

from tests.conformance.judging import MEMORY, PlanRequest, judge, shared
from tests.conformance.matching import differences
from tests.conformance.over_grpc import GrpcAnswer, judge_grpc, plain, service_pb2
from tests.conformance.over_http import HttpAnswer, HttpTarget, judge_http, request_of
from tests.conformance.rows import GrpcRow, HttpRow
from tests.conformance.schema import violations


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        ({"a": 1}, {"a": 1, "b": 2}),
        ([1, 2.5], [1.0, 2.5]),
        ([math.nan, math.inf], [math.nan, math.inf]),
        ("~^4(\\.0+)?:1$", "4.000000:1"),
        ({"a": "<absent>"}, {}),
        (["<integer>", "<number>", "<text>", "<any>"], [3, 0.5, "", None]),
        ({"<has>": [{"name": "b"}]}, [{"name": "a"}, {"name": "b", "state": "READY"}]),
    ],
)
def test_no_difference(expected: Any, found: Any) -> None:
    assert differences(expected, found) == []


@pytest.mark.parametrize(
    ("expected", "found", "said"),
    [
        ({"a": 1}, {}, "answer.a is missing"),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "answer.a.b: 2 instead of 1"),
        ([1, 2], [1], "answer has 1 elements instead of 2: [1]"),
        (True, 1, "answer: 1 instead of True"),
        ("<integer>", True, "answer: True instead of <integer>"),
        ("~x", "y", "answer: 'y' instead of ~x"),
        ({"a": "<absent>"}, {"a": None}, "answer.a is there: None"),
        ({"<has>": ["b"]}, ["a"], "answer lacks 'b'"),
        ([math.nan], [0.0], "answer[0]: 0.0 instead of nan"),
        ({"a": 1}, [], "answer: [] instead of an object"),
        ([1], {}, "answer: {} instead of a list"),
    ],
)
def test_a_difference_says_where_it_is(expected: Any, found: Any, said: str) -> None:
    assert differences(expected, found) == [said]


def test_an_answer_that_lacks_what_the_schema_requires() -> None:
    assert violations("metadata_server_response", {"name": "x", "version": "1", "extensions": []}) == []
    assert len(violations("metadata_server_response", {"name": 1, "version": "1"})) == 2


def http_row(**values: Any) -> HttpRow:
    return HttpRow(**{"name": "row", "by": "weft", "http": "POST /v2/models/m/infer", "status": (200,)} | values)


def test_the_length_of_the_json_is_told_where_bytes_follow_it() -> None:
    head, _, body = request_of(http_row(body="{}", binary="ff00"), "there:1").partition(b"\r\n\r\n")
    assert head.splitlines()[:2] == [b"POST /v2/models/m/infer HTTP/1.1", b"Host: there:1"]
    assert b"Inference-Header-Content-Length: 2" in head and b"Content-Length: 4" in head
    assert body == b"{}\xff\x00"


def test_an_answer_is_judged_by_status_headers_json_and_bytes() -> None:
    row = http_row(answer={"a": 1}, answer_binary="ff", answer_headers={"x": "y"})
    headers = {"x": "y", "inference-header-content-length": "8"}
    assert judge_http(row, HttpAnswer(200, headers, b'{"a": 1}\xff')) == []
    wrong = HttpAnswer(200, headers | {"x": "z"}, b'{"a": 2}\x00')
    assert len(judge_http(row, wrong)) == 3
    assert judge_http(row, HttpAnswer(500, {}, b"oh")) == ["status 500 instead of 200: b'oh'"]
    (said,) = judge_http(http_row(answer={}), HttpAnswer(200, {}, b"no JSON"))
    assert said.startswith("the body cannot be read")
    assert judge_http(http_row(empty=True), HttpAnswer(200, {}, b"x")) == ["a body: b'x'"]


def test_a_packed_answer_is_unpacked() -> None:
    answer = HttpAnswer(200, {"content-encoding": "gzip"}, gzip.compress(b'{"a": 1}'))
    assert judge_http(http_row(answer={"a": 1}), answer) == []
    broken = HttpAnswer(200, {"content-encoding": "gzip"}, b'{"a": 1}')
    assert judge_http(http_row(answer={"a": 1}), broken)[0].startswith("the body cannot be read: it is not gzip")


def test_a_message_as_plain_values() -> None:
    message = service_pb2.ModelInferResponse(model_name="m", raw_output_contents=[b"\xff"])
    message.outputs.add(name="y", shape=[1, -1])
    message.parameters["k"].int64_param = 3
    found = plain(message)
    assert found["raw_output_contents"] == ["ff"] and found["parameters"] == {"k": 3} and found["id"] == ""
    assert found["outputs"] == [{"name": "y", "datatype": "", "shape": [1, -1], "parameters": {}, "contents": None}]


def test_a_call_is_judged_by_code_and_messages() -> None:
    row = GrpcRow(name="row", by="weft", grpc="ServerLive", code=("OK",), answers=({"live": True},))
    live = service_pb2.ServerLiveResponse(live=True).SerializeToString()
    assert judge_grpc(row, GrpcAnswer("OK", "", (live,))) == []
    assert judge_grpc(row, GrpcAnswer("OK", "", (b"",))) == ["answers[0].live: False instead of True"]
    assert judge_grpc(row, GrpcAnswer("INTERNAL", "oh", ())) == ["code INTERNAL instead of OK: 'oh'"]
    assert judge_grpc(row, GrpcAnswer("OK", "", (b"\xff\xff",)))[0].startswith("the message cannot be read")


def test_a_server_that_is_not_there_is_a_difference() -> None:
    (said,) = judge(PlanRequest(HttpTarget("http://127.0.0.1:1", 5.0), None), http_row())
    assert said.startswith("no answer: ConnectionRefusedError")


@pytest.mark.skipif(not MEMORY.is_dir(), reason="no /dev/shm")
def test_memory_is_there_for_a_row_and_then_no_more() -> None:
    key = f"weft-conformance-test-{os.getpid()}"
    with shared({key: "0102"}):
        assert (MEMORY / key).read_bytes() == b"\x01\x02"
    assert not (MEMORY / key).exists()


def test_a_row_says_json_that_can_be_read() -> None:
    from tests.conformance.rows import _made

    raw = {"name": "row", "by": "weft", "http": "GET /", "status": 200}
    assert _made(raw | {"answer": json.dumps({"a": 1})}).answer == {"a": 1}  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="row: "):
        _made(raw | {"answer": "{"})
    with pytest.raises(ValueError, match="unknown keys: colour"):
        _made(raw | {"colour": "red"})
