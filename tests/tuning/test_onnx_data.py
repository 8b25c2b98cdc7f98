"""Labelled samples from a file: what fits is widened, what does not is named together with the way out."""

from __future__ import annotations

import numpy as np
import pytest

from weft.base.errors import TuneError
from weft.runtime.tensors import TensorSpec
from weft_tune.quantised.data import check_inputs, check_labels, read_data

IMAGE = TensorSpec("image", "FP32", (-1, 1, 4, 4))
N = 12
LABELS = np.arange(N) % 3


@pytest.fixture
def stored(tmp_path):
    def write(**arrays):
        np.savez(tmp_path / "data.npz", **arrays)
        return tmp_path / "data.npz"

    return write


def images(dtype=np.float32, *shape: int):
    return np.arange(N * 16).reshape(shape or (N, 1, 4, 4)).astype(dtype)


@pytest.mark.parametrize("label", ["label", "labels", "y"])
@pytest.mark.parametrize("name", ["image", "pictures"])
def test_a_single_input_takes_the_only_other_array(stored, name, label):
    data = read_data(stored(**{name: images(), label: LABELS}), [IMAGE])
    assert list(data.inputs) == ["image"] and np.array_equal(data.inputs["image"], images())
    assert np.array_equal(data.labels, LABELS)


def test_pixels_need_a_scale(stored):
    path = stored(image=images(np.uint8), label=LABELS)
    with pytest.raises(
        TuneError, match=r"image holds uint8 up to 191 for a float input; give scale = 1/255, or scale = 1"
    ):
        read_data(path, [IMAGE])
    assert read_data(path, [IMAGE], 1 / 255).inputs["image"].max() == np.float32(191) * np.float32(1 / 255)
    assert read_data(path, [IMAGE], 1).inputs["image"].max() == 191
    assert read_data(path, [IMAGE], 1).inputs["image"].dtype == np.float32


def test_zeros_and_ones_need_no_scale(stored):
    assert read_data(stored(image=images(np.uint8) % 2, label=LABELS), [IMAGE]).inputs["image"].max() == 1


def test_inputs_of_whole_numbers_are_widened_and_never_scaled(stored):
    ids = TensorSpec("ids", "INT64", (-1, 16))
    path = stored(ids=images(np.int32, N, 16), label=LABELS)
    assert read_data(path, [ids], 1 / 255).inputs["ids"].dtype == np.int64
    assert read_data(path, [ids], 1 / 255).inputs["ids"].max() == N * 16 - 1


def spoilt(value):
    found = images()
    found[7, 0, 1, 1] = value
    return found


MISFITS = {
    "no labels": (
        dict(image=images()),
        "has no array called label or labels or y with the right classes; it holds image",
    ),
    "no input": (
        dict(a=images(), b=images(), y=LABELS),
        "no array for the input 'image' of the model; it holds a, b, y",
    ),
    "transposed": (dict(image=images(np.float32, N, 4, 4, 1), y=LABELS), r"array\.transpose\(0, 3, 1, 2\)"),
    "flat": (dict(image=images(np.float32, N, 16), y=LABELS), r"Nx16|12x16.*array\.reshape\(-1, 1, 4, 4\)"),
    "other size": (dict(image=images(np.float32, N, 1, 2, 8), y=LABELS), "array.reshape"),
    "too small": (dict(image=images()[..., :3], y=LABELS), "12x1x4x3, the input 'image' .x1x4x4; all but the first"),
    "few labels": (dict(image=images(), y=LABELS[:-1]), "y has the shape 11, must have a row for each of 12 samples"),
    "NaN": (dict(image=spoilt(np.nan), y=LABELS), "image holds NaN or infinity, first in sample 7"),
    "infinity": (dict(image=spoilt(np.inf), y=LABELS), "image holds NaN or infinity, first in sample 7"),
    "text": (dict(image=images().astype(str), y=LABELS), "image is of type <U.*, must be numbers"),
    "few": (dict(image=images()[:9], y=LABELS[:9]), "9 samples are too few to measure anything; give at least 10"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_misfits_are_named(stored, case):
    arrays, message = MISFITS[case]
    with pytest.raises(TuneError, match=message) as caught:
        read_data(stored(**arrays), [IMAGE])
    assert "data.npz: " in str(caught.value) and "\n" not in str(caught.value)


def test_wide_numbers_do_not_fit_into_narrow_inputs(stored):
    ids = TensorSpec("ids", "INT32", (-1, 16))
    with pytest.raises(TuneError, match="ids is of type int64, which does not fit into the input's INT32"):
        read_data(stored(ids=images(np.int64, N, 16), label=LABELS), [ids])


def test_inputs_must_have_as_many_rows_as_each_other(stored):
    other = TensorSpec("other", "FP32", (-1,))
    with pytest.raises(TuneError, match="other holds 11 samples, image 12"):
        read_data(stored(image=images(), other=np.zeros(11, np.float32), label=LABELS), [IMAGE, other])


def test_what_is_no_archive_is_refused(tmp_path):
    (tmp_path / "bad.npz").write_text("nothing of the kind")
    with pytest.raises(TuneError, match=r"bad\.npz: not a file of samples .*; write it with numpy\.savez"):
        read_data(tmp_path / "bad.npz", [IMAGE])
    with pytest.raises(TuneError, match=r"none\.npz: cannot read the samples: No such file"):
        read_data(tmp_path / "none.npz", [IMAGE])


def test_pickled_objects_are_not_loaded(stored):
    with pytest.raises(TuneError, match="not a file of samples"):
        read_data(stored(image=np.array([{}] * N, object), label=LABELS), [IMAGE])


def test_arrays_in_memory_are_checked_alike():
    with pytest.raises(TuneError, match="no samples for the input 'image' of the model; given: picture"):
        check_inputs({"picture": images()}, [IMAGE])
    with pytest.raises(TuneError, match="give scale = "):
        check_inputs({"image": images(np.uint8)}, [IMAGE])


def test_numbers_that_the_input_cannot_hold_are_told():
    with pytest.raises(TuneError, match="image holds NaN or infinity, first in sample 7, once it is FP32"):
        check_inputs({"image": np.where(np.arange(N)[:, None, None, None] == 7, 1e300, images(np.float64))}, [IMAGE])


def test_labels_must_be_an_array_of_values():
    for labels, message in (([[1], [1, 2]], "rows of different lengths"), ([{}] * N, "of Python objects")):
        with pytest.raises(TuneError, match=message):
            check_labels(labels, N, classes=False)


def test_a_column_of_labels_will_do_but_not_one_hot():
    assert check_labels(LABELS[:, None], N).shape == (N,)
    with pytest.raises(TuneError, match="label has the shape 12x3, must be one class for each of 12 samples"):
        check_labels(np.eye(3, dtype=int)[LABELS], N)
    with pytest.raises(TuneError, match="label is of type float64, must be whole numbers"):
        check_labels(LABELS / 2, N)
