"""Which head of requests goes next, by each policy that has a compiled loop: twins of ``weft.engine.policies``.

What a policy decides by stands in ``rules``; here is over which heads it looks. Each function becomes part of the loop.
"""

from __future__ import annotations

from weft.kernels import request_state as k
from weft.kernels import rules as rule_functions
from weft.kernels.buffer import on_chip, prefetchable
from weft.kernels.compiling import called, inlined, shared
from weft.kernels.greedy import goes_on, idle, weave_key

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
    """Return the head that goes next. Policies that weave need to know when each would be on chip."""
    table, clocks = heads.table, state.clocks
    now, policy = max(clocks[k.CHANNEL], clocks[k.ARRAY] if rules.device != k.HOST else 0), rules.policy
    in_order = policy <= k.ROUND_ROBIN
    if policy >= k.LAYERWEAVER and rules.failsafe == 1:
        in_order = _one_sided(models, table, count)
    if in_order:
        best = _first(state, table, count, policy)
    elif policy == k.EDF:
        best = _due_first(table, count)
    elif policy == k.PRIORITY:
        best = _highest(models, terms, rules, table, count, now)
    elif policy == k.PUNCTUAL:
        best = _punctual(models, terms, rules, heads, count, now)
    elif policy == k.PREMA:
        best = _richest(models, terms, table, count, clocks[k.CHANNEL])
    else:
        best = _least_idle(models, rules, state, table, count)
    if policy >= k.LAYERWEAVER_PLUS:
        end = max(now, table[best, k.ON_CHIP]) + models.layers[table[best, k.NEXT], k.COMPUTE]
        if policy == k.LAYERWEAVER_PLUS:
            best = _urgent(models, table, count, best, end)
        else:  # nothing is woven, so nothing is stretched
            best = _shortest_of_time(models, table, count, best, end, 100 if in_order else rules.stretch)
    return best


@inlined
def _one_sided(models, table, count):
    """Whether all heads lie on one side of the balance point."""
    heavy = 0
    for i in range(count):
        heavy += models.programs[table[i, k.RUNS], k.COMPUTE_BOUND]
    return heavy in (0, count)


@called
def _first(state, table, count, policy):
    """Whole batches: the one served last goes on, or the first in the policy's order comes next."""
    best, least = -1, (0, 0, 0, 0)
    for i in range(count):
        if table[i, k.MAY_GO]:
            stream, job = table[i, k.OF], table[i, k.JOB]
            last = state.jobs[stream, job, k.LAST] if job >= 0 else -1
            first = table[i, k.CAME]
            if policy == k.FAIR:
                first = state.streams[stream, k.SERVED]
            elif policy == k.ROUND_ROBIN:
                first = table[i, k.BATCH]
            key = fifo_key(resumes(job + 1, last), first, 0, stream)
            if best < 0 or key < least:
                best, least = i, key
    return best


@called
def _due_first(table, count):
    best, least = -1, (0, 0)
    for i in range(count):
        if table[i, k.MAY_GO]:
            key = edf_key(table[i, k.DUE], table[i, k.CAME])
            if best < 0 or key < least:
                best, least = i, key
    return best


@inlined
def _alone(models, row):
    """The ticks of a head's batch alone, and those that remain of them."""
    whole = models.layers[models.programs[row[k.RUNS], k.FIRST], k.REMAINING]
    return whole, models.layers[row[k.NEXT], k.REMAINING]


@called
def _highest(models, terms, rules, table, count, now):
    """priority: the highest class, the earliest deadline within it."""
    best, least = -1, (0, (0, 0))
    for i in range(count):
        row = table[i]
        if row[k.MAY_GO]:
            whole, rest = _alone(models, row)
            climbed = rank(
                terms[row[k.OF], k.PRIORITY_OF], waited(now, row[k.CAME], whole, rest), whole, rules.patience
            )
            key = -climbed, edf_key(row[k.DUE], row[k.CAME])
            if best < 0 or key < least:
                best, least = i, key
    return best


@inlined
def row_worth(models, terms, row, now):
    """punctual: what a head counts."""
    whole, rest = _alone(models, row)
    return worth(terms[row[k.OF], k.PRIORITY_OF], row[k.MEMBERS], waited(now, row[k.CAME], whole, rest), whole)


@inlined
def with_margin(rules, rest):
    """punctual: remaining ticks with the margin."""
    return rest * (100 + rules.margin) // 100


@called
def _punctual(models, terms, rules, heads, count, now):
    """The quickest of the largest set that can be on time whose next segment makes none of those due before it late."""
    table, costs, order, plans = heads.table, heads.costs, heads.order, 0
    for i in range(count):
        row = table[i]
        if not row[k.MAY_GO]:
            continue
        whole, rest = _alone(models, row)
        row[k.NEED] = with_margin(rules, rest) // rules.lanes
        row[k.REACHABLE] = reachable_due(row[k.DUE], row[k.CAME], now + row[k.NEED])
        patient = waited(now, row[k.CAME], whole, rest) < rules.patience * whole
        row[k.YIELDS] = row[k.REACHABLE] > row[k.DUE] and patient
        costs[i] = row[k.NEED] / row_worth(models, terms, row, now)
        place = plans
        while place > 0 and _before(table, costs, i, order[place - 1]):
            order[place] = order[place - 1]
            place -= 1
        order[place] = i
        plans += 1
    if plans == 1:
        return order[0]
    _leave_out(table, costs, order, plans, now)
    best, end, spare = -1, now, k.NONE
    for place in range(plans):
        i = order[place]
        if table[i, k.YIELDS] < 0:
            continue
        if best < 0 or (costs[i] < costs[best] and models.layers[table[i, k.NEXT], k.COMPUTE] <= spare):
            best = i
        end += table[i, k.NEED]
        spare = min(spare, table[i, k.REACHABLE] - end)
    if best < 0:
        for place in range(plans):
            if best < 0 or costs[order[place]] < costs[best]:
                best = order[place]
    return best


@inlined
def _before(table, costs, i, j):
    """Whether a head comes before another in order of deadlines; ``policies.punctual.due_order``."""
    one = table[i, k.REACHABLE], table[i, k.YIELDS], costs[i], table[i, k.OF], table[i, k.BATCH]
    other = table[j, k.REACHABLE], table[j, k.YIELDS], costs[j], table[j, k.OF], table[j, k.BATCH]
    return one < other


@called
def _leave_out(table, costs, order, plans, now):
    """Moore and Hodgson: mark the heads outside the largest set that can be on time, by YIELDS below 0."""
    end = now
    for place in range(plans):
        end += table[order[place], k.NEED]
        while end > table[order[place], k.REACHABLE]:
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
            end -= table[worst, k.NEED]


@inlined
def _tokens(models, terms, row, now):
    """Tokens of a head, and its time alone."""
    whole, rest = _alone(models, row)
    return tokens(terms[row[k.OF], k.PRIORITY_OF], whole, waited(now, row[k.CAME], whole, rest)), whole


@called
def _richest(models, terms, table, count, now):
    """PREMA: of those that reach the highest threshold, the shortest rest."""
    reached, best = 1, -1
    for i in range(count):
        if table[i, k.MAY_GO]:
            own, whole = _tokens(models, terms, table[i], now)
            reached = max(reached, level(own, whole))
    for i in range(count):
        if table[i, k.MAY_GO]:
            own, whole = _tokens(models, terms, table[i], now)
            rest = models.layers[table[i, k.NEXT], k.REMAINING]
            if own >= reached * whole and (best < 0 or rest < models.layers[table[best, k.NEXT], k.REMAINING]):
                best = i
    return best


@called
def price(models, rules, state, table, count):
    """Write down when each head that may go would be on chip."""
    clocks = state.clocks
    for i in range(count):
        if rules.device == k.HOST:
            table[i, k.ON_CHIP] = clocks[k.CHANNEL]
        elif table[i, k.MAY_GO]:
            size = models.layers[table[i, k.NEXT], k.FETCH]
            x, highest = clocks[k.FETCHED] - rules.buffer + size, state.peak[clocks[k.ISSUES]]
            table[i, k.ON_CHIP], _ = on_chip(
                state.before, state.peak, clocks[k.POINTER], highest, clocks[k.CHANNEL], size, x
            )


@called
def _least_idle(models, rules, state, table, count):
    """Layerweaver: the least idle time; if all heads let the same resource wait, among the models that help it."""
    clocks, best = state.clocks, -1
    array, fetched, highest = clocks[k.ARRAY], clocks[k.FETCHED], state.peak[clocks[k.ISSUES]]
    wants_weights = wants_space = False
    for again in range(2):
        choice, least, all_weights, all_space = -1, (0, 0), True, True
        for i in range(count):
            if not table[i, k.MAY_GO]:
                continue
            if not goes_on(wants_weights, wants_space, models.programs[table[i, k.RUNS], k.COMPUTE_BOUND] == 1):
                continue
            at, end = table[i, k.NEXT], table[i, k.ON_CHIP]
            size, busy = models.layers[at, k.FETCH], models.layers[at, k.COMPUTE]
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
                key = weave_due_key(total, table[i, k.DUE])
            if choice < 0 or key < least:
                choice, least = i, key
        if choice >= 0:
            best = choice
        if again or not (all_weights or all_space):
            break
        wants_weights, wants_space = all_weights, all_space
    return best


@called
def _urgent(models, table, count, woven, end):
    """Layerweaver+: the head due first if it would be late after the woven one, which ends then."""
    urgent = -1
    for i in range(count):
        if table[i, k.DUE] < k.NONE and (urgent < 0 or table[i, k.DUE] < table[urgent, k.DUE]):
            urgent = i
    if urgent < 0:
        return woven
    spare = slack(table[urgent, k.DUE], end, models.layers[table[urgent, k.NEXT], k.REMAINING], 100)
    return urgent if spare < 0 else woven


@called
def _shortest_of_time(models, table, count, woven, end, stretch):
    """weft+: the head that would be latest after the woven one, which ends then."""
    best, worst = woven, 0
    for i in range(count):
        if table[i, k.DUE] < k.NONE:
            spare = slack(table[i, k.DUE], end, models.layers[table[i, k.NEXT], k.REMAINING], stretch)
            if spare < worst:
                best, worst = i, spare
    return best
