"""A trial before the run: which of a policy's contenders shall decide, and into what pieces layers are cut.

Saturated streams repeat themselves, so a few rounds show what a rule comes to. Every contender plays
them through its kernel and is judged as a report would judge it: by system throughput, with the standalone
times of whole layers. Who keeps no band and leaves a stream less than its least share is out. But the mix that it
reached is worth a try: the bound's own mix may be out of reach, where the buffer is too small to hide what the bound
takes for hidden. So both the policy and who starved somebody are tried again with the streams kept at that mix, the
starved ones raised to their least share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from weft.engine.compiled import compiled_order, replayed
from weft.engine.policies.base import Policy, Setting
from weft.engine.policies.bound import (
    Prices,
    QueryDemand,
    demand_of,
    least_share,
    mix_prices,
    prices,
    raised,
)

ROUNDS = 24
"""Rounds of a trial, if the run has as many."""
FINAL_ROUNDS, CLOSE = 100, 0.005
"""More rounds confirm the best, and decide between those whose throughput is so near to it."""
WORTH_IMITATING = 0.0005
"""Share of the throughput that another policy must add: it keeps no band."""
NEAR_ENOUGH = 0.99
"""Share of the bound at which layers are not cut any further."""
WORTH_CUTTING = 0.002
"""Share of the throughput that smaller pieces must add: each piece is one more decision."""
WORTH_FOLLOWING = 0.95
"""Share of the best throughput that another policy must reach for its mix to be tried."""


class Tried(NamedTuple):
    """A contender and what its trial came to."""

    policy: Policy
    shares: tuple[float, ...]
    """Of the system throughput, by stream."""
    rounds: int
    """For how many rounds it was tried, at most."""

    @property
    def starves(self) -> bool:
        """Whether it keeps no band and leaves a stream less than its least share."""
        return self.policy.band is None and min(self.shares) < least_share(len(self.shares))

    @property
    def stp(self) -> float:
        """System throughput; nothing where a stream starves."""
        return 0.0 if self.starves else sum(self.shares)


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
        tried = _confirmed(tried, judge, kind)
        if setting.mix is None:
            kept = [_tried(each, judge, ROUNDS) for each in _kept_at_mixes(tried, judge, kind)]
            tried = _confirmed([*tried, *kept], judge, kind)
        if not best or _winner(tried, kind).stp > _winner(best, kind).stp * (1 + WORTH_CUTTING):
            best = tried
        if _winner(best, kind).stp >= NEAR_ENOUGH * judge.dual.bound:
            break
    return _winner(_confirmed(best, judge, kind, CLOSE), kind).policy


def _kept_at_mixes(tried: Sequence[Tried], judge: TrialJudge, kind: type[Policy]) -> Iterator[Policy]:
    """Policies to try with a band: the best of *kind* at mixes that rivals reached, and rivals that starved a stream.

    Of every other kind only the best rival counts, unless it is far behind with starved streams at their least shares.
    """
    if _winner(tried, kind).stp >= NEAR_ENOUGH * judge.dual.bound:
        return
    own = max((each for each in tried if type(each.policy) is kind), key=_stp)
    others: dict[type[Policy], Tried] = {}
    for each in sorted(tried, key=_raised_stp):
        if type(each.policy) is not kind and _raised_stp(each) >= WORTH_FOLLOWING * own.stp:
            others[type(each.policy)] = each
    for other in others.values():
        shares = raised(other.shares)
        halfway = [(a / sum(shares) + b / own.stp) / 2 for a, b in zip(shares, own.shares, strict=True)]
        yield from (_kept(own.policy, mix, judge) for mix in (shares, halfway))
        if other.starves:
            yield _kept(other.policy, shares, judge)


def _kept(policy: Policy, shares: Sequence[float], judge: TrialJudge) -> Policy:
    """The policy with streams kept at these shares of the throughput."""
    rates = [share / demand.alone for share, demand in zip(shares, judge.demands, strict=True)]
    mix = tuple(rate / min(rates) for rate in rates)
    return replace(policy, setting=replace(policy.setting, kept_mix=mix))


def _raised_stp(tried: Tried) -> float:
    return sum(raised(tried.shares))


def _issues(setting: Setting) -> int:
    return sum(map(len, setting.programs))


def _winner(tried: Sequence[Tried], kind: type[Policy]) -> Tried:
    """The best, or the best of a *kind* of policies where another adds too little to imitate it."""
    best = max(tried, key=_stp)
    own = max((each for each in tried if type(each.policy) is kind), key=_stp, default=best)
    return best if best.stp > own.stp * (1 + WORTH_IMITATING) else own


def _confirmed(tried: Sequence[Tried], judge: TrialJudge, kind: type[Policy], close: float = 0.0) -> list[Tried]:
    """Repeat the winner's trial for more rounds, and those within *close* of it, until the winner has a long trial.

    Streams of a band may be ahead by a part of a round from the start, and where a stream is rare a round is long: 24
    rounds of work then end before the others have waited for it.
    """
    found = list(tried)
    longer = min(FINAL_ROUNDS, found[0].policy.setting.rounds)
    while True:
        least = (1 - close) * _winner(found, kind).stp
        again = [at for at, each in enumerate(found) if each.rounds < longer and each.stp >= least]
        if not again:
            return found
        for at in again:
            found[at] = _tried(found[at].policy, judge, FINAL_ROUNDS)


def _stp(outcome: Tried) -> float:
    return outcome.stp


def _tried(policy: Policy, judge: TrialJudge, rounds: int) -> Tried:
    """A short run."""
    rounds = min(policy.setting.rounds, rounds)
    shares = judge.shares(replace(policy, setting=replace(policy.setting, rounds=rounds)))
    return Tried(policy, tuple(shares), rounds)
