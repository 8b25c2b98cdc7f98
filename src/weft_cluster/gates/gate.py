"""A gate (router): the inference protocol over HTTP and gRPC in front of the servers of a placement.

To clients it behaves like a server (``weft.http``): the same limits, keys and refusals. It computes nothing and keeps
no queue: a request is forwarded at once (``forward``) to the server that ``board`` chooses, over a connection from a
pool (``Link``). Other requests about a model, such as for its metadata, are forwarded to any server that has it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from weft.base.errors import Forbidden, NotFound, RequestError, unknown_name
from weft.base.version import __version__
from weft.http.client import parse_url
from weft.http.limits import ByteBudget
from weft.http.messages import ANYONE, HttpExchange, HttpResponse, Passage, RequestTarget, age_of, rank_of
from weft.http.server import HttpServer
from weft.reports.page import whole_page
from weft.serving.access import Caller, HostNames, Keys, check_origin, names_of
from weft.serving.config import ServerConfig
from weft.serving.endpoints import OPEN, PROBES, VITAL, model_of
from weft.serving.metrics import CONTENT_TYPE, labelled
from weft.serving.request_parameters import ModelTerms, RequestDue, due_of
from weft.serving.routes import SMALL_BODY_BYTES, header_length, peeked, refusal
from weft.serving.server import grpc_tls_of, limits_of, tls_of
from weft.serving.telemetry import make_telemetry
from weft_cluster.gates.board import RoutingBoard
from weft_cluster.gates.forward import Forward, Link
from weft_cluster.gates.grpc_face import GateGrpc
from weft_cluster.placing.placement import PlacedMachine

if TYPE_CHECKING:
    import ssl


ENDS = ("ok", "refused", "failed", "lost", "left")
"""How a request ends at a server: with a result; with 503 or 504; with another error; because the server was lost;
because the client left."""
OWN = ("unmeetable", "nowhere", "expired", "tried_again", "lost")
"""Decisions of the gate: refused as unmeetable, no server, timeout, retried, lost with its server."""


class GateFamily(NamedTuple):
    """One metric family, and its samples: one per server, or one per decision of the gate."""

    name: str
    kind: str
    help: str
    samples: Callable[[Mapping[str, Any]], Iterator[tuple[str, float]]]


def metrics_text(status: Mapping[str, Any]) -> str:
    """Return the text of ``/metrics`` for the state that ``Gate.status`` returns."""
    lines = []
    for family in FAMILIES:
        lines.append(f"# HELP {family.name} {family.help}\n# TYPE {family.name} {family.kind}\n")
        lines += [f"{family.name}{{{labels}}} {value:.10g}\n" for labels, value in family.samples(status)]
    return "".join(lines)


def _per_server(
    value: Callable[[Mapping[str, Any]], float],
) -> Callable[[Mapping[str, Any]], Iterator[tuple[str, float]]]:
    """Return a function that yields (labels, value) for each server in a gate's status."""
    return lambda status: ((_labels(server), value(server)) for server in status["servers"])


def _end_samples(status: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the number of requests at each server, by how they ended."""
    for server in status["servers"]:
        for end in ENDS:
            yield f"{_labels(server)},{labelled('end', end)}", server["ended"].get(end, 0)


def _decision_samples(status: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the number of the gate's own decisions, by kind."""
    for decision in OWN:
        yield f"{labelled('gate', status['gate'])},{labelled('what', decision)}", status["counts"].get(decision, 0)


def _labels(server: Mapping[str, Any]) -> str:
    return f"{labelled('machine', server['machine'])},{labelled('url', server['url'])}"


FAMILIES = (
    GateFamily("weft_gate_up", "gauge", "Whether a server takes requests.", _per_server(lambda server: server["up"])),
    GateFamily("weft_gate_requests_total", "counter", "Requests sent to a server, by how they ended.", _end_samples),
    GateFamily(
        "weft_gate_in_flight", "gauge", "Requests at a server.", _per_server(lambda server: server["in_flight"])
    ),
    GateFamily(
        "weft_gate_ahead_seconds",
        "gauge",
        "Work before another request.",
        _per_server(lambda server: server["ahead_ms"] / 1e3),
    ),
    GateFamily("weft_gate_decisions_total", "counter", "What the gate decided itself.", _decision_samples),
)


log = logging.getLogger("weft.gate")

CONNECTIONS = 256
"""Size of the connection pool to each server."""
PEEKED_BYTES = 64 * 1024
"""Largest JSON body that is parsed for its deadline: parsing a longer one would block the event loop."""
PAST = 32
"""Removed servers whose counts are kept for ``status``; more would grow without limit under autoscaling."""
HTML = "text/html; charset=utf-8"
EXTENSIONS = ("binary_tensor_data", "classification", "parameters", "schedule_policy")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """Settings of a gate towards its servers; those towards clients are a ``ServerConfig``."""

    router: str = "slack"
    """One of ``cluster.router.ROUTERS``."""
    gates: int = 1
    """How many gates divide the requests."""
    tries: int = 2
    """Most attempts per request, each at another server; 1: no retries."""
    key: str | None = None
    """API key that the servers require."""
    context: ssl.SSLContext | None = None
    """TLS context for servers under https; None: the system's certificates."""
    name: str = "gate"


USUAL_SETTINGS = GateSettings()


class Gate:
    """A gate (router) on the running event loop; not thread-safe."""

    def __init__(self, models: Iterable[str], face: ServerConfig, settings: GateSettings = USUAL_SETTINGS) -> None:
        """models: the gate is ready only if all of these have a server. face: settings towards clients."""
        self.config, self.settings = face, settings
        self.board = RoutingBoard(models, router=settings.router, gates=settings.gates)
        self.tries = settings.tries
        self.links: dict[int, Link] = {}
        """By their places on the board."""
        self.counts: Counter[str] = Counter()
        """Decisions of the gate itself (OWN), counted."""
        self.refused: Counter[str] = Counter()
        """Model -> requests without a result because of missing time or queue space."""
        self._past: deque[dict[str, Any]] = deque(maxlen=PAST)
        """Last rows of ``status`` of removed servers."""
        self.keys = Keys(face.network.api_key, face.network.keys_file)
        self.port: int | None = None
        self.grpc_port: int | None = None
        self._hosts = HostNames(names_of(face))
        self._draining = False
        self._grpc: GateGrpc | None = None
        self.telemetry = make_telemetry(face.telemetry.otlp)
        self.budget = ByteBudget(face.inflight_bytes)
        self._http = HttpServer(self.handle, limits_of(face.limits), gate=self.judge, budget=self.budget, vital=VITAL)

    async def start(self, port_offset: int = 0) -> int:
        """Listen, on the configured ports plus *port_offset*; return the HTTP port.

        OSError if a port cannot be bound, RuntimeError if that of gRPC cannot.
        """
        network = self.config.network
        self.port = await self._http.start(network.host, network.http_port + port_offset, tls_of(network))
        if network.grpc_port is not None:
            self._grpc = GateGrpc(self, self.config.limits.max_body_bytes)
            grpc_port = network.grpc_port and network.grpc_port + port_offset  # 0 stays 0: a free port
            self.grpc_port = await self._grpc.start(network.host, grpc_port, grpc_tls_of(network))
        return self.port

    async def stop(self) -> None:
        """Drain: accept no new connections.

        Return when all requests on open connections are answered, or after ``drain_s``.
        """
        self._draining = True
        calls = [self._grpc.stop(self.config.network.drain_s)] if self._grpc else []
        await asyncio.gather(self._http.drain(self.config.network.drain_s), *calls)
        self._http.close()
        await asyncio.gather(*(link.close() for link in self.links.values()))
        await asyncio.to_thread(self.telemetry.close)

    async def set_servers(self, servers: Mapping[str, PlacedMachine]) -> None:
        """Replace the servers: URL -> machine.

        Known servers keep their connections; a server that is not listed gets no new requests, and is removed by a
        later call after it has answered its requests.
        """
        linked = {(link.target.url, link.placed): link for link in self.links.values()}
        listed = sorted(servers.items(), key=lambda item: (item[1].name, item[0]))
        for url, machine in listed:
            if (url, machine) not in linked:
                self._add_server(url, machine)
        for key, link in linked.items():
            link.want(key in listed)
            if key not in listed and not self.board.estimates[link.place].in_flight:
                self._past.append(self._row(link))
                del self.links[link.place]
                self.board.remove(link.place)
                await link.close()

    def _add_server(self, url: str, machine: PlacedMachine) -> None:
        target, place = parse_url(url, self.settings.context), self.board.add(machine)
        self.links[place] = Link(
            machine, target, place, self._on_link_change, key=self.settings.key, connections=CONNECTIONS
        )

    def _on_link_change(self, link: Link) -> None:
        self.board.set_up(link.place, up=link.up)
        log.info("%s at %s %s", link.machine, link.target.url, "takes requests" if link.up else "takes none")

    # Admission, by the head of a request

    def judge(self, method: str, target: RequestTarget, headers: dict[str, str]) -> HttpResponse | Passage:
        """Admit a request before its body is read, or return the response that refuses it."""
        try:
            path = target.raw_path
            if path not in PROBES:
                self._hosts.check(headers)
            caller = None if path in OPEN else self.keys.require_caller(headers)
            if "origin" in headers:
                check_origin(method, headers)
            model, infers = model_of(path)
            if model and model not in self.board.models:
                raise NotFound(unknown_name("model", model, self.board.models))
            if model and infers and method == "POST":
                return _AdmittedQuery(self._infer, model, self.config.limits.max_body_bytes, caller)
            if method not in ("GET", "HEAD") and path != "/v2/repository/index":
                raise Forbidden(f"a gate passes on requests for results; {method[:20]} {path[:200]!r} is for a server")
            return _AdmittedQuery(
                self._forward_query if model else self._find_page(path), model, SMALL_BODY_BYTES, caller=None
            )
        except RequestError as error:
            return refusal(error)

    def _find_page(self, path: str) -> Callable[[HttpExchange, str], None]:
        """The handler of a path that the gate answers itself. NotFound if there is none."""
        answer = self._pages.get(path)
        if answer is None:
            raise NotFound(f"no such path: {path[:200]!r}")
        return lambda exchange, _: exchange.respond(answer(self))

    def handle(self, exchange: HttpExchange) -> None:
        """Answer an admitted request, now or after its server has answered."""
        query = exchange.passage
        assert isinstance(query, _AdmittedQuery)
        try:
            query.answer(exchange, query.model)
        except RequestError as error:
            exchange.respond(refusal(error))

    # Requests for a model

    def _infer(self, exchange: HttpExchange, model: str) -> None:
        """Forward an inference, with its deadline and a priority that its client's key allows."""
        query = exchange.passage
        key_rank = query.caller.rank if isinstance(query, _AdmittedQuery) and query.caller else ANYONE
        Forward(self, exchange, model, self._due(exchange, model), rank_of(exchange.headers).within(key_rank)).go()

    def _forward_query(self, exchange: HttpExchange, model: str) -> None:
        """Forward a request about a model, such as for its metadata, to any server that has it."""
        Forward(self, exchange, model).go()

    def _due(self, exchange: HttpExchange, model: str) -> RequestDue:
        """The deadline of a request, from its parameters if the gate may parse them, else the model's default.

        Large or compressed JSON is parsed only by the server.
        """
        headers = exchange.headers
        length = header_length(headers)
        large = (len(exchange.body) if length is None else length) > PEEKED_BYTES
        parameters = {} if large or "content-encoding" in headers else peeked(exchange.body, length)
        terms = next((link.terms[model] for link in self.links.values() if model in link.terms), ModelTerms())
        return due_of(parameters, exchange.received_ns - (age_of(headers) or 0), terms)

    # Pages that the gate answers itself

    def _ready(self) -> HttpResponse:
        """Readiness probe: 503 with a reason while draining, or if a model of the placement has no server."""
        reason = "the gate is going down" if self._draining else ""
        if missing := self.board.missing:
            reason = f"no server takes requests for {', '.join(missing[:5])}"
        return _json({"ready": not reason} | ({"reason": reason} if reason else {}), 503 if reason else 200)

    def _index(self) -> HttpResponse:
        missing = self.board.missing
        states = {model: "UNAVAILABLE" if model in missing else "READY" for model in self.board.models}
        return _json([{"name": name, "version": "", "state": state, "reason": ""} for name, state in states.items()])

    def status(self) -> dict[str, Any]:
        """Return the state of the cluster as this gate sees it: the JSON of ``/weft/cluster``."""
        return {
            "gate": self.settings.name,
            "missing": self.board.missing,
            "counts": dict(self.counts),
            "refused": dict(self.refused),
            "servers": [self._row(link) for _, link in sorted(self.links.items())],
            "past": list(self._past),
        }

    def _row(self, link: Link) -> dict[str, Any]:
        """The entry of a server in ``status``."""
        return {
            "machine": link.machine,
            "url": link.target.url,
            "up": link.up,
            "in_flight": self.board.estimates[link.place].in_flight,
            "ahead_ms": self.board.ahead(link.place) / 1e6,
            "way_ms": link.network_ns / 1e6,
            "ended": dict(link.counts),
            "mean_ms": link.took_ns / 1e6 / max(1, sum(link.counts.values())),
        }

    _pages: Mapping[str, Callable[[Gate], HttpResponse]] = {
        "/": lambda gate: HttpResponse(200, whole_page("cluster.html", "weft_cluster.gates").encode(), HTML),
        "/v2": lambda gate: _json({"name": "weft", "version": __version__, "extensions": list(EXTENSIONS)}),
        "/v2/health/live": lambda gate: _json({"live": True}),
        "/v2/health/ready": lambda gate: gate._ready(),
        "/v2/repository/index": lambda gate: gate._index(),
        "/weft/cluster": lambda gate: _json(gate.status()),
        "/metrics": lambda gate: HttpResponse(200, metrics_text(gate.status()).encode(), CONTENT_TYPE),
    }


class _AdmittedQuery:
    """An admitted request: the handler that answers it, and the API key whose quota it uses until it ends.

    body_bytes: the largest body that it may have. caller: the holder of the key; None if none is needed.
    """

    __slots__ = ("answer", "body_bytes", "caller", "model")

    def __init__(
        self, answer: Callable[[HttpExchange, str], None], model: str, body_bytes: int, caller: Caller | None
    ) -> None:
        self.answer, self.model, self.body_bytes, self.caller = answer, model, body_bytes, caller
        if caller is not None:
            caller.begin()

    def end(self) -> None:
        if self.caller is not None:
            self.caller.end()


def _json(content: Any, status: int = 200) -> HttpResponse:
    return HttpResponse(status, orjson.dumps(content))
