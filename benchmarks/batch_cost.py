"""The cost of a batch for a server whose device queues steps: processor time of its process, by part.

The server runs in this process, on the twin of a GPU (or on ``--device``): with gates, where a batch is one launch, and
without, where every segment is one. A client process sends batches over HTTP, one after another; their tensors are in
shared memory. A batch is one request, or 16 requests of one row that are sent together. Measured is the processor time
of all threads of this process, without the worker's and the client's. In every second round functions are timed, too:

- engine: admission, planning, the start and the end of a batch (``Dispatcher``);
- messages: to and from the worker;
- requests: the rest, which is HTTP, decoding and encoding.

Times are the least of all rounds, which noise changes least. The latency is that of a whole batch at the client, and
*compute* what the answers say that the model took.

    python benchmarks/batch_cost.py [--policy abreast] [--save]
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from machine import machine
from onnx import TensorProto, helper, numpy_helper
from processes import worked_ns
from rich.console import Console
from rich.table import Table
from serving_overhead import post

import weft
from weft.base.jsonfile import write_json
from weft.runtime.isolated.lane import LaneLine
from weft.runtime.isolated.model import IsolatedModel
from weft.runtime.isolated.process import WorkerProcess
from weft.serving.client_feed import ClientFeed
from weft.serving.dispatch import Dispatcher

WIDTH, LAYERS, ROWS = 64, 4, 16
TIMED = {
    "engine": [(Dispatcher, "submit"), (Dispatcher, "_pump")],
    "messages": [(IsolatedModel, "start"), (LaneLine, "receive_report"), (WorkerProcess, "_finish_step")],
    "requests": [(ClientFeed, "_answer")],
}
"""The functions of each part; the time of one that another calls counts for its own part only."""
RESULTS = Path(__file__).parent / "results" / "batch_cost.json"


class Case(NamedTuple):
    """How a batch is made."""

    model: str
    requests: int
    rows: int
    """Of each request."""


CASES = (Case("chain", 1, 1), Case("chain", 1, ROWS), Case("gathering", ROWS, 1))


class Round(NamedTuple):
    """What the client saw in one round."""

    batches: int
    latency_us: float
    compute_us: float
    """This and the latency are medians."""


def write_models(folder: Path) -> None:
    """The same chain of products twice; ``gathering`` waits until the requests of a batch have come."""
    rng, nodes, weights = np.random.default_rng(0), [], []
    for layer in range(LAYERS):
        weights.append(numpy_helper.from_array(rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8, f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [f"h{layer}", f"w{layer}"], [f"p{layer}"]))
        nodes.append(helper.make_node("Tanh", [f"p{layer}"], [f"h{layer + 1}"]))
    ends = [helper.make_tensor_value_info(f"h{at}", TensorProto.FLOAT, ["n", WIDTH]) for at in (0, LAYERS)]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    for name, timeout_ms in (("chain", 0), ("gathering", 1000)):
        onnx.save(model, str(folder / f"{name}.onnx"))
        settings = f"max_batch = {ROWS}\ngrain_ms = 0.0001\nbatch_timeout_ms = {timeout_ms}\n"
        (folder / f"{name}.toml").write_text(settings)


# The client


def send_batches(port: int, case: Case, seconds: float) -> Round:
    """Send batches for a while, one after another; runs in a process of its own."""
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(case.requests)]
    size = case.rows * WIDTH * 4
    memory = SharedMemory(create=True, size=2 * case.requests * size)
    memory.buf[:] = np.random.default_rng(0).random(memory.size // 4, np.float32).tobytes()
    region = f"/v2/systemsharedmemory/region/{memory.name}"
    requests = [_request(case, memory.name, slot * size, size) for slot in range(case.requests)]
    latencies, computed = [], []
    try:
        for connection in sockets:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        register = json.dumps({"key": memory.name, "byte_size": memory.size}).encode()
        _exchange(sockets[:1], [post(f"{region}/register", register)])
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            began_s = time.perf_counter()
            answer = _exchange(sockets, requests)
            latencies.append(time.perf_counter() - began_s)
            computed.append(float(answer.partition(b'"weft_compute_us":')[2].partition(b",")[0]))
            batch = int(answer.partition(b'"weft_batch":')[2].partition(b"}")[0])
            if batch != case.requests:
                raise SystemExit(f"a batch of {batch} requests instead of {case.requests}")
        _exchange(sockets[:1], [post(f"{region}/unregister", b"{}")])
    finally:
        for connection in sockets:
            connection.close()
        memory.close()
        memory.unlink()
    return Round(len(latencies), statistics.median(latencies) * 1e6, statistics.median(computed))


def _request(case: Case, region: str, at: int, size: int) -> bytes:
    """A request whose input is at an offset of the region, and its output behind all inputs."""
    place = {"shared_memory_region": region, "shared_memory_byte_size": size}
    tensor = {"name": "h0", "shape": [case.rows, WIDTH], "datatype": "FP32"}
    wanted = {"name": f"h{LAYERS}", "parameters": {**place, "shared_memory_offset": case.requests * size + at}}
    inputs = [{**tensor, "parameters": {**place, "shared_memory_offset": at}}]
    return post(f"/v2/models/{case.model}/infer", json.dumps({"inputs": inputs, "outputs": [wanted]}).encode())


def _exchange(sockets: list[socket.socket], requests: list[bytes]) -> bytes:
    """Send each request on its connection, and read all answers; returns the last one."""
    for connection, request in zip(sockets, requests, strict=True):
        connection.sendall(request)
    for connection in sockets:
        answer = connection.recv(65536)  # these short answers come in one piece
        if not answer.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"not an answer: {answer[:500]!r}")
    return answer


# The server


@contextmanager
def timed(spent: Counter[str]) -> Iterator[None]:
    """Add the processor time of the functions in ``TIMED`` to *spent*, in ns by part; all run on one thread."""
    originals = [(owner, name, getattr(owner, name)) for functions in TIMED.values() for owner, name in functions]
    running: list[str] = []
    last_ns = 0

    def wrap(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            nonlocal last_ns
            now = time.thread_time_ns()
            if running:
                spent[running[-1]] += now - last_ns
            running.append(part)
            last_ns = time.thread_time_ns()
            try:
                return function(*arguments, **options)
            finally:
                now = time.thread_time_ns()
                spent[running.pop()] += now - last_ns
                last_ns = time.thread_time_ns()

        return wrapped

    for part, functions in TIMED.items():
        for owner, name in functions:
            setattr(owner, name, wrap(part, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def measure(models: Path, gates: bool, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one server, with gates or without."""
    client = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    settings: dict[str, Any] = {"device": arguments.device, "policy": arguments.policy, "gates": gates}
    rows: dict[Case, list[dict[str, float]]] = {case: [] for case in CASES}
    with client, weft.Server(models, shared_memory=True, learn_first=True, **settings) as server:
        port = int(server.url.rpartition(":")[2])
        for number in range(-1, arguments.rounds):  # the first one warms up
            if not number:
                gc.collect()
                gc.freeze()  # as ``weft serve`` does after loading
            for case in CASES:
                row = _round(client, port, case, arguments.seconds)
                rows[case] += [row] if number >= 0 else []
    least = {case: {key: min(row[key] for row in found) for key in found[0]} for case, found in rows.items()}
    return [
        {**case._asdict(), "gates": gates, **row, "requests_us": row["all_us"] - row["engine_us"] - row["messages_us"]}
        for case, row in least.items()
    ]


def _round(client: ProcessPoolExecutor, port: int, case: Case, seconds: float) -> dict[str, float]:
    """One round without timed functions, for the whole, and one with them."""
    before_ns = worked_ns(os.getpid())
    result = client.submit(send_batches, port, case, seconds).result()
    all_ns, spent = worked_ns(os.getpid()) - before_ns, Counter[str]()
    with timed(spent):
        batches = client.submit(send_batches, port, case, seconds).result().batches
    parts = {f"{part}_us": spent[part] / batches / 1e3 for part in ("engine", "messages")}
    return {
        "all_us": all_ns / result.batches / 1e3,
        **parts,
        "p50_us": result.latency_us,
        "compute_us": result.compute_us,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.3, help="of one round; short ones find a calm machine")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cuda:twin")
    parser.add_argument("--policy", default="punctual")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    before = machine("onnxruntime")
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        rows = [row for gates in (True, False) for row in measure(Path(folder), gates, arguments)]
    parts = ("all_us", "engine_us", "messages_us", "requests_us", "p50_us", "compute_us")
    table = Table(title="processor time of the server per batch, us", title_justify="left", box=None, pad_edge=False)
    for column in ("gates", "requests", "rows of each", *parts):
        table.add_column(column, justify="right")
    for row in rows:
        how = ("yes" if row["gates"] else "no", str(row["requests"]), str(row["rows"]))
        table.add_row(*how, *[f"{row[part]:.0f}" for part in parts])
    Console(width=110).print(table)
    if arguments.json:
        write_json(arguments.json, {"rows": rows})
    if arguments.save:
        write_json(RESULTS, {"format": 1, "machine": before, "policy": arguments.policy, "rows": rows})


if __name__ == "__main__":
    main()
