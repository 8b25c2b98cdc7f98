"""``weft place`` and ``weft plan --machines`` from the command line to their folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.planning.machines import brief, host
from tests.planning.plans import scaling
from tests.support.commands import refused, run
from weft.devices.host import write_host
from weft.planning.plan import planned_workload, read_plan
from weft_cluster.placing.placement import read_placement

__all__ = ["brief"]

MACHINES = """
[kinds.npu]
device = "tpuv3-like"
memory_gib = 16

[[machine]]
kind = "npu"
count = 4
"""
WORKLOAD = """
[[stream]]
model = "resnet50"
rate = 2000
deadline_ms = 20

[[stream]]
model = "bert-base"
rate = 1500
deadline_ms = 50
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "cluster.toml").write_text(MACHINES)
    (tmp_path / "workload.toml").write_text(WORKLOAD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_placement_is_written_and_told(capsys, folder):
    arguments = ("place", "workload.toml", "--machines", "cluster.toml", "-o", "placement", "--json", "again.json")
    code, shown, _ = run(capsys, *arguments)
    assert code == 0
    placement = read_placement("placement")
    assert placement.model_dump(mode="json") == json.loads(Path("again.json").read_text())
    assert not placement.unserved and placement.attainment > 0.99
    lines = shown.splitlines()
    assert all(word in lines[0] for word in ("machine", "limit", "compute", "bandwidth", "busy", "memory", "on time"))
    assert lines[1].startswith("npu-1")
    assert any("of the requests are predicted to be on time" in line for line in lines)
    assert "resnet50" in Path("placement/report.html").read_text()


def test_nothing_is_simulated_where_only_loads_count(capsys, folder):
    code, shown, _ = run(capsys, "place", "workload.toml", "-m", "cluster.toml", "--fluid", "--objective", "load")
    assert code == 0
    assert "times the rates" in shown and "nothing was written" in shown
    assert "predicted" not in shown


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--objective", "fun"), "unknown objective 'fun'"),
        (("--target", "1.5"), "1.5 must lie between 0 and 1"),
        (("-o", "none/placement"), "there is no folder"),
    ],
)
def test_what_cannot_be_asked_is_one_line(capsys, folder, options, says):
    assert says in refused(capsys, "place", "workload.toml", "--machines", "cluster.toml", *options)


def test_a_deadline_no_machine_can_meet_is_one_line(capsys, folder):
    Path("workload.toml").write_text(WORKLOAD.replace("deadline_ms = 20", "deadline_ms = 0.1"))
    said = refused(capsys, "place", "workload.toml", "--machines", "cluster.toml")
    assert "resnet50 is due in 0.1 ms, and takes" in said and "times as fast" in said


def test_plans_for_several_machines_divide_the_models(brief, capsys, folder, monkeypatch):
    for name, factor in (("camera", 2.0), ("words", 3.0)):
        scaling(folder / f"{name}.onnx", factor)
    write_host(host(1, memory_bytes=2**27, camera=[4.0], words=[3.0, 3.0]), folder / "one.json")
    monkeypatch.setattr("weft.planning.plan_request.usable_cores", lambda: 2)
    streams = ("-s", "camera.onnx:rate=100,deadline=30", "-s", "words.onnx:rate=60,deadline=100")
    arguments = ("plan", *streams, "-d", "one.json", "--cache", "kept", "--machines", "2", "-o", "plans")
    code, shown, _ = run(capsys, *arguments)
    assert code == 0
    placement = read_placement("plans")
    assert [machine.name for machine in placement.machines] == ["machine-1", "machine-2"]
    rates = {"camera": 0.0, "words": 0.0}
    for name in ("machine-1", "machine-2"):
        assert read_plan(Path("plans", name)).models
        for stream in planned_workload(Path("plans", name)).stream:
            rates[stream.served_name] += stream.rate
    assert rates == pytest.approx({"camera": 100.0, "words": 60.0}, rel=1e-4)
    assert "weft serve plans/machine-2   on machine-2" in shown
    said = refused(capsys, *arguments[:-4], "--machines", "0")
    assert "0 must be from 1 to" in said
