"""Programs of ``torch.export`` on a device: segments over weights that can be evicted, and their preparation.

Torch runs the nodes of a segment one by one, once, while they are captured; from then on the device replays them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from weft.base.errors import ModelError
from weft.runtime.backend import LoadOptions
from weft.runtime.cuda.device import Device, Tensor
from weft.runtime.cuda.model import DeviceModel
from weft.runtime.cuda.pieces import OpenPieces, random_batch, unseen
from weft.runtime.cuda.preparation import LARGEST_UNASKED, ModelPreparation
from weft.runtime.cuda.segments import DeviceSegment, DeviceWeights, Runnable, StillCopies, UncapturedTensors
from weft.runtime.cuda.torch_program import DATATYPES, ProgramTensor, TorchProgram, read_program
from weft.runtime.cuda.torch_types import NUMBERED, PRECISIONS, as_torch
from weft.runtime.onnxruntime_cpu.allowance import Allowance
from weft.runtime.onnxruntime_cpu.model import Blueprint, SegmentSpec
from weft.runtime.onnxruntime_cpu.model_timing import unbatchable
from weft.runtime.onnxruntime_cpu.sessions import first_line, warm_shapes
from weft.runtime.rows import Verdict
from weft.runtime.tensors import Array, TensorSpec


def numbered(tensor: Any) -> int:
    """ONNX's number of a tensor's type; ``ModelError`` if ONNX has none."""
    if tensor.dtype not in NUMBERED:
        raise ModelError(f"it computes with {tensor.dtype}, which cannot be kept between segments")
    return NUMBERED[tensor.dtype]


def as_channels_last(tensor: Tensor) -> Any:
    """A torch tensor of the same shape over the memory of *tensor*, in which the channels come last."""
    value = as_torch(tensor)
    rows, channels, height, width = value.shape
    return value.view(rows, height, width, channels).permute(0, 3, 1, 2)


class PieceRunner(Protocol):
    """The members of a program that segments use."""

    device: Any
    channels_last: frozenset[str]
    """Tensors whose channels come last in memory."""

    def piece(self, start: int, end: int) -> Any:
        """The nodes from one cut to another."""
        ...

    def run(self, piece: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        """Run a piece on these values; returns its outputs by name."""
        ...


class _BoundProgram(NamedTuple):
    """A piece bound to the memory that it reads and writes."""

    program: PieceRunner
    piece: Any
    sources: Mapping[str, Any]  # its inputs by name
    targets: Mapping[str, Any]  # the memory of its outputs, by name

    def run(self) -> None:
        with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
            for name, result in self.program.run(self.piece, self.sources).items():
                self.targets[name].copy_(result)


class ProgramSegment:
    """A piece of a program."""

    copies = False

    def __init__(self, program: PieceRunner, spec: SegmentSpec) -> None:
        assert spec.nodes is not None
        self.spec, self._program, self._piece = spec, program, program.piece(*spec.nodes)

    def open(self) -> None:
        """Do nothing: the whole file was read."""

    def new_instance(self, device: Device) -> DeviceSegment:
        return self  # it has no session that other shapes could disturb

    def specialised(self, tensors: Mapping[str, Tensor], types: Mapping[str, int]) -> DeviceSegment:
        raise StillCopies("torch decides where it computes")

    def bind(self, tensors: Mapping[str, Tensor], types: Mapping[str, int]) -> Runnable:
        sources = {name: self._view(name, tensors[name]) for name in self.spec.inputs}
        targets = {name: self._view(name, tensors[name]) for name in self.spec.outputs}
        return self._bind_views(sources, targets)

    def _bind_views(self, sources: Mapping[str, Any], targets: Mapping[str, Any]) -> Runnable:
        return _BoundProgram(self._program, self._piece, sources, targets)

    def _view(self, name: str, tensor: Tensor) -> Any:
        """A tensor between segments as torch computed it: with the channels last in memory, if they were."""
        return as_channels_last(tensor) if name in self._program.channels_last else as_torch(tensor)

    def from_arrays(self, arrays: Mapping[str, Array]) -> UncapturedTensors:
        device = self._program.device
        return {name: torch.from_numpy(np.ascontiguousarray(array)).to(device) for name, array in arrays.items()}

    def run_uncaptured(self, values: Mapping[str, Any]) -> UncapturedTensors:
        with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return self._program.run(self._piece, values)

    def layouts(self, values: Mapping[str, Any], names: Sequence[str]) -> dict[str, tuple[tuple[int, ...], int]]:
        return {name: (tuple(values[name].shape), numbered(values[name])) for name in names}

    def to_array(self, value: Any) -> Array:
        array: Array = value.float().cpu().numpy() if value.dtype == torch.bfloat16 else value.cpu().numpy()
        return array


def _place_weights(program: TorchProgram, device: Device) -> DeviceWeights:
    """Move the weights of a program to a device, into memory that can be evicted; the program uses them from now on."""
    weights, placed = DeviceWeights(device), {name: program.cast(weight) for name, weight in program.weights.items()}
    # With 16 bits, GPUs compute convolutions faster if channels come last.
    channels_last = program.spatial() if program.half and device.kind != "cpu" else frozenset()
    shapes = {name: tuple(weight.shape) for name, weight in placed.items()}
    # Memory in the order that convolutions want, seen in torch's order of axes.
    shapes |= {name: tuple(placed[name].permute(0, 2, 3, 1).shape) for name in channels_last}
    tensors = weights.allocate([(shapes[name], numbered(weight)) for name, weight in placed.items()]) if placed else []
    for name, tensor in zip(placed, tensors, strict=True):
        target = as_torch(tensor).permute(0, 3, 1, 2) if name in channels_last else as_torch(tensor)
        target.copy_(placed[name])
        placed[name] = target
    device.finish()
    program.hold(placed)
    return weights


def torch_device_name(device: Device) -> str:
    """Torch's name of a device, such as ``cuda:0``."""
    return "cpu" if device.kind == "cpu" else f"{device.kind}:{device.index}"


class ProgramFile:
    """A program while it is prepared."""

    def __init__(self, device: Device, path: Path, options: LoadOptions, folder: Path, allowance: Allowance) -> None:
        """folder: unused; a program is read again from its own file."""
        self.device, self.path, self.options, self.allowance = device, path, options, allowance

    def built(self) -> DeviceModel:
        """Read, cut, capture and measure the program as the device will serve it."""
        free_bytes = self.device.memory()[0]
        if self.options.exits:
            raise ModelError("exits are for ONNX files; export it as one")
        exported = read_program(self.path)
        host_program = TorchProgram(exported, "cpu")
        blueprint = self._read_blueprint(host_program)
        expected = self._expected_outputs(host_program, unseen(blueprint))
        self._move_to_device(exported, random_batch(blueprint, 1))
        preparation = ModelPreparation(self.device, self, self.options, self.allowance)
        return in_torch(preparation.built(blueprint, self._judge_rows(blueprint), expected, free_bytes))

    def reopened(self, blueprint: Blueprint) -> DeviceModel:
        """The model of a blueprint from the cache."""
        free_bytes = self.device.memory()[0]
        self._move_to_device(read_program(self.path), random_batch(blueprint, 1))
        return in_torch(self.opened(blueprint).assembled(free_bytes))

    def clear(self, blueprint: Blueprint) -> None:
        """Do nothing: no files were written."""

    def _read_blueprint(self, program: TorchProgram) -> Blueprint:
        """The blueprint of the program, without segments; ``ModelError`` if it cannot be served."""
        inputs, outputs = specs(program)
        shapes, missing = warm_shapes(program.inputs, self.options.shapes)
        if missing:
            raise ModelError(f"give shapes for the free dimensions of {', '.join(missing)}")
        self._bound_rows(program)
        return Blueprint(
            inputs=inputs, outputs=outputs, segments=(), warm_shapes=shapes, values=dict(self.options.values)
        )

    def _bound_rows(self, program: TorchProgram) -> None:
        """Limit batches to the rows that *program* was exported for; ``ModelError`` if the options ask for more."""
        exported_rows, requested = program.most_rows(), self.options.max_batch
        if exported_rows is None:
            return
        if requested is not None and requested > exported_rows:
            raise ModelError(f"max_batch is {requested}, but it was exported for at most {exported_rows} rows")
        if requested is None and exported_rows < LARGEST_UNASKED:
            self.options = dataclasses.replace(self.options, max_batch=exported_rows)

    def _expected_outputs(self, program: TorchProgram, feed: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs of the unconverted program on the CPU."""
        self.allowance.check()
        try:
            return run_on_host(program, feed)
        except Exception as error:  # operators raise whatever they like
            raise ModelError(f"it fails on made-up inputs: {first_line(error)}") from error

    def _move_to_device(self, exported: Any, feed: Mapping[str, Array]) -> None:
        """Move the program to the device, and run it there on *feed* to observe the tensors between its nodes."""
        self.program = TorchProgram(exported, torch_device_name(self.device), PRECISIONS[self.options.precision])
        self.weights = _place_weights(self.program, self.device)
        tensors = {name: torch.from_numpy(array).to(self.program.device) for name, array in feed.items()}
        try:
            with torch.inference_mode():
                self._sizes_bytes, self._guesses_s = self.program.observed(tensors)
        except Exception as error:  # operators raise whatever they like
            precision = self.options.precision
            raise ModelError(f"it fails on {self.device.name} in {precision}: {first_line(error)}") from error
        self.device.finish()

    def _judge_rows(self, blueprint: Blueprint) -> Verdict:
        """Whether rows may be computed together; only the options can state that, as programs are not analysed."""
        reason = unbatchable(blueprint, blueprint.warm_shapes or {})
        if reason is None and not self.options.independent_rows and self.options.max_batch != 1:
            reason = 'whether rows depend on one another is not seen in programs; say rows = "independent" if not'
        return Verdict(reason)

    # The members of ``Divisible``

    @property
    def half(self) -> bool:
        return self.program.half

    def guessed_s(self) -> list[float]:
        return self._guesses_s

    def crossing(self) -> list[int | None]:
        return self.program.crossing(self._sizes_bytes)

    def whole_because(self) -> str | None:
        return "has a single node" if len(self.program.nodes) < 2 else None

    def in_pieces(self, blueprint: Blueprint, cuts: Sequence[int]) -> Blueprint:
        ends = [0, *cuts, len(self.program.nodes)]
        return blueprint.model_copy(update={"segments": tuple(map(self._segment, ends, ends[1:]))})

    def _segment(self, start: int, end: int) -> SegmentSpec:
        """The description of the segment from cut *start* to cut *end*."""
        piece, names = self.program.piece(start, end), [node.name for node in self.program.nodes[start:end]]
        name = f"{names[0]}..{names[-1]}" if len(names) > 1 else "".join(names)
        return SegmentSpec(name=name, inputs=piece.inputs, outputs=piece.outputs, nodes=(start, end), steady=True)

    def opened(self, blueprint: Blueprint) -> OpenPieces:
        segments = {spec: ProgramSegment(self.program, spec) for spec in blueprint.segments}
        return OpenPieces(self.device, blueprint, segments, self.weights)


def in_torch(model: DeviceModel) -> DeviceModel:
    """Record that torch runs the model, operator by operator."""
    model.timing = dataclasses.replace(model.timing, engine="torch")
    return model


def run_on_host(program: TorchProgram, feed: Mapping[str, Array]) -> dict[str, Array]:
    """Run a program on the CPU; returns its outputs."""
    program.hold({name: weight.cpu() for name, weight in program.weights.items()})
    tensors = {name: torch.from_numpy(array) for name, array in feed.items()}
    with torch.inference_mode():
        outputs = program.run(program.piece(0, len(program.nodes)), tensors)
    return {name: output.numpy() for name, output in outputs.items()}


def specs(program: TorchProgram) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """The inputs and the outputs of a program, as clients see them."""
    return tuple(map(_spec, program.inputs)), tuple(map(_spec, program.outputs))


def _spec(tensor: ProgramTensor) -> TensorSpec:
    shape = tuple(size if isinstance(size, int) else -1 for size in tensor.shape)
    return TensorSpec(tensor.name, DATATYPES[tensor.dtype], shape)
