"""The cost of a layer on a device: ``layer_costs.estimate`` prices a model layer by layer, by a cost model from here.

A cost model is a pure function from a GEMM and an array to cycles; ``COSTS`` holds the names a user may write. It does
not include the time of weights on the memory channel: ``layer_costs`` counts their bytes, an executor moves them. All
models here are of a weight-stationary array: weights stay, im2col rows stream past them. A fold is one array-full of
weights: ``array_rows`` of the reduction by ``array_columns`` of the output channels.

Modules: ``tiled.py`` and ``explore.py``, batches on tiled NPUs and the search for the best one; ``layer_costs.py``,
the cost of each schedulable layer; ``program.py``, the same in whole ticks of a device's clock.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from weft.base.errors import InputError, unknown_name
from weft.devices import Npu
from weft.models.layer import Gemm

CostModel = Callable[[Gemm, Npu], int]

DEFAULT_COST = "pipelined"


def cost_model(name: str) -> CostModel:
    """The cost model of that name."""
    if name not in COSTS:
        raise InputError(unknown_name("cost model", name, COSTS))
    return COSTS[name]


def ceil_div(a: int, b: int) -> int:
    """*a* / *b*, rounded up."""
    return -(-a // b)


def scalesim_cycles(gemm: Gemm, npu: Npu) -> int:
    """SCALE-Sim's analytic runtime: every fold loads, streams and drains before the next begins.

    Groups run one after another; SCALE-Sim itself does not model them. Engines widen the array.
    """
    rows, columns = npu.array_rows, npu.array_columns * npu.engines
    stream = ceil_div(gemm.m, npu.positions)
    folds = ceil_div(gemm.k, rows) * ceil_div(gemm.n, columns)
    return gemm.groups * (folds * (2 * rows + columns + stream - 2) - 1)


def pipelined_cycles(gemm: Gemm, npu: Npu) -> int:
    """Folds follow each other without a gap: the next fold's weights load while this one streams.

    A fold lasts as long as its rows stream or its successor's weights load, whichever takes longer; the
    array fills and drains once per layer. Small groups share the array as blocks on its diagonal.
    Of the engines, some divide the output tiles and the others the rows, whichever division ends first.
    """
    rows, columns = npu.array_rows, npu.array_columns
    # Groups that share the array.
    packed = min(gemm.groups, max(1, rows // gemm.k), max(1, columns // gemm.n))
    tiles = ceil_div(gemm.groups, packed) * ceil_div(gemm.n, columns)
    load = ceil_div(rows, npu.weight_rows_per_cycle)
    # For each division of the engines: the tiles that an engine computes, times the cycles of a fold.
    folds_and_rows = min(
        ceil_div(tiles, over_tiles) * max(load, ceil_div(gemm.m, npu.positions * (npu.engines // over_tiles)))
        for over_tiles in _divisors(npu.engines)
    )
    return ceil_div(gemm.k, rows) * folds_and_rows + rows + columns - 2


@cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in range(1, number + 1) if number % divisor == 0)


def maestro_cycles(gemm: Gemm, npu: Npu) -> int:
    """MAESTRO's K-C partitioned weight-stationary mapping, in closed form, with ample bandwidth on and off the chip.

    Rows hold input channels, columns output channels; kernel positions are walked in time, one extra cycle per output
    position. Groups run one after another; engines widen the array. Agrees with the tool to a cycle per layer
    (tests/data/npu).
    """
    position_steps = ceil_div(gemm.m, npu.positions)  # npu.positions output positions are computed at once
    columns = npu.array_columns * npu.engines
    if gemm.depthwise:
        group_passes = ceil_div(gemm.groups, npu.array_rows * columns)
        return group_passes * position_steps * gemm.kernel + 1
    passes = ceil_div(gemm.n, columns) * ceil_div(gemm.k // gemm.kernel, npu.array_rows)
    return gemm.groups * (passes * position_steps * (gemm.kernel + 1) + 1)


def roofline_cycles(gemm: Gemm, npu: Npu) -> int:
    """The ideal array, every MAC unit busy in every cycle: MACs over MAC units, rounded up."""
    return ceil_div(gemm.macs, npu.array_rows * npu.array_columns * npu.positions * npu.engines)


COSTS: dict[str, CostModel] = {
    "pipelined": pipelined_cycles,
    "scalesim": scalesim_cycles,
    "maestro": maestro_cycles,
    "roofline": roofline_cycles,
}
"""Cost models by the names that a user may write. To add one, write its function and add a line here."""
