"""Exits in the server: who leaves where, batches that shrink and merge under real tensors, and what is told of it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.engine.hosts import MS, Machine, Sent, Staged, begun, compute_here, count
from tests.runtime.clocks import ANY_LENGTH_S, NO_LENGTH_S
from tests.runtime.exit_nets import CLASSES, EXITS, conv_net, samples
from tests.serving.contracts.exits import *  # noqa: F403
from tests.serving.contracts.exits import COUNT, REFILLING, check_answer, infer, metrics, outputs_of
from tests.serving.live import Live, running
from weft.base.errors import Cancelled, InputError
from weft.engine.steering import CALM_PRESSURE, FULL_PRESSURE, ExitShares, Steered, Steering
from weft.runtime.onnxruntime_cpu.model import CpuModel
from weft.runtime.onnxruntime_cpu.preparing import LoadOptions, prepare
from weft.serving.exit_rules import EXIT, ExitRules
from weft.serving.streams import ServedModel
from weft.serving.tickets import ClientTicket

SERVING = [*REFILLING, "adaptive", "punctual", "fifo", "edf", "layerweaver+"]


# --- steering ---------------------------------------------------------------------------------------------------------


@given(st.floats(0.01, 2), st.floats(0.01, 1), st.floats(-1, 5), st.floats(-1, 5))
def test_a_threshold_sinks_with_the_pressure_and_no_further_than_its_floor(top, share, less, more):
    steering = Steering(top, top * share)
    less, more = sorted((less, more))
    assert top * share - 1e-12 <= steering.threshold(more) <= steering.threshold(less) <= top
    assert steering.threshold(CALM_PRESSURE) == top and steering.threshold(FULL_PRESSURE) == pytest.approx(top * share)
    assert Steering(top).threshold(more) == top


@pytest.mark.parametrize(
    ("top", "floor", "complaint"),
    [
        (0.0, None, "exit_threshold = 0 must be above 0"),
        (0.8, 0.9, "exit_floor = 0.9 must be above 0 and at most exit_threshold = 0.8"),
        (0.8, 0.0, "exit_floor = 0 must"),
        (float("nan"), None, "exit_threshold = nan must"),
    ],
)
def test_impossible_thresholds_are_refused(top, floor, complaint):
    with pytest.raises(InputError, match=complaint):
        Steering(top, floor)


def test_pressure_rises_and_falls_over_the_time_that_requests_have():
    steered = Steered(Steering())

    def pressure(time: int, queue: int, spare: int) -> float:
        steered.update(time, queue, spare)
        return steered.pressure

    assert pressure(0, 50, 100) == 0.0, "a moment is not yet a load"
    rising = [pressure(time, 50, 100) for time in range(10, 400, 10)]
    assert rising == sorted(rising) and rising[0] < 0.15 and rising[-1] == pytest.approx(0.5, rel=1e-3)
    falling = [pressure(time, 0, 100) for time in range(400, 800, 10)]
    assert falling == sorted(falling, reverse=True) and falling[-1] < 1e-3
    assert pressure(800, 50, 0) < 5, "no time to spare is the highest pressure, but not without end"


def test_shares_are_learned_from_who_left():
    shares = ExitShares([0.5, 0.25, 0.25])
    told = [shares.count_exit(0) for _ in range(2000)]
    assert any(told) and not all(told)
    assert shares.published[0] > 0.97 and sum(shares.published) == pytest.approx(1)
    assert not any(ExitShares([1.0, 0.0]).count_exit(0) for _ in range(100))


# --- batches from instant to instant ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(nets) -> dict[str, CpuModel]:
    coarse, fine = (LoadOptions(grain_s=each, max_batch=4, exits=EXITS) for each in (NO_LENGTH_S, ANY_LENGTH_S))
    return {"conv": prepare(nets["conv"], coarse), "token": prepare(nets["token"], fine)}


def served(machine: Machine, model: CpuModel, *, ms: float = 1, each_ms: float = 1, **steering: Any) -> ServedModel:
    def rows_of(_: int, values: dict[str, Any]) -> int:
        return len(next(each for name, each in values.items() if name not in model.rowless))

    staged: Any = Staged(machine, model, ms, each_ms, rows_of)
    return ServedModel("net", staged, exit_rules=ExitRules(model.exits, Steering(**steering)))


def send(machine: Machine, model: ServedModel, inputs: np.ndarray, due_ms: float = 1000, **ask: Any) -> Sent:
    sent = Sent(None, {"x": inputs})  # type: ignore[arg-type]

    def replied(ticket: ClientTicket, outcome: Any) -> None:
        count(ticket, outcome, machine.clock.ticks)
        sent.replies.append((machine.clock.ticks - machine.start, outcome))

    due = machine.clock.ticks + round(due_ms * MS)
    sent.ticket = ClientTicket(model, sent.inputs, replied, due, **ask)
    machine.dispatcher.submit(sent.ticket)
    machine.sent.append(sent)
    return sent


def at_rest(machine: Machine, model: ServedModel) -> None:
    assert (machine.dispatcher.pending, machine.dispatcher.waiting) == (0, 0)
    assert (model.leases, model.line.waiting) == (0, 0)
    assert all(len(sent.replies) == 1 for sent in machine.sent)


def check_books(machine: Machine, model: ServedModel) -> None:
    """What was counted fits what happened."""
    counted, ran = model.statistics, model.loaded.ran
    answers = [sent.outcome for sent in machine.sent if isinstance(sent.outcome, dict)]
    assert counted.success == len(answers)
    assert counted.exits == Counter(number for answer in answers for number in answer[EXIT].tolist())
    assert counted.inferences == sum(rows * count for rows, (count, _) in counted.batches.items())
    assert counted.executions == sum(count for count, _ in counted.batches.values())
    assert (counted.segments, counted.segment_rows) == (len(ran), sum(rows for _, rows in ran))


def test_a_batch_shrinks_where_its_members_are_sure(machine, prepared, references):
    one = machine("fifo")
    model, (inputs, wanted) = served(one, prepared["conv"], top=0.7), references["conv"]
    by_exit = {number: at for at, exits in reversed(list(enumerate(wanted))) if (number := taken(exits, 0.7))}
    assert set(by_exit) == {1, 2, 3}
    sent = [send(one, model, inputs[[by_exit[number]]]) for number in (3, 1, 2)]
    one.run()
    assert [each.outcome[EXIT].tolist() for each in sent] == [[3], [1], [2]]
    assert model.loaded.ran == [(0, 3), (1, 2), (2, 1)]
    assert [each.end_ms for each in sent] == [4 + 3 + 2, 4, 4 + 3]
    assert [each.ticket.compute_ns / MS for each in sent] == [9, 4, 7]
    assert model.statistics.batches == {3: [1, 9 * MS]} and model.statistics.mean_batch == 2
    for each, number in zip(sent, (3, 1, 2), strict=True):
        check_answer(each.outcome, [wanted[by_exit[number]]], 0.7)
    check_books(one, model)
    at_rest(one, model)


def taken(exits: list[tuple[np.ndarray, float]], threshold: float) -> int:
    """The exit a sample takes; 0 where it is so close that rounding decides."""
    if any(abs(sure - threshold) < 1e-4 for _, sure in exits):
        return 0
    return next((number for number, (_, sure) in enumerate(exits, start=1) if sure >= threshold), len(exits))


def test_nothing_is_left_to_compute_once_all_have_left(machine, prepared, references):
    one = machine("fifo")
    model, (inputs, _) = served(one, prepared["conv"]), references["conv"]
    sent = [send(one, model, inputs[[at]], exit_threshold=1e-6) for at in range(4)]
    one.run()
    assert [each.outcome[EXIT].tolist() for each in sent] == [[1]] * 4
    assert model.loaded.ran == [(0, 4)] and model.statistics.executions == 1
    at_rest(one, model)


def test_a_request_leaves_with_its_last_row_and_each_row_has_its_own_exit(machine, prepared, references):
    one = machine("fifo")
    model, (inputs, wanted) = served(one, prepared["conv"]), references["conv"]
    numbers = [taken(exits, 0.7) for exits in wanted]
    rows = [numbers.index(1), numbers.index(2), numbers.index(3)]
    sent = send(one, model, inputs[rows], exit_threshold=0.7)
    early = send(one, model, inputs[rows[:2]], exit_threshold=0.7)
    empty = send(one, model, inputs[:0])
    one.run()
    assert sent.outcome[EXIT].tolist() == [1, 2, 3] and early.outcome[EXIT].tolist() == [1, 2]
    check_answer(sent.outcome, [wanted[at] for at in rows], 0.7)
    check_answer(early.outcome, [wanted[at] for at in rows[:2]], 0.7)
    check_answer(empty.outcome, [], 0.8)
    at_rest(one, model)


def test_a_threshold_above_one_keeps_everybody_to_the_end(machine, prepared, references):
    one = machine("fifo")
    model, (inputs, wanted) = served(one, prepared["conv"]), references["conv"]
    sent = [send(one, model, inputs[[at]], exit_threshold=1.5) for at in range(8)]
    one.run()
    assert model.statistics.exits == {3: 8}
    for at, each in enumerate(sent):
        check_answer(each.outcome, [wanted[at]], 1.5)


def test_who_went_away_leaves_the_batch_at_the_next_exit(machine, prepared, references):
    one = machine("fifo")
    model, (inputs, _) = served(one, prepared["conv"]), references["conv"]
    sent = [send(one, model, inputs[[at]], exit_threshold=2) for at in range(3)]
    one.at(1, lambda: one.dispatcher.withdraw(sent[1].ticket))
    one.run()
    assert model.loaded.ran == [(0, 3), (1, 2), (2, 2)]
    assert isinstance(sent[1].outcome, Cancelled) and model.statistics.exits == {3: 2}
    at_rest(one, model)


def test_newcomers_catch_up_and_join(machine, prepared, references):
    one = machine("fluid")
    model, (inputs, wanted) = served(one, prepared["conv"]), references["conv"]
    sent = [send(one, model, inputs[[0]], exit_threshold=2)]
    one.at(1, lambda: sent.extend(send(one, model, inputs[[at]], exit_threshold=2) for at in (1, 2)))
    one.run()
    assert model.loaded.ran == [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert [each.end_ms for each in sent] == [13, 13, 13]
    assert [each.ticket.compute_ns / MS for each in sent] == [2 + 8, 3 + 8, 3 + 8]
    assert [each.ticket.batch_size for each in sent] == [3, 3, 3]
    counted = model.statistics
    assert (counted.merges, counted.preemptions, counted.executions, counted.inferences) == (1, 0, 2, 3)
    assert counted.batches == {1: [1, 10 * MS], 2: [1, 3 * MS]}, "what is computed together counts once"
    for at, each in enumerate(sent):
        check_answer(each.outcome, [wanted[at]], 2)
    check_books(one, model)
    at_rest(one, model)


def test_a_merged_batch_that_fails_is_tried_one_by_one(machine, prepared, references):
    one = machine("fluid")
    model, (inputs, wanted) = served(one, prepared["conv"]), references["conv"]
    model.loaded.fails = lambda segment, values: segment == 2 and len(values["a1"]) > 1
    sent = [send(one, model, inputs[[0]], exit_threshold=2)]
    one.at(1, lambda: sent.extend(send(one, model, inputs[[at]], exit_threshold=2) for at in (1, 2)))
    one.run()
    assert model.loaded.ran == [(0, 1), (0, 2), (1, 3), (2, 3), *[(segment, 1) for segment in range(3)] * 3]
    for at, each in enumerate(sent):
        check_answer(each.outcome, [wanted[at]], 2)
        assert each.ticket.compute_ns == 6 * MS
    at_rest(one, model)


def test_batches_that_cannot_be_joined_run_one_after_another(machine, nets, references):
    whole = prepare(nets["conv"], LoadOptions(grain_s=ANY_LENGTH_S, max_batch=4))
    loose = CpuModel(whole.blueprint.model_copy(update={"mergeable": False}), whole.sessions)
    one = machine("fifo")
    model, (inputs, wanted) = ServedModel("net", loose), references["conv"]
    tickets = [send(one, model, inputs[at : at + 1]).ticket for at in range(3)]
    first, second = begun(one, tickets[:2]), begun(one, tickets[2:])
    for batch in (first, second):
        compute_here(batch, 0)
    first.join(second)
    for segment in range(1, len(loose.segments)):
        compute_here(first, segment)
    for at, (ticket, outputs) in enumerate(first.results()):
        assert ticket is tickets[at]
        for number, name in enumerate(EXITS):
            np.testing.assert_allclose(outputs[name], wanted[at][number][0][None], rtol=1e-4, atol=1e-5)


def test_the_programs_of_a_model_say_where_and_how_many_leave(machine, prepared, references):
    one = machine("fifo")
    model, (inputs, _) = served(one, prepared["conv"], top=1e-6), references["conv"]
    send(one, model, inputs[:1])
    program = one.dispatcher.streams.programs[0]
    assert program.exits == (1, 2) and program.exit_rates == pytest.approx((1 / 3,) * 3)
    for at in range(COUNT):
        send(one, model, inputs[[at]])
    one.run()
    learned = one.dispatcher.streams.programs[0].exit_rates
    assert learned == model.exit_rules.shares.published and learned[0] > 0.5 and sum(learned) == pytest.approx(1)


def test_a_queue_that_presses_lowers_the_threshold_of_those_who_state_none(machine, prepared, references):
    one = machine("fifo")
    model, (inputs, _) = served(one, prepared["conv"], each_ms=2, top=0.9, floor=0.3), references["conv"]
    calm = send(one, model, inputs[:1], 100)
    one.run()
    assert calm.ticket.threshold == 0.9 == one.dispatcher.exit_threshold(model)
    pressed = [send(one, model, inputs[[at % COUNT]], 100) for at in range(100)]
    own = send(one, model, inputs[:1], 100, exit_threshold=0.95)
    one.run(until_ms=one.now_ms + 60)
    assert one.dispatcher.exit_threshold(model) < 0.5
    one.run()
    used = [each.ticket.threshold for each in pressed]
    assert used[0] == 0.9 and min(used) < 0.35 and own.ticket.threshold == 0.95
    one.run(until_ms=one.now_ms + 1000)
    assert one.dispatcher.exit_threshold(model) == 0.9, "calm again"


def test_a_model_that_takes_most_of_its_time_is_calm_when_it_is_alone(machine, prepared, references):
    one = machine("fluid")
    model, (inputs, _) = served(one, prepared["conv"], each_ms=2, top=0.9, floor=0.3), references["conv"]
    for at in range(10):
        one.at(20 * at, lambda: send(one, model, inputs[:1], 11))
    one.run()
    assert {sent.ticket.threshold for sent in one.sent} == {0.9}


def test_without_a_floor_the_threshold_stays(machine, prepared, references):
    one = machine("fifo")
    model, (inputs, _) = served(one, prepared["conv"], each_ms=2, top=0.9), references["conv"]
    sent = [send(one, model, inputs[[at % COUNT]], 100) for at in range(100)]
    one.run()
    assert {each.ticket.threshold for each in sent} == {0.9}


@st.composite
def days(draw: st.DrawFn) -> list[tuple[float, int, int, float | None, float, bool, float | None]]:
    """Requests: when, first sample, rows, threshold, time allowed, strict, and when the client goes away."""
    one = st.tuples(
        st.integers(0, 60).map(float),
        st.integers(0, COUNT - 3),
        st.sampled_from([1, 1, 1, 1, 2, 3]),
        st.sampled_from([None, None, 0.3, 0.6, 0.9, 2.0]),
        st.sampled_from([8.0, 20.0, 60.0, 1000.0]),
        st.booleans(),
        st.none() | st.none() | st.none() | st.integers(0, 20).map(float),
    )
    return draw(st.lists(one, min_size=1, max_size=14))


@pytest.mark.parametrize("name", ["conv", "token"])
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("policy", SERVING)
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(day=days())
def test_everybody_is_answered_once_by_an_exit_it_reached(machine, prepared, references, policy, lanes, name, day):
    one = machine(policy, lanes=lanes)
    model, (inputs, wanted) = served(one, prepared[name], top=0.7), references[name]
    checks: list[tuple[Sent, slice, float]] = []

    def arrive(first: int, rows: int, threshold: float | None, due_ms: float, strict: bool, away: float | None) -> None:
        place = slice(first, first + rows)
        try:
            sent = send(one, model, inputs[place], due_ms, strict=strict, exit_threshold=threshold)
        except Exception as error:
            assert getattr(error, "reason", "") == "unmeetable"
            return
        checks.append((sent, place, 0.7 if threshold is None else threshold))
        if away is not None:
            one.at(one.now_ms + away, lambda: one.dispatcher.withdraw(sent.ticket))

    for at, *request in day:
        one.at(at, lambda request=tuple(request): arrive(*request))
    one.run()
    for sent, place, threshold in checks:
        if isinstance(sent.outcome, dict):
            check_answer(sent.outcome, wanted[place], threshold)
        else:
            assert sent.outcome.reason in ("expired", "cancelled")
    at_rest(one, model)
    check_books(one, model)
    one.close()


# --- a real server ----------------------------------------------------------------------------------------------------


def get(live: Live, path: str) -> Any:
    with urllib.request.urlopen(f"{live.url}/{path}") as answer:
        return json.loads(answer.read())


def test_metadata_lists_the_answer_its_exit_and_its_confidence(live):
    assert get(live, "v2/models/conv")["outputs"] == [
        {"name": "logits", "datatype": "FP32", "shape": [-1, CLASSES]},
        {"name": "weft_exit", "datatype": "INT64", "shape": [-1]},
        {"name": "weft_confidence", "datatype": "FP32", "shape": [-1]},
    ]
    assert get(live, "v2/models/conv/config")["parameters"]["weft_exit_threshold"] == {"string_value": "0.7"}
    assert [each["name"] for each in get(live, "v2/models/plain")["outputs"]] == list(EXITS), "nobody named its exits"


@pytest.mark.parametrize("threshold", [0, -0.5, True, "0.5", "nan", 1e10])
def test_an_invalid_threshold_is_refused(live, references, threshold):
    with pytest.raises(urllib.error.HTTPError, match="400") as caught:
        infer(live, references["conv"][0][:1], parameters={"weft_exit_threshold": threshold})
    said = json.loads(caught.value.read())["error"]
    assert said.startswith("parameter weft_exit_threshold = ") and "must be a number above 0" in said


def test_the_output_of_an_exit_cannot_be_asked_for(live, references):
    inputs = references["conv"][0][:1]
    with pytest.raises(urllib.error.HTTPError, match="400") as caught:
        infer(live, inputs, outputs=[{"name": "exit1"}])
    assert json.loads(caught.value.read())["error"] == (
        "output 'exit1' is an exit; ask for 'logits', which holds what each row's exit gave"
    )
    only = infer(live, inputs, outputs=[{"name": "weft_exit"}, {"name": "logits"}])
    assert [each["name"] for each in only["outputs"]] == ["weft_exit", "logits"]


def test_models_without_exits_do_not_mind_a_threshold(live):
    answer = infer(live, samples(2, (4, 6)), "plain", parameters={"weft_exit_threshold": 0.5})
    assert [each["name"] for each in answer["outputs"]] == list(EXITS)
    assert "weft_exit_threshold" not in answer["parameters"]


def test_metrics_and_state_tell_of_exits_threshold_and_accuracy(live, references):
    before = metrics(live)
    answer = outputs_of(infer(live, references["conv"][0][:5], "marked"))
    after, labels = metrics(live), '{model="marked",version="1"}'
    for number in (1, 2, 3):
        key = f'weft_exits_total{{model="marked",version="1",exit="{number}"}}'
        assert after[key] - before[key] == answer["weft_exit"].tolist().count(number)
    record = live.server.service.library.find("marked").served.exit_rules.record
    assert after[f"weft_exit_threshold{labels}"] == 0.8
    assert after[f"weft_exit_accuracy{labels}"] == pytest.approx(record.accuracy(0.8))
    assert 'weft_exit_accuracy{model="conv",version="1"}' not in after
    assert not [name for name in after if name.startswith("weft_exit") and '"plain"' in name]
    told = {each["name"]: each["exits"] for each in get(live, "weft/state")["models"]}
    assert told["plain"] is None and told["conv"]["accuracy"] is None
    assert told["marked"]["names"] == list(EXITS) and told["marked"]["threshold"] == 0.8
    assert sum(told["marked"]["taken"]) == 5 and told["marked"]["accuracy"] == pytest.approx(record.accuracy(0.8))


@pytest.mark.parametrize(
    ("schema", "path"), [("State", "weft/state"), ("Profile", "weft/profile"), ("InferResponse", None)]
)
def test_what_is_told_has_the_shape_that_is_promised(live, references, schema, path):
    found = get(live, path) if path else infer(live, references["conv"][0][:2])
    components = get(live, "openapi.json")["components"]
    Draft202012Validator({"components": components, "$ref": f"#/components/schemas/{schema}"}).validate(found)
    if path == "weft/profile":
        assert found["models"]["conv"]["exits"] == [1, 2] and found["models"]["plain"]["exits"] == []
        assert sum(found["models"]["conv"]["exit_rates"]) == pytest.approx(1)


def test_shares_begin_with_what_the_record_says(live):
    leaving = live.server.service.library.find("marked").served.exit_rules
    assert sum(leaving.record.rates(0.8)) == pytest.approx(1)
    assert leaving.shares.published == pytest.approx(leaving.record.rates(0.8), abs=0.1)


BAD = {
    'exits = ["exit1", "nothing"]': "exits: unknown output 'nothing'",
    'exits = ["logits", "exit1"]': "exit 'logits' is deeper than 'exit1', which follows it",
    'exits = ["exit1", "exit1", "logits"]': "exit 'exit1' is named twice",
    'exits = ["exit1", "logits"]\nexit_floor = 0.9': "exit_floor = 0.9 must be above 0 and at most exit_threshold",
    "exit_floor = 0.5": "exit_floor is set, but the model has no exits; name its outputs that are, as exits",
    'exits = ["exit1", "logits"]\nexit_record = "none.npz"': "none.npz: cannot read the record",
    'exits = ["exit1", "logits"]\nexit_record = "three.npz"': "exit_record = 'three.npz' is for 3 exits, must be for 2",
    "exit_threshold = 0": "exit_threshold",
    'exit_confidence = "loud"': "exit_confidence",
    'exit_record = "../record.npz"': "exit_record",
    'exits = "logits"': "exits",
}


@pytest.fixture(scope="module")
def complaints(tmp_path_factory) -> dict[str, str]:
    """What the index says of models with these settings."""
    folder = tmp_path_factory.mktemp("bad")
    for number, text in enumerate(BAD):
        conv_net(folder / f"m{number}.onnx", seed=number)
        (folder / f"m{number}.toml").write_text(text)
    np.savez(folder / "three.npz", confidence=np.full((4, 3), 0.5), correct=np.ones((4, 3), bool))
    with running(folder, grpc_port=None) as live:
        request = urllib.request.Request(f"{live.url}/v2/repository/index", b"{}", method="POST")
        with urllib.request.urlopen(request) as answer:
            said = {each["name"]: each["reason"] for each in json.loads(answer.read())}
    assert not any(str(folder) in reason for reason in said.values()), "where files lie is not the clients' business"
    return said


@pytest.mark.parametrize("number", range(len(BAD)), ids=list(BAD))
def test_bad_settings_are_one_line(complaints, number):
    said = complaints[f"m{number}"]
    assert list(BAD.values())[number] in said and "\n" not in said


def test_a_model_that_was_opened_in_vain_gives_its_memory_back(tmp_path, monkeypatch):
    closed: list[str] = []
    plain = CpuModel.close
    monkeypatch.setattr(CpuModel, "close", lambda self: (closed.append(self.exits.specs[-1].output), plain(self)))
    conv_net(tmp_path / "m.onnx")
    (tmp_path / "m.toml").write_text('exits = ["exit1", "logits"]\nexit_record = "none.npz"')
    with running(tmp_path, grpc_port=None, backend="onnxruntime"):
        assert closed == ["logits"]
