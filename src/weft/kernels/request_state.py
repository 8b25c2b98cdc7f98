"""The arrays of the compiled loop over requests, by column, and how a request is counted.

Times are ticks. Streams, batches in flight (here: jobs), heads (layers that could go next) and segments on lanes are
rows of integers, and the constants here number their columns: few arrays compile in a fraction of the time that an
array for every column takes.
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
"""The tick of a deadline, an arrival or an event that never comes: ``NO_DEADLINE``."""
NPU, HOST = range(2)
"""Devices: an NPU fetches ahead; the lanes of a host compute one segment at a time."""
FIFO, FAIR, ROUND_ROBIN, EDF, PRIORITY, PUNCTUAL, PREMA, LAYERWEAVER, LAYERWEAVER_PLUS, WEFT_PLUS = range(10)
"""Policies, in an order that comparisons use: up to ROUND_ROBIN they run whole batches, from LAYERWEAVER on they
weave."""
KEEP, DEMOTE, WEAVE = range(3)
"""Rules for late requests under which these are answered."""
CHANNEL, ARRAY, FETCHED, ISSUES, POINTER, STEPS, COMPUTED, LOGGED, ANSWERED = range(9)
"""Places in ``LoopState.clocks``. On an NPU: when channel and array are free, ticks fetched, the number of issues in
``before`` and ``peak`` with the pointer into them; on a host, CHANNEL is the time and ARRAY the last end of a segment.
STEPS: layers issued; COMPUTED: ticks computed; LOGGED, ANSWERED: rows written to ``LoopLog``."""
WAS_BUSY, SETTLED, RUNNING, UNSEEN, NEXT_HAND_OVER = range(9, 14)
"""Further places, for hosts: whether the engine was busy, the tick up to which work is subtracted, the numbers of
segments that run and that have ended unseen by the engine, and the next of the measured hand-over times."""
FIRST_DUE, ADMITTED, GIVEN_UP = range(14, 17)
"""Further places: the first strict deadline, the number of admitted requests, and whether the run is given up."""
CLOCKS = 17
"""The number of places in ``LoopState.clocks``."""
HEAD, LENGTH = range(2)
"""Columns of ``LoopState.rings``: the place where a ring begins, and the number of its entries."""
WAITING, BELATED_RING, RETURNING = range(3)
"""Rings of a stream: waiting requests, late waiting requests, and the ticks at which clients will send again."""
ARRIVAL, LEAVES, NUMBER, GONE = range(4)
"""Columns of a request: arrival, layers after which it leaves, number in order of admission, whether it has ended."""
BATCHES_IN_FLIGHT, PLACES, SERVED, OVERHEADS = range(4)
"""Columns of ``LoopState.streams``; PLACES: one more than the last used place of a job; SERVED: ticks of work issued;
OVERHEADS: the index of the next measured overhead, before it is taken modulo their number."""
USED, LATE, PROGRAM, LAYER, SIZE, QUERY, LAST_ISSUED, BATCH_DUE, OLDEST, COMPUTING = range(10)
"""Columns of ``LoopState.jobs``. USED: whether the place holds a batch; LAYER: layers issued; LAST_ISSUED: step of the
last issue; OLDEST: first arrival; COMPUTING: whether a layer is on a lane."""
BASE, DEADLINE, MAX_BATCH, TIMEOUT, WAITS, STREAM_PRIORITY, THINK, HISTOGRAM_ROW, EXITS = range(9)
SPREAD, RUNS_MEASURED, FIRST_RUN, FIRST_OVERHEAD, OVERHEAD_COUNT = range(9, 14)
"""Columns of a stream's terms. BASE: program at batch 1; WAITS: how long a batch waits to be filled, in percent of the
time to the deadline, or -1; THINK: -1 for open streams; EXITS: whether the model has early exits. SPREAD: where the
stream's measured runs begin in ``Models.spread``; RUNS_MEASURED: their number; FIRST_RUN: the run of query 0.
FIRST_OVERHEAD, OVERHEAD_COUNT: where the stream's overheads begin in ``Models.times``, and their number."""
TERMS = 14
"""The number of columns of a stream's terms."""
FETCH, COMPUTE, REMAINING, EXIT = range(4)
"""Columns of ``Models.layers``; EXIT: whether requests may leave after a layer."""
FIRST, COMPUTE_BOUND, KIND = range(3)
"""Columns of ``Models.programs``. FIRST: index of the first layer; KIND: kind of work for the contention of lanes."""
HEAD_STREAM, HEAD_PLACE, HEAD_LAYER, HEAD_PROGRAM, HEAD_ARRIVAL, HEAD_DUE, HEAD_SIZE, HEAD_QUERY = range(8)
"""Columns of ``LoopHeads.table``. HEAD_PLACE: place of the job, or READY or BELATED; HEAD_LAYER: row of
``Models.layers``; HEAD_ARRIVAL: first arrival; HEAD_SIZE: requests in the batch."""
ON_CHIP, MAY_GO, NEED, REACHABLE, YIELDS = range(8, 13)
"""Further columns: when the weights would be on chip, and whether the head may be issued now. For punctual: remaining
ticks with the margin, the deadline or an extended one that can be met, and whether the head gives way."""
HEADS = 13
"""The number of columns of ``LoopHeads.table``."""
SEG_BEGIN, SEG_END, ABORTED = range(8, 11)
"""Columns of a segment on a lane, behind HEAD_STREAM to HEAD_QUERY of the layer; ABORTED: whether it was stopped."""
SEGMENT = 11
"""The number of columns of a segment."""
REST, SPEED = range(2)
"""Columns of ``LoopState.speeds``: remaining ticks at full speed, and the present speed."""
ARRIVED, COMPLETED, VIOLATED, DROPPED, REFUSED, LATENCY_SUM, LATENCY_MAX, DEEPEST, BATCHES, QUERIES = range(10)
"""Columns of ``LoopState.counts``."""
READY, BELATED = -1, -2
"""Values of HEAD_PLACE for a batch that could begin: of waiting requests, or of late ones."""
WAS_DROPPED, WAS_REFUSED = -1, -2
"""Instead of the tick of a request's answer, for requests without one."""
MANTISSA_BITS = 9
"""Bins of latencies are 1/512 wide, 0.2 %: far below the difference between runs with other random requests."""
BINS = 64 << MANTISSA_BITS
"""The number of bins: enough for every latency of 63 bits."""


class Models(NamedTuple):
    """The programs of all streams, one per batch size, one after another."""

    layers: Ints
    """(layers, 4): FETCH to EXIT; REMAINING: estimated ticks to the end of the program."""
    programs: Ints
    """(programs + 1, 3): FIRST to KIND; FIRST of the last row is the number of layers."""
    work: Floats
    """Mean ticks of every layer alone on the host; empty where layers take exactly their expected ticks."""
    spread: Floats
    """Factors on ``work``: the layers of all measured runs of each stream, over their means."""
    losses: Floats
    """(kinds, kinds): share of its speed that a lane with the first kind of work loses to a lane with the second; empty
    where lanes do not slow each other down."""
    times: Ints
    """Measured hand-over times (from the engine to a lane), and after them each stream's overheads per request."""


class LoopRules(NamedTuple):
    """The constants of the policy and of the run; the defaults are for a run without such a device or workload."""

    device: int
    """NPU or HOST."""
    policy: int
    """FIFO to WEFT_PLUS."""
    late: int
    """KEEP, DEMOTE or WEAVE."""
    refills: int
    """Whether batches are refilled while they run."""
    strict: int
    """Whether requests that cannot be on time are refused or dropped."""
    by_deadline: int
    """Whether the policy orders work by deadlines."""
    late_gives_way: int
    """Whether requests that can no longer be on time run after all others."""
    foresight: int
    """A request counts as late if less than this percentage of its remaining time is left to its deadline."""
    stretch: int
    """weft+: expected remaining time of a woven request, in percent of its remaining time alone."""
    failsafe: int
    """Whether batches run by arrival while all models are compute-bound, or all memory-bound."""
    margin: int
    """punctual: percent added to remaining times."""
    patience: int
    """Waiting time in lengths of the request. priority: for one class higher; punctual: after which a late request no
    longer gives way."""
    buffer: int = 0
    """Weight buffer of an NPU in ticks."""
    largest: int = 0
    """Ticks of the longest fetch of all layers."""
    lanes: int = 1
    cores: int = 0
    """The number of lanes that can run at full speed at the same time; 0: all."""
    least_speed: float = 0.0
    """Lowest speed of a lane beside others, as a part of its share of the cores."""
    abort_from: int = NONE
    """Segments of at least this number of expected ticks may be stopped; NONE: no segment."""
    abort: int = 0
    """Ticks that stopping takes."""
    step: int = 0
    """Ticks that the engine takes to start a segment."""
    hand_overs: int = 0
    """The number of measured hand-over times."""
    warm: int = 0
    """Requests that arrive before this tick are served but not counted."""
    end: int = 0
    """Closed streams send nothing from this tick on."""


class LoopState(NamedTuple):
    """Everything that changes during a run."""

    clocks: Ints
    """(CLOCKS): CHANNEL to GIVEN_UP."""
    before: Ints
    peak: Ints
    """The columns P and PM of ``buffer``, for an NPU."""
    queue: Ints
    """(streams, places, 3): waiting requests, for each stream a ring in order of arrival."""
    late: Ints
    """The same of late waiting requests."""
    returning: Ints
    """(streams, clients, 3): the same of the requests that clients will send, with the tick as their arrival."""
    rings: Ints
    """(streams, 3, 2): HEAD and LENGTH of the rings WAITING, BELATED_RING and RETURNING."""
    streams: Ints
    """(streams, 4): BATCHES_IN_FLIGHT to OVERHEADS."""
    jobs: Ints
    """(streams, places, 10): batches in flight, USED to COMPUTING."""
    members: Ints
    """(streams, places, largest batch, 4): the requests of each job, ARRIVAL to GONE."""
    counts: Ints
    """(streams, 10): counters for the report, ARRIVED to QUERIES."""
    histogram: Ints
    """(rows, BINS) latencies by ``bin_of``."""
    segments: Ints
    """(lanes, 11): running segments, in the order of their starts."""
    speeds: Floats
    """(lanes, 2): REST and SPEED of each running segment."""
    unseen: Ints
    """(segments, 11): segments that have ended and that the engine has not accounted for."""
    patience: Floats
    """By stream, the number of deadlines that may still be missed before the run is given up."""


class LoopLog(NamedTuple):
    """Room for a record of the run; arrays of length 0 where none is wanted.

    Rows of issues: stream, query, layer, program, and start and end of fetch and compute; of answers: stream, arrival,
    end, and the number of layers after which the request left.
    """

    issues: Ints
    answers: Ints


class LoopHeads(NamedTuple):
    """The heads (layers that could be issued next) of one decision, and scratch space, for as many as can exist."""

    table: Ints
    """(heads, 13): HEAD_STREAM to YIELDS."""
    costs: Floats
    """punctual: the cost of each head."""
    order: Ints
    """Scratch. punctual: heads in order of deadlines; admission: the begun work of lanes."""


class LoopArrivals(NamedTuple):
    """The requests that are known to come: one block of a longer run."""

    times: Ints
    """Arrival ticks, ascending within a stream, stream by stream."""
    known: Ints
    """(streams, 2): the index in ``times`` of a stream's next request, and the index where its known requests end."""
    leaves: Ints
    """Layers after which successive requests leave, stream by stream."""
    leaves_known: Ints
    """The same as ``known``, into ``leaves``."""
    more: Bools
    """By stream, whether more requests follow after the known ones."""


@inlined
def copy_row(row, target):
    """Copy a row; assigning one array to another would allocate."""
    for column in range(len(row)):
        target[column] = row[column]


@inlined
def next_layer(models, job):
    """Return the row of ``Models.layers`` of the next layer of a batch; behind its program if all were issued."""
    return models.programs[job[PROGRAM], FIRST] + job[LAYER]


@inlined
def write_head(models, state, stream, place, table, i):
    """Write the next layer of a batch in flight into row *i* of a table, HEAD_STREAM to HEAD_QUERY."""
    job, row = state.jobs[stream, place], table[i]
    row[HEAD_STREAM], row[HEAD_PLACE], row[HEAD_PROGRAM] = stream, place, job[PROGRAM]
    row[HEAD_QUERY], row[HEAD_SIZE] = job[QUERY], job[SIZE]
    row[HEAD_LAYER] = next_layer(models, job)
    row[HEAD_ARRIVAL], row[HEAD_DUE] = job[OLDEST], job[BATCH_DUE]


@loop
def bin_of(latency: int) -> int:
    """Return the histogram bin of a latency: its highest bit and the MANTISSA_BITS bits that follow; bins of 0.2 %."""
    shift = 0
    while latency >> (shift + MANTISSA_BITS + 1):
        shift += 1
    return (shift << MANTISSA_BITS) + (latency >> shift)


@inlined
def count_refused(counts):
    """Count a refused request in a stream's *counts*."""
    counts[VIOLATED] += 1
    counts[REFUSED] += 1


@inlined
def count_done(counts, histogram, latency, deadline):
    """Count an answered request in a stream's *counts* and in its latency *histogram*; *deadline*: from its arrival."""
    counts[COMPLETED] += 1
    counts[LATENCY_SUM] += latency
    counts[LATENCY_MAX] = max(counts[LATENCY_MAX], latency)
    counts[VIOLATED] += latency > deadline
    histogram[bin_of(latency)] += 1
