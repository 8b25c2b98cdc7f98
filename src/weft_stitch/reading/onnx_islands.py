"""ONNX nodes that a net cannot express, kept as they are: ``OnnxIsland``, extracted by ``Surveyor``.

A *value* is a tensor that a net can hold: rows of vectors or of pictures. An island is the node that writes a value,
with the nodes before it whose tensors are no values (indices, other ranks), called *hidden*. Its nodes are converted to
``OPSET``, the operator set of stitched files, so that they mean the same there. ``adapt_to_rows`` changes constant
shapes that contain the file's number of rows, so that an island takes any number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import helper, shape_inference

from weft.base.errors import StitchError
from weft.models.element_types import ElementType, element_type, type_name
from weft.models.onnx_graph import (
    Attributes,
    OnnxNode,
    at_opset,
    bodies,
    copied,
    declared,
    make_model,
    make_node,
    message,
    to_array,
    to_tensor,
)
from weft.models.onnx_import.infer import with_defaults
from weft_stitch.graph import DYNAMIC, Builder
from weft_stitch.graph_steps import reshape
from weft_stitch.net import Array, Value
from weft_stitch.onnx_writer import OPSET
from weft_stitch.reading.draft import Foreign, Picture, Shape, island_name, view_size
from weft_stitch.reading.onnx_source import FLOATS, HALF_TYPES, OnnxSource, SourceNode

_MOST_SHAPE_SIZE = 4096
"""Constants of more elements cannot be shapes: shape inference does not get their numbers."""

_RANDOM = frozenset(("RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"))
"""Operators with random outputs."""


class TensorKind(NamedTuple):
    """Element type and shape of a tensor; the shape is None if it cannot be inferred."""

    dtype: int
    shape: Shape | None


@dataclass(frozen=True, eq=False)
class OnnxIsland:
    """ONNX nodes that compute one value from others, and run wherever ONNX does."""

    nodes: tuple[OnnxNode, ...]
    constants: Mapping[str, Array]
    inputs: tuple[tuple[str, Shape], ...]
    """The tensors it reads, with their shapes in the file without rows."""
    output: str
    view: Shape
    """The shape of its output in the file, without rows."""
    value: Value
    """The size of its output in the net."""
    signature: str
    """Equal for islands that compute the same."""
    rows: int
    """Number of rows in the file."""
    shapes: Mapping[str, Shape]
    """Shapes of the tensors that its nodes write, where known; the rows are ``DYNAMIC``."""
    tied: str = ""
    """The node that only works for the file's number of rows; empty if there is none."""

    def steps(self, builder: Builder, inputs: Sequence[str]) -> str:
        """Add the nodes to a graph and return the output's name; *inputs* and output are [rows, C, H, W].

        Raises ``StitchError`` if the island is tied to another number of rows.
        """
        rows = builder.shape(inputs[0])[0]
        if self.tied and rows != self.rows:
            raise StitchError(
                f"{self.tied} works only for the number of rows in the file ({self.rows}), as it moves the rows; "
                "leave out dynamic = True"
            )
        names = {"": ""}  # tensor of the file -> tensor of the graph; the empty name is an omitted input
        for (name, view), tensor in zip(self.inputs, inputs, strict=True):
            names[name] = tensor if builder.shape(tensor)[1:] == view else reshape(builder, tensor, view)
        names |= {name: builder.constant(array, "island") for name, array in self.constants.items()}
        for node in self.nodes:
            # of a hidden tensor, the shape is empty if unknown
            shapes = [
                (rows, *self.view) if output == self.output else self._shape(output, rows) for output in node.output
            ]
            operands = [names[source] for source in node.input]
            if node.op_type == "QuantizeLinear":
                operands[0] = _keep_in_floats(builder, operands[0])
            written = builder.add_many(node.op_type, *operands, shapes=shapes, **Attributes(node).values())
            names |= {output: tensor for output, tensor in zip(node.output, written, strict=True) if output}
        value_shape = (self.value.channels, self.value.height, self.value.width)
        return names[self.output] if self.view == value_shape else reshape(builder, names[self.output], value_shape)

    def _shape(self, name: str, rows: int) -> Shape:
        """The shape of an intermediate tensor, for this number of rows."""
        return tuple(rows if size == DYNAMIC else size for size in self.shapes.get(name, ()))


class Surveyor:
    """Infers types and shapes of tensors that are not values of the net, and extracts islands from a file."""

    def __init__(
        self, source: OnnxSource, rows: int, pictures: Mapping[str, Picture], constants: Mapping[str, Array]
    ) -> None:
        """*rows*: the file's number of rows. *pictures*, *constants*: by tensor; the reader adds to them."""
        self._opset = source.opset
        self._half_precision = source.precision in HALF_TYPES
        self._rows = rows
        self._pictures = pictures
        self._constants = constants
        self.hidden: dict[str, SourceNode] = {}
        """Tensor inside an island -> the node that writes it."""
        self._kinds: dict[str, TensorKind] = {}
        """Tensor -> the type and shape that were inferred for it."""

    def as_read(self, node: SourceNode) -> SourceNode:
        """*node*; a Cast to double (or to half, in a file of halves) becomes one to float32, in which nets compute."""
        to = node.integer("to", 0) if node.op == "Cast" else 0
        if to != ElementType.DOUBLE and not (self._half_precision and to in FLOATS):
            return node
        cast = node.node
        return replace(node, node=make_node("Cast", cast.input, cast.output, cast.name, to=ElementType.FLOAT))

    def infer_outputs(self, node: SourceNode) -> None:
        """Infer types and shapes of the outputs of *node*, whose inputs are known; ``Foreign`` if that fails."""
        _require_portable(node)
        self._require_deterministic(node)
        sources = [name for name in node.inputs if name]
        types = {name: _type_proto(self.kind(name)) for name in sources}
        constants = [name for name in sources if name in self._constants]
        shapes = [name for name in constants if self._constants[name].size <= _MOST_SHAPE_SIZE]  # what may be shapes
        data = {name: to_tensor(self._constant(name), name) for name in shapes}
        schema = _schema(node.op, self._opset)
        try:
            opsets = [helper.make_opsetid("", self._opset)]
            complete = with_defaults(node.node, self._opset)
            inferred = shape_inference.infer_node_outputs(schema, message(complete), types, data, opset_imports=opsets)
        except Exception as error:  # onnx raises several of its own, and RuntimeError
            raise Foreign("the shapes of its outputs cannot be told") from error
        self._kinds.update((name, _tensor_kind(inferred[name])) for name in node.outputs if name in inferred)

    def _require_deterministic(self, node: SourceNode) -> None:
        """Raise ``Foreign`` for operators whose output is random: results could not be compared."""
        training_flag = node.inputs[2] if node.op == "Dropout" and len(node.inputs) > 2 else ""
        if node.op in _RANDOM or (training_flag and self._constants.get(training_flag, np.True_).any()):
            raise Foreign(f"{node.op} cannot be an island either: it draws random numbers")

    def kind(self, tensor: str) -> TensorKind:
        """The type and shape of *tensor* in the types in which nets compute."""
        if tensor in self._constants:
            array = self._constant(tensor)
            return TensorKind(element_type(array.dtype), array.shape)
        if tensor in self._pictures:
            return TensorKind(ElementType.FLOAT, (self._rows, *self._pictures[tensor].view))
        return self._kinds.get(tensor, TensorKind(ElementType.UNDEFINED, None))

    def _constant(self, name: str) -> Array:
        """The constant *name*; floats are float32 where ``as_read`` makes them so."""
        array = self._constants[name]
        # not integers, booleans or texts; bfloat16 has a kind of its own
        is_converted = array.dtype == np.float64 or (self._half_precision and array.dtype.kind not in "iubSUO")
        return array.astype(np.float32) if is_converted else array

    def is_value(self, tensor: str) -> bool:
        """Whether *tensor* can be a value of the net: rows of vectors or of pictures."""
        kind = self.kind(tensor)
        shape = kind.shape or ()
        return kind.dtype == ElementType.FLOAT and len(shape) in (2, 4) and shape[0] == self._rows and min(shape) > 0

    def island(self, node: SourceNode, output: str) -> tuple[OnnxIsland, list[str]]:
        """The island that writes *output*, and the tensors it reads.

        *output*: an output of *node* that is a value. Raises ``Foreign`` if there can be no island.
        """
        nodes = _with_hidden(node, self.hidden)
        sources = list(dict.fromkeys(name for member in nodes for name in member.inputs if name))
        inputs = [name for name in sources if name in self._pictures]
        if not inputs:
            raise Foreign("it reads constants only")
        stored = {name: self._constant(name) for name in sources if name in self._constants}
        converted, stored = self._convert(nodes, inputs, output, stored)
        adapted = adapt_to_rows(converted, stored, inputs, lambda name: self._known_shape(name, stored), self._rows)
        kind = self.kind(output)
        shape = kind.shape
        if kind.dtype != ElementType.FLOAT:
            raise Foreign(f"its output {output} is of type {type_name(kind.dtype)}; float outputs can be stitched")
        if shape is None or len(shape) < 2 or min(shape) < 1 or shape[0] != self._rows:
            raise Foreign(f"its output {output} is not known to be rows")
        input_views = tuple((name, self._pictures[name].view) for name in inputs)
        view = shape[1:]
        island = OnnxIsland(
            tuple(adapted.nodes), adapted.constants, input_views, output, view, view_size(view),
            _signature(nodes), self._rows, adapted.shapes, adapted.tied,
        )  # fmt: skip
        return island, inputs

    def _known_shape(self, name: str, stored: Mapping[str, Array]) -> Shape | None:
        """The shape of a constant in *stored* or of any other tensor, if known."""
        return stored[name].shape if name in stored else self.kind(name).shape

    def _convert(
        self, nodes: Sequence[SourceNode], inputs: Sequence[str], output: str, stored: dict[str, Array]
    ) -> tuple[list[OnnxNode], dict[str, Array]]:
        """The nodes in the operator set ``OPSET``, and their constants there; *stored*: those in the file."""
        protos = [node.node for node in nodes]
        if all(_same_meaning(node.op, self._opset) for node in nodes):
            return protos, stored
        reads, writes = ([declared(name, *self.kind(name)) for name in names] for names in (inputs, [output]))
        tensors = [to_tensor(array, name) for name, array in stored.items()]
        model = make_model(protos, "island", reads, writes, tensors, opset=self._opset)
        try:
            graph = at_opset(model, OPSET).graph
        except Exception as error:  # the converter's own, for operators it cannot bring over
            raise Foreign(f"it cannot be brought to operator set {OPSET}; export the model with that one") from error
        return list(graph.node), {tensor.name: to_array(tensor) for tensor in graph.initializer}


def _keep_in_floats(builder: Builder, value: str) -> str:
    """Insert a ``Max`` that changes nothing between a product and ``QuantizeLinear``.

    Where QuantizeLinear follows a product or its Clip, onnxruntime's optimiser quantises the float32 weights and takes
    kernels for integers, so that answers would not be the model's own.
    """
    lowest = builder.constant(np.array(np.finfo(np.float32).min), "lowest")
    return builder.add("Max", value, lowest, shape=builder.shape(value))


def _with_hidden(node: SourceNode, hidden: Mapping[str, SourceNode]) -> list[SourceNode]:
    """*node* and the nodes that write the hidden tensors it reads, in order: a depth-first search without recursion."""
    order: dict[int, SourceNode] = {}  # by identity
    stack = [(node, False)]
    while stack:
        current, inputs_listed = stack.pop()
        if id(current) in order:
            continue
        if inputs_listed:
            order[id(current)] = current
            continue
        stack.append((current, True))
        stack.extend((hidden[name], False) for name in reversed(current.inputs) if name in hidden)
    return list(order.values())


def _require_portable(node: SourceNode) -> None:
    """Raise ``Foreign`` for operators of other domains, and for those that contain graphs."""
    if "." in node.op or bodies(node.node):
        raise Foreign(f"{node.op} cannot be an island either: it is no plain operator of ONNX")


def _schema(op: str, opset: int) -> Any:
    """The ONNX schema of *op*; ``Foreign`` if the operator set has none."""
    try:
        return onnx.defs.get_schema(op, max_inclusive_version=opset)
    except (onnx.defs.SchemaError, TypeError) as error:
        raise Foreign(f"operator set {opset} has no {op}") from error


def _same_meaning(op: str, opset: int) -> bool:
    """Whether *op* is the same in the file's operator set and in ``OPSET``."""
    return bool(_schema(op, opset).since_version == _schema(op, OPSET).since_version)


def _signature(nodes: Sequence[SourceNode]) -> str:
    """Operators and attributes as text, equal for islands that compute the same."""
    spelled = ["".join((node.op, *sorted(map(_attribute_text, node.values().items())))) for node in nodes]
    return spelled[0] if len(nodes) == 1 else island_name([node.op for node in nodes], spelled)


def _attribute_text(attribute: tuple[str, Any]) -> str:
    """An attribute as text; tensors as their numbers."""
    name, value = attribute
    if isinstance(value, onnx.TensorProto):
        value = to_array(value).tolist()
    return f" {name}={value.decode('utf-8', 'replace') if isinstance(value, bytes) else value}"


def _type_proto(kind: TensorKind) -> onnx.TypeProto:
    return helper.make_tensor_type_proto(kind.dtype, kind.shape)


def _tensor_kind(inferred: onnx.TypeProto) -> TensorKind:
    """The type and shape of an inferred tensor; no shape unless all sizes are known."""
    tensor = inferred.tensor_type
    if not tensor.HasField("shape") or not all(dim.HasField("dim_value") for dim in tensor.shape.dim):
        return TensorKind(tensor.elem_type, None)
    return TensorKind(tensor.elem_type, tuple(int(dim.dim_value) for dim in tensor.shape.dim))


class AdaptedNodes(NamedTuple):
    """The nodes of an island, adapted to any number of rows as far as possible."""

    nodes: list[OnnxNode]
    constants: dict[str, Array]
    shapes: dict[str, Shape]
    """Shapes of the tensors that the nodes write, where known; the rows are ``DYNAMIC``."""
    tied: str
    """The first node that only works for the file's number of rows, with its operator; empty if there is none."""


def adapt_to_rows(
    nodes: Sequence[OnnxNode],
    constants: Mapping[str, Array],
    inputs: Sequence[str],
    shape_of: Callable[[str], Shape | None],
    rows: int,
) -> AdaptedNodes:
    """Make *nodes*, which are in order, work for any number of rows; rows are the first dimension of *inputs*.

    *shape_of*: returns a tensor's shape in the file. *rows*: the number of rows in the file.
    """
    tracker = _RowsTracker(dict(constants), shape_of, rows, dict.fromkeys(inputs, 0))
    adapted = [tracker.adapt(node) for node in nodes]
    return AdaptedNodes(adapted, tracker.constants, tracker.shapes, tracker.tied)


class _RowsTracker:
    """Tracks through the nodes of an island which dimension of a tensor holds the rows; see ``AdaptedNodes``."""

    def __init__(
        self,
        constants: dict[str, Array],
        shape_of: Callable[[str], Shape | None],
        rows: int,
        rows_axes: dict[str, int | None],
    ) -> None:
        """Parameters as for ``adapt_to_rows``; *rows_axes*: the dimension of the rows in the island's inputs."""
        self.constants = constants
        self.shapes: dict[str, Shape] = {}
        self.tied = ""
        self._shape_of = shape_of
        self._rows = rows
        self._rows_axes = rows_axes
        """Tensor -> its dimension whose outermost factor is the rows (rows, or rows x heads); None if unknown."""

    def adapt(self, node: OnnxNode) -> OnnxNode:
        """Track the rows through *node*; return it without the file's number of rows in constant shapes."""
        source = next((name for name in node.input if name in self._rows_axes), None)
        if source is None:
            rows_axis = None
        elif node.op_type == "Reshape" and node.input[1] in self.constants:
            node, rows_axis = self._reshape(node)
        elif node.op_type == "Expand" and node.input[1] in self.constants:
            node, rows_axis = self._expand(node)
        else:
            rows_axis = self._rows_dimension(node, source)
        for name in filter(None, node.output):
            if source is not None:
                self._rows_axes[name] = rows_axis
            self._keep_shape(name, rows_axis)
        return node

    def _keep_shape(self, name: str, rows_axis: int | None) -> None:
        """Record the shape of the output *name*, with dynamic rows at the dimension *rows_axis*."""
        shape = self._shape_of(name)
        if shape is not None:
            self.shapes[name] = tuple(  # a size of rows x heads stays as it is
                DYNAMIC if axis == rows_axis and size == self._rows else size for axis, size in enumerate(shape)
            )

    def _reshape(self, node: OnnxNode) -> tuple[OnnxNode, int | None]:
        """Adapt a Reshape; return it, and the dimension of the rows in its output.

        A target of -1 or 0 in the first dimension accepts any number of rows; a constant there is replaced by one.
        """
        target = self.constants[node.input[1]].astype(np.int64).ravel()
        rows_axis, shape = self._rows_axes.get(node.input[0]), self._shape_of(node.input[0])
        literal_zero = bool(Attributes(node).integer("allowzero", 0))
        if rows_axis is None or shape is None or not len(target):
            return node, None
        copies_rows = target[0] == 0 and not literal_zero  # 0 stands for the input's size unless allowzero is set
        if rows_axis == 0 and (target[0] == -1 or copies_rows):
            return node, 0
        if rows_axis == 0 and target[0] == shape[0] == self._rows and not (literal_zero and (target == 0).any()):
            return self._change_target(node, 0, 0), 0  # 0: as many as in the input
        if rows_axis == 0 and target[0] % self._rows == 0 and (target > 0).all():  # rows merged with the next dimension
            return self._change_target(node, 0, -1), 0
        if (target > 0).all():  # no size is left open
            self.tied = self.tied or f"{node.name or node.output[0]} (Reshape)"
        return node, None

    def _expand(self, node: OnnxNode) -> tuple[OnnxNode, int | None]:
        """Adapt an Expand; return it, and the dimension of the rows in its output."""
        rows_axis, input_shape = self._rows_axes.get(node.input[0]), self._shape_of(node.input[0])
        target = self.constants[node.input[1]]
        if rows_axis is None or input_shape is None:
            return node, None
        # broadcasting aligns shapes at their last dimension
        rows_axis += max(0, len(target) - len(input_shape))
        target_index = rows_axis - max(0, len(input_shape) - len(target))
        if target_index >= 0 and target[target_index] == self._rows:
            node = self._change_target(node, target_index, 1)  # 1: as large as the input
        return node, rows_axis

    def _change_target(self, node: OnnxNode, index: int, size: int) -> OnnxNode:
        """A copy of *node* with *size* at *index* of its target shape, which becomes a constant of its own."""
        copy = copied(node)
        del copy.attribute[:]  # allowzero, with which a 0 would be a size
        copy.input[1] = f"{node.input[1]}.{node.output[0]}"
        target = self.constants[node.input[1]].astype(np.int64).ravel()
        target[index] = size
        self.constants[copy.input[1]] = target
        return copy

    def _rows_dimension(self, node: OnnxNode, source: str) -> int | None:
        """The dimension of the rows in the output of any other operator that reads *source*; None if unknown."""
        rows_axis, input_shape = self._rows_axes[source], self._shape_of(source)
        settings = Attributes(node).values()
        if rows_axis is None or input_shape is None:
            return None
        rank = len(input_shape)
        if node.op_type == "Transpose":
            order = list(settings.get("perm", reversed(range(rank))))
            return order.index(rows_axis) if rows_axis in order else None
        if node.op_type == "Gather":
            axis = settings.get("axis", 0) % rank
            indices = self.constants.get(node.input[1])
            if indices is None or axis == rows_axis:
                return None
            return rows_axis + (indices.ndim - 1 if axis < rows_axis else 0)  # the indices' dimensions replace *axis*
        if node.op_type == "Unsqueeze":
            axes = {dimension % (rank + len(self._axes(node, settings))) for dimension in self._axes(node, settings)}
            kept_axes = [axis for axis in range(rank + len(axes)) if axis not in axes]
            return kept_axes[rows_axis]
        if node.op_type == "Squeeze" or (node.op_type.startswith("Reduce") and not settings.get("keepdims", 1)):
            axes = {dimension % rank for dimension in self._axes(node, settings)}
            return None if rows_axis in axes or not axes else rows_axis - sum(axis < rows_axis for axis in axes)
        # any other operator is taken to align its inputs and output at the last dimension, as broadcasting does
        output_shape = self._shape_of(node.output[0])
        return None if output_shape is None or len(output_shape) < rank else rows_axis + len(output_shape) - rank

    def _axes(self, node: OnnxNode, settings: Mapping[str, Sequence[int]]) -> list[int]:
        """The axes of an operator: an attribute, or a constant input in newer operator sets."""
        stored = self.constants.get(node.input[1]) if len(node.input) > 1 else None
        return list(settings.get("axes", ())) if stored is None else [int(axis) for axis in stored.ravel()]
