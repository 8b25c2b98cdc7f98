"""A gate's estimates of the servers behind it, and the choice of a server for a request.

Estimates and routers are those of ``weft_cluster.routing.router``, so a gate decides as a simulated cluster does. Until
a server has reported, requests cost what the placement says. Times are nanoseconds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, KeysView, Sequence
from typing import NamedTuple

from weft.http.messages import ServerEstimate
from weft_cluster.kernels import routing_rules as rules
from weft_cluster.placing.placement import PlacedMachine, PlacedModel
from weft_cluster.routing.router import ROUTERS, Estimate, Replica, RoutedRequest, check_router, expected

BELIEVED_NS = 250_000_000
"""Age up to which a server's report may be the reason to refuse a request. An older one is refreshed by sending the
request: without a limit a gate that refuses everything would never learn that the servers are free again."""
UNHEARD_NS = 1_000_000_000
"""A server that got no request for this long is tried with one that has slack: it may be faster than it was."""
SPREAD_NS, SPREAD = 200_000, 8
"""Differences below 0.2 ms, or below an eighth of a request's duration, count as ties and are broken at random."""


class RouteChoice(NamedTuple):
    """The server that a router chose for a request."""

    replica: Replica
    expected: int
    """Expected time of the answer."""


class RoutingBoard:
    """Estimates of all servers and the replicas of every model. A server is known by its place, an index.

    Not thread-safe: everything runs on the gate's event loop.
    """

    def __init__(
        self, models: Iterable[str], *, router: str = "slack", gates: int = 1, seed: int | None = None
    ) -> None:
        """Create the board of a gate.

        models: the models of the placement. gates: how many gates divide the requests; each assumes that the others
        send as much as it does.
        """
        check_router(router)
        self._route, self._gates, self._random = ROUTERS[router], gates, random.Random(seed)
        self._replicas: dict[str, list[Replica]] = {}
        self._turns: dict[str, int] = {}
        self._asked: dict[tuple[str, int], int] = {}
        """Model and place -> when a request was last sent there."""
        self._heard: dict[str, int] = {}
        """Model -> when a server last reported an estimate for it."""
        self._at: dict[int, PlacedMachine] = {}
        """Place -> the machine whose models are there."""
        self.estimates: list[Estimate] = []
        self.expect(models)

    @property
    def missing(self) -> list[str]:
        """Models that no server takes requests for."""
        return [
            model
            for model, replicas in self._replicas.items()
            if not any(self.estimates[replica.machine].up for replica in replicas)
        ]

    @property
    def models(self) -> KeysView[str]:
        """The models of the placement, and others that a server has."""
        return self._replicas.keys()

    def expect(self, models: Iterable[str]) -> None:
        """Replace the models of the placement; other models are known as long as a server has them."""
        self._expected = frozenset(models)
        for model in (*self._expected, *self._replicas):
            self._keep(model, self._replicas.get(model, []))

    def _keep(self, model: str, replicas: list[Replica]) -> None:
        if replicas or model in self._expected:
            self._replicas[model] = replicas
            self._turns.setdefault(model, self._random.randrange(1 << 16))
        else:
            self._replicas.pop(model, None)

    # Servers

    def add(self, machine: PlacedMachine) -> int:
        """Add a server with the models of a machine; return its place. It is down until ``set_up``."""
        place = next((at for at in range(len(self.estimates)) if at not in self._at), len(self.estimates))
        self.estimates[place : place + 1] = [Estimate(up=False)]
        self._at[place] = machine
        for placed in machine.models:
            self._keep(placed.model, [*self._replicas.get(placed.model, []), _placed_replica(place, placed, machine)])
        self._share()
        return place

    def remove(self, place: int) -> None:
        """Remove a server. Its place may be given to another one."""
        del self._at[place]
        self._asked = {key: asked for key, asked in self._asked.items() if key[1] != place}
        self.estimates[place] = Estimate(up=False)
        for model, replicas in list(self._replicas.items()):
            self._keep(model, [replica for replica in replicas if replica.machine != place])
        self._share()

    def set_up(self, place: int, *, up: bool) -> None:
        """Record whether a server takes requests. One that comes back is taken to be idle."""
        before = self.estimates[place]
        if before.up != up:
            self.estimates[place] = Estimate(up=up, in_flight=before.in_flight)

    def _share(self) -> None:
        """Set ``Replica.until``, the cumulative share of requests; servers of one machine have equal parts."""
        copies = [machine.name for machine in self._at.values()]
        for model, replicas in self._replicas.items():
            weights = []
            for replica in replicas:
                machine = self._at[replica.machine]
                share = next(placed.share for placed in machine.models if placed.model == model)
                weights.append(share / copies.count(machine.name))
            total, reached = sum(weights), 0.0
            for index, weight in enumerate(weights):
                reached += weight
                replicas[index] = replicas[index]._replace(until=reached / total)

    # Requests

    def choose(self, model: str, now: int, but: int | None = None, due: int | None = None) -> RouteChoice | None:
        """Choose a server for a request, not the one at *but*. None if no other server takes requests for the model.

        due: deadline; a request with slack may go to a server that has not reported lately.
        """
        estimates = self.estimates
        replicas = [one for one in self._replicas[model] if estimates[one.machine].up and one.machine != but]
        if not replicas:
            return None
        self._turns[model] = turn = self._turns[model] + 1
        draw = self._random.random
        request = RoutedRequest([_break_tie(replica, draw()) for replica in replicas], turn, (draw(), draw()))
        replica = self._unheard(model, replicas, now, due) or replicas[self._route(estimates, request, now)]
        return RouteChoice(replica, expected(estimates, replica, now))

    def _unheard(self, model: str, replicas: Sequence[Replica], now: int, due: int | None) -> Replica | None:
        """Return a replica whose estimate is old, as it got no request for ``UNHEARD_NS``, and that may be in time."""
        if due is None:
            return None
        for replica in replicas:
            asked = self._asked.get((model, replica.machine), now - UNHEARD_NS)
            if now - asked >= UNHEARD_NS and expected(self.estimates, replica, now) <= due:
                return replica
        return None

    def hopeless(self, model: str, due: int, now: int) -> bool:
        """Return whether no server is expected to answer by *due*.

        False if no report is younger than ``BELIEVED_NS``.
        """
        heard = self._heard.get(model)
        if heard is None or now - heard > BELIEVED_NS:
            return False
        up: Sequence[Replica] = [replica for replica in self._replicas[model] if self.estimates[replica.machine].up]
        return bool(up) and all(expected(self.estimates, replica, now) > due for replica in up)

    def ahead(self, place: int) -> int:
        """Return the expected work queued before a new request at a server."""
        known = self.estimates[place]
        return rules.aged(known.array, known.as_of, time.monotonic_ns())

    def sent(self, model: str, replica: Replica, now: int) -> None:
        """Record that a request for a model was sent to a server."""
        self._asked[model, replica.machine] = now
        self.estimates[replica.machine] = self.estimates[replica.machine].sent(replica, now, self._gates)

    def ended(self, place: int) -> None:
        """Record that a request is no longer at a server, for whatever reason."""
        known = self.estimates[place]
        self.estimates[place] = known._replace(in_flight=max(0, known.in_flight - 1))

    def heard(self, place: int, model: str, estimate: ServerEstimate, now: int, way: int) -> None:
        """Take the estimate that a server reported with an answer; *way*: the network's round trip."""
        self.estimates[place] = self.estimates[place]._replace(array=estimate.ahead, channel=0, as_of=now)
        self._heard[model] = now
        if not estimate.own:
            return
        part = estimate.own // estimate.lanes
        replicas = self._replicas[model]
        for index, replica in enumerate(replicas):
            if replica.machine == place:
                replicas[index] = replica._replace(compute=part, fetch=0, besides=estimate.own - part + way)


def _break_tie(replica: Replica, draw: float) -> Replica:
    """Add a random part of ``SPREAD`` to a replica's cost, to break ties.

    Otherwise all gates would choose the same of nearly equal servers, and get no reports from the others.
    """
    return replica._replace(besides=replica.besides + int(draw * max(SPREAD_NS, replica.compute // SPREAD)))


def _placed_replica(place: int, placed: PlacedModel, machine: PlacedMachine) -> Replica:
    """Return a replica with the costs of its placement, as used until its server reports."""
    if not placed.rate:
        return Replica(place, 0, 0)
    beside = 1 - machine.overlap
    compute = placed.compute + beside * placed.bandwidth + placed.other
    fetch = placed.bandwidth + beside * placed.compute + placed.other
    return Replica(place, round(compute / placed.rate * 1e9), round(fetch / placed.rate * 1e9))
