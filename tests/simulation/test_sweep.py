"""AI-MT's threshold sweep: the best of its grid, the same every time, and the run that ``simulate`` makes."""

from __future__ import annotations

import math

import pytest

from weft.base.errors import WorkloadError
from weft.devices import load_npu
from weft.devices.costs.layer_costs import estimate
from weft.models.zoo import load
from weft.simulation import simulate
from weft.simulation.sweep import GridPoint, Sweep, sweep_aimt
from weft.workloads import Saturated

NPU = load_npu("tpuv3-like")
PAIRS = [[estimate(load(name), NPU) for name in pair] for pair in (("mobilenet-v2", "bert-base"), ("resnet50", "ncf"))]
GRID = {"compute_thresholds": (0.05, 0.4, 0.8), "memory_thresholds": (0.0, 0.9)}


def test_the_best_point_is_the_best_of_the_grid():
    sweep = sweep_aimt(PAIRS, NPU, queries=10, **GRID)
    assert [(p.compute_threshold, p.memory_threshold) for p in sweep.points] == [
        (compute, memory) for compute in GRID["compute_thresholds"] for memory in GRID["memory_thresholds"]
    ]
    assert sweep.best.stp == max(point.stp for point in sweep.points)
    assert sweep.options == {
        "compute_threshold": sweep.best.compute_threshold,
        "memory_threshold": sweep.best.memory_threshold,
    }


def test_the_first_of_equals_is_taken():
    tie = Sweep((GridPoint(0.1, 0.0, 1.5), GridPoint(0.2, 0.0, 1.6), GridPoint(0.3, 0.0, 1.6)))
    assert tie.best.compute_threshold == 0.2


def test_a_sweep_repeats_exactly():
    assert sweep_aimt(PAIRS, NPU, queries=8, **GRID) == sweep_aimt(PAIRS, NPU, queries=8, **GRID)


def test_every_point_is_what_simulate_reports():
    for point in sweep_aimt(PAIRS, NPU, queries=20, **GRID).points:
        options = {"compute_threshold": point.compute_threshold, "memory_threshold": point.memory_threshold}
        reports = [simulate(pair, NPU, "aimt", Saturated(20), options=options).report for pair in PAIRS]
        wanted = math.sqrt(reports[0].stp * reports[1].stp)
        assert point.stp == pytest.approx(wanted)


def test_more_points_can_only_help():
    few = sweep_aimt(PAIRS, NPU, queries=8, compute_thresholds=(0.4,), memory_thresholds=(0.0,))
    many = sweep_aimt(PAIRS, NPU, queries=8, **GRID)
    assert many.best.stp >= few.best.stp


def test_progress_counts_the_grid():
    seen: list[tuple[int, int]] = []
    sweep_aimt(PAIRS[:1], NPU, queries=2, progress=lambda done, total: seen.append((done, total)), **GRID)
    assert seen == [(done, 6) for done in range(6)]


def test_a_sweep_of_nothing_is_refused():
    with pytest.raises(WorkloadError, match="at least one workload"):
        sweep_aimt([], NPU)
    with pytest.raises(WorkloadError, match="one value of each threshold"):
        sweep_aimt(PAIRS, NPU, compute_thresholds=())
