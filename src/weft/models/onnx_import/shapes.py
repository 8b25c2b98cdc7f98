"""Output shapes that ONNX's own inference does not give: operators of ONNX Runtime, gaps in older versions of ONNX's.

What ONNX Runtime's operators take and hand out is told by the schemas it registers and by its ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx

from weft.models.onnx_import.attributes import Attributes
from weft.models.onnx_import.shape_rules import (
    Inputs,
    Rule,
    Sizes,
    columns,
    columns_of,
    common,
    compressed,
    cropped,
    expanded,
    fixed,
    gathered_blocks,
    halved,
    joined,
    like,
    looked_up,
    nonzero_places,
    ordered_product,
    pairs,
    product,
    reduced,
    reshaped,
    signal,
    spectrum,
    stated_columns,
    unfolded,
    words,
)
from weft.models.onnx_import.shape_rules_classical import categories, picked, predictions, targets, vector
from weft.models.onnx_import.shape_rules_language import (
    attention,
    attention_cache,
    causal_state,
    delta_net,
    embedding,
    gated_bias,
    key_cache,
    linear_attention,
    linear_state,
    normed,
    position_bias,
    projected,
    recurrent_sequence,
    recurrent_state,
    restored,
    samples,
)
from weft.models.onnx_import.shape_rules_windows import blocked, pooled_away, spread, unblocked, windowed


def own_shapes(op: str, inputs: Inputs, attributes: Attributes) -> Iterable[Sizes | None]:
    """The shapes of the leading outputs, None where there is no rule or too little to apply it to."""
    known = inputs and inputs[0] is not None
    return (rule(inputs, attributes) for rule in RULES.get(op, ())) if known else ()


def has_rules(op: str) -> bool:
    return op in RULES


def standard(node: onnx.NodeProto, op: str) -> tuple[onnx.NodeProto, str]:
    """The node of ONNX's own that has the same shapes and its operator, else *node* and *op* themselves."""
    if op not in _STANDARD:
        return node, op
    like, inputs = _STANDARD[op]
    known = onnx.defs.get_schema(like).attributes
    attributes = [each for each in node.attribute if each.name in known]
    return onnx.NodeProto(op_type=like, input=node.input[:inputs], output=node.output, attribute=attributes), like


_CLASSES = "classlabels_ints classlabels_int64s classlabels_strings"

_STANDARD = {
    "com.microsoft:FusedConv": ("Conv", 3),
    "com.microsoft:GatherND": ("GatherND", 2),
    "com.microsoft:GridSample": ("GridSample", 2),
    "com.microsoft:MaxpoolWithMask": ("MaxPool", 1),
    "com.microsoft:Pad": ("Pad", 3),
    "com.microsoft:Range": ("Range", 3),
    **{f"com.microsoft.nchwc:{op}": (op, 3 if op == "Conv" else 1)
       for op in ("Conv", "MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool")},
}  # fmt: skip
"""Operators with the shapes of a standard one, and how many inputs they have in common with its newest version."""

_SAME = """
    Abs Add BatchNormalization Ceil Clip Div Elu Exp Floor GroupNormalization HardSigmoid InstanceNormalization
    LeakyRelu Log Max Mean MeanVarianceNormalization Min Mul Neg PRelu Reciprocal Relu Selu Sigmoid Sqrt Sub Sum Tanh
    SimplifiedLayerNormalization com.microsoft:Gelu com.microsoft:FastGelu com.microsoft:QuickGelu
    com.microsoft:BiasGelu com.microsoft:QLinearSigmoid com.microsoft:QLinearLeakyRelu com.microsoft:QLinearSoftmax
    com.microsoft:BiasAdd com.microsoft:BiasSoftmax com.microsoft:GroupNorm com.microsoft:LayerNormalization
    com.microsoft:QuantizeLinear com.microsoft:DequantizeLinear com.microsoft:RotaryEmbedding
    com.microsoft:BitmaskDropout com.microsoft:BitmaskBiasDropout com.microsoft:BranchwiseRMSNorm
    com.microsoft:GatedAdd com.microsoft:GatedRMSNorm com.microsoft:HyperConnectionPostMix com.microsoft:Inverse
    com.microsoft:MRotaryEmbedding com.microsoft:MoE com.microsoft:QMoE com.microsoft:QOrderedGelu
    com.microsoft:QOrderedLayerNormalization com.microsoft:QuantizeWithOrder com.microsoft:DequantizeWithOrder
    com.microsoft:ScaledSiLU com.microsoft:SampleOp com.microsoft:Trilu com.microsoft:MurmurHash3
    com.microsoft:LongformerAttention com.microsoft:QOrderedLongformerAttention com.microsoft:DecoderAttention
    ai.onnx.ml:Binarizer ai.onnx.ml:Imputer ai.onnx.ml:LabelEncoder ai.onnx.ml:Normalizer ai.onnx.ml:Scaler
    ai.onnx.ml:CategoryMapper ai.onnx.ml:ZipMap Affine ImageScaler ParametricSoftplus Scale ScaledTanh
    MemcpyFromHost MemcpyToHost
"""
"""Operators whose first output, where nothing else tells, has the shape of their first input."""

RULES: dict[str, tuple[Rule, ...]] = {
    **dict.fromkeys(_SAME.split(), (like(0),)),
    **dict.fromkeys(("Dropout", "com.microsoft:BiasDropout"), (like(0), like(0))),
    **dict.fromkeys(("SkipLayerNormalization", "com.microsoft:SkipLayerNormalization",
                     "com.microsoft:SkipSimplifiedLayerNormalization"), (like(0), normed, normed, like(0))),
    **dict.fromkeys(("LayerNormalization", "SimplifiedLayerNormalization", "com.microsoft:LayerNormalization"),
                    (like(0), normed, normed)),
    "com.microsoft:SkipGroupNorm": (like(0), like(0)),
    "com.microsoft:DynamicQuantizeLinear": (like(0), fixed(), fixed()),
    **dict.fromkeys(("GreaterOrEqual", "LessOrEqual"), (common(0, 1),)),
    "Compress": (compressed,),
    "NonZero": (nonzero_places,),
    "Reshape": (reshaped,),
    **dict.fromkeys(("com.microsoft:QLinearAdd", "com.microsoft:QLinearMul"), (common(0, 3),)),
    **dict.fromkeys(("com.microsoft:ComplexMul", "com.microsoft:ComplexMulConj"), (common(0, 1),)),
    "com.microsoft:QLinearWhere": (common(0, 1, 4),),
    "com.microsoft:MulInteger": (common(0, 2),),
    "com.microsoft:BiasSplitGelu": (halved,),
    "com.microsoft:QLinearConcat": (joined,),
    **dict.fromkeys(("com.microsoft:QLinearReduceMean", "com.microsoft:ReduceSumInteger"), (reduced,)),
    "com.microsoft:IsAllFinite": (fixed(),),
    **{f"com.microsoft:{op}": (product(1),) for op in (
        "DynamicQuantizeMatMul", "FusedGemm", "FusedMatMul", "FusedMatMulActivation", "GemmFastGelu", "GemmFloat8",
        "MatMulInteger16", "MatMulIntegerToFloat", "SparseToDenseMatMul", "TransposeMatMul")},
    "com.microsoft:QGemm": (product(3),),
    "com.microsoft:QOrderedMatMul": (ordered_product,),
    **{f"com.microsoft:{op}": (columns("N"), like(0)) for op in ("MatMulNBits", "MatMulBnb4", "MatMulNBitsMlp")},
    "com.microsoft:MatMulNBitsQkv": (columns("Nq"), columns("Nkv"), columns("Nkv"), like(0)),
    "com.microsoft:MatMulFpQ4": (stated_columns,),
    **{f"com.microsoft:MatMulBlockQuantizedFp{bits}Weight": (columns_of(1, 0),) for bits in (4, 8)},
    "com.microsoft:CDist": (pairs,),
    **{f"com.microsoft:{op}": (windowed(1, True),) for op in ("NhwcConv", "NhwcFusedConv")},
    "com.microsoft:QLinearConv": (windowed(3),),
    "com.microsoft.nchwc:ReorderInput": (blocked,),
    "com.microsoft.nchwc:ReorderOutput": (unblocked,),
    "com.microsoft:ConvTransposeWithDynamicPads": (spread,),
    "com.microsoft:QLinearAveragePool": (windowed(None),),
    "com.microsoft:NhwcMaxPool": (windowed(None, True),),
    "com.microsoft:QLinearGlobalAveragePool": (pooled_away,),
    **dict.fromkeys(("CausalConvWithState", "com.microsoft:CausalConvWithState"), (like(0), causal_state)),
    "com.microsoft:VarlenCausalConvWithState": (like(0), like(4)),
    "com.microsoft:WordConvEmbedding": (words,),
    **{f"com.microsoft:{op}": (recurrent_sequence, recurrent_state, recurrent_state)
       for op in ("AttnLSTM", "DynamicQuantizeLSTM")},
    "com.microsoft:Attention": (attention, attention_cache),
    "com.microsoft:QAttention": (attention,),
    "com.microsoft:PackedAttention": (attention,),
    "com.microsoft:DecoderMaskedSelfAttention": (attention, attention_cache),
    "com.microsoft:QOrderedAttention": (columns_of(7, -1),),
    "com.microsoft:MultiHeadAttention": (
        projected("num_heads"), key_cache(1, 6, "num_heads"), key_cache(2, 7, "num_heads")),
    "com.microsoft:DecoderMaskedMultiHeadAttention": (
        projected("num_heads"), key_cache(1, 5, "num_heads"), key_cache(2, 6, "num_heads")),
    "com.microsoft:PackedMultiHeadAttention": (projected("num_heads"),),
    "com.microsoft:GroupQueryAttention": (projected("kv_num_heads"),),
    **{f"com.microsoft:{op}": (projected("kv_num_heads"), like(3), like(4)) for op in (
        "SparseAttention", "DynamicSparseAttention", "PagedAttention", "SparsePagedAttention")},
    **dict.fromkeys(("LinearAttention", "com.microsoft:LinearAttention"), (linear_attention, linear_state)),
    "com.microsoft:LinearAttentionGate": (like(0), like(3)),
    "com.microsoft:GatedDeltaNet": (delta_net, like(6)),
    "com.microsoft:EngramGate": (like(1), like(1)),
    "com.microsoft:GemmaRotaryEmbedding": (like(1), like(3)),
    "com.microsoft:GatedRelativePositionBias": (gated_bias,),
    "com.microsoft:RelativePositionBias": (position_bias,),
    "com.microsoft:NGramRepeatBlock": (like(1),),
    "com.microsoft:RestorePadding": (restored,),
    **{f"com.microsoft:{op}": (embedding, samples) for op in ("EmbedLayerNormalization", "QEmbedLayerNormalization")},
    "com.microsoft:TorchEmbedding": (looked_up,),
    "com.microsoft:GatherBlockQuantized": (gathered_blocks,),
    "com.microsoft:CropAndResize": (cropped,),
    "com.microsoft:ExpandDims": (expanded,),
    "com.microsoft:UnfoldTensor": (unfolded,),
    "com.microsoft:Rfft": (spectrum,),
    "com.microsoft:Irfft": (signal,),
    "ai.onnx.ml:LinearClassifier": (predictions, targets(_CLASSES)),
    "ai.onnx.ml:LinearRegressor": (targets(""),),
    "ai.onnx.ml:SVMClassifier": (predictions, targets(_CLASSES)),
    "ai.onnx.ml:SVMRegressor": (targets(""),),
    "ai.onnx.ml:TreeEnsembleClassifier": (predictions, targets(_CLASSES)),
    "ai.onnx.ml:TreeEnsembleRegressor": (targets(""),),
    "ai.onnx.ml:TreeEnsemble": (targets(""),),
    "ai.onnx.ml:ArrayFeatureExtractor": (picked,),
    "ai.onnx.ml:OneHotEncoder": (categories,),
    "ai.onnx.ml:FeatureVectorizer": (vector,),
}  # fmt: skip
