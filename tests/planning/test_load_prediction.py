"""What a plan predicts of other loads than it was made for, and ``weft bench PLAN --load``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.planning.machines import host
from tests.planning.plans import plan_of, scaling, workload, written
from weft.base.errors import PlanError
from weft.cli.main import main
from weft.planning.folder import ModelToServe
from weft.planning.plan import ModelChoice, Plan, PlanOption, PlanSettings
from weft.planning.prediction import planned_host, predict
from weft.workloads.requests import Workload


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return plan_of({"camera": ModelToServe(scaling(tmp_path / "camera.onnx", 2.0))})


def test_more_load_means_more_misses_and_longer_waits(plan: Plan) -> None:
    machine, load = host(camera=[10.0]), workload("camera", duration_s=20.0)
    light, heavy = (predict(plan, machine, load.scaled(factor)) for factor in (1.0, 6.0))
    assert light.worst_missed < 0.05 < heavy.worst_missed
    assert light.load == pytest.approx(0.2, abs=0.06) and heavy.load > 0.8
    assert (light.streams[0].rate, heavy.streams[0].rate) == (20.0, 120.0)
    assert light.streams[0].p50_ms == pytest.approx(10.0, rel=0.1)


def test_the_same_requests_are_foreseen_alike_and_others_not(plan: Plan) -> None:
    machine, load = host(camera=[10.0]), workload("camera", duration_s=5.0).scaled(3.0)
    first, again, other = (predict(plan, machine, load.model_copy(update={"seed": seed})) for seed in (1, 1, 2))
    assert first == again != other


def test_batches_are_those_of_the_plan(plan: Plan) -> None:
    together = {"camera": ModelChoice(max_batch=4)}
    option = PlanOption(label="batches", settings=PlanSettings(lanes=1), models=together, predicted=plan.predicted)
    batched = plan.model_copy(update={"options": (option,)})
    machine, load = host(camera={1: [10.0], 4: [12.0]}), workload("camera", duration_s=10.0).scaled(8.0)
    assert predict(batched, machine, load).worst_missed < predict(plan, machine, load).worst_missed


def test_a_stream_that_was_not_planned_is_named(plan: Plan) -> None:
    with pytest.raises(PlanError, match="intent is not in the plan, which has camera"):
        predict(plan, host(camera=[10.0], intent=[1.0]), workload("intent"))


def test_a_plan_without_its_machine_says_so(tmp_path: Path) -> None:
    written(tmp_path / "plan", {"camera": 2.0})
    with pytest.raises(PlanError, match=r"has no host\.json"):
        planned_host(tmp_path / "plan")


@pytest.mark.parametrize("load", ["0", "-1", "inf", "nan"])
def test_a_load_that_is_none_is_refused(load: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "-s", "camera:rate=1", "--load", load])
    assert "must be more than 0" in capsys.readouterr().err


def test_streams_without_a_rate_have_no_load(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "-s", "camera:arrival=closed", "--load", "2"])
    assert "no stream has one" in capsys.readouterr().err


def test_bench_predicts_for_the_load_that_it_sends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.cli import bench

    class Sent(Exception):
        """What would be sent, instead of sending it."""

    def send(asked: Workload, *_: Any, **__: Any) -> None:
        raise Sent(asked)

    seen: list[Plan | None] = []
    plan = written(tmp_path / "plan", {"camera": 2.0})
    monkeypatch.setattr("weft.load.run_load", send)
    monkeypatch.setattr("weft.planning.prediction.planned_host", lambda folder: host(camera=[1.0]))
    whole = bench._predict_load
    monkeypatch.setattr(bench, "_predict_load", lambda *given: seen.append(whole(*given)) or seen[0])
    with pytest.raises(Sent) as sent:
        main(["bench", str(tmp_path / "plan"), "--load", "1.5"])
    assert sent.value.args[0].rates == (30.0,)
    assert seen[0] is not None and seen[0].predicted.streams[0].rate == 30.0 and seen[0].models == plan.models
