"""The gain of shared memory: the same requests with tensors in a region and with binary tensors over HTTP, in turns.

Two models of well under a millisecond take an image of 602 KB (1x3x224x224 floats) and return ten scores: one reads a
thumbnail of it, the other every pixel. The same is done with images of 448 and 896 pixels, four and sixteen times as
large. Requests are sent over HTTP in a closed loop, by tritonclient (one client, and two in threads of one process) and
over four plain sockets. Every request carries another image. tritonclient copies it into the region or the body; for
the sockets, images are in the region or in bodies beforehand, as if a camera had written them there. Rounds alternate,
so that both variants see the same machine; shown are the medians of the rounds, and of the ratios within a round. CPU
time is that of the server and all its children, from /proc, without the client's.

At the end: the time of one copy out of the region, by ``preadv`` (as in the server, because a region that is truncated
meanwhile then gives an error) and out of mapped memory (where it would give SIGBUS).

    python benchmarks/shared_memory.py --save
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import select
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import tritonclient.http as triton
from machine import awake, machine
from onnx import TensorProto, helper, numpy_helper
from processes import cpu_s
from rich.console import Console
from rich.table import Table
from tritonclient.utils import shared_memory

from weft.base.jsonfile import write_json
from weft.serving.process import ServerProcess
from weft.serving.regions import RegionPart

SIDES = (224, 448, 896)
"""Pixels of a line of an image, and its lines."""
IMAGES, CONNECTIONS = 8, 4
PIXELS = 7
"""Pixels of a line of a thumbnail."""
TARGET_SIDE, TARGET_RATIO, TARGET_MS = 224, 1.5, 1.0
WAYS = ("binary", "shared")
RESULTS = Path(__file__).parent / "results" / "shared_memory.json"


class Case(NamedTuple):
    """A model, and who asks for it."""

    model: str
    side: int
    client: str


class Round(NamedTuple):
    """One measurement of one way."""

    per_s: float
    cpu_us: float
    p50_ms: float
    p99_ms: float
    compute_ms: float
    """What the model took, as the answers say; the median."""


def write_thumbnails(path: Path, side: int) -> None:
    """x [n, 3, side, side] -> y [n, 10]: seven pixels of seven lines, and a product."""
    constants: dict[str, Any] = {
        "w": weights(3 * PIXELS**2),
        "starts": np.array([0, 0]),
        "ends": np.array([side, side]),
        "axes": np.array([2, 3]),
        "steps": np.array([side // PIXELS] * 2),
    }
    nodes = [
        helper.make_node("Slice", ["x", "starts", "ends", "axes", "steps"], ["small"]),
        helper.make_node("Flatten", ["small"], ["flat"]),
        helper.make_node("MatMul", ["flat", "w"], ["y"]),
    ]
    _write(path, side, nodes, constants)


def write_means(path: Path, side: int) -> None:
    """x [n, 3, side, side] -> y [n, 10]: the mean of every channel, and a product."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["means"], axes=[2, 3], keepdims=0),
        helper.make_node("MatMul", ["means", "w"], ["y"]),
    ]
    _write(path, side, nodes, {"w": weights(3)})


MODELS = {"thumbnails": write_thumbnails, "means": write_means}
CLIENTS = ("tritonclient", "two tritonclients", "sockets")


def weights(rows: int) -> Any:
    return np.random.default_rng(0).normal(size=(rows, 10)).astype(np.float32)


def _write(path: Path, side: int, nodes: list[Any], constants: dict[str, Any]) -> None:
    graph = helper.make_graph(
        nodes,
        path.stem,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, side, side])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 10])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))


# Asking


class PlanRequest(NamedTuple):
    """What one client has seen."""

    latencies_s: list[float]
    compute_us: list[float]
    """What the model took each time."""


class Images:
    """What is sent, in turns."""

    def __init__(self, side: int) -> None:
        self.shape = (1, 3, side, side)
        self.arrays = [np.random.default_rng(index).random(self.shape, np.float32) for index in range(IMAGES)]
        self.byte_size = int(self.arrays[0].nbytes)


class Tritonclient:
    """A client of tritonclient, with one request at a time; it is used in the thread that made it."""

    def __init__(self, address: str, number: int, images: Images) -> None:
        self._client = triton.InferenceServerClient(address)
        name, key = f"images-{number}", f"/weft-benchmark-{os.getpid()}-{number}"
        self._name, self._region = name, shared_memory.create_shared_memory_region(name, key, images.byte_size)
        self._client.register_system_shared_memory(name, key, images.byte_size)
        self._images = images
        self._expected = {model: [self._ask(model, "binary", at) for at in range(IMAGES)] for model in MODELS}

    def run(self, model: str, way: str, until_s: float) -> PlanRequest:
        """Ask until then."""
        result = PlanRequest([], [])
        while (began_s := time.perf_counter()) < until_s:
            at = len(result.latencies_s) % IMAGES
            answer = self._ask(model, way, at)
            result.latencies_s.append(time.perf_counter() - began_s)
            result.compute_us.append(answer.get_response()["parameters"]["weft_compute_us"])
            expected = self._expected[model][at]
            if not np.allclose(answer.as_numpy("y"), expected.as_numpy("y"), rtol=1e-4, atol=1e-6):
                raise SystemExit(f"{model}, {way}: another answer than before")
        return result

    def _ask(self, model: str, way: str, at: int) -> Any:
        tensor = triton.InferInput("x", list(self._images.shape), "FP32")
        if way == "shared":
            shared_memory.set_shared_memory_region(self._region, [self._images.arrays[at]])
            tensor.set_shared_memory(self._name, self._images.byte_size)
        else:
            tensor.set_data_from_numpy(self._images.arrays[at])
        return self._client.infer(model, [tensor], outputs=[triton.InferRequestedOutput("y")])

    def close(self) -> None:
        self._client.unregister_system_shared_memory(self._name)
        shared_memory.destroy_shared_memory_region(self._region)
        self._client.close()


class Sockets:
    """Connections that do next to nothing themselves: what comes back as fast as it can shows what the server can.

    Bodies with an image are made beforehand, and the images lie in the region beforehand: neither way has a copy of its
    own.
    """

    def __init__(self, address: str, number: int, images: Images) -> None:
        host, _, port = address.partition(":")
        name, key = f"images-{number}", f"/weft-benchmark-{os.getpid()}-{number}"
        whole = IMAGES * images.byte_size
        self._region = shared_memory.create_shared_memory_region(name, key, whole)
        shared_memory.set_shared_memory_region(self._region, images.arrays)
        self._owner = triton.InferenceServerClient(address)
        self._owner.register_system_shared_memory(name, key, whole)
        self._name, self._images = name, images
        self._bodies = [image.tobytes() for image in images.arrays]
        self._sockets = [socket.create_connection((host, int(port))) for _ in range(CONNECTIONS)]
        self._poll = select.poll()
        for connection in self._sockets:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._poll.register(connection, select.POLLIN)

    def run(self, model: str, way: str, until_s: float) -> PlanRequest:
        """Ask until then, over all connections at a time."""
        result = PlanRequest([], [])
        slots = {connection.fileno(): slot for slot, connection in enumerate(self._sockets)}
        for slot in slots.values():
            self._send(model, way, slot, slot % IMAGES)
        began_s = dict.fromkeys(slots, time.perf_counter())
        while began_s:
            for number, _ in self._poll.poll():
                result.compute_us.append(self._received(slots[number]))
                now_s = time.perf_counter()
                result.latencies_s.append(now_s - began_s.pop(number))
                if now_s < until_s:
                    began_s[number] = now_s
                    self._send(model, way, slots[number], len(result.latencies_s) % IMAGES)
        return result

    def _send(self, model: str, way: str, slot: int, at: int) -> None:
        body, size = b"", self._images.byte_size
        place: dict[str, str | int] = {"binary_data_size": size}
        if way == "shared":
            place = RegionPart(self._name, at * size, size).parameters()
        else:
            body = self._bodies[at]
        tensor = {"name": "x", "shape": self._images.shape, "datatype": "FP32", "parameters": place}
        text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        head = (
            f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(text) + len(body)}\r\n"
            f"Inference-Header-Content-Length: {len(text)}\r\n\r\n"
        )
        self._sockets[slot].sendall(head.encode() + text)
        self._sockets[slot].sendall(body)

    def _received(self, slot: int) -> float:
        """What the model took, once the whole answer is there."""
        data = b""
        while b"\r\n\r\n" not in data or len(data) < _length(data):
            piece = self._sockets[slot].recv(65536)
            if not piece:
                raise SystemExit(f"the server hung up after {data[:500]!r}")
            data += piece
        if not data.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"not an answer: {data[:500]!r}")
        return float(data.partition(b'"weft_compute_us":')[2].partition(b",")[0])

    def close(self) -> None:
        for connection in self._sockets:
            connection.close()
        self._owner.unregister_system_shared_memory(self._name)
        shared_memory.destroy_shared_memory_region(self._region)
        self._owner.close()


def _length(data: bytes) -> int:
    """Of an answer whose head is there."""
    head, _, _ = data.partition(b"\r\n\r\n")
    return len(head) + 4 + int(head.lower().partition(b"\r\ncontent-length:")[2].split(b"\r\n", 1)[0])


class Client:
    """One of those in a thread of its own."""

    def __init__(self, make: type[Tritonclient | Sockets], address: str, number: int, images: Images) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._made = self._thread.submit(make, address, number, images).result()

    def begin(self, model: str, way: str, until_s: float) -> Future[PlanRequest]:
        return self._thread.submit(self._made.run, model, way, until_s)

    def close(self) -> None:
        self._thread.submit(self._made.close).result()
        self._thread.shutdown()


def measure(clients: list[Client], model: str, way: str, pid: int, seconds: float) -> Round:
    """One round of one way, from as many clients as there are."""
    before_s, began_s = cpu_s(pid), time.perf_counter()
    running = [client.begin(model, way, began_s + seconds) for client in clients]
    results = [future.result() for future in running]
    took_s, spent_s = time.perf_counter() - began_s, cpu_s(pid) - before_s
    latencies = [latency_s for asked in results for latency_s in asked.latencies_s]
    computed = [time_us for asked in results for time_us in asked.compute_us]
    p50, p99 = np.percentile(latencies, (50, 99)) * 1e3
    count = len(latencies)
    return Round(count / took_s, spent_s / count * 1e6, float(p50), float(p99), statistics.median(computed) / 1e3)


def rounds_of(side: int, seconds: float, rounds: int) -> dict[Case, list[tuple[Round, Round]]]:
    """Binary and shared in turns, whoever is first changing with every round."""
    cases = [Case(model, side, client) for model in MODELS for client in CLIENTS]
    results: dict[Case, list[tuple[Round, Round]]] = {case: [] for case in cases}
    images = Images(side)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for model, write in MODELS.items():
            write(Path(folder) / f"{model}.onnx", side)
        server = stack.enter_context(ServerProcess(folder, "--lanes", "1", "--shared-memory"))
        makers = (Tritonclient, Tritonclient, Sockets)
        address = server.url.removeprefix("http://")
        made = [Client(make, address, number, images) for number, make in enumerate(makers)]
        for each in made:
            stack.callback(each.close)
        clients = dict(zip(CLIENTS, (made[:1], made[:2], made[2:]), strict=True))
        for number in range(-1, rounds):  # the first one warms up
            for case in cases:
                order = WAYS if number % 2 else WAYS[::-1]
                asking, pid = clients[case.client], server.pid
                pair = {way: measure(asking, case.model, way, pid, seconds) for way in order}
                results[case] += [(pair["binary"], pair["shared"])] if number >= 0 else []
    return results


# One copy


@contextmanager
def opened(byte_size: int) -> Iterator[int]:
    """A descriptor of an object that holds an image."""
    path = Path("/dev/shm") / f"weft-benchmark-{os.getpid()}-copies"
    path.write_bytes(np.ones(byte_size, np.uint8).tobytes())
    number = os.open(path, os.O_RDWR)
    try:
        yield number
    finally:
        os.close(number)
        path.unlink()


def copies(repeats: int) -> dict[str, float]:
    """Microseconds that one copy of a small image takes, the median; the ways take turns."""
    byte_size = Images(TARGET_SIDE).byte_size
    with opened(byte_size) as number:
        source = np.frombuffer(mmap.mmap(number, byte_size), np.uint8)

        def read() -> None:
            os.preadv(number, [np.empty(byte_size, np.uint8)], 0)

        def copy() -> None:
            np.empty(byte_size, np.uint8)[:] = source

        ways: dict[str, Callable[[], None]] = {"preadv": read, "mapped": copy}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repeats):
            for name, way in ways.items():
                began_s = time.perf_counter()
                way()
                times[name].append(time.perf_counter() - began_s)
    return {name: statistics.median(times_s) * 1e6 for name, times_s in times.items()}


# The report


def summary(case: Case, rounds: list[tuple[Round, Round]]) -> dict[str, Any]:
    """The medians of both ways, and of the ratios within a round."""
    row: dict[str, Any] = {**case._asdict(), "rounds": len(rounds)}
    for side, way in enumerate(WAYS):
        for key in Round._fields:
            row[f"{way}_{key}"] = statistics.median(getattr(pair[side], key) for pair in rounds)
    ratios = [shared.per_s / binary.per_s for binary, shared in rounds]
    return row | {"ratio": statistics.median(ratios), "ratios": ratios}


def show(rows: list[dict[str, Any]], copied: dict[str, float]) -> None:
    """Print a line for each case, and the copies."""
    table = Table(title="an image for each request", title_justify="left", box=None, pad_edge=False)
    columns = (
        "model",
        "client",
        "MB",
        "model ms",
        "binary/s",
        "shared/s",
        "ratio",
        "CPU us",
        "shared",
        "p50 ms",
        "shared",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("model", "client") else "right")
    for row in rows:
        table.add_row(
            row["model"], row["client"], f"{12e-6 * row['side'] ** 2:.1f}", f"{row['shared_compute_ms']:.2f}",
            f"{row['binary_per_s']:.0f}", f"{row['shared_per_s']:.0f}", f"{row['ratio']:.2f}",
            f"{row['binary_cpu_us']:.0f}", f"{row['shared_cpu_us']:.0f}",
            f"{row['binary_p50_ms']:.2f}", f"{row['shared_p50_ms']:.2f}",
        )  # fmt: skip
    Console(width=110).print(table)
    print("one copy: " + ", ".join(f"{name} {us:.0f} us" for name, us in copied.items()))


def judge(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """The claims, and whether they hold."""
    rows = [row for row in rows if row["side"] == TARGET_SIDE]
    slowest_ms = max(row[f"{way}_compute_ms"] for row in rows for way in WAYS)
    verdicts = {
        f"{row['model']}, {row['client']}: at least {TARGET_RATIO:g} times the requests of binary HTTP": (
            row["ratio"] >= TARGET_RATIO
        )
        for row in rows
    }
    verdicts[f"the models take less than {TARGET_MS:g} ms"] = slowest_ms < TARGET_MS
    for claim, holds in verdicts.items():
        print(f"{'yes' if holds else 'NO '}  {claim}")
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one round of one way")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--copies", type=int, default=2000)
    parser.add_argument("--save", action="store_true", help=f"write benchmarks/results/{RESULTS.name}")
    options = parser.parse_args()
    environment = machine("onnxruntime", "tritonclient")
    rows = [
        summary(case, rounds)
        for side in SIDES
        for case, rounds in rounds_of(side, options.seconds, options.rounds).items()
    ]
    copied = copies(options.copies)
    show(rows, copied)
    verdicts = judge(rows)
    if options.save:
        results = {"machine": environment, "seconds": options.seconds, "rows": rows}
        write_json(RESULTS, results | {"copy_us": copied, "verdicts": verdicts})


if __name__ == "__main__":
    with awake():
        main()
