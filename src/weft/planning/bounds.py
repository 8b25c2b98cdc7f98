"""Bounds on the throughput and latency of an arrangement, computed without simulation.

Throughput: lane time per request is at least that of the batch size with the least time per row. Latency: a request
takes at least as long as its model with nothing else running. On a single lane, a request that arrives while a segment
runs waits for the segment's end; if its slack is shorter than this wait, some requests are late under every policy.

The bounds hold on average; a run of some thousand requests may do better by chance, by up to ``SLACK`` and ``CHANCE``.
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
"""A simulated run may exceed the bound on the load by up to this factor."""
CHANCE = 0.5
"""A simulated run shows at least this part of the misses that the bound predicts."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The bounds of an arrangement."""

    factor: float
    """No larger multiple of the asked rates keeps the deadlines; infinite if no stream has a rate."""
    missed: float
    """The stream that suffers most misses at least this share of its deadlines at the asked load."""
    latency: float
    """The largest ratio, over the streams, of a request's time alone to its deadline."""


@dataclass(frozen=True, slots=True)
class Blocking:
    """A segment that occupies the only lane for longer than the slack of another model's requests."""

    waits: str
    """The model whose requests wait."""
    runs: str
    """The model of the segment."""
    segment: str
    length_s: float
    spare_s: float
    """The slack of a waiting request: its deadline minus its own time."""
    share: float
    """The least share of the waiting model's requests that are late because of the segment, at the asked load."""


def bound_of(asked: PlanRequest, arrangement: Arrangement) -> Bound:
    """Return the bound of an arrangement."""
    host = arrangement.host
    alone = max(late_alone(host, stream, leaving) for stream, _, leaving in asked.sent)
    blocked = blocking(asked, arrangement)
    share = blocked.share if blocked else 0.0
    by_blocking = asked.limit / (1 - asked.limit) / share if share else inf
    factor = 0.0 if alone > asked.limit else min(lane_factor(asked, arrangement), by_blocking)
    latency = max(fastest_s(host, stream.served_name, leaving) / stream.deadline_s for stream, _, leaving in asked.sent)
    return Bound(factor, max(alone, share / (1 + share)), latency)


def lane_factor(asked: PlanRequest, arrangement: Arrangement) -> float:
    """Return the multiple of the asked rates at which the lanes are fully used."""
    busy = sum(lane_shares(asked, arrangement).values())
    return lane_speed(arrangement.host) / (busy * (1 - asked.limit)) if busy else inf


def lane_shares(asked: PlanRequest, arrangement: Arrangement) -> dict[str, float]:
    """Return model -> the least number of lanes, at full speed, that its requests keep busy at the asked rates."""
    shares: dict[str, float] = {}
    for stream, rate, leaving in asked.sent:
        name = stream.served_name
        row_s = least_row_s(arrangement.host, name, arrangement.batches[name], leaving)
        shares[name] = shares.get(name, 0.0) + rate * row_s
    return shares


def lane_speed(host: Host) -> float:
    """Return the largest combined speed of the lanes running together, in units of one lane alone."""
    lanes = host.together()
    least = min((share for row in lanes.losses for share in row), default=0.0)
    return max(
        count * lanes.share(count) * max(LEAST_SPEED, 1 - (count - 1) * least) for count in range(1, len(lanes) + 1)
    )


def least_row_s(host: Host, name: str, most: int, rates: Sequence[float] = ()) -> float:
    """Return the least lane time per request over all batch sizes, with the gaps between segments.

    rates: the share of requests that leave at each exit; a segment then counts for the requests that reach it.
    """
    model = host.model(name)
    hand_over_s, speed = _mean(host.hand_over_s), _usual_spread(model)
    sizes = range(1, most + 1)
    if not rates:
        between_s = len(model.segments) * hand_over_s
        return min((model.total_s(size) * speed + between_s) / size for size in sizes)
    rows_s = ([(time_s * speed + hand_over_s) / size for time_s in model.times_at(size)] for size in sizes)
    reach = reaching(rates, model.exits, len(model.segments))
    best_s = [min(by_size) for by_size in zip(*rows_s, strict=True)]
    return float(sum(share * row_s for share, row_s in zip(reach, best_s, strict=True)))


def fastest_s(host: Host, name: str, rates: Sequence[float] = ()) -> float:
    """Return the least measured time from a request to its answer with nothing else running."""
    return times_alone(host, name, rates).least_s


def late_alone(host: Host, stream: Stream, rates: Sequence[float] = ()) -> float:
    """Return the share of a stream's requests that are late even with nothing else running."""
    return times_alone(host, stream.served_name, rates).later_than(stream.deadline_s)


def blocking(asked: PlanRequest, arrangement: Arrangement) -> Blocking | None:
    """Return the segment that makes most requests of another model late on a single lane; None if there is none."""
    host = arrangement.host
    if host.lanes > 1:
        return None
    blockings = [
        _blocking(arrangement, waits, runs)
        for waits in asked.sent
        for runs in asked.sent
        if runs.name != waits.name and runs.rate
    ]
    worst = max(blockings, key=lambda blocking: blocking.share, default=None)
    return worst if worst and worst.share > 0 else None


def _blocking(arrangement: Arrangement, waits: SentStream, runs: SentStream) -> Blocking:
    """Return how the segments of the stream *runs* make requests of *waits* late; the longest segment is named."""
    host, model = arrangement.host, arrangement.host.model(runs.name)
    spare_s = waits.stream.deadline_s - fastest_s(host, waits.name, waits.leaving)
    least = min((min(run) for run in model.spread), default=1.0)
    sizes = range(1, arrangement.batches[runs.name] + 1)
    # Per request of *runs*, the seconds of each segment in which an arriving request of *waits* is already lost.
    late_s = [
        share * min(max(0.0, _lane_time_s(arrangement, model, size, index) * least - spare_s) / size for size in sizes)
        for index, share in enumerate(reaching(runs.leaving, model.exits, len(model.segments)))
    ]
    longest = max(range(len(late_s)), key=lambda index: model.times_at(1)[index])
    return Blocking(
        waits.name,
        runs.name,
        model.segments[longest],
        model.times_at(1)[longest],
        max(0.0, spare_s),
        min(1.0, runs.rate * sum(late_s)),
    )


def _lane_time_s(arrangement: Arrangement, model: HostModel, size: int, segment: int) -> float:
    """Return the least time for which a segment blocks its lane: the time to stop it, if the policy may stop it."""
    host, time_s = arrangement.host, model.times_at(size)[segment]
    stops = POLICIES[arrangement.settings.policy].aborts is not Policy.aborts
    return min(time_s, host.abort_s) if stops and time_s >= host.abort_from_s else time_s


def _usual_spread(model: HostModel) -> float:
    """Return the mean time of the measured runs over the sum of the segments' mean times, which is near 1."""
    if not model.spread:
        return 1.0
    times_s = np.array(model.times_at(1))
    return float((np.array(model.spread) @ times_s).mean() / times_s.sum()) if times_s.sum() else 1.0


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values) if values else 0.0
