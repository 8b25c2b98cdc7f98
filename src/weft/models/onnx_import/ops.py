"""Which operator is counted how: one table from operator name to the function that makes its layers.

An operator that is missing here becomes a layer of kind ``unknown`` that costs its activation traffic.
To teach weft an operator, add one line.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from weft.models.onnx_import import attention, contrib, products
from weft.models.onnx_import.drafts import ImportedNode, LayerDraft, draft
from weft.models.onnx_import.infer import VIEWS, names
from weft.models.onnx_import.tensors import INTEGERS

ACTIVATIONS = names(
    """
    Relu Clip LeakyRelu Sigmoid HardSwish HardSigmoid Tanh Gelu Elu PRelu Mish Selu Celu Softplus Softsign
    ThresholdedRelu Swish Erf com.microsoft:Gelu com.microsoft:FastGelu com.microsoft:QuickGelu
    com.microsoft:BiasGelu com.microsoft:QLinearSigmoid com.microsoft:QLinearLeakyRelu com.microsoft:ScaledSiLU
    com.microsoft:QOrderedGelu ParametricSoftplus ScaledTanh
    """
)
"""Functions of one value each: free where a multiplication writes its result."""

ARITHMETIC = names("Add Sub Mul Div Sum Pow Sqrt Exp Log Neg Abs Min Max Reciprocal Cast")
"""What biases, scales and spelled-out activations are made of."""

_ELEMENTWISE = names(
    """
    Acos Acosh And ArgMax ArgMin Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor
    Ceil Cos Cosh CumProd CumSum DynamicQuantizeLinear Equal Floor Greater GreaterOrEqual Hardmax IsInf
    IsNaN Less LessOrEqual LogSoftmax Mean Mod Not Or ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp
    ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare RotaryEmbedding Round Shrink Sign
    Sin Sinh Softmax SwiGLU Tan Where Xor Bernoulli NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss
    com.microsoft:QLinearAdd com.microsoft:QLinearMul com.microsoft:QLinearSoftmax
    com.microsoft:QLinearReduceMean com.microsoft:RotaryEmbedding com.microsoft:BiasSplitGelu
    com.microsoft:BiasAdd com.microsoft:BiasSoftmax com.microsoft:DynamicQuantizeLinear com.microsoft:BiasDropout
    com.microsoft:BitmaskBiasDropout com.microsoft:ComplexMul com.microsoft:ComplexMulConj com.microsoft:EngramGate
    com.microsoft:GatedAdd com.microsoft:GemmaRotaryEmbedding com.microsoft:HyperConnectionPostMix
    com.microsoft:HyperConnectionPreMix com.microsoft:IsAllFinite com.microsoft:LinearAttentionGate
    com.microsoft:MRotaryEmbedding com.microsoft:MulInteger com.microsoft:MurmurHash3 com.microsoft:NGramHashMapping
    com.microsoft:QLinearWhere com.microsoft:ReduceSumInteger com.microsoft:VarlenNGramHashMapping
    com.microsoft:SampleOp Affine ImageScaler Scale ai.onnx.ml:Binarizer ai.onnx.ml:Imputer ai.onnx.ml:LabelEncoder
    ai.onnx.ml:CategoryMapper ai.onnx.ml:Scaler
    """
)

_NORM = names(
    """
    BatchNormalization InstanceNormalization LayerNormalization GroupNormalization RMSNormalization
    LpNormalization MeanVarianceNormalization LRN SimplifiedLayerNormalization SkipLayerNormalization
    com.microsoft:SkipLayerNormalization com.microsoft:SkipSimplifiedLayerNormalization
    com.microsoft:GroupNorm com.microsoft:SkipGroupNorm com.microsoft:LayerNormalization
    com.microsoft:BranchwiseRMSNorm com.microsoft:GatedRMSNorm com.microsoft:QOrderedLayerNormalization
    ai.onnx.ml:Normalizer
    """
)

_POOL = names(
    """
    MaxPool AveragePool LpPool GlobalMaxPool GlobalAveragePool GlobalLpPool MaxRoiPool RoiAlign MaxUnpool
    com.microsoft:QLinearGlobalAveragePool com.microsoft:QLinearAveragePool com.microsoft:NhwcMaxPool
    com.microsoft:MaxpoolWithMask com.microsoft.nchwc:MaxPool com.microsoft.nchwc:AveragePool
    com.microsoft.nchwc:GlobalMaxPool com.microsoft.nchwc:GlobalAveragePool
    """
)

_MOVEMENT = names(
    """
    Transpose Concat Pad Resize Upsample CastLike BitCast Expand Tile DepthToSpace SpaceToDepth Scatter
    ScatterElements ScatterND TensorScatter ReverseSequence OneHot NonZero Unique TopK NonMaxSuppression
    GridSample AffineGrid Col2Im ConstantOfShape EyeLike Range Trilu CenterCropPad ConcatFromSequence
    RandomNormal RandomNormalLike RandomUniform RandomUniformLike Multinomial SplitToSequence
    BlackmanWindow HammingWindow HannWindow MelWeightMatrix Crop
    com.microsoft:QLinearConcat com.microsoft:CropAndResize com.microsoft:GridSample com.microsoft:NGramRepeatBlock
    com.microsoft:Pad com.microsoft:Range com.microsoft:RelativePositionBias com.microsoft:RemovePadding
    com.microsoft:RestorePadding com.microsoft:Trilu com.microsoft:UnfoldTensor com.microsoft:Unique
    com.microsoft:QuantizeBFP com.microsoft:DequantizeBFP com.microsoft.nchwc:ReorderInput
    com.microsoft.nchwc:ReorderOutput com.microsoft.nchwc:Upsample ai.onnx.ml:OneHotEncoder
    ai.onnx.ml:FeatureVectorizer ai.onnx.ml:DictVectorizer
    """
)

_SELECTION = names(
    "Slice Split Compress GatherND GatherElements DynamicSlice com.microsoft:GatherND ai.onnx.ml:ArrayFeatureExtractor"
)

_PRODUCTS = names(
    """
    Gemm com.microsoft:FusedGemm com.microsoft:FusedMatMul com.microsoft:FusedMatMulActivation
    com.microsoft:GemmFastGelu com.microsoft:GemmFloat8 com.microsoft:SparseToDenseMatMul com.microsoft:TransposeMatMul
    """
)

_FREE = names(
    """
    Constant Shape Size SequenceConstruct SequenceEmpty SequenceInsert SequenceErase SequenceLength
    OptionalHasElement ai.onnx.ml:ZipMap ai.onnx.ml:CastMap
    """
)


def count(node: ImportedNode) -> list[LayerDraft]:
    """The layers of *node*; none where it costs nothing."""
    return COUNTERS.get(node.op, partial(plain, kind="unknown"))(node)


def plain(node: ImportedNode, kind: str) -> list[LayerDraft]:
    """One layer that costs its activation traffic."""
    return [draft(node, kind)]


def _activation(node: ImportedNode) -> list[LayerDraft]:
    # A slope is learned even when all channels share a single one.
    return [draft(node, "elementwise", trained=node.inputs[1:] if node.op == "PRelu" else ())]


def _norm(node: ImportedNode) -> list[LayerDraft]:
    return [draft(node, "norm", trained=node.inputs[1:])]


def _movement(node: ImportedNode, read: int | None = None) -> list[LayerDraft]:
    # A cast to the same type, a slice of everything: nothing moves.
    idle = node.outputs[0].view_of is not None
    return [] if idle else [draft(node, "movement", input_elements=read)]


def _selection(node: ImportedNode) -> list[LayerDraft]:
    """The layer of an operator that reads only what it selects."""
    return _movement(node, node.output_elements)


def _gather(node: ImportedNode) -> list[LayerDraft]:
    """A lookup where the table is constant and learned, else a selection."""
    table = products.need(node, 0)
    if not table.constant or len(table.shape) < 2 or table.dtype in INTEGERS:
        return _selection(node)
    looked_up = node.output_elements
    return [draft(node, "embedding", weight=table, trained=(table,), lookups=looked_up)]


def _embed_norm(node: ImportedNode) -> list[LayerDraft]:
    """Word, position and segment tables at once, then a norm."""
    tables = [table for table in node.inputs[2:5] if table is not None]
    looked_up = node.outputs[0].elements * len(tables)
    word = tables[0] if tables else None
    return [draft(node, "embedding", weight=word, trained=node.inputs[2:7], lookups=looked_up)]


Counter = Callable[[ImportedNode], list[LayerDraft]]

COUNTERS: dict[str, Counter] = {
    **dict.fromkeys(_ELEMENTWISE | ARITHMETIC, partial(plain, kind="elementwise")),
    **dict.fromkeys(ACTIVATIONS, _activation),
    **dict.fromkeys(_NORM, _norm),
    **dict.fromkeys(_POOL, partial(plain, kind="pool")),
    **dict.fromkeys(_MOVEMENT, _movement),
    **dict.fromkeys(_SELECTION, _selection),
    **dict.fromkeys(_FREE | VIEWS, lambda node: []),
    "Cast": _movement,
    "Gather": _gather,
    "Conv": products.conv,
    "ConvInteger": products.conv_integer,
    "ConvTranspose": products.conv_transpose,
    "DeformConv": partial(products.conv, bias=3),
    "QLinearConv": partial(products.conv, w=3, bias=8),
    "MatMul": products.matmul,
    "MatMulInteger": products.matmul,
    "QLinearMatMul": partial(products.matmul, b=3),
    "Einsum": products.einsum,
    "LSTM": partial(products.recurrent, gates=4),
    "GRU": partial(products.recurrent, gates=3),
    "RNN": partial(products.recurrent, gates=1),
    "Attention": partial(attention.projected, past=4, q_heads="q_num_heads"),
    "com.microsoft:Attention": attention.attention,
    "com.microsoft:QAttention": partial(attention.attention, past=8),
    "com.microsoft:MultiHeadAttention": partial(attention.projected, past=6, kv_heads="num_heads"),
    # SparseAttention counts as if its mask were dense.
    **dict.fromkeys(
        ("com.microsoft:GroupQueryAttention", "com.microsoft:SparseAttention"), partial(attention.projected, past=3)
    ),
    "com.microsoft:EmbedLayerNormalization": _embed_norm,
    "com.microsoft:FusedConv": products.conv,
    **dict.fromkeys(_PRODUCTS, products.gemm),
    "com.microsoft:QGemm": partial(products.gemm, b=3, c=6),
    "com.microsoft:DynamicQuantizeMatMul": partial(products.gemm, c=4),
    "com.microsoft:MatMulInteger16": products.matmul,
    "com.microsoft:MatMulIntegerToFloat": partial(products.gemm, c=6),
    "com.microsoft:QOrderedMatMul": products.ordered_matmul,
    "com.microsoft:CDist": products.distances,
    "com.microsoft:MatMulNBits": contrib.matmul_nbits,
    "com.microsoft:MatMulBnb4": contrib.matmul_bnb4,
    "com.microsoft:MatMulFpQ4": contrib.matmul_fpq4,
    "com.microsoft:MatMulBlockQuantizedFp4Weight": partial(contrib.matmul_floats, bits=4),
    "com.microsoft:MatMulBlockQuantizedFp8Weight": partial(contrib.matmul_floats, bits=8),
    "com.microsoft:MatMulNBitsMlp": contrib.nbits_mlp,
    "com.microsoft:MatMulNBitsQkv": contrib.nbits_qkv,
    "com.microsoft:MoE": contrib.moe,
    "com.microsoft:QMoE": contrib.q_moe,
    "com.microsoft:DynamicQuantizeLSTM": partial(products.recurrent, gates=4, inner=1),
    "com.microsoft:AttnLSTM": contrib.attn_lstm,
    "com.microsoft:ConvTransposeWithDynamicPads": partial(products.conv_transpose, bias=3),
    **dict.fromkeys(("com.microsoft:NhwcConv", "com.microsoft:NhwcFusedConv"), partial(products.conv, channels=-1)),
    "com.microsoft:QLinearConv": contrib.qlinear_conv,
    "com.microsoft.nchwc:Conv": products.conv,
    "CausalConvWithState": contrib.causal_conv,
    "com.microsoft:CausalConvWithState": contrib.causal_conv,
    "com.microsoft:VarlenCausalConvWithState": partial(contrib.causal_conv, bias=3),
    "com.microsoft:WordConvEmbedding": contrib.word_conv,
    "com.microsoft:GatedRelativePositionBias": contrib.gated_position_bias,
    "com.microsoft:DecoderAttention": attention.decoder_attention,
    "com.microsoft:DecoderMaskedMultiHeadAttention": partial(attention.projected, past=5, kv_heads="num_heads"),
    "com.microsoft:DecoderMaskedSelfAttention": attention.attention,
    "com.microsoft:DynamicSparseAttention": attention.dynamic_sparse_attention,
    "LinearAttention": attention.linear_attention,
    "com.microsoft:LinearAttention": attention.linear_attention,
    "com.microsoft:GatedDeltaNet": attention.gated_delta_net,
    "com.microsoft:LongformerAttention": attention.longformer_attention,
    "com.microsoft:PackedAttention": attention.packed_attention,
    "com.microsoft:PackedMultiHeadAttention": attention.packed_multi_head_attention,
    "com.microsoft:PagedAttention": attention.paged_attention,
    "com.microsoft:QOrderedAttention": attention.ordered_attention,
    "com.microsoft:QOrderedLongformerAttention": partial(attention.longformer_attention, weight=2, everywhere=8),
    "com.microsoft:SparsePagedAttention": attention.sparse_paged_attention,
    "com.microsoft:QEmbedLayerNormalization": _embed_norm,
    "com.microsoft:TorchEmbedding": _gather,
    "com.microsoft:GatherBlockQuantized": _gather,
    "ai.onnx.ml:LinearClassifier": contrib.linear,
    "ai.onnx.ml:LinearRegressor": contrib.linear,
    "ai.onnx.ml:SVMClassifier": contrib.support_vectors,
    "ai.onnx.ml:SVMRegressor": contrib.support_vectors,
    "ai.onnx.ml:TreeEnsemble": contrib.trees,
    "ai.onnx.ml:TreeEnsembleClassifier": contrib.trees,
    "ai.onnx.ml:TreeEnsembleRegressor": contrib.trees,
}
