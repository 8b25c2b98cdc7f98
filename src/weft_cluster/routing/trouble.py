"""Trouble that is drawn: machines that are slower than they should be, and machines that go down."""

from __future__ import annotations

import numpy as np

from weft_cluster.routing.cluster import Cluster
from weft_cluster.routing.setting import Failure


def slowed(cluster: Cluster, share: float, speed: float, seed: int) -> Cluster:
    """The cluster with a share of its machines, drawn, at another speed."""
    return cluster.with_speeds(dict.fromkeys(_drawn(cluster, share, seed), speed))


def failures(
    cluster: Cluster, share: float, length_s: float, duration_s: float, seed: int, *, from_s: float = 0.0
) -> tuple[Failure, ...]:
    """A share of the machines, drawn, goes down once each, at any time."""
    rng = np.random.default_rng([seed, 2])
    names = _drawn(cluster, share, seed + 1)
    return tuple(
        Failure(name, float(start), length_s)
        for name, start in zip(names, rng.uniform(from_s, duration_s, len(names)), strict=True)
    )


def _drawn(cluster: Cluster, share: float, seed: int) -> list[str]:
    """Names of a share of the machines, in whole machines."""
    rng = np.random.default_rng([seed, 3])
    chosen = rng.choice(len(cluster.nodes), round(share * len(cluster.nodes)), replace=False)
    return [cluster.nodes[number].name for number in sorted(chosen.tolist())]
