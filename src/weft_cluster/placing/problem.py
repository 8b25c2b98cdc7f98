"""A placing problem as arrays: what every model would take of every kind of machine, and where it may go.

A machine that overlaps a share e of its two resources is busy max(C, M) + (1 - e) min(C, M) + O. That is below a cap
exactly where C + (1 - e) M + O and M + (1 - e) C + O are, which are sums over models. So every model has two loads per
kind (``rows``), and machines are filled by these two, by memory, and by which models may share a machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from weft_cluster.placing.demand import Demand, Need
from weft_cluster.placing.machines import ClusterMachine, MachineKind, Machines

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Shares = Sequence[Mapping[int, float]]
"""Of each machine: number of a model -> the share of its requests that go there."""

ROUNDING = 1e-9
"""What sums of shares may be off by."""


@dataclass(frozen=True, slots=True, eq=False)
class PlacingProblem:
    """Machines and demands, numbered in order; arrays are by (kind, model) unless they say otherwise."""

    machines: tuple[ClusterMachine, ...]
    kinds: Mapping[str, MachineKind]
    demands: tuple[Demand, ...]
    kind_of: Ints
    """(machine): the number of its kind."""
    zone_of: Ints
    """(machine): the number of its zone."""
    compute: Floats
    """Share of a machine's time that the model's whole rate computes..."""
    memory: Floats
    """... keeps the memory channel busy..."""
    other: Floats
    """... and time that overlaps with nothing."""
    rows: Floats
    """(kind, 2, model): the two loads by which machines are filled up to their cap."""
    bytes: Floats
    """Memory that the model holds wherever it is placed."""
    segment_s: Floats
    """The longest segment of the model; a request of another model may have to wait for it."""
    slack_s: Floats
    """The slack of the model: its deadline minus its time alone."""
    cap: Floats
    """(kind): how busy a machine may be."""
    room_bytes: Floats
    """(kind): what fits in a machine's memory."""
    allowed: Bools
    """(machine, model): it runs there by its deadline, fits in the memory, and no rule forbids it."""

    @classmethod
    def of(cls, machines: Machines, demands: Sequence[Demand]) -> PlacingProblem:
        """The problem of placing *demands* on the machines of a file."""
        kinds = machines.kinds

        def by_kind(value: Callable[[Need], float]) -> Floats:
            rows = [[value(d.needs[kind]) if kind in d.needs else 0.0 for d in demands] for kind in kinds]
            return np.array(rows, np.float64).reshape(len(kinds), len(demands))

        rates = np.array([demand.rate for demand in demands])
        compute, memory = rates * by_kind(lambda need: need.compute_s), rates * by_kind(lambda need: need.memory_s)
        other, resident = rates * by_kind(lambda need: need.other_s), by_kind(lambda need: need.resident_bytes)
        apart = 1 - np.array([kind.overlap for kind in kinds.values()])[:, None]
        slack = np.array([demand.deadline_s for demand in demands]) - by_kind(lambda need: need.alone_s)
        room = np.array([kind.memory_bytes for kind in kinds.values()], np.float64)
        known = by_kind(lambda need: 1.0) > 0
        runs = known & (slack >= 0) & (resident <= room[:, None])
        kind_of = np.array([list(kinds).index(machine.kind) for machine in machines.all_machines], np.int64)
        return cls(
            machines=machines.all_machines,
            kinds=kinds,
            demands=tuple(demands),
            kind_of=kind_of,
            zone_of=np.array([machines.zones.index(machine.zone) for machine in machines.all_machines], np.int64),
            compute=compute,
            memory=memory,
            other=other,
            rows=np.stack([compute + apart * memory + other, memory + apart * compute + other], axis=1),
            bytes=resident,
            segment_s=by_kind(lambda need: need.segment_s),
            slack_s=slack,
            cap=np.array([kind.busy_cap for kind in kinds.values()]),
            room_bytes=room,
            allowed=runs[kind_of] & _by_rules(machines.all_machines, demands),
        )

    @property
    def sizes(self) -> tuple[int, int]:
        """How many machines and models there are."""
        return len(self.machines), len(self.demands)

    def section(self, machines: Sequence[int], models: Sequence[int]) -> PlacingProblem:
        """The problem with only some of its machines and models, numbered anew."""
        by_model = ("compute", "memory", "other", "rows", "bytes", "segment_s", "slack_s")
        return replace(
            self,
            machines=tuple(self.machines[machine] for machine in machines),
            demands=tuple(self.demands[model] for model in models),
            kind_of=self.kind_of[machines],
            zone_of=self.zone_of[machines],
            allowed=self.allowed[np.ix_(machines, models)],
            **{name: getattr(self, name)[..., models] for name in by_model},
        )


def _by_rules(machines: Sequence[ClusterMachine], demands: Sequence[Demand]) -> Bools:
    """(machine, model): whether the model is pinned neither elsewhere nor to another zone."""
    allowed = np.ones((len(machines), len(demands)), np.bool_)
    names, zones = np.array([machine.name for machine in machines]), np.array([machine.zone for machine in machines])
    for number, demand in enumerate(demands):
        if demand.machine is not None:
            allowed[:, number] &= names == demand.machine
        if demand.zone is not None:
            allowed[:, number] &= zones == demand.zone
    return allowed
