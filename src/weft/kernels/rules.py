"""What policies decide by, as functions of numbers. Each rule stands here once: a policy calls it with the numbers of a
candidate, a compiled loop takes the same function in (``compiling.inlined``).

Times are ticks. Of keys the least goes first, and the first candidate among equals. Rules do not call each other, and
use only what numba knows of numbers and tuples.
"""

from __future__ import annotations

# Whose turn it is


def resumes(layer: int, last_issued: int) -> int:
    """Sort batches that have begun before all others, the one served last first; 0 for the others."""
    return -2 - last_issued if layer > 0 else 0


def fifo_key(resumes: int, arrival: int, turn: int, stream: int) -> tuple[int, int, int, int]:
    """Whole queries by arrival; where all wait from the start, stream by stream in each turn."""
    return resumes, arrival, turn, stream


def edf_key(deadline: int, arrival: int) -> tuple[int, int]:
    """The earliest deadline, then the earliest arrival."""
    return deadline, arrival


# How long a request has waited


def waited(now: int, arrival: int, whole: int, remaining: int) -> int:
    """Ticks since its arrival in which a query was not served."""
    return max(0, now - arrival - (whole - remaining))


def tokens(priority: int, whole: int, waited: int) -> int:
    """PREMA: priority x (1 + time waited / time alone), times the time alone, to stay in whole numbers."""
    return priority * (whole + waited)


def level(tokens: int, whole: int) -> int:
    """PREMA: the highest threshold that this number of tokens reaches, of 9, 3 and 1; all reach the last."""
    return 9 if tokens >= 9 * whole else 3 if tokens >= 3 * whole else 1


# How much a request counts


def rank(priority: int, waited: int, whole: int, patience: int) -> int:
    """priority: the class, times three for each *patience* lengths waited; 36 times at most, to stay within 64 bits."""
    return int(priority * 3 ** min(waited // max(1, whole) // patience, 36))


def worth(priority: int, size: int, waited: int, whole: int) -> float:
    """punctual: priority times requests, times one plus the waiting time over the length."""
    return priority * size * (1 + waited / max(1, whole))


# How much time is left


def slack(deadline: int, now: int, remaining: int, percent: int) -> int:
    """Ticks to spare until a deadline, if what remains takes *percent* of its time alone."""
    return deadline - now - remaining * percent // 100


def reachable_due(deadline: int, arrival: int, earliest: int) -> int:
    """punctual: the deadline; if it cannot be met, the allowed time is doubled until it can."""
    allowed = max(1, deadline - arrival)
    while deadline < earliest:
        allowed *= 2
        deadline = arrival + allowed
    return deadline


# What stands idle


def idle(
    fetch: int, compute: int, fetched: int, prefetch: int, array: int, buffer: int, largest: int
) -> tuple[int, int, int, bool, int]:
    """Layerweaver's price of a layer that is on chip at *fetched*, while the array is busy until *array*.

    prefetch: ticks the channel can bring in meanwhile; largest: ticks of the largest fetch there is. Ticks the array
    waits for the weights; ticks the channel waits for space that another order would have left it; ticks the array may
    wait for the largest layer if that comes next; whether the layer computes longer than the rest of the buffer takes
    to fill, wherever it is placed; the decoupling distance after it.
    """
    late = fetched - array
    distance = max(0, -late) + compute
    over = compute - (buffer - fetch)
    return (
        max(0, late),
        max(0, over + prefetch) - max(0, over),
        max(0, largest - distance),
        over > 0,
        distance,
    )


def weave_key(idle: int, inherent: bool, distance: int) -> tuple[int, int]:
    """Least idle time first; then no inherent one; then the largest decoupling distance."""
    return 2 * idle + inherent, -distance


def weave_due_key(idle: int, deadline: int) -> tuple[int, int]:
    """Layerweaver+: least idle time first; then the earliest deadline."""
    return idle, deadline


def goes_on(wants_weights: bool, wants_space: bool, compute_bound: bool) -> bool:
    """Whether a model's layers lead to those of the kind that is missing, where any is.

    Where every layer lets the array wait, models that compute go on; else, where every layer lets the channel wait,
    models that fetch.
    """
    return compute_bound if wants_weights else not (wants_space and compute_bound)


def priced_idle(
    fetch: int,
    compute: int,
    fetch_end: int,
    channel_start: int,
    array_free: int,
    compute_price: int,
    memory_price: int,
    shortest: int,
    longest: int,
) -> int:
    """weft: the priced idle time that a layer causes on the array and the channel, in ticks times price.

    channel_start, fetch_end: when the channel begins with it, and when its weights are on chip. array_free: when the
    array has computed all earlier layers. A decoupling distance below *shortest* counts as idle time of the array, one
    above *longest* as idle time of the channel.
    """
    distance = max(array_free, fetch_end) + compute - fetch_end
    array_idle = max(0, fetch_end - array_free) + max(0, shortest - distance)
    channel_idle = fetch_end - channel_start - fetch + max(0, distance - longest)
    return compute_price * array_idle + memory_price * channel_idle


# What fits in


def aimt_key(
    fetch: int, compute: int, last_issued: int, free: int, distance: int, compute_threshold: int, memory_threshold: int
) -> tuple[int, int]:
    """AI-MT: with little of the buffer free, what computes shortest; with little ready compute, what adds most to it;
    else a layer that fetches longer, of the stream that waited longest; without such layers, that stream's."""
    if free < memory_threshold:
        return 0, compute
    if distance < compute_threshold:
        return (0, fetch - compute) if compute > fetch else (1, last_issued)
    return (0 if fetch >= compute else 1), last_issued


def within_lag(progress: int, gain: int, least: int, max_lag: int) -> bool:
    """Whether a stream may go on without leaving the one that is furthest behind too far behind."""
    return progress + gain - least <= max_lag


def fluid_overhead(new_total: int, new_after_exit: int, merged_after_exit: int) -> int:
    """Fluid Batching, equation 4: ticks until a paused batch ends if newcomers first catch up to its exit and join it.

    new_total: ticks of the newcomers alone, from the first layer to the end; new_after_exit: the part of that after the
    exit. merged_after_exit: ticks of the merged batch from the exit to the end.
    """
    return new_total - new_after_exit + merged_after_exit


# What requests cost top-up


def leaving_cost(share: float, size: int, passed: int, late: int, miss: int) -> float:
    """The share of *size* requests that leaves *passed* ticks from now; *late* of them miss, at *miss* ticks each."""
    return share * (size * passed + miss * late)


def backlog_cost(left: int, most: int, full: int, passed: int) -> float:
    """What *left* requests wait together, in batches of *most* that take *full* ticks each, after *passed* ticks."""
    return left * passed + full * (left * (left + most) / (2 * most))


def backlog_ticks(left: int, most: int, full: int) -> int:
    """How long those take."""
    return full * left // most
