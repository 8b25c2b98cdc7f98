"""A gate's estimates of the servers behind it, and the choice of a server for a request.

Estimates and routers are those of ``weft_cluster.routing.router``, so a gate decides as a simulated cluster does. Until
a server has reported, the placement predicts the cost of requests. Times are nanoseconds.
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
"""A server that got no request for this long is sent one that has slack: its estimate may be out of date."""
SPREAD_NS, SPREAD = 200_000, 8
"""Differences below 0.2 ms, or below an eighth of a request's duration, count as ties and are broken at random."""


class RouteChoice(NamedTuple):
    """The server that a router chose for a request."""

    replica: Replica
    expected: int
    """Expected time of the answer."""


class RoutingBoard:
    """Estimates of all servers behind a gate, and the replicas of every model.

    A server is identified by its place, an index into ``estimates``. Not thread-safe: everything runs on the gate's
    event loop.
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
        self._sent_at: dict[tuple[str, int], int] = {}
        """Model and place -> when a request was last sent there."""
        self._reported_at: dict[str, int] = {}
        """Model -> when a server last reported an estimate for it, in ns."""
        self._machines: dict[int, PlacedMachine] = {}
        """Place -> the machine of the placement that the server there stands for."""
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
            self._set_replicas(model, self._replicas.get(model, []))

    def _set_replicas(self, model: str, replicas: list[Replica]) -> None:
        """Set the replicas of a model; forget a model that has none and is not in the placement."""
        if replicas or model in self._expected:
            self._replicas[model] = replicas
            # Gates start their turns at random, or all would prefer the same of equal servers.
            self._turns.setdefault(model, self._random.randrange(1 << 16))
        else:
            self._replicas.pop(model, None)

    # Servers

    def add(self, machine: PlacedMachine) -> int:
        """Add a server with the models of a machine; return its place. It is down until ``set_up``."""
        place = next(
            (index for index in range(len(self.estimates)) if index not in self._machines), len(self.estimates)
        )
        self.estimates[place : place + 1] = [Estimate(up=False)]
        self._machines[place] = machine
        for placed in machine.models:
            self._set_replicas(
                placed.model, [*self._replicas.get(placed.model, []), _placed_replica(place, placed, machine)]
            )
        self._update_shares()
        return place

    def remove(self, place: int) -> None:
        """Remove a server. Its place may be given to another one."""
        del self._machines[place]
        self._sent_at = {(model, at): sent_at for (model, at), sent_at in self._sent_at.items() if at != place}
        self.estimates[place] = Estimate(up=False)
        for model, replicas in list(self._replicas.items()):
            self._set_replicas(model, [replica for replica in replicas if replica.machine != place])
        self._update_shares()

    def set_up(self, place: int, *, up: bool) -> None:
        """Record whether a server takes requests; one that comes back is assumed to be idle."""
        before = self.estimates[place]
        if before.up != up:
            self.estimates[place] = Estimate(up=up, in_flight=before.in_flight)

    def _update_shares(self) -> None:
        """Set ``Replica.cumulative_share``; servers of one machine have equal parts of its share."""
        copies = [machine.name for machine in self._machines.values()]
        for model, replicas in self._replicas.items():
            weights = []
            for replica in replicas:
                machine = self._machines[replica.machine]
                share = next(placed.share for placed in machine.models if placed.model == model)
                weights.append(share / copies.count(machine.name))
            total, cumulative = sum(weights), 0.0
            for index, weight in enumerate(weights):
                cumulative += weight
                replicas[index] = replicas[index]._replace(cumulative_share=cumulative / total)

    # Requests

    def choose(self, model: str, now: int, excluded: int | None = None, due: int | None = None) -> RouteChoice | None:
        """Choose a server for a request; None if none takes requests for the model.

        now, due: time and deadline in ns. excluded: place of a server to leave out. If there is a deadline, a server
        without a recent report may be chosen, so that its estimate is refreshed.
        """
        estimates = self.estimates
        replicas = [
            replica
            for replica in self._replicas[model]
            if estimates[replica.machine].up and replica.machine != excluded
        ]
        if not replicas:
            return None
        self._turns[model] = turn = self._turns[model] + 1
        draw = self._random.random
        request = RoutedRequest([_break_tie(replica, draw()) for replica in replicas], turn, (draw(), draw()))
        replica = self._find_unheard(model, replicas, now, due) or replicas[self._route(estimates, request, now)]
        return RouteChoice(replica, expected(estimates, replica, now))

    def _find_unheard(self, model: str, replicas: Sequence[Replica], now: int, due: int | None) -> Replica | None:
        """Return a replica that got no request for ``UNHEARD_NS`` but should answer by *due*; None if there is none."""
        if due is None:
            return None
        for replica in replicas:
            sent_at = self._sent_at.get((model, replica.machine), now - UNHEARD_NS)
            if now - sent_at >= UNHEARD_NS and expected(self.estimates, replica, now) <= due:
                return replica
        return None

    def unmeetable(self, model: str, due: int, now: int) -> bool:
        """Return whether no server is expected to answer by *due*.

        False if no report is younger than ``BELIEVED_NS``.
        """
        reported_at = self._reported_at.get(model)
        if reported_at is None or now - reported_at > BELIEVED_NS:
            return False
        up: Sequence[Replica] = [replica for replica in self._replicas[model] if self.estimates[replica.machine].up]
        return bool(up) and all(expected(self.estimates, replica, now) > due for replica in up)

    def ahead(self, place: int) -> int:
        """The expected work queued at a server before a new request, in ns."""
        estimate = self.estimates[place]
        return rules.aged(estimate.array, estimate.as_of, time.monotonic_ns())

    def sent(self, model: str, replica: Replica, now: int) -> None:
        """Record that a request for a model was sent to a server."""
        self._sent_at[model, replica.machine] = now
        self.estimates[replica.machine] = self.estimates[replica.machine].sent(replica, now, self._gates)

    def ended(self, place: int) -> None:
        """Record that a request is no longer at a server: answered, failed, lost or abandoned."""
        estimate = self.estimates[place]
        self.estimates[place] = estimate._replace(in_flight=max(0, estimate.in_flight - 1))

    def heard(self, place: int, model: str, estimate: ServerEstimate, now: int, way: int) -> None:
        """Take the estimate that a server reported with an answer.

        estimate.compute_ns: computing time of a request of this model; 0: not known. now: time of the answer. way:
        round trip of the network, in ns.
        """
        self.estimates[place] = self.estimates[place]._replace(array=estimate.wait_ns, channel=0, as_of=now)
        self._reported_at[model] = now
        if not estimate.compute_ns:
            return
        # A request delays the ones behind it by its share of the lanes; the rest is only its own latency.
        per_lane = estimate.compute_ns // estimate.lanes
        overhead = estimate.compute_ns - per_lane + way
        replicas = self._replicas[model]
        for index, replica in enumerate(replicas):
            if replica.machine == place:
                replicas[index] = replica._replace(compute=per_lane, fetch=0, overhead=overhead)


def _break_tie(replica: Replica, draw: float) -> Replica:
    """Add a random delay, up to ``SPREAD_NS`` or an eighth of the request, to break ties; *draw*: from 0 to 1.

    Otherwise all gates would choose the same of nearly equal servers, and get no reports from the others.
    """
    return replica._replace(overhead=replica.overhead + int(draw * max(SPREAD_NS, replica.compute // SPREAD)))


def _placed_replica(place: int, placed: PlacedModel, machine: PlacedMachine) -> Replica:
    """Return the replica with the costs (ns) that its placement predicts, used until its server reports.

    Its loads are shares of the machine's time at ``placed.rate`` requests per second.
    """
    if not placed.rate:
        return Replica(place, 0, 0)
    unhidden = 1 - machine.overlap
    compute = placed.compute + unhidden * placed.bandwidth + placed.other
    fetch = placed.bandwidth + unhidden * placed.compute + placed.other
    return Replica(place, round(compute / placed.rate * 1e9), round(fetch / placed.rate * 1e9))
