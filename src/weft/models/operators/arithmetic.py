"""Arithmetic, comparisons and logic, element by element."""

from __future__ import annotations

from functools import partial

from weft.models.operators.operator import MICROSOFT, Operator, StitchForm
from weft.models.operators.rules import costs, meanings, rows
from weft.models.operators.rules.meanings import call, chained
from weft.models.operators.rules.shapes import common, fixed, halved, like

_elementwise = partial(Operator, cost=costs.elementwise, rows=rows.elementwise)
_fused = partial(_elementwise, fuses=True)
"""Operators of which biases, scales and activations out of single operators consist."""
_runtimes = partial(Operator, cost=costs.elementwise)
"""Operators of ONNX Runtime. Without a row rule, models with them are not batched."""
_same = (like(0),)

OPERATORS = (
    _fused("Add", shapes=_same, torch=call("add"), stitching=StitchForm("add")),
    _fused("Sub", shapes=_same, torch=call("sub"), stitching=StitchForm("sub")),
    _fused("Mul", shapes=_same, torch=call("mul"), stitching=StitchForm("mul")),
    _fused("Div", shapes=_same, torch=meanings.divide, stitching=StitchForm("div")),
    _fused("Sum", shapes=_same, torch=chained("add"), stitching=StitchForm("sum")),
    _fused("Min", shapes=_same, torch=chained("minimum"), stitching=StitchForm("min")),
    _fused("Max", shapes=_same, torch=chained("maximum"), stitching=StitchForm("max")),
    _fused("Pow", torch=meanings.power, stitching=StitchForm("pow")),
    _fused("Sqrt", shapes=_same, torch=call("sqrt"), stitching=StitchForm("unary", "Sqrt", keeps_zero=True)),
    _fused("Exp", shapes=_same, torch=call("exp"), stitching=StitchForm("unary", "Exp")),
    _fused("Log", shapes=_same, torch=call("log")),
    _fused("Neg", shapes=_same, torch=call("neg"), stitching=StitchForm("unary", "Neg", keeps_zero=True)),
    _fused("Abs", shapes=_same, torch=call("abs"), stitching=StitchForm("unary", "Abs", keeps_zero=True)),
    _fused("Reciprocal", shapes=_same, torch=call("reciprocal")),
    _fused("Cast", cost=costs.movement, torch=lambda t, x: x.to(t.dtype(t.get("to"))), stitching=StitchForm("cast")),
    _elementwise("CastLike", cost=costs.movement, rows=None, torch=lambda t, x, like: x.to(like.dtype)),
    _elementwise("BitCast", cost=costs.movement, rows=None),
    _elementwise("Mean", shapes=_same, torch=meanings.mean_of),
    _elementwise("Mod", torch=meanings.modulo),
    _elementwise("Floor", shapes=_same, torch=call("floor")),
    _elementwise("Ceil", shapes=_same, torch=call("ceil")),
    _elementwise("Round", torch=call("round")),
    _elementwise("Sign", torch=call("sign")),
    _elementwise("Shrink", torch=meanings.shrink),
    _elementwise("Acos", torch=call("acos")),
    _elementwise("Acosh", torch=call("acosh")),
    _elementwise("Asin", torch=call("asin")),
    _elementwise("Asinh", torch=call("asinh")),
    _elementwise("Atan", torch=call("atan")),
    _elementwise("Atanh", torch=call("atanh")),
    _elementwise("Cos", torch=call("cos")),
    _elementwise("Cosh", torch=call("cosh")),
    _elementwise("Sin", torch=call("sin")),
    _elementwise("Sinh", torch=call("sinh")),
    _elementwise("Tan", torch=call("tan")),
    # Comparisons, logic and bits
    _elementwise("Equal", torch=call("eq")),
    _elementwise("Greater", torch=call("gt")),
    _elementwise("GreaterOrEqual", shapes=(common(0, 1),), torch=call("ge")),
    _elementwise("Less", torch=call("lt")),
    _elementwise("LessOrEqual", shapes=(common(0, 1),), torch=call("le")),
    _elementwise("And", torch=call("logical_and")),
    _elementwise("Or", torch=call("logical_or")),
    _elementwise("Xor", torch=call("logical_xor")),
    _elementwise("Not", torch=call("logical_not")),
    _elementwise("Where", torch=call("where")),
    _elementwise("IsNaN", torch=call("isnan")),
    _elementwise("IsInf", torch=meanings.is_infinite),
    _elementwise("BitwiseAnd", torch=call("bitwise_and")),
    _elementwise("BitwiseOr", torch=call("bitwise_or")),
    _elementwise("BitwiseXor", torch=call("bitwise_xor")),
    _elementwise("BitwiseNot", torch=call("bitwise_not")),
    _elementwise("BitShift", torch=meanings.shift),
    # Quantised values
    Operator("QuantizeLinear", cost=costs.free, view=True, rows=rows.elementwise_of(0), torch=meanings.quantize),
    Operator("DequantizeLinear", cost=costs.free, view=True, rows=rows.elementwise_of(0), torch=meanings.dequantize),
    Operator(f"{MICROSOFT}QuantizeLinear", cost=costs.free, view=True, shapes=_same, rows=rows.elementwise_of(0)),
    Operator(f"{MICROSOFT}DequantizeLinear", cost=costs.free, view=True, shapes=_same, rows=rows.elementwise_of(0)),
    Operator(f"{MICROSOFT}QuantizeWithOrder", cost=costs.free, view=True, shapes=_same),
    Operator(f"{MICROSOFT}DequantizeWithOrder", cost=costs.free, view=True, shapes=_same),
    Operator("DynamicQuantizeLinear", cost=costs.elementwise, rows=rows.mixes_rows),
    Operator(
        f"{MICROSOFT}DynamicQuantizeLinear",
        cost=costs.elementwise,
        shapes=(like(0), fixed(), fixed()),
        rows=rows.mixes_rows,
    ),
    _runtimes(f"{MICROSOFT}QLinearAdd", shapes=(common(0, 3),), rows=rows.elementwise_of(0, 3)),
    _runtimes(f"{MICROSOFT}QLinearMul", shapes=(common(0, 3),), rows=rows.elementwise_of(0, 3)),
    _runtimes(f"{MICROSOFT}QLinearWhere", shapes=(common(0, 1, 4),)),
    _runtimes(f"{MICROSOFT}MulInteger", shapes=(common(0, 2),)),
    # ONNX Runtime's
    _runtimes(f"{MICROSOFT}BiasAdd", shapes=_same),
    _runtimes(f"{MICROSOFT}BiasSplitGelu", shapes=(halved,)),
    _runtimes(f"{MICROSOFT}BiasDropout", shapes=(like(0), like(0))),
    _runtimes(f"{MICROSOFT}BitmaskBiasDropout", shapes=_same),
    _runtimes(f"{MICROSOFT}ComplexMul", shapes=(common(0, 1),)),
    _runtimes(f"{MICROSOFT}ComplexMulConj", shapes=(common(0, 1),)),
    _runtimes(f"{MICROSOFT}EngramGate", shapes=(like(1), like(1))),
    _runtimes(f"{MICROSOFT}GatedAdd", shapes=_same),
    _runtimes(f"{MICROSOFT}HyperConnectionPostMix", shapes=_same),
    _runtimes(f"{MICROSOFT}HyperConnectionPreMix"),
    _runtimes(f"{MICROSOFT}IsAllFinite", shapes=(fixed(),)),
    _runtimes(f"{MICROSOFT}LinearAttentionGate", shapes=(like(0), like(3))),
    _runtimes(f"{MICROSOFT}MurmurHash3", shapes=_same),
    _runtimes(f"{MICROSOFT}NGramHashMapping"),
    _runtimes(f"{MICROSOFT}VarlenNGramHashMapping"),
    _runtimes(f"{MICROSOFT}SampleOp", shapes=_same),
    _runtimes("Affine", shapes=_same),
    _runtimes("ImageScaler", shapes=_same),
    _runtimes("Scale", shapes=_same),
    _runtimes("SwiGLU"),
)
