"""Stitched files as a body with kernels of its own, in its plain twins: read, compared, asked."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.stitching.classifiers import HEADS, export_classifiers
from tests.stitching.encoders import answers, tiny_encoders
from tests.stitching.variants import LINES, changed_file, other_columns, other_lines
from weft.base.errors import StitchError
from weft_stitch.bodies.body_stitching import stitch_body
from weft_stitch.running.body_serving import FusedEncoder


def stitched(folder, *, tolerance=0.0, **recipe):
    files = tiny_encoders(folder, **recipe)
    return files, stitch_body(files, tolerance=tolerance, measure=False)


@pytest.mark.parametrize(
    ("tolerance", "recipe"), [(1e-6, {"rank": 2, "classes": (2, 5, 3)}), (0.0, {"classes": 4})], ids=["rank", "heads"]
)
def test_requests_are_answered_as_by_the_models_files(tmp_path, tolerance, recipe):
    files, made = stitched(tmp_path, tolerance=tolerance, **recipe)
    encoder = FusedEncoder(made, "cpu")
    rng = np.random.default_rng(1)
    asked = [(made.names[task], rng.integers(0, 50, length)) for task, length in ((2, 9), (0, 1), (1, 30), (0, 17))]
    for (name, tokens), found in zip(asked, encoder(asked), strict=True):
        feed = {"input_ids": tokens[None], "attention_mask": np.ones((1, len(tokens)), np.int64)}
        (wanted,) = answers(files[made.names.index(name)], feed).values()
        np.testing.assert_allclose(found, wanted[0], atol=1e-4, rtol=1e-4)


def test_a_bert_of_torchs_exporter_is_read(tmp_path):
    files, models = export_classifiers(tmp_path)
    encoder = FusedEncoder(stitch_body(files, measure=False), "cpu")
    assert encoder.encoder.weights.heads == HEADS
    tokens = torch.randint(0, 50, (1, 11))
    for name, model, found in zip(
        ("mail", "news"), models, encoder([(each, tokens[0]) for each in ("mail", "news")]), strict=True
    ):
        with torch.no_grad():
            wanted = model(tokens, torch.ones_like(tokens), torch.zeros_like(tokens))[0]
        np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=1e-4, err_msg=name)


def test_a_head_of_another_kind_is_refused(tmp_path):
    files, _ = export_classifiers(tmp_path, torch.relu)
    with pytest.raises(StitchError, match="Relu, not the tanh of a pooler"):
        FusedEncoder(stitch_body(files, measure=False), "cpu")


def test_a_body_with_layers_of_a_models_own_is_refused_by_the_layers_name(tmp_path):
    _, made = stitched(tmp_path, frozen=0.5)
    with pytest.raises(StitchError, match=r"different weights at layer1\.query\.product"):
        FusedEncoder(made, "cpu")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"layer1__query__product": other_columns}, r"differ in columns.* at layer1\.query\.product"),
        ({LINES: other_lines}, "lines of their own in the table"),
    ],
    ids=["columns", "lines"],
)
def test_what_differs_but_by_a_low_rank_is_refused(tmp_path, changes, why):
    base = tiny_encoders(tmp_path, classes=4)[0]
    files = [changed_file(base, tmp_path / f"{seed}.onnx", seed, **changes) for seed in (1, 2)]
    with pytest.raises(StitchError, match=why):
        FusedEncoder(stitch_body([base, *files], measure=False), "cpu")


def test_what_nobody_is_called_and_what_is_too_long_is_refused(tmp_path):
    _, made = stitched(tmp_path)
    encoder = FusedEncoder(made, "cpu")
    with pytest.raises(StitchError, match="nobody"):
        encoder([("nobody", np.zeros(3))])
    with pytest.raises(StitchError, match="a request of 65 tokens: 64 at most"):
        encoder([(made.names[0], np.zeros(65))])
    words = len(encoder.encoder.weights.words)
    for token in (-1, words):
        with pytest.raises(StitchError, match=f"tokens .* there are {words}"):
            encoder([(made.names[0], np.array([0, token]))])
