"""``weft plan`` from the command line to the folder, on a measured machine that is given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import helper, numpy_helper

from tests.models.onnx_graphs import node, tensor
from tests.planning.machines import brief, host
from tests.planning.plans import scaling
from tests.serving.live import save
from tests.support.commands import refused, run
from weft.base.registry import registered
from weft.devices.host import write_host
from weft.planning import folder, planning_run
from weft.planning.measured import LaneShape, LeftOutShape, MeasuredMachine
from weft.planning.plan import planned_workload, read_plan

__all__ = ["brief"]

STREAMS = ("-s", "camera.onnx:rate=50,deadline=20", "-s", "words.onnx:rate=20,deadline=100")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two models and machines that were measured with them."""
    for name, factor in (("camera", 2.0), ("words", 3.0)):
        scaling(tmp_path / f"{name}.onnx", factor)
    write_host(host(1, memory_bytes=2**27, camera=[4.0], words=[3.0, 3.0]), tmp_path / "one.json")
    write_host(host(1, 2, memory_bytes=2**27, camera=[2.5], words=[2.0, 2.0]), tmp_path / "two.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("weft.planning.plan_request.usable_cores", lambda: 2)
    return tmp_path


def test_a_plan_is_written_told_and_explained(brief, capsys, place):
    arguments = ("plan", *STREAMS, "-d", "one.json", "-d", "two.json", "--cache", "kept", "-o", "plan")
    code, shown, _ = run(capsys, *arguments, "--json", "plan-again.json")
    assert code == 0
    lines = shown.splitlines()
    assert lines[0].startswith("camera / words on ")
    assert all(word in lines[1] for word in ("option", "p50 ms", "p99 ms", "missed", "largest load", "memory MiB"))
    assert "1 lane x 2 threads" in lines[2] and lines[2].split()[-1] == "128"
    assert any(line.startswith("why") and "keeps the deadlines at the asked load" in line for line in lines)
    assert any("options" in line and "were simulated" in line for line in lines)
    assert any(line.startswith("limits") for line in lines)
    assert lines[-2] == "then      weft serve plan   and   weft bench plan"

    plan = read_plan("plan")
    assert plan.model_dump(mode="json") == json.loads(Path("plan-again.json").read_text())
    assert (plan.settings.lanes, plan.settings.threads, plan.deadlines) == (1, 2, "strict")
    assert plan.options[0].predicted == plan.predicted and plan.predicted.worst_missed <= 0.01
    assert [option.predicted is None for option in plan.options] == sorted(
        option.predicted is None for option in plan.options
    )
    assert folder.plan_settings("plan").execution.threads == 2
    assert [stream.model for stream in planned_workload("plan").stream] == ["camera", "words"]
    page = Path("plan/report.html").read_text()
    assert "/*weft" not in page and '"title":"camera + words"' in page and '"spans":[[' in page
    timed = run(capsys, "plan", "--check", "plan")[1]  # of models that take no 4 ms
    assert "camera: " in timed and "ms now, 2.5 ms when planned" in timed and "has changed" not in timed


def test_a_division_that_was_not_measured_in_full_is_among_the_options_that_were_left_out(
    brief, capsys, place, monkeypatch
):
    why = "94 requests/s where 1 lane x 2 threads has 137, and no model is faster; not measured further"
    hosts = [host(1, 2, memory_bytes=2**27, camera=[2.5], words=[2.0, 2.0])]
    left_out = (LeftOutShape(LaneShape(2, 1), "2 lanes", why),)
    monkeypatch.setattr(planning_run, "measured_hosts", lambda *_, **how: MeasuredMachine(hosts, left_out))
    code, shown, _ = run(capsys, "plan", *STREAMS, "--cache", "kept", "-o", "plan")
    option = read_plan("plan").options[-1]
    assert code == 0 and f"2 lanes was left out: {why}." in " ".join(shown.split())
    assert (option.label, option.left_out, option.settings.lanes) == ("2 lanes", why, 2)
    assert f'["2 lanes","{why}"]' in Path("plan/report.html").read_text()


def test_what_changed_since_is_told(brief, capsys, place):
    run(capsys, "plan", *STREAMS, "-d", "one.json", "--cache", "kept", "-o", "plan")
    scaling(place / "camera.onnx", 5.0)
    code, shown, _ = run(capsys, "plan", "--check", "plan")
    assert code == 1 and "camera" in shown and "has changed" in shown


def test_weights_in_common_are_told_and_without_an_output_nothing_is_written(brief, capsys, place):
    for name in ("camera", "words"):
        weights = [numpy_helper.from_array(np.full((20, 20), 3, np.float32), "w")]
        inputs, outputs = [tensor("x", "n", 20)], [tensor("y", "n", 20)]
        save(
            helper.make_graph([node("MatMul", ["x", "w"], ["y"])], name, inputs, outputs, weights),
            place / f"{name}.onnx",
        )
    before = {*place.iterdir()}
    shown = run(capsys, "plan", *STREAMS, "-d", "one.json", "--cache", "kept", "--objective", "memory")[1]
    assert "camera.onnx and words.onnx share 100% of their weights: weft stitch" in shown
    assert "-o FOLDER writes the plan" in shown and {*place.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "a workload file, or -s MODEL.onnx:rate=10,deadline=100"),
        (("-s", ":rate=10"), "names no model"),
        (("-s", "camera.onnx:deadline=9"), "rate"),
        ((*STREAMS, "-d", "tpuv3-like"), "weft sustain --device tpuv3-like"),
        ((*STREAMS, "-d", "two.json", "--cores", "1"), "--cores 1: the device was measured with 2"),
        ((*STREAMS, "--memory", "1k", "-d", "one.json"), "memory"),
        ((*STREAMS, "-o", "no/such/place"), "there is no folder"),
        ((*STREAMS, "-o", "full"), "and no plan"),
        (("--check", "plan", "-o", "other"), "--output does not apply to --check"),
        (("--check", "no-plan"), "no-plan: cannot read the file"),
        (
            ("-s", "camera.onnx:rate=50,deadline=2", "-s", "words.onnx:rate=1,deadline=9", "-d", "one.json"),
            "deadline=5",
        ),
    ],
)
def test_what_makes_no_plan_is_one_line(capsys, place, arguments, said):
    (place / "full").mkdir()
    (place / "full/letter.txt").write_text("dear")
    assert said in refused(capsys, "plan", *arguments, "--cache", "kept")


def test_a_plan_without_options_of_tools_imports_no_tool(place):
    code = f"""
import sys, pytest
from tests.planning.machines import shorten
from weft.cli.main import main

shorten(pytest.MonkeyPatch())
with pytest.raises(SystemExit, match="0"):
    main({["plan", *STREAMS, "-d", "one.json", "--cache", "kept", "-o", "plan"]!r})
assert not [name for name in sys.modules if name.startswith("weft_")]
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert read_plan("plan").models


@pytest.mark.parametrize(("option", "tool"), [(("--int8",), "tune"), (("--machines", "2"), "cluster")])
def test_an_option_whose_tool_is_not_there_is_one_line(capsys, monkeypatch, place, option, tool):
    (name,) = (name for name, entry in registered("plan_options").items() if entry.tool.name == tool)
    entry = registered("plan_options")[name]
    needy = entry._replace(tool=entry.tool._replace(needs=("absent_module",)))
    with monkeypatch.context() as lacking:
        lacking.setattr(planning_run, "registered", lambda section: {name: needy})
        said = refused(capsys, "plan", *STREAMS, *option, "-d", "one.json", "--cache", "kept")
        assert f"{tool} needs absent_module, which is not installed; pip install 'weft[{tool}]'" in said
    monkeypatch.setattr(planning_run, "registered", lambda section: {})
    said = refused(capsys, "plan", *STREAMS, *option, "-d", "one.json", "--cache", "kept")
    assert f"{name}: no tool of this installation brings this option" in said
