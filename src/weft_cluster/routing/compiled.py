"""The compiled run of a cluster (``kernels.cluster_loop``), fed with requests block by block.

*lowered* is the cluster in ticks (``LoweredCluster``).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import numpy as np
import numpy.typing as npt

from weft.base.errors import InputError
from weft.engine.batches import most_batches
from weft.engine.lateness import late_work
from weft.kernels import request_state as k
from weft.kernels.buffer import NEVER
from weft.kernels.request_loop import fresh_heads
from weft.simulation.requests import estimates
from weft.simulation.requests.compiled import fresh_state, policy_rules, program_arrays
from weft_cluster.kernels import cluster_loop
from weft_cluster.kernels import cluster_loop as c
from weft_cluster.routing.cluster import ClusterSetting
from weft_cluster.routing.lowered import ClusterTally, LoweredCluster, TickedRequests
from weft_cluster.routing.router import ROUTERS

Ints = npt.NDArray[np.int64]

QUEUE_PLACES = 1024
"""Capacity of a model's queue on a machine, and of its queue of late requests; more requests are refused."""
LAYERS_AHEAD = 4096
"""Capacity for layers that are issued and not computed on a machine; many more than fit in its weight buffer."""


def serve(
    lowered: LoweredCluster, setting: ClusterSetting, blocks: Iterable[TickedRequests], *, record: bool = False
) -> ClusterTally:
    """Run a cluster until all requests are answered.

    record: keep the stream that each request was sent to.
    """
    run = _CompiledRun(lowered, setting)
    period, unrouted, routed = lowered.period, TickedRequests.none(), []
    for block in chain(blocks, [None]):
        requests = unrouted if block is None else block.after(unrouted)
        # The period of the last request is left for the next block, which may have more requests of it.
        whole_periods = 0 if not len(requests.time) else int(requests.time[-1]) // period + (block is None)
        sent = run.until(whole_periods * period, requests)
        unrouted = requests.rest(len(sent))
        routed += [sent] if record else []
    run.until(k.NONE, unrouted)
    return run.tally(np.concatenate(routed) if record else np.empty(0, np.int64))


class _CompiledRun:
    """The arrays of a compiled run, between blocks of requests."""

    def __init__(self, lowered: LoweredCluster, setting: ClusterSetting) -> None:
        self._models, self._terms, self._rules = _machine_arrays(lowered, setting)
        self._tables = _tables(lowered, self._models)
        self._routing = c.ClusterRules(list(ROUTERS).index(setting.router), setting.gates, lowered.period, setting.lag)
        nodes, batches = len(lowered.policies), most_batches(late_work(lowered.policies[0], setting.late))
        self._state = _fresh_machines(lowered, batches)
        self._cluster = _fresh_gates(nodes, len(lowered.replicas), setting)
        self._log = k.LoopLog(np.empty((nodes, 0, 8), np.int64), np.empty((nodes, 0, 4), np.int64))
        self._heads = fresh_heads(self._state, lanes=1)

    def until(self, end: int, requests: TickedRequests) -> Ints:
        """Run the periods that begin before *end* (NONE: until all is done).

        Returns the stream that each request was sent to; requests from *end* on are not routed yet.
        """
        stream_count, progress = len(self._tables.compute), self._cluster.progress
        block = c.ClusterRequests(
            *requests,
            np.empty(len(requests.time), np.int64),
            np.empty(len(requests.time), np.int64),
            np.empty(stream_count, np.int64),
            np.empty((stream_count, 2), np.int64),
        )
        progress[c.REQUEST] = 0
        if not cluster_loop.run(
            end, self._models, self._terms, self._rules, self._state, self._log, self._heads,
            self._tables, self._routing, self._cluster, block,
        ):  # fmt: skip
            raise InputError("a machine was given more pieces ahead than are kept; give its models longer segments")
        progress[c.NUMBER] += progress[c.REQUEST]
        return block.routed[: progress[c.REQUEST]]

    def tally(self, routed: Ints) -> ClusterTally:
        state, clocks = self._state, self._state.clocks
        return ClusterTally(
            state.counts, state.histogram[0], clocks[:, k.COMPUTED].copy(), clocks[:, k.ARRAY].copy(), routed
        )


def _machine_arrays(lowered: LoweredCluster, setting: ClusterSetting) -> tuple[k.Models, Ints, k.LoopRules]:
    """Return the programs of all machines, one after another, the terms of each stream, and the rules of all machines.

    ``ClusterTables`` has the values that differ by machine.
    """
    terms = np.zeros((len(lowered.terms), k.TERMS), np.int64)
    for stream, (row, term) in enumerate(zip(terms, lowered.terms, strict=True)):
        row[k.BASE], row[k.DEADLINE] = stream, term.deadline
        row[k.MAX_BATCH], row[k.TIMEOUT] = term.max_batch, term.timeout
        row[k.WAITS] = -1  # batches do not wait in proportion to the time to the deadline
        row[k.STREAM_PRIORITY], row[k.THINK] = term.priority, term.think
    rules = policy_rules(lowered.policies[0], setting.late)._replace(warm=lowered.warm)
    programs = [program for policy in lowered.policies for program in policy.setting.programs]
    rests = [rest for policy in lowered.policies for rest in estimates(policy)]
    return program_arrays(programs, rests), terms, rules


def _tables(lowered: LoweredCluster, models: k.Models) -> c.ClusterTables:
    """Lay out streams and machines as the kernel's tables."""
    replicas, streams = list(chain(*lowered.replicas)), np.array(list(chain(*lowered.streams)), np.int64)

    def by_stream(name: str) -> Ints:
        """Return a field of the replicas, ordered by the numbers of their streams."""
        column = np.empty(len(streams), np.int64)
        column[streams] = [getattr(replica, name) for replica in replicas]
        return column

    return c.ClusterTables(
        first=np.cumsum([0, *map(len, lowered.streams)], dtype=np.int64),
        stream=streams,
        cumulative_share=np.array([replica.cumulative_share for replica in replicas]),
        machine=by_stream("machine"),
        begin=np.array(lowered.begin, np.int64),
        compute=by_stream("compute"),
        fetch=by_stream("fetch"),
        overhead=by_stream("overhead"),
        rest_compute=_sums_to_end(models.layers[:, k.COMPUTE], models.programs[:, k.FIRST]),
        rest_fetch=_sums_to_end(models.layers[:, k.FETCH], models.programs[:, k.FIRST]),
        buffer=np.array([policy.setting.buffer for policy in lowered.policies], np.int64),
        largest=np.array(
            [max((p.largest_fetch for p in policy.setting.programs), default=0) for policy in lowered.policies],
            np.int64,
        ),
        failures=np.array(lowered.failures, np.int64).reshape(-1, 3),
    )


def _sums_to_end(values: Ints, first: Ints) -> Ints:
    """Return the sums of *values* from each layer to its program's end; *first*: the first layer of each program."""
    before = np.concatenate([[0], np.cumsum(values)])
    ends = np.repeat(before[first[1:]], np.diff(first))
    return np.asarray(ends - before[:-1])


def _fresh_machines(lowered: LoweredCluster, batches: int) -> k.LoopState:
    """Return the state of idle machines; *batches*: largest number of batches in flight per stream."""
    nodes = len(lowered.policies)
    before, peak = np.empty((nodes, LAYERS_AHEAD), np.int64), np.empty((nodes, LAYERS_AHEAD), np.int64)
    before[:, 0], peak[:, 0] = 0, NEVER
    state = fresh_state(len(lowered.terms), bins=1, lanes=1, places=batches, batch=1, queue_places=QUEUE_PLACES)
    return state._replace(clocks=np.zeros((nodes, k.CLOCKS), np.int64), before=before, peak=peak)


def _fresh_gates(nodes: int, models: int, setting: ClusterSetting) -> c.ClusterState:
    """Return the state of gates before the first report: all machines are up and idle."""
    ring, gates = setting.lag + 1, setting.gates

    def zeros(*shape: int) -> Ints:
        return np.zeros(shape, np.int64)

    reports = zeros(ring, nodes, 4)
    reports[:, :, c.UP] = 1
    return c.ClusterState(
        progress=zeros(3),
        reports=reports,
        sent=zeros(gates, ring, nodes, 2),
        ahead=zeros(gates, nodes, 4),
        as_of=zeros(gates, nodes),
        up=np.ones(nodes, np.bool_),
        turns=zeros(gates, models),
    )
