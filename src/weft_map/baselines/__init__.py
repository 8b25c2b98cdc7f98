"""Mappings by other methods, to be judged in the same simulator and to start our own search from.

Each baseline returns candidates: mappings without planned starts, where a step begins as soon as its data is there
and its unit free (``gpu-only`` and shared ``per-unit`` add planned starts for throughput). The caller simulates all
of them and keeps the best of each. None of these methods models contention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, product
from math import isfinite

from weft.devices import BandwidthSharing, Soc
from weft_map.baselines.chains import ChainTimes, Mapping, alone_s, candidates, chains_of, fallback, in_series
from weft_map.baselines.published import h2h, heft, herald, mensa
from weft_map.limits import TaskLimits
from weft_map.prices import simple_price_sets, stack_prices
from weft_map.problem import Objective, Problem
from weft_map.schedule import Schedule
from weft_map.search import Search, make_rules

# Width of the dive (beam search). A wider dive finds the optimum more often and takes longer.
WIDTH = 64
CHUNK, MOST_STATES = 1000, 20_000
"""States to expand at a time, and in all; after that the best schedule found so far is taken."""
UNLIMITED_GB_S = 1e9  # far above the sum of any demands, and finite, so that the arithmetic stays exact


def contention_blind(problem: Problem, objective: Objective) -> tuple[Schedule, ...]:
    """``contention-blind``: the best schedule without contention, and its mapping without planned starts.

    Empty if the problem is so large that even a dive finds no complete schedule.
    """
    schedule = _search_best(Problem(without_contention(problem.soc), problem.tasks), objective)
    if schedule is None:
        return ()
    plan = replace(schedule, made_by="contention-blind")
    without_starts = replace(plan, starts_s=None)
    tasks = len(problem.tasks)
    reversed_order = [replace(without_starts, order=tuple(reversed(range(tasks))))] if tasks > 1 else []
    return (without_starts, *reversed_order, plan)


def without_contention(soc: Soc) -> Soc:
    """Return the same SoC with a memory bandwidth that no demand reaches."""
    units = tuple(unit.model_copy(update={"contention": BandwidthSharing()}) for unit in soc.units)
    return soc.model_copy(update={"units": units, "bandwidth_gb_s": UNLIMITED_GB_S})


def _search_best(problem: Problem, objective: Objective) -> Schedule | None:
    """The best schedule that a dive and ``MOST_STATES`` expanded states find; None if none was completed."""
    rules = make_rules(problem, objective, TaskLimits(), strict=False)
    prices = stack_prices(problem.tables, simple_price_sets(problem.tables), rules.max_switches)  # for lower bounds
    search = Search(problem, rules, prices)
    search.dive(WIDTH)
    while not search.proved and not search.full and search.expanded < MOST_STATES:
        search.expand(CHUNK)
    return search.schedule


MOST_ASSIGNMENTS = 4096
"""If there are more ways to give each model a unit, a single assignment is built greedily."""
MOST_CANDIDATES = 8
"""Assignments handed to the simulator, the most promising first."""


def one_unit(problem: Problem, objective: Objective) -> tuple[Schedule, ...]:
    """``gpu-only``: all models on the unit with the least total time, as vendors' tools do it.

    A stretch that may not run on that unit falls back to the unit that is fastest for the stretch. Only units that may
    run at least half of the stretches are considered, if there are any.
    """
    chains = chains_of(problem)
    homes = _capable_units(chains) or list(chains.units)
    mappings = [[fallback(chains, n, home) for n in chains.tasks] for home in homes]
    totals_s = [sum(alone_s(chains, n, units[n]) * chains.repeats[n] for n in chains.tasks) for units in mappings]
    best = mappings[totals_s.index(min(totals_s))]
    return candidates("gpu-only", chains, [best]) + in_series("gpu-only", chains, best, objective)


def per_unit(problem: Problem, objective: Objective) -> tuple[Schedule, ...]:
    """``per-unit``: each model on a unit of its own, in the best permutation; with more models than units, some share.

    A stretch that may not run on its model's unit (its *home*) falls back as in ``one_unit``.
    """
    chains = chains_of(problem)
    units_by_home = [[fallback(chains, n, home) for home in chains.units] for n in chains.tasks]  # [task][home]: units
    # [task][home]: seconds of the task without others
    alone_by_home = [
        [alone_s(chains, n, units) * chains.repeats[n] for units in units_by_home[n]] for n in chains.tasks
    ]
    assignments = _assignments(chains, alone_by_home)
    assignments.sort(key=lambda homes: _load_key(chains, alone_by_home, homes))
    mappings: list[Mapping] = [
        [units_by_home[n][home] for n, home in enumerate(homes)] for homes in assignments[:MOST_CANDIDATES]
    ]
    units_are_shared = len(chains.tasks) > sum(chains.instances)
    series = [in_series("per-unit", chains, mapping, objective) for mapping in mappings if units_are_shared]
    return tuple(dict.fromkeys(chain(candidates("per-unit", chains, mappings), *series)))


def _capable_units(chains: ChainTimes) -> list[int]:
    """Units that may run at least half of all stretches."""
    stretches = [times for task in chains.time for times in task]
    return [unit for unit in chains.units if 2 * sum(isfinite(times[unit]) for times in stretches) >= len(stretches)]


def _assignments(chains: ChainTimes, alone: Sequence[Sequence[float]]) -> list[tuple[int, ...]]:
    """All sensible ways to give each task a unit; a single greedy one if there are too many.

    alone[task][unit]: seconds of the task with that home. With enough instances for all tasks no instance is shared;
    otherwise none is left out.
    """
    tasks = len(chains.tasks)
    if len(chains.units) ** tasks > MOST_ASSIGNMENTS:
        return [_assign_greedily(chains, alone)]
    enough = tasks <= sum(chains.instances)
    return [homes for homes in product(chains.units, repeat=tasks) if _uses_instances(chains, Counter(homes), enough)]


def _uses_instances(chains: ChainTimes, tasks_of_unit: Counter[int], enough: bool) -> bool:
    """Whether the assignment shares no instance if there are enough for all tasks, and leaves none out otherwise.

    tasks_of_unit: unit -> number of tasks that it gets.
    """
    if enough:
        return all(tasks_of_unit[unit] <= chains.instances[unit] for unit in tasks_of_unit)
    return all(tasks_of_unit[unit] >= chains.instances[unit] for unit in chains.units)


def _assign_greedily(chains: ChainTimes, alone: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Give tasks their units one after another, the longest first, each the unit on which it ends first.

    alone: as in ``_assignments``.
    """
    loads = [[0.0] * count for count in chains.instances]  # [unit][instance]: seconds of its tasks
    homes = [0] * len(alone)
    for n in sorted(chains.tasks, key=lambda n: -min(alone[n])):
        homes[n] = min(chains.units, key=lambda unit: min(loads[unit]) + alone[n][unit])
        loads_of_unit = loads[homes[n]]
        loads_of_unit[loads_of_unit.index(min(loads_of_unit))] += alone[n][homes[n]]
    return tuple(homes)


def _load_key(chains: ChainTimes, alone: Sequence[Sequence[float]], homes: Sequence[int]) -> tuple[float, float]:
    """Sort key of an assignment: a lower bound of its makespan, then the sum of the loads.

    The bound is the largest load of a unit per instance, or the longest task if that is longer. alone: as in
    ``_assignments``; homes: the unit of each task.
    """
    loads = [0.0] * len(chains.instances)
    for n, home in enumerate(homes):
        loads[home] += alone[n][home] / chains.instances[home]
    longest = max(alone[n][home] for n, home in enumerate(homes))
    return max(*loads, longest), sum(loads)


Baseline = Callable[[Problem, Objective], tuple[Schedule, ...]]


def either_order(method: Baseline) -> Baseline:
    """Wrap a list scheduler: run it with the tasks as listed and in reverse, since the order changes its result."""

    def in_both_orders(problem: Problem, objective: Objective) -> tuple[Schedule, ...]:
        listed = method(problem, objective)
        if len(problem.tasks) == 1:
            return listed
        from_reversed = method(Problem(problem.soc, problem.tasks[::-1]), objective)
        return tuple(dict.fromkeys((*listed, *(_reverse_tasks(schedule) for schedule in from_reversed))))

    return in_both_orders


def _reverse_tasks(schedule: Schedule) -> Schedule:
    """The schedule of a problem whose tasks were reversed, for the tasks in their own order."""
    last = len(schedule.units) - 1
    order = schedule.order or range(last + 1)
    starts = schedule.starts_s[::-1] if schedule.starts_s else None
    return replace(schedule, units=schedule.units[::-1], starts_s=starts, order=tuple(last - task for task in order))


BASELINES: dict[str, Baseline] = {
    "gpu-only": one_unit,
    "per-unit": per_unit,
    "mensa": mensa,
    "herald": either_order(herald),
    "h2h": either_order(h2h),
    "heft": either_order(heft),
    "contention-blind": contention_blind,
}
"""Baselines by the names that a user may write. The last searches; all others take a few milliseconds together."""

__all__ = ["BASELINES", "Baseline"]
