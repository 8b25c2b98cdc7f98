"""weft on a cluster of Ray with three nodes: real servers, a workload through a gate, a node killed on the way; a gate
killed, and models that change places, under requests.

``make test-cluster`` runs it; it takes about two minutes, most of which is Ray's start.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.gates.cases import placement
from tests.serving import live
from tests.support.concurrency import until
from tests.support.ports import free_port
from weft_cluster.placing.placement import write_placement
from weft_cluster.ray.local import APPLICATION, LocalCluster
from weft_cluster.ray.settings import KEY_VARIABLE

if find_spec("ray") is None:
    pytest.skip("pip install 'weft[ray]' brings Ray", allow_module_level=True)

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
    assert found["lost"]["machine"] == "two" and found["lost"]["noticed_s"] is not None, done.stderr[-5000:]
    assert "was killed at 8.0 s" in done.stdout


class Client(threading.Thread):
    """Sends one request after another, and each again at the next gate if its connection breaks."""

    def __init__(self, ports: range, model: str) -> None:
        super().__init__(daemon=True)
        self._ports, self._path, self._ended = ports, f"/v2/models/{model}/infer", threading.Event()
        self.statuses: Counter[int] = Counter()
        self.broken = 0
        self.start()

    def run(self) -> None:
        tensor = {"name": "x", "shape": [1, 64], "datatype": "FP32", "data": [0.0] * 64}
        body = json.dumps({"inputs": [tensor], "parameters": {"timeout": 30_000_000}})
        connection, at = None, 0
        while not self._ended.wait(0.01):
            try:
                if connection is None:
                    connection = http.client.HTTPConnection("127.0.0.1", self._ports[at % len(self._ports)])
                    connection.connect()
            except OSError:
                connection, at = None, at + 1
                continue
            try:
                connection.request("POST", self._path, body)
                answer = connection.getresponse()
                answer.read()
                self.statuses[answer.status] += 1
            except (OSError, http.client.HTTPException):
                connection, at, self.broken = None, at + 1, self.broken + 1

    def end(self) -> None:
        self._ended.set()
        self.join()


def go_on(clients: list[Client]) -> None:
    """Until each has twenty more answers."""
    before = [each.statuses.total() for each in clients]
    until(lambda: all(now.statuses.total() >= was + 20 for now, was in zip(clients, before, strict=True)))


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_gate_is_killed_and_models_change_places_without_an_error(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "known-to-all")
    for name, where in {
        "before": placement(one={"camera": 1.0}, two={"sound": 1.0}),
        "after": placement(one={"sound": 1.0}, two={"camera": 1.0}),
    }.items():
        (tmp_path / name).mkdir()
        live.mlp(tmp_path / name / "camera.onnx")
        live.mlp(tmp_path / name / "sound.onnx", hidden=512)
        write_placement(where, tmp_path / name / "placement.json")
    port = free_port()
    settings = {"placement": str(tmp_path / "before"), "gates": 2, "port": port, "grpc_port": None}
    with LocalCluster(2, **settings) as cluster:
        from ray import serve  # reads the environment, which the cluster has set
        from weft_cluster.ray import app

        clients = [Client(range(port, port + 16), model) for model in ("camera", "sound") * 2]
        go_on(clients)
        first = {server["url"] for server in cluster.status()["servers"]}

        os.kill(cluster.gate_pid(), signal.SIGKILL)
        go_on(clients)
        assert sum(each.broken for each in clients) <= len(clients)

        changed = {**cluster.settings, "placement": str(tmp_path / "after")}
        serve.run(app(changed), name=APPLICATION, route_prefix=None)
        until(lambda: {server["url"] for server in cluster.status()["servers"]}.isdisjoint(first))
        go_on(clients)
        for client in clients:
            client.end()
        assert {each["machine"] for each in cluster.status()["servers"] if each["up"]} == {"one", "two"}
    assert [set(each.statuses) for each in clients] == [{200}] * 4, [each.statuses for each in clients]
    assert sum(each.broken for each in clients) <= 3 * len(clients)  # of the gate killed, and of two that were replaced
