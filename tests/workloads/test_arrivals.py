"""When requests arrive: rates, spread, blocks, seeds and traces. All randomness is seeded."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from weft.base.errors import WorkloadError
from weft.workloads.arrivals import (
    BLOCK,
    bursty,
    gamma,
    poisson,
    read_times,
    trace,
    uniform,
)
from weft.workloads.requests import Stream, Workload

RATE = 250.0
BURSTS = {"factor": 5.0, "share": 0.15, "length_s": 0.2}
PROCESSES = {
    "poisson": lambda rng: poisson(RATE, rng),
    "gamma": lambda rng: gamma(RATE, rng, cv=3.0),
    "uniform": lambda rng: uniform(RATE, rng),
    "bursty": lambda rng: bursty(RATE, rng, **BURSTS),
}


def times(process: str, seed: int, blocks: int) -> np.ndarray:
    return np.concatenate(list(islice(PROCESSES[process](np.random.default_rng(seed)), blocks)))


def counts(found: np.ndarray, window_s: float) -> np.ndarray:
    """Arrivals in each full window."""
    return np.bincount((found // window_s).astype(int))[:-1]


def dispersion(found: np.ndarray, window_s: float) -> float:
    """Variance of the counts over their mean: 1 for Poisson."""
    seen = counts(found, window_s)
    return float(seen.var() / seen.mean())


# Rate and spread


def test_poisson_arrivals_come_at_their_rate_with_gaps_as_spread_as_exponential_ones():
    found = times("poisson", 1, 60)
    gaps = np.diff(found, prepend=0.0)
    sigma = 1 / np.sqrt(len(gaps))  # relative error of a mean of exponential gaps; of their spread about as much
    assert gaps.mean() * RATE == pytest.approx(1, abs=4 * sigma)
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=8 * sigma)
    assert dispersion(found, 0.2) == pytest.approx(1, abs=4 * np.sqrt(2 / len(counts(found, 0.2))))


def test_poisson_gaps_do_not_know_each_other():
    gaps = np.diff(times("poisson", 2, 30))
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 4 / np.sqrt(len(gaps))


@pytest.mark.parametrize("cv", [0.3, 1.0, 4.0])
def test_gamma_gaps_have_the_rate_and_the_variation_that_are_asked_for(cv):
    found = np.concatenate(list(islice(gamma(RATE, np.random.default_rng(5), cv=cv), 60)))
    gaps = np.diff(found, prepend=0.0)
    assert gaps.mean() * RATE == pytest.approx(1, abs=5 * cv / np.sqrt(len(gaps)))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_a_stream_of_a_workload_may_come_in_clusters():
    stream = Stream(model="m", arrival="gamma", cv=3.0, rate=RATE, deadline_ms=10.0)
    found = np.concatenate(list(Workload(stream=(stream,), duration_s=400.0).arrivals(0)))
    gaps = np.diff(found)
    assert gaps.std() / gaps.mean() == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_uniform_arrivals_are_evenly_spaced_from_a_random_start_on(seed):
    found = times("uniform", seed, 3)
    np.testing.assert_allclose(np.diff(found), 1 / RATE, rtol=1e-9)
    assert 0 <= found[0] < 1 / RATE


def test_uniform_arrivals_of_two_seeds_start_at_different_places():
    assert times("uniform", 1, 1)[0] != times("uniform", 2, 1)[0]


def test_bursty_arrivals_keep_the_mean_rate_and_are_more_spread_than_poisson_ones():
    found = times("bursty", 3, 60)
    # a cycle of burst and calm lasts 4/3 s; about 730 cycles, each with a spread of about 1.5 of its mean
    assert len(found) / found[-1] == pytest.approx(RATE, rel=4 * 1.5 / np.sqrt(found[-1] / (0.2 / 0.15)))
    assert dispersion(found, 0.2) > 5
    assert dispersion(times("poisson", 3, 60), 0.2) < 1.2


def test_bursts_bring_their_factor_of_the_mean_rate_for_their_share_of_the_time():
    found = times("bursty", 4, 60)
    seen = counts(found, 0.02) / 0.02  # windows much shorter than a burst: nearly all lie in one state
    calm_rate = RATE * (1 - 5.0 * 0.15) / (1 - 0.15)
    burst = seen > (5 * RATE + calm_rate) / 2
    assert burst.mean() == pytest.approx(0.15, abs=0.03)
    assert seen[burst].mean() == pytest.approx(5 * RATE, rel=0.1)
    assert seen[~burst].mean() == pytest.approx(calm_rate, rel=0.2)


def test_bursts_may_bring_all_there_is():
    found = np.concatenate(
        list(islice(bursty(100.0, np.random.default_rng(5), factor=4.0, share=0.25, length_s=0.1), 10))
    )
    assert len(found) / found[-1] == pytest.approx(100, rel=0.15)
    assert np.diff(found).max() > 20 / 100  # silence between the bursts


# Blocks and seeds


@pytest.mark.parametrize("process", PROCESSES)
def test_blocks_are_sorted_and_go_on_where_the_last_one_ended(process):
    blocks = list(islice(PROCESSES[process](np.random.default_rng(6)), 4))
    assert all(len(block) == BLOCK for block in blocks)
    whole = np.concatenate(blocks)
    assert (np.diff(whole) >= 0).all() and whole[0] >= 0
    gaps = np.diff(whole)
    for border in range(BLOCK, len(whole), BLOCK):  # neither a repetition nor a hole
        assert 0 < gaps[border - 1] <= np.delete(gaps, border - 1).max()


@pytest.mark.parametrize("process", PROCESSES)
def test_the_same_seed_gives_the_same_times_and_another_seed_others(process):
    np.testing.assert_array_equal(times(process, 7, 2), times(process, 7, 2))
    assert (times(process, 7, 2) != times(process, 8, 2)).any()


def workload(**others) -> Workload:
    streams = tuple(
        Stream(model=f"m{i}", arrival=arrival, rate=1000, deadline_ms=10)
        for i, arrival in enumerate(["poisson", "poisson", "bursty", "uniform"])
    )
    return Workload(**({"stream": streams, "duration_s": 10, "seed": 3} | others))


def arriving(load: Workload, index: int, seed: int | None = None) -> np.ndarray:
    return np.concatenate(list(load.arrivals(index, seed)))


def test_streams_of_a_workload_do_not_know_each_other():
    a, b = arriving(workload(), 0), arriving(workload(), 1)
    assert not np.intersect1d(a, b).size
    windows = np.linspace(0, 10, 1001)
    both = np.histogram(a, windows)[0], np.histogram(b, windows)[0]
    assert abs(np.corrcoef(*both)[0, 1]) < 4 / np.sqrt(1000)


def test_a_streams_times_do_not_depend_on_the_streams_beside_it():
    alone = workload(stream=workload().stream[:1])
    np.testing.assert_array_equal(arriving(alone, 0), arriving(workload(), 0))


def test_the_workloads_seed_is_used_unless_another_is_given():
    np.testing.assert_array_equal(arriving(workload(seed=3), 0), arriving(workload(seed=4), 0, seed=3))
    assert arriving(workload(seed=3), 0)[0] != arriving(workload(seed=4), 0)[0]


@pytest.mark.parametrize("index", range(4))
def test_arrivals_end_with_the_run_and_fill_it(index):
    found = arriving(workload(), index)
    assert found[-1] < 10
    assert found[-1] > 10 - 1  # a calm spell may end the run
    assert (np.diff(found) >= 0).all()


# Traces


def test_a_trace_is_replayed_from_its_first_time_on_as_fast_as_asked():
    given = np.array([100.0, 100.5, 100.5, 104.0])
    assert [block.tolist() for block in trace(given, 1.0)] == [[0.0, 0.5, 0.5, 4.0]]
    assert [block.tolist() for block in trace(given, 8.0)] == [[0.0, 0.0625, 0.0625, 0.5]]
    assert [block.tolist() for block in trace(given, 0.5)] == [[0.0, 1.0, 1.0, 8.0]]


def test_a_long_trace_comes_in_blocks_without_loss():
    given = np.arange(2 * BLOCK + 5) / 10
    blocks = list(trace(given, 1.0))
    assert [len(block) for block in blocks] == [BLOCK, BLOCK, 5]
    np.testing.assert_array_equal(np.concatenate(blocks), given)


@pytest.fixture
def csv(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "times.csv"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_times_are_read_from_the_first_column_with_or_without_a_header(csv):
    assert read_times(csv("1.5,a\n2,b\n2,c\n")).tolist() == [1.5, 2, 2]
    assert read_times(csv("when,who\n1.5,a\n2e0,b\n")).tolist() == [1.5, 2]


def test_times_are_read_from_the_named_column(csv):
    assert read_times(csv("who,when\na,1\nb, 3 \n"), "when").tolist() == [1, 3]


def test_dates_and_times_are_read_as_seconds(csv):
    rows = "TIMESTAMP\n2023-11-16 18:15:46.68\n2023-11-16 18:15:50.98\n2023-11-16T18:17:50.98\n"
    np.testing.assert_allclose(np.diff(read_times(csv(rows))), [4.3, 120], rtol=1e-6)
    zoned = "2024-01-01T00:00:00+00:00\n2024-01-01T00:00:01Z\n2024-01-01T01:00:02+01:00\n"
    np.testing.assert_allclose(np.diff(read_times(csv(zoned))), [1, 1])


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("1\n2\n1.5\n", None, "line 3: 1.5 comes after 2.0; sort the trace by time"),
        ("t\n3\n2\n", None, "line 3: 2.0 comes after 3.0; sort"),
        ("t\n2024-01-02\n2024-01-01\n", None, "line 3: .* sort the trace by time"),
        ("t,x\n1,a\n,b\n3,c\n", None, "line 3: no time here; a trace has no gaps"),
        ("t\n1\n\n3\n", None, "line 3: no time here; a trace has no gaps"),
        ("x,t\na,1\nb\n", "t", "line 3: no time here; a trace has no gaps"),
        ("t\n1\nsoon\n", None, "line 3: 'soon' is neither a number of seconds nor a date and time"),
        ("t\n1\nnan\n", None, "line 3: 'nan' is neither"),
        ("t\n1\ninf\n", None, "line 3: 'inf' is neither"),
        ("1\n2\n3x\n", None, "line 3: '3x' is neither"),
        ("", None, "the trace is empty"),
        ("t\n", None, "a trace needs at least two times, this one has 0"),
        ("t\n1\n", None, "a trace needs at least two times, this one has 1"),
        ("who,when\na,1\nb,2\n", "wen", "no column 'wen' in the header who, when"),
    ],
)
def test_a_broken_trace_is_refused_in_one_line_that_says_where(csv, text, column, message):
    path = csv(text)
    with pytest.raises(WorkloadError, match=message) as caught:
        read_times(path, column)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_trace_that_is_not_there_or_not_text_is_refused(tmp_path):
    with pytest.raises(WorkloadError, match=r"cannot read the trace: .*No such file"):
        read_times(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(WorkloadError, match="cannot read the trace"):
        read_times(tmp_path / "binary.csv")


def test_a_workload_replays_its_trace_up_to_its_end(csv):
    path = csv("7\n7.5\n8\n30\n")
    stream = Stream(model="m", arrival="trace", trace=path.name, speedup=2, deadline_ms=10)
    load = Workload(stream=(stream,), duration_s=5, folder=str(path.parent))
    assert arriving(load, 0).tolist() == [0, 0.25, 0.5]
    assert arriving(load.scaled(2), 0).tolist() == [0, 0.125, 0.25]
    longer = load.model_copy(update={"duration_s": 20.0})
    assert arriving(longer, 0).tolist() == [0, 0.25, 0.5, 11.5]
