"""A gate over gRPC: what Triton's own client finds there, and how calls become requests."""

from __future__ import annotations

import json

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.gates.cases import PAIR, answering, gated, infer, scripted
from tests.serving import live
from tests.support.concurrency import until
from weft.base.errors import BadRequest, Failed
from weft.runtime.tensors import TensorSpec
from weft.serving import grpc_wire, proto, wire
from weft.serving.wire import ModelSpec
from weft_cluster.gates.grpc_face import as_body, as_message

ROW = np.random.default_rng(0).normal(size=(1, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory):
    file = live.mlp(tmp_path_factory.mktemp("models") / "net.onnx")
    made = {"api_key": "inner", "grpc_port": None}
    with (
        live.running(file, **made) as left,
        live.running(file, **made) as right,
        gated(PAIR, {"left": [left.url], "right": [right.url]}, key="inner", grpc_port=0) as found,
    ):
        yield found


@pytest.fixture
def client(gate):
    with triton.InferenceServerClient(f"127.0.0.1:{gate.gate.grpc_port}") as found:
        yield found


def asked(row: np.ndarray = ROW) -> triton.InferInput:
    found = triton.InferInput("x", list(row.shape), "FP32")
    found.set_data_from_numpy(row)
    return found


def test_answers_are_those_over_http(gate, client):
    over_http = infer(gate, rows=ROW.tolist())[1]["outputs"][0]
    answer = client.infer("net", [asked()], request_id="7")
    found = answer.as_numpy(over_http["name"])
    assert found.ravel().tolist() == pytest.approx(over_http["data"], rel=1e-6)
    assert answer.get_response().id == "7"
    named = client.infer("net", [asked()], outputs=[triton.InferRequestedOutput(over_http["name"])])
    assert named.as_numpy(over_http["name"]).tolist() == found.tolist()
    classes = client.infer("net", [asked()], outputs=[triton.InferRequestedOutput(over_http["name"], class_count=2)])
    assert len(classes.as_numpy(over_http["name"]).ravel()) == 2


def test_what_is_no_inference_is_told(client):
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("net")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata().name == "weft"
    assert client.get_model_metadata("net").inputs[0].name == "x"
    assert client.get_model_config("net").config.name == "net"
    assert [each.name for each in client.get_model_repository_index().models] == ["net"]


def test_streams_answer_in_order_and_go_on_after_an_error(client):
    answers: list = []
    client.start_stream(lambda result, error: answers.append(error or result.get_response().id))
    for number in range(5):
        client.async_stream_infer("net" if number != 2 else "other", [asked()], request_id=str(number))
    until(lambda: len(answers) == 5)
    client.stop_stream()
    assert [each for each in answers if isinstance(each, str)] == ["0", "1", "3", "4"]
    assert "unknown model 'other'" in str(answers[2])


def test_errors_have_their_codes(client):
    with pytest.raises(InferenceServerException, match="unknown model 'other'") as unknown:
        client.infer("other", [asked()])
    assert unknown.value.status() == "StatusCode.NOT_FOUND"
    with pytest.raises(InferenceServerException) as unfit:
        client.infer("net", [asked(np.zeros((1, 3), np.float32))])
    assert unfit.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_large_typed_contents_are_read_elsewhere_and_many_fields_refused(gate):
    message = proto.CLASSES["ModelInferRequest"](model_name="net")
    message.inputs.add(name="x", datatype="FP32", shape=[8192, 64]).contents.fp32_contents.extend([0.5] * 8192 * 64)
    with grpc.insecure_channel(f"127.0.0.1:{gate.gate.grpc_port}", [("grpc.max_receive_message_length", -1)]) as found:
        infer = found.unary_unary(f"/{proto.SERVICE}/ModelInfer")
        answer = proto.CLASSES["ModelInferResponse"].FromString(infer(message.SerializeToString()))
        assert answer.outputs[0].shape[0] == 8192
        with pytest.raises(grpc.RpcError, match="more than 8192 fields, raw_input_contents") as refused:
            infer(b"\x3a\x00" * 100_000)
        assert refused.value.code().name == "RESOURCE_EXHAUSTED"
        stream = found.stream_stream(f"/{proto.SERVICE}/ModelStreamInfer")(iter([b"\x3a\x00" * 100_000]))
        (told,) = map(proto.CLASSES["ModelStreamInferResponse"].FromString, stream)
        assert "more than 8192 fields" in told.error_message


def test_a_call_s_own_deadline_is_that_of_its_request():
    with scripted(answering(200)) as (server,), gated(PAIR, {"left": [server.url]}, grpc_port=0) as gate:
        address = f"127.0.0.1:{gate.gate.grpc_port}"
        with triton.InferenceServerClient(address) as client, pytest.raises(InferenceServerException) as unread:
            client.infer("net", [asked()], client_timeout=500)
        assert "a server's answer cannot be read: KeyError" in str(unread.value)
        sent = server.asked[0]
        head = json.loads(sent.body[: int(sent.headers["inference-header-content-length"])])
        assert 400e6 < head["parameters"]["timeout"] < 600e6


def test_without_the_key_nothing_is_told():
    with scripted(answering(200)) as (server,), gated(PAIR, {"left": [server.url]}, grpc_port=0, api_key="k") as gate:
        with triton.InferenceServerClient(f"127.0.0.1:{gate.gate.grpc_port}") as client:
            assert client.is_server_live()
            with pytest.raises(InferenceServerException) as refused:
                client.infer("net", [asked()])
            assert refused.value.status() == "StatusCode.UNAUTHENTICATED"
            client.get_server_metadata(headers={"authorization": "Bearer k"})
        assert not server.asked


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("FP32", "fp32_contents", [1.5, float("nan"), float("inf")]),
        ("FP64", "fp64_contents", [1e300, -0.0, 2.0]),
        ("INT8", "int_contents", [-3, 0, 7]),
        ("UINT64", "uint64_contents", [2**63, 0, 1]),
        ("BOOL", "bool_contents", [True, False, True]),
        ("BYTES", "bytes_contents", [b"\xff\x00", b"", b"abc"]),
    ],
)
def test_typed_contents_arrive_as_a_server_would_have_read_them(datatype, field, values):
    spec = ModelSpec("net", "", (TensorSpec("x", datatype, (3,)),), ())
    message = proto.CLASSES["ModelInferRequest"](model_name="net")
    tensor = message.inputs.add(name="x", datatype=datatype, shape=[3])
    getattr(tensor.contents, field).extend(values)
    body = as_body(message, message.raw_input_contents, None)
    read = wire.decode(memoryview(body.data), body.head_bytes, spec).inputs["x"]
    np.testing.assert_array_equal(read, grpc_wire.decode_infer(message, spec).inputs["x"])


def test_an_answer_without_the_bytes_it_should_have_is_an_error():
    with pytest.raises(Failed, match="came as JSON"):
        as_message(b'{"outputs":[{"name":"y","datatype":"FP32","shape":[1],"data":[1]}]}', None)


def test_typed_bytes_of_another_datatype_are_refused_by_name():
    message = proto.CLASSES["ModelInferRequest"]()
    message.inputs.add(name="x", datatype="FP32", shape=[1]).contents.bytes_contents.append(b"a")
    with pytest.raises(BadRequest, match="input 'x': FP32 does not go into bytes_contents"):
        as_body(message, (), None)
