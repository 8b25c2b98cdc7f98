"""MAESTRO's K-C partitioned weight-stationary mapping, in closed form.

Rows hold input channels, columns output channels; kernel positions are walked in time, one extra
cycle per output position. Agrees with the tool to a cycle per layer (tests/data/npu).
"""

from __future__ import annotations

from weft.devices import Npu
from weft.devices.costs.systolic import ceil_div
from weft.models.layer import Gemm


def maestro_cycles(gemm: Gemm, npu: Npu) -> int:
    """Cycles with ample on-chip and off-chip bandwidth; groups run one after another; engines widen the array."""
    positions = ceil_div(gemm.m, npu.positions)
    columns = npu.array_columns * npu.engines
    if gemm.depthwise:
        spread = ceil_div(gemm.groups, npu.array_rows * columns)
        return spread * positions * gemm.kernel + 1
    passes = ceil_div(gemm.n, columns) * ceil_div(gemm.k // gemm.kernel, npu.array_rows)
    return gemm.groups * (passes * positions * (gemm.kernel + 1) + 1)
