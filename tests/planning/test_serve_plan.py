"""A server of a plan, and one that takes a newer plan while requests come and go."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.planning.plans import plan_of, predicted, scaling, scaling_together, workload, written
from tests.serving.live import PATIENCE_S, Gate, Live, running
from weft.cli.main import main
from weft.cli.serve import _settings
from weft.planning.folder import ModelToServe, plan_settings, write_plan
from weft.planning.plan import PlanSettings, Prediction
from weft.serving.config import ModelConfig, ServerConfig
from weft.serving.renewal import Renewal, change_of
from weft.serving.server import Server, serve

Answer = tuple[int, Any]


def ask(address: str, path: str, body: Any = None) -> Answer:
    connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
    try:
        connection.request("POST", path, b"" if body is None else json.dumps(body))
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text else None
    finally:
        connection.close()


def scaled(address: str, model: str, value: float = 1.0) -> Answer:
    """What a model makes of a number, with its status."""
    row = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [value, value]}
    status, answer = ask(address, f"/v2/models/{model}/infer", {"inputs": [row]})
    return status, answer["outputs"][0]["data"][0] if status == 200 else answer["error"]


def renewed(live: Live) -> Any:
    status, answer = ask(live.address, "/weft/plan/reload")
    assert status == 200, answer
    return answer


class Clients:
    """Send requests for models without a pause, and keep what came back."""

    def __init__(self, address: str, *models: str) -> None:
        self.answers: dict[str, list[Answer]] = {model: [] for model in models}
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(address, model)) for model in models]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _send(self, address: str, model: str) -> None:
        while not self._end.is_set():
            self.answers[model].append(scaled(address, model))

    def wait_for_more(self) -> None:
        """Return when every model has answered somebody who asked after this."""
        counts = {model: len(each) for model, each in self.answers.items()}
        while any(len(self.answers[model]) < count + 2 for model, count in counts.items()):
            time.sleep(0.001)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    written(tmp_path / "plan", {"camera": 2.0, "intent": 3.0}, settings=PlanSettings(lanes=1, policy="fifo"))
    return tmp_path / "plan"


@pytest.fixture
def live(folder: Path) -> Iterator[Live]:
    settings = plan_settings(folder)
    with running(*settings.loading.models, policy=settings.scheduling.policy, grpc_port=None) as live:
        before = live.server.config

        def again() -> ServerConfig:
            found = plan_settings(folder)
            keys = ("policy", "policy_options", "late", "lanes", "threads")
            return replace(before, **{key: found.value_of(key) for key in keys})

        live.server.service.reread_settings = again
        yield live


def test_a_newer_plan_is_taken_over_and_every_request_is_answered(live: Live, folder: Path) -> None:
    library = live.server.service.library
    kept = library.find("intent").served
    newer = PlanSettings(lanes=2, policy="edf", late="demote")
    with Clients(live.address, "camera", "intent") as clients, Gate(live, "camera", 3) as gate:
        held: list[Answer] = []
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [3, 2], "data": [1.0] * 6}]}
        path = "/v2/models/camera/infer"
        asking = threading.Thread(target=lambda: held.append(ask(live.address, path, body)))
        clients.wait_for_more()
        written(folder, {"camera": 5.0, "intent": 3.0, "depth": 7.0}, settings=newer)
        asking.start()
        gate.wait()
        assert renewed(live) == {
            "loaded": ["camera", "depth"],
            "left": [],
            "failed": {},
            "settings": ["lanes 1 -> 2", "policy fifo -> edf", "late weave -> demote"],
            "restart": [],
        }  # what the old model computes on the old lane does not hold up the new one
        clients.wait_for_more()
        gate.open()
        asking.join(PATIENCE_S)
        clients.wait_for_more()
    assert held[0][0] == 200 and held[0][1]["outputs"][0]["data"] == [2.0] * 6
    assert {status for answers in clients.answers.values() for status, _ in answers} == {200}
    made = [value for _, value in clients.answers["camera"]]
    assert made == sorted(made) and set(made) == {2.0, 5.0}
    assert {value for _, value in clients.answers["intent"]} == {3.0}
    assert scaled(live.address, "depth") == (200, 7.0)
    assert library.find("intent").served is kept  # it is the same file
    assert live.server.service.config.scheduling.policy == "edf"
    assert renewed(live) == {
        "loaded": [], "left": [], "failed": {}, "settings": [], "restart": []
    }  # fmt: skip


def test_models_that_left_answer_who_asked_before(live: Live, folder: Path) -> None:
    with Gate(live, "intent", 1) as gate:
        held: list[Answer] = []
        asking = threading.Thread(target=lambda: held.append(scaled(live.address, "intent")))
        asking.start()
        gate.wait()
        written(folder, {"camera": 2.0}, settings=PlanSettings(lanes=1, policy="fifo"))
        assert renewed(live)["left"] == ["intent"]
        assert scaled(live.address, "intent")[0] == 404
        gate.open()
        asking.join(PATIENCE_S)
    assert held == [(200, 3.0)]


def test_a_plan_that_cannot_be_taken_changes_nothing(live: Live, folder: Path) -> None:
    def refused() -> str:
        status, answer = ask(live.address, "/weft/plan/reload")
        assert (status, scaled(live.address, "camera")) == (400, (200, 2.0))
        return str(answer["error"])

    scaling(folder / "models/camera/1/model.onnx", 9.0)
    assert "models/camera/1/model.onnx has changed since the plan was written" in refused()
    (folder / "plan.json").write_text("{}")
    assert "not a plan of format 1" in refused()
    (folder / "plan.json").unlink()
    written_elsewhere = folder.parent / "other"
    written(written_elsewhere, {"camera": 2.0}, settings=PlanSettings(lanes=1, policy="nonesuch"))
    live.server.service.reread_settings = lambda: replace(live.server.config, policy="nonesuch")
    assert "unknown policy 'nonesuch'" in refused()
    assert live.server.service.config.scheduling.policy == "fifo"


def test_settings_of_models_change_with_and_without_loading_them(live: Live, folder: Path) -> None:
    service = live.server.service
    served = service.library.find("camera").served
    settings = PlanSettings(lanes=1, policy="fifo")
    written(folder, {"camera": 2.0, "intent": 3.0}, ModelConfig(slo_ms=20.0), settings=settings)
    assert renewed(live)["loaded"] == []
    slot = service.library.find("camera")
    assert slot.served is served and slot.config.slo_ms == 20.0
    written(folder, {"camera": 2.0, "intent": 3.0}, ModelConfig(max_batch=2), settings=settings)
    assert renewed(live)["loaded"] == ["camera", "intent"]
    assert slot.served is not served and slot.config.max_batch == 2
    written(folder, {"camera": 2.0, "intent": 3.0}, ModelConfig(max_batch=2), settings=PlanSettings(lanes=1, threads=2))
    assert renewed(live)["settings"] == ["threads 1 -> 2", "policy fifo -> punctual"]
    assert slot.served is not None and scaled(live.address, "camera") == (200, 2.0)


def test_models_that_were_apart_come_together_in_one_file_and_part_again(live: Live, folder: Path) -> None:
    library, settings = live.server.service.library, PlanSettings(lanes=1, policy="fifo")
    models = {"both": ModelToServe(scaling_together(folder.parent / "both.onnx", {"camera": 5.0, "intent": 7.0}))}
    streams = (predicted("camera"), predicted("intent"))
    plan = plan_of(models, settings=settings, predicted=Prediction(streams=streams, load=0.5))
    with Clients(live.address, "camera", "intent") as clients:
        clients.wait_for_more()
        write_plan(plan, folder, models=models, workload=workload("camera", "intent"))
        assert (renewed(live)["loaded"], renewed(live)["loaded"]) == (["camera", "intent"], [])
        bodies = {library.find(name).served.body for name in clients.answers}  # type: ignore[union-attr]
        assert [body.name for body in bodies] == ["both"]
        clients.wait_for_more()
        written(folder, {"camera": 8.0, "intent": 9.0}, settings=settings)
        assert renewed(live)["loaded"] == ["camera", "intent"]
        clients.wait_for_more()
    assert {status for answers in clients.answers.values() for status, _ in answers} == {200}
    assert {value for _, value in clients.answers["camera"]} == {2.0, 5.0, 8.0}
    assert {value for _, value in clients.answers["intent"]} == {3.0, 7.0, 9.0}


def test_who_may_not_load_models_may_not_reload_the_plan(live: Live) -> None:
    service = live.server.service
    service.config = replace(service.config, repository="read-only")
    assert ask(live.address, "/weft/plan/reload")[0] == 403
    before = len(service.library.repository.names())
    assert live.call(service.renew()) == Renewal(restart=("repository read-only -> open needs a restart",))
    assert len(service.library.repository.names()) == before


def test_settings_are_taken_over_or_wait_for_a_restart() -> None:
    old = ServerConfig(models=("a",), lanes=1, policy_options={"margin": 20}, api_key="old", drain_s=1.0)
    new = ServerConfig(models=("a",), lanes=3, default_slo_ms=5.0, api_key="new", drain_s=1.0, total_queue=9)
    change = change_of(old, new)
    assert change.settings == ("lanes 1 -> 3", "policy_options margin=20 -> none", "default_slo_ms 1000.0 -> 5.0")
    assert change.restart == ("total_queue 4096 -> 9 needs a restart", "api_key needs a restart")
    assert change.config == replace(new, total_queue=4096, api_key="old")
    assert str(Renewal()) == "nothing has changed"
    told = Renewal(("a", "b"), ("c",), {"d": "it is broken"}, ("late weave -> keep",), change.restart)
    assert str(told) == (
        "loaded a, b; left c; d stays as it was: it is broken; late weave -> keep; "
        "total_queue 4096 -> 9 needs a restart; api_key needs a restart"
    )


# As a command


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="the system has no SIGHUP")
def test_a_plan_is_served_as_it_says_and_read_again_on_a_signal(folder: Path) -> None:
    typed = {"http_port": 0, "grpc_port": None, "learn_s": 0.0, "learn_first": False, "late": "keep"}
    read = partial(_settings, None, typed, None, str(folder))
    seen: list[Any] = []

    def drive(server: Server) -> None:
        address = f"127.0.0.1:{server.http_port}"
        try:
            seen.append((server.config.scheduling.policy, server.config.scheduling.late, scaled(address, "camera")))
            written(folder, {"camera": 4.0, "intent": 3.0}, settings=PlanSettings(lanes=1, policy="edf"))
            os.kill(os.getpid(), signal.SIGHUP)
            while (answer := scaled(address, "camera")) == (200, 2.0):
                pass
            seen.append((server.service.config.scheduling.policy, server.service.config.scheduling.late, answer))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def started(server: Server) -> None:
        threading.Thread(target=drive, args=(server,)).start()

    assert asyncio.run(serve(read(), None, started, read_settings=read))
    assert seen == [("fifo", "keep", (200, 2.0)), ("edf", "keep", (200, 4.0))]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("PLAN",), "models/camera/1/model.onnx has changed since the plan was written; plan again, or serve it as it "
         "is with --unchecked"),
        (("PLAN", "resnet50"), "is a plan, with models and settings of its own; leave out resnet50"),
        (("PLAN", "--config", "x.toml"), "is a plan, with models and settings of its own; leave out x.toml"),
        (("resnet50", "--unchecked"), "--unchecked does not apply to models without a plan: name a plan"),
    ],
)  # fmt: skip
def test_a_wrong_start_is_one_line(
    folder: Path, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scaling(folder / "models/camera/1/model.onnx", 9.0)
    with pytest.raises(SystemExit) as ended:
        main(["serve", *(str(folder) if each == "PLAN" else each for each in arguments)])
    told = capsys.readouterr().err
    assert ended.value.code == 2 and said in told and len(told.splitlines()) == 1
