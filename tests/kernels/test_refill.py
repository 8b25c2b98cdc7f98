"""The compiled loop for batches that are refilled equals the plain engine exactly, and queues wait as theory says.

Run as a script, this file compares a few cases and prints how many: that is how the loop itself is checked, with
the JIT off.
"""

from __future__ import annotations

from dataclasses import replace

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.workloads import Flow
from tests.engine.workloads import case_of as request_case
from tests.kernels.jit import said_with_the_jit_off
from tests.support.refill import crowded_case, listed_requests, refill_case, serve_compiled
from weft.engine.lateness import LATE
from weft.engine.policies import Policy
from weft.engine.policies.batching import Adaptive, Serial
from weft.engine.policies.fluid import Fluid
from weft.engine.policies.top_up import TopUp
from weft.kernels import request_state as counted
from weft.simulation.requests import Case, compiled, plain, simulate_requests
from weft.workloads.requests import Stream, Workload

KERNELS = (Serial, Adaptive, *compiled.REFILLS)
"""Policies of batches with a compiled rule."""
CLOCKS = [counted.ARRAY, counted.FETCHED, counted.COMPUTED, counted.STEPS]
"""Those the plain engine has too."""


# The compiled loop


def assert_equal(case: Case, policy: Policy, late: str) -> None:
    fast, slow = serve_compiled(case, policy, late), plain.serve(case, policy, late, 0)
    assert fast.issues.tolist() == slow.issues.tolist()
    assert fast.answers == slow.answers
    assert fast.counts[:, :9].tolist() == slow.counts[:, :9].tolist()
    assert (fast.histogram == slow.histogram).all()
    assert fast.clocks[CLOCKS].tolist() == slow.clocks[CLOCKS].tolist()


# Exactly the plain engine


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ticks = draw(st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any))
    more = draw(st.integers(0, 4))
    sizes = range(draw(st.integers(1, 6)))
    exits = tuple(sorted(draw(st.sets(st.integers(1, len(ticks) - 1))))) if len(ticks) > 1 else ()
    weights = draw(st.lists(st.integers(0, 9), min_size=len(exits) + 1, max_size=len(exits) + 1))
    rates = tuple(weight / sum(weights) for weight in weights) if sum(weights) and draw(st.booleans()) else ()
    gaps = draw(st.lists(st.integers(0, 12) | st.sampled_from([0, 80]), max_size=30))
    times = tuple(np.cumsum(gaps, dtype=np.int64).tolist())
    taken = tuple(draw(st.lists(st.integers(0, len(exits)), min_size=len(times) + 2, max_size=len(times) + 2)))
    return refill_case(
        tuple(tuple(each + more * size for each in ticks) for size in sizes),
        listed_requests(times, taken, warm=draw(st.sampled_from([0, 0, 20])), block=draw(st.integers(1, 5))),
        exits=exits,
        rates=rates,
        deadline=draw(st.integers(1, 90) | st.sampled_from([1, 1000])),
    )


@st.composite
def policies(draw: st.DrawFn, kind: type[Policy], case: Case) -> Policy:
    setting = case.setting_of(kind)
    if kind is Adaptive:
        return Adaptive(setting, timeout=draw(st.sampled_from([0, 5, 45, 95])))
    if kind is TopUp:
        miss, backlog = draw(st.sampled_from([0, 150, 400, 3000])), draw(st.integers(0, 12))
        return TopUp(setting, miss=miss, backlog=backlog, foresight=draw(st.sampled_from([0, 100, 130])))
    return kind(setting)


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("kind", KERNELS, ids=lambda kind: kind.__name__)
@settings(max_examples=12)
@given(data=st.data())
def test_compiled_equals_plain_on_small_cases(kind, late, data):
    case = data.draw(cases())
    assert_equal(case, data.draw(policies(kind, case)), late)


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("kind", KERNELS, ids=lambda kind: kind.__name__)
def test_compiled_equals_plain_under_a_heavy_load(kind, late):
    case = crowded_case(400)
    assert_equal(case, kind(case.setting), late)


@pytest.mark.parametrize("kind", KERNELS, ids=lambda kind: kind.__name__)
def test_a_queue_that_is_full_refuses(kind, monkeypatch):
    case = crowded_case(300, gap=1)
    monkeypatch.setattr(compiled, "QUEUE_PLACES", 5)
    tally = serve_compiled(case, kind(case.setting), "keep")
    refused = [answer for answer in tally.answers if answer.end == -2]
    assert refused and len(tally.answers) == 300
    assert tally.counts[0, counted.REFUSED] == len(refused)
    assert tally.counts[0, counted.DEEPEST] == 5


def test_the_block_in_which_arrivals_come_changes_nothing():
    case = crowded_case(300)
    whole = replace(case, workload=case.workload.model_copy(update={"block": 1000}))
    for kind in KERNELS:
        runs = [serve_compiled(each, kind(case.setting), "demote") for each in (case, whole)]
        assert runs[0].answers == runs[1].answers


def test_a_run_that_is_not_recorded_counts_the_same():
    case = crowded_case(300)
    kept, not_kept = (serve_compiled(case, Fluid(case.setting), "keep", record=record) for record in (True, False))
    assert len(kept.answers) == 300 and not not_kept.answers and not len(not_kept.issues)
    assert (kept.counts == not_kept.counts).all()


def test_an_npu_whose_layers_fetch_nothing_is_another_device():
    """Its channel is free while its array computes, so a policy is asked sooner."""
    case = request_case([Flow(([(0, 1)], [(0, 1)]), arrivals=(0, 0, 0, 1), deadline=2)], buffer=1, end=50, block=1)
    assert not any(compiled.applies(case, kind(case.setting)) for kind in compiled.REFILLS)
    runs = [simulate_requests(case, "fluid", compiled=each, record=True) for each in (True, False)]
    assert runs[0].tally.answers == runs[1].tally.answers


# Outside truth

SERVICE = 10_000


def queue_case(load: float, requests: int, shares: tuple[float, ...]) -> tuple[Case, np.ndarray]:
    """Poisson requests that need one, two, ... segments; the case and the ticks each kind needs."""
    needs = SERVICE * np.arange(1, len(shares) + 1)
    rate = load / float(needs @ shares) * 1e9
    stream = Stream(model="m", rate=rate, deadline_ms=1000, max_batch=1, exit_rates=shares)
    workload = Workload(stream=(stream,), duration_s=requests / rate, warmup_s=requests / rate / 20)
    exits = tuple(range(1, len(shares)))
    return refill_case(((SERVICE,) * len(shares),), workload, exits=exits, rates=shares), needs


def mean_wait(case: Case, served: float) -> float:
    """Ticks between arrival and beginning, over three seeds."""
    runs = [serve_compiled(case, Serial(case.setting), "keep", seed=seed, record=False) for seed in range(3)]
    latency = sum(int(run.counts[0, counted.LATENCY_SUM]) for run in runs)
    return latency / sum(int(run.counts[0, counted.COMPLETED]) for run in runs) - served


@pytest.mark.parametrize(("load", "requests"), [(0.3, 200_000), (0.6, 400_000), (0.8, 1_500_000)])
def test_serial_without_exits_is_the_queue_m_d_1(load, requests):
    case, _ = queue_case(load, requests, (1.0,))
    assert mean_wait(case, SERVICE) == pytest.approx(load * SERVICE / (2 * (1 - load)), rel=0.02)


@pytest.mark.parametrize("shares", [(0.051, 0.169, 0.09, 0.69), (0.145, 0.186, 0.222, 0.447), (0.9, 0.0, 0.0, 0.1)])
def test_serial_with_exits_waits_as_pollaczek_and_khinchine_say(shares):
    load = 0.7
    case, needs = queue_case(load, 400_000, shares)
    mean, square = float(needs @ shares), float(needs**2 @ shares)
    expected = load / mean * square / (2 * (1 - load))
    assert mean_wait(case, mean) == pytest.approx(expected, rel=0.02)


# With the JIT off


def test_the_loop_is_right_as_it_is_written():
    """Compiled code is what runs; the source is what is read."""
    assert said_with_the_jit_off("tests.kernels.test_refill") == (0, "20 cases equal\n", "")


def main() -> None:
    assert numba.config.DISABLE_JIT
    compared = 0
    for kind in KERNELS:
        for late in LATE:
            case = crowded_case(60)
            assert_equal(case, kind(case.setting), late)
            compared += 1
    print(f"{compared} cases equal")  # noqa: T201 - read by the test


if __name__ == "__main__":
    main()
