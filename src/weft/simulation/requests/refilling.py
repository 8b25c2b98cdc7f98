"""The compiled loop for one stream whose batches shrink and are refilled (``kernels.refill``)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.devices import TiledNpu
from weft.engine.arrivals import Ending
from weft.engine.batches import most_batches
from weft.engine.lateness import late_work
from weft.engine.policies import Policy
from weft.engine.policies.batching import Adaptive, LazyBatching, Serial
from weft.engine.policies.fluid import Fluid
from weft.engine.policies.top_up import UNDER_WAY, TopUp, leaving
from weft.engine.requests import QUEUE_PLACES
from weft.kernels import refill as k
from weft.kernels import request_state as counted
from weft.simulation.requests.case import Case, Ints, estimates
from weft.simulation.requests.compiled import LATE_RULES
from weft.simulation.requests.tally import MOST_RECORDED, Tally

KERNELS: dict[type[Policy], int] = {
    Serial: k.WHOLE,
    Adaptive: k.WHOLE,
    LazyBatching: k.LAZY,
    Fluid: k.FLUID,
    TopUp: k.TOP_UP,
}
"""Policies with a compiled loop."""


def applies(case: Case, policy: Policy) -> bool:
    """Whether there is a compiled loop for this: one open stream on a device that computes one layer at a time."""
    return (
        type(policy) in KERNELS
        and len(case.terms) == policy.setting.lanes == 1
        and case.terms[0].think < 0
        and isinstance(case.device, TiledNpu)
    )


def serve(case: Case, policy: Policy, late: str, seed: int | None, record: bool) -> Tally:
    """Run a case to its end."""
    model, rules = _static(case, policy, late)
    state = k.fresh_state(rules.max_batch, max(rules.most_jobs, rules.max_batch), QUEUE_PLACES)
    recorded = MOST_RECORDED if record else 0
    log = k.RefillLog(np.empty((recorded, 8), np.int64), np.empty((recorded, 4), np.int64))
    for arrivals, leaves in _blocks(case, policy, seed):
        k.serve(model, rules, state, log, arrivals, leaves, np.array([0, len(arrivals)]), True)
    nothing = np.empty(0, np.int64)
    k.serve(model, rules, state, log, nothing, nothing, np.zeros(2, np.int64), False)
    answers = tuple(Ending(*row) for row in log.answers[: state.clocks[counted.ANSWERED]].tolist())
    issues = log.issues[: state.clocks[counted.LOGGED]]
    return Tally(state.clocks, state.counts[np.newaxis], state.histogram[np.newaxis], answers, issues)


def _blocks(case: Case, policy: Policy, seed: int | None) -> Iterator[tuple[Ints, Ints]]:
    """Arrivals, and after how many layers each of them is done."""
    fates, ahead = case.leaves(0, policy.setting, seed), np.empty(0, np.int64)
    for block in case.arrivals(0, seed):
        while fates and len(ahead) < len(block):
            ahead = np.concatenate([ahead, next(fates)])
        yield block, ahead[: len(block)] if fates else np.zeros(len(block), np.int64)
        ahead = ahead[len(block) :]


def _static(case: Case, policy: Policy, late: str) -> tuple[k.RefillModel, k.RefillRules]:
    (term,), options = case.terms, policy.loop_options
    sizes = term.max_batch if policy.traits.batches else 1
    programs = policy.setting.programs[term.programs : term.programs + sizes]
    remaining = estimates(policy)[term.programs : term.programs + sizes]
    first, layers = programs[0], len(programs[0])
    exits = np.zeros(layers + 1, np.bool_)
    exits[list(first.exits)] = True
    shares = np.zeros((layers, layers + 1))
    for layer in range(layers):
        for stop, share in leaving(first, layer).items():
            shares[layer, stop] = share
    model = k.RefillModel(
        np.array([each.compute for each in programs], np.int64),
        np.array([(*each, 0) for each in remaining], np.int64),
        exits,
        shares,
        term.programs,
    )
    rules = k.RefillRules(
        policy=KERNELS[type(policy)],
        late=LATE_RULES[late_work(policy, late)],
        most_jobs=most_batches(late_work(policy, late)),
        foresight=policy.foresight,
        max_batch=sizes,
        deadline=term.deadline,
        wait=term.timeout if policy.waits is None else term.deadline * policy.waits // 100,
        miss=first.remaining[0] * options.miss // 100,
        under_way=UNDER_WAY,
        backlog=options.backlog,
        warm=case.clock.ticks(case.workload.warmup_s),
    )
    return model, rules
