"""What a server on a GPU comes to beside the bare device: rates, latencies, what cutting costs, and an urgent model.

Needs one NVIDIA GPU, torch and onnxruntime-gpu (docs/gpu.md). Every row is kept in the results as soon as it is
measured, and not measured again when this is started once more:

    python benchmarks/gpu_serving.py [--only PART-OF-A-NAME] [--seconds 3] [--results FILE]

Rows: `bare/MODEL/ROWS` the captured model in one piece and in segments, replayed in a loop without a server;
`attention/MODEL/ROWS` an encoder of 197 tokens beside torch's own attention; `served/MODEL/WIRE/ROWS` requests in a
closed loop over binary HTTP, system or CUDA shared memory; `alone/MODEL` one-row requests at a fifth of what the device
can do; `beside/URGENT/OTHER` the same while the other model is asked without end; `killed/MODEL` from the death of the
worker to the next answer.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import multiprocessing
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine

MODELS = {"resnet50": "fp16", "bert-base": "fp16"}
PARAMETERS: dict[str, dict[str, int | str]] = {"bert-base": {"seq_len": 128}, "bert-large": {"seq_len": 197}}
ROWS = (1, 8, 32)
RESULTS = Path(__file__).parent / "results" / "gpu_serving.json"
FOLDER = Path(tempfile.gettempdir()) / "weft-gpu-serving"
ASKING = 6
"""Connections over which requests at random times come, so that one does not wait for the answer to another."""
LOAD = 0.2
"""The part of what the device can do, at which one model alone is asked."""


def exported(name: str) -> Path:
    """A well-known network as a file, in a repository of its own."""
    path = FOLDER / "models" / name / "1" / "model.onnx"
    if not path.exists():
        from weft.models import zoo

        path.parent.mkdir(parents=True, exist_ok=True)
        zoo.export(name, path, **PARAMETERS.get(name, {}))
    return path


# Without a server


def bare(name: str, seconds: float) -> dict[int, dict[str, Any]]:
    """A model in one piece and in segments, replayed as fast as Python can, at each number of rows."""
    from weft.runtime.backend import LoadOptions
    from weft.runtime.cuda.gpu import Gpu
    from weft.runtime.cuda.preparing import prepare_on

    device: Any = Gpu(0)
    found: dict[int, dict[str, Any]] = {rows: {} for rows in ROWS}
    for label, grain_s in (("whole", 1.0), ("cut", 0.00025)):
        options = LoadOptions(grain_s=grain_s, precision=MODELS[name], max_batch=max(ROWS))
        prepare_on(device, exported(name), options, FOLDER / "bare").close()
        model: Any = prepare_on(device, exported(name), options, FOLDER / "bare", learn=False)
        for rows in ROWS:
            found[rows][label] = {
                "segments": len(model.segments),
                **_replayed(device, model, rows, seconds),
                "longest_ms": max(model.times_s[rows]) * 1e3,
                "memory_mib": model.memory_bytes >> 20,
                "remarks": list(model.remarks),
            }
        model.close()
    for each in found.values():
        each["cutting_costs"] = each["cut"]["ms"] / each["whole"]["ms"] - 1
    return found


def _replayed(device: Any, model: Any, rows: int, seconds: float) -> dict[str, float]:
    rung = next(each for each in model._rungs if each.rows >= rows)
    with device.on():
        replays, began_s = 0, time.perf_counter()
        while time.perf_counter() - began_s < seconds:
            for _ in range(50):
                for segment in range(len(model.segments)):
                    rung.run(segment)
            device.finish()
            replays += 50
        took_s = time.perf_counter() - began_s
    return {"ms": took_s / replays * 1e3, "rows_per_s": replays * rows / took_s}


def attention(name: str, rows: int, seconds: float) -> dict[str, Any]:
    """An encoder of plain operators as weft runs it, with attention as one operator and without, beside torch's own."""
    from weft.runtime.backend import LoadOptions
    from weft.runtime.cuda import onnx_files, preparing
    from weft.runtime.cuda.gpu import Gpu

    device: Any = Gpu(0)
    found: dict[str, Any] = {"torch_ms": _torch_encoder_ms(rows, seconds)}
    fusing = onnx_files.with_attention
    for label, fuse in (("fused_ms", fusing), ("plain_ms", lambda path, folder: path)):
        onnx_files.with_attention = fuse
        options = LoadOptions(grain_s=1.0, precision="fp16", max_batch=rows)
        model: Any = preparing.prepare_on(device, exported(name), options)
        found[label] = _replayed(device, model, rows, seconds)["ms"]
        model.close()
    return found | {"rows": rows, "times_torch": found["fused_ms"] / found["torch_ms"]}


def _torch_encoder_ms(rows: int, seconds: float) -> float:
    """24 layers, 1024 wide, of 16 heads over 197 tokens, in fp16 as one CUDA graph."""
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.taken, self.given = nn.Linear(1024, 3072), nn.Linear(1024, 1024)
            self.wide, self.narrow = nn.Linear(1024, 4096), nn.Linear(4096, 1024)
            self.first, self.second = nn.LayerNorm(1024), nn.LayerNorm(1024)

        def forward(self, x: Any) -> Any:
            heads = self.taken(x).view(rows, 197, 3, 16, 64).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(*heads)
            x = self.first(x + self.given(mixed.transpose(1, 2).reshape(rows, 197, 1024)))
            return self.second(x + self.narrow(nn.functional.gelu(self.wide(x))))

    with torch.inference_mode():
        net = nn.Sequential(*(Layer() for _ in range(24))).half().cuda()
        x = torch.randn(rows, 197, 1024, device="cuda", dtype=torch.float16)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            for _ in range(3):
                net(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            net(x)
        replays, began_s = 0, time.perf_counter()
        while time.perf_counter() - began_s < seconds:
            for _ in range(20):
                graph.replay()
            torch.cuda.synchronize()
            replays += 20
        return (time.perf_counter() - began_s) / replays * 1e3


# A server and its clients


class Served:
    """A server over a few models in a process of its own."""

    def __init__(self, settings: dict[str, dict[str, Any]], memory: int = 0, file: Path | None = None) -> None:
        """settings: of each model. memory: bytes of the device that models may hold. file: the network they all are."""
        self.folder = Path(tempfile.mkdtemp(prefix="repository-", dir=FOLDER))
        for name, values in settings.items():
            (self.folder / name / "1").mkdir(parents=True)
            os.link(file or exported(name), self.folder / name / "1" / "model.onnx")
            text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
            (self.folder / name / "weft.toml").write_text(text)
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(self.folder), "--memory", str(memory)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline() or -1)
        if self.port < 0:
            raise RuntimeError("the server did not start")

    @property
    def pid(self) -> int:
        return self._process.pid

    def metrics(self) -> str:
        """What it says of itself."""
        return _exchanged(_connected(self.port), b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")[1].decode()

    def worker(self) -> int:
        """The process that has the device."""
        children = subprocess.run(
            ["ps", "-o", "pid=,comm=", "--ppid", str(self._process.pid)], capture_output=True, text=True, check=True
        ).stdout
        return next(int(line.split()[0]) for line in children.splitlines() if "weft worker" in line)

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)


def serve(folder: str, memory: int) -> None:
    """The server's process: print its port, and serve until told to stop."""
    from weft.serving.config import ServerConfig
    from weft.serving.server import fastest_loop
    from weft.serving.server import serve as serve_forever

    config = ServerConfig(
        models=(folder,), device="cuda:0", precision="fp16", http_port=0, grpc_port=None, cache=FOLDER / "cache",
        shared_memory=True, learn_s=300.0, device_memory_bytes=memory or None,
    )  # fmt: skip

    def started(server: Any) -> None:
        for slot in server.service.library.slots():
            print(slot.entry.name, slot.state, slot.message, file=sys.stderr)
            if slot.served:
                loaded = slot.served.loaded
                print(len(loaded.segments), loaded.max_batch, loaded.remarks, file=sys.stderr)
        print(server.http_port, flush=True)

    with asyncio.Runner(loop_factory=fastest_loop()) as runner:
        runner.run(serve_forever(config, None, started))


def inputs_of(name: str, rows: int) -> dict[str, np.ndarray[Any, Any]]:
    """Made-up inputs."""
    rng = np.random.default_rng(0)
    if name == "resnet50":
        return {"input": rng.standard_normal((rows, 3, 224, 224)).astype(np.float32)}
    import onnx

    found = {}
    for each in onnx.load(str(exported(name)), load_external_data=False).graph.input:
        sizes = [size.dim_value for size in each.type.tensor_type.shape.dim]
        found[each.name] = rng.integers(0, 2, [rows, *sizes[1:]]).astype(np.int64)
    return found


def request_for(name: str, rows: int, wire: str) -> tuple[bytes, Any]:
    """A request as bytes, and the memory that it needs to stay."""
    arrays, memory, body = inputs_of(name, rows), None, b""
    told: list[dict[str, Any]] = []
    if wire != "http":
        memory = _KINDS[wire](b"".join(each.tobytes() for each in arrays.values()))
    at = 0
    for key, each in arrays.items():
        kind = {"f": "FP32", "i": "INT64"}[each.dtype.kind]
        entry: dict[str, Any] = {"name": key, "shape": list(each.shape), "datatype": kind}
        if memory is not None:
            where = {"shared_memory_region": memory.name, "shared_memory_byte_size": each.nbytes}
            entry["parameters"] = where | {"shared_memory_offset": at}
            at += each.nbytes
        else:
            entry["parameters"] = {"binary_data_size": each.nbytes}
            body += each.tobytes()
        told.append(entry)
    head = json.dumps({"inputs": told, "parameters": {"binary_data_output": True}}).encode()
    text = (
        f"POST /v2/models/{name}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(head) + len(body)}\r\n"
        f"Inference-Header-Content-Length: {len(head)}\r\n\r\n"
    )
    return text.encode() + head + body, memory


class SystemMemory:
    """Bytes in shared memory of the system."""

    def __init__(self, data: bytes) -> None:
        self._memory = shared_memory.SharedMemory(create=True, size=len(data))
        self._memory.buf[: len(data)] = data
        self.name, self.size, self.kind = self._memory.name, len(data), "system"
        self.about: dict[str, Any] = {"key": f"/{self.name}", "offset": 0}

    def close(self) -> None:
        self._memory.close()
        self._memory.unlink()


class CudaMemory:
    """Bytes in memory of the GPU."""

    def __init__(self, data: bytes) -> None:
        import torch

        driver, self._address, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64(0), (ctypes.c_ubyte * 64)()
        torch.zeros(1, device="cuda")  # and so there is a context
        for failed in (
            driver.cuMemAlloc_v2(ctypes.byref(self._address), ctypes.c_size_t(len(data))),
            driver.cuMemcpyHtoD_v2(self._address, data, ctypes.c_size_t(len(data))),
            driver.cuIpcGetMemHandle(ctypes.byref(handle), self._address),
        ):
            assert not failed, f"the driver says {failed}"
        self.name, self.size, self.kind = f"gpu{self._address.value:x}", len(data), "cuda"
        self.about: dict[str, Any] = {"raw_handle": {"b64": b64encode(bytes(handle)).decode()}, "device_id": 0}
        self._free = driver.cuMemFree_v2

    def close(self) -> None:
        self._free(self._address)


_KINDS = {"memory": SystemMemory, "cuda": CudaMemory}


def _connected(port: int) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port))
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def _exchanged(connection: socket.socket, request: bytes) -> tuple[int, bytes]:
    """Send a request; the status and the body of the answer."""
    connection.sendall(request)
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(1 << 20)
        if not more:
            raise ConnectionError("the server closed the connection")
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length"))
    while len(body) < length:
        body += connection.recv(1 << 20)
    return int(head.split()[1]), body


@contextmanager
def _registered(port: int, memory: Any) -> Iterator[None]:
    """Have the server know of a region, if there is one, and take it away afterwards."""
    if memory is None:
        yield
        return

    def ask(what: str, about: dict[str, Any]) -> None:
        text, path = json.dumps(about).encode(), f"/v2/{memory.kind}sharedmemory/region/{memory.name}/{what}"
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(text)}\r\n\r\n"
        status, body = _exchanged(_connected(port), head.encode() + text)
        assert status == 200, body

    ask("register", memory.about | {"byte_size": memory.size})
    try:
        yield
    finally:
        ask("unregister", {})
        memory.close()


def _in_a_loop(port: int, request: bytes, seconds: float, told: Any) -> None:
    times_s, wrong = [], 0
    try:
        connection = _connected(port)
        _warm(connection, request)
        end_s = time.perf_counter() + seconds
        while (began_s := time.perf_counter()) < end_s:
            wrong += _exchanged(connection, request)[0] != 200
            times_s.append(time.perf_counter() - began_s)
    finally:
        told.put((times_s, wrong))


def _warm(connection: socket.socket, request: bytes) -> None:
    for _ in range(3):
        status, body = _exchanged(connection, request)
        if status != 200:
            raise RuntimeError(f"{status}: {body[:200]!r}")


def _now_and_then(port: int, request: bytes, seconds: float, every_s: float, told: Any) -> None:
    """Requests at random times; each counts from when it was due."""
    times_s, wrong = [], 0
    try:
        connection = _connected(port)
        _warm(connection, request)
        rng, due_s = np.random.default_rng(os.getpid()), time.perf_counter()
        end_s = due_s + seconds
        while (due_s := due_s + rng.exponential(every_s)) < end_s:
            while (early_s := due_s - time.perf_counter()) > 0:
                time.sleep(max(0.0, early_s - 0.0002))
            wrong += _exchanged(connection, request)[0] != 200
            times_s.append(time.perf_counter() - due_s)
    finally:
        told.put((times_s, wrong))


def _started(target: Callable[..., None], count: int, *arguments: Any) -> Callable[[], dict[str, Any]]:
    """Clients in processes of their own; what is called later gives what came of it."""
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    clients = [context.Process(target=target, args=(*arguments, told), daemon=True) for _ in range(count)]
    for each in clients:
        each.start()

    def ended() -> dict[str, Any]:
        found = [told.get() for _ in clients]
        for each in clients:
            each.join()
        times_ms = sorted(each * 1e3 for times, _ in found for each in times)
        if not times_ms:
            raise RuntimeError("no request was answered")
        return {
            "requests": len(times_ms),
            "failed": sum(wrong for _, wrong in found),
            "p50_ms": statistics.median(times_ms),
            "p99_ms": times_ms[int(0.99 * (len(times_ms) - 1))],
        }

    return ended


def served(server: Served, name: str, wire: str, rows: int, seconds: float) -> dict[str, Any]:
    """Requests of so many rows, without end."""
    request, memory = request_for(name, rows, wire)
    best: dict[str, Any] = {}
    with _registered(server.port, memory):
        for clients in (4, 12) if rows > 1 else (48,):
            found = _started(_in_a_loop, clients, server.port, request, seconds)()
            found |= {"clients": clients, "rows_per_s": found["requests"] * rows / seconds}
            best = max(best, found, key=lambda each: each.get("rows_per_s", 0.0))
    return best


def alone(server: Served, name: str, graph_ms: float, seconds: float) -> dict[str, Any]:
    request, _ = request_for(name, 1, "http")
    found = _started(_now_and_then, ASKING, server.port, request, seconds, ASKING * graph_ms / 1e3 / LOAD)()
    return found | {"graph_ms": graph_ms, "over_graph_ms": found["p50_ms"] - graph_ms}


def beside(server: Served, urgent: str, other: str, graph_ms: float, seconds: float) -> dict[str, Any]:
    quiet = alone(server, urgent, graph_ms, seconds)
    request, memory = request_for(other, 8, "memory")
    with _registered(server.port, memory):
        background = _started(_in_a_loop, 6, server.port, request, seconds + 1.0)
        time.sleep(0.5)
        busy = alone(server, urgent, graph_ms, seconds)
        rate = background()
    return {"alone": quiet, "beside": busy, "other": rate, "p99_ratio": busy["p99_ms"] / quiet["p99_ms"]}


def killed(server: Served, name: str) -> dict[str, Any]:
    request, _ = request_for(name, 1, "http")
    connection = _connected(server.port)
    assert _exchanged(connection, request)[0] == 200
    os.kill(server.worker(), signal.SIGKILL)
    began_s, refused = time.perf_counter(), 0
    while _exchanged(connection, request)[0] != 200:
        refused += 1
        time.sleep(0.02)
    return {"back_after_s": time.perf_counter() - began_s, "refused": refused}


# Rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="")
    options.add_argument("--seconds", type=float, default=3.0)
    options.add_argument("--results", type=Path, default=RESULTS)
    options.add_argument("--serve", default="")
    options.add_argument("--memory", type=int, default=0)
    options.add_argument("--bare", default="")
    options.add_argument("--attention", default="")
    given = options.parse_args()
    FOLDER.mkdir(exist_ok=True)
    if given.serve:
        serve(given.serve, given.memory)
    elif given.attention:
        print(json.dumps(attention(given.attention, 16, given.seconds)))
    elif given.bare:
        print(json.dumps(bare(given.bare, given.seconds)))
    else:
        measure(given.only, given.seconds, given.results)


def measure(only: str, seconds: float, results: Path) -> None:
    kept = json.loads(results.read_text()) if results.exists() else {"machine": _machine(), "rows": {}}
    rows: dict[str, Any] = kept["rows"]

    def row(key: str, run: Callable[[], dict[str, Any]]) -> None:
        if key in rows or only not in key:
            return
        try:
            rows[key] = run()
        except Exception as error:  # a row that fails is told, and the next one is measured
            print(f"{key}: {type(error).__name__}: {error}", file=sys.stderr)
            return
        print(key, json.dumps(rows[key]), flush=True)
        results.write_text(json.dumps(kept, indent=1) + "\n")

    for name in MODELS:
        for count in ROWS:
            row(f"bare/{name}/{count}", lambda name=name, count=count: _apart("--bare", name, seconds)[str(count)])
    row("attention/bert-large/16", lambda: _apart("--attention", "bert-large", seconds))
    slo = {"resnet50": {"slo_ms": 1000.0, "max_batch": 32}, "bert-base": {"slo_ms": 2.0, "max_batch": 32}}
    server = Served(slo)
    try:
        for name in MODELS:
            for wire in ("cuda", "memory", "http"):
                for count in ROWS:
                    row(
                        f"served/{name}/{wire}/{count}",
                        lambda n=name, w=wire, c=count: served(server, n, w, c, seconds),
                    )
        for name in MODELS:
            graph_ms = rows[f"bare/{name}/1"]["whole"]["ms"]
            row(f"alone/{name}", lambda name=name, ms=graph_ms: alone(server, name, ms, seconds))
        row("killed/resnet50", lambda: killed(server, "resnet50"))
        device = [each for each in server.metrics().splitlines() if each.startswith("weft_device_")]
        print("\n".join(device), flush=True)
    finally:
        server.close()
    graph_ms = rows["bare/bert-base/1"]["whole"]["ms"]
    for grain_ms in (0.25, 0.0625):
        key = f"beside/bert-base/resnet50 cut at {grain_ms} ms"
        row(key, lambda grain_ms=grain_ms: _beside_cut_at(grain_ms, slo, graph_ms, seconds))


def _beside_cut_at(grain_ms: float, settings: dict[str, Any], graph_ms: float, seconds: float) -> dict[str, Any]:
    server = Served(settings | {"resnet50": settings["resnet50"] | {"grain_ms": grain_ms}})
    try:
        return beside(server, "bert-base", "resnet50", graph_ms, seconds)
    finally:
        server.close()


@cache
def _apart(what: str, name: str, seconds: float) -> dict[str, Any]:
    """Something without a server in a process of its own, which gives the device's memory back."""
    command = [sys.executable, __file__, what, name, "--seconds", str(seconds)]
    found: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return found


def _machine() -> dict[str, object]:
    gpu = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    return machine("torch", "onnxruntime-gpu", "onnx") | {"gpu": gpu}


if __name__ == "__main__":
    main()
