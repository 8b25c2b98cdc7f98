"""ONNX models through the conversion to torch, on the CPU or a GPU, beside ONNX Runtime on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
import torch
from onnx import ModelProto, TensorProto, helper

from weft.base.errors import ModelError
from weft.runtime.cuda.precision import FP16, FP32, difference
from weft.runtime.cuda.torch_engine import WITHIN
from weft.runtime.cuda.torch_onnx import OnnxModule, folded
from weft.runtime.cuda.torch_types import PRECISIONS
from weft.runtime.tensors import Array

NEAR = {FP32: 1e-4, FP16: 1e-3}
"""Difference from ONNX Runtime on the same machine, relative to the largest output, by the numbers of the file."""
HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


class Case(NamedTuple):
    """A model and its inputs."""

    title: str
    model: ModelProto
    feed: Mapping[str, Array]


def drawn_for(model: ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """Random inputs; whole numbers are small enough to be any index."""
    rng, held = np.random.default_rng(0), {tensor.name for tensor in model.graph.initializer}
    feed = {}
    for value in model.graph.input:
        if value.name not in held:
            kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            sizes = shapes.get(value.name) or [
                dim.dim_value if dim.HasField("dim_value") else 2 for dim in value.type.tensor_type.shape.dim
            ]
            values = rng.standard_normal(sizes) if kind.kind == "f" else rng.integers(0, 2, sizes)
            feed[value.name] = np.asarray(values, kind)
    return feed


def by_runtime(model: ModelProto, feed: Mapping[str, Array]) -> list[Array]:
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    outputs: list[Array] = session.run(None, dict(feed))
    return outputs


def in_torch(
    model: ModelProto, feed: Mapping[str, Array], dtype: Any = None, *, channels_last: bool = False, device: str = "cpu"
) -> Any:
    """The module and its outputs."""
    copy = ModelProto.FromString(model.SerializeToString())
    shapes = {name: array.shape for name, array in feed.items()}
    module = OnnxModule(folded(copy, shapes), dtype, channels_last=channels_last).to(device)
    with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        outputs = module(*(torch.from_numpy(np.array(feed[name])).to(device) for name, _ in module.inputs))
    return module, [output.cpu().numpy() for output in outputs]


def problem(
    model: ModelProto, feed: Mapping[str, Array], near: Mapping[str, float] = NEAR, device: str = "cpu"
) -> str | None:
    """What is wrong with the outputs; None if they agree, or the conversion refuses the model."""
    wanted = by_runtime(model, feed)
    # A GPU has no kernels for some operators with some types; a model with one stays with ONNX Runtime.
    refusals = ModelError if device == "cpu" else (ModelError, NotImplementedError)
    try:
        _, found = in_torch(model, feed, device=device)
    except refusals:
        return None
    halves = {tensor.data_type for tensor in model.graph.initializer} & set(HALVES)
    coarse = halves or any(np.asarray(array).dtype == np.float16 for array in (*feed.values(), *wanted))
    return mismatch(wanted, found, near[FP16 if coarse else FP32])


def mismatch(wanted: Sequence[Array], found: Sequence[Array], near: float) -> str | None:
    """How the outputs differ; None if they agree."""
    for at, (right, output) in enumerate(zip(wanted, found, strict=True)):
        right, output = np.asarray(right), np.asarray(output)
        if right.shape != output.shape or right.dtype != output.dtype:
            return f"output {at} is {output.dtype} {output.shape}, not {right.dtype} {right.shape}"
        far = difference({"": right}, {"": output})
        if far > near:
            return f"output {at} differs by {far:.1e} of the largest"
    return None


def problems(cases: Iterable[Case], near: Mapping[str, float] = NEAR, device: str = "cpu") -> tuple[int, list[str]]:
    """How many cases there are, and what is wrong with which; errors are, too."""
    wrong, count = [], 0
    for count, case in enumerate(cases, 1):  # noqa: B007 - it is returned
        try:
            result = problem(case.model, case.feed, near, device)
        except Exception as error:  # whatever the conversion, torch or ONNX Runtime raises
            result = f"{type(error).__name__}: {error}"
        wrong += [f"{case.title}: {result}"] if result else []
    return count, wrong


def network_problems(
    model: ModelProto, feed: Mapping[str, Array], precisions: Iterable[str], device: str = "cpu"
) -> list[str]:
    """What is wrong with a network at which precision; in 16 bits, the channels of its images lie last."""
    wanted, wrong = by_runtime(model, feed), []
    for precision in precisions:
        dtype = PRECISIONS[precision]
        module, found = in_torch(model, feed, dtype, channels_last=dtype is not None, device=device)
        near = NEAR[FP32] if device == "cpu" and dtype is None else WITHIN[precision]
        result = mismatch(wanted, found, near)
        wrong += [f"{precision}: {result}"] if result else []
        if dtype is not None:
            images = [buffer for buffer in module.buffers() if buffer.dim() == 4 and min(buffer.shape) > 1]
            assert {buffer.dtype for buffer in module.buffers() if buffer.is_floating_point()} == {dtype}
            assert all(buffer.is_contiguous(memory_format=torch.channels_last) for buffer in images)
    return wrong
