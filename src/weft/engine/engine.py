"""The loop: see what could go, ask the policy, check its answer, hand it to the executor.

Streams that never run dry and requests that arrive are two sources of work for the same loop; the
loop, the policies and the checks are the same for every source and every executor.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from weft.devices.decoupled import Issue, NpuState
from weft.errors import InvalidStart
from weft.policies.base import Candidate, Policy, Start, View


class Offer(NamedTuple):
    """What a source has at one instant; no candidates where nothing can go yet."""

    heads: tuple[Candidate, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    progress: tuple[int, ...] = ()


class Source(Protocol):
    """Where layers come from."""

    def done(self) -> bool:
        """Whether nothing is left to issue, now or later."""
        ...

    def offer(self, device: NpuState) -> Offer:
        """What could be issued when the channel is free."""
        ...

    def next_event(self) -> int:
        """After an empty offer: when there may be something."""
        ...

    def issued(self, candidate: Candidate, times: Issue, step: int) -> None:
        """One of the candidates went."""
        ...


class Executor(Protocol):
    """Does what it is told, in simulated or in real time."""

    def wait(self) -> NpuState:
        """Let time pass until another layer can be issued; return the device's clocks then."""
        ...

    def idle_until(self, tick: int) -> None:
        """Let time pass with nothing to do."""
        ...

    def submit(self, start: Start) -> Issue:
        """Issue a layer; return when it is fetched and computed."""
        ...


class Engine:
    """Runs a source's work on an executor as a policy decides."""

    def __init__(self, source: Source, policy: Policy, executor: Executor) -> None:
        self._source, self._policy, self._executor = source, policy, executor

    def run(self) -> int:
        """Issue layers until the source is done; returns how many."""
        step = 0
        while not self._source.done():
            device = self._executor.wait()
            offer = self._source.offer(device)
            if not offer.candidates:
                if not self._source.done():  # the last waiting requests may just have been dropped
                    self._executor.idle_until(self._source.next_event())
                continue
            start = self._policy.decide(View(device, *offer))
            if start.candidate not in offer.candidates:
                raise InvalidStart(f"{type(self._policy).__name__} chose {start.candidate}, which is not on offer")
            times = self._executor.submit(start)
            self._source.issued(start.candidate, times, step)
            step += 1
        return step
