"""The result of stitching: ``Graph``, steps over tensors that torch and ONNX both run, written by a ``Builder``.

A step is an ONNX operator of opset 20 with ONNX's own attributes and meaning, so that a graph is an ONNX file but for
its spelling; only ``FusedConv``, ``StackRows`` (the form ``fused``) and ``Island`` run in torch alone. Parameters that
ONNX passes as tensors (shapes, indices, sizes of a split) are constants. Graphs of equal ``signature`` differ only in
numbers and names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from weft_stitch.net import Array, Op

DYNAMIC = -1
"""A tensor's first dimension when rows are only known at run time."""


@dataclass(frozen=True, slots=True)
class GraphTensor:
    """A named input or output of the graph."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    """Empty where it is left to be inferred."""
    length: str = ""
    """The name of its open sizes besides the rows."""

    @property
    def long(self) -> tuple[int, ...]:
        """The axes of open size, without the rows."""
        return tuple(axis for axis, size in enumerate(self.shape) if axis and size == DYNAMIC)


@dataclass(frozen=True, slots=True)
class GraphStep:
    """One operator."""

    op: str
    inputs: tuple[str, ...]
    """Names of tensors or constants; an empty name is an input left out."""
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    layer: str = ""
    """The op of the source models it comes from."""


class KernelOrigin(NamedTuple):
    """Which kernels of the models a constant holds, so that they can be read from it again (``file_description``)."""

    op: Op
    """The convolution; task 0's where several tasks have some of the kernels."""
    constant: str = ""
    outs: tuple[int, ...] = ()
    """Its rows: which parts of the value that is written (``Channels.parts``); empty: it is the op's kernel itself."""
    ins: tuple[int, ...] = ()
    """Its columns: which parts of the value that is read."""
    task: int | None = None
    """The task that the numbers are taken from; None: the first task that has both parts."""
    folded: int = 0
    """Count of the affines after the convolution that have been multiplied into it."""
    slabs: tuple[int, ...] = ()
    """Their slab layout (see ``slabs.unslabbed``); empty: not in slabs."""


@dataclass(frozen=True, eq=False)
class Graph:
    """Steps in order, with the tensors they read and the constants they hold."""

    name: str
    inputs: tuple[GraphTensor, ...]
    outputs: tuple[GraphTensor, ...]
    steps: tuple[GraphStep, ...]
    constants: Mapping[str, Array]
    weights: frozenset[str] = frozenset()
    """The constants that are weights (the rest are tables, masks, shapes and indices)."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The shape of every tensor."""
    tuned: bool = False
    """Whether weights are few different numbers, which ``cost.in_codes`` stores in few bits."""
    rounded: Mapping[str, str] = field(default_factory=dict)
    """Tensors that are another one, rounded to a number format."""
    origins: tuple[KernelOrigin, ...] = ()
    opset: int | None = None
    """The operator set, if another than the writer's."""

    @property
    def weight_bytes(self) -> int:
        return sum(self.constants[name].nbytes for name in self.weights)


class Builder:
    """Collects steps and constants; equal constants are stored once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.layer = ""
        """The source op whose steps are being added."""
        self._steps: list[GraphStep] = []
        self._constants: dict[str, Array] = {}
        self._weights: set[str] = set()
        self._stored: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._inputs: list[GraphTensor] = []
        self._outputs: list[GraphTensor] = []
        self._count = 0
        self._reserved: set[str] = set()
        self.tuned = False
        self.rounded: dict[str, str] = {}
        """Names of rounded tensors -> the tensors that were rounded."""
        self.origins: list[KernelOrigin] = []

    def reserve(self, names: Iterable[str]) -> None:
        """Keep *names* free for inputs and outputs that are added later."""
        self._reserved.update(names)

    def input(self, name: str, shape: tuple[int, ...]) -> str:
        self._inputs.append(GraphTensor(name, shape))
        self._shapes[name] = shape
        self._reserved.add(name)
        return name

    def constant(self, array: Array, hint: str = "c", *, weight: bool = False) -> str:
        """Store *array* and return its name; an equal array is stored once."""
        array = np.asarray(array, order="C")
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._stored:
            name = self._stored[key] = self._fresh(hint)
            self._constants[name] = array
        if weight:
            self._weights.add(self._stored[key])
        return self._stored[key]

    def add(self, op: str, *inputs: str, shape: tuple[int, ...], output: str = "", **attributes: Any) -> str:
        """Add a step with one output of *shape*; its name."""
        name = output or self._fresh(op.lower())
        self._steps.append(GraphStep(op, inputs, (name,), attributes, self.layer))
        self._shapes[name] = shape
        return name

    def add_many(self, op: str, *inputs: str, shapes: list[tuple[int, ...]], **attributes: Any) -> list[str]:
        """Add a step with an output for each of *shapes*; their names."""
        names = [self._fresh(op.lower()) for _ in shapes]
        self._steps.append(GraphStep(op, inputs, tuple(names), attributes, self.layer))
        self._shapes.update(zip(names, shapes, strict=True))
        return names

    def output(self, tensor: str, name: str) -> None:
        """Give *tensor* to the caller under *name*."""
        shape = self._shapes[tensor]
        self._steps.append(GraphStep("Identity", (tensor,), (name,), {}, self.layer))
        self._shapes[name] = shape
        self._outputs.append(GraphTensor(name, shape))

    def shape(self, tensor: str) -> tuple[int, ...]:
        return self._shapes[tensor]

    def finish(self) -> Graph:
        return Graph(
            self.name,
            tuple(self._inputs),
            tuple(self._outputs),
            tuple(self._steps),
            self._constants,
            frozenset(self._weights),
            self._shapes,
            self.tuned,
            self.rounded,
            tuple(self.origins),
        )

    def _fresh(self, hint: str) -> str:
        self._count += 1
        while (name := f"{hint}_{self._count}") in self._reserved:
            self._count += 1
        return name


def signature(graph: Graph) -> str:
    """Operators, attributes, shapes and connections; equal for graphs that take equally long."""
    numbers = {tensor.name: f"i{number}" for number, tensor in enumerate(graph.inputs)}
    lines = [str(tensor.shape) for tensor in graph.inputs]
    for number, step in enumerate(graph.steps):
        inputs = [_anonymous(graph, numbers, name) for name in step.inputs]
        attributes = sorted((key, repr(value)) for key, value in step.attributes.items())
        shapes = [graph.shapes[name] for name in step.outputs]
        lines.append(f"{step.op} {inputs} {attributes} {shapes}")
        numbers |= {name: f"{number}.{place}" for place, name in enumerate(step.outputs)}
    return "\n".join([*lines, *(numbers[tensor.name] for tensor in graph.outputs)])


def _anonymous(graph: Graph, numbers: dict[str, str], name: str) -> str:
    if name in graph.constants:
        array = graph.constants[name]
        return f"{array.dtype.str}{array.shape}"
    return numbers.get(name, name)
