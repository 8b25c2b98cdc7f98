"""An HTTP server on loopback with handlers of the test's own, and a client that sends raw bytes."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from tests.serving.live import PATIENCE_S
from weft.http.messages import HttpExchange, HttpResponse
from weft.http.server import ClientLimits, Handler, HttpServer
from weft.serving.server import fastest_loop

GET = b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self, has_body: bool = True) -> Answer:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *rest = head.split("\r\n")[:-2]
        headers = {name.lower(): value for name, value in (field.split(": ", 1) for field in rest)}
        body = await self.reader.readexactly(int(headers.get("content-length", 0))) if has_body else b""
        return Answer(int(line.split(" ")[1]), headers, body)

    async def ask(self, data: bytes) -> Answer:
        self.send(data)
        return await self.answer()

    async def ended(self) -> bool:
        """True once the server has closed, with nothing more said."""
        try:
            return await self.reader.read() == b""
        except ConnectionError:
            return True

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except (ConnectionError, ssl.SSLError):
            return


class Bench(NamedTuple):
    server: HttpServer
    port: int

    @asynccontextmanager
    async def client(self, context: ssl.SSLContext | None = None) -> AsyncIterator[Client]:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port, ssl=context))
        try:
            yield client
        finally:
            await client.close()


def echo(exchange: HttpExchange) -> None:
    said = [exchange.method, exchange.path, exchange.target.query, bytes(exchange.body).decode("latin-1")]
    exchange.respond(HttpResponse(200, json.dumps(said).encode()))


def run(
    test: Callable[[Bench], Awaitable[None]],
    handler: Handler = echo,
    limits: ClientLimits = ClientLimits(),  # noqa: B008
    context: ssl.SSLContext | None = None,
    log: Callable[[HttpExchange, HttpResponse, int], None] | None = None,
    loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
    **more: Any,
) -> None:
    async def main() -> None:
        server = HttpServer(handler, limits, log, **more)
        port = await server.start("127.0.0.1", 0, context)
        try:
            await asyncio.wait_for(test(Bench(server, port)), PATIENCE_S)
        finally:
            server.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


class Later:
    """A handler that keeps its exchanges for the test to answer."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[HttpExchange] = asyncio.Queue()
        self.gone: asyncio.Queue[str] = asyncio.Queue()
        self.seen = 0

    def __call__(self, exchange: HttpExchange) -> None:
        self.seen += 1
        path = exchange.path
        exchange.gone = lambda: self.gone.put_nowait(path)
        self.arrived.put_nowait(exchange)


def error_of(answer: Answer) -> str:
    body = json.loads(answer.body)
    assert list(body) == ["error"]
    assert answer.headers["content-type"] == "application/json"
    return str(body["error"])


VALID = [
    GET,
    b"POST /p?q HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello",
    b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3\r\nabc\r\n4;x\r\n\r\n\r\n\r\n0\r\nT: t\r\n\r\n",
    b"\r\nPUT /%C3%BC HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n",
    b"POST /e HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n\r\n\r\n",
    b"GET /u HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
]


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    at = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    return [data[a:b] for a, b in pairwise(at) if a < b]


async def trickle(client: Client, data: bytes, cuts: list[int]) -> None:
    for piece in pieces(data, cuts):
        client.send(piece)
        for _ in range(3):  # lets the server, in the same loop, receive this piece by itself
            await asyncio.sleep(0)


Loop = Callable[[], asyncio.AbstractEventLoop]

loops = pytest.mark.parametrize("loop", {asyncio.new_event_loop, fastest_loop() or asyncio.new_event_loop})
