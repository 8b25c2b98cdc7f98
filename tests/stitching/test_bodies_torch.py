"""Encoders as torch's exporters write them: both exporters, attention in two spellings, heads of all kinds."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.stitching.encoders import answers, sentences, together
from weft_stitch.bodies.whole_run import stitch_body

torch.set_num_threads(1)
WIDTH, HEADS = 32, 4


class Block(nn.Module):
    """A layer, after its attention or before it normalised, as one likes."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole = whole
        self.taken = nn.Linear(WIDTH, 3 * WIDTH)
        self.mixed, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows, length, _ = hidden.shape
        apart = self.taken(hidden).view(rows, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = apart[0], apart[1], apart[2]
        if self.whole:
            seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        else:
            scores = query @ key.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5 + mask
            seen = scores.softmax(-1) @ value
        hidden = self.first(hidden + self.mixed(seen.transpose(1, 2).reshape(rows, length, WIDTH)))
        return self.second(hidden + self.down(functional.gelu(self.up(hidden), approximate="tanh")))


class Encoder(nn.Module):
    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(whole) for _ in range(2))
        self.head: nn.Module = nn.Linear(WIDTH, 3)
        self.tags = False

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.words(input_ids) + self.places(places)
        mask = (1.0 - attention_mask[:, None, None, :].to(hidden.dtype)) * torch.finfo(hidden.dtype).min
        for block in self.blocks:
            hidden = block(hidden, mask)
        found: torch.Tensor = self.head(hidden if self.tags else hidden[:, 0])
        return found


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


def exported(models: Sequence[Encoder], folder: Path, *, new: bool) -> list[Path]:
    example = tuple(torch.from_numpy(each) for each in sentences(2, 7).values())
    sizes = {0: "rows", 1: "length"}
    files = []
    for name, model in zip("abcd", models, strict=False):
        files.append(folder / f"{name}.onnx")
        axes = {"input_ids": sizes, "attention_mask": sizes}
        how = {"dynamic_shapes": axes} if new else {"dynamic_axes": {**axes, "y": sizes if model.tags else {0: "rows"}}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model.eval(), example, files[-1], dynamo=new, input_names=list(axes), output_names=["y"], **how
            )  # type: ignore[call-overload]
    return files


@pytest.mark.parametrize("new", [False, True], ids=["old exporter", "new exporter"])
@pytest.mark.parametrize("whole", [False, True], ids=["spelled out", "one call"])
def test_exported_encoders_answer_as_they_do_alone(tmp_path: Path, whole: bool, new: bool) -> None:
    if new:
        pytest.importorskip("onnxscript")
    files = exported(family(whole), tmp_path, new=new)
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
