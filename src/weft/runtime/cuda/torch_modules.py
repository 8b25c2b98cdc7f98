"""Models as modules of torch, with their weights as buffers: what is exported for the compiler."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from weft.runtime.cuda import torch_onnx
from weft.runtime.cuda.torch_program import ProgramPiece, TorchProgram, read_program
from weft.runtime.cuda.torch_types import PRECISIONS, is_channels_last
from weft.runtime.metadata import PROGRAM_SUFFIX

Shapes = Mapping[str, Sequence[int]]


def conversion(path: Path, precision: str, device: str, exits: Sequence[str] = ()) -> Callable[[Shapes], Any]:
    """What makes the module of a model's file for inputs of given shapes, on the device that torch calls *device*.

    Making the module of a program runs code of its file. exits: the only outputs, if there are any.
    """
    if path.suffix == PROGRAM_SUFFIX:
        make_module = cache(partial(ProgramModule, path, precision, device))
        return lambda shapes: make_module()  # a program takes inputs of any shapes
    converted = torch_onnx.conversion(path, precision, exits)
    return lambda shapes: converted(shapes).to(device)


class PieceModule(torch.nn.Module):  # type: ignore[misc]  # torch's types are not followed
    """A piece of a program, with the weights that it reads as buffers; takes and returns tensors in order."""

    def __init__(self, program: TorchProgram, piece: ProgramPiece) -> None:
        super().__init__()
        self._program, self._piece = copy.copy(program), piece
        self._buffer_of: dict[str, str] = {}
        self._constants: dict[str, Any] = {}  # the held values that are no tensors
        for name in program.held_by(piece):
            value = program.held[name]
            if isinstance(value, torch.Tensor):
                self._buffer_of[name] = f"weight_{len(self._buffer_of)}"
                self.register_buffer(self._buffer_of[name], without_gaps(value, channels_last=is_channels_last(value)))
            else:
                self._constants[name] = value
        self._program.held = {}  # frees what the buffers are copies of, if no other piece has it

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """Run the piece on the inputs, in their order; returns the outputs."""
        buffers = {name: getattr(self, buffer) for name, buffer in self._buffer_of.items()}
        self._program.held = {**self._constants, **buffers}
        results = self._program.run(self._piece, dict(zip(self._piece.inputs, inputs, strict=True)))
        return tuple(results[name] for name in self._piece.outputs)


class ProgramModule(PieceModule):
    """A program of ``torch.export`` in a file, on a device and in a precision."""

    def __init__(self, path: Path, precision: str, device: str) -> None:
        program = TorchProgram(read_program(path), device, PRECISIONS[precision])
        weights = {name: program.cast(weight).to(device) for name, weight in program.weights.items()}
        if program.half:  # GPUs compute convolutions faster if channels come last
            weights |= {name: without_gaps(weights[name], channels_last=True) for name in program.spatial()}
        program.hold(weights)
        whole = program.piece(0, len(program.nodes))
        super().__init__(program, whole)
        types = {tensor.name: tensor.dtype for tensor in (*program.inputs, *program.outputs)}
        self.inputs = tuple((name, types[name]) for name in whole.inputs)
        self.outputs = tuple((name, types[name]) for name in whole.outputs)

    def store_constants(self, *inputs: Any) -> None:
        """Do nothing: the constants of a program are among its buffers."""


def without_gaps(tensor: Any, *, channels_last: bool) -> Any:
    """A copy without gaps in memory; tensors of the inference mode cannot be exported, and copies are none."""
    return tensor.detach().clone(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
