"""The maths of ``benchmarks/cuda_scores.py``, on a processor: its rounding and its networks are weft's own."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from tests import ROOT
from weft.models.classifiers import NAMES, model_path, validation
from weft_tune.numbers.arrays import rounded
from weft_tune.numbers.configuration import Configuration
from weft_tune.numbers.format import BIN, EXP, FIXED, FLOAT, FLOAT16, FLOAT32, TwosComplement
from weft_tune.quantised.evaluator import OnnxEvaluator
from weft_tune.quantised.opened import find_targets

sys.path.insert(0, str(ROOT / "benchmarks"))
import cuda_scores

FORMATS = [FLOAT32, FLOAT16, FLOAT(8), FIXED(2, 1), FIXED(3, -2), FIXED(8), FIXED(16, 3), EXP(2), EXP(3, 4), EXP(5, 9)]


@pytest.mark.parametrize("form", [*FORMATS, BIN(1), TwosComplement(2, 1), TwosComplement(8, 5)], ids=str)
def test_it_rounds_as_weft_does(form):
    drawn = np.random.default_rng(0).standard_normal(4000) * 2
    halves = np.ldexp(np.array([1.0, 1.5, 1.25, 1.75]), np.arange(-12, 6)[:, None]).ravel()
    x = np.concatenate([drawn, halves, -halves, [0.0, 1e-30, 1e9, -1e9]]).astype(np.float32)
    assert np.array_equal(cuda_scores.rounded(torch.from_numpy(x), form).numpy(), rounded(x, form))


@pytest.mark.parametrize("name", NAMES)
def test_networks_score_as_in_onnx_runtime(name):
    images, labels = validation(name).inputs()[:200], validation(name).label[:200]
    network = find_targets(model_path(name), {"image": images})
    evaluator = OnnxEvaluator(model_path(name), {"image": images}, labels, network)
    few = {
        object_: FIXED(5, 1 if role == "weight" else -2)
        for target in network.targets
        for role in ("weight", "input")
        for object_ in target.objects(role)
    }
    scores = [evaluator.measure(Configuration(formats), {"image": images}, labels) for formats in ({}, few)]
    moved = cuda_scores.on_gpu(evaluator, model_path(name), "cpu")
    again = [moved.measure(Configuration(formats), {"image": images}, labels) for formats in ({}, few)]
    assert again == pytest.approx(scores, abs=1 / len(labels) + 1e-9)
