"""Attention in one operator: the projection where it holds weights, then scores and context.

Scores and context multiply activations with activations, one group per sample and head; they carry no
weights and a batch shares nothing between them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from weft.errors import ModelError
from weft.models.layer import Layer
from weft.models.onnx_import.drafts import Draft, Node, draft
from weft.models.onnx_import.products import need, sized_gemm
from weft.models.onnx_import.tensors import Tensor


class Heads(NamedTuple):
    """The sizes of one attention: queries meet keys of width *d*, values have width *dv*."""

    batch: int
    heads: int
    queries: int
    keys: int
    d: int
    dv: int


def attention(node: Node, bias: int = 2, past: int = 4) -> list[Draft]:
    """com.microsoft Attention: one weight projects to queries, keys and values."""
    data, weight = need(node, 0), need(node, 1)
    if len(data.shape) != 3 or len(weight.shape) != 2:
        raise ModelError("Attention needs an input of 3 axes and a weight of 2")
    batch, rows, width = data.shape
    heads = _head_count(node, "num_heads")
    sizes = node.attributes.integers("qkv_hidden_sizes", (weight.shape[1] // 3,) * 3)
    earlier = node.input(past)
    keys = rows + (earlier.shape[3] if earlier is not None and len(earlier.shape) == 5 else 0)
    core = _core(node, Heads(batch, heads, rows, keys, sizes[0] // heads, sizes[-1] // heads))
    gemm = sized_gemm(batch * rows, width, weight.shape[1])
    if gemm is None or not core:
        return []
    projected = batch * rows * weight.shape[1]
    qkv = draft(
        node,
        "gemm" if weight.constant else "matmul",
        gemm=gemm,
        weight=weight,
        trained=(weight, node.input(bias)),
        output_elements=projected,
    )
    return [replace(qkv, layer=replace(qkv.layer, name=f"{node.name}/qkv"), writes=()), *core]


def q_attention(node: Node) -> list[Draft]:
    return attention(node, bias=2, past=8)


def multi_head_attention(node: Node) -> list[Draft]:
    """com.microsoft MultiHeadAttention and its like: queries, keys and values arrive projected."""
    return _projected(node, "num_heads", "num_heads", past=6)


def group_query_attention(node: Node) -> list[Draft]:
    return _projected(node, "num_heads", "kv_num_heads", past=3)


def standard_attention(node: Node) -> list[Draft]:
    """ai.onnx Attention: like MultiHeadAttention; heads may be an axis of their own."""
    return _projected(node, "q_num_heads", "kv_num_heads", past=4)


def _projected(node: Node, q_heads: str, kv_heads: str, past: int) -> list[Draft]:
    query = need(node, 0)
    if len(query.shape) not in (3, 4):
        # Packed layouts keep Q, K and V in one tensor; their traffic is known, their product is not.
        return [draft(node, "unknown")]
    key, value = node.input(1) or query, node.input(2) or query
    batch, heads, rows, d = _by_head(query, node, q_heads)
    _, _, keys, _ = _by_head(key, node, kv_heads)
    _, _, _, dv = _by_head(value, node, kv_heads)
    earlier = node.input(past)
    if earlier is not None and len(earlier.shape) == 4:
        keys += earlier.shape[2]
    return _core(node, Heads(batch, heads, rows, keys, d, dv))


def _by_head(tensor: Tensor, node: Node, heads: str) -> tuple[int, int, int, int]:
    """(batch, heads, positions, width of a head) of a tensor with or without an axis for heads."""
    if len(tensor.shape) == 4:
        batch, count, rows, width = tensor.shape
        return batch, count, rows, width
    if len(tensor.shape) != 3:
        raise ModelError("attention needs queries, keys and values of 3 or 4 axes")
    count = _head_count(node, heads)
    batch, rows, width = tensor.shape
    return batch, count, rows, width // count


def _head_count(node: Node, name: str) -> int:
    count = node.attributes.integer(name, 1)
    if count < 1:
        raise ModelError(f"{name} must be at least 1, got {count}")
    return count


def _core(node: Node, sizes: Heads) -> list[Draft]:
    batch, heads, queries, keys, d, dv = sizes
    scores = sized_gemm(queries, d, keys, batch * heads)
    context = sized_gemm(queries, keys, dv, batch * heads)
    if scores is None or context is None:
        return []
    base = draft(node, "matmul", gemm=scores)
    matrix = batch * heads * queries * keys
    first: Layer = replace(
        base.layer,
        name=f"{node.name}/scores",
        input_elements=batch * heads * d * (queries + keys),
        output_elements=matrix,
        reuses_weights=False,
    )
    second = replace(
        first,
        name=f"{node.name}/context",
        gemm=context,
        input_elements=matrix + batch * heads * dv * keys,
        output_elements=base.layer.output_elements,
    )
    return [replace(base, layer=first, writes=(), stored=()), replace(base, layer=second, reads=())]
