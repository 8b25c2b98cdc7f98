"""Models in fewer bits: what is converted on load, and how far the result is off."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto

from weft.errors import ModelError
from weft.runtime.onnxruntime_cpu.sessions import first_line
from weft.runtime.tensors import Array

FP32, FP16 = "fp32", "fp16"
WITHIN = 1e-4
"""How far float32 on a device may be off the CPU, as a part of the largest output, before that is remarked."""


def converted(path: Path, precision: str, folder: Path) -> Path:
    """The file to open for a precision: as it is, or with its weights and what it computes in half of the bits.

    Inputs and outputs keep their types.
    """
    if precision == FP32:
        return path
    from onnxruntime.transformers.float16 import convert_float_to_float16

    try:
        half: ModelProto = convert_float_to_float16(onnx.load(str(path)), keep_io_types=True)
        target = folder / "half.onnx"
        onnx.save(half, str(target), save_as_external_data=half.ByteSize() > 1 << 30)
    except Exception as error:  # the converter raises whatever it meets
        raise ModelError(f"cannot be converted to {precision}: {first_line(error)}") from error
    return target


def is_half(model: ModelProto) -> bool:
    """Whether most of the weights of a model have 16 bits."""
    halves: int = sum(each.data_type == TensorProto.FLOAT16 for each in model.graph.initializer)
    return 2 * halves > len(list(model.graph.initializer))


def difference(wanted: Mapping[str, Array], found: Mapping[str, Array]) -> float:
    """The largest difference between results, as a part of the largest number of each output."""
    return max((_difference(np.asarray(each), np.asarray(found[name])) for name, each in wanted.items()), default=0.0)


def _difference(wanted: Any, found: Any) -> float:
    if wanted.shape != found.shape:
        return float("inf")
    if not wanted.size or wanted.dtype.kind not in "fiu":
        return 0.0 if np.array_equal(wanted, found) else float("inf")
    far = np.abs(np.float64(wanted) - np.float64(found)).max()
    return float(far / (np.abs(np.float64(wanted)).max() or 1.0))


def remark(precision: str, far: float) -> str | None:
    """What is to be said of a difference; None where it is as small as it should be."""
    if precision != FP32:
        return f"{precision}: differs from float32 by up to {far:.1e} of the largest output on made-up inputs"
    return None if far <= WITHIN else f"differs from the CPU by up to {far:.1e} of the largest output on made-up inputs"
