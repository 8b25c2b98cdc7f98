"""The scheduling loop: get the candidates, ask the policy, check its answer, submit it to the executor.

Saturated streams, simulated requests and requests of real clients are sources of work for the same loop; the loop, the
policies and the checks are the same for every source and every executor. A simulation calls ``run``; a server calls
``step`` whenever a request arrives or a lane becomes free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from weft.base.errors import InvalidStart
from weft.devices.decoupled import DeviceClocks, LayerTimes
from weft.engine.policies.base import Candidate, Event, EventKind, LaneState, Policy, Running, Start, View


class Offer(NamedTuple):
    """The layers that a source offers at one instant, with the meaning of the same fields of ``View``.

    No candidates: nothing can be issued yet.
    """

    heads: tuple[Candidate, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    progress: tuple[int, ...] = ()


class Completion(NamedTuple):
    """The end of an issued layer: computed, stopped or failed."""

    candidate: Candidate
    times: LayerTimes
    aborted: bool = False
    """Whether the layer was stopped half-way for more urgent work and has to run again."""
    error: Exception | None = None
    """Why the layer could not be computed; None if it could."""
    work: object = None
    """The executor's record of the batch."""
    lane: int = -1
    """The lane that computed it; -1 where lanes have no numbers."""


class Source(Protocol):
    """A source of work: it offers layers and is notified when they are issued and have ended."""

    @property
    def events(self) -> list[Event]:
        """Events since the policy was last asked, in order; the engine empties the list."""
        ...

    def done(self) -> bool:
        """Return whether nothing is left to issue, now or later."""
        ...

    def at(self, now: int) -> Iterable[tuple[int, int]]:
        """Admit arrivals and expire overdue requests; yield the stream and query of running batches to stop."""
        ...

    def offer(self, device: DeviceClocks) -> Offer:
        """Return the layers that could be issued now, given the device's clocks."""
        ...

    def next_event(self) -> int:
        """Return the tick at which there may next be a layer to issue; called when there is none now."""
        ...

    def issued(self, candidate: Candidate, step: int) -> object:
        """Account for a candidate issued as number *step*; return its batch, or None in saturated streams."""
        ...

    def completed(self, completion: Completion) -> None:
        """Account for the end of an issued layer."""
        ...


class Executor(Protocol):
    """Computes the layers that the engine starts, in simulated or in real time."""

    def completions(self) -> Iterable[Completion]:
        """Return the issued layers whose end became known since the last call.

        An NPU computes in the order of issue, so its simulation knows the end of a layer when it is submitted.
        """
        ...

    def ready(self) -> DeviceClocks | None:
        """Return the device's clocks if it takes another layer now, else None."""
        ...

    def now(self) -> int:
        """Return the time in ticks."""
        ...

    def held(self) -> tuple[LaneState, ...]:
        """Return the state of every lane, where lanes are shares of a device; otherwise an empty tuple."""
        return ()

    def idle_until(self, tick: int) -> None:
        """Wait until *tick*, or until the executor's state changes, such as by the end of a layer."""
        ...

    def submit(self, start: Start, batch: object = None) -> None:
        """Start a layer. batch: the source's record of its batch, as ``Source.issued`` returned it."""
        ...

    def abortable(self) -> tuple[Running, ...]:
        """Return the running layers if one of them could be stopped; otherwise an empty tuple."""
        return ()

    def stop(self, stream: int, query: int) -> None:
        """Stop the running layer of a query; its completion is marked as aborted."""
        ...

    def rests(self) -> Sequence[tuple[Candidate, int]]:
        """Return the layers that have not ended, each with its expected ticks from now on."""
        ...


class Engine:
    """Runs a source's work on an executor as a policy decides."""

    def __init__(self, source: Source, policy: Policy, executor: Executor) -> None:
        self._source, self._policy, self._executor = source, policy, executor
        self._steps = 0
        self._open_ended: set[tuple[int, int]] = set()
        """Batches that go on to their end unless they are revoked, by stream and query."""

    def run(self) -> int:
        """Issue layers until the source is done; return the number of issued layers."""
        while not self._source.done():
            if not self.step() and not self._source.done():  # the last waiting requests may just have been dropped
                self._executor.idle_until(self._source.next_event())
        return self._steps

    def follow(self, policy: Policy) -> None:
        """Switch to another policy."""
        self._policy = policy

    def step(self) -> bool:
        """Account for ended layers and arrivals, and issue one layer if one is offered and the executor can take it.

        Returns whether another layer may be issued at once. The next layer of a batch that was started to its end
        (``Start.to_end``) is issued without asking the policy, even if the source holds that batch back for others.
        """
        self.account()
        device = self._executor.ready()
        if device is None:
            self._preempt()
            return False
        offer = self._source.offer(device)
        if self._open_ended and (candidate := self._next_open_ended(offer)):
            self._issue(Start(candidate, to_end=True))
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
        """Start a layer on the executor, and tell the source."""
        candidate = start.candidate
        if start.to_end:
            self._open_ended.add((candidate.stream, candidate.query))
        self._executor.submit(start, self._source.issued(candidate, self._steps))
        self._steps += 1

    def _next_open_ended(self, offer: Offer) -> Candidate | None:
        """Return the next segment of the first batch, in the source's order, that was started to its end."""
        for head in offer.heads:
            if head.layer and (head.stream, head.query) in self._open_ended:
                return head
        return None

    def account(self) -> None:
        """Pass completions and the time to the source, and stop the batches that the source gives up."""
        for completion in self._executor.completions():
            self._source.completed(completion)
        for stream, query in self._source.at(self._executor.now()):
            self._executor.stop(stream, query)
        if self._open_ended:
            for event in self._source.events:
                if event.kind in (EventKind.BATCH_END, EventKind.REVOKED):
                    self._open_ended.discard((event.stream, event.query))

    def _preempt(self) -> None:
        """Ask the policy whether to preempt running work for waiting work; called when no lane is free."""
        running = self._executor.abortable()
        if self._open_ended and self._source.events:
            # A batch started to its end can be revoked although its running layer cannot be stopped.
            abortable = {layer.candidate for layer in running}
            running += tuple(
                Running(candidate, rest, stoppable=False)
                for candidate, rest in self._executor.rests()
                if candidate not in abortable and (candidate.stream, candidate.query) in self._open_ended
            )
        if not running:
            return
        device = DeviceClocks.at(self._executor.now())
        offer = self._source.offer(device)
        victim = self._policy.aborts(self._view(device, offer), running) if offer.candidates else None
        if victim is None:
            return
        batch = victim.stream, victim.query
        if batch in self._open_ended:  # ``account`` removes the batch from the set when it reads this event
            self._source.events.append(Event(EventKind.REVOKED, *batch))
        if any(layer.stoppable and layer.candidate == victim for layer in running):
            self._executor.stop(*batch)
