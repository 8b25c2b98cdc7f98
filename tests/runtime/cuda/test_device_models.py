"""Models on a device, on its twin: rungs, what batches hold, other shapes, and what cannot run there."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import string_at
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.cuda.nets import WIDTH, chain, choosing, drawn, leaving, wanted
from tests.runtime.special_models import SPECIAL
from weft.base.errors import ModelError, NotLearned
from weft.runtime.backend import BatchPart, LoadOptions, Step, StepEnd
from weft.runtime.cuda import segments
from weft.runtime.cuda.cpu_twins import TWIN
from weft.runtime.cuda.device import HostDevice
from weft.runtime.cuda.engine import CudaEngine
from weft.runtime.cuda.lane import CudaLane, Launched
from weft.runtime.cuda.model import DeviceModel, ModelOnHost, ladder
from weft.runtime.cuda.node_costs import scaled
from weft.runtime.cuda.preparing import prepare_on
from weft.runtime.cuda.segments import open_on

FINE = LoadOptions(grain_s=1e-9, max_batch=4)
"""Every node is a segment of its own."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chain(tmp_path_factory.mktemp("models") / "chain.onnx")


@pytest.fixture(scope="module")
def model(path: Path) -> DeviceModel:
    found = prepare_on(HostDevice(), path, FINE)
    assert isinstance(found, DeviceModel)
    return found


def step(model: DeviceModel, segment: int, *parts: BatchPart, rows: int) -> Any:
    return model.launch(Step(segment, parts, rows)).outputs[0]


def through(model: DeviceModel, feed: dict[str, Any]) -> dict[str, Any]:
    values, rows = feed, len(feed["x"])
    for segment in range(len(model.segments)):
        made = step(model, segment, BatchPart(values), rows=rows)
        values = made.values
    return dict(made.answers)


def test_a_ladder_doubles_up_to_the_largest_batch() -> None:
    assert [ladder(most) for most in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.mark.parametrize(("name", "joins"), [("wide-rows", False), ("perceptron", True)])
def test_rows_of_other_shapes_are_joined_only_where_sizes_decide_nothing(
    name: str, joins: bool, tmp_path: Path
) -> None:
    (special,) = (each for each in SPECIAL if each.name == name)
    found = prepare_on(HostDevice(), special.save(tmp_path), LoadOptions(max_batch=2, shapes=special.shapes))
    assert isinstance(found, DeviceModel) and found.batching.batchable and found.batching.any_shapes == joins


def test_guesses_come_to_what_segments_were_measured_to_take() -> None:
    assert scaled([1.0, 3.0, 2.0], [2], [8.0, 1.0]) == [2.0, 6.0, 1.0]


def test_segments_give_what_the_model_gives(model: DeviceModel, path: Path) -> None:
    assert len(model.segments) == 6 and model.batching.mergeable and model.batching.batchable and model.timing.learned
    assert sorted(model.timing.times_s) == [1, 2, 3, 4] and model.timing.times_s[3] == model.timing.times_s[4]
    for rows in (1, 3, 4):
        np.testing.assert_allclose(through(model, drawn(rows))["y"], wanted(path, drawn(rows)), rtol=1e-5)


def test_batches_of_one_size_in_turns_keep_what_is_theirs(model: DeviceModel, path: Path) -> None:
    feeds: list[Any] = [drawn(3, seed) for seed in (1, 2)]
    values: list[Any] = list(feeds)
    for segment in range(len(model.segments)):
        made = [step(model, segment, BatchPart(each), rows=3) for each in values]
        values = [each.values for each in made]
    for feed, each in zip(feeds, made, strict=True):
        np.testing.assert_allclose(each.answers["y"], wanted(path, feed), rtol=1e-5)


def test_rows_leave_and_batches_are_joined_between_segments(model: DeviceModel, path: Path) -> None:
    one, other = drawn(3, 3), drawn(2, 4)
    first = step(model, 0, BatchPart(one), rows=3).values
    second = step(model, 0, BatchPart(other), rows=2).values
    made = step(model, 1, BatchPart(first, [2, 0]), BatchPart(second), rows=4)
    for segment in range(2, len(model.segments)):
        made = step(model, segment, BatchPart(made.values), rows=4)
    both = {"x": np.concatenate([one["x"][[2, 0]], other["x"]])}
    np.testing.assert_allclose(made.answers["y"], wanted(path, both), rtol=1e-5)


def test_rows_of_new_requests_are_put_together(model: DeviceModel, path: Path) -> None:
    parts = [BatchPart(drawn(1, 5)), BatchPart(drawn(2, 6), [1])]
    made = step(model, 0, *parts, rows=2)
    for segment in range(1, len(model.segments)):
        made = step(model, segment, BatchPart(made.values), rows=2)
    both = {"x": np.concatenate([drawn(1, 5)["x"], drawn(2, 6)["x"][1:]])}
    np.testing.assert_allclose(made.answers["y"], wanted(path, both), rtol=1e-5)


def test_more_rows_than_were_captured_are_computed_by_calls(model: DeviceModel, path: Path) -> None:
    np.testing.assert_allclose(through(model, drawn(9))["y"], wanted(path, drawn(9)), rtol=1e-5)


def test_other_shapes_than_were_captured_are_computed_by_calls(tmp_path: Path) -> None:
    path = chain(tmp_path / "loose.onnx", sizes=("n", "m", WIDTH))
    model = prepare_on(HostDevice(), path, LoadOptions(grain_s=1e-9, max_batch=2, shapes={"x": (1, 3, WIDTH)}))
    assert isinstance(model, DeviceModel)
    feed = {"x": np.random.default_rng(0).standard_normal((2, 5, WIDTH)).astype(np.float32)}
    np.testing.assert_allclose(through(model, feed)["y"], wanted(path, feed), rtol=1e-5)


class Camera(HostDevice):
    """A twin that counts what it captures, and refuses to after a while."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.calls = most, 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        if not self.most:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        self.most -= 1
        return run

    def run_uncaptured(self, run: Callable[[], None]) -> None:
        self.calls += 1
        super().run_uncaptured(run)


def test_what_cannot_be_captured_runs_by_calls_and_says_so(path: Path) -> None:
    device = Camera(0)
    model = prepare_on(device, path, FINE)
    assert isinstance(model, DeviceModel)
    (remark,) = model.remarks
    assert remark == (
        "6 of its 6 segments cannot be captured and run by calls: operation not permitted when stream is capturing"
    )
    before = device.calls
    np.testing.assert_allclose(through(model, drawn(2))["y"], wanted(path, drawn(2)), rtol=1e-5)
    assert device.calls == before + 6


def test_samples_leave_at_exits(tmp_path: Path) -> None:
    path = leaving(tmp_path / "leaving.onnx")
    options = LoadOptions(grain_s=1.0, max_batch=4, exits=("early", "late"))
    model = prepare_on(HostDevice(), path, options)
    assert isinstance(model, DeviceModel) and [each.output for each in model.exits.specs] == ["early", "late"]
    end, feed = model.exits.specs[0].segment, drawn(3)
    launched = model.launch(Step(0, [BatchPart(feed)], 3))
    assert end == 0 and not launched.onward
    np.testing.assert_allclose(launched.outputs[0].answers["early"], wanted(path, feed, "early"), rtol=1e-5)
    made = step(model, 1, BatchPart(launched.outputs[0].values, [1]), rows=1)
    np.testing.assert_allclose(made.answers["late"], wanted(path, feed, "late")[1:2], rtol=1e-5)


def test_what_no_device_takes_runs_on_the_cpu_also_from_the_cache(tmp_path: Path) -> None:
    path = choosing(tmp_path / "choosing.onnx")
    for learn in (True, False):
        model = prepare_on(HostDevice(), path, LoadOptions(), tmp_path, learn=learn)
        assert isinstance(model, ModelOnHost) and "runs on the CPU: it has control flow (If)" in model.remarks
        made = model.launch(Step(0, [BatchPart(drawn(1))], 1)).outputs
        np.testing.assert_array_equal(made[0].answers["y"], wanted(path, drawn(1)))


def test_a_model_is_learned_once(tmp_path: Path, path: Path) -> None:
    device = HostDevice()
    with pytest.raises(NotLearned, match="before it is served"):
        prepare_on(device, path, FINE, tmp_path, learn=False)
    learned = prepare_on(device, path, FINE, tmp_path)
    again = prepare_on(device, path, FINE, tmp_path, learn=False)
    assert isinstance(again, DeviceModel) and again.segments == learned.segments
    np.testing.assert_allclose(through(again, drawn(2))["y"], wanted(path, drawn(2)), rtol=1e-5)


def test_half_precision_says_how_far_it_is_off(tmp_path: Path, path: Path) -> None:
    model = prepare_on(HostDevice(), path, LoadOptions(max_batch=2, precision="fp16"))
    assert isinstance(model, DeviceModel)
    assert any(each.startswith("fp16: differs from float32 by up to ") for each in model.remarks)
    np.testing.assert_allclose(through(model, drawn(2))["y"], wanted(path, drawn(2)), atol=0.05)


def test_a_batch_that_is_asked_for_and_cannot_be_is_refused(tmp_path: Path) -> None:
    path = chain(tmp_path / "fixed.onnx", sizes=(1, WIDTH))
    with pytest.raises(ModelError, match="cannot be batched"):
        prepare_on(HostDevice(), path, LoadOptions(max_batch=4))
    alone = prepare_on(HostDevice(), path, LoadOptions())
    assert alone.batching.max_batch == 1 and any("not batched" in each for each in alone.remarks)


def test_weights_are_uploaded_once_for_all_segments(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.runtime.cuda.segments.SHARED_FROM_BYTES", 1)
    model = prepare_on(HostDevice(), path, FINE)
    assert isinstance(model, DeviceModel) and model._weights.bytes == 3 * WIDTH * WIDTH * 4
    np.testing.assert_allclose(through(model, drawn(3))["y"], wanted(path, drawn(3)), rtol=1e-5)


class Fault:
    """A mark that the device never reaches."""

    def wait(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


class Faulty:
    """A model whose steps end the device."""

    def launch(self, step: Step, slot: int = 0) -> Launched:
        return Launched([], Fault(), Fault(), False)


def test_a_fault_of_the_device_is_told_to_who_ends_the_process() -> None:
    lost: list[Exception] = []
    ends: list[StepEnd] = []
    lane = CudaLane(0, HostDevice(), lambda: 0, lost.append)
    lane.start(Faulty(), Step(0, [], 1), ends.append)
    assert lane.close(60.0)
    assert len(lost) == len(ends) == 1 and ends[0].error is lost[0]


class Full(HostDevice):
    """A twin without room for what crosses cuts."""

    def movable(self, byte_size: int, *, kept: bool) -> Any:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand more")

    def memory(self) -> tuple[int, int]:
        return 3 << 20, 80 << 20


def test_a_model_that_the_memory_has_no_room_for_is_refused(path: Path) -> None:
    engine = CudaEngine(TWIN)
    engine._device = Full()
    with pytest.raises(
        ModelError, match=r"needs more memory than cuda:twin has, of whose 80 MiB 3 are free; lower max"
    ):
        engine.open(path, FINE, None, learn=True)


class Stale(HostDevice):
    """Computes a segment when it is captured, and never again."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return lambda: None


def test_what_gives_the_old_answers_to_new_inputs_is_computed_on_the_cpu(path: Path) -> None:
    model = prepare_on(Stale(), path, LoadOptions(grain_s=1e-9, max_batch=1))
    assert isinstance(model, ModelOnHost) and "its answers differ on the device" in model.remarks[-1]
    np.testing.assert_allclose(model.run(drawn(2))["y"], wanted(path, drawn(2)), rtol=1e-4, atol=1e-5)


class Copying:
    """A session that copies x when it is bound, as those of a GPU do with what they read on the host."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def io_binding(self) -> Any:
        return CopyingBinding(self._session.io_binding())


class CopyingBinding:
    def __init__(self, binding: Any) -> None:
        self._iobinding, self._binding, self._copies = binding._iobinding, binding, dict[str, Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._binding, name)

    def bind_input(self, name: str, kind: str, index: int, dtype: Any, shape: list[int], address: int) -> None:
        if name == "x":
            count = int(np.prod(shape)) * np.dtype(dtype).itemsize
            self._copies[name] = copy = np.frombuffer(string_at(address, count), dtype).copy()
            address = copy.ctypes.data
        self._binding.bind_input(name, kind, index, dtype, shape, address)


def test_inputs_that_are_read_on_the_host_are_copied_there_for_every_run(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*given: Any, **named: Any) -> Any:
        return Copying(open_on(*given, **named))

    monkeypatch.setattr(segments, "open_on", opened)
    monkeypatch.setattr(segments.SegmentSession, "_read_on_host", lambda self: ["x"] if "x" in self.spec.inputs else [])
    model = prepare_on(HostDevice(), path, FINE)
    assert isinstance(model, DeviceModel)
    assert "1 of its" in model.remarks[-1] and model.remarks[-1].endswith("it reads x on the host")
    for seed in (3, 4):
        np.testing.assert_allclose(model.run(drawn(2, seed))["y"], wanted(path, drawn(2, seed)), rtol=1e-4, atol=1e-5)
