"""Models that were stitched, served under their own names by one body: mixed batches, settings, life, prediction."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from tests.engine.hosts import MS, Machine, Sent, begun, compute_here, count
from tests.runtime.clocks import ANY_LENGTH_S, NO_LENGTH_S, said_times
from tests.serving import live
from tests.serving.contracts.stitched import *  # noqa: F403
from tests.stitching.nets import macs
from tests.support.inference import Refused, infer, model_state, packed, send
from tests.support.stitched import (
    NAMES,
    NETS,
    check_output,
    head_output,
    needs_rows,
    net_output,
    pictures,
    served_tasks,
    stitched_file,
    task_metadata,
)
from weft.base.errors import (
    BadRequest,
    Cancelled,
    Expired,
    InputError,
    ModelError,
    NotFound,
    Overloaded,
)
from weft.cli.serve import _announce
from weft.models.sources import load_model
from weft.runtime.metadata import STITCHED_KEY
from weft.runtime.onnxruntime_cpu.model import CpuModel
from weft.runtime.onnxruntime_cpu.preparing import LoadOptions, prepare
from weft.runtime.stitched import read_tasks, tasks_in
from weft.serving.repository import Repository
from weft.serving.streams import ServedModel
from weft.serving.tickets import ClientTicket, MixedWork
from weft.simulation.prediction import predict

FIXED = "stitched with a fixed number of rows"


@pytest.fixture(scope="module")
def prepared(file: Path) -> CpuModel:
    return prepare(file, LoadOptions(grain_s=NO_LENGTH_S, max_batch=4))


@pytest.fixture(scope="module")
def segments(file: Path) -> CpuModel:
    with said_times():
        cut = prepare(file, LoadOptions(max_batch=4, grain_s=ANY_LENGTH_S, max_pieces=3))
    assert len(cut.segments) == 3
    return cut


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_tasks_of_a_file_are_read_without_its_weights(file: Path) -> None:
    tasks = tasks_in(file)
    assert [task.name for task in tasks] == NAMES
    assert tasks[1].inputs == {"image": f"{NAMES[1]}.image"}
    assert tasks_in(live.mlp(file.parent / "plain" / "mlp.onnx")) == ()


@pytest.mark.parametrize("content", [b"", b"no model at all", b"\x72\xff\xff\xff\xff", bytes(range(256))])
def test_what_is_no_model_has_no_tasks(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "odd.onnx"
    path.write_bytes(content)
    assert tasks_in(path) == ()


TASK = {"name": "a", "inputs": {"x": "a.x"}, "outputs": {"y": "a.y"}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ('{"version": 2, "tasks": []}', "version = 2"),
        ('{"version": 1}', "tasks is missing"),
        ('{"version": 1, "tasks": []}', "tasks = "),
        (json.dumps({"version": 1, "tasks": [TASK | {"name": "a\nb"}]}), "must be printable"),
        (json.dumps({"version": 1, "tasks": [TASK | {"inputs": {}}]}), "inputs = {}"),
        (json.dumps({"version": 1, "tasks": [TASK, TASK]}), "names task 'a' twice"),
        (json.dumps({"version": 1, "tasks": [TASK, TASK | {"name": "b"}]}), "names input 'a.x' twice"),
    ],
)
def test_tasks_that_cannot_be_are_one_line(text: str, message: str) -> None:
    with pytest.raises(ModelError) as error:
        read_tasks(text)
    assert message in str(error.value) and STITCHED_KEY in str(error.value) and "\n" not in str(error.value)


def renamed(source: Path, target: Path, **changes: dict[str, str]) -> Path:
    """The file with other ports for its first task."""
    proto = onnx.load(source)
    first, *others = tasks_in(source)
    helper.set_model_props(proto, task_metadata([first.model_copy(update=changes), *others]))
    onnx.save(proto, target)
    return target


def test_tasks_must_fit_their_graph(file: Path, tmp_path: Path) -> None:
    lost = renamed(file, tmp_path / "lost.onnx", inputs={"image": "nowhere"})
    with pytest.raises(ModelError, match="input 'nowhere' of a task is not in the graph"):
        prepare(lost, LoadOptions())
    more = renamed(file, tmp_path / "more.onnx", outputs={"again": tasks_in(file)[0].inputs["image"]})
    with pytest.raises(ModelError, match=r"output '.*' is named by no task|output '.*' of a task is not in the graph"):
        prepare(more, LoadOptions())


def test_fixed_batches_are_refused_and_the_way_out_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"{FIXED}.*--dynamic"):
        prepare(stitched_file(tmp_path / "fixed.onnx", dynamic=False), LoadOptions())


def test_models_of_a_file_that_cannot_be_loaded_fail_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with live.running(stitched_file(tmp_path / "fixed.onnx", dynamic=False), grpc_port=None) as running:
        _announce(running.server)
        names = [slot.entry.name for slot in running.server.service.library.slots()]
    told = [record.name for record in caplog.records if record.getMessage().count(FIXED) == 1]
    assert told == ["weft.models", "weft.server"]
    missing, said = [line for line in capsys.readouterr().out.splitlines() if FIXED in line]
    assert missing.startswith("not ready  http://") and missing.count(FIXED) == 1
    assert said.strip().startswith(f"{', '.join(names)} 1: failed  fixed.onnx: ")


def test_exits_are_refused(file: Path) -> None:
    outputs = tuple(name for task in tasks_in(file) for name in task.outputs.values())
    with pytest.raises(ModelError, match="stitched models cannot be left at exits"):
        prepare(file, LoadOptions(exits=outputs))


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["mts", "split", "half", "separate"])
def test_rows_of_any_mix_are_those_of_the_models_alone(tmp_path: Path, form: str) -> None:
    body = prepare(stitched_file(tmp_path / "body.onnx", form=form), LoadOptions(max_batch=4))
    for mix in ([0], [2], [0, 1, 2], [2, 2, 0], [1, 1]):
        given = [pictures(seed=at) for at in range(len(mix))]
        samples = [{body.tasks.specs[task].inputs["image"]: each} for task, each in zip(mix, given, strict=True)]
        found = body.run(body.gather(samples))
        for task, net in enumerate(NETS):
            (inner,) = body.tasks.specs[task].outputs.values()
            wanted = [net_output(net, each) for each, owner in zip(given, mix, strict=True) if owner == task]
            assert found[inner].shape == (len(wanted), *net.outputs[0].shape)
            if wanted:
                np.testing.assert_allclose(found[inner], np.concatenate(wanted), atol=1e-5)


def test_a_stitched_file_is_measured_as_mixed_as_it_can_be(prepared: CpuModel) -> None:
    assert prepared.batching.batchable and prepared.batching.max_batch == 4 and not prepared.batching.mergeable
    assert sorted(prepared.timing.times_s) == [1, 2, 4] and all(
        sum(each) > 0 for each in prepared.timing.times_s.values()
    )
    assert prepared.blueprint.absent_rows == 0 and prepared.remarks == ()


@pytest.mark.parametrize(("tasks", "largest"), [(3, 8), (9, 16)])
def test_batches_of_as_many_rows_as_there_are_tasks_are_tried(tmp_path: Path, monkeypatch, tasks, largest) -> None:
    monkeypatch.setattr("weft.runtime.onnxruntime_cpu.model_timing.LEAST_GAIN", -100.0)  # batching always pays
    assert (
        prepare(stitched_file(tmp_path / "body.onnx", tasks, form="mts"), LoadOptions()).batching.max_batch == largest
    )


def ask(machine: Machine, served: ServedModel, given: np.ndarray, due_ms: float = 1000, **how: Any) -> Sent:
    assert served.task is not None
    sent = Sent(None, {name: given for name in served.task.inputs})  # type: ignore[arg-type]

    def replied(ticket: ClientTicket, outcome: Any) -> None:
        count(ticket, outcome, machine.clock.ticks)
        sent.replies.append((machine.clock.ticks - machine.start, outcome))

    due = machine.clock.ticks + round(due_ms * MS)
    sent.ticket = ClientTicket(served, sent.inputs, replied, due, **how)
    machine.dispatcher.submit(sent.ticket)
    machine.sent.append(sent)
    return sent


def at_rest(machine: Machine, served: Sequence[ServedModel]) -> None:
    assert (machine.dispatcher.pending, machine.dispatcher.waiting, served[0].body.leases) == (0, 0, 0)
    assert [each.line.waiting for each in served] == [0] * len(served)
    assert all(len(sent.replies) == 1 for sent in machine.sent)


def test_requests_for_several_models_that_wait_together_run_in_one_go(machine, prepared):
    one = machine()
    served = served_tasks(one, prepared)
    order = [2, 0, 2, 1]
    sent = [ask(one, served[task], pictures(seed=at)) for at, task in enumerate(order)]
    assert [each.line.waiting for each in served] == [1, 1, 2]
    one.run()
    assert served[0].loaded.ran == [(0, 4)]
    for at, (task, each) in enumerate(zip(order, sent, strict=True)):
        check_output(each.outcome, NETS[task], pictures(seed=at))
        assert (each.end_ms, each.ticket.batch_size) == (5, 4)
    at_rest(one, served)


def test_each_model_has_its_own_counters(machine, prepared):
    one = machine()
    served = served_tasks(one, prepared)
    for task in (2, 0, 2):
        ask(one, served[task], pictures())
    one.run()
    counted = [each.statistics for each in served]
    assert [each.success for each in counted] == [1, 0, 2]
    assert [(each.executions, each.inferences) for each in counted] == [(1, 1), (0, 0), (1, 2)]
    assert [each.batches for each in counted] == [{1: [1, 4 * MS]}, {}, {2: [1, 4 * MS]}]
    assert [each.infer_ns for each in counted] == [4 * MS, 0, 2 * 4 * MS]
    assert [each.mean_batch for each in counted] == [3, 0, 3], "rows that were computed together"
    assert [each.segment_ns for each in counted] == [4 * MS // 3, 0, 2 * 4 * MS // 3], "what a lane was busy for them"
    (span,) = one.dispatcher.recorder.since(0)
    assert (span.model, span.rows) == ("body", 3)


def test_several_rows_of_one_request_stay_together(machine, prepared):
    one = machine()
    served = served_tasks(one, prepared)
    sent = [ask(one, served[task], pictures(2, seed=task)) for task in (1, 0, 1)]
    empty = ask(one, served[2], pictures(0))
    one.run()
    assert [each.ticket.batch_size for each in sent] == [2, 2, 1], "of four rows at most"
    for task, each in zip((1, 0, 1), sent, strict=True):
        check_output(each.outcome, NETS[task], pictures(2, seed=task))
    assert empty.outcome[NETS[2].outputs[0].name].shape == (0, *NETS[2].outputs[0].shape)
    at_rest(one, served)


def test_who_is_due_first_goes_first_whatever_its_model(machine, prepared):
    one = machine("edf")
    served = served_tasks(one, prepared)
    sent = [ask(one, served[at % 3], pictures(seed=at), due_ms=1000 - at) for at in range(6)]
    one.run()
    assert [each.ticket.batch_size for each in sent] == [2, 2, 4, 4, 4, 4]
    assert [each.end_ms for each in sent] == [8, 8, 5, 5, 5, 5]
    for at, each in enumerate(sent):
        check_output(each.outcome, NETS[at % 3], pictures(seed=at))


def test_a_batch_is_as_urgent_as_its_most_urgent_member(machine, prepared):
    one = machine("priority")
    served, rival = served_tasks(one, prepared), one.model([20], name="rival")
    long = one.send(rival)
    one.run(1)
    later, urgent = one.send(rival, priority=3), ask(one, served[1], pictures(), priority=9)
    other = ask(one, served[0], pictures(), priority=1)
    one.run()
    assert long.end_ms == 20 and urgent.end_ms == other.end_ms == 23 and later.end_ms == 43


def test_a_strict_deadline_drops_one_model_s_request_and_leaves_the_others(machine, prepared):
    one = machine()
    served, rival = served_tasks(one, prepared), one.model([20], name="rival")
    one.send(rival, strict=True)  # so that it does not yield
    one.run(1)
    strict = ask(one, served[0], pictures(), due_ms=24, strict=True)
    other = ask(one, served[1], pictures(seed=1))
    with pytest.raises(Expired, match=f"{NAMES[2]}: its deadline cannot be met"):
        ask(one, served[2], pictures(), due_ms=10, strict=True)
    one.run()
    assert strict.end_ms == 23, "19 of the rival, 3 of two rows together"
    check_output(other.outcome, NETS[1], pictures(seed=1))
    assert [each.statistics.failures.total() for each in served] == [0, 0, 0]
    at_rest(one, served)


def test_who_went_away_takes_nobody_along(machine, prepared):
    one = machine()
    served = served_tasks(one, prepared)
    sent = [ask(one, served[task], pictures(seed=task)) for task in range(3)]
    one.at(1, lambda: one.dispatcher.withdraw(sent[1].ticket))
    one.run()
    assert isinstance(sent[1].outcome, Cancelled)
    check_output(sent[0].outcome, NETS[0], pictures(seed=0))
    check_output(sent[2].outcome, NETS[2], pictures(seed=2))
    assert [each.statistics.failures["cancelled"] for each in served] == [0, 1, 0]
    at_rest(one, served)


def test_each_model_has_its_own_queue(machine, prepared):
    one = machine()
    served = served_tasks(one, prepared, batch_timeout_ms=50)
    one.send(one.model([20], name="rival"))
    one.run(1)
    for _ in range(4):
        ask(one, served[0], pictures())
    with pytest.raises(Overloaded, match=f"{NAMES[0]}: exceeds its maximum queue size of 4"):
        ask(one, served[0], pictures())
    ask(one, served[1], pictures())
    one.run()
    at_rest(one, served)


def test_a_mixed_batch_that_fails_is_tried_one_by_one(machine, prepared):
    one = machine()
    served = served_tasks(one, prepared)
    poisoned = served[1].task.inputs["image"]
    served[0].loaded.fails = lambda _, values: poisoned in values and len(values[poisoned]) > 0
    sent = [ask(one, served[task], pictures(seed=task)) for task in range(3)]
    one.run()
    assert sent[1].fate == "internal" and [rows for _, rows in served[0].loaded.ran] == [3, 1, 1, 1]
    check_output(sent[0].outcome, NETS[0], pictures(seed=0))
    check_output(sent[2].outcome, NETS[2], pictures(seed=2))
    at_rest(one, served)


def test_inputs_whose_rows_differ_are_refused(machine, prepared, monkeypatch):
    one = machine()
    (first, *_) = served_tasks(one, prepared)
    monkeypatch.setattr(first, "task", first.task.model_copy(update={"inputs": {"image": "a", "mask": "b"}}))
    inputs = {"image": pictures(2), "mask": pictures(3)}
    with pytest.raises(BadRequest, match=rf"{NAMES[0]}: its inputs must have the same first dimension, not \[2, 3\]"):
        one.dispatcher.submit(ClientTicket(first, inputs, lambda *_: None, one.clock.ticks + MS))


def test_another_model_goes_between_the_segments_of_a_mixed_batch(machine, segments):
    one = machine()
    served, rival = served_tasks(one, segments, ms=5, each_ms=0), one.model([1], name="rival")
    sent = [ask(one, served[task], pictures(seed=task)) for task in (1, 0)]
    urgent: list[Sent] = []
    one.at(1, lambda: urgent.append(one.send(rival, 9)))
    one.run()
    assert urgent[0].end_ms == 6 and [each.end_ms for each in sent] == [16, 16]
    for task, each in zip((1, 0), sent, strict=True):
        check_output(each.outcome, NETS[task], pictures(seed=task))
    assert [each.statistics.preemptions for each in served] == [1, 1, 0]
    assert [each.statistics.segments for each in served] == [3, 3, 0]
    at_rest(one, served)


def joined(
    machine: Machine, body: CpuModel, order: Sequence[int], first: int, given: Sequence[np.ndarray]
) -> list[Any]:
    """Answers of two batches, the *first* requests in one of them, that meet after the first segment."""
    served = served_tasks(machine, body)
    tickets = [ask(machine, served[task], each).ticket for task, each in zip(order, given, strict=True)]
    ahead, behind = (begun(machine, each, MixedWork) for each in (tickets[:first], tickets[first:]))
    for batch in (ahead, behind):
        batch.model.loaded = body  # without the time it would take
        compute_here(batch, 0)
    ahead.join(behind)
    for segment in range(1, len(body.segments)):
        compute_here(ahead, segment)
    found = list(ahead.results())
    assert [ticket for ticket, _ in found] == tickets
    return [outputs for _, outputs in found]


def test_batches_that_meet_half_way_keep_their_rows_apart(machine, segments):
    order, given = (1, 2, 1, 0), [pictures(seed=at) for at in range(4)]
    for task, each, found in zip(order, given, joined(machine(), segments, order, 1, given), strict=True):
        check_output(found, NETS[task], each)


def test_a_batch_that_was_stopped_at_its_beginning_takes_others_in(machine, prepared):
    one = machine()
    served = served_tasks(one, prepared)
    given = [pictures(seed=at) for at in range(3)]
    tickets = [ask(one, served[task], each).ticket for task, each in zip((1, 2, 1), given, strict=True)]
    served[0].body.loaded.fails = lambda _, values: True
    batch = begun(one, tickets[:1], MixedWork)
    with pytest.raises(ValueError, match="cannot be computed"):
        compute_here(batch, 0)
    batch.join(begun(one, tickets[1:], MixedWork))
    served[0].body.loaded = prepared
    compute_here(batch, 0)
    for task, each, (_, found) in zip((1, 2, 1), given, batch.results(), strict=True):
        check_output(found, NETS[task], each)


@settings(max_examples=15)
@given(
    policy=st.sampled_from(["punctual", "edf", "fifo", "priority", "prema", "layerweaver+"]),
    asked=st.lists(
        st.tuples(
            st.integers(0, 2), st.integers(1, 2), st.integers(0, 30), st.integers(1, 60), st.sampled_from([1, 9])
        ),
        min_size=1,
        max_size=12,
    ),
)
def test_whatever_comes_is_answered_with_its_own_rows(prepared, policy, asked):
    with pytest.MonkeyPatch.context() as patch:
        one = Machine(patch, policy)
        try:
            served, sent = served_tasks(one, prepared), list[tuple[int, np.ndarray, Sent]]()
            for at, (task, rows, ms, due_ms, priority) in enumerate(asked):
                row = pictures(rows, seed=at)

                def come(task: int = task, row: Any = row, due_ms: int = due_ms, priority: int = priority) -> None:
                    sent.append((task, row, ask(one, served[task], row, due_ms, priority=priority)))

                one.at(ms, come)
            one.run()
            assert len(sent) == len(asked)
            for task, row, each in sent:
                check_output(each.outcome, NETS[task], row)
            assert sum(each.statistics.inferences for each in served) == sum(rows for _, rows, *_ in asked)
            at_rest(one, served)
        finally:
            one.close()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return needs_rows(tmp_path_factory.mktemp("both") / "both.onnx")


def test_a_graph_that_needs_rows_of_every_task_gets_them(machine, both):
    body = prepare(both, LoadOptions(max_batch=4))
    assert body.blueprint.absent_rows == 1
    assert "computes a row for each of its models that no request asks for" in body.remarks[0]
    one = machine()
    a, b = served_tasks(one, body)
    given = [np.random.default_rng(at).standard_normal((1, 2, 2), np.float32) for at in range(4)]
    sent = [ask(one, a, given[0])]
    one.at(1, lambda: sent.extend(ask(one, each, row) for each, row in zip((b, a, b), given[1:], strict=True)))
    one.run()
    assert [each.ticket.batch_size for each in sent] == [1, 3, 3, 3]
    for name, each, row in zip("abab", sent, given, strict=True):
        np.testing.assert_allclose(each.outcome["y"], head_output(both, name, row), rtol=1e-5)


def test_rows_that_nobody_asked_for_are_in_no_answer_of_batches_that_met(machine, both):
    with said_times():
        body = prepare(both, LoadOptions(max_batch=4, grain_s=ANY_LENGTH_S, max_pieces=3))
    assert len(body.segments) > 1
    given = [np.random.default_rng(at).standard_normal((1, 2, 2), np.float32) for at in range(3)]
    for name, row, found in zip("aba", given, joined(machine(), body, (0, 1, 0), 1, given), strict=True):
        np.testing.assert_allclose(found["y"], head_output(both, name, row), rtol=1e-5)


def test_a_cached_body_still_has_its_tasks(file: Path, tmp_path: Path) -> None:
    options = LoadOptions(max_batch=2)
    first, again = (prepare(file, options, tmp_path) for _ in range(2))
    assert again.tasks == first.tasks and again.batching.max_batch == 2
    feed = {again.tasks.specs[1].inputs["image"]: pictures()}
    (inner,) = again.tasks.specs[1].outputs.values()
    np.testing.assert_allclose(again.run(again.gather([feed]))[inner], net_output(NETS[1], pictures()), atol=1e-5)


# --- the repository ---------------------------------------------------------------------------------------------------


def test_a_stitched_file_is_there_under_the_names_of_its_models(file: Path, tmp_path: Path) -> None:
    (tmp_path / "many" / "3").mkdir(parents=True)
    (tmp_path / "many" / "3" / "model.onnx").write_bytes(file.read_bytes())
    live.mlp(tmp_path / "plain.onnx")
    repository = Repository([tmp_path], tmp_path / "scratch")
    assert repository.names() == sorted([*NAMES, "plain"]) and repository.problems == {}
    entry = repository.entry(NAMES[1])
    assert (entry.version, entry.body) == ("3", "many") and repository.entry("plain").body == ""
    with pytest.raises(NotFound):
        repository.entry("many")


def test_settings_of_the_file_are_those_of_its_models_unless_they_have_their_own(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "body.onnx"
    path.write_bytes(file.read_bytes())
    settings = f"slo_ms = 50\nmax_batch = 3\n[tasks]\n{NAMES[1]} = {{slo_ms = 20, priority = 1, queue_size = 9}}\n"
    path.with_suffix(".toml").write_text(settings)
    first, second = (Repository([path], tmp_path / "scratch").entry(name).config for name in NAMES[:2])
    assert (first.slo_ms, first.priority, first.queue_size, first.max_batch) == (50, 0, 256, 3)
    assert (second.slo_ms, second.priority, second.queue_size, second.max_batch) == (20, 1, 9, 3)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("[tasks]\nnobody = {priority = 1}", "tasks: unknown task 'nobody'"),
        (f"[tasks]\n{NAMES[0]} = {{max_batch = 1}}", f"unknown key 'tasks.{NAMES[0]}.max_batch'"),
    ],
)
def test_settings_that_cannot_be_are_a_problem(file: Path, tmp_path: Path, settings: str, said: str) -> None:
    path = tmp_path / "body.onnx"
    path.write_bytes(file.read_bytes())
    path.with_suffix(".toml").write_text(settings)
    repository = Repository([tmp_path], tmp_path / "scratch")
    assert repository.names() == [] and said in repository.problems["body"]


def test_a_plain_model_has_no_tasks_to_set(tmp_path: Path) -> None:
    live.mlp(tmp_path / "plain.onnx").with_suffix(".toml").write_text("[tasks]\na = {priority = 1}")
    assert "it is not stitched" in Repository([tmp_path], tmp_path / "scratch").problems["plain"]


def test_names_that_clash_or_cannot_be_are_problems(file: Path, tmp_path: Path) -> None:
    (tmp_path / "body.onnx").write_bytes(file.read_bytes())
    (tmp_path / "copy.onnx").write_bytes(file.read_bytes())
    proto = onnx.load(file)
    first, *others = tasks_in(file)
    helper.set_model_props(proto, task_metadata([first.model_copy(update={"name": "../up"}), *others]))
    onnx.save(proto, tmp_path / "odd.onnx")
    helper.set_model_props(proto, {STITCHED_KEY: "{}"})
    onnx.save(proto, tmp_path / "worse.onnx")
    repository = Repository([tmp_path], tmp_path / "scratch")
    assert repository.names() == sorted(NAMES) and {repository.entry(name).body for name in NAMES} == {"body"}
    assert "body.onnx and copy.onnx both hold a model" in repository.problems[NAMES[0]]
    assert "its task '../up' is not a name for a model" in repository.problems["odd"]
    assert STITCHED_KEY in repository.problems["worse"]
    with pytest.raises(InputError, match="are both called"):
        Repository([tmp_path / "body.onnx", tmp_path / "copy.onnx"], tmp_path / "scratch")


def test_models_stay_known_while_their_file_cannot_be_looked_at(file: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "body.onnx").write_bytes(file.read_bytes())
    repository = Repository([tmp_path], tmp_path / "scratch")

    def denied(path: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("weft.serving.repository.tasks_in", denied)
    repository.scan()
    assert repository.names() == sorted(NAMES) and "Permission denied" in repository.problems["body"]


# --- a real server ----------------------------------------------------------------------------------------------------


def test_every_model_looks_like_one_of_its_own(server: live.Live) -> None:
    for net in NETS:
        path = f"/v2/models/{net.name}"
        assert send(server, "GET", f"{path}/ready").status == 200
        told = send(server, "GET", path).json()
        assert (told["name"], told["versions"]) == (net.name, ["1"])
        (image,), (output,) = told["inputs"], told["outputs"]
        assert image == {"name": "image", "datatype": "FP32", "shape": [-1, *net.inputs[0].shape]}
        assert (output["name"], output["shape"]) == (net.outputs[0].name, [-1, *net.outputs[0].shape])
        config = send(server, "GET", f"{path}/config").json()
        assert config["max_batch_size"] == 3 and config["input"][0]["dims"] == list(net.inputs[0].shape)
    index = {row["name"]: row["state"] for row in send(server, "POST", "/v2/repository/index").json()}
    assert index == dict.fromkeys([*NAMES, "plain"], "READY")
    assert send(server, "GET", "/v2/models/body").status == 404


def test_what_does_not_fit_a_model_is_refused_in_its_own_words(server: live.Live) -> None:
    with pytest.raises(Refused, match=r"unknown input .*image"):
        infer(server, NAMES[0], {f"{NAMES[0]}.image": pictures()})
    body, headers = packed({"image": pictures()[:, :, 1:]})
    assert send(server, "POST", f"/v2/models/{NAMES[0]}/infer", body, headers).status == 400


def test_the_profile_says_which_models_have_one_body(server: live.Live) -> None:
    told = send(server, "GET", "/weft/profile").json()["models"]
    assert {name: each["body"] for name, each in told.items()} == dict.fromkeys(NAMES, "body") | {"plain": ""}
    assert told[NAMES[0]]["max_batch"] == 3 and len(told[NAMES[0]]["times_s"]) == 3


def test_models_leave_one_by_one_and_the_body_with_the_last(file: Path, tmp_path: Path) -> None:
    (tmp_path / "body.onnx").write_bytes(file.read_bytes())
    with live.running(tmp_path) as server:
        library = server.server.service.library
        body = library.find(NAMES[0]).served.body
        for name in NAMES[:2]:
            assert send(server, "POST", f"/v2/repository/models/{name}/unload").status == 200
        with pytest.raises(Refused, match="404"):
            infer(server, NAMES[0], {"image": pictures()})
        check_output(infer(server, NAMES[2], {"image": pictures()}), NETS[2], pictures())
        assert library.find(NAMES[2]).served.body is body and library.used_bytes > 0
        assert send(server, "POST", f"/v2/repository/models/{NAMES[2]}/unload").status == 200
        assert library.used_bytes == 0 and [model_state(server, name)["state"] for name in NAMES] == ["unloaded"] * 3
        assert send(server, "POST", f"/v2/repository/models/{NAMES[1]}/load").status == 200
        check_output(infer(server, NAMES[1], {"image": pictures()}), NETS[1], pictures())
        assert [model_state(server, name)["state"] for name in NAMES] == ["unloaded", "ready", "unloaded"]
        assert send(server, "POST", f"/v2/repository/models/{NAMES[0]}/load").status == 200
        assert [model_state(server, name)["state"] for name in NAMES] == ["ready", "ready", "unloaded"]
        bodies = {library.find(name).served.body for name in NAMES[:2]}
        assert len(bodies) == 1 and library.used_bytes == bodies.pop().residency.memory_bytes


def test_a_file_stitched_anew_brings_other_models(tmp_path: Path) -> None:
    path = stitched_file(tmp_path / "body.onnx", 2)
    with live.running(tmp_path) as server:
        check_output(infer(server, NAMES[1], {"image": pictures()}), NETS[1], pictures())
        stitched_file(path, 3)
        assert send(server, "POST", f"/v2/repository/models/{NAMES[0]}/load").status == 200
        for net in NETS:
            check_output(infer(server, net.name, {"image": pictures()}), net, pictures())
        library = server.server.service.library
        assert len({library.find(name).served.body for name in NAMES}) == 1
        live.mlp(path)
        index = {row["name"]: row["state"] for row in send(server, "POST", "/v2/repository/index").json()}
        assert index == {"body": "UNAVAILABLE"}
        infer(server, "body", {"x": np.zeros((1, 64), np.float32)})
        assert {row["name"] for row in send(server, "POST", "/v2/repository/index").json()} == {"body"}


def test_a_file_that_holds_others_since_it_was_looked_at_says_so(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "body.onnx"
    path.write_bytes(file.read_bytes())
    path.with_suffix(".toml").write_text("preload = false")
    with live.running(tmp_path) as server:
        live.mlp(path)
        with pytest.raises(Refused, match=r"503.*body\.onnx holds other models now"):
            infer(server, NAMES[0], {"image": pictures()})
        assert server.server.service.library.used_bytes == 0
        send(server, "POST", "/v2/repository/index")
        path.write_bytes(file.read_bytes())
        with pytest.raises(Refused, match=r"503.*body\.onnx holds other models now"):
            infer(server, "body", {"x": np.zeros((1, 64), np.float32)})


def test_what_cannot_be_served_is_said_of_every_model(tmp_path: Path) -> None:
    stitched_file(tmp_path / "body.onnx", dynamic=False)
    with live.running(tmp_path) as server:
        for name in NAMES:
            with pytest.raises(Refused, match=f"503.*{FIXED}"):
                infer(server, name, {"image": pictures()})
        assert {model_state(server, name)["state"] for name in NAMES} == {"failed"}


def test_models_come_on_demand_and_are_evicted_together(file: Path, tmp_path: Path) -> None:
    (tmp_path / "body.onnx").write_bytes(file.read_bytes())
    (tmp_path / "body.toml").write_text("preload = false")
    wide = live.mlp(tmp_path / "wide.onnx", hidden=20000)
    for path in (tmp_path / "body.toml", wide.with_suffix(".toml")):
        with path.open("a") as settings:
            settings.write("\nmax_batch = 1\n")
    held = [
        prepare(tmp_path / name, LoadOptions(max_batch=1)).residency.memory_bytes for name in ("body.onnx", "wide.onnx")
    ]
    with live.running(tmp_path, memory_budget_bytes=sum(held) - 1) as server:
        library = server.server.service.library
        assert [library.find(name).state for name in NAMES] == ["unloaded"] * 3
        check_output(infer(server, NAMES[1], {"image": pictures()}), NETS[1], pictures())
        assert [library.find(name).state for name in NAMES] == ["ready"] * 3
        assert library.find("wide").state == "unloaded" and library.evictions == 1
        infer(server, "wide", {"x": np.zeros((1, 64), np.float32)})
        assert [library.find(name).state for name in NAMES] == ["unloaded"] * 3 and library.evictions == 2


# --- the simulator ----------------------------------------------------------------------------------------------------


def test_to_the_simulator_a_stitched_file_is_a_model_with_many_inputs(file: Path) -> None:
    layers = load_model(str(file)).layers
    assert sum(layer.macs for layer in layers) == sum(macs(net) for net in NETS), "a row for each task"


def test_a_prediction_batches_models_of_one_body(tmp_path: Path) -> None:
    measured = {"segments": ["s"], "times_s": {"1": [0.010], "2": [0.012]}, "max_batch": 2}
    stream = {"deadline_s": 1.0, "lag_s": [0.0], "status": [200], "latency_s": [0.012]}
    streams = [stream | {"model": name, "scheduled_s": [0.0]} for name in ("a", "b")]
    whole = {"format": 1, "deadlines": "soft", "transport_s": 0.0, "workload": {}, "streams": streams}
    path = tmp_path / "bench.json"
    for body, wanted in (("both", [0.012, 0.012]), ("", [0.010, 0.020])):
        profile = {"policy": "fifo", "lanes": 1, "models": {name: measured | {"body": body} for name in "ab"}}
        path.write_text(json.dumps(whole | {"profile": profile}))
        assert [each.predicted.mean_s for each in predict(path).streams] == pytest.approx(wanted)


@pytest.mark.parametrize("deadlines", ["soft", "strict"])
def test_a_prediction_keeps_the_deadlines_of_models_of_one_body(tmp_path: Path, deadlines: str) -> None:
    measured = {"segments": ["s"], "times_s": {"1": [0.010]}, "max_batch": 1, "body": "both"}
    stream = {"scheduled_s": [0.0, 0.0], "lag_s": [0.0, 0.0], "status": [200, 200], "latency_s": [0.01, 0.02]}
    streams = [stream | {"model": "a", "deadline_s": 1.0}, stream | {"model": "b", "deadline_s": 0.015}]
    profile = {"policy": "punctual", "lanes": 1, "models": {"a": measured, "b": measured}}
    whole = {"format": 1, "deadlines": deadlines, "transport_s": 0.0, "workload": {}, "streams": streams}
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(whole | {"profile": profile}))
    relaxed, urgent = (each.predicted for each in predict(path).streams)
    assert urgent.missed_share == 0.5 and relaxed.missed_share == 0.0
    assert urgent.answered == (1 if deadlines == "strict" else 2)
