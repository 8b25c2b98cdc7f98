"""Encoders as torch's exporters write them: both exporters, attention in two spellings, heads of all kinds."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.stitching.encoders import answers, sentences, together
from tests.stitching.torch_encoders import WIDTH, Encoder, export_encoders
from weft_stitch.bodies.body_stitching import stitch_body

torch.set_num_threads(1)


def family(whole: bool) -> list[Encoder]:
    """A base with another head, one with a deeper head, one whose last layer was tuned, and one that tags."""
    torch.manual_seed(0)
    base = Encoder(whole)
    models = [copy.deepcopy(base) for _ in range(4)]
    models[0].head = nn.Linear(WIDTH, 5)
    models[1].head = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 2))
    for weight in models[2].blocks[1].parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    models[3].tags = True
    return models


@pytest.mark.parametrize("new", [False, True], ids=["old exporter", "new exporter"])
@pytest.mark.parametrize("whole", [False, True], ids=["spelled out", "one call"])
def test_exported_encoders_answer_as_they_do_alone(tmp_path: Path, whole: bool, new: bool) -> None:
    if new:
        pytest.importorskip("onnxscript")
    files = export_encoders(family(whole), tmp_path, new=new)
    made = stitch_body(files, measure=False)
    assert made.fill == {"input_ids": 0.0, "attention_mask": 0.0}
    assert made.weight_bytes < 0.5 * made.apart_bytes
    shared = [each.crews for each in made.shared if each.op == "MatMul" and each.bytes == 4 * 3 * WIDTH * WIDTH]
    assert shared == [((0, 1, 2, 3),), ((0, 1, 3), (2,))], "queries, keys and values of two layers"
    (path,) = made.to_onnx(tmp_path / "body.onnx")
    feeds = [sentences(rows, length, rows) for rows, length in ((1, 4), (3, 11), (2, 2), (2, 8))]
    for file, feed, found in zip(files, feeds, together(path, made.names, feeds), strict=True):
        wanted = answers(file, feed)["y"]
        np.testing.assert_allclose(found["y"], wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
