"""The soak's chaotic clients, a few times each, against a server in this process: what it promises holds at once.

How memory and latencies fare over minutes is the benchmark's affair (``benchmarks/soak.py``).
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
from collections import Counter
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from tests import ROOT
from tests.serving import live
from tests.support.concurrency import until
from weft.load import LoadResult
from weft.load.report import stream_load
from weft.workloads.requests import parse_workload

sys.path.append(str(ROOT / "benchmarks"))
chaos_clients = pytest.importorskip("chaos")
soak = pytest.importorskip("soak")

ROUNDS, HEALTHY = 6, 40


def test_a_strict_result_that_the_server_counts_as_late_breaks_the_promise():
    def kept(met: int) -> list[bool]:
        gained = {soak.SUCCESS: 7, soak.MET: met, soak.MISSED: 10 - met}
        return [verdict.kept for verdict in soak.judge_strict({200: 7, 504: 2, 503: 1}, gained)]

    assert all(kept(met=7))
    assert not all(kept(met=6))


async def among_chaos(chaos: chaos_clients.Chaos) -> Counter[str]:
    """Well-behaved requests while everybody else misbehaves; what became of them."""
    storm = asyncio.create_task(chaos_clients.run_chaos(chaos, rounds=ROUNDS))
    statuses = [await chaos.exchange("healthy", chaos_clients.infer("mlp"), 200) for _ in range(HEALTHY)]
    await storm
    return Counter(f"mlp {chaos_clients.REASONS.get(status, status)}" for status in statuses)


def test_chaotic_clients_harm_nobody_and_the_books_balance(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in (chaos_clients, soak):
        monkeypatch.setattr(each, "PATIENCE_S", live.PATIENCE_S)
    chaos_clients.write_repository(tmp_path)
    with live.running(tmp_path) as server:
        ports = server.server.http_port, server.server.grpc_port
        chaos = chaos_clients.Chaos("127.0.0.1", *ports, random.Random(0), stall=False)
        with caplog.at_level(logging.WARNING):
            healthy = asyncio.run(among_chaos(chaos))
        soak.read_books(server.url)  # so that whoever knocked before has been let in
        until(lambda: not server.server._http.connections, "all have left")
        books, metrics = soak.settled_books(server.url), soak.read_metrics(server.url)
    verdicts = [
        *soak.judge_run(healthy, chaos.ledger, books),
        *soak.judge_books(chaos.ledger, healthy, books, metrics),
    ]
    assert [each for each in verdicts if not each.kept] == []
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
    tried = {key.rpartition(" ")[0] for key in chaos.ledger.answers}
    assert tried >= {"floods", "garbage", "guest after", "grpc", "hurries", "pipelines", "reads slowly", "unfit"}


def test_books_that_miss_a_request_are_noticed() -> None:
    ledger, healthy = chaos_clients.Ledger(), Counter({"mlp success": 3})
    ledger.counted["guest success"], ledger.abandoned["chain"] = 2, 1
    metrics = {'nv_inference_request_success{model="mlp"}': 5.0, "weft_requests_refused_total": 0.0}
    balanced = soak.Books(Counter({"mlp success": 3, "guest success": 2}), 0, 0, 0)
    assert all(each.kept for each in soak.judge_books(ledger, healthy, balanced, metrics))
    lost = soak.Books(Counter({"mlp success": 3, "guest success": 1}), 0, 0, 0)
    twice = soak.Books(Counter({"mlp success": 3, "guest success": 2, "chain cancelled": 2}), 0, 0, 0)
    for books in (lost, twice):
        assert not all(each.kept for each in soak.judge_books(ledger, healthy, books, metrics))


def result(statuses: list[int], said: str = "") -> LoadResult:
    """Requests of one model, one a second, each answered half a second later; *said*: where it is not a 200."""
    workload = parse_workload({"duration_s": 10.0, "stream": [{"model": "mlp", "rate": 1.0}]}, "test")
    count = len(statuses)
    load = stream_load(
        workload,
        workload.stream[0],
        scheduled_s=np.arange(count, dtype=float),
        lag_s=np.zeros(count),
        latency_s=np.full(count, 0.5),
        status=np.array(statuses, np.int16),
        messages={status: said for status in statuses if status != 200},
    )
    return LoadResult("http://h", {}, workload, "soft", (load,), "2026-01-01T00:00:00+00:00", 9.0, 1e-4, 0.1, 1, 0)


def test_a_request_may_fail_on_a_worker_that_was_killed_and_only_then() -> None:
    found = result([200, 200, 503, 500], "the worker that computed it died")
    assert soak.answers(found) == {"mlp success": 2, "mlp killed": 2}
    spans = soak.killed_spans(found)
    start_s = datetime.fromisoformat(found.started).timestamp()
    assert spans == [(start_s + 2, start_s + 2.5), (start_s + 3, start_s + 3.5)]
    assert soak.judge_kills([], []).kept
    assert soak.judge_kills([start_s + 2.25, start_s + 3.25], spans).kept
    assert not soak.judge_kills([start_s + 2.25], spans).kept
    assert not soak.judge_kills([], spans).kept
    refused = result([200, 503], "exceeds its maximum queue size")
    assert soak.answers(refused) == {"mlp success": 1, "mlp queue_full": 1} and soak.killed_spans(refused) == []


def test_a_healthy_request_that_is_lost_is_noticed() -> None:
    nothing = chaos_clients.Ledger(), soak.Books(Counter(), 0, 0, 0)
    for status, kept in ((200, True), (503, False), (0, False), (-1, False), (504, False)):
        verdicts = soak.judge_run(soak.answers(result([status])), *nothing)
        assert [each.kept for each in verdicts] == [True, kept, True, True], status
    answered = soak.answers(result([500], "the worker that computed it died"))
    assert all(each.kept for each in soak.judge_run(answered, *nothing)), "it has its answer; when is another promise"


def test_growth_is_from_what_it_had_when_it_had_settled() -> None:
    watch = soak.Watch(0)
    watch.samples = [(float(at_s), 50 if at_s < 10 else 100 + (at_s >= 90) * 4) for at_s in range(100)]
    assert watch.growth(10.0) == pytest.approx(0.04)
    assert not soak.judge_memory(watch, 10.0).kept
    assert soak.judge_memory(watch, 90.0).kept


def test_an_answer_that_names_the_worker_is_no_full_queue() -> None:
    assert chaos_clients.reason(503, "exceeds its maximum queue size") == "queue_full"
    assert chaos_clients.reason(503, "its worker ended: killed") == "killed"
    assert chaos_clients.reason(504, "") == "deadline"
