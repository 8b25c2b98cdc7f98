"""This machine as a device: lanes that slow each other down, what is read off spans, and the commands that use it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import DATA
from tests.serving import live
from tests.support.commands import refused, run
from weft.base.errors import DeviceError, WorkloadError
from weft.cli.host import print_host
from weft.devices import (
    Host,
    Lanes,
    load_any,
    load_npu,
    load_simulated,
    parse_host,
    read_host,
)
from weft.devices.costs.program import Program
from weft.devices.host import Gates, HostModel, write_host
from weft.engine import Engine, SaturatedStreams, SimulatedHost
from weft.engine.admission import Refusal
from weft.engine.policies import Setting, make_policy
from weft.engine.policies.base import NO_BUFFER, Candidate, Start
from weft.engine.simulated_host import Crowd, DrawnWork
from weft.engine.tickets import WaitingLine
from weft.planning.survey import SeenSpan, Subject, losses, survey
from weft.planning.survey.measure import _Survey, failures
from weft.planning.survey.spans import _overlapping, hand_overs, read_spans, runs
from weft.serving.dispatch import refusal_error
from weft.simulation.requests import prepare, simulate_requests
from weft.simulation.sustain import Question, sustain
from weft.workloads.requests import parse_workload

SAVED = DATA / "host" / "two_models.json"

WORKLOAD = """
duration_s = 4.0
warmup_s = 0.2
seed = 1
[[stream]]
model = "short"
rate = 60.0
deadline_ms = 40.0
[[stream]]
model = "nets/long.onnx"
rate = 20.0
deadline_ms = 80.0
"""


@pytest.fixture
def workload_file(tmp_path: Path) -> Path:
    path = tmp_path / "w.toml"
    path.write_text(WORKLOAD)
    return path


def workload(**changes):
    streams = [
        {"model": "short", "rate": 60.0, "deadline_ms": 40.0},
        {"model": "long", "rate": 20.0, "deadline_ms": 80.0},
    ]
    return parse_workload({"duration_s": 4.0, "warmup_s": 0.2, "seed": 1, "stream": streams} | changes, "test")


def changed(**changes) -> Host:
    return parse_host(json.loads(SAVED.read_text()) | changes, "test")


def exact(lanes: int, **losses_of) -> Host:
    """The saved machine without noise, hand-overs or overheads."""
    raw = json.loads(SAVED.read_text())
    for name, model in raw["models"].items():
        model |= {"spread": [], "overhead_s": [], "loses": losses_of.get(name, {})}
    return parse_host(raw | {"lanes": lanes, "hand_over_s": []}, "test")


# Which lanes run together, and how fast


def test_an_npu_fetches_and_computes_at_once_and_a_tiled_one_does_not():
    assert load_npu("tpuv3-like").together().names == ("channel", "array")
    assert load_npu("tpuv3-like").together().speeds([0, 1]) == [1.0, 1.0]
    assert len(load_simulated("zc706-resnet50").together()) == 1


def test_a_lane_loses_speed_to_every_other_one_by_what_it_runs():
    lanes = Lanes(("a", "b", "c"), cores=4, losses=((0.1, 0.3), (0.2, 0.0)))
    assert lanes.speeds([0]) == [1.0]
    assert lanes.speeds([0, 1]) == pytest.approx([0.7, 0.8])
    assert lanes.speeds([0, 0, 1]) == pytest.approx([0.6, 0.6, 0.6])


def test_more_lanes_than_cores_share_these():
    assert Lanes(("a", "b", "c"), cores=2).speeds([0, 0, 0]) == pytest.approx([2 / 3] * 3)


def head(stream: int, ticks: int) -> Candidate:
    return Candidate(stream, 0, 0, 0, ticks, -1, stream)


def two_lanes(loss: float, works: dict[int, DrawnWork]) -> SimulatedHost:
    programs = tuple(Program(f"{p}", ("a",), (0,), (100,), (0,)) for p in works)
    crowd = Crowd(Lanes(("0", "1"), 2, ((loss,) * 2,) * 2), [0, 1], lambda candidate: works[candidate.program])
    return SimulatedHost(Setting(programs, NO_BUFFER, lanes=2), crowd=crowd)


def test_segments_slow_each_other_down_while_they_overlap_and_no_longer():
    host = two_lanes(0.5, {0: DrawnWork(0, 100), 1: DrawnWork(0, 40)})
    host.submit(Start(head(0, 100)))
    host.idle_until(20)
    host.submit(Start(head(1, 40)))
    host.idle_until(1000)
    assert host.now() == 20 + 40 / 0.5
    assert [done.candidate.stream for done in host.completions()] == [1]
    host.idle_until(1000)
    assert host.now() == 140  # 20 alone, 80 at half speed, 40 alone
    assert [done.times.compute_end for done in host.completions()] == [140]


def test_a_server_that_is_busy_with_each_segment_answers_later():
    rare = workload(stream=[{"model": "short", "rate": 1.0, "deadline_ms": 40.0}])
    machine = exact(1)
    busy = machine.model_copy(update={"step_s": 0.001})
    found = [simulate_requests(prepare(rare, each), "fifo").report.streams[0].p50_s for each in (machine, busy)]
    assert found == pytest.approx([0.002, 0.003], rel=1e-3)  # one segment of 2 ms


def test_a_lane_that_has_not_begun_slows_nobody_down():
    host = two_lanes(0.5, {0: DrawnWork(0, 100), 1: DrawnWork(30, 100)})
    host.submit(Start(head(0, 100)))
    host.submit(Start(head(1, 100)))
    host.idle_until(1000)
    assert host.now() == 30 + 70 / 0.5
    ((done),) = host.completions()
    assert (done.candidate.stream, done.times.compute_start) == (0, 0)
    host.idle_until(1000)
    assert host.now() == 170 + 30


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_lanes_that_lose_nothing_run_as_if_nobody_had_asked(lanes):
    programs = tuple(Program(f"{p}", ("a", "b"), (0, 0), (70 + 9 * p, 31), (0, 0)) for p in range(3))
    setting = Setting(programs, NO_BUFFER, 20, lanes=lanes)
    crowd = Crowd(Lanes(("x",) * lanes), [0] * 3, lambda candidate: DrawnWork(0, candidate.compute))
    logs = []
    for host in (SimulatedHost(setting), SimulatedHost(setting, crowd=crowd)):
        source = _OneAtATime(setting, None, setting.work)
        source.host = host
        Engine(source, make_policy("round-robin", setting), host).run()
        logs.append(host.log)
    assert logs[0] == logs[1]


class _OneAtATime(SaturatedStreams):
    """Waits for a lane where none is free."""

    host: SimulatedHost

    def next_event(self) -> int:
        return self.host.now()


# What spans say


def ran(host: Host, seconds: float = 3.0) -> list[SeenSpan]:
    """The spans of a run on a simulated host with the lanes all but full."""
    streams = [
        {"model": name, "arrival": "closed", "clients": 2 + place, "deadline_ms": 1e6, "max_batch": 1}
        for place, name in enumerate(host.models)
    ]
    case = prepare(parse_workload({"duration_s": seconds, "stream": streams}, "test"), host)
    issues = simulate_requests(case, "fifo", record=True).tally.issues
    names, free, found = list(host.models), [0.0] * host.lanes, []
    for stream, query, layer, _, _, _, start, end in sorted(issues.tolist(), key=lambda issue: issue[6]):
        lane = next(lane for lane, since in enumerate(free) if since <= start)
        free[lane] = end
        found.append(SeenSpan(lane, names[stream], layer, start / 1e9, end / 1e9, 1, query))
    return found


def test_what_lanes_lose_is_read_off_their_spans():
    lost = {"short": {"short": 0.1, "long": 0.3}, "long": {"short": 0.05, "long": 0.2}}
    host = exact(2, **lost)
    found = losses(ran(host), host.models, cores=2)
    for model, shares in lost.items():
        assert found[model] == pytest.approx(shares, abs=0.01)


def test_more_lanes_than_cores_lose_nothing_else():
    host = exact(3)
    found = losses(ran(host), host.models, cores=2)
    assert all(share < 0.01 for shares in found.values() for share in shares.values())


def test_spans_come_from_the_servers_trace_and_runs_are_whole():
    def event(segment, start_us, query, cat="done"):
        said = {"segment": segment, "rows": 1, "query": query}
        return {"ph": "X", "tid": 0, "name": "m", "cat": cat, "ts": start_us, "dur": 10.0, "args": said}

    events = [{"ph": "M", "tid": 0}, event("1/2", 0, 0), event("2/2", 15, 0), event("1/2", 30, 1)]
    spans = read_spans({"traceEvents": [*events, event("1/2", 50, 2, "aborted")]}, 0.0)
    assert [span.segment for span in spans] == [0, 1, 0]
    assert [[span.query for span in each] for each in runs(spans, "m", 2)] == [[0, 0]]
    assert hand_overs(spans) == pytest.approx([5e-6, 5e-6])
    assert hand_overs(spans, within=True) == pytest.approx([5e-6])


# A measured machine as a device


def test_a_file_is_read_as_it_was_written(tmp_path):
    host = read_host(SAVED)
    write_host(host, tmp_path / "h.json")
    assert read_host(tmp_path / "h.json") == host == load_any(str(SAVED))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "npu"}, "weft profile MODELS --device host"),
        ({"lanes": 0}, "lanes"),
        ({"models": {"m": {"segments": ["a"], "times_s": {"2": [1.0]}}}}, "batch 1"),
        ({"models": {"m": {"segments": ["a"], "times_s": {"1": [1.0, 2.0]}}}}, "2 times for 1 segments"),
        ({"models": {"m": {"segments": ["a"], "times_s": {"1": [1.0]}, "loses": {"n": 0.1}}}}, "'n'"),
        ({"corse": 3}, "cores"),
    ],
)
def test_a_file_that_cannot_be_is_refused(change, said):
    with pytest.raises(DeviceError, match=said):
        changed(**change)


@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_commands_have_the_loop_compiled_for_the_next_time(command, tmp_path, capsys, monkeypatch):
    begun = []
    monkeypatch.setattr("weft.simulation.requests.compiled.compile_in_background", lambda: begun.append(command))
    write_host(exact(1), tmp_path / "h.json")
    load = tmp_path / "w.toml"
    load.write_text('duration_s = 2.0\n[[stream]]\nmodel = "long"\nrate = 5.0\ndeadline_ms = 50.0\n')
    code, _, error = run(capsys, command, "-w", str(load), "-d", str(tmp_path / "h.json"))
    assert (code, begun) == (0, [command]), error


def test_a_request_alone_takes_its_segments_and_no_more():
    case = prepare(workload(stream=[{"model": "long", "rate": 1.0, "deadline_ms": 50.0}]), exact(1))
    (stream,) = simulate_requests(case, "fifo").report.streams
    assert stream.p50_s == pytest.approx(0.014, rel=0.003)


def test_hand_overs_and_the_way_are_added_to_what_segments_take():
    host = exact(1).model_copy(update={"hand_over_s": (0.001,)})
    slow = host.models["long"].model_copy(update={"overhead_s": (0.005,)})
    host = host.model_copy(update={"models": {**host.models, "long": slow}})
    case = prepare(workload(stream=[{"model": "long", "rate": 1.0, "deadline_ms": 50.0}]), host)
    (stream,) = simulate_requests(case, "fifo").report.streams
    assert stream.p50_s == pytest.approx(0.014 + 3 * 0.001 + 0.005, rel=0.003)


def test_batches_are_the_servers_unless_a_stream_says_otherwise():
    case = prepare(workload(), read_host(SAVED))
    assert [(term.max_batch, term.timeout) for term in case.terms] == [(2, 0), (1, 0)]
    one = workload(stream=[{"model": "short", "rate": 1.0, "deadline_ms": 9.0, "max_batch": 1, "batch_timeout_ms": 3}])
    assert [(term.max_batch, term.timeout) for term in prepare(one, read_host(SAVED)).terms] == [(1, 3_000_000)]


def test_a_seed_draws_the_same_run_again_and_another_one_does_not():
    case = prepare(workload(), read_host(SAVED))
    first, again, other = (simulate_requests(case, "edf", seed=seed).report for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_what_a_host_was_not_measured_with_is_refused():
    with pytest.raises(DeviceError, match="unknown model 'magika'"):
        prepare(workload(stream=[{"model": "magika", "rate": 1.0, "deadline_ms": 9.0}]), read_host(SAVED))
    leaving = {"model": "long", "rate": 1.0, "deadline_ms": 9.0, "exits": 1, "exit_rates": [0.5, 0.5]}
    with pytest.raises(WorkloadError, match="without exits"):
        prepare(workload(stream=[leaving]), read_host(SAVED))


def test_two_lanes_sustain_more_than_one_and_less_the_more_they_lose():
    def rate(host: Host) -> float:
        return sustain(Question(workload(duration_s=2.0), "edf", seeds=1, tolerance=0.1), host).rate

    one, two = rate(exact(1)), rate(exact(2))
    shares = {"short": 0.3, "long": 0.3}
    slowed = rate(exact(2, short=shares, long=shares))
    assert 1.6 * one < two
    assert 0.55 * two < slowed < 0.9 * two


def test_a_deadline_that_no_load_keeps_ends_the_search():
    hopeless = workload(stream=[{"model": "short", "rate": 5.0, "deadline_ms": 0.01}])
    with pytest.raises(WorkloadError, match="no load is sustained, however small"):
        sustain(Question(hopeless, "edf", seeds=1), exact(1))


# Commands


def test_commands_show_missed_p99_and_load_of_a_host(capsys, tmp_path, workload_file):
    out, picture = tmp_path / "s.json", tmp_path / "s.png"
    on_host = ("-d", str(SAVED), "--json", str(out))
    flags = ("-p", "edf,fifo", "-j", "1", "--seeds", "1", "--tolerance", "0.2", "--figure", str(picture))
    code, shown, _ = run(capsys, "sustain", str(workload_file), *on_host, *flags)
    assert code == 0
    assert all(word in shown for word in ("missed", "p99 ms", "load")) and "STP" not in shown
    answers = json.loads(out.read_text())["answers"]
    assert all(0 < answer["load"] <= 1 and len(answer["p99_s"]) == 2 for answer in answers)

    page = ("--html", str(tmp_path / "c.html"))
    shown = run(capsys, "compare", "-w", str(workload_file), *on_host, "-p", "edf,punctual,fifo", *page)[1]
    assert '"policies":["edf","punctual","fifo"]' in (tmp_path / "c.html").read_text("utf-8")
    assert "load" in shown and "PE" not in shown and "DRAM" not in shown
    assert [each["policy"] for each in json.loads(out.read_text())["runs"]] == ["edf", "punctual", "fifo"]

    shown = run(capsys, "compare", "-w", str(workload_file), *on_host, "-p", "fifo,double-buffer")[1]
    assert "the same as fifo here: double-buffer" in shown

    shown = run(capsys, "simulate", "-w", str(workload_file), *on_host, "-p", "punctual")[1]
    assert "missed" in shown and "load" in shown and "PE array" not in shown
    found = json.loads(out.read_text())
    assert 0 < found["load"] < 1 and "pe_utilisation" not in found


def test_a_saved_machine_is_shown(capsys):
    shown = run(capsys, "devices", "show", str(SAVED))[1]
    assert "2 lanes" in shown and "beside long" in shown


def test_a_device_that_nobody_named_is_told_in_the_first_line(capsys, workload_file):
    said = "no device named: priced for tpuv3-like, a simulated NPU (--device host measures this machine)"
    for arguments in (("profile", "ncf"), ("simulate", "-m", "ncf", "-n", "2"), ("compare", "-m", "ncf", "-p", "fifo")):
        assert run(capsys, *arguments)[1].splitlines()[0] == said
        assert said not in run(capsys, *arguments, "--device", "tpuv3-like")[1]
    text = workload_file.read_text().replace("nets/long.onnx", "ncf").replace('"short"', '"ncf"')
    workload_file.write_text(text)
    first = run(capsys, "simulate", "-w", str(workload_file), "-p", "fifo")[1].splitlines()[0]
    assert first == said.replace("tpuv3-like", "weaver-plus")
    workload_file.write_text('device = "weaver-plus"\n' + text)
    assert "no device named" not in run(capsys, "simulate", "-w", str(workload_file), "-p", "fifo")[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("simulate", "-m", "ncf", "-d", "host"), "--workload"),
        (("compare", "-m", "ncf", "-d", "host"), "--workload"),
        (("compare", "-w", "W", "-m", "ncf"), "--models does not apply"),
        (("compare", "-w", "W", "-d", "weaver-plus"), "--device host"),
        (("sustain", "W", "-d", str(SAVED), "--lanes", "2"), "--lanes"),
        (("sustain", "W", "-d", str(SAVED), "-p", "weft"), "weft+"),
        (("profile", "ncf", "bert-base"), "one model at a time"),
        (("profile", "ncf", "--lanes", "2"), "--lanes"),
        (("profile", "ncf", "-d", "host", "--cost", "roofline"), "--cost"),
        (("devices", "show", "host"), "weft profile"),
    ],
)
def test_what_makes_no_sense_on_a_host_is_refused(capsys, workload_file, arguments, said):
    assert said in refused(capsys, *(str(workload_file) if part == "W" else part for part in arguments))


# For real


def test_a_real_model_is_measured_under_its_server_and_served_by_the_simulator(tmp_path, monkeypatch):
    monkeypatch.setattr("weft.planning.survey.measure.ROUNDS", 1)
    monkeypatch.setattr("weft.planning.survey.measure.WARM_S", 0.05)
    path = live.mlp(tmp_path / "net.onnx")
    (tmp_path / "net.toml").write_text("max_batch = 2\n")
    host = survey([Subject(str(path))], lanes=2, seconds=0.2)
    model = host.models["net"]
    assert host.lanes == 2 and host.hand_over_s and model.spread and model.overhead_s
    assert host.conditions and host.conditions.repeats_ratio and (host.conditions.others_cores or 0.0) >= 0.0
    assert all(time > 0 for time in model.times_s[1])
    assert set(model.loses) == {"net"}
    assert all(np.isfinite(model.times_s[batch]).all() for batch in model.times_s)
    stream = {"model": str(path), "rate": 20.0, "deadline_ms": 10_000.0}
    report = simulate_requests(prepare(workload(stream=[stream]), host), "punctual").report
    assert report.streams[0].completed == report.streams[0].arrived > 0


def test_what_requests_take_besides_segments_is_measured_after_pauses(monkeypatch):
    spans = [SeenSpan(0, "net", 0, start_s, start_s + 0.004, 1, query) for query, start_s in enumerate((1.0, 2.0))]
    latencies_s = np.array([0.0065, 0.007])
    seen = SimpleNamespace(all_spans=spans, spans=spans, result=SimpleNamespace(streams=[SimpleNamespace()]))
    seen.result.streams[0].latency_s = latencies_s
    sent = []
    monkeypatch.setattr(
        _Survey, "_measure_load", lambda self, server, streams, what, seconds: sent.extend(streams) or seen
    )
    served = {"net": {"segments": ["all"], "times_s": {"1": [0.004]}, "shapes": {"x": [1, 2]}}}
    survey_of_one = _Survey((), (1,), 1, 1.0, Path(), None, None, served=served)
    assert survey_of_one._overhead(None, Subject("net"), [0.001, 0.002]) == pytest.approx([0.001, 0.0015])
    assert [(stream["arrival"], stream["clients"], stream["think_ms"]) for stream in sent] == [("closed", 1, 20.0)]


def test_gates_cost_as_much_as_the_server_measured_and_the_times_of_segments_contain_them():
    costs = [{"gate_us": 9.0, "leave_us": leave_us, "launch_us": 2 * leave_us} for leave_us in (7.0, 8.0, 30.0)]
    served = {str(number): {"gated": True, "gates": each} for number, each in enumerate(costs)}
    without = {"plain": {"gated": False, "gates": None}}
    hosts = (_Survey((), (1,), 1, 1.0, Path(), None, None, served=each) for each in (served | without, without))
    assert [each._gates() for each in hosts] == [Gates(gate_us=0, leave_us=8.0, launch_us=16.0), None]


@pytest.mark.parametrize(
    ("gates", "compute", "launch", "leave"),
    [({}, 12_500, 20_000, 10_000), ({"gate_us": 0, "leave_us": 8, "launch_us": 16}, 0, 16_000, 8_000)],
)
def test_a_simulated_start_on_a_host_with_gates_costs_what_they_cost(gates, compute, launch, leave):
    plain, gated = (prepare(workload(), changed(gates=each)).setting.programs for each in (None, gates))
    for before, program in zip(plain, gated, strict=True):
        assert (program.gated, program.launch, program.leave) == (True, launch, leave)
        assert all(
            after - ticks == pytest.approx(compute, abs=1)
            for ticks, after in zip(before.compute, program.compute, strict=True)
        )


def test_a_queue_that_is_full_shows_that_lanes_are_busy_and_any_other_refusal_is_told():
    full = str(refusal_error(SimpleNamespace(name="net", line=WaitingLine(256)), Refusal("line_full"), WaitingLine(1)))
    streams = [SimpleNamespace(messages={503: full}), SimpleNamespace(messages={503: "net cannot be loaded"})]
    assert failures(SimpleNamespace(streams=streams)) == ["503: net cannot be loaded"]


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), max_size=12).map(sorted),
)
def test_spans_meet_those_that_run_at_the_same_time(rows):
    spans = [SeenSpan(place, "m", 0, start, start + took, 1, place) for place, (start, took) in enumerate(rows)]
    for span, met in zip(spans, _overlapping(spans), strict=True):
        wanted = [
            each
            for each in spans
            if each is not span
            and min(each.took_s, span.took_s) > 0
            and each.start_s < span.end_s
            and each.end_s > span.start_s
        ]
        assert sorted(met) == sorted(wanted)


def test_the_times_of_several_engines_are_shown(capsys):
    engines_s = {"onnxruntime": {1: 0.002, 8: 0.004}, "compiled": {1: 0.001, 8: 0.003}}
    model = HostModel(segments=("whole",), times_s={1: (0.001,)}, engine="compiled", engines_s=engines_s)
    other = HostModel(segments=("whole",), times_s={1: (0.1,)})
    print_host(Host(name="cuda:0", cores=2, lanes=1, threads=1, models={"net": model, "other": other}))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["net", "1", "1.000", "2.000", "compiled"] in rows and ["net", "8", "3.000", "4.000", "compiled"] in rows
