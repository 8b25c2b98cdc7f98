"""A server whose models run in workers: what clients and operators see when those die."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.isolated.models import HOURS, boxes, stubborn
from tests.serving import live
from tests.serving.live import serve_process, worker_group
from tests.support.concurrency import Background, until
from tests.support.endless import ENDLESS, busy_lanes, endless_request, loop_input, loop_model, other_model_answers
from tests.support.inference import Refused, infer, metric, send
from weft.runtime.isolated.group import WorkerGroup
from weft.runtime.isolated.model import IsolatedModel


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[live.Live]:
    folder = tmp_path_factory.mktemp("models")
    loop_model(folder / "turning.onnx")
    stubborn(folder / "stubborn.onnx")
    live.mlp(folder / "mlp.onnx")
    live.mlp(folder / "near.onnx")
    (folder / "mlp.toml").write_text('isolation = "group:calm"\n')
    (folder / "near.toml").write_text('isolation = "threads"\n')
    settings: dict[str, Any] = {"isolation": "process", "worker_kill_s": 0.05, "worker_deaths": 1000}
    with live.running(folder, grpc_port=None, lanes=2, drain_s=0.0, **settings) as running:
        yield running


def loaded(server: live.Live, name: str) -> Any:
    served = server.server.service.library.find(name).served
    assert served is not None
    return served.loaded


def kill_the_one_in_charge(workers: WorkerGroup, number: int = signal.SIGKILL) -> None:
    """Kill a worker that has a spare."""
    until(lambda: workers.worker and workers.spare, "there is a spare")
    assert workers.worker is not None
    os.kill(workers.worker.pid, number)


def test_models_run_where_they_are_set_to(server: live.Live) -> None:
    assert isinstance(loaded(server, "mlp"), IsolatedModel) and not isinstance(loaded(server, "near"), IsolatedModel)
    assert sorted(server.server.backend.groups()) == ["group:calm", "model:stubborn", "model:turning"]  # type: ignore[attr-defined]
    x = {"x": np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)}
    assert np.array_equal(infer(server, "mlp", x)["y"], infer(server, "near", x)["y"])
    assert infer(server, "stubborn", boxes(3))["y"].shape == (3, 3)


def test_an_operator_that_cannot_be_stopped_frees_its_lane_after_the_deadline(server: live.Live) -> None:
    before = metric(server, "weft_worker_deaths_total")
    with pytest.raises(Refused) as refused:
        infer(server, "stubborn", boxes(HOURS), timeout=300_000)
    assert refused.value.status == 504
    until(lambda: busy_lanes(server) == 0, "the lane is free")
    until(lambda: metric(server, "weft_worker_deaths_total") > before, "its worker was killed")
    assert other_model_answers(server)
    assert infer(server, "stubborn", boxes(3))["y"].shape == (3, 3)
    until(lambda: metric(server, "weft_worker_restarts_total") > 0, "another one was started")


def test_a_client_that_goes_away_costs_no_worker_where_its_request_can_be_stopped(
    server: live.Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a worker that has to wait for a core is none that does not stop
    monkeypatch.setattr(server.server.backend._kill_timer, "_kill_s", live.PATIENCE_S)  # type: ignore[attr-defined]
    deaths = metric(server, "weft_worker_deaths_total")
    with endless_request(server):
        assert other_model_answers(server)
    until(lambda: busy_lanes(server) == 0, "the lane is free")
    assert metric(server, "weft_worker_deaths_total") == deaths


def test_a_request_whose_worker_is_killed_is_tried_once_more_and_others_go_on(server: live.Live) -> None:
    workers = worker_group(server, "model:turning")
    deaths = workers.counts.deaths
    waiting = Background(lambda: infer(server, "turning", loop_input(ENDLESS)))
    until(lambda: busy_lanes(server), "it runs")
    kill_the_one_in_charge(workers)
    until(lambda: workers.counts.deaths == deaths + 1 and busy_lanes(server), "it runs again, on the spare")
    assert send(server, "GET", "/v2/health/live").status == 200
    assert other_model_answers(server)
    kill_the_one_in_charge(workers, signal.SIGSEGV)
    with pytest.raises(Refused, match=r"turning: the worker that computed it died: SIGSEGV") as refused:
        waiting.result()
    assert refused.value.status == 500
    assert busy_lanes(server) == 0
    with pytest.raises(Refused, match="the same inputs killed their worker twice") as refused:
        infer(server, "turning", loop_input(ENDLESS))
    assert refused.value.status == 503
    assert metric(server, "weft_quarantines_total") == 1
    assert np.array_equal(infer(server, "turning", loop_input(3))["y"], np.arange(4))


def test_healthy_requests_survive_the_death_of_their_worker(server: live.Live) -> None:
    workers = worker_group(server, "group:calm")
    for _ in range(2):
        kill_the_one_in_charge(workers)
        assert all(other_model_answers(server) for _ in range(5))
    assert workers.counts.deaths == 2


def test_a_model_that_was_taken_out_says_so_and_when_it_is_tried_again(server: live.Live) -> None:
    model, clock = loaded(server, "turning"), [0]
    breaker, before = model.breaker, model.breaker._now
    breaker._now = lambda: clock[0]
    try:
        for _ in range(1001):
            breaker.died()
        reply = send(server, "POST", "/v2/models/turning/infer", {"inputs": []})
        assert reply.status in (400, 503)
        with pytest.raises(Refused, match=r"died \d+ times; it is tried again in 10.0 s") as refused:
            infer(server, "turning", loop_input(1))
        assert refused.value.status == 503
        (row,) = [row for row in send(server, "POST", "/v2/repository/index").json() if row["name"] == "turning"]
        assert row["state"] == "UNAVAILABLE" and "tried again in 10.0 s" in row["reason"]
        assert send(server, "GET", "/v2/models/turning/ready").status == 503
        assert metric(server, "weft_worker_breaker") == 2
        assert other_model_answers(server)
        clock[0] += 10**10
        assert np.array_equal(infer(server, "turning", loop_input(3))["y"], np.arange(4))
        assert metric(server, "weft_worker_breaker") == 0
    finally:
        breaker._now = before


def test_an_unload_ends_the_workers_of_a_model(server: live.Live) -> None:
    workers = worker_group(server, "model:stubborn")
    spare = until(lambda: workers.worker and workers.spare, "there is a spare")
    pids = [spare.pid, workers.worker.pid if workers.worker else 0]
    assert send(server, "POST", "/v2/repository/models/stubborn/unload").status == 200
    until(lambda: "model:stubborn" not in server.server.backend.groups(), "they are gone")  # type: ignore[attr-defined]
    for pid in pids:
        until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), "it is gone")  # type: ignore[misc]


def test_sigterm_ends_the_server_with_all_its_workers(tmp_path: Path) -> None:
    loop_model(tmp_path / "turning.onnx")
    with serve_process(tmp_path, "--lanes", "1", "--drain-s", "0.1", "--isolation", "process") as (server, address):
        waiting = Background(lambda: infer(address, "turning", loop_input(ENDLESS)))
        until(lambda: any(lane["busy"] for lane in send(address, "GET", "/weft/state").json()["lanes"]), "it runs")
        pids: set[int] = set()
        for task in Path(f"/proc/{server.pid}/task").iterdir():
            with suppress(OSError):  # a thread that has ended meanwhile
                pids.update(map(int, (task / "children").read_text().split()))
        assert pids
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=120)
        with pytest.raises(Refused):
            waiting.result()
    assert "Traceback" not in errors
    until(lambda: not any(map(_lives, pids)), "they end with their server, however soon that went")


def _lives(pid: int) -> bool:
    """Whether there is such a process, and not only what is left of it until somebody looks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
