"""Output shapes that ONNX's own inference does not give: operators of ONNX Runtime, gaps in older versions of ONNX's.

What ONNX Runtime's operators take and hand out is told by the schemas it registers and by its ContribOperators.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest

import onnx

from weft.models.onnx_import.attributes import Attributes
from weft.models.onnx_import.tensors import Tensor

Shape = tuple[int, ...]
Inputs = Sequence[Tensor | None]
Sizes = tuple[int | None, ...]
"""A shape with open sizes."""
Rule = Callable[[Inputs, Attributes], Sizes | None]


def own_shapes(op: str, inputs: Inputs, attributes: Attributes) -> Iterable[Sizes | None]:
    """The shapes of the leading outputs, None where there is no rule or too little to apply it to."""
    known = inputs and inputs[0] is not None
    return (rule(inputs, attributes) for rule in _RULES.get(op, ())) if known else ()


def standard(node: onnx.NodeProto, op: str) -> onnx.NodeProto:
    """The node of ONNX's own that has the same shapes, else *node* itself."""
    if op not in _STANDARD:
        return node
    like, inputs = _STANDARD[op]
    known = onnx.defs.get_schema(like).attributes
    attributes = [each for each in node.attribute if each.name in known]
    return onnx.NodeProto(op_type=like, input=node.input[:inputs], output=node.output, attribute=attributes)


def broadcast(first: Sequence[int], second: Sequence[int]) -> Shape:
    """The common shape of two batches, aligned at the right; a size that disagrees is the first's."""
    pairs = list(zip_longest(reversed(first), reversed(second), fillvalue=1))
    return tuple(b if a == 1 else a for a, b in reversed(pairs))


def operand(shape: Shape, attributes: Attributes, side: str) -> Shape:
    """A factor as it enters the product: turned where ``transA`` says so, its first axis moved in by ``transBatchA``."""
    if attributes.integer(f"transBatch{side}", 0) and len(shape) > 2:
        shape = (*shape[1:-1], shape[0], shape[-1])
    turned = attributes.integer(f"trans{side}", 0) and len(shape) > 1
    return (*shape[:-2], shape[-1], shape[-2]) if turned else shape


def _shape(inputs: Inputs, place: int) -> Shape | None:
    tensor = inputs[place] if place < len(inputs) else None
    return None if tensor is None else tensor.shape


def _integers(inputs: Inputs, place: int) -> Shape | None:
    """The values of a small input."""
    tensor = inputs[place] if place < len(inputs) else None
    return None if tensor is None or tensor.value is None else tuple(int(each) for each in tensor.value.reshape(-1))


def _like(place: int) -> Rule:
    def rule(inputs: Inputs, attributes: Attributes) -> Shape | None:
        return _shape(inputs, place)

    return rule


def _fixed(*shape: int) -> Rule:
    def rule(inputs: Inputs, attributes: Attributes) -> Shape | None:
        return shape

    return rule


def _common(*places: int) -> Rule:
    """The shape that several inputs broadcast to."""

    def rule(inputs: Inputs, attributes: Attributes) -> Shape | None:
        result: Shape = ()
        for place in places:
            result = broadcast(result, _shape(inputs, place) or ())
        return result

    return rule


def _product(place: int) -> Rule:
    """The product of the first input and another, either transposed where an attribute says so."""

    def rule(inputs: Inputs, attributes: Attributes) -> Shape | None:
        left, right = (operand(_shape(inputs, at) or (), attributes, side) for at, side in ((0, "A"), (place, "B")))
        if not left or not right:
            return None
        rows = left[-2:-1] if len(left) > 1 else ()
        columns = right[-1:] if len(right) > 1 else ()
        return (*broadcast(left[:-2], right[:-2]), *rows, *columns)

    return rule


def _columns(name: str, times: int = 1) -> Rule:
    """The first input with as many columns as an attribute says."""

    def rule(inputs: Inputs, attributes: Attributes) -> Shape | None:
        return (*(_shape(inputs, 0) or ())[:-1], attributes.integer(name, 1) * times)

    return rule


def _columns_of(place: int, axis: int) -> Rule:
    """The first input with as many columns as another input has sizes along *axis*."""

    def rule(inputs: Inputs, attributes: Attributes) -> Shape | None:
        left, other = _shape(inputs, 0), _shape(inputs, place)
        return (*left[:-1], other[axis]) if left and other else None

    return rule


def _stated_columns(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """A product with a packed matrix whose shape is the third input."""
    left, sizes = _shape(inputs, 0), _integers(inputs, 2)
    return (*left[:-1], sizes[-1]) if left and sizes else None


def _ordered_product(inputs: Inputs, attributes: Attributes) -> Shape | None:
    left, right = _shape(inputs, 0), _shape(inputs, 2)
    if not left or right is None or len(right) != 2:
        return None
    return (*left[:-1], right[1] if right[0] == left[-1] else right[0])


def _attention(inputs: Inputs, attributes: Attributes) -> Shape | None:
    left, right = _shape(inputs, 0), _shape(inputs, 1)
    sizes = attributes.integers("qkv_hidden_sizes", (right[-1] // 3,) if right else ())
    return (*left[:-1], sizes[-1]) if left and sizes else None


def _attention_cache(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Keys and values of com.microsoft Attention: those of the past, then as many as there are rows."""
    data, right, past = _shape(inputs, 0), _shape(inputs, 1), _shape(inputs, 4)
    heads = attributes.integer("num_heads", 1)
    if data is None or len(data) != 3 or right is None or heads < 1:
        return None
    earlier = past[3] if past is not None and len(past) == 5 else 0
    sizes = attributes.integers("qkv_hidden_sizes", (right[-1] // 3,))
    return (2, data[0], heads, earlier + data[1], sizes[0] // heads)


def _projected(kv_heads: str) -> Rule:
    """The context of attention over projected queries: as many rows as queries, as wide as the values of all heads."""

    def rule(inputs: Inputs, attributes: Attributes) -> Shape | None:
        query, value = _shape(inputs, 0), _shape(inputs, 2)
        heads, shared = attributes.integer("num_heads", 1), attributes.integer(kv_heads, 1)
        if query is None or min(heads, shared) < 1:
            return None
        if len(query) == 5:
            return (query[0], query[1], query[2] * query[4])
        if len(query) not in (2, 3):
            return None
        if value is None:
            packed = _shape(inputs, 1)
            if packed is not None:  # keys and values in one tensor: batch, rows, heads, 2, width
                return query
            return (*query[:-1], heads * (query[-1] // (heads + 2 * shared)))
        width = value[-1] if len(value) == 4 else value[-1] // shared
        return (*query[:-1], heads * width)

    return rule


def _key_cache(key: int, past: int, kv_heads: str) -> Rule:
    """The keys (or values) that attention hands out: batch, heads, positions of the past and new ones, width."""

    def rule(inputs: Inputs, attributes: Attributes) -> Shape | None:
        new, earlier = _shape(inputs, key), _shape(inputs, past)
        heads = attributes.integer(kv_heads, 1)
        if new is None or heads < 1:
            return None
        if len(new) == 4:
            return new
        before = earlier[2] if earlier is not None and len(earlier) == 4 else 0
        return (new[0], heads, before + new[1], new[2] // heads) if len(new) == 3 else None

    return rule


def _normed(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """A mean or deviation: one for each row."""
    shape = _shape(inputs, 0)
    return (*shape[:-1], 1) if shape else None


def _embedding(inputs: Inputs, attributes: Attributes) -> Shape | None:
    rows, table = _shape(inputs, 0), _shape(inputs, 2)
    return (*rows, table[-1]) if rows and table else None


def _samples(inputs: Inputs, attributes: Attributes) -> Shape | None:
    return (_shape(inputs, 0) or ())[:1]


def _looked_up(inputs: Inputs, attributes: Attributes) -> Shape | None:
    table, indices = _shape(inputs, 0), _shape(inputs, 1)
    return None if not table or indices is None else (*indices, *table[1:])


def _gathered_blocks(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """A gather from a quantised table; values of 4 bits lie two to a byte where the table is of bytes."""
    table, indices = inputs[0], _shape(inputs, 1)
    if table is None or indices is None:
        return None
    sizes, axis = list(table.shape), attributes.integer("gather_axis", 0)
    if table.bits == 8 and table.dtype == onnx.TensorProto.UINT8:
        sizes[-1] = sizes[-1] * 8 // max(1, attributes.integer("bits", 4))
    return (*sizes[:axis], *indices, *sizes[axis + 1 :])


def _half(inputs: Inputs, attributes: Attributes) -> Shape | None:
    shape = _shape(inputs, 0)
    return (*shape[:-1], shape[-1] // 2) if shape else None


def _reduced(inputs: Inputs, attributes: Attributes) -> Shape | None:
    shape = _shape(inputs, 0) or ()
    axes = {axis % max(1, len(shape)) for axis in attributes.integers("axes", range(len(shape)))}
    keep = attributes.integer("keepdims", 1)
    return tuple(1 if at in axes else size for at, size in enumerate(shape) if keep or at not in axes)


def _compressed(inputs: Inputs, attributes: Attributes) -> Shape | None:
    sizes, kept = list(_shape(inputs, 0) or ()), _integers(inputs, 1)
    if kept is None or not attributes.has("axis"):
        return None if kept is None else (sum(map(bool, kept)),)
    sizes[attributes.integer("axis", 0)] = sum(map(bool, kept))
    return tuple(sizes)


def _reshaped(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """The oldest Reshape, whose target is an attribute."""
    source, target = _shape(inputs, 0) or (), attributes.integers("shape", ())
    sizes = [source[at] if size == 0 and at < len(source) else size for at, size in enumerate(target)]
    known = math.prod(size for size in sizes if size > 0)
    rest = math.prod(source) // max(1, known)
    return tuple(rest if size < 0 else size for size in sizes) if target else None


def _joined(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Quantised tensors joined: after the scale and zero point of the result come tensor, scale, zero point each."""
    shapes = [tensor.shape for tensor in inputs[2::3] if tensor is not None]
    axis = attributes.integer("axis", 0)
    if not shapes or not -len(shapes[0]) <= axis < len(shapes[0]):
        return None
    sizes = list(shapes[0])
    sizes[axis] = sum(shape[axis] for shape in shapes)
    return tuple(sizes)


def _windowed(weight: int | None, last: bool | None = None) -> Rule:
    """A convolution or pool whose channels are the last axis: always, or (None) where an attribute says so."""

    def rule(inputs: Inputs, attributes: Attributes) -> Shape | None:
        shape, kernel = _shape(inputs, 0) or (), _shape(inputs, weight) if weight is not None else None
        channels_last = attributes.integer("channels_last", 0) if last is None else last
        window = attributes.integers("kernel_shape", kernel[2:] if kernel else ())
        spatial = shape[1:-1] if channels_last else shape[2:]
        if len(shape) < 3 or len(window) != len(spatial):
            return None
        sizes = tuple(_slid(attributes, at, spatial, window) for at in range(len(window)))
        channels = kernel[0] if kernel else shape[-1 if channels_last else 1]
        return (shape[0], *sizes, channels) if channels_last else (shape[0], channels, *sizes)

    return rule


def _slid(attributes: Attributes, at: int, spatial: Shape, window: Shape) -> int:
    """How many places a window takes along one axis."""
    stride = max(1, attributes.integers("strides", (1,) * len(window))[at])
    mode = attributes.text("auto_pad")
    if mode.startswith("SAME"):
        return -(-spatial[at] // stride)
    pads = attributes.integers("pads", (0,) * 2 * len(window)) if mode != "VALID" else (0,) * 2 * len(window)
    reach = attributes.integers("dilations", (1,) * len(window))[at] * (window[at] - 1) + 1
    room = spatial[at] + pads[at] + pads[at + len(window)] - reach
    return max(0, (-(-room // stride) if attributes.integer("ceil_mode", 0) else room // stride) + 1)


def _blocked(inputs: Inputs, attributes: Attributes) -> Sizes | None:
    """Channels in blocks of 8 or 16, whichever suits the processor that saved the file: open where 16 leaves a rest."""
    shape = _shape(inputs, 0) or ()
    if len(shape) < 3:
        return None
    count, *others, channels = shape if attributes.integer("channels_last", 0) else (shape[0], *shape[2:], shape[1])
    return (count, None if channels % 16 else channels, *others)


def _unblocked(inputs: Inputs, attributes: Attributes) -> Shape | None:
    shape, channels = _shape(inputs, 0) or (), attributes.integer("channels", 0)
    if len(shape) < 3 or channels < 1:
        return None
    last = attributes.integer("channels_last", 0)
    return (shape[0], *shape[2:], channels) if last else (shape[0], channels, *shape[2:])


def _spread(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """A transposed convolution whose padding is an input."""
    shape, kernel = _shape(inputs, 0) or (), _shape(inputs, 1) or ()
    rank = len(shape) - 2
    pads = _integers(inputs, 2) or ((0,) * 2 * rank if _shape(inputs, 2) is None else None)
    if rank < 1 or len(kernel) != len(shape) or pads is None:
        return None
    ones = (1,) * rank
    strides, reach = attributes.integers("strides", ones), attributes.integers("dilations", ones)
    extra = attributes.integers("output_padding", (0,) * rank)
    sizes = (
        strides[at] * (shape[2 + at] - 1) + extra[at] + reach[at] * (kernel[2 + at] - 1) + 1 - pads[at] - pads[at + rank]
        for at in range(rank)
    )
    return (shape[0], kernel[1] * attributes.integer("group", 1), *sizes)


def _pooled_away(inputs: Inputs, attributes: Attributes) -> Shape | None:
    shape = _shape(inputs, 0) or ()
    ones = (1,) * (len(shape) - 2)
    return (shape[0], *ones, shape[-1]) if attributes.integer("channels_last", 0) else (*shape[:2], *ones)


def _unfolded(inputs: Inputs, attributes: Attributes) -> Shape | None:
    sizes, axis = list(_shape(inputs, 0) or ()), attributes.integer("dim", -1)
    size, step = attributes.integer("size", 1), attributes.integer("step", 1)
    if not -len(sizes) <= axis < len(sizes) or step < 1:
        return None
    sizes[axis] = (sizes[axis] - size) // step + 1
    return (*sizes, size)


def _expanded(inputs: Inputs, attributes: Attributes) -> Shape | None:
    shape, axis = list(_shape(inputs, 0) or ()), _integers(inputs, 1)
    if not axis:
        return None
    at = axis[0] if axis[0] >= 0 else len(shape) + 1 + axis[0]
    return (*shape[:at], 1, *shape[at:])


def _cropped(inputs: Inputs, attributes: Attributes) -> Shape | None:
    data, regions, size = _shape(inputs, 0), _shape(inputs, 1), _integers(inputs, 3)
    return (regions[0], data[1], *size) if data and regions and size and len(data) > 1 else None


def _pairs(inputs: Inputs, attributes: Attributes) -> Shape | None:
    left, right = _shape(inputs, 0), _shape(inputs, 1)
    return (left[0], right[0]) if left and right else None


def _spectrum(inputs: Inputs, attributes: Attributes) -> Shape | None:
    shape = _shape(inputs, 0)
    if not shape or attributes.integer("signal_ndim", 1) != 1 or not attributes.integer("onesided", 1):
        return None
    return (*shape[:-1], shape[-1] // 2 + 1, 2)


def _signal(inputs: Inputs, attributes: Attributes) -> Shape | None:
    shape = _shape(inputs, 0)
    if not shape or len(shape) < 2 or attributes.integer("signal_ndim", 1) != 1:
        return None
    return (*shape[:-2], 2 * (shape[-2] - 1)) if attributes.integer("onesided", 1) else shape[:-1]


def _position_bias(inputs: Inputs, attributes: Attributes) -> Shape | None:
    table, queries, keys = _shape(inputs, 0), _integers(inputs, 1), _integers(inputs, 2)
    return (1, table[1], queries[0], keys[0]) if table and len(table) == 2 and queries and keys else None


def _gated_bias(inputs: Inputs, attributes: Attributes) -> Shape | None:
    query, positions, offsets = _shape(inputs, 0), _shape(inputs, 2), _shape(inputs, 6)
    if not query or positions is None or len(positions) != 4:
        return None
    return (offsets[0] if offsets else query[0], *positions[1:])


def _restored(inputs: Inputs, attributes: Attributes) -> Shape | None:
    data, offsets = _shape(inputs, 0), _shape(inputs, 1)
    return (*offsets, data[-1]) if data and offsets else None


def _linear_attention(inputs: Inputs, attributes: Attributes) -> Shape | None:
    query, value = _shape(inputs, 0), _shape(inputs, 2)
    q_heads, kv_heads = (attributes.integer(name, 1) for name in ("q_num_heads", "kv_num_heads"))
    if not query or not value or min(q_heads, kv_heads) < 1:
        return None
    return (*query[:-1], value[-1] // kv_heads * max(q_heads, kv_heads))


def _linear_state(inputs: Inputs, attributes: Attributes) -> Shape | None:
    query, value = _shape(inputs, 0), _shape(inputs, 2)
    q_heads, kv_heads = (attributes.integer(name, 1) for name in ("q_num_heads", "kv_num_heads"))
    if not query or not value or min(q_heads, kv_heads) < 1 or attributes.integer("state_window", 0):
        return _shape(inputs, 3)
    return (query[0], kv_heads, query[-1] // q_heads, value[-1] // kv_heads)


def _causal_state(inputs: Inputs, attributes: Attributes) -> Shape | None:
    data, weight, past = _shape(inputs, 0), _shape(inputs, 1), _shape(inputs, 3)
    if past is not None or not data or not weight or attributes.integer("state_window", 0) or len(weight) != 3:
        return past
    return (data[0], weight[0], (weight[-1] - 1) * max(1, attributes.integer("dilation", 1)))


def _delta_net(inputs: Inputs, attributes: Attributes) -> Shape | None:
    query, value = _shape(inputs, 0), _shape(inputs, 2)
    if query is None or value is None or len(query) != 3 or len(value) != 3:
        return None
    return (query[0], max(query[1], value[1]), value[2])


def _sequence(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """What a recurrent layer writes step by step."""
    data, state = _shape(inputs, 0), _state(inputs, attributes)
    return (data[0], *state) if data and state else None


def _state(inputs: Inputs, attributes: Attributes) -> Shape | None:
    data = _shape(inputs, 0) or ()
    directions = 2 if attributes.text("direction") == "bidirectional" else 1
    return (directions, data[1], attributes.integer("hidden_size", 1)) if len(data) == 3 else None


def _words(inputs: Inputs, attributes: Attributes) -> Shape | None:
    data, weight = _shape(inputs, 0), _shape(inputs, 1)
    return (*data[:-1], weight[0]) if data and weight else None


def _targets(names: str) -> Rule:
    """One row per sample, one column per class or target: as many as an attribute lists."""

    def rule(inputs: Inputs, attributes: Attributes) -> Shape | None:
        rows = (_shape(inputs, 0) or ())[:1] if len(_shape(inputs, 0) or ()) > 1 else (1,)
        columns = max((attributes.length(name) for name in names.split()), default=0)
        return (*rows, columns or max(1, attributes.integer("targets", attributes.integer("n_targets", 1))))

    return rule


def _predictions(inputs: Inputs, attributes: Attributes) -> Shape | None:
    shape = _shape(inputs, 0) or ()
    return shape[:1] if len(shape) > 1 else (1,)


def _picked(inputs: Inputs, attributes: Attributes) -> Shape | None:
    shape, picked = _shape(inputs, 0), inputs[1] if len(inputs) > 1 else None
    if not shape or picked is None:
        return None
    return (*(shape[:-1] if len(shape) > 1 else (1,)), picked.elements)


def _categories(inputs: Inputs, attributes: Attributes) -> Shape | None:
    count = max(attributes.length("cats_int64s"), attributes.length("cats_strings"))
    return (*(_shape(inputs, 0) or ()), count)


def _vector(inputs: Inputs, attributes: Attributes) -> Shape | None:
    shapes = [tensor.shape for tensor in inputs if tensor is not None]
    return (shapes[0][0] if len(shapes[0]) > 1 else 1, sum(math.prod(shape[1:]) or shape[0] for shape in shapes))


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

_RULES: dict[str, tuple[Rule, ...]] = {
    **dict.fromkeys(_SAME.split(), (_like(0),)),
    **dict.fromkeys(("Dropout", "com.microsoft:BiasDropout"), (_like(0), _like(0))),
    **dict.fromkeys(("SkipLayerNormalization", "com.microsoft:SkipLayerNormalization",
                     "com.microsoft:SkipSimplifiedLayerNormalization"), (_like(0), _normed, _normed, _like(0))),
    **dict.fromkeys(("LayerNormalization", "SimplifiedLayerNormalization", "com.microsoft:LayerNormalization"),
                    (_like(0), _normed, _normed)),
    "com.microsoft:SkipGroupNorm": (_like(0), _like(0)),
    "com.microsoft:DynamicQuantizeLinear": (_like(0), _fixed(), _fixed()),
    **dict.fromkeys(("GreaterOrEqual", "LessOrEqual"), (_common(0, 1),)),
    "Compress": (_compressed,),
    "Reshape": (_reshaped,),
    **dict.fromkeys(("com.microsoft:QLinearAdd", "com.microsoft:QLinearMul"), (_common(0, 3),)),
    **dict.fromkeys(("com.microsoft:ComplexMul", "com.microsoft:ComplexMulConj"), (_common(0, 1),)),
    "com.microsoft:QLinearWhere": (_common(0, 1, 4),),
    "com.microsoft:MulInteger": (_common(0, 2),),
    "com.microsoft:BiasSplitGelu": (_half,),
    "com.microsoft:QLinearConcat": (_joined,),
    **dict.fromkeys(("com.microsoft:QLinearReduceMean", "com.microsoft:ReduceSumInteger"), (_reduced,)),
    "com.microsoft:IsAllFinite": (_fixed(),),
    **{f"com.microsoft:{op}": (_product(1),) for op in (
        "DynamicQuantizeMatMul", "FusedGemm", "FusedMatMul", "FusedMatMulActivation", "GemmFastGelu", "GemmFloat8",
        "MatMulInteger16", "MatMulIntegerToFloat", "SparseToDenseMatMul", "TransposeMatMul")},
    "com.microsoft:QGemm": (_product(3),),
    "com.microsoft:QOrderedMatMul": (_ordered_product,),
    **{f"com.microsoft:{op}": (_columns("N"), _like(0)) for op in ("MatMulNBits", "MatMulBnb4", "MatMulNBitsMlp")},
    "com.microsoft:MatMulNBitsQkv": (_columns("Nq"), _columns("Nkv"), _columns("Nkv"), _like(0)),
    "com.microsoft:MatMulFpQ4": (_stated_columns,),
    **{f"com.microsoft:MatMulBlockQuantizedFp{bits}Weight": (_columns_of(1, 0),) for bits in (4, 8)},
    "com.microsoft:CDist": (_pairs,),
    **{f"com.microsoft:{op}": (_windowed(1, True),) for op in ("NhwcConv", "NhwcFusedConv")},
    "com.microsoft:QLinearConv": (_windowed(3),),
    "com.microsoft.nchwc:ReorderInput": (_blocked,),
    "com.microsoft.nchwc:ReorderOutput": (_unblocked,),
    "com.microsoft:ConvTransposeWithDynamicPads": (_spread,),
    "com.microsoft:QLinearAveragePool": (_windowed(None),),
    "com.microsoft:NhwcMaxPool": (_windowed(None, True),),
    "com.microsoft:QLinearGlobalAveragePool": (_pooled_away,),
    **dict.fromkeys(("CausalConvWithState", "com.microsoft:CausalConvWithState"), (_like(0), _causal_state)),
    "com.microsoft:VarlenCausalConvWithState": (_like(0), _like(4)),
    "com.microsoft:WordConvEmbedding": (_words,),
    **{f"com.microsoft:{op}": (_sequence, _state, _state) for op in ("AttnLSTM", "DynamicQuantizeLSTM")},
    "com.microsoft:Attention": (_attention, _attention_cache),
    "com.microsoft:QAttention": (_attention,),
    "com.microsoft:PackedAttention": (_attention,),
    "com.microsoft:DecoderMaskedSelfAttention": (_attention, _attention_cache),
    "com.microsoft:QOrderedAttention": (_columns_of(7, -1),),
    "com.microsoft:MultiHeadAttention": (
        _projected("num_heads"), _key_cache(1, 6, "num_heads"), _key_cache(2, 7, "num_heads")),
    "com.microsoft:DecoderMaskedMultiHeadAttention": (
        _projected("num_heads"), _key_cache(1, 5, "num_heads"), _key_cache(2, 6, "num_heads")),
    "com.microsoft:PackedMultiHeadAttention": (_projected("num_heads"),),
    "com.microsoft:GroupQueryAttention": (_projected("kv_num_heads"),),
    **{f"com.microsoft:{op}": (_projected("kv_num_heads"), _like(3), _like(4)) for op in (
        "SparseAttention", "DynamicSparseAttention", "PagedAttention", "SparsePagedAttention")},
    **dict.fromkeys(("LinearAttention", "com.microsoft:LinearAttention"), (_linear_attention, _linear_state)),
    "com.microsoft:LinearAttentionGate": (_like(0), _like(3)),
    "com.microsoft:GatedDeltaNet": (_delta_net, _like(6)),
    "com.microsoft:EngramGate": (_like(1), _like(1)),
    "com.microsoft:GemmaRotaryEmbedding": (_like(1), _like(3)),
    "com.microsoft:GatedRelativePositionBias": (_gated_bias,),
    "com.microsoft:RelativePositionBias": (_position_bias,),
    "com.microsoft:NGramRepeatBlock": (_like(1),),
    "com.microsoft:RestorePadding": (_restored,),
    **{f"com.microsoft:{op}": (_embedding, _samples) for op in ("EmbedLayerNormalization", "QEmbedLayerNormalization")},
    "com.microsoft:TorchEmbedding": (_looked_up,),
    "com.microsoft:GatherBlockQuantized": (_gathered_blocks,),
    "com.microsoft:CropAndResize": (_cropped,),
    "com.microsoft:ExpandDims": (_expanded,),
    "com.microsoft:UnfoldTensor": (_unfolded,),
    "com.microsoft:Rfft": (_spectrum,),
    "com.microsoft:Irfft": (_signal,),
    "ai.onnx.ml:LinearClassifier": (_predictions, _targets(_CLASSES)),
    "ai.onnx.ml:LinearRegressor": (_targets(""),),
    "ai.onnx.ml:SVMClassifier": (_predictions, _targets(_CLASSES)),
    "ai.onnx.ml:SVMRegressor": (_targets(""),),
    "ai.onnx.ml:TreeEnsembleClassifier": (_predictions, _targets(_CLASSES)),
    "ai.onnx.ml:TreeEnsembleRegressor": (_targets(""),),
    "ai.onnx.ml:TreeEnsemble": (_targets(""),),
    "ai.onnx.ml:ArrayFeatureExtractor": (_picked,),
    "ai.onnx.ml:OneHotEncoder": (_categories,),
    "ai.onnx.ml:FeatureVectorizer": (_vector,),
}  # fmt: skip
