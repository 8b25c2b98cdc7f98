"""What a simulated cluster says, against arithmetic and queueing theory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.cluster.cases import one_machine, small_cluster
from weft.base.errors import InputError, PlacingError
from weft_cluster.placing.demand import Demand, Need
from weft_cluster.placing.machines import MachineKind
from weft_cluster.placing.placement import parse_placement
from weft_cluster.routing.cluster import ClusterSetting, Failure, failures, placed, slowed
from weft_cluster.routing.simulate import simulate_cluster
from weft_cluster.routing.traffic import RequestBlock

NEED = Need(0.006, 0.003, 0.001, segment_s=0.0025, alone_s=0.01)
QUIET = ClusterSetting(warmup_s=0.0, hop_s=0.001)


def at(*times_s: float) -> list[RequestBlock]:
    return [RequestBlock(np.array(times_s), np.zeros(len(times_s), np.int64))]


def test_a_request_alone_takes_its_time_alone_and_the_way_there_and_back():
    run = simulate_cluster(one_machine(NEED, 0.02), QUIET, requests=at(0.5))
    assert run.mean_latency_s == pytest.approx(0.012, abs=1e-8)
    assert (run.attainment, run.arrived.tolist(), run.by_machine.tolist()) == (1.0, [1], [1])


@pytest.mark.parametrize(("deadline_s", "on_time"), [(0.0121, 1.0), (0.0119, 0.0)])
def test_the_way_counts_towards_the_deadline(deadline_s, on_time):
    assert simulate_cluster(one_machine(NEED, deadline_s), QUIET, requests=at(0.5)).attainment == on_time


def test_a_machine_of_half_speed_takes_twice_as_long():
    cluster = one_machine(NEED, 0.1).with_speeds({"m0": 0.5})
    assert simulate_cluster(cluster, QUIET, requests=at(0.5)).mean_latency_s == pytest.approx(0.022, abs=1e-8)


@pytest.mark.parametrize(("rate", "told"), [(0.25, "0.25"), (610.0, "610"), (10000.0, "10000"), (123456.7, "123457")])
def test_rates_are_told_without_powers_of_ten(rate, told):
    assert f": {told} requests per s" in repr(one_machine(Need(0.01, 0.0, alone_s=0.01), 1.0, rate))


def test_requests_one_after_another_wait_for_each_other():
    """Two loads: 6 + .55 x 3 + 1 = 8.65 ms of the array, so the second request is that much behind the first."""
    run = simulate_cluster(one_machine(NEED, 1.0), replace(QUIET, policy="fifo"), requests=at(0.5, 0.5))
    assert run.mean_latency_s == pytest.approx(0.012 + 0.00865 / 2, abs=1e-6)


def test_a_machine_that_is_asked_at_random_waits_as_queueing_theory_says():
    """M/D/1: requests of one piece that need the array alone wait rho / (2 (1 - rho)) times what they take."""
    need = Need(0.01, 0.0, segment_s=0.01, alone_s=0.01)
    cluster = one_machine(need, 10.0, rate=70.0)
    cluster = replace(cluster, nodes=(cluster.nodes[0]._replace(overlap=1.0),))
    run = simulate_cluster(cluster, replace(QUIET, policy="fifo", hop_s=0.0), duration_s=3000.0, seed=1)
    waits = run.mean_latency_s - 0.01
    assert waits == pytest.approx(0.01 * 0.7 / (2 * 0.3), rel=0.05)
    assert run.busy[0] == pytest.approx(0.7, rel=0.02)


def test_stale_estimates_that_are_aged_by_what_was_sent_still_spread_requests():
    cluster = one_machine(NEED, 0.1, nodes=3)
    run = simulate_cluster(cluster, replace(QUIET, age_s=5.0), requests=at(*[0.5] * 9))
    assert run.by_machine.tolist() == [3, 3, 3]
    run = simulate_cluster(cluster, replace(QUIET, age_s=5.0, router="two-choices"), requests=at(*[0.5] * 9))
    assert run.by_machine.max() > 3  # it does not learn of what it sent itself


def test_what_is_on_a_machine_that_goes_down_is_lost_and_what_is_sent_there_until_it_is_noticed():
    cluster = one_machine(NEED, 0.1, nodes=2)
    down = (Failure("m0", 1.0, 1.0),)
    setting = replace(QUIET, failures=down, age_s=0.2, router="round-robin")
    steady = np.arange(0.0, 4.0, 0.05)
    run = simulate_cluster(cluster, setting, requests=at(*steady))
    sent = np.arange(20, 24)  # 1.00 to 1.20, when the missing report is noticed: every other one
    assert run.lost.sum() == pytest.approx(len(sent) / 2 + 0.5, abs=1)
    assert run.arrived.sum() == len(steady)
    assert run.by_machine[0] > 0.25 * len(steady)  # it came back
    quick = simulate_cluster(cluster, replace(setting, age_s=0.0), requests=at(*steady))
    assert quick.lost.sum() < run.lost.sum()


def test_slack_misses_less_than_half_of_what_two_choices_miss_with_slow_machines_and_old_reports():
    cluster = slowed(small_cluster(20, 40, 4, load=0.75), 0.1, 0.5, seed=1)
    missed = {}
    for router in ("slack", "two-choices"):
        setting = ClusterSetting(router=router, age_s=0.2)
        missed[router] = simulate_cluster(cluster, setting, duration_s=20.0, seed=2).missed
    assert missed["slack"] < 0.5 * missed["two-choices"]


def test_trouble_is_drawn_by_its_seed():
    cluster = small_cluster(20, 5, 2)
    slow = slowed(cluster, 0.1, 0.5, seed=3)
    assert sorted(node.speed for node in slow.nodes) == [0.5] * 2 + [1.0] * 18
    assert [node.name for node in slowed(cluster, 0.1, 0.5, seed=3).nodes] == [node.name for node in slow.nodes]
    down = failures(cluster, 0.25, 3.0, 60.0, seed=3, from_s=2.0)
    assert len({failure.machine for failure in down}) == 5
    assert all(2 <= failure.start_s < 60 and failure.length_s == 3 for failure in down)


def machine(name: str, *models: dict) -> dict:
    numbers = dict.fromkeys(("compute", "bandwidth", "other", "busy"), 0.1)
    limits = {"busy_cap": 0.8, "memory_bytes": 1, "memory_limit_bytes": 2, "limit": "compute", "limited_by": "a"}
    return {"name": name, "kind": "h200", "zone": "z", "models": models, **numbers, **limits}


def test_a_placement_becomes_a_cluster():
    one, two = {"model": "a", "share": 0.5, "rate": 5.0}, {"model": "a", "share": 0.25, "rate": 2.5}
    raw = {"machines": [machine("x", one), machine("y", two, {"model": "b", "share": 1.0, "rate": 1.0})]}
    placement = parse_placement({"format": 1, **raw, "value": 2, "bound": 2}, "test")
    demands = [Demand("a", 10.0, 0.1, {"h200": NEED}, cv=2.0), Demand("b", 1.0, 0.2, {"h200": NEED})]
    cluster = placed(placement, {"h200": MachineKind(memory_gib=1.0)}, demands)
    assert cluster.models == ("a", "b")
    assert cluster.rates.tolist() == [7.5, 1.0]  # a quarter of a is unserved
    assert (cluster.cv.tolist(), cluster.deadlines_s.tolist()) == ([2.0, 1.0], [0.1, 0.2])
    assert [(each.node, each.model, round(each.share, 3)) for each in cluster.placed] == [
        (0, 0, 0.667), (1, 0, 0.333), (1, 1, 1.0),
    ]  # fmt: skip
    with pytest.raises(PlacingError, match="x has it placed: unknown model 'a'"):
        placed(placement, {"h200": MachineKind(memory_gib=1.0)}, demands[1:])


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"router": "nearest"}, "unknown router 'nearest'"),
        ({"policy": "punctual"}, "unknown policy for machines of a cluster 'punctual'"),
        ({"late": "drop"}, "unknown rule for late requests 'drop'"),
        ({"gates": 0}, "gates = 0 must be at least 1"),
        ({"age_s": -1.0}, "age_s = -1.0 must be at least 0"),
        ({"report_s": 0.0}, "report_s = 0.0 must be at least"),
    ],
)
def test_a_setting_that_makes_no_sense_is_told_in_one_line(asked, told):
    with pytest.raises(InputError, match=told):
        ClusterSetting(**asked)


def test_machines_and_zones_that_are_not_there_are_refused():
    cluster = one_machine(NEED, 0.1)
    with pytest.raises(PlacingError, match="unknown machine 'm7'"):
        simulate_cluster(cluster, ClusterSetting(failures=(Failure("m7", 1.0, 1.0),)))
    with pytest.raises(InputError, match=r"m0 fails at 1\.5 s, and was not up again"):
        simulate_cluster(cluster, ClusterSetting(failures=(Failure("m0", 1.0, 1.0), Failure("m0", 1.5, 1.0))))
    with pytest.raises(PlacingError, match="unknown zone 'there'"):
        simulate_cluster(cluster, ClusterSetting(zone_hops_s={"there": 0.1}))
    with pytest.raises(PlacingError, match="unknown machine 'm7'"):
        cluster.with_speeds({"m7": 0.5})
    with pytest.raises(InputError, match="leaves nothing of"):
        simulate_cluster(cluster, duration_s=0.5)
