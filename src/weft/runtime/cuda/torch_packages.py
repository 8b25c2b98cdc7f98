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
from weft.runtime.cuda.packages import WEIGHTS, Manifest, Package, StoredWeight
from weft.runtime.cuda.segments import DeviceSegment, DeviceWeights, Runnable, StillCopies, UncapturedTensors
from weft.runtime.cuda.torch_files import as_channels_last, numbered, torch_device_name
from weft.runtime.cuda.torch_modules import Shapes
from weft.runtime.cuda.torch_runner import PackageRunner
from weft.runtime.cuda.torch_types import TYPES, as_torch
from weft.runtime.onnxruntime_cpu.model import SegmentSpec
from weft.runtime.tensors import Array


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


def open_package(folder: Path, device: str) -> PackageRunner:
    """Load the package in *folder* for a device, as torch calls it."""
    (code,) = folder.glob("*.so")
    return PackageRunner(code, device)


def open_packages(
    device: Device, folder: Path, manifest: Manifest, converted: Callable[[Shapes], Any] | None = None
) -> list[PackagedSegment]:
    """The pieces of the model in *folder*, with the packages of all batch sizes, over one copy of its weights.

    converted: makes the torch module of a model in one piece for other shapes; None: refuse these.
    """
    weights = DeviceWeights(device)
    tensors = _upload_weights(device, folder, manifest, weights)
    segments = []
    for number, names in enumerate(manifest.pieces):
        spec = SegmentSpec(
            name=f"piece {number}" if len(manifest.pieces) > 1 else "whole",
            inputs=names.inputs, outputs=names.outputs, steady=True,
        )  # fmt: skip
        segment = PackagedSegment(device, spec, weights, manifest, converted)
        for rows, packages in manifest.packages.items():
            segment.add(folder / manifest.folder(rows, number), packages[number], tensors)
        segments.append(segment)
    return segments


def _upload_weights(device: Device, folder: Path, manifest: Manifest, weights: DeviceWeights) -> dict[str, Any]:
    """Digest -> weight, in memory of the device that can be evicted (*weights*)."""
    stored, content = manifest.weights, _map_file(folder / WEIGHTS)
    sizes = {digest: _bytes_of(weight) for digest, weight in stored.items()}
    memories = weights.allocate([((size,), ElementType.UINT8) for size in sizes.values()]) if sizes else []
    tensors = {}
    for (digest, weight), memory in zip(stored.items(), memories, strict=True):
        device.fill(memory, np.array(content[weight.offset : weight.offset + sizes[digest]]))
        tensors[digest] = as_torch(memory).view(TYPES[weight.kind]).as_strided(weight.shape, weight.strides)
    device.finish()
    return tensors


class PackagedSegment:
    """A piece of a model, or all of it, compiled for some batch sizes.

    Batches of other sizes run in parts of compiled sizes; for other shapes, torch runs a whole model step by step. A
    model is only cut if nothing but its batch size is free.
    """

    copies = False

    def __init__(
        self,
        device: Device,
        spec: SegmentSpec,
        weights: DeviceWeights,
        manifest: Manifest,
        converted: Callable[[Shapes], Any] | None = None,
    ) -> None:
        """weights: of the whole model. manifest: of its packages. converted: as for ``open_packages``."""
        self.spec, self.weights, self._device, self._converted = spec, weights, device, converted
        self._channels_last, self._batched = frozenset(manifest.channels_last), manifest.batched
        self._packages: dict[tuple[tuple[int, ...], ...], Any] = {}  # shapes of the inputs -> the package for them
        self._module: tuple[Any, Any] = (None, None)
        """The last shapes without a package, and the module that was made for them."""

    def add(self, folder: Path, package: Package, weights: Mapping[str, Any]) -> None:
        """Load the package in *folder*; *weights*: digest -> tensor."""
        opened = open_package(folder, torch_device_name(self._device))
        # The compiler renamed the weights.
        names = opened.weight_names().items()
        opened.use_weights({name: weights[package.weights[original]] for name, original in names})
        self._packages[package.shapes] = opened

    def _runner(self, values: Mapping[str, Any]) -> Callable[[list[Any]], Sequence[Any]]:
        """The function that computes outputs from inputs of the shapes of *values*."""
        shapes = {name: tuple(values[name].shape) for name in self.spec.inputs}
        key = tuple(shapes.values())
        if key in self._packages:
            run: Callable[[list[Any]], Sequence[Any]] = self._packages[key].run
            return run
        if self._batched and key and all(sizes[1:] == known[1:] for sizes, known in zip(key, self._known, strict=True)):
            return self._run_parts
        if self._converted is None:
            raise ModelError(f"it is not compiled for inputs of {', '.join(map(str, map(list, key)))}")
        if self._module[0] != key:
            self.use(shapes, self._converted(shapes))
        module = self._module[1]
        return lambda inputs: tuple(module(*inputs))

    def use(self, shapes: Shapes, module: Any) -> None:
        """Run inputs of *shapes* by *module*; only the last module is kept, as each holds a copy of the weights."""
        key = tuple(tuple(shapes[name]) for name in self.spec.inputs)
        self._module = key, module.to(torch_device_name(self._device))

    @property
    def _known(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the inputs at one of the compiled batch sizes."""
        return next(iter(self._packages))

    def _run_parts(self, inputs: list[Any]) -> Sequence[Any]:
        """Run a batch of a size that is not compiled in parts of sizes that are, the last part padded with zeros."""
        by_rows = {shapes[0][0]: package for shapes, package in sorted(self._packages.items())}
        rows, start, results = len(inputs[0]), 0, []
        while start < rows:
            size = next((size for size in by_rows if size >= rows - start), max(by_rows))
            count = min(size, rows - start)
            part = [
                torch.cat((tensor[start : start + count], tensor.new_zeros((size - count, *tensor.shape[1:]))))
                for tensor in inputs
            ]
            outputs = by_rows[size].run(self._in_layout(part))
            results.append([output[:count] for output in outputs])
            start += count
        return [torch.cat(outputs) for outputs in zip(*results, strict=True)]

    def _in_layout(self, inputs: Sequence[Any]) -> list[Any]:
        """Tensors as the compiler assumed that they are in memory."""
        return [
            tensor.contiguous(
                memory_format=torch.channels_last if name in self._channels_last else torch.contiguous_format
            )
            for name, tensor in zip(self.spec.inputs, inputs, strict=True)
        ]

    def open(self) -> None:
        """Do nothing: packages are loaded when they are added."""

    def new_instance(self, device: Device) -> DeviceSegment:
        return self  # each batch size has a package of its own

    def specialised(self, tensors: Mapping[str, Tensor], types: Mapping[str, int]) -> DeviceSegment:
        raise StillCopies("the compiler decides where it computes")

    def bind(self, tensors: Mapping[str, Tensor], types: Mapping[str, int]) -> Runnable:
        sources = [self._view(name, tensors[name]) for name in self.spec.inputs]
        targets = [self._view(name, tensors[name]) for name in self.spec.outputs]
        return _BoundPackage(self._runner(tensors), sources, targets)

    def _view(self, name: str, tensor: Tensor) -> Any:
        """A tensor between pieces as the compiler assumed that it is in memory."""
        return as_channels_last(tensor) if name in self._channels_last else as_torch(tensor)

    def from_arrays(self, arrays: Mapping[str, Array]) -> UncapturedTensors:
        device = torch_device_name(self._device)
        return {name: torch.from_numpy(np.array(array)).to(device) for name, array in arrays.items()}

    def run_uncaptured(self, values: Mapping[str, Any]) -> UncapturedTensors:
        with torch.inference_mode(), float32_is_float32():
            results = self._runner(values)(self._in_layout([values[name] for name in self.spec.inputs]))
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
