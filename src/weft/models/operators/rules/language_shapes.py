"""Rules for output shapes of attention, recurrence, embeddings and related operators."""

from __future__ import annotations

from weft.models.onnx_graph import Attributes
from weft.models.operators.rules.shapes import Inputs, Shape, ShapeRule, shape_of, values_of


def attention(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of the output of com.microsoft Attention: the input's rows, as wide as the projected values."""
    data, weight = shape_of(inputs, 0), shape_of(inputs, 1)
    sizes = attributes.integers("qkv_hidden_sizes", (weight[-1] // 3,) if weight else ())
    return (*data[:-1], sizes[-1]) if data and sizes else None


def attention_cache(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of the new cache of com.microsoft Attention: keys and values of cached positions and of the rows."""
    data, weight, past = shape_of(inputs, 0), shape_of(inputs, 1), shape_of(inputs, 4)
    heads = attributes.integer("num_heads", 1)
    if data is None or len(data) != 3 or weight is None or heads < 1:
        return None
    cached = past[3] if past is not None and len(past) == 5 else 0
    sizes = attributes.integers("qkv_hidden_sizes", (weight[-1] // 3,))
    return (2, data[0], heads, cached + data[1], sizes[0] // heads)


def projected(kv_heads: str) -> ShapeRule:
    """The shape rule of attention over projected queries: a row per query, as wide as the values of all heads.

    kv_heads: name of the attribute with the number of heads of keys and values.
    """

    def rule(inputs: Inputs, attributes: Attributes) -> Shape | None:
        query, value = shape_of(inputs, 0), shape_of(inputs, 2)
        heads, value_heads = attributes.integer("num_heads", 1), attributes.integer(kv_heads, 1)
        if query is None or min(heads, value_heads) < 1:
            return None
        if len(query) == 5:  # queries, keys and values in one tensor: batch, rows, heads, 3, width
            return (query[0], query[1], query[2] * query[4])
        if len(query) not in (2, 3):
            return None
        if value is None:
            packed = shape_of(inputs, 1)
            if packed is not None:  # keys and values in one tensor: batch, rows, heads, 2, width
                return query
            return (*query[:-1], heads * (query[-1] // (heads + 2 * value_heads)))
        width = value[-1] if len(value) == 4 else value[-1] // value_heads
        return (*query[:-1], heads * width)

    return rule


def key_cache(key: int, past: int, kv_heads: str) -> ShapeRule:
    """The shape rule of returned keys or values: batch, heads, cached and new positions, width.

    key, past: indices of the inputs with new and cached keys. kv_heads: name of the attribute with the number of heads.
    """

    def rule(inputs: Inputs, attributes: Attributes) -> Shape | None:
        new, cache = shape_of(inputs, key), shape_of(inputs, past)
        heads = attributes.integer(kv_heads, 1)
        if new is None or heads < 1:
            return None
        if len(new) == 4:
            return new
        cached = cache[2] if cache is not None and len(cache) == 4 else 0
        return (new[0], heads, cached + new[1], new[2] // heads) if len(new) == 3 else None

    return rule


def normed(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of a norm's mean or deviation: one value per row."""
    shape = shape_of(inputs, 0)
    return (*shape[:-1], 1) if shape else None


def embedding(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of an embedding: that of the indices, with the width of the table in input 2."""
    rows, table = shape_of(inputs, 0), shape_of(inputs, 2)
    return (*rows, table[-1]) if rows and table else None


def samples(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of one value per sample."""
    return (shape_of(inputs, 0) or ())[:1]


def position_bias(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of RelativePositionBias: 1, heads, queries, keys; None unless both lengths are constants."""
    table, queries, keys = shape_of(inputs, 0), values_of(inputs, 1), values_of(inputs, 2)
    return (1, table[1], queries[0], keys[0]) if table and len(table) == 2 and queries and keys else None


def gated_bias(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of GatedRelativePositionBias: sequences, heads, queries, keys."""
    query, positions, offsets = shape_of(inputs, 0), shape_of(inputs, 2), shape_of(inputs, 6)
    if not query or positions is None or len(positions) != 4:
        return None
    return (offsets[0] if offsets else query[0], *positions[1:])


def restored(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of RestorePadding: the padded positions, with the width of the tokens."""
    data, offsets = shape_of(inputs, 0), shape_of(inputs, 1)
    return (*offsets, data[-1]) if data and offsets else None


def linear_attention(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of the output of LinearAttention: a row per query, as wide as the values of all heads."""
    query, value = shape_of(inputs, 0), shape_of(inputs, 2)
    q_heads, kv_heads = (attributes.integer(name, 1) for name in ("q_num_heads", "kv_num_heads"))
    if not query or not value or min(q_heads, kv_heads) < 1:
        return None
    return (*query[:-1], value[-1] // kv_heads * max(q_heads, kv_heads))


def linear_state(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of the state of LinearAttention: batch, heads, widths of key and value; else as the given state."""
    query, value = shape_of(inputs, 0), shape_of(inputs, 2)
    q_heads, kv_heads = (attributes.integer(name, 1) for name in ("q_num_heads", "kv_num_heads"))
    if not query or not value or min(q_heads, kv_heads) < 1 or attributes.integer("state_window", 0):
        return shape_of(inputs, 3)
    return (query[0], kv_heads, query[-1] // q_heads, value[-1] // kv_heads)


def causal_state(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of the state of CausalConvWithState: batch, channels, positions before the window; else as given."""
    data, weight, past = shape_of(inputs, 0), shape_of(inputs, 1), shape_of(inputs, 3)
    if past is not None or not data or not weight or attributes.integer("state_window", 0) or len(weight) != 3:
        return past
    return (data[0], weight[0], (weight[-1] - 1) * max(1, attributes.integer("dilation", 1)))


def delta_net(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of the output of GatedDeltaNet: tokens, heads, width of a value."""
    query, value = shape_of(inputs, 0), shape_of(inputs, 2)
    if query is None or value is None or len(query) != 3 or len(value) != 3:
        return None
    return (query[0], max(query[1], value[1]), value[2])


def recurrent_sequence(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of the outputs of a recurrent layer for all steps: steps, directions, batch, hidden size."""
    data, state = shape_of(inputs, 0), recurrent_state(inputs, attributes)
    return (data[0], *state) if data and state else None


def recurrent_state(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of the state of a recurrent layer: directions, batch, hidden size."""
    data = shape_of(inputs, 0) or ()
    directions = 2 if attributes.text("direction") == "bidirectional" else 1
    return (directions, data[1], attributes.integer("hidden_size", 1)) if len(data) == 3 else None
