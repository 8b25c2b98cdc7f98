"""The optimum without contention: what a perfect scheduler without a model of contention would do."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from weft.devices import BandwidthSharing, Soc
from weft_map.limits import TaskLimits
from weft_map.prices import priced, simple_sets
from weft_map.problem import Objective, Problem
from weft_map.schedule import Schedule
from weft_map.search import Search, rules

# Beam of the search: partial schedules that are kept. A wider one finds the optimum more often and takes longer.
WIDTH = 64
CHUNK, MOST_STATES = 1000, 20_000
"""Expanded at a time, and at most; beyond it the best schedule found so far is taken."""
ENDLESS_GB_S = 1e9  # far above the sum of any demands, and finite, so that the arithmetic stays exact


def contention_blind(problem: Problem, objective: Objective) -> tuple[Schedule, ...]:
    """``contention-blind``: the mapping with its planned starts, and left to first come, first served.

    Nothing where the problem is so large that even a dive finds no end."""
    schedule = _best(Problem(without_contention(problem.soc), problem.tasks), objective)
    if schedule is None:
        return ()
    plan = replace(schedule, made_by="contention-blind")
    loose = replace(plan, starts_s=None)
    count = len(problem.tasks)
    turned = [replace(loose, order=tuple(reversed(range(count))))] if count > 1 else []
    return (loose, *turned, plan)


def without_contention(soc: Soc) -> Soc:
    """Return the same SoC with a memory bandwidth that no demand reaches."""
    units = tuple(unit.model_copy(update={"contention": BandwidthSharing()}) for unit in soc.units)
    return soc.model_copy(update={"units": units, "bandwidth_gb_s": ENDLESS_GB_S})


def _best(problem: Problem, objective: Objective) -> Schedule | None:
    given = rules(problem, objective, TaskLimits(), strict=False)
    sets = simple_sets(problem.tables)
    search = Search(problem, given, priced(problem.tables, sets, given.switches), inf)
    search.dive(WIDTH)
    while not search.proved and not search.full and search.expanded < MOST_STATES:
        search.expand(CHUNK)
    return search.schedule
