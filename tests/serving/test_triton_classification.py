"""Outputs as classes: which elements, how they are written, and the labels from a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from weft.base.errors import BadRequest, ModelError
from weft.runtime.tensors import TensorSpec
from weft.serving.classification import class_count, classify, read_labels

ROWS = TensorSpec("y", "FP32", (-1, 4))


def test_each_row_has_its_largest_elements_first() -> None:
    array = np.array([[0.1, 0.5, 0.25, 0.15], [4, 3, 2, 1]], np.float32)
    spec, found = classify(ROWS, array, 2)
    assert (spec.name, spec.datatype, found.shape) == ("y", "BYTES", (2, 2))
    assert found.tolist() == [[b"0.500000:1", b"0.250000:2"], [b"4.000000:0", b"3.000000:1"]]


def test_a_label_stands_behind_its_index_where_there_is_one() -> None:
    _, found = classify(ROWS, np.array([[1, 2, 3, 4]], np.float32), 4, ["cat", "", "a dog"])
    assert found.tolist() == [[b"4.000000:3", b"3.000000:2:a dog", b"2.000000:1", b"1.000000:0:cat"]]


def test_without_a_free_first_dimension_all_elements_are_one_row() -> None:
    spec, found = classify(TensorSpec("y", "FP32", (1, 4)), np.array([[1, 3, 2, 0]], np.float32), 3)
    assert found.tolist() == [b"3.000000:1", b"2.000000:2", b"1.000000:0"] and spec.shape == (3,)


def test_a_row_of_several_dimensions_is_counted_through() -> None:
    _, found = classify(TensorSpec("y", "INT64", (-1, 2, 2)), np.array([[[5, 6], [8, 7]]]), 2)
    assert found.tolist() == [[b"8:2", b"7:3"]]


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int64, np.uint64])
def test_whole_numbers_are_written_as_such(kind: type[np.generic]) -> None:
    limits = np.iinfo(kind)  # type: ignore[type-var]
    array = np.array([[limits.min, limits.max, 1]], kind)
    _, found = classify(ROWS, array, 3)
    last = [b"1:2", f"{limits.min}:0".encode()]
    assert found.tolist() == [[f"{limits.max}:1".encode(), *last]]


def test_of_equal_elements_the_first_goes_first_and_nan_goes_last() -> None:
    array = np.array([[np.nan, 1, 1, -np.inf], [np.inf, np.nan, np.inf, 1]], np.float32)
    _, found = classify(ROWS, array, 9)
    assert [item.partition(b":")[2] for item in found[0]] == [b"1", b"2", b"3", b"0"]
    assert found[1].tolist() == [b"inf:0", b"inf:2", b"1.000000:3", b"nan:1"]


def test_more_classes_than_there_are_is_all_of_them_and_no_rows_are_none() -> None:
    assert classify(ROWS, np.zeros((2, 4), np.float32), 1000)[1].shape == (2, 4)
    assert classify(ROWS, np.zeros((0, 4), np.float32), 2)[1].shape == (0, 2)
    assert classify(TensorSpec("y", "FP32", (-1,)), np.ones(3, np.float32), 2)[1].shape == (3, 1)


@pytest.mark.parametrize("asked", [-1, 1.5, True, "3", None])
def test_what_is_no_number_of_classes_is_refused(asked: object) -> None:
    with pytest.raises(BadRequest, match="output 'y': classification must be a whole number"):
        class_count(asked, ROWS)


@pytest.mark.parametrize("datatype", ["BYTES", "BOOL"])
def test_strings_and_truths_have_no_classes(datatype: str) -> None:
    assert class_count(0, TensorSpec("y", datatype, (-1,))) == 0
    with pytest.raises(BadRequest, match=f"{datatype} has no classes"):
        class_count(2, TensorSpec("y", datatype, (-1,)))


# Labels


def test_labels_lie_beside_the_model_one_to_a_line(tmp_path: Path) -> None:
    (tmp_path / "animals.txt").write_bytes("\ufeffcat\r\nguinea pig\n\nKröte\n".encode())
    found = read_labels(tmp_path / "net.onnx", {"y": "animals.txt"}, ["y", "z"])
    assert found == {"y": ("cat", "guinea pig", "", "Kröte", "")}


def test_labels_of_all_versions_lie_beside_their_settings(tmp_path: Path) -> None:
    model = tmp_path / "net" / "2" / "model.onnx"
    model.parent.mkdir(parents=True)
    (tmp_path / "net" / "labels.txt").write_text("all")
    assert read_labels(model, {"y": "labels.txt"}, ["y"]) == {"y": ("all",)}
    (model.parent / "labels.txt").write_text("own")
    assert read_labels(model, {"y": "labels.txt"}, ["y"]) == {"y": ("own",)}


def test_labels_that_cannot_be_used_say_why(tmp_path: Path) -> None:
    model = tmp_path / "net.onnx"
    (tmp_path / "noise.txt").write_bytes(b"\xff\xfe")
    for files, why in (
        ({"z": "noise.txt"}, "labels: unknown output 'z'"),
        ({"y": "none.txt"}, "labels: none.txt is no file"),
        ({"y": "noise.txt"}, "labels: noise.txt cannot be read as text"),
    ):
        with pytest.raises(ModelError, match=why):
            read_labels(model, files, ["y"])
