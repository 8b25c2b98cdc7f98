"""weft on a cluster of Ray with three nodes: real servers, a workload through a gate, a node killed on the way.

``make test-cluster`` runs it; it takes about a minute, most of which is Ray's start.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gates.cases import placement
from tests.serving import live
from weft.placing.placement import write_placement

pytest.importorskip("ray", reason="pip install 'weft[ray]' brings Ray")

RUN = "from weft.cli.main import main; main()"
WORKLOAD = """
duration_s = 20.0
warmup_s = 0.0
[[stream]]
model = "camera"
rate = 30.0
deadline_ms = 10000.0
[[stream]]
model = "sound"
rate = 20.0
deadline_ms = 10000.0
"""


def test_a_cluster_loses_a_node_and_no_request(tmp_path: Path) -> None:
    live.mlp(tmp_path / "camera.onnx")
    live.mlp(tmp_path / "sound.onnx", hidden=512)
    third = {"camera": 1 / 3, "sound": 1 / 3}
    write_placement(placement(one=third, two=third, three=third), tmp_path / "placement.json")
    (tmp_path / "workload.toml").write_text(WORKLOAD)
    asked = ["ray", "up", ".", "--port", "0", "--bench", "workload.toml", "--kill", "two", "--json", "out.json"]
    done = subprocess.run([sys.executable, "-c", RUN, *asked], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads((tmp_path / "out.json").read_text())
    for stream in found["streams"]:
        assert stream["answered"] == stream["scheduled"] > 0, stream
    told = found["cluster"]
    assert {server["machine"] for server in told["servers"] if server["up"]} >= {"one", "three"}
    assert all(server["ended"].get("ok") for server in told["servers"] if server["machine"] in ("one", "three"))
    (lost,) = [server for server in told["past"] if server["machine"] == "two"]
    assert lost["ended"]["ok"] > 0 and not told["counts"].get("lost")
    assert found["lost"]["machine"] == "two" and found["lost"]["noticed_s"] is not None
    assert "was killed at 8.0 s" in done.stdout
