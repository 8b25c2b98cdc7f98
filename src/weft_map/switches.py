"""Switches of a task: how many a mapping has, the fewest a task can do with, and the error for a cap below that.

A *switch* is a change of unit between two groups of one run; a new run begins where it likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.base.errors import WorkloadError
from weft_map.problem import Problem, Task
from weft_map.schedule import Units


def most_switches(problem: Problem, units: Units) -> int:
    """The switches of the run, of any task, that has the most."""
    return max(
        sum(row[i] != row[i - 1] for i in range(begin + 1, begin + len(task.groups)))
        for task, row in zip(problem.tasks, units, strict=True)
        for begin in range(0, len(row), len(task.groups))
    )


def check_switches(problem: Problem, max_switches: int | None) -> None:
    """Refuse a cap on switches below what a task needs, and say why it needs them."""
    if max_switches is None:
        return
    if max_switches < 0:
        raise WorkloadError(f"max_switches is {max_switches}; must be 0 or more")
    for task in problem.tasks:
        stretches = fewest_stretches(problem, task)
        needed = len(stretches) - 1
        if needed > max_switches:
            raise WorkloadError(
                f"{task.name} needs at least {_count(needed)} ({_reasons(stretches)}) and max_switches is "
                f"{max_switches}, {needed - max_switches} too few; allow {needed} or add costs on other units"
            )


class Stretch(NamedTuple):
    """Groups of one run that can stay on one unit, as many as possible."""

    groups: tuple[str, ...]
    units: tuple[str, ...]
    """The units that may run all of them."""


def fewest_stretches(problem: Problem, task: Task) -> tuple[Stretch, ...]:
    """A run in as few stretches as can be; taking each as long as possible is optimal."""
    stretches: list[Stretch] = []
    names: list[str] = []
    able: tuple[str, ...] = problem.units
    for block in _blocks(task):
        here = tuple(unit for unit in problem.units if all(unit in task.groups[i].costs for i in block))
        both = tuple(unit for unit in able if unit in here)
        if not both:
            stretches.append(Stretch(tuple(names), able))
            names, both = [], here
        able = both
        names += [task.groups[i].name for i in block]
    return (*stretches, Stretch(tuple(names), able))


def _blocks(task: Task) -> list[range]:
    """Groups that must stay together."""
    cuts = [i for i in range(len(task.groups)) if i == 0 or task.groups[i - 1].leave]
    return [range(begin, end) for begin, end in zip(cuts, [*cuts[1:], len(task.groups)], strict=True)]


def _count(switches: int) -> str:
    return f"{switches} switch" if switches == 1 else f"{switches} switches"


def _reasons(stretches: Sequence[Stretch]) -> str:
    shown = [f"{_span(stretch.groups)} on {' or '.join(stretch.units)} only" for stretch in stretches[:4]]
    return ", then ".join(shown) + (", ..." if len(stretches) > 4 else "")


def _span(groups: Sequence[str]) -> str:
    return f"group {groups[0]!r}" if len(groups) == 1 else f"groups {groups[0]!r} to {groups[-1]!r}"
