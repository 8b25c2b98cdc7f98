"""What decides between finalists, and that the reasons which a plan gives are true of its numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning.machines import BRIEF, arrangement, asked, brief, host
from weft.planning.choice import Chosen, choose
from weft.planning.deciding import ERROR, ORDERS, Scores, decide
from weft.planning.finals import SETS, Finalist, Ranking, finals, rank
from weft.planning.reasons import decided, reasons
from weft.planning.trials import keeps, simulated, trial_of
from weft.simulation.request_report import RequestReport

__all__ = ["brief"]

HOSTS = [host(lanes, a=[8.0], b=[2.0]) for lanes in (1, 2)]
WAYS = [arrangement(machine, policy) for machine in HOSTS for policy in ("punctual", "edf", "prema")]
QUESTION = asked(("a", 20.0, 60.0), ("b", 10.0, 60.0))


@cache
def some_report() -> RequestReport:
    return simulated(QUESTION, WAYS[0], 1.0, BRIEF)[1].report


def scores(missed: Any = (0.0,), load: Any = (1.0,), memory: float = 1.0, wait: Any = (0.5,)) -> Scores:
    return Scores(tuple(missed), tuple(load), (memory,), tuple(wait))


# The decision


def test_an_option_must_be_better_with_every_set_of_requests_by_more_than_the_error():
    good, lucky, steady = (scores(load=load) for load in ((0.5, 0.5, 0.5), (0.4, 0.6, 0.5), (0.53, 0.53, 0.53)))
    assert decide(["load"], [lucky, good], lambda place: -place).winner == 1
    assert decide(["load"], [good, steady], lambda place: place).losses == {1: ("load", 0)}
    assert decide(["load"], [good, scores(load=(0.52, 0.53, 0.53))], lambda place: -place).winner == 1


def test_options_that_divide_the_cores_differently_must_differ_by_more():
    one, other = scores(load=(1.0,)), scores(load=(0.93,))
    assert decide(["load"], [one, other], lambda place: place).winner == 1
    apart = other._replace(division=(2, 1))
    assert decide(["load"], [one, apart], lambda place: place) == decide(["load"], [one, one], lambda place: place)
    assert decide(["load"], [one, apart._replace(load=(0.9,))], lambda place: place).winner == 1
    lighter = apart._replace(memory=(0.97,))
    assert decide(["load", "memory"], [one, lighter], lambda place: place).winner == 1


def test_who_loses_is_told_by_whom_it_was_beaten_where_the_winner_did_not():
    first, second, third = scores(load=(1.0,), memory=2.0), scores(load=(1.04,)), scores(load=(1.06,))
    decision = decide(["load", "memory"], [first, second, third], lambda place: place)
    assert decision.order == [1, 0, 2]
    assert decision.losses == {0: ("memory", 1), 2: ("load", 0)}


def test_of_equal_options_the_simplest_is_taken():
    one, two = HOSTS
    batched = host(1, a={1: [8.0], 4: [20.0]}, b=[2.0])
    cut = host(1, a=[4.0, 4.0], b=[2.0])
    simplest_first = [
        arrangement(one),
        arrangement(batched, batch=4),
        arrangement(cut),
        arrangement(one, margin=40),
        arrangement(one, "fifo"),
        arrangement(one, "edf"),
        arrangement(two),
    ]
    assert sorted(reversed(simplest_first), key=lambda option: option.simplicity) == simplest_first


@pytest.mark.long
def test_several_measurements_of_a_machine_have_one_winner(brief):
    """Times differ by some percent from one to the next, as those of real machines do."""
    question, winners = asked(("a", 20.0, 60.0), ("b", 40.0, 40.0)), set()
    for seed in range(5):
        noise = np.random.default_rng(seed).uniform(0.97, 1.03, 2)
        machine = host(2, loss=0.1, a=[4.0 * noise[0]] * 2, b=[2.0 * noise[1]])
        options = [arrangement(machine, policy) for policy in ("prema", "edf", "punctual", "fifo")]
        found = choose(question, options, lambda option: 1)
        ranking = finals(question, [found.best, *found.others])
        winners.add(ranking.winner.trial.arrangement.label)
    assert winners == {"punctual, 2 lanes, no batches"}


def test_a_simpler_option_that_comes_within_a_step_of_the_best_is_compared_with_it(brief):
    options = [arrangement(host(1, a=[ms], b=[2.0]), policy) for policy, ms in (("prema", 8.0), ("edf", 8.2))]
    found = choose(QUESTION, [*options, arrangement(host(1, a=[8.2], b=[2.0]))], lambda option: 1)
    compared = [found.best, *found.others]
    assert {"punctual"} & {trial.arrangement.settings.policy for trial in compared[:2]}


# The reasons


@st.composite
def finalists(draw: st.DrawFn) -> list[Finalist]:
    """Options with any numbers, as far as these can be those of one set of requests."""
    arrived = [draw(st.sampled_from([30, 120, 400])) for _ in QUESTION.workload.stream]
    found = []
    for way in draw(st.lists(st.sampled_from(WAYS), min_size=1, max_size=5, unique_by=lambda way: way.label)):
        reports = []
        for _ in range(SETS):
            streams = []
            for stream, number in zip(some_report().streams, arrived, strict=True):
                violated = draw(st.integers(0, number))
                p99_s = draw(st.floats(0.001, 0.2))
                rate = violated / number
                streams.append(replace(stream, arrived=number, violated=violated, violation_rate=rate, p99_s=p99_s))
            worst = max(stream.violation_rate for stream in streams)
            reports.append(replace(some_report(), streams=tuple(streams), worst_violation_rate=worst))
        factors = draw(st.lists(st.floats(0.1, 4.0), min_size=SETS, max_size=SETS))
        sets = draw(st.sampled_from([1, SETS]))
        trial = trial_of(QUESTION, way, draw(st.integers(10, 14)) * 2**20)
        found.append(Finalist(trial, tuple(reports), tuple(factors[:sets])))
    return found


def by_label(ranking: Ranking) -> dict[str, Finalist]:
    return {finalist.trial.arrangement.label: finalist for finalist in ranking.finalists}


def named(ranking: Ranking, words: str) -> list[Finalist]:
    """The finalists that a sentence names, in its order."""
    options = by_label(ranking)
    return [options[label] for label in sorted((each for each in options if each in words), key=words.index)]


@settings(max_examples=150, deadline=None)
@given(finalists=finalists(), objective=st.sampled_from(sorted(ORDERS)))
def test_every_reason_is_true_of_the_plans_numbers(finalists, objective):
    question = replace(QUESTION, objective=objective)
    for finalist in finalists:
        object.__setattr__(finalist.trial, "request", question)
    ranking = rank(question, finalists)
    winner, told = ranking.winner, {name: each.prediction for name, each in by_label(ranking).items()}
    chosen = Chosen(winner.trial, tuple(each.trial for each in ranking.finalists[1:]), ())
    first, *rest = reasons(question, chosen, ranking, ()).won
    assert [*rest][: len([*decided(ranking)])] == [*decided(ranking)]

    # What is said of the winner alone
    assert first.startswith(winner.trial.arrangement.label)
    assert ("keeps the deadlines" in first) == keeps(winner.report, question.limit)
    if "misses deadlines" in first:
        assert f"{winner.prediction.worst_missed:.1%}" in first
    if "no option that was compared fewer" in first:
        assert all(winner.prediction.worst_missed <= each.worst_missed for each in told.values())
    assert f"{winner.prediction.sustainable_factor:.2f} times" in first

    # What is said of others
    for sentence in decided(ranking):
        if "equal to it" in sentence:
            equals = named(ranking, sentence)
            assert len(equals) == ranking.equal and f"these {1 + len(equals)}" in sentence
            assert all(winner.trial.arrangement.simplicity < each.trial.arrangement.simplicity for each in equals)
            for criterion in ORDERS[objective]:
                assert not any(each.scores.better(criterion, winner.scores) for each in equals)
            continue
        loser, *beaten_by = named(ranking, sentence)
        better = beaten_by[0] if beaten_by else winner
        mine, theirs = (each.prediction for each in (loser, better))
        if "does not keep the deadlines" in sentence:
            assert keeps(better.report, question.limit) and not keeps(loser.report, question.limit)
        elif "misses more" in sentence:
            assert mine.worst_missed > theirs.worst_missed and f"{mine.worst_missed:.1%}" in sentence
        elif "carries less" in sentence:
            assert mine.sustainable_factor < theirs.sustainable_factor
            assert f"{mine.sustainable_factor:.2f}" in sentence
        elif "more memory" in sentence:
            assert f"{(mine.memory_bytes - theirs.memory_bytes) / 2**20:.0f} MiB" in sentence
            assert mine.memory_bytes > theirs.memory_bytes * (1 + ERROR["memory"])
        else:
            assert "takes longer" in sentence and _longest(mine) > _longest(theirs)


def _longest(prediction: Any) -> float:
    return max(stream.p99_ms / stream.deadline_ms for stream in prediction.streams)


@pytest.mark.parametrize("objective", sorted(ORDERS))
def test_nobody_that_is_worse_by_the_first_criterion_wins(objective):
    criterion = ORDERS[objective][0]
    worse = {"missed": 0.5} if criterion == "missed" else {criterion: 2.0}
    better = scores()
    values = {key: value if key == "memory" else (value,) for key, value in worse.items()}
    assert decide(ORDERS[objective], [scores(**values), better], lambda place: place).winner == 1
