"""Operators that compute with several rows of a batch are found in the graph, whatever made-up samples show.

Every class of operators has nodes that mix rows and nodes that keep them apart, and what is said of them is compared
with what ONNX Runtime does when single rows change.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper, parser

from tests.runtime.special_models import MOODS, SPECIAL, Special, drawn, graph, ints, whole
from weft.errors import ModelError
from weft.runtime.onnxruntime_cpu.node_times import Tracer
from weft.runtime.onnxruntime_cpu.preparing import LoadOptions, prepare
from weft.runtime.onnxruntime_cpu.sessions import open_session
from weft.runtime.owners import Mixed, collapsed, joined, numbered, shrunk
from weft.runtime.row_rules import LOTS, RULES, WHOLE
from weft.runtime.rows import METADATA_KEY, Seen, judged
from weft.runtime.tensors import TensorSpec

ROWS = 3

WEIGHTS: dict[str, Any] = {
    "w": drawn(4, 4), "v": drawn(4, seed=1), "c3": drawn(3, seed=2), "k": drawn(6, 3, 2, seed=3), "k8": whole(6, 3, 2),
    "d": drawn(3, 2, 2), "zero": ints(0), "one": ints(1), "two": ints(2), "three": ints(3), "both": ints(1, 2),
    "flat": ints(-1, 4), "fours": ints(-1, 4, 3), "across": ints(3, -1, 4), "ones": np.ones(3, np.float32),
    "scalar0": np.array(0), "scalar1": np.array(1), "last": ints(-1), "far": ints(-(2**40)),
    "pads0": ints(1, 0, 0, 0, 0, 0), "pads2": ints(0, 0, 1, 0, 0, 1), "q": whole(4, 4), "s": np.float32(0.1),
    "z": np.uint8(9), "z8": np.int8(0), "onoff": np.array([0, 1], np.float32), "yes": np.array([True, False, True]),
    "half": np.float32(0.5), "on": np.array(True), "off": np.array(False), "up": np.array([1, 1, 2], np.float32),
    "up0": np.array([2, 1, 1], np.float32), "lw": drawn(1, 8, 4), "lr": drawn(1, 8, 2, seed=4), "gw": drawn(1, 6, 4),
    "gr": drawn(1, 6, 2, seed=4), "rw": drawn(1, 2, 4), "rr": drawn(1, 2, 2), "idx": ints(1, 0), "corner": ints(0)[None],
    "put": drawn(1, 3, 4), "lens": ints(2, 1, 2), "aw": drawn(4, 12), "ab": drawn(12), "twice": ints(2, 1, 1),
    "signal": ints(-1, 12, 1), "step": np.array(2), "long": np.array(4), "sizes0": ints(1, 2), "ends": ints(-1),
    "grown": ints(1, 3, 4), "boxes": ints(-1, 1, 3), "most": ints(2), "filled": drawn(1), "c4": drawn(3, 1), "nil": np.float32(0), "w3": drawn(3, 4, seed=5), "lens3": ints(2, 1, 2),
    "put3": drawn(3, 4, seed=6), "grown0": ints(-1, 2, 4), "zero0": np.array(0),
    "k4": drawn(6, 3, 1, 1), "picture": ints(1, 6), "block": ints(1, 3), "even": ints(0, 0, 1, 0, 0, 0, 0, 0),
    "grid": ints(1, 2, 2), "wide": ints(1, 3), "turn": drawn(3, 2), "after": np.array(True),
}  # fmt: skip


def model(text: str, version: int = 18) -> ModelProto:
    """From ``x`` (samples by 3 by 4), ``i`` (samples by 1, of 0 to 2) and ``b`` (samples, bool) to ``y``."""
    made = graph(f"(float[n,3,4] x, int64[n,1] i, bool[n] b) => (float y) {{ {text} }}", version, **WEIGHTS)
    made.graph.output[0].ClearField("type")
    read = {name for node in made.graph.node for name in node.input}
    for kept in (made.graph.input, made.graph.initializer):
        left = [each for each in kept if each.name in read]
        del kept[:]
        kept.extend(left)
    return made


def row(made: ModelProto, mood: str, seed: int) -> dict[str, np.ndarray]:
    special, kinds = Special("", lambda: made, whole=(0, 3)), {1: "FP32", 7: "INT64", 9: "BOOL"}
    tensors = [(each.name, each.type.tensor_type) for each in made.graph.input]
    inputs = [
        TensorSpec(name, kinds[kind.elem_type], tuple(each.dim_value for each in kind.shape.dim))
        for name, kind in tensors
    ]
    return special.rows(inputs, 1, mood, np.random.default_rng(seed))


def batch(rows: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([each[name] for each in rows]) for name in rows[0]}


def verdict(made: ModelProto, folder: Path) -> str | None:
    """What is said of the operators of a graph; where the rows of its output are is another matter."""
    rows = [row(made, "plain", seed) for seed in range(ROWS)]
    said = judged(made, [batch(rows[:2]), batch(rows)], Tracer(folder, 1)).mixing
    return None if said and said.startswith("output ") else said


def really_mixes(made: ModelProto) -> bool:
    """Whether some element of the output is seen to change with one row and with another, or its shape with any."""
    session = open_session(made.SerializeToString(), 1, optimise=False)
    rows = [row(made, "plain", seed) for seed in range(ROWS)]
    try:
        base = session.run(["y"], batch(rows))[0]
        changed = [list(_changes(made, session, rows, place, base)) for place in range(ROWS)]
    except Exception:  # it does not take what some neighbour sends
        return True
    if any(each is None for found in changed for each in found):
        return True
    by_row = [np.any([each for each in found if each is not None], axis=0).astype(int) for found in changed]
    return bool(np.any(sum(by_row) > 1))


def _changes(made: ModelProto, session: Any, rows: Any, place: int, base: np.ndarray) -> Iterator[np.ndarray | None]:
    for mood in MOODS:
        others = [*rows[:place], row(made, mood, 77), *rows[place + 1 :]]
        found = session.run(["y"], batch(others))[0]
        if found.shape != base.shape:
            yield None
            return
        nothing = (base != base) & (found != found)
        yield (base != found) & ~nothing


MIXES = (
    # whole tensors, and lots
    "y, s1, z1 = DynamicQuantizeLinear(x)", "f = Reshape(x, flat) y = com.microsoft.DynamicQuantizeMatMul(f, q, filled)",
    "y = NonZero(x)", "y = Unique(x)", "y = Compress(x, b)", "y = Compress<axis = 0>(x, b)",
    "p = ReduceMax<keepdims = 0>(x, two) c = Reshape(p, boxes) y = NonMaxSuppression(x, c, most)",
    "y = RandomNormalLike(x)", "y = RandomUniformLike(x)", "c = Sigmoid(x) y = Bernoulli(c)",
    "y = Dropout(x, half, on)",
    # all along the axis of the samples
    "y = ReduceMax(x)", "y = ReduceMax(x, zero)", "y = ReduceSum<keepdims = 0>(x, zero)", "y = ReduceL2(x)",
    "y = ArgMax(x)", "y = Softmax<axis = 0>(x)", "y = LogSoftmax<axis = -3>(x)", "y = Hardmax<axis = 0>(x)",
    "y, p = TopK<axis = 0>(x, one)", "y = CumSum(x, scalar0)", "y = LpNormalization<axis = 0>(x)",
    "u = Unsqueeze(x, last) y = MeanVarianceNormalization(u)",
    "y, m, e = BatchNormalization<training_mode = 1>(x, ones, c3, c3, ones)",
    "t = Transpose<perm = [2,1,0]>(x) y = InstanceNormalization(t, ones, c3)",
    "t = Transpose<perm = [2,1,0]>(x) y = AveragePool<kernel_shape = [2]>(t)",
    "t = Transpose<perm = [2,1,0]>(x) y = MaxPool<kernel_shape = [2]>(t)",
    "t = Transpose<perm = [2,1,0]>(x) y = GlobalAveragePool(t)",
    "t = Transpose<perm = [2,1,0]>(x) y = GlobalMaxPool(t)",
    # products and convolutions
    'y = Einsum<equation = "nab,ncb->abc">(x, x)', 'y = Einsum<equation = "nab,mab->nm">(x, x)',
    "t = Transpose<perm = [2,1,0]>(x) y = MatMul(t, x)", "f = Flatten(x) y = Gemm<transA = 1>(f, f)",
    "f = Flatten(x) y = Gemm<transB = 1>(f, f)", "f = Flatten(x) t = Transpose(f) y = com.microsoft.FusedMatMul(f, t)",
    "t = Transpose<perm = [2,1,0]>(x) y = Conv(t, k)", "t = Transpose<perm = [2,1,0]>(x) y = ConvTranspose(t, d)",
    # over time
    "y, h = RNN<hidden_size = 2>(x, rw, rr)", "y, h, c = LSTM<hidden_size = 2>(x, lw, lr)",
    "y, h = GRU<hidden_size = 2>(x, gw, gr)",
    # picking and putting
    "f = Flatten(i) c = Mod(f, two) y = Gather(x, c)", "c = Mod(i, two) y = GatherND(x, c)",
    "f = Flatten(x) c = Mod(i, two) y = GatherElements<axis = 0>(f, c)",
    "f = Flatten(x) u = Slice(f, zero, one, one) c = Mod(i, two) "
    "y = ScatterElements<axis = 0, reduction = \"add\">(f, c, u)",
    # elements that were moved to others
    "r = Slice(x, last, far, zero, last) y = Sub(x, r)", "p = Reshape(x, across) y = ReduceMax(p, zero)",
    "t = Transpose<perm = [1,0,2]>(x) p = Reshape(t, flat) c = Reshape(p, grown0) y = ReduceMax(c, one)",
)  # fmt: skip

KEEPS = (
    # element by element
    "y = Relu(x)", "y = Add(x, c4)", "y = Mul(x, x)", "y = Clip(x, nil, half)", "g = Greater(x, half) y = Where(g, x, w3)",
    "y = BatchNormalization(x, ones, c3, c3, ones)", "y = Dropout(x)", "y = Dropout(x, half, off)",
    "c = QuantizeLinear(x, s, z) y = DequantizeLinear(c, s, z)", "y = com.microsoft.FastGelu(x)",
    "y = com.microsoft.BiasGelu(x, v)", "f = Squeeze(i, one) y = OneHot(f, three, onoff)",
    "y = PRelu(x, half)", "y = Mean(x, x, half)", "y = Shape(x)", "y = Size(x)", "f = Flatten(x) y = EyeLike(f)",
    # moving
    "y = Transpose<perm = [2,0,1]>(x)", "y = Reshape(x, flat)", "y = Pad(x, pads0)", 'y = Pad<mode = "reflect">(x, pads2)',
    "y = Tile(x, twice)", "y = Slice(x, last, far, zero, last)", "y = Gather(x, idx)", "y = GatherND(x, corner)",
    "y = Concat<axis = 0>(x, x)", "y = ScatterND(x, corner, put)", "y = Trilu(x)", "y = Compress<axis = 1>(x, yes)",
    "y = ReverseSequence<batch_axis = 1, time_axis = 0>(x, lens3)", "y, u = Split<axis = 2, num_outputs = 2>(x)",
    "s1 = Shape(x) y = Expand(v, s1)", "p = Reshape(x, across) y = Relu(p)",
    # all along other axes
    "y = ReduceMax(x, both)", "y = ReduceMax<noop_with_empty_axes = 1>(x)", "y = Softmax(x)", "y = ArgMax<axis = -1>(x)",
    "y, p = TopK(x, one)", "y = CumSum(x, scalar1)", "y = LayerNormalization(x, v)", "y = LpNormalization(x)",
    "y = LayerNormalization<axis = 1>(x, put3)", "y = MeanVarianceNormalization<axes = [1,2]>(x)",
    "y = InstanceNormalization(x, ones, c3)", "y = AveragePool<kernel_shape = [2]>(x)", "y = GlobalMaxPool(x)",
    "u = Unsqueeze(x, last) y = LRN<size = 3>(u)", "c = Slice(x, zero, three, two) y = Det(c)", "y = Resize(x, , up)",
    "u = Unsqueeze(x, last) y = DFT<axis = 1>(u)", "y = LpPool<kernel_shape = [2]>(x)",
    "t = Transpose<perm = [1,0,2]>(x) y = ReduceMax(t, zero)", "t = Transpose<perm = [1,0,2]>(x) y = CumSum(t, scalar0)",
    "y = com.microsoft.SkipLayerNormalization(x, x, v, v)",
    # products and convolutions
    "y = MatMul(x, w)", "y = MatMul(x, v)", "t = Transpose<perm = [0,2,1]>(x) y = MatMul(x, t)",
    "t = Transpose<perm = [1,2,0]>(x) y = MatMul(w, t)", "f = Flatten<axis = 2>(x) y = Gemm(f, w, v)",
    "y = com.microsoft.FusedMatMul<transB = 1>(x, x)", 'y = Einsum<equation = "nab,ncb->nac">(x, x)',
    'y = Einsum<equation = "nab,bc">(x, w)', "y = Conv(x, k)", "y = ConvTranspose(x, d)",
    "c = QuantizeLinear(x, s, z) y = ConvInteger(c, k8)", "c = QuantizeLinear(x, s, z) y = MatMulInteger(c, q)",
    "c = QuantizeLinear(x, s, z) y = QLinearMatMul(c, s, z, q, s, z8, s, z)",
    "c = QuantizeLinear(x, s, z) y = QLinearConv(c, s, z, k8, s, z8, s, z)",
    "c = QuantizeLinear(x, s, z) y = com.microsoft.MatMulIntegerToFloat(c, q, s, s)",
    # rows along one axis
    "t = Transpose<perm = [1,0,2]>(x) y, h = RNN<hidden_size = 2>(t, rw, rr)",
    "t = Transpose<perm = [1,0,2]>(x) o, y, c = LSTM<hidden_size = 2>(t, lw, lr)",
    "t = Transpose<perm = [1,0,2]>(x) , y = GRU<hidden_size = 2>(t, gw, gr)",
    "y = com.microsoft.Attention<num_heads = 2>(x, aw, ab)", "y = com.microsoft.MultiHeadAttention<num_heads = 2>(x, x, x)",
    "f = Reshape(x, signal) y = STFT(f, step, , long)",
    # picking within samples
    "y = Gather(w, i)", "y = GatherND(w, i)", "f = Flatten(x) y = GatherElements<axis = 1>(f, i)",
    "f = Squeeze(i, one) l = Add(f, one) y = ReverseSequence<batch_axis = 0, time_axis = 1>(x, l)",
    # quantised twice by the same numbers
    "c = QuantizeLinear(x, s, z) y = com.microsoft.QLinearAdd(c, s, z, c, s, z, s, z)",
    "c = QuantizeLinear(x, s, z) y = com.microsoft.QLinearConcat<axis = 1>(s, z, c, s, z, c, s, z)",
    "f = Flatten<axis = 2>(x) c = QuantizeLinear(f, s, z) y = com.microsoft.QGemm(c, s, z, q, s, z8, , s, z)",
    "c = QuantizeLinear(x, s, z) y = com.microsoft.QLinearMul(c, s, z, c, s, z, s, z)",
    "c = QuantizeLinear(x, s, z) y = com.microsoft.QLinearSigmoid(c, s, z, s, z)",
    "c = QuantizeLinear(x, s, z) y = com.microsoft.QLinearLeakyRelu(c, s, z, s, z)",
    "c = QuantizeLinear(x, s, z) y = com.microsoft.QLinearSoftmax<axis = -1, opset = 13>(c, s, z, s, z)",
    "u = Unsqueeze(x, last) c = QuantizeLinear(u, s, z) y = com.microsoft.QLinearGlobalAveragePool(c, s, z, s, z)",
    "u = Unsqueeze(x, last) c = QuantizeLinear(u, s, z) y = com.microsoft.QLinearAveragePool<kernel_shape = [2,1]>(c, s, z, s, z)",
    "u = Unsqueeze(x, last) c = QuantizeLinear(u, s, z) y = com.microsoft.NhwcMaxPool<kernel_shape = [2,2]>(c)",
    # fused by the optimiser
    "f = Flatten<axis = 2>(x) y = com.microsoft.FusedGemm<activation = \"Relu\">(f, w, v)", "y = com.microsoft.QuickGelu(x)",
    "u = Unsqueeze(x, last) y = com.microsoft.FusedConv<activation = \"Relu\">(u, k4)", "y = SimplifiedLayerNormalization(x, v)",
    "y = com.microsoft.SkipSimplifiedLayerNormalization(x, x, v)", "c = Slice(x, zero, three, two) y = com.microsoft.Inverse(c)",
    "e = Cast<to = 6>(i) y, m = com.microsoft.EmbedLayerNormalization(e, , w, w, , v, v)",
    "y = Col2Im(x, picture, block)", "u = Unsqueeze(x, zero) t = Transpose<perm = [1,0,2,3]>(u) p = Pad(t, even) y = SpaceToDepth<blocksize = 2>(p)",
    # tables of features
    "f = Flatten(x) y = ai.onnx.ml.Normalizer<norm = \"MAX\">(f)",
    "f = Flatten(x) y = ai.onnx.ml.Scaler<offset = [0.5], scale = [2.0]>(f)", "y = ai.onnx.ml.OneHotEncoder<cats_int64s = [0,1]>(i)",
    "f = Flatten(x) y = ai.onnx.ml.Imputer<imputed_value_floats = [1.0], replaced_value_float = 0.0>(f)",
    "f = Flatten(x) y = ai.onnx.ml.ArrayFeatureExtractor(f, idx)",
    "f = ReduceMax<keepdims = 0>(x, two) l, y = ai.onnx.ml.LinearClassifier<coefficients = [1.0,2.0,-1.0,0.5,0.25,1.5], "
    "intercepts = [0.5,0.25], classlabels_ints = [0,1], multi_class = 1>(f)",
    "f = Flatten(x) y = ai.onnx.ml.TreeEnsembleRegressor<nodes_treeids = [0,0,0], nodes_nodeids = [0,1,2], "
    "nodes_featureids = [1,0,0], nodes_values = [0.1,0.0,0.0], nodes_modes = [\"BRANCH_LEQ\",\"LEAF\",\"LEAF\"], "
    "nodes_truenodeids = [1,0,0], nodes_falsenodeids = [2,0,0], nodes_hitrates = [1.0,1.0,1.0], "
    "nodes_missing_value_tracks_true = [0,0,0], target_treeids = [0,0], target_nodeids = [1,2], target_ids = [0,0], "
    "target_weights = [1.5,-2.5], n_targets = 1>(f)",
    "y = TfIdfVectorizer<mode = \"TF\", min_gram_length = 1, max_gram_length = 1, max_skip_count = 0, ngram_counts = [0], "
    "ngram_indexes = [0,1,2], pool_int64s = [0,1,2]>(i)",
    # what is nobody's may be looked at as a whole
    "c, s1, z1 = DynamicQuantizeLinear(w) m = DequantizeLinear(c, s1, z1) y = MatMul(x, m)", "s1 = Shape(x) y = ReduceProd(s1)",
    "s1 = Shape(x) c = ConstantOfShape(s1) y = NonZero(c)",
)  # fmt: skip

CAUTIOUS = (
    "y = Resize(x, , up0)", "f = Flatten(x) u = Cast<to = 1>(i) y = ScatterElements<axis = 1>(f, i, u)",
    "c = SplitToSequence<axis = 0>(x) y = ConcatFromSequence<axis = 0>(c)", "c = SequenceConstruct(x, x) y = SequenceAt(c, zero0)",
    "t = Transpose<perm = [1,0,2]>(x) u = Transpose<perm = [0,2,1]>(x) y = com.microsoft.FusedMatMul<transBatchA = 1>(t, u)", "c = Optional(x) y = OptionalGetElement(c)",
    'y = Einsum<equation = "...b,bc->...c">(x, w)',
)  # fmt: skip
"""Of these it is not known, or not found out, that they keep rows apart."""


OTHER_VERSIONS = (
    (7, "y = Upsample<scales = [1.0, 1.0, 2.0]>(x)"), (9, "y = Upsample(x, up)"), (10, "y = Resize(x, up)"),
    (11, "y = Softmax<axis = 2>(x)"), (11, "y = ReduceMax<axes = [1]>(x)"), (9, "y = Slice<axes = [1], starts = [0], ends = [2]>(x)"),
    (9, "y = Pad<pads = [0,0,1,0,0,1], value = 7.0>(x)"), (7, "y, u = Split<axis = 1, split = [1,2]>(x)"),
    (20, "u = Unsqueeze(x, last) y = DFT(u, , scalar1)"),
    (20, "a = Slice(x, zero, two, one) t = Slice(a, zero, three, two) s1 = Shape(x) r = Gather(s1, zero) "
         "e = Concat<axis = 0>(r, grid) y = AffineGrid(t, e)"),
    (23, "u = Unsqueeze(x, one) y = Attention(u, u, u)"), (23, "y = RMSNormalization(x, v)"),
    (23, "u = Unsqueeze(x, one) e = Expand(i, wide) y = RotaryEmbedding(u, turn, turn, e)"),
    (24, "u = Unsqueeze(x, one) p = Slice(u, zero, one, two) f = Squeeze(i, one) y = TensorScatter(u, p, f)"),
)  # fmt: skip
"""What keeps rows apart in other versions of the operators."""


@pytest.mark.parametrize("text", MIXES)
def test_operators_that_look_across_rows_are_found(text: str, tmp_path: Path) -> None:
    made = model(text)
    assert really_mixes(made)
    assert verdict(made, tmp_path)


@pytest.mark.parametrize("text", KEEPS)
def test_operators_that_keep_to_their_rows_are_not(text: str, tmp_path: Path) -> None:
    made = model(text)
    assert verdict(made, tmp_path) is None
    assert not really_mixes(made)


@pytest.mark.parametrize(("version", "text"), OTHER_VERSIONS)
def test_nor_are_they_in_other_versions(version: int, text: str, tmp_path: Path) -> None:
    made = model(text, version)
    assert verdict(made, tmp_path) is None
    assert not really_mixes(made)


@pytest.mark.parametrize("text", CAUTIOUS)
def test_what_is_not_known_counts_as_mixing(text: str, tmp_path: Path) -> None:
    assert verdict(model(text), tmp_path)


@pytest.mark.parametrize(("version", "mixes"), [(11, True), (13, False)])
def test_before_opset_13_a_softmax_takes_all_axes_from_its_own_on(version: int, mixes: bool, tmp_path: Path) -> None:
    flat = model("t = Transpose<perm = [1,0,2]>(x) u = Transpose<perm = [0,2,1]>(t) y = Softmax<axis = 1>(u)", version)
    assert (verdict(flat, tmp_path) is not None) == really_mixes(flat) == mixes
    last = model("t = Transpose<perm = [1,0,2]>(x) y = Softmax<axis = 2>(t)", version)
    assert verdict(last, tmp_path) is None and not really_mixes(last)


NOT_KNOWN = {
    "BitCast", "CastLike", "CastMap", "CategoryMapper", "CenterCropPad", "ConcatFromSequence", "DeformConv",
    "DictVectorizer", "FeatureVectorizer", "GroupNormalization", "ImageDecoder", "MaxRoiPool", "MaxUnpool",
    "NegativeLogLikelihoodLoss", "Optional", "OptionalGetElement", "OptionalHasElement", "RoiAlign", "SVMClassifier",
    "SVMRegressor", "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert",
    "SequenceLength", "SequenceMap", "SoftmaxCrossEntropyLoss", "SplitToSequence", "TreeEnsemble", "ZipMap",
    "Binarizer",
}  # fmt: skip
BY_VALUE = {
    "BlackmanWindow", "Constant", "ConstantOfShape", "HammingWindow", "HannWindow", "MelWeightMatrix", "Range",
}  # fmt: skip
"""What makes more or less by a number: nobody's of what is nobody's, and not known to keep rows apart else."""


def test_of_every_operator_it_is_said_what_it_does_or_that_it_is_not_known() -> None:
    kinds = [{*RULES}, {*WHOLE}, {*LOTS}, {"If", "Loop", "Scan"}, NOT_KNOWN, BY_VALUE]
    assert len(set().union(*kinds)) == sum(map(len, kinds))
    schemas = onnx.defs.get_all_schemas_with_history()
    names = {each.name for each in schemas if each.domain in ("", "ai.onnx.ml") and each.since_version <= 26}
    assert names - set().union(*kinds) == set()


def test_operators_of_other_domains_are_not_known(tmp_path: Path) -> None:
    made = model("y = Relu(x)")
    made.graph.node[0].domain = "elsewhere"
    rows = batch([row(model("y = Relu(x)"), "plain", seed) for seed in range(2)])

    class Blind:
        """A run of which nothing can be seen."""

        def trace(self, *_: Any) -> Seen:
            return Seen({}, {})

        def compute(self, *_: Any) -> list[np.ndarray]:
            raise AssertionError

    assert judged(made, [rows], Blind()).mixing == "Relu '' is not known to keep rows apart"
    made.graph.node[0].domain = ""
    assert judged(made, [rows], Blind()).mixing == "Relu '' is not known to keep rows apart"


def test_groups_keep_samples_apart_that_lie_beside_each_other_as_channels(tmp_path: Path) -> None:
    """Two samples of three channels as one of six: in two groups, or in three, of which one has both."""
    for groups, mixes in ((2, False), (3, True), (6, False), (1, True)):
        made = graph(
            f"(float[n,3,4] x) => (float[a,b,c] y) {{ t = Reshape(x, six) y = Conv<group = {groups}>(t, w) }}",
            six=ints(1, 6, 4), w=drawn(6, 6 // groups, 2),
        )  # fmt: skip
        said = judged(made, [{"x": drawn(2, 3, 4)}], Tracer(tmp_path, 1)).mixing
        assert str(said).startswith("Conv ") == mixes


def summing(part: str) -> ModelProto:
    """A loop over the samples that adds something up in every turn; the sum is put in the place of the first row."""
    body = parser.parse_graph(
        f"body (int64 turn, bool before, float[3,4] sum) => (bool after, float[3,4] next) "
        f"{{ {part} next = Add(sum, part) after = Identity(before) }}"
    )
    made = graph(
        "(float[n,3,4] x) => (float[n,3,4] y) { s = Shape(x) turns = Gather(s, first) }",
        first=np.array(0), begin=np.zeros((3, 4), np.float32), zero=ints(0), corner=ints(0)[None],
    )  # fmt: skip
    made.graph.node.append(helper.make_node("Loop", ["turns", "", "begin"], ["total"], body=body))
    made.graph.node.append(helper.make_node("Unsqueeze", ["total", "zero"], ["u"]))
    made.graph.node.append(helper.make_node("ScatterND", ["x", "corner", "u"], ["y"]))
    return made


def test_a_loop_that_takes_another_row_in_every_turn_is_found(tmp_path: Path) -> None:
    picking, fixed = summing("part = Gather(x, turn)"), summing("part = Gather(x, first)")
    rows = [batch([{"x": drawn(1, 3, 4, seed=seed)} for seed in range(count)]) for count in (2, 3)]
    assert "turn to turn" in str(judged(picking, rows, Tracer(tmp_path, 1)).mixing)
    assert judged(fixed, rows, Tracer(tmp_path, 1)).mixing is None
    assert really_mixes(picking) and not really_mixes(fixed)


def test_what_was_asked_for_is_seen_in_a_run(tmp_path: Path) -> None:
    made = graph(
        "(float[n,3,4] x) => (float[m] y) { t = Transpose<perm = [1, 0, 2]>(x) s = Shape(t) y = Reshape(t, flat) }",
        flat=ints(-1),
    )
    seen = Tracer(tmp_path, 1).trace(made, {"x": np.zeros((2, 3, 4), np.float32)}, {"s", "y"})
    assert seen.shapes == {"t": (3, 2, 4), "s": (3,), "y": (24,)}
    assert seen.values["s"].tolist() == [3, 2, 4] and seen.values["y"].shape == (24,)


def test_elements_belong_to_one_sample_or_nobody() -> None:
    rows, columns = numbered(1, 2, 2), numbered(1, 2, 2).T
    assert joined(None, rows, np.array([[0], [2]], np.int32)).tolist() == [[1], [2]]  # type: ignore[union-attr]
    assert collapsed(rows, [1]).tolist() == [[1], [2]] and joined(None, None) is None
    for mixed in (lambda: joined(rows, columns), lambda: collapsed(rows, [0]), lambda: collapsed(rows, [2])):
        with pytest.raises(Mixed):
            mixed()
    spread = np.broadcast_to(rows[:, :, None], (2, 3, 4))
    found = shrunk(np.ascontiguousarray(spread))
    assert found is not None and found.shape == (2, 1, 1)
    assert shrunk(np.zeros((2, 3), np.int32)) is None


@pytest.mark.parametrize(("name", "joins"), [("attention", True), ("wide-rows", False), ("perceptron", True)])
def test_rows_of_other_shapes_are_joined_if_they_are_kept_apart_whatever_the_shape(
    name: str, joins: bool, tmp_path: Path
) -> None:
    (special,) = (each for each in SPECIAL if each.name == name)
    found = prepare(special.save(tmp_path), LoadOptions(max_batch=2, shapes=special.shapes))
    assert found.any_shapes == joins


# Real files


def quantised(path: Path, *, says: str | None = None) -> Path:
    """The largest of eight sums of 8-bit products; the scale is that of the largest value of all that come together."""
    rng = np.random.default_rng(0)
    weights = numpy_helper.from_array(rng.integers(-127, 128, (32, 8)).astype(np.int8), "w")
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        helper.make_node("MatMulInteger", ["q", "w", "zero"], ["sums"]),
        helper.make_node("ArgMax", ["sums"], ["y"], axis=1, keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "quantised",
        [helper.make_tensor_value_info("x", 1, ["n", 32])],
        [helper.make_tensor_value_info("y", 7, ["n"])],
        [weights],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    if says is not None:
        helper.set_model_props(made, {METADATA_KEY: says})
    path.write_bytes(made.SerializeToString())
    return path


def test_a_model_with_such_an_operator_is_not_batched_and_says_why(tmp_path: Path) -> None:
    found = prepare(quantised(tmp_path / "q.onnx"), LoadOptions())
    assert (found.max_batch, found.batchable) == (1, False)
    (remark,) = found.remarks
    assert remark.startswith("not batched: DynamicQuantizeLinear") and 'rows = "independent"' in remark
    with pytest.raises(ModelError, match=r"max_batch is 4, but the model cannot be batched: DynamicQuantizeLinear"):
        prepare(quantised(tmp_path / "q.onnx"), LoadOptions(max_batch=4))


def test_it_is_batched_if_its_file_or_its_settings_say_so(tmp_path: Path) -> None:
    said = prepare(quantised(tmp_path / "said.onnx", says="independent"), LoadOptions(max_batch=4))
    told = prepare(quantised(tmp_path / "told.onnx"), LoadOptions(max_batch=4, independent_rows=True))
    assert [(each.max_batch, each.batchable) for each in (said, told)] == [(4, True)] * 2


def test_a_file_that_says_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"weft\.rows = 'mixed'"):
        prepare(quantised(tmp_path / "q.onnx", says="mixed"), LoadOptions())
