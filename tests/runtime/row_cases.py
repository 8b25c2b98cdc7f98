"""Nodes of every class of operators: some mix the rows of a batch, others keep them apart.

They take ``x`` (samples by 3 by 4), ``i`` (samples by 1, of 0 to 2), ``b`` (samples, bool) and weights by name, and
make ``y``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.runtime.special_models import drawn, ints, whole

WEIGHTS: dict[str, Any] = {
    "w": drawn(4, 4), "v": drawn(4, seed=1), "c3": drawn(3, seed=2), "k": drawn(6, 3, 2, seed=3), "k8": whole(6, 3, 2),
    "d": drawn(3, 2, 2), "zero": ints(0), "one": ints(1), "two": ints(2), "three": ints(3), "both": ints(1, 2),
    "flat": ints(-1, 4), "across": ints(3, -1, 4), "ones": np.ones(3, np.float32), "scalar0": np.array(0),
    "scalar1": np.array(1), "last": ints(-1), "far": ints(-(2**40)), "pads0": ints(1, 0, 0, 0, 0, 0),
    "pads2": ints(0, 0, 1, 0, 0, 1), "q": whole(4, 4), "s": np.float32(0.1), "z": np.uint8(9), "z8": np.int8(0),
    "onoff": np.array([0, 1], np.float32), "yes": np.array([True, False, True]), "half": np.float32(0.5),
    "on": np.array(True), "off": np.array(False), "up": np.array([1, 1, 2], np.float32),
    "up0": np.array([2, 1, 1], np.float32), "lw": drawn(1, 8, 4), "lr": drawn(1, 8, 2, seed=4), "gw": drawn(1, 6, 4),
    "gr": drawn(1, 6, 2, seed=4), "rw": drawn(1, 2, 4), "rr": drawn(1, 2, 2), "idx": ints(1, 0),
    "corner": ints(0)[None], "put": drawn(1, 3, 4), "aw": drawn(4, 12), "ab": drawn(12), "twice": ints(2, 1, 1),
    "signal": ints(-1, 12, 1), "step": np.array(2), "long": np.array(4), "ends": ints(-1), "boxes": ints(-1, 1, 3),
    "most": ints(2), "filled": drawn(1), "c4": drawn(3, 1), "nil": np.float32(0), "w3": drawn(3, 4, seed=5),
    "lens3": ints(2, 1, 2), "put3": drawn(3, 4, seed=6), "grown0": ints(-1, 2, 4), "zero0": np.array(0),
    "k4": drawn(6, 3, 1, 1), "picture": ints(1, 6), "block": ints(1, 3), "even": ints(0, 0, 1, 0, 0, 0, 0, 0),
    "grid": ints(1, 2, 2), "wide": ints(1, 3), "turn": drawn(3, 2),
}  # fmt: skip

MIXES = (
    # whole tensors, and lots
    "y, s1, z1 = DynamicQuantizeLinear(x)",
    "f = Reshape(x, flat) y = com.microsoft.DynamicQuantizeMatMul(f, q, filled)", "y = NonZero(x)", "y = Unique(x)",
    "y = Compress(x, b)", "y = Compress<axis = 0>(x, b)",
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
    "f = Flatten(x) u = Slice(f, zero, one, one) c = Mod(i, two) y = ScatterElements<axis = 0, reduction = "
    '"add">(f, c, u)',
    # elements that were moved to others
    "r = Slice(x, last, far, zero, last) y = Sub(x, r)", "p = Reshape(x, across) y = ReduceMax(p, zero)",
    "t = Transpose<perm = [1,0,2]>(x) p = Reshape(t, flat) c = Reshape(p, grown0) y = ReduceMax(c, one)",
)  # fmt: skip
"""Some element of what they make changes with two rows."""

KEEPS = (
    # element by element
    "y = Relu(x)", "y = Add(x, c4)", "y = Mul(x, x)", "y = Clip(x, nil, half)",
    "g = Greater(x, half) y = Where(g, x, w3)", "y = BatchNormalization(x, ones, c3, c3, ones)", "y = Dropout(x)",
    "y = Dropout(x, half, off)", "c = QuantizeLinear(x, s, z) y = DequantizeLinear(c, s, z)",
    "y = com.microsoft.FastGelu(x)", "y = com.microsoft.BiasGelu(x, v)",
    "f = Squeeze(i, one) y = OneHot(f, three, onoff)", "y = PRelu(x, half)", "y = Mean(x, x, half)", "y = Shape(x)",
    "y = Size(x)", "f = Flatten(x) y = EyeLike(f)",
    # moving
    "y = Transpose<perm = [2,0,1]>(x)", "y = Reshape(x, flat)", "y = Pad(x, pads0)",
    'y = Pad<mode = "reflect">(x, pads2)', "y = Tile(x, twice)", "y = Slice(x, last, far, zero, last)",
    "y = Gather(x, idx)", "y = GatherND(x, corner)", "y = Concat<axis = 0>(x, x)", "y = ScatterND(x, corner, put)",
    "y = Trilu(x)", "y = Compress<axis = 1>(x, yes)", "y = ReverseSequence<batch_axis = 1, time_axis = 0>(x, lens3)",
    "y, u = Split<axis = 2, num_outputs = 2>(x)", "s1 = Shape(x) y = Expand(v, s1)",
    "p = Reshape(x, across) y = Relu(p)",
    # all along other axes
    "y = ReduceMax(x, both)", "y = ReduceMax<noop_with_empty_axes = 1>(x)", "y = Softmax(x)",
    "y = ArgMax<axis = -1>(x)", "y, p = TopK(x, one)", "y = CumSum(x, scalar1)", "y = LayerNormalization(x, v)",
    "y = LpNormalization(x)", "y = LayerNormalization<axis = 1>(x, put3)",
    "y = MeanVarianceNormalization<axes = [1,2]>(x)", "y = InstanceNormalization(x, ones, c3)",
    "y = AveragePool<kernel_shape = [2]>(x)", "y = GlobalMaxPool(x)", "u = Unsqueeze(x, last) y = LRN<size = 3>(u)",
    "c = Slice(x, zero, three, two) y = Det(c)", "y = Resize(x, , up)", "u = Unsqueeze(x, last) y = DFT<axis = 1>(u)",
    "y = LpPool<kernel_shape = [2]>(x)", "t = Transpose<perm = [1,0,2]>(x) y = ReduceMax(t, zero)",
    "t = Transpose<perm = [1,0,2]>(x) y = CumSum(t, scalar0)", "y = com.microsoft.SkipLayerNormalization(x, x, v, v)",
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
    "y = com.microsoft.Attention<num_heads = 2>(x, aw, ab)",
    "y = com.microsoft.MultiHeadAttention<num_heads = 2>(x, x, x)", "f = Reshape(x, signal) y = STFT(f, step, , long)",
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
    "u = Unsqueeze(x, last) c = QuantizeLinear(u, s, z) y = com.microsoft.QLinearGlobalAveragePool(c, s, z, "
    "s, z)",
    "u = Unsqueeze(x, last) c = QuantizeLinear(u, s, z) y = com.microsoft.QLinearAveragePool<kernel_shape = "
    "[2,1]>(c, s, z, s, z)",
    "u = Unsqueeze(x, last) c = QuantizeLinear(u, s, z) y = com.microsoft.NhwcMaxPool<kernel_shape = [2,2]>(c)",
    # fused by the optimiser
    'f = Flatten<axis = 2>(x) y = com.microsoft.FusedGemm<activation = "Relu">(f, w, v)',
    "y = com.microsoft.QuickGelu(x)", 'u = Unsqueeze(x, last) y = com.microsoft.FusedConv<activation = "Relu">(u, k4)',
    "y = SimplifiedLayerNormalization(x, v)", "y = com.microsoft.SkipSimplifiedLayerNormalization(x, x, v)",
    "c = Slice(x, zero, three, two) y = com.microsoft.Inverse(c)",
    "e = Cast<to = 6>(i) y, m = com.microsoft.EmbedLayerNormalization(e, , w, w, , v, v)",
    "y = Col2Im(x, picture, block)",
    "u = Unsqueeze(x, zero) t = Transpose<perm = [1,0,2,3]>(u) p = Pad(t, even) y = SpaceToDepth<blocksize = "
    "2>(p)",
    # tables of features
    'f = Flatten(x) y = ai.onnx.ml.Normalizer<norm = "MAX">(f)',
    "f = Flatten(x) y = ai.onnx.ml.Scaler<offset = [0.5], scale = [2.0]>(f)",
    "y = ai.onnx.ml.OneHotEncoder<cats_int64s = [0,1]>(i)",
    "f = Flatten(x) y = ai.onnx.ml.Imputer<imputed_value_floats = [1.0], replaced_value_float = 0.0>(f)",
    "f = Flatten(x) y = ai.onnx.ml.ArrayFeatureExtractor(f, idx)",
    "f = ReduceMax<keepdims = 0>(x, two) l, y = ai.onnx.ml.LinearClassifier<coefficients = "
    "[1.0,2.0,-1.0,0.5,0.25,1.5], intercepts = [0.5,0.25], classlabels_ints = [0,1], multi_class = 1>(f)",
    "f = Flatten(x) y = ai.onnx.ml.TreeEnsembleRegressor<nodes_treeids = [0,0,0], nodes_nodeids = [0,1,2], "
    'nodes_featureids = [1,0,0], nodes_values = [0.1,0.0,0.0], nodes_modes = ["BRANCH_LEQ","LEAF","LEAF"], '
    "nodes_truenodeids = [1,0,0], nodes_falsenodeids = [2,0,0], nodes_hitrates = [1.0,1.0,1.0], "
    "nodes_missing_value_tracks_true = [0,0,0], target_treeids = [0,0], target_nodeids = [1,2], target_ids = "
    "[0,0], target_weights = [1.5,-2.5], n_targets = 1>(f)",
    'y = TfIdfVectorizer<mode = "TF", min_gram_length = 1, max_gram_length = 1, max_skip_count = 0, '
    "ngram_counts = [0], ngram_indexes = [0,1,2], pool_int64s = [0,1,2]>(i)",
    # what is nobody's may be looked at as a whole
    "c, s1, z1 = DynamicQuantizeLinear(w) m = DequantizeLinear(c, s1, z1) y = MatMul(x, m)",
    "s1 = Shape(x) y = ReduceProd(s1)", "s1 = Shape(x) c = ConstantOfShape(s1) y = NonZero(c)",
)  # fmt: skip
"""None does."""

CAUTIOUS = (
    "y = Resize(x, , up0)", "f = Flatten(x) u = Cast<to = 1>(i) y = ScatterElements<axis = 1>(f, i, u)",
    "c = SplitToSequence<axis = 0>(x) y = ConcatFromSequence<axis = 0>(c)",
    "c = SequenceConstruct(x, x) y = SequenceAt(c, zero0)",
    "t = Transpose<perm = [1,0,2]>(x) u = Transpose<perm = [0,2,1]>(x) y = "
    "com.microsoft.FusedMatMul<transBatchA = 1>(t, u)",
    "c = Optional(x) y = OptionalGetElement(c)", 'y = Einsum<equation = "...b,bc->...c">(x, w)',
)  # fmt: skip
"""Of these it is not known, or not found out, that they keep rows apart."""

OTHER_VERSIONS = (
    (7, "y = Upsample<scales = [1.0, 1.0, 2.0]>(x)"),
    (9, "y = Upsample(x, up)"),
    (10, "y = Resize(x, up)"),
    (11, "y = Softmax<axis = 2>(x)"),
    (11, "y = ReduceMax<axes = [1]>(x)"),
    (9, "y = Slice<axes = [1], starts = [0], ends = [2]>(x)"),
    (9, "y = Pad<pads = [0,0,1,0,0,1], value = 7.0>(x)"),
    (7, "y, u = Split<axis = 1, split = [1,2]>(x)"),
    (20, "u = Unsqueeze(x, last) y = DFT(u, , scalar1)"),
    (20, 
        "a = Slice(x, zero, two, one) t = Slice(a, zero, three, two) s1 = Shape(x) r = Gather(s1, zero) e = "
        "Concat<axis = 0>(r, grid) y = AffineGrid(t, e)"),
    (23, "u = Unsqueeze(x, one) y = Attention(u, u, u)"),
    (23, "y = RMSNormalization(x, v)"),
    (23, "u = Unsqueeze(x, one) e = Expand(i, wide) y = RotaryEmbedding(u, turn, turn, e)"),
    (24, "u = Unsqueeze(x, one) p = Slice(u, zero, one, two) f = Squeeze(i, one) y = TensorScatter(u, p, f)"),
)  # fmt: skip
"""What keeps rows apart in other versions of the operators."""
