"""The scheduling loop: get the candidates, ask the policy, check its answer, submit it to the executor.

Saturated streams, simulated requests and requests of real clients are sources of work for the same loop; the loop, the
policies and the checks are the same for every source and every executor. A simulation calls ``run``; a server calls
``step`` whenever a request arrives or a lane becomes free.

Where the device has gates, a start covers a batch up to its next exit. The loop then asks the policy anew on every
event: an arrival, an end, a batch that has left, a deadline that is about to be missed (``lane_plan``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from weft.base.errors import InvalidStart
from weft.devices.decoupled import DeviceClocks, LayerTimes
from weft.engine.lane_plan import LanePlan, LanePlanner
from weft.engine.lane_queues import LaneQueue, Queued
from weft.engine.policies.base import NO_DEADLINE, Candidate, Event, LaneState, Policy, Running, Start, View


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
    """Whether the layer was stopped half-way for more urgent work and has to run again, or the batch left at a gate."""
    error: Exception | None = None
    """Why the layer could not be computed; None if it could."""
    work: object = None
    """The executor's record of the batch."""
    lane: int = -1
    """The lane that computed it; -1 where lanes have no numbers."""
    layers: int | None = None
    """How many layers were computed, of a start that may cover several (``Start.layers``)."""


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

    def lane_awaited(self) -> bool:
        """Return whether a request or a batch waits for a lane; only asked where the device has gates."""
        ...

    def issued(self, candidate: Candidate, step: int) -> object:
        """Account for a candidate issued as number *step*; return its batch, or None in saturated streams."""
        ...

    def place(self, stream: int, query: int, layer: int, *, running: bool, lane: int = -1) -> None:
        """Set up to which layer a batch counts as issued, unless it was given up.

        running: False: it is offered from that layer on, as if it had paused there, although its lane still computes.
        lane: the number of that lane, where batches stay on their lanes.
        """
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

    @property
    def queues(self) -> Sequence[LaneQueue[Queued]]:
        """The lanes with their segments, where the device has gates."""
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
        """Stop the running layer of a query, or revoke its start; its completion is marked as aborted."""
        ...

    def rests(self) -> Sequence[tuple[Candidate, int]]:
        """Return the layers that have not ended, each with its expected ticks from now on."""
        ...


class Engine:
    """Runs a source's work on an executor as a policy decides."""

    def __init__(self, source: Source, policy: Policy, executor: Executor) -> None:
        self._source, self._policy, self._executor = source, policy, executor
        self._steps = 0
        self._planner: LanePlanner | None = None
        """Set by the first start that covers several layers: from then on events are planned for."""
        self.plan: LanePlan | None = None
        """The plan that is being made."""
        self._review_at = NO_DEADLINE
        """When to ask the policy again although nothing has happened."""

    def run(self) -> int:
        """Issue layers until the source is done; return the number of issued layers."""
        while not self._source.done():
            if not self.step() and not self._source.done():  # the last waiting requests may just have been dropped
                self._executor.idle_until(self.next_event())
        return self._steps

    def next_event(self) -> int:
        """Return the tick at which to take the next step if no layer ends before."""
        return min(self._source.next_event(), self._review_at)

    def follow(self, policy: Policy) -> None:
        """Switch to another policy."""
        self._policy = policy

    def step(self) -> bool:
        """Account for ended layers and arrivals, and issue one layer if one is offered and the executor can take it.

        Returns whether another layer may be issued at once. On a device with gates, all lanes are planned anew, unless
        they are idle or the only batch on them has nothing to give way to.
        """
        self.account()
        if self._planner:
            on_lanes, self._review_at = sum([len(lane.tasks) for lane in self._executor.queues]), NO_DEADLINE
            if not on_lanes:
                self._planner = LanePlanner()  # the old one remembers batches that have ended
            may_move = on_lanes > 1 or (on_lanes and self._policy.setting.shares)  # alone, it may get a larger share
            if not may_move and not self._source.lane_awaited():
                return False
            if on_lanes:
                return self._follow_plan(self._planner)
        device = self._executor.ready()
        if device is None:
            self._preempt()
            return False
        offer = self._source.offer(device)
        if not offer.candidates:
            return False
        start = self._ask(device, offer, self._executor.held() if self._policy.traits.shares else ())
        if start is None:
            self._check_waiting()
            return False
        start, batch = self._issue(start)
        self._executor.submit(start, batch)
        return start.more and (start.layers is None or self._source.lane_awaited())

    def _ask(self, device: DeviceClocks, offer: Offer, lanes: tuple[LaneState, ...]) -> Start | None:
        """Ask the policy, and check its answer."""
        start = self._policy.decide(View(device, *offer, lanes, tuple(self._source.events)))
        self._source.events.clear()
        if start and start.candidate not in offer.candidates:
            raise InvalidStart(f"{type(self._policy).__name__} chose {start.candidate}, which is not on offer")
        return start

    def _check_waiting(self) -> None:
        """Raise InvalidStart if the policy starts nothing, and nothing runs that could end."""
        if not self._executor.rests():
            raise InvalidStart(f"{type(self._policy).__name__} waits, and nothing runs that could end")

    def _issue(self, start: Start) -> tuple[Start, object]:
        """Tell the source of a start; return the start and its batch.

        If the device has gates and the policy allows it, the start covers the batch up to its next exit.
        """
        candidate, batch = start.candidate, self._source.issued(start.candidate, self._steps)
        self._steps += 1
        programs = self._policy.setting.programs  # empty where steps are no layers, as on a SoC
        if not (programs and programs[candidate.program].gated and self._policy.traits.by_events):
            return start, batch
        program = programs[candidate.program]
        self._planner = self._planner or LanePlanner()
        layers = program.span(candidate.layer)
        end = candidate.layer + layers
        self._source.place(candidate.stream, candidate.query, end, running=True)
        candidate = candidate._replace(compute=sum(program.compute[candidate.layer : end]))
        return start._replace(candidate=candidate, layers=layers), batch

    def _follow_plan(self, planner: LanePlanner) -> bool:
        """Ask the policy what should be on the lanes, revoke what it does not want there, and start what it does.

        Returns whether a layer was started that the batch may continue from at once.
        """
        now = self._executor.now()
        device, plan = DeviceClocks.at(now), planner.plan(self._policy, self._executor.queues, now)
        self.plan = plan
        for batch, on_lane in plan.on_lanes.items():
            self._source.place(*batch, on_lane.gate.layer, running=False, lane=on_lane.lane)
        batches: dict[tuple[int, int], object] = {}
        try:
            self._decide(plan, device, batches)
        finally:  # also after an error of the policy: a batch that was issued and never submitted would never end
            self.plan = None
            starts = self._carry_out(plan, batches)
        self._review_at = plan.review_at(now, lane_awaited=self._source.lane_awaited())
        return any([start.layers is None for start in starts])

    def _decide(self, plan: LanePlan, device: DeviceClocks, batches: dict[tuple[int, int], object]) -> None:
        """Ask the policy until no lane takes more; *batches*: gets those of new starts, by stream and query."""
        if not plan.takes_more:
            self._preempt()
        while plan.takes_more:
            offer = self._source.offer(device)
            offer = offer._replace(candidates=plan.offer(offer.heads, offer.candidates))
            if not offer.candidates:
                break
            start = self._ask(device, offer, plan.states() if self._policy.traits.shares else ())
            if start is None:
                if not batches:
                    self._check_waiting()
                break
            key = start.candidate[:2]
            if key in plan.on_lanes:
                self._source.place(*key, plan.on_lanes[key].end, running=True)
            else:
                start, batches[key] = self._issue(start)
            plan.add(start)
            if not start.more:
                break

    def _carry_out(self, plan: LanePlan, batches: dict[tuple[int, int], object]) -> list[Start]:
        """Revoke what the plan does not want on the lanes, and submit its new starts; returns these."""
        revoked, starts = plan.settle()
        for on_lane in revoked:
            self._source.place(*on_lane.task.batch, on_lane.gate.layer, running=True)
            self._executor.stop(*on_lane.task.batch)
        for start in starts:
            self._executor.submit(start, batches[start.candidate[:2]])
        return starts

    def account(self) -> None:
        """Pass completions and the time to the source, and stop the batches that the source gives up."""
        for completion in self._executor.completions():
            self._source.completed(completion)
        for stream, query in self._source.at(self._executor.now()):
            self._executor.stop(stream, query)

    def _preempt(self) -> None:
        """Ask the policy whether to stop a running layer for waiting work; called when no lane is free."""
        running = self._executor.abortable()
        if not running:
            return
        device = DeviceClocks.at(self._executor.now())
        offer = self._source.offer(device)
        lanes = self._executor.held() if self._policy.traits.shares else ()
        view = View(device, *offer, lanes, tuple(self._source.events))
        victim = self._policy.aborts(view, running) if offer.candidates else None
        if victim and any(layer.stoppable and layer.candidate == victim for layer in running):
            self._executor.stop(victim.stream, victim.query)
