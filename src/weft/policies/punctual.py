"""Our policy for hosts: as many requests on time as can be, and among the ways to do that the quickest.

Moore and Hodgson's rule finds the largest set of jobs that one machine can finish in time: go through them
by deadline, and whenever one would be late, leave out the one that is dearest for its worth. What is left
can be served in order of deadlines with some slack to spare, and the slack is spent on the shortest rest,
segment by segment. A request's worth grows while it waits, and one that missed its deadline is given as
long again, so nothing starves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from weft.errors import InputError
from weft.policies.base import NO_DEADLINE, Candidate, Policy, Running, Start, View


class _Plan(NamedTuple):
    """A candidate with what it takes and when it should be done."""

    candidate: Candidate
    need: int
    due: int
    cost: float
    """Time it takes over what it is worth."""


@dataclass(frozen=True)
class Punctual(Policy):
    """Plans with every request's remaining time and a margin for what may come between."""

    margin: int = 10
    """Percent by which remaining times are taken to be longer than estimated."""

    for_deadlines: ClassVar[bool] = True
    foresight: ClassVar[int] = 100

    def __post_init__(self) -> None:
        if not 0 <= self.margin <= 1000:
            raise InputError(f"margin = {self.margin} must be a percentage from 0 to 1000")

    def decide(self, view: View) -> Start:
        if len(view.candidates) == 1:
            return Start(view.candidates[0])
        now = max(view.device.channel_free, view.device.array_free)
        plans = sorted((self._plan(candidate, now) for candidate in view.candidates), key=lambda plan: plan.due)
        saved = self._savable(plans, now)
        return Start(self._quickest(saved, now) if saved else min(plans, key=lambda plan: plan.cost).candidate)

    def aborts(self, view: View, running: tuple[Running, ...]) -> Candidate | None:
        """Give up the running layer that costs least, for one that would be late if it waited and is not if it goes."""
        now = max(view.device.channel_free, view.device.array_free)
        free = now + min(layer.rest for layer in running)
        victim = min(running, key=lambda layer: layer.candidate.whole - layer.rest)
        spare = victim.candidate.deadline - now - self._need(victim.candidate)
        for candidate in view.candidates:
            need = self._need(candidate)
            rescued = now + need <= candidate.deadline < free + need
            if rescued and (spare >= need or candidate.priority > victim.candidate.priority):
                return victim.candidate
        return None

    def _need(self, candidate: Candidate) -> int:
        return candidate.remaining * (100 + self.margin) // 100 // self.setting.lanes

    def _plan(self, candidate: Candidate, now: int) -> _Plan:
        need = self._need(candidate)
        waited = max(0, now - candidate.arrival - (candidate.whole - candidate.remaining))
        worth = candidate.priority * candidate.size * (1 + waited / max(1, candidate.whole))
        return _Plan(candidate, need, _due(candidate, now + need), need / worth)

    def _savable(self, plans: list[_Plan], now: int) -> list[_Plan]:
        """The largest set that can be on time, by deadline."""
        saved: list[_Plan] = []
        end = now
        for plan in plans:
            saved.append(plan)
            end += plan.need
            if end > plan.due:
                dearest = max(saved, key=lambda other: other.cost)
                saved.remove(dearest)
                end -= dearest.need
        return saved

    def _quickest(self, saved: list[_Plan], now: int) -> Candidate:
        """The cheapest of those whose next segment leaves everybody due before it in time."""
        best, end, slack = saved[0], now, NO_DEADLINE
        for plan in saved:
            if plan.cost < best.cost and plan.candidate.compute <= slack:
                best = plan
            end += plan.need
            slack = min(slack, plan.due - end)
        return best.candidate


def _due(candidate: Candidate, earliest: int) -> int:
    """Its deadline; where that cannot be met, as long again as it was given, and again."""
    allowed = max(1, candidate.deadline - candidate.arrival)
    due = candidate.deadline
    while due < earliest:
        allowed *= 2
        due = candidate.arrival + allowed
    return due
