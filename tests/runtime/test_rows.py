"""Operators that compute with several rows of a batch are found in the graph, whatever made-up samples show.

Every class of operators has nodes that mix rows and nodes that keep them apart, and what is said of them is compared
with what ONNX Runtime does when single rows change.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, parser

from tests.runtime.row_cases import CAUTIOUS, KEEPS, MIXES, OTHER_VERSIONS, WEIGHTS
from tests.runtime.row_graphs import quantised_model
from tests.runtime.special_models import MOODS, SPECIAL, Special, drawn, graph, ints
from weft.base.errors import ModelError
from weft.models.operators import OPERATORS
from weft.models.operators.rules.rows import Mixed, collapsed, joined, numbered, shrunk
from weft.runtime.onnxruntime_cpu.preparing import LoadOptions, prepare
from weft.runtime.onnxruntime_cpu.profiler import Tracer
from weft.runtime.onnxruntime_cpu.sessions import open_session
from weft.runtime.rows import Seen, judge_rows
from weft.runtime.tensors import TensorSpec

ROWS = 3


def model(text: str, version: int = 18) -> ModelProto:
    """From ``x`` (samples by 3 by 4), ``i`` (samples by 1, of 0 to 2) and ``b`` (samples, bool) to ``y``."""
    made = graph(f"(float[n,3,4] x, int64[n,1] i, bool[n] b) => (float y) {{ {text} }}", version, **WEIGHTS)
    made.graph.output[0].ClearField("type")
    read = {name for node in made.graph.node for name in node.input}
    for kept in (made.graph.input, made.graph.initializer):
        left = [each for each in kept if each.name in read]
        del kept[:]
        kept.extend(left)
    return made


def row(made: ModelProto, mood: str, seed: int) -> dict[str, np.ndarray]:
    special, kinds = Special("", lambda: made, whole=(0, 3)), {1: "FP32", 7: "INT64", 9: "BOOL"}
    tensors = [(each.name, each.type.tensor_type) for each in made.graph.input]
    inputs = [
        TensorSpec(name, kinds[kind.elem_type], tuple(each.dim_value for each in kind.shape.dim))
        for name, kind in tensors
    ]
    return special.rows(inputs, 1, mood, np.random.default_rng(seed))


def batch(rows: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([each[name] for each in rows]) for name in rows[0]}


def verdict(made: ModelProto, folder: Path) -> str | None:
    """What is said of the operators of a graph; where the rows of its output are is another matter."""
    rows = [row(made, "plain", seed) for seed in range(ROWS)]
    said = judge_rows(made, [batch(rows[:2]), batch(rows)], Tracer(folder, 1)).mixing
    return None if said and said.startswith("output ") else said


def really_mixes(made: ModelProto) -> bool:
    """Whether some element of the output is seen to change with one row and with another, or its shape with any."""
    session = open_session(made.SerializeToString(), 1, optimise=False)
    rows = [row(made, "plain", seed) for seed in range(ROWS)]
    try:
        base = session.run(["y"], batch(rows))[0]
        changed = [list(_changes(made, session, rows, place, base)) for place in range(ROWS)]
    except Exception:  # it does not take what some neighbour sends
        return True
    if any(each is None for found in changed for each in found):
        return True
    by_row = [np.any([each for each in found if each is not None], axis=0).astype(int) for found in changed]
    return bool(np.any(sum(by_row) > 1))


def _changes(made: ModelProto, session: Any, rows: Any, place: int, base: np.ndarray) -> Iterator[np.ndarray | None]:
    for mood in MOODS:
        others = [*rows[:place], row(made, mood, 77), *rows[place + 1 :]]
        found = session.run(["y"], batch(others))[0]
        if found.shape != base.shape:
            yield None
            return
        nothing = (base != base) & (found != found)
        yield (base != found) & ~nothing


@pytest.mark.parametrize("text", MIXES)
def test_operators_that_look_across_rows_are_found(text: str, tmp_path: Path) -> None:
    made = model(text)
    assert really_mixes(made)
    assert verdict(made, tmp_path)


@pytest.mark.parametrize("text", KEEPS)
def test_operators_that_keep_to_their_rows_are_not(text: str, tmp_path: Path) -> None:
    made = model(text)
    assert verdict(made, tmp_path) is None
    assert not really_mixes(made)


@pytest.mark.parametrize(("version", "text"), OTHER_VERSIONS)
def test_nor_are_they_in_other_versions(version: int, text: str, tmp_path: Path) -> None:
    made = model(text, version)
    assert verdict(made, tmp_path) is None
    assert not really_mixes(made)


@pytest.mark.parametrize("text", CAUTIOUS)
def test_what_is_not_known_counts_as_mixing(text: str, tmp_path: Path) -> None:
    assert verdict(model(text), tmp_path)


@pytest.mark.parametrize(("version", "mixes"), [(11, True), (13, False)])
def test_before_opset_13_a_softmax_takes_all_axes_from_its_own_on(version: int, mixes: bool, tmp_path: Path) -> None:
    flat = model("t = Transpose<perm = [1,0,2]>(x) u = Transpose<perm = [0,2,1]>(t) y = Softmax<axis = 1>(u)", version)
    assert (verdict(flat, tmp_path) is not None) == really_mixes(flat) == mixes
    last = model("t = Transpose<perm = [1,0,2]>(x) y = Softmax<axis = 2>(t)", version)
    assert verdict(last, tmp_path) is None and not really_mixes(last)


NOT_KNOWN = {
    "BitCast", "CastLike", "CastMap", "CategoryMapper", "CenterCropPad", "ConcatFromSequence", "DeformConv",
    "DictVectorizer", "FeatureVectorizer", "ImageDecoder", "MaxRoiPool", "MaxUnpool",
    "NegativeLogLikelihoodLoss", "Optional", "OptionalGetElement", "OptionalHasElement", "RoiAlign", "SVMClassifier",
    "SVMRegressor", "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert",
    "SequenceLength", "SequenceMap", "SoftmaxCrossEntropyLoss", "SplitToSequence", "TreeEnsemble", "ZipMap",
    "Binarizer",
}  # fmt: skip
BY_VALUE = {
    "BlackmanWindow", "Constant", "ConstantOfShape", "HammingWindow", "HannWindow", "MelWeightMatrix", "Range",
}  # fmt: skip
"""What makes more or less by a number: nobody's of what is nobody's, and not known to keep rows apart else."""


def test_of_every_operator_it_is_said_what_it_does_or_that_it_is_not_known() -> None:
    ruled = {name.rpartition(":")[2] for name, each in OPERATORS.items() if each.rows}
    random = {name for name, each in OPERATORS.items() if each.random}
    kinds = [ruled, random, {"If", "Loop", "Scan"}, NOT_KNOWN, BY_VALUE]
    assert len(set().union(*kinds)) == sum(map(len, kinds))
    schemas = onnx.defs.get_all_schemas_with_history()
    names = {each.name for each in schemas if each.domain in ("", "ai.onnx.ml") and each.since_version <= 26}
    assert names - set().union(*kinds) == set()


def test_operators_of_other_domains_are_not_known(tmp_path: Path) -> None:
    made = model("y = Relu(x)")
    made.graph.node[0].domain = "elsewhere"
    rows = batch([row(model("y = Relu(x)"), "plain", seed) for seed in range(2)])

    class Blind:
        """A run of which nothing can be seen."""

        def trace(self, *_: Any) -> Seen:
            return Seen({}, {})

        def compute(self, *_: Any) -> list[np.ndarray]:
            raise AssertionError

    assert judge_rows(made, [rows], Blind()).mixing == "Relu '' is not known to keep rows apart"
    made.graph.node[0].domain = ""
    assert judge_rows(made, [rows], Blind()).mixing == "Relu '' is not known to keep rows apart"


def test_groups_keep_samples_apart_that_lie_beside_each_other_as_channels(tmp_path: Path) -> None:
    """Two samples of three channels as one of six: in two groups, or in three, of which one has both."""
    for groups, mixes in ((2, False), (3, True), (6, False), (1, True)):
        made = graph(
            f"(float[n,3,4] x) => (float[a,b,c] y) {{ t = Reshape(x, six) y = Conv<group = {groups}>(t, w) }}",
            six=ints(1, 6, 4), w=drawn(6, 6 // groups, 2),
        )  # fmt: skip
        said = judge_rows(made, [{"x": drawn(2, 3, 4)}], Tracer(tmp_path, 1)).mixing
        assert str(said).startswith("Conv ") == mixes


def summing(part: str) -> ModelProto:
    """A loop over the samples that adds something up in every turn; the sum is put in the place of the first row."""
    body = parser.parse_graph(
        f"body (int64 turn, bool before, float[3,4] sum) => (bool after, float[3,4] next) "
        f"{{ {part} next = Add(sum, part) after = Identity(before) }}"
    )
    made = graph(
        "(float[n,3,4] x) => (float[n,3,4] y) { s = Shape(x) turns = Gather(s, first) }",
        first=np.array(0), begin=np.zeros((3, 4), np.float32), zero=ints(0), corner=ints(0)[None],
    )  # fmt: skip
    made.graph.node.append(helper.make_node("Loop", ["turns", "", "begin"], ["total"], body=body))
    made.graph.node.append(helper.make_node("Unsqueeze", ["total", "zero"], ["u"]))
    made.graph.node.append(helper.make_node("ScatterND", ["x", "corner", "u"], ["y"]))
    return made


def test_a_loop_that_takes_another_row_in_every_turn_is_found(tmp_path: Path) -> None:
    picking, fixed = summing("part = Gather(x, turn)"), summing("part = Gather(x, first)")
    rows = [batch([{"x": drawn(1, 3, 4, seed=seed)} for seed in range(count)]) for count in (2, 3)]
    assert "between the iterations" in str(judge_rows(picking, rows, Tracer(tmp_path, 1)).mixing)
    assert judge_rows(fixed, rows, Tracer(tmp_path, 1)).mixing is None
    assert really_mixes(picking) and not really_mixes(fixed)


def test_what_was_asked_for_is_seen_in_a_run(tmp_path: Path) -> None:
    made = graph(
        "(float[n,3,4] x) => (float[m] y) { t = Transpose<perm = [1, 0, 2]>(x) s = Shape(t) y = Reshape(t, flat) }",
        flat=ints(-1),
    )
    seen = Tracer(tmp_path, 1).trace(made, {"x": np.zeros((2, 3, 4), np.float32)}, {"s", "y"})
    assert seen.shapes == {"t": (3, 2, 4), "s": (3,), "y": (24,)}
    assert seen.values["s"].tolist() == [3, 2, 4] and seen.values["y"].shape == (24,)


def test_elements_belong_to_one_sample_or_nobody() -> None:
    rows, columns = numbered(1, 2, 2), numbered(1, 2, 2).T
    assert joined(None, rows, np.array([[0], [2]], np.int32)).tolist() == [[1], [2]]  # type: ignore[union-attr]
    assert collapsed(rows, [1]).tolist() == [[1], [2]] and joined(None, None) is None
    for mixed in (lambda: joined(rows, columns), lambda: collapsed(rows, [0]), lambda: collapsed(rows, [2])):
        with pytest.raises(Mixed):
            mixed()
    spread = np.broadcast_to(rows[:, :, None], (2, 3, 4))
    found = shrunk(np.ascontiguousarray(spread))
    assert found is not None and found.shape == (2, 1, 1)
    assert shrunk(np.zeros((2, 3), np.int32)) is None


@pytest.mark.parametrize(("name", "joins"), [("attention", True), ("wide-rows", False), ("perceptron", True)])
def test_rows_of_other_shapes_are_joined_if_they_are_kept_apart_whatever_the_shape(
    name: str, joins: bool, tmp_path: Path
) -> None:
    (special,) = (each for each in SPECIAL if each.name == name)
    found = prepare(special.save(tmp_path), LoadOptions(max_batch=2, shapes=special.shapes))
    assert found.batching.any_shapes == joins


# Real files


def test_a_model_with_such_an_operator_is_not_batched_and_says_why(tmp_path: Path) -> None:
    found = prepare(quantised_model(tmp_path / "q.onnx"), LoadOptions())
    assert (found.batching.max_batch, found.batching.batchable) == (1, False)
    (remark,) = found.remarks
    assert remark.startswith("not batched: DynamicQuantizeLinear") and 'rows = "independent"' in remark
    with pytest.raises(ModelError, match=r"max_batch is 4, but the model cannot be batched: DynamicQuantizeLinear"):
        prepare(quantised_model(tmp_path / "q.onnx"), LoadOptions(max_batch=4))


def test_it_is_batched_if_its_file_or_its_settings_say_so(tmp_path: Path) -> None:
    said = prepare(quantised_model(tmp_path / "said.onnx", says="independent"), LoadOptions(max_batch=4))
    told = prepare(quantised_model(tmp_path / "told.onnx"), LoadOptions(max_batch=4, independent_rows=True))
    assert [(each.batching.max_batch, each.batching.batchable) for each in (said, told)] == [(4, True)] * 2


def test_a_file_that_says_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"weft\.rows = 'mixed'"):
        prepare(quantised_model(tmp_path / "q.onnx", says="mixed"), LoadOptions())
