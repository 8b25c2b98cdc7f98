"""Published schedulers, from their papers: H2H, HEFT, Herald and Mensa. Contention is unknown to all of them.

Indices as in ``chains``: n, m: tasks; i: a stretch of a task; -1 in place of a unit: the outside.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from math import inf, isfinite
from typing import NamedTuple

from weft_map.baselines.chains import ChainTimes, Mapping, candidates, chains_of, finishes, in_series, in_turn, quickest
from weft_map.problem import Objective, Problem
from weft_map.schedule import Schedule

PASSES = 2
"""Rounds over all models in the last step, as in the published program."""
MOST_TUPLES = 256
"""Cap on the ways to place a frontier; a larger frontier is placed in parts."""


class _State(NamedTuple):
    """A partial schedule of H2H's first step, with times in seconds. Lists are copied, never changed."""

    free: list[list[float]]
    """[unit][instance]: when it becomes free."""
    ready: list[float]
    """[task]: when its latest stretch ends."""
    unit_of_task: list[int]
    """[task]: the unit of its latest stretch; -1: none yet."""

    @property
    def cost(self) -> tuple[float, float]:
        """The criterion to minimise: when the last instance becomes free, then the sum of the tasks' ends."""
        return max(max(lane) for lane in self.free), sum(self.ready)


def h2h(problem: Problem, objective: Objective) -> tuple[Schedule, ...]:
    """``h2h`` (Zhang et al., DAC 2022): map for computation first, then move layers next to their data if that helps.

    One mapping, for the makespan whatever the objective. Adapted from the paper and the behaviour of its public program
    (MIT). Its second step pins weights in a unit's own memory; the units of a SoC share one, so nothing is left of it.
    Its third drops the transfer between layers of one model on one unit; here such layers have no move to begin with.
    """
    chains = chains_of(problem)
    mapping, _ = data_locality(chains, *computation_first(chains))
    return candidates("h2h", chains, [mapping])


def computation_first(chains: ChainTimes) -> tuple[Mapping, list[int]]:
    """Step 1: place the frontier (the next stretch of every task) so that ``_State.cost`` is least, again and again.

    Returns the mapping, and the sequence of tasks whose stretches were placed.
    """
    tasks = len(chains.tasks)
    state = _State([[0.0] * lanes for lanes in chains.instances], [0.0] * tasks, [-1] * tasks)
    mapping: Mapping = [[] for _ in chains.tasks]
    sequence: list[int] = []
    while frontier := _frontier(chains, mapping):
        width = min(len(frontier), len(chains.units))  # number of tasks that are placed at once
        while width > 1 and len(chains.units) ** width > MOST_TUPLES:
            width -= 1
        placements = (
            (_place_stretches(chains, state, mapping, chosen, units), chosen, units)
            for chosen in _subsets(frontier, width, chains)
            for units in product(*(_able_units(chains, n, len(mapping[n])) for n in chosen))
        )
        state, chosen, units = min(placements, key=lambda placement: placement[0].cost)
        for n, unit in zip(chosen, units, strict=True):
            mapping[n].append(unit)
        sequence += chosen
    return mapping, sequence


def data_locality(chains: ChainTimes, mapping: Mapping, sequence: Sequence[int]) -> tuple[Mapping, list[int]]:
    """Step 4: move stretches to the unit of a neighbouring stretch if the makespan drops; the latest task first.

    Takes and returns the mapping and the sequence of tasks as ``computation_first`` returns them.
    """
    mapping, order = [list(units) for units in mapping], list(sequence)
    ends = finishes(chains, mapping, order)
    for _ in range(PASSES):
        before = max(ends)
        for n in sorted(chains.tasks, key=lambda n: -ends[n]):
            for i in range(len(mapping[n])):
                order, ends = _try_neighbours(chains, mapping, order, ends, n, i)
        if max(ends) >= before:
            break
    return mapping, order


def _try_neighbours(
    chains: ChainTimes, mapping: Mapping, order: list[int], ends: list[float], n: int, i: int
) -> tuple[list[int], list[float]]:
    """Move stretch *i* of task *n* to the unit of the stretch before it or after it, if that lowers the makespan.

    Changes *mapping* then; returns the order and the ends of the tasks after the move, or those given.
    """
    units = mapping[n]
    for other in (i - 1, i + 1):
        if not 0 <= other < len(units) or units[other] == units[i] or chains.time[n][i][units[other]] == float("inf"):
            continue
        unit_before, units[i] = units[i], units[other]
        order_after = _move_next_to(order, n, i, other)
        ends_after = finishes(chains, mapping, order_after)
        if max(ends_after) < max(ends):
            return order_after, ends_after
        units[i] = unit_before
    return order, ends


def _move_next_to(order: Sequence[int], n: int, i: int, other: int) -> list[int]:
    """The order in which stretch *i* of task *n* is placed right after stretch *other* = i - 1, or before i + 1."""
    positions = [position for position, task in enumerate(order) if task == n]
    moved = list(order)
    del moved[positions[i]]
    moved.insert(positions[other] + (1 if other < i else -1), n)
    return moved


def _frontier(chains: ChainTimes, mapping: Mapping) -> list[int]:
    """Tasks that have a stretch to be placed, and whose predecessors are placed completely."""
    done = [len(mapping[n]) == len(chains.time[n]) for n in chains.tasks]
    return [n for n in chains.tasks if not done[n] and all(done[m] for m in chains.waits[n])]


def _subsets(frontier: Sequence[int], width: int, chains: ChainTimes) -> list[tuple[int, ...]]:
    """Subsets of *width* tasks of the frontier, as many as keep the ways to place them within ``MOST_TUPLES``."""
    subsets = list(combinations(frontier, width))
    return subsets[: max(1, MOST_TUPLES // len(chains.units) ** width)]


def _able_units(chains: ChainTimes, n: int, i: int) -> list[int]:
    """The units that may run stretch *i* of task *n*."""
    return [unit for unit in chains.units if chains.time[n][i][unit] < float("inf")]


def _place_stretches(
    chains: ChainTimes, state: _State, mapping: Mapping, chosen: Sequence[int], units: Sequence[int]
) -> _State:
    """The state after the next stretches of the tasks *chosen* are placed on *units*, each as early as possible."""
    free = [list(lane) for lane in state.free]
    ready, unit_of_task = list(state.ready), list(state.unit_of_task)
    for n, unit in zip(chosen, units, strict=True):
        i = len(mapping[n])
        if i == 0 and chains.waits[n]:
            ready[n] = max(ready[m] + chains.leave[m][unit_of_task[m]] for m in chains.waits[n])
        lane_free = free[unit]
        instance = lane_free.index(min(lane_free))
        start = max(lane_free[instance], ready[n] + chains.move[n][i][unit_of_task[n]][unit])
        ready[n] = lane_free[instance] = start + chains.time[n][i][unit]
        unit_of_task[n] = unit
    return _State(free, ready, unit_of_task)


Lane = list[tuple[float, float]]
"""The busy times of one instance of a unit: (start, end), in order."""


def heft(problem: Problem, objective: Objective) -> tuple[Schedule, ...]:
    """``heft`` (Topcuoglu et al., TPDS 2002): the most urgent stretch first, on the unit where it ends first.

    A stretch may fill a gap between others. Its urgency is the longest path from it to the end of all that depends on
    it, with times and moves averaged over the units, or with the smallest of them: two mappings. Both are made for the
    makespan, whatever the objective.
    """
    chains = chains_of(problem)
    return candidates("heft", chains, [_map_by_rank(chains, _urgency(chains, measure)) for measure in (_mean, min)])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _urgency(chains: ChainTimes, measure: Callable[[Sequence[float]], float]) -> list[list[float]]:
    """[task][stretch]: its urgency (upward rank); *measure* condenses the values of all units into one."""
    ranks: list[list[float]] = [[] for _ in chains.tasks]
    for n in reversed(in_turn(chains)):
        after = [measure(_finite(chains.move[m][0][-1])) + ranks[m][0] for m in chains.tasks if n in chains.waits[m]]
        rank = measure(chains.leave[n]) + max(after, default=0.0)
        for i in reversed(range(len(chains.time[n]))):
            rank += measure(_finite(chains.time[n][i]))
            ranks[n].append(rank)
            sources = range(-1, 0) if i == 0 else chains.units  # the first stretch comes from -1, the outside
            rank += measure([cost for source in sources for cost in _finite(chains.move[n][i][source])])
        ranks[n].reverse()
    return ranks


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if isfinite(value)]


def _map_by_rank(chains: ChainTimes, ranks: Sequence[Sequence[float]]) -> Mapping:
    """The mapping that places stretches by *ranks* ([task][stretch]), the highest first."""
    lanes: list[list[Lane]] = [[[] for _ in range(count)] for count in chains.instances]
    mapping: Mapping = [[] for _ in chains.tasks]
    ready = [0.0] * len(mapping)
    left = {n: len(chains.time[n]) for n in chains.tasks}  # task -> number of stretches left; ended tasks are removed
    while left:
        may_run = [n for n in left if not any(m in left for m in chains.waits[n])]
        n = max(may_run, key=lambda n: ranks[n][-left[n]])  # by the rank of the next stretch
        i, source = len(mapping[n]), mapping[n][-1] if mapping[n] else -1
        if i == 0:
            ready[n] = max((ready[m] for m in chains.waits[n]), default=0.0)
        end, start, unit, instance = _earliest(chains, lanes, n, i, source, ready[n])
        insort(lanes[unit][instance], (start, end))
        mapping[n].append(unit)
        left[n] -= 1
        ready[n] = end if left[n] else end + chains.leave[n][unit]
        if not left[n]:
            del left[n]
    return mapping


def _earliest(
    chains: ChainTimes, lanes: Sequence[Sequence[Lane]], n: int, i: int, source: int, ready_s: float
) -> tuple[float, float, int, int]:
    """End, start, unit and instance of the placement of stretch *i* of task *n* that ends first.

    source: the unit of the stretch before; ready_s: its end. After the last stretch, leaving the unit counts, too.
    """
    best: tuple[float, float, int, int] = (inf, inf, 0, 0)
    is_last = i + 1 == len(chains.time[n])
    for unit in chains.units:
        time_s = chains.time[n][i][unit]
        if not isfinite(time_s):
            continue
        for instance, lane in enumerate(lanes[unit]):
            start = _gap(lane, ready_s + chains.move[n][i][source][unit], time_s)
            best = min(best, (start + time_s + (chains.leave[n][unit] if is_last else 0.0), start, unit, instance))
    _, start, unit, instance = best
    return start + chains.time[n][i][unit], start, unit, instance  # the end of the stretch, before the task leaves


def _gap(lane: Lane, ready_s: float, time_s: float) -> float:
    """The earliest start from *ready_s* on at which the instance is free for *time_s* seconds."""
    start = ready_s
    if not lane or lane[-1][1] <= ready_s:
        return start
    for busy_from, busy_until in lane:
        if start + time_s <= busy_from:
            return start
        start = max(start, busy_until)
    return start


BALANCE_FACTORS = (1.1, 1.25, 1.5, 2.0, 3.0, inf)
"""Caps on the ratio of the fullest unit's load to the emptiest unit's; all are tried, since the paper tunes it, too."""


def herald(problem: Problem, objective: Objective) -> tuple[Schedule, ...]:
    """``herald`` (Kwon et al., HPCA 2021): each layer on the unit that suits it best, unless that upsets the balance.

    From the paper, and adapted. Layers are taken breadth first (one of each model in turn) or depth first. The units
    are ranked by the layer's cost, here its latency; it takes the first unit with which the fullest unit has at most
    ``factor`` times the load of the emptiest, or the fastest unit if none does. Moves cost nothing. The paper's last
    pass, which moves layers forward into gaps, is left to the simulator, in which no unit idles while a step waits for
    it.
    """
    chains = chains_of(problem)
    ranked, unit_count = _rank_units(chains), len(chains.units)
    sequences = (breadth_first(chains), depth_first(chains))
    mappings = (_assign(ranked, sequence, factor, unit_count) for sequence in sequences for factor in BALANCE_FACTORS)
    return candidates("herald", chains, mappings)


def breadth_first(chains: ChainTimes) -> list[int]:
    """A sequence of tasks: one stretch of each task in turn; a task that waits joins when its predecessors are done."""
    left = [len(stretches) for stretches in chains.time]
    sequence: list[int] = []
    while any(left):
        ready = [n for n in chains.tasks if left[n] and not any(left[m] for m in chains.waits[n])]
        for n in ready:
            left[n] -= 1
        sequence += ready
    return sequence


def depth_first(chains: ChainTimes) -> list[int]:
    """A sequence of tasks: all stretches of one task, then all of the next."""
    return [n for n in in_turn(chains) for _ in chains.time[n]]


def _rank_units(chains: ChainTimes) -> list[list[list[tuple[int, float]]]]:
    """[task][stretch]: pairs (unit, load in seconds per instance) of the units that may run it, the fastest first."""
    return [
        [
            [
                (unit, times[unit] / chains.instances[unit])
                for unit in sorted(chains.units, key=times.__getitem__)
                if isfinite(times[unit])
            ]
            for times in stretches
        ]
        for stretches in chains.time
    ]


def _assign(
    ranked: Sequence[Sequence[Sequence[tuple[int, float]]]], sequence: Iterable[int], factor: float, units: int
) -> Mapping:
    """Herald's assignment of stretches to units in the order of *sequence*.

    ranked: from ``_rank_units``. factor: one of ``BALANCE_FACTORS``. units: number of units.
    """
    loads = [0.0] * units
    mapping: Mapping = [[] for _ in ranked]
    for n in sequence:
        choices = ranked[n][len(mapping[n])]
        unit, load = choices[0]
        if factor < inf:
            unit, load = next((choice for choice in choices if _stays_balanced(loads, *choice, factor)), choices[0])
        loads[unit] += load
        mapping[n].append(unit)
    return mapping


def _stays_balanced(loads: list[float], unit: int, load: float, factor: float) -> bool:
    """Whether the largest of *loads* is at most *factor* times the smallest after *load* is added to *unit*."""
    load_before = loads[unit]
    loads[unit] = load_before + load
    is_even = max(loads) <= factor * min(loads)
    loads[unit] = load_before
    return is_even


def mensa(problem: Problem, objective: Objective) -> tuple[Schedule, ...]:
    """``mensa`` (Boroumand et al., PACT 2021): each layer where it runs best, unless the way there costs more.

    From the paper, and adapted. In the paper, a first phase looks layers up in families, and a second phase compares a
    layer's multiplications and parameters with the activations that a move would carry; here both phases compare
    measured times. As in the paper, each model is mapped alone and without look-ahead, and models that meet on a unit
    queue. For throughput, schedules with the models in series are added.
    """
    chains = chains_of(problem)
    mapping = [_map_task(chains, n) for n in chains.tasks]
    return candidates("mensa", chains, [mapping]) + in_series("mensa", chains, mapping, objective)


def _map_task(chains: ChainTimes, task: int) -> list[int]:
    """Units of the stretches of *task*: the fastest for each, unless staying costs less than the move saves."""
    units: list[int] = []
    for times, move, begins_run in zip(chains.time[task], chains.move[task], chains.begins_run[task], strict=True):
        fastest = quickest(times)
        if begins_run:
            units.append(fastest)
            continue
        current = units[-1]
        gain, cost = times[current] - times[fastest], move[current][fastest]
        units.append(fastest if gain > cost else current)
    return units
