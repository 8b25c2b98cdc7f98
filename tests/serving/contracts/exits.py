"""Samples that leave at early exits: what clients are answered."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client

from tests.runtime.exit_nets import CLASSES, EXITS, Alone, conv_net, samples, token_net
from tests.serving.live import Live, running
from weft.engine.policies import POLICIES
from weft.serving.exit_rules import CONFIDENCE, EXIT

REFILLING = [name for name, policy in POLICIES.items() if policy.traits.refills]

COUNT = 40
"""Samples there are to send."""


@pytest.fixture(scope="module")
def nets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nets")
    return {"conv": conv_net(folder / "conv.onnx"), "token": token_net(folder / "token.onnx")}


class References(dict):
    """By net: the samples, and of each what every exit gives when it is alone, and how sure it is."""

    def __repr__(self) -> str:
        return "references"


@pytest.fixture(scope="module")
def references(nets) -> References:
    found = References()
    for name, shape in (("conv", (1, 6, 6)), ("token", (4, 6))):
        inputs, session = samples(COUNT, shape), Alone(nets[name])
        found[name] = inputs, [session.exits(each[None]) for each in inputs]
    return found


def check_answer(
    outcome: dict[str, np.ndarray], wanted: list[list[tuple[np.ndarray, float]]], threshold: float
) -> None:
    """Every row took the first exit at which it is sure, and has what that exit gives to it alone."""
    assert list(outcome) == ["logits", EXIT, CONFIDENCE]
    assert outcome[EXIT].dtype == np.int64 and outcome[CONFIDENCE].dtype == np.float32
    assert outcome["logits"].shape == (len(wanted), CLASSES) and outcome[EXIT].shape == (len(wanted),)
    for answer, number, sure, exits in zip(outcome["logits"], outcome[EXIT], outcome[CONFIDENCE], wanted, strict=True):
        reference, confident = exits[number - 1]
        assert answer.argmax() == reference.argmax()
        np.testing.assert_allclose(answer, reference, rtol=1e-4, atol=1e-5)
        assert sure == pytest.approx(confident, abs=1e-5)
        assert number == len(EXITS) or sure >= threshold
        assert all(before < threshold + 1e-5 for _, before in exits[: number - 1]), "it could have left before"


def repository(folder: Path) -> Path:
    """Three models: exits named in the settings, exits named in the file with a record beside it, and probabilities."""
    conv_net(folder / "conv.onnx")
    (folder / "conv.toml").write_text(
        'exits = ["exit1", "exit2", "logits"]\nexit_threshold = 0.7\nmax_batch = 4\nslo_ms = 5000\ngrain_ms = 1e6\n'
    )
    conv_net(folder / "marked" / "1" / "model.onnx", seed=3, marked=True)
    rng = np.random.default_rng(0)
    np.savez(
        folder / "marked" / "1" / "record.npz",
        confidence=rng.random((200, 3)),
        correct=rng.random((200, 3)) < [0.5, 0.7, 0.9],
    )
    (folder / "marked" / "weft.toml").write_text('exit_record = "record.npz"\nexit_floor = 0.4\nmax_batch = 4\n')
    token_net(folder / "plain.onnx")
    return folder


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> dict[str, Any]:
    """A repository and a cache for several servers."""
    folder = tmp_path_factory.mktemp("served")
    return {"models": repository(folder / "models"), "cache": folder / "cache"}


@pytest.fixture(scope="module")
def live(stored):
    with running(stored["models"], cache=stored["cache"], policy="fluid") as started:
        yield started


def infer(live: Live, inputs: np.ndarray, model: str = "conv", **more: Any) -> dict[str, Any]:
    """The JSON answer to a request in JSON; a refusal is raised."""
    tensor = {"name": "x", "datatype": "FP32", "shape": list(inputs.shape), "data": inputs.ravel().tolist()}
    body = json.dumps({"inputs": [tensor], **more}).encode()
    request = urllib.request.Request(f"{live.url}/v2/models/{model}/infer", body)
    with urllib.request.urlopen(request) as answer:
        return dict(json.loads(answer.read()))


def outputs_of(answer: dict[str, Any]) -> dict[str, np.ndarray]:
    kinds = {"FP32": np.float32, "INT64": np.int64}
    return {
        each["name"]: np.array(each["data"], kinds[each["datatype"]]).reshape(each["shape"])
        for each in answer["outputs"]
    }


def metrics(live: Live) -> dict[str, float]:
    with urllib.request.urlopen(f"{live.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_answers_carry_exit_confidence_and_threshold(live, references):
    inputs, wanted = references["conv"]
    for at in range(COUNT):
        answer = infer(live, inputs[at : at + 1])
        check_answer(outputs_of(answer), [wanted[at]], 0.7)
        assert answer["parameters"]["weft_exit_threshold"] == 0.7
    many = infer(live, inputs, parameters={"weft_exit_threshold": 0.9})
    check_answer(outputs_of(many), wanted, 0.9)
    assert many["parameters"]["weft_exit_threshold"] == 0.9 and len(set(outputs_of(many)["weft_exit"].tolist())) == 3


def test_the_threshold_moves_the_exits(live, references):
    inputs, _ = references["conv"]
    taken_at = [
        outputs_of(infer(live, inputs, parameters={"weft_exit_threshold": threshold}))["weft_exit"]
        for threshold in (1e-9, 0.5, 0.7, 0.9, 1.1)
    ]
    assert set(taken_at[0]) == {1} and set(taken_at[-1]) == {3}
    for lower, higher in pairwise(taken_at):
        assert (lower <= higher).all() and (lower < higher).any()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_clients_of_the_protocol_get_the_same(live, references, protocol):
    inputs, wanted = references["conv"]
    client, address = (http_client, live.address) if protocol == "http" else (grpc_client, live.grpc_address)
    server = client.InferenceServerClient(address)
    tensor = client.InferInput("x", list(inputs[:8].shape), "FP32")
    tensor.set_data_from_numpy(inputs[:8])
    answer = server.infer("conv", [tensor], parameters={"weft_exit_threshold": 0.8})
    check_answer({name: answer.as_numpy(name) for name in ("logits", EXIT, CONFIDENCE)}, wanted[:8], 0.8)
    parameters = answer.get_response()["parameters"] if protocol == "http" else answer.get_response().parameters
    used = parameters["weft_exit_threshold"]
    assert (used if protocol == "http" else used.double_param) == 0.8
    with pytest.raises(Exception, match="weft_exit_threshold = -1"):
        server.infer("conv", [tensor], parameters={"weft_exit_threshold": -1})
    server.close()


@pytest.mark.parametrize("policy", [*REFILLING, "adaptive", "punctual"])
def test_many_clients_at_once_get_what_each_would_get_alone(stored, references, policy):
    inputs, wanted = references["conv"]
    settings = {"policy": policy, "cache": stored["cache"], "grpc_port": None}
    with running(stored["models"], **settings) as live:
        client = http_client.InferenceServerClient(live.address, concurrency=8)
        pending = []
        for at in range(COUNT):
            rows = 1 + (at % 7 == 0)
            tensor = http_client.InferInput("x", [rows, *inputs.shape[1:]], "FP32")
            tensor.set_data_from_numpy(np.resize(inputs[at : at + rows], (rows, *inputs.shape[1:])))
            pending.append((at, rows, client.async_infer("conv", [tensor], parameters={"weft_slo_ms": 2000})))
        for at, rows, request in pending:
            answer = request.get_result()
            places = [at + row if at + row < COUNT else at for row in range(rows)]
            found = {name: answer.as_numpy(name) for name in ("logits", EXIT, CONFIDENCE)}
            check_answer(found, [wanted[place] for place in places], 0.7)
        client.close()
        counted = metrics(live)
        rows = sum(rows for _, rows, _ in pending)
        assert sum(counted[f'weft_exits_total{{model="conv",version="1",exit="{n}"}}'] for n in (1, 2, 3)) == rows
        assert counted['nv_inference_count{model="conv",version="1"}'] == rows
        assert counted['nv_inference_request_success{model="conv",version="1"}'] == COUNT
