"""Lower bounds for the search: prices such that any activities that can run together cost at most 1 per second.

The *cost to the end* of a task is the least sum of prices of its remaining steps and moves; all tasks together need at
least as many seconds as the sum of these costs. Simple price sets follow from weights of the units. The best set is the
solution of a linear programme over all activities that can run together, slow-downs included; it bounds every schedule,
also those that idle for any time. A set that was made for a later part of the tasks is valid everywhere and tighter for
that part, so several sets are kept.

Indices: n: a task; i: a step; u, v: units (one more than there are: the outside); k: a ``StepKind``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.devices import Soc
from weft_map.kernels.soc import ActivityPrices
from weft_map.problem import Floats, Problem, Tables

MOST_CONSTRAINTS = 2500
"""Cap on the rows of the linear programme; above it, steps of similar demand share a price. The time to solve the
programme grows faster than the number of its rows."""
WEIGHT_STEPS = 8
"""Steps from 0 to 1 of a unit's weight in the simple sets; half as many with more than two units."""


class PriceSet(NamedTuple):
    """One set of prices: the cost of a second of each activity."""

    run: Floats
    """[task, step, unit]: cost of a second of the step's stand-alone work."""
    move: Floats
    """[task]: cost of a second in which the task moves between units."""


def simple_price_sets(tables: Tables) -> list[PriceSet]:
    """Price sets that need no linear programme.

    One per chain of tasks that wait for each other: only these tasks cost anything, 1 per second. And one per grid
    point of weights of the units: a second on a unit costs its weight, divided by its instances.
    """
    tasks, _, units = tables.time.shape
    sets = []
    for chain in _chains(tables.waits):
        run, move = np.zeros(tables.time.shape), np.zeros(tasks)
        run[chain], move[chain] = 1.0, 1.0
        sets.append(PriceSet(run, move))
    # All splits of `grid` parts over the units: `units - 1` separators among the parts (stars and bars).
    grid = WEIGHT_STEPS if units <= 2 else WEIGHT_STEPS // 2
    separators = list(combinations(range(grid + units - 1), units - 1))
    edges = np.array([(-1, *places, grid + units - 1) for places in separators])
    for weights in (edges[:, 1:] - edges[:, :-1] - 1) / (grid * tables.instances):
        sets.append(PriceSet(np.zeros(tables.time.shape) + weights, np.zeros(tasks)))
    return sets


def _chains(waits: npt.NDArray[np.bool_]) -> list[list[int]]:
    """All chains of tasks, each task waiting for the previous task, from a task that waits for none.

    A single task that waits for none is a chain, too.
    """

    def chains_to(task: int) -> Iterator[list[int]]:
        """Yield all chains that end in *task*."""
        predecessors = np.flatnonzero(waits[task]).tolist()
        if not predecessors:
            yield [task]
        for predecessor in predecessors:
            for chain in chains_to(predecessor):
                yield [*chain, task]

    final_tasks = [task for task in range(len(waits)) if not waits[:, task].any()]
    whole_chains = [chain for task in final_tasks for chain in chains_to(task)]
    prefixes = {tuple(chain[:length]) for chain in whole_chains for length in range(1, len(chain) + 1)}
    return [list(chain) for chain in sorted(prefixes)]


def stack_prices(tables: Tables, sets: Sequence[PriceSet], max_switches: int) -> ActivityPrices:
    """Stack the price *sets* for the kernels, and add the costs to the end, by dynamic programming from the last step.

    max_switches: the most changes of unit within a run; -1: any number.
    """
    tasks, steps, units = tables.time.shape
    run = np.stack([price_set.run for price_set in sets], axis=-1)
    move = np.stack([price_set.move for price_set in sets], axis=-1)
    budgets = max(max_switches, 0) + 1  # values of `left`, the number of switches that are still allowed
    to_end = np.zeros((tasks, steps + 1, units + 1, budgets, len(sets)))
    to_end_j = np.zeros((tasks, steps + 1, units + 1))
    is_same_unit = np.eye(units + 1, units, dtype=np.bool_)[..., None]
    for n in range(tasks):
        count = int(tables.steps[n])
        to_end[n, count, :units] = tables.leave[n][:, None, None] * move[n]
        for i in reversed(range(count)):
            time_s, moves_s = tables.time[n, i], tables.move[n, i]  # [to], [from, to]
            forbidden = np.isinf(moves_s)
            # run_cost: [to, set]; move_cost: [from, to, set]; onward: one of the two shapes.
            # inf * 0 would be nan, hence the two replacements of infinite times before they are multiplied.
            run_cost = time_s[:, None] * np.where(np.isinf(time_s)[:, None], 1.0, run[n, i])
            move_cost = np.where(forbidden[..., None], np.inf, np.where(forbidden, 0.0, moves_s)[..., None] * move[n])
            onward_j = np.where(forbidden, np.inf, 0.0) + tables.energy[n, i] + to_end_j[n, i + 1, :units]
            to_end_j[n, i] = onward_j.min(axis=1)
            for left in range(budgets):
                if tables.begins[n, i]:
                    onward = run_cost + to_end[n, i + 1, :units, -1]  # a new run may switch as often as any
                else:
                    onward = run_cost + to_end[n, i + 1, :units, left]
                    if max_switches >= 0:
                        no_switch = np.full(run_cost.shape, np.inf)
                        switched = run_cost + to_end[n, i + 1, :units, left - 1] if left else no_switch
                        onward = np.where(is_same_unit, onward, switched)
                to_end[n, i, :, left] = (move_cost + onward).min(axis=1)
    return ActivityPrices(np.ascontiguousarray(run), np.ascontiguousarray(move), to_end, to_end_j)


class StepKind(NamedTuple):
    """Steps of one task on one unit that share a price in the linear programme."""

    task: int
    unit: int
    steps: tuple[int, ...]
    least_gb_s: float
    """The smallest demand of any of the steps."""


def best_price_sets(problem: Problem) -> list[PriceSet]:
    """Price sets from the linear programme: one that is best at the beginning, then one per later point of the tasks.

    Empty if even one price per task and unit would make more than ``MOST_CONSTRAINTS`` rows. The variables are the
    prices and the costs to the end; the objective is the sum of the tasks' costs to the end from one point on.
    """
    if _count_together(problem.tables, 1) > MOST_CONSTRAINTS:
        return []
    from ortools.linear_solver import pywraplp  # importing takes 50 ms, and only a search needs it

    tables = problem.tables
    kinds = _kinds(tables)
    limits = _limit_rows(problem.soc, tables, kinds)
    solver = pywraplp.Solver.CreateSolver("GLOP")
    prices = [solver.NumVar(0, 1, "") for _ in range(limits.shape[1])]  # of each kind, then of each task's moves
    for row in limits:
        limit = solver.Constraint(-solver.infinity(), 1)
        for column in np.flatnonzero(row).tolist():
            limit.SetCoefficient(prices[column], float(row[column]))
    costs_to_end = _add_end_costs(solver, tables, kinds, prices)
    sets = []
    for point in _objective_points(tables.steps):
        objective = solver.Objective()
        objective.Clear()
        objective.SetMaximization()
        for task, step in enumerate(point):
            variables = costs_to_end[task][step]
            for variable in variables:
                objective.SetCoefficient(variable, 1 / len(variables))  # mean over the units it may come from
        if solver.Solve() == pywraplp.Solver.OPTIMAL:
            solution = np.array([max(0.0, variable.solution_value()) for variable in prices])
            sets.append(_price_set(tables, kinds, limits, solution))
    return sets


def _kinds(tables: Tables) -> list[StepKind]:
    """One kind per task, step and unit; in a large problem, steps of similar demand share one kind."""
    max_kinds = int(tables.steps.max())
    while max_kinds > 1 and _count_together(tables, max_kinds) > MOST_CONSTRAINTS:
        max_kinds = (max_kinds + 1) // 2
    kinds = []
    for n, unit in product(range(len(tables.steps)), range(len(tables.instances))):
        allowed = [i for i in range(int(tables.steps[n])) if np.isfinite(tables.time[n, i, unit])]
        by_demand = sorted(allowed, key=lambda i: (tables.demand[n, i, unit], i))
        for steps in np.array_split(np.array(by_demand, dtype=np.int64), min(max_kinds, len(allowed)) or 1):
            if len(steps):
                kinds.append(StepKind(n, unit, tuple(steps.tolist()), float(tables.demand[n, steps, unit].min())))
    return kinds


def _count_together(tables: Tables, max_kinds: int) -> int:
    """Estimate of the number of sets of kinds that can run together, with up to *max_kinds* kinds per task and unit."""
    sizes = np.minimum(max_kinds, tables.steps)
    slots = int(tables.instances.sum())
    counts = [1] + [0] * slots  # counts[k]: sets that occupy k instances, of the tasks so far
    for size in sizes.tolist():
        counts = [
            counts[used] + (counts[used - 1] * size * (slots - used + 1) if used else 0) for used in range(slots + 1)
        ]
    return sum(counts)


def _limit_rows(soc: Soc, tables: Tables, kinds: Sequence[StepKind]) -> Floats:
    """The rows of the linear programme: [set of activities, price]; prices times a row must be at most 1.

    There is a row per set of kinds that can run together, with the highest speed of each kind, and 1 for each task that
    can move meanwhile.
    """
    exclusive = _exclude_each_other(tables.waits).tolist()
    rows = []
    for running in _together(tables, kinds, exclusive):
        speeds = {k: _speed(soc, tables, kinds, k, running) for k in running}
        for moving in _movers(exclusive, [kinds[k].task for k in running]):
            row = np.zeros(len(kinds) + len(tables.steps))
            row[list(speeds)] = list(speeds.values())
            row[[len(kinds) + n for n in moving]] = 1.0
            rows.append(row)
    return np.array(rows)


def _together(
    tables: Tables, kinds: Sequence[StepKind], exclusive: Sequence[Sequence[bool]]
) -> Iterator[tuple[int, ...]]:
    """Yield every set of kinds (indices) that can run together: one per task, as the units' instances allow.

    exclusive[task][other]: the two tasks never run at the same time.
    """
    kinds_of_task = [[k for k, kind in enumerate(kinds) if kind.task == n] for n in range(len(tables.steps))]
    free_instances = tables.instances.tolist()

    def choices(task: int, running: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield *running* extended by kinds of *task* and later tasks; changes *free_instances* and restores it."""
        if task == len(kinds_of_task):
            yield running
            return
        yield from choices(task + 1, running)
        if any(exclusive[task][kinds[k].task] for k in running):
            return
        for k in kinds_of_task[task]:
            if free_instances[kinds[k].unit]:
                free_instances[kinds[k].unit] -= 1
                yield from choices(task + 1, (*running, k))
                free_instances[kinds[k].unit] += 1

    yield from choices(0, ())


def _exclude_each_other(waits: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """[task, other]: whether one of the two waits for the other's end, directly or through further tasks."""
    reachable = waits.copy()  # its transitive closure (Warshall)
    for middle in range(len(waits)):
        reachable |= reachable[:, middle : middle + 1] & reachable[middle : middle + 1]
    exclusive: npt.NDArray[np.bool_] = reachable | reachable.T
    return exclusive


def _movers(exclusive: Sequence[Sequence[bool]], working: Sequence[int]) -> list[tuple[int, ...]]:
    """The maximal sets of tasks that can all move while the tasks *working* run; *exclusive* as in ``_together``."""
    mover_sets: list[tuple[int, ...]] = [()]
    for n in range(len(exclusive)):
        if n in working or any(exclusive[n][other] for other in working):
            continue
        with_task = {(*(other for other in movers if not exclusive[n][other]), n) for movers in mover_sets}
        still_maximal = [movers for movers in mover_sets if any(exclusive[n][other] for other in movers)]
        mover_sets = still_maximal + sorted(with_task)
    return mover_sets


def _speed(soc: Soc, tables: Tables, kinds: Sequence[StepKind], kind: int, running: Sequence[int]) -> float:
    """The highest speed (at most 1) of any step of *kind* while the kinds *running* demand the least they can."""
    others = sum(kinds[k].least_gb_s for k in running if k != kind)
    task, unit, steps, _ = kinds[kind]
    return max(1 / soc.slow_down(unit, float(tables.demand[task, i, unit]), others) for i in steps)


def _objective_points(steps: npt.NDArray[np.int64]) -> list[tuple[int, ...]]:
    """The points, each a step per task, from which prices are made as tight as possible.

    All tasks at 0, 1/4, 1/2 and 3/4 of their steps; and each task half-way while the others are at their beginning.
    """
    together = [tuple((steps * part // 4).tolist()) for part in range(4)]
    one_ahead = [tuple(np.where(np.arange(len(steps)) == n, steps // 2, 0).tolist()) for n in range(len(steps))]
    return list(dict.fromkeys(together + (one_ahead if len(steps) > 1 else [])))


def _add_end_costs(
    solver: Any, tables: Tables, kinds: Sequence[StepKind], prices: Sequence[Any]
) -> list[list[list[Any]]]:
    """Add a variable per task, step and unit that the task may come from: its cost to the end.

    Constraints keep each variable at or below the cost of every choice of units. Returns the variables by [task][step].
    prices: variables for the price of each kind, then of each task's moves.
    """
    move = prices[len(kinds) :]  # [task]: price of its moves
    price = {(kind.task, i, kind.unit): prices[k] for k, kind in enumerate(kinds) for i in kind.steps}
    units, infinity = len(tables.instances), solver.infinity()
    variables: list[list[list[Any]]] = []
    for n, steps in enumerate(tables.steps.tolist()):
        costs_after = {u: solver.NumVar(-infinity, infinity, "") for u in range(units) if (n, steps - 1, u) in price}
        for u, variable in costs_after.items():
            _add_upper_bound(solver, variable, [(move[n], tables.leave[n, u])])
        costs_of_task = []
        for i in reversed(range(steps)):
            costs_before = {}
            for u in range(units) if i else [units]:  # the first step comes from outside
                next_units = [v for v in costs_after if np.isfinite(tables.move[n, i, u, v])]
                if not next_units or (i and (n, i - 1, u) not in price):
                    continue
                costs_before[u] = solver.NumVar(-infinity, infinity, "")
                for v in next_units:
                    moving, running = (move[n], tables.move[n, i, u, v]), (price[n, i, v], tables.time[n, i, v])
                    _add_upper_bound(solver, costs_before[u], [moving, running, (costs_after[v], 1.0)])
            costs_of_task.append(list(costs_before.values()))
            costs_after = costs_before
        variables.append(costs_of_task[::-1])
    return variables


def _add_upper_bound(solver: Any, variable: Any, terms: Sequence[tuple[Any, float]]) -> None:
    """Add the constraint variable <= sum of other * factor over *terms*, which are pairs (other variable, factor)."""
    limit = solver.Constraint(-solver.infinity(), 0)
    limit.SetCoefficient(variable, 1)
    for other, factor in terms:
        limit.SetCoefficient(other, -float(factor))


def _price_set(tables: Tables, kinds: Sequence[StepKind], limits: Floats, solution: Floats) -> PriceSet:
    """Turn prices of kinds into prices of steps, scaled down if the solver's rounding broke one of *limits*.

    solution: the price of each kind, then of each task's moves.
    """
    solution = solution / max(1.0, float((limits @ solution).max()))
    prices = np.zeros(tables.time.shape)
    for kind, price in zip(kinds, solution[: len(kinds)].tolist(), strict=True):
        prices[kind.task, list(kind.steps), kind.unit] = price
    return PriceSet(prices, solution[len(kinds) :])
