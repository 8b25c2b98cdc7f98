"""What every backend does, whatever device it has: the one in this process, and those in another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.registering import register
from tests.runtime.clocks import ANY_LENGTH_S, NO_LENGTH_S, said_times
from tests.runtime.exit_nets import EXITS, SIDE, conv_net
from tests.runtime.isolated.contract import ContractBackend
from tests.runtime.process_backend import ProcessBackend
from tests.runtime.steps import Heard, draw, first_output, run_step
from tests.serving import live
from tests.support.endless import ENDLESS, loop_input, loop_model
from weft.base.errors import InputError, ModelError, UnfitInputs
from weft.base.registry import OWN, VARIABLE
from weft.runtime.backend import Backend, BatchPart, DeviceLane, LoadedModel, LoadOptions, Step
from weft.runtime.backends import make_backend

SEGMENT_S = 0.001


@pytest.fixture(scope="module", params=["onnxruntime", "process", "isolated"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    made: Backend = ContractBackend() if request.param == "isolated" else make_backend(request.param)
    yield made
    made.close()


@pytest.fixture
def lane(backend: Backend) -> Iterator[DeviceLane]:
    opened = backend.lane(0)
    yield opened
    assert opened.close(live.PATIENCE_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def chain(backend: Backend, folder: Path) -> Iterator[LoadedModel]:
    """Three segments and more, whose batches can be cut and joined."""
    path = live.heavy(folder / "chain.onnx", layers=6, width=16, rows="n")  # type: ignore[arg-type]
    with said_times(SEGMENT_S):
        model = backend.open(path, LoadOptions(grain_s=ANY_LENGTH_S, max_pieces=3, max_batch=4))
    yield model
    model.close()


def computed(model: LoadedModel, lane: DeviceLane, inputs: dict[str, Any]) -> dict[str, Any]:
    """All segments, one after another."""
    values: Any = inputs
    answers: dict[str, Any] = {}
    for segment in range(len(model.segments)):
        end = run_step(model, lane, segment, BatchPart(values), rows=len(next(iter(inputs.values()))))
        assert end.error is None
        ((values, answers, _),) = end.outputs
    return answers


# Models


def test_a_model_is_cut_measured_and_says_what_it_holds(backend: Backend, chain: LoadedModel) -> None:
    assert len(chain.segments) == len(chain.timing.steady) == 3
    assert [(spec.name, spec.datatype, spec.shape) for spec in chain.inputs] == [("x", "FP32", (-1, 16))]
    assert [spec.name for spec in chain.outputs] == ["y"]
    assert (
        chain.batching.batchable
        and chain.batching.mergeable
        and chain.batching.max_batch == 4
        and not chain.exits
        and not chain.tasks
    )
    assert chain.timing.warm_shapes == {"x": (1, 16)} and chain.residency.memory_bytes >= 6 * 16 * 16 * 4
    assert chain.timing.times_s[1] == pytest.approx((SEGMENT_S,) * 3) == chain.timing.times_at(3)
    assert chain.timing.times_at(8) == pytest.approx((2 * SEGMENT_S,) * 3)


def test_a_prepared_batch_size_changes_nothing(chain: LoadedModel, lane: DeviceLane, folder: Path) -> None:
    before = computed(chain, lane, {"x": draw(3, 16)})["y"]
    for rows in (1, 3, 3, 4):
        chain.prepare(rows)
    assert np.array_equal(computed(chain, lane, {"x": draw(3, 16)})["y"], before)
    assert np.array_equal(before, first_output(folder / "chain.onnx", {"x": draw(3, 16)}))


def test_a_file_that_is_no_model_is_refused_by_name(backend: Backend, tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    with pytest.raises(ModelError, match=r"bad\.onnx: cannot be loaded"):
        backend.open(tmp_path / "bad.onnx", LoadOptions())


def test_what_was_cut_once_is_found_in_the_cache(backend: Backend, folder: Path, tmp_path: Path) -> None:
    path = live.mlp(folder / "mlp.onnx", features=4, hidden=4, classes=2)
    with said_times():
        first = backend.open(path, LoadOptions(max_batch=2), tmp_path)
    again = backend.open(path, LoadOptions(max_batch=2), tmp_path)
    assert again.timing.times_s == first.timing.times_s and again.segments == first.segments
    first.close()
    again.close()


# Steps


def test_the_end_comes_as_an_event_on_the_clock_of_the_backend(
    backend: Backend, chain: LoadedModel, lane: DeviceLane
) -> None:
    before, heard = backend.now(), Heard()
    chain.start(Step(0, (BatchPart({"x": draw(1, 16)}),), 1), lane, heard)
    end = heard.end()
    assert before <= end.began <= end.ended <= backend.now()
    assert heard.threads != [threading.get_ident()]
    if backend.inline:
        chain.start(Step(0, (BatchPart({"x": draw(1, 16)}),), 1), lane, heard, here=True)
        assert heard.threads[-1] == threading.get_ident()


def test_rows_leave_and_batches_are_joined_between_segments(chain: LoadedModel, lane: DeviceLane, folder: Path) -> None:
    inputs = [{"x": draw(rows, 16, seed=rows)} for rows in (2, 1, 3)]
    early = run_step(chain, lane, 0, BatchPart(inputs[0]), BatchPart(inputs[1]), rows=3)
    late = run_step(chain, lane, 0, BatchPart(inputs[2]), rows=3)
    values, others = early.outputs[0].values, late.outputs[0].values
    end = run_step(chain, lane, 1, BatchPart(values, [2, 0]), BatchPart(others), rows=5)
    assert end.error is None
    end = run_step(chain, lane, 2, BatchPart(end.outputs[0].values, [0, 1, 4]), rows=3)
    rows = np.concatenate([inputs[1]["x"], inputs[0]["x"][:1], inputs[2]["x"][2:]])
    np.testing.assert_allclose(end.outputs[0].answers["y"], first_output(folder / "chain.onnx", {"x": rows}), rtol=1e-5)


def test_a_step_can_be_run_again_on_the_same_values(chain: LoadedModel, lane: DeviceLane) -> None:
    first = run_step(chain, lane, 0, BatchPart({"x": draw(2, 16)}), rows=2).outputs[0].values
    one, two = (run_step(chain, lane, 1, BatchPart(first), rows=2).outputs[0].values for _ in range(2))
    answers = [run_step(chain, lane, 2, BatchPart(each), rows=2).outputs[0].answers["y"] for each in (one, two)]
    assert np.array_equal(*answers)


def test_answers_come_at_exits_and_at_the_end_only(
    backend: Backend, chain: LoadedModel, lane: DeviceLane, folder: Path
) -> None:
    assert run_step(chain, lane, 0, BatchPart({"x": draw(1, 16)})).outputs[0].answers == {}
    model = backend.open(conv_net(folder / "exits.onnx"), LoadOptions(grain_s=NO_LENGTH_S, max_batch=2, exits=EXITS))
    assert [(each.output, each.segment) for each in model.exits.specs] == [(name, at) for at, name in enumerate(EXITS)]
    assert model.exits.confidence == "logits" and [spec.name for spec in model.outputs] == ["logits"]
    values: Any = {"x": draw(2, 1, SIDE, SIDE)}
    for segment, name in enumerate(EXITS):
        ((values, answers, _),) = run_step(model, lane, segment, BatchPart(values), rows=2).outputs
        assert {key: each.shape for key, each in answers.items()} == {name: (2, 4)}
    model.close()


def test_inputs_that_a_model_cannot_compute_are_told_from_faults(chain: LoadedModel, lane: DeviceLane) -> None:
    end = run_step(chain, lane, 0, BatchPart({"x": draw(1, 7)}))
    assert isinstance(end.error, UnfitInputs) and not end.outputs and "\n" not in str(end.error)
    assert run_step(chain, lane, 0, BatchPart({"x": draw(1, 16)})).error is None


def test_what_runs_on_two_lanes_at_once_is_stopped_one_by_one(backend: Backend, folder: Path) -> None:
    model = backend.open(loop_model(folder / "turning.onnx"), LoadOptions())
    lanes, ends = [backend.lane(index) for index in range(2)], [Heard(), Heard()]
    endless = Step(0, (BatchPart(loop_input(ENDLESS)),), 1)
    runs = [model.start(endless, lane, heard) for lane, heard in zip(lanes, ends, strict=True)]
    assert not lanes[0].close(0.0)
    runs[1].stop()
    assert ends[1].end().error is not None
    assert run_step(model, lanes[1], 0, BatchPart(loop_input(2))).error is None  # what comes after it is not stopped
    runs[0].stop()
    assert ends[0].end().error is not None
    assert all(lane.close(live.PATIENCE_S) for lane in lanes)
    model.close()


def test_one_that_has_ended_cannot_be_stopped_any_more_nor_what_comes_after_it(
    backend: Backend, lane: DeviceLane, folder: Path
) -> None:
    model, heard = backend.open(loop_model(folder / "again.onnx"), LoadOptions()), Heard()
    first = model.start(Step(0, (BatchPart(loop_input(1)),), 1), lane, heard)
    assert heard.end().error is None
    first.stop()
    model.start(Step(0, (BatchPart(loop_input(20_000)),), 1), lane, heard)
    first.stop()
    assert heard.end().error is None
    model.close()


# The one in another process


@pytest.fixture
def apart() -> Iterator[ProcessBackend]:
    made = make_backend("process")
    assert isinstance(made, ProcessBackend)
    yield made
    made.close()


def test_values_stay_in_the_memory_of_the_process_until_nobody_needs_them(apart: ProcessBackend, folder: Path) -> None:
    path = live.heavy(folder / "far.onnx", layers=4, width=16, rows="n")  # type: ignore[arg-type]
    model, lane = apart.open(path, LoadOptions(grain_s=ANY_LENGTH_S, max_pieces=2, max_batch=4)), apart.lane(0)
    (made,) = run_step(model, lane, 0, BatchPart({"x": draw(4, 16)}), rows=4).outputs
    assert not isinstance(made.values, dict) and made.answers == {}
    assert apart.held() == (1, 1, 4 * 16 * 4)
    del made
    assert apart.held() == (1, 0, 0)
    model.close()
    assert apart.held() == (0, 0, 0)


def test_a_process_that_dies_ends_what_it_ran_and_the_next_model_has_a_new_one(
    apart: ProcessBackend, folder: Path
) -> None:
    path = loop_model(folder / "dying.onnx")
    model, lane, heard = apart.open(path, LoadOptions()), apart.lane(0), Heard()
    first = apart.pid
    model.start(Step(0, (BatchPart(loop_input(ENDLESS)),), 1), lane, heard)
    apart.link.process.kill()
    assert "has ended (exit code -9); load the model again" in str(heard.end().error)
    assert lane.close(live.PATIENCE_S)
    assert "load the model again" in str(run_step(model, lane, 0, BatchPart(loop_input(1))).error)
    model.close()
    again = apart.open(path, LoadOptions())
    assert apart.pid != first
    assert run_step(again, lane, 0, BatchPart(loop_input(1))).error is None


# By name


def test_a_backend_that_nobody_knows_is_refused_with_those_there_are() -> None:
    with pytest.raises(InputError, match="unknown backend 'tpu'; known: onnxruntime, process"):
        make_backend("tpu")


def needs_more(limits: object) -> Backend:
    raise ModuleNotFoundError("No module named 'tpu'")


def test_a_registered_backend_that_needs_more_than_is_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "backends", "tpu", f"{__name__}:needs_more")
    with pytest.raises(
        InputError, match="backend 'tpu' cannot be loaded: No module named 'tpu'; install what it needs"
    ):
        make_backend("tpu")


def test_backends_of_other_packages_are_found_by_their_old_entry_points_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from importlib.metadata import EntryPoint

    found = EntryPoint("apart", "tests.runtime.process_backend:ProcessBackend", "weft.backends")
    lost = EntryPoint("lost", "tests.runtime.process_backend.nowhere:Backend", "weft.backends")
    monkeypatch.setattr("weft.runtime.backends.entry_points", lambda group: [found, lost])
    with pytest.warns(DeprecationWarning, match="backend 'apart' is named by an entry point of weft.backends"):
        assert isinstance(make_backend("apart"), ProcessBackend)
    with pytest.warns(DeprecationWarning), pytest.raises(InputError, match="backend 'lost' cannot be loaded"):
        make_backend("lost")
    monkeypatch.setenv(VARIABLE, OWN)
    with pytest.raises(InputError, match="unknown backend 'apart'"):
        make_backend("apart")
