"""ONNX models through the conversion to torch, beside ONNX Runtime on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from onnx import ModelProto

from weft.base.errors import ModelError
from weft.runtime.cuda.precision import difference
from weft.runtime.cuda.torch_onnx import OnnxModule, folded
from weft.runtime.tensors import Array

NEAR = 1e-4
"""Difference from ONNX Runtime in float32 on the same machine, relative to the largest output."""


def by_runtime(model: ModelProto, feed: Mapping[str, Array]) -> list[Array]:
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    outputs: list[Array] = session.run(None, dict(feed))
    return outputs


def in_torch(model: ModelProto, feed: Mapping[str, Array], dtype: Any = None, *, channels_last: bool = False) -> Any:
    """The module and its outputs."""
    copy = ModelProto.FromString(model.SerializeToString())
    module = OnnxModule(
        folded(copy, {name: array.shape for name, array in feed.items()}), dtype, channels_last=channels_last
    )
    with torch.inference_mode():
        outputs = module(*(torch.from_numpy(np.array(feed[name])) for name, _ in module.inputs))
    return module, [output.numpy() for output in outputs]


def problem(model: ModelProto, feed: Mapping[str, Array], dtype: Any = None, near: float = NEAR) -> str | None:
    """What is wrong with the outputs; None if they agree, or the conversion refuses the model."""
    wanted = by_runtime(model, feed)
    try:
        _, found = in_torch(model, feed, dtype)
    except ModelError:
        return None
    for at, (right, output) in enumerate(zip(wanted, found, strict=True)):
        right, output = np.asarray(right), np.asarray(output)
        if right.shape != output.shape or right.dtype != output.dtype:
            return f"output {at} is {output.dtype} {output.shape}, not {right.dtype} {right.shape}"
        finite = np.isfinite(right) if right.dtype.kind == "f" else np.ones(right.shape, bool)
        if not np.array_equal(right[~finite], output[~finite], equal_nan=True):
            return f"output {at} differs where it is not finite"
        if (far := difference({"": right[finite]}, {"": output[finite]})) > near:
            return f"output {at} differs by {far:.1e} of the largest"
    return None
