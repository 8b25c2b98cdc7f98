"""The rules by which policies compare candidates, as functions of numbers. Every rule is written once: a policy calls
it with the numbers of a candidate, and a compiled loop inlines the same function (``compiling.inlined``).

Times are ticks. The candidate with the least key goes first, and among equal keys the first candidate. Rules do not
call each other, and use only operations on numbers and tuples that numba can compile.
"""

from __future__ import annotations

# The order of queries


def resumes(layer: int, last_issued: int) -> int:
    """Return a key that sorts begun batches before all others, the batch served last first; 0 for the others."""
    return -2 - last_issued if layer > 0 else 0


def fifo_key(resumes: int, arrival: int, turn: int, stream: int) -> tuple[int, int, int, int]:
    """Return fifo's key: begun queries first (*resumes*), then by arrival; saturated streams one after another.

    turn: the round of the query in a saturated stream; 0 for requests.
    """
    return resumes, arrival, turn, stream


def edf_key(deadline: int, arrival: int) -> tuple[int, int]:
    """Return the key of the earliest deadline, then the earliest arrival."""
    return deadline, arrival


# How long a request has waited


def waited(now: int, arrival: int, query_ticks: int, remaining: int) -> int:
    """Return the ticks since its arrival in which a query was not served.

    query_ticks, remaining: the ticks of the whole query alone on the device, and of its layers that were not issued.
    """
    return max(0, now - arrival - (query_ticks - remaining))


def tokens(priority: int, query_ticks: int, waited: int) -> int:
    """PREMA: return priority x (1 + time waited / time alone), times the time alone *query_ticks*: an integer."""
    return priority * (query_ticks + waited)


def level(tokens: int, query_ticks: int) -> int:
    """PREMA: return the highest threshold of 9, 3 and 1 that *tokens* reaches; every query reaches 1."""
    return 9 if tokens >= 9 * query_ticks else 3 if tokens >= 3 * query_ticks else 1


# How much a request counts


def rank(priority: int, waited: int, query_ticks: int, patience: int) -> int:
    """priority: return the priority, times three for every *patience* own lengths that a request has waited.

    query_ticks: the length, alone on the device. At most 36 times, to stay within 64 bits.
    """
    return int(priority * 3 ** min(waited // max(1, query_ticks) // patience, 36))


def worth(priority: int, size: int, waited: int, query_ticks: int) -> float:
    """punctual: return how much a batch counts: priority x size x (1 + time waited / time alone, *query_ticks*)."""
    return priority * size * (1 + waited / max(1, query_ticks))


# How much time is left


def slack(deadline: int, now: int, remaining: int, percent: int) -> int:
    """Return the ticks to spare until a deadline if the remaining work takes *percent* percent of its time alone."""
    return deadline - now - remaining * percent // 100


def reachable_due(deadline: int, arrival: int, earliest: int) -> int:
    """punctual: return the deadline, extended if it is before *earliest*, the earliest possible end.

    The time from arrival to deadline is doubled until the deadline can be met.
    """
    allowed = max(1, deadline - arrival)
    while deadline < earliest:
        allowed *= 2
        deadline = arrival + allowed
    return deadline


# Idle time


def idle(
    fetch: int, compute: int, fetched: int, prefetch: int, array: int, buffer: int, largest: int
) -> tuple[int, int, int, bool, int]:
    """Layerweaver: return the idle time that a layer causes; its weights are on chip at *fetched*.

    array: when the array is free. prefetch: ticks of later layers that the channel can fetch until then. buffer: the
    weight buffer in ticks. largest: ticks of the largest fetch of all models.

    Returns: ticks that the array waits for the weights; ticks that the channel waits for space that another order would
    have left; ticks that the array would wait if the largest layer came next; whether the layer computes longer than
    the rest of the buffer takes to fill, in every order; the decoupling distance after the layer.
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
    """Layerweaver: return the key of the least idle time; then no inherent idle time; then the largest distance."""
    return 2 * idle + inherent, -distance


def weave_due_key(idle: int, deadline: int) -> tuple[int, int]:
    """Layerweaver+: return the key of the least idle time, then the earliest deadline."""
    return idle, deadline


def helps_starved(wants_weights: bool, wants_space: bool, compute_bound: bool) -> bool:
    """Layerweaver: return whether a layer of a model helps the resource that starves; True if none does.

    wants_weights: every candidate lets the array wait; then compute-bound models help. Otherwise wants_space: every
    candidate lets the channel wait; then memory-bound models help.
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
    """weft: return the priced idle time that a layer causes on the array and the channel, in ticks times price.

    channel_start, fetch_end: when the channel begins with it, and when its weights are on chip. array_free: when the
    array has computed all earlier layers. A decoupling distance below *shortest* counts as idle time of the array, one
    above *longest* as idle time of the channel.
    """
    distance = max(array_free, fetch_end) + compute - fetch_end
    array_idle = max(0, fetch_end - array_free) + max(0, shortest - distance)
    channel_idle = fetch_end - channel_start - fetch + max(0, distance - longest)
    return compute_price * array_idle + memory_price * channel_idle


# Thresholds, lag, and joining a batch


def aimt_key(
    fetch: int, compute: int, last_issued: int, free: int, distance: int, compute_threshold: int, memory_threshold: int
) -> tuple[int, int]:
    """AI-MT: return the key of a layer, given the *free* part of the buffer and the decoupling *distance*.

    With little of the buffer free, the shortest compute goes first; with little ready compute, the layer that adds most
    to it. Otherwise memory-bound layers go first, and among them, or without them, the stream that waited longest.
    """
    if free < memory_threshold:
        return 0, compute
    if distance < compute_threshold:
        return (0, fetch - compute) if compute > fetch else (1, last_issued)
    return (0 if fetch >= compute else 1), last_issued


def within_lag(progress: int, gain: int, least: int, max_lag: int) -> bool:
    """Return whether a stream may issue a layer that adds *gain*: it is then at most *max_lag* ahead of *least*.

    least: the progress of the stream that is furthest behind.
    """
    return progress + gain - least <= max_lag


def fluid_overhead(new_total: int, new_after_exit: int, merged_after_exit: int) -> int:
    """Fluid Batching, equation 4: return the ticks until a paused batch ends if newcomers join it at its exit first.

    new_total: ticks of the newcomers alone, from the first layer to the end; new_after_exit: the part of that after the
    exit. merged_after_exit: ticks of the merged batch from the exit to the end.
    """
    return new_total - new_after_exit + merged_after_exit


# Costs of top-up


def leaving_cost(share: float, size: int, passed: int, late: int, miss: int) -> float:
    """top-up: return the cost, in ticks, of requests at an exit *passed* ticks from now.

    share: the part of *size* requests that leaves there. late: how many of all would miss their deadlines there (a
    request in flight may count several times), at a cost of *miss* each.
    """
    return share * (size * passed + miss * late)


def backlog_cost(requests: int, max_batch: int, batch_ticks: int, passed: int) -> float:
    """top-up: return the summed waiting ticks of *requests* requests that run in full batches after *passed* ticks.

    max_batch: the requests of a full batch; batch_ticks: the ticks that it takes.
    """
    # The second term sums max_batch * batch_ticks * j over the batches j = 1 ... requests / max_batch.
    return requests * passed + batch_ticks * (requests * (requests + max_batch) / (2 * max_batch))


def backlog_ticks(requests: int, max_batch: int, batch_ticks: int) -> int:
    """top-up: return the ticks of *requests* requests in batches of *max_batch*, which take *batch_ticks* each."""
    return batch_ticks * requests // max_batch
