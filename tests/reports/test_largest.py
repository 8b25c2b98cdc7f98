"""A p99 of fewer than 100 requests is their largest, and is marked as that wherever it is shown."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from weft.devices import load_npu
from weft.load.report import OK, stream_load
from weft.simulation.comparison_page import _milliseconds
from weft.simulation.requests import prepare, simulate_requests
from weft.simulation.run_tables import request_comparison_table, requests_table
from weft.workloads.requests import parse_workload


def simulated(rate: float):
    stream = {"model": "resnet18", "rate": rate, "deadline_ms": 100, "max_batch": 1, "arrival": "uniform"}
    workload = parse_workload({"stream": [stream], "duration_s": 2.0, "warmup_s": 0.0})
    return simulate_requests(prepare(workload, load_npu("tpuv3-like")), "fifo").report


def test_tables_of_simulated_requests_mark_the_largest():
    few, many = simulated(10), simulated(100)
    count = few.streams[0].completed
    note = f"* fewer than 100 answers have no p99: resnet18 max of {count}"
    assert asdict(few.streams[0])["p99_max_of"] == count < 100 <= many.streams[0].completed
    for table in (requests_table(few), request_comparison_table("both", [few])):
        assert note in table.notes and any(cell.endswith("*") for cell in table.rows[0].cells)
    assert not any(cell.endswith("*") for cell in requests_table(many).rows[0].cells)
    assert f"(max of {count})" in _milliseconds(few.streams[0])
    assert "max of" not in _milliseconds(many.streams[0])


@pytest.mark.parametrize(("answers", "max_of"), [(0, None), (38, 38), (99, 99), (100, None)])
def test_measured_requests_tell_it_too(answers, max_of):
    workload = parse_workload({"stream": [{"model": "m", "rate": 1, "deadline_ms": 5}], "warmup_s": 0.0})
    times = np.arange(answers, dtype=float) / 1e3
    status = np.full(answers, OK)
    load = stream_load(
        workload, workload.stream[0], scheduled_s=times, lag_s=times, latency_s=times, status=status, messages={}
    )
    assert load.as_dict(latencies=False)["p99_max_of"] == max_of
    assert load.figures.p99_s == load.figures.max_s or max_of is None
