"""Reports of requests: the histogram's bins, percentiles, distributions, and what is counted."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.engine.workloads import case_of, flow
from weft.kernels import request_state as k
from weft.simulation.request_report import PERCENTILES, bin_edges, cdf, percentiles
from weft.simulation.requests import simulate_requests


def histogram_of(latencies: np.ndarray) -> np.ndarray:
    found = np.zeros(k.BINS, np.int64)
    np.add.at(found, [k.bin_of(int(latency)) for latency in latencies], 1)
    return found


def exact(latencies: np.ndarray, percent: float) -> int:
    """The smallest latency that at least *percent* of them do not exceed."""
    place = ceil(len(latencies) * Fraction(str(percent)) / 100)
    return int(np.sort(latencies)[place - 1])


# Bins


@settings(max_examples=50, derandomize=True, deadline=None)
@given(latency=st.integers(0, 2**40))
@example(latency=0)
@example(latency=2**40)
def test_a_latency_lies_between_the_edges_of_its_bin(latency):
    index = k.bin_of(latency)
    assert bin_edges()[index] <= latency < bin_edges()[index + 1]


@pytest.mark.parametrize("power", range(41))
def test_the_bins_meet_at_the_powers_of_two(power):
    for latency in (2**power - 1, 2**power, 2**power + 1):
        index = k.bin_of(latency)
        assert bin_edges()[index] <= latency < bin_edges()[index + 1]


def test_edges_ascend_and_a_bin_is_no_wider_than_a_five_hundredth():
    edges = bin_edges()[: k.bin_of(2**40) + 2]
    widths = np.diff(edges)
    assert (widths > 0).all()
    assert (widths <= np.maximum(1, edges[:-1] / 2**k.MANTISSA_BITS)).all()


def test_bins_of_small_latencies_are_exact():
    assert [k.bin_of(latency) for latency in range(1024)] == list(range(1024))
    assert bin_edges()[:1025].tolist() == list(range(1025))


def test_later_latencies_lie_in_later_bins():
    latencies = np.unique(np.geomspace(1, 2**40, 5000).astype(np.int64))
    bins = [k.bin_of(int(latency)) for latency in latencies]
    assert bins == sorted(bins)


# Percentiles

SHAPES = {
    "exponential": lambda rng: rng.exponential(1e8, 20_000),
    "log-normal": lambda rng: rng.lognormal(18, 1.5, 20_001),
    "narrow": lambda rng: rng.normal(1e9, 1e6, 7_777),
    "two humps": lambda rng: np.concatenate([rng.normal(1e6, 1e4, 9_950), rng.normal(1e10, 1e8, 50)]),
    "few": lambda rng: rng.exponential(1e8, 7),
    "one": lambda rng: np.array([123_456_789.0]),
    "all the same": lambda rng: np.full(1000, 3e7),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_percentiles_of_the_histogram_are_within_three_thousandths_of_the_exact_ones(shape):
    latencies = SHAPES[shape](np.random.default_rng(1)).astype(np.int64)
    histogram = histogram_of(latencies)
    for percent in (*PERCENTILES, 1.0, 25.0, 100.0):
        (found,) = percentiles(histogram, [percent], int(latencies.max()))
        assert found == pytest.approx(exact(latencies, percent), rel=0.003)
        assert found >= exact(latencies, percent)  # never told too short
    assert percentiles(histogram, [100], int(latencies.max())) == [latencies.max()]


@settings(max_examples=30, derandomize=True, deadline=None)
@given(latencies=st.lists(st.integers(0, 2**30), min_size=1, max_size=60))
def test_percentiles_of_small_samples_are_right_to_a_bin(latencies):
    values = np.array(latencies)
    for percent in PERCENTILES:
        (found,), true = percentiles(histogram_of(values), [percent], int(values.max())), exact(values, percent)
        assert true <= found <= max(true + 1, true * 1.002)


# The distribution


def test_the_cdf_ascends_to_one_and_says_what_share_was_no_slower():
    latencies = np.random.default_rng(2).lognormal(18, 1, 5_000).astype(np.int64)
    seconds, shares = cdf(histogram_of(latencies), tick_s=1e-11)
    assert (np.diff(seconds) > 0).all() and (np.diff(shares) > 0).all()
    assert shares[-1] == 1
    for at, share in list(zip(seconds, shares, strict=True))[:: len(seconds) // 20]:
        assert share == pytest.approx((latencies * 1e-11 < at).mean(), abs=1e-9)


def test_the_cdf_of_nothing_is_empty():
    seconds, shares = cdf(np.zeros(k.BINS, np.int64), tick_s=1e-11)
    assert (len(seconds), len(shares)) == (0, 0)


# What a report counts


def test_a_report_worked_by_hand():
    # answered at 21, 42, 63 and 84; due at 30, 30, 30 and 45
    case = case_of([flow((1, 20), arrivals=(0, 0, 0, 15), deadline=30)], buffer=1, end=100)
    run = simulate_requests(case, "fifo", late="keep")
    stream = run.report.streams[0]
    assert (stream.arrived, stream.completed, stream.violated, stream.violation_rate) == (4, 4, 3, 0.75)
    assert stream.mean_latency_s == pytest.approx((21 + 42 + 63 + 69) / 4e3)
    assert stream.max_latency_s == pytest.approx(0.069)
    assert stream.p50_s == pytest.approx(0.042, abs=0.0011)
    assert stream.p99_s == stream.p999_s == pytest.approx(0.069)
    assert (stream.offered_per_s, stream.deepest_queue, stream.mean_batch) == (pytest.approx(40), 3, 1)
    assert run.report.makespan_s == pytest.approx(0.084)
    assert run.report.pe_utilisation == pytest.approx(80 / 84)
    assert run.report.dram_utilisation == pytest.approx(4 / 84)
    # alone a request is worth 20 ticks here; the run lasts 100
    assert run.report.stp == pytest.approx(4 * 20 / 100)
    assert run.report.goodput_stp == pytest.approx(20 / 100)
    assert run.report.offered_stp == pytest.approx(4 * 20 / 100)


def test_requests_that_arrive_during_the_warm_up_are_served_and_not_counted():
    arrivals = (0, 0, 40, 40)
    case = case_of([flow((1, 10), batch=2, arrivals=arrivals, deadline=5)], buffer=1, end=100, warm=30)
    for compiled in (True, False):
        run = simulate_requests(case, "fifo", late="keep", record=True, compiled=compiled)
        stream = run.report.streams[0]
        assert (stream.arrived, stream.completed, stream.violated, stream.mean_batch) == (2, 2, 2, 2)
        assert len(run.tally.answers) == 4
        assert stream.offered_per_s == pytest.approx(2 / 0.07)


def test_a_stream_without_requests_has_no_latencies_and_no_violations():
    case = case_of([flow((1, 10), arrivals=()), flow((1, 10), arrivals=(3,))])
    empty, _ = simulate_requests(case, "edf").report.streams
    assert (empty.arrived, empty.violation_rate, empty.mean_batch, empty.deepest_queue) == (0, 0, 0, 0)
    assert (empty.mean_latency_s, empty.p50_s, empty.p999_s, empty.max_latency_s) == (None, None, None, None)


def test_the_json_of_a_report_holds_its_streams():
    case = case_of([flow((1, 10), arrivals=(3,))])
    report = simulate_requests(case, "edf").report
    as_dict = report.as_dict()
    assert (as_dict["format"], as_dict["policy"], as_dict["late"]) == (1, "edf", "weave")
    assert as_dict["streams"][0]["arrived"] == 1
