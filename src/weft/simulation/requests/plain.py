"""The plain engine over simulated requests, with the same counters as the compiled loops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from math import inf
from typing import Any, Protocol

import numpy as np

from weft.devices import Host, Npu
from weft.devices.decoupled import LayerTimes
from weft.engine.arrivals import DROPPED, Arrivals
from weft.engine.for_requests import RequestExecutor, request_engine
from weft.engine.policies import Policy, Setting
from weft.engine.policies.base import Candidate
from weft.engine.simulated_host import SimulatedHost
from weft.engine.simulated_npu import SimulatedNpu
from weft.engine.tickets import Terms, Ticket
from weft.kernels import request_state as k
from weft.simulation.requests import host
from weft.simulation.requests.case import Case, Ints, estimates
from weft.simulation.requests.tally import Tally


class LoggedExecutor(RequestExecutor, Protocol):
    """An executor that keeps a record of its layers."""

    @property
    def log(self) -> Sequence[tuple[Candidate, LayerTimes]]:
        """The layers that were issued and not aborted, with their times."""
        ...


def serve(
    case: Case,
    policy: Policy,
    late: str,
    seed: int | None,
    most_missed: Sequence[float] | None = None,
    executor: LoggedExecutor | None = None,
) -> Tally:
    """Run a case to its end in the plain engine.

    late: the rule for late requests. seed: None: the workload's own. most_missed: for each stream, the number of missed
    deadlines beyond which the run ends early. executor: None: the simulated device of the case.
    """
    setting = policy.setting
    executor = executor or _executor(case, setting, seed)
    streams = range(len(case.terms))
    feed = _LimitedClients(
        [inf] * len(case.terms) if most_missed is None else most_missed,
        case.clock.ticks(case.workload.warmup_s),
        case.terms,
        [_flatten(case.arrivals(index, seed)) for index in streams],
        end=case.clock.ticks(case.workload.duration_s),
        strict=late == "drop",
        leaves=[None if (blocks := case.leaves(i, setting, seed)) is None else _flatten(blocks) for i in streams],
        confidences=[case.confidences(index, setting, seed) for index in streams],
    )
    engine, source = request_engine(policy, feed, executor, estimates(policy), late=late)
    for index, term in enumerate(case.terms):
        source.open(term, case.steered(index))
    try:
        steps = engine.run()
    except _GivenUp:
        steps = len(executor.log)
    return _make_tally(case, feed, source.queues.deepest, executor, steps, _overheads(case, seed))


class _GivenUp(Exception):
    """A stream has missed more deadlines than it may, so the run ends."""


class _LimitedClients(Arrivals):
    """Clients that end the run, by ``_GivenUp``, when a stream has missed too many deadlines."""

    def __init__(
        self, most_missed: Sequence[float], warm: int, terms: Sequence[Terms], *times: Any, **how: Any
    ) -> None:
        """most_missed: for each stream, the deadlines that requests which arrive at *warm* or later may miss.

        times, how: further arguments of ``Arrivals``.
        """
        super().__init__(terms, *times, **how)
        self._misses_left, self._warm = list(most_missed), warm

    def _answer(self, ticket: Ticket, end: int, now: int) -> None:
        super()._answer(ticket, end, now)
        if ticket.arrival >= self._warm and (end < 0 or end > ticket.due):
            self._misses_left[ticket.stream] -= 1
            if self._misses_left[ticket.stream] < 0:
                raise _GivenUp


def _executor(case: Case, setting: Setting, seed: int | None) -> SimulatedNpu | SimulatedHost:
    if isinstance(case.device, Host):
        return host.executor(case, setting, seed)
    return SimulatedNpu(setting) if isinstance(case.device, Npu) else SimulatedHost(setting)


def _overheads(case: Case, seed: int | None) -> Sequence[Iterator[int]]:
    """Return, for each stream, an endless iterator over the overheads of its requests besides the simulated work."""
    return host.overheads(case, seed) if isinstance(case.device, Host) else [repeat(0) for _ in case.terms]


def _flatten(blocks: Iterator[Ints]) -> Iterator[int]:
    """Iterate over the values of all blocks."""
    return (int(value) for block in blocks for value in block)


def _make_tally(
    case: Case,
    feed: Arrivals,
    deepest: list[int],
    executor: LoggedExecutor,
    steps: int,
    overheads: Sequence[Iterator[int]],
) -> Tally:
    """Count a run from the answers of its *feed* (the clients) and the log of its executor.

    deepest: longest queue by stream. steps: issued layers. overheads: of each stream's requests (``_overheads``).
    """
    warm = case.clock.ticks(case.workload.warmup_s)
    counts, bins = _count_requests(case, feed, warm, overheads)
    for row, batches, depth in zip(counts, feed.batches(warm), deepest, strict=True):
        row[k.BATCHES], row[k.DEEPEST] = batches, depth
    clocks = np.zeros(9, np.int64)  # CHANNEL to ANSWERED of ``LoopState.clocks``
    clocks[k.ARRAY] = max([times.compute_end for _, times in executor.log], default=0)
    clocks[k.FETCHED] = sum(head.fetch for head, _ in executor.log)
    clocks[k.COMPUTED] = _computed_ticks(case, executor)
    clocks[k.STEPS] = steps
    issues = [(head.stream, head.query, head.layer, head.program, *times) for head, times in executor.log]
    histogram = [np.bincount(np.array(row, np.int64), minlength=k.BINS) for row in bins]
    return Tally(
        clocks,
        np.array(counts, np.int64).reshape(-1, 10),
        np.array(histogram, np.int64).reshape(-1, k.BINS),
        tuple(feed.answers),
        np.array(issues, np.int64).reshape(-1, 8),
    )


def _count_requests(
    case: Case, feed: Arrivals, warm: int, overheads: Sequence[Iterator[int]]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the counters of each stream for requests that arrived at *warm* or later, and the bins of latencies.

    Parameters as of ``_make_tally``.
    """
    counts = [[0] * 10 for _ in case.terms]
    bins: list[list[int]] = [[] for _ in case.terms]
    for stream, arrival, end, _ in feed.answers:
        if arrival < warm:
            continue
        row = counts[stream]
        row[k.ARRIVED] += 1
        if end < 0:
            row[k.VIOLATED] += 1
            row[k.DROPPED if end == DROPPED else k.REFUSED] += 1
            continue
        latency = end - arrival + next(overheads[stream])
        row[k.COMPLETED] += 1
        row[k.LATENCY_SUM] += latency
        row[k.LATENCY_MAX] = max(row[k.LATENCY_MAX], latency)
        row[k.VIOLATED] += latency > case.terms[stream].deadline
        bins[stream].append(bin_of(latency))
    return counts, bins


def bin_of(latency: int) -> int:
    """Twin of ``request_state.bin_of``: for some thousand latencies, loading compiled code would take longer."""
    shift = max(0, latency.bit_length() - k.MANTISSA_BITS - 1)
    return (shift << k.MANTISSA_BITS) + (latency >> shift)


def _computed_ticks(case: Case, executor: LoggedExecutor) -> int:
    """Return the ticks of computing; on a host the actual ticks of segments, not their expected ones."""
    if isinstance(case.device, Host):
        return sum(times.compute_end - times.compute_start for _, times in executor.log)
    return sum(head.compute for head, _ in executor.log)
