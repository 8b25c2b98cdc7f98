"""Models that come and go: a planner in a process of its own, and frames that go on whatever it does.

The solver is the real one; only the loop's clock is ours: time passes in its sleeps, and each of them waits until the
planner has said something, if more is to come.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Thread

import pytest

from weft.base.errors import ProfileError, WorkloadError
from weft.devices import load_soc
from weft_map import Options, Problem, simulate, solve
from weft_map.background_planner import LOST, MOST_RESTARTS, News, Planner
from weft_map.dynamic import DynamicLog, Frame, best_naive, log_as_dict, run_dynamic
from weft_map.estimate import find_profile
from weft_map.limits import TaskLimits
from weft_map.problem import Group
from weft_map.scenario import Scenario, parse_scenario, prepare_phases

XAVIER = load_soc("xavier")
TIES = 2e-4
"""Schedules of a scenario may differ by its ties (1e-4) and are as good as each other."""
VGG, ALEX = ("vgg19", "resnet152"), ("alexnet", "resnet101")
PATIENCE_S = 600.0
"""After that something that should have happened has not; nothing here is meant to come near it."""


class Stepped:
    """Time that passes only in sleeps."""

    def __init__(self) -> None:
        self.time_s = 100.0
        self.on_sleep: Callable[[], object] = lambda: None

    def now_s(self) -> float:
        return self.time_s

    def sleep_until(self, time_s: float) -> None:
        self.time_s = max(self.time_s, time_s)
        self.on_sleep()


CLOCK = Stepped()


@pytest.fixture(scope="module")
def shared() -> Iterator[Planner]:
    with Planner(lambda: CLOCK.now_s()) as made:
        yield made


@pytest.fixture
def planner(shared: Planner) -> Planner:
    """A warm planner, on a clock that waits for its news."""
    CLOCK.on_sleep = lambda: shared.searching and shared.wait()
    return shared


def problem_of(models: tuple[str, ...]) -> Problem:
    return Problem(XAVIER, tuple(find_profile(model, XAVIER).task() for model in models))


def scenario_of(*phases: tuple[tuple[str, ...], float], **settings: object) -> Scenario:
    models = dict.fromkeys(model for models, _ in phases for model in models)
    raw = {
        "soc": "xavier",
        "task": [{"model": model} for model in models],
        "phase": [{"tasks": list(models), "duration_s": duration_s} for models, duration_s in phases],
    }
    return parse_scenario(raw | settings, "test")


def all_news(planner: Planner) -> list[News]:
    """Until the search has ended."""
    said: list[News] = []
    while planner.searching:
        planner.wait()
        said += planner.news()
    return said


def run(planner: Planner, scenario: Scenario, on_frame: Callable[[Frame], None] | None = None) -> DynamicLog:
    return run_dynamic(scenario, on_frame, clock=CLOCK, planner=planner)


# The planner


def test_it_finds_what_the_solver_finds_and_says_so_on_the_way(planner: Planner) -> None:
    planner.plan(problem_of(VGG), Options())
    *better, last = [news.report for news in all_news(planner)]
    there = solve(problem_of(VGG))
    assert last.kind == "ended" and last.proved
    assert last.schedule == there.schedule and last.value == pytest.approx(there.certificate.value, rel=1e-9)
    assert [found.schedule for found in better] == [each.schedule for each in there.improvements]
    values = [found.value for found in better]
    assert values == sorted(values, reverse=True) and values[-1] == pytest.approx(last.value, rel=1e-9)


def test_a_new_problem_replaces_the_one_being_searched(planner: Planner) -> None:
    planner.plan(problem_of(VGG), Options())
    planner.wait()
    newer = planner.plan(problem_of(ALEX), Options())
    said = all_news(planner)
    assert {news.report.job for news in said} == {newer}
    assert said[-1].report.value == pytest.approx(solve(problem_of(ALEX)).certificate.value, rel=1e-9)


def test_many_changes_in_a_row_end_with_the_last_one(planner: Planner) -> None:
    for _ in range(20):
        planner.plan(problem_of(VGG), Options())
        last = planner.plan(problem_of(ALEX), Options())
    said = all_news(planner)
    assert said[-1].report.job == last and said[-1].report.proved
    assert LOST not in {news.report.kind for news in said}


def test_a_request_that_cannot_be_met_is_news_and_not_the_end(planner: Planner) -> None:
    planner.plan(problem_of(ALEX), Options(limits=TaskLimits(energy_budget_j=1.0)))
    (only,) = all_news(planner)
    assert only.report.kind == "failed" and "energy" in only.report.message
    planner.plan(problem_of(ALEX), Options())
    assert all_news(planner)[-1].report.proved


def test_an_error_nobody_thought_of_is_news_and_not_the_end(planner: Planner) -> None:
    process_id = planner.process_id
    for _ in range(MOST_RESTARTS + 2):
        planner.plan(problem_of(ALEX), Options(limits="no\nlimits"))  # type: ignore[arg-type]
        (only,) = all_news(planner)
        assert only.report.kind == "failed" and only.report.message.startswith("AttributeError: 'str' object has no")
    planner.plan(problem_of(ALEX), Options())
    assert all_news(planner)[-1].report.proved
    assert planner.process_id == process_id


def test_nobody_waits_until_a_busy_process_has_read_its_problem(planner: Planner) -> None:
    planner.warm_up()
    os.kill(planner.process_id, signal.SIGSTOP)
    first, second = problem_of(ALEX).tasks
    large = replace(first, groups=(Group("g" * 1_000_000, first.groups[0].costs), *first.groups[1:]))
    asking = Thread(target=planner.plan, args=(Problem(XAVIER, (large, second)), Options()))
    asking.start()
    asking.join(PATIENCE_S)
    waited = asking.is_alive()
    os.kill(planner.process_id, signal.SIGCONT)
    asking.join()
    assert not waited
    assert all_news(planner)[-1].report.proved


def test_throughput_comes_with_its_latency(planner: Planner) -> None:
    problem = problem_of(ALEX)
    planner.plan(problem, Options(objective="throughput"))
    for news in all_news(planner):
        assert news.report.schedule is not None
        outcome = simulate(problem, news.report.schedule)
        assert news.report.makespan_s == pytest.approx(outcome.makespan_s)
        assert news.report.value == pytest.approx(outcome.throughput)


def test_no_process_is_left_behind() -> None:
    with Planner() as made:
        process_id = made.process_id
        made.plan(problem_of(VGG), Options())
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)


def test_a_process_that_keeps_dying_is_given_up_until_the_next_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are killed only wait for that, so that none has found anything before."""
    idle = tmp_path / "python"
    idle.write_text("#!/bin/sh\nexec sleep 1000\n")
    idle.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(idle))
    with Planner() as made:
        made.plan(problem_of(ALEX), Options())
        for _ in range(MOST_RESTARTS + 1):
            assert made.searching
            os.kill(made.process_id, signal.SIGKILL)
            made.wait()
            said = made.news()
            assert {news.report.kind for news in said} == {LOST}
        assert "died 4 times" in said[-1].report.message
        assert not made.searching
        monkeypatch.undo()
        made.plan(problem_of(ALEX), Options())
        assert made.restarts == 0
        assert all_news(made)[-1].report.proved


# The loop


def test_frames_begin_with_the_best_naive_schedule_and_reach_the_best(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is heard of the planner before the first frame; a fast one might be done by then."""
    news, asked = planner.news, count()
    monkeypatch.setattr(planner, "news", lambda: news() if next(asked) else [])
    log = run(planner, scenario_of((VGG, 1.0)))
    (phase,), (_, naive, naive_s) = log.phases, best_naive(problem_of(VGG), Options())
    best = solve(problem_of(VGG)).certificate.value
    assert log.frames[0][2:4] == (naive_s, 0)
    assert phase.first_value == naive and phase.first_made_by == "per-unit"
    assert log.frames[-1].latency_s == phase.last_value == pytest.approx(best, rel=TIES)
    assert phase.oracle_value == pytest.approx(best, rel=TIES)
    assert log.frames[-1].gap == 0.0 and phase.oracle_proved
    assert phase.improved_s is not None and phase.near_s is not None and phase.proved_s is not None
    assert phase.improved_s <= phase.near_s <= phase.proved_s
    assert log.events == ()


def test_frames_follow_each_other_and_never_get_slower_within_a_phase(planner: Planner) -> None:
    log = run(planner, scenario_of((VGG, 0.4), (ALEX, 0.3)))
    for frame, following in zip(log.frames, log.frames[1:], strict=False):
        assert following.start_s == pytest.approx(frame.start_s + frame.latency_s)
        if frame.phase == following.phase:
            assert following.latency_s <= frame.latency_s and following.version >= frame.version
    for phase, (start_s, end_s) in enumerate([(0.0, 0.4), (0.4, 0.7)]):
        its = [frame for frame in log.frames if frame.phase == phase]
        assert start_s <= its[0].start_s < its[-1].start_s < end_s <= its[-1].start_s + its[-1].latency_s + 1e-9
        assert (log.phases[phase].start_s, log.phases[phase].end_s) == pytest.approx((start_s, end_s))
        assert log.phases[phase].frames == len(its)


def test_every_version_in_use_is_an_update(planner: Planner) -> None:
    log = run(planner, scenario_of((VGG, 0.5)))
    used = {update.version: update for update in log.updates if update.used_s is not None}
    assert {frame.version for frame in log.frames} - {0} == set(used)
    for version, update in used.items():
        first = next(frame for frame in log.frames if frame.version == version)
        assert first.start_s == update.used_s and first.latency_s == update.latency_s
        assert update.found_s <= first.start_s


def test_models_that_change_during_the_search_leave_nothing_of_it(planner: Planner) -> None:
    CLOCK.on_sleep = lambda: None  # not a word of the planner is waited for while the first phase lasts
    log = run(planner, scenario_of((VGG, 1e-3), (ALEX, 0.5)), lambda frame: _wait_in(planner, frame, phase=1))
    (_, first_s), (_, last_s) = [(p.frames, p.last_latency_s) for p in log.phases]
    assert log.phases[0].frames == 1 and first_s == best_naive(problem_of(VGG), Options())[2]
    assert last_s == pytest.approx(solve(problem_of(ALEX)).certificate.value, rel=TIES)
    assert {update.phase for update in log.updates} == {1}
    assert log.phases[0].oracle_value == pytest.approx(solve(problem_of(VGG)).certificate.value, rel=TIES)


def _wait_in(planner: Planner, frame: Frame, phase: int) -> None:
    if frame.phase == phase:
        CLOCK.on_sleep = lambda: planner.searching and planner.wait()


def test_a_phase_that_comes_again_begins_with_what_it_had(planner: Planner) -> None:
    log = run(planner, scenario_of((VGG, 0.5), (ALEX, 0.2), (VGG, 0.2)))
    first, _, again = log.phases
    assert again.first_value == first.last_value < first.first_value
    assert (again.improved_s, again.near_s, again.proved_s) == (None, 0.0, 0.0)
    assert all(update.phase != 2 for update in log.updates)


def test_the_same_seed_gives_the_same_schedules(planner: Planner) -> None:
    both = [run(planner, scenario_of((VGG, 0.5), (ALEX, 0.4), seed=3)) for _ in range(2)]
    told = [[(u.phase, u.version, u.value, u.made_by) for u in log.updates] for log in both]
    assert told[0] == told[1] and len(told[0]) >= 2
    assert both[0].seed == 3


class Doomed(Planner):
    """Its process stands still once it is warm, so that it has found nothing when it is killed."""

    def warm_up(self) -> None:
        super().warm_up()
        os.kill(self.process_id, signal.SIGSTOP)


def test_frames_go_on_when_the_planner_is_killed() -> None:
    with Doomed(CLOCK.now_s) as made:
        CLOCK.on_sleep = lambda: killed and made.searching and made.wait()

        def kill_once(frame: Frame) -> None:
            if not killed:
                killed.append(frame)
                os.kill(made.process_id, signal.SIGKILL)

        killed: list[Frame] = []
        log = run(made, scenario_of((VGG, 1.0)), kill_once)
        assert made.restarts == 1
    (event,) = log.events
    assert "ended by signal 9; going on with schedule" in event.message
    after = [frame for frame in log.frames if frame.start_s > killed[0].start_s]
    assert after[0].latency_s <= killed[0].latency_s
    assert log.phases[0].last_value == pytest.approx(solve(problem_of(VGG)).certificate.value, rel=TIES)


def test_throughput_makes_values_large_and_latencies_what_they_are(planner: Planner) -> None:
    log = run(planner, scenario_of((ALEX, 0.4), objective="throughput"))
    best = solve(problem_of(ALEX), Options(objective="throughput"))
    (phase,) = log.phases
    assert phase.first_value <= phase.last_value == pytest.approx(best.certificate.value, rel=1e-9)
    assert phase.oracle_value == pytest.approx(phase.last_value, rel=1e-9)
    assert phase.last_latency_s == pytest.approx(best.outcome.makespan_s)


def test_a_naive_schedule_keeps_to_the_limits_if_one_does() -> None:
    (case,) = prepare_phases(scenario_of((VGG, 1.0), max_switches=0))
    schedule, value, latency_s = best_naive(case.problem, case.options)
    assert all(len(set(row)) == 1 for row in schedule.units)
    assert value == latency_s == pytest.approx(simulate(case.problem, schedule).makespan_s)


def thrifty(tmp_path: Path, **settings: object) -> Scenario:
    """Two models that take 6 J on the gpu, 3.8 J on a unit each, and 1.6 J, slowly, on the dla."""
    unit = {"gpu": (5e-3, 1.5), "dla": (15e-3, 0.4)}
    costs = {
        name: {"time_s": time_s, "demand_gb_s": 30.0, "energy_j": joules} for name, (time_s, joules) in unit.items()
    }
    groups = [{"name": name, "costs": costs} for name in ("g0", "g1")]
    profile = {"format": 1, "kind": "soc-profile", "model": "m", "soc": "xavier-agx", "origin": "measured"}
    (tmp_path / "m.json").write_text(json.dumps(profile | {"groups": groups}))
    raw = {
        "soc": "xavier",
        "task": [{"model": str(tmp_path / "m.json"), "name": name} for name in "ab"],
        "phase": [{"tasks": ["a", "b"], "duration_s": 1.0}, {"tasks": ["a", "b"], "duration_s": 0.5}],
    }
    return parse_scenario(raw | settings, "test")


def test_a_naive_schedule_outside_the_limits_gives_way_to_any_within_them(planner: Planner, tmp_path: Path) -> None:
    late = Late(planner)
    log = run(late, thrifty(tmp_path, energy_budget_j=1.65), late.listen)  # type: ignore[arg-type]
    first, again = log.phases
    assert log.frames[0].latency_s == first.first_latency_s < 0.035 and log.frames[0].gap is None  # too much energy
    assert first.last_latency_s == pytest.approx(0.06) and log.frames[-1].gap == 0.0
    assert first.oracle_value == again.first_value == pytest.approx(0.06) and first.oracle_proved
    assert first.near_s == first.improved_s and first.near_s is not None
    outside = [frame for frame in log.frames if frame.latency_s < 0.035]
    (event,) = log.events
    assert event.message.startswith(f"frames outside the limits, by {first.first_made_by}: {len(outside)}")
    assert event.phase == 0 and event.at_s == first.start_s


def test_no_oracle_is_made_of_a_schedule_outside_the_limits(planner: Planner, tmp_path: Path) -> None:
    log = run(Late(planner), thrifty(tmp_path, energy_budget_j=1.65))  # type: ignore[arg-type]
    for phase, event in zip(log.phases, log.events, strict=True):
        assert phase.last_latency_s < 0.035 and phase.proved_s is None and phase.near_s is None
        assert phase.oracle_value == pytest.approx(0.06) and phase.oracle_proved
        assert f": {phase.frames}; none within them" in event.message


class Late:
    """A planner whose news arrive only when somebody listens."""

    def __init__(self, planner: Planner) -> None:
        self._planner, self._heard = planner, False
        self.plan, self.warm_up = planner.plan, planner.warm_up
        CLOCK.on_sleep = lambda: self._heard and planner.searching and planner.wait()

    def listen(self, _: Frame) -> None:
        self._heard = True

    def news(self) -> list[News]:
        return self._planner.news() if self._heard else []


def test_an_oracle_in_haste_does_not_replace_what_was_found_before(planner: Planner) -> None:
    scenario = scenario_of((VGG, 0.4), time_limit_s=1e-6)
    (case,) = prepare_phases(scenario)
    hasty = solve(case.problem, case.options).certificate
    patient = Patient(planner)
    log = run(patient, scenario)  # type: ignore[arg-type]
    (phase,) = log.phases
    assert not hasty.proved and phase.last_value < hasty.value * (1 - 1e-3)
    assert phase.oracle_value == phase.last_value and phase.near_s is not None
    assert not phase.oracle_proved


class Patient:
    """A planner that takes its time, and is cut off just before it can say that it has a proof."""

    def __init__(self, planner: Planner) -> None:
        self._planner, self.warm_up = planner, planner.warm_up

    def plan(self, problem: Problem, options: Options) -> int:
        return self._planner.plan(problem, replace(options, time_limit_s=PATIENCE_S))

    def news(self) -> list[News]:
        return [news for news in self._planner.news() if news.report.kind == "better"]


def test_what_cannot_be_met_is_refused_before_anything_runs(planner: Planner) -> None:
    frames: list[Frame] = []
    with pytest.raises(ProfileError, match="an energy budget needs energy_j"):
        run(planner, scenario_of((ALEX, 1.0), energy_budget_j=0.0), frames.append)
    assert frames == []


def test_a_scenario_without_phases_or_with_an_unknown_task_is_refused() -> None:
    with pytest.raises(WorkloadError, match="no phases"):
        prepare_phases(parse_scenario({"soc": "xavier", "task": [{"model": "alexnet"}]}, "test"))
    raw = {"soc": "xavier", "task": [{"model": "alexnet"}], "phase": [{"tasks": ["alexnt"], "duration_s": 1.0}]}
    with pytest.raises(WorkloadError, match="unknown task 'alexnt'; did you mean alexnet"):
        prepare_phases(parse_scenario(raw, "test"))


def test_the_log_is_drawn(planner: Planner, tmp_path: Path) -> None:
    from weft_map.pages.picture import draw_dynamic

    log = run(planner, scenario_of((VGG, 0.3), (ALEX, 0.3)))
    figure = draw_dynamic(log, tmp_path / "log.png")
    whole, *close = figure.axes
    assert (tmp_path / "log.png").read_bytes().startswith(b"\x89PNG")
    assert [axes.get_title(loc="left") for axes in close] == ["vgg19 + resnet152", "alexnet + resnet101"]
    assert whole.get_xlim() == (0, log.phases[-1].end_s)
    columns = log_as_dict(log)["frames"]
    assert {len(column) for column in columns.values()} == {len(log.frames)}
