"""Requests and answers as bytes: what is taken, what is refused, and what an independent client makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest
import tritonclient.http as client
from numpy.testing import assert_array_equal
from tritonclient.grpc import InferResult, model_config_pb2, service_pb2
from tritonclient.utils import serialize_byte_tensor

from weft.base.errors import BadRequest, Failed
from weft.runtime.tensors import DATATYPES, Array, TensorSpec
from weft.serving import grpc_wire, proto
from weft.serving.regions import RegionPart
from weft.serving.wire import InferRequest, InferResponse, ModelSpec, Wanted, decode, encode

TWO = ModelSpec(
    "two",
    "3",
    (TensorSpec("x", "FP32", (-1, 2)), TensorSpec("n", "INT8", (2,))),
    (TensorSpec("y", "FP32", (-1, 2)), TensorSpec("s", "BYTES", (-1,))),
)

SAMPLES: dict[str, Array] = {
    "BOOL": np.array([[True, False, True]]),
    **{name: np.array([[0, 1, np.iinfo(dtype).max]], dtype) for name, dtype in DATATYPES.items() if dtype.kind == "u"},
    **{name: np.array([[np.iinfo(dtype).min, -1, 7]], dtype) for name, dtype in DATATYPES.items() if dtype.kind == "i"},
    **{name: np.array([[0.1, -2.5, 300]], dtype) for name, dtype in DATATYPES.items() if dtype.kind == "f"},
    "BYTES": np.array([[b"", "grüße".encode(), b"a\x00b"]], np.object_),
}


def same(datatype: str, shape: tuple[int, ...] = (-1, 3)) -> ModelSpec:
    """A model that gives back what it takes."""
    return ModelSpec("same", "1", (TensorSpec("x", datatype, shape),), (TensorSpec("y", datatype, shape),))


def plain(array: Array) -> list[Any]:
    """A tensor as flat JSON data."""
    return [item.decode() if isinstance(item, bytes) else item for item in array.reshape(-1).tolist()]


def tensor(array: Array, datatype: str, **changes: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": datatype, "shape": list(array.shape), "data": plain(array)} | changes


def good() -> dict[str, Any]:
    """A request that TWO takes."""
    return {
        "id": "7",
        "inputs": [
            {"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [1, 2.5, 3, 4]},
            {"name": "n", "shape": [2], "datatype": "INT8", "data": [-128, 127]},
        ],
    }


def ask(message: Any, tail: bytes | None = None, model: ModelSpec = TWO) -> InferRequest:
    head = orjson.dumps(message)
    return decode(head, None, model) if tail is None else decode(head + tail, len(head), model)


def read(parts: list[bytes], header_length: int | None) -> client.InferResult:
    return client.InferenceServerClient.parse_response_body(b"".join(parts), header_length=header_length)


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("nested", [False, True])
def test_json_data_flat_or_nested(datatype, nested):
    array = SAMPLES[datatype]
    data = [plain(array)] if nested else plain(array)
    request = ask({"inputs": [tensor(array, datatype, data=data)]}, model=same(datatype))
    got = request.inputs["x"]
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    assert_array_equal(got, array)
    assert (request.id, request.parameters, request.wanted) == ("", {}, (Wanted("y", False),))


def test_a_whole_request():
    request = ask(good() | {"parameters": {"priority": 2, "late": 0.5, "who": "me", "go": True}})
    assert_array_equal(request.inputs["x"], np.array([[1, 2.5], [3, 4]], np.float32))
    assert_array_equal(request.inputs["n"], np.array([-128, 127], np.int8))
    assert request.id == "7"
    assert request.parameters == {"priority": 2, "late": 0.5, "who": "me", "go": True}
    assert [wanted.name for wanted in request.wanted] == ["y", "s"]


@pytest.mark.parametrize("data", [5, [5]])
def test_a_scalar(data):
    request = ask({"inputs": [tensor(np.array(5.0), "FP64", data=data)]}, model=same("FP64", ()))
    assert request.inputs["x"].shape == () and request.inputs["x"] == 5


@pytest.mark.parametrize("shape, data", [((0, 3), []), ((2, 0), [[], []]), ((2, 0), [])])
def test_tensors_without_elements(shape, data):
    request = ask({"inputs": [tensor(np.empty(shape), "FP32", data=data)]}, model=same("FP32", (-1, -1)))
    assert request.inputs["x"].shape == shape
    binary = {"inputs": [binary_tensor("FP32", shape, 0)]}
    assert ask(binary, b"", same("FP32", (-1, -1))).inputs["x"].shape == shape


def test_bool_takes_zero_and_one():
    request = ask({"inputs": [tensor(SAMPLES["BOOL"], "BOOL", data=[1, False, 0])]}, model=same("BOOL"))
    assert request.inputs["x"].tolist() == [[True, False, False]]


def test_null_stands_for_absent_where_absence_is_allowed():
    request = ask(good() | {"id": None, "parameters": None, "outputs": None})
    assert (request.id, request.parameters, len(request.wanted)) == ("", {}, 2)


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Set what a path such as ``inputs.0.shape`` leads to."""

    def apply(message: Any) -> None:
        *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
        for step in way:
            message = message[step]
        message[last] = value

    return apply


@pytest.mark.parametrize(
    "path, value, error",
    [
        ("id", 7, "id must be a string, not 7"),
        ("id", "i" * 65537, "id has 65537 characters; at most 65536"),
        ("parameters", [1], "must be a JSON object, not a list"),
        ("parameters", {"a": None}, "parameter 'a' must be a string, number or bool, not None"),
        ("parameters", {"a": {}}, "parameter 'a' must be .* not an object"),
        ("parameters", {"binary_data_output": 1}, "'binary_data_output' must be true or false"),
        ("inputs", None, "inputs must be a list"),
        ("inputs", {}, "inputs must be a list"),
        ("inputs", [], "needs 2 inputs; missing: x, n"),
        ("inputs.0", 3, "every input must be a JSON object"),
        ("inputs.0.name", "z", "unknown input 'z'"),
        ("inputs.0.name", None, "name of an input must be a string"),
        ("inputs.0.name", {}, "name of an input must be a string"),
        ("inputs.0.datatype", "FP64", "datatype 'FP64' does not fit, the model expects FP32"),
        ("inputs.0.datatype", "BF16", "BF16 is not supported; send FP32"),
        ("inputs.0.datatype", [], "datatype a list does not fit"),
        ("inputs.0.shape", None, "shape must be a list of integers"),
        ("inputs.0.shape", [4], r"shape has 1 dimensions, the model expects \[-1, 2\]"),
        ("inputs.0.shape", [2, 3], "dimension 3 does not fit"),
        ("inputs.0.shape", [-1, 2], "dimension -1 is not an integer of at least 0"),
        ("inputs.0.shape", [2.0, 2], "dimension 2.0 is not an integer"),
        ("inputs.0.shape", [True, 2], "dimension True is not an integer"),
        ("inputs.0.shape", ["2", 2], "dimension '2' is not an integer"),
        ("inputs.0.shape", [3, 2], r"4 elements in data, its shape \[3, 2\] needs 6"),
        ("inputs.0.shape", [2**40, 2], "4 elements in data"),
        ("inputs.0.shape", [2**63, 2], "too large"),
        ("inputs.0.data", None, "data must be a list, not None"),
        ("inputs.0.data", 1.0, "data must be a list, not 1.0"),
        ("inputs.0.data", [1, 2, 3], "3 elements in data"),
        ("inputs.0.data", [1, 2, 3, None], "every element of FP32 is a number, not None"),
        ("inputs.0.data", [1, 2, 3, "4"], "is a number, not '4'"),
        ("inputs.0.data", [1, 2, 3, True], "is a number, not True"),
        ("inputs.0.data", [1, 2, 3, [4]], "is a number, not a list"),
        ("inputs.0.data", [1, 2, 3, 1e39], "too large for FP32"),
        ("inputs.0.data", [[1, 2], [3]], "not nested as its shape"),
        ("inputs.0.data", [[1, 2], 3], "not nested as its shape"),
        ("inputs.0.data", [[1, 2, 3, 4]], "not nested as its shape"),
        ("inputs.0.data", [[[1, 2], [3, 4]]], "not nested as its shape"),
        ("inputs.0.data", [[1, 2], [[3], 4]], "is a number, not a list"),
        ("inputs.0.parameters", {"shared_memory_region": "r"}, "in region 'r', but shared_memory_byte_size is missing"),
        ("inputs.0.parameters", {"shared_memory_region": "r", "shared_memory_byte_size": 16}, "and has data, too"),
        ("inputs.0.parameters", {"shared_memory_region": "", "shared_memory_byte_size": 16}, "of a region, not ''"),
        ("inputs.0.parameters", {"shared_memory_region": 7, "shared_memory_byte_size": 16}, "name of a region, not 7"),
        ("inputs.0.parameters", {"shared_memory_region": "r", "shared_memory_byte_size": -1}, "from 0, not -1"),
        ("inputs.0.parameters", {"shared_memory_region": "r", "shared_memory_byte_size": True}, "from 0, not True"),
        ("inputs.0.parameters", {"shared_memory_byte_size": 16}, "without shared_memory_region; name the region"),
        ("inputs.0.parameters", {"shared_memory_size": 16}, "'shared_memory_size' is unknown; known: shared"),
        ("inputs.0.parameters", {"binary_data_size": 16}, "both data and binary_data_size"),
        ("inputs.1.name", "x", "input 'x': datatype 'INT8' does not fit"),
        ("inputs.1", good()["inputs"][0], "input 'x' is given twice"),
        ("inputs.1.data", [1, 128], "outside -128 to 127"),
        ("inputs.1.data", [1, 2**64 - 1], "outside -128 to 127"),
        ("inputs.1.data", [1, 2.0], "every element of INT8 is an integer, not 2.0"),
        ("inputs.1.data", [1, True], "is an integer, not True"),
        ("outputs", {}, "outputs must be a list"),
        ("outputs", False, "outputs must be a list"),
        ("outputs", ["y"], "requested output must be a JSON object"),
        ("outputs", [{}], "name of an output must be a string"),
        ("outputs", [{"name": "x"}], "unknown output 'x'"),
        ("outputs", [{"name": "y", "parameters": {"binary_data": "yes"}}], "must be true or false, not 'yes'"),
        ("outputs", [{"name": "y", "parameters": {"classification": 1.5}}], "classification must be a whole number"),
        ("outputs", [{"name": "y", "parameters": {"shared_memory_offset": 0}}], "'y' has shared_memory_offset without"),
        ("outputs", [{"name": "y", "parameters": 1}], "must be a JSON object, not 1"),
    ],
)
def test_what_is_refused(path, value, error):
    message = good()
    ask(message)
    change(path, value)(message)
    with pytest.raises(BadRequest, match=error) as caught:
        ask(message)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "datatype, data, error",
    [
        ("BOOL", [0, 1, 2], "outside 0 to 1"),
        ("BOOL", [0, 1, 1.0], "true or false, not 1.0"),
        ("BOOL", [0, 1, "true"], "true or false, not 'true'"),
        ("UINT8", [0, 0, -1], "outside 0 to 255"),
        ("UINT64", [0, 0, -1], "outside 0 to 18446744073709551615"),
        ("INT64", [0, 0, 2**63], "outside -9223372036854775808"),
        ("FP16", [0, 0, 65520], "too large for FP16"),
        ("FP16", [0, 0, -1e6], "too large for FP16"),
        ("BYTES", ["a", "b", 1], "is a string, not 1"),
        ("BYTES", ["a", "b", None], "is a string, not None"),
    ],
)
def test_elements_that_do_not_fit_their_datatype(datatype, data, error):
    with pytest.raises(BadRequest, match=error):
        ask({"inputs": [{"name": "x", "shape": [1, 3], "datatype": datatype, "data": data}]}, model=same(datatype))


@pytest.mark.parametrize("number", [b"18446744073709551616", b"-9223372036854775809", b"1e2"])
def test_integers_are_written_as_integers(number):
    body = b'{"inputs":[{"name":"x","shape":[1],"datatype":"INT64","data":[%s]}]}' % number
    with pytest.raises(BadRequest, match="is an integer"):
        decode(body, None, same("INT64", (-1,)))


@pytest.mark.parametrize(
    "body", [b"", b"nope", b"[1]", b"null", b'{"inputs":', b"\xff", b"[" * 3000, b'{"inputs":[NaN]}']
)
def test_bodies_that_are_no_request(body):
    with pytest.raises(BadRequest):
        decode(body, None, TWO)
    with pytest.raises(BadRequest):
        decode(body, len(body) or 1, TWO)


@pytest.mark.parametrize("old", [b'"7"', b'"x"', b'"FP32"', b"[2,2]", b"[1,2.5,3,4]"])
@pytest.mark.parametrize("new", [b"[" * 1000 + b"]" * 1000, b'"%s"' % (b"n" * 10**6)], ids=["deep", "long"])
def test_messages_stay_short_whatever_the_client_sends(old, new):
    body = orjson.dumps(good())
    assert old in body
    with pytest.raises(BadRequest) as caught:
        decode(body.replace(old, new), None, TWO)
    assert len(str(caught.value)) < 200


# binary tensors


def binary_tensor(datatype: str, shape: tuple[int, ...], size: Any, **changes: Any) -> dict[str, Any]:
    described = {"name": "x", "datatype": datatype, "shape": list(shape), "parameters": {"binary_data_size": size}}
    return described | changes


def raw(array: Array) -> bytes:
    """A tensor in binary, as the client writes it."""
    return serialize_byte_tensor(array).item() if array.dtype == np.object_ else array.tobytes()


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("padding", range(8))
def test_binary_inputs_are_aligned_wherever_they_lie(datatype, padding):
    array = SAMPLES[datatype]
    data = raw(array)
    head = orjson.dumps({"inputs": [binary_tensor(datatype, array.shape, len(data))]}) + b" " * padding
    got = decode(head + data, len(head), same(datatype)).inputs["x"]
    assert_array_equal(got, array)
    assert got.dtype == array.dtype and got.flags.aligned and got.flags.c_contiguous


def test_an_aligned_binary_input_is_not_copied():
    head = orjson.dumps({"inputs": [binary_tensor("FP32", (1, 3), 12)]})
    head += b" " * (-len(head) % 8)
    body = head + SAMPLES["FP32"].tobytes()
    whole = np.frombuffer(body, np.uint8)
    assert np.shares_memory(decode(body, len(head), same("FP32")).inputs["x"], whole)
    assert not np.shares_memory(decode(b" " + body, len(head) + 1, same("FP32")).inputs["x"], whole)


def test_binary_and_json_inputs_in_one_request():
    message = good()
    del message["inputs"][0]["data"]
    message["inputs"][0]["parameters"] = {"binary_data_size": 16}
    request = ask(message, np.arange(4, dtype=np.float32).tobytes())
    assert request.inputs["x"].tolist() == [[0, 1], [2, 3]]
    assert request.inputs["n"].tolist() == [-128, 127]


def test_two_binary_inputs_lie_one_behind_the_other():
    message = good()
    for item, size in zip(message["inputs"], (16, 2), strict=True):
        del item["data"]
        item["parameters"] = {"binary_data_size": size}
    request = ask(message, np.arange(4, dtype=np.float32).tobytes() + b"\x80\x7f")
    assert request.inputs["x"].tolist() == [[0, 1], [2, 3]]
    assert request.inputs["n"].tolist() == [-128, 127]


@pytest.mark.parametrize(
    "datatype, shape, size, tail, error",
    [
        ("FP32", (1, 3), 12, bytes(11), "binary_data_size 12, but only 11 bytes are left"),
        ("FP32", (1, 3), 12, bytes(13), "13 bytes follow the JSON part, but the inputs account for 12"),
        ("FP32", (1, 3), 8, bytes(8), "8 bytes of data, its shape and datatype need 12"),
        ("FP32", (2**61, 3), 12, bytes(12), "too large"),
        ("FP32", (2**50, 3), 12, bytes(12), "12 bytes of data"),
        ("FP32", (1, 3), -12, bytes(12), "binary_data_size -12 is not an integer"),
        ("FP32", (1, 3), 12.0, bytes(12), "binary_data_size 12.0 is not an integer"),
        ("FP32", (1, 3), True, bytes(12), "binary_data_size True is not an integer"),
        ("FP32", (1, 3), "12", bytes(12), "binary_data_size '12' is not an integer"),
        ("FP32", (1, 3), 2**64 - 1, bytes(12), "only 12 bytes are left"),
        ("BOOL", (1, 3), 3, b"\x00\x01\x02", "must be 0 or 1"),
        ("BYTES", (1, 3), 8, bytes(8), "8 bytes are too few for 3 strings"),
        ("BYTES", (1, 3), 16, bytes(16), "3 strings in 12 of 16 bytes"),
        ("BYTES", (1, 3), 12, b"\x01" + bytes(11), "its shape needs 3"),
        ("BYTES", (1, 3), 12, b"\x08" + bytes(11), "1 strings in 12 of 12 bytes; its shape needs 3"),
        ("BYTES", (1, 3), 12, b"\xff\xff\xff\xff" + bytes(8), "string 0 reaches beyond its data"),
        ("BYTES", (2**59, 3), 12, bytes(12), "too large|too few"),
    ],
)
def test_binary_data_that_does_not_add_up(datatype, shape, size, tail, error):
    with pytest.raises(BadRequest, match=error):
        ask({"inputs": [binary_tensor(datatype, shape, size)]}, tail, same(datatype))


@pytest.mark.parametrize("data", [None, {}, [], [1, 2], "5"])
def test_what_is_no_scalar(data):
    with pytest.raises(BadRequest):
        ask({"inputs": [tensor(np.array(5.0), "FP64", data=data)]}, model=same("FP64", ()))


def test_a_dimension_that_must_be_zero():
    with pytest.raises(BadRequest, match="dimension 1 does not fit"):
        ask({"inputs": [tensor(np.zeros((1, 3)), "FP32")]}, model=same("FP32", (0, 3)))


def test_a_shape_is_bounded_even_without_elements():
    with pytest.raises(BadRequest, match="too large"):
        ask({"inputs": [binary_tensor("FP32", (0, 2**62), 0)]}, b"", same("FP32", (-1, -1)))


def test_binary_data_needs_the_header_length():
    with pytest.raises(BadRequest, match="Inference-Header-Content-Length is missing"):
        ask({"inputs": [binary_tensor("FP32", (1, 3), 12)]}, model=same("FP32"))


@pytest.mark.parametrize("length", [-1, 10**6, 2**70])
def test_a_header_length_lies_within_the_body(length):
    with pytest.raises(BadRequest, match="does not lie within the body"):
        decode(orjson.dumps(good()), length, TWO)


def test_a_memoryview_is_as_good_as_bytes():
    head = orjson.dumps({"inputs": [binary_tensor("FP32", (1, 3), 12)]})
    body = memoryview(b"***" + head + SAMPLES["FP32"].tobytes())[3:]
    assert_array_equal(decode(body, len(head), same("FP32")).inputs["x"], SAMPLES["FP32"])
    assert ask(good()).id == decode(memoryview(orjson.dumps(good())), None, TWO).id


# a body without JSON


@pytest.mark.parametrize(
    "shape, elements, expected", [((-1, 3), 6, (2, 3)), ((2, 3), 6, (2, 3)), ((), 1, ()), ((-1,), 0, (0,))]
)
def test_a_raw_body(shape, elements, expected):
    array = np.arange(elements, dtype=np.float32)
    request = decode(array.tobytes(), 0, same("FP32", shape))
    assert_array_equal(request.inputs["x"], array.reshape(expected))
    assert request.wanted == (Wanted("y", True),)


def test_a_raw_body_is_one_string():
    assert decode(b"hello", 0, same("BYTES", (-1, 1))).inputs["x"].tolist() == [[b"hello"]]
    with pytest.raises(BadRequest, match="holds one string"):
        decode(b"hello", 0, same("BYTES", (2,)))


@pytest.mark.parametrize(
    "model, size, error",
    [
        (TWO, 4, "has 2 inputs; a raw body works with one"),
        (same("FP32", (-1, 3)), 13, "13 bytes are no multiple of 12"),
        (same("FP32", (2, 3)), 12, "need 24"),
        (same("FP32", (-1, -1)), 12, "cannot be told from a raw body"),
        (same("FP32", (-1, 0)), 0, "cannot be told from a raw body"),
    ],
)
def test_raw_bodies_that_do_not_fit(model, size, error):
    with pytest.raises(BadRequest, match=error):
        decode(bytes(size), 0, model)


# answers


def test_which_outputs_come_back_and_how():
    def wanted(**message: Any) -> tuple[Wanted, ...]:
        request = ask(good() | message)
        assert request.parameters == {}
        return request.wanted

    everything = {"binary_data_output": True}
    assert wanted() == (Wanted("y", False), Wanted("s", False))
    assert wanted(parameters=everything) == (Wanted("y", True), Wanted("s", True))
    assert wanted(outputs=[]) == wanted()
    named = [{"name": "s", "parameters": {"binary_data": True}}, {"name": "y"}]
    assert wanted(outputs=named) == (Wanted("s", True), Wanted("y", False))
    mixed = [{"name": "y"}, {"name": "s", "parameters": {"binary_data": False}}]
    assert wanted(outputs=mixed, parameters=everything) == (Wanted("y", True), Wanted("s", False))


def test_a_json_answer():
    request = InferRequest({}, "7", {}, (Wanted("y", False), Wanted("s", False)))
    outputs = {"y": np.array([[0.1, -1]], np.float32), "s": np.array([b"a", "ü"], np.object_)}
    parts, header_length = encode(InferResponse(request, TWO, outputs, {"late": True}))
    assert header_length is None
    assert orjson.loads(b"".join(parts)) == {
        "model_name": "two",
        "model_version": "3",
        "id": "7",
        "parameters": {"late": True},
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [0.1, -1.0]},
            {"name": "s", "datatype": "BYTES", "shape": [2], "data": ["a", "ü"]},
        ],
    }


def test_an_answer_says_nothing_where_there_is_nothing_to_say():
    parts, _ = encode(InferResponse(InferRequest({}, "", {}, ()), TWO, {}))
    assert orjson.loads(parts[0]) == {"model_name": "two", "model_version": "3", "outputs": []}


def test_a_mixed_answer():
    request = InferRequest({}, "", {}, (Wanted("s", True), Wanted("y", False)))
    outputs = {"y": np.array([[0.5, 1]], np.float32), "s": np.array(["ü", b"\xff"], np.object_)}
    parts, header_length = encode(InferResponse(request, TWO, outputs))
    assert header_length == len(parts[0])
    assert b"".join(parts[1:]) == b"\x02\x00\x00\x00\xc3\xbc\x01\x00\x00\x00\xff"
    result = read(parts, header_length)
    assert_array_equal(result.as_numpy("y"), outputs["y"])
    assert result.as_numpy("s").tolist() == ["ü".encode(), b"\xff"]


def test_infinities_are_literals_in_json_and_bytes_in_binary():
    array = np.array([[np.nan, np.inf, -np.inf]], np.float32)
    parts, _ = encode(InferResponse(InferRequest({}, "", {}, (Wanted("y", False),)), same("FP32"), {"y": array}))
    assert b'"data":[NaN,Infinity,-Infinity]' in parts[0]
    parts, header_length = encode(
        InferResponse(InferRequest({}, "", {}, (Wanted("y", True),)), same("FP32"), {"y": array})
    )
    assert_array_equal(read(parts, header_length).as_numpy("y"), array)


def test_arrays_need_not_be_contiguous():
    array = np.arange(6, dtype=np.float32).reshape(3, 2).T
    for binary in (False, True):
        parts, header_length = encode(
            InferResponse(InferRequest({}, "", {}, (Wanted("y", binary),)), same("FP32"), {"y": array})
        )
        assert_array_equal(read(parts, header_length).as_numpy("y"), array)


def test_bytes_that_are_no_text_come_back_in_binary_only():
    with pytest.raises(BadRequest, match="output 'y' is not UTF-8; ask for it with the parameter binary_data"):
        encode(
            InferResponse(
                InferRequest({}, "", {}, (Wanted("y", False),)), same("BYTES"), {"y": np.array([b"\xff"], np.object_)}
            )
        )


@pytest.mark.parametrize(
    "outputs, error",
    [
        ({}, "output 'y' was not computed"),
        ({"y": np.zeros((1, 3))}, "output 'y' came out as float64, not as FP32"),
        ({"y": np.array(["a"])}, "came out as <U1"),
    ],
)
def test_an_output_that_is_not_what_the_model_promised_is_our_fault(outputs, error):
    request = InferRequest({}, "", {}, (Wanted("y", False),))
    with pytest.raises(Failed, match=error):
        encode(InferResponse(request, same("FP32"), outputs))
    with pytest.raises(Failed, match=error):
        grpc_wire.encode_infer(InferResponse(request, same("FP32"), outputs))


def test_text_that_is_no_unicode_is_our_fault():
    with pytest.raises(Failed, match="cannot be written as JSON"):
        encode(
            InferResponse(
                InferRequest({}, "", {}, (Wanted("y", False),)), same("BYTES"), {"y": np.array(["\ud800"], np.object_)}
            )
        )


# the client


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_a_client_gets_back_what_it_sent(datatype, binary, named):
    array = SAMPLES[datatype]
    tensor = client.InferInput("x", list(array.shape), datatype).set_data_from_numpy(array, binary_data=binary)
    outputs = [client.InferRequestedOutput("y", binary_data=binary)] if named else None
    body, header_length = client.InferenceServerClient.generate_request_body(
        [tensor], outputs, request_id="r", priority=2, timeout=9, parameters={"slo_ms": 5}
    )
    request = decode(body, header_length, same(datatype))
    assert_array_equal(request.inputs["x"], array)
    assert request.parameters == {"priority": 2, "timeout": 9, "slo_ms": 5}
    assert request.wanted == (Wanted("y", binary or not named),)
    result = read(*encode(InferResponse(request, same(datatype), {"y": array})))
    assert result.get_response()["id"] == "r"
    got = result.as_numpy("y")
    assert got.dtype == array.dtype or datatype == "BYTES"
    assert got.reshape(-1).tolist() in (plain(array), array.reshape(-1).tolist())


def test_a_client_asks_for_classes():
    tensor = client.InferInput("x", [1, 3], "FP32").set_data_from_numpy(SAMPLES["FP32"])
    output = client.InferRequestedOutput("y", class_count=2)
    body, header_length = client.InferenceServerClient.generate_request_body([tensor], [output])
    request = decode(body, header_length, same("FP32"))
    assert [each[::2] for each in request.wanted] == [("y", 2)]
    result = read(*encode(InferResponse(request, same("FP32"), {"y": np.array([[1, 3, 2]], np.float32)})))
    assert result.as_numpy("y").tolist() in ([[b"3.000000:1", b"2.000000:2"]], [["3.000000:1", "2.000000:2"]])


def test_a_client_with_shared_memory_says_where_tensors_lie():
    tensor, output = client.InferInput("x", [1, 3], "FP32"), client.InferRequestedOutput("y")
    tensor.set_shared_memory("region", 12)
    output.set_shared_memory("other", 400, offset=8)
    body, header_length = client.InferenceServerClient.generate_request_body([tensor], [output])
    request = decode(body, header_length, same("FP32"))
    assert request.inputs == {} and request.shared is not None
    part, (spec, dtype, shape, elements) = request.shared.inputs["x"]
    assert part == RegionPart("region", 0, 12) and (spec.name, dtype, shape, elements) == ("x", np.float32, (1, 3), 3)
    assert request.shared.outputs == {"y": RegionPart("other", 8, 400)}
    answer = InferResponse(request, same("FP32"), {"y": SAMPLES["FP32"]}, shared={"y": RegionPart("other", 8, 12)})
    result = read(*encode(answer)).get_output("y")
    assert "data" not in result and result["shape"] == [1, 3]
    assert result["parameters"] == {
        "shared_memory_region": "other", "shared_memory_offset": 8, "shared_memory_byte_size": 12
    }  # fmt: skip


# gRPC

CONTENTS = {
    "BOOL": "bool_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip


def grpc_request(array: Array, datatype: str, typed: bool = False) -> Any:
    request = proto.ModelInferRequest(model_name="same", id="r")
    tensor = request.inputs.add(name="x", datatype=datatype, shape=array.shape)
    if typed:
        getattr(tensor.contents, CONTENTS[datatype]).extend(array.reshape(-1).tolist())
    else:
        request.raw_input_contents.append(raw(array))
    return request


@pytest.mark.parametrize("datatype", DATATYPES)
def test_raw_contents(datatype):
    array = SAMPLES[datatype]
    request = grpc_wire.decode_infer(grpc_request(array, datatype), same(datatype))
    assert_array_equal(request.inputs["x"], array)
    assert request.inputs["x"].dtype == array.dtype and request.id == "r"
    assert request.wanted == (Wanted("y", True),)
    response = grpc_wire.encode_infer(InferResponse(request, same(datatype), {"y": array}, {}))
    result = InferResult(service_pb2.ModelInferResponse.FromString(response.SerializeToString()))
    assert_array_equal(result.as_numpy("y"), array)
    assert (response.model_name, response.model_version, response.id) == ("same", "1", "r")


@pytest.mark.parametrize("datatype", CONTENTS)
def test_typed_contents_are_answered_raw(datatype):
    array = SAMPLES[datatype]
    request = grpc_wire.decode_infer(grpc_request(array, datatype, typed=True), same(datatype))
    got = request.inputs["x"]
    assert_array_equal(got, array)
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    response = grpc_wire.encode_infer(InferResponse(request, same(datatype), {"y": array}))
    assert list(response.raw_output_contents) == [raw(array)] and not response.outputs[0].HasField("contents")


def test_grpc_classes_are_strings():
    message = grpc_request(SAMPLES["FP32"], "FP32")
    message.outputs.add(name="y").parameters["classification"].int64_param = 2
    message.outputs.add(name="y")
    request = grpc_wire.decode_infer(message, same("FP32"))
    assert request.wanted == (Wanted("y", True, 2),)
    array = np.array([[1, 3, 2]], np.float32)
    response = grpc_wire.encode_infer(InferResponse(request, same("FP32"), {"y": array}, {}, {"y": ["a", "b", "c"]}))
    result = InferResult(service_pb2.ModelInferResponse.FromString(response.SerializeToString()))
    assert result.as_numpy("y").tolist() == [[b"3.000000:1:b", b"2.000000:2:c"]]


def test_grpc_parameters_both_ways():
    values = {"b": True, "i": -5, "s": "text", "d": 0.5, "u": 2**63}
    message = grpc_request(SAMPLES["FP32"], "FP32")
    fields = {"b": "bool_param", "i": "int64_param", "s": "string_param", "d": "double_param", "u": "uint64_param"}
    for key, field in fields.items():
        setattr(message.parameters[key], field, values[key])
    request = grpc_wire.decode_infer(message, same("FP32"))
    assert request.parameters == values
    assert {key: type(value) for key, value in request.parameters.items()} == {key: type(values[key]) for key in values}
    response = grpc_wire.encode_infer(InferResponse(request, same("FP32"), {"y": SAMPLES["FP32"]}, values))
    assert response.parameters == message.parameters


def refused(error: str, edit: Callable[[Any], Any], *, datatype: str = "FP32", typed: bool = False) -> None:
    message = grpc_request(SAMPLES[datatype], datatype, typed=typed)
    grpc_wire.decode_infer(message, same(datatype))
    edit(message)
    with pytest.raises(BadRequest, match=error):
        grpc_wire.decode_infer(message, same(datatype))


def test_grpc_requests_that_are_refused():
    refused("missing: x", lambda message: (message.ClearField("inputs"), message.ClearField("raw_input_contents")))
    refused("unknown input 'z'", lambda message: setattr(message.inputs[0], "name", "z"))
    refused("BF16 is not supported", lambda message: setattr(message.inputs[0], "datatype", "BF16"))
    refused("dimension -1 is not", lambda message: message.inputs[0].shape.__setitem__(0, -1))
    refused("too large", lambda message: message.inputs[0].shape.__setitem__(0, 2**62))
    refused("has 3 dimensions", lambda message: message.inputs[0].shape.append(1))
    refused("12 bytes of data", lambda message: message.inputs[0].shape.__setitem__(0, 2))
    refused("0 elements in fp32_contents", lambda message: message.ClearField("raw_input_contents"))
    refused("send one of them", lambda message: message.inputs[0].contents.fp32_contents.append(1))
    refused("id has 65537 characters", lambda message: setattr(message, "id", "i" * 65537))
    refused("parameter 'p' has no value", lambda message: message.parameters["p"].SetInParent())
    refused("unknown output 'z'", lambda message: message.outputs.add(name="z"))
    refused("at most 4096", lambda message: [message.outputs.add(name="y") for _ in range(4097)])
    refused("'sequence_id' is not", lambda message: setattr(message.parameters["sequence_id"], "int64_param", 1))


def test_raw_contents_too_few_are_refused_and_too_many_are_not():
    message = proto.ModelInferRequest(raw_input_contents=[raw(np.ones((1, 2), np.float32))])
    message.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    message.inputs.add(name="n", datatype="INT8", shape=[2])
    with pytest.raises(BadRequest, match="1 raw input contents for 2 inputs; send one for each"):
        grpc_wire.decode_infer(message, TWO)
    message.raw_input_contents.extend([b"\1\2", b"surplus"])
    found = grpc_wire.decode_infer(message, TWO).inputs
    assert found["x"].tolist() == [[1, 1]] and found["n"].tolist() == [1, 2]


def test_grpc_tensors_given_twice_are_refused():
    def twice(message: Any) -> None:
        message.inputs.append(message.inputs[0])
        message.raw_input_contents.append(message.raw_input_contents[0])

    refused("input 'x' is given twice", twice)


def test_grpc_parameters_of_tensors_that_are_refused():
    def shared(message: Any) -> None:
        message.inputs[0].parameters["shared_memory_region"].string_param = "r"

    def both(message: Any) -> None:
        shared(message)
        message.inputs[0].parameters["shared_memory_byte_size"].int64_param = 12

    def typed_too(message: Any) -> None:
        both(message)
        message.ClearField("raw_input_contents")
        message.inputs[0].contents.fp32_contents.append(1)

    def short(message: Any) -> None:
        typed_too(message)
        message.inputs[0].ClearField("contents")
        message.inputs[0].parameters["shared_memory_byte_size"].int64_param = 8

    def classes(message: Any) -> None:
        message.outputs.add(name="y").parameters["classification"].int64_param = -2

    refused("shared_memory_byte_size is missing", shared)
    refused("lies in region 'r' and has data, too; send one of them", typed_too)
    refused("8 bytes of data, its shape and datatype need 12", short)
    refused("classification must be a whole number from 0", classes)


def test_typed_contents_that_are_refused():
    def contents(message: Any) -> Any:
        return message.inputs[0].contents

    other = "goes into fp32_contents, not into int_contents"
    refused(other, lambda message: contents(message).int_contents.append(1), typed=True)
    refused("4 elements in fp32", lambda message: contents(message).fp32_contents.append(1), typed=True)
    beyond = {"datatype": "UINT8", "typed": True}
    refused("outside 0 to 255", lambda message: contents(message).uint_contents.__setitem__(0, 256), **beyond)
    none = "FP16 has no typed contents; send raw_input_contents"
    refused(none, lambda message: message.ClearField("raw_input_contents"), datatype="FP16")


def test_model_metadata():
    tensors = {
        kind: [each._asdict() | {"shape": list(each.shape)} for each in getattr(TWO, kind)]
        for kind in ("inputs", "outputs")
    }
    told = {"name": "two", "versions": ["1", "3"], "platform": "onnxruntime_onnx", **tensors}
    message = grpc_wire.filled("ModelMetadataResponse", told)
    parsed = service_pb2.ModelMetadataResponse.FromString(message.SerializeToString())
    assert (parsed.name, list(parsed.versions), parsed.platform) == ("two", ["1", "3"], "onnxruntime_onnx")
    assert [(entry.name, entry.datatype, list(entry.shape)) for entry in parsed.inputs] == [
        ("x", "FP32", [-1, 2]), ("n", "INT8", [2]),
    ]  # fmt: skip
    assert [entry.name for entry in parsed.outputs] == ["y", "s"]


def test_server_metadata():
    message = grpc_wire.filled("ServerMetadataResponse", {"name": "weft", "version": "1", "extensions": ["statistics"]})
    parsed = service_pb2.ServerMetadataResponse.FromString(message.SerializeToString())
    assert (parsed.name, parsed.version, list(parsed.extensions)) == ("weft", "1", ["statistics"])


def test_model_config():
    answer = {
        "name": "m",
        "platform": "onnxruntime_onnx",
        "backend": "onnxruntime",
        "max_batch_size": 8,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1, 2]}],
        "output": [{"name": "y", "data_type": "TYPE_STRING", "dims": [1]}],
        "version_policy": {"specific": {"versions": [1, 3]}},
        "parameters": {"segments": {"string_value": "4"}},
        "dynamic_batching": {"preferred_batch_size": [4], "max_queue_delay_microseconds": 100},
        "something_of_ours": 1,
    }
    message = grpc_wire.filled("ModelConfigResponse", {"config": answer})
    config = service_pb2.ModelConfigResponse.FromString(message.SerializeToString()).config
    assert (config.name, config.platform, config.backend, config.max_batch_size) == (
        "m", "onnxruntime_onnx", "onnxruntime", 8,
    )  # fmt: skip
    assert config.input[0].data_type == model_config_pb2.TYPE_FP32 and list(config.input[0].dims) == [-1, 2]
    assert config.output[0].data_type == model_config_pb2.TYPE_STRING
    assert list(config.version_policy.specific.versions) == [1, 3]
    assert config.parameters["segments"].string_value == "4"
    assert config.WhichOneof("scheduling_choice") == "dynamic_batching"
    assert config.dynamic_batching.max_queue_delay_microseconds == 100


def test_model_statistics():
    duration = {"count": 2, "ns": 10**12}
    answer = {
        "model_stats": [
            {
                "name": "m",
                "version": "1",
                "last_inference": 1700000000000,
                "inference_count": 5,
                "execution_count": 3,
                "inference_stats": {"success": duration, "queue": duration},
                "batch_stats": [{"batch_size": 4, "compute_infer": duration}],
            }
        ]
    }
    message = grpc_wire.filled("ModelStatisticsResponse", answer)
    stats = service_pb2.ModelStatisticsResponse.FromString(message.SerializeToString()).model_stats[0]
    assert (stats.name, stats.last_inference, stats.inference_count) == ("m", 1700000000000, 5)
    assert (stats.inference_stats.queue.count, stats.inference_stats.queue.ns) == (2, 10**12)
    assert (stats.batch_stats[0].batch_size, stats.batch_stats[0].compute_infer.ns) == (4, 10**12)


def test_repository_index_and_parameters():
    rows = [{"name": "m", "version": "1", "state": "READY", "reason": ""}, {"name": "n"}]
    message = grpc_wire.filled("RepositoryIndexResponse", {"models": rows})
    parsed = service_pb2.RepositoryIndexResponse.FromString(message.SerializeToString())
    assert [(row.name, row.version, row.state) for row in parsed.models] == [("m", "1", "READY"), ("n", "", "")]
    request = proto.RepositoryModelLoadRequest(model_name="m")
    request.parameters["config"].string_param = "{}"
    request.parameters["file:1/model.onnx"].bytes_param = b"\x08"
    assert grpc_wire.parameters_of(request) == {"config": "{}", "file:1/model.onnx": b"\x08"}


def test_an_answer_that_fits_no_message_is_our_fault():
    with pytest.raises(Failed, match="ServerMetadataResponse cannot be made"):
        grpc_wire.filled("ServerMetadataResponse", {"name": 5})
