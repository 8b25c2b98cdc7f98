"""Machines made up for planning: models with the times that a test says, and nothing that varies unless it says so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from weft.devices import Host, HostModel
from weft.planning import candidates, finals, planning_run, trials
from weft.planning.candidates import Arrangement
from weft.planning.plan import PlanSettings
from weft.planning.plan_request import PlanRequest, RequestedModel
from weft.planning.process_pool import Helpers
from weft.planning.survey.first_numbers import FirstNumbers
from weft.serving.config import ModelConfig
from weft.simulation.run_length import RunLength
from weft.workloads.requests import parse_workload

BRIEF = RunLength(60, 15)


def host(
    lanes: int = 1,
    threads: int = 1,
    *,
    loss: float = 0.0,
    memory_bytes: int | None = None,
    exits: Mapping[str, tuple[int, ...]] | None = None,
    **models: Any,
) -> Host:
    """Model -> milliseconds of its segments at batch 1, or batch -> those; *exits*: model -> segments before each."""
    found = {}
    for name, given in models.items():
        times = given if isinstance(given, dict) else {1: given}
        rows = {batch: tuple(each / 1e3 for each in ms) for batch, ms in times.items()}
        found[name] = HostModel(
            segments=tuple(f"s{place}" for place in range(len(rows[1]))),
            max_batch=max(rows),
            times_s=rows,
            loses=dict.fromkeys(models, loss) if lanes > 1 else {},
            exits=(exits or {}).get(name, ()),
        )
    return Host(cores=2, lanes=lanes, threads=threads, memory_bytes=memory_bytes, models=found)


def first_numbers(
    lanes: int = 1, threads: int = 1, *, per_s: float = 100.0, batch: int = 1, **ms: float
) -> FirstNumbers:
    """Model -> milliseconds of a request alone, in one segment; *per_s*: its throughput, the same for every model."""
    alone_s = {name: each / 1e3 for name, each in ms.items()}
    return FirstNumbers(
        lanes=lanes,
        threads=threads,
        alone_s=alone_s,
        longest_s=alone_s,
        max_batch=dict.fromkeys(ms, batch),
        per_s=dict.fromkeys(ms, per_s),
        answered_per_s=per_s,
    )


def asked(*streams: tuple[str, float, float], **more: Any) -> PlanRequest:
    """Streams as (model, requests per second, deadline in ms)."""
    raw = [{"model": name, "rate": rate, "deadline_ms": due} for name, rate, due in streams]
    names = dict.fromkeys(name for name, _, _ in streams)
    models = tuple(RequestedModel(name, name, Path(name), ModelConfig()) for name in names)
    return PlanRequest(workload=parse_workload({"stream": raw}, "the test"), models=models, **{"cores": 2} | more)


def arrangement(machine: Host, policy: str = "punctual", batch: int = 1, **options: Any) -> Arrangement:
    settings = PlanSettings(lanes=machine.lanes, threads=machine.threads, policy=policy, policy_options=options)
    batches = {name: min(batch, model.max_batch) for name, model in machine.models.items()}
    return Arrangement(machine, settings, batches, dict.fromkeys(batches, 5.0))


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)


def shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have runs of a few requests under two policies, which are enough where the answer is clear.

    No process helps: to start one takes longer than all of these runs.
    """
    monkeypatch.setattr(candidates, "request_policies", lambda workload: ["punctual", "edf"])
    monkeypatch.setattr(planning_run, "Helpers", lambda *_: Helpers())
    for name in ("SHORT", "USUAL", "LONG"):
        for module in (trials, finals, planning_run):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, BRIEF)
