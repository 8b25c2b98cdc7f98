"""Bounds on the throughput and latency of an arrangement, computed without simulation.

Throughput: lane time per request is at least that of the batch size with the least time per row. Latency: a request
takes at least as long as its model with nothing else running. On a single lane, a request that arrives while a segment
runs waits for the segment's end; if its slack is shorter than this wait, some requests are late under every policy.

The bounds hold on average; a run of some thousand requests may do better by chance, by up to ``SLACK`` and ``CHANCE``.

*rates* everywhere here: the share of requests that leaves at each exit, the end last; empty: all run to the end.
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
"""Largest factor by which a simulated run may exceed the bound on the load."""
CHANCE = 0.5
"""Least ratio of the misses in a simulated run to the misses that the bound predicts."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The bounds of an arrangement."""

    factor: float
    """Largest multiple of the asked rates that may keep the deadlines; infinite if no stream has a rate."""
    missed: float
    """Least share of its deadlines that the stream with most misses misses at the asked load."""
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


def bound_of(request: PlanRequest, arrangement: Arrangement) -> Bound:
    """Return the bound of an arrangement."""
    host = arrangement.host
    missed_alone = max(late_alone(host, stream, exit_shares) for stream, _, exit_shares in request.sent_streams)
    blocked = blocking(request, arrangement)
    share = blocked.share if blocked else 0.0
    # At a multiple *factor* of the load, at least factor * share / (1 + factor * share) of the deadlines are missed.
    by_blocking = request.limit / (1 - request.limit) / share if share else inf
    factor = 0.0 if missed_alone > request.limit else min(lane_factor(request, arrangement), by_blocking)
    latency = max(
        fastest_s(host, stream.served_name, exit_shares) / stream.deadline_s
        for stream, _, exit_shares in request.sent_streams
    )
    return Bound(factor, max(missed_alone, share / (1 + share)), latency)


def lane_factor(request: PlanRequest, arrangement: Arrangement) -> float:
    """Return the multiple of the asked rates at which the lanes are fully used."""
    busy = sum(lane_shares(request, arrangement).values())
    # requests up to the limit of misses may be given up, and then take no lane time
    return lane_speed(arrangement.host) / (busy * (1 - request.limit)) if busy else inf


def lane_shares(request: PlanRequest, arrangement: Arrangement) -> dict[str, float]:
    """Return model -> the least number of lanes, at full speed, that its requests keep busy at the asked rates."""
    shares: dict[str, float] = {}
    for stream, rate, exit_shares in request.sent_streams:
        name = stream.served_name
        row_s = least_row_s(arrangement.host, name, arrangement.batches[name], exit_shares)
        shares[name] = shares.get(name, 0.0) + rate * row_s
    return shares


def lane_speed(host: Host) -> float:
    """Return the largest combined speed of the lanes running together, in units of one lane alone."""
    lanes = host.together()
    # *count* lanes have a share of a core each, and lose at least *least_loss* of their speed to each other lane.
    least_loss = min((loss for row in lanes.losses for loss in row), default=0.0)
    return max(
        count * lanes.share(count) * max(LEAST_SPEED, 1 - (count - 1) * least_loss)
        for count in range(1, len(lanes) + 1)
    )


def least_row_s(host: Host, name: str, most: int, rates: Sequence[float] = ()) -> float:
    """Return the least lane seconds per request over the batch sizes up to *most*, with the gaps between segments.

    With *rates*, a segment counts for the requests that reach it.
    """
    model = host.model(name)
    gap_s, run_factor = _mean(host.hand_over_s), _run_factor(model)
    sizes = range(1, most + 1)
    if not rates:
        gaps_s = len(model.segments) * gap_s
        return min((model.total_s(size) * run_factor + gaps_s) / size for size in sizes)
    rows_s = ([(time_s * run_factor + gap_s) / size for time_s in model.times_at(size)] for size in sizes)
    reach = reaching(rates, model.exits, len(model.segments))
    best_s = [min(by_size) for by_size in zip(*rows_s, strict=True)]
    return float(sum(share * row_s for share, row_s in zip(reach, best_s, strict=True)))


def fastest_s(host: Host, name: str, rates: Sequence[float] = ()) -> float:
    """Return the least measured time from a request to its answer with nothing else running."""
    return times_alone(host, name, rates).least_s


def late_alone(host: Host, stream: Stream, rates: Sequence[float] = ()) -> float:
    """Return the share of a stream's requests that are late even with nothing else running."""
    return times_alone(host, stream.served_name, rates).later_than(stream.deadline_s)


def blocking(request: PlanRequest, arrangement: Arrangement) -> Blocking | None:
    """Return the segment that makes most requests of another model late on a single lane; None if there is none."""
    host = arrangement.host
    if host.lanes > 1:
        return None
    blockings = [
        _blocking(arrangement, waiting, running)
        for waiting in request.sent_streams
        for running in request.sent_streams
        if running.name != waiting.name and running.rate
    ]
    worst = max(blockings, key=lambda blocking: blocking.share, default=None)
    return worst if worst and worst.share > 0 else None


def _blocking(arrangement: Arrangement, waiting: SentStream, running: SentStream) -> Blocking:
    """Return how segments of the stream *running* make requests of *waiting* late; the longest segment is named."""
    host, model = arrangement.host, arrangement.host.model(running.name)
    spare_s = waiting.stream.deadline_s - fastest_s(host, waiting.name, waiting.exit_shares)
    # the shortest measured run of a segment, over its mean time
    least_factor = min((min(run) for run in model.spread), default=1.0)
    sizes = range(1, arrangement.batches[running.name] + 1)
    # Per request of *running*, the seconds of each segment in which an arriving request of *waiting* is already lost:
    # its wait for the segment's end would exceed its slack.
    lost_s = [
        share
        * min(max(0.0, _lane_time_s(arrangement, model, size, index) * least_factor - spare_s) / size for size in sizes)
        for index, share in enumerate(reaching(running.exit_shares, model.exits, len(model.segments)))
    ]
    longest = max(range(len(lost_s)), key=lambda index: model.times_at(1)[index])
    return Blocking(
        waiting.name,
        running.name,
        model.segments[longest],
        model.times_at(1)[longest],
        max(0.0, spare_s),
        min(1.0, running.rate * sum(lost_s)),
    )


def _lane_time_s(arrangement: Arrangement, model: HostModel, size: int, segment: int) -> float:
    """Return the least time for which a segment blocks its lane: the time to stop it, if the policy may stop it."""
    host, time_s = arrangement.host, model.times_at(size)[segment]
    # a policy that never stops running segments inherits the method *aborts*
    may_stop = POLICIES[arrangement.settings.policy].aborts is not Policy.aborts
    return min(time_s, host.abort_s) if may_stop and time_s >= host.abort_from_s else time_s


def _run_factor(model: HostModel) -> float:
    """Return the mean time of the measured runs over the sum of the segments' mean times, which is near 1."""
    if not model.spread:
        return 1.0
    times_s = np.array(model.times_at(1))
    return float((np.array(model.spread) @ times_s).mean() / times_s.sum()) if times_s.sum() else 1.0


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values) if values else 0.0
