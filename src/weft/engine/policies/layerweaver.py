"""Layerweaver (HPCA'21, section III-D): issue the layer that leaves the two resources idle the least.

The published formulas with the corrections of docs/design.md: compute idle counts the stall of a
full buffer, and memory idle is charged only where the choice causes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from weft.devices.decoupled import DeviceClocks, issue, prefetchable
from weft.engine.policies.base import Candidate, Policy, Start, View
from weft.engine.policies.in_order import Fifo
from weft.kernels import rules


class Idle(NamedTuple):
    """The idle time that issuing one candidate would cause, in ticks."""

    candidate: Candidate
    compute: int
    """Ticks that the array waits for the weights."""
    memory: int
    """Ticks that the channel waits for space in the buffer that another order would have left."""
    potential: int
    """Ticks that the array would wait if the largest layer came next."""
    inherent: bool
    """Whether the layer computes longer than the rest of the buffer takes to fill: idle time in every order."""
    distance: int
    """The decoupling distance after the layer: how far fetching is ahead of the array."""

    @property
    def total(self) -> int:
        return self.compute + self.memory + self.potential

    @property
    def rank(self) -> tuple[int, int]:
        return rules.weave_key(self.total, self.inherent, self.distance)


@dataclass(frozen=True)
class Layerweaver(Policy):
    """The greedy choice with both starvation rules; falls back to ``fifo`` where weaving cannot pay."""

    failsafe: bool = True
    """Run one model at a time when all models are compute-bound, or all memory-bound."""

    @property
    def disabled(self) -> bool:
        """Whether the failsafe applies to the whole run, because all models are bound by the same resource."""
        sides = {program.compute_bound for program in self.setting.programs}
        return self.failsafe and len(sides) == 1

    @property
    def remark(self) -> str:
        side = "compute" if self.setting.programs[0].compute_bound else "memory"
        return f"failsafe: all models are {side}-bound here, so they run one at a time" if self.disabled else ""

    def decide(self, view: View) -> Start:
        if self.failsafe and self.one_sided(view.heads):
            return Fifo(self.setting).decide(view)
        return Start(min(self.unstarved(view), key=lambda idle: idle.rank).candidate)

    def one_sided(self, heads: Iterable[Candidate]) -> bool:
        """Return whether the models of *heads* are all compute-bound or all memory-bound."""
        return len({self.setting.programs[head.program].compute_bound for head in heads}) == 1

    def unstarved(self, view: View) -> list[Idle]:
        """Return the idle time of every candidate, or only of the candidates that help a starved resource.

        If every candidate lets the array wait, those of compute-bound models help; if every candidate lets the channel
        wait, those of memory-bound models (``rules.helps_starved``).
        """
        largest = max(program.largest_fetch for program in self.setting.programs)
        costs = [idle_of(candidate, view.device, self.setting.buffer, largest) for candidate in view.candidates]
        wants_weights = all(idle.compute > 0 for idle in costs)
        wants_space = all(idle.memory > 0 for idle in costs)
        compute_bound = [self.setting.programs[candidate.program].compute_bound for candidate in view.candidates]
        helping = [
            idle
            for idle, side in zip(costs, compute_bound, strict=True)
            if rules.helps_starved(wants_weights, wants_space, side)
        ]
        return helping or costs


def idle_of(candidate: Candidate, before: DeviceClocks, buffer: int, largest: int) -> Idle:
    """Return the idle time that issuing a candidate now would cause.

    before: the device now. buffer, largest: the weight buffer and the largest fetch of all models, in ticks.
    """
    _, times = issue(before, candidate.fetch, candidate.compute, buffer)
    ahead = prefetchable(before, candidate.fetch, buffer, times.fetch_end)
    return Idle(
        candidate,
        *rules.idle(candidate.fetch, candidate.compute, times.fetch_end, ahead, before.array_free, buffer, largest),
    )
