"""One set of rules around a policy: how requests are taken, batched, ordered when late, and steered out early.

Whoever serves requests is built here: the simulator of workloads, the prediction of a measured run, and the server.
They differ in their feed (simulated or real clients) and their executor (simulated or real lanes) alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from weft.engine.engine import Engine, Executor
from weft.engine.policies.base import NO_DEADLINE, Policy
from weft.engine.requests import Requests
from weft.engine.tickets import Feed


class RequestExecutor(Executor, Protocol):
    """An executor of batches, which may be joined."""

    def joined(self, stream: int, query: int, other: int) -> None:
        """A batch of a stream goes on as part of another one, by their queries: from all that runs of both."""
        ...

    def rooms(self) -> Collection[int]:
        """The lanes that take one more layer, by their numbers, where they take layers ahead."""
        ...


class RequestEngine(NamedTuple):
    """The loop and the source it draws from."""

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
    """An engine that serves a feed's requests on an executor.

    remaining: estimated ticks from each layer of each program to its end.
    late: what becomes of requests that can no longer be on time and are not strict (``lateness``).
    places: how many requests may wait in all.
    """
    source = Requests(
        policy,
        feed,
        remaining,
        executor.rests,
        executor.abortable,
        executor.rooms,
        joined=executor.joined,
        late=late,
        places=places,
    )
    return RequestEngine(Engine(source, policy, executor), source)
