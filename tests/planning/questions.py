"""Questions to the planner, and measurements and benchmark runs with times that a test chooses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.planning.machines import first_numbers, host
from weft.cli.common import parse_stream
from weft.load import LOST, LoadResult
from weft.load.report import stream_load
from weft.planning.plan_request import PlanRequest, ask
from weft.planning.survey.first_numbers import Surveyed
from weft.serving.config import ModelConfig
from weft.serving.repository import Repository
from weft.workloads.requests import Workload, parse_workload

SETTINGS = {"lanes": 1, "threads": 1, "policy": "punctual", "policy_options": {}, "late": "weave"}


def run_of(
    load: Workload, *latencies_ms: list[float], profile: Any = SETTINGS, deadlines: str = "strict"
) -> LoadResult:
    """A run whose requests took so long; one that took no time at all is lost."""
    streams = []
    for stream, each in zip(load.stream, latencies_ms, strict=True):
        latency_s = np.array(each) / 1e3
        status = np.where(latency_s > 0, 200, LOST).astype(np.int16)
        times_s = np.linspace(0, load.duration_s, len(each), endpoint=False)
        nothing = np.zeros(len(each))
        found = stream_load(
            load, stream, scheduled_s=times_s, lag_s=nothing, latency_s=latency_s, status=status, messages={}
        )
        streams.append(found)
    return LoadResult(
        url="http://127.0.0.1:1", server={}, workload=load, deadlines=deadlines, streams=tuple(streams), started="",
        elapsed_s=1.0, transport_s=0.0, cpu_s=0.0, connections=1, held_back=0, profile=profile,
    )  # fmt: skip


def question_of(*streams: str, **more: Any) -> PlanRequest:
    load = parse_workload({"stream": [parse_stream(text) for text in streams]}, "--stream")
    return ask(load, Path("scratch"), **more)


class Surveyor:
    """Notes what it is asked to measure; fails when it is told to."""

    def __init__(self, fail_at: int = 100, per_s: Mapping[tuple[int, int], float] | None = None) -> None:
        """per_s: lanes and threads -> requests per second of every model; 100 if it is not there."""
        self.per_s = per_s or {}
        self.asked: list[tuple[int, list[int]]] = []
        self.fail_at = fail_at
        self.served: dict[str, ModelConfig] = {}

    def __call__(
        self, subjects: Any, *, lanes: Any, threads: int, repository: Path, left_out: Any, **how: Any
    ) -> Iterator[Surveyed]:
        if len(self.asked) == self.fail_at:
            raise KeyboardInterrupt
        self.asked.append((threads, list(lanes)))
        found = Repository([repository], repository)
        assert not found.problems
        self.served = {name: found.entry(name).config for name in found.names()}
        if how["progress"]:
            how["progress"]("something", 1, 2)
        for count in lanes:
            first = first_numbers(count, threads, per_s=self.per_s.get((count, threads), 100.0), camera=4.0 / threads)
            yield Surveyed(first, None if left_out(first) else host(count, threads, camera=[4.0 / threads]))
