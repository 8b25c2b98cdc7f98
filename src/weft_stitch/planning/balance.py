"""A plan that is fast and light: ``contest`` finds what to choose from.

The fastest plan often keeps copies of shared weights. One that is allowed fewer may be nearly as fast; the lightest
within a stated slack is taken. Whole graphs are compared, as what layers take alone does not add up on a real machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.base.errors import StitchError
from weft_stitch.counts import count
from weft_stitch.emit import plain_graph
from weft_stitch.family import Family
from weft_stitch.graph import Graph
from weft_stitch.planning.cost import GraphCost
from weft_stitch.planning.planner import Plan, plans
from weft_stitch.planning.signatures import signature
from weft_stitch.sharing import Sharing
from weft_stitch.summary import kernels

SLACK = 0.05
"""How much slower than the fastest a plan with fewer weights may be, where nothing else is said."""
STEPS = (0.05, 0.25, 0.5, 0.75)
"""Where plans are tried on the way from every weight once to the weights of the fastest."""
NUMBER_BYTES = 4


@dataclass(frozen=True, eq=False)
class Remembered:
    """A cost that is asked once for graphs that differ only in their numbers."""

    cost: GraphCost
    known: dict[str, float] = field(default_factory=dict)

    def seconds(self, graphs: Sequence[Graph]) -> list[float]:
        keys = [signature(graph) for graph in graphs]
        new = {key: graph for key, graph in zip(keys, graphs, strict=True) if key not in self.known}
        if new:
            self.known.update(zip(new, self.cost.seconds(list(new.values())), strict=True))
        return [self.known[key] for key in keys]


@dataclass(frozen=True, eq=False)
class Contest:
    """Plans of one family, and the rule by which one of them is chosen."""

    plans: tuple[Plan, ...]
    slack: float = SLACK
    most_bytes: int | None = None
    """More weights than these are stored only by a plan that has no rival with fewer."""

    def choose(self, seconds: Sequence[float] | None = None) -> int:
        """Which has the fewest weights and is slower than the fastest by no more than the slack.

        *seconds* are times taken later, instead of the plans' own.
        """
        times = [each.own_s for each in self.plans] if seconds is None else seconds
        places = range(len(times))
        most = self.most_bytes
        allowed = [at for at in places if most is None or self.plans[at].weight_bytes <= most] or list(places)
        limit_s = max(min(times) * (1 + self.slack), min(times[at] for at in allowed))
        fitting = [at for at in allowed if times[at] <= limit_s]
        return min(fitting, key=lambda at: (self.plans[at].weight_bytes, times[at], at))

    @property
    def chosen(self) -> Plan:
        return self.plans[self.choose()]


def contest(family: Family, sharing: Sharing, cost: GraphCost, *, slack: float = SLACK, **settings: Any) -> Contest:
    """Plans costed as whole graphs. *settings* are those of ``planner.plans``.

    Where there is slack, the one chosen stores no more weights than the models do; without, the fastest is chosen.
    """
    if not slack >= 0:
        raise StitchError(f"slack {slack}: give 0 for the fastest plan, or how much slower it may be, as 0.05")
    light = NUMBER_BYTES * kernels(family, sharing).unique
    alone = [plain_graph(net) for net in family.nets]
    heavy = sum(graph.weight_bytes for graph in alone)
    settings |= {"between": STEPS if slack else (), "lightest_bytes": light, "heaviest_bytes": heavy}
    found = plans(family, sharing, Remembered(cost), **settings)
    return Contest(tuple(found), slack, sum(count(graph).weight_bytes for graph in alone) if slack else None)
