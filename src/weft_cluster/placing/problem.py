"""A placing problem as arrays: the loads of every model on every kind of machine, and its possible machines.

A machine with compute time C, channel time M and other time O, and a share e of the ideal overlap, is busy max(C, M) +
(1 - e) min(C, M) + O of the time. That is below a cap exactly where C + (1 - e) M + O and M + (1 - e) C + O are, which
are sums over models. So every model has two loads per kind (``model_loads``); the limits of a machine are these two,
its memory, and which models may share it.

A model that fits nowhere is refused here, in one line that says what it would need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from weft.base.errors import PlacingError
from weft_cluster.placing.demand import Demand, Need
from weft_cluster.placing.machines import GIB, ClusterMachine, MachineKind, Machines

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Shares = Sequence[Mapping[int, float]]
"""By machine: number of a model -> share of its requests that go to the machine."""

ROUNDING = 1e-9
"""Rounding error of sums of shares."""


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
    """Share of a machine's time in which all requests of the model would compute."""
    memory: Floats
    """Share in which they would keep the memory channel busy."""
    other: Floats
    """Share in which they would take time that overlaps with nothing."""
    model_loads: Floats
    """(kind, 2, model): the two loads by which machines are filled up to their cap."""
    bytes: Floats
    """Memory that the model holds wherever it is placed."""
    segment_s: Floats
    """The longest segment of the model; a request of another model may have to wait for it."""
    slack_s: Floats
    """The slack of the model: its deadline minus its time alone."""
    cap: Floats
    """(kind): cap on a machine's two loads."""
    room_bytes: Floats
    """(kind): a machine's memory."""
    allowed: Bools
    """(machine, model): whether it fits in the memory there, can meet its deadline alone, and no rule forbids it."""

    @classmethod
    def of(cls, machines: Machines, demands: Sequence[Demand]) -> PlacingProblem:
        """The problem of placing *demands* on the machines of a file."""
        kinds = machines.kinds

        def by_kind(value: Callable[[Need], float]) -> Floats:
            """Return a value of every need, 0 where a kind cannot run a model; (kinds, models)."""
            rows = [[value(d.needs[kind]) if kind in d.needs else 0.0 for d in demands] for kind in kinds]
            return np.array(rows, np.float64).reshape(len(kinds), len(demands))

        rates = np.array([demand.rate for demand in demands])
        compute, memory = rates * by_kind(lambda need: need.compute_s), rates * by_kind(lambda need: need.memory_s)
        other, resident = rates * by_kind(lambda need: need.other_s), by_kind(lambda need: need.resident_bytes)
        unhidden = 1 - np.array([kind.overlap for kind in kinds.values()])[:, None]
        slack = np.array([demand.deadline_s for demand in demands]) - by_kind(lambda need: need.alone_s)
        room = np.array([kind.memory_bytes for kind in kinds.values()], np.float64)
        has_need = by_kind(lambda need: 1.0) > 0
        can_run = has_need & (slack >= 0) & (resident <= room[:, None])
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
            model_loads=np.stack([compute + unhidden * memory + other, memory + unhidden * compute + other], axis=1),
            bytes=resident,
            segment_s=by_kind(lambda need: need.segment_s),
            slack_s=slack,
            cap=np.array([kind.busy_cap for kind in kinds.values()]),
            room_bytes=room,
            allowed=can_run[kind_of] & _by_rules(machines.all_machines, demands),
        )

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of machines, and of models."""
        return len(self.machines), len(self.demands)

    def section(self, machines: Sequence[int], models: Sequence[int]) -> PlacingProblem:
        """The problem with only some of its machines and models, numbered anew."""
        by_model = ("compute", "memory", "other", "model_loads", "bytes", "segment_s", "slack_s")
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
    """Return whether the rules allow each model on each machine: pinning to a machine or zone; (machines, models)."""
    allowed = np.ones((len(machines), len(demands)), np.bool_)
    names, zones = np.array([machine.name for machine in machines]), np.array([machine.zone for machine in machines])
    for number, demand in enumerate(demands):
        if demand.machine is not None:
            allowed[:, number] &= names == demand.machine
        if demand.zone is not None:
            allowed[:, number] &= zones == demand.zone
    return allowed


def check_each_fits(problem: PlacingProblem) -> None:
    """Raise PlacingError if a model may be on no machine, or on too few for its replicas."""
    machine_counts = problem.allowed.sum(axis=0)  # by model: how many machines may have it
    for number, demand in enumerate(problem.demands):
        if machine_counts[number] == 0:
            raise PlacingError(_why_nowhere(problem, number))
        zones = np.unique(problem.zone_of[problem.allowed[:, number]])
        places = len(zones) if demand.apart == "zone" else int(machine_counts[number])
        if places < demand.replicas:
            raise PlacingError(
                f"{demand.model}: {demand.replicas} replicas need as many {demand.apart}s that can run it, there are "
                f"{places}; add some or ask for fewer replicas"
            )


def _why_nowhere(problem: PlacingProblem, number: int) -> str:
    """Explain why no machine may have model *number*: pinning, missing profile, memory or deadline."""
    demand = problem.demands[number]
    pinned = [
        machine
        for machine in problem.machines
        if demand.machine in (None, machine.name) and demand.zone in (None, machine.zone)
    ]
    kinds = [kind for kind in dict.fromkeys(machine.kind for machine in pinned) if kind in demand.needs]
    where = f"machine {demand.machine}" if demand.machine else f"zone {demand.zone}" if demand.zone else "any machine"
    if not pinned:
        return f"{demand.model} is pinned to zone {demand.zone}, and there is no such machine; change one of the two"
    if not kinds:
        profiled = ", ".join(demand.needs)
        return f"{demand.model} may go to {where}, but only {profiled} is known to run it; add a profile for its kind"
    largest = max(kinds, key=lambda kind: problem.kinds[kind].memory_bytes)
    if all(demand.needs[kind].resident_bytes > problem.kinds[kind].memory_bytes for kind in kinds):
        needed, room = demand.needs[largest].resident_bytes / GIB, problem.kinds[largest].memory_gib
        return f"{demand.model} needs {needed:.2f} GiB, and {where} has {room:.2f} at most ({largest}); a larger kind"
    return _why_too_slow(demand, kinds, where)


def _why_too_slow(demand: Demand, kinds: list[str], where: str) -> str:
    """Explain that a model misses its deadline even alone on the fastest of *kinds*."""
    fastest = min(kinds, key=lambda kind: demand.needs[kind].alone_s)
    alone, due = demand.needs[fastest].alone_s * 1e3, demand.deadline_s * 1e3
    return (
        f"{demand.model} is due in {due:.4g} ms, and takes {alone:.4g} ms alone on {where} ({fastest}); "
        f"allow more than {alone:.4g} ms or add a kind that is {alone / due:.2f} times as fast"
    )


def what_would_serve(problem: PlacingProblem, model: int, share: float) -> str:
    """Describe the machines that the unplaced share of a model would need."""
    demand = problem.demands[model]
    where = f" on {demand.machine}" if demand.machine else f" in zone {demand.zone}" if demand.zone else ""
    loads = problem.model_loads[:, :, model].max(axis=1) / problem.cap * share
    kinds = [number for number, kind in enumerate(problem.kinds) if kind in demand.needs]
    kind = min(kinds, key=lambda number: loads[number])
    room = problem.bytes[kind, model] / GIB
    return f"{loads[kind]:.2f} more {list(problem.kinds)[kind]} with {room:.2f} GiB free{where}"
