"""Policy for hosts: as many requests on time as possible, and among the orders that achieve it the quickest.

Moore and Hodgson's rule gives the largest set of jobs that one machine can finish in time: go through the jobs by
deadline, and whenever a job would be late, leave out the job with the highest cost for its worth. The rest can run in
order of deadlines with some slack, and the slack is spent on the request with the least remaining time, segment by
segment. A request's worth grows while it waits, and a missed deadline is extended, so no request starves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import ClassVar, NamedTuple

from weft.engine.policies.base import (
    NO_DEADLINE,
    Candidate,
    LateWork,
    OptionRange,
    Policy,
    Running,
    Start,
    Traits,
    View,
)
from weft.kernels import rules

PATIENCE = 20
"""A request that missed its deadline gives way to requests on time until it has waited this multiple of its own length;
without a limit it would starve."""


class DueWork(NamedTuple):
    """A candidate with its remaining time, its deadline and its cost."""

    candidate: Candidate
    need: int
    """Remaining ticks with the margin, spread over the lanes."""
    due: int
    """The deadline, extended if it cannot be met."""
    yields: bool
    """Whether the candidate cannot meet its deadline and gives way to candidates that can."""
    cost: float
    """``need`` over worth."""


@dataclass(frozen=True)
class Punctual(Policy):
    """Plans with the remaining time of every request, and a margin for work that may arrive meanwhile."""

    traits: ClassVar[Traits] = Traits(
        for_deadlines=True, defers_late=True, late_work=LateWork.AMONG_OTHERS, foresight=100
    )
    ranges: ClassVar = {"margin": OptionRange(0, 1000, "percent")}

    margin: int = 10
    """Percent added to estimated remaining times."""

    def decide(self, view: View) -> Start:
        """Choose the quickest of those that can be on time together; without any, the one of lowest cost."""
        if len(view.candidates) == 1:
            return Start(view.candidates[0])
        now = max(view.device.channel_free, view.device.array_free)
        plans = sorted((self.plan(candidate, now) for candidate in view.candidates), key=due_order)
        saved = self.savable(plans, now)
        return Start(self._quickest(saved, now) if saved else min(plans, key=lambda plan: plan.cost).candidate)

    def aborts(self, view: View, running: tuple[Running, ...]) -> Candidate | None:
        """Preempt the running layer that loses least work, for a request that would be next and late if it waited.

        The victim must have the slack for that, or less worth. Its worth grows while it waits, so it is not preempted
        for ever.
        """
        now = max(view.device.channel_free, view.device.array_free)
        stoppable = [layer for layer in running if layer.stoppable]
        victim = min(stoppable, key=lambda layer: layer.candidate.work.whole - layer.rest).candidate
        with_victim = replace(view, heads=(*view.heads, victim), candidates=(*view.candidates, victim))
        chosen = self.decide(with_victim).candidate
        need = self._time_alone(chosen)
        next_end = now + min(layer.rest for layer in running)
        # Preempting must help: the request can be on time if it starts now, but not at the next end of a layer.
        if chosen is victim or not now + need <= chosen.deadline < next_end + need:
            return None
        spare = rules.slack(victim.deadline, now, victim.remaining, 100 + self.margin)
        return victim if spare >= need or _worth(chosen, now) > _worth(victim, now) else None

    def burden(self, candidate: Candidate, now: int) -> float:
        return self.plan(candidate, now).cost

    def _time_alone(self, candidate: Candidate) -> int:
        """Return the remaining ticks of a candidate alone on the device, with the margin."""
        return candidate.remaining * (100 + self.margin) // 100

    def plan(self, candidate: Candidate, now: int) -> DueWork:
        """Return a candidate's remaining time with margin, its deadline and its cost."""
        need = self._time_alone(candidate) // self.setting.lanes
        due = rules.reachable_due(candidate.deadline, candidate.arrival, now + need)
        return self.make_due_work(candidate, need, due, now)

    def make_due_work(self, candidate: Candidate, need: int, due: int, now: int) -> DueWork:
        """Return a candidate as ``DueWork``, given its remaining time and its deadline."""
        waited = _waiting_time(candidate, now)
        yields = due > candidate.deadline and waited < PATIENCE * candidate.work.whole
        return DueWork(candidate, need, due, yields, need / _worth(candidate, now))

    def savable(self, plans: list[DueWork], now: int) -> list[DueWork]:
        """Return the largest set that can be on time, in order of deadlines (*plans* are sorted with ``due_order``)."""
        left_out: set[int] = set()
        dearest: list[tuple[bool, float, int]] = []  # a heap: those that yield first, then the highest cost
        planned_end = now
        for place, plan in enumerate(plans):
            heappush(dearest, (not plan.yields, -plan.cost, place))
            planned_end += plan.need
            while planned_end > plan.due and dearest:
                _, _, worst = heappop(dearest)
                left_out.add(worst)
                planned_end -= plans[worst].need
        return [plan for place, plan in enumerate(plans) if place not in left_out]

    def _quickest(self, saved: list[DueWork], now: int) -> Candidate:
        """Return the candidate of lowest cost whose next segment makes no candidate with an earlier deadline late."""
        best, planned_end, slack = saved[0], now, NO_DEADLINE
        for plan in saved:
            if plan.cost < best.cost and plan.candidate.compute <= slack:
                best = plan
            planned_end += plan.need
            slack = min(slack, plan.due - planned_end)
        return best.candidate


def due_order(plan: DueWork) -> tuple[int, bool, float, int, int]:
    """Return the sort key of work by deadline.

    Ties must not depend on the order of the candidates: otherwise a segment could be stopped for a request that is then
    not chosen.
    """
    return plan.due, plan.yields, plan.cost, plan.candidate.stream, plan.candidate.query


def _waiting_time(candidate: Candidate, now: int) -> int:
    """Return the ticks since its arrival in which a candidate was not served."""
    return rules.waited(now, candidate.arrival, candidate.work.whole, candidate.remaining)


def _worth(candidate: Candidate, now: int) -> float:
    """Return how much a candidate counts: by priority and size, and more the longer it waits."""
    return rules.worth(candidate.priority, candidate.size, _waiting_time(candidate, now), candidate.work.whole)
