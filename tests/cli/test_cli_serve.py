"""``weft serve`` as a command: whose key counts, what it tells at start, and that a wrong start is one line."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.serving import live
from weft.base.errors import InputError
from weft.cli.main import main
from weft.cli.serve import _Loading, _settings
from weft.serving import proto
from weft.serving.config import ServerConfig
from weft.serving.process import ServerProcess
from weft.serving.server import Server


def started(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A start that fails, as a user sees it."""
    environment = {key: value for key, value in os.environ.items() if key != "GRPC_VERBOSITY"}
    command = [sys.executable, "-c", "from weft.cli.main import main; main()", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_a_key_of_the_command_line_goes_before_the_files_and_that_before_the_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("of-the-option\n")
    (tmp_path / "other").write_text("of-its-key-file\n")
    (tmp_path / "bare.toml").write_text("models = ['resnet50']\n")
    (tmp_path / "key.toml").write_text("models = ['resnet50']\napi_key = 'of-the-file'\n")
    (tmp_path / "file.toml").write_text("models = ['resnet50']\napi_key_file = 'other'\n")

    def key(file: str | None, option: bool = False) -> str | None:
        path = str(tmp_path / file) if file else None
        return _settings(path, {"models": ("resnet50",)}, str(tmp_path / "key") if option else None).network.api_key

    monkeypatch.setenv("WEFT_API_KEY", "of-the-environment")
    assert [key(file, True) for file in ("key.toml", "file.toml", "bare.toml", None)] == ["of-the-option"] * 4
    assert (key("key.toml"), key("file.toml")) == ("of-the-file", "of-its-key-file")
    assert key("bare.toml") == key(None) == "of-the-environment"
    monkeypatch.delenv("WEFT_API_KEY")
    assert key("bare.toml") is key(None) is None


def test_what_cannot_be_used_and_what_is_passed_over_is_told(tmp_path: Path) -> None:
    live.mlp(tmp_path / "mlp.onnx")
    (tmp_path / "lonely.toml").write_text("")
    live.mlp(tmp_path / "wrong.onnx")
    (tmp_path / "wrong.toml").write_text("queue_size = 0\n")
    (tmp_path / "junk.onnx").write_bytes(b"junk")
    with ServerProcess(str(tmp_path), "--lanes=1", "--ready-when=any") as server:
        assert server.stop() == 0
        lines = [line.strip() for line in server.output]
    assert "loading mlp" in lines
    assert any(line.startswith("mlp 1: 1 segment") and "segments" not in line for line in lines)
    assert any(line.startswith("problem: wrong: ") and "queue_size = 0" in line for line in lines)
    assert any(line.startswith("remark: lonely: lonely.toml is ignored") for line in lines)
    assert any(line.startswith("junk 1: failed") for line in lines)
    assert "policy punctual, 1 lane, stop with Ctrl-C" in lines


def test_a_server_that_may_begin_without_models_says_that_there_are_none(tmp_path: Path) -> None:
    with ServerProcess(str(tmp_path), "--no-preload") as server:
        assert server.stop() == 0
        lines = [line.strip() for line in server.output]
    assert any(line.startswith("remark: ") and "empty" in line for line in lines)


def test_off_a_terminal_a_model_that_loads_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with _Loading() as loading:
        loading.say("a[b]")
    assert capsys.readouterr().out == "loading a[b]\n"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"policy": "punctuall"}, "unknown policy 'punctuall'; did you mean punctual"),
        ({"policy": "punctual", "policy_options": {"colour": 1}}, "punctual has no option 'colour'"),
        ({"policy": "edf", "policy_options": {"colour": 1}}, "edf has no option 'colour'"),
        ({"policy": "weft"}, "weft plans for streams that never run dry"),
        ({"backend": "tpu"}, "unknown backend 'tpu'; known: onnxruntime"),
    ],
)
def test_a_policy_or_a_backend_that_cannot_serve_is_refused_before_any_model_is_looked_at(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        Server(ServerConfig(models=("/nowhere",), **settings))


def test_a_wrong_policy_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(tmp_path), "--policy", "punctuall"])
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert said.err.splitlines() == ["weft: --policy: unknown policy 'punctuall'; did you mean punctual?"]


def test_a_taken_grpc_port_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = started(str(tmp_path), "--http-port", "0", "--grpc-port", str(port))
    assert found.returncode == 2
    assert found.stderr.splitlines() == [
        f"weft: cannot listen on 127.0.0.1:{port} for gRPC; is the port taken? choose another"
    ]


def test_certificates_that_cannot_be_read_are_an_input_error_for_grpc_too(tmp_path: Path) -> None:
    from weft.serving.grpc_service import credentials

    (tmp_path / "cert.pem").write_text("x")
    with pytest.raises(InputError, match=r"key\.pem: cannot be read: No such file"):
        credentials(tmp_path / "cert.pem", tmp_path / "key.pem")


def test_grpc_calls_are_in_the_access_log_with_their_codes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    live.mlp(tmp_path / "mlp.onnx")
    logged = caplog.at_level(logging.INFO, "weft.access")
    with (
        logged,
        live.running(tmp_path, access_log=True) as server,
        grpc.insecure_channel(server.grpc_address) as channel,
    ):
        unary = _method(channel.unary_unary, "ModelMetadata")
        unary(proto.CLASSES["ModelMetadataRequest"](name="mlp"))
        with pytest.raises(grpc.RpcError):
            unary(proto.CLASSES["ModelMetadataRequest"](name="none"))
        stream = _method(channel.stream_stream, "ModelStreamInfer")
        answers = list(stream(iter([proto.CLASSES["ModelInferRequest"](model_name="none")])))
        assert "none" in answers[0].error_message
        with pytest.raises(grpc.RpcError, match="no ModelInferRequest"):
            channel.unary_unary(f"/{proto.SERVICE}/ModelInfer")(b"\xff" * 40)
        garbage = channel.stream_stream(f"/{proto.SERVICE}/ModelStreamInfer")(iter([b"\xff" * 40, b""]))
        unreadable, nameless = garbage
        assert b"cannot be parsed" in unreadable and nameless
    lines = [record.getMessage().split() for record in caplog.records if record.name == "weft.access"]
    assert sorted(
        words[1:4] for words in lines
    ) == [  # a call is noted when its answer is out, so the next may be first
        ["gRPC", "ModelInfer", "INVALID_ARGUMENT"],
        ["gRPC", "ModelMetadata", "NOT_FOUND"],
        ["gRPC", "ModelMetadata", "OK"],
        ["gRPC", "ModelStreamInfer", "INVALID_ARGUMENT"],
        ["gRPC", "ModelStreamInfer", "NOT_FOUND"],
        ["gRPC", "ModelStreamInfer", "NOT_FOUND"],
    ]
    assert all(float(words[4]) >= 0 and words[5] == "ms" for words in lines)


def test_an_idle_stream_is_ended_well_when_the_server_stops(tmp_path: Path) -> None:
    """It must not hold the server for the whole of drain_s, nor count as a loss."""
    live.mlp(tmp_path / "mlp.onnx")
    with live.running(tmp_path, stop=False, drain_s=1e6) as server:

        async def ended() -> tuple[bool, Any, grpc.StatusCode]:
            async with grpc.aio.insecure_channel(server.grpc_address) as channel:
                call = _method(channel.stream_stream, "ModelStreamInfer")()
                await call.write(proto.CLASSES["ModelInferRequest"](model_name="none"))
                assert "none" in (await call.read()).error_message
                stopping = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(server.server.stop(), server.loop))
                return await stopping, await call.read(), await call.code()

        assert asyncio.run(ended()) == (True, grpc.aio.EOF, grpc.StatusCode.OK)


def _method(kind: Any, name: str) -> Any:
    request, response, _ = proto.METHODS[name]
    path = f"/{proto.SERVICE}/{name}"
    return kind(path, request_serializer=request.SerializeToString, response_deserializer=response.FromString)
