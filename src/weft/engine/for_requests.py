"""One set of rules around a policy: how requests are taken, batched, ordered when late, and steered out early.

Whoever serves requests is built here: the simulator of workloads, the prediction of a measured run, and the server.
They differ in their feed (simulated or real clients) and their executor (simulated or real lanes) alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.engine.engine import Engine, Executor
from weft.engine.requests import Requests
from weft.engine.tickets import Feed
from weft.policies.base import NO_DEADLINE, Policy


class RequestEngine(NamedTuple):
    """The loop and the source it draws from."""

    engine: Engine
    source: Requests


def request_engine(
    policy: Policy,
    feed: Feed,
    executor: Executor,
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
    source = Requests(policy, feed, remaining, executor.rests, executor.abortable, late=late, places=places)
    return RequestEngine(Engine(source, policy, executor), source)
