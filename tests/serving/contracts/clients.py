"""What every client of the protocol sees, whichever of Triton's own four it is; and what it is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.serving import live
from tests.serving.chain import CHAIN_WIDTH, occupied
from tests.serving.clients import CLIENTS, KINDS, Client, assert_every_datatype, expected, told, values, x
from tests.support.concurrency import Background, until
from tests.support.inference import failures, infer, model_state, state


@pytest.fixture(params=CLIENTS)
def speaks(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(speaks: str, server: live.Live) -> Iterator[Client]:
    with contextlib.closing(Client(speaks, server)) as made:
        yield made


@pytest.fixture
def stranger(speaks: str, guarded: live.Live) -> Iterator[Client]:
    """Talks to a server that wants a key."""
    with contextlib.closing(Client(speaks, guarded)) as made:
        yield made


# What a client asks


def test_health_and_readiness(client: Client) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("mlp")
    assert client.is_model_ready("mlp", "1")


def test_server_metadata(client: Client) -> None:
    found = client.get_server_metadata()
    assert found["name"] == "weft"
    assert {"binary_tensor_data", "model_repository", "statistics", "schedule_policy"} <= set(found["extensions"])


@pytest.mark.parametrize("version", ["", "1"])
def test_model_metadata(client: Client, version: str) -> None:
    found = client.get_model_metadata("mlp", version)
    assert found["name"] == "mlp" and found["versions"] == ["1"]
    assert found["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 64]}]
    assert found["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [-1, 10]}]


def test_metadata_names_every_datatype(client: Client) -> None:
    found = client.get_model_metadata("echo")
    assert [each["datatype"] for each in found["inputs"]] == list(KINDS)


def test_model_config(client: Client) -> None:
    found = client.get_model_config("chain")
    assert found["name"] == "chain" and found["backend"] == "onnxruntime"
    assert [each["name"] for each in found["input"]] == ["x"] and [each["name"] for each in found["output"]] == ["y"]
    assert found["input"][0]["data_type"] == "TYPE_FP32"
    assert found["parameters"]["weft_queue_size"]["string_value"] == "1"
    assert client.get_model_config("mlp", "1")["max_batch_size"] == 8


def test_repository_index(client: Client) -> None:
    rows = {row["name"]: row for row in client.get_model_repository_index()}
    assert set(rows) == {"mlp", "echo", "unmeasured", "chain"}
    assert {row["state"] for row in rows.values()} == {"READY"}
    assert {row["version"] for row in rows.values()} == {"1"}


def test_load_and_unload(client: Client) -> None:
    client.unload_model("echo")
    assert not client.is_model_ready("echo")
    rows = {row["name"]: row for row in client.get_model_repository_index()}
    assert rows["echo"]["state"] == "UNAVAILABLE" and "unloaded" in rows["echo"]["reason"]
    with client.refused(404):
        client.infer("echo", [client.tensor("bool", values("BOOL"))])
    client.load_model("echo")
    assert client.is_model_ready("echo")
    with client.refused(400, 404, match="nobody"):
        client.load_model("nobody")


def test_statistics(client: Client) -> None:
    before = client.get_inference_statistics("mlp")["model_stats"][0]
    client.infer("mlp", [client.tensor("x", x(3))])
    after = client.get_inference_statistics("mlp", "1")["model_stats"][0]
    assert after["name"] == "mlp" and after["version"] == "1"
    assert after["inference_count"] == before["inference_count"] + 3
    assert after["execution_count"] == before["execution_count"] + 1
    assert after["inference_stats"]["success"]["count"] == before["inference_stats"]["success"]["count"] + 1
    assert after["inference_stats"]["compute_infer"]["ns"] > before["inference_stats"]["compute_infer"]["ns"]
    assert after["last_inference"] > 0
    assert {each["name"] for each in client.get_inference_statistics()["model_stats"]} >= {"mlp", "chain"}


def test_failures_are_in_the_statistics(client: Client) -> None:
    def failed() -> int:
        return int(client.get_inference_statistics("mlp")["model_stats"][0]["inference_stats"]["fail"]["count"])

    before = failed()
    with client.refused(400):
        client.infer("mlp", [client.tensor("x", np.zeros((1, 65), np.float32))])
    assert failed() == before  # it is the client's, not the model's
    with client.refused(504):
        client.infer("mlp", [client.tensor("x", x())], timeout=1)
    assert failed() == before + 1


# Inference


def test_infer_gives_what_onnxruntime_gives(client: Client, folder: Path) -> None:
    answer = client.infer(
        "mlp", [client.tensor("x", x())], outputs=[client.output("y")], request_id="a-17", model_version="1"
    )
    found = told(answer.get_response())
    assert (found["model_name"], found["model_version"], found["id"]) == ("mlp", "1", "a-17")
    assert found["parameters"]["weft_batch"] >= 1
    assert answer.as_numpy("y").tobytes() == expected(folder, x()).tobytes()


def test_every_datatype_comes_back_as_it_went(client: Client) -> None:
    assert_every_datatype(client.infer("echo", [client.tensor(kind.lower(), values(kind), kind) for kind in KINDS]))


def test_only_the_outputs_asked_for_come_and_in_that_order(client: Client) -> None:
    inputs = [client.tensor(kind.lower(), values(kind), kind) for kind in KINDS]
    outputs = [client.output(name) for name in ("same_int64", "same_bytes", "same_bool")]
    answer = client.infer("echo", inputs, outputs=outputs)
    assert [each["name"] for each in told(answer.get_response())["outputs"]] == [each.name() for each in outputs]
    for kind in ("INT64", "BYTES", "BOOL"):
        assert answer.as_numpy(f"same_{kind.lower()}").tolist() == values(kind).tolist()
    assert answer.as_numpy("same_fp32") is None


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests(client: Client, folder: Path, algorithm: str) -> None:
    answer = client.infer("mlp", [client.tensor("x", x(8))], **client.packed(algorithm))
    assert answer.as_numpy("y").tobytes() == expected(folder, x(8)).tobytes()


def test_a_deadline_a_priority_and_best_effort(client: Client, server: live.Live) -> None:
    def counted() -> int:
        totals = state(server)["totals"]
        return int(totals["deadline_met"] + totals["deadline_missed"])

    before = counted()
    inputs = [client.tensor("x", x())]
    client.infer("mlp", inputs, parameters={"weft_best_effort": True})
    client.infer("mlp", inputs, priority=3)
    assert counted() == before
    client.infer("mlp", inputs, parameters={"weft_slo_ms": 60000})
    client.infer("mlp", inputs, priority=1, timeout=600_000_000)
    assert counted() == before + 2


# What is wrong


WRONG = {
    "shape": ("x", np.zeros((1, 63), np.float32), "63"),
    "rank": ("x", np.zeros(64, np.float32), "shape"),
    "datatype": ("x", np.zeros((1, 64), np.int32), "INT32"),
    "name": ("z", np.zeros((1, 64), np.float32), "'z'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_request_that_does_not_fit_the_model(client: Client, what: str) -> None:
    name, array, word = WRONG[what]
    with client.refused(400, match=word):
        client.infer("mlp", [client.tensor(name, array)])


def test_inputs_outputs_and_parameters_that_cannot_be(client: Client) -> None:
    with client.refused(400):
        client.infer("mlp", [])
    with client.refused(400, match="nothing"):
        client.infer("mlp", [client.tensor("x", x())], outputs=[client.output("nothing")])
    for parameters in ({"weft_slo_ms": -1}, {"weft_slo_ms": "soon"}, {"weft_best_effort": 1}):
        with client.refused(400, match="weft_"):
            client.infer("mlp", [client.tensor("x", x())], parameters=parameters)


def test_unknown_models_and_versions(client: Client) -> None:
    calls: list[Callable[[], object]] = [
        lambda: client.infer("nobody", [client.tensor("x", x())]),
        lambda: client.infer("mlp", [client.tensor("x", x())], model_version="9"),
        lambda: client.get_model_metadata("nobody"),
        lambda: client.get_model_config("mlp", "9"),
        lambda: client.get_inference_statistics("nobody"),
    ]
    for call in calls:
        with client.refused(404):
            call()


# Deadlines and queues


def test_a_deadline_that_cannot_be_met_is_refused_at_once(client: Client, server: live.Live) -> None:
    before = failures(server, "unmeetable")
    with client.refused(504, match="cannot be met"):
        client.infer("mlp", [client.tensor("x", x())], timeout=1)
    assert failures(server, "unmeetable") == before + 1
    with occupied(server), client.refused(504, match="cannot be met"):
        client.infer("mlp", [client.tensor("x", x())], timeout=50_000)
    assert failures(server, "unmeetable") == before + 2


def test_a_deadline_that_passes_in_the_queue(speaks: str, server: live.Live) -> None:
    """The lane is busy with what nobody could foresee, so the request is taken, and waits in vain."""

    def ask() -> None:
        with contextlib.closing(Client(speaks, server)) as client, client.refused(504, match="deadline passed"):
            client.infer("mlp", [client.tensor("x", x())], timeout=600_000_000)

    before = failures(server, "expired")
    with live.Gate(server, "unmeasured", 1, foreseen=False) as gate:
        long = Background(lambda: infer(server, "unmeasured", {"x": np.ones((1, 2, 512), np.float32)}))
        gate.wait()
        waiting = Background(ask)
        until(lambda: model_state(server, "mlp")["queued"] == 1, "it waits")
        with server.leapt(600):
            waiting.result()
    assert long.result()["y"].tolist() == [1]
    assert failures(server, "expired") == before + 1


def test_a_full_queue_refuses(client: Client, server: live.Live) -> None:
    before, ones = failures(server, "queue_full"), np.ones((1, CHAIN_WIDTH), np.float32)
    with occupied(server):
        waiting = Background(lambda: infer(server, "chain", {"x": ones}))
        until(lambda: model_state(server, "chain")["queued"] == 1, "one request waits")
        with client.refused(503, match="queue size"):
            client.infer("chain", [client.tensor("x", ones)])
        assert failures(server, "queue_full") == before + 1
    assert waiting.result()["y"].shape == (1, CHAIN_WIDTH)


# Keys, limits, TLS


@pytest.mark.parametrize(
    "headers", [None, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}, {"authorization": "Basic x"}]
)
def test_without_its_key_nobody_gets_in(stranger: Client, headers: dict[str, str] | None) -> None:
    assert stranger.is_server_live() and stranger.is_server_ready()
    calls: list[Callable[[], object]] = [
        lambda: stranger.infer("mlp", [stranger.tensor("x", x())], headers=headers),
        lambda: stranger.get_model_metadata("mlp", headers=headers),
        lambda: stranger.get_model_repository_index(headers=headers),
        lambda: stranger.unload_model("mlp", headers=headers),
    ]
    for call in calls:
        with stranger.refused(401):
            call()


@pytest.mark.parametrize("headers", [{"authorization": "Bearer open-sesame"}, {"x-api-key": "open-sesame"}])
def test_with_its_key_everything_works(stranger: Client, folder: Path, headers: dict[str, str]) -> None:
    answer = stranger.infer("mlp", [stranger.tensor("x", x())], headers=headers)
    assert answer.as_numpy("y").tobytes() == expected(folder, x()).tobytes()
    assert stranger.is_model_ready("mlp", headers=headers)
    assert stranger.get_server_metadata(headers=headers)["name"] == "weft"


def test_a_body_beyond_the_limit(stranger: Client) -> None:
    key = {"x-api-key": "open-sesame"}
    stranger.infer("mlp", [stranger.tensor("x", x(100))], headers=key)
    with stranger.refused(413, match="limit|larger than max"):
        stranger.infer("mlp", [stranger.tensor("x", x(1000))], headers=key)
    with stranger.refused(413, match="limit|larger than max"):
        zeros = stranger.tensor("x", np.zeros((10000, 64), np.float32))  # a few kB, until it is unpacked
        stranger.infer("mlp", [zeros], headers=key, **stranger.packed("gzip"))


def test_tls(speaks: str, encrypted: live.Live, trusted: tuple[Path, Path], folder: Path) -> None:
    with contextlib.closing(Client(speaks, encrypted, trusted[0])) as client:
        assert client.is_server_live()
        answer = client.infer("mlp", [client.tensor("x", x())])
        assert answer.as_numpy("y").tobytes() == expected(folder, x()).tobytes()
