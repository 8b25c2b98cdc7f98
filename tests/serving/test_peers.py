"""The parts of ``benchmarks/peers.py`` that compute: figures, medians, and the requests that each server is sent."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import ROOT

sys.path.append(str(ROOT / "benchmarks"))
open_loop = pytest.importorskip("open_loop")
peers = pytest.importorskip("peers")
peer_servers = pytest.importorskip("peer_servers")

MODEL = peer_servers.Model("net", "/models/net.onnx", "x", (1, 2, 3), "y", (1, 4), 25.0)


def seen(latencies_ms: list[float], status: list[int]) -> Any:
    count = len(status)
    return open_loop.Seen(
        "m", np.arange(count, dtype=float), np.zeros(count), np.array(latencies_ms) / 1e3, np.array(status, np.int16)
    )


def test_who_was_not_answered_was_not_on_time() -> None:
    urgent, heavy = (
        seen([10.0, 20.0, 30.0, np.nan], [200, 200, 200, 0]),
        seen([100.0, 200.0, 2500.0, np.nan], [200, 200, 200, 503]),
    )
    found = peers.figures(urgent, heavy, cpu_s=0.5, seconds=4.0)
    assert found["urgent_on_time"] == 0.5 and found["urgent_p50_ms"] == 20 and found["failed"] == 2
    assert found["heavy_per_s"] == 0.5, "the third came after the end"
    assert found["cpu_ms"] == pytest.approx(500 / 6) and found["requests"] == 8
    nobody = peers.figures(seen([np.nan], [-1]), seen([], []), cpu_s=0.5, seconds=1.0)
    assert nobody["cpu_ms"] is None and nobody["urgent_p99_ms"] is None


def test_medians_are_of_each_server_and_stand_in_the_table() -> None:
    blank = dict.fromkeys(peers.FIGURES, 1.0)
    rows = [blank | {"server": "a", "urgent_p99_ms": value} for value in (5.0, 7.0, 90.0)]
    rows.append(blank | {"server": "b", "urgent_p99_ms": None})
    found = peers.medians(rows)
    assert found["a"]["urgent_p99_ms"] == 7 and found["b"]["urgent_p99_ms"] is None
    lines = peers.markdown(found, {"a": {"versions": {"a": "1.2", "onnxruntime": "9"}}}, "title").splitlines()
    assert lines[2].count("|") == lines[3].count("|") == lines[4].count("|")
    assert lines[4].startswith("| a 1.2 | 1.0 | 7.0 | 100.0% |") and lines[5].startswith("| b | 1.0 | - |")


def test_each_server_is_sent_the_same_numbers() -> None:
    raw = MODEL.tensor().tobytes()
    for peer in peer_servers.PEERS:
        head, _, body = peer.request(MODEL).partition(b"\r\n\r\n")
        assert f"Content-Length: {len(body)}".encode() in head
        if isinstance(peer, peer_servers.MlServer | peer_servers.LitServe):
            said = json.loads(body)
            text = said["data"] if "data" in said else said["inputs"][0]["data"][0]
            body = base64.b64decode(text)
        assert body.endswith(raw)


def test_answers_are_read_as_each_server_says_them() -> None:
    numbers = np.arange(4, dtype=np.float32)
    said = {
        "weft": b"{}" + numbers.tobytes(),
        "MLServer": json.dumps({"outputs": [{"data": numbers.tolist()}]}).encode(),
        "LitServe": json.dumps({"data": [numbers.tolist()]}).encode(),
        "Ray Serve": numbers.tobytes(),
        "Triton": b"{}" + numbers.tobytes(),
    }
    for peer in peer_servers.PEERS:
        if peer.name in said:
            assert peer.numbers(MODEL, said[peer.name]).ravel().tolist() == [0, 1, 2, 3]


def test_servers_are_told_of_both_models(tmp_path: Path) -> None:
    commands = {}
    for peer in peer_servers.PEERS:
        if not isinstance(peer, peer_servers.Weft | peer_servers.Triton):
            folder = tmp_path / peer.name
            folder.mkdir()
            commands[peer.name] = peer.command(Path("/env/bin/python"), folder, [MODEL], 1234)
    assert commands["MLServer"] == ["/env/bin/mlserver", "start", str(tmp_path / "MLServer")]
    settings = json.loads((tmp_path / "MLServer" / "net" / "model-settings.json").read_text())
    assert settings["parameters"]["inference_pool_gid"] == "net"
    (listed,) = json.loads((tmp_path / "LitServe" / "models.json").read_text())
    assert listed == {"name": "net", "path": "/models/net.onnx", "shape": [1, 2, 3]}
    assert 'name: "x" data_type: TYPE_FP32 dims: [1, 2, 3]' in peer_servers._pbtxt(MODEL)
