"""The engine for requests: a policy with admission, batching, the rule for late requests and early exits around it.

The simulator of workloads, the prediction of a measured run and the server are all built here. They differ only in
their feed (simulated or real clients) and their executor (simulated or real lanes).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from weft.engine.engine import Engine, Executor
from weft.engine.policies.base import NO_DEADLINE, Policy
from weft.engine.requests import Requests
from weft.engine.tickets import Feed


class RequestExecutor(Executor, Protocol):
    """An executor of batches, which may be merged."""

    def joined(self, stream: int, query: int, other: int) -> None:
        """Note that batch *other* of a stream goes on as part of batch *query*, after the running layers of both."""
        return

    def rooms(self) -> Collection[int]:
        """Return the numbers of the lanes that take one more layer; empty where lanes do not take layers ahead."""
        return ()


class RequestEngine(NamedTuple):
    """The scheduling loop and its source of requests."""

    engine: Engine
    source: Requests


def request_engine(
    policy: Policy,
    feed: Feed,
    executor: RequestExecutor,
    remaining: Sequence[Sequence[int]],
    *,
    late: str = "weave",
    places: int = NO_DEADLINE,
) -> RequestEngine:
    """Build an engine that serves a feed's requests on an executor.

    remaining: estimated ticks from each layer of each program to the end of that program.
    late: the rule for requests that can no longer be on time and are not strict (``lateness``).
    places: how many requests may wait in all queues together.
    """

    def rooms() -> Collection[int]:
        """Return the lanes that take another layer: by the plan that is being made, where the device has gates."""
        return engine.plan.rooms() if engine.plan else executor.rooms()

    source = Requests(
        policy,
        feed,
        remaining,
        executor.rests,
        executor.abortable,
        rooms,
        joined=executor.joined,
        late=late,
        places=places,
    )
    engine = Engine(source, policy, executor)
    return RequestEngine(engine, source)
