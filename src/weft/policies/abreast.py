"""Our policy for GPUs: models side by side on shares of it, as long as nobody is late for that.

Among the ways to share (one alone, two on the sides of a cut, several on streams) it takes the one in which most work
is done, if everybody who can be on time still can after it: one by one on the whole GPU, in order of deadlines, as
``punctual`` serves them. So whoever has no time to lose is alone, and the others step aside. A model that was given
less than its fair share lately counts for more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.errors import InputError
from weft.policies.base import Candidate, LaneState, Policy, Start, Traits, View
from weft.policies.punctual import DueWork, Punctual, in_order
from weft.policies.ways import NOWHERE, ways

Floats = npt.NDArray[np.float64]

URGE = 8.0
"""By how many times its lack, in fair shares, whoever lacks one counts for more."""
STAY = 0.97
"""What another way than the present one counts for: to change costs a segment that nobody runs beside."""
MOST_HELD = 2
"""A lane is given no more than this: one that runs, and one behind it."""


class _Work(NamedTuple):
    """What a stream goes on with."""

    head: Candidate
    offered: bool
    lane: int
    """The lane that holds something of it, or ``NOWHERE``."""
    rest: int
    """Ticks until that has ended."""


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

    def burden(self, candidate: Candidate, now: int) -> float:
        return self._one_by_one.burden(candidate, now)

    def decide(self, view: View) -> Start | None:
        assert self.setting.shares
        works = _works(view)
        known = ways(self.setting.shares, tuple([work.head.program for work in works]))
        lanes, speeds = known
        score = speeds @ self._weights(works)
        whole = self.setting.shares.whole
        present = np.array([whole[0] if work.lane in whole else work.lane for work in works])
        score[((lanes != present) & (present != NOWHERE)).any(axis=1)] *= STAY
        score[~self._punctual(works, speeds, view.device.channel_free)] = -1.0
        chosen = lanes[int(score.argmax())]
        return self._start(works, [int(lane) for lane in chosen], view)

    def _weights(self, works: list[_Work]) -> Floats:
        """What a unit of each one's work counts for."""
        all_of_them = sum([work.head.priority for work in works])
        fair = [work.head.priority / all_of_them for work in works]
        lacks = [max(0.0, self.floor / 100 - work.head.lately / part) for work, part in zip(works, fair, strict=True)]
        return np.array([1.0 + URGE * lack for lack in lacks])

    def _punctual(self, works: list[_Work], speeds: Floats, now: int) -> npt.NDArray[np.bool_]:
        """The ways after one step of which everybody who can be on time still can, one by one by deadlines."""
        plans = [self._due_work(work, now) for work in works]
        saved = self._one_by_one.savable(sorted(plans, key=in_order), now)
        if not saved:
            return np.ones(len(speeds), np.bool_)
        place = {plan.candidate.stream: at for at, plan in enumerate(plans)}
        order = [place[plan.candidate.stream] for plan in saved]
        slack, end = [], now
        for plan in saved:
            end += plan.need
            slack.append(plan.due - end)
        compute = np.array([float(work.head.compute) for work in works])
        step = MOST_HELD * np.divide(compute, speeds, out=np.zeros_like(speeds), where=speeds > 0).max(axis=1)
        done = speeds[:, order].cumsum(axis=1)
        kept: npt.NDArray[np.bool_] = (np.array(slack) >= step[:, None] * (1.0 - done)).all(axis=1)
        first = order[0]  # alone, it is what punctual would do
        return kept if kept.any() else np.arange(len(speeds)) == first

    def _due_work(self, work: _Work, now: int) -> DueWork:
        plan = self._one_by_one.plan(work.head, now)
        return plan._replace(need=plan.need + work.rest) if work.offered else plan

    def _start(self, works: list[_Work], chosen: list[int], view: View) -> Start | None:
        """The first, by deadline, of those who are on offer and have room on their lane."""
        first = sorted(zip(works, chosen, strict=True), key=lambda each: each[0].head.deadline)
        for work, lane in first:
            if lane == NOWHERE or not work.offered:
                continue
            free = self._free(lane, work, view.lanes)
            if free != NOWHERE:
                return Start(work.head, lane=free)
        return None

    def _free(self, lane: int, work: _Work, lanes: tuple[LaneState, ...]) -> int:
        """The lane that takes a work: of the streams of the whole GPU its own, or one with nothing to do."""
        assert self.setting.shares
        whole = self.setting.shares.whole
        if lane in whole:
            lane = work.lane if work.lane in whole else next((at for at in whole if not lanes[at].holds), NOWHERE)
        return lane if lane != NOWHERE and lanes[lane].room and len(lanes[lane].holds) < MOST_HELD else NOWHERE


def _works(view: View) -> list[_Work]:
    """What each stream goes on with: its most urgent candidate, or what it has on a lane."""
    on: dict[int, tuple[int, int, Candidate]] = {}
    for at, lane in enumerate(view.lanes):
        for held in lane.holds:
            on[held.stream] = at, lane.rest, held
    heads: dict[int, Candidate] = {}
    for each in view.candidates:
        if each.stream not in heads or _sooner(each, heads[each.stream]):
            heads[each.stream] = each
    found = [_Work(head, True, *on.get(stream, (NOWHERE, 0))[:2]) for stream, head in heads.items()]
    return found + [_Work(held, False, at, rest) for stream, (at, rest, held) in on.items() if stream not in heads]


def _sooner(one: Candidate, other: Candidate) -> bool:
    """Whether a candidate of a stream goes before another: due first, and of those begun."""
    return (one.deadline, one.layer == 0, one.query) < (other.deadline, other.layer == 0, other.query)
