"""One grammar for shapes: what it reads, what it refuses, and what follows from it for a model's inputs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.base.errors import InputError, ModelError
from weft.base.shapes import (
    example,
    parse_shape,
    parse_shapes,
    parse_sizes,
    settle,
    sizes_of,
    written,
)

WORDS = {"ids": ("batch", "seq"), "mask": ("batch", "seq"), "picture": ("batch", 3, "?", "?")}
TEXTS = st.one_of(st.text(max_size=30), st.from_regex(r"[a-z.:]{0,6}=?[0-9x]{0,8}", fullmatch=True))


def test_a_shape_is_a_name_and_sizes():
    assert parse_shape("x=1x3x640x640") == ("x", (1, 3, 640, 640))
    assert parse_shape("seq = 128") == ("seq", (128,))
    assert parse_shape("image:0=1x3") == ("image:0", (1, 3))


@pytest.mark.parametrize(
    "text", ["", "x", "=1x3", "x=", "x=1x", "x=1X3", "x=-1", "x=1.5", "x=1,3", "x=٣", "x=" + "9" * 5000]
)
def test_what_is_no_shape_is_refused(text):
    with pytest.raises(ModelError, match="is not"):
        parse_shape(text)


def test_a_model_is_named_only_where_there_are_several():
    assert parse_shapes(["x=1x3"], ["a.onnx"]) == {"a.onnx": {"x": (1, 3)}}
    assert parse_shapes(["a.onnx:x=1", "b:y=2"], ["a.onnx", "b.onnx"], {"b": "b.onnx"}) == {
        "a.onnx": {"x": (1,)},
        "b.onnx": {"y": (2,)},
    }
    with pytest.raises(ModelError, match=r"say which model, as a.onnx:x=1"):
        parse_shapes(["x=1"], ["a.onnx", "b.onnx"])
    with pytest.raises(ModelError, match=r"'c' is not among the models a.onnx"):
        parse_shapes(["c:x=1"], ["a.onnx"])
    with pytest.raises(ModelError, match="x is given as 1x3 and as 1x4; keep one"):
        parse_shapes(["x=1x3", "a.onnx:x=1x4"], ["a.onnx"])


@given(st.lists(TEXTS, max_size=4), st.lists(st.sampled_from(["a", "b.onnx", "x:y", ""]), max_size=3))
def test_the_parser_raises_nothing_but_our_error(texts, models):
    try:
        found = parse_shapes(texts, models)
    except InputError:
        return
    assert all(model in models and name for model, shapes in found.items() for name in shapes)


@given(st.lists(st.integers(0, 10**18 - 1), min_size=1, max_size=8).map(tuple))
def test_what_is_written_is_read_again(shape):
    assert parse_sizes(written(shape)) == shape


def test_axes_that_inputs_share_are_given_once():
    both = {"ids": (1, 128), "mask": (1, 128)}
    assert settle({"ids": (1, 128)}, WORDS) == both
    assert settle({"seq": (128,)}, WORDS) == both
    assert settle({"seq": (128,), "batch": (4,)}, WORDS) == {"ids": (4, 128), "mask": (4, 128)}
    assert settle({}, WORDS) == {}


def test_nameless_dimensions_tell_nothing_of_each_other():
    assert settle({"picture": (1, 3, 5, 7)}, {**WORDS, "other": ("?", "?")})["picture"] == (1, 3, 5, 7)
    assert "other" not in settle({"picture": (1, 3, 5, 7)}, {**WORDS, "other": ("?", "?")})


def test_an_input_given_by_itself_keeps_its_sizes_where_an_exporter_used_a_name_twice():
    shapes = {"ids": (1, 128), "mask": (1, 64)}
    assert settle(shapes, {**WORDS, "more": ("batch", "seq")}) == shapes


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({"idx": (1, 2)}, r"unknown input 'idx'; the inputs are: ids \[batch, seq\]; mask"),
        ({"seq": (1, 128)}, "seq is an axis and takes one number, as seq=128, not 1x128"),
        ({"seq": (64,), "ids": (1, 128)}, "seq=64 and ids=1x128 disagree"),
        ({"ids": (128,)}, "shape 128 does not fit input 'ids'"),
        ({"picture": (1, 4, 5, 7)}, "shape 1x4x5x7 does not fit input 'picture'"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(shapes, said):
    with pytest.raises(ModelError, match=said):
        settle(shapes, WORDS)


DIMENSIONS = st.one_of(
    st.none(), st.lists(st.one_of(st.integers(0, 4), st.sampled_from(["n", "m", "?", None])), max_size=3)
)
NAMES = st.sampled_from(["x", "y", "n", "m", "?", ""])


@given(st.dictionaries(NAMES, st.lists(st.integers(0, 4), max_size=3).map(tuple)), st.dictionaries(NAMES, DIMENSIONS))
def test_settled_shapes_fit_every_input_or_are_refused(shapes, inputs):
    try:
        found = settle(shapes, inputs)
    except ModelError:
        return
    for name, shape in found.items():
        assert inputs[name] is None or len(shape) == len(inputs[name])
        assert all(size == want for size, want in zip(shape, inputs[name] or (), strict=False) if isinstance(want, int))
        assert shape == shapes.get(name, shape) and min(shape, default=0) >= 0


def test_files_give_text_numbers_or_arrays():
    assert [sizes_of(value) for value in ("1x3", 128, [1, 3], True)] == [[1, 3], [128], [1, 3], True]
    with pytest.raises(ValueError, match="'1xa' is not a shape"):
        sizes_of("1xa")


def test_examples_fit():
    assert [example(each) for each in (("n", "m"), (-1, 3, -1), (2, 3), ())] == ["1x128", "1x3x128", "2x3", "()"]
