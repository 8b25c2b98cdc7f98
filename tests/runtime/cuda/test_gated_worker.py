"""Gates in a worker process, on the twin of a device: steps that the server stops by a store into the stop table."""

from __future__ import annotations

import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.runtime.cuda.nets import chain, drawn, leaving, wanted
from tests.runtime.steps import Heard
from tests.support.concurrency import until
from weft.base.errors import WorkerDied
from weft.runtime.backend import BatchPart, LoadOptions, Step, StepOutput
from weft.runtime.cuda.cpu_twins import TWIN, UNCUT_TWIN
from weft.runtime.cuda.device import HostDevice
from weft.runtime.cuda.model import DeviceModel
from weft.runtime.cuda.preparing import prepare_on
from weft.runtime.isolated.backend import KillTimer
from weft.runtime.isolated.confinement import Confinement
from weft.runtime.isolated.device import DeviceBackend, SeveralDevices
from weft.runtime.isolated.limits import WorkerLimits
from weft.runtime.isolated.packets import Garbled, Line
from weft.runtime.isolated.process import WorkerProcess, WorkerRun
from weft.runtime.isolated.stop_table import SLOTS, StopTable, map_stops

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are processes of Linux")
OPTIONS = LoadOptions(grain_s=1e-9, max_batch=4)


def wide_chain(path: Path, layers: int = 8, width: int = 768) -> Path:
    """x of 8 numbers -> products of large matrices, which take long enough to be stopped -> y."""
    rng = np.random.default_rng(0)
    sizes = [8, *[width] * (layers - 1), 8]
    weights, nodes, x = [], [], "x"
    for at in range(layers):
        scale = 1 / np.sqrt(sizes[at])
        drawn_weights = (rng.standard_normal((sizes[at], sizes[at + 1])) * scale).astype(np.float32)
        weights.append(numpy_helper.from_array(drawn_weights, f"w{at}"))
        y = "y" if at == layers - 1 else f"r{at}"
        nodes += [helper.make_node("MatMul", [x, f"w{at}"], [f"m{at}"]), helper.make_node("Tanh", [f"m{at}"], [y])]
        x = y
    value = helper.make_tensor_value_info
    ends = [value(name, TensorProto.FLOAT, ("n", 8)) for name in "xy"]
    graph = helper.make_graph(nodes, "wide", ends[:1], ends[1:], weights)
    path.parent.mkdir(parents=True, exist_ok=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    return path


@pytest.fixture(scope="module")
def backend() -> Iterator[DeviceBackend]:
    found = DeviceBackend(TWIN, WorkerLimits(kill_s=600.0, gates=True), 1 << 30)
    yield found
    found.close()


@pytest.fixture(scope="module")
def model(backend: DeviceBackend, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("gated")
    return backend.open(wide_chain(folder / "models" / "wide.onnx"), OPTIONS, folder / "cache", learn=False)


@pytest.fixture
def lane(backend: DeviceBackend) -> Iterator[Any]:
    found = backend.lane(0)
    yield found
    assert found.close(120.0)


def started(model: Any, lane: Any, at: int, values: Any, rows: int) -> tuple[Any, Heard]:
    heard = Heard()
    step = Step(at, [BatchPart(values)], rows, len(model.segments) - at)
    return model.start(step, lane, heard), heard


class Flight:
    """A batch on its way through a model, from the beginning."""

    def __init__(self, model: Any, lane: Any, feed: dict[str, Any], expected: Any) -> None:
        self._start = lambda at, values: started(model, lane, at, values, len(feed["x"]))
        self._at, self._values, self._expected = 0, feed, expected
        self.run, self._heard = self._start(0, feed)

    def go_on(self) -> int | None:
        """Wait for the end of its step; if a gate ended that, start the rest, and return how much was computed."""
        end = self._heard.end()
        assert end.error is None
        if end.computed is None:
            np.testing.assert_array_equal(end.outputs[0].answers["y"], self._expected)
            return None
        self._at += end.computed
        self._values = end.outputs[0].values if end.computed else self._values
        self.run, self._heard = self._start(self._at, self._values)
        return end.computed


def answer(model: Any, lane: Any, feed: dict[str, Any]) -> Any:
    _, heard = started(model, lane, 0, feed, len(feed["x"]))
    return heard.end().outputs[0].answers["y"]


def test_batches_that_are_stopped_at_random_give_the_same_bits(backend: DeviceBackend, model: Any, lane: Any) -> None:
    assert model.timing.gated
    rng = random.Random(0)
    feeds = [drawn(rows) for rows in (1, 3, 4)]
    expected = [answer(model, lane, feed) for feed in feeds]
    for turn in range(30):
        flights = [Flight(model, lane, feeds[(turn + more) % 3], expected[(turn + more) % 3]) for more in range(2)]
        while flights:
            flight = flights.pop(0)
            if rng.random() < 0.6:
                for _ in range(rng.randrange(300)):
                    os.sched_yield()  # let the worker come to any gate; at which one it ends depends on the machine
                flight.run.stop()
            if flight.go_on() is not None:
                flights.append(flight)
    worker = backend.group.worker  # type: ignore[union-attr]
    assert worker is not None and worker.stops is not None
    assert len(worker.stops._free) == SLOTS - 1, "every slot is free again"


def test_a_step_that_is_stopped_before_it_begins_computes_nothing(model: Any, lane: Any, monkeypatch: Any) -> None:
    feed = drawn(2)
    expected = answer(model, lane, feed)
    table = model.group.worker.stops
    with monkeypatch.context() as patch:
        patch.setattr(table, "take", lambda: stopped_slot(table))
        _, heard = started(model, lane, 0, feed, 2)
    end = heard.end()
    assert (end.error, end.computed, list(end.outputs)) == (None, 0, [])
    np.testing.assert_array_equal(answer(model, lane, feed), expected)


def stopped_slot(table: StopTable) -> int:
    slot = StopTable.take(table)
    table.stop(slot)
    return slot


def test_a_batch_is_one_message_each_way(model: Any, lane: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(model, lane, drawn(1))  # the lane's connection is there
    sent, real = [], Line.send
    with monkeypatch.context() as patch:
        patch.setattr(Line, "send", lambda line, head, *a, **b: sent.append(head[0]) or real(line, head, *a, **b))
        answer(model, lane, drawn(1))
        run, heard = started(model, lane, 0, drawn(1), 1)
        run.stop()
        heard.end()
    assert sent == ["run", "run"]


def test_a_batch_that_waits_between_two_segments_is_lost_with_its_worker_and_begins_anew(
    backend: DeviceBackend, model: Any, lane: Any
) -> None:
    feed = drawn(4)
    expected = answer(model, lane, feed)
    first = Heard()
    model.start(Step(0, [BatchPart(feed)], 4, 3), lane, first)  # the first three segments
    values = first.end().outputs[0].values
    before = backend.group.worker  # type: ignore[union-attr]
    assert before is not None
    os.kill(before.pid, signal.SIGKILL)
    until(lambda: backend.group.worker not in (before, None), "there is another worker")  # type: ignore[union-attr]
    _, heard = started(model, lane, 3, values, 4)
    assert isinstance(heard.end().error, WorkerDied)
    np.testing.assert_array_equal(answer(model, lane, feed), expected)
    assert backend.group.worker.stops is not before.stops  # type: ignore[union-attr]


def test_a_device_without_gates_says_so_and_is_served_segment_by_segment(tmp_path: Path) -> None:
    one = DeviceBackend(UNCUT_TWIN, WorkerLimits(gates=True), 1 << 30)
    model = one.open(wide_chain(tmp_path / "wide.onnx", 3, 16), OPTIONS, tmp_path / "cache")
    assert not model.timing.gated and len(model.segments) > 1
    (remark,) = [remark for remark in model.remarks if "gates" in remark]
    assert remark.startswith("the host starts every segment")
    one.close()


@pytest.mark.parametrize("names", [(TWIN, UNCUT_TWIN), (UNCUT_TWIN, TWIN)])
def test_where_only_one_of_several_devices_has_gates_batches_go_past_exits_on_both(tmp_path: Path, names: Any) -> None:
    """The steps are those for the first device."""
    both = SeveralDevices(names, WorkerLimits(gates=True), 1 << 30)
    options = LoadOptions(grain_s=1e-9, max_batch=4, exits=("early", "late"))
    path, feed = leaving(tmp_path / "leaving.onnx"), drawn(2)
    model = both.open(path, options, tmp_path / "cache")
    assert model.exits is not None and model.timing.gated == (names[0] == TWIN)
    (early,), count = [spec.segment for spec in model.exits.specs[:-1]], len(model.segments)
    ends = [early + 1, count] if model.timing.gated else range(1, count + 1)
    for lane in map(both.lane, range(2)):
        values, first = feed, 0
        for end in ends:
            heard = Heard()
            run = model.start(Step(first, [BatchPart(values)], 2, end - first), lane, heard)
            onward = run.onward
            ended = heard.end()
            assert ended.error is None
            values, first = (onward or ended.outputs)[0].values, end
        np.testing.assert_allclose(ended.outputs[0].answers["late"], wanted(path, feed, "late"), rtol=1e-5)
        assert lane.close(120.0)
    both.close()


def test_the_next_step_may_be_queued_behind_one_that_is_never_stopped(tmp_path: Path) -> None:
    """A server that does not know that the model has gates starts every segment, and expects that."""
    device = HostDevice()
    device.use_stops(np.zeros(SLOTS, np.uint32))
    model = prepare_on(device, chain(tmp_path / "chain.onnx"), OPTIONS)
    assert isinstance(model, DeviceModel) and model.timing.gated
    assert model.launch(Step(0, [BatchPart(drawn(1))], 1)).onward
    assert not model.launch(Step(0, [BatchPart(drawn(1))], 1), 7).onward


def test_a_worker_cannot_claim_a_result_of_no_segment_or_answers_before_the_last(model: Any) -> None:
    step = Step(0, [], 2, len(model.segments))
    early, answering = StepOutput({"r": 1}, {}), StepOutput({}, {"y": np.zeros((2, 8), np.float32)})
    model.check(step, 0, [])
    model.check(step, 1, [early])
    model.check(step, None, [answering])
    for computed, outputs in ((0, [early]), (1, []), (1, [answering]), (None, [early])):
        with pytest.raises(Garbled):
            model.check(step, computed, outputs)


class Run:
    """A step that was told to stop and does not."""

    over = False

    def __init__(self, *, waits: bool = False, uninterrupted_s: float = 0.0) -> None:
        self.waits, self.uninterrupted_s, self.asked = waits, uninterrupted_s, 0
        self.killed_s = 0.0
        """When it was killed; 0: it was not."""

    def request_stop(self) -> None:
        self.asked += 1

    def kill(self, why: str) -> None:
        self.killed_s, self.over = time.monotonic(), True


@pytest.fixture
def timer() -> Iterator[KillTimer]:
    found = KillTimer(0.05)
    yield found
    found.close()


def test_only_a_step_that_waits_for_no_other_is_killed(timer: KillTimer) -> None:
    first, second = Run(), Run(waits=True)
    timer.watch(first)
    timer.watch(second)
    until(lambda: first.killed_s and second.asked > 3, "the first is killed, and the second asked again")
    assert not second.killed_s
    second.waits, turn_s = False, time.monotonic()
    until(lambda: second.killed_s, "the second is killed when it is its turn")
    assert second.killed_s - turn_s >= 0.05, "and has had the whole grace period then"


def test_a_step_has_four_times_as_long_as_its_longest_segment_takes(timer: KillTimer) -> None:
    run, stopped_s = Run(uninterrupted_s=0.03), time.monotonic()
    timer.watch(run)
    until(lambda: run.killed_s, "it is killed")
    assert run.killed_s - stopped_s >= 0.12


def test_a_segment_that_takes_longer_than_a_stop_may_take_costs_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = DeviceBackend(TWIN, WorkerLimits(kill_s=1e-3, gates=True), 1 << 30)
    model: Any = backend.open(wide_chain(tmp_path / "wide.onnx", 3, 16), OPTIONS, tmp_path / "cache")
    assert model.longest_s == max(max(times_s) for times_s in model.timing.times_s.values()) > 0.0
    lane, feed, asked = backend.lane(0), drawn(1), []
    expected, request_stop = answer(model, lane, feed), WorkerRun.request_stop
    monkeypatch.setattr(WorkerRun, "request_stop", lambda run: asked.append(run) or request_stop(run))
    model.longest_s = 60.0  # it really takes microseconds; but its worker is paused
    pid = model.group.worker.pid
    os.kill(pid, signal.SIGSTOP)
    run, heard = started(model, lane, 0, feed, 1)
    run.stop()
    until(lambda: len(asked) > 10 or backend.counts().deaths, "its grace period would be over long ago")
    os.kill(pid, signal.SIGCONT)
    assert (end := heard.end()).error is None and end.computed == 0
    np.testing.assert_array_equal(answer(model, lane, feed), expected)
    assert model.group.worker.pid == pid and backend.counts().deaths == 0
    assert lane.close(120.0)
    backend.close()


def test_a_worker_that_cannot_be_started_leaves_no_stop_table_open() -> None:
    def refused(*_: Any) -> Any:
        raise RuntimeError("no more processes")

    confinement, nothing = Confinement(os.getpid(), None, 64, (), ()), lambda *_: None
    before = stop_tables()
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="no more processes"):
        WorkerProcess(
            "refused", confinement, "/", now=lambda: 0, spawner=pool, fork=refused, carrier=pool, watch=nothing,
            died=nothing, gates=True,
        )  # fmt: skip
    assert stop_tables() == before


def stop_tables() -> set[str]:
    """The open files of this process that are stop tables."""
    links = {str(file): os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}
    return {file for file, target in links.items() if "weft stops" in target}


def test_a_stop_table_is_read_only_for_the_other_side_and_has_every_slot_once() -> None:
    table = StopTable()
    seen = map_stops(os.dup(table.file))
    with pytest.raises(PermissionError):
        mmap.mmap(table.file, 4 * SLOTS)
    slots = [table.take() for _ in range(SLOTS - 1)]
    assert sorted(slots) == list(range(1, SLOTS)) and table.take() == 0, "without a slot it is never stopped"
    table.stop(slots[5])
    assert seen[slots[5]] == 1 and seen.sum() == 1
    table.release(slots[5])
    assert table.take() == slots[5] and seen.sum() == 0
    os.close(table.file)
