"""The Python side of the search over event-aligned schedules: its memory, its dives, and states turned into schedules.

The kernels that expand states are compiled (``weft_map.kernels.soc_search``). A ``Search`` holds the states of one
run: it dives for good schedules and, between dives, works towards the proof. ``run_mapping`` is a compiled simulation
of a schedule without planned starts.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf

import numpy as np

from weft_map.kernels import soc_search as kernel
from weft_map.kernels.soc import (
    BOUNDARY,
    DONE,
    HELD,
    LEAVING,
    NOWHERE_EARLIER,
    RUNNING,
    SAME_LATER,
    ActivityPrices,
    SearchRules,
    follow,
    phase_of,
    shift,
    step_of,
    value_of,
)
from weft_map.limits import TaskLimits
from weft_map.problem import Floats, Ints, Objective, Problem, Tables
from weft_map.schedule import Outcome, Schedule
from weft_map.simulator import simulate

FIRST_STATES = 1 << 14
"""States of the first allocation, some MB; the memory doubles when it is full."""
MOST_STATES = 1 << 23
"""Cap on the states in memory: about a gigabyte. A search that needs more ends with a gap."""
DIVE_STATES = 1 << 12
"""States of a dive's memory, plus 8 per step and state of the dive's width; states beyond it are dropped."""
NOISE = 0.01
"""A randomised dive multiplies the bound of each state by up to 1 plus this."""


def make_rules(
    problem: Problem, objective: Objective, limits: TaskLimits, *, strict: bool, deadline_s: float = inf
) -> SearchRules:
    """The rules of a search; schedules that end after *deadline_s* do not count.

    strict: drop only states that certainly lead to nothing better; otherwise also those that are nowhere earlier than
    another state in the same phases, which saves most of the time and is rarely wrong.
    """
    return SearchRules(
        throughput=objective == "throughput",
        repeats=np.array([float(task.repeats) for task in problem.tasks]),
        max_switches=-1 if limits.max_switches is None else limits.max_switches,
        deadline_s=deadline_s,
        budget_j=np.inf if limits.energy_budget_j is None else limits.energy_budget_j,
        dominance=SAME_LATER if strict else NOWHERE_EARLIER,
    )


class Search:
    """One run of the search: the best value so far, the bound, and the states between."""

    def __init__(self, problem: Problem, rules: SearchRules, prices: ActivityPrices, best: float = inf) -> None:
        """prices: for the lower bounds. best: the value of a known schedule; the search looks only for better ones."""
        self._tables, self._rules, self._prices = problem.tables, rules, prices
        tasks, _, units = self._tables.time.shape
        _, price_sets = prices.move.shape
        self._work = kernel.scratch(tasks, units, price_sets, subsets=rules.throughput)
        self._best = np.array([best, -1.0])
        """The best value, and the row of the finished state that has it; -1: it came from outside."""
        self._states, self._table = self._memory(FIRST_STATES)
        self._heap = np.zeros(FIRST_STATES, dtype=np.int64)
        """Rows of states to expand, as a binary heap, least bound first; zeros: it begins with row 0, the root."""
        self._sizes = np.array([1, 1, 0], dtype=np.int64)
        """Number of states, size of the heap, number of expanded states."""
        self.schedule: Schedule | None = None
        """The best schedule of this search; None until one is better than the given value."""
        self.proved = False
        """Whether it is proved that no event-aligned schedule is better."""
        self.full = False
        """Whether the search needs more than ``MOST_STATES`` states."""

    @property
    def best(self) -> float:
        """The value of the best schedule known: seconds, or the negated throughput."""
        return float(self._best[0])

    @property
    def bound(self) -> float:
        """No event-aligned schedule has a better value than this."""
        if self.proved:
            return self.best
        return min(self.best, float(self._states.bound[self._heap[0]]))

    @property
    def first_bound(self) -> float:
        """The bound before any state was expanded: no schedule of any kind is better."""
        return float(self._states.bound[0])

    @property
    def expanded(self) -> int:
        """The number of states that ``expand`` has expanded so far."""
        return int(self._sizes[2])

    def beat(self, value: float) -> None:
        """Look only for schedules that are better than *value* from now on."""
        self._best[0] = min(self._best[0], value)

    def dive(self, width: int, rng: np.random.Generator | None = None) -> bool:
        """Beam search: at every depth keep the *width* states of least bound; return whether that improved the best.

        *rng* adds ``NOISE`` to the bounds, so that repeated dives differ. A dive has its own memory of states, because
        it drops states that the proof needs.
        """
        states, table = self._memory(DIVE_STATES + 8 * width * int(self._tables.steps.sum()))
        # layer: rows of the states at this depth; count: states in memory
        layer, count, best_before = np.zeros(1, dtype=np.int64), 1, self.best
        while len(layer):
            first_new = count
            count = kernel.grow(
                self._tables, self._rules, self._prices, states, table, self._work, layer, count, self._best
            )
            new_rows = first_new + np.flatnonzero(~states.dropped[first_new:count])
            bounds = states.bound[new_rows]
            if rng is not None:
                bounds = bounds * (1 + NOISE * rng.random(len(bounds)))
            layer = new_rows[np.argsort(bounds, kind="stable")[:width]]
        return self._remember(states, best_before)

    def expand(self, steps: int = 2000) -> bool:
        """Expand up to *steps* states, least bound first; return whether that improved the best schedule."""
        best_before = self.best
        verdict = kernel.expand(
            self._tables, self._rules, self._prices, self._states, self._table, self._heap, self._work, steps,
            self._best, self._sizes,
        )  # fmt: skip
        self.proved = verdict == 0
        if verdict == 2:  # the memory of states is full
            self._enlarge()
        return self._remember(self._states, best_before)

    def _memory(self, size: int) -> tuple[kernel.Store, Ints]:
        """Allocate *size* states and their hash table; the initial state is state 0."""
        states = kernel.store(size, len(self._tables.steps))
        table = np.full(1 << (2 * size - 1).bit_length(), -1, dtype=np.int64)
        kernel.root(self._tables, self._rules, self._prices, states, self._work)
        return states, table

    def _enlarge(self) -> None:
        """Double the memory of the states, or set ``full`` if that would exceed ``MOST_STATES``."""
        count, size = int(self._sizes[0]), 2 * len(self._heap)
        if size > MOST_STATES:
            self.full = True
            return
        old = self._states
        self._states = kernel.store(size, len(self._tables.steps))
        for name, column in self._states._asdict().items():
            column[:count] = getattr(old, name)[:count]
        self._heap = np.concatenate([self._heap, np.zeros(size - len(self._heap), dtype=np.int64)])
        self._table = np.full(1 << (2 * size - 1).bit_length(), -1, dtype=np.int64)
        kernel.relist(self._rules, self._states, count, self._table)

    def _remember(self, states: kernel.Store, best_before: float) -> bool:
        """Read off the schedule if the best value is better than *best_before*; return whether it is."""
        if self.best >= best_before:
            return False
        last_row = int(self._best[1])
        self.schedule = _schedule(self._tables, states, last_row)
        return True


def _schedule(tables: Tables, states: kernel.Store, last_row: int) -> Schedule:
    """Read the unit and the start of every step off the chain of states that ends in *last_row*, a finished state."""
    rows = [last_row]
    while states.parent[rows[-1]] >= 0:
        rows.append(int(states.parent[rows[-1]]))
    rows.reverse()
    units = [[-1] * int(steps) for steps in tables.steps]
    starts = [[0.0] * int(steps) for steps in tables.steps]
    for row, next_row in pairwise(rows):
        for n, steps in enumerate(tables.steps.tolist()):
            phase, step = phase_of(states.code[row, n]), step_of(states.code[row, n])
            if phase in (BOUNDARY, HELD):  # a unit was to be chosen; the next state has the choice
                units[n][step] = int(states.chosen_unit[next_row, n])
            begun_steps = _begun_steps(int(states.code[row, n]), steps)
            if _begun_steps(int(states.code[next_row, n]), steps) > begun_steps:
                starts[n][begun_steps] = float(states.time_s[row])
    return Schedule(tuple(map(tuple, units)), tuple(map(tuple, starts)), made_by="weft")


def _begun_steps(code: int, steps: int) -> int:
    """The number of a task's *steps* that have started; *code* is its packed step, unit and phase."""
    phase, step = phase_of(code), step_of(code)
    if phase == DONE:
        return steps
    return int(step + (phase in (RUNNING, LEAVING)))


MOST_STEPS = 200
"""Cap on the steps of all tasks together up to which delays are tried, because every trial simulates all of them."""
LONGEST, SHORTEST = 1 / 8, 1 / 4096
"""First and last stride (change of a delay) of the pattern search, as shares of the makespan."""


def run_mapping(problem: Problem, schedule: Schedule) -> tuple[float, ...]:
    """The end of each task in seconds under the units and order of *schedule*, without its planned starts."""
    units, order = _units_array(problem, schedule), _order_array(problem, schedule)
    no_delays, starts_s, ended_s = np.zeros(units.shape), np.zeros(units.shape), np.zeros(len(problem.tasks))
    follow(problem.tables, units, order, no_delays, starts_s, ended_s)
    return tuple(ended_s.tolist())


def ends_s(problem: Problem, schedule: Schedule) -> tuple[float, ...]:
    """The end of each task in seconds: compiled if no starts are planned, else simulated."""
    return run_mapping(problem, schedule) if schedule.starts_s is None else simulate(problem, schedule).finish_s


def idle_freely(outcome: Outcome, objective: Objective) -> Schedule:
    """Delay steps where that improves the schedule of *outcome*; return that schedule unchanged if no delay helps.

    A pattern search looks for the best delays. This leaves the class of schedules that the search covers: a step may
    wait for any time, to avoid contention with another step. It proves nothing, but often gains a percent. A problem
    of more than ``MOST_STEPS`` steps is left as it is.
    """
    problem, schedule = outcome.problem, outcome.schedule
    if int(problem.tables.steps.sum()) > MOST_STEPS:
        return schedule
    rules = make_rules(problem, objective, TaskLimits(), strict=True)
    units, order = _units_array(problem, schedule), _order_array(problem, schedule)
    # ``_value``, ``shift`` and ``follow`` write into starts_s and ended_s.
    delays_s, starts_s, ended_s = _delays(outcome), np.zeros(units.shape), np.zeros(len(problem.tasks))
    first_value = _value(problem, rules, units, order, delays_s, ended_s)
    best = _remove_needless_delays(problem, rules, units, order, delays_s, first_value)
    stride_s = outcome.makespan_s * LONGEST
    while stride_s > outcome.makespan_s * SHORTEST:
        better = float(shift(problem.tables, rules, units, order, delays_s, starts_s, ended_s, best, stride_s))
        if better >= best:
            stride_s /= 2
        best = better
    if best >= outcome.value(objective) - 1e-6 * abs(best):  # a smaller gain may be a rounding error
        return schedule
    follow(problem.tables, units, order, delays_s, starts_s, ended_s)
    starts_of_task = tuple(
        tuple(row[:steps].tolist()) for row, steps in zip(starts_s, problem.tables.steps.tolist(), strict=True)
    )
    return replace(schedule, starts_s=starts_of_task, made_by=f"{schedule.made_by}, idling")


def _remove_needless_delays(
    problem: Problem, rules: SearchRules, units: Ints, order: Ints, delays_s: Floats, best: float
) -> float:
    """Set each of *delays_s* to 0, in place, unless the value gets worse than *best*; return the value reached.

    Most delays are needless: the step has to wait for its unit anyway.
    """
    for index in np.argwhere(delays_s > 0):
        delay_s, delays_s[tuple(index)] = delays_s[tuple(index)], 0.0
        value = _value(problem, rules, units, order, delays_s, np.zeros(len(order)))
        if value > best:
            delays_s[tuple(index)] = delay_s
        best = min(best, value)
    return best


def _value(problem: Problem, rules: SearchRules, units: Ints, order: Ints, delays_s: Floats, ended_s: Floats) -> float:
    """The value of the mapping with *delays_s*; the ends of the tasks are written into *ended_s*."""
    follow(problem.tables, units, order, delays_s, np.zeros(units.shape), ended_s)
    return float(value_of(rules, ended_s))


def _delays(outcome: Outcome) -> Floats:
    """[task, step]: seconds from when the step was ready on its unit to its start."""
    tables = outcome.problem.tables
    delays_s = np.zeros(tables.time.shape[:2])
    start_of_step: dict[tuple[int, int], float] = {}
    ready_s: dict[tuple[int, int], float] = {}
    for piece in outcome.pieces:
        start_of_step.setdefault((piece.task, piece.step), piece.start_s)
        ready_s[piece.task, piece.step + 1] = piece.end_s
    for move in outcome.moves:
        ready_s[move.task, move.step] = move.end_s
    for (task, step), start_s in start_of_step.items():
        waited_for = max((outcome.finish_s[m] for m in np.flatnonzero(tables.waits[task])), default=0.0)
        delays_s[task, step] = max(0.0, start_s - ready_s.get((task, step), waited_for))
    return delays_s


def _units_array(problem: Problem, schedule: Schedule) -> Ints:
    """[task, step]: the unit; -1 after the last step of a task."""
    units = np.full(problem.tables.time.shape[:2], -1, dtype=np.int64)
    for n, chosen in enumerate(schedule.units):
        units[n, : len(chosen)] = chosen
    return units


def _order_array(problem: Problem, schedule: Schedule) -> Ints:
    return np.array(schedule.order or range(len(problem.tasks)), dtype=np.int64)
