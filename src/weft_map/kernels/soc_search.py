"""The search over event-aligned schedules on a SoC, compiled.

A state holds for every task its step, unit and phase, and the seconds left of its move or step. Decisions are made only
at events, so the successors of a state are all combinations of the tasks' options at an event, each advanced to the
next event. ``grow`` expands a layer of given states (a dive); ``expand`` takes the state of least bound, again and
again, until no state can beat the best known schedule. The plain twin is the enumeration in
tests/mapping/event_schedules.py.

Arguments of the kernels: tables, rules, prices: ``Tables``, ``SearchRules``, ``ActivityPrices``. states: a ``Store``;
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

HASH_STEP_S = 1e-11
"""Rounding of times for the hash of a state: states with almost equal times mostly get the same hash. If not, both are
kept, which costs only time."""


class Store(NamedTuple):
    """The states of a search, one per row."""

    code: npt.NDArray[np.int32]
    """[state, task]: step, unit and phase, packed (``soc.pack``)."""
    switches_used: npt.NDArray[np.int32]
    """[state, task]: switches of this run so far."""
    chosen_unit: npt.NDArray[np.int32]
    """[state, task]: the unit chosen last."""
    left_s: Floats
    """[state, task]: seconds left of the move, or of stand-alone work."""
    ended_s: Floats
    """[state, task]: when the task ended."""
    spent_j: Floats
    """[state]: energy in joules of all steps whose unit is chosen."""
    time_s: Floats
    """[state]: seconds since the begin."""
    bound: Floats
    """[state]: no schedule through the state has a smaller value."""
    parent: npt.NDArray[np.int32]
    """[state]: row of the state before; -1: this is the first."""
    next_row: npt.NDArray[np.int32]
    """[state]: row of the next state in the linked list of states with the same phases; -1: none."""
    dropped: npt.NDArray[np.bool_]
    """[state]: not worth expanding, because another state dominates it or it is finished."""


class Scratch(NamedTuple):
    """Memory in which the successors of one state are put together, one after another."""

    option_counts: Ints
    """[task]: the number of its options at the event."""
    picks: Ints
    """[task]: the option that the present combination picks."""
    option_codes: Ints
    """[task, option]: ``Store.code`` after the option."""
    option_left_s: Floats
    """[task, option]: ``Store.left_s`` after the option."""
    option_switches: Ints
    """[task, option]: ``Store.switches_used`` after the option."""
    code: Ints
    """The successor, [task], as in ``Store``; so are the next four."""
    chosen_unit: Ints
    left_s: Floats
    switches_used: Ints
    ended_s: Floats
    spent_j: Floats
    """Joules spent so far, a single number."""
    running: Ints
    """[unit]: the number of tasks that run on it."""
    slow_downs: Floats
    """[task]: seconds that it takes per second of stand-alone work."""
    costs: Floats
    """[task, price set]: least cost of the task's remaining steps."""
    subsets: Floats
    """[bits of a set of tasks]: see ``soc._least_negated_throughput``."""


def scratch(tasks: int, units: int, sets: int, *, subsets: bool) -> Scratch:
    """Allocate the scratch memory. sets: number of price sets; subsets: whether the objective is the throughput."""
    most_options = 2 * units
    return Scratch(  # in the order of its fields
        np.zeros(tasks, np.int64), np.zeros(tasks, np.int64),
        np.zeros((tasks, most_options), np.int64), np.zeros((tasks, most_options)),
        np.zeros((tasks, most_options), np.int64),
        np.zeros(tasks, np.int64), np.zeros(tasks, np.int64), np.zeros(tasks), np.zeros(tasks, np.int64),
        np.zeros(tasks), np.zeros(1),
        np.zeros(units, np.int64), np.zeros(tasks), np.zeros((tasks, sets)), np.zeros(1 << tasks if subsets else 0),
    )  # fmt: skip


def store(states: int, tasks: int) -> Store:
    """Allocate memory for *states* states of *tasks* tasks."""
    return Store(  # in the order of its fields
        np.zeros((states, tasks), np.int32), np.zeros((states, tasks), np.int32), np.zeros((states, tasks), np.int32),
        np.zeros((states, tasks)), np.zeros((states, tasks)), np.zeros(states), np.zeros(states), np.zeros(states),
        np.full(states, -1, np.int32), np.full(states, -1, np.int32), np.zeros(states, np.bool_),
    )  # fmt: skip


@untyped_called
def _options(tables, rules, work, n, code, left_s, switches_used):
    """Write the options of task *n* at this event into *work*; return their number.

    code, left_s, switches_used: the task's present values. A task at a boundary chooses a unit, a ready task may start
    or wait; all other tasks have one option: no change.
    """
    phase, step, unit = phase_of(code), step_of(code), unit_of(code)
    if phase in (BOUNDARY, HELD):
        return _unit_options(tables, rules, work, n, phase, step, unit, switches_used)
    count = 0
    if phase == READY:
        work.option_codes[n, count] = pack(step, unit, RUNNING)
        work.option_left_s[n, count] = tables.time[n, step, unit]
        work.option_switches[n, count] = switches_used
        count += 1
    work.option_codes[n, count], work.option_left_s[n, count] = code, left_s
    work.option_switches[n, count] = switches_used
    return count + 1


@untyped_called
def _unit_options(tables, rules, work, n, phase, step, unit, switches_used):
    """Write the options of task *n* before *step*, coming from *unit*: one per allowed unit, and phase HELD.

    A task can be held only if it could also start without a move; a held task may only choose a unit without a move,
    because a move begins as soon as the step before has ended.
    """
    count, may_hold = 0, False
    for v in range(tables.time.shape[2]):
        move_s = tables.move[n, step, unit, v]
        if not move_s < np.inf or (phase == HELD and move_s > 0):
            continue
        new_switches_used = 0
        if rules.max_switches >= 0 and not tables.begins[n, step]:
            new_switches_used = switches_used + (unit != v)
            if new_switches_used > rules.max_switches:
                continue
        may_hold |= move_s == 0
        if move_s > 0:
            work.option_codes[n, count], work.option_left_s[n, count] = pack(step, v, MOVING), move_s
        else:
            work.option_codes[n, count], work.option_left_s[n, count] = pack(step, v, RUNNING), tables.time[n, step, v]
        work.option_switches[n, count] = new_switches_used
        count += 1
    if may_hold:
        work.option_codes[n, count], work.option_left_s[n, count] = pack(step, unit, HELD), 0.0
        work.option_switches[n, count] = switches_used
        count += 1
    return count


@untyped_called
def _begin(tables, rules, states, state, work):
    """Prepare the enumeration of a state's successors; return False if a task has no option at all."""
    for n in range(states.code.shape[1]):
        work.option_counts[n] = _options(
            tables, rules, work, n, states.code[state, n], states.left_s[state, n], states.switches_used[state, n]
        )
        work.picks[n] = 0
        if work.option_counts[n] == 0:
            return False
    return True


@untyped_called
def _choose(tables, states, state, work):
    """Combine the picked options into a successor in *work*; return -1, or the first task whose pick is impossible.

    Impossible: more tasks run on a unit than it has instances; or nothing runs or moves, so that no event would follow
    (then the last task is returned).
    """
    work.running[:] = 0
    work.spent_j[0] = states.spent_j[state]
    any_progress = False
    for n in range(len(work.code)):
        pick = work.picks[n]
        code = work.option_codes[n, pick]
        phase = phase_of(code)
        if phase == RUNNING:
            unit = unit_of(code)
            work.running[unit] += 1
            if work.running[unit] > tables.instances[unit]:
                return n
        any_progress |= phase in (RUNNING, MOVING, LEAVING)
        if phase_of(states.code[state, n]) in (BOUNDARY, HELD) and phase != HELD:
            work.spent_j[0] += tables.energy[n, step_of(code), unit_of(code)]
        work.code[n], work.left_s[n] = code, work.option_left_s[n, pick]
        work.switches_used[n] = work.option_switches[n, pick]
        work.ended_s[n], work.chosen_unit[n] = states.ended_s[state, n], unit_of(code)
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
        if work.picks[n] < work.option_counts[n]:
            return True
        work.picks[n] = 0
    return False


@untyped_called
def _has_room(tables, states, state, work, room):
    """Whether *room* free rows of the store suffice for all successors of a state.

    A successor is a combination of one option per task. If there are more combinations than rows, only those that
    ``_choose`` accepts are counted.
    """
    combinations = 1.0
    for n in range(len(work.option_counts)):
        combinations *= work.option_counts[n]
    if combinations <= room:
        return True
    has_more = True
    while has_more and room >= 0:
        blocking_task = _choose(tables, states, state, work)
        room -= blocking_task < 0
        has_more = _next_combination(work, blocking_task if blocking_task >= 0 else len(work.picks) - 1)
    work.picks[:] = 0
    return room >= 0


@untyped_called
def _store_state(states, row, work, now_s, bound, parent):
    """Copy the successor in *work* into a row of *states*."""
    for n in range(len(work.code)):
        states.code[row, n] = work.code[n]
        states.switches_used[row, n] = work.switches_used[n]
        states.chosen_unit[row, n] = work.chosen_unit[n]
        states.left_s[row, n] = work.left_s[n]
        states.ended_s[row, n] = work.ended_s[n]
    states.spent_j[row] = work.spent_j[0]
    states.time_s[row], states.bound[row], states.parent[row], states.next_row[row] = now_s, bound, parent, -1
    states.dropped[row] = False


@untyped_called
def _compare(rules, states, row, work, now_s):
    """Compare the stored state in *row* with the successor in *work* at *now_s*, of the same phases: which dominates.

    -1: the stored state is worse in nothing; 1: the successor is; 0: neither. Compared are the time, the energy, the
    switches and each task's time left; under ``SAME_LATER`` ``_slot`` has matched the times left already.
    """
    stored_wins, new_wins = states.time_s[row] <= now_s + TINY_S, now_s <= states.time_s[row] + TINY_S
    if rules.budget_j < np.inf:
        stored_wins &= states.spent_j[row] <= work.spent_j[0]
        new_wins &= work.spent_j[0] <= states.spent_j[row]
    for n in range(len(work.code)):
        stored_wins &= states.left_s[row, n] <= work.left_s[n] + TINY_S
        new_wins &= work.left_s[n] <= states.left_s[row, n] + TINY_S
        if rules.max_switches >= 0:
            stored_wins &= states.switches_used[row, n] <= work.switches_used[n]
            new_wins &= work.switches_used[n] <= states.switches_used[row, n]
        if rules.throughput:
            stored_wins &= states.ended_s[row, n] <= work.ended_s[n] + TINY_S
            new_wins &= work.ended_s[n] <= states.ended_s[row, n] + TINY_S
        if not stored_wins and not new_wins:
            return 0
    return -1 if stored_wins else 1


@untyped_called
def _slot(rules, table, states, code, left_s):
    """Index of the slot of the hash table for states with these phases, used or free (linear probing, FNV hash).

    Under ``SAME_LATER``, the times left are part of the hash key.
    """
    times_in_key = rules.dominance == SAME_LATER
    key = np.uint64(14695981039346656037)
    for n in range(len(code)):
        key = (key ^ np.uint64(code[n])) * np.uint64(1099511628211)
        if times_in_key:
            key = (key ^ np.uint64(left_s[n] / HASH_STEP_S)) * np.uint64(1099511628211)
        key ^= key >> np.uint64(29)
    mask = np.uint64(len(table) - 1)
    slot = key & mask
    while True:
        row = table[slot]
        if row < 0:
            return slot
        same = True
        for n in range(len(code)):
            if states.code[row, n] != code[n] or (times_in_key and abs(states.left_s[row, n] - left_s[n]) > TINY_S):
                same = False
                break
        if same:
            return slot
        slot = (slot + np.uint64(1)) & mask


@untyped_called
def _is_dominated(rules, states, table, slot, work, now_s):
    """Whether a stored state in the list of *slot* dominates the successor in *work*.

    Stored states that the successor dominates are dropped on the way.
    """
    row, previous = table[slot], -1
    while row >= 0:
        verdict = _compare(rules, states, row, work, now_s)
        if verdict < 0:
            return True
        following = states.next_row[row]
        if verdict > 0:
            states.dropped[row] = True
        if verdict > 0 and previous >= 0:  # the head stays in the list: its phases are the slot's key
            states.next_row[previous] = following
        else:
            previous = row
        row = following
    return False


@untyped_called
def _add_to_list(states, table, slot, row):
    """Insert the state in *row* into the list of *slot*, behind the head, or as the head."""
    head = table[slot]
    if head < 0:
        table[slot] = row
    else:
        states.next_row[row] = states.next_row[head]
        states.next_row[head] = row


@untyped_loop
def relist(rules, states, count, table):
    """Enter the first *count* states into a larger, empty hash table."""
    for row in range(count):
        states.next_row[row] = -1
    for row in range(count):
        _add_to_list(states, table, _slot(rules, table, states, states.code[row], states.left_s[row]), row)


@untyped_loop
def push(heap, size, keys, row):
    """Put *row* on a binary heap of *size* rows, least keys[row] first; the caller increments *size*."""
    place = size
    while place > 0:
        parent = (place - 1) >> 1
        if keys[heap[parent]] <= keys[row]:
            break
        heap[place] = heap[parent]
        place = parent
    heap[place] = row


@untyped_loop
def pop(heap, size, keys):
    """Remove and return the row of the least key from a binary heap of *size* rows; the caller decrements *size*."""
    least, last = heap[0], heap[size - 1]
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size - 1:
            break
        if child + 1 < size - 1 and keys[heap[child + 1]] < keys[heap[child]]:
            child += 1
        if keys[heap[child]] >= keys[last]:
            break
        heap[place] = heap[child]
        place = child
    heap[place] = last
    return least


@untyped_called
def _grow(tables, rules, prices, states, table, work, state, count, best, drop_overflow):
    """Add the successors of *state* whose bound is better than ``best[0]``; return the new number of states, or -1.

    If the store has too few rows: with *drop_overflow*, the successors beyond them are dropped; without, nothing is
    added and -1 returned. A finished successor that beats the best becomes the best.
    """
    if not _begin(tables, rules, states, state, work):
        return count
    if not drop_overflow and not _has_room(tables, states, state, work, len(states.time_s) - count):
        return -1
    has_more = True
    while has_more and count < len(states.time_s):
        blocking_task = _choose(tables, states, state, work)
        if blocking_task < 0:
            now_s = advance(tables, work.code, work.left_s, work.ended_s, work.slow_downs, states.time_s[state], np.inf)
            if finished(work.code):
                value = value_of(rules, work.ended_s)
                if value < best[0] - TINY_S and work.spent_j[0] <= rules.budget_j and now_s <= rules.deadline_s:
                    _store_state(states, count, work, now_s, value, state)
                    best[0], best[1] = value, count
                    states.dropped[count] = True
                    count += 1
            else:
                bound = max(states.bound[state], estimate(tables, rules, prices, work, now_s))
                if bound < best[0] - TINY_S:
                    slot = _slot(rules, table, states, work.code, work.left_s)
                    if not _is_dominated(rules, states, table, slot, work, now_s):
                        _store_state(states, count, work, now_s, bound, state)
                        _add_to_list(states, table, slot, count)
                        count += 1
        has_more = _next_combination(work, blocking_task if blocking_task >= 0 else len(work.picks) - 1)
    return count


@untyped_loop
def root(tables, rules, prices, states, work):
    """Write the initial state, before any step, into row 0."""
    for n in range(len(work.code)):
        work.code[n], work.left_s[n], work.ended_s[n] = pack(0, 0, WAITING), 0.0, 0.0
        work.switches_used[n], work.chosen_unit[n] = 0, 0
    release(tables, work.code)
    work.spent_j[0] = 0.0
    _store_state(states, np.int64(0), work, 0.0, estimate(tables, rules, prices, work, 0.0), np.int64(-1))


@untyped_loop
def grow(tables, rules, prices, states, table, work, layer, count, best):
    """Add the successors of the states in *layer* (rows), as long as there is room; return the new number of states."""
    for state in layer:
        if states.bound[state] < best[0] - TINY_S:
            # np.bool_: for a literal drop_overflow, numba would compile ``_grow`` again, besides for ``expand``.
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
