"""Routers: pure functions that choose a machine for a request from estimates and the time.

An estimate is the last report of a machine, updated by the requests that were sent there since (``Estimate.sent``,
``Estimate.carried``). A gate of a cluster, or its simulation, keeps estimates and calls a router with them; routers
have no state. The rules are in ``kernels.routing_rules``, so that the compiled cluster follows the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from weft.base.errors import InputError, unknown_name
from weft_cluster.kernels import routing_rules as rules


class Estimate(NamedTuple):
    """A gate's estimate of a machine's queue; times are ticks."""

    array: int = 0
    """Work of the array ahead of a new request that is on time."""
    channel: int = 0
    """Work of the memory channel ahead of it."""
    waiting: int = 0
    """Requests on the machine, by its last report."""
    up: bool = True
    as_of: int = 0
    """The time of *array* and *channel*."""
    in_flight: int = 0
    """Requests sent to the machine and not answered yet, as the sender counts them."""

    def sent(self, replica: Replica, now: int, gates: int = 1) -> Estimate:
        """The estimate after a request was sent.

        Each of several gates assumes that the others send the same, so the work counts once per gate.
        """
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
    """A model on a machine, with the times of a request as a router expects them, in ticks."""

    machine: int
    """Index of the machine's estimate."""
    compute: int
    """Time of a request on the machine's array."""
    fetch: int
    """Time of a request on its memory channel."""
    overhead: int = 0
    """Time of a request in the network and outside both."""
    cumulative_share: float = 1.0
    """Cumulative share of the model's requests, up to and including this replica."""


class RoutedRequest(NamedTuple):
    """A request that a router chooses a replica for."""

    replicas: Sequence[Replica]
    """The replicas of its model, at least one."""
    turn: int
    """Number of requests for its model that this gate routed before."""
    draws: tuple[float, float] = (0.0, 0.0)
    """Two random numbers from 0 to 1, for routers that draw."""


Router = Callable[[Sequence[Estimate], RoutedRequest, int], int]
"""From the estimates of all machines, a request and the time in ticks to the index of one of the request's replicas."""


def slack(estimates: Sequence[Estimate], request: RoutedRequest, now: int) -> int:
    """The replica that is expected to answer first, so with the most slack; of equals the next in turn."""
    count = len(request.replicas)
    order = [(request.turn + step) % count for step in range(count)]
    running = [place for place in order if estimates[request.replicas[place].machine].up]
    return min(running, key=lambda place: expected(estimates, request.replicas[place], now), default=order[0])


def two_choices(estimates: Sequence[Estimate], request: RoutedRequest, now: int) -> int:
    """The better of two drawn replicas by reported requests (Mitzenmacher's power of two choices)."""
    place, other_place = _draw_two(estimates, request)
    count, other_count = (estimates[request.replicas[index].machine].waiting for index in (place, other_place))
    return other_place if other_count < count else place


def two_in_flight(estimates: Sequence[Estimate], request: RoutedRequest, now: int) -> int:
    """The better of two drawn replicas by requests in flight, as proxies balance load."""
    place, other_place = _draw_two(estimates, request)
    count, other_count = (estimates[request.replicas[index].machine].in_flight for index in (place, other_place))
    return other_place if other_count < count else place


def two_aged(estimates: Sequence[Estimate], request: RoutedRequest, now: int) -> int:
    """The better of two drawn replicas by the expected time of the answer."""
    place, other_place = _draw_two(estimates, request)
    answer_at, other_answer_at = (expected(estimates, request.replicas[index], now) for index in (place, other_place))
    return other_place if other_answer_at < answer_at else place


def random(estimates: Sequence[Estimate], request: RoutedRequest, now: int) -> int:
    """A replica drawn with the probabilities of the shares."""
    return _by_share(estimates, request, request.draws[0])


def round_robin(estimates: Sequence[Estimate], request: RoutedRequest, now: int) -> int:
    """The replicas in turn, as often as their shares say, without randomness."""
    return _by_share(estimates, request, rules.place_of_turn(request.turn))


ROUTERS: dict[str, Router] = {
    "slack": slack,
    "two-choices": two_choices,
    "two-in-flight": two_in_flight,
    "two-aged": two_aged,
    "random": random,
    "round-robin": round_robin,
}
"""Router by name, in the order of the constants in ``kernels.cluster_loop``."""


def check_router(name: str) -> None:
    """Raise InputError unless there is a router of this name."""
    if name not in ROUTERS:
        raise InputError(unknown_name("router", name, ROUTERS))


def expected(estimates: Sequence[Estimate], replica: Replica, now: int) -> int:
    """The time, in ticks, at which a replica is expected to answer a request that is sent now."""
    estimate = estimates[replica.machine]
    return rules.finish(
        now,
        rules.aged(estimate.array, estimate.as_of, now),
        rules.aged(estimate.channel, estimate.as_of, now),
        replica.compute,
        replica.fetch,
        replica.overhead,
    )


def _by_share(estimates: Sequence[Estimate], request: RoutedRequest, draw: float) -> int:
    """Index of the replica whose share contains *draw*, from 0 to 1, or of the next one that is up."""
    replicas, count = request.replicas, len(request.replicas)
    place = next((place for place in range(count - 1) if replicas[place].cumulative_share > draw), count - 1)
    indices = [(place + step) % count for step in range(count)]
    return next((index for index in indices if estimates[replicas[index].machine].up), place)


def _draw_two(estimates: Sequence[Estimate], request: RoutedRequest) -> tuple[int, int]:
    """Indices of two replicas to compare: the first is drawn with the probabilities of the shares, the other evenly.

    Both are the first one if the model has no other replica, or if the other's machine is down.
    """
    place = _by_share(estimates, request, request.draws[0])
    if len(request.replicas) == 1:
        return place, place
    other = rules.other_place(request.draws[1], len(request.replicas), place)
    return place, other if estimates[request.replicas[other].machine].up else place
