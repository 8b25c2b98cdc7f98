"""Stitched files as a body with kernels of its own, in its plain twins: read, compared, asked."""

from __future__ import annotations

import numpy as np
import pytest

from tests.stitching.encoders import answers, tiny_encoders
from weft.errors import StitchError
from weft.stitching.bodies.whole_run import stitch_body
from weft.stitching.running.body_serving import FusedEncoder


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


def test_a_body_with_layers_of_a_models_own_is_refused_by_the_layers_name(tmp_path):
    _, made = stitched(tmp_path, frozen=0.5)
    with pytest.raises(StitchError, match=r"different weights at layer1\.query\.product"):
        FusedEncoder(made, "cpu")


def test_what_nobody_is_called_and_what_is_too_long_is_refused(tmp_path):
    _, made = stitched(tmp_path)
    encoder = FusedEncoder(made, "cpu")
    with pytest.raises(StitchError, match="nobody"):
        encoder([("nobody", np.zeros(3))])
    with pytest.raises(StitchError, match="a request of 65 tokens: there are 64 positions"):
        encoder([(made.names[0], np.zeros(65))])
