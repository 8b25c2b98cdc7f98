"""A cluster in ticks, for the plain run and the compiled one: costs of replicas, requests, and the counts of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.engine.policies import Policy, Setting, make_request_policy
from weft.engine.policies.base import UNBOUNDED_ROUNDS
from weft.engine.tickets import Terms
from weft_cluster.placing.demand import CLOCK, Need, Pieces, buffer_of, pieces_of
from weft_cluster.routing.cluster import Cluster, ClusterSetting, NodeModel
from weft_cluster.routing.router import Replica
from weft_cluster.routing.traffic import RequestBlock

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ClusterTally:
    """Counts of a run, by stream and by machine."""

    counts: Ints
    """(streams, 10), by the columns of ``kernels.request_state``; latencies are those within machines."""
    histogram: Ints
    """Latencies of all streams, by ``request_state.bin_of``."""
    busy: Ints
    """(machines): ticks in which the array was busy."""
    through: Ints
    """(machines): when the array's last work ended."""
    routed: Ints
    """(requests): the stream that each was sent to; empty if that was not recorded."""


class TickedRequests(NamedTuple):
    """A block of requests with times in ticks."""

    time: Ints
    model: Ints
    draws: Floats
    """(requests, 2): random numbers from 0 to 1, for routers that draw."""

    @classmethod
    def none(cls) -> TickedRequests:
        return cls(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, 2)))

    def after(self, others: TickedRequests) -> TickedRequests:
        """The requests of *others*, followed by these."""
        return TickedRequests(
            np.concatenate([others.time, self.time]),
            np.concatenate([others.model, self.model]),
            np.concatenate([others.draws, self.draws]),
        )

    def rest(self, count: int) -> TickedRequests:
        """All requests but the first *count*."""
        return TickedRequests(self.time[count:], self.model[count:], self.draws[count:])


def in_ticks(blocks: Iterable[RequestBlock], seed: int) -> Iterator[TickedRequests]:
    """Convert blocks of requests to ticks; *seed*: of the random numbers for routers."""
    rng = np.random.default_rng([seed, 1])
    for block in blocks:
        time = np.rint(block.times_s / CLOCK.tick_s).astype(np.int64)
        yield TickedRequests(time, block.model, rng.random((len(time), 2)))


@dataclass(frozen=True, slots=True, eq=False)
class LoweredCluster:
    """A cluster in ticks.

    A stream is a model on a node; the streams of a node have consecutive numbers.
    """

    policies: tuple[Policy, ...]
    """By node, with the programs of its streams in order."""
    terms: tuple[Terms, ...]
    """By stream; the index of its program is relative to its node's first."""
    replicas: tuple[tuple[Replica, ...], ...]
    """By model: its replicas, with the costs that gates expect."""
    streams: tuple[tuple[int, ...], ...]
    """By model: the streams of these replicas."""
    begin: tuple[int, ...]
    """The first stream of each node, and then the number of all streams."""
    models: tuple[int, ...]
    """(streams): the model."""
    overhead: tuple[int, ...]
    """(streams): ticks from a client's request to its answer outside its simulated machine; may be below 0, since a
    simulated request may take longer than the real one alone."""
    failures: tuple[tuple[int, int, int], ...]
    """Node, and the periods from which and until which it is down."""
    period: int
    warm: int


def lower_cluster(cluster: Cluster, setting: ClusterSetting) -> LoweredCluster:
    """Convert a cluster and a setting to ticks. PlacingError or InputError if the setting does not fit the cluster."""
    setting.check(cluster)
    begin = (
        0,
        *np.cumsum(
            np.bincount([placed_model.node for placed_model in cluster.placed], minlength=len(cluster.nodes))
        ).tolist(),
    )
    priced = [_price(cluster, setting, placed_model) for placed_model in cluster.placed]
    streams: list[list[int]] = [[] for _ in cluster.models]
    for stream, placed_model in enumerate(cluster.placed):
        streams[placed_model.model].append(stream)
    period = CLOCK.ticks(setting.report_s)
    return LoweredCluster(
        policies=tuple(_policy(cluster, setting, priced, begin, node) for node in range(len(cluster.nodes))),
        terms=tuple(
            Terms(programs=stream - begin[placed.node], deadline=replica.due, max_batch=1, timeout=0, priority=1)
            for stream, (placed, replica) in enumerate(zip(cluster.placed, priced, strict=True))
        ),
        replicas=tuple(_replicas(cluster, priced, model_streams) for model_streams in streams),
        streams=tuple(map(tuple, streams)),
        begin=begin,
        models=tuple(placed_model.model for placed_model in cluster.placed),
        overhead=tuple(replica.overhead for replica in priced),
        failures=_failures(cluster, setting, period),
        period=period,
        warm=CLOCK.ticks(setting.warmup_s),
    )


class _Priced(NamedTuple):
    """A replica with its costs in ticks."""

    pieces: Pieces
    due: int
    """Deadline on the simulated machine, from the request's arrival there."""
    overhead: int
    """As ``LoweredCluster.overhead``."""
    expected: Replica
    """The replica as gates see it; ``cumulative_share`` is set later."""


def _price(cluster: Cluster, setting: ClusterSetting, placed: NodeModel) -> _Priced:
    """Compute the costs of a model on its node: segments, deadline there, and time in the network."""
    node = cluster.nodes[placed.node]
    need, network_s = placed.need.at_speed(node.speed), 2 * setting.hop_of(node)
    pieces = pieces_of(need, node.overlap)
    due = pieces.due(float(cluster.deadlines_s[placed.model]) - network_s - need.alone_s)
    overhead = CLOCK.ticks(network_s + need.alone_s) - pieces.alone
    expected_need = need if setting.knows_speeds else placed.need
    return _Priced(pieces, due, overhead, _replica_for_gates(placed.node, expected_need, node.overlap, network_s))


def _replica_for_gates(node: int, need: Need, overlap: float, network_s: float) -> Replica:
    """Return the replica as gates see it; on an idle machine its times add up to the time of a request alone."""
    pieces = pieces_of(need, overlap)
    array, channel = pieces.segments * pieces.array, pieces.segments * pieces.channel
    return Replica(node, array, channel, CLOCK.ticks(network_s + need.alone_s) - max(array, channel))


def _policy(
    cluster: Cluster, setting: ClusterSetting, priced: Sequence[_Priced], begin: Sequence[int], node: int
) -> Policy:
    """The scheduling policy of a node, with the programs of its streams.

    priced: by stream. begin: the first stream of each node.
    """
    node_streams = range(begin[node], begin[node + 1])
    programs = tuple(
        priced[stream].pieces.program(cluster.models[cluster.placed[stream].model]) for stream in node_streams
    )
    return make_request_policy(setting.policy, Setting(programs, buffer_of(programs), UNBOUNDED_ROUNDS))


def _replicas(cluster: Cluster, priced: Sequence[_Priced], streams: Sequence[int]) -> tuple[Replica, ...]:
    """The replicas of a model as gates see them, with their cumulative shares; *streams*: of the model."""
    cumulative_shares = np.cumsum([cluster.placed[stream].share for stream in streams]).tolist()
    return tuple(
        priced[stream].expected._replace(cumulative_share=share)
        for stream, share in zip(streams, cumulative_shares, strict=True)
    )


def _failures(cluster: Cluster, setting: ClusterSetting, period: int) -> tuple[tuple[int, int, int], ...]:
    """The failures in whole periods, each at least one long: (node, first period, period after the last)."""
    names = {node.name: number for number, node in enumerate(cluster.nodes)}
    failures = []
    for failure in setting.failures:
        begin = CLOCK.ticks(failure.start_s) // period
        end = max(begin + 1, CLOCK.ticks(failure.start_s + failure.length_s) // period)
        failures.append((names[failure.machine], begin, end))
    return tuple(failures)
