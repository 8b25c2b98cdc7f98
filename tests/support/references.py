"""ONNX Runtime without weft: the results that weft's are compared with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort

from tests.support.inference import Arrays


def session(path: Path) -> ort.InferenceSession:
    """What we compare with: plain ONNX Runtime, with as many threads as the server has."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run_session(reference: ort.InferenceSession, arrays: Arrays) -> dict[str, np.ndarray]:
    names = [each.name for each in reference.get_outputs()]
    return dict(zip(names, reference.run(names, dict(arrays)), strict=True))


def assert_same_bits(got: Arrays, wanted: Arrays) -> None:
    assert list(got) == list(wanted)
    for name, each in wanted.items():
        assert (got[name].dtype, got[name].shape) == (each.dtype, each.shape)
        assert got[name].tobytes() == each.tobytes(), name
