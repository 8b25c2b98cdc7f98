"""Other people's mappings: legal on every problem, and each with the behaviour it is known for."""

from __future__ import annotations

from math import inf, isfinite

import pytest

from tests.mapping.small_problems import group, model, pair, random_problem, soc
from weft_map.baselines import BASELINES
from weft_map.baselines.chains import chains_of, finishes
from weft_map.baselines.published import breadth_first, computation_first, data_locality, depth_first
from weft_map.problem import Problem
from weft_map.search import run_mapping
from weft_map.simulator import check_schedule, simulate

FAST = [name for name in BASELINES if name != "contention-blind"]


def mappings(name: str, problem: Problem) -> set[tuple[tuple[int, ...], ...]]:
    return {schedule.units for schedule in BASELINES[name](problem, "latency")}


def best(name: str, problem: Problem, objective: str = "latency") -> float:
    return min(simulate(problem, each).value(objective) for each in BASELINES[name](problem, objective))


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("name", FAST)
def test_every_candidate_is_legal_and_runs_to_its_end(name, objective):
    for seed in range(60):
        problem = random_problem(seed, tasks=1 + seed % 4)
        found = BASELINES[name](problem, objective)
        assert found
        for schedule in found:
            check_schedule(problem, schedule)
            assert schedule.made_by == name
        assert all(isfinite(end) for end in simulate(problem, found[-1]).finish_s)


@pytest.mark.parametrize("name", FAST)
def test_candidates_are_distinct(name):
    for seed in range(20):
        found = BASELINES[name](random_problem(seed, tasks=3), "throughput")
        assert len(set(found)) == len(found)


def test_very_long_problems_are_mapped_run_by_run():
    short = pair(model("a", group("x", 1, 2), group("y", 2, 1)), model("b", group("x", 1, 2)))
    long = pair(model("a", group("x", 1, 2), group("y", 2, 1), repeats=1000), model("b", group("x", 1, 2), repeats=9))
    for name in FAST:
        copied = {tuple(row * (1000 if n == 0 else 9) for n, row in enumerate(each)) for each in mappings(name, short)}
        assert mappings(name, long) == copied


def test_gpu_only_puts_everything_on_the_unit_that_is_fastest_for_all():
    problem = pair(model("a", group("x", 3, 1), group("y", 3, 1)), model("b", group("x", 1, 4), group("y", 1, 4)))
    assert mappings("gpu-only", problem) == {((0, 0), (0, 0))}
    assert best("gpu-only", problem) == pytest.approx(8e-3)


def test_gpu_only_falls_back_for_what_its_unit_may_not_run():
    problem = Problem(
        soc("gpu", "dla", "dsp"),
        (model("a", group("x", 1, 4, 4), group("y", None, 3, 2), group("z", 1, 4, 4), group("w", 1, 4, 4)),),
    )
    assert mappings("gpu-only", problem) == {((0, 2, 0, 0),)}


def test_a_fallback_takes_along_the_groups_that_must_stay_with_it():
    groups = (group("x", 1, 4), group("y", 1, 4, leave=False), group("z", None, 3), group("w", 1, 4))
    assert mappings("gpu-only", pair(model("a", *groups))) == {((0, 1, 1, 0),)}


def test_a_unit_that_runs_only_what_suits_it_is_not_the_one_unit():
    groups = [group(f"g{i}", 2, 1 if i == 0 else None) for i in range(4)]
    assert mappings("gpu-only", pair(model("a", *groups))) == {((0, 0, 0, 0),)}


def test_for_throughput_models_on_one_unit_run_one_after_the_other():
    problem = pair(model("a", *[group(f"g{i}", 1, 9) for i in range(4)]), model("b", group("x", 1, 9)))
    assert best("gpu-only", problem, "throughput") == pytest.approx(-(1 / 1e-3 + 1 / 5e-3))


def test_per_unit_tries_every_permutation():
    problem = pair(model("a", group("x", 3, 1)), model("b", group("x", 1, 4)))
    assert mappings("per-unit", problem) == {((0,), (1,)), ((1,), (0,))}


def test_with_more_models_than_units_some_share_and_none_stands_idle():
    found = mappings("per-unit", pair(*(model(name, group("x", 1, 1)) for name in "abc")))
    assert len(found) == 6
    assert all({row[0] for row in units} == {0, 1} for units in found)


def test_two_instances_take_two_models():
    problem = Problem(soc("gpu", "dla", instances=2), tuple(model(name, group("x", 9, 1)) for name in "ab"))
    assert ((1,), (1,)) in mappings("per-unit", problem)


def test_many_models_are_shared_out_greedily():
    problem = Problem(soc("gpu", "dla", "dsp"), tuple(model(f"m{n}", group("x", 1, 1, 1)) for n in range(9)))
    (units,) = mappings("per-unit", problem)
    assert sorted(row[0] for row in units) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(("move_ms", "unit"), [(2.9, 1), (3.0, 0), (3.1, 0)])
def test_mensa_switches_only_if_it_gains_more_than_the_move_costs(move_ms, unit):
    problem = pair(model("a", group("x", 1, 2), group("y", 4, 1, move_ms=move_ms)))
    assert mappings("mensa", problem) == {((0, unit),)}


def test_mensa_does_not_look_ahead():
    """Each single move costs more than it gains; both groups together would gain."""
    groups = (group("x", 1, 2), group("y", 4, 2, move_ms=3), group("z", 4, 2, move_ms=3))
    assert mappings("mensa", pair(model("a", *groups))) == {((0, 0, 0),)}


def test_mensa_begins_each_run_where_its_first_group_runs_best():
    problem = pair(model("a", group("x", 1, 2), group("y", 9, 1), repeats=2))
    assert mappings("mensa", problem) == {((0, 1, 0, 1),)}


def test_herald_ignores_what_moves_cost():
    problem = pair(model("a", group("x", 1, 2, move_ms=100), group("y", 2, 1, move_ms=100), group("z", 1, 2)))
    assert ((0, 1, 0),) in mappings("herald", problem)


def test_herald_gives_up_the_best_unit_for_balance():
    problem = pair(*(model(name, *[group(f"g{i}", 1, 1.5) for i in range(4)]) for name in "ab"))
    found = mappings("herald", problem)
    assert ((0,) * 4, (0,) * 4) in found  # no limit
    shares = {sum(unit for row in units for unit in row) for units in found}
    assert shares & {3, 4}


def test_herald_takes_layers_in_turn_or_one_model_after_the_other():
    tasks = (
        model("a", group("x", 1), group("y", 1)),
        model("b", group("x", 1)),
        model("c", group("x", 1), after=("a",)),
    )
    chains = chains_of(pair(*tasks))
    assert breadth_first(chains) == [0, 1, 0, 2]
    assert depth_first(chains) == [0, 0, 1, 2]


def detour() -> Problem:
    """The dla is through with y first, but the way back eats that up."""
    return pair(model("a", group("x", 1, 9), group("y", 5, 3.9, move_ms=1), group("z", 1, 10, move_ms=5)))


def test_h2h_removes_a_switch_that_does_not_pay():
    mapping, _ = computation_first(chains_of(detour()))
    assert mapping == [[0, 1, 0]]
    assert mappings("h2h", detour()) == {((0, 0, 0),)}


def test_h2h_never_ends_up_worse_than_its_first_step():
    for seed in range(60):
        chains = chains_of(random_problem(seed, tasks=2 + seed % 2, groups=6))
        mapping, sequence = computation_first(chains)
        after, order = data_locality(chains, mapping, sequence)
        assert sorted(order) == sorted(sequence)
        assert max(finishes(chains, after, order)) <= max(finishes(chains, mapping, sequence)) < inf


def test_h2h_spreads_what_is_ready_at_once():
    problem = pair(model("a", group("x", 2, 3)), model("b", group("x", 2, 3)))
    assert mappings("h2h", problem) == {((0,), (1,)), ((1,), (0,))}  # whichever is listed first


def test_heft_picks_the_earliest_end():
    spread = mappings("heft", pair(model("a", group("x", 2, 3)), model("b", group("x", 2, 3))))
    assert spread == {((0,), (1,)), ((1,), (0,))}  # whichever is listed first
    assert mappings("heft", pair(model("a", group("x", 2, 5)), model("b", group("x", 2, 5)))) == {((0,), (0,))}
    assert mappings("heft", detour()) == {((0, 1, 0),)}  # and regrets it


def test_heft_serves_the_longest_way_first():
    problem = pair(model("a", group("x", 2, 9)), model("b", group("x", 2, 9), group("y", 2, 9), group("z", 2, 9)))
    assert mappings("heft", problem) == {((0,), (0, 0, 0))}
    chained = pair(
        model("a", group("x", 2, 3)), model("b", group("x", 2, 3)), model("c", group("x", 9, 9), after=("b",))
    )
    assert mappings("heft", chained) == {((1,), (0,), (0,))}


def test_heft_uses_gaps():
    """b's second group waits for a move; a fits in front of it."""
    problem = pair(model("a", group("x", 2, 10)), model("b", group("x", 99, 1), group("y", 5, 99, move_ms=3)))
    assert mappings("heft", problem) == {((0,), (1, 0))}
    assert best("heft", problem) < 11e-3


def test_the_contention_blind_one_is_legal_with_and_without_its_plan():
    for seed in range(6):
        problem = random_problem(seed)
        found = BASELINES["contention-blind"](problem, "latency")
        assert {schedule.made_by for schedule in found} == {"contention-blind"}
        assert [schedule.starts_s is None for schedule in found] == [True, True, False]
        for schedule in found:
            check_schedule(problem, schedule)


@pytest.mark.parametrize("name", ["herald", "h2h", "heft"])
def test_the_order_in_which_tasks_are_listed_does_not_matter(name):
    for seed in range(10):
        listed = random_problem(seed)
        turned = Problem(listed.soc, listed.tasks[::-1])
        best = [
            min(max(run_mapping(each, way)) for way in BASELINES[name](each, "latency")) for each in (listed, turned)
        ]
        assert best[0] == pytest.approx(best[1])
