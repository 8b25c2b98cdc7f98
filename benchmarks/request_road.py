"""The path of one request through weft's code: calls, files, and changes of file and package.

A server in this process (HTTP, binary tensors, ``punctual``, one lane) answers requests for a model until it is warm;
then one request is traced, from the first byte that the server reads to the last that it writes. Counted are calls of
weft's functions without comprehensions. A change is a call or a return of a thread into another file, or into another
package (*room*), as ``tests.structure`` defines it. A model that is cut into segments repeats the middle of the path
for each segment.

    python benchmarks/request_road.py [--models light-squeezenet] [--road] [--save]
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from machine import machine
from serving_overhead import post, write_network

import weft
from weft.base.jsonfile import write_json

RESULTS = Path(__file__).parent / "results" / "request_road.json"
SOURCES = str(Path(weft.__file__).parents[1]) + "/"
WARM_UP = 200
"""Requests before the traced one: caches are filled and the segments' times are learned."""
QUIET_S = 0.5
"""Between requests, so that the turns of the loop before and after the traced one are over."""
LAST_TURN_S = 0.05
"""After the answer, so that the turn of the loop that gave it ends; longer would trace the server's regular sweeps."""
TYPES = {"FP32": np.float32, "INT64": np.int64, "INT32": np.int32, "UINT8": np.uint8}
LIMITS: dict[str, int | None] = {"calls": 250, "files": 32, "file_changes": None, "room_changes": 45}


def room_of(path: str) -> str:
    """The folder below the package that a file lies in."""
    parts = path.split("/")
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


@dataclass
class Thread:
    """What one thread has executed while the request was under way."""

    stack: list[str] = field(default_factory=list)
    road: list[str] = field(default_factory=list)
    """The files that it was in, one after the other."""


@dataclass
class Road:
    """What was executed of weft for one request."""

    threads: dict[int, Thread] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    order: list[str] = field(default_factory=list)

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        """A profile function of ``sys.setprofile``: called for every call and return of a thread."""
        if event not in ("call", "return"):
            return
        code = frame.f_code
        if not code.co_filename.startswith(SOURCES) or code.co_name.startswith("<"):
            return
        file = code.co_filename.removeprefix(SOURCES)
        thread = self.threads.setdefault(threading.get_ident(), Thread())
        if event == "return":
            if thread.stack:
                thread.stack.pop()
            if thread.stack:
                self._enter(thread, thread.stack[-1])
            return
        thread.stack.append(file)
        self._enter(thread, file)
        self.calls[f"{file}:{code.co_qualname if hasattr(code, 'co_qualname') else code.co_name}"] += 1
        self.order.append(f"{file}:{code.co_name}")

    def _enter(self, thread: Thread, file: str) -> None:
        if not thread.road or thread.road[-1] != file:
            thread.road.append(file)

    @property
    def files(self) -> set[str]:
        return {file for thread in self.threads.values() for file in thread.road}

    def changes(self) -> dict[str, Any]:
        """The numbers that are printed."""
        roads = [thread.road for thread in self.threads.values()]
        rooms = [[room_of(file) for file in road] for road in roads]
        return {
            "calls": self.calls.total(),
            "files": len(self.files),
            "rooms": len({room for road in rooms for room in road}),
            "threads": len(roads),
            "file_changes": sum(len(road) - 1 for road in roads),
            "room_changes": sum(
                sum(a != b for a, b in pairwise(road)) for road in rooms
            ),
        }  # fmt: skip


def answer(connection: socket.socket, request: bytes) -> None:
    """Send a request and read its answer to the last byte."""
    connection.sendall(request)
    data = b""
    while True:
        data += connection.recv(1 << 20)
        head, complete, body = data.partition(b"\r\n\r\n")
        if complete:
            if not head.startswith(b"HTTP/1.1 200"):
                sys.exit(f"not an answer: {data[:500]!r}")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            if len(body) >= length:
                return


def request_for(model: str, url: str) -> bytes:
    """A request with zeros for a model, as it describes its inputs; free sizes are 1."""
    with urllib.request.urlopen(f"{url}/v2/models/{model}") as answered:
        inputs = json.load(answered)["inputs"]
    raw, tensors = b"", []
    for spec in inputs:
        shape = [max(1, size) for size in spec["shape"]]
        data = np.zeros(shape, TYPES[spec["datatype"]]).tobytes()
        raw += data
        tensors.append({**spec, "shape": shape, "parameters": {"binary_data_size": len(data)}})
    text = json.dumps({"parameters": {"binary_data_output": True}, "inputs": tensors}).encode()
    head = f"Inference-Header-Content-Length: {len(text)}\r\nContent-Type: application/octet-stream\r\n"
    return post(f"/v2/models/{model}/infer", text + raw, head)


def traced(model: str) -> Road:
    """The road of one request for a model of the zoo, or for a tiny network."""
    road, on = Road(), threading.Event()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if on.is_set():
            road.profile(frame, event, argument)

    with tempfile.TemporaryDirectory() as scratch:
        served = write_network(Path(scratch) / "mlp.onnx") if model == "mlp" else model
        threading.setprofile(profile)  # the server's threads begin with it
        try:
            with (
                weft.Server(served, lanes=1, policy="punctual", learn_first=True) as server,
                socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection,
            ):
                request = request_for(model, server.url)
                for _ in range(WARM_UP):
                    answer(connection, request)
                time.sleep(QUIET_S)
                on.set()
                answer(connection, request)
                time.sleep(LAST_TURN_S)
                on.clear()
        finally:
            threading.setprofile(None)
    return road


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["mlp"], help="of the zoo; mlp: a tiny one")
    parser.add_argument("--road", action="store_true", help="print every call")
    parser.add_argument("--save", action="store_true", help=f"write benchmarks/results/{RESULTS.name}")
    arguments = parser.parse_args()
    rows = {}
    for model in arguments.models:
        road = traced(model)
        rows[model] = {**road.changes(), "by_file": dict(Counter(call.partition(":")[0] for call in road.order))}
        if arguments.road:
            print("\n".join(road.order))
        for name, limit in LIMITS.items():
            count = rows[model][name]
            print(f"{model}: {count} {name.replace('_', ' ')}" + (f" (at most {limit})" if limit else ""))
    if arguments.save:
        write_json(RESULTS, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
