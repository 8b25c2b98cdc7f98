"""The search over event-aligned schedules on a SoC, compiled.

A state holds for every task its step, unit and phase, and the seconds left of its move or step. Decisions are made only
at events, so the successors of a state are all combinations of the tasks' options at an event, each advanced to the
next event. ``grow`` expands a layer of given states (a dive); ``expand`` takes the state of least bound, again and
again, until no state can beat the best known schedule. The plain twin is the enumeration in
tests/mapping/event_schedules.py.

Arguments of the kernels: tables, rules, prices: ``Tables``, ``BoundRules`` and ``ActivityPrices``. states: a ``Store``;
state, row, parent: rows of it. work: a ``Scratch``. table: the hash table, from phases to the first state that has
them. best: value and row of the best finished state. count: number of states. n: a task.
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
"""Resolution in seconds of the hash of a state: states that differ by less mostly get the same hash. If not, both are
kept, which costs only time."""


class Store(NamedTuple):
    """The states of a search, one per row."""

    code: npt.NDArray[np.int32]
    """[state, task]: step, unit and phase, packed."""
    used: npt.NDArray[np.int32]
    """[state, task]: switches of this run so far."""
    chosen: npt.NDArray[np.int32]
    """[state, task]: the unit chosen last."""
    left: Floats
    """[state, task]: seconds left of the move, or of stand-alone work."""
    ended: Floats
    """[state, task]: when the task ended."""
    spent: Floats
    """[state]: joules of all steps whose unit is chosen."""
    time: Floats
    """[state]: seconds since the begin."""
    bound: Floats
    """[state]: no schedule through the state has a smaller value."""
    parent: npt.NDArray[np.int32]
    """[state]: the state before; -1: this is the first."""
    follows: npt.NDArray[np.int32]
    """[state]: the next state of the same phases in a linked list; -1: none."""
    dropped: npt.NDArray[np.bool_]
    """[state]: not worth expanding, because another state dominates it or it is finished."""


class Scratch(NamedTuple):
    """Memory in which the successors of one state are put together, one after another."""

    options: Ints
    """[task]: the number of its options at the event."""
    picks: Ints
    """[task]: the option that the present combination picks."""
    codes: Ints
    """[task, option]: the packed step, unit and phase after the option."""
    lefts: Floats
    """[task, option]: seconds left after the option; see ``Store.left``."""
    useds: Ints
    """[task, option]: switches of this run after the option."""
    code: Ints
    """This and the next four: [task] of the successor, as in ``Store``."""
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
    """[bits of a set of tasks]: see ``_least_negated_throughput``."""


def scratch(tasks: int, units: int, sets: int, *, subsets: bool) -> Scratch:
    """Allocate the scratch memory. sets: number of price sets; subsets: whether the objective is the throughput."""
    most_options = 2 * units
    return Scratch(
        np.zeros(tasks, np.int64), np.zeros(tasks, np.int64),
        np.zeros((tasks, most_options), np.int64), np.zeros((tasks, most_options)),
        np.zeros((tasks, most_options), np.int64),
        np.zeros(tasks, np.int64), np.zeros(tasks, np.int64), np.zeros(tasks), np.zeros(tasks, np.int64),
        np.zeros(tasks), np.zeros(1),
        np.zeros(units, np.int64), np.zeros(tasks), np.zeros((tasks, sets)), np.zeros(1 << tasks if subsets else 0),
    )  # fmt: skip


def store(states: int, tasks: int) -> Store:
    """Allocate memory for *states* states of *tasks* tasks."""
    return Store(
        np.zeros((states, tasks), np.int32), np.zeros((states, tasks), np.int32), np.zeros((states, tasks), np.int32),
        np.zeros((states, tasks)), np.zeros((states, tasks)), np.zeros(states), np.zeros(states), np.zeros(states),
        np.full(states, -1, np.int32), np.full(states, -1, np.int32), np.zeros(states, np.bool_),
    )  # fmt: skip


@untyped_called
def _options(tables, rules, work, n, code, left, used):
    """Write the options of task *n* at this event into *work*; return their number.

    code, left, used: the task's present values. A task at a boundary chooses a unit, a ready task may start; all other
    tasks, and a ready task that waits, stay as they are.
    """
    phase, step, unit = phase_of(code), step_of(code), unit_of(code)
    if phase in (BOUNDARY, HELD):
        return _unit_options(tables, rules, work, n, phase, step, unit, used)
    count = 0
    if phase == READY:
        work.codes[n, count], work.lefts[n, count] = pack(step, unit, RUNNING), tables.time[n, step, unit]
        work.useds[n, count] = used
        count += 1
    work.codes[n, count], work.lefts[n, count], work.useds[n, count] = code, left, used
    return count + 1


@untyped_called
def _unit_options(tables, rules, work, n, phase, step, unit, used):
    """Write the options of task *n* before *step*, coming from *unit*: each allowed unit, and to be held.

    It can be held only if it could also start without a move; a task that was held may only go where no move is needed,
    because a move begins at once or not at all.
    """
    count, may_hold = 0, False
    for v in range(tables.time.shape[2]):
        move_s = tables.move[n, step, unit, v]
        if not move_s < np.inf or (phase == HELD and move_s > 0):
            continue
        switches = 0
        if rules.switches >= 0 and not tables.begins[n, step]:
            switches = used + (unit != v)
            if switches > rules.switches:
                continue
        may_hold |= move_s == 0
        if move_s > 0:
            work.codes[n, count], work.lefts[n, count] = pack(step, v, MOVING), move_s
        else:
            work.codes[n, count], work.lefts[n, count] = pack(step, v, RUNNING), tables.time[n, step, v]
        work.useds[n, count] = switches
        count += 1
    if may_hold:
        work.codes[n, count], work.lefts[n, count], work.useds[n, count] = pack(step, unit, HELD), 0.0, used
        count += 1
    return count


@untyped_called
def _begin(tables, rules, states, state, work):
    """Prepare the enumeration of a state's successors; return False if a task has no option at all."""
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
    """Combine the picked options into a successor in *work*; return -1, or a task whose pick makes it impossible.

    Impossible: more tasks run on a unit than it has instances; or nothing runs or moves, so that no event would follow.
    """
    work.busy[:] = 0
    work.spent[0] = states.spent[state]
    any_progress = False
    for n in range(len(work.code)):
        pick = work.picks[n]
        code = work.codes[n, pick]
        phase = phase_of(code)
        if phase == RUNNING:
            unit = unit_of(code)
            work.busy[unit] += 1
            if work.busy[unit] > tables.instances[unit]:
                return n
        any_progress |= phase in (RUNNING, MOVING, LEAVING)
        if phase_of(states.code[state, n]) in (BOUNDARY, HELD) and phase != HELD:
            work.spent[0] += tables.energy[n, step_of(code), unit_of(code)]
        work.code[n], work.left[n], work.used[n] = code, work.lefts[n, pick], work.useds[n, pick]
        work.ended[n], work.chosen[n] = states.ended[state, n], unit_of(code)
    return -1 if any_progress else len(work.code) - 1


@untyped_called
def _next_combination(work, task):
    """Pick the next option of *task*, or of an earlier task if it has no more; return False after the last combination.

    The tasks after it begin again at their first option, so combinations that share an impossible part are skipped.
    """
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
    """Whether *room* rows suffice for all successors of a state.

    A successor is a combination of one option per task. If there are more combinations than rows, the possible ones are
    counted.
    """
    most = 1.0
    for n in range(len(work.options)):
        most *= work.options[n]
    if most <= room:
        return True
    more = True
    while more and room >= 0:
        failed = _choose(tables, states, state, work)
        room -= failed < 0
        more = _next_combination(work, failed if failed >= 0 else len(work.picks) - 1)
    work.picks[:] = 0
    return room >= 0


@untyped_called
def _store_state(states, row, work, time, bound, parent):
    """Copy the successor in *work* into a row of *states*."""
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
def _compare(rules, states, row, work, time):
    """Compare a stored state with the successor in *work* at *time*, of the same phases.

    -1: the stored state is nowhere later; 1: the successor is nowhere later; 0: neither. Under ``SAME_LATER`` the hash
    table compares only states with the same times left.
    """
    stored_wins, new_wins = states.time[row] <= time + TINY_S, time <= states.time[row] + TINY_S
    if rules.budget < np.inf:
        stored_wins &= states.spent[row] <= work.spent[0]
        new_wins &= work.spent[0] <= states.spent[row]
    for n in range(len(work.code)):
        stored_wins &= states.left[row, n] <= work.left[n] + TINY_S
        new_wins &= work.left[n] <= states.left[row, n] + TINY_S
        if rules.switches >= 0:
            stored_wins &= states.used[row, n] <= work.used[n]
            new_wins &= work.used[n] <= states.used[row, n]
        if rules.throughput:
            stored_wins &= states.ended[row, n] <= work.ended[n] + TINY_S
            new_wins &= work.ended[n] <= states.ended[row, n] + TINY_S
        if not stored_wins and not new_wins:
            return 0
    return -1 if stored_wins else 1


@untyped_called
def _slot(rules, table, states, code, left):
    """The slot of the hash table for states with these phases, taken or still free (linear probing, FNV hash).

    Under ``SAME_LATER``, the times left are part of the key.
    """
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
    """Whether a state in the list of slot *place* dominates the successor in *work*.

    Until one is found, listed states that the successor dominates are dropped.
    """
    row, before = table[place], -1
    while row >= 0:
        verdict = _compare(rules, states, row, work, time)
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
def _add_to_list(states, table, place, row):
    """Insert a state into the list of slot *place*, behind the head, or as the head."""
    head = table[place]
    if head < 0:
        table[place] = row
    else:
        states.follows[row] = states.follows[head]
        states.follows[head] = row


@untyped_loop
def relist(rules, states, count, table):
    """Fill a larger, empty hash table with the first *count* states."""
    for row in range(count):
        states.follows[row] = -1
    for row in range(count):
        _add_to_list(states, table, _slot(rules, table, states, states.code[row], states.left[row]), row)


@untyped_loop
def push(heap, size, keys, row):
    """Put *row* on a heap of *size* rows that is ordered by keys[row]; the caller counts the size up."""
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
    """Remove and return the row of the least key from a heap of *size* rows; the caller counts the size down."""
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
def _grow(tables, rules, prices, states, table, work, state, count, best, drop_overflow):
    """Add the successors of *state* whose bound is better than ``best[0]``; return the new number of states, or -1.

    -1: not all successors would find room, and *drop_overflow* is false; true: those without room are dropped. A
    finished successor that beats the best becomes the best.
    """
    if not _begin(tables, rules, states, state, work):
        return count
    if not drop_overflow and not _has_room(tables, states, state, work, len(states.time) - count):
        return -1
    more = True
    while more and count < len(states.time):
        failed = _choose(tables, states, state, work)
        if failed < 0:
            time = advance(tables, work.code, work.left, work.ended, work.pace, states.time[state], np.inf)
            if finished(work.code):
                value = value_of(rules, work.ended)
                if value < best[0] - TINY_S and work.spent[0] <= rules.budget and time <= rules.deadline:
                    _store_state(states, count, work, time, value, state)
                    best[0], best[1] = value, count
                    states.dropped[count] = True
                    count += 1
            else:
                bound = max(states.bound[state], estimate(tables, rules, prices, work, time))
                if bound < best[0] - TINY_S:
                    place = _slot(rules, table, states, work.code, work.left)
                    if not _is_dominated(rules, states, table, place, work, time):
                        _store_state(states, count, work, time, bound, state)
                        _add_to_list(states, table, place, count)
                        count += 1
        more = _next_combination(work, failed if failed >= 0 else len(work.picks) - 1)
    return count


@untyped_loop
def root(tables, rules, prices, states, work):
    """Write the initial state, before any step, into row 0."""
    for n in range(len(work.code)):
        work.code[n], work.left[n], work.used[n], work.ended[n], work.chosen[n] = pack(0, 0, WAITING), 0.0, 0, 0.0, 0
    release(tables, work.code)
    work.spent[0] = 0.0
    _store_state(states, np.int64(0), work, 0.0, estimate(tables, rules, prices, work, 0.0), np.int64(-1))


@untyped_loop
def grow(tables, rules, prices, states, table, work, layer, count, best):
    """Add the successors of the states in *layer* (rows), as long as there is room; return the new number of states."""
    for state in layer:
        if states.bound[state] < best[0] - TINY_S:
            # A literal True has a type of its own: numba would compile ``_grow`` a second time, besides for ``expand``.
            count = _grow(
                tables, rules, prices, states, table, work, np.int64(state), np.int64(count), best, np.bool_(True)
            )
    return count


@untyped_loop
def expand(tables, rules, prices, states, table, heap, work, steps, best, sizes):
    """Expand up to *steps* states, always the one of least bound.

    heap: rows of the states to expand, by bound. sizes: number of states, of rows in the heap, and of expanded states;
    updated. Returns 0: nothing better is left, so the best is proved; 1: there is more to expand; 2: there is no room.
    """
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
