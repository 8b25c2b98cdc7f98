"""Operators of ONNX Runtime's own: their shapes are those it produces, and their products are counted."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from tests.models.exporter_graphs import F32, I64, Sketch, info
from tests.models.runtime_shapes import agree, inferred
from weft.models.onnx_import import import_onnx
from weft.models.onnx_import.walk import CONTROL
from weft.models.operators import OPERATORS
from weft.models.operators.rules import costs
from weft.models.packaged import PACKAGED, packaged_models

MS = "com.microsoft"
rng = np.random.default_rng(5)


def f(*shape: int) -> np.ndarray:
    return (rng.normal(size=shape) * 0.1).astype(np.float32)


def u8(*shape: int) -> np.ndarray:
    return rng.integers(0, 255, size=shape).astype(np.uint8)


def i64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def i32(value: object) -> np.ndarray:
    return np.array(value, np.int32)


S, Z = np.array(0.1, np.float32), np.array(3, np.uint8)
"""A scale and a zero point."""


class Op(NamedTuple):
    """An operator with the shape of its first input (a query) and its other inputs (constants, None where left out)."""

    kind: str
    x: tuple[int, ...]
    others: tuple[np.ndarray | None, ...] = ()
    macs: int = 0
    outputs: int = 1
    attributes: dict[str, object] = {}  # noqa: RUF012
    dtype: int = F32

    def model(self) -> onnx.ModelProto:
        sketch = Sketch(17)
        names = ["" if each is None else sketch.initial(each, each.dtype.type) for each in self.others]
        made = sketch.ops(self.kind, "x", *names, outputs=self.outputs, domain=MS, **self.attributes)
        outs = [helper.make_empty_tensor_value_info(name) for name in made]
        return sketch.model([info("x", self.dtype, self.x)], outs, domains=[(MS, 1)])


LSTM = (u8(2, 3, 16), u8(2, 4, 16), f(2, 32), None, None, None, None, f(2) ** 2, u8(2), f(2) ** 2, u8(2))

RUN = [
    Op("DynamicQuantizeLSTM", (5, 2, 3), LSTM, 5 * 2 * (3 + 4) * 16 * 2, 3,
       {"hidden_size": 4, "direction": "bidirectional"}),
    Op("DynamicQuantizeMatMul", (2, 5, 8), (u8(8, 6), S, Z, f(6)), 2 * 5 * 8 * 6),
    Op("MatMulIntegerToFloat", (2, 5, 8), (u8(8, 6), S, S, Z, Z, f(6)), 2 * 5 * 8 * 6, dtype=onnx.TensorProto.UINT8),
    Op("FusedMatMul", (2, 8, 5), (f(6, 8),), 2 * 5 * 8 * 6, attributes={"transA": 1, "transB": 1, "alpha": 0.5}),
    Op("FusedMatMul", (5, 2, 8), (f(2, 8, 6),), 2 * 5 * 8 * 6, attributes={"transBatchA": 1}),
    Op("TransposeMatMul", (2, 8, 5), (f(8, 6),), 2 * 5 * 8 * 6, attributes={"transA": 1}),
    Op("FusedGemm", (5, 8), (f(8, 6), f(6)), 5 * 8 * 6, attributes={"activation": "Relu"}),
    Op("FusedConv", (1, 3, 8, 8), (f(4, 3, 3, 3), f(4)), 64 * 27 * 4, attributes={"activation": "Relu", "pads": [1, 1,
       1, 1]}),
    Op("CDist", (5, 8), (f(6, 8),), 5 * 8 * 6, attributes={"metric": "sqeuclidean"}),
    Op("MatMulNBits", (2, 5, 32), (u8(6, 1, 16), f(6)), 2 * 5 * 32 * 6, attributes={"K": 32, "N": 6, "bits": 4,
       "block_size": 32}),
    Op("MatMulBnb4", (2, 5, 32), (u8(96), f(12)), 2 * 5 * 32 * 6, attributes={"K": 32, "N": 6, "block_size": 16,
       "quant_type": 1}),
    Op("QGemm", (5, 8), (S, Z, u8(8, 6), S, Z, None, S, Z), 5 * 8 * 6, dtype=onnx.TensorProto.UINT8),
    Op("Attention", (2, 5, 8), (f(8, 24), f(24)), 10 * 8 * 24 + 2 * 2 * 5 * 5 * 8, 2, {"num_heads": 2}),
    Op("MultiHeadAttention", (2, 5, 8), (f(2, 7, 8), f(2, 7, 12)), 2 * 5 * 7 * 8 + 2 * 5 * 7 * 12, 3, {"num_heads": 2}),
    Op("GroupQueryAttention", (1, 5, 64), (None, None, None, None, i32([4]), i32(5)), 2 * 5 * 5 * 32,
       attributes={"num_heads": 2, "kv_num_heads": 1}),
    Op("SkipLayerNormalization", (2, 5, 8), (f(2, 5, 8), f(8), f(8)), outputs=4),
    Op("SkipSimplifiedLayerNormalization", (2, 5, 8), (f(2, 5, 8), f(8)), outputs=1),
    Op("EmbedLayerNormalization", (2, 5), (i32(np.zeros((2, 5))), f(9, 8), f(6, 8), f(2, 8), f(8), f(8)), outputs=2,
       dtype=onnx.TensorProto.INT32),
    Op("GatherBlockQuantized", (9, 32), (i64(1, 2), f(9, 2)), attributes={"block_size": 32, "bits": 4},
       dtype=onnx.TensorProto.UINT8),
    Op("AttnLSTM", (5, 2, 3),
       (f(1, 16, 3 + 6), f(1, 16, 4), f(1, 32), None, None, None, None, f(1, 4, 7), f(1, 8, 7), f(1, 7), f(2, 10, 8),
       None,
        f(1, 8 + 4, 6)),
       10 * (9 + 4) * 16 + 20 * 8 * 7 + 10 * (4 * 7 + 10 * (7 + 8) + 12 * 6), 3, {"hidden_size": 4}),
    Op("QLinearMul", (2, 3), (S, Z, u8(4, 1, 3), S, Z, S, Z), dtype=onnx.TensorProto.UINT8),
    Op("QLinearWhere", (2, 1), (u8(1, 3), S, Z, u8(2, 3), S, Z, S, Z), dtype=onnx.TensorProto.BOOL),
    Op("BiasGelu", (2, 5, 8), (f(8),)),
    Op("FastGelu", (2, 5, 8), (f(8),)),
    Op("QuickGelu", (2, 5, 8)),
    Op("Gelu", (2, 5, 8)),
    Op("Inverse", (2, 3, 3)),
    Op("Trilu", (2, 3, 5)),
    Op("ExpandDims", (2, 3), (i32(-1),)),
    Op("UnfoldTensor", (2, 3, 9), attributes={"dim": 2, "size": 4, "step": 2}),
    Op("GridSample", (1, 2, 4, 5), (f(1, 3, 6, 2),)),
    Op("Pad", (2, 3), (i64(1, 0, 0, 2), np.array(0, np.float32))),
    Op("GatherND", (2, 3, 4), (np.array([[0, 1], [1, 2]], np.int64),)),
    Op("CropAndResize", (1, 2, 8, 8), (f(3, 4), i32([0, 0, 0]), i32([5, 6])), attributes={"mode": "bilinear"}),
    Op("MaxpoolWithMask", (1, 2, 8, 8), (i32(np.ones((1, 2, 8, 8))),), attributes={"kernel_shape": [2, 2],
       "strides": [2, 2]}),
    Op("MurmurHash3", (2, 3), dtype=onnx.TensorProto.INT32),
    Op("QLinearAdd", (2, 3), (S, Z, u8(3), S, Z, S, Z), dtype=onnx.TensorProto.UINT8),
    Op("QLinearSigmoid", (2, 3), (S, Z, S, Z), dtype=onnx.TensorProto.UINT8),
    Op("QLinearLeakyRelu", (2, 3), (S, Z, S, Z), dtype=onnx.TensorProto.UINT8),
    Op("QLinearGlobalAveragePool", (1, 4, 5, 3), (S, Z, S, Z), attributes={"channels_last": 1},
       dtype=onnx.TensorProto.UINT8),
    Op("QLinearAveragePool", (1, 3, 8, 9), (S, Z, S, Z), attributes={"kernel_shape": [3, 3], "strides": [2, 2],
       "pads": [0, 0, 1, 1], "ceil_mode": 1}, dtype=onnx.TensorProto.UINT8),
    Op("QLinearConv", (1, 8, 9, 3), (S, Z, u8(4, 3, 3, 3), S, Z, S, Z), 4 * 7 * 27 * 4,
       attributes={"channels_last": 1, "kernel_shape": [3, 3], "strides": [2, 1], "pads": [0, 0, 1, 0]},
       dtype=onnx.TensorProto.UINT8),
    Op("NhwcMaxPool", (1, 8, 9, 3), attributes={"kernel_shape": [2, 2], "strides": [2, 2]},
       dtype=onnx.TensorProto.UINT8),
    Op("QLinearSoftmax", (2, 3), (S, Z, S, Z), attributes={"axis": -1, "opset": 13}, dtype=onnx.TensorProto.UINT8),
    Op("RotaryEmbedding", (2, 5, 8), (np.zeros((1,), np.int64), f(6, 2), f(6, 2)), attributes={"num_heads": 2,
       "rotary_embedding_dim": 0}),
    Op("NGramRepeatBlock", (2, 5), (f(2, 9),), attributes={"ngram_size": 3}, dtype=I64),
    Op("MoE", (2, 5, 8), (f(10, 3), f(3, 6, 8), f(3, 6), f(3, 8, 6), f(3, 8)), 10 * 2 * 2 * 8 * 6, attributes={"k": 2,
       "activation_type": "relu"}),
    Op("WordConvEmbedding", (3, 7), (f(4, 1, 2, 5), f(4), f(9, 5)), 3 * 6 * 10 * 4, dtype=onnx.TensorProto.INT32),
    Op("QuantizeLinear", (2, 3), (S, Z)),
    Op("LinearAttention", (2, 5, 8), (f(2, 5, 8), f(2, 5, 12)), 2 * 2 * 5 * 4 * 6 * 2, 2, {"q_num_heads": 2,
       "kv_num_heads": 2, "update_rule": "linear"}),
    Op("CausalConvWithState", (2, 6, 9), (f(6, 1, 3), f(6)), 2 * 6 * 9 * 3, 2),
]  # fmt: skip
"""Operators that ONNX Runtime has code for on a processor."""


@pytest.mark.parametrize("op", [pytest.param(each, id=f"{each.kind}-{place}") for place, each in enumerate(RUN)])
def test_shapes_are_those_of_onnx_runtime_and_products_are_counted(op):
    assert agree(op.model(), {}) == []
    assert import_onnx(op.model()).macs == op.macs


TOKENS = i32(np.zeros((2, 5)))
"""Where the tokens of 2 sequences of up to 5 lie."""

ELSEWHERE = [
    (Op("MultiHeadAttention", (2, 5, 2, 3, 4), (), 2 * 2 * 5 * 5 * 8, 1, {"num_heads": 2}), (2, 5, 8)),
    (Op("MultiHeadAttention", (2, 5, 8), (f(2, 7, 2, 2, 4),), 2 * 2 * 5 * 7 * 8, 1, {"num_heads": 2}), (2, 5, 8)),
    (Op("DecoderMaskedMultiHeadAttention", (2, 1, 8), (f(2, 1, 8), f(2, 1, 8), None, None, f(2, 2, 6, 4), f(2, 2, 6,
           4)),
        2 * 2 * 7 * 8, attributes={"num_heads": 2}), (2, 1, 8)),
    (Op("DecoderMaskedSelfAttention", (2, 1, 8), (f(8, 24), f(24), None, f(2, 2, 2, 6, 4)), 2 * 8 * 24 + 2 * 2 * 7 * 8,
        attributes={"num_heads": 2}), (2, 1, 8)),
    (Op("DecoderAttention", (5, 2, 8), (f(7, 2, 8), f(8, 8), f(8, 16), f(24), None, None, None, np.array(True),
        np.array(False), np.array(False), np.array(False)), 10 * 8 * 8 + 14 * 8 * 16 + 2 * 2 * 5 * 7 * 8,
        attributes={"num_heads": 2}), (5, 2, 8)),
    (Op("PackedAttention", (8, 6), (f(6, 24), f(24), TOKENS, i32([0, 5, 8])), 8 * 6 * 24 + 2 * 2 * 5 * 5 * 8,
        attributes={"num_heads": 2}), (8, 8)),
    (Op("PackedMultiHeadAttention", (8, 8), (f(8, 8), f(8, 8), None, TOKENS, i32([0, 5, 8])), 2 * 2 * 5 * 5 * 8,
        attributes={"num_heads": 2}), (8, 8)),
    (Op("LongformerAttention", (1, 16, 8), (f(8, 24), f(24), f(1, 16), f(8, 24), f(24), i32(np.zeros((1, 16)))),
        2 * 16 * 8 * 24 + 2 * 16 * 5 * 8, attributes={"num_heads": 2, "window": 2}), (1, 16, 8)),
    (Op("QOrderedAttention", (1, 5, 8), (S, S, S, S, f(8, 8), f(8, 8), f(8, 8)), 3 * 5 * 8 * 8 + 2 * 5 * 5 * 8,
        attributes={"num_heads": 2}), (1, 5, 8)),
    (Op("PagedAttention", (3, 8), (f(3, 8), f(3, 8), f(9, 16, 2, 4), f(9, 16, 2, 4), i32([0, 3]), i32([7]), i32([[0,
           1]])),
        2 * 3 * 32 * 8, attributes={"num_heads": 2, "kv_num_heads": 2}), (3, 8)),
    (Op("SparsePagedAttention", (3, 16), (None, None, f(9, 16, 2, 4), f(9, 16, 2, 4), i32([0, 3]), i32([7]), i32([[0,
           1]]),
        None, i32(np.zeros((3, 6)))), 2 * 3 * 6 * 8, attributes={"num_heads": 2, "kv_num_heads": 1}), (3, 8)),
    (Op("DynamicSparseAttention", (1, 3, 8), (f(1, 3, 8), f(1, 3, 8), None, None, None, None, i32(np.zeros((3, 6)))),
        2 * 3 * 6 * 8, attributes={"num_heads": 2, "kv_num_heads": 2}), (1, 3, 8)),
    (Op("GatedDeltaNet", (5, 2, 4), (f(5, 2, 4), f(5, 2, 6)), 5 * 2 * 3 * 4 * 6), (5, 2, 6)),
    (Op("GatedRelativePositionBias", (2, 5, 8), (f(8), f(1, 2, 5, 5), f(4, 8), f(8), f(1, 2, 1, 1)), 2 * 5 * 2 * 4 * 8,
        attributes={"num_heads": 2}), (2, 2, 5, 5)),
    (Op("QMoE", (2, 5, 8), (f(10, 3), u8(3, 6, 4), f(3, 6), None, u8(3, 8, 3), f(3, 8)), 10 * 2 * 8 * 6,
        attributes={"k": 1, "expert_weight_bits": 4}), (2, 5, 8)),
    (Op("MatMulNBitsMlp", (5, 32), (None, None, u8(6, 1, 16), f(6), None, u8(6, 1, 16), f(6)), 5 * 32 * 12,
        attributes={"K": 32, "N": 6, "bits": 4}), (5, 6)),
    (Op("MatMulNBitsQkv", (5, 32), (None, f(32), u8(6, 1, 16), f(6), None, u8(2, 1, 16), f(2), None, u8(2, 1, 16),
           f(2)),
        5 * 32 * 10, 3, {"K": 32, "Nq": 6, "Nkv": 2, "bits": 4}), (5, 6)),
    (Op("MatMulBlockQuantizedFp4Weight", (5, 32), (u8(6, 16), u8(6, 2), S), 5 * 32 * 6), (5, 6)),
    (Op("MatMulBlockQuantizedFp8Weight", (5, 32), (u8(6, 32), f(6, 1)), 5 * 32 * 6), (5, 6)),
    (Op("MatMulFpQ4", (5, 32), (u8(120), i64(32, 6)), 5 * 32 * 6), (5, 6)),
    (Op("QOrderedMatMul", (1, 5, 8), (S, f(6, 8), S, S), 5 * 8 * 6), (1, 5, 6)),
    (Op("GemmFastGelu", (5, 8), (f(8, 6), f(6)), 5 * 8 * 6), (5, 6)),
    (Op("GemmFloat8", (8, 5), (f(6, 8),), 5 * 8 * 6, attributes={"transA": 1, "transB": 1}), (5, 6)),
    (Op("NhwcConv", (1, 8, 9, 3), (f(4, 3, 3, 3),), 6 * 7 * 27 * 4), (1, 6, 7, 4)),
    (Op("ConvTransposeWithDynamicPads", (1, 3, 5, 5), (f(3, 4, 3, 3), i64(1, 1, 1, 1)), 25 * 3 * 36,
        attributes={"strides": [2, 2]}), (1, 4, 9, 9)),
    (Op("VarlenCausalConvWithState", (7, 6), (f(6, 1, 3), i32([0, 7]), None, f(1, 6, 2)), 7 * 6 * 3, 2), (7, 6)),
]  # fmt: skip
"""Operators that need another device: with the shape of the first output, by their documentation."""


@pytest.mark.parametrize(
    ("op", "shape"), [pytest.param(*each, id=f"{each[0].kind}-{place}") for place, each in enumerate(ELSEWHERE)]
)
def test_operators_for_other_devices_are_counted(op, shape):
    model = op.model()
    tensors, guesses = inferred(model)
    assert (tensors[model.graph.output[0].name].shape, guesses) == (shape, [])
    assert import_onnx(model).macs == op.macs


def test_a_token_reads_the_weights_of_the_experts_it_meets():
    experts = Op("MoE", (1, 8), (f(1, 4), f(4, 6, 8), None, f(4, 8, 6)), attributes={"k": 2})
    model = import_onnx(experts.model())
    assert (model.weights, model.parameters) == (2 * 2 * 48, 4 * 2 * 48)


@pytest.mark.parametrize("name", ["light-squeezenet", "pp-ocr-cls", "pp-ocr-rec", "silero-vad"])
def test_a_model_saved_by_onnx_runtime_counts_what_it_did_before(tmp_path, name):
    """Fused by ONNX Runtime into operators of its own, which it writes into models of any opset."""
    source, shapes = packaged_models()[name], PACKAGED[name].shapes
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "saved.onnx")
    options.log_severity_level = 4
    ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    saved = import_onnx(tmp_path / "saved.onnx", shapes=shapes)
    assert (saved.macs, saved.guesses, saved.unknown_ops) == (import_onnx(source, shapes=shapes).macs, (), ())


UNCOUNTED = {
    # Whole programs in an operator: generation with its decoder as an attribute, compiled code of one device.
    "com.microsoft": "BeamSearch GreedySearch Sampling WhisperBeamSearch EPContext Snpe "
    # Work that is no product, and selection whose work depends on data.
    "BifurcationDetector DynamicTimeWarping Inverse Irfft Rfft Tokenizer PackedSparseAttentionIndexer "
    "SparseAttentionIndexer",
    # Fourier transforms, texts, images; plugins of TensorRT and leftovers of the first year of ONNX.
    "": "DFT Det ImageDecoder RegexFullMatch STFT SequenceMap StringConcat StringNormalizer StringSplit "
    "TfIdfVectorizer DisentangledAttention_TRT EfficientNMS_TRT GRUUnit GivenTensorFill MultilevelCropAndResize_TRT "
    "PyramidROIAlign_TRT",
}
"""Operators without arithmetic of ours: a model with one of them says so when it is read."""
LISTED = (1, 31)
"""The ONNX Runtime whose operators were gone through; what a later one adds is unknown and named, and no failure."""


@pytest.mark.parametrize("domain", ["", MS, "ai.onnx.ml", "com.microsoft.nchwc"])
def test_every_operator_that_onnx_runtime_lists_is_counted_or_known_not_to_be(domain):
    listed = {schema.name for schema in get_all_operator_schema() if schema.domain == domain}
    counted = [each.name for each in OPERATORS.values() if each.cost is not costs.unknown]
    known = {op.removeprefix(f"{domain}:") for op in (*counted, *CONTROL)}
    forgotten = listed - known - set(UNCOUNTED.get(domain, "").split())
    assert not forgotten or tuple(map(int, ort.__version__.split(".")[:2])) > LISTED, forgotten
