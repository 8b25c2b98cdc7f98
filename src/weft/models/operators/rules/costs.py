"""Cost rules that many operators share, for nodes without products.

A cost rule returns the layers of a node. Rules for products are in ``product_costs``, ``packed_costs`` and
``attention_costs``.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.models.onnx_import.drafts import ImportedNode, LayerDraft, draft
from weft.models.onnx_import.tensors import INTEGERS
from weft.models.operators.rules.product_costs import need

Cost = Callable[[ImportedNode], list[LayerDraft]]


def traffic(kind: str) -> Cost:
    """A cost rule: one layer of this kind that costs only its activation traffic."""
    return lambda node: [draft(node, kind)]


unknown, elementwise, pool = traffic("unknown"), traffic("elementwise"), traffic("pool")


def free(node: ImportedNode) -> list[LayerDraft]:
    """The rule of operators that cost nothing: no layer."""
    return []


def prelu(node: ImportedNode) -> list[LayerDraft]:
    """A layer with the slopes (all inputs but the first) as trained values."""
    return [draft(node, "elementwise", trained=node.inputs[1:])]


def norm(node: ImportedNode) -> list[LayerDraft]:
    return [draft(node, "norm", trained=node.inputs[1:])]


def movement(node: ImportedNode) -> list[LayerDraft]:
    """A layer that reads all inputs and writes all outputs; no layer if the output is a view, as of a full slice."""
    return _movement(node, None)


def selection(node: ImportedNode) -> list[LayerDraft]:
    """As ``movement``, for operators that read only the elements that they select."""
    return _movement(node, node.output_elements)


def gather(node: ImportedNode) -> list[LayerDraft]:
    """An embedding lookup if the table is a trained constant, else as ``selection``."""
    table = need(node, 0)
    if not table.constant or len(table.shape) < 2 or table.dtype in INTEGERS:
        return selection(node)
    return [draft(node, "embedding", weight=table, trained=(table,), lookups=node.output_elements)]


def embed_norm(node: ImportedNode) -> list[LayerDraft]:
    """Lookups in the word, position and segment tables, and a norm, as one layer."""
    tables = [table for table in node.inputs[2:5] if table is not None]
    lookups = node.outputs[0].elements * len(tables)
    word = tables[0] if tables else None
    return [draft(node, "embedding", weight=word, trained=node.inputs[2:7], lookups=lookups)]


def _movement(node: ImportedNode, input_elements: int | None) -> list[LayerDraft]:
    """A layer that reads *input_elements* (None: all inputs); no layer if the output is a view of an input."""
    is_view = node.outputs[0].view_of is not None
    return [] if is_view else [draft(node, "movement", input_elements=input_elements)]
