"""Encoders that the project trained and tuned: as one body they answer as they do alone, right or wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.stitching.encoders import answers, together
from weft.models.stored import data_path
from weft_stitch.bodies.body_stitching import stitch_body

TASKS = ("language", "kind", "family")
LONGEST = 40
HERE = "stitching/making/data/encoders"
CARD = json.loads(data_path(f"{HERE}/names.json").read_text("utf-8"))


def sample() -> dict[str, np.ndarray]:
    """Names as the card says that they are read."""
    told = [[1, *(byte + 2 for byte in text.encode())][:LONGEST] for text, *_ in CARD["samples"]]
    ids = np.array([each + [0] * (LONGEST - len(each)) for each in told])
    return {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64)}


@pytest.mark.parametrize(("tolerance", "shared"), [(0.0, "exact"), (1e-5, "low_rank")])
def test_trained_encoders_keep_their_accuracy(tmp_path: Path, tolerance: float, shared: str) -> None:
    files = [data_path(f"{HERE}/names-{task}.onnx") for task in TASKS]
    made = stitch_body(files, measure=False, tolerance=tolerance)
    assert made.weight_bytes / made.apart_bytes == pytest.approx(CARD[shared]["weights"], abs=0.01)
    (path,) = made.to_onnx(tmp_path / "one.onnx")
    given = sample()
    for number, (task, found) in enumerate(zip(TASKS, together(path, made.names, [given] * 3), strict=True)):
        alone = answers(files[number], given)["logits"].argmax(1)
        assert (found["logits"].argmax(1) == alone).all()
        right = np.array([labels[number] for _, *labels in CARD["samples"]]) == alone
        assert right.mean() == pytest.approx(CARD["accuracy"][task], abs=0.07), "a sample of the test"
    assert CARD[shared]["accuracy"] == CARD["accuracy"]
