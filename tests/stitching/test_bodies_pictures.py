"""Families that are not encoders as one body: U-Nets, recurrent nets, vision transformers, without islands."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import weft
from tests.stitching.encoders import answers, distinct_bytes, together
from weft_stitch.bodies.body_stitching import BodyStitching

torch.set_num_threads(1)


class UNet(nn.Module):
    """Down and up again, with what was on the way down beside what comes up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.inner = nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.normed, self.again = nn.GroupNorm(4, 16), nn.GroupNorm(2, 8)
        self.up = nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.mixed = nn.Conv2d(32, 8, 3, padding=1)
        self.head = nn.Conv2d(16, 2, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        wide = functional.silu(self.again(self.first(image)))
        small = functional.silu(self.normed(self.second(wide)))
        deep = functional.silu(self.inner(small))
        small = functional.silu(self.mixed(torch.cat([self.up(deep), small], 1)))
        large = functional.interpolate(small, scale_factor=2.0, mode="bilinear", align_corners=False)
        found: torch.Tensor = self.head(torch.cat([large, wide], 1))
        return found


class Recurrent(nn.Module):
    """Words, a recurrent layer there and back, and what is seen at the end or at every word."""

    def __init__(self, kind: Callable[..., nn.Module], *, both: bool, tags: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 12)
        self.cell = kind(12, 16, num_layers=2, batch_first=True, bidirectional=both)
        self.head = nn.Linear(32 if both else 16, 3)
        self.tags = tags

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        seen, _ = self.cell(self.words(ids))
        found: torch.Tensor = self.head(seen if self.tags else seen[:, -1])
        return found


class Vision(nn.Module):
    """A picture in patches, as words."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, stride=4)
        self.start = nn.Parameter(torch.randn(1, 1, 32))
        self.places = nn.Parameter(torch.randn(1, 17, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu", norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        words = self.patches(image).flatten(2).transpose(1, 2)
        words = torch.cat([self.start.expand(words.shape[0], -1, -1), words], 1) + self.places
        found: torch.Tensor = self.head(self.layers(words)[:, 0])
        return found


def family(make: Callable[[], nn.Module], tuned: str) -> list[nn.Module]:
    """A base, one with another head, and one of which a part was tuned."""
    torch.manual_seed(0)
    base = make()
    models = [base, copy.deepcopy(base), copy.deepcopy(base)]
    for model, part in ((models[1], "head"), (models[2], tuned)):
        for weight in model.get_submodule(part).parameters():
            weight.data += 0.1 * torch.randn_like(weight)
    return models


def exported(models: Sequence[nn.Module], folder: Path, example: torch.Tensor, *, new: bool, long: bool) -> list[Path]:
    if new:
        pytest.importorskip("onnxscript")
    axes = {0: "rows", 1: "length"} if long else {0: "rows"}
    files = []
    for name, model in zip("abc", models, strict=True):
        files.append(folder / f"{name}.onnx")
        how: dict[str, Any] = {"dynamic_shapes": (axes,)} if new else {"dynamic_axes": {"x": axes, "y": {0: "rows"}}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model.eval(), (example,), files[-1], dynamo=new, input_names=["x"], output_names=["y"], **how
            )
    return files


def stitched(files: Sequence[Path], folder: Path, given: Sequence[np.ndarray]) -> BodyStitching:
    """A body whose answers are the models', and which holds nothing twice."""
    made = weft.stitch(files, body=True, measure=False)
    assert isinstance(made, BodyStitching) and made.difference.relative <= 1e-5
    floats = [each.nbytes for each in made.graph.constants.values() if each.dtype == np.float32 and each.ndim > 1]
    assert sum(floats) <= distinct_bytes(files)
    (path,) = made.to_onnx(folder / "body.onnx")
    feeds = [{"x": each} for each in given]
    for file, feed, found in zip(files, feeds, together(path, made.names, feeds), strict=True):
        wanted = answers(file, feed)["y"]
        np.testing.assert_allclose(found["y"], wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    return made


def crews(made: BodyStitching, op: str) -> list[tuple[tuple[int, ...], ...]]:
    return [each.crews for each in made.shared if each.op == op]


ALL, HEAD, TUNED = ((0, 1, 2),), ((0, 2), (1,)), ((0, 1), (2,))
EXPORTERS = pytest.mark.parametrize("new", [False, True], ids=["old exporter", "new exporter"])


@EXPORTERS
def test_u_nets_share_what_is_equal(tmp_path: Path, new: bool) -> None:
    files = exported(family(UNet, "up"), tmp_path, torch.randn(2, 3, 16, 16), new=new, long=False)
    rng = np.random.default_rng(0)
    made = stitched(files, tmp_path, [rng.standard_normal((rows, 3, 16, 16), np.float32) for rows in (1, 3, 2)])
    assert crews(made, "Conv") == [ALL, ALL, ALL, ALL, HEAD] and crews(made, "ConvTranspose") == [TUNED]
    assert made.weight_bytes < 0.5 * made.apart_bytes


@pytest.mark.parametrize(("kind", "both"), [(nn.LSTM, False), (nn.LSTM, True), (nn.GRU, True)])
def test_recurrent_nets_share_what_is_equal(tmp_path: Path, kind: Any, both: bool) -> None:
    """By torch's older exporter: the newer one unrolls them to one length."""
    models = family(lambda: Recurrent(kind, both=both, tags=False), "cell")
    files = exported(models, tmp_path, torch.arange(14).reshape(2, 7), new=False, long=True)
    made = stitched(files, tmp_path, [np.arange(rows * 6).reshape(rows, 6) for rows in (1, 3, 2)])
    assert made.fill is None, "the end of a row is what counts"
    assert crews(made, "Gather")[:1] == [ALL]
    assert crews(made, kind.__name__) == [TUNED, TUNED]


def test_what_a_recurrent_net_says_on_its_way_does_not_depend_on_the_end(tmp_path: Path) -> None:
    models = family(lambda: Recurrent(nn.LSTM, both=False, tags=True), "cell")
    files = exported(models, tmp_path, torch.arange(14).reshape(2, 7), new=False, long=True)
    made = stitched(
        files, tmp_path, [np.arange(rows * length).reshape(rows, length) for rows, length in ((1, 9), (3, 4), (2, 2))]
    )
    assert made.fill == {"x": 0.0}


@EXPORTERS
def test_vision_transformers_share_what_is_equal(tmp_path: Path, new: bool) -> None:
    files = exported(family(Vision, "layers.layers.1"), tmp_path, torch.randn(2, 3, 16, 16), new=new, long=False)
    rng = np.random.default_rng(0)
    made = stitched(files, tmp_path, [rng.standard_normal((rows, 3, 16, 16), np.float32) for rows in (2, 1, 3)])
    assert crews(made, "Conv") == [ALL] and made.weight_bytes < 0.6 * made.apart_bytes
