"""Lower bounds for the search: prices such that any activities that can run at once cost at most 1 per second.

Then what a task still has to do costs at least its cheapest priced way to the end, and all tasks together need at
least the sum of these. Simple sets follow from weights of the units. The best set is a linear programme over
everything that can go on at once, slow-downs included; its optimum bounds every schedule, idle time of any length
included. A set made for a late stretch of the tasks is valid everywhere and better there, so several are kept.
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
"""Cap on the rows of the linear programme; above it steps of similar demand share a price. The time to solve it grows
faster than its rows."""
WEIGHTS = 8
"""Steps from 0 to 1 of a unit's weight in the simple sets."""


class PriceSet(NamedTuple):
    """One set of prices: the cost of a second of each activity."""

    run: Floats
    """What running a step costs: [task, step, unit]."""
    move: Floats
    """Cost of a second in which a task moves between units: [task]."""


def simple_sets(tables: Tables) -> list[PriceSet]:
    """A task and those it waits for one after another; work spread over the units by weights."""
    tasks, _, units = tables.time.shape
    sets = []
    for chain in _chains(tables.waits):
        run, move = np.zeros(tables.time.shape), np.zeros(tasks)
        run[chain], move[chain] = 1.0, 1.0
        sets.append(PriceSet(run, move))
    grid = WEIGHTS if units <= 2 else WEIGHTS // 2
    bars = list(combinations(range(grid + units - 1), units - 1))
    edges = np.array([(-1, *places, grid + units - 1) for places in bars])
    for shares in (edges[:, 1:] - edges[:, :-1] - 1) / (grid * tables.instances):
        sets.append(PriceSet(np.zeros(tables.time.shape) + shares, np.zeros(tasks)))
    return sets


def _chains(waits: npt.NDArray[np.bool_]) -> list[list[int]]:
    """Every line of tasks in which each waits for the one before, beginning with one that waits for none."""

    def lines(task: int) -> Iterator[list[int]]:
        earlier = np.flatnonzero(waits[task]).tolist()
        if not earlier:
            yield [task]
        for other in earlier:
            for line in lines(other):
                yield [*line, task]

    last = [task for task in range(len(waits)) if not waits[:, task].any()]
    every = [line for task in last for line in lines(task)]
    prefixes = {tuple(line[:length]) for line in every for length in range(1, len(line) + 1)}
    return [list(line) for line in sorted(prefixes)]


def priced(tables: Tables, sets: Sequence[PriceSet], switches: int) -> ActivityPrices:
    """The sets side by side, with the cheapest ways to the end with at most *switches* switches (-1: any)."""
    tasks, steps, units = tables.time.shape
    run = np.stack([price_set.run for price_set in sets], axis=-1)
    move = np.stack([price_set.move for price_set in sets], axis=-1)
    spares = max(switches, 0) + 1
    togo = np.zeros((tasks, steps + 1, units + 1, spares, len(sets)))
    energy = np.zeros((tasks, steps + 1, units + 1))
    for n in range(tasks):
        last = int(tables.steps[n])
        togo[n, last, :units] = tables.leave[n][:, None, None] * move[n]
        for i in reversed(range(last)):
            done = tables.time[n, i][:, None] * np.where(np.isinf(tables.time[n, i])[:, None], 1.0, run[n, i])
            ways = tables.move[n, i]
            free = np.where(np.isinf(ways)[..., None], np.inf, np.where(np.isinf(ways), 0.0, ways)[..., None] * move[n])
            energy[n, i] = (np.where(np.isinf(ways), np.inf, 0.0) + tables.energy[n, i] + energy[n, i + 1, :units]).min(
                1
            )
            for spare in range(spares):
                if tables.begins[n, i]:
                    ahead = done + togo[n, i + 1, :units, -1]
                else:
                    ahead = done + togo[n, i + 1, :units, spare]
                    if switches >= 0:
                        fewer = done + togo[n, i + 1, :units, spare - 1] if spare else np.full(done.shape, np.inf)
                        ahead = np.where(np.eye(units + 1, units, dtype=np.bool_)[..., None], ahead, fewer)
                togo[n, i, :, spare] = (free + ahead).min(axis=1)
    return ActivityPrices(np.ascontiguousarray(run), np.ascontiguousarray(move), togo, energy)


class StepKind(NamedTuple):
    """Steps of one task on one unit that share a price."""

    task: int
    unit: int
    steps: tuple[int, ...]
    least_gb_s: float


def best_sets(problem: Problem) -> list[PriceSet]:
    """Solutions of the linear programme: first the set that is best at the beginning, then sets for later stretches.

    Empty if even one price per task and unit would make more than ``MOST_CONSTRAINTS`` rows.
    """
    if _count_together(problem.tables, 1) > MOST_CONSTRAINTS:
        return []
    from ortools.linear_solver import pywraplp  # importing takes 50 ms, and only a search needs it

    tables = problem.tables
    kinds = _kinds(tables)
    limits = _limits(problem.soc, tables, kinds)
    solver = pywraplp.Solver.CreateSolver("GLOP")
    prices = [solver.NumVar(0, 1, "") for _ in range(limits.shape[1])]
    for row in limits:
        limit = solver.Constraint(-solver.infinity(), 1)
        for place in np.flatnonzero(row).tolist():
            limit.SetCoefficient(prices[place], float(row[place]))
    ways = _add_ways(solver, tables, kinds, prices)
    sets = []
    for point in _points(tables.steps):
        objective = solver.Objective()
        objective.Clear()
        objective.SetMaximization()
        for task, step in enumerate(point):
            for variable in ways[task][step]:
                objective.SetCoefficient(variable, 1 / len(ways[task][step]))  # mean over the units it may come from
        if solver.Solve() == pywraplp.Solver.OPTIMAL:
            solution = np.array([max(0.0, variable.solution_value()) for variable in prices])
            sets.append(_spread(tables, kinds, limits, solution))
    return sets


def _kinds(tables: Tables) -> list[StepKind]:
    """One kind per step and unit where that makes a programme of bearable size, else fewer."""
    most = int(tables.steps.max())
    while most > 1 and _count_together(tables, most) > MOST_CONSTRAINTS:
        most = (most + 1) // 2
    kinds = []
    for n, unit in product(range(len(tables.steps)), range(len(tables.instances))):
        allowed = [i for i in range(int(tables.steps[n])) if np.isfinite(tables.time[n, i, unit])]
        by_demand = sorted(allowed, key=lambda i: (tables.demand[n, i, unit], i))
        for part in np.array_split(np.array(by_demand, dtype=np.int64), min(most, len(allowed)) or 1):
            if len(part):
                kinds.append(StepKind(n, unit, tuple(part.tolist()), float(tables.demand[n, part, unit].min())))
    return kinds


def _count_together(tables: Tables, most: int) -> int:
    """About how many things can go on at once with that many kinds per task and unit."""
    sizes = np.minimum(most, tables.steps)
    slots = int(tables.instances.sum())
    counts = [1] + [0] * slots
    for size in sizes.tolist():
        counts = [
            counts[used] + (counts[used - 1] * size * (slots - used + 1) if used else 0) for used in range(slots + 1)
        ]
    return sum(counts)


def _limits(soc: Soc, tables: Tables, kinds: Sequence[StepKind]) -> Floats:
    """A row for everything that can run at once: the most work per second of each kind, and the tasks that move."""
    ordered = _closure(tables.waits).tolist()
    rows = []
    for running in _together(tables, kinds, ordered):
        speeds = {k: _speed(soc, tables, kinds, k, running) for k in running}
        for moving in _movers(ordered, [kinds[k].task for k in running]):
            row = np.zeros(len(kinds) + len(tables.steps))
            row[list(speeds)] = list(speeds.values())
            row[[len(kinds) + n for n in moving]] = 1.0
            rows.append(row)
    return np.array(rows)


def _together(
    tables: Tables, kinds: Sequence[StepKind], ordered: Sequence[Sequence[bool]]
) -> Iterator[tuple[int, ...]]:
    """The kinds that can run at once, in every combination."""
    mine = [[k for k, kind in enumerate(kinds) if kind.task == n] for n in range(len(tables.steps))]
    free = tables.instances.tolist()

    def choices(task: int, running: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if task == len(mine):
            yield running
            return
        yield from choices(task + 1, running)
        if any(ordered[task][kinds[k].task] for k in running):
            return
        for k in mine[task]:
            if free[kinds[k].unit]:
                free[kinds[k].unit] -= 1
                yield from choices(task + 1, (*running, k))
                free[kinds[k].unit] += 1

    yield from choices(0, ())


def _closure(waits: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """[task, other]: whether one is through before the other begins, whichever it is."""
    reach = waits.copy()
    for middle in range(len(waits)):
        reach |= reach[:, middle : middle + 1] & reach[middle : middle + 1]
    both: npt.NDArray[np.bool_] = reach | reach.T
    return both


def _movers(ordered: Sequence[Sequence[bool]], at_work: Sequence[int]) -> list[tuple[int, ...]]:
    """The largest sets of tasks that may be on their way while those are at work."""
    groups: list[tuple[int, ...]] = [()]
    for n in range(len(ordered)):
        if n in at_work or any(ordered[n][other] for other in at_work):
            continue
        beside = {(*(other for other in group if not ordered[n][other]), n) for group in groups}
        groups = [group for group in groups if any(ordered[n][other] for other in group)] + sorted(beside)
    return groups


def _speed(soc: Soc, tables: Tables, kinds: Sequence[StepKind], kind: int, running: Sequence[int]) -> float:
    """The highest speed of a kind next to the others, if those demand as little bandwidth as they can."""
    others = sum(kinds[k].least_gb_s for k in running if k != kind)
    task, unit, steps, _ = kinds[kind]
    return max(1 / soc.slow_down(unit, float(tables.demand[task, i, unit]), others) for i in steps)


def _points(steps: npt.NDArray[np.int64]) -> list[tuple[int, ...]]:
    """Where to make prices for: the beginning, later stretches, and each task half-way before the others begin."""
    even = [tuple((steps * part // 4).tolist()) for part in range(4)]
    ahead = [tuple(np.where(np.arange(len(steps)) == n, steps // 2, 0).tolist()) for n in range(len(steps))]
    return list(dict.fromkeys(even + (ahead if len(steps) > 1 else [])))


def _add_ways(solver: Any, tables: Tables, kinds: Sequence[StepKind], prices: Sequence[Any]) -> list[list[list[Any]]]:
    """[task][step]: variables for the cheapest way from before a step to the end, by unit it may come from."""
    move = prices[len(kinds) :]
    price = {(kind.task, i, kind.unit): prices[k] for k, kind in enumerate(kinds) for i in kind.steps}
    units, endless = len(tables.instances), solver.infinity()
    variables: list[list[list[Any]]] = []
    for n, steps in enumerate(tables.steps.tolist()):
        after = {u: solver.NumVar(-endless, endless, "") for u in range(units) if (n, steps - 1, u) in price}
        for u, variable in after.items():
            _at_most(solver, variable, [(move[n], tables.leave[n, u])])
        ways = []
        for i in reversed(range(steps)):
            before = {}
            for u in range(units) if i else [units]:
                onward = [v for v in after if np.isfinite(tables.move[n, i, u, v])]
                if not onward or (i and (n, i - 1, u) not in price):
                    continue
                before[u] = solver.NumVar(-endless, endless, "")
                for v in onward:
                    way = (move[n], tables.move[n, i, u, v])
                    _at_most(solver, before[u], [way, (price[n, i, v], tables.time[n, i, v]), (after[v], 1.0)])
            ways.append(list(before.values()))
            after = before
        variables.append(ways[::-1])
    return variables


def _at_most(solver: Any, variable: Any, terms: Sequence[tuple[Any, float]]) -> None:
    """Hold a variable under a sum."""
    limit = solver.Constraint(-solver.infinity(), 0)
    limit.SetCoefficient(variable, 1)
    for other, factor in terms:
        limit.SetCoefficient(other, -float(factor))


def _spread(tables: Tables, kinds: Sequence[StepKind], limits: Floats, solution: Floats) -> PriceSet:
    """Prices of kinds as prices of steps, made a hair smaller where the solver's rounding broke a limit."""
    solution = solution / max(1.0, float((limits @ solution).max()))
    prices = np.zeros(tables.time.shape)
    for kind, price in zip(kinds, solution[: len(kinds)].tolist(), strict=True):
        prices[kind.task, list(kind.steps), kind.unit] = price
    return PriceSet(prices, solution[len(kinds) :])
