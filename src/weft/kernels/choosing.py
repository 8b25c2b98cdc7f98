"""The choice of the next head by every policy that has a compiled loop: twins of ``weft.engine.policies``.

A head is a layer that could be issued next, a row of ``LoopHeads.table``; *count* is the number of heads. The rules by
which policies compare heads are in ``rules``. Each function here becomes part of the loop, whose arrays *models*,
*terms*, *rules*, *state* and *heads* are those of ``request_state``.
"""

from __future__ import annotations

from weft.kernels import request_state as k
from weft.kernels import rules as rule_functions
from weft.kernels.buffer import on_chip, prefetchable
from weft.kernels.compiling import called, inlined, shared
from weft.kernels.greedy import helps_starved, idle, weave_key

resumes = inlined(rule_functions.resumes)
fifo_key = inlined(rule_functions.fifo_key)
edf_key = inlined(rule_functions.edf_key)
waited = inlined(rule_functions.waited)
tokens = inlined(rule_functions.tokens)
level = inlined(rule_functions.level)
weave_due_key = inlined(rule_functions.weave_due_key)
slack = inlined(rule_functions.slack)
rank = inlined(rule_functions.rank)
worth = inlined(rule_functions.worth)
reachable_due = inlined(rule_functions.reachable_due)


@shared
def choose(models, terms, rules, state, heads, count):
    """Return the row of the head that goes next. For policies that weave, ``compute_on_chip`` must be called before."""
    table, clocks = heads.table, state.clocks
    now, policy = max(clocks[k.CHANNEL], clocks[k.ARRAY] if rules.device != k.HOST else 0), rules.policy
    in_order = policy <= k.ROUND_ROBIN
    if policy >= k.LAYERWEAVER and rules.failsafe == 1:
        in_order = _one_sided(models, table, count)
    if in_order or policy <= k.PRIORITY:
        best = _least_key(models, terms, rules, state, table, count, now)
    elif policy == k.PUNCTUAL:
        best = _punctual(models, terms, rules, heads, count, now)
    elif policy == k.PREMA:
        best = _shortest_with_tokens(models, terms, table, count, clocks[k.CHANNEL])
    else:
        best = _least_idle(models, rules, state, table, count)
    if policy >= k.LAYERWEAVER_PLUS:
        end = max(now, table[best, k.ON_CHIP]) + models.layers[table[best, k.HEAD_LAYER], k.COMPUTE]
        if policy == k.LAYERWEAVER_PLUS:
            best = _urgent_or_woven(models, table, count, best, end)
        else:  # where batches run in order, nothing is woven, so remaining times are not stretched
            best = _least_slack_or_woven(models, table, count, best, end, 100 if in_order else rules.stretch)
    return best


@inlined
def _one_sided(models, table, count):
    """Return whether the models of all heads are compute-bound, or all are memory-bound."""
    compute_bound_count = 0
    for i in range(count):
        compute_bound_count += models.programs[table[i, k.HEAD_PROGRAM], k.COMPUTE_BOUND]
    return compute_bound_count in (0, count)


@called
def _least_key(models, terms, rules, state, table, count, now):
    """Policies that compare heads by a key: return the head with the least."""
    best, best_key = -1, (0, 0, 0, 0)
    for i in range(count):
        if table[i, k.MAY_GO]:
            key = _key(models, terms, rules, state, table[i], now)
            if best < 0 or key < best_key:
                best, best_key = i, key
    return best


@inlined
def _key(models, terms, rules, state, row, now):
    """Return the key of a head.

    edf: the deadline. priority: the class, of a class the deadline. Whole batches: the batch served last if it has not
    ended, else the policy's order.
    """
    stream, place = row[k.HEAD_STREAM], row[k.HEAD_PLACE]
    if rules.policy == k.EDF or rules.policy == k.PRIORITY:
        raised_priority = 0
        if rules.policy == k.PRIORITY:
            whole, wait = _length_and_wait(models, row, now)
            raised_priority = rank(terms[stream, k.STREAM_PRIORITY], wait, whole, rules.patience)
        due, arrival = edf_key(row[k.HEAD_DUE], row[k.HEAD_ARRIVAL])
        return -raised_priority, due, arrival, 0
    last = state.jobs[stream, place, k.LAST_ISSUED] if place >= 0 else -1
    order = row[k.HEAD_ARRIVAL]
    if rules.policy == k.FAIR:
        order = state.streams[stream, k.SERVED]
    elif rules.policy == k.ROUND_ROBIN:
        order = row[k.HEAD_QUERY]
    return fifo_key(resumes(place + 1, last), order, 0, stream)  # place + 1 is above 0 only for begun batches


@inlined
def _length_and_wait(models, row, now):
    """Return the estimated ticks of a head's whole batch alone on the device, and the ticks in which it waited."""
    whole = models.layers[models.programs[row[k.HEAD_PROGRAM], k.FIRST], k.REMAINING]
    return whole, waited(now, row[k.HEAD_ARRIVAL], whole, models.layers[row[k.HEAD_LAYER], k.REMAINING])


@inlined
def row_worth(models, terms, row, now):
    """punctual: return how much a head counts (its worth)."""
    whole, wait = _length_and_wait(models, row, now)
    return worth(terms[row[k.HEAD_STREAM], k.STREAM_PRIORITY], row[k.HEAD_SIZE], wait, whole)


@inlined
def with_margin(rules, remaining):
    """punctual: return the remaining ticks with the margin."""
    return remaining * (100 + rules.margin) // 100


@called
def _punctual(models, terms, rules, heads, count, now):
    """punctual: of the largest set of heads that can be on time, return the cheapest that makes no earlier one late.

    If no head can be on time, the cheapest of all. Cost: remaining time over worth.
    """
    table, costs, order, candidates = heads.table, heads.costs, heads.order, 0
    for i in range(count):
        row = table[i]
        if not row[k.MAY_GO]:
            continue
        whole, wait = _length_and_wait(models, row, now)
        row[k.NEED] = with_margin(rules, models.layers[row[k.HEAD_LAYER], k.REMAINING]) // rules.lanes
        row[k.REACHABLE] = reachable_due(row[k.HEAD_DUE], row[k.HEAD_ARRIVAL], now + row[k.NEED])
        row[k.YIELDS] = row[k.REACHABLE] > row[k.HEAD_DUE] and wait < rules.patience * whole
        costs[i] = row[k.NEED] / row_worth(models, terms, row, now)
        place = candidates  # insertion sort by deadline
        while place > 0 and _due_before(table, costs, i, order[place - 1]):
            order[place] = order[place - 1]
            place -= 1
        order[place] = i
        candidates += 1
    if candidates == 1:
        return order[0]
    _mark_late(table, costs, order, candidates, now)
    best, planned_end, spare = -1, now, k.NONE  # spare: how long work may run first without making an earlier one late
    for place in range(candidates):
        i = order[place]
        if table[i, k.YIELDS] < 0:
            continue
        if best < 0 or (costs[i] < costs[best] and models.layers[table[i, k.HEAD_LAYER], k.COMPUTE] <= spare):
            best = i
        planned_end += table[i, k.NEED]
        spare = min(spare, table[i, k.REACHABLE] - planned_end)
    if best < 0:
        for place in range(candidates):
            if best < 0 or costs[order[place]] < costs[best]:
                best = order[place]
    return best


@inlined
def _due_before(table, costs, i, j):
    """Return whether head *i* comes before head *j* in order of deadlines; twin of ``policies.punctual.due_order``."""
    key_i = table[i, k.REACHABLE], table[i, k.YIELDS], costs[i], table[i, k.HEAD_STREAM], table[i, k.HEAD_QUERY]
    key_j = table[j, k.REACHABLE], table[j, k.YIELDS], costs[j], table[j, k.HEAD_STREAM], table[j, k.HEAD_QUERY]
    return key_i < key_j


@called
def _mark_late(table, costs, order, count, now):
    """Moore and Hodgson: mark the heads outside the largest set that can be on time by a YIELDS of -1.

    Heads that yield are left out first, then those of the highest cost. order: the rows of *count* heads by deadline.
    """
    planned_end = now
    for place in range(count):
        planned_end += table[order[place], k.NEED]
        while planned_end > table[order[place], k.REACHABLE]:
            worst = -1
            for earlier in range(place + 1):
                i = order[earlier]
                if table[i, k.YIELDS] < 0:
                    continue
                if worst < 0 or (-table[i, k.YIELDS], -costs[i]) < (-table[worst, k.YIELDS], -costs[worst]):
                    worst = i
            if worst < 0:
                break
            table[worst, k.YIELDS] = -1
            planned_end -= table[worst, k.NEED]


@inlined
def _tokens(models, terms, row, now):
    """Return the tokens of a head (times its time alone), and its time alone."""
    whole, wait = _length_and_wait(models, row, now)
    return tokens(terms[row[k.HEAD_STREAM], k.STREAM_PRIORITY], whole, wait), whole


@called
def _shortest_with_tokens(models, terms, table, count, now):
    """prema: return the head with the shortest remaining time among those that reach the highest threshold."""
    reached, best = 1, -1
    for i in range(count):
        if table[i, k.MAY_GO]:
            own_tokens, whole = _tokens(models, terms, table[i], now)
            reached = max(reached, level(own_tokens, whole))
    for i in range(count):
        if table[i, k.MAY_GO]:
            own_tokens, whole = _tokens(models, terms, table[i], now)
            remaining = models.layers[table[i, k.HEAD_LAYER], k.REMAINING]
            if own_tokens >= reached * whole and (
                best < 0 or remaining < models.layers[table[best, k.HEAD_LAYER], k.REMAINING]
            ):
                best = i
    return best


@called
def compute_on_chip(models, rules, state, table, count):
    """Write ON_CHIP of every head that may be issued: the tick at which its weights would be on chip."""
    clocks = state.clocks
    for i in range(count):
        if rules.device == k.HOST:
            table[i, k.ON_CHIP] = clocks[k.CHANNEL]
        elif table[i, k.MAY_GO]:
            size = models.layers[table[i, k.HEAD_LAYER], k.FETCH]
            x, highest = clocks[k.FETCHED] - rules.buffer + size, state.peak[clocks[k.ISSUES]]  # X of ``buffer``
            table[i, k.ON_CHIP], _ = on_chip(
                state.before, state.peak, clocks[k.POINTER], highest, clocks[k.CHANNEL], size, x
            )


@called
def _least_idle(models, rules, state, table, count):
    """Layerweaver: return the head that causes the least idle time.

    If all heads let the same resource wait, only the heads that help that resource count (``rules.helps_starved``), as
    long as there are any.
    """
    clocks, best = state.clocks, -1
    array, fetched, highest = clocks[k.ARRAY], clocks[k.FETCHED], state.peak[clocks[k.ISSUES]]
    wants_weights = wants_space = False
    for second_pass in range(2):
        choice, best_key, all_weights, all_space = -1, (0, 0), True, True
        for i in range(count):
            if not table[i, k.MAY_GO]:
                continue
            compute_bound = models.programs[table[i, k.HEAD_PROGRAM], k.COMPUTE_BOUND] == 1
            if not helps_starved(wants_weights, wants_space, compute_bound):
                continue
            layer, end = table[i, k.HEAD_LAYER], table[i, k.ON_CHIP]
            size, busy = models.layers[layer, k.FETCH], models.layers[layer, k.COMPUTE]
            ahead = prefetchable(array, end, highest + fetched - rules.buffer + size)
            for_weights, for_space, potential, inherent, distance = idle(
                size, busy, end, ahead, array, rules.buffer, rules.largest
            )
            all_weights &= for_weights > 0
            all_space &= for_space > 0
            total = for_weights + for_space + potential
            if rules.policy == k.LAYERWEAVER:
                key = weave_key(total, inherent, distance)
            else:
                key = weave_due_key(total, table[i, k.HEAD_DUE])
            if choice < 0 or key < best_key:
                choice, best_key = i, key
        if choice >= 0:
            best = choice
        if second_pass or not (all_weights or all_space):
            break
        wants_weights, wants_space = all_weights, all_space
    return best


@called
def _urgent_or_woven(models, table, count, woven, end):
    """Layerweaver+: return the head that is due first if it would be late after *woven*, else *woven*.

    woven: the head with the least idle time, which would end at *end*.
    """
    urgent = -1
    for i in range(count):
        if table[i, k.HEAD_DUE] < k.NONE and (urgent < 0 or table[i, k.HEAD_DUE] < table[urgent, k.HEAD_DUE]):
            urgent = i
    if urgent < 0:
        return woven
    spare = slack(table[urgent, k.HEAD_DUE], end, models.layers[table[urgent, k.HEAD_LAYER], k.REMAINING], 100)
    return urgent if spare < 0 else woven


@called
def _least_slack_or_woven(models, table, count, woven, end, stretch):
    """weft+: return the head with the least slack if that would be below 0 after *woven*, else *woven*.

    woven: the head with the least idle time, which would end at *end*. stretch: percent of remaining times.
    """
    best, worst = woven, 0
    for i in range(count):
        if table[i, k.HEAD_DUE] < k.NONE:
            spare = slack(table[i, k.HEAD_DUE], end, models.layers[table[i, k.HEAD_LAYER], k.REMAINING], stretch)
            if spare < worst:
                best, worst = i, spare
    return best
