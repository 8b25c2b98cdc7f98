"""The arrays of the compiled loop over requests, by column, and how a request is counted.

Times are ticks. Rows of small facts (streams, batches, heads, segments) are rows of integers, and the constants here
number their columns: few arrays compile in a fraction of the time that one array for each fact takes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.kernels.compiling import inlined, loop

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

NONE = 1 << 62
"""No deadline, no arrival, no event: ``NO_DEADLINE``."""
NPU, HOST = range(2)
"""Devices: one that fetches ahead, and one whose lanes compute a segment at a time."""
FIFO, FAIR, ROUND_ROBIN, EDF, PRIORITY, PUNCTUAL, PREMA, LAYERWEAVER, LAYERWEAVER_PLUS, WEFT_PLUS = range(10)
KEEP, DEMOTE, WEAVE = range(3)
"""Rules for late requests that are answered."""
CHANNEL, ARRAY, FETCHED, ISSUES, POINTER, STEPS, COMPUTED, LOGGED, ANSWERED = range(9)
"""Columns of ``LoopState.clocks``; CHANNEL is the time on a host, and ARRAY the last end..."""
STEPPED, SETTLED, RUNNING, UNSEEN, HANDED_OVER, FIRST_DUE, NUMBERED, GIVEN_UP, LAST_OF, LAST_QUERY = range(9, 19)
"""... whether the engine was busy, the tick up to which work is subtracted, segments that run and that ended while the
engine was busy, the place in the hand-over times, the first strict deadline, requests admitted, whether the run is
given up, and the stream and query that an NPU was given last."""
CLOCKS = 19
HEAD, LENGTH = range(2)
"""Columns of ``LoopState.rings``: where a ring begins and how long it is."""
WAITING, BELATED_RING, BACK = range(3)
"""Rings of a stream: requests that wait, those that are late, and clients that will send again."""
ARRIVAL, LEAVES, NUMBER, GONE = range(4)
"""Columns of a request: arrival, layers after which it leaves, place in the order of admission, answered already."""
BATCHES_IN_FLIGHT, PLACES, SERVED, OVERHEADS = range(4)
"""Columns of ``LoopState.streams``; PLACES: the place after the last batch, OVERHEADS: how many were drawn."""
USED, LATE, PROGRAM, LAYER, SIZE, QUERY, LAST, BATCH_DUE, OLDEST, COMPUTING = range(10)
"""Columns of ``LoopState.jobs``."""
BASE, DEADLINE, MAX_BATCH, TIMEOUT, WAITS, PRIORITY_OF, THINK, BINS_OF, EXITS = range(9)
SPREAD, RUNS_MEASURED, RUN, OVER, OVERS = range(9, 14)
"""Columns of a stream's terms: program at batch 1, ..., percent of its allowed time a batch waits or -1, ..., row of
the histogram, whether it has exits, and where its measured runs and overheads begin and how many there are."""
TERMS = 14
FETCH, COMPUTE, REMAINING, EXIT = range(4)
"""Columns of ``Models.layers``; EXIT: whether requests may leave after a layer."""
FIRST, COMPUTE_BOUND, KIND = range(3)
"""Columns of ``Models.programs``."""
OF, JOB, NEXT, RUNS, CAME, DUE, MEMBERS, BATCH, ON_CHIP, MAY_GO, NEED, REACHABLE, YIELDS = range(13)
"""Columns of ``LoopHeads.table``; ON_CHIP: when it would be; the last three are punctual's."""
HEADS = 13
SEG_OF, SEG_JOB, SEG_AT, SEG_PROGRAM, SEG_QUERY, SEG_BEGIN, SEG_END, ABORTED, SEG_CAME, SEG_DUE, SEG_SIZE = range(11)
"""Columns of segments on lanes."""
SEGMENT = 11
REST, SPEED = range(2)
ARRIVED, COMPLETED, VIOLATED, DROPPED, REFUSED, LATENCY_SUM, LATENCY_MAX, DEEPEST, BATCHES, QUERIES = range(10)
"""Columns of ``LoopState.counts``."""
READY, BELATED = -1, -2
"""In place of a job: a batch that could begin, of requests in the queue or of late ones."""
WAS_DROPPED, WAS_REFUSED = -1, -2
"""In place of the time of a request's answer."""
MANTISSA_BITS = 9
"""Bins of latencies are 1/512 wide, 0.2 %: far below what runs with other requests differ by."""
BINS = 64 << MANTISSA_BITS


class Models(NamedTuple):
    """The programs of all streams, one per batch size, one after another."""

    layers: Ints
    """(layers, 4): FETCH to EXIT; REMAINING: estimated ticks to the end of the program."""
    programs: Ints
    """(programs + 1, 3): FIRST to KIND; the last row says where the last program ends."""
    work: Floats
    """Ticks that each layer takes alone, before its spread; empty where layers take what is expected."""
    spread: Floats
    """Measured runs of each stream, over their means."""
    losses: Floats
    """(kinds, kinds): share of its speed that a lane loses to another; empty where nothing is lost."""
    times: Ints
    """Hand-over times, and after them each stream's overheads."""


class LoopRules(NamedTuple):
    """The policy's terms and the run's."""

    device: int
    policy: int
    late: int
    refills: int
    strict: int
    """Whether requests are refused and dropped that cannot be on time."""
    by_deadline: int
    """Whether the policy orders work by deadlines."""
    late_gives_way: int
    foresight: int
    stretch: int
    """weft+: how long a woven rest is taken to last, in percent of its time alone."""
    failsafe: int
    margin: int
    """punctual: percent added to remaining times."""
    patience: int
    """priority: lengths waited for each class climbed; punctual: after which a late request no longer gives way."""
    buffer: int
    largest: int
    lanes: int
    cores: int
    """Lanes that run at full speed at the same time; 0: all."""
    least_speed: float
    abort_from: int
    """Segments that take as long may be stopped; NONE: none."""
    abort: int
    """Ticks that stopping takes."""
    step: int
    """Ticks that the engine takes to start a segment."""
    hand_overs: int
    """How many hand-over times were measured."""
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
    """(streams, places, 3): requests that wait, a ring in order of arrival; ``rings`` says where it begins."""
    late: Ints
    returning: Ints
    """(streams, clients): when clients send again, a ring in order of times."""
    rings: Ints
    """(streams, 3, 2)."""
    streams: Ints
    jobs: Ints
    """(streams, places, 10): batches in flight, USED to COMPUTING."""
    members: Ints
    """(streams, places, largest batch, 4)."""
    counts: Ints
    """(streams, 10): what was counted of each stream, ARRIVED to QUERIES."""
    histogram: Ints
    """(rows, BINS) latencies by ``bin_of``."""
    segments: Ints
    """(lanes, 11): segments that run, in the order of their starts."""
    speeds: Floats
    """(lanes, 2): the REST of each in ticks at full speed, and its SPEED."""
    unseen: Ints
    """Segments that ended and that the source has not seen."""
    patience: Floats
    """Deadlines that each stream may still miss before the run is given up."""


class LoopLog(NamedTuple):
    """Room for what happened, or none.

    issues: stream, query, layer, program, four times; answers: stream, arrival, end, layers.
    """

    issues: Ints
    answers: Ints


class LoopHeads(NamedTuple):
    """What could go next, and notes of a decision; room for the most there can be."""

    table: Ints
    """(heads, 13): OF to YIELDS."""
    costs: Floats
    """punctual's cost of each."""
    order: Ints
    """punctual: heads in order of deadlines; admission: what lanes have ahead."""


class LoopArrivals(NamedTuple):
    """Requests that are known to come."""

    times: Ints
    """Ascending ticks, stream by stream."""
    known: Ints
    """(streams, 2): where a stream's next one is, and where its known ones end."""
    leaves: Ints
    """Layers after which successive requests leave, stream by stream."""
    leaves_known: Ints
    more: Bools
    """Whether further ones follow."""


@inlined
def copy_row(row, target):
    """Copy a row; assigning one array to another would allocate."""
    for column in range(len(row)):
        target[column] = row[column]


@loop
def bin_of(latency: int) -> int:
    """Bin of a latency: its magnitude and the MANTISSA_BITS bits that follow, a resolution of 0.2 %."""
    shift = 0
    while latency >> (shift + MANTISSA_BITS + 1):
        shift += 1
    return (shift << MANTISSA_BITS) + (latency >> shift)


@inlined
def count_refused(counts):
    """Count a request that was not accepted."""
    counts[VIOLATED] += 1
    counts[REFUSED] += 1


@inlined
def count_done(counts, histogram, latency, deadline):
    """Count a request that was answered."""
    counts[COMPLETED] += 1
    counts[LATENCY_SUM] += latency
    counts[LATENCY_MAX] = max(counts[LATENCY_MAX], latency)
    counts[VIOLATED] += latency > deadline
    histogram[bin_of(latency)] += 1
