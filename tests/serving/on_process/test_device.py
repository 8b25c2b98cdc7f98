"""What a server sees of a device that is not its own process: its death, its memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.runtime.process_backend import ProcessBackend
from tests.serving import live
from tests.support.concurrency import Background, until
from tests.support.endless import ENDLESS, busy_lanes, loop_input, loop_model
from tests.support.inference import Refused, infer, send, state


def test_clients_hear_that_the_process_has_ended_and_a_load_brings_the_model_back(tmp_path: Path) -> None:
    loop_model(tmp_path / "turning.onnx")
    with live.running(tmp_path, grpc_port=None, lanes=2) as server:
        backend = server.server.backend
        assert isinstance(backend, ProcessBackend)
        waiting = [Background(lambda: infer(server, "turning", loop_input(ENDLESS))) for _ in range(2)]
        until(lambda: busy_lanes(server) == 2, "both lanes are busy")
        backend.link.process.kill()
        for each in waiting:
            with pytest.raises(Refused, match="has ended") as refused:
                each.result()
            assert refused.value.status == 500
        with pytest.raises(Refused, match="load the model again"):
            infer(server, "turning", loop_input(1))
        assert busy_lanes(server) == 0 and send(server, "GET", "/v2/health/live").status == 200
        assert send(server, "POST", "/v2/repository/models/turning/load").status == 200
        assert np.array_equal(infer(server, "turning", loop_input(3))["y"], np.arange(4))
        assert state(server)["totals"]["failures"] == {"internal": 3}


def test_nothing_is_left_in_the_process_when_all_is_answered(tmp_path: Path) -> None:
    path = live.heavy(tmp_path / "chain.onnx", layers=8, width=32, rows="n")  # type: ignore[arg-type]
    path.with_suffix(".toml").write_text("grain_ms = 0.0001\nmax_pieces = 4\nmax_batch = 4\n")
    with live.running(path, grpc_port=None, lanes=2) as server:
        clients = [Background(lambda: infer(server, "chain", {"x": np.ones((1, 32), np.float32)})) for _ in range(12)]
        assert all(each.result()["y"].shape == (1, 32) for each in clients)
        backend = server.server.backend
        assert isinstance(backend, ProcessBackend)
        assert len(server.server.service.library.find("chain").served.loaded.segments) == 4  # type: ignore[union-attr]
        until(lambda: backend.held() == (1, 0, 0), "only the model is held")
        assert send(server, "POST", "/v2/repository/models/chain/unload").status == 200
        until(lambda: backend.held() == (0, 0, 0), "nothing is held")


def test_the_memory_of_the_device_is_the_budget_where_the_user_names_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessBackend, "memory_bytes", 1000)
    live.mlp(tmp_path / "mlp.onnx")
    with live.running(tmp_path, grpc_port=None) as server:
        memory = state(server)["memory"]
        assert (memory["used_bytes"], memory["budget_bytes"]) == (0, 1000)
        with pytest.raises(Refused, match="memory budget"):
            infer(server, "mlp", {"x": np.ones((1, 64), np.float32)})
