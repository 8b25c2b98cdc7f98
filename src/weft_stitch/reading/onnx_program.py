"""ONNX files -> ModelProgram: the nodes of the file, with constants identified by their content; ``read_program``.

Operators are not interpreted. To join programs, it is enough to know which constants are equal and which values are
computed from constants alone; so a model may use any operators. A *key* identifies a constant by its content.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from weft.base.errors import ModelError, StitchError
from weft.base.files import refuse_special_file
from weft.models.element_types import numpy_dtype
from weft.models.onnx_graph import bodies, copied, metadata
from weft.runtime.external import glanced_inputs
from weft.runtime.metadata import EXITS_KEY
from weft_stitch.graph import DYNAMIC, GraphTensor
from weft_stitch.net import Array
from weft_stitch.reading.draft import Foreign
from weft_stitch.reading.onnx_source import FLOATS, INTEGERS, OnnxSource, SourceNode, constant_node, load, open_source

OLDEST = 13
"""The first operator set whose ``Split`` takes sizes that are computed at run time."""
LENGTH = "length"
"""The symbolic name of all dynamic sizes other than the rows."""
_SCOPES = "pkg.torch.onnx.name_scopes"
"""Metadata of a node: the list of the modules around it as Python text; the last but one is the innermost module."""
_RANDOM = ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial")
"""Operators with random outputs."""


@dataclass(frozen=True, eq=False)
class ProgramNode:
    """One node of a program, in the names of its file."""

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    signature: str
    """The operator and its attributes; nodes of equal signatures compute the same."""
    module: str = ""
    """The module of the torch model that it comes from, if the exporter wrote that down."""

    @property
    def label(self) -> str:
        """The name of the node in messages: its path from torch's older exporter, else its module."""
        return self.name if self.name.startswith("/") else self.module or self.name


@dataclass(frozen=True, eq=False)
class Derived:
    """A constant that a node computes from others."""

    node: ProgramNode
    inputs: tuple[str, ...]
    """Keys of the constants it reads; empty for omitted inputs."""
    output: int
    """Index among the node's outputs."""


@dataclass(slots=True)
class Constants:
    """The constants of several programs, each array once, by a key that equal arrays share."""

    arrays: dict[str, Array] = field(default_factory=dict)
    """Key -> array."""
    derived: dict[str, Derived] = field(default_factory=dict)
    """Key -> how the constant is computed; such constants are not stored."""

    def keep(self, array: Array) -> str:
        """Store *array* and return its key."""
        array = np.asarray(array, order="C")
        digest = blake2b(f"{array.dtype.str}{array.shape}".encode(), digest_size=16)
        digest.update(array.reshape(-1).view(np.uint8).data)
        key = digest.hexdigest()
        self.arrays.setdefault(key, array)
        return key

    def derive(self, node: ProgramNode, inputs: tuple[str, ...]) -> Iterator[str]:
        """The key of each output of a node that reads constants only."""
        if node.op == "Identity":
            yield from inputs
            return
        digest = blake2b("\0".join((node.signature, *inputs)).encode(), digest_size=16).hexdigest()
        for index in range(len(node.outputs)):
            self.derived[f"{digest}.{index}"] = Derived(node, inputs, index)
            yield f"{digest}.{index}"

    def forget(self, keys: Iterable[str]) -> None:
        """Drop arrays that no model reads any more."""
        for key in keys:
            self.arrays.pop(key, None)

    def source_arrays(self, keys: Iterable[str]) -> set[str]:
        """The keys of the stored arrays that the constants *keys* are, or are computed from."""
        arrays: set[str] = set()
        for key in keys:
            sources = self.derived[key].inputs if key in self.derived else ()  # the key of an array has none
            arrays |= {key} & self.arrays.keys() or self.source_arrays(sources)
        return arrays

    def size_key(self, key: str) -> object:
        """A key for "gives values of equal sizes": models run a step together only if its inputs' sizes are equal.

        Floats count by type and shape; other constants by content, as they may be sizes (of a Reshape). A derived
        constant, which is not stored, counts by its node and the size keys of its sources.
        """
        if key in self.derived:
            derived = self.derived[key]
            sources = (self.size_key(source) for source in derived.inputs if source)
            return derived.node.signature, derived.output, *sources
        array = self.arrays[key]
        return (array.dtype.str, array.shape) if array.dtype.kind == "f" else key


@dataclass(frozen=True, eq=False)
class ModelProgram:
    """One model as a list of nodes."""

    name: str
    opset: int
    nodes: tuple[ProgramNode, ...]
    """The nodes that depend on an input, in an order in which they can run."""
    inputs: tuple[GraphTensor, ...]
    """Rows come first; all other dynamic sizes are one length."""
    outputs: tuple[str, ...]
    constants: Mapping[str, str]
    """Tensor that a node reads -> key of the constant in ``Constants``."""
    transposed: Mapping[str, str] = field(default_factory=dict)
    """Tensor that is the transpose of a stored matrix -> the name of that matrix."""
    exits: tuple[str, ...] = ()
    """Outputs that are early exits, shallow to deep, the last one included; empty if the model has no exits."""


def takes_whole_numbers(path: str | os.PathLike[str]) -> bool:
    """Whether a model has an input of whole numbers, as tokens or a mask; only its inputs are read from the file."""
    refuse_special_file(path, ModelError)
    try:
        inputs = glanced_inputs(path, requests=True)
    except Exception:  # protobuf's DecodeError has no public home; reading the whole file raises a proper error later
        return False
    return any(value.type.tensor_type.elem_type in INTEGERS for value in inputs)


def read_program(path: str | os.PathLike[str], constants: Constants, name: str = "") -> ModelProgram:
    """Read the model in the file *path*; its constants are stored in *constants*."""
    file = Path(path)
    try:
        source = open_source(load(file), file.parent, {**FLOATS, **INTEGERS})
        if source.opset < OLDEST:
            raise StitchError(f"its operators are of set {source.opset}; export it with opset {OLDEST} or later")
        return _build_program(source, constants, name or file.stem)
    except (ModelError, StitchError, Foreign) as error:
        kind = StitchError if isinstance(error, Foreign) else type(error)
        raise kind(" ".join(f"{file.name or file}: {error}".split())) from error


def _build_program(source: OnnxSource, constants: Constants, name: str) -> ModelProgram:
    """The program of an opened file: constants are separated from nodes that depend on inputs."""
    key_of: dict[str, str] = {}  # constant tensor -> its key
    transposed: dict[str, str] = {}

    def key(tensor: str) -> str:
        """The key of a constant, which is stored at first use; empty if *tensor* is not constant."""
        if tensor not in key_of and tensor in source.tensors:
            key_of[tensor] = constants.keep(source.stored(tensor))
        return key_of.get(tensor, "")

    nodes = []
    for source_node in source.nodes:
        node = _node(source_node)
        if node.op == "Constant":
            key_of[node.outputs[0]] = constants.keep(constant_node(source_node, source.folder))
        elif node.op == "Transpose" and _is_matrix(source, node.inputs[0]):
            transposed[node.outputs[0]] = node.inputs[0]
            matrix = source.stored(node.inputs[0])
            key_of[node.outputs[0]] = constants.keep(matrix.transpose(node.attributes.get("perm")))
        elif all(tensor in key_of or tensor in source.tensors for tensor in node.inputs if tensor):
            keys = constants.derive(node, tuple(map(key, node.inputs)))
            key_of.update(zip(node.outputs, keys, strict=False))
        else:
            nodes.append(_with_bias(node, constants, key_of, key) if node.op == "Gemm" else node)
    keys_read = {tensor: key(tensor) for node in nodes for tensor in node.inputs if key(tensor)}
    inputs, exits = _inputs(source), _exits(source)
    return ModelProgram(name, source.opset, tuple(nodes), inputs, source.outputs, keys_read, transposed, exits)


def _exits(source: OnnxSource) -> tuple[str, ...]:
    """The early exits that the file's metadata names; empty if it names at most one."""
    listed = metadata(source.proto).get(EXITS_KEY, "").split(",")
    exits = tuple(filter(None, map(str.strip, listed)))
    if unknown := [name for name in exits if name not in source.outputs]:
        raise StitchError(
            f"its {EXITS_KEY} names {unknown[0]}, which is none of its outputs {', '.join(source.outputs)}"
        )
    return exits if len(exits) > 1 else ()


def _with_bias(
    node: ProgramNode, constants: Constants, key_of: dict[str, str], key: Callable[[str], str]
) -> ProgramNode:
    """Add a bias of zeros to a ``Gemm`` without one: exporters drop a bias that is zero.

    So the node matches that of a model whose bias is not zero. *key_of* (tensor -> key) gets the bias; *key* returns
    the key of a constant.
    """
    weight = constants.arrays.get(key(node.inputs[1]))
    if any(node.inputs[2:]) or weight is None or weight.ndim != 2:
        return node
    bias = f"{node.inputs[1].removesuffix('.weight')}.bias"
    key_of[bias] = constants.keep(np.zeros(weight.shape[0 if node.attributes.get("transB") else 1], weight.dtype))
    return replace(node, inputs=(*node.inputs[:2], bias))


def _is_matrix(source: OnnxSource, name: str) -> bool:
    """Whether a tensor is a stored matrix of floats; exporters transpose such matrices for products."""
    tensor = source.tensors.get(name)
    return tensor is not None and len(tensor.dims) == 2 and tensor.data_type in FLOATS


def _node(node: SourceNode) -> ProgramNode:
    """The node with its signature; ``StitchError`` if it is random, of another domain, or contains a graph."""
    if "." in node.op:
        raise StitchError(f"{node.name} is {node.op}, an operator of another domain; export it with plain operators")
    if node.op in _RANDOM or bodies(node.node):
        raise StitchError(f"{node.name} is {node.op}, which is random or contains a graph; it cannot be stitched")
    attributes = dict(sorted(node.values().items()))
    by_name = sorted(node.node.attribute, key=lambda attribute: attribute.name)
    # the signature: operator, number of outputs, and a digest of the attributes
    content = b"\0".join(_without_names(attribute).SerializeToString(deterministic=True) for attribute in by_name)
    signature = f"{node.op} {len(node.outputs)} {blake2b(content, digest_size=16).hexdigest()}"
    return ProgramNode(node.name, node.op, node.inputs, node.outputs, attributes, signature, _module(node))


def _module(node: SourceNode) -> str:
    """The path of the torch module: torch's newer exporter stores it as metadata, its older one in the node's name."""
    for entry in node.node.metadata_props:
        if entry.key == _SCOPES:
            scopes = re.findall(r"'([^']*)'", entry.value)
            return scopes[-2] if len(scopes) > 1 else ""
    return ".".join(node.name.split("/")[1:-1]) if node.name.startswith("/") else ""


def _without_names(attribute: Any) -> Any:
    """A copy of *attribute* without documentation and tensor name, which do not change the node's result."""
    plain = copied(attribute)
    plain.doc_string = ""
    if plain.HasField("t"):
        plain.t.name = ""
    return plain


def _inputs(source: OnnxSource) -> tuple[GraphTensor, ...]:
    """The inputs with their types; ``ModelError`` if an input has a fixed number of rows."""
    kinds = {value.name: value.type.tensor_type.elem_type for value in source.proto.graph.input}
    inputs = []
    for name, sizes in source.inputs.items():
        if not sizes or isinstance(sizes[0], int):
            raise ModelError(f"its input {name} is {list(sizes)}; export it with an open number of rows")
        dtype = str(numpy_dtype(kinds[name]))
        shape = tuple(size if isinstance(size, int) else DYNAMIC for size in sizes)
        inputs.append(GraphTensor(name, shape, dtype, LENGTH))
    return tuple(inputs)
