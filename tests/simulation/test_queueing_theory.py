"""Outside truth: one stream, one layer and no batching make the simulator a queue whose waiting times are known."""

from __future__ import annotations

import pytest

from tests.engine.naive import BYTES_PER_S, profile, small_npu
from weft.devices.costs.layer_costs import write_profile
from weft.simulation.requests import Case, prepare, simulate_requests
from weft.workloads.requests import Stream, Workload

SERVICE = 10_000
"""Ticks of compute of a request; its weights are one tick."""
SERVICE_S = SERVICE / BYTES_PER_S


@pytest.fixture
def queue(tmp_path):
    """A workload of that one layer at a given load, lowered to a small device."""

    def at(load: float, arrival: str, requests: int) -> Case:
        write_profile(profile("one", (1, SERVICE)), tmp_path / "one.json")
        stream = Stream(
            model="one",
            profiles=("one.json",),
            arrival=arrival,
            rate=load / SERVICE_S,
            deadline_ms=1000,
            max_batch=1,
            batch_timeout_ms=0,
        )
        seconds = requests * SERVICE_S / load
        workload = Workload(stream=(stream,), duration_s=seconds, warmup_s=seconds / 20, folder=str(tmp_path))
        return prepare(workload, small_npu(1000))

    return at


def mean_wait_s(case: Case, policy: str, seed: int) -> float:
    """Latency less the time the request itself takes: its fetch and its compute."""
    latency = simulate_requests(case, policy, seed=seed).report.streams[0].mean_latency_s
    assert latency is not None
    return latency - SERVICE_S - 1 / BYTES_PER_S


@pytest.mark.parametrize(("load", "requests"), [(0.3, 400_000), (0.6, 800_000), (0.9, 4_000_000)])
def test_poisson_arrivals_wait_as_long_as_in_the_queue_m_d_1(queue, load, requests):
    case = queue(load, "poisson", requests)
    waits = [mean_wait_s(case, "fifo", seed) for seed in range(3)]
    expected = load * SERVICE_S / (2 * (1 - load))
    assert sum(waits) / len(waits) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("policy", ["edf", "prema", "layerweaver", "layerweaver+", "weft+"])
def test_with_one_stream_every_policy_is_that_queue(queue, policy):
    case = queue(0.6, "poisson", 50_000)
    assert mean_wait_s(case, policy, 1) == pytest.approx(mean_wait_s(case, "fifo", 1), rel=1e-9)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.9, 0.99])
def test_evenly_spaced_arrivals_never_wait(queue, load):
    report = simulate_requests(queue(load, "uniform", 20_000), "fifo").report.streams[0]
    whole = SERVICE_S + 1 / BYTES_PER_S
    assert report.mean_latency_s == pytest.approx(whole)
    assert report.max_latency_s == pytest.approx(whole)


@pytest.mark.parametrize("load", [0.3, 0.9])
def test_the_array_is_busy_for_the_share_that_is_asked_of_it(queue, load):
    report = simulate_requests(queue(load, "poisson", 400_000), "fifo").report
    assert report.pe_utilisation == pytest.approx(load, rel=0.01)
    assert report.offered_stp == pytest.approx(load, rel=0.01)
    assert report.stp == pytest.approx(load, rel=0.01)


def test_above_its_capacity_a_fifth_of_what_came_still_waits_when_the_run_ends(queue):
    report = simulate_requests(queue(1.25, "poisson", 40_000), "fifo", late="keep").report
    assert report.makespan_s == pytest.approx(40_000 * SERVICE_S, rel=0.02)
    assert report.stp == pytest.approx(1, rel=0.06)
    # a request that comes after t waits for t / 4 of work; the first twentieth of the run is not counted
    assert report.streams[0].mean_latency_s == pytest.approx(32_000 / 4 * 1.05 / 2 * SERVICE_S, rel=0.05)
    assert report.streams[0].deepest_queue == pytest.approx(8_000 - 1_000, rel=0.05)  # a thousand are on chip
