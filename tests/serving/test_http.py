"""The HTTP server, spoken to over raw sockets: what it answers, what it refuses, and that nothing brings it down."""

from __future__ import annotations

import asyncio
import json
import logging
import select
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serving.http_bench import GET, PATIENCE_S, VALID, Answer, Bench, Later, echo, error_of, run, trickle
from weft.base.errors import InputError
from weft.http.messages import HttpExchange, HttpResponse
from weft.http.server import ClientLimits


@pytest.fixture(scope="module", autouse=True)
def lingering() -> Iterator[None]:
    """However slow the machine is, a refused client has the time to send on and to read why."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.http.connections.LINGER_S", PATIENCE_S)
        yield


def refused(data: bytes, limits: ClientLimits = ClientLimits()) -> Answer:  # noqa: B008
    """The one answer to ``data``, after which the connection ends; a healthy request on another one still works."""
    answers: list[Answer] = []

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            answers.append(await client.ask(data))
            assert await client.ended()
        async with bench.client() as client:
            assert (await client.ask(GET)).status == 200

    run(test, limits=limits)
    assert answers[0].headers["connection"] == "close"
    error_of(answers[0])
    return answers[0]


# Requests that are served.


def test_a_request_has_everything_the_client_sent() -> None:
    later = Later()

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.send(
                b"POST /m%C3%BC/x%2Fy?a=%20b HTTP/1.1\r\nHost: h\r\nX-One: 1\r\nx-one: 2 \r\n"
                b"Content-Length: 3\r\n\r\nab\x00"
            )
            exchange = await later.arrived.get()
            assert (exchange.method, exchange.path, exchange.target.raw_path) == ("POST", "/mü/x/y", "/m%C3%BC/x%2Fy")
            assert (exchange.target.query, exchange.body) == ("a=%20b", b"ab\x00")
            assert exchange.headers == {"host": "h", "x-one": "1, 2", "content-length": "3"}
            assert exchange.peer.startswith("127.0.0.1:") and exchange.received_ns > 0
            assert bench.server.in_flight == 1 and bench.server.connections == 1 and exchange.open
            exchange.respond(HttpResponse(201, [b"a", b"", b"bc"], "text/plain", (("X-Id", "7"),)))
            answer = await client.answer()
            assert (answer.status, answer.body) == (201, b"abc")
            assert answer.headers["x-id"] == "7" and answer.headers["content-type"] == "text/plain"
            assert answer.headers["server"] == "weft" and answer.headers["date"].endswith("GMT")
            assert "connection" not in answer.headers
            assert bench.server.in_flight == 0 and not exchange.open

    run(test, later)


def test_a_connection_is_kept_and_a_second_answer_is_ignored() -> None:
    def twice(exchange: HttpExchange) -> None:
        exchange.respond(HttpResponse(200, exchange.path.encode()))
        exchange.respond(HttpResponse(500, b"never"))

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            for path in (b"/1", b"/2", b"/3"):
                answer = await client.ask(b"GET " + path + b" HTTP/1.1\r\nHost: h\r\n\r\n")
                assert (answer.status, answer.body) == (200, path)
            assert bench.server.connections == 1 and bench.server.in_flight == 0

    run(test, twice)


def test_pipelined_requests_are_handled_one_at_a_time_and_answered_in_order() -> None:
    later = Later()

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.send(b"".join(b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n" % i for i in range(40)))
            for i in range(40):
                exchange = await later.arrived.get()
                assert later.arrived.empty() and bench.server.in_flight == 1
                exchange.respond(HttpResponse(200, exchange.path.encode()))
                assert (await client.answer()).body == b"/%d" % i

    run(test, later, ClientLimits(pipeline=3))


def test_reading_stops_while_a_client_pipelines_more_than_is_kept() -> None:
    later = Later()
    body = b"x" * 2**20
    request = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.send(request * 20)
            for _ in range(20):
                exchange = await later.arrived.get()
                for _ in range(100):  # turns in which the server could read on
                    await asyncio.sleep(0)
                (connection,) = bench.server._connections
                assert len(connection._rest) < 2**20
                assert exchange.body == body
                exchange.respond(HttpResponse(200))
            for _ in range(20):
                assert (await client.answer()).status == 200

    run(test, later)


def test_one_connection_cannot_keep_the_others_waiting() -> None:
    order: list[str] = []

    def note(exchange: HttpExchange) -> None:
        order.append(exchange.path)
        exchange.respond(HttpResponse(200))

    async def test(bench: Bench) -> None:
        async with bench.client() as greedy, bench.client() as modest:
            assert (await greedy.ask(GET)).status == 200 and (await modest.ask(GET)).status == 200
            order.clear()
            greedy.send(GET * 400)
            modest.send(b"GET /modest HTTP/1.1\r\nHost: h\r\n\r\n")
            for connection in bench.server._connections:  # before the server looks, both have come
                assert connection._transport is not None
                assert select.select([connection._transport.get_extra_info("socket")], [], [], PATIENCE_S)[0]
            await modest.answer()
            for _ in range(400):
                await greedy.answer()
        assert order.index("/modest") < 200 and len(order) == 401

    run(test, note, ClientLimits(pipeline=2))


@pytest.mark.parametrize("split", [1, 2, 7, 1000])
def test_chunked_bodies_are_joined_and_trailers_dropped(split: int) -> None:
    data = (
        b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: Chunked\r\n\r\n"
        b"3;note=1\r\nabc\r\n4\r\n\r\n\r\n\r\n0\r\nX-Trailer: 1\r\n\r\n"
    )

    def with_headers(exchange: HttpExchange) -> None:
        exchange.respond(HttpResponse(200, exchange.body + b"|" + ",".join(exchange.headers).encode()))

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            for _ in range(2):
                for at in range(0, len(data), split):
                    client.send(data[at : at + split])
                    await client.writer.drain()
                    await asyncio.sleep(0)
                assert (await client.answer()).body == b"abc\r\n\r\n|host,transfer-encoding"

    run(test, with_headers)


def test_expect_continue_is_answered_before_the_body() -> None:
    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.send(b"POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
            assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            assert json.loads((await client.ask(b"hi")).body)[3] == "hi"
            whole = b"POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nhi"
            assert (await client.ask(whole)).status == 200

    run(test)
    assert refused(b"POST / HTTP/1.1\r\nHost: h\r\nExpect: tea\r\nContent-Length: 2\r\n\r\n").status == 417


def test_http_1_0_closes_unless_it_asks_not_to() -> None:
    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            answer = await client.ask(b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            assert answer.status == 200 and answer.headers["connection"] == "keep-alive"
            assert (await client.ask(b"GET /a HTTP/1.0\r\n\r\n")).headers["connection"] == "close"
            assert await client.ended()

    run(test)


def test_connection_close_is_obeyed() -> None:
    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            answer = await client.ask(b"GET /a HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n" + GET)
            assert answer.status == 200 and answer.headers["connection"] == "close"
            assert await client.ended()

    run(test)


def test_head_and_204_have_no_body() -> None:
    def answer_by_path(exchange: HttpExchange) -> None:
        exchange.respond(HttpResponse(204 if exchange.path == "/none" else 200, b"12345"))

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.send(b"HEAD /a HTTP/1.1\r\nHost: h\r\n\r\n")
            assert (await client.answer(has_body=False)).headers["content-length"] == "5"
            none = await client.ask(b"GET /none HTTP/1.1\r\nHost: h\r\n\r\n")
            assert none.status == 204 and "content-length" not in none.headers
            assert (await client.ask(GET)).body == b"12345"

    run(test, answer_by_path)


def test_an_upgrade_without_body_is_answered_as_http_1_1() -> None:
    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            upgrade = b"GET /u HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
            assert json.loads((await client.ask(upgrade)).body)[1] == "/u"
            assert json.loads((await client.ask(GET)).body)[1] == "/a"

    run(test)


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [("*", "*", ""), ("http://h:1/p?q", "/p", "q"), ("http://h", "/", ""), ("//x", "//x", ""), ("/a?b?c", "/a", "b?c")],
)
def test_request_targets(target: str, path: str, query: str) -> None:
    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            answer = await client.ask(f"OPTIONS {target} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
            assert json.loads(answer.body)[1:3] == [path, query]

    run(test)


# Requests that are refused.


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00", 400),
        (b"GET /a HTTP/1.1\nHost: h\n\n", 400),
        (b"GET /a HTTP/1.1\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\nHost: h\r\nHost: h\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\nHost: h\r\nX: a\r\n folded\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\nHost: h\r\nX : a\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\nHost: h\r\nX: a\x00b\r\n\r\n", 400),
        (b"GET /a%zz HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        (b"GET /a% HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        (b"GET /a%ff HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        (b"GET /a%00 HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        (b"GET /a%0d%0ab HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        (b"GET /a\x7f HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        (b"GET /\xc3\xbc HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        (b"GET /a#b HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        (b"GET a HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        (b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /a HTTP/2.0\r\nHost: h\r\n\r\n", 505),
        (b"GET /a\r\n\r\n", 505),
        (b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\na", 400),
        (b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\na", 400),
        (b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: +1\r\n\r\na", 400),
        (b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 1, 1\r\n\r\na", 400),
        (b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n0\r\n\r\n", 400),
        (b"POST /a HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n", 400),
        (b"POST /a HTTP/1.1\r\nHost: h\r\nUpgrade: x\r\nConnection: upgrade\r\nContent-Length: 1\r\n\r\na", 400),
    ],
)
def test_what_cannot_be_a_request_is_refused(head: bytes, status: int) -> None:
    assert refused(head).status == status


def test_headers_may_be_as_long_as_the_limit_and_not_longer() -> None:
    head = b"GET /a HTTP/1.1\r\nHost: h\r\nX: %b\r\n\r\n"
    fits = head % (b"x" * (500 - len(head % b"")))

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            for _ in range(3):
                assert (await client.ask(fits)).status == 200

    run(test, limits=ClientLimits(header_bytes=len(fits)))
    assert refused(fits, ClientLimits(header_bytes=len(fits) - 1)).status == 431
    assert refused(b"GET /" + b"a" * 600, ClientLimits(header_bytes=500)).status == 431
    assert refused(b"\r\n" * 300, ClientLimits(header_bytes=500)).status == 431


def test_trailers_and_chunk_extensions_are_limited_too() -> None:
    head = b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    limits = ClientLimits(header_bytes=500)
    assert refused(head + b"1\r\na\r\n0\r\nX: " + b"a" * 2**20, limits).status == 431
    assert refused(head + b"1;" + b"a" * 2**20, limits).status == 431


def test_an_announced_body_over_the_limit_is_refused_before_it_is_sent() -> None:
    answer = refused(b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 101\r\n\r\n", ClientLimits(body_bytes=100))
    assert answer.status == 413 and "100 bytes" in error_of(answer)
    expecting = b"POST /a HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 101\r\n\r\n"
    assert refused(expecting, ClientLimits(body_bytes=100)).status == 413


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 9000000\r\n\r\n", 413),
        (b"GET /a HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", 200),
    ],
)
def test_a_client_that_goes_on_sending_still_reads_its_last_answer(head: bytes, status: int) -> None:
    """Without a lingering close the unread bytes would reset the connection and take the answer with them."""

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.send(head + b"x" * 2**23)
            await client.writer.drain()
            assert (await client.answer()).status == status
            assert await client.reader.read() == b""

    run(test, limits=ClientLimits(body_bytes=100))


def test_a_chunk_may_be_longer_than_the_headers() -> None:
    head = b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            data = head + b"100000\r\n" + b"x" * 2**20 + b"\r\n" + b"1\r\ny\r\n" * 1000 + b"0\r\n\r\n"
            answer = await client.ask(data)
            assert len(json.loads(answer.body)[3]) == 2**20 + 1000

    run(test, limits=ClientLimits(header_bytes=500))


def test_a_chunked_body_that_grows_over_the_limit_is_refused() -> None:
    head = b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"a\r\n0123456789\r\n"

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            assert len(json.loads((await client.ask(head + chunk * 10 + b"0\r\n\r\n")).body)[3]) == 100

    run(test, limits=ClientLimits(body_bytes=100))
    assert refused(head + chunk * 11, ClientLimits(body_bytes=100)).status == 413


def test_a_request_behind_a_refused_one_is_not_served() -> None:
    later = Later()

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            assert (await client.ask(b"GET /a HTTP/1.1\r\n\r\n" + GET)).status == 400
            assert await client.ended()

    run(test, later)
    assert later.seen == 0


def test_connections_over_the_limit_are_told_to_come_back() -> None:
    later = Later()

    async def test(bench: Bench) -> None:
        async with bench.client() as first:
            first.send(b"GET /a HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
            exchange = await later.arrived.get()
            async with bench.client() as second:
                answer = await second.ask(GET)
                assert answer.status == 503 and answer.headers["retry-after"] == "1"
                assert "1 connections" in error_of(answer) and await second.ended()
            assert bench.server.connections == 1
            exchange.respond(HttpResponse(200))
            await first.answer()
            assert await first.ended()
        async with bench.client() as third:
            third.send(GET)
            (await later.arrived.get()).respond(HttpResponse(200))
            assert (await third.answer()).status == 200

    run(test, later, ClientLimits(connections=1))


def test_limits_must_be_above_zero() -> None:
    with pytest.raises(InputError, match="pipeline is 0"):
        ClientLimits(pipeline=0)


# Handlers and answers that fail.


def test_a_failing_handler_is_a_500_and_the_connection_survives(caplog: pytest.LogCaptureFixture) -> None:
    def fail_once(exchange: HttpExchange) -> None:
        if exchange.path == "/bad":
            raise RuntimeError("secret")
        echo(exchange)

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            answer = await client.ask(b"GET /bad HTTP/1.1\r\nHost: h\r\n\r\n")
            assert answer.status == 500 and "RuntimeError" in error_of(answer) and b"secret" not in answer.body
            assert (await client.ask(GET)).status == 200 and bench.server.in_flight == 0

    with caplog.at_level(logging.ERROR, "weft.http"):
        run(test, fail_once)
    assert "secret" in caplog.text and "/bad" in caplog.text


@pytest.mark.parametrize(
    "response",
    [
        HttpResponse(200, headers=(("X", "a\r\nY: b"),)),
        HttpResponse(200, headers=(("X", "a\nb"),)),
        HttpResponse(200, headers=(("X\r\n", "a"),)),
        HttpResponse(200, headers=(("", "a"),)),
        HttpResponse(200, headers=(("X", "\u20ac"),)),
        HttpResponse(200, headers=(("Content-Length", "0"),)),
        HttpResponse(200, content_type="a\r\nb"),
        HttpResponse(100),
        HttpResponse(99),
    ],
)
def test_an_answer_that_would_break_http_is_a_value_error_and_can_be_replaced(response: HttpResponse) -> None:
    later = Later()

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.send(GET)
            exchange = await later.arrived.get()
            with pytest.raises(ValueError, match=r"header|status|content type"):
                exchange.respond(response)
            exchange.respond(HttpResponse(200, b"instead"))
            assert (await client.answer()).body == b"instead"

    run(test, later)


def test_every_answer_is_logged_also_a_refusal_and_a_failing_log_does_no_harm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines: list[tuple[str, str, int, int]] = []

    def log(exchange: HttpExchange, response: HttpResponse, body_bytes: int) -> None:
        lines.append((exchange.method, exchange.path, response.status, body_bytes))
        raise OSError("disk full")

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            assert (await client.ask(GET)).status == 200
            client.send(b"HEAD /h HTTP/1.1\r\nHost: h\r\n\r\n")
            await client.answer(has_body=False)
            assert (await client.ask(b"POST /big HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n")).status == 413
        async with bench.client() as client:
            assert (await client.ask(b"?\r\n")).status == 400

    run(test, lambda exchange: exchange.respond(HttpResponse(200, b"123")), ClientLimits(body_bytes=1), log=log)
    sizes = [line[:3] for line in lines]
    assert sizes == [("GET", "/a", 200), ("HEAD", "/h", 200), ("POST", "/big", 413), ("", "", 400)]
    assert lines[0][3] == 3 and lines[1][3] == 0 and lines[2][3] > 0
    assert "disk full" in caplog.text


# Clients that leave, and those that stay too long.


@pytest.mark.parametrize("way", ["close", "half-close", "reset"])
def test_a_client_that_leaves_is_reported_once_and_its_answer_is_dropped(way: str) -> None:
    later = Later()

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.send(GET)
            exchange = await later.arrived.get()
            if way == "half-close":
                client.writer.write_eof()
            elif way == "reset":
                client.writer.transport.abort()
            else:
                client.writer.close()
            assert await later.gone.get() == "/a"
            assert bench.server.in_flight == 0 and not exchange.open
            exchange.respond(HttpResponse(200, b"late"))
            assert await client.ended() or way == "close"
        assert later.gone.empty()
        async with bench.client() as client:
            client.send(GET)
            (await later.arrived.get()).respond(HttpResponse(200))
            assert (await client.answer()).status == 200
        while bench.server.connections:
            await asyncio.sleep(0)
        assert later.gone.empty()

    run(test, later)


def test_a_failing_gone_callback_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    later = Later()
    called = asyncio.Event()

    def fail() -> None:
        called.set()
        raise RuntimeError("gone failed")

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.send(GET)
            (await later.arrived.get()).gone = fail
        await called.wait()

    run(test, later)
    assert "gone failed" in caplog.text


def test_half_a_request_is_ended_with_408() -> None:
    limits = ClientLimits(read_s=0.05)
    for half in (b"GET /a HT", b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\nhalf"):
        assert refused(half, limits).status == 408


def test_a_refused_client_that_stays_is_dropped() -> None:
    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            assert (await client.ask(b"bad\r\n\r\n")).status == 400
            (connection,) = bench.server._all()
            connection.sweep(time.monotonic())
            connection.sweep(time.monotonic() + 2 * PATIENCE_S)
            while bench.server._all():
                await asyncio.sleep(0)

    run(test)


def test_an_idle_connection_is_closed_but_one_that_is_computed_for_is_not() -> None:
    later = Later()

    limits = ClientLimits(idle_s=PATIENCE_S)

    async def test(bench: Bench) -> None:
        async with bench.client() as busy, bench.client() as idle, bench.client() as silent:
            busy.send(GET)
            exchange = await later.arrived.get()
            idle.send(GET)
            (await later.arrived.get()).respond(HttpResponse(200))
            await idle.answer()
            while bench.server.connections < 3:
                await asyncio.sleep(0)
            for connection in [*bench.server._connections]:
                connection.sweep(time.monotonic() + 2 * limits.idle_s)
            assert await idle.ended() and await silent.ended()
            exchange.respond(HttpResponse(200))
            assert (await busy.answer()).status == 200

    run(test, later, limits)


def test_a_client_that_does_not_read_holds_back_its_own_requests_and_is_closed() -> None:
    seen: list[int] = []
    limits = ClientLimits()

    def huge(exchange: HttpExchange) -> None:
        seen.append(len(seen))
        exchange.respond(HttpResponse(200, b"x" * 2**24))

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.send(GET * 50)
            while not seen:
                await asyncio.sleep(0)
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            now_s = time.monotonic()
            while bench.server.connections:
                now_s += 2 * limits.read_s
                for connection in [*bench.server._connections]:
                    connection.sweep(now_s)
                await asyncio.sleep(0)

    run(test, huge, limits)
    assert len(seen) < 5


def test_a_slow_reader_gets_all_its_answers() -> None:
    def large(exchange: HttpExchange) -> None:
        exchange.respond(HttpResponse(200, [b"x" * 2**20, exchange.path.encode()]))

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.send(b"".join(b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n" % i for i in range(10)))
            for i in range(10):
                answer = await client.answer()
                assert len(answer.body) == 2**20 + 2 and answer.body.endswith(b"/%d" % i)

    run(test, large)


# Ending the server.


def test_drain_answers_what_is_open_and_closes_what_is_idle() -> None:
    later = Later()

    async def test(bench: Bench) -> None:
        async with bench.client() as busy, bench.client() as idle, bench.client() as half:
            idle.send(GET)
            (await later.arrived.get()).respond(HttpResponse(200))
            await idle.answer()
            busy.send(GET + GET)
            exchange = await later.arrived.get()
            half.send(b"GET /half HTTP/1.1\r\n")
            while not any(connection._began_s for connection in bench.server._connections):
                await asyncio.sleep(0)
            draining = asyncio.create_task(bench.server.drain(PATIENCE_S))
            assert await idle.ended()
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", bench.port)
            exchange.respond(HttpResponse(200, b"last"))
            answer = await busy.answer()
            assert answer.body == b"last" and answer.headers["connection"] == "close"
            assert await busy.ended()
            await busy.close()
            half.send(b"Host: h\r\n\r\n")
            (await later.arrived.get()).respond(HttpResponse(200))
            assert (await half.answer()).headers["connection"] == "close"
            assert await draining is True
            assert bench.server.connections == 0

    run(test, later)
    assert later.seen == 3


def test_drain_gives_up_and_close_tells_the_open_request() -> None:
    later = Later()

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.send(GET)
            await later.arrived.get()
            assert await bench.server.drain(0.0) is False
            assert later.gone.empty() and bench.server.in_flight == 1
            bench.server.close()
            assert later.gone.get_nowait() == "/a" and bench.server.in_flight == 0
            assert await client.ended()
            assert await bench.server.drain(PATIENCE_S) is True

    run(test, later)


# TLS.


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command to make a certificate")
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    command = f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=weft"
    extension = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*command.split(), *extension, "-keyout", str(path), "-out", str(path) + ".crt"],
        check=True,
        capture_output=True,
    )
    path.write_text(path.read_text() + Path(str(path) + ".crt").read_text())
    return path


def test_tls(certificate: Path) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    trust = ssl.create_default_context(cafile=str(certificate))
    later = Later()

    async def test(bench: Bench) -> None:
        async with bench.client(trust) as client:
            client.send(b"POST /t HTTP/1.1\r\nHost: h\r\nContent-Length: 300000\r\n\r\n" + b"x" * 300000)
            exchange = await later.arrived.get()
            assert len(exchange.body) == 300000
            exchange.respond(HttpResponse(200, b"y" * 2**20))
            assert len((await client.answer()).body) == 2**20
            client.send(GET)
            await later.arrived.get()
        assert await later.gone.get() == "/a"
        async with bench.client(trust) as client:
            assert (await client.ask(b"bad\r\n\r\n")).status == 400
        async with bench.client() as plain:
            plain.send(GET)
            assert b"200" not in await plain.reader.read()
        async with bench.client(trust) as idle:
            idle.send(GET)
            (await later.arrived.get()).respond(HttpResponse(200))
            await idle.answer()
            assert await bench.server.drain(PATIENCE_S) is True

    run(test, later, context=context)


def test_who_is_silent_instead_of_agreeing_on_tls_keeps_nobody_out(certificate: Path) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    trust = ssl.create_default_context(cafile=str(certificate))

    async def test(bench: Bench) -> None:
        async with bench.client() as first, bench.client() as second, bench.client(trust) as client:
            assert (await client.ask(GET)).status == 200
            assert await first.ended() and await second.ended()

    run(test, limits=ClientLimits(connections=1), context=context)


def test_where_files_are_short_who_is_silent_instead_of_agreeing_on_tls_leaves_first(certificate: Path) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    trust = ssl.create_default_context(cafile=str(certificate))

    async def test(bench: Bench) -> None:
        server = bench.server
        async with bench.client(trust) as idle, bench.client() as first, bench.client() as second:
            assert (await idle.ask(GET)).status == 200
            while len(server._setups) < 2:
                await asyncio.sleep(0)
            server._free_descriptor()
            server._free_descriptor()
            assert not server._setups
            assert await first.ended() and await second.ended()
            assert (await idle.ask(GET)).status == 200
            server._free_descriptor()
            assert await idle.ended()

    run(test, context=context)


# Arbitrary bytes.

EXPECTED = {
    0: ["GET", "/a", "", ""],
    1: ["POST", "/p", "q", "hello"],
    2: ["POST", "/c", "", "abc\r\n\r\n"],
    3: ["PUT", "/\u00fc", "", ""],
    4: ["POST", "/e", "", "\r\n\r\n"],
    5: ["GET", "/u", "", ""],
}


@settings(max_examples=20, deadline=None)
@given(
    which=st.lists(st.sampled_from(range(len(VALID))), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 1000), max_size=12),
    late=st.booleans(),
)
def test_a_pipeline_is_answered_alike_however_it_is_split(which: list[int], cuts: list[int], late: bool) -> None:
    def handler(exchange: HttpExchange) -> None:
        if late:
            asyncio.get_running_loop().call_soon(echo, exchange)
        else:
            echo(exchange)

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            await trickle(client, b"".join(VALID[i] for i in which), cuts)
            for i in which:
                answer = await client.answer(has_body=True)
                while answer.status == 100:
                    answer = await client.answer()
                assert (answer.status, json.loads(answer.body)) == (200, EXPECTED[i])

    run(test, handler, ClientLimits(pipeline=2))


@st.composite
def broken(draw: st.DrawFn) -> bytes:
    """Some valid requests with bytes replaced, removed, doubled or put in."""
    data = bytearray(b"".join(draw(st.lists(st.sampled_from(VALID), min_size=1, max_size=3))))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(data)))
        span = draw(st.integers(0, 8))
        data[at : at + span] = draw(
            st.binary(max_size=4)
            | st.sampled_from([b"\r\n", b"\r\n\r\n", b"\n", b"\x00", b"0\r\n\r\n", b"9" * 20, b" "])
        )
    return bytes(data)


@settings(max_examples=30, deadline=None)
@given(data=st.binary(max_size=200) | broken(), cuts=st.lists(st.integers(0, 1000), max_size=6))
def test_no_bytes_bring_the_server_down(data: bytes, cuts: list[int]) -> None:
    failures: list[str] = []

    async def test(bench: Bench) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: failures.append(str(context)))
        async with bench.client() as client:
            await trickle(client, data, cuts)
            client.writer.write_eof()
            said = await client.reader.read()
            assert said == b"" or said.startswith(b"HTTP/1.1 ")
        async with bench.client() as client:
            assert json.loads((await client.ask(GET)).body) == EXPECTED[0]
        while bench.server.connections:
            await asyncio.sleep(0)
        assert bench.server.in_flight == 0

    run(test, limits=ClientLimits(header_bytes=300, body_bytes=50, pipeline=2))
    assert not failures
