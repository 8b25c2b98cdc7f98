"""Layerweaver+ (Oh, dissertation, chapter V): weave, but switch to the most urgent request in time.

Mode 1 is Layerweaver's least idle time, ties going to the least slack. If the most urgent request
could then no longer finish alone before its deadline, mode 2 takes its layer instead. The printed
pseudo-code (Fig. V.3, line 23) has that comparison reversed; the prose has it right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weft.devices.decoupled import issue
from weft.engine.policies.base import NO_DEADLINE, Candidate, LateWork, Policy, Start, Traits, View
from weft.engine.policies.in_order import Fifo
from weft.engine.policies.layerweaver import Layerweaver
from weft.kernels import rules


@dataclass(frozen=True)
class LayerweaverPlus(Policy):
    """Weaves until the most urgent request has no slack left; deadlines of late requests do not count."""

    traits: ClassVar[Traits] = Traits(for_deadlines=True, late_work=LateWork.WOVEN)

    failsafe: bool = True
    """In mode 1, run by arrival while all models are compute-bound, or all memory-bound: there is nothing to weave."""
    precise: bool = False
    """Replay the remaining time of a request on an empty device, instead of summing the longer of fetch and compute of
    every layer."""

    def decide(self, view: View) -> Start:
        """Choose the woven layer, or that of the request due first if it could not be on time after that."""
        woven = self.throughput_choice(view)
        due = [c for c in view.candidates if c.deadline < NO_DEADLINE]
        if due:
            urgent = min(due, key=lambda c: c.deadline)
            if rules.slack(urgent.deadline, self.end_after(woven, view), urgent.remaining, percent=100) < 0:
                return Start(urgent)
        return Start(woven)

    def throughput_choice(self, view: View) -> Candidate:
        """Return the choice of mode 1: the layer that leaves least idle time."""
        weaver = Layerweaver(self.setting, self.failsafe)
        if self.failsafe and weaver.one_sided(view.heads):
            return Fifo(self.setting).decide(view).candidate
        costs = weaver.unstarved(view)
        return min(costs, key=lambda idle: rules.weave_due_key(idle.total, idle.candidate.deadline)).candidate

    def end_after(self, candidate: Candidate, view: View) -> int:
        """Return when the array would be free after a candidate."""
        after, _ = issue(view.device, candidate.fetch, candidate.compute, self.setting.buffer)
        return after.array_free
