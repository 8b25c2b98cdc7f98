"""Clients who ask at the same time do not change each other's answers, whatever they send."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.runtime.row_graphs import quantised_model
from tests.runtime.special_models import SPECIAL, Special, graph, ints
from tests.serving import live
from tests.support.concurrency import Background, until
from tests.support.endless import endless_request, loop_model
from tests.support.inference import infer, model_state, send, state
from tests.support.references import run_session, session

CLIENTS = 8


@contextlib.contextmanager
def lane_taken(server: live.Live) -> Iterator[None]:
    """One that never ends has the only lane; a lane that is busy may also learn, while that one waits."""
    with live.same_lanes(server), endless_request(server):
        until(
            lambda: model_state(server, "turning")["queued"] == 0 < state(server)["in_flight"], "the lane has that one"
        )
        yield


def asked(path: Path, server: live.Live) -> tuple[list[int], list[int]]:
    """What clients who wait together for the quantised model get, and what each would get alone; one sends far more."""
    rng = np.random.default_rng(1)
    inputs = [{"x": rng.normal(size=(1, 32)).astype(np.float32)} for _ in range(CLIENTS)]
    inputs[3]["x"] *= 200
    with lane_taken(server):
        waiting = [Background(lambda each=each: infer(server, "quantised", each)) for each in inputs]
        until(lambda: model_state(server, "quantised")["queued"] == CLIENTS, "all of them wait")
    alone = session(path)
    return [each.result()["y"].item() for each in waiting], [run_session(alone, each)["y"].item() for each in inputs]


def executions(server: live.Live) -> int:
    (found,) = send(server, "GET", "/v2/models/quantised/stats").json()["model_stats"]
    assert found["inference_count"] == CLIENTS
    return int(found["execution_count"])


def test_one_with_large_numbers_does_not_change_the_answers_of_others(tmp_path: Path) -> None:
    loop_model(tmp_path / "turning.onnx")
    path = quantised_model(tmp_path / "quantised.onnx")
    with live.running(tmp_path, grpc_port=None) as server:
        got, wanted = asked(path, server)
        assert got == wanted
        assert executions(server) == CLIENTS
        assert "not batched: DynamicQuantizeLinear" in model_state(server, "quantised")["message"]


def test_a_file_that_says_that_rows_are_independent_is_batched(tmp_path: Path) -> None:
    loop_model(tmp_path / "turning.onnx")
    path = quantised_model(tmp_path / "quantised.onnx", says="independent")
    path.with_suffix(".toml").write_text(f"max_batch = {CLIENTS}\n")
    with live.running(tmp_path, grpc_port=None) as server:
        got, wanted = asked(path, server)
        assert executions(server) == 1
        assert got != wanted  # this is what it asked for


def test_settings_that_say_so_do_the_same(tmp_path: Path) -> None:
    loop_model(tmp_path / "turning.onnx")
    path = quantised_model(tmp_path / "quantised.onnx")
    path.with_suffix(".toml").write_text(f'max_batch = {CLIENTS}\nrows = "independent"\n')
    with live.running(tmp_path, grpc_port=None) as server:
        asked(path, server)
        assert executions(server) == 1


def asked_for(server: live.Live, name: str, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """What clients who wait together for a model get."""
    with lane_taken(server):
        waiting = [Background(lambda each=each: infer(server, name, {"x": each})) for each in inputs]
        until(lambda: model_state(server, name)["queued"] == len(inputs), "all of them wait")
    return [each.result()["y"] for each in waiting]


def test_rows_of_other_shapes_than_the_measured_ones_are_joined_only_if_no_shape_mixes_them(tmp_path: Path) -> None:
    loop_model(tmp_path / "turning.onnx")
    (wide,) = (each for each in SPECIAL if each.name == "wide-rows")
    alone = session(wide.save(tmp_path))
    folded = Special("folded", lambda: graph("(float[n,s] x) => (float[m,4] y) { y = Reshape(x, c) }", c=ints(-1, 4)))
    folded.save(tmp_path)
    (tmp_path / "wide-rows.toml").write_text("max_batch = 4\n[shapes]\nx = [1, 4]\n")
    (tmp_path / "folded.toml").write_text('max_batch = 4\nrows = "independent"\n[shapes]\nx = [1, 4]\n')
    rng = np.random.default_rng(2)
    with live.running(tmp_path, grpc_port=None) as server:
        for size in (4, 8):
            inputs = [rng.normal(size=(1, size)).astype(np.float32) for _ in range(4)]
            got = asked_for(server, "wide-rows", inputs)
            assert [each.tobytes() for each in got] == [
                run_session(alone, {"x": each})["y"].tobytes() for each in inputs
            ]
        long = [rng.normal(size=(1, 8)).astype(np.float32) for _ in range(3)]
        assert [each.shape for each in asked_for(server, "folded", long)] == [(2, 4)] * 3
