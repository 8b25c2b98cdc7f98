"""How many requests a filled machine would answer on time: weft's own simulator on sampled arrivals.

A machine is simulated as one whose channel and array run side by side without loss, and each model takes of them the
two loads of ``problem``: together these fill such a machine exactly when they fill the real one. A request can wait for
as long as it could there: its deadline is what it takes alone in the simulation, and its slack.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

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
    clock = Clock.nanoseconds()
    programs = tuple(_program(demand, kind, what, clock) for demand in shares)
    terms = tuple(
        Terms(number, _deadline(demand.deadline_s - demand.needs[kind].alone_s, program, clock), 1, 0, 1)
        for number, (demand, program) in enumerate(zip(shares, programs, strict=True))
    )
    streams = tuple(
        Stream(
            model=demand.model, rate=share * demand.rate, deadline_ms=term.deadline * clock.tick_s * 1e3, max_batch=1
        )
        for (demand, share), term in zip(shares.items(), terms, strict=True)
    )
    duration = min(requests / sum(share * demand.rate for demand, share in shares.items()), LONGEST_S)
    setting = Setting(programs, 2 * max(program.largest_fetch for program in programs), UNBOUNDED_ROUNDS)
    workload = Workload(stream=streams, duration_s=duration, warmup_s=duration / 20, seed=seed)
    alone_s = tuple(demand.needs[kind].alone_s for demand in shares)
    return Case(workload, _device(), clock, setting, setting, terms, alone_s)


def _program(demand: Demand, kind: str, what: MachineKind, clock: Clock) -> Program:
    """A model in equal segments, as it loads the channel and the array."""
    need, apart = demand.needs[kind], 1 - what.overlap
    count = min(MOST_SEGMENTS, math.ceil(need.alone_s / need.segment_s - 1e-9)) if need.segment_s else 1
    count = max(1, count)
    array = max(1, clock.ticks((need.compute_s + apart * need.memory_s + need.other_s) / count))
    channel = max(1, clock.ticks((need.memory_s + apart * need.compute_s + need.other_s) / count))
    names = tuple(map(str, range(count)))
    return Program(demand.model, names, (channel,) * count, (array,) * count, (channel,) * count)


def _deadline(slack_s: float, program: Program, clock: Clock) -> int:
    """What the program takes alone in the simulation, and what it may wait."""
    channel, array = program.fetch[0], program.compute[0]
    return channel + (len(program) - 1) * max(channel, array) + array + clock.ticks(min(slack_s, LONGEST_S))
