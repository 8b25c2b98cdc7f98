"""A trial before the run: which of a policy's contenders shall decide, and into what pieces layers are cut.

Saturated streams repeat themselves, so a few rounds show what a rule comes to. Every contender plays
them through its kernel and is judged as a report would judge it: by system throughput, with the standalone
times of whole layers. Who keeps no band and leaves a stream less than its least share is out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from weft.bound import LEAST_SHARE, Demand, Prices, demand_of, mix_prices, prices
from weft.engine.compiled import compiled_order, replayed
from weft.policies.base import Policy, Setting

ROUNDS = 24
"""Rounds of a trial, if the run has as many."""
FINAL_ROUNDS = 100
CLOSE = 0.005
"""Where the policy's own best and the best other are so near to each other, more rounds decide between them."""
WORTH_IMITATING = 0.0005
"""Share of the throughput that another policy must add: it keeps no band."""
NEAR_ENOUGH = 0.99
"""Share of the bound at which layers are not cut any further."""
WORTH_CUTTING = 0.002
"""Share of the throughput that smaller pieces must add: each piece is one more decision."""


class Outcome(NamedTuple):
    """A contender and the system throughput of its trial."""

    policy: Policy
    stp: float


@dataclass(frozen=True, slots=True)
class Judge:
    """What queries of the models are worth, whoever serves them and however they are cut."""

    demands: tuple[Demand, ...]
    dual: Prices

    @classmethod
    def of(cls, setting: Setting) -> Judge:
        demands = tuple(demand_of(program, setting.buffer) for program in setting.uncut)
        quota = setting.quota
        return cls(demands, mix_prices(demands, quota) if quota else prices(demands))

    def shares(self, policy: Policy) -> list[float]:
        """Standalone time's worth of queries per unit of time, by stream; their sum is the system throughput."""
        setting = policy.setting
        order = compiled_order(policy, setting.work, setting.quota)
        if order is None:
            raise TypeError(f"{type(policy).__name__} has no kernel to be tried with")
        makespan = float(replayed(setting, order)[-1, 3])
        issued = np.bincount(order, minlength=len(setting.programs)).tolist()
        return [
            self.dual.queries(program, layers) * demand.alone / makespan
            for program, layers, demand in zip(setting.programs, issued, self.demands, strict=True)
        ]


class Heat(NamedTuple):
    """The best of the policy's own kind and the best of the others, at one size of pieces."""

    own: Outcome
    other: Outcome

    @property
    def winner(self) -> Outcome:
        return self.other if self.other.stp > self.own.stp * (1 + WORTH_IMITATING) else self.own


def settled(policy: Policy) -> Policy:
    """The policy for the run: the best contender at the pieces that pay, or itself where it has no rivals."""
    if len(list(policy.contenders())) == 1:
        return policy
    setting, judge = policy.setting, Judge.of(policy.setting)
    best: Heat | None = None
    for pieces in policy.cuts if setting.pieces is None else (setting.pieces,):
        cut = setting.cut(pieces)
        if best and _issues(cut) == _issues(best.own.policy.setting):
            continue
        heat = _heat(replace(policy, setting=cut), judge)
        if best is None or heat.winner.stp > best.winner.stp * (1 + WORTH_CUTTING):
            best = heat
        if best.winner.stp >= NEAR_ENOUGH * judge.dual.bound:
            break
    assert best is not None  # there is always a way to cut, if only not at all
    return _final(best, judge).policy


def _issues(setting: Setting) -> int:
    return sum(map(len, setting.programs))


def _heat(policy: Policy, judge: Judge) -> Heat:
    tried = [_tried(contender, judge, ROUNDS) for contender in policy.contenders()]
    own = max((each for each in tried if type(each.policy) is type(policy)), key=_stp)
    others = (each for each in tried if type(each.policy) is not type(policy))
    return Heat(own, max(others, key=_stp, default=own))


def _final(heat: Heat, judge: Judge) -> Outcome:
    """The winner of a heat; of a close one, after a longer run of both."""
    close = abs(heat.own.stp - heat.other.stp) < CLOSE * heat.own.stp
    if close and heat.own is not heat.other and heat.own.policy.setting.rounds > ROUNDS:
        heat = Heat(*(_tried(each.policy, judge, FINAL_ROUNDS) for each in heat))
    return heat.winner


def _stp(outcome: Outcome) -> float:
    return outcome.stp


def _tried(policy: Policy, judge: Judge, rounds: int) -> Outcome:
    """A short run. Who keeps no band and leaves a stream less than its least share comes to nothing."""
    short = replace(policy.setting, rounds=min(policy.setting.rounds, rounds))
    shares = judge.shares(replace(policy, setting=short))
    starved = policy.band is None and min(shares) < LEAST_SHARE / len(shares)
    return Outcome(policy, 0.0 if starved else sum(shares))
