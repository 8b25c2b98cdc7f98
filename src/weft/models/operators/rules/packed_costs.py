"""Costs of ONNX Runtime's operators that multiply: packed and quantised weights, experts, convolutions with a state.

Their inputs are as in the schemas that ONNX Runtime registers and in its ContribOperators.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from weft.base.errors import ModelError
from weft.models.layer import Gemm
from weft.models.onnx_import.drafts import ImportedNode, LayerDraft, draft
from weft.models.onnx_import.tensors import Stored, Tensor
from weft.models.operators.rules.product_costs import conv, need, recurrent, sized_gemm


def chained(drafts: Sequence[LayerDraft]) -> list[LayerDraft]:
    """Chain the layers of one node: only the first reads the node's inputs, only the last writes its outputs."""
    last = len(drafts) - 1
    return [
        replace(
            layer_draft,
            reads=layer_draft.reads if not number else (),
            writes=layer_draft.writes if number == last else (),
        )
        for number, layer_draft in enumerate(drafts)
    ]


def named(draft: LayerDraft, part: str) -> LayerDraft:
    """The layer with ``/part`` appended to its name."""
    return replace(draft, layer=replace(draft.layer, name=f"{draft.layer.name}/{part}"))


def packed(node: ImportedNode, k: int, n: int, bits: int, index: int = 1) -> list[LayerDraft]:
    """A product with packed weights of *bits* bits in input *index*; *k*, *n*: rows and columns before packing."""
    data, stored = need(node, 0), need(node, index)
    gemm = sized_gemm(data.elements // max(k, 1), k, n)
    weight = Tensor((k, n), stored.dtype, bits, constant=True, stored=(Stored(k * n, stored.dtype),))
    # The packed weight is no activation: only the data is left as an input.
    data_node = ImportedNode(node.name, node.op, (data,), node.outputs, node.attributes)
    return [draft(data_node, "gemm", gemm=gemm, weight=weight, trained=(weight,))] if gemm else []


def matmul_nbits(node: ImportedNode) -> list[LayerDraft]:
    """MatMulNBits: the attributes have the sizes and bits of the packed weights."""
    k, n, bits = (node.attributes.integer(name, 1) for name in ("K", "N", "bits"))
    return packed(node, k, n, bits)


def matmul_bnb4(node: ImportedNode) -> list[LayerDraft]:
    return packed(node, node.attributes.integer("K", 1), node.attributes.integer("N", 1), 4)


def matmul_fpq4(node: ImportedNode) -> list[LayerDraft]:
    """MatMulFpQ4: the third input holds k and n of the packed weights."""
    sizes = need(node, 2).value
    if sizes is None or sizes.size != 2:
        return [draft(node, "unknown")]
    k, n = (int(size) for size in sizes)
    return packed(node, k, n, 4)


def matmul_floats(node: ImportedNode, bits: int) -> list[LayerDraft]:
    """A product with weights that are floats of 4 or 8 bits, a row for each output."""
    return packed(node, need(node, 0).shape[-1], need(node, 1).shape[0], bits)


def nbits_mlp(node: ImportedNode) -> list[LayerDraft]:
    """MatMulNBitsMlp: the weights of the gate and of the gated values as one product of twice the columns."""
    k, n, bits = (node.attributes.integer(name, 1) for name in ("K", "N", "bits"))
    return packed(node, k, 2 * n, bits, index=3)


def nbits_qkv(node: ImportedNode) -> list[LayerDraft]:
    """MatMulNBitsQkv: the projections to queries, keys and values as one product."""
    k, q, kv, bits = (node.attributes.integer(name, 1) for name in ("K", "Nq", "Nkv", "bits"))
    return packed(node, k, q + 2 * kv, bits, index=3)


def moe(node: ImportedNode) -> list[LayerDraft]:
    """MoE: each token passes through ``k`` experts, so at most ``k`` * tokens experts' weights are read."""
    return _experts(node, {"fc1": 2, "fc3": 6, "fc2": 4}, {})


def q_moe(node: ImportedNode) -> list[LayerDraft]:
    """QMoE: MoE with packed weights."""
    default = node.attributes.integer("expert_weight_bits", 4)
    bits = {name: node.attributes.integer(f"{name}_expert_weight_bits", default) for name in ("fc1", "fc2", "fc3")}
    return _experts(node, {"fc1": 2, "fc3": 8, "fc2": 5}, bits)


def _experts(node: ImportedNode, weight_inputs: dict[str, int], bits: dict[str, int]) -> list[LayerDraft]:
    """The layers of a mixture of experts.

    weight_inputs: layer -> index of the input with its weights, in the order of computing. bits: layer -> bits of a
    packed weight; layers without an entry are not packed.
    """
    data = need(node, 0)
    # rows of all experts' products together; each may be the only one of its expert
    rows = data.elements // max(1, data.shape[-1]) * node.attributes.integer("k", 1)
    drafts = []
    for name, index in weight_inputs.items():
        stored = node.input(index)
        if stored is None:
            continue
        if len(stored.shape) != 3:
            raise ModelError(f"the weights of experts have 3 axes, {name} has {len(stored.shape)}")
        experts, n, bytes_or_values = stored.shape
        packed_bits = bits.get(name, 0)
        k = bytes_or_values * 8 // max(1, packed_bits) if packed_bits else bytes_or_values
        parameters = (Stored(experts * n * k, stored.dtype),) if stored.constant else ()
        weight = Tensor(
            (experts, n, k), stored.dtype, packed_bits or stored.bits, constant=stored.constant, stored=parameters
        )
        gemm = sized_gemm(rows, k, n)
        if gemm is not None:
            data_node = ImportedNode(node.name, node.op, (data,), node.outputs, node.attributes)
            layer = named(draft(data_node, "gemm", gemm=gemm, weight=weight, trained=(weight,)), name)
            weights_read = min(experts, rows) * n * k if stored.constant else 0
            drafts.append(replace(layer, layer=replace(layer.layer, weights=weights_read)))
    return chained(drafts)


def attn_lstm(node: ImportedNode) -> list[LayerDraft]:
    """AttnLSTM: an LSTM with attention to a memory in every step.

    The products of each step (query, scores, context, attention layer) are counted together as the layer ``looks``.
    """
    query, memory, attention_layer = node.input(8), node.input(11), node.input(13)  # query's and last are weights
    steps = recurrent(node, gates=4)
    if query is None or memory is None or not steps or len(query.shape) != 3 or len(memory.shape) != 3:
        return steps
    directions, hidden, size = query.shape
    batch, length, depth = memory.shape
    rows = need(node, 0).shape[0] * batch
    layer_macs = (depth + hidden) * attention_layer.shape[-1] if attention_layer is not None else 0
    step_products = sized_gemm(rows, hidden * size + length * (size + depth) + layer_macs, 1, directions)
    keys = sized_gemm(batch * length, depth, size, directions)
    attention = [
        named(draft(node, "matmul", gemm=gemm), part)
        for gemm, part in ((keys, "memory"), (step_products, "looks"))
        if gemm
    ]
    return chained([*attention, *steps])


def qlinear_conv(node: ImportedNode) -> list[LayerDraft]:
    channels_last = node.attributes.integer("channels_last", 0)
    return conv(node, w=3, bias=8, channels=-1 if channels_last else 1)


def causal_conv(node: ImportedNode, bias: int = 2) -> list[LayerDraft]:
    """A depthwise convolution along a sequence: one window per position and channel. bias: index of the bias input."""
    data, weight = need(node, 0), need(node, 1)
    if len(weight.shape) < 3:
        raise ModelError(f"a convolution weight has at least 3 axes, not {len(weight.shape)}")
    channels, kernel = weight.shape[0], math.prod(weight.shape[2:])
    gemm = sized_gemm(data.elements // max(1, channels), kernel, 1, channels, kernel)
    return [draft(node, "conv", gemm=gemm, weight=weight, trained=(weight, node.input(bias)))] if gemm else []


def word_conv(node: ImportedNode) -> list[LayerDraft]:
    """WordConvEmbedding: an embedding of the characters of each word, and a convolution over them."""
    words, weight, table = need(node, 0), need(node, 1), need(node, 3)
    if len(words.shape) < 1 or len(weight.shape) < 3:
        raise ModelError("a convolution over words needs words and a weight of at least 3 axes")
    filters, window = weight.shape[0], weight.shape[-2]
    positions = max(0, words.shape[-1] - window + 1) * (words.elements // max(1, words.shape[-1]))
    gemm = sized_gemm(positions, math.prod(weight.shape[1:]), filters, kernel=window)
    trained = (weight, node.input(2), table)
    return [draft(node, "conv", gemm=gemm, weight=weight, trained=trained)] if gemm else []


def gated_position_bias(node: ImportedNode) -> list[LayerDraft]:
    """GatedRelativePositionBias: the product of each head of each query with one small matrix."""
    query, weight = need(node, 0), need(node, 3)
    if len(weight.shape) != 2:
        raise ModelError("the weight of the gate has 2 axes")
    gemm: Gemm | None = sized_gemm(query.elements // max(1, weight.shape[0]), *weight.shape)
    kind = "gemm" if weight.constant else "matmul"
    return [draft(node, kind, gemm=gemm, weight=weight, trained=(weight, node.input(4)))] if gemm else []
