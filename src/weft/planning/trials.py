"""Simulated runs of an arrangement with the server's own rules, each as short as the comparison allows.

Loads are steps of ``STEP`` from the asked load, which is step 0. A short run says whether a step is sustained, which is
enough to distinguish most options from the best; options near the best are simulated for longer (``finals``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import floor, inf, log

from weft.planning.bounds import SLACK, Bound, bound_of
from weft.planning.candidates import Arrangement
from weft.planning.plan_request import PlanRequest
from weft.simulation.request_report import RequestReport
from weft.simulation.requests import Case, RequestRun, prepared, simulate_requests
from weft.simulation.run_length import SHORT, USUAL, RunLength, prolong
from weft.workloads.requests import Workload

STEP = 1.05
"""Factor between the loads of neighbouring steps."""
LOWEST, HIGHEST = -100, 300
"""Range of the searched steps, from about a hundredth of the asked load to two million times the load."""
FIRST_GUESS = 0.85
"""Share of the bound on the load at which the search for the largest load begins."""


def run_workload(request: PlanRequest, arrangement: Arrangement, factor: float, length: RunLength) -> Workload:
    """Return the asked streams at a multiple of their rates, for as long as the run needs."""
    return prolong(arrangement.serving(request.workload).scaled(factor), length)


def late_rule(request: PlanRequest, arrangement: Arrangement) -> str:
    """Return the simulation's rule for late requests: dropped if deadlines are strict, else by the server's setting."""
    return "drop" if request.deadlines == "strict" else arrangement.settings.late


def simulated(
    request: PlanRequest,
    arrangement: Arrangement,
    factor: float,
    length: RunLength,
    *,
    seed: int | None = None,
    record: bool = False,
) -> tuple[Case, RequestRun]:
    """Simulate a run to its end; return its case and the run.

    factor: multiple of the asked load. seed: of the requests, by default the workload's. record: whether the run has
    every segment and answer.
    """
    case = prepared(run_workload(request, arrangement, factor, length), arrangement.host)
    return case, _run(request, arrangement, case, seed, record=record)


def kept_at(
    request: PlanRequest, arrangement: Arrangement, factor: float, length: RunLength, *, seed: int | None = None
) -> tuple[bool, float]:
    """Whether deadlines are kept at *factor* times the asked load, and the largest share of them missed in a stream.

    The run stops as soon as the answer is clear.
    """
    case = prepared(run_workload(request, arrangement, factor, length), arrangement.host)
    report = _run(request, arrangement, case, seed, _most_missed(case, request.limit)).report
    return keeps(report, request.limit), report.worst_violation_rate


def _run(
    request: PlanRequest,
    arrangement: Arrangement,
    case: Case,
    seed: int | None,
    most_missed: list[float] | None = None,
    *,
    record: bool = False,
) -> RequestRun:
    """Simulate *case* by the arrangement's policy; *most_missed*: per stream, the misses at which the run stops."""
    return simulate_requests(
        case,
        arrangement.settings.policy,
        late=late_rule(request, arrangement),
        options=arrangement.settings.policy_options,
        seed=seed,
        record=record,
        most_missed=most_missed,
    )


def _most_missed(case: Case, limit: float) -> list[float]:
    """Return, per stream, the number of missed deadlines at which a run may stop because it exceeds the limit.

    A single miss is always allowed. The rest has a margin of ``SLACK``, as the number of requests is not known before.
    """
    counted_s = case.workload.duration_s - case.workload.warmup_s
    return [1.0 + SLACK * limit * (rate or inf) * counted_s for rate in case.workload.rates]


def largest_step(sustained: Callable[[int], bool], low: int, high: int, start: int, stride: int = 2) -> int:
    """Search the largest step that is sustained, beginning at *start*.

    low: assumed to be sustained; high: assumed not to be. stride: the distance of the second probe from *start*, which
    doubles with each probe until the answer is enclosed; then the interval is halved.
    """
    step = max(low + 1, min(high - 1, start))
    while high - low > 1:
        if sustained(step):
            low, probe = step, step + stride
        else:
            high, probe = step, step - stride
        step = probe if low < probe < high else (low + high) // 2
        stride *= 2
    return low


@dataclass(eq=False, slots=True)
class OptionTrial:
    """An arrangement with the results of its simulations so far; its properties simulate if necessary."""

    request: PlanRequest
    arrangement: Arrangement
    bound: Bound
    memory_bytes: int
    runs: int = 0
    """Number of simulations so far."""
    _report: RequestReport | None = None
    _sustained: dict[int, bool] = field(default_factory=dict)
    """Simulated step -> whether the option sustains it."""
    _failed: dict[int, float] = field(default_factory=dict)
    """Step that was not sustained -> the largest share that a stream missed in this run."""
    _level: int | None = None
    """The result of ``level``, once it was searched."""

    @property
    def report(self) -> RequestReport:
        """The simulated run at the asked load."""
        if self._report is None:
            self.runs += 1
            self._report = simulated(self.request, self.arrangement, 1.0, USUAL)[1].report
        return self._report

    @property
    def missed(self) -> float:
        """The largest share of deadlines that a stream misses at the asked load."""
        return self.report.worst_missed

    @property
    def holds(self) -> bool:
        """Whether the option keeps the deadlines at the asked load; true without a run if it sustains a larger load."""
        return (self._level is not None and self._level >= 0) or self.sustained(0)

    @property
    def latency(self) -> float:
        """The largest ratio of p99 to deadline over the streams."""
        return max(inf if stream.p99_s is None else stream.p99_s / stream.deadline_s for stream in self.report.streams)

    @property
    def seen_latency(self) -> float:
        """``latency`` if the asked load was simulated already, else infinite; never simulates."""
        return inf if self._report is None else self.latency

    @property
    def highest(self) -> int:
        """The largest step that the bound allows."""
        most = self.bound.factor * SLACK
        if most == inf:
            return HIGHEST
        return max(LOWEST - 1, min(HIGHEST, floor(step_of(most)))) if most > 0 else LOWEST - 1

    def sustained(self, step: int) -> bool:
        """Return whether the option keeps the deadlines at a step of the load."""
        if step > self.highest:
            return False
        if step not in self._sustained:
            self.runs += 1
            self._sustained[step], missed = kept_at(self.request, self.arrangement, STEP**step, SHORT)
            if not self._sustained[step]:
                self._failed[step] = missed
        return self._sustained[step]

    def level(self, start: int | None = None) -> int:
        """Return the largest step that the option sustains, searched from *start* on; below ``LOWEST`` if none."""
        if self._level is None:
            guess = floor(step_of(max(1e-9, self.bound.factor * FIRST_GUESS))) if start is None else start
            self._level = largest_step(self.sustained, LOWEST - 1, self.highest + 1, guess)
        return self._level

    @property
    def factor(self) -> float:
        """The largest sustained multiple of the asked load, rounded down to a step; 0 if there is none."""
        return 0.0 if self.level() < LOWEST else float(STEP ** self.level())

    @property
    def failed(self) -> bool:
        """Whether a simulated load was not sustained."""
        return bool(self._failed)

    @property
    def nearness(self) -> tuple[float, float]:
        """Sort key of options that lost, without another run: minus the lowest failed step, and its missed share."""
        lowest = min(self._failed, default=LOWEST)
        return -lowest, self._failed.get(lowest, 1.0)


def step_of(factor: float) -> float:
    """Return the step of a multiple of the asked load."""
    return log(factor) / log(STEP)


def keeps(report: RequestReport, limit: float) -> bool:
    """Whether no stream misses more than this share of its deadlines; a single miss is always allowed."""
    return all(stream.arrived and stream.violated <= max(1.0, limit * stream.arrived) for stream in report.streams)


def trial_of(request: PlanRequest, arrangement: Arrangement, memory_bytes: int) -> OptionTrial:
    """Return the trial of an arrangement before any simulation."""
    return OptionTrial(request, arrangement, bound_of(request, arrangement), memory_bytes)
