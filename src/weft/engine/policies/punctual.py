"""Our policy for hosts: as many requests on time as can be, and among the ways to do that the quickest.

Moore and Hodgson's rule finds the largest set of jobs that one machine can finish in time: go through them
by deadline, and whenever one would be late, leave out the one that is dearest for its worth. What is left
can be served in order of deadlines with some slack to spare, and the slack is spent on the shortest rest,
segment by segment. A request's worth grows while it waits, and one that missed its deadline is given as
long again, so nothing starves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import ClassVar, NamedTuple

from weft.base.errors import InputError
from weft.engine.policies.base import (
    NO_DEADLINE,
    Candidate,
    LateWork,
    Policy,
    Running,
    Start,
    Traits,
    View,
)
from weft.kernels import rules

PATIENCE = 20
"""How many times its own length a request that missed its deadline gives way to those that can still be on time."""


class DueWork(NamedTuple):
    """A candidate with what it takes and when it should be done."""

    candidate: Candidate
    need: int
    due: int
    yields: bool
    """It missed its deadline, and gives way."""
    cost: float
    """Time it takes over what it is worth."""


@dataclass(frozen=True)
class Punctual(Policy):
    """Plans with every request's remaining time and a margin for what may come between."""

    traits: ClassVar[Traits] = Traits(
        for_deadlines=True, defers_late=True, late_work=LateWork.AMONG_OTHERS, foresight=100
    )

    margin: int = 10
    """Percent by which remaining times are taken to be longer than estimated."""

    def __post_init__(self) -> None:
        if not 0 <= self.margin <= 1000:
            raise InputError(f"margin = {self.margin} must be a percentage from 0 to 1000")

    def decide(self, view: View) -> Start:
        if len(view.candidates) == 1:
            return Start(view.candidates[0])
        now = max(view.device.channel_free, view.device.array_free)
        plans = sorted((self.plan(candidate, now) for candidate in view.candidates), key=in_order)
        saved = self.savable(plans, now)
        return Start(self._quickest(saved, now) if saved else min(plans, key=lambda plan: plan.cost).candidate)

    def aborts(self, view: View, running: tuple[Running, ...]) -> Candidate | None:
        """Give up the layer that costs least, for one that goes next and is late if it has to wait.

        The other must be able to afford it, or be worth less; its worth grows each time, so this ends.
        """
        now = max(view.device.channel_free, view.device.array_free)
        lost = min(
            (layer for layer in running if layer.stoppable), key=lambda layer: layer.candidate.work.whole - layer.rest
        )
        victim = lost.candidate
        both = replace(view, heads=(*view.heads, victim), candidates=(*view.candidates, victim))
        chosen = self.decide(both).candidate
        need = self._alone(chosen)
        free = now + min(layer.rest for layer in running)
        if chosen is victim or not now + need <= chosen.deadline < free + need:
            return None
        spare = rules.slack(victim.deadline, now, victim.remaining, 100 + self.margin)
        return (
            victim
            if spare >= need or _worth(chosen, _waited(chosen, now)) > _worth(victim, _waited(victim, now))
            else None
        )

    def burden(self, candidate: Candidate, now: int) -> float:
        return self.plan(candidate, now).cost

    def _alone(self, candidate: Candidate) -> int:
        return candidate.remaining * (100 + self.margin) // 100

    def plan(self, candidate: Candidate, now: int) -> DueWork:
        """What a candidate takes, and when it should be done."""
        need = self._alone(candidate) // self.setting.lanes
        return self.weighed(candidate, need, _due(candidate, now + need), now)

    def weighed(self, candidate: Candidate, need: int, due: int, now: int) -> DueWork:
        """A candidate that takes so long and should be done then, with whether it yields and what it is worth."""
        waited = _waited(candidate, now)
        yields = due > candidate.deadline and waited < PATIENCE * candidate.work.whole
        return DueWork(candidate, need, due, yields, need / _worth(candidate, waited))

    def savable(self, plans: list[DueWork], now: int) -> list[DueWork]:
        """The largest set that can be on time, by deadline."""
        left_out: set[int] = set()
        dearest: list[tuple[bool, float, int]] = []
        end = now
        for place, plan in enumerate(plans):
            heappush(dearest, (not plan.yields, -plan.cost, place))
            end += plan.need
            while end > plan.due and dearest:
                worst = heappop(dearest)[2]
                left_out.add(worst)
                end -= plans[worst].need
        return [plan for place, plan in enumerate(plans) if place not in left_out]

    def _quickest(self, saved: list[DueWork], now: int) -> Candidate:
        """The cheapest of those whose next segment leaves everybody due before it in time."""
        best, end, slack = saved[0], now, NO_DEADLINE
        for plan in saved:
            if plan.cost < best.cost and plan.candidate.compute <= slack:
                best = plan
            end += plan.need
            slack = min(slack, plan.due - end)
        return best.candidate


def in_order(plan: DueWork) -> tuple[int, bool, float, int, int]:
    """Orders work by deadline; ties do not depend on the order of the candidates, or a segment could be stopped for
    one that then does not go."""
    return plan.due, plan.yields, plan.cost, plan.candidate.stream, plan.candidate.query


def _waited(candidate: Candidate, now: int) -> int:
    return rules.waited(now, candidate.arrival, candidate.work.whole, candidate.remaining)


def _worth(candidate: Candidate, waited: int) -> float:
    """Priority and number of requests, times what they waited over what they take."""
    return candidate.priority * candidate.size * (1 + waited / max(1, candidate.work.whole))


def _due(candidate: Candidate, earliest: int) -> int:
    """Its deadline; where that cannot be met, as long again as it was given, and again."""
    allowed = max(1, candidate.deadline - candidate.arrival)
    due = candidate.deadline
    while due < earliest:
        allowed *= 2
        due = candidate.arrival + allowed
    return due
