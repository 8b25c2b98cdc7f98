"""Choosing among candidates: the rules, and what a candidate must score to win."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from weft_tune.judge import HighestScore, MostGainPerLoss, Rule

scores = st.integers(0, 20).map(lambda right: right / 20)
objectives = st.integers(0, 6).map(float)
candidates = st.lists(st.tuples(objectives, scores), min_size=1, max_size=6)
rules = st.one_of(
    st.builds(HighestScore, st.sampled_from([-math.inf, 0.5, 0.8])),
    st.builds(MostGainPerLoss, st.sampled_from([0.3, 0.5]), objectives, st.sampled_from([0.5, 0.75, 0.9])),
)


def best_in_full(rule: Rule, given: list[tuple[float, float]]) -> int | None:
    """Every candidate is scored; the first of the best wins."""
    accepted = [place for place, (_, score) in enumerate(given) if score >= rule.floor]
    return max(accepted, key=lambda place: (rule.key(*given[place]), -place), default=None)


@given(rules, candidates, st.randoms(use_true_random=False))
def test_racing_in_any_order_finds_the_same_winner(rule, given, random):
    order = list(range(len(given)))
    random.shuffle(order)
    best: int | None = None
    for place in order:
        objective, score = given[place]
        against = None if best is None else rule.key(*given[best])
        needed = rule.needed(objective, against, best is not None and place > best)
        if score < needed:
            continue
        key = rule.key(objective, score)
        if best is None or key > against or (key == against and place < best):
            best = place
    assert best == best_in_full(rule, given)


def test_gain_per_loss_by_hand():
    rule = MostGainPerLoss(floor=0.9, objective=100, score=0.98)
    small_loss, big_gain, free, freer, nothing = (
        rule.key(*each) for each in ((90, 0.97), (50, 0.95), (99, 0.98), (95, 0.99), (100, 0.99))
    )
    assert nothing < small_loss < big_gain < free < freer


def test_what_cannot_win_is_not_asked_for():
    rule = MostGainPerLoss(floor=0.9, objective=100, score=0.98)
    assert rule.needed(99, rule.key(90, 0.98), True) == math.inf
    assert rule.needed(100, rule.key(90, 0.95), True) == math.inf
    assert rule.needed(80, rule.key(90, 0.97), True) < 0.96 < rule.needed(80, rule.key(90, 0.97), True) + 1e-8
    assert rule.needed(80, None, False) == 0.9
    assert HighestScore(0.9).needed(0, (0.95,), True) > 0.95 == HighestScore(0.9).needed(0, (0.95,), False)


def test_rounding_does_not_stop_an_equal_of_large_scores():
    """The same ratio but for the last digit; what is needed must not lie above it."""
    rule = MostGainPerLoss(floor=0.0, objective=100.0, score=3768151652445.156)
    best, score = rule.key(59.0, 2632230834873.6665), 2078123118985.135
    assert rule.key(39.0, score) >= best
    assert rule.needed(39.0, best, False) <= score
