"""Gates between clients and servers: routing, deadlines, second tries, refusals, servers that are lost."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import threading

import numpy as np
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.gates.cases import PAIR, answering, ask, gated, infer, known, placement, scripted
from tests.serving import live
from tests.serving.clients import certificate
from tests.support.commands import refused, run
from tests.support.concurrency import until
from weft.serving.telemetry import OpenTelemetry
from weft_cluster.gates import board, forward
from weft_cluster.gates.gate import FAMILIES

OK, BUSY, LATE = answering(200), answering(503, '{"error": "full"}'), answering(504, '{"error": "late"}')


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory):
    file = live.mlp(tmp_path_factory.mktemp("models") / "net.onnx")
    made = {"api_key": "inner", "grpc_port": None}
    with live.running(file, **made) as left, live.running(file, **made) as right:
        yield left, right


def test_answers_come_through_as_they_are_and_from_every_machine(servers):
    left, right = servers
    with gated(PAIR, {"left": [left.url], "right": [right.url]}, key="inner") as gate:
        row = np.random.default_rng(0).normal(size=64).astype(np.float32).tolist()
        found = [infer(gate, rows=[row]) for _ in range(8)]
        direct = infer_direct(left, row)
        assert all(status == 200 and answer["outputs"] == direct["outputs"] for status, answer, _ in found)
        until(
            lambda: all(server["ended"].get("ok") for server in gate.status()["servers"]) or found.append(infer(gate))
        )
        assert {headers["Weft-Machine"] for *_, headers in found} == {"left", "right"}
        assert all(headers["Weft-Estimate"] is None for *_, headers in found)
        told = {server["machine"]: server for server in gate.status()["servers"]}
        assert sum(server["ended"]["ok"] for server in told.values()) == len(found)
        assert not any(server["in_flight"] for server in told.values())


def test_binary_tensors_come_through(servers):
    left, right = servers
    head = json.dumps({
        "inputs": [{"name": "x", "shape": [1, 64], "datatype": "FP32", "parameters": {"binary_data_size": 256}}],
        "parameters": {"binary_data_output": True, "timeout": 600_000_000},
    }).encode()  # fmt: skip
    sent = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
    with gated(PAIR, {"left": [left.url], "right": [right.url]}, key="inner") as gate:
        status, body, headers = ask(gate, "/v2/models/net/infer", head + bytes(256), **sent)
        assert status == 200 and headers["Content-Type"] == "application/octet-stream"
        length = int(headers["Inference-Header-Content-Length"])
        assert len(body) - length == 40


def infer_direct(server: live.Live, row: list[float]) -> dict:
    connection = http.client.HTTPConnection(server.address)
    with contextlib.closing(connection):
        return asked_directly(connection, row)


def asked_directly(connection: http.client.HTTPConnection, row: list[float]) -> dict:
    inputs = [{"name": "x", "shape": [1, 64], "datatype": "FP32", "data": row}]
    connection.request(
        "POST", "/v2/models/net/infer", json.dumps({"inputs": inputs}), {"Authorization": "Bearer inner"}
    )
    return json.loads(connection.getresponse().read())


def test_what_is_no_inference_is_told_by_the_gate_or_by_a_server(servers):
    left, _ = servers
    with gated(PAIR, {"left": [left.url]}, key="inner") as gate:
        assert ask(gate, "/v2/health/live")[0] == ask(gate, "/v2/health/ready")[0] == 200
        assert "binary_tensor_data" in ask(gate, "/v2")[1]["extensions"]
        assert ask(gate, "/v2/models/net")[1]["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 64]}]
        assert ask(gate, "/v2/models/net", method="HEAD")[0] == 200
        assert [row["state"] for row in ask(gate, "/v2/repository/index", {})[1]] == ["READY"]
        status, answer, _ = infer(gate, "nett")
        assert status == 404 and "did you mean net?" in answer["error"]
        assert ask(gate, "/v2/repository/models/net/unload", {})[0] == 403
        assert ask(gate, "/nothing")[0] == 404
        status, answer, _ = infer(gate, timeout=-1)
        assert status == 400 and "timeout" in answer["error"]


def test_a_server_counts_a_deadline_from_when_the_client_sent_the_request(servers):
    left, _ = servers
    inputs = [{"name": "x", "shape": [1, 64], "datatype": "FP32", "data": [0.0] * 64}]
    body = json.dumps({"inputs": inputs, "parameters": {"timeout": 600_000_000}})
    answers = []
    with contextlib.closing(http.client.HTTPConnection(left.address)) as connection:
        for age in ("0", "599999999", "600000000", "-1"):
            headers = {"Authorization": "Bearer inner", "Weft-Age-Us": age}
            connection.request("POST", "/v2/models/net/infer", body, headers)
            answer = connection.getresponse()
            answers.append((answer.status, answer.headers["Weft-Estimate"] is not None))
            answer.read()
    assert answers == [(200, True), (504, True), (504, True), (400, False)]


def test_the_time_that_a_gate_and_those_before_it_had_a_request_goes_on_with_it():
    with scripted(OK) as (server,), gated(PAIR, {"left": [server.url]}) as gate:
        infer(gate)
        body = {"inputs": [], "parameters": {"timeout": 600_000_000}}
        assert ask(gate, "/v2/models/net/infer", body, **{"Weft-Age-Us": "5000"})[0] == 200
        ages = [int(each.headers["weft-age-us"]) for each in server.asked]
        assert ages[0] >= 0 and ages[1] >= 5000
        assert json.loads(server.asked[1].body) == body


def test_a_refused_request_goes_to_another_server_once():
    with scripted(BUSY, OK) as (left, right), gated(PAIR, {"left": [left.url], "right": [right.url]}) as gate:
        answers = [infer(gate) for _ in range(6)]
        assert {(status, headers["Weft-Machine"]) for status, _, headers in answers} == {(200, "right")}
        assert len(right.asked) == 6 and 1 <= len(left.asked) == gate.status()["counts"]["tried_again"]
        right.script = BUSY
        status, answer, _ = infer(gate)
        assert (status, answer) == (503, {"error": "full"})
        assert len(left.asked) + len(right.asked) == 6 + 2 + gate.status()["counts"]["tried_again"] - 1


def test_a_late_request_is_not_tried_again_where_another_would_be_late_as_well(monkeypatch):
    monkeypatch.setattr(board, "BELIEVED_NS", 10**15)
    late = answering(504, '{"error": "late"}', own_us=10**9)
    with scripted(late, late) as (left, right), gated(PAIR, {"left": [left.url], "right": [right.url]}) as gate:
        assert infer(gate, timeout=500_000_000)[0] == 504
        assert len(left.asked) + len(right.asked) == 2  # the second had not said anything yet
        status, answer, _ = infer(gate, timeout=500_000_000)
        assert status == 504 and "on any machine" in answer["error"]
        assert len(left.asked) + len(right.asked) == 2 and gate.status()["counts"]["unmeetable"] == 1
        assert infer(gate, weft_slo_ms=1)[0] == 504  # a deadline that is not strict keeps nobody out
        assert len(left.asked) + len(right.asked) == 3
        assert gate.status()["refused"] == {"net": 3}


def test_a_model_s_own_deadline_counts_at_the_gate(monkeypatch):
    monkeypatch.setattr(board, "BELIEVED_NS", 10**15)
    with scripted(answering(200, own_us=10**9)) as (server,):
        server.terms = {"weft_timeout_ms": {"string_value": "500.0"}}
        with gated(PAIR, {"left": [server.url]}) as gate:
            assert infer(gate)[0] == 200
            assert infer(gate)[0] == 504 and len(server.asked) == 1


def test_a_request_is_refused_at_once_for_work_that_stands_before_it(servers, monkeypatch):
    monkeypatch.setattr(board, "BELIEVED_NS", 10**15)
    left, _ = servers
    with gated(PAIR, {"left": [left.url]}, key="inner") as gate, live.Gate(left, "net", 3) as held:
        waiting = threading.Thread(target=infer, args=(gate, "net", [[0.0] * 64] * 3))
        waiting.start()
        held.wait()
        first = infer(gate, timeout=30_000_000)
        second = infer(gate, timeout=30_000_000)
        held.open()
        waiting.join()
    assert first[0] == second[0] == 504
    assert "work stand before it" in first[1]["error"] and "on any machine" in second[1]["error"]


def test_requests_that_are_lost_with_a_server_are_computed_by_another():
    with (
        scripted(lambda exchange: None, lambda exchange: None) as (left, right),
        gated(PAIR, {"left": [left.url], "right": [right.url]}) as gate,
    ):
        found = []
        clients = [threading.Thread(target=lambda: found.append(infer(gate))) for _ in range(6)]
        for client in clients:
            client.start()
        until(lambda: len(left.asked) + len(right.asked) == 6)
        kept, right.script = list(right.asked), OK
        left.end()
        until(lambda: not gate.status()["servers"][0]["up"])
        assert infer(gate)[0] == 200
        for exchange in kept:
            right.answer(exchange, OK(exchange))
        for client in clients:
            client.join()
        assert [status for status, *_ in found] == [200] * 6
        lost = gate.status()["servers"][0]["ended"]["lost"]
        assert 0 < lost == len(left.asked) and gate.status()["counts"]["tried_again"] == lost


def test_a_server_that_is_about_to_end_answers_what_it_has():
    with scripted(lambda exchange: None) as (server,), gated(PAIR, {"left": [server.url]}) as gate:
        found = []
        client = threading.Thread(target=lambda: found.append(infer(gate)))
        client.start()
        assert server.came.wait(live.PATIENCE_S)
        server.ready = 503
        until(lambda: not gate.status()["servers"][0]["up"])
        assert infer(gate)[0] == 503 and len(server.asked) == 1
        server.answer(server.asked[0], OK(server.asked[0]))
        client.join()
        assert found[0][0] == 200


def test_a_server_that_is_only_slow_to_say_so_is_not_given_up_while_it_answers(monkeypatch):
    monkeypatch.setattr(forward, "SILENT_NS", 10**15)
    with scripted(OK) as (server,), gated(PAIR, {"left": [server.url]}) as gate:
        monkeypatch.setattr(forward, "PATIENCE_S", 0.001)
        server.ready, seen = 0, server.looks
        until(lambda: server.looks > seen + 2)
        assert gate.status()["servers"][0]["up"] and infer(gate)[0] == 200
        monkeypatch.setattr(forward, "SILENT_NS", 0)
        until(lambda: not gate.status()["servers"][0]["up"])


def test_with_nobody_left_a_request_is_told_so():
    with scripted(OK) as (server,), gated(PAIR, {"left": [server.url]}) as gate:
        assert infer(gate)[0] == 200
        server.end()
        until(lambda: infer(gate)[0] == 503)
        until(lambda: not gate.status()["servers"][0]["up"])
        status, answer, headers = infer(gate)
        assert status == 503 and "no machine that has it" in answer["error"] and headers["Retry-After"] == "1"
        status, answer, _ = ask(gate, "/v2/health/ready")
        assert status == 503 and "net" in answer["reason"]


def test_servers_come_and_go():
    with scripted(OK, OK) as (left, right), gated(PAIR, {"left": [left.url]}) as gate:
        gate.set_servers(known(PAIR, {"right": [right.url], "left": [left.url]}))
        until(lambda: all(server["up"] for server in gate.status()["servers"]))
        gate.set_servers(known(PAIR, {"right": [right.url]}))
        assert {infer(gate)[2]["Weft-Machine"] for _ in range(4)} == {"right"}


def test_a_client_that_leaves_is_left_by_the_gate():
    with scripted(lambda exchange: None) as (server,), gated(PAIR, {"left": [server.url]}) as gate:
        connection = http.client.HTTPConnection("127.0.0.1", gate.gate.port)
        connection.request("POST", "/v2/models/net/infer", b"{}")
        assert server.came.wait(live.PATIENCE_S)
        connection.close()
        assert server.gone.wait(live.PATIENCE_S)
        assert gate.status()["servers"][0]["ended"] == {"left": 1}


def test_a_server_that_says_nothing_does_not_keep_a_strict_request():
    with scripted(lambda exchange: None) as (server,), gated(PAIR, {"left": [server.url]}) as gate:
        status, answer, _ = infer(gate, timeout=50_000)
        assert status == 504 and "deadline passed" in answer["error"]
        assert server.gone.wait(live.PATIENCE_S)


def test_keys_of_clients_are_the_gate_s_and_those_of_servers_their_own(servers):
    left, _ = servers
    with scripted(OK) as (server,), gated(PAIR, {"left": [server.url]}, key="inner", api_key="outer") as gate:
        assert infer(gate)[0] == ask(gate, "/metrics")[0] == 401
        assert ask(gate, "/v2/models/net/infer", {}, Authorization="Bearer outer")[0] == 200
        assert server.asked[0].headers["authorization"] == "Bearer inner"
    with gated(PAIR, {"left": [left.url]}, key="inner") as gate:
        gate.gate.links[0].key = "wrong"
        status, answer, _ = infer(gate)
        assert status == 500 and "this gate's key" in answer["error"]


KEYS = """
[[keys]]
name = "batch"
key = "low"
priority = 3
top_priority = 2
[[keys]]
name = "any"
key = "high"
"""


def test_what_a_key_gives_its_requests_holds_at_the_server(servers, tmp_path):
    left, _ = servers
    (tmp_path / "keys.toml").write_text(KEYS)
    weights = []
    with gated(PAIR, {"left": [left.url]}, key="inner", keys_file=tmp_path / "keys.toml") as gate:
        with pytest.MonkeyPatch.context() as patch:
            service = left.server.service
            made = service.ticket
            patch.setattr(service, "ticket", lambda *given: weights.append(made(*given)) or weights[-1])
            tensor = {"name": "x", "datatype": "FP32", "shape": [1, 64], "data": [0.0] * 64}
            for key, stated in (("low", {}), ("low", {"priority": 1}), ("high", {"priority": 1}), ("high", {})):
                body = {"inputs": [tensor], "parameters": stated}
                assert ask(gate, "/v2/models/net/infer", body, Authorization=f"Bearer {key}")[0] == 200
            limited = {"Authorization": "Bearer high", "Weft-Priority": "0 3"}  # another gate's word
            assert ask(gate, "/v2/models/net/infer", {"inputs": [tensor], "parameters": stated}, **limited)[0] == 200
        assert [ticket.priority for ticket in weights] == [1, 3, 9, 1, 1]
        assert ask(gate, "/v2/models/net/infer", {}, **limited | {"Weft-Priority": "9"})[0] == 400


def test_spans_go_on_from_the_client_through_the_gate_to_the_server(servers):
    left, _ = servers
    at_gate, at_server = InMemorySpanExporter(), InMemorySpanExporter()
    client = f"00-{'a' * 32}-{'b' * 16}-01"
    with gated(PAIR, {"left": [left.url]}, key="inner") as gate, pytest.MonkeyPatch.context() as patch:
        gate.gate.telemetry = OpenTelemetry(exporter=at_gate)
        patch.setattr(left.server.service, "telemetry", OpenTelemetry(exporter=at_server))
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 64], "data": [0.0] * 64}
        assert ask(gate, "/v2/models/net/infer", {"inputs": [tensor]}, traceparent=client)[0] == 200
        left.server.service.telemetry.close()
    (hop,), (served,) = at_gate.get_finished_spans(), at_server.get_finished_spans()
    assert hop.name == "gate net" and served.name == "infer net"
    assert format(hop.context.trace_id, "032x") == "a" * 32 == format(served.context.trace_id, "032x")
    assert format(hop.parent.span_id, "016x") == "b" * 16
    assert served.parent.span_id == hop.context.span_id
    assert hop.attributes == {"weft.machine": "left", "weft.tries": 1, "http.response.status_code": 200}


def test_the_page_of_the_cluster_needs_no_key_and_asks_for_it_itself():
    with gated(PAIR, {}, api_key="k") as gate:
        status, body, headers = ask(gate, "/")
        assert status == 200 and headers["Content-Type"].startswith("text/html")
        assert b"weft cluster" in body and b"/*weft:" not in body and b"src=" not in body
        assert ask(gate, "/weft/cluster")[0] == 401
        assert ask(gate, "/weft/cluster", Authorization="Bearer k")[0] == 200


def test_gates_and_servers_speak_tls(tmp_path):
    cert, key = certificate(tmp_path)
    trusted = ssl.create_default_context(cafile=str(cert))
    made = {"api_key": "inner", "grpc_port": None, "tls_cert": cert, "tls_key": key}
    with (
        live.running(live.mlp(tmp_path / "net.onnx"), **made) as server,
        gated(PAIR, {"left": [f"https://{server.address}"]}, key="inner", context=trusted) as gate,
    ):
        assert infer(gate)[0] == 200


def test_metrics_tell_machines_apart():
    where = placement(left={"net": 0.5, "other": 1.0}, right={"net": 0.5})
    with scripted(OK, BUSY) as (left, right), gated(where, {"left": [left.url], "right": [right.url]}) as gate:
        assert [infer(gate)[0] for _ in range(4)] == [200] * 4
        status, text, _ = ask(gate, "/metrics")
        assert status == 200
        lines = dict(line.rsplit(" ", 1) for line in text.decode().splitlines() if not line.startswith("#"))
        assert lines[f'weft_gate_requests_total{{machine="left",url="{left.url}",end="ok"}}'] == "4"
        assert lines[f'weft_gate_up{{machine="right",url="{right.url}"}}'] == "1"
        tried = lines['weft_gate_decisions_total{gate="gate",what="tried_again"}']
        assert lines[f'weft_gate_requests_total{{machine="right",url="{right.url}",end="refused"}}'] == tried
        assert all(any(key.startswith(family.name) for key in lines) for family in FAMILIES)


def test_how_a_cluster_stands_is_shown(capsys, tmp_path):
    with scripted(OK, BUSY) as (left, right), gated(PAIR, {"left": [left.url], "right": [right.url]}) as gate:
        url = f"http://127.0.0.1:{gate.gate.port}"
        assert infer(gate)[0] == 200
        gate.set_servers(known(PAIR, {"left": [left.url]}))
        code, shown, _ = run(capsys, "cluster", "status", url, "--json", str(tmp_path / "status.json"))
        assert code == 0 and "left" in shown and "right" in shown
        told = json.loads((tmp_path / "status.json").read_text())
        assert [server["machine"] for server in told["servers"]] == ["left"] and told["format"] == 1
        assert [server["machine"] for server in told["past"]] == ["right"] and not told["missing"]
    assert "nothing listens at 127.0.0.1" in refused(capsys, "cluster", "status", url)
    assert "--bench" in refused(capsys, "ray", "up", "nowhere", "--kill", "left")
