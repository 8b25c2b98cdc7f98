"""``weft cluster simulate``: from the folder of a placement to a table of routers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import exit_code

WORKLOAD = """
[[stream]]
model = "detector"
rate = 60.0
deadline_ms = 60.0

[[stream]]
model = "ranker"
rate = 100.0
deadline_ms = 30.0
"""
MACHINES = """
[kinds.h200]
memory_gib = 141.0

[[machine]]
kind = "h200"
count = 3

[models.detector]
replicas = 2
on.h200 = {compute_ms = 9.0, memory_ms = 2.0, weights_mib = 400, segment_ms = 2.0}

[models.ranker]
replicas = 2
on.h200 = {compute_ms = 0.5, memory_ms = 4.5, weights_mib = 9000, segment_ms = 1.0}
"""


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("placed")
    (folder / "w.toml").write_text(WORKLOAD)
    (folder / "m.toml").write_text(MACHINES)
    files = [str(folder / name) for name in ("w.toml", "m.toml")]
    assert exit_code("place", files[0], "--machines", files[1], "--fluid", "-o", str(folder / "placement")) == 0
    return folder


def arguments(placed: Path, *more: str) -> list[str]:
    return [
        "cluster", "simulate", str(placed / "placement"), str(placed / "w.toml"), "--machines", str(placed / "m.toml"),
        "--seconds", "5", *more,
    ]  # fmt: skip


def test_routers_stand_beside_each_other(placed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, traffic = placed / "runs.json", placed / "traffic.toml"
    traffic.write_text("rate = 1.0\nmodels = 1\ncv = 2.0\nwave = 0.5\nday_s = 2.0\n")
    trouble = ("--slow", "0.34:0.5", "--fail", "0.34:1", "--age-ms", "100", "--gates", "2", "--traffic", str(traffic))
    assert exit_code(*arguments(placed, "--routers", "slack,random", *trouble, "--json", str(out))) == 0
    shown = capsys.readouterr().out
    assert "router" in shown and "slack" in shown and "random" in shown
    result = json.loads(out.read_text())
    assert (result["format"], result["duration_s"]) == (1, 5.0)
    for each in result["runs"]:
        assert 0.5 < each["attainment"] < 1
        missed = each["late"] + each["refused"] + each["lost"]
        assert each["attainment"] == pytest.approx(1 - missed / each["requests"])
        assert sum(model["requests"] for model in each["models"]) == each["requests"]
        assert sum(machine["requests"] for machine in each["machines"]) == each["requests"]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--routers", "slak"), "did you mean slack"),
        (("--slow", "half"), "--slow 'half' is not of the form 0.1:0.5"),
        (("--fail", "2:5"), "--fail 2:5: a share lies between 0 and 1"),
        (("--policy", "punctual"), "unknown policy for machines of a cluster 'punctual'"),
        (("--gates", "0"), "--gates 0 must be at least 1"),
        (("--rate", "0"), "--rate 0 must be above 0"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    placed: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, str], told: str
) -> None:
    capsys.readouterr()
    assert exit_code(*arguments(placed, *more)) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1
