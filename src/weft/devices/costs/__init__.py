"""What a layer costs on a device: ``layer_costs.estimate`` prices a model layer by layer, by a cost model from here.

A cost model is a pure function from a GEMM and an array to cycles; ``COSTS`` holds the names a user may write. The time
that weights take on the memory channel is not its affair: ``layer_costs`` counts their bytes, an executor moves them.

Its modules: one function per cost model; ``tiled.py`` and ``explore.py``, batches on tiled NPUs and the search for the
best one; ``pccs_fit.py``, contention fitted to measurements; ``layer_costs.py``, what each schedulable layer costs;
``program.py``, the same in whole ticks of a device's clock.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.base.errors import InputError, unknown_name
from weft.devices import Npu
from weft.devices.costs.maestro import maestro_cycles
from weft.devices.costs.roofline import roofline_cycles
from weft.devices.costs.systolic import pipelined_cycles, scalesim_cycles
from weft.models.layer import Gemm

CostModel = Callable[[Gemm, Npu], int]

COSTS: dict[str, CostModel] = {
    "pipelined": pipelined_cycles,
    "scalesim": scalesim_cycles,
    "maestro": maestro_cycles,
    "roofline": roofline_cycles,
}
"""The names a user may write. To add a cost model, write it and add one line here."""

DEFAULT_COST = "pipelined"


def cost_model(name: str) -> CostModel:
    """The cost model of that name."""
    if name not in COSTS:
        raise InputError(unknown_name("cost model", name, COSTS))
    return COSTS[name]


__all__ = [
    "COSTS",
    "DEFAULT_COST",
    "CostModel",
    "cost_model",
    "maestro_cycles",
    "pipelined_cycles",
    "roofline_cycles",
    "scalesim_cycles",
]
