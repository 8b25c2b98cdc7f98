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
from weft.engine.policies.base import Candidate, Event, EventKind, LaneState, Policy, Running, Start, View


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

    @property
    def events(self) -> list[Event]:
        """What happened since the policy was last asked, in order; the engine empties it."""
        ...

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

    def issued(self, candidate: Candidate, step: int) -> object:
        """One of the candidates went; returns its batch, where it belongs to one."""
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

    def submit(self, start: Start, batch: object = None) -> None:
        """Give the device a layer to compute; *batch*: as the source has it."""
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
        self._open_ended: set[tuple[int, int]] = set()
        """Batches that go on to their end unless they are revoked, by stream and query."""

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

        Returns whether there may be another one to issue at once. A batch that was started to its end goes on without
        a question, also where it is held back for others.
        """
        self.account()
        device = self._executor.ready()
        if device is None:
            self._reconsider()
            return False
        offer = self._source.offer(device)
        if self._open_ended and (going_on := self._going_on(offer)):
            self._issue(Start(going_on, to_end=True))
            return True
        if not offer.candidates:
            return False
        start = self._policy.decide(self._view(device, offer))
        self._source.events.clear()
        if start is None:
            if not self._executor.rests():
                raise InvalidStart(f"{type(self._policy).__name__} waits, and nothing runs that could end")
            return False
        if start.candidate not in offer.candidates:
            raise InvalidStart(f"{type(self._policy).__name__} chose {start.candidate}, which is not on offer")
        self._issue(start)
        return start.more

    def _view(self, device: DeviceClocks, offer: Offer) -> View:
        lanes = self._executor.held() if self._policy.traits.shares else ()
        return View(device, *offer, lanes, tuple(self._source.events))

    def _issue(self, start: Start) -> None:
        candidate = start.candidate
        if start.to_end:
            self._open_ended.add((candidate.stream, candidate.query))
        self._executor.submit(start, self._source.issued(candidate, self._steps))
        self._steps += 1

    def _going_on(self, offer: Offer) -> Candidate | None:
        """The next segment of a batch that was started to its end; the first such, in the source's order."""
        for head in offer.heads:
            if head.layer and (head.stream, head.query) in self._open_ended:
                return head
        return None

    def account(self) -> None:
        """Tell the source what has ended and what time it is."""
        for completion in self._executor.completions():
            self._source.completed(completion)
        for stream, query in self._source.at(self._executor.now()):
            self._executor.stop(stream, query)
        if self._open_ended:
            for event in self._source.events:
                if event.kind in (EventKind.BATCH_END, EventKind.REVOKED):
                    self._open_ended.discard((event.stream, event.query))

    def _reconsider(self) -> None:
        """Ask the policy whether to preempt running work for waiting work; called when no lane is free."""
        running = self._executor.abortable()
        if self._open_ended and self._source.events:
            known = {layer.candidate for layer in running}
            running += tuple(
                Running(candidate, rest, stoppable=False)
                for candidate, rest in self._executor.rests()
                if candidate not in known and (candidate.stream, candidate.query) in self._open_ended
            )
        if not running:
            return
        device = DeviceClocks.at(self._executor.now())
        offer = self._source.offer(device)
        victim = self._policy.aborts(self._view(device, offer), running) if offer.candidates else None
        if victim is None:
            return
        batch = victim.stream, victim.query
        if batch in self._open_ended:  # ``account`` removes it when it reads the event
            self._source.events.append(Event(EventKind.REVOKED, *batch))
        if any(layer.stoppable and layer.candidate == victim for layer in running):
            self._executor.stop(*batch)
