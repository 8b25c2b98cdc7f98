"""Small workloads of requests for the tests: ticks instead of seconds, arrivals that are listed one by one.

On the small clock a tick is a millisecond and a byte, so the milliseconds of a stream are its ticks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from tests.engine.naive import program, small_npu
from weft.devices.costs.program import Clock, Program
from weft.engine import Arrivals, Ending, Engine, Requests, SimulatedNpu
from weft.engine.policies import POLICIES, Candidate, Option, Setting, make_policy
from weft.engine.policies.base import UNBOUNDED_ROUNDS
from weft.engine.tickets import Terms
from weft.simulation.requests import ONLINE, Case, estimates
from weft.workloads.requests import Stream, Workload

COMPILED = [name for name, policy in POLICIES.items() if policy in ONLINE]
"""Names of the policies with a compiled loop for requests."""

SERVING = [name for name, policy in POLICIES.items() if policy.traits.serves_requests]
"""Names of the policies that serve requests at all."""

Layers = Sequence[tuple[int, int]]


class RegistryEntry(Workload):
    """A workload whose open streams arrive at given ticks, handed out in small blocks."""

    times: tuple[tuple[int, ...], ...] = ()
    block: int = 3

    def arrivals(self, index: int, seed: int | None = None) -> Iterator[np.ndarray]:
        ticks = np.array(self.times[index], float)
        for start in range(0, len(ticks), self.block):
            yield ticks[start : start + self.block] / 1e3


@dataclass(frozen=True)
class Flow:
    """One stream in ticks: its layers at batch 1, 2, ..., and its terms."""

    batches: tuple[Layers, ...]
    arrivals: tuple[int, ...] = ()
    deadline: int = 1000
    timeout: int = 0
    priority: int = 1
    clients: int = 0
    """More than none: a closed stream."""
    think: int = 0

    @property
    def programs(self) -> tuple[Program, ...]:
        return tuple(program(f"b{size}", *layers) for size, layers in enumerate(self.batches, start=1))


def flow(*layers: tuple[int, int], batch: int = 1, **terms) -> Flow:
    """A stream whose batches all cost the same."""
    return Flow((layers,) * batch, **terms)


def case_of(flows: Sequence[Flow], *, buffer: int = 100, end: int = 1000, warm: int = 0, block: int = 3) -> Case:
    """The workload of these streams, lowered to the small clock."""
    clock = Clock(1, 1000.0, buffer)
    streams, terms, programs = [], [], []
    for index, one in enumerate(flows):
        closed = one.clients > 0
        streams.append(
            Stream(
                model=f"m{index}",
                arrival="closed" if closed else "poisson",
                rate=1,
                deadline_ms=one.deadline or 1e-9,
                max_batch=len(one.batches),
                batch_timeout_ms=one.timeout,
                priority=one.priority,
                clients=max(1, one.clients),
                think_ms=one.think,
            )
        )
        think = one.think if closed else -1
        terms.append(
            Terms(len(programs), one.deadline, len(one.batches), one.timeout, one.priority, think, one.clients)
        )
        programs += one.programs
    workload = RegistryEntry(
        stream=tuple(streams),
        duration_s=end / 1e3,
        warmup_s=warm / 1e3,
        times=tuple(one.arrivals for one in flows),
        block=block,
    )
    setting = Setting(tuple(programs), buffer, UNBOUNDED_ROUNDS)
    alone = tuple(setting.programs[term.programs].total_work * clock.tick_s for term in terms)
    return Case(workload, small_npu(max(2, buffer)), clock, setting, setting, tuple(terms), alone)


@dataclass(frozen=True)
class Served:
    """A plain run, looked at from inside."""

    source: Requests
    feed: Arrivals
    executor: SimulatedNpu

    @property
    def answers(self) -> list[Ending]:
        return self.feed.answers

    @property
    def log(self):
        return self.executor.log

    @property
    def candidates(self) -> list[Candidate]:
        return [candidate for candidate, _ in self.executor.log]

    @property
    def letters(self) -> str:
        """The order of issues, a letter for each stream, a capital for the first layer of a batch."""
        return "".join("ABCD"[c.stream] if c.layer == 0 else "abcd"[c.stream] for c in self.candidates)


def serve(
    policy: str, *flows: Flow, late: str = "demote", buffer: int = 100, end: int = 1000, **options: Option
) -> Served:
    """Serve these streams on the plain engine."""
    return serve_case(policy, case_of(flows, buffer=buffer, end=end), late=late, **options)


def serve_case(policy: str, case: Case, *, late: str, kind: type[Requests] = Requests, **options: Option) -> Served:
    """Serve a workload of listed arrivals on the plain engine."""
    assert isinstance(case.workload, RegistryEntry)
    chooser = make_policy(policy, case.setting, options)
    feed = Arrivals(
        case.terms,
        [iter(times) for times in case.workload.times],
        end=case.clock.ticks(case.workload.duration_s),
        strict=late == "drop",
    )
    executor = SimulatedNpu(case.setting)
    source = kind(chooser, feed, estimates(chooser), executor.rests, executor.abortable, late=late)
    for term in case.terms:
        source.open(term)
    Engine(source, chooser, executor).run()
    return Served(source, feed, executor)


@st.composite
def flows(draw: st.DrawFn, buffer: int, *, ticks: int = 12, end: int = 200) -> Flow:
    """A random stream; larger batches cost at least as much, and layers may cost nothing."""
    sizes = st.integers(0, min(buffer, ticks)) | st.sampled_from([0, 1, buffer])
    pieces = st.lists(st.tuples(sizes, st.integers(0, ticks)), min_size=1, max_size=4)
    layers = draw(pieces.filter(lambda rows: any(map(any, rows))))
    more = draw(st.integers(0, 3))
    batches = tuple(
        [(size, busy + more * extra) for size, busy in layers] for extra in range(draw(st.integers(1, 5)))
    )  # fmt: skip
    work = sum(map(max, layers))
    closed = draw(st.integers(0, 3)) == 0
    deadline = draw(st.integers(1, 3 * work) | st.sampled_from([1, work, 2 * work, 40 * work]))
    return Flow(
        batches,
        arrivals=() if closed else tuple(sorted(draw(st.lists(st.integers(0, end), max_size=24)))),
        deadline=max(work, deadline) if closed else deadline,  # one that cannot be met makes a closed stream spin
        timeout=draw(st.sampled_from([0, 0, 1, 5, 30])),
        priority=draw(st.sampled_from([1, 3, 9])),
        clients=draw(st.integers(1, 4)) if closed else 0,
        think=draw(st.sampled_from([0, 1, 3, 20])),
    )


@st.composite
def cases(draw: st.DrawFn, streams: int = 4) -> Case:
    """A random workload of up to four streams, closed and open ones mixed, on a device with a small buffer."""
    buffer = draw(st.integers(1, 20) | st.sampled_from([1, 12, 60]))
    chosen = draw(st.lists(flows(buffer), min_size=1, max_size=streams))
    end = draw(st.sampled_from([50, 200]))
    return case_of(chosen, buffer=buffer, end=end, warm=draw(st.sampled_from([0, 25])), block=draw(st.integers(1, 5)))
