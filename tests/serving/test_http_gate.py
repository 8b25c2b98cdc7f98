"""What the HTTP server does before it has a whole request: heads are judged, bytes are counted, places are shared."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serving.http_bench import GET, PATIENCE_S, VALID, Bench, Later, echo, error_of, run, trickle
from weft.base.errors import OverBudget
from weft.http import server as http_server
from weft.http.bodies import TransferProgress
from weft.http.limits import UNCOUNTED_BYTES, ByteBudget
from weft.http.messages import HttpExchange, HttpResponse, Passage, RequestTarget, error_response
from weft.http.server import ClientLimits

MB = 2**20


@pytest.fixture(scope="module", autouse=True)
def lingering() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.http.connections.LINGER_S", PATIENCE_S)
        yield


class Pass:
    """A passage that knows whether it ended."""

    def __init__(self, body_bytes: int = 1 << 40) -> None:
        self.body_bytes, self.ended = body_bytes, 0

    def end(self) -> None:
        self.ended += 1


class Gate:
    """Lets in what does not ask for /no."""

    def __init__(self, body_bytes: int = 1 << 40) -> None:
        self._body_bytes = body_bytes
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        self.passes: list[Pass] = []

    def __call__(self, method: str, target: RequestTarget, headers: dict[str, str]) -> HttpResponse | Passage:
        self.seen.append((method, target.raw_path, headers))
        if target.raw_path == "/no":
            return error_response(401, "not you")
        if target.raw_path == "/broken":
            raise RuntimeError("secret")
        self.passes.append(Pass(self._body_bytes))
        return self.passes[-1]


def post(path: str, length: int | None, body: bytes = b"", *more: str) -> bytes:
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    lines = [f"POST {path} HTTP/1.1", "Host: h", framing, *more]
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + body


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0)


# The gate


@pytest.mark.parametrize("more", [(), ("Expect: 100-continue",)])
def test_a_long_body_that_is_not_wanted_is_not_waited_for(more: tuple[str, ...]) -> None:
    gate, later = Gate(), Later()

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            answer = await client.ask(post("/no", 200 * MB, b"", *more))
            assert answer.status == 401 and error_of(answer) == "not you"
            assert answer.headers["connection"] == "close" and await client.ended()
            assert bench.server.budget.held_bytes == 0

    run(test, later, ClientLimits(body_bytes=1 << 40), gate=gate)
    assert later.seen == 0 and [each[:2] for each in gate.seen] == [("POST", "/no")]


def test_a_chunked_body_that_is_not_wanted_is_not_waited_for() -> None:
    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            assert (await client.ask(post("/no", None))).status == 401
            assert await client.ended()

    run(test, gate=Gate())


def test_a_short_body_that_is_not_wanted_is_read_over_and_the_connection_is_kept() -> None:
    gate = Gate()

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.send(post("/no", 5, b"he"))
            await until(lambda: bool(gate.seen))
            client.send(b"llo" + GET)
            assert (await client.answer()).status == 401
            assert (await client.answer()).status == 200
            assert bench.server.in_flight == 0

    run(test, gate=gate)
    assert [path for _, path, _ in gate.seen] == ["/no", "/a"]


def test_what_is_let_in_keeps_its_passage_until_it_is_over() -> None:
    gate, later = Gate(), Later()

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.send(post("/a", 2, b"hi"))
            exchange = await later.arrived.get()
            assert exchange.passage is gate.passes[0] and gate.passes[0].ended == 0
            exchange.respond(HttpResponse(200))
            assert gate.passes[0].ended == 1
            await client.answer()
            client.send(post("/left", 2, b"hi"))
            await later.arrived.get()
        await later.gone.get()
        assert [each.ended for each in gate.passes] == [1, 1]
        async with bench.client() as client:
            client.send(post("/half", 2, b"h"))
            await until(lambda: len(gate.passes) == 3)
        await until(lambda: gate.passes[2].ended == 1)

    run(test, later, gate=gate)


def test_the_gate_may_want_shorter_bodies() -> None:
    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            assert (await client.ask(post("/a", 10, b"0123456789"))).status == 200
            answer = await client.ask(post("/a", 11))
            assert answer.status == 413 and "10 bytes" in error_of(answer)
        async with bench.client() as client:
            assert (await client.ask(post("/a", None, b"b\r\n0123456789a\r\n"))).status == 413

    gate = Gate(body_bytes=10)
    run(test, gate=gate)
    assert [each.ended for each in gate.passes] == [1, 1, 1]


def test_a_gate_that_fails_lets_nobody_in(caplog: pytest.LogCaptureFixture) -> None:
    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            answer = await client.ask(b"GET /broken HTTP/1.1\r\nHost: h\r\n\r\n")
            assert answer.status == 500 and "secret" not in error_of(answer)
        async with bench.client() as client:
            assert (await client.ask(GET)).status == 200

    with caplog.at_level(logging.ERROR, "weft.http"):
        run(test, gate=Gate())
    assert "secret" in caplog.text


@settings(max_examples=15, deadline=None)
@given(
    which=st.lists(st.sampled_from(range(len(VALID) + 1)), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 1000), max_size=10),
)
def test_a_pipeline_passes_the_gate_however_it_is_split(which: list[int], cuts: list[int]) -> None:
    gate = Gate()
    requests = [*VALID, post("/no", 7, b"nothing")]

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            await trickle(client, b"".join(requests[i] for i in which), cuts)
            for i in which:
                answer = await client.answer()
                while answer.status == 100:
                    answer = await client.answer()
                assert answer.status == (401 if i == len(VALID) else 200)
        assert all(each.ended == 1 for each in gate.passes)

    run(test, echo, ClientLimits(pipeline=2), gate=gate)


# Bytes in flight


def test_nobody_gets_more_than_half_of_what_is_left() -> None:
    budget = ByteBudget(100)
    budget.take(100)
    with pytest.raises(OverBudget, match="100 of 100"):
        budget.take(1)
    budget.release(100)
    for count in (60, 20, 10, 5):
        budget.take(count)
    with pytest.raises(OverBudget):
        budget.take(3)
    budget.take(2)
    assert budget.held_bytes == 97
    budget.release(97)
    budget.take(60)
    for own_bytes in range(60, 100):
        budget.take(1, own_bytes)  # alone it may grow as far as there is room
    with pytest.raises(OverBudget):
        budget.take(1, 100)
    budget.add(50)
    with pytest.raises(OverBudget):
        budget.take(1)


@given(st.lists(st.integers(0, 300), max_size=30))
def test_what_is_taken_never_exceeds_the_limit(counts: list[int]) -> None:
    budget, taken = ByteBudget(256), []
    for count in counts:
        try:
            budget.take(count)
            taken.append(count)
        except OverBudget:
            assert count > 0
    assert budget.held_bytes == sum(taken) <= 256
    for count in taken:
        budget.release(count)
    budget.take(256)


def test_bodies_are_counted_from_their_head_to_their_answer() -> None:
    later, budget = Later(), ByteBudget(4 * MB)
    small = b"x" * UNCOUNTED_BYTES

    async def test(bench: Bench) -> None:
        async with bench.client() as first, bench.client() as second:
            first.send(post("/first", 3 * MB, b"the beginning"))
            await until(lambda: budget.held_bytes == 3 * MB)
            answer = await second.ask(post("/second", MB))
            assert answer.status == 503 and answer.headers["retry-after"] == "1" and "no room" in error_of(answer)
            assert await second.ended()
            async with bench.client() as third:
                third.send(post("/small", len(small), small))
                (await later.arrived.get()).respond(HttpResponse(200))
                assert (await third.answer()).status == 200
            first.send(b"x" * (3 * MB - 13))
            exchange = await later.arrived.get()
            assert budget.held_bytes == 3 * MB
            exchange.respond(HttpResponse(200))
            assert budget.held_bytes == 0

    run(test, later, budget=budget)


def test_what_is_lost_is_counted_no_more() -> None:
    later, budget = Later(), ByteBudget(4 * MB)

    async def test(bench: Bench) -> None:
        async with bench.client() as half:
            half.send(post("/half", MB, b"x"))
            await until(lambda: budget.held_bytes == MB)
        await until(lambda: budget.held_bytes == 0)
        async with bench.client() as whole:
            whole.send(post("/whole", MB, b"x" * MB))
            await later.arrived.get()
            assert budget.held_bytes == MB
        await until(lambda: budget.held_bytes == 0)

    run(test, later, budget=budget)


def test_a_chunked_body_is_counted_as_it_grows() -> None:
    later, budget = Later(), ByteBudget(10 * MB)
    chunk = b"%x\r\n%b\r\n" % (MB, b"x" * MB)

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.send(post("/c", None, chunk))
            await until(lambda: 0 < budget.held_bytes <= 2 * MB)
            client.send(chunk * 2 + b"0\r\n\r\n")
            exchange = await later.arrived.get()
            assert len(exchange.body) == 3 * MB and 2 * MB < budget.held_bytes <= 4 * MB
            exchange.respond(HttpResponse(200))
            assert budget.held_bytes == 0
            await client.answer()
            budget.add(1)
            client.send(post("/c", None, chunk * 6))
            assert (await client.answer()).status == 503
            assert budget.held_bytes == 1

    run(test, later, budget=budget)


def test_a_chunked_body_holds_no_more_than_it_may_have() -> None:
    later, budget = Later(), ByteBudget(MB // 2)
    chunk = b"%x\r\n%b\r\n" % (MB // 4, b"x" * (MB // 4))

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.send(post("/c", None, chunk + b"0\r\n\r\n"))
            exchange = await later.arrived.get()
            assert len(exchange.body) == MB // 4 and exchange.held_bytes == budget.held_bytes == MB // 2
            exchange.respond(HttpResponse(200))
            assert (await client.answer()).status == 200 and budget.held_bytes == 0

    run(test, later, ClientLimits(body_bytes=MB // 2), budget=budget)


def test_crumbs_of_a_body_are_joined() -> None:
    later = Later()

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.send(post("/crumbs", 1000))
            for _ in range(999):
                client.send(b"x")
                await asyncio.sleep(0)
            (connection,) = bench.server._connections
            await until(lambda: connection._left_bytes == 1)
            assert len(connection._body_parts) == 1
            client.send(b"y")
            assert (await later.arrived.get()).body == b"x" * 999 + b"y"

    run(test, later)


def test_answers_that_nobody_reads_count_too() -> None:
    budget = ByteBudget(64 * MB)

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.send(GET)
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await until(lambda: budget.held_bytes > 0)
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert len((await client.answer()).body) == 16 * MB
            await until(lambda: budget.held_bytes == 0)
            client.send(GET)
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await until(lambda: budget.held_bytes > 0)
            client.writer.transport.abort()
            await until(lambda: budget.held_bytes == 0)

    run(test, lambda exchange: exchange.respond(HttpResponse(200, b"x" * 16 * MB)), budget=budget)


# TransferProgress


def test_progress_is_judged_by_whole_windows() -> None:
    watched = TransferProgress(10.0, 5.0, now_s=100.0, start=7)
    assert not watched.stalled(105.0, 7)
    assert not watched.stalled(110.5, 57)
    assert not watched.stalled(120.0, 57)
    assert watched.stalled(121.0, 106)
    assert TransferProgress(10.0, 5.0, now_s=0.0, start=0).stalled(10.1, 49)


def test_a_body_may_take_any_time_while_it_comes() -> None:
    later, limits = Later(), ClientLimits(read_s=PATIENCE_S, bytes_per_s=100 / PATIENCE_S)

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.send(post("/slow", 1000))
            await until(lambda: any(each._in_body for each in bench.server._connections))
            (connection,) = bench.server._connections
            now_s = time.monotonic()
            connection.sweep(now_s)
            for came in range(100, 1000, 100):
                client.send(b"x" * 100)
                await until(lambda came=came: connection._left_bytes == 1000 - came)  # type: ignore[misc]
                now_s += 1.1 * PATIENCE_S
                connection.sweep(now_s)
            client.send(b"x" * 99)
            await until(lambda: connection._left_bytes == 1)
            connection.sweep(now_s + 1.1 * PATIENCE_S)
            answer = await client.answer()
            assert answer.status == 408 and "bytes per second" in error_of(answer)

    run(test, later, limits)
    assert later.seen == 0


def test_a_head_may_not_take_any_time_while_it_comes() -> None:
    limits = ClientLimits(read_s=PATIENCE_S)

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.send(b"GET /a HTTP/1.1\r\nHost: h\r\n")
            await until(lambda: any(each._began_s for each in bench.server._connections))
            (connection,) = bench.server._connections
            connection.sweep(time.monotonic() + 1.1 * PATIENCE_S)
            answer = await client.answer()
            assert answer.status == 408 and "head" in error_of(answer)

    run(test, limits=limits)


# Places


def test_the_connection_that_is_idle_longest_leaves_for_a_new_one() -> None:
    async def test(bench: Bench) -> None:
        async with bench.client() as first, bench.client() as second:
            assert (await first.ask(GET)).status == 200
            assert (await second.ask(GET)).status == 200
            assert (await first.ask(GET)).status == 200  # now the second has been idle longer
            async with bench.client() as third:
                assert (await third.ask(GET)).status == 200
                assert await second.ended()
                assert (await first.ask(GET)).status == 200
            assert bench.server.connections <= 2

    run(test, limits=ClientLimits(connections=2))


def test_half_a_head_is_as_good_as_idle() -> None:
    async def test(bench: Bench) -> None:
        async with bench.client() as slow:
            slow.send(b"GET /a HTTP/1.1\r\nHo")
            await until(lambda: any(each._began_s for each in bench.server._connections))
            async with bench.client() as quick:
                assert (await quick.ask(GET)).status == 200
                assert await slow.ended()

    run(test, limits=ClientLimits(connections=1))


def test_who_was_declined_leaves_for_somebody_new_whatever_it_still_sends() -> None:
    gate = Gate()

    async def test(bench: Bench) -> None:
        async with bench.client() as declined:
            declined.send(post("/no", 1000, b"x"))
            await until(lambda: bool(gate.seen))
            async with bench.client() as other:
                assert (await other.ask(GET)).status == 200
                assert await declined.ended()

    run(test, limits=ClientLimits(connections=1, reserve=1), gate=gate)


def test_who_was_refused_and_stays_keeps_nobody_out() -> None:
    async def test(bench: Bench) -> None:
        async with bench.client() as refused:
            assert (await refused.ask(post("/no", MB))).status == 401
            async with bench.client() as other:
                assert (await other.ask(GET)).status == 200
                assert bench.server.connections == 1

    run(test, limits=ClientLimits(connections=1, reserve=1), gate=Gate())


def test_only_so_many_that_were_refused_may_stay() -> None:
    async def test(bench: Bench) -> None:
        async with AsyncExitStack() as stack:
            connections = []
            for _ in range(3):
                client = await stack.enter_async_context(bench.client())
                assert (await client.ask(post("/no", MB))).status == 401
                connections.append([*bench.server._leaving][-1])
            assert [*bench.server._leaving] == connections[1:]
            await until(lambda: connections[0]._transport is None)

    run(test, limits=ClientLimits(connections=2), gate=Gate())


def test_when_all_are_at_work_a_reserve_answers_for_health() -> None:
    later = Later()

    def handler(exchange: HttpExchange) -> None:
        if exchange.path == "/health":
            exchange.respond(HttpResponse(200, b"fine"))
        else:
            later(exchange)

    health = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"

    async def test(bench: Bench) -> None:
        async with bench.client() as busy:
            busy.send(GET)
            exchange = await later.arrived.get()
            for _ in range(3):
                async with bench.client() as probe:
                    answer = await probe.ask(health)
                    assert answer.body == b"fine" and answer.headers["connection"] == "close"
                    assert await probe.ended()
            upload = b"GET /health HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\n"
            for request in (GET, upload):
                async with bench.client() as other:
                    answer = await other.ask(request)
                    assert answer.status == 503 and answer.headers["retry-after"] == "1"
                    async with bench.client() as probe:
                        assert (await probe.ask(health)).body == b"fine"  # who was refused and stays keeps nobody out
            async with bench.client() as silent, bench.client() as probe:
                assert (await probe.ask(health)).body == b"fine"  # who says nothing keeps nobody out
                assert await silent.ended()
            exchange.respond(HttpResponse(200))
            assert (await busy.answer()).status == 200
            async with bench.client() as later_one:
                assert (await later_one.ask(health)).status == 200
        assert await bench.server.drain(PATIENCE_S)

    run(test, handler, ClientLimits(connections=1, reserve=1), vital=frozenset({"/health"}))


# Files


def test_without_a_file_left_it_says_so_once_and_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "PAUSE_S", 0.001)
    short = 5
    accept = socket.socket.accept

    def fail(each: socket.socket) -> tuple[socket.socket, object]:
        nonlocal short
        if short > 0:
            short -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(each)

    async def test(bench: Bench) -> None:
        async with bench.client() as idle:
            assert (await idle.ask(GET)).status == 200
            monkeypatch.setattr(socket.socket, "accept", fail)
            async with bench.client() as client:
                assert (await client.ask(GET)).status == 200
            assert short == 0 and await idle.ended()

    with caplog.at_level(logging.ERROR, "weft.http"):
        run(test)
    (record,) = caplog.records
    assert "Too many open files" in record.message and "ulimit -n" in record.message
