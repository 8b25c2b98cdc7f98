"""Cases of one stream whose batches are refilled, and the compiled loop that serves them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tests.engine.naive import program
from weft.devices import TiledNpu
from weft.devices.costs.program import Clock
from weft.engine.policies import Policy, Setting
from weft.engine.policies.base import NO_BUFFER, UNBOUNDED_ROUNDS
from weft.engine.tickets import Terms
from weft.simulation.requests import Case, Tally, compiled
from weft.workloads.requests import Stream, Workload


class ListedWorkload(Workload):
    """Requests at given ticks, each with the exit it takes, handed out in small blocks."""

    times: tuple[int, ...] = ()
    taken: tuple[int, ...] = ()
    block: int = 3

    def arrivals(self, index: int, seed: int | None = None) -> Iterator[np.ndarray]:
        for start in range(0, len(self.times), self.block):
            yield np.array(self.times[start : start + self.block], float) / 1e9

    def exits_taken(self, index: int, seed: int | None = None) -> Iterator[np.ndarray]:
        for start in range(0, len(self.taken), 2):
            yield np.array(self.taken[start : start + 2], np.int64)


def refill_case(
    batches: tuple[tuple[int, ...], ...],
    workload: Workload,
    *,
    exits: tuple[int, ...] = (),
    rates: tuple[float, ...] = (),
    deadline: int = 1000,
) -> Case:
    """A stream whose segments take so many ticks at batch 1, 2, ..., on a device that computes one at a time."""
    programs = [program(f"b{size}", *[(0, ticks) for ticks in each]) for size, each in enumerate(batches, start=1)]
    setting = Setting(
        tuple(replace(each, exits=exits, exit_rates=rates) for each in programs), NO_BUFFER, UNBOUNDED_ROUNDS
    )
    device = TiledNpu(name="small", t_r=1, t_p=1, t_c=1, clock_mhz=1.0, bandwidth_gb_s=1.0)
    terms = (Terms(0, deadline, len(batches), 0, 1),)
    return Case(workload, device, Clock.nanoseconds(), setting, setting, terms, (sum(batches[0]) / 1e9,))


def listed_requests(times: tuple[int, ...], taken: tuple[int, ...], *, warm: int = 0, block: int = 3) -> ListedWorkload:
    stream = Stream(model="m", rate=1, deadline_ms=1)
    return ListedWorkload(stream=(stream,), duration_s=1, warmup_s=warm / 1e9, times=times, taken=taken, block=block)


def serve_compiled(case: Case, policy: Policy, late: str, *, seed: int = 0, record: bool = True) -> Tally:
    assert compiled.applies(case, policy)
    return compiled.serve(case, policy, late, seed, record)


def crowded_case(requests: int, *, gap: int = 4, deadline: int = 150) -> Case:
    """Eight may share a batch, three exits, more than the device can do."""
    rng = np.random.default_rng(requests)
    segments = (10, 9, 8, 12)
    return refill_case(
        tuple(tuple(ticks * (2 + size) // 3 for ticks in segments) for size in range(1, 9)),
        listed_requests(
            tuple(np.cumsum(rng.integers(0, 2 * gap, requests)).tolist()), tuple(rng.integers(0, 4, requests).tolist())
        ),
        exits=(1, 2, 3),
        rates=(0.25, 0.25, 0.25, 0.25),
        deadline=deadline,
    )
