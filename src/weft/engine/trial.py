"""A trial before the run: which of a policy's contenders shall decide, and into what pieces layers are cut.

Saturated streams repeat themselves, so a few rounds show what a rule comes to. Every contender plays
them through its kernel and is judged as a report would judge it: by system throughput, with the standalone
times of whole layers. Who keeps no band and leaves a stream less than its least share is out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from weft.engine.compiled import compiled_order, replayed
from weft.policies.base import Policy, Setting
from weft.policies.bound import LEAST_SHARE, Prices, QueryDemand, demand_of, mix_prices, prices

ROUNDS = 24
"""Rounds of a trial, if the run has as many."""
FINAL_ROUNDS, CLOSE = 100, 0.005
"""More rounds decide between those whose throughput is so near to the best one's."""
WORTH_IMITATING = 0.0005
"""Share of the throughput that another policy must add: it keeps no band."""
NEAR_ENOUGH = 0.99
"""Share of the bound at which layers are not cut any further."""
WORTH_CUTTING = 0.002
"""Share of the throughput that smaller pieces must add: each piece is one more decision."""


class Tried(NamedTuple):
    """A contender and the system throughput of its trial."""

    policy: Policy
    stp: float


@dataclass(frozen=True, slots=True)
class TrialJudge:
    """What queries of the models are worth, whoever serves them and however they are cut."""

    demands: tuple[QueryDemand, ...]
    dual: Prices

    @classmethod
    def of(cls, setting: Setting) -> TrialJudge:
        demands = tuple(demand_of(program, setting.buffer) for program in setting.uncut)
        quota = setting.quota
        return cls(demands, mix_prices(demands, quota) if quota else prices(demands))

    def shares(self, policy: Policy) -> list[float]:
        """Standalone time's worth of queries per unit of time, by stream; their sum is the system throughput."""
        setting = policy.setting
        order = compiled_order(policy, setting.work, setting.quota)
        if order is None:
            raise TypeError(f"{type(policy).__name__} has no kernel to be tried with")
        makespan = float(replayed(policy, order)[-1, 3])
        issued = np.bincount(order, minlength=len(setting.programs)).tolist()
        return [
            self.dual.queries(program, layers) * demand.alone / makespan
            for program, layers, demand in zip(setting.programs, issued, self.demands, strict=True)
        ]


def settled(policy: Policy) -> Policy:
    """The policy for the run: the best contender at the pieces that pay, or itself where it has no rivals."""
    if len(list(policy.contenders())) == 1:
        return policy
    setting, judge, kind = policy.setting, TrialJudge.of(policy.setting), type(policy)
    best: list[Tried] = []
    for pieces in policy.traits.cuts if setting.pieces is None else (setting.pieces,):
        cut = setting.cut(pieces)
        if best and _issues(cut) == _issues(best[0].policy.setting):
            continue
        tried = [_tried(each, judge, ROUNDS) for each in replace(policy, setting=cut).contenders()]
        if not best or _winner(tried, kind).stp > _winner(best, kind).stp * (1 + WORTH_CUTTING):
            best = tried
        if _winner(best, kind).stp >= NEAR_ENOUGH * judge.dual.bound:
            break
    return _winner(_final(best, judge), kind).policy


def _issues(setting: Setting) -> int:
    return sum(map(len, setting.programs))


def _winner(tried: Sequence[Tried], kind: type[Policy]) -> Tried:
    """The best, or the best of a *kind* of policies where another adds too little to imitate it."""
    best = max(tried, key=_stp)
    own = max((each for each in tried if type(each.policy) is kind), key=_stp, default=best)
    return best if best.stp > own.stp * (1 + WORTH_IMITATING) else own


def _final(tried: Sequence[Tried], judge: TrialJudge) -> Sequence[Tried]:
    """The contenders close to the best, tried again for longer if the real run is longer; else all of them."""
    least = (1 - CLOSE) * max(map(_stp, tried))
    close = [each for each in tried if each.stp >= least]
    if len(close) == 1 or tried[0].policy.setting.rounds <= ROUNDS:
        return tried
    return [_tried(each.policy, judge, FINAL_ROUNDS) for each in close]


def _stp(outcome: Tried) -> float:
    return outcome.stp


def _tried(policy: Policy, judge: TrialJudge, rounds: int) -> Tried:
    """A short run. Who keeps no band and leaves a stream less than its least share comes to nothing."""
    short = replace(policy.setting, rounds=min(policy.setting.rounds, rounds))
    shares = judge.shares(replace(policy, setting=short))
    starved = policy.band is None and min(shares) < LEAST_SHARE / len(shares)
    return Tried(policy, 0.0 if starved else sum(shares))
