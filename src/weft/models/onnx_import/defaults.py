"""Default attribute values, written into nodes before ONNX's shape inference reads them.

ONNX's inference functions have defaults of their own for absent attributes, and not all agree with the schema: onnx
1.23 infers a two-sided STFT where ``onesided`` (default 1) is left out, and no shape at all for
MeanVarianceNormalization without ``axes``. Every call of that inference therefore goes through this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto


def with_defaults(node: NodeProto, version: int) -> NodeProto:
    """*node* with every absent attribute that has a default; a copy, or *node* itself where none is absent.

    version: of the operator set of the node's domain; 0 means the newest. Nested graphs are left as they are.
    """
    absent = _absent(node, version)
    if not absent:
        return node
    complete = NodeProto()
    complete.CopyFrom(node)
    complete.attribute.extend(absent)
    return complete


def write_defaults(model: ModelProto) -> None:
    """Add the absent attributes to the nodes of *model* in place, in nested graphs and function bodies too."""
    _write(model.graph.node, _versions(model.opset_import))
    for function in model.functions:
        _write(function.node, _versions(function.opset_import))


def _write(nodes: Iterable[NodeProto], versions: Mapping[str, int]) -> None:
    for node in nodes:
        for graph in _nested(node):
            _write(graph.node, versions)
        node.attribute.extend(_absent(node, versions.get(_domain(node.domain), 0)))


def _nested(node: NodeProto) -> Iterable[GraphProto]:
    for attribute in node.attribute:
        yield from ([attribute.g] if attribute.HasField("g") else attribute.graphs)


def _absent(node: NodeProto, version: int) -> list[AttributeProto]:
    present = {attribute.name for attribute in node.attribute}
    defaults = _defaults(node.op_type, version or onnx.defs.onnx_opset_version(), _domain(node.domain))
    return [default for default in defaults if default.name not in present]


@lru_cache(maxsize=4096)
def _defaults(op: str, version: int, domain: str) -> tuple[AttributeProto, ...]:
    """The attributes of an operator that have a default, as its schema states them; none for unknown operators."""
    try:
        schema = onnx.defs.get_schema(op, version, domain)
    except onnx.defs.SchemaError:
        return ()
    values = (attribute.default_value for attribute in schema.attributes.values())
    return tuple(value for value in values if value.name)


def _versions(imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    return {_domain(each.domain): each.version for each in imports}


def _domain(domain: str) -> str:
    """The standard domain has two spellings."""
    return "" if domain == "ai.onnx" else domain
