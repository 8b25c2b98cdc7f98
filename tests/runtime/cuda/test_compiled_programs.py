"""Programs of torch and the compiled engine, on a device's twin; programs of torch stand for compiled ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.runtime.cuda.torch_nets import TEXTS, draw_images, draw_sentences, images, run_net, words
from tests.runtime.cuda.uncompiled import packaged, without_compiler
from weft.runtime.backend import LoadOptions
from weft.runtime.cuda import packager
from weft.runtime.cuda.compiling import CompileLimits, compile_model
from weft.runtime.cuda.device import HostDevice
from weft.runtime.cuda.packager import Packager
from weft.runtime.cuda.packages import CompileJob
from weft.runtime.cuda.preparing import prepare_on
from weft.runtime.cuda.torch_compiler import choose_cuts

OPTIONS = LoadOptions(max_batch=4, engine="compiled", independent_rows=True)
IMAGE = {"image": (1, 3, 6, 6)}


def job(path: Path, shapes: dict[str, tuple[int, ...]], **more: Any) -> CompileJob:
    wanted = {"rows": (1, 4), "batched": True, "precision": "fp32", "grain_s": 1e-9, "max_pieces": 4}
    return CompileJob(model=path, shapes=shapes, device="cpu", device_name="cpu", **{**wanted, **more})


def opened(path: Path, folder: Path, cache: Path, options: LoadOptions = OPTIONS) -> Any:
    """The compiled model, over the program as torch runs it."""
    assert prepare_on(HostDevice(), path, options, cache).timing.engine == "torch"
    return prepare_on(HostDevice(), path, replace(options, packages=str(folder)), cache, learn=False)


@pytest.mark.parametrize(("precision", "near"), [("fp32", 1e-4), ("fp16", 1e-2)])
def test_a_compiled_program_answers_as_its_module(
    precision: str, near: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_compiler(monkeypatch)
    path, net = images(tmp_path / "models" / "images.pt2")
    whole = job(path, IMAGE, precision=precision)
    folder = packaged(whole, tmp_path / "whole")
    cut = packaged(whole.model_copy(update={"cuts": choose_cuts(whole, folder)}), tmp_path / "cut")
    for packages, pieces in ((folder, 1), (cut, 4)):
        model = opened(path, packages, tmp_path / "cache", replace(OPTIONS, precision=precision))
        assert model.timing.engine == "compiled" and len(model.segments) == pieces, model.remarks
        assert sorted(model.timing.engines_s) == ["compiled", "torch"] and "in torch step by step" in model.remarks[-1]
        for rows in (1, 3, 9):  # the last in parts
            expected = run_net(net, draw_images(rows)).numpy()
            answer = model.run(draw_images(rows))["output"]
            np.testing.assert_allclose(answer, expected, atol=near * np.abs(expected).max())


def test_a_compiled_program_takes_other_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(monkeypatch)
    path, net = words(tmp_path / "models" / "words.pt2")
    folder = packaged(job(path, TEXTS), tmp_path / "packages")
    model = opened(path, folder, tmp_path / "cache", replace(OPTIONS, shapes=TEXTS))
    assert model.timing.engine == "compiled", model.remarks
    for count in (5, 9):
        answers = model.run(draw_sentences(2, count))
        for name, expected in run_net(net, draw_sentences(2, count)).items():
            np.testing.assert_allclose(answers[name], expected, rtol=1e-4, atol=1e-4)


def test_an_allowed_program_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[CompileJob] = []
    monkeypatch.setattr(packager, "compile_model", lambda job, folder, limits: seen.append(job))
    path, _ = images(tmp_path / "models" / "images.pt2")
    model = prepare_on(HostDevice(), path, OPTIONS)
    Packager("cuda:twin", "cpu").packages(path, OPTIONS, model, tmp_path, compile_now=True)
    assert seen[0].is_program and seen[0].rows == (1, 2, 4) and seen[0].grain_s == OPTIONS.grain_s


@pytest.mark.long
def test_the_confined_compiler_compiles_a_program(tmp_path: Path) -> None:
    path, net = images(tmp_path / "models" / "images.pt2")
    folder = compile_model(job(path, IMAGE), tmp_path / "packages", CompileLimits(1800, 8 << 30, 2))
    model = opened(path, folder, tmp_path / "cache")
    assert model.timing.engine == "compiled" and len(model.segments) == 4, model.remarks
    np.testing.assert_allclose(model.run(draw_images(4))["output"], run_net(net, draw_images(4)), rtol=1e-4, atol=1e-4)
