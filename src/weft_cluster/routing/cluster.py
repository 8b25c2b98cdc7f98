"""A cluster to simulate: machines, the models on each with their shares, and settings. ``placed`` makes one.

Settings are the router and its knowledge, network delays, slow machines, failures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.base.errors import InputError, PlacingError, unknown_name
from weft.engine.lateness import SOFT
from weft.engine.policies import POLICIES
from weft.simulation.requests import ONLINE
from weft_cluster.placing.demand import Demand, Need
from weft_cluster.placing.judging import POLICY
from weft_cluster.placing.machines import MachineKind
from weft_cluster.placing.placement import Placement
from weft_cluster.routing.router import check_router

Floats = npt.NDArray[np.float64]


class Node(NamedTuple):
    """A machine of the cluster."""

    name: str
    zone: str
    overlap: float
    """Share of the ideal overlap of computing and memory that it reaches, 0 to 1."""
    speed: float = 1.0
    """Its real speed, relative to its nominal one."""


class NodeModel(NamedTuple):
    """A model on a machine."""

    node: int
    model: int
    share: float
    """Share of the model's requests that go to this machine; the shares of a model add up to 1."""
    need: Need
    """Need of a request on the machine at its nominal speed."""


@dataclass(frozen=True, slots=True, eq=False)
class Cluster:
    """Machines with models, and the request rates of the models."""

    nodes: tuple[Node, ...]
    models: tuple[str, ...]
    rates: Floats
    """(models): requests per second."""
    cv: Floats
    """(models): coefficient of variation of the gaps between requests."""
    deadlines_s: Floats
    """(models): longest time from the client's request to its answer."""
    placed: tuple[NodeModel, ...]
    """Sorted by node; every model is on at least one."""

    def __repr__(self) -> str:
        rate = self.rates.sum()
        rate_text = f"{rate:.4g}" if rate < 1000 else f"{rate:.0f}"
        sizes = f"{len(self.models)} models on {len(self.nodes)} machines"
        return f"Cluster({sizes}: {rate_text} requests per s, {len(self.placed)} replicas)"

    def with_speeds(self, speeds: Mapping[str, float]) -> Cluster:
        """The cluster with machines that are slower or faster than their nominal speed: name -> speed."""
        names = [node.name for node in self.nodes]
        for name, speed in speeds.items():
            if name not in names:
                raise PlacingError(unknown_name("machine", name, names))
            if not speed > 0:
                raise PlacingError(f"{name}: speed = {speed:g} must be above 0")
        nodes = tuple(node._replace(speed=speeds.get(node.name, node.speed)) for node in self.nodes)
        return replace(self, nodes=nodes)

    def scaled(self, factor: float, cv: float | None = None) -> Cluster:
        """Return the same cluster with *factor* times the rates, and arrivals of variation *cv*."""
        if not factor > 0:
            raise PlacingError(f"rate = {factor:g} must be above 0")
        return replace(self, rates=self.rates * factor, cv=self.cv if cv is None else np.full(len(self.cv), cv))


def placed(placement: Placement, kinds: Mapping[str, MachineKind], demands: Sequence[Demand]) -> Cluster:
    """The cluster that a placement describes; requests that it leaves unserved are not sent.

    PlacingError if a demand, or the need of one on its machine, is missing.
    """
    known = {demand.model: demand for demand in demands}
    nodes = tuple(Node(node.name, node.zone, kinds[node.kind].overlap) for node in placement.machines)
    placement_models = placement.models
    models = {model: number for number, model in enumerate(placement_models)}
    served_share = dict.fromkeys(models, 0.0)
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
            served_share[placement_model.model] += placement_model.share
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
        np.array([known[model].rate * min(1.0, served_share[model]) for model in models]),
        np.array([known[model].cv for model in models]),
        np.array([known[model].deadline_s for model in models]),
        tuple(
            replica._replace(share=replica.share / served_share[placement_models[replica.model]])
            for replica in replicas
        ),
    )


class Failure(NamedTuple):
    """A failure: a machine is down for some time; its requests, and those that arrive meanwhile, are lost."""

    machine: str
    start_s: float
    length_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSetting:
    """Settings of a simulation that are not part of the placement."""

    router: str = "slack"
    policy: str = POLICY
    late: str = "weave"
    gates: int = 1
    """Gates that take requests in turn; each knows its own requests, and assumes that the others send as many."""
    hop_s: float = 0.0005
    """Network delay from a gate to a machine, and again back."""
    zone_hops_s: Mapping[str, float] = field(default_factory=dict)
    """Zone -> delay to its machines, instead of *hop_s*."""
    report_s: float = 0.02
    """Period of the machines' reports."""
    age_s: float = 0.0
    """Age of a report when it reaches the gates."""
    failures: tuple[Failure, ...] = ()
    knows_speeds: bool = True
    """Whether gates know the real durations of requests on slow machines, or only nominal ones."""
    warmup_s: float = 1.0
    """Requests that arrive earlier are served but not counted."""

    def __post_init__(self) -> None:
        check_router(self.router)
        known = [name for name, kind in POLICIES.items() if kind in ONLINE]
        if self.policy not in known:
            raise InputError(unknown_name("policy for machines of a cluster", self.policy, known))
        if self.late not in SOFT:
            raise InputError(unknown_name("rule for late requests", self.late, SOFT))
        if self.gates < 1:
            raise InputError(f"gates = {self.gates} must be at least 1")
        times = {"hop_s": self.hop_s, "age_s": self.age_s, "warmup_s": self.warmup_s, **self.zone_hops_s}
        for name, value in times.items():
            if not value >= 0:
                raise InputError(f"{name} = {value} must be at least 0")
        if not self.report_s >= 1e-6:
            raise InputError(f"report_s = {self.report_s} must be at least 1e-6")

    @property
    def lag(self) -> int:
        """Age of a report, in periods, when it is first used."""
        return ceil(self.age_s / self.report_s - 1e-9)  # rounding must not add a period

    def hop_of(self, node: Node) -> float:
        return self.zone_hops_s.get(node.zone, self.hop_s)

    def check(self, cluster: Cluster) -> None:
        """Raise an error if the setting names machines or zones that *cluster* lacks, or failures that overlap."""
        zones, names = {node.zone for node in cluster.nodes}, {node.name for node in cluster.nodes}
        for zone in self.zone_hops_s:
            if zone not in zones:
                raise PlacingError(unknown_name("zone", zone, zones))
        for failure in self.failures:
            if failure.machine not in names:
                raise PlacingError(unknown_name("machine", failure.machine, names))
            if not (failure.start_s >= 0 and failure.length_s > 0):
                raise InputError(f"{failure.machine}: a failure begins at 0 s or later and lasts, not {failure}")
        for first, second in pairwise(sorted(self.failures)):
            if first.machine == second.machine and first.start_s + first.length_s + self.report_s > second.start_s:
                raise InputError(
                    f"{first.machine} fails at {second.start_s:g} s, and was not up again; let it come back"
                )


def slowed(cluster: Cluster, share: float, speed: float, seed: int) -> Cluster:
    """The cluster with a randomly drawn share of its machines at another speed."""
    return cluster.with_speeds(dict.fromkeys(_draw_machines(cluster, share, seed), speed))


def failures(
    cluster: Cluster, share: float, length_s: float, duration_s: float, seed: int, *, from_s: float = 0.0
) -> tuple[Failure, ...]:
    """Draw a share of the machines that fail once each, at a random time.

    length_s: duration of each failure. from_s: earliest begin.
    """
    rng = np.random.default_rng([seed, 2])  # a sequence of its own, whatever else is drawn with this seed
    names = _draw_machines(cluster, share, seed + 1)
    return tuple(
        Failure(name, float(start), length_s)
        for name, start in zip(names, rng.uniform(from_s, duration_s, len(names)), strict=True)
    )


def _draw_machines(cluster: Cluster, share: float, seed: int) -> list[str]:
    """Draw the names of a share of the machines, rounded to whole machines."""
    rng = np.random.default_rng([seed, 3])
    chosen = rng.choice(len(cluster.nodes), round(share * len(cluster.nodes)), replace=False)
    return [cluster.nodes[number].name for number in sorted(chosen.tolist())]
