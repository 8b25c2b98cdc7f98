"""How many requests a filled machine would answer on time: weft's own simulator on sampled arrivals.

How a machine and a request are simulated is in ``pieces``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

from weft.costs.program import Program
from weft.devices import Npu, load_npu
from weft.engine.tickets import Terms
from weft.kernels import request_state as k
from weft.placing.demand import Demand
from weft.placing.filling import Filling
from weft.placing.machines import MOST_MACHINES, MachineKind
from weft.placing.pieces import CLOCK, LONGEST_S, buffer_of, pieces_of
from weft.policies import Setting, make_request_policy
from weft.policies.base import UNBOUNDED_ROUNDS
from weft.simulation.requests import Case, weaving
from weft.workloads.requests import Stream, Workload

POLICY, LATE = "weft+", "weave"
"""What decides on a machine, and what becomes of requests that are late."""
REQUESTS = 2000
"""How many requests a machine is judged by."""


@cache
def _device() -> Npu:
    """A device of the kind that is simulated; nothing of it is looked at."""
    return load_npu("tpuv3-like")


class RequestCount(NamedTuple):
    """Requests of a model on a machine, and how many were late."""

    arrived: int
    late: int

    @property
    def on_time(self) -> float:
        """The share that was not late."""
        return 1.0 - self.late / self.arrived if self.arrived else 1.0


class OnTimeJudge:
    """Simulates the machines of one problem, each once for the same models and shares."""

    def __init__(self, seed: int = 0, requests: int = REQUESTS) -> None:
        self._seed, self._requests = seed, requests
        self._known: dict[tuple[int, frozenset[tuple[int, float]]], dict[int, RequestCount]] = {}

    def machine(self, filling: Filling, machine: int) -> Mapping[int, RequestCount]:
        """Number of a model -> what became of its requests on one machine."""
        if not filling.shares[machine]:
            return {}
        problem, kind = filling.problem, filling.problem.machines[machine].kind
        key = machine, frozenset(filling.shares[machine].items())
        if key not in self._known:
            shares = {problem.demands[model]: share for model, share in filling.shares[machine].items()}
            seed = self._seed * MOST_MACHINES + machine  # machines do not see the same arrivals
            case = machine_case(kind, problem.kinds[kind], shares, self._requests, seed)
            tally = weaving.serve(case, make_request_policy(POLICY, case.setting), LATE, None, False)
            counted = [RequestCount(int(row[k.ARRIVED]), int(row[k.VIOLATED])) for row in tally.counts]
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
    programs: list[Program] = []
    terms: list[Terms] = []
    streams: list[Stream] = []
    for demand, share in shares.items():
        need = demand.needs[kind]
        pieces = pieces_of(need, what.overlap)
        terms.append(Terms(len(programs), pieces.due(demand.deadline_s - need.alone_s), 1, 0, 1))
        programs.append(pieces.program(demand.model))
        streams.append(
            Stream(model=demand.model, rate=share * demand.rate, deadline_ms=terms[-1].deadline / 1e6, max_batch=1)
        )
    rate = sum(share * demand.rate for demand, share in shares.items())
    duration = min(requests / rate, LONGEST_S)
    setting = Setting(tuple(programs), buffer_of(programs), UNBOUNDED_ROUNDS)
    workload = Workload(stream=tuple(streams), duration_s=duration, warmup_s=duration / 20, seed=seed)
    alone_s = tuple(demand.needs[kind].alone_s for demand in shares)
    return Case(workload, _device(), CLOCK, setting, setting, tuple(terms), alone_s)
