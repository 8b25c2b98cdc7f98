"""Several minutes of mixed requests on a GPU: no request is lost, and memory does not grow.

Needs one NVIDIA GPU, torch and onnxruntime-gpu (docs/gpu.md):

    python benchmarks/gpu_soak.py [--seconds 180] [--results FILE]

Clients send requests for two models (ResNet50 and BERT-base in fp16) without pause; each client does one thing: one row
or eight over HTTP, one row in system shared memory, half of them with strict deadlines, inputs of the wrong shape, and
requests that it cancels. After a third of the time the worker is killed. A request ends as answered, refused (429, 503,
504), rejected as the client's fault (400), failed with the killed worker without time for a retry (500), or lost. The
memory of the device and of the server's process is sampled every second; the fourth and the last sixth of the time are
compared, both in the life of the second worker.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gpu_asking import FOLDER, Served, connected, describe_device, exchanged, registered, request_for
from gpu_swapping import metric

RESULTS = Path(__file__).parent / "results" / "gpu_soak.json"
MODELS = ("resnet50", "bert-base")
STRICT_US = 250_000


def with_deadline(request: bytes) -> bytes:
    """The same request, strict."""
    head, _, rest = request.partition(b"\r\n\r\n")
    length = int(head.partition(b"Inference-Header-Content-Length: ")[2].split(b"\r\n")[0])
    text = json.loads(rest[:length])
    text.setdefault("parameters", {})["timeout"] = STRICT_US
    return _with_text(head, json.dumps(text).encode(), rest[length:])


def of_wrong_shape(request: bytes) -> bytes:
    """The same request, whose inputs have a dimension too many."""
    head, _, rest = request.partition(b"\r\n\r\n")
    length = int(head.partition(b"Inference-Header-Content-Length: ")[2].split(b"\r\n")[0])
    text = json.loads(rest[:length])
    for tensor in text["inputs"]:
        tensor["shape"] = [1, *tensor["shape"]]
    return _with_text(head, json.dumps(text).encode(), rest[length:])


def _with_text(head: bytes, text: bytes, tensors: bytes) -> bytes:
    path = head.split(b"\r\n")[0]
    size = len(text) + len(tensors)
    lengths = f"Content-Length: {size}\r\nInference-Header-Content-Length: {len(text)}"
    return path + b"\r\nHost: localhost\r\n" + lengths.encode() + b"\r\n\r\n" + text + tensors


class Soak:
    """Clients, and what they were told."""

    def __init__(self, port: int, until_s: float) -> None:
        self._port, self._until_s, self._threads = port, until_s, list[threading.Thread]()
        self.told: dict[str, Counter[str]] = {}

    def add(self, name: str, ask: Callable[[Any], str]) -> None:
        """A client that does one thing, over and over."""
        told = self.told[name] = Counter()

        def run() -> None:
            connection = connected(self._port)
            while time.perf_counter() < self._until_s:
                try:
                    told[ask(connection)] += 1
                except OSError as error:
                    told[f"lost: {error}"] += 1
                    connection = connected(self._port)

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


def judged(status: int, body: bytes) -> str:
    """What became of a request; one that was on a worker which died is told so where it has no time for another."""
    if status == 500 and b"worker" in body:
        return "told that its worker died"
    said = f"lost: {status} {body[:200].decode(errors='replace')}"
    return {200: "answered", 400: "told", 429: "refused", 503: "refused", 504: "refused"}.get(status, said)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soaked(seconds: float) -> dict[str, Any]:
    server = Served({name: {"max_batch": 8, "slo_ms": 1000.0} for name in MODELS})
    began_s = time.perf_counter()
    soak = Soak(server.port, began_s + seconds)
    samples: list[tuple[float, float, float]] = []
    regions = ExitStack()
    try:
        for name in MODELS:
            one, eight = request_for(name, 1, "http")[0], request_for(name, 8, "http")[0]
            shared, memory = request_for(name, 1, "memory")
            regions.enter_context(registered(server.port, memory))
            for label, request in (
                ("one row", one),
                ("strict", with_deadline(one)),
                ("eight rows", eight),
                ("shared memory", shared),
                ("wrong shape", of_wrong_shape(one)),
            ):
                soak.add(f"{name}, {label}", lambda connection, r=request: judged(*exchanged(connection, r)))
            soak.add(f"{name}, hangs up", lambda connection, r=one: _hung_up(server.port, r))
        killed = False
        while time.perf_counter() < began_s + seconds:
            if not killed and time.perf_counter() > began_s + seconds / 3:
                killed = True
                os.kill(server.worker(), signal.SIGKILL)
            time.sleep(1.0)
            used = metric(server, "weft_device_memory_bytes")
            samples.append((time.perf_counter() - began_s, used, resident_bytes(server.pid)))
        soak.join()
        regions.close()
        deaths = metric(server, "weft_worker_deaths_total")
        pending = metric(server, "weft_in_flight")
    finally:
        server.close()
    total: Counter[str] = sum(soak.told.values(), Counter())
    return {
        "seconds": seconds,
        "requests": sum(total.values()),
        **total,
        "lost": sum(count for told, count in total.items() if told.startswith("lost")),
        "clients": {name: dict(told) for name, told in soak.told.items()},
        "worker_deaths": deaths,
        "in_flight_at_the_end": pending,
        "device_growth": growth(samples, seconds, 1),
        "server_growth": growth(samples, seconds, 2),
    }


def _hung_up(port: int, request: bytes) -> str:
    """Send a request, and go away before it is answered."""
    connection = connected(port)
    connection.sendall(request)
    connection.close()
    time.sleep(0.01)
    return "gone"


def growth(samples: list[tuple[float, float, float]], seconds: float, which: int) -> float:
    """Memory in the last sixth of the time over that in the fourth."""
    early = [sample[which] for sample in samples if seconds * 3 / 6 <= sample[0] < seconds * 4 / 6 and sample[which]]
    late = [sample[which] for sample in samples if sample[0] >= seconds * 5 / 6 and sample[which]]
    return statistics.median(late) / statistics.median(early) - 1


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=180.0)
    options.add_argument("--results", type=Path, default=RESULTS)
    arguments = options.parse_args()
    FOLDER.mkdir(exist_ok=True)
    results = {"machine": describe_device("cuda:0"), **soaked(arguments.seconds)}
    print(json.dumps(results, indent=1))
    arguments.results.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
