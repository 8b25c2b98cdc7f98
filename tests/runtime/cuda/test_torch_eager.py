"""ONNX files on a device without ONNX Runtime: torch runs them step by step until they are compiled; on a twin."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

pytest.importorskip("torch")

from tests.runtime.cuda.nets import WIDTH, chain, drawn, leaving, wanted
from tests.runtime.cuda.uncompiled import packaged, without_compiler
from tests.runtime.special_models import graph
from tests.serving import live
from tests.support.concurrency import until
from tests.support.inference import infer_fp32
from weft.models import operators
from weft.models.operators import OPERATORS
from weft.runtime.backend import LoadOptions
from weft.runtime.cuda.cpu_twins import TORCH_TWIN
from weft.runtime.cuda.device import HostDevice
from weft.runtime.cuda.model import ModelOnHost
from weft.runtime.cuda.packages import CompileJob
from weft.runtime.cuda.preparing import prepare_on

OPTIONS = LoadOptions(max_batch=4, independent_rows=True)


def opened(path: Path, cache: Path | None = None, **more: Any) -> Any:
    return prepare_on(HostDevice(runs_sessions=False), path, replace(OPTIONS, **more), cache)


def check(model: Any, path: Path) -> None:
    for rows in (1, 2, 4, 7):  # the last has no graph
        np.testing.assert_allclose(model.run(drawn(rows))["y"], wanted(path, drawn(rows)), rtol=1e-5, atol=1e-6)


def test_a_file_is_served_in_one_piece_over_weights_that_come_and_go(tmp_path: Path) -> None:
    path = chain(tmp_path / "chain.onnx")
    learned = opened(path, tmp_path / "cache")
    reopened = opened(path, tmp_path / "cache", learn_s=1e-9)  # there is no time to learn it again
    for model in (learned, reopened):
        assert model.segments == ("whole",) and model.timing.engine == "torch" and model.batching.max_batch == 4
        assert "runs in torch, step by step, until it is compiled" in model.remarks[0]
        check(model, path)
        model.evict()
        model.restore()
        check(model, path)
        assert model._weights.bytes == 3 * WIDTH * WIDTH * 4  # once for all batch sizes


def test_constants_of_exporters_are_folded(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(
        graph(
            "(float[n,8] x) => (float[n,8] y) { c = Constant <value = float {2}> () s = Shape(x)"
            " o = ConstantOfShape(s) p = Mul(x, c) y = Add(p, o) }"
        ).SerializeToString()
    )
    model = opened(tmp_path / "net.onnx")
    assert model.timing.engine == "torch"
    np.testing.assert_array_equal(model.run({"x": np.ones((3, 8), np.float32)})["y"], np.full((3, 8), 2))


def test_rows_that_depend_on_each_other_are_not_computed_together(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info
    nodes = [
        helper.make_node("ReduceSum", ["x", "rows"], ["s"], keepdims=1),
        helper.make_node("Add", ["x", "s"], ["y"]),
    ]
    both = [value(name, TensorProto.FLOAT, ["n", WIDTH]) for name in "xy"]
    rows = helper.make_tensor("rows", TensorProto.INT64, [1], [0])
    graph = helper.make_graph(nodes, "mixed", both[:1], both[1:], [rows])
    path = tmp_path / "mixed.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    model = opened(path, independent_rows=False, max_batch=None)
    assert model.timing.engine == "torch" and not model.batching.batchable


def test_its_packages_take_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(monkeypatch)
    path = chain(tmp_path / "chain.onnx")
    job = CompileJob(
        model=path, shapes={"x": (1, WIDTH)}, rows=(1, 2, 4), batched=True, precision="fp32", device="cpu",
        device_name="cpu",
    )  # fmt: skip
    opened(path, tmp_path / "cache").close()
    packages = str(packaged(job, tmp_path / "packages"))
    model = opened(path, tmp_path / "cache", engine="compiled", packages=packages)
    assert model.timing.engine == "compiled" and "in torch step by step" in model.remarks[-1]
    check(model, path)
    lost = opened(path, tmp_path / "cache", engine="compiled", packages=str(tmp_path / "nothing"))
    assert lost.timing.engine == "torch" and lost.remarks[-1].startswith("stays with torch, step by step: its packages")


def test_what_torch_cannot_run_is_served_by_the_cpu_with_a_remark(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info
    inputs, outputs = ([value(name, TensorProto.FLOAT, ["n", 1, WIDTH])] for name in "xy")
    graph = helper.make_graph([helper.make_node("LpPool", ["x"], ["y"], kernel_shape=[1])], "without", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "without.onnx")
    leaving(tmp_path / "exits.onnx")
    for path, exits, reason in (
        (tmp_path / "without.onnx", (), "LpPool has no meaning in torch"),
        (tmp_path / "exits.onnx", ("early", "late"), "exits need ONNX Runtime"),
    ):
        served = opened(path, exits=exits, max_batch=None)
        assert isinstance(served, ModelOnHost)
        assert any(reason in remark and "install onnxruntime-gpu" in remark for remark in served.remarks), (
            served.remarks
        )


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_wrong_meaning_is_caught_and_the_cpu_serves_the_file(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = chain(tmp_path / "chain.onnx"), tmp_path / "cache"
    assert opened(path, precision=precision).timing.engine == "torch"
    wrong = replace(OPERATORS["Tanh"], torch=lambda t, x: t.torch.sigmoid(x))
    monkeypatch.setattr(operators, "OPERATORS", {**OPERATORS, "Tanh": wrong})
    for model in (opened(path, cache, precision=precision), opened(path, cache, precision=precision, learn_s=1e-9)):
        assert isinstance(model, ModelOnHost) and "its answers differ on the device: by up to" in model.remarks[-1]
        check(model, path)


@pytest.mark.skipif(sys.platform != "linux", reason="workers are processes of Linux")
def test_a_server_on_such_a_device_answers_by_torch(tmp_path: Path) -> None:
    path = chain(tmp_path / "chain" / "1" / "model.onnx")
    with live.running(tmp_path, device=TORCH_TWIN) as server:
        library = server.server.service.library

        def engine() -> str:
            served = library.find("chain").served
            return served.loaded.timing.engine if served else ""

        until(lambda: engine() == "torch", "torch runs it")
        answers = infer_fp32(server, "chain", drawn(3))
        np.testing.assert_allclose(answers, wanted(path, drawn(3)), rtol=1e-4, atol=1e-5)
