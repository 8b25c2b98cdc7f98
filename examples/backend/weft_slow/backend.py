"""``slow:0``: a device that computes with ONNX's reference implementation, in numpy, one request after another.

``SlowKind`` is what ``tool.toml`` registers: what ``--device slow:0`` means. Its ``SlowBackend`` opens models and
lanes, a ``SlowModel`` is a file in one segment, measured by running it once, and a ``SlowLane`` is a thread that
computes its steps. Members that they leave out have defaults in ``weft.runtime.defaults``; the protocols are in
``weft.runtime.backend`` and ``weft.runtime.device_kinds``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from weft.base.errors import InputError, ModelError
from weft.runtime.backend import (
    DeviceLane,
    Ended,
    LoadedModel,
    LoadOptions,
    Progress,
    StartedStep,
    Step,
    StepEnd,
    StepOutput,
)
from weft.runtime.defaults import BackendDefaults, LaneDefaults, ModelDefaults, StepDefaults
from weft.runtime.facets import ModelResidency, SegmentTiming
from weft.runtime.isolated.limits import WorkerLimits
from weft.runtime.tensors import DATATYPES, TensorSpec

DATATYPE_OF = {dtype: name for name, dtype in DATATYPES.items() if name != "BYTES"}


class SlowKind:
    """The devices ``slow:0`` to ``slow:9``, which all compute in this process."""

    ahead, shares, engine = 0, False, None

    def check(self, name: str) -> str | None:
        """Only ONNX is needed, which weft has; for a missing driver, raise InputError here."""
        return None

    def called(self, name: str) -> str:
        """The device with its version, for plans: a plan of another version is computed again."""
        return f"onnx.reference {onnx.__version__}"

    def open(self, names: Sequence[str], limits: WorkerLimits, memory_bytes: int | None) -> SlowBackend:
        if len(set(names)) < len(names):
            raise InputError(f"device = {','.join(names)}: name each device once")
        return SlowBackend(names, memory_bytes)


class SlowBackend(BackendDefaults):
    """Opens models for one or several devices; weft opens a lane for each of them."""

    name, platform = "reference", "onnx_reference"

    def __init__(self, names: Sequence[str], memory_bytes: int | None) -> None:
        self.device, self.labels, self.memory_bytes = ",".join(names), tuple(names), memory_bytes

    def now(self) -> int:
        return time.monotonic_ns()

    def open(
        self,
        path: Path,
        options: LoadOptions,
        cache: Path | None = None,
        say: Progress | None = None,
        *,
        learn: bool = True,
    ) -> LoadedModel:
        if options.precision != "fp32":
            raise ModelError(f"{path}: {self.device} computes in fp32 only; leave out precision")
        try:
            model = SlowModel(onnx.load(path), path.stat().st_size)
        except Exception as error:  # protobuf, ONNX and the system each raise kinds of their own
            raise ModelError(f"{path}: cannot be loaded: {error}") from error
        return model.measured(options) if learn else model

    def lane(self, index: int, *, pin: bool = False) -> SlowLane:
        return SlowLane(index)

    def close(self) -> None:
        """Do nothing: models and lanes own all resources."""


class SlowLane(LaneDefaults):
    """A thread that computes one step at a time."""

    def __init__(self, index: int) -> None:
        self._thread = ThreadPoolExecutor(1, f"slow-{index}")
        self._last: Future[None] | None = None

    def start(self, model: SlowModel, step: Step, ended: Ended) -> None:
        self._last = self._thread.submit(self._compute, model, step, ended)

    def _compute(self, model: SlowModel, step: Step, ended: Ended) -> None:
        began_ns = time.monotonic_ns()
        try:
            outputs, error = model.compute(step), None
        except Exception as problem:  # the client gets the error, and the lane goes on
            outputs, error = [], problem
        ended(StepEnd(began_ns, time.monotonic_ns(), outputs, error))

    def close(self, patience_s: float | None = None) -> bool:
        self._thread.shutdown(wait=False)
        return self._last is None or not wait([self._last], patience_s).not_done


class SlowModel(ModelDefaults):
    """A file in one segment; requests are not batched."""

    segments: tuple[str, ...] = ("whole",)
    timing = SegmentTiming((False,), learned=False)

    def __init__(self, model: onnx.ModelProto, memory_bytes: int) -> None:
        self._session = ReferenceEvaluator(model)
        weights = {tensor.name for tensor in model.graph.initializer}
        self.inputs = tuple(_spec(value) for value in model.graph.input if value.name not in weights)
        self.outputs = tuple(map(_spec, model.graph.output))
        self.residency = ModelResidency(memory_bytes)

    def measured(self, options: LoadOptions) -> SlowModel:
        """Run the model once with inputs of ones, and store the time, with which weft schedules and plans."""
        default_shapes = {spec.name: tuple(1 if size < 0 else size for size in spec.shape) for spec in self.inputs}
        shapes = default_shapes | {name: tuple(shape) for name, shape in options.shapes.items()}
        ones = {spec.name: np.ones(shapes[spec.name], DATATYPES[spec.datatype]) for spec in self.inputs}
        began_s = time.perf_counter()
        self._session.run(None, ones)
        self.timing = SegmentTiming((False,), {1: (time.perf_counter() - began_s,)}, shapes)
        return self

    def start(self, step: Step, lane: DeviceLane, ended: Ended, *, here: bool = False) -> StartedStep:
        assert isinstance(lane, SlowLane)
        lane.start(self, step, ended)
        return StepDefaults()

    def compute(self, step: Step) -> list[StepOutput]:
        """Compute the outputs of *step*, which has one part because the model is not batched."""
        (part,) = step.parts
        names = [spec.name for spec in self.outputs]
        arrays: Any = self._session.run(names, part.values)
        return [StepOutput({}, dict(zip(names, arrays, strict=True)))]

    def close(self) -> None:
        """Do nothing: the memory is freed with the object."""


def _spec(value: onnx.ValueInfoProto) -> TensorSpec:
    """The tensor of *value* in the terms of the protocol; free dimensions are -1."""
    tensor = value.type.tensor_type
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    if dtype not in DATATYPE_OF:
        raise ModelError(f"{value.name!r} is of a type that cannot be served")
    sizes = (dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim)
    return TensorSpec(value.name, DATATYPE_OF[dtype], tuple(sizes))
