"""A compiled model on a device: the packages of its batch sizes, over one copy of its weights (``packages``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from weft.base.errors import ModelError
from weft.models.element_types import ElementType
from weft.runtime.cuda.device import Device, Tensor
from weft.runtime.cuda.packages import WEIGHTS, Manifest, StoredWeight
from weft.runtime.cuda.segments import DeviceSegment, DeviceWeights, Runnable, StillCopies, UncapturedTensors
from weft.runtime.cuda.torch_files import numbered, torch_device_name
from weft.runtime.cuda.torch_types import TYPES, as_torch
from weft.runtime.onnxruntime_cpu.model import SegmentSpec
from weft.runtime.tensors import Array

Shapes = Mapping[str, Sequence[int]]
RUNS_AT_A_TIME = 1
"""How many runs of a package may overlap."""


class _BoundPackage(NamedTuple):
    """A package bound to the memory that it reads and writes."""

    run_package: Callable[[list[Any]], Sequence[Any]]
    sources: Sequence[Any]  # its inputs in order
    targets: Sequence[Any]  # the memory of its outputs, in order

    def run(self) -> None:
        with torch.inference_mode(), float32_is_float32():
            for target, result in zip(self.targets, self.run_package(list(self.sources)), strict=True):
                target.copy_(result)


def float32_is_float32() -> Any:
    """A context in which cuDNN's convolutions do not round to TF32, and choose the fastest algorithm."""
    return torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False)


def open_package(folder: Path, device: int) -> Any:
    """Load the package in *folder* for GPU number *device* (-1: the CPU).

    torch's loader of packages is not used: it unpacks files into ``/tmp``, where a worker may not write. Runs are not
    synchronised between threads: only one thread runs the package, and the events would not survive a capture.
    """
    (code,) = folder.glob("*.so")
    if device < 0:
        return torch._C._aoti.AOTIModelContainerRunnerCpu(str(code), RUNS_AT_A_TIME)
    name, single_threaded = f"cuda:{device}", True
    return torch._C._aoti.AOTIModelContainerRunnerCuda(str(code), RUNS_AT_A_TIME, name, str(folder), single_threaded)


class PackagedSegment:
    """A whole model, compiled for some batch sizes; torch runs it step by step for other shapes."""

    copies = False

    def __init__(
        self, device: Device, folder: Path, manifest: Manifest, converted: Callable[[Shapes], Any] | None = None
    ) -> None:
        """folder, manifest: of its packages. converted: makes the torch module for other shapes; None: refuse them."""
        self.spec = SegmentSpec(name="whole", inputs=manifest.inputs, outputs=manifest.outputs, steady=True)
        self.weights = DeviceWeights(device)
        self._device, self._folder, self._manifest, self._converted = device, folder, manifest, converted
        self._tensors = self._upload_weights()
        self._packages: dict[tuple[tuple[int, ...], ...], Any] = {}  # shapes of the inputs -> the package for them
        self._module: tuple[Any, Any] = (None, None)
        """The last shapes without a package, and the module that was made for them."""

    def _upload_weights(self) -> dict[str, Any]:
        """The weights in memory of the device that can be evicted, by digest."""
        stored, content = self._manifest.weights, _map_file(self._folder / WEIGHTS)
        sizes = {digest: _bytes_of(weight) for digest, weight in stored.items()}
        tensors = self.weights.allocate([((size,), ElementType.UINT8) for size in sizes.values()]) if sizes else []
        weights = {}
        for (digest, weight), tensor in zip(stored.items(), tensors, strict=True):
            self._device.fill(tensor, np.array(content[weight.offset : weight.offset + sizes[digest]]))
            weights[digest] = as_torch(tensor).view(TYPES[weight.kind]).as_strided(weight.shape, weight.strides)
        self._device.finish()
        return weights

    def add(self, rows: int, shapes: Shapes) -> None:
        """Load the package of a batch size; *shapes*: input -> its shape."""
        index = self._device.index if self._device.kind == "cuda" else -1
        package = open_package(self._folder / self._manifest.folder(rows), index)
        # The compiler renamed the weights; *names*: name in the compiled code -> in the model.
        digests, names = self._manifest.constants[rows], package.get_constant_names_to_original_fqns()
        constants = {name: self._tensors[digests[original]] for name, original in names.items()}
        in_use, check_all, not_copied = False, True, True
        package.update_constant_buffer(constants, in_use, check_all, not_copied)
        self._packages[self._key(shapes)] = package

    def _key(self, shapes: Shapes) -> tuple[tuple[int, ...], ...]:
        """The shapes of the inputs, in order."""
        return tuple(tuple(shapes[name]) for name in self.spec.inputs)

    def _package(self, values: Mapping[str, Any]) -> Callable[[list[Any]], Sequence[Any]]:
        """The function that computes outputs from inputs of the shapes of *values*: a package, or a torch module."""
        shapes = {name: tuple(values[name].shape) for name in self.spec.inputs}
        key = self._key(shapes)
        if key in self._packages:
            run: Callable[[list[Any]], Sequence[Any]] = self._packages[key].run
            return run
        if self._converted is None:
            raise ModelError(f"it is not compiled for inputs of {', '.join(map(str, map(list, key)))}")
        if self._module[0] != key:  # only the last module is kept, as each holds a copy of the weights
            self._module = key, self._converted(shapes).to(torch_device_name(self._device))
        module = self._module[1]
        return lambda inputs: tuple(module(*inputs))

    def open(self) -> None:
        """Do nothing: packages are loaded when they are added."""

    def new_instance(self, device: Device) -> DeviceSegment:
        return self  # each batch size has a package of its own

    def specialised(self, tensors: Mapping[str, Tensor], types: Mapping[str, int]) -> DeviceSegment:
        raise StillCopies("the compiler decides where it computes")

    def bind(self, tensors: Mapping[str, Tensor], types: Mapping[str, int]) -> Runnable:
        sources = [as_torch(tensors[name]) for name in self.spec.inputs]
        targets = [as_torch(tensors[name]) for name in self.spec.outputs]
        return _BoundPackage(self._package(tensors), sources, targets)

    def from_arrays(self, arrays: Mapping[str, Array]) -> UncapturedTensors:
        device = torch_device_name(self._device)
        return {name: torch.from_numpy(np.array(array)).to(device) for name, array in arrays.items()}

    def run_uncaptured(self, values: Mapping[str, Any]) -> UncapturedTensors:
        with torch.inference_mode(), float32_is_float32():
            results = self._package(values)([values[name] for name in self.spec.inputs])
        return dict(zip(self.spec.outputs, results, strict=True))

    def layouts(self, values: Mapping[str, Any], names: Sequence[str]) -> dict[str, tuple[tuple[int, ...], int]]:
        return {name: (tuple(values[name].shape), numbered(values[name])) for name in names}

    def to_array(self, value: Any) -> Array:
        array: Array = value.cpu().numpy()
        return array


def _map_file(path: Path) -> Any:
    """The bytes of a file, mapped; empty if there is no such file."""
    return np.memmap(path, np.uint8, "r") if path.is_file() and path.stat().st_size else np.empty(0, np.uint8)


def _bytes_of(weight: StoredWeight) -> int:
    return prod(weight.shape) * int(TYPES[weight.kind].itemsize)
