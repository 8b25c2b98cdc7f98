"""Transformer encoders: token ids of one fixed length in, logits or hidden states out.

Every projection is a layer of its own (query, key, value, ...), as the schedulers' papers count them. *seq_len*: tokens
of an input; *hidden*: values of a token's vector; *heads*: of an attention; *mask*: summands of its scores (``_mask``).
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from weft.base.errors import ModelError
from weft.models.onnx_import.importer import TABLES
from weft.models.zoo.graph import GraphBuilder, GraphValue

# published sizes of the pretrained tokenizers and position tables
BERT_VOCABULARY, BERT_POSITIONS, BERT_TOKEN_TYPES = 30522, 512, 2
XLNET_VOCABULARY = 32000
MASKED = 1e4
"""Subtracted from the score of a masked token, so that its softmax is 0 in float32."""


def bert(g: GraphBuilder, *, seq_len: int, layers: int, hidden: int, heads: int) -> None:
    """BERT (Devlin et al. 2019) with its pooler and a classifier of two classes."""
    _check_widths(g, hidden, heads)
    if seq_len > BERT_POSITIONS:
        raise ModelError(f"{g.name}: seq_len must be at most {BERT_POSITIONS}, got {seq_len}")
    tokens, types = g.ids("input_ids", seq_len), g.ids("token_type_ids", seq_len)
    mask = _mask(g, g.ids("attention_mask", seq_len))
    x = _bert_embeddings(g, tokens, types, seq_len, hidden)
    for layer in range(layers):
        x = _bert_block(g, x, f"encoder.{layer}", heads, mask)
    first = g.node("Gather", "pooler.first_token", x, g.constant("zero", 0, np.int64), axis=1)
    pooled = g.node("Tanh", "pooler.tanh", g.dense(first, "pooler", hidden))
    g.output(g.dense(pooled, "classifier", 2), "logits", 2)


def _bert_embeddings(g: GraphBuilder, tokens: GraphValue, types: GraphValue, seq_len: int, hidden: int) -> GraphValue:
    """The sum of the embeddings of words, token types and positions, normalised: [batch, seq_len, hidden]."""
    positions = g.constant("position_ids", np.arange(seq_len), np.int64)
    words = g.embedding(tokens, "embeddings.word", BERT_VOCABULARY, hidden)
    token_types = g.embedding(types, "embeddings.token_type", BERT_TOKEN_TYPES, hidden)
    position = g.embedding(positions, "embeddings.position", BERT_POSITIONS, hidden)
    x = g.node("Add", "embeddings.add_token_type", words, token_types)
    return g.layer_norm(g.node("Add", "embeddings.add_position", x, position), "embeddings.norm")


def _bert_block(g: GraphBuilder, x: GraphValue, name: str, heads: int, mask: GraphValue) -> GraphValue:
    """A block of BERT: attention and a feed-forward part, each added to its input and normalised."""
    query, key, value = (g.project(x, f"{name}.attention.{part}", x.width) for part in ("query", "key", "value"))
    queries = _split_heads(g, query, f"{name}.attention.query", heads)
    keys = _split_heads(g, key, f"{name}.attention.key", heads, transposed=True)
    scores = g.node("MatMul", f"{name}.attention.scores", queries, keys)
    context = _average_values(g, scores, value, f"{name}.attention", heads, mask)
    x = _residual(g, x, g.project(context, f"{name}.attention.output", x.width), f"{name}.attention")
    return _feed_forward(g, x, name)


def xlnet(g: GraphBuilder, *, seq_len: int, layers: int, hidden: int, heads: int) -> None:
    """XLNet (Yang et al. 2019), content stream: attention to content and to relative position."""
    _check_widths(g, hidden, heads)
    tokens = g.ids("input_ids", seq_len)
    mask = _mask(g, g.ids("attention_mask", seq_len))
    positions = _relative_positions(g, tokens, seq_len, hidden)
    x = g.embedding(tokens, "embeddings.word", XLNET_VOCABULARY, hidden)
    for layer in range(layers):
        x = _xlnet_block(g, x, positions, f"encoder.{layer}", seq_len, heads, mask)
    g.output(x, "hidden_states", seq_len, hidden)


def _relative_positions(g: GraphBuilder, tokens: GraphValue, seq_len: int, hidden: int) -> GraphValue:
    """Sinusoids of the distances seq_len .. 1 - seq_len, for every sample: [batch, 2 seq_len, hidden].

    The distances are added to 0 times a token id, so that no runtime folds them: as in the published code, every layer
    projects them again for every query.
    """
    zero = g.constant("position.nothing", 0, np.int64)
    origin = g.node("Mul", "position.origin", g.slice(tokens, "position.token", 1, 0, 1), zero)
    distances = g.constant("position.distances", np.arange(seq_len, -seq_len, -1), np.int64)
    x = g.node("Cast", "position.float", g.node("Add", "position.add", origin, distances), to=1)  # 1: float32
    x = g.node("Unsqueeze", "position.unsqueeze", x, g.constant("position.axis", [2], np.int64))
    rates = g.constant("position.rates", 1e4 ** -(np.arange(0, hidden, 2) / hidden))
    angles = g.node("Mul", "position.angles", x, rates)
    waves = [g.node(op, f"position.{op.lower()}", angles) for op in ("Sin", "Cos")]
    return g.node("Concat", "position", *waves, width=hidden, axis=-1)


def _xlnet_block(
    g: GraphBuilder, x: GraphValue, positions: GraphValue, name: str, seq_len: int, heads: int, mask: GraphValue
) -> GraphValue:
    """A block of XLNet: attention whose scores are those by content plus those by relative position."""
    part = f"{name}.attention"
    query, key, value = (g.project(x, f"{part}.{p}", x.width, bias=False) for p in ("query", "key", "value"))
    relative = g.project(positions, f"{part}.relative", x.width, bias=False)
    content_query = g.shift(query, f"{part}.content_query", f"{part}.content_bias")
    position_query = g.shift(query, f"{part}.position_query", f"{part}.position_bias")
    content_scores = g.node(
        "MatMul",
        f"{part}.content_scores",
        _split_heads(g, content_query, f"{part}.content_query", heads),
        _split_heads(g, key, f"{part}.key", heads, transposed=True),
    )
    position_scores = g.node(
        "MatMul",
        f"{part}.position_scores",
        _split_heads(g, position_query, f"{part}.position_query", heads),
        _split_heads(g, relative, f"{part}.relative", heads, transposed=True),
    )
    position_scores = relative_shift(g, position_scores, f"{part}.shift", seq_len, heads)
    scores = g.node("Add", f"{part}.scores", content_scores, position_scores)
    context = _average_values(g, scores, value, part, heads, mask)
    x = _residual(g, x, g.project(context, f"{part}.output", x.width, bias=False), part)
    return _feed_forward(g, x, name)


def relative_shift(g: GraphBuilder, x: GraphValue, name: str, seq_len: int, heads: int) -> GraphValue:
    """Turn scores by distance, [i, c] with c = seq_len - distance, into scores by key, [i, j] at distance i - j.

    Dropping the first seq_len values and reading the other values in rows that are one value shorter moves row i left
    by seq_len - i positions, without a gather (Dai et al. 2019, appendix B).
    """
    x = g.reshape(x, f"{name}.tall", 0, heads, 2 * seq_len, seq_len)
    x = g.slice(x, f"{name}.drop", axis=2, start=1, end=2 * seq_len)
    x = g.reshape(x, f"{name}.wide", 0, heads, seq_len, 2 * seq_len - 1)
    return g.slice(x, name, axis=3, start=0, end=seq_len)


def _mask(g: GraphBuilder, mask: GraphValue) -> GraphValue:
    """Turn a mask of 1 (attend) and 0 (ignore) into summands of scores, 0 and -``MASKED``: [batch, 1, 1, seq_len]."""
    x = g.node("Cast", "mask.float", mask, to=1)  # 1: float32
    x = g.node("Unsqueeze", "mask.unsqueeze", x, g.constant("mask.axes", [1, 2], np.int64))
    x = g.node("Sub", "mask.minus_one", x, g.constant("one", 1))
    return g.node("Mul", "mask", x, g.constant("mask.penalty", MASKED))


def _split_heads(g: GraphBuilder, x: GraphValue, name: str, heads: int, *, transposed: bool = False) -> GraphValue:
    """[batch, tokens, hidden] -> [batch, head, tokens, size]; *transposed*: the last two axes exchanged."""
    x = g.reshape(x, f"{name}.heads", 0, 0, heads, x.width // heads, width=x.width)
    return g.node("Transpose", f"{name}.split", x, perm=(0, 2, 3, 1) if transposed else (0, 2, 1, 3))


def _average_values(
    g: GraphBuilder, scores: GraphValue, value: GraphValue, name: str, heads: int, mask: GraphValue
) -> GraphValue:
    """The average of the values by the softmax of the scaled, masked scores: [batch, tokens, hidden]."""
    scale = g.constant("attention.scale", 1 / math.sqrt(value.width // heads))
    scores = g.node("Mul", f"{name}.scale", scores, scale)
    probabilities = g.node("Softmax", f"{name}.softmax", g.node("Add", f"{name}.mask", scores, mask), axis=-1)
    context = g.node("MatMul", f"{name}.context", probabilities, _split_heads(g, value, f"{name}.value", heads))
    context = g.node("Transpose", f"{name}.context.join", context, perm=(0, 2, 1, 3))
    return g.reshape(context, f"{name}.context.tokens", 0, 0, value.width, width=value.width)


def _feed_forward(g: GraphBuilder, x: GraphValue, name: str) -> GraphValue:
    y = g.node("Gelu", f"{name}.ff.gelu", g.project(x, f"{name}.ff.expand", 4 * x.width))
    return _residual(g, x, g.project(y, f"{name}.ff.contract", x.width), f"{name}.ff")


def _residual(g: GraphBuilder, x: GraphValue, y: GraphValue, name: str) -> GraphValue:
    """The layer norm of *x* + *y*."""
    return g.layer_norm(g.node("Add", f"{name}.add", y, x), f"{name}.norm")


def _check_widths(g: GraphBuilder, hidden: int, heads: int) -> None:
    """Raise ModelError unless *hidden* is even and a multiple of *heads*."""
    if hidden % heads or hidden % 2:
        raise ModelError(f"{g.name}: hidden must be even and a multiple of heads, got {hidden} and {heads}")


GMF_WIDTH, MLP_WIDTHS = 64, (256, 256, 128, 64)
"""The NeuMF of MLPerf Training v0.5; each of the two embeddings of the MLP has half of its first width."""


def ncf(g: GraphBuilder, *, users: int, items: int, tables: str) -> None:
    """Neural collaborative filtering (He et al. 2017): a product of embeddings and an MLP, concatenated.

    users, items: rows of the embedding tables. tables: the metadata entry ``weft.tables``, 'stream' or 'gather'.
    """
    if tables not in ("stream", "gather"):
        raise ModelError(f"{g.name}: tables must be 'stream' or 'gather', got {tables!r}")
    g.metadata[TABLES] = tables
    user, item = g.ids("user"), g.ids("item")
    half = MLP_WIDTHS[0] // 2
    gmf_user = g.embedding(user, "gmf.user", users, GMF_WIDTH)
    gmf_item = g.embedding(item, "gmf.item", items, GMF_WIDTH)
    mlp_user = g.embedding(user, "mlp.user", users, half)
    mlp_item = g.embedding(item, "mlp.item", items, half)
    product = g.node("Mul", "gmf.product", gmf_user, gmf_item)
    x = g.node("Concat", "mlp.concat", mlp_user, mlp_item, width=2 * half, axis=-1)
    for number, (_, out) in enumerate(pairwise(MLP_WIDTHS)):
        x = g.activation(g.dense(x, f"mlp.fc{number}", out), f"mlp.fc{number}", "relu")
    features = g.node("Concat", "concat", product, x, width=GMF_WIDTH + x.width, axis=-1)
    g.output(g.node("Sigmoid", "sigmoid", g.dense(features, "predict", 1)), "score", 1)
