"""Cost rules that many operators share, for nodes without products.

A cost rule returns the layers of a node. Those of products are in ``product_costs``, ``packed_costs`` and
``attention_costs``.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.models.onnx_import.drafts import ImportedNode, LayerDraft, draft
from weft.models.onnx_import.tensors import INTEGERS
from weft.models.operators.rules.product_costs import need

Cost = Callable[[ImportedNode], list[LayerDraft]]


def traffic(kind: str) -> Cost:
    """One layer that costs its activation traffic."""
    return lambda node: [draft(node, kind)]


unknown, elementwise, pool = traffic("unknown"), traffic("elementwise"), traffic("pool")


def free(node: ImportedNode) -> list[LayerDraft]:
    """No layer: it costs nothing."""
    return []


def prelu(node: ImportedNode) -> list[LayerDraft]:
    """A learned slope, even if all channels share a single one."""
    return [draft(node, "elementwise", trained=node.inputs[1:])]


def norm(node: ImportedNode) -> list[LayerDraft]:
    return [draft(node, "norm", trained=node.inputs[1:])]


def movement(node: ImportedNode) -> list[LayerDraft]:
    """All inputs read and all outputs written, unless nothing moves: a cast to the same type, a slice of everything."""
    return _movement(node, None)


def selection(node: ImportedNode) -> list[LayerDraft]:
    """An operator that reads only what it selects."""
    return _movement(node, node.output_elements)


def gather(node: ImportedNode) -> list[LayerDraft]:
    """A lookup where the table is constant and learned, else a selection."""
    table = need(node, 0)
    if not table.constant or len(table.shape) < 2 or table.dtype in INTEGERS:
        return selection(node)
    return [draft(node, "embedding", weight=table, trained=(table,), lookups=node.output_elements)]


def embed_norm(node: ImportedNode) -> list[LayerDraft]:
    """Word, position and segment tables at once, then a norm."""
    tables = [table for table in node.inputs[2:5] if table is not None]
    lookups = node.outputs[0].elements * len(tables)
    word = tables[0] if tables else None
    return [draft(node, "embedding", weight=word, trained=node.inputs[2:7], lookups=lookups)]


def _movement(node: ImportedNode, input_elements: int | None) -> list[LayerDraft]:
    idle = node.outputs[0].view_of is not None
    return [] if idle else [draft(node, "movement", input_elements=input_elements)]
