"""A request that never ends: it is stopped, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.serving import live
from tests.support.concurrency import Background, until
from tests.support.endless import ENDLESS, busy_lanes, endless_request, loop_input, loop_model, other_model_answers
from tests.support.inference import Refused, infer, send


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    loop_model(tmp_path / "turning.onnx")
    live.mlp(tmp_path / "mlp.onnx")
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[live.Live]:
    with live.running(folder, grpc_port=None, lanes=2, drain_s=0.0) as running:
        yield running


def test_a_loop_of_few_turns_is_answered(server: live.Live) -> None:
    for turns in (0, 1, 3):
        assert np.array_equal(infer(server, "turning", loop_input(turns))["y"], np.arange(4))


def test_beside_it_health_and_other_models_are_answered(server: live.Live) -> None:
    assert other_model_answers(server)
    with endless_request(server):
        assert send(server, "GET", "/v2/health/live").status == 200
        assert other_model_answers(server)
        assert busy_lanes(server) == 1


def test_it_is_stopped_when_its_client_goes_away(server: live.Live) -> None:
    with endless_request(server):
        assert busy_lanes(server) == 1
    until(lambda: busy_lanes(server) == 0, "the lane is free")
    assert np.array_equal(infer(server, "turning", loop_input(3))["y"], np.arange(4))


def test_it_is_stopped_at_its_deadline(server: live.Live) -> None:
    with pytest.raises(Refused) as refused:
        infer(server, "turning", loop_input(ENDLESS), timeout=200_000)
    assert refused.value.status == 504
    until(lambda: busy_lanes(server) == 0, "the lane is free")
    assert np.array_equal(infer(server, "turning", loop_input(3))["y"], np.arange(4))


def test_the_end_of_the_server_stops_it_and_it_hears_so(folder: Path) -> None:
    with live.running(folder, grpc_port=None, lanes=1, drain_s=0.0) as server:
        waiting = Background(lambda: infer(server, "turning", loop_input(ENDLESS)))
        until(lambda: busy_lanes(server), "the lane has it")
    with pytest.raises(Refused, match="went down") as refused:
        waiting.result()
    assert refused.value.status == 503
