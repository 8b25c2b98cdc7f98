"""Costs of attention operators: the projection if the operator has its weights, then scores and context.

Scores (queries times keys) and context (scores times values) multiply activations with activations, one group per
sample and head; they have no weights, and samples of a batch share nothing.
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
    """The sizes of an attention: numbers of queries and keys, *d* the width of both, *dv* the width of values."""

    batch: int
    heads: int
    queries: int
    keys: int
    d: int
    dv: int


def attention(node: ImportedNode, past: int = 4) -> list[LayerDraft]:
    """Attention of com.microsoft: one weight projects to queries, keys and values. past: index of the cache input."""
    data, weight = need(node, 0), need(node, 1)
    if len(data.shape) != 3 or len(weight.shape) != 2:
        raise ModelError("Attention needs an input of 3 axes and a weight of 2")
    batch, rows, width = data.shape
    heads = _head_count(node, "num_heads")
    sizes = node.attributes.integers("qkv_hidden_sizes", (weight.shape[1] // 3,) * 3)  # widths of q, k and v
    cache = node.input(past)
    keys = rows + (cache.shape[3] if cache is not None and len(cache.shape) == 5 else 0)
    core = _scores_and_context(node, AttentionSizes(batch, heads, rows, keys, sizes[0] // heads, sizes[-1] // heads))
    gemm = sized_gemm(batch * rows, width, weight.shape[1])
    if gemm is None or not core:
        return []
    qkv = draft(
        node,
        "gemm" if weight.constant else "matmul",
        gemm=gemm,
        weight=weight,
        trained=(weight, node.input(2)),
        output_elements=batch * rows * weight.shape[1],
    )
    return [replace(qkv, layer=replace(qkv.layer, name=f"{node.name}/qkv"), writes=()), *core]


def ordered_attention(node: ImportedNode) -> list[LayerDraft]:
    """QOrderedAttention: a weight each for queries, keys and values."""
    data, weights = need(node, 0), [need(node, index) for index in (5, 6, 7)]
    batch, rows, _ = _axes(data, 3)
    heads = _head_count(node, "num_heads")
    widths = [weight.shape[-1] for weight in weights]
    core = _scores_and_context(node, AttentionSizes(batch, heads, rows, rows, widths[0] // heads, widths[2] // heads))
    projections = [_projection(node, data, weight, part) for weight, part in zip(weights, "qkv", strict=True)]
    return [*(layer_draft for projection in projections for layer_draft in projection), *core]


def decoder_attention(node: ImportedNode) -> list[LayerDraft]:
    """DecoderAttention: keys are of the query's sequence or of another (static_kv), and may be cached (use_past)."""
    query, key, cache = need(node, 0), need(node, 1), node.input(6)
    rows, batch, width = _axes(query, 3)
    static, past = _flag(node, 8), _flag(node, 9)  # static_kv, use_past
    cached = cache.shape[2] if past and cache is not None and len(cache.shape) == 4 else 0
    new_keys = 0 if static and past else key.shape[0] if static else rows
    heads = _head_count(node, "num_heads")
    core = _scores_and_context(
        node, AttentionSizes(batch, heads, rows, cached + new_keys, width // heads, width // heads)
    )
    queries = _projection(node, query, need(node, 2), "q")
    keys_and_values = _projection(node, key if static else query, need(node, 3), "kv") if new_keys else []
    return [*queries, *keys_and_values, *core]


def packed_attention(node: ImportedNode) -> list[LayerDraft]:
    """PackedAttention: tokens without padding; the shape of input 3 is (sequences, longest sequence)."""
    data, weight = need(node, 0), need(node, 1)
    batch, rows = _axes(need(node, 3), 2)
    heads = _head_count(node, "num_heads")
    sizes = node.attributes.integers("qkv_hidden_sizes", (weight.shape[-1] // 3,) * 3)  # widths of q, k and v
    core = _scores_and_context(node, AttentionSizes(batch, heads, rows, rows, sizes[0] // heads, sizes[-1] // heads))
    return [*_projection(node, data, weight, "qkv"), *core]


def packed_multi_head_attention(node: ImportedNode) -> list[LayerDraft]:
    """PackedMultiHeadAttention: of projected tokens; the shape of input 4 is (sequences, longest sequence)."""
    query, value = need(node, 0), node.input(2)
    batch, rows = _axes(need(node, 4), 2)
    heads = _head_count(node, "num_heads")
    d = query.shape[-1] if len(query.shape) == 4 else query.shape[-1] // heads  # 4 axes: heads are an axis
    dv = d if value is None else value.shape[-1] // heads
    return _scores_and_context(node, AttentionSizes(batch, heads, rows, rows, d, dv))


def longformer_attention(node: ImportedNode, weight: int = 1, everywhere: int = 4) -> list[LayerDraft]:
    """LongformerAttention: each query attends to a window of keys; global attention has weights of its own.

    weight, everywhere: indices of the inputs with the weights of local and global attention.
    """
    data = need(node, 0)
    batch, rows, width = _axes(data, 3)
    heads = _head_count(node, "num_heads")
    keys = min(rows, 2 * max(1, node.attributes.integer("window", rows)) + 1)
    core = _scores_and_context(node, AttentionSizes(batch, heads, rows, keys, width // heads, width // heads))
    local = _projection(node, data, need(node, weight), "qkv")
    return [*local, *_projection(node, data, need(node, everywhere), "global"), *core]


def paged_attention(node: ImportedNode) -> list[LayerDraft]:
    """PagedAttention, as if the cache were full: its true length is only known from a request's values."""
    blocks, table = need(node, 3), need(node, 7)
    return _selected_attention(node, table.shape[-1] * blocks.shape[1])


def sparse_paged_attention(node: ImportedNode) -> list[LayerDraft]:
    """SparsePagedAttention: each token attends to as many keys as input 9 has columns."""
    return _selected_attention(node, need(node, 9).shape[-1])


def dynamic_sparse_attention(node: ImportedNode) -> list[LayerDraft]:
    """DynamicSparseAttention: each token attends to as many keys as input 7 has columns."""
    return _selected_attention(node, need(node, 7).shape[-1])


def linear_attention(node: ImportedNode) -> list[LayerDraft]:
    """LinearAttention: each token updates a matrix of d x dv per head by an outer product, and multiplies it.

    Both cost d * dv MACs; the delta rule multiplies the matrix once more.
    """
    query, value = need(node, 0), need(node, 2)
    q_heads, kv_heads = (_head_count(node, name) for name in ("q_num_heads", "kv_num_heads"))
    batch, rows, width = _axes(query, 3)
    products = 3 if "delta" in (node.attributes.text("update_rule") or "gated_delta") else 2
    d, dv = width // q_heads, value.shape[-1] // kv_heads
    gemm = sized_gemm(rows, d, products * dv, batch * max(q_heads, kv_heads))
    return [draft(node, "matmul", gemm=gemm)] if gemm else []


def gated_delta_net(node: ImportedNode) -> list[LayerDraft]:
    """GatedDeltaNet: linear attention by the delta rule, with inputs of the shape (tokens, heads, width)."""
    query, value = need(node, 0), node.input(2)
    if value is None or len(query.shape) != 3 or len(value.shape) != 3:
        return [draft(node, "unknown")]
    gemm = sized_gemm(query.shape[0], query.shape[2], 3 * value.shape[2], max(query.shape[1], value.shape[1]))
    return [draft(node, "matmul", gemm=gemm)] if gemm else []


def _selected_attention(node: ImportedNode, keys: int) -> list[LayerDraft]:
    """Attention of each token to *keys* keys of a cache."""
    query, key = need(node, 0), node.input(1)
    heads, kv_heads = _head_count(node, "num_heads"), _head_count(node, "kv_num_heads")
    # Without a key input, input 0 holds the queries, keys and values.
    width = query.shape[-1] // (heads if key is not None else heads + 2 * kv_heads)
    tokens = query.elements // max(1, query.shape[-1])
    return _scores_and_context(node, AttentionSizes(1, heads, tokens, keys, width, width))


def _projection(node: ImportedNode, data: Tensor, weight: Tensor, part: str) -> list[LayerDraft]:
    """The layer that multiplies *data* by *weight* before the attention; its result stays inside the node."""
    k, n = _axes(weight, 2)
    gemm = sized_gemm(data.elements // max(1, k), k, n)
    if gemm is None:
        return []
    kind = "gemm" if weight.constant else "matmul"
    projection_node = ImportedNode(node.name, node.op, (data,), (), node.attributes)
    projection = draft(projection_node, kind, gemm=gemm, weight=weight, trained=(weight,), output_elements=gemm.m * n)
    return [replace(projection, layer=replace(projection.layer, name=f"{node.name}/{part}"))]


def _axes(tensor: Tensor, count: int) -> tuple[int, ...]:
    """The shape of a tensor; raises ModelError if it does not have *count* axes."""
    if len(tensor.shape) != count:
        raise ModelError(f"attention needs {count} axes here, got {len(tensor.shape)}")
    return tensor.shape


def _flag(node: ImportedNode, index: int) -> bool:
    """Whether the flag in input *index* is a constant and set; a flag that is not constant counts as not set."""
    value = need(node, index).value
    return value is not None and bool(value.all())


def projected(
    node: ImportedNode, past: int, q_heads: str = "num_heads", kv_heads: str = "kv_num_heads"
) -> list[LayerDraft]:
    """Attention over projected queries, keys and values, with heads side by side or as an axis of their own.

    past: index of the input with cached keys. q_heads, kv_heads: names of the attributes with the numbers of heads.
    """
    query, key = need(node, 0), node.input(1)
    if len(query.shape) not in (3, 4, 5):
        return [draft(node, "unknown")]
    if key is None or len(key.shape) == 5:
        batch, heads, rows, d = _unpack_sizes(query, node, q_heads, kv_heads, packed=key is None)
        keys, dv = rows if key is None else key.shape[1], d
    else:
        batch, heads, rows, d = _sizes_by_head(query, node, q_heads)
        _, _, keys, _ = _sizes_by_head(key, node, kv_heads)
        _, _, _, dv = _sizes_by_head(node.input(2) or key, node, kv_heads)
    cache = node.input(past)
    if cache is not None and len(cache.shape) == 4:
        keys += cache.shape[2]
    return _scores_and_context(node, AttentionSizes(batch, heads, rows, keys, d, dv))


def _unpack_sizes(
    tensor: Tensor, node: ImportedNode, q_heads: str, kv_heads: str, *, packed: bool
) -> tuple[int, int, int, int]:
    """(batch, heads, positions, width of a head) of queries.

    *packed*: the tensor holds queries, keys and values; otherwise only keys and values share another tensor.
    """
    if len(tensor.shape) == 5:
        batch, rows, heads, _, width = tensor.shape
        return batch, heads, rows, width
    batch, rows, width = _axes(tensor, 3)
    heads, shared = _head_count(node, q_heads), _head_count(node, kv_heads)
    return batch, heads, rows, width // (heads + 2 * shared if packed else heads)


def _sizes_by_head(tensor: Tensor, node: ImportedNode, heads: str) -> tuple[int, int, int, int]:
    """(batch, heads, positions, width of a head) of a tensor with or without an axis for heads.

    *heads*: name of the attribute with the number of heads.
    """
    if len(tensor.shape) == 4:
        batch, count, rows, width = tensor.shape
        return batch, count, rows, width
    if len(tensor.shape) != 3:
        raise ModelError("attention needs queries, keys and values of 3 or 4 axes")
    count = _head_count(node, heads)
    batch, rows, width = tensor.shape
    return batch, count, rows, width // count


def _head_count(node: ImportedNode, name: str) -> int:
    """The number of heads in the attribute *name*; raises ModelError if it is less than 1."""
    count = node.attributes.integer(name, 1)
    if count < 1:
        raise ModelError(f"{name} must be at least 1, got {count}")
    return count


def _scores_and_context(node: ImportedNode, sizes: AttentionSizes) -> list[LayerDraft]:
    """The two products of an attention: queries times keys, and scores times values; no layers if one is empty."""
    batch, heads, queries, keys, d, dv = sizes
    scores = sized_gemm(queries, d, keys, batch * heads)
    context = sized_gemm(queries, keys, dv, batch * heads)
    if scores is None or context is None:
        return []
    base = draft(node, "matmul", gemm=scores)
    score_elements = batch * heads * queries * keys
    first: Layer = replace(
        base.layer,
        name=f"{node.name}/scores",
        input_elements=batch * heads * d * (queries + keys),
        output_elements=score_elements,
        reuses_weights=False,
    )
    second = replace(
        first,
        name=f"{node.name}/context",
        gemm=context,
        input_elements=score_elements + batch * heads * dv * keys,
        output_elements=base.layer.output_elements,
    )
    return [replace(base, layer=first, writes=(), stored=()), replace(base, layer=second, reads=())]
