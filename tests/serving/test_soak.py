"""The soak's chaotic clients, a few times each, against a server in this process: what it promises holds at once.

How memory and latencies fare over minutes is the benchmark's affair (``benchmarks/soak.py``).
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import ROOT
from tests.serving import live
from tests.serving.test_serve_models import until

sys.path.append(str(ROOT / "benchmarks"))
chaos_clients = pytest.importorskip("chaos")
soak = pytest.importorskip("soak")

ROUNDS, HEALTHY = 6, 40


async def among_chaos(chaos: chaos_clients.Chaos) -> Counter[str]:
    """Well-behaved requests while everybody else misbehaves; what became of them."""
    storm = asyncio.create_task(chaos_clients.run_chaos(chaos, rounds=ROUNDS))
    statuses = [await chaos.asked("healthy", chaos_clients.infer("mlp"), 200) for _ in range(HEALTHY)]
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
