"""Small mappings, traces and reports that pages show."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from weft.devices.soc import Soc, Unit
from weft.reports.trace import Span, Trace
from weft.simulation.report import Report, StreamReport
from weft_map.problem import Group, Problem, Task, UnitCost
from weft_map.schedule import Outcome, Schedule
from weft_map.simulator import simulate

MS = 1e-3

GPU, DLA = 0, 1

NASTY = "</script><b>&amp; ünïcode"


def problem(second: str = "b") -> Problem:
    """Task a takes 2 + 2 ms on the gpu at 80 GB/s, b 2 ms on the dla at 60, of 100; moves take 0.5 ms."""
    soc = Soc(name="duo", bandwidth_gb_s=100.0, units=(Unit(name="gpu"), Unit(name="dla", instances=2)))

    def group(name: str, gpu_ms: float, dla_ms: float) -> Group:
        costs = {
            "gpu": UnitCost(gpu_ms * MS, 80, 0.3 * MS, 0.2 * MS),
            "dla": UnitCost(dla_ms * MS, 60, 0.3 * MS, 0.2 * MS),
        }
        return Group(name, costs)

    return Problem(soc, (Task("a", (group("a0", 2, 4), group("a1", 2, 4))), Task(second, (group("b0", 3, 2),))))


def parallel_outcome(second: str = "b") -> Outcome:
    """Each on its own: both 1.4 times slower until b ends at 2.8 ms, when 2 ms of a are done; a ends at 4.8."""
    return simulate(problem(second), Schedule(((GPU, GPU), (DLA,)), made_by="beside"))


def serial_outcome() -> Outcome:
    """All on the gpu, in turns: a0, b0, a1."""
    return simulate(problem(), Schedule(((GPU, GPU), (GPU,)), made_by="in line"))


def policy_report(policy: str, stp: float, remark: str = "") -> Report:
    streams = (
        StreamReport("conv", 4, 4.5, 1e-3, 2e-3, 3e-3, 2.0),
        StreamReport("gemm", 0, 0.5, 1e-3, None, None, None),
    )
    return Report("npu", policy, stp, 2.0, stp / 2, None, None, 0.5, 0.75, 0.01, None, 1, remark, streams)


CAPACITY = 3_000_000

REPORT = {
    "stp": 1.7,
    "bound_stp": 1.8,
    "fraction_of_bound": 0.94,
    "antt": 1.6,
    "max_slowdown": 1.9,
    "pe_utilisation": np.float64(0.5),
    "dram_utilisation": float("nan"),
    "makespan_s": 0.01,
    "streams": [
        {
            "model": "conv",
            "queries": np.int64(2),
            "standalone_s": 1e-3,
            "mean_latency_s": 2e-3,
            "slowdown": 2.0,
        }
    ],
}


def alternating(queries: int, models: tuple[str, ...] = ("conv", "gemm"), layers: int = 6) -> Trace:
    """Streams take turns; fetches are serial, computes are serial and follow their fetch."""
    spans: list[Span] = []
    fetch_free_s = compute_free_s = 0.0
    for query in range(queries):
        for layer in range(layers):
            for stream, model in enumerate(models):
                # Stream 0 computes long, the others fetch long; each first layer has no weights.
                weight_bytes = 0 if layer == 0 else 100_000 * (1 + 9 * min(stream, 1))
                fetch_end_s = fetch_free_s + weight_bytes / 25e9
                start_s = max(fetch_end_s, compute_free_s)
                end_s = start_s + (30e-6 if stream == 0 else 7e-6)
                name = f"{model}.layer{layer}"
                spans.append(Span(model, query, name, fetch_free_s, fetch_end_s, start_s, end_s, stream, weight_bytes))
                fetch_free_s, compute_free_s = fetch_end_s, end_s
    return Trace.from_spans(spans, models, {"device": "npu", "policy": "turns", "weight_buffer_bytes": CAPACITY})


def page_data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data
