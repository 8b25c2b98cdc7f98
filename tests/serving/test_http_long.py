"""Long bodies and answers: taken and given piece by piece, whole, in their order, and no longer than somebody wants."""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.serving.http_bench import GET, Bench, Later, Loop, error_of, loops, run
from weft.http import connections
from weft.http.bodies import ROOM_PIECE_BYTES, LongBody
from weft.http.connections import _LONG_BODY_BYTES, _PIECE_BYTES
from weft.http.messages import HttpExchange, HttpResponse
from weft.http.server import ClientLimits, HttpServer

LONG = 8 * _LONG_BODY_BYTES + 12_345
"""More than the system takes at once."""


def text(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def post(body: bytes, *more: str) -> bytes:
    lines = ["POST /a HTTP/1.1", "Host: h", f"Content-Length: {len(body)}", *more, "", ""]
    return "\r\n".join(lines).encode() + body


def echo(exchange: HttpExchange) -> None:
    body = bytes(exchange.body)
    exchange.respond(HttpResponse(200, [body[:7], body[7:]]))


@loops
@pytest.mark.parametrize("size", [_LONG_BODY_BYTES, _LONG_BODY_BYTES + 1, LONG])
def test_requests_one_behind_another_are_answered_whole_and_in_order(size: int, loop: Loop) -> None:
    bodies = [text(size), b"short", text(size + 1), b"", text(3)]

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.send(b"".join(map(post, bodies)))
            for body in bodies:
                assert (await client.answer()).body == body
            assert (await client.ask(GET)).status == 200

    run(test, echo, loop=loop)


@loops
def test_others_are_served_between_the_pieces_of_a_long_body(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast it is sent, and however much is there already."""
    taken, turn = Counter[int](), [0]
    update = LongBody.buffer_updated

    def counted(body: LongBody, nbytes: int) -> None:
        taken[turn[0]] += nbytes
        update(body, nbytes)

    async def turning() -> None:
        while True:
            turn[0] += 1
            await asyncio.sleep(0)

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            turns = asyncio.create_task(turning())
            assert (await client.ask(post(text(LONG)))).body == text(LONG)
            turns.cancel()

    monkeypatch.setattr(LongBody, "buffer_updated", counted)
    run(test, echo, loop=loop)
    assert max(taken.values()) <= ROOM_PIECE_BYTES and sum(taken.values()) > LONG - _LONG_BODY_BYTES


@loops
def test_a_long_body_that_stops_coming_is_refused_and_the_rest_is_read_over(loop: Loop) -> None:
    later, limits = Later(), ClientLimits(read_s=600, bytes_per_s=1)

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.send(post(text(LONG))[: LONG // 2])
            while not (found := list(bench.server._connections)) or found[0]._received_bytes < LONG // 2:
                await asyncio.sleep(0.001)
            found[0].sweep(time.monotonic())
            found[0].sweep(time.monotonic() + 1000)
            answer = await client.answer()
            assert answer.status == 408 and "bytes per second" in error_of(answer)
            assert bench.server.budget.held_bytes == 0
            client.send(text(LONG))
            while client.writer.transport.get_write_buffer_size():
                await asyncio.sleep(0.001)

    run(test, later, limits, loop=loop)
    assert not later.seen


@loops
def test_who_leaves_amid_a_long_body_leaves_nothing(loop: Loop) -> None:
    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.send(post(text(LONG))[: LONG // 2])
            while not (found := list(bench.server._connections)) or found[0]._received_bytes < LONG // 2:
                await asyncio.sleep(0.001)
            assert bench.server.budget.held_bytes == LONG
            client.writer.transport.abort()
        while bench.server._all():
            await asyncio.sleep(0.001)
        assert bench.server.budget.held_bytes == 0

    run(test, Later(), loop=loop)


def test_a_long_body_in_chunks_is_one() -> None:
    body = text(LONG)
    chunks = [body[at : at + 100_000] for at in range(0, LONG, 100_000)]
    sent = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            head = b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
            assert (await client.ask(head + sent)).body == body

    run(test, echo)


def test_a_long_body_cannot_be_written_to() -> None:
    later = Later()

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.send(post(text(LONG)))
            exchange = await later.arrived.get()
            assert isinstance(exchange.body, memoryview) and exchange.body.readonly
            exchange.respond(HttpResponse(200))

    run(test, later)


def test_after_the_last_answer_the_connection_ends_and_nothing_is_lost() -> None:
    body = text(LONG)

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            assert (await client.ask(post(body, "Connection: close"))).body == body
            assert await client.ended()

    run(test, echo)


def test_who_says_no_more_hears_the_rest_of_an_answer() -> None:
    later, body = Later(), text(LONG)

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.send(GET)
            (await later.arrived.get()).respond(HttpResponse(200, [body]))
            assert unread(bench.server)
            client.writer.write_eof()
            assert (await client.answer()).body == body
            assert await client.ended()

    run(test, later)


def unread(server: HttpServer) -> bool:
    return server.unread == 1


def test_an_answer_that_nobody_reads_counts_until_its_client_leaves() -> None:
    later = Later()

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.send(GET)
            (await later.arrived.get()).respond(HttpResponse(200, [text(4 * LONG)]))
            while not bench.server.budget.held_bytes:
                await asyncio.sleep(0)
            assert bench.server.budget.held_bytes > LONG and unread(bench.server)
            client.writer.transport.abort()
        while bench.server.unread:
            await asyncio.sleep(0.001)
        assert bench.server.budget.held_bytes == 0

    run(test, later)


def test_a_server_that_goes_down_ends_what_it_has_begun_to_say() -> None:
    later, body = Later(), text(LONG)

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.send(GET)
            (await later.arrived.get()).respond(HttpResponse(200, [body]))
            ended = asyncio.create_task(bench.server.drain(600))
            await asyncio.sleep(0)
            assert (await client.answer()).body == body
            assert await client.ended() and await ended

    run(test, later)


def test_others_are_served_between_the_pieces_of_a_long_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One who reads at once gets it in many turns of the loop, not in one."""
    given: list[int] = []
    pour = connections.ServerConnection._write_pieces

    def counted(connection: Any) -> None:
        left = sum(map(len, connection._pieces))
        pour(connection)
        given.append(left - sum(map(len, connection._pieces)))

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            assert (await client.ask(post(text(LONG)))).body == text(LONG)

    monkeypatch.setattr(connections.ServerConnection, "_write_pieces", counted)
    run(test, echo)
    assert max(given) <= _PIECE_BYTES and sum(given) >= LONG


@loops
@pytest.mark.parametrize("size", [_LONG_BODY_BYTES + 1, LONG])
def test_tls_gives_it_whole(size: int, loop: Loop, trusted: tuple[Path, Path]) -> None:
    cert, key = trusted
    ours, theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=str(cert))
    ours.load_cert_chain(cert, key)
    theirs.check_hostname = False
    bodies = [text(size), b"short", text(size)]

    async def test(bench: Any) -> None:
        async with bench.client(theirs) as client:
            for body in bodies:
                assert (await client.ask(post(body))).body == body

    run(test, echo, context=ours, loop=loop)


def test_no_memory_for_a_body_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: Any) -> Any:
        raise MemoryError

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            with monkeypatch.context() as patched:
                patched.setattr(connections.np, "empty", nothing)
                answer = await client.ask(post(text(LONG)))
            assert answer.status == 503 and "no memory" in answer.body.decode()
            assert bench.server.budget.held_bytes == 0
        async with bench.client() as client:
            assert (await client.ask(post(b"short"))).body == b"short"

    run(test, echo)
