"""An opened and checked ONNX file: ``OnnxSource``, with nodes in order, stored tensors as arrays, and input sizes.

All damage of a file that shows without interpreting its operators raises ``ModelError`` here.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from weft.base.errors import ModelError
from weft.models.element_types import ElementType, type_name
from weft.models.onnx_graph import (
    STANDARD_DOMAINS,
    Attributes,
    OnnxGraph,
    OnnxModel,
    OnnxNode,
    OnnxTensor,
    OnnxValue,
    constant_number,
    constant_tensor,
    evaluate,
    initializers,
    inlined,
    metadata,
    opsets,
    request_inputs,
    stored_array,
)
from weft.models.onnx_graph import load as load_model
from weft.runtime.metadata import STITCHED_KEY
from weft_stitch.net import Array
from weft_stitch.reading.draft import Foreign

FLOATS: Mapping[int, str] = {
    ElementType.FLOAT: "float32",
    ElementType.FLOAT16: "float16",
    ElementType.DOUBLE: "float64",
    ElementType.BFLOAT16: "bfloat16",
}
"""ONNX element type of floats that can be read -> its name."""
INTEGERS: Mapping[int, str] = {ElementType.INT64: "int64", ElementType.INT32: "int32", ElementType.BOOL: "bool"}
"""ONNX element type of inputs that are tokens or masks -> its name."""
HALF_TYPES = ("float16", "bfloat16")
"""Names of the 16-bit float types, called half precision in messages."""


@dataclass(frozen=True, eq=False)
class SourceNode(Attributes):
    """One node of a file; ``node`` is the file's own object."""

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    """The names of its outputs; empty for an output that no node reads."""

    def pair(self, name: str, default: int) -> tuple[int, int]:
        """An attribute of two positive integers; *default* for each if it is missing."""
        numbers = self.integers(name, (default, default))
        if len(numbers) != 2 or min(numbers) < 1:
            raise ModelError(f"its {name} is {list(numbers)}, not two positive numbers")
        return numbers[0], numbers[1]


@dataclass(frozen=True, eq=False)
class OnnxSource:
    """A model file whose nodes and tensors are checked and in order."""

    proto: OnnxModel
    opset: int
    nodes: tuple[SourceNode, ...]
    """The nodes that the outputs need, in an order in which they can run."""
    inputs: Mapping[str, tuple[int | str, ...]]
    """Input -> its sizes; an open size is its symbolic name, or '?'."""
    outputs: tuple[str, ...]
    tensors: Mapping[str, OnnxTensor]
    folder: Path | None

    def stored(self, name: str) -> Array:
        """The array of a stored tensor."""
        return stored_array(self.tensors[name], self.folder)

    @cached_property
    def precision(self) -> str:
        """The type of most weights, or of the inputs if no weight is stored."""
        elements: Counter[int] = Counter()
        for tensor in self.tensors.values():
            if tensor.data_type in FLOATS:
                elements[tensor.data_type] += math.prod(tensor.dims)
        if not elements:
            values = self.proto.graph.input  # old files list constants, too
            elements.update(value.type.tensor_type.elem_type for value in values if value.name in self.inputs)
        return FLOATS[elements.most_common(1)[0][0]]


def open_source(model: OnnxModel, folder: Path | None, input_types: Mapping[int, str] = FLOATS) -> OnnxSource:
    """Check *model* and order its nodes; ``ModelError`` if it is damaged.

    *folder*: where its external data is. *input_types*: the types that its inputs may have.
    """
    _require_text(model)
    if tasks := metadata(model).get(STITCHED_KEY, ""):
        raise ModelError(f"is a stitched file{_source_names(tasks)}; give the models that it was made of")
    model = _inline(model)
    graph = model.graph
    if not graph.node or not graph.output:
        raise ModelError("it holds no graph with nodes and outputs; is it an ONNX model?")
    tensors = initializers(graph)
    inputs = {value.name: _sizes(value, input_types) for value in request_inputs(graph)}
    if not inputs:
        raise ModelError("it has no inputs")
    outputs = tuple(dict.fromkeys(value.name for value in graph.output))
    tensors_read = {name for node in graph.node for name in node.input} | set(outputs)
    nodes = _order_nodes([_node(proto, tensors_read) for proto in graph.node], set(inputs) | set(tensors), outputs)
    return OnnxSource(model, _opset(model), tuple(nodes), inputs, outputs, tensors, folder)


def _source_names(text: str) -> str:
    """The models that a stitched file was made of, as the end of a message; empty if its metadata is damaged."""
    try:
        return f" of {', '.join(str(task['name']) for task in json.loads(text)['tasks'])}"
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""


def load(path: Path) -> OnnxModel:
    """Read the model in the file *path*, without external data; ``ModelError`` if it cannot be read."""
    if path.is_dir():
        raise ModelError(f"is a folder; give its files, as in {path}/*.onnx")
    try:
        return load_model(path)
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror or error}") from error
    except Exception as error:  # protobuf's DecodeError, which has no public home, and onnx's own
        raise ModelError("is not an ONNX file, or a damaged one; export or download it again") from error


def _require_text(model: OnnxModel) -> None:
    """Raise ``ModelError`` for names that are not UTF-8, for which protobuf returns bytes or fails."""
    try:
        "".join(_texts(model.graph))
    except (TypeError, UnicodeDecodeError) as error:
        raise ModelError("names in it are not text; the file is damaged") from error


def _texts(graph: OnnxGraph) -> Iterator[str]:
    """All names in a graph, without those of graphs inside nodes."""
    yield graph.name
    for node in graph.node:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (attribute.name for attribute in node.attribute)
    for named in (*graph.initializer, *graph.input, *graph.output):
        yield named.name


def _inline(model: OnnxModel) -> OnnxModel:
    """The model with its functions inlined."""
    try:
        return inlined(model)
    except Exception as error:  # whatever the C++ side makes of a damaged function
        raise ModelError("its functions cannot be inlined; the file is damaged") from error


def _opset(model: OnnxModel) -> int:
    """The version of the standard operator set."""
    versions = opsets(model)
    if "" not in versions:
        raise ModelError("it names no version of the ONNX operators")
    return versions[""]


def _sizes(value: OnnxValue, allowed_types: Mapping[int, str]) -> tuple[int | str, ...]:
    """The sizes of an input, open ones by name; ``ModelError`` for an unknown rank or a type not in *allowed_types*."""
    tensor_type = value.type.tensor_type
    if not value.type.HasField("tensor_type") or not tensor_type.HasField("shape"):
        raise ModelError(f"its input {value.name} is not a tensor of known rank")
    if tensor_type.elem_type not in allowed_types:
        type_names = "float" if allowed_types == FLOATS else ", ".join(allowed_types.values())
        raise ModelError(
            f"its input {value.name} is of type {type_name(tensor_type.elem_type)}; {type_names} inputs can be stitched"
        )
    return tuple(int(dim.dim_value) if dim.dim_value > 0 else dim.dim_param or "?" for dim in tensor_type.shape.dim)


def _node(proto: OnnxNode, tensors_read: set[str]) -> SourceNode:
    """A node of the file, without outputs that are not in *tensors_read*."""
    outputs = tuple(output if output in tensors_read else "" for output in proto.output)
    name = proto.name or next((output for output in outputs if output), proto.op_type)
    domain = "" if proto.domain in STANDARD_DOMAINS else f"{proto.domain}."
    return SourceNode(proto, name, domain + proto.op_type, tuple(proto.input), outputs)


def _order_nodes(nodes: Sequence[SourceNode], known: set[str], outputs: Sequence[str]) -> list[SourceNode]:
    """The nodes that the outputs need, each after the nodes it reads from; *known*: inputs and stored tensors.

    The order of the file is kept if nodes can run in it. Raises ``ModelError`` for cycles and missing tensors.
    """
    writers: dict[str, SourceNode] = {}
    for node in nodes:
        for output in filter(None, node.outputs):
            if output in writers or output in known:
                raise ModelError(f"{output} is written twice; the file is damaged")
            writers[output] = node
    ordered: dict[int, SourceNode] = {}  # by identity; a node comes after all nodes it reads from
    visited: set[int] = set()
    stack = [(name, "an output") for name in reversed(outputs)]  # of tensors and their readers: depth first
    while stack:
        name, reader = stack[-1]
        if name in known or id(writers.get(name)) in ordered:
            stack.pop()
            continue
        if name not in writers:
            raise ModelError(f"{reader} reads {name}, which nothing writes")
        node = writers[name]
        computed = [source for source in node.inputs if source and source not in known]
        missing = [source for source in computed if id(writers.get(source)) not in ordered]
        if not missing:
            ordered[id(node)] = node
            stack.pop()
            continue
        if id(node) in visited:  # on the stack already, waiting for what it reads: a cycle
            raise ModelError(f"{node.name} reads what is made from its own output; the file is damaged")
        visited.add(id(node))
        stack.extend((source, node.name) for source in reversed(missing))
    in_file_order = [node for node in nodes if id(node) in ordered]
    return in_file_order if _runnable(in_file_order, known) else list(ordered.values())


def _runnable(nodes: Sequence[SourceNode], known: set[str]) -> bool:
    """Whether *nodes* can run in this order."""
    known = known | {""}  # an omitted input
    for node in nodes:
        if not known.issuperset(node.inputs):
            return False
        known.update(node.outputs)
    return True


_MOST_ELEMENTS = 2**28
"""Limit on the elements of a computed constant: more than any weight has; only damaged shapes ask for more."""

_BROADCASTING = {
    "Add", "Sub", "Mul", "Div", "Pow", "Where", "Equal", "Greater", "Less", "And", "Or", "Min", "Max", "Mod",
}  # fmt: skip
"""Operators whose output is as large as their broadcast inputs."""
_NOT_LARGER = {
    "Cast", "Gather", "Concat", "Unsqueeze", "Squeeze", "Reshape", "Slice", "Floor", "Ceil", "Sqrt", "Transpose", "Neg",
    "Flatten", "ReduceProd", "ReduceSum", "ReduceMax", "Reciprocal", "Exp", "Not", "DequantizeLinear", "CastLike",
    "ScatterND", "Abs", "Size", "Shape", "ReduceL2",
}  # fmt: skip
"""Operators whose output is at most as large as their inputs (for Gather: as their product)."""
_SHAPE_INPUTS = {"ConstantOfShape": 0, "Expand": 1}
"""Operator -> index of the input that holds the shape of its output."""

_EVALUATED_SINCE = {"DequantizeLinear": 19}
"""Operator -> the first operator set in which onnx's evaluator runs it; its meaning was the same before."""

FOLDED = _BROADCASTING | _NOT_LARGER | set(_SHAPE_INPUTS)
"""Operators that are evaluated if all their inputs are constant."""


def constant_node(node: SourceNode, folder: Path | None) -> Array:
    """The array of a node ``Constant``; ``Foreign`` if it holds anything but numbers."""
    tensor = constant_tensor(node.node)
    values = constant_number(node.node) if tensor is None else stored_array(tensor, folder)
    if values is None:
        raise Foreign("it holds neither numbers nor a tensor")
    return values


def fold(node: SourceNode, inputs: Mapping[str, Array], opset: int) -> Sequence[Array]:
    """The outputs of *node* for constant *inputs*, computed by onnx itself."""
    if node.op not in FOLDED:
        raise Foreign("it computes on constants only; simplify the file first")
    _require_small(node, inputs)
    evaluated_opset = max(opset, _EVALUATED_SINCE.get(node.op, 0))
    try:
        return evaluate({"": evaluated_opset}, [node.node], inputs, node.outputs)
    except Exception as error:  # the evaluator raises whatever numpy does
        raise ModelError("it cannot be computed from its constants; the file is damaged") from error


def float32(array: Array, tensor: str) -> Array:
    """*array* as float32, the type of a net's weights; ``Foreign`` if it holds no floats."""
    if array.dtype.kind in "iub":
        raise Foreign(f"{tensor} holds {array.dtype} numbers, not floats")
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(array.astype(np.float32))


def _require_small(node: SourceNode, inputs: Mapping[str, Array]) -> None:
    """Raise ``ModelError`` if *node* might compute a constant of more than ``_MOST_ELEMENTS`` numbers."""
    try:
        if node.op in _SHAPE_INPUTS:
            shape = [int(size) for size in inputs[node.inputs[_SHAPE_INPUTS[node.op]]].reshape(-1)]
            # Expand broadcasts: its output may be larger than the shape
            elements = math.prod(shape) * max([1, *(array.size for array in inputs.values())])
        elif node.op in _BROADCASTING:
            elements = math.prod(np.broadcast_shapes(*(array.shape for array in inputs.values())))
        elif node.op == "Gather":
            elements = math.prod(array.size for array in inputs.values())
        else:
            elements = sum(array.size for array in inputs.values())
    except (ValueError, KeyError, IndexError) as error:
        raise ModelError("its constants do not fit each other") from error
    if not 0 <= elements <= _MOST_ELEMENTS:
        raise ModelError(f"it would make a constant of {elements} numbers")
