"""Which machine a request goes to: pure functions of estimates, a request and the time.

An estimate is what a machine said of itself some time ago, carried on by what was sent there since (``Estimate.sent``,
``Estimate.carried``). A gate of a cluster, or its simulation, keeps estimates and calls a router with them; routers
have no state. The rules are in ``kernels.routing_rules``, so that the compiled cluster follows the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from weft.base.errors import InputError, unknown_name
from weft_cluster.kernels import routing_rules as rules


class Estimate(NamedTuple):
    """Estimate of a machine's queue; times are ticks."""

    array: int = 0
    """Work of its array ahead of a new request that is on time..."""
    channel: int = 0
    """... and for its memory channel."""
    waiting: int = 0
    """Requests that are there, as it last reported."""
    up: bool = True
    as_of: int = 0
    in_flight: int = 0
    """Requests sent there and not answered yet; the sender counts them, without a report."""

    def sent(self, replica: Replica, now: int, gates: int = 1) -> Estimate:
        """The estimate after a request went there; each of several gates takes the others to do as it does."""
        return self._replace(
            array=rules.aged(self.array, self.as_of, now) + replica.compute * gates,
            channel=rules.aged(self.channel, self.as_of, now) + replica.fetch * gates,
            as_of=now,
            in_flight=self.in_flight + 1,
        )

    def carried(self, compute: int, fetch: int, passed: int) -> Estimate:
        """The estimate *passed* ticks later, after *compute* and *fetch* ticks of work were sent."""
        return self._replace(
            array=rules.carried(self.array, compute, passed),
            channel=rules.carried(self.channel, fetch, passed),
            as_of=self.as_of + passed,
        )


class Replica(NamedTuple):
    """A model on a machine, as a router sees it; times are ticks."""

    machine: int
    """Its place among the estimates."""
    compute: int
    """Time of a request on the machine's array..."""
    fetch: int
    """... of its memory channel..."""
    besides: int = 0
    """... and on the way there and back."""
    until: float = 1.0
    """Cumulative share of the model's requests, up to and including this replica."""


class RoutedRequest(NamedTuple):
    """A request that looks for a machine."""

    replicas: Sequence[Replica]
    """Of its model; one at least."""
    turn: int
    """How many requests for its model were routed here before."""
    draws: tuple[float, float] = (0.0, 0.0)
    """Two numbers from 0 to 1, for routers that draw lots."""


Router = Callable[[Sequence[Estimate], RoutedRequest, int], int]
"""From the estimates of all machines, a request and the time to one of the request's replicas, by its place."""


def slack(estimates: Sequence[Estimate], request: RoutedRequest, now: int) -> int:
    """Where it is expected to be answered first, and so with most time to spare; of equals the next in turn."""
    count = len(request.replicas)
    order = [(request.turn + step) % count for step in range(count)]
    running = [place for place in order if estimates[request.replicas[place].machine].up]
    return min(running, key=lambda place: expected(estimates, request.replicas[place], now), default=order[0])


def two_choices(estimates: Sequence[Estimate], request: RoutedRequest, now: int) -> int:
    """Of two replicas that are drawn, the one where fewer requests were (Mitzenmacher's power of two choices)."""
    place, other = _two(estimates, request)
    here, there = (estimates[request.replicas[index].machine].waiting for index in (place, other))
    return other if there < here else place


def two_in_flight(estimates: Sequence[Estimate], request: RoutedRequest, now: int) -> int:
    """Of two replicas that are drawn, the one with fewer requests in flight, as proxies balance load."""
    place, other = _two(estimates, request)
    here, there = (estimates[request.replicas[index].machine].in_flight for index in (place, other))
    return other if there < here else place


def two_aged(estimates: Sequence[Estimate], request: RoutedRequest, now: int) -> int:
    """Of two replicas that are drawn, the one where it is expected to be answered first."""
    place, other = _two(estimates, request)
    here, there = (expected(estimates, request.replicas[index], now) for index in (place, other))
    return other if there < here else place


def random(estimates: Sequence[Estimate], request: RoutedRequest, now: int) -> int:
    """One that is drawn, by shares."""
    return _by_share(estimates, request, request.draws[0])


def round_robin(estimates: Sequence[Estimate], request: RoutedRequest, now: int) -> int:
    """One after another, as often as their shares say."""
    return _by_share(estimates, request, rules.place_of_turn(request.turn))


ROUTERS: dict[str, Router] = {
    "slack": slack,
    "two-choices": two_choices,
    "two-in-flight": two_in_flight,
    "two-aged": two_aged,
    "random": random,
    "round-robin": round_robin,
}
"""The names a user may write, in the order of ``kernels.cluster_state``."""


def check_router(name: str) -> None:
    """Raise InputError unless there is a router of this name."""
    if name not in ROUTERS:
        raise InputError(unknown_name("router", name, ROUTERS))


def expected(estimates: Sequence[Estimate], replica: Replica, now: int) -> int:
    """When a request would be answered by a replica."""
    known = estimates[replica.machine]
    return rules.finish(
        now,
        rules.aged(known.array, known.as_of, now),
        rules.aged(known.channel, known.as_of, now),
        replica.compute,
        replica.fetch,
        replica.besides,
    )


def _by_share(estimates: Sequence[Estimate], request: RoutedRequest, draw: float) -> int:
    """The replica whose share contains a random draw, or the next one that is up."""
    replicas, count = request.replicas, len(request.replicas)
    place = next((place for place in range(count - 1) if replicas[place].until > draw), count - 1)
    order = [(place + step) % count for step in range(count)]
    return next((index for index in order if estimates[replicas[index].machine].up), place)


def _two(estimates: Sequence[Estimate], request: RoutedRequest) -> tuple[int, int]:
    """One by shares and another one; the first twice where there is no other that runs."""
    place = _by_share(estimates, request, request.draws[0])
    if len(request.replicas) == 1:
        return place, place
    other = rules.other_place(request.draws[1], len(request.replicas), place)
    return place, other if estimates[request.replicas[other].machine].up else place
