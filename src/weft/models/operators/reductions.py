"""Reductions, softmax, pools and other operators that combine elements along axes."""

from __future__ import annotations

from functools import partial

from weft.models.operators.operator import BLOCKED, EVERY_INPUT, MICROSOFT, Operator, StitchForm
from weft.models.operators.rules import costs, meanings, rows, window_meanings
from weft.models.operators.rules.meanings import over_axes, product_over_axes
from weft.models.operators.rules.shapes import like, pooled_away, reduced, signal, spectrum, windowed

_along_axes = partial(Operator, cost=costs.elementwise)
_reduction = partial(_along_axes, rows=rows.reduced, sized_by=(1,))

_pool = partial(Operator, cost=costs.pool)
_blocked = partial(_pool, rows=rows.kept_apart(0, 3))

OPERATORS = (
    _reduction("ReduceSum", torch=meanings.reduced(over_axes("sum"))),
    _reduction("ReduceMean", torch=meanings.reduced(over_axes("mean")), stitching=StitchForm("mean")),
    _reduction("ReduceMax", torch=meanings.reduced(over_axes("amax")), stitching=StitchForm("largest")),
    _reduction("ReduceMin", torch=meanings.reduced(over_axes("amin"))),
    _reduction("ReduceProd", torch=meanings.reduced(product_over_axes)),
    _reduction("ReduceL1", torch=meanings.reduced(over_axes("sum"), before="abs")),
    _reduction("ReduceL2", torch=meanings.reduced(over_axes("sum"), before="square", after="sqrt")),
    _reduction("ReduceSumSquare", torch=meanings.reduced(over_axes("sum"), before="square")),
    _reduction("ReduceLogSum", torch=meanings.reduced(over_axes("sum"), after="log")),
    _reduction("ReduceLogSumExp", torch=meanings.reduced(over_axes("logsumexp"))),
    _along_axes("ArgMax", rows=rows.along_axis(0), torch=meanings.extreme("argmax")),
    _along_axes("ArgMin", rows=rows.along_axis(0), torch=meanings.extreme("argmin")),
    _along_axes("CumSum", rows=rows.cumulated, torch=meanings.cumulated("cumsum", 0), numbers=(1,)),
    _along_axes("CumProd", rows=rows.cumulated, torch=meanings.cumulated("cumprod", 1), numbers=(1,)),
    _along_axes("Softmax", rows=rows.softmax, torch=meanings.softmax("softmax")),
    _along_axes("LogSoftmax", rows=rows.softmax, torch=meanings.softmax("log_softmax")),
    _along_axes("Hardmax", rows=rows.softmax, torch=meanings.hardmax),
    Operator("TopK", cost=costs.movement, rows=rows.along_axis(-1), sized_by=(1,), torch=meanings.top_k),
    _along_axes("NegativeLogLikelihoodLoss"),
    _along_axes("SoftmaxCrossEntropyLoss"),
    _along_axes(f"{MICROSOFT}QLinearSoftmax", shapes=(like(0),), rows=rows.softmax),
    _along_axes(f"{MICROSOFT}BiasSoftmax", shapes=(like(0),)),
    _along_axes(f"{MICROSOFT}QLinearReduceMean", shapes=(reduced,)),
    _along_axes(f"{MICROSOFT}ReduceSumInteger", shapes=(reduced,)),
    # Matrices and transforms, of which weft does not know the cost
    Operator("Det", rows=rows.last_two_axes, torch=meanings.call("linalg.det")),
    Operator(f"{MICROSOFT}Inverse", shapes=(like(0),), rows=rows.last_two_axes, torch=meanings.call("linalg.inv")),
    Operator("DFT", rows=rows.fourier, sized_by=(1, 2)),
    Operator("STFT", rows=rows.kept_apart(0), sized_by=(1, 3)),
    Operator(f"{MICROSOFT}Rfft", shapes=(spectrum,)),
    Operator(f"{MICROSOFT}Irfft", shapes=(signal,)),
    Operator(f"{MICROSOFT}DynamicTimeWarping", sized_by=EVERY_INPUT),
    # Pools, and operators on regions of an image
    _pool("MaxPool", rows=rows.from_axis(2), torch=window_meanings.max_pool, stitching=StitchForm("pool", "max_pool")),
    _pool(
        "AveragePool",
        rows=rows.from_axis(2),
        torch=window_meanings.average_pool,
        stitching=StitchForm("pool", "avg_pool"),
    ),
    _pool("LpPool", rows=rows.from_axis(2)),
    _pool(
        "GlobalAveragePool",
        rows=rows.from_axis(2),
        torch=window_meanings.global_average,
        stitching=StitchForm("global_average"),
    ),
    _pool(
        "GlobalMaxPool",
        rows=rows.from_axis(2),
        torch=window_meanings.global_max,
        stitching=StitchForm("global_max"),
    ),
    _pool("GlobalLpPool", rows=rows.from_axis(2), torch=window_meanings.global_lp),
    _pool("MaxRoiPool", sized_by=(1,)),
    _pool("RoiAlign", sized_by=(1,)),
    _pool("MaxUnpool", sized_by=(2,)),
    # ONNX Runtime's
    _pool(f"{MICROSOFT}QLinearAveragePool", shapes=(windowed(None),), rows=rows.from_axis(1)),
    _pool(f"{MICROSOFT}QLinearGlobalAveragePool", shapes=(pooled_away,), rows=rows.from_axis(1)),
    _pool(f"{MICROSOFT}NhwcMaxPool", shapes=(windowed(None, True),), rows=rows.kept_apart(0)),
    _pool(f"{MICROSOFT}MaxpoolWithMask", shapes_of=("MaxPool", 1)),
    _blocked(f"{BLOCKED}MaxPool", shapes_of=("MaxPool", 1)),
    _blocked(f"{BLOCKED}AveragePool", shapes_of=("AveragePool", 1)),
    _blocked(f"{BLOCKED}GlobalMaxPool", shapes_of=("GlobalMaxPool", 1)),
    _blocked(f"{BLOCKED}GlobalAveragePool", shapes_of=("GlobalAveragePool", 1)),
)
