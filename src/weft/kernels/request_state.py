"""What compiled loops over requests keep, as arrays, and how a request is counted.

Times are ticks. Arrays of two columns named ``..._at`` say where a ring begins and how long it is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.kernels.compiling import inlined, loop

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NONE = 1 << 62
"""No deadline, no arrival, no event."""
FIFO, EDF, PREMA, LAYERWEAVER, LAYERWEAVER_PLUS, WEFT_PLUS = range(6)
KEEP, DEMOTE, WEAVE = range(3)
"""What becomes of late requests."""
CHANNEL, ARRAY, FETCHED, ISSUES, POINTER, STEPS, COMPUTED, LOGGED, ANSWERED = range(9)
HEAD, LENGTH = range(2)
BEGUN, PLACES, PUNCTUAL = range(3)
USED, LATE, PROGRAM, LAYER, ON_TIME, SIZE, QUERY, LAST = range(8)
ARRIVED, COMPLETED, VIOLATED, DROPPED, REFUSED, LATENCY_SUM, LATENCY_MAX, DEEPEST, BATCHES, QUERIES = range(10)
OF, JOB, NEXT, RUNS, CAME, DUE = range(6)
"""Columns of ``LoopHeads``."""
READY, BELATED = -1, -2
"""In place of a job: a batch that could begin, of requests in the queue or of late ones."""
WAS_REFUSED = -2
"""Stands in place of the time of a request's answer where it was refused."""
MANTISSA_BITS = 9
"""Bins of latencies are 1/512 wide, 0.2 %: far below what runs with other requests differ by."""
BINS = 64 << MANTISSA_BITS


class Models(NamedTuple):
    """The programs of all streams, one per batch size, one after another."""

    fetch: Ints
    compute: Ints
    remaining: Ints
    """Estimated ticks from each layer to the end of its program."""
    first: Ints
    """Where each program begins, and where the last ends."""
    compute_bound: Bools
    """Whether each program computes for longer than it fetches."""


class LoopTerms(NamedTuple):
    """What was agreed for each stream."""

    base: Ints
    """Its program at batch 1; batch b is base + b - 1."""
    deadline: Ints
    max_batch: Ints
    timeout: Ints
    priority: Ints
    think: Ints
    """Ticks from an answer to the client's next request; -1 for open streams."""
    bins: Ints
    """The row of the histogram that its latencies are counted in."""


class LoopRules(NamedTuple):
    """The policy's terms and the run's."""

    policy: int
    late: int
    foresight: int
    stretch: int
    """weft+: how long a woven rest is taken to last, in percent of its time alone."""
    failsafe: int
    buffer: int
    largest: int
    warm: int
    """Requests that arrive earlier are served but not counted."""
    end: int
    """Closed streams send nothing from here on."""


class LoopState(NamedTuple):
    """Everything that changes during a run."""

    clocks: Ints
    before: Ints
    peak: Ints
    queue: Ints
    """(streams, places) arrival times, a ring; where it begins and how long it is stands in queue_at."""
    queue_at: Ints
    late: Ints
    late_at: Ints
    returning: Ints
    returning_at: Ints
    jobs: Ints
    """(streams, places, 8): batches under way; their columns are USED to LAST."""
    members: Ints
    """(streams, places, largest batch) arrival times."""
    under_way: Ints
    """(streams, 3) batches that have begun; the place after the last of them; that after the one on time, or 0."""
    counts: Ints
    """(streams, 10): what was counted of each stream; the columns are ARRIVED to QUERIES."""
    histogram: Ints
    """(rows, BINS) latencies by ``bin_of``."""


class LoopLog(NamedTuple):
    """Room for what happened, or none.

    issues: stream, query, layer, program, four times; answers: stream, arrival, end.
    """

    issues: Ints
    answers: Ints


class LoopHeads(NamedTuple):
    """What could go next; room for the most there can be."""

    table: Ints
    """(heads, 6): stream, job, layer, program, arrival, deadline."""
    ends: Ints
    """When each would be on chip."""
    may_go: Bools


class LoopNpu(NamedTuple):
    """The device: when channel and array are free, ticks fetched, issues known, and how many of them are done with."""

    channel: int
    array: int
    fetched: int
    n: int
    seen: int


@loop
def bin_of(latency: int) -> int:
    """Bin of a latency: its magnitude and the MANTISSA_BITS bits that follow, a resolution of 0.2 %."""
    shift = 0
    while latency >> (shift + MANTISSA_BITS + 1):
        shift += 1
    return (shift << MANTISSA_BITS) + (latency >> shift)


@inlined
def count_refused(counts):
    """A request that was not taken."""
    counts[VIOLATED] += 1
    counts[REFUSED] += 1


@inlined
def count_done(counts, histogram, latency, deadline):
    """A request that was answered."""
    counts[COMPLETED] += 1
    counts[LATENCY_SUM] += latency
    counts[LATENCY_MAX] = max(counts[LATENCY_MAX], latency)
    counts[VIOLATED] += latency > deadline
    histogram[bin_of(latency)] += 1
