"""Shared by the scripts gpu_*.py: servers on a GPU, clients that send requests, and results that are stored row by row.

The server and every client run in processes of their own. Run as a script, this is weft's server over a repository.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import multiprocessing
import os
import queue
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from machine import machine

NETWORKS: dict[str, tuple[str, dict[str, int | str]]] = {
    "resnet50": ("resnet50", {}),
    "bert-base": ("bert-base", {"seq_len": 128}),
    "bert-large-16": ("bert-large", {"seq_len": 16}),
    "encoder-24": ("bert-large", {"seq_len": 197}),
}
"""Name here -> network of the zoo and its parameters."""
OCR, OCR_SIDE = "pp-ocr-det", 640
"""A detector of text, and the pixels of its pictures; it makes a map as large of each."""
MAP = "pixel-map"
"""Three convolutions over such pictures, which also make a map: little is computed for many bytes in and out."""
FOLDER = Path(tempfile.gettempdir()) / "weft-gpu-serving"
START_S = 600.0
"""How long a server may take until it can be asked."""
ANSWER_S = 60.0
"""How long an answer may take, and clients to end."""


def exported(name: str) -> Path:
    """A network as a file, in a folder of its own."""
    path = FOLDER / "models" / name / "1" / "model.onnx"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        if name == MAP:
            _write_map(path)
            return path
        from weft.models import zoo

        network, parameters = NETWORKS[name]
        zoo.export(network, path, **parameters)
    return path


def _write_map(path: Path) -> None:
    """x [n, 3, side, side] -> y [n, 1, side, side]."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng, nodes, weights, read = np.random.default_rng(0), [], [], "x"
    for at, (channels, made) in enumerate(((3, 16), (16, 16), (16, 1))):
        kernel = rng.standard_normal((made, channels, 3, 3)).astype(np.float32) / (9 * channels) ** 0.5
        weights.append(numpy_helper.from_array(kernel, f"w{at}"))
        nodes.append(helper.make_node("Conv", [read, f"w{at}"], [f"c{at}"], pads=[1, 1, 1, 1]))
        read = "y" if made == 1 else f"r{at}"
        nodes.append(helper.make_node("Sigmoid" if made == 1 else "Relu", [f"c{at}"], [read]))
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", channels, OCR_SIDE, OCR_SIDE])
        for name, channels in (("x", 3), ("y", 1))
    ]
    graph = helper.make_graph(nodes, MAP, ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))


def provide_ocr(file: Path | None) -> bool:
    """Have the detector where exported networks are, from a file or its package; False where there is neither."""
    from weft.models.packaged import packaged_models

    source, path = file or packaged_models().get(OCR), FOLDER / "models" / OCR / "1" / "model.onnx"
    if source is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)
    return source is not None


def end_when_told() -> None:
    """Have SIGTERM end this process as an error does, so that no server is left behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


def describe_device(device: str) -> dict[str, object]:
    """The machine, its versions and its GPU; the twin of one is the machine's cores."""
    if device.endswith("twin"):
        return machine("onnxruntime", "onnx") | {"gpu": device}
    gpu = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    engine = "onnxruntime-gpu" if "CUDAExecutionProvider" in ort.get_available_providers() else "onnxruntime"
    return machine("torch", engine, "onnx") | {"gpu": gpu}


class Rows:
    """Results by name, written to a file as soon as they are measured; what is there is not measured again."""

    def __init__(self, file: Path, only: str, device: str) -> None:
        """only: a part of the names of those that are measured."""
        self._file, self._only = file, only
        self.kept = json.loads(file.read_text()) if file.exists() else {"machine": describe_device(device), "rows": {}}
        self.found: dict[str, Any] = self.kept["rows"]

    def is_missing(self, key: str) -> bool:
        return key not in self.found and self._only in key

    def measure(self, key: str, run: Callable[[], dict[str, Any]]) -> None:
        if not self.is_missing(key):
            return
        try:
            self.found[key] = run()
        except Exception as error:  # a row that fails is told, and the next one is measured
            print(f"{key}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            return
        print(key, json.dumps(self.found[key]), flush=True)
        self.write()

    def measure_on(self, start: Callable[[], Running], runs: Mapping[str, Callable[[Any], dict[str, Any]]]) -> None:
        """Rows over one server, which is started if any of them is missing."""
        wanted = [key for key in runs if self.is_missing(key)]
        if not wanted:
            return
        try:
            server = start()
        except RuntimeError as error:
            print(f"{', '.join(wanted)}: {error}", file=sys.stderr, flush=True)
            return
        try:
            for key in wanted:
                self.measure(key, lambda key=key: runs[key](server))
        finally:
            server.close()

    def write(self) -> None:
        self._file.write_text(json.dumps(self.kept, indent=1) + "\n")


# Servers


class Running:
    """A server in a process of its own; the first line that it prints says in JSON at which port it can be asked."""

    def __init__(self, command: Sequence[str]) -> None:
        self._name, began_s = Path(command[0]).name, time.perf_counter()
        self._process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
        late = threading.Timer(START_S, self._process.kill)
        late.start()
        assert self._process.stdout is not None
        try:
            line = self._process.stdout.readline()
        except BaseException:
            self._process.kill()
            raise
        finally:
            late.cancel()
            late.join()
        if not line:
            raise RuntimeError(f"{self._name} ended with {self._process.wait()} before it could be asked")
        self.told: dict[str, Any] = json.loads(line)
        self.port = int(self.told["port"])
        print(f"{self._name}: ready after {time.perf_counter() - began_s:.0f} s", file=sys.stderr, flush=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Served(Running):
    """weft over a few models."""

    def __init__(
        self,
        settings: Mapping[str, Mapping[str, Any]],
        memory: int = 0,
        file: Path | None = None,
        *,
        device: str = "cuda:0",
        policy: str = "punctual",
        gates: bool = False,
    ) -> None:
        """settings: of each model. memory: bytes of the device that models may hold. file: the network they all are."""
        self.folder = Path(tempfile.mkdtemp(prefix="repository-", dir=FOLDER))
        for name, values in settings.items():
            source, target = file or exported(name), self.folder / name / "1" / "model.onnx"
            target.parent.mkdir(parents=True)
            os.link(source, target)
            if (weights := source.with_name(source.name + ".data")).exists():
                shutil.copyfile(weights, target.with_name(weights.name))  # onnx takes none with a second name
            text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
            (self.folder / name / "weft.toml").write_text(text)
        command = [__file__, str(self.folder), "--device", device, "--memory", str(memory), "--policy", policy]
        super().__init__([*command, "--gates"] if gates else command)
        if failed := self.told["failed"]:
            self.close()
            raise RuntimeError("; ".join(f"{name}: {why}" for name, why in failed.items()))

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.folder)

    def graph_ms(self, name: str) -> float:
        """How long one row of a model takes there, without anything around it."""
        return float(self.told["graph_ms"][name])

    def metrics(self) -> str:
        """What it says of itself."""
        return exchanged(connected(self.port), b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")[1].decode()

    def worker(self) -> int:
        """The process that has the device."""
        children = subprocess.run(
            ["ps", "-o", "pid=,comm=", "--ppid", str(self.pid)], capture_output=True, text=True, check=True
        ).stdout
        return next(int(line.split()[0]) for line in children.splitlines() if "weft worker" in line)


def main() -> None:
    """The process of weft's server: say where it can be asked, and serve until told to stop."""
    from weft.serving.config import ServerConfig
    from weft.serving.server import fastest_loop, serve

    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder")
    options.add_argument("--device", default="cuda:0")
    options.add_argument("--memory", type=int, default=0)
    options.add_argument("--policy", default="punctual")
    options.add_argument("--gates", action="store_true")
    arguments = options.parse_args()
    config = ServerConfig(
        models=(arguments.folder,), device=arguments.device, precision="fp16", http_port=0, grpc_port=None,
        cache=FOLDER / "cache", shared_memory=True, learn_s=300.0, device_memory_bytes=arguments.memory or None,
        policy=arguments.policy, gates=arguments.gates,
    )  # fmt: skip

    def started(server: Any) -> None:
        graph_ms, failed = {}, {}
        for slot in server.service.library.slots():
            print(slot.entry.name, slot.state, slot.message, file=sys.stderr, flush=True)
            if slot.served:
                loaded = slot.served.loaded
                graph_ms[slot.entry.name] = sum(loaded.timing.times_at(1)) * 1e3
                print(len(loaded.segments), loaded.batching.max_batch, loaded.remarks, file=sys.stderr, flush=True)
            if slot.state == "failed" or "runs on the CPU" in slot.message:
                failed[slot.entry.name] = slot.message
        print(json.dumps({"port": server.http_port, "graph_ms": graph_ms, "failed": failed}), flush=True)

    with asyncio.Runner(loop_factory=fastest_loop()) as runner:
        runner.run(serve(config, None, started))


# Requests


def _graph(name: str) -> Any:
    import onnx

    return onnx.load(str(exported(name)), load_external_data=False).graph


def inputs_of(name: str, rows: int) -> dict[str, np.ndarray[Any, Any]]:
    """Made-up inputs."""
    rng, found = np.random.default_rng(0), {}
    for tensor in _graph(name).input:
        kind = tensor.type.tensor_type
        sizes = [rows, *(size.dim_value or OCR_SIDE for size in kind.shape.dim[1:])]
        floats = kind.elem_type == 1
        found[tensor.name] = rng.standard_normal(sizes, np.float32) if floats else rng.integers(0, 2, sizes)
    return found


def request_for(name: str, rows: int, wire: str, answer_bytes: int = 0) -> tuple[bytes, Any]:
    """A request as bytes, and the memory that it needs to stay; wire: ``http``, or where inputs lie.

    answer_bytes: of the only output, to have it written to that memory, too; 0: it is sent.
    """
    arrays = inputs_of(name, rows)
    tensors = b"".join(array.tobytes() for array in arrays.values())
    given_back = (rows * 4 * OCR_SIDE**2 if name in (OCR, MAP) else answer_bytes) if wire != "http" else 0
    memory: Any = None if wire == "http" else _KINDS[wire](tensors + bytes(given_back))

    def place(at: int, size: int) -> dict[str, Any]:
        if memory is None:
            return {"binary_data_size": size}
        where = {"shared_memory_region": memory.name, "shared_memory_byte_size": size}
        return where | {"shared_memory_offset": at}

    inputs, at = [], 0
    for key, array in arrays.items():
        kind = {"f": "FP32", "i": "INT64"}[array.dtype.kind]
        inputs.append({"name": key, "shape": array.shape, "datatype": kind, "parameters": place(at, array.nbytes)})
        at += array.nbytes
    told: dict[str, Any] = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    if given_back:
        told["outputs"] = [{"name": _graph(name).output[0].name, "parameters": place(at, given_back)}]
    text = json.dumps(told).encode()
    body = text + (tensors if memory is None else b"")
    head = (
        f"POST /v2/models/{name}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        f"Inference-Header-Content-Length: {len(text)}\r\n\r\n"
    )
    return head.encode() + body, memory


def tensor_in(body: bytes) -> bytes:
    """The bytes of the outputs in an answer."""
    _, end = json.JSONDecoder().raw_decode(body.decode("latin-1"))
    return body[end:]


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


@contextmanager
def registered(port: int, memory: Any) -> Iterator[None]:
    """Have the server know of a region, if there is one, and take it away afterwards."""
    if memory is None:
        yield
        return

    def ask(what: str, about: dict[str, Any]) -> None:
        text, path = json.dumps(about).encode(), f"/v2/{memory.kind}sharedmemory/region/{memory.name}/{what}"
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(text)}\r\n\r\n"
        with connected(port) as connection:
            status, body = exchanged(connection, head.encode() + text)
        assert status == 200, body

    ask("register", memory.about | {"byte_size": memory.size})
    try:
        yield
    finally:
        ask("unregister", {})
        memory.close()


# Clients


def connected(port: int) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), ANSWER_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def exchanged(connection: socket.socket, request: bytes) -> tuple[int, bytes]:
    """Send a request; the status and the body of the answer."""
    connection.sendall(request)
    data = b""
    while b"\r\n\r\n" not in data:
        data += _received(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length"))
    while len(body) < length:
        body += _received(connection)
    return int(head.split()[1]), body


def _received(connection: socket.socket) -> bytes:
    data = connection.recv(1 << 20)
    if not data:
        raise ConnectionError("the server closed the connection")
    return data


def clients(
    count: int, port: int, request: bytes, seconds: float, every_s: float = 0.0
) -> Callable[[], dict[str, Any]]:
    """Start clients, each with one connection on which it asks again and again; the call returned gives what came.

    every_s: they ask at random times, so far apart on average, the same times in every run, and a request counts from
    when it was due; else as soon as they have their answer.
    """
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    asking = [
        context.Process(target=_client, args=(port, request, seconds, every_s, seed, told), daemon=True)
        for seed in range(count)
    ]
    for each in asking:
        each.start()
    until_s = time.monotonic() + seconds + ANSWER_S

    def ended() -> dict[str, Any]:
        try:
            results = [told.get(timeout=max(0.0, until_s - time.monotonic())) for _ in asking]
        except queue.Empty:
            raise RuntimeError(f"a client has not ended {ANSWER_S:g} s after its time") from None
        finally:
            for client in asking:
                client.terminate()
                client.join()
        times_ms = sorted(time_s * 1e3 for times, _ in results for time_s in times)
        if not times_ms:
            raise RuntimeError("no request was answered")
        return {
            "requests": len(times_ms),
            "failed": sum(wrong for _, wrong in results),
            "per_s": len(times_ms) / seconds,
            "p50_ms": statistics.median(times_ms),
            "p99_ms": times_ms[int(0.99 * (len(times_ms) - 1))],
        }

    return ended


def _client(port: int, request: bytes, seconds: float, every_s: float, seed: int, told: Any) -> None:
    times_s, wrong = list[float](), 0
    try:
        connection = connected(port)
        for _ in range(3):
            status, body = exchanged(connection, request)
            if status != 200:
                raise RuntimeError(f"{status}: {body[:200]!r}")
        for due_s in _dues(seconds, every_s, seed):
            if exchanged(connection, request)[0] == 200:
                times_s.append(time.perf_counter() - due_s)
            else:
                wrong += 1
    except Exception as error:
        wrong += 1
        print(f"a client: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        told.put((times_s, wrong))


def _dues(seconds: float, every_s: float, seed: int) -> Iterator[float]:
    """When requests are due, from now on."""
    due_s = time.perf_counter()
    end_s = due_s + seconds
    while not every_s and (due_s := time.perf_counter()) < end_s:
        yield due_s
    rng = np.random.default_rng(seed)
    while every_s and (due_s := due_s + rng.exponential(every_s)) < end_s:
        while (early_s := due_s - time.perf_counter()) > 0:
            time.sleep(max(0.0, early_s - 0.0002))
        yield due_s


if __name__ == "__main__":
    main()
