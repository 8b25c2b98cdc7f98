"""A weight-stationary systolic array: weights stay, im2col rows stream past them.

A fold is one array-full of weights: ``array_rows`` of the reduction by ``array_columns`` of the
output channels.
"""

from __future__ import annotations

from functools import cache

from weft.devices import Npu
from weft.models.layer import Gemm


def ceil_div(a: int, b: int) -> int:
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

    A fold lasts as long as its rows stream or its successor's weights load, whichever is longer; the
    array fills and drains once per layer. Small groups share the array as blocks on its diagonal.
    Engines share out the output tiles and the rows, in the division that ends first.
    """
    rows, columns = npu.array_rows, npu.array_columns
    packed = min(gemm.groups, max(1, rows // gemm.k), max(1, columns // gemm.n))
    tiles = ceil_div(gemm.groups, packed) * ceil_div(gemm.n, columns)
    load = ceil_div(rows, npu.weight_rows_per_cycle)
    folds_and_rows = min(
        ceil_div(tiles, over_tiles) * max(load, ceil_div(gemm.m, npu.positions * (npu.engines // over_tiles)))
        for over_tiles in _divisors(npu.engines)
    )
    return ceil_div(gemm.k, rows) * folds_and_rows + rows + columns - 2


@cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(part for part in range(1, number + 1) if number % part == 0)
