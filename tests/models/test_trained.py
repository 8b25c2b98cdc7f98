"""The networks the project trained: files, exits, and that they still answer what was recorded."""

from __future__ import annotations

import hashlib

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from weft.base.errors import ModelError
from weft.models.onnx_import import import_onnx
from weft.models.sources import load_model
from weft.models.trained import TRAINED, Trained
from weft.workloads.exits import read_record

AT_LEAST = {"mnist-vit": 0.98, "cifar-cnn": 0.82}
"""Accuracy at the last exit, on the test set and (less three standard errors) on the samples."""
CLOSE = 2e-3
"""Between the confidences of two machines' arithmetic."""


@pytest.fixture(params=TRAINED, scope="module")
def trained(request):
    return TRAINED[request.param]


@pytest.fixture(scope="module")
def session(trained):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(str(trained.path()), options, providers=["CPUExecutionProvider"])


def softmax(logits):
    odds = np.exp(logits - logits.max(-1, keepdims=True))
    return odds / odds.sum(-1, keepdims=True)


@pytest.fixture(scope="module")
def answered(trained, session):
    """Probabilities of the samples, (images, exits, classes), computed in batches of 32."""
    parts = [session.run(None, {"image": batch}) for batch in np.split(trained.samples().inputs(), 8)]
    return softmax(np.stack([np.concatenate(exit_) for exit_ in zip(*parts, strict=True)], axis=1))


def test_the_registry_names_a_transformer_and_a_convolutional_network():
    assert list(TRAINED) == ["mnist-vit", "cifar-cnn"]
    assert all(name == trained.name == trained.card().name for name, trained in TRAINED.items())


def test_the_file_is_the_one_on_the_card_and_small(trained):
    written = trained.path().read_bytes()
    assert hashlib.sha256(written).hexdigest() == trained.card().sha256
    assert len(written) <= 3_000_000
    assert trained.record_path().stat().st_size < 300_000


def test_the_exits_are_marked_in_order_and_take_any_batch(trained, session):
    model = onnx.load(str(trained.path()))
    marked = {each.key: each.value for each in model.metadata_props}["weft.exits"]
    assert marked == ",".join(trained.exits) == ",".join(exit_.name for exit_ in trained.card().exits)
    assert tuple(each.name for each in session.get_outputs()) == trained.exits
    (image,) = session.get_inputs()
    assert (image.name, image.type, tuple(image.shape[1:])) == ("image", "tensor(float)", trained.shape)
    assert all(isinstance(each.shape[0], str) and each.shape[1:] == [10] for each in session.get_outputs())
    assert not any(node.op_type == "BatchNormalization" for node in model.graph.node)


def test_the_samples_get_the_recorded_answers(trained, answered):
    samples, record = trained.samples(), trained.record()
    np.testing.assert_allclose(answered.max(-1), record.confidence[samples.row], atol=CLOSE)
    np.testing.assert_array_equal(samples.label, record.label[samples.row])
    top_two = np.sort(answered, axis=-1)[..., -2:]
    clear = np.diff(top_two, axis=-1)[..., 0] > 2 * CLOSE
    assert clear.mean() > 0.95
    assert (answered.argmax(-1) == record.prediction[samples.row])[clear].all()


def test_a_batch_answers_as_its_images_do_alone(trained, session, answered):
    images = trained.samples().inputs()
    for row in range(5):
        alone = np.concatenate(session.run(None, {"image": images[row : row + 1]}))
        np.testing.assert_allclose(softmax(alone), answered[row], atol=1e-4)


def test_the_network_recognises_what_it_should(trained, answered):
    at_least, labels = AT_LEAST[trained.name], trained.samples().label
    assert trained.card().exits[-1].accuracy >= at_least
    spread = 3 * (at_least * (1 - at_least) / len(labels)) ** 0.5
    assert (answered[:, -1].argmax(-1) == labels).mean() >= at_least - spread


def test_the_record_is_whole_and_consistent(trained):
    record = trained.record()
    assert record.confidence.shape == record.prediction.shape == (10_000, len(trained.exits))
    np.testing.assert_array_equal(record.correct, record.prediction == record.label[:, None])
    assert record.confidence.dtype == np.float32
    assert record.confidence.min() >= 0.1 and record.confidence.max() <= 1 + 1e-6


def test_the_card_says_what_the_record_says(trained):
    record, card = trained.record(), trained.card()
    sure = record.confidence >= card.threshold
    sure[:, -1] = True
    taken = sure.argmax(1)
    right = record.correct[np.arange(len(taken)), taken]
    assert card.accuracy == pytest.approx(right.mean(), abs=1e-4)
    assert card.mean_macs == pytest.approx(np.array([each.macs for each in card.exits])[taken].mean(), abs=1)
    for at, exit_ in enumerate(card.exits):
        assert exit_.accuracy == pytest.approx(record.correct[:, at].mean(), abs=1e-4)
        assert exit_.rate == pytest.approx((taken == at).mean(), abs=1e-4)
        assert exit_.accuracy_of_leavers == pytest.approx(right[taken == at].mean(), abs=1e-4)


def test_leaving_early_saves_work_and_costs_little(trained):
    card = trained.card()
    work = [exit_.macs for exit_ in card.exits]
    assert work == sorted(set(work))
    assert card.mean_macs < 0.85 * work[-1]
    assert all(exit_.rate > 0 for exit_ in card.exits)
    assert card.accuracy > card.exits[-1].accuracy - 0.015


@pytest.mark.parametrize("name", TRAINED)
def test_an_exported_network_comes_with_its_record_and_with_images_as_it_takes_them(name, tmp_path):
    model, record, samples = TRAINED[name].export(tmp_path / "net.onnx")
    assert import_onnx(model, shapes={"image": (1, *TRAINED[name].shape)}).exits
    assert read_record(record).exits == len(TRAINED[name].exits)
    with np.load(samples) as stored:
        answers = ort.InferenceSession(str(model)).run(["logits"], {"image": stored["image"]})[0]
        wanted = TRAINED[name].record().correct[TRAINED[name].samples().row, -1]
        assert ((answers.argmax(1) == stored["label"]) == wanted).all()


def test_a_network_that_cannot_be_written_is_an_error_of_one_line(tmp_path):
    with pytest.raises(ModelError, match=r"^[^\n]*net\.onnx: cannot write: [^\n]*$"):
        TRAINED["mnist-vit"].export(tmp_path / "missing" / "net.onnx")


def test_what_cannot_be_read_is_not_what_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(Trained, "path", lambda self: tmp_path)
    with pytest.raises(ModelError, match=rf"^{tmp_path}: cannot read: Is a directory$"):
        TRAINED["mnist-vit"].export(tmp_path / "net.onnx")


@pytest.mark.parametrize("name", TRAINED)
def test_a_trained_network_is_found_by_its_name(name):
    model = load_model(name)
    assert [each.name for each in model.exits] == list(TRAINED[name].exits[:-1])
    assert model.inputs == (("image", (1, *TRAINED[name].shape)),)
