"""Models prepared for serving: the same bits as plain ONNX Runtime, batches that are checked, and a cache to trust."""

from __future__ import annotations

import gc
import json
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from tests.models.onnx_graphs import BOOL, F32, I64, node, proto, tensor
from tests.runtime.clocks import ANY_LENGTH_S, NO_LENGTH_S, said_times
from weft.base.errors import ModelError
from weft.models import zoo
from weft.models.packaged import PACKAGED, packaged_models
from weft.runtime.external import external_files
from weft.runtime.onnxruntime_cpu.cache import is_empty
from weft.runtime.onnxruntime_cpu.model import Blueprint, CpuModel, SegmentSpec
from weft.runtime.onnxruntime_cpu.preparing import LoadOptions, prepare
from weft.runtime.samples import sample
from weft.runtime.tensors import TensorSpec

STRING = onnx.TensorProto.STRING
FINE = LoadOptions(grain_s=ANY_LENGTH_S, max_pieces=12, max_batch=1)


def plain(path, threads=1):
    """ONNX Runtime as anyone would use it."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def plainly(session, feed):
    return dict(zip((each.name for each in session.get_outputs()), session.run(None, feed), strict=True))


def assert_same_bits(got, wanted):
    assert list(got) == list(wanted)
    for name, each in wanted.items():
        assert got[name].dtype == each.dtype and got[name].shape == each.shape
        assert got[name].tobytes() == each.tobytes(), name


def saved(folder, *args, **more):
    model = proto(*args, **more)
    model.ir_version = 8
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


def weight(name, *shape, seed=0):
    return numpy_helper.from_array(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) * 0.1, name)


def perceptron(folder, width=640, layers=6, seed=0):
    """A chain that takes a while, with weights too large to stay inside a file."""
    nodes, last = [], "x"
    for index in range(layers):
        nodes += [node("MatMul", [last, f"w{index}"], [f"m{index}"]), node("Tanh", [f"m{index}"], [f"a{index}"])]
        last = f"a{index}"
    weights = [weight(f"w{index}", width, width, seed=seed + index) for index in range(layers)]
    inputs, outputs = [tensor("x", "n", width)], [tensor(last, "n", width), tensor("a1", "n", width)]
    return saved(folder, nodes, inputs, outputs, weights)


@pytest.fixture(scope="module")
def zoo_models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zoo")
    zoo.export("mobilenet-v2", folder / "cnn.onnx", resolution=64)
    zoo.export("bert-base", folder / "text.onnx", layers=2, hidden=128, heads=2, seq_len=32)
    return {"cnn": folder / "cnn.onnx", "text": folder / "text.onnx"}


# --- the same bits ----------------------------------------------------------------------------------------------------


def check_against_plain(path, options, sizes):
    model, session = prepare(path, options), plain(path, options.threads)
    assert len(model.segments) > 1 and not any("whole" in remark for remark in model.remarks)
    for seed, size in enumerate(sizes):
        shapes = {name: (size, *shape[1:]) for name, shape in model.blueprint.warm_shapes.items()}
        feed = sample(model.inputs, shapes, seed + 10)
        assert_same_bits(model.run(feed), plainly(session, feed))
    model.close()


@pytest.mark.parametrize("name", ["cnn", "text"])
def test_zoo_models_in_segments_give_the_bits_of_plain_onnx_runtime(zoo_models, name):
    check_against_plain(zoo_models[name], FINE, sizes=(1, 1, 3))


def test_several_threads_give_the_bits_of_as_many_threads(zoo_models):
    check_against_plain(zoo_models["text"], replace(FINE, threads=2), sizes=(1, 2))


@pytest.mark.parametrize("name", ["pp-ocr-cls", "mtcnn-pnet", "magika"])
def test_trained_models_in_segments_give_the_bits_of_plain_onnx_runtime(name):
    if name not in packaged_models():
        pytest.skip(f"{PACKAGED[name].package} is not installed")
    options = replace(FINE, shapes=PACKAGED[name].shapes)
    check_against_plain(packaged_models()[name], options, sizes=(1, 1))


def test_two_threads_may_run_the_same_segments_at_once(zoo_models):
    model, session = prepare(zoo_models["text"], FINE), plain(zoo_models["text"])
    feeds = [sample(model.inputs, model.blueprint.warm_shapes, seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for got, feed in zip(pool.map(model.run, feeds), feeds, strict=True):
            assert_same_bits(got, plainly(session, feed))


def test_weights_in_files_of_their_own_are_cut_too(tmp_path):
    path = perceptron(tmp_path)
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, location="weights.data")
    assert external_files(path) == (tmp_path / "weights.data",)
    check_against_plain(path, FINE, sizes=(1, 2))


def test_a_model_shorter_than_the_grain_stays_whole(tmp_path):
    model = prepare(perceptron(tmp_path, width=32), LoadOptions(grain_s=NO_LENGTH_S, max_batch=1))
    assert model.segments == ("whole",) and model.timing.warm_shapes and model.remarks == ()


def test_control_flow_stays_whole_with_a_remark(tmp_path):
    branches = {
        key: onnx.helper.make_graph([node(op, ["x"], [key])], key, [], [tensor(key, "n", 4)])
        for key, op in (("then_branch", "Neg"), ("else_branch", "Exp"))
    }
    nodes = [node("Tanh", ["x"], ["t"]), node("If", ["c"], ["b"], **branches), node("Add", ["t", "b"], ["y"])]
    inputs = [tensor("x", "n", 4), tensor("c", dtype=BOOL)]
    path = saved(tmp_path, nodes, inputs, [tensor("y", "n", 4)])
    model = prepare(path, LoadOptions(grain_s=ANY_LENGTH_S))
    assert model.segments == ("whole",) and "stays whole: it has control flow (If)" in model.remarks
    feed = {"x": np.ones((2, 4), np.float32), "c": np.array(True)}
    assert_same_bits(model.run(feed), plainly(plain(path), feed))


def test_segments_are_named_by_their_nodes_even_where_these_have_no_names(tmp_path):
    model = prepare(perceptron(tmp_path, layers=2), LoadOptions(grain_s=ANY_LENGTH_S, max_batch=1))
    assert model.segments == ("MatMul_0", "Tanh_1", "MatMul_2", "Tanh_3")


def test_weights_that_old_files_list_as_inputs_are_not_asked_for(tmp_path):
    path = perceptron(tmp_path)
    model = onnx.load(path)
    model.ir_version = 3
    model.graph.input.extend(tensor(each.name, *each.dims) for each in model.graph.initializer)
    onnx.save(model, path)
    prepared = prepare(path, FINE)
    assert [spec.name for spec in prepared.inputs] == ["x"] and len(prepared.segments) > 1


def test_texts_are_bytes_outside_and_strings_inside(tmp_path):
    nodes = [node("Identity", ["s"], ["echo"]), node("Concat", ["t", "t"], ["twice"], axis=0)]
    inputs = [tensor("s", "n", 2, dtype=STRING), tensor("t", "m", dtype=STRING)]
    outputs = [tensor("echo", "n", 2, dtype=STRING), tensor("twice", "k", dtype=STRING)]
    model = prepare(saved(tmp_path, nodes, inputs, outputs), LoadOptions())
    texts = np.array([["é".encode(), b""]], dtype=object)
    got = model.run({"s": texts, "t": np.array([b"ab", b"c"], dtype=object)})
    assert got["echo"].tolist() == texts.tolist() and got["twice"].tolist() == [b"ab", b"c"] * 2
    odd = np.array([b"\xff", b"a\x80\xfe", "\U0010ff80 \U0010ffff".encode(), b"\xf4\x8f\xbe\x80\xff"], dtype=object)
    assert model.run({"s": texts, "t": odd})["twice"].tolist() == odd.tolist() * 2


def test_a_run_can_be_ended_from_outside(zoo_models):
    model = prepare(zoo_models["text"], FINE)
    feed = sample(model.inputs, model.blueprint.warm_shapes, 0)
    options = ort.RunOptions()
    options.terminate = True
    with pytest.raises(Exception, match="terminate flag"):
        model.run_segment(0, feed, options)
    assert model.run(feed)


# --- what is known of a model -----------------------------------------------------------------------------------------


def test_a_prepared_model_tells_what_it_takes_gives_and_costs(tmp_path):
    model = prepare(perceptron(tmp_path), replace(FINE, max_batch=6))
    assert model.inputs == (TensorSpec("x", "FP32", (-1, 640)),)
    assert model.outputs == (TensorSpec("a5", "FP32", (-1, 640)), TensorSpec("a1", "FP32", (-1, 640)))
    assert (
        sorted(model.timing.times_s) == [1, 2, 4, 6]
        and model.batching.max_batch == 6
        and model.batching.batchable
        and not model.has_free_lengths
    )
    assert all(len(times) == len(model.segments) and min(times) > 0 for times in model.timing.times_s.values())
    assert 6 * 640 * 640 * 4 <= model.residency.memory_bytes < 2 * 6 * 640 * 640 * 4


def test_times_lie_straight_between_measured_sizes():
    segments = tuple(SegmentSpec(name=name, inputs=(), outputs=()) for name in "ab")
    times_s = {1: (1.0, 10.0), 2: (2.0, 12.0), 6: (4.0, 14.0)}
    blueprint = Blueprint(inputs=(), outputs=(), segments=segments, warm_shapes={}, times_s=times_s, max_batch=6)
    model = CpuModel(blueprint, ())
    assert model.timing.times_at(2) == (2.0, 12.0)
    assert model.timing.times_at(4) == model.timing.times_at(4) == (3.0, 13.0)
    assert model.timing.times_at(12) == (8.0, 28.0)


def test_free_dimensions_are_not_guessed(tmp_path):
    path = saved(tmp_path, [node("Tanh", ["x"], ["y"])], [tensor("x", "n", 3, "h")], [tensor("y", "n", 3, "h")])
    cold = prepare(path, LoadOptions())
    assert (
        cold.timing.warm_shapes is None
        and not cold.timing.times_s
        and cold.has_free_lengths
        and cold.batching.max_batch == 1
    )
    assert cold.remarks == ("stays whole and was not measured: give shapes for the free dimensions of x",)
    assert cold.timing.times_at(3) == (0.0,)
    assert cold.run({"x": np.zeros((2, 3, 5), np.float32)})["y"].shape == (2, 3, 5)
    warm = prepare(path, LoadOptions(shapes={"x": (1, 3, 7)}))
    assert warm.timing.warm_shapes and warm.timing.times_s and warm.has_free_lengths and warm.batching.batchable


def test_a_size_given_once_holds_for_all_dimensions_of_that_name(tmp_path):
    inputs = [tensor("x", "n", "s"), tensor("z", "n", "s")]
    path = saved(tmp_path, [node("Add", ["x", "z"], ["y"])], inputs, [tensor("y", "n", "s")])
    model = prepare(path, LoadOptions(shapes={"x": (1, 9)}))
    assert model.blueprint.warm_shapes == {"x": (1, 9), "z": (1, 9)}


@pytest.mark.parametrize(
    ("shapes", "complaint"),
    [
        ({"x": (1, 4, 7)}, r"shape 1x4x7 does not fit input 'x'; the inputs are: x \[n, 3, h\]"),
        ({"x": (1, 3)}, "does not fit"),
        ({"x": (1, 3, 0)}, "does not fit"),
        ({"X": (1, 3, 7)}, "unknown input 'X'; the inputs are: x"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(tmp_path, shapes, complaint):
    path = saved(tmp_path, [node("Tanh", ["x"], ["y"])], [tensor("x", "n", 3, "h")], [tensor("y", "n", 3, "h")])
    with pytest.raises(ModelError, match=complaint):
        prepare(path, LoadOptions(shapes=shapes))


def test_a_model_that_fails_on_made_up_inputs_is_served_unmeasured(tmp_path):
    nodes = [node("Gather", ["t", "i"], ["y"])]
    table = numpy_helper.from_array(np.zeros((1, 4), np.float32), "t")
    path = saved(tmp_path, nodes, [tensor("i", 40, dtype=I64)], [tensor("y", 40, 4)], [table])
    model = prepare(path, LoadOptions())
    assert model.timing.warm_shapes is None and "it fails on made-up inputs" in model.remarks[0]
    assert model.run({"i": np.zeros(40, np.int64)})["y"].shape == (40, 4)


# --- batches ----------------------------------------------------------------------------------------------------------

ROWS_MEET = {
    "softmax over the batch": [node("Softmax", ["x"], ["y"], axis=0)],
    "rows times rows": [
        node("Transpose", ["x"], ["t"]),
        node("MatMul", ["x", "t"], ["p"]),
        node("MatMul", ["p", "x"], ["y"]),
    ],
    "running sum": [node("CumSum", ["x", "zero"], ["y"])],
}


@pytest.mark.parametrize("nodes", ROWS_MEET.values(), ids=ROWS_MEET)
def test_a_free_first_dimension_that_is_no_batch_is_found_out(tmp_path, nodes):
    zero = numpy_helper.from_array(np.array(0), "zero")
    path = saved(tmp_path, nodes, [tensor("x", "n", 5)], [tensor("y", "n", 5)], [zero])
    model = prepare(path, LoadOptions())
    assert (model.batching.max_batch, model.batching.batchable, model.has_free_lengths) == (1, False, True)
    assert model.remarks == ("not batched: output 'y' of batch 2 is not that of its samples",)
    with pytest.raises(ModelError, match=r"max_batch is 4, but the model cannot be batched"):
        prepare(path, LoadOptions(max_batch=4))


FAILS_AT_2 = [
    node("ReduceSum", ["x"], ["s"], keepdims=0),
    node("IsNaN", ["s"], ["b"]),
    node("Cast", ["b"], ["nought"], to=I64),
    node("Add", ["five", "nought"], ["shape"]),
    node("Reshape", ["x", "shape"], ["y"]),
]
"""To 1 x 5, in a way that no one sees beforehand."""


@pytest.mark.parametrize(
    ("nodes", "output", "reason"),
    [
        (FAILS_AT_2, tensor("y", "m", 5), "batch 2 fails"),
        ([node("Reshape", ["x", "ones"], ["y"])], tensor("y", "m", 1), "has 5 rows for one sample"),
        ([node("ReduceSum", ["x"], ["y"], keepdims=1)], tensor("y", 1, 1), "output 'y' has no free first dimension"),
    ],
)
def test_models_that_cannot_be_batched_say_why(tmp_path, nodes, output, reason):
    constants = [
        numpy_helper.from_array(np.array(shape), name) for shape, name in (([1, 5], "five"), ([-1, 1], "ones"))
    ]
    path = saved(tmp_path, nodes, [tensor("x", "n", 5)], [output], constants)
    model = prepare(path, LoadOptions())
    assert model.batching.max_batch == 1 and reason in model.remarks[0]


def test_a_shape_that_does_not_begin_with_1_is_not_a_batch(tmp_path):
    path = saved(tmp_path, [node("Tanh", ["x"], ["y"])], [tensor("x", "n", 3)], [tensor("y", "n", 3)])
    model = prepare(path, LoadOptions(shapes={"x": (32, 3)}))
    assert not model.batching.batchable and "give it a shape that begins with 1" in model.remarks[0]


def test_batching_goes_as_far_as_it_pays(tmp_path, monkeypatch):
    path = saved(tmp_path, [node("Tanh", ["x"], ["y"])], [tensor("x", "n", 3)], [tensor("y", "n", 3)])
    with said_times():  # a batch takes as long as a sample, so each doubling saves half
        most = prepare(path, LoadOptions())
        monkeypatch.setattr("weft.runtime.onnxruntime_cpu.model_timing.LEAST_GAIN", 0.6)
        none = prepare(path, LoadOptions())
    assert (most.batching.max_batch, sorted(most.timing.times_s), most.remarks) == (8, [1, 2, 4, 8], ())
    assert (none.batching.max_batch, sorted(none.timing.times_s), none.remarks) == (
        1,
        [1],
        ("not batched: batch 2 gains 50%",),
    )


def test_putting_samples_together_counts(tmp_path, monkeypatch):
    path = saved(tmp_path, [node("Tanh", ["x"], ["y"])], [tensor("x", "n", 3)], [tensor("y", "n", 3)])
    passed_s, gather, run_segment = [0.0], CpuModel.gather, CpuModel.run_segment

    def gathered(model, samples):
        passed_s[0] += len(samples) - 1
        return gather(model, samples)

    def run(model, *given):
        passed_s[0] += 1
        return run_segment(model, *given)

    monkeypatch.setattr(CpuModel, "gather", gathered)
    monkeypatch.setattr(CpuModel, "run_segment", run)
    monkeypatch.setattr("weft.runtime.onnxruntime_cpu.preparing.clock_for", lambda threads: lambda: passed_s[0])
    assert prepare(path, LoadOptions()).remarks[-1] == "not batched: batch 2 gains 0%"


# --- the cache --------------------------------------------------------------------------------------------------------


def entries(cache):
    return sorted(path.name for path in cache.iterdir())


@pytest.fixture
def cached(tmp_path):
    """A model, its cache, and what it gives."""
    path, cache = perceptron(tmp_path), tmp_path / "cache"
    first = prepare(path, FINE, cache)
    feed = sample(first.inputs, {"x": (2, 640)}, 3)
    return path, cache, feed, first.run(feed)


def test_a_cached_model_is_not_measured_again_and_gives_the_same(cached):
    path, cache, feed, wanted = cached
    (entry,) = cache.iterdir()
    record = json.loads((entry / "prepared.json").read_text())
    record["blueprint"]["times_s"]["1"] = [123.0] * len(record["blueprint"]["segments"])
    (entry / "prepared.json").write_text(json.dumps(record))
    said = []
    again = prepare(path, FINE, cache, said.append)
    assert said == ["loading it from the cache"] and set(again.timing.times_s[1]) == {123.0} and len(again.segments) > 1
    assert_same_bits(again.run(feed), wanted)


def damage_record(entry):
    (entry / "prepared.json").write_text('{"digests": {}, "blueprint": {"inputs": [')


def damage_segment(entry):
    (entry / "segment1.onnx").write_bytes(b"")


def damage_weights(entry):
    weights = entry / "weights.bin"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 0xFF
    replacement = entry / "other"
    replacement.write_bytes(data)
    replacement.replace(weights)  # a new file: the first model still has the old one in its memory


def lose_segment(entry):
    (entry / "segment0.onnx").unlink()


def wrong_segment(entry):
    """A sound record with segments that do not fit together."""
    record = json.loads((entry / "prepared.json").read_text())
    record["blueprint"]["segments"][0]["inputs"] = ["nothing"]
    (entry / "prepared.json").write_text(json.dumps(record))


@pytest.mark.parametrize("damage", [damage_record, damage_segment, damage_weights, lose_segment, wrong_segment])
def test_a_damaged_entry_is_made_again(cached, damage):
    path, cache, feed, wanted = cached
    (entry,) = cache.iterdir()
    damage(entry)
    said = []
    assert_same_bits(prepare(path, FINE, cache, said.append).run(feed), wanted)
    assert "optimising it" in said
    said.clear()
    assert_same_bits(prepare(path, FINE, cache, said.append).run(feed), wanted)
    assert said == ["loading it from the cache"] and entries(cache) == [entry.name]


def test_another_model_or_recipe_has_another_entry(cached):
    path, cache, feed, wanted = cached
    prepare(path, replace(FINE, max_pieces=11), cache)
    assert len(entries(cache)) == 2
    perceptron(path.parent, seed=100)
    changed = prepare(path, FINE, cache)
    assert len(entries(cache)) == 3 and changed.run(feed)["a5"].tobytes() != wanted["a5"].tobytes()


def test_other_weights_beside_the_same_file_have_another_entry(tmp_path):
    path, cache = perceptron(tmp_path), tmp_path / "cache"
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights.data")
    prepare(path, FINE, cache)
    weights = tmp_path / "weights.data"
    weights.write_bytes(weights.read_bytes()[::-1])
    prepare(path, FINE, cache)
    assert len(entries(cache)) == 2


def test_two_may_write_the_same_entry_at_once(tmp_path):
    path, cache = perceptron(tmp_path), tmp_path / "cache"
    with ThreadPoolExecutor(2) as pool:
        models = list(pool.map(lambda _: prepare(path, FINE, cache), range(2)))
    feed = sample(models[0].inputs, {"x": (1, 640)}, 0)
    assert_same_bits(models[0].run(feed), models[1].run(feed))
    for model in models:
        model.close()
    assert len(entries(cache)) == 1
    assert_same_bits(prepare(path, FINE, cache).run(feed), plainly(plain(path), feed))


def test_models_that_stay_whole_are_cached_too(tmp_path):
    path, cache = perceptron(tmp_path, width=32), tmp_path / "cache"
    first, said = prepare(path, LoadOptions(), cache), []
    again = prepare(path, LoadOptions(), cache, said.append)
    assert said == ["loading it from the cache"] and again.blueprint == first.blueprint
    feed = sample(first.inputs, {"x": (1, 32)}, 0)
    assert_same_bits(again.run(feed), plainly(plain(path), feed))


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "cache").write_text("a file")
    model = prepare(perceptron(tmp_path, width=32), LoadOptions(), tmp_path / "cache")
    assert model.remarks[0].startswith("not cached: ")


def test_closing_removes_what_was_written_for_a_model_without_a_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    Path(tmp_path / "scratch").mkdir()
    model = prepare(perceptron(tmp_path), FINE)
    assert len(list((tmp_path / "scratch").glob("*/segment*.onnx"))) == len(model.segments)
    model.close()
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize("knotted", [False, True])
def test_closing_looks_through_all_objects_only_where_something_else_refers_to_a_session(
    tmp_path, monkeypatch, knotted
):
    model = prepare(perceptron(tmp_path, width=32), LoadOptions())
    if knotted:
        model.sessions[0].knot = model.sessions[0]
    session, looked, collect = weakref.ref(model.sessions[0]), [], gc.collect
    monkeypatch.setattr(gc, "collect", lambda *some: looked.append(collect(*some)))
    model.close()
    assert session() is None and bool(looked) == knotted


# --- what cannot be loaded --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [None, "cache"])
@pytest.mark.parametrize("content", [b"", b"not a model at all" * 9, b"\x3a\xff\xff\xff\xff\x0f"])
def test_a_broken_file_is_named(tmp_path, content, cache):
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"broken\.onnx: cannot be loaded: .+") as caught:
        prepare(path, LoadOptions(), cache and tmp_path / cache)
    assert "\n" not in str(caught.value)
    assert cache is None or entries(tmp_path / cache) == []


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"none\.onnx: there is no such file"):
        prepare(tmp_path / "none.onnx", LoadOptions(), tmp_path / "cache")


def test_unknown_operators_are_named(tmp_path):
    path = saved(tmp_path, [node("Foo", ["x"], ["y"], domain="acme")], [tensor("x", 4)], [tensor("y", 4)])
    with pytest.raises(ModelError, match=r"model\.onnx: cannot be loaded: .*acme:Foo"):
        prepare(path, LoadOptions())


def test_what_the_protocol_cannot_carry_is_refused(tmp_path):
    sequence = onnx.helper.make_tensor_sequence_value_info("y", F32, None)
    path = saved(tmp_path, [node("SequenceConstruct", ["x"], ["y"])], [tensor("x", 4)], [sequence])
    with pytest.raises(ModelError, match=r"'y' is a seq\(tensor\(float\)\), which cannot be served"):
        prepare(path, LoadOptions())


def test_an_input_without_dimensions_is_refused(tmp_path):
    unshaped = onnx.helper.make_tensor_value_info("x", F32, None)
    path = saved(tmp_path, [node("Tanh", ["x"], ["y"])], [unshaped], [tensor("y", 4)])
    with pytest.raises(ModelError, match="input 'x' states no dimensions"):
        prepare(path, LoadOptions())


@pytest.mark.parametrize("wrong", [{"grain_s": 0.0}, {"grain_s": float("nan")}, {"threads": 0}, {"max_batch": 0}])
def test_recipes_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ModelError, match="must be"):
        LoadOptions(**wrong)


def test_a_cache_in_which_something_is_being_built_is_still_empty(tmp_path: Path) -> None:
    (tmp_path / ".building-1-x").mkdir()
    assert is_empty(tmp_path)
    (tmp_path / "entry").mkdir()
    assert not is_empty(tmp_path)
