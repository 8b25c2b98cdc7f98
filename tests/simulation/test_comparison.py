"""``weft.compare`` and ``weft.sustain``: what the commands decide, for who asks in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import weft
from weft.base.errors import DeviceError, InputError, WorkloadError
from weft.devices import Host, HostModel, TiledNpu, load_device
from weft.devices.costs.layer_costs import LayerCost, Profile
from weft.planning.survey.host_measurement import subjects_of
from weft.simulation.comparison import compare, compare_requests
from weft.simulation.loads import AS_WRITTEN, PAPER_RATIOS, SustainedLoads, check_request, sustain
from weft.simulation.requests import simulate_requests
from weft.simulation.run_length import FRESH_SEED, USUAL, prolong, prolong_if_shorter
from weft.simulation.sustain import Question, Sustained
from weft.workloads import Saturated
from weft.workloads.requests import Workload, parse_workload

NPU = "tpuv3-like"
HOST = Host(cores=2, lanes=1, models={"net": HostModel(segments=("s",), times_s={1: (0.01,)})})


def profile(name: str, compute_s: float, weight_bytes: int) -> Profile:
    layers = tuple(LayerCost(f"l{n}", compute_s, weight_bytes) for n in range(3))
    return Profile(name, NPU, 1, layers)


def requests(rate: float = 20.0, **changed: Any) -> Workload:
    stream = {"model": "net", "rate": rate, "deadline_ms": 50.0, "arrival": "uniform"}
    return parse_workload({"duration_s": 2.0, "warmup_s": 0.0, "stream": [stream], **changed})


@pytest.fixture(scope="module")
def two() -> list[Profile]:
    return [profile("busy", 1e-3, 1000), profile("heavy", 1e-6, 4_000_000)]


# Comparing


def test_profiles_are_compared_as_they_are_and_the_best_is_told(two: list[Profile]) -> None:
    seen: list[tuple[str, int, int]] = []
    made = compare(
        two,
        policies=["fifo", "weft"],
        device=NPU,
        workload=Saturated(3),
        pieces=1,
        on_progress=lambda *p: seen.append(p),
    )
    assert [report.policy for report in made.reports] == ["fifo", "weft"]
    assert made.best.report.stp == max(report.stp for report in made.reports)
    assert made.title == "busy + heavy on tpuv3-like, batch 1" and made.left_out == "" and made.in_pieces == ()
    assert seen == [("simulating", 1, 4), ("simulating", 2, 4)]
    assert [run["policy"] for run in made.as_dict()["runs"]] == ["fifo", "weft"]
    assert "busy + heavy" in made._repr_html_() and repr(made).startswith("Comparison(busy + heavy on tpuv3-like")
    bars = made.plot().axes[0].patches
    assert [bar.get_height() for bar in bars] == [report.stp for report in made.reports]


def test_all_leaves_out_who_has_nothing_to_say(two: list[Profile]) -> None:
    made = compare(two, device=weft.load_npu(NPU), workload=Saturated(1))
    assert "serial" not in [report.policy for report in made.reports] and "serial, adaptive (" in made.left_out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policies": ["fifoo"]}, "unknown policy 'fifoo'; did you mean fifo"),
        ({"policies": []}, "policies names nothing"),
        ({"policies": "fifo", "sweep": True}, "sweep = True does not apply to policies = fifo: it is for aimt"),
        ({"device": "nowhere"}, "nowhere"),
    ],
)
def test_what_cannot_be_compared_is_refused(two: list[Profile], options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        compare(two, **options)


def test_requests_are_compared_on_a_measured_machine(tmp_path: Path) -> None:
    made = compare_requests(requests(), HOST, policies=["edf", "fifo"], late="keep")
    assert [report.policy for report in made.reports] == ["edf", "fifo"] and made.best.violation_rate == 0
    assert made.title == "requests on host, 1 lane, no batches, late requests: keep, 2 s of requests"
    alike, few = made.table().notes
    assert alike == "the same as edf here: fifo" and few.startswith("* fewer than 100 answers have no p99: net max of ")
    assert len(made.plot().axes[0].patches) == 2 and "edf" in made._repr_html_()
    file = tmp_path / "w.toml"
    file.write_text('duration_s = 1.0\n[[stream]]\nmodel = "net"\nrate = 5\ndeadline_ms = 50\n')
    assert compare_requests(file, HOST, policies=["edf"]).title.startswith("w.toml on host")
    with pytest.raises(InputError, match="requests are compared on device = host, not on tpuv3-like"):
        compare_requests(requests(), NPU)
    with pytest.raises(InputError, match="weave"):
        compare_requests(requests(), HOST, late="never")


def test_a_comparison_costs_no_more_than_so_many_segments_and_all_policies_see_the_same_requests() -> None:
    told: list[tuple[str, int, int]] = []
    names = ["edf", "fifo", "abreast"]
    gpu = weft.load_device("h200").model_copy(update={"gates": None})  # a start is one segment
    streams = [
        {"model": "resnet50-b1", "rate": 200.0, "deadline_ms": 20.0},
        {"model": "mobilenet-b1", "arrival": "closed", "clients": 2, "think_ms": 5.0, "deadline_ms": 20.0},
    ]
    workload = weft.Workload.model_validate({"duration_s": 10.0, "stream": streams})
    made = compare_requests(
        workload, gpu, policies=names, most_segments=900, on_progress=lambda *progress: told.append(progress)
    )
    assert made.cut_to_s is not None and made.as_dict()["cut_to_s"] == made.cut_to_s < 1.0
    assert f"the first {made.cut_to_s:.3g} of 10 s" in made.title
    assert 450 < sum(report.decisions for report in made.reports) < 1200
    assert len({report.streams[0].arrived for report in made.reports}) == 1
    assert told == [(f"simulating {name}", place, 3) for place, name in enumerate(names)]


def test_a_comparison_that_costs_no_more_is_not_cut_short() -> None:
    made = compare_requests(requests(), HOST, policies=["edf"], most_segments=10**6)
    assert made.cut_to_s is None and "cut_to_s" not in made.as_dict() and "first" not in made.title


def test_a_trace_is_counted_before_it_is_cut_short(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("arrival\n" + "".join(f"{0.1 * place}\n" for place in range(100)))
    file = tmp_path / "w.toml"
    file.write_text(
        'duration_s = 10.0\n[[stream]]\nmodel = "net"\narrival = "trace"\ntrace = "t.csv"\ndeadline_ms = 50\n'
    )
    segments = len(HOST.model("net").segments)
    made = compare_requests(file, HOST, policies=["edf"], most_segments=50 * segments)
    assert made.cut_to_s == pytest.approx(5.0, rel=0.05)


# Sustaining


def test_the_largest_load_is_searched_for_each_policy() -> None:
    seen: list[tuple[int, int]] = []
    made = sustain(
        requests(), policies=["edf", "fifo"], device=HOST, seeds=1, tolerance=0.1, on_progress=lambda *p: seen.append(p)
    )
    assert made.policies == ("edf", "fifo") and seen == [(1, 2), (2, 2)] and made.labels == (AS_WRITTEN,)
    assert 80 < made.best.rate <= 100, "a request takes 10 ms"
    (answer, _) = made.as_dict()["answers"]
    assert answer["rates"] == [answer["rate"]]
    assert "largest load with at most 1.0%" in made._repr_html_()
    assert [bar.get_height() for bar in made.plot().axes[0].patches] == [each.stp for each in made.answers]


def test_ratios_divide_the_total_rate() -> None:
    base = requests(total_rate=10.0, stream=[{"model": name, "deadline_ms": 5} for name in ("a", "b")])
    assert [load.rates for load in check_request(base, "edf", [(4, 1), (1, 1)], "keep")] == [(8.0, 2.0), (5.0, 5.0)]
    assert [PAPER_RATIOS[place] for place in (0, 6, -1)] == [(64, 1), (1, 1), (1, 64)] and len(PAPER_RATIOS) == 13
    with pytest.raises(WorkloadError, match="ratios divide the workload's total_rate"):
        check_request(requests(), "edf", [(1.0,)], "keep")
    with pytest.raises(WorkloadError, match="ratio has 1 parts for 2 streams"):
        check_request(base, "edf", [(1.0,)], "keep")


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"policies": ["edff"]}, InputError, "did you mean edf"),
        ({"late": "never"}, InputError, "weave"),
        ({"processes": 0}, InputError, "processes = 0 must be at least 1"),
        ({"limit": 2.0}, WorkloadError, "limit = 2"),
    ],
)
def test_what_cannot_be_searched_for_is_refused(options: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        sustain(requests(), device=HOST, **{"policies": "edf", **options})


def test_a_tiled_npu_is_refused() -> None:
    tiled = load_device("zc706-resnet50")
    assert isinstance(tiled, TiledNpu)
    with pytest.raises(DeviceError, match="a tiled NPU has no weight buffer"):
        sustain(requests(), device=tiled)


def answer(policy: str, stp: float, *, load: float | None = None, noisy: bool = False) -> Sustained:
    return Sustained(policy, 1.0, 120.0, 80.5, stp, 0.01, noisy, 1.0, 2.0, 3, (0.01, None), load)


def loads(*answers: Sustained, ratios: tuple[Any, ...] = (None,)) -> SustainedLoads:
    policies = tuple(dict.fromkeys(each.policy for each in answers))
    return SustainedLoads("npu", 0.01, ratios, policies, (Question(requests(), "edf"),) * len(answers), answers)


def test_loads_are_a_line_per_policy_and_ratio() -> None:
    made = loads(
        answer("a", 1.0), answer("b", 2.0), answer("a", 3.0), answer("b", 1.5), ratios=((4.0, 1.0), (1.0, 0.5))
    )
    table = made.table()
    assert [(row.cells, row.best) for row in table.rows] == [
        (("4:1", "a", "120", "1.000", "1.00", "80.5", ""), False),
        (("", "b", "120", "2.000", "2.00", "80.5", ""), True),
        (("1:0.5", "a", "120", "3.000", "1.00", "80.5", ""), True),
        (("", "b", "120", "1.500", "0.50", "80.5", ""), False),
    ]
    assert made.best is made.answers[2] and made.at(1) == made.answers[2:]
    assert len(made.plot().axes[0].lines) == 2


def test_loads_of_a_host_tell_latencies_and_that_seeds_disagree() -> None:
    table = loads(answer("a", 1.0, load=0.5, noisy=True)).table()
    assert table.rows[0].cells == (AS_WRITTEN, "a", "120", "1.00%", "10.0 / -", "50.0%", "80.5", "seeds disagree")
    assert [note for note in table.notes if "seeds disagree" in note or "weft plan" in note] == list(table.notes[1:])


def test_loads_of_a_host_are_judged_by_the_runs_that_a_plan_judges_by(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[float, int, float]] = []

    def judged(case: Any, policy: str, *, seed: int, **how: Any) -> Any:
        runs.append((case.workload.rates[0], seed, case.workload.duration_s))
        return simulate_requests(case, policy, seed=seed, **how)

    monkeypatch.setattr("weft.simulation.sustain.simulate_requests", judged)
    rare = requests(duration_s=2.0, stream=[{"model": "net", "rate": 20.0, "deadline_ms": 50.0}])
    made = sustain(rare, policies=["edf"], device=HOST, seeds=2, tolerance=0.5, late="drop")
    assert {seed for _, seed, _ in runs} == {rare.seed + FRESH_SEED, rare.seed + FRESH_SEED + 1}
    assert all(seconds == prolong(rare.scaled(rate / 20.0), USUAL).duration_s > 2.0 for rate, _, seconds in runs)
    assert f"on {HOST.name}, 1 lane, no batches, late requests: drop: largest load" in made.table().title


def test_runs_are_never_shorter_than_the_workload_says() -> None:
    long = requests(duration_s=500.0)
    assert prolong_if_shorter(long, USUAL) is long
    assert prolong_if_shorter(requests(duration_s=1.0), USUAL).duration_s == prolong(long, USUAL).duration_s


# Measuring


def test_models_are_measured_at_the_shapes_they_are_sent() -> None:
    streams = [
        {"model": "nets/a.onnx", "rate": 1, "shapes": {"x": (1, 3)}},
        {"model": "magika", "rate": 1},
        {"model": "nets/a.onnx", "rate": 2},
    ]
    found = subjects_of(parse_workload({"stream": streams, "folder": "beside"}))
    assert [(each.source, dict(each.shapes)) for each in found] == [
        (str(Path("beside/nets/a.onnx")), {"x": (1, 3)}),
        ("magika", {"bytes": (1, 2048)}),
    ]
