"""How long a simulated run must be to judge a load by it: the same for ``weft plan`` and ``weft sustain`` on a host.

Short runs see few long queues, so that a load seems to be sustained which is not: of a stream with two requests a
second, the usual ten seconds of a workload have none late at a load of which 1 % are late in the long run.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.workloads.requests import Workload

DEADLINES_LONG, BURSTS_LONG = 20, 40
"""How many of the longest deadlines, and of the bursts of bursty streams, a run lasts at least."""
WARM_SHARE = 0.05
"""The part of a run that is not counted."""
MOST_TIMES = 4
"""A run is prolonged for rare streams up to this multiple of the requests."""

FRESH_SEED = 1000
"""Added to the workload's seed for the first set of requests that loads are judged by, other ones than those by which a
plan's options were chosen; the sets after it count on from there. One set of the usual length moves the answer by up to
15 % (two models at 6 requests/s), so that commands that are to agree have to draw the same."""


class RunLength(NamedTuple):
    """How much of a workload is simulated."""

    requests: int
    rarest: int
    """Requests of the stream that sends least."""


SHORT, USUAL, LONG = RunLength(500, 60), RunLength(1200, 120), RunLength(4000, 300)


def lasting(workload: Workload, length: RunLength) -> Workload:
    """The workload for as long as *length* takes; as it is where no stream has a rate, or one is a trace."""
    rates = [rate for rate in workload.rates if rate]
    if not rates or any(stream.arrival == "trace" for stream in workload.stream):
        return workload
    least_s = max(DEADLINES_LONG * stream.deadline_s for stream in workload.stream)
    for stream in workload.stream:
        if stream.arrival == "bursty":
            least_s = max(least_s, BURSTS_LONG * stream.burst_ms / 1e3 / stream.burst_share)
    enough_s = max(length.requests / sum(rates), length.rarest / min(rates), least_s)
    duration_s = min(enough_s, MOST_TIMES * length.requests / sum(rates))
    return workload.model_copy(update={"duration_s": duration_s, "warmup_s": WARM_SHARE * duration_s})


def lasting_at_least(workload: Workload, length: RunLength) -> Workload:
    """The workload for its own time, or for as long as *length* takes where that is longer."""
    longer = lasting(workload, length)
    return longer if longer.duration_s > workload.duration_s else workload
