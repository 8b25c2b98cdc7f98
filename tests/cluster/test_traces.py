"""Readers of recorded traces, and traffic that is fitted to them and generated again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from weft.base.errors import WorkloadError
from weft_cluster.routing.traces import CountedTrace, TimedTrace, read_trace
from weft_cluster.routing.traffic import Surge, Traffic, as_toml, fit, read_traffic


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def generated(traffic: Traffic, duration_s: float, seed: int = 0) -> TimedTrace:
    blocks = list(traffic.requests(duration_s, seed))
    times, model = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    return TimedTrace(tuple(map(str, range(traffic.models))), times, model, duration_s)


def test_minutes_of_functions_2019_and_days_that_follow_each_other(tmp_path: Path) -> None:
    header = "HashOwner,HashApp,HashFunction,Trigger,1,2,3"
    monday = written(tmp_path / "d1.csv", header, "o,a,f,http,1,0,2", "o,a,g,timer,0,0,5")
    tuesday = written(tmp_path / "d2.csv", header, "o,a,h,http,4,4,4", "o,a,f,http,7,0,0")
    trace = read_trace(monday, tuesday)
    assert isinstance(trace, CountedTrace)
    assert trace.callers == ("o/a/f", "o/a/g", "o/a/h")
    assert trace.counts.tolist() == [[1, 0, 2, 7, 0, 0], [0, 0, 5, 0, 0, 0], [0, 0, 0, 4, 4, 4]]
    assert (trace.span_s, trace.flow(120.0).tolist()) == (360.0, [1, 18, 8])
    timed = trace.timed(np.random.default_rng(0))
    assert timed.requests().tolist() == [10, 5, 12]
    assert timed.flow(60.0).tolist() == [1, 0, 7, 11, 4, 4]
    assert (np.diff(timed.times_s) >= 0).all()


def test_invocations_of_functions_2021_came_before_they_ended(tmp_path: Path) -> None:
    file = written(
        tmp_path / "t.csv", "app,func,end_timestamp,duration", "a,f,10.0,4.0", "a,g,9.0,0.5", "b,f,11.5,7.5", "a,f,12,1"
    )
    trace = read_trace(file)
    assert isinstance(trace, TimedTrace)
    assert trace.callers == ("a/f", "a/g", "b/f")
    assert trace.times_s.tolist() == [0.0, 2.0, 4.5, 7.0]
    assert trace.caller.tolist() == [2, 0, 1, 0]
    assert trace.dealt(2).caller.tolist() == [0, 0, 1, 0]  # a/f to the first, a/g to the second, b/f to the first


def test_a_service_of_llm_2023_is_one_caller(tmp_path: Path) -> None:
    file = written(
        tmp_path / "code.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:17:03.9799600,4808,10",
        "2023-11-16 18:17:04.2299600,3180,8",
    )
    trace = read_trace(file)
    assert trace.callers == ("code",)
    assert trace.span_s == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (("a,b", "1,2"), "its header is none of HashOwner"),
        (("HashOwner,HashApp,HashFunction,Trigger,1,3", "o,a,f,t,1,1"), "the minutes 1, 2"),
        (("HashOwner,HashApp,HashFunction,Trigger,1,2", "o,a,f,t,1"), "line 2: 5 columns where the header has 6"),
        (("HashOwner,HashApp,HashFunction,Trigger,1,2", "o,a,f,t,1,x"), "line 2: a count is no whole number"),
        (("HashOwner,HashApp,HashFunction,Trigger,1", "o,a,f,t,-1"), "line 2: a count is below 0"),
        (("app,func,end_timestamp,duration", "a,f,1.0"), "line 2: not an app"),
        (("app,func,end_timestamp,duration", "a,f,1.0,nan", "a,f,1.0,1.0"), "a time is not finite"),
        (("app,func,end_timestamp,duration", "a,f,1.0,0.5"), "at least two requests"),
        (("TIMESTAMP,ContextTokens,GeneratedTokens", "noon,1,1"), "line 2: 'noon' is no date and time"),
    ],
)
def test_a_damaged_trace_is_told_in_one_line(tmp_path: Path, lines: tuple[str, ...], told: str) -> None:
    with pytest.raises(WorkloadError, match=told):
        read_trace(written(tmp_path / "t.csv", *lines))


def test_files_of_single_times_do_not_follow_each_other(tmp_path: Path) -> None:
    file = written(tmp_path / "t.csv", "app,func,end_timestamp,duration", "a,f,1,0", "a,f,2,0")
    with pytest.raises(WorkloadError, match="only files of counts"):
        read_trace(file, file)


def test_traffic_has_the_rates_and_the_gaps_that_are_asked_for() -> None:
    traffic = Traffic(rate=400.0, models=4, zipf=1.0, cv=3.0)
    trace = generated(traffic, 500.0)
    assert (np.diff(trace.times_s) >= 0).all() and trace.times_s[-1] < 500
    assert trace.requests() == pytest.approx(traffic.rates * 500, rel=0.1)
    for model in range(4):
        gaps = np.diff(trace.times_s[trace.caller == model])
        assert gaps.std() / gaps.mean() == pytest.approx(3.0, rel=0.1)


def test_the_beginning_of_a_run_is_like_the_rest_of_it() -> None:
    """Gaps that begin with the run would bring too many requests first, where they come in clusters."""
    traffic = Traffic(rate=2000.0, models=2000, zipf=0.0, cv=6.0)
    first = sum(len(next(traffic.requests(1.0, seed)).times_s) for seed in range(10))
    assert first == pytest.approx(20_000, rel=0.1)


def test_the_wave_and_surges_bring_more_at_their_time() -> None:
    surge = Surge(start_s=600.0, length_s=100.0, factor=3.0)
    traffic = Traffic(rate=100.0, models=3, wave=0.5, peak_s=250.0, day_s=1000.0, surge=(surge,))
    flow = generated(traffic, 1000.0).flow(100.0)
    exact = 100 * np.diff(traffic.passed(np.arange(11) * 100.0))
    assert flow == pytest.approx(exact, rel=0.1)
    assert exact[2] == pytest.approx(10_000 * (1 + 0.5 * np.sin(0.1 * np.pi) / (0.1 * np.pi)), rel=1e-6)
    assert exact[6] > 2 * exact[5]


def test_blocks_follow_each_other_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft_cluster.routing.traffic.BLOCK", 500)
    traffic = Traffic(rate=100.0, models=5, cv=2.0, wave=0.4, day_s=80.0)
    blocks = list(traffic.requests(100.0))
    assert len(blocks) > 10
    trace = generated(traffic, 100.0)
    assert (np.diff(trace.times_s) >= 0).all()
    gaps = np.concatenate([np.diff(traffic.passed(trace.times_s[trace.caller == model])) for model in range(1)])
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.15)


def test_a_fit_finds_what_made_the_trace() -> None:
    made = Traffic(rate=2.0, models=40, zipf=0.9, cv=2.5, wave=0.6, peak_s=50_000.0)
    trace = generated(made, 2 * 86400.0)
    counts = np.zeros((40, 2880), np.int64)
    np.add.at(counts, (trace.caller, (trace.times_s / 60).astype(np.int64)), 1)
    for each in (trace, CountedTrace(trace.callers, counts, 60.0)):
        found = fit(each).traffic
        assert (found.rate, found.models) == (pytest.approx(2.0, rel=0.02), 40)
        assert found.zipf == pytest.approx(0.9, abs=0.03)
        assert found.cv == pytest.approx(2.5, rel=0.12)
        assert found.wave == pytest.approx(0.6, abs=0.04)
        assert found.peak_s == pytest.approx(50_000, abs=1500)


def test_a_fit_says_what_the_trace_does_not_say() -> None:
    trace = TimedTrace(("only",), np.arange(0.0, 10.0), np.zeros(10, np.int64), 10.0)
    found = fit(trace)
    assert (found.traffic.zipf, found.traffic.cv, found.traffic.wave) == (0.0, 1.0, 0.0)
    assert [each.split(":")[0] for each in found.unknown] == [
        "the wave of a day", "who is asked for how often", "how gaps vary",
    ]  # fmt: skip
    with pytest.raises(WorkloadError, match="too few requests"):
        fit(CountedTrace(("a",), np.array([[1]]), 60.0))


def test_a_fit_compares_the_trace_with_what_is_generated() -> None:
    made = Traffic(rate=50.0, models=100, zipf=1.2)
    found = {each.what: each for each in fit(generated(made, 600.0)).likeness}
    top = found["share of the top 10% of callers"]
    assert top.traffic == pytest.approx(top.trace, abs=0.05)
    assert found["busiest 1 s over the mean"].traffic == pytest.approx(
        found["busiest 1 s over the mean"].trace, rel=0.3
    )


def test_a_traffic_file_says_the_same_when_it_is_read(tmp_path: Path) -> None:
    traffic = Traffic(rate=3.5, models=7, cv=2.0, surge=(Surge(start_s=1.0, length_s=2.0, factor=3.0),))
    assert read_traffic(written(tmp_path / "t.toml", as_toml(traffic))) == traffic
    with pytest.raises(WorkloadError, match=r"unknown key 'zipff'; did you mean 'zipf'\?"):
        read_traffic(written(tmp_path / "u.toml", "rate = 1.0", "models = 1", "zipff = 1.0"))
    with pytest.raises(WorkloadError, match="cannot read the traffic"):
        read_traffic(tmp_path / "none.toml")
