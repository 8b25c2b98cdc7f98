"""The loop: see what could go, ask the policy, check its answer, hand it to the executor.

Streams that never run dry, simulated requests and requests of real clients are sources of work for the
same loop; the loop, the policies and the checks are the same for every source and every executor. A
simulation ``run``s it to the end of its time; a server takes a ``step`` whenever a request came or a lane
became free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from weft.base.errors import InvalidStart
from weft.devices.decoupled import DeviceClocks, LayerTimes
from weft.engine.policies.base import Candidate, LaneState, Policy, Running, Start, View


class Offer(NamedTuple):
    """What a source has at one instant; no candidates where nothing can go yet."""

    heads: tuple[Candidate, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    progress: tuple[int, ...] = ()


class Completion(NamedTuple):
    """What became of a layer that was issued."""

    candidate: Candidate
    times: LayerTimes
    aborted: bool = False
    """It was stopped half-way for something more urgent and has to be done again."""
    error: Exception | None = None
    """It could not be computed."""
    work: object = None
    """What the executor keeps for its batch."""
    lane: int = -1
    """Where it was computed, of lanes that take layers ahead."""


class Source(Protocol):
    """Where layers come from."""

    def done(self) -> bool:
        """Whether nothing is left to issue, now or later."""
        ...

    def at(self, now: int) -> Iterable[tuple[int, int]]:
        """Time has passed: take what has come, give up what is overdue; which running queries to stop, by stream."""
        ...

    def offer(self, device: DeviceClocks) -> Offer:
        """What could be issued at this instant of the device."""
        ...

    def next_event(self) -> int:
        """When there may be something to issue, where nothing could be at this instant."""
        ...

    def issued(self, candidate: Candidate, step: int) -> None:
        """One of the candidates went."""
        ...

    def completed(self, completion: Completion) -> None:
        """An issued layer's end is known."""
        ...


class Executor(Protocol):
    """Does what it is told, in simulated or in real time."""

    def completions(self) -> Iterable[Completion]:
        """Issued layers whose end became known since the last call.

        An NPU works through what it was given in order, so its simulation knows every end at once.
        """
        ...

    def ready(self) -> DeviceClocks | None:
        """When it can begin another layer, if it can be given one now."""
        ...

    def now(self) -> int:
        """The time."""
        ...

    def held(self) -> tuple[LaneState, ...]:
        """What every lane holds, where lanes are shares of a device; else nothing."""
        ...

    def idle_until(self, tick: int) -> None:
        """Let time pass, with nothing to do, until then or until something changes."""
        ...

    def submit(self, start: Start) -> None:
        """Give the device a layer to compute."""
        ...

    def abortable(self) -> tuple[Running, ...]:
        """What runs, if no layer can be given and one of them could be stopped to make room; else nothing."""
        ...

    def stop(self, stream: int, query: int) -> None:
        """Stop what runs of a query; its completion says so."""
        ...

    def rests(self) -> Sequence[tuple[Candidate, int]]:
        """What was given and has not ended, and how many ticks each is expected to take from now on."""
        ...


class Engine:
    """Runs a source's work on an executor as a policy decides."""

    def __init__(self, source: Source, policy: Policy, executor: Executor) -> None:
        self._source, self._policy, self._executor = source, policy, executor
        self._steps = 0

    def run(self) -> int:
        """Issue layers until the source is done; returns how many."""
        while not self._source.done():
            if not self.step() and not self._source.done():  # the last waiting requests may just have been dropped
                self._executor.idle_until(self._source.next_event())
        return self._steps

    def follow(self, policy: Policy) -> None:
        """Ask another policy from now on."""
        self._policy = policy

    def step(self) -> bool:
        """Account for what has happened, and issue one layer if there is one and the executor can take it.

        Returns whether there may be another one to issue at once.
        """
        self.account()
        device = self._executor.ready()
        if device is None:
            self._reconsider()
            return False
        offer = self._source.offer(device)
        if not offer.candidates:
            return False
        start = self._policy.decide(View(device, *offer, self._executor.held()))
        if start is None:
            if not self._executor.rests():
                raise InvalidStart(f"{type(self._policy).__name__} waits, and nothing runs that could end")
            return False
        if start.candidate not in offer.candidates:
            raise InvalidStart(f"{type(self._policy).__name__} chose {start.candidate}, which is not on offer")
        self._source.issued(start.candidate, self._steps)
        self._executor.submit(start)
        self._steps += 1
        return start.more

    def account(self) -> None:
        """Tell the source what has ended and what time it is."""
        for completion in self._executor.completions():
            self._source.completed(completion)
        for stream, query in self._source.at(self._executor.now()):
            self._executor.stop(stream, query)

    def _reconsider(self) -> None:
        """Ask whether something long that runs shall be given up for what waits."""
        running = self._executor.abortable()
        if not running:
            return
        device = DeviceClocks.at(self._executor.now())
        offer = self._source.offer(device)
        if offer.candidates:
            victim = self._policy.aborts(View(device, *offer), running)
            if victim is not None:
                self._executor.stop(victim.stream, victim.query)
