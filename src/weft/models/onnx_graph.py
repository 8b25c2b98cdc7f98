"""ONNX graphs: reading and writing files, queries of a graph, and changes to it.

The graph in memory is ONNX's own protocol buffer, which keeps what weft does not know (documentation, metadata, fields
of later versions) and writes the same bytes again. The ``Onnx...`` protocols name the fields that weft relies on, so
that a module which only walks a graph needs no ``onnx``. Queries: the names that a node reads, with those of its nested
graphs; the producer of a value; the nodes that an output needs; attributes; constants. Changes: copying, pruning,
replacing nodes and constants, inlining functions, converting opsets.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, overload

import numpy as np
import onnx
import onnx.inliner
import onnx.shape_inference
from onnx import AttributeProto, TensorProto, helper, numpy_helper, version_converter
from onnx.external_data_helper import load_external_data_for_tensor, set_external_data

from weft.base.errors import InputError, ModelError, reason_of
from weft.base.files import replacing
from weft.models.element_types import dtype_bits, element_type

Array = np.ndarray[Any, Any]

MOST_BYTES_IN_FILE = 1_800_000_000
"""Protocol buffers end at 2 GiB; a larger model keeps its weights in a file beside it."""

STANDARD_DOMAINS = ("", "ai.onnx")
"""Two spellings of the domain of the standard's operators."""

Message = TypeVar("Message")


class OnnxTensor(Protocol):
    """A stored tensor (``TensorProto``)."""

    name: str
    data_type: int
    dims: Sequence[int]
    raw_data: bytes


class OnnxAttribute(Protocol):
    """An attribute of a node (``AttributeProto``)."""

    name: str
    type: int
    i: int
    f: float
    s: bytes
    t: Any
    g: OnnxGraph
    ints: Sequence[int]
    graphs: Sequence[OnnxGraph]


class OnnxNode(Protocol):
    """A node (``NodeProto``)."""

    name: str
    op_type: str
    domain: str
    input: MutableSequence[str]
    output: MutableSequence[str]
    attribute: Any


class OnnxValue(Protocol):
    """A declared input, output or inner value (``ValueInfoProto``)."""

    name: str
    type: Any


class OnnxGraph(Protocol):
    """A graph (``GraphProto``)."""

    name: str
    node: Any
    initializer: Any
    sparse_initializer: Any
    input: Any
    output: Any
    value_info: Any


class OnnxModel(Protocol):
    """A model (``ModelProto``)."""

    graph: OnnxGraph
    ir_version: int
    opset_import: Any
    metadata_props: Any
    functions: Any

    def SerializeToString(self, *, deterministic: bool = ...) -> bytes: ...
    def ByteSize(self) -> int: ...


def message(value: object) -> Any:
    """Return *value* itself, typed as Any, to pass it to functions of onnx."""
    return value


# Files


def load(path: str | os.PathLike[str], *, weights: bool = False) -> OnnxModel:
    """Read a model from a file. *weights*: also read weights that are stored outside it. Raises what onnx raises."""
    model: OnnxModel = onnx.load(os.fspath(path), load_external_data=weights)
    return model


def save(model: OnnxModel, path: str | os.PathLike[str], *, outside: bool = False, data: str = "") -> None:
    """Write *model* to *path*. *outside*: write its weights to the file *data* in the same folder."""
    onnx.save_model(message(model), os.fspath(path), save_as_external_data=outside, location=data or None)


def write_model(path: str | os.PathLike[str], model: OnnxModel, error: type[InputError]) -> None:
    """Replace the file at *path*; weights of more than ``MOST_BYTES_IN_FILE`` go to ``<path>.data`` beside it.

    Sizes are added up here, because protocol buffers cannot count a message of more than 2 GiB (``ByteSize``).
    """
    data = os.path.basename(os.path.realpath(path)) + ".data"
    stored = sum(math.prod(tensor.dims) * dtype_bits(tensor.data_type) // 8 for tensor in model.graph.initializer)
    with replacing(path, error) as draft:
        save(model, draft, outside=stored > MOST_BYTES_IN_FILE, data=data)


def copied(message: Message) -> Message:
    """A copy of a model, a graph, a node or a tensor."""
    copy: Message = type(message)()
    copy.CopyFrom(message)  # type: ignore[attr-defined]  # every message has it
    return copy


def empty_model() -> OnnxModel:
    """A model without a graph, as a placeholder."""
    model: OnnxModel = onnx.ModelProto()
    return model


def fill(field: Any, values: Iterable[Any]) -> None:
    """Replace the content of a repeated protobuf *field*; *values* may be an iterator over the same field."""
    new_values = list(values)
    del field[:]
    field.extend(new_values)


def metadata(model: OnnxModel) -> dict[str, str]:
    """The model's ``metadata_props`` as a dictionary; a value that is not UTF-8 is bytes."""
    return {entry.key: entry.value for entry in model.metadata_props}


def set_metadata(model: OnnxModel, entries: Mapping[str, str]) -> None:
    """Replace the ``metadata_props``."""
    helper.set_model_props(message(model), dict(entries))


def opsets(model: OnnxModel) -> dict[str, int]:
    """Operator domain -> imported version; the domain of the standard is the empty string."""
    return {standard_domain(entry.domain): int(entry.version) for entry in model.opset_import}


def add_opset(model: OnnxModel, domain: str, version: int) -> None:
    """Import the operators of a domain, unless the model already imports this domain."""
    if all(entry.domain != domain for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(domain, version))


def standard_domain(domain: str) -> str:
    return "" if domain in STANDARD_DOMAINS else domain


def inlined(model: OnnxModel) -> OnnxModel:
    """*model* with its local functions inlined; the same object if it has none. Raises what ONNX's inliner raises."""
    if not model.functions:
        return model
    flat: OnnxModel = message(onnx.inliner.inline_local_functions(message(model)))
    return flat


def at_opset(model: OnnxModel, opset: int) -> OnnxModel:
    """*model* converted to *opset* of the standard's operators. Raises what ONNX's converter raises."""
    converted: OnnxModel = message(version_converter.convert_version(message(model), opset))
    return converted


def inferred(model: OnnxModel) -> OnnxModel:
    """*model* with the shapes of its values as ONNX infers them; complete its attributes first (``write_defaults``)."""
    known: OnnxModel = message(onnx.shape_inference.infer_shapes(message(model), data_prop=True))
    return known


# Tensors


def to_array(tensor: OnnxTensor) -> Array:
    """The values of a tensor whose data is in the message, not in an external file."""
    values: Array = numpy_helper.to_array(message(tensor))
    return values


def to_tensor(values: Array, name: str = "") -> Any:
    """A tensor of ONNX that holds *values*."""
    return numpy_helper.from_array(values, name)


def read_tensor(tensor: Any, folder: Path | None) -> Array:
    """The values of a tensor, from the message or from an external file in *folder*.

    Raises ``OSError``, ``ValueError``, ``TypeError``, ``KeyError``, ``RuntimeError`` or onnx's own ``ValidationError``
    (``UNREADABLE``); onnx refuses files outside of the folder.
    """
    if tensor.data_location == TensorProto.EXTERNAL:
        if folder is None:
            raise OSError("no folder to look for external data in")
        tensor = copied(tensor)
        load_external_data_for_tensor(tensor, str(folder))
    return to_array(tensor)


def move_outside(tensor: Any, file: str, offset: int) -> bytes:
    """Declare that a tensor's data is at byte *offset* of the external *file*; return the data to write there."""
    data: bytes = tensor.raw_data
    set_external_data(tensor, file, offset=offset, length=len(data))
    tensor.ClearField("raw_data")
    return data


UNREADABLE = (ValueError, TypeError, KeyError, OSError, RuntimeError, onnx.checker.ValidationError)
"""Exceptions that reading a damaged tensor may raise."""


def stored_array(tensor: Any, folder: Path | None) -> Array:
    """The values of a tensor (see ``read_tensor``); raises ModelError that names the tensor if it cannot be read."""
    if any(size < 0 for size in tensor.dims):
        raise ModelError(f"its tensor {tensor.name} has the shape {list(tensor.dims)}")
    try:
        return read_tensor(tensor, folder or Path("."))
    except OSError as error:
        raise ModelError(f"the file of its tensor {tensor.name} cannot be read: {reason_of(error)}") from error
    except UNREADABLE as error:
        raise ModelError(f"its tensor {tensor.name} cannot be read; the file is damaged or incomplete") from error


def initializers(graph: OnnxGraph) -> dict[str, Any]:
    """The stored tensors of a graph by name."""
    return {tensor.name: tensor for tensor in graph.initializer}


def constants(graph: OnnxGraph) -> dict[str, Any]:
    """The initializers of a graph by name, and the tensors of its Constant nodes by the names of the outputs."""
    tensors = initializers(graph)
    for node in graph.node:
        value = constant_tensor(node)
        if value is not None:
            tensors[node.output[0]] = copied(value)
            tensors[node.output[0]].name = node.output[0]
    return tensors


def constant_tensor(node: OnnxNode) -> Any:
    """The tensor in a Constant node; None for other nodes, and for constants that are plain numbers or strings."""
    if node.op_type != "Constant":
        return None
    return next((attribute.t for attribute in node.attribute if attribute.name == "value"), None)


def constant_number(node: OnnxNode) -> Array | None:
    """The plain numbers in a Constant node (``value_int`` and the like); None if the node holds no such number."""
    for attribute in node.attribute:
        if attribute.name in ("value_int", "value_ints"):
            return np.asarray(helper.get_attribute_value(attribute), np.int64)
        if attribute.name in ("value_float", "value_floats"):
            return np.asarray(helper.get_attribute_value(attribute), np.float32)
    return None


def request_inputs(graph: OnnxGraph) -> list[Any]:
    """The declared inputs that a request fills: all without an initializer, which old IR versions also list."""
    stored = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in stored]


def dimensions(value: OnnxValue) -> list[int | str] | None:
    """The sizes of a declared tensor; a dimension without a size is its name or ''. None if no rank is declared."""
    if not value.type.tensor_type.HasField("shape"):
        return None
    return [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in value.type.tensor_type.shape.dim]


# Nodes


def qualified(node: OnnxNode) -> str:
    """The operator with its domain: ``Conv`` for the standard's, ``com.microsoft:Attention`` for other domains."""
    return node.op_type if node.domain in STANDARD_DOMAINS else f"{node.domain}:{node.op_type}"


def node_name(node: OnnxNode) -> str:
    """The name of a node; if it has none, the name that TensorRT's parser gives it."""
    return node.name or f"node_of_{next(iter(node.output), '')}"


@dataclass(frozen=True, slots=True)
class Attributes:
    """The attributes of a node, read by the type that the caller needs; some files store a wrong type."""

    node: Any

    def integer(self, name: str, default: int) -> int:
        attribute = self._find(name, AttributeProto.INT)
        return default if attribute is None else int(attribute.i)

    def integers(self, name: str, default: Sequence[int]) -> tuple[int, ...]:
        attribute = self._find(name, AttributeProto.INTS)
        return tuple(default) if attribute is None else tuple(attribute.ints)

    def text(self, name: str, default: str = "") -> str:
        attribute = self._find(name, AttributeProto.STRING)
        return default if attribute is None else attribute.s.decode("utf-8", "replace")

    @overload
    def number(self, name: str) -> float | None: ...
    @overload
    def number(self, name: str, default: float) -> float: ...
    def number(self, name: str, default: float | None = None) -> float | None:
        attribute = self._find(name, AttributeProto.FLOAT)
        return default if attribute is None else float(attribute.f)

    def tensor(self, name: str) -> Any:
        """The tensor attribute *name*, or None."""
        attribute = self._find(name, AttributeProto.TENSOR)
        return None if attribute is None else attribute.t

    def length(self, name: str) -> int:
        """Number of values of a list attribute of any type."""
        attribute = next((candidate for candidate in self.node.attribute if candidate.name == name), None)
        return 0 if attribute is None else max(len(attribute.ints), len(attribute.floats), len(attribute.strings))

    def has(self, name: str) -> bool:
        return any(attribute.name == name for attribute in self.node.attribute)

    def values(self) -> dict[str, Any]:
        """All attributes as Python values; a string is bytes, a tensor or a graph a message."""
        return {attribute.name: helper.get_attribute_value(attribute) for attribute in self.node.attribute}

    def _find(self, name: str, kind: int) -> Any:
        """The attribute *name*, or None; raises ModelError if its type is not *kind*."""
        for attribute in self.node.attribute:
            if attribute.name == name:
                # Files of the oldest IR versions do not store the type.
                if attribute.type not in (kind, AttributeProto.UNDEFINED):
                    raise ModelError(f"its attribute {name!r} has the wrong type")
                return attribute
        return None


def bodies(node: OnnxNode) -> list[OnnxGraph]:
    """The graphs inside a node: the branches of If, the bodies of Loop and Scan."""
    single = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    return [*single, *(graph for attribute in node.attribute for graph in attribute.graphs)]


def body(node: OnnxNode, name: str) -> OnnxGraph:
    """The nested graph in the attribute *name*; raises ModelError if it is missing."""
    for attribute in node.attribute:
        if attribute.name == name:
            graph: OnnxGraph = attribute.g
            return graph
    raise ModelError(f"the {name} graph is missing")


def all_nodes(graph: OnnxGraph) -> Iterator[OnnxNode]:
    """All nodes of a graph; each node is followed by the nodes of its nested graphs."""
    for node in graph.node:
        yield node
        for nested in bodies(node):
            yield from all_nodes(nested)


def names_read(node: OnnxNode) -> set[str]:
    """The names that a node reads, including those that its nested graphs capture."""
    return set(filter(None, node.input)).union(*map(captured, bodies(node)))


def captured(graph: OnnxGraph) -> set[str]:
    """The names that a nested graph reads from its enclosing graphs."""
    inside = {value.name for value in (*graph.input, *graph.initializer)}
    inside |= {tensor.values.name for tensor in graph.sparse_initializer}
    inside |= {name for node in graph.node for name in node.output}
    used = {name for node in graph.node for name in names_read(node)} | {output.name for output in graph.output}
    return used - inside - {""}


# Structure


def producers(nodes: Iterable[OnnxNode]) -> dict[str, int]:
    """Name of a value -> index of the node that produces it; raises ModelError if two nodes produce the same name."""
    indices: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for name in filter(None, node.output):
            if name in indices:
                raise ModelError(f"two nodes produce {name!r}")
            indices[name] = index
    return indices


def makers(nodes: Iterable[OnnxNode]) -> dict[str, Any]:
    """Name of a value -> the node that produces it."""
    return {name: node for node in nodes for name in node.output if name}


def last_uses(nodes: Iterable[OnnxNode]) -> dict[str, int]:
    """Name of a value -> index of the last node that reads it."""
    return {name: index for index, node in enumerate(nodes) for name in node.input}


def needed_places(nodes: Sequence[OnnxNode], names: Iterable[str]) -> list[int]:
    """Indices, ascending, of the nodes that compute the values *names*; *nodes* must be in execution order."""
    needed, indices = set(names), list[int]()
    for index in range(len(nodes) - 1, -1, -1):
        if any(name in needed for name in nodes[index].output if name):
            indices.append(index)
            needed |= names_read(nodes[index])
    return indices[::-1]


def needed_nodes(nodes: Sequence[Any], names: Iterable[str]) -> list[Any]:
    """The nodes that compute the values *names*, in order."""
    return [nodes[index] for index in needed_places(nodes, names)]


def prune(graph: OnnxGraph) -> None:
    """Remove the nodes that no output of the graph needs."""
    fill(graph.node, needed_nodes(graph.node, [value.name for value in graph.output]))


def rename_inputs(nodes: Iterable[OnnxNode], names: Mapping[str, str]) -> None:
    """Rename inputs of nodes in place; names: old -> new."""
    for node in nodes:
        for index, name in enumerate(node.input):
            node.input[index] = names.get(name, name)


def replace_nodes(graph: OnnxGraph, nodes: Iterable[Any], tensors: Iterable[Any] = ()) -> None:
    """Replace the nodes of a graph, and add *tensors*; initializers that are no longer read are removed."""
    fill(graph.node, nodes)
    used = {name for node in graph.node for name in names_read(node)} | {output.name for output in graph.output}
    fill(graph.initializer, [tensor for tensor in (*graph.initializer, *tensors) if tensor.name in used])


# Values


def evaluate(
    model: OnnxModel | Mapping[str, int], nodes: Sequence[Any], values: Mapping[str, Array], names: Sequence[str]
) -> list[Array]:
    """Run *nodes* with onnx's reference evaluator; return the values of *names*. Raises what onnx and numpy raise.

    model: the model whose opsets the nodes use, or domain -> version. values: the inputs by name.
    """
    from onnx.reference import ReferenceEvaluator  # 0.3 s to import, and only for files that compute with constants

    versions = model if isinstance(model, Mapping) else opsets(model)
    graph = helper.make_graph(
        nodes, "constants", [onnx.ValueInfoProto(name=name) for name in values], [declared(name) for name in names]
    )
    imports = [helper.make_opsetid(domain, version) for domain, version in versions.items()]
    evaluator = ReferenceEvaluator(helper.make_model(graph, opset_imports=imports))
    with np.errstate(all="ignore"):
        return [np.asarray(value) for value in evaluator.run(None, dict(values))]


# Making


def make_node(op: str, inputs: Iterable[str], outputs: Iterable[str], name: str = "", **attributes: Any) -> OnnxNode:
    """Make a node; the keyword ``domain`` sets the operator's domain, all others are attributes."""
    node: OnnxNode = message(helper.make_node(op, list(inputs), list(outputs), name or None, **attributes))
    return node


def declared(name: str, kind: int = 0, shape: Sequence[int | str | None] | None = None) -> Any:
    """Declare a value (``ValueInfoProto``) of element type *kind*; for 0, without type and shape."""
    if not kind:
        return onnx.ValueInfoProto(name=name)
    return helper.make_tensor_value_info(name, int(kind), shape)


def declared_like(name: str, values: Array) -> Any:
    """Declare a value with the type and shape of *values*."""
    return declared(name, element_type(values.dtype), values.shape)


def least_ir_version(opset: int) -> int:
    """The lowest IR version that supports this opset of the standard's operators."""
    return int(helper.find_min_ir_version_for([helper.make_opsetid("", opset)]))


def make_model(
    nodes: Iterable[Any],
    name: str,
    inputs: Iterable[Any],
    outputs: Iterable[Any],
    initializers: Iterable[Any] = (),
    *,
    opset: int = 1,
    like: OnnxModel | None = None,
    ir_version: int | None = None,
    producer: str = "",
    metadata: Mapping[str, str] | None = None,
) -> OnnxModel:
    """Make a model with one graph.

    The model imports the default operator domain at *opset*; with *like*, opsets, functions and IR version are copied
    from that model instead. *ir_version* overrides the IR version, which by default is *like*'s or onnx's newest.
    *metadata*: entries of the model's ``metadata_props``.
    """
    graph = helper.make_graph(list(nodes), name, list(inputs), list(outputs), list(initializers))
    options: dict[str, Any] = {"producer_name": producer} if producer else {}
    if like is not None:
        options |= {"functions": like.functions, "ir_version": like.ir_version}
    if ir_version is not None:
        options["ir_version"] = ir_version
    imports = [helper.make_opsetid("", opset)] if like is None else like.opset_import
    model: OnnxModel = helper.make_model(graph, opset_imports=imports, **options)
    if metadata is not None:
        set_metadata(model, metadata)
    return model
