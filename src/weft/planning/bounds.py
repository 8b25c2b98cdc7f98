"""What no way of serving can exceed, worked out without simulating it.

Lanes cannot carry more than fits into their time if every request were computed in the batch that takes least for each
row. No request is answered sooner than its model alone takes. And on a single lane whoever comes while a segment
runs waits for its end: where a request has less time to spare than that, some are late, whatever the policy.

The bounds hold on average; a run of some thousand requests may do better by chance. ``SLACK`` and ``CHANCE`` are what
is allowed for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from weft.devices import Host, HostModel
from weft.devices.lanes import LEAST_SPEED
from weft.engine.policies import POLICIES, Policy
from weft.planning.candidates import Arrangement
from weft.planning.early_exits import reaching
from weft.planning.plan_request import PlanRequest, SentStream
from weft.planning.standalone_times import times_alone
from weft.workloads.requests import Stream

SLACK = 1.15
"""How many times the bound a simulated run may carry."""
CHANCE = 0.5
"""The part of the misses that must be, which a run shows at least."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What a way of serving cannot exceed."""

    factor: float
    """No larger multiple of the asked rates keeps the deadlines; infinite where no stream has a rate."""
    missed: float
    """The stream that suffers most misses at least this share of its deadlines at the asked load."""
    latency: float
    """The largest time of a request alone over its deadline."""


@dataclass(frozen=True, slots=True)
class Blocking:
    """A segment that keeps the only lane while requests of another model run out of time."""

    waits: str
    """Who waits."""
    runs: str
    """Whose segment it is."""
    segment: str
    length_s: float
    spare_s: float
    """What the request that waits has besides its own time."""
    share: float
    """How many of those requests are late by it, at least, at the asked load."""


def bound_of(asked: PlanRequest, arrangement: Arrangement) -> Bound:
    """The bound of a way to serve what is asked."""
    host = arrangement.host
    alone = max(late_alone(host, stream, leaving) for stream, _, leaving in asked.sent)
    blocked = blocking(asked, arrangement)
    share = blocked.share if blocked else 0.0
    by_blocking = asked.limit / (1 - asked.limit) / share if share else inf
    factor = 0.0 if alone > asked.limit else min(lane_factor(asked, arrangement), by_blocking)
    latency = max(fastest_s(host, stream.served_name, leaving) / stream.deadline_s for stream, _, leaving in asked.sent)
    return Bound(factor, max(alone, share / (1 + share)), latency)


def lane_factor(asked: PlanRequest, arrangement: Arrangement) -> float:
    """The multiple of the asked rates at which the lanes would have no time left."""
    busy = sum(lane_shares(asked, arrangement).values())
    return lane_speed(arrangement.host) / (busy * (1 - asked.limit)) if busy else inf


def lane_shares(asked: PlanRequest, arrangement: Arrangement) -> dict[str, float]:
    """Model -> lanes that its requests keep busy at the asked rates, at the least, all of them at full speed."""
    found: dict[str, float] = {}
    for stream, rate, leaving in asked.sent:
        name = stream.served_name
        row_s = least_row_s(arrangement.host, name, arrangement.batches[name], leaving)
        found[name] = found.get(name, 0.0) + rate * row_s
    return found


def lane_speed(host: Host) -> float:
    """How many lanes alone all lanes together come to, at the most."""
    lanes = host.together()
    least = min((share for row in lanes.losses for share in row), default=0.0)
    return max(
        count * lanes.share(count) * max(LEAST_SPEED, 1 - (count - 1) * least) for count in range(1, len(lanes) + 1)
    )


def least_row_s(host: Host, name: str, most: int, rates: Sequence[float] = ()) -> float:
    """Lane time of one request in the batch that takes least for each, what passes between segments included.

    rates: the share that leaves by each exit; each segment is then computed by those alone who reach it.
    """
    model = host.model(name)
    hand_over_s, speed = _mean(host.hand_over_s), _usual_spread(model)
    sizes = range(1, most + 1)
    if not rates:
        between_s = len(model.segments) * hand_over_s
        return min((model.total_s(size) * speed + between_s) / size for size in sizes)
    rows_s = ([(each * speed + hand_over_s) / size for each in model.times_at(size)] for size in sizes)
    reach = reaching(rates, model.exits, len(model.segments))
    best_s = [min(each) for each in zip(*rows_s, strict=True)]
    return float(sum(share * row_s for share, row_s in zip(reach, best_s, strict=True)))


def fastest_s(host: Host, name: str, rates: Sequence[float] = ()) -> float:
    """The least time from a request to its answer that was measured, nothing else running."""
    return times_alone(host, name, rates).least_s


def late_alone(host: Host, stream: Stream, rates: Sequence[float] = ()) -> float:
    """The share of a stream's requests that would be late with the machine to themselves."""
    return times_alone(host, stream.served_name, rates).later_than(stream.deadline_s)


def blocking(asked: PlanRequest, arrangement: Arrangement) -> Blocking | None:
    """The segment that makes most requests of others late on a single lane; None where none must."""
    host = arrangement.host
    if host.lanes > 1:
        return None
    found = [
        each
        for waits in asked.sent
        for runs in asked.sent
        if runs.name != waits.name and runs.rate
        for each in [_blocking(arrangement, waits, runs)]
        if each.share > 0
    ]
    return max(found, key=lambda each: each.share, default=None)


def _blocking(arrangement: Arrangement, waits: SentStream, runs: SentStream) -> Blocking:
    """What all segments of one stream do to another; the longest of them is named."""
    host, model = arrangement.host, arrangement.host.model(runs.name)
    spare_s = waits.stream.deadline_s - fastest_s(host, waits.name, waits.leaving)
    least = min((min(run) for run in model.spread), default=1.0)
    sizes = range(1, arrangement.batches[runs.name] + 1)
    over_s = [
        share * min(max(0.0, _kept_s(arrangement, model, size, place) * least - spare_s) / size for size in sizes)
        for place, share in enumerate(reaching(runs.leaving, model.exits, len(model.segments)))
    ]
    longest = max(range(len(over_s)), key=lambda place: model.times_at(1)[place])
    return Blocking(
        waits.name,
        runs.name,
        model.segments[longest],
        model.times_at(1)[longest],
        max(0.0, spare_s),
        min(1.0, runs.rate * sum(over_s)),
    )


def _kept_s(arrangement: Arrangement, model: HostModel, size: int, place: int) -> float:
    """How long a segment keeps its lane at least; one that the policy can stop, no longer than that takes."""
    host, took_s = arrangement.host, model.times_at(size)[place]
    stops = POLICIES[arrangement.settings.policy].aborts is not Policy.aborts
    return min(took_s, host.abort_s) if stops and took_s >= host.abort_from_s else took_s


def _usual_spread(model: HostModel) -> float:
    """The mean of the measured runs over the mean times, which is near 1."""
    if not model.spread:
        return 1.0
    times_s = np.array(model.times_at(1))
    return float((np.array(model.spread) @ times_s).mean() / times_s.sum()) if times_s.sum() else 1.0


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values) if values else 0.0
