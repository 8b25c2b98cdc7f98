"""Our policy for GPUs: models side by side on shares of it, as long as nobody is late for that.

Among the ways to share (one alone, two on the sides of a cut, several on streams) it takes the one in which most work
is done, if everybody who can be on time still can after it: one by one on the whole GPU, in order of deadlines, as
``punctual`` serves them. So whoever has no time to lose is alone, and the others step aside. Where somebody is due soon
at most two are on streams, and nobody on a cut. A model that was given less than its fair share lately counts for more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

from weft.base.errors import InputError
from weft.devices.shares import Shares
from weft.engine.policies.base import (
    NO_DEADLINE,
    Candidate,
    LateWork,
    Policy,
    Start,
    Traits,
    View,
)
from weft.engine.policies.punctual import Punctual
from weft.engine.policies.ways import NOWHERE, SharingWay, open_ways, ways

URGE = 20.0
"""By how many times its lack, in fair shares, whoever lacks one counts for more."""
RUSH = 60.0
"""By how much whoever has no time to spare counts for more; with twice the time it needs, a quarter of that."""
PLENTY = 20
"""Whoever is due in more than so many times what all together take one by one is in no danger."""
MOST_HELD = 2
"""A lane is given no more than one segment that runs and one behind it; so long a decision binds."""


class _Work(NamedTuple):
    """What a body goes on with."""

    head: Candidate
    offered: bool
    need: int
    """Ticks that it takes to its end on the whole GPU."""
    due: int
    """When it should be done, for its own sake and that of those who wait behind it."""
    lane: int = NOWHERE
    """The lane that holds something of it."""
    ends: bool = False
    """Whether that is the end of a query, which stays there."""


@dataclass(frozen=True)
class Abreast(Policy):
    """Looks one step ahead: until what it starts now could be followed by something else."""

    traits: ClassVar[Traits] = replace(Punctual.traits, late_work=LateWork.LAST, shares=True)

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
        may = [
            (work.due, at, lane)
            for at, (work, wanted) in enumerate(zip(works, way.lanes, strict=True))
            if work.offered and (lane := self._free(wanted, work, view)) != NOWHERE
        ]
        if not may:
            return None
        _, at, lane = min(may)
        waits = any([work.offered and work.lane == NOWHERE for place, work in enumerate(works) if place != at])
        more = len(may) > 1 or waits or len(view.lanes[lane].holds) + 1 < MOST_HELD
        return Start(works[at].head, lane=lane, more=more)

    def _works(self, view: View, now: int) -> list[_Work]:
        """What each body goes on with: its most urgent candidate, or what it has on a lane."""
        bodies, longer = self._shares.bodies, 100 + self.margin
        heads: dict[int, Candidate] = {}
        for each in view.candidates:
            own = bodies[each.program] if bodies else each.stream
            if own not in heads or _sooner(each, heads[own]):
                heads[own] = each
        found = []
        for at, lane in enumerate(view.lanes):
            if lane.holds:
                last = lane.holds[-1]
                rest = self._ticks(last.program, at, lane.rest)
                head = heads.pop(bodies[last.program] if bodies else last.stream, None)
                left = last.remaining - last.compute if head is None else head.remaining
                need = rest + left * longer // 100
                due, ends = _due(head or last, now + need), last.remaining <= last.compute
                found.append(_Work(head or last, head is not None, need, due, at, ends))
        for head in heads.values():
            need = head.remaining * longer // 100
            found.append(_Work(head, True, need, _due(head, now + need)))
        if len(found) > 1:
            found.sort(key=_program)  # so that the same works have the same ways
        return found

    def _ticks(self, program: int, lane: int, ticks: int) -> int:
        """How long work takes on a lane."""
        return ticks if lane in self._shares.whole else self._shares.ticks(program, lane, ticks)

    def _way(self, works: list[_Work], now: int) -> SharingWay | None:
        """The way in which most is done, weighted by who needs it, among those that leave everybody on time."""
        shares, programs = self._shares, tuple([work.head.program for work in works])
        if len(works) == 1:
            return ways(shares, programs)[0]
        whole = shares.whole
        held = tuple([whole[0] if work.lane in whole else work.lane for work in works])
        ending = tuple([at for at, work in enumerate(works) if work.ends])
        hurried = min([work.due for work in works]) - now <= PLENTY * sum([work.need for work in works])
        found, counts = open_ways(shares, programs, held, ending, hurried=hurried)
        weights, slacks = self._weights(works, now, hurried), self._slacks(works, now) if hurried else []
        scores = counts.dot(weights) if found else counts
        for _ in found:
            best = int(scores.argmax())
            if _keeps(found[best], works, slacks):
                return found[best]
            scores[best] = -1.0
        return None  # whoever ends a query where it is has to be waited for

    def _weights(self, works: list[_Work], now: int, hurried: bool) -> list[float]:
        """The weight of a unit of work of each model; hurried: a request may miss its deadline.

        Then need and lack count for as much as the square of the requests that a unit of work answers: in overload not
        all can be on time, and a long request would be saved at the cost of many short ones. To the first power 6.5 %
        of deadlines were missed where the square misses 3.0, and without it 19.8; elsewhere both are alike.
        """
        everybody, floor, found = sum([work.head.priority for work in works]), self.floor / 100, []
        most = max([_answers(work.head) for work in works]) if hurried else 1.0
        for head, _, need, due, _, _ in works:
            assert head.share, "lanes are shares"
            weight, lack = 0.0, floor - head.share.lately * everybody / head.priority
            if lack > 0.0:
                weight += URGE * lack
            if hurried:
                if due < NO_DEADLINE:
                    weight += RUSH * (need / max(1, due - now)) ** 2
                weight *= (_answers(head) / most) ** 2
            found.append(1.0 + weight)
        return found

    def _slacks(self, works: list[_Work], now: int) -> list[tuple[int, int]]:
        """Those who can be on time, by deadlines and by their places in *works*, and the ticks that each has to spare
        if they are served one by one."""
        order = sorted([(work.due, at, work.need) for at, work in enumerate(works)])
        found, end, all_can = [], now, True
        for due, at, need in order:
            end += need
            found.append((at, due - end))
            if end > due:
                all_can = False
        return found if all_can else self._savable([works[at] for _, at, _ in order], [at for _, at, _ in order], now)

    def _savable(self, works: list[_Work], places: list[int], now: int) -> list[tuple[int, int]]:
        """The same where not all can: who is left out is for ``punctual`` to say."""
        punctual = self._one_by_one
        plans = [punctual.weighed(work.head, work.need, work.due, now) for work in works]
        place_of = {id(plan): at for at, plan in zip(places, plans, strict=True)}
        found, end = [], now
        for plan in punctual.savable(plans, now):
            end += plan.need
            found.append((place_of[id(plan)], plan.due - end))
        return found

    def _free(self, lane: int, work: _Work, view: View) -> int:
        """The lane that takes a work: of the streams of the whole GPU its own, or one with nothing to do."""
        lanes, whole = view.lanes, self._shares.whole
        if lane in whole:
            lane = work.lane if work.lane in whole else next((at for at in whole if not lanes[at].holds), NOWHERE)
        return lane if lane != NOWHERE and lanes[lane].room and len(lanes[lane].holds) < MOST_HELD else NOWHERE


def _answers(head: Candidate) -> float:
    """Requests that a tick of work answers, by their priorities."""
    return head.priority * head.size / max(1, head.work.whole)


def _due(head: Candidate, earliest: int) -> int:
    """When a candidate should be done: what it cannot meet is put off, by as long again as it was given."""
    due = head.deadline
    allowed = max(1, due - head.arrival) if due < earliest else 0
    while due < earliest:
        allowed *= 2
        due = head.arrival + allowed
    behind = head.share.behind if head.share else NO_DEADLINE
    return behind if earliest <= behind < due else due


def _keeps(way: SharingWay, works: list[_Work], slacks: list[tuple[int, int]]) -> bool:
    """Whether all who can be on time still can, one by one, after a step this way."""
    if not slacks:
        return True
    speeds, done = way.speeds, 0.0
    step = MOST_HELD * max([work.head.compute / speed for work, speed in zip(works, speeds, strict=True) if speed])
    for place, slack in slacks:
        done += speeds[place]
        if slack < step * (1.0 - done):
            return False
    return True


def _sooner(one: Candidate, other: Candidate) -> bool:
    """Whether a candidate of a body goes before another: due first, and of those begun."""
    return (one.deadline, one.layer == 0, one.query) < (other.deadline, other.layer == 0, other.query)


def _program(work: _Work) -> int:
    return work.head.program
