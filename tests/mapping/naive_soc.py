"""A slow, obvious twin of the simulated SoC: time passes in small equal steps. And random problems to try it on.

Nothing here uses the package's simulator or its tables; only the description of a problem and the contention formula.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from random import Random

from weft.devices.soc import BandwidthSharing, Pccs, Soc, Unit
from weft_map.problem import Group, Problem, Task, UnitCost
from weft_map.schedule import Schedule

PCCS = Pccs(normal_bw=20.0, intensive_bw=70.0, mrmc_pct=5.0, pbw=100.0, tbwdc=60.0, cbp=45.0, rate_n=0.9)


@dataclass
class Walker:
    """Where a task is."""

    phase: str = "outside"
    """outside, moving, waiting, running, leaving or through."""
    step: int = 0
    left_s: float = 0.0
    """Of the move, or of the stand-alone time."""
    came: int = -1
    """Tick at which it stood in line."""
    finish_s: float = 0.0


def integrate(problem: Problem, schedule: Schedule, dt_s: float) -> list[float]:
    """When each task is through. What ends within half a step of time ends now; the rest of it is carried over."""
    walkers = [Walker() for _ in problem.tasks]
    tick = 0
    while any(walker.phase != "through" for walker in walkers):
        settled = False
        while not settled:
            moved = [_turn(problem, schedule, walkers, n, tick, dt_s) for n in range(len(walkers))]
            settled = not (any(moved) or _seat(problem, schedule, walkers, tick))
        paces = [_slow_down(problem, schedule, walkers, n) for n in range(len(walkers))]
        for n, walker in enumerate(walkers):
            if walker.phase in ("moving", "running", "leaving"):
                walker.left_s -= dt_s / paces[n]
        tick += 1
    return [walker.finish_s for walker in walkers]


def _turn(problem: Problem, schedule: Schedule, walkers: list[Walker], n: int, tick: int, dt_s: float) -> bool:
    """Bring one task on if its phase is over; whether it was."""
    task, walker = problem.tasks[n], walkers[n]
    if walker.phase == "outside":
        others = [walkers[m] for m, other in enumerate(problem.tasks) if other.name in task.after]
        if any(other.phase != "through" for other in others):
            return False
        walker.phase, walker.left_s = "moving", _move_s(problem, schedule, n, 0)
        return True
    if walker.phase == "waiting":
        starts_s = schedule.starts_s
        if walker.came < 0 and (not starts_s or starts_s[n][walker.step] <= (tick + 0.5) * dt_s):
            walker.came = tick
            return True
        return False
    if walker.phase == "through" or walker.left_s > 0.5 * dt_s:
        return False
    if walker.phase == "moving":
        walker.phase, walker.came = "waiting", -1
    elif walker.phase == "leaving":
        walker.phase, walker.finish_s = "through", tick * dt_s + walker.left_s
    else:
        carried_s, walker.step = walker.left_s, walker.step + 1
        if walker.step < len(schedule.units[n]):
            walker.phase, walker.left_s = "moving", carried_s + _move_s(problem, schedule, n, walker.step)
        else:
            unit = problem.units[schedule.units[n][-1]]
            walker.phase, walker.left_s = "leaving", carried_s + (task.exit_s or {}).get(unit, 0.0)
    return True


def _seat(problem: Problem, schedule: Schedule, walkers: list[Walker], tick: int) -> bool:
    """Give a free instance to whoever came first; whether anyone got one."""
    order = schedule.order or range(len(walkers))
    line = sorted(
        (n for n in order if walkers[n].phase == "waiting" and walkers[n].came >= 0), key=lambda n: walkers[n].came
    )
    for n in line:
        unit = schedule.units[n][walkers[n].step]
        taken = sum(w.phase == "running" and schedule.units[m][w.step] == unit for m, w in enumerate(walkers))
        if taken < problem.soc.units[unit].instances:
            walkers[n].phase = "running"
            carried_s = walkers[n].left_s if walkers[n].came == tick else 0.0
            walkers[n].left_s = carried_s + _cost(problem, schedule, n, walkers[n].step).time_s
            return True
    return False


def _cost(problem: Problem, schedule: Schedule, n: int, step: int) -> UnitCost:
    groups = problem.tasks[n].groups
    return groups[step % len(groups)].costs[problem.units[schedule.units[n][step]]]


def _move_s(problem: Problem, schedule: Schedule, n: int, step: int) -> float:
    task, units = problem.tasks[n], problem.units
    to = units[schedule.units[n][step]]
    if step % len(task.groups) == 0:
        gone_s = (task.exit_s or {}).get(units[schedule.units[n][step - 1]], 0.0) if step else 0.0
        return gone_s + (task.entry_s or {}).get(to, 0.0)
    if schedule.units[n][step] == schedule.units[n][step - 1]:
        return 0.0
    return _cost(problem, schedule, n, step - 1).out_s + _cost(problem, schedule, n, step).in_s


def _slow_down(problem: Problem, schedule: Schedule, walkers: list[Walker], n: int) -> float:
    if walkers[n].phase != "running":
        return 1.0
    demands = {
        m: _cost(problem, schedule, m, w.step).demand_gb_s for m, w in enumerate(walkers) if w.phase == "running"
    }
    own = demands.pop(n)
    return problem.soc.slow_down(schedule.units[n][walkers[n].step], own, sum(demands.values()))


def random_case(rng: Random, *, coarse: bool = False) -> tuple[Problem, Schedule]:
    """Two or three tasks on two or three units. coarse: times are few and often zero, so that much happens at once."""

    def time_s(most: float) -> float:
        return rng.choice([0.0, most / 4, most / 2, most]) if coarse else rng.uniform(most / 10, most)

    units = [f"unit{n}" for n in range(rng.randint(2, 3))]
    soc = Soc(
        name="random",
        bandwidth_gb_s=100.0,
        units=tuple(
            Unit(name=name, instances=rng.choice([1, 1, 2]), contention=rng.choice([BandwidthSharing(), PCCS]))
            for name in units
        ),
    )
    tasks: list[Task] = []
    for n in range(rng.randint(2, 3)):
        groups = tuple(
            Group(
                f"g{i}",
                {unit: UnitCost(time_s(1e-3), rng.uniform(0, 90), time_s(1e-4), time_s(1e-4)) for unit in units},
            )
            for i in range(rng.randint(1, 4))
        )
        ends: dict[str, dict[str, float] | None] = {
            key: {unit: time_s(1e-4) for unit in units} if rng.random() < 0.3 else None for key in ("entry_s", "exit_s")
        }
        after = tuple(task.name for task in tasks if rng.random() < 0.15)
        tasks.append(Task(f"task{n}", groups, after, rng.choice([1, 1, 2]), ends["entry_s"], ends["exit_s"]))
    problem = Problem(soc, tuple(tasks))
    steps = [len(task.groups) * task.repeats for task in tasks]
    chosen = tuple(tuple(rng.randrange(len(units)) for _ in range(count)) for count in steps)
    planned = tuple(tuple(time_s(4e-3) for _ in range(count)) for count in steps) if rng.random() < 0.3 else None
    order = tuple(rng.sample(range(len(tasks)), len(tasks))) if rng.random() < 0.5 else None
    return problem, Schedule(chosen, planned, order)


def whole_s(problem: Problem) -> float:
    """Roughly how long a run may take: the scale of a small step of time."""
    return (
        sum(
            task.repeats * sum(max(cost.time_s for cost in group.costs.values()) for group in task.groups)
            for task in problem.tasks
        )
        or inf
    )
