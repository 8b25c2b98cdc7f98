"""The best option by each objective, on machines whose best option is plain to see."""

from __future__ import annotations

import pytest

from tests.planning.machines import arrangement, asked, brief, host
from weft.base.errors import InputError
from weft.planning import finals as last
from weft.planning.candidates import arrangements, batch_limits, request_policies
from weft.planning.choice import Chosen, choose
from weft.planning.finals import FINE, finals
from weft.planning.planning_run import _not_finalist_text
from weft.planning.trials import largest_step, run_workload, trial_of
from weft.simulation.requests import prepare, simulate_requests
from weft.simulation.run_length import RunLength

__all__ = ["brief"]

ONE = host(1, memory_bytes=100, a=[8.0], b=[2.0])
TWO = host(2, memory_bytes=300, a=[8.0], b=[2.0])
QUICK = host(1, 2, memory_bytes=200, a=[5.0], b=[1.2])
"""One lane of two threads: less is carried than by two lanes, and each request is answered sooner."""
LIGHT = (("a", 20.0, 60.0), ("b", 10.0, 60.0))
RARE = (("a", 0.3, 60.0), ("b", 0.3, 60.0))
"""Requests that hardly ever meet."""


def chosen(objective: str, *machines, streams=LIGHT, **more) -> Chosen:
    question = asked(*streams, objective=objective, **more)
    options = [arrangement(machine) for machine in machines]
    return choose(question, options, lambda option: option.host.memory_bytes or 0)


@pytest.mark.parametrize(
    ("objective", "streams", "best"),
    [("deadlines", LIGHT, TWO), ("load", LIGHT, TWO), ("memory", LIGHT, ONE), ("latency", RARE, QUICK)],
)
def test_each_objective_has_its_own_best(brief, objective, streams, best):
    for order in ((ONE, TWO, QUICK), (QUICK, TWO, ONE)):
        assert chosen(objective, *order, streams=streams).best.arrangement.host is best


def test_where_nobody_keeps_the_deadlines_who_misses_fewest_wins(brief):
    heavy = (("a", 400.0, 60.0), ("b", 10.0, 60.0))
    found = chosen("memory", ONE, TWO, streams=heavy)
    assert not found.best.holds and found.best.arrangement.host is TWO


def test_what_cannot_win_is_not_simulated(brief):
    found = chosen("deadlines", TWO, ONE)
    ((left,), others) = found.left_out, found.others
    assert (left.arrangement.host, others) == (ONE, ())
    assert left.why.startswith("cannot carry more than 5.")


def test_a_simpler_division_of_the_cores_is_taken_if_it_carries_two_load_steps_less(brief):
    quick = host(1, 2, memory_bytes=100, a=[8.0], b=[2.0])
    simpler = host(1, memory_bytes=100, a=[8.1], b=[2.025])
    question = asked(*LIGHT, objective="deadlines")
    options = [arrangement(quick, "edf"), arrangement(simpler)]
    found = choose(question, options, lambda option: option.host.memory_bytes or 0)
    assert (found.best.arrangement.host, found.others[0].arrangement.host) == (quick, simpler)
    assert found.best.level() == found.others[0].level() + 2
    assert finals(question, [found.best, *found.others]).winner.trial.arrangement.host is simpler


def test_what_does_not_fit_into_memory_is_left_out_and_if_nothing_does_that_is_told(brief):
    found = chosen("deadlines", ONE, TWO, memory_bytes=200)
    assert found.best.arrangement.host is ONE and "memory" in found.left_out[0].why
    with pytest.raises(InputError, match="the smallest option needs"):
        chosen("deadlines", ONE, TWO, memory_bytes=50)


def test_the_largest_load_is_that_of_the_lanes(brief):
    trial = trial_of(asked(("a", 20.0, 400.0)), arrangement(host(a=[10.0])), 0)
    assert 0.7 * 5 < trial.factor <= 1.15 * 5 / 0.99  # a lane has time for five times as much
    assert trial.sustained(trial.level()) and not trial.sustained(trial.level() + 1)


@pytest.mark.parametrize("largest", [-30, -3, 0, 1, 17, 40])
@pytest.mark.parametrize("start", [-50, 0, 39])
def test_a_search_finds_the_last_step_from_wherever_it_starts(largest, start):
    asked_for = []

    def sustained(step: int) -> bool:
        asked_for.append(step)
        return step <= largest

    assert largest_step(sustained, -31, 41, start) == largest
    assert len(asked_for) == len({*asked_for}) <= 12 and all(-31 < step < 41 for step in asked_for)


def test_a_run_that_fails_ends_as_soon_as_that_is_clear():
    way = arrangement(host(a=[10.0]), "fifo")
    case = prepare(run_workload(asked(("a", 300.0, 50.0)), way, 1.0, RunLength(300, 30)), way.host)
    whole, early = (
        simulate_requests(case, "fifo", late="drop", most_missed=most).report.streams[0] for most in (None, [10.0])
    )
    assert whole.violated > 100 and early.violated == 11 and early.arrived < whole.arrived / 3


def test_finalists_are_compared_with_the_same_fresh_requests(brief):
    found = chosen("deadlines", TWO, TWO.model_copy(update={"memory_bytes": 250}))
    assert found.best.arrangement.host.memory_bytes == 250
    question = found.best.request
    ranked = finals(question, [found.best, *found.others]).finalists
    assert [each.trial.memory_bytes for each in ranked] == [250, 300]
    assert ranked[0].factor == ranked[1].factor
    told = ranked[0].prediction
    assert told.sustainable_per_s == pytest.approx(30 * (told.sustainable_factor or 0), rel=1e-3)
    assert [stream.model for stream in told.streams] == ["a", "b"]


def test_no_option_is_said_to_miss_what_no_run_showed(brief):
    trial = trial_of(asked(*RARE, objective="latency"), arrangement(ONE), 0)
    assert trial.report and _not_finalist_text(trial) == "came after the finalists in short runs"
    assert trial.level() and "missed" in _not_finalist_text(trial)


def test_who_carries_more_than_is_asked_keeps_the_deadlines_without_another_run(brief):
    trial = trial_of(asked(("a", 20.0, 400.0)), arrangement(host(a=[10.0])), 0)
    assert trial.level() > 0 and 0 not in trial._sustained
    runs = trial.runs
    assert trial.holds and trial.runs == runs


def test_the_largest_load_of_a_finalist_is_looked_for_near_that_of_the_first(brief, monkeypatch):
    question = asked(*LIGHT)
    trials = [trial_of(question, arrangement(host(lanes, a=[8.0], b=[2.0])), 0) for lanes in (2, 1)]
    middle, tried = trials[0].factor, dict[int, list[float]]()

    def kept_at(asked, arrangement, factor, length, *, seed):
        tried.setdefault(arrangement.host.lanes, []).append(factor)
        return factor <= middle * FINE**-19.5, 0.0

    monkeypatch.setattr(last, "kept_at", kept_at)
    monkeypatch.setattr(trials[1], "bound", trials[0].bound)
    found = finals(question, trials).finalists
    assert [each.factor for each in found] == [pytest.approx(middle * FINE**-20)] * 2
    assert tried[1][:3] == [pytest.approx(middle * FINE**step) for step in (0, -20, -19)] and len(tried[2]) > 6


def test_policies_that_do_the_same_are_told_once_under_the_simplest(brief):
    question = asked(("a", 40.0, 60.0))  # one stream of one deadline: who is due first came first
    machine = host(1, a=[8.0])
    options = [arrangement(machine, policy) for policy in ("edf", "fifo")] + [arrangement(host(2, a=[8.0]), "edf")]
    trials = [trial_of(question, option, 0) for option in options]
    ranked = finals(question, trials).finalists
    assert [len(each.trial.arrangement.host.together()) for each in ranked] == [2, 1]
    (twin,) = ranked[1].twins
    assert (twin, ranked[0].twins, ranked[1].trial) == (trials[0], (), trials[1])


def test_batches_are_tried_as_far_as_they_pay_small_and_not_at_all():
    machine = host(a={1: [2.0], 8: [9.0]}, b=[1.0])
    assert batch_limits(machine, asked(*LIGHT)) == [{"a": 8, "b": 1}, {"a": 2, "b": 1}, {"a": 1, "b": 1}]
    assert batch_limits(ONE, asked(*LIGHT)) == [{"a": 1, "b": 1}]


def test_policies_that_come_to_the_same_on_a_host_are_tried_once():
    names = request_policies(asked(*LIGHT).workload)
    assert names[0] == "punctual" and {"edf", "fifo", "weft+"} <= {*names}
    assert not {"double-buffer", "serial", "layerweaver", "priority", "weft", "top-up"} & {*names}


def test_options_for_soft_deadlines_have_a_rule_for_late_requests():
    labels = [each.label for each in arrangements(asked(*LIGHT, deadlines="soft"), [ONE])]
    assert "punctual, 1 lane, no batches" in labels and "edf (late: keep), 1 lane, no batches" in labels
    assert labels[0] == "punctual, 1 lane, no batches" and len(labels) == len({*labels})
    strict = [each.settings.late for each in arrangements(asked(*LIGHT), [ONE, TWO])]
    assert {*strict} == {"weave"}
