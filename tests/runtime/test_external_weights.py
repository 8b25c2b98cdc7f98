"""Weights in files of their own: from the model's folder alone, whole, and read, so that nothing is mapped."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.serving import live
from weft.base.errors import ModelError
from weft.runtime import external
from weft.runtime.backend import LoadOptions
from weft.runtime.external import external_files, external_tensors
from weft.runtime.onnxruntime_cpu.preparing import prepare

FEED = {"x": np.ones((1, 512), np.float32)}


def outside(folder: Path, location: str = "weights.data") -> Path:
    """A chain whose weights lie in a file of this name."""
    path = live.heavy(folder / "model.onnx", layers=2, rows=1)
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights.data")
    if location != "weights.data":
        model = onnx.load(path, load_external_data=False)
        for tensor in model.graph.initializer:
            next(entry for entry in tensor.external_data if entry.key == "location").value = location
        onnx.save(model, path)
    return path


@pytest.mark.parametrize("learn", [True, False])
def test_they_are_read_and_nothing_of_the_folder_is_mapped(tmp_path: Path, learn: bool) -> None:
    path = outside(tmp_path)
    wanted = prepare(live.heavy(tmp_path / "inside.onnx", layers=2, rows=1), LoadOptions(), learn=False).run(FEED)
    model = prepare(path, LoadOptions(), learn=learn)
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(tmp_path) not in maps.read_text()
    os.truncate(tmp_path / "weights.data", 0)
    assert model.run(FEED)["y"].tobytes() == wanted["y"].tobytes()


@pytest.mark.parametrize("cache", [None, "cache"])
@pytest.mark.parametrize("learn", [True, False])
def test_a_file_that_is_too_short_is_named(tmp_path: Path, learn: bool, cache: str | None) -> None:
    path = outside(tmp_path)
    os.truncate(tmp_path / "weights.data", (tmp_path / "weights.data").stat().st_size - 1)
    with pytest.raises(ModelError, match=r"model\.onnx: weights\.data has \d+ bytes, but weights 'w1' end at"):
        prepare(path, LoadOptions(), cache and tmp_path / cache, learn=learn)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    path = outside(tmp_path)
    (tmp_path / "weights.data").unlink()
    with pytest.raises(ModelError, match=r"weights\.data, which holds weights 'w0', cannot be read: No such file"):
        prepare(path, LoadOptions(), learn=False)


@pytest.mark.parametrize("location", ["../weights.data", "/etc/passwd", "sub/../../weights.data", "", "link/passwd"])
def test_weights_outside_of_the_folder_are_refused(tmp_path: Path, location: str) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "link").symlink_to("/etc")
    path = outside(tmp_path / "models", location)
    with pytest.raises(ModelError, match="outside of the model's folder"):
        prepare(path, LoadOptions(), learn=False)
    with pytest.raises(ModelError, match=r"model\.onnx: .*outside of the model's folder"):
        prepare(path, LoadOptions(), tmp_path / "cache")


def test_a_folder_of_links_into_another_one_is_read(tmp_path: Path) -> None:
    """As programs that fetch models keep them: the files in one folder, links to them in another."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    path = outside(tmp_path / "blobs")
    for name in (path.name, "weights.data"):
        (tmp_path / "snapshot" / name).symlink_to(tmp_path / "blobs" / name)
    assert external_files(tmp_path / "snapshot" / path.name) == (tmp_path / "snapshot" / "weights.data",)
    assert prepare(tmp_path / "snapshot" / path.name, LoadOptions(), learn=False).run(FEED)


def put_outside(path: Path, model: onnx.ModelProto, tensors: list[TensorProto]) -> Path:
    """Save a model with the data of these tensors of it in w.data, one behind the other."""
    data = b""
    for tensor in tensors:
        place = {"location": "w.data", "offset": str(len(data)), "length": str(len(tensor.raw_data))}
        data += tensor.raw_data
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in place.items():
            tensor.external_data.add(key=key, value=value)
    (path.parent / "w.data").write_bytes(data)
    path.write_bytes(model.SerializeToString())
    return path


BRANCH_FLOATS = 1 << 16
"""More than ONNX Runtime reads instead of mapping, and more than a page."""


def in_branches(path: Path, depth: int = 1) -> Path:
    """y = x + 1, where an If in an If (*depth* of them) has the weight that is added, or adds nothing."""
    weight = numpy_helper.from_array(np.ones(BRANCH_FLOATS, np.float32), "w")
    value = helper.make_tensor_value_info
    shape = [BRANCH_FLOATS]
    body = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["sum"])], "adds", [], [value("sum", TensorProto.FLOAT, shape)], [weight]
    )
    for level in range(depth):
        other = helper.make_graph(
            [helper.make_node("Identity", ["x"], ["same"])], "same", [], [value("same", TensorProto.FLOAT, shape)]
        )
        name = f"y{level}"
        node = helper.make_node("If", ["c"], [name], then_branch=body, else_branch=other)
        body = helper.make_graph([node], f"if{level}", [], [value(name, TensorProto.FLOAT, shape)])
    ends = [value("x", TensorProto.FLOAT, shape), value("c", TensorProto.BOOL, [])]
    graph = helper.make_graph(body.node, "g", ends, body.output)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    inner = model.graph
    while not inner.initializer:
        inner = next(each.g for each in inner.node[0].attribute if each.name == "then_branch")
    return put_outside(path, model, list(inner.initializer))


def ask_branches(model: Any, depth: int = 1) -> bool:
    """Whether the weight in the branch counts in a model's answer."""
    feed = {"x": np.ones(BRANCH_FLOATS, np.float32), "c": np.array(True)}
    return bool((model.run(feed)[f"y{depth - 1}"] == 2).all())


@pytest.mark.parametrize("learn", [True, False])
@pytest.mark.parametrize("depth", [1, 3])
def test_those_of_branches_are_read_and_a_file_truncated_later_ends_nothing(
    tmp_path: Path, depth: int, learn: bool
) -> None:
    model = prepare(in_branches(tmp_path / "m.onnx", depth), LoadOptions(), learn=learn)
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(tmp_path) not in maps.read_text()
    os.truncate(tmp_path / "w.data", 0)
    assert ask_branches(model, depth)


def test_those_of_branches_whose_file_is_too_short_are_named(tmp_path: Path) -> None:
    path = in_branches(tmp_path / "m.onnx")
    os.truncate(tmp_path / "w.data", 4 * BRANCH_FLOATS - 1)
    with pytest.raises(ModelError, match=r"w\.data has 262143 bytes, but weights 'w' end at 262144"):
        prepare(path, LoadOptions(), learn=False)


def test_those_of_loops_attributes_functions_and_every_type_are_read(tmp_path: Path) -> None:
    """A loop adds its own weight three times; a function adds its constant; then come bfloat16 and int4."""
    kind, value = TensorProto.FLOAT, helper.make_tensor_value_info
    eight = numpy_helper.from_array(np.ones(8, np.float32), "v")
    body = helper.make_graph(
        [helper.make_node("Add", ["s_in", "w"], ["s_out"]), helper.make_node("Identity", ["on_in"], ["on_out"])],
        "body",
        [value("i", TensorProto.INT64, []), value("on_in", TensorProto.BOOL, []), value("s_in", kind, [8])],
        [value("on_out", TensorProto.BOOL, []), value("s_out", kind, [8])],
        [numpy_helper.from_array(np.ones(8, np.float32), "w")],
    )
    function = helper.make_function(
        "own", "plus", ["a"], ["b"],
        [helper.make_node("Constant", [], ["k"], value=eight), helper.make_node("Add", ["a", "k"], ["b"])],
        [helper.make_opsetid("", 21)],
    )  # fmt: skip
    bfloat = TensorProto(name="bf", dims=[8], data_type=TensorProto.BFLOAT16, raw_data=b"\x80\x3f" * 8)
    small = TensorProto(name="i4", dims=[8], data_type=TensorProto.INT4, raw_data=b"\x11" * 4)
    nodes = [
        helper.make_node("Loop", ["three", "", "x"], ["looped"], body=body),
        helper.make_node("plus", ["looped"], ["more"], domain="own"),
        *(helper.make_node("Cast", [each.name], [f"{each.name}_f"], to=kind) for each in (bfloat, small)),
        helper.make_node("Sum", ["more", "bf_f", "i4_f"], ["y"]),
    ]
    three = numpy_helper.from_array(np.array(3, np.int64), "three")
    graph = helper.make_graph(nodes, "g", [value("x", kind, [8])], [value("y", kind, [8])], [three, bfloat, small])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=[function])
    weights = [model.graph.initializer[1], model.graph.initializer[2], model.functions[0].node[0].attribute[0].t]
    path = put_outside(tmp_path / "m.onnx", model, [*weights, model.graph.node[0].attribute[0].g.initializer[0]])
    found = {each.tensor.name: each.is_given for each in external_tensors(path)}
    assert found == {"bf": True, "i4": False, "v": False, "w": False}
    opened = prepare(path, LoadOptions(), learn=False)
    os.truncate(tmp_path / "w.data", 0)
    assert opened.run({"x": np.zeros(8, np.float32)})["y"].tolist() == [6.0] * 8
    (tmp_path / "w.data").write_bytes(bytes(83))
    with pytest.raises(ModelError, match="weights 'w' end at 84"):
        external_tensors(path)


def test_branches_that_would_make_a_model_too_long_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "LARGEST_MODEL_BYTES", 1 << 18)
    path = in_branches(tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="make 'w' a weight of the main graph"):
        prepare(path, LoadOptions(), learn=False)


@pytest.mark.parametrize(("key", "value"), [("offset", "-5"), ("length", "-1"), ("offset", "one")])
def test_an_offset_or_a_length_that_cannot_be_is_called_that(tmp_path: Path, key: str, value: str) -> None:
    path = outside(tmp_path)
    model = onnx.load(path, load_external_data=False)
    entries = model.graph.initializer[0].external_data
    next(entry for entry in entries if entry.key == key).value = value
    onnx.save(model, path)
    says = "is negative" if value != "one" else "is not a number"
    with pytest.raises(ModelError, match=rf"external data of tensor 'w0': {key} '?{value}'? {says}"):
        prepare(path, LoadOptions(), learn=False)


def test_a_pipe_in_the_place_of_a_file_is_named_and_not_opened(tmp_path: Path) -> None:
    path = outside(tmp_path)
    (tmp_path / "weights.data").unlink()
    os.mkfifo(tmp_path / "weights.data")
    with pytest.raises(ModelError, match=r"weights\.data, which holds weights 'w0', is a named pipe, not a file"):
        prepare(path, LoadOptions(), learn=False)


@pytest.mark.parametrize("content", [b"", b"location" * 9, b"\x3a\xff\xff\xff\xff\x0flocation"])
def test_what_is_no_model_has_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    assert external_tensors(tmp_path / "m.onnx") == []


@pytest.mark.parametrize("piece", range(8, 24))
def test_the_word_is_found_wherever_a_file_is_divided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(external, "_PIECE_BYTES", piece)
    assert external_files(outside(tmp_path)) == (tmp_path / "weights.data",)


def test_a_large_file_without_such_weights_is_looked_through_in_little_memory(tmp_path: Path) -> None:
    path = live.heavy(tmp_path / "model.onnx", layers=8, rows=1)
    assert path.stat().st_size > 8 << 20
    tracemalloc.start()
    try:
        assert external_files(path) == ()
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()
