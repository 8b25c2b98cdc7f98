"""Autoscaling: the number of servers of a machine, from the load of both its resources, not from queue lengths.

A queue tells that it is too late. What requests take of the array and of the memory channel is known beforehand
(``placing``), so the rate at which they come says how busy a server will be. ``needed`` is a pure function; ``policy``
is what Ray calls with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from weft_cluster.placing.placement import PlacedMachine

COMPUTE, BANDWIDTH = "weft_compute", "weft_bandwidth"
"""Names of a server's two predicted loads among its metrics."""
LOWER = 0.1
"""A server is given up only if the others stay so far below the cap, so that rates that waver add and remove none."""


class ServerLoad(NamedTuple):
    """Load of a server's resources, as shares of its time, with the time that does not overlap; above 1: overload."""

    compute: float
    bandwidth: float


def predicted(machine: PlacedMachine, rates: Mapping[str, float], refused: Mapping[str, float]) -> ServerLoad:
    """The loads of a machine at the *rates* that it serves plus those that gates *refused*, in requests per second."""
    compute = bandwidth = other = 0.0
    for placed in machine.models:
        asked = rates.get(placed.model, 0.0) + refused.get(placed.model, 0.0)
        times = asked / placed.rate if placed.rate else 0.0
        compute, bandwidth, other = (
            compute + times * placed.compute,
            bandwidth + times * placed.bandwidth,
            other + times * placed.other,
        )
    beside = 1 - machine.overlap
    return ServerLoad(compute + beside * bandwidth + other, bandwidth + beside * compute + other)


def needed(loads: Sequence[ServerLoad], cap: float) -> int:
    """Return the number of servers, at least one, that keeps the total of *loads* below the cap of each."""
    if not loads:
        return 1
    asked = max(sum(load.compute for load in loads), sum(load.bandwidth for load in loads))
    count = max(1, math.ceil(asked / cap - 1e-9))
    if count >= len(loads):
        return count
    return min(len(loads), max(1, math.ceil(asked / max(cap - LOWER, cap / 2) - 1e-9)))


class UtilisationPolicy:
    """Ray's autoscaling by predicted loads; *busy_cap* is how busy a server may be."""

    def __init__(self, busy_cap: float = 0.8) -> None:
        self._cap = busy_cap

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        compute, bandwidth = (_last(context.raw_metrics or {}, name) for name in (COMPUTE, BANDWIDTH))
        loads = [ServerLoad(compute[replica], bandwidth.get(replica, 0.0)) for replica in compute]
        if len(loads) < context.current_num_replicas:  # some have not said anything yet
            return context.target_num_replicas, {}
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return min(most, max(least, needed(loads, self._cap))), {}


def _last(metrics: Mapping[str, Any], name: str) -> dict[Any, float]:
    """The latest value of each server: its rates are averages of ten seconds already."""
    return {replica: series[-1].value for replica, series in metrics.get(name, {}).items() if series}
