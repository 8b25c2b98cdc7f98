"""Servers that are replaced, and a gate that is killed, while clients send."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections import Counter

from tests.gates.cases import PAIR, Script, answering, asked, gate_process, gated, infer, known, scripted
from tests.serving import live
from tests.support.concurrency import until

OK = answering(200)


def go_on(statuses: Counter[int]) -> None:
    """Until there are some more answers."""
    before = statuses.total()
    until(lambda: statuses.total() > before + 10)


def test_a_server_that_is_not_listed_any_more_answers_what_it_has():
    waits = scripted(lambda exchange: None, OK)
    with waits as (left, right), gated(PAIR, {"left": [left.url]}, tries=1) as gate:
        found = []
        client = threading.Thread(target=lambda: found.append(infer(gate)))
        client.start()
        assert left.came.wait(live.PATIENCE_S)
        servers = known(PAIR, {"right": [right.url]})
        gate.set_servers(servers)
        until(lambda: all(each["up"] == (each["machine"] == "right") for each in gate.status()["servers"]))
        assert infer(gate)[2]["Weft-Machine"] == "right" and len(gate.status()["servers"]) == 2
        left.answer(left.asked[0], OK(left.asked[0]))
        client.join()
        gate.set_servers(servers)
        assert found[0][0] == 200 and found[0][2]["Weft-Machine"] == "left"
        assert [each["machine"] for each in gate.status()["servers"]] == ["right"]


def test_servers_are_replaced_one_after_another_and_no_request_is_lost_or_tried_again(tmp_path):
    file, made = live.mlp(tmp_path / "net.onnx"), {"api_key": "inner", "grpc_port": None}
    with contextlib.ExitStack() as stack:
        ends = {name: stack.enter_context(contextlib.ExitStack()) for name in ("left", "right")}
        urls = {name: [end.enter_context(live.running(file, **made)).url] for name, end in ends.items()}
        gate = stack.enter_context(gated(PAIR, urls, key="inner"))
        ended, statuses = threading.Event(), Counter[int]()

        def send() -> None:
            while not ended.is_set():
                statuses[infer(gate)[0]] += 1

        clients = [threading.Thread(target=send) for _ in range(3)]
        for client in clients:
            client.start()
        for name, old in ends.items():
            new = stack.enter_context(live.running(file, **made)).url
            gate.set_servers(known(PAIR, urls | {name: [*urls[name], new]}))
            until(lambda: all(server["up"] for server in gate.status()["servers"]))
            urls[name] = [new]
            until(lambda: gate.set_servers(known(PAIR, urls)) or len(gate.status()["servers"]) == 2)
            old.close()
            go_on(statuses)
        ended.set()
        for client in clients:
            client.join()
        assert set(statuses) == {200} and not gate.status()["counts"]


def test_of_a_gate_that_is_killed_only_what_was_there_is_lost_and_another_gate_answers_it():
    waits: Script = lambda exchange: None  # noqa: E731
    with scripted(waits, waits) as (left, right):
        urls = {"left": [left.url], "right": [right.url]}
        with gate_process(PAIR, urls) as (process, killed), gate_process(PAIR, urls) as (_, other):
            found: dict[int, list[int]] = {killed: [], other: []}

            def send(port: int) -> None:
                try:
                    found[port].append(asked(port, "/v2/models/net/infer", {})[0])
                except (OSError, http.client.HTTPException):
                    found[port].append(0)

            clients = [threading.Thread(target=send, args=(port,)) for port in (killed, other) for _ in range(3)]
            for client in clients:
                client.start()
            until(lambda: len(left.asked) + len(right.asked) == 6)
            process.kill()
            until(lambda: len(found[killed]) == 3)
            assert found == {killed: [0] * 3, other: []}
            until(lambda: left.gone.is_set() or right.gone.is_set())  # nothing is computed for nobody
            for server in (left, right):
                server.script = OK
                for exchange in list(server.asked):
                    server.answer(exchange, OK(exchange))
            for _ in range(3):
                send(other)
            for client in clients:
                client.join()
            assert found[other] == [200] * 6
