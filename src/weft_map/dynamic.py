"""Schedules for models that come and go (D-HaX-CoNN).

Frames start with the best naive schedule and change to better schedules as soon as a background planner finds them.

``run_dynamic`` is the loop in real time: a frame takes the makespan of its schedule in the simulator. Phases of a
scenario say which models run when. A phase with the same models as an earlier one begins with the best schedule known
for them. The *oracle* is the best schedule of a phase, searched without haste after the run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from time import perf_counter, sleep
from typing import Any, NamedTuple, Protocol

from weft.base.errors import WeftError
from weft.base.version import __version__
from weft_map.background_planner import LOST, News, Planner
from weft_map.baselines import BASELINES
from weft_map.limits import check_feasible, keeps_to
from weft_map.problem import Objective, Problem
from weft_map.scenario import MappingCase, Scenario, prepare_phases
from weft_map.schedule import Schedule, value_to_minimise
from weft_map.search import ends_s
from weft_map.solver import NAIVE, Options, solve

SHORTEST_FRAME_S = 1e-4
"""Shorter frames are padded to this time, because our clocks are no finer."""
NEAR_ORACLE = 0.02
"""A schedule counts as near the oracle if its value differs by at most this share."""
TINY = 1e-6
"""Improvements by a smaller share do not count."""


class PlanClock(Protocol):
    """A clock in seconds; tests use one that they advance themselves."""

    def now_s(self) -> float: ...

    def sleep_until(self, time_s: float) -> None: ...


class RealClock:
    """The clock of this machine."""

    def now_s(self) -> float:
        return perf_counter()

    def sleep_until(self, time_s: float) -> None:
        while (left_s := time_s - perf_counter()) > 0:
            sleep(left_s)


class Frame(NamedTuple):
    """One pass of all models of a phase; times in seconds since the run began."""

    start_s: float
    phase: int
    latency_s: float
    version: int
    """Number of the schedule, from 0 in every phase."""
    gap: float | None
    """Largest distance of the schedule from the best, as a share of the bound at that time. None: there was no bound,
    or the schedule breaks the limits."""


@dataclass(frozen=True, slots=True)
class Update:
    """A better schedule of a phase."""

    phase: int
    version: int
    found_s: float
    """Arrival of the schedule, in seconds since the phase began."""
    used_s: float | None
    """Begin of the first frame with it, in seconds since the run began; None: no frame used it."""
    value: float
    """Makespan in seconds, or runs per second."""
    latency_s: float
    gap: float | None
    made_by: str


@dataclass(frozen=True, slots=True)
class PhaseLog:
    """The record of one phase. Values are makespans in seconds, or runs per second."""

    tasks: tuple[str, ...]
    start_s: float
    end_s: float
    frames: int
    first_value: float
    """The value of the schedule it began with."""
    first_latency_s: float
    first_made_by: str
    last_value: float
    last_latency_s: float
    oracle_value: float | None
    """Value of the best schedule that was found after the run; None if none was searched for or found."""
    oracle_latency_s: float | None
    oracle_proved: bool
    improved_s: float | None
    """Seconds from the phase's begin until the first better schedule; None: there was none."""
    near_s: float | None
    """Seconds until a schedule within 2 % of the oracle; 0 if the first is, None if there was none."""
    proved_s: float | None
    """Seconds until the proof of optimality; None: not proved during the phase."""


class LoopEvent(NamedTuple):
    """A failure of the planner, and how the loop continued."""

    at_s: float
    phase: int
    message: str


@dataclass(frozen=True, slots=True)
class DynamicLog:
    """The record of a dynamic run; times in seconds since it began."""

    soc: str
    objective: Objective
    seed: int
    phases: tuple[PhaseLog, ...]
    frames: tuple[Frame, ...]
    updates: tuple[Update, ...]
    events: tuple[LoopEvent, ...]

    def __repr__(self) -> str:
        return f"DynamicLog({self.soc}: {len(self.phases)} phases, {len(self.frames)} frames)"


def log_as_dict(log: DynamicLog) -> dict[str, Any]:
    """Return the log as a file stores it: frames as columns."""
    frames = {key: [getattr(frame, key) for frame in log.frames] for key in Frame._fields}
    return {
        "format": 1,
        "kind": "dynamic",
        "version": __version__,
        "soc": log.soc,
        "objective": log.objective,
        "seed": log.seed,
        "phases": [{**asdict(phase), "tasks": list(phase.tasks)} for phase in log.phases],
        "updates": [asdict(update) for update in log.updates],
        "events": [event._asdict() for event in log.events],
        "frames": frames,
    }


@dataclass(slots=True)
class _BestKnown:
    """The best known schedule of a case, whichever phase found it; updated during the run."""

    case: MappingCase
    schedule: Schedule
    value: float
    """Makespan in seconds, or runs per second, as the objective says."""
    latency_s: float
    """Makespan in seconds with either objective: a frame takes that long."""
    bound: float
    """No schedule has a better value; equal to ``value`` once that is proved to be the best."""
    proved: bool = False
    within_limits: bool = True
    """Whether the schedule keeps the limits. A naive schedule may break them; a searched one never does."""

    def is_beaten_by(self, value: float) -> bool:
        """Whether a schedule that keeps the limits and has *value* is better than the known one."""
        if not self.within_limits:
            return True
        gain = self.value - value if self.case.options.objective == "latency" else value - self.value
        return gain > TINY * abs(self.value)

    @property
    def gap(self) -> float | None:
        """See ``Frame.gap``."""
        if self.proved:
            return 0.0
        known = self.within_limits and isfinite(self.bound) and self.bound
        return abs(self.value - self.bound) / abs(self.bound) if known else None

    def tighten_bound(self, bound: float) -> None:
        """Replace the bound if the given one is tighter."""
        self.bound = (max if self.case.options.objective == "latency" else min)(self.bound, bound)


@dataclass(slots=True)
class _Phase:
    """The state of a running phase."""

    number: int
    start_s: float
    first: _BestKnown
    """A copy of the best known schedule at the phase's begin."""
    job: int | None = None
    """Number of the planner's job; None if the known schedule is proved already."""
    version: int = 0
    frames: int = 0
    frames_outside_limits: int = 0
    """Frames whose schedule breaks the limits."""
    end_s: float = 0.0
    proved_s: float | None = None
    last_value: float = 0.0
    """Value of the schedule of the last frame."""
    last_latency_s: float = 0.0
    updates: list[Update] = field(default_factory=list)


def run_dynamic(
    scenario: Scenario,
    on_frame: Callable[[Frame], None] | None = None,
    *,
    clock: PlanClock | None = None,
    planner: Planner | None = None,
    oracle: bool = True,
) -> DynamicLog:
    """Run the phases of *scenario* one after another, in real time.

    on_frame: called with every frame as it begins. clock, planner: instead of this machine's time and of a new planner.
    oracle: afterwards, search the best schedule of every phase that the planner did not prove, for comparison.
    """
    cases = prepare_phases(scenario)
    for case in cases:
        check_feasible(case.problem, case.options.limits)
        best_naive(case.problem, case.options)  # compiles its kernels before the clock runs
    clock = clock or RealClock()
    with ExitStack() as stack:
        if planner is None:
            planner = stack.enter_context(Planner(clock.now_s))
        planner.warm_up()
        loop = _Loop(clock, planner, on_frame)
        for case, phase in zip(cases, scenario.phase, strict=True):
            loop.run_phase(case, phase.duration_s)
    return loop.log(scenario, loop.oracles() if oracle else {})


def best_naive(problem: Problem, options: Options) -> tuple[Schedule, float, float]:
    """The best schedule of the naive baselines, its value and its latency in seconds.

    A schedule that breaks the limits is returned only if all of them do.
    """
    schedules = [schedule for name in NAIVE for schedule in BASELINES[name](problem, options.objective)]
    ends_by_schedule = [ends_s(problem, schedule) for schedule in schedules]
    breaks_limits = [not keeps_to(problem, schedule, options.limits) for schedule in schedules]
    values = [value_to_minimise(problem, ends, options.objective) for ends in ends_by_schedule]
    best = min(range(len(schedules)), key=lambda n: (breaks_limits[n], values[n]))
    return schedules[best], abs(values[best]), max(ends_by_schedule[best])


class _Loop:
    """The loop over phases and frames, and its log. It runs in one thread; only the planner's process is beside it."""

    def __init__(self, clock: PlanClock, planner: Planner, on_frame: Callable[[Frame], None] | None) -> None:
        self._clock, self._planner, self._on_frame = clock, planner, on_frame
        self._origin_s = self._end_s = self._free_s = clock.now_s()
        """By the clock: when the run began; when the present phase ends; when the present frame ends."""
        self.known: dict[int, _BestKnown] = {}
        """id(case) -> best known schedule; phases with the same tasks share a case."""
        self._phases: list[_Phase] = []
        self._frames: list[Frame] = []
        self._events: list[LoopEvent] = []

    def run_phase(self, case: MappingCase, duration_s: float) -> None:
        """Run frames for *duration_s*, each with the best schedule known when it begins."""
        phase = self._begin(case)
        known = self.known[id(case)]
        self._end_s += duration_s
        self._clock.sleep_until(min(self._free_s, self._end_s))  # the frame before this phase runs to its end
        while (now_s := self._clock.now_s()) < self._end_s and self._free_s < self._end_s:
            self._take_news(phase, known)
            self._free_s = now_s + max(known.latency_s, SHORTEST_FRAME_S)
            self._run_frame(phase, known, now_s - self._origin_s)
            self._clock.sleep_until(min(self._free_s, self._end_s))
        self._take_news(phase, known)
        phase.end_s = self._end_s - self._origin_s
        if phase.frames_outside_limits:
            what = f"frames outside the limits, by {phase.first.schedule.made_by}: {phase.frames_outside_limits}"
            self._events.append(LoopEvent(phase.start_s, phase.number, f"{what}; none within them was known yet"))

    def _begin(self, case: MappingCase) -> _Phase:
        """Begin a phase: give its problem to the planner unless it is solved; if it is new, take a naive schedule."""
        known, start_s = self.known.get(id(case)), self._clock.now_s() - self._origin_s
        job = None if known and known.proved else self._planner.plan(case.problem, case.options)
        if known is None:
            schedule, value, latency_s = best_naive(case.problem, case.options)
            bound = float("-inf") if case.options.objective == "latency" else float("inf")  # none is known yet
            within_limits = keeps_to(case.problem, schedule, case.options.limits)
            known = self.known[id(case)] = _BestKnown(
                case, schedule, value, latency_s, bound, within_limits=within_limits
            )
        phase = _Phase(len(self._phases), start_s, replace(known), job)
        phase.last_value, phase.last_latency_s = known.value, known.latency_s
        self._phases.append(phase)
        return phase

    def _run_frame(self, phase: _Phase, known: _BestKnown, start_s: float) -> None:
        """Record a frame that begins at *start_s* with the known schedule, and call ``on_frame``."""
        for index, update in enumerate(phase.updates):
            if update.version == phase.version and update.used_s is None:
                phase.updates[index] = replace(update, used_s=start_s)
        frame = Frame(start_s, phase.number, known.latency_s, phase.version, known.gap)
        phase.frames += 1
        phase.last_value, phase.last_latency_s = known.value, known.latency_s
        phase.frames_outside_limits += not known.within_limits
        self._frames.append(frame)
        if self._on_frame:
            self._on_frame(frame)

    def _take_news(self, phase: _Phase, known: _BestKnown) -> None:
        """Take over what the planner has found since the last frame; record its failures as events."""
        for news in self._planner.news() if phase.job is not None else ():
            report = news.report
            if report.kind in (LOST, "failed"):
                what = f"{report.message}; going on with schedule {phase.version} by {known.schedule.made_by}"
                self._events.append(LoopEvent(news.at_s - self._origin_s, phase.number, what))
            elif report.job == phase.job:
                self._take_report(phase, known, news)

    def _take_report(self, phase: _Phase, known: _BestKnown, news: News) -> None:
        """Update the best known schedule, its bound and its proof by one report about the phase's problem.

        The planner reports only schedules within the limits. One replaces a naive schedule outside them at any value.
        """
        report, since_s = news.report, news.at_s - self._origin_s - phase.start_s
        known.tighten_bound(report.bound)
        if report.schedule is not None and known.is_beaten_by(report.value):
            known.schedule, known.value, known.latency_s = report.schedule, report.value, report.makespan_s
            known.within_limits = True
            phase.version += 1
            update = Update(
                phase.number, phase.version, found_s=since_s, used_s=None, value=report.value,
                latency_s=report.makespan_s, gap=known.gap, made_by=report.schedule.made_by,
            )  # fmt: skip
            phase.updates.append(update)
        if report.kind == "ended" and report.proved and known.within_limits:
            known.proved, known.bound, phase.proved_s = True, known.value, since_s

    def oracles(self) -> dict[int, _BestKnown]:
        """id(case) -> the best schedule that keeps the limits, searched to the end; cases without one are left out."""
        best = {key: known if known.proved else self._oracle(known) for key, known in self.known.items()}
        return {key: known_best for key, known_best in best.items() if known_best.within_limits}

    def _oracle(self, known: _BestKnown) -> _BestKnown:
        """Search with the full time limit; return the best schedule known afterwards."""
        try:
            solved = _solve(known.case)
        except WeftError as error:  # the frames have run, and their log is useful without an oracle
            phase_number = max(phase.number for phase in self._phases if phase.first.case is known.case)
            at_s = self._clock.now_s() - self._origin_s
            self._events.append(LoopEvent(at_s, phase_number, f"there is no oracle: {error}"))
            return known
        if known.is_beaten_by(solved.value):
            return solved
        best = replace(known, proved=solved.proved)
        best.tighten_bound(solved.bound)
        return best

    def log(self, scenario: Scenario, oracles: dict[int, _BestKnown]) -> DynamicLog:
        first = self._phases[0].first.case
        return DynamicLog(
            soc=first.problem.soc.name,
            objective=first.options.objective,
            seed=scenario.seed,
            phases=tuple(_phase_log(phase, oracles.get(id(phase.first.case))) for phase in self._phases),
            frames=tuple(self._frames),
            updates=tuple(update for phase in self._phases for update in phase.updates),
            events=tuple(sorted(self._events, key=lambda event: event.at_s)),
        )


def _solve(case: MappingCase) -> _BestKnown:
    """Search *case* with its full time limit, for an oracle."""
    solution = solve(case.problem, case.options)
    certificate = solution.certificate
    latency_s = solution.outcome.makespan_s
    return _BestKnown(case, solution.schedule, certificate.value, latency_s, certificate.bound, certificate.proved)


def _phase_log(phase: _Phase, oracle: _BestKnown | None) -> PhaseLog:
    """The record of a phase; *oracle*: the best schedule known after the run, if searched."""
    first = phase.first
    improvements = [update for update in phase.updates if first.is_beaten_by(update.value)]
    near_s = None
    if oracle:
        values_over_time = [(0.0, first.value)] if first.within_limits else []
        values_over_time += [(update.found_s, update.value) for update in phase.updates]
        near_s = next((at_s for at_s, value in values_over_time if abs(value / oracle.value - 1) <= NEAR_ORACLE), None)
    return PhaseLog(
        tasks=tuple(task.name for task in first.case.problem.tasks),
        start_s=phase.start_s,
        end_s=phase.end_s,
        frames=phase.frames,
        first_value=first.value,
        first_latency_s=first.latency_s,
        first_made_by=first.schedule.made_by,
        last_value=phase.last_value,
        last_latency_s=phase.last_latency_s,
        oracle_value=oracle.value if oracle else None,
        oracle_latency_s=oracle.latency_s if oracle else None,
        oracle_proved=bool(oracle and oracle.proved),
        improved_s=improvements[0].found_s if improvements else None,
        near_s=near_s,
        proved_s=phase.proved_s if not first.proved else 0.0,
    )
