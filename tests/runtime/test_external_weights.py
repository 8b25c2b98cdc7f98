"""Weights in files of their own: from the model's folder alone, whole, and read, so that nothing is mapped."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.serving import live
from weft.errors import ModelError
from weft.runtime import external
from weft.runtime.backend import LoadOptions
from weft.runtime.external import external_files, external_tensors, read_weights
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


def test_tensors_of_nodes_and_of_types_that_numpy_lacks_are_checked_and_left_alone(tmp_path: Path) -> None:
    def elsewhere(tensor: TensorProto, size: int) -> TensorProto:
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in {"location": "w.data", "offset": "0", "length": str(size)}.items():
            tensor.external_data.add(key=key, value=value)
        return tensor

    constant = helper.make_node(
        "Constant", [], ["c"], value=elsewhere(numpy_helper.from_array(np.ones(8, np.float32), "v"), 32)
    )
    bfloat = elsewhere(TensorProto(name="b", dims=[4], data_type=TensorProto.BFLOAT16), 8)
    ends = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [8])]
    graph = helper.make_graph([constant, helper.make_node("Identity", ["c"], ["y"])], "g", [], ends, [bfloat])
    (tmp_path / "m.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    (tmp_path / "w.data").write_bytes(bytes(32))
    found = external_tensors(tmp_path / "m.onnx")
    assert sorted((each.tensor.name, each.replaceable, each.size) for each in found) == [
        ("b", True, 8),
        ("v", False, 32),
    ]
    assert read_weights(found) == {}
    os.truncate(tmp_path / "w.data", 31)
    with pytest.raises(ModelError, match="weights 'v' end at 32"):
        external_tensors(tmp_path / "m.onnx")


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
