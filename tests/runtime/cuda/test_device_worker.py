"""A device in a worker process of its own, on its twin: steps ahead, failures, what is freed, and a death."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.cuda.nets import chain, drawn, wanted
from weft.base.errors import BadRequest, ModelError, WorkerDied, WorkerStarting
from weft.runtime.backend import BatchPart, LoadOptions, Step, StepEnd
from weft.runtime.client_memory import LendingTerms, LentTensor
from weft.runtime.cuda.cpu_twins import UNCUT_TWIN as TWIN
from weft.runtime.device_kinds import engine_kind
from weft.runtime.engines import AUTO
from weft.runtime.isolated.device import CompiledCode, DeviceBackend
from weft.runtime.isolated.limits import WorkerLimits
from weft.runtime.isolated.model import IsolatedModel

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are processes of Linux")
PATIENCE_S = 120.0


class Heard:
    """The end of a step, when it has come."""

    def __init__(self) -> None:
        self._come, self._end = threading.Event(), list[StepEnd]()

    def __call__(self, end: StepEnd) -> None:
        self._end.append(end)
        self._come.set()

    def end(self) -> StepEnd:
        assert self._come.wait(PATIENCE_S)
        return self._end[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("device")


@pytest.fixture(scope="module")
def backend() -> Iterator[DeviceBackend]:
    found = DeviceBackend(TWIN, WorkerLimits(kill_s=600.0), 1 << 30)
    yield found
    found.close()


@pytest.fixture(scope="module")
def model(backend: DeviceBackend, folder: Path) -> Any:
    path = chain(folder / "models" / "chain.onnx")
    return backend.open(path, LoadOptions(grain_s=1e-9, max_batch=4), folder / "cache", learn=False)


@pytest.fixture
def lane(backend: DeviceBackend) -> Iterator[Any]:
    found = backend.lane(0)
    yield found
    assert found.close(PATIENCE_S)


def ahead(model: IsolatedModel, lane: Any, feed: dict[str, Any]) -> list[Heard]:
    """All steps of a batch, each started as soon as the one before the last has ended."""
    heard = [Heard() for _ in model.segments]
    values: Any = feed
    for segment in range(len(model.segments)):
        if segment > 1:
            heard[segment - 2].end()
        run = model.start(Step(segment, [BatchPart(values)], len(feed["x"])), lane, heard[segment])
        onward = run.onward or heard[segment].end().outputs  # it may have ended by now
        values = onward[0].values
    return heard


def test_a_device_has_one_lane_that_takes_a_step_ahead(backend: DeviceBackend, model: Any, lane: Any) -> None:
    assert (lane.ahead, backend.inline, backend.memory_bytes) == (1, False, 1 << 30)
    assert model.timing.learned and f"runs in a worker process ({TWIN})" in model.remarks


@pytest.mark.parametrize("rows", [1, 3])
def test_steps_are_started_on_what_is_not_there_yet(model: Any, lane: Any, folder: Path, rows: int) -> None:
    feed = drawn(rows)
    heard = ahead(model, lane, feed)
    ends = [each.end() for each in heard]
    assert [each.error for each in ends] == [None] * 6
    assert all(one.ended <= other.began for one, other in itertools.pairwise(ends))
    expected = wanted(folder / "models" / "chain.onnx", feed)
    np.testing.assert_allclose(ends[-1].outputs[0].answers["y"], expected, rtol=1e-5)


def test_large_tensors_of_two_steps_lie_in_different_places(model: Any, lane: Any, folder: Path) -> None:
    feeds = [drawn(4096, seed) for seed in range(3)]
    for feed in feeds:
        end = ahead(model, lane, feed)[-1].end()
        expected = wanted(folder / "models" / "chain.onnx", feed)
        np.testing.assert_allclose(end.outputs[0].answers["y"], expected, rtol=1e-5)


def test_what_was_sent_ahead_of_a_step_that_fails_fails_as_it_did(
    backend: DeviceBackend, model: Any, lane: Any
) -> None:
    ahead(model, lane, drawn(1))[-1].end()
    worker = backend.groups()[TWIN].worker
    assert worker is not None
    heard = [Heard(), Heard()]
    wrong = {"x": np.zeros((1, 3), np.float32)}  # a width that the weights do not have
    with worker._lanes[lane.index].reading:  # nothing has ended as long as nobody hears of it
        run = model.start(Step(0, [BatchPart(wrong)], 1), lane, heard[0])
        model.start(Step(1, [BatchPart(run.onward[0].values)], 1), lane, heard[1])
    errors = [str(each.end().error) for each in heard]
    assert errors[0] and errors[0] == errors[1]


def test_nothing_is_held_when_nobody_needs_it(backend: DeviceBackend, model: Any, lane: Any) -> None:
    for each in ahead(model, lane, drawn(2)):
        assert each.end().error is None
        each._end.clear()
    del each
    worker = backend.groups()[TWIN].worker
    assert worker is not None
    while worker.call("held") != [1, 0]:
        pass
    told = worker.call("metrics")
    assert told["busy_s"] > 0 and backend.used_bytes[TWIN] >= 0


def test_a_worker_that_died_is_replaced_and_has_the_model(backend: DeviceBackend, model: Any, lane: Any) -> None:
    first = backend.groups()[TWIN].worker
    assert first is not None
    values = ahead(model, lane, drawn(1))[0].end().outputs[0].values
    first.kill("a test")
    heard = Heard()
    model.start(Step(1, [BatchPart(values)], 1), lane, heard)
    assert isinstance(heard.end().error, WorkerDied)
    while isinstance((end := ahead_or_dead(model, lane)).error, WorkerDied):
        threading.Event().wait(0.02)
    assert end.error is None and backend.counts().deaths == 1


def ahead_or_dead(model: IsolatedModel, lane: Any) -> StepEnd:
    heard = Heard()
    model.start(Step(0, [BatchPart(drawn(1))], 1), lane, heard)
    return heard.end()


def test_a_device_is_granted_its_files_and_no_other_engine_is() -> None:
    assert engine_kind("cpu").files("cpu") == ((), ())
    read, written = engine_kind("cuda:0").files("cuda:0")
    assert "/proc" in read and "/proc/self" in written
    assert all(each.startswith(("/dev/", "/proc/self")) for each in written)
    assert engine_kind("cpu").programs("cpu") == engine_kind(TWIN).programs(TWIN) == ()


class Pages:
    """A region of a client's, and how often it was read here."""

    def __init__(self, number: int, array: Any) -> None:
        self.file, self.reads = os.memfd_create("pages"), 0
        os.write(self.file, array.tobytes())
        self.terms = LendingTerms(number, "file", 0, array.nbytes)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        self.reads += 1
        assert os.preadv(self.file, [buffer], offset) == len(buffer)


@pytest.mark.parametrize(
    ("limit", "most", "reads"), [("MOST_LENT", 3, [0] * 3), ("MOST_LENT", 2, [1] * 3), ("MOST_BORROWED", 2, [1] * 3)]
)
def test_more_regions_than_a_worker_can_be_given_or_have_are_read_before(
    model: Any, lane: Any, monkeypatch: pytest.MonkeyPatch, limit: str, most: int, reads: list[int]
) -> None:
    monkeypatch.setattr(f"weft.runtime.isolated.process.{limit}", most)
    feeds = [drawn(1, seed)["x"] for seed in range(3)]
    regions = [Pages(100 * most + 10 * len(limit) + at, each) for at, each in enumerate(feeds)]
    lent = [LentTensor(region, 0, each.shape, each.dtype) for region, each in zip(regions, feeds, strict=True)]
    heard = Heard()
    model.start(Step(0, [BatchPart({"x": each}) for each in lent], 3), lane, heard)
    assert heard.end().error is None and [each.reads for each in regions] == reads
    values: Any = heard.end().outputs[0].values
    for segment in range(1, len(model.segments)):
        heard = Heard()
        model.start(Step(segment, [BatchPart(values)], 3), lane, heard)
        values = heard.end().outputs[0].values
    path = model._kept.file.path
    np.testing.assert_allclose(
        heard.end().outputs[0].answers["y"], wanted(path, {"x": np.concatenate(feeds)}), rtol=1e-4, atol=1e-6
    )


def test_a_region_that_is_only_written_to_is_given_back_and_a_long_answer_ends_nobody(
    backend: DeviceBackend, model: Any
) -> None:
    region = Pages(900, np.zeros(8, np.uint8))
    region.terms, region.file = region.terms._replace(kind="cuda"), None
    with pytest.raises(BadRequest, match="needs a GPU"):  # the twin has none
        backend.write_region(region, 0, memoryview(bytes(13 << 20)))
    worker = backend.groups()[TWIN].worker
    assert worker is not None and worker.alive and worker.call("borrowed") > 0
    before = worker.call("borrowed")
    del region
    gc.collect()
    assert worker.call("borrowed") == before - 1


def test_who_would_write_to_a_region_meets_a_worker_that_is_being_started_as_everybody_does(
    backend: DeviceBackend, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any) -> None:
        raise WorkerDied("the worker that computed it died: SIGKILL")

    region = Pages(902, np.zeros(8, np.uint8))
    monkeypatch.setattr(model.group.worker, "call", die)
    with pytest.raises(WorkerStarting, match=r"is being started again: the worker .* died: SIGKILL; send it again"):
        backend.write_region(region, 0, memoryview(bytes(8)))
    monkeypatch.setattr(model.group, "worker", None)
    with pytest.raises(WorkerStarting, match="is being started; send it again in 1 s") as refused:
        backend.write_region(region, 0, memoryview(bytes(8)))
    assert (refused.value.status, refused.value.code, refused.value.reason) == (503, "UNAVAILABLE", "worker_starting")


def test_a_worker_that_lost_files_on_the_way_is_replaced_and_reads_no_other_memory(model: Any, lane: Any) -> None:
    worker = model.group.worker_for(model.number)
    line = worker._lane_line(lane)
    sent = line.line.send

    def losing(head: Any, pieces: Any = (), files: Any = (), *, wait: bool) -> None:
        sent(head, pieces, [], wait=wait)

    line.line.send = losing
    array, heard = drawn(1)["x"], Heard()
    values = {"x": LentTensor(Pages(901, array), 0, array.shape, array.dtype)}
    model.start(Step(0, [BatchPart(values)], 1), lane, heard)
    assert isinstance(heard.end().error, WorkerDied)


# More models than fit


@pytest.fixture(scope="module")
def narrow(folder: Path) -> Iterator[tuple[DeviceBackend, list[Any]]]:
    """Three models in the memory of one."""
    probe = DeviceBackend(TWIN, WorkerLimits(), 1 << 30)
    paths = [chain(folder / "narrow" / f"{name}.onnx") for name in "abc"]
    options = LoadOptions(grain_s=1e-9, max_batch=2)
    first: Any = probe.open(paths[0], options, folder / "cache")
    moving, staying = first.residency.moving_bytes, first.residency.memory_bytes
    probe.close()
    found = DeviceBackend(TWIN, WorkerLimits(kill_s=600.0), 3 * staying + moving)
    yield found, [found.open(path, options, folder / "cache") for path in paths]
    found.close()


def test_more_models_than_fit_take_turns(narrow: Any, folder: Path) -> None:
    backend, models = narrow
    lane = backend.lane(0)
    assert [each.residency.away_s > 0 for each in models] == [True] * 3 and models[0].residency.moving_bytes > 0
    for turn, model in enumerate([*models, *reversed(models)]):
        feed = drawn(1 + turn % 2, turn)
        (answer,) = ahead(model, lane, feed)[-1].end().outputs
        np.testing.assert_allclose(answer.answers["y"], wanted(folder / "narrow" / "a.onnx", feed), rtol=1e-4)
        gc.collect()
        assert [each.residency.away_s == 0 for each in models] == [each is model for each in models]
    assert backend.returns == {TWIN: 5}
    assert lane.close(PATIENCE_S)


def test_a_model_waits_while_the_memory_is_full_of_what_is_under_way(narrow: Any) -> None:
    backend, models = narrow
    lane, heard = backend.lane(0), [Heard(), Heard(), Heard()]
    models[0].start(Step(0, [BatchPart(drawn(1))], 1), lane, heard[0])
    kept = heard[0].end().outputs
    models[1].start(Step(0, [BatchPart(drawn(1))], 1), lane, heard[1])
    error = heard[1].end().error
    assert isinstance(error, WorkerDied) and error.again_s > 0 and not error.suspects
    assert kept and not models[0].residency.away_s
    del kept
    heard[0]._end.clear()
    gc.collect()
    models[1].start(Step(0, [BatchPart(drawn(1))], 1), lane, heard[2])
    assert heard[2].end().error is None
    assert lane.close(PATIENCE_S)


def test_all_have_left_when_another_worker_was_started(narrow: Any) -> None:
    backend, models = narrow
    worker = backend.group.worker
    worker.kill("a test")
    numbers = {each.number for each in models}
    while backend.group.worker in (worker, None) or not numbers <= backend.group.worker.opened:
        threading.Event().wait(0.01)
    assert [each.residency.away_s > 0 for each in models] == [True] * 3


def test_what_is_free_is_not_forgotten_where_a_step_is_not_sent(narrow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, models = narrow
    lane, worker, heard = backend.lane(0), backend.group.worker, [Heard(), Heard()]
    models[0].start(Step(0, [BatchPart(drawn(1))], 1), lane, heard[0])
    kept = heard[0].end().outputs
    told: list[Any] = []
    monkeypatch.setattr(worker, "notify", told.append)
    worker._freed.append(7)  # while something else was under way
    models[1].start(Step(0, [BatchPart(drawn(1))], 1), lane, heard[1])
    assert isinstance(heard[1].end().error, WorkerDied) and kept
    worker._send_freed()
    assert 7 in [number for _, freed in told for number in freed]
    assert lane.close(PATIENCE_S)


class StubPackager:
    """Says what it was told to say."""

    default = AUTO

    def __init__(self, *said: Any) -> None:
        self.said, self.asked = list(said), list[bool]()

    def packages(self, path: Path, options: LoadOptions, model: Any, cache: Path | None, *, compile_now: bool) -> Any:
        self.asked.append(compile_now)
        result = self.said.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


def test_a_model_is_served_until_it_is_compiled_and_stays_if_it_cannot_be(tmp_path: Path) -> None:
    packager = StubPackager(None, ModelError("there is no C compiler"), CompiledCode(tmp_path / "none", complete=False))
    backend = DeviceBackend(TWIN, WorkerLimits(kill_s=600.0), packager=packager)
    try:
        path, options = chain(tmp_path / "chain.onnx"), LoadOptions(max_batch=2, engine="compiled")
        first = backend.open(path, options, tmp_path / "cache", learn=False)
        assert not first.timing.learned
        second = backend.open(path, options, tmp_path / "cache", learn=True)
        assert second.timing.learned and second.remarks[-1] == "not compiled: there is no C compiler"
        assert packager.said[0].complete is False  # nothing runs compiled, so nothing is learned once more
        third = backend.open(path, options, tmp_path / "cache", learn=True)
        assert third.timing.learned
        assert any(remark.startswith("stays with ONNX Runtime: its packages") for remark in third.remarks)
        assert packager.asked == [False, True, True]
        assert backend.open(path, LoadOptions(max_batch=2), tmp_path / "cache").timing.learned
    finally:
        backend.close()
