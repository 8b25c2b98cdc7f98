"""Small clusters for tests."""

from __future__ import annotations

import numpy as np

from weft_cluster.placing.demand import Need
from weft_cluster.routing.cluster import Cluster, Node, NodeModel


def small_cluster(
    nodes: int = 4, models: int = 6, replicas: int = 3, *, load: float = 0.7, seed: int = 0, overlap: float = 0.45
) -> Cluster:
    """Models of different kinds on several machines each; *load*: how busy these are on average."""
    rng = np.random.default_rng(seed)
    needs = []
    for _ in range(models):
        alone_s, computes, grain = rng.uniform(0.004, 0.03), rng.uniform(0.1, 0.9), rng.uniform(0.15, 0.5)
        needs.append(Need(alone_s * computes, alone_s * (1 - computes), segment_s=grain * alone_s, alone_s=alone_s))
    placed = [
        NodeModel(int(node), model, 1 / replicas, needs[model])
        for model in range(models)
        for node in rng.choice(nodes, replicas, replace=False)
    ]
    busy = np.array(
        [max(n.compute_s, n.memory_s) + (1 - overlap) * min(n.compute_s, n.memory_s) for n in needs], np.float64
    )
    weights = np.arange(1, models + 1) ** -0.5
    return Cluster(
        tuple(Node(f"m{number}", "near" if number % 2 else "far", overlap) for number in range(nodes)),
        tuple(f"model{number}" for number in range(models)),
        weights * load * nodes / (weights @ busy),
        np.full(models, 1.0),
        np.array([3 * need.alone_s + 0.02 for need in needs]),
        tuple(sorted(placed, key=lambda each: (each.node, each.model))),
    )


def one_machine(need: Need, deadline_s: float, rate: float = 1.0, nodes: int = 1) -> Cluster:
    """One model on one machine, or on several."""
    return Cluster(
        tuple(Node(f"m{number}", "here", 0.45) for number in range(nodes)),
        ("only",),
        np.array([rate]),
        np.array([1.0]),
        np.array([deadline_s]),
        tuple(NodeModel(number, 0, 1 / nodes, need) for number in range(nodes)),
    )
