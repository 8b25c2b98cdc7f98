"""Models through torch's compiler on a GPU: conversion, packages in CUDA graphs, weights that come and go.

``make test-gpu`` runs it. It needs torch, triton and gcc, and no onnxruntime-gpu; without a GPU everything is skipped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from tests.runtime.cuda.conversion_cases import all_graphs
from tests.runtime.cuda.converted import network_problems, problems
from tests.runtime.cuda.converted_networks import FLOAT32_ONLY, NETWORKS
from tests.runtime.cuda.nets import WIDTH, chain, drawn, wanted
from tests.runtime.cuda.torch_nets import draw_images, images, run_net
from tests.runtime.exit_nets import CLASSES, EXITS, SIDE, conv_net, samples
from tests.serving import live
from tests.support.inference import infer_fp32
from weft.models import zoo
from weft.models.onnx_graph import save
from weft.runtime.backend import BatchPart, LoadOptions, Step
from weft.runtime.cuda.compiling import CompileLimits, compile_model
from weft.runtime.cuda.packages import CompileJob, find
from weft.runtime.cuda.precision import FP16, FP32, difference
from weft.runtime.cuda.preparing import prepare_on
from weft.runtime.cuda.torch_engine import WITHIN, compiled_model
from weft.runtime.exits import ExitSpec
from weft.runtime.onnxruntime_cpu.model import Blueprint
from weft.runtime.onnxruntime_cpu.sessions import open_model
from weft.runtime.tensors import TensorSpec

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.filterwarnings("ignore:RNN module weights"),  # cuDNN copies them in every run
]
ROUNDED = "package-light-squeezenet"
"""Its scores are large and all equal, so that rounding decides its answers."""
LIMITS = CompileLimits(600, 32 << 30, 8)


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    from weft.runtime.cuda.gpu import Gpu

    device = Gpu(0)
    with device.lane_context():
        yield device


def test_converted_graphs_compute_on_the_gpu_what_the_cpu_does() -> None:
    count, wrong = problems(all_graphs(), WITHIN, "cuda")
    assert count > 800 and not wrong, "\n".join([f"{len(wrong)} of {count}:", *wrong])


@pytest.mark.parametrize("name", sorted({*NETWORKS} - {ROUNDED}))
def test_converted_networks_compute_on_the_gpu_what_the_cpu_does(name: str) -> None:
    assert network_problems(*NETWORKS[name](), [FP32] if name in FLOAT32_ONLY else [FP32, FP16], "cuda") == []


@pytest.mark.parametrize(
    ("precision", "grain_s", "shares"),
    [("fp32", None, False), ("fp16", None, False), ("fp16", 1e-9, False), ("fp16", 1e-9, True)],
)
def test_a_compiled_model_is_captured_over_weights_that_come_and_go(
    gpu: Any, precision: str, grain_s: float | None, shares: bool, tmp_path: Path
) -> None:
    if shares and gpu.uncut:
        pytest.skip(gpu.uncut)
    path, shapes = chain(tmp_path / "chain.onnx"), {"x": (1, WIDTH)}
    job = CompileJob(
        model=path, shapes=shapes, rows=(1, 2, 4), batched=True, precision=precision, device="cuda:0",
        device_name=gpu.name, grain_s=grain_s, max_pieces=3,
    )  # fmt: skip
    cache = tmp_path / "cache"
    folder = compile_model(job, cache, LIMITS)
    began_s = time.monotonic()
    assert compile_model(job, cache, LIMITS) == folder and find(folder) is not None
    assert time.monotonic() - began_s < 5  # it compiles nothing again
    tensors = [tuple(TensorSpec(name, "FP32", (-1, WIDTH)) for name in names) for names in (("x",), ("y",))]
    slow_s = {rows: (1.0,) for rows in range(1, 5)}
    blueprint = Blueprint(
        inputs=tensors[0], outputs=tensors[1], segments=(), warm_shapes=shapes, batchable=True, max_batch=4,
        times_s=slow_s,
    )  # fmt: skip
    options = replace(
        LoadOptions(), precision=precision, engine="auto", packages=str(folder), max_batch=4, shares=shares
    )
    model = compiled_model(gpu.model_view() if shares else gpu, path, options, blueprint)
    assert sorted(model.blueprint.like) == ([1, 2, 4] if shares else [])
    assert not model.uncaptured() and f"compiled, in {'3 pieces' if grain_s else 'one piece'}" in model.remarks[-1]
    for _ in range(2):
        for rows in (1, 3, 4, 7):  # the last was not compiled
            found, right = model.run(drawn(rows))["y"], wanted(path, drawn(rows))
            np.testing.assert_allclose(found, right, rtol=0, atol=WITHIN[precision] * np.abs(right).max())
        model.evict()
        model.restore()
    model.close()


@pytest.mark.parametrize(("precision", "grain_s"), [("fp32", None), ("fp16", 1e-9)])
def test_samples_leave_a_compiled_model_at_its_exits(
    gpu: Any, precision: str, grain_s: float | None, tmp_path: Path
) -> None:
    path, shapes = conv_net(tmp_path / "exits.onnx"), {"x": (1, 1, SIDE, SIDE)}
    job = CompileJob(
        model=path, shapes=shapes, rows=(1, 4), batched=True, precision=precision, device="cuda:0",
        device_name=gpu.name, grain_s=grain_s, max_pieces=6, exits=EXITS,
    )  # fmt: skip
    folder = compile_model(job, tmp_path / "cache", LIMITS)
    blueprint = Blueprint(
        inputs=(TensorSpec("x", "FP32", (-1, 1, SIDE, SIDE)),), outputs=(TensorSpec(EXITS[-1], "FP32", (-1, CLASSES)),),
        segments=(), warm_shapes=shapes, batchable=True, max_batch=4, times_s={rows: (1.0,) for rows in range(1, 5)},
        exits=tuple(ExitSpec(output=name, segment=at) for at, name in enumerate(EXITS)),
    )  # fmt: skip
    options = replace(LoadOptions(), precision=precision, engine="auto", packages=str(folder), max_batch=4)
    model = compiled_model(gpu, path, options, blueprint)
    assert not model.uncaptured() and (len(model.segments) == 3) == (grain_s is None)
    session, feed = open_model(path, 1), samples(4)
    right = dict(zip(EXITS, session.run([*EXITS], {"x": feed}), strict=True))
    assert difference(right, model.run({"x": feed})) < WITHIN[precision]
    end = model.exits.specs[0].segment
    values: Any = BatchPart({"x": feed})
    for segment in range(len(model.segments)):  # rows 3 and 1 stay behind the first exit
        launched = model.launch(Step(segment, [values], rows=4 if segment <= end else 2))
        values = BatchPart(launched.outputs[0].values, [3, 1] if segment == end else None)
    launched.answered.wait()
    assert difference({"logits": right["logits"][[3, 1]]}, launched.outputs[0].answers) < WITHIN[precision]
    model.close()


def test_the_server_compiles_a_program_of_torch(tmp_path: Path) -> None:
    _, net = images(tmp_path / "models" / "images" / "1" / "model.pt2")
    (tmp_path / "models" / "images" / "weft.toml").write_text(
        'max_batch = 4\nrows = "independent"\nengine = "compiled"\n'
    )
    settings = {"device": "cuda:0", "cache": tmp_path / "cache", "allow_programs": True}
    with live.running(tmp_path / "models", **settings) as server:
        engine, ends_s = "", time.monotonic() + 300
        while engine != "compiled" and time.monotonic() < ends_s:
            found, right = infer_fp32(server, "images", draw_images(3)), run_net(net, draw_images(3))
            np.testing.assert_allclose(found, right, rtol=1e-3, atol=1e-3)
            slot = server.server.service.library.find("images")
            engine = slot.served.loaded.timing.engine if slot.served else ""
            time.sleep(0.2)
        assert engine == "compiled", slot.served and slot.served.loaded.remarks


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_without_onnxruntime_gpu_torch_runs_files_step_by_step(
    gpu: Any, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(gpu), "runs_sessions", False)
    path = tmp_path / "net.onnx"
    save(zoo.materialise(zoo.build("mobilenet-v2", resolution=64)), path)
    options = replace(LoadOptions(), precision=precision, max_batch=4, independent_rows=True)
    model = prepare_on(gpu, path, options)
    assert model.timing.engine == "torch" and not model.uncaptured()
    session, rng = open_model(path, 4), np.random.default_rng(0)
    for rows in (1, 3, 4, 7):
        feed = {model.inputs[0].name: rng.standard_normal((rows, 3, 64, 64)).astype(np.float32)}
        right = dict(zip([spec.name for spec in model.outputs], session.run(None, feed), strict=True))
        assert difference(right, model.run(feed)) < WITHIN[precision]
        model.evict()
        model.restore()
    model.close()


def test_without_onnxruntime_gpu_the_server_compiles_its_models(tmp_path: Path) -> None:
    from weft.runtime.cuda.gpu import Gpu

    if Gpu.runs_sessions:
        pytest.skip("onnxruntime-gpu is installed")
    path = chain(tmp_path / "models" / "chain" / "1" / "model.onnx")
    (tmp_path / "models" / "chain" / "weft.toml").write_text('max_batch = 4\nrows = "independent"\n')
    with live.running(tmp_path / "models", device="cuda:0", cache=tmp_path / "cache") as server:
        engines, ends_s = set(), time.monotonic() + 300
        while "compiled" not in engines and time.monotonic() < ends_s:
            found, right = infer_fp32(server, "chain", drawn(3)), wanted(path, drawn(3))
            np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)
            slot = server.server.service.library.find("chain")
            engines |= {slot.served.loaded.timing.engine} if slot.served else set()
            time.sleep(0.2)
    assert "compiled" in engines
