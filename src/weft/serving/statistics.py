"""Counters of one model, and its latest answers for rates and percentiles."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

WINDOW_NS = 10_000_000_000
"""Length of the window of current rates and percentiles (10 s): shorter is noisy, longer reacts late."""
EXACT_ROWS = 64
"""Larger batches are counted at the next power of two, which bounds the number of counters that clients can cause."""
SHARES_KEPT = 150
"""Samples of the times on shares: one every two seconds (``history``), five minutes together."""
RECENT = 8192
"""Answers that are kept for the window at most; bounds memory under high rates."""
LATENCY_BOUNDS_NS = (*(step * 10**power for power in range(4, 9) for step in (10, 25, 50)), 10**10)
"""Upper bounds of the histogram of latencies: 0.1 ms to 10 s."""

CLIENT_ERRORS = ("bad_request", "forbidden", "not_found", "quota", "too_large", "unauthorised", "unsupported")
"""Reasons for failures that the client caused (HTTP status 4xx); they do not count as faults of the server."""


class Recent(NamedTuple):
    """One answer of the last seconds."""

    end_ns: int
    latency_ns: int
    """-1 for a request without a result."""
    met: bool | None
    """Whether it met its deadline; None if it had no deadline."""


class RecentWindow(NamedTuple):
    """Figures of the last seconds; percentiles are None without results."""

    rate: float
    """Results per second."""
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    met: int
    missed: int


class ShareTimes:
    """How long segments of a model ran on each share of a device, since the start and in the last minutes."""

    def __init__(self) -> None:
        self.total_ns: Counter[str] = Counter()  # by the name of the share
        self._past: deque[tuple[int, Counter[str]]] = deque(maxlen=SHARES_KEPT)
        """(time in nanoseconds, ``total_ns`` at that time), oldest first."""

    def sample(self, now: int) -> None:
        """Keep a sample of the times until now."""
        if self.total_ns:
            self._past.append((now, self.total_ns.copy()))

    def lately(self, now: int) -> dict[str, float]:
        """Return the fraction of the last minutes during which segments ran, by share."""
        start, start_ns = self._past[0] if self._past else (now, self.total_ns)
        return {share: (ns - start_ns[share]) / max(1, now - start) for share, ns in self.total_ns.items()}


@dataclass(eq=False)
class Statistics:
    """Counters of one model; times in nanoseconds, summed."""

    success: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """Requests without a result by reason, including those that clients caused."""
    inferences: int = 0
    """Rows computed."""
    executions: int = 0
    """Batches computed."""
    # of requests with a result: from arrival to answer, then its parts; failed_ns: of requests without one
    total_ns: int = 0
    queue_ns: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    failed_ns: int = 0
    batches: dict[int, list[int]] = field(default_factory=dict)
    """Rows of a batch -> [number of such batches, their computing time]."""
    met: int = 0
    missed: int = 0
    exits: Counter[int] = field(default_factory=Counter)
    """Number of an exit, from 1 -> rows that took it."""
    merges: int = 0
    """Batches that joined another one half-way."""
    preemptions: int = 0
    aborts: int = 0
    segments: int = 0
    segment_rows: int = 0
    """Rows of the segments computed, summed; those of models with the same body among them."""
    segment_ns: int = 0
    segment_error_ns: int = 0
    """Sum of the differences between predicted and real segment times."""
    shares: ShareTimes = field(default_factory=lambda: ShareTimes())
    """Times on the shares of a device; empty if models do not share one."""
    latencies: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_NS) + 1))
    """Number of answers per latency bound; the last entry counts the answers beyond the largest bound."""
    last_ms: int = 0
    """When the last result was given: milliseconds since 1970."""
    recent: deque[Recent] = field(default_factory=lambda: deque(maxlen=RECENT))

    @property
    def faults(self) -> int:
        """Failed requests that their clients did not cause."""
        return self.failures.total() - sum(self.failures[reason] for reason in CLIENT_ERRORS)

    @property
    def prediction_error(self) -> float:
        """Mean difference of predicted and real segment time, as a share of the real time."""
        return self.segment_error_ns / self.segment_ns if self.segment_ns else 0.0

    @property
    def mean_batch(self) -> float:
        """Rows of a segment, on average: a batch may shrink and grow between its segments."""
        return self.segment_rows / self.segments if self.segments else 0.0

    def answered(self, now: int, latency_ns: int, met: bool | None) -> None:
        """Count a request with a result; *met*: whether it met its deadline, None if it had none."""
        self.success += 1
        self.total_ns += latency_ns
        self.latencies[bisect_left(LATENCY_BOUNDS_NS, latency_ns)] += 1
        self.last_ms = time.time_ns() // 1_000_000
        if met is not None:
            self.met += met
            self.missed += not met
        self._remember(Recent(now, latency_ns, met))

    def failed(self, now: int, latency_ns: int, reason: str, had_deadline: bool) -> bool | None:
        """Count a request without a result; return False if it counts as a missed deadline, else None.

        A request that its client cancelled, or whose inputs do not fit the model, has not missed its deadline.
        """
        self.failures[reason] += 1
        if reason not in CLIENT_ERRORS:
            self.failed_ns += latency_ns
        met = False if had_deadline and reason not in ("cancelled", "bad_request") else None
        if met is not None:
            self.missed += 1
            self._remember(Recent(now, latency_ns=-1, met=met))
        return met

    def executed(self, rows: int, infer_ns: int) -> None:
        """Count a batch that began with *rows* rows, and was computed or joined another batch."""
        self.executions += 1
        self.inferences += rows
        size = rows if rows <= EXACT_ROWS else 1 << (rows - 1).bit_length()
        count_and_ns = self.batches.setdefault(size, [0, 0])
        count_and_ns[0] += 1
        count_and_ns[1] += infer_ns

    def computed(self, rows: int, own_rows: int, took_ns: int, error_ns: int) -> None:
        """Count a segment of *rows*, *own_rows* of which belong to this model, with a proportional share of its time.

        took_ns: the time of the segment. error_ns: the difference from the expected time.
        """
        self.segments += 1
        self.segment_rows += rows
        self.segment_ns += took_ns if own_rows == rows else took_ns * own_rows // max(1, rows)
        self.segment_error_ns += error_ns if own_rows == rows else error_ns * own_rows // max(1, rows)

    def window(self, now: int) -> RecentWindow:
        """Summarize the answers of the last ten seconds, or of a shorter time under rates beyond RECENT per window."""
        answers = [recent for recent in self.recent if recent.end_ns >= now - WINDOW_NS]
        full = len(self.recent) == RECENT and len(answers) == RECENT  # older answers of the window were dropped
        span_s = max(1e-3, (now - answers[0].end_ns) / 1e9) if full else WINDOW_NS / 1e9
        latencies = [answer.latency_ns for answer in answers if answer.latency_ns >= 0]
        p50, p90, p99 = (np.percentile(latencies, (50, 90, 99)) / 1e6).tolist() if latencies else (None, None, None)
        met = sum(1 for answer in answers if answer.met)
        missed = sum(1 for answer in answers if answer.met is False)
        return RecentWindow(len(latencies) / span_s, p50, p90, p99, met, missed)

    def _remember(self, answer: Recent) -> None:
        """Add an answer to the window and drop those that are too old."""
        recent, oldest_ns = self.recent, answer.end_ns - WINDOW_NS
        while recent and recent[0].end_ns < oldest_ns:
            recent.popleft()
        recent.append(answer)
