"""Dead-position elimination: ``narrow_graph`` computes only positions that are read.

A classifier reads only the first token of the last layer. Whatever that layer does position by position (products,
norms, sums) is then computed for this token alone, with the same results.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from weft_stitch.graph import Graph, GraphStep
from weft_stitch.net import Array

_UNARY = {"Cast", "Erf", "Gelu", "Identity", "Neg", "Relu", "Sigmoid", "Sqrt", "Tanh"}
"""Elementwise operators of one input."""
_BINARY = {"Add", "Div", "Mul", "Pow", "Sub"}
"""Elementwise operators of two inputs."""


class Position(NamedTuple):
    """One index along an axis."""

    axis: int
    offset: int


NeededPositions = dict[str, Position]
"""Input of a step -> the only position of it that the step needs."""


def narrow_graph(graph: Graph) -> Graph:
    """Compute only positions that are read, as far as the shapes of the tensors in *graph* are known."""
    return _Narrower(graph).graph()


class _Narrower:
    """Finds which positions of each tensor are read, from the outputs back, then rewrites the steps."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._positions_read: dict[str, set[Position | None]] = {output.name: {None} for output in graph.outputs}
        """Tensor -> the positions that its readers need; None in the set stands for the whole tensor."""
        self._narrow: dict[str, Position] = {}
        """Tensor -> the only position of it that is computed; it keeps the axis, with size 1."""
        for step in reversed(graph.steps):
            self._record_reads(step)
        self._constants = dict(graph.constants)
        self._steps: list[GraphStep] = []
        self._sliced: dict[tuple[str, Position], str] = {}
        """Tensor that is computed whole, and a position -> the tensor of that position alone."""

    def graph(self) -> Graph:
        """The rewritten graph."""
        if not self._narrow:
            return self._graph
        for step in self._graph.steps:
            self._write_step(step)
        read = {name for step in self._steps for name in step.inputs}
        constants = {name: array for name, array in self._constants.items() if name in read}
        return replace(self._graph, steps=tuple(self._steps), constants=constants)

    def _record_reads(self, step: GraphStep) -> None:
        """Record which positions *step* needs of its inputs, by those that are needed of its outputs."""
        output_positions = set().union(*(self._positions_read.get(name, set()) for name in step.outputs if name))
        selected = self._selected_position(step)
        # the position that is needed of the outputs, if it is one only
        position = next(iter(output_positions)) if len(output_positions) == 1 else None
        input_positions = self._needed_inputs(step, position) if position and not selected else {}
        if position and input_positions:
            self._narrow |= dict.fromkeys(filter(None, step.outputs), position)
        for input_index, name in enumerate(step.inputs):
            self._positions_read.setdefault(name, set()).add(
                selected if selected and input_index == 0 else input_positions.get(name)
            )

    def _write_step(self, step: GraphStep) -> None:
        """Write *step* for the position that is computed, or as it is."""
        position = self._narrow.get(step.outputs[0])
        selected = self._selected_position(step)
        if selected and step.inputs[0] in self._narrow:  # the position is alone on its axis already
            axis = self._numbers([selected.axis])
            self._steps.append(GraphStep("Squeeze", (step.inputs[0], axis), step.outputs, {}, step.layer))
        elif position:
            input_positions = self._needed_inputs(step, position)
            inputs = [
                self._tensor_at(name, input_positions[name], step.layer) if name in input_positions else name
                for name in step.inputs
            ]
            self._steps.append(replace(step, inputs=tuple(inputs)))
        else:
            self._steps.append(step)

    def _tensor_at(self, name: str, position: Position, layer: str) -> str:
        """A tensor at one position; a tensor that is computed whole is sliced at its first such use."""
        if name in self._narrow:
            return name
        if (name, position) not in self._sliced:
            sliced = self._sliced[name, position] = f"{name}_at_{position.offset}_of_{position.axis}"
            inputs = (name, self._numbers([position.offset]))
            self._steps.append(GraphStep("Gather", inputs, (sliced,), {"axis": position.axis}, layer))
        return self._sliced[name, position]

    def _selected_position(self, step: GraphStep) -> Position | None:
        """The position that a ``Gather`` with one index selects along an inner axis; None for other steps."""
        index = self._graph.constants.get(step.inputs[1]) if step.op == "Gather" else None
        shape, axis = self._graph.shapes.get(step.inputs[0]) if step.inputs else None, step.attributes.get("axis", 0)
        if index is None or index.ndim or shape is None or not 0 < axis < len(shape) - 1:
            return None
        return Position(axis, int(index))

    def _needed_inputs(self, step: GraphStep, position: Position) -> NeededPositions:
        """The positions of its inputs that *step* needs to compute *position* of its output; empty if it needs more.

        Inputs that are not in the result, such as the weights of a product, are needed in whole.
        """
        input_shape, output_shape = self._shape(step.inputs[0]), self._graph.shapes.get(step.outputs[0])
        # without a computed first input of known shape, only an elementwise step can be narrowed, by its second
        if output_shape is None or input_shape is None or step.inputs[0] in self._graph.constants:
            return self._needed_operands(step, position, output_shape) if output_shape and step.op in _BINARY else {}
        if step.op in _BINARY:
            return self._needed_operands(step, position, output_shape)
        whole_axis = _whole_axis(step, len(output_shape))
        if step.op == "Concat":
            return dict.fromkeys(step.inputs, position) if whole_axis != position.axis else {}
        if step.op == "Transpose":
            order = step.attributes.get("perm", range(len(output_shape))[::-1])
            return {step.inputs[0]: Position(order[position.axis], position.offset)}
        fits = (
            step.op in _UNARY
            or (step.op in ("LayerNormalization", "Softmax") and whole_axis > position.axis)
            or (step.op == "Split" and whole_axis != position.axis)
            # a product treats the positions of the last axis but one separately
            or (step.op == "MatMul" and len(input_shape) == len(output_shape) == position.axis + 2)
            or (step.op == "Reshape" and self._copies_axes(step, position.axis))
        )
        return {step.inputs[0]: position} if fits else {}

    def _copies_axes(self, step: GraphStep, axis: int) -> bool:
        """Whether a Reshape leaves all axes up to *axis* as they are."""
        sizes = self._graph.constants.get(step.inputs[1])
        return sizes is not None and not step.attributes.get("allowzero") and not np.any(sizes[: axis + 1])

    def _needed_operands(self, step: GraphStep, position: Position, output_shape: tuple[int, ...]) -> NeededPositions:
        """``_needed_inputs`` of an elementwise step of two inputs; *output_shape*: the shape of its output.

        An input that is broadcast along the axis of *position* is needed whole. Empty if one of the other inputs is a
        constant: only tensors that steps compute are cut to a position.
        """
        needed: NeededPositions = {}
        for name in step.inputs:
            shape = self._shape(name)
            if shape is None:
                return {}
            aligned = (*[1] * (len(output_shape) - len(shape)), *shape)  # broadcasting adds axes of size 1 in front
            if aligned[position.axis] != 1:
                needed[name] = position
        return {} if needed.keys() & self._graph.constants.keys() else needed

    def _shape(self, name: str) -> tuple[int, ...] | None:
        constant: Array | None = self._graph.constants.get(name)
        return self._graph.shapes.get(name) if constant is None else constant.shape

    def _numbers(self, numbers: Iterable[int]) -> str:
        """Store integers as a constant and return its name. Equal integers get the same name, and are stored once."""
        array = np.array(list(numbers), np.int64)
        name = f"position_{'_'.join(map(str, array))}"
        self._constants[name] = array
        return name


def _whole_axis(step: GraphStep, rank: int) -> int:
    """The first axis along which *step* needs all positions."""
    axis: Any = step.attributes.get("axis", 0 if step.op == "Split" else -1)
    return int(axis) % rank
