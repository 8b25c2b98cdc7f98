"""The simulated SoC: worked by hand, against small steps of time, and the rules every outcome keeps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.mapping.naive_soc import integrate, random_case
from weft.base.errors import InvalidStart, WorkloadError
from weft.devices.soc import Soc, Unit
from weft.engine import Engine
from weft.engine.policies.base import NO_BUFFER, Policy, Setting, Start, View
from weft_map.problem import Group, Problem, Task, UnitCost
from weft_map.schedule import Outcome, RunInterval, Schedule, Transfer
from weft_map.simulator import Chains, Planned, SimulatedSoc, simulate, ticks

MS = 1e-3
GPU, DLA = 0, 1


def soc(**instances: int) -> Soc:
    """A gpu and a dla that share 100 GB/s in proportion."""
    units = {"gpu": 1, "dla": 1, **instances}
    return Soc(name="duo", bandwidth_gb_s=100.0, units=tuple(Unit(name=n, instances=i) for n, i in units.items()))


def group(name: str, gpu: tuple[float, ...] | None, dla: tuple[float, ...] | None = None, leave: bool = True) -> Group:
    """Each unit: time in ms, demand in GB/s, in and out in ms."""
    given = {"gpu": gpu, "dla": dla}
    costs = {unit: UnitCost(c[0] * MS, c[1], *(x * MS for x in c[2:])) for unit, c in given.items() if c is not None}
    return Group(name, costs, leave)


def task(name: str, *groups: Group, **more: object) -> Task:
    return Task(name, groups, **more)  # type: ignore[arg-type]


def pieces_of(outcome: Outcome) -> Mapping[tuple[int, int], Sequence[RunInterval]]:
    found: dict[tuple[int, int], list[RunInterval]] = defaultdict(list)
    for piece in outcome.pieces:
        found[piece.task, piece.step].append(piece)
    return found


def spans_ms(outcome: Outcome) -> dict[tuple[int, int], tuple[float, float]]:
    """Start and end of each step."""
    return {key: (row[0].start_s / MS, row[-1].end_s / MS) for key, row in pieces_of(outcome).items()}


def near(*values: float) -> object:
    return pytest.approx(values, rel=1e-12)


# Worked by hand


def test_two_groups_that_overlap_slow_each_other_down_until_one_ends():
    problem = Problem(soc(), (task("a", group("a", (4, 80))), task("b", group("b", None, (2, 60)))))
    outcome = simulate(problem, Schedule(((GPU,), (DLA,))))
    # 140 of 100 GB/s: both take 1.4 times as long; b ends at 2.8 ms, when 2 of a's 4 ms are done
    assert outcome.pieces == (
        RunInterval(0, 0, GPU, 0, 0.0, pytest.approx(2.8 * MS), pytest.approx(1.4)),
        RunInterval(1, 0, DLA, 0, 0.0, pytest.approx(2.8 * MS), pytest.approx(1.4)),
        RunInterval(0, 0, GPU, 0, pytest.approx(2.8 * MS), pytest.approx(4.8 * MS), 1.0),
    )
    assert outcome.finish_s == near(4.8 * MS, 2.8 * MS)
    assert outcome.moves == ()


def test_what_runs_alone_takes_its_stand_alone_time():
    chain = [group(f"g{n}", (n + 1, 90), (n + 2, 70)) for n in range(3)]
    outcome = simulate(Problem(soc(), (task("a", *chain),)), Schedule(((GPU, GPU, DLA),)))
    assert [piece.slow_down for piece in outcome.pieces] == [1.0, 1.0, 1.0]
    assert outcome.makespan_s == pytest.approx((1 + 2 + 4) * MS)
    assert outcome.moves == (Transfer(0, 2, GPU, DLA, pytest.approx(3 * MS), pytest.approx(3 * MS)),)  # at no cost


def test_low_demand_costs_nothing_where_the_memory_has_room():
    problem = Problem(soc(), (task("a", group("a", (4, 40))), task("b", group("b", None, (2, 60)))))
    outcome = simulate(problem, Schedule(((GPU,), (DLA,))))
    assert [piece.slow_down for piece in outcome.pieces] == [1.0, 1.0]  # one piece each: the pace does not change
    assert outcome.finish_s == near(4 * MS, 2 * MS)


def test_three_groups_share_the_memory_by_the_sum_of_the_others():
    names = ("a", "b", "c")
    problem = Problem(soc(dla=2), tuple(task(n, group(n, (1, 50), (1, 100))) for n in names))
    outcome = simulate(problem, Schedule(((GPU,), (DLA,), (DLA,))))
    assert {piece.slow_down for piece in outcome.pieces} == {2.5}
    assert [piece.instance for piece in outcome.pieces] == [0, 0, 1]


def test_a_move_takes_what_leaving_and_arriving_take_and_holds_no_unit():
    a = task("a", group("a0", (1, 0, 0, 0.25)), group("a1", None, (1, 0, 0.5, 0)))
    b = task("b", group("b0", (3, 0)))
    outcome = simulate(Problem(soc(), (a, b)), Schedule(((GPU, DLA), (GPU,))))
    assert outcome.moves == (Transfer(0, 1, GPU, DLA, pytest.approx(1 * MS), pytest.approx(1.75 * MS)),)
    assert spans_ms(outcome) == {(0, 0): near(0, 1), (0, 1): near(1.75, 2.75), (1, 0): near(1, 4)}


def test_runs_enter_and_leave_and_the_next_begins_anywhere():
    a = task("a", group("g", (1, 0), (2, 0)), repeats=2, entry_s={"gpu": 1 * MS}, exit_s={"gpu": 3 * MS, "dla": 5 * MS})
    outcome = simulate(Problem(soc(), (a,)), Schedule(((GPU, DLA),)))
    assert [(m.source, m.target, m.start_s / MS, m.end_s / MS) for m in outcome.moves] == [
        (-1, GPU, *near(0, 1).expected),
        (GPU, DLA, *near(2, 5).expected),
        (DLA, -1, *near(7, 12).expected),
    ]
    assert outcome.finish_s == near(12 * MS)


def test_a_pipeline_begins_when_what_it_waits_for_is_out():
    first = task("first", group("g", (2, 0)), exit_s={"gpu": 1 * MS})
    then = task("then", group("g", (1, 0), (1, 0)), after=("first",), entry_s={"dla": 0.5 * MS})
    outcome = simulate(Problem(soc(), (then, first)), Schedule(((DLA,), (GPU,))))
    assert spans_ms(outcome)[0, 0] == near(3.5, 4.5)


def test_a_line_is_served_in_order_of_arrival_and_at_one_instant_in_the_order_of_the_tasks():
    tasks = [task(n, group(n, (2, 0)), entry_s={"gpu": e * MS}) for n, e in (("a", 1), ("b", 0), ("c", 1))]
    problem = Problem(soc(), tuple(tasks))
    schedule = Schedule(((GPU,),) * 3)
    assert simulate(problem, schedule).finish_s == near(4 * MS, 2 * MS, 6 * MS)
    assert simulate(problem, replace(schedule, order=(2, 0, 1))).finish_s == near(6 * MS, 2 * MS, 4 * MS)


def test_two_instances_run_two_groups_at_a_time():
    problem = Problem(soc(gpu=2), tuple(task(n, group(n, (2, 0))) for n in "abc"))
    assert simulate(problem, Schedule(((GPU,),) * 3)).finish_s == near(2 * MS, 2 * MS, 4 * MS)


def test_a_task_may_wait_on_purpose_and_others_pass_it_meanwhile():
    problem = Problem(soc(), tuple(task(n, group(n, (2, 0))) for n in "ab"))
    outcome = simulate(problem, Schedule(((GPU,), (GPU,)), starts_s=((3 * MS,), (0.5 * MS,))))
    assert spans_ms(outcome) == {(0, 0): near(3, 5), (1, 0): near(0.5, 2.5)}


@pytest.mark.parametrize("rounding_s", [0.0, 4e-13, -4e-13])
def test_a_start_planned_at_an_event_happens_at_it_whatever_the_rounding(rounding_s):
    a, b = task("a", group("a", (0.7, 80))), task("b", group("b", None, (2, 60)))
    outcome = simulate(Problem(soc(), (a, b)), Schedule(((GPU,), (DLA,)), ((0.0,), (0.7 * MS + rounding_s,))))
    assert spans_ms(outcome) == {(0, 0): near(0, 0.7), (1, 0): near(0.7, 2.7)}
    assert len(outcome.pieces) == 2


def test_groups_that_take_no_time_are_run_all_the_same():
    a = task("a", group("a0", (0, 50)), group("a1", (0, 50)), group("a2", (1, 50)))
    b = task("b", group("b0", (1, 50)), group("b1", (0, 50)))
    outcome = simulate(Problem(soc(), (a, b)), Schedule(((GPU,) * 3, (GPU,) * 2)))
    assert sorted(pieces_of(outcome)) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert outcome.makespan_s == pytest.approx(2 * MS)


@pytest.mark.parametrize("at_ms", [0, 1])
def test_a_group_that_takes_no_time_may_be_planned_before_another_on_the_same_unit(at_ms):
    a, b = task("a", group("a0", (1, 0))), task("b", group("b0", (0, 0)))
    outcome = simulate(Problem(soc(), (a, b)), Schedule(((GPU,), (GPU,)), ((at_ms * MS,), (at_ms * MS,))))
    assert spans_ms(outcome) == {(0, 0): near(at_ms, at_ms + 1), (1, 0): near(at_ms, at_ms)}


def test_ends_that_only_rounding_tells_apart_are_one_event():
    assert 0.1 * MS + 0.2 * MS > 0.3 * MS  # in floats
    a = task("a", group("a0", None, (0.1, 0)), group("a1", None, (0.2, 0)), group("a2", (1, 0)))
    b = task("b", group("b0", (1, 0)), entry_s={"gpu": 0.3 * MS})
    outcome = simulate(Problem(soc(), (a, b)), Schedule(((DLA, DLA, GPU), (GPU,))))
    assert spans_ms(outcome)[0, 2] == near(0.3, 1.3)  # a, first in order, wins the tie


# The loop is the engine's


def chains(problem: Problem, policy: Policy) -> SimulatedSoc:
    executor = SimulatedSoc(problem)
    Engine(Chains(problem), policy, executor).run()
    return executor


class Wrong(Policy):
    """Starts what nobody offered."""

    def decide(self, view: View) -> Start:
        return Start(view.candidates[0]._replace(program=99))


class Shortest(Policy):
    """Sends each step to the unit that would be quickest alone."""

    def decide(self, view: View) -> Start:
        return Start(min(view.candidates, key=lambda candidate: candidate.fetch + candidate.compute))


def test_a_policy_that_answers_rubbish_is_refused_by_the_engine():
    with pytest.raises(InvalidStart, match="Wrong chose"):
        chains(Problem(soc(), (task("a", group("a", (1, 0))),)), Wrong(Setting((), NO_BUFFER)))


def test_any_policy_may_decide_and_is_never_led_where_a_task_cannot_go_on():
    # the dla is quicker at first, but what follows must stay with it and runs on the gpu alone
    a = task("a", group("a0", (2, 0), (1, 0), leave=False), group("a1", (1, 0)), group("a2", (3, 0), (1, 0)))
    executor = chains(Problem(soc(), (a,)), Shortest(Setting((), NO_BUFFER)))
    assert [piece.unit for piece in executor.pieces] == [GPU, GPU, DLA]


def test_offers_name_the_moves_and_times_of_each_unit_in_ticks():
    problem = Problem(soc(), (task("a", group("a0", (1, 0), (2, 0)), entry_s={"dla": 3 * MS}),))
    source = Chains(problem)
    candidates = source.offer(SimulatedSoc(problem).ready()).candidates
    assert [(c.program, c.fetch, c.compute) for c in candidates] == [
        (0, 0, ticks(MS)),
        (1, ticks(3 * MS), ticks(2 * MS)),
    ]


# Against small steps of time


@pytest.mark.parametrize("block", range(11))
def test_agrees_with_small_steps_of_time_to_a_thousandth(block):
    for seed in range(10 * block, 10 * block + 10):
        problem, schedule = random_case(Random(seed))
        outcome = simulate(problem, schedule)
        for ticks_per_run in (1500, 15000):  # who comes first may hang on less than the first step
            found_s = integrate(problem, schedule, outcome.makespan_s / ticks_per_run)
            error = max(abs(a - b) for a, b in zip(outcome.finish_s, found_s, strict=True)) / outcome.makespan_s
            if error <= 1e-3:
                break
        assert error <= 1e-3, f"seed {seed}"


# What every outcome keeps

cases = st.tuples(st.randoms(use_true_random=False), st.booleans()).map(
    lambda drawn: random_case(drawn[0], coarse=drawn[1])
)


@settings(max_examples=25)
@given(cases)
def test_every_step_runs_once_in_order_and_its_work_is_conserved(case):
    problem, schedule = case
    outcome, tables = simulate(problem, schedule), problem.tables
    found = pieces_of(outcome)
    assert sorted(found) == [(n, i) for n in range(len(problem.tasks)) for i in range(tables.steps[n])]
    for (n, i), row in found.items():
        unit = schedule.units[n][i]
        assert {(piece.unit, piece.instance) for piece in row} == {(unit, row[0].instance)}
        assert all(a.end_s == b.start_s and a.slow_down != b.slow_down for a, b in pairwise(row))
        work_s = sum((piece.end_s - piece.start_s) / piece.slow_down for piece in row)
        assert work_s == pytest.approx(tables.time[n, i, unit], rel=1e-9, abs=1e-15)
        if schedule.starts_s:
            assert row[0].start_s >= schedule.starts_s[n][i] - 1e-9


@settings(max_examples=25)
@given(cases)
def test_moves_are_as_long_as_the_problem_says_and_steps_wait_for_them(case):
    problem, schedule = case
    outcome, tables = simulate(problem, schedule), problem.tables
    found, moves = pieces_of(outcome), {(move.task, move.step): move for move in outcome.moves}
    for n, steps in enumerate(tables.steps.tolist()):
        ready_s = max([outcome.finish_s[m] for m in range(len(problem.tasks)) if tables.waits[n, m]], default=0.0)
        for i in range(steps + 1):
            source = schedule.units[n][i - 1] if i else -1
            target = schedule.units[n][i] if i < steps else -1
            length_s = tables.move[n, i, source, target] if i < steps else tables.leave[n, source]
            move = moves.pop((n, i), Transfer(n, i, source, target, ready_s, ready_s))
            assert move[2:5] == (source, target, ready_s)
            assert move.end_s - move.start_s == pytest.approx(length_s, rel=1e-9, abs=1e-15)
            if i < steps:
                assert found[n, i][0].start_s >= move.end_s
                ready_s = found[n, i][-1].end_s
        assert outcome.finish_s[n] == move.end_s
    assert not moves


@settings(max_examples=25)
@given(cases)
def test_no_instance_is_used_twice_and_slow_downs_are_those_of_what_runs(case):
    problem, schedule = case
    outcome = simulate(problem, schedule)
    used = defaultdict(list)
    for piece in outcome.pieces:
        used[piece.unit, piece.instance].append((piece.start_s, piece.end_s))
    for (unit, instance), spans in used.items():
        assert instance < problem.soc.units[unit].instances
        assert all(a[1] <= b[0] for a, b in pairwise(sorted(spans)))
    for piece in outcome.pieces:
        middle_s = (piece.start_s + piece.end_s) / 2
        there = [p for p in outcome.pieces if p.start_s < middle_s < p.end_s and p != piece]
        demand = problem.tables.demand
        others = sum(demand[p.task, p.step, p.unit] for p in there)
        if piece.end_s > piece.start_s:
            expected = problem.soc.slow_down(piece.unit, demand[piece.task, piece.step, piece.unit], others)
            assert piece.slow_down == pytest.approx(expected, rel=1e-9)


@settings(max_examples=25)
@given(cases)
def test_no_unit_stands_idle_while_a_step_that_may_start_waits_for_it(case):
    problem, schedule = case
    schedule = replace(schedule, starts_s=None)
    outcome = simulate(problem, schedule)
    there_s = {(move.task, move.step): move.end_s for move in outcome.moves}
    spans = {key: (row[0].start_s, row[-1].end_s, row[0].unit) for key, row in pieces_of(outcome).items()}
    for (n, i), (start_s, _, unit) in spans.items():
        came_s = there_s.get((n, i), spans[n, i - 1][1] if i else start_s)
        if start_s > came_s:
            middle_s = (came_s + start_s) / 2
            busy = [key for key, (a, b, u) in spans.items() if u == unit and a < middle_s < b]
            assert len(busy) == problem.soc.units[unit].instances
            assert all(spans[key][0] < start_s for key in busy)


@settings(max_examples=20)
@given(cases)
def test_a_plan_made_of_an_outcome_gives_the_same_outcome(case):
    problem, schedule = case
    outcome = simulate(problem, schedule)
    found = pieces_of(outcome)
    starts_s = tuple(tuple(found[n, i][0].start_s for i in range(len(units))) for n, units in enumerate(schedule.units))
    again = simulate(problem, replace(schedule, starts_s=starts_s))
    assert again.finish_s == pytest.approx(outcome.finish_s, rel=1e-9)


# Schedules that cannot be


def duo() -> Problem:
    a = task("a", group("stem", (1, 0), (1, 0), leave=False), group("body", (1, 0), (1, 0)), group("head", (1, 0)))
    return Problem(soc(), (a, task("b", group("only", (1, 0)))))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Schedule(((0, 0, 0),)), "the schedule has units for 1 tasks; there are 2"),
        (Schedule(((0, 0), (0,))), "a: the schedule has 2 units; the task has 3 steps"),
        (Schedule(((0, 0, 1), (0,))), r"a: step 2 \('head'\) may not run on dla; it may on gpu"),
        (Schedule(((0, 1, 0), (0,))), r"a: step 1 \('body'\) may not come from gpu to dla; keep it on gpu"),
        (Schedule(((0, 0, 0), (2,))), r"b: step 0 \('only'\) is put on unit 2; duo has 0 to 1"),
        (Schedule(((0, 0, 0), (-1,))), r"b: step 0 \('only'\) is put on unit -1"),
        (Schedule(((0, 0, 0), (0,)), ((0.0, 0.0, 0.0), ())), "b: the schedule has 0 starts; the task has 1 steps"),
        (Schedule(((0, 0, 0), (0,)), ((0.0, 0.0, 0.0), (float("inf"),))), r"b: step 0 \('only'\) is to start at inf s"),
        (Schedule(((0, 0, 0), (0,)), order=(0, 0)), r"order = \(0, 0\) must name each of the tasks 0 to 1 once"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused_in_one_line(schedule, message):
    with pytest.raises(WorkloadError, match=message):
        simulate(duo(), schedule)


def test_an_executor_with_nothing_to_wait_for_says_so():
    with pytest.raises(WorkloadError, match="a task waits for ever"):
        SimulatedSoc(duo()).idle_until(0)


def test_an_executor_stops_at_the_time_it_is_told():
    problem = duo()
    executor = SimulatedSoc(problem)
    executor.idle_until(ticks(2 * MS))
    assert executor.now() == ticks(2 * MS)


def test_a_plan_is_checked_before_it_is_followed():
    with pytest.raises(WorkloadError, match="units for 0 tasks"):
        Planned(Setting((), NO_BUFFER), duo(), Schedule(()))
