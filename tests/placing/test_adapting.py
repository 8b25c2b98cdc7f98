"""``weft place --from``: the whole road, from files to files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import exit_code
from weft_cluster.placing.adapting import parse_change

MACHINES = """
[kinds.gpu]
memory_gib = 24
load_gb_s = 1

[[machine]]
kind = "gpu"
count = 4

[models.a.on.gpu]
compute_ms = 10
weights_mib = 1000
segment_ms = 1

[models.b.on.gpu]
memory_ms = 10
weights_mib = 2000
segment_ms = 1
"""


def workload(rate: float) -> str:
    return "".join(f'[[stream]]\nmodel = "{name}"\nrate = {rate}\ndeadline_ms = 200\n' for name in "ab")


@pytest.fixture
def placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two models on one machine."""
    monkeypatch.chdir(tmp_path)
    Path("cluster.toml").write_text(MACHINES)
    Path("calm.toml").write_text(workload(50))
    Path("busy.toml").write_text(workload(90))
    run("calm.toml", "-o", "before")
    return tmp_path


def run(*arguments: str) -> int:
    return exit_code("place", *arguments, "-m", "cluster.toml", "--fluid")


def test_a_placement_is_adapted_and_its_change_written(placed):
    assert run("busy.toml", "--from", "before", "-o", "after", "--json", "both.json") == 0
    change = parse_change(json.loads((placed / "after" / "change.json").read_text()), "change.json")
    assert change.loads and change.seconds >= 1000 * 2**20 / 1e9
    both = json.loads((placed / "both.json").read_text())
    assert both["change"] == change.model_dump(mode="json")
    assert not both["placement"]["unserved"]


def test_nothing_is_loaded_when_nothing_changed(placed, capsys):
    assert run("calm.toml", "--from", "before") == 0
    assert "nothing to load: 2 models stay where they are" in capsys.readouterr().out


def test_a_lost_machine_is_replaced(placed, capsys):
    lost = json.loads((placed / "before" / "placement.json").read_text())["machines"][0]["name"]
    assert run("calm.toml", "--from", "before", "--lost", lost) == 0
    assert "2 loads of 3.146 GB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--from", "before", "--lost", "gpu-9"], "unknown machine 'gpu-9'"),
        (["--from", "before", "--hysteresis", "1"], "hysteresis"),
        (["--from", "before", "--objective", "load"], "--objective does not apply to --from"),
        (["--lost", "gpu-1"], "--lost does not apply to a new placement: add --from FOLDER"),
        (["--from", "nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_is_one_line(placed, capsys, arguments, told):
    assert run("calm.toml", *arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and told in lines[0]
