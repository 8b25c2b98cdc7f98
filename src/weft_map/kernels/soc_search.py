"""The search over event-aligned schedules on a SoC, compiled.

A state says for every task at which step it is, on which unit and in which phase, and how much of a move or of a
running step is left. Between two events nothing is decided, so a state is reached by choices at an event followed by
the time to the next one. ``grow`` goes one event further from chosen states; ``expand`` takes the most promising
state of all, again and again, until none can beat the best schedule known. The plain twin is the enumeration in
tests/mapping/event_schedules.py.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.kernels.compiling import untyped_called, untyped_loop
from weft_map.kernels.soc import (
    BOUNDARY,
    HELD,
    LEAVING,
    MOVING,
    READY,
    RUNNING,
    SAME_LATER,
    TINY_S,
    WAITING,
    advance,
    estimate,
    finished,
    pack,
    phase_of,
    release,
    step_of,
    unit_of,
    value_of,
)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LIKE_S = 1e-11
"""Resolution of times in the hash of a state: states that differ by less mostly get the same entry; if not, both are
kept."""


class Store(NamedTuple):
    """States, row by row."""

    code: npt.NDArray[np.int32]
    """[state, task]: step, unit and phase, packed."""
    used: npt.NDArray[np.int32]
    """[state, task]: switches of this run so far."""
    chosen: npt.NDArray[np.int32]
    """[state, task]: the unit chosen last."""
    left: Floats
    """[state, task]: seconds of the move, or of stand-alone work."""
    ended: Floats
    """[state, task]: when a task was through."""
    spent: Floats
    """Joules of all steps whose unit is chosen."""
    time: Floats
    bound: Floats
    """The best value a schedule through this state can have."""
    parent: npt.NDArray[np.int32]
    follows: npt.NDArray[np.int32]
    """The next state of the same phases; -1: none."""
    dropped: npt.NDArray[np.bool_]
    """Not worth expanding: another is nowhere later, or it is finished."""


class Scratch(NamedTuple):
    """Where the children of one state are put together."""

    options: Ints
    """[task]: how many ways it has to go on."""
    picks: Ints
    codes: Ints
    """[task, option]: step, unit and phase that it would have then, packed."""
    lefts: Floats
    useds: Ints
    code: Ints
    chosen: Ints
    left: Floats
    used: Ints
    ended: Floats
    spent: Floats
    """Joules spent so far, a single number."""
    busy: Ints
    """[unit]: how many tasks run on it."""
    pace: Floats
    """[task]: seconds per second of stand-alone work."""
    costs: Floats
    """[task, set]: the remaining cost of the task at the prices of the set."""
    subsets: Floats
    """[subset of the tasks]: the most throughput if these end first; -1 where they cannot."""


def scratch(tasks: int, units: int, sets: int, *, subsets: bool) -> Scratch:
    """subsets: whether the throughput is asked for."""
    many = 2 * units
    return Scratch(
        np.zeros(tasks, np.int64), np.zeros(tasks, np.int64),
        np.zeros((tasks, many), np.int64), np.zeros((tasks, many)), np.zeros((tasks, many), np.int64),
        np.zeros(tasks, np.int64), np.zeros(tasks, np.int64), np.zeros(tasks), np.zeros(tasks, np.int64),
        np.zeros(tasks), np.zeros(1),
        np.zeros(units, np.int64), np.zeros(tasks), np.zeros((tasks, sets)), np.zeros(1 << tasks if subsets else 0),
    )  # fmt: skip


def store(states: int, tasks: int) -> Store:
    return Store(
        np.zeros((states, tasks), np.int32), np.zeros((states, tasks), np.int32), np.zeros((states, tasks), np.int32),
        np.zeros((states, tasks)), np.zeros((states, tasks)), np.zeros(states), np.zeros(states), np.zeros(states),
        np.full(states, -1, np.int32), np.full(states, -1, np.int32), np.zeros(states, np.bool_),
    )  # fmt: skip


@untyped_called
def _options(tables, rules, work, n, code, left, used):
    """What task *n* may do at this event."""
    phase, step, unit = phase_of(code), step_of(code), unit_of(code)
    if phase in (BOUNDARY, HELD):
        return _ways_on(tables, rules, work, n, phase, step, unit, used)
    count = 0
    if phase == READY:
        work.codes[n, count], work.lefts[n, count] = pack(step, unit, RUNNING), tables.time[n, step, unit]
        work.useds[n, count] = used
        count += 1
    work.codes[n, count], work.lefts[n, count], work.useds[n, count] = code, left, used
    return count + 1


@untyped_called
def _ways_on(tables, rules, work, n, phase, step, unit, used):
    """Units to which task *n* may go, and one more way: to wait where it is, if it need not go anywhere."""
    count, held = 0, False
    for v in range(tables.time.shape[2]):
        way = tables.move[n, step, unit, v]
        if not way < np.inf or (phase == HELD and way > 0):
            continue
        spent = 0
        if rules.switches >= 0 and not tables.begins[n, step]:
            spent = used + (unit != v)
            if spent > rules.switches:
                continue
        held |= way == 0
        if way > 0:
            work.codes[n, count], work.lefts[n, count] = pack(step, v, MOVING), way
        else:
            work.codes[n, count], work.lefts[n, count] = pack(step, v, RUNNING), tables.time[n, step, v]
        work.useds[n, count] = spent
        count += 1
    if held:
        work.codes[n, count], work.lefts[n, count], work.useds[n, count] = pack(step, unit, HELD), 0.0, used
        count += 1
    return count


@untyped_called
def _begin(tables, rules, states, state, work):
    """Prepare the enumeration of a state's successors; return whether there are any."""
    for n in range(states.code.shape[1]):
        work.options[n] = _options(
            tables, rules, work, n, states.code[state, n], states.left[state, n], states.used[state, n]
        )
        work.picks[n] = 0
        if work.options[n] == 0:
            return False
    return True


@untyped_called
def _choose(tables, states, state, work):
    """Combine the picked options into a state; return -1, or the task whose option is impossible."""
    work.busy[:] = 0
    work.spent[0] = states.spent[state]
    going = False
    for n in range(len(work.code)):
        pick = work.picks[n]
        code = work.codes[n, pick]
        phase = phase_of(code)
        if phase == RUNNING:
            unit = unit_of(code)
            work.busy[unit] += 1
            if work.busy[unit] > tables.instances[unit]:
                return n
        going |= phase in (RUNNING, MOVING, LEAVING)
        if phase_of(states.code[state, n]) in (BOUNDARY, HELD) and phase != HELD:
            work.spent[0] += tables.energy[n, step_of(code), unit_of(code)]
        work.code[n], work.left[n], work.used[n] = code, work.lefts[n, pick], work.useds[n, pick]
        work.ended[n], work.chosen[n] = states.ended[state, n], unit_of(code)
    return -1 if going else len(work.code) - 1


@untyped_called
def _turn(work, task):
    """Go to the next combination with another option of this task or an earlier one; return whether there is one."""
    for n in range(task + 1, len(work.picks)):
        work.picks[n] = 0
    for n in range(task, -1, -1):
        work.picks[n] += 1
        if work.picks[n] < work.options[n]:
            return True
        work.picks[n] = 0
    return False


@untyped_called
def _has_room(tables, states, state, work, room):
    """Whether *room* entries hold every combination that can be."""
    most = 1.0
    for n in range(len(work.options)):
        most *= work.options[n]
    if most <= room:
        return True
    more = True
    while more and room >= 0:
        failed = _choose(tables, states, state, work)
        room -= failed < 0
        more = _turn(work, failed if failed >= 0 else len(work.picks) - 1)
    work.picks[:] = 0
    return room >= 0


@untyped_called
def _keep(states, row, work, time, bound, parent):
    for n in range(len(work.code)):
        states.code[row, n] = work.code[n]
        states.used[row, n] = work.used[n]
        states.chosen[row, n] = work.chosen[n]
        states.left[row, n] = work.left[n]
        states.ended[row, n] = work.ended[n]
    states.spent[row] = work.spent[0]
    states.time[row], states.bound[row], states.parent[row], states.follows[row] = time, bound, parent, -1
    states.dropped[row] = False


@untyped_called
def _no_later(rules, states, row, work, time):
    """-1: the stored state is nowhere later than the one in *work*; 1: the other way round; 0: neither.

    Where only states that are the same but later are dropped, those compared have the same times left already."""
    older, newer = states.time[row] <= time + TINY_S, time <= states.time[row] + TINY_S
    if rules.budget < np.inf:
        older &= states.spent[row] <= work.spent[0]
        newer &= work.spent[0] <= states.spent[row]
    for n in range(len(work.code)):
        older &= states.left[row, n] <= work.left[n] + TINY_S
        newer &= work.left[n] <= states.left[row, n] + TINY_S
        if rules.switches >= 0:
            older &= states.used[row, n] <= work.used[n]
            newer &= work.used[n] <= states.used[row, n]
        if rules.throughput:
            older &= states.ended[row, n] <= work.ended[n] + TINY_S
            newer &= work.ended[n] <= states.ended[row, n] + TINY_S
        if not older and not newer:
            return 0
    return -1 if older else 1


@untyped_called
def _slot(rules, table, states, code, left):
    """Where in the hash table states are listed that this one is compared with, or would be."""
    exact = rules.dominance == SAME_LATER
    value = np.uint64(14695981039346656037)
    for n in range(len(code)):
        value = (value ^ np.uint64(code[n])) * np.uint64(1099511628211)
        if exact:
            value = (value ^ np.uint64(left[n] / LIKE_S)) * np.uint64(1099511628211)
        value ^= value >> np.uint64(29)
    mask = np.uint64(len(table) - 1)
    place = value & mask
    while True:
        row = table[place]
        if row < 0:
            return place
        same = True
        for n in range(len(code)):
            if states.code[row, n] != code[n] or (exact and abs(states.left[row, n] - left[n]) > TINY_S):
                same = False
                break
        if same:
            return place
        place = (place + np.uint64(1)) & mask


@untyped_called
def _is_dominated(rules, states, table, place, work, time):
    """Whether a listed state dominates the one in *work*; drop listed ones that it dominates."""
    row, before = table[place], -1
    while row >= 0:
        verdict = _no_later(rules, states, row, work, time)
        if verdict < 0:
            return True
        following = states.follows[row]
        if verdict > 0:
            states.dropped[row] = True
        if verdict > 0 and before >= 0:  # the head stays in the list: its phases are the slot's key
            states.follows[before] = following
        else:
            before = row
        row = following
    return False


@untyped_called
def _list(states, table, place, row):
    """List a state behind the first one of its phases, or as the first."""
    head = table[place]
    if head < 0:
        table[place] = row
    else:
        states.follows[row] = states.follows[head]
        states.follows[head] = row


@untyped_loop
def relist(rules, states, count, table):
    """Fill a larger hash table with the states there are."""
    for row in range(count):
        states.follows[row] = -1
    for row in range(count):
        _list(states, table, _slot(rules, table, states, states.code[row], states.left[row]), row)


@untyped_loop
def push(heap, size, keys, row):
    """Put a row on a heap of *size* that is ordered by the rows' keys."""
    place = size
    while place > 0:
        up = (place - 1) >> 1
        if keys[heap[up]] <= keys[row]:
            break
        heap[place] = heap[up]
        place = up
    heap[place] = row


@untyped_loop
def pop(heap, size, keys):
    """Take the row of the least key off a heap of *size*."""
    least, last = heap[0], heap[size - 1]
    place = 0
    while True:
        down = 2 * place + 1
        if down >= size - 1:
            break
        if down + 1 < size - 1 and keys[heap[down + 1]] < keys[heap[down]]:
            down += 1
        if keys[heap[down]] >= keys[last]:
            break
        heap[place] = heap[down]
        place = down
    heap[place] = last
    return least


@untyped_called
def _grow(tables, rules, prices, states, table, work, state, count, best, spare):
    """Add what may follow a state and could beat ``best[0]``; returns how many states there are then, -1: no room.

    A finished schedule that beats it becomes the best: its value and its row. spare: leave out what finds no room."""
    if not _begin(tables, rules, states, state, work):
        return count
    if not spare and not _has_room(tables, states, state, work, len(states.time) - count):
        return -1
    more = True
    while more and count < len(states.time):
        failed = _choose(tables, states, state, work)
        if failed < 0:
            time = advance(tables, work.code, work.left, work.ended, work.pace, states.time[state], np.inf)
            if finished(work.code):
                value = value_of(rules, work.ended)
                if value < best[0] - TINY_S and work.spent[0] <= rules.budget and time <= rules.deadline:
                    _keep(states, count, work, time, value, state)
                    best[0], best[1] = value, count
                    states.dropped[count] = True
                    count += 1
            else:
                bound = max(states.bound[state], estimate(tables, rules, prices, work, time))
                if bound < best[0] - TINY_S:
                    place = _slot(rules, table, states, work.code, work.left)
                    if not _is_dominated(rules, states, table, place, work, time):
                        _keep(states, count, work, time, bound, state)
                        _list(states, table, place, count)
                        count += 1
        more = _turn(work, failed if failed >= 0 else len(work.picks) - 1)
    return count


@untyped_loop
def root(tables, rules, prices, states, work):
    """Make row 0 the initial state, before any step."""
    for n in range(len(work.code)):
        work.code[n], work.left[n], work.used[n], work.ended[n], work.chosen[n] = pack(0, 0, WAITING), 0.0, 0, 0.0, 0
    release(tables, work.code)
    work.spent[0] = 0.0
    _keep(states, np.int64(0), work, 0.0, estimate(tables, rules, prices, work, 0.0), np.int64(-1))


@untyped_loop
def grow(tables, rules, prices, states, table, work, layer, count, best):
    """Add what may follow the states of a layer, as long as there is room; returns how many states there are then."""
    for state in layer:
        if states.bound[state] < best[0] - TINY_S:
            # A literal True would compile it once more, beside that of ``expand``.
            count = _grow(
                tables, rules, prices, states, table, work, np.int64(state), np.int64(count), best, np.bool_(True)
            )
    return count


@untyped_loop
def expand(tables, rules, prices, states, table, heap, work, steps, best, sizes):
    """Expand the most promising states, at most *steps* of them.

    sizes: states made, heap size, states expanded. Returns 0: nothing better is left; 1: there is more to do;
    2: there is no room to do it."""
    count, size, verdict = sizes[0], sizes[1], 1
    for _ in range(steps):
        while size and states.dropped[heap[0]]:
            pop(heap, size, states.bound)
            size -= 1
        if size == 0 or states.bound[heap[0]] >= best[0] - TINY_S:
            verdict = 0
            break
        grown = _grow(
            tables, rules, prices, states, table, work, np.int64(heap[0]), np.int64(count), best, np.bool_(False)
        )
        if grown < 0:
            verdict = 2
            break
        pop(heap, size, states.bound)
        size -= 1
        for row in range(count, grown):
            if not states.dropped[row]:
                push(heap, size, states.bound, np.int64(row))
                size += 1
        count = grown
        sizes[2] += 1
    sizes[0], sizes[1] = count, size
    return verdict
