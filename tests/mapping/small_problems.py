"""Mapping problems of a few groups, by hand and at random."""

from __future__ import annotations

from itertools import product
from math import isfinite
from random import Random

from weft.devices.soc import BandwidthSharing, Pccs, Soc, Unit
from weft_map.problem import Group, Problem, Task, UnitCost

TIGHT = Pccs(normal_bw=20.0, intensive_bw=90.0, mrmc_pct=5.0, pbw=120.0, tbwdc=60.0, cbp=50.0, rate_n=1.0)


def soc(*units: str, instances: int = 1, contention: Pccs | BandwidthSharing = TIGHT) -> Soc:
    """One instance of each unit but the last."""
    counts = [1] * (len(units) - 1) + [instances]
    made = (Unit(name=u, instances=k, contention=contention) for u, k in zip(units, counts, strict=True))
    return Soc(name="board", bandwidth_gb_s=120.0, units=tuple(made))


def group(name: str, *times_ms: float | None, move_ms: float = 0.0, leave: bool = True) -> Group:
    """Times on gpu, dla and dsp; None where a unit may not run it. *move_ms* is paid on the way in."""
    units = zip(("gpu", "dla", "dsp"), times_ms, strict=False)
    costs = {u: UnitCost(t / 1000, 50.0, in_s=move_ms / 1000) for u, t in units if t is not None}
    return Group(name, costs, leave)


def model(name: str, *groups: Group, repeats: int = 1, after: tuple[str, ...] = ()) -> Task:
    return Task(name, groups, after, repeats)


def pair(*tasks: Task) -> Problem:
    return Problem(soc("gpu", "dla"), tasks)


def random_problem(seed: int, *, tasks: int = 2, groups: int = 4, plain: bool = False) -> Problem:
    """Two or three units; forbidden units, groups that must stay, pipelines, repeats and several instances."""
    draw = Random(seed)
    units = ("gpu", "dla", "dsp")[: 2 if plain else draw.choice((2, 2, 3))]
    board = soc(*units, instances=1 if plain else draw.choice((1, 1, 2)))
    made = []
    for n in range(tasks):
        after = (f"m{n - 1}",) if n and not plain and draw.random() < 0.3 else ()
        ends = {u: draw.uniform(0, 1e-4) for u in units} if not plain and draw.random() < 0.3 else None
        repeats = 1 if plain else draw.choice((1, 1, 1, 2))
        count = draw.randint(1, groups)
        made.append(Task(f"m{n}", _random_groups(draw, units, count, plain), after, repeats, ends, ends))
    return Problem(board, tuple(made))


def _random_groups(draw: Random, units: tuple[str, ...], count: int, plain: bool) -> tuple[Group, ...]:
    groups = []
    leave, always = True, ""
    for i in range(count):
        always = draw.choice(units) if leave else always  # so that every stretch has a unit
        leave = plain or draw.random() < 0.8
        able = [u for u in units if plain or u == always or draw.random() < 0.7]
        costs = {u: UnitCost(*(draw.uniform(low, high) for low, high in RANGES)) for u in able}
        groups.append(Group(f"g{i}", costs, leave))
    return tuple(groups)


RANGES = ((1e-4, 1e-3), (5, 110), (0, 1e-4), (0, 1e-4), (1e-3, 1e-2))
"""Of time, demand, way in, way out and energy."""


def legal_mappings(problem: Problem, n: int) -> list[tuple[int, ...]]:
    """Every legal way to map one task."""
    tables = problem.tables
    every = product(range(len(problem.units)), repeat=int(tables.steps[n]))

    def legal(row: tuple[int, ...]) -> bool:
        came = (-1, *row)
        return all(isfinite(tables.time[n, i, u] + tables.move[n, i, came[i], u]) for i, u in enumerate(row))

    return [row for row in every if legal(row)]
