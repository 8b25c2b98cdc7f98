"""Models with exits: who leaves is asked for, counted in bounds and runs, told, and served."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.planning.machines import arrangement, asked, brief, host
from tests.planning.plans import plan_of, predicted, scaling, workload
from tests.planning.questions import question_of, run_of
from tests.runtime.exit_nets import conv_net
from tests.support.commands import run
from weft.base.errors import DeviceError, InputError, WorkloadError
from weft.cli.common import parse_stream
from weft.devices import Host
from weft.devices.host import parse_host, write_host
from weft.load.payload import sent_threshold
from weft.planning.bounds import blocking, bound_of, fastest_s, late_alone, least_row_s
from weft.planning.candidates import arrangements, request_policies
from weft.planning.early_exits import reaching
from weft.planning.folder import ModelToServe
from weft.planning.measured import LaneShape, measurement_key
from weft.planning.plan import Prediction, planned_workload, read_plan
from weft.planning.plan_request import PlanRequest
from weft.planning.planning_run import check_deadlines, check_exits
from weft.planning.prediction import compare
from weft.planning.standalone_times import times_alone
from weft.planning.survey.measure import _Survey
from weft.serving.repository import Repository
from weft.simulation.requests import prepare, simulate_requests
from weft.workloads.requests import parse_workload

__all__ = ["brief"]

RATES = (0.5, 0.3, 0.2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where net.onnx names its exits, quiet.onnx has some without naming them, and camera.onnx has none."""
    conv_net(tmp_path / "net.onnx", marked=True)
    conv_net(tmp_path / "quiet.onnx")
    scaling(tmp_path / "camera.onnx", 2.0)
    sure = np.array([[0.9, 0.95, 1.0], [0.6, 0.9, 1.0], [0.2, 0.3, 0.9], [0.2, 0.7, 0.9]])
    np.savez(tmp_path / "record.npz", confidence=sure, correct=np.ones((4, 3), bool))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def leaving(question: PlanRequest, *rates: tuple[float, ...]) -> PlanRequest:
    """What is asked, with shares of the requests that leave early."""
    streams = [
        stream.model_copy(update={"exit_rates": shares})
        for stream, shares in zip(question.workload.stream, rates, strict=True)
    ]
    return replace(question, workload=question.workload.model_copy(update={"stream": tuple(streams)}), soonest=rates)


def test_a_stream_says_on_the_command_line_who_leaves_and_by_which_outputs():
    assert parse_stream("net.onnx:rate=1,exits=early+end,exit_rates=0.5+0.5") == {
        "model": "net.onnx",
        "rate": 1,
        "exits": ["early", "end"],
        "exit_rates": [0.5, 0.5],
    }


def test_what_a_stream_says_of_exits_is_set_for_its_model(folder):
    found = question_of(
        "net.onnx:rate=5,deadline=20,exit_record=record.npz,exit_threshold=0.85",
        "quiet.onnx:rate=1,deadline=50,exits=exit1+exit2+logits,exit_rates=0.5+0.3+0.2",
    )
    assert [sent.exit_shares for sent in found.sent_streams] == [(0.25, 0.25, 0.5), RATES]
    assert found.models[0].config.model_fields_set == {"exit_threshold"}
    assert found.models[0].config.exit_threshold == 0.85
    assert found.models[1].config.exits == ["exit1", "exit2", "logits"]


def test_a_threshold_that_may_sink_leaves_as_soon_as_its_floor_allows_and_is_the_servers_affair(folder):
    found = question_of("net.onnx:rate=5,deadline=20,exit_record=record.npz,exit_threshold=0.85,exit_floor=0.5")
    assert found.sent_streams[0].exit_shares == (0.5, 0.25, 0.25)
    assert found.workload.exit_rates(0) == (0.25, 0.25, 0.5)
    assert found.models[0].config.exit_floor == 0.5
    assert sent_threshold(found.workload.stream[0]) is None
    stated = question_of("net.onnx:rate=5,deadline=20,exit_threshold=0.9").workload.stream[0]
    assert sent_threshold(stated) == 0.9


def test_a_model_whose_settings_name_a_record_is_planned_with_it(folder):
    Path("net.toml").write_text('exit_record = "record.npz"\nexit_threshold = 0.85\n')
    found = question_of("net.onnx:rate=5,deadline=20")
    assert found.sent_streams[0].exit_shares == (0.25, 0.25, 0.5)
    assert found.workload.stream[0].exit_threshold == 0.85


def test_where_nothing_is_said_all_go_to_the_end(folder):
    assert [sent.exit_shares for sent in question_of("net.onnx:rate=5,deadline=20").sent_streams] == [()]


@pytest.mark.parametrize(
    ("streams", "said"),
    [
        (["camera.onnx:rate=1,deadline=9,exit_rates=0.5+0.5"], "the model names no exits"),
        (["camera.onnx:rate=1,deadline=9,exit_threshold=0.5"], "exit_threshold is given"),
        (["quiet.onnx:rate=1,deadline=9,exits=exit1+end,exit_rates=0.5+0.5"], "unknown output 'end'"),
        (["net.onnx:rate=1,deadline=9,exit_rates=0.5+0.5"], "exit_rates is for 2 exits, must be for 3"),
        (["net.onnx:rate=1,deadline=9,exits=2,exit_rates=0.5+0.3+0.2"], "exits=early+end"),
        (["net.onnx:rate=1,deadline=9,exit_record=record.npz,exit_threshold=0"], "must be above 0"),
        (["net.onnx:rate=1,deadline=9,exit_record=none.npz"], "none.npz"),
        (
            ["net.onnx:rate=1,deadline=9,exit_threshold=0.5", "net.onnx:rate=1,deadline=9,exit_threshold=0.6"],
            "different exits, thresholds or grain",
        ),
    ],
)
def test_exits_that_cannot_be_planned_are_one_line_with_the_way_out(folder, streams, said):
    with pytest.raises(InputError) as error:
        question_of(*streams)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_who_leaves_changes_nothing_in_the_measurement(folder):
    keys = {
        measurement_key(question_of(f"net.onnx:rate=1,deadline=9{more}").models, LaneShape(1, 1), 1.5)
        for more in ("", ",exit_threshold=0.5", ",exit_record=record.npz")
    }
    assert len(keys) == 1
    named = question_of("quiet.onnx:rate=1,deadline=9,exits=exit1+exit2+logits,exit_rates=0.5+0.3+0.2").models
    assert measurement_key(named, LaneShape(1, 1), 1.5) not in keys


def test_nobody_leaves_while_segments_are_measured():
    load = parse_workload({"stream": [{"model": name, "rate": 1.0} for name in ("net", "plain")]}, "test")
    seen = _Survey((), (1,), 1, 1.0, Path(), None, None, served={"net": {"exits": [1]}, "plain": {"exits": []}})
    assert [sent_threshold(each) for each in seen._without_exits(load).stream] == [2.0, None]


def test_exits_of_a_measured_model_lie_in_order_within_it():
    raw = host(net=[1.0, 1.0]).model_dump(mode="json")
    raw["models"]["net"]["exits"] = [1]
    assert parse_host(raw, "test").models["net"].exits == (1,)
    raw["models"]["net"]["exits"] = [2]
    with pytest.raises(DeviceError, match=r"exits = \[2\] do not lie in order within 2 segments"):
        parse_host(raw, "test")


# Bounds


@pytest.fixture
def machine() -> Host:
    return host(net={1: [2.0, 4.0, 10.0], 2: [3.0, 6.0, 12.0]}, quick=[1.0], exits={"net": (1, 2)})


def test_those_who_left_compute_nothing_more():
    assert reaching(RATES, (1, 2), 3) == pytest.approx([1.0, 0.5, 0.2])
    assert reaching((), (1, 2), 3) == [1.0] * 3


def test_a_row_takes_as_long_as_it_stays_and_each_segment_its_best_batch(machine):
    assert least_row_s(machine, "net", 1, RATES) == pytest.approx(0.002 + 0.5 * 0.004 + 0.2 * 0.010)
    assert least_row_s(machine, "net", 2, RATES) == pytest.approx(0.0015 + 0.5 * 0.003 + 0.2 * 0.006)


def test_requests_alone_take_what_their_exit_takes(machine):
    found = times_alone(machine, "net", RATES)
    assert found.least_s == fastest_s(machine, "net", RATES) == pytest.approx(0.002)
    assert [found.quantile_s(share) for share in (0.5, 0.8, 0.99)] == pytest.approx([0.002, 0.006, 0.016])
    stream = asked(("net", 1.0, 5.0)).workload.stream[0]
    assert late_alone(machine, stream, RATES) == pytest.approx(0.5)
    assert late_alone(machine, stream) == 1.0


def test_segments_that_few_reach_block_as_few_times():
    machine = host(net=[1.0, 30.0], quick=[1.0], exits={"net": (1,)}).model_copy(update={"abort_from_s": 1.0})
    question = asked(("net", 10.0, 200.0), ("quick", 10.0, 11.0))
    found = blocking(leaving(question, (0.75, 0.25), ()), arrangement(machine))
    assert found is not None and found.share == pytest.approx(0.25 * 10 * (0.030 - 0.010))


def test_early_exits_let_lanes_carry_more_and_the_simulated_load_stays_below(machine):
    question = leaving(asked(("net", 20.0, 100.0)), (1.0, 0.0, 0.0))
    assert bound_of(question, arrangement(machine)).factor == pytest.approx(1 / (20 * 0.002 * 0.99))
    assert bound_of(asked(("net", 20.0, 100.0)), arrangement(machine)).factor < 10


def test_shares_of_other_exits_than_were_measured_are_refused():
    question = leaving(asked(("net", 1.0, 50.0)), (0.5, 0.5))
    check_exits(question, [host(net=[1.0, 1.0], exits={"net": (1,)})])
    with pytest.raises(WorkloadError, match="1 early exits are stated, and it was measured with 0"):
        check_exits(question, [host(net=[1.0, 1.0])])


def test_a_strict_deadline_is_judged_by_the_way_to_the_end(machine):
    question = leaving(asked(("net", 1.0, 10.0)), RATES)
    with pytest.raises(WorkloadError, match="fastest possible, 16 ms"):
        check_deadlines(question, [machine])
    check_deadlines(replace(question, deadlines="soft"), [machine])


# Runs


def test_a_simulated_request_leaves_a_measured_model_at_its_exit(machine):
    stream = {"model": "net", "rate": 1.0, "deadline_ms": 100.0, "arrival": "uniform"}
    for shares, ends_s in (((1, 0, 0), 0.002), ((0, 1, 0), 0.006), ((0, 0, 1), 0.016)):
        load = parse_workload({"stream": [stream | {"exit_rates": shares}], "duration_s": 5.0}, "test")
        report = simulate_requests(prepare(load, machine), "edf").report
        assert report.streams[0].p50_s == pytest.approx(ends_s, rel=0.01)
    silent = parse_workload({"stream": [stream], "duration_s": 5.0}, "test")
    assert simulate_requests(prepare(silent, machine), "edf").report.streams[0].p50_s == pytest.approx(0.016, rel=0.01)


def test_policies_that_fill_batches_up_are_tried_where_requests_leave(machine):
    question = asked(("net", 20.0, 100.0))
    left = leaving(question, RATES)
    fills = {"top-up", "fluid", "lazy-batching"}
    assert not fills & {*request_policies(question.workload)} and fills <= {*request_policies(left.workload)}
    tried = [each for each in arrangements(left, [machine]) if each.settings.policy in fills]
    assert tried and all(each.batches["net"] > 1 for each in tried)


# From the command line to the folder


@pytest.fixture
def measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_host(host(net={1: [2.0, 3.0, 5.0], 2: [3.0, 4.0, 7.0]}, exits={"net": (1, 2)}), folder / "one.json")
    monkeypatch.setattr("weft.planning.plan_request.usable_cores", lambda: 2)
    return folder


def test_a_plan_counts_who_leaves_and_its_server_lets_them(brief, capsys, measured):
    stream = "net.onnx:rate=30,deadline=60,exit_record=record.npz,exit_threshold=0.85"
    code, shown, _ = run(capsys, "plan", "-s", stream, "-d", "one.json", "--cache", "kept", "-o", "plan")
    assert code == 0
    assert "Of net's requests 25% / 25% / 50% are taken to leave by its exits, the end last." in shown
    assert "Early exits:" not in shown
    plan = read_plan("plan")
    assert plan.predicted.streams[0].exit_rates == (0.25, 0.25, 0.5)
    assert tomllib.loads(Path("plan/models/net/weft.toml").read_text())["exit_threshold"] == 0.85
    assert Repository(["plan/models"], Path("scratch")).entry("net").config.exit_threshold == 0.85
    sent = planned_workload("plan")
    assert sent.exit_rates(0, 2) == (0.25, 0.25, 0.5) and sent_threshold(sent.stream[0]) == 0.85


def test_exits_that_nothing_is_said_of_are_told_with_the_words_to_add(brief, capsys, measured):
    shown = run(capsys, "plan", "-s", "net.onnx:rate=30,deadline=60", "-d", "one.json", "--cache", "kept")[1]
    assert "Early exits: net has 2" in shown
    assert "-s net.onnx:...,exit_rates=0.2+0.2+0.6, or give exit_record=FILE.npz" in shown


def test_requests_that_left_elsewhere_than_predicted_are_told(measured):
    models = {"net": ModelToServe(Path("net.onnx"))}
    plan = plan_of(models, predicted=Prediction(streams=(predicted("net", exit_rates=RATES),), load=0.5))

    def remarks(*shares: float, **stream: Any) -> tuple[str, ...]:
        load = workload("net")
        result = run_of(load, [3.0])
        (seen,) = result.streams
        figures = replace(seen.figures, exit_shares=shares)
        sent = seen.stream.model_copy(update=stream)
        return compare(plan, replace(result, streams=(replace(seen, figures=figures, stream=sent),))).remarks

    assert remarks(0.45, 0.35, 0.2) == ()
    (said,) = remarks(0.1, 0.1, 0.8)
    assert said.startswith("10% / 10% / 80% of net left by its exits, the prediction assumed 50% / 30% / 20%")
    assert remarks(0.1, 0.1, 0.8, exit_floor=0.5) == ()  # the threshold follows the load
