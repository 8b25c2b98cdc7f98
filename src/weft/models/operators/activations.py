"""Activations: elementwise functions of one tensor; directly after a matrix product they cost nothing."""

from __future__ import annotations

from functools import partial

from weft.models.operators.operator import MICROSOFT, Operator, StitchForm
from weft.models.operators.rules import costs, meanings, rows
from weft.models.operators.rules.meanings import call
from weft.models.operators.rules.shapes import like

_activation = partial(Operator, cost=costs.elementwise, fuses=True, rows=rows.elementwise)
_older = partial(_activation, shapes=(like(0),))
"""Entries of operators whose output shapes older versions of ONNX's inference leave open."""

OPERATORS = (
    _older("Relu", torch=call("relu"), stitching=StitchForm("unary", "Relu", keeps_zero=True)),
    _older("Sigmoid", torch=call("sigmoid"), stitching=StitchForm("unary", "Sigmoid")),
    _older("Tanh", torch=call("tanh"), stitching=StitchForm("unary", "Tanh", keeps_zero=True)),
    _older(
        "LeakyRelu",
        torch=lambda t, x: t.nn.leaky_relu(x, t.get("alpha", 0.01)),
        stitching=StitchForm("unary", "LeakyRelu", {"alpha": 0.01}, keeps_zero=True),
    ),
    _older(
        "Elu",
        torch=lambda t, x: t.nn.elu(x, t.get("alpha", 1.0)),
        stitching=StitchForm("unary", "Elu", {"alpha": 1.0}, keeps_zero=True),
    ),
    _older(
        "HardSigmoid",
        torch=meanings.hard_sigmoid,
        stitching=StitchForm("unary", "HardSigmoid", {"alpha": 0.2, "beta": 0.5}),
    ),
    _older("Clip", torch=meanings.clip, numbers=(1, 2), stitching=StitchForm("clip", "Clip")),
    _older("Selu", torch=meanings.selu),
    _older(
        "PRelu",
        cost=costs.prelu,
        torch=lambda t, x, slope: t.torch.where(x < 0, x * slope, x),
        stitching=StitchForm("prelu"),
    ),
    _activation(
        "HardSwish",
        torch=call("nn.functional.hardswish"),
        stitching=StitchForm("unary", "HardSwish", keeps_zero=True),
    ),
    _activation(
        "Gelu",
        torch=lambda t, x: t.nn.gelu(x, approximate=t.get("approximate", "none")),
        stitching=StitchForm("gelu", "Gelu", keeps_zero=True),
    ),
    _activation(
        "Swish",
        torch=lambda t, x: x * t.torch.sigmoid(t.get("alpha", 1.0) * x),
        stitching=StitchForm("swish", "Silu", keeps_zero=True),
    ),
    _activation("Softplus", torch=call("nn.functional.softplus"), stitching=StitchForm("unary", "Softplus")),
    _activation("Softsign", torch=call("nn.functional.softsign")),
    _activation("Mish", torch=call("nn.functional.mish")),
    _activation("Celu", torch=lambda t, x: t.nn.celu(x, t.get("alpha", 1.0))),
    _activation("ThresholdedRelu", torch=lambda t, x: t.torch.where(x > t.get("alpha", 1.0), x, 0.0)),
    _activation("Erf", torch=call("erf")),
    # ONNX Runtime's, of which some are in the standard domain
    _older(f"{MICROSOFT}Gelu", torch=call("nn.functional.gelu")),
    _older(f"{MICROSOFT}FastGelu", torch=meanings.fast_gelu),
    _older(f"{MICROSOFT}BiasGelu", torch=lambda t, x, bias: t.nn.gelu(x + bias)),
    _older(f"{MICROSOFT}QuickGelu", torch=lambda t, x: x * t.torch.sigmoid(t.get("alpha", 1.702) * x)),
    _older("ParametricSoftplus", rows=None),
    _older("ScaledTanh", rows=None),
    _older(f"{MICROSOFT}QLinearSigmoid", rows=rows.elementwise_of(0)),
    _older(f"{MICROSOFT}QLinearLeakyRelu", rows=rows.elementwise_of(0)),
    _older(f"{MICROSOFT}ScaledSiLU", rows=None),
    _older(f"{MICROSOFT}QOrderedGelu", rows=None),
)
