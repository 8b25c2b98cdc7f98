"""The solver against enumeration, its certificate, its limits and its anytime behaviour."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.mapping.event_schedules import best_value
from tests.mapping.soc_problems import LOOK_S, XAVIER, arbitrary, steady_solver, synthetic
from weft.base.errors import WorkloadError
from weft_map.baselines import BASELINES
from weft_map.limits import TaskLimits, energy_j
from weft_map.prices import best_price_sets, simple_price_sets, stack_prices
from weft_map.problem import Group, Problem, Task, UnitCost
from weft_map.search import Search, make_rules, run_mapping
from weft_map.simulator import simulate
from weft_map.solver import Options, load_kernels, solve


@pytest.fixture(scope="module", autouse=True)
def steady():
    with steady_solver():
        yield


def searched(problem, objective="latency", limits=None, *, strict=True):
    """The value the search proves, from nothing but the problem."""
    given = make_rules(problem, objective, limits or TaskLimits(), strict=strict)
    sets = [*best_price_sets(problem), *simple_price_sets(problem.tables)]
    search = Search(problem, given, stack_prices(problem.tables, sets, given.max_switches), np.inf)
    while not search.proved:
        search.expand()
    return search


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.long) for block in (1, 2))])
def test_the_search_agrees_with_enumeration_with_and_without_dominance(block, objective):
    for seed in range(block * 25, block * 25 + 25):
        problem = arbitrary(seed)
        strictly, loosely = (searched(problem, objective, strict=strict) for strict in (True, False))
        expected = best_value(problem, objective, below=strictly.best + 1e-6 * abs(strictly.best))
        for strict, found in ((True, strictly), (False, loosely)):
            assert found.best == pytest.approx(expected, rel=1e-9), (seed, strict)
            assert simulate(problem, found.schedule).value(objective) == pytest.approx(expected, rel=1e-9), seed


@pytest.mark.parametrize("seed", range(20))
def test_limits_are_kept_and_the_best_within_them_found(seed):
    problem = arbitrary(seed)
    for switches in (0, 1):
        expected = best_value(problem, "latency", switches)
        if np.isinf(expected):
            with pytest.raises(WorkloadError, match="max_switches"):
                solve(problem, Options(limits=TaskLimits(switches)))
            continue
        assert searched(problem, limits=TaskLimits(switches)).best == pytest.approx(expected, rel=1e-9)
    free = energy_j(problem, searched(problem).schedule)
    expected = best_value(problem, budget_j=0.9 * free)
    if np.isfinite(expected):
        found = searched(problem, limits=TaskLimits(energy_budget_j=0.9 * free))
        assert found.best == pytest.approx(expected, rel=1e-9)
        assert energy_j(problem, found.schedule) <= 0.9 * free * (1 + 1e-12)
    else:
        with pytest.raises(WorkloadError, match="at least"):
            solve(problem, Options(limits=TaskLimits(energy_budget_j=0.9 * free)))


@pytest.mark.parametrize("seed", range(20))
def test_no_bound_is_above_the_best_schedule(seed):
    problem = arbitrary(seed)
    best = best_value(problem)
    for each in [*best_price_sets(problem), *simple_price_sets(problem.tables)]:
        cost_to_end = stack_prices(problem.tables, [each], -1).cost_to_end
        assert cost_to_end[:, 0, -1, 0, 0].sum() <= best * (1 + 1e-9)


def test_the_linear_programme_is_much_closer_than_weights():
    problem = synthetic(1)
    bounds = [
        stack_prices(problem.tables, sets, -1).cost_to_end[:, 0, -1, 0].sum(axis=0).max()
        for sets in (simple_price_sets(problem.tables), best_price_sets(problem))
    ]
    best = solve(problem).outcome.makespan_s
    assert best - bounds[1] < (best - bounds[0]) / 2


@pytest.mark.parametrize("seed", range(20))
def test_the_compiled_run_of_a_mapping_equals_the_simulator(seed):
    problem = arbitrary(seed)
    for name, baseline in BASELINES.items():
        for schedule in baseline(problem, "latency") if name != "contention-blind" else ():
            if schedule.starts_s is None:
                assert run_mapping(problem, schedule) == pytest.approx(simulate(problem, schedule).finish_s, rel=1e-9)


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_the_solution_is_proved_beats_every_baseline_and_says_what_it_assumes(objective):
    solution = solve(synthetic(3), Options(objective))
    certificate = solution.certificate
    assert certificate.proved and certificate.gap == 0 and certificate.ended == "proof"
    assert certificate.value == pytest.approx(abs(solution.outcome.value(objective)), rel=1e-9)
    assert set(solution.baselines) == set(BASELINES)
    ours = solution.outcome.value(objective)
    assert all(
        ours <= outcome.value(objective) * (1 + 1e-9) or objective == "throughput"
        for outcome in solution.baselines.values()
    )
    assert ours <= min(outcome.value(objective) for outcome in solution.baselines.values()) + 1e-12
    assert "event-aligned" in certificate.schedules and certificate.first_proof_s <= certificate.seconds
    better = min if objective == "latency" else max
    assert better(certificate.any_idling_bound, certificate.value) == certificate.any_idling_bound


def test_a_proof_that_assumes_something_says_so_and_a_strict_one_assumes_nothing(monkeypatch):
    monkeypatch.setattr("weft_map.solver.RECHECK_STATES", 500)  # too few for this problem without the assumption
    quick, strict = (solve(synthetic(4, 3, 6), Options(strict=strict)).certificate for strict in (False, True))
    assert quick.proved and "nowhere later" in quick.assumes
    assert strict.proved and not strict.assumes and strict.states > quick.states
    assert strict.value == pytest.approx(quick.value, rel=1e-9)


def test_the_second_look_finds_what_the_assumption_misses():
    """A case in which a state that is nowhere later is worse after all."""
    problem = arbitrary(25)
    limits = TaskLimits(energy_budget_j=0.9 * energy_j(problem, searched(problem).schedule))
    missed = searched(problem, limits=limits, strict=False).best
    solution = solve(problem, Options(limits=limits))
    assert missed > 1.005 * solution.outcome.makespan_s
    assert solution.outcome.makespan_s == pytest.approx(best_value(problem, budget_j=limits.energy_budget_j), rel=1e-9)
    assert solution.certificate.proved and not solution.certificate.assumes


def test_improvements_are_published_in_order_each_with_a_valid_bound():
    told = []
    solution = solve(synthetic(2), Options(), told.append)
    assert tuple(told) == solution.improvements
    values = [each.value for each in told]
    assert values == sorted(values, reverse=True) and len(values) > 1
    assert [each.seconds for each in told] == sorted(each.seconds for each in told)
    assert all(each.bound <= solution.certificate.value * (1 + 1e-9) for each in told)
    assert told[0].schedule.made_by != "weft" and told[-1].schedule.made_by == "weft"


def test_the_same_seed_gives_the_same_schedule():
    one, other = (solve(synthetic(4, 3, 5), Options(seed=7)) for _ in range(2))
    assert one.schedule == other.schedule and one.certificate.states == other.certificate.states


def test_a_search_out_of_time_keeps_the_best_baseline_or_better_and_states_the_gap():
    solution = solve(synthetic(1, 4, 10), Options(time_limit_s=0.0))
    certificate = solution.certificate
    assert not certificate.proved and certificate.ended == "time limit"
    assert certificate.bound < certificate.value and certificate.gap > 0
    assert solution.outcome.makespan_s <= solution.baselines[solution.best_baseline].makespan_s * (1 + 1e-9)


def test_identical_tasks_and_tasks_that_wait_are_mapped_together():
    groups = synthetic(5, 1, 4).tasks[0].groups
    twins = Problem(XAVIER, (Task("a", groups), Task("b", groups), Task("c", groups[:2], after=("a",))))
    outcome = solve(twins).outcome
    begins = min(piece.start_s for piece in outcome.pieces if piece.task == 2)
    assert begins >= outcome.finish_s[0] - 1e-12


def test_waiting_on_purpose_pays_where_running_together_does_not():
    """Two groups that slow each other down three times over: one after the other is best."""
    costs = {"gpu": UnitCost(1e-3, 105.0), "dla": UnitCost(1.05e-3, 100.0)}
    problem = Problem(XAVIER, (Task("a", (Group("g", costs),)), Task("b", (Group("g", costs),))))
    solution = solve(problem)
    together = run_mapping(problem, replace(solution.schedule, units=((0,), (1,)), starts_s=None))
    assert solution.outcome.makespan_s == pytest.approx(2e-3) and max(together) > 2.05e-3


def test_a_task_without_time_has_no_throughput_to_make_large():
    free = Task("free", (Group("g", {"gpu": UnitCost(0.0, 1.0)}),))
    with pytest.raises(WorkloadError, match="free can do with no time"):
        solve(Problem(XAVIER, (free,)), Options("throughput"))
    assert solve(Problem(XAVIER, (free,))).outcome.makespan_s == 0


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_cp_sat_may_be_asked_first_and_changes_nothing_that_is_proved(objective):
    problem = arbitrary(7)
    alone, asked = (solve(problem, Options(objective, cp_sat=cp_sat)) for cp_sat in (False, True))
    assert asked.certificate.proved and asked.certificate.value == pytest.approx(alone.certificate.value, rel=1e-9)
    better = max if objective == "latency" else min
    tighter = better(alone.certificate.any_idling_bound, asked.certificate.any_idling_bound)
    assert asked.certificate.any_idling_bound == tighter


@pytest.mark.parametrize("seed", range(20))
def test_delays_of_any_length_are_only_put_in_where_they_help(seed):
    problem = arbitrary(seed)
    for objective in ("latency", "throughput"):
        solution = solve(problem, Options(objective))
        if solution.idled:
            assert solution.idled.value(objective) < solution.outcome.value(objective)
            assert solution.idled.schedule.units == solution.schedule.units
            bound = solution.certificate.any_idling_bound
            assert solution.idled.value(objective) >= (bound if objective == "latency" else -bound) - 1e-9 * bound


def test_idling_between_events_beats_every_event_aligned_schedule_in_some_cases():
    """HaX-CoNN's solver may delay a start by any time; here that is worth more than a percent."""
    solution = solve(synthetic(3, 2, 6))
    assert solution.certificate.proved and solution.idled
    assert solution.idled.makespan_s < 0.99 * solution.outcome.makespan_s
    assert solution.idled.makespan_s > solution.certificate.any_idling_bound


def test_of_schedules_that_take_no_longer_the_one_with_more_throughput_is_taken():
    """A long task alone decides the latency; the short one beside it need not wait."""
    long, short = (Group("g", {"gpu": UnitCost(time_s, 1.0), "dla": UnitCost(time_s, 1.0)}) for time_s in (10e-3, 1e-3))
    problem = Problem(XAVIER, (Task("long", (long,)), Task("short", (short, short, short))))
    outcome = solve(problem).outcome
    assert outcome.finish_s == pytest.approx((10e-3, 3e-3), rel=1e-3)
    exact, rough = (solve(arbitrary(44), Options(ties=ties)) for ties in (1e-9, 1e-4))
    assert rough.outcome.throughput > 1.3 * exact.outcome.throughput
    assert exact.outcome.makespan_s < rough.outcome.makespan_s <= 1.0001 * exact.outcome.makespan_s
    assert rough.certificate.proved and 0 < rough.certificate.gap <= 1e-4


@pytest.mark.parametrize(("tasks", "groups"), [(8, 3), (4, 8), (3, 40), (12, 2)])
def test_large_problems_end_in_time_with_a_schedule_no_baseline_beats(tasks, groups):
    solution = solve(synthetic(1, tasks, groups), Options(time_limit_s=8 * LOOK_S))
    best = min(outcome.makespan_s for outcome in solution.baselines.values())
    assert solution.outcome.makespan_s <= best * (1 + 1e-9)
    assert solution.schedule.made_by == "weft" and solution.certificate.bound <= solution.certificate.value


def test_more_tasks_than_can_be_searched_are_refused():
    with pytest.raises(WorkloadError, match="13 tasks; at most 12"):
        synthetic(1, 13, 1)


def test_limits_that_no_schedule_keeps_together_are_refused():
    costs = [{"gpu": UnitCost(1e-3, 1.0, energy_j=1.0)}, {"gpu": UnitCost(1e-3, 1.0, energy_j=1.0)}]
    for each in costs:
        each["dla"] = UnitCost(1e-3, 1.0, energy_j=0.1)
    chain = (Group("a", costs[0]), Group("b", {"gpu": costs[1]["gpu"]}))
    problem = Problem(XAVIER, (Task("t", chain),))
    assert solve(problem, Options(limits=TaskLimits(1, 1.5))).certificate.proved
    with pytest.raises(WorkloadError):
        solve(problem, Options(limits=TaskLimits(0, 1.5)))


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1e3])
def test_times_of_any_scale_and_of_none_are_searched(scale):
    rng = np.random.default_rng(5)
    for _ in range(15):
        chains = [
            tuple(
                Group(
                    f"g{i}",
                    {unit: UnitCost(float(rng.choice([0, 1e-9, 1.0])) * scale, 20.0) for unit in ("gpu", "dla")},
                )
                for i in range(3)
            )
            for _ in range(2)
        ]
        problem = Problem(XAVIER, tuple(Task(f"m{n}", chain) for n, chain in enumerate(chains)))
        solution = solve(problem)
        best = min(outcome.makespan_s for outcome in solution.baselines.values())
        assert solution.outcome.makespan_s <= best * (1 + 1e-9) + 1e-15


def test_a_search_is_not_charged_for_loading_what_is_compiled():
    load_kernels.cache_clear()
    assert solve(synthetic(1, 2, 2)).certificate.proved
    assert load_kernels.cache_info().currsize == 1


COMPILED = """
from numba.core import event

class Compiled(event.Listener):
    def on_start(self, event): names.append(event.data["dispatcher"].py_func.__name__)
    def on_end(self, event): pass

names = []
event.register("numba:compile", Compiled())
from weft_map.kernels import soc_search
from weft_map.solver import load_kernels, solve
from tests.mapping.soc_problems import synthetic

load_kernels()
before = len(names)
solve(synthetic(1, 3, 4))
assert "grow" in names and len(names) == before, names[before:]
ours = {name: getattr(soc_search, name) for name in names if hasattr(soc_search, name)}
assert all(len(ours[name].signatures) == 1 for name in ("_grow", "_store_state", "grow", "expand", "root")), ours
"""


@pytest.mark.long
def test_all_that_a_search_needs_is_compiled_before_it_begins_and_only_once(tmp_path):
    """In a process and with a cache of its own, where nothing is compiled yet."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", COMPILED], env=environment, check=True, cwd=Path(__file__).parents[2])
