"""Clients that go on sending after their last answer: they come to read it, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.serving.http_bench import PATIENCE_S, Bench, Client, Loop, loops, run
from weft.http import bodies
from weft.http.messages import HttpResponse
from weft.http.server import ClientLimits

HEAD = b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 200000000\r\n\r\n"
FLOOD = 64 << 20
"""More than the system holds for a connection."""
LIMITS = ClientLimits(body_bytes=100)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.http.connections.LINGER_S", PATIENCE_S)


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Nobody's turn comes by itself; what was thrown away in those that were made to come."""
    taken: list[int] = []
    throw_away = bodies.discard_received

    def counted(endpoint: object) -> int:
        taken.append(0)
        taken[-1] = throw_away(endpoint)  # type: ignore[arg-type]
        return taken[-1]

    monkeypatch.setattr(bodies, "PAUSE_S", PATIENCE_S)
    monkeypatch.setattr(bodies, "discard_received", counted)
    yield taken


async def refused(client: Client) -> None:
    client.send(HEAD + bytes(FLOOD))
    assert (await client.answer()).status == 413


async def turn(bench: Bench) -> None:
    while not bench.server.lingering._waiting:
        await asyncio.sleep(0.001)
    bench.server.lingering._turn()


async def settled(client: Client) -> int:
    """What is still to be sent, once nobody takes any of it."""
    size, same = client.writer.transport.get_write_buffer_size(), 0
    while same < 100:
        await asyncio.sleep(0.001)
        left = client.writer.transport.get_write_buffer_size()
        size, same = left, same + 1 if left == size else 0
    return size


@loops
def test_nothing_is_taken_from_a_refused_client_until_its_turn(loop: Loop, by_hand: list[int]) -> None:
    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            await refused(client)
            before = await settled(client)
            assert before
            while not sum(by_hand) or await settled(client) == before:
                await turn(bench)
            client.writer.transport.abort()

    run(test, limits=LIMITS, loop=loop)


@loops
def test_refused_clients_have_their_turns_one_after_another(loop: Loop, by_hand: list[int]) -> None:
    async def test(bench: Bench) -> None:
        async with bench.client() as one, bench.client() as other:
            for each in (one, other):
                await refused(each)
                assert await settled(each)
            first, second = bench.server.lingering._waiting
            bench.server.lingering._turn()
            assert len(by_hand) == 1 and [*bench.server.lingering._waiting] == [second, first]
            bench.server.lingering._turn()
            assert len(by_hand) == 2 and [*bench.server.lingering._waiting] == [first, second]
            for each in (one, other):
                each.writer.transport.abort()

    run(test, limits=LIMITS, loop=loop)


@loops
def test_clients_that_send_nothing_more_take_nobodys_turn(loop: Loop, by_hand: list[int]) -> None:
    async def test(bench: Bench) -> None:
        async with bench.client() as silent, bench.client() as other:
            silent.send(HEAD)
            assert (await silent.answer()).status == 413
            await refused(other)
            assert await settled(other)
            first, second = bench.server.lingering._waiting
            bench.server.lingering._turn()
            assert len(by_hand) == 2 and [*bench.server.lingering._waiting] == [second] and first is not second
            for each in (silent, other):
                each.writer.transport.abort()

    run(test, limits=LIMITS, loop=loop)


@loops
def test_however_many_are_refused_at_once_all_can_read_why(loop: Loop, by_hand: list[int]) -> None:
    async def test(bench: Bench) -> None:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(bench.client()) for _ in range(150)]
            for each in clients:
                each.send(HEAD + bytes(1 << 16))
            for each in clients:
                assert (await each.answer()).status == 413
            assert len(bench.server.lingering._waiting) == len(clients)
            for each in clients:
                each.writer.transport.abort()

    run(test, limits=LIMITS, loop=loop)


@loops
def test_who_says_no_more_still_has_all_of_a_long_answer(loop: Loop) -> None:
    """Bytes that nobody asked for come before the end; the answer is longer than the system holds."""
    size = 16 << 20

    async def test(bench: Bench) -> None:
        end = socket.socket()
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
        end.connect(("127.0.0.1", bench.port))
        reader, writer = await asyncio.open_connection(sock=end)
        writer.write(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\nand more")
        writer.write_eof()
        head = await reader.readuntil(b"\r\n\r\n")
        while bench.server.lingering._waiting:
            await asyncio.sleep(0.001)
        assert head.startswith(b"HTTP/1.1 200") and len(await reader.read()) == size
        writer.close()

    run(test, handler=lambda exchange: exchange.respond(HttpResponse(200, bytes(size))), loop=loop)


def test_nobody_is_waited_for_whatever_the_process_says_of_its_sockets() -> None:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(PATIENCE_S)
    try:
        one, other = socket.socketpair()
        with one, other, pytest.raises(BlockingIOError):
            bodies.discard_received(one)
    finally:
        socket.setdefaulttimeout(before)


@loops
@pytest.mark.parametrize("way", ["close", "abort", "half-close"])
def test_a_refused_client_that_left_is_forgotten(loop: Loop, way: str) -> None:
    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            await refused(client)
            if way == "half-close":
                client.writer.write_eof()
            else:
                getattr(client.writer.transport, way)()
            while bench.server._all():
                await asyncio.sleep(0.001)
        assert not bench.server.lingering._waiting

    run(test, limits=LIMITS, loop=loop)


@loops
@pytest.mark.parametrize("tls", [False, True])
def test_who_sends_all_before_reading_reads_the_answer(loop: Loop, tls: bool, trusted: tuple[Path, Path]) -> None:
    cert, key = trusted
    ours, theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=str(cert))
    ours.load_cert_chain(cert, key)

    async def test(bench: Bench) -> None:
        async with bench.client(theirs if tls else None) as client:
            client.send(HEAD + bytes(FLOOD))
            while client.writer.transport.get_write_buffer_size():
                await asyncio.sleep(0.001)
            assert (await client.answer()).status == 413
            client.writer.transport.abort()

    run(test, limits=LIMITS, loop=loop, context=ours if tls else None)
