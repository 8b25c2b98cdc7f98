"""A request on its way through a gate: to a server, perhaps to a second one, and its answer back.

A ``Link`` is a server behind a gate: its address, the connection pool to it, and its health probe.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote

from weft.base.errors import Expired, Failed, Overloaded, RequestError
from weft.http.client import Answer, Pool, ServerAddress, call, request_bytes
from weft.http.messages import AGE, ANYONE, ClientRank, HttpExchange, HttpResponse, age_of, estimate_in
from weft.serving.request_parameters import ModelTerms, RequestDue
from weft.serving.routes import refusal
from weft.serving.telemetry import PARENT, Telemetry
from weft_cluster.placing.placement import PlacedMachine

if TYPE_CHECKING:
    from weft_cluster.gates.board import RoutingBoard
    from weft_cluster.routing.router import Replica


LOOK_S = 0.25
"""Period of the health probe; a broken connection triggers one at once."""
PATIENCE_S = 1.0
"""Timeout of a health probe."""
SILENT_NS = 5_000_000_000
"""A server whose probes time out is down after this time without any answer: a busy one is slow to answer probes."""
SMOOTHING = 0.05
"""Weight of a round trip that is longer than the estimate; a shorter one replaces it, since queueing only lengthens
it."""


class Link:
    """One server and its health. *changed* is called when it begins or ceases to take requests."""

    def __init__(
        self,
        placed: PlacedMachine,
        target: ServerAddress,
        place: int,
        changed: Callable[[Link], None],
        *,
        key: str | None,
        connections: int,
    ) -> None:
        self.placed, self.target, self.place, self.key = placed, target, place, key
        self.machine = placed.name
        self.shown = quote(self.machine)
        """The machine's name, quoted for an HTTP header."""
        self.pool = Pool(target, connections)
        self.up = False
        self.way_ns = 0
        """Round trip of the network, as the health probe measures it."""
        self.terms: dict[str, ModelTerms] = {}
        """Model -> the default deadline of its requests."""
        self.counts: Counter[str] = Counter()
        """How requests ended here."""
        self.took_ns = 0
        self.heard_ns = 0
        """When a request was last answered here."""
        self._well_ns = 0
        self._changed, self._wanted = changed, True
        self._control = Pool(target, 1)
        self._sooner = asyncio.Event()
        self._probes = asyncio.create_task(self._probe_forever())

    def suspect(self) -> None:
        """Probe at once, because a connection broke."""
        self._sooner.set()

    def want(self, wanted: bool) -> None:
        """Set whether it gets new requests; those that it has are answered."""
        self._wanted = wanted
        self._set_up(up=self.up)

    async def close(self) -> None:
        """End the probes, and close all connections, broken requests included."""
        self._probes.cancel()
        await asyncio.gather(self._probes, return_exceptions=True)
        self.pool.lose()
        await self._control.close()
        await self.pool.close()

    async def _probe_forever(self) -> None:
        while True:
            self._sooner.clear()
            await self._probe()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._sooner.wait()

    async def _probe(self) -> None:
        """Probe readiness. A probe that times out does not take the server down while it still answers requests."""
        began = time.monotonic_ns()
        try:
            answer = await self._ask("v2/health/ready")
            up, self._well_ns = answer.status == 200, time.monotonic_ns()
            passed = self._well_ns - began
            if up and not self.up:
                await self._learn()
        except TimeoutError:
            if time.monotonic_ns() - max(self.heard_ns, self._well_ns) > SILENT_NS:
                self._set_up(up=False)
                self.pool.lose()
            return
        except OSError:
            self._set_up(up=False)
            self.pool.lose()
            return
        if up:
            longer = self.way_ns and passed > self.way_ns
            self.way_ns = self.way_ns + round(SMOOTHING * (passed - self.way_ns)) if longer else passed
        self._set_up(up=up)

    def _set_up(self, *, up: bool) -> None:
        up = up and self._wanted
        if up != self.up:
            self.up = up
            self._changed(self)

    async def _learn(self) -> None:
        """Read the default deadlines of its models."""
        for placed in self.placed.models:
            answer = await self._ask(f"v2/models/{quote(placed.model, safe='')}/config")
            if answer.status == 200:
                self.terms[placed.model] = _terms(answer.body)

    async def _ask(self, path: str) -> Answer:
        """GET *path*. TimeoutError without an answer within ``PATIENCE_S``, OSError without a connection."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await call(self._control, request_bytes(self.target, "GET", path, key=self.key))
        except OSError:
            self._control.lose()
            raise


def _terms(body: bytes) -> ModelTerms:
    """Parse the default deadlines from the configuration of a model; none if it has none."""
    try:
        parameters = json.loads(body)["parameters"]
        terms = {
            key: float(parameters[f"weft_{key}"]["string_value"]) for key in _STATED if f"weft_{key}" in parameters
        }
    except (ValueError, KeyError, TypeError):
        return ModelTerms()
    return ModelTerms(**terms)


_STATED = ("slo_ms", "timeout_ms")


log = logging.getLogger("weft.gate")

MACHINE = "Weft-Machine"
"""Response header with the machine that computed the answer."""
LATE_S = 0.02
"""How long after its deadline a strict request waits for its server's own word."""

_PASSED_ON = (
    "accept-encoding", "content-encoding", "content-type", "inference-header-content-length", "tracestate",
)  # fmt: skip
_HANDED_BACK = re.compile(
    rb"\r\n(content-encoding|content-type|inference-header-content-length|retry-after|vary)[ \t]*:[ \t]*([^\r\n]*)",
    re.IGNORECASE,
)
_ELSEWHERE = frozenset({503, 504})
"""Statuses of a server that cannot take a request in time; the request is retried at another one."""


class GateState(Protocol):
    """The part of a gate that a forwarded request uses."""

    board: RoutingBoard
    links: dict[int, Link]
    """By their places on the board."""
    tries: int
    """Most attempts per request: one, and one retry at another server."""
    counts: Counter[str]
    """Requests that the gate itself refused, gave up or retried, by reason."""
    refused: Counter[str]
    """Model -> requests without a result because of missing time or queue space."""
    telemetry: Telemetry


class Forward:
    """One request on its way through a gate, with its retry and its timeout.

    Retry: a request that a server refused (503, 504), or whose server or connection was lost, is sent to another
    server, once. That is safe because inference has no side effects.
    """

    keep_bytes = sys.maxsize

    __slots__ = (
        "_age", "_due", "_exchange", "_gate", "_hop", "_link", "_model", "_rank", "_replica", "_sent_ns", "_timer",
        "_tries",
    )  # fmt: skip

    def __init__(
        self,
        gate: GateState,
        exchange: HttpExchange,
        model: str,
        due: RequestDue | None = None,
        rank: ClientRank = ANYONE,
    ) -> None:
        """due: when it is, if it is for a result; rank: what its client's key gives it."""
        self._gate, self._exchange, self._model, self._due = gate, exchange, model, due
        self._age, self._rank = age_of(exchange.headers) or 0, rank
        self._hop = gate.telemetry.passes(model, exchange.headers.get(PARENT, ""))
        self._link: Link | None = None
        self._replica: Replica | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tries = self._sent_ns = 0

    def go(self) -> None:
        """Send it to where it is answered first, or refuse it at once."""
        try:
            self._go()
        except RequestError as error:
            self._hop.end({"weft.refused": error.reason, "http.response.status_code": error.status})
            self._count(error.status)
            raise

    def _go(self) -> None:
        gate, now = self._gate, time.monotonic_ns()
        if self._strict and self._due and gate.board.hopeless(self._model, self._due.at, now):
            gate.counts["unmeetable"] += 1
            left_ms = (self._due.at - now) / 1e6
            said = f"{self._model}: its deadline cannot be met on any machine; {left_ms:.1f} ms are left"
            raise Expired(said, reason="unmeetable")
        if not self._send(now, None):
            gate.counts["nowhere"] += 1
            raise Overloaded(f"{self._model}: no machine that has it takes requests now; send it again later")
        self._exchange.gone = self._on_client_left
        if self._due and self._due.strict:
            left_s = max(0, self._due.at - now) / 1e9
            self._timer = asyncio.get_running_loop().call_later(left_s + LATE_S, self._expire)

    @property
    def _strict(self) -> bool:
        return self._due is not None and self._due.strict

    def _send(self, now: int, but: int | None) -> bool:
        choice = self._gate.board.choose(self._model, now, but, self._due.at if self._due and not self._tries else None)
        if choice is None or (self._tries and self._due and self._due.strict and choice.expected > self._due.at):
            return False
        self._tries += 1
        self._replica, link = choice.replica, self._gate.links[choice.replica.machine]
        self._link, self._sent_ns = link, now
        self._gate.board.sent(self._model, choice.replica, now)
        link.pool.send(self, self._tries)
        return True

    # What the connection tells us.

    def request(self, number: int) -> bytes:
        exchange, link = self._exchange, self._link
        assert link is not None
        age_us = (self._age + time.monotonic_ns() - exchange.received_ns) // 1000
        headers = exchange.headers
        lines = [f"{name}: {headers[name]}\r\n" for name in _PASSED_ON if name in headers]
        part_of = f"{PARENT}: {self._hop.parent}\r\n" if self._hop.parent else ""
        rank = "" if self._rank == ANYONE else self._rank.header()
        head = f"{''.join(lines)}{part_of}{rank}{AGE}: {age_us}\r\n"
        target = exchange.target
        path = target.raw_path[1:] + (f"?{target.query}" if target.query else "")
        method = "POST" if exchange.method == "POST" else "GET"
        return request_bytes(link.target, method, path, key=link.key, head=head, body=exchange.body)

    def sent(self, number: int, now_s: float) -> None:
        """Called when the request has been written. It was counted before, when it was given to the connection pool."""

    def answered(self, number: int, answer: Answer, now_s: float) -> None:
        link, now = self._end_try()
        link.heard_ns = now
        estimate = estimate_in(answer.head)
        if estimate is not None:
            self._gate.board.heard(link.place, self._model, estimate, now, link.way_ns)
        link.counts["ok" if answer.status == 200 else "refused" if answer.status in _ELSEWHERE else "failed"] += 1
        link.took_ns += now - self._sent_ns
        elsewhere = answer.status == 503 or (answer.status == 504 and self._strict)
        if elsewhere and self._again(now, link.place):
            return
        if answer.status == 401:
            log.error("%s at %s does not take this gate's key", link.machine, link.target.url)
            self._respond(refusal(Failed(f"{link.machine} does not take this gate's key; see the gate's log")))
            return
        self._respond(_response(answer, link.shown))

    def broken(self, number: int, why: str, now_s: float) -> None:
        link, now = self._end_try()
        link.counts["lost"] += 1
        link.suspect()
        if self._again(now, link.place) or self._again(now, None):
            return
        self._gate.counts["lost"] += 1
        said = f"{self._model}: {link.machine} was lost with it, and nobody else can answer in time: {why}"
        self._respond(refusal(Overloaded(said)))

    def _end_try(self) -> tuple[Link, int]:
        link, self._link = self._link, None
        assert link is not None
        self._gate.board.ended(link.place)
        return link, time.monotonic_ns()

    def _again(self, now: int, but: int | None) -> bool:
        """Try another server, where that can still be in time."""
        if self._tries >= self._gate.tries or not self._exchange.open or not self._send(now, but):
            return False
        self._gate.counts["tried_again"] += 1
        return True

    # How it ends otherwise.

    def _on_client_left(self) -> None:
        """Its client went away."""
        self._forget()
        self._hop.end({"weft.tries": self._tries})

    def _expire(self) -> None:
        self._timer = None
        self._forget()
        self._gate.counts["expired"] += 1
        self._respond(refusal(Expired(f"{self._model}: its deadline passed before it was done")))

    def _forget(self) -> None:
        """Stop waiting for the server."""
        link = self._link
        if link is not None:
            self._end_try()
            link.counts["left"] += 1
            link.pool.abandon(self)
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _respond(self, response: HttpResponse) -> None:
        self._stop_timer()
        self._exchange.respond(response)
        self._count(response.status)
        machine = dict(response.headers).get(MACHINE, "")
        self._hop.end(
            {"weft.machine": machine, "weft.tries": self._tries, "http.response.status_code": response.status}
        )

    def _count(self, status: int) -> None:
        if self._due is not None and status in _ELSEWHERE:
            self._gate.refused[self._model] += 1


def _response(answer: Answer, machine: str) -> HttpResponse:
    """An answer as it goes on to the client."""
    kind, headers = "application/json", [(MACHINE, machine)]
    for name, value in _HANDED_BACK.findall(answer.head):
        if name.lower() == b"content-type":
            kind = value.decode("latin-1")
        else:
            headers.append((name.decode("latin-1"), value.decode("latin-1")))
    return HttpResponse(answer.status, answer.body, kind, tuple(headers))
