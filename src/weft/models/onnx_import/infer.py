"""The outputs of a node: shapes by ONNX's own inference, small values by evaluation (``fold``).

Inference goes node by node rather than over the whole file, so that weights are never copied, the bodies of If, Loop
and Scan get the real shapes of outer values, and shape arithmetic is evaluated. If a shape stays unknown
(data-dependent operators, other domains), the shape that the file declares is used, and as the last resort a size is
taken as 1, the tensor is marked as not exact and the reason is noted. *op* of a node: its name with the domain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx.shape_inference import InferenceError, infer_node_outputs

from weft.base.errors import ModelError, first_line
from weft.models.element_types import ElementType, dtype_bits
from weft.models.onnx_graph import (
    Array,
    Attributes,
    OnnxAttribute,
    OnnxModel,
    OnnxNode,
    bodies,
    constant_number,
    constant_tensor,
    copied,
    evaluate,
    message,
    opsets,
    qualified,
    standard_domain,
    to_tensor,
)
from weft.models.onnx_import.tensors import (
    INTEGERS,
    Stored,
    Tensor,
    computed,
    from_proto,
    keepable,
)
from weft.models.operators import find

Dims = list[int | None]
"""The sizes of a shape; None: unknown."""

_DEQUANTIZE = frozenset({"DequantizeLinear", "com.microsoft:DequantizeLinear"})
_DATA_SIZED = frozenset({"NonZero", "Compress"})
"""Operators whose outputs are evaluated even if their shapes could not be inferred, as they depend on values."""


class Outputs(NamedTuple):
    """The tensors of all outputs of a node, and the reason if a shape is not exact."""

    tensors: tuple[Tensor, ...]
    reason: str = ""


class _Types(NamedTuple):
    """The inferred types of a node's outputs, and the reason if types are missing."""

    by_output: Mapping[str, onnx.TypeProto]
    reason: str


@dataclass(slots=True)
class Inference:
    """Infers the outputs of the nodes of one file, one node at a time."""

    opsets: Mapping[str, int]
    ir_version: int
    folder: Path | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Symbolic dimension -> its size, as fixed by the graph's inputs."""

    def outputs(
        self, node: OnnxNode, inputs: Sequence[Tensor | None], declared: Mapping[str, onnx.TypeProto]
    ) -> Outputs:
        """Infer one tensor per output of *node*; *declared*: the types that the file declares for values."""
        op = qualified(node)
        if op == "Constant":
            return Outputs((self._constant(node),) * len(node.output))
        present = [tensor for tensor in inputs if tensor is not None]
        if op in ("Shape", "Size") and present:
            return Outputs((_shape_value(node, op, present[0]),) * len(node.output))
        first_input = present[0] if present else None
        types = self._types(node, op, inputs)
        results = [self._tensor(types.by_output.get(name), declared.get(name), first_input) for name in node.output]
        if op == "Reshape" and results and present and not results[0].exact:
            results[0] = _same_size(results[0], present[0], types.by_output.get(node.output[0]))
        return Outputs(self._settle_values(node, op, inputs, results), types.reason)

    def dims(self, declared: onnx.TypeProto | None) -> Dims | None:
        """The sizes that a type declares, None for an unknown size; None instead of a list if the rank is unknown."""
        tensor = tensor_type(declared)
        if tensor is None or not tensor.HasField("shape"):
            return None
        known = ((size_of(dim), dim.dim_param) for dim in tensor.shape.dim)
        return [self.sizes.get(symbol) if size is None else size for size, symbol in known]

    def _constant(self, node: OnnxNode) -> Tensor:
        """The output of a Constant node: a dense or sparse tensor, a number, or a text."""
        tensor, number = constant_tensor(node), constant_number(node)
        if tensor is not None:
            return from_proto(tensor, self.folder)
        sparse = next(
            (attribute.sparse_tensor for attribute in node.attribute if attribute.name == "sparse_value"), None
        )
        if sparse is not None:
            return replace(from_proto(sparse.values, self.folder), shape=tuple(sparse.dims), value=None)
        return Tensor((), ElementType.STRING, 8, constant=True) if number is None else computed(number)

    def _types(self, node: OnnxNode, op: str, inputs: Sequence[Tensor | None]) -> _Types:
        """The types that ONNX infers, with unknown sizes completed by the rules of the table of operators."""
        inferred, reason = self._infer_types(node, op, inputs)
        rules = find(op).shapes
        if not rules or all(_complete(inferred.get(name)) for name in node.output if name):
            return _Types(inferred, reason)
        types = dict(inferred)
        applicable = rules if inputs and inputs[0] is not None else ()
        for name, rule in zip(node.output, applicable, strict=False):
            onnx_type, rule_dims = tensor_type(types.get(name)), rule(inputs, Attributes(node))
            if rule_dims is not None:
                dtype = onnx_type.elem_type if onnx_type is not None else ElementType.UNDEFINED
                types[name] = onnx.helper.make_tensor_type_proto(dtype, _merge_dims(_dims_of(onnx_type), rule_dims))
        return _Types(types, reason)

    def _infer_types(self, node: OnnxNode, op: str, inputs: Sequence[Tensor | None]) -> _Types:
        """The types that ONNX's inference returns; empty with the reason if it does not know the operator or fails."""
        node, standard_op = _standard_equivalent(message(node), op)
        domain, _, op_type = standard_op.rpartition(":")
        version = self.opsets.get(domain, 0) if standard_op == op else 0
        schema = _schema(op_type, version, domain)
        if schema is None or any(attribute.HasField("g") for attribute in node.attribute):
            return _Types({}, "weft has no rule for it")
        tensors = {name: tensor for name, tensor in zip(node.input, inputs, strict=False) if tensor is not None}
        values = {name: to_tensor(t.value, name) for name, t in tensors.items() if t.value is not None}
        types = {name: onnx.helper.make_tensor_type_proto(t.dtype, t.shape) for name, t in tensors.items()}
        try:
            complete = with_defaults(node, version)
            inferred = infer_node_outputs(
                schema, message(complete), types, values, None, self._imports(), self.ir_version
            )
        except (InferenceError, RuntimeError, ValueError, TypeError, onnx.checker.ValidationError) as error:
            # Runtimes accept more than ONNX's inference, and the file may declare the missing types.
            return _Types({}, " ".join(str(error).split()))
        return _Types(inferred, "it depends on values that are not known before a query")

    def _imports(self) -> list[onnx.OperatorSetIdProto]:
        return [onnx.helper.make_opsetid(domain, version) for domain, version in self.opsets.items()]

    def _tensor(self, inferred: onnx.TypeProto | None, declared: onnx.TypeProto | None, like: Tensor | None) -> Tensor:
        """The tensor of an output: by the inferred type, else by the declared type, else with the shape of *like*.

        Not exact if its shape is a guess: unknown sizes are taken as 1.
        """
        types = [tensor_type(proto) for proto in (inferred, declared)]
        dtype_guess = like.dtype if like else ElementType.FLOAT
        dtype = next((tensor.elem_type for tensor in types if tensor is not None and tensor.elem_type), dtype_guess)
        inferred_dims, declared_dims = _dims_of(types[0]), self.dims(declared)
        dims = inferred_dims if inferred_dims is not None else declared_dims
        if dims is None:
            return Tensor(like.shape if like else (), dtype, dtype_bits(dtype), exact=False)
        if declared_dims is not None:
            dims = list(_merge_dims(dims, declared_dims))
        shape = tuple(1 if size is None else size for size in dims)
        return Tensor(shape, dtype, dtype_bits(dtype), exact=None not in dims)

    def _settle_values(
        self, node: OnnxNode, op: str, inputs: Sequence[Tensor | None], results: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Complete *results* by properties that follow from the inputs: constant or not, values, bits, views."""
        present = [tensor for tensor in inputs if tensor is not None]
        exact = all(tensor.exact for tensor in present)
        if not present or find(op).random or not all(tensor.constant for tensor in present):
            is_view = bool(present and results) and _is_view(node, op, inputs, results[0])
            root = present[0].root if is_view else None
            bits = present[0].bits if op in _DEQUANTIZE and present else None
            return tuple(
                replace(tensor, exact=tensor.exact and exact, view_of=root, bits=bits or tensor.bits)
                for tensor in results
            )
        values = _fold_constants(node, op, inputs, results, self.opsets.get("", 1)) or (None,) * len(results)
        # Inputs whose values are in the results: of a dequantisation the first, without its scale and zero point.
        origins = present[:1] if op in _DEQUANTIZE or op == "Cast" else _carriers(present, results)
        stored = tuple(dict.fromkeys(origin for tensor in origins for origin in tensor.stored))
        weight_bits = max((tensor.bits for tensor in origins if any(s.trained for s in tensor.stored)), default=0)
        return tuple(
            replace(
                tensor,
                shape=tensor.shape if value is None else value.shape,
                bits=weight_bits or tensor.bits,
                exact=(tensor.exact or value is not None) and exact,
                constant=True,
                value=value,
                stored=(Stored(tensor.elements, tensor.dtype),) if op == "ConstantOfShape" else stored,
            )
            for tensor, value in zip(results, values, strict=True)
        )


def _fold_constants(
    node: OnnxNode, op: str, inputs: Sequence[Tensor | None], results: Sequence[Tensor], opset: int
) -> tuple[Array, ...] | None:
    """The output values of a node with constant inputs; None if they are large or an input's values are unknown."""
    small = all(keepable(tensor.shape, tensor.dtype) and (tensor.exact or op in _DATA_SIZED) for tensor in results)
    if not small or any(t is not None and t.value is None for t in inputs):
        return None
    values = [None if t is None else t.value for t in inputs]
    return fold(node, op, values, opset)


_OPERATORS = """
    Abs Neg Floor Ceil Round Sqrt Exp Log Reciprocal Sign Not BitwiseNot Identity Add Sub Mul Div Pow BitwiseAnd
    BitwiseOr BitwiseXor And Or Xor Equal Greater GreaterOrEqual Less LessOrEqual Sum Min Max ReduceSum ReduceProd
    ReduceMax ReduceMin ReduceMean ArgMax ArgMin TopK Mod Mean BitShift Clip CumSum Where Cast CastLike Reshape Flatten
    Squeeze Unsqueeze Transpose Concat Slice Split Gather GatherElements GatherND ScatterND ScatterElements Scatter
    Compress NonZero ConstantOfShape Range Expand Tile Pad OneHot Trilu
"""
FOLDED = frozenset(_OPERATORS.split())
"""Operators that are evaluated on constants; graphs compute sizes, axes and limits with these operators only."""

_SUCCESSORS = {"Scatter": "ScatterElements"}
"""Old operator -> the operator of later opsets (from 11) that evaluates it."""

_EVALUATED_SINCE = 7
"""Before this opset, operators have forms that onnx's evaluator does not know (Reshape and Cast by attributes,
broadcasting along an axis); values of such nodes stay unknown."""


def fold(node: OnnxNode, op: str, values: Sequence[Array | None], opset: int) -> tuple[Array, ...] | None:
    """Evaluate a node on *values*, one per input (None: left out); return a value per output, or None if not folded.

    opset: of the standard's operators. Raises ValueError or ModelError if the node is not valid.
    """
    if op not in FOLDED:
        return None
    if opset < _EVALUATED_SINCE and Attributes(node).has("broadcast"):
        return None
    if op in _SUCCESSORS:
        node = copied(node)
        node.op_type, opset = _SUCCESSORS[op], max(opset, 11)
    feeds = {name: value for name, value in zip(node.input, values, strict=True) if value is not None}
    if op == "OneHot" and len(node.input) > 1:  # the evaluator needs the depth as a scalar
        feeds[node.input[1]] = feeds[node.input[1]].reshape(())
    if op == "Div" and all(value.dtype.kind in "iu" for value in feeds.values()) and not feeds[node.input[1]].all():
        raise ModelError("it divides an integer by 0")
    try:
        arrays = evaluate({"": opset}, [node], feeds, list(node.output))
    except Exception as error:  # the evaluator raises any exception of numpy
        if opset < _EVALUATED_SINCE:
            return None
        raise ValueError(first_line(error)) from error
    return tuple(arrays) if all(array.dtype.kind in "biuf" for array in arrays) else None


def _standard_equivalent(node: onnx.NodeProto, op: str) -> tuple[onnx.NodeProto, str]:
    """A node of the standard operator with the same shape rules, and this operator; else *node* and *op*.

    ONNX cannot infer the shapes of operators of other domains.
    """
    shapes_of = find(op).shapes_of
    if shapes_of is None:
        return node, op
    standard_op, inputs = shapes_of
    known = onnx.defs.get_schema(standard_op).attributes
    attributes = [attribute for attribute in node.attribute if attribute.name in known]
    equivalent = onnx.NodeProto(
        op_type=standard_op, input=node.input[:inputs], output=node.output, attribute=attributes
    )
    return equivalent, standard_op


def tensor_type(declared: onnx.TypeProto | None) -> Any:
    """The tensor type inside a type, which may be a sequence or an optional; None for other types."""
    while declared is not None:
        which = declared.WhichOneof("value")
        if which in ("sequence_type", "optional_type"):
            declared = getattr(declared, which).elem_type
        else:
            return getattr(declared, which) if which in ("tensor_type", "sparse_tensor_type") else None
    return None


def size_of(dim: Any) -> int | None:
    """The size of a dimension; None if it is open, which exporters also write as -1. 0 is an empty axis."""
    return dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else None


def _dims_of(tensor: Any) -> Dims | None:
    """The sizes of a tensor type; None if it has no rank."""
    if tensor is None or not tensor.HasField("shape"):
        return None
    return [size_of(dim) for dim in tensor.shape.dim]


def _complete(inferred: onnx.TypeProto | None) -> bool:
    """Whether all sizes of a type are known."""
    dims = _dims_of(tensor_type(inferred))
    return dims is not None and None not in dims


def _merge_dims(first: Dims | None, second: Sequence[int | None]) -> Sequence[int | None]:
    """The sizes *first*, with unknown sizes completed by *second*; *second* alone if *first* is None."""
    if first is None or len(first) != len(second):
        return second if first is None else first
    return [other if size is None else size for size, other in zip(first, second, strict=True)]


@lru_cache(maxsize=4096)
def _schema(op: str, version: int, domain: str) -> Any:
    """The schema of an operator at an opset; None if it is unknown.

    If this version has no shape inference, the next later version with inference.
    """
    newest = onnx.defs.onnx_opset_version()
    try:
        schema = onnx.defs.get_schema(op, version or newest, domain)
        while not schema.has_type_and_shape_inference_function and domain == "" and version and version < newest:
            version += 1
            schema = onnx.defs.get_schema(op, version, domain)
    except onnx.defs.SchemaError:
        return None
    return schema


def _shape_value(node: OnnxNode, op: str, tensor: Tensor) -> Tensor:
    """The output of Shape or Size as a constant; not exact if the tensor's shape is a guess."""
    attributes = Attributes(node)
    start, end = attributes.integer("start", 0), attributes.integer("end", len(tensor.shape))
    value = np.array(tensor.elements if op == "Size" else tensor.shape[start:end], dtype=np.int64)
    return replace(computed(value), exact=tensor.exact)


def _carriers(inputs: Sequence[Tensor], results: Sequence[Tensor]) -> list[Tensor]:
    """The inputs whose values may be in the results: not indices, unless the results are integers themselves."""
    integer_results = any(tensor.dtype in INTEGERS for tensor in results)
    return [tensor for tensor in inputs if integer_results or tensor.dtype not in INTEGERS]


def _is_view(node: OnnxNode, op: str, inputs: Sequence[Tensor | None], result: Tensor) -> bool:
    """Whether the output is a view of the first input, so that the node costs nothing."""
    source = inputs[0]
    if source is None or source.constant:
        return False
    if op in ("Cast", "CastLike"):
        return source.dtype == result.dtype
    if op == "Transpose":
        axes = Attributes(node).integers("perm", ())
        # elements keep their order in memory if only axes of size 1 move
        moved = [axis for axis in axes if axis < len(source.shape) and source.shape[axis] != 1]
        return bool(axes) and moved == sorted(moved)
    if op == "Slice":
        steps = inputs[4] if len(inputs) > 4 else None
        forward = steps is None or (steps.value is not None and bool((steps.value > 0).all()))
        return source.exact and source.shape == result.shape and forward
    return find(op).view or (op == "Expand" and source.exact and source.shape == result.shape)


def _same_size(result: Tensor, source: Tensor, inferred: onnx.TypeProto | None) -> Tensor:
    """The output of a Reshape to an unknown shape: the first unknown axis gets the size that keeps all elements."""
    dims = _dims_of(tensor_type(inferred)) or []
    known = math.prod(result.shape)
    if None not in dims or not known or source.elements % known or len(dims) != len(result.shape):
        return result
    shape = list(result.shape)
    shape[dims.index(None)] *= source.elements // known
    return replace(result, shape=tuple(shape))


def with_defaults(node: OnnxNode, version: int) -> OnnxNode:
    """A copy of *node* with all absent attributes set to their defaults; *node* itself if none is absent.

    version: the opset of the node's domain, 0 for the newest. Nested graphs are not changed.
    """
    absent = _absent_attributes(node, version)
    if not absent:
        return node
    complete = copied(node)
    complete.attribute.extend(absent)
    return complete


def write_defaults(model: OnnxModel) -> None:
    """Set absent attributes to their defaults in all nodes of *model*, including nested graphs and functions."""
    _write_node_defaults(model.graph.node, opsets(model))
    for function in model.functions:
        _write_node_defaults(function.node, opsets(function))


def _write_node_defaults(nodes: Iterable[OnnxNode], versions: Mapping[str, int]) -> None:
    """Set absent attributes of nodes and of their nested graphs' nodes; *versions*: domain -> opset."""
    for node in nodes:
        for graph in bodies(node):
            _write_node_defaults(graph.node, versions)
        node.attribute.extend(_absent_attributes(node, versions.get(standard_domain(node.domain), 0)))


def _absent_attributes(node: OnnxNode, version: int) -> list[OnnxAttribute]:
    """The default values of attributes that *node* does not have."""
    present = {attribute.name for attribute in node.attribute}
    defaults = _defaults(node.op_type, version or onnx.defs.onnx_opset_version(), standard_domain(node.domain))
    return [default for default in defaults if default.name not in present]


@lru_cache(maxsize=4096)
def _defaults(op: str, version: int, domain: str) -> tuple[OnnxAttribute, ...]:
    """The default values of an operator's attributes by its schema; empty for unknown operators."""
    try:
        schema = onnx.defs.get_schema(op, version, domain)
    except onnx.defs.SchemaError:
        return ()
    values = (attribute.default_value for attribute in schema.attributes.values())
    return tuple(value for value in values if value.name)
