"""The cost of a request in addition to its model's time, and the client's part of it.

Two clients send single requests after pauses of 20 ms to a server with one lane: a bare loop over a keep-alive
connection (binary tensors), and tritonclient. Each answer carries its waiting and computing time; the rest of the
latency is transport: the server, the kernel, and the client's own CPU time, which is measured separately. On a busy
machine only the minima mean something, because other processes delay most requests.

    python benchmarks/request_cost.py --save
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from machine import machine
from processes import cpu_s
from tritonclient.http import InferenceServerClient, InferInput

from weft.base.jsonfile import write_json
from weft.serving.process import ServerProcess

RESULTS = Path(__file__).parent / "results" / "request_cost.json"
MODELS = {"pp-ocr-cls": ("x", (1, 3, 48, 192)), "light-shufflenet": ("gpu_0/data_0", (1, 3, 224, 224))}
PAUSE_S = 0.02
WARM_UP = 20
PARTS = ("latency_ms", "computed_ms", "besides_ms", "client_cpu_ms")


class Parts(NamedTuple):
    """Where the time of one request went, in seconds."""

    latency: float
    queued: float
    computed: float
    client_cpu: float

    @property
    def besides(self) -> float:
        """All but the time on a lane."""
        return self.latency - self.computed


Client = Callable[[], dict[str, Any]]
"""Sends one request; returns the parameters of its answer."""


def bare(port: int, model: str) -> Client:
    """Return a client of one connection that does nothing but send, receive and read the head of the answer."""
    name, shape = MODELS[model]
    tensor = np.random.default_rng(0).random(shape, np.float32).tobytes()
    sent = {"name": name, "datatype": "FP32", "shape": shape, "parameters": {"binary_data_size": len(tensor)}}
    head = json.dumps({"inputs": [sent], "parameters": {"binary_data_output": True}}).encode()
    lengths = f"Inference-Header-Content-Length: {len(head)}\r\nContent-Length: {len(head) + len(tensor)}"
    request = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: 127.0.0.1\r\n{lengths}\r\n\r\n".encode() + head + tensor
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send() -> dict[str, Any]:
        connection.sendall(request)
        data = b""
        while b"\r\n\r\n" not in data:
            data += connection.recv(1 << 16)
        first, _, body = data.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in first.split(b"\r\n")[1:])
        size = int(fields[b"content-length"])
        while len(body) < size:
            body += connection.recv(1 << 16)
        answer = json.loads(body[: int(fields.get(b"inference-header-content-length", size))])
        return answer["parameters"]

    return send


def triton(port: int, model: str) -> Client:
    """Return tritonclient, as its documentation shows it."""
    name, shape = MODELS[model]
    client, array = InferenceServerClient(f"127.0.0.1:{port}"), np.random.default_rng(0).random(shape, np.float32)

    def send() -> dict[str, Any]:
        tensor = InferInput(name, shape, "FP32")
        tensor.set_data_from_numpy(array)
        answer = client.infer(model, [tensor])
        response = answer.get_response()
        for output in response["outputs"]:
            answer.as_numpy(output["name"])
        return response["parameters"]

    return send


def requests(send: Client, count: int) -> Iterator[Parts]:
    for number in range(WARM_UP + count):
        time.sleep(PAUSE_S)
        began_s, cpu_began_s = time.perf_counter(), time.thread_time()
        answer = send()
        took_s, client_s = time.perf_counter() - began_s, time.thread_time() - cpu_began_s
        if number >= WARM_UP:
            yield Parts(took_s, answer["weft_queue_us"] / 1e6, answer["weft_compute_us"] / 1e6, client_s)


def measure(server: ServerProcess, model: str, client: Callable[[int, str], Client], count: int) -> dict[str, Any]:
    port = int(server.url.rpartition(":")[2].strip("/"))
    send, before_s = client(port, model), cpu_s(server.pid)
    results = list(requests(send, count))
    row: dict[str, Any] = {"model": model, "client": client.__name__}
    for part in PARTS:
        values = [getattr(result, part.removesuffix("_ms")) * 1e3 for result in results]
        row[part] = {"least": round(min(values), 3), "median": round(median(values), 3)}
    row["server_cpu_ms"] = round((cpu_s(server.pid) - before_s) / (count + WARM_UP) * 1e3, 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    before = machine("onnxruntime")
    with ServerProcess(*MODELS, "--lanes", "1") as server:
        rows = [measure(server, model, client, arguments.requests) for model in MODELS for client in (bare, triton)]
    for row in rows:
        parts = [f"{key} {row[key]['least']:.2f} ({row[key]['median']:.2f})" for key in row if key in PARTS]
        print(f"{row['model']}, {row['client']}: {', '.join(parts)}, server_cpu_ms {row['server_cpu_ms']:.2f}")
    print("each: least (median)")
    if arguments.save:
        write_json(RESULTS, {"format": 1, "machine": before, "requests": arguments.requests, "rows": rows})


if __name__ == "__main__":
    main()
