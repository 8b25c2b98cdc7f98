"""The interface of a kind of model for GPUs, ``DeviceFile``, and the parts of this engine for tools that implement one.

A tool registers its kind in the section ``model_kinds`` of its ``tool.toml``; the target is an ``OpensDeviceFile``. The
names below are what such a target may use; those that need torch are in ``torch_files`` and ``torch_types``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from weft.runtime.backend import LoadOptions
from weft.runtime.cuda.device import Device, Tensor, as_array, lacks_memory
from weft.runtime.cuda.model import DeviceModel
from weft.runtime.cuda.node_costs import guess_s
from weft.runtime.cuda.onnx_files import OnnxFile
from weft.runtime.cuda.pieces import OpenPieces, random_batch
from weft.runtime.cuda.precision import FP16, FP32, difference, remark
from weft.runtime.cuda.preparation import LARGEST_UNASKED, WRONG, ModelPreparation, Unfit
from weft.runtime.cuda.rounds import SHAPES
from weft.runtime.cuda.segments import DeviceSegment, DeviceWeights, Runnable
from weft.runtime.onnxruntime_cpu.allowance import Allowance, OutOfTime
from weft.runtime.onnxruntime_cpu.model import Blueprint, SegmentSpec
from weft.runtime.onnxruntime_cpu.sessions import first_line, open_model
from weft.runtime.onnxruntime_cpu.whole import named_exits, whole_blueprint, with_tasks

__all__ = [
    "FP16",
    "FP32",
    "LARGEST_UNASKED",
    "SHAPES",
    "WRONG",
    "Allowance",
    "Blueprint",
    "Device",
    "DeviceFile",
    "DeviceModel",
    "DeviceSegment",
    "DeviceWeights",
    "ModelPreparation",
    "OnnxFile",
    "OpenPieces",
    "OpensDeviceFile",
    "OutOfTime",
    "Runnable",
    "SegmentSpec",
    "Tensor",
    "Unfit",
    "as_array",
    "difference",
    "first_line",
    "guess_s",
    "lacks_memory",
    "named_exits",
    "open_model",
    "random_batch",
    "remark",
    "whole_blueprint",
    "with_tasks",
]  # fmt: skip


class DeviceFile(Protocol):
    """A file of some kind while it is prepared for a device; ``device.lane_context()`` is entered around every call."""

    def built(self) -> DeviceModel:
        """Cut, capture and measure the model; raises ``Unfit`` if the device cannot run it."""
        ...

    def reopened(self, blueprint: Blueprint) -> DeviceModel:
        """The model of a blueprint that ``built`` returned earlier; the files that it wrote are in the folder."""
        ...

    def clear(self, blueprint: Blueprint) -> None:
        """Remove the files from the folder that ``reopened`` does not need."""
        ...


class OpensDeviceFile(Protocol):
    """The target of a registered kind: a class or a function that returns a ``DeviceFile``."""

    def __call__(
        self,
        device: Device,
        path: Path,
        options: LoadOptions,
        folder: Path,
        allowance: Allowance,
        *,
        learn: bool = True,
    ) -> DeviceFile:
        """Open a file.

        folder: where files of the prepared model are, or will be. learn: False: reuse what another file has on the
        device, or raise ``NotLearned``; only passed to kinds that register ``takes_over = true``.
        """
        ...


def open_onnx_file(device: Device, path: Path, options: LoadOptions, folder: Path, allowance: Allowance) -> OnnxFile:
    """The file for ONNX Runtime, or where that cannot run on the device, for torch."""
    if device.runs_sessions:
        return OnnxFile(device, path, options, folder, allowance)
    from weft.runtime.cuda.torch_eager import EagerOnnxFile  # torch takes long to import

    return EagerOnnxFile(device, path, options, folder, allowance)
