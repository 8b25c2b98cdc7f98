"""The compiled loop over requests (``kernels.request_loop``): which runs it covers, and its arrays."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from weft.base.child_processes import start_detached
from weft.devices import Host, HostModel, Npu
from weft.devices.costs.program import Program
from weft.devices.lanes import LEAST_SPEED
from weft.engine.arrivals import Ending
from weft.engine.batches import most_batches
from weft.engine.lateness import late_work
from weft.engine.policies import Policy, Setting
from weft.engine.policies.base import LateWork
from weft.engine.policies.batching import Adaptive, LazyBatching, Serial
from weft.engine.policies.edf import EarliestDeadline
from weft.engine.policies.fluid import Fluid
from weft.engine.policies.in_order import Fair, Fifo, RoundRobin
from weft.engine.policies.layerweaver import Layerweaver
from weft.engine.policies.layerweaver_plus import LayerweaverPlus
from weft.engine.policies.prema import Prema
from weft.engine.policies.priority import PriorityClasses
from weft.engine.policies.punctual import PATIENCE, Punctual
from weft.engine.policies.top_up import UNDER_WAY, TopUp, remaining_exit_shares
from weft.engine.policies.weft_plus import WeftPlus
from weft.engine.requests import QUEUE_PLACES
from weft.engine.tickets import Terms
from weft.kernels import refilling as r
from weft.kernels import request_loop
from weft.kernels import request_state as k
from weft.kernels.buffer import columns
from weft.kernels.compiling import cache_folder
from weft.simulation.requests import host
from weft.simulation.requests.case import Case, Device, Ints, estimated, prepare
from weft.simulation.requests.tally import MOST_RECORDED, Tally
from weft.workloads.requests import Stream, Workload

RULES: dict[type[Policy], int] = {
    Fifo: k.FIFO,
    Serial: k.FIFO,
    Adaptive: k.FIFO,
    Fair: k.FAIR,
    RoundRobin: k.ROUND_ROBIN,
    EarliestDeadline: k.EDF,
    PriorityClasses: k.PRIORITY,
    Punctual: k.PUNCTUAL,
    Prema: k.PREMA,
    Layerweaver: k.LAYERWEAVER,
    LayerweaverPlus: k.LAYERWEAVER_PLUS,
    WeftPlus: k.WEFT_PLUS,
}
"""Policies with a compiled rule -> the rule's number; some policies differ only in their batches."""
REFILLS: dict[type[Policy], int] = {LazyBatching: r.LAZY, Fluid: r.FLUID, TopUp: r.TOP_UP}
"""Policies with a compiled rule that refill batches: for one stream on one lane."""
ONLINE = (Fifo, EarliestDeadline, Prema, Layerweaver, LayerweaverPlus, WeftPlus)
"""The policies with a compiled rule that are compared for requests on an NPU."""
LATE_RULES = {LateWork.AMONG_OTHERS: k.KEEP, LateWork.LAST: k.DEMOTE, LateWork.WOVEN: k.WEAVE}
LOCK = "compiling.lock"
"""File beside the compiled loop that is locked by the process that compiles it in the background."""
MOST_ON_CHIP = 1 << 17
"""Layers in an NPU's buffer for which there is room at first, 2 MB; a run with more layers enlarges the arrays."""


def applies(case: Case, policy: Policy) -> bool:
    """Return whether the compiled loop covers a run.

    The policy must have a compiled rule, lanes must not be shares, take segments ahead or have gates, and exit
    thresholds must not depend on the load.
    """
    setting, weaves = policy.setting, RULES.get(type(policy), 0) >= k.LAYERWEAVER
    if case.is_steered or setting.shares or setting.ahead or any(program.gated for program in setting.programs):
        return False
    if type(policy) in REFILLS:
        return len(case.terms) == setting.lanes == 1 and not isinstance(case.device, Npu)
    if type(policy) not in RULES:
        return False
    if isinstance(case.device, Npu):
        return not any(program.exits for program in setting.programs)
    # Without a memory channel nothing is woven: the loop only covers the failsafe, which runs batches in order.
    return not weaves or (policy.loop_options.failsafe and all(program.compute_bound for program in setting.programs))


def is_quick(case: Case) -> bool:
    """Return whether the compiled loop is likely to be quicker than the plain engine, with the time to compile it.

    On an NPU always: it has many layers and long runs. Elsewhere only if the loop is compiled already.
    """
    return isinstance(case.device, Npu) or request_loop.is_compiled()


def compile_loop() -> None:
    """Compile the loop now, unless it is in the cache on disk."""
    if request_loop.is_compiled():
        return
    # A run of a microsecond: calling the loop compiles it.
    model = HostModel(segments=("all",), times_s={1: (1e-3,)})
    stream = Stream(model="any", rate=1, deadline_ms=10)
    workload = Workload(stream=(stream,), duration_s=1e-6, warmup_s=0.0)
    case = prepare(workload, Host(cores=1, lanes=1, models={"any": model}))
    serve(case, Fifo(case.setting), "keep", seed=None, record=False)


def compile_in_background() -> bool:
    """Start a process that compiles the loop and outlives this one; return whether one was needed and started."""
    if request_loop.is_compiled():
        return False
    try:
        start_detached(compile_once)
    except OSError:  # the system refuses another process: the plain engine gives the same results
        return False
    return True


def compile_once() -> None:
    """Compile the loop at the lowest priority, unless another process is compiling it."""
    os.nice(19)
    folder = cache_folder(request_loop.serve_until)
    folder.mkdir(parents=True, exist_ok=True)
    # the lock is held until the end, so that only one process compiles
    with (folder / LOCK).open("w") as lock, suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        compile_loop()


def serve(
    case: Case, policy: Policy, late: str, seed: int | None, record: bool, most_missed: Sequence[float] | None = None
) -> Tally:
    """Run a case to its end in the compiled loop.

    late: the rule for late requests. seed: None: the workload's own. record: keep issues and answers.
    most_missed: for each stream, the number of missed deadlines beyond which the run ends early.
    """
    models, terms = lower_case(case, policy)
    rules = loop_rules(case, policy, late, models)
    state = _fresh_state(case, policy, late, terms)
    if isinstance(case.device, Host):
        hand_over, *places = host.draw_places(case, seed)
        state.clocks[k.NEXT_HAND_OVER] = hand_over % max(1, rules.hand_overs)
        terms[:, k.FIRST_RUN], state.streams[:, k.OVERHEADS] = places[: len(terms)], places[len(terms) :]
    if most_missed is not None:
        state.patience[:] = most_missed
    recorded = MOST_RECORDED if record else 0
    log = k.LoopLog(np.empty((recorded, 8), np.int64), np.empty((recorded, 4), np.int64))
    coming = ArrivalBlocks(case, policy, seed)
    refilling = _refills(policy) if rules.refills else None
    while not request_loop.serve(models, terms, rules, state, log, coming.more(), refilling):
        if state.clocks[k.ISSUES] + 1 >= len(state.before):  # more small layers on chip than there are places
            room = np.empty_like(state.before)
            state = state._replace(before=np.concatenate([state.before, room]), peak=np.concatenate([state.peak, room]))
    clocks = state.clocks
    if clocks[k.GIVEN_UP] and rules.device == k.HOST:  # the plain engine counts logged segments then
        clocks[k.STEPS] = clocks[k.ISSUES]
    answers = tuple(Ending(*row) for row in log.answers[: clocks[k.ANSWERED]].tolist())
    return Tally(clocks, state.counts, state.histogram, answers, log.issues[: clocks[k.LOGGED]])


class ArrivalBlocks:
    """The arrivals and exits of all streams, passed to the loop block by block."""

    def __init__(self, case: Case, policy: Policy, seed: int | None) -> None:
        streams = range(len(case.terms))
        self._arrivals = [case.arrivals(index, seed) for index in streams]
        self._leaves = [case.leaves(index, policy.setting, seed) or iter(()) for index in streams]
        no_values = np.empty(0, np.int64)
        self._block = k.LoopArrivals(
            no_values, np.zeros((len(streams), 2), np.int64), no_values, np.zeros((len(streams), 2), np.int64),
            np.ones(len(streams), np.bool_),
        )  # fmt: skip

    def more(self) -> k.LoopArrivals:
        """Return the known arrivals, with another block for every stream that has used up its previous one."""
        old = self._block
        times, known = _refresh_blocks(old.times, old.known, self._arrivals, old.more)
        leaves, leaves_known = _refresh_blocks(old.leaves, old.leaves_known, self._leaves)
        self._block = k.LoopArrivals(times, known, leaves, leaves_known, old.more)
        return self._block


def _refresh_blocks(
    values: Ints, known: Ints, sources: Sequence[Iterator[Ints]], more: npt.NDArray[np.bool_] | None = None
) -> tuple[Ints, Ints]:
    """Return the remaining values of each stream, or its next block if none remain, and their bounds (``known``).

    values, known: the blocks so far. sources: the further blocks of each stream. more: set to False for streams whose
    source has ended.
    """
    remaining = []
    for stream, source in enumerate(sources):
        values_left = values[known[stream, k.HEAD] : known[stream, k.LENGTH]]
        while not len(values_left):
            block = next(source, None)
            if block is None:
                if more is not None:
                    more[stream] = False
                break
            values_left = block
        remaining.append(values_left)
    ends = np.cumsum([len(values_left) for values_left in remaining], dtype=np.int64)
    return np.concatenate(remaining), np.stack([ends - [len(values_left) for values_left in remaining], ends], axis=1)


def lower_case(case: Case, policy: Policy) -> tuple[k.Models, Ints]:
    """Return the programs and terms of a case as arrays; the programs are shared with other runs, and read-only."""
    setting, names = policy.setting, host.names_of(case) if isinstance(case.device, Host) else ()
    models, terms = _lower_cached(setting, policy.loop_options.precise, case.terms, case.device, names)
    terms = terms.copy()
    if not policy.traits.batches:
        terms[:, k.MAX_BATCH] = 1
    if policy.traits.refills:
        terms[:, k.TIMEOUT] = 0
    terms[:, k.WAITS] = -1 if policy.waits is None else policy.waits
    return models, terms


@lru_cache(maxsize=64)
def _lower_cached(
    setting: Setting, precise: bool, requested: tuple[Terms, ...], device: Device, names: tuple[str, ...]
) -> tuple[k.Models, Ints]:
    """Compute the arrays of ``lower_case``. names: models served.

    precise: as of ``estimated``. requested: the terms before the policy reduces them.
    """
    terms = np.zeros((len(requested), k.TERMS), np.int64)
    for row, term in zip(terms, requested, strict=True):
        row[k.BASE], row[k.DEADLINE], row[k.MAX_BATCH] = term.programs, term.deadline, term.max_batch
        row[k.TIMEOUT], row[k.STREAM_PRIORITY], row[k.THINK] = term.timeout, term.priority, term.think
    terms[:, k.HISTOGRAM_ROW] = range(len(terms))
    terms[:, k.EXITS] = [len(setting.programs[term.programs].exits) > 0 for term in requested]
    models = program_arrays(setting.programs, estimated(setting, precise=precise))
    if not isinstance(device, Host):
        return models, terms
    measured = host.measured_work(device, requested, names)
    models.programs[:-1, k.KIND] = measured.kinds
    spread: list[float] = []
    times = list(measured.hand_overs)
    for name, overheads, row in zip(names, measured.overheads, terms, strict=True):
        runs = device.model(name).spread
        row[k.SPREAD], row[k.RUNS_MEASURED] = len(spread), len(runs)
        row[k.FIRST_OVERHEAD], row[k.OVERHEAD_COUNT] = len(times), len(overheads)
        spread += [factor for run in runs for factor in run]
        times += overheads
    return models._replace(
        work=np.array([ticks for program in measured.work for ticks in program], np.float64),
        spread=np.array(spread, np.float64),
        losses=np.array(device.together().losses or np.empty((0, 0)), np.float64),
        times=np.array(times, np.int64),
    ), terms


def program_arrays(programs: Sequence[Program], rests: Sequence[Sequence[int]]) -> k.Models:
    """Return programs as arrays, one after another; *rests*: estimated ticks from each layer to the end."""
    layers = np.zeros((sum(map(len, programs)), 4), np.int64)
    rows = np.zeros((len(programs) + 1, 3), np.int64)
    rows[1:, k.FIRST] = np.cumsum([len(program) for program in programs])
    for row, program, rest in zip(rows, programs, rests, strict=False):  # the last row has FIRST only
        table = layers[row[k.FIRST] : row[k.FIRST] + len(program)]
        table[:, k.FETCH], table[:, k.COMPUTE], table[:, k.REMAINING] = program.fetch, program.compute, rest
        table[[end - 1 for end in program.exits], k.EXIT] = 1
        row[k.COMPUTE_BOUND] = program.compute_bound
    not_measured = np.empty(0)
    return k.Models(layers, rows, not_measured, not_measured, np.empty((0, 0)), np.empty(0, np.int64))


def loop_rules(case: Case, policy: Policy, late: str, models: k.Models) -> k.LoopRules:
    """Return the constants of a run: those of the policy, and those of the case's device and workload."""
    ticks, device = case.clock.ticks, case.device
    rules = policy_rules(policy, late)._replace(
        device=k.NPU if isinstance(device, Npu) else k.HOST,
        buffer=case.setting.buffer,
        largest=int(models.layers[:, k.FETCH].max()),
        lanes=policy.setting.lanes,
        warm=ticks(case.workload.warmup_s),
        end=ticks(case.workload.duration_s),
    )
    if not isinstance(device, Host):
        return rules
    return rules._replace(
        cores=device.together().cores,
        least_speed=LEAST_SPEED,
        abort_from=ticks(device.abort_from_s),
        abort=ticks(device.abort_s),
        step=ticks(device.step_s),
        hand_overs=len(device.hand_over_s),
    )


def policy_rules(policy: Policy, late: str) -> k.LoopRules:
    """Return the constants of a policy and of a rule for late requests; placeholders for device and workload."""
    work, options = late_work(policy, late), policy.loop_options
    return k.LoopRules(
        device=k.NPU,
        policy=RULES.get(type(policy), k.FIFO),
        late=LATE_RULES[work],
        refills=int(policy.traits.refills),
        strict=int(late == "drop"),
        by_deadline=int(policy.traits.for_deadlines),
        late_gives_way=int(policy.traits.defers_late or work is not LateWork.AMONG_OTHERS),
        foresight=policy.foresight,
        stretch=options.stretch,
        failsafe=int(options.failsafe),
        margin=options.margin,
        patience=policy.patience if isinstance(policy, PriorityClasses) else PATIENCE,
    )


def _fresh_state(case: Case, policy: Policy, late: str, terms: Ints) -> k.LoopState:
    """Return the state at the start of a run, in which the clients of closed streams are about to send."""
    streams, lanes = len(terms), policy.setting.lanes
    clients = max(1, *(term.clients for term in case.terms), 1)
    refilled = int(terms[0, k.MAX_BATCH]) * lanes if policy.traits.refills else 0
    places = max(most_batches(late_work(policy, late)), 2 * lanes, refilled)
    largest_batch = int(terms[:, k.MAX_BATCH].max())
    on_chip = MOST_ON_CHIP if isinstance(case.device, Npu) else 1
    state = fresh_state(streams, streams, lanes, places, largest_batch, QUEUE_PLACES, clients, on_chip)
    state.rings[:, k.RETURNING, k.LENGTH] = [term.clients for term in case.terms]
    state.returning[:] = 0
    return state


def fresh_state(
    streams: int, bins: int, lanes: int, places: int, batch: int, queue_places: int, clients: int = 1, on_chip: int = 1
) -> k.LoopState:
    """Return the state at the start of a run.

    bins: rows of the histogram. places: batches of a stream that may be in flight. batch: the largest batch.
    queue_places: waiting requests of a stream. clients: of a closed stream. on_chip: layers in an NPU's buffer.
    """

    def zeros(*shape: int) -> Ints:
        return np.zeros(shape, np.int64)

    before, peak = columns(on_chip)
    return k.LoopState(
        zeros(k.CLOCKS), before, peak,
        np.empty((streams, queue_places, 3), np.int64), np.empty((streams, queue_places, 3), np.int64),
        np.empty((streams, clients, 3), np.int64), zeros(streams, 3, 2), zeros(streams, 4),
        zeros(streams, places, 10), zeros(streams, places, batch, 4),
        zeros(streams, 10), zeros(bins, k.BINS),
        zeros(lanes, k.SEGMENT), np.zeros((lanes, 2)), zeros(2 * lanes, k.SEGMENT), np.full(streams, np.inf),
    )  # fmt: skip


def _refills(policy: Policy) -> r.Refills:
    """Return the options of a policy that refills, for the only stream of the run."""
    program, max_batch, options = policy.setting.programs[0], len(policy.setting.programs), policy.loop_options
    shares = np.zeros((len(program), len(program) + 1))
    for layer in range(len(program)):
        for end, share in remaining_exit_shares(program, layer).items():
            shares[layer, end] = share
    return r.Refills(
        policy=REFILLS[type(policy)],
        miss=program.remaining[0] * options.miss // 100,
        under_way=UNDER_WAY,
        backlog=options.backlog,
        leaving=shares,
        flight=np.zeros((max_batch + 1, 3), np.int64),
        dues=np.zeros((max_batch + 1, max_batch), np.int64),
    )
