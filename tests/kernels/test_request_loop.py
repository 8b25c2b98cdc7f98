"""The compiled loop for requests equals the plain engine exactly: every issue, every answer, every count.

Run as a script, this file compares a few cases and prints how many: that is how the loop itself is
checked, with the JIT off.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from random import Random

import numba
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.naive import profile, small_npu
from tests.engine.workloads import COMPILED, Flow, case_of, cases, flow
from tests.kernels.jit import said_with_the_jit_off
from weft.devices.costs.layer_costs import write_profile
from weft.devices.costs.program import Clock
from weft.engine.lateness import LATE
from weft.engine.policies import Option
from weft.kernels import request_state as kernel
from weft.simulation.requests import Case, Tally, compiled, prepare, simulate_requests
from weft.workloads.requests import Stream, Workload

CLOCKS = [kernel.ARRAY, kernel.FETCHED, kernel.COMPUTED, kernel.STEPS]
"""Those the plain engine has too."""

OPTIONS = {
    "layerweaver": st.fixed_dictionaries({}, optional={"failsafe": st.booleans()}),
    "layerweaver+": st.fixed_dictionaries({}, optional={"failsafe": st.booleans(), "precise": st.booleans()}),
    "weft+": st.fixed_dictionaries({}, optional={"failsafe": st.booleans(), "stretch": st.integers(0, 400)}),
}


def assert_same(fast: Tally, slow: Tally) -> None:
    assert fast.order == slow.order
    assert fast.issues.tolist() == slow.issues.tolist()
    assert fast.answers == slow.answers
    assert fast.counts[:, :9].tolist() == slow.counts[:, :9].tolist()
    assert (fast.histogram == slow.histogram).all()
    assert fast.clocks[CLOCKS].tolist() == slow.clocks[CLOCKS].tolist()


def assert_equal(case: Case, policy: str, late: str, options: Mapping[str, Option] | None = None) -> None:
    fast = simulate_requests(case, policy, late=late, options=options, record=True)
    slow = simulate_requests(case, policy, late=late, options=options, compiled=False)
    assert_same(fast.tally, slow.tally)
    assert fast.report == slow.report


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("policy", COMPILED)
@settings(max_examples=10, derandomize=True, deadline=None)
@given(data=st.data())
def test_compiled_equals_plain_on_small_workloads(policy, late, data):
    assert_equal(data.draw(cases()), policy, late, data.draw(OPTIONS.get(policy, st.just({}))))


# Cases that once differed


def test_a_late_batch_and_a_late_job_that_leave_the_same_idle_time_go_in_the_order_they_are_offered():
    streams = [flow((0, 3), arrivals=(1,), deadline=1), flow((3, 0), (0, 3), clients=1, think=1, deadline=1)]
    assert_equal(case_of(streams, buffer=3, end=50), "layerweaver", "demote")


@pytest.mark.parametrize("late", LATE)
def test_tokens_of_long_requests_that_have_waited_long_stay_within_64_bits(late):
    """Ten seconds of waiting, a millisecond of work: their product is no 64-bit number on the real clock."""
    work = 10**9
    streams = [
        flow((10, part * work), arrivals=(0,) * 30, deadline=10**15, priority=priority)
        for part, priority in ((10, 1), (20, 9), (5, 3))
    ]
    case = case_of(streams, buffer=100)
    assert_equal(case, "prema", late)


@contextmanager
def places_for_issues(count: int) -> Iterator[None]:
    """Few places to remember issues at, so that they are soon used up."""
    usual, compiled.MOST_ON_CHIP = compiled.MOST_ON_CHIP, count
    try:
        yield
    finally:
        compiled.MOST_ON_CHIP = usual


SPARSE = flow((1, 3), arrivals=tuple(range(0, 400, 5)))
"""The buffer never fills, so no issue is pushed out of it; but those of long ago are computed."""
CROWDED = flow((1, 30), arrivals=(0,) * 70, deadline=10_000)
"""Seventy layers are on chip at once."""
FULL = flow((3, 9), (2, 1), arrivals=tuple(range(0, 300, 4)), deadline=500)


def forgetful_cases() -> list[Case]:
    return [
        case_of([SPARSE], buffer=10**6),
        case_of([CROWDED], buffer=100),
        case_of([CROWDED, SPARSE], buffer=10**6),
        case_of([FULL, SPARSE], buffer=7),
    ]


@pytest.mark.parametrize("places", [4, 7, 16])
@pytest.mark.parametrize("policy", COMPILED)
def test_issues_are_forgotten_when_they_no_longer_matter_and_not_before(policy, places):
    for case in forgetful_cases():
        with places_for_issues(places):
            assert_equal(case, policy, "keep")


def test_a_million_layers_of_a_byte_in_a_large_buffer_are_no_trouble():
    """More issues than there are places for, none of them ever pushed out of the buffer."""
    case = tiny_layers(small_npu(10**7), rate=4e9, duration_s=60e-6)
    report = simulate_requests(case, "fifo").report
    assert report.decisions == report.streams[0].completed > 1 << 17


def tiny_layers(npu, rate: float, duration_s: float) -> Case:
    """One layer of a byte and a nanosecond of compute, that is, 100 ticks."""
    stream = Stream(model="tiny", rate=rate, deadline_ms=1, max_batch=1, batch_timeout_ms=0)
    workload = Workload(stream=(stream,), duration_s=duration_s, warmup_s=0)
    case = case_of([flow((1, 20))], buffer=npu.weight_buffer_bytes)
    return replace(case, workload=workload, device=npu, clock=Clock.of(npu))


# Longer runs, from files


@pytest.fixture
def pair(tmp_path) -> Workload:
    """Two streams with profiles of their own, one heavy in compute and one in weights; about 150 requests a us."""
    for batch in (1, 2, 3):
        write_profile(profile("heavy", (40, 900 + 80 * batch), (60, 700), batch=batch), tmp_path / f"h{batch}.json")
        write_profile(profile("light", (900, 90 * batch), (800, 60), batch=batch), tmp_path / f"l{batch}.json")
    streams = tuple(
        Stream(
            model=name,
            profiles=tuple(f"{name[0]}{batch}.json" for batch in (1, 2, 3)),
            arrival=arrival,
            rate=rate,
            deadline_ms=deadline * 1e-5,
            max_batch=3,
            batch_timeout_ms=0.5e-5,
        )
        for name, arrival, rate, deadline in (("heavy", "poisson", 6e7, 4), ("light", "bursty", 4e7, 8))
    )
    return Workload(stream=streams, duration_s=1e-4, warmup_s=1e-5, folder=str(tmp_path), seed=5)


@pytest.mark.parametrize(("policy", "late"), [("layerweaver+", "demote"), ("weft+", "weave"), ("fifo", "keep")])
def test_arrivals_fed_in_several_blocks_are_served_as_one(pair, policy, late, monkeypatch):
    monkeypatch.setattr("weft.workloads.arrivals.BLOCK", 64)
    pair = pair.model_copy(update={"duration_s": 1.2e-5, "warmup_s": 1e-6})
    case = prepare(pair, small_npu(3000))
    assert_equal(case, policy, late)
    report = simulate_requests(case, policy, late=late).report
    assert report.streams[0].arrived > 64 + 500


@pytest.mark.parametrize("policy", COMPILED)
@pytest.mark.parametrize("late", LATE)
def test_recording_a_run_does_not_change_its_report(pair, policy, late):
    case = prepare(pair, small_npu(3000))
    recorded = simulate_requests(case, policy, late=late, record=True)
    bare = simulate_requests(case, policy, late=late)
    assert recorded.report == bare.report
    assert (len(bare.tally.answers), len(bare.tally.issues)) == (0, 0)
    assert len(recorded.tally.issues) == bare.report.decisions


@pytest.mark.parametrize("policy", COMPILED)
def test_a_seed_repeats_a_run_and_another_seed_does_not(pair, policy):
    case = prepare(pair, small_npu(3000))
    runs = [simulate_requests(case, policy, seed=seed).report for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def peak_bytes(workload: Workload) -> int:
    case = prepare(workload, small_npu(3000))
    tracemalloc.start()
    simulate_requests(case, "layerweaver+")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def test_a_run_ten_times_as_long_takes_the_same_memory(pair):
    peak_bytes(pair)  # what is loaded and cached on the first run is no part of a run
    short, long = (peak_bytes(pair.model_copy(update={"duration_s": seconds})) for seconds in (2e-4, 2e-3))
    assert long < 1.02 * short


# The loop itself


def compare_a_few() -> int:
    """A few cases of every policy, small enough for a loop that is not compiled; returns how many."""
    random = Random(11)
    compared = 0
    for policy, late in product(COMPILED, LATE):
        streams = []
        for index in range(3):
            layers = [(random.randrange(1, 8), random.randrange(12)) for _ in range(3)]
            streams.append(
                Flow(
                    (layers, [(size, busy + 2) for size, busy in layers]),
                    arrivals=tuple(sorted(random.randrange(120) for _ in range(9))) if index else (),
                    deadline=random.choice([15, 40, 120] if index else [40, 120]),
                    timeout=random.choice([0, 4]),
                    priority=random.choice([1, 3, 9]),
                    clients=0 if index else 2,
                    think=3,
                )
            )
        assert_equal(case_of(streams, buffer=random.randrange(8, 30), end=120), policy, late)
        compared += 1
    for case in forgetful_cases():
        with places_for_issues(5):
            assert_equal(case, "layerweaver+", "demote")
            compared += 1
    return compared


def test_the_loop_is_right_with_the_jit_off():
    """An index that is out of bounds is an error there."""
    assert said_with_the_jit_off("tests.kernels.test_request_loop") == (0, "JIT off: 28 equal\n", "")


def test_the_same_cases_are_right_with_the_jit_on():
    assert not numba.config.DISABLE_JIT
    assert compare_a_few() == 28


if __name__ == "__main__":
    print(f"JIT {'off' if numba.config.DISABLE_JIT else 'on'}: {compare_a_few()} equal")  # noqa: T201 - read by the test
