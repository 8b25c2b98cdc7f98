"""The largest load a policy sustains: the highest arrival rate at which every stream keeps its deadlines.

A load is sustained if no stream misses more than a given share of its deadlines, averaged over all seeds. The search
doubles or halves the workload's rates until it has both a sustained and an unsustained load, then bisects. On a host,
runs have the length and the seeds by which ``weft plan`` judges loads, or the workload's duration if that is longer. If
single seeds would move the answer by more than the search's tolerance, it is marked as limited by noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

from weft.base.errors import WorkloadError
from weft.devices import Host, load_device
from weft.engine.policies import Option
from weft.simulation.request_report import RequestReport
from weft.simulation.requests import Case, Device, prepared, simulate_requests
from weft.simulation.requests.compiled import compile_loop
from weft.simulation.run_length import FRESH_SEED, USUAL, prolong_if_shorter
from weft.simulation.workers import QuietProcesses
from weft.workloads.requests import Workload

SMALLEST, LARGEST = 2.0**-40, 2.0**40
"""Multiples of the workload's rates beyond which the search gives up."""


@dataclass(frozen=True, slots=True)
class Question:
    """One search: a workload, a policy, and the criterion for a sustained load."""

    workload: Workload
    policy: str
    label: str = ""
    """The name of the policy in tables; by default its own name."""
    late: str = "weave"
    options: tuple[tuple[str, Option], ...] = ()
    limit: float = 0.01
    """Largest share of deadlines that a stream may miss."""
    seeds: int = 2
    """Number of runs at each load, with different requests."""
    tolerance: float = 0.01
    """Width of the last bracket, relative to the load."""

    def __post_init__(self) -> None:
        if not any(rate for rate in self.workload.rates):
            raise WorkloadError("a sustainable load needs a stream with a rate; closed streams and traces have none")
        if not 0 < self.limit < 1 or not 0 < self.tolerance < 1 or self.seeds < 1:
            raise WorkloadError(
                f"limit = {self.limit} and tolerance = {self.tolerance} must lie between 0 and 1, "
                f"seeds = {self.seeds} must be at least 1"
            )


@dataclass(frozen=True, slots=True)
class Sustained:
    """The answer to a ``Question``. Rates are requests per second of all open streams together."""

    policy: str
    factor: float
    """Largest multiple of the workload's rates that was sustained."""
    rate: float
    unsustained_rate: float
    """Smallest rate that was not sustained: the other end of the last bracket."""
    stp: float
    """Summed standalone times of the requests offered per unit of time, at the sustained rate."""
    violation_rate: float
    """Share of deadlines missed by the stream that misses most, at the sustained rate."""
    noise_limited: bool
    """Whether single seeds would move the answer by more than the search's own tolerance."""
    lowest_rate: float
    """The lowest rate at which a seed failed."""
    highest_rate: float
    """The highest rate at which a seed passed."""
    runs: int
    """Number of simulated runs."""
    p99_s: tuple[float | None, ...] = ()
    """The 99th percentile of each stream's latency at the sustained load: the largest of all seeds."""
    load: float | None = None
    """On a host: share of the lanes' time in which they compute, at the sustained load."""

    def __repr__(self) -> str:
        return f"Sustained({self.policy}: {self.rate:.4g} requests/s, not {self.unsustained_rate:.4g})"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def sustain(question: Question, device: Device | None = None) -> Sustained:
    """Search for the largest sustained load; *device*: None: that of the workload."""
    case = prepared(question.workload, device or load_device(question.workload.device))
    on_host = isinstance(case.device, Host)
    reports: dict[float, list[RequestReport]] = {}

    def sustained(factor: float) -> bool:
        """Run every seed at *factor* times the workload's rates; return whether that load is sustained."""
        load = question.workload.scaled(factor)
        scaled = replace(case, workload=prolong_if_shorter(load, USUAL) if on_host else load)
        reports[factor] = [
            simulate_requests(
                scaled,
                question.policy,
                late=question.late,
                options=dict(question.options),
                seed=question.workload.seed + seed + (FRESH_SEED if on_host else 0),
            ).report
            for seed in range(question.seeds)
        ]
        return _mean_missed(reports[factor]) <= question.limit

    low, high = _bracket(sustained)
    while high > low * (1 + question.tolerance):
        middle = (low * high) ** 0.5
        if sustained(middle):
            low = middle
        else:
            high = middle
    return _answer(question, case, reports, low, high)


def sustain_all(
    questions: Sequence[Question],
    device: Device | None = None,
    *,
    processes: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> list[Sustained]:
    """Search for every question, spread over *processes* processes; return the answers in the order of the questions.

    device: for all questions; None: the device of each workload. progress: called with the number of finished searches
    and of all.
    """
    if isinstance(device, Host):
        compile_loop()  # once here: otherwise every process would compile it
    answers: list[Sustained] = []
    for answer in _answer_all([(question, device) for question in questions], processes):
        answers.append(answer)
        if progress:
            progress(len(answers), len(questions))
    return answers


def _answer_all(tasks: list[tuple[Question, Device | None]], processes: int) -> Iterable[Sustained]:
    """Yield the answers in the order of the tasks; with one process, compute them in this one."""
    if processes <= 1 or len(tasks) <= 1:
        yield from (sustain(*task) for task in tasks)
        return
    with closing(QuietProcesses(processes)) as workers:
        yield from workers.results(_sustain_task, tasks)


def _sustain_task(task: tuple[Question, Device | None]) -> Sustained:
    return sustain(*task)


def _bracket(sustained: Callable[[float], bool]) -> tuple[float, float]:
    """Return a sustained and an unsustained multiple of the rates, a factor of 2 apart.

    sustained: whether a multiple is. WorkloadError if every load, or no load, is sustained.
    """
    factor = 1.0
    if sustained(factor):
        while sustained(factor * 2):
            factor *= 2
            if factor > LARGEST:
                raise WorkloadError("no load is too much for this device: check the workload's deadlines and rates")
        return factor, factor * 2
    while not sustained(factor / 2):
        factor /= 2
        if factor < SMALLEST:
            raise WorkloadError(
                "no load is sustained, however small: a deadline is shorter than its model takes alone or than "
                "batch_timeout_ms, or duration_s is too short for a rare stream to send anything"
            )
    return factor / 2, factor


def _answer(
    question: Question, case: Case, reports: Mapping[float, Sequence[RequestReport]], low: float, high: float
) -> Sustained:
    """Return the answer. reports: multiple of the rates -> the run of each seed. low, high: the last bracket."""
    rates = [rate or 0.0 for rate in question.workload.rates]
    rate = sum(rates)
    stp = sum(r * alone for r, alone in zip(rates, case.alone_s, strict=True))
    missed_by_factor = {factor: [report.worst_missed for report in runs] for factor, runs in reports.items()}
    failed = [factor for factor, missed in missed_by_factor.items() if max(missed) > question.limit]
    passed = [factor for factor, missed in missed_by_factor.items() if min(missed) <= question.limit]
    loads = [report.load for report in reports[low] if report.load is not None]
    lowest, highest = min(failed, default=high), max(passed, default=low)
    return Sustained(
        policy=question.label or question.policy,
        factor=low,
        rate=rate * low,
        unsustained_rate=rate * high,
        stp=stp * low,
        violation_rate=_mean_missed(reports[low]),
        # Both ends of the bracket may be off by the tolerance.
        noise_limited=highest > lowest * (1 + question.tolerance) ** 2,
        lowest_rate=rate * lowest,
        highest_rate=rate * highest,
        runs=sum(map(len, reports.values())),
        p99_s=_p99_s(reports[low]),
        load=sum(loads) / len(loads) if loads else None,
    )


def _p99_s(reports: Sequence[RequestReport]) -> tuple[float | None, ...]:
    """Return the largest p99 of each stream over the reports of all seeds."""
    streams = zip(*(report.streams for report in reports), strict=True)
    return tuple(max((stream.p99_s for stream in seeds if stream.p99_s is not None), default=None) for seeds in streams)


def _mean_missed(reports: Sequence[RequestReport]) -> float:
    """Return the share of deadlines that the worst stream missed, averaged over the reports of all seeds."""
    return sum(report.worst_missed for report in reports) / len(reports)
