"""Gates on the twin: steps of several segments that are stopped anywhere and continued give the same bits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.runtime.cuda.nets import WIDTH, chain, drawn, skipping
from weft.runtime.backend import BatchPart, LoadOptions, Step
from weft.runtime.cuda.device import HostDevice
from weft.runtime.cuda.lane import Launched
from weft.runtime.cuda.model import DeviceModel
from weft.runtime.cuda.preparing import prepare_on

FINE = LoadOptions(grain_s=1e-9, max_batch=4)


class Stops:
    """A stop table that is read by gates: the slot of a launch is the number of gates that let it pass."""

    def __init__(self) -> None:
        self.passes: dict[int, int] = {}

    def __getitem__(self, slot: int) -> bool:
        left = self.passes.get(slot, 1 << 30)
        self.passes[slot] = left - 1
        return left <= 0


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chain(tmp_path_factory.mktemp("models") / "chain.onnx")


def opened(path: Path, options: LoadOptions = FINE, cache: Path | None = None) -> tuple[DeviceModel, Stops]:
    device, stops = HostDevice(), Stops()
    device.use_stops(stops)  # type: ignore[arg-type]
    model = prepare_on(device, path, options, cache)
    assert isinstance(model, DeviceModel) and model.timing.gated
    return model, stops


def whole(model: DeviceModel, feed: dict[str, Any]) -> Any:
    """The answer of a batch that nobody stops."""
    return model.run(feed)["y"]


def test_a_step_ends_at_the_gate_that_finds_it_stopped_and_continues_there(path: Path) -> None:
    model, stops = opened(path)
    feed, count = drawn(3), len(model.segments)
    expected = whole(model, feed)
    for gate in range(count):
        stops.passes[1] = gate
        outputs, computed = model.launch(Step(0, [BatchPart(feed)], 3, count), 1).wait()
        assert computed == gate and len(outputs) == bool(gate)
        values = outputs[0].values if outputs else feed
        launched = model.launch(Step(gate, [BatchPart(values)], 3, count - gate))
        assert not launched.onward
        outputs, computed = launched.wait()
        assert computed is None
        np.testing.assert_array_equal(outputs[0].answers["y"], expected)


def test_a_second_batch_changes_nothing_while_nobody_knows_that_the_first_has_left(path: Path) -> None:
    model, stops = opened(path)
    feeds = drawn(3, 1), drawn(3, 2)
    expected, count = [whole(model, feed) for feed in feeds], len(model.segments)
    stops.passes[1] = 2
    first = model.launch(Step(0, [BatchPart(feeds[0])], 3, count), 1)
    second = model.launch(Step(0, [BatchPart(feeds[1])], 3, count), 2)
    (left,), computed = first.wait()
    assert computed == 2 and second.wait() == ((), 0)
    outputs, computed = model.launch(Step(0, [BatchPart(feeds[1])], 3, count), 2).wait()
    assert computed is None
    np.testing.assert_array_equal(outputs[0].answers["y"], expected[1])
    outputs, _ = model.launch(Step(2, [BatchPart(left.values)], 3, count - 2), 3).wait()
    np.testing.assert_array_equal(outputs[0].answers["y"], expected[0])


def test_batches_go_on_although_one_is_always_queued_behind_another(path: Path) -> None:
    """A launch is refused because of a batch that a gate ended, not because of others that were refused."""
    model, stops = opened(path)
    count, ends = len(model.segments), []
    feeds = [drawn(3, seed) for seed in range(2)]
    stops.passes[1] = 1
    flights = [(index, 0, model.launch(Step(0, [BatchPart(feeds[index])], 3, count), 1 - index)) for index in range(2)]
    for _ in range(4):
        index, at, launched = flights.pop(0)
        outputs, computed = launched.wait()
        ends.append((index, computed))
        at += count if computed is None else computed
        if at < count:
            parts = [BatchPart(outputs[0].values if outputs else feeds[index])]
            flights.append((index, at, model.launch(Step(at, parts, 3, count - at))))
    assert ends == [(0, 1), (1, 0), (0, None), (1, None)]


def test_a_batch_of_other_shapes_than_the_captured_ones_is_stopped_between_segments_by_the_host(tmp_path: Path) -> None:
    options = LoadOptions(grain_s=1e-9, max_batch=4, shapes={"x": (1, 2, WIDTH)})
    model, stops = opened(chain(tmp_path / "chain.onnx", sizes=("n", "m", WIDTH)), options)
    feed, count = {"x": drawn(15)["x"].reshape(3, 5, WIDTH)}, len(model.segments)
    expected = whole(model, feed)
    for gate in range(count):
        stops.passes[1] = gate
        outputs, computed = model.launch(Step(0, [BatchPart(feed)], 3, count), 1).wait()
        assert computed == gate and len(outputs) == bool(gate)
        values = outputs[0].values if outputs else feed
        outputs, computed = model.launch(Step(gate, [BatchPart(values)], 3, count - gate), 2).wait()
        assert computed is None
        np.testing.assert_array_equal(outputs[0].answers["y"], expected)


def test_a_step_of_several_segments_is_stopped_by_the_host_if_the_device_has_lost_its_gates(path: Path) -> None:
    """A worker that was started again may have no memory for them, while the server still makes such steps."""
    device, stops, feed = HostDevice(gateless="no memory"), Stops(), drawn(3)
    device.use_stops(stops)  # type: ignore[arg-type]
    model = prepare_on(device, path, FINE)
    assert isinstance(model, DeviceModel) and not model.timing.gated
    stops.passes[1] = 1
    (output,), computed = model.launch(Step(0, [BatchPart(feed)], 3, len(model.segments)), 1).wait()
    assert computed == 1
    rest = Step(1, [BatchPart(output.values)], 3, len(model.segments) - 1)
    outputs, computed = model.launch(rest, 2).wait()
    assert computed is None
    np.testing.assert_array_equal(outputs[0].answers["y"], whole(model, feed))


def test_a_failure_behind_a_launch_leaves_nothing_that_is_refused_for_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, stops = opened(path)
    feed, count = drawn(3), len(model.segments)
    expected = whole(model, feed)
    stops.passes[1] = 1
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(model, "_gated_output", failing)
        model.launch(Step(0, [BatchPart(feed)], 3, count), 1)
    np.testing.assert_array_equal(whole(model, feed), expected)


@pytest.mark.parametrize(("gated_us", "gates_us"), [(39, 9), (20, 0)])
def test_gates_are_timed_when_a_model_is_opened_and_its_times_contain_them_once(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gated_us: float, gates_us: float
) -> None:
    """Also those of a model from the cache, which has the times without gates."""
    times_s: dict[str, float] = {}

    def timed(device: HostDevice, run: Any) -> float:
        run()
        names = {name for name in times_s if name in run.__qualname__}
        return times_s[names.pop()] if names else 5e-6

    monkeypatch.setattr(HostDevice, "timed", timed)
    times_s |= {"launch_nothing": 7e-6, "_run_all": 30e-6, "_timed_gated": gated_us / 1e6}
    models = [opened(path, cache=tmp_path)[0], opened(path, cache=tmp_path)[0]]
    plain = prepare_on(HostDevice(), path, FINE, tmp_path, learn=False)
    assert set(plain.timing.times_s[1]) == {5e-6} and plain.timing.gates is None
    for model in models:
        gates, count = model.timing.gates, len(model.segments)
        assert gates is not None and (gates.gate_us, gates.leave_us) == (gates_us / count, 7.0)
        assert 0 < gates.launch_us < 1e4
        for found_s in model.timing.times_s.values():
            np.testing.assert_allclose(found_s, 5e-6 + gates_us / 1e6 / count)
        np.testing.assert_array_equal(whole(model, drawn(3)), whole(plain, drawn(3)))


def failing(*_: Any) -> None:
    raise MemoryError


class Batch:
    """A batch on its way through a model."""

    def __init__(self, model: DeviceModel, feed: dict[str, Any], expected: Any) -> None:
        self.model, self.feed, self.expected = model, feed, expected
        self.at, self.values = 0, [BatchPart(feed)]
        self.under_way = False


class Flight(NamedTuple):
    batch: Batch
    segments: int
    launched: Launched


@pytest.mark.parametrize("seed", range(40))
def test_any_schedule_of_stops_gives_the_same_bits(path: Path, seed: int, models: Any) -> None:
    rng = random.Random(seed)
    batches = []
    for model, _ in models:
        for _ in range(6):
            feed = drawn(rng.randint(1, 4), rng.randrange(1 << 30))
            batches.append(Batch(model, feed, whole(model, feed)))
    flights: list[Flight] = []
    slot, waiting = 0, list(batches)
    while waiting or flights:
        ready = [batch for batch in waiting if not batch.under_way]
        if ready and len(flights) < 5 and rng.random() < 0.6:
            batch = rng.choice(ready)
            slot += 1
            stops = next(stops for model, stops in models if model is batch.model)
            rest = len(batch.model.segments) - batch.at
            segments = rng.choice([rest, rng.randint(1, rest)])
            if rng.random() < 0.7:
                stops.passes[slot] = rng.randint(0, segments)
            rows = len(batch.feed["x"])
            step = Step(batch.at, batch.values, rows, segments)
            flights.append(Flight(batch, segments, batch.model.launch(step, slot)))
            batch.under_way = True
        elif flights:
            batch, segments, launched = flights.pop(0)  # ends are reported in order
            outputs, computed = launched.wait()
            batch.under_way, done = False, segments if computed is None else computed
            batch.at += done
            assert len(outputs) == (1 if done else 0)
            if batch.at == len(batch.model.segments):
                np.testing.assert_array_equal(outputs[0].answers["y"], batch.expected)
                waiting.remove(batch)
            elif done:
                batch.values = [BatchPart(outputs[0].values)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[DeviceModel, Stops]]:
    folder = tmp_path_factory.mktemp("models")
    return [opened(chain(folder / "chain.onnx")), opened(skipping(folder / "skipping.onnx"))]
