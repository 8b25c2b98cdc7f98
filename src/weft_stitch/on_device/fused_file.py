"""Stitched nets on a GPU in the form ``fused``: a *round* computes the rows of all tasks, with one kernel per layer.

A round is cut into segments, which are captured as CUDA graphs, like other programs of the CUDA backend. A *cut* is the
index of the step before which a segment begins; *rows* are counted for each task.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from importlib.util import find_spec
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from weft.base.errors import ModelError, StitchError
from weft.runtime.backend import LoadOptions
from weft.runtime.cuda.model_files import (
    FP16,
    FP32,
    SHAPES,
    Allowance,
    Blueprint,
    Device,
    DeviceSegment,
    DeviceWeights,
    OpenPieces,
    Runnable,
    SegmentSpec,
    guess_s,
    random_batch,
)
from weft.runtime.cuda.torch_files import ProgramSegment, numbered, torch_device_name
from weft.runtime.cuda.torch_types import as_torch
from weft_stitch.assembly import uniform
from weft_stitch.file_description import read_stitched
from weft_stitch.graph import Graph, GraphStep
from weft_stitch.lowering import lower
from weft_stitch.running.gpu_timing import LOAD_BYTES
from weft_stitch.running.kernel_shapes import tune
from weft_stitch.running.module import Shape, StitchedModule
from weft_stitch.running.operators import Tensor


class StepCost(NamedTuple):
    """Bytes that a step moves, and its multiplications."""

    moved_bytes: int
    products: int


class Round(NamedTuple):
    """The module for a number of rows of each task, and the cost of each of its steps."""

    module: StitchedModule
    costs: tuple[StepCost, ...]


class FusedRounds:
    """Makes the modules of one file. Their tensors are on the CPU until the caller moves them."""

    def __init__(self, path: Path, dtype: Any, *, cuda: bool) -> None:
        """*dtype*: the torch type of weights and activations. *cuda*: whether kernels will run them."""
        if cuda and find_spec("triton") is None:
            raise StitchError("triton is not installed")
        self._family, self._sharing = read_stitched(path)
        self._dtype, self._forms = dtype, uniform(self._family, "fused")

    def at(self, rows: int) -> Round:
        """The round for *rows* rows of each task. Tensors between steps are named by the steps' indices."""
        item_bytes, batches = int(self._dtype.itemsize), [rows] * self._family.tasks
        align = LOAD_BYTES // item_bytes
        graph = _number_tensors(lower(self._family, self._sharing, self._forms, batches=batches, align=align))
        module = StitchedModule(graph, dtype=self._dtype, channels_last=True)
        module.graph = replace(graph, constants={})  # the module has them as tensors
        return Round(module, tuple(_cost(graph, step, item_bytes) for step in graph.steps))


def _number_tensors(graph: Graph) -> Graph:
    """Name tensors after the step that writes them, so that graphs of the same steps have the same names.

    The outputs of the graph keep their names.
    """
    output_names = {output.name for output in graph.outputs}
    names: dict[str, str] = {}
    for index, step in enumerate(graph.steps):
        names |= {
            name: f"step{index}.{position}" for position, name in enumerate(step.outputs) if name not in output_names
        }

    def rename(step: GraphStep) -> GraphStep:
        inputs, outputs = (tuple(names.get(name, name) for name in side) for side in (step.inputs, step.outputs))
        return replace(step, inputs=inputs, outputs=outputs)

    shapes = {names.get(name, name): shape for name, shape in graph.shapes.items()}
    return replace(graph, steps=tuple(map(rename, graph.steps)), shapes=shapes)


def _cost(graph: Graph, step: GraphStep, item_bytes: int) -> StepCost:
    """The cost of a step whose numbers have *item_bytes* bytes each."""
    sizes = [prod(graph.shapes[name]) for name in (*step.inputs, *step.outputs) if name in graph.shapes]
    stored = [graph.constants[name].size for name in step.inputs if name in graph.constants]  # weights, read as well
    products = int(step.attributes.get("macs", 0))  # which fused layers state
    if step.op == "Conv":
        products = prod(graph.shapes[step.outputs[0]]) * prod(graph.constants[step.inputs[1]].shape[1:])
    return StepCost(item_bytes * (sum(sizes) + sum(stored)), products)


def tune_within(module: StitchedModule, example: Sequence[Tensor], enough: Callable[[], bool]) -> None:
    """Find the fastest tiles of a module's fused layers by trials, without TF32, until *enough* returns True."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        tune(module, *example, enough=enough)


def shapes_of(module: StitchedModule) -> list[list[int]]:
    """The tiles of the module's fused layers, as numbers for JSON."""
    return [[int(number) for number in layer.shape] for layer in module.fused_layers]


def take_shapes(module: StitchedModule, shapes: Sequence[Sequence[int]]) -> None:
    """Set the tiles of the module's fused layers to *shapes*, which an earlier run has found."""
    for layer, shape in zip(module.fused_layers, shapes, strict=True):
        tall, wide, deep, warps, stages, flat = shape
        layer.shape = Shape(tall, wide, deep, warps, stages, bool(flat))


TIMED_ON = "cuda"
"""The kind of device on which tiles are tuned."""
_END = -1
"""The end of the last piece: stands for the number of steps, which may differ for other numbers of rows."""
_TYPES = {FP32: torch.float32, FP16: torch.float16}


class RoundPiece(NamedTuple):
    """The steps between two cuts, with the tensors that they read from and leave for other pieces."""

    start: int
    end: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class RoundProgram:
    """The module for a number of rows of each task on a device, which can run in pieces."""

    def __init__(self, source: Round, device: str) -> None:
        """*source*: the module, whose tensors are still on the CPU. *device*: the device by torch's name."""
        self.module, self.graph, self.device = source.module, source.module.graph, torch.device(device)
        self.estimated_step_s = [guess_s(*cost) for cost in source.costs]
        """Estimated seconds of each step."""
        self.channels_last: frozenset[str] = frozenset()
        """Tensors between steps that are in channels-last order (see ``record_orders``)."""
        self.outputs = tuple(output.name for output in self.graph.outputs)
        model_inputs = [port.name for port in self.graph.inputs]
        self._writer_of = {name: index for index, step in enumerate(self.graph.steps) for name in step.outputs}
        self._last_reader_of = {name: index for index, step in enumerate(self.graph.steps) for name in step.inputs}
        # StackRows converts its inputs to the module's type itself; all other steps need inputs of that type.
        type_sensitive = {name for step in self.graph.steps if step.op != "StackRows" for name in step.inputs}
        self._to_convert = frozenset(name for name in model_inputs if name in type_sensitive)
        """Inputs of the models that are converted to the module's type before a piece runs."""
        self._tensors = frozenset((*model_inputs, *self._writer_of))
        self._first_output_step = min(self._writer_of[name] for name in self.outputs)
        """The first step that writes an output. No cut may lie after it: all outputs must leave in the same piece."""

    @property
    def operators(self) -> list[str]:
        return [step.op for step in self.graph.steps]

    def piece(self, start: int, end: int) -> RoundPiece:
        """The steps from *start* to *end* (exclusive; ``_END``: all remaining steps)."""
        end = len(self.graph.steps) if end == _END else end
        names = dict.fromkeys(name for step in self.graph.steps[start:end] for name in step.inputs)
        # inputs of the models (-1) and what earlier steps have written
        inputs = [name for name in names if name in self._tensors and self._writer_of.get(name, -1) < start]
        written = [name for step in self.graph.steps[start:end] for name in step.outputs]
        leaving = [name for name in written if self._last_reader_of.get(name, -1) >= end]
        is_last = end == len(self.graph.steps)
        return RoundPiece(start, end, tuple(inputs), self.outputs if is_last else tuple(leaving))

    def crossing(self, item_bytes: int) -> list[int | None]:
        """For each possible cut, both ends included, the bytes of tensors that cross it; None where no cut is allowed.

        No cut is allowed after the first step that writes an output (``_first_output_step``), except the end.
        *item_bytes*: of one number.
        """
        count = len(self.graph.steps)
        change = [0] * (count + 2)  # cut -> bytes that begin to cross there, less those that no longer do
        for name, writer in self._writer_of.items():
            tensor_bytes = item_bytes * prod(self.graph.shapes[name])
            change[writer + 1] += tensor_bytes
            change[max(writer, self._last_reader_of.get(name, writer)) + 1] -= tensor_bytes
        crossing_bytes = list(accumulate(change))[:-1]
        allowed = [cut <= self._first_output_step or cut == count for cut in range(len(crossing_bytes))]
        return [size if may_cut else None for size, may_cut in zip(crossing_bytes, allowed, strict=True)]

    def run(self, piece: RoundPiece, values: Mapping[str, Any]) -> dict[str, Any]:
        """Run a piece on *values* (by name) and return its outputs by name; outputs of the models as float32."""
        results = self._run_piece(piece, values, {})
        return {name: tensor.float() for name, tensor in results.items()} if piece.outputs == self.outputs else results

    def fill(self, piece: RoundPiece, values: Mapping[str, Any], targets: Mapping[str, Any]) -> None:
        """Run a piece and write its outputs into *targets*."""
        results = self._run_piece(piece, values, targets)
        # some steps have written into their target themselves
        to_copy = [name for name, tensor in results.items() if tensor.data_ptr() != targets[name].data_ptr()]
        if to_copy:
            torch._foreach_copy_([targets[name] for name in to_copy], [results[name] for name in to_copy])

    def _run_piece(self, piece: RoundPiece, values: Mapping[str, Any], into: Mapping[str, Any]) -> dict[str, Any]:
        """Run a piece and return its outputs; *into*: memory that steps may write outputs to."""
        dtype = self.module.dtype
        inputs = {name: values[name].to(dtype) if name in self._to_convert else values[name] for name in piece.inputs}
        tensors = self.module.steps(inputs, piece.start, piece.end, into)
        return {name: tensors[name] for name in piece.outputs}

    def record_orders(self, values: Mapping[str, Any]) -> None:
        """Run the steps before the first output, one by one; record for buffers which tensors are channels-last."""
        tensors, channels_last = dict(values), set[str]()
        for index in range(self._first_output_step):
            results = self._run_piece(self.piece(index, index + 1), tensors, {})
            channels_last |= {name for name, tensor in results.items() if _is_channels_last(tensor)}
            tensors |= results
        self.channels_last = frozenset(channels_last)


class _BoundRound(NamedTuple):
    """A piece with the buffers that it reads and writes."""

    program: RoundProgram
    piece: RoundPiece
    sources: Mapping[str, Any]
    targets: Mapping[str, Any]

    def run(self) -> None:
        """Run the piece into its buffers."""
        with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
            self.program.fill(self.piece, self.sources, self.targets)


class RoundSegment(ProgramSegment):
    """A piece of a round as a segment of the scheduler."""

    def __init__(self, program: RoundProgram, spec: SegmentSpec) -> None:
        super().__init__(program, spec)
        self._round = program

    def _bind_views(self, sources: Mapping[str, Any], targets: Mapping[str, Any]) -> Runnable:
        return _BoundRound(self._round, self._piece, sources, targets)


class FusedFile:
    """A stitched file in torch that is being prepared for a GPU."""

    def __init__(self, device: Device, path: Path, options: LoadOptions, allowance: Allowance, folder: Path) -> None:
        """*folder*: where tuned tiles are stored."""
        if options.precision not in _TYPES:
            raise ModelError(f"it is computed in {' and '.join(_TYPES)}, not in {options.precision}")
        self.device, self.options, self.allowance, self._folder = device, options, allowance, folder
        self._rounds = FusedRounds(path, _TYPES[options.precision], cuda=device.kind == "cuda")
        self._programs: dict[int, RoundProgram] = {}
        self.weights, self._on_device = DeviceWeights(device), dict[Any, Any]()
        """The memory of the weights, and key of a weight -> its tensor there."""
        shapes_file = folder / SHAPES
        self._tiles: dict[str, Any] = json.loads(shapes_file.read_text()) if shapes_file.exists() else {}
        """Number of rows, as text -> the tiles of the fused layers (``shapes_of``), found now or by an earlier run."""

    def program(self, blueprint: Blueprint, rows: int) -> RoundProgram:
        """The program for *rows* rows of each task; it is created and tuned at first use."""
        if rows not in self._programs:
            self.allowance.check()
            program = RoundProgram(self._rounds.at(rows), torch_device_name(self.device))
            self._place_weights(program.module)
            self._set_tiles(program, random_batch(blueprint, rows), str(rows))
            if rows == 1:  # the orders are the same for all numbers of rows
                inputs = self._to_device(program, random_batch(blueprint, 1))
                self.device.run_uncaptured(lambda: program.record_orders(inputs))
            else:
                program.channels_last = self.program(blueprint, 1).channels_last
            self.device.finish()
            if self.device.kind == "cuda":
                torch.cuda.empty_cache()  # so that buffers of discarded candidates do not count as the model's memory
            self._programs[rows] = program
        return self._programs[rows]

    def _to_device(self, program: RoundProgram, feed: Mapping[str, Any]) -> dict[str, Any]:
        """*feed* as tensors on the program's device."""
        return {name: torch.from_numpy(array).to(program.device) for name, array in feed.items()}

    def _place_weights(self, module: Any) -> None:
        """Move the module's weights to the device, into memory that can be evicted; programs share equal weights."""
        buffers = dict(module.named_buffers(remove_duplicate=False))
        keys = {name: _content_key(tensor) for name, tensor in buffers.items()}
        new_tensors = {key: buffers[name] for name, key in keys.items() if key not in self._on_device}
        channels_last = {key for key, tensor in new_tensors.items() if _is_channels_last(tensor)}
        # The memory for weights holds contiguous tensors only: channels-last ones are stored with their axes moved.
        contiguous = {
            key: tensor.permute(0, 2, 3, 1) if key in channels_last else tensor for key, tensor in new_tensors.items()
        }
        shapes = [(tuple(tensor.shape), numbered(tensor)) for tensor in contiguous.values()]
        targets = self.weights.allocate(shapes) if new_tensors else []
        for (key, tensor), target in zip(contiguous.items(), targets, strict=True):
            weight = as_torch(target)
            weight.copy_(tensor)
            self._on_device[key] = weight.permute(0, 3, 1, 2) if key in channels_last else weight
        for name, key in keys.items():
            submodule, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(submodule), attribute, self._on_device[key])

    def _set_tiles(self, program: RoundProgram, feed: Mapping[str, Any], rows_key: str) -> None:
        """Set the tiles that are known for this number of rows; else tune them, on CUDA only, and store them.

        *feed*: example inputs. *rows_key*: the number of rows, as the key in ``_tiles`` and in the file of tiles.
        """
        if rows_key not in self._tiles and self.device.kind == TIMED_ON:
            inputs = self._to_device(program, feed)
            example = [inputs[port.name].to(program.module.dtype) for port in program.graph.inputs]
            tune_within(program.module, example, self.allowance.is_half_used)
            self._tiles[rows_key] = shapes_of(program.module)
            (self._folder / SHAPES).write_text(json.dumps(self._tiles))
        elif rows_key in self._tiles:
            take_shapes(program.module, self._tiles[rows_key])

    # The interface that ModelPreparation cuts by

    @property
    def half(self) -> bool:
        """Whether it is computed in half precision."""
        return self.options.precision == FP16

    @property
    def _item_bytes(self) -> int:
        return int(_TYPES[self.options.precision].itemsize)

    def guessed_s(self) -> list[float]:
        """Estimated seconds of each step for one row."""
        return self._programs[1].estimated_step_s

    def crossing(self) -> list[int | None]:
        """The bytes that cross each possible cut, for one row; see ``RoundProgram.crossing``."""
        return self._programs[1].crossing(self._item_bytes)

    def whole_because(self) -> str | None:
        """Why the file cannot be cut; None if it can."""
        steps = [program.operators for program in self._programs.values()]
        return (
            None if all(operators == steps[0] for operators in steps) else "has other steps for other numbers of rows"
        )

    def in_pieces(self, blueprint: Blueprint, cuts: Sequence[int]) -> Blueprint:
        """*blueprint* with the file cut into segments at *cuts*: each is the step before which a segment begins.

        The steps are those for one row; other numbers of rows have the same steps, unless ``whole_because`` says no.
        """
        program = self.program(blueprint, 1)
        bounds = [0, *cuts, _END]
        segments = tuple(_spec(program, start, end) for start, end in pairwise(bounds))
        return blueprint.model_copy(update={"segments": segments})

    def opened(self, blueprint: Blueprint) -> OpenPieces:
        """The segments of a cut blueprint, with their weights on the device."""
        segments = _Segments(self, blueprint)
        return OpenPieces(self.device, blueprint, segments, self.weights)


class _Segments(dict[SegmentSpec, DeviceSegment]):
    """The segments of a blueprint for all numbers of rows, each created at first use."""

    def __init__(self, file: FusedFile, blueprint: Blueprint) -> None:
        super().__init__()
        self._file, self._blueprint = file, blueprint

    def __missing__(self, spec: SegmentSpec) -> DeviceSegment:
        segment = self[spec] = RoundSegment(self._file.program(self._blueprint, spec.rows), spec)
        return segment


def _spec(program: RoundProgram, start: int, end: int) -> SegmentSpec:
    """The segment of the steps from *start* to *end*, with the name of its layers."""
    piece = program.piece(start, end)
    layers = [step.layer for step in program.graph.steps[start : piece.end] if step.layer] or ["answers"]
    name = layers[0] if layers[0] == layers[-1] else f"{layers[0]}..{layers[-1]}"
    return SegmentSpec(name=name, inputs=piece.inputs, outputs=piece.outputs, nodes=(start, end), rows=1, steady=True)


def _is_channels_last(tensor: Any) -> bool:
    """Whether a tensor is in channels-last order, and not contiguous as well (as with one channel or position)."""
    channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return bool(channels_last and not tensor.is_contiguous())


def _content_key(tensor: Any) -> Any:
    """A key that is equal for equal tensors: type, shape, memory order and a digest."""
    in_memory_order = tensor.permute(0, 2, 3, 1) if _is_channels_last(tensor) else tensor
    digest = sha256(in_memory_order.contiguous().reshape(-1).view(torch.uint8).numpy().data).digest()
    return tensor.dtype, tuple(tensor.shape), _is_channels_last(tensor), digest
