"""The paper's formulation (HaX-CoNN, PPoPP 2024, section 3) with its equations made exact, solved by Z3.

For comparison with our own search; it can prove only problems of a few groups. Work is conserved. So on two units,
where at most one other step runs at a time, a step takes its stand-alone time plus, for every step that overlaps with
it, the time of the overlap times 1 - 1/slow-down. That replaces equations 7 and 8, which lose the case without overlap.

Starts are free: to avoid contention a step may wait for any time, not only until an event. This class of schedules is
slightly wider than that of our own search, and its optimum can be a little better.
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
"""Resolution: ticks in the longest step, and parts of the share that contention takes. Z3 computes with exact
fractions; ten times as many ticks prove nothing more and take about five times as long."""


@dataclass(frozen=True, slots=True)
class Z3Result:
    """The best schedule that Z3 found within its time limit."""

    schedule: Schedule | None
    """The schedule, with planned starts; None if none was found in time."""
    makespan_s: float
    """Its makespan in the model; infinite if there is no schedule."""
    proved: bool
    seconds: float
    """Duration of the solution by Z3."""


class _Z3Solution(NamedTuple):
    """A model of Z3 as numbers."""

    makespan_s: float
    units: Units
    starts_s: tuple[tuple[float, ...], ...]


class _Z3Step(NamedTuple):
    """The variables of one step in the constraint model; times in ticks."""

    task: int
    step: int
    on_second: Any
    """Whether it runs on the second unit."""
    start: Any
    end: Any


def solve_z3(problem: Problem, *, time_limit_s: float, max_switches: int | None = None) -> Z3Result:
    """Find the least makespan, contention included, on a SoC of two units with one instance each.

    Raises WorkloadError for another SoC or if *max_switches* are too few, InputError if z3 is not installed.
    """
    _check_soc(problem)
    check_switches(problem, max_switches)
    model = _Z3Model(_import_z3(), problem, max_switches)
    began = perf_counter()
    solution, proved = model.solve(time_limit_s)
    seconds = perf_counter() - began
    if solution is None:
        return Z3Result(schedule=None, makespan_s=inf, proved=False, seconds=seconds)
    schedule = Schedule(solution.units, starts_s=solution.starts_s, made_by="z3")
    return Z3Result(schedule, solution.makespan_s, proved, seconds)


def _check_soc(problem: Problem) -> None:
    units = problem.soc.units
    if len(units) != 2 or any(unit.instances > 1 for unit in units):
        listed = ", ".join(f"{unit.instances} {unit.name}" for unit in units)
        raise WorkloadError(
            f"the Z3 model needs two units with one instance each; {problem.soc.name} has {listed}; use our own solver"
        )


def _import_z3() -> Any:
    try:
        import z3
    except ImportError as error:
        raise InputError(f"the Z3 model needs {error.name}, which is not installed; pip install 'weft[z3]'") from error
    return z3


class _Z3Model:
    """The paper's constraints for Z3, with times in ticks.

    Two kinds of implied constraints make Z3 faster: the remaining time of a task, and the total work of a unit.
    """

    def __init__(self, z3: Any, problem: Problem, max_switches: int | None) -> None:
        self._z3, self._problem = z3, problem
        self._solver = z3.Optimize()
        times = problem.tables.time
        self._tick_s = max(float(times[isfinite(times)].max()), 1e-9) / TICKS
        self._chains = [self._add_steps(n, count) for n, count in enumerate(problem.tables.steps.tolist())]
        """[task][step]: its variables."""
        self._finish = [self._finish_time(chain[-1]) for chain in self._chains]
        self._makespan = z3.Real("makespan")
        self._add_order()
        self._add_contention()
        if max_switches is not None:
            self._cap_switches(max_switches)
        self._add_remaining_times()
        self._add_unit_loads()

    def solve(self, time_limit_s: float) -> tuple[_Z3Solution | None, bool]:
        """The best solution within *time_limit_s*, None if there is none; and whether it is proved to be the best."""
        self._solver.set("timeout", max(1, int(time_limit_s * 1000)))
        self._solver.minimize(self._makespan)
        models: list[Any] = []
        self._solver.set_on_model(models.append)
        try:
            proved = self._solver.check() == self._z3.sat
        except self._z3.Z3Exception as error:
            if "canceled" not in str(error):  # so Z3 calls the end of its time
                raise
            proved = False
        if proved:
            models.append(self._solver.model())
        return (self._read(models[-1]) if models else None), proved

    def _read(self, model: Any) -> _Z3Solution:
        """Convert a model of Z3 (an assignment of the variables) to numbers."""
        return _Z3Solution(
            self._seconds(model, self._makespan),
            tuple(
                tuple(int(self._z3.is_true(model.eval(step.on_second, model_completion=True))) for step in chain)
                for chain in self._chains
            ),
            tuple(tuple(self._seconds(model, step.start) for step in chain) for chain in self._chains),
        )

    def _seconds(self, model: Any, value: Any) -> float:
        return float(model.eval(value, model_completion=True).as_fraction()) * self._tick_s

    def _ticks(self, seconds: float) -> Any:
        return self._z3.RealVal(round(seconds / self._tick_s))

    def _by_unit(self, step: _Z3Step, values_s: Sequence[float]) -> Any:
        """values_s[unit the step runs on], in ticks, as an expression; infinite values, of forbidden units, count 0."""
        first, second = (self._ticks(value if isfinite(value) else 0.0) for value in values_s)
        return self._z3.If(step.on_second, second, first)

    def _add_steps(self, n: int, count: int) -> list[_Z3Step]:
        """Add the *count* steps of task *n*, each after the step before and the move between the two."""
        z3 = self._z3
        chain: list[_Z3Step] = []
        for i in range(count):
            step = _Z3Step(n, i, z3.Bool(f"u{n}_{i}"), z3.Real(f"s{n}_{i}"), z3.Real(f"e{n}_{i}"))
            before = chain[-1] if chain else None
            self._solver.add(step.start >= (before.end if before else 0) + self._move_time(before, step))
            chain.append(step)
        return chain

    def _move_time(self, before: _Z3Step | None, step: _Z3Step) -> Any:
        """Ticks of the move before *step*, as an expression; forbidden moves are excluded by constraints.

        before: the step before; None: the task comes from outside.
        """
        move, z3 = self._problem.tables.move[step.task, step.step], self._z3
        if before is None:
            return self._by_unit(step, move[-1].tolist())
        for source, target in ((0, 1), (1, 0), (0, 0), (1, 1)):
            if not isfinite(move[source, target]):
                self._solver.add(z3.Or(before.on_second != bool(source), step.on_second != bool(target)))
        from_first, from_second = (self._by_unit(step, move[source].tolist()) for source in (0, 1))
        return z3.If(before.on_second, from_second, from_first)

    def _finish_time(self, last: _Z3Step) -> Any:
        """The end of a task whose last step is *last*, as an expression."""
        return last.end + self._by_unit(last, self._problem.tables.leave[last.task].tolist())

    def _add_order(self) -> None:
        """Demand that tasks begin after those they wait for, and that the makespan covers all tasks."""
        for n, waits in enumerate(self._problem.tables.waits):
            first = self._chains[n][0]
            for m in waits.nonzero()[0]:
                self._solver.add(first.start >= self._finish[m] + self._move_time(None, first))
        for finish in self._finish:
            self._solver.add(self._makespan >= finish)

    def _add_remaining_times(self) -> None:
        """Demand that the rest of a task, at its fastest, fits in after the start of each of its steps.

        Every step may be shorter by one tick because of rounding, hence the slack of a chain's length.
        """
        least_s = self._problem.tables.time.min(axis=2)
        for chain in self._chains:
            remaining_s = 0.0
            for step in reversed(chain):
                remaining_s += float(least_s[step.task, step.step])
                self._solver.add(self._makespan >= step.start + self._ticks(remaining_s) - len(chain))

    def _add_unit_loads(self) -> None:
        """Demand that the stand-alone times of all steps on a unit fit in the makespan."""
        times = self._problem.tables.time
        steps = [step for chain in self._chains for step in chain]
        for unit in (0, 1):
            steps_of_unit = [step for step in steps if isfinite(times[step.task, step.step, unit])]
            ticks_of_steps = [(step, self._ticks(float(times[step.task, step.step, unit]))) for step in steps_of_unit]
            busy = [self._z3.If(step.on_second == bool(unit), duration, 0) for step, duration in ticks_of_steps]
            self._solver.add(self._makespan >= self._z3.Sum([self._z3.RealVal(0), *busy]))  # Z3 has no empty sum

    def _add_contention(self) -> None:
        """Demand one step at a time per unit, and durations that depend on the steps that run at the same time."""
        z3 = self._z3
        # (task, step) -> pairs of another step and its overlap in ticks
        overlaps: dict[tuple[int, int], list[tuple[_Z3Step, Any]]] = {}
        for left, right in self._possible_overlaps():
            one_after_other = z3.Or(left.end <= right.start, right.end <= left.start)
            self._solver.add(z3.Or(left.on_second != right.on_second, one_after_other))
            overlap = z3.Real(f"o{left.task}_{left.step}_{right.task}_{right.step}")
            # The overlap is the earlier end less the later start, which is the least of the four differences. A lower
            # bound is enough: a larger value only makes steps longer, which shortens no schedule.
            bounds = [overlap >= end - start for end in (left.end, right.end) for start in (left.start, right.start)]
            self._solver.add(overlap >= 0, z3.Or(bounds))
            overlaps.setdefault((left.task, left.step), []).append((right, overlap))
            overlaps.setdefault((right.task, right.step), []).append((left, overlap))
        for step in (step for chain in self._chains for step in chain):
            for unit in (0, 1):
                self._add_duration(step, unit, overlaps.get((step.task, step.step), []))

    def _add_duration(self, step: _Z3Step, unit: int, overlaps: Sequence[tuple[_Z3Step, Any]]) -> None:
        """Demand the duration that *step* has on *unit*, longer by what it loses to each of *overlaps*.

        A step that overlaps with it is on the other unit, since a unit runs one step at a time.
        """
        tables, z3 = self._problem.tables, self._z3
        index = step.task, step.step, unit
        alone_s, demand_gb_s = float(tables.time[index]), float(tables.demand[index])
        if not isfinite(alone_s):
            self._solver.add(step.on_second != bool(unit))
            return
        terms = [self._ticks(alone_s)]
        for other, overlap in overlaps:
            other_demand_gb_s = float(tables.demand[other.task, other.step, 1 - unit])
            lost_ticks = round(TICKS * (1 - 1 / self._problem.soc.slow_down(unit, demand_gb_s, other_demand_gb_s)))
            terms.append(z3.Q(lost_ticks, TICKS) * overlap)
        self._solver.add(z3.Implies(step.on_second == bool(unit), step.end - step.start >= z3.Sum(terms)))

    def _possible_overlaps(self) -> Iterator[tuple[_Z3Step, _Z3Step]]:
        """Pairs of steps of different tasks that may run at the same time."""
        for n, m in combinations(range(len(self._chains)), 2):
            if not (self._waits_for(n, m) or self._waits_for(m, n)):
                yield from ((left, right) for left in self._chains[n] for right in self._chains[m])

    def _waits_for(self, n: int, m: int) -> bool:
        """Whether task *n* waits for task *m*, directly or through other tasks."""
        waits = self._problem.tables.waits[n]
        return bool(waits[m]) or any(self._waits_for(int(k), m) for k in waits.nonzero()[0])

    def _cap_switches(self, max_switches: int) -> None:
        """Allow at most *max_switches* switches in each run."""
        z3 = self._z3
        for task, chain in zip(self._problem.tasks, self._chains, strict=True):
            for first in range(0, len(chain), len(task.groups)):
                run = chain[first : first + len(task.groups)]
                switched = [z3.If(step.on_second != before.on_second, 1, 0) for before, step in pairwise(run)]
                self._solver.add(z3.Sum([z3.IntVal(0), *switched]) <= max_switches)  # Z3 has no empty sum


CLASS = "a task moves on as soon as a step has ended; a step whose data is there may wait for any length of time"
ROUNDED = f"times in {TICKS} parts of the longest step"


def solve_like_the_paper(problem: Problem, limits: TaskLimits | None = None, time_limit_s: float = 60.0) -> Solution:
    """Solve by Z3, in the form of ``solver.solve``: the least makespan, or the best schedule within the time limit.

    Raises WorkloadError if there is an energy budget or if Z3 finds no schedule in time.
    """
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
    improvement = Improvement(result.seconds, outcome.makespan_s, bound, result.schedule)
    return Solution(
        outcome, baselines={"z3": outcome}, within=("z3",), improvements=(improvement,), certificate=certificate
    )
