"""Workers that are killed, run out of memory, lose their files, lie, or hear nothing; and who takes their place."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.exit_nets import conv_net
from tests.runtime.isolated.models import HOURS, boxes, stubborn, swelling, table
from tests.runtime.isolated.templates import LastingTemplate
from tests.runtime.isolated.workers import NoModel, kill_worker, liar, opened, pid, running, until_it_computes
from tests.runtime.steps import Heard, draw, first_output, run_step
from tests.serving import live
from tests.support.concurrency import until
from tests.support.endless import ENDLESS, loop_input, loop_model
from weft.base.errors import (
    Failed,
    ModelError,
    Overloaded,
    RequestError,
    UnfitInputs,
    WorkerDied,
    WorkerStarting,
)
from weft.runtime.backend import BatchPart, LoadOptions, Step
from weft.runtime.breaker import BreakerLimits
from weft.runtime.isolated import packets, process
from weft.runtime.isolated.backend import IsolatingBackend
from weft.runtime.isolated.group import LONGEST_PAUSE_S, WorkerGroup
from weft.runtime.isolated.lane import LaneLine, StepReport
from weft.runtime.isolated.limits import WorkerLimits
from weft.runtime.isolated.model import IsolatedModel
from weft.runtime.isolated.process import WorkerProcess, WorkerRun
from weft.runtime.isolated.spawning import Template
from weft.runtime.onnxruntime_cpu.backend import CpuBackend
from weft.runtime.own_folder import make_folder


@pytest.fixture(scope="module")
def template() -> Iterator[LastingTemplate]:
    shared = LastingTemplate()
    yield shared
    shared.end()


@pytest.fixture
def made(template: LastingTemplate) -> Iterator[list[IsolatingBackend]]:
    """Where backends are put that fork their workers from one template, so that all are closed."""
    backends: list[IsolatingBackend] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.runtime.isolated.backend.Template", lambda engine: template)
        yield backends
    for each in backends:
        each.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def calm(folder: Path) -> Iterator[IsolatingBackend]:
    """One whose worker is not hurt, and stays as long as its first model."""
    one = IsolatingBackend(CpuBackend(), WorkerLimits(spare=False, kill_s=600.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_API_KEY", "open-sesame")
        opened(one, loop_model(folder / "first.onnx"))
    yield one
    one.close()


def backend(made: list[IsolatingBackend], **limits: Any) -> IsolatingBackend:
    made.append(IsolatingBackend(CpuBackend(), WorkerLimits(**{"spare": False, "kill_s": 600.0} | limits)))
    return made[-1]


def spare_of(group: WorkerGroup) -> WorkerProcess:
    """The spare, once it has all models."""
    found: WorkerProcess = until(lambda: group.spare and group.spare.opened and group.spare, "a spare is ready")
    return found


def whole(one: IsolatingBackend, path: Path) -> IsolatedModel:
    """A model that is not learned, which takes one process."""
    model = one.open(path, LoadOptions(isolation="g"), path.parent / "cache", learn=False)
    assert isinstance(model, IsolatedModel)
    return model


def assert_gone(*pids: int) -> None:
    for each in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(each, 0)


# Ordinary life


def test_what_does_not_depend_on_values_is_told(made: list[IsolatingBackend], tmp_path: Path) -> None:
    one, path = backend(made), live.mlp(tmp_path / "mlp.onnx")
    known, unknown = opened(one, path, learn=True), opened(one, live.mlp(tmp_path / "other.onnx", seed=1))
    assert all(known.timing.foreseen) and not any(known.timing.steady) and not any(unknown.timing.foreseen)


def test_models_of_a_group_share_a_worker_and_others_do_not(made: list[IsolatingBackend], tmp_path: Path) -> None:
    one, path = backend(made), live.mlp(tmp_path / "mlp.onnx")
    first, second, third = (opened(one, path, group) for group in ("a", "a", "b"))
    threads = one.open(path, LoadOptions(), tmp_path / "cache")
    pids = {pid(first.group), pid(third.group)}
    assert first.group is second.group and len(pids) == 2 and os.getpid() not in pids
    lane = one.lane(0)
    for model in (first, second, third, threads):
        made_there = run_step(model, lane, 0, BatchPart({"x": draw(2, 64)}), rows=2).outputs
        assert np.array_equal(made_there[0].answers["y"], first_output(path, {"x": draw(2, 64)}))
    assert not any(first.timing.steady) and any("worker process (a)" in each for each in first.remarks)
    first.close()
    assert run_step(second, lane, 0, BatchPart({"x": draw(1, 64)})).error is None
    second.close()
    assert list(one.groups()) == ["b"]
    assert lane.close(live.PATIENCE_S)
    one.close()
    assert_gone(*pids)


def test_large_tensors_travel_in_memory_that_both_see(calm: IsolatingBackend, folder: Path) -> None:
    one, path = calm, live.heavy(folder / "chain.onnx", layers=4, width=512, rows="n")  # type: ignore[arg-type]
    model, lane = opened(one, path, max_batch=1), one.lane(0)
    for rows in (1, 700, 3, 9000, 2):  # by the packet, in memory, by the packet, in more of it than is kept
        inputs: Any = {"x": draw(rows, 512)}
        end = run_step(model, lane, 0, BatchPart(inputs), rows=rows)
        assert end.error is None
        np.testing.assert_allclose(end.outputs[0].answers["y"], first_output(path, inputs), rtol=1e-4, atol=1e-5)
    assert lane.close(live.PATIENCE_S)


def test_values_stay_in_the_worker_until_nobody_needs_them(calm: IsolatingBackend, folder: Path) -> None:
    one, path = calm, live.heavy(folder / "far.onnx", layers=4, width=16, rows="n")  # type: ignore[arg-type]
    model, lane = opened(one, path, grain_s=1e-9, max_pieces=2, max_batch=4, learn=True), one.lane(0)
    worker = model.group.worker
    assert worker is not None and len(model.segments) == 2
    (half,) = run_step(model, lane, 0, BatchPart({"x": draw(4, 16)}), rows=4).outputs
    models, _ = worker.call("held")
    assert worker.call("held") == [models, 1]
    end = run_step(model, lane, 1, BatchPart(half.values), rows=4)
    np.testing.assert_allclose(end.outputs[0].answers["y"], first_output(path, {"x": draw(4, 16)}), rtol=1e-4)
    del half
    until(lambda: worker.call("held") == [models, 0], "they are free")


def test_what_a_worker_has_of_the_environment_is_no_secret(calm: IsolatingBackend) -> None:
    there = Path(f"/proc/{pid(calm.groups()['g'])}/environ").read_bytes()
    assert b"PYTHONPATH" in there and b"sesame" not in there


def test_a_server_that_has_no_files_left_fails_the_request_and_spares_the_worker(
    calm: IsolatingBackend, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: int) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    path = live.heavy(folder / "wide.onnx", layers=2, width=512, rows="n")  # type: ignore[arg-type]
    model, lane = opened(calm, path, max_batch=1), calm.lane(0)
    with monkeypatch.context() as patch:
        patch.setattr(packets, "create_memory", none_left)
        error = run_step(model, lane, 0, BatchPart({"x": draw(700, 512)}), rows=700).error
    assert isinstance(error, OSError) and calm.counts().deaths == 0
    assert run_step(model, lane, 0, BatchPart({"x": draw(700, 512)}), rows=700).error is None


# Deaths


def test_one_that_is_killed_takes_only_what_it_ran_and_its_spare_takes_over(
    made: list[IsolatingBackend], tmp_path: Path
) -> None:
    one, path = backend(made, spare=True), loop_model(tmp_path / "turning.onnx")
    model, other = opened(one, path), opened(one, path, "other")
    lanes = [one.lane(0), one.lane(1)]
    first, spare = pid(model.group), spare_of(model.group)
    doomed, calm = running(model, lanes[0], loop_input(ENDLESS)), running(other, lanes[1], loop_input(10_000))
    os.kill(first, signal.SIGKILL)
    error = doomed.end().error
    assert isinstance(error, WorkerDied) and (error.suspects, error.again_s) == (1, 0.0)
    assert "SIGKILL" in str(error)
    assert model.group.worker is spare  # it is in charge before anybody hears of the death
    assert run_step(model, lanes[0], 0, BatchPart(loop_input(3))).error is None
    assert calm.end().error is None
    again = spare_of(model.group)
    assert again.pid not in (first, spare.pid)
    assert one.counts() == (1, 1)
    one.close()
    assert_gone(first, spare.pid, again.pid)


def test_without_a_spare_steps_are_told_when_to_come_again(made: list[IsolatingBackend], tmp_path: Path) -> None:
    one = backend(made)
    model, lane = opened(one, live.mlp(tmp_path / "mlp.onnx")), one.lane(0)
    with model.group._preparing:  # nobody can be made ready
        os.kill(pid(model.group), signal.SIGKILL)
        until(lambda: model.group.worker is None, "it is dead")
        error = run_step(model, lane, 0, BatchPart({"x": draw(1, 64)})).error
        assert isinstance(error, WorkerDied) and error.again_s > 0 and not error.suspects
    until(lambda: model.group.worker, "there is another one")
    assert run_step(model, lane, 0, BatchPart({"x": draw(1, 64)})).error is None


def test_what_a_batch_held_goes_with_its_worker_and_it_begins_anew(
    made: list[IsolatingBackend], tmp_path: Path
) -> None:
    one, path = backend(made, spare=True), live.heavy(tmp_path / "far.onnx", layers=4, width=16, rows="n")  # type: ignore[arg-type]
    model, lane = opened(one, path, grain_s=1e-9, max_pieces=2, learn=True), one.lane(0)
    spare = spare_of(model.group)
    (half,) = run_step(model, lane, 0, BatchPart({"x": draw(1, 16)})).outputs
    os.kill(pid(model.group), signal.SIGKILL)
    until(lambda: model.group.worker is spare, "the spare is in charge")
    error = run_step(model, lane, 1, BatchPart(half.values)).error
    assert isinstance(error, WorkerDied) and not error.suspects
    (half,) = run_step(model, lane, 0, BatchPart({"x": draw(1, 16)})).outputs
    assert run_step(model, lane, 1, BatchPart(half.values)).error is None


def test_an_operator_that_does_not_look_up_is_killed_with_its_worker_and_nobody_else_is_blamed(
    made: list[IsolatingBackend], tmp_path: Path
) -> None:
    one = backend(made, kill_s=0.05)
    model, loop = opened(one, stubborn(tmp_path / "stubborn.onnx")), opened(one, loop_model(tmp_path / "turning.onnx"))
    lanes, heard, beside = [one.lane(0), one.lane(1)], Heard(), Heard()
    assert run_step(model, lanes[0], 0, BatchPart(boxes(1))).error is None
    run = model.start(Step(0, (BatchPart(boxes(HOURS)),), 1), lanes[0], heard)
    until_it_computes(pid(model.group))
    loop.start(Step(0, (BatchPart(loop_input(ENDLESS)),), 1), lanes[1], beside)
    run.stop()
    error, innocent = heard.end().error, beside.end().error
    assert isinstance(error, WorkerDied) and error.suspects == 1
    assert "told to stop and had not 0.05 s later" in str(error)
    assert isinstance(innocent, WorkerDied) and innocent.suspects == 0
    assert model.breaker._in_a_row == 1 and loop.breaker._in_a_row == 0
    assert all(lane.close(live.PATIENCE_S) for lane in lanes)


def test_a_step_that_can_be_stopped_costs_no_worker(calm: IsolatingBackend, folder: Path) -> None:
    one = calm
    model, lane, heard = opened(one, loop_model(folder / "turning.onnx")), one.lane(0), Heard()
    before = pid(model.group)
    model.start(Step(0, (BatchPart(loop_input(ENDLESS)),), 1), lane, heard).stop()
    error = heard.end().error
    assert error is not None and not isinstance(error, WorkerDied)
    assert run_step(model, lane, 0, BatchPart(loop_input(3))).error is None
    assert pid(model.group) == before and one.counts().deaths == 0


def test_a_request_for_more_memory_than_its_worker_may_have_fails_and_the_next_does_not(
    made: list[IsolatingBackend], tmp_path: Path
) -> None:
    one = backend(made, memory_bytes=1 << 30, spare=True)
    model, lane = opened(one, swelling(tmp_path / "swelling.onnx")), one.lane(0)
    spare_of(model.group)
    x = np.ones(1, np.float32)
    error = run_step(model, lane, 0, BatchPart({"x": x, "shape": np.array([1 << 30])})).error
    assert isinstance(error, UnfitInputs | WorkerDied)
    until(lambda: model.group.worker, "a worker is there")
    end = run_step(model, lane, 0, BatchPart({"x": x, "shape": np.array([1000])}))
    assert end.error is None and end.outputs[0].answers["y"] == 1


def test_a_model_whose_weights_are_cut_short_goes_on_and_is_not_brought_back_as_another(
    made: list[IsolatingBackend], tmp_path: Path
) -> None:
    one = backend(made)
    model, lane = opened(one, table(tmp_path / "table.onnx")), one.lane(0)
    row = np.array([[60_000]])
    assert run_step(model, lane, 0, BatchPart({"row": row})).error is None
    os.truncate(tmp_path / "table.data", 4096)
    assert run_step(model, lane, 0, BatchPart({"row": row + 1})).error is None, "they were read, not mapped"
    os.kill(pid(model.group), signal.SIGBUS)
    failed = until(lambda: _failure(model, lane, {"row": row}), "it is given up")
    assert "its files have changed since it was loaded" in str(failed)
    with pytest.raises(ModelError):
        opened(one, tmp_path / "table.onnx")


def _failure(model: IsolatedModel, lane: Any, inputs: dict[str, Any]) -> RequestError | None:
    """Why it cannot be had; None while that is not known, or before its worker has felt a signal."""
    error = run_step(model, lane, 0, BatchPart(inputs)).error
    assert error is None or isinstance(error, Failed | WorkerStarting)
    return None if isinstance(error, WorkerDied) else error


def test_a_model_whose_worker_dies_too_often_is_left_alone_until_it_is_tried_again(
    made: list[IsolatingBackend], tmp_path: Path
) -> None:
    one = backend(made, spare=True, breaker=BreakerLimits(deaths=1, pause_s=1e5, longest_pause_s=1e6))
    clock = [0]
    model, lane = opened(one, loop_model(tmp_path / "turning.onnx")), one.lane(0)
    model.breaker._now = lambda: clock[0]
    for _ in range(2):
        spare_of(model.group)
        heard = running(model, lane, loop_input(ENDLESS))
        os.kill(pid(model.group), signal.SIGSEGV)
        assert "SIGSEGV" in str(heard.end().error)
    assert model.breaker.state == "open"
    refused = run_step(model, lane, 0, BatchPart(loop_input(3))).error
    assert isinstance(refused, Overloaded) and "died 2 times; it is tried again in 100000.0 s" in str(refused)
    with pytest.raises(Overloaded):
        model.breaker.admit()
    clock[0] += 10**14
    model.breaker.admit()
    until(lambda: model.group.worker, "a worker is there")
    assert run_step(model, lane, 0, BatchPart(loop_input(3))).error is None
    assert model.breaker.state == "closed"


def _sent_after_its_end(worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the next call go to a process that has ended, before anybody has seen to that."""
    ended, killed, bury, kill = threading.Event(), threading.Event(), worker._handle_death, worker.process.kill

    def buried(code: int) -> None:
        ended.set()
        killed.wait()
        bury(code)

    def killing() -> None:
        kill()
        if ended.is_set():
            killed.set()

    def send(*_: Any, **__: Any) -> None:
        ended.wait()
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    for where, name, what in (
        (worker, "_handle_death", buried),
        (worker.process, "kill", killing),
        (worker._line, "send", send),
    ):
        monkeypatch.setattr(where, name, what)


@pytest.mark.parametrize(
    ("learn", "what", "gone"), [(True, "cut and measured", False), (False, "opened", False), (False, "opened", True)]
)
def test_a_model_that_kills_its_worker_when_it_is_opened_is_refused_and_others_of_its_group_live_on(
    made: list[IsolatingBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learn: bool, what: str, gone: bool
) -> None:
    one = backend(made)
    model, lane = opened(one, loop_model(tmp_path / "turning.onnx")), one.lane(0)
    call, before = WorkerProcess.call, model.group.worker

    def dying(worker: WorkerProcess, method: str, *arguments: Any) -> Any:
        if method == "open" and "bad" in str(arguments):
            os.kill(worker.pid, signal.SIGSEGV)
            if gone:
                _sent_after_its_end(worker, monkeypatch)
        return call(worker, method, *arguments)

    monkeypatch.setattr(WorkerProcess, "call", dying)
    with pytest.raises(ModelError, match=rf"bad\.onnx: cannot be {what}: .*SIGSEGV"):
        one.open(loop_model(tmp_path / "bad.onnx"), LoadOptions(isolation="g"), learn=learn)
    until(lambda: model.group.worker, "there is one")
    assert (model.group.worker is before) == learn, "what is tried out has a process of its own"
    assert run_step(model, lane, 0, BatchPart(loop_input(3))).error is None


def test_a_worker_that_cannot_be_made_ready_again_is_given_up_and_a_load_brings_it_back(
    made: list[IsolatingBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = backend(made)
    model, lane = opened(one, loop_model(tmp_path / "turning.onnx")), one.lane(0)
    with monkeypatch.context() as patch:
        patch.setattr("weft.runtime.isolated.group.MOST_FAILURES", 1)
        patch.setattr(Template, "fork", lambda *_: subprocess.Popen(["/bin/true"]))
        os.kill(pid(model.group), signal.SIGKILL)
        failed = until(lambda: _failure(model, lane, loop_input(1)), "it is given up")
    assert isinstance(failed, WorkerStarting) and "its worker cannot be started again" in str(failed)
    assert (failed.status, failed.retry_after_s) == (503, LONGEST_PAUSE_S)
    again = opened(one, tmp_path / "turning.onnx")
    assert run_step(again, lane, 0, BatchPart(loop_input(3))).error is None


# Lies


@pytest.mark.parametrize("where", ["line", "lane"])
@pytest.mark.parametrize(
    "head",
    [
        "no json",
        "{}",
        '["nonsense"]',
        "[]",
        '["over"]',
        '["over", 77, 0, 0, [], false, null, null]',
        '["over", 1, 0, 0, [[1, [["y", "FP32", [1000], 0, 4000]], null]], false, null, null]',
        '["over", 1, 0, 0, [[1, [], null]], true, null, null]',
        '["over", 1, "soon", 0, [[1, [], null]], false, null, null]',
        '["over", 1, 0, 0, 5, false, null, null]',
        '["over", 1, 0, 0, [], false, 5, null]',
        '["over", 1, 0, 0, [[1, [], null]], false, null]',
        '["over", 1, 0, 0, [[1, [], null]], false, null, 1]',
        '["over", 1, 0, 0, [[1, [], null]], false, null, -1]',
        '["over", 1, 0, 0, [[1, [], null]], false, null, "1"]',
        '["over", 1, 0, 0, [[1, [], null]], false, null, true]',
        '["reply", 99, 1, null]',
        '["hello", [], []]',
    ],
)
def test_what_cannot_be_read_is_the_end_of_who_sent_it(head: str, where: str) -> None:
    one = IsolatingBackend(CpuBackend())
    with ThreadPoolExecutor(1) as spawner:
        worker, deaths = liar(spawner, where, head)
        heard, lane = Heard(), one.lane(0)
        step = Step(0, (BatchPart({"x": np.zeros(4, np.float32)}),), 1)
        worker.begin(lane, NoModel(), step, heard)
        error = heard.end().error
        worker.close()
    assert isinstance(error, WorkerDied) and "sent what cannot be read" in str(error)
    assert len(deaths) == 1
    assert lane.close(live.PATIENCE_S)
    one.close()


def test_answers_that_a_model_cannot_give_are_the_end_of_who_sent_them(
    made: list[IsolatingBackend], tmp_path: Path
) -> None:
    one = backend(made)
    model, lane = opened(one, live.mlp(tmp_path / "mlp.onnx")), one.lane(0)
    model._output_types = {"z": np.dtype(np.float32)}
    error = run_step(model, lane, 0, BatchPart({"x": draw(1, 64)})).error
    assert isinstance(error, WorkerDied) and "answers ['y'] where ['z'] were due" in str(error)


def test_nothing_is_left_when_a_backend_is_closed_while_a_model_is_opened(
    made: list[IsolatingBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, path, reached = backend(made), live.mlp(tmp_path / "mlp.onnx"), threading.Event()
    call = WorkerProcess.call

    def waiting(worker: WorkerProcess, method: str, *arguments: Any) -> Any:
        os.kill(worker.pid, signal.SIGSTOP)  # so that it never answers
        reached.set()
        return call(worker, method, *arguments)

    monkeypatch.setattr(WorkerProcess, "call", waiting)
    failures: list[Exception] = []

    def load() -> None:
        try:
            opened(one, path, learn=True)
        except ModelError as error:
            failures.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    assert reached.wait(live.PATIENCE_S)
    monkeypatch.setattr(process, "PATIENCE_S", 0.01)
    one.close()
    thread.join(live.PATIENCE_S)
    assert len(failures) == 1 and "it was closed" in str(failures[0])


# What models do behind one's back


def test_what_a_model_leaves_in_its_folders_is_no_module_of_the_next_worker(
    made: list[IsolatingBackend], tmp_path: Path
) -> None:
    one = backend(made)
    model, lane = whole(one, live.mlp(tmp_path / "mlp.onnx")), one.lane(0)
    home = model.group._scratch / ".local" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    home.mkdir(parents=True)
    planted = [model.group._scratch / "orjson.py", model.group.folder / "orjson.py", home / "usercustomize.py"]
    for each in planted:
        each.write_text("import os; os._exit(3)")
    assert os.readlink(f"/proc/{kill_worker(model.group).pid}/cwd") == "/"
    assert run_step(model, lane, 0, BatchPart({"x": draw(1, 64)})).error is None


def test_one_that_was_opened_whole_comes_back_whole_though_it_was_learned_since(
    made: list[IsolatingBackend], tmp_path: Path
) -> None:
    one, path = backend(made), live.heavy(tmp_path / "far.onnx", layers=4, width=16, rows="n")  # type: ignore[arg-type]
    options, lane = LoadOptions(isolation="g", grain_s=1e-9, max_pieces=2), one.lane(0)
    simple = one.open(path, options, tmp_path / "cache", learn=False)
    assert isinstance(simple, IsolatedModel)
    parts = one.open(path, options, tmp_path / "cache")
    assert (len(simple.segments), len(parts.segments)) == (1, 2)
    assert len(kill_worker(simple.group).opened) == 2
    assert run_step(simple, lane, 0, BatchPart({"x": draw(1, 16)})).error is None


def test_steps_of_a_dead_worker_end_though_no_thread_can_be_started_to_restore_it(
    made: list[IsolatingBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = backend(made)
    model, lane = whole(one, loop_model(tmp_path / "turning.onnx")), one.lane(0)
    until(lambda: model.group._keeper is None, "nobody is at it")
    start = threading.Thread.start

    def none_left(thread: threading.Thread) -> None:
        if thread.name.startswith("keeper"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        heard = running(model, lane, loop_input(ENDLESS))
        os.kill(pid(model.group), signal.SIGKILL)
        assert isinstance(heard.end().error, WorkerDied)
    error = run_step(model, lane, 0, BatchPart(loop_input(3))).error
    assert isinstance(error, WorkerDied) and error.again_s > 0
    until(lambda: model.group.worker, "who asked had it restored")
    assert run_step(model, lane, 0, BatchPart(loop_input(3))).error is None


def test_steps_of_a_dead_worker_end_whatever_becomes_of_the_news(
    made: list[IsolatingBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = backend(made)
    model, lane = whole(one, loop_model(tmp_path / "turning.onnx")), one.lane(0)
    heard, worker = running(model, lane, loop_input(ENDLESS)), model.group.worker
    assert worker is not None
    monkeypatch.setattr(worker, "_died", lambda *_: 1 / 0)
    os.kill(worker.pid, signal.SIGKILL)
    assert isinstance(heard.end().error, WorkerDied)
    assert f"the death of worker {worker.pid} could not be reported" in caplog.text


def test_a_worker_that_could_not_be_made_ready_is_tried_again_without_a_load(
    made: list[IsolatingBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = backend(made)
    model, lane = whole(one, loop_model(tmp_path / "turning.onnx")), one.lane(0)
    monkeypatch.setattr("weft.runtime.isolated.group.LONGEST_PAUSE_S", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr("weft.runtime.isolated.group.MOST_FAILURES", 2)
        patch.setattr(Template, "fork", lambda *_: subprocess.Popen(["/bin/true"]))
        os.kill(pid(model.group), signal.SIGKILL)
        until(lambda: _failure(model, lane, loop_input(1)), "requests are told")
    until(lambda: model.group.worker, "there is one again")
    assert run_step(model, lane, 0, BatchPart(loop_input(3))).error is None


@pytest.mark.parametrize("deadly", [True, False])
def test_a_model_that_cannot_be_opened_again_is_left_out_and_the_others_come_back(
    made: list[IsolatingBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deadly: bool
) -> None:
    one = backend(made)
    good, bad = whole(one, loop_model(tmp_path / "good.onnx")), whole(one, loop_model(tmp_path / "bad.onnx"))
    lane, call = one.lane(0), WorkerProcess.call

    def failing(worker: WorkerProcess, method: str, *arguments: Any) -> Any:
        if method == "open" and "bad" in str(arguments):
            if not deadly:
                raise RuntimeError("no luck")
            os.kill(worker.pid, signal.SIGSEGV)
        return call(worker, method, *arguments)

    monkeypatch.setattr(WorkerProcess, "call", failing)
    monkeypatch.setattr("weft.runtime.isolated.group.LONGEST_PAUSE_S", 0.01)
    kill_worker(good.group)
    failed = _failure(bad, lane, loop_input(1))
    assert "it could not be opened again" in str(failed)
    assert run_step(good, lane, 0, BatchPart(loop_input(3))).error is None


def test_a_model_that_is_closed_while_a_spare_opens_it_stays_in_no_worker(
    made: list[IsolatingBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, path = backend(made, spare=True), loop_model(tmp_path / "turning.onnx")
    with monkeypatch.context() as patch:
        patch.setattr(WorkerGroup, "_start_keeper", lambda _: None)
        first, second = whole(one, path), whole(one, path)
    call, closed = WorkerProcess.call, threading.Event()

    def closing(worker: WorkerProcess, method: str, *arguments: Any) -> Any:
        found = call(worker, method, *arguments)
        if method == "open" and arguments[0] == second.number:
            second.close()
            closed.set()
        return found

    monkeypatch.setattr(WorkerProcess, "call", closing)
    first.group._start_keeper()
    assert closed.wait(live.PATIENCE_S)
    spare = spare_of(first.group)
    assert spare.opened == {first.number} and spare.call("held")[0] == 1


def test_nothing_is_left_when_a_backend_is_closed_while_a_spare_is_made(
    made: list[IsolatingBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, path, reached = backend(made, spare=True), live.mlp(tmp_path / "mlp.onnx"), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(WorkerGroup, "_start_keeper", lambda _: None)
        model = whole(one, path)
    call, pids = WorkerProcess.call, [pid(model.group)]

    def waiting(worker: WorkerProcess, method: str, *arguments: Any) -> Any:
        os.kill(worker.pid, signal.SIGSTOP)  # so that it never answers
        pids.append(worker.pid)
        reached.set()
        return call(worker, method, *arguments)

    monkeypatch.setattr(WorkerProcess, "call", waiting)
    monkeypatch.setattr(process, "PATIENCE_S", 0.01)
    model.group._start_keeper()
    assert reached.wait(live.PATIENCE_S)
    one.close()
    assert_gone(*pids)


def test_a_process_that_learns_for_too_long_is_killed(
    made: list[IsolatingBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, call = backend(made), WorkerProcess.call

    def waiting(worker: WorkerProcess, method: str, *arguments: Any) -> Any:
        os.kill(worker.pid, signal.SIGSTOP)  # as good as an operator that does not look up
        return call(worker, method, *arguments)

    monkeypatch.setattr(WorkerProcess, "call", waiting)
    monkeypatch.setattr("weft.runtime.isolated.group.GRACE_S", 0.0)
    with pytest.raises(ModelError, match=r"cannot be cut and measured: .*s more than it may"):
        opened(one, live.mlp(tmp_path / "mlp.onnx"), learn_s=0.01, learn=True)


def test_models_are_served_from_a_cache_that_cannot_be_written_to(
    made: list[IsolatingBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(prefix: str = "weft-", parent: Path | None = None) -> Path:
        if parent is not None:
            raise OSError(errno.EROFS, "Read-only file system")
        return make_folder(prefix)

    opened(backend(made), live.mlp(tmp_path / "mlp.onnx"), learn=True).close()
    monkeypatch.setattr("weft.runtime.isolated.group.make_folder", read_only)
    one = backend(made)
    model, lane = opened(one, tmp_path / "mlp.onnx", learn=True), one.lane(0)
    assert model.group._scratch.parent != model.group.folder and model.timing.learned
    assert run_step(model, lane, 0, BatchPart({"x": draw(1, 64)})).error is None
    one.close()
    assert not model.group._scratch.exists() and model.group.folder.exists()


def test_who_learns_gently_has_a_gentle_process_and_everybody_else_is_as_urgent_as_ever(
    made: list[IsolatingBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, call, urgency = backend(made), WorkerProcess.call, list[int]()
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    gentle = min(19, usual + 5)

    def looking(worker: WorkerProcess, method: str, *arguments: Any) -> Any:
        if method == "open":
            urgency.append(os.getpriority(os.PRIO_PROCESS, worker.pid))
        return call(worker, method, *arguments)

    def load() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), gentle)
        opened(one, live.mlp(tmp_path / "mlp.onnx"), learn=True)

    monkeypatch.setattr(WorkerProcess, "call", looking)
    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    assert urgency == [gentle, usual]
    worker = one.groups()["g"].worker
    assert worker is not None and worker._reader.native_id is not None
    assert os.getpriority(os.PRIO_PROCESS, worker._reader.native_id) == usual


def test_a_model_that_must_be_tried_out_is_so_in_a_process_of_its_own(
    made: list[IsolatingBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, call, seen = backend(made), WorkerProcess.call, list[tuple[int, bool]]()
    path = conv_net(tmp_path / "exits.onnx", marked=True)

    def looking(worker: WorkerProcess, method: str, *arguments: Any) -> Any:
        if method == "open":
            seen.append((worker.pid, arguments[-1]))
        return call(worker, method, *arguments)

    monkeypatch.setattr(WorkerProcess, "call", looking)
    model = whole(one, path)
    assert len(model.exits.specs) == 3 and model.timing.learned
    assert [learn for _, learn in seen] == [False, True, False]
    assert seen[0][0] == seen[2][0] == pid(model.group) != seen[1][0]


def test_a_worker_whose_place_is_taken_ends_when_its_steps_have(made: list[IsolatingBackend], tmp_path: Path) -> None:
    one = backend(made)
    for name in ("here/below", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    model, lane, heard = whole(one, loop_model(tmp_path / "here" / "turning.onnx")), one.lane(0), Heard()
    old = model.group.worker
    run = model.start(Step(0, (BatchPart(loop_input(ENDLESS)),), 1), lane, heard)
    below = whole(one, loop_model(tmp_path / "here" / "below" / "turning.onnx"))
    assert below.group.worker is old  # it may read that
    other = whole(one, loop_model(tmp_path / "elsewhere" / "turning.onnx"))
    assert old is not None and old.alive and other.group.worker is not old
    run.stop()
    error = heard.end().error
    assert error is not None and not isinstance(error, WorkerDied)
    until(lambda: not old.alive, "it is gone")
    assert run_step(model, lane, 0, BatchPart(loop_input(3))).error is None and one.counts().deaths == 0


def test_files_that_no_answer_needs_are_closed_and_are_the_end_of_who_sent_them() -> None:
    with ThreadPoolExecutor(1) as spawner:
        worker, _ = liar(spawner)
        for head in (["reply", 1, 1, None], []):
            file = os.open(os.devnull, os.O_RDONLY)
            with pytest.raises((packets.Garbled, ValueError)):
                worker._handle_packet(packets.Packet(head, b"", [file]))
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(file)
        worker.close()


@pytest.mark.parametrize(
    ("said", "believed"),
    [
        ((20, 30), (20, 30)),
        ((5, 30), (10, 30)),
        ((20, 300), (20, 100)),
        ((50, 40), (40, 40)),
        ((-5, 1), (10, 10)),
        ((20.5, 30.5), (20, 30)),
    ],
)
def test_a_step_ran_after_it_was_sent_and_before_it_was_heard_of_whatever_is_said(
    said: tuple[Any, Any], believed: tuple[int, int]
) -> None:
    one = IsolatingBackend(CpuBackend())
    lane = one.lane(0)
    with ThreadPoolExecutor(1) as spawner:
        worker, _ = liar(spawner)
        worker.now = lambda: 10
        run = WorkerRun(worker, 1, lane, NoModel(), Step(0, (), 1), Heard())  # type: ignore[arg-type]
        worker.now = lambda: 100
        end = worker._read_end(run, StepReport(1, *said, [[0, [], None]], None, None, b"", 0))
        worker.close()
    assert lane.close(live.PATIENCE_S)
    one.close()
    assert (end.began, end.ended) == believed and type(end.began) is type(end.ended) is int


@pytest.mark.parametrize("count", [1, 2])
def test_more_files_than_a_step_needs_are_closed_and_are_the_end_of_who_sent_them(count: int) -> None:
    ours, theirs = packets.pair()
    line, teller = LaneLine(ours, NoEar()), packets.Line(theirs)  # type: ignore[arg-type]
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]
    before = len(os.listdir("/proc/self/fd"))
    teller.send(["over", 1, 0, 0, [], False, None, None], files=files, wait=True)
    with pytest.raises(packets.Garbled, match=f"{count} files"):
        line.receive_report()
    assert len(os.listdir("/proc/self/fd")) == before
    packets.close_all(files)
    ours.close()
    teller.close()


class NoEar:
    """Nobody listens."""


def test_memory_that_the_worker_was_not_given_is_not_written_to_again() -> None:
    line, layout = LaneLine(FailingLine(), NoEar()), packets.TensorLayout()  # type: ignore[arg-type]
    layout.add(np.zeros(packets.INLINE_BYTES, np.uint8))
    layout.add(np.zeros(8, np.uint8))
    with pytest.raises(OSError, match="references"):
        line.send([], layout)
    assert line._outward == {}


class FailingLine:
    def send(self, *_: Any, **__: Any) -> None:
        raise OSError(errno.ETOOMANYREFS, "Too many references")
