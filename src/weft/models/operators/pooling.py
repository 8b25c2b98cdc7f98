"""Pools, and operators on regions of an image."""

from __future__ import annotations

from functools import partial

from weft.models.operators.operator import BLOCKED, MICROSOFT, Operator, StitchForm
from weft.models.operators.rules import costs, rows, window_meanings
from weft.models.operators.rules.window_shapes import pooled_away, windowed

_pool = partial(Operator, cost=costs.pool)
_blocked = partial(_pool, rows=rows.kept_apart(0, 3))

OPERATORS = (
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
