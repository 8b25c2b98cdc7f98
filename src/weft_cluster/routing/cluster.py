"""A cluster to simulate: machines, and what of which model each of them has. Values only; ``placed`` makes one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.base.errors import PlacingError, unknown_name
from weft_cluster.placing.demand import Demand, Need
from weft_cluster.placing.machines import MachineKind
from weft_cluster.placing.placement import Placement

Floats = npt.NDArray[np.float64]


class Node(NamedTuple):
    """A machine of the cluster."""

    name: str
    zone: str
    overlap: float
    """Share of the ideal overlap of computing and memory that it reaches, 0 to 1."""
    speed: float = 1.0
    """How fast it really is, where it should be 1."""


class NodeModel(NamedTuple):
    """A model on a machine."""

    node: int
    model: int
    share: float
    """Of the requests for the model that go anywhere."""
    need: Need
    """Need of a request there at the machine's nominal speed."""


@dataclass(frozen=True, slots=True, eq=False)
class Cluster:
    """Machines with models, and the request rates of the models."""

    nodes: tuple[Node, ...]
    models: tuple[str, ...]
    rates: Floats
    """(models): requests per second."""
    cv: Floats
    """(models): coefficient of variation of the gaps between them."""
    deadlines_s: Floats
    """(models): from the client's request to its answer."""
    placed: tuple[NodeModel, ...]
    """Node by node, every model on one node at least."""

    def __repr__(self) -> str:
        rate = self.rates.sum()
        asked = f"{rate:.4g}" if rate < 1000 else f"{rate:.0f}"
        there = f"{len(self.models)} models on {len(self.nodes)} machines"
        return f"Cluster({there}: {asked} requests per s, {len(self.placed)} replicas)"

    def with_speeds(self, speeds: Mapping[str, float]) -> Cluster:
        """The same with machines that are slower or faster than they should be: name -> speed."""
        names = [node.name for node in self.nodes]
        for name, speed in speeds.items():
            if name not in names:
                raise PlacingError(unknown_name("machine", name, names))
            if not speed > 0:
                raise PlacingError(f"{name}: speed = {speed:g} must be above 0")
        nodes = tuple(node._replace(speed=speeds.get(node.name, node.speed)) for node in self.nodes)
        return replace(self, nodes=nodes)

    def asked(self, factor: float, cv: float | None = None) -> Cluster:
        """Return the same cluster with *factor* times the rates, and arrivals of variation *cv*."""
        if not factor > 0:
            raise PlacingError(f"rate = {factor:g} must be above 0")
        return replace(self, rates=self.rates * factor, cv=self.cv if cv is None else np.full(len(self.cv), cv))


def placed(placement: Placement, kinds: Mapping[str, MachineKind], demands: Sequence[Demand]) -> Cluster:
    """Return the cluster that a placement describes. Requests that it leaves unserved are not sent."""
    known = {demand.model: demand for demand in demands}
    nodes = tuple(Node(node.name, node.zone, kinds[node.kind].overlap) for node in placement.machines)
    placement_models = placement.models
    models = {model: number for number, model in enumerate(placement_models)}
    served = dict.fromkeys(models, 0.0)
    replicas = []
    for number, machine in enumerate(placement.machines):
        for placement_model in machine.models:
            if placement_model.model not in known:
                raise PlacingError(
                    f"{machine.name} has it placed: {unknown_name('model', placement_model.model, known)}"
                )
            if machine.kind not in known[placement_model.model].needs:
                raise PlacingError(
                    f"{placement_model.model} is placed on {machine.name}, and nothing says what it takes there"
                )
            served[placement_model.model] += placement_model.share
            replicas.append(
                NodeModel(
                    number,
                    models[placement_model.model],
                    placement_model.share,
                    known[placement_model.model].needs[machine.kind],
                )
            )
    return Cluster(
        nodes,
        tuple(models),
        np.array([known[model].rate * min(1.0, served[model]) for model in models]),
        np.array([known[model].cv for model in models]),
        np.array([known[model].deadline_s for model in models]),
        tuple(replica._replace(share=replica.share / served[placement_models[replica.model]]) for replica in replicas),
    )
