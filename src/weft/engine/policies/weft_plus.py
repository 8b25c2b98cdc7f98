"""Policy for deadlines on NPUs: Layerweaver+'s two modes with better estimates of remaining time.

A woven request shares the device, so its remaining time is estimated as ``stretch`` percent of its remaining time
alone, for every request and not only for the request with the first deadline. A request counts as late as soon as it
can no longer meet its deadline, so that it stops taking time from requests that can.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from weft.engine.policies.base import NO_DEADLINE, OptionRange, Start, Traits, View
from weft.engine.policies.layerweaver import Layerweaver
from weft.engine.policies.layerweaver_plus import LayerweaverPlus
from weft.kernels import rules


@dataclass(frozen=True)
class WeftPlus(LayerweaverPlus):
    """Weaves while every request has slack; otherwise runs the request with the least slack."""

    traits: ClassVar[Traits] = replace(LayerweaverPlus.traits, foresight=100)
    ranges: ClassVar = {"stretch": OptionRange(0, 10_000, "percent")}

    stretch: int = 200
    """Expected remaining time of a woven request, in percent of its remaining time alone."""

    def decide(self, view: View) -> Start:
        """Choose the woven layer, or that of the request with the least slack if this would be below 0 after it."""
        woven = self.throughput_choice(view)
        end = self.end_after(woven, view)
        one_sided = self.failsafe and Layerweaver(self.setting).one_sided(view.heads)
        stretch = 100 if one_sided else self.stretch  # nothing is woven, so nothing is stretched
        slack = {
            c: rules.slack(c.deadline, end, c.remaining, stretch) for c in view.candidates if c.deadline < NO_DEADLINE
        }
        if slack and min(slack.values()) < 0:
            return Start(min(slack, key=lambda c: slack[c]))
        return Start(woven)
