"""The classifiers the project trained: their files, and that they still answer as well as their cards say."""

from __future__ import annotations

import hashlib

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from weft.base.errors import ModelError
from weft.models.classifiers import NAMES, card, data_of, model_path, validation
from weft.models.onnx_import import import_onnx

SHAPES = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
COUNTS = {"mnist": 2000, "cifar10": 600}
LAYERS = {
    "mlp-m": {"fc1": (256, 784), "fc2": (128, 256), "fc3": (10, 128)},
    "lenet": {"conv1": (20, 1, 5, 5), "conv2": (50, 20, 5, 5), "ip1": (500, 800), "ip2": (10, 500)},
    "mlp-c": {"fc1": (512, 3072), "fc2": (256, 512), "fc3": (128, 256), "fc4": (10, 128)},
    "cuda-convnet": {"conv1": (32, 3, 5, 5), "conv2": (32, 32, 5, 5), "conv3": (64, 32, 5, 5), "ip1": (10, 1024)},
}
AT_LEAST = {"mlp-m": 0.97, "lenet": 0.985, "mlp-c": 0.55, "cuda-convnet": 0.78}
"""Accuracy on the test set."""


@pytest.fixture(params=NAMES, scope="module")
def name(request):
    return request.param


@pytest.fixture(scope="module")
def model(name):
    return onnx.load(str(model_path(name)))


@pytest.fixture(scope="module")
def session(name):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(str(model_path(name)), options, providers=["CPUExecutionProvider"])


def initialisers(model):
    return {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}


def test_the_file_is_the_one_on_the_card_and_small(name, model):
    written = model_path(name).read_bytes()
    assert card(name).name == name
    assert hashlib.sha256(written).hexdigest() == card(name).sha256
    assert len(written) < 7_000_000
    learned = [value.size for key, value in initialisers(model).items() if key.endswith((".weight", ".bias"))]
    assert sum(learned) == card(name).parameters


def test_layers_and_weights_have_readable_names(name, model):
    layers = {node.name: tuple(node.input[1:]) for node in model.graph.node if node.op_type in ("Conv", "Gemm")}
    assert layers == {layer: (f"{layer}.weight", f"{layer}.bias") for layer in LAYERS[name]}
    stored = initialisers(model)
    assert {layer: stored[f"{layer}.weight"].shape for layer in layers} == LAYERS[name]
    assert all(value.dtype == np.float32 for value in stored.values())


def test_pixels_enter_the_first_layer_from_zero_to_one_or_within_two_of_zero(name, model):
    first = next(node for node in model.graph.node if node.op_type in ("Conv", "Gemm"))
    before = [node.op_type for node in model.graph.node[: list(model.graph.node).index(first)]]
    assert [kind for kind in before if kind != "Flatten"] == {"mnist": [], "cifar10": ["Sub", "Mul"]}[data_of(name)]
    if data_of(name) == "cifar10":
        stored = initialisers(model)
        edges = (np.array([0, 1], np.float32)[:, None] - stored["input.mean"].ravel()) * stored["input.scale"]
        assert np.abs(edges).max() < 2


def test_it_takes_any_batch(name, session):
    (image,), (logits,) = session.get_inputs(), session.get_outputs()
    assert (image.name, image.type, logits.name) == ("image", "tensor(float)", "logits")
    assert image.shape == ["batch", *SHAPES[data_of(name)]] and logits.shape == ["batch", 10]
    images = validation(name).inputs()[:5]
    together = session.run(None, {"image": images})[0]
    alone = [session.run(None, {"image": images[at : at + 1]})[0][0] for at in range(5)]
    np.testing.assert_allclose(together, alone, atol=1e-3)


def test_the_images_are_bytes_with_labels_of_all_classes(name):
    images, labels = validation(name)
    assert images.dtype == labels.dtype == np.uint8
    assert images.shape == (COUNTS[data_of(name)], *SHAPES[data_of(name)])
    assert labels.shape == images.shape[:1] and set(labels) == set(range(10))
    assert images.min() == 0 and images.max() == 255


def test_the_images_are_answered_as_the_card_says(name, session):
    images = validation(name)
    parts = np.array_split(images.inputs(), 8)
    answers = np.concatenate([session.run(None, {"image": part})[0] for part in parts]).argmax(1)
    expected = card(name).validation_accuracy
    error = np.sqrt(expected * (1 - expected) / len(answers))
    assert (answers == images.label).mean() == pytest.approx(expected, abs=3 * error)


def test_the_accuracy_on_the_card_is_that_of_a_trained_network(name):
    assert card(name).accuracy >= AT_LEAST[name]
    assert card(name).validation_accuracy == pytest.approx(card(name).accuracy, abs=0.02)


def test_weft_reads_its_layers(name):
    layers = import_onnx(model_path(name)).layers
    assert [layer.name for layer in layers if layer.weight_bytes] == list(LAYERS[name])


@pytest.mark.parametrize("ask", [model_path, card, validation, data_of])
def test_an_unknown_name_is_told_the_known_ones(ask):
    with pytest.raises(ModelError, match=r"unknown classifier 'lenet-5'; there are mlp-m, lenet, mlp-c, cuda-convnet"):
        ask("lenet-5")
