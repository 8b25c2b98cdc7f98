"""An ONNX file as the reader walks it: ``OnnxSource``, nodes in order, stored tensors as arrays, sizes of its inputs.

Everything a damaged file can get wrong before an operator is looked at is found here.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx
import onnx.inliner
from onnx import AttributeProto, TensorProto, numpy_helper
from onnx.external_data_helper import load_external_data_for_tensor

from weft.base.errors import ModelError, reason_of
from weft.runtime.metadata import STITCHED_KEY
from weft_stitch.net import Array

FLOATS: Mapping[int, str] = {
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
    TensorProto.DOUBLE: "float64",
    TensorProto.BFLOAT16: "bfloat16",
}
"""Types of numbers that can be read, and what they are called."""
WHOLE: Mapping[int, str] = {TensorProto.INT64: "int64", TensorProto.INT32: "int32", TensorProto.BOOL: "bool"}
"""Types of tokens and masks."""
COARSE = ("float16", "bfloat16")
"""Types of half precision."""


@dataclass(frozen=True, eq=False)
class SourceNode:
    """One node, its attributes by name."""

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    """Empty where nobody reads them."""
    attributes: Mapping[str, AttributeProto]
    proto: onnx.NodeProto

    def has(self, name: str) -> bool:
        return name in self.attributes

    def integer(self, name: str, default: int) -> int:
        found = self._find(name, AttributeProto.INT)
        return default if found is None else int(found.i)

    def integers(self, name: str, default: Sequence[int]) -> tuple[int, ...]:
        found = self._find(name, AttributeProto.INTS)
        return tuple(default) if found is None else tuple(found.ints)

    def pair(self, name: str, default: int) -> tuple[int, int]:
        """An attribute of two positive integers."""
        found = self.integers(name, (default, default))
        if len(found) != 2 or min(found) < 1:
            raise ModelError(f"its {name} is {list(found)}, not two positive numbers")
        return found[0], found[1]

    def number(self, name: str, default: float) -> float:
        found = self._find(name, AttributeProto.FLOAT)
        return default if found is None else float(found.f)

    def text(self, name: str, default: str) -> str:
        found = self._find(name, AttributeProto.STRING)
        return default if found is None else found.s.decode("utf-8", "replace")

    def _find(self, name: str, kind: int) -> Any:
        found = self.attributes.get(name)
        if found is not None and found.type not in (kind, AttributeProto.UNDEFINED):
            raise ModelError(f"its attribute {name!r} has the wrong type")
        return found


@dataclass(frozen=True, eq=False)
class OnnxSource:
    """A model file, read and checked as far as its wires go."""

    proto: onnx.ModelProto
    opset: int
    nodes: tuple[SourceNode, ...]
    """The nodes that the outputs need, in an order in which they can run."""
    inputs: Mapping[str, tuple[int | str, ...]]
    """Input -> its sizes; an open one is its name, or '?'."""
    outputs: tuple[str, ...]
    tensors: Mapping[str, onnx.TensorProto]
    folder: Path | None

    def stored(self, name: str) -> Array:
        return to_array(self.tensors[name], self.folder)

    @cached_property
    def precision(self) -> str:
        """The type of most of its weights, or of an input where none is stored."""
        sizes: Counter[int] = Counter()
        for each in self.tensors.values():
            if each.data_type in FLOATS:
                sizes[each.data_type] += math.prod(each.dims)
        if not sizes:
            read = (each for each in self.proto.graph.input if each.name in self.inputs)  # old files list constants too
            sizes.update(each.type.tensor_type.elem_type for each in read)
        return FLOATS[sizes.most_common(1)[0][0]]


def open_source(model: onnx.ModelProto, folder: Path | None, taken: Mapping[int, str] = FLOATS) -> OnnxSource:
    """Check *model*; its external data lies in *folder*, its inputs may be of the types *taken*."""
    _require_text(model)
    if tasks := next((each.value for each in model.metadata_props if each.key == STITCHED_KEY), ""):
        raise ModelError(f"is a stitched file{_made_of(tasks)}; give the models that it was made of")
    if model.functions:
        model = _inlined(model)
    graph = model.graph
    if not graph.node or not graph.output:
        raise ModelError("it holds no graph with nodes and outputs; is it an ONNX model?")
    tensors = {each.name: each for each in graph.initializer}
    inputs = {each.name: _sizes(each, taken) for each in graph.input if each.name not in tensors}
    if not inputs:
        raise ModelError("it has no inputs")
    outputs = tuple(dict.fromkeys(each.name for each in graph.output))
    read = {name for node in graph.node for name in node.input} | set(outputs)
    nodes = _ordered([_node(each, read) for each in graph.node], set(inputs) | set(tensors), outputs)
    return OnnxSource(model, _opset(model), tuple(nodes), inputs, outputs, tensors, folder)


def _made_of(text: str) -> str:
    try:
        return f" of {', '.join(str(task['name']) for task in json.loads(text)['tasks'])}"
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""


def load(path: Path) -> onnx.ModelProto:
    """The file's model, external data left where it is."""
    if path.is_dir():
        raise ModelError(f"is a folder; give its files, as in {path}/*.onnx")
    try:
        return onnx.load_model(os.fspath(path), load_external_data=False)
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror or error}") from error
    except Exception as error:  # protobuf's DecodeError, which has no public home, and onnx's own
        raise ModelError("is not an ONNX file, or a damaged one; export or download it again") from error


def to_array(proto: onnx.TensorProto, folder: Path | None) -> Array:
    """The values of a stored tensor."""
    if any(size < 0 for size in proto.dims):
        raise ModelError(f"its tensor {proto.name} has the shape {list(proto.dims)}")
    try:
        if proto.data_location == TensorProto.EXTERNAL:
            copy = onnx.TensorProto()
            copy.CopyFrom(proto)
            load_external_data_for_tensor(copy, str(folder or "."))
            proto = copy
        return numpy_helper.to_array(proto)
    except OSError as error:
        raise ModelError(f"the file of its tensor {proto.name} cannot be read: {reason_of(error)}") from error
    except (ValueError, TypeError, KeyError, RuntimeError, onnx.checker.ValidationError) as error:
        raise ModelError(f"its tensor {proto.name} cannot be read; the file is damaged or incomplete") from error


def _require_text(model: onnx.ModelProto) -> None:
    """Protobuf hands out bytes, or fails, where a name is not UTF-8."""
    try:
        "".join(_texts(model.graph))
    except (TypeError, UnicodeDecodeError) as error:
        raise ModelError("names in it are not text; the file is damaged") from error


def _texts(graph: onnx.GraphProto) -> Iterator[str]:
    yield graph.name
    for node in graph.node:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (each.name for each in node.attribute)
    for each in (*graph.initializer, *graph.input, *graph.output):
        yield each.name


def _inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    try:
        return onnx.inliner.inline_local_functions(model)
    except Exception as error:  # whatever the C++ side makes of a damaged function
        raise ModelError("its functions cannot be inlined; the file is damaged") from error


def _opset(model: onnx.ModelProto) -> int:
    versions = [each.version for each in model.opset_import if each.domain in ("", "ai.onnx")]
    if not versions:
        raise ModelError("it names no version of the ONNX operators")
    return int(max(versions))


def _sizes(value: onnx.ValueInfoProto, taken: Mapping[int, str]) -> tuple[int | str, ...]:
    kind = value.type.tensor_type
    if not value.type.HasField("tensor_type") or not kind.HasField("shape"):
        raise ModelError(f"its input {value.name} is not a tensor of known rank")
    if kind.elem_type not in taken:
        these = "float" if taken == FLOATS else ", ".join(taken.values())
        raise ModelError(
            f"its input {value.name} is of type {type_name(kind.elem_type)}; {these} inputs can be stitched"
        )
    return tuple(int(dim.dim_value) if dim.dim_value > 0 else dim.dim_param or "?" for dim in kind.shape.dim)


def type_name(number: int) -> str:
    """What ONNX calls a type of numbers."""
    names: dict[int, str] = {each: name for name, each in TensorProto.DataType.items()}
    return names.get(number, str(number)).lower()


def _node(proto: onnx.NodeProto, read: set[str]) -> SourceNode:
    outputs = tuple(each if each in read else "" for each in proto.output)
    name = proto.name or next((each for each in outputs if each), proto.op_type)
    domain = "" if proto.domain in ("", "ai.onnx") else f"{proto.domain}."
    attributes = {each.name: each for each in proto.attribute}
    return SourceNode(name, domain + proto.op_type, tuple(proto.input), outputs, attributes, proto)


def _ordered(nodes: Sequence[SourceNode], known: set[str], outputs: Sequence[str]) -> list[SourceNode]:
    """What the outputs need, each node after those it reads from."""
    writers: dict[str, SourceNode] = {}
    for node in nodes:
        for each in filter(None, node.outputs):
            if each in writers or each in known:
                raise ModelError(f"{each} is written twice; the file is damaged")
            writers[each] = node
    done: dict[int, SourceNode] = {}
    opened: set[int] = set()
    stack = [(name, "an output") for name in reversed(outputs)]
    while stack:
        name, reader = stack[-1]
        if name in known or id(writers.get(name)) in done:
            stack.pop()
            continue
        if name not in writers:
            raise ModelError(f"{reader} reads {name}, which nothing writes")
        node = writers[name]
        missing = [each for each in node.inputs if each and each not in known and id(writers.get(each)) not in done]
        if not missing:
            done[id(node)] = node
            stack.pop()
            continue
        if id(node) in opened:
            raise ModelError(f"{node.name} reads what is made from its own output; the file is damaged")
        opened.add(id(node))
        stack.extend((each, node.name) for each in reversed(missing))
    listed = [node for node in nodes if id(node) in done]
    return listed if _runnable(listed, known) else list(done.values())


def _runnable(nodes: Sequence[SourceNode], known: set[str]) -> bool:
    known = known | {""}
    for node in nodes:
        if not known.issuperset(node.inputs):
            return False
        known.update(node.outputs)
    return True
