"""The check of reasons against the numbers of a plan, which a benchmark makes of many (benchmarks/plan_reasons.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.planning.machines import brief, host
from tests.planning.plans import scaling
from tests.support.commands import run
from weft.devices.host import write_host
from weft.planning.plan import Plan, read_plan
from weft.planning.prediction import planned_host

sys.path.append(str(ROOT / "benchmarks"))

from plan_reasons import ReasonsChecked, check_reasons

__all__ = ["brief"]


@pytest.fixture
def plan(brief: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    for name, factor in (("camera", 2.0), ("words", 3.0)):
        scaling(tmp_path / f"{name}.onnx", factor)
    write_host(host(1, memory_bytes=2**27, camera=[4.0], words=[3.0, 3.0]), tmp_path / "one.json")
    monkeypatch.chdir(tmp_path)
    streams = ("-s", "camera.onnx:rate=50,deadline=20", "-s", "words.onnx:rate=20,deadline=100")
    assert run(capsys, "plan", *streams, "-d", "one.json", "--cache", "kept", "-o", "plan")[0] == 0
    return read_plan("plan")


def checked(plan: Plan) -> ReasonsChecked:
    return check_reasons(plan, planned_host("plan"))


def test_the_reasons_of_a_plan_are_true_and_those_of_other_numbers_are_not(plan):
    found = checked(plan)
    assert found.true >= 3 and found.false == []
    less = plan.predicted.model_copy(update={"sustainable_factor": (plan.predicted.sustainable_factor or 1.0) / 2})
    options = (plan.options[0].model_copy(update={"predicted": less}), *plan.options[1:])
    lied = checked(plan.model_copy(update={"predicted": less, "options": options}))
    assert any("carries up to" in sentence for sentence in lied.false)
    assert any(sentence.startswith("Lane time") for sentence in lied.false)
    fewer = checked(plan.model_copy(update={"options": plan.options[:-1]}))
    assert any(sentence.startswith(("Of ", "All ")) for sentence in fewer.false)


def test_sentences_without_a_number_of_the_plan_are_not_judged(plan):
    reasons = plan.reasons.model_copy(update={"next": ("A rainy day.",)})
    assert checked(plan.model_copy(update={"reasons": reasons})).unknown[-1] == "A rainy day."
