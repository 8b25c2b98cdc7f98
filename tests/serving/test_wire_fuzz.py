"""Round trips of arbitrary tensors, and damaged requests: whatever the bytes, a valid request or a BadRequest."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.testing import assert_array_equal

from tests.serving.wire_examples import (
    BINARY,
    BODIES,
    HEAD,
    JSON,
    MODEL,
    TAIL,
    TYPED,
    assert_fits,
    grpc_request,
    json_tensor,
)
from weft.base.errors import BadRequest
from weft.runtime.tensors import DATATYPES, Array, TensorSpec
from weft.serving import grpc_wire, proto
from weft.serving.wire import InferRequest, InferResponse, ModelSpec, Wanted, decode, encode


def survives(body: bytes, header_length: int | None) -> bool:
    try:
        request = decode(body, header_length, MODEL)
    except BadRequest as error:
        assert "\n" not in str(error) and len(str(error)) < 400
        return False
    assert_fits(request, MODEL)
    return True


def test_the_requests_to_damage_are_sound():
    assert all(survives(body, header_length) for body, header_length in BODIES)
    assert_fits(grpc_wire.decode_infer(grpc_request(MODEL, typed=False), MODEL), MODEL)
    assert_fits(grpc_wire.decode_infer(grpc_request(TYPED, typed=True), TYPED), TYPED)


# damage

LENGTHS = st.none() | st.integers(-3, 12) | st.integers(len(HEAD) - 5, len(HEAD) + 5) | st.integers()
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=4)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
WORDS = st.sampled_from(
    ["x", "f", "h", "t", "y", "s", "FP32", "BYTES", "BF16", [1, 2], [0, 2**62], [2, 1], [-1], 1e300]
)


@st.composite
def damaged(draw: st.DrawFn, body: bytes) -> bytes:
    """A few bytes overwritten, inserted, cut out or repeated."""
    data = bytearray(body)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 12)))
        data[start:end] = draw(st.one_of(st.binary(max_size=4), st.just(bytes(data[start:end] * 2)), st.just(b"")))
    return bytes(data)


def places(node: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to every value in a JSON document."""
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [way, *(place for key, value in inner for place in places(value, (*way, key)))]


def replaced(document: Any, way: tuple[Any, ...], value: Any) -> Any:
    if not way:
        return value
    copy = dict(document) if isinstance(document, dict) else list(document)
    copy[way[0]] = replaced(document[way[0]], way[1:], value)
    return copy


@given(st.binary(max_size=80), LENGTHS)
@settings(max_examples=37, deadline=None)
@example(b"", 0)
@example(b"{}", None)
@example(b'{"inputs":[]}', 13)
def test_arbitrary_bytes(body, header_length):
    assert not survives(body, header_length)


@given(st.data(), st.sampled_from(BODIES), LENGTHS | st.just(len(HEAD)))
@settings(max_examples=37, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_damaged_bodies(data, sound, header_length):
    body, length = sound
    survives(data.draw(damaged(body)), header_length if data.draw(st.booleans()) else length)


@given(st.data(), VALUES | WORDS)
@settings(max_examples=37, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_requests_with_a_value_replaced(data, value):
    document = data.draw(st.sampled_from([JSON, BINARY]))
    head = orjson.dumps(replaced(document, data.draw(st.sampled_from(places(document))), value))
    if document is JSON:
        survives(head, None)
    else:
        survives(head + TAIL, len(head))


@given(st.sampled_from(places(JSON)[1:]))
@settings(max_examples=37, deadline=None)
def test_requests_with_a_value_missing(way):
    copy = orjson.loads(orjson.dumps(JSON))
    holder = copy
    for step in way[:-1]:
        holder = holder[step]
    del holder[way[-1]]
    allowed = way[0] in ("id", "parameters", "outputs") and way[-1] != "name"
    assert survives(orjson.dumps(copy), None) == allowed


@given(st.binary(max_size=64), st.sampled_from(sorted(DATATYPES)), st.lists(st.integers(-1, 3), max_size=3))
@settings(max_examples=37, deadline=None)
def test_arbitrary_raw_bodies(body, datatype, shape):
    model = ModelSpec("one", "1", (TensorSpec("x", datatype, tuple(shape)),), ())
    try:
        array = decode(body, 0, model).inputs["x"]
    except BadRequest:
        return
    assert all(size == expected or expected < 0 for size, expected in zip(array.shape, shape, strict=True))
    assert array.reshape(-1).tolist() == [body] if datatype == "BYTES" else array.tobytes() == body


@given(st.data(), st.booleans())
@settings(max_examples=37, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_damaged_messages(data, typed):
    model = TYPED if typed else MODEL
    body = data.draw(damaged(grpc_request(model, typed).SerializeToString()))
    try:
        message = proto.ModelInferRequest.FromString(body)
    except DecodeError:
        return
    try:
        request = grpc_wire.decode_infer(message, model)
    except BadRequest as error:
        assert "\n" not in str(error)
    else:
        assert_fits(request, model)


# round trips


def tensors(datatype: str, *, json: bool) -> st.SearchStrategy[Array]:
    """Tensors of up to three dimensions; JSON takes neither infinities nor bytes that are no text."""
    dtype = DATATYPES[datatype]
    shapes = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
    if datatype == "BYTES":
        items = st.text(max_size=5).map(str.encode) if json else st.binary(max_size=5)
        return shapes.flatmap(lambda shape: strings(shape, items))
    if dtype.kind == "f" and json:
        elements = st.floats(allow_nan=False, allow_infinity=False, width=dtype.itemsize * 8)
        return arrays.arrays(dtype, shapes, elements=elements)
    return arrays.arrays(dtype, shapes)


def strings(shape: tuple[int, ...], items: st.SearchStrategy[bytes]) -> st.SearchStrategy[Array]:
    def build(values: list[bytes]) -> Array:
        array = np.empty(len(values), np.object_)
        array[:] = values
        return array.reshape(shape)

    count = int(np.prod(shape))
    return st.lists(items, min_size=count, max_size=count).map(build)


def same(datatype: str, array: Array) -> ModelSpec:
    shape = (-1,) * array.ndim
    return ModelSpec("same", "1", (TensorSpec("x", datatype, shape),), (TensorSpec("x", datatype, shape),))


def identical(got: Array, array: Array) -> None:
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    assert_array_equal(got, array)
    assert array.dtype == np.object_ or got.tobytes() == array.tobytes()


def as_request(parts: list[bytes], header_length: int | None) -> tuple[bytes, int | None]:
    """Our answer turned into a request: its outputs become the inputs."""
    message = orjson.loads(parts[0])
    head = orjson.dumps({"inputs": message["outputs"]})
    return b"".join([head, *parts[1:]]), None if header_length is None else len(head)


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("binary", [False, True])
@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_we_answer_we_can_read(datatype, binary, data):
    array = data.draw(tensors(datatype, json=not binary))
    model = same(datatype, array)
    parts, header_length = encode(InferResponse(InferRequest({}, "", {}, (Wanted("x", binary),)), model, {"x": array}))
    request = decode(*as_request(parts, header_length), model)
    identical(request.inputs["x"], array)


@pytest.mark.parametrize("datatype", DATATYPES)
@given(data=st.data())
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_nested_data_means_the_same_as_flat_data(datatype, data):
    array = data.draw(tensors(datatype, json=True))
    message = json_tensor(TensorSpec("x", datatype, ()), array)
    nested = np.array(message["data"], np.object_).reshape(array.shape).tolist() if array.size else message["data"]
    request = decode(orjson.dumps({"inputs": [message | {"data": nested}]}), None, same(datatype, array))
    identical(request.inputs["x"], array)


@pytest.mark.parametrize("datatype", DATATYPES)
@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_we_answer_over_grpc_we_can_read(datatype, data):
    array = data.draw(tensors(datatype, json=False))
    model = same(datatype, array)
    answer = grpc_wire.encode_infer(InferResponse(InferRequest({}, "", {}, (Wanted("x", True),)), model, {"x": array}))
    answer = proto.ModelInferResponse.FromString(answer.SerializeToString())
    request = proto.ModelInferRequest(raw_input_contents=answer.raw_output_contents)
    for output in answer.outputs:
        assert not output.HasField("contents")
        request.inputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
    got = grpc_wire.decode_infer(request, model).inputs["x"]
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    assert_array_equal(got, array)
