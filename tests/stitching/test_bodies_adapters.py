"""Adapters that are not merged, as folders of PEFT beside one base: each model is the base and its own small parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import weft
from tests.stitching.adapters import lora_factors, merge_adapter, write_adapter, write_safetensors
from tests.stitching.encoders import sentences, together
from tests.stitching.torch_encoders import WIDTH, Encoder, export_encoders
from weft.base.errors import InputError, StitchError
from weft_stitch.bodies.adapters import read_safetensors
from weft_stitch.bodies.body_stitching import BodyStitching


@pytest.fixture(params=[False, True], ids=["old exporter", "new exporter"])
def base(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Encoder, Path]:
    if request.param:
        pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    model = Encoder(whole=False)
    (path,) = export_encoders([model], tmp_path, new=request.param)
    return model, path


def test_models_are_the_base_and_their_adapters(base: tuple[Encoder, Path], tmp_path: Path) -> None:
    """One of a few products, one of others with a head of its own, and the base itself."""
    model, path = base
    first = lora_factors("blocks.0.taken", WIDTH, 3 * WIDTH) | lora_factors("blocks.1.down", 64, WIDTH, seed=1)
    head = nn.Linear(WIDTH, 5)
    second = lora_factors("blocks.1.taken", WIDTH, 3 * WIDTH, 3, seed=2)
    saved = {"head.weight": head.weight, "head.bias": head.bias}
    folders = [
        write_adapter(tmp_path / "first", first, alpha_pattern={"blocks.1.down": 4}),
        write_adapter(tmp_path / "second", second | saved, r=3, use_rslora=True, modules_to_save=["head"]),
    ]
    wanted = [
        merge_adapter(
            merge_adapter(model, lora_factors("blocks.0.taken", WIDTH, 3 * WIDTH), 6 / 2),
            dict(list(first.items())[2:]),
            4 / 2,
        ),
        merge_adapter(model, second, 6 / 3**0.5),
        model,
    ]
    wanted[1].head = head
    made = weft.stitch([*folders, path], base=path, measure=False)
    assert isinstance(made, BodyStitching) and made.names == ("first", "second", "a")
    assert made.weight_bytes < 0.45 * made.apart_bytes and made.difference.relative <= 1e-5
    ranks = sorted(each.rank for each in made.shared if each.rank)
    assert ranks == [2, 2, 3], "whole products are shared"
    (file,) = made.to_onnx(tmp_path / "body.onnx")
    feeds = [sentences(rows, length, rows) for rows, length in ((1, 4), (3, 9), (2, 7))]
    for each, feed, found in zip(wanted, feeds, together(file, made.names, feeds), strict=True):
        with torch.no_grad():
            true = each(*map(torch.from_numpy, feed.values())).numpy()
        np.testing.assert_allclose(found["y"], true, rtol=0, atol=2e-5 * np.abs(true).max())


def test_names_may_begin_deeper(base: tuple[Encoder, Path], tmp_path: Path) -> None:
    """An adapter of a classifier around the encoder that was exported."""
    folder = write_adapter(tmp_path / "deeper", lora_factors("encoder.blocks.0.mixed", WIDTH, WIDTH))
    made = weft.stitch([folder], base=base[1], measure=False)
    assert [each.rank for each in made.shared if each.rank] == [2]


@pytest.mark.parametrize(
    ("tensors", "settings", "message"),
    [
        (lora_factors("blocks.7.taken", WIDTH, 3 * WIDTH), {}, r"blocks\.7\.taken\.weight is not found in a"),
        (lora_factors("blocks.0.taken", WIDTH, WIDTH), {}, r"adapter of blocks\.0\.taken is for a weight of 32x32"),
        (lora_factors("blocks.0.taken", WIDTH, 3 * WIDTH), {"r": 4}, "no two matrices of rank 4"),
        (lora_factors("words", WIDTH, 50), {}, "words has an adapter, but .* is no product"),
        (lora_factors("blocks.0.taken", WIDTH, 3 * WIDTH), {"use_dora": True}, "is of DoRA"),
        (lora_factors("blocks.0.taken", WIDTH, 3 * WIDTH), {"peft_type": "IA3"}, "is of IA3"),
        (lora_factors("blocks.0.taken", WIDTH, 3 * WIDTH), {"init_lora_weights": "pissa_niter_4"}, "changes the base"),
        ({"blocks.0.taken.lora_magnitude_vector": torch.ones(3)}, {}, "no part of an adapter of a product"),
        ({"blocks.0.taken.lora_A.weight": torch.ones(2, WIDTH)}, {}, "has lora_A only"),
        (lora_factors("blocks.0.taken", WIDTH, 3 * WIDTH), {"r": "two"}, "adapter_config.json: r = 'two'"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(tmp_path_factory, tmp_path, tensors, settings, message):
    torch.manual_seed(0)
    (path,) = export_encoders([Encoder(whole=False)], tmp_path, new=False)
    with pytest.raises(StitchError, match=f"(?s)odd.*{message}"):
        weft.stitch([write_adapter(tmp_path / "odd", tensors, **settings)], base=path, measure=False)


def test_an_adapter_needs_its_base(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "odd", lora_factors("words", 2, 2))
    with pytest.raises(StitchError, match="odd is an adapter; give base = the ONNX file"):
        weft.stitch([folder])
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(StitchError, match="safe_serialization"):
        from weft_stitch.bodies.adapters import read_adapter

        read_adapter(folder)


def test_tensors_of_all_kinds_are_read(tmp_path: Path) -> None:
    numbers = np.array([[1.5, -2.0], [0.25, 3.0]])
    halved = (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    kinds = {"a": numbers.astype(np.float32), "b": numbers.astype(np.float16), "c": numbers, "d": halved}
    found = read_safetensors(write_safetensors(tmp_path / "some.safetensors", kinds))
    assert found.keys() == kinds.keys()
    for each in found.values():
        assert each.dtype == np.float32
        np.testing.assert_array_equal(each, numbers)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:4], "no safetensors file, or not whole"),
        (lambda data: data[:-4], r"the bytes of a are not those of its shape, \(2, 2\)"),
        (lambda data: data[:8] + b"x" + data[9:], "damaged"),
        (lambda data: data.replace(b'"F32"', b'"Q32"'), "a is of type Q32"),
        (lambda data: (1 << 60).to_bytes(8, "little") + data[8:], "not whole"),
    ],
)
def test_damaged_tensors_are_told_in_one_line(tmp_path: Path, damage: Any, message: str) -> None:
    path = write_safetensors(tmp_path / "some.safetensors", {"a": np.ones((2, 2), np.float32)})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InputError, match=message):
        read_safetensors(path)
