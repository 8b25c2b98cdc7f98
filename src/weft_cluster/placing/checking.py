"""Whether a filling keeps to every limit, told in sentences: the test that all who place are held to."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft_cluster.placing.filling import Filling
from weft_cluster.placing.machines import GIB

TOLERANCE = 1e-6
"""By how much a limit may be exceeded, as a share of it: sums of shares are rounded."""


def broken_limits(filling: Filling) -> Iterator[str]:
    """What a filling does that it may not; nothing where all is well. Requests that go nowhere are allowed."""
    for machine in np.flatnonzero(filling.used).tolist():
        yield from _of_machine(filling, machine)
    served = filling.served()
    for number, demand in enumerate(filling.problem.demands):
        if served[number] > 1 + TOLERANCE:
            yield f"{demand.model}: {served[number]:.3f} of its requests are placed, more than there are"
        yield from _of_replicas(filling, number)


def _of_machine(filling: Filling, machine: int) -> Iterator[str]:
    problem, kind = filling.problem, int(filling.problem.kind_of[machine])
    name, numbers = problem.machines[machine].name, list(filling.shares[machine])
    if (busy := filling.loads[machine].max()) > problem.cap[kind] * (1 + TOLERANCE):
        yield f"{name} is {busy:.3f} busy, and may be {problem.cap[kind]:.3f}"
    if filling.bytes[machine] > problem.room_bytes[kind] * (1 + TOLERANCE):
        yield f"{name} holds {filling.bytes[machine] / GIB:.2f} GiB, and has {problem.room_bytes[kind] / GIB:.2f}"
    for model in numbers:
        demand = problem.demands[model]
        if not problem.allowed[machine, model]:
            yield f"{demand.model} may not be on {name}: it is pinned elsewhere, too large, or too slow there"
        for other in numbers:
            if other != model and problem.segment_s[kind, other] > problem.slack_s[kind, model] * (1 + TOLERANCE):
                longest = problem.segment_s[kind, other] * 1e3
                yield f"{demand.model} on {name} may wait {longest:.1f} ms for {problem.demands[other].model}"


def _of_replicas(filling: Filling, model: int) -> Iterator[str]:
    demand, there = filling.problem.demands[model], filling.replicas(model)
    if 0 < there < demand.replicas:
        yield f"{demand.model} is in {there} {demand.apart}s, and shall be in {demand.replicas}"
