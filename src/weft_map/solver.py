"""The best schedule there is, with a certificate: dives for good schedules first, then the proof.

It starts from the baselines, so nothing it returns is worse than the best of them. Every improvement is published
with the bound at that time; a time limit ends the search with a gap instead of a proof.
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
from weft_map.prices import PriceSet, best_sets, priced, simple_sets
from weft_map.problem import Group, Objective, Problem, Task, UnitCost
from weft_map.schedule import Outcome, Schedule, worth
from weft_map.search import MOST_STATES, Search, ends_s, idle_freely, rules
from weft_map.simulator import simulate

TINY = 1e-9
"""An improvement by a smaller share is none."""
NAIVE = ("gpu-only", "per-unit")
"""Baselines that take no time at all: where everything begins."""
BETWEEN_DIVES = 50_000
"""States to expand before the first wider dive; then twice as many, and so on."""
SLOW = ("contention-blind",)
"""Baselines that are searches of their own; they are judged last."""
TIES = 2000
"""States to expand for a schedule of the same latency with more throughput."""
CP_SAT_S = 10.0
"""What CP-SAT may take."""
TINIEST, SMALL, CHUNK = 64, 1000, 500
"""States to expand before all else, before better bounds are worth it, and between two looks at the clock."""
FIRST_WIDTH, NEXT_WIDTH, WIDEST = 24, 64, 4096
"""States of a depth that dives keep: before the linear programme, after it, and at most."""
CLASS = (
    "event-aligned: a task moves on as soon as a step has ended; a step whose data is there starts at once or when "
    "some step or move ends"
)
DOMINANCE = (
    "of two states in the same phases, one that is nowhere later is never worse (true where a step may start at any "
    "time; for event-aligned schedules it fails now and then, by little)"
)
RECHECK = 30_000
"""States the second, strict search may expand unless it is asked for: about a fifth of a second."""


class Improvement(NamedTuple):
    """A better schedule, and when it was found."""

    seconds: float
    """Since the search began."""
    value: float
    """Makespan in seconds, or runs per second."""
    bound: float
    """The bound at that time: no schedule is better."""
    schedule: Schedule


@dataclass(frozen=True, slots=True)
class Certificate:
    """The certificate of a schedule: its value, a bound, and what the proof assumes."""

    objective: Objective
    schedules: str
    """The class of schedules the claim is about."""
    assumes: str
    """Assumptions of the proof; empty: none."""
    proved: bool
    value: float
    """Makespan in seconds, or runs per second."""
    bound: float
    """No schedule of the class is better."""
    any_idling_bound: float
    """No schedule is better, even one that starts steps at any time at all."""
    states: int
    """Expanded by the search."""
    seconds: float
    ended: str
    """Why the search ended: proof, time limit, memory."""
    first_proof_s: float | None = None
    """After how many seconds it was proved on that assumption."""

    @property
    def gap(self) -> float:
        """How far the value may be from the best of the class, as a share of the bound; 0 where it is proved.

        A proved schedule that was taken for its throughput may lie above the best by as much as ties may differ."""
        share = abs(self.value - self.bound) / abs(self.bound) if self.bound else 0.0
        return share if share > TINY else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "gap": self.gap}


@dataclass(frozen=True, slots=True)
class Solution:
    """The best schedule found, the baselines, and its certificate."""

    outcome: Outcome
    baselines: Mapping[str, Outcome]
    """The best each baseline came to."""
    within: tuple[str, ...]
    """The baselines that keep to the limits."""
    improvements: tuple[Improvement, ...]
    certificate: Certificate
    idled: Outcome | None = None
    """The same mapping with delays of any length, where some are better; outside the class the certificate is about."""

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
    """How to search."""

    objective: Objective = "latency"
    limits: TaskLimits = field(default_factory=TaskLimits)
    time_limit_s: float = 60.0
    seed: int = 0
    """Seeds the dives that misjudge states a little; the rest of the search has nothing random."""
    cp_sat: bool = False
    """Run CP-SAT first, without contention: its plan is another first schedule, its bound another bound."""
    ties: float = 1e-9
    """Of schedules whose latencies differ by less than this share, the one with the most throughput is taken."""
    strict: bool = False
    """Search until the proof holds without assumptions, however long that takes; otherwise only if it is quick."""


def solve(
    problem: Problem, options: Options | None = None, on_improvement: Callable[[Improvement], None] | None = None
) -> Solution:
    """Search until the best schedule is proved or the time is up."""
    options = options or Options()
    check_feasible(problem, options.limits)
    for n, task in enumerate(problem.tasks):
        if options.objective == "throughput" and shortest(problem, n)[0] == 0:
            raise WorkloadError(f"{task.name} can do with no time at all: its throughput has no limit; give it time_s")
    load_kernels()
    return _SolverRun(problem, options, on_improvement).run()


@cache
def load_kernels() -> None:
    """Compile the kernels of the search, or load them from the cache, before the search time starts."""
    group = Group("any", {unit: UnitCost(1e-3, 1.0) for unit in ("a", "b")})
    soc = Soc(name="any", bandwidth_gb_s=1.0, units=(Unit(name="a"), Unit(name="b")))
    run = _SolverRun(Problem(soc, (Task("one", (group,)), Task("other", (group,)))), Options(), None)
    run.run()
    run.dive_once()


class _Verdict(NamedTuple):
    """How a search ended; values are negated where the objective is maximised."""

    states: int
    ended: str
    assumes: str
    bound: float
    anyhow: float
    """The bound that holds for schedules of any kind."""
    first_proof_s: float | None = None


class _SolverRun:
    """One search, from the baselines to the proof."""

    def __init__(self, problem: Problem, options: Options, tell: Callable[[Improvement], None] | None) -> None:
        self._problem, self._options, self._tell = problem, options, tell
        self._began = perf_counter()
        self._value = np.inf
        self._schedule: Schedule | None = None
        self._bound = self._floor = -np.inf
        self._price_sets: list[PriceSet] = []
        self._improvements: list[Improvement] = []
        self._proposed: dict[Schedule, tuple[float, ...]] = {}
        """When each task ends under what baselines proposed."""

    def dive_once(self) -> None:
        """Search depth-first once; a small problem is solved by this alone."""
        self._search(simple_sets(self._problem.tables), strict=True).dive(1)

    def run(self) -> Solution:
        search = self._search(simple_sets(self._problem.tables), strict=True)
        self._expand(search, TINIEST)
        first_s = self._seconds if search.proved else None
        baselines = self._judge(NAIVE)
        verdict = self._small_proof(search, first_s)
        baselines |= self._judge(name for name in BASELINES if name not in {*NAIVE, *SLOW})
        if self._options.cp_sat:
            self._ask_cp_sat()
        if verdict is None and self._seconds > self._options.time_limit_s:
            verdict = _Verdict(search.expanded, "time limit", "", search.bound, search.first_bound)
        verdict = verdict or self._large_proof()
        if self._seconds < self._options.time_limit_s:
            baselines |= self._judge(SLOW)
        if self._schedule is None:
            raise WorkloadError(
                "no schedule keeps to all limits together; loosen one of them"
                if verdict.ended == "proof"
                else f"no schedule within the limits was found in {self._options.time_limit_s:g} s; allow more time"
            )
        outcome = self._simulate_best(self._without_delay(self._schedule))
        judged = {name: simulate(self._problem, schedule) for name, schedule in baselines.items()}
        within = [name for name, schedule in baselines.items() if self._keeps(schedule)]
        idling = idle_freely(outcome, self._options.objective)
        idled = simulate(self._problem, idling) if idling != outcome.schedule else None
        certificate = self._certificate(verdict, outcome)
        return Solution(outcome, judged, tuple(within), tuple(self._improvements), certificate, idled)

    def _simulate_best(self, schedule: Schedule) -> Outcome:
        """Simulate a schedule and return its outcome.

        Where steps without length start at one instant the simulator may order them otherwise and find it worse than
        the solver; then the best of all proposals is returned.
        """
        outcome = simulate(self._problem, schedule)
        if outcome.value(self._options.objective) <= self._value + (1e-6 + self._options.ties) * abs(self._value):
            return outcome
        others = [simulate(self._problem, given) for given in self._proposed]
        return min([outcome, *others], key=lambda other: other.value(self._options.objective))

    def _small_proof(self, search: Search, first_s: float | None) -> _Verdict | None:
        """Search depth-first for a first good schedule; prove a small problem here, with simple bounds."""
        if first_s is None:
            search.beat(self._value)
            self._dive(search, FIRST_WIDTH)
            self._prove(search, SMALL)
            if not search.proved:
                return None
            first_s = self._seconds
        anyhow = self._search(self._sets()).bound
        return _Verdict(search.expanded, "proof", "", self._value, anyhow, first_s)

    def _large_proof(self) -> _Verdict:
        """Prove the best schedule among event-aligned ones, then, where that is feasible, among all."""
        sets = self._sets()
        search = self._search(sets)
        anyhow = search.bound
        self._dive(search, NEXT_WIDTH)
        ended = self._prove(search, MOST_STATES)
        if not search.proved:
            return _Verdict(search.expanded, ended, DOMINANCE, search.bound, anyhow)
        first_s, value = self._seconds, self._value
        again = self._search(sets, strict=True)
        self._prove(again, MOST_STATES if self._options.strict else RECHECK)
        if self._value < value:  # better than what was thought the best: the assumption does not hold here
            ended = self._prove(again, MOST_STATES)
        states = search.expanded + again.expanded
        if again.proved:
            return _Verdict(states, "proof", "", self._value, anyhow, first_s)
        if self._value < value:
            return _Verdict(states, ended, "", again.bound, anyhow)
        return _Verdict(states, "proof", DOMINANCE, self._value, anyhow, first_s)

    def _without_delay(self, schedule: Schedule) -> Schedule:
        """Return a schedule of equal value in which tasks that are not the last end as early as possible."""
        if self._options.objective != "latency" or len(self._problem.tasks) == 1:
            return schedule
        deadline_s = self._value * (1 + self._options.ties)
        in_time = {given: ended for given, ended in self._proposed.items() if max(ended) <= deadline_s}
        in_time[schedule] = simulate(self._problem, schedule).finish_s
        sums = {given: worth(self._problem, ended, "throughput") for given, ended in in_time.items()}
        best = min(sums, key=lambda given: sums[given])
        if self._seconds > self._options.time_limit_s:
            return best
        rule = rules(self._problem, "throughput", self._options.limits, strict=False, deadline_s=deadline_s)
        search = Search(self._problem, rule, priced(self._problem.tables, self._sets(), rule.switches), sums[best])
        search.dive(FIRST_WIDTH)
        search.expand(TIES)
        return search.schedule or best

    def _ask_cp_sat(self) -> None:
        limits, limit_s = self._options.limits, min(CP_SAT_S, self._options.time_limit_s)
        blind = contention_free(
            self._problem, self._options.objective, time_limit_s=limit_s, max_switches=limits.max_switches,
            seed=self._options.seed,
        )  # fmt: skip
        self._floor = blind.bound_s
        self._worth(blind.schedule)

    def _sets(self) -> list[PriceSet]:
        if not self._price_sets:
            self._price_sets = [*best_sets(self._problem), *simple_sets(self._problem.tables)]
        return self._price_sets

    def _judge(self, names: Iterable[str]) -> dict[str, Schedule]:
        """Run the baselines *names* and keep the best schedule of each."""
        kept = {}
        for name in names:
            proposed = BASELINES[name](self._problem, self._options.objective)
            values = [self._worth(schedule) for schedule in proposed]
            if values:
                kept[name] = proposed[values.index(min(values))]
        return kept

    def _worth(self, schedule: Schedule) -> float:
        """Return the value of a proposed schedule; offer it as a solution if it is within the limits."""
        ended = ends_s(self._problem, schedule)
        value = worth(self._problem, ended, self._options.objective)
        if self._keeps(schedule):
            self._proposed[schedule] = ended
            self._offer(value, schedule)
        return value

    def _keeps(self, schedule: Schedule) -> bool:
        return keeps_to(self._problem, schedule, self._options.limits)

    def _search(self, sets: Sequence[PriceSet], *, strict: bool = False) -> Search:
        given = rules(self._problem, self._options.objective, self._options.limits, strict=strict)
        search = Search(self._problem, given, priced(self._problem.tables, sets, given.switches), self._value)
        self._bound = max(self._floor, search.bound)
        return search

    def _dive(self, search: Search, width: int, rng: np.random.Generator | None = None) -> None:
        if search.dive(width, rng) and search.schedule:
            self._offer(search.best, search.schedule)

    def _prove(self, search: Search, most: int) -> str:
        """Expand states until the proof is complete or *most* states were expanded; return why it ended.

        Dives get wider where the proof takes long.
        """
        rng = np.random.default_rng(self._options.seed)
        width, pause = 2 * NEXT_WIDTH, BETWEEN_DIVES
        while not search.proved:
            if self._seconds > self._options.time_limit_s:
                return "time limit"
            if search.full or search.expanded >= most:
                return "memory"
            if search.expanded > pause:
                self._dive(search, width, rng)
                width, pause = min(2 * width, WIDEST), 2 * pause
            self._expand(search, CHUNK)
        return "proof"

    def _expand(self, search: Search, steps: int) -> None:
        if search.expand(steps) and search.schedule:
            self._offer(search.best, search.schedule)
        self._bound = max(self._bound, search.bound)

    @property
    def _seconds(self) -> float:
        return perf_counter() - self._began

    def _offer(self, value: float, schedule: Schedule) -> None:
        """Publish a schedule if it is better than all before."""
        if not value < self._value - TINY * abs(value):
            return
        self._value, self._schedule = value, schedule
        sign = -1 if self._options.objective == "throughput" else 1
        improvement = Improvement(self._seconds, sign * value, sign * min(self._bound, value), schedule)
        self._improvements.append(improvement)
        if self._tell:
            self._tell(improvement)

    def _certificate(self, verdict: _Verdict, outcome: Outcome) -> Certificate:
        sign = -1 if self._options.objective == "throughput" else 1
        value = outcome.value(self._options.objective)
        claimed = verdict.bound + (TINY + self._options.ties) * abs(verdict.bound)
        proved = verdict.first_proof_s is not None and verdict.bound - TINY * abs(verdict.bound) <= value <= claimed
        anyhow = max(verdict.anyhow, self._floor)
        bound = max(anyhow, verdict.bound) if proved or verdict.first_proof_s is None else anyhow
        return Certificate(
            objective=self._options.objective,
            schedules=CLASS,
            assumes=verdict.assumes,
            proved=proved,
            value=sign * value,
            bound=sign * min(value, bound),
            any_idling_bound=sign * min(value, anyhow),
            states=verdict.states,
            seconds=self._seconds,
            ended=verdict.ended,
            first_proof_s=verdict.first_proof_s if proved else None,
        )
