"""Which head of requests goes next, by each policy that has a compiled loop: twins of ``weft.engine.policies``.

What a policy decides by stands in ``rules``; here is over which heads it looks. Each function becomes part of the loop.
"""

from __future__ import annotations

from weft.kernels import rules as shared
from weft.kernels.buffer import on_chip, prefetchable
from weft.kernels.compiling import called, inlined, part
from weft.kernels.greedy import goes_on, idle, weave_key
from weft.kernels.request_state import (
    ARRAY,
    BATCH,
    CAME,
    CHANNEL,
    COMPUTE,
    COMPUTE_BOUND,
    DUE,
    EDF,
    FAIR,
    FETCH,
    FETCHED,
    FIRST,
    HOST,
    ISSUES,
    JOB,
    LAST,
    LAYERWEAVER,
    LAYERWEAVER_PLUS,
    MAY_GO,
    MEMBERS,
    NEED,
    NEXT,
    NONE,
    OF,
    ON_CHIP,
    POINTER,
    PREMA,
    PRIORITY,
    PRIORITY_OF,
    PUNCTUAL,
    REACHABLE,
    REMAINING,
    ROUND_ROBIN,
    RUNS,
    SERVED,
    YIELDS,
)

resumes = inlined(shared.resumes)
fifo_key = inlined(shared.fifo_key)
edf_key = inlined(shared.edf_key)
waited = inlined(shared.waited)
tokens = inlined(shared.tokens)
level = inlined(shared.level)
weave_due_key = inlined(shared.weave_due_key)
slack = inlined(shared.slack)
rank = inlined(shared.rank)
worth = inlined(shared.worth)
reachable_due = inlined(shared.reachable_due)


@called
def choose(models, terms, rules, state, heads, count):
    """Return the head that goes next. Policies that weave need to know when each would be on chip."""
    table, clocks = heads.table, state.clocks
    now, policy = max(clocks[CHANNEL], clocks[ARRAY] if rules.device != HOST else 0), rules.policy
    in_order = policy <= ROUND_ROBIN
    if policy >= LAYERWEAVER and rules.failsafe == 1:
        in_order = _one_sided(models, table, count)
    if in_order:
        best = _first(state, table, count, policy)
    elif policy == EDF:
        best = _due_first(table, count)
    elif policy == PRIORITY:
        best = _highest(models, terms, rules, table, count, now)
    elif policy == PUNCTUAL:
        best = _punctual(models, terms, rules, heads, count, now)
    elif policy == PREMA:
        best = _richest(models, terms, table, count, clocks[CHANNEL])
    else:
        best = _least_idle(models, rules, state, table, count)
    if policy >= LAYERWEAVER_PLUS:
        end = max(now, table[best, ON_CHIP]) + models.layers[table[best, NEXT], COMPUTE]
        if policy == LAYERWEAVER_PLUS:
            best = _urgent(models, table, count, best, end)
        else:  # nothing is woven, so nothing is stretched
            best = _shortest_of_time(models, table, count, best, end, 100 if in_order else rules.stretch)
    return best


@inlined
def _one_sided(models, table, count):
    """Whether all heads lie on one side of the balance point."""
    heavy = 0
    for i in range(count):
        heavy += models.programs[table[i, RUNS], COMPUTE_BOUND]
    return heavy in (0, count)


@part
def _first(state, table, count, policy):
    """Whole batches: the one served last goes on, or the first in the policy's order comes next."""
    best, least = -1, (0, 0, 0, 0)
    for i in range(count):
        if table[i, MAY_GO]:
            stream, job = table[i, OF], table[i, JOB]
            last = state.jobs[stream, job, LAST] if job >= 0 else -1
            first = table[i, CAME]
            if policy == FAIR:
                first = state.streams[stream, SERVED]
            elif policy == ROUND_ROBIN:
                first = table[i, BATCH]
            key = fifo_key(resumes(job + 1, last), first, 0, stream)
            if best < 0 or key < least:
                best, least = i, key
    return best


@part
def _due_first(table, count):
    best, least = -1, (0, 0)
    for i in range(count):
        if table[i, MAY_GO]:
            key = edf_key(table[i, DUE], table[i, CAME])
            if best < 0 or key < least:
                best, least = i, key
    return best


@inlined
def _alone(models, row):
    """The ticks of a head's batch alone, and those that remain of them."""
    whole = models.layers[models.programs[row[RUNS], FIRST], REMAINING]
    return whole, models.layers[row[NEXT], REMAINING]


@part
def _highest(models, terms, rules, table, count, now):
    """priority: the highest class, the earliest deadline within it."""
    best, least = -1, (0, (0, 0))
    for i in range(count):
        row = table[i]
        if row[MAY_GO]:
            whole, rest = _alone(models, row)
            climbed = rank(terms[row[OF], PRIORITY_OF], waited(now, row[CAME], whole, rest), whole, rules.patience)
            key = -climbed, edf_key(row[DUE], row[CAME])
            if best < 0 or key < least:
                best, least = i, key
    return best


@inlined
def row_worth(models, terms, row, now):
    """punctual: what a head counts."""
    whole, rest = _alone(models, row)
    return worth(terms[row[OF], PRIORITY_OF], row[MEMBERS], waited(now, row[CAME], whole, rest), whole)


@inlined
def with_margin(rules, rest):
    """punctual: remaining ticks with the margin."""
    return rest * (100 + rules.margin) // 100


@part
def _punctual(models, terms, rules, heads, count, now):
    """The quickest of the largest set that can be on time whose next segment makes none of those due before it late."""
    table, costs, order, plans = heads.table, heads.costs, heads.order, 0
    for i in range(count):
        row = table[i]
        if not row[MAY_GO]:
            continue
        whole, rest = _alone(models, row)
        row[NEED] = with_margin(rules, rest) // rules.lanes
        row[REACHABLE] = reachable_due(row[DUE], row[CAME], now + row[NEED])
        patient = waited(now, row[CAME], whole, rest) < rules.patience * whole
        row[YIELDS] = row[REACHABLE] > row[DUE] and patient
        costs[i] = row[NEED] / row_worth(models, terms, row, now)
        place = plans
        while place > 0 and _before(table, costs, i, order[place - 1]):
            order[place] = order[place - 1]
            place -= 1
        order[place] = i
        plans += 1
    if plans == 1:
        return order[0]
    _leave_out(table, costs, order, plans, now)
    best, end, spare = -1, now, NONE
    for place in range(plans):
        i = order[place]
        if table[i, YIELDS] < 0:
            continue
        if best < 0 or (costs[i] < costs[best] and models.layers[table[i, NEXT], COMPUTE] <= spare):
            best = i
        end += table[i, NEED]
        spare = min(spare, table[i, REACHABLE] - end)
    if best < 0:
        for place in range(plans):
            if best < 0 or costs[order[place]] < costs[best]:
                best = order[place]
    return best


@inlined
def _before(table, costs, i, j):
    """Whether a head comes before another in order of deadlines; ``policies.punctual.in_order``."""
    one = table[i, REACHABLE], table[i, YIELDS], costs[i], table[i, OF], table[i, BATCH]
    other = table[j, REACHABLE], table[j, YIELDS], costs[j], table[j, OF], table[j, BATCH]
    return one < other


@part
def _leave_out(table, costs, order, plans, now):
    """Moore and Hodgson: mark the heads outside the largest set that can be on time, by YIELDS below 0."""
    end = now
    for place in range(plans):
        end += table[order[place], NEED]
        while end > table[order[place], REACHABLE]:
            worst = -1
            for earlier in range(place + 1):
                i = order[earlier]
                if table[i, YIELDS] < 0:
                    continue
                if worst < 0 or (-table[i, YIELDS], -costs[i]) < (-table[worst, YIELDS], -costs[worst]):
                    worst = i
            if worst < 0:
                break
            table[worst, YIELDS] = -1
            end -= table[worst, NEED]


@inlined
def _tokens(models, terms, row, now):
    """Tokens of a head, and its time alone."""
    whole, rest = _alone(models, row)
    return tokens(terms[row[OF], PRIORITY_OF], whole, waited(now, row[CAME], whole, rest)), whole


@part
def _richest(models, terms, table, count, now):
    """PREMA: of those that reach the highest threshold, the shortest rest."""
    reached, best = 1, -1
    for i in range(count):
        if table[i, MAY_GO]:
            own, whole = _tokens(models, terms, table[i], now)
            reached = max(reached, level(own, whole))
    for i in range(count):
        if table[i, MAY_GO]:
            own, whole = _tokens(models, terms, table[i], now)
            rest = models.layers[table[i, NEXT], REMAINING]
            if own >= reached * whole and (best < 0 or rest < models.layers[table[best, NEXT], REMAINING]):
                best = i
    return best


@called
def price(models, rules, state, table, count):
    """Write down when each head that may go would be on chip."""
    clocks = state.clocks
    for i in range(count):
        if rules.device == HOST:
            table[i, ON_CHIP] = clocks[CHANNEL]
        elif table[i, MAY_GO]:
            size = models.layers[table[i, NEXT], FETCH]
            x, highest = clocks[FETCHED] - rules.buffer + size, state.peak[clocks[ISSUES]]
            table[i, ON_CHIP], _ = on_chip(state.before, state.peak, clocks[POINTER], highest, clocks[CHANNEL], size, x)


@part
def _least_idle(models, rules, state, table, count):
    """Layerweaver: the least idle time; if all heads let the same resource wait, among the models that help it."""
    clocks, best = state.clocks, -1
    array, fetched, highest = clocks[ARRAY], clocks[FETCHED], state.peak[clocks[ISSUES]]
    wants_weights = wants_space = False
    for again in range(2):
        choice, least, all_weights, all_space = -1, (0, 0), True, True
        for i in range(count):
            if not table[i, MAY_GO]:
                continue
            if not goes_on(wants_weights, wants_space, models.programs[table[i, RUNS], COMPUTE_BOUND] == 1):
                continue
            at, end = table[i, NEXT], table[i, ON_CHIP]
            size, busy = models.layers[at, FETCH], models.layers[at, COMPUTE]
            ahead = prefetchable(array, end, highest + fetched - rules.buffer + size)
            for_weights, for_space, potential, inherent, distance = idle(
                size, busy, end, ahead, array, rules.buffer, rules.largest
            )
            all_weights &= for_weights > 0
            all_space &= for_space > 0
            total = for_weights + for_space + potential
            if rules.policy == LAYERWEAVER:
                key = weave_key(total, inherent, distance)
            else:
                key = weave_due_key(total, table[i, DUE])
            if choice < 0 or key < least:
                choice, least = i, key
        if choice >= 0:
            best = choice
        if again or not (all_weights or all_space):
            break
        wants_weights, wants_space = all_weights, all_space
    return best


@part
def _urgent(models, table, count, woven, end):
    """Layerweaver+: the head due first if it would be late after the woven one, which ends then."""
    urgent = -1
    for i in range(count):
        if table[i, DUE] < NONE and (urgent < 0 or table[i, DUE] < table[urgent, DUE]):
            urgent = i
    if urgent < 0:
        return woven
    spare = slack(table[urgent, DUE], end, models.layers[table[urgent, NEXT], REMAINING], 100)
    return urgent if spare < 0 else woven


@part
def _shortest_of_time(models, table, count, woven, end, stretch):
    """weft+: the head that would be latest after the woven one, which ends then."""
    best, worst = woven, 0
    for i in range(count):
        if table[i, DUE] < NONE:
            spare = slack(table[i, DUE], end, models.layers[table[i, NEXT], REMAINING], stretch)
            if spare < worst:
                best, worst = i, spare
    return best
