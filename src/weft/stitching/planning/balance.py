"""A plan that is fast and light: ``balanced``.

The fastest plan often keeps copies of shared weights. One that is allowed fewer may be nearly as fast; the lightest
within a stated slack is taken. What was costed once is remembered, so that further plans cost little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.errors import StitchError
from weft.stitching.family import Family
from weft.stitching.graph import Graph
from weft.stitching.planning.cost import Cost
from weft.stitching.planning.planner import Plan, lower_plan, plan
from weft.stitching.planning.signatures import signature
from weft.stitching.sharing import Sharing
from weft.stitching.summary import kernels

SLACK = 0.05
"""How much slower than the fastest a plan with fewer weights may be, where nothing else is said."""
STEPS = (0.05, 0.25, 0.5, 0.75)
"""Where plans are tried on the way from every weight once to the weights of the fastest."""
NUMBER_BYTES = 4


@dataclass(frozen=True, eq=False)
class Remembered:
    """A cost that is asked once for graphs that differ only in their numbers."""

    cost: Cost
    known: dict[str, float] = field(default_factory=dict)

    def seconds(self, graphs: Sequence[Graph]) -> list[float]:
        keys = [signature(graph) for graph in graphs]
        new = {key: graph for key, graph in zip(keys, graphs, strict=True) if key not in self.known}
        if new:
            self.known.update(zip(new, self.cost.seconds(list(new.values())), strict=True))
        return [self.known[key] for key in keys]


def balanced(family: Family, sharing: Sharing, cost: Cost, *, slack: float = SLACK, **settings: Any) -> Plan:
    """The plan with the fewest weights that is slower than the fastest by no more than *slack* of its time.

    *settings* are those of ``planner.plan``.
    """
    if not slack >= 0:
        raise StitchError(f"slack {slack}: give 0 for the fastest plan, or how much slower it may be, as 0.05")
    cost = Remembered(cost)
    best = plan(family, sharing, cost, **settings)
    if slack == 0:
        return best
    heavy = lower_plan(family, sharing, best).weight_bytes
    light = NUMBER_BYTES * kernels(family, sharing).unique
    for step in STEPS if heavy > light else ():
        leaner = _within(light + int(step * (heavy - light)), family, sharing, cost, settings)
        if leaner is not None and leaner.seconds[leaner.name] <= best.seconds[best.name] * (1 + slack):
            return leaner
    return best


def _within(cap: int, family: Family, sharing: Sharing, cost: Cost, settings: dict[str, Any]) -> Plan | None:
    """The fastest plan whose weights take no more than *cap* bytes, if there is one."""
    try:
        return plan(family, sharing, cost, **{**settings, "weight_cap_bytes": cap})
    except StitchError:
        return None
