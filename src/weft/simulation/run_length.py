"""The length of a simulated run by which a load is judged: the same for ``weft plan`` and ``weft sustain`` on a host.

Short runs see few long queues, so that a load may seem to be sustained although it is not. For example, ten seconds of
a stream with two requests a second have no late request at a load at which 1 % are late in the long run.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.workloads.requests import Workload

DEADLINES_LONG, BURSTS_LONG = 20, 40
"""A run lasts at least this number of times the longest deadline, and this number of bursts of bursty streams."""
WARM_SHARE = 0.05
"""The warm-up as a share of a run: requests that arrive in it are not counted."""
MOST_TIMES = 4
"""A run lasts at most as long as this multiple of ``RunLength.requests`` takes, however rare a stream is."""
LONGEST_S = 365 * 86400.0
"""The longest run: clocks count nanoseconds in 64 bits, and searches lower the rates 2**40 times."""

FRESH_SEED = 1000
"""Added to the workload's seed for the first set of requests by which loads are judged, so that these differ from the
requests by which a plan's options were chosen; further sets have the next seeds. Another set of the usual length moves
the answer by up to 15 % (two models at 6 requests/s), so commands whose answers must agree use the same sets."""


class RunLength(NamedTuple):
    """The least numbers of requests that a run simulates."""

    requests: int
    """Of all streams together."""
    rarest: int
    """Of the stream with the lowest rate, as far as ``MOST_TIMES`` allows."""


SHORT, USUAL, LONG = RunLength(500, 60), RunLength(1200, 120), RunLength(4000, 300)
"""For the search among options; to judge a load; to compare the best options, where 1 % late are 40 requests."""


def prolong(workload: Workload, length: RunLength) -> Workload:
    """Return the workload with the duration that *length* takes; unchanged if no stream has a rate, or one is a trace.

    The result may also be shorter than the workload.
    """
    rates = [rate for rate in workload.rates if rate]
    if not rates or any(stream.arrival == "trace" for stream in workload.stream):
        return workload
    least_s = max(DEADLINES_LONG * stream.deadline_s for stream in workload.stream)
    for stream in workload.stream:
        if stream.arrival == "bursty":
            least_s = max(least_s, BURSTS_LONG * stream.burst_ms / 1e3 / stream.burst_share)
    enough_s = max(length.requests / sum(rates), length.rarest / min(rates), least_s)
    duration_s = min(enough_s, MOST_TIMES * length.requests / sum(rates), LONGEST_S)
    return workload.model_copy(update={"duration_s": duration_s, "warmup_s": WARM_SHARE * duration_s})


def prolong_if_shorter(workload: Workload, length: RunLength) -> Workload:
    """Return the workload with its own duration, or with the duration that *length* takes if that is longer."""
    longer = prolong(workload, length)
    return longer if longer.duration_s > workload.duration_s else workload
