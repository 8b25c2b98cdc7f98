"""Models that come, go, change and break under traffic, memory that returns, servers that end: nothing is lost."""

from __future__ import annotations

import asyncio
import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.serving import live
from tests.serving.chain import CHAIN_WIDTH, SOME_ROWS, chain, occupied, some_input
from tests.serving.factors import multiplying_model, served_factor
from tests.serving.live import serve_process
from tests.support.concurrency import Background, Clients, until
from tests.support.inference import Refused, infer, load_model, model_state, packed, send, state, unload_model
from tests.support.references import assert_same_bits, run_session, session
from weft.serving import library
from weft.serving.config import ServerConfig
from weft.serving.process import ServerProcess
from weft.serving.server import Server

# Models


def lookup(path: Path) -> Path:
    """Rows of a table of 8; any other number cannot be computed, and only the contents tell."""
    table = np.random.default_rng(5).normal(size=(8, 4)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "row"], ["y"])],
        "lookup",
        [helper.make_tensor_value_info("row", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        [numpy_helper.from_array(table, "table")],
    )
    path.with_suffix(".toml").write_text("max_batch = 16\n")
    return live.save(graph, path)


# Clients


def evictions(server: live.Live) -> int:
    text = send(server, "GET", "/metrics").body.decode()
    found = re.search(r"^weft_evictions_total(?:\{.*\})? ([0-9.]+)$", text, re.MULTILINE)
    assert found
    return int(float(found[1]))


# Load, unload, load again


@pytest.fixture
def changing(tmp_path: Path) -> Iterator[live.Live]:
    multiplying_model(tmp_path / "times.onnx", 1)
    with live.running(tmp_path, grpc_port=None) as server:
        yield server


def test_a_changed_file_is_met_from_its_load_on_and_nothing_is_lost(changing: live.Live, tmp_path: Path) -> None:
    sure, newest = [1.0], [1.0]  # the last file that was loaded for sure, and the last that was written

    def ask(seed: int) -> None:
        before = sure[0]
        assert before <= served_factor(changing, seed) <= newest[0]

    with Clients(4, ask) as clients:
        for factor in (2.0, 3.0, 4.0, 5.0):
            clients.served(10)
            newest[0] = factor
            multiplying_model(tmp_path / "times.onnx", factor)
            assert load_model(changing, "times") == 200
            assert served_factor(changing, 9) == factor
            sure[0] = factor
        clients.served(10)
    assert clients.problems == []
    assert set(clients.statuses) == {200}


def test_unloading_under_traffic_refuses_and_loading_serves_again(changing: live.Live) -> None:
    with Clients(4, lambda seed: served_factor(changing, seed)) as clients:
        for _ in range(4):
            clients.served(10)
            assert unload_model(changing, "times") == 200
            with pytest.raises(Refused, match="unloaded") as refused:
                served_factor(changing, 9)
            assert refused.value.status == 404
            assert send(changing, "GET", "/v2/models/times/ready").status != 200
            until(lambda: clients.statuses[404] >= 4, "clients are refused")
            assert load_model(changing, "times") == 200
            assert served_factor(changing, 9) == 1
        clients.served(10)
    assert clients.problems == []
    assert set(clients.statuses) <= {200, 404, 503}


def test_a_file_that_became_bad_does_not_replace_the_model(changing: live.Live, tmp_path: Path) -> None:
    with Clients(2, lambda seed: served_factor(changing, seed)) as clients:
        (tmp_path / "times.onnx").write_bytes(b"nonsense")
        assert load_model(changing, "times") == 400
        clients.served(5)
        multiplying_model(tmp_path / "times.onnx", 7)
        assert load_model(changing, "times") == 200
        assert served_factor(changing, 9) == 7
    assert clients.problems == []
    assert set(clients.statuses) == {200}


def test_several_clients_load_and_unload_at_once(changing: live.Live) -> None:
    """Whatever they get, it is defined; and afterwards the model can be had."""
    statuses: Counter[int] = Counter()

    def switch(seed: int) -> None:
        statuses[(load_model if seed % 2 else unload_model)(changing, "times")] += 1

    with Clients(4, switch) as switchers, Clients(2, lambda seed: served_factor(changing, seed)) as clients:
        until(lambda: statuses.total() >= 60 or switchers.problems, "models come and go")
    assert clients.problems == [] and switchers.problems == []
    assert set(statuses) <= {200, 503} and set(clients.statuses) <= {200, 404, 503}
    assert load_model(changing, "times") == 200
    assert served_factor(changing, 1) == 1


# Memory


def test_two_models_share_a_budget_for_one(tmp_path: Path) -> None:
    """Both answer in turn: who was not used the longest leaves, and comes back when asked."""
    files = {
        name: live.heavy(tmp_path / f"{name}.onnx", layers=6, width=128, rows=1, seed=seed)
        for seed, name in enumerate("ab")
    }
    with live.running(tmp_path, grpc_port=None) as server:
        sizes = {name: model_state(server, name)["memory_bytes"] for name in files}
    budget = round(max(sizes.values()) * 1.5)
    assert budget < sum(sizes.values())
    x = {"x": np.random.default_rng(1).normal(size=(1, 128)).astype(np.float32)}
    wanted = {name: run_session(session(path), x) for name, path in files.items()}
    with live.running(tmp_path, grpc_port=None, memory_budget_bytes=budget) as server:
        before = evictions(server)
        for _ in range(3):
            for name in files:
                assert_same_bits(infer(server, name, x), wanted[name])
                assert state(server)["memory"]["used_bytes"] <= budget
                assert model_state(server, name)["state"] == "ready"
        assert evictions(server) - before >= 5
        with Clients(2, lambda seed: assert_same_bits(infer(server, "ab"[seed], x), wanted["ab"[seed]])) as clients:
            clients.served(10)
        assert clients.problems == []
        assert set(clients.statuses) <= {200, 503}


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("slow")
    chain(place / "chain.onnx")
    return place


def test_what_is_running_keeps_its_model(slow: Path, tmp_path: Path) -> None:
    """Neither the budget nor an unload takes it away; its memory returns with its last answer."""
    other = live.heavy(tmp_path / "other.onnx", layers=16, width=128, rows=1)
    (tmp_path / "other.toml").write_text("preload = false\n")
    wanted = run_session(session(slow / "chain.onnx"), some_input())
    budget = round((slow / "chain.onnx").stat().st_size * 1.5)
    with live.running(slow, tmp_path, grpc_port=None, memory_budget_bytes=budget) as server:
        x = {"x": np.ones((1, 128), np.float32)}
        with live.Gate(server, "chain", SOME_ROWS) as gate:
            running = Background(lambda: infer(server, "chain", some_input()))
            gate.wait()
            waiting = Background(lambda: infer(server, "other", x))  # until what runs has ended
            until(lambda: model_state(server, "chain")["state"] == "unloaded", "it has to leave")
            assert model_state(server, "other")["state"] == "loading"
        assert_same_bits(running.result(), wanted)
        assert_same_bits(waiting.result(), run_session(session(other), x))
        assert evictions(server) == 1


def test_an_unloaded_model_finishes_what_it_runs(slow: Path) -> None:
    wanted = run_session(session(slow / "chain.onnx"), some_input())
    with live.running(slow, grpc_port=None) as server:
        with live.Gate(server, "chain", SOME_ROWS) as gate:
            running = Background(lambda: infer(server, "chain", some_input()))
            gate.wait()
            assert unload_model(server, "chain") == 200
            assert state(server)["memory"]["used_bytes"] > 0
            with pytest.raises(Refused) as refused:
                infer(server, "chain", some_input())
            assert refused.value.status == 404
        assert_same_bits(running.result(), wanted)
        assert state(server)["memory"]["used_bytes"] == 0


def test_a_model_larger_than_the_budget_is_refused(slow: Path) -> None:
    budget = (slow / "chain.onnx").stat().st_size // 2
    with live.running(slow, grpc_port=None, memory_budget_bytes=budget) as server:
        with pytest.raises(Refused, match="memory budget") as refused:
            infer(server, "chain", some_input())
        assert refused.value.status == 503


def test_counters_outlive_an_unload(slow: Path) -> None:
    with live.running(slow, grpc_port=None) as server:
        infer(server, "chain", some_input())
        assert unload_model(server, "chain") == 200
        assert state(server)["totals"]["success"] == 1


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="only Linux tells the memory of a process this way")
def test_memory_returns_with_an_unload(tmp_path: Path) -> None:
    """Of a process of its own: in ours what other tests have left is taken again, and not given back."""
    multiplying_model(tmp_path / "small.onnx", 2)
    _large(tmp_path / "large.onnx", megabytes=96)
    (tmp_path / "large.toml").write_text("preload = false\nmax_batch = 1\ngrain_ms = 0.0001\nmax_pieces = 4\n")
    x = {"x": np.ones((1, 2048), np.float32)}
    with ServerProcess(str(tmp_path), "--grpc-port=-1") as server:
        at = server.url.removeprefix("http://")
        infer(at, "small", {"x": np.ones((1, 4), np.float32)})
        infer(at, "large", x)
        held = _resident_bytes(server.pid)
        assert unload_model(at, "large") == 200
        assert state(at)["memory"]["used_bytes"] < 1 << 20
        until(lambda: held - _resident_bytes(server.pid) > 70 << 20, "its memory returns")


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _large(path: Path, megabytes: int) -> None:
    count = megabytes // 16
    weights = [
        numpy_helper.from_array(np.full((2048, 2048), (i + 1) / 4096, np.float32), f"w{i}") for i in range(count)
    ]
    names = ["x", *(f"h{i}" for i in range(count - 1)), "y"]
    nodes = [helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]]) for i in range(count)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2048]) for name in "xy"]
    live.save(helper.make_graph(nodes, "large", ends[:1], ends[1:], weights), path)


# What is broken


@pytest.fixture(scope="module")
def flawed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One sound model among bad ones."""
    place = tmp_path_factory.mktemp("flawed")
    for name in ("sound", "vanishing", "misconfigured", "unshaped"):
        multiplying_model(place / f"{name}.onnx", 3)
    (place / "broken.onnx").write_bytes(b"nonsense")
    (place / "vanishing.toml").write_text("preload = false\n")
    (place / "misconfigured.toml").write_text("priority = \n")
    (place / "unshaped.toml").write_text("shapes = { z = [1] }\n")
    return place


def test_bad_models_disturb_only_their_own_requests(flawed: Path) -> None:
    x = {"x": np.ones((1, 4), np.float32)}
    with live.running(flawed, grpc_port=None, ready_when="any") as server:
        (flawed / "vanishing.onnx").unlink()
        assert send(server, "GET", "/v2/health/ready").status == 200
        with Clients(2, lambda seed: infer(server, "sound", x)) as clients:
            for name, word in {
                "broken": "cannot be loaded",
                "vanishing": "vanishing",
                "misconfigured": "TOML",
                "unshaped": "'z'",
            }.items():
                with pytest.raises(Refused, match=word) as refused:
                    infer(server, name, x)
                assert refused.value.status in (404, 503), name
                assert send(server, "GET", f"/v2/models/{name}/ready").status != 200, name
            clients.served(10)
        assert clients.problems == [] and set(clients.statuses) == {200}
        rows = {row["name"]: row for row in send(server, "POST", "/v2/repository/index").json()}
        assert rows["sound"]["state"] == "READY"
        for name in ("broken", "misconfigured", "unshaped"):
            assert rows[name]["state"] == "UNAVAILABLE" and rows[name]["reason"], name


def test_a_server_whose_cache_is_gone_loads_models_all_the_same(tmp_path: Path) -> None:
    """A cache only saves time: without it, models are loaded all the same."""
    repository, cache = tmp_path / "models", tmp_path / "cache"
    multiplying_model(repository / "first.onnx", 2)
    multiplying_model(repository / "second.onnx", 3)
    (repository / "second.toml").write_text("preload = false\n")
    x = {"x": np.ones((1, 4), np.float32)}
    with live.running(repository, grpc_port=None, cache=cache) as server:
        shutil.rmtree(cache)
        cache.write_text("a file where a folder was")
        assert infer(server, "second", x)["y"].tolist() == [[3, 3, 3, 3]]
        assert infer(server, "first", x)["y"].tolist() == [[2, 2, 2, 2]]


def test_contents_that_cannot_be_computed_fail_alone(slow: Path, tmp_path: Path) -> None:
    """Good and bad requests share a batch; the bad ones hear of it, the good ones have their rows."""
    reference = session(lookup(tmp_path / "lookup.onnx"))
    with live.running(slow, tmp_path, grpc_port=None, policy="edf", late="keep") as server:
        since = state(server)["now_s"]
        rows = {number: {"row": np.array([number], np.int64)} for number in (0, 3, 99, 5, -77, 7)}
        with occupied(server):
            asked = {
                number: Background(lambda each=each: infer(server, "lookup", each)) for number, each in rows.items()
            }
            until(lambda: model_state(server, "lookup")["queued"] == len(rows), "all wait")
        for number, each in asked.items():
            if 0 <= number < 8:
                assert_same_bits(each.result(), run_session(reference, rows[number]))
                continue
            with pytest.raises(Refused, match="lookup") as refused:
                each.result()
            assert refused.value.status == 400
        spans = send(server, "GET", f"/weft/timeline?since={since}").json()["spans"]
        assert ("failed", len(rows)) in {(span["outcome"], span["batch"]) for span in spans}
        assert model_state(server, "lookup")["failures"] == {"bad_request": 2}


# Beginning and ending


def test_it_lives_at_once_and_is_ready_when_it_is_warm(slow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, seen_cold = library.Library._open, threading.Event()

    def prepare_later(*args: Any) -> Any:
        assert seen_cold.wait(live.PATIENCE_S)
        return prepare(*args)

    monkeypatch.setattr(library.Library, "_open", prepare_later)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = Server(ServerConfig(models=(str(slow),), http_port=0, grpc_port=None))
    try:
        starting = asyncio.run_coroutine_threadsafe(server.start(), loop)
        port = until(lambda: server.http_port, "it listens")
        address = f"127.0.0.1:{port}"
        assert send(address, "GET", "/v2/health/live").status == 200
        assert send(address, "GET", "/v2/health/ready").status == 503
        assert send(address, "GET", "/v2/models/chain/ready").status == 503
        x = {"x": np.ones((1, CHAIN_WIDTH), np.float32)}
        early = Background(lambda: infer(address, "chain", x))
        seen_cold.set()
        seen = {(503, False)}
        while not starting.done():
            assert send(address, "GET", "/v2/health/live").status == 200
            status = send(address, "GET", "/v2/health/ready").status
            seen.add((status, server.service.library.find("chain").served is not None))
        starting.result()
        assert (200, False) not in seen
        assert send(address, "GET", "/v2/health/ready").status == 200
        assert_same_bits(early.result(), run_session(session(slow / "chain.onnx"), x))
    finally:
        seen_cold.set()
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(live.PATIENCE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_more_shapes_than_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.serving.streams.STREAMS", 128)
    multiplying_model(tmp_path / "times.onnx", 2)
    with live.running(tmp_path, grpc_port=None) as server:
        connection = http.client.HTTPConnection(server.address, timeout=live.PATIENCE_S)
        told = []
        for width in range(1, 200):
            body, headers = packed({"x": np.full((1, width), 3, np.float32)})
            connection.request("POST", "/v2/models/times/infer", body, headers)
            with connection.getresponse() as answer:
                assert answer.status == 200
                assert len(answer.read()) > 4 * width
            if width in (160, 199):
                told.append(re.sub(rb"null|[-+.e\d]+", b"0", send(server, "GET", "/weft/state").body))
        connection.close()
        dispatcher = server.server.service.dispatcher
        assert len(dispatcher.streams) <= 128
        most = model_state(server, "times")["mean_batch"] and max(
            s.max_batch for s in dispatcher.streams._by_use.values()
        )
        assert len(dispatcher.streams.programs) <= 129 * most
        assert told[0] == told[1], "what it tells grows with nothing but its numbers"


def test_told_to_stop_it_answers_what_it_took(slow: Path) -> None:
    """Requests that run and wait get their results; who asks while it goes down is told so; it ends well."""
    x = some_input()
    wanted = run_session(session(slow / "chain.onnx"), x)
    with serve_process(slow, "--drain-s", str(live.PATIENCE_S)) as (server, address):
        asked = [Background(lambda: infer(address, "chain", x)) for _ in range(6)]

        def taken() -> bool:
            told = send(address, "GET", "/weft/state").json()
            return bool(told["in_flight"] + told["totals"]["success"] >= len(asked))

        def knock(seed: int) -> None:
            """Ask again and again; once it is told to stop, a closed door is a fair answer too."""
            try:
                infer(address, "chain", {"x": x["x"][:1]})
            except (ConnectionError, http.client.RemoteDisconnected):
                assert server.returncode is not None or told_to_stop.is_set()

        told_to_stop = threading.Event()
        until(taken, "all are taken")
        with Clients(2, knock) as clients:
            told_to_stop.set()
            server.send_signal(signal.SIGTERM)
            for each in asked:
                assert_same_bits(each.result(), wanted)
            _, errors = server.communicate(timeout=live.PATIENCE_S)
        assert clients.problems == []
        assert set(clients.statuses) <= {200, 503}
        assert server.returncode == 0, errors
        assert "Traceback" not in errors


def test_told_to_stop_before_it_is_ready_it_ends(slow: Path) -> None:
    command = [sys.executable, "-c", "from weft.cli.main import main; main()", "serve", str(slow), "--http-port", "0"]
    with subprocess.Popen([*command, "--grpc-port", "-1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as server:
        assert server.stdout is not None and b"loading" in server.stdout.readline()
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=live.PATIENCE_S)
        assert server.returncode == 0, errors
        assert b"Traceback" not in errors


def test_a_stop_of_a_server_in_process_answers_what_waits(slow: Path) -> None:
    x = some_input()
    wanted = run_session(session(slow / "chain.onnx"), x)
    with live.running(slow, grpc_port=None) as server:
        asked = [Background(lambda: infer(server, "chain", x)) for _ in range(4)]
        until(lambda: state(server)["in_flight"] + state(server)["totals"]["success"] >= 4, "all are taken")
    for each in asked:
        assert_same_bits(each.result(), wanted)
