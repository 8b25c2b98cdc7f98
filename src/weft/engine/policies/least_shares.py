"""Another policy's weave of some streams, with the layers of the other streams in between at their least shares.

A trial builds it from a policy that starves streams (``weft.engine.trial``): it keeps the throughput of that weave. A
band around the mix would also hold back the woven streams. Its compiled twin is in ``weft.engine.compiled``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from weft.devices.costs.program import Program
from weft.devices.decoupled import DeviceClocks, issue
from weft.engine.policies.base import Candidate, Policy, Start, Traits, View
from weft.engine.policies.bound import alone_ticks, least_share

MARGIN = 0.01
"""Fraction by which least shares are exceeded: a layer between others may take longer than in a model run alone."""


@dataclass(eq=False, slots=True)
class Weave:
    """The state of the woven streams as if they had the device to themselves, without the layers put in between."""

    device: DeviceClocks = field(default_factory=DeviceClocks)
    heads: list[Candidate] = field(default_factory=list)
    steps: int = 0

    def advance(self, rule: Policy) -> int:
        """Issue the next layer of the weave as the policy *rule* chooses it; return its stream by *rule*'s numbers."""
        programs = rule.setting.programs
        if not self.heads:
            self.heads = [Candidate.of_stream(p, stream=number, query=0, layer=0) for number, p in enumerate(programs)]
        heads = tuple(self.heads)
        start = rule.decide(View(self.device, heads, heads))
        assert start, "a saturated stream can always go on"
        chosen = start.candidate
        self.device, _ = issue(self.device, chosen.fetch, chosen.compute, rule.setting.buffer, start.not_before)
        self.heads[chosen.stream] = chosen.following(programs[chosen.stream], last_issued=self.steps)
        self.steps += 1
        return chosen.stream


@dataclass(frozen=True)
class WithLeastShares(Policy):
    """Issues a layer of a stream at its least share when that layer is due, and otherwise goes on with the weave.

    An object keeps the state of its weave, so it serves one run only.
    """

    traits: ClassVar[Traits] = Traits(serves_requests=False)

    weaver: Policy
    """The policy that decides among the woven streams."""
    at_least: tuple[int, ...]
    """The streams that are not woven but run at their least shares."""
    _weave: Weave = field(default_factory=Weave, init=False, repr=False, compare=False)

    @cached_property
    def woven(self) -> tuple[int, ...]:
        """The streams that are woven."""
        return tuple(stream for stream in range(len(self.setting.programs)) if stream not in self.at_least)

    @cached_property
    def rule(self) -> Policy:
        """The weaver with a setting that has only the woven streams."""
        programs, uncut = (
            [all_programs[stream] for stream in self.woven]
            for all_programs in (self.setting.programs, self.setting.uncut)
        )
        return replace(self.weaver, setting=replace(self.setting, programs=programs, whole=uncut))

    @cached_property
    def _periods(self) -> dict[int, tuple[int, ...]]:
        """Stream at its least share -> ticks from the start of a query to each of its layers, and to its end.

        Ticks of the weave's own clock (``Weave.device``).
        """
        least = least_share(len(self.setting.programs)) * (1 + MARGIN)
        woven_part = 1 - len(self.at_least) * least
        periods = {}
        for stream in self.at_least:
            alone = alone_ticks(self.setting.uncut[stream], self.setting.buffer)
            periods[stream] = _spread(self.setting.programs[stream], max(1, round(alone * woven_part / least)))
        return periods

    def decide(self, view: View) -> Start:
        """Issue a layer of a least-share stream that is due by the weave's own clock, else go on with the weave."""
        heads = {candidate.stream: candidate for candidate in view.candidates}
        for stream in self.at_least:
            head, ticks_to_layers = heads[stream], self._periods[stream]
            due = head.query * ticks_to_layers[-1] + ticks_to_layers[head.layer]  # the last one is the whole period
            if due <= self._weave.device.array_free:
                return Start(head)
        woven_stream = self._weave.advance(self.rule)
        return Start(heads[self.woven[woven_stream]])

    def dues(self, stream: int, end: int) -> npt.NDArray[np.int64]:
        """Return the ticks of the weave's own clock at which successive layers of *stream* are due, until *end*."""
        period = np.array(self._periods[stream], np.int64)
        starts = np.arange(end // period[-1] + 1, dtype=np.int64) * period[-1]
        dues: npt.NDArray[np.int64] = np.add.outer(starts, period[:-1]).ravel()
        return dues[dues <= end]


def _spread(program: Program, period: int) -> tuple[int, ...]:
    """Return the ticks from the start of a period at which each layer of a query is due, and the period itself.

    Every layer takes a part of the period in proportion to its work.
    """
    work_before: Sequence[int] = [0, *accumulate(program.work)]
    return tuple(period * work // work_before[-1] for work in work_before)
