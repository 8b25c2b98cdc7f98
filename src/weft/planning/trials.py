"""Simulated runs of a way to serve, by the server's own rules, as long as it takes to judge it and no longer.

Loads are steps of ``STEP`` from the asked one, which is step 0, so that options that carry nearly the same count as
equal. Whether a step is sustained is first looked at in a short run, which tells where it is clear; only what is near
the limit is simulated for longer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import floor, inf, log
from typing import NamedTuple

from weft.planning.asked import Asked
from weft.planning.bounds import SLACK, Bound, bound_of
from weft.planning.candidates import Arrangement
from weft.reports.requests import RequestReport
from weft.simulation.requests import Case, RequestRun, prepare, simulate_requests
from weft.workloads.requests import Workload

STEP = 1.03
"""Options whose loads are less than this apart count as equal."""
LOWEST = -160
"""The step, about a hundredth of the asked load, below which nothing is said to be sustained."""
HIGHEST = 400
FIRST_GUESS = 0.85
"""The part of the bound at which the search for the largest load begins."""
CLEAR, CLEAR_COUNT = 5.0, 4
"""A short run with so many times the misses that may be, and so many at least, is not repeated."""
DEADLINES_LONG, BURSTS_LONG = 20, 40
"""How many of the longest deadlines, and of the bursts of bursty streams, a run lasts at least."""
WARM_SHARE = 0.05
MOST_TIMES = 4
"""A run is prolonged for rare streams up to so many times the requests."""


class RunLength(NamedTuple):
    """How much of a workload is simulated."""

    requests: int
    rarest: int
    """Requests of the stream that sends least."""


SHORT, USUAL, LONG = RunLength(400, 60), RunLength(1600, 150), RunLength(6000, 400)


def run_workload(asked: Asked, arrangement: Arrangement, factor: float, length: RunLength) -> Workload:
    """The asked streams at a multiple of their rates, for as long as it takes."""
    workload = arrangement.serving(asked.workload).scaled(factor)
    rates = [rate for rate in workload.rates if rate]
    least_s = max(DEADLINES_LONG * stream.deadline_s for stream in workload.stream)
    if not rates or any(stream.arrival == "trace" for stream in workload.stream):
        return workload
    for stream in workload.stream:
        if stream.arrival == "bursty":
            least_s = max(least_s, BURSTS_LONG * stream.burst_ms / 1e3 / stream.burst_share)
    enough_s = max(length.requests / sum(rates), length.rarest / min(rates), least_s)
    duration_s = min(enough_s, MOST_TIMES * length.requests / sum(rates))
    return workload.model_copy(update={"duration_s": duration_s, "warmup_s": WARM_SHARE * duration_s})


def late_rule(asked: Asked, arrangement: Arrangement) -> str:
    """What becomes of late requests: clients whose deadlines are strict want no late answer."""
    return "drop" if asked.deadlines == "strict" else arrangement.settings.late


def simulated(
    asked: Asked, arrangement: Arrangement, factor: float, length: RunLength, seed: int | None = None
) -> tuple[Case, RequestRun]:
    """One run, and the case it is of."""
    case = prepare(run_workload(asked, arrangement, factor, length), arrangement.host)
    run = simulate_requests(
        case,
        arrangement.settings.policy,
        late=late_rule(asked, arrangement),
        options=arrangement.settings.policy_options,
        seed=seed,
    )
    return case, run


@dataclass(eq=False, slots=True)
class Trial:
    """A way to serve, and what is known of it so far; asking may take a simulation."""

    asked: Asked
    arrangement: Arrangement
    bound: Bound
    memory_bytes: int
    runs: int = 0
    """How often it was simulated."""
    _reports: dict[int, RequestReport] = field(default_factory=dict)
    _sustained: dict[int, bool] = field(default_factory=dict)
    _failed: dict[int, float] = field(default_factory=dict)
    """Step that was not sustained -> the share missed there, in the run that showed it."""
    _level: int | None = None

    @property
    def report(self) -> RequestReport:
        """What becomes of the requests at the asked load."""
        return self._report(0)

    @property
    def missed(self) -> float:
        """The share of deadlines that the stream which suffers most misses at the asked load."""
        return missed_in(self.report)

    @property
    def holds(self) -> bool:
        """Whether it keeps the deadlines at the asked load."""
        return self.sustained(0)

    @property
    def latency(self) -> float:
        """The p99 of the stream that has the largest for its deadline, over that deadline."""
        return max(inf if each.p99_s is None else each.p99_s / each.deadline_s for each in self.report.streams)

    @property
    def highest(self) -> int:
        """The step that the bound allows."""
        most = self.bound.factor * SLACK
        return HIGHEST if most == inf else max(LOWEST, min(HIGHEST, floor(step_of(most)))) if most > 0 else LOWEST

    def sustained(self, step: int) -> bool:
        """Whether it keeps the deadlines at a step of the load."""
        if step > self.highest:
            return False
        if step not in self._sustained:
            self._sustained[step] = self._keeps(step)
        return self._sustained[step]

    def level(self, start: int | None = None) -> int:
        """The largest step that it sustains, looked for from *start* on; below ``LOWEST`` if there is none."""
        if self._level is None:
            low, high, stride = LOWEST - 1, self.highest + 1, 2
            guess = floor(step_of(max(1e-9, self.bound.factor * FIRST_GUESS))) if start is None else start
            step = max(low + 1, min(high - 1, guess))
            while high - low > 1:
                if self.sustained(step):
                    low, ahead = step, step + stride
                else:
                    high, ahead = step, step - stride
                step = ahead if low < ahead < high else (low + high) // 2
                stride *= 2
            self._level = low
        return self._level

    @property
    def factor(self) -> float:
        """The largest multiple of the asked load that it sustains; 0 if there is none."""
        return 0.0 if self.level() < LOWEST else float(STEP ** self.level())

    @property
    def nearness(self) -> tuple[float, float]:
        """Orders those who lost by how near they came, without another run: where they failed, and how badly."""
        first = min(self._failed, default=LOWEST)
        return -first, self._failed.get(first, 1.0)

    def _keeps(self, step: int) -> bool:
        self.runs += 1
        report = simulated(self.asked, self.arrangement, STEP**step, SHORT)[1].report
        if not clearly_missed(report, self.asked.limit):
            report = self._report(step)
            if keeps(report, self.asked.limit):
                return True
        self._failed[step] = missed_in(report)
        return False

    def _report(self, step: int) -> RequestReport:
        if step not in self._reports:
            self.runs += 1
            run = simulated(self.asked, self.arrangement, STEP**step, USUAL)[1]
            self._reports[step] = run.report
        return self._reports[step]


def step_of(factor: float) -> float:
    """The step of a multiple of the asked load."""
    return log(factor) / log(STEP)


def missed_in(report: RequestReport) -> float:
    """Deadlines missed by the stream that suffers most; all of them where a stream sent nothing to judge by."""
    return report.worst_violation_rate if all(stream.arrived for stream in report.streams) else 1.0


def keeps(report: RequestReport, limit: float) -> bool:
    """Whether no stream misses more than this share of its deadlines; one miss alone says nothing."""
    return all(each.arrived and each.violated <= max(1.0, limit * each.arrived) for each in report.streams)


def clearly_missed(report: RequestReport, limit: float) -> bool:
    """Whether a stream misses so many deadlines that a longer run would not change it."""
    return any(each.violated >= CLEAR_COUNT and each.violation_rate > CLEAR * limit for each in report.streams)


def trial_of(asked: Asked, arrangement: Arrangement, memory_bytes: int) -> Trial:
    """What is known of a way to serve before it is simulated."""
    return Trial(asked, arrangement, bound_of(asked, arrangement), memory_bytes)
