"""A request that a gate forwards: to a server, perhaps to a second one, and its answer back to the client.

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
"""Period of health probes in seconds; a broken connection triggers one at once."""
PATIENCE_S = 1.0
"""Timeout of a health probe, in seconds."""
SILENT_NS = 5_000_000_000
"""A server whose probes time out is down after this time without any answer: a busy one is slow to answer probes."""
SMOOTHING = 0.05
"""Weight of a round trip that is longer than the estimate; a shorter one replaces the estimate."""


class Link:
    """A server behind a gate: its address, connection pool and health.

    placed: its machine in the placement. place: its index on the board. changed: called when the server begins or
    ceases to take requests. key: API key of the server. connections: size of the pool. Probes run as a task on the
    gate's event loop until ``close``.
    """

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
        self.header_name = quote(self.machine)
        """The machine's name, quoted for an HTTP header."""
        self.pool = Pool(target, connections)
        self.up = False
        self.network_ns = 0
        """Round trip of the network, as the health probe measures it."""
        self.terms: dict[str, ModelTerms] = {}
        """Model -> the default deadline of its requests."""
        self.counts: Counter[str] = Counter()
        """Requests by how they ended at this server (``gate.ENDS``)."""
        self.took_ns = 0
        """Sum of the times from sending a request to its answer."""
        self.heard_ns = 0
        """When a request was last answered here."""
        self._probed_ns = 0
        """When a probe was last answered."""
        self._changed, self._wanted = changed, True
        self._control = Pool(target, 1)  # a connection for probes, which must not wait for inferences
        self._sooner = asyncio.Event()
        self._probes = asyncio.create_task(self._probe_forever())

    def suspect(self) -> None:
        """Trigger a probe at once, because a connection broke."""
        self._sooner.set()

    def want(self, wanted: bool) -> None:
        """Set whether the server gets new requests; requests that it already has are answered."""
        self._wanted = wanted
        self._set_up(up=self.up)

    async def close(self) -> None:
        """End the probes, and close all connections, broken requests included."""
        self._probes.cancel()
        await asyncio.gather(self._probes, return_exceptions=True)
        self.pool.abort_all()
        await self._control.close()
        await self.pool.close()

    async def _probe_forever(self) -> None:
        """Probe every ``LOOK_S`` seconds, or at once after ``suspect``."""
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
            answer = await self._get("v2/health/ready")
            up, self._probed_ns = answer.status == 200, time.monotonic_ns()
            round_trip_ns = self._probed_ns - began
            if up and not self.up:
                await self._read_terms()
        except TimeoutError:
            if time.monotonic_ns() - max(self.heard_ns, self._probed_ns) > SILENT_NS:
                self._set_up(up=False)
                self.pool.abort_all()
            return
        except OSError:
            self._set_up(up=False)
            self.pool.abort_all()
            return
        if up:
            # A shorter round trip counts at once, a longer one only slowly: probes wait behind other work.
            increase_ns = round_trip_ns - self.network_ns
            is_longer = self.network_ns and increase_ns > 0
            self.network_ns = self.network_ns + round(SMOOTHING * increase_ns) if is_longer else round_trip_ns
        self._set_up(up=up)

    def _set_up(self, *, up: bool) -> None:
        """Record whether the server answered a probe as ready, and report a change."""
        up = up and self._wanted
        if up != self.up:
            self.up = up
            self._changed(self)

    async def _read_terms(self) -> None:
        """Read the default deadlines of the server's models."""
        for placed in self.placed.models:
            answer = await self._get(f"v2/models/{quote(placed.model, safe='')}/config")
            if answer.status == 200:
                self.terms[placed.model] = _parse_terms(answer.body)

    async def _get(self, path: str) -> Answer:
        """GET *path*. TimeoutError without an answer within ``PATIENCE_S``, OSError without a connection."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await call(self._control, request_bytes(self.target, "GET", path, key=self.key))
        except OSError:
            self._control.abort_all()
            raise


def _parse_terms(body: bytes) -> ModelTerms:
    """Parse the default deadlines in a model's configuration; without any if there are none or the body is invalid."""
    try:
        parameters = json.loads(body)["parameters"]
        terms = {
            key: float(parameters[f"weft_{key}"]["string_value"]) for key in _TERM_KEYS if f"weft_{key}" in parameters
        }
    except (ValueError, KeyError, TypeError):
        return ModelTerms()
    return ModelTerms(**terms)


_TERM_KEYS = ("slo_ms", "timeout_ms")


log = logging.getLogger("weft.gate")

MACHINE = "Weft-Machine"
"""Response header with the machine that computed the answer."""
LATE_S = 0.02
"""Grace period after a strict request's deadline, in which its server's own refusal may still arrive."""

_FORWARDED_HEADERS = (
    "accept-encoding", "content-encoding", "content-type", "inference-header-content-length", "tracestate",
)  # fmt: skip
_RETURNED_HEADERS = re.compile(
    rb"\r\n(content-encoding|content-type|inference-header-content-length|retry-after|vary)[ \t]*:[ \t]*([^\r\n]*)",
    re.IGNORECASE,
)
_RETRIED_STATUSES = frozenset({503, 504})
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
    """One forwarded request, with its retry and its timeout.

    Retry: a request that a server refused (503, 504), or whose server or connection was lost, is sent to another
    server, once. That is safe because inference has no side effects.
    """

    keep_bytes = sys.maxsize
    """Bytes of an answer that the connection pool keeps: all."""

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
        """due: deadline of an inference; None for other requests. rank: priority that the client's API key gives.

        _age: nanoseconds that the request had spent elsewhere before it came here. _hop: its telemetry span.
        """
        self._gate, self._exchange, self._model, self._due = gate, exchange, model, due
        self._age, self._rank = age_of(exchange.headers) or 0, rank
        self._hop = gate.telemetry.begin_hop(model, exchange.headers.get(PARENT, ""))
        self._link: Link | None = None
        self._replica: Replica | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tries = self._sent_ns = 0

    def go(self) -> None:
        """Send the request to the server that answers first. RequestError if it is refused at once."""
        try:
            self._start()
        except RequestError as error:
            self._hop.end({"weft.refused": error.reason, "http.response.status_code": error.status})
            self._count(error.status)
            raise

    def _start(self) -> None:
        """Send the request, and start its timeout if it has a strict deadline. RequestError if it is refused."""
        gate, now = self._gate, time.monotonic_ns()
        if self._strict and self._due and gate.board.unmeetable(self._model, self._due.deadline_ns, now):
            gate.counts["unmeetable"] += 1
            left_ms = (self._due.deadline_ns - now) / 1e6
            message = f"{self._model}: its deadline cannot be met on any machine; {left_ms:.1f} ms are left"
            raise Expired(message, reason="unmeetable")
        if not self._send(now, excluded=None):
            gate.counts["nowhere"] += 1
            raise Overloaded(f"{self._model}: no machine that has it takes requests now; send it again later")
        self._exchange.gone = self._on_client_left
        if self._due and self._due.strict:
            left_s = max(0, self._due.deadline_ns - now) / 1e9
            self._timer = asyncio.get_running_loop().call_later(left_s + LATE_S, self._expire)

    @property
    def _strict(self) -> bool:
        return self._due is not None and self._due.strict

    def _send(self, now: int, excluded: int | None) -> bool:
        """Send the request to a server other than *excluded* (a place); False if none can take it, or not in time.

        Only the first attempt passes the deadline to the board, which may then probe a server without recent reports.
        """
        choice = self._gate.board.choose(
            self._model, now, excluded, self._due.deadline_ns if self._due and not self._tries else None
        )
        if choice is None or (
            self._tries and self._due and self._due.strict and choice.expected > self._due.deadline_ns
        ):
            return False
        self._tries += 1
        self._replica, link = choice.replica, self._gate.links[choice.replica.machine]
        self._link, self._sent_ns = link, now
        self._gate.board.sent(self._model, choice.replica, now)
        link.pool.send(self, self._tries)
        return True

    # Called by the connection pool; *number* counts the attempts.

    def request(self, number: int) -> bytes:
        """Return the bytes to send to the chosen server."""
        exchange, link = self._exchange, self._link
        assert link is not None
        age_us = (self._age + time.monotonic_ns() - exchange.received_ns) // 1000
        headers = exchange.headers
        lines = [f"{name}: {headers[name]}\r\n" for name in _FORWARDED_HEADERS if name in headers]
        trace_header = f"{PARENT}: {self._hop.parent}\r\n" if self._hop.parent else ""
        rank = "" if self._rank == ANYONE else self._rank.header()
        head = f"{''.join(lines)}{trace_header}{rank}{AGE}: {age_us}\r\n"
        target = exchange.target
        path = target.raw_path[1:] + (f"?{target.query}" if target.query else "")
        method = "POST" if exchange.method == "POST" else "GET"
        return request_bytes(link.target, method, path, key=link.key, head=head, body=exchange.body)

    def sent(self, number: int, now_s: float) -> None:
        """Do nothing when the request has been written: it was counted when the connection pool got it."""

    def answered(self, number: int, answer: Answer, now_s: float) -> None:
        """Pass the server's answer on to the client, or retry at another server."""
        link, now = self._end_try()
        link.heard_ns = now
        estimate = estimate_in(answer.head)
        if estimate is not None:
            self._gate.board.heard(link.place, self._model, estimate, now, link.network_ns)
        link.counts[
            "ok" if answer.status == 200 else "refused" if answer.status in _RETRIED_STATUSES else "failed"
        ] += 1
        link.took_ns += now - self._sent_ns
        refused = answer.status == 503 or (answer.status == 504 and self._strict)
        if refused and self._retry(now, link.place):
            return
        if answer.status == 401:
            log.error("%s at %s does not take this gate's key", link.machine, link.target.url)
            self._respond(refusal(Failed(f"{link.machine} does not take this gate's key; see the gate's log")))
            return
        self._respond(_response(answer, link.header_name))

    def broken(self, number: int, why: str, now_s: float) -> None:
        """Retry after the server or its connection was lost, or answer the client with 503."""
        link, now = self._end_try()
        link.counts["lost"] += 1
        link.suspect()
        # Another server first; the same one if there is no other, as perhaps only the connection broke.
        if self._retry(now, link.place) or self._retry(now, excluded=None):
            return
        self._gate.counts["lost"] += 1
        message = f"{self._model}: {link.machine} was lost with it, and no other server can answer in time: {why}"
        self._respond(refusal(Overloaded(message)))

    def _end_try(self) -> tuple[Link, int]:
        """Record that the request is no longer at its server; return the server and the time in ns."""
        link, self._link = self._link, None
        assert link is not None
        self._gate.board.ended(link.place)
        return link, time.monotonic_ns()

    def _retry(self, now: int, excluded: int | None) -> bool:
        """Send the request to a server other than *excluded*, if attempts are left and it can be in time."""
        if self._tries >= self._gate.tries or not self._exchange.open or not self._send(now, excluded):
            return False
        self._gate.counts["tried_again"] += 1
        return True

    # Ends without an answer of a server.

    def _on_client_left(self) -> None:
        self._abandon()
        self._hop.end({"weft.tries": self._tries})

    def _expire(self) -> None:
        self._timer = None
        self._abandon()
        self._gate.counts["expired"] += 1
        self._respond(refusal(Expired(f"{self._model}: its deadline passed before it was done")))

    def _abandon(self) -> None:
        """Stop waiting for the server, whose answer will be dropped."""
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
        """Answer the client, and end the request's span."""
        self._stop_timer()
        self._exchange.respond(response)
        self._count(response.status)
        machine = dict(response.headers).get(MACHINE, "")
        self._hop.end(
            {"weft.machine": machine, "weft.tries": self._tries, "http.response.status_code": response.status}
        )

    def _count(self, status: int) -> None:
        """Count an inference that was refused for lack of time or queue space."""
        if self._due is not None and status in _RETRIED_STATUSES:
            self._gate.refused[self._model] += 1


def _response(answer: Answer, machine: str) -> HttpResponse:
    """Convert a server's answer to the response for the client; *machine*: the server's name for a header."""
    kind, headers = "application/json", [(MACHINE, machine)]
    for name, value in _RETURNED_HEADERS.findall(answer.head):
        if name.lower() == b"content-type":
            kind = value.decode("latin-1")
        else:
            headers.append((name.decode("latin-1"), value.decode("latin-1")))
    return HttpResponse(answer.status, answer.body, kind, tuple(headers))
