"""Longer segments made of measured ones: what they take, and when they win."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.planning.machines import arrangement, asked, brief, host
from tests.planning.plans import scaling
from tests.planning.questions import question_of
from tests.support.commands import run
from weft.base.errors import WorkloadError
from weft.devices import Host
from weft.devices.host import write_host
from weft.planning.bounds import least_row_s
from weft.planning.choice import choose
from weft.planning.measured import LaneShape, measurement_key
from weft.planning.plan import read_plan
from weft.planning.segment_length import longer_segments, merged_host, with_longer_segments

__all__ = ["brief"]


def machine(**more: tuple[int, ...]) -> Host:
    """A model of five segments, whose hand-overs take a millisecond each, beside one of a single segment."""
    found = host(net={1: [2.0, 3.0, 4.0, 1.0, 6.0], 2: [3.0, 5.0, 7.0, 2.0, 8.0]}, quick=[1.0], exits=more)
    model = found.models["net"].model_copy(update={"spread": ((1.0,) * 5, (2.0, 1.0, 1.0, 1.0, 1.5))})
    return found.model_copy(update={"hand_over_s": (0.001,), "models": {**found.models, "net": model}})


def test_times_of_neighbours_add_and_their_runs_stay_what_they_were():
    net = merged_host(machine(), {"net": 10.0}).models["net"]
    assert net.times_s == {1: pytest.approx((0.010, 0.006)), 2: pytest.approx((0.017, 0.008))}
    assert net.segments == ("s0 .. s3", "s4")
    assert net.spread == ((1.0, 1.0), pytest.approx((1.2, 1.5)))  # 4 + 3 + 4 + 1 ms of 10


def test_one_hand_over_less_is_lane_time_saved():
    whole = merged_host(machine(), {"net": 100.0})
    assert least_row_s(machine(), "net", 1) - least_row_s(whole, "net", 1) == pytest.approx(0.004)


def test_exits_stay_cuts():
    net = merged_host(machine(net=(2,)), {"net": 100.0}).models["net"]
    assert net.times_s[1] == pytest.approx((0.005, 0.011)) and net.exits == (1,)


def test_a_segment_longer_than_the_limit_stays_by_itself():
    net = merged_host(machine(), {"net": 3.0}).models["net"]
    assert net.times_s[1] == pytest.approx((0.002, 0.003, 0.004, 0.001, 0.006))


def test_twice_as_long_and_whole_are_ways_to_serve_with_the_setting_that_cuts_so():
    twice, whole = longer_segments(arrangement(machine()))
    assert [len(each.host.models["net"].segments) for each in (twice, whole)] == [2, 1]
    assert (twice.grain_ms, whole.grain_ms) == ({"net": 10.0, "quick": 5.0}, {"net": 32.0, "quick": 5.0})
    assert twice.label.endswith(", segments twice as long") and whole.label.endswith(", models in one piece")
    assert twice.models["net"].grain_ms == 10.0
    assert not [*longer_segments(arrangement(host(quick=[1.0])))]


def test_longer_segments_win_where_hand_overs_cost_and_nobody_is_in_a_hurry(brief):
    slow = machine().model_copy(update={"hand_over_s": (0.004,)})
    question = asked(("net", 10.0, 80.0))
    chosen = choose(question, [arrangement(slow)], lambda option: 1)
    again = with_longer_segments(question, chosen, lambda option: 1)
    assert again.best.arrangement.cut == "models in one piece" and again.best.factor > 1.2 * chosen.best.factor
    assert chosen.best.arrangement in [each.arrangement for each in again.others]


def test_segments_stay_as_they_were_cut_where_others_cannot_wait(brief):
    hasty = machine().model_copy(update={"abort_from_s": 1.0, "hand_over_s": ()})
    question = asked(("net", 20.0, 200.0), ("quick", 20.0, 8.0))
    chosen = choose(question, [arrangement(hasty)], lambda option: 1)
    again = with_longer_segments(question, chosen, lambda option: 1)
    assert again.best.arrangement.cut == "" and len(again.others) + len(again.left_out) == 2


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("net", "quick"):
        scaling(tmp_path / f"{name}.onnx", 2.0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("weft.planning.plan_request.usable_cores", lambda: 2)
    return tmp_path


def test_a_stream_may_ask_for_another_length_which_is_measured_and_served(place):
    found = question_of("net.onnx:rate=5,deadline=20,grain=2", "quick.onnx:rate=5,deadline=20")
    assert [model.config.grain_ms for model in found.models] == [2.0, 5.0]
    usual = question_of("net.onnx:rate=5,deadline=20")
    keys = {measurement_key(each.models[:1], LaneShape(1, 1), 1.5) for each in (found, usual)}
    assert len(keys) == 2
    with pytest.raises(WorkloadError, match="grain"):
        question_of("net.onnx:rate=5,deadline=20,grain=2", "net.onnx:rate=5,deadline=20")


def test_the_length_that_won_is_what_the_plan_is_served_with(brief, capsys, place):
    write_host(machine().model_copy(update={"hand_over_s": (0.004,)}), place / "one.json")
    streams = ("-s", "net.onnx:rate=10,deadline=80", "-s", "quick.onnx:rate=5,deadline=80")
    code, shown, _ = run(capsys, "plan", *streams, "-d", "one.json", "--cache", "kept", "-o", "plan")
    assert code == 0 and "models in one piece" in shown.splitlines()[2]
    assert tomllib.loads(Path("plan/models/net/weft.toml").read_text())["grain_ms"] == 32.0
    assert "grain_ms" not in tomllib.loads(Path("plan/models/quick/weft.toml").read_text())
    plan = read_plan("plan")
    assert [(model.grain_ms, model.segments) for model in plan.models] == [(32.0, 1), (5.0, 1)]


def test_a_long_segment_that_limits_the_load_brings_the_words_that_measure_shorter_ones(brief, capsys, place):
    hasty = host(net=[4.0, 12.0], quick=[1.0]).model_copy(update={"abort_from_s": 1.0})
    write_host(hasty, place / "one.json")
    streams = ("-s", "net.onnx:rate=30,deadline=200", "-s", "quick.onnx:rate=20,deadline=9")
    shown = run(capsys, "plan", *streams, "-d", "one.json", "--cache", "kept")[1]
    assert "One long operator: s1 of net" in shown
    assert "Shorter segments of net: -s net.onnx:...,grain=2 measures it cut finer" in shown
