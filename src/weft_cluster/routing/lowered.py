"""A cluster in ticks, for the plain run and the compiled one: times and deadlines of replicas, and gates' estimates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.engine.policies import Policy, Setting, make_request_policy
from weft.engine.policies.base import UNBOUNDED_ROUNDS
from weft.engine.tickets import Terms
from weft_cluster.placing.demand import Need
from weft_cluster.placing.pieces import CLOCK, Pieces, buffer_of, pieces_of
from weft_cluster.routing.cluster import Cluster, NodeModel
from weft_cluster.routing.router import Replica
from weft_cluster.routing.setting import ClusterSetting

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class LoweredCluster:
    """Streams are models on nodes, those of a node beside each other."""

    policies: tuple[Policy, ...]
    """Of each node, with the programs of its streams in order."""
    terms: tuple[Terms, ...]
    """Of each stream; its program is counted from its node's first."""
    replicas: tuple[tuple[Replica, ...], ...]
    """Of each model, as gates see them..."""
    streams: tuple[tuple[int, ...], ...]
    """... and which streams they are."""
    begin: tuple[int, ...]
    """The first stream of each node, and the number of them all."""
    models: tuple[int, ...]
    """(streams): whose requests it serves."""
    besides: tuple[int, ...]
    """(streams): ticks from a client's request to its answer beyond those in its simulated machine; may be below 0."""
    failures: tuple[tuple[int, int, int], ...]
    """Node, and the periods from which and until which it is down."""
    period: int
    warm: int


def lower_cluster(cluster: Cluster, setting: ClusterSetting) -> LoweredCluster:
    """Price every replica on its node."""
    setting.check(cluster)
    begin = (0, *np.cumsum(np.bincount([one.node for one in cluster.placed], minlength=len(cluster.nodes))).tolist())
    priced = [_priced(cluster, setting, placed_model) for placed_model in cluster.placed]
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
        replicas=tuple(_replicas(cluster, priced, own) for own in streams),
        streams=tuple(map(tuple, streams)),
        begin=begin,
        models=tuple(placed_model.model for placed_model in cluster.placed),
        besides=tuple(replica.besides for replica in priced),
        failures=_failures(cluster, setting, period),
        period=period,
        warm=CLOCK.ticks(setting.warmup_s),
    )


class _Priced(NamedTuple):
    """A replica in ticks."""

    pieces: Pieces
    due: int
    besides: int
    seen: Replica
    """As gates see it; its share comes later."""


def _priced(cluster: Cluster, setting: ClusterSetting, placed: NodeModel) -> _Priced:
    node = cluster.nodes[placed.node]
    need, way_s = placed.need.at_speed(node.speed), 2 * setting.hop_of(node)
    pieces = pieces_of(need, node.overlap)
    due = pieces.due(float(cluster.deadlines_s[placed.model]) - way_s - need.alone_s)
    besides = CLOCK.ticks(way_s + need.alone_s) - pieces.alone
    believed = need if setting.knows_speeds else placed.need
    return _Priced(pieces, due, besides, _seen(placed.node, believed, node.overlap, way_s))


def _seen(node: int, need: Need, overlap: float, way_s: float) -> Replica:
    """The replica as gates see it: on an idle machine a request takes its time alone."""
    pieces = pieces_of(need, overlap)
    array, channel = pieces.segments * pieces.array, pieces.segments * pieces.channel
    return Replica(node, array, channel, CLOCK.ticks(way_s + need.alone_s) - max(array, channel))


def _policy(
    cluster: Cluster, setting: ClusterSetting, priced: Sequence[_Priced], begin: Sequence[int], node: int
) -> Policy:
    own = range(begin[node], begin[node + 1])
    programs = tuple(priced[stream].pieces.program(cluster.models[cluster.placed[stream].model]) for stream in own)
    return make_request_policy(setting.policy, Setting(programs, buffer_of(programs), UNBOUNDED_ROUNDS))


def _replicas(cluster: Cluster, priced: Sequence[_Priced], streams: Sequence[int]) -> tuple[Replica, ...]:
    reach = np.cumsum([cluster.placed[stream].share for stream in streams]).tolist()
    return tuple(priced[stream].seen._replace(until=until) for stream, until in zip(streams, reach, strict=True))


def _failures(cluster: Cluster, setting: ClusterSetting, period: int) -> tuple[tuple[int, int, int], ...]:
    """In whole periods, one at least."""
    names = {node.name: number for number, node in enumerate(cluster.nodes)}
    failures = []
    for failure in setting.failures:
        begin = CLOCK.ticks(failure.start_s) // period
        end = max(begin + 1, CLOCK.ticks(failure.start_s + failure.length_s) // period)
        failures.append((names[failure.machine], begin, end))
    return tuple(failures)
