"""Real models out of installed packages, and a transformer, served together: bit for bit what ONNX Runtime gives."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
import pytest

from tests.serving import live
from weft.models import zoo
from weft.models.packaged import packaged_models
from weft.runtime.tensors import DATATYPES

NAMES = ("pp-ocr-det", "pp-ocr-cls", "pp-ocr-rec", "silero-vad", "magika")
SHAPES: dict[str, dict[str, list[tuple[int, ...]]]] = {
    "pp-ocr-det": {"x": [(1, 3, 64, 64), (1, 3, 96, 160), (2, 3, 64, 96), (1, 3, 64, 64), (1, 3, 32, 320)]},
    "pp-ocr-cls": {"x": [(1, 3, 48, 192), (3, 3, 48, 192), (1, 3, 32, 100), (1, 3, 48, 192)]},
    "pp-ocr-rec": {"x": [(1, 3, 48, 320), (1, 3, 48, 100), (2, 3, 48, 64), (1, 3, 48, 333), (1, 3, 48, 320)]},
    "magika": {"bytes": [(1, 2048), (2, 2048), (5, 2048)]},
}
"""What the models are asked for: their own sizes and others, one size twice."""

PICTURES = (
    ("pp-ocr-det", [1, 3, 96, 96], "grain_ms = 1.0\nmax_batch = 1\n"),
    ("pp-ocr-cls", [1, 3, 32, 100], ""),
    ("pp-ocr-rec", [1, 3, 48, 64], ""),
)
"""What models of pictures are measured at, and other settings of theirs."""

CHAIN_WIDTH = 128
LONG_ROWS = 3
"""Requests for the chain with so many rows occupy the lane for as long as a test wants."""

Arrays = Mapping[str, np.ndarray]


# Talking to a server without a client library


class Reply(NamedTuple):
    status: int
    headers: Any
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Refused(Exception):
    """An answer that is no result."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(f"{reply.status} {reply.body.decode()}")
        self.status = reply.status


def send(server: live.Live | str, method: str, path: str, body: bytes | Any = b"", headers: Any = None) -> Reply:
    """One request over a connection of its own."""
    address = server if isinstance(server, str) else server.address
    connection = http.client.HTTPConnection(address, timeout=live.PATIENCE_S)
    try:
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return Reply(answer.status, answer.headers, answer.read())
    finally:
        connection.close()


def packed(arrays: Arrays, **parameters: Any) -> tuple[bytes, dict[str, str]]:
    """A request with binary tensors both ways: its body and its headers."""
    kinds = {dtype: name for name, dtype in DATATYPES.items()}
    parts = [np.ascontiguousarray(each).tobytes() for each in arrays.values()]
    inputs = [
        {
            "name": name,
            "shape": each.shape,
            "datatype": kinds[each.dtype],
            "parameters": {"binary_data_size": len(part)},
        }
        for (name, each), part in zip(arrays.items(), parts, strict=True)
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True, **parameters}}).encode()
    return b"".join([head, *parts]), {"Inference-Header-Content-Length": str(len(head))}


def unpacked(reply: Reply) -> dict[str, np.ndarray]:
    """The tensors of an answer."""
    at = int(reply.headers["Inference-Header-Content-Length"])
    found = {}
    for each in json.loads(reply.body[:at])["outputs"]:
        end = at + each["parameters"]["binary_data_size"]
        found[each["name"]] = np.frombuffer(reply.body[at:end], DATATYPES[each["datatype"]]).reshape(each["shape"])
        at = end
    assert at == len(reply.body)
    return found


def infer(server: live.Live | str, name: str, arrays: Arrays, **parameters: Any) -> dict[str, np.ndarray]:
    body, headers = packed(arrays, **parameters)
    reply = send(server, "POST", f"/v2/models/{name}/infer", body, headers)
    if reply.status != 200:
        raise Refused(reply)
    return unpacked(reply)


def state(server: live.Live | str) -> Any:
    return send(server, "GET", "/weft/state").json()


def model(server: live.Live, name: str) -> Any:
    return next(each for each in state(server)["models"] if each["name"] == name)


def failures(server: live.Live, reason: str) -> int:
    return int(state(server)["totals"]["failures"].get(reason, 0))


def until(found: Callable[[], Any], what: str) -> Any:
    """Wait for something that must come."""
    end_s = time.monotonic() + live.PATIENCE_S
    while not (result := found()):
        assert time.monotonic() < end_s, f"waited in vain: {what}"
        time.sleep(0.01)
    return result


# Keeping a server busy


def chain(path: Path, settings: str = "") -> Path:
    """A model of several segments, on a machine of any speed."""
    live.heavy(path, layers=24, width=CHAIN_WIDTH, rows="n")  # type: ignore[arg-type]
    path.with_suffix(".toml").write_text(f"grain_ms = 0.0001\nmax_pieces = 8\nmax_batch = 1\n{settings}")
    return path


def chain_request(rows: int, **parameters: Any) -> bytes:
    """A whole HTTP request for the chain, with binary data, as bytes."""
    size = rows * CHAIN_WIDTH * 4
    x = {"name": "x", "shape": [rows, CHAIN_WIDTH], "datatype": "FP32", "parameters": {"binary_data_size": size}}
    header = json.dumps({"inputs": [x], "parameters": parameters}).encode()
    head = (
        f"POST /v2/models/chain/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(header) + size}\r\n"
        f"Inference-Header-Content-Length: {len(header)}\r\n\r\n"
    )
    return head.encode() + header + np.full(rows * CHAIN_WIDTH, 0.5, np.float32).tobytes()


def computed(server: live.Live, since: float) -> list[str]:
    """The segments of long requests for the chain that were run, as "3/16"."""
    spans = send(server, "GET", f"/weft/timeline?since={since}").json()["spans"]
    return [span["segment"] for span in spans if span["model"] == "chain" and span["batch"] == LONG_ROWS]


@contextlib.contextmanager
def occupied(server: live.Live) -> Iterator[None]:
    """The only lane is in the second segment of the chain until the block ends, when who asked for it leaves.

    All others are due later.
    """
    address = "127.0.0.1", server.server.http_port or 0
    with live.Gate(server, "chain", LONG_ROWS, after=1) as gate:
        with socket.create_connection(address, timeout=live.PATIENCE_S) as client:
            client.sendall(chain_request(LONG_ROWS, weft_slo_ms=0.001))
            gate.wait()
            yield
        until(lambda: not state(server)["lanes"][0]["busy"], "the lane is free")


# Comparing


def session(path: Path) -> ort.InferenceSession:
    """What we compare with: plain ONNX Runtime, with as many threads as the server has."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def plain(reference: ort.InferenceSession, arrays: Arrays) -> dict[str, np.ndarray]:
    names = [each.name for each in reference.get_outputs()]
    return dict(zip(names, reference.run(names, dict(arrays)), strict=True))


def assert_same_bits(got: Arrays, wanted: Arrays) -> None:
    assert list(got) == list(wanted)
    for name, each in wanted.items():
        assert (got[name].dtype, got[name].shape) == (each.dtype, each.shape)
        assert got[name].tobytes() == each.tobytes(), name


# The models


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = packaged_models()
    missing = [name for name in NAMES if name not in found]
    if missing:
        pytest.skip(f"not installed (requirements-models.txt): {', '.join(missing)}")
    bert = tmp_path_factory.mktemp("zoo") / "small-bert.onnx"
    zoo.export("bert-base", bert, layers=2, hidden=128, heads=2, seq_len=16)
    return {name: found[name] for name in NAMES} | {"small-bert": bert}


@pytest.fixture(scope="module")
def references(files: dict[str, Path]) -> dict[str, ort.InferenceSession]:
    return {name: session(path) for name, path in files.items()}


@pytest.fixture(scope="module")
def server(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[live.Live]:
    """Some by their names; those of pictures are measured at smaller ones, the largest model alone, to save time."""
    repository = tmp_path_factory.mktemp("repository")
    for name, shape, more in PICTURES:
        shutil.copy(files[name], repository / f"{name}.onnx")
        (repository / f"{name}.toml").write_text(f"shapes = {{ x = {shape} }}\n{more}")
    with live.running(repository, *NAMES[3:], files["small-bert"], grpc_port=None) as running:
        yield running


def requests(name: str, references: Mapping[str, ort.InferenceSession]) -> Iterator[dict[str, np.ndarray]]:
    """Inputs for a model, at several of the sizes it takes."""
    rng = np.random.default_rng(len(name))
    if name == "small-bert":
        for rows in (1, 2, 1):
            yield {
                each.name: rng.integers(0, 2 if "type" in each.name else 1000, (rows, *each.shape[1:])).astype(
                    np.int64 if each.type == "tensor(int64)" else np.int32
                )
                for each in references[name].get_inputs()
            }
    elif name == "magika":
        for shape in SHAPES[name]["bytes"]:
            yield {"bytes": rng.integers(0, 257, shape).astype(np.int32)}
    else:
        for shape in SHAPES[name]["x"]:
            yield {"x": rng.normal(size=shape).astype(np.float32)}


STATELESS = ("pp-ocr-det", "pp-ocr-cls", "pp-ocr-rec", "magika", "small-bert")


def check(server: live.Live, name: str, references: Mapping[str, ort.InferenceSession]) -> None:
    for arrays in requests(name, references):
        assert_same_bits(infer(server, name, arrays), plain(references[name], arrays))


def listen(server: live.Live, reference: ort.InferenceSession, *, rows: int, steps: int) -> None:
    """Let the voice detector hear a few pieces of sound; what it remembers travels with the requests."""
    rng = np.random.default_rng(rows)
    ours = theirs = np.zeros((2, rows, 128), np.float32)
    for _ in range(steps):
        heard = {"input": rng.normal(size=(rows, 576)).astype(np.float32), "sr": np.array(16000, np.int64)}
        wanted = plain(reference, heard | {"state": theirs})
        got = infer(server, "silero-vad", heard | {"state": ours})
        assert_same_bits(got, wanted)
        ours, theirs = got["stateN"], wanted["stateN"]
    assert np.abs(ours).max() > 0


@pytest.mark.parametrize("name", STATELESS)
def test_one_after_another(server: live.Live, references: dict[str, ort.InferenceSession], name: str) -> None:
    check(server, name, references)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_model_with_a_memory(server: live.Live, references: dict[str, ort.InferenceSession], rows: int) -> None:
    listen(server, references["silero-vad"], rows=rows, steps=4)


def test_all_at_once(server: live.Live, references: dict[str, ort.InferenceSession]) -> None:
    """A thread for each model, so that their segments mix and no two requests share a batch."""
    problems: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            problems.append(error)

    work: list[Callable[[], None]] = [lambda: listen(server, references["silero-vad"], rows=1, steps=6)]
    work += [lambda name=name: check(server, name, references) for name in STATELESS]  # type: ignore[misc]
    threads = [threading.Thread(target=run, args=(each,)) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_a_size_the_model_cannot_take_is_the_clients_mistake(server: live.Live) -> None:
    with pytest.raises(Refused, match="pp-ocr-rec") as refused:
        infer(server, "pp-ocr-rec", {"x": np.zeros((1, 3, 100, 100), np.float32)})
    assert refused.value.status == 400
    for shape in ((1, 3, 40, 72), (1, 4, 64, 64)):  # one that half of the segments take, and one that none takes
        with pytest.raises(Refused, match=r"pp-ocr-det|input 'x'") as refused:
            infer(server, "pp-ocr-det", {"x": np.zeros(shape, np.float32)})
        assert refused.value.status == 400


def test_every_model_is_measured_and_none_has_failed(server: live.Live) -> None:
    for each in state(server)["models"]:
        assert each["state"] == "ready", each
        assert set(each["failures"]) <= {"bad_request"}, each
        assert each["requests"] > 0
