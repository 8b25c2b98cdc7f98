"""Attention in one operator: the projection where it holds weights, then scores and context.

Scores and context multiply activations with activations, one group per sample and head; they carry no
weights and a batch shares nothing between them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from weft.base.errors import ModelError
from weft.models.layer import Layer
from weft.models.onnx_import.drafts import ImportedNode, LayerDraft, draft
from weft.models.onnx_import.tensors import Tensor
from weft.models.operators.rules.product_costs import need, sized_gemm


class AttentionSizes(NamedTuple):
    """The sizes of one attention: queries meet keys of width *d*, values have width *dv*."""

    batch: int
    heads: int
    queries: int
    keys: int
    d: int
    dv: int


def attention(node: ImportedNode, past: int = 4) -> list[LayerDraft]:
    """com.microsoft Attention: one weight projects to queries, keys and values."""
    data, weight = need(node, 0), need(node, 1)
    if len(data.shape) != 3 or len(weight.shape) != 2:
        raise ModelError("Attention needs an input of 3 axes and a weight of 2")
    batch, rows, width = data.shape
    heads = _head_count(node, "num_heads")
    sizes = node.attributes.integers("qkv_hidden_sizes", (weight.shape[1] // 3,) * 3)
    earlier = node.input(past)
    keys = rows + (earlier.shape[3] if earlier is not None and len(earlier.shape) == 5 else 0)
    core = _core(node, AttentionSizes(batch, heads, rows, keys, sizes[0] // heads, sizes[-1] // heads))
    gemm = sized_gemm(batch * rows, width, weight.shape[1])
    if gemm is None or not core:
        return []
    projected = batch * rows * weight.shape[1]
    qkv = draft(
        node,
        "gemm" if weight.constant else "matmul",
        gemm=gemm,
        weight=weight,
        trained=(weight, node.input(2)),
        output_elements=projected,
    )
    return [replace(qkv, layer=replace(qkv.layer, name=f"{node.name}/qkv"), writes=()), *core]


def ordered_attention(node: ImportedNode) -> list[LayerDraft]:
    """QOrderedAttention: a weight for queries, one for keys and one for values."""
    data, weights = need(node, 0), [need(node, place) for place in (5, 6, 7)]
    batch, rows, _ = _axes(data, 3)
    heads = _head_count(node, "num_heads")
    widths = [weight.shape[-1] for weight in weights]
    core = _core(node, AttentionSizes(batch, heads, rows, rows, widths[0] // heads, widths[2] // heads))
    mapped = [_projection(node, data, weight, part) for weight, part in zip(weights, "qkv", strict=True)]
    return [*(layer_draft for part in mapped for layer_draft in part), *core]


def decoder_attention(node: ImportedNode) -> list[LayerDraft]:
    """DecoderAttention: keys are the query's own or another sequence's (static_kv), then maybe cached (use_past)."""
    query, key, cache = need(node, 0), need(node, 1), node.input(6)
    rows, batch, width = _axes(query, 3)
    static, past = _flag(node, 8), _flag(node, 9)
    cached = cache.shape[2] if past and cache is not None and len(cache.shape) == 4 else 0
    new = 0 if static and past else key.shape[0] if static else rows
    heads = _head_count(node, "num_heads")
    core = _core(node, AttentionSizes(batch, heads, rows, cached + new, width // heads, width // heads))
    queries = _projection(node, query, need(node, 2), "q")
    pairs = _projection(node, key if static else query, need(node, 3), "kv") if new else []
    return [*queries, *pairs, *core]


def packed_attention(node: ImportedNode) -> list[LayerDraft]:
    """PackedAttention: tokens without padding; the shape of an input tells the number of sequences and their length."""
    data, weight = need(node, 0), need(node, 1)
    batch, rows = _axes(need(node, 3), 2)
    heads = _head_count(node, "num_heads")
    sizes = node.attributes.integers("qkv_hidden_sizes", (weight.shape[-1] // 3,) * 3)
    core = _core(node, AttentionSizes(batch, heads, rows, rows, sizes[0] // heads, sizes[-1] // heads))
    return [*_projection(node, data, weight, "qkv"), *core]


def packed_multi_head_attention(node: ImportedNode) -> list[LayerDraft]:
    query, value = need(node, 0), node.input(2)
    batch, rows = _axes(need(node, 4), 2)
    heads = _head_count(node, "num_heads")
    d = query.shape[-1] if len(query.shape) == 4 else query.shape[-1] // heads
    dv = d if value is None else value.shape[-1] // heads
    return _core(node, AttentionSizes(batch, heads, rows, rows, d, dv))


def longformer_attention(node: ImportedNode, weight: int = 1, everywhere: int = 4) -> list[LayerDraft]:
    """Each query meets the keys of a window; tokens with global attention have a projection of their own."""
    data = need(node, 0)
    batch, rows, width = _axes(data, 3)
    heads = _head_count(node, "num_heads")
    keys = min(rows, 2 * max(1, node.attributes.integer("window", rows)) + 1)
    core = _core(node, AttentionSizes(batch, heads, rows, keys, width // heads, width // heads))
    local = _projection(node, data, need(node, weight), "qkv")
    return [*local, *_projection(node, data, need(node, everywhere), "global"), *core]


def paged_attention(node: ImportedNode) -> list[LayerDraft]:
    """PagedAttention: how full the cache is only a query knows, so every token meets all that its blocks can hold."""
    blocks, table = need(node, 3), need(node, 7)
    return _selected_attention(node, table.shape[-1] * blocks.shape[1])


def sparse_paged_attention(node: ImportedNode) -> list[LayerDraft]:
    return _selected_attention(node, need(node, 9).shape[-1])


def dynamic_sparse_attention(node: ImportedNode) -> list[LayerDraft]:
    return _selected_attention(node, need(node, 7).shape[-1])


def linear_attention(node: ImportedNode) -> list[LayerDraft]:
    """A state per head instead of keys: each token adds an outer product and reads; a delta rule reads once more."""
    query, value = need(node, 0), need(node, 2)
    q_heads, kv_heads = (_head_count(node, name) for name in ("q_num_heads", "kv_num_heads"))
    batch, rows, width = _axes(query, 3)
    reads = 3 if "delta" in (node.attributes.text("update_rule") or "gated_delta") else 2
    d, dv = width // q_heads, value.shape[-1] // kv_heads
    gemm = sized_gemm(rows, d, reads * dv, batch * max(q_heads, kv_heads))
    return [draft(node, "matmul", gemm=gemm)] if gemm else []


def gated_delta_net(node: ImportedNode) -> list[LayerDraft]:
    query, value = need(node, 0), node.input(2)
    if value is None or len(query.shape) != 3 or len(value.shape) != 3:
        return [draft(node, "unknown")]
    gemm = sized_gemm(query.shape[0], query.shape[2], 3 * value.shape[2], max(query.shape[1], value.shape[1]))
    return [draft(node, "matmul", gemm=gemm)] if gemm else []


def _selected_attention(node: ImportedNode, keys: int) -> list[LayerDraft]:
    """Tokens that each meet *keys* keys of a cache."""
    query, key = need(node, 0), node.input(1)
    heads, shared = _head_count(node, "num_heads"), _head_count(node, "kv_num_heads")
    width = query.shape[-1] // (heads if key is not None else heads + 2 * shared)
    tokens = query.elements // max(1, query.shape[-1])
    return _core(node, AttentionSizes(1, heads, tokens, keys, width, width))


def _projection(node: ImportedNode, data: Tensor, weight: Tensor, part: str) -> list[LayerDraft]:
    """Rows of *data* through a matrix, before the attention itself; writes no output yet."""
    k, n = _axes(weight, 2)
    gemm = sized_gemm(data.elements // max(1, k), k, n)
    if gemm is None:
        return []
    kind, bare = "gemm" if weight.constant else "matmul", ImportedNode(node.name, node.op, (data,), (), node.attributes)
    projection = draft(bare, kind, gemm=gemm, weight=weight, trained=(weight,), output_elements=gemm.m * n)
    return [replace(projection, layer=replace(projection.layer, name=f"{node.name}/{part}"))]


def _axes(tensor: Tensor, count: int) -> tuple[int, ...]:
    if len(tensor.shape) != count:
        raise ModelError(f"attention needs {count} axes here, got {len(tensor.shape)}")
    return tensor.shape


def _flag(node: ImportedNode, place: int) -> bool:
    """Whether a constant flag is set; one that comes with the request counts as not set."""
    value = need(node, place).value
    return value is not None and bool(value.all())


def projected(
    node: ImportedNode, past: int, q_heads: str = "num_heads", kv_heads: str = "kv_num_heads"
) -> list[LayerDraft]:
    """Attention over projected queries, keys and values, with heads side by side or as an axis of their own.

    *past* is the place of the cached keys; *q_heads* and *kv_heads* are the attributes that count heads.
    """
    query, key = need(node, 0), node.input(1)
    if len(query.shape) not in (3, 4, 5):
        return [draft(node, "unknown")]
    if key is None or len(key.shape) == 5:
        batch, heads, rows, d = _unpack_sizes(query, node, q_heads, kv_heads, whole=key is None)
        keys, dv = rows if key is None else key.shape[1], d
    else:
        batch, heads, rows, d = _by_head(query, node, q_heads)
        _, _, keys, _ = _by_head(key, node, kv_heads)
        _, _, _, dv = _by_head(node.input(2) or key, node, kv_heads)
    earlier = node.input(past)
    if earlier is not None and len(earlier.shape) == 4:
        keys += earlier.shape[2]
    return _core(node, AttentionSizes(batch, heads, rows, keys, d, dv))


def _unpack_sizes(
    tensor: Tensor, node: ImportedNode, q_heads: str, kv_heads: str, *, whole: bool
) -> tuple[int, int, int, int]:
    """Sizes by head of queries that share a tensor with their keys and values (*whole*), or whose keys share one."""
    if len(tensor.shape) == 5:
        batch, rows, heads, _, width = tensor.shape
        return batch, heads, rows, width
    batch, rows, width = _axes(tensor, 3)
    heads, shared = _head_count(node, q_heads), _head_count(node, kv_heads)
    return batch, heads, rows, width // (heads + 2 * shared if whole else heads)


def _by_head(tensor: Tensor, node: ImportedNode, heads: str) -> tuple[int, int, int, int]:
    """(batch, heads, positions, width of a head) of a tensor with or without an axis for heads."""
    if len(tensor.shape) == 4:
        batch, count, rows, width = tensor.shape
        return batch, count, rows, width
    if len(tensor.shape) != 3:
        raise ModelError("attention needs queries, keys and values of 3 or 4 axes")
    count = _head_count(node, heads)
    batch, rows, width = tensor.shape
    return batch, count, rows, width // count


def _head_count(node: ImportedNode, name: str) -> int:
    count = node.attributes.integer(name, 1)
    if count < 1:
        raise ModelError(f"{name} must be at least 1, got {count}")
    return count


def _core(node: ImportedNode, sizes: AttentionSizes) -> list[LayerDraft]:
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
