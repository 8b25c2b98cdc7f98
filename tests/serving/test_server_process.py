"""A server in a process of its own: what it prints is read, and at its end slow readers get all of their answers."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.serving import live
from tests.support.concurrency import until
from weft.base.errors import InputError
from weft.serving import process
from weft.serving.process import LINES_KEPT, ServerProcess

ROWS = 8 << 20
"""Floats in the large answer: more than any socket buffer takes."""


def tile(path: Path) -> Path:
    """One number in, many out."""
    graph = helper.make_graph(
        [helper.make_node("Tile", ["x", "times"], ["y"])],
        "tile",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [ROWS])],
        [numpy_helper.from_array(np.array([ROWS], np.int64), "times")],
    )
    return live.save(graph, path)


class SlowReader:
    """A client that has asked for the large answer and read no more than its first bytes."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        self._socket.connect((host, int(port)))
        tensor = {"name": "x", "shape": [1], "datatype": "FP32", "data": [2.5]}
        body = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        head = f"POST /v2/models/tile/infer HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        self._socket.sendall(head.encode() + body)
        self._read = self._socket.recv(1024)

    def rest(self) -> bytes:
        """Read to the end, in small steps; the whole body."""
        pieces = [self._read]
        while piece := self._socket.recv(8192):
            pieces.append(piece)
        return b"".join(pieces).partition(b"\r\n\r\n")[2]

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tile(tmp_path_factory.mktemp("models") / "tile.onnx").parent


@pytest.fixture
def serving(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    monkeypatch.setattr(process, "STOP_S", live.PATIENCE_S)
    with ServerProcess(str(folder), "--drain-s=600", "--access-log", "--learn-s=0") as server:
        yield server


def test_output_is_read_for_the_whole_life_and_the_end_of_it_kept(serving: ServerProcess) -> None:
    connection = http.client.HTTPConnection(serving.url.removeprefix("http://"))
    for number in range(LINES_KEPT + 60):  # more than a pipe holds
        connection.request("GET", f"/{'a' * 200}/{number}")
        assert connection.getresponse().read()
    connection.close()
    assert serving.stop() == 0
    assert len(serving.output) == LINES_KEPT
    last = [line for line in serving.output if "weft.access" in line][-1]
    words = last.split()
    assert words[-7] == "GET" and words[-6].endswith(f"/{LINES_KEPT + 59}") and words[-5] == "404"
    assert int(words[-4]) > 0 and words[-3] == "bytes" and float(words[-2]) > 0 and words[-1] == "ms"


def test_a_slow_reader_gets_every_byte_of_its_answer_after_the_end_was_asked_for(serving: ServerProcess) -> None:
    reader = SlowReader(serving.url)
    codes: list[int] = []
    stopping = threading.Thread(target=lambda: codes.append(serving.stop()))
    stopping.start()
    until(lambda: any("finishing 1 request;" in line for line in serving.output), "it tells what is left")
    body = reader.rest()
    stopping.join()
    reader.close()
    assert np.array_equal(np.frombuffer(body[-4 * ROWS :], np.float32), np.full(ROWS, 2.5, np.float32))
    assert codes == [0]


def test_told_twice_it_stops_at_once_and_says_that_something_was_lost(serving: ServerProcess) -> None:
    reader = SlowReader(serving.url)
    os.kill(serving.pid, signal.SIGINT)
    until(lambda: any("Ctrl-C again to stop now" in line for line in serving.output), "it tells what is left")
    assert serving.stop() == 1
    assert serving.output[-1] == "weft: stopped before every request was answered in full"
    assert not any("Traceback" in line for line in serving.output)
    try:
        assert len(reader.rest()) < 4 * ROWS
    except ConnectionError:
        return  # cut off, the system's other way to say it
    finally:
        reader.close()


def test_an_end_with_half_a_request_open_waits_for_nobody(serving: ServerProcess) -> None:
    host, _, port = serving.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as half:
        half.sendall(b"POST /v2/models/tile/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n")
        assert serving.stop() == 0
    assert not any("finishing" in line for line in serving.output)


def test_one_that_cannot_start_says_why() -> None:
    with pytest.raises(InputError, match=r"did not start: weft: .*no-such"), ServerProcess("/no-such.onnx"):
        raise AssertionError("it started")


OWNER = """
import sys
from weft.serving.process import ServerProcess
with ServerProcess(sys.argv[1], "--learn-s=0") as server:
    print(server.url, server.pid, flush=True)
    sys.stdin.read()
"""


def refuses(url: str) -> bool:
    """Whether nobody listens there any more."""
    host, _, port = url.removeprefix("http://").partition(":")
    try:
        socket.create_connection((host, int(port))).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_server_ends_with_a_process_that_is_killed(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout
        url, pid = owner.stdout.readline().split()
        urlopen(url).close()  # so it has printed all that it prints: a closed standard output would end it, too
        owner.kill()
    try:
        until(lambda: refuses(url), "the server ends")
    except AssertionError:
        os.kill(int(pid), signal.SIGKILL)
        raise
