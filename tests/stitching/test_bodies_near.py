"""Weights of which models share all but some columns, rows or lines, or a scale."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.stitching.encoders import TOKENS, answers, sentences, tiny_encoders, together
from tests.stitching.variants import changed_file, other_columns, other_lines, scaled_columns, scaled_rows
from weft_stitch.bodies.body_stitching import BodyStitching, stitch_body


def other_rows(weight: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return other_columns(weight.T, rng).T


def own(made: BodyStitching) -> dict[str, tuple[str, ...]]:
    assert all(each.crews == (tuple(range(len(made.names))),) for each in made.shared if each.own)
    return {each.name: each.own for each in made.shared if each.own}


def equals_its_models(made: BodyStitching, folder: Path, close: float = 1e-5) -> None:
    (path,) = made.to_onnx(folder / "body.onnx")
    feeds = [sentences(1 + task % 2, 4 + 3 * task, task) for task in range(len(made.names))]
    for name, feed, found in zip(made.names, feeds, together(path, made.names, feeds), strict=True):
        wanted = answers(made.files[name], feed)["logits"]
        np.testing.assert_allclose(found["logits"], wanted, rtol=0, atol=close * np.abs(wanted).max())


@pytest.mark.parametrize("tolerance", [0.0, 1e-6])
def test_a_few_columns_and_rows_are_a_model_s_own(tmp_path, tolerance):
    """In all modes, as not a bit is lost; pooler: of rows without a length."""
    (source,) = tiny_encoders(tmp_path / "source", 1)
    change = {"layer0__up__product": other_columns, "layer1__down__product": other_rows}
    files = [changed_file(source, tmp_path / "a.onnx", 0)]
    files.append(changed_file(source, tmp_path / "b.onnx", 1, **change))
    files.append(changed_file(source, tmp_path / "c.onnx", 2, **change, pooler__product=other_rows))
    made = stitch_body(files, tolerance=tolerance, measure=False)
    assert own(made) == {
        "layer0.up.product": ("2 columns",),
        "layer1.down.product": ("2 rows",),
        "pooler.product": ("2 rows",),
    }
    # nothing else is stored than one model and, of each of both, two rows or columns with their places
    assert made.weight_bytes - stitch_body(files[:1], measure=False).weight_bytes < 20_000
    assert made.difference is not None and made.difference.relative <= 1e-5
    equals_its_models(made, tmp_path)


def test_a_weight_that_two_models_have_is_stored_once(tmp_path):
    (source,) = tiny_encoders(tmp_path / "source", 1)
    sizes = []
    for count in (1, 4):
        files = [changed_file(source, tmp_path / "a.onnx", 0)]
        files += [
            changed_file(source, tmp_path / f"b{at}.onnx", 1, layer0__up__product=other_columns) for at in range(count)
        ]
        made = stitch_body(files, measure=False)
        equals_its_models(made, tmp_path)
        sizes.append(sum(each.nbytes for each in made.graph.constants.values() if each.dtype == np.float32))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("change", [scaled_columns, scaled_rows])
def test_a_scale_is_a_model_s_own_where_something_may_be_lost(tmp_path, change):
    (source,) = tiny_encoders(tmp_path / "source", 1)
    steps = ("layer0__value__product", "layer1__down__product", "pooler__product")
    files = [changed_file(source, tmp_path / "a.onnx", 0)]
    files += [
        changed_file(source, tmp_path / f"{name}.onnx", ord(name), **dict.fromkeys(steps, change)) for name in "bc"
    ]
    made = stitch_body(files, tolerance=1e-6, measure=False)
    assert own(made) == {each.replace("__", "."): ("scale",) for each in steps}
    assert made.weight_bytes < 0.4 * made.apart_bytes < stitch_body(files, measure=False).weight_bytes
    equals_its_models(made, tmp_path)


@pytest.mark.parametrize("first", [False, True], ids=["grows", "shrinks"])
def test_tables_may_differ_in_some_lines_and_in_size(tmp_path, first):
    """To the last bit, whichever of them comes first; a line that a model lacks is still refused."""
    (source,) = tiny_encoders(tmp_path / "source", 1)
    files = [changed_file(source, tmp_path / "plain.onnx", 0)]
    files += [changed_file(source, tmp_path / f"{name}.onnx", ord(name), words=other_lines) for name in "bc"]
    files.append(changed_file(source, tmp_path / "d.onnx", ord("b"), words=other_lines))
    files = files[::-1] if first else files
    made = stitch_body(files, measure=False)
    assert list(own(made).values()) == [("3 lines" if first else "4 lines",)]
    assert made.weight_bytes - stitch_body(files[:1], measure=False).weight_bytes < 4_000
    equals_its_models(made, tmp_path)
    (path,) = made.to_onnx(tmp_path / "body.onnx")
    feeds = [sentences(1, 5, task) for task in range(len(files))]
    new = [at for at, name in enumerate(made.names) if name != "plain"]
    for task in new:
        feeds[task]["input_ids"][0, :2] = TOKENS + 2, 7
    for task, found in enumerate(together(path, made.names, feeds)):
        np.testing.assert_allclose(found["logits"], answers(files[task], feeds[task])["logits"], rtol=0, atol=1e-6)
    feeds[made.names.index("plain")]["input_ids"][0, 1] = TOKENS
    with pytest.raises(Exception, match="out of data bounds"):
        together(path, made.names, feeds)


def two_tables(path: Path, first: np.ndarray, second: np.ndarray) -> Path:
    """What is found in two tables, added up."""
    nodes = [
        onnx.helper.make_node("Gather", ["first", "a"], ["x"]),
        onnx.helper.make_node("Gather", ["second", "b"], ["y"]),
        onnx.helper.make_node("Add", ["x", "y"], ["z"]),
        onnx.helper.make_node("MatMul", ["z", "weight"], ["logits"]),
    ]
    weight = np.random.default_rng(5).standard_normal((first.shape[1], 3)).astype(np.float32)
    held = {"first": first, "second": second, "weight": weight}
    graph = onnx.helper.make_graph(
        nodes,
        "two tables",
        [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, ["rows", "length"]) for name in "ab"],
        [onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["rows", "length", 3])],
        [numpy_helper.from_array(each, name) for name, each in held.items()],
    )
    onnx.save(onnx.helper.make_model(graph, ir_version=9, opset_imports=[onnx.helper.make_opsetid("", 17)]), path)
    return path


def test_tables_that_are_equal_in_one_model_may_be_tuned_apart_in_another(tmp_path):
    table = np.random.default_rng(1).standard_normal((40, 16)).astype(np.float32)
    first, second = table.copy(), table.copy()
    first[3] += 1
    second[7] -= 1
    files = [two_tables(tmp_path / "plain.onnx", table, table), two_tables(tmp_path / "tuned.onnx", first, second)]
    made = stitch_body(files, measure=False)
    assert list(own(made).values()) == [("1 lines",), ("1 lines",)]
    (path,) = made.to_onnx(tmp_path / "body.onnx")
    feed = {"a": np.array([[3, 7, 1]]), "b": np.array([[7, 3, 2]])}
    for file, found in zip(files, together(path, made.names, [feed, feed]), strict=True):
        np.testing.assert_array_equal(found["logits"], answers(file, feed)["logits"])
