"""Triton's own four clients, told apart by nothing but their name, and the models that they ask for.

What a client of the protocol sees is the same over HTTP and gRPC, blocking and asynchronous: ``Client`` hides how
each of them spells it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from tests.serving import live
from tests.serving.chain import chain
from tests.support.references import run_session, session

utils = pytest.importorskip("tritonclient.utils")

CLIENTS = ("http", "http.aio", "grpc", "grpc.aio")

CODES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    413: "RESOURCE_EXHAUSTED",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
"""Status of HTTP -> what gRPC calls the same."""

KINDS = {
    "BOOL": (TensorProto.BOOL, np.bool_),
    "INT8": (TensorProto.INT8, np.int8),
    "INT16": (TensorProto.INT16, np.int16),
    "INT32": (TensorProto.INT32, np.int32),
    "INT64": (TensorProto.INT64, np.int64),
    "UINT8": (TensorProto.UINT8, np.uint8),
    "UINT16": (TensorProto.UINT16, np.uint16),
    "UINT32": (TensorProto.UINT32, np.uint32),
    "UINT64": (TensorProto.UINT64, np.uint64),
    "FP16": (TensorProto.FLOAT16, np.float16),
    "FP32": (TensorProto.FLOAT, np.float32),
    "FP64": (TensorProto.DOUBLE, np.float64),
    "BYTES": (TensorProto.STRING, np.object_),
}


# Models


def echo(path: Path) -> Path:
    """Gives back one input of every type there is."""
    nodes, ins, outs = [], [], []
    for name, (kind, _) in KINDS.items():
        ins.append(helper.make_tensor_value_info(name.lower(), kind, ["n", 3]))
        outs.append(helper.make_tensor_value_info(f"same_{name.lower()}", kind, ["n", 3]))
        nodes.append(helper.make_node("Identity", [ins[-1].name], [outs[-1].name]))
    return live.save(helper.make_graph(nodes, "echo", ins, outs), path)


def unmeasured(path: Path) -> Path:
    """Runs in one piece; with no shapes given, the server cannot foresee how long."""
    graph = helper.make_graph(
        [helper.make_node("ReduceMean", ["x"], ["y"], axes=[1, 2], keepdims=0)],
        "unmeasured",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "rows", 512])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])],
    )
    return live.save(graph, path)


def repository(folder: Path) -> Path:
    """mlp, echo, unmeasured, and chain: cut into several segments, with room for one request that waits."""
    live.mlp(folder / "mlp.onnx")
    (folder / "mlp.toml").write_text("max_batch = 8\n")
    echo(folder / "echo.onnx")
    unmeasured(folder / "unmeasured.onnx")
    chain(folder / "chain.onnx", "queue_size = 1\n")
    return folder


def x(rows: int = 2, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, 64)).astype(np.float32)


def expected(folder: Path, array: np.ndarray) -> np.ndarray:
    return run_session(session(folder / "mlp.onnx"), {"x": array})["y"]


def values(kind: str) -> np.ndarray:
    """Two rows of a type, its limits among them."""
    dtype = np.dtype(KINDS[kind][1])
    if kind == "BYTES":
        return np.array([[b"", b"a", "grüß".encode()], [b"\x00", b"x" * 300, b"end"]], np.object_)
    if kind == "BOOL":
        return np.array([[True, False, True], [False, False, True]])
    limits = np.iinfo(dtype) if dtype.kind in "iu" else np.finfo(dtype)
    return np.array([[limits.min, 0, limits.max], [1, 2, 3]], dtype)


def assert_every_datatype(answer: Any, decoded: Callable[[np.ndarray], np.ndarray] = lambda strings: strings) -> None:
    """The echo gave back ``values``; *decoded* makes bytes of the strings that a client may have got."""
    for kind in KINDS:
        got = answer.as_numpy(f"same_{kind.lower()}")
        got = decoded(got) if kind == "BYTES" else got
        assert got.dtype == KINDS[kind][1] and got.shape == (2, 3), kind
        assert got.tolist() == values(kind).tolist(), kind


# Clients


class Blocking:
    """An asynchronous client that waits for every answer, so that the same tests go for both kinds."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._loop = asyncio.new_event_loop()
        self.inner = self.wait(self._made(make))

    @staticmethod
    async def _made(make: Callable[[], Any]) -> Any:
        return make()

    def wait(self, awaitable: Any) -> Any:
        return self._loop.run_until_complete(awaitable)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.inner, name)

        @functools.wraps(attribute)
        def call(*args: Any, **kwargs: Any) -> Any:
            answer = attribute(*args, **kwargs)
            return self.wait(answer) if inspect.isawaitable(answer) else answer

        return call

    def close(self) -> None:
        self.wait(self.inner.close())
        self.wait(self._loop.shutdown_asyncgens())
        self._loop.close()


class Client:
    """One of the four clients; whatever it is told comes as JSON would give it."""

    def __init__(self, name: str, server: live.Live, trusted: Path | None = None) -> None:
        """*trusted*: the certificate of a server that speaks TLS."""
        self.protocol, _, asynchronous = name.partition(".")
        self._library = pytest.importorskip(f"tritonclient.{self.protocol}")
        address = server.address if self.protocol == "http" else server.grpc_address
        make = import_module(f"tritonclient.{name}").InferenceServerClient
        made = functools.partial(make, address, **(_trust(name, trusted) if trusted else {}))
        self.inner = Blocking(made) if asynchronous else made()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.inner, name)

        def plainly(*args: Any, headers: dict[str, str] | None = None, **kwargs: Any) -> Any:
            given = {"headers": dict(headers)} if headers else {}  # the client over HTTP writes into them
            return told(call(*args, **given, **kwargs))

        return plainly

    def tensor(self, name: str, array: np.ndarray, datatype: str | None = None, **options: Any) -> Any:
        kind = datatype or utils.np_to_triton_dtype(array.dtype)
        made = self._library.InferInput(name, list(array.shape), kind)
        made.set_data_from_numpy(array, **options)
        return made

    def shared(self, name: str, shape: list[int], region: str, size: int, offset: int = 0, kind: str = "FP32") -> Any:
        """An input in shared memory."""
        made = self._library.InferInput(name, shape, kind)
        made.set_shared_memory(region, size, offset)
        return made

    def shared_output(self, name: str, region: str, size: int, offset: int = 0) -> Any:
        """An output that shall lie in shared memory."""
        made = self._library.InferRequestedOutput(name)
        made.set_shared_memory(region, size, offset)
        return made

    def output(self, name: str, **options: Any) -> Any:
        return self._library.InferRequestedOutput(name, **options)

    def packed(self, algorithm: str) -> dict[str, str]:
        """What compresses a request, and its answer."""
        if self.protocol == "grpc":
            return {"compression_algorithm": algorithm}
        return {f"{part}_compression_algorithm": algorithm for part in ("request", "response")}

    @contextlib.contextmanager
    def refused(self, *statuses: int, match: str | None = None) -> Iterator[None]:
        """What happens inside is answered with one of these."""
        with pytest.raises(utils.InferenceServerException, match=match) as error:
            yield
        spelled = [str(each) if self.protocol == "http" else f"StatusCode.{CODES[each]}" for each in statuses]
        assert error.value.status() in spelled


def _trust(name: str, certificate: Path) -> dict[str, Any]:
    if name.startswith("grpc"):
        return {"ssl": True, "root_certificates": str(certificate)}
    if name == "http":
        return {"ssl": True, "ssl_options": {"ca_certs": str(certificate)}}
    return {"ssl": True, "ssl_context": ssl.create_default_context(cafile=str(certificate))}


def told(answer: Any) -> Any:
    """What a message of gRPC says, as HTTP says it; anything else as it is."""
    if isinstance(answer, Mapping):
        return {key: told(each) for key, each in answer.items()}
    if not hasattr(answer, "DESCRIPTOR"):
        return [told(each) for each in answer] if hasattr(answer, "MergeFrom") else answer
    if "parameter_choice" in answer.DESCRIPTOR.oneofs_by_name:
        return getattr(answer, answer.WhichOneof("parameter_choice"))
    found = {field.name: _field(field, getattr(answer, field.name)) for field in answer.DESCRIPTOR.fields}
    return next(iter(found.values())) if list(found) in (["config"], ["models"]) else found


def _field(field: Any, value: Any) -> Any:
    if field.enum_type and isinstance(value, int):
        return field.enum_type.values_by_number[value].name
    return told(value)


def certificate(place: Path) -> tuple[Path, Path]:
    """A certificate that signs itself, for the loopback address, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the openssl command is not installed")
    cert, key = place / "cert.pem", place / "key.pem"
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key
