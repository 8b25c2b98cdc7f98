"""What a gate knows of the servers behind it, and which of them a request goes to.

The choice is that of ``cluster.router``, by the estimates of ``cluster.router``: what a simulated cluster does, a gate
does. Before a server has said anything, requests cost what the placement takes them to. Times are nanoseconds.
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
"""For so long a request may be refused by what a server said last; then one goes there to hear more."""
UNHEARD_NS = 1_000_000_000
"""A server that nobody was sent to for so long is tried with a request that can wait: it may be faster than it was."""
SPREAD_NS, SPREAD = 200_000, 8
"""Servers that differ by less than that, or by less than such a part of a request, are as good as each other."""


class RouteChoice(NamedTuple):
    """Where a request goes."""

    replica: Replica
    expected: int
    """When it would be answered, as far as is known."""


class RoutingBoard:
    """Estimates of all servers, each at a place of its own, and the replicas of every model among them."""

    def __init__(
        self, models: Iterable[str], *, router: str = "slack", gates: int = 1, seed: int | None = None
    ) -> None:
        """models: those that shall be there. gates: how many divide the requests; each takes the others to do as it
        does."""
        check_router(router)
        self._route, self._gates, self._random = ROUTERS[router], gates, random.Random(seed)
        self._replicas: dict[str, list[Replica]] = {}
        self._turns: dict[str, int] = {}
        self._asked: dict[tuple[str, int], int] = {}
        """Model and place -> when a request was last sent there."""
        self._heard: dict[str, int] = {}
        """Model -> when a server last said what it expects for it."""
        self._at: dict[int, PlacedMachine] = {}
        """Place -> the machine whose models are there."""
        self.estimates: list[Estimate] = []
        self.expect(models)

    @property
    def missing(self) -> list[str]:
        """Models that nobody takes requests for."""
        return [
            model
            for model, replicas in self._replicas.items()
            if not any(self.estimates[each.machine].up for each in replicas)
        ]

    @property
    def models(self) -> KeysView[str]:
        """All that shall be there, or are."""
        return self._replicas.keys()

    def expect(self, models: Iterable[str]) -> None:
        """From now on these models shall be there; others are known as long as a server has them."""
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
        """A server with the models of a machine, down until it is said to be up; returns its place."""
        place = next((at for at in range(len(self.estimates)) if at not in self._at), len(self.estimates))
        self.estimates[place : place + 1] = [Estimate(up=False)]
        self._at[place] = machine
        for each in machine.models:
            self._keep(each.model, [*self._replicas.get(each.model, []), _placed(place, each, machine)])
        self._share()
        return place

    def remove(self, place: int) -> None:
        """A server is no more; another may have its place."""
        del self._at[place]
        self._asked = {key: asked for key, asked in self._asked.items() if key[1] != place}
        self.estimates[place] = Estimate(up=False)
        for model, replicas in list(self._replicas.items()):
            self._keep(model, [each for each in replicas if each.machine != place])
        self._share()

    def stands(self, place: int, *, up: bool) -> None:
        """Whether a server takes requests; one that comes back has nothing to do yet."""
        before = self.estimates[place]
        if before.up != up:
            self.estimates[place] = Estimate(up=up, in_flight=before.in_flight)

    def _share(self) -> None:
        """Up to where the share of each replica reaches, servers of one machine having equal parts."""
        copies = [machine.name for machine in self._at.values()]
        for model, replicas in self._replicas.items():
            weights = []
            for each in replicas:
                machine = self._at[each.machine]
                share = next(placed.share for placed in machine.models if placed.model == model)
                weights.append(share / copies.count(machine.name))
            total, reached = sum(weights), 0.0
            for index, weight in enumerate(weights):
                reached += weight
                replicas[index] = replicas[index]._replace(until=reached / total)

    # Requests

    def choose(self, model: str, now: int, but: int | None = None, due: int | None = None) -> RouteChoice | None:
        """Where a request for a model goes; not to the server at *but*. None if nobody is there.

        due: when its answer is wanted; with time to spare it may go to a server of which nothing was heard lately.
        """
        estimates = self.estimates
        replicas = [each for each in self._replicas[model] if estimates[each.machine].up and each.machine != but]
        if not replicas:
            return None
        self._turns[model] = turn = self._turns[model] + 1
        draw = self._random.random
        request = RoutedRequest([_blurred(each, draw()) for each in replicas], turn, (draw(), draw()))
        replica = self._unheard(model, replicas, now, due) or replicas[self._route(estimates, request, now)]
        return RouteChoice(replica, expected(estimates, replica, now))

    def _unheard(self, model: str, replicas: Sequence[Replica], now: int, due: int | None) -> Replica | None:
        """A replica that is thought to be in time, and was not asked for long: what is thought of it may be wrong."""
        if due is None:
            return None
        for each in replicas:
            asked = self._asked.get((model, each.machine), now - UNHEARD_NS)
            if now - asked >= UNHEARD_NS and expected(self.estimates, each, now) <= due:
                return each
        return None

    def hopeless(self, model: str, due: int, now: int) -> bool:
        """Whether no server is expected to answer by then, by what one of them said a moment ago."""
        heard = self._heard.get(model)
        if heard is None or now - heard > BELIEVED_NS:
            return False
        up: Sequence[Replica] = [each for each in self._replicas[model] if self.estimates[each.machine].up]
        return bool(up) and all(expected(self.estimates, each, now) > due for each in up)

    def ahead(self, place: int) -> int:
        """Work that stands before a new request at a server, as far as is known."""
        known = self.estimates[place]
        return rules.aged(known.array, known.as_of, time.monotonic_ns())

    def sent(self, model: str, replica: Replica, now: int) -> None:
        """A request for a model went to a server."""
        self._asked[model, replica.machine] = now
        self.estimates[replica.machine] = self.estimates[replica.machine].sent(replica, now, self._gates)

    def ended(self, place: int) -> None:
        """A request is there no more, whatever became of it."""
        known = self.estimates[place]
        self.estimates[place] = known._replace(in_flight=max(0, known.in_flight - 1))

    def heard(self, place: int, model: str, told: ServerEstimate, now: int, way: int) -> None:
        """A server said what it expects for another request; *way*: from here to there and back."""
        self.estimates[place] = self.estimates[place]._replace(array=told.ahead, channel=0, as_of=now)
        self._heard[model] = now
        if not told.own:
            return
        part = told.own // told.lanes
        replicas = self._replicas[model]
        for index, each in enumerate(replicas):
            if each.machine == place:
                replicas[index] = each._replace(compute=part, fetch=0, besides=told.own - part + way)


def _blurred(replica: Replica, draw: float) -> Replica:
    """A replica that may seem a little slower than it is: otherwise all gates would take the same of near equals, and
    nothing more be heard of the others."""
    return replica._replace(besides=replica.besides + int(draw * max(SPREAD_NS, replica.compute // SPREAD)))


def _placed(place: int, placed: PlacedModel, machine: PlacedMachine) -> Replica:
    """A replica that costs what its placement says."""
    if not placed.rate:
        return Replica(place, 0, 0)
    beside = 1 - machine.overlap
    compute = placed.compute + beside * placed.bandwidth + placed.other
    fetch = placed.bandwidth + beside * placed.compute + placed.other
    return Replica(place, round(compute / placed.rate * 1e9), round(fetch / placed.rate * 1e9))
