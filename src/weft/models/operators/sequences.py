"""Recurrent layers, attention, embeddings and related operators."""

from __future__ import annotations

from functools import partial

from weft.models.operators.operator import EVERY_INPUT, MICROSOFT, Operator
from weft.models.operators.rules import attention_costs, costs, packed_costs, product_costs, rows, sequence_meanings
from weft.models.operators.rules.language_shapes import (
    attention,
    attention_cache,
    delta_net,
    embedding,
    key_cache,
    linear_attention,
    linear_state,
    position_bias,
    projected,
    recurrent_sequence,
    recurrent_state,
    restored,
    samples,
)
from weft.models.operators.rules.shapes import columns_of, like

_recurrent_outputs = (recurrent_sequence, recurrent_state, recurrent_state)
_cached = (projected("kv_num_heads"), like(3), like(4))
_elementwise = partial(Operator, cost=costs.elementwise)

RECURRENT = (
    Operator(
        "LSTM",
        cost=partial(product_costs.recurrent, gates=4),
        rows=rows.recurrent,
        torch=sequence_meanings.recurrent("lstm", (0, 2, 3, 1)),
    ),
    Operator(
        "GRU",
        cost=partial(product_costs.recurrent, gates=3),
        rows=rows.recurrent,
        torch=sequence_meanings.recurrent("gru", (1, 0, 2)),
    ),
    Operator(
        "RNN",
        cost=partial(product_costs.recurrent, gates=1),
        rows=rows.recurrent,
        torch=sequence_meanings.recurrent("rnn_tanh", (0,)),
    ),
    Operator(
        f"{MICROSOFT}DynamicQuantizeLSTM",
        cost=partial(product_costs.recurrent, gates=4, inner=1),
        shapes=_recurrent_outputs,
        rows=rows.mixes_rows,
    ),
    Operator(f"{MICROSOFT}AttnLSTM", cost=packed_costs.attn_lstm, shapes=_recurrent_outputs),
)

ATTENTION = (
    Operator(
        "Attention",
        cost=partial(attention_costs.projected, past=4, q_heads="q_num_heads"),
        rows=rows.attention,
        torch=sequence_meanings.attention,
    ),
    Operator("LinearAttention", cost=attention_costs.linear_attention, shapes=(linear_attention, linear_state)),
    # ONNX Runtime's
    Operator(
        f"{MICROSOFT}Attention",
        cost=attention_costs.attention,
        shapes=(attention, attention_cache),
        rows=rows.attention,
        torch=sequence_meanings.packed_attention,
    ),
    Operator(
        f"{MICROSOFT}MultiHeadAttention",
        cost=partial(attention_costs.projected, past=6, kv_heads="num_heads"),
        shapes=(projected("num_heads"), key_cache(1, 6, "num_heads"), key_cache(2, 7, "num_heads")),
        rows=rows.attention,
        torch=sequence_meanings.multi_head_attention,
    ),
    Operator(
        f"{MICROSOFT}DecoderMaskedMultiHeadAttention",
        cost=partial(attention_costs.projected, past=5, kv_heads="num_heads"),
        shapes=(projected("num_heads"), key_cache(1, 5, "num_heads"), key_cache(2, 6, "num_heads")),
    ),
    Operator(
        f"{MICROSOFT}GroupQueryAttention",
        cost=partial(attention_costs.projected, past=3),
        shapes=(projected("kv_num_heads"),),
    ),
    # Counted as if its mask were dense.
    Operator(f"{MICROSOFT}SparseAttention", cost=partial(attention_costs.projected, past=3), shapes=_cached),
    Operator(f"{MICROSOFT}DynamicSparseAttention", cost=attention_costs.dynamic_sparse_attention, shapes=_cached),
    Operator(f"{MICROSOFT}PagedAttention", cost=attention_costs.paged_attention, shapes=_cached),
    Operator(f"{MICROSOFT}SparsePagedAttention", cost=attention_costs.sparse_paged_attention, shapes=_cached),
    Operator(f"{MICROSOFT}QAttention", cost=partial(attention_costs.attention, past=8), shapes=(attention,)),
    Operator(
        f"{MICROSOFT}DecoderMaskedSelfAttention",
        cost=attention_costs.attention,
        shapes=(attention, attention_cache),
    ),
    Operator(f"{MICROSOFT}PackedAttention", cost=attention_costs.packed_attention, shapes=(attention,)),
    Operator(
        f"{MICROSOFT}PackedMultiHeadAttention",
        cost=attention_costs.packed_multi_head_attention,
        shapes=(projected("num_heads"),),
    ),
    Operator(f"{MICROSOFT}QOrderedAttention", cost=attention_costs.ordered_attention, shapes=(columns_of(7, -1),)),
    Operator(f"{MICROSOFT}DecoderAttention", cost=attention_costs.decoder_attention, shapes=(like(0),)),
    Operator(f"{MICROSOFT}LongformerAttention", cost=attention_costs.longformer_attention, shapes=(like(0),)),
    Operator(
        f"{MICROSOFT}QOrderedLongformerAttention",
        cost=partial(attention_costs.longformer_attention, weight=2, everywhere=8),
        shapes=(like(0),),
    ),
    Operator(
        f"{MICROSOFT}LinearAttention",
        cost=attention_costs.linear_attention,
        shapes=(linear_attention, linear_state),
    ),
    Operator(f"{MICROSOFT}GatedDeltaNet", cost=attention_costs.gated_delta_net, shapes=(delta_net, like(6))),
)

AROUND_ATTENTION = (
    _elementwise("RotaryEmbedding", rows=rows.kept_apart()),
    _elementwise(f"{MICROSOFT}RotaryEmbedding", shapes=(like(0),), rows=rows.kept_apart()),
    _elementwise(f"{MICROSOFT}MRotaryEmbedding", shapes=(like(0),)),
    _elementwise(f"{MICROSOFT}GemmaRotaryEmbedding", shapes=(like(1), like(3))),
    Operator(
        f"{MICROSOFT}EmbedLayerNormalization",
        cost=costs.embed_norm,
        shapes=(embedding, samples),
        rows=rows.kept_apart(),
    ),
    Operator(f"{MICROSOFT}QEmbedLayerNormalization", cost=costs.embed_norm, shapes=(embedding, samples)),
    Operator(f"{MICROSOFT}RelativePositionBias", cost=costs.movement, shapes=(position_bias,)),
    Operator(f"{MICROSOFT}NGramRepeatBlock", cost=costs.movement, shapes=(like(1),)),
    Operator(f"{MICROSOFT}RemovePadding", cost=costs.movement, sized_by=EVERY_INPUT),
    Operator(f"{MICROSOFT}RestorePadding", cost=costs.movement, shapes=(restored,), sized_by=EVERY_INPUT),
    *(
        Operator(f"{MICROSOFT}{name}", sized_by=EVERY_INPUT)
        for name in ("BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch")
    ),
)

OPERATORS = (*RECURRENT, *ATTENTION, *AROUND_ATTENTION)
