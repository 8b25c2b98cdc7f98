"""Serve first, learn later: a model answers as soon as it can be run, and improves beside its requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.serving import live
from tests.serving.chain import chain, some_input
from tests.serving.factors import multiplying_model, served_factor
from tests.support.concurrency import Background, until
from tests.support.endless import ENDLESS, loop_input, loop_model
from tests.support.inference import infer, load_model, model_state, send, state, unload_model
from tests.support.references import assert_same_bits, run_session, session
from weft.base.errors import ModelError, NotLearned
from weft.runtime.onnxruntime_cpu.whole import REMARK
from weft.serving import learning
from weft.serving.config import ServerConfig
from weft.serving.library import Library
from weft.serving.server import Server


@pytest.fixture
def may_learn(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is learned before this is set."""
    learned, event = Library._learn, threading.Event()

    def later(self: Library, *arguments: Any) -> Any:
        assert event.wait(live.PATIENCE_S)
        return learned(self, *arguments)

    monkeypatch.setattr(Library, "_learn", later)
    yield event
    event.set()


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chain(tmp_path_factory.mktemp("slow") / "chain.onnx").parent


def settle(server: live.Live) -> None:
    """Wait until nothing is being learned."""
    server.call(server.server.service.library.learner.wait_until_idle())


def learners() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "learner"]


def test_a_model_answers_whole_and_is_replaced_when_it_is_learned(slow: Path, may_learn: threading.Event) -> None:
    reference, few = session(slow / "chain.onnx"), {"x": some_input()["x"][:2]}
    with live.running(slow, grpc_port=None, learn_first=False, lanes=2) as server:
        assert send(server, "GET", "/v2/health/ready").status == 200
        assert (model_state(server, "chain")["segments"], model_state(server, "chain")["message"]) == (
            1,
            learning.REMARK,
        )
        assert_same_bits(infer(server, "chain", few), run_session(reference, few))
        with live.Gate(server, "chain", rows=1, foreseen=False) as gate:  # to a whole model, a request is a row
            running = Background(lambda: infer(server, "chain", some_input()))
            gate.wait()
            may_learn.set()
            settle(server)
            assert model_state(server, "chain")["segments"] > 1 and model_state(server, "chain")["message"] == ""
            assert_same_bits(infer(server, "chain", few), run_session(reference, few))
            both = state(server)["memory"]["used_bytes"]
        assert_same_bits(running.result(), run_session(reference, some_input()))
        until(lambda: state(server)["memory"]["used_bytes"] < both, "the whole one has left")
        told = model_state(server, "chain")
        assert (told["requests"], told["failures"]) == (3, {})


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_that_was_compiled_for_some_batch_sizes_is_learned_once_more(
    fails: bool, slow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned, turns, may_finish = Library._learn, list[bool](), threading.Event()

    def in_two_turns(self: Library, entry: Any, learn_s: float, is_first: bool) -> Any:
        turns.append(is_first)
        assert is_first or may_finish.wait(live.PATIENCE_S)
        if fails and not is_first:
            raise ModelError("the disk is full")
        body = learned(self, entry, learn_s, is_first)
        if is_first:
            body.timing = body.loaded.timing = replace(body.timing, learned=False, engine="compiled")
        return body

    monkeypatch.setattr(Library, "_learn", in_two_turns)
    with live.running(slow, grpc_port=None, learn_first=False) as server:
        until(lambda: model_state(server, "chain")["message"] == learning.COMPILED_REMARK, "the first turn")
        infer(server, "chain", some_input())
        may_finish.set()
        settle(server)
        message = "is not compiled for more batch sizes: the disk is full" if fails else ""
        assert turns == [True, False] and model_state(server, "chain")["message"] == message
        infer(server, "chain", some_input())


def test_requests_that_come_while_models_are_swapped_are_all_answered(tmp_path: Path) -> None:
    multiplying_model(tmp_path / "times.onnx", 1)
    from tests.support.concurrency import Clients

    with live.running(tmp_path, grpc_port=None, learn_first=False) as server:
        with Clients(4, lambda seed: served_factor(server, seed)) as clients:
            for factor in (2.0, 3.0, 4.0):
                clients.served(10)
                multiplying_model(tmp_path / "times.onnx", factor)
                assert load_model(server, "times") == 200
                settle(server)
            clients.served(10)
        assert clients.problems == [] and set(clients.statuses) == {200}
        assert model_state(server, "times")["requests"] == clients.statuses[200]


def test_a_setting_that_cannot_hold_is_told_and_the_model_served_all_the_same(tmp_path: Path) -> None:
    live.heavy(tmp_path / "fixed.onnx", layers=2, width=16, rows=4)
    (tmp_path / "fixed.toml").write_text("max_batch = 4\n")
    with live.running(tmp_path, grpc_port=None, learn_first=False) as server:
        settle(server)
        told = model_state(server, "fixed")
        assert told["state"] == "ready" and told["message"].startswith("stays whole: max_batch is 4, but the model")
        assert str(tmp_path) not in told["message"]
        assert send(server, "GET", "/v2/health/ready").status == 200


def test_a_model_that_cannot_be_learned_is_served_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_learn: threading.Event
) -> None:
    def fails(self: Library, entry: Any, learn_s: float, is_first: bool) -> Any:
        raise ModelError(f"{entry.path}: is too large")

    monkeypatch.setattr(Library, "_learn", fails)
    multiplying_model(tmp_path / "times.onnx", 5)
    with live.running(tmp_path, grpc_port=None, learn_first=False) as server:
        settle(server)
        assert model_state(server, "times")["message"] == "stays whole: is too large"
        assert served_factor(server, 1) == 5


def test_learning_that_never_ends_holds_nobody_not_even_the_end(tmp_path: Path) -> None:
    loop_model(tmp_path / "endless.onnx")
    (tmp_path / "endless.toml").write_text(f"values = {{ turns = {float(ENDLESS)} }}\n")
    multiplying_model(tmp_path / "times.onnx", 2)
    with live.running(tmp_path, grpc_port=None, learn_first=False) as server:
        assert until(learners, "it is being learned")
        assert served_factor(server, 1) == 2
        multiplying_model(tmp_path / "times.onnx", 3)
        assert load_model(server, "times") == 200
        assert served_factor(server, 1) == 3
        assert infer(server, "endless", loop_input(3))
        assert learners()
    until(lambda: not learners(), "it was stopped")


def test_one_that_takes_long_comes_again_when_all_others_had_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, both_wait = list[tuple[str, float]](), threading.Event()

    def learned(self: Library, entry: Any, learn_s: float, is_first: bool) -> Any:
        assert both_wait.wait(live.PATIENCE_S)
        turns.append((entry.name, learn_s))
        raise NotLearned("takes longer") if entry.name == "a" else ModelError("cannot be")

    monkeypatch.setattr(Library, "_learn", learned)
    for name in ("a", "b"):
        multiplying_model(tmp_path / f"{name}.onnx", 2)
    with live.running(tmp_path, grpc_port=None, learn_first=False, learn_s=60.0) as server:
        both_wait.set()
        settle(server)
        assert model_state(server, "a")["message"] == "stays whole: takes longer"
    assert sorted(turns[:2]) == [("a", 10.0), ("b", 10.0)] and turns[2:] == [("a", 60.0)]


def test_learning_that_takes_too_long_leaves_the_model_whole(tmp_path: Path) -> None:
    loop_model(tmp_path / "endless.onnx")
    (tmp_path / "endless.toml").write_text(f"values = {{ turns = {float(ENDLESS)} }}\n")
    with live.running(tmp_path, grpc_port=None, learn_first=False, learn_s=0.1) as server:
        settle(server)
        told = model_state(server, "endless")["message"]
        assert told.startswith("stays whole: was not cut and measured within 0.1 s")
        assert infer(server, "endless", loop_input(3))


def test_nothing_is_learned_where_nothing_shall_be(slow: Path) -> None:
    with live.running(slow, grpc_port=None, learn_s=0.0) as server:
        settle(server)
        assert (model_state(server, "chain")["segments"], model_state(server, "chain")["message"]) == (1, REMARK)


def test_where_two_copies_have_no_room_it_is_learned_first(slow: Path) -> None:
    budget = round((slow / "chain.onnx").stat().st_size * 1.5)
    with live.running(slow, grpc_port=None, learn_first=False, memory_budget_bytes=budget) as server:
        assert model_state(server, "chain")["segments"] > 1


def test_what_has_no_room_beside_others_is_learned_when_they_leave(tmp_path: Path) -> None:
    for name in ("a", "b"):
        live.heavy(tmp_path / f"{name}.onnx", layers=6, width=128, rows=1)
        (tmp_path / f"{name}.toml").write_text("grain_ms = 0.0001\nmax_pieces = 3\nmax_batch = 1\n")
    budget = round((tmp_path / "a.onnx").stat().st_size * 2.5)
    with live.running(tmp_path, grpc_port=None, learn_first=False, memory_budget_bytes=budget) as server:
        settle(server)
        assert [model_state(server, name)["segments"] for name in ("a", "b")] == [1, 1]
        assert unload_model(server, "b") == 200
        until(lambda: model_state(server, "a")["segments"] > 1, "it is learned")
        assert server.server.service.library.evictions == 0


def test_a_file_that_changed_meanwhile_is_not_met_before_it_is_loaded(
    tmp_path: Path, may_learn: threading.Event
) -> None:
    multiplying_model(tmp_path / "times.onnx", 1)
    with live.running(tmp_path, grpc_port=None, learn_first=False) as server:
        multiplying_model(tmp_path / "times.onnx", 2)
        may_learn.set()
        settle(server)
        assert served_factor(server, 1) == 1
        assert model_state(server, "times")["message"] == "stays whole: its file has changed since; load it again"
        assert load_model(server, "times") == 200
        settle(server)
        assert served_factor(server, 1) == 2


def test_what_was_learned_of_a_model_that_left_is_dropped(tmp_path: Path, may_learn: threading.Event) -> None:
    multiplying_model(tmp_path / "times.onnx", 1)
    with live.running(tmp_path, grpc_port=None, learn_first=False) as server:
        assert unload_model(server, "times") == 200
        may_learn.set()
        settle(server)
        assert model_state(server, "times")["state"] == "unloaded"
        assert state(server)["memory"]["used_bytes"] == 0


def test_with_a_cache_it_is_learned_once(slow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live.running(slow, grpc_port=None, learn_first=False, cache=tmp_path / "cache") as server:
        settle(server)
        pieces = model_state(server, "chain")["segments"]
        assert pieces > 1
    monkeypatch.setattr(Library, "_learn", None)
    with live.running(slow, grpc_port=None, learn_first=False, cache=tmp_path / "cache") as server:
        assert model_state(server, "chain")["segments"] == pieces


# Loads


def test_a_load_that_never_ends_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stuck", "times"):
        multiplying_model(tmp_path / f"{name}.onnx", 2)
        (tmp_path / f"{name}.toml").write_text("preload = false\n")
    opened, begun, may_go_on = Library._open, threading.Event(), threading.Event()

    def held(self: Library, entry: Any) -> Any:
        if entry.name == "stuck":
            begun.set()
            assert may_go_on.wait(live.PATIENCE_S)
        return opened(self, entry)

    monkeypatch.setattr(Library, "_open", held)
    with live.running(tmp_path, grpc_port=None) as server:
        x = {"x": some_input()["x"][:1, :4]}
        waiting = Background(lambda: infer(server, "stuck", x))
        assert begun.wait(live.PATIENCE_S)
        assert served_factor(server, 1) == 2
        assert model_state(server, "stuck")["state"] == "loading"
        may_go_on.set()
        assert (waiting.result()["y"] == 2 * x["x"]).all()


def test_a_server_loads_several_models_at_once_and_names_them_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a", "b", "c", "d"]
    for name in names:
        multiplying_model(tmp_path / f"{name}.onnx", 2)
    opened, together, said = Library._open, threading.Barrier(len(names)), list[str]()

    def all_at_once(self: Library, entry: Any) -> Any:
        together.wait(live.PATIENCE_S)
        return opened(self, entry)

    async def start() -> None:
        server = Server(ServerConfig(models=(str(tmp_path),), http_port=0, grpc_port=None, lanes=1))
        await server.start(said.append)
        assert server.service.is_ready()
        await server.stop()

    monkeypatch.setattr(Library, "_open", all_at_once)
    asyncio.run(start())
    assert said == names
