"""The compiled engine beside ONNX Runtime, on a device's twin; programs of torch stand for compiled ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.runtime.cuda.nets import WIDTH, chain, drawn, wanted
from tests.runtime.cuda.uncompiled import PROGRAM, packaged, without_compiler
from weft.models import operators
from weft.models.operators import OPERATORS
from weft.runtime.backend import LoadOptions
from weft.runtime.cuda import reference_answers, torch_engine
from weft.runtime.cuda.device import HostDevice
from weft.runtime.cuda.model import DeviceModel
from weft.runtime.cuda.packages import REFERENCE, WEIGHTS, CompileJob
from weft.runtime.cuda.preparing import prepare_on
from weft.runtime.onnxruntime_cpu.model import Blueprint
from weft.serving import pages

OPTIONS = LoadOptions(max_batch=2, engine="compiled")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(monkeypatch)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chain(tmp_path_factory.mktemp("models") / "chain.onnx")


@pytest.fixture(scope="module")
def cache(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the model as ONNX Runtime runs it."""
    folder = tmp_path_factory.mktemp("cache")
    prepare_on(HostDevice(), path, OPTIONS, folder)
    return folder


def job(path: Path, rows: tuple[int, ...] = (1, 2)) -> CompileJob:
    shapes = {"x": (1, WIDTH)}
    return CompileJob(
        model=path, shapes=shapes, rows=rows, batched=True, precision="fp32", device="cpu", device_name="cpu"
    )


def opened(path: Path, cache: Path, folder: Path, options: LoadOptions = OPTIONS) -> Any:
    return prepare_on(HostDevice(), path, replace(options, packages=str(folder)), cache, learn=False)


def test_without_reference_answers_it_stays_with_onnx_runtime(path: Path, cache: Path, tmp_path: Path) -> None:
    folder = packaged(job(path), tmp_path / "packages")
    inputs, answers = next(reference_answers.read(folder))
    np.testing.assert_array_equal(answers["y"], wanted(path, inputs))
    assert [len(inputs["x"]) for inputs, _ in reference_answers.read(folder)] == [1, 2]
    (folder / REFERENCE).write_bytes(b"PK")
    assert "its packages have no reference answers" in opened(path, cache, folder).remarks[-1]
    (folder / REFERENCE).unlink()
    assert "its packages have no reference answers" in opened(path, cache, folder).remarks[-1]


def test_a_compiled_model_answers_as_the_file_at_all_sizes(path: Path, cache: Path, tmp_path: Path) -> None:
    model = opened(path, cache, packaged(job(path), tmp_path / "packages"))
    assert isinstance(model, DeviceModel) and model.segments == ("whole",) and model.timing.learned
    assert sorted(model.timing.times_s) == [1, 2] and model.timing.engine == "compiled"
    assert "compiled, in one piece" in model.remarks[-1]
    assert (tmp_path / "packages" / WEIGHTS).stat().st_size == 3 * WIDTH * WIDTH * 4  # once for both sizes
    for rows in (1, 2, 5):  # the last was not compiled
        np.testing.assert_allclose(model.run(drawn(rows))["y"], wanted(path, drawn(rows)), rtol=1e-5, atol=1e-6)
    model.evict()
    model.restore()
    np.testing.assert_allclose(model.run(drawn(2))["y"], wanted(path, drawn(2)), rtol=1e-5, atol=1e-6)


def test_the_faster_engine_is_taken(path: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, auto = packaged(job(path), tmp_path / "packages"), replace(OPTIONS, engine="auto")
    inner = torch_engine.compiled_model

    def compared(before_s: float) -> Any:
        def with_times(device: Any, path: Path, options: LoadOptions, blueprint: Blueprint) -> Any:
            slow = blueprint.model_copy(update={"times_s": {rows: (before_s,) for rows in (1, 2)}})
            return inner(device, path, options, slow)

        monkeypatch.setattr(torch_engine, "compiled_model", with_times)
        return opened(path, cache, folder, auto)

    quicker, slower = compared(1e3), compared(1e-12)
    assert "compiled, in one piece" in quicker.remarks[-1]
    assert quicker.timing.engines_s["onnxruntime"] == {1: 1e3, 2: 1e3} and sorted(quicker.timing.engines_s) == [
        "compiled",
        "onnxruntime",
    ]
    assert slower.timing.engines_s["onnxruntime"] == {1: 1e-12, 2: 1e-12}
    assert slower.timing.engines_s["compiled"].keys() == {1, 2}
    shown = pages._describe_engines(quicker)
    assert shown["engine"] == "compiled" and shown["engines_s"]["onnxruntime"] == {"1": 1e3, "2": 1e3}
    assert pages._describe_engines(prepare_on(HostDevice(), path, OPTIONS, cache)) == {}
    assert "stays with ONNX Runtime: compiled, it is slower" in slower.remarks[-1]
    assert slower.timing.engine == "onnxruntime" and slower.run(drawn(1))["y"].shape == (1, WIDTH)


def test_wrong_code_is_caught(path: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        wrong = replace(OPERATORS["Tanh"], torch=lambda t, x: t.torch.sigmoid(x))
        patch.setattr(operators, "OPERATORS", {**OPERATORS, "Tanh": wrong})
        folder = packaged(job(path), tmp_path / "packages")
    model = opened(path, cache, folder)
    assert model.timing.engine == "onnxruntime"
    assert "stays with ONNX Runtime: compiled, it differs from float32 by" in model.remarks[-1]
    np.testing.assert_allclose(model.run(drawn(2))["y"], wanted(path, drawn(2)), rtol=1e-5)


def test_packages_that_cannot_be_used_are_a_remark(path: Path, cache: Path, tmp_path: Path) -> None:
    assert "its packages cannot be read" in opened(path, cache, tmp_path / "none").remarks[-1]
    folder = packaged(job(path, (1,)), tmp_path / "packages")
    assert "batches of 2 rows were not compiled in time" in opened(path, cache, folder).remarks[-1]
    (folder / "rows1.0of1" / PROGRAM).write_bytes(b"damaged")
    assert "stays with ONNX Runtime" in opened(path, cache, folder, replace(OPTIONS, max_batch=2)).remarks[-1]
