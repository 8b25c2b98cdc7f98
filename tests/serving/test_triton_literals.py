"""JSON with NaN and infinities, both ways; all else is as orjson has it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from weft.base.errors import BadRequest
from weft.runtime.tensors import TensorSpec
from weft.serving import json_text, routes
from weft.serving.wire import InferRequest, InferResponse, ModelSpec, Wanted, decode, encode


def model(kind: str = "FP32") -> ModelSpec:
    return ModelSpec("same", "1", (TensorSpec("x", kind, (-1, 3)),), (TensorSpec("y", kind, (-1, 3)),))


def body(data: str, kind: str = "FP32", **more: Any) -> bytes:
    text = json.dumps({"inputs": [{"name": "x", "shape": [1, 3], "datatype": kind, "data": 0}], **more})
    return text.replace('"data": 0', f'"data": {data}').encode()


def answer(*arrays: np.ndarray, kind: str = "FP32") -> bytes:
    outputs = tuple(TensorSpec(f"y{at}", kind, (-1, 3)) for at in range(len(arrays)))
    spec = replace(model(kind), outputs=outputs)
    wanted = tuple(Wanted(each.name, False) for each in outputs)
    computed = {each.name: array for each, array in zip(outputs, arrays, strict=True)}
    parts, length = encode(InferResponse(InferRequest({}, "null", {}, wanted), spec, computed))
    assert length is None
    return parts[0]


# Reading


@pytest.mark.parametrize("kind", ["FP16", "FP32", "FP64"])
@pytest.mark.parametrize("data", ["[NaN, Infinity, -Infinity]", "[[NaN, Infinity, -Infinity]]"])
def test_literals_are_read_as_floats(kind: str, data: str) -> None:
    found = decode(body(data, kind), None, model(kind)).inputs["x"]
    assert np.array_equal(found, np.array([[np.nan, np.inf, -np.inf]], found.dtype), equal_nan=True)


def test_literals_are_no_whole_numbers_and_no_parameters_of_a_tensor() -> None:
    with pytest.raises(BadRequest, match="every element of INT8 is an integer, not nan"):
        decode(body("[NaN, 1, 2]", "INT8"), None, model("INT8"))
    with pytest.raises(BadRequest, match="dimension nan is not an integer"):
        decode(body("[1, 2, 3]").replace(b"[1, 3]", b"[1, NaN]"), None, model())


def test_a_request_with_a_literal_is_otherwise_read_as_one_without() -> None:
    given = body("[NaN, 18446744073709551615, 1.5]", id="é\u00e9", parameters={"a": 2**64 - 1, "b": "NaN"})
    found = decode(given, None, model())
    assert found.id == "éé" and found.parameters == {"a": 2**64 - 1, "b": "NaN"}
    assert found.inputs["x"][0, 1] == np.float32(2**64)


@pytest.mark.parametrize(
    "text",
    [
        b"NaN,",
        b"[NaN",
        b"nan",
        b"[NaN, 1e999]",
        b"[NaN, " + b"9" * 5000 + b"]",
        b'[NaN, "\\ud800"]',
        b'[NaN, "\xff"]',
        b"[NaN]" + b"[" * 5000,
        b"[" * 5000 + b"NaN",
        b'[NaN, "\x01"]',
        b"[Infinity, +1]",
        b"[--Infinity]",
    ],
)
def test_what_cannot_be_read_is_still_refused(text: bytes) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        json_text.loads(text)


def test_whole_numbers_are_those_of_orjson() -> None:
    numbers = ["0", "-1", str(2**63), str(2**64 - 1), str(2**64), str(-(2**63) - 1), "1e3", "-0"]
    plain = orjson.loads(f"[{','.join(numbers)}]")
    found = json_text.loads(f"[{','.join([*numbers, 'NaN'])}]".encode())
    assert found[:-1] == plain and list(map(type, found[:-1])) == list(map(type, plain))
    assert math.isnan(found[-1])


def test_only_the_json_part_of_a_body_is_looked_at() -> None:
    assert json_text.has_literals(b"[NaN]") and json_text.has_literals(b"[-Infinity]")
    assert not json_text.has_literals(b"[1]NaN", 3) and not json_text.has_literals(b"[null]")


def test_the_parameters_of_a_request_that_waits_for_its_model_are_seen_beside_literals() -> None:
    assert routes.peeked(b'{"inputs": [NaN], "parameters": {"timeout": 5}}', None) == {"timeout": 5}


# Writing


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_what_is_not_finite_is_written_as_a_literal(kind: type[np.generic]) -> None:
    array = np.array([[np.nan, np.inf, -np.inf], [1.5, np.nan, -0.25]], kind)
    names = {np.float16: "FP16", np.float32: "FP32", np.float64: "FP64"}
    text = answer(array, kind=names[kind])
    assert b"[NaN,Infinity,-Infinity,1.5,NaN,-0.25]" in text
    data = json.loads(text)["outputs"][0]["data"]
    assert np.array_equal(np.array(data, kind).reshape(2, 3), array, equal_nan=True)


def test_finite_outputs_beside_it_are_written_as_ever() -> None:
    text = answer(np.array([[1, 2, 3]], np.float32), np.array([[np.nan, 1, 1]], np.float32))
    assert b"[1.0,2.0,3.0]" in text and b"[NaN,1.0,1.0]" in text and b'"id":"null"' in text


def test_an_id_of_null_changes_nothing() -> None:
    assert orjson.loads(answer(np.array([[1, 2, 3]], np.float32)))["outputs"][0]["data"] == [1, 2, 3]


# Ids, outputs that are named twice, parameters


def test_ids_have_up_to_64_ki_characters() -> None:
    assert len(decode(body("[1,2,3]", id="i" * 65536), None, model()).id) == 65536
    with pytest.raises(BadRequest, match="id has 65537 characters; at most 65536 are allowed"):
        decode(body("[1,2,3]", id="i" * 65537), None, model())


def test_an_output_named_twice_is_answered_once_as_first_asked_for() -> None:
    twice = [{"name": "y", "parameters": {"binary_data": True}}, {"name": "y", "parameters": {"classification": 2}}]
    assert decode(body("[1,2,3]", outputs=twice), None, model()).wanted == (Wanted("y", True),)
    with pytest.raises(BadRequest, match="4097 outputs are asked for; at most 4096"):
        decode(body("[1,2,3]", outputs=[{"name": "y"}] * 4097), None, model())


@pytest.mark.parametrize("key", ["sequence_id", "sequence_start", "sequence_end", "triton_custom"])
def test_parameters_of_sequences_and_of_the_server_are_refused_by_name(key: str) -> None:
    with pytest.raises(BadRequest, match=f"parameter '{key}' is not supported"):
        decode(body("[1,2,3]", parameters={key: 7}), None, model())


def test_no_sequence_and_a_final_answer_may_be_asked_for() -> None:
    given = {"sequence_id": 0, "sequence_start": False, "triton_enable_empty_final_response": True}
    assert decode(body("[1,2,3]", parameters=given), None, model()).parameters == given
