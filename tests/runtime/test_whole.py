"""Models opened at once, whole and never run; and learning that ends when its time is over."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.clocks import ANY_LENGTH_S
from tests.runtime.exit_nets import EXITS, conv_net
from tests.serving import live
from tests.support.endless import ENDLESS, loop_model
from weft.base.errors import ModelError
from weft.runtime.backend import LoadOptions
from weft.runtime.onnxruntime_cpu import preparing
from weft.runtime.onnxruntime_cpu.allowance import Allowance
from weft.runtime.onnxruntime_cpu.backend import CpuBackend
from weft.runtime.onnxruntime_cpu.model import CpuModel
from weft.runtime.onnxruntime_cpu.preparing import prepare

FINE = LoadOptions(grain_s=ANY_LENGTH_S, max_pieces=3, max_batch=2)


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    return live.heavy(tmp_path / "chain.onnx", layers=6, width=16, rows="n")  # type: ignore[arg-type]


@pytest.fixture
def never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> None:
        raise AssertionError("it is run")

    monkeypatch.setattr(CpuModel, "run_segment", run)
    monkeypatch.setattr(Allowance, "run", run)


def test_a_model_is_opened_whole_and_never_run(chain: Path, tmp_path: Path, never_run: None) -> None:
    model = prepare(chain, FINE, tmp_path / "cache", learn=False)
    model.prepare(model.batching.max_batch)
    assert not model.timing.learned and model.segments == ("whole",) and model.timing.steady == (False,)
    assert model.timing.warm_shapes is None and not model.batching.batchable and model.batching.max_batch == 1
    assert model.residency.memory_bytes == chain.stat().st_size
    assert not (tmp_path / "cache").exists()


def test_what_it_gives_is_what_it_gives_in_full(chain: Path) -> None:
    whole, full = prepare(chain, FINE, learn=False), prepare(chain, FINE)
    assert full.timing.learned and len(full.segments) == 3
    feed = {"x": np.random.default_rng(0).normal(size=(2, 16)).astype(np.float32)}
    assert whole.run(feed)["y"].tobytes() == full.run(feed)["y"].tobytes()


def test_what_is_in_the_cache_is_opened_in_full(chain: Path, tmp_path: Path) -> None:
    full, said = prepare(chain, FINE, tmp_path / "cache"), list[str]()
    again = prepare(chain, FINE, tmp_path / "cache", said.append, learn=False)
    assert said == ["loading it from the cache"]
    assert again.timing.learned and again.blueprint == full.blueprint


def test_how_long_it_may_be_learned_does_not_change_what_is_in_the_cache(chain: Path, tmp_path: Path) -> None:
    prepare(chain, LoadOptions(), tmp_path / "cache")
    assert prepare(chain, LoadOptions(learn_s=600.0), tmp_path / "cache", learn=False).timing.learned


def test_models_with_exits_are_opened_in_full_all_the_same(tmp_path: Path) -> None:
    options = LoadOptions(max_batch=2, exits=EXITS)
    model = prepare(conv_net(tmp_path / "exits.onnx"), options, tmp_path / "cache", learn=False)
    assert model.timing.learned and len(model.exits.specs) == len(EXITS)
    assert prepare(tmp_path / "exits.onnx", options, tmp_path / "cache", learn=False).timing.learned


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (LoadOptions(shapes={"z": (1,)}), "unknown input 'z'"),
        (LoadOptions(shapes={"x": (1, 7)}), "does not fit input 'x'"),
        (LoadOptions(values={"z": 1.0}), "unknown number input 'z'"),
        (LoadOptions(exits=("a", "y")), "unknown output 'a'"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_run(
    chain: Path, options: LoadOptions, said: str, never_run: None
) -> None:
    with pytest.raises(ModelError, match=rf"chain\.onnx: .*{said}"):
        prepare(chain, options, learn=False)


def test_an_input_without_dimensions_is_refused_at_once(tmp_path: Path) -> None:
    from onnx import TensorProto, helper, save

    unshaped = helper.make_tensor_value_info("x", TensorProto.FLOAT, None)
    shaped = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])
    graph = helper.make_graph([helper.make_node("Tanh", ["x"], ["y"])], "g", [unshaped], [shaped])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="input 'x' states no dimensions"):
        prepare(tmp_path / "m.onnx", LoadOptions(), learn=False)


# Learning that never ends

NEVER = LoadOptions(values={"turns": float(ENDLESS)})


def test_learning_that_does_not_end_is_stopped_when_its_time_is_over(tmp_path: Path) -> None:
    path = loop_model(tmp_path / "turning.onnx")
    with pytest.raises(ModelError, match=r"turning\.onnx: was not cut and measured within 0\.1 s"):
        prepare(path, LoadOptions(values=NEVER.values, learn_s=0.1), tmp_path / "cache")
    assert not any((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("phase", ["profile", "measure", "judge_rows"])
def test_in_every_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    """What is found out by runs that fail is found out; but one that was stopped says nothing of the model."""
    allowance, real = Allowance(), getattr(preparing, phase)

    def stopped(*args: Any) -> Any:
        allowance.stop()
        return real(*args)

    monkeypatch.setattr(preparing, phase, stopped)
    path = live.heavy(tmp_path / "chain.onnx", layers=6, width=16, rows="n")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="was not cut and measured;"):
        prepare(path, FINE, allowance=allowance)


def test_the_end_of_a_backend_stops_what_it_tries_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, backend, runs = loop_model(tmp_path / "turning.onnx"), CpuBackend(), threading.Event()
    run, problems = Allowance.run, list[Exception]()

    def noticed(self: Allowance, *args: Any) -> Any:
        runs.set()
        return run(self, *args)

    def learn() -> None:
        try:
            backend.open(path, NEVER)
        except ModelError as error:
            problems.append(error)

    monkeypatch.setattr(Allowance, "run", noticed)
    thread = threading.Thread(target=learn)
    thread.start()
    assert runs.wait(live.PATIENCE_S)
    backend.close()
    thread.join(live.PATIENCE_S)
    assert "was not cut and measured;" in str(problems[0])
    with pytest.raises(ModelError, match="is not opened any more"):
        backend.open(path, LoadOptions())


def test_a_model_without_warm_shapes_can_be_stopped_too(tmp_path: Path) -> None:
    """Whatever it is expected to take: every run on a lane carries what stops it."""
    from tests.runtime.steps import Heard
    from tests.support.endless import loop_input
    from weft.runtime.backend import BatchPart, Step

    backend = CpuBackend()
    model, lane, heard = (
        backend.open(loop_model(tmp_path / "t.onnx"), LoadOptions(), learn=False),
        backend.lane(0),
        Heard(),
    )
    running = model.start(Step(0, (BatchPart(loop_input(ENDLESS)),), 1), lane, heard)
    running.stop()
    assert heard.end().error is not None
    assert lane.close(live.PATIENCE_S)


def test_a_version_that_answers_nobody_while_it_opens_a_model_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, (new, old) = loop_model(tmp_path / "t.onnx"), (CpuBackend(), CpuBackend())
    for backend, version in ((new, "1.31.0"), (old, "1.30.2"), (old, "1.30.2")):
        with monkeypatch.context() as patched:
            patched.setattr("onnxruntime.__version__", version)
            backend.open(path, LoadOptions(), learn=False).close()
    (said,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert said.startswith("onnxruntime 1.30.2 answers no request") and "install 1.31 or later" in said
