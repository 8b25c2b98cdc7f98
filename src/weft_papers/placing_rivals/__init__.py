"""Other people's placements, from their published rules, to be judged as ours is.

Each is a function of the problem. ``RIVALS`` use as few machines as they can; ``SPREADERS`` use all that there are. All
keep to memory, deadlines and rules, are given the two loads of a machine where their own rules do not say how time adds
up, and may divide a model's requests.
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
