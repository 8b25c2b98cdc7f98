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
from weft.policies.base import Candidate, Policy, Start, Traits, View
from weft.policies.punctual import Punctual, in_order
from weft.policies.ways import NOWHERE, SharingWay, ways

URGE = 20.0
"""By how many times its lack, in fair shares, whoever lacks one counts for more."""
STAY = 0.97
"""What another way than the present one counts for: until all have changed, nobody runs as that way says."""
PLENTY = 3
"""Whoever is due in more than so many times what all together take one by one is in no danger."""
MOST_HELD = 2
"""A lane is given no more than one segment that runs and one behind it; so long a decision binds."""


class _Work(NamedTuple):
    """What a body goes on with."""

    head: Candidate
    offered: bool
    lane: int
    """The lane that holds something of it, or ``NOWHERE``."""
    rest: int
    """Ticks until that has ended."""

    @property
    def ends(self) -> bool:
        """Whether all that is left of it is on its lane, and stays there."""
        return not self.offered and self.head.remaining <= self.head.compute


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
        works = self._works(view)
        way = self._way(works, view.device.channel_free)
        if way is None:
            return None
        for lane, work in sorted(zip(way.lanes, works, strict=True), key=lambda each: each[1].head.deadline):
            if work.offered and lane != NOWHERE:
                free = self._free(lane, work, view)
                if free != NOWHERE:
                    return Start(work.head, lane=free)
        return None

    def _works(self, view: View) -> list[_Work]:
        """What each body goes on with: its most urgent candidate, or what it has on a lane."""
        body = self._shares.body
        on: dict[int, tuple[int, int, Candidate]] = {}
        for at, lane in enumerate(view.lanes):
            for held in lane.holds:
                on[body(held.stream, held.program)] = at, lane.rest, held
        heads: dict[int, Candidate] = {}
        for each in view.candidates:
            own = body(each.stream, each.program)
            if own not in heads or _sooner(each, heads[own]):
                heads[own] = each
        found = [_Work(head, True, *on[own][:2] if own in on else (NOWHERE, 0)) for own, head in heads.items()]
        found += [_Work(held, False, at, rest) for own, (at, rest, held) in on.items() if own not in heads]
        found.sort(key=lambda work: work.head.program)  # so that the same works have the same ways
        return found

    def _way(self, works: list[_Work], now: int) -> SharingWay | None:
        """The way in which most is done, weighted by who lacks it, among those that leave everybody on time."""
        known = ways(self._shares, tuple([work.head.program for work in works]))
        if len(works) == 1:
            return known[0]
        slacks, weights, whole = self._slacks(works, now), self._weights(works), self._shares.whole
        held = [(at, whole[0] if work.lane in whole else work.lane) for at, work in enumerate(works) if work.rest]
        ending = [(at, lane) for at, lane in held if works[at].ends]
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

    def _weights(self, works: list[_Work]) -> list[float]:
        """What a unit of each one's work counts for."""
        everybody = sum([work.head.priority for work in works])
        lacks = [self.floor / 100 - work.head.lately * everybody / work.head.priority for work in works]
        return [1.0 + URGE * max(0.0, lack) for lack in lacks]

    def _slacks(self, works: list[_Work], now: int) -> list[tuple[int, int]]:
        """Those who can be on time, by deadlines and by their places in *works*, and the ticks that each has to spare
        if they are served one by one; none where all have plenty."""
        rests = [self._shares.ticks(work.head.program, work.lane, work.rest) if work.rest else 0 for work in works]
        most = sum([work.head.remaining for work in works]) * (100 + self.margin) // 100 + sum(rests)
        if min([work.head.deadline for work in works]) - now > PLENTY * most:
            return []
        punctual, plans = self._one_by_one, []
        for place, (work, rest) in enumerate(zip(works, rests, strict=True)):
            plan = punctual.plan(work.head, now)
            plans.append((plan._replace(need=plan.need + rest - (0 if work.offered else work.head.compute)), place))
        plans.sort(key=lambda each: in_order(each[0]))
        places = {id(plan): place for plan, place in plans}
        found, end = [], now
        for plan in punctual.savable([plan for plan, _ in plans], now):
            end += plan.need
            found.append((places[id(plan)], plan.due - end))
        return found

    def _free(self, lane: int, work: _Work, view: View) -> int:
        """The lane that takes a work: of the streams of the whole GPU its own, or one with nothing to do."""
        lanes, whole = view.lanes, self._shares.whole
        if lane in whole:
            lane = work.lane if work.lane in whole else next((at for at in whole if not lanes[at].holds), NOWHERE)
        return lane if lane != NOWHERE and lanes[lane].room and len(lanes[lane].holds) < MOST_HELD else NOWHERE


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
