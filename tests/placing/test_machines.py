"""Machines files: what they may say, and what is told where they say something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.base.errors import PlacingError
from weft_cluster.placing.machines import ClusterMachine, parse_machines, read_machines

FILE = """
[kinds.h200]
memory_gib = 140
price = 3.5

[kinds.l4]
memory_gib = 24
busy_cap = 0.7

[[machine]]
kind = "h200"
count = 2
zone = "east"

[[machine]]
kind = "l4"
name = "edge"

[models.detector]
replicas = 2
"""


def raw(**more: Any) -> dict[str, Any]:
    return {"kinds": {"gpu": {"memory_gib": 10}}, "machine": [{"kind": "gpu", "count": 2}], **more}


def refused(given: dict[str, Any]) -> str:
    with pytest.raises(PlacingError) as caught:
        parse_machines(given, "cluster.toml")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("cluster.toml: ")
    return str(caught.value)


def test_a_file_names_every_machine(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(FILE)
    found = read_machines(tmp_path / "cluster.toml")
    assert found.all_machines == (
        ClusterMachine("h200-1", "h200", "east"),
        ClusterMachine("h200-2", "h200", "east"),
        ClusterMachine("edge", "l4", "default"),
    )
    assert found.zones == ("east", "default")
    assert found.kinds["h200"].memory_bytes == 140 * 2**30
    assert (found.kinds["h200"].busy_cap, found.kinds["l4"].busy_cap) == (0.8, 0.7)
    assert (found.rule("detector").replicas, found.rule("another").replicas) == (2, 1)


def test_groups_of_one_kind_are_numbered_on() -> None:
    found = parse_machines(raw(machine=[{"kind": "gpu", "count": 2}, {"kind": "gpu", "zone": "b"}]))
    assert [machine.name for machine in found.all_machines] == ["gpu-1", "gpu-2", "gpu-3"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (raw(machine=[{"kind": "gpv"}]), "unknown kind 'gpv'; did you mean gpu?"),
        (raw(machine=[{"kind": "gpu", "name": "a"}, {"kind": "gpu", "name": "a"}]), "two machines are called 'a'"),
        (raw(models={"m": {"machine": "gpu-9"}}), "models.m: unknown machine 'gpu-9'"),
        (raw(models={"m": {"zone": "mars"}}), "models.m: unknown zone 'mars'"),
        (raw(models={"m": {"replicas": 3}}), "models.m: replicas = 3 in 2 machines; add some"),
        (raw(models={"m": {"machine": "gpu-1", "replicas": 2}}), "leaves no place for replicas = 2"),
        (raw(models={"m": {"on": {"gpu": {}}}}), "takes no time; give compute_ms"),
        (raw(models={"m": {"on": {"cpu": {"other_ms": 1}}}}), "unknown kind 'cpu'"),
        (raw(kinds={"gpu": {"memory_gib": 10, "overlapp": 0.3}}), "did you mean 'overlap'?"),
        (raw(kinds={"gpu": {"memory_gib": 10, "peak_tflops": 1}}), "go together; give both or none"),
        (raw(kinds={"gpu": {"memory_gib": 10, "busy_cap": 1.5}}), "kinds.gpu.busy_cap = 1.5"),
        (raw(folder="x", wrong=1), "unknown key 'wrong'"),
    ],
)
def test_what_makes_no_sense_is_one_line(given: dict[str, Any], says: str) -> None:
    assert says in refused(given)


def test_a_file_that_is_none_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(PlacingError, match="cannot read the machines"):
        read_machines(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[kinds")
    with pytest.raises(PlacingError, match="not a TOML file"):
        read_machines(tmp_path / "bad.toml")
