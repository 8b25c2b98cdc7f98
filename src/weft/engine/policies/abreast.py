"""Policy for GPUs: models run side by side on shares of the GPU, as long as no deadline is missed because of that.

Among the ways to share (one model alone, two on the sides of a cut, several on streams) the policy takes the way with
the highest weighted throughput after which all requests that can be on time still can be on time if they run one by one
on the whole GPU, in order of deadlines, as ``punctual`` serves them. So a request without slack runs alone, and the
others wait. While any deadline is near, at most two models run, on streams and not on a cut. A model that was given
less than its fair share recently has a higher weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

from weft.devices.shares import Shares
from weft.engine.policies.base import NO_DEADLINE, Candidate, LateWork, OptionRange, Policy, Start, Traits, View
from weft.engine.policies.punctual import Punctual
from weft.engine.policies.ways import NOWHERE, SharingWay, open_ways, ways
from weft.kernels import rules

URGE = 20.0
"""Additional weight of a model that lacks a whole fair share, and proportionally less for a part of a share: large
enough to outweigh every difference in throughput."""
RUSH = 60.0
"""Additional weight of a request without slack, times the square of needed over available time: a quarter of this if
twice the needed time is left."""
PLENTY = 20
"""If every deadline is further away than this multiple of all work one by one, deadlines are not considered."""
MOST_HELD = 2
"""Most segments on a lane, the running one included: behind more, an urgent arrival would have to wait too long."""


class _Work(NamedTuple):
    """The next work of a body (backbone): its most urgent candidate, or its segment on a lane."""

    head: Candidate
    offered: bool
    """Whether ``head`` is a candidate; if not, it is a segment on a lane."""
    need: int
    """Ticks to the end of its query on the whole GPU, with the margin."""
    due: int
    """Latest finish time of the query, which also lets the requests behind it in its stream be on time."""
    lane: int = NOWHERE
    """The lane that holds a segment of the query."""
    ends: bool = False
    """Whether that segment is the last of its query, so that the query cannot change lanes any more."""


@dataclass(frozen=True)
class Abreast(Policy):
    """Shares the GPU among models; looks one step ahead, to the next decision about the lanes that are filled now."""

    traits: ClassVar[Traits] = replace(Punctual.traits, late_work=LateWork.LAST, shares=True)
    ranges: ClassVar = {**Punctual.ranges, "floor": OptionRange(0, 100, "percent")}

    margin: int = 10
    """Percent added to estimated remaining times."""
    floor: int = 90
    """Percent of its fair share below which a model's weight grows. The fair share divides the GPU among the models
    with work in proportion to their priorities."""

    @cached_property
    def _punctual(self) -> Punctual:
        return Punctual(self.setting, self.margin)

    @cached_property
    def _shares(self) -> Shares:
        assert self.setting.shares
        return self.setting.shares

    def burden(self, candidate: Candidate, now: int) -> float:
        return self._punctual.burden(candidate, now)

    def decide(self, view: View) -> Start | None:
        """Choose a way to share the GPU, and start the most urgent work that it puts on a lane with room."""
        now = view.device.channel_free
        works = self._collect_work(view, now)
        way = self._choose_way(works, now)
        if way is None:
            return None
        startable = [
            (work.due, place, lane)
            for place, (work, wanted) in enumerate(zip(works, way.lanes, strict=True))
            if work.offered and (lane := self._find_lane(wanted, work, view)) != NOWHERE
        ]
        if not startable:
            return None
        _, chosen, lane = min(startable)
        waits = any([work.offered and work.lane == NOWHERE for place, work in enumerate(works) if place != chosen])
        more = len(startable) > 1 or waits or len(view.lanes[lane].holds) + 1 < MOST_HELD
        return Start(works[chosen].head, lane=lane, more=more)

    def _collect_work(self, view: View, now: int) -> list[_Work]:
        """Return the next work of each body (backbone), on lanes and waiting, sorted by program."""
        bodies, with_margin = self._shares.bodies, 100 + self.margin
        heads: dict[int, Candidate] = {}
        for candidate in view.candidates:
            body = bodies[candidate.program] if bodies else candidate.stream
            if body not in heads or _urgency(candidate) < _urgency(heads[body]):
                heads[body] = candidate
        works = []
        for number, lane in enumerate(view.lanes):
            if lane.holds:
                last = lane.holds[-1]
                lane_ticks = self._ticks(last.program, number, lane.rest)
                head = heads.pop(bodies[last.program] if bodies else last.stream, None)
                remaining = last.remaining - last.compute if head is None else head.remaining
                need = lane_ticks + remaining * with_margin // 100
                due, ends = _latest_finish(head or last, now + need), last.remaining <= last.compute
                works.append(_Work(head or last, offered=head is not None, need=need, due=due, lane=number, ends=ends))
        for head in heads.values():
            need = head.remaining * with_margin // 100
            works.append(_Work(head, offered=True, need=need, due=_latest_finish(head, now + need)))
        if len(works) > 1:
            # So that the cache of ways is hit whatever the order of candidates.
            works.sort(key=lambda work: work.head.program)
        return works

    def _ticks(self, program: int, lane: int, ticks: int) -> int:
        """Return how long work of *ticks* on the whole GPU takes on a lane."""
        return ticks if lane in self._shares.whole else self._shares.ticks(program, lane, ticks)

    def _choose_way(self, works: list[_Work], now: int) -> SharingWay | None:
        """Return the way with the highest weighted throughput that makes no request late; None: start nothing now.

        works: as of ``_collect_work``; a work is identified by its place there.
        """
        shares, programs = self._shares, tuple([work.head.program for work in works])
        if len(works) == 1:
            return ways(shares, programs)[0]  # the fastest
        whole = shares.whole
        held = tuple([whole[0] if work.lane in whole else work.lane for work in works])
        ending = tuple([place for place, work in enumerate(works) if work.ends])
        hurried = min([work.due for work in works]) - now <= PLENTY * sum([work.need for work in works])
        options, expected_speeds = open_ways(shares, programs, held, ending, hurried=hurried)
        weights, slacks = self._weights(works, now, hurried), self._slacks(works, now) if hurried else []
        scores = expected_speeds.dot(weights) if options else expected_speeds
        for _ in options:
            best = int(scores.argmax())
            if _keeps_deadlines(options[best], works, slacks):
                return options[best]
            scores[best] = -1.0
        return None  # ending queries keep their lanes, and every way with that makes a request late: they end first

    def _weights(self, works: list[_Work], now: int, hurried: bool) -> list[float]:
        """Return the weight of a unit of throughput of each work. hurried: whether a request may miss its deadline.

        If hurried, the additional weight is multiplied by the square of the number of requests that a tick of the work
        answers: in overload not all requests can be on time, and a long request would otherwise be saved at the cost of
        many short ones. The square misses 3.0 % of deadlines in overload, the first power 6.5 %, no factor 19.8 %; in
        other loads square and first power are alike.
        """
        priorities, floor, weights = sum([work.head.priority for work in works]), self.floor / 100, []
        best_rate = max([_answer_rate(work.head) for work in works]) if hurried else 1.0
        for head, _, need, due, _, _ in works:
            assert head.share, "lanes are shares"
            weight, lack = 0.0, floor - head.share.lately * priorities / head.priority
            if lack > 0.0:
                weight += URGE * lack
            if hurried:
                if due < NO_DEADLINE:
                    weight += RUSH * (need / max(1, due - now)) ** 2
                weight *= (_answer_rate(head) / best_rate) ** 2
            weights.append(1.0 + weight)
        return weights

    def _slacks(self, works: list[_Work], now: int) -> list[tuple[int, int]]:
        """Return the place and the slack of every work that can be on time if all run one by one, by deadline."""
        order = sorted([(work.due, place, work.need) for place, work in enumerate(works)])
        slacks, end, all_on_time = [], now, True
        for due, place, need in order:
            end += need
            slacks.append((place, due - end))
            if end > due:
                all_on_time = False
        if all_on_time:
            return slacks
        places = [place for _, place, _ in order]
        return self._savable([works[place] for place in places], places, now)

    def _savable(self, works: list[_Work], places: list[int], now: int) -> list[tuple[int, int]]:
        """Return places and slacks as ``_slacks`` if not all works can be on time; ``punctual`` chooses the late ones.

        works: sorted by deadline. places: the place of each in the list of all works.
        """
        punctual = self._punctual
        plans = [punctual.make_due_work(work.head, work.need, work.due, now) for work in works]
        place_of = {id(plan): place for place, plan in zip(places, plans, strict=True)}
        slacks, end = [], now
        for plan in punctual.savable(plans, now):
            end += plan.need
            slacks.append((place_of[id(plan)], plan.due - end))
        return slacks

    def _find_lane(self, lane: int, work: _Work, view: View) -> int:
        """Return the lane that takes a work now, or NOWHERE. lane: the lane of the chosen way.

        A stream of the whole GPU stands for all of them: the work stays on its own stream, or takes an idle one.
        """
        lanes, whole = view.lanes, self._shares.whole
        if lane in whole:
            idle = (stream for stream in whole if not lanes[stream].holds)
            lane = work.lane if work.lane in whole else next(idle, NOWHERE)
        return lane if lane != NOWHERE and lanes[lane].room and len(lanes[lane].holds) < MOST_HELD else NOWHERE


def _answer_rate(head: Candidate) -> float:
    """Return the number of requests that a tick of work answers, times their priority."""
    return head.priority * head.size / max(1, head.work.whole)


def _latest_finish(head: Candidate, earliest: int) -> int:
    """Return a candidate's latest finish time, for itself and for the requests behind it.

    earliest: when it could end at the earliest. A deadline before that is extended until it can be met.
    """
    due = head.deadline
    if due < earliest:
        due = rules.reachable_due(due, head.arrival, earliest)
    behind = head.share.behind if head.share else NO_DEADLINE
    return behind if earliest <= behind < due else due


def _keeps_deadlines(way: SharingWay, works: list[_Work], slacks: list[tuple[int, int]]) -> bool:
    """Return whether all works that can be on time one by one (*slacks*) still can after one step of this way.

    A step lasts until the slowest of the running works has ended ``MOST_HELD`` segments.
    """
    if not slacks:
        return True
    speeds, done = way.speeds, 0.0
    step = MOST_HELD * max([work.head.compute / speed for work, speed in zip(works, speeds, strict=True) if speed])
    for place, slack in slacks:
        done += speeds[place]
        if slack < step * (1.0 - done):
            return False
    return True


def _urgency(candidate: Candidate) -> tuple[int, bool, int]:
    """Return the sort key of the candidates of a body: by deadline, then begun batches first, then by query."""
    return candidate.deadline, candidate.layer == 0, candidate.query
