"""Which head of requests goes next, by each policy that has a compiled loop: twins of ``weft.engine.policies``.

What a policy decides by stands in ``rules``; here is over which heads it looks. Each function becomes part of the loop.
"""

from __future__ import annotations

from weft.kernels import rules as shared
from weft.kernels.buffer import on_chip, prefetchable
from weft.kernels.compiling import inlined, part
from weft.kernels.greedy import goes_on, idle, weave_key
from weft.kernels.request_state import (
    CAME,
    DUE,
    EDF,
    FIFO,
    JOB,
    LAST,
    LAYERWEAVER,
    LAYERWEAVER_PLUS,
    NEXT,
    NONE,
    OF,
    PREMA,
    RUNS,
)

resumes = inlined(shared.resumes)
fifo_key = inlined(shared.fifo_key)
edf_key = inlined(shared.edf_key)
waited = inlined(shared.waited)
tokens = inlined(shared.tokens)
level = inlined(shared.level)
weave_due_key = inlined(shared.weave_due_key)
slack = inlined(shared.slack)


@part
def choose(models, terms, rules, state, heads, count, npu):
    """The head that goes next. Policies that weave need to know when each would be on chip."""
    in_order = rules.policy == FIFO
    if rules.policy >= LAYERWEAVER and rules.failsafe == 1:
        in_order = _one_sided(models, heads, count)
    best = -1
    if in_order:
        best = _first(state, heads, count)
    elif rules.policy == EDF:
        best = _due_first(heads, count)
    elif rules.policy == PREMA:
        best = _richest(models, terms, heads, count, npu.channel)
    else:
        best = _least_idle(models, rules, state, heads, count, npu)
    if rules.policy >= LAYERWEAVER_PLUS:
        end = max(npu.array, heads.ends[best]) + models.compute[heads.table[best, NEXT]]
        if rules.policy == LAYERWEAVER_PLUS:
            best = _urgent(models, heads, count, best, end)
        else:  # nothing is woven, so nothing is stretched
            best = _shortest_of_time(models, heads, count, best, end, 100 if in_order else rules.stretch)
    return best


@inlined
def _one_sided(models, heads, count):
    """Whether all heads lie on one side of the balance point."""
    heavy = 0
    for i in range(count):
        heavy += models.compute_bound[heads.table[i, RUNS]]
    return heavy in (0, count)


@part
def _first(state, heads, count):
    """Whole batches: the one served last goes on, or the first comes next."""
    best, least = -1, (0, 0, 0, 0)
    for i in range(count):
        if heads.may_go[i]:
            stream, job = heads.table[i, OF], heads.table[i, JOB]
            last = state.jobs[stream, job, LAST] if job >= 0 else -1
            key = fifo_key(resumes(job + 1, last), heads.table[i, CAME], 0, stream)
            if best < 0 or key < least:
                best, least = i, key
    return best


@part
def _due_first(heads, count):
    best, least = -1, (0, 0)
    for i in range(count):
        if heads.may_go[i]:
            key = edf_key(heads.table[i, DUE], heads.table[i, CAME])
            if best < 0 or key < least:
                best, least = i, key
    return best


@inlined
def _tokens(models, terms, row, now):
    """Tokens of a head, and its time alone."""
    whole = models.remaining[models.first[row[RUNS]]]
    return tokens(terms.priority[row[OF]], whole, waited(now, row[CAME], whole, models.remaining[row[NEXT]])), whole


@part
def _richest(models, terms, heads, count, now):
    """PREMA: of those that reach the highest threshold, the shortest rest."""
    reached, best = 1, -1
    for i in range(count):
        if heads.may_go[i]:
            own, whole = _tokens(models, terms, heads.table[i], now)
            reached = max(reached, level(own, whole))
    for i in range(count):
        if heads.may_go[i]:
            own, whole = _tokens(models, terms, heads.table[i], now)
            rest = models.remaining[heads.table[i, NEXT]]
            if own >= reached * whole and (best < 0 or rest < models.remaining[heads.table[best, NEXT]]):
                best = i
    return best


@part
def price(models, rules, state, heads, count, npu):
    """When each head that may go would be on chip."""
    highest = state.peak[npu.n]
    for i in range(count):
        if heads.may_go[i]:
            size = models.fetch[heads.table[i, NEXT]]
            x = npu.fetched - rules.buffer + size
            heads.ends[i], _ = on_chip(state.before, state.peak, npu.seen, highest, npu.channel, size, x)


@part
def _least_idle(models, rules, state, heads, count, npu):
    """Layerweaver: the least idle time; if all heads let the same resource wait, among the models that help it."""
    best, highest = -1, state.peak[npu.n]
    wants_weights = wants_space = False
    for again in range(2):
        choice, least, all_weights, all_space = -1, (0, 0), True, True
        for i in range(count):
            if not heads.may_go[i]:
                continue
            if not goes_on(wants_weights, wants_space, models.compute_bound[heads.table[i, RUNS]]):
                continue
            at, end = heads.table[i, NEXT], heads.ends[i]
            size, busy = models.fetch[at], models.compute[at]
            ahead = prefetchable(npu.array, end, highest + npu.fetched - rules.buffer + size)
            for_weights, for_space, potential, inherent, distance = idle(
                size, busy, end, ahead, npu.array, rules.buffer, rules.largest
            )
            all_weights &= for_weights > 0
            all_space &= for_space > 0
            total = for_weights + for_space + potential
            if rules.policy == LAYERWEAVER:
                key = weave_key(total, inherent, distance)
            else:
                key = weave_due_key(total, heads.table[i, DUE])
            if choice < 0 or key < least:
                choice, least = i, key
        if choice >= 0:
            best = choice
        if again or not (all_weights or all_space):
            break
        wants_weights, wants_space = all_weights, all_space
    return best


@part
def _urgent(models, heads, count, woven, end):
    """Layerweaver+: the head due first if it would be late after the woven one, which ends then."""
    urgent = -1
    for i in range(count):
        if heads.table[i, DUE] < NONE and (urgent < 0 or heads.table[i, DUE] < heads.table[urgent, DUE]):
            urgent = i
    if urgent < 0:
        return woven
    spare = slack(heads.table[urgent, DUE], end, models.remaining[heads.table[urgent, NEXT]], 100)
    return urgent if spare < 0 else woven


@part
def _shortest_of_time(models, heads, count, woven, end, stretch):
    """weft+: the head that would be latest after the woven one, which ends then."""
    best, worst = woven, 0
    for i in range(count):
        if heads.table[i, DUE] < NONE:
            spare = slack(heads.table[i, DUE], end, models.remaining[heads.table[i, NEXT]], stretch)
            if spare < worst:
                best, worst = i, spare
    return best
