"""The compiled cluster does what the plain one does, request by request: an engine per machine and pure routers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cluster.cases import small_cluster
from tests.kernels.jit import said_with_the_jit_off
from weft.kernels import request_state as k
from weft_cluster.routing import compiled, plain
from weft_cluster.routing.cluster import ClusterSetting, Failure
from weft_cluster.routing.lowered import in_ticks, lower_cluster
from weft_cluster.routing.router import ROUTERS
from weft_cluster.routing.traffic import Day, Surge, generated

COLUMNS = [k.ARRIVED, k.COMPLETED, k.VIOLATED, k.DROPPED, k.REFUSED, k.LATENCY_SUM, k.LATENCY_MAX]
DOWN = (Failure("m1", 0.3, 0.25), Failure("m2", 0.4, 9.0))


def compare(setting: ClusterSetting, seed: int = 0, load: float = 0.8, duration_s: float = 0.8) -> int:
    """Run both; how many requests missed their deadlines."""
    cluster = small_cluster(seed=seed, load=load).with_speeds({"m0": 0.5})
    lowered = lower_cluster(cluster, setting)
    day = Day(wave=0.5, day_s=1.0, surge=(Surge(start_s=0.2, length_s=0.1, factor=3.0),))
    blocks = [generated(cluster.rates, np.full(6, 2.0), day, duration_s, seed) for _ in range(2)]
    ours = compiled.serve(lowered, setting, in_ticks(blocks[0], seed), record=True)
    theirs = plain.serve(lowered, setting, in_ticks(blocks[1], seed))
    assert len(ours.routed) > 50
    assert ours.routed.tolist() == theirs.routed.tolist()
    assert ours.counts[:, COLUMNS].tolist() == theirs.counts[:, COLUMNS].tolist()
    assert ours.histogram.tolist() == theirs.histogram.tolist()
    assert (ours.busy.tolist(), ours.through.tolist()) == (theirs.busy.tolist(), theirs.through.tolist())
    return int(ours.counts[:, k.VIOLATED].sum())


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("policy", ["weft+", "edf", "fifo"])
def test_both_send_every_request_to_the_same_machine_and_answer_it_at_the_same_time(router, policy):
    setting = ClusterSetting(
        router=router, policy=policy, age_s=0.06, gates=2, warmup_s=0.1, failures=DOWN, zone_hops_s={"far": 0.002}
    )
    assert compare(setting) > 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "setting",
    [
        ClusterSetting(warmup_s=0.0),
        ClusterSetting(report_s=0.0031, age_s=0.02, knows_speeds=False, late="keep"),
        ClusterSetting(report_s=0.5, gates=3, late="demote", hop_s=0.0),
        ClusterSetting(age_s=5.0, failures=DOWN, router="two-aged"),
    ],
    ids=["usual", "frequent", "seldom", "blind"],
)
def test_whatever_gates_know_and_however_busy_machines_are(setting, seed):
    compare(setting, seed=seed, load=0.5 + 0.2 * seed)


def test_blocks_of_requests_may_end_within_a_period(monkeypatch):
    monkeypatch.setattr("weft_cluster.routing.traffic.BLOCK", 17)
    compare(ClusterSetting(age_s=0.04, gates=2, failures=DOWN))


def test_loops_as_plain_python_say_the_same():
    status, said, errors = said_with_the_jit_off("tests.cluster.test_twins")
    assert (status, said.strip()) == (0, "equal"), errors


if __name__ == "__main__":
    compare(ClusterSetting(age_s=0.04, gates=2, failures=DOWN), duration_s=0.5)
    print("equal")  # noqa: T201
