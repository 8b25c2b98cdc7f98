"""A served run, predicted: the simulator on measured segments and the arrivals that were really sent."""

from __future__ import annotations

import json

import pytest

from tests.serving import live
from tests.support.benchmarks import benchmark_report
from weft.base.errors import InputError
from weft.cli.main import main
from weft.engine.policies import POLICIES
from weft.load import run_load
from weft.simulation.prediction import predict
from weft.workloads.requests import parse_workload


def written(tmp_path, content):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(content))
    return path


def test_the_urgent_one_goes_between_two_segments_of_the_long_one(tmp_path):
    prediction = predict(written(tmp_path, benchmark_report()))
    long, short = prediction.streams
    assert short.predicted.mean_s == pytest.approx(0.010 - 0.001 + 0.002 + 0.001)
    assert long.predicted.p99_s == pytest.approx(0.042 + 0.001, rel=0.02)  # 40 ms of its own, 2 ms of the other
    assert (long.predicted.missed_share, short.predicted.missed_share) == (0.0, 0.0)
    assert short.measured.mean_s == pytest.approx(0.012)


def test_another_policy_tells_what_it_would_have_done(tmp_path):
    short = predict(written(tmp_path, benchmark_report()), "fifo").streams[1]
    assert short.predicted.mean_s == pytest.approx(0.040 - 0.001 + 0.002 + 0.001)
    assert short.predicted.missed_share == 1.0


def test_strict_deadlines_drop_what_cannot_be_met(tmp_path):
    content = benchmark_report(deadlines="strict")
    content["profile"]["policy"] = "fifo"
    short = predict(written(tmp_path, content)).streams[1]
    assert short.predicted.answered == 0
    assert short.predicted.missed_share == 1.0


def test_times_seen_in_service_count_more_than_those_measured_at_load(tmp_path):
    content = benchmark_report()
    content["profile"]["models"]["short"]["seen_s"] = {"1": [0.004]}
    assert predict(written(tmp_path, content)).streams[1].predicted.mean_s == pytest.approx(0.014)


def test_what_is_known_of_the_way_and_of_hand_overs_is_added(tmp_path):
    content = benchmark_report()
    content["profile"]["hand_over_s"] = 0.0005
    content["streams"][1]["overhead_s"] = 0.003
    long, short = predict(written(tmp_path, content)).streams
    assert short.predicted.mean_s == pytest.approx(0.0105 - 0.001 + 0.0025 + 0.003)
    assert long.overhead_s == 0.001


def test_a_server_with_gates_started_whole_batches_which_left_at_gates(tmp_path):
    content = benchmark_report()
    content["profile"]["hand_over_s"] = 0.0005  # not between segments of one launch
    for model in content["profile"]["models"].values():
        model |= {"gated": True, "gates": {"gate_us": 3.0, "leave_us": 200.0, "launch_us": 100.0}}
    long, short = predict(written(tmp_path, content)).streams
    assert short.predicted.mean_s == pytest.approx(0.0001 + 0.010 + 0.0002 - 0.001 + 0.0001 + 0.002 + 0.001)
    assert long.predicted.p99_s == pytest.approx(0.042 + 2 * 0.0001 + 0.0002 + 0.0001 + 0.001, rel=0.001)


def test_requests_of_the_warm_up_are_served_but_not_counted(tmp_path):
    long, short = predict(written(tmp_path, benchmark_report(workload={"warmup_s": 0.05}))).streams
    assert (long.requests, short.requests) == (1, 0)
    assert short.predicted.mean_s is None


def sharing_a_gpu():
    """The same on a GPU: the long one fills it, the short one needs little of it."""
    content = benchmark_report()
    content["profile"] |= {"policy": "abreast", "gpu": {"sms": 132, "cuts": [[84, 48]]}}
    for name, speeds in (("long", {"84": 0.7, "48": 0.4}), ("short", {"84": 1.0, "48": 1.0})):
        content["profile"]["models"][name]["like"] = {"1": {"speeds": speeds, "kernel_us": 10.0, "memory": 0.1}}
    return content


def test_models_that_share_a_gpu_run_beside_each_other(tmp_path):
    content = sharing_a_gpu()
    content["streams"][1] |= {"deadline_s": 1.0}
    path = written(tmp_path, content)
    long, short = predict(path).streams
    one_by_one = predict(path, "punctual").streams
    assert short.predicted.mean_s < 0.006 < one_by_one[1].predicted.mean_s, (
        "it does not wait for the long one's segment"
    )
    assert long.predicted.p99_s < 0.048
    assert predict(path, "split", {"cut": 0}).streams[0].predicted.mean_s > 0.04 / 0.7


def test_shares_of_a_gpu_that_nobody_measured_are_told_in_one_line(tmp_path):
    with pytest.raises(InputError, match="abreast chooses shares of a GPU, and the server's models had none"):
        predict(written(tmp_path, benchmark_report()), "abreast")


def with_exits(taken, /, **changes):
    """Three segments of 10 ms one after another, alone or two at a time, an exit after the first two."""
    model = {"segments": ["a", "b", "c"], "times_s": {"1": [0.01] * 3, "2": [0.016] * 3}, "max_batch": 2,
             "exits": [1, 2]}  # fmt: skip
    count = len(taken)
    stream = {"model": "nets/net.onnx", "deadline_s": 1.0, "scheduled_s": [0.0] * count, "lag_s": [0.0] * count,
              "latency_s": [0.1] * count, "status": [200] * count, "exit": taken}  # fmt: skip
    profile = {"policy": "fifo", "lanes": 1, "models": {"net": model | changes}}
    return benchmark_report(streams=[stream], profile=profile, transport_s=0.0)


def test_a_request_leaves_where_it_left(tmp_path):
    for number, taken_s in ((1, 0.01), (2, 0.02), (3, 0.03)):
        (stream,) = predict(written(tmp_path, with_exits([number]))).streams
        assert stream.predicted.mean_s == pytest.approx(taken_s)


@pytest.mark.parametrize("policy", [name for name, policy in POLICIES.items() if policy.traits.serves_requests])
def test_a_batch_shrinks_under_every_policy(tmp_path, policy):
    (stream,) = predict(written(tmp_path, with_exits([1, 3])), policy).streams
    assert stream.predicted.answered == 2
    if policy in ("fifo", "fluid", "top-up", "punctual"):
        assert stream.predicted.mean_s == pytest.approx((0.016 + 0.036) / 2)


def test_the_second_leaves_first_if_that_is_what_it_did(tmp_path):
    content = with_exits([3, 1], max_batch=1)
    content["streams"][0]["scheduled_s"] = [0.001, 0.0]
    (stream,) = predict(written(tmp_path, content)).streams
    assert stream.predicted.mean_s == pytest.approx((0.01 + 0.039) / 2)


def test_who_had_no_answer_leaves_where_others_did(tmp_path):
    (stream,) = predict(written(tmp_path, with_exits([1, None, None, None], max_batch=1))).streams
    assert stream.predicted.mean_s == pytest.approx(0.01 * (1 + 2 + 3 + 4) / 4)
    (stream,) = predict(written(tmp_path, with_exits([None] * 2, max_batch=1, exit_rates=[0, 1, 0]))).streams
    assert stream.predicted.mean_s == pytest.approx(0.03)
    (stream,) = predict(written(tmp_path, with_exits([None], max_batch=1))).streams
    assert stream.predicted.mean_s == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("exits", "change", "said"),
    [
        ([4], {}, "a request of nets/net.onnx left at exit 4, the model has 3"),
        ([1], {"exits": [2, 1]}, "exits = [2, 1] do not lie in order within 3 segments"),
        ([1], {"exits": [3]}, "exits = [3] do not lie in order"),
        ([1], {"exits": [0]}, "exits = [0] do not lie in order"),
        ([1], {"exit_rates": [0.5, 0.5]}, "2 exit_rates for 3 exits"),
        ([1], {"exit_rates": [0.5, 0.5, 0.5]}, "sum to 1.5, must sum to 1"),
        ([0], {}, "exit"),
    ],
)
def test_exits_that_cannot_be_are_one_line(tmp_path, exits, change, said):
    with pytest.raises(InputError) as caught:
        predict(written(tmp_path, with_exits(exits, **change)))
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["lag_s", "latency_s", "status", "exit"])
def test_lists_of_different_lengths_are_one_line(tmp_path, key):
    content = with_exits([1, 1])
    content["streams"][0][key].pop()
    with pytest.raises(InputError, match=f"{key} has 1 values for 2 requests"):
        predict(written(tmp_path, content))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"profile": None}, "not measured on a weft server"),
        ({"profile": {"policy": "fifo", "lanes": 1, "models": {}}}, "no measured segments of long"),
        ({"format": 2}, "format"),
        ({"streams": [{"model": "long"}]}, "--save-latencies"),
        ({"streams": 3}, "streams"),
        ({"transport_s": -1}, "transport_s"),
    ],
)
def test_what_cannot_be_predicted_is_said_in_one_line(tmp_path, change, said):
    with pytest.raises(InputError) as caught:
        predict(written(tmp_path, benchmark_report(**change)))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_real_run_is_predicted_request_by_request(tmp_path, capsys):
    live.mlp(tmp_path / "models" / "mlp.onnx")
    live.heavy(tmp_path / "models" / "heavy.onnx", layers=6)
    streams = [
        {"model": "mlp", "rate": 20, "deadline_ms": 1000},
        {"model": "heavy", "rate": 5, "deadline_ms": 5000},
    ]
    workload = parse_workload({"stream": streams, "duration_s": 1.0, "warmup_s": 0.1}, "test")
    with live.running(tmp_path / "models") as server:
        result = run_load(workload, server.url, deadlines="soft")
    path = written(tmp_path, result.as_dict())
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--bench", str(path), "--json", str(tmp_path / "out.json")])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "measured" in shown and "simulated" in shown
    found = json.loads((tmp_path / "out.json").read_text())
    for stream, load in zip(found["streams"], result.streams, strict=True):
        assert stream["requests"] == load.figures.scheduled
        assert stream["measured"]["answered"] == load.figures.answered
        assert stream["predicted"]["answered"] == load.figures.scheduled
        assert stream["predicted"]["mean_s"] > 0
