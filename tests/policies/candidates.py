"""Candidates, views and requests that are offered to a policy."""

from __future__ import annotations

import numpy as np

from tests.engine.hosts import Order
from weft.devices.decoupled import DeviceClocks
from weft.engine.policies import Candidate, View
from weft.engine.policies.base import Work

NOW = 1_000


def head(stream: int, remaining: int, due: int, **known: int) -> Candidate:
    """A request with so many ticks left that is due that long from now; it has just arrived and not begun."""
    whole, segment = known.pop("whole", remaining), known.pop("segment", remaining)
    return Candidate(
        stream,
        0,
        known.pop("layer", 0),
        0,
        segment,
        -1,
        program=0,
        arrival=known.pop("arrival", NOW),
        deadline=NOW + due,
        remaining=remaining,
        work=Work(whole),
        **known,
    )


def view(*heads: Candidate) -> View:
    return View(DeviceClocks(NOW, NOW, NOW), heads, heads)


def flood(load: float, *, ticks: int, allowed: int, requests: int, seed: int = 0, priority: int = 1) -> list[Order]:
    """Short requests of stream 0 at a given load of one lane."""
    gaps = np.random.default_rng(seed).exponential(ticks / load, requests)
    return [Order(0, int(at), int(at) + allowed, priority) for at in np.cumsum(gaps)]
