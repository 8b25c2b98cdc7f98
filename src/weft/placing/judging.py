"""How many requests a filled machine would answer on time: weft's own simulator on sampled arrivals.

A machine is simulated as one whose channel and array run side by side without loss, and each model takes of them the
two loads of ``problem``: together these fill such a machine exactly when they fill the real one. A request can wait for
as long as it could there: its deadline is what it takes alone in the simulation, and its slack.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

import numpy as np

from weft.costs.program import Clock, Program
from weft.devices import Npu, load_npu
from weft.engine.tickets import Terms
from weft.kernels import request_state as k
from weft.placing.demand import Demand
from weft.placing.filling import Filling
from weft.placing.machines import MOST_MACHINES, MachineKind
from weft.policies import Setting, make_request_policy
from weft.policies.base import UNBOUNDED_ROUNDS
from weft.simulation.requests import Case, weaving
from weft.workloads.requests import Stream, Workload

POLICY, LATE = "weft+", "weave"
"""What decides on a machine, and what becomes of requests that are late."""
REQUESTS = 2000
"""How many requests a machine is judged by."""
LONGEST_S = 600.0
MOST_SEGMENTS = 32


@cache
def _device() -> Npu:
    """A device of the kind that is simulated; nothing of it is looked at."""
    return load_npu("tpuv3-like")


class Counted(NamedTuple):
    """Requests of a model on a machine, and how many were late."""

    arrived: int
    late: int

    @property
    def on_time(self) -> float:
        """The share that was not late."""
        return 1.0 - self.late / self.arrived if self.arrived else 1.0


class Judge:
    """Simulates the machines of one problem, each once for the same models and shares."""

    def __init__(self, seed: int = 0, requests: int = REQUESTS) -> None:
        self._seed, self._requests = seed, requests
        self._known: dict[tuple[int, frozenset[tuple[int, float]]], dict[int, Counted]] = {}

    def machine(self, filling: Filling, machine: int) -> Mapping[int, Counted]:
        """Number of a model -> what became of its requests on one machine."""
        problem, kind = filling.problem, filling.problem.machines[machine].kind
        key = machine, frozenset(filling.shares[machine].items())
        if key not in self._known:
            shares = {problem.demands[model]: share for model, share in filling.shares[machine].items()}
            seed = self._seed * MOST_MACHINES + machine  # machines do not see the same arrivals
            case = machine_case(kind, problem.kinds[kind], shares, self._requests, seed)
            tally = weaving.serve(case, make_request_policy(POLICY, case.setting), LATE, None, False)
            counted = [Counted(int(row[k.ARRIVED]), int(row[k.VIOLATED])) for row in tally.counts]
            self._known[key] = dict(zip(filling.shares[machine], counted, strict=True))
        return self._known[key]

    def attainment(self, filling: Filling, machines: Iterable[int]) -> float:
        """Share of the requests on time on these machines; what goes nowhere is not among them."""
        rates = on_time = 0.0
        for machine in machines:
            for model, counted in self.machine(filling, machine).items():
                rate = filling.shares[machine][model] * filling.problem.demands[model].rate
                rates += rate
                on_time += rate * counted.on_time
        return on_time / rates if rates else 1.0


def machine_case(
    kind: str, what: MachineKind, shares: Mapping[Demand, float], requests: int = REQUESTS, seed: int = 0
) -> Case:
    """A machine with shares of models on it, ready to be simulated."""
    clock, apart = Clock.nanoseconds(), 1 - what.overlap
    programs: list[Program] = []
    terms: list[Terms] = []
    streams: list[Stream] = []
    for demand, share in shares.items():
        need = demand.needs[kind]
        count = int(min(MOST_SEGMENTS, max(1, np.ceil(need.alone_s / need.segment_s - 1e-9)))) if need.segment_s else 1
        array = max(1, clock.ticks((need.compute_s + apart * need.memory_s + need.other_s) / count))
        channel = max(1, clock.ticks((need.memory_s + apart * need.compute_s + need.other_s) / count))
        alone = channel + (count - 1) * max(channel, array) + array
        slack = min(demand.deadline_s - need.alone_s, LONGEST_S)
        names = tuple(f"{number}" for number in range(count))
        terms.append(Terms(len(programs), alone + clock.ticks(slack), 1, 0, 1))
        programs.append(Program(demand.model, names, (channel,) * count, (array,) * count, (channel,) * count))
        streams.append(
            Stream(model=demand.model, rate=share * demand.rate, deadline_ms=terms[-1].deadline / 1e6, max_batch=1)
        )
    buffer = 2 * max(program.largest_fetch for program in programs)
    rate = sum(share * demand.rate for demand, share in shares.items())
    duration = min(requests / rate, LONGEST_S)
    setting = Setting(tuple(programs), buffer, UNBOUNDED_ROUNDS)
    workload = Workload(stream=tuple(streams), duration_s=duration, warmup_s=duration / 20, seed=seed)
    alone_s = tuple(demand.needs[kind].alone_s for demand in shares)
    return Case(workload, _device(), clock, setting, setting, tuple(terms), alone_s)
