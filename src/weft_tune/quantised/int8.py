"""Uniform int8 by ONNX Runtime's own quantizer: the baseline that every user has at hand.

Static quantisation in the QDQ form: 8-bit weights, 8-bit activations with ranges from calibration inputs. The result
is scored with graph optimisation off, so that every pair of nodes rounds as written; fused kernels of some processors
saturate on the way.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import onnx

from weft.base.errors import ModelError
from weft.base.files import replacing
from weft.runtime.onnxruntime_cpu.sessions import first_line, open_session
from weft.runtime.tensors import Array

_EIGHT_BITS = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)


class Int8Model(NamedTuple):
    """A quantised file and what of it is weights."""

    path: Path
    weights: int
    """How many are stored in 8 bits, and so in how many bytes."""
    scale_bytes: int
    """Of scales and zero points, those of activations among them."""

    @property
    def file_bytes(self) -> int:
        return self.path.stat().st_size


def quantise_int8(
    model: Path,
    calibration: Mapping[str, Array],
    out: Path,
    *,
    per_channel: bool = False,
    nodes: Collection[str] | None = None,
    batch: int = 64,
) -> Int8Model:
    """Write *model* in int8 to *out*.

    calibration: inputs of many samples, by name. nodes: the names of those to quantise; all that can be, without it.
    """
    try:
        with _quiet(), TemporaryDirectory() as folder:
            prepared, made = Path(folder) / "prepared.onnx", Path(folder) / "int8.onnx"
            _prepare(model, prepared)
            _quantise(prepared, made, _CalibrationReader(calibration, batch), per_channel, nodes)
            with replacing(out, ModelError) as beside:
                shutil.copyfile(made, beside)
    except ModelError:
        raise
    except Exception as error:  # the quantizer raises whatever numpy, onnx and ONNX Runtime do
        raise ModelError(f"{model}: cannot be quantised to int8: {first_line(error)}") from error
    return _described(out)


def classes(model: Path, inputs: Mapping[str, Array], *, batch: int = 256, threads: int = 1) -> Array:
    """The class a quantised file names for each sample, by the largest value of its first output."""
    session = open_session(model, threads, optimise=False)
    named = [
        session.run(None, {name: values[start : start + batch] for name, values in inputs.items()})[0].argmax(axis=-1)
        for start in range(0, _samples(inputs), batch)
    ]
    return np.concatenate(named)


def _samples(inputs: Mapping[str, Array]) -> int:
    counts = {name: len(values) for name, values in inputs.items()}
    if len(set(counts.values())) != 1:
        raise ModelError(f"inputs have {counts} samples; give each the same number")
    return next(iter(counts.values()))


class _CalibrationReader:
    """Hands out calibration inputs batch by batch, as ONNX Runtime asks for them."""

    def __init__(self, inputs: Mapping[str, Array], batch: int) -> None:
        starts = range(0, _samples(inputs), batch)
        self._batches = iter([{name: each[start : start + batch] for name, each in inputs.items()} for start in starts])

    def get_next(self) -> dict[str, Array] | None:
        return next(self._batches, None)

    def __iter__(self) -> _CalibrationReader:
        return self

    def __next__(self) -> dict[str, Array]:
        return next(self._batches)


def _prepare(model: Path, prepared: Path) -> None:
    """Shapes and folded constants, without which the quantizer misses layers; its symbolic part needs more packages."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    quant_pre_process(str(model), str(prepared), skip_symbolic_shape=True)


def _quantise(
    prepared: Path, out: Path, reader: _CalibrationReader, per_channel: bool, nodes: Collection[str] | None
) -> None:
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    quantize_static(
        str(prepared), str(out), reader, quant_format=QuantFormat.QDQ, per_channel=per_channel,
        weight_type=QuantType.QInt8, activation_type=QuantType.QUInt8,
        nodes_to_quantize=None if nodes is None else sorted(nodes),
    )  # fmt: skip


def _described(path: Path) -> Int8Model:
    graph = onnx.load(str(path)).graph
    pairs = [node for node in graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    parameters = {name for node in pairs for name in node.input[1:]}
    weights = scale_bytes = 0
    for each in graph.initializer:
        if each.name in parameters:
            scale_bytes += onnx.numpy_helper.to_array(each).nbytes
        elif each.data_type in _EIGHT_BITS:
            weights += int(np.prod(each.dims, dtype=np.int64))
    return Int8Model(path, weights, scale_bytes)


@contextmanager
def _quiet() -> Iterator[None]:
    """The quantizer gives advice through the root logger, which adds a handler for good, and on the console."""
    root: Any = logging.getLogger()
    handlers, before = list(root.handlers), logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        logging.disable(before)
        root.handlers[:] = handlers
