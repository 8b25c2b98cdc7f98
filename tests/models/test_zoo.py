"""The zoo's networks have the published sizes, run in ONNX Runtime, and cost nothing to describe."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest

from tests import DATA
from weft.base.errors import ModelError
from weft.models import zoo
from weft.models.zoo import weights
from weft.models.zoo.graph import GraphBuilder
from weft.models.zoo.language import relative_shift

TABLES = json.loads((DATA / "npu" / "layer_tables.json").read_text())
CNNS = {
    "inception-v3": "inceptionv3",
    "mobilenet-v2": "mobilenetv2",
    "resnet50": "resnet50",
    "resnext50-32x4d": "resnext50_32x4d",
}
ENCODERS = {name: name.replace("-", "_") for name in ("bert-base", "bert-large", "xlnet-base", "xlnet-large")}
TINY = {"seq_len": 8, "layers": 2, "hidden": 64, "heads": 4}
RUNNABLE = {
    **{name: {"resolution": 75} for name in CNNS},
    "ncf": {},
    "bert-base": {"layers": 2, "hidden": 256, "heads": 4},
    "bert-large": {"layers": 1, "hidden": 128, "heads": 2},
    "xlnet-base": {"layers": 2, "hidden": 256, "heads": 4},
    "xlnet-large": {"layers": 1, "hidden": 128, "heads": 2},
    "alexnet": {"resolution": 63},
    "caffenet": {"resolution": 67},
    "densenet121": {"resolution": 64},
    "fcn-resnet18": {"resolution": 64},
    "googlenet": {"resolution": 64},
    "inception-resnet-v2": {"resolution": 75},
    "inception-v4": {"resolution": 75},
    "resnet18": {"resolution": 64},
    "vgg16": {"resolution": 32},
}
PUBLISHED = {  # parameters of the implementations named in the test, and GMACs
    "alexnet": (61_100_840, 0.714),
    "caffenet": (60_965_224, 0.724),
    "densenet121": (7_978_856, 2.834),
    "fcn-resnet18": (11_176_512 + 592_789, 1.843),
    "googlenet": (6_998_552, 1.583),
    "inception-resnet-v2": (55_843_464, 13.16),
    "inception-v3": (23_834_568, 5.713),
    "inception-v4": (42_679_816, 12.25),
    "mobilenet-v2": (3_504_872, 0.301),
    "resnet18": (11_689_512, 1.814),
    "resnet50": (25_557_032, 4.089),
    "resnet101": (44_549_160, 7.801),
    "resnet152": (60_192_808, 11.51),
    "resnext50-32x4d": (25_028_904, 4.230),
    "vgg16": (138_357_544, 15.47),
    "vgg19": (143_667_240, 19.63),
}


def weighted(model):
    return [layer for layer in model.layers if layer.weights]


def options():
    one_thread = onnxruntime.SessionOptions()
    one_thread.intra_op_num_threads = 1
    return one_thread


def session(proto):
    return onnxruntime.InferenceSession(proto.SerializeToString(), options())


def sample(proto, batch, seed=0):
    """Random inputs; ids stay inside the table they index, and masks are 0 or 1."""
    rng = np.random.default_rng(seed)
    rows = {tensor.name: tensor.dims[0] for tensor in proto.graph.initializer if tensor.dims}
    tables = {node.input[1]: rows.get(node.input[0]) for node in proto.graph.node if node.op_type == "Gather"}
    feeds = {}
    for value in proto.graph.input:
        dims = [batch, *(dim.dim_value for dim in value.type.tensor_type.shape.dim[1:])]
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            feeds[value.name] = rng.standard_normal(dims, dtype=np.float32)
        else:
            feeds[value.name] = rng.integers(0, tables.get(value.name, 2), dims)
    return feeds


HEAVY = ("inception-resnet-v2", "inception-v4", "vgg16", "vgg19", "resnext50-32x4d", "densenet121", "resnet152")
"""Networks that others like them, and smaller, stand for in everyday tests."""
MARKED = [pytest.param(name, marks=pytest.mark.long) if name in HEAVY else name for name in RUNNABLE]


@pytest.fixture(scope="module", params=MARKED)
def running(request):
    """A network as it would be served: its description and a session over its drawn weights."""
    proto = zoo.build(request.param, **RUNNABLE[request.param])
    return proto, session(zoo.materialise(proto))


# Sizes


@pytest.mark.parametrize("name", CNNS)
def test_a_cnn_has_the_layers_of_the_table(name):
    ours = weighted(zoo.load(name))
    table = TABLES[CNNS[name]]
    expected = [(layer["macs"], layer["weights"]) for layer in table["layers"]]
    assert Counter((layer.macs, layer.weights) for layer in ours) == Counter(expected)
    assert zoo.load(name).macs == table["total_macs"]
    assert len({layer.name for layer in ours}) == len(ours) == table["n_weighted"]


@pytest.mark.parametrize("name", CNNS)
def test_a_cnn_runs_its_layers_in_the_order_of_the_table(name):
    expected = [(layer["macs"], layer["weights"]) for layer in TABLES[CNNS[name]]["layers"]]
    assert [(layer.macs, layer.weights) for layer in weighted(zoo.load(name))] == expected


@pytest.mark.parametrize("seq_len", [128, 384])
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_has_the_layers_of_the_table(name, seq_len):
    model = zoo.load(name, seq_len=seq_len)
    table = TABLES[f"{ENCODERS[name]}_s{seq_len}"]
    pooled_head = [layer["macs"] - layer["macs"] // seq_len for layer in table["layers"] if layer["name"] == "qa"]
    assert [layer.weights for layer in weighted(model)] == [
        layer["weights"] for layer in table["layers"] if layer["weights"]
    ]
    assert model.weights == table["total_weights"]
    assert model.macs == table["total_macs"] - sum(pooled_head)  # ours sees one token, the table's all


def test_the_published_totals_are_met_within_half_a_percent():
    published = {  # GMACs and millions of weights, npu.md section 3
        ("resnet50", None): (4.089, 25.50),
        ("resnext50-32x4d", None): (4.230, 24.96),
        ("mobilenet-v2", None): (0.301, 3.47),
        ("inception-v3", None): (5.713, 23.80),
        ("bert-base", 128): (11.17, 85.53),
        ("bert-base", 384): (35.33, 85.53),
        ("bert-large", 128): (39.46, 303.0),
        ("bert-large", 384): (123.2, 303.0),
        ("xlnet-base", 384): (43.5, 92.0),
        ("xlnet-large", 384): (149.8, 327.2),
    }
    for (name, seq_len), (gmacs, millions) in published.items():
        model = zoo.load(name, **({"seq_len": seq_len} if seq_len else {}))
        assert model.macs / 1e9 == pytest.approx(gmacs, rel=5e-3), name
        assert model.weights / 1e6 == pytest.approx(millions, rel=5e-3), name


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_image_network_has_exactly_its_published_parameters(name):
    """torchvision's, but for: googlenet and caffenet of Caffe, inception-v4 and -resnet-v2 of timm.

    fcn-resnet18: torchvision's resnet18 without its classifier, and the head of its FCN (512 channels, 21 classes).
    """
    parameters, gmacs = PUBLISHED[name]
    running = (".mean", ".variance")  # statistics of batch normalisation, which nobody counts
    trained = [t for t in zoo.build(name).graph.initializer if t.metadata_props and not t.name.endswith(running)]
    assert sum(math.prod(t.dims) for t in trained) == parameters
    assert zoo.load(name).macs / 1e9 == pytest.approx(gmacs, rel=1e-3)


def test_a_segmenter_tells_every_pixel():
    proto = zoo.build("fcn-resnet18", resolution=96, classes=5)
    (scores,) = session(zoo.materialise(proto)).run(None, sample(proto, batch=2))
    assert scores.shape == (2, 5, 96, 96)


def test_bert_base_stores_its_published_parameters():
    # Devlin et al. say 110 M; the original checkpoint with pooler and two classes has 109,483,778.
    assert zoo.load("bert-base").parameters == 109_483_778


def test_ncf_reads_its_tables_whole_or_by_the_row():
    tables = (138_493 + 26_744) * (64 + 128)
    mlp = 256 * 256 + 256 * 128 + 128 * 64 + 128
    stream, gather = zoo.load("ncf"), zoo.load("ncf", tables="gather")
    assert stream.macs == gather.macs == mlp == 106_624
    assert (gather.weights, sum(layer.lookups for layer in gather.layers)) == (mlp, 2 * (64 + 128))
    assert (stream.weights, sum(layer.lookups for layer in stream.layers)) == (mlp + tables, 0)
    assert stream.parameters == gather.parameters
    assert tables / 1e6 == pytest.approx(31.73, rel=5e-3)


def test_layers_carry_the_names_of_the_architecture():
    names = {layer.name for layer in weighted(zoo.load("resnet50"))}
    assert {"conv1", "layer2.0.conv3", "layer4.0.downsample", "fc"} <= names
    names = {layer.name for layer in weighted(zoo.load("xlnet-base"))}
    assert {"encoder.0.attention.relative", "encoder.11.ff.contract"} <= names


def test_every_operator_of_the_zoo_is_understood():
    assert [name for name in zoo.ZOO if zoo.load(name).unknown_ops] == []


def test_a_smaller_image_makes_less_work_with_the_same_weights():
    small, full = zoo.load("resnet50", resolution=112), zoo.load("resnet50")
    assert small.weights == full.weights
    assert 0.2 < small.macs / full.macs < 0.3


def test_a_shape_must_fit_the_graph():
    assert zoo.load("resnet50", shapes={"input": (1, 3, 224, 224)}).macs == zoo.load("resnet50").macs
    with pytest.raises(ModelError, match="does not fit"):
        zoo.load("resnet50", shapes={"input": (1, 3, 112, 112)})


# Execution


def test_outputs_are_finite_and_follow_the_input(running):
    proto, model = running
    output = model.run(None, sample(proto, batch=4))[0]
    assert np.isfinite(output).all()
    for i in range(1, 4):
        assert np.abs(output[i] - output[0]).max() > 1e-3 * np.abs(output).max()
    if output[0].size > 1:
        assert output[0].std() > 1e-2 * np.abs(output[0]).max()


def test_a_batch_equals_its_samples(running):
    proto, model = running
    feeds = sample(proto, batch=2, seed=1)
    together = model.run(None, feeds)[0]
    alone = [model.run(None, {k: v[i : i + 1] for k, v in feeds.items()})[0] for i in range(2)]
    scale = np.abs(together).max()
    np.testing.assert_allclose(together, np.concatenate(alone), rtol=1e-4, atol=1e-4 * scale)


@pytest.mark.parametrize("name", ["bert-base", "xlnet-base"])
def test_a_masked_token_changes_nothing_elsewhere(name):
    proto = zoo.build(name, **TINY)
    model = session(zoo.materialise(proto))
    feeds = sample(proto, batch=1)
    feeds["attention_mask"] = np.array([[1] * 6 + [0] * 2])
    before = model.run(None, feeds)[0][:, :6]
    feeds["input_ids"][0, 6:] += 1
    np.testing.assert_allclose(model.run(None, feeds)[0][:, :6], before, rtol=1e-5, atol=1e-6)
    feeds["input_ids"][0, 5] += 1
    assert np.abs(model.run(None, feeds)[0][:, :5] - before[:, :5]).max() > 1e-3


def test_the_relative_shift_aligns_distances_with_keys():
    length, heads = 5, 2
    g = GraphBuilder("shift")
    scores = g.input("scores", onnx.TensorProto.FLOAT, (heads, length, 2 * length), width=1)
    shifted = relative_shift(g, scores, "shift", length, heads)
    g.output(shifted, "by_key", heads, length, length)
    by_distance = np.broadcast_to(np.arange(length, -length, -1.0), (1, heads, length, 2 * length))
    by_key = session(g.proto()).run(None, {"scores": by_distance.astype(np.float32)})[0]
    i, j = np.indices((length, length))
    np.testing.assert_array_equal(by_key[0, 1], i - j)


# Weights and files


def test_a_description_holds_no_weights():
    tracemalloc.start()
    proto = zoo.build("bert-large", seq_len=37)
    zoo.load("bert-large", seq_len=37)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 50e6
    assert proto.ByteSize() < 1e6  # protobuf's own memory is not traced


def test_loading_again_is_free():
    assert zoo.load("ncf", tables="gather") is zoo.load("ncf", tables="gather")
    assert zoo.load("ncf") is zoo.load("ncf", tables="stream")


def test_the_seed_and_the_name_decide_the_weights():
    proto = zoo.build("xlnet-base", **TINY)
    first, again, other = (zoo.materialise(proto, seed) for seed in (1, 1, 2))
    assert first.SerializeToString() == again.SerializeToString()
    assert zoo.materialise(zoo.build("xlnet-base", seed=1, **TINY)) == first
    drawn = {tensor.name: tensor.raw_data for tensor in first.graph.initializer if tensor.name.endswith(".weight")}
    assert all(drawn[t.name] != t.raw_data for t in other.graph.initializer if t.name in drawn)
    assert len(set(drawn.values())) == len(drawn)


def test_norms_are_drawn_sane():
    model = zoo.materialise(zoo.build("mobilenet-v2", resolution=32))
    values = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    variances = np.concatenate([v for name, v in values.items() if name.endswith(".variance")])
    scales = np.concatenate([v for name, v in values.items() if name.endswith(".scale")])
    assert np.abs(variances - 1).max() <= 0.2001
    assert np.abs(scales - 1).max() <= 0.1001


def test_an_exported_model_is_valid_and_complete(tmp_path):
    seen = []
    zoo.export("mobilenet-v2", tmp_path / "m.onnx", seed=3, progress=lambda *step: seen.append(step), classes=10)
    onnx.checker.check_model(tmp_path / "m.onnx", full_check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]
    assert onnx.load(tmp_path / "m.onnx") == zoo.materialise(zoo.build("mobilenet-v2", seed=3, classes=10))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] == {total for _, total in seen}.pop()


@pytest.mark.parametrize("name", ["bert-base", "xlnet-base", "ncf"])
def test_weights_in_a_second_file_are_the_same_weights(name, tmp_path):
    proto = zoo.build(name, **({"users": 100, "items": 50} if name == "ncf" else TINY))
    weights.write(proto, tmp_path / "big.onnx", single_file_bytes=0)
    onnx.checker.check_model(tmp_path / "big.onnx", full_check=True)
    assert (tmp_path / "big.onnx").stat().st_size < 1e5 < (tmp_path / "big.onnx.data").stat().st_size
    from_file = onnxruntime.InferenceSession(tmp_path / "big.onnx", options())
    feeds = sample(proto, batch=3)
    expected = session(zoo.materialise(proto)).run(None, feeds)[0]
    np.testing.assert_array_equal(from_file.run(None, feeds)[0], expected)


# Refusals


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("resnet5", {}, "unknown model 'resnet5'; did you mean resnet50"),
        ("resnet50", {"seq_len": 16}, "no parameter 'seq_len'; it takes resolution, classes, groups"),
        ("bert-base", {"seq_len": "16"}, "seq_len must be of type int, got '16'"),
        ("bert-base", {"seq_len": 0}, "seq_len must be at least 1, got 0"),
        ("bert-base", {"seq_len": 513}, "seq_len must be at most 512, got 513"),
        ("xlnet-base", {"heads": 7}, "hidden must be even and a multiple of heads, got 768 and 7"),
        ("inception-v3", {"resolution": 74}, "resolution must be at least 75, got 74"),
        ("alexnet", {"resolution": 62}, "resolution must be at least 63, got 62"),
        ("caffenet", {"resolution": 66}, "resolution must be at least 67, got 66"),
        ("vgg16", {"resolution": 31}, "resolution must be at least 32, got 31"),
        ("ncf", {"tables": "cached"}, "tables must be 'stream' or 'gather', got 'cached'"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name_and_bound(name, parameters, message):
    with pytest.raises(ModelError, match=message):
        zoo.build(name, **parameters)
    with pytest.raises(ModelError, match=message):
        zoo.load(name, **parameters)


def test_a_file_that_cannot_be_written_is_reported(tmp_path):
    with pytest.raises(ModelError, match=r"absent.*: cannot write: "):
        zoo.export("ncf", tmp_path / "absent" / "ncf.onnx", users=10, items=10)


def test_a_negative_seed_is_refused():
    with pytest.raises(ModelError, match="seed = -1 must be at least 0"):
        zoo.materialise(zoo.build("ncf", users=10, items=10), -1)
