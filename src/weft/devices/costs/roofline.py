"""The ideal array: every MAC unit busy in every cycle."""

from __future__ import annotations

from weft.devices import Npu
from weft.devices.costs.systolic import ceil_div
from weft.models.layer import Gemm


def roofline_cycles(gemm: Gemm, npu: Npu) -> int:
    """MACs over MAC units, rounded up."""
    return ceil_div(gemm.macs, npu.array_rows * npu.array_columns * npu.positions * npu.engines)
