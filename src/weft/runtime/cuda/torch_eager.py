"""ONNX files for a device on which ONNX Runtime cannot run: torch runs them step by step until they are compiled.

A model stays in one piece. It is captured at each batch size, over weights that all batch sizes share.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from weft.base.errors import ModelError
from weft.models.element_types import ElementType
from weft.runtime.cuda.device import Device
from weft.runtime.cuda.model import DeviceModel
from weft.runtime.cuda.onnx_files import NO_SESSIONS, OnnxFile
from weft.runtime.cuda.packages import Manifest
from weft.runtime.cuda.pieces import OpenPieces
from weft.runtime.cuda.precision import FP32
from weft.runtime.cuda.preparation import ModelPreparation, Unfit
from weft.runtime.cuda.segments import DeviceWeights
from weft.runtime.cuda.torch_engine import WITHIN
from weft.runtime.cuda.torch_files import in_torch
from weft.runtime.cuda.torch_modules import Shapes
from weft.runtime.cuda.torch_onnx import OnnxModule, conversion
from weft.runtime.cuda.torch_packages import PackagedSegment
from weft.runtime.cuda.torch_types import NUMBERED, as_torch
from weft.runtime.onnxruntime_cpu.model import Blueprint, SegmentSpec
from weft.runtime.own_folder import LOCK

REMARK = f"runs in torch, step by step, until it is compiled: {NO_SESSIONS}"


class EagerModule(NamedTuple):
    """A torch module in the place of a package."""

    module: OnnxModule

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        outputs: Sequence[Any] = self.module(*inputs)
        return outputs


class EagerSegment(PackagedSegment):
    """A model that torch runs step by step; each batch size has a module of its own, all have the same weights."""

    def __init__(self, device: Device, spec: SegmentSpec, converted: Callable[[Shapes], Any]) -> None:
        """converted: makes the torch module for inputs of given shapes."""
        super().__init__(device, spec, DeviceWeights(device), Manifest(pieces=()), converted)
        self._tensors: dict[str, Any] = {}
        """Digest of a weight's content -> the weight on the device."""

    def bind(self, tensors: Mapping[str, Any], types: Mapping[str, int]) -> Any:
        shapes = {name: tuple(tensors[name].shape) for name in self.spec.inputs}
        if (key := tuple(shapes.values())) not in self._packages:  # kept, as captured graphs read its weights
            assert self._converted is not None
            # the run that showed the shapes of the outputs has made the module
            module = self._module[1] if self._module[0] == key else self._converted(shapes)
            self._packages[key], self._module = EagerModule(self._placed(module)), (None, None)
        return super().bind(tensors, types)

    def _placed(self, module: OnnxModule) -> OnnxModule:
        """The module with its weights in memory of the device that can be evicted."""
        buffers = {name: buffer.detach().cpu() for name, buffer in module.named_buffers()}
        digests = {name: _digest(buffer) for name, buffer in buffers.items()}
        new = {digest: buffers[name] for name, digest in digests.items() if digest not in self._tensors}
        if new:
            sizes = [((buffer.numel() * buffer.element_size(),), ElementType.UINT8) for buffer in new.values()]
            for (digest, buffer), memory in zip(new.items(), self.weights.allocate(sizes), strict=True):
                target = as_torch(memory).view(buffer.dtype).as_strided(buffer.shape, buffer.stride())
                target.copy_(buffer)
                self._tensors[digest] = target
            self._device.finish()
        for name, digest in digests.items():
            setattr(module, name, self._tensors[digest])
        return module


def _digest(tensor: Any) -> str:
    """A digest of a tensor's type, layout and content; its elements lie without gaps in memory."""
    content = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    layout = (NUMBERED[tensor.dtype], tuple(tensor.shape), tuple(tensor.stride()))
    return hashlib.sha256(repr(layout).encode() + content.tobytes()).hexdigest()


@dataclass(slots=True)
class EagerOnnxFile(OnnxFile):
    """An ONNX file while it is prepared for a device without ONNX Runtime."""

    segment: EagerSegment | None = None
    """The model, once it was opened."""
    first_module: tuple[Shapes, OnnxModule] | None = None
    """The module for inputs of these shapes, if it was made to see whether torch can run the model."""

    def built(self) -> DeviceModel:
        model = OnnxFile.built(self)
        return in_torch(model)

    def reopened(self, blueprint: Blueprint) -> DeviceModel:
        free_bytes = self.device.memory()[0]
        return in_torch(self.opened(blueprint).assembled(free_bytes))

    def onnx_preparation(self, blueprint: Blueprint) -> ModelPreparation:
        """The preparation of the model to run in torch; ``Unfit`` if torch cannot run it."""
        if self.exits or blueprint.tasks:
            what = "exits" if self.exits else "stitched models"
            raise Unfit(f"{what} need ONNX Runtime on the device: {NO_SESSIONS}")
        shapes = blueprint.warm_shapes or {}
        try:
            self.first_module = shapes, conversion(self.path, self.options.precision)(shapes)
        except ModelError as error:
            raise Unfit(f"{error}: {NO_SESSIONS}") from error
        self.half = self.options.precision != FP32
        return ModelPreparation(self.device, self, self.options, self.allowance, remarks=[REMARK], within=WITHIN)

    # The members of ``Divisible``

    def guessed_s(self) -> list[float]:
        return [1.0]

    def crossing(self) -> list[int | None]:
        return [0, 0]

    def whole_because(self) -> str | None:
        return "is cut when it is compiled"

    def in_pieces(self, blueprint: Blueprint, cuts: Sequence[int]) -> Blueprint:
        inputs, outputs = (tuple(spec.name for spec in specs) for specs in (blueprint.inputs, blueprint.outputs))
        whole = SegmentSpec(name="whole", inputs=inputs, outputs=outputs, nodes=(0, 1), steady=True)
        return blueprint.model_copy(update={"segments": (whole,)})

    def opened(self, blueprint: Blueprint) -> OpenPieces:
        (spec,) = blueprint.segments
        if self.segment is None:
            self.segment = EagerSegment(self.device, spec, conversion(self.path, self.options.precision))
            if self.first_module is not None:
                self.segment.use(*self.first_module)
        return OpenPieces(self.device, blueprint, {spec: self.segment}, self.segment.weights)

    def clear(self, blueprint: Blueprint) -> None:
        """Remove everything from the folder: the model is read from its own file."""
        for path in self.folder.iterdir():
            if path.name != LOCK:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
