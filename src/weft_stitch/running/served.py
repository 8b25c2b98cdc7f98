"""A stitched file in the form ``fused``, as a device serves it: ``FusedRounds``, torch modules for rounds of rows.

``weft_stitch.on_device.fused_file`` serves them on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from weft.base.errors import StitchError
from weft_stitch.assembly import uniform
from weft_stitch.graph import Graph, GraphStep
from weft_stitch.lowering import lower
from weft_stitch.reading.onnx_stitched import read_stitched
from weft_stitch.running.fused import FusedConv, Shape
from weft_stitch.running.kernel_shapes import tune
from weft_stitch.running.module import StitchedModule
from weft_stitch.running.operators import Tensor, torch
from weft_stitch.running.ways import LOAD_BYTES


class StepCost(NamedTuple):
    """What a step moves and computes."""

    moved_bytes: int
    products: int


class Round(NamedTuple):
    """The module for so many rows of each model, and what its steps cost."""

    module: StitchedModule
    costs: tuple[StepCost, ...]


class FusedRounds:
    """The modules of one file; their tensors are on the CPU until whoever has them puts them somewhere."""

    def __init__(self, path: Path, dtype: Any, *, cuda: bool) -> None:
        if cuda and find_spec("triton") is None:
            raise StitchError("triton is not installed")
        self._family, self._sharing = read_stitched(path)
        self._dtype, self._forms = dtype, uniform(self._family, "fused")

    def at(self, rows: int) -> Round:
        """A round of so many rows; tensors between its steps are called by their places."""
        item_bytes, batches = int(self._dtype.itemsize), [rows] * self._family.tasks
        align = LOAD_BYTES // item_bytes
        graph = _numbered(lower(self._family, self._sharing, self._forms, batches=batches, align=align))
        module = StitchedModule(graph, dtype=self._dtype, channels_last=True)
        module.graph = replace(graph, constants={})  # it has them as tensors
        return Round(module, tuple(_cost(graph, step, item_bytes) for step in graph.steps))


def _numbered(graph: Graph) -> Graph:
    """The graph with names that say where a tensor is made, so that graphs of the same steps have the same names."""
    given = {each.name for each in graph.outputs}
    names: dict[str, str] = {}
    for at, step in enumerate(graph.steps):
        names |= {name: f"step{at}.{place}" for place, name in enumerate(step.outputs) if name not in given}

    def renamed(step: GraphStep) -> GraphStep:
        inputs, outputs = (tuple(names.get(each, each) for each in side) for side in (step.inputs, step.outputs))
        return replace(step, inputs=inputs, outputs=outputs)

    shapes = {names.get(name, name): shape for name, shape in graph.shapes.items()}
    return replace(graph, steps=tuple(map(renamed, graph.steps)), shapes=shapes)


def _cost(graph: Graph, step: GraphStep, item_bytes: int) -> StepCost:
    """Of a step whose numbers have so many bytes."""
    sizes = [prod(graph.shapes[name]) for name in (*step.inputs, *step.outputs) if name in graph.shapes]
    stored = [graph.constants[name].size for name in step.inputs if name in graph.constants]
    products = int(step.attributes.get("macs", 0))
    if step.op == "Conv":
        products = prod(graph.shapes[step.outputs[0]]) * prod(graph.constants[step.inputs[1]].shape[1:])
    return StepCost(item_bytes * (sum(sizes) + sum(stored)), products)


def tuned(module: StitchedModule, example: Sequence[Tensor], enough: Callable[[], bool]) -> None:
    """Give every fused layer of a module on CUDA its fastest shape, of those that are tried before it is *enough*."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        tune(module, *example, enough=enough)


def shapes_of(module: StitchedModule) -> list[list[int]]:
    """The shapes of its fused layers, as numbers."""
    return [[int(each) for each in layer.shape] for layer in _layers(module)]


def take_shapes(module: StitchedModule, shapes: Sequence[Sequence[int]]) -> None:
    """Give its fused layers shapes that were found earlier."""
    for layer, shape in zip(_layers(module), shapes, strict=True):
        tall, wide, deep, warps, stages, flat = shape
        layer.shape = Shape(tall, wide, deep, warps, stages, bool(flat))


def _layers(module: StitchedModule) -> list[FusedConv]:
    return [each for each in module.modules() if isinstance(each, FusedConv)]
