"""Inference servers of others, each with two models set up by its documentation: how to install, start and query it.

All run ONNX Runtime with one thread per model and may use every core. Each gets the request that costs it least: weft
and Triton the protocol's binary tensors, Ray Serve the bytes alone, MLServer and LitServe base64 in JSON, because they
accept no binary bodies.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from chaos import infer_tensors, post
from processes import Process, family, marked, ticks_s

from weft.serving.process import ServerProcess

SERVERS = Path(__file__).parent / "peers"
START_S, STOP_S = 180.0, 20.0
MARK = "WEFT_PEER"
"""A variable by which all processes of a peer are known, whoever started them."""


class Model(NamedTuple):
    """What all of them serve."""

    name: str
    path: str
    input: str
    shape: tuple[int, ...]
    output: str
    made: tuple[int, ...]
    slo_ms: float | None
    """Told to whom can be told; None: it may take its time."""

    def tensor(self) -> Any:
        return np.random.default_rng(0).normal(size=self.shape).astype(np.float32)


class Running(NamedTuple):
    """A server that answers."""

    url: str
    mark: str
    pid: int

    def cpu_s(self) -> float:
        """Processor time so far of all its processes."""
        return ticks_s(self.members())

    def members(self) -> list[Process]:
        known = {process.pid: process for process in family(self.pid)}
        return list((known | {process.pid: process for process in (marked(self.mark) if self.mark else [])}).values())


@dataclass(frozen=True)
class Peer:
    """A server that is installed into an environment of its own."""

    name: str
    packages: tuple[str, ...]
    tuned: str
    """How it is set up, and why."""

    def command(self, python: Path, folder: Path, models: list[Model], port: int) -> list[str]:
        raise NotImplementedError

    def environment(self, python: Path, folder: Path) -> dict[str, str]:
        return {}

    def request(self, model: Model) -> bytes:
        raise NotImplementedError

    def numbers(self, model: Model, body: bytes) -> Any:
        """What an answer says."""
        raise NotImplementedError

    @contextlib.contextmanager
    def running(self, python: Path, folder: Path, models: list[Model]) -> Iterator[Running]:
        """It answers when the block begins, and all its processes have ended when it has."""
        port, mark = free_port(), f"{MARK}={uuid.uuid4().hex}"
        command = self.command(python, folder, models, port)
        variables = dict([mark.split("=")]) | self.environment(python, folder)
        with open(folder / "log", "w") as log:
            process = subprocess.Popen(
                command, env=os.environ | variables, cwd=folder, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        try:
            self._wait(process, folder / "log", models, port)
            yield Running(f"http://127.0.0.1:{port}", mark, process.pid)
        finally:
            _stop(process, mark)

    def _wait(self, process: subprocess.Popen[bytes], log: Path, models: list[Model], port: int) -> None:
        """Until it answers for every model."""
        until_s = time.monotonic() + START_S
        for model in models:
            while _exchange(port, self.request(model))[0] != 200:
                if process.poll() is not None or time.monotonic() > until_s:
                    raise RuntimeError(f"{self.name} did not start: {log.read_text()[-1500:]}")
                time.sleep(0.3)

    def check(self, url: str, model: Model, expected: Any) -> None:
        """Refuse a server that computes something else."""
        status, body = _exchange(int(url.rpartition(":")[2]), self.request(model))
        if status != 200 or not np.allclose(self.numbers(model, body).ravel(), expected.ravel(), atol=1e-4):
            raise RuntimeError(f"{self.name}: {model.name}: another answer than ONNX Runtime's ({status})")


@dataclass(frozen=True)
class Weft(Peer):
    """weft itself, of this checkout."""

    options: tuple[str, ...] = ()

    def request(self, model: Model) -> bytes:
        told = {"weft_best_effort": True} if model.slo_ms is None else {"weft_slo_ms": model.slo_ms}
        return infer_tensors(model.name, {model.input: model.tensor()}, **told)

    def numbers(self, model: Model, body: bytes) -> Any:
        return np.frombuffer(body[-4 * int(np.prod(model.made)) :], np.float32)

    @contextlib.contextmanager
    def running(self, python: Path, folder: Path, models: list[Model]) -> Iterator[Running]:
        with ServerProcess(*(model.name for model in models), *self.options) as server:
            yield Running(server.url, "", server.pid)


@dataclass(frozen=True)
class MlServer(Peer):
    """A pool of workers for each model."""

    def command(self, python: Path, folder: Path, models: list[Model], port: int) -> list[str]:
        ports = {"http_port": port, "grpc_port": free_port(), "metrics_port": free_port()}
        settings = {**ports, "host": "127.0.0.1", "parallel_workers": 1, "debug": False}
        (folder / "settings.json").write_text(json.dumps(settings))
        for model in models:
            (folder / model.name).mkdir()
            extra = {"shape": list(model.shape)}
            parameters = {"uri": model.path, "extra": extra, "inference_pool_gid": model.name}
            settings = {
                "name": model.name,
                "implementation": "mlserver_onnx.PackedOnnxModel",
                "parameters": parameters,
            }
            (folder / model.name / "model-settings.json").write_text(json.dumps(settings))
        return [str(python.parent / "mlserver"), "start", str(folder)]

    def environment(self, python: Path, folder: Path) -> dict[str, str]:
        return {"PYTHONPATH": str(SERVERS)}

    def request(self, model: Model) -> bytes:
        text = base64.b64encode(model.tensor().tobytes()).decode()
        tensor = {"name": model.input, "shape": [1], "datatype": "BYTES", "data": [text]}
        body = json.dumps({"inputs": [tensor]}).encode()
        return post(f"/v2/models/{model.name}/infer", body, "Content-Type: application/json\r\n")

    def numbers(self, model: Model, body: bytes) -> Any:
        return np.array(json.loads(body)["outputs"][0]["data"], np.float32)


@dataclass(frozen=True)
class LitServe(Peer):
    """A process for each model."""

    def command(self, python: Path, folder: Path, models: list[Model], port: int) -> list[str]:
        return [str(python), str(SERVERS / "litserve_two.py"), str(_listed(folder, models)), str(port)]

    def request(self, model: Model) -> bytes:
        body = json.dumps({"data": base64.b64encode(model.tensor().tobytes()).decode()}).encode()
        return post(f"/{model.name}", body, "Content-Type: application/json\r\n")

    def numbers(self, model: Model, body: bytes) -> Any:
        return np.array(json.loads(body)["data"], np.float32)


@dataclass(frozen=True)
class RayServe(Peer):
    """A replica for each model."""

    def command(self, python: Path, folder: Path, models: list[Model], port: int) -> list[str]:
        listed = _listed(folder, models)
        return [str(python), str(SERVERS / "ray_two.py"), str(listed), str(port), str(folder / "ray")]

    def environment(self, python: Path, folder: Path) -> dict[str, str]:
        return {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}

    def request(self, model: Model) -> bytes:
        return post(f"/{model.name}", model.tensor().tobytes(), "Content-Type: application/octet-stream\r\n")

    def numbers(self, model: Model, body: bytes) -> Any:
        return np.frombuffer(body, np.float32)


@dataclass(frozen=True)
class Triton(Peer):
    """The binary that the package nvidia-pytriton carries, with its Python backend: an instance for each model."""

    def command(self, python: Path, folder: Path, models: list[Model], port: int) -> list[str]:
        home = _packages(python) / "pytriton" / "tritonserver"
        for model in models:
            version = folder / "models" / model.name / "1"
            version.mkdir(parents=True)
            (version / "model.py").write_text((SERVERS / "triton_onnx.py").read_text())
            (version.parent / "model.onnx").symlink_to(model.path)
            (version.parent / "config.pbtxt").write_text(_pbtxt(model))
        _with_stub(home, folder / "backends")
        ports = [f"--http-port={port}", "--http-address=127.0.0.1", "--allow-grpc=false", "--allow-metrics=false"]
        where = [f"--model-repository={folder / 'models'}", f"--backend-directory={folder / 'backends'}"]
        return [str(home / "bin" / "tritonserver"), *where, *ports]

    def environment(self, python: Path, folder: Path) -> dict[str, str]:
        libraries = [_packages(python) / "nvidia_pytriton.libs", sysconfig.get_config_var("LIBDIR")]
        return {
            "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
            "PYTHONPATH": str(_packages(python)),
            "PATH": f"{python.parent}:{os.environ['PATH']}",
        }

    def request(self, model: Model) -> bytes:
        return infer_tensors(model.name, {model.input: model.tensor()})

    def numbers(self, model: Model, body: bytes) -> Any:
        return np.frombuffer(body[-4 * int(np.prod(model.made)) :], np.float32)


PEERS: tuple[Peer, ...] = (
    Weft("weft", (), "one lane, as by default on two cores", ("--lanes", "1")),
    Weft("weft, two lanes", (), "two lanes", ("--lanes", "2")),
    MlServer(
        "MLServer",
        ("mlserver==1.7.1", "onnxruntime", "uvloop<0.22"),
        "a worker process for each model (inference_pool_gid); a uvloop with which its workers start",
    ),
    LitServe("LitServe", ("litserve==0.2.19", "onnxruntime"), "a worker process for each model"),
    RayServe("Ray Serve", ("ray[serve]==2.60.0", "onnxruntime"), "a replica for each model, no access log"),
    Triton(
        "Triton",
        ("nvidia-pytriton==0.7.0", "onnxruntime", "numpy<2"),
        "the binary inside nvidia-pytriton; Python backend (it has no other), an instance for each model",
    ),
)


def install(peer: Peer, folder: Path) -> Path:
    """An environment with a peer in it, made where there is none yet; its python."""
    python = folder / "bin" / "python"
    if not (folder / "done").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *peer.packages]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{peer.name} cannot be installed: {done.stderr[-500:]}")
        (folder / "done").touch()
    return python


def versions(peer: Peer, python: Path) -> dict[str, str]:
    """Package -> version of what was asked for."""
    names = [package.partition("==")[0].partition("<")[0].partition("[")[0] for package in peer.packages]
    script = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    told = subprocess.run([str(python), "-c", script, *names], capture_output=True, text=True, check=True)
    return dict(zip(names, told.stdout.split(), strict=True))


def free_port() -> int:
    """A port that the system chose a moment ago, for servers that cannot ask for one themselves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listed(folder: Path, models: list[Model]) -> Path:
    path = folder / "models.json"
    path.write_text(json.dumps([{"name": model.name, "path": model.path, "shape": model.shape} for model in models]))
    return path


def _pbtxt(model: Model) -> str:
    sides = (("input", model.input, model.shape), ("output", model.output, model.made))
    parts = [f'{side} [{{ name: "{name}" data_type: TYPE_FP32 dims: {list(shape)} }}]' for side, name, shape in sides]
    group = "instance_group [{ count: 1 kind: KIND_CPU }]"
    return "\n".join([f'name: "{model.name}"', 'backend: "python"', "max_batch_size: 0", *parts, group]) + "\n"


def _with_stub(home: Path, folder: Path) -> None:
    """Triton's Python backend, with the process that runs this version of Python."""
    shutil.copytree(home / "backends", folder)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy(home / "python_backend_stubs" / version / "triton_python_backend_stub", folder / "python")


def _packages(python: Path) -> Path:
    """Where an environment keeps what is installed."""
    return next((python.parents[1] / "lib").glob("python*")) / "site-packages"


def _exchange(port: int, request: bytes) -> tuple[int, bytes]:
    """Send one request; status and body of the answer, 0 where there is none."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(request)
            data = b""
            while b"\r\n\r\n" not in data and (piece := connection.recv(65536)):
                data += piece
            head, _, body = data.partition(b"\r\n\r\n")
            length = _length(head)
            while len(body) < length and (piece := connection.recv(65536)):
                body += piece
            return int(head[9:12] or 0), body
    except OSError:
        return 0, b""


def _length(head: bytes) -> int:
    results = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return int(results[0].partition(b":")[2]) if results else 0


def _stop(process: subprocess.Popen[bytes], mark: str) -> None:
    """Ask it to end, and end whatever is left of it."""
    if process.poll() is None:  # else the number may be another's by now
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    for each in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each.pid, signal.SIGKILL)
    process.wait()
