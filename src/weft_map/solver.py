"""The solver: find the best schedule and prove it, by dives for good schedules first, then an exhaustive search.

It starts from the baselines, so its result is never worse than the best baseline. Every improvement is published with
the bound at that time; a time limit ends the search with a gap instead of a proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from weft.base.errors import WorkloadError
from weft.devices import Soc, Unit
from weft_map.baselines import BASELINES
from weft_map.cpsat import contention_free
from weft_map.limits import TaskLimits, check_feasible, keeps_to, shortest
from weft_map.prices import PriceSet, best_price_sets, simple_price_sets, stack_prices
from weft_map.problem import Group, Objective, Problem, Task, UnitCost
from weft_map.schedule import Outcome, Schedule, value_to_minimise
from weft_map.search import MOST_STATES, Search, ends_s, idle_freely, make_rules
from weft_map.simulator import simulate

TINY = 1e-9
"""Improvements by a smaller share do not count."""
NAIVE = ("gpu-only", "per-unit")
"""Baselines that take hardly any time; they are judged first."""
BETWEEN_DIVES = 50_000
"""States to expand before the first wider dive; then twice as many, and so on."""
SLOW = ("contention-blind",)
"""Baselines that search themselves; they are judged last."""
TIE_STATES = 2000
"""States to expand for a schedule of the same latency with more throughput."""
CP_SAT_S = 10.0
"""Time limit of CP-SAT in seconds."""
TINIEST, SMALL, CHUNK = 64, 1000, 500
"""Numbers of states to expand: before the baselines are judged; before the linear programme for prices is solved; and
between two checks of the time limit."""
FIRST_WIDTH, NEXT_WIDTH, WIDEST = 24, 64, 4096
"""Widths of dives (beam searches, ``Search.dive``): before the linear programme, right after it, and the largest."""
CLASS = (  # the schedules that a proof is about, for the certificate
    "event-aligned: a task moves on as soon as a step has ended; a step whose data is there starts at once or when "
    "some step or move ends"
)
DOMINANCE = (  # an assumption of a proof, for the certificate
    "of two states in the same phases, one that is nowhere later is never worse (true where a step may start at any "
    "time; for event-aligned schedules it fails now and then, by little)"
)
NO_ASSUMPTIONS = ""
RECHECK_STATES = 30_000
"""States that the second search, without the dominance assumption, may expand unless ``Options.strict`` is set; they
take about a fifth of a second."""


class Improvement(NamedTuple):
    """A better schedule, and when it was found."""

    seconds: float
    """Seconds since the search began."""
    value: float
    """Makespan in seconds, or runs per second."""
    bound: float
    """The bound at that time: no schedule has a better value."""
    schedule: Schedule


@dataclass(frozen=True, slots=True)
class Certificate:
    """The certificate of a schedule: its value, a bound, and what the proof assumes."""

    objective: Objective
    schedules: str
    """The class of schedules that the proof is about."""
    assumes: str
    """Assumptions of the proof; empty: none."""
    proved: bool
    """Whether the schedule is proved to be the best of its class."""
    value: float
    """Makespan in seconds, or runs per second."""
    bound: float
    """No schedule of the class has a better value."""
    any_idling_bound: float
    """No schedule of any kind has a better value, even if its steps wait for any time before they start."""
    states: int
    """Number of states that the search expanded."""
    seconds: float
    """Duration of the search."""
    ended: str
    """Why the search ended: proof, time limit, memory."""
    first_proof_s: float | None = None
    """Seconds until the first proof, which may rest on the dominance assumption; None without a proof."""

    @property
    def gap(self) -> float:
        """Largest distance of the value from the best of the class, as a share of the bound; 0 if it is proved best.

        A proved schedule that was chosen among ties for its throughput may be worse than the best by ``Options.ties``.
        """
        share = abs(self.value - self.bound) / abs(self.bound) if self.bound else 0.0
        return share if share > TINY else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "gap": self.gap}


@dataclass(frozen=True, slots=True)
class Solution:
    """The best schedule found, the baselines, and its certificate."""

    outcome: Outcome
    baselines: Mapping[str, Outcome]
    """The best outcome of each baseline, by its name."""
    within: tuple[str, ...]
    """The baselines that keep to the limits."""
    improvements: tuple[Improvement, ...]
    certificate: Certificate
    idled: Outcome | None = None
    """The same mapping with delays of any length, if that is better; the certificate does not cover such schedules."""

    def __repr__(self) -> str:
        return f"Solution({self.outcome}, {'proved best' if self.certificate.proved else 'not proved'})"

    @property
    def schedule(self) -> Schedule:
        return self.outcome.schedule

    @property
    def best_baseline(self) -> str | None:
        """The name of the best baseline that keeps to the limits."""
        objective = self.certificate.objective
        return min(self.within, key=lambda name: self.baselines[name].value(objective), default=None)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the search."""

    objective: Objective = "latency"
    limits: TaskLimits = field(default_factory=TaskLimits)
    time_limit_s: float = 60.0
    seed: int = 0
    """Seed of the dives that add noise to bounds; the rest of the search has nothing random."""
    cp_sat: bool = False
    """Solve the problem without contention by CP-SAT first, for a first schedule and a lower bound."""
    ties: float = 1e-9
    """Of schedules whose latencies differ by less than this share, the one with the most throughput is taken."""
    strict: bool = False
    """Search until the proof holds without assumptions, however long that takes; otherwise only if it is quick."""


def solve(
    problem: Problem, options: Options | None = None, on_improvement: Callable[[Improvement], None] | None = None
) -> Solution:
    """Search until the best schedule is proved or the time limit is reached; call *on_improvement* for each better one.

    Raises WorkloadError if no schedule can keep the limits, if none was found in time, or if a task takes no time and
    the objective is the throughput.
    """
    options = options or Options()
    check_feasible(problem, options.limits)
    for n, task in enumerate(problem.tasks):
        if options.objective == "throughput" and shortest(problem, n)[0] == 0:
            raise WorkloadError(f"{task.name} can do with no time at all: its throughput has no limit; give it time_s")
    load_kernels()
    return _SolverRun(problem, options, on_improvement).run()


@cache
def load_kernels() -> None:
    """Compile the kernels, or load them from numba's cache, by solving a tiny problem, before any time limit runs."""
    group = Group("any", {unit: UnitCost(1e-3, 1.0) for unit in ("a", "b")})
    soc = Soc(name="any", bandwidth_gb_s=1.0, units=(Unit(name="a"), Unit(name="b")))
    run = _SolverRun(Problem(soc, (Task("one", (group,)), Task("other", (group,)))), Options(), None)
    run.run()
    run.dive_once()


class _Verdict(NamedTuple):
    """The result of a search, for the certificate; bounds of the throughput are negated."""

    states: int
    ended: str
    assumes: str
    bound: float
    any_idling_bound: float
    first_proof_s: float | None = None


class _SolverRun:
    """One run of ``solve``, from the baselines to the proof."""

    def __init__(
        self, problem: Problem, options: Options, on_improvement: Callable[[Improvement], None] | None
    ) -> None:
        self._problem, self._options, self._on_improvement = problem, options, on_improvement
        self._began_s = perf_counter()
        self._value = np.inf
        """Value of the best schedule so far; the throughput is negated, here and in the bounds."""
        self._schedule: Schedule | None = None
        self._bound = self._cp_sat_bound = -np.inf
        """The lower bound of the search so far; and that of CP-SAT, which holds for schedules of any kind."""
        self._price_sets: list[PriceSet] = []
        self._improvements: list[Improvement] = []
        self._proposed: dict[Schedule, tuple[float, ...]] = {}
        """Schedules that baselines and CP-SAT proposed and that keep the limits -> end of each task."""

    def dive_once(self) -> None:
        """Dive once with width 1, which compiles the kernel of dives."""
        self._make_search(simple_price_sets(self._problem.tables), strict=True).dive(1)

    def run(self) -> Solution:
        """Search and judge baselines in turn, cheap work first: a tiny search, a small proof, then the large proof."""
        search = self._make_search(simple_price_sets(self._problem.tables), strict=True)
        self._expand(search, TINIEST)
        first_proof_s = self._seconds if search.proved else None
        baselines = self._judge(NAIVE)
        verdict = self._small_proof(search, first_proof_s)
        baselines |= self._judge(name for name in BASELINES if name not in {*NAIVE, *SLOW})
        if self._options.cp_sat:
            self._run_cp_sat()
        if verdict is None and self._seconds > self._options.time_limit_s:
            verdict = _Verdict(search.expanded, "time limit", NO_ASSUMPTIONS, search.bound, search.first_bound)
        verdict = verdict or self._large_proof()
        if self._seconds < self._options.time_limit_s:
            baselines |= self._judge(SLOW)
        if self._schedule is None:
            raise WorkloadError(
                "no schedule keeps to all limits together; loosen one of them"
                if verdict.ended == "proof"
                else f"no schedule within the limits was found in {self._options.time_limit_s:g} s; allow more time"
            )
        outcome = self._simulate_best(self._most_throughput_of_ties(self._schedule))
        baseline_outcomes = {name: simulate(self._problem, schedule) for name, schedule in baselines.items()}
        within = [name for name, schedule in baselines.items() if self._keeps_limits(schedule)]
        idling_schedule = idle_freely(outcome, self._options.objective)
        idled = simulate(self._problem, idling_schedule) if idling_schedule != outcome.schedule else None
        certificate = self._certificate(verdict, outcome)
        return Solution(
            outcome, baseline_outcomes, within=tuple(within), improvements=tuple(self._improvements),
            certificate=certificate, idled=idled,
        )  # fmt: skip

    def _simulate_best(self, schedule: Schedule) -> Outcome:
        """Simulate *schedule* and return its outcome, or that of a better proposal.

        The simulator may order steps without length that start at one instant differently than the solver, and so find
        the schedule worse than the solver did; then the best outcome of all proposals is returned.
        """
        outcome = simulate(self._problem, schedule)
        if outcome.value(self._options.objective) <= self._value + (1e-6 + self._options.ties) * abs(self._value):
            return outcome
        outcomes = [simulate(self._problem, proposal) for proposal in self._proposed]
        return min([outcome, *outcomes], key=lambda candidate: candidate.value(self._options.objective))

    def _small_proof(self, search: Search, first_proof_s: float | None) -> _Verdict | None:
        """Dive for a first good schedule, then try to prove a small problem with the simple prices of *search*.

        first_proof_s: when *search* completed its proof; None: not yet. Returns None if ``SMALL`` states are too few.
        """
        if first_proof_s is None:
            search.beat(self._value)
            self._dive(search, FIRST_WIDTH)
            self._prove(search, SMALL)
            if not search.proved:
                return None
            first_proof_s = self._seconds
        root_bound = self._make_search(self._all_price_sets()).bound  # before any choice: for schedules of any kind
        return _Verdict(search.expanded, "proof", NO_ASSUMPTIONS, self._value, root_bound, first_proof_s)

    def _large_proof(self) -> _Verdict:
        """Prove the best event-aligned schedule under the dominance assumption, then try to prove it without."""
        sets = self._all_price_sets()
        search = self._make_search(sets)
        root_bound = search.bound  # of the first state, before any choice: it holds for schedules of any kind
        self._dive(search, NEXT_WIDTH)
        ended = self._prove(search, MOST_STATES)
        if not search.proved:
            return _Verdict(search.expanded, ended, DOMINANCE, search.bound, root_bound)
        first_proof_s, value = self._seconds, self._value
        strict_search = self._make_search(sets, strict=True)
        self._prove(strict_search, MOST_STATES if self._options.strict else RECHECK_STATES)
        if self._value < value:  # better than the proved best: the assumption does not hold for this problem
            ended = self._prove(strict_search, MOST_STATES)
        states = search.expanded + strict_search.expanded
        if strict_search.proved:
            return _Verdict(states, "proof", NO_ASSUMPTIONS, self._value, root_bound, first_proof_s)
        if self._value < value:
            return _Verdict(states, ended, NO_ASSUMPTIONS, strict_search.bound, root_bound)
        return _Verdict(states, "proof", DOMINANCE, self._value, root_bound, first_proof_s)

    def _most_throughput_of_ties(self, schedule: Schedule) -> Schedule:
        """Return the schedule of most throughput among those whose latency is as good as that of *schedule*.

        So tasks that are not the last to end finish as early as possible. Only for the objective latency.
        """
        if self._options.objective != "latency" or len(self._problem.tasks) == 1:
            return schedule
        deadline_s = self._value * (1 + self._options.ties)
        ends_of_tied = {tied: ends for tied, ends in self._proposed.items() if max(ends) <= deadline_s}
        ends_of_tied[schedule] = simulate(self._problem, schedule).finish_s
        negated_throughputs = {
            tied: value_to_minimise(self._problem, ends, "throughput") for tied, ends in ends_of_tied.items()
        }
        best = min(negated_throughputs, key=lambda tied: negated_throughputs[tied])
        if self._seconds > self._options.time_limit_s:
            return best
        rules = make_rules(self._problem, "throughput", self._options.limits, strict=False, deadline_s=deadline_s)
        prices = stack_prices(self._problem.tables, self._all_price_sets(), rules.max_switches)
        search = Search(self._problem, rules, prices, negated_throughputs[best])
        search.dive(FIRST_WIDTH)
        search.expand(TIE_STATES)
        return search.schedule or best

    def _run_cp_sat(self) -> None:
        """Take CP-SAT's schedule as a proposal, and its bound as a lower bound for every schedule."""
        limits, time_limit_s = self._options.limits, min(CP_SAT_S, self._options.time_limit_s)
        result = contention_free(
            self._problem, self._options.objective, time_limit_s=time_limit_s, max_switches=limits.max_switches,
            seed=self._options.seed,
        )  # fmt: skip
        self._cp_sat_bound = result.bound_s
        self._propose(result.schedule)

    def _all_price_sets(self) -> list[PriceSet]:
        """The price sets of the linear programme and the simple ones, computed at the first call."""
        if not self._price_sets:
            self._price_sets = [*best_price_sets(self._problem), *simple_price_sets(self._problem.tables)]
        return self._price_sets

    def _judge(self, names: Iterable[str]) -> dict[str, Schedule]:
        """Run the baselines *names*, propose all their schedules, and return the best schedule of each."""
        best = {}
        for name in names:
            schedules = BASELINES[name](self._problem, self._options.objective)
            values = [self._propose(schedule) for schedule in schedules]
            if values:
                best[name] = schedules[values.index(min(values))]
        return best

    def _propose(self, schedule: Schedule) -> float:
        """Return the value of *schedule*; if it keeps the limits and is the best so far, it becomes the solution."""
        ends = ends_s(self._problem, schedule)
        value = value_to_minimise(self._problem, ends, self._options.objective)
        if self._keeps_limits(schedule):
            self._proposed[schedule] = ends
            self._take_if_better(value, schedule)
        return value

    def _keeps_limits(self, schedule: Schedule) -> bool:
        return keeps_to(self._problem, schedule, self._options.limits)

    def _make_search(self, sets: Sequence[PriceSet], *, strict: bool = False) -> Search:
        """A new search with the bounds of the price *sets*; strict: without the dominance assumption."""
        rules = make_rules(self._problem, self._options.objective, self._options.limits, strict=strict)
        prices = stack_prices(self._problem.tables, sets, rules.max_switches)
        search = Search(self._problem, rules, prices, self._value)
        self._bound = max(self._cp_sat_bound, search.bound)
        return search

    def _dive(self, search: Search, width: int, rng: np.random.Generator | None = None) -> None:
        """Dive as ``Search.dive`` does, and publish an improvement."""
        if search.dive(width, rng) and search.schedule:
            self._take_if_better(search.best, search.schedule)

    def _prove(self, search: Search, max_states: int) -> str:
        """Expand states until the proof is complete or *max_states* states were expanded; return why it ended.

        During a long proof, ever wider dives look for better schedules, at ever longer intervals.
        """
        rng = np.random.default_rng(self._options.seed)
        width, next_dive = 2 * NEXT_WIDTH, BETWEEN_DIVES
        while not search.proved:
            if self._seconds > self._options.time_limit_s:
                return "time limit"
            if search.full or search.expanded >= max_states:
                return "memory"
            if search.expanded > next_dive:
                self._dive(search, width, rng)
                width, next_dive = min(2 * width, WIDEST), 2 * next_dive
            self._expand(search, CHUNK)
        return "proof"

    def _expand(self, search: Search, steps: int) -> None:
        """Expand up to *steps* states, publish an improvement, and raise the bound."""
        if search.expand(steps) and search.schedule:
            self._take_if_better(search.best, search.schedule)
        self._bound = max(self._bound, search.bound)

    @property
    def _seconds(self) -> float:
        """Seconds since this run began."""
        return perf_counter() - self._began_s

    def _take_if_better(self, value: float, schedule: Schedule) -> None:
        """Make *schedule* the solution and publish it, if its *value* is better than the best so far."""
        if not value < self._value - TINY * abs(value):
            return
        self._value, self._schedule = value, schedule
        sign = -1 if self._options.objective == "throughput" else 1  # the search minimises the negated throughput
        improvement = Improvement(self._seconds, sign * value, sign * min(self._bound, value), schedule)
        self._improvements.append(improvement)
        if self._on_improvement:
            self._on_improvement(improvement)

    def _certificate(self, verdict: _Verdict, outcome: Outcome) -> Certificate:
        """The certificate of *outcome*; its value may be worse than the verdict's bound by rounding and ties only."""
        sign = -1 if self._options.objective == "throughput" else 1  # the search minimises the negated throughput
        value = outcome.value(self._options.objective)
        worst_proved_value = verdict.bound + (TINY + self._options.ties) * abs(verdict.bound)
        proved = (
            verdict.first_proof_s is not None
            and verdict.bound - TINY * abs(verdict.bound) <= value <= worst_proved_value
        )
        any_idling_bound = max(verdict.any_idling_bound, self._cp_sat_bound)
        # A proof that does not fit the simulated value is not claimed; then only the bound for all schedules is left.
        bound_is_trusted = proved or verdict.first_proof_s is None
        bound = max(any_idling_bound, verdict.bound) if bound_is_trusted else any_idling_bound
        return Certificate(
            objective=self._options.objective,
            schedules=CLASS,
            assumes=verdict.assumes,
            proved=proved,
            value=sign * value,
            bound=sign * min(value, bound),
            any_idling_bound=sign * min(value, any_idling_bound),
            states=verdict.states,
            seconds=self._seconds,
            ended=verdict.ended,
            first_proof_s=verdict.first_proof_s if proved else None,
        )
