"""What server and worker send each other: tensors of every type, packets of every length, and nonsense."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.base.errors import ModelError, UnfitInputs
from weft.devices.host import GpuCuts
from weft.devices.shares import GpuLikeness
from weft.runtime.exits import ExitSpec
from weft.runtime.facets import ModelExits, ModelResidency, ModelShares, ModelTasks, SegmentTiming
from weft.runtime.isolated import packets
from weft.runtime.isolated.model_description import ModelDescription, decode_error, encode_error
from weft.runtime.isolated.packets import Garbled, Line, TensorLayout
from weft.runtime.stitched import TaskSpec
from weft.runtime.tensors import DATATYPES


def lines() -> tuple[Line, Line]:
    ours, theirs = packets.pair()
    return ours, Line(theirs)


def travelled(values: dict[str, Any]) -> dict[str, Any]:
    """Tensors that were described, layout one behind another, and restored."""
    layout = TensorLayout()
    described = packets.describe(values, layout)
    data = b"".join(layout.padded_pieces())
    assert len(data) == layout.size
    return packets.restore(described, data, copied=True)


def test_heads_that_nobody_should_have_to_read_are_garbled() -> None:
    ours, theirs = lines()
    ours.send(["x" * packets.LARGEST_HEAD], wait=True)
    with pytest.raises(Garbled, match="a head of"):
        theirs.receive()
    for each in (ours, theirs):
        each.close()


def test_a_tensor_of_another_size_than_is_said_is_garbled() -> None:
    with pytest.raises(Garbled, match="FP32"):
        packets.restore([("x", "FP32", [4], 0, 8)], bytes(64), copied=True)


def test_who_does_not_wait_hears_that_nothing_was_said() -> None:
    ours, theirs = lines()
    with pytest.raises(BlockingIOError):
        ours.receive(wait=False)
    theirs.close()
    with pytest.raises(EOFError):
        ours.receive(wait=False)
    ours.close()


@pytest.mark.parametrize("kind", [name for name in DATATYPES if name != "BYTES"])
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4), (1,)])
def test_tensors_of_every_type_come_as_they_went(kind: str, shape: tuple[int, ...]) -> None:
    value = np.arange(np.prod(shape, dtype=int)).astype(DATATYPES[kind]).reshape(shape)
    found = travelled({"a": value, "b": value})
    for each in found.values():
        assert each.dtype == value.dtype and each.shape == shape and np.array_equal(each, value)


@given(st.lists(st.binary(max_size=20), max_size=6))
def test_texts_come_as_bytes(texts: list[bytes]) -> None:
    found = travelled({"n": np.zeros(3, np.int8), "x": np.array(texts, np.object_)})["x"]
    assert found.tolist() == texts and found.dtype == np.object_


def test_tensors_need_not_lie_in_one_piece() -> None:
    value = np.arange(12, dtype=np.float32).reshape(3, 4).T
    assert np.array_equal(travelled({"x": value})["x"], value)


def test_long_packets_travel_in_a_file_and_short_ones_in_line() -> None:
    ours, theirs = lines()
    for size in (0, 10, packets.LARGEST_PACKET, 5 * packets.LARGEST_PACKET):
        piece = np.arange(size, dtype=np.uint8)
        ours.send(["x", size], [piece], wait=True)
        packet = theirs.receive()
        assert packet.head == ["x", size] and bytes(packet.tensors) == piece.tobytes() and not packet.files
    ours.close()
    with pytest.raises(EOFError):
        theirs.receive()
    theirs.close()


def test_who_may_not_wait_hears_that_nobody_listens() -> None:
    ours, theirs = lines()
    piece = np.zeros(packets.LARGEST_PACKET // 2, np.uint8)
    with pytest.raises(BlockingIOError):
        for _ in range(1000):
            ours.send(["x"], [piece], wait=False)
    theirs.close()
    with pytest.raises(OSError):
        ours.send(["x"], wait=False)
    ours.close()


def test_memory_is_seen_by_both_and_cannot_be_cut_short() -> None:
    here, file = packets.create_memory(100_000)
    copy = os.dup(file)
    assert os.readlink(f"/proc/self/fd/{file}").startswith("/memfd:")
    with pytest.raises(PermissionError):
        os.ftruncate(file, 10)
    os.close(file)
    there = packets.map_memory(copy)
    here.write([(64, np.full(10, 7, np.uint8))])
    assert there.size == here.size >= 100_000 and there.bytes[64:74].tolist() == [7] * 10


def test_memory_that_could_shrink_is_not_taken() -> None:
    file = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 4096)
    with pytest.raises(packets.UnfitMemory, match="may change its size"):
        packets.map_memory(file)
    with pytest.raises(OSError):
        os.fstat(file)  # it was closed
    empty = os.memfd_create("empty", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(empty, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(packets.UnfitMemory):
        packets.map_memory(empty)
    no_memory, other = os.pipe()
    with pytest.raises(packets.UnfitMemory):
        packets.map_memory(no_memory)
    os.close(other)


# Nonsense


@given(st.binary(min_size=1, max_size=300))
def test_bytes_that_are_no_packet_are_garbled(data: bytes) -> None:
    raw, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line = Line(end)
    raw.send(data)
    try:
        packet = line.receive()
        assert isinstance(packet.head, list)
    except Garbled:
        pass
    finally:
        raw.close()
        line.close()


@pytest.mark.parametrize(
    "described",
    [
        [["x", "FP32", [200], 0, 800]],
        [["x", "FP32", [2], -8, 8]],
        [["x", "FP32", [2], 2**63 - 4, 8]],
        [["x", "FP32", [2], 2**64, 8]],
        [["x", "FP32", [2], "0", 8]],
        [["x", "FP32", [-2], 0, 8]],
        [["x", "FP32", [2**62, 2**62], 0, 8]],
        [["x", "FP32", [2.5], 0, 8]],
        [["x", "FP32", [17], 0, 68]],
        [["x", "FP32", [1], 61, 4]],
        [["x", "FP32", "no", 0, 8]],
        [["x", "OBJECT", [1], 0, 8]],
        [["x", "BYTES", [10**9], 0, 8]],
        [["x", "BYTES", [1], 0, 8]],
        [["x", "FP32"]],
        [5],
        5,
        None,
        "text",
    ],
)
def test_tensors_that_cannot_be_are_garbled(described: Any) -> None:
    with pytest.raises(Garbled):
        packets.restore(described, b"\xff" * 64, copied=True)


TIMING = {"steady": [True, False], "times_s": {"1": [0.1, 0.2]}, "warm_shapes": {"x": [1, 2]}}


def description(**changes: Any) -> str:
    spec = {"name": "x", "datatype": "FP32", "shape": [-1, 2]}
    told = {
        "inputs": [spec], "outputs": [{**spec, "name": "y"}], "segments": ["a", "b"], "timing": TIMING,
        "batching": {"batchable": True, "max_batch": 4, "mergeable": True}, "residency": {"memory_bytes": 10},
        "remarks": [], "borrows": False,
    }  # fmt: skip
    return json.dumps(told | changes)


def test_a_description_of_a_model_is_read() -> None:
    found = ModelDescription.model_validate_json(description())
    assert found.inputs[0].shape == (-1, 2) and found.residency == ModelResidency(10)
    assert found.timing == SegmentTiming((True, False), {1: (0.1, 0.2)}, {"x": (1, 2)})
    assert (found.exits, found.shares, found.tasks) == (None, None, None)


def test_a_model_with_every_facet_is_told_to_the_server_and_read_as_it_was() -> None:
    timing = SegmentTiming((True, False), {1: (0.1, 0.2)}, {"x": (1, 2)}, learned=False)
    told = ModelDescription.model_validate_json(description()).model_copy(
        update={
            "timing": timing,
            "exits": ModelExits((ExitSpec(output="y", segment=1),), "probabilities"),
            "shares": ModelShares({1: GpuLikeness(speeds={8: 1.0}, kernel_us=10.0, memory=0.5)}, GpuCuts(sms=8)),
            "tasks": ModelTasks((TaskSpec(name="a", inputs={"x": "x"}, outputs={"y": "y"}),), any_lengths=True),
            "residency": ModelResidency(10, 20, 0.5),
        }
    )
    assert ModelDescription.model_validate_json(told.model_dump_json()) == told


@pytest.mark.parametrize(
    "changes",
    [
        {"segments": []},
        {"timing": TIMING | {"steady": [True]}},
        {"timing": TIMING | {"foreseen": [True]}},
        {"timing": TIMING | {"times_s": {"1": [0.1]}}},
        {"timing": TIMING | {"times_s": {"0": [0.1, 0.2]}}},
        {"timing": TIMING | {"times_s": {"1": [0.1, -1]}}},
        {"timing": TIMING | {"times_s": {"1": [0.1, float("nan")]}}},
        {"timing": TIMING | {"times_s": {"1": [0.1, float("inf")]}}},
        {"timing": TIMING | {"times_s": {"1": "xy"}}},
        {"timing": TIMING | {"warm_shapes": {"z": [1]}}},
        {"timing": TIMING | {"surprise": 1}},
        {"batching": {"max_batch": 0}},
        {"batching": {"max_batch": 10**9}},
        {"batching": {"batchable": "perhaps"}},
        {"residency": {"memory_bytes": -1}},
        {"residency": {"moving_bytes": 1 << 60}},
        {"residency": {"return_s": -1.0}},
        {"residency": {"return_s": float("nan")}},
        {"inputs": [{"name": "x", "datatype": "PICKLE", "shape": []}]},
        {"exits": {"specs": [{"output": "y", "segment": 2}]}},
        {"exits": {"specs": []}},
        {"exits": {"specs": [{"output": "y", "segment": 1}], "confidence": "hope"}},
        {"shares": {"like": {}}},
        {"surprise": 1},
    ],
)
def test_a_description_of_a_model_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        ModelDescription.model_validate_json(description(**changes))


def test_errors_keep_their_kind_where_it_is_known_and_their_text_on_one_line() -> None:
    for error in (UnfitInputs("a"), ModelError("b"), MemoryError("c")):
        again = decode_error(encode_error(error))
        assert type(again) is type(error) and str(again) == str(error)
    assert isinstance(decode_error(["SystemExit", "x\n\x1b[31my"]), RuntimeError)
    assert str(decode_error(["KeyError", "x\ny"])) == "KeyError: x y"
