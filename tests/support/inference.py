"""Requests to a server that runs in a test."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tests.serving import live
from weft.runtime.tensors import DATATYPES

Arrays = Mapping[str, np.ndarray]


class Reply(NamedTuple):
    status: int
    headers: Any
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Refused(Exception):
    """The reply to a request that got no result."""

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
    """The binary tensors of a reply."""
    at = int(reply.headers["Inference-Header-Content-Length"])
    tensors = {}
    for output in json.loads(reply.body[:at])["outputs"]:
        end = at + output["parameters"]["binary_data_size"]
        tensor = np.frombuffer(reply.body[at:end], DATATYPES[output["datatype"]])
        tensors[output["name"]] = tensor.reshape(output["shape"])
        at = end
    assert at == len(reply.body)
    return tensors


def infer(server: live.Live | str, name: str, arrays: Arrays, **parameters: Any) -> dict[str, np.ndarray]:
    """The outputs of a model, sent and returned as binary tensors. ``Refused`` if there is no result."""
    body, headers = packed(arrays, **parameters)
    reply = send(server, "POST", f"/v2/models/{name}/infer", body, headers)
    if reply.status != 200:
        raise Refused(reply)
    return unpacked(reply)


def infer_json(server: live.Live | str, name: str, arrays: Arrays) -> list[dict[str, Any]]:
    """The outputs of a model as the JSON reply has them, for float32 inputs. ``Refused`` if there is no result."""
    inputs = [
        {"name": input_name, "shape": array.shape, "datatype": "FP32", "data": array.ravel().tolist()}
        for input_name, array in arrays.items()
    ]
    reply = send(server, "POST", f"/v2/models/{name}/infer", {"inputs": inputs})
    if reply.status != 200:
        raise Refused(reply)
    outputs: list[dict[str, Any]] = reply.json()["outputs"]
    return outputs


def infer_fp32(server: live.Live | str, name: str, arrays: Arrays) -> np.ndarray:
    """The only output of a model for float32 inputs that are sent as JSON."""
    (output,) = infer_json(server, name, arrays)
    return np.array(output["data"], np.float32).reshape(output["shape"])


def state(server: live.Live | str) -> Any:
    """The server's state, as ``/weft/state`` gives it."""
    return send(server, "GET", "/weft/state").json()


def model_state(server: live.Live, name: str) -> Any:
    return next(model for model in state(server)["models"] if model["name"] == name)


def failures(server: live.Live, reason: str) -> int:
    """How many requests have failed for this reason."""
    return int(state(server)["totals"]["failures"].get(reason, 0))


def load_model(server: live.Live, name: str) -> int:
    """Load a model, and return the status of the reply."""
    return send(server, "POST", f"/v2/repository/models/{name}/load").status


def unload_model(server: live.Live | str, name: str) -> int:
    """Unload a model, and return the status of the reply."""
    return send(server, "POST", f"/v2/repository/models/{name}/unload").status


def metric(server: live.Live, name: str) -> float:
    """The sum of a metric over its labels."""
    lines = send(server, "GET", "/metrics").body.decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name) and line[len(name)] in " {")


def timeline_spans(server: live.Live) -> list[Any]:
    """The spans of the server's whole timeline."""
    return list(send(server, "GET", "/weft/timeline?since=0").json()["spans"])
