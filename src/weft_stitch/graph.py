"""The result of stitching: ``Graph``, steps over tensors that torch and ONNX both run, written by a ``Builder``.

A step is an ONNX operator of opset 20 with ONNX's own attributes and meaning, so that a graph maps to an ONNX file node
by node; only ``FusedConv``, ``StackRows`` (the form ``fused``) and ``Island`` run in torch alone. Parameters that
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
    """An input or output of the graph."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    """Empty if the runtime must infer it."""
    length: str = ""
    """Symbolic name of the sizes, besides the rows, that are only known at run time."""

    @property
    def long(self) -> tuple[int, ...]:
        """The axes, besides the rows (axis 0), whose size is only known at run time."""
        return tuple(axis for axis, size in enumerate(self.shape) if axis and size == DYNAMIC)


@dataclass(frozen=True, slots=True)
class GraphStep:
    """One operator applied to tensors."""

    op: str
    inputs: tuple[str, ...]
    """Names of tensors or constants; an empty name is an omitted optional input."""
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    layer: str = ""
    """Name of the source models' operation that the step helps to compute."""


class KernelOrigin(NamedTuple):
    """Which kernels of the models a constant holds, so that they can be read from it again (``file_description``)."""

    op: Op
    """The convolution; task 0's if several tasks share the kernels."""
    constant: str = ""
    """Name of the graph's constant that holds the kernels."""
    outs: tuple[int, ...] = ()
    """Rows of the constant: indices of output parts (``Channels.parts``); empty for the whole kernel of *op*."""
    ins: tuple[int, ...] = ()
    """Columns of the constant: indices of input parts."""
    task: int | None = None
    """The task whose numbers are stored; None: the first task that has both parts."""
    folded: int = 0
    """Number of affines after the convolution whose scales are multiplied into the constant."""
    slabs: tuple[int, ...] = ()
    """The layout from which ``slabs.undo_slabs`` restores the kernel; empty: not in slabs."""


@dataclass(frozen=True, eq=False)
class Graph:
    """Steps in order, with the tensors they read and the constants they hold."""

    name: str
    inputs: tuple[GraphTensor, ...]
    outputs: tuple[GraphTensor, ...]
    steps: tuple[GraphStep, ...]
    constants: Mapping[str, Array]
    weights: frozenset[str] = frozenset()
    """Names of the constants that are weights; the rest are tables, masks, shapes and indices."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The shape of every tensor."""
    tuned: bool = False
    """Whether weights take few distinct values, which ``cost.store_codes`` stores in few bits."""
    rounded: Mapping[str, str] = field(default_factory=dict)
    """Tensor -> the tensor of which it is the value rounded to a number format."""
    origins: tuple[KernelOrigin, ...] = ()
    opset: int | None = None
    """The operator set; None: the writer's default."""

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
        """Names of the constants that are weights."""
        self._stored: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        """Type, shape and bytes of a constant -> its name."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._inputs: list[GraphTensor] = []
        self._outputs: list[GraphTensor] = []
        self._names_given = 0
        self._reserved: set[str] = set()
        """Names that new tensors must not take."""
        self.tuned = False
        """Whether weights take few distinct values, as those of a net from ``weft tune``; set by the caller."""
        self.rounded: dict[str, str] = {}
        """Tensor -> the tensor of which it is the value rounded to a number format."""
        self.origins: list[KernelOrigin] = []
        """For constants that hold kernels: which kernels, and how to read them again."""

    def reserve(self, names: Iterable[str]) -> None:
        """Keep *names* free for inputs and outputs that are added later."""
        self._reserved.update(names)

    def input(self, name: str, shape: tuple[int, ...]) -> str:
        """Add an input of the graph and return its name."""
        self._inputs.append(GraphTensor(name, shape))
        self._shapes[name] = shape
        self._reserved.add(name)
        return name

    def constant(self, array: Array, hint: str = "c", *, weight: bool = False) -> str:
        """Store *array* and return its name, which begins with *hint*; an equal array is stored once."""
        array = np.asarray(array, order="C")
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._stored:
            name = self._stored[key] = self._fresh(hint)
            self._constants[name] = array
        if weight:
            self._weights.add(self._stored[key])
        return self._stored[key]

    def add(self, op: str, *inputs: str, shape: tuple[int, ...], output: str = "", **attributes: Any) -> str:
        """Add a step whose only output has *shape*, and return the output's name.

        *output*: the name to use, by default a new one. *attributes*: those of the ONNX operator.
        """
        name = output or self._fresh(op.lower())
        self._steps.append(GraphStep(op, inputs, (name,), attributes, self.layer))
        self._shapes[name] = shape
        return name

    def add_many(self, op: str, *inputs: str, shapes: list[tuple[int, ...]], **attributes: Any) -> list[str]:
        """Add a step with an output for each of *shapes*, and return the outputs' names."""
        names = [self._fresh(op.lower()) for _ in shapes]
        self._steps.append(GraphStep(op, inputs, tuple(names), attributes, self.layer))
        self._shapes.update(zip(names, shapes, strict=True))
        return names

    def output(self, tensor: str, name: str) -> None:
        """Make *tensor* an output of the graph, called *name*."""
        shape = self._shapes[tensor]
        self._steps.append(GraphStep("Identity", (tensor,), (name,), {}, self.layer))
        self._shapes[name] = shape
        self._outputs.append(GraphTensor(name, shape))

    def shape(self, tensor: str) -> tuple[int, ...]:
        return self._shapes[tensor]

    def finish(self) -> Graph:
        """The graph of everything added so far."""
        return Graph(
            name=self.name,
            inputs=tuple(self._inputs),
            outputs=tuple(self._outputs),
            steps=tuple(self._steps),
            constants=self._constants,
            weights=frozenset(self._weights),
            shapes=self._shapes,
            tuned=self.tuned,
            rounded=self.rounded,
            origins=tuple(self.origins),
        )

    def _fresh(self, hint: str) -> str:
        """Return an unused name that begins with *hint*."""
        self._names_given += 1
        while (name := f"{hint}_{self._names_given}") in self._reserved:
            self._names_given += 1
        return name


def signature(graph: Graph) -> str:
    """Return the graph's operators, attributes, shapes and connections as text, without names and numbers.

    Graphs of equal signature take equally long, so that only one of them must be costed.
    """
    labels = {tensor.name: f"i{number}" for number, tensor in enumerate(graph.inputs)}
    lines = [str(tensor.shape) for tensor in graph.inputs]
    for number, step in enumerate(graph.steps):
        inputs = [_input_label(graph, labels, name) for name in step.inputs]
        attributes = sorted((key, repr(value)) for key, value in step.attributes.items())
        shapes = [graph.shapes[name] for name in step.outputs]
        lines.append(f"{step.op} {inputs} {attributes} {shapes}")
        labels |= {name: f"{number}.{place}" for place, name in enumerate(step.outputs)}
    return "\n".join([*lines, *(labels[tensor.name] for tensor in graph.outputs)])


def _input_label(graph: Graph, labels: dict[str, str], name: str) -> str:
    """An input as text for the signature: type and shape of a constant, else the label of the step that computes it."""
    if name in graph.constants:
        array = graph.constants[name]
        return f"{array.dtype.str}{array.shape}"
    return labels.get(name, name)
