"""The paper's formulation (HaX-CoNN, PPoPP 2024, section 3) with its equations made exact, solved by Z3.

For comparison: it proves what it finds for a handful of groups and nothing beyond. Work is conserved, so on two units,
where a step has at most one other beside it, a step takes its time alone plus, for every step beside it, the time both
run together times 1 - 1/slow-down. That stands for equations 7 and 8, which lose the case without overlap.

Starts are free: a step may wait for any length of time, not only for an event, to keep out of another's way. That
class of schedules is slightly wider than the one our own search covers, and its optimum can be a little better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import inf
from time import perf_counter
from typing import Any, NamedTuple

from numpy import isfinite

from weft.base.errors import InputError, WorkloadError
from weft_map.limits import TaskLimits, check_switches
from weft_map.problem import Problem
from weft_map.schedule import Schedule, Units
from weft_map.simulator import simulate
from weft_map.solver import Certificate, Improvement, Solution

TICKS = 10_000
"""Parts of the longest step, and of the share lost while two run together. Z3 reckons in exact fractions: ten times as
many prove nothing more and take some five times as long."""


@dataclass(frozen=True, slots=True)
class Z3Result:
    """What Z3 found in its time."""

    schedule: Schedule | None
    """The schedule, with planned starts; None if none was found in time."""
    makespan_s: float
    """Its makespan in the model; infinite if there is no schedule."""
    proved: bool
    seconds: float
    """How long it took."""


class _Z3Found(NamedTuple):
    makespan_s: float
    units: Units
    starts_s: tuple[tuple[float, ...], ...]


class _Z3Step(NamedTuple):
    task: int
    step: int
    second: Any
    """Whether it runs on the second unit."""
    start: Any
    end: Any


def solve_z3(problem: Problem, *, time_limit_s: float, max_switches: int | None = None) -> Z3Result:
    """The least makespan, contention included, on a SoC of two units with one instance each."""
    _check_soc(problem)
    check_switches(problem, max_switches)
    model = _Z3Model(_load(), problem, max_switches)
    began = perf_counter()
    solution, proved = model.solve(time_limit_s)
    seconds = perf_counter() - began
    if solution is None:
        return Z3Result(None, inf, False, seconds)
    return Z3Result(
        Schedule(solution.units, starts_s=solution.starts_s, made_by="z3"), solution.makespan_s, proved, seconds
    )


def _check_soc(problem: Problem) -> None:
    units = problem.soc.units
    if len(units) != 2 or any(unit.instances > 1 for unit in units):
        listed = ", ".join(f"{unit.instances} {unit.name}" for unit in units)
        raise WorkloadError(
            f"the Z3 model needs two units with one instance each; {problem.soc.name} has {listed}; use our own solver"
        )


def _load() -> Any:
    try:
        import z3
    except ImportError as error:
        raise InputError(f"the Z3 model needs {error.name}, which is not installed; pip install 'weft[z3]'") from error
    return z3


class _Z3Model:
    """The paper's constraints for Z3, with times in ticks.

    Two more follow from them and make Z3 faster: the remaining time of a task, and the work of a unit.
    """

    def __init__(self, z3: Any, problem: Problem, max_switches: int | None) -> None:
        self._z3, self._problem = z3, problem
        self._solver = z3.Optimize()
        times = problem.tables.time
        self._tick_s = max(float(times[isfinite(times)].max()), 1e-9) / TICKS
        self._chains = [self._chain(n, count) for n, count in enumerate(problem.tables.steps.tolist())]
        self._finish = [self._through(chain[-1]) for chain in self._chains]
        self._makespan = z3.Real("makespan")
        self._order()
        self._contend()
        if max_switches is not None:
            self._cap(max_switches)
        self._tails()
        self._loads()

    def solve(self, time_limit_s: float) -> tuple[_Z3Found | None, bool]:
        """The best model, if any, and whether it was proved the best in time."""
        self._solver.set("timeout", max(1, int(time_limit_s * 1000)))
        self._solver.minimize(self._makespan)
        models: list[Any] = []
        self._solver.set_on_model(models.append)
        try:
            proved = self._solver.check() == self._z3.sat
        except self._z3.Z3Exception as error:
            if "canceled" not in str(error):
                raise
            proved = False
        if proved:
            models.append(self._solver.model())
        return (self._read(models[-1]) if models else None), proved

    def _read(self, model: Any) -> _Z3Found:
        return _Z3Found(
            self._seconds(model, self._makespan),
            tuple(
                tuple(int(self._z3.is_true(model.eval(step.second, model_completion=True))) for step in chain)
                for chain in self._chains
            ),
            tuple(tuple(self._seconds(model, step.start) for step in chain) for chain in self._chains),
        )

    def _seconds(self, model: Any, value: Any) -> float:
        return float(model.eval(value, model_completion=True).as_fraction()) * self._tick_s

    def _ticks(self, seconds: float) -> Any:
        return self._z3.RealVal(round(seconds / self._tick_s))

    def _pick(self, step: _Z3Step, values_s: Sequence[float]) -> Any:
        """Ticks of the value of the step's unit; zero where the unit may not run it."""
        first, second = (self._ticks(value if isfinite(value) else 0.0) for value in values_s)
        return self._z3.If(step.second, second, first)

    def _chain(self, n: int, count: int) -> list[_Z3Step]:
        z3 = self._z3
        chain: list[_Z3Step] = []
        for i in range(count):
            step = _Z3Step(n, i, z3.Bool(f"u{n}_{i}"), z3.Real(f"s{n}_{i}"), z3.Real(f"e{n}_{i}"))
            before = chain[-1] if chain else None
            self._solver.add(step.start >= (before.end if before else 0) + self._move_time(before, step))
            chain.append(step)
        return chain

    def _move_time(self, before: _Z3Step | None, step: _Z3Step) -> Any:
        """Time between two steps; a forbidden move is ruled out."""
        move, z3 = self._problem.tables.move[step.task, step.step], self._z3
        if before is None:
            return self._pick(step, move[-1].tolist())
        for source, target in ((0, 1), (1, 0), (0, 0), (1, 1)):
            if not isfinite(move[source, target]):
                self._solver.add(z3.Or(before.second != bool(source), step.second != bool(target)))
        first, second = (self._pick(step, move[source].tolist()) for source in (0, 1))
        return z3.If(before.second, second, first)

    def _through(self, last: _Z3Step) -> Any:
        return last.end + self._pick(last, self._problem.tables.leave[last.task].tolist())

    def _order(self) -> None:
        """Pipelines, and the makespan."""
        for n, waits in enumerate(self._problem.tables.waits):
            first = self._chains[n][0]
            for m in waits.nonzero()[0]:
                self._solver.add(first.start >= self._finish[m] + self._move_time(None, first))
        for finish in self._finish:
            self._solver.add(self._makespan >= finish)

    def _tails(self) -> None:
        """Demand that the rest of a task, at its fastest, fits in after the start of each of its steps."""
        least = self._problem.tables.time.min(axis=2)
        for chain in self._chains:
            rest = 0.0
            for step in reversed(chain):
                rest += float(least[step.task, step.step])
                self._solver.add(self._makespan >= step.start + self._ticks(rest) - len(chain))

    def _loads(self) -> None:
        """A unit's steps fit in the makespan."""
        times = self._problem.tables.time
        steps = [step for chain in self._chains for step in chain]
        for unit in (0, 1):
            able = [step for step in steps if isfinite(times[step.task, step.step, unit])]
            ticks = [(step, self._ticks(float(times[step.task, step.step, unit]))) for step in able]
            busy = [self._z3.If(step.second == bool(unit), spent, 0) for step, spent in ticks]
            self._solver.add(self._makespan >= self._z3.Sum([self._z3.RealVal(0), *busy]))

    def _contend(self) -> None:
        """One step at a time per unit; the duration of a step depends on the steps that run at the same time."""
        z3 = self._z3
        beside: dict[tuple[int, int], list[tuple[_Z3Step, Any]]] = {}
        for one, other in self._meetings():
            apart = z3.Or(one.end <= other.start, other.end <= one.start)
            self._solver.add(z3.Or(one.second != other.second, apart))
            both = z3.Real(f"o{one.task}_{one.step}_{other.task}_{other.step}")
            # at least the earlier end less the later start, which is the least of the four differences
            ways = [both >= end - start for end in (one.end, other.end) for start in (one.start, other.start)]
            self._solver.add(both >= 0, z3.Or(ways))
            beside.setdefault(one[:2], []).append((other, both))
            beside.setdefault(other[:2], []).append((one, both))
        for step in (step for chain in self._chains for step in chain):
            for unit in (0, 1):
                self._last(step, unit, beside.get(step[:2], []))

    def _last(self, step: _Z3Step, unit: int, beside: Sequence[tuple[_Z3Step, Any]]) -> None:
        """The duration of a step on one unit; a step that runs at the same time is on the other unit."""
        tables, z3 = self._problem.tables, self._z3
        alone_s, own = float(tables.time[step.task, step.step, unit]), float(tables.demand[step.task, step.step, unit])
        if not isfinite(alone_s):
            self._solver.add(step.second != bool(unit))
            return
        longer = [self._ticks(alone_s)]
        for other, both in beside:
            external = float(tables.demand[other.task, other.step, 1 - unit])
            lost = round(TICKS * (1 - 1 / self._problem.soc.slow_down(unit, own, external)))
            longer.append(z3.Q(lost, TICKS) * both)
        self._solver.add(z3.Implies(step.second == bool(unit), step.end - step.start >= z3.Sum(longer)))

    def _meetings(self) -> Iterator[tuple[_Z3Step, _Z3Step]]:
        """Pairs of steps that may run together."""
        for n, m in combinations(range(len(self._chains)), 2):
            if not (self._waits(n, m) or self._waits(m, n)):
                yield from ((one, other) for one in self._chains[n] for other in self._chains[m])

    def _waits(self, n: int, m: int) -> bool:
        waits = self._problem.tables.waits[n]
        return bool(waits[m]) or any(self._waits(int(k), m) for k in waits.nonzero()[0])

    def _cap(self, most: int) -> None:
        """Allow at most *most* switches in each run."""
        z3 = self._z3
        for task, chain in zip(self._problem.tasks, self._chains, strict=True):
            for begin in range(0, len(chain), len(task.groups)):
                run = chain[begin : begin + len(task.groups)]
                switched = [z3.If(b.second != a.second, 1, 0) for a, b in pairwise(run)]
                self._solver.add(z3.Sum([z3.IntVal(0), *switched]) <= most)


CLASS = "a task moves on as soon as a step has ended; a step whose data is there may wait for any length of time"
ROUNDED = f"times in {TICKS} parts of the longest step"


def solve_like_the_paper(problem: Problem, limits: TaskLimits | None = None, time_limit_s: float = 60.0) -> Solution:
    """The least makespan by Z3: a proof for a handful of groups, and whatever it has when the time is up beyond."""
    limits = limits or TaskLimits()
    if limits.energy_budget_j is not None:
        raise WorkloadError("the Z3 model knows no energy budget; use the search")
    result = solve_z3(problem, time_limit_s=time_limit_s, max_switches=limits.max_switches)
    if result.schedule is None:
        raise WorkloadError(f"Z3 found no schedule within {time_limit_s:g} s; allow more time, or use the search")
    outcome = simulate(problem, result.schedule)
    bound = outcome.makespan_s if result.proved else 0.0
    certificate = Certificate(
        objective="latency",
        schedules=CLASS,
        assumes=ROUNDED,
        proved=result.proved,
        value=outcome.makespan_s,
        bound=bound,
        any_idling_bound=bound,
        states=0,
        seconds=result.seconds,
        ended="proof" if result.proved else "time limit",
        first_proof_s=result.seconds if result.proved else None,
    )
    only = Improvement(result.seconds, outcome.makespan_s, bound, result.schedule)
    return Solution(outcome, {"z3": outcome}, ("z3",), (only,), certificate)
