"""Values that ask for more memory than there is are the client's error, wherever and however they are computed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.serving import live
from tests.support.inference import Refused, infer
from weft.base.errors import UnfitInputs
from weft.runtime.onnxruntime_cpu import sessions
from weft.runtime.onnxruntime_cpu.sessions import UNKNOWN, open_model
from weft.serving import proto

SHAPES = {
    "larger than the memory": ([10**13], "Expand 'grow' asks for a tensor of 40000000000000 bytes"),
    "beyond 64 bits": ([2**40, 2**40], "Expand 'grow' asks for a tensor whose size does not fit into 64 bits"),
    "bytes beyond 64 bits": ([2**62], "Expand 'grow' asks for a tensor whose size does not fit into 64 bits"),
}


def growing(path: Path) -> Path:
    """A model whose input says how large its output is."""
    shape = helper.make_tensor_value_info("shape", TensorProto.INT64, [None])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    one = helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])
    graph = helper.make_graph(
        [helper.make_node("Expand", ["one", "shape"], ["y"], name="grow")], "g", [shape], [y], [one]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[live.Live]:
    folder = tmp_path_factory.mktemp("models")
    growing(folder / "threads.onnx")
    growing(folder / "process.onnx")
    (folder / "process.toml").write_text('isolation = "process"\n')
    with live.running(folder, learn_s=0.0, worker_spare=False) as running:
        yield running


def infer_over_grpc(server: live.Live, model: str, shape: list[int]) -> Any:
    request, response, _ = proto.METHODS["ModelInfer"]
    asked = request(model_name=model, raw_input_contents=[np.array(shape, np.int64).tobytes()])
    asked.inputs.add(name="shape", datatype="INT64", shape=[len(shape)])
    with grpc.insecure_channel(server.grpc_address) as channel:
        method = channel.unary_unary(
            f"/{proto.SERVICE}/ModelInfer",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        return method(asked, timeout=live.PATIENCE_S)


@pytest.mark.parametrize("model", ["threads", "process"])
@pytest.mark.parametrize("case", SHAPES)
def test_they_are_refused_as_the_clients_with_what_was_asked(server: live.Live, model: str, case: str) -> None:
    shape, said = SHAPES[case]
    with pytest.raises(Refused, match=said) as refused:
        infer(server, model, {"shape": np.array(shape, np.int64)})
    assert refused.value.status == 400
    with pytest.raises(grpc.RpcError, match=said) as broken:
        infer_over_grpc(server, model, shape)
    assert broken.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert infer(server, model, {"shape": np.array([2, 3], np.int64)})["y"].shape == (2, 3)


def test_a_tensor_that_would_fit_is_the_servers_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_model(growing(tmp_path / "m.onnx"), 1)
    with pytest.raises(Exception, match="40000000000000") as failed:
        session.run(None, {"shape": np.array([10**13], np.int64)})
    assert isinstance(sessions.explain(failed.value), UnfitInputs)
    monkeypatch.setattr(sessions, "memory_limit_bytes", lambda: 1 << 60)
    explained = sessions.explain(failed.value)
    assert isinstance(explained, MemoryError)
    assert str(explained) == "Expand 'grow' found no memory for a tensor of 40000000000000 bytes"


@pytest.mark.parametrize(("text", "limit"), [("1048576\n", 1 << 20), ("max\n", UNKNOWN), (None, UNKNOWN)])
def test_a_container_has_no_more_memory_than_its_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, limit: int
) -> None:
    file = tmp_path / "memory.max"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(sessions, "CONTAINER_LIMITS", (file,))
    monkeypatch.setattr(sessions, "_swap_bytes", lambda: 0)
    assert sessions.machine_memory_bytes() == min(limit, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
