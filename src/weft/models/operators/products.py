"""Products: convolutions, products of matrices, with plain, packed and quantised weights."""

from __future__ import annotations

from functools import partial

from weft.models.operators.operator import BLOCKED, MICROSOFT, Operator, StitchForm
from weft.models.operators.rules import meanings, packed_costs, product_costs, rows, window_meanings
from weft.models.operators.rules.language_shapes import causal_state, gated_bias
from weft.models.operators.rules.shapes import (
    columns,
    columns_of,
    like,
    ordered_product,
    pairs,
    product,
    stated_columns,
    transposed_convolution,
    windowed,
    word_convolution,
)

_conv = partial(Operator, cost=product_costs.conv)
_matmul = partial(Operator, cost=product_costs.matmul)
_gemm = partial(Operator, cost=product_costs.gemm)
_packed_columns = (columns("N"), like(0))

CONVOLUTIONS = (
    _conv("Conv", product=True, rows=rows.convolution, torch=window_meanings.conv, stitching=StitchForm("convolution")),
    Operator(
        "ConvTranspose",
        cost=product_costs.conv_transpose,
        rows=rows.convolution,
        torch=window_meanings.conv_transpose,
    ),
    Operator("ConvInteger", cost=product_costs.conv_integer, rows=rows.convolution),
    Operator("DeformConv", cost=partial(product_costs.conv, bias=3)),
    Operator("QLinearConv", cost=partial(product_costs.conv, w=3, bias=8), rows=rows.convolution),
    Operator("CausalConvWithState", cost=packed_costs.causal_conv, shapes=(like(0), causal_state)),
    # ONNX Runtime's
    _conv(
        f"{MICROSOFT}FusedConv",
        product=True,
        shapes_of=("Conv", 3),
        rows=rows.convolution,
        torch=window_meanings.fused_conv,
    ),
    *(
        Operator(
            f"{MICROSOFT}{name}",
            cost=partial(product_costs.conv, channels=-1),
            product=True,
            shapes=(windowed(1, True),),
        )
        for name in ("NhwcConv", "NhwcFusedConv")
    ),
    _conv(f"{BLOCKED}Conv", product=True, shapes_of=("Conv", 3), rows=rows.kept_apart(0, 3)),
    Operator(f"{MICROSOFT}QLinearConv", cost=packed_costs.qlinear_conv, shapes=(windowed(3),), rows=rows.convolution),
    Operator(
        f"{MICROSOFT}ConvTransposeWithDynamicPads",
        cost=partial(product_costs.conv_transpose, bias=3),
        shapes=(transposed_convolution,),
        sized_by=(2,),
    ),
    Operator(f"{MICROSOFT}CausalConvWithState", cost=packed_costs.causal_conv, shapes=(like(0), causal_state)),
    Operator(
        f"{MICROSOFT}VarlenCausalConvWithState",
        cost=partial(packed_costs.causal_conv, bias=3),
        shapes=(like(0), like(4)),
    ),
    Operator(f"{MICROSOFT}WordConvEmbedding", cost=packed_costs.word_conv, shapes=(word_convolution,)),
)

MATRICES = (
    _gemm(
        "Gemm", product=True, rows=rows.matrices(added=2), torch=meanings.gemm, stitching=StitchForm("gemm")
    ),
    _matmul(
        "MatMul",
        product=True,
        rows=rows.matrices(),
        torch=meanings.call("matmul"),
        stitching=StitchForm("matmul"),
    ),
    _matmul("MatMulInteger", rows=rows.matrices(), torch=meanings.matmul_integer),
    Operator("QLinearMatMul", cost=partial(product_costs.matmul, b=3), rows=rows.matrices(0, 3)),
    Operator("Einsum", cost=product_costs.einsum, rows=rows.einsum, torch=meanings.einsum),
    # ONNX Runtime's
    _gemm(
        f"{MICROSOFT}FusedGemm",
        product=True,
        shapes=(product(1),),
        rows=rows.matrices(added=2),
        torch=meanings.fused_gemm,
    ),
    _gemm(
        f"{MICROSOFT}FusedMatMul",
        product=True,
        shapes=(product(1),),
        rows=rows.matrices(),
        torch=meanings.fused_matmul,
    ),
    _gemm(f"{MICROSOFT}FusedMatMulActivation", shapes=(product(1),)),
    _gemm(f"{MICROSOFT}TransposeMatMul", shapes=(product(1),)),
    _gemm(f"{MICROSOFT}GemmFastGelu", shapes=(product(1),)),
    _gemm(f"{MICROSOFT}GemmFloat8", shapes=(product(1),)),
    _gemm(f"{MICROSOFT}SparseToDenseMatMul", shapes=(product(1),)),
    _gemm(f"{MICROSOFT}DynamicQuantizeMatMul", cost=partial(product_costs.gemm, c=4), shapes=(product(1),),
          rows=rows.mixes_rows),
    _gemm(f"{MICROSOFT}MatMulIntegerToFloat", cost=partial(product_costs.gemm, c=6), shapes=(product(1),),
          rows=rows.matrices()),
    _gemm(f"{MICROSOFT}QGemm", cost=partial(product_costs.gemm, b=3, c=6), shapes=(product(3),),
          rows=rows.matrices(0, 3, 6)),
    _matmul(f"{MICROSOFT}MatMulInteger16", shapes=(product(1),)),
    Operator(f"{MICROSOFT}QOrderedMatMul", cost=product_costs.ordered_matmul, shapes=(ordered_product,)),
    Operator(f"{MICROSOFT}CDist", cost=product_costs.distances, shapes=(pairs,)),
    Operator(f"{MICROSOFT}MatMulNBits", cost=packed_costs.matmul_nbits, shapes=_packed_columns),
    Operator(f"{MICROSOFT}MatMulNBitsMlp", cost=packed_costs.nbits_mlp, shapes=_packed_columns),
    Operator(
        f"{MICROSOFT}MatMulNBitsQkv",
        cost=packed_costs.nbits_qkv,
        shapes=(columns("Nq"), columns("Nkv"), columns("Nkv"), like(0)),
    ),
    Operator(f"{MICROSOFT}MatMulBnb4", cost=packed_costs.matmul_bnb4, shapes=_packed_columns),
    Operator(f"{MICROSOFT}MatMulFpQ4", cost=packed_costs.matmul_fpq4, shapes=(stated_columns,)),
    *(
        Operator(
            f"{MICROSOFT}MatMulBlockQuantizedFp{bits}Weight",
            cost=partial(packed_costs.matmul_floats, bits=bits),
            shapes=(columns_of(1, 0),),
        )
        for bits in (4, 8)
    ),
    Operator(f"{MICROSOFT}MoE", cost=packed_costs.moe, shapes=(like(0),)),
    Operator(f"{MICROSOFT}QMoE", cost=packed_costs.q_moe, shapes=(like(0),)),
    Operator(
        f"{MICROSOFT}GatedRelativePositionBias", cost=packed_costs.gated_position_bias, shapes=(gated_bias,)
    ),
)  # fmt: skip

OPERATORS = (*CONVOLUTIONS, *MATRICES)
