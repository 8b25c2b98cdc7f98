"""Messages that are measured before they are parsed: the same as parsed whole, or refused with a reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.base.errors import BadRequest, RequestError, TooLarge
from weft.serving import grpc_messages, proto
from weft.serving.grpc_messages import MAX_FIELDS, QUICK_BYTES, InferMessage, parse_infer, parse_small, read_infer

Request = proto.CLASSES["ModelInferRequest"]
NO_LIMIT = 1 << 30


def varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def field(number: int, value: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(value)) + value


@st.composite
def requests(draw: st.DrawFn) -> Any:
    text = st.text(max_size=8)
    request = Request(model_name=draw(text), model_version=draw(text), id=draw(text))
    for _ in range(draw(st.integers(0, 3))):
        tensor = request.inputs.add(name=draw(text), datatype="FP32", shape=draw(st.lists(st.integers(0, 2**62))))
        tensor.contents.fp32_contents.extend(draw(st.lists(st.floats(width=32), max_size=3)))
        if draw(st.booleans()):
            tensor.parameters["a"].int64_param = draw(st.integers(-(2**63), 2**63 - 1))
    for name in draw(st.lists(text, max_size=3)):
        request.outputs.add(name=name)
    for key in draw(st.lists(text, max_size=3)):
        request.parameters[key].string_param = key
    request.raw_input_contents.extend(draw(st.lists(st.binary(max_size=20), max_size=4)))
    return request


def read_split(data: bytes) -> InferMessage:
    """``read_infer`` as it reads what is large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpc_messages, "QUICK_BYTES", -1)
        return read_infer(data, NO_LIMIT)


def whole(message: InferMessage) -> Any:
    """The message that was split, put together again."""
    request = Request()
    request.CopyFrom(message.head)
    request.raw_input_contents.extend(map(bytes, message.raws))
    return request


@given(requests(), requests())
def test_a_message_that_is_split_says_what_it_says_whole(first: Any, second: Any) -> None:
    data = first.SerializeToString() + second.SerializeToString()  # what comes twice: the last one, or both
    read, parsed = read_split(data), Request.FromString(data)
    assert repr(whole(read)) == repr(parsed)  # by their words: NaN is not itself
    assert (read.model_name, read.model_version, read.id) == (parsed.model_name, parsed.model_version, parsed.id)


@given(requests(), st.data())
@settings(max_examples=100)
def test_broken_bytes_are_refused_or_read_as_a_parser_reads_them(request: Any, data: st.DataObject) -> None:
    broken = bytearray(request.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(broken)))
        broken[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    try:
        read = read_split(bytes(broken))
    except RequestError:
        return
    try:
        parsed = Request.FromString(bytes(broken))
    except DecodeError:
        pytest.fail("what no parser reads was taken")
    assert repr(whole(read)) == repr(parsed)


def test_raw_contents_of_a_large_message_are_not_copied() -> None:
    values = np.arange(QUICK_BYTES, dtype=np.float32)
    request = Request(model_name="m")
    request.raw_input_contents.append(values.tobytes())
    data = request.SerializeToString()
    (raw,) = read_infer(data, NO_LIMIT).raws
    assert isinstance(raw, memoryview) and raw.obj is data
    np.testing.assert_array_equal(np.frombuffer(raw, np.float32), values)


@pytest.mark.parametrize(
    "what, unit",
    [
        ("raw_input_contents", field(7, b"")),
        ("inputs", field(5, b"")),
        ("outputs", field(6, b"")),
        ("parameters", field(4, field(1, b"k"))),
        ("field 99", field(99, b"")),
        ("name", field(5, field(1, b"") * 5000)),
        ("shape", field(5, b"\x18\x01" * 5000)),
        ("parameters", field(5, field(4, b"") * 5000)),
        ("parameters", field(6, field(2, b"") * 5000)),
    ],
)
def test_more_fields_than_any_model_needs_are_refused_by_name(what: str, unit: bytes) -> None:
    data = unit * (max(MAX_FIELDS, QUICK_BYTES // len(unit)) + 1)
    with pytest.raises(TooLarge, match=f"more than {MAX_FIELDS} fields, {what} of"):
        read_infer(data, NO_LIMIT)


def test_as_many_fields_as_are_allowed_are_read() -> None:
    request = Request(inputs=[{"name": "n" * 64, "datatype": "FP32", "shape": [1]}] * (MAX_FIELDS // 3))
    data = request.SerializeToString()
    assert len(data) > QUICK_BYTES
    assert read_infer(data, NO_LIMIT).head == request


def test_a_shape_without_end_is_refused() -> None:
    request = Request()
    request.inputs.add(shape=range(QUICK_BYTES))
    with pytest.raises(BadRequest, match="more dimensions than any tensor"):
        read_infer(request.SerializeToString(), NO_LIMIT)


def test_a_name_without_end_is_refused() -> None:
    with pytest.raises(BadRequest, match="model_name has 1000000 bytes"):
        read_infer(Request(model_name="n" * 1_000_000).SerializeToString(), NO_LIMIT)


@pytest.mark.parametrize(
    "end", [b"\x3b", b"\x3a", b"\x3a\xff", b"\x39\x00", b"\x38" + b"\xff" * 11, b"\x3a\xff\xff\x7f"]
)
def test_what_is_broken_off_is_named_by_its_place(end: bytes) -> None:
    data = field(7, bytes(QUICK_BYTES)) + end
    with pytest.raises(BadRequest, match="cannot be parsed: its field at byte 6"):
        read_infer(data, NO_LIMIT)


def test_much_typed_content_is_left_to_a_helper() -> None:
    request = Request(model_name="m", id="7")
    request.inputs.add(name="x").contents.fp32_contents.extend([0.5] * (1 << 19))
    data = request.SerializeToString()
    read = read_infer(data, NO_LIMIT)
    assert read.head is None and (read.model_name, read.id) == ("m", "7")
    head, raws = parse_infer(data)
    assert head == request and not raws
    with pytest.raises(TooLarge, match=r"2097[0-9]* bytes of typed contents exceed the limit of 1000000 bytes"):
        read_infer(data, 1_000_000)


def test_many_strings_in_raw_contents_are_left_to_a_helper() -> None:
    request = Request(raw_input_contents=[bytes(2 << 20)])
    request.inputs.add(name="x", datatype="BYTES")
    assert read_infer(request.SerializeToString(), NO_LIMIT).head is None


def test_small_calls_are_measured_too() -> None:
    kind = proto.CLASSES["RepositoryModelLoadRequest"]
    with pytest.raises(TooLarge, match=f"more than {MAX_FIELDS} fields, parameters of RepositoryModelLoadRequest"):
        parse_small(kind, field(3, b"") * QUICK_BYTES, 1 << 20)
