"""A server that is told to stop ends, whatever its threads are in; told twice, at once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import live
from tests.serving.factors import multiplying_model
from tests.serving.live import serve_process
from tests.support.concurrency import Background, until
from tests.support.endless import ENDLESS, loop_input, loop_model
from tests.support.inference import Refused, infer, send
from weft.serving import process

STUCK = "import threading; stuck = lambda *_, **__: threading.Event().wait(); "
"""In a patched server: what never ends, and cannot be stopped."""


@contextlib.contextmanager
def patched(folder: Path, patch: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """``weft serve`` with something in it replaced."""
    command = f"{STUCK}{patch}; from weft.cli.main import main; main()"
    arguments = ["serve", str(folder), "--http-port", "0", "--grpc-port", "-1", "--lanes", "1", *options]
    server = subprocess.Popen(
        [sys.executable, "-c", command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield server
    finally:
        server.kill()
        server.communicate()


def address(server: subprocess.Popen[str]) -> str:
    """Where it listens, once it is ready."""
    assert server.stdout
    return next(line for line in server.stdout if "http://" in line).split("http://")[1].strip()


def stopped(server: subprocess.Popen[str]) -> str:
    """Tell it to stop and wait for that; what it wrote of errors."""
    server.send_signal(signal.SIGTERM)
    return server.communicate(timeout=live.PATIENCE_S)[1]


def test_it_ends_while_a_model_is_being_loaded_that_never_will_be(tmp_path: Path) -> None:
    multiplying_model(tmp_path / "times.onnx", 2)
    with patched(tmp_path, "from weft.serving.library import Library; Library._open = stuck") as server:
        assert server.stdout and "loading times" in server.stdout.readline()
        errors = stopped(server)
    assert server.returncode == 0, errors
    assert "Traceback" not in errors


def test_it_ends_while_a_model_is_being_learned_that_never_will_be(tmp_path: Path) -> None:
    loop_model(tmp_path / "endless.onnx")
    (tmp_path / "endless.toml").write_text(f"values = {{ turns = {float(ENDLESS)} }}\n")
    with serve_process(tmp_path, "--learn-s", "100000", "--drain-s", "600") as (server, _):
        errors = stopped(server)
    assert server.returncode == 0, errors
    assert "Traceback" not in errors


def test_told_twice_it_ends_though_a_lane_cannot_be_stopped(tmp_path: Path) -> None:
    loop_model(tmp_path / "turning.onnx")
    patch = "from weft.runtime.onnxruntime_cpu.model import CpuModel; CpuModel.compute = stuck"
    with patched(tmp_path, patch, "--drain-s", "100000") as server:
        where = address(server)
        waiting = Background(lambda: infer(where, "turning", loop_input(1)))
        until(lambda: any(lane["busy"] for lane in send(where, "GET", "/weft/state").json()["lanes"]), "it runs")
        server.send_signal(signal.SIGTERM)
        assert server.stdout and any("finishing 1 request" in line for line in server.stdout)
        errors = stopped(server)
        with pytest.raises((Refused, ConnectionError)):
            waiting.result()
    assert server.returncode == 1, errors
    assert "stopped before every request was answered in full" in errors


def test_it_ends_though_its_event_loop_is_held(tmp_path: Path) -> None:
    """The last resort: nothing of the usual end is possible any more."""
    multiplying_model(tmp_path / "times.onnx", 2)
    patch = "from weft.serving.server import Server; Server.stop = stuck"
    with patched(tmp_path, patch, "--drain-s", "0") as server:
        address(server)
        stopped(server)
    assert server.returncode == 1


@pytest.mark.parametrize(
    "patch",
    [
        "import atexit; atexit.register(stuck)",
        "import weft; weft.endless = type('Endless', (), {'__del__': lambda _, wait=stuck: wait()})()",
    ],
    ids=["a handler", "an object"],
)
def test_it_ends_though_the_interpreter_would_not(tmp_path: Path, patch: str) -> None:
    multiplying_model(tmp_path / "times.onnx", 2)
    with patched(tmp_path, patch) as server:
        address(server)
        errors = stopped(server)
    assert server.returncode == 0, errors


def test_told_twice_it_ends_though_the_disk_does_not_answer(tmp_path: Path) -> None:
    """Its event loop goes on meanwhile and hears of the second signal; no last resort is needed."""
    multiplying_model(tmp_path / "times.onnx", 2)
    patch = "import weft.serving.server as s; s.remove = lambda _: (print('removing', flush=True), stuck())"
    patch += "; s.ExitTimer.within = lambda *_: None"
    with patched(tmp_path, patch) as server:
        address(server)
        server.send_signal(signal.SIGTERM)
        assert server.stdout and any("removing" in line for line in server.stdout)
        errors = stopped(server)
    assert server.returncode == 0, errors


def test_what_cannot_be_removed_is_said_and_keeps_nobody(tmp_path: Path) -> None:
    multiplying_model(tmp_path / "times.onnx", 2)
    with patched(tmp_path, "import weft.serving.server as s; s.remove = lambda _: 1 / 0") as server:
        address(server)
        errors = stopped(server)
    assert server.returncode == 0 and "end of the scratch: division by zero" in errors


def test_a_program_that_had_a_server_goes_on_after_it(tmp_path: Path) -> None:
    """No last resort ends it later."""
    multiplying_model(tmp_path / "times.onnx", 2)
    command = [
        "import os, signal, sys, threading, time, weft.serving.server as s; from weft.cli.main import main",
        "resort = s.ExitTimer.disarm; s.ExitTimer.disarm = lambda self: (resort(self), print('disarmed'))[0]",
        "learning = lambda: any(t.name.startswith(('learner', 'loader of ')) for t in threading.enumerate())",
        # a thread that still computes would end the process with it
        "wait = lambda: next(None for _ in iter(lambda: time.sleep(0.02), 0) if not learning())",
        "stop = lambda *_: threading.Thread(target=lambda: (wait(), os.kill(os.getpid(), signal.SIGTERM))).start()",
        "import weft.cli.serve as c; c._Loading.started = stop",
        "try: main(sys.argv[1:])",
        "except SystemExit as error: print('goes on', error.code)",
    ]
    # learned before it is ready: else learning may begin just when the server is told to end
    arguments = ["serve", str(tmp_path), "--http-port", "0", "--grpc-port", "-1", "--learn-first"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(command), *arguments], capture_output=True, text=True, timeout=live.PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert "goes on 0" in done.stdout and "disarmed" in done.stdout


def test_the_last_resort_can_be_put_off_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    resort = process.ExitTimer(lambda: 7)
    resort.within(live.PATIENCE_S)
    resort.within(0.0)
    until(lambda: left, "it leaves")
    resort.within(live.PATIENCE_S)
    resort.disarm()
    assert left == [7]


def test_a_process_without_such_threads_ends_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail("it was not stuck"))
    monkeypatch.setattr(process.threading, "enumerate", list)
    process.leave_if_stuck(1, "never said")
