"""The cost of a request for a server in addition to its network: CPU time of the server per request.

A tiny ONNX network (64-128-10, about 10 us of work), HTTP keep-alive over loopback, requests in a closed loop
from 1, 8 and 32 connections. Measured is the CPU time of the server and all its children, from /proc, without the
client's. Validation, metrics and scheduling are on, one lane, default settings; `weft, batch 1` has
batching switched off. MLServer and LitServe run in environments of their own, in turns with it:

    python -m venv peers/mlserver && peers/mlserver/bin/pip install mlserver==1.7.1 onnxruntime
    python -m venv peers/litserve && peers/litserve/bin/pip install litserve==0.2.19 onnxruntime
    python benchmarks/serving_overhead.py --mlserver peers/mlserver/bin/python --litserve peers/litserve/bin/python

CPU times are the least of all rounds, which noise changes least; the other figures are those of the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from machine import awake, machine
from onnx import TensorProto, helper, numpy_helper
from processes import cpu_s
from rich.console import Console
from rich.table import Table

from weft.base.jsonfile import write_json
from weft.serving.process import ServerProcess

CONNECTIONS = (1, 8, 32)
TARGET_US, TARGET_RATIO = 250.0, 3.0
FEATURES, HIDDEN, CLASSES = 64, 128, 10
START_S = 60.0
PEERS = Path(__file__).parent / "peers"
RESULTS = Path(__file__).parent / "results" / "serving_overhead.json"


class Target(NamedTuple):
    """One server and one way to ask it."""

    server: str
    wire: str
    pid: int
    port: int
    request: bytes


class Round(NamedTuple):
    """One measurement."""

    cpu_us: float
    per_s: float
    p50_ms: float
    p99_ms: float


# The network and the requests for it


def write_network(path: Path) -> Path:
    """x [n, 64] -> y [n, 10], random weights."""
    rng = np.random.default_rng(0)
    weights: dict[str, Any] = {
        "w1": rng.normal(size=(FEATURES, HIDDEN)).astype(np.float32) / 8,
        "b1": rng.normal(size=HIDDEN).astype(np.float32),
        "w2": rng.normal(size=(HIDDEN, CLASSES)).astype(np.float32) / 8,
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h1"]),
        helper.make_node("Add", ["h1", "b1"], ["h2"]),
        helper.make_node("Relu", ["h2"], ["h3"]),
        helper.make_node("MatMul", ["h3", "w2"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", FEATURES])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", CLASSES])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))
    return path


def _sample() -> list[float]:
    return [round(float(value), 6) for value in np.random.default_rng(1).normal(size=FEATURES)]


def post(path: str, body: bytes, head: str = "Content-Type: application/json\r\n") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def json_request() -> bytes:
    """The protocol's, in JSON."""
    tensor = {"name": "x", "shape": [1, FEATURES], "datatype": "FP32", "data": _sample()}
    return post("/v2/models/mlp/infer", json.dumps({"inputs": [tensor]}).encode())


def binary_request() -> bytes:
    """The protocol's, with binary tensors both ways."""
    raw = np.array(_sample(), np.float32).tobytes()
    tensor = {"name": "x", "shape": [1, FEATURES], "datatype": "FP32", "parameters": {"binary_data_size": len(raw)}}
    text = json.dumps({"parameters": {"binary_data_output": True}, "inputs": [tensor]}).encode()
    head = f"Inference-Header-Content-Length: {len(text)}\r\nContent-Type: application/octet-stream\r\n"
    return post("/v2/models/mlp/infer", text + raw, head)


def rows_request() -> bytes:
    """LitServe's script takes the rows alone."""
    return post("/predict", json.dumps({"data": [_sample()]}).encode())


# The servers


def free_port() -> int:
    """A port that the system chose a moment ago, for servers that cannot ask for one themselves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def weft_server(name: str, folder: Path, settings: str) -> Iterator[list[Target]]:
    model = write_network(folder / "mlp.onnx")
    model.with_suffix(".toml").write_text(settings)
    with ServerProcess(str(folder), "--lanes", "1") as server:
        port = int(server.url.rpartition(":")[2])
        yield [
            Target(name, "json", server.pid, port, json_request()),
            Target(name, "binary", server.pid, port, binary_request()),
        ]


@contextlib.contextmanager
def mlserver(python: str, folder: Path) -> Iterator[list[Target]]:
    """One process, without the access log: the cheapest that it can do."""
    model, port = write_network(folder / "mlp.onnx"), free_port()
    ports = {"http_port": port, "grpc_port": free_port(), "metrics_port": free_port()}
    settings = {**ports, "host": "127.0.0.1", "parallel_workers": 0, "debug": False}
    (folder / "settings.json").write_text(json.dumps(settings))
    (folder / "model-settings.json").write_text(
        json.dumps({"name": "mlp", "implementation": "mlserver_onnx.OnnxModel", "parameters": {"uri": str(model)}})
    )
    environment = {**os.environ, "PYTHONPATH": str(PEERS)}
    command = [str(Path(python).parent / "mlserver"), "start", str(folder)]
    with _running(command, environment, folder, Probe("/v2/models/mlp/ready", port)) as pid:
        yield [Target("mlserver", "json", pid, port, json_request())]


@contextlib.contextmanager
def litserve(python: str, folder: Path) -> Iterator[list[Target]]:
    model, port = write_network(folder / "mlp.onnx"), free_port()
    command = [python, str(PEERS / "litserve_onnx.py"), str(model), str(port)]
    with _running(command, dict(os.environ), folder, Probe("/health", port)) as pid:
        yield [Target("litserve", "json", pid, port, rows_request())]


class Probe(NamedTuple):
    """Whether a server answers 200 under a path."""

    path: str
    port: int

    def __call__(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                connection.sendall(f"GET {self.path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
                return connection.recv(64).startswith(b"HTTP/1.1 200")
        except OSError:
            return False


@contextlib.contextmanager
def _running(command: list[str], environment: dict[str, str], folder: Path, ready: Probe) -> Iterator[int]:
    """A peer in a session of its own, whose processes all end with it."""
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        until_s = time.monotonic() + START_S
        while not ready():
            if process.poll() is not None or time.monotonic() > until_s:
                raise SystemExit(f"{command[0]} did not start:\n{(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.2)
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# The client


class _Client:
    """Connections that each have one request under way, in one thread."""

    def __init__(self, target: Target, connections: int) -> None:
        self._request = target.request
        self._sockets = [socket.create_connection(("127.0.0.1", target.port)) for _ in range(connections)]
        self._poll = select.epoll()
        self._by_number = {connection.fileno(): connection for connection in self._sockets}
        for each in self._sockets:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._poll.register(each, select.EPOLLIN)

    def run(self, seconds: float) -> list[float]:
        """Send and receive for a while; the latencies of all answers, in seconds."""
        latencies: list[float] = []
        sent_s, pieces = {}, dict.fromkeys(self._by_number, b"")
        end_s = time.perf_counter() + seconds
        for number, each in self._by_number.items():
            sent_s[number] = time.perf_counter()
            each.sendall(self._request)
        under_way = len(self._sockets)
        while under_way:
            for number, _ in self._poll.poll():
                each = self._by_number[number]
                pieces[number] += each.recv(65536)
                if not _complete(pieces[number]):
                    continue
                now_s = time.perf_counter()
                latencies.append(now_s - sent_s[number])
                pieces[number] = b""
                if now_s >= end_s:
                    under_way -= 1
                    continue
                sent_s[number] = now_s
                each.sendall(self._request)
        return latencies

    def close(self) -> None:
        self._poll.close()
        for connection in self._sockets:
            connection.close()


def _complete(data: bytes) -> bool:
    """Whether this is a whole answer; whatever is not a 200 ends the benchmark."""
    head, found, body = data.partition(b"\r\n\r\n")
    if not data.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"not an answer: {data[:500]!r}")
    if not found:
        return False
    lowered = head.lower()
    start = lowered.index(b"content-length:") + 15
    return len(body) >= int(lowered[start:].split(b"\r\n", 1)[0])


def measure(target: Target, connections: int, seconds: float) -> Round:
    """One round against one server."""
    client = _Client(target, connections)
    try:
        client.run(min(0.5, seconds / 4))
        before_s, began_s = cpu_s(target.pid), time.perf_counter()
        latencies = client.run(seconds)
        took_s, spent_s = time.perf_counter() - began_s, cpu_s(target.pid) - before_s
    finally:
        client.close()
    p50, p99 = np.percentile(latencies, (50, 99)) * 1e3
    return Round(spent_s / len(latencies) * 1e6, len(latencies) / took_s, float(p50), float(p99))


# The report


Key = tuple[str, str, int]


def show(best: dict[Key, Round]) -> list[dict[str, Any]]:
    """Print every row; the ratio is to weft's JSON at the same number of connections."""
    table = Table(title="processor time of the server per request", title_justify="left", box=None, pad_edge=False)
    for column in ("server", "wire", "connections", "CPU us", "req/s", "p50 ms", "p99 ms", "times weft's"):
        table.add_column(column, justify="left" if column in ("server", "wire") else "right")
    rows = []
    for (server, wire, connections), found in best.items():
        ratio = found.cpu_us / best["weft", "json", connections].cpu_us
        rows.append({"server": server, "wire": wire, "connections": connections, **found._asdict(), "ratio": ratio})
        table.add_row(
            server, wire, str(connections), f"{found.cpu_us:.0f}", f"{found.per_s:.0f}", f"{found.p50_ms:.2f}",
            f"{found.p99_ms:.2f}", f"{ratio:.2f}",
        )  # fmt: skip
    Console(width=110).print(table)
    return rows


def judge(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """The claims, and whether they hold."""
    ours = [row for row in rows if row["server"] == "weft"]
    peers = [row for row in rows if not row["server"].startswith("weft")]
    verdicts = {f"weft takes at most {TARGET_US:g} us": all(row["cpu_us"] <= TARGET_US for row in ours)}
    if peers:
        claim = f"peers take at least {TARGET_RATIO:g} times as much"
        verdicts[claim] = all(row["ratio"] >= TARGET_RATIO for row in peers)
    for claim, holds in verdicts.items():
        print(f"{'yes' if holds else 'NO '}  {claim}")
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="of one round against one server")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mlserver", metavar="PYTHON", help="of an environment with mlserver and onnxruntime")
    parser.add_argument("--litserve", metavar="PYTHON", help="of an environment with litserve and onnxruntime")
    parser.add_argument("--save", action="store_true", help=f"write benchmarks/results/{RESULTS.name}")
    arguments = parser.parse_args()
    environment = machine("onnxruntime")
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folders = {name: Path(scratch) / name for name in ("weft", "alone", "mlserver", "litserve")}
        targets = stack.enter_context(weft_server("weft", folders["weft"], ""))
        targets += stack.enter_context(weft_server("weft, batch 1", folders["alone"], "max_batch = 1\n"))
        for name, start in (("mlserver", mlserver), ("litserve", litserve)):
            if python := getattr(arguments, name):
                targets += stack.enter_context(start(python, folders[name]))
            else:
                print(f"{name} is left out: give --{name} PYTHON")
        rounds: dict[Key, list[Round]] = {}
        for _ in range(arguments.repeats):
            for connections in CONNECTIONS:
                for target in targets:
                    found = measure(target, connections, arguments.seconds)
                    rounds.setdefault((target.server, target.wire, connections), []).append(found)
    rows = show({key: min(rounds[key]) for key in sorted(rounds, key=_order)})
    verdicts = judge(rows)
    if arguments.save:
        all_rounds = [{"of": list(key), "cpu_us": [result.cpu_us for result in found]} for key, found in rounds.items()]
        write_json(
            RESULTS,
            {
                "machine": environment,
                "seconds": arguments.seconds,
                "rows": rows,
                "verdicts": verdicts,
                "rounds": all_rounds,
            },
        )


def _order(key: Key) -> tuple[bool, Key]:
    return not key[0].startswith("weft"), key


if __name__ == "__main__":
    with awake():
        main()
