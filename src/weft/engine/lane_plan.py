"""Plans of lanes whose device has gates, where a start covers a batch up to its next exit until it is revoked.

On every event the policy is asked as if every batch that can be revoked had paused at its next gate. A batch that the
policy starts there again stays on its lane, which costs nothing. A batch that it does not start is revoked, and what it
starts instead is queued behind, so that the device needs no answer from the host in between. The next batch is queued
shortly before the end of the one that runs: earlier, a better one may still come. Simulated and real lanes are planned
alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from typing import NamedTuple

from weft.devices.costs.program import Program
from weft.devices.shares import Share
from weft.engine.lane_queues import MOST_AHEAD, SHORT_TICKS, BatchKey, LaneQueue, Queued, has_room
from weft.engine.lateness import latest_end
from weft.engine.policies.base import NO_DEADLINE, Candidate, LaneState, Policy, Start


class NextGate(NamedTuple):
    """The gate at which a batch would leave its lane if it was revoked now."""

    layer: int
    """The layer behind the gate."""
    until: int
    """Expected ticks of computing until the batch is there."""
    after: int
    """Ticks of the layers behind it that the start covers."""


def next_gate(program: Program, first: int, layers: int, done: float | None) -> NextGate:
    """Return the next gate of a start of *layers* layers from *first* on; done: ticks computed, None: not begun."""
    gate, end, ticks = first, first + layers, 0
    while done is not None and gate < end and (gate == first or ticks < done):
        ticks += program.compute[gate]
        gate += 1
    return NextGate(gate, max(0, round(ticks - (done or 0))), sum(program.compute[gate:end]))


@dataclass(eq=False, slots=True)
class OnLane:
    """A start on a lane that can be revoked."""

    task: Queued
    lane: int
    """The number of its lane."""
    gate: NextGate

    @property
    def end(self) -> int:
        """The layer behind those that it covers."""
        return self.task.candidate.layer + (self.task.layers or 0)


class Choice(NamedTuple):
    """A decision of the policy."""

    number: int
    """How many decisions the plan had with it."""
    start: Start
    on_lane: OnLane | None
    """The start that is on a lane already; None for a new one."""

    @property
    def batch(self) -> BatchKey:
        return self.start.candidate[:2]


@dataclass(eq=False, slots=True)
class PlannedLane:
    """A lane, and what a plan puts on it."""

    room: int = 0
    """Batches that the plan may still put on it."""
    holds: list[Candidate] = field(default_factory=list)
    rest: int = 0
    """This and ``holds``: its ``LaneState`` if the plan ended here."""
    revocable: list[OnLane] = field(default_factory=list)
    """Its starts that can be revoked, in order."""
    chosen: list[Choice] = field(default_factory=list)
    """What runs and waits on it by the plan, besides what cannot be revoked."""
    ending: bool = False
    """Whether a batch that covers several layers runs on it and can no longer be revoked."""

    @property
    def is_busy(self) -> bool:
        """Whether what is on it by the plan takes so long that it is too early to queue the next batch."""
        return bool(self.chosen or self.ending) and self.rest >= SHORT_TICKS

    @property
    def takes_more(self) -> bool:
        """Whether the plan may put another batch on it."""
        return self.room > 0 and not self.is_busy


class LanePlan:
    """What the policy wants on the lanes from now on, decision by decision."""

    def __init__(self, policy: Policy, lanes: list[PlannedLane], numbers: dict[int, int]) -> None:
        """numbers: number of a lane -> its place in *lanes*."""
        self._policy, self._lanes, self._numbers = policy, lanes, numbers
        self.on_lanes = {on_lane.task.batch: on_lane for lane in lanes for on_lane in lane.revocable}
        """The starts that can be revoked, by batch."""
        self._place = {on_lane.task.batch: place for place, lane in enumerate(lanes) for on_lane in lane.revocable}
        self._anywhere: list[Choice] = []
        """Decisions for which neither the policy nor the batch says a lane."""
        self._decisions = 0
        self._heads: dict[BatchKey, Candidate] = {}
        """The batches that the policy was offered."""

    @property
    def takes_more(self) -> bool:
        """Whether a lane takes another batch."""
        return sum([lane.takes_more for lane in self._lanes]) > len(self._anywhere)

    def rooms(self) -> list[int]:
        """Return the numbers of the lanes that take another batch."""
        return [number for number, place in self._numbers.items() if self._lanes[place].takes_more]

    def states(self) -> tuple[LaneState, ...]:
        """Return the lanes as the policy sees them, with its decisions so far."""
        return tuple([LaneState(tuple(lane.holds), lane.rest, lane.takes_more) for lane in self._lanes])

    def offer(self, heads: Iterable[Candidate], candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
        """Note the heads, and return the candidates whose own lane, if they have one, has room."""
        self._heads.update([(head[:2], head) for head in heads])
        places = [self._place_of(candidate) for candidate in candidates]
        return tuple([c for c, place in zip(candidates, places, strict=True) if self._has_room(place)])

    def _has_room(self, place: int | None) -> bool:
        return place is None or self._lanes[place].takes_more

    def _place_of(self, candidate: Candidate) -> int | None:
        """Return the place of the lane where a batch is or has to be; None if it may go to any."""
        place = 0 if len(self._lanes) == 1 else self._place.get(candidate[:2])
        return place if place is not None or candidate.home is None else self._numbers.get(candidate.home)

    def add(self, start: Start) -> None:
        """Add a decision; ``start.candidate.compute`` is the sum of all layers of a new start."""
        candidate, on_lane = start.candidate, self.on_lanes.get(start.candidate[:2])
        place = start.lane if start.lane >= 0 else self._place_of(candidate)
        self._decisions += 1
        choice = Choice(self._decisions, start, on_lane)
        if place is None:
            self._anywhere.append(choice)
            return
        lane = self._lanes[place]
        lane.room -= 1
        lane.chosen.append(choice)
        lane.rest += on_lane.gate.after if on_lane else candidate.compute
        if not self._policy.setting.shares:  # only policies that choose lanes see what these hold
            return
        if lane.holds and lane.holds[-1][:2] == choice.batch:
            lane.holds.pop()
        end = on_lane.end if on_lane else candidate.layer + (start.layers or 1)
        lane.holds.append(_at(candidate, self._policy.setting.programs[candidate.program], end - 1))

    def settle(self) -> tuple[list[OnLane], list[Start]]:
        """Return the starts to revoke, and the new starts with their lanes, in the order of submission.

        A batch that may go to any lane takes one for which nothing is planned, or the one whose own batch comes last.
        """
        for choice in self._anywhere:
            lane = max(
                self._lanes,
                key=lambda lane: (lane.takes_more, lane.room > 0, _first(lane), not lane.revocable, -lane.rest),
            )
            lane.room -= 1
            lane.chosen.append(choice)
            lane.rest += choice.start.candidate.compute
        if self._policy.setting.shares:
            self._swap_equals(self._policy.setting.shares.lanes)
        revoked, starts = [], []
        for place, lane in enumerate(self._lanes):
            lane.chosen.sort(key=lambda choice: choice.number)
            kept = 0
            for on_lane in lane.revocable:
                if kept < len(lane.chosen) and lane.chosen[kept].on_lane is on_lane:
                    kept += 1
                else:
                    revoked.append(on_lane)
            # A batch that is revoked to go on behind others, or on another lane, is offered again when it has left.
            starts += [choice.start._replace(lane=place) for choice in lane.chosen[kept:] if not choice.on_lane]
        return revoked, starts

    def _swap_equals(self, shares: Sequence[Share]) -> None:
        """Let batches stay where they are if the policy has put them on lanes that are equal shares of the device."""
        for lane, share in zip(self._lanes, shares, strict=True):
            for other, other_share in zip(self._lanes, shares, strict=True):
                if share == other_share and other.chosen and other.chosen[0].on_lane in lane.revocable:
                    lane.chosen, other.chosen = other.chosen, lane.chosen

    def review_at(self, now: int, *, lane_awaited: bool) -> int:
        """Return the tick at which to ask again although nothing has happened, or NO_DEADLINE; called after ``settle``.

        That is shortly before a lane is free, if anything waits for one. It is also when a batch that waits behind one
        with a later deadline is about to lose its slack: two layers before (one that runs, and one that the policy lets
        pass), and from then on at every gate.
        """
        busy = [place for place, lane in enumerate(self._lanes) if lane.is_busy] if lane_awaited else []
        speeds = self._speeds({place: lane.holds[0].program for place, lane in enumerate(self._lanes) if lane.holds})
        rests = [(self._lanes[place].rest - SHORT_TICKS) / speeds.get(place, 1.0) for place in busy]
        return min(self._slack_ends(now), *[now + ceil(rest) + 1 for rest in rests], NO_DEADLINE)

    def _speeds(self, running: Mapping[int, int]) -> dict[int, float]:
        """Return the speed of what runs on lanes (place -> program); lanes that are shares of a device slow it down."""
        shares = self._policy.setting.shares
        if not shares or not running:
            return dict.fromkeys(running, 1.0)
        return dict(zip(running, shares.speeds(list(running.values()), list(running)), strict=True))

    def _slack_ends(self, now: int) -> int:
        """Return when to ask again because a batch is about to lose its slack."""
        if len(self._heads) < 2:
            return NO_DEADLINE
        setting = self._policy.setting
        running = {place: lane.chosen[0] for place, lane in enumerate(self._lanes) if lane.chosen}
        heads = {choice.batch: self._heads[choice.batch] for choice in running.values()}
        last_due = max([head.deadline for head in heads.values()], default=0)
        waiting = [head for batch, head in self._heads.items() if head.deadline < last_due and batch not in heads]
        latest = latest_end(waiting, now, self._policy.loop_options.margin) if waiting else NO_DEADLINE
        if not now < latest < NO_DEADLINE:
            return NO_DEADLINE
        kinds, longest, soonest = {place: heads[choice.batch].program for place, choice in running.items()}, 0.0, inf
        for place, speed in self._speeds(kinds).items():
            choice, layers = running[place], setting.programs[kinds[place]].compute
            layers = layers[choice.start.candidate.layer :]
            longest = max(longest, max(layers) / speed)
            until = choice.on_lane.gate.until if choice.on_lane else 0
            soonest = min(soonest, (until or layers[0]) / speed)
        return max(latest - round(2 * longest), now + max(1, round(soonest)))


def _first(lane: PlannedLane) -> float:
    """Return the number of the first decision for a lane."""
    return min([choice.number for choice in lane.chosen], default=inf)


def _at(candidate: Candidate, program: Program, layer: int) -> Candidate:
    """Return a candidate of the same batch at another layer."""
    return candidate._replace(layer=layer, compute=program.compute[layer], remaining=program.remaining[layer])


class LanePlanner:
    """Makes plans, and estimates how far running batches have come."""

    def __init__(self) -> None:
        self._since = 0
        """The tick up to which ``_done`` counts."""
        self._done: dict[Queued, float] = {}
        """What runs -> ticks at full speed that it was expected to be computed for."""
        self._speeds: dict[Queued, float] = {}

    def plan(self, policy: Policy, lanes: Sequence[LaneQueue[Queued]], now: int) -> LanePlan:
        """Return a plan without decisions: the lanes with what cannot be revoked, and the rest as if it had paused."""
        self._advance(policy, lanes, now)
        is_open = [lane.is_open for lane in lanes]
        closed = [not lane_is_open and any(is_open) for lane_is_open in is_open]
        planned = [self._look_at(policy, lane, now, closed=shut) for lane, shut in zip(lanes, closed, strict=True)]
        return LanePlan(policy, planned, {lane.index: place for place, lane in enumerate(lanes)})

    def _advance(self, policy: Policy, lanes: Sequence[LaneQueue[Queued]], now: int) -> None:
        """Update the expected progress of what runs; lanes that are shares of a device slow each other down."""
        heads = [(place, lane.tasks[0]) for place, lane in enumerate(lanes) if lane.tasks]
        began = {task: task.began for _, task in heads if task.began is not None and task.began <= now}
        shares, speeds = policy.setting.shares, dict.fromkeys(began, 1.0)
        if shares and began:
            kinds = [task.candidate.program for task in began]
            speeds = dict(zip(began, shares.speeds(kinds, [at for at, task in heads if task in began]), strict=True))
        # What began since the last plan has slowed the others down from then on.
        changed = max([self._since, *[start for task, start in began.items() if task not in self._done]])
        done = {}
        for task, start in began.items():
            before = self._done.get(task, 0.0) + self._speeds.get(task, 0.0) * (changed - self._since)
            done[task] = before + speeds[task] * (now - (changed if task in self._done else start))
        self._done, self._speeds, self._since = done, speeds, now

    def _look_at(self, policy: Policy, lane: LaneQueue[Queued], now: int, *, closed: bool) -> PlannedLane:
        """Return a lane as the policy sees it before its first decision."""
        setting, planned, tasks, fixed = policy.setting, PlannedLane(), lane.tasks, 0
        for task in tasks:
            candidate, program, done = task.candidate, setting.programs[task.candidate.program], self._done.get(task)
            if task.layers is None:
                planned.holds.append(candidate)
                planned.rest += 0 if task.aborted else max(0, candidate.compute - round(done or 0))
                fixed += 1
                continue
            gate = next_gate(program, candidate.layer, task.layers, done)
            end, until = gate.layer, gate.until
            # To leave and to start again would take longer than what is left of it, or nothing fits behind it.
            if task.aborted:
                pass
            elif gate.after <= program.leave + program.launch or (done is None and len(tasks) > MOST_AHEAD):
                end, until, fixed = candidate.layer + task.layers, until + gate.after, fixed + 1
                planned.ending = True
            else:
                planned.revocable.append(OnLane(task, lane.index, gate))
            if end > candidate.layer:
                planned.holds.append(_at(candidate, program, end - 1))
                planned.rest += until
        room = 1 + setting.ahead - fixed
        if closed or len(tasks) > MOST_AHEAD or not has_room(lane, setting.ahead):
            room = 0
        elif fixed == len(tasks) and not planned.ending:
            room = max(1, room)
        planned.room = max(room, len(planned.revocable))  # what waits may stay, however much is before it
        return planned
