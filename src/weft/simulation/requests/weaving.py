"""The compiled loop for requests on an NPU that fetches and computes in parallel (``kernels.request_loop``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from weft.engine.arrivals import Ending
from weft.engine.batches import most_batches
from weft.engine.lateness import late_work
from weft.engine.policies import Policy
from weft.engine.policies.base import LateWork
from weft.engine.policies.edf import EarliestDeadline
from weft.engine.policies.in_order import Fifo
from weft.engine.policies.layerweaver import Layerweaver
from weft.engine.policies.layerweaver_plus import LayerweaverPlus
from weft.engine.policies.prema import Prema
from weft.engine.policies.weft_plus import WeftPlus
from weft.engine.requests import QUEUE_PLACES
from weft.kernels import request_loop
from weft.kernels import request_state as k
from weft.kernels.buffer import NEVER
from weft.simulation.requests.case import Case, Ints, estimates
from weft.simulation.requests.tally import MOST_RECORDED, Tally

BLOCK = 4096

ONLINE: dict[type[Policy], int] = {
    Fifo: k.FIFO,
    EarliestDeadline: k.EDF,
    Prema: k.PREMA,
    Layerweaver: k.LAYERWEAVER,
    LayerweaverPlus: k.LAYERWEAVER_PLUS,
    WeftPlus: k.WEFT_PLUS,
}
"""Policies with a compiled loop for requests."""
RULES = {LateWork.AMONG_OTHERS: k.KEEP, LateWork.LAST: k.DEMOTE, LateWork.WOVEN: k.WEAVE}


def late_rule(policy: Policy, late: str) -> int:
    """What a compiled loop does with late requests."""
    return RULES[late_work(policy, late)]


def serve(case: Case, policy: Policy, late: str, seed: int | None, record: bool) -> Tally:
    """Run a case to its end."""
    models, terms, rules = _static(case, policy, late)
    state = _fresh_state(case, most_batches(late_work(policy, late)))
    recorded = MOST_RECORDED if record else 0
    log = k.LoopLog(np.empty((recorded, 8), np.int64), np.empty((recorded, 3), np.int64))
    streams = len(case.terms)
    sources = [case.arrivals(index, seed) for index in range(streams)]
    arrivals = np.empty(streams * 2 * BLOCK, np.int64)
    known = np.zeros((streams, 2), np.int64)
    more = np.ones(streams, np.bool_)
    while True:
        for index, source in enumerate(sources):
            _refill(arrivals, known[index], more, index, source)
        if request_loop.serve(models, terms, rules, state, log, arrivals, known, more):
            break
        if state.clocks[k.ISSUES] + 1 >= len(state.before):  # more small layers on chip than there are places
            room = np.empty_like(state.before)
            state = state._replace(before=np.concatenate([state.before, room]), peak=np.concatenate([state.peak, room]))
    answers = tuple(Ending(*row) for row in log.answers[: state.clocks[k.ANSWERED]].tolist())
    return Tally(state.clocks, state.counts, state.histogram, answers, log.issues[: state.clocks[k.LOGGED]])


def _refill(arrivals: Ints, known: Ints, more: npt.NDArray[np.bool_], index: int, source: Iterator[Ints]) -> None:
    """Top up a stream's known arrivals to more than none."""
    while more[index] and known[k.HEAD] == known[k.LENGTH]:
        block = next(source, None)
        if block is None:
            more[index] = False
            return
        first = index * 2 * BLOCK
        known[k.HEAD], known[k.LENGTH] = first, first + len(block)
        arrivals[first : first + len(block)] = block


def _static(case: Case, policy: Policy, late: str) -> tuple[k.Models, k.LoopTerms, k.LoopRules]:
    programs = case.setting.programs

    def joined(columns: Sequence[Sequence[int]]) -> Ints:
        return np.concatenate([np.array(column, np.int64) for column in columns])

    def each(name: str) -> Ints:
        return np.array([getattr(term, name) for term in case.terms], np.int64)

    models = k.Models(
        joined([program.fetch for program in programs]),
        joined([program.compute for program in programs]),
        joined(estimates(policy)),
        np.cumsum([0, *map(len, programs)], dtype=np.int64),
        np.array([program.compute_bound for program in programs]),
    )
    terms = k.LoopTerms(
        each("programs"),
        each("deadline"),
        each("max_batch"),
        each("timeout"),
        each("priority"),
        each("think"),
        np.arange(len(case.terms), dtype=np.int64),
    )
    rules = k.LoopRules(
        policy=ONLINE[type(policy)],
        late=late_rule(policy, late),
        foresight=policy.foresight,
        stretch=policy.loop_options.stretch,
        failsafe=int(policy.loop_options.failsafe),
        buffer=case.setting.buffer,
        largest=int(models.fetch.max()),
        warm=case.clock.ticks(case.workload.warmup_s),
        end=case.clock.ticks(case.workload.duration_s),
    )
    return models, terms, rules


def _fresh_state(case: Case, places: int) -> k.LoopState:
    streams = len(case.terms)
    clients = max(1, *(term.clients for term in case.terms), 1)
    batch = max(term.max_batch for term in case.terms)
    before, peak = np.empty(1 << 17, np.int64), np.empty(1 << 17, np.int64)
    before[0], peak[0] = 0, NEVER

    def zeros(*shape: int) -> Ints:
        return np.zeros(shape, np.int64)

    state = k.LoopState(
        zeros(9), before, peak,
        np.empty((streams, QUEUE_PLACES), np.int64), zeros(streams, 2),
        np.empty((streams, QUEUE_PLACES), np.int64), zeros(streams, 2),
        zeros(streams, clients), zeros(streams, 2),
        zeros(streams, places, 8), zeros(streams, places, batch), zeros(streams, 3),
        zeros(streams, 10), zeros(streams, k.BINS),
    )  # fmt: skip
    state.returning_at[:, k.LENGTH] = [term.clients for term in case.terms]
    return state
