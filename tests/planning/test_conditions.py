"""What others take while a machine is measured: read from given /proc texts, kept by plans, told with its number."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.planning.machines import brief, host
from tests.planning.plans import scaling
from tests.support.commands import run
from weft.cli.plan import _print_conditions
from weft.devices.conditions import Conditions, age_in_words, worst_of
from weft.devices.host import read_host, write_host
from weft.planning import plan_check as timed
from weft.planning.plan import parse_plan, read_plan
from weft.planning.survey.measure import Subject
from weft.planning.survey.processor_time import ConditionsWatch, ProcessorTime, clock_mhz, processor_time

__all__ = ["brief"]

WHEN = datetime(2020, 3, 1, 12, tzinfo=UTC)
STREAMS = ("-s", "camera.onnx:rate=50,deadline=20")


def conditions(**given: Any) -> Conditions:
    return Conditions(ended=WHEN, cores=2, **given)


def process(folder: Path, pid: int, parent: int, *ticks: int) -> None:
    (folder / str(pid)).mkdir()
    (folder / str(pid) / "stat").write_text(f"{pid} (a) b) S {parent} {'0 ' * 9}{' '.join(map(str, ticks))} 20 0")


def test_time_of_others_is_that_of_the_cores_less_that_of_the_own_process_tree(tmp_path):
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    # user nice system idle iowait irq softirq steal guest guest_nice
    (tmp_path / "stat").write_text(
        "cpu  999 9 9 9 9 9 9 9 0 0\ncpu0 100 20 30 800 10 5 5 30 40 0\ncpu1 1 2 3 4 5 6 7 8 0 0\nintr 1 2\n"
    )
    process(tmp_path, 10, 1, 50, 10, 5, 2)
    process(tmp_path, 11, 10, 3, 1, 0, 0)
    process(tmp_path, 12, 11, 2, 0, 0, 0)
    process(tmp_path, 13, 1, 400, 0, 0, 0)
    seen = processor_time(10, {0}, tmp_path)
    assert seen == pytest.approx((1000 * tick_s, 150 * tick_s, 30 * tick_s, 73 * tick_s))
    assert processor_time(10, {0}, tmp_path / "nowhere") is None


def test_the_clock_is_that_of_the_fastest_core(tmp_path):
    assert clock_mhz(tmp_path) is None
    for core, khz in (("cpu0", 1_400_000), ("cpu1", 2_900_000)):
        (tmp_path / core / "cpufreq").mkdir(parents=True)
        (tmp_path / core / "cpufreq/scaling_cur_freq").write_text(f"{khz}\n")
    assert clock_mhz(tmp_path) == 2900.0


def test_parts_of_a_measurement_are_added_up():
    readings = iter(
        [
            ProcessorTime(0.0, 0.0, 0.0, 0.0),
            ProcessorTime(10.0, 7.0, 0.5, 3.0),
            ProcessorTime(50.0, 20.0, 1.0, 5.0),
            ProcessorTime(60.0, 25.0, 1.0, 9.0),
        ]
    )
    watch = ConditionsWatch(lambda: next(readings), iter([2000.0, 2400.0]).__next__, cores=2)
    for _ in range(2):
        with watch.part():
            pass
    seen = watch.conditions({"camera": [0.002, 0.003], "words": [0.1]})
    assert (seen.others_cores, seen.stolen_share, seen.clock_mhz, seen.repeats_ratio) == (0.5, 0.025, 2200.0, 1.5)
    unknown = ConditionsWatch(lambda: None, lambda: None, cores=2)
    with unknown.part():
        pass
    assert unknown.conditions().others_cores is None and not unknown.conditions().disturbed


def test_a_busy_machine_is_named_with_the_number_and_a_quiet_one_is_not():
    assert conditions(others_cores=0.9, stolen_share=0.0, repeats_ratio=1.1).in_words == (
        "other processes took 0.9 of 2 cores while measuring; measured times may be up to 82 % too long"
    )
    assert "the hypervisor took 3.0% of the cores' time" in conditions(others_cores=0.0, stolen_share=0.03).in_words
    assert "up to 1.7 times as long" in conditions(repeats_ratio=1.7).in_words
    quiet = conditions(others_cores=0.09, stolen_share=0.019, repeats_ratio=1.4)
    assert not quiet.disturbed and quiet.in_words == ""


def test_several_measurements_are_as_disturbed_as_the_worst_and_as_old_as_the_first():
    later = conditions(others_cores=0.1, clock_mhz=2000.0).model_copy(update={"ended": WHEN + timedelta(hours=1)})
    joined = worst_of([later, None, conditions(others_cores=0.6, stolen_share=0.1, clock_mhz=2400.0)])
    assert joined == conditions(others_cores=0.6, stolen_share=0.1, clock_mhz=2000.0)
    assert worst_of([None]) is None


@pytest.mark.parametrize(
    ("seconds", "words"), [(5, "less than a minute"), (60, "1 minute"), (7300, "2 hours"), (3 * 86400, "3 days")]
)
def test_ages_are_told_in_their_largest_unit(seconds, words):
    assert age_in_words(WHEN, WHEN + timedelta(seconds=seconds)) == words


@pytest.fixture
def planned(brief: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """A plan on a machine that was measured beside others; what the command said."""
    scaling(tmp_path / "camera.onnx", 2.0)
    measured = host(camera=[4.0]).model_copy(update={"conditions": conditions(others_cores=0.9)})
    write_host(measured, tmp_path / "one.json")
    monkeypatch.chdir(tmp_path)
    return run(capsys, "plan", *STREAMS, "-d", "one.json", "--cache", "kept", "-o", "plan")[1]


def test_a_plan_keeps_shows_and_tells_what_disturbed_its_measurement(planned):
    words = "other processes took 0.9 of 2 cores while measuring"
    assert read_host("one.json").conditions == conditions(others_cores=0.9)
    plan = read_plan("plan")
    assert plan.measured == conditions(others_cores=0.9)
    assert words in Path("plan/report.html").read_text() and words in plan._repr_html_()
    assert any(line.startswith("measured") and words in line for line in planned.splitlines())
    assert "days ago" in planned and "--fresh" not in planned  # nothing is kept: the machine was given


def test_the_age_of_kept_measurements_is_told_and_a_measurement_of_now_is_not(capsys):
    _print_conditions(conditions(others_cores=0.0), WHEN + timedelta(days=2), ())
    assert re.fullmatch(r"measured  \d+ days ago and kept; --fresh measures again\n", capsys.readouterr().out)
    _print_conditions(conditions(others_cores=0.0), WHEN - timedelta(seconds=9), ())
    _print_conditions(None, WHEN, ())
    assert capsys.readouterr().out == ""


def test_plans_without_conditions_still_load(planned):
    raw = read_plan("plan").model_dump(mode="json")
    del raw["measured"]
    assert parse_plan(raw, "old").measured is None


def check(capsys: Any, monkeypatch: Any, now_s: float, now: Conditions) -> tuple[int, str]:
    def timing(subjects: list[Subject], **how: Any) -> tuple[dict[str, float], Conditions]:
        assert [subject.name for subject in subjects] == ["camera"] and how["threads"] == 1
        return {"camera": now_s}, now

    monkeypatch.setitem(timed.timed_now.__kwdefaults__, "timing", timing)
    code, shown, _ = run(capsys, "plan", "--check", "plan")
    return code, shown


def test_a_check_tells_what_models_take_now_and_what_others_take(planned, capsys, monkeypatch):
    code, shown = check(capsys, monkeypatch, 0.0079, conditions(others_cores=1.6))
    assert code == 1 and "camera: 7.9 ms now, 4 ms when planned (2.0 times)" in shown
    assert "other processes took 1.6 of 2 cores while measuring; when planned: other processes took 0.9" in shown
    code, shown = check(capsys, monkeypatch, 0.0044, conditions(others_cores=0.9))
    assert code == 0 and "camera: 4.4 ms now, 4 ms when planned (1.1 times)" in shown
    assert "nothing has changed" in shown
    code, shown = check(capsys, monkeypatch, 0.0079, conditions(others_cores=0.9))
    assert code == 1 and "other processes took 0.9 of 2 cores while measuring; when planned: other" in shown


def test_a_check_says_why_models_were_not_timed(planned, capsys, monkeypatch):
    Path("plan/host.json").unlink()
    code, shown = check(capsys, monkeypatch, 0.0079, conditions())
    assert code == 0 and "models are not timed: plan: the plan has no host.json" in shown


def test_fresh_is_refused_where_nothing_is_measured(planned, capsys):
    code, _, error = run(capsys, "plan", *STREAMS, "-d", "one.json", "--fresh")
    assert code == 2 and "--fresh" in error
