"""Policy for saturated streams: rollouts that minimise the priced idle time of both resources.

The dual prices of the two-resource bound give the throughput that a tick of idle array or channel costs; the gap of a
steady schedule to its bound is exactly its priced idle time. So ``weft`` plays every candidate out: it simulates a few
dozen layers after that candidate under each of two simple rules, keeps the play (a sequence of layers) with the least
priced idle time, and issues the first layers of that play. The fairness rule keeps the streams at the mix of the bound,
or at the mix that the user asked for; every stream has a least share, so none starves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import ClassVar

from weft.base.errors import InputError
from weft.devices.decoupled import DeviceClocks, issue
from weft.engine.policies.aimt import AiMt
from weft.engine.policies.base import Candidate, Policy, Start, Traits, View
from weft.engine.policies.bound import QueryDemand, alone_ticks, best_mix, mix_prices, prices
from weft.engine.policies.fairness import Band, may_go
from weft.engine.policies.in_order import RoundRobin
from weft.engine.policies.layerweaver import Layerweaver
from weft.kernels import rules

PRICE_UNIT = 2**20
"""Units of a price of 1: prices are integers, so that the plain and the compiled rollouts choose alike."""
SHORT_HORIZON = 16
"""A shorter horizon that the trial compares as well: it follows quick changes between layers better."""
THRESHOLDS = tuple(product((0.05, 0.2, 0.4, 0.6, 0.9), (0.0, 0.1, 0.5)))
"""Pairs of thresholds that the trial gives ``aimt``, fewer than a sweep tries: ``aimt`` is seldom the best contender,
and then by little."""


@dataclass(frozen=True)
class Weft(Policy):
    """Chooses by rollouts. An object keeps the layers that remain of its last plan, so it serves one run only."""

    traits: ClassVar[Traits] = Traits(serves_requests=False, cuts=(1, 2, 4, 8, 16))

    horizon: int = 32
    """Layers per stream for which each candidate is played out."""
    commit: int = 8
    """Layers of the best play that are issued before the next rollout."""
    trial: bool = True
    """Compare horizons, other policies' rules and smaller pieces before the run, and use the best."""
    _plan: deque[int] = field(default_factory=deque, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.commit <= self.horizon <= 4096:
            raise InputError(
                f"horizon = {self.horizon}, commit = {self.commit}: must be 1 <= commit <= horizon <= 4096"
            )

    def contenders(self) -> Iterator[Policy]:
        """Yield rollouts of two horizons, and other policies."""
        yield self
        if not self.trial or type(self) is not Weft:  # a subclass decides for itself
            return
        if self.commit <= SHORT_HORIZON != self.horizon:
            yield replace(self, horizon=SHORT_HORIZON)
        yield Layerweaver(self.setting, failsafe=False)
        yield from (AiMt(self.setting, *thresholds) for thresholds in THRESHOLDS)
        yield RoundRobin(self.setting)
        if self.setting.mix and Layerweaver(self.setting).disabled:
            yield Layerweaver(self.setting)  # model by model, as far as the band allows

    @property
    def length(self) -> int:
        """The number of layers of a play."""
        return self.horizon * len(self.setting.programs)

    @cached_property
    def _demands(self) -> list[QueryDemand]:
        """Both resources' use by a query of each stream; channel idle time that no order avoids counts as used."""
        buffer = self.setting.buffer
        return [
            QueryDemand(
                program.total_compute, program.total_fetch + program.inherent_idle(buffer), alone_ticks(whole, buffer)
            )
            for program, whole in zip(self.setting.programs, self.setting.uncut, strict=True)
        ]

    @cached_property
    def band(self) -> Band:
        """The mix that the user asked for, the one that a trial selected, or the one at which the bound is reached."""
        requested = super().band
        if requested:
            return requested
        rates = best_mix(self._demands)
        return Band(tuple(rate / min(rates) for rate in rates), self.setting.max_lag)

    @cached_property
    def prices(self) -> tuple[int, int]:
        """The prices of an idle tick of the array and of the channel, as integers of at least 1."""
        dual = mix_prices(self._demands, self.setting.mix) if self.setting.mix else prices(self._demands)
        unit = max(1, min(PRICE_UNIT, (1 << 60) // self._longest_play))
        return max(1, round(dual.compute * unit)), max(1, round(dual.memory * unit))

    @property
    def _longest_play(self) -> int:
        """An upper bound on the ticks of a play, so that its price stays a 64-bit number."""
        programs = self.setting.programs
        return self.setting.buffer + self.length * max(max(p.fetch) + max(p.compute) for p in programs)

    @cached_property
    def distances(self) -> tuple[int, int]:
        """The least and the largest decoupling distance (how far fetching runs ahead of the array) of the priced rule.

        The least covers the fetch of the next layer; at the largest, the buffer is not yet full.
        """
        largest = max(program.largest_fetch for program in self.setting.programs)
        return largest // 2, self.setting.buffer * 9 // 10

    def decide(self, view: View) -> Start:
        """Issue the next layer of the plan; without one, or if the band holds it back, plan anew by rollouts."""
        on_offer = {candidate.stream: candidate for candidate in view.candidates}
        if not self._plan or self._plan[0] not in on_offer:
            self._plan.clear()
            self._plan.extend(self._best_play(view)[: self.commit])
        return Start(on_offer[self._plan.popleft()])

    def _best_play(self, view: View) -> list[int]:
        """Return the play with the least priced idle time, as the stream of each layer; the first among equals."""
        greedy = Layerweaver(self.setting, failsafe=False)
        rules_of_plays: tuple[Callable[[View], Start], ...] = (greedy.decide, self._decide_priced)
        plays = [self._play(view, candidate, rule) for candidate in view.candidates for rule in rules_of_plays]
        _, streams = min(plays, key=lambda play: play[0])
        return streams

    def _play(self, view: View, head: Candidate, rule: Callable[[View], Start]) -> tuple[int, list[int]]:
        """Play *head* and then the choices of *rule*; return the priced idle time and the stream of each layer."""
        device_before = view.device
        fetched = computed = 0
        streams: list[int] = []
        for _ in range(self.length):
            device, _ = issue(view.device, head.fetch, head.compute, self.setting.buffer)
            fetched += head.fetch
            computed += head.compute
            streams.append(head.stream)
            view = self._after(view, head, device)
            head = rule(view).candidate
        compute_price, memory_price = self.prices
        array_idle = view.device.array_free - device_before.array_free - computed
        channel_idle = view.device.channel_free - device_before.channel_free - fetched
        return compute_price * array_idle + memory_price * channel_idle, streams

    def _after(self, view: View, issued: Candidate, device: DeviceClocks) -> View:
        """Return the view after a layer was issued, on the device as it is then."""
        follower = issued.following(self.setting.programs[issued.stream])
        heads = tuple(follower if head.stream == issued.stream else head for head in view.heads)
        progress = list(view.progress)
        progress[issued.stream] += self.gains[issued.stream][issued.layer]
        allowed = may_go(progress, [self.gains[h.stream][h.layer] for h in heads], self.band.max_lag_units)
        candidates = tuple(head for head in heads if allowed[head.stream])
        return View(device, heads, candidates, tuple(progress))

    @cached_property
    def gains(self) -> tuple[tuple[int, ...], ...]:
        """For each stream, the progress within the band that each of its layers adds."""
        return self.band.gains(self.setting.programs)

    def _decide_priced(self, view: View) -> Start:
        """Choose the candidate that causes the least priced idle time; ties go to the stream that is behind in the mix.

        A decoupling distance outside ``distances`` counts as idle time.
        """
        compute_price, memory_price = self.prices
        shortest, longest = self.distances

        def cost(head: Candidate) -> tuple[int, int, int]:
            _, times = issue(view.device, head.fetch, head.compute, self.setting.buffer)
            idle = rules.priced_idle(
                fetch=head.fetch,
                compute=head.compute,
                fetch_end=times.fetch_end,
                channel_start=times.fetch_start,
                array_free=view.device.array_free,
                compute_price=compute_price,
                memory_price=memory_price,
                shortest=shortest,
                longest=longest,
            )
            return idle, view.progress[head.stream], head.stream

        return Start(min(view.candidates, key=cost))
