"""What clients of Triton ask of a server beyond inference: classes, settings, packed answers, health, counts."""

from __future__ import annotations

import contextlib
import gzip
import json
import queue
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serving import live
from tests.serving.clients import CLIENTS, Client, echo, expected, values, x
from tests.support.concurrency import until
from tests.support.inference import send
from weft.serving import grpc_health
from weft.serving.grpc_health import NOT_SERVING, SERVICE_UNKNOWN, SERVING, HealthCheckRequest, HealthCheckResponse
from weft.serving.json_text import QUICK_BYTES

triton = pytest.importorskip("tritonclient.grpc")

LABELS = ["zero", "one", "two"]
INFER = "/v2/models/mlp/infer"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mlp, whose classes have labels, and echo."""
    found = tmp_path_factory.mktemp("repository")
    live.mlp(found / "mlp.onnx")
    (found / "mlp.toml").write_text('max_batch = 4\nslo_ms = 60000\n[labels]\ny = "digits.txt"\n')
    (found / "digits.txt").write_text("\n".join(LABELS))
    echo(found / "echo.onnx")
    live.mlp(found / "spare.onnx", hidden=16)
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[live.Live]:
    with live.running(folder) as running:
        yield running


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest, server: live.Live) -> Iterator[Client]:
    with contextlib.closing(Client(request.param, server)) as made:
        yield made


def asked(array: np.ndarray, **more: Any) -> dict[str, Any]:
    """A request in JSON for mlp."""
    data = array.ravel().tolist()
    return {"inputs": [{"name": "x", "shape": array.shape, "datatype": "FP32", "data": data}], **more}


# Classes


def classes(row: np.ndarray, count: int) -> list[bytes]:
    """What a row's classes are."""
    found = []
    for index in np.argsort(-row, kind="stable")[:count].tolist():
        label = f":{LABELS[index]}" if index < len(LABELS) else ""
        found.append(f"{row[index]:f}:{index}{label}".encode())
    return found


def test_the_largest_elements_of_an_output_come_as_classes(client: Client, folder: Path) -> None:
    answer = client.infer("mlp", [client.tensor("x", x())], outputs=[client.output("y", class_count=3)])
    found, wanted = answer.as_numpy("y"), expected(folder, x())
    assert found.shape == (2, 3)
    for row, told in zip(wanted, found, strict=True):
        assert [each.partition(b":")[2] for each in told] == [each.partition(b":")[2] for each in classes(row, 3)]
        np.testing.assert_allclose([float(each.split(b":")[0]) for each in told], np.sort(row)[::-1][:3], atol=2e-6)


def test_classes_come_in_json_too(server: live.Live) -> None:
    outputs = [{"name": "y", "parameters": {"classification": 10}}]
    reply = send(server, "POST", INFER, asked(x(1), outputs=outputs))
    (output,) = reply.json()["outputs"]
    assert (output["datatype"], output["shape"]) == ("BYTES", [1, 10])
    assert sorted(int(each.split(":")[1]) for each in output["data"]) == list(range(10))
    assert sum(each.endswith(tuple(LABELS)) for each in output["data"]) == len(LABELS)


def test_the_configuration_names_the_file_of_labels(client: Client) -> None:
    (output,) = client.get_model_config("mlp")["output"]
    assert output["label_filename"] == "digits.txt"


def test_strings_have_no_classes(client: Client) -> None:
    inputs = [client.tensor(kind.lower(), values(kind), kind) for kind in _kinds()]
    with client.refused(400, match="BYTES has no classes"):
        client.infer("echo", inputs, outputs=[client.output("same_bytes", class_count=1)])


def _kinds() -> list[str]:
    from tests.serving.clients import KINDS

    return list(KINDS)


def test_a_model_without_its_labels_says_so(tmp_path: Path) -> None:
    live.mlp(tmp_path / "mlp.onnx")
    (tmp_path / "mlp.toml").write_text('[labels]\ny = "none.txt"\n')
    with live.running(tmp_path, grpc_port=None, learn_s=0.0) as running:
        assert "labels: none.txt is no file" in running.server.service.why_not_ready()


# What is not finite, and what is not text


@pytest.mark.parametrize("rows", [1, 1 + QUICK_BYTES // 15])
def test_what_is_not_finite_comes_back_in_json(server: live.Live, rows: int) -> None:
    odd = np.tile(np.array([np.nan, np.inf, -np.inf], np.float32), (rows, 1))
    inputs = []
    for kind in _kinds():
        array = odd if kind == "FP32" else np.resize(values(kind), (rows, 3))
        data = [each.decode() if isinstance(each, bytes) else each for each in array.ravel().tolist()]
        inputs.append({"name": kind.lower(), "shape": [rows, 3], "datatype": kind, "data": data})
    request = {"inputs": inputs, "outputs": [{"name": "same_fp32"}, {"name": "same_int8"}]}
    reply = send(server, "POST", "/v2/models/echo/infer", request)
    assert reply.status == 200, reply.body[:200]
    assert b"[NaN,Infinity,-Infinity" in reply.body and b"null" not in reply.body
    same, whole = reply.json()["outputs"]
    assert np.array_equal(np.array(same["data"], np.float32).reshape(rows, 3), odd, equal_nan=True)
    assert whole["data"] == np.resize(values("INT8"), (rows, 3)).ravel().tolist()


def test_bytes_that_are_no_text_go_through_a_model(client: Client) -> None:
    last = "\U0010ff80\U0010ffff".encode()
    odd = np.array([[b"\xff\x00", b"\x80text", last], [b"", "é".encode(), b"\xf4\x8f\xbe"]], object)
    inputs = [client.tensor(kind.lower(), odd if kind == "BYTES" else values(kind), kind) for kind in _kinds()]
    answer = client.infer("echo", inputs, outputs=[client.output("same_bytes")])
    assert answer.as_numpy("same_bytes").tolist() == odd.tolist()


def test_a_long_id_comes_back(client: Client) -> None:
    answer = client.infer("mlp", [client.tensor("x", x())], request_id="i" * 65536).get_response()
    assert (answer["id"] if isinstance(answer, dict) else answer.id) == "i" * 65536


def test_an_output_asked_for_twice_comes_once(client: Client) -> None:
    twice = [client.output("y"), client.output("y")]
    answer = client.infer("mlp", [client.tensor("x", x())], outputs=twice).get_response()
    assert len(answer["outputs"] if isinstance(answer, dict) else answer.outputs) == 1


def test_sequences_are_refused_by_name(client: Client) -> None:
    with client.refused(400, match=r"'sequence_\w+' is not supported"):
        client.infer("mlp", [client.tensor("x", x())], sequence_id=7, sequence_start=True)


def test_generating_is_refused_by_name(server: live.Live) -> None:
    for name in ("generate", "generate_stream"):
        reply = send(server, "POST", f"/v2/models/mlp/{name}", {"x": 1})
        assert reply.status == 501 and reply.json() == {"error": f"{name} is not supported"}


# The repository


def test_unloading_what_is_not_there_is_no_mistake(client: Client) -> None:
    client.unload_model("nobody")
    assert not client.is_model_ready("nobody")


def test_a_model_is_loaded_with_settings_of_the_clients_until_it_is_loaded_again(client: Client) -> None:
    before = client.get_model_config("spare")
    config = {"max_batch_size": 2, "parameters": {"weft_slo_ms": {"string_value": "25"}}}
    client.load_model("spare", config=json.dumps(config))
    found = client.get_model_config("spare")
    assert found["max_batch_size"] == 2 and found["parameters"]["weft_slo_ms"]["string_value"] == "25.0"
    client.load_model("spare")
    assert client.get_model_config("spare") == before


def test_a_configuration_that_means_nothing_here_is_refused_and_changes_nothing(client: Client) -> None:
    before = client.get_model_config("spare")
    with client.refused(501, match="'backend' cannot be set"):
        client.load_model("spare", config='{"backend": "python"}')
    with client.refused(501, match="'file:1/model.onnx' is not supported"):
        client.load_model("spare", config="{}", files={"file:1/model.onnx": b"onnx"})
    assert client.get_model_config("spare") == before


def test_settings_that_the_model_cannot_hold_are_refused_and_forgotten(server: live.Live) -> None:
    shapes = {"parameters": {"weft_shapes": {"string_value": '{"x": [1, 65]}'}}}
    body = {"parameters": {"config": json.dumps(shapes)}}
    assert send(server, "POST", "/v2/repository/models/spare/load", body).status == 400
    assert send(server, "POST", "/v2/repository/models/spare/load").status == 200
    assert send(server, "GET", "/v2/models/spare/ready").status == 200


# Settings


@pytest.fixture
def unsettled(server: live.Live) -> Iterator[live.Live]:
    """The server, whose settings are put back."""
    yield server
    send(server, "POST", "/v2/trace/setting", {"trace_level": None, "trace_rate": None, "trace_count": None})
    gone = {"trace_level": None, "trace_rate": None, "trace_count": None}
    send(server, "POST", "/v2/models/mlp/trace/setting", gone)
    send(server, "POST", "/v2/logging", {"log_info": True, "log_verbose_level": 0})


def settings_of(told: Any) -> dict[str, Any]:
    """Settings as HTTP shows them, whichever client asked."""
    found = told.get("settings", told)
    return {key: each["value"] if isinstance(each, dict) and "value" in each else each for key, each in found.items()}


def test_trace_settings_are_shown_and_set(client: Client, unsettled: live.Live) -> None:
    assert settings_of(client.get_trace_settings())["trace_level"] == ["TIMESTAMPS"]
    told = settings_of(client.update_trace_settings("mlp", {"trace_level": ["OFF"], "trace_rate": "5"}))
    assert told["trace_level"] == ["OFF"] and told["trace_rate"] in ("5", ["5"])
    assert settings_of(client.get_trace_settings("mlp"))["trace_level"] == ["OFF"]
    assert settings_of(client.update_trace_settings("mlp", {"trace_level": None}))["trace_level"] == ["TIMESTAMPS"]
    assert settings_of(client.get_trace_settings())["trace_level"] == ["TIMESTAMPS"]
    with client.refused(404):
        client.get_trace_settings("nobody")
    with client.refused(501, match="trace_file"):
        client.update_trace_settings(settings={"trace_file": "trace.json"})


def test_what_is_not_to_be_traced_is_not(unsettled: live.Live) -> None:
    def seen() -> int:
        events = send(unsettled, "GET", "/weft/trace").json()["traceEvents"]
        return sum(each["ph"] == "X" and each["name"] == "mlp" for each in events)

    send(unsettled, "POST", "/v2/models/mlp/trace/setting", {"trace_level": ["OFF"]})
    before = seen()
    assert send(unsettled, "POST", INFER, asked(x())).status == 200
    assert seen() == before
    send(unsettled, "POST", "/v2/models/mlp/trace/setting", {"trace_level": None, "trace_count": "1"})
    for _ in range(3):
        assert send(unsettled, "POST", INFER, asked(x())).status == 200
    assert seen() == before + 1


def test_log_settings_are_shown_and_set(client: Client, unsettled: live.Live) -> None:
    assert settings_of(client.get_log_settings())["log_info"] is True
    told = settings_of(client.update_log_settings({"log_info": False, "log_verbose_level": 1, "log_error": None}))
    assert (told["log_info"], told["log_verbose_level"], told["log_file"]) == (False, 1, "")
    assert settings_of(client.get_log_settings()) == told
    with client.refused(501, match="log_file"):
        client.update_log_settings({"log_file": "elsewhere.log"})
    with client.refused(400, match="log_format"):
        client.update_log_settings({"log_format": "json"})


def test_settings_may_be_read_only(folder: Path) -> None:
    with live.running(folder / "spare.onnx", live_settings="read-only", learn_s=0.0) as running:
        assert send(running, "GET", "/v2/logging").status == 200
        for path, wanted in (("/v2/logging", {"log_info": False}), ("/v2/trace/setting", {"trace_rate": "2"})):
            reply = send(running, "POST", path, wanted)
            assert reply.status == 403 and "live_settings" in reply.json()["error"]
        assert send(running, "GET", "/v2/logging").json()["log_info"] is True


def test_the_extensions_are_named(client: Client) -> None:
    assert {"classification", "logging", "trace", "statistics"} <= set(client.get_server_metadata()["extensions"])


# Packed answers


@pytest.mark.parametrize(("encoding", "unpack"), [("gzip", gzip.decompress), ("deflate", zlib.decompress)])
@pytest.mark.parametrize("rows", [100, 2000])
def test_json_is_packed_for_who_takes_that(server: live.Live, encoding: str, unpack: Any, rows: int) -> None:
    array = np.zeros((rows, 64), np.float32)
    plain = send(server, "POST", INFER, asked(array), {"Accept-Encoding": "identity"})
    found = send(server, "POST", INFER, asked(array), {"Accept-Encoding": encoding})
    assert plain.headers["Content-Encoding"] is None
    assert found.headers["Content-Encoding"] == encoding and found.headers["Vary"] == "Accept-Encoding"
    assert len(found.body) < len(plain.body) / 2
    outputs = json.loads(unpack(found.body))["outputs"]
    assert outputs == plain.json()["outputs"] and outputs[0]["shape"] == [rows, 10]


def test_clients_unpack_what_they_asked_for(client: Client, folder: Path) -> None:
    array = np.tile(x(1), (500, 1))
    answer = client.infer("mlp", [client.tensor("x", array)], **client.packed("gzip"))
    np.testing.assert_allclose(answer.as_numpy("y"), expected(folder, array), rtol=1e-4, atol=1e-5)


def test_pages_are_packed_and_short_answers_are_not(server: live.Live) -> None:
    headers = {"Accept-Encoding": "gzip"}
    page = send(server, "GET", "/metrics", b"", headers)
    assert page.headers["Content-Encoding"] == "gzip" and b"weft_ready" in gzip.decompress(page.body)
    assert send(server, "GET", "/v2", b"", headers).headers["Content-Encoding"] is None
    statistics = send(server, "GET", "/v2/models/stats", b"", headers)  # tritonclient would not unpack them
    assert len(statistics.body) > 2000 and statistics.headers["Content-Encoding"] is None
    whole = send(server, "HEAD", "/metrics", b"", headers)
    assert whole.status == 200 and whole.headers["Content-Encoding"] is None


# Counts


def failures(server: live.Live) -> dict[str, float]:
    page = send(server, "GET", "/metrics").body.decode()
    (family,) = [each for each in text_string_to_metric_families(page) if each.name == "nv_inference_request_failure"]
    return {each.labels["reason"]: each.value for each in family.samples if each.labels["model"] == "mlp"}


def test_what_is_wrong_with_a_request_is_no_failure_of_the_model(client: Client, server: live.Live) -> None:
    before = failures(server), client.get_inference_statistics("mlp")["model_stats"][0]["inference_stats"]["fail"]
    with client.refused(400):
        client.infer("mlp", [client.tensor("x", np.zeros((1, 63), np.float32))])
    after = failures(server), client.get_inference_statistics("mlp")["model_stats"][0]["inference_stats"]["fail"]
    assert after == before
    page = send(server, "GET", "/metrics").body
    assert b'weft_client_errors_total{model="mlp",version="1",reason="bad_request"}' in page


def test_a_deadline_that_cannot_be_met_is_a_failure(server: live.Live) -> None:
    before = failures(server)
    assert send(server, "POST", INFER, asked(x(), parameters={"timeout": 1})).status == 504
    assert failures(server) == before | {"REJECTED": before["REJECTED"] + 1}


# Streams


def test_every_answer_in_a_stream_is_its_last_and_errors_have_an_id(server: live.Live) -> None:
    def requests() -> Iterator[Any]:
        for name in ("mlp", "nobody"):
            made = triton.service_pb2.ModelInferRequest(model_name=name, id=f"for {name}")
            made.inputs.add(name="x", datatype="FP32", shape=[2, 64])
            made.raw_input_contents.append(x().tobytes())
            yield made

    with grpc.insecure_channel(server.grpc_address) as channel:
        stub = triton.service_pb2_grpc.GRPCInferenceServiceStub(channel)
        good, bad = stub.ModelStreamInfer(requests(), timeout=live.PATIENCE_S)
    assert not good.error_message and good.infer_response.id == "for mlp"
    assert bad.error_message and (bad.infer_response.id, bad.infer_response.model_name) == ("for nobody", "nobody")
    for answer in (good, bad):
        assert answer.infer_response.parameters["triton_final_response"].bool_param is True


def test_a_stream_that_wants_an_empty_last_answer_has_the_last_one(server: live.Live) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    made = triton.InferInput("x", [2, 64], "FP32")
    made.set_data_from_numpy(x())
    with contextlib.closing(triton.InferenceServerClient(server.grpc_address)) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("mlp", [made], enable_empty_final_response=True)
        result, error = answers.get(timeout=live.PATIENCE_S)
        client.stop_stream()
    assert error is None and result.as_numpy("y").shape == (2, 10)
    assert result.get_response().parameters["triton_final_response"].bool_param and answers.empty()


# Health


class Prober:
    """A client of gRPC's health service."""

    def __init__(self, channel: grpc.Channel) -> None:
        ends = {
            "request_serializer": HealthCheckRequest.SerializeToString,
            "response_deserializer": HealthCheckResponse.FromString,
        }
        self._check = channel.unary_unary(f"/{grpc_health.SERVICE}/Check", **ends)
        self._watch = channel.unary_stream(f"/{grpc_health.SERVICE}/Watch", **ends)

    def check(self, service: str = "") -> int:
        return int(self._check(HealthCheckRequest(service=service), timeout=live.PATIENCE_S).status)

    def watch(self, service: str = "") -> Any:
        return self._watch(HealthCheckRequest(service=service))

    def refused(self, call: Any, *args: Any) -> grpc.StatusCode:
        with pytest.raises(grpc.RpcError) as error:
            call(*args)
        code = error.value.code()
        assert isinstance(code, grpc.StatusCode)
        return code


@pytest.fixture
def prober(server: live.Live) -> Iterator[Prober]:
    with grpc.insecure_channel(server.grpc_address) as channel:
        yield Prober(channel)


def test_health_of_the_server_and_of_its_models(prober: Prober) -> None:
    assert prober.check() == prober.check("inference.GRPCInferenceService") == prober.check("mlp") == SERVING
    assert prober.refused(prober.check, "nobody") is grpc.StatusCode.NOT_FOUND


def test_who_watches_hears_of_every_change(prober: Prober, server: live.Live) -> None:
    told = prober.watch("spare")
    assert next(told).status == SERVING
    assert send(server, "POST", "/v2/repository/models/spare/unload").status == 200
    assert next(told).status == NOT_SERVING
    assert send(server, "POST", "/v2/repository/models/spare/load").status == 200
    assert next(told).status == SERVING
    told.cancel()
    unknown = prober.watch("nobody")
    assert next(unknown).status == SERVICE_UNKNOWN
    unknown.cancel()
    health = server.server._grpc._health  # type: ignore[union-attr]
    until(lambda: health.watchers == 0, "nobody watches")


def test_only_so_many_may_watch(prober: Prober, server: live.Live) -> None:
    health = server.server._grpc._health  # type: ignore[union-attr]
    until(lambda: health.watchers == 0, "nobody watches")
    watching = [prober.watch() for _ in range(grpc_health.WATCHERS)]
    assert {next(each).status for each in watching} == {SERVING}
    assert prober.refused(next, prober.watch()) is grpc.StatusCode.UNAVAILABLE
    for each in watching:
        each.cancel()
    until(lambda: health.watchers == 0, "nobody watches")


def test_without_the_key_health_tells_of_the_server_alone(folder: Path) -> None:
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(live.running(folder / "spare.onnx", api_key="open-sesame", learn_s=0.0))
        prober = Prober(stack.enter_context(grpc.insecure_channel(running.grpc_address)))
        assert prober.check() == prober.check("nobody") == SERVING
        assert prober.refused(next, prober.watch()) is grpc.StatusCode.UNAUTHENTICATED


def test_a_server_that_goes_down_tells_who_watches(folder: Path) -> None:
    with contextlib.ExitStack() as stack:
        with live.running(folder / "spare.onnx", learn_s=0.0) as running:
            channel = stack.enter_context(grpc.insecure_channel(running.grpc_address))
            told = Prober(channel).watch()
            assert next(told).status == SERVING
        assert [each.status for each in told] == [NOT_SERVING]
