"""Published methods of placing models on machines, for comparison with ``weft place``.

Each is a function of the placing problem. ``RIVALS`` use as few machines as they can; ``SPREADERS`` use all machines.
All respect memory, deadlines and placement rules, and may divide a model's requests between machines. Where a method
does not define how the times of models on a machine add up, it is given weft's two loads
(``PlacingProblem.model_loads``).
"""

from __future__ import annotations

from weft_cluster.routing.placing_run import greedy
from weft_papers.placing_rivals.alpaserve import beam, integer_programme
from weft_papers.placing_rivals.gpulets import elastic
from weft_papers.placing_rivals.nexus import squishy
from weft_papers.placing_rivals.spreading import Rival, like_with_like, on_fewest, one_resource, round_robin

SPREADERS: dict[str, Rival] = {
    "round-robin": round_robin,
    "alpaserve-greedy": greedy,
    "alpaserve-beam": beam,
    "alpaserve-ilp": integer_programme,
}
"""Placement methods that use all machines."""

RIVALS: dict[str, Rival] = {
    **{name: on_fewest(method) for name, method in SPREADERS.items()},
    "one-resource": one_resource,
    "like-with-like": like_with_like,
    "nexus": squishy,
    "gpulets": elastic,
}
"""Placement methods that look for the fewest machines."""

__all__ = ["RIVALS", "SPREADERS", "Rival"]
