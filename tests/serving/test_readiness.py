"""A server says that it is ready only if the models it was started for can be used, and otherwise what is missing."""

from __future__ import annotations

import http.client
import json
import logging
import os
import signal
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.serving import live
from tests.serving.live import serve_process
from tests.support.commands import run
from tests.support.inference import send
from weft.base.errors import InputError
from weft.serving import proto
from weft.serving.process import ServerProcess
from weft.serving.readiness import EMPTY, MOST_REASONS, NONE_LEFT, describe

ONE_LANE = ("--lanes=1",)
BROKEN = "broken.onnx: cannot be loaded"
ODD = "odd.toml: queue_size = 0"


def ask(server: live.Live, method: str, path: str, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(server.address, timeout=60)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
        return answer.status, json.loads(body) if body else None
    finally:
        connection.close()


def ready(server: live.Live, **headers: str) -> tuple[int, Any]:
    return ask(server, "GET", "/v2/health/ready", **headers)


def reason(server: live.Live, **headers: str) -> str:
    """Why a server says it is not ready."""
    status, body = ready(server, **headers)
    assert (status, body["ready"]) == (503, False)
    return str(body["reason"])


def repository(folder: Path, *names: str) -> Path:
    """Models by name: ``broken`` is no ONNX file, the settings of ``odd`` cannot be, and all others are sound."""
    folder.mkdir(exist_ok=True)
    for name in names:
        live.mlp(folder / f"{name}.onnx")
    if "broken" in names:
        (folder / "broken.onnx").write_bytes(b"garbage")
    if "odd" in names:
        (folder / "odd.toml").write_text("queue_size = 0\n")
    return folder


CASES = [
    (("good",), {}, ""),
    ((), {}, EMPTY),
    (("broken",), {}, f"broken: {BROKEN}"),
    (("odd",), {}, f"odd: {ODD}"),
    (("good", "broken"), {}, f"broken: {BROKEN}"),
    (("good", "odd"), {}, f"odd: {ODD}"),
    (("good", "broken", "odd"), {"ready_when": "any"}, ""),
    (("broken", "odd"), {"ready_when": "any"}, f"odd: {ODD}"),
    ((), {"ready_when": "any"}, EMPTY),
    ((), {"preload": False}, ""),
    (("broken",), {"preload": False}, ""),
]
"""Models in the repository, settings, and what the reason holds; none: it is ready."""


@pytest.mark.parametrize(("names", "settings", "said"), CASES)
def test_a_server_is_ready_if_the_models_it_was_started_for_can_be_used(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    names: tuple[str, ...],
    settings: dict[str, Any],
    said: str,
) -> None:
    folder = repository(tmp_path / "models", *names)
    logged = caplog.at_level(logging.INFO, "weft.server")
    with logged, live.running(folder, **settings) as server, grpc.insecure_channel(server.grpc_address) as channel:
        assert ask(server, "GET", "/v2/health/live") == (200, {"live": True})
        if said:
            assert said in reason(server)
        else:
            assert ready(server) == (200, {"ready": True})
        request, response, _ = proto.METHODS["ServerReady"]
        method = channel.unary_unary(
            f"/{proto.SERVICE}/ServerReady",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        assert method(request()).ready is (not said)
        state = ask(server, "GET", "/weft/state")[1]
        assert state["ready"] is (not said) and said in state["reason"]
    lines = [record.getMessage() for record in caplog.records if record.name == "weft.server"]
    assert (
        lines == ["ready"] if not said else len(lines) == 1 and lines[0].startswith("not ready: ") and said in lines[0]
    )


def test_a_single_garbage_file_is_nothing_to_be_ready_with(tmp_path: Path) -> None:
    with live.running(repository(tmp_path, "broken") / "broken.onnx", grpc_port=None) as server:
        assert BROKEN in reason(server)


def test_without_preloading_a_model_comes_with_its_first_question(tmp_path: Path) -> None:
    with live.running(repository(tmp_path, "good"), grpc_port=None, preload=False) as server:
        slot = server.server.service.library.find("good")
        assert slot.state == "unloaded"
        assert ask(server, "GET", "/v2/models/good")[0] == 200
        assert slot.state == "ready"


def test_a_mended_model_makes_the_server_ready_once_it_is_loaded_and_the_log_tells(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = repository(tmp_path, "good", "broken")
    with caplog.at_level(logging.INFO, "weft.server"), live.running(folder, grpc_port=None) as server:
        assert BROKEN in reason(server)
        live.mlp(folder / "broken.onnx")
        assert ask(server, "POST", "/v2/repository/models/broken/load")[0] == 200
        assert ready(server)[0] == 200
    lines = [record.getMessage() for record in caplog.records if record.name == "weft.server"]
    assert [line.partition(":")[0] for line in lines] == ["not ready", "ready"]


def test_a_model_that_cannot_be_loaded_again_goes_on_and_the_server_stays_ready(tmp_path: Path) -> None:
    folder = repository(tmp_path, "good")
    with live.running(folder, grpc_port=None) as server:
        (folder / "good.onnx").write_bytes(b"garbage")
        assert ask(server, "POST", "/v2/repository/models/good/load")[0] == 400
        assert ready(server)[0] == 200


def test_a_broken_model_that_comes_later_counts_as_any_other(tmp_path: Path) -> None:
    folder = repository(tmp_path, "good")
    with live.running(folder, grpc_port=None) as server:
        repository(folder, "odd")
        assert ready(server)[0] == 200  # nobody has looked
        assert ask(server, "POST", "/v2/repository/index")[0] == 200
        assert ODD in reason(server)


def test_what_was_unloaded_is_not_missed_until_nothing_is_left(tmp_path: Path) -> None:
    with live.running(repository(tmp_path, "good", "other", "broken"), grpc_port=None) as server:
        for name, left in (("broken", ""), ("other", ""), ("good", NONE_LEFT)):
            assert ask(server, "POST", f"/v2/repository/models/{name}/unload")[0] == 200
            assert (reason(server) == left) if left else (ready(server)[0] == 200)


def test_a_model_that_loads_on_demand_is_usable_and_one_that_no_budget_holds_is_not(tmp_path: Path) -> None:
    folder = repository(tmp_path, "good")
    (folder / "good.toml").write_text("preload = false\n")
    with live.running(folder, grpc_port=None) as server:
        assert ready(server)[0] == 200
    (folder / "good.toml").unlink()
    with live.running(folder, grpc_port=None, memory_budget_bytes=1000) as server:
        assert reason(server) == "good: larger than the memory budget of 0 MiB"


def test_a_repository_that_cannot_be_looked_at_for_a_moment_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    with live.running(repository(tmp_path, "good"), grpc_port=None) as server:
        monkeypatch.setattr("weft.serving.repository.os.scandir", refuse)
        assert ask(server, "POST", "/v2/repository/index")[0] == 200
        monkeypatch.undo()
        assert str(tmp_path) in server.server.service.library.repository.problems
        assert ready(server)[0] == 200


def test_what_is_wrong_with_models_is_told_to_those_with_the_key(tmp_path: Path) -> None:
    with live.running(repository(tmp_path, "broken"), grpc_port=None, api_key="s3cret") as server:
        assert BROKEN in reason(server, **{"X-API-Key": "s3cret"})
        assert reason(server) == "models are missing; see the log, or ask with the API key"
        server.server.service.draining = True
        assert reason(server) == "the server is going down"


def test_a_server_that_loads_or_goes_down_is_not_ready_and_says_so(tmp_path: Path) -> None:
    with live.running(repository(tmp_path, "good"), grpc_port=None) as server:
        service = server.server.service
        service.started = False
        assert reason(server) == "models are being loaded"
        service.started, service.draining = True, True
        assert reason(server) == "the server is going down"


def test_a_reason_stands_once_for_the_models_that_have_it_and_the_rest_is_counted() -> None:
    broken = {f"m{number}": f"torn at {number // 2}" for number in range(2 * MOST_REASONS + 3)}
    some = "; ".join(f"m{2 * at}, m{2 * at + 1}: torn at {at}" for at in range(MOST_REASONS))
    assert describe(broken) == f"{some}; and 3 more, see the repository index"


# As a command


def test_started_with_garbage_the_command_says_what_is_missing_and_goes_on(tmp_path: Path) -> None:
    server = ServerProcess(str(repository(tmp_path, "broken", "good")), *ONE_LANE)
    with pytest.raises(InputError, match=f"the server is not ready: broken: {BROKEN}"), server:
        pass
    lines = [line.strip() for line in server.output]
    assert not any(line.startswith("ready") for line in lines)
    assert any(line.startswith("good 1: 1 segment") for line in lines)
    assert "mend what is missing, then POST /v2/repository/models/NAME/load" in lines
    assert server.stop() == 0  # it had not ended by itself


NOTHING = [
    ((), "no model is in "),
    (("broken",), f"no model can be served: broken: {BROKEN}"),
    (("broken", "odd"), "no model can be served: "),
]
"""Models of which none can be served, and what the command says."""


@pytest.mark.parametrize(("names", "said"), NOTHING)
def test_started_with_nothing_that_can_be_served_the_command_ends_with_the_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, names: tuple[str, ...], said: str
) -> None:
    folder = repository(tmp_path / "models", *names)
    code, _, error = run(capsys, "serve", str(folder), "--http-port=0", "--grpc-port=-1", *ONE_LANE)
    last = error.splitlines()[-1]
    assert (code, last.startswith(f"weft: {said}")) == (2, True), last
    assert last.endswith("or start with --wait-for-models where models come later")
    assert names or str(folder) in last


def test_a_broken_file_alone_ends_the_command_with_the_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = repository(tmp_path, "broken") / "broken.onnx"
    code, _, error = run(capsys, "serve", str(file), "--http-port=0", "--grpc-port=-1", *ONE_LANE)
    assert code == 2 and f"broken: {BROKEN}" in error.splitlines()[-1]


@pytest.mark.parametrize("names", [(), ("broken",)])
def test_with_wait_for_models_it_stays_and_serves_what_comes(tmp_path: Path, names: tuple[str, ...]) -> None:
    folder = repository(tmp_path / "models", *names)
    with serve_process(folder, "--wait-for-models", *ONE_LANE) as (server, address):
        assert send(address, "GET", "/v2/health/ready").status == 503
        live.mlp(folder / "good.onnx")
        assert send(address, "POST", "/v2/repository/models/good/load").status == 200
        assert send(address, "GET", "/v2/models/good/ready").status == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(live.PATIENCE_S) == 0


def test_models_that_are_loaded_when_asked_for_are_waited_for_too(tmp_path: Path) -> None:
    with ServerProcess(str(repository(tmp_path / "models")), "--no-preload", *ONE_LANE) as server:
        assert server.stop() == 0


@pytest.mark.parametrize(("names", "settings", "said"), CASES)
def test_a_check_loads_and_ends_with_what_a_start_would_say(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, names: tuple[str, ...], settings: dict[str, Any], said: str
) -> None:
    folder = repository(tmp_path / "models", *names)
    given = ["--no-preload"] if settings.get("preload") is False else []
    given += [f"--ready-when={settings['ready_when']}"] if "ready_when" in settings else []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, shown, error = run(capsys, "serve", "--check", str(folder), "--http-port", port, *ONE_LANE, *given)
    rows = {line.split()[0]: line for line in shown.splitlines() if line.split()[:1] != ["loading"]}
    assert set(names) <= rows.keys()
    assert code == (2 if said else 0)
    assert ("ready" in rows) is (not said)
    assert said in error.splitlines()[-1] if said else error == ""
    if given != ["--no-preload"]:
        assert all(BROKEN in rows[name] for name in names if name == "broken")
        assert all(rows[name].split()[1:3] == ["1", "ready"] for name in names if name == "good")


def test_a_check_tells_of_models_on_demand_and_leaves_nothing_behind(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    code, shown, _ = run(capsys, "serve", "--check", str(repository(tmp_path / "models", "good")), "--no-preload")
    assert code == 0
    assert any(line.split() == ["good", "1", "on", "demand"] for line in shown.splitlines())
    assert os.listdir(scratch) == []


def test_a_check_reads_the_certificates_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "pem").write_text("x")
    certificates = ("--tls-cert", str(tmp_path / "pem"), "--tls-key", str(tmp_path / "pem"))
    folder = repository(tmp_path / "models", "good")
    code, _, error = run(capsys, "serve", "--check", str(folder), *certificates, *ONE_LANE)
    assert code == 2 and "cannot be used as a certificate" in error
