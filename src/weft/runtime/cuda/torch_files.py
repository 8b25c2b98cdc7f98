"""Programs of ``torch.export`` on a device: their segments over weights that can leave, and how one is prepared.

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
from weft.runtime.cuda.pieces import OpenPieces, batch_of, unseen
from weft.runtime.cuda.precision import BF16, FP16, FP32
from weft.runtime.cuda.preparation import LARGEST_UNASKED, ModelPreparation
from weft.runtime.cuda.segments import DeviceSegment, DeviceWeights, Loose, Runnable, StillCopies
from weft.runtime.cuda.torch_program import DATATYPES, ProgramTensor, TorchProgram, read_program
from weft.runtime.cuda.torch_types import NUMBERED, as_torch
from weft.runtime.onnxruntime_cpu.allowance import Allowance
from weft.runtime.onnxruntime_cpu.model import Blueprint, SegmentSpec
from weft.runtime.onnxruntime_cpu.model_timing import unbatchable
from weft.runtime.onnxruntime_cpu.sessions import first_line, warm_shapes
from weft.runtime.rows import Verdict
from weft.runtime.tensors import Array, TensorSpec

PRECISIONS = {FP32: None, FP16: torch.float16, BF16: torch.bfloat16}
"""What a model can be computed with -> what its numbers become; None: they stay."""


def numbered(tensor: Any) -> int:
    """The type of its numbers as ONNX has it."""
    if tensor.dtype not in NUMBERED:
        raise ModelError(f"it computes with {tensor.dtype}, which cannot be kept between segments")
    return NUMBERED[tensor.dtype]


class PieceRunner(Protocol):
    """What is run piece by piece."""

    device: Any
    channels_last: frozenset[str]

    def piece(self, start: int, end: int) -> Any:
        """The nodes from one cut to another."""
        ...

    def run(self, piece: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        """What a piece makes of what it takes, by name."""
        ...


class _BoundProgram(NamedTuple):
    """A piece with the memory that it reads and writes."""

    program: PieceRunner
    piece: Any
    sources: Mapping[str, Any]
    targets: Mapping[str, Any]

    def run(self) -> None:
        with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
            for name, made in self.program.run(self.piece, self.sources).items():
                self.targets[name].copy_(made)


class ProgramSegment:
    """A piece of a program."""

    copies = False

    def __init__(self, program: PieceRunner, spec: SegmentSpec) -> None:
        assert spec.nodes is not None
        self.spec, self._program, self._piece = spec, program, program.piece(*spec.nodes)

    def open(self) -> None:
        """All of its file was read."""

    def again(self, device: Device) -> DeviceSegment:
        return self

    def fixed(self, tensors: Mapping[str, Tensor], types: Mapping[str, int]) -> DeviceSegment:
        raise StillCopies("torch decides where it computes")

    def bound(self, tensors: Mapping[str, Tensor], types: Mapping[str, int]) -> Runnable:
        sources = {name: self._view(name, tensors[name]) for name in self.spec.inputs}
        targets = {name: self._view(name, tensors[name]) for name in self.spec.outputs}
        return self._bind(sources, targets)

    def _bind(self, sources: Mapping[str, Any], targets: Mapping[str, Any]) -> Runnable:
        return _BoundProgram(self._program, self._piece, sources, targets)

    def _view(self, name: str, tensor: Tensor) -> Any:
        """A tensor between segments as torch would lay it out."""
        found = as_torch(tensor)
        if name not in self._program.channels_last:
            return found
        rows, channels, height, width = found.shape
        return found.view(rows, height, width, channels).permute(0, 3, 1, 2)

    def loose(self, arrays: Mapping[str, Array]) -> Loose:
        device = self._program.device
        return {name: torch.from_numpy(np.ascontiguousarray(each)).to(device) for name, each in arrays.items()}

    def run_loose(self, values: Mapping[str, Any]) -> Loose:
        with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return self._program.run(self._piece, values)

    def seen(self, values: Mapping[str, Any], names: Sequence[str]) -> dict[str, tuple[tuple[int, ...], int]]:
        return {name: (tuple(values[name].shape), numbered(values[name])) for name in names}

    def array(self, value: Any) -> Array:
        found: Array = value.float().cpu().numpy() if value.dtype == torch.bfloat16 else value.cpu().numpy()
        return found


def _placed(program: TorchProgram, device: Device) -> DeviceWeights:
    """Have a program run with weights that lie on a device, where they can leave."""
    weights, held = DeviceWeights(device), {name: program.cast(each) for name, each in program.weights.items()}
    last = program.spatial() if program.half and device.kind != "cpu" else frozenset()
    shapes = {name: tuple(each.shape) for name, each in held.items()}
    shapes |= {name: tuple(held[name].permute(0, 2, 3, 1).shape) for name in last}
    rooms = weights.room([(shapes[name], numbered(each)) for name, each in held.items()]) if held else []
    for (name, each), room in zip(held.items(), rooms, strict=True):
        place = as_torch(room).permute(0, 3, 1, 2) if name in last else as_torch(room)
        place.copy_(each)
        held[name] = place
    device.finish()
    program.hold(held)
    return weights


def where(device: Device) -> str:
    """A device as torch names it."""
    return "cpu" if device.kind == "cpu" else f"{device.kind}:{device.index}"


class ProgramFile:
    """A program while it is being prepared."""

    def __init__(self, device: Device, path: Path, options: LoadOptions, folder: Path, allowance: Allowance) -> None:
        """folder: where others write what they prepared; a program is read again."""
        self.device, self.path, self.options, self.allowance = device, path, options, allowance

    def built(self) -> DeviceModel:
        """The model as the device will serve it."""
        free = self.device.memory()[0]
        if self.options.exits:
            raise ModelError("exits are for ONNX files; export it as one")
        exported = read_program(self.path)
        plain = TorchProgram(exported, "cpu")
        blueprint = self._meaning(plain)
        wanted = self._wanted(plain, unseen(blueprint))
        self._place(exported, batch_of(blueprint, 1))
        workshop = ModelPreparation(self.device, self, self.options, self.allowance)
        return workshop.built(blueprint, self._verdict(blueprint), wanted, free)

    def reopened(self, blueprint: Blueprint) -> DeviceModel:
        """The model of a blueprint that was made earlier."""
        free = self.device.memory()[0]
        self._place(read_program(self.path), batch_of(blueprint, 1))
        return self.opened(blueprint).assembled(free)

    def clear(self, blueprint: Blueprint) -> None:
        """Nothing was written."""

    def _meaning(self, program: TorchProgram) -> Blueprint:
        """The model in one piece."""
        inputs, outputs = (tuple(map(_spec, each)) for each in (program.inputs, program.outputs))
        shapes, missing = warm_shapes(program.inputs, self.options.shapes)
        if missing:
            raise ModelError(f"give shapes for the free dimensions of {', '.join(missing)}")
        self._bound_rows(program)
        return Blueprint(
            inputs=inputs, outputs=outputs, segments=(), warm_shapes=shapes, values=dict(self.options.values)
        )

    def _bound_rows(self, program: TorchProgram) -> None:
        """Batches are no larger than the program was exported for."""
        most, asked = program.most_rows(), self.options.max_batch
        if asked is not None and most is not None and asked > most:
            raise ModelError(f"max_batch is {asked}, but it was exported for at most {most} rows")
        if asked is None and most is not None and most < LARGEST_UNASKED:
            self.options = dataclasses.replace(self.options, max_batch=most)

    def _wanted(self, plain: TorchProgram, feed: Mapping[str, Array]) -> dict[str, Array]:
        """What it gives on the CPU, as it is."""
        self.allowance.check()
        plain.hold({name: each.cpu() for name, each in plain.weights.items()})
        given = {name: torch.from_numpy(each) for name, each in feed.items()}
        try:
            with torch.inference_mode():
                found = plain.run(plain.piece(0, len(plain.nodes)), given)
        except Exception as error:  # operators raise whatever they like
            raise ModelError(f"it fails on made-up inputs: {first_line(error)}") from error
        return {name: each.numpy() for name, each in found.items()}

    def _place(self, exported: Any, feed: Mapping[str, Array]) -> None:
        """Have the program on the device, and see what lies between its nodes."""
        self.program = TorchProgram(exported, where(self.device), PRECISIONS[self.options.precision])
        self.weights = _placed(self.program, self.device)
        given = {name: torch.from_numpy(each).to(self.program.device) for name, each in feed.items()}
        try:
            with torch.inference_mode():
                self._sizes_bytes, self._guesses = self.program.observed(given)
        except Exception as error:  # operators raise whatever they like
            precision = self.options.precision
            raise ModelError(f"it fails on {self.device.name} in {precision}: {first_line(error)}") from error
        self.device.finish()

    def _verdict(self, blueprint: Blueprint) -> Verdict:
        """Whether rows may be computed together, which only whoever made it can tell."""
        reason = unbatchable(blueprint, blueprint.warm_shapes or {})
        if reason is None and not self.options.independent_rows and self.options.max_batch != 1:
            reason = 'whether rows depend on one another is not seen in programs; say rows = "independent" if not'
        return Verdict(reason)

    # As the workshop cuts it

    @property
    def half(self) -> bool:
        return self.program.half

    def guessed_s(self) -> list[float]:
        return self._guesses

    def crossing(self) -> list[int | None]:
        return self.program.crossing(self._sizes_bytes)

    def whole_because(self) -> str | None:
        return "has a single node" if len(self.program.nodes) < 2 else None

    def in_pieces(self, blueprint: Blueprint, cuts: Sequence[int]) -> Blueprint:
        ends = [0, *cuts, len(self.program.nodes)]
        return blueprint.model_copy(update={"segments": tuple(map(self._segment, ends, ends[1:]))})

    def _segment(self, start: int, end: int) -> SegmentSpec:
        piece, names = self.program.piece(start, end), [each.name for each in self.program.nodes[start:end]]
        name = f"{names[0]}..{names[-1]}" if len(names) > 1 else "".join(names)
        return SegmentSpec(name=name, inputs=piece.inputs, outputs=piece.outputs, nodes=(start, end), steady=True)

    def opened(self, blueprint: Blueprint) -> OpenPieces:
        segments = {each: ProgramSegment(self.program, each) for each in blueprint.segments}
        return OpenPieces(self.device, blueprint, segments, self.weights)


def _spec(tensor: ProgramTensor) -> TensorSpec:
    shape = tuple(each if isinstance(each, int) else -1 for each in tensor.shape)
    return TensorSpec(tensor.name, DATATYPES[tensor.dtype], shape)
