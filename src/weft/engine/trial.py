"""A trial before the run: it selects one of a policy's contenders, and the pieces into which layers are cut.

Saturated streams repeat themselves, so a few rounds show the throughput of a policy. Every contender runs a few rounds
through its kernel and is judged as a report would judge it: by system throughput, with the standalone times of whole
layers. A contender without a band that leaves a stream less than its least share is disqualified. The mix of streams
that it reached may still be good: the bound's own mix is out of reach where the buffer is too small to hide fetches
that the bound takes as hidden. So the policy, and the disqualified contender too, are tried again with a band at that
mix, in which starved streams are raised to their least share. The contender is also tried without a band: it weaves the
other streams, and the layers of the starved ones are put in between as often as their least share requires
(``policies.least_shares``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from weft.engine.compiled import compiled_order, replay_order
from weft.engine.policies.base import Policy, Setting
from weft.engine.policies.bound import Prices, QueryDemand, demand_of, least_share, mix_prices, prices, raise_starved
from weft.engine.policies.least_shares import WithLeastShares
from weft.kernels.replay import COMPUTE_END

ROUNDS = 24
"""Rounds of a trial, if the run has as many: enough to rank rules that differ by more than ``CLOSE``."""
FINAL_ROUNDS, CLOSE = 100, 0.005
"""Rounds that confirm the winner and all results within the share CLOSE of its throughput: 24 rounds cannot tell those
apart."""
WORTH_IMITATING = 0.0005
"""Share of the throughput that a policy of another kind must add to be preferred, since it keeps no band."""
NEAR_ENOUGH = 0.99
"""Share of the bound at which the search for smaller pieces and other mixes ends: little is left to gain."""
WORTH_CUTTING = 0.002
"""Share of the throughput that smaller pieces must add: every piece is one more decision."""
WORTH_FOLLOWING = 0.95
"""Share of the best throughput that another policy must reach for its mix to be tried; a worse one would waste time."""


class TrialResult(NamedTuple):
    """A contender and the result of its trial."""

    policy: Policy
    shares: tuple[float, ...]
    """System throughput by stream."""
    rounds: int
    """The number of rounds of the trial."""

    @property
    def starves(self) -> bool:
        """Whether the policy keeps no band and leaves a stream less than its least share."""
        return self.policy.band is None and min(self.shares) < least_share(len(self.shares))

    @property
    def stp(self) -> float:
        """System throughput; 0 where a stream starves."""
        return 0.0 if self.starves else sum(self.shares)


@dataclass(frozen=True, slots=True)
class TrialJudge:
    """Measures the throughput of policies in queries of whole layers, so that policies with cut layers compare."""

    demands: tuple[QueryDemand, ...]
    """By stream, the use of both resources by a query of whole layers."""
    bound_prices: Prices
    """The dual prices of the bound (``policies.bound``)."""

    @classmethod
    def of(cls, setting: Setting) -> TrialJudge:
        """Return the judge for the streams of a setting, however its layers are cut."""
        demands = tuple(demand_of(program, setting.buffer) for program in setting.uncut)
        quota = setting.quota
        return cls(demands, mix_prices(demands, quota) if quota else prices(demands))

    def shares(self, policy: Policy) -> list[float]:
        """Run a policy; return for each stream its queries per tick times its standalone time in ticks.

        Their sum is the system throughput. An unfinished query counts as the part of its price that its issued layers
        have.
        """
        setting = policy.setting
        order = compiled_order(policy, setting.work, setting.quota)
        if order is None:
            raise TypeError(f"{type(policy).__name__} has no kernel to be tried with")
        makespan = float(replay_order(policy, order)[-1, COMPUTE_END])
        issued = np.bincount(order, minlength=len(setting.programs)).tolist()
        return [
            self.bound_prices.queries(program, layers) * demand.alone / makespan
            for program, layers, demand in zip(setting.programs, issued, self.demands, strict=True)
        ]


def best_contender(policy: Policy) -> Policy:
    """Return the policy for the run: the best contender, with layers cut into pieces if that pays.

    The policy itself if it has no other contenders.
    """
    if len(list(policy.contenders())) == 1:
        return policy
    setting, judge, kind = policy.setting, TrialJudge.of(policy.setting), type(policy)
    best: list[TrialResult] = []
    for pieces in policy.traits.cuts if setting.pieces is None else (setting.pieces,):
        cut_setting = setting.cut(pieces)
        if best and _issues(cut_setting) == _issues(best[0].policy.setting):
            continue
        contenders = replace(policy, setting=cut_setting).contenders()
        results = [_try_policy(contender, judge, ROUNDS) for contender in contenders]
        results = _confirm(results, judge, kind)
        if setting.mix is None:
            mix_results = [_try_policy(contender, judge, ROUNDS) for contender in _keep_mixes(results, judge, kind)]
            results = _confirm([*results, *mix_results], judge, kind)
        if not best or _winner(results, kind).stp > _winner(best, kind).stp * (1 + WORTH_CUTTING):
            best = results
        if _winner(best, kind).stp >= NEAR_ENOUGH * judge.bound_prices.bound:
            break
    return _winner(_confirm(best, judge, kind, CLOSE), kind).policy


def _keep_mixes(results: Sequence[TrialResult], judge: TrialJudge, kind: type[Policy]) -> Iterator[Policy]:
    """Yield policies that starve no stream, to be tried next: each keeps a mix of streams that a rival has reached.

    For the best rival of each other kind, if it is close to the best of *kind* once its starved streams are raised to
    their least shares: the best of *kind* at the rival's mix and half-way to it, and, if the rival starved streams, the
    rival itself at that mix and with its starved streams at their least shares.
    """
    if _winner(results, kind).stp >= NEAR_ENOUGH * judge.bound_prices.bound:
        return
    own_best = max((result for result in results if type(result.policy) is kind), key=_stp)
    rivals: dict[type[Policy], TrialResult] = {}
    for result in sorted(results, key=_raised_stp):
        if type(result.policy) is not kind and _raised_stp(result) >= WORTH_FOLLOWING * own_best.stp:
            rivals[type(result.policy)] = result
    for rival in rivals.values():
        shares = raise_starved(rival.shares)
        halfway = [(a / sum(shares) + b / own_best.stp) / 2 for a, b in zip(shares, own_best.shares, strict=True)]
        yield from (_keep_shares(own_best.policy, mix, judge) for mix in (shares, halfway))
        if rival.starves:
            yield _keep_shares(rival.policy, shares, judge)
            starved = tuple(stream for stream, share in enumerate(rival.shares) if share < shares[stream])
            if len(rival.shares) - len(starved) > 1:  # else there is nothing to weave
                yield WithLeastShares(rival.policy.setting, rival.policy, starved)


def _keep_shares(policy: Policy, shares: Sequence[float], judge: TrialJudge) -> Policy:
    """Return the policy with a band that keeps the streams at the proportions *shares* of the throughput."""
    rates = [share / demand.alone for share, demand in zip(shares, judge.demands, strict=True)]
    mix = tuple(rate / min(rates) for rate in rates)
    return replace(policy, setting=replace(policy.setting, kept_mix=mix))


def _raised_stp(result: TrialResult) -> float:
    """Return the throughput of a result with its starved streams raised to their least shares."""
    return sum(raise_starved(result.shares))


def _issues(setting: Setting) -> int:
    """Return the number of layers of one query of every stream; settings with the same number are cut alike."""
    return sum(map(len, setting.programs))


def _winner(results: Sequence[TrialResult], kind: type[Policy]) -> TrialResult:
    """Return the best result; the best of *kind* if another kind adds less than ``WORTH_IMITATING`` to that."""
    best = max(results, key=_stp)
    own_best = max((result for result in results if type(result.policy) is kind), key=_stp, default=best)
    return best if best.stp > own_best.stp * (1 + WORTH_IMITATING) else own_best


def _confirm(
    first_results: Sequence[TrialResult], judge: TrialJudge, kind: type[Policy], close: float = 0.0
) -> list[TrialResult]:
    """Return the results with the trials of the winner, and of all within the share *close* of it, run for longer.

    Repeated until the winner had a long trial. Within a band a stream may run ahead by a part of a round, and with a
    rare stream a round is long: 24 rounds of work can end before the other streams have had to wait for the rare one,
    which overrates such a mix.
    """
    results = list(first_results)
    long_rounds = min(FINAL_ROUNDS, results[0].policy.setting.rounds)
    while True:
        least = (1 - close) * _winner(results, kind).stp
        to_repeat = [
            place for place, result in enumerate(results) if result.rounds < long_rounds and result.stp >= least
        ]
        if not to_repeat:
            return results
        for place in to_repeat:
            results[place] = _try_policy(results[place].policy, judge, FINAL_ROUNDS)


def _stp(result: TrialResult) -> float:
    return result.stp


def _try_policy(policy: Policy, judge: TrialJudge, rounds: int) -> TrialResult:
    """Run a policy for *rounds* rounds, or for as many as the whole run has if that is fewer."""
    rounds = min(policy.setting.rounds, rounds)
    shares = judge.shares(replace(policy, setting=replace(policy.setting, rounds=rounds)))
    return TrialResult(policy, tuple(shares), rounds)
