"""Models that share whole weights as one body: what is shared, that answers are the models' own, what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import weft
from tests.stitching.encoders import answers, as_tagger, distinct_bytes, sentences, tiny_encoders, together
from weft.base.errors import StitchError
from weft.runtime.stitched import tasks_in
from weft_stitch.bodies.body_stitching import BodyStitching, stitch_body
from weft_stitch.making import encoders
from weft_stitch.making.encoders import EncoderRecipe, EncoderSize
from weft_stitch.onnx_writer import to_onnx

node = helper.make_node


def stitched(files: Sequence[Path], **how: Any) -> BodyStitching:
    return stitch_body(files, measure=False, **how)


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        assert found[name].dtype == each.dtype
        np.testing.assert_allclose(found[name], each, rtol=0, atol=1e-5 * np.abs(each).max())


def equals_its_models(made: BodyStitching, folder: Path, sizes: Sequence[tuple[int, int]]) -> None:
    (path,) = made.to_onnx(folder / "body.onnx")
    feeds = [sentences(rows, length, task) for task, (rows, length) in enumerate(sizes)]
    for name, feed, found in zip(made.names, feeds, together(path, made.names, feeds), strict=True):
        same(found, answers(made.files[name], feed))


SIZES = st.builds(
    EncoderSize,
    layers=st.integers(1, 3),
    width=st.sampled_from([8, 12]),
    heads=st.sampled_from([1, 2, 4]),
    tokens=st.integers(50, 60),
    positions=st.just(32),
)
TUNED = st.one_of(
    st.fixed_dictionaries({"frozen": st.floats(0, 1)}),
    st.fixed_dictionaries({"full": st.floats(0, 1)}),
    st.fixed_dictionaries({"rank": st.integers(1, 3)}),
)


@settings(max_examples=8, deadline=None)
@given(size=SIZES, tuned=TUNED, tasks=st.integers(1, 4), data=st.data())
def test_random_encoders_answer_as_they_do_alone(tmp_path_factory, size, tuned, tasks, data):
    folder = tmp_path_factory.mktemp("random")
    classes = tuple(data.draw(st.lists(st.integers(1, 4), min_size=tasks, max_size=tasks)))
    rows = data.draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 12)), min_size=tasks, max_size=tasks))
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(encoders.ENCODERS, "random", size)
        files = list(
            EncoderRecipe("random", tasks, classes=classes, seed=data.draw(st.integers(0, 99)), **tuned).save(folder)
        )
    made = stitched(files)
    assert made.difference is not None and made.difference.relative <= 1e-5
    assert sum(each.nbytes for each in made.graph.constants.values() if each.dtype == np.float32 and each.ndim) <= (
        distinct_bytes(files)
    )
    equals_its_models(made, folder, rows)


def test_a_model_may_have_no_rows_in_a_run(tmp_path):
    made = stitched(tiny_encoders(tmp_path, full=0.5, classes=(2, 3, 4)))
    (path,) = made.to_onnx(tmp_path / "body.onnx")
    feeds = [sentences(rows, 6, task) for task, rows in enumerate((2, 1, 1))]
    feeds[1] = {name: each[:0] for name, each in feeds[1].items()}
    found = together(path, made.names, feeds)
    assert found[1]["logits"].shape == (0, 3)
    for task in (0, 2):
        same(found[task], answers(made.files[made.names[task]], feeds[task]))


def test_what_is_shared_is_told_by_step(tmp_path):
    made = stitched(tiny_encoders(tmp_path, frozen=0.5))
    crews = {each.name: each.crews for each in made.shared}
    everyone, nobody = ((0, 1, 2),), ((0,), (1,), (2,))
    assert crews["layer0.query.product"] == crews["layer0.output.norm"] == everyone
    assert crews["layer1.query.product"] == crews["layer1.output.norm"] == crews["classifier"] == nobody
    steps = [step for step in made.graph.steps if step.layer == "layer0.query.product" and step.op == "MatMul"]
    assert len(steps) == 1, "what is shared runs once"


def test_some_of_the_models_may_share_what_others_do_not(tmp_path):
    """Two models of one base and two of another, all with the same words."""
    files = [*tiny_encoders(tmp_path / "a", 2), *tiny_encoders(tmp_path / "b", 2, seed=1)]
    made = stitched(files, names=list("abcd"))
    crews = {each.name: each.crews for each in made.shared}
    assert crews["layer1.up.product"] == ((0, 1), (2, 3))
    assert crews["classifier.product"] == ((0,), (1,), (2,), (3,))
    equals_its_models(made, tmp_path, [(1, 4), (2, 9), (3, 2), (1, 7)])


def test_heads_of_another_kind_are_each_model_s_own(tmp_path):
    files = tiny_encoders(tmp_path)
    as_tagger(files[1])
    made = stitched(files)
    assert made.names[1] not in {each.name.split(".")[0] for each in made.graph.outputs if "logits" in each.name}
    equals_its_models(made, tmp_path, [(1, 4), (2, 9), (3, 11)])


def test_the_file_says_what_makes_rows_longer(tmp_path):
    made = stitched(tiny_encoders(tmp_path))
    (path,) = made.to_onnx(tmp_path / "body.onnx")
    first = tasks_in(path)[0]
    assert (first.length, first.fill) == (16, {"input_ids": 0.0, "attention_mask": 0.0})


def masked(path: Path, *, hides: bool | None, seed: int = 0) -> Path:
    """A mean over tokens, of those that a mask shows or does not hide, or of all."""
    rng = np.random.default_rng(0)
    own = np.random.default_rng(seed + 1)
    inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, ["rows", "length"])]
    nodes = [node("Gather", ["words", "ids"], ["all"])]
    held = {
        "words": rng.standard_normal((50, 6)).astype(np.float32),
        "head": own.standard_normal((6, 3)).astype(np.float32),
        "axes": np.array([1]),
        "last": np.array([2]),
    }
    if hides is None:
        nodes += [node("ReduceMean", ["all"], ["mean"], axes=[1], keepdims=0)]
    else:
        inputs.append(helper.make_tensor_value_info("mask", TensorProto.BOOL, ["rows", "length"]))
        nodes += [
            *([node("Not", ["mask"], ["shown"])] if hides else [node("Identity", ["mask"], ["shown"])]),
            node("Cast", ["shown"], ["ones"], to=TensorProto.FLOAT),
            node("Unsqueeze", ["ones", "last"], ["wide"]),
            node("Mul", ["all", "wide"], ["seen"]),
            node("ReduceSum", ["seen", "axes"], ["sum"], keepdims=0),
            node("ReduceSum", ["ones", "axes"], ["count"]),
            node("Div", ["sum", "count"], ["mean"]),
        ]
    nodes.append(node("MatMul", ["mean", "head"], ["y"]))
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 3])]
    constants = [numpy_helper.from_array(each, name) for name, each in held.items()]
    graph = helper.make_graph(nodes, "net", inputs, outputs, constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


@pytest.mark.parametrize(("hides", "fill"), [(False, 0.0), (True, 1.0)])
def test_masks_show_or_hide(tmp_path, hides, fill):
    made = stitched([masked(tmp_path / f"{name}.onnx", hides=hides, seed=at) for at, name in enumerate("ab")])
    assert made.fill == {"ids": 0.0, "mask": fill}


def test_without_a_mask_all_rows_are_of_one_length(tmp_path):
    files = [masked(tmp_path / f"{name}.onnx", hides=None, seed=at) for at, name in enumerate("ab")]
    made = stitched(files)
    assert made.fill is None
    (path,) = made.to_onnx(tmp_path / "body.onnx")
    ids = np.arange(8).reshape(2, 4)
    found = together(path, "ab", [{"ids": ids}, {"ids": ids[:1]}])
    same(found[1], answers(files[1], {"ids": ids[:1]}))
    with pytest.raises(Exception, match="Concat"):
        together(path, "ab", [{"ids": ids}, {"ids": ids[:1, :3]}])


def mixing(path: Path) -> Path:
    """A model that answers a row by the rows beside it."""
    inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, ["rows", "length"])]
    nodes = [
        node("Cast", ["ids"], ["x"], to=TensorProto.FLOAT),
        node("ReduceMean", ["x"], ["mean"], axes=[0]),
        node("Sub", ["x", "mean"], ["y"]),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", "length"])]
    graph = helper.make_graph(nodes, "net", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def test_models_that_look_at_other_rows_are_refused(tmp_path):
    with pytest.raises(StitchError, match=r"y \(Sub\) mixes rows: the first ones are others where there are more"):
        stitched([mixing(tmp_path / f"{name}.onnx") for name in "ab"])


def test_models_of_other_operator_sets_are_refused(tmp_path):
    files = tiny_encoders(tmp_path, 2)
    proto = onnx.load(files[1])
    proto.opset_import[0].version = 21
    onnx.save(proto, files[1])
    with pytest.raises(StitchError, match="tiny-encoder-0 20, tiny-encoder-1 21; export them alike"):
        stitched(files)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"form": "split"}, "form = split is for stitching by channels, not for a body"),
        ({"islands": True}, "islands = True is for stitching by channels"),
        ({"names": ["a", "a"]}, "two models have one name"),
    ],
)
def test_options_of_channels_do_not_apply(tmp_path, option, message):
    with pytest.raises(StitchError, match=message):
        weft.stitch(tiny_encoders(tmp_path, 2), **option)


def test_the_library_makes_a_body_of_models_that_take_whole_numbers(tmp_path):
    made = weft.stitch(tiny_encoders(tmp_path, 2), names=["a", "b"])
    assert isinstance(made, BodyStitching) and made.names == ("a", "b")
    assert made.times_s.keys() == {"sequential", "stitched"}
    with pytest.raises(StitchError, match="is one of the models"):
        made.to_onnx(tmp_path / "tiny-encoder-0.onnx")


def test_pictures_become_a_body_where_one_asks_for_it(tmp_path):
    from weft_stitch.making.generator import generate, save_nets

    files = save_nets(generate("tinynet", 2, sharing=1.0, permute=False, norm="shared").nets, tmp_path, dynamic=True)
    made = weft.stitch(files, body=True, measure=False)
    assert isinstance(made, BodyStitching) and made.weight_bytes < 0.6 * made.apart_bytes


def test_the_command_writes_a_body_and_tells_of_it(tmp_path):
    from typer.testing import CliRunner

    from weft.cli.app import app

    run = CliRunner().invoke
    made = run(app, ["models", "generate", "tiny-encoder", "--tasks", "2", "--rank", "2", "-o", str(tmp_path)])
    assert made.exit_code == 0, made.output
    files = sorted(map(str, tmp_path.glob("*.onnx")))
    told = run(
        app, ["stitch", *files, "-o", str(tmp_path / "one.onnx"), "--json", str(tmp_path / "one.json"), "--layers"]
    )
    assert told.exit_code == 0, told.output
    assert "2 models as one body" in told.output and "layer0.query.product" in told.output
    report = json.loads((tmp_path / "one.json").read_text())
    assert report["kind"] == "stitched body" and report["largest_difference"] <= 1e-5
    shared = {each["name"]: each["shared_by"] for each in report["steps"]}
    assert shared["layer0.key.product"] == [["tiny-encoder-0", "tiny-encoder-1"]]
    assert shared["layer0.query.product"] == [["tiny-encoder-0"], ["tiny-encoder-1"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rank", "2", "--full", "0.5"], "give one of them"),
        (["--frozen", "1.5"], "give a part of the layers"),
        (["--pruning", "0.5"], "--pruning does not apply to encoders"),
        (["--classes", "2,3"], "2 classes for 4 models"),
    ],
)
def test_encoders_that_cannot_be_are_refused(tmp_path, options, message):
    from typer.testing import CliRunner

    from weft.cli.app import app

    found = CliRunner().invoke(app, ["models", "generate", "tiny-encoder", *options, "-o", str(tmp_path)])
    assert message in f"{found.output} {found.exception}"


# --- weights that are near each other ---------------------------------------------------------------------------------


@pytest.mark.parametrize("based", [False, True])
def test_merged_adapters_are_parts_of_their_rank(tmp_path, based):
    """Twice of it where no base is given: the first model has an adapter, too."""
    files = tiny_encoders(tmp_path, 4, rank=2)
    (base,) = tiny_encoders(tmp_path / "base", 1)
    made = stitched(files, tolerance=1e-6, base=base if based else None)
    ranks = {each.name: each.rank for each in made.shared if each.rank}
    adapted = [f"layer{layer}.{what}.product" for layer in (0, 1) for what in ("query", "value")]
    assert ranks == dict.fromkeys(adapted, 2 if based else 4)
    assert made.weight_bytes < stitched(files).weight_bytes
    assert made.difference is not None and made.difference.relative < 1e-4
    (path,) = made.to_onnx(tmp_path / "body.onnx")
    feeds = [sentences(rows, length, 9 + rows) for rows, length in ((3, 4), (1, 9), (2, 2), (1, 12))]
    for name, feed, found in zip(made.names, feeds, together(path, made.names, feeds), strict=True):
        wanted = answers(made.files[name], feed)["logits"]
        np.testing.assert_allclose(found["logits"], wanted, atol=1e-4 * np.abs(wanted).max())


def test_what_has_no_low_rank_stays_a_model_s_own(tmp_path):
    files = tiny_encoders(tmp_path, full=0.5)
    made = stitched(files, tolerance=1e-6)
    assert not any(each.rank for each in made.shared) and made.weight_bytes == stitched(files).weight_bytes


def adapted(source: Path, target: Path, weight: str, seed: int) -> Path:
    """A file whose *weight* has a part of rank one more."""
    proto = onnx.load(source)
    (product,) = [each for each in proto.graph.node if each.name == weight]
    (stored,) = [each for each in proto.graph.initializer if each.name == product.input[1]]
    held, rng = numpy_helper.to_array(stored), np.random.default_rng(seed)
    part = rng.standard_normal((held.shape[0], 1)) @ rng.standard_normal((1, held.shape[1]))
    stored.CopyFrom(numpy_helper.from_array((held + 0.05 * part).astype(np.float32), stored.name))
    onnx.save(proto, target)
    return target


def flat(path: Path) -> Path:
    """A model that lays the tokens of all rows one after another, and multiplies them by a weight."""
    rng = np.random.default_rng(0)
    held = {
        "words": rng.standard_normal((50, 32)).astype(np.float32),
        "weight": rng.standard_normal((32, 32)).astype(np.float32),
        "each": np.array([-1, 32]),
        "wide": np.array([32]),
    }
    nodes = [
        node("Gather", ["words", "input_ids"], ["all"]),
        node("Cast", ["attention_mask"], ["shown"], to=TensorProto.FLOAT),
        node("Reshape", ["all", "each"], ["tokens"]),
        node("MatMul", ["tokens", "weight"], ["product"], name="product"),
        node("Shape", ["input_ids"], ["sizes"]),
        node("Concat", ["sizes", "wide"], ["shape"], axis=0),
        node("Reshape", ["product", "shape"], ["rows"]),
        node("ReduceMax", ["rows"], ["most"], axes=[2], keepdims=0),
        node("Mul", ["most", "shown"], ["y"]),
    ]
    ports = [helper.make_tensor_value_info(name, TensorProto.INT64, ["rows", "length"]) for name in sentences(1, 1)]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", "length"])]
    constants = [numpy_helper.from_array(each, name) for name, each in held.items()]
    graph = helper.make_graph(nodes, "net", ports, outputs, constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


@pytest.mark.parametrize(("kind", "rank"), [("pooler.product", 1), ("product", 1)])
@pytest.mark.parametrize("tolerance", [0.0, 1e-6])
def test_rows_of_any_form_are_multiplied_by_weights_of_their_own(tmp_path, kind, rank, tolerance):
    """One vector for each row, or all tokens of all rows after one another, which are split model by model."""
    source = flat(tmp_path / "source.onnx") if kind == "product" else tiny_encoders(tmp_path, 1)[0]
    files = [adapted(source, tmp_path / f"{name}.onnx", kind, at) for at, name in enumerate("abc")]
    made = stitched(files, tolerance=tolerance)
    assert {each.name: each.rank for each in made.shared if each.rank} == ({kind: 2 * rank} if tolerance else {})
    equals_its_models(made, tmp_path, [(2, 3), (1, 5), (3, 4)])


def test_outputs_are_told_with_the_sizes_of_their_own_models(tmp_path):
    made = stitched(
        [*tiny_encoders(tmp_path, 2, classes=(2, 4)), as_tagger(tiny_encoders(tmp_path / "t", 1)[0])], names=list("abc")
    )
    assert [(each.name, each.shape) for each in made.graph.outputs] == [
        ("a.logits", (-1, 2)),
        ("b.logits", (-1, 4)),
        ("c.layer1.output.norm", (-1, -1, 32)),
    ]


# --- weights in another order -----------------------------------------------------------------------------------------


def permuted(source: Path, target: Path, orders: dict[str, np.ndarray]) -> Path:
    """A file whose channels of *orders* (heads of a layer, or what lies within one) are in another order."""
    proto = onnx.load(source)
    read = {each.name: list(each.input) for each in proto.graph.node}
    held = {each.name: each for each in proto.graph.initializer}

    def turn(name: str, index: Any) -> None:
        array = numpy_helper.to_array(held[name])[index]
        held[name].CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), name))

    for layer, order in orders.items():
        what = ("query", "key", "value") if "head" in layer else ("up",)
        number = layer.split(".")[0]
        for each in what:
            turn(read[f"{number}.{each}.product"][1], np.s_[:, order])
            turn(read[f"{number}.{each}"][1], order)
        turn(read[f"{number}.{'mixed' if 'head' in layer else 'down'}.product"][1], order)
    onnx.save(proto, target)
    return target


HEADS = np.concatenate([np.arange(8 * head, 8 * head + 8) for head in (2, 0, 3, 1)])
"""The channels of four heads, the heads in another order."""


def test_heads_and_channels_in_another_order_are_shared(tmp_path):
    (source,) = tiny_encoders(tmp_path, 1)
    inner = np.random.default_rng(0).permutation(128)
    files = [
        permuted(source, tmp_path / "a.onnx", {}),
        permuted(source, tmp_path / "b.onnx", {"layer0.heads": HEADS, "layer0.inner": inner}),
        permuted(source, tmp_path / "c.onnx", {"layer1.heads": HEADS[::-1].reshape(4, 8)[:, ::-1].reshape(-1)}),
    ]
    made = stitched(files)
    assert made.reordered == 4 + 2 + 4
    assert {each.crews for each in made.shared} == {((0, 1, 2),)}
    assert made.weight_bytes < 0.35 * made.apart_bytes
    equals_its_models(made, tmp_path, [(1, 4), (2, 9), (3, 11)])


def test_channels_that_change_their_heads_are_not_taken_for_the_same(tmp_path):
    """All columns and rows are there, but a head now looks at channels of two."""
    (source,) = tiny_encoders(tmp_path, 1)
    mixed = np.arange(32).reshape(4, 8).T.reshape(-1)
    files = [
        permuted(source, tmp_path / "a.onnx", {}),
        permuted(source, tmp_path / "b.onnx", {"layer0.heads": mixed, "layer1.heads": HEADS}),
    ]
    made = stitched(files)
    assert made.reordered == 0
    assert made.difference.relative <= 1e-5
    equals_its_models(made, tmp_path, [(1, 4), (2, 9)])


def test_a_bias_that_an_exporter_left_out_is_zero(tmp_path):
    """What follows is the same step in both models, and shared."""
    rng = np.random.default_rng(0)
    held = {name: rng.standard_normal((6, 6)).astype(np.float32) for name in ("w", "rest")}
    files = []
    for name in "ab":
        nodes = [
            node("Cast", ["ids"], ["x"], to=TensorProto.FLOAT),
            node("Gemm", ["x", "w", *(["bias"] if name == "b" else [])], ["h"], transB=1),
            node("MatMul", ["h", "rest"], ["y"], name="rest"),
        ]
        constants = held | ({"bias": np.ones(6, np.float32)} if name == "b" else {})
        graph = helper.make_graph(
            nodes,
            "net",
            [helper.make_tensor_value_info("ids", TensorProto.INT64, ["rows", 6])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 6])],
            [numpy_helper.from_array(each, key) for key, each in constants.items()],
        )
        files.append(tmp_path / f"{name}.onnx")
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), files[-1])
    made = stitched(files)
    assert {each.name: each.crews for each in made.shared}["rest"] == ((0, 1),)
    assert made.weight_bytes < 0.6 * made.apart_bytes


# --- what nobody reads ------------------------------------------------------------------------------------------------


def positions(made: BodyStitching, folder: Path, layer: str, length: int) -> list[int]:
    """For how many positions the products of a layer are computed."""
    proto = to_onnx(made.graph, made.metadata)
    step = next(each for each in made.graph.steps if each.layer == layer and each.op == "MatMul")
    proto.graph.output.append(onnx.ValueInfoProto(name=step.outputs[0]))
    onnx.save(proto, folder / "shown.onnx")
    feeds = [sentences(1, length, task) for task in range(len(made.names))]
    joined = {
        f"{name}.{port}": each for name, feed in zip(made.names, feeds, strict=True) for port, each in feed.items()
    }
    return list(answers(folder / "shown.onnx", joined)[step.outputs[0]].shape[:2])


@pytest.mark.parametrize("tuned", [{}, {"rank": 2}])
def test_a_last_layer_is_computed_for_the_token_that_is_read(tmp_path, tuned):
    """Keys and values are needed of all."""
    made = stitched(tiny_encoders(tmp_path, **tuned), tolerance=1e-6 if tuned else 0.0)
    for what in ("query", "mixed", "up", "down"):
        assert positions(made, tmp_path, f"layer1.{what}.product", 9) == [3, 1]
        assert positions(made, tmp_path, f"layer0.{what}.product", 9) == [3, 9]
    assert positions(made, tmp_path, "layer1.key.product", 9) == [3, 9]
    if not tuned:
        equals_its_models(made, tmp_path, [(1, 4), (2, 9), (3, 11)])


def test_a_last_layer_is_computed_whole_where_one_model_reads_it_all(tmp_path):
    files = tiny_encoders(tmp_path)
    as_tagger(files[1])
    made = stitched(files)
    assert positions(made, tmp_path, "layer1.up.product", 9) == [3, 9]
