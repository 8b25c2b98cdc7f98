"""The problem without contention, solved by CP-SAT (ortools): a lower bound for the real one, and a first schedule.

Contention only makes steps longer, and a step that ends early delays no other: shrink every step of a contended
schedule to its stand-alone time, and the result is a schedule without contention. So no schedule, whether it is
event-aligned or idles at will, beats the bound of this module.

All times become whole ticks, rounded down, so that the bound stays a bound; the schedule's own value is computed
afterwards in seconds. Throughput is not linear: each task's runs per second are bounded from above by chords of 1/T,
so that the bound holds and is at most a few parts in ten thousand too high.

Indices: n, m: tasks; i: a step of a task; u: a unit; -1: the outside.
An *expression* is a linear expression over CP-SAT's variables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, permutations
from math import ceil, floor, inf, isfinite
from typing import Any

from weft.base.errors import InputError
from weft_map.limits import check_switches, most_switches, shortest
from weft_map.problem import Objective, Problem, Task
from weft_map.schedule import Schedule, Units

TICKS = 1 << 22
"""Ticks in the longest time that the model can express; rounding shortens a step or a move by less than one tick."""
CHORDS = 48
"""Number of straight pieces that replace the curve 1/T."""
REWARD = 1 << 20
"""The throughput of the best task, alone, in the model's whole numbers."""

MOST_ORDERS = 720
"""Cap on the orders of whole tasks that are tried as first plans: all orders of six tasks."""

Starts = tuple[tuple[float, ...], ...]  # [task][step]: seconds


@dataclass(frozen=True, slots=True)
class BlindResult:
    """The best schedule found without contention, and a bound that no such schedule can beat."""

    schedule: Schedule
    """The schedule, with planned starts as early as the order of its steps on each unit allows."""
    value_s: float
    """Value of the schedule without contention: its makespan; for throughput the negated runs per second."""
    bound_s: float
    """No schedule, with or without contention, has a smaller value."""
    proved: bool
    """Whether the schedule is proved optimal; value and bound then differ by rounding only."""


def contention_free(
    problem: Problem,
    objective: Objective,
    *,
    time_limit_s: float,
    max_switches: int | None = None,
    seed: int = 0,
    hint: Schedule | None = None,
) -> BlindResult:
    """Find the best schedule without contention.

    *max_switches* caps the changes of unit between the groups of a run. *hint* is a schedule to start from. One
    thread searches, so the result depends on the seed alone, unless the time limit ends the search. Raises
    WorkloadError if *max_switches* are too few, and InputError if ortools is not installed.
    """
    check_switches(problem, max_switches)
    cp_model = _import_cp_model()
    shortest_runs = [shortest(problem, n, max_switches) for n in range(len(problem.tasks))]
    mappings: list[Units] = [tuple(units for _, units in shortest_runs)]
    if hint and (max_switches is None or most_switches(problem, hint.units) <= max_switches):
        mappings.append(hint.units)
    plans = (_plan(problem, objective, units, sequence) for units, sequence in _first_plans(problem, mappings))
    best = min(plans, key=_value)
    model = _CpModel(cp_model.CpModel(), problem, [alone_s for alone_s, _ in shortest_runs], max_switches)
    model.set_objective(objective)
    _, start = best
    model.hint(start)
    solver = _make_solver(cp_model, time_limit_s, seed)
    status = solver.solve(model.cp)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        best = min(best, _plan(problem, objective, *model.read(solver)), key=_value)
    value, schedule = best
    bound = min(value, model.bound(solver.best_objective_bound, objective))
    return BlindResult(schedule, value, bound, status == cp_model.OPTIMAL)


def placed(problem: Problem, units: Units, sequence: Sequence[int]) -> tuple[Starts, tuple[float, ...]]:
    """Return the starts of all steps and the ends of all tasks without contention, in seconds.

    sequence: the task of each step to place next; each step starts as early as its unit and its predecessors allow.
    """
    tables = problem.tables
    free_s = [[0.0] * int(count) for count in tables.instances]
    starts_s: list[list[float]] = [[] for _ in units]
    ready_s, finish_s = [0.0] * len(units), [0.0] * len(units)
    for n in sequence:
        i = len(starts_s[n])
        unit = units[n][i]
        if i == 0:
            ready_s[n] = max((finish_s[m] for m in tables.waits[n].nonzero()[0]), default=0.0)
        lane_free_s = free_s[unit]
        instance = lane_free_s.index(min(lane_free_s))
        start_s = max(lane_free_s[instance], ready_s[n] + float(tables.move[n, i, units[n][i - 1] if i else -1, unit]))
        starts_s[n].append(start_s)
        ready_s[n] = lane_free_s[instance] = start_s + float(tables.time[n, i, unit])
        finish_s[n] = ready_s[n] + float(tables.leave[n, unit])
    return tuple(tuple(row) for row in starts_s), tuple(finish_s)


def first_come_order(problem: Problem, units: Units) -> list[int]:
    """Return the order in which steps start, without contention, if the step that can start first always goes first.

    One entry per step: the number of its task.
    """
    tables = problem.tables
    free_s = [[0.0] * int(count) for count in tables.instances]
    done, ready_s, finish_s = [0] * len(units), [0.0] * len(units), [inf] * len(units)
    sequence: list[int] = []

    def earliest_start(n: int) -> tuple[float, float, int]:
        """Sort key of task *n*: when its next step can start, when it arrives on its unit, and the task's number."""
        i = done[n]
        if i == 0:
            ready_s[n] = max((finish_s[m] for m in tables.waits[n].nonzero()[0]), default=0.0)
        arrival_s = ready_s[n] + float(tables.move[n, i, units[n][i - 1] if i else -1, units[n][i]])
        return max(arrival_s, min(free_s[units[n][i]])), arrival_s, n

    while unfinished := [n for n in range(len(units)) if done[n] < len(units[n])]:
        start_s, _, n = min(earliest_start(n) for n in unfinished)
        unit = units[n][done[n]]
        ready_s[n] = start_s + float(tables.time[n, done[n], unit])
        free_s[unit].remove(min(free_s[unit]))
        free_s[unit].append(ready_s[n])
        done[n] += 1
        if done[n] == len(units[n]):
            finish_s[n] = ready_s[n] + float(tables.leave[n, unit])
        sequence.append(n)
    return sequence


def _first_plans(problem: Problem, mappings: Iterable[Units]) -> Iterator[tuple[Units, list[int]]]:
    """Yield plans to start from, as units and the sequence of tasks that ``placed`` takes.

    For each mapping: first come, first served; and one whole task after the other, in all orders that respect which
    task waits for which.
    """
    orders = islice(permutations(range(len(problem.tasks))), MOST_ORDERS)
    allowed = [order for order in orders if _is_allowed_order(problem, order)]
    for units in mappings:
        yield units, first_come_order(problem, units)
        for order in allowed:
            yield units, [n for n in order for _ in units[n]]


def _is_allowed_order(problem: Problem, order: Sequence[int]) -> bool:
    """Whether no task comes before a task that it waits for."""
    waits = problem.tables.waits
    return not any(waits[n, m] for position, n in enumerate(order) for m in order[position:])


def _plan(problem: Problem, objective: Objective, units: Units, sequence: Sequence[int]) -> tuple[float, Schedule]:
    """The schedule that ``placed`` makes: first its value (to be minimised) without contention, then the schedule."""
    starts_s, finish_s = placed(problem, units, sequence)
    value = max(finish_s) if objective == "latency" else -sum(map(_rate, problem.tasks, finish_s))
    return value, Schedule(units, starts_s=starts_s, made_by="contention-free")


def _value(plan: tuple[float, Schedule]) -> float:
    return plan[0]


def _import_cp_model() -> Any:
    """Import ortools' CP-SAT; raises InputError if it is not installed."""
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise InputError(f"CP-SAT needs {error.name}, which is not installed; pip install 'weft[map]'") from error
    return cp_model


def _make_solver(cp_model: Any, time_limit_s: float, seed: int) -> Any:
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.random_seed = seed
    solver.parameters.num_workers = 1
    # paths and loads are linear; without their relaxation some proofs take twenty times as long
    solver.parameters.linearization_level = 2
    return solver


def _rate(task: Task, finish_s: float) -> float:
    """Return runs per second; a task that takes no time counts as one of a picosecond."""
    return task.repeats / max(finish_s, 1e-12)


class _CpModel:
    """The constraint model for CP-SAT, in ticks.

    Constraints: each step runs on one unit; each move is a flow from one unit to one unit; a step starts after the
    step before it and the move; a unit runs no more steps at a time than it has instances.
    """

    def __init__(self, cp: Any, problem: Problem, alone_s: Sequence[float], max_switches: int | None) -> None:
        """cp: an empty ``cp_model.CpModel``. alone_s: the shortest duration of each task without other tasks."""
        self.cp = cp
        self._problem, self._alone_s = problem, alone_s
        # If all tasks run in a row, each at its shortest, the last one ends after sum(alone_s); no optimum is longer.
        self._tick_s = max(sum(alone_s), 1e-9) / TICKS
        self._best_rate = max(map(_rate, problem.tasks, alone_s))
        self._runs_on: list[list[dict[int, Any]]] = []
        """[task][step]: unit -> variable that is 1 if the step runs on it."""
        self._start: list[list[Any]] = []
        """[task][step]: variable of the start tick."""
        self._busy: list[list[tuple[Any, Any]]] = [[] for _ in problem.units]
        """[unit]: optional intervals of the steps that it may run, each with its ticks (0 if it runs elsewhere)."""
        self._switches: list[list[Any]] = [[] for _ in problem.tasks]
        """[task]: for each pair of groups in each run, the number of switches (0 or 1) as an expression."""
        self._finish = [self._add_task(n) for n in range(len(alone_s))]
        """[task]: its end in ticks, as an expression."""
        for n, waits in enumerate(problem.tables.waits):
            if max_switches is not None:
                self._cap_switches(n, max_switches)
            for m in waits.nonzero()[0]:
                self.cp.add(self._start[n][0] - self._entry_ticks(n) >= self._finish[m])
        for busy, count in zip(self._busy, problem.tables.instances, strict=True):
            if count == 1:
                self.cp.add_no_overlap([interval for interval, _ in busy])
            else:
                self.cp.add_cumulative([interval for interval, _ in busy], [1] * len(busy), int(count))

    def set_objective(self, objective: Objective) -> None:
        """Minimise the makespan, or maximise the throughput."""
        last = self.cp.new_int_var(0, TICKS, "")
        for finish in self._finish:
            self.cp.add(last >= finish)
        # Implied by the intervals, but the linear relaxation is tighter with it.
        for busy, count in zip(self._busy, self._problem.tables.instances, strict=True):
            self.cp.add(sum(ticks for _, ticks in busy) <= int(count) * last)
        if objective == "latency":
            self.cp.minimize(last)
        else:
            self.cp.maximize(sum(self._reward(n) for n in range(len(self._finish))))

    def hint(self, schedule: Schedule) -> None:
        """Give the solver *schedule*, with its planned starts, as a solution to start from."""
        starts_s = schedule.starts_s or ()
        for n, row in enumerate(schedule.units):
            for i, unit in enumerate(row):
                for other, chosen in self._runs_on[n][i].items():
                    self.cp.add_hint(chosen, other == unit)
                self.cp.add_hint(self._start[n][i], min(TICKS, self._ticks(starts_s[n][i])))

    def read(self, solver: Any) -> tuple[Units, list[int]]:
        """Return the mapping of the solver's solution, and the task of each step in the order of their starts."""
        units = tuple(
            tuple(next(unit for unit, chosen in step.items() if solver.boolean_value(chosen)) for step in row)
            for row in self._runs_on
        )
        steps = []
        for n, row in enumerate(self._start):
            for i, start in enumerate(row):
                begin = solver.value(start)
                end = begin + self._ticks(self._problem.tables.time[n, i, units[n][i]])
                # At equal starts, steps without length and predecessors come first, as ``placed`` needs them.
                steps.append((begin, end, self._depth(n), i, n))
        return units, [n for *_, n in sorted(steps)]

    def bound(self, objective_value: float, objective: Objective) -> float:
        """Return a lower bound of the value: seconds, or negated runs per second.

        It is the tighter of two bounds: the solver's *objective_value*, and the tasks without each other. It is
        loosened by 1e-12 of its value for rounding errors.
        """
        if objective == "latency":
            return max(objective_value * self._tick_s, *self._alone_s) * (1 - 1e-12)
        rates_alone = sum(map(_rate, self._problem.tasks, self._alone_s))
        return -min(objective_value * self._best_rate / REWARD, rates_alone) * (1 + 1e-12)

    def _ticks(self, seconds: float) -> int:
        return floor(seconds / self._tick_s)

    def _add_task(self, n: int) -> Any:
        """Add variables and constraints for the steps of task *n*; return its end, in ticks, as an expression."""
        tables = self._problem.tables
        self._runs_on.append([])
        self._start.append([])
        end: Any = 0
        for i in range(int(tables.steps[n])):
            units = [u for u, seconds in enumerate(tables.time[n, i]) if isfinite(seconds)]
            runs_on = {u: self.cp.new_bool_var("") for u in units}
            self.cp.add_exactly_one(runs_on.values())
            start = self.cp.new_int_var(0, TICKS, "")
            self._runs_on[n].append(runs_on)
            self._start[n].append(start)
            self.cp.add(start >= end + (self._add_move(n, i) if i else self._entry_ticks(n)))
            ticks = {u: self._ticks(tables.time[n, i, u]) for u in units}
            for u, chosen in runs_on.items():
                interval = self.cp.new_optional_fixed_size_interval_var(start, ticks[u], chosen, "")
                self._busy[u].append((interval, ticks[u] * chosen))
            end = start + sum(ticks[u] * chosen for u, chosen in runs_on.items())
        return end + sum(self._ticks(tables.leave[n, u]) * chosen for u, chosen in self._runs_on[n][-1].items())

    def _entry_ticks(self, n: int) -> Any:
        """Return the ticks before the first step of task *n*, as an expression."""
        enter = self._problem.tables.move[n, 0, -1]
        return sum(self._ticks(enter[u]) * chosen for u, chosen in self._runs_on[n][0].items())

    def _add_move(self, n: int, i: int) -> Any:
        """Add the move of task *n* before its step *i*; return its ticks as an expression.

        Each allowed pair of units, that of the step before and that of the step, has a flow variable; exactly one is 1.
        """
        move = self._problem.tables.move[n, i]
        before, after = self._runs_on[n][i - 1], self._runs_on[n][i]
        flows = {
            (source, target): self.cp.new_bool_var("")
            for source in before
            for target in after
            if isfinite(move[source, target])
        }
        for unit, chosen in before.items():
            self.cp.add(sum(flow for (source, _), flow in flows.items() if source == unit) == chosen)
        for unit, chosen in after.items():
            self.cp.add(sum(flow for (_, target), flow in flows.items() if target == unit) == chosen)
        if i % len(self._problem.tasks[n].groups):  # a move between two runs of a task is no switch
            self._switches[n].append(sum(flow for (source, target), flow in flows.items() if source != target))
        return sum(self._ticks(move[pair]) * flow for pair, flow in flows.items())

    def _cap_switches(self, n: int, max_switches: int) -> None:
        """Allow at most *max_switches* switches of unit in each run of task *n*."""
        pairs_per_run = len(self._problem.tasks[n].groups) - 1
        for begin in range(0, len(self._switches[n]), pairs_per_run or 1):
            self.cp.add(sum(self._switches[n][begin : begin + pairs_per_run]) <= max_switches)

    def _depth(self, n: int) -> int:
        """Return the length of the longest chain of tasks that must end before task *n* starts."""
        return max((1 + self._depth(int(m)) for m in self._problem.tables.waits[n].nonzero()[0]), default=0)

    def _reward(self, n: int) -> Any:
        """Return a variable that bounds a task's part of the throughput from above.

        1/T is not linear: it is replaced by ``CHORDS`` chords, of which the solver selects the one at the task's end.
        """
        # a task that ends after T ticks is worth scale / T
        scale = REWARD / self._best_rate / self._tick_s * self._problem.tasks[n].repeats
        # rounding makes a task shorter by less than two ticks a step, and one on its way out
        least_ticks = max(1, self._ticks(self._alone_s[n]) - 2 * len(self._start[n]) - 1)
        end_ticks = sorted({round(least_ticks * (TICKS / least_ticks) ** (k / CHORDS)) for k in range(CHORDS + 1)})
        ended = self.cp.new_int_var(least_ticks, TICKS, "")
        reward = self.cp.new_int_var(0, ceil(scale / least_ticks) + 1, "")
        self.cp.add(ended >= self._finish[n])
        pieces = []
        for low, high in pairwise(end_ticks):
            piece = self.cp.new_bool_var("")
            reward_at_low, drop = ceil(scale / low), ceil(scale / low) - ceil(scale / high)
            self.cp.add_linear_constraint(ended, low, high).only_enforce_if(piece)
            self.cp.add((high - low) * (reward - 1 - reward_at_low) + drop * (ended - low) <= 0).only_enforce_if(piece)
            pieces.append(piece)
        self.cp.add_exactly_one(pieces)
        return reward
