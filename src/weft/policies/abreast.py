"""Our policy for GPUs: models side by side on shares of it, as long as nobody is late for that.

Among the ways to share (one alone, two on the sides of a cut, several on streams) it takes the one in which most work
is done, if everybody who can be on time still can after it: one by one on the whole GPU, in order of deadlines, as
``punctual`` serves them. So whoever has no time to lose is alone, and the others step aside. A model that was given
less than its fair share lately counts for more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from operator import mul
from typing import ClassVar, NamedTuple

from weft.devices.shares import Shares
from weft.errors import InputError
from weft.policies.base import NO_DEADLINE, Candidate, Policy, Start, Traits, View
from weft.policies.punctual import Punctual
from weft.policies.ways import NOWHERE, SharingWay, ways

URGE = 20.0
"""By how many times its lack, in fair shares, whoever lacks one counts for more."""
RUSH = 60.0
"""By how much whoever has no time to spare counts for more; with twice the time it needs, a quarter of that."""
STAY = 0.97
"""What another way than the present one counts for: until all have changed, nobody runs as that way says."""
MOST_HELD = 2
"""A lane is given no more than one segment that runs and one behind it; so long a decision binds."""
BOUND = 4
"""The second one only if both take less than this part of the time to spare that somebody who comes may have."""


class _Work(NamedTuple):
    """What a body goes on with."""

    head: Candidate
    offered: bool
    need: int
    """Ticks that it takes to its end on the whole GPU."""
    due: int
    """When it should be done, for its own sake and that of those who wait behind it."""
    lane: int = NOWHERE
    """The lane that holds something of it; the first stream of the whole GPU for all of those."""
    stream: int = NOWHERE
    """The same, if that is a stream of the whole GPU: which."""
    rest: int = 0
    """Ticks until that has ended."""
    ends: bool = False
    """Whether that is the end of a query, which stays there."""


@dataclass(frozen=True)
class Abreast(Policy):
    """Looks one step ahead: until what it starts now could be followed by something else."""

    traits: ClassVar[Traits] = replace(Punctual.traits, shares=True)

    margin: int = 10
    """Percent by which remaining times are taken to be longer than estimated."""
    floor: int = 90
    """Percent of its fair share, by priorities among those who have work, below which a model counts for more."""

    def __post_init__(self) -> None:
        Punctual(self.setting, self.margin)  # which refuses what is no margin
        if not 0 <= self.floor <= 100:
            raise InputError(f"floor = {self.floor} must be a percentage from 0 to 100")

    @cached_property
    def _one_by_one(self) -> Punctual:
        return Punctual(self.setting, self.margin)

    @cached_property
    def _shares(self) -> Shares:
        assert self.setting.shares
        return self.setting.shares

    def burden(self, candidate: Candidate, now: int) -> float:
        return self._one_by_one.burden(candidate, now)

    def decide(self, view: View) -> Start | None:
        now = view.device.channel_free
        works = self._works(view, now)
        way = self._way(works, now)
        if way is None:
            return None
        for lane, work in sorted(zip(way.lanes, works, strict=True), key=lambda each: each[1].due):
            if work.offered and lane != NOWHERE:
                free = self._free(lane, work, view)
                if free != NOWHERE:
                    return Start(work.head, lane=free)
        return None

    def _works(self, view: View, now: int) -> list[_Work]:
        """What each body goes on with: its most urgent candidate, or what it has on a lane."""
        body, whole = self._shares.body, self._shares.whole
        heads: dict[int, Candidate] = {}
        for each in view.candidates:
            own = body(each.stream, each.program)
            if own not in heads or _sooner(each, heads[own]):
                heads[own] = each
        found, on = [], set()
        for at, lane in enumerate(view.lanes):
            if lane.holds:
                last = lane.holds[-1]
                own = body(last.stream, last.program)
                rest = self._shares.ticks(last.program, at, lane.rest)
                first = whole[0] if at in whole else at
                stream = at if at in whole else NOWHERE
                ends = last.remaining <= last.compute
                head = heads.pop(own, None)
                if head is None:
                    left = rest + self._longer(last.remaining - last.compute)
                    found.append(_Work(last, False, left, _due(last, now + left), first, stream, rest, ends))
                else:
                    left = rest + self._longer(head.remaining)
                    found.append(_Work(head, True, left, _due(head, now + left), first, stream, rest, ends))
        for head in heads.values():
            left = self._longer(head.remaining)
            found.append(_Work(head, True, left, _due(head, now + left)))
        found.sort(key=lambda work: work.head.program)  # so that the same works have the same ways
        return found

    def _longer(self, ticks: int) -> int:
        return ticks * (100 + self.margin) // 100

    def _way(self, works: list[_Work], now: int) -> SharingWay | None:
        """The way in which most is done, weighted by who needs it, among those that leave everybody on time."""
        known = ways(self._shares, tuple([work.head.program for work in works]))
        if len(works) == 1:
            return known[0]
        slacks, weights = self._slacks(works, now), self._weights(works, now)
        held = [(at, work.lane) for at, work in enumerate(works) if work.rest]
        ending = [(at, work.lane) for at, work in enumerate(works) if work.ends]
        most, best, best_score = max(weights), None, 0.0
        for way in known:
            if way.total * most <= best_score:
                break
            lanes, speeds, score = way
            if ending and any([lanes[at] != lane for at, lane in ending]):
                continue
            if most > 1.0:
                score = sum(map(mul, weights, speeds))
            for at, lane in held:
                if lanes[at] != lane:
                    score *= STAY
                    break
            if score > best_score and _keeps(way, works, slacks):
                best, best_score = way, score
        return best if best or ending else _alone(slacks[0][0], known)

    def _weights(self, works: list[_Work], now: int) -> list[float]:
        """What a unit of each one's work counts for."""
        everybody, found = sum([work.head.priority for work in works]), []
        for work in works:
            lack = self.floor / 100 - work.head.lately * everybody / work.head.priority
            rush = work.need / max(1, work.due - now)
            found.append(1.0 + URGE * max(0.0, lack) + (RUSH * rush * rush if work.due < NO_DEADLINE else 0.0))
        return found

    def _slacks(self, works: list[_Work], now: int) -> list[tuple[int, int]]:
        """Those who can be on time, by deadlines and by their places in *works*, and the ticks that each has to spare
        if they are served one by one."""
        order = sorted(range(len(works)), key=lambda at: works[at].due)
        found, end, least = [], now, 0
        for at in order:
            end += works[at].need
            found.append((at, works[at].due - end))
            least = min(least, works[at].due - end)
        return found if least >= 0 else self._savable(works, order, now)

    def _savable(self, works: list[_Work], order: list[int], now: int) -> list[tuple[int, int]]:
        """The same where not all can: who is left out is for ``punctual`` to say."""
        punctual, plans = self._one_by_one, []
        for at in order:
            work = works[at]
            plans.append(punctual.plan(work.head, now)._replace(need=work.need, due=work.due))
        places = {id(plan): at for at, plan in zip(order, plans, strict=True)}
        found, end = [], now
        for plan in punctual.savable(plans, now):
            end += plan.need
            found.append((places[id(plan)], plan.due - end))
        return found

    def _free(self, lane: int, work: _Work, view: View) -> int:
        """The lane that takes a work: of the streams of the whole GPU its own, or one with nothing to do."""
        lanes, whole = view.lanes, self._shares.whole
        if lane in whole:
            lane = work.stream if work.stream in whole else next((at for at in whole if not lanes[at].holds), NOWHERE)
        if lane == NOWHERE or not lanes[lane].room:
            return NOWHERE
        holds = lanes[lane].holds
        if holds:
            takes = lanes[lane].rest + work.head.compute
            if len(holds) >= MOST_HELD or BOUND * self._shares.ticks(work.head.program, lane, takes) > view.spare:
                return NOWHERE
        return lane


def _due(head: Candidate, earliest: int) -> int:
    """When a candidate should be done: what it cannot meet is put off, by as long again as it was given."""
    due, allowed = head.deadline, max(1, head.deadline - head.arrival)
    while due < earliest:
        allowed *= 2
        due = head.arrival + allowed
    return min(due, head.behind) if head.behind >= earliest else due


def _keeps(way: SharingWay, works: list[_Work], slacks: list[tuple[int, int]]) -> bool:
    """Whether all who can be on time still can, one by one, after a step this way."""
    step = MOST_HELD * max([work.head.compute / speed for work, speed in zip(works, way.speeds, strict=True) if speed])
    done = 0.0
    for place, slack in slacks:
        done += way.speeds[place]
        if slack < step * (1.0 - done):
            return False
    return True


def _alone(place: int, known: tuple[SharingWay, ...]) -> SharingWay:
    """The way in which a work has most of the GPU."""
    return max(known, key=lambda way: way.speeds[place])


def _sooner(one: Candidate, other: Candidate) -> bool:
    """Whether a candidate of a body goes before another: due first, and of those begun."""
    return (one.deadline, one.layer == 0, one.query) < (other.deadline, other.layer == 0, other.query)
